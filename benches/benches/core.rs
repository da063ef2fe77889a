//! What the rules cost, without a server: time per operation of each verb, of queues, and of the wire protocol.
//!
//! The verbs act on names beside 1, 1,000 or 1,000,000 other locks that are held under long leases; 64 names at a time, so that looking at
//! the clock costs nothing.

use std::cell::RefCell;
use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{Bencher, BenchmarkGroup, BenchmarkId, Criterion, criterion_group, criterion_main};
use flock_benches::names::{self, KEY_BYTES, OWNER_BYTES};
use flock_benches::rig::{LONG, Rig, must_be_busy, must_be_granted, must_end, must_wait, token_of};
use flock_core::effect::{Ended, Notice};
use flock_core::lock::Grant;
use flock_core::request::Release;
use flock_core::wire::command::Command;
use flock_core::wire::message::{Announcement, OwnerMessage};
use flock_core::{Acquire, Acquired, Change, Limits, Millis, Mode, Owner, Time, Token, snapshot, wire};
use flock_tests::random::Random;

/// Names per look at the clock.
const CHUNK: usize = 64;
const SHORT: Millis = Millis(30_000);
/// What is to end while others go on: the clock is moved this often that long steps would reach them.
const ENDS_SOON: Millis = Millis(2);
/// Later than the end, as the table rounds it.
const HAS_ENDED: Millis = Millis(4);
const BOOT: u64 = 0x0123_4567_89ab_cdef;

criterion_main!(benches);
criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = verbs, queues, readers, wire_protocol
}

/// Measures `work` on `count` names at a time; what is before and after it is not measured.
fn timed(
    bencher: &mut Bencher<'_, WallTime>,
    rig: &mut Rig,
    mut before: impl FnMut(&mut Rig, usize),
    mut work: impl FnMut(&mut Rig, usize),
    mut after: impl FnMut(&mut Rig, usize),
) {
    bencher.iter_custom(|times| {
        let mut left = usize::try_from(times).unwrap_or(usize::MAX);
        let mut took = Duration::ZERO;
        while left > 0 {
            let count = left.min(CHUNK);
            before(rig, count);
            let start = Instant::now();
            work(rig, count);
            took += start.elapsed();
            after(rig, count);
            left -= count;
        }
        took
    });
}

/// For each of the first `count` spare names, and the owner of the same number.
fn each(mut act: impl FnMut(&mut Rig, usize)) -> impl FnMut(&mut Rig, usize) {
    move |rig, count| {
        let first = rig.first_spare();
        for name in first..first + count {
            act(rig, name);
        }
    }
}

fn nothing(_: &mut Rig, _: usize) {}

fn acquire_each(lease: Millis) -> impl FnMut(&mut Rig, usize) {
    each(move |rig, name| must_be_granted(rig.acquire(name, name, lease)))
}

fn release_each() -> impl FnMut(&mut Rig, usize) {
    each(|rig, name| must_end(rig.release(name, name)))
}

