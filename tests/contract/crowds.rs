//! Waiters in numbers: many at once, many times, and for a while.

use std::thread::scope;
use std::time::{Duration, Instant};

use flock_tests::cpu::{main_thread_cpu, resident_bytes, used_memory};
use flock_tests::random::Random;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::{Builder, Info, Server};
use flock_tests::wait::{let_pass, wait_until};
use flock_tests::{args, on_own_servers};

use crate::scene::{
    HANDOFF_WITHIN, LEASE_MS, hold, long_tier, queue_request, release, rounds, transaction, wait_until_free, waiter,
};

on_own_servers![
    idle_waiters_cost_nothing,
    connections_are_served_once_in_order,
    releases_racing_with_requests_lose_no_wakeup,
    waits_that_end_in_every_way_leave_nothing_behind,
    threads_for_input_leave_the_module_to_the_main_thread,
];

fn idle_waiters_cost_nothing(builder: Builder) {
    // A11: waiters that poll, or are polled. A hundred idle ones for a while: no command but ours, and hardly more processor time than
    // another server takes for as many connections that do nothing.
    let (server, control) = (builder.start(), builder.start());
    let mut alice = server.connect(Protocol::Resp2);
    hold(&mut alice, "k", "alice");
    let _waiters: Vec<_> =
        (0..100).map(|number| waiter(&server, Protocol::Resp2, "k", &format!("waiter {number}"))).collect();
    let _idle: Vec<_> = (0..101).map(|_| control.connect(Protocol::Resp2)).collect();
    let commands = |conn: &mut Conn| {
        let info = Info::ask(conn, "stats");
        info.number("total_commands_processed")
    };
    let cpu = || [&server, &control].map(|server| main_thread_cpu(server.pid()));
    let (commands_before, [before, control_before]) = (commands(&mut alice), cpu());
    let_pass(Duration::from_millis(500));
    let [after, control_after] = cpu();
    assert_eq!(commands(&mut alice) - commands_before, 1);
    let (used, idle) = (after - before, control_after - control_before);
    // Polling once a tick would be fifty rounds of a hundred waiters.
    assert!(used < 2 * idle + Duration::from_millis(10), "{used:?} of 500 ms, {idle:?} without waiters");
}

fn connections_are_served_once_in_order(builder: Builder) {
    // A6: of many waiters about a hundred are served, then it stalls. Each is answered once, in order, and nothing is left.
    let count = if long_tier() { 2_000 } else { 300 };
    let server = builder.start();
    let mut admin = server.connect(Protocol::Resp2);
    hold(&mut admin, "k", "owner 0");
    let mut waiters: Vec<_> = (1..=count)
        .map(|number| {
            let mut conn = server.connect(Protocol::Resp2);
            let owner = format!("owner {number}");
            conn.send(&args!["FLOCK.ACQUIRE", "k", owner, LEASE_MS, "BLOCK", 0]);
            // One after the other: the server reads its sockets in an order of its own.
            wait_until("the waiter is queued", ANSWER_WITHIN, || {
                admin.cmd(&args!["FLOCK.INFO", "k", "LIMIT", 1]).field("waiter_count") == &Reply::Int(number)
            });
            conn
        })
        .collect();
    let mut last = 0;
    for (number, waiter) in waiters.iter_mut().enumerate() {
        release(&mut admin, "k", &format!("owner {number}"));
        let token = waiter.recv().as_token();
        assert!(token > last, "waiter {number}: {token} after {last}");
        last = token;
    }
    for waiter in &mut waiters {
        assert_eq!(waiter.cmd(&["ECHO", "in step"]), Reply::bulk("in step"));
    }
    let info = server.info("flock");
    assert_eq!(info.number("flock_handoffs"), count);
    assert_eq!(info.number("flock_waiters"), 0);
    assert_eq!(info.number("flock_blocked_clients"), 0);
}

fn releases_racing_with_requests_lose_no_wakeup(builder: Builder) {
    // A1: request and release under way at the same time, in an order that nobody controls; each waiter is granted long before a lease.
    let server = builder.start();
    let (mut holder, mut next) = (server.connect(Protocol::Resp2), server.connect(Protocol::Resp3));
    let mut random = Random::new();
    hold(&mut holder, "k", "owner 0");
    for round in 0..rounds(1_000, 50_000) {
        let request = args!["FLOCK.ACQUIRE", "k", format!("owner {}", round + 1), LEASE_MS, "BLOCK", 0];
        let release = args!["FLOCK.RELEASE", "k", format!("owner {round}")];
        if random.one_in(2) {
            next.send(&request);
            holder.send(&release);
        } else {
            holder.send(&release);
            next.send(&request);
        }
        assert_eq!(holder.recv(), Reply::Int(1));
        let start = Instant::now();
        next.recv().as_token();
        assert!(start.elapsed() < HANDOFF_WITHIN, "round {round} took {:?}", start.elapsed());
        std::mem::swap(&mut holder, &mut next);
    }
}

