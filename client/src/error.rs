//! What can go wrong, told apart as a caller must treat it: one error per operation.
//!
//! The words: *refused* (the server decided no), *timed out* (the wait is over), *lost* (the hold has ended), *unavailable* (no
//! server could be reached; the request was not carried out, or what it left behind is being given back), *unknown* (it may have
//! happened). Errors of the connection are kept as sources. No message carries a password.

use std::borrow::Cow;

use flock_core::wire::error::ErrorCode;

/// The error of the layer below, kept for the log.
pub type Source = Box<dyn std::error::Error + Send + Sync>;

/// An error reply of the server.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code} {message}")]
pub struct ServerError {
    code: String,
    message: String,
}

impl ServerError {
    pub(crate) fn new(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self { code: code.into(), message: message.into() }
    }

    /// The first word of the reply, as `NOPERM`.
    #[must_use]
    pub fn code(&self) -> &str {
        &self.code
    }

    /// The sentence after the code, for people.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The code as one of FLOCK's table, if it is in there.
    #[must_use]
    pub fn known(&self) -> Option<ErrorCode> {
        ErrorCode::parse(self.code.as_bytes())
    }

    pub(crate) fn is_unknown_command(&self) -> bool {
        self.message.starts_with("unknown command")
    }

    /// Whether the same request may succeed a moment later though nobody has changed it.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.known().is_some_and(ErrorCode::is_retryable)
    }
}

/// Why no client came about.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The URL or an option makes no sense, so nothing was sent; or no sentinel knows the service that the URL names.
    #[error("bad configuration: {0}")]
    Config(Cow<'static, str>),
    /// No connection within the connect timeout.
    #[error("the server cannot be reached")]
    Unavailable(#[source] Source),
    /// The server refused us: wrong password, unknown user, no such database.
    #[error("the server refused the connection{}", cure(.0))]
    Server(#[source] ServerError),
    /// The server is there, and knows no command of FLOCK's.
    #[error("the server has not loaded FLOCK's module: start it with --loadmodule .../libflock.so")]
    NoModule(#[source] ServerError),
    /// There is no trust between us: the server's certificate is for another name, out of date, or of an authority that we do not
    /// trust; or it does not accept ours, or wants one.
    #[error("no trusted TLS connection")]
    Tls(#[source] Source),
}

/// What its user can do about such a refusal, where that is known.
fn cure(refusal: &ServerError) -> &'static str {
    let is_about = |word| refusal.message.contains(word);
    match refusal.known() {
        Some(ErrorCode::NoAuth) if refusal.message.starts_with("sentinel ") => " (give Builder::sentinel_credentials)",
        Some(ErrorCode::NoAuth) => " (give a password: in the URL, or by Builder::credentials)",
        Some(ErrorCode::NoPerm) if is_about("channel") || is_about("subscribe") => {
            " (let the user subscribe to channels &flock:*, or connect with Builder::without_pubsub)"
        }
        _ => "",
    }
}

impl ConnectError {
    /// Whether trying again later makes sense.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Config(_) | Self::NoModule(_) | Self::Tls(_) => false,
            Self::Unavailable(_) => true,
            Self::Server(error) => error.is_retryable(),
        }
    }
}

/// Why a lock was not acquired. Whatever the reason, no hold and no place in a queue stay behind: what the server may have granted
/// without our hearing is given back in the background.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AcquireError {
    /// The wait is over and somebody else still holds the lock, by the last word of the server.
    #[error("timed out waiting for the lock")]
    TimedOut,
    /// The server gave no answer in time: nobody knows who holds the lock.
    #[error("the server cannot be reached")]
    Unavailable(#[source] Source),
    /// The request makes no sense; nothing was sent.
    #[error("bad request: {0}")]
    Config(Cow<'static, str>),
    /// The server refused the request.
    #[error("the server refused the request")]
    Server(#[source] ServerError),
    /// The lock was granted, and fewer replicas than wanted had heard of it in time. It has been given back.
    #[error("{acknowledged} of {wanted} replicas acknowledged the grant in time")]
    #[non_exhaustive]
    NotDurable {
        /// How many had.
        acknowledged: u32,
        /// How many were wanted.
        wanted: u32,
    },
    /// A lock was acquired and lost again before all that was asked for was there: while others of the same
    /// [`LockAll`](crate::LockAll) were waited for, or replicas were.
    #[error("the lock \"{}\" was lost before all was acquired: {reason}", key.escape_ascii())]
    #[non_exhaustive]
    Lost {
        /// Which lock.
        key: Vec<u8>,
        /// How it was lost.
        reason: LossReason,
    },
    /// The client is shut down.
    #[error("the client is shut down")]
    ShutDown,
}

impl AcquireError {
    /// Whether trying again later makes sense.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::TimedOut | Self::Unavailable(_) | Self::NotDurable { .. } => true,
            Self::Lost { reason, .. } => *reason != LossReason::ShutDown,
            Self::Config(_) | Self::ShutDown => false,
            Self::Server(error) => error.is_retryable(),
        }
    }
}

/// Why an operation on a hold (renew, upgrade, downgrade, release) failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HoldError {
    /// An upgrade found other shared holders; or the server was promoted a moment ago, and makes no new grants for a while. The shared
    /// hold stays as it was.
    #[error("others hold the lock shared, or the server was just promoted")]
    Refused,
    /// The hold has ended.
    #[error("the lock is lost: {0}")]
    Lost(LossReason),
    /// The request makes no sense for this hold; nothing was sent.
    #[error("bad request: {0}")]
    Config(Cow<'static, str>),
    /// No answer came in time: it may have happened, or not.
    #[error("no answer from the server: it may have happened")]
    Unknown(#[source] Source),
    /// The server refused the request.
    #[error("the server refused the request")]
    Server(#[source] ServerError),
}

impl HoldError {
    /// Whether trying again later, with the same guard, makes sense. Not at once, and not for ever: two who share a lock and both upgrade
    /// are both [`HoldError::Refused`] until one of them releases.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Refused | Self::Unknown(_) => true,
            Self::Lost(_) | Self::Config(_) => false,
            Self::Server(error) => error.is_retryable(),
        }
    }
}

/// Why work under a lock was not done to its end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The work was not begun.
    #[error(transparent)]
    Acquire(#[from] AcquireError),
    /// The lock was lost while the work ran. The work was cancelled at its next await, if it had one; what it had done is done. Or it had
    /// ended, and the release found the hold gone: when it was lost is not known then, and the work's result is dropped.
    #[error("the lock was lost while the work ran: {0}")]
    Lost(LossReason),
}

impl RunError {
    /// Whether trying again later makes sense. After a loss it does only if the work may be done twice.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Acquire(error) => error.is_retryable(),
            Self::Lost(_) => false,
        }
    }
}

