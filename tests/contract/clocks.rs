//! The wall clock is put back, put forward, thrown about: nothing ends early, nothing gets stuck. (At boot: `tokens.rs`.)
//!
//! The servers' clocks since boot stay true ([`Builder::wall_clock`]), and all judgements here are by such a clock.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::scope;
use std::time::{Duration, Instant};

use flock_core::effect::Notice;
use flock_tests::args;
use flock_tests::check::{Rules, assert_sound};
use flock_tests::cpu::Stopwatch;
use flock_tests::fenced_store::FencedStore;
use flock_tests::history::{Call, Recorder, Verb};
use flock_tests::on_own_servers;
use flock_tests::random::Random;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::{Builder, Server};
use flock_tests::wait::let_pass;

use crate::contender::Contender;
use crate::lock_view::{holders, waiting};
use crate::scene::{LEASE_MS, TICK, hear, hold, listener, on_time, position, quiet, rounds, transaction};

on_own_servers![
    clock_put_back_an_hour_for_three_seconds_delays_nothing,
    clock_put_forward_an_hour_ends_nothing_early,
    clock_before_1970_and_in_the_year_2300_ends_nothing_early_or_late,
    clock_thrown_about_under_load_breaks_no_promise,
    renewal_at_the_very_end_of_a_lease_makes_no_second_holder,
];

/// The server's own idea of the time, in seconds.
#[track_caller]
fn wall_clock_s(conn: &mut Conn) -> i64 {
    conn.cmd(&["TIME"]).as_array()[0].as_str().parse().expect("TIME answers a number of seconds")
}

/// Something that is to end by itself.
struct Due<'a> {
    server: &'a Server,
    what: String,
    conn: Conn,
    lasts: Duration,
    /// When its request was sent: not before its length after that may it end.
    sent: Instant,
    /// When it is known to have begun: a tick after its length after that it must have ended.
    begun: Instant,
}

impl Due<'_> {
    /// Waits for it and wants it on time.
    #[track_caller]
    fn judge(&mut self, is_grant: bool) {
        let watch = Stopwatch::start(self.server);
        let left = (self.begun + self.lasts).saturating_duration_since(Instant::now());
        let reply = self.conn.recv();
        let late = watch.late(left);
        let lasted = self.sent.elapsed();
        assert_eq!(matches!(reply, Reply::Int(1..)), is_grant, "{}: {reply}", self.what);
        assert!(lasted >= self.lasts, "{} ended after {lasted:?}", self.what);
        assert!(late <= TICK, "{} ended {late:?} late", self.what);
    }
}

/// A lease that somebody waits for; with the option CLAIM, a claim.
#[track_caller]
fn lease<'a>(server: &'a Server, key: &str, lease_ms: u64, option: &[&str]) -> Due<'a> {
    let mut conn = server.connect(Protocol::Resp2);
    let lasts = Duration::from_millis(lease_ms);
    let mut request = args!["FLOCK.ACQUIRE", key, "alice"].to_vec();
    // A claim is what lasts, then; the lease is far away.
    let is_claim = !option.is_empty();
    request.push(if is_claim { LEASE_MS.to_string() } else { lease_ms.to_string() }.into_bytes());
    request.extend(option.iter().map(|word| word.as_bytes().to_vec()));
    if is_claim {
        request.push(lease_ms.to_string().into_bytes());
    }
    let sent = Instant::now();
    conn.cmd(&request).as_token();
    let begun = Instant::now();
    let conn = waiting(server, Protocol::Resp2, &args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "BLOCK", 0]);
    Due { server, what: format!("lease {key} of {lease_ms} ms"), conn, lasts, sent, begun }
}

/// A request that waits for `key` so long.
#[track_caller]
fn wait<'a>(server: &'a Server, key: &str, wait_ms: u64) -> Due<'a> {
    let lasts = Duration::from_millis(wait_ms);
    let mut conn = server.connect(Protocol::Resp2);
    let sent = Instant::now();
    conn.send(&args!["FLOCK.ACQUIRE", key, format!("waiter {wait_ms}"), LEASE_MS, "BLOCK", wait_ms]);
    server.wait_until_blocked(&conn);
    let begun = Instant::now();
    Due { server, what: format!("wait of {wait_ms} ms"), conn, lasts, sent, begun }
}