fn threads_for_input_leave_the_module_to_the_main_thread(builder: Builder) {
    // The state has no lock around it: it opens on one thread only. With threads that read and write for it the server still runs commands
    // and callbacks on its main thread, or this counts a panic.
    let server = builder.config("io-threads", 4).start();
    let mut random = Random::new();
    let each = rounds(200, 2_000);
    scope(|threads| {
        for number in 0..16 {
            let (server, mut random) = (&server, Random::from_seed(random.number()));
            threads.spawn(move || {
                let mut conn = server.connect(Protocol::Resp2);
                let owner = format!("owner {number}");
                for _ in 0..each {
                    let key = random.pick(&["a", "b", "c"]);
                    // Also a batch that the threads read as one.
                    conn.send(&args!["FLOCK.ACQUIRE", key, owner, LEASE_MS, "BLOCK", 0]);
                    conn.send(&args!["FLOCK.RENEW", key, owner, LEASE_MS]);
                    conn.send(&args!["FLOCK.RELEASE", key, owner]);
                    conn.recv().as_token();
                    assert_eq!((conn.recv(), conn.recv()), (Reply::Int(1), Reply::Int(1)));
                }
            });
        }
    });
    let info = server.info("flock");
    assert_eq!(info.number("flock_panics_caught"), 0);
    assert_eq!((info.number("flock_held"), info.number("flock_waiters")), (0, 0));
    assert_eq!(info.number("flock_grants"), i64::try_from(16 * each).expect("a number of rounds fits"));
}

/// So many wait at once.
const CROWD: usize = 200;

/// How a wait can end, and what the waiters are answered then.
const ENDS: [(End, &str); 10] = [
    (End::TimedOut, "nil"),
    (End::Granted, "token"),
    (End::Unblocked, "nil"),
    (End::UnblockedByError, "UNBLOCKED"),
    (End::Cancelled, "CANCELLED"),
    (End::Superseded, "SUPERSEDED"),
    (End::Flushed, "FLUSHED"),
    (End::Killed, "closed"),
    (End::Closed, "closed"),
    (End::Undelivered, "closed"),
];

#[derive(Clone, Copy, Debug)]
enum End {
    TimedOut,
    Granted,
    Unblocked,
    UnblockedByError,
    Cancelled,
    Superseded,
    Flushed,
    Killed,
    Closed,
    Undelivered,
}

fn waits_that_end_in_every_way_leave_nothing_behind(builder: Builder) {
    // E13, S12: a waiter that is forgotten, or a handle that is not given back, shows as memory that grows round by round.
    let server = builder.start();
    let mut admin = server.connect(Protocol::Resp2);
    let mut crowd = connect_crowd(&server);
    // Twice each way, then as many waiters as there are rounds.
    let warm_up = 2 * ENDS.len();
    let crowds = usize::try_from(rounds(10_000, 100_000)).expect("a number of rounds fits") / CROWD;
    let mut before = (0, 0);
    for number in 0..warm_up + crowds {
        if number == warm_up {
            settle(&server, &mut admin, crowd);
            before = memory(&server, &mut admin);
            crowd = connect_crowd(&server);
        }
        let (end, answer) = ENDS[number % ENDS.len()];
        end_waits(&server, &mut admin, &mut crowd, end, answer);
    }
    settle(&server, &mut admin, crowd);
    // The server itself gives back what it kept for its clients, cron by cron. While it waits, a waiter takes 29 KB.
    wait_until(&format!("what {} waits took is given back", crowds * CROWD), ANSWER_WITHIN, || {
        let after = memory(&server, &mut admin);
        let grown = (after.0.saturating_sub(before.0), after.1.saturating_sub(before.1));
        println!("{grown:?} bytes used and resident more after {} waits", crowds * CROWD);
        grown.0 < 100_000 && grown.1 < 4 << 20
    });
    assert_eq!(server.info("flock").number("flock_panics_caught"), 0);
}

#[track_caller]
fn connect_crowd(server: &Server) -> Vec<Conn> {
    (0..CROWD).map(|_| server.connect(Protocol::Resp2)).collect()
}

fn owner_of(number: usize) -> String {
    format!("waiter {number}")
}

/// Sends one request per waiter over `conn`, all before the first answer is read.
#[track_caller]
fn for_each_waiter(conn: &mut Conn, crowd: &[Conn], request: impl Fn(usize, &Conn) -> Vec<Vec<u8>>) -> Vec<Reply> {
    for (number, waiter) in crowd.iter().enumerate() {
        conn.send(&request(number, waiter));
    }
    crowd.iter().map(|_| conn.recv()).collect()
}

