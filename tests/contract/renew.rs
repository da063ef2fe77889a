//! FLOCK.RENEW: the lease is replaced, and what is lost stays lost.

use flock_tests::args;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Protocol};
use flock_tests::server::{Builder, Server, unique_key};
use flock_tests::wait::wait_until;
use flock_tests::{on_own_servers, on_shared_servers};

use crate::lock_view::{holder, holders, left_ms, waiters, waiting};

on_shared_servers![
    renewal_answers_one,
    renewal_replaces_the_lease,
    renewal_keeps_the_token,
    renewal_with_its_token_works,
    renewal_from_another_connection_works,
    renewal_by_another_owner_is_zero,
    renewal_with_a_wrong_token_is_zero,
    refused_renewal_changes_nothing,
    renewal_of_a_free_lock_is_zero,
    renewal_of_a_free_lock_makes_no_key,
    renewal_after_the_lease_is_zero,
    renewal_after_a_release_is_zero,
    renewal_after_a_revocation_is_zero,
    stale_renewal_stays_refused_when_the_owner_holds_again,
    shortened_lease_ends_earlier,
    renewal_out_of_range_keeps_the_lease,
    renewal_of_one_reader_leaves_the_others,
    renewal_wakes_no_waiter,
    renewal_by_a_waiter_is_zero,
    renewal_keeps_the_ids,
    wrong_type_is_refused,
];

on_own_servers![renewal_past_the_deadline_is_zero];

fn renewal_answers_one(server: &Server, protocol: Protocol) {
    // The holder must learn that it still holds: any other answer stops its keep-alive.
    let key = unique_key("one");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", key, "alice", 5000]), Reply::Int(1));
}

fn renewal_replaces_the_lease(server: &Server, protocol: Protocol) {
    // Report B7 (redis-py #629, #1014): adds or replaces? It replaces, also by a shorter one.
    let mut conn = server.connect(protocol);
    for (granted_ms, renewed_ms) in
        [(60_000, 600_000), (600_000, 60_000), (60_000, 60_000), (60_000, 86_400_000), (86_400_000, 60_000)]
    {
        let key = unique_key("replaced");
        conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", granted_ms]).as_token();
        assert_eq!(conn.cmd(&args!["FLOCK.RENEW", key, "alice", renewed_ms]), Reply::Int(1));
        let left = left_ms(&mut conn, &key, "alice");
        assert!((renewed_ms - 30_000..=renewed_ms).contains(&left), "{granted_ms} {renewed_ms} {left}");
    }
}

fn renewal_keeps_the_token(server: &Server, protocol: Protocol) {
    // The same hold goes on, and the storage knows it by its token.
    let key = unique_key("token");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    conn.cmd(&args!["FLOCK.RENEW", key, "alice", 5000]);
    assert_eq!(holder(&mut conn, &key, "alice").field("token").as_token(), token);
}

fn renewal_with_its_token_works(server: &Server, protocol: Protocol) {
    // TOKEN narrows; with the current token nothing changes.
    let key = unique_key("exact");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", key, "alice", 600_000, "TOKEN", token]), Reply::Int(1));
    assert!(left_ms(&mut conn, &key, "alice") > 60_000);
}

fn renewal_from_another_connection_works(server: &Server, protocol: Protocol) {
    // Keep-alives run on their own connection, and on a new one after a failure: only the owner counts.
    let key = unique_key("elsewhere");
    server.connect(protocol).cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    assert_eq!(server.connect(protocol).cmd(&args!["FLOCK.RENEW", key, "alice", 5000]), Reply::Int(1));
}

fn renewal_by_another_owner_is_zero(server: &Server, protocol: Protocol) {
    // Only the exact owner can renew, also if a stranger knows the token.
    let key = unique_key("stranger");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", key, "bob", 5000]), Reply::Int(0));
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", key, "bob", 5000, "TOKEN", token]), Reply::Int(0));
}

