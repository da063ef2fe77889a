//! FLOCK.ACQUIRE: what is granted, what is not, and that a retry is safe.

use std::time::Duration;

use flock_tests::args;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Protocol};
use flock_tests::server::{Builder, Server, unique_key};
use flock_tests::wait::{let_pass, wait_for, wait_until};
use flock_tests::{on_own_servers, on_shared_servers};

use crate::lock_view::{holder, holders, left_ms, waiters, waiting};

on_shared_servers![
    free_lock_is_granted_with_a_token,
    grant_makes_the_key,
    held_lock_is_refused_with_nil,
    refused_try_changes_nothing,
    next_grant_has_a_higher_token,
    grant_of_another_lock_has_another_token,
    token_has_at_most_fourteen_digits,
    owners_that_differ_in_one_byte_are_two,
    keys_in_two_databases_are_two_locks,
    options_come_in_any_case_and_order,
    option_word_is_a_value_where_a_value_stands,
    lock_is_free_after_the_lease,
    shortest_lease_is_accepted,
    longest_lease_is_accepted,
    longest_owner_is_accepted,
    repeated_request_gets_the_same_token,
    repeated_request_on_another_connection_gets_the_same_token,
    repeated_request_is_still_one_hold,
    repeated_request_that_may_wait_does_not_wait_for_itself,
    repeated_request_extends_the_lease,
    repeated_request_never_shortens_the_lease,
    repeated_request_after_the_lease_is_a_new_grant,
    repeated_request_keeps_the_label_if_it_gives_none,
    repeated_request_replaces_the_label,
    new_is_refused_while_held_by_the_same_owner,
    new_on_a_free_lock_is_granted,
    new_by_another_owner_is_a_plain_try,
    shared_request_of_an_exclusive_holder_is_satisfied,
    label_is_shown,
    plain_try_does_not_overtake_a_waiter,
    lease_counts_from_the_grant,
    waiter_is_granted_at_the_end_of_the_lease,
];

on_own_servers![overdue_lease_is_ended_by_the_next_request, refusal_for_lack_of_replicas_changes_nothing,];

fn free_lock_is_granted_with_a_token(server: &Server, protocol: Protocol) {
    // A token of 0, a string instead of a number, or a status would be useless as a fence.
    let key = unique_key("free");
    let mut conn = server.connect(protocol);
    let reply = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]);
    assert!(matches!(reply, Reply::Int(1..)), "{reply}");
}

fn grant_makes_the_key(server: &Server, protocol: Protocol) {
    // A key exists if and only if the lock is held: a grant that leaves no key would not be saved or replicated.
    let key = unique_key("key");
    let mut conn = server.connect(protocol);
    assert_eq!(conn.cmd(&args!["EXISTS", key]), Reply::Int(0));
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    assert_eq!(conn.cmd(&args!["EXISTS", key]), Reply::Int(1));
}

fn held_lock_is_refused_with_nil(server: &Server, protocol: Protocol) {
    // Two owners at once: the one thing a lock is there to prevent.
    let key = unique_key("held");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 5000]), Reply::Nil);
}

fn refused_try_changes_nothing(server: &Server, protocol: Protocol) {
    // A try that touched the hold would let anybody prolong or cut another's lease.
    let key = unique_key("untouched");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 60_000]), Reply::Nil);
    assert_eq!(holders(&mut conn, &key), ["alice"]);
    assert_eq!(waiters(&mut conn, &key), [""; 0]);
    let hold = holder(&mut conn, &key, "alice");
    assert_eq!(hold.field("token").as_token(), token);
    assert!(hold.field("left_ms").as_int() <= 5000, "{hold}");
}

fn next_grant_has_a_higher_token(server: &Server, protocol: Protocol) {
    // A token that repeats or falls lets a storage accept the writes of an earlier holder.
    let key = unique_key("next");
    let mut conn = server.connect(protocol);
    let first = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    let second = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    assert!(second > first, "{first} {second}");
}

fn grant_of_another_lock_has_another_token(server: &Server, protocol: Protocol) {
    // One counter per server: tokens rise across locks too, so no two grants share one.
    let (one, other) = (unique_key("one"), unique_key("other"));
    let mut conn = server.connect(protocol);
    let first = conn.cmd(&args!["FLOCK.ACQUIRE", one, "alice", 5000]).as_token();
    let second = conn.cmd(&args!["FLOCK.ACQUIRE", other, "alice", 5000]).as_token();
    assert!(second > first, "{first} {second}");
}

