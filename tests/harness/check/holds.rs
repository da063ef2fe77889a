//! Holds as the clients saw them: when each was granted, and how long it must have lasted.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use super::operations::{Operation, Outcome};
use super::{Order, Violation, greatest_before};
use crate::history::{Mode, OpId, Verb};

const NS_PER_MS: u64 = 1_000_000;

/// One grant: everything that was told about one token of one owner.
#[derive(Debug)]
pub(super) struct Hold<'a> {
    key: &'a str,
    owner: &'a str,
    token: u64,
    mode: Mode,
    limit: Option<u32>,
    ticket: Option<u64>,
    /// The operation whose reply told of the grant first.
    told_by: OpId,
    /// The grant was made in between these two.
    asked_ns: u64,
    told_ns: u64,
    /// From `told_ns` until before this moment the hold must have existed; for no time at all if it is not later.
    until_ns: u64,
}

/// The operations of one owner on one key, in the order sent, and the revocations that may have met it.
type Deeds<'o, 'a> = Vec<&'o Operation<'a>>;

/// All holds, and the early losses among them.
pub(super) fn collect<'a>(
    operations: &[Operation<'a>],
    violations: &mut Vec<Violation>,
) -> (Vec<Hold<'a>>, Vec<Violation>) {
    let mut deeds: BTreeMap<(&str, &str), Deeds<'_, 'a>> = BTreeMap::new();
    let mut revocations: BTreeMap<&str, Deeds<'_, 'a>> = BTreeMap::new();
    let mut grants: BTreeMap<(&str, &str, u64), &Operation<'a>> = BTreeMap::new();
    for operation in operations {
        let call = operation.call;
        match call.verb {
            Verb::Write => {}
            Verb::Revoke => revocations.entry(&call.key).or_default().push(operation),
            Verb::Acquire | Verb::Convert | Verb::Renew | Verb::Release => {
                deeds.entry((&call.key, &call.owner)).or_default().push(operation);
            }
        }
        if let Some(token) = operation.granted() {
            let first = grants.entry((&call.key, &call.owner, token)).or_insert(operation);
            if operation.done_ns < first.done_ns {
                *first = operation;
            }
        } else if operation.asks_for_a_lock() && operation.outcome == Outcome::Ok(None) {
            violations.push(Violation::NoToken(operation.id));
        }
    }
    let none = Vec::new();
    let mut early_losses = Vec::new();
    let holds = grants.into_iter().map(|((key, owner, token), told_by)| {
        let deeds = &deeds[&(key, owner)];
        let mut hold = granted(told_by, token, deeds);
        let revocations = revocations.get(key).unwrap_or(&none);
        early_losses.extend(hold.follow(deeds, revocations));
        hold
    });
    let holds = holds.collect();
    (holds, early_losses)
}

/// The hold at the moment of its grant.
fn granted<'a>(told_by: &Operation<'a>, token: u64, deeds: &Deeds<'_, 'a>) -> Hold<'a> {
    let requests = || deeds.iter().filter(|deed| deed.asks_for_a_lock());
    // A request whose reply was lost may be the one that was granted.
    let may_have_brought_it = |deed: &&&Operation<'_>| match deed.outcome {
        Outcome::Ok(other) => other == Some(token),
        Outcome::Queued | Outcome::Unknown | Outcome::Missing => deed.sent_ns < told_by.done_ns,
        Outcome::Refused => false,
    };
    let asked_ns = requests().filter(may_have_brought_it).map(|deed| deed.sent_ns).min();
    Hold {
        key: &told_by.call.key,
        owner: &told_by.call.owner,
        token,
        mode: told_by.call.mode,
        limit: told_by.call.limit,
        ticket: requests().filter(may_have_brought_it).find_map(|deed| deed.call.ticket),
        told_by: told_by.id,
        asked_ns: asked_ns.unwrap_or(told_by.sent_ns),
        told_ns: told_by.done_ns,
        until_ns: told_by.done_ns,
    }
}