/// How a hold was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum LossReason {
    /// The lease is over: it was not renewed in time.
    #[error("the lease is over")]
    Expired,
    /// An administrator ended it.
    #[error("revoked")]
    Revoked,
    /// The key was deleted, overwritten, renamed or evicted.
    #[error("the key was removed")]
    Removed,
    /// The database was flushed.
    #[error("the database was flushed")]
    Flushed,
    /// The server does not know the hold any more, and we have not heard why: the server lost it in a restart or a failover, its databases
    /// were swapped (`SWAPDB`), or the message was lost. It is found by the next renewal: at a third of the lease, or at once over a new
    /// connection.
    #[error("the server does not know the hold any more")]
    Gone,
    /// A session hold's connection was gone, or silent, for as long as its grace.
    #[error("the connection was gone for longer than the session's grace")]
    Disconnected,
    /// It lasted as long as `max_hold` allows.
    #[error("held for as long as allowed")]
    MaxHold,
    /// The client was shut down and gave it back.
    #[error("the client is shut down")]
    ShutDown,
}

impl From<flock_core::LossReason> for LossReason {
    fn from(reason: flock_core::LossReason) -> Self {
        match reason {
            flock_core::LossReason::Expired => Self::Expired,
            flock_core::LossReason::Revoked => Self::Revoked,
            flock_core::LossReason::Removed => Self::Removed,
            flock_core::LossReason::Flushed => Self::Flushed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_advice_follows_the_servers_table() {
        assert!(ServerError::new("QUEUEFULL", "x").is_retryable());
        assert!(!ServerError::new("NOPERM", "x").is_retryable());
        assert!(!ServerError::new("SOMETHING", "new").is_retryable());
    }

    #[test]
    fn messages_are_lower_case_without_a_full_stop() {
        for text in [
            AcquireError::TimedOut.to_string(),
            AcquireError::Config("x".into()).to_string(),
            HoldError::Lost(LossReason::Gone).to_string(),
            RunError::Lost(LossReason::MaxHold).to_string(),
        ] {
            assert!(text.starts_with(char::is_lowercase) && !text.ends_with('.'), "{text}");
        }
    }
}
