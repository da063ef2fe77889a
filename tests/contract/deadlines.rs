//! Leases and waits end by themselves, on time: never early, and late by no more than a tick where the server runs at all.
//!
//! Early is judged exactly: a lease cannot have begun before its request was sent, nor end before its whole length has passed since then.
//! Late is judged by [`TICK`](crate::scene::TICK).

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use flock_core::effect::Notice;
use flock_core::refusal::LossReason;
use flock_tests::cpu::Stopwatch;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::{Builder, Server, unique_key};
use flock_tests::wait::{let_pass, wait_until};
use flock_tests::{args, on_own_servers, on_shared_servers};

use crate::lock_view::{holders, waiting};
use crate::scene::{
    Heard, LEASE_MS, QUIET, granted, hear, hear_grant, held_by_alice, hold, listener, long_tier, lost, on_time,
    outlast, position, queue, quiet, wait_until_free, waiter,
};

on_shared_servers![
    lease_of_any_length_never_ends_early,
    wait_of_any_length_never_ends_early,
    lease_of_a_millisecond_ends,
    renewal_moves_the_end_away,
    renewal_moves_the_end_nearer,
    each_reader_has_its_own_end,
    lease_that_ends_hands_over_to_a_queued_request,
    lease_that_ends_lets_one_more_into_a_semaphore,
];

on_own_servers![
    lease_ends_within_a_tick_without_traffic,
    lease_ends_within_a_tick_under_traffic,
    wait_ends_within_a_tick_without_traffic,
    queued_wait_ends_within_a_tick_without_traffic,
    session_cut_by_a_close_ends_without_traffic,
    lease_that_ends_in_a_stopped_server_is_handed_over_when_it_goes_on,
    lease_that_has_not_ended_in_a_stopped_server_goes_on,
    late_renewal_of_a_lease_that_ended_in_a_stopped_server_is_refused,
    wait_that_ends_in_a_stopped_server_is_answered_when_it_goes_on,
    lease_that_ends_in_a_sleeping_server_is_handed_over_when_it_wakes,
    lease_that_ends_in_a_busy_script_is_handed_over_after_it,
    wait_that_ends_in_a_busy_script_is_answered_after_it,
    leases_due_in_one_instant_are_all_handed_over,
    waits_due_in_one_instant_are_all_told,
    clients_are_served_between_the_turns_of_a_burst,
    leases_end_by_the_servers_cron_where_there_is_no_timer,
];

fn lease_of_any_length_never_ends_early(server: &Server, protocol: Protocol) {
    // A millisecond cut off, in a conversion or by the timer, would show in one of these.
    let (mut alice, mut bob) = (server.connect(protocol), server.connect(protocol));
    for lease_ms in 1..=20 {
        let key = unique_key("lease");
        let start = Instant::now();
        alice.cmd(&args!["FLOCK.ACQUIRE", key, "alice", lease_ms]).as_token();
        bob.cmd(&args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "BLOCK", 0]).as_token();
        let held = start.elapsed();
        assert!(held >= Duration::from_millis(lease_ms), "{held:?} of {lease_ms} ms");
    }
}

fn wait_of_any_length_never_ends_early(server: &Server, protocol: Protocol) {
    // As above.
    let (key, mut conn) = held_by_alice(server, protocol, "wait");
    for wait_ms in 1..=20 {
        let start = Instant::now();
        let request = args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "BLOCK", wait_ms];
        assert_eq!(conn.cmd(&request), Reply::Nil);
        let waited = start.elapsed();
        assert!(waited >= Duration::from_millis(wait_ms), "{waited:?} of {wait_ms} ms");
    }
}

fn lease_of_a_millisecond_ends(server: &Server, protocol: Protocol) {
    // The shortest lease may be over before anything was armed for its end.
    let mut conn = server.connect(protocol);
    for _ in 0..20 {
        let key = unique_key("short");
        conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 1]).as_token();
        wait_until_free(&mut conn, &key);
    }
}

fn renewal_moves_the_end_away(server: &Server, protocol: Protocol) {
    // The timer that was armed for the old end still fires.
    let key = unique_key("renewed");
    let mut alice = server.connect(protocol);
    alice.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 100]).as_token();
    let mut bob = waiter(server, protocol, &key, "bob");
    assert_eq!(alice.cmd(&args!["FLOCK.RENEW", key, "alice", LEASE_MS]), Reply::Int(1));
    bob.expect_silence(Duration::from_millis(200));
}