fn token_has_at_most_fourteen_digits(server: &Server, protocol: Protocol) {
    // Lua's tostring and cjson cut longer numbers; JavaScript loses digits beyond 2^53.
    let key = unique_key("digits");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    assert!(token <= 99_999_999_999_999, "{token}");
}

fn owners_that_differ_in_one_byte_are_two(server: &Server, protocol: Protocol) {
    // Owners are compared byte for byte: trimming or folding case would merge two acquisitions.
    let key = unique_key("bytes");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    for other in ["Alice", "alice ", "alice\0", " alice", "alic"] {
        assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, other, 5000]), Reply::Nil, "{other:?}");
    }
}

fn keys_in_two_databases_are_two_locks(server: &Server, protocol: Protocol) {
    // A module that keys its tables by name alone would mix up databases.
    let key = unique_key("database");
    let mut conn = server.connect(protocol);
    let first = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    conn.cmd(&args!["SELECT", 7]);
    let second = conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 5000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, first]), Reply::Int(0));
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, second]), Reply::Int(1));
}

fn options_come_in_any_case_and_order(server: &Server, protocol: Protocol) {
    // A parser that wants options in the order of the documentation breaks clients that build requests from maps.
    let mut conn = server.connect(protocol);
    for options in [
        ["SHARED", "LIMIT", "2", "LABEL", "x", "NEW"],
        ["label", "x", "new", "shared", "limit", "2"],
        ["New", "lImIt", "2", "LabeL", "x", "Shared"],
    ] {
        let key = unique_key("order");
        let mut request = args!["FLOCK.ACQUIRE", key, "alice", 5000].to_vec();
        request.extend(options.map(|option| option.as_bytes().to_vec()));
        conn.cmd(&request).as_token();
        let info = conn.cmd(&args!["FLOCK.INFO", key]);
        assert_eq!(info.field("mode").as_str(), "shared", "{options:?}");
        assert_eq!(holder(&mut conn, &key, "alice").field("label").as_str(), "x", "{options:?}");
    }
}

fn option_word_is_a_value_where_a_value_stands(server: &Server, protocol: Protocol) {
    // A label SHARED that made the hold shared would let strangers change the meaning of a request.
    let key = unique_key("value");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "NEW", 5000, "LABEL", "SHARED"]).as_token();
    let info = conn.cmd(&args!["FLOCK.INFO", key]);
    assert_eq!(info.field("mode").as_str(), "exclusive");
    assert_eq!(holder(&mut conn, &key, "NEW").field("label").as_str(), "SHARED");
}

fn lock_is_free_after_the_lease(server: &Server, protocol: Protocol) {
    // A lease that nobody ends keeps the lock of a dead holder for ever. Nobody sends a command about the key meanwhile.
    let key = unique_key("lease");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 30]).as_token();
    wait_until("the key is gone", ANSWER_WITHIN, || conn.cmd(&args!["EXISTS", key]) == Reply::Int(0));
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 5000]).as_token();
}

fn shortest_lease_is_accepted(server: &Server, protocol: Protocol) {
    // The lower end of the range, 1 ms: rounding it to 0 would be a hold that never was, or one without an end.
    let key = unique_key("shortest");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 1]).as_token();
    wait_for("bob is granted", ANSWER_WITHIN, || {
        let reply = conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 5000]);
        (!reply.is_nil()).then(|| reply.as_token())
    });
}

fn longest_lease_is_accepted(server: &Server, protocol: Protocol) {
    // The upper end of the range, 24 h: an overflow would end the lease at once.
    let key = unique_key("longest");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 86_400_000]).as_token();
    let left = left_ms(&mut conn, &key, "alice");
    assert!((86_300_000..=86_400_000).contains(&left), "{left}");
}

fn longest_owner_is_accepted(server: &Server, protocol: Protocol) {
    // The documented bound is 256 bytes: an owner cut short would be another owner.
    let key = unique_key("owner");
    let mut conn = server.connect(protocol);
    let (longest, other) = ("x".repeat(256), "x".repeat(255));
    conn.cmd(&args!["FLOCK.ACQUIRE", key, longest, 5000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, other]), Reply::Int(0));
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, longest]), Reply::Int(1));
}

