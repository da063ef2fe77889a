//! The wall clock is put back, put forward, thrown about: nothing ends early, nothing gets stuck. (At boot: `tokens.rs`.)
//!
//! On the newest server only: see [`with_clock`](crate::tokens::with_clock). Time is told to the server by libfaketime, the monotonic
//! clocks stay true, and all judgements here are on the monotonic clock.

use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{scope, spawn};
use std::time::{Duration, Instant};

use flock_core::effect::Notice;
use flock_tests::args;
use flock_tests::check::{Rules, assert_sound};
use flock_tests::fenced_store::FencedStore;
use flock_tests::history::{Call, Recorder, Verb};
use flock_tests::on_own_servers;
use flock_tests::random::Random;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::{Builder, Server};
use flock_tests::wait::let_pass;

use crate::lock_view::{holders, waiting};
use crate::scene::{LEASE_MS, hear, hold, listener, long_tier, position};

on_own_servers![renewal_at_the_very_end_of_a_lease_makes_no_second_holder];

/// How late a thing on time may be: far less than a clock that is an hour off, for seconds, would make it; and more than the many clients
/// and the slow clock of these tests take where other tests want the same processors.
const LATE_MAX: Duration = Duration::from_millis(500);

/// The file that libfaketime reads at every question for the time, in the server's directory.
const CLOCK: &str = "clock";

/// A server whose wall clock [`set_clock`] changes while it runs.
///
/// libfaketime moves the absolute deadlines of every timerfd, those of the monotonic clocks too: with the clock put back, the module's
/// timer would fire an hour late here, and on no real machine. So the module is woken by the server's cron, a hundred times a second.
/// (That its timer fires on time without any cron: `deadlines.rs`.)
#[track_caller]
fn with_movable_clock() -> Server {
    let library =
        std::env::var("FAKETIME_LIB").expect("FAKETIME_LIB names libfaketime: run these tests by `make test`");
    Server::builder()
        .config("hz", 100)
        .env("LD_PRELOAD", &library)
        .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        .env("FAKETIME_NO_CACHE", "1")
        .env("FAKETIME_TIMESTAMP_FILE", CLOCK)
        .start()
}

/// Puts the wall clock off by so many seconds from the true time.
fn set_clock(server: &Server, offset_s: i64) {
    // By renaming: a file half written would be read as another time.
    let new = server.dir().join("clock.new");
    fs::write(&new, format!("{offset_s:+}\n")).expect("the clock can be written");
    fs::rename(new, server.dir().join(CLOCK)).expect("the clock can be set");
}

/// The server's own idea of the time, in seconds.
#[track_caller]
fn wall_clock_s(conn: &mut Conn) -> i64 {
    conn.cmd(&["TIME"]).as_array()[0].as_str().parse().expect("TIME answers a number of seconds")
}

/// Something that is to end by itself.
struct Due {
    what: String,
    conn: Conn,
    /// Not before: its length after it was sent.
    earliest: Instant,
    /// Not after: its length after it is known to have begun, and a little.
    latest: Instant,
}

impl Due {
    /// Waits for it and wants it on time.
    #[track_caller]
    fn judge(&mut self, is_grant: bool) {
        let reply = self.conn.recv();
        let now = Instant::now();
        assert_eq!(matches!(reply, Reply::Int(1..)), is_grant, "{}: {reply}", self.what);
        assert!(now >= self.earliest, "{} ended {:?} early", self.what, self.earliest - now);
        assert!(now <= self.latest, "{} ended {:?} late", self.what, now - self.latest + LATE_MAX);
    }
}

/// A lease that somebody waits for; with the option CLAIM, a claim.
#[track_caller]
fn lease(server: &Server, key: &str, lease_ms: u64, option: &[&str]) -> Due {
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
    let earliest = Instant::now() + lasts;
    conn.cmd(&request).as_token();
    let latest = Instant::now() + lasts + LATE_MAX;
    let conn = waiting(server, Protocol::Resp2, &args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "BLOCK", 0]);
    Due { what: format!("lease {key} of {lease_ms} ms"), conn, earliest, latest }
}

