//! Everything a run must show, put together: the checker's rules, the search's opinion, the auditor's looks, the storages.

use std::collections::{BTreeMap, BTreeSet};

use flock_tests::check::{Order, Rules, Violation, check};
use flock_tests::fenced_store;
use flock_tests::history::{Call, Event, OpId, Phase, Verb};

use crate::audit::{Audit, Queue};
use crate::faults::{Entries, Kind, Outage, Split};
use crate::search::{Opinion, search};
use crate::unfenced::Meeting;
use crate::worker::{ANSWERED_WITHIN_NS, PROCESSES_PER_NODE};

/// What a run has left behind.
#[derive(Debug)]
pub(crate) struct Evidence {
    pub(crate) events: Vec<Event>,
    pub(crate) faults: Entries,
    pub(crate) audit: Audit,
    pub(crate) fenced: fenced_store::Counts,
    pub(crate) visits: u64,
    pub(crate) meetings: Vec<Meeting>,
    /// What was wrong at the end: something held, somebody waiting, memory that did not come back.
    pub(crate) remains: Vec<String>,
}

/// Holders who worked at one time on a storage without a fence, by why.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DoubleHoldings {
    /// One of them went on beyond its lease, by its own count.
    pub(crate) overstayed: usize,
    /// A fault in between may lose holds: a failover, a kill without fsync, a deletion.
    pub(crate) lost: usize,
    /// There is no excuse.
    pub(crate) unexplained: usize,
}

/// What the judge found.
#[derive(Debug)]
pub(crate) struct Verdict {
    pub(crate) violations: Vec<String>,
    /// The operations that make the first violation of the checker, and no others.
    pub(crate) shrunk: Vec<Event>,
    pub(crate) double_holdings: DoubleHoldings,
    /// Grants that clients heard of, and those among them that no fault may have lost at once: these are judged in full.
    pub(crate) grants: (usize, usize),
    /// The former, one by one.
    pub(crate) told: Vec<Told>,
    pub(crate) opinion: Opinion,
    /// From a fault until somebody was granted a lock that was asked for after it, in microseconds.
    pub(crate) unavailable_us: Vec<(Outage, i64)>,
}

impl Verdict {
    /// The same by kind, in microseconds.
    pub(crate) fn unavailable_us_by_kind(&self) -> BTreeMap<Kind, Vec<i64>> {
        let mut by_kind: BTreeMap<Kind, Vec<i64>> = BTreeMap::new();
        for (outage, us) in &self.unavailable_us {
            by_kind.entry(outage.kind).or_default().push(*us);
        }
        by_kind
    }
}

/// A grant as its client saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Told {
    /// When the client heard of it.
    pub(crate) at_ns: u64,
    /// Since its first request, in microseconds; nothing for a try, which does not wait.
    pub(crate) waited_us: Option<i64>,
}

/// Order is asked for apart: a stale primary's tokens are in none with its successor's.
const EXCLUSION: Rules = Rules { order: Order::Nowhere, exclusion: true, leases: true, fifo: true, answered: true };

