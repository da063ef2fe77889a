//! A second opinion on exclusion: a search for an order of all grants and ends that a lock could have performed.
//!
//! It shares no code with the checker of the harness, which sorts and sweeps. Here every hold becomes operations with a begin and an
//! end in real time (its grant, the renewals that were answered, its end), and Wing and Gong's search, with Lowe's memory of what was
//! tried, looks for one point in time for each such that a lock, as written in [`Lock::step`], would have answered so. A lease is an
//! interval: its hold may end from the end of the last promise on, and need not. An outcome that is unknown may have happened or not.
//!
//! Only short windows are searched: the effort can grow without bound.
//!
//! # Source
//! Wing, Gong: Testing and verifying concurrent objects (1993); Lowe: Testing for linearizability (2017).

use std::collections::{BTreeMap, BTreeSet, HashSet};

use flock_tests::history::{Call, Event, Mode, OpId, Phase, Verb};

use crate::faults::{Entries, Kind};

/// Holds in a window; the next one begins half a window later.
const WINDOW: usize = 10;
/// Operations in a window: a bit each.
const OPERATIONS_MAX: usize = 64;
const NS_PER_MS: u64 = 1_000_000;
const NEVER: u64 = u64::MAX;

/// What happened to a lock, as far as the model is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Grant {
        token: u64,
        shared: bool,
        limit: usize,
    },
    /// A renewal that was done: the hold was there.
    Held {
        token: u64,
    },
    /// A renewal that was refused: the hold was not there.
    Gone {
        token: u64,
    },
    End {
        token: u64,
    },
}

/// A step, and between which two moments it was made.
#[derive(Clone, Copy, Debug)]
struct Operation {
    from_ns: u64,
    until_ns: u64,
    step: Step,
}

/// The model: who holds, and the last token.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Lock {
    last: u64,
    holders: Vec<(u64, bool)>,
}

impl Lock {
    /// The lock after the step; none if it would not have answered so.
    fn step(&self, step: Step) -> Option<Lock> {
        let has = |token: u64| self.holders.iter().any(|(held, _)| *held == token);
        let mut next = self.clone();
        match step {
            Step::Grant { token, shared, limit } => {
                let all_share = shared && self.holders.iter().all(|(_, shared)| *shared);
                let fits = self.holders.is_empty() || all_share && self.holders.len() < limit;
                if token <= self.last || !fits {
                    return None;
                }
                next.last = token;
                next.holders.push((token, shared));
            }
            Step::Held { token } if has(token) => {}
            Step::Gone { token } if !has(token) => {}
            Step::End { token } if has(token) => next.holders.retain(|(held, _)| *held != token),
            Step::Held { .. } | Step::Gone { .. } | Step::End { .. } => return None,
        }
        Some(next)
    }
}

/// What the search has looked at.
#[derive(Debug, Default)]
pub(crate) struct Opinion {
    pub(crate) windows: usize,
    pub(crate) operations: usize,
    pub(crate) impossible: Vec<Window>,
}

/// A window for which there is no order.
#[derive(Debug)]
pub(crate) struct Window {
    pub(crate) key: String,
    pub(crate) from_ns: u64,
    pub(crate) until_ns: u64,
    pub(crate) tokens: Vec<u64>,
}

/// Searches all short windows of all locks, except where two primaries granted at one time: their tokens are in no order.
///
/// Where a server goes on from an older state, an end may be forgotten: others have held since then, and yet the hold of before is renewed.
/// So of a hold from before, a renewal after it shows nothing.
pub(crate) fn search(events: &[Event], faults: &Entries) -> Opinion {
    let mut opinion = Opinion::default();
    let rewinds: Vec<u64> =
        faults.outages.iter().filter(|outage| is_rewind(outage.kind)).map(|outage| outage.from_ns).collect();
    for (key, holds) in holds(events, &rewinds) {
        for start in (0..holds.len()).step_by(WINDOW / 2) {
            let window = &holds[start..holds.len().min(start + WINDOW)];
            let (first, last) = (window[0].asked_ns(), window.iter().map(Hold::told_ns).max().unwrap_or(0));
            let operations: Vec<_> = window.iter().flat_map(|hold| hold.0.iter().copied()).collect();
            let is_split = faults.splits.iter().any(|split| split.from_ns <= last && first <= split.until_ns);
            if is_split || operations.len() > OPERATIONS_MAX {
                continue;
            }
            opinion.windows += 1;
            opinion.operations += operations.len();
            if !has_order(&operations) {
                let tokens = window.iter().map(Hold::token).collect();
                opinion.impossible.push(Window { key: key.to_owned(), from_ns: first, until_ns: last, tokens });
            }
        }
    }
    opinion
}

