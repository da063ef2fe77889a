//! The commands of users as arguments: parse for the module, and the way back for the client.
//!
//! Parsing needs no allocation unless it refuses. What it returns cannot be wrong any more: the verbs check nothing again. Every
//! refusal is one sentence that names the argument, what is wrong with its value, and the range.
//!
//! Options are case-insensitive and come in any order, each at most once. An option takes the next argument as its value whatever
//! it looks like (`LABEL SHARED` is a label). What goes together:
//!
//! | option | needs | excludes | why |
//! |---|---|---|---|
//! | `LIMIT` | `SHARED` | `CONVERT` | a limit counts other shared holders; where a conversion succeeds there are none |
//! | `QUEUE` | `CHANNEL` | `BLOCK` | a queued request hears of its grant on its channel only |
//! | `CONVERT` | | `BLOCK`, `QUEUE`, `NEW`, `REENTRANT`, `CLAIM`, `LIMIT` | it changes the mode of a hold that exists, at once or not at all; its ids stay as they are |
//! | `CLAIM` | a value up to `lease_ms` | `CONVERT` | a claim shortens the lease until it is confirmed |
//! | `ID` | | `ALL` | one id, or all of them |
//!
//! `CHANNEL`, `SESSION` and `LABEL` beside `CONVERT` replace those of the hold, as in any repeated request. `NEW` goes with waiting:
//! it refuses only an owner that holds the lock when the request arrives.

use crate::lock::Mode;
use crate::request::{Acquire, Limits, Release, ReleaseScope, Renew, Revoke, Wait};
use crate::time::Millis;
use crate::token::Token;
use crate::wire::error::{ErrorCode, WireError};
use crate::wire::text::{Decimal, NumberFault, parse_number};
use crate::wire::{CHANNEL_BYTES_MAX, ID_BYTES_MAX, LABEL_BYTES_MAX, OWNER_BYTES_MAX};
use alloc::borrow::Cow;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::num::NonZeroU32;

/// `FLOCK.INFO` shows so many waiters if it is not told otherwise.
pub const INFO_LIMIT_DEFAULT: u32 = 64;
/// `FLOCK.INFO` shows at most so many waiters: a reply that the server builds in one go.
pub const INFO_LIMIT_MAX: u32 = 10_000;
/// `FLOCK.LIST` shows so many locks a page if it is not told otherwise.
pub const LIST_COUNT_DEFAULT: u32 = 100;
/// `FLOCK.LIST` shows at most so many locks a page.
pub const LIST_COUNT_MAX: u32 = 10_000;
/// The longest `MATCH`: matching takes up to pattern length x key length steps per key.
pub const PATTERN_BYTES_MAX: usize = 1024;

/// A command of the protocol. `parse` and `args` are each other's inverse.
pub trait Command<'a>: Sized {
    /// The command's name.
    const NAME: &'static str;
    /// Its option words.
    const OPTIONS: &'static [&'static str];

    /// Reads the arguments after the command's name.
    ///
    /// # Refuses
    /// Anything that is not exactly a valid request, with code `ERR`.
    fn parse(args: impl IntoIterator<Item = &'a [u8]>, limits: &Limits) -> Result<Self, WireError>;

    /// Hands the arguments after the command's name to `put`, in order.
    fn args(&self, put: impl FnMut(&[u8]));

    /// The arguments as a list, for callers that need to keep them.
    fn to_args(&self) -> Vec<Vec<u8>> {
        let mut list = Vec::new();
        self.args(|arg| list.push(arg.to_vec()));
        list
    }
}

/// `FLOCK.CHECK`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Check<'a> {
    /// The key.
    pub key: &'a [u8],
    /// The token that a current holder should have.
    pub token: Token,
}

/// `FLOCK.INFO`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info<'a> {
    /// The key.
    pub key: &'a [u8],
    /// How many waiters to show.
    pub limit: u32,
}

/// `FLOCK.LIST`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct List<'a> {
    /// Where the last page ended; 0 to begin.
    pub cursor: u32,
    /// How many locks to look at.
    pub count: u32,
    /// Only keys that match this glob (see [`crate::wire::pattern`]).
    pub pattern: Option<&'a [u8]>,
    /// Only locks that this owner holds.
    pub owner: Option<&'a [u8]>,
}

impl Default for List<'_> {
    fn default() -> Self {
        Self { cursor: 0, count: LIST_COUNT_DEFAULT, pattern: None, owner: None }
    }
}

