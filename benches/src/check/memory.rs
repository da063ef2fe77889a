//! Memory: what a held lock takes, and that a released one leaves nothing.

use std::time::Duration;

use flock_tests::cpu::{resident_bytes, used_memory};
use flock_tests::random::Random;
use flock_tests::resp::Protocol;
use flock_tests::server::{Generation, Server};
use flock_tests::wait::poll;

use super::{builder, settle, wait_until_rehashed};
use crate::generator::{Answer, Batch, Pipe};
use crate::line::{Blocked, Queued};
use crate::measure::Summary;
use crate::names::{self, KEY_BYTES, OWNER_BYTES};
use crate::report::{Report, Unit};
use crate::scheme::{LONG_LEASE_MS, Pairs, Scheme, hold};

const MANY: usize = 1_000_000;
const FEWER: usize = 100_000;
const RELEASED: usize = 200_000;
const WAITERS: usize = 10_000;
const BLOCKED: usize = 1000;
/// The server frees its buffers and shrinks its tables in its own time.
const FREED_WITHIN: Duration = Duration::from_secs(3);

/// What an entry takes: as the server counts, and in RAM.
#[derive(Clone, Copy)]
struct BytesEach {
    used: f64,
    resident: f64,
}

/// Holds `count` locks and tells what each of them takes.
fn fill(
    server: &Server,
    scheme: &Scheme,
    random: &mut Random,
    count: usize,
    key_bytes: usize,
    owner_bytes: usize,
) -> BytesEach {
    let mut conn = server.connect(Protocol::Resp2);
    let measure = |conn: &mut _| (used_memory(conn), resident_bytes(server.pid()));
    let before = measure(&mut conn);
    hold(server, scheme, random, count, key_bytes, owner_bytes);
    wait_until_rehashed(server);
    let after = measure(&mut conn);
    let each = |before: u64, after: u64| after.saturating_sub(before) as f64 / count as f64;
    BytesEach { used: each(before.0, after.0), resident: each(before.1, after.1) }
}

/// The goal, and the servers it leaves: a million locks held, and a million strings.
pub fn per_lock(report: &mut Report, random: &mut Random) -> (Server, Server) {
    report.section("Memory: used_memory per held lock / per string of SET key owner NX PX ms");
    let (locks, strings) = (builder().start(), builder().start());
    let lock = fill(&locks, &Scheme::Flock, random, MANY, KEY_BYTES, OWNER_BYTES);
    let string = fill(&strings, &Scheme::SetDelIfEq, random, MANY, KEY_BYTES, OWNER_BYTES);
    let ratio = Summary::exactly(lock.used / string.used);
    report.goal("1,000,000 held, key 20 bytes, owner 32", ratio, 1.60, Unit::Ratio);
    note(report, lock, string);
    for (what, generation, key_bytes, owner_bytes) in [
        ("100,000 held, key 20 bytes, owner 32", Generation::New, KEY_BYTES, OWNER_BYTES),
        ("100,000 held, key 20 bytes, owner 40", Generation::New, KEY_BYTES, 40),
        ("100,000 held, key 40 bytes, owner 32", Generation::New, 40, OWNER_BYTES),
        ("100,000 held, key 40 bytes, owner 40", Generation::New, 40, 40),
        ("100,000 held, key 20 bytes, owner 32, oldest server (jemalloc)", Generation::Old, KEY_BYTES, OWNER_BYTES),
    ] {
        let [lock, string] = [Scheme::Flock, Scheme::SetDelIfEq].map(|scheme| {
            let server = builder().generation(generation).start();
            fill(&server, &scheme, random, FEWER, key_bytes, owner_bytes)
        });
        report.shown(what, Summary::exactly(lock.used / string.used), Unit::Ratio);
        note(report, lock, string);
    }
    (locks, strings)
}

