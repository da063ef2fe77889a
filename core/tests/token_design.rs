//! The model that chose how fencing tokens are made, and the counterexamples of the designs it rejected.
//!
//! Two servers, one lock, everything that can go wrong around a counter: replication that lags, snapshots that are old or gone, a
//! replica promoted while its primary is dead or alive, two primaries that heal, clocks that step back and forth, the key deleted.
//! All sequences up to a length are searched, shortest first. What must hold is what a storage with a fence needs:
//! no token twice; whoever decides now grants above all that was granted before; a primary that has been replaced without knowing
//! never overtakes its successor.
//!
//! The designs are tried under one condition, that of `docs/GUARANTEES.md`: a takeover starts from the old primary's announcement
//! and less than half a reservation behind it, or else from a clock that is ahead of the counter. The chosen design runs the real
//! [`TokenCounter`]: by steps of one token and of almost half a reservation.

use flock_core::TokenCounter;
use flock_core::token::{RESERVE, WallClock};
use std::collections::{HashSet, VecDeque};

/// What a server keeps, by design.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Design {
    /// A counter that is saved with the snapshot, as a key `INCR`ed per grant is.
    Snapshot,
    /// The same, raised to the wall clock when a server starts to decide.
    ClockSeed,
    /// A counter in the value of each lock, as in `HINCRBY lock token 1`.
    PerKey,
    /// The wall clock at each grant, or one more than the last token.
    ClockAtGrants,
    /// Seeded by the clock once, and reserved ahead: [`TokenCounter`].
    ReserveAhead,
}

/// A takeover may lag less than this many tokens behind.
const LAG: u64 = RESERVE / 2;
/// Tokens granted in one go: one, or almost as many as may be lost.
const BURSTS: [u64; 2] = [1, LAG - 2];
/// How far a clock steps.
const CLOCK_STEP: u64 = 4 * RESERVE;
/// How far FLOOR raises: so little that nothing need be announced, and far beyond the reservation.
const RAISES: [u64; 2] = [RESERVE / 4, 3 * RESERVE];
/// What passes until a server has started, on all clocks alike.
const START_TAKES: u64 = RESERVE;

/// What one server knows of tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Counter {
    Plain(u64),
    Real(TokenCounter),
}

impl std::hash::Hash for Counter {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        match self {
            Self::Plain(value) => value.hash(state),
            Self::Real(counter) => (counter.value(), counter.mark(), counter.is_seeded()).hash(state),
        }
    }
}

/// What a primary sends to its replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Sent {
    Granted {
        count: u64,
        last: u64,
    },
    /// FLOOR raised the counter: nothing is sent, or the new mark.
    Raised(Option<u64>),
    Mark(u64),
    Deleted,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Server {
    counter: Counter,
    /// How many clock steps its clock is off.
    clock: i8,
    /// Which incarnation it decides in, if it does.
    decides: Option<u8>,
}

/// A snapshot on the primary's disk: what it knew, and what it has granted since.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Saved {
    counter: Counter,
    incarnation: u8,
    granted_since: u64,
    raised_since: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    servers: [Server; 2],
    /// Which server decides by right: the latest incarnation.
    leader: usize,
    /// Sent by the leader and not received yet.
    in_flight: VecDeque<Sent>,
    /// The latest incarnation whose announcement the other server has received.
    announced: u8,
    saved: Option<Saved>,
    /// How many more tokens a replaced primary that does not know it may grant under the condition.
    stale_may_grant: u64,
    /// How many starts of a server lie behind, on every clock.
    starts: u8,
    /// Every token granted: by which incarnation, from, to.
    granted: Vec<(u8, u64, u64)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Grant { server: usize, count: u64 },
    Receive,
    Save,
    Restart { with_data: bool },
    Promote { old_is_alive: bool },
    Heal,
    ClockBack(usize),
    ClockForward(usize),
    DeleteKey,
    Floor { raise: u64 },
}

impl Counter {
    /// A server starts to decide. Returns what it announces.
    fn start(&mut self, design: Design, clock: WallClock) -> Option<u64> {
        match (self, design) {
            (Self::Plain(value), Design::ClockSeed) => *value = (*value).max(clock.units()),
            (Self::Plain(_), _) => {}
            (Self::Real(counter), _) => return Some(counter.seed(clock)),
        }
        None
    }

    /// Grants `count` tokens: the first, the last, and what is announced on the way.
    fn grant(&mut self, design: Design, count: u64, clock: WallClock) -> (u64, u64, Option<u64>) {
        match self {
            Self::Plain(value) => {
                let least = if design == Design::ClockAtGrants { clock.units() } else { 0 };
                let first = (*value + 1).max(least);
                *value = first + count - 1;
                (first, *value, None)
            }
            Self::Real(counter) => {
                let first = counter.value() + 1;
                let mark = take_many(counter, count);
                (first, counter.value(), mark)
            }
        }
    }