impl<'a> Command<'a> for Acquire<'a> {
    const NAME: &'static str = "FLOCK.ACQUIRE";
    const OPTIONS: &'static [&'static str] = &[
        "SHARED",
        "LIMIT",
        "BLOCK",
        "QUEUE",
        "CHANNEL",
        "NEW",
        "REENTRANT",
        "CONVERT",
        "FLOOR",
        "CLAIM",
        "SESSION",
        "LABEL",
    ];

    fn parse(args: impl IntoIterator<Item = &'a [u8]>, limits: &Limits) -> Result<Self, WireError> {
        let mut args = Args::new(args, Self::OPTIONS);
        let key = args.next("key")?;
        let owner = owner("owner", args.next("owner")?, limits)?;
        let lease = millis("lease_ms", args.next("lease_ms")?, 1, limits.lease_max)?;
        let mut request = Self::new(key, owner, lease);
        let mut block = None;
        let mut queue = None;
        while let Some(option) = args.option()? {
            match option {
                "SHARED" => request.mode = Mode::Shared,
                "LIMIT" => request.limit = Some(limit("LIMIT n", args.value("LIMIT n")?)?),
                "BLOCK" => block = Some(millis("BLOCK wait_ms", args.value("BLOCK wait_ms")?, 0, limits.wait_max)?),
                "QUEUE" => queue = Some(millis("QUEUE wait_ms", args.value("QUEUE wait_ms")?, 1, limits.wait_max)?),
                "CHANNEL" => {
                    let max = limits.channel_max_bytes.min(CHANNEL_BYTES_MAX);
                    request.channel = Some(bytes("CHANNEL channel", args.value("CHANNEL channel")?, 1, max)?);
                }
                "NEW" => request.new = true,
                "REENTRANT" => request.id = Some(id("REENTRANT id", args.value("REENTRANT id")?, limits)?),
                "CONVERT" => request.convert = Some(token("CONVERT token", args.value("CONVERT token")?)?),
                "FLOOR" => {
                    if !limits.floor_enabled {
                        return Err(refuse_fixed("option FLOOR is disabled (configuration: flock.floor-enabled)"));
                    }
                    request.floor = Some(token("FLOOR token", args.value("FLOOR token")?)?.get());
                }
                "CLAIM" => {
                    let value = args.value("CLAIM claim_ms")?;
                    let claim = millis("CLAIM claim_ms", value, 1, limits.lease_max)?;
                    if claim > lease {
                        return Err(wrong("CLAIM claim_ms", "is longer than lease_ms", value, 1, lease.as_ms().into()));
                    }
                    request.claim = Some(claim);
                }
                "SESSION" => {
                    request.session =
                        Some(millis("SESSION grace_ms", args.value("SESSION grace_ms")?, 1, limits.lease_max)?);
                }
                "LABEL" => {
                    let max = limits.label_max_bytes.min(LABEL_BYTES_MAX);
                    request.label = Some(bytes("LABEL text", args.value("LABEL text")?, 0, max)?);
                }
                _ => return Err(args.unknown(option.as_bytes())),
            }
        }
        request.wait = match (block, queue) {
            (None, None) => Wait::No,
            (Some(Millis(0)), None) => Wait::Block(None),
            (Some(wait), None) => Wait::Block(Some(wait)),
            (None, Some(wait)) => Wait::Queue(wait),
            (Some(_), Some(_)) => return Err(exclude("BLOCK", "QUEUE")),
        };
        if queue.is_some() && request.channel.is_none() {
            return Err(refuse_fixed("option QUEUE needs CHANNEL: the grant is published there"));
        }
        if request.limit.is_some() && request.mode != Mode::Shared {
            return Err(refuse_fixed("option LIMIT needs SHARED"));
        }
        if request.convert.is_some() {
            let excluded = [
                ("BLOCK", block.is_some()),
                ("QUEUE", queue.is_some()),
                ("NEW", request.new),
                ("REENTRANT", request.id.is_some()),
                ("CLAIM", request.claim.is_some()),
                ("LIMIT", request.limit.is_some()),
            ];
            if let Some((option, _)) = excluded.iter().find(|(_, given)| *given) {
                return Err(exclude("CONVERT", option));
            }
        }
        Ok(request)
    }

    fn args(&self, mut put: impl FnMut(&[u8])) {
        put(self.key);
        put(self.owner);
        put_number(&mut put, self.lease.as_ms());
        if self.mode == Mode::Shared {
            put(b"SHARED");
        }
        if let Some(limit) = self.limit {
            put(b"LIMIT");
            put_number(&mut put, limit.get());
        }
        match self.wait {
            Wait::No => {}
            Wait::Block(wait) => {
                put(b"BLOCK");
                put_number(&mut put, wait.map_or(0, Millis::as_ms));
            }
            Wait::Queue(wait) => {
                put(b"QUEUE");
                put_number(&mut put, wait.as_ms());
            }
        }
        put_option(&mut put, b"CHANNEL", self.channel);
        if self.new {
            put(b"NEW");
        }
        put_option(&mut put, b"REENTRANT", self.id);
        if let Some(token) = self.convert {
            put(b"CONVERT");
            put_number(&mut put, token.get());
        }
        if let Some(floor) = self.floor {
            put(b"FLOOR");
            put_number(&mut put, floor);
        }
        if let Some(claim) = self.claim {
            put(b"CLAIM");
            put_number(&mut put, claim.as_ms());
        }
        if let Some(grace) = self.session {
            put(b"SESSION");
            put_number(&mut put, grace.as_ms());
        }
        put_option(&mut put, b"LABEL", self.label);
    }
}

