//! FLOCK.INFO: what it shows of a lock, and that looking changes nothing.

use std::time::Duration;

use flock_tests::args;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Protocol};
use flock_tests::server::{Builder, Server, unique_key};
use flock_tests::topology::Replicated;
use flock_tests::wait::{let_pass, wait_until};
use flock_tests::{on_own_servers, on_shared_servers};

use crate::lock_view::{holder, holders, waiters, waiting};

on_shared_servers![
    free_lock_is_nil,
    reply_is_a_map_or_its_flat_list,
    exclusive_hold_is_shown,
    shared_holds_are_shown_in_the_order_of_their_grants,
    ids_are_shown,
    lease_left_and_time_held_are_shown,
    waiters_are_shown_in_their_order,
    waiting_time_is_shown,
    limit_bounds_the_waiters_shown,
    limit_is_sixty_four_unless_given,
    limit_zero_shows_counts_only_of_waiters,
    every_holder_is_shown_whatever_the_limit,
    looking_does_not_prolong_the_lease,
    wrong_type_is_refused,
];

on_own_servers![replica_shows_the_hold, replica_shows_no_waiters, expired_hold_is_shown_as_expired_in_a_pause,];

fn free_lock_is_nil(server: &Server, protocol: Protocol) {
    // An empty map would have to be told from a held lock by its fields.
    let key = unique_key("free");
    let mut conn = server.connect(protocol);
    assert_eq!(conn.cmd(&args!["FLOCK.INFO", key]), Reply::Nil);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    assert_eq!(conn.cmd(&args!["FLOCK.INFO", key]), Reply::Nil);
}

fn reply_is_a_map_or_its_flat_list(server: &Server, protocol: Protocol) {
    // Clients of RESP3 are promised maps, clients of RESP2 flat lists; inside the lists of holders and waiters too.
    let key = unique_key("map");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let _waiter = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "bob", 60_000, "BLOCK", 0]);
    let info = conn.cmd(&args!["FLOCK.INFO", key]);
    let maps = [&info, &info.field("holders").as_array()[0], &info.field("waiters").as_array()[0]];
    for map in maps {
        match protocol {
            Protocol::Resp2 => assert!(matches!(map, Reply::Array(_)), "{map}"),
            Protocol::Resp3 => assert!(matches!(map, Reply::Map(_)), "{map}"),
        }
    }
}

fn exclusive_hold_is_shown(server: &Server, protocol: Protocol) {
    // Every field of a plain hold, with its value: who reads it by name must find it under this name.
    let key = unique_key("exclusive");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "LABEL", "why"]).as_token();
    let info = conn.cmd(&args!["FLOCK.INFO", key]);
    assert_eq!(info.field("mode").as_str(), "exclusive");
    assert_eq!(info.field("holder_count"), &Reply::Int(1));
    assert_eq!(info.field("waiter_count"), &Reply::Int(0));
    assert_eq!(info.field("waiters"), &Reply::Array(vec![]));
    assert_eq!(info.field("holders").as_array().len(), 1);
    let hold = holder(&mut conn, &key, "alice");
    assert_eq!(hold.field("token").as_token(), token);
    assert_eq!(hold.field("state").as_str(), "held");
    assert_eq!(hold.field("lease_ms"), &Reply::Int(60_000));
    assert_eq!(hold.field("label").as_str(), "why");
    assert_eq!(hold.field("ids"), &Reply::Array(vec![]));
}

fn shared_holds_are_shown_in_the_order_of_their_grants(server: &Server, protocol: Protocol) {
    // One entry per holder, each with its own token; the counts are right.
    let key = unique_key("shared");
    let mut conn = server.connect(protocol);
    let tokens = ["zoe", "alice", "mike"]
        .map(|owner| conn.cmd(&args!["FLOCK.ACQUIRE", key, owner, 60_000, "SHARED"]).as_token());
    let info = conn.cmd(&args!["FLOCK.INFO", key]);
    assert_eq!(info.field("mode").as_str(), "shared");
    assert_eq!(info.field("holder_count"), &Reply::Int(3));
    assert_eq!(holders(&mut conn, &key), ["zoe", "alice", "mike"]);
    for (hold, token) in info.field("holders").as_array().iter().zip(tokens) {
        assert_eq!(hold.field("token").as_token(), token);
    }
}

