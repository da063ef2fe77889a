//! What the server publishes on channels.
//!
//! Words first, the owner's bytes last, one space between; numbers in decimal. To an owner, on the channel it gave (one channel
//! may serve all owners of a client, so each message names its key and its owner):
//!
//! ```text
//! granted <token> <lasts ms> <claim|lease> <key length> <key> <owner>      the queued request holds the lock now
//! timed-out <key length> <key> <owner>                                     its wait is over
//! ended <reason> <key length> <key> <owner>                                its wait has ended otherwise
//! lost <reason> <token> <key length> <key> <owner>                         the hold is gone
//! probe                                                                    nothing: the server looks whether a pattern hears the channel
//! ```
//!
//! To anybody, on the channel named like the lock's key:
//!
//! ```text
//! <released|expired|revoked|undelivered> <token> [handed-over <token>]     a hold has ended, and perhaps who is next
//! ```
//!
//! A later version may add words; a client ignores what it cannot parse.

use crate::effect::{Ended, Notice};
use crate::refusal::{EndReason, LossReason};
use crate::token::Token;
use crate::wire::Corrupt;
use crate::wire::text::{Words, push_len, push_number, token};
use alloc::vec::Vec;

/// Published on the channel of a waiter that nobody subscribes to by name, if there are subscriptions by pattern. Says nothing.
pub const PROBE: &[u8] = b"probe";

/// A message to one owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnerMessage<'a> {
    /// What is said.
    pub notice: Notice,
    /// About which lock.
    pub key: &'a [u8],
    /// To whom.
    pub owner: &'a [u8],
}

impl<'a> OwnerMessage<'a> {
    /// Appends the message to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.reserve(80 + self.key.len() + self.owner.len());
        match self.notice {
            Notice::Granted { token, lasts, claim } => {
                out.extend_from_slice(b"granted ");
                push_number(out, token.get());
                out.push(b' ');
                push_number(out, lasts.as_ms().into());
                out.extend_from_slice(if claim { b" claim " } else { b" lease " });
            }
            Notice::TimedOut => out.extend_from_slice(b"timed-out "),
            Notice::Ended(reason) => {
                out.extend_from_slice(b"ended ");
                out.extend_from_slice(end_word(reason).as_bytes());
                out.push(b' ');
            }
            Notice::Lost { token, reason } => {
                out.extend_from_slice(b"lost ");
                out.extend_from_slice(loss_word(reason).as_bytes());
                out.push(b' ');
                push_number(out, token.get());
                out.push(b' ');
            }
        }
        push_len(out, self.key.len());
        out.push(b' ');
        out.extend_from_slice(self.key);
        out.push(b' ');
        out.extend_from_slice(self.owner);
    }

    /// Reads a message.
    pub fn parse(message: &'a [u8]) -> Result<Self, Corrupt> {
        let mut words = Words::new(message);
        let notice = match words.word()? {
            b"granted" => {
                let (token, lasts) = (words.token()?, words.millis()?);
                let claim = match words.word()? {
                    b"claim" => true,
                    b"lease" => false,
                    _ => return Err(Corrupt::new("neither claim nor lease")),
                };
                Notice::Granted { token, lasts, claim }
            }
            b"timed-out" => Notice::TimedOut,
            b"ended" => Notice::Ended(end_reason(words.word()?)?),
            b"lost" => {
                let reason = loss_reason(words.word()?)?;
                Notice::Lost { token: words.token()?, reason }
            }
            _ => return Err(Corrupt::new("an unknown word")),
        };
        let len = words.len(usize::MAX)?;
        let key = words.take(len)?;
        words.space()?;
        let owner = words.rest();
        if owner.is_empty() {
            return Err(Corrupt::new("the owner is missing"));
        }
        Ok(Self { notice, key, owner })
    }
}

/// A message to anybody who listens on the lock's own channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// How the hold ended.
    pub ended: Ended,
    /// Its token.
    pub token: Token,
    /// The token of the waiter that was granted in the same step.
    pub handed_to: Option<Token>,
}

impl Announcement {
    /// Appends the message to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(ended_word(self.ended).as_bytes());
        out.push(b' ');
        push_number(out, self.token.get());
        if let Some(next) = self.handed_to {
            out.extend_from_slice(b" handed-over ");
            push_number(out, next.get());
        }
    }

    /// Reads a message.
    pub fn parse(message: &[u8]) -> Result<Self, Corrupt> {
        let mut words = Words::new(message);
        let word = words.word()?;
        let ended = [Ended::Released, Ended::Expired, Ended::Revoked, Ended::Undelivered]
            .into_iter()
            .find(|ended| ended_word(*ended).as_bytes() == word)
            .ok_or(Corrupt::new("an unknown word"))?;
        if !words.rest().contains(&b' ') {
            return Ok(Self { ended, token: token(words.rest())?, handed_to: None });
        }
        let ended_token = words.token()?;
        if words.word()? != b"handed-over" {
            return Err(Corrupt::new("an unknown word"));
        }
        Ok(Self { ended, token: ended_token, handed_to: Some(token(words.rest())?) })
    }
}