fn renewal_with_a_wrong_token_is_zero(server: &Server, protocol: Protocol) {
    // Exactly this token: older, newer and made-up ones are another hold's.
    let key = unique_key("wrong");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    for other in [1, token - 1, token + 1, 9_007_199_254_740_991] {
        let reply = conn.cmd(&args!["FLOCK.RENEW", key, "alice", 5000, "TOKEN", other]);
        assert_eq!(reply, Reply::Int(0), "{other}");
    }
}

fn refused_renewal_changes_nothing(server: &Server, protocol: Protocol) {
    // 0 and a longer lease all the same would keep the lock from others though nobody believes to hold it.
    let key = unique_key("unchanged");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    conn.cmd(&args!["FLOCK.RENEW", key, "bob", 600_000]);
    conn.cmd(&args!["FLOCK.RENEW", key, "alice", 1, "TOKEN", token + 1]);
    let left = left_ms(&mut conn, &key, "alice");
    assert!((30_000..=60_000).contains(&left), "{left}");
}

fn renewal_of_a_free_lock_is_zero(server: &Server, protocol: Protocol) {
    // A renewal never grants: it would have no new token.
    let key = unique_key("free");
    let mut conn = server.connect(protocol);
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", key, "alice", 5000]), Reply::Int(0));
    assert_eq!(holders(&mut conn, &key), [""; 0]);
}

fn renewal_of_a_free_lock_makes_no_key(server: &Server, protocol: Protocol) {
    // A key opened for writing may be left behind empty.
    let key = unique_key("nothing");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.RENEW", key, "alice", 5000, "TOKEN", 7]);
    assert_eq!(conn.cmd(&args!["EXISTS", key]), Reply::Int(0));
}

fn renewal_after_the_lease_is_zero(server: &Server, protocol: Protocol) {
    // Report C9 (RedLock.net #48): lost for good, even though nobody has taken the lock since.
    let key = unique_key("over");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 1]).as_token();
    wait_until("the lease is over", ANSWER_WITHIN, || conn.cmd(&args!["FLOCK.CHECK", key, token]) == Reply::Int(0));
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", key, "alice", 5000]), Reply::Int(0));
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", key, "alice", 5000, "TOKEN", token]), Reply::Int(0));
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 5000]).as_token();
}

fn renewal_after_a_release_is_zero(server: &Server, protocol: Protocol) {
    // Report C1 (redisson #7272): a renewal that arrives after the release would make an orphan that lives for ever.
    let key = unique_key("released");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", key, "alice", 5000, "TOKEN", token]), Reply::Int(0));
    assert_eq!(conn.cmd(&args!["EXISTS", key]), Reply::Int(0));
}

fn renewal_after_a_revocation_is_zero(server: &Server, protocol: Protocol) {
    // A holder whose keep-alive goes on must learn from it that an administrator has ended its hold.
    let key = unique_key("revoked");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    conn.cmd(&args!["FLOCK.REVOKE", key]);
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", key, "alice", 5000, "TOKEN", token]), Reply::Int(0));
}

fn stale_renewal_stays_refused_when_the_owner_holds_again(server: &Server, protocol: Protocol) {
    // Report C9: the keep-alive of an earlier hold must not prolong the later hold of the same owner.
    let key = unique_key("stale");
    let mut conn = server.connect(protocol);
    let old = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", key, "alice", 60_000, "TOKEN", old]), Reply::Int(0));
    assert!(left_ms(&mut conn, &key, "alice") <= 5000);
}

fn shortened_lease_ends_earlier(server: &Server, protocol: Protocol) {
    // INFO may say the new lease while the old deadline is still the one that counts.
    let key = unique_key("shortened");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", key, "alice", 20]), Reply::Int(1));
    wait_until("the key is gone", ANSWER_WITHIN, || conn.cmd(&args!["EXISTS", key]) == Reply::Int(0));
}

