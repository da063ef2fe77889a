//! What the guarded storage did, judged by the storage rule.

use std::collections::BTreeMap;

use super::operations::{Operation, Outcome};
use super::{Violation, greatest_before};
use crate::history::Verb;

/// Writes that should have gone the other way.
pub(super) fn violations(operations: &[Operation<'_>]) -> Vec<Violation> {
    let mut by_key: BTreeMap<&str, Vec<&Operation<'_>>> = BTreeMap::new();
    for operation in operations.iter().filter(|operation| operation.call.verb == Verb::Write) {
        by_key.entry(&operation.call.key).or_default().push(operation);
    }
    let mut violations = Vec::new();
    for writes in by_key.values() {
        let accepted: Vec<_> = writes.iter().copied().filter(|write| is_accepted(write)).collect();
        violations.extend(stale(&accepted));
        violations.extend(shared_tokens(&accepted));
        violations.extend(refused_without_reason(writes));
    }
    violations
}

fn is_accepted(write: &Operation<'_>) -> bool {
    matches!(write.outcome, Outcome::Ok(_))
}

fn shown(write: &Operation<'_>) -> u64 {
    write.call.token.unwrap_or(0)
}

fn stale(accepted: &[&Operation<'_>]) -> Vec<Violation> {
    greatest_before(accepted, |write| write.sent_ns, |write| write.done_ns, shown)
        .into_iter()
        .filter(|(newer, write)| shown(newer) > shown(write))
        .map(|(newer, write)| Violation::StaleWrite { newer: newer.id, stale: write.id })
        .collect()
}

fn shared_tokens(accepted: &[&Operation<'_>]) -> Vec<Violation> {
    let mut first_by_token: BTreeMap<u64, &Operation<'_>> = BTreeMap::new();
    let mut violations = Vec::new();
    for write in accepted {
        let first = first_by_token.entry(shown(write)).or_insert(write);
        if first.call.owner != write.call.owner {
            violations.push(Violation::SharedToken(first.id, write.id));
        }
    }
    violations
}

/// A refusal needs a write that makes it right, and that may have been performed before it.
fn refused_without_reason(writes: &[&Operation<'_>]) -> Vec<Violation> {
    let is_reason = |other: &Operation<'_>, write: &Operation<'_>| {
        let newer = shown(other) > shown(write);
        let foreign = shown(other) == shown(write) && other.call.owner != write.call.owner;
        other.may_have_happened() && other.sent_ns < write.done_ns && (newer || foreign)
    };
    let refused = writes.iter().filter(|write| write.outcome == Outcome::Refused);
    refused
        .filter(|write| !writes.iter().any(|other| is_reason(other, write)))
        .map(|write| Violation::WriteRefused(write.id))
        .collect()
}
