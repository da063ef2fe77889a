//! Judges a history by what locks promise, without knowing how they are made.
//!
//! Grants carry unique, ordered tokens, so there is nothing to search for: everything is sorted and swept, in O(n log n).
//! The checker never cries wolf: of two orders that both fit what the clients saw, it assumes the innocent one. So a hold counts
//! only for the time in which it *must* have existed: from the reply that told of it until the first moment at which, by
//! what its owner sent, it may have ended.
//!
//! | rule | what it wants |
//! |---|---|
//! | tokens | no token names two grants |
//! | order | of two grants, the one whose reply came before the other was asked for has the smaller token |
//! | exclusion | an exclusive hold overlaps no other; shared holds never exceed their limit |
//! | leases | a hold that its owner keeps is not lost before its lease is over |
//! | fifo | of two requests with tickets, the one with the smaller is granted first |
//! | answered | every operation has an outcome, if only "unknown" |
//! | writes | the guarded storage accepts no writer older than the last, and refuses no other |

mod holds;
mod operations;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
mod writes;

use std::fmt;

use crate::history::{Event, OpId, save};
use crate::work_dir::WorkDir;

const VIOLATIONS_SHOWN: usize = 10;

/// Which rules a run must keep. All, unless its faults are known to break some.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Between which grants token order is wanted.
    pub order: Order,
    /// Off where two servers may grant the same lock: in a partition, after a failover without grace.
    pub exclusion: bool,
    /// Off where holds may be lost: failover, eviction, removals that are not in the history.
    pub leases: bool,
    /// Tickets are compared.
    pub fifo: bool,
    /// Operations without an outcome are violations.
    pub answered: bool,
}

/// Between which grants token order is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Between all of the history: one primary at a time has made them.
    Everywhere,
    /// Between those of one lock.
    PerKey,
    /// Nowhere: two primaries have granted at the same time. Tokens must still be unique.
    Nowhere,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules { order: Order::Everywhere, exclusion: true, leases: true, fifo: true, answered: true }
    }
}

/// Something that must not have happened. Operations are named as in the history: client and number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// The lines of an operation do not fit together: the history itself is wrong.
    Malformed(OpId),
    /// An operation has no outcome.
    Unanswered(OpId),
    /// An acquisition without a token.
    NoToken(OpId),
    /// One token names two grants.
    TokenTwice(u64, OpId, OpId),
    /// A later grant has a smaller token.
    TokenOrder {
        /// The earlier grant and its token.
        earlier: (OpId, u64),
        /// The later grant and its token.
        later: (OpId, u64),
    },
    /// Two holds of one lock at the same time, at least one of them exclusive.
    Overlap(OpId, OpId),
    /// With this grant a lock had more holders than its limit.
    OverLimit(OpId),
    /// The owner was told that its hold is gone, within the lease and with no reason in the history.
    LostEarly(OpId),
    /// A request was granted before one with a smaller ticket.
    OutOfTurn {
        /// The request granted too late.
        overtaken: OpId,
        /// The request granted too early.
        by: OpId,
    },
    /// A write was accepted after one with a newer token.
    StaleWrite {
        /// The newer write.
        newer: OpId,
        /// The stale one, accepted later.
        stale: OpId,
    },
    /// Writes of two owners were accepted with one token.
    SharedToken(OpId, OpId),
    /// A write was refused, and nothing in the history makes it stale.
    WriteRefused(OpId),
}

