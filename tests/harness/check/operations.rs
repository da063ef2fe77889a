//! The two lines of an operation, put together.

use std::collections::BTreeMap;

use super::Violation;
use crate::history::{Call, Event, OpId, Phase, Verb};

/// An operation and its outcome.
#[derive(Clone, Debug)]
pub(super) struct Operation<'a> {
    pub(super) id: OpId,
    pub(super) call: &'a Call,
    pub(super) sent_ns: u64,
    pub(super) outcome: Outcome,
    /// When it was over; never, for an operation that may happen yet.
    pub(super) done_ns: u64,
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Ok(Option<u64>),
    Refused,
    Queued,
    Unknown,
    /// The history does not say.
    Missing,
}

impl Operation<'_> {
    /// Whether it may have been performed, or may be yet.
    pub(super) fn may_have_happened(&self) -> bool {
        match self.outcome {
            Outcome::Ok(_) | Outcome::Unknown | Outcome::Missing | Outcome::Queued => true,
            Outcome::Refused => false,
        }
    }

    pub(super) fn asks_for_a_lock(&self) -> bool {
        matches!(self.call.verb, Verb::Acquire | Verb::Convert)
    }

    /// The token granted by this operation.
    pub(super) fn granted(&self) -> Option<u64> {
        match self.outcome {
            Outcome::Ok(token) if self.asks_for_a_lock() => token,
            _ => None,
        }
    }
}

/// The operations of a history in the order in which they were sent, and the lines that fit none.
pub(super) fn pair_up(events: &[Event]) -> (Vec<Operation<'_>>, Vec<Violation>) {
    let mut sorted: Vec<_> = events.iter().collect();
    sorted.sort_by_key(|event| event.at_ns);
    let mut operations: BTreeMap<OpId, Operation<'_>> = BTreeMap::new();
    let mut misfits = Vec::new();
    for event in sorted {
        let id = (event.process, event.op);
        let outcome = match &event.phase {
            Phase::Invoke(call) => {
                let operation =
                    Operation { id, call, sent_ns: event.at_ns, outcome: Outcome::Missing, done_ns: u64::MAX };
                if operations.insert(id, operation).is_some() {
                    misfits.push(Violation::Malformed(id));
                }
                continue;
            }
            Phase::Ok { token } => Outcome::Ok(*token),
            Phase::Refused => Outcome::Refused,
            Phase::Queued => Outcome::Queued,
            Phase::Unknown => Outcome::Unknown,
        };
        match operations.get_mut(&id) {
            Some(operation) if operation.outcome == Outcome::Missing => {
                operation.outcome = outcome;
                if outcome != Outcome::Unknown {
                    operation.done_ns = event.at_ns;
                }
            }
            _ => misfits.push(Violation::Malformed(id)),
        }
    }
    let mut operations: Vec<_> = operations.into_values().collect();
    operations.sort_by_key(|operation| operation.sent_ns);
    (operations, misfits)
}

pub(super) fn unanswered<'a>(operations: &'a [Operation<'a>]) -> impl Iterator<Item = Violation> {
    let missing = |operation: &&Operation<'_>| operation.outcome == Outcome::Missing;
    operations.iter().filter(missing).map(|operation| Violation::Unanswered(operation.id))
}