impl<'a> Command<'a> for Release<'a> {
    const NAME: &'static str = "FLOCK.RELEASE";
    const OPTIONS: &'static [&'static str] = &["TOKEN", "ID", "ALL"];

    fn parse(args: impl IntoIterator<Item = &'a [u8]>, _limits: &Limits) -> Result<Self, WireError> {
        let mut args = Args::new(args, Self::OPTIONS);
        let key = args.next("key")?;
        let owner = known_owner("owner", args.next("owner")?)?;
        let mut request = Self { key, owner, token: None, scope: ReleaseScope::Plain };
        while let Some(option) = args.option()? {
            match option {
                "TOKEN" => request.token = Some(token("TOKEN token", args.value("TOKEN token")?)?),
                "ID" | "ALL" if request.scope != ReleaseScope::Plain => return Err(exclude("ID", "ALL")),
                "ID" => request.scope = ReleaseScope::Id(bytes("ID id", args.value("ID id")?, 1, ID_BYTES_MAX)?),
                "ALL" => request.scope = ReleaseScope::All,
                _ => return Err(args.unknown(option.as_bytes())),
            }
        }
        Ok(request)
    }

    fn args(&self, mut put: impl FnMut(&[u8])) {
        put(self.key);
        put(self.owner);
        if let Some(token) = self.token {
            put(b"TOKEN");
            put_number(&mut put, token.get());
        }
        match self.scope {
            ReleaseScope::Plain => {}
            ReleaseScope::Id(id) => put_option(&mut put, b"ID", Some(id)),
            ReleaseScope::All => put(b"ALL"),
        }
    }
}

impl<'a> Command<'a> for Renew<'a> {
    const NAME: &'static str = "FLOCK.RENEW";
    const OPTIONS: &'static [&'static str] = &["TOKEN"];

    fn parse(args: impl IntoIterator<Item = &'a [u8]>, limits: &Limits) -> Result<Self, WireError> {
        let mut args = Args::new(args, Self::OPTIONS);
        let key = args.next("key")?;
        let owner = known_owner("owner", args.next("owner")?)?;
        let lease = millis("lease_ms", args.next("lease_ms")?, 1, limits.lease_max)?;
        let mut request = Self { key, owner, lease, token: None };
        while let Some(option) = args.option()? {
            match option {
                "TOKEN" => request.token = Some(token("TOKEN token", args.value("TOKEN token")?)?),
                _ => return Err(args.unknown(option.as_bytes())),
            }
        }
        Ok(request)
    }

    fn args(&self, mut put: impl FnMut(&[u8])) {
        put(self.key);
        put(self.owner);
        put_number(&mut put, self.lease.as_ms());
        if let Some(token) = self.token {
            put(b"TOKEN");
            put_number(&mut put, token.get());
        }
    }
}

