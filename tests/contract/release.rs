//! FLOCK.RELEASE: who may give a hold back, what ends with it, and that a retry is safe.

use flock_tests::args;
use flock_tests::on_shared_servers;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Protocol};
use flock_tests::server::{Server, unique_key};
use flock_tests::wait::wait_until;

use crate::lock_view::{holder, holders, left_ms, waiters, waiting};

on_shared_servers![
    release_ends_the_hold,
    release_deletes_the_key,
    repeated_release_is_zero,
    release_of_a_free_lock_is_zero,
    release_of_a_free_lock_makes_no_key,
    release_by_another_owner_is_zero,
    release_by_another_owner_changes_nothing,
    release_from_another_connection_works,
    release_by_another_user_works,
    release_with_its_token_ends_the_hold,
    release_with_an_old_token_is_zero,
    release_with_a_token_never_handed_out_is_zero,
    release_with_the_token_of_another_holder_is_zero,
    release_with_the_token_of_another_lock_is_zero,
    late_release_does_not_touch_the_next_hold,
    repeated_release_after_a_handoff_does_not_touch_the_next_hold,
    release_after_the_lease_is_zero,
    release_of_one_reader_keeps_the_others,
    release_hands_over_to_the_waiter,
    refused_release_wakes_no_waiter,
    release_cancels_a_waiting_request,
    release_with_a_token_cancels_no_waiting_request,
    cancelled_waiter_leaves_the_others_in_order,
    release_all_ends_a_plain_hold,
    release_with_an_id_of_a_plain_hold_is_zero,
    wrong_type_is_refused,
];

fn release_ends_the_hold(server: &Server, protocol: Protocol) {
    // The smallest cycle: taken, given back, free for the next.
    let key = unique_key("cycle");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]), Reply::Int(1));
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 60_000]).as_token();
}

fn release_deletes_the_key(server: &Server, protocol: Protocol) {
    // Memory must follow held locks, not names ever used: a key that stays is a leak of one per name.
    let key = unique_key("deleted");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    assert_eq!(conn.cmd(&args!["EXISTS", key]), Reply::Int(0));
}

fn repeated_release_is_zero(server: &Server, protocol: Protocol) {
    // Report B2 (redisson #6748): sent again after a lost reply, a release has nothing to end and is no error.
    let key = unique_key("twice");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "TOKEN", token]), Reply::Int(1));
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "TOKEN", token]), Reply::Int(0));
}

fn release_of_a_free_lock_is_zero(server: &Server, protocol: Protocol) {
    // An error would break whoever releases in a clean-up that cannot know whether it holds.
    let mut conn = server.connect(protocol);
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", unique_key("free"), "alice"]), Reply::Int(0));
}

fn release_of_a_free_lock_makes_no_key(server: &Server, protocol: Protocol) {
    // A key opened for writing may be left behind empty.
    let key = unique_key("nothing");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "TOKEN", 5]);
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "ALL"]);
    assert_eq!(conn.cmd(&args!["EXISTS", key]), Reply::Int(0));
}

fn release_by_another_owner_is_zero(server: &Server, protocol: Protocol) {
    // Report B16 (redisson #562): to release what is not one's own is told apart from success, and is no exception.
    let key = unique_key("stranger");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "bob"]), Reply::Int(0));
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "bob", "ALL"]), Reply::Int(0));
}

fn release_by_another_owner_changes_nothing(server: &Server, protocol: Protocol) {
    // Report B16: it must neither end the hold nor change its lease.
    let key = unique_key("unharmed");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    // Also with the right token: an owner is who asks, a token is what the storage checks.
    conn.cmd(&args!["FLOCK.RELEASE", key, "bob", "TOKEN", token]);
    assert_eq!(holder(&mut conn, &key, "alice").field("token").as_token(), token);
    assert!(left_ms(&mut conn, &key, "alice") > 30_000);
}

fn release_from_another_connection_works(server: &Server, protocol: Protocol) {
    // Report B8 (redisson #1824): the owner is a name, not a thread or a connection: any task that has it may release.
    let key = unique_key("elsewhere");
    let mut first = server.connect(protocol);
    first.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let mut second = server.connect(protocol);
    assert_eq!(second.cmd(&args!["FLOCK.RELEASE", key, "alice"]), Reply::Int(1));
}