impl Hold<'_> {
    /// Follows the hold through all that its owner and others did, sets `until_ns`, and returns its early losses.
    fn follow(&mut self, deeds: &Deeds<'_, '_>, revocations: &Deeds<'_, '_>) -> Vec<Violation> {
        let deeds: Vec<_> = deeds.iter().copied().filter(|deed| self.may_meet(deed)).collect();
        let ended_by_wish_ns = self.first_wish_to_end(&deeds, revocations);
        let mut promised_ns = self.told_ns;
        let mut ended_ns = ended_by_wish_ns;
        let mut losses = Vec::new();
        for (index, deed) in deeds.iter().enumerate() {
            let lease_ns = lease_in_force(deed, &deeds[..index]);
            let lease_end_ns = deed.sent_ns.saturating_add(lease_ns);
            match (deed.call.verb, deed.outcome) {
                (Verb::Acquire | Verb::Convert, Outcome::Ok(_)) => {
                    promised_ns = promised_ns.max(lease_end_ns);
                }
                (Verb::Renew, Outcome::Ok(_)) => promised_ns = lease_end_ns,
                (Verb::Renew, Outcome::Unknown | Outcome::Missing) => {
                    promised_ns = promised_ns.min(lease_end_ns);
                }
                (Verb::Renew | Verb::Release, Outcome::Refused) => {
                    let held = deed.sent_ns >= self.told_ns;
                    if held && deed.done_ns < promised_ns.min(ended_by_wish_ns) {
                        losses.push(Violation::LostEarly(deed.id));
                    }
                    ended_ns = ended_ns.min(deed.sent_ns);
                }
                _ => {}
            }
        }
        self.until_ns = promised_ns.min(ended_ns);
        losses
    }

    /// Whether an operation of the owner may be about this hold.
    fn may_meet(&self, deed: &Operation<'_>) -> bool {
        let in_time = deed.done_ns > self.asked_ns;
        in_time
            && match deed.call.verb {
                Verb::Acquire | Verb::Convert => deed.granted() == Some(self.token) || deed.call.verb == Verb::Convert,
                Verb::Renew | Verb::Release => deed.call.token.is_none_or(|token| token == self.token),
                Verb::Revoke | Verb::Write => false,
            }
    }

    /// When somebody first sent something that may end the hold on purpose.
    fn first_wish_to_end(&self, deeds: &[&Operation<'_>], revocations: &Deeds<'_, '_>) -> u64 {
        let brought_it = |deed: &Operation<'_>| deed.id == self.told_by;
        let own = deeds.iter().filter(|deed| {
            let ends = matches!(deed.call.verb, Verb::Release | Verb::Convert);
            ends && deed.may_have_happened() && !brought_it(deed)
        });
        let others = revocations.iter().filter(|revocation| {
            let meant = revocation.call.owner.is_empty() || revocation.call.owner == self.owner;
            meant && revocation.may_have_happened() && revocation.done_ns > self.asked_ns
        });
        own.chain(others).map(|deed| deed.sent_ns).min().unwrap_or(u64::MAX)
    }

    fn certain(&self) -> bool {
        self.told_ns < self.until_ns
    }
}

/// What `deed` promises at least. A renewal replaces the lease; so one that was still under way when `deed` was sent may be
/// performed after it, and put its own lease in the place of this one.
fn lease_in_force(deed: &Operation<'_>, earlier: &[&Operation<'_>]) -> u64 {
    let lease_ns = |deed: &Operation<'_>| deed.call.lease_ms.unwrap_or(0).saturating_mul(NS_PER_MS);
    let under_way = earlier.iter().filter(|other| {
        let renews = other.call.verb == Verb::Renew && other.may_have_happened();
        renews && other.done_ns > deed.sent_ns
    });
    under_way.map(|other| lease_ns(other)).fold(lease_ns(deed), u64::min)
}

/// Tokens that name two grants: of two owners or locks, or of one owner before and after a release.
pub(super) fn tokens_twice(holds: &[Hold<'_>], operations: &[Operation<'_>]) -> Vec<Violation> {
    let mut first_by_token: BTreeMap<u64, &Hold<'_>> = BTreeMap::new();
    let mut violations = Vec::new();
    for hold in holds {
        if let Some(first) = first_by_token.insert(hold.token, hold) {
            violations.push(Violation::TokenTwice(hold.token, first.told_by, hold.told_by));
        }
    }
    // Who released what, by which token, and when that was confirmed first.
    let mut released: BTreeMap<(&str, &str, u64), u64> = BTreeMap::new();
    for operation in operations {
        let call = operation.call;
        match (call.verb, operation.outcome, call.token, operation.granted()) {
            (Verb::Release, Outcome::Ok(_), Some(token), _) => {
                let done = released.entry((&call.key, &call.owner, token)).or_insert(u64::MAX);
                *done = operation.done_ns.min(*done);
            }
            (_, _, _, Some(token)) => {
                let done = released.get(&(call.key.as_str(), call.owner.as_str(), token));
                if done.is_some_and(|done| *done < operation.sent_ns) {
                    let first = first_by_token[&token].told_by;
                    violations.push(Violation::TokenTwice(token, first, operation.id));
                }
            }
            _ => {}
        }
    }
    violations
}

