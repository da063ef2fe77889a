//! The durable form of a lock (the value of its key in an RDB file) and of the server's counter (the file's AUX field).
//!
//! A stored lock holds all that is durable: who holds it, in which mode, under which token and terms, for how long, and until when
//! on which boot's clock. Also the mark, so that a value that travels alone (RESTORE, a slot migration) still carries the
//! reservation of the server it comes from. Loading what was saved gives the same lock; the queue is not durable.
//!
//! Version 1. Numbers are LEB128 (seven bits a byte, lowest first, no superfluous bytes), a text is its length and its bytes:
//!
//! ```text
//! lock     := 1 mark boot(8 bytes, little endian) count hold*             holds in the order of their tokens
//! hold     := flags token lease_ms [deadline us] [claim ms] [session ms] [converted from]
//!             owner [channel] [label] [count id*]                          ids in byte order
//! flags    := 1 shared | 2 deadline | 4 claim | 8 session | 16 converted from | 32 channel | 64 label | 128 ids
//! counter  := 1 value mark | 0                                             0: the file lacks locks, and must not be used
//! ```
//!
//! A lock without holds is legal: the value of an ended lock that RENAME or MOVE has carried elsewhere. A field that is absent in
//! the lock is absent here, so one lock has one form, and what [`decode`] accepts is the very bytes that [`encode`] would write
//! (on the same boot). Anybody may RESTORE anything: whether tokens and deadlines are *credible* is for the caller to judge.

use crate::lock::{Grant, Hold, Id, Lock, Mode, Terms};
use crate::time::{Millis, Time};
use crate::token::Token;
use crate::wire::{CHANNEL_BYTES_MAX, Corrupt, ID_BYTES_MAX, IDS_MAX, LABEL_BYTES_MAX, OWNER_BYTES_MAX};
use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::vec::Vec;

/// What is written; it and all before it are read.
const VERSION: u8 = if cfg!(feature = "next-format") { 2 } else { 1 };

/// In the place of a version.
const INCOMPLETE: u8 = 0;

const SHARED: u8 = 1;
const DEADLINE: u8 = 2;
const CLAIM: u8 = 4;
const SESSION: u8 = 8;
const CONVERTED_FROM: u8 = 16;
const CHANNEL: u8 = 32;
const LABEL: u8 = 64;
const IDS: u8 = 128;

/// The shortest hold: flags, token, lease, and an owner of one byte with its length. Bounds how many there can be.
const HOLD_BYTES_MIN: usize = 5;

/// A stored lock, read back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// The mark of the server that stored it.
    pub mark: u64,
    /// The holds, oldest token first. A deadline is there only if it was stored on this boot.
    pub grants: Vec<Grant>,
}

/// The server's counter, read back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterImage {
    /// The last token handed out, or seen.
    pub value: u64,
    /// The announced reservation.
    pub mark: u64,
}

/// Appends the stored form of `lock` to `out`. `boot` names the host's boot, whose clock the deadlines are on; 0 if not known.
pub fn encode(lock: &Lock, mark: u64, boot: u64, out: &mut Vec<u8>) {
    out.reserve(32 + 64 * lock.len());
    out.push(VERSION);
    push_number(out, mark);
    out.extend_from_slice(&boot.to_le_bytes());
    push_len(out, lock.len());
    for hold in lock.holds() {
        encode_hold(hold, boot, out);
    }
}

/// Reads a stored lock. `boot` names this host's boot: deadlines of another one are left out.
pub fn decode(bytes: &[u8], boot: u64) -> Result<Image, Corrupt> {
    let mut input = Input::new(bytes)?;
    let mark = input.number(Token::MAX)?;
    let stored_on = input.take(8)?.try_into().map(u64::from_le_bytes).map_err(|_| Corrupt::new("cut short"))?;
    let count = input.len(input.rest.len() / HOLD_BYTES_MIN)?;
    let mut grants: Vec<Grant> = Vec::with_capacity(count);
    for _ in 0..count {
        let mut grant = decode_grant(&mut input, stored_on)?;
        if grants.last().is_some_and(|last| last.token >= grant.token) {
            return Err(Corrupt::new("tokens are doubled or out of order"));
        }
        grant.deadline = grant.deadline.filter(|_| stored_on == boot);
        grants.push(grant);
    }
    input.end()?;
    if count > 1 {
        if grants.iter().any(|grant| grant.mode == Mode::Exclusive) {
            return Err(Corrupt::new("an exclusive hold beside another"));
        }
        let owners: BTreeSet<&[u8]> = grants.iter().map(|grant| grant.owner.as_slice()).collect();
        if owners.len() != count {
            return Err(Corrupt::new("an owner holds twice"));
        }
    }
    Ok(Image { mark, grants })
}

