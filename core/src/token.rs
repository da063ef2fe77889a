//! The fencing counter: one number per server that only rises.
//!
//! A token is handed out per grant: `counter + 1`. Once per incarnation the counter is *seeded* to at least the wall clock, counted
//! in units of 10 us since 2025-01-01T00:00Z, so that a server which lost everything still starts above what it handed out before
//! (up to a mean of 100,000 grants a second). Before that matters, it *reserves ahead*: it announces a mark that it promises not to
//! pass without announcing a higher one; whoever takes over starts from the mark. The wall clock is never read at a grant:
//! otherwise a stale primary in a partition could overtake the real one.
//!
//! This file is the only place that knows the unit and the cap. `core/tests/token_design.rs` holds the model that chose this design
//! and the counterexamples of those it rejected.

use core::fmt;
use core::num::NonZeroU64;

/// A fencing token: 1 to 2^53 - 1, exact in JavaScript numbers; at most 14 digits until 2056, exact in Lua's `tostring` and cjson.
///
/// The storage rule: accept a write if its token is greater than the highest one seen, or equal. No two grants of a lock have the same
/// token, so an equal one is the same grant's. Only where servers with counters of their own may write the same row must the owner be the
/// same as well.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(NonZeroU64);

impl From<Token> for u64 {
    fn from(token: Token) -> Self {
        token.get()
    }
}

/// For storages without unsigned numbers. A token is below 2^53.
impl From<Token> for i64 {
    fn from(token: Token) -> Self {
        token.get().cast_signed()
    }
}

/// What a storage gives back that has only signed numbers.
impl TryFrom<i64> for Token {
    type Error = TokenOutOfRange;

    fn try_from(n: i64) -> Result<Self, TokenOutOfRange> {
        u64::try_from(n).ok().and_then(Self::new).ok_or(TokenOutOfRange)
    }
}

impl TryFrom<u64> for Token {
    type Error = TokenOutOfRange;

    fn try_from(n: u64) -> Result<Self, TokenOutOfRange> {
        Self::new(n).ok_or(TokenOutOfRange)
    }
}

/// The number is no token: it is below 1 or above [`Token::MAX`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TokenOutOfRange;

impl fmt::Display for TokenOutOfRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no token: the number is not between 1 and 2^53 - 1")
    }
}

impl core::error::Error for TokenOutOfRange {}

impl Token {
    /// The smallest token.
    pub const MIN: Self = Self(NonZeroU64::MIN);
    /// The largest token, 2^53 - 1.
    pub const MAX: u64 = (1 << 53) - 1;

    /// `n` as a token, if it is in range.
    #[must_use]
    pub const fn new(n: u64) -> Option<Self> {
        match NonZeroU64::new(n) {
            Some(number) if n <= Self::MAX => Some(Self(number)),
            _ => None,
        }
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0.get()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Seconds from the Unix epoch to 2025-01-01T00:00Z.
const EPOCH_UNIX_S: u64 = 1_735_689_600;
/// Token units in a second: one unit is 10 us.
const UNITS_PER_S: u64 = 100_000;
/// A clock earlier than this counts as this: the time this source was last dated, 2026-11-30T00:00Z.
const BUILD_UNITS: u64 = (1_796_000_000 - EPOCH_UNIX_S) * UNITS_PER_S;
/// A clock later than 14 digits can hold (2056-09-09) is ignored.
const CLOCK_UNITS_MAX: u64 = 99_999_999_999_999;
/// One day of units: how far FLOOR and RESTORE may reach above the counter and the clock.
pub const DAY_UNITS: u64 = 24 * 3600 * UNITS_PER_S;
/// How far ahead of the counter the mark is announced.
pub const RESERVE: u64 = 1 << 20;

/// The wall clock as the shell read it, in token units.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct WallClock {
    /// Token units since 2025-01-01T00:00Z, made sane.
    units: u64,
    /// What was wrong with the reading, if anything.
    fault: Option<ClockFault>,
}

/// Why a wall clock reading was not taken as it is. The operator should hear of it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum ClockFault {
    /// Before the date of this build: counted as that date.
    BeforeBuild,
    /// Later than 14-digit tokens reach (2056): ignored.
    TooLate,
}

