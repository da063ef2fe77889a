//! What happens to a client, as a stream for logs and metrics.

use std::fmt;

use flock_core::Token;
use tokio::sync::broadcast;

use crate::error::LossReason;
use crate::text::Text;

/// Events kept for a reader that is behind; older ones are lost to it.
pub(crate) const EVENTS_KEPT: usize = 256;

/// Something that happened to a client.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A connection is up. In a cluster there are two for each node that is needed; which node it is, is not told.
    #[non_exhaustive]
    Connected {
        /// `"commands"` or `"messages"`.
        link: &'static str,
    },
    /// A connection was given up; a new one is being made.
    #[non_exhaustive]
    Disconnected {
        /// `"commands"` or `"messages"`.
        link: &'static str,
    },
    /// The server refused an acquisition for a reason that may pass: it is a replica, its queue is full, too few replicas follow it. It is
    /// asked for again until its wait is over, and for ever if that has no bound.
    #[non_exhaustive]
    AcquireRefused {
        /// The lock.
        key: Vec<u8>,
        /// What the server's answer began with, such as `READONLY`.
        code: String,
    },
    /// The keep-alive could not renew a lease and tries again until the lease is over.
    #[non_exhaustive]
    RenewFailed {
        /// The lock.
        key: Vec<u8>,
        /// The hold's token.
        token: Token,
    },
    /// A hold is lost.
    #[non_exhaustive]
    Lost {
        /// The lock.
        key: Vec<u8>,
        /// The hold's token.
        token: Token,
        /// How.
        reason: LossReason,
    },
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connected { link } => f.debug_struct("Connected").field("link", link).finish(),
            Self::Disconnected { link } => f.debug_struct("Disconnected").field("link", link).finish(),
            Self::AcquireRefused { key, code } => {
                f.debug_struct("AcquireRefused").field("key", &Text(key)).field("code", code).finish()
            }
            Self::RenewFailed { key, token } => {
                f.debug_struct("RenewFailed").field("key", &Text(key)).field("token", token).finish()
            }
            Self::Lost { key, token, reason } => {
                let mut lost = f.debug_struct("Lost");
                lost.field("key", &Text(key)).field("token", token).field("reason", reason).finish()
            }
        }
    }
}

/// The events of a client from the moment of [`Flock::events`](crate::Flock::events) on.
#[derive(Debug)]
pub struct Events {
    pub(crate) receiver: broadcast::Receiver<Event>,
}

impl Events {
    /// The next event; `None` when the client is gone.
    ///
    /// A reader that falls more than 256 events behind misses the oldest of them.
    ///
    /// # Cancel safety
    /// Dropping the future loses no event.
    pub async fn next(&mut self) -> Option<Event> {
        loop {
            match self.receiver.recv().await {
                Ok(event) => return Some(event),
                Err(broadcast::error::RecvError::Lagged(missed)) => tracing::debug!(missed, "events were missed"),
                Err(broadcast::error::RecvError::Closed) => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_shown_as_text() {
        let event = Event::Lost { key: b"job:\xff".to_vec(), token: Token::MIN, reason: LossReason::Revoked };
        assert_eq!(format!("{event:?}"), r#"Lost { key: "job:\xff", token: #1, reason: Revoked }"#);
    }
}