/// Appends the stored form of the counter to `out`.
pub fn encode_counter(counter: CounterImage, out: &mut Vec<u8>) {
    out.push(VERSION);
    push_number(out, counter.value);
    push_number(out, counter.mark);
}

/// Appends, instead of a counter, what makes the whole file unreadable: it comes from a replica that lacks what its primary has.
pub fn encode_incomplete(out: &mut Vec<u8>) {
    out.push(INCOMPLETE);
}

/// Reads a stored counter.
pub fn decode_counter(bytes: &[u8]) -> Result<CounterImage, Corrupt> {
    if bytes.first() == Some(&INCOMPLETE) {
        return Err(Corrupt::new("it was saved by a replica that had refused changes: remove the file"));
    }
    let mut input = Input::new(bytes)?;
    let counter = CounterImage { value: input.number(Token::MAX)?, mark: input.number(Token::MAX)? };
    input.end()?;
    Ok(counter)
}

fn encode_hold(hold: &Hold, boot: u64, out: &mut Vec<u8>) {
    let deadline = (hold.deadline() != Time::NEVER && boot != 0).then_some(hold.deadline().as_us());
    let terms = hold.terms.as_deref();
    let claim = terms.and_then(|terms| terms.claim);
    let session = terms.and_then(|terms| terms.session);
    let converted_from = terms.and_then(|terms| terms.converted_from);
    let channel = terms.map(|terms| terms.channel.as_slice()).filter(|channel| !channel.is_empty());
    let label = terms.map(|terms| terms.label.as_slice()).filter(|label| !label.is_empty());
    let ids = terms.map(|terms| &terms.ids).filter(|ids| !ids.is_empty());
    let flags = [
        (SHARED, hold.mode() == Mode::Shared),
        (DEADLINE, deadline.is_some()),
        (CLAIM, claim.is_some()),
        (SESSION, session.is_some()),
        (CONVERTED_FROM, converted_from.is_some()),
        (CHANNEL, channel.is_some()),
        (LABEL, label.is_some()),
        (IDS, ids.is_some()),
    ];
    out.push(flags.iter().filter(|(_, is_there)| *is_there).fold(0, |byte, (flag, _)| byte | flag));
    push_number(out, hold.token.get());
    push_number(out, hold.lease().as_ms().into());
    let numbers = [
        deadline,
        claim.map(|claim| claim.as_ms().into()),
        session.map(|grace| grace.as_ms().into()),
        converted_from.map(Token::get),
    ];
    for number in numbers.into_iter().flatten() {
        push_number(out, number);
    }
    for text in [Some(hold.owner.as_slice()), channel, label].into_iter().flatten() {
        push_text(out, text);
    }
    if let Some(ids) = ids {
        push_len(out, ids.len());
        for id in ids {
            push_text(out, id);
        }
    }
}

fn decode_grant(input: &mut Input<'_>, stored_on: u64) -> Result<Grant, Corrupt> {
    let flags = input.byte()?;
    let has = |flag| flags & flag != 0;
    let token = input.token()?;
    let lease = input.millis()?;
    let deadline = if has(DEADLINE) { Some(Time::from_us(input.number(Time::LAST.as_us())?)) } else { None };
    if deadline.is_some() && stored_on == 0 {
        return Err(Corrupt::new("a deadline of an unknown boot"));
    }
    let mut terms = Terms::default();
    if has(CLAIM) {
        terms.claim = Some(input.millis()?);
    }
    if has(SESSION) {
        terms.session = Some(input.millis()?);
    }
    if has(CONVERTED_FROM) {
        terms.converted_from = Some(input.token()?);
    }
    let owner = input.text(OWNER_BYTES_MAX)?.into();
    if has(CHANNEL) {
        terms.channel = input.text(CHANNEL_BYTES_MAX)?.into();
    }
    if has(LABEL) {
        terms.label = input.text(LABEL_BYTES_MAX)?.into();
    }
    if has(IDS) {
        terms.ids = input.ids()?;
    }
    let mode = if has(SHARED) { Mode::Shared } else { Mode::Exclusive };
    let plain = flags & !(SHARED | DEADLINE) == 0;
    Ok(Grant { owner, mode, token, lease, deadline, terms: (!plain).then(|| Box::new(terms)) })
}

fn push_number(out: &mut Vec<u8>, number: u64) {
    let mut rest = number;
    while rest > 0x7f {
        out.push((rest & 0x7f) as u8 | 0x80);
        rest >>= 7;
    }
    out.push((rest & 0x7f) as u8);
}

fn push_len(out: &mut Vec<u8>, len: usize) {
    // A length in memory is below 2^64 on every machine there is.
    push_number(out, u64::try_from(len).unwrap_or(u64::MAX));
}

fn push_text(out: &mut Vec<u8>, text: &[u8]) {
    push_len(out, text.len());
    out.extend_from_slice(text);
}

