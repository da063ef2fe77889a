//! A [`Change`] as bytes: the argument of the internal command, `FLOCK._APPLY <change> [key]` (MARK has no key).
//!
//! Readable text: words first, then lengths, then raw bytes. It is written once per ACQUIRE on the server's only thread, so the
//! usual change is short and made in one pass.
//!
//! ```text
//! GRANT <X|S> <token> <lease ms> <deadline> <owner>
//! GRANT-TERMS <X|S> <token> <lease ms> <deadline> <claim ms|-> <session ms|-> <converted from|->
//!             <owner length> <channel length> <label length> <ids> <id length>... <owner><channel><label><id>...
//! RENEW <token> <lease ms> <deadline>
//! MODE <old token> <new token> <X|S>
//! END <token|all>
//! IDS <token> <+|-><id>
//! MARK <n>
//! ```
//!
//! A deadline is `<microseconds on the boot clock>@<boot, 16 hex digits>`, or `-`. Only a reader on the same boot takes it: there it
//! is exact. On any other the duration starts anew, so a lease can end late, never early.
//!
//! **Versions.** The first word is the version: what a word means never changes. A later version that must say more uses a new
//! word, which an earlier one refuses as unknown. For the same reason parsing is strict: one value has one text.

use crate::bytes::Bytes;
use crate::lock::{Change, Grant, Id, Mode, Terms};
use crate::time::Time;
use crate::token::Token;
use crate::wire::text::{self, Words, push_len, push_number};
use crate::wire::{CHANNEL_BYTES_MAX, Corrupt, ID_BYTES_MAX, IDS_MAX, LABEL_BYTES_MAX, OWNER_BYTES_MAX};
use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::vec::Vec;

/// Whether grants are written with a word that no version knows yet.
const NEXT_FORMAT: bool = cfg!(feature = "next-format");
const NEXT: &[u8] = b"NEXT-";

/// Appends `change` to `out`. `boot` names the host's boot, whose clock the deadlines are on; 0 if that is not known.
pub fn encode(change: &Change, boot: u64, out: &mut Vec<u8>) {
    match change {
        Change::Grant(grant) => encode_grant(grant, boot, out),
        Change::Renew { token, lease, deadline } => {
            out.extend_from_slice(b"RENEW ");
            push_number(out, token.get());
            out.push(b' ');
            push_number(out, lease.as_ms().into());
            out.push(b' ');
            push_deadline(out, *deadline, boot);
        }
        Change::Mode { old, new, mode } => {
            out.extend_from_slice(b"MODE ");
            push_number(out, old.get());
            out.push(b' ');
            push_number(out, new.get());
            out.push(b' ');
            out.push(mode_letter(*mode));
        }
        Change::End { token: Some(token) } => {
            out.extend_from_slice(b"END ");
            push_number(out, token.get());
        }
        Change::End { token: None } => out.extend_from_slice(b"END all"),
        Change::Ids { token, id, joined } => {
            out.extend_from_slice(b"IDS ");
            push_number(out, token.get());
            out.extend_from_slice(if *joined { b" +" } else { b" -" });
            out.extend_from_slice(id);
        }
        Change::Mark(mark) => {
            out.extend_from_slice(b"MARK ");
            push_number(out, *mark);
        }
    }
}

/// Reads a change. `boot` names this host's boot: a deadline of another one is left out.
pub fn decode(bytes: &[u8], boot: u64) -> Result<Change, Corrupt> {
    let mut words = Words::new(if NEXT_FORMAT { bytes.strip_prefix(NEXT).unwrap_or(bytes) } else { bytes });
    match words.word()? {
        b"GRANT" => decode_grant(words, boot, false),
        b"GRANT-TERMS" => decode_grant(words, boot, true),
        b"RENEW" => {
            let (token, lease) = (words.token()?, words.millis()?);
            Ok(Change::Renew { token, lease, deadline: deadline(words.rest(), boot)? })
        }
        b"MODE" => {
            let (old, new) = (words.token()?, words.token()?);
            Ok(Change::Mode { old, new, mode: mode(words.rest())? })
        }
        b"END" if words.rest() == b"all" => Ok(Change::End { token: None }),
        b"END" => Ok(Change::End { token: Some(text::token(words.rest())?) }),
        b"IDS" => {
            let token = words.token()?;
            let (joined, id) = match words.rest() {
                [b'+', id @ ..] => (true, id),
                [b'-', id @ ..] => (false, id),
                _ => return Err(Corrupt::new("an id neither joins nor leaves")),
            };
            if id.is_empty() || id.len() > ID_BYTES_MAX {
                return Err(Corrupt::new("an id's length is out of range"));
            }
            Ok(Change::Ids { token, id: Id::new(id), joined })
        }
        b"MARK" => Ok(Change::Mark(text::number(words.rest(), Token::MAX)?)),
        _ => Err(Corrupt::new("an unknown change: perhaps a later version wrote it")),
    }
}