impl<'a> Command<'a> for Check<'a> {
    const NAME: &'static str = "FLOCK.CHECK";
    const OPTIONS: &'static [&'static str] = &[];

    fn parse(args: impl IntoIterator<Item = &'a [u8]>, _limits: &Limits) -> Result<Self, WireError> {
        let mut args = Args::new(args, Self::OPTIONS);
        let key = args.next("key")?;
        let token = token("token", args.next("token")?)?;
        args.finish()?;
        Ok(Self { key, token })
    }

    fn args(&self, mut put: impl FnMut(&[u8])) {
        put(self.key);
        put_number(&mut put, self.token.get());
    }
}

impl<'a> Command<'a> for Info<'a> {
    const NAME: &'static str = "FLOCK.INFO";
    const OPTIONS: &'static [&'static str] = &["LIMIT"];

    fn parse(args: impl IntoIterator<Item = &'a [u8]>, _limits: &Limits) -> Result<Self, WireError> {
        let mut args = Args::new(args, Self::OPTIONS);
        let mut request = Self { key: args.next("key")?, limit: INFO_LIMIT_DEFAULT };
        while let Some(option) = args.option()? {
            match option {
                "LIMIT" => request.limit = number_u32("LIMIT n", args.value("LIMIT n")?, 0, INFO_LIMIT_MAX)?,
                _ => return Err(args.unknown(option.as_bytes())),
            }
        }
        Ok(request)
    }

    fn args(&self, mut put: impl FnMut(&[u8])) {
        put(self.key);
        if self.limit != INFO_LIMIT_DEFAULT {
            put(b"LIMIT");
            put_number(&mut put, self.limit);
        }
    }
}

impl<'a> Command<'a> for List<'a> {
    const NAME: &'static str = "FLOCK.LIST";
    const OPTIONS: &'static [&'static str] = &["CURSOR", "COUNT", "MATCH", "OWNER"];

    fn parse(args: impl IntoIterator<Item = &'a [u8]>, _limits: &Limits) -> Result<Self, WireError> {
        let mut args = Args::new(args, Self::OPTIONS);
        let mut request = Self::default();
        while let Some(option) = args.option()? {
            match option {
                "CURSOR" => request.cursor = number_u32("CURSOR c", args.value("CURSOR c")?, 0, u32::MAX)?,
                "COUNT" => request.count = number_u32("COUNT n", args.value("COUNT n")?, 1, LIST_COUNT_MAX)?,
                "MATCH" => {
                    request.pattern = Some(bytes("MATCH pattern", args.value("MATCH pattern")?, 0, PATTERN_BYTES_MAX)?);
                }
                "OWNER" => request.owner = Some(known_owner("OWNER owner", args.value("OWNER owner")?)?),
                _ => return Err(args.unknown(option.as_bytes())),
            }
        }
        Ok(request)
    }

    fn args(&self, mut put: impl FnMut(&[u8])) {
        if self.cursor != 0 {
            put(b"CURSOR");
            put_number(&mut put, self.cursor);
        }
        if self.count != LIST_COUNT_DEFAULT {
            put(b"COUNT");
            put_number(&mut put, self.count);
        }
        put_option(&mut put, b"MATCH", self.pattern);
        put_option(&mut put, b"OWNER", self.owner);
    }
}

impl<'a> Command<'a> for Revoke<'a> {
    const NAME: &'static str = "FLOCK.REVOKE";
    const OPTIONS: &'static [&'static str] = &["OWNER"];

    fn parse(args: impl IntoIterator<Item = &'a [u8]>, _limits: &Limits) -> Result<Self, WireError> {
        let mut args = Args::new(args, Self::OPTIONS);
        let mut request = Self { key: args.next("key")?, owner: None };
        while let Some(option) = args.option()? {
            match option {
                "OWNER" => request.owner = Some(known_owner("OWNER owner", args.value("OWNER owner")?)?),
                _ => return Err(args.unknown(option.as_bytes())),
            }
        }
        Ok(request)
    }

    fn args(&self, mut put: impl FnMut(&[u8])) {
        put(self.key);
        put_option(&mut put, b"OWNER", self.owner);
    }
}

/// The arguments of one command, read from the front.
struct Args<I> {
    rest: I,
    options: &'static [&'static str],
    /// Which options have been given: one bit each, in the order of `options`.
    given: u32,
}