/// Whether the next primary may lack what the last one has answered.
fn is_rewind(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::KillPrimaryFsyncEverysec
            | Kind::KillPrimaryFsyncNo
            | Kind::KillPrimaryAndPromote
            | Kind::PromoteBesideOldPrimary
            | Kind::PromoteAcrossCut
    )
}

/// The operations of one hold; its grant first.
struct Hold(Vec<Operation>);

impl Hold {
    fn asked_ns(&self) -> u64 {
        self.0[0].from_ns
    }

    fn token(&self) -> u64 {
        match self.0[0].step {
            Step::Grant { token, .. } | Step::Held { token } | Step::Gone { token } | Step::End { token } => token,
        }
    }

    fn told_ns(&self) -> u64 {
        self.0[0].until_ns
    }
}

/// One operation of the history, both lines put together.
struct Deed<'a> {
    call: &'a Call,
    sent_ns: u64,
    done_ns: u64,
    outcome: &'a Phase,
}

/// The holds of each lock, in the order in which they were asked for.
fn holds<'a>(events: &'a [Event], rewinds: &[u64]) -> BTreeMap<&'a str, Vec<Hold>> {
    let mut begun: BTreeMap<OpId, (&Call, u64)> = BTreeMap::new();
    let mut deeds: BTreeMap<(&str, &str), Vec<Deed<'_>>> = BTreeMap::new();
    let mut revocations: BTreeMap<&str, Vec<(u64, u64)>> = BTreeMap::new();
    for event in events {
        let id = (event.process, event.op);
        if let Phase::Invoke(call) = &event.phase {
            begun.insert(id, (call, event.at_ns));
        } else if let Some((call, sent_ns)) = begun.remove(&id) {
            if call.verb == Verb::Revoke {
                revocations.entry(&call.key).or_default().push((sent_ns, event.at_ns));
            }
            let done_ns = if event.phase == Phase::Unknown { NEVER } else { event.at_ns };
            let deed = Deed { call, sent_ns, done_ns, outcome: &event.phase };
            deeds.entry((&call.key, &call.owner)).or_default().push(deed);
        }
    }
    let mut holds: BTreeMap<&str, Vec<Hold>> = BTreeMap::new();
    let none = Vec::new();
    for ((key, _), deeds) in &deeds {
        let revocations = revocations.get(key).unwrap_or(&none);
        let tokens: BTreeSet<u64> = deeds.iter().filter_map(granted).collect();
        holds.entry(key).or_default().extend(tokens.into_iter().map(|token| hold(token, deeds, revocations, rewinds)));
    }
    for of_key in holds.values_mut() {
        of_key.sort_by_key(Hold::asked_ns);
    }
    holds
}

fn granted(deed: &Deed<'_>) -> Option<u64> {
    match (deed.call.verb, deed.outcome) {
        (Verb::Acquire, Phase::Ok { token }) => *token,
        _ => None,
    }
}

