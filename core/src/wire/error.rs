//! The one table of error codes, used by module and client.
//!
//! A code is the first word of an error reply, as everywhere in the server's protocol; the sentence after it is for people and may
//! change. The codes of the server itself that a caller of these commands meets are in the same table, so that the client has one
//! answer to the one question: does it make sense to send the same request again?
//!
//! How a *wait* ends without a grant (never by nil, which means "time is up"):
//!
//! | event | code | why this one |
//! |---|---|---|
//! | the slot moved away | `TRYAGAIN` | Cluster clients send the request again by themselves, and are then redirected. `MOVED` would promise `MOVED slot host:port`, and clients that find no address there fail to parse the reply. |
//! | demotion | `UNBLOCKED` | The server says the same to its own blocked clients at that moment, and to ours in standalone mode: one event, one code. |
//! | the cluster is down | `CLUSTERDOWN` | What the next command would be answered. |
//! | flush | `FLUSHED` | The place in the queue is gone, nothing else. |
//! | RELEASE by the same owner | `CANCELLED` | Somebody wanted it to end: not to be sent again. |
//! | a newer request of the same owner | `SUPERSEDED` | The newer one has the place. |

use crate::refusal::{EndReason, Refusal};
use alloc::borrow::Cow;
use alloc::format;
use core::fmt;

macro_rules! error_codes {
    ($($variant:ident $code:literal $retryable:literal $meaning:literal)*) => {
        /// What kind of error: the first word of the reply.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum ErrorCode {
            $(#[doc = $meaning] $variant,)*
        }

        impl ErrorCode {
            /// The whole table.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The word on the wire.
            #[must_use]
            pub const fn code(self) -> &'static str {
                match self { $(Self::$variant => $code,)* }
            }

            /// Whether the same request, sent again (perhaps a moment later, perhaps to the new primary), may succeed though
            /// nobody has changed it. Sending again is always safe: an owner's repeated request is the same request.
            #[must_use]
            pub const fn is_retryable(self) -> bool {
                match self { $(Self::$variant => $retryable,)* }
            }

            /// What it means, in one line.
            #[must_use]
            pub const fn meaning(self) -> &'static str {
                match self { $(Self::$variant => $meaning,)* }
            }
        }
    };
}

error_codes! {
//  variant          code            retry  meaning
    // Said by FLOCK.
    Err              "ERR"           false  "A bad argument, or a request that cannot make sense: the program is wrong."
    Held             "HELD"          false  "NEW was given and this owner holds the lock; or REENTRANT was given for a hold without ids."
    HeldShared       "HELDSHARED"    false  "Exclusive was asked by an owner that holds the lock shared, without CONVERT."
    NotHeld          "NOTHELD"       false  "CONVERT was given and this owner has no hold with that token."
    IdsFull          "IDSFULL"       false  "The hold has as many ids as allowed."
    QueueFull        "QUEUEFULL"     true   "As many requests wait on this server as allowed."
    Superseded       "SUPERSEDED"    false  "A newer request of the same owner has taken this one's place in the queue."
    Cancelled        "CANCELLED"     false  "The request was cancelled while it waited."
    Flushed          "FLUSHED"       true   "The database was flushed while the request waited."
    TokenFloor       "TOKENFLOOR"    false  "FLOOR is too far above the counter and the clock to be a token that was ever handed out."
    NoTokens         "NOTOKENS"      false  "The token counter has reached 2^53 - 1: this server can grant nothing any more."
    // Said by FLOCK and by the server.
    WrongType        "WRONGTYPE"     false  "The key holds a value of another type."
    ReadOnly         "READONLY"      true   "This server is a replica: only the primary decides."
    NoPerm           "NOPERM"        false  "The user may not use this command, key or channel."
    Unblocked        "UNBLOCKED"     true   "The wait was ended from outside: the server is no primary any more, or CLIENT UNBLOCK."
    TryAgain         "TRYAGAIN"      true   "The slot is moving, or has moved while the request waited: send it again."
    ClusterDown      "CLUSTERDOWN"   true   "The cluster serves no slots, or not this one."
    Loading          "LOADING"       true   "The server has not finished starting."
    // Said by the server.
    Moved            "MOVED"         true   "Another server has the slot; its address follows."
    Ask              "ASK"           true   "Another server is importing the slot; its address follows."
    CrossSlot        "CROSSSLOT"     false  "The keys of one request are in different slots."
    OutOfMemory      "OOM"           true   "The server is above its memory limit: no new lock. RELEASE and RENEW still work."
    NoReplicas       "NOREPLICAS"    true   "The primary has fewer good replicas than min-replicas-to-write."
    MisConf          "MISCONF"       true   "The server cannot save to disk and was told to refuse writes then."
    MasterDown       "MASTERDOWN"    true   "The replica has lost its primary and was told not to serve stale data."
    Busy             "BUSY"          true   "The server is busy with a script."
    NoAuth           "NOAUTH"        false  "The connection has not authenticated."
    WrongPass        "WRONGPASS"     false  "The user name or the password is wrong."
    ExecAbort        "EXECABORT"     false  "The transaction was discarded because one of its commands was refused."
}

impl ErrorCode {
    /// The code of an error line as received, with or without its leading `-`; `None` if it is not in the table.
    #[must_use]
    pub fn parse(line: &[u8]) -> Option<Self> {
        let line = line.strip_prefix(b"-").unwrap_or(line);
        let word = line.split(u8::is_ascii_whitespace).next().unwrap_or_default();
        Self::ALL.iter().copied().find(|code| code.code().as_bytes() == word)
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.code())
    }
}