impl<'a, I: Iterator<Item = &'a [u8]>> Args<I> {
    fn new(args: impl IntoIterator<IntoIter = I>, options: &'static [&'static str]) -> Self {
        Self { rest: args.into_iter(), options, given: 0 }
    }

    /// The next argument, which must be there.
    fn next(&mut self, name: &'static str) -> Result<&'a [u8], WireError> {
        self.rest.next().ok_or_else(|| refuse(format!("argument {name} is missing")))
    }

    /// The next option word as written in the table, if there is one more.
    #[inline]
    fn option(&mut self) -> Result<Option<&'static str>, WireError> {
        let Some(word) = self.rest.next() else { return Ok(None) };
        self.known(word).map(Some)
    }

    /// The option as written in the table. Most commands have none: kept out of their way.
    #[inline(never)]
    fn known(&mut self, word: &[u8]) -> Result<&'static str, WireError> {
        let known = self.options.iter().zip(0u32..).find(|(option, _)| option.as_bytes().eq_ignore_ascii_case(word));
        let Some((option, index)) = known else {
            return Err(self.unknown(word));
        };
        let bit = 1 << index;
        if self.given & bit != 0 {
            return Err(refuse(format!("option {option} is given twice")));
        }
        self.given |= bit;
        Ok(option)
    }

    /// The value of an option. `what`: the option's word and what its value is called.
    fn value(&mut self, what: &'static str) -> Result<&'a [u8], WireError> {
        self.rest.next().ok_or_else(|| refuse(format!("option {what} has no value")))
    }

    /// There must be no more arguments.
    fn finish(mut self) -> Result<(), WireError> {
        match self.rest.next() {
            None => Ok(()),
            Some(extra) => Err(self.unknown(extra)),
        }
    }

    fn unknown(&self, word: &[u8]) -> WireError {
        if self.options.is_empty() {
            return refuse(format!("unexpected argument {}", quoted(word)));
        }
        refuse(format!("unknown option {} (allowed: {})", quoted(word), self.options.join(", ")))
    }
}

/// An owner that holds or waits already: the setting may have been lowered since.
fn known_owner<'a>(what: &'static str, value: &'a [u8]) -> Result<&'a [u8], WireError> {
    bytes(what, value, 1, OWNER_BYTES_MAX)
}

fn owner<'a>(what: &'static str, value: &'a [u8], limits: &Limits) -> Result<&'a [u8], WireError> {
    bytes(what, value, 1, limits.owner_max_bytes.min(OWNER_BYTES_MAX))
}

fn id<'a>(what: &'static str, value: &'a [u8], limits: &Limits) -> Result<&'a [u8], WireError> {
    bytes(what, value, 1, limits.owner_max_bytes.min(ID_BYTES_MAX))
}

fn bytes<'a>(what: &'static str, value: &'a [u8], min: usize, max: usize) -> Result<&'a [u8], WireError> {
    let len = value.len();
    if len < min {
        Err(refuse(format!("{what} is empty (allowed: {min} to {max} bytes)")))
    } else if len > max {
        Err(refuse(format!("{what} is too long: {len} bytes (allowed: {min} to {max} bytes)")))
    } else {
        Ok(value)
    }
}

fn millis(what: &'static str, value: &[u8], min: u32, max: Millis) -> Result<Millis, WireError> {
    number_u32(what, value, min, max.as_ms()).map(Millis)
}

fn limit(what: &'static str, value: &[u8]) -> Result<NonZeroU32, WireError> {
    let number = number_u32(what, value, 1, u32::MAX)?;
    NonZeroU32::new(number).ok_or_else(|| wrong(what, "is out of range", value, 1, u32::MAX.into()))
}

fn token(what: &'static str, value: &[u8]) -> Result<Token, WireError> {
    let number = number(what, value, 1, Token::MAX)?;
    Token::new(number).ok_or_else(|| wrong(what, "is out of range", value, 1, Token::MAX))
}

fn number_u32(what: &'static str, value: &[u8], min: u32, max: u32) -> Result<u32, WireError> {
    let number = number(what, value, min.into(), max.into())?;
    u32::try_from(number).map_err(|_| wrong(what, "is out of range", value, min.into(), max.into()))
}

fn number(what: &'static str, value: &[u8], min: u64, max: u64) -> Result<u64, WireError> {
    match parse_number(value) {
        Ok(number) if (min..=max).contains(&number) => Ok(number),
        Ok(_) | Err(NumberFault::OutOfRange) => Err(wrong(what, "is out of range", value, min, max)),
        Err(NumberFault::NotWhole) => Err(wrong(what, "is not a whole number", value, min, max)),
    }
}

