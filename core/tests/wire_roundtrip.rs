//! What is encoded is read back, and what is not an encoding is refused without a panic.
//!
//! What could break: a field lost or shifted between encoder and parser, a text with two meanings, a damaged file or message that
//! takes the server down or is taken for another one. Values come from a seeded generator: `FLOCK_SEED=n` repeats a run.

use flock_core::bytes::Bytes;
use flock_core::effect::{Ended, Notice};
use flock_core::lock::{Change, Grant, Id, Lock, Mode, Start, Terms};
use flock_core::refusal::{EndReason, LossReason};
use flock_core::request::{Acquire, Limits, Release, ReleaseScope, Renew, Revoke, Wait};
use flock_core::snapshot::{self, CounterImage, Image};
use flock_core::wire::ID_BYTES_MAX;
use flock_core::wire::change;
use flock_core::wire::command::{Check, Command, INFO_LIMIT_MAX, Info, LIST_COUNT_MAX, List};
use flock_core::wire::message::{Announcement, OwnerMessage};
use flock_core::wire::text::{Decimal, parse_number};
use flock_core::{Millis, Time, Token};
use std::collections::BTreeSet;
use std::num::NonZeroU32;

const BOOT: u64 = 0xfeed_0123_4567_89ab;

/// Marsaglia's xorshift64: the sequence depends on the seed alone.
struct Random(u64);