/// Stored bytes, read from the front.
struct Input<'a> {
    rest: &'a [u8],
}

impl<'a> Input<'a> {
    /// Reads the version.
    fn new(bytes: &'a [u8]) -> Result<Self, Corrupt> {
        match bytes.split_first() {
            Some((1..=VERSION, rest)) => Ok(Self { rest }),
            Some(_) => Err(Corrupt::new("an unknown version: perhaps a later one wrote it")),
            None => Err(Corrupt::new("empty")),
        }
    }

    fn byte(&mut self) -> Result<u8, Corrupt> {
        let (byte, rest) = self.rest.split_first().ok_or(Corrupt::new("cut short"))?;
        self.rest = rest;
        Ok(*byte)
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], Corrupt> {
        let (bytes, rest) = self.rest.split_at_checked(len).ok_or(Corrupt::new("cut short"))?;
        self.rest = rest;
        Ok(bytes)
    }

    fn number(&mut self, max: u64) -> Result<u64, Corrupt> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                return Err(Corrupt::new("a number is too long"));
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                if byte == 0 && shift != 0 {
                    return Err(Corrupt::new("a number has superfluous bytes"));
                }
                return if number <= max { Ok(number) } else { Err(Corrupt::new("a number is out of range")) };
            }
        }
        Err(Corrupt::new("a number is too long"))
    }

    fn token(&mut self) -> Result<Token, Corrupt> {
        Token::new(self.number(Token::MAX)?).ok_or(Corrupt::new("a token is zero"))
    }

    fn millis(&mut self) -> Result<Millis, Corrupt> {
        let ms = self.number(u32::MAX.into())?;
        Ok(Millis(u32::try_from(ms).unwrap_or(u32::MAX)))
    }

    /// A length or a count of at most `max`.
    fn len(&mut self, max: usize) -> Result<usize, Corrupt> {
        let len = self.number(u64::MAX)?;
        usize::try_from(len).ok().filter(|len| *len <= max).ok_or(Corrupt::new("a length is out of range"))
    }

    /// A text of 1 to `max` bytes.
    fn text(&mut self, max: usize) -> Result<&'a [u8], Corrupt> {
        match self.len(max)? {
            0 => Err(Corrupt::new("a text is empty")),
            len => self.take(len),
        }
    }

    fn ids(&mut self) -> Result<BTreeSet<Id>, Corrupt> {
        let mut ids: BTreeSet<Id> = BTreeSet::new();
        let count = self.len(IDS_MAX)?;
        for _ in 0..count {
            let id = Id::new(self.text(ID_BYTES_MAX)?);
            if ids.last().is_some_and(|last| *last >= id) {
                return Err(Corrupt::new("ids are doubled or out of order"));
            }
            ids.insert(id);
        }
        if ids.is_empty() { Err(Corrupt::new("ids without an id")) } else { Ok(ids) }
    }

    fn end(&self) -> Result<(), Corrupt> {
        if self.rest.is_empty() { Ok(()) } else { Err(Corrupt::new("bytes after the end")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::Bytes;
    use crate::lock::{Change, Start};
    use alloc::vec;

    const BOOT: u64 = 0x0807_0605_0403_0201;
    const MARK: u64 = 300;

    fn token(n: u64) -> Token {
        Token::new(n).unwrap()
    }

    fn shared(owner: &[u8], n: u64) -> Grant {
        Grant {
            owner: Bytes::new(owner),
            mode: Mode::Shared,
            token: token(n),
            lease: Millis(5),
            deadline: None,
            terms: None,
        }
    }

    fn full() -> Grant {
        Grant {
            owner: Bytes::new(b"ow"),
            mode: Mode::Exclusive,
            token: token(128),
            lease: Millis(1000),
            deadline: Some(Time::from_us(129)),
            terms: Some(Box::new(Terms {
                claim: Some(Millis(7)),
                session: Some(Millis(9)),
                channel: Bytes::new(b"ch"),
                label: Bytes::new(b"l"),
                ids: [Id::new(b"a"), Id::new(b"b")].into(),
                converted_from: Some(token(3)),
            })),
        }
    }

    fn lock(grants: &[Grant]) -> Lock {
        let mut lock = Lock::default();
        for grant in grants {
            lock.apply(&Change::Grant(grant.clone()), Start::AfterLoading);
        }
        lock
    }

    /// Version 1 as it is in people's files. These bytes must be read for ever: a new version adds its own, and changes none.
    const HEAD: [u8; 11] = [1, 0xac, 0x02, 1, 2, 3, 4, 5, 6, 7, 8];
    const FULL: &[u8] = b"\x01\xfe\x80\x01\xe8\x07\x81\x01\x07\x09\x03\x02ow\x02ch\x01l\x02\x01a\x01b";
    const TWO: &[u8] = b"\x02\x01\x01\x05\x01a\x01\x02\x05\x01b";

    #[track_caller]
    fn is_golden(grants: &[Grant], tail: &[u8]) {
        let golden = [&HEAD, tail].concat();
        let mut out = Vec::new();
        encode(&lock(grants), MARK, BOOT, &mut out);
        assert_eq!(out, golden, "what is written");
        assert_eq!(decode(&golden, BOOT), Ok(Image { mark: MARK, grants: grants.to_vec() }), "what is read");
    }

    #[test]
    fn version_1_is_written_and_read_byte_for_byte() {
        is_golden(&[], b"\0");
        is_golden(&[full()], FULL);
        is_golden(&[shared(b"a", 1), shared(b"b", 2)], TWO);
        let mut out = Vec::new();
        encode_counter(CounterImage { value: 129, mark: 300 }, &mut out);
        assert_eq!(out, [1, 0x81, 0x01, 0xac, 0x02]);
        assert_eq!(decode_counter(&out), Ok(CounterImage { value: 129, mark: 300 }));
    }

    #[test]
    fn a_deadline_is_taken_on_its_own_boot_only() {
        let golden = [&HEAD, FULL].concat();
        for boot in [BOOT + 1, 0] {
            assert_eq!(decode(&golden, boot).unwrap().grants[0].deadline, None);
        }
        let mut out = Vec::new();
        encode(&lock(&[full()]), MARK, 0, &mut out);
        assert_eq!(decode(&out, 0).unwrap().grants[0].deadline, None);
    }

    #[test]
    fn a_later_version_is_refused_as_such() {
        for error in [decode(&[2, 0], BOOT).unwrap_err(), decode_counter(&[2, 0]).unwrap_err()] {
            assert_eq!(error.reason(), "an unknown version: perhaps a later one wrote it");
        }
    }

    #[test]
    fn a_file_that_lacks_locks_is_refused() {
        let mut out = Vec::new();
        encode_incomplete(&mut out);
        assert_eq!(
            decode_counter(&out).unwrap_err().reason(),
            "it was saved by a replica that had refused changes: remove the file"
        );
    }

    #[track_caller]
    fn is_refused(tail: &[u8], reason: &str) {
        let bytes = [&HEAD, tail].concat();
        assert_eq!(decode(&bytes, BOOT).unwrap_err().reason(), reason);
    }

    #[test]
    fn what_no_lock_can_be_is_refused() {
        is_refused(b"\x02\x00\x01\x05\x01a\x01\x02\x05\x01b", "an exclusive hold beside another");
        is_refused(b"\x02\x01\x01\x05\x01a\x01\x02\x05\x01a", "an owner holds twice");
        is_refused(b"\x02\x01\x02\x05\x01a\x01\x02\x05\x01b", "tokens are doubled or out of order");
        is_refused(b"\x02\x01\x02\x05\x01a\x01\x01\x05\x01b", "tokens are doubled or out of order");
        is_refused(b"\x01\x00\x00\x05\x01a", "a token is zero");
        is_refused(b"\x01\x00\x01\x05\x00a", "a text is empty");
        is_refused(b"\x01\x20\x01\x05\x01a\x00", "a text is empty");
        is_refused(b"\x01\x80\x01\x05\x01a\x00", "ids without an id");
        is_refused(b"\x01\x80\x01\x05\x01a\x02\x01b\x01a", "ids are doubled or out of order");
        is_refused(b"\x01\x80\x01\x05\x01a\x02\x01a\x01a", "ids are doubled or out of order");
        is_refused(b"\x01\x00\x01\x05\x01a\x00", "bytes after the end");
        is_refused(b"\x01\x00\x01\x05\x81\x20", "a length is out of range");
    }

    #[test]
    fn hostile_numbers_are_refused_before_anything_is_allocated() {
        is_refused(b"\xff\xff\xff\xff\x0f\x00\x01\x05\x01a", "a length is out of range");
        is_refused(b"\x02\x00\x01\x05\x01a", "a length is out of range");
        is_refused(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "a number is too long");
        is_refused(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "a number is too long");
        is_refused(b"\x80\x00", "a number has superfluous bytes");
        is_refused(b"\x01\x00\x80\x80\x80\x80\x80\x80\x80\x10\x05\x01a", "a number is out of range");
        is_refused(b"\x01\x00\x01\x80\x80\x80\x80\x10\x01a", "a number is out of range");
        let unknown_boot = [vec![1, 0], vec![0; 8], b"\x01\x02\x01\x05\x05\x01a".to_vec()].concat();
        assert_eq!(decode(&unknown_boot, BOOT).unwrap_err().reason(), "a deadline of an unknown boot");
    }
}
