//! Allocations per operation of the core: prints all, and wants none where a lock is taken and given back in the usual way.
//!
//! `cargo test --release -p flock-benches --test allocations -- --nocapture`

mod counting;

use flock_benches::names::{self, KEY_BYTES, OWNER_BYTES};
use flock_benches::rig::{LONG, Rig, must_be_busy, must_be_granted, must_end, must_wait, token_of};
use flock_core::lock::Grant;
use flock_core::request::Release;
use flock_core::wire::command::Command;
use flock_core::{Acquire, Change, Limits, Millis, Mode, Owner, Time, Token, wire};
use flock_tests::random::Random;

/// Times each operation is done; what happens once in a while (a page of a table) shows as a fraction.
const TIMES: usize = 1000;
/// The longest key and owner that a lock keeps without an allocation.
const KEY_BYTES_INLINE: usize = 20;
const OWNER_BYTES_INLINE: usize = 38;

/// Allocations of `act`, on average.
fn allocations(what: &str, mut act: impl FnMut(usize)) -> f64 {
    let before = counting::by_this_thread();
    for time in 0..TIMES {
        act(time);
    }
    let each = (counting::by_this_thread() - before) as f64 / TIMES as f64;
    println!("{each:>8.3}  {what}");
    each
}

/// Wants no allocation at all.
fn none(what: &str, act: impl FnMut(usize)) {
    let each = allocations(what, act);
    assert!(each == 0.0, "{what}: {each} allocations");
}

/// A rig whose tables have their pages, and which has been used a while.
fn warm(key_bytes: usize, owner_bytes: usize) -> (Rig, usize) {
    let mut rig = Rig::new(1000, 2 * TIMES, key_bytes, owner_bytes);
    let first = rig.first_spare();
    for _ in 0..2 {
        (first..first + TIMES).for_each(|name| must_be_granted(rig.acquire(name, name, LONG)));
        (first..first + TIMES).for_each(|name| must_end(rig.release(name, name)));
    }
    (rig, first)
}

#[test]
fn taking_and_giving_back_allocates_nothing() {
    for (key_bytes, owner_bytes) in [(KEY_BYTES, OWNER_BYTES), (KEY_BYTES_INLINE, OWNER_BYTES_INLINE)] {
        println!("\nkey {key_bytes} bytes, owner {owner_bytes}: allocations per operation");
        let (mut rig, first) = warm(key_bytes, owner_bytes);
        none("acquire, and release", |time| {
            must_be_granted(rig.acquire(first + time, first + time, LONG));
            must_end(rig.release(first + time, first + time));
        });
        must_be_granted(rig.acquire(first, first, LONG));
        none("acquire again", |_| must_be_granted(rig.acquire(first, first, LONG)));
        none("acquire, held by another", |_| must_be_busy(rig.acquire(first, first + 1, LONG)));
        none("renew", |_| assert!(rig.renew(first, first)));
        let token = token_of(rig.acquire(first, first, LONG));
        none("check", |_| assert!(rig.check(first, token)));
    }
}

#[test]
fn the_usual_words_are_read_and_written_without_allocation() {
    let mut random = Random::from_seed(5);
    let (key, owner) = (names::key(&mut random, KEY_BYTES), names::owner(&mut random, OWNER_BYTES));
    let token = Token::new(18_922_561_234_567).expect("14 digits are a token");
    let grant = Change::Grant(Grant {
        owner: Owner::new(&owner),
        mode: Mode::Exclusive,
        token,
        lease: LONG,
        deadline: Some(Time::from_us(8_839_201_000_000)),
        terms: None,
    });
    let mut buffer = Vec::with_capacity(512);
    println!("\nwire: allocations per operation");
    let limits = Limits::DEFAULT;
    let plain: [&[u8]; 3] = [&key, &owner, b"30000"];
    none("parse ACQUIRE", |_| assert!(Acquire::parse(plain, &limits).is_ok()));
    none("parse RELEASE", |_| assert!(Release::parse([&key[..], &owner], &limits).is_ok()));
    none("encode GRANT", |_| {
        buffer.clear();
        wire::change::encode(&grant, 1, &mut buffer);
    });
    none("decode GRANT", |_| assert!(wire::change::decode(&buffer, 1).is_ok()));
}

/// What is not free: for the record, without a bound.
#[test]
fn what_else_there_is() {
    println!("\nallocations per operation, no bound");
    let (mut rig, first) = warm(KEY_BYTES, OWNER_BYTES);
    allocations("acquire of new names, one more lock held each", |time| {
        must_be_granted(rig.acquire(first + time, first + time, LONG));
    });
    allocations("release of them", |time| must_end(rig.release(first + time, first + time)));
    for time in 0..TIMES {
        must_be_granted(rig.acquire(first + time, first + time, Millis(50)));
    }
    rig.pass(Millis(60));
    let mut left = TIMES;
    allocations("lease ends", |_| rig.perform_due(std::mem::take(&mut left)));

    let others = first + TIMES;
    must_be_granted(rig.acquire(first, first, LONG));
    allocations("BLOCK: join", |time| must_wait(rig.block(first, others + time, None)));
    let mut holder = first;
    allocations("BLOCK: release, handed over", |time| {
        must_end(rig.release(first, holder));
        holder = others + time;
    });
    must_end(rig.release(first, holder));
    must_be_granted(rig.acquire(first, first, LONG));
    allocations("QUEUE: join", |time| must_wait(rig.queue(first, others + time)));
    allocations("QUEUE: repeat", |time| must_wait(rig.queue(first, others + time)));
    let mut holder = first;
    allocations("QUEUE: release, handed over", |time| {
        must_end(rig.release(first, holder));
        holder = others + time;
    });
    must_end(rig.release(first, holder));
    allocations("shared: acquire, one more reader each", |time| {
        must_be_granted(rig.acquire_shared(first, others + time));
    });
    allocations("shared: release of them", |time| must_end(rig.release(first, others + time)));
    for (key_bytes, owner_bytes) in [(KEY_BYTES_INLINE + 1, OWNER_BYTES), (KEY_BYTES, OWNER_BYTES_INLINE + 1)] {
        let (mut rig, first) = warm(key_bytes, owner_bytes);
        allocations(&format!("acquire, key {key_bytes} bytes, owner {owner_bytes}"), |time| {
            must_be_granted(rig.acquire(first + time, first + time, LONG));
        });
        allocations("release", |time| must_end(rig.release(first + time, first + time)));
    }
}