fn encode_grant(grant: &Grant, boot: u64, out: &mut Vec<u8>) {
    let terms = grant.terms.as_deref().filter(|terms| **terms != Terms::default());
    out.reserve(96 + grant.owner.len());
    if NEXT_FORMAT {
        out.extend_from_slice(NEXT);
    }
    out.extend_from_slice(if terms.is_none() { b"GRANT " } else { b"GRANT-TERMS " });
    out.push(mode_letter(grant.mode));
    out.push(b' ');
    push_number(out, grant.token.get());
    out.push(b' ');
    push_number(out, grant.lease.as_ms().into());
    out.push(b' ');
    push_deadline(out, grant.deadline, boot);
    out.push(b' ');
    let Some(terms) = terms else {
        out.extend_from_slice(&grant.owner);
        return;
    };
    push_optional(out, terms.claim.map(|claim| claim.as_ms().into()));
    push_optional(out, terms.session.map(|grace| grace.as_ms().into()));
    push_optional(out, terms.converted_from.map(Token::get));
    for len in [grant.owner.len(), terms.channel.len(), terms.label.len(), terms.ids.len()] {
        push_len(out, len);
        out.push(b' ');
    }
    for id in &terms.ids {
        push_len(out, id.len());
        out.push(b' ');
    }
    out.extend_from_slice(&grant.owner);
    out.extend_from_slice(&terms.channel);
    out.extend_from_slice(&terms.label);
    for id in &terms.ids {
        out.extend_from_slice(id);
    }
}

fn decode_grant(mut words: Words<'_>, boot: u64, with_terms: bool) -> Result<Change, Corrupt> {
    let mode = mode(words.word()?)?;
    let (token, lease) = (words.token()?, words.millis()?);
    let deadline = deadline(words.word()?, boot)?;
    let (owner, terms) = if with_terms { decode_terms(words)? } else { (words.rest(), None) };
    if owner.is_empty() || owner.len() > OWNER_BYTES_MAX {
        return Err(Corrupt::new("the owner's length is out of range"));
    }
    Ok(Change::Grant(Grant { owner: owner.into(), mode, token, lease, deadline, terms }))
}

fn decode_terms(mut words: Words<'_>) -> Result<(&[u8], Option<Box<Terms>>), Corrupt> {
    let claim = optional(words.word()?, text::millis)?;
    let session = optional(words.word()?, text::millis)?;
    let converted_from = optional(words.word()?, text::token)?;
    let owner = words.len(OWNER_BYTES_MAX)?;
    let channel = words.len(CHANNEL_BYTES_MAX)?;
    let label = words.len(LABEL_BYTES_MAX)?;
    let count = words.len(IDS_MAX)?;
    // Twice over the same text: once past the lengths, then along them with the bytes. So nothing is kept that is not there.
    let mut lens = words;
    for _ in 0..count {
        words.len(ID_BYTES_MAX)?;
    }
    let owner = words.take(owner)?;
    let channel = words.take(channel)?;
    let label = words.take(label)?;
    let mut ids: BTreeSet<Id> = BTreeSet::new();
    for _ in 0..count {
        let len = lens.len(ID_BYTES_MAX)?;
        let id = Id::new(words.take(len)?);
        if id.is_empty() || ids.last().is_some_and(|last| *last >= id) {
            return Err(Corrupt::new("ids are empty, doubled or out of order"));
        }
        ids.insert(id);
    }
    if !words.rest().is_empty() {
        return Err(Corrupt::new("bytes after the end"));
    }
    let terms = Terms { claim, session, channel: Bytes::new(channel), label: Bytes::new(label), ids, converted_from };
    if terms == Terms::default() {
        return Err(Corrupt::new("terms without a term"));
    }
    Ok((owner, Some(Box::new(terms))))
}

fn push_deadline(out: &mut Vec<u8>, deadline: Option<Time>, boot: u64) {
    let Some(deadline) = deadline.filter(|deadline| *deadline != Time::NEVER && boot != 0) else {
        out.push(b'-');
        return;
    };
    push_number(out, deadline.as_us());
    out.push(b'@');
    for half in [boot >> 32, boot & 0xffff_ffff] {
        out.extend_from_slice(&hex_digits(half));
    }
}