fn hold(token: u64, deeds: &[Deed<'_>], revocations: &[(u64, u64)], rewinds: &[u64]) -> Hold {
    let grants = || deeds.iter().filter(|deed| granted(deed) == Some(token));
    let told_ns = grants().map(|deed| deed.done_ns).min().unwrap_or(NEVER);
    let may_be_it = |deed: &&Deed<'_>| {
        let open = matches!(deed.outcome, Phase::Unknown | Phase::Queued) && deed.sent_ns < told_ns;
        deed.call.verb == Verb::Acquire && (open || granted(deed) == Some(token))
    };
    let asked_ns = deeds.iter().filter(may_be_it).map(|deed| deed.sent_ns).min().unwrap_or(0);
    let about_it = |deed: &&Deed<'_>| deed.call.token.is_none_or(|shown| shown == token);
    let of = |verb: Verb| deeds.iter().filter(about_it).filter(move |deed| deed.call.verb == verb);
    // No client of a run shortens its lease; so the last promise is the greatest.
    let promise = |deed: &Deed<'_>| deed.sent_ns + deed.call.lease_ms.unwrap_or(0) * NS_PER_MS;
    let renewed = of(Verb::Renew).filter(|deed| matches!(deed.outcome, Phase::Ok { .. }));
    // A grant that was heard of late may have ended before: it promises nothing.
    let promising = |deed: &&Deed<'_>| deed.call.lease_ms.is_some_and(|lease_ms| lease_ms > 0);
    let promised_ns = grants().chain(renewed.clone()).filter(promising).map(promise).max().unwrap_or(0);
    // From what was sent on, the hold may be ended: by its owner, or by others.
    let released = of(Verb::Release).filter(|deed| *deed.outcome != Phase::Refused).map(|deed| deed.sent_ns);
    let revoked = revocations.iter().filter(|(_, done_ns)| *done_ns > asked_ns).map(|(sent_ns, _)| *sent_ns);
    let ends_ns = released.chain(revoked).fold(promised_ns, u64::min).max(asked_ns);
    let is_known = |deed: &&Deed<'_>| !rewinds.iter().any(|at_ns| asked_ns <= *at_ns && *at_ns <= deed.done_ns);
    let held = renewed.clone().filter(is_known);
    let gone = of(Verb::Renew).filter(|deed| *deed.outcome == Phase::Refused && deed.sent_ns >= told_ns);
    let call = grants().next().map(|deed| deed.call);
    let shared = call.is_some_and(|call| call.mode == Mode::Shared);
    let limit = call.and_then(|call| call.limit).map_or(usize::MAX, |limit| limit as usize);
    let at = |from_ns, until_ns, step| Operation { from_ns, until_ns, step };
    let mut operations = vec![at(asked_ns, told_ns, Step::Grant { token, shared, limit })];
    operations.extend(held.map(|deed| at(deed.sent_ns, deed.done_ns, Step::Held { token })));
    operations.extend(gone.map(|deed| at(deed.sent_ns, deed.done_ns, Step::Gone { token })));
    operations.push(at(ends_ns, NEVER, Step::End { token }));
    Hold(operations)
}

/// Whether the operations can be put in an order that the clocks allow and a lock would have answered to.
fn has_order(operations: &[Operation]) -> bool {
    let mut tried = HashSet::new();
    let all = if operations.len() == OPERATIONS_MAX { NEVER } else { (1 << operations.len()) - 1 };
    explore(operations, all, &Lock::default(), &mut tried)
}

