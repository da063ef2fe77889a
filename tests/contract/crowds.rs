//! Waiters in numbers: many at once, many times, and for a while.

use std::time::{Duration, Instant};

use flock_tests::cpu::{main_thread_cpu, used_memory};
use flock_tests::random::Random;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::{Builder, Info, Server};
use flock_tests::wait::{let_pass, wait_until};
use flock_tests::{args, on_own_servers};

use crate::lock_view::waiters;
use crate::scene::{
    HANDOFF_WITHIN, LEASE_MS, hold, long_tier, queue, release, transaction, wait_until_free, wait_until_waiting, waiter,
};

on_own_servers![
    idle_waiters_cost_nothing,
    connections_are_served_once_in_order,
    releases_racing_with_requests_lose_no_wakeup,
    ended_waits_leave_nothing_behind,
];

fn idle_waiters_cost_nothing(builder: Builder) {
    // A11: waiters that poll, or are polled. A hundred idle ones for a while: no command but ours, and hardly any processor time.
    let server = builder.start();
    let mut alice = server.connect(Protocol::Resp2);
    hold(&mut alice, "k", "alice");
    let _waiters: Vec<_> =
        (0..100).map(|number| waiter(&server, Protocol::Resp2, "k", &format!("waiter {number}"))).collect();
    let commands = |conn: &mut Conn| {
        let info = Info::ask(conn, "stats");
        info.number("total_commands_processed")
    };
    let (commands_before, cpu_before) = (commands(&mut alice), main_thread_cpu(server.pid()));
    let_pass(Duration::from_millis(500));
    let cpu = main_thread_cpu(server.pid()) - cpu_before;
    assert_eq!(commands(&mut alice) - commands_before, 1);
    // The server's own cron takes 1 % to 2 % with a hundred connections.
    assert!(cpu < Duration::from_millis(50), "{cpu:?} of 500 ms");
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
    let rounds = if long_tier() { 50_000 } else { 1_000 };
    let server = builder.start();
    let (mut holder, mut next) = (server.connect(Protocol::Resp2), server.connect(Protocol::Resp3));
    let mut random = Random::new();
    hold(&mut holder, "k", "owner 0");
    for round in 0..rounds {
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

fn ended_waits_leave_nothing_behind(builder: Builder) {
    // E13, S12: a waiter that is forgotten, or a handle that is not given back, shows as memory that grows round by round.
    let rounds = if long_tier() { 2_000 } else { 60 };
    let server = builder.start();
    let mut admin = server.connect(Protocol::Resp2);
    let mut after_warm_up = 0;
    for round in 0..rounds {
        end_waits_in_every_way(&server, &mut admin);
        if round == 9 {
            settle(&server, &mut admin);
            after_warm_up = used_memory(&mut admin);
        }
    }
    settle(&server, &mut admin);
    let grown = used_memory(&mut admin).saturating_sub(after_warm_up);
    // One waiter takes 29 KB while it waits, and a round has nine: even one forgotten each round would be above 1.4 MB in the short run.
    assert!(grown < 500_000, "{grown} bytes more after {} rounds", rounds - 10);
    let info = server.info("flock");
    assert_eq!(info.number("flock_panics_caught"), 0);
}

/// One round: nine waiters, each of which ends in its own way.
#[track_caller]
fn end_waits_in_every_way(server: &Server, admin: &mut Conn) {
    hold(admin, "k", "holder");
    let wait = |owner: &str, wait_ms: u32| {
        let mut conn = server.connect(Protocol::Resp2);
        conn.send(&args!["FLOCK.ACQUIRE", "k", owner, LEASE_MS, "BLOCK", wait_ms]);
        conn
    };
    let mut granted = wait("granted", 0);
    wait_until_waiting(admin, "k", &["granted"]);
    let mut others = [
        wait("timed out", 1),
        wait("unblocked", 0),
        wait("unblocked by error", 0),
        wait("cancelled", 0),
        wait("superseded", 0),
    ];
    let (killed, closed, undelivered) = (wait("killed", 0), wait("closed", 0), wait("undelivered", 0));
    wait_until("eight wait, one has timed out", ANSWER_WITHIN, || waiters(admin, "k").len() == 8);
    admin.cmd(&args!["CLIENT", "UNBLOCK", others[1].id()]);
    admin.cmd(&args!["CLIENT", "UNBLOCK", others[2].id(), "ERROR"]);
    release(admin, "k", "cancelled");
    queue(admin, "k", "superseded", "nobody listens");
    release(admin, "k", "superseded");
    for conn in &mut others {
        conn.recv();
    }
    admin.cmd(&args!["CLIENT", "KILL", "ID", killed.id()]);
    drop(closed);
    wait_until_waiting(admin, "k", &["granted", "undelivered"]);
    release(admin, "k", "holder");
    granted.recv().as_token();
    transaction(admin, &[&args!["FLOCK.RELEASE", "k", "granted"], &args!["CLIENT", "KILL", "ID", undelivered.id()]]);
    wait_until_free(admin, "k");
}

/// Waits until the server has let go of the round's connections.
#[track_caller]
fn settle(server: &Server, admin: &mut Conn) {
    wait_until("only our connection is left", ANSWER_WITHIN, || {
        let clients = Info::ask(admin, "clients");
        clients.number("connected_clients") == 1 && clients.number("blocked_clients") == 0
    });
    let flock = server.info("flock");
    assert_eq!(flock.number("flock_waiters"), 0);
    assert_eq!(flock.number("flock_blocked_clients"), 0);
}