    fn hear(&mut self, sent: Sent) {
        match (self, sent) {
            (Self::Plain(value), Sent::Granted { last, .. }) => *value = last,
            (Self::Plain(value), Sent::Deleted) => *value = 0,
            (Self::Real(counter), Sent::Granted { last, .. }) => counter.saw(last),
            (Self::Real(counter), Sent::Mark(mark) | Sent::Raised(Some(mark))) => counter.saw_mark(mark),
            (Self::Plain(_), Sent::Mark(_) | Sent::Raised(_)) | (Self::Real(_), Sent::Deleted | Sent::Raised(None)) => {
            }
        }
    }

    /// A full resynchronisation: what the other server knows, and nothing less than before.
    fn copy_from(&mut self, other: &Self) {
        match (self, other) {
            (Self::Plain(value), Self::Plain(other)) => *value = (*value).max(*other),
            (Self::Real(counter), Self::Real(other)) => {
                counter.retire();
                counter.saw(other.value());
                counter.saw_mark(other.mark());
            }
            _ => unreachable!("both are of one design"),
        }
    }
}

/// As many grants in a row, in a few calls: straight to where the next announcement falls due, and on.
fn take_many(counter: &mut TokenCounter, mut count: u64) -> Option<u64> {
    let mut announced = None;
    while count > 0 {
        let until_half = (counter.mark() - counter.value()).saturating_sub(RESERVE / 2);
        let step = count.min(until_half + 1);
        counter.saw(counter.value() + step - 1);
        let (_, mark) = counter.take_next().expect("far from the last token");
        announced = mark.or(announced);
        count -= step;
    }
    announced
}

impl State {
    fn new(design: Design) -> Self {
        let counter = match design {
            Design::ReserveAhead => Counter::Real(TokenCounter::default()),
            Design::Snapshot | Design::ClockSeed | Design::PerKey | Design::ClockAtGrants => Counter::Plain(0),
        };
        let mut servers = [(); 2].map(|()| Server { counter: counter.clone(), clock: 0, decides: None });
        servers[0].decides = Some(1);
        let mark = servers[0].counter.start(design, clock(0, 0));
        Self {
            servers,
            leader: 0,
            in_flight: mark.map(Sent::Mark).into_iter().collect(),
            announced: u8::from(design != Design::ReserveAhead),
            saved: None,
            stale_may_grant: 0,
            starts: 0,
            granted: Vec::new(),
        }
    }

    fn highest(&self) -> u64 {
        self.granted.iter().map(|(_, _, last)| *last).max().unwrap_or(0)
    }

    /// A server's wall clock, after so many more starts.
    fn clock(&self, server: usize, starts: u8) -> WallClock {
        clock(self.servers[server].clock, self.starts + starts)
    }

    /// The other server decides too, and does not know that it has been replaced.
    fn has_stale_primary(&self) -> bool {
        self.servers[1 - self.leader].decides.is_some()
    }

    /// Whether the clock alone would start a server above everything.
    fn clock_is_ahead(&self, server: usize) -> bool {
        self.clock(server, 1).units() >= self.highest()
    }

    fn actions() -> Vec<Action> {
        let mut actions = Vec::new();
        for server in 0..2 {
            actions.extend(BURSTS.map(|count| Action::Grant { server, count }));
            actions.extend([Action::ClockBack(server), Action::ClockForward(server)]);
        }
        actions.extend([Action::Receive, Action::Save, Action::Heal, Action::DeleteKey]);
        actions.extend(RAISES.map(|raise| Action::Floor { raise }));
        actions.extend([true, false].map(|with_data| Action::Restart { with_data }));
        actions.extend([true, false].map(|old_is_alive| Action::Promote { old_is_alive }));
        actions
    }