fn verbs(c: &mut Criterion) {
    let mut group = c.benchmark_group("verb, beside held locks");
    for held in [1, 1000, 1_000_000] {
        let rig = &mut Rig::new(held, 2 * CHUNK, KEY_BYTES, OWNER_BYTES);
        let bench = |group: &mut BenchmarkGroup<'_, WallTime>, verb: &str, run: &mut dyn FnMut(&mut Bencher<'_>)| {
            group.bench_function(BenchmarkId::new(verb, held), run);
        };
        bench(&mut group, "acquire", &mut |b| timed(b, rig, nothing, acquire_each(LONG), release_each()));
        bench(&mut group, "acquire, ends before the others", &mut |b| {
            timed(b, rig, nothing, acquire_each(SHORT), release_each());
        });
        bench(&mut group, "acquire, held by another", &mut |b| {
            // The owner of the name before.
            let busy = each(|rig, name| must_be_busy(rig.acquire(name, name - 1, LONG)));
            timed(b, rig, acquire_each(LONG), busy, release_each());
        });
        bench(&mut group, "acquire again", &mut |b| {
            timed(b, rig, acquire_each(LONG), acquire_each(LONG), release_each());
        });
        bench(&mut group, "release", &mut |b| timed(b, rig, acquire_each(LONG), release_each(), nothing));
        bench(&mut group, "renew", &mut |b| {
            let renew = each(|rig, name| assert!(rig.renew(name, name)));
            timed(b, rig, acquire_each(LONG), renew, release_each());
        });
        bench(&mut group, "check", &mut |b| {
            let tokens = RefCell::new(Vec::new());
            let acquire = |rig: &mut Rig, count| {
                tokens.borrow_mut().clear();
                each(|rig, name| tokens.borrow_mut().push(token_of(rig.acquire(name, name, LONG))))(rig, count);
            };
            let check = |rig: &mut Rig, _| {
                for (name, token) in (rig.first_spare()..).zip(tokens.borrow().iter()) {
                    assert!(rig.check(name, *token));
                }
            };
            timed(b, rig, acquire, check, release_each());
        });
        bench(&mut group, "revoke", &mut |b| {
            let revoke = each(|rig, name| assert_eq!(rig.revoke(name), 1));
            timed(b, rig, acquire_each(LONG), revoke, nothing);
        });
        bench(&mut group, "lease ends", &mut |b| {
            let let_end = |rig: &mut Rig, count| {
                acquire_each(ENDS_SOON)(rig, count);
                rig.pass(HAS_ENDED);
            };
            timed(b, rig, let_end, Rig::perform_due, nothing);
        });
        let changes = [grant(), Change::End { token: Some(token()) }];
        bench(&mut group, "replica applies a grant", &mut |b| {
            let [granted, ended] = changes.each_ref();
            timed(
                b,
                rig,
                nothing,
                each(|rig, name| rig.apply(name, granted)),
                each(|rig, name| rig.apply(name, ended)),
            );
        });
        bench(&mut group, "replica applies an end", &mut |b| {
            let [granted, ended] = changes.each_ref();
            timed(
                b,
                rig,
                each(|rig, name| rig.apply(name, granted)),
                each(|rig, name| rig.apply(name, ended)),
                nothing,
            );
        });
    }
    group.finish();
}

/// One lock, its holder, and so many who wait for it.
struct Line {
    rig: Rig,
    /// The owner that holds the lock; the next ones in line follow it, round and round.
    holder: usize,
    owners: usize,
}

impl Line {
    fn new(waiters: usize, mut join: impl FnMut(&mut Rig, usize) -> Result<Acquired, flock_core::Refusal>) -> Line {
        let mut rig = Rig::new(1, waiters + 2 * CHUNK, KEY_BYTES, OWNER_BYTES);
        for owner in 1..=waiters {
            must_wait(join(&mut rig, owner));
        }
        Line { rig, holder: 0, owners: waiters + 1 }
    }

    /// The holder gives back, the next one gets the lock, the old holder joins the end.
    fn turn(&mut self, mut join: impl FnMut(&mut Rig, usize) -> Result<Acquired, flock_core::Refusal>) {
        must_end(self.rig.release(0, self.holder));
        must_wait(join(&mut self.rig, self.holder));
        self.holder = (self.holder + 1) % self.owners;
    }
}

fn queues(c: &mut Criterion) {
    let mut group = c.benchmark_group("queue, by waiters");
    let block = |rig: &mut Rig, owner| rig.block(0, owner, None);
    let queue = |rig: &mut Rig, owner| rig.queue(0, owner);
    for waiters in [1, 1000, 100_000] {
        let mut line = Line::new(waiters, block);
        group.bench_function(BenchmarkId::new("BLOCK: handoff, and join again", waiters), |b| {
            b.iter(|| line.turn(block));
        });
        let mut line = Line::new(waiters, queue);
        group.bench_function(BenchmarkId::new("QUEUE: handoff, and join again", waiters), |b| {
            b.iter(|| line.turn(queue));
        });
        let mut line = Line::new(waiters, queue);
        let rig = &mut line.rig;
        group.bench_function(BenchmarkId::new("join, and cancel", waiters), |b| {
            b.iter(|| {
                must_wait(rig.block(0, waiters + 1, None));
                must_end(rig.release(0, waiters + 1));
            });
        });
        let mut random = Random::from_seed(3);
        group.bench_function(BenchmarkId::new("repeat a queued request", waiters), |b| {
            b.iter(|| {
                let owner = 1 + usize::try_from(random.below(waiters as u64)).unwrap_or_default();
                must_wait(rig.queue(0, owner));
            });
        });
        group.bench_function(BenchmarkId::new("wait ends", waiters), |b| {
            let join = |rig: &mut Rig, count| {
                for owner in waiters + 1..=waiters + count {
                    must_wait(rig.block(0, owner, Some(ENDS_SOON)));
                }
                rig.pass(HAS_ENDED);
            };
            timed(b, rig, join, Rig::perform_due, nothing);
        });
    }
    group.finish();
}