impl WallClock {
    /// From microseconds since the Unix epoch (negative or absurd readings included: pass 0 or `u64::MAX`).
    #[must_use]
    pub fn from_unix_us(us: u64) -> Self {
        let units = (us / 10).saturating_sub(EPOCH_UNIX_S * UNITS_PER_S);
        if units < BUILD_UNITS {
            Self { units: BUILD_UNITS, fault: Some(ClockFault::BeforeBuild) }
        } else if units > CLOCK_UNITS_MAX {
            Self { units: BUILD_UNITS, fault: Some(ClockFault::TooLate) }
        } else {
            Self { units, fault: None }
        }
    }

    /// Token units, after the rules above.
    #[must_use]
    pub fn units(self) -> u64 {
        self.units
    }

    /// What was wrong with the reading.
    #[must_use]
    pub fn fault(self) -> Option<ClockFault> {
        self.fault
    }
}

/// The counter and its mark. Neither ever falls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenCounter {
    value: u64,
    mark: u64,
    seeded: bool,
    used: bool,
}

/// The counter has reached [`Token::MAX`]: no further grant is possible.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Exhausted;

impl TokenCounter {
    /// The last token handed out, or seen.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.value
    }

    /// The announced reservation: tokens up to here may have been handed out as far as others know.
    #[must_use]
    pub fn mark(&self) -> u64 {
        self.mark
    }

    /// Whether this incarnation has been seeded; before that nothing may be granted.
    #[must_use]
    pub fn is_seeded(&self) -> bool {
        self.seeded
    }

    /// Whether any token was ever handed out or seen. Before that there is nothing to save.
    #[must_use]
    pub fn is_used(&self) -> bool {
        self.used
    }

    /// Starts an incarnation (boot after loading, promotion): above everything seen, marked, or possible by the clock.
    ///
    /// Returns the new mark, which the shell must announce (effect MARK) before it grants anything.
    #[must_use]
    pub fn seed(&mut self, wall: WallClock) -> u64 {
        self.seeded = true;
        self.value = self.value.max(self.mark).max(wall.units);
        self.reserve()
    }

    /// The mark of this incarnation, also before it is seeded: a primary may be copied when it has just been promoted or loaded. Whoever
    /// takes over from that snapshot must start above what this one hands out.
    #[must_use]
    pub fn mark_once_seeded(&self, wall: WallClock) -> u64 {
        if self.seeded { self.mark } else { self.clone().seed(wall) }
    }

    /// This server is no primary any more: a later promotion seeds again.
    pub fn retire(&mut self) {
        self.seeded = false;
    }

    /// The next token, and the mark to announce with it when half of the reservation is used.
    pub fn take_next(&mut self) -> Result<(Token, Option<u64>), Exhausted> {
        let token = self.value.checked_add(1).and_then(Token::new).ok_or(Exhausted)?;
        self.value = token.get();
        self.used = true;
        Ok((token, self.reserve_if_half_used()))
    }

    /// Others have announced tokens up to `heard`: what is handed out from now on is above that, and above the clock. Not above this
    /// counter's own mark, or two servers that take over from each other would drive each other up.
    pub fn take_over(&mut self, heard: u64, wall: WallClock) {
        self.saw(heard.max(wall.units));
    }

    /// Raises the counter to at least `floor`; returns the mark to announce, if a new one is due.
    pub fn raise(&mut self, floor: u64) -> Option<u64> {
        self.saw(floor);
        self.reserve_if_half_used()
    }

    /// A token or counter seen in a load, a restore or the replication stream: never hand out anything up to it.
    pub fn saw(&mut self, value: u64) {
        self.used = true;
        self.value = self.value.max(value.min(Token::MAX));
    }

    /// A mark seen in a load or the replication stream.
    pub fn saw_mark(&mut self, mark: u64) {
        self.mark = self.mark.max(mark.min(Token::MAX));
    }

    /// Announces a fresh mark: at boot, at promotion, at a slot import, and when a rewrite child is born.
    #[must_use]
    pub fn reserve(&mut self) -> u64 {
        self.mark = self.mark.max(self.value.saturating_add(RESERVE).min(Token::MAX));
        self.mark
    }

    fn reserve_if_half_used(&mut self) -> Option<u64> {
        let unused = self.mark.saturating_sub(self.value);
        (unused < RESERVE / 2 && self.mark < Token::MAX).then(|| self.reserve())
    }

    /// How far the counter runs ahead of the clock, in units of 10 us (negative: behind).
    #[must_use]
    pub fn lead(&self, wall: WallClock) -> i64 {
        i64::try_from(i128::from(self.value) - i128::from(wall.units)).unwrap_or(i64::MAX)
    }

    /// The highest token that FLOOR may raise the counter to: one day above the clock. (Not above the counter, or it could be raised
    /// day by day.)
    #[must_use]
    pub fn floor_max(&self, wall: WallClock) -> u64 {
        self.value.max(wall.units.saturating_add(DAY_UNITS)).min(Token::MAX)
    }

    /// The highest token or mark that RESTORE may bring in: one day above the clock, or what this server has announced itself. (Not
    /// above the counter, or it could be raised day by day.)
    #[must_use]
    pub fn highest_credible(&self, wall: WallClock) -> u64 {
        self.floor_max(wall).max(self.mark)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    /// 2026-11-30T00:53:20Z, the date of this source, in seconds and in units.
    const BUILD_UNIX_S: u64 = 1_796_000_000;
    const BUILD: u64 = 6_031_040_000_000;

    fn clock(units: u64) -> WallClock {
        WallClock::from_unix_us((units + EPOCH_UNIX_S * UNITS_PER_S) * 10)
    }

    #[test]
    fn token_is_its_number() {
        let token = Token::new(7).unwrap();
        assert_eq!((u64::from(token), i64::from(token), token.to_string()), (7, 7, "7".to_string()));
        assert_eq!((Token::try_from(7_u64), Token::try_from(7_i64)), (Ok(token), Ok(token)));
        assert_eq!(Token::try_from(Token::MAX.cast_signed()).map(Token::get), Ok(Token::MAX));
        for wrong in [i64::MIN, -1, 0, Token::MAX.cast_signed() + 1] {
            assert_eq!(Token::try_from(wrong), Err(TokenOutOfRange), "{wrong}");
        }
        assert_eq!(Token::try_from(u64::MAX), Err(TokenOutOfRange));
    }

    #[test]
    fn clock_counts_in_ten_microseconds_from_the_date_of_the_build() {
        assert_eq!(DAY_UNITS, 8_640_000_000);
        let at_build = WallClock::from_unix_us(BUILD_UNIX_S * 1_000_000);
        assert_eq!((at_build.units(), at_build.fault()), (BUILD, None));
        assert_eq!(clock(BUILD + 1).units(), BUILD + 1);
        let before = clock(BUILD - 1);
        assert_eq!((before.units(), before.fault()), (BUILD, Some(ClockFault::BeforeBuild)));
        assert_eq!(clock(CLOCK_UNITS_MAX).fault(), None);
        let late = clock(CLOCK_UNITS_MAX + 1);
        assert_eq!((late.units(), late.fault()), (BUILD, Some(ClockFault::TooLate)));
    }

    #[test]
    fn mark_of_an_incarnation_is_known_before_it_is_seeded() {
        let mut counter = TokenCounter::default();
        counter.saw_mark(BUILD + 5);
        assert_eq!((counter.is_used(), counter.is_seeded()), (false, false));
        let mark = counter.mark_once_seeded(clock(BUILD));
        assert_eq!(mark, BUILD + 5 + RESERVE);
        assert_eq!(counter.seed(clock(BUILD)), mark);
        // From then on no clock changes it.
        assert_eq!(counter.mark_once_seeded(clock(BUILD + DAY_UNITS)), mark);
        assert_eq!(counter.take_next().map(|(token, _)| token.get()), Ok(BUILD + 6));
        assert!(counter.is_used());
        counter.retire();
        assert!(!counter.is_seeded());
        assert_eq!(counter.seed(clock(BUILD)), mark + RESERVE);
    }

    #[test]
    fn who_takes_over_is_above_what_was_heard_and_the_clock() {
        let mut counter = TokenCounter::default();
        counter.take_over(BUILD + 9, clock(BUILD));
        assert_eq!(counter.value(), BUILD + 9);
        counter.take_over(0, clock(BUILD + 20));
        assert_eq!(counter.value(), BUILD + 20);
        counter.take_over(1, clock(BUILD));
        assert_eq!(counter.value(), BUILD + 20);
    }

    #[test]
    fn lead_is_how_far_the_counter_is_ahead() {
        let mut counter = TokenCounter::default();
        counter.saw(BUILD + 7);
        assert_eq!(counter.lead(clock(BUILD)), 7);
        assert_eq!(counter.lead(clock(BUILD + 10)), -3);
    }
}