impl Random {
    fn new(salt: u64) -> Self {
        let seed = std::env::var("FLOCK_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(20_261_130);
        println!("FLOCK_SEED={seed}");
        Self((seed ^ salt.wrapping_mul(0x9e37_79b9_7f4a_7c15)).max(1))
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn flip(&mut self) -> bool {
        self.below(2) == 0
    }

    /// A number of `min` to `max`, the ends and the short ones more often than chance.
    fn number(&mut self, min: u64, max: u64) -> u64 {
        match self.below(6) {
            0 => min,
            1 => max,
            2 => min + self.below(10).min(max - min),
            _ => {
                let range = (max - min).saturating_add(1) >> self.below(40);
                min + self.below(range.max(1)).min(max - min)
            }
        }
    }

    fn millis(&mut self, min: u32, max: u32) -> Millis {
        Millis(u32::try_from(self.number(min.into(), max.into())).expect("in range"))
    }

    fn token(&mut self) -> Token {
        Token::new(self.number(1, Token::MAX)).expect("in range")
    }

    /// Bytes of the kinds that break parsers: spaces, digits, signs, control bytes, option words.
    fn bytes(&mut self, min: u64, max: u64) -> Vec<u8> {
        const BYTES: &[u8] = b"ab 01+-@:\r\n\0\xff{}SHAREDall";
        let len = if self.below(20) == 0 { max } else { self.number(min, max.min(min + 40)) };
        (0..len)
            .map(|_| match self.below(4) {
                0 => self.next().to_le_bytes()[0],
                _ => BYTES[usize::try_from(self.below(BYTES.len() as u64)).expect("an index")],
            })
            .collect()
    }

    fn some<T>(&mut self, make: impl FnOnce(&mut Self) -> T) -> Option<T> {
        if self.below(3) == 0 { Some(make(self)) } else { None }
    }

    fn mode(&mut self) -> Mode {
        if self.flip() { Mode::Exclusive } else { Mode::Shared }
    }

    fn terms(&mut self) -> Option<Box<Terms>> {
        let terms = Terms {
            claim: self.some(|random| random.millis(1, u32::MAX)),
            session: self.some(|random| random.millis(1, u32::MAX)),
            channel: Bytes::new(&self.some(|random| random.bytes(1, 512)).unwrap_or_default()),
            label: Bytes::new(&self.some(|random| random.bytes(1, 256)).unwrap_or_default()),
            ids: match self.below(3) {
                0 => (0..self.below(6)).map(|_| Id::new(&self.bytes(1, 256))).collect(),
                _ => BTreeSet::new(),
            },
            converted_from: self.some(Self::token),
        };
        (terms != Terms::default()).then(|| Box::new(terms))
    }

    fn grant(&mut self) -> Grant {
        Grant {
            owner: Bytes::new(&self.bytes(1, 256)),
            mode: self.mode(),
            token: self.token(),
            lease: self.millis(0, u32::MAX),
            deadline: if self.flip() { Some(Time::from_us(self.number(0, Time::LAST.as_us()))) } else { None },
            terms: if self.flip() { self.terms() } else { None },
        }
    }

    fn change(&mut self) -> Change {
        match self.below(9) {
            0..4 => Change::Grant(self.grant()),
            4 => Change::Renew {
                token: self.token(),
                lease: self.millis(0, u32::MAX),
                deadline: self.some(|random| Time::from_us(random.number(0, Time::LAST.as_us()))),
            },
            5 => Change::Mode { old: self.token(), new: self.token(), mode: self.mode() },
            6 => Change::End { token: self.some(Self::token) },
            7 => Change::Ids { token: self.token(), id: Id::new(&self.bytes(1, 256)), joined: self.flip() },
            _ => Change::Mark(self.number(0, Token::MAX)),
        }
    }

    fn lock(&mut self) -> Lock {
        let mut grants = Vec::new();
        let exclusive = self.below(3) == 0;
        let count = if exclusive { self.below(2) } else { self.below(12) };
        let mut owners = BTreeSet::new();
        let mut tokens = BTreeSet::new();
        for _ in 0..count {
            let mut grant = self.grant();
            grant.mode = if exclusive { Mode::Exclusive } else { Mode::Shared };
            if owners.insert(grant.owner.clone()) && tokens.insert(grant.token) {
                grants.push(grant);
            }
        }
        lock_of(&grants)
    }

    fn notice(&mut self) -> Notice {
        match self.below(4) {
            0 => Notice::Granted { token: self.token(), lasts: self.millis(0, u32::MAX), claim: self.flip() },
            1 => Notice::TimedOut,
            2 => Notice::Ended(
                [
                    EndReason::Superseded,
                    EndReason::Cancelled,
                    EndReason::Flushed,
                    EndReason::RoleChanged,
                    EndReason::Moved,
                    EndReason::ClusterDown,
                    EndReason::WrongType,
                ][usize::try_from(self.below(7)).expect("an index")],
            ),
            _ => Notice::Lost {
                token: self.token(),
                reason: [LossReason::Expired, LossReason::Revoked, LossReason::Removed, LossReason::Flushed]
                    [usize::try_from(self.below(4)).expect("an index")],
            },
        }
    }

    fn announcement(&mut self) -> Announcement {
        Announcement {
            ended: [Ended::Released, Ended::Expired, Ended::Revoked, Ended::Undelivered]
                [usize::try_from(self.below(4)).expect("an index")],
            token: self.token(),
            handed_to: self.some(Self::token),
        }
    }
}

fn lock_of(grants: &[Grant]) -> Lock {
    let mut lock = Lock::default();
    for grant in grants {
        lock.apply(&Change::Grant(grant.clone()), Start::AfterLoading);
    }
    lock
}

fn encode_change(change: &Change, boot: u64) -> Vec<u8> {
    let mut out = Vec::new();
    change::encode(change, boot, &mut out);
    out
}

fn encode_lock(lock: &Lock, mark: u64) -> Vec<u8> {
    let mut out = Vec::new();
    snapshot::encode(lock, mark, BOOT, &mut out);
    out
}

/// Every prefix of `encoded`, and `encoded` with each single byte replaced by each other value.
fn damaged(encoded: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    let prefixes = (0..encoded.len()).map(|len| encoded[..len].to_vec());
    let replaced = (0..encoded.len()).flat_map(move |at| {
        (0..=u8::MAX).filter(move |byte| *byte != encoded[at]).map(move |byte| {
            let mut copy = encoded.to_vec();
            copy[at] = byte;
            copy
        })
    });
    prefixes.chain(replaced)
}

#[track_caller]
fn comes_back<'a, C: Command<'a> + PartialEq + std::fmt::Debug>(request: &C, args: &'a [Vec<u8>]) {
    let parsed = C::parse(args.iter().map(Vec::as_slice), &Limits::DEFAULT);
    assert_eq!(parsed.as_ref(), Ok(request), "{args:?}");
}

#[test]
fn every_acquire_comes_back() {
    let mut random = Random::new(1);
    for _ in 0..20_000 {
        let (key, owner) = (random.bytes(0, 100), random.bytes(1, 256));
        let (channel, id, label) = (random.bytes(1, 512), random.bytes(1, 256), random.bytes(0, 256));
        let mut request = Acquire::new(&key, &owner, random.millis(1, 86_400_000));
        request.mode = random.mode();
        request.channel = random.some(|_| &*channel);
        request.session = random.some(|random| random.millis(1, 86_400_000));
        request.label = random.some(|_| &*label);
        request.floor = random.some(|random| random.token().get());
        request.convert = random.some(Random::token);
        if request.convert.is_none() {
            request.new = random.flip();
            request.id = random.some(|_| &*id);
            request.claim = random.some(|random| random.millis(1, request.lease.as_ms()));
            request.wait = match random.below(4) {
                0 => Wait::No,
                1 => Wait::Block(None),
                2 => Wait::Block(Some(random.millis(1, 86_400_000))),
                _ => Wait::Queue(random.millis(1, 86_400_000)),
            };
            if matches!(request.wait, Wait::Queue(_)) {
                request.channel = Some(&channel);
            }
            if request.mode == Mode::Shared {
                request.limit =
                    random.some(|random| NonZeroU32::new(random.millis(1, u32::MAX).as_ms()).expect("not zero"));
            }
        }
        comes_back(&request, &request.to_args());
    }
}

#[test]
fn every_other_request_comes_back() {
    let mut random = Random::new(2);
    for _ in 0..5_000 {
        let (key, owner, text) = (random.bytes(0, 100), random.bytes(1, 256), random.bytes(1, 256));
        let token = random.some(Random::token);
        let scope = match random.below(3) {
            0 => ReleaseScope::Plain,
            1 => ReleaseScope::Id(&text),
            _ => ReleaseScope::All,
        };
        let release = Release { key: &key, owner: &owner, token, scope };
        comes_back(&release, &release.to_args());
        let renew = Renew { key: &key, owner: &owner, lease: random.millis(1, 86_400_000), token };
        comes_back(&renew, &renew.to_args());
        let check = Check { key: &key, token: random.token() };
        comes_back(&check, &check.to_args());
        let info = Info { key: &key, limit: random.millis(0, INFO_LIMIT_MAX).as_ms() };
        comes_back(&info, &info.to_args());
        let list = List {
            cursor: random.millis(0, u32::MAX).as_ms(),
            count: random.millis(1, LIST_COUNT_MAX).as_ms(),
            pattern: random.some(|_| &*text),
            owner: random.some(|_| &*owner),
        };
        comes_back(&list, &list.to_args());
        let revoke = Revoke { key: &key, owner: random.some(|_| &*owner) };
        comes_back(&revoke, &revoke.to_args());
    }
}

#[test]
fn numbers_come_back_and_each_has_one_text() {
    let mut random = Random::new(3);
    for _ in 0..50_000 {
        let number = random.number(0, u64::MAX);
        let text = Decimal::new(number);
        assert_eq!(text.as_bytes(), number.to_string().as_bytes());
        assert_eq!(parse_number(text.as_bytes()), Ok(number));
        assert!(parse_number(&[b"0", text.as_bytes()].concat()).is_err());
    }
}

#[test]
fn arbitrary_arguments_are_parsed_without_a_panic() {
    // What is accepted must also come back: an argument list has one meaning.
    let mut random = Random::new(4);
    let mut accepted = 0;
    for _ in 0..100_000 {
        let words =
            [&b"SHARED"[..], b"limit", b"BLOCK", b"QUEUE", b"CHANNEL", b"NEW", b"CONVERT", b"CLAIM", b"7", b"0"];
        let mut args: Vec<Vec<u8>> = vec![random.bytes(0, 9), random.bytes(1, 9), b"7".to_vec()];
        for _ in 0..random.below(7) {
            args.push(match random.below(5) {
                0 => random.bytes(0, 9),
                _ => words[usize::try_from(random.below(10)).expect("an index")].to_vec(),
            });
        }
        let skipped = usize::try_from(random.below(40)).expect("an index").min(args.len());
        let skipped = if skipped > 3 { 0 } else { skipped };
        if let Ok(request) = Acquire::parse(args[skipped..].iter().map(Vec::as_slice), &Limits::DEFAULT) {
            accepted += 1;
            comes_back(&request, &request.to_args());
        }
        let _ = Release::parse(args.iter().map(Vec::as_slice), &Limits::DEFAULT);
        let _ = List::parse(args[3..].iter().map(Vec::as_slice), &Limits::DEFAULT);
    }
    assert!(accepted > 3_000, "the generator makes too few valid requests: {accepted}");
}

#[test]
fn every_change_comes_back() {
    let mut random = Random::new(5);
    for _ in 0..20_000 {
        let change = random.change();
        let text = encode_change(&change, BOOT);
        assert_eq!(change::decode(&text, BOOT).as_ref(), Ok(&change), "{}", text.escape_ascii());
    }
}

#[test]
fn longest_id_comes_back_and_a_longer_one_is_refused() {
    let joins = |len| Change::Ids { token: Token::MIN, id: Id::new(&vec![b'i'; len]), joined: true };
    let longest = joins(ID_BYTES_MAX);
    assert_eq!(change::decode(&encode_change(&longest, BOOT), BOOT), Ok(longest));
    let refused = change::decode(&encode_change(&joins(ID_BYTES_MAX + 1), BOOT), BOOT);
    assert_eq!(refused.map_err(|error| error.to_string()), Err("an id's length is out of range".to_owned()));
}

#[test]
fn on_another_boot_a_change_comes_back_without_its_deadline() {
    let mut random = Random::new(6);
    for _ in 0..5_000 {
        let mut change = random.change();
        let text = encode_change(&change, BOOT);
        match &mut change {
            Change::Grant(grant) => grant.deadline = None,
            Change::Renew { deadline, .. } => *deadline = None,
            Change::Mode { .. } | Change::End { .. } | Change::Ids { .. } | Change::Mark(_) => {}
        }
        assert_eq!(change::decode(&text, BOOT - 1).as_ref(), Ok(&change));
    }
}

#[test]
fn a_damaged_change_is_refused_or_means_exactly_what_it_says() {
    let mut random = Random::new(7);
    for _ in 0..60 {
        for text in damaged(&encode_change(&random.change(), BOOT)) {
            let Ok(read) = change::decode(&text, BOOT) else {
                continue;
            };
            let written = encode_change(&read, BOOT);
            // One value, one text; only a deadline of another boot is left out on purpose.
            let foreign_deadline = match &read {
                Change::Grant(Grant { deadline: None, .. }) | Change::Renew { deadline: None, .. } => {
                    text.contains(&b'@')
                }
                _ => false,
            };
            assert!(written == text || foreign_deadline, "{} reads as {read:?}", text.escape_ascii());
            assert_eq!(change::decode(&written, BOOT), Ok(read));
        }
    }
}

#[test]
fn every_lock_comes_back_from_its_snapshot() {
    let mut random = Random::new(8);
    for _ in 0..5_000 {
        let (lock, mark) = (random.lock(), random.number(0, Token::MAX));
        let image = snapshot::decode(&encode_lock(&lock, mark), BOOT).expect("what was written");
        assert_eq!(image.mark, mark);
        assert_eq!(lock_of(&image.grants), lock);
        let elsewhere = snapshot::decode(&encode_lock(&lock, mark), BOOT - 1).expect("what was written");
        assert!(elsewhere.grants.iter().all(|grant| grant.deadline.is_none()));
        assert_eq!(elsewhere.grants.len(), image.grants.len());
    }
}

#[test]
fn a_damaged_snapshot_is_refused_or_means_exactly_what_it_says() {
    let mut random = Random::new(9);
    let mut accepted = 0;
    for _ in 0..12 {
        let encoded = encode_lock(&random.lock(), 300);
        // The boot's eight bytes, after the version and a mark of two bytes.
        let boot = encoded[3..11].to_vec();
        for bytes in damaged(&encoded) {
            let Ok(Image { mark, grants }) = snapshot::decode(&bytes, BOOT) else {
                continue;
            };
            accepted += 1;
            if bytes[3..11] == boot {
                assert_eq!(encode_lock(&lock_of(&grants), mark), bytes, "{grants:?}");
            }
        }
    }
    assert!(accepted > 1_000, "the damage is too coarse to say anything: {accepted}");
}

#[test]
fn every_counter_comes_back_and_a_damaged_one_is_refused_or_exact() {
    let mut random = Random::new(10);
    for _ in 0..500 {
        let counter = CounterImage { value: random.number(0, Token::MAX), mark: random.number(0, Token::MAX) };
        let mut encoded = Vec::new();
        snapshot::encode_counter(counter, &mut encoded);
        assert_eq!(snapshot::decode_counter(&encoded), Ok(counter));
        for bytes in damaged(&encoded) {
            let Ok(read) = snapshot::decode_counter(&bytes) else {
                continue;
            };
            let mut written = Vec::new();
            snapshot::encode_counter(read, &mut written);
            assert_eq!(written, bytes);
        }
    }
}

#[test]
fn every_message_comes_back_and_a_damaged_one_is_refused_or_exact() {
    let mut random = Random::new(11);
    for round in 0..5_000 {
        let (key, owner) = (random.bytes(0, 100), random.bytes(1, 256));
        let message = OwnerMessage { notice: random.notice(), key: &key, owner: &owner };
        let mut encoded = Vec::new();
        message.encode(&mut encoded);
        assert_eq!(OwnerMessage::parse(&encoded), Ok(message));
        let announcement = random.announcement();
        let mut announced = Vec::new();
        announcement.encode(&mut announced);
        assert_eq!(Announcement::parse(&announced), Ok(announcement));
        if round >= 60 {
            continue;
        }
        for text in damaged(&encoded) {
            let Ok(read) = OwnerMessage::parse(&text) else { continue };
            let mut written = Vec::new();
            read.encode(&mut written);
            assert_eq!(written, text);
        }
        for text in damaged(&announced) {
            let Ok(read) = Announcement::parse(&text) else { continue };
            let mut written = Vec::new();
            read.encode(&mut written);
            assert_eq!(written, text);
        }
    }
}

#[test]
fn arbitrary_bytes_are_decoded_without_a_panic() {
    let mut random = Random::new(12);
    let verbs = [
        &b"GRANT "[..],
        b"GRANT-TERMS X 1 1 - ",
        b"RENEW 1 ",
        b"MODE ",
        b"END ",
        b"IDS 1 ",
        b"MARK ",
        b"lost ",
        b"granted 1 ",
    ];
    for _ in 0..200_000 {
        let tail = random.bytes(0, 200);
        let verb = verbs[usize::try_from(random.below(9)).expect("an index")];
        let text = [verb, &tail].concat();
        let _ = change::decode(&text, BOOT);
        let _ = change::decode(&tail, BOOT);
        let _ = OwnerMessage::parse(&text);
        let _ = Announcement::parse(&tail);
        let _ = snapshot::decode(&tail, BOOT);
        let _ = snapshot::decode(&[&[1, 0, 1, 2, 3, 4, 5, 6, 7, 8], &tail[..]].concat(), BOOT);
        let _ = snapshot::decode_counter(&tail);
    }
}