fn renewal_moves_the_end_nearer(server: &Server, protocol: Protocol) {
    // B7: the new lease replaces what was left; a timer armed for the old end would come a minute late.
    let (key, mut alice) = held_by_alice(server, protocol, "renewed");
    let mut bob = waiter(server, protocol, &key, "bob");
    assert_eq!(alice.cmd(&args!["FLOCK.RENEW", key, "alice", 50]), Reply::Int(1));
    bob.recv().as_token();
}

fn each_reader_has_its_own_end(server: &Server, protocol: Protocol) {
    // D1: the short lease of one must not end the long one of another, nor the other way round.
    let key = unique_key("readers");
    let mut conn = server.connect(protocol);
    for (owner, lease_ms) in [("long", LEASE_MS), ("short", 50)] {
        conn.cmd(&args!["FLOCK.ACQUIRE", key, owner, lease_ms, "SHARED"]).as_token();
    }
    wait_until("only the long one is left", ANSWER_WITHIN, || holders(&mut conn, &key) == ["long"]);
}

fn lease_that_ends_hands_over_to_a_queued_request(server: &Server, protocol: Protocol) {
    // A3: by the server, with no release ever and no request.
    let (key, channel) = (unique_key("expired"), unique_key("channel"));
    let mut ears = listener(server, protocol, &channel);
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 50]).as_token();
    queue(&mut conn, &key, "bob", &channel);
    hear_grant(&mut ears, &key, "bob");
}

fn lease_that_ends_lets_one_more_into_a_semaphore(server: &Server, protocol: Protocol) {
    // A3, A17: one of several leases ends; the lock itself stays held.
    let key = unique_key("semaphore");
    let mut conn = server.connect(protocol);
    for (owner, lease_ms) in [("long", LEASE_MS), ("short", 100)] {
        let request = args!["FLOCK.ACQUIRE", key, owner, lease_ms, "SHARED", "LIMIT", 2];
        conn.cmd(&request).as_token();
    }
    let request = args!["FLOCK.ACQUIRE", key, "next", LEASE_MS, "SHARED", "LIMIT", 2, "BLOCK", 0];
    conn.cmd(&request).as_token();
    assert_eq!(holders(&mut conn, &key), ["long", "next"]);
}

fn lease_ends_within_a_tick_without_traffic(builder: Builder) {
    // A3, L4: nothing is sent while the lease ends, and the server's own cron comes once a second only.
    assert_leases_end_on_time(&quiet(&builder));
}

/// Leases of 100 ms, one after the other.
#[track_caller]
fn assert_leases_end_on_time(server: &Server) {
    let mut conn = server.connect(Protocol::Resp2);
    for round in 0..5 {
        let key = format!("k{round}");
        conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 100]).as_token();
        outlast(server, &key, Instant::now(), 100);
    }
}

#[test]
fn lease_ends_within_a_tick_without_the_servers_cron() {
    // I5: where the cron does not come at all. (Of the newest server only: the oldest cannot pause it.)
    let server = Server::builder().start();
    let mut conn = server.connect(Protocol::Resp2);
    assert_eq!(conn.cmd(&args!["DEBUG", "PAUSE-CRON", 1]), Reply::ok());
    assert_leases_end_on_time(&server);
    assert_eq!(conn.cmd(&args!["DEBUG", "PAUSE-CRON", 0]), Reply::ok());
}

fn leases_end_by_the_servers_cron_where_there_is_no_timer(builder: Builder) {
    // An old kernel, or one that has no descriptor left: the server says so, and what is due ends at the next cron, 100 ms apart.
    let server = builder.without_timer().start();
    assert!(server.log().contains("this system has no timerfd"), "{}", server.log());
    let (_alice, mut bob) = lease_and_waiter(&server, 50);
    let watch = Stopwatch::start(&server);
    bob.recv().as_token();
    let late = watch.late(Duration::from_millis(50));
    assert!(late < Duration::from_millis(300), "{late:?} late");
    let asked = Instant::now();
    let mut carol = waiting(&server, Protocol::Resp2, &args!["FLOCK.ACQUIRE", "k", "carol", LEASE_MS, "BLOCK", 50]);
    assert!(carol.recv().is_nil());
    assert!(asked.elapsed() >= Duration::from_millis(50), "{:?}", asked.elapsed());
}

