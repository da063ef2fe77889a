//! Time as numbers. The core reads no clock: the shell passes `now`.

use core::fmt;

/// A point in time: microseconds on a clock that never runs backwards and counts suspended time (`CLOCK_BOOTTIME`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(u64);

impl Time {
    /// The clock's zero.
    pub const ZERO: Self = Self(0);
    /// Later than every deadline. Also the deadline of a hold that was loaded and whose lease has not started yet.
    pub const NEVER: Self = Self(u64::MAX);

    /// The last point at which a hold can end: 1141 years after the clock's zero.
    pub const LAST: Self = Self((1 << 55) - 2);

    /// A point `us` microseconds after the clock's zero.
    #[must_use]
    pub const fn from_us(us: u64) -> Self {
        Self(us)
    }

    /// Microseconds since the clock's zero.
    #[must_use]
    pub const fn as_us(self) -> u64 {
        self.0
    }

    /// `duration` later.
    #[must_use]
    pub fn after(self, duration: Millis) -> Self {
        Self(self.0.saturating_add(duration.as_us()))
    }

    /// How long from `now` until this point, rounded up to whole milliseconds; zero if it has passed.
    #[must_use]
    pub fn left_from(self, now: Self) -> Millis {
        let ms = self.0.saturating_sub(now.0).div_ceil(1000);
        Millis(u32::try_from(ms).unwrap_or(u32::MAX))
    }

    /// Microseconds from `earlier` to this point; zero if `earlier` is later.
    #[must_use]
    pub fn us_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl fmt::Debug for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::NEVER { f.write_str("never") } else { write!(f, "{}us", self.0) }
    }
}

/// A duration in whole milliseconds (at most 49 days; the commands' limits are far below).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Millis(pub u32);

impl Millis {
    /// Milliseconds.
    #[must_use]
    pub const fn as_ms(self) -> u32 {
        self.0
    }

    /// Microseconds.
    #[must_use]
    pub fn as_us(self) -> u64 {
        u64::from(self.0) * 1000
    }
}

impl fmt::Debug for Millis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}ms", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_durations_are_shown_with_their_unit() {
        assert_eq!(alloc::format!("{:?} {:?} {:?}", Time::from_us(5), Time::NEVER, Millis(7)), "5us never 7ms");
    }
}
