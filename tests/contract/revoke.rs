//! FLOCK.REVOKE: an administrator ends holds that are not its own.

use flock_tests::args;
use flock_tests::on_shared_servers;
use flock_tests::reply::Reply;
use flock_tests::resp::Protocol;
use flock_tests::server::{Server, unique_key};
use flock_tests::subscriber::Subscriber;

use crate::lock_view::{holders, waiters, waiting};

on_shared_servers![
    revocation_ends_the_hold,
    revocation_ends_every_reader,
    revocation_ends_a_re_entered_hold,
    revocation_of_one_owner_keeps_the_others,
    revocation_of_a_stranger_is_zero,
    revocation_of_a_free_lock_is_zero,
    revocation_deletes_the_key,
    revocation_hands_over_to_the_waiter,
    revocation_does_not_end_waits,
    revocation_of_a_waiter_is_zero,
    revocation_tells_the_holder,
    revoked_owner_may_acquire_again,
    wrong_type_is_refused,
];

fn revocation_ends_the_hold(server: &Server, protocol: Protocol) {
    // The token must be stale at once: a revoked holder that still writes is why fences exist.
    let key = unique_key("revoked");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.REVOKE", key]), Reply::Int(1));
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(0));
}

fn revocation_ends_every_reader(server: &Server, protocol: Protocol) {
    // Without OWNER the lock is free afterwards; the answer says how many holds that cost.
    let key = unique_key("readers");
    let mut conn = server.connect(protocol);
    for owner in ["alice", "bob", "carol"] {
        conn.cmd(&args!["FLOCK.ACQUIRE", key, owner, 60_000, "SHARED"]).as_token();
    }
    assert_eq!(conn.cmd(&args!["FLOCK.REVOKE", key]), Reply::Int(3));
    assert_eq!(holders(&mut conn, &key), [""; 0]);
}

fn revocation_ends_a_re_entered_hold(server: &Server, protocol: Protocol) {
    // All ids at once, one hold: who revokes does not know them.
    let key = unique_key("ids");
    let mut conn = server.connect(protocol);
    for id in ["one", "two"] {
        conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", id]).as_token();
    }
    assert_eq!(conn.cmd(&args!["FLOCK.REVOKE", key]), Reply::Int(1));
    assert_eq!(holders(&mut conn, &key), [""; 0]);
}

fn revocation_of_one_owner_keeps_the_others(server: &Server, protocol: Protocol) {
    // OWNER narrows: the other readers go on undisturbed.
    let key = unique_key("one of three");
    let mut conn = server.connect(protocol);
    for owner in ["alice", "bob", "carol"] {
        conn.cmd(&args!["FLOCK.ACQUIRE", key, owner, 60_000, "SHARED"]).as_token();
    }
    assert_eq!(conn.cmd(&args!["FLOCK.REVOKE", key, "OWNER", "bob"]), Reply::Int(1));
    assert_eq!(holders(&mut conn, &key), ["alice", "carol"]);
}

fn revocation_of_a_stranger_is_zero(server: &Server, protocol: Protocol) {
    // The hold may have gone to somebody else since the administrator looked: that one must not be hit.
    let key = unique_key("stranger");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.REVOKE", key, "OWNER", "bob"]), Reply::Int(0));
    assert_eq!(holders(&mut conn, &key), ["alice"]);
}

fn revocation_of_a_free_lock_is_zero(server: &Server, protocol: Protocol) {
    // Nothing to end is no error, and makes no key.
    let key = unique_key("free");
    let mut conn = server.connect(protocol);
    assert_eq!(conn.cmd(&args!["FLOCK.REVOKE", key]), Reply::Int(0));
    assert_eq!(conn.cmd(&args!["EXISTS", key]), Reply::Int(0));
}

fn revocation_deletes_the_key(server: &Server, protocol: Protocol) {
    // A key exists if and only if the lock is held.
    let key = unique_key("deleted");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    conn.cmd(&args!["FLOCK.REVOKE", key]);
    assert_eq!(conn.cmd(&args!["EXISTS", key]), Reply::Int(0));
}

fn revocation_hands_over_to_the_waiter(server: &Server, protocol: Protocol) {
    // The same step: a try right behind the revocation must not find the lock free while somebody waits.
    let key = unique_key("handoff");
    let mut conn = server.connect(protocol);
    let first = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let mut waiter = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "bob", 60_000, "BLOCK", 0]);
    conn.send(&args!["FLOCK.REVOKE", key]);
    conn.send(&args!["FLOCK.ACQUIRE", key, "thief", 60_000]);
    assert_eq!(conn.recv(), Reply::Int(1));
    assert_eq!(conn.recv(), Reply::Nil);
    assert!(waiter.recv().as_token() > first);
}

fn revocation_does_not_end_waits(server: &Server, protocol: Protocol) {
    // It ends holds: those who wait behind the next holder keep their places.
    let key = unique_key("queue");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let mut next = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "bob", 60_000, "BLOCK", 0]);
    let _last = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "carol", 60_000, "BLOCK", 0]);
    conn.cmd(&args!["FLOCK.REVOKE", key]);
    next.recv().as_token();
    assert_eq!(holders(&mut conn, &key), ["bob"]);
    assert_eq!(waiters(&mut conn, &key), ["carol"]);
}

fn revocation_of_a_waiter_is_zero(server: &Server, protocol: Protocol) {
    // A queued owner holds nothing; RELEASE is what cancels a request.
    let key = unique_key("waiter");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let _waiter = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "bob", 60_000, "BLOCK", 0]);
    assert_eq!(conn.cmd(&args!["FLOCK.REVOKE", key, "OWNER", "bob"]), Reply::Int(0));
    assert_eq!(waiters(&mut conn, &key), ["bob"]);
}

fn revocation_tells_the_holder(server: &Server, protocol: Protocol) {
    // A holder that gave a channel must not have to find out by a failed write.
    let key = unique_key("told");
    let channel = unique_key("channel");
    let mut ear = Subscriber::new(server.connect(protocol), "SUBSCRIBE", &[&channel]);
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "CHANNEL", channel]).as_token();
    conn.cmd(&args!["FLOCK.REVOKE", key]);
    let expected = format!("lost revoked {token} {} {key} alice", key.len());
    assert_eq!(ear.message().payload, expected.as_bytes());
}

fn revoked_owner_may_acquire_again(server: &Server, protocol: Protocol) {
    // Revoking ends a hold, it bans nobody; and the new hold has a new token.
    let key = unique_key("again");
    let mut conn = server.connect(protocol);
    let first = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    conn.cmd(&args!["FLOCK.REVOKE", key, "OWNER", "alice"]);
    let second = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    assert!(second > first, "{first} {second}");
}

fn wrong_type_is_refused(server: &Server, protocol: Protocol) {
    // An administrator's typing error must not delete somebody's data.
    let key = unique_key("string");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["SET", key, "v"]);
    assert_eq!(conn.cmd(&args!["FLOCK.REVOKE", key]).error_code(), Some("WRONGTYPE"));
    assert_eq!(conn.cmd(&args!["GET", key]), Reply::bulk("v"));
}