fn lease_ends_within_a_tick_under_traffic(builder: Builder) {
    // L4: a server that never sleeps must look at its deadlines all the same.
    let server = quiet(&builder);
    let mut busy = server.connect(Protocol::Resp2);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            // Bounded: a failure below must not leave this running.
            let start = Instant::now();
            while !done.load(Ordering::Relaxed) && start.elapsed() < ANSWER_WITHIN {
                for _ in 0..50 {
                    busy.send(&["PING"]);
                }
                for _ in 0..50 {
                    busy.recv();
                }
            }
        });
        assert_leases_end_on_time(&server);
        done.store(true, Ordering::Relaxed);
    });
}

fn wait_ends_within_a_tick_without_traffic(builder: Builder) {
    // L3.
    let server = quiet(&builder);
    let mut conn = server.connect(Protocol::Resp2);
    hold(&mut conn, "k", "alice");
    for _ in 0..5 {
        let watch = Stopwatch::start(&server);
        let request = args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS, "BLOCK", 100];
        assert_eq!(conn.cmd(&request), Reply::Nil);
        on_time(&watch, 100);
    }
}

fn queued_wait_ends_within_a_tick_without_traffic(builder: Builder) {
    // L3.
    let server = quiet(&builder);
    let mut ears = listener(&server, Protocol::Resp2, "channel");
    let mut conn = server.connect(Protocol::Resp2);
    hold(&mut conn, "k", "alice");
    for _ in 0..5 {
        let request = args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS, "QUEUE", 100, "CHANNEL", "channel"];
        position(&conn.cmd(&request));
        let queued = Stopwatch::start(&server);
        assert_eq!(hear(&mut ears), Heard::new(Notice::TimedOut, "k", "bob"));
        on_time(&queued, 100);
    }
}

fn session_cut_by_a_close_ends_without_traffic(builder: Builder) {
    // L4: the close itself must arm the timer anew: the one that is armed is a minute away.
    let server = quiet(&builder);
    let mut alice = server.connect(Protocol::Resp2);
    let request = args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS, "SESSION", 100];
    alice.cmd(&request).as_token();
    let mut bob = waiter(&server, Protocol::Resp2, "k", "bob");
    let watch = Stopwatch::start(&server);
    drop(alice);
    bob.recv().as_token();
    on_time(&watch, 100);
}

fn lease_that_ends_in_a_stopped_server_is_handed_over_when_it_goes_on(builder: Builder) {
    // I5: late, and then at once.
    let server = quiet(&builder);
    let (_alice, mut bob) = lease_and_waiter(&server, 100);
    server.sigstop();
    bob.expect_silence(Duration::from_millis(200));
    server.sigcont();
    let watch = Stopwatch::start(&server);
    bob.recv().as_token();
    on_time(&watch, 0);
}

fn lease_that_has_not_ended_in_a_stopped_server_goes_on(builder: Builder) {
    // I5: never early: a stop that ends before the lease does changes nothing.
    let server = quiet(&builder);
    let mut alice = server.connect(Protocol::Resp2);
    let start = Instant::now();
    alice.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 400]).as_token();
    let mut bob = waiter(&server, Protocol::Resp2, "k", "bob");
    server.sigstop();
    let_pass(Duration::from_millis(100));
    server.sigcont();
    bob.recv().as_token();
    let held = start.elapsed();
    assert!(held >= Duration::from_millis(400), "{held:?}");
}

fn late_renewal_of_a_lease_that_ended_in_a_stopped_server_is_refused(builder: Builder) {
    // C9: the renewal was sent in time and is read too late: before the handoff, but after the lease.
    let server = quiet(&builder);
    let (mut alice, mut bob) = lease_and_waiter(&server, 200);
    server.sigstop();
    alice.send(&args!["FLOCK.RENEW", "k", "alice", LEASE_MS]);
    let_pass(Duration::from_millis(250));
    server.sigcont();
    assert_eq!(alice.recv(), Reply::Int(0));
    bob.recv().as_token();
}

fn wait_that_ends_in_a_stopped_server_is_answered_when_it_goes_on(builder: Builder) {
    // I5.
    let server = quiet(&builder);
    let mut bob = short_wait(&server);
    server.sigstop();
    let_pass(PAST_A_SHORT_WAIT);
    server.sigcont();
    let watch = Stopwatch::start(&server);
    assert_eq!(bob.recv(), Reply::Nil);
    on_time(&watch, 0);
}