fn repeated_request_gets_the_same_token(server: &Server, protocol: Protocol) {
    // Report B1 (redisson #7367): a request sent again after a lost reply must not lock twice, and must not be refused.
    let key = unique_key("again");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token(), token);
}

fn repeated_request_on_another_connection_gets_the_same_token(server: &Server, protocol: Protocol) {
    // Report B1: the retry comes over a new connection, because the old one is what failed. The owner names the request.
    let key = unique_key("reconnected");
    let mut lost = server.connect(protocol);
    let token = lost.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    lost.abort();
    let mut conn = server.connect(protocol);
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token(), token);
}

fn repeated_request_is_still_one_hold(server: &Server, protocol: Protocol) {
    // Report B1: a count of two would need two releases, and the lock would never be free. Nothing is counted.
    let key = unique_key("count");
    let mut conn = server.connect(protocol);
    for _ in 0..3 {
        conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    }
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]), Reply::Int(1));
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 5000]).as_token();
}

fn repeated_request_that_may_wait_does_not_wait_for_itself(server: &Server, protocol: Protocol) {
    // The lock is taken, by the very request that asks again, and others wait behind it: it has the answer already.
    let key = unique_key("itself");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "BLOCK", 0]).as_token();
    let _waiter = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "bob", 60_000, "BLOCK", 0]);
    for options in [["BLOCK", "0"], ["BLOCK", "60000"]] {
        let mut request = args!["FLOCK.ACQUIRE", key, "alice", 60_000].to_vec();
        request.extend(options.map(|option| option.as_bytes().to_vec()));
        assert_eq!(conn.cmd(&request).as_token(), token);
    }
}

fn repeated_request_extends_the_lease(server: &Server, protocol: Protocol) {
    // The retry may come late in the lease: the holder must be able to rely on the lease it asked for.
    let key = unique_key("extended");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 30_000]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000]).as_token();
    let left = left_ms(&mut conn, &key, "alice");
    assert!((500_000..=600_000).contains(&left), "{left}");
}

fn repeated_request_never_shortens_the_lease(server: &Server, protocol: Protocol) {
    // A late retry with a short lease would take away time that a renewal has given.
    let key = unique_key("kept");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 1000]).as_token();
    let left = left_ms(&mut conn, &key, "alice");
    assert!((500_000..=600_000).contains(&left), "{left}");
}

fn repeated_request_after_the_lease_is_a_new_grant(server: &Server, protocol: Protocol) {
    // The old token may have been superseded in between: to hand it out again would break the fence.
    let key = unique_key("late");
    let mut conn = server.connect(protocol);
    let first = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 1]).as_token();
    wait_until("the lease is over", ANSWER_WITHIN, || conn.cmd(&args!["FLOCK.CHECK", key, first]) == Reply::Int(0));
    let second = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    assert!(second > first, "{first} {second}");
}

fn repeated_request_keeps_the_label_if_it_gives_none(server: &Server, protocol: Protocol) {
    // A retry must not lose what the first request said.
    let key = unique_key("label");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000, "LABEL", "nightly"]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    assert_eq!(holder(&mut conn, &key, "alice").field("label").as_str(), "nightly");
}

fn repeated_request_replaces_the_label(server: &Server, protocol: Protocol) {
    // The newest label is the true one; it changes neither token nor lease.
    let key = unique_key("relabelled");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000, "LABEL", "old"]).as_token();
    let again = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 1000, "LABEL", "new"]).as_token();
    assert_eq!(again, token);
    let hold = holder(&mut conn, &key, "alice");
    assert_eq!(hold.field("label").as_str(), "new");
    assert!(hold.field("left_ms").as_int() > 500_000, "{hold}");
}

fn new_is_refused_while_held_by_the_same_owner(server: &Server, protocol: Protocol) {
    // Report B3 (redisson #4178): who never repeats requests wants to hear of a leftover hold, not to share it.
    let key = unique_key("new");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    let reply = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "NEW"]);
    assert_eq!(reply.error_code(), Some("HELD"));
    let hold = holder(&mut conn, &key, "alice");
    assert_eq!(hold.field("token").as_token(), token);
    assert!(hold.field("left_ms").as_int() <= 5000, "a refused request must not extend: {hold}");
}

fn new_on_a_free_lock_is_granted(server: &Server, protocol: Protocol) {
    // NEW refuses only an owner that holds the lock; after its release it holds nothing.
    let key = unique_key("fresh");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000, "NEW"]).as_token();
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000, "NEW"]).as_token();
}