fn ids_are_shown(server: &Server, protocol: Protocol) {
    // Who wonders why a lock is still held needs to see which ids are left.
    let key = unique_key("ids");
    let mut conn = server.connect(protocol);
    for id in ["a", "b"] {
        conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", id]).as_token();
    }
    let ids = holder(&mut conn, &key, "alice").field("ids").clone();
    assert_eq!(ids, Reply::Array(vec![Reply::bulk("a"), Reply::bulk("b")]));
}

fn lease_left_and_time_held_are_shown(server: &Server, protocol: Protocol) {
    // Swapped, in seconds, or counted from the wrong end: the two must add up to the lease, and time must move both.
    let key = unique_key("times");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let_pass(Duration::from_millis(20));
    let hold = holder(&mut conn, &key, "alice");
    let (left, held) = (hold.field("left_ms").as_int(), hold.field("held_ms").as_int());
    assert!(held >= 20, "{hold}");
    assert!((59_999..=60_001).contains(&(left + held)), "{hold}"); // each is rounded to a millisecond
}

fn waiters_are_shown_in_their_order(server: &Server, protocol: Protocol) {
    // Owner, mode and position of each; the first is next.
    let key = unique_key("queue");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "holder", 60_000]).as_token();
    let _writer = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "w", 60_000, "BLOCK", 0]);
    let _reader = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "r", 60_000, "SHARED", "BLOCK", 0]);
    let info = conn.cmd(&args!["FLOCK.INFO", key]);
    assert_eq!(info.field("waiter_count"), &Reply::Int(2));
    let [writer, reader] = info.field("waiters").as_array() else { panic!("{info}") };
    for (waiter, owner, mode, position) in [(writer, "w", "exclusive", 1), (reader, "r", "shared", 2)] {
        assert_eq!(waiter.field("owner").as_str(), owner);
        assert_eq!(waiter.field("mode").as_str(), mode);
        assert_eq!(waiter.field("position"), &Reply::Int(position));
    }
}

fn waiting_time_is_shown(server: &Server, protocol: Protocol) {
    // How long, not until when.
    let key = unique_key("since");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let _waiter = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "bob", 60_000, "BLOCK", 0]);
    let_pass(Duration::from_millis(20));
    let info = conn.cmd(&args!["FLOCK.INFO", key]);
    let waiting_ms = info.field("waiters").as_array()[0].field("waiting_ms").as_int();
    assert!((20..10_000).contains(&waiting_ms), "{waiting_ms}");
}

fn limit_bounds_the_waiters_shown(server: &Server, protocol: Protocol) {
    // The first n, and the count of all.
    let key = unique_key("first two");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "holder", 60_000]).as_token();
    let _waiting =
        ["a", "b", "c"].map(|owner| waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, owner, 60_000, "BLOCK", 0]));
    let info = conn.cmd(&args!["FLOCK.INFO", key, "LIMIT", 2]);
    let shown = info.field("waiters").as_array().iter().map(|waiter| waiter.field("owner").as_str());
    assert_eq!(shown.collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(info.field("waiter_count"), &Reply::Int(3));
}

fn limit_is_sixty_four_unless_given(server: &Server, protocol: Protocol) {
    // A reply that grows with the queue would block the server for whoever looks at a busy lock.
    let key = unique_key("many");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "holder", 60_000]).as_token();
    let mut queue = server.connect(protocol);
    for number in 0..65 {
        queue.cmd(&args!["FLOCK.ACQUIRE", key, format!("w{number}"), 60_000, "QUEUE", 60_000, "CHANNEL", key]);
    }
    let info = conn.cmd(&args!["FLOCK.INFO", key]);
    assert_eq!(info.field("waiters").as_array().len(), 64);
    assert_eq!(info.field("waiter_count"), &Reply::Int(65));
    let info = conn.cmd(&args!["FLOCK.INFO", key, "LIMIT", 65]);
    assert_eq!(info.field("waiters").as_array().len(), 65);
}