/// Grants whose tokens contradict their order in real time.
pub(super) fn out_of_order(holds: &[Hold<'_>], order: Order) -> Vec<Violation> {
    let groups = match order {
        Order::Nowhere => return Vec::new(),
        Order::Everywhere => vec![holds.iter().collect()],
        Order::PerKey => by_key(holds),
    };
    let pairs = groups
        .iter()
        .flat_map(|group| greatest_before(group, |hold| hold.asked_ns, |hold| hold.told_ns, |hold| hold.token));
    pairs
        .filter(|(earlier, later)| earlier.token > later.token)
        .map(|(earlier, later)| Violation::TokenOrder {
            earlier: (earlier.told_by, earlier.token),
            later: (later.told_by, later.token),
        })
        .collect()
}

/// Pairs of holds that must have existed at one time, at least one of them exclusive.
pub(super) fn overlaps(holds: &[Hold<'_>]) -> Vec<Violation> {
    let mut violations = Vec::new();
    for mut group in by_key(holds) {
        group.retain(|hold| hold.certain());
        group.sort_by_key(|hold| hold.told_ns);
        // Of those before, the one of each mode that lasts longest overlaps if any does.
        let mut longest: [Option<&Hold<'_>>; 2] = [None; 2];
        for hold in group {
            let shared = hold.mode == Mode::Shared;
            let rivals = if shared { &longest[..1] } else { &longest[..] };
            let overlapping = rivals.iter().flatten().filter(|rival| rival.until_ns > hold.told_ns);
            violations.extend(overlapping.map(|rival| Violation::Overlap(rival.told_by, hold.told_by)));
            let slot = &mut longest[usize::from(shared)];
            if slot.is_none_or(|longest| longest.until_ns < hold.until_ns) {
                *slot = Some(hold);
            }
        }
    }
    violations
}

/// Shared holds with which their lock must have had more holders than their limit.
pub(super) fn over_limit(holds: &[Hold<'_>]) -> Vec<Violation> {
    let mut violations = Vec::new();
    for mut group in by_key(holds) {
        group.retain(|hold| hold.certain() && hold.mode == Mode::Shared);
        group.sort_by_key(|hold| hold.told_ns);
        // When the holds of before end, the first of them on top.
        let mut ends = BinaryHeap::new();
        for hold in group {
            while ends.peek().is_some_and(|Reverse(end)| *end <= hold.told_ns) {
                ends.pop();
            }
            ends.push(Reverse(hold.until_ns));
            let limit = hold.limit.map_or(usize::MAX, |limit| limit as usize);
            if ends.len() > limit {
                violations.push(Violation::OverLimit(hold.told_by));
            }
        }
    }
    violations
}

/// Requests granted before others of their lock with smaller tickets.
pub(super) fn out_of_turn(holds: &[Hold<'_>]) -> Vec<Violation> {
    let mut violations = Vec::new();
    for mut group in by_key(holds) {
        group.retain(|hold| hold.ticket.is_some());
        group.sort_by_key(|hold| hold.ticket);
        let mut last: Option<&Hold<'_>> = None;
        for hold in group {
            match last {
                Some(last) if last.token > hold.token => {
                    violations.push(Violation::OutOfTurn { overtaken: last.told_by, by: hold.told_by })
                }
                _ => last = Some(hold),
            }
        }
    }
    violations
}

fn by_key<'h, 'a>(holds: &'h [Hold<'a>]) -> Vec<Vec<&'h Hold<'a>>> {
    let mut groups: BTreeMap<&str, Vec<&Hold<'_>>> = BTreeMap::new();
    for hold in holds {
        groups.entry(hold.key).or_default().push(hold);
    }
    groups.into_values().collect()
}
