//! FLOCK.CHECK: whether a token is a current holder's. (In transactions and scripts: `scripting.rs`; on replicas: `bad_input.rs`.)

use flock_tests::args;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Protocol};
use flock_tests::server::{Builder, Server, unique_key};
use flock_tests::wait::wait_until;
use flock_tests::{on_own_servers, on_shared_servers};

use crate::lock_view::waiting;

on_shared_servers![
    token_of_the_holder_is_current,
    other_tokens_are_not_current,
    token_of_another_lock_is_not_current,
    token_is_not_current_after_the_release,
    token_is_not_current_after_the_lease,
    token_is_not_current_after_the_key_was_deleted,
    token_is_not_current_after_the_next_grant,
    token_of_a_waiter_to_be_is_not_current,
    token_of_each_reader_is_current,
    token_stays_current_when_renewed,
    check_of_a_free_lock_makes_no_key,
    check_does_not_prolong_the_lease,
    wrong_type_is_refused,
];

on_own_servers![overdue_token_is_not_current];

fn token_of_the_holder_is_current(server: &Server, protocol: Protocol) {
    // A storage that asks must be told yes, or the holder cannot write.
    let key = unique_key("current");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(1));
}

fn other_tokens_are_not_current(server: &Server, protocol: Protocol) {
    // Exactly this token: "at least" or "at most" would let made-up tokens pass.
    let key = unique_key("exact");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    for other in [1, token - 1, token + 1, 9_007_199_254_740_991] {
        assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, other]), Reply::Int(0), "{other}");
    }
}

fn token_of_another_lock_is_not_current(server: &Server, protocol: Protocol) {
    // Tokens are server-wide: the holder of one lock must not pass for the holder of another.
    let (key, other) = (unique_key("this"), unique_key("other"));
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", other, "alice", 5000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(0));
}

fn token_is_not_current_after_the_release(server: &Server, protocol: Protocol) {
    // A write that arrives after the release is stale, though nobody else has the lock yet.
    let key = unique_key("released");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(0));
}

fn token_is_not_current_after_the_lease(server: &Server, protocol: Protocol) {
    // The paused holder that wakes up late: the very case that fencing is for.
    let key = unique_key("over");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 20]).as_token();
    wait_until("the token is stale", ANSWER_WITHIN, || conn.cmd(&args!["FLOCK.CHECK", key, token]) == Reply::Int(0));
}

fn token_is_not_current_after_the_key_was_deleted(server: &Server, protocol: Protocol) {
    // DEL ends the hold, whoever sent it: the key is the lock.
    let key = unique_key("deleted");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    conn.cmd(&args!["DEL", key]);
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(0));
}

fn token_is_not_current_after_the_next_grant(server: &Server, protocol: Protocol) {
    // Also if the owner is the same: a write under the earlier hold is stale.
    let key = unique_key("next");
    let mut conn = server.connect(protocol);
    let old = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    let new = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, old]), Reply::Int(0));
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, new]), Reply::Int(1));
}

fn token_of_a_waiter_to_be_is_not_current(server: &Server, protocol: Protocol) {
    // A waiter has no token before its grant, so no number is current but the holder's.
    let key = unique_key("waiter");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    let mut waiter = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "bob", 5000, "BLOCK", 0]);
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, token + 1]), Reply::Int(0));
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    let next = waiter.recv().as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, next]), Reply::Int(1));
}

fn token_of_each_reader_is_current(server: &Server, protocol: Protocol) {
    // "A current holder", not "the latest": an earlier reader holds as well as a later one.
    let key = unique_key("readers");
    let mut conn = server.connect(protocol);
    let tokens =
        ["alice", "bob", "carol"].map(|owner| conn.cmd(&args!["FLOCK.ACQUIRE", key, owner, 5000, "SHARED"]).as_token());
    for token in tokens {
        assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(1));
    }
}

fn token_stays_current_when_renewed(server: &Server, protocol: Protocol) {
    // A renewal must move the deadline that CHECK judges by, not only the one that INFO shows. Another lock tells when the
    // first lease would have been over.
    let (key, other) = (unique_key("renewed"), unique_key("as long as the first lease"));
    let mut conn = server.connect(protocol);
    conn.cmd(&["MULTI"]);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 30]);
    conn.cmd(&args!["FLOCK.RENEW", key, "alice", 60_000]);
    conn.cmd(&args!["FLOCK.ACQUIRE", other, "alice", 30]);
    let token = conn.cmd(&["EXEC"]).as_array()[0].as_token();
    wait_until("the other lease is over", ANSWER_WITHIN, || conn.cmd(&args!["EXISTS", other]) == Reply::Int(0));
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(1));
}

fn check_of_a_free_lock_makes_no_key(server: &Server, protocol: Protocol) {
    // CHECK is flagged as a write so that it asks the primary; it writes nothing.
    let key = unique_key("free");
    let mut conn = server.connect(protocol);
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, 1]), Reply::Int(0));
    assert_eq!(conn.cmd(&args!["EXISTS", key]), Reply::Int(0));
}

fn check_does_not_prolong_the_lease(server: &Server, protocol: Protocol) {
    // A storage that asks often must not keep a dead holder's lock alive.
    let key = unique_key("asked often");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 50]).as_token();
    wait_until("the lease is over though it is asked about", ANSWER_WITHIN, || {
        conn.cmd(&args!["FLOCK.CHECK", key, token]) == Reply::Int(0)
    });
}

fn wrong_type_is_refused(server: &Server, protocol: Protocol) {
    // 0 would hide that the guard of a write looks at a key that is no lock.
    let key = unique_key("string");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["SET", key, "v"]);
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, 1]).error_code(), Some("WRONGTYPE"));
}

fn overdue_token_is_not_current(builder: Builder) {
    // CHECK judges by the deadline and changes nothing: in a transaction that takes longer than the lease the hold is still there, and
    // INFO says that it is over.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 60_000]).as_token();
    conn.cmd(&["MULTI"]);
    conn.cmd(&args!["FLOCK.RENEW", "k", "alice", 10]);
    conn.cmd(&args!["FLOCK.CHECK", "k", token]);
    conn.cmd(&["DEBUG", "SLEEP", "0.02"]);
    conn.cmd(&args!["FLOCK.CHECK", "k", token]);
    conn.cmd(&args!["FLOCK.INFO", "k"]);
    let replies = conn.cmd(&["EXEC"]);
    let [_, in_time, _, late, info] = replies.as_array() else { panic!("{replies}") };
    assert_eq!((in_time, late), (&Reply::Int(1), &Reply::Int(0)));
    assert_eq!(info.field("holders").as_array()[0].field("state").as_str(), "expired");
}