fn release_by_another_user_works(server: &Server, protocol: Protocol) {
    // An owner is a name, not a credential: whoever may write the key may release it. One user cannot hide a lock from another.
    let (key, user) = (unique_key("user"), unique_key("user"));
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    conn.cmd(&args!["ACL", "SETUSER", user, "on", "nopass", "+@all", format!("~{key}")]);
    let mut other = server.connect(protocol);
    assert_eq!(other.cmd(&args!["AUTH", user, "x"]), Reply::ok());
    let released = other.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    conn.cmd(&args!["ACL", "DELUSER", user]);
    assert_eq!(released, Reply::Int(1));
}

fn release_with_its_token_ends_the_hold(server: &Server, protocol: Protocol) {
    // TOKEN narrows: with the current token the hold ends.
    let key = unique_key("token");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "TOKEN", token]), Reply::Int(1));
    assert_eq!(holders(&mut conn, &key), [""; 0]);
}

fn release_with_an_old_token_is_zero(server: &Server, protocol: Protocol) {
    // The same owner has acquired again since: a release of the earlier hold, arriving late, must not end the later one.
    let key = unique_key("old");
    let mut conn = server.connect(protocol);
    let old = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    let new = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "TOKEN", old]), Reply::Int(0));
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, new]), Reply::Int(1));
}

fn release_with_a_token_never_handed_out_is_zero(server: &Server, protocol: Protocol) {
    // Exactly this token, not "at most": a comparison the wrong way would let a made-up token release.
    let key = unique_key("future");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    for other in [1, token - 1, token + 1, 9_007_199_254_740_991] {
        assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "TOKEN", other]), Reply::Int(0), "{other}");
    }
    assert_eq!(holders(&mut conn, &key), ["alice"]);
}

fn release_with_the_token_of_another_holder_is_zero(server: &Server, protocol: Protocol) {
    // Among readers a token that exists on this lock is not yet this owner's.
    let key = unique_key("readers");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED"]).as_token();
    let bobs = conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 60_000, "SHARED"]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "TOKEN", bobs]), Reply::Int(0));
    assert_eq!(holders(&mut conn, &key), ["alice", "bob"]);
}

fn release_with_the_token_of_another_lock_is_zero(server: &Server, protocol: Protocol) {
    // Tokens are server-wide: one that the same owner has for another lock must not fit here.
    let (key, other) = (unique_key("this"), unique_key("other"));
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", other, "alice", 60_000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "TOKEN", token]), Reply::Int(0));
    assert_eq!(holders(&mut conn, &key), ["alice"]);
}

fn late_release_does_not_touch_the_next_hold(server: &Server, protocol: Protocol) {
    // The oldest mistake of all: a release after the lease that takes the lock from whoever has it now.
    let key = unique_key("late");
    let mut conn = server.connect(protocol);
    let old = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 1]).as_token();
    wait_until("bob is granted", ANSWER_WITHIN, || !conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 60_000]).is_nil());
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]), Reply::Int(0));
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "TOKEN", old]), Reply::Int(0));
    assert_eq!(holders(&mut conn, &key), ["bob"]);
}

fn repeated_release_after_a_handoff_does_not_touch_the_next_hold(server: &Server, protocol: Protocol) {
    // Report B2: the lock has gone to a waiter between the first release and its retry.
    let key = unique_key("retried");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let mut waiter = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "bob", 60_000, "BLOCK", 0]);
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]), Reply::Int(1));
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]), Reply::Int(0));
    let token = waiter.recv().as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(1));
}

fn release_after_the_lease_is_zero(server: &Server, protocol: Protocol) {
    // 1 would tell a holder that it held to the end, though the lease had run out before.
    let key = unique_key("over");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 1]).as_token();
    wait_until("the lease is over", ANSWER_WITHIN, || conn.cmd(&args!["FLOCK.CHECK", key, token]) == Reply::Int(0));
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]), Reply::Int(0));
}

