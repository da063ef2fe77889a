//! Ordinary "no" answers: why a request is refused, how a wait ends without a grant, how a hold is lost.
//!
//! `wire::error` gives each its stable code and its sentence.

/// Why a verb changed nothing (except what was due anyway).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// `NEW`, and this owner already holds the lock.
    AlreadyHeld,
    /// `REENTRANT` for a hold that was taken without an id: one RELEASE would end both.
    HeldWithoutIds,
    /// Exclusive asked while holding shared, without `CONVERT`.
    HeldShared,
    /// `CONVERT`, and this owner has no hold with that token.
    NotHeld,
    /// A re-entered hold needs `ID id` or `ALL`.
    NeedsIdOrAll,
    /// The hold has as many ids as allowed.
    TooManyIds {
        /// The limit.
        max: usize,
    },
    /// As many waiters on this server as allowed.
    QueueFull {
        /// The limit.
        max: usize,
    },
    /// `FLOOR` above what is credible.
    FloorTooHigh {
        /// The highest acceptable value now.
        max: u64,
    },
    /// The counter has reached 2^53 - 1.
    TokensExhausted,
    /// The server has not finished starting: nothing may be granted yet.
    NotReady,
}

/// How a wait ends without a grant and without its time being up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// A newer waiting request of the same owner took the place.
    Superseded,
    /// RELEASE cancelled it, or CLIENT UNBLOCK did.
    Cancelled,
    /// The database was flushed.
    Flushed,
    /// The server is no primary any more.
    RoleChanged,
    /// The slot moved to another server.
    Moved,
    /// The cluster is down.
    ClusterDown,
    /// The key now holds a value of another type.
    WrongType,
}

/// Why a holder lost its hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossReason {
    /// The lease is over.
    Expired,
    /// An administrator ended it.
    Revoked,
    /// The key was deleted, overwritten, renamed or evicted.
    Removed,
    /// The database was flushed.
    Flushed,
}