    /// Performs an action; `None` if it is not possible, or if `conditions` hold and it is outside of them.
    fn after(&self, design: Design, action: Action, conditions: bool) -> Option<Self> {
        let mut next = self.clone();
        let (leader, other) = (self.leader, 1 - self.leader);
        match action {
            Action::Grant { server, count } => {
                let incarnation = self.servers[server].decides?;
                let stale = server != leader;
                if stale && conditions && count > self.stale_may_grant {
                    return None;
                }
                let now = self.clock(server, 0);
                let (first, last, mark) = next.servers[server].counter.grant(design, count, now);
                next.granted.push((incarnation, first, last));
                if stale {
                    next.stale_may_grant = self.stale_may_grant.saturating_sub(count);
                } else {
                    if !self.has_stale_primary() {
                        next.in_flight.push_back(Sent::Granted { count, last });
                        next.in_flight.extend(mark.map(Sent::Mark));
                    }
                    if let Some(saved) = &mut next.saved {
                        saved.granted_since += count;
                    }
                }
            }
            Action::Receive => {
                let sent = next.in_flight.pop_front()?;
                next.servers[other].counter.hear(sent);
                if matches!(sent, Sent::Mark(_) | Sent::Raised(Some(_))) {
                    next.announced = self.servers[leader].decides?;
                }
            }
            Action::Save => {
                let counter = self.servers[leader].counter.clone();
                let incarnation = self.servers[leader].decides?;
                next.saved = Some(Saved { counter, incarnation, granted_since: 0, raised_since: false });
            }
            Action::Restart { with_data } => {
                if self.has_stale_primary() {
                    return None; // which of the two comes back is not for them to say
                }
                if with_data && self.saved.is_none() {
                    return None;
                }
                let saved = self.saved.clone().filter(|_| with_data);
                let fresh = saved.as_ref().is_some_and(|saved| {
                    Some(saved.incarnation) == self.servers[leader].decides
                        && saved.granted_since < LAG
                        && !saved.raised_since
                });
                if conditions && !fresh && !self.clock_is_ahead(leader) {
                    return None;
                }
                let nothing = Self::new(design).servers[other].counter.clone();
                next.servers[leader].counter = saved.map_or(nothing, |saved| saved.counter);
                next.start(design, leader);
                let counter = next.servers[leader].counter.clone();
                next.servers[other].counter.copy_from(&counter);
            }
            Action::Promote { old_is_alive } => {
                if self.has_stale_primary() {
                    return None;
                }
                let lag: u64 = self.in_flight.iter().map(lag_of).sum();
                let close = Some(self.announced) == self.servers[leader].decides && lag < LAG;
                if conditions && !close && !self.clock_is_ahead(other) {
                    return None;
                }
                next.stale_may_grant = if close { LAG - 1 - lag } else { 0 };
                next.saved = None;
                next.leader = other;
                next.start(design, other);
                if !old_is_alive {
                    next.heal();
                }
            }
            Action::Heal => {
                if !self.has_stale_primary() {
                    return None;
                }
                next.heal();
            }
            Action::ClockBack(server) if self.servers[server].clock > -1 => next.servers[server].clock -= 1,
            Action::ClockForward(server) if self.servers[server].clock < 2 => next.servers[server].clock += 1,
            Action::ClockBack(_) | Action::ClockForward(_) => return None,
            Action::DeleteKey => {
                if design != Design::PerKey {
                    return None; // touches no counter
                }
                next.servers[leader].counter = Counter::Plain(0);
                next.in_flight.push_back(Sent::Deleted);
            }
            Action::Floor { raise } => {
                let Counter::Real(counter) = &mut next.servers[leader].counter else { return None };
                if self.has_stale_primary() {
                    return None;
                }
                let mark = counter.raise(counter.value() + raise);
                next.in_flight.push_back(Sent::Raised(mark));
                if let Some(saved) = &mut next.saved {
                    saved.raised_since |= mark.is_some();
                }
            }
        }
        Some(next)
    }

    fn start(&mut self, design: Design, server: usize) {
        let incarnation = self.servers.iter().filter_map(|server| server.decides).max().unwrap_or(0) + 1;
        self.starts += 1;
        let clock = self.clock(server, 0);
        let server = &mut self.servers[server];
        server.decides = Some(incarnation);
        let mark = server.counter.start(design, clock);
        self.in_flight = mark.map(Sent::Mark).into_iter().collect();
        if design != Design::ReserveAhead {
            self.announced = incarnation; // these designs have nothing to announce
        }
    }

    /// The server that does not lead follows again, and takes over what the leader knows.
    fn heal(&mut self) {
        let leader = self.servers[self.leader].counter.clone();
        let other = &mut self.servers[1 - self.leader];
        other.decides = None;
        other.counter.copy_from(&leader);
        self.in_flight.clear();
        self.announced = self.servers[self.leader].decides.unwrap_or(0);
        self.stale_may_grant = 0;
    }

    /// What a fenced storage needs, judged at the latest grant.
    fn fault(&self) -> Option<&'static str> {
        let ((incarnation, first, last), before) = self.granted.split_last()?;
        if before.iter().any(|(_, from, to)| first <= to && from <= last) {
            return Some(TWICE);
        }
        let leads = Some(*incarnation) == self.servers[self.leader].decides;
        if leads && before.iter().any(|(_, _, to)| first <= to) {
            return Some(BELOW);
        }
        if before.iter().any(|(newer, from, _)| newer > incarnation && last > from) {
            return Some(OVERTAKES);
        }
        None
    }
}