fn readers(c: &mut Criterion) {
    let mut group = c.benchmark_group("shared, beside other readers of the lock");
    for readers in [1, 10_000] {
        let mut rig = Rig::new(0, readers + CHUNK, KEY_BYTES, OWNER_BYTES);
        for owner in CHUNK..CHUNK + readers {
            must_be_granted(rig.acquire_shared(0, owner));
        }
        let take = || each(|rig, owner| must_be_granted(rig.acquire_shared(0, owner)));
        let give = || each(|rig, owner| must_end(rig.release(0, owner)));
        group.bench_function(BenchmarkId::new("acquire", readers), |b| timed(b, &mut rig, nothing, take(), give()));
        group.bench_function(BenchmarkId::new("release", readers), |b| timed(b, &mut rig, take(), give(), nothing));
    }
    group.finish();
}

fn token() -> Token {
    Token::new(18_922_561_234_567).expect("14 digits are a token")
}

fn grant() -> Change {
    Change::Grant(Grant {
        owner: Owner::new(&names::owner(&mut Random::from_seed(2), OWNER_BYTES)),
        mode: Mode::Exclusive,
        token: token(),
        lease: SHORT,
        deadline: Some(Time::from_us(8_839_201_000_000)),
        terms: None,
    })
}

fn wire_protocol(c: &mut Criterion) {
    let mut group = c.benchmark_group("wire");
    let mut random = Random::from_seed(5);
    let (key, owner) = (names::key(&mut random, KEY_BYTES), names::owner(&mut random, OWNER_BYTES));
    let limits = Limits::DEFAULT;
    let parse_acquire = |args: &[&[u8]]| {
        let request = Acquire::parse(args.iter().copied(), &limits);
        assert!(request.is_ok(), "{request:?}");
        request.is_ok()
    };
    let plain: [&[u8]; 3] = [&key, &owner, b"30000"];
    group.bench_function("parse ACQUIRE", |b| b.iter(|| parse_acquire(black_box(&plain))));
    let options = "SHARED LIMIT 3 QUEUE 5000 CHANNEL news NEW FLOOR 5 CLAIM 1000 SESSION 2000 LABEL job";
    let long: Vec<&[u8]> = plain.into_iter().chain(options.split(' ').map(str::as_bytes)).collect();
    group.bench_function("parse ACQUIRE with ten options", |b| b.iter(|| parse_acquire(black_box(&long))));
    let give: [&[u8]; 4] = [&key, &owner, b"token", b"18922561234567"];
    group.bench_function("parse RELEASE with a token", |b| {
        b.iter(|| Release::parse(black_box(&give).iter().copied(), &limits).is_ok());
    });

    for (what, change) in [("GRANT", grant()), ("END", Change::End { token: Some(token()) })] {
        let mut bytes = Vec::with_capacity(256);
        group.bench_function(format!("encode {what}"), |b| {
            b.iter(|| {
                bytes.clear();
                wire::change::encode(black_box(&change), BOOT, &mut bytes);
            });
        });
        group.bench_function(format!("decode {what}"), |b| {
            b.iter(|| wire::change::decode(black_box(&bytes), BOOT).expect("it was just encoded"));
        });
    }

    let mut bytes = Vec::with_capacity(256);
    let notice = Notice::Granted { token: token(), lasts: SHORT, claim: true };
    group.bench_function("encode a grant's message", |b| {
        b.iter(|| {
            bytes.clear();
            OwnerMessage { notice, key: black_box(&key), owner: &owner }.encode(&mut bytes);
        });
    });
    group.bench_function("parse a grant's message", |b| {
        b.iter(|| OwnerMessage::parse(black_box(&bytes)).expect("it was just encoded"));
    });
    let announcement = Announcement { ended: Ended::Released, token: token(), handed_to: Some(token()) };
    group.bench_function("encode a release's announcement", |b| {
        b.iter(|| {
            bytes.clear();
            black_box(announcement).encode(&mut bytes);
        });
    });

    let rig = Rig::new(1, 0, KEY_BYTES, OWNER_BYTES);
    let (_, _, _, lock) = rig.table().places(0, 1).next().expect("one lock is held");
    group.bench_function("encode a snapshot", |b| {
        b.iter(|| {
            bytes.clear();
            snapshot::encode(black_box(lock), 1 << 40, BOOT, &mut bytes);
        });
    });
    group.bench_function("decode a snapshot", |b| {
        b.iter(|| snapshot::decode(black_box(&bytes), BOOT).expect("it was just encoded"));
    });
    group.finish();
}