/// A request that waits for `key` so long.
#[track_caller]
fn wait(server: &Server, key: &str, wait_ms: u64) -> Due {
    let lasts = Duration::from_millis(wait_ms);
    let mut conn = server.connect(Protocol::Resp2);
    let earliest = Instant::now() + lasts;
    conn.send(&args!["FLOCK.ACQUIRE", key, format!("waiter {wait_ms}"), LEASE_MS, "BLOCK", wait_ms]);
    server.wait_until_blocked(&conn);
    let latest = Instant::now() + lasts + LATE_MAX;
    Due { what: format!("wait of {wait_ms} ms"), conn, earliest, latest }
}

/// Leases, claims and waits of every length up to `last_ms`, begun before the clock is changed, and short ones begun while it is: all
/// must end on time. The clock is changed as `steps` say: after so many milliseconds, by so many seconds.
#[track_caller]
fn assert_all_on_time(steps: &[(u64, i64)], last_ms: u64) {
    let server = with_movable_clock();
    set_clock(&server, 0);
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
                set_clock(&server, *offset_s);
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
                let queued = Instant::now();
                assert_eq!(hear(&mut ears).notice, Notice::TimedOut);
                assert!(sent.elapsed() >= Duration::from_millis(100), "{:?}", sent.elapsed());
                assert!(queued.elapsed() <= Duration::from_millis(100) + LATE_MAX, "{:?}", queued.elapsed());
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

#[test]
fn clock_put_back_an_hour_for_three_seconds_delays_nothing() {
    // I1. The server's own timers stop when the clock is put back, and stay stopped when it is put right again.
    assert_all_on_time(&[(200, -3600), (3200, 0)], 4000);
}

#[test]
fn clock_put_forward_an_hour_ends_nothing_early() {
    // I2. A lease that were a point on the wall clock would be over at once; so would a wait.
    assert_all_on_time(&[(200, 3600)], 1500);
}

#[test]
fn clock_thrown_about_under_load_breaks_no_promise() {
    // I3. Many steps of up to a day, back and forth, while clients take, renew, give back and abandon locks: tokens rise, nobody holds
    // beside another, no hold is lost early, and a storage that checks the token meets no stale writer it must believe.
    let steps: u64 = if long_tier() { 150 } else { 12 };
    let mut random = Random::new();
    let server = with_movable_clock();
    set_clock(&server, 0);
    let recorder = Recorder::new();
    let store = FencedStore::new();
    let is_over = AtomicBool::new(false);
    let owners = AtomicU64::new(0);
    scope(|threads| {
        for process in 0..6 {
            let random = Random::from_seed(random.number());
            let (server, recorder, store, is_over, owners) = (&server, &recorder, &store, &is_over, &owners);
            threads.spawn(move || {
                let conn = server.connect(Protocol::Resp2);
                let mut client = Client { process, conn, random, recorder, store };
                while !is_over.load(Ordering::Relaxed) {
                    client.one_acquisition(&format!("owner {}", owners.fetch_add(1, Ordering::Relaxed)));
                }
            });
        }
        for _ in 0..steps {
            let_pass(Duration::from_millis(50 + random.below(150)));
            let day_s = 24 * 3600;
            let offset_s = i64::try_from(random.below(2 * day_s)).expect("a day is short") - 24 * 3600;
            set_clock(&server, if random.one_in(4) { 0 } else { offset_s });
        }
        is_over.store(true, Ordering::Relaxed);
    });
    assert_sound(&recorder.events(), &Rules::default());
    assert!(store.counts().accepted > steps, "{:?}", store.counts());
    assert_eq!(server.info("flock").number("flock_panics_caught"), 0);
}

/// One of the clients of a run.
struct Client<'a> {
    process: u32,
    conn: Conn,
    random: Random,
    recorder: &'a Recorder,
    store: &'a FencedStore,
}