fn limit_zero_shows_counts_only_of_waiters(server: &Server, protocol: Protocol) {
    // The lower end of the range: no list, the count all the same.
    let key = unique_key("none");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let _waiter = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "bob", 60_000, "BLOCK", 0]);
    let info = conn.cmd(&args!["FLOCK.INFO", key, "LIMIT", 0]);
    assert_eq!(info.field("waiters"), &Reply::Array(vec![]));
    assert_eq!(info.field("waiter_count"), &Reply::Int(1));
}

fn every_holder_is_shown_whatever_the_limit(server: &Server, protocol: Protocol) {
    // LIMIT is about waiters: a holder that INFO leaves out is one that an operator cannot find.
    let key = unique_key("readers");
    let mut conn = server.connect(protocol);
    for owner in ["a", "b", "c"] {
        conn.cmd(&args!["FLOCK.ACQUIRE", key, owner, 60_000, "SHARED"]).as_token();
    }
    let info = conn.cmd(&args!["FLOCK.INFO", key, "LIMIT", 1]);
    assert_eq!(info.field("holders").as_array().len(), 3, "{info}");
}

fn looking_does_not_prolong_the_lease(server: &Server, protocol: Protocol) {
    // A dashboard that looks every second must not keep dead holders alive.
    let key = unique_key("watched");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 50]).as_token();
    wait_until("the lease is over though it is looked at", ANSWER_WITHIN, || {
        conn.cmd(&args!["FLOCK.INFO", key]).is_nil()
    });
}

fn wrong_type_is_refused(server: &Server, protocol: Protocol) {
    // Nil would say that the lock is free, and the next ACQUIRE would fail all the same.
    let key = unique_key("string");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["SET", key, "v"]);
    assert_eq!(conn.cmd(&args!["FLOCK.INFO", key]).error_code(), Some("WRONGTYPE"));
}

fn replica_shows_the_hold(builder: Builder) {
    // INFO is a read: monitoring asks replicas. What they show is what the primary has decided.
    let servers = Replicated::start(&builder, 1);
    let mut primary = servers.primary.connect(Protocol::Resp3);
    let token =
        primary.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 60_000, "REENTRANT", "id", "LABEL", "why"]).as_token();
    servers.wait_in_step();
    let mut replica = servers.replicas[0].connect(Protocol::Resp3);
    let hold = holder(&mut replica, "k", "alice");
    assert_eq!(hold.field("token").as_token(), token);
    assert_eq!(hold.field("label").as_str(), "why");
    assert_eq!(hold.field("ids"), &Reply::Array(vec![Reply::bulk("id")]));
    let left = hold.field("left_ms").as_int();
    assert!((30_000..=60_000).contains(&left), "{left}");
}

fn replica_shows_no_waiters(builder: Builder) {
    // The queue lives on the primary only: a replica that showed one would show a copy that nobody keeps true.
    let servers = Replicated::start(&builder, 1);
    let mut primary = servers.primary.connect(Protocol::Resp3);
    primary.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 60_000]).as_token();
    let request = args!["FLOCK.ACQUIRE", "k", "bob", 60_000, "BLOCK", 0];
    let _waiter = waiting(&servers.primary, Protocol::Resp3, &request);
    servers.wait_in_step();
    assert_eq!(waiters(&mut primary, "k"), ["bob"]);
    let mut replica = servers.replicas[0].connect(Protocol::Resp3);
    assert_eq!(holders(&mut replica, "k"), ["alice"]);
    assert_eq!(waiters(&mut replica, "k"), [""; 0]);
}

fn expired_hold_is_shown_as_expired_in_a_pause(builder: Builder) {
    // In a pause nothing may be ended, since that would have to be replicated; INFO judges by the deadline all the same.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp3);
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 30]).as_token();
    conn.cmd(&args!["CLIENT", "PAUSE", 60_000, "WRITE"]);
    wait_until("the hold shows as expired", ANSWER_WITHIN, || {
        holder(&mut conn, "k", "alice").field("state").as_str() == "expired"
    });
    assert_eq!(holder(&mut conn, "k", "alice").field("left_ms"), &Reply::Int(0));
    conn.cmd(&["CLIENT", "UNPAUSE"]);
    wait_until("the hold has ended", ANSWER_WITHIN, || conn.cmd(&["FLOCK.INFO", "k"]).is_nil());
}
