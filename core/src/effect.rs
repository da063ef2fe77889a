//! What the shell must do after a verb: a list of values, performed in one place and in order.

use crate::bytes::Bytes;
use crate::lock::{Change, Owner};
use crate::name::Name;
use crate::refusal::{EndReason, LossReason};
use crate::table::LockId;
use crate::time::Millis;
use crate::token::Token;
use alloc::vec::Vec;

/// A channel name: where the server speaks to an owner.
pub type Channel = Bytes<38>;

/// One thing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// A durable change of the lock: replicate it. (The state has been changed already, by the same [`Change`].)
    Change(Change),
    /// The change before this one is a new grant, not one stated anew.
    Granted(Token),
    /// Answer the blocked client that the shell knows by this number.
    Finish {
        /// The number the shell gave when it asked.
        blocked: u64,
        /// What to answer.
        outcome: WaitOutcome,
    },
    /// Publish a message to an owner on its channel.
    Tell {
        /// The owner's channel.
        channel: Channel,
        /// The lock it is about.
        name: Name,
        /// Whom it is for.
        owner: Owner,
        /// What to say.
        notice: Notice,
    },
    /// Tell anybody who listens on the lock's own channel that a hold ended.
    Announce {
        /// Why it ended.
        ended: Ended,
        /// The token of the hold that ended.
        token: Token,
        /// The token of the waiter that got the lock in the same step.
        handed_to: Option<Token>,
    },
}

/// How the wait of a blocked client ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitOutcome {
    /// The lock is the waiter's.
    Granted(Token),
    /// The wait is over: nil.
    TimedOut,
    /// An error.
    Ended(EndReason),
}

/// What the server says to an owner on its channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// To a queued waiter: the lock is yours, for this long.
    Granted {
        /// The fencing token.
        token: Token,
        /// The claim if one was asked, else the lease.
        lasts: Millis,
        /// Whether a RENEW with the token must confirm it.
        claim: bool,
    },
    /// To a queued waiter: the wait is over.
    TimedOut,
    /// To a queued waiter: the wait has ended otherwise.
    Ended(EndReason),
    /// To a holder: the hold is gone.
    Lost {
        /// Its token.
        token: Token,
        /// Why.
        reason: LossReason,
    },
}

/// Why a hold ended, as announced to anybody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The owner gave it back.
    Released,
    /// The lease is over.
    Expired,
    /// An administrator ended it.
    Revoked,
    /// The grant could not be delivered: its connection was gone.
    Undelivered,
}

/// The effects of one verb, in the order in which to perform them. Its changes concern one lock; only messages and ended waits may
/// concern many.
#[derive(Debug, Default, PartialEq, Eq)]
#[must_use = "effects must be performed: a grant that is not replicated or delivered is a broken promise"]
pub struct Effects {
    list: Vec<Effect>,
    /// From here on, no hold that ended is still to be marked as handed over.
    marked_from: usize,
}

impl Effects {
    pub(crate) fn with_buffer(buffer: Vec<Effect>) -> Self {
        debug_assert!(buffer.is_empty());
        Self { list: buffer, marked_from: 0 }
    }

    pub(crate) fn push(&mut self, effect: Effect) {
        self.list.push(effect);
        if let Some(Effect::Announce { .. }) = self.list.last() {
            self.marked_from = self.list.len();
        }
    }

    /// Marks the latest hold that ended in this step, if any, as handed over to `token`.
    pub(crate) fn handed_over(&mut self, token: Token) {
        // Each effect is passed once, however many waiters are granted in one step.
        while let Some(index) = self.marked_from.checked_sub(1) {
            self.marked_from = index;
            if let Some(Effect::Announce { handed_to: handed_to @ None, .. }) = self.list.get_mut(index) {
                *handed_to = Some(token);
                return;
            }
        }
    }

    /// The effects in order.
    pub fn iter(&self) -> core::slice::Iter<'_, Effect> {
        self.list.iter()
    }

    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The list itself.
    #[must_use]
    pub fn into_vec(self) -> Vec<Effect> {
        self.list
    }
}

impl<'a> IntoIterator for &'a Effects {
    type Item = &'a Effect;
    type IntoIter = core::slice::Iter<'a, Effect>;
    fn into_iter(self) -> Self::IntoIter {
        self.list.iter()
    }
}

/// What must happen to the key in the keyspace: it exists if and only if the lock is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyAction {
    /// Leave it.
    Keep,
    /// Create it, with the lock's handle as its value.
    Bind,
    /// Delete it.
    Unbind,
}

/// The answer of a verb, and what must be done before anything else happens.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a decision is answered and its effects are performed"]
pub struct Decision<T> {
    /// The answer.
    pub answer: T,
    /// The lock concerned, if one exists.
    pub lock: Option<LockId>,
    /// What must happen to its key.
    pub key: KeyAction,
    /// What else to do.
    pub effects: Effects,
}

impl<T> Decision<T> {
    /// A decision that touches no key.
    pub(crate) fn keyless(answer: T, effects: Effects) -> Self {
        Self { answer, lock: None, key: KeyAction::Keep, effects }
    }
}