fn renewal_out_of_range_keeps_the_lease(server: &Server, protocol: Protocol) {
    // Report B6 (redis-py #4279): a renewal by 0 deleted the lock and reported success.
    let key = unique_key("zero");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    for lease in ["0", "-1", "-86400000", "86400001"] {
        let reply = conn.cmd(&args!["FLOCK.RENEW", key, "alice", lease, "TOKEN", token]);
        assert_eq!(reply.error_code(), Some("ERR"), "{lease}");
    }
    let left = left_ms(&mut conn, &key, "alice");
    assert!((30_000..=60_000).contains(&left), "{left}");
}

fn renewal_of_one_reader_leaves_the_others(server: &Server, protocol: Protocol) {
    // Each hold has its own lease: one reader's keep-alive neither cuts nor prolongs another's.
    let key = unique_key("readers");
    let mut conn = server.connect(protocol);
    for owner in ["alice", "bob"] {
        conn.cmd(&args!["FLOCK.ACQUIRE", key, owner, 60_000, "SHARED"]).as_token();
    }
    conn.cmd(&args!["FLOCK.RENEW", key, "alice", 600_000]);
    assert!(left_ms(&mut conn, &key, "alice") > 60_000);
    assert!(left_ms(&mut conn, &key, "bob") <= 60_000);
}

fn renewal_wakes_no_waiter(server: &Server, protocol: Protocol) {
    // Report B14 (sherlock #66): renew called the release script. The holder stays, the waiter waits.
    let key = unique_key("asleep");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let mut waiter = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "bob", 60_000, "BLOCK", 0]);
    conn.cmd(&args!["FLOCK.RENEW", key, "alice", 60_000]);
    conn.cmd(&args!["FLOCK.RENEW", key, "alice", 60_000, "TOKEN", token]);
    conn.cmd(&args!["FLOCK.RENEW", key, "alice", 60_000, "TOKEN", token + 1]);
    assert_eq!(holders(&mut conn, &key), ["alice"]);
    assert_eq!(waiters(&mut conn, &key), ["bob"]);
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    waiter.recv().as_token();
}

fn renewal_by_a_waiter_is_zero(server: &Server, protocol: Protocol) {
    // Who waits holds nothing yet: 1 would make it believe so.
    let key = unique_key("waiter");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let _waiter = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "bob", 60_000, "BLOCK", 0]);
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", key, "bob", 60_000]), Reply::Int(0));
    assert_eq!(waiters(&mut conn, &key), ["bob"]);
}

fn renewal_keeps_the_ids(server: &Server, protocol: Protocol) {
    // Report B14: a renewal must not lower what is held; the hold has as many ids as before.
    let key = unique_key("ids");
    let mut conn = server.connect(protocol);
    for id in ["one", "two"] {
        conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", id]).as_token();
    }
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", key, "alice", 60_000]), Reply::Int(1));
    let ids = holder(&mut conn, &key, "alice").field("ids").clone();
    assert_eq!(ids, Reply::Array(vec![Reply::bulk("one"), Reply::bulk("two")]));
}

fn wrong_type_is_refused(server: &Server, protocol: Protocol) {
    // 0 would say "lost"; the truth is that this key is no lock at all.
    let key = unique_key("string");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["SET", key, "v"]);
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", key, "alice", 5000]).error_code(), Some("WRONGTYPE"));
}

fn renewal_past_the_deadline_is_zero(builder: Builder) {
    // Late is late, also if nothing has ended the hold yet: here because a transaction takes longer than the lease. A waiter must
    // have the lock then, not the holder again.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 60_000]).as_token();
    let mut waiter = waiting(&server, Protocol::Resp2, &args!["FLOCK.ACQUIRE", "k", "bob", 60_000, "BLOCK", 0]);
    conn.cmd(&["MULTI"]);
    conn.cmd(&args!["FLOCK.RENEW", "k", "alice", 10, "TOKEN", token]);
    conn.cmd(&["DEBUG", "SLEEP", "0.02"]);
    conn.cmd(&args!["FLOCK.RENEW", "k", "alice", 60_000, "TOKEN", token]);
    let replies = conn.cmd(&["EXEC"]);
    assert_eq!(replies, Reply::Array(vec![Reply::Int(1), Reply::ok(), Reply::Int(0)]));
    assert!(waiter.recv().as_token() > token);
}