const fn ended_word(ended: Ended) -> &'static str {
    match ended {
        Ended::Released => "released",
        Ended::Expired => "expired",
        Ended::Revoked => "revoked",
        Ended::Undelivered => "undelivered",
    }
}

const fn end_word(reason: EndReason) -> &'static str {
    match reason {
        EndReason::Superseded => "superseded",
        EndReason::Cancelled => "cancelled",
        EndReason::Flushed => "flushed",
        EndReason::RoleChanged => "role-changed",
        EndReason::Moved => "moved",
        EndReason::ClusterDown => "cluster-down",
        EndReason::WrongType => "wrong-type",
    }
}

fn end_reason(word: &[u8]) -> Result<EndReason, Corrupt> {
    [
        EndReason::Superseded,
        EndReason::Cancelled,
        EndReason::Flushed,
        EndReason::RoleChanged,
        EndReason::Moved,
        EndReason::ClusterDown,
        EndReason::WrongType,
    ]
    .into_iter()
    .find(|reason| end_word(*reason).as_bytes() == word)
    .ok_or(Corrupt::new("an unknown reason"))
}

const fn loss_word(reason: LossReason) -> &'static str {
    match reason {
        LossReason::Expired => "expired",
        LossReason::Revoked => "revoked",
        LossReason::Removed => "removed",
        LossReason::Flushed => "flushed",
    }
}

fn loss_reason(word: &[u8]) -> Result<LossReason, Corrupt> {
    [LossReason::Expired, LossReason::Revoked, LossReason::Removed, LossReason::Flushed]
        .into_iter()
        .find(|reason| loss_word(*reason).as_bytes() == word)
        .ok_or(Corrupt::new("an unknown reason"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Millis;

    fn token(n: u64) -> Token {
        Token::new(n).unwrap()
    }

    /// The text is fixed: clients in other languages read it too.
    #[track_caller]
    fn reads_as(notice: Notice, text: &str) {
        let message = OwnerMessage { notice, key: b"my lock", owner: b"o w" };
        let mut out = Vec::new();
        message.encode(&mut out);
        assert_eq!(str::from_utf8(&out), Ok(text));
        assert_eq!(OwnerMessage::parse(&out), Ok(message));
    }

    #[test]
    fn messages_to_an_owner_read_as_documented() {
        let granted = |claim| Notice::Granted { token: token(77), lasts: Millis(30_000), claim };
        reads_as(granted(false), "granted 77 30000 lease 7 my lock o w");
        reads_as(granted(true), "granted 77 30000 claim 7 my lock o w");
        reads_as(Notice::TimedOut, "timed-out 7 my lock o w");
        reads_as(Notice::Ended(EndReason::RoleChanged), "ended role-changed 7 my lock o w");
        reads_as(Notice::Lost { token: token(77), reason: LossReason::Removed }, "lost removed 77 7 my lock o w");
    }

    #[test]
    fn announcements_read_as_documented() {
        for (handed_to, text) in [(None, "released 9"), (Some(token(10)), "released 9 handed-over 10")] {
            let message = Announcement { ended: Ended::Released, token: token(9), handed_to };
            let mut out = Vec::new();
            message.encode(&mut out);
            assert_eq!(str::from_utf8(&out), Ok(text));
            assert_eq!(Announcement::parse(&out), Ok(message));
        }
    }

    #[test]
    fn what_is_not_exactly_a_message_is_refused() {
        for text in [
            "",
            "granted",
            "granted 0 1 lease 1 k o",
            "granted 9007199254740992 1 lease 1 k o",
            "granted 1 4294967296 lease 1 k o",
            "granted 1 1 maybe 1 k o",
            "granted 01 1 lease 1 k o",
            "timed-out 2 k o",
            "timed-out 18446744073709551615 k o",
            "timed-out 1 k ",
            "timed-out 1 k",
            "timed-out 1 kxo",
            "ended because 1 k o",
            "lost expired 1 1 k ",
            "shouted 1 k o",
        ] {
            assert!(OwnerMessage::parse(text.as_bytes()).is_err(), "{text:?}");
        }
        for text in
            ["", "released", "released ", "released 1 ", "released x", "released 1 handed-over", "released 1 to 2"]
        {
            assert!(Announcement::parse(text.as_bytes()).is_err(), "{text:?}");
        }
    }
}