fn deadline(word: &[u8], boot: u64) -> Result<Option<Time>, Corrupt> {
    if word == b"-" {
        return Ok(None);
    }
    let at = word.iter().position(|byte| *byte == b'@').ok_or(Corrupt::new("a deadline without its boot"))?;
    let (us, written_on) = word.split_at_checked(at).ok_or(Corrupt::new("a deadline without its boot"))?;
    let us = text::number(us, Time::LAST.as_us())?;
    let [b'@', digits @ ..] = written_on else {
        return Err(Corrupt::new("a deadline without its boot"));
    };
    if digits.len() != 16 {
        return Err(Corrupt::new("a boot is not 16 digits"));
    }
    let mut written_on = 0;
    for digit in digits {
        let nibble = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return Err(Corrupt::new("a boot is not in hexadecimal")),
        };
        written_on = (written_on << 4) | u64::from(nibble);
    }
    if written_on == 0 {
        return Err(Corrupt::new("a deadline of an unknown boot"));
    }
    Ok((written_on == boot).then_some(Time::from_us(us)))
}

/// The lower 32 bits of `number` as eight hexadecimal digits, all at once: one byte of the word for each.
fn hex_digits(number: u64) -> [u8; 8] {
    let mut digits = number & 0xffff_ffff;
    digits = (digits | (digits << 16)) & 0x0000_ffff_0000_ffff;
    digits = (digits | (digits << 8)) & 0x00ff_00ff_00ff_00ff;
    digits = (digits | (digits << 4)) & 0x0f0f_0f0f_0f0f_0f0f;
    // Six more than a digit of ten or more carries into the bit above it.
    let letters = ((digits + 0x0606_0606_0606_0606) >> 4) & 0x0101_0101_0101_0101;
    (digits + 0x3030_3030_3030_3030 + letters * u64::from(b'a' - b'0' - 10)).to_be_bytes()
}

fn push_optional(out: &mut Vec<u8>, number: Option<u64>) {
    match number {
        Some(number) => push_number(out, number),
        None => out.push(b'-'),
    }
    out.push(b' ');
}

fn optional<T>(word: &[u8], read: fn(&[u8]) -> Result<T, Corrupt>) -> Result<Option<T>, Corrupt> {
    if word == b"-" { Ok(None) } else { read(word).map(Some) }
}

const fn mode_letter(mode: Mode) -> u8 {
    match mode {
        Mode::Exclusive => b'X',
        Mode::Shared => b'S',
    }
}