#[cold]
fn wrong(what: &str, problem: &str, value: &[u8], min: u64, max: u64) -> WireError {
    refuse(format!("{what} {problem}: {} (allowed: {min} to {max})", quoted(value)))
}

#[cold]
fn exclude(one: &str, other: &str) -> WireError {
    refuse(format!("options {one} and {other} exclude each other"))
}

#[cold]
fn refuse(message: String) -> WireError {
    WireError { code: ErrorCode::Err, message: Cow::Owned(message) }
}

#[cold]
fn refuse_fixed(message: &'static str) -> WireError {
    WireError::fixed(ErrorCode::Err, message)
}

/// A user's value as it may appear in an error: escaped, so that it cannot break a reply or a log line, and cut short.
fn quoted(value: &[u8]) -> String {
    const SHOWN_BYTES_MAX: usize = 64;
    match value.get(..SHOWN_BYTES_MAX) {
        Some(shown) if value.len() > SHOWN_BYTES_MAX => {
            format!("\"{}\"... ({} bytes)", shown.escape_ascii(), value.len())
        }
        _ => format!("\"{}\"", value.escape_ascii()),
    }
}

fn put_number(put: &mut impl FnMut(&[u8]), number: impl Into<u64>) {
    put(Decimal::new(number.into()).as_bytes());
}

fn put_option(put: &mut impl FnMut(&[u8]), option: &[u8], value: Option<&[u8]>) {
    if let Some(value) = value {
        put(option);
        put(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn acquire(line: &'static str) -> Result<Acquire<'static>, WireError> {
        Acquire::parse(line.split(' ').map(str::as_bytes), &Limits::DEFAULT)
    }

    #[test]
    fn options_come_in_any_order_and_case() {
        let one = acquire("k o 1000 SHARED LIMIT 3 QUEUE 5 CHANNEL c CLAIM 9 SESSION 2 LABEL l FLOOR 7").unwrap();
        let other = acquire("k o 1000 label l Floor 7 cLaIm 9 limit 3 session 2 channel c shared queue 5").unwrap();
        assert_eq!(one, other);
        assert_eq!(one.limit, NonZeroU32::new(3));
        assert_eq!(one.wait, Wait::Queue(Millis(5)));
    }

    #[test]
    fn block_zero_is_no_limit() {
        assert_eq!(acquire("k o 1 BLOCK 0").unwrap().wait, Wait::Block(None));
        assert_eq!(acquire("k o 1 BLOCK 1").unwrap().wait, Wait::Block(Some(Millis(1))));
    }

    #[test]
    fn an_option_word_is_a_value_where_a_value_stands() {
        let request = acquire("k o 1 LABEL SHARED CHANNEL LABEL").unwrap();
        assert_eq!((request.label, request.channel), (Some(&b"SHARED"[..]), Some(&b"LABEL"[..])));
        assert_eq!(request.mode, Mode::Exclusive);
    }

    #[test]
    fn the_empty_key_is_a_key() {
        assert_eq!(acquire(" o 1").unwrap().key, b"");
    }

    #[test]
    fn a_conversion_may_replace_channel_session_and_label() {
        assert!(acquire("k o 1 CONVERT 7 SHARED FLOOR 9 CHANNEL c SESSION 5 LABEL l").is_ok());
    }

    #[test]
    fn the_configuration_cannot_lift_the_hard_bounds() {
        // A longer owner could be granted and then not be loaded from a snapshot.
        let limits = Limits { owner_max_bytes: usize::MAX, label_max_bytes: usize::MAX, ..Limits::DEFAULT };
        let long = [b'x'; OWNER_BYTES_MAX + 1];
        assert!(Acquire::parse([&b"k"[..], &long, b"1"], &limits).is_err());
        assert!(Acquire::parse([&b"k"[..], &long[1..], b"1"], &limits).is_ok());
        assert!(Acquire::parse([&b"k"[..], b"o", b"1", b"LABEL", &long], &limits).is_err());
    }

    #[test]
    fn a_hostile_value_is_shown_escaped_and_cut() {
        let value = [b'\r'; 65];
        let error = Acquire::parse([&b"k"[..], b"o", &value], &Limits::DEFAULT).unwrap_err();
        let shown = "\\r".repeat(64);
        assert_eq!(
            error.message,
            format!("lease_ms is not a whole number: \"{shown}\"... (65 bytes) (allowed: 1 to 86400000)")
        );
    }
}