fn explore(operations: &[Operation], left: u64, lock: &Lock, tried: &mut HashSet<(u64, Lock)>) -> bool {
    if left == 0 {
        return true;
    }
    if !tried.insert((left, lock.clone())) {
        return false;
    }
    let remaining = || operations.iter().enumerate().filter(|(index, _)| left & (1 << index) != 0);
    // Next can only be what began before everything else was over.
    let horizon_ns = remaining().map(|(_, operation)| operation.until_ns).min().unwrap_or(NEVER);
    remaining().filter(|(_, operation)| operation.from_ns <= horizon_ns).any(|(index, operation)| {
        lock.step(operation.step).is_some_and(|next| explore(operations, left & !(1 << index), &next, tried))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faults::Outage;

    /// A history written by hand, in milliseconds.
    #[derive(Default)]
    struct Script(Vec<Event>);

    impl Script {
        fn op(&mut self, sent_ms: u64, call: Call, done_ms: u64, outcome: Phase) {
            let op = self.0.len() as u64;
            for (at_ms, phase) in [(sent_ms, Phase::Invoke(call)), (done_ms, outcome)] {
                self.0.push(Event { at_ns: at_ms * NS_PER_MS, process: 0, op, phase });
            }
        }

        fn granted(&mut self, sent_ms: u64, call: Call, done_ms: u64, token: u64) {
            self.op(sent_ms, call, done_ms, Phase::Ok { token: Some(token) });
        }

        fn has_order(&self) -> bool {
            search(&self.0, &Entries::default()).impossible.is_empty()
        }
    }

    fn call(verb: Verb, owner: &str) -> Call {
        Call::new(verb, "k", owner).lease_ms(100)
    }

    #[test]
    fn hold_after_hold_has_an_order() {
        let mut script = Script::default();
        script.granted(0, call(Verb::Acquire, "a"), 1, 10);
        script.op(2, call(Verb::Renew, "a").token(10), 3, Phase::Ok { token: None });
        script.granted(4, call(Verb::Acquire, "b"), 150, 11);
        script.op(160, call(Verb::Release, "b").token(11), 161, Phase::Ok { token: None });
        script.granted(162, call(Verb::Acquire, "c"), 163, 12);
        assert!(script.has_order());
    }

    #[test]
    fn two_exclusive_holds_have_none() {
        let mut script = Script::default();
        script.granted(0, call(Verb::Acquire, "a"), 1, 10);
        script.granted(50, call(Verb::Acquire, "b"), 51, 11);
        assert!(!script.has_order());
    }

    #[test]
    fn token_that_falls_has_none() {
        let mut script = Script::default();
        script.granted(0, call(Verb::Acquire, "a"), 1, 11);
        script.granted(200, call(Verb::Acquire, "b"), 201, 10);
        assert!(!script.has_order());
    }

    #[test]
    fn third_of_two_has_none_until_one_is_over() {
        let shared = |owner: &str| call(Verb::Acquire, owner).shared().limit(2);
        let mut script = Script::default();
        script.granted(0, shared("a"), 1, 10);
        script.granted(0, shared("b"), 1, 11);
        script.granted(98, shared("c"), 105, 12);
        assert!(script.has_order());
        script.granted(106, shared("d"), 107, 13);
        assert!(script.has_order());
        script.granted(108, shared("e"), 109, 14);
        assert!(!script.has_order());
    }

    #[test]
    fn loss_within_the_lease_has_none_and_a_revocation_explains_it() {
        let mut script = Script::default();
        script.granted(0, call(Verb::Acquire, "a"), 1, 10);
        script.op(20, call(Verb::Renew, "a").token(10), 21, Phase::Refused);
        assert!(!script.has_order());
        script.op(15, Call::new(Verb::Revoke, "k", ""), 16, Phase::Ok { token: None });
        assert!(script.has_order());
    }

    #[test]
    fn hold_that_comes_back_has_an_order_only_if_its_end_was_forgotten() {
        let mut script = Script::default();
        script.granted(0, call(Verb::Acquire, "a"), 1, 10);
        script.op(5, Call::new(Verb::Revoke, "k", ""), 6, Phase::Ok { token: None });
        script.granted(10, call(Verb::Acquire, "b").lease_ms(5), 11, 11);
        script.op(31, call(Verb::Renew, "a").token(10), 32, Phase::Ok { token: None });
        script.granted(40, call(Verb::Acquire, "c"), 150, 12);
        assert!(!script.has_order());
        // The primary dies before its replica hears of the end and of the second grant.
        let promotion = |at_ms| Outage { kind: Kind::KillPrimaryAndPromote, from_ns: at_ms * NS_PER_MS, node: 1 };
        let has_order = |outages| search(&script.0, &Entries { outages, ..Entries::default() }).impossible.is_empty();
        assert!(has_order(vec![promotion(20)]));
        assert!(!has_order(vec![promotion(33)]));
        assert!(!has_order(vec![Outage { kind: Kind::Failover, ..promotion(20) }]));
    }

    #[test]
    fn grant_that_is_heard_of_after_its_lease_has_an_order() {
        let mut script = Script::default();
        script.op(0, call(Verb::Acquire, "a"), 1, Phase::Queued);
        script.granted(150, call(Verb::Acquire, "b"), 151, 11);
        script.granted(200, call(Verb::Acquire, "a").lease_ms(0), 200, 10);
        script.op(201, call(Verb::Renew, "a").token(10), 202, Phase::Refused);
        assert!(script.has_order());
    }

    #[test]
    fn release_whose_answer_is_lost_may_have_happened_or_not() {
        let mut script = Script::default();
        script.granted(0, call(Verb::Acquire, "a"), 1, 10);
        script.op(2, call(Verb::Release, "a").token(10), 3, Phase::Unknown);
        script.granted(4, call(Verb::Acquire, "b"), 5, 11);
        assert!(script.has_order());
        let mut script = Script::default();
        script.granted(0, call(Verb::Acquire, "a"), 1, 10);
        script.op(2, call(Verb::Release, "a").token(10), 3, Phase::Unknown);
        script.op(10, call(Verb::Renew, "a").token(10), 11, Phase::Ok { token: None });
        assert!(script.has_order());
    }
}