impl Client<'_> {
    /// Takes a lock, perhaps; writes; renews, perhaps; gives it back or leaves it to its lease.
    #[track_caller]
    fn one_acquisition(&mut self, owner: &str) {
        let key = self.random.pick(&["a", "b", "c"]);
        let lease_ms = 20 + self.random.below(180);
        let mut request = args!["FLOCK.ACQUIRE", key, owner, lease_ms].to_vec();
        let mut call = Call::new(Verb::Acquire, key, owner).lease_ms(lease_ms);
        if self.random.one_in(3) {
            request.push(b"SHARED".to_vec());
            call = call.shared();
        }
        if !self.random.one_in(4) {
            request.extend(args!["BLOCK", 1 + self.random.below(300)]);
        }
        let op = self.recorder.invoke(self.process, call);
        let token = match self.conn.cmd(&request) {
            Reply::Nil => return self.recorder.refused(op),
            granted => granted.as_token(),
        };
        self.recorder.ok(op, Some(token));
        self.write(key, owner, token);
        if self.random.one_in(2) {
            let_pass(Duration::from_millis(self.random.below(60)));
            let call = Call::new(Verb::Renew, key, owner).lease_ms(lease_ms).token(token);
            let op = self.recorder.invoke(self.process, call);
            let renewal = self.conn.cmd(&args!["FLOCK.RENEW", key, owner, lease_ms, "TOKEN", token]);
            self.note(op, &renewal);
            self.write(key, owner, token);
        }
        if !self.random.one_in(4) {
            let op = self.recorder.invoke(self.process, Call::new(Verb::Release, key, owner).token(token));
            let release = self.conn.cmd(&args!["FLOCK.RELEASE", key, owner, "TOKEN", token]);
            self.note(op, &release);
        }
    }

    #[track_caller]
    fn note(&self, op: (u32, u64), reply: &Reply) {
        match reply.as_int() {
            1 => self.recorder.ok(op, None),
            _ => self.recorder.refused(op),
        }
    }

    /// Readers have tokens of their own and do not write.
    fn write(&self, key: &str, owner: &str, token: u64) {
        let op = self.recorder.invoke(self.process, Call::new(Verb::Write, key, owner).token(token));
        if self.store.write(key, owner, token) {
            self.recorder.ok(op, None);
        } else {
            self.recorder.refused(op);
        }
    }
}

fn renewal_at_the_very_end_of_a_lease_makes_no_second_holder(builder: Builder) {
    // I6. A renewal that arrives a millisecond before or after the end of the lease, while the next one waits: it is done or refused,
    // and the lock changes hands accordingly, once.
    let server = builder.start();
    let recorder = Recorder::new();
    let mut random = Random::new();
    let (mut alice, mut admin) = (server.connect(Protocol::Resp2), server.connect(Protocol::Resp2));
    let (mut renewed, mut refused) = (0, 0);
    for round in 0..if long_tier() { 3000 } else { 40 } {
        let (first, second) = (format!("alice {round}"), format!("bob {round}"));
        let op = recorder.invoke(1, Call::new(Verb::Acquire, "k", &first).lease_ms(10));
        let token = alice.cmd(&args!["FLOCK.ACQUIRE", "k", first, 10]).as_token();
        let granted = Instant::now();
        recorder.ok(op, Some(token));
        let mut bob = server.connect(Protocol::Resp2);
        let wait = recorder.invoke(2, Call::new(Verb::Acquire, "k", &second).lease_ms(u64::from(LEASE_MS)));
        bob.send(&args!["FLOCK.ACQUIRE", "k", second, LEASE_MS, "BLOCK", 0]);
        let successor = spawn(move || {
            let token = bob.recv().as_token();
            (bob, token, Instant::now())
        });
        let_pass(Duration::from_micros(9_000 + random.below(2_000)).saturating_sub(granted.elapsed()));
        let renewal = recorder.invoke(1, Call::new(Verb::Renew, "k", &first).lease_ms(20).token(token));
        let sent = Instant::now();
        let answer = alice.cmd(&args!["FLOCK.RENEW", "k", first, 20, "TOKEN", token]).as_int();
        let holders = holders(&mut admin, "k");
        if answer == 1 {
            renewed += 1;
            recorder.ok(renewal, None);
        } else {
            refused += 1;
            recorder.refused(renewal);
        }
        assert!(holders.len() <= 1, "{holders:?}");
        let (mut bob, next, granted) = successor.join().expect("the lock is handed over");
        recorder.ok(wait, Some(next));
        if answer == 1 {
            assert!(granted - sent >= Duration::from_millis(20), "{:?} after the renewal", granted - sent);
        }
        let release = recorder.invoke(2, Call::new(Verb::Release, "k", &second).token(next));
        assert_eq!(bob.cmd(&args!["FLOCK.RELEASE", "k", second, "TOKEN", next]), Reply::Int(1));
        recorder.ok(release, None);
    }
    println!("{renewed} renewals were in time, {refused} were not");
    assert_sound(&recorder.events(), &Rules::default());
}