/// A whole crowd waits for one lock, and all their waits end in one way. Who has lost its connection gets a new one.
#[track_caller]
fn end_waits(server: &Server, admin: &mut Conn, crowd: &mut Vec<Conn>, end: End, answer: &str) {
    hold(admin, "k", "holder");
    let wait_ms = if matches!(end, End::TimedOut) { 1 } else { 0 };
    for (number, waiter) in crowd.iter_mut().enumerate() {
        let mut request = args!["FLOCK.ACQUIRE", "k", owner_of(number), LEASE_MS, "BLOCK", wait_ms].to_vec();
        // Every second one with all that a waiter can bring along.
        if number % 2 == 1 {
            request.extend(args!["CHANNEL", "news", "CLAIM", 5000, "SESSION", 5000, "LABEL", "x", "REENTRANT", "1"]);
        }
        waiter.send(&request);
    }
    if wait_ms == 0 {
        wait_until("the whole crowd waits", ANSWER_WITHIN, || waiter_count(admin) == CROWD);
    }
    let kill = |waiter: &Conn| args!["CLIENT", "KILL", "ID", waiter.id()].to_vec();
    let one = |replies: Vec<Reply>| assert!(replies.iter().all(|reply| *reply == Reply::Int(1)), "{end:?}");
    match end {
        End::TimedOut => {}
        // Each is granted what was taken from the one before.
        End::Granted => {
            release(admin, "k", "holder");
            one(for_each_waiter(admin, crowd, |_, _| args!["FLOCK.REVOKE", "k"].to_vec()));
        }
        End::Unblocked => {
            one(for_each_waiter(admin, crowd, |_, waiter| args!["CLIENT", "UNBLOCK", waiter.id()].to_vec()));
        }
        End::UnblockedByError => {
            one(for_each_waiter(admin, crowd, |_, waiter| args!["CLIENT", "UNBLOCK", waiter.id(), "ERROR"].to_vec()));
        }
        End::Cancelled => {
            one(for_each_waiter(admin, crowd, |number, _| args!["FLOCK.RELEASE", "k", owner_of(number)].to_vec()));
        }
        End::Superseded => {
            for_each_waiter(admin, crowd, |number, _| queue_request("k", &owner_of(number), "nobody listens").to_vec());
            one(for_each_waiter(admin, crowd, |number, _| args!["FLOCK.RELEASE", "k", owner_of(number)].to_vec()));
        }
        End::Flushed => assert_eq!(admin.cmd(&["FLUSHALL"]), Reply::ok()),
        End::Killed => one(for_each_waiter(admin, crowd, |_, waiter| kill(waiter))),
        End::Closed => {
            *crowd = connect_crowd(server);
            wait_until("nobody waits any more", ANSWER_WITHIN, || waiter_count(admin) == 0);
        }
        // Granted and gone in one step, one after the other.
        End::Undelivered => {
            let mut commands = vec![args!["FLOCK.RELEASE", "k", "holder"].to_vec()];
            commands.extend(crowd.iter().map(kill));
            let commands: Vec<&[Vec<u8>]> = commands.iter().map(Vec::as_slice).collect();
            one(transaction(admin, &commands));
        }
    }
    match (end, answer) {
        (End::Closed, _) => {}
        (_, "closed") => *crowd = connect_crowd(server),
        _ => {
            for waiter in &mut *crowd {
                let reply = waiter.recv();
                let said = match &reply {
                    Reply::Nil => "nil",
                    Reply::Int(1..) => "token",
                    other => other.error_code().unwrap_or("something else"),
                };
                assert_eq!(said, answer, "{end:?}: {reply}");
            }
        }
    }
    admin.cmd(&["FLOCK.REVOKE", "k"]);
    wait_until_free(admin, "k");
}

#[track_caller]
fn waiter_count(admin: &mut Conn) -> usize {
    let count = admin.cmd(&args!["FLOCK.INFO", "k", "LIMIT", 0]).field("waiter_count").as_int();
    usize::try_from(count).expect("a count is not negative")
}

/// Lets the crowd go, and waits until the server has too.
#[track_caller]
fn settle(server: &Server, admin: &mut Conn, crowd: Vec<Conn>) {
    drop(crowd);
    wait_until("only our connection is left", ANSWER_WITHIN, || {
        let clients = Info::ask(admin, "clients");
        clients.number("connected_clients") == 1 && clients.number("blocked_clients") == 0
    });
    let flock = server.info("flock");
    assert_eq!((flock.number("flock_waiters"), flock.number("flock_blocked_clients")), (0, 0));
}

/// What the server uses, as it counts itself, and of the machine.
#[track_caller]
fn memory(server: &Server, admin: &mut Conn) -> (u64, u64) {
    // Pages that the allocator keeps for later are no leak.
    assert_eq!(admin.cmd(&["MEMORY", "PURGE"]), Reply::ok());
    (used_memory(admin), resident_bytes(server.pid()))
}