/// An error reply: a code, and a sentence in lower case without a full stop. `Display` gives the line as it is sent (without the `-`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WireError {
    /// What kind.
    pub code: ErrorCode,
    /// What exactly, for people.
    pub message: Cow<'static, str>,
}

impl WireError {
    /// The key holds a value of another type: the server's own sentence.
    pub const WRONG_TYPE: Self =
        Self::fixed(ErrorCode::WrongType, "Operation against a key holding the wrong kind of value");
    /// A deciding verb reached a replica.
    pub const READ_ONLY: Self = Self::fixed(ErrorCode::ReadOnly, "this server is a replica: ask its primary");

    /// An error whose sentence needs no allocation.
    #[must_use]
    pub const fn fixed(code: ErrorCode, message: &'static str) -> Self {
        Self { code, message: Cow::Borrowed(message) }
    }
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.code, self.message)
    }
}

impl core::error::Error for WireError {}

impl From<Refusal> for WireError {
    fn from(refusal: Refusal) -> Self {
        let owned = |code, message| Self { code, message: Cow::Owned(message) };
        match refusal {
            Refusal::AlreadyHeld => {
                Self::fixed(ErrorCode::Held, "this owner already holds the lock, and NEW was given")
            }
            Refusal::HeldWithoutIds => Self::fixed(
                ErrorCode::Held,
                "this owner holds the lock without ids, so one RELEASE would end both: give REENTRANT from the first request on",
            ),
            Refusal::HeldShared => Self::fixed(
                ErrorCode::HeldShared,
                "this owner holds the lock shared: give CONVERT with its token to ask for exclusive",
            ),
            Refusal::NotHeld => {
                Self::fixed(ErrorCode::NotHeld, "this owner has no hold with the token given to CONVERT")
            }
            Refusal::NeedsIdOrAll => Self::fixed(ErrorCode::Err, "the hold has ids: give ID with one of them, or ALL"),
            Refusal::TooManyIds { max } => {
                owned(ErrorCode::IdsFull, format!("the hold has {max} ids already, as many as allowed"))
            }
            Refusal::QueueFull { max } => {
                owned(ErrorCode::QueueFull, format!("{max} requests wait on this server already, as many as allowed"))
            }
            Refusal::FloorTooHigh { max } => {
                owned(ErrorCode::TokenFloor, format!("FLOOR token is not credible (allowed now: 1 to {max})"))
            }
            Refusal::TokensExhausted => Self::fixed(
                ErrorCode::NoTokens,
                "the token counter has reached 9007199254740991: no further grant is possible",
            ),
            Refusal::NotReady => {
                Self::fixed(ErrorCode::Loading, "the server has not finished starting: nothing can be granted yet")
            }
        }
    }
}

impl From<EndReason> for WireError {
    fn from(reason: EndReason) -> Self {
        match reason {
            EndReason::Superseded => Self::fixed(
                ErrorCode::Superseded,
                "a newer request of this owner has taken this one's place in the queue",
            ),
            EndReason::Cancelled => Self::fixed(ErrorCode::Cancelled, "the request was cancelled while it waited"),
            EndReason::Flushed => Self::fixed(ErrorCode::Flushed, "the database was flushed while the request waited"),
            EndReason::RoleChanged => Self::fixed(
                ErrorCode::Unblocked,
                "this server is no primary any more: send the request again to the new one",
            ),
            EndReason::Moved => Self::fixed(
                ErrorCode::TryAgain,
                "the slot has moved to another server while the request waited: send it again",
            ),
            EndReason::ClusterDown => {
                Self::fixed(ErrorCode::ClusterDown, "the cluster went down while the request waited")
            }
            EndReason::WrongType => Self::WRONG_TYPE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn every_code_is_read_back_from_a_line() {
        for code in ErrorCode::ALL {
            for line in [code.code().to_string(), format!("{code} some words"), format!("-{code} 12 host:1\r\n")] {
                assert_eq!(ErrorCode::parse(line.as_bytes()), Some(*code), "{line}");
            }
        }
    }

    #[test]
    fn a_line_of_another_code_is_not_taken_for_one_of_ours() {
        for line in ["", "-", " ERR x", "err x", "HELDX", "HELD,", "NOPROTO unsupported", "\u{1F512}"] {
            assert_eq!(ErrorCode::parse(line.as_bytes()), None, "{line:?}");
        }
    }

    #[test]
    fn codes_differ_from_each_other_and_look_like_the_servers() {
        for (index, code) in ErrorCode::ALL.iter().enumerate() {
            assert!(code.code().bytes().all(|byte| byte.is_ascii_uppercase()), "{code}");
            assert!(ErrorCode::ALL[..index].iter().all(|earlier| earlier.code() != code.code()), "{code} twice");
        }
    }

    #[test]
    fn refusals_say_their_limit() {
        let line = WireError::from(Refusal::QueueFull { max: 100_000 }).to_string();
        assert_eq!(line, "QUEUEFULL 100000 requests wait on this server already, as many as allowed");
        let line = WireError::from(Refusal::FloorTooHigh { max: 77 }).to_string();
        assert_eq!(line, "TOKENFLOOR FLOOR token is not credible (allowed now: 1 to 77)");
    }

    #[test]
    fn a_moved_slot_is_answered_with_a_code_that_clients_retry_and_can_parse() {
        // `MOVED` without an address breaks clients that parse it (see the table above).
        let error = WireError::from(EndReason::Moved);
        assert_eq!(error.code, ErrorCode::TryAgain);
        assert!(error.code.is_retryable());
    }
}