fn new_by_another_owner_is_a_plain_try(server: &Server, protocol: Protocol) {
    // HELD means "by you": a lock that another holds is nil, as without NEW.
    let key = unique_key("others");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 5000, "NEW"]), Reply::Nil);
}

fn shared_request_of_an_exclusive_holder_is_satisfied(server: &Server, protocol: Protocol) {
    // Exclusive is more than shared: the same token comes back, and the mode must not be weakened in passing.
    let key = unique_key("weaker");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    let again = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000, "SHARED"]).as_token();
    assert_eq!(again, token);
    assert_eq!(conn.cmd(&args!["FLOCK.INFO", key]).field("mode").as_str(), "exclusive");
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 5000, "SHARED"]), Reply::Nil);
}

fn label_is_shown(server: &Server, protocol: Protocol) {
    // The longest label, and bytes that are no text: who looks for the holder at night reads what was written.
    let key = unique_key("shown");
    let mut conn = server.connect(protocol);
    let label = [&b"\0\r\n\xff"[..], &[b'x'; 252]].concat();
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000, "LABEL", label]).as_token();
    assert_eq!(holder(&mut conn, &key, "alice").field("label"), &Reply::Bulk(label));
}

fn plain_try_does_not_overtake_a_waiter(server: &Server, protocol: Protocol) {
    // A try that slips in between two holders starves those who wait. The waiting writer keeps the reader's lock from others.
    let key = unique_key("overtake");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "reader", 5000, "SHARED"]).as_token();
    let mut writer = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "writer", 5000, "BLOCK", 0]);
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "other", 5000, "SHARED"]), Reply::Nil);
    conn.cmd(&args!["FLOCK.RELEASE", key, "reader"]);
    writer.recv().as_token();
}

fn lease_counts_from_the_grant(server: &Server, protocol: Protocol) {
    // Report B13 (node-redlock #296): time spent waiting must not be deducted from the lease. INFO looks in the same instant.
    let key = unique_key("wait");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let mut waiter = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "bob", 20, "BLOCK", 0]);
    let_pass(Duration::from_millis(60)); // three times the lease
    conn.cmd(&["MULTI"]);
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    conn.cmd(&args!["FLOCK.INFO", key]);
    let replies = conn.cmd(&["EXEC"]);
    let left = replies.as_array()[1].field("holders").as_array()[0].field("left_ms").as_int();
    assert!((15..=20).contains(&left), "{left}");
    waiter.recv().as_token();
}

fn waiter_is_granted_at_the_end_of_the_lease(server: &Server, protocol: Protocol) {
    // A holder that dies releases nothing: the server must hand over by itself, with no other command to wake it.
    let key = unique_key("dead");
    let mut conn = server.connect(protocol);
    let first = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let mut waiter = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "bob", 5000, "BLOCK", 0]);
    conn.cmd(&args!["FLOCK.RENEW", key, "alice", 20]);
    let second = waiter.recv().as_token();
    assert!(second > first, "{first} {second}");
}

fn overdue_lease_is_ended_by_the_next_request(builder: Builder) {
    // In a transaction that takes longer than the lease nothing else can end it: the request itself performs what is due first.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    conn.cmd(&["MULTI"]);
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 10]);
    conn.cmd(&["DEBUG", "SLEEP", "0.02"]);
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "bob", 60_000]);
    let replies = conn.cmd(&["EXEC"]);
    let [first, _, second] = replies.as_array() else { panic!("{replies}") };
    assert!(second.as_token() > first.as_token(), "{replies}");
    assert_eq!(holders(&mut conn, "k"), ["bob"]);
}

fn refusal_for_lack_of_replicas_changes_nothing(builder: Builder) {
    // Report B5 (redisson #4822): each failed attempt for lack of replicas counted as one more hold.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 5000]).as_token();
    conn.cmd(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
    for _ in 0..8 {
        let reply = conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 60_000, "REENTRANT", "id"]);
        assert_eq!(reply.error_code(), Some("NOREPLICAS"));
    }
    let hold = holder(&mut conn, "k", "alice");
    assert_eq!(hold.field("token").as_token(), token);
    assert_eq!(hold.field("ids"), &Reply::Array(vec![]));
    assert!(hold.field("left_ms").as_int() <= 5000, "{hold}");
}