impl Violation {
    /// The operations that it names.
    pub fn operations(&self) -> Vec<OpId> {
        match self {
            Violation::Malformed(op)
            | Violation::Unanswered(op)
            | Violation::NoToken(op)
            | Violation::OverLimit(op)
            | Violation::LostEarly(op)
            | Violation::WriteRefused(op) => vec![*op],
            Violation::TokenTwice(_, first, second)
            | Violation::Overlap(first, second)
            | Violation::OutOfTurn { overtaken: first, by: second }
            | Violation::StaleWrite { newer: first, stale: second }
            | Violation::SharedToken(first, second) => vec![*first, *second],
            Violation::TokenOrder { earlier, later } => vec![earlier.0, later.0],
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |(process, op): &OpId| format!("{process}/{op}");
        match self {
            Violation::Malformed(op) => write!(out, "{}: its lines do not fit together", name(op)),
            Violation::Unanswered(op) => write!(out, "{}: no outcome", name(op)),
            Violation::NoToken(op) => write!(out, "{}: granted without a token", name(op)),
            Violation::TokenTwice(token, first, second) => {
                write!(out, "{} and {}: two grants with token {token}", name(first), name(second))
            }
            Violation::TokenOrder { earlier, later } => write!(
                out,
                "{} was granted token {} before {} was asked for, which got {}",
                name(&earlier.0),
                earlier.1,
                name(&later.0),
                later.1
            ),
            Violation::Overlap(first, second) => {
                write!(out, "{} and {}: held at the same time", name(first), name(second))
            }
            Violation::OverLimit(op) => write!(out, "{}: one holder too many", name(op)),
            Violation::LostEarly(op) => write!(out, "{}: the hold was lost within its lease", name(op)),
            Violation::OutOfTurn { overtaken, by } => {
                write!(out, "{} was granted before {}, which was first", name(by), name(overtaken))
            }
            Violation::StaleWrite { newer, stale } => {
                write!(out, "{}: accepted after {} with a newer token", name(stale), name(newer))
            }
            Violation::SharedToken(first, second) => {
                write!(out, "{} and {}: two owners wrote with one token", name(first), name(second))
            }
            Violation::WriteRefused(op) => write!(out, "{}: refused without reason", name(op)),
        }
    }
}

/// Everything in `events` that `rules` forbid. The events may come in any order.
pub fn check(events: &[Event], rules: &Rules) -> Vec<Violation> {
    let (operations, mut violations) = operations::pair_up(events);
    if rules.answered {
        violations.extend(operations::unanswered(&operations));
    }
    let (holds, early_losses) = holds::collect(&operations, &mut violations);
    violations.extend(holds::tokens_twice(&holds, &operations));
    violations.extend(holds::out_of_order(&holds, rules.order));
    if rules.exclusion {
        violations.extend(holds::overlaps(&holds));
        violations.extend(holds::over_limit(&holds));
    }
    if rules.leases {
        violations.extend(early_losses);
    }
    if rules.fifo {
        violations.extend(holds::out_of_turn(&holds));
    }
    violations.extend(writes::violations(&operations));
    violations
}

/// Wants a history without violations.
///
/// # Panics
/// With the first violations and the path of a file with the history, if there are any.
#[track_caller]
pub fn assert_sound(events: &[Event], rules: &Rules) {
    let violations = check(events, rules);
    if violations.is_empty() {
        return;
    }
    let mut dir = WorkDir::new();
    let path = dir.keep().join("history.jsonl");
    let saved = save(&path, events).map_or_else(|error| error.to_string(), |()| path.display().to_string());
    let shown: Vec<_> = violations.iter().take(VIOLATIONS_SHOWN).map(ToString::to_string).collect();
    panic!("{} violations in {} events ({saved}):\n{}", violations.len(), events.len(), shown.join("\n"));
}

/// For each item, beside it the one with the greatest token among those that had ended before it began, if any had.
fn greatest_before<'a, T>(
    items: &[&'a T],
    began: impl Fn(&T) -> u64,
    ended: impl Fn(&T) -> u64,
    token: impl Fn(&T) -> u64,
) -> Vec<(&'a T, &'a T)> {
    let mut by_begin = items.to_vec();
    by_begin.sort_by_key(|item| began(item));
    let mut by_end = items.to_vec();
    by_end.sort_by_key(|item| ended(item));
    let mut ends = by_end.into_iter().peekable();
    let mut greatest: Option<&T> = None;
    let mut pairs = Vec::new();
    for item in by_begin {
        while let Some(before) = ends.next_if(|before| ended(before) < began(item)) {
            if greatest.is_none_or(|greatest| token(greatest) < token(before)) {
                greatest = Some(before);
            }
        }
        pairs.extend(greatest.map(|greatest| (greatest, item)));
    }
    pairs
}