/// How far a successor is behind that has not received this; an announced raise is as far behind as can be.
fn lag_of(sent: &Sent) -> u64 {
    match sent {
        Sent::Granted { count, .. } => *count,
        Sent::Raised(Some(_)) => LAG,
        Sent::Raised(None) | Sent::Mark(_) | Sent::Deleted => 0,
    }
}

/// A wall clock on a day in 2030, so many steps off, after so many starts.
fn clock(steps: i8, starts: u8) -> WallClock {
    const DAY_IN_2030_US: u64 = 1_900_000_000_000_000;
    let us_per_unit = 10;
    let on_time = DAY_IN_2030_US + u64::from(starts) * START_TAKES * us_per_unit;
    let off = i64::from(steps) * i64::try_from(CLOCK_STEP * us_per_unit).expect("a short step");
    WallClock::from_unix_us(on_time.checked_add_signed(off).expect("after 1970"))
}

/// The shortest sequence that breaks a promise (this one, or any), if there is one; and how many states there are.
fn search(design: Design, conditions: bool, promise: Option<&str>) -> (Option<(&'static str, Vec<Action>)>, usize) {
    let start = State::new(design);
    let mut seen: HashSet<State> = HashSet::from([start.clone()]);
    let mut level = vec![(start, Vec::new())];
    for _ in 0..DEPTH {
        let mut next_level = Vec::new();
        for (state, path) in level {
            for action in State::actions() {
                let Some(next) = state.after(design, action, conditions) else { continue };
                let mut path: Vec<Action> = path.clone();
                path.push(action);
                if let Some(fault) = next.fault().filter(|_| matches!(action, Action::Grant { .. })) {
                    if promise.is_none_or(|promise| promise == fault) {
                        return (Some((fault, path)), seen.len());
                    }
                    continue;
                }
                if seen.insert(next.clone()) {
                    next_level.push((next, path));
                }
            }
        }
        level = next_level;
    }
    (None, seen.len())
}

/// Every rejected design fails within this.
const DEPTH: usize = 6;

fn is_rejected(design: Design, conditions: bool, promise: &str) -> Vec<Action> {
    let (found, states) = search(design, conditions, Some(promise));
    let (_, path) = found.unwrap_or_else(|| panic!("{design:?} survives {states} states: why was it rejected?"));
    println!("{design:?}: {promise}, after {path:?}");
    path
}

const TWICE: &str = "a token is granted twice";
const BELOW: &str = "a new token is below an earlier one";
const OVERTAKES: &str = "a replaced primary overtakes its successor";

#[test]
fn reserving_ahead_keeps_every_promise() {
    let (found, states) = search(Design::ReserveAhead, true, None);
    println!("{:?}: {states} states", Design::ReserveAhead);
    assert_eq!(found, None);
    assert!(states > 100_000, "the search has explored less than it used to");
}

/// Beyond the condition the clocks decide, and they may be wrong: the promise is not made without it.
#[test]
fn reserving_ahead_needs_its_conditions() {
    is_rejected(Design::ReserveAhead, false, TWICE);
    is_rejected(Design::ReserveAhead, false, OVERTAKES);
}

#[test]
fn a_counter_in_the_snapshot_alone_repeats_tokens() {
    is_rejected(Design::Snapshot, true, TWICE);
}

/// The replica is one grant behind, and so is its clock.
#[test]
fn a_clock_seed_alone_repeats_tokens() {
    let path = is_rejected(Design::ClockSeed, true, TWICE);
    assert!(path.iter().any(|action| matches!(action, Action::ClockBack(_) | Action::ClockForward(_))));
}

#[test]
fn a_counter_in_the_value_starts_again_with_the_key() {
    let path = is_rejected(Design::PerKey, true, TWICE);
    assert!(path.contains(&Action::DeleteKey));
}

/// Two primaries, and their clocks decide whose write the storage believes.
#[test]
fn the_clock_at_grants_lets_a_replaced_primary_overtake() {
    is_rejected(Design::ClockAtGrants, true, OVERTAKES);
    is_rejected(Design::ClockAtGrants, true, BELOW);
}

/// The short cut of the model is what as many single grants do.
#[test]
fn grants_in_one_go_are_grants_one_by_one() {
    let mut one_by_one = TokenCounter::default();
    let _ = one_by_one.seed(clock(0, 0));
    let mut in_one_go = one_by_one.clone();
    for burst in [1, LAG - 2, 1, 1, 1, LAG - 2, 7, RESERVE / 4, 2 * RESERVE] {
        let mut announced = None;
        for _ in 0..burst {
            announced = one_by_one.take_next().expect("far from the last token").1.or(announced);
        }
        assert_eq!(take_many(&mut in_one_go, burst), announced);
        assert_eq!(in_one_go, one_by_one);
    }
}