/// The goal of a waiter. One that blocks costs a connection more, which the server would have without FLOCK too.
pub fn per_waiter(report: &mut Report, random: &mut Random) {
    report.section("Memory: used_memory per waiter on one lock, its channel's name included; owner 32 bytes");
    let server = builder().start();
    settle();
    let mut conn = server.connect(Protocol::Resp2);
    let mut queue = Queued::new(&server, random, 0, 1);
    let before = used_memory(&mut conn);
    queue.join(WAITERS);
    let each = used_memory(&mut conn).saturating_sub(before) as f64 / WAITERS as f64;
    report.goal("QUEUE, 10,000 waiters on one connection", Summary::exactly(each), 300.0, Unit::Bytes);
    drop(queue);
    let server = builder().start();
    settle();
    let mut conn = server.connect(Protocol::Resp2);
    let before = used_memory(&mut conn);
    let idle: Vec<_> = (0..BLOCKED).map(|_| server.connect(Protocol::Resp2)).collect();
    let per_idle = used_memory(&mut conn).saturating_sub(before) as f64 / BLOCKED as f64;
    drop(idle);
    let server = builder().start();
    settle();
    let mut conn = server.connect(Protocol::Resp2);
    let before = used_memory(&mut conn);
    let blocked = Blocked::new(&server, random, BLOCKED);
    let each = used_memory(&mut conn).saturating_sub(before) as f64 / BLOCKED as f64;
    report.shown("BLOCK, 1,000 waiters, connection included", Summary::exactly(each), Unit::Bytes);
    report.shown("a connection that does nothing", Summary::exactly(per_idle), Unit::Bytes);
    drop(blocked);
}

fn note(report: &Report, lock: BytesEach, string: BytesEach) {
    report.note(&format!(
        "  a lock {:.0} B, a string {:.0} B; resident {:.0} B and {:.0} B",
        lock.used, string.used, lock.resident, string.resident
    ));
}

/// The goal that names are forgotten.
pub fn per_released_name(report: &mut Report, random: &mut Random) {
    report.section("Memory: what 200,000 distinct names leave, acquired and released");
    let server = builder().start();
    let mut conn = server.connect(Protocol::Resp2);
    settle();
    let mut pairs = Pairs::new(&server, &Scheme::Flock, random, 64, RELEASED);
    // Buffers, and one page of every table, are there before.
    Pairs::new(&server, &Scheme::Flock, random, 64, 4096).run(4096);
    let before = used_memory(&mut conn);
    pairs.run(RELEASED);
    let limit = 65_536.0 + before as f64 / 1000.0;
    let left = left_over(&server, before);
    report.goal("one after the other, 64 at a time", Summary::exactly(left), limit, Unit::Kibibytes);

    for (what, scheme) in [
        ("all held at once, then all released", Scheme::Flock),
        ("the same with SET NX PX, DELIFEQ", Scheme::SetDelIfEq),
    ] {
        let server = builder().start();
        settle();
        Pairs::new(&server, &scheme, random, 64, 4096).run(4096);
        let before = used_memory(&mut server.connect(Protocol::Resp2));
        take_all_then_give_all(&server, &scheme, random);
        report.shown(what, Summary::exactly(left_over(&server, before)), Unit::Kibibytes);
    }
}

fn take_all_then_give_all(server: &Server, scheme: &Scheme, random: &mut Random) {
    let mut pipe = Pipe::open(server.addr());
    let mut gives = Vec::new();
    for _ in 0..RELEASED / 64 {
        let (mut take, mut give) = (Batch::new(scheme.taken()), Batch::new(Answer::One));
        for _ in 0..64 {
            let (key, owner) = (names::key(random, KEY_BYTES), names::owner(random, OWNER_BYTES));
            take.push(&scheme.take(&key, &owner, LONG_LEASE_MS));
            for command in scheme.give(&key, &owner) {
                give.push(&command);
            }
        }
        pipe.run(&take);
        gives.push(give);
    }
    for give in &gives {
        pipe.run(give);
    }
}

/// By how much the server uses more than `before`, at the best moment of the time it has to put things in order.
fn left_over(server: &Server, before: u64) -> f64 {
    let mut conn = server.connect(Protocol::Resp2);
    let mut least = u64::MAX;
    poll(FREED_WITHIN, || {
        least = least.min(used_memory(&mut conn).saturating_sub(before));
        (least == 0).then_some(())
    });
    least as f64
}