fn lease_that_ends_in_a_sleeping_server_is_handed_over_when_it_wakes(builder: Builder) {
    // I5: a command that takes long delays everything, and breaks nothing.
    let server = quiet(&builder);
    let (mut alice, mut bob) = lease_and_waiter(&server, 100);
    assert_eq!(alice.cmd(&["DEBUG", "SLEEP", "0.2"]), Reply::ok());
    let watch = Stopwatch::start(&server);
    bob.recv().as_token();
    on_time(&watch, 0);
}

fn lease_that_ends_in_a_busy_script_is_handed_over_after_it(builder: Builder) {
    // E18: a busy script lets the event loop turn, timers included, in the middle of its own execution. What is due waits for its end.
    let server = builder.config("busy-reply-threshold", 20).appendonly().start();
    let (_alice, mut bob) = lease_and_waiter(&server, SHORT_WAIT_MS);
    in_a_busy_script(&server, || bob.expect_silence(PAST_A_SHORT_WAIT));
    bob.recv().as_token();
}

fn wait_that_ends_in_a_busy_script_is_answered_after_it(builder: Builder) {
    // As above.
    let server = builder.config("busy-reply-threshold", 20).appendonly().start();
    let mut bob = short_wait(&server);
    in_a_busy_script(&server, || let_pass(PAST_A_SHORT_WAIT));
    assert_eq!(bob.recv(), Reply::Nil);
}

fn leases_due_in_one_instant_are_all_handed_over(builder: Builder) {
    // G3: each lock once, each with its loss and its next holder; none is forgotten when the turn's time is used up.
    let count = burst_size();
    let server = builder.start();
    let mut holders = listener(&server, Protocol::Resp2, "holders");
    let mut waiters = listener(&server, Protocol::Resp2, "waiters");
    let mut conn = server.connect(Protocol::Resp2);
    let tokens = many_leases(&mut conn, count);
    for number in 0..count {
        conn.send(&args!["FLOCK.ACQUIRE", key_of(number), "bob", LEASE_MS, "QUEUE", LEASE_MS, "CHANNEL", "waiters"]);
    }
    for _ in 0..count {
        assert_eq!(position(&conn.recv()), 1);
    }
    let renew = format!("redis.call('FLOCK.RENEW', '{KEY}' .. i, 'alice', {BURST_MS})");
    begin_burst(&mut conn, count, &renew);
    sleep_past_the_burst(&mut conn);
    let mut lost_locks = BTreeSet::new();
    for _ in 0..count {
        let heard = hear(&mut holders);
        let number = number_of(&heard.key);
        assert_eq!(heard, Heard::new(lost(tokens[number], LossReason::Expired), &key_of(number), "alice"));
        lost_locks.insert(number);
    }
    assert_eq!(lost_locks.len(), count, "each lock is lost once");
    let mut handed_over = BTreeSet::new();
    for _ in 0..count {
        let heard = hear(&mut waiters);
        let number = number_of(&heard.key);
        let Notice::Granted { token, .. } = heard.notice else {
            panic!("expected a grant, got {heard:?}");
        };
        assert!(token.get() > tokens[number]);
        assert_eq!(heard, Heard::new(granted(token.get(), LEASE_MS), &key_of(number), "bob"));
        handed_over.insert(number);
    }
    assert_eq!(handed_over.len(), count, "each lock is granted once");
    waiters.expect_silence(QUIET);
}

fn waits_due_in_one_instant_are_all_told(builder: Builder) {
    // G3, L3.
    let count = burst_size();
    let server = builder.start();
    let mut ears = listener(&server, Protocol::Resp2, "channel");
    let mut conn = server.connect(Protocol::Resp2);
    hold(&mut conn, "k", "alice");
    let queue = format!(
        "redis.call('FLOCK.ACQUIRE', 'k', '{KEY}' .. i, {LEASE_MS}, 'QUEUE', {BURST_MS}, 'CHANNEL', 'channel')"
    );
    begin_burst(&mut conn, count, &queue);
    sleep_past_the_burst(&mut conn);
    let told: BTreeSet<_> = (0..count)
        .map(|_| {
            let heard = hear(&mut ears);
            assert_eq!(heard.notice, Notice::TimedOut);
            number_of(&heard.owner)
        })
        .collect();
    assert_eq!(told.len(), count, "each owner is told once");
}