/// Judges a run.
pub(crate) fn judge(evidence: &Evidence) -> Verdict {
    let events = &evidence.events;
    let splits = &evidence.faults.splits;
    let found = check(events, &EXCLUSION);
    let in_order = without_stale_grants(events, splits);
    let rules = Rules { order: Order::Everywhere, exclusion: false, leases: false, fifo: false, answered: false };
    let is_order = |violation: &Violation| matches!(violation, Violation::TokenOrder { .. });
    let disorder: Vec<_> = check(&in_order, &rules).into_iter().filter(is_order).collect();
    let opinion = search(events, &evidence.faults);
    let shrunk = match (found.first(), disorder.first(), opinion.impossible.first()) {
        (Some(violation), ..) => shrink(events, violation, &EXCLUSION),
        (None, Some(violation), _) => shrink(&in_order, violation, &rules),
        (None, None, Some(window)) => around(events, &[&window.key], window.from_ns, window.until_ns),
        (None, None, None) => Vec::new(),
    };
    let losses = losses(events);
    let (double_holdings, unexplained) = explain(&evidence.meetings, &losses);
    let mut violations: Vec<String> = found.iter().chain(&disorder).map(ToString::to_string).collect();
    violations.extend(
        opinion.impossible.iter().map(|window| {
            format!("no order explains the grants of {} with the tokens {:?}", window.key, window.tokens)
        }),
    );
    violations.extend(stale_tokens_above(events, splits));
    violations.extend(overtaken(events, &evidence.audit.queues));
    violations.extend(unexplained);
    violations.extend(evidence.audit.complaints.iter().cloned());
    violations.extend(evidence.remains.iter().cloned());
    let granted = grants(events);
    let unavailable_us = evidence.faults.outages.iter().filter_map(|outage| unavailable_us(&granted, outage)).collect();
    let is_safe = |grant: &&Grant<'_>| {
        !losses.iter().any(|(key, from_ns, until_ns)| {
            *key == grant.key && *from_ns <= grant.done_ns && grant.sent_ns <= *until_ns
        })
    };
    let grants = (granted.len(), granted.iter().filter(is_safe).count());
    let told = told(events, &granted);
    Verdict { violations, shrunk, double_holdings, grants, told, opinion, unavailable_us }
}

fn node_of(process: u32) -> usize {
    usize::try_from(process / PROCESSES_PER_NODE).expect("a small number")
}

/// An acquisition that was granted.
struct Grant<'a> {
    sent_ns: u64,
    done_ns: u64,
    node: usize,
    key: &'a str,
    owner: &'a str,
    token: u64,
}

fn grants(events: &[Event]) -> Vec<Grant<'_>> {
    let mut sent: BTreeMap<OpId, (u64, &Call)> = BTreeMap::new();
    let mut grants = Vec::new();
    for event in events {
        let op = id(event);
        match &event.phase {
            Phase::Invoke(call) if call.verb == Verb::Acquire => {
                sent.insert(op, (event.at_ns, call));
            }
            Phase::Ok { token: Some(token) } => {
                if let Some((sent_ns, call)) = sent.remove(&op) {
                    let (done_ns, node) = (event.at_ns, node_of(event.process));
                    grants.push(Grant { sent_ns, done_ns, node, key: &call.key, owner: &call.owner, token: *token });
                }
            }
            _ => {}
        }
    }
    grants
}

/// When each owner was first heard of.
fn first_asked(events: &[Event]) -> BTreeMap<&str, u64> {
    let mut first_asked = BTreeMap::new();
    for event in events {
        if let Phase::Invoke(call) = &event.phase {
            first_asked.entry(call.owner.as_str()).or_insert(event.at_ns);
        }
    }
    first_asked
}

fn told(events: &[Event], grants: &[Grant<'_>]) -> Vec<Told> {
    let first_asked = first_asked(events);
    let waited_us = |grant: &Grant<'_>| {
        let is_try = grant.owner.starts_with("t-");
        (!is_try).then(|| micros(grant.done_ns - first_asked[grant.owner]))
    };
    grants.iter().map(|grant| Told { at_ns: grant.done_ns, waited_us: waited_us(grant) }).collect()
}

fn micros(ns: u64) -> i64 {
    i64::try_from(ns / 1000).unwrap_or(i64::MAX)
}

/// The same history, as if nobody had heard of the grants of an old primary beside its successor.
fn without_stale_grants(events: &[Event], splits: &[Split]) -> Vec<Event> {
    let is_stale = |event: &Event| {
        let of = |split: &Split| split.node == node_of(event.process) && split.from_ns <= event.at_ns;
        // An answer may be under way for as long as its client waits for it; the next time as primary is later than that, or only makes
        // fewer grants count.
        splits.iter().any(|split| of(split) && event.at_ns <= split.until_ns + ANSWERED_WITHIN_NS)
    };
    let mut events = events.to_vec();
    for event in &mut events {
        if matches!(event.phase, Phase::Ok { token: Some(_) }) && is_stale(event) {
            event.phase = Phase::Unknown;
        }
    }
    events
}