fn release_of_one_reader_keeps_the_others(server: &Server, protocol: Protocol) {
    // A hold is one owner's: the lock stays held while any reader is left.
    let key = unique_key("one of two");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED"]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 60_000, "SHARED"]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]), Reply::Int(1));
    assert_eq!(holders(&mut conn, &key), ["bob"]);
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "carol", 60_000]), Reply::Nil);
}

fn release_hands_over_to_the_waiter(server: &Server, protocol: Protocol) {
    // The same step that frees the lock grants it: a try right behind the release must not find it free.
    let key = unique_key("handoff");
    let mut conn = server.connect(protocol);
    let first = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let mut waiter = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "bob", 60_000, "BLOCK", 0]);
    conn.send(&args!["FLOCK.RELEASE", key, "alice"]);
    conn.send(&args!["FLOCK.ACQUIRE", key, "thief", 60_000]);
    assert_eq!(conn.recv(), Reply::Int(1));
    assert_eq!(conn.recv(), Reply::Nil);
    assert!(waiter.recv().as_token() > first);
}

fn refused_release_wakes_no_waiter(server: &Server, protocol: Protocol) {
    // Report B16: a release by the wrong owner, or with the wrong token, must leave the queue alone.
    let key = unique_key("asleep");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let mut waiter = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "bob", 60_000, "BLOCK", 0]);
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "carol"]), Reply::Int(0));
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "TOKEN", token + 1]), Reply::Int(0));
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "ID", "x"]), Reply::Int(0));
    assert_eq!(waiters(&mut conn, &key), ["bob"]);
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    waiter.recv().as_token();
}

fn release_cancels_a_waiting_request(server: &Server, protocol: Protocol) {
    // Who gives up must leave the queue; its blocked request ends with an error, since nil would mean "time is up".
    let key = unique_key("cancelled");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let mut waiter = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "bob", 60_000, "BLOCK", 0]);
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "bob"]), Reply::Int(1));
    assert_eq!(waiter.recv().error_code(), Some("CANCELLED"));
    assert_eq!(waiters(&mut conn, &key), [""; 0]);
    assert_eq!(holders(&mut conn, &key), ["alice"]);
}

fn release_with_a_token_cancels_no_waiting_request(server: &Server, protocol: Protocol) {
    // A waiter has no token: a late release of its earlier hold must not cost it its place.
    let key = unique_key("place kept");
    let mut conn = server.connect(protocol);
    let old = conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 60_000]).as_token();
    conn.cmd(&args!["FLOCK.RELEASE", key, "bob"]);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let mut waiter = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "bob", 60_000, "BLOCK", 0]);
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "bob", "TOKEN", old]), Reply::Int(0));
    assert_eq!(waiters(&mut conn, &key), ["bob"]);
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    waiter.recv().as_token();
}

fn cancelled_waiter_leaves_the_others_in_order(server: &Server, protocol: Protocol) {
    // Taking one out of the middle must neither lose nor reorder those behind.
    let key = unique_key("middle");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "holder", 60_000]).as_token();
    let _waiting = ["first", "second", "third"]
        .map(|owner| waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, owner, 60_000, "BLOCK", 0]));
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "second"]), Reply::Int(1));
    assert_eq!(waiters(&mut conn, &key), ["first", "third"]);
}

fn release_all_ends_a_plain_hold(server: &Server, protocol: Protocol) {
    // ALL means "whatever there is": who resets a leftover hold need not know whether it was re-entered (report B3).
    let key = unique_key("all");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "ALL"]), Reply::Int(1));
}

fn release_with_an_id_of_a_plain_hold_is_zero(server: &Server, protocol: Protocol) {
    // A hold without ids has not this one either: ending it would end what another part of the program relies on.
    let key = unique_key("no id");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "ID", "x"]), Reply::Int(0));
    assert_eq!(holders(&mut conn, &key), ["alice"]);
}

fn wrong_type_is_refused(server: &Server, protocol: Protocol) {
    // Report B16: a string under the lock's name is another kind of mistake than a lock held by somebody else.
    let key = unique_key("string");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["SET", key, "v"]);
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]).error_code(), Some("WRONGTYPE"));
    assert_eq!(conn.cmd(&args!["GET", key]), Reply::bulk("v"));
}