fn clients_are_served_between_the_turns_of_a_burst(builder: Builder) {
    // G3: a burst that is worked off in one go keeps everybody waiting. This request is sent while the server sleeps, so it is read after
    // the first turn of the burst, and must still find locks that are due.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let mut other = server.connect(Protocol::Resp2);
    let acquire = format!("redis.call('FLOCK.ACQUIRE', '{KEY}' .. i, 'alice', {BURST_MS})");
    begin_burst(&mut conn, 10_000, &acquire);
    conn.send(&SLEEP_PAST_THE_BURST);
    let_pass(Duration::from_millis(100));
    let left = other.cmd(&["DBSIZE"]).as_int();
    assert!(left > 0, "the whole burst was performed before anybody else was served");
}

/// Alice holds a lock for `lease_ms` from now on, and bob waits for it.
#[track_caller]
fn lease_and_waiter(server: &Server, lease_ms: u32) -> (Conn, Conn) {
    let mut alice = server.connect(Protocol::Resp2);
    hold(&mut alice, "k", "alice");
    let bob = waiter(server, Protocol::Resp2, "k", "bob");
    assert_eq!(alice.cmd(&args!["FLOCK.RENEW", "k", "alice", lease_ms]), Reply::Int(1));
    (alice, bob)
}

/// Long enough that something else has begun before it is over, also on a busy machine; and more than that.
const SHORT_WAIT_MS: u32 = 400;
const PAST_A_SHORT_WAIT: Duration = Duration::from_millis(500);

/// A lock is held, and bob waits for it for [`SHORT_WAIT_MS`].
#[track_caller]
fn short_wait(server: &Server) -> Conn {
    hold(&mut server.connect(Protocol::Resp2), "k", "alice");
    waiting(server, Protocol::Resp2, &args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS, "BLOCK", SHORT_WAIT_MS])
}

/// Runs `meanwhile` while a script runs without end, then kills the script.
#[track_caller]
fn in_a_busy_script(server: &Server, meanwhile: impl FnOnce()) {
    let mut busy = server.connect(Protocol::Resp2);
    let mut admin = server.connect(Protocol::Resp2);
    busy.send(&["EVAL", "while true do end", "0"]);
    wait_until("the script is busy", ANSWER_WITHIN, || admin.cmd(&["PING"]).error_code() == Some("BUSY"));
    meanwhile();
    assert_eq!(admin.cmd(&["SCRIPT", "KILL"]), Reply::ok());
    assert!(busy.recv().error_code().is_some(), "the script was killed");
}

fn burst_size() -> usize {
    if long_tier() { 10_000 } else { 1_000 }
}

/// How long what ends in a burst lasts, and how long the server then sleeps.
const BURST_MS: u32 = 1_000;
const SLEEP_PAST_THE_BURST: [&str; 3] = ["DEBUG", "SLEEP", "1.01"];

/// Alice takes `count` locks over one connection; answers the tokens.
#[track_caller]
fn many_leases(conn: &mut Conn, count: usize) -> Vec<u64> {
    for number in 0..count {
        conn.send(&args!["FLOCK.ACQUIRE", key_of(number), "alice", LEASE_MS, "CHANNEL", "holders"]);
    }
    (0..count).map(|_| conn.recv().as_token()).collect()
}

/// Runs `step` for each number `i` below `count` in one script: what lasts [`BURST_MS`] from then on is due as one.
#[track_caller]
fn begin_burst(conn: &mut Conn, count: usize, step: &str) {
    let script = format!("for i = 0, ARGV[1] - 1 do {step} end");
    assert!(conn.cmd(&args!["EVAL", script, 0, count]).is_nil());
}

/// The server sleeps until the whole burst is over, and then finds it due in one instant.
#[track_caller]
fn sleep_past_the_burst(conn: &mut Conn) {
    assert_eq!(conn.cmd(&SLEEP_PAST_THE_BURST), Reply::ok());
}

/// What the names of these locks, and owners, begin with; a number follows.
const KEY: &str = "lock ";

fn key_of(number: usize) -> String {
    format!("{KEY}{number}")
}

#[track_caller]
fn number_of(key: &str) -> usize {
    match key.strip_prefix(KEY).map(str::parse) {
        Some(Ok(number)) => number,
        _ => panic!("{key} is no key of this test"),
    }
}