/// Tokens that an old primary granted beside its successor must be below all of its successor's: or a storage would refuse the latter.
fn stale_tokens_above(events: &[Event], splits: &[Split]) -> Vec<String> {
    let grants = grants(events);
    // A request that is repeated at the new primary is answered with the token of before, if the hold has arrived there.
    let first_asked = first_asked(events);
    let above = |split: &Split| {
        let in_time = |at_ns: u64| split.from_ns <= at_ns && at_ns <= split.until_ns;
        let stale = grants.iter().filter(|grant| grant.node == split.node && in_time(grant.done_ns));
        let stale = stale.map(|grant| grant.token).max()?;
        let is_new = |grant: &&Grant<'_>| {
            grant.node != split.node && in_time(grant.done_ns) && first_asked[grant.owner] >= split.from_ns
        };
        let new = grants.iter().filter(is_new).map(|grant| grant.token).min()?;
        (stale >= new).then(|| format!("an old primary granted {stale} beside its successor's {new}"))
    };
    splits.iter().filter_map(above).collect()
}

/// Waiters in BLOCK who were seen before others in the queue, were answered on the same connection, and yet were granted later. Who waits
/// by QUEUE may be passed over while nobody listens for it, which a history does not tell: it is not asked here whether it was.
fn overtaken(events: &[Event], queues: &[Queue]) -> Vec<String> {
    let mut tokens: BTreeMap<&str, u64> = BTreeMap::new();
    for grant in grants(events) {
        tokens.insert(grant.owner, grant.token);
    }
    let mut requests: BTreeMap<&str, usize> = BTreeMap::new();
    for event in events {
        if let Phase::Invoke(call) = &event.phase
            && call.verb == Verb::Acquire
        {
            *requests.entry(&call.owner).or_default() += 1;
        }
    }
    let is_live = |owner: &str| owner.starts_with("b-") && requests.get(owner) == Some(&1);
    let mut complaints = Vec::new();
    for queue in queues {
        // From the back: the smallest token of those behind.
        let mut behind: Option<(u64, &str)> = None;
        for owner in queue.owners.iter().rev() {
            // A smaller token is of a grant of before, which its owner had not heard of when it asked again.
            let Some(token) = tokens.get(owner.as_str()).filter(|token| **token > queue.counter) else { continue };
            if let Some((earlier, by)) = behind
                && is_live(owner)
                && earlier < *token
            {
                complaints
                    .push(format!("{by} was behind {owner} in the queue of {}, and was granted first", queue.key));
            }
            if behind.is_none_or(|(smallest, _)| *token < smallest) {
                behind = Some((*token, owner));
            }
        }
    }
    complaints
}

/// The times in which holds of a lock may have been lost, from and until.
fn losses(events: &[Event]) -> Vec<(&str, u64, u64)> {
    let mut begun: BTreeMap<OpId, (&str, u64)> = BTreeMap::new();
    let mut losses: Vec<(&str, u64, u64)> = Vec::new();
    for event in events {
        let op = id(event);
        if let Phase::Invoke(call) = &event.phase {
            if call.verb == Verb::Revoke {
                begun.insert(op, (&call.key, event.at_ns));
            }
        } else if let Some((key, sent_ns)) = begun.remove(&op) {
            losses.push((key, sent_ns, event.at_ns));
        }
    }
    losses
}

/// Why holders met. Each meeting that nothing explains is a violation.
fn explain(meetings: &[Meeting], losses: &[(&str, u64, u64)]) -> (DoubleHoldings, Vec<String>) {
    let mut counts = DoubleHoldings::default();
    let mut complaints = Vec::new();
    for meeting in meetings {
        let asked_ns = meeting.first.asked_ns.min(meeting.second.asked_ns);
        let explains = |(key, from_ns, until_ns): &(&str, u64, u64)| {
            *key == meeting.key && *from_ns <= meeting.at_ns && asked_ns <= *until_ns
        };
        if meeting.somebody_overstayed() {
            counts.overstayed += 1;
        } else if losses.iter().any(explains) {
            counts.lost += 1;
        } else {
            counts.unexplained += 1;
            complaints.push(format!(
                "{} and {} both worked under {}, and neither had overstayed",
                meeting.first.owner, meeting.second.owner, meeting.key
            ));
        }
    }
    (counts, complaints)
}