fn mode(word: &[u8]) -> Result<Mode, Corrupt> {
    match word {
        b"X" => Ok(Mode::Exclusive),
        b"S" => Ok(Mode::Shared),
        _ => Err(Corrupt::new("an unknown mode")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Millis;

    const BOOT: u64 = 0x0123_4567_89ab_cdef;

    fn token(n: u64) -> Token {
        Token::new(n).unwrap()
    }

    fn grant(terms: Option<Terms>) -> Change {
        Change::Grant(Grant {
            owner: Bytes::new(b"me and you"),
            mode: Mode::Exclusive,
            token: token(17_293_822_561_234),
            lease: Millis(30_000),
            deadline: Some(Time::from_us(8_839_201_000_000)),
            terms: terms.map(Box::new),
        })
    }

    /// The text is fixed: an AOF of this version must be read by every later one.
    #[track_caller]
    fn reads_as(change: &Change, text: &str) {
        let mut out = Vec::new();
        encode(change, BOOT, &mut out);
        assert_eq!(str::from_utf8(&out), Ok(text));
        assert_eq!(decode(&out, BOOT).as_ref(), Ok(change));
    }

    #[test]
    fn changes_read_as_documented() {
        let deadline = Some(Time::from_us(5));
        reads_as(&grant(None), "GRANT X 17293822561234 30000 8839201000000@0123456789abcdef me and you");
        reads_as(
            &grant(Some(Terms {
                claim: Some(Millis(5000)),
                session: None,
                channel: Bytes::new(b"chan"),
                label: Bytes::new(b"job"),
                ids: [Id::new(b"a b"), Id::new(b"c")].into(),
                converted_from: Some(token(3)),
            })),
            "GRANT-TERMS X 17293822561234 30000 8839201000000@0123456789abcdef 5000 - 3 10 4 3 2 3 1 me and youchanjoba bc",
        );
        reads_as(&Change::Renew { token: token(9), lease: Millis(7), deadline }, "RENEW 9 7 5@0123456789abcdef");
        reads_as(&Change::Renew { token: token(9), lease: Millis(7), deadline: None }, "RENEW 9 7 -");
        reads_as(&Change::Mode { old: token(9), new: token(10), mode: Mode::Shared }, "MODE 9 10 S");
        reads_as(&Change::End { token: Some(token(9)) }, "END 9");
        reads_as(&Change::End { token: None }, "END all");
        reads_as(&Change::Ids { token: token(9), id: Id::new(b"+x y"), joined: true }, "IDS 9 ++x y");
        reads_as(&Change::Ids { token: token(9), id: Id::new(b"x"), joined: false }, "IDS 9 -x");
        reads_as(&Change::Mark(0), "MARK 0");
    }

    #[test]
    fn a_deadline_is_taken_on_its_own_boot_only() {
        // Two hosts count from their own boots: the same number is another instant there.
        let mut out = Vec::new();
        encode(&grant(None), BOOT, &mut out);
        for boot in [BOOT + 1, 0] {
            let Ok(Change::Grant(read)) = decode(&out, boot) else { panic!("a grant") };
            assert_eq!(read.deadline, None);
        }
    }

    #[test]
    fn a_boot_is_written_in_16_hexadecimal_digits() {
        // The digits are made all at once by arithmetic on one word: a carry into a neighbour would show here.
        for boot in [1, 0x9a9a_9a9a_9a9a_9a9a, 0xffff_ffff_ffff_ffff, 0x8000_0000_0000_0000, 0x0f0f_f0f0_a5a5_5a5a] {
            let renewal = Change::Renew { token: token(9), lease: Millis(7), deadline: Some(Time::ZERO) };
            let mut out = Vec::new();
            encode(&renewal, boot, &mut out);
            assert_eq!(out, alloc::format!("RENEW 9 7 0@{boot:016x}").into_bytes());
            assert_eq!(decode(&out, boot), Ok(renewal));
        }
    }

    #[test]
    fn an_unknown_boot_writes_no_deadline() {
        let mut out = Vec::new();
        encode(&grant(None), 0, &mut out);
        assert_eq!(str::from_utf8(&out), Ok("GRANT X 17293822561234 30000 - me and you"));
    }

    #[test]
    fn a_change_of_a_later_version_is_refused_as_such() {
        let error = decode(b"GRANT-2 X 1 2 - me", BOOT).unwrap_err();
        assert_eq!(error.reason(), "an unknown change: perhaps a later version wrote it");
    }

    #[test]
    fn what_is_not_exactly_a_change_is_refused() {
        for text in [
            "",
            "GRANT",
            "GRANT ",
            "grant X 1 1 - o",
            "GRANT Y 1 1 - o",
            "GRANT X 0 1 - o",
            "GRANT X 9007199254740992 1 - o",
            "GRANT X 01 1 - o",
            "GRANT X +1 1 - o",
            "GRANT X 1 4294967296 - o",
            "GRANT X 1 1 5 o",
            "GRANT X 1 1 5@ o",
            "GRANT X 1 1 5@0123456789abcdeF o",
            "GRANT X 1 1 5@0123456789abcdef0 o",
            "GRANT X 1 1 5@0000000000000000 o",
            "GRANT X 1 1 18446744073709551615@0123456789abcdef o",
            "GRANT X 1 1 - ",
            "GRANT X 1 1 -",
            "GRANT  X 1 1 - o",
            "GRANT-TERMS X 1 1 - - - - 1 0 0 0 o",
            "GRANT-TERMS X 1 1 - 5 - - 1 0 0 0 ",
            "GRANT-TERMS X 1 1 - 5 - - 1 0 0 0 oo",
            "GRANT-TERMS X 1 1 - 5 - - 0 0 0 0 ",
            "GRANT-TERMS X 1 1 - 5 - - 1 4097 0 0 o",
            "GRANT-TERMS X 1 1 - 5 - - 1 0 0 1025 o",
            "GRANT-TERMS X 1 1 - 5 - - 1 0 0 18446744073709551615 o",
            "GRANT-TERMS X 1 1 - 5 - - 1 0 0 2 1 1 oba",
            "GRANT-TERMS X 1 1 - 5 - - 1 0 0 2 1 1 oaa",
            "GRANT-TERMS X 1 1 - 5 - - 1 0 0 1 0 o",
            "GRANT-TERMS X 1 1 - 5 - 0 1 0 0 0 o",
            "RENEW 1 1",
            "RENEW 1 1 ",
            "RENEW 1 1 - ",
            "MODE 1 2",
            "MODE 1 2 X ",
            "END",
            "END ",
            "END ALL",
            "END 0",
            "IDS 1 x",
            "IDS 1 +",
            "IDS 1 ",
            "MARK",
            "MARK -1",
            "MARK 9007199254740992",
            "MARK 1 ",
        ] {
            assert!(decode(text.as_bytes(), BOOT).is_err(), "{text:?}");
        }
    }

    #[test]
    fn owners_and_ids_over_the_hard_bound_are_refused() {
        let long = "x".repeat(OWNER_BYTES_MAX + 1);
        assert!(decode(alloc::format!("GRANT X 1 1 - {long}").as_bytes(), BOOT).is_err());
        assert!(decode(alloc::format!("IDS 1 +{long}").as_bytes(), BOOT).is_err());
        assert!(decode(alloc::format!("GRANT X 1 1 - {}", &long[1..]).as_bytes(), BOOT).is_ok());
    }
}