/// Leases, claims and waits of every length up to `last_ms`, begun before the clock is changed, and short ones begun while it is: all
/// must end on time. The clock is changed as `steps` say: after so many milliseconds, by so many seconds.
#[track_caller]
fn assert_all_on_time(builder: Builder, steps: &[(u64, i64)], last_ms: u64) {
    let server = quiet(&builder.wall_clock(0));
    let mut conn = server.connect(Protocol::Resp2);
    hold(&mut conn, "held", "alice");
    let before = wall_clock_s(&mut conn);
    let start = Instant::now();
    let mut grants: Vec<Due> = (300..=last_ms)
        .step_by(400)
        .map(|lease_ms| {
            lease(&server, &format!("l{lease_ms}"), lease_ms, if lease_ms % 800 == 300 { &[] } else { &["CLAIM"] })
        })
        .collect();
    let mut ends: Vec<Due> = (450..=last_ms).step_by(450).map(|wait_ms| wait(&server, "held", wait_ms)).collect();
    let is_over = AtomicBool::new(false);
    scope(|threads| {
        threads.spawn(|| {
            for (at_ms, offset_s) in steps {
                let_pass(Duration::from_millis(*at_ms).saturating_sub(start.elapsed()));
                server.set_wall_clock(*offset_s);
            }
        });
        threads.spawn(|| {
            // Also what begins while the clock is wrong.
            for round in 0.. {
                if is_over.load(Ordering::Relaxed) || start.elapsed() > ANSWER_WITHIN {
                    return;
                }
                lease(&server, &format!("short {round}"), 80, &[]).judge(true);
                wait(&server, "held", 80).judge(false);
            }
        });
        threads.spawn(|| {
            let mut ears = listener(&server, Protocol::Resp2, "news");
            let mut conn = server.connect(Protocol::Resp2);
            while !is_over.load(Ordering::Relaxed) && start.elapsed() < ANSWER_WITHIN {
                let sent = Instant::now();
                let queue = args!["FLOCK.ACQUIRE", "held", "carol", LEASE_MS, "QUEUE", 100, "CHANNEL", "news"];
                position(&conn.cmd(&queue));
                let queued = Stopwatch::start(&server);
                assert_eq!(hear(&mut ears).notice, Notice::TimedOut);
                on_time(&queued, 100);
                assert!(sent.elapsed() >= Duration::from_millis(100), "{:?}", sent.elapsed());
            }
        });
        let ends = threads.spawn(move || ends.iter_mut().for_each(|wait| wait.judge(false)));
        let grants = threads.spawn(move || grants.iter_mut().for_each(|lease| lease.judge(true)));
        let outcomes = [ends.join(), grants.join()];
        is_over.store(true, Ordering::Relaxed);
        assert!(outcomes.iter().all(Result::is_ok), "something was not on time");
    });
    let wanted = steps.last().map_or(0, |(_, offset_s)| *offset_s);
    let gone = i64::try_from(start.elapsed().as_secs()).expect("a test is short");
    let off = wall_clock_s(&mut conn) - before - gone;
    assert!((wanted - 2..=wanted + 2).contains(&off), "the server's clock is off by {off} s, not {wanted} s");
    assert_eq!(holders(&mut conn, "held"), ["alice"]);
}

fn clock_put_back_an_hour_for_three_seconds_delays_nothing(builder: Builder) {
    // I1. The server's own timers stop when the clock is put back, and stay stopped when it is put right again.
    assert_all_on_time(builder, &[(200, -3600), (3200, 0)], 4000);
}

fn clock_put_forward_an_hour_ends_nothing_early(builder: Builder) {
    // I2. A lease that were a point on the wall clock would be over at once; so would a wait.
    assert_all_on_time(builder, &[(200, 3600)], 1500);
}

fn clock_before_1970_and_in_the_year_2300_ends_nothing_early_or_late(builder: Builder) {
    // I4. Numbers below zero, and above what 64 bits of nanoseconds hold. (At boot: `tokens.rs`.)
    const YEAR_S: i64 = 365 * 24 * 3600;
    assert_all_on_time(builder, &[(200, -60 * YEAR_S), (1000, 275 * YEAR_S)], 2000);
}

fn clock_thrown_about_under_load_breaks_no_promise(builder: Builder) {
    // I3. Many steps of up to a day, back and forth, while clients take, renew, give back and abandon locks: tokens rise, nobody holds
    // beside another, no hold is lost early, and a storage that checks the token meets no stale writer it must believe.
    let steps = rounds(12, 150);
    let mut random = Random::new();
    let server = quiet(&builder.wall_clock(0));
    let recorder = Recorder::new();
    let store = FencedStore::new();
    let is_over = AtomicBool::new(false);
    scope(|threads| {
        for process in 0..6 {
            let random = Random::from_seed(random.number());
            let (server, recorder, store, is_over) = (&server, &recorder, &store, &is_over);
            threads.spawn(move || {
                let mut client = Contender::new(server, process, random, recorder, store);
                while !is_over.load(Ordering::Relaxed) {
                    client.one_acquisition().expect("the server answers");
                }
            });
        }
        for _ in 0..steps {
            let_pass(Duration::from_millis(50 + random.below(150)));
            let day_s = 24 * 3600;
            let offset_s = i64::try_from(random.below(2 * day_s)).expect("a day is short") - 24 * 3600;
            server.set_wall_clock(if random.one_in(4) { 0 } else { offset_s });
        }
        is_over.store(true, Ordering::Relaxed);
    });
    assert_sound(&recorder.events(), &Rules::default());
    assert!(store.counts().accepted > steps, "{:?}", store.counts());
    assert_eq!(server.info("flock").number("flock_panics_caught"), 0);
}

/// So many pairs of owners play [`at_the_very_end`] at once, each about a lock of its own: most of a round is waiting.
const PAIRS: u64 = 20;