fn unavailable_us(grants: &[Grant<'_>], outage: &Outage) -> Option<(Outage, i64)> {
    let of = |grant: &&Grant<'_>| grant.sent_ns > outage.from_ns && grant.node == outage.node;
    let granted_ns = grants.iter().filter(of).map(|grant| grant.done_ns).min()?;
    Some((*outage, micros(granted_ns - outage.from_ns)))
}

/// The operations without which the violation would not be there: those of its lock are left out one after the other.
fn shrink(events: &[Event], violation: &Violation, rules: &Rules) -> Vec<Event> {
    let kind = std::mem::discriminant(violation);
    let remains = |events: &[Event]| check(events, rules).iter().any(|other| std::mem::discriminant(other) == kind);
    let ops = violation.operations();
    let named: Vec<_> = events.iter().filter(|event| ops.contains(&id(event))).collect();
    let keys: Vec<_> = named.iter().filter_map(|event| key(event)).collect();
    let times = || named.iter().map(|event| event.at_ns);
    let mut left = around(events, &keys, times().min().unwrap_or(0), times().max().unwrap_or(u64::MAX));
    if !remains(&left) {
        return left;
    }
    let candidates: BTreeSet<OpId> = left.iter().map(id).collect();
    for op in candidates {
        let without: Vec<_> = left.iter().filter(|event| id(event) != op).cloned().collect();
        if remains(&without) {
            left = without;
        }
    }
    left
}

/// What was done to these locks in this time and a little before and after.
fn around(events: &[Event], keys: &[&str], from_ns: u64, until_ns: u64) -> Vec<Event> {
    const MARGIN_NS: u64 = 3_000_000_000;
    let ops: BTreeSet<OpId> =
        events.iter().filter(|event| key(event).is_some_and(|key| keys.contains(&key))).map(id).collect();
    let is_near = |event: &&Event| {
        event.at_ns.saturating_add(MARGIN_NS) >= from_ns && event.at_ns <= until_ns.saturating_add(MARGIN_NS)
    };
    events.iter().filter(is_near).filter(|event| ops.contains(&id(event))).cloned().collect()
}

fn id(event: &Event) -> OpId {
    (event.process, event.op)
}

fn key(event: &Event) -> Option<&str> {
    match &event.phase {
        Phase::Invoke(call) => Some(&call.key),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use flock_tests::history::Mode;

    use super::*;
    use crate::unfenced::Visitor;

    fn event(at_ns: u64, process: u32, op: u64, phase: Phase) -> Event {
        Event { at_ns, process, op, phase }
    }

    /// An acquisition by one request, sent and granted at these times by server 0 or 1.
    fn granted(op: u64, node: u32, owner: &str, sent_ns: u64, done_ns: u64, token: u64) -> [Event; 2] {
        let process = node * PROCESSES_PER_NODE + 1;
        let call = Call::new(Verb::Acquire, "k", owner).lease_ms(1);
        [
            event(sent_ns, process, op, Phase::Invoke(call)),
            event(done_ns, process, op, Phase::Ok { token: Some(token) }),
        ]
    }

    #[test]
    fn wait_is_from_the_first_request_and_a_try_has_none() {
        let mut events = granted(1, 0, "q-1-1", 1_000, 2_000, 10).to_vec();
        events[1].phase = Phase::Unknown;
        events.extend(granted(2, 0, "q-1-1", 5_000, 8_000, 10));
        events.extend(granted(3, 0, "t-2-1", 9_000, 12_000, 11));
        let expected = [Told { at_ns: 8_000, waited_us: Some(7) }, Told { at_ns: 12_000, waited_us: None }];
        assert_eq!(told(&events, &grants(&events)), expected);
    }

    #[test]
    fn waiter_that_is_overtaken_is_found_and_one_that_asked_again_is_not() {
        let seen_at = |counter| {
            let owners = vec!["b-1-1-50".to_owned(), "q-2-1".to_owned()];
            vec![Queue { key: "k", owners, counter }]
        };
        let events: Vec<_> = [granted(1, 0, "b-1-1-50", 0, 90, 11), granted(2, 0, "q-2-1", 1, 50, 10)].concat();
        assert_eq!(overtaken(&events, &seen_at(5)).len(), 1);
        assert_eq!(overtaken(&events, &seen_at(10)), Vec::<String>::new());
        let mut again = events.clone();
        again.extend(granted(3, 0, "b-1-1-50", 60, 95, 11));
        assert_eq!(overtaken(&again, &seen_at(5)), Vec::<String>::new());
        let in_turn = [granted(1, 0, "b-1-1-50", 0, 90, 9), granted(2, 0, "q-2-1", 1, 50, 10)].concat();
        assert_eq!(overtaken(&in_turn, &seen_at(5)), Vec::<String>::new());
    }

    #[test]
    fn token_of_an_old_primary_above_its_successors_is_found() {
        let split = [Split { node: 0, from_ns: 10, until_ns: 100 }];
        let history = |stale| [granted(1, 0, "a", 20, 30, stale), granted(2, 1, "b", 20, 40, 20)].concat();
        assert_eq!(stale_tokens_above(&history(21), &split).len(), 1);
        assert_eq!(stale_tokens_above(&history(19), &split), Vec::<String>::new());
        let mut asked_before = granted(3, 0, "b", 5, 6, 20).to_vec();
        asked_before.extend(history(21));
        assert_eq!(stale_tokens_above(&asked_before, &split), Vec::<String>::new());
    }

    #[test]
    fn grants_of_an_old_primary_are_in_no_order_and_all_others_are() {
        let split = [Split { node: 0, from_ns: 10, until_ns: 100 }];
        let rules = Rules { exclusion: false, ..Rules::default() };
        let stale = [granted(1, 1, "b", 20, 30, 20), granted(2, 0, "a", 40, 50, 10)].concat();
        assert_eq!(check(&without_stale_grants(&stale, &split), &rules), []);
        let newer = [granted(1, 1, "b", 20, 30, 20), granted(2, 1, "a", 40, 50, 10)].concat();
        assert_eq!(check(&without_stale_grants(&newer, &split), &rules).len(), 1);
    }

    #[test]
    fn meeting_is_explained_by_overstaying_or_a_loss_only() {
        let visitor = |owner: &str, believed_until_ns| Visitor {
            owner: owner.into(),
            mode: Mode::Exclusive,
            limit: None,
            asked_ns: 100,
            believed_until_ns,
        };
        let meeting =
            |until| Meeting { key: "k".into(), at_ns: 200, first: visitor("a", until), second: visitor("b", 900) };
        let loss = |from_ns, until_ns| {
            let call = Call::new(Verb::Revoke, "k", "");
            vec![event(from_ns, 9000, 1, Phase::Invoke(call)), event(until_ns, 9000, 1, Phase::Ok { token: None })]
        };
        let told = |meeting: Meeting, events: &[Event]| explain(&[meeting], &losses(events)).0;
        let none = DoubleHoldings::default();
        assert_eq!(told(meeting(150), &[]), DoubleHoldings { overstayed: 1, ..none });
        assert_eq!(told(meeting(900), &loss(120, 130)), DoubleHoldings { lost: 1, ..none });
        assert_eq!(told(meeting(900), &loss(50, 60)), DoubleHoldings { unexplained: 1, ..none });
        assert_eq!(told(meeting(900), &loss(210, 220)), DoubleHoldings { unexplained: 1, ..none });
    }

    #[test]
    fn shrunk_history_has_the_two_holds_and_nothing_else() {
        let lasting = |op, owner: &str, at_ns, token| {
            let mut events = granted(op, 0, owner, at_ns, at_ns + 1, token);
            if let Phase::Invoke(call) = &mut events[0].phase {
                call.lease_ms = Some(1000);
            }
            events
        };
        let mut events = [lasting(1, "a", 10, 10), lasting(2, "b", 20, 11)].concat();
        events.extend(granted(3, 0, "c", 3_000_000_000, 3_000_000_001, 12));
        let found = check(&events, &EXCLUSION);
        let shrunk = shrink(&events, &found[0], &EXCLUSION);
        assert_eq!(shrunk, events[..4]);
    }
}