fn renewal_at_the_very_end_of_a_lease_makes_no_second_holder(builder: Builder) {
    // I6. A renewal that arrives a millisecond before or after the end of the lease, while the next one waits: it is done or refused,
    // and the lock changes hands accordingly, once.
    let server = builder.start();
    let mut random = Random::new();
    let (mut renewed, mut refused) = (0, 0);
    let mut left = rounds(300, 10_000);
    // A history is kept in memory until it is judged.
    while left > 0 {
        let rounds_each = left.min(10_000) / PAIRS;
        let recorder = Recorder::new();
        scope(|threads| {
            let one_pair = |pair| {
                let (server, recorder, random) = (&server, &recorder, Random::from_seed(random.number()));
                threads.spawn(move || at_the_very_end(server, recorder, pair, random, rounds_each))
            };
            let pairs: Vec<_> = (0..PAIRS).map(one_pair).collect();
            for pair in pairs {
                let in_time = pair.join().expect("a pair plays to its end");
                renewed += in_time;
                refused += rounds_each - in_time;
            }
        });
        assert_sound(&recorder.events(), &Rules::default());
        left -= left.min(10_000);
    }
    println!("{renewed} renewals were in time, {refused} were not");
    assert!(renewed > 0 && refused > 0, "{renewed} renewals were in time, {refused} were not: the test proves nothing");
}

/// Rounds of one pair: alice takes the lock for 10 ms and renews it for 20 ms, about at its end; bob waits for
/// it. Answers how many renewals were done.
#[track_caller]
fn at_the_very_end(server: &Server, recorder: &Recorder, pair: u64, mut random: Random, rounds: u64) -> u64 {
    const LEASE: Duration = Duration::from_millis(10);
    const RENEWED: Duration = Duration::from_millis(20);
    const STEP: Duration = Duration::from_micros(500);
    let key = format!("k{pair}");
    let first_process = 2 * u32::try_from(pair).expect("a pair's number is small");
    let second_process = first_process + 1;
    let (mut alice, mut bob) = (server.connect(Protocol::Resp2), server.connect(Protocol::Resp2));
    // As long after the grant; it follows what has become of the last renewal, so that half of them are in time on any machine.
    let mut aim = LEASE;
    let one_round = |round| {
        let (first, second) = (format!("alice {pair} {round}"), format!("bob {pair} {round}"));
        let op = recorder.invoke(first_process, Call::new(Verb::Acquire, &key, &first).lease_ms(10));
        let asked = Instant::now();
        let token = alice.cmd(&args!["FLOCK.ACQUIRE", key, first, 10]).as_token();
        let granted = Instant::now();
        recorder.ok(op, Some(token));
        let call = Call::new(Verb::Acquire, &key, &second).lease_ms(u64::from(LEASE_MS));
        let wait = recorder.invoke(second_process, call);
        bob.send(&args!["FLOCK.ACQUIRE", key, second, LEASE_MS, "BLOCK", 0]);
        let off = Duration::from_micros(random.below(1_000));
        let_pass(
            (if random.one_in(2) { aim + off } else { aim.saturating_sub(off) }).saturating_sub(granted.elapsed()),
        );
        let call = Call::new(Verb::Renew, &key, &first).lease_ms(20).token(token);
        let renewal = recorder.invoke(first_process, call);
        let sent = Instant::now();
        // One step: what is seen is what the renewal has left.
        let replies = transaction(
            &mut alice,
            &[&args!["FLOCK.RENEW", key, first, 20, "TOKEN", token], &args!["FLOCK.INFO", key]],
        );
        let (renewed, info) = (replies[0] == Reply::Int(1), &replies[1]);
        let answered = Instant::now();
        if renewed {
            recorder.ok(renewal, None);
            aim = LEASE.min(aim + STEP);
        } else {
            recorder.refused(renewal);
            aim = aim.saturating_sub(STEP);
        }
        let holders: Vec<_> =
            info.field("holders").as_array().iter().map(|holder| holder.field("owner").as_str()).collect();
        assert_eq!(holders, [if renewed { first.as_str() } else { second.as_str() }], "{info}");
        // Before its end a renewal is done, after it refused: as far as the test can tell.
        if renewed {
            assert!(sent < granted + LEASE, "renewed {:?} after the end", sent - granted - LEASE);
        } else {
            assert!(answered >= asked + LEASE, "refused {:?} before the end", asked + LEASE - answered);
        }
        let next = bob.recv().as_token();
        recorder.ok(wait, Some(next));
        assert!(next > token, "{token} {next}");
        assert!(!renewed || sent.elapsed() >= RENEWED, "handed over {:?} after the renewal", sent.elapsed());
        let release = recorder.invoke(second_process, Call::new(Verb::Release, &key, &second).token(next));
        assert_eq!(bob.cmd(&args!["FLOCK.RELEASE", key, second, "TOKEN", next]), Reply::Int(1));
        recorder.ok(release, None);
        renewed
    };
    (0..rounds).map(one_round).map(u64::from).sum()
}
