//! REENTRANT: a hold that is a set of ids. No counters, so every retry is safe.

use flock_tests::args;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::{Builder, Server, unique_key};
use flock_tests::wait::wait_until;
use flock_tests::{on_own_servers, on_shared_servers};

use crate::lock_view::{holder, holders, left_ms, waiters, waiting};

on_shared_servers![
    second_id_gets_the_same_token,
    hold_ends_with_its_last_id,
    repeated_id_is_one_id,
    repeated_release_of_an_id_is_zero,
    release_of_an_unknown_id_is_zero,
    release_without_an_id_is_refused,
    release_of_all_ends_the_hold_with_all_its_ids,
    release_of_an_id_with_the_wrong_token_is_zero,
    released_id_may_come_back,
    ids_of_another_owner_are_refused,
    ids_of_two_readers_are_their_own,
    reader_may_re_enter,
    id_on_a_hold_without_ids_is_refused,
    request_without_an_id_is_satisfied_by_a_hold_with_ids,
    new_is_refused_for_a_second_id,
    re_entry_takes_the_longer_lease,
    release_of_one_id_keeps_the_lease,
    waiter_is_granted_after_the_last_id,
    waiter_brings_its_id,
    sixty_four_ids_fit,
    sixty_fifth_id_is_refused,
    full_hold_still_takes_its_own_ids_again,
    longest_id_is_accepted,
    ids_are_bytes,
    conversion_keeps_the_ids,
    ids_do_not_outlive_the_lease,
];

on_own_servers![most_ids_are_configurable];

/// The ids of one hold, as INFO shows them.
#[track_caller]
fn ids(conn: &mut Conn, key: &str, owner: &str) -> Vec<String> {
    let hold = holder(conn, key, owner);
    let ids = hold.field("ids").as_array().iter();
    ids.map(|id| id.as_str().to_owned()).collect()
}

fn second_id_gets_the_same_token(server: &Server, protocol: Protocol) {
    // A new token inside would make the outer part's writes stale.
    let key = unique_key("same");
    let mut conn = server.connect(protocol);
    let outer = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", "outer"]).as_token();
    let inner = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", "inner"]).as_token();
    assert_eq!(inner, outer);
    assert_eq!(ids(&mut conn, &key, "alice"), ["inner", "outer"]);
}

fn hold_ends_with_its_last_id(server: &Server, protocol: Protocol) {
    // The inner part's release must not take the lock from the outer part; in whatever order they come.
    let key = unique_key("last");
    let mut conn = server.connect(protocol);
    for id in ["outer", "inner"] {
        conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", id]).as_token();
    }
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "ID", "outer"]), Reply::Int(1));
    assert_eq!(holders(&mut conn, &key), ["alice"]);
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "ID", "inner"]), Reply::Int(1));
    assert_eq!(conn.cmd(&args!["EXISTS", key]), Reply::Int(0));
}

fn repeated_id_is_one_id(server: &Server, protocol: Protocol) {
    // Report B1 (redisson #7367): a retry that counted twice needs two releases, and the second never comes.
    let key = unique_key("retry");
    let mut conn = server.connect(protocol);
    for _ in 0..3 {
        conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", "id"]).as_token();
    }
    assert_eq!(ids(&mut conn, &key, "alice"), ["id"]);
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "ID", "id"]), Reply::Int(1));
    assert_eq!(holders(&mut conn, &key), [""; 0]);
}

fn repeated_release_of_an_id_is_zero(server: &Server, protocol: Protocol) {
    // Report B2 (redisson #6748): a release sent again must not count down twice and end what the other id still needs.
    let key = unique_key("release retried");
    let mut conn = server.connect(protocol);
    for id in ["outer", "inner"] {
        conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", id]).as_token();
    }
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "ID", "inner"]), Reply::Int(1));
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "ID", "inner"]), Reply::Int(0));
    assert_eq!(ids(&mut conn, &key, "alice"), ["outer"]);
}

fn release_of_an_unknown_id_is_zero(server: &Server, protocol: Protocol) {
    // An id that never joined ends nothing, though the owner is right.
    let key = unique_key("unknown");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", "id"]).as_token();
    for other in ["i", "idd", "ID", "id\0"] {
        assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "ID", other]), Reply::Int(0), "{other:?}");
    }
    assert_eq!(ids(&mut conn, &key, "alice"), ["id"]);
}

fn release_without_an_id_is_refused(server: &Server, protocol: Protocol) {
    // A plain release could only guess which id is meant, and a guess ends what another part of the program relies on.
    let key = unique_key("which");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", "id"]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]).error_code(), Some("ERR"));
    let reply = conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "TOKEN", token]);
    assert_eq!(reply.error_code(), Some("ERR"));
    assert_eq!(ids(&mut conn, &key, "alice"), ["id"]);
}

fn release_of_all_ends_the_hold_with_all_its_ids(server: &Server, protocol: Protocol) {
    // Report B3 (redisson #4178): who finds a leftover hold can reset it without knowing its ids.
    let key = unique_key("all");
    let mut conn = server.connect(protocol);
    for id in ["a", "b", "c"] {
        conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", id]).as_token();
    }
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "ALL"]), Reply::Int(1));
    assert_eq!(conn.cmd(&args!["EXISTS", key]), Reply::Int(0));
}

fn release_of_an_id_with_the_wrong_token_is_zero(server: &Server, protocol: Protocol) {
    // The id may have been used in an earlier hold, whose release comes late.
    let key = unique_key("late");
    let mut conn = server.connect(protocol);
    let old = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", "id"]).as_token();
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "ALL"]);
    let new = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", "id"]).as_token();
    let release = |token: u64| args!["FLOCK.RELEASE", key, "alice", "ID", "id", "TOKEN", token];
    assert_eq!(conn.cmd(&release(old)), Reply::Int(0));
    assert_eq!(conn.cmd(&release(new)), Reply::Int(1));
}

fn released_id_may_come_back(server: &Server, protocol: Protocol) {
    // Leaving and entering again in the course of one hold: nothing remembers that the id was there before.
    let key = unique_key("back");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", "outer"]).as_token();
    for _ in 0..3 {
        let inner = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", "inner"]);
        assert_eq!(inner.as_token(), token);
        assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "ID", "inner"]), Reply::Int(1));
    }
    assert_eq!(ids(&mut conn, &key, "alice"), ["outer"]);
}

fn ids_of_another_owner_are_refused(server: &Server, protocol: Protocol) {
    // Only the exact owner re-enters: an id is no password to the hold.
    let key = unique_key("stranger");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", "id"]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 60_000, "REENTRANT", "id"]), Reply::Nil);
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "bob", "ID", "id"]), Reply::Int(0));
}

fn ids_of_two_readers_are_their_own(server: &Server, protocol: Protocol) {
    // The same id under two owners: two holds, each with its own set.
    let key = unique_key("readers");
    let mut conn = server.connect(protocol);
    for owner in ["alice", "bob"] {
        conn.cmd(&args!["FLOCK.ACQUIRE", key, owner, 60_000, "SHARED", "REENTRANT", "id"]).as_token();
    }
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "ID", "id"]), Reply::Int(1));
    assert_eq!(holders(&mut conn, &key), ["bob"]);
    assert_eq!(ids(&mut conn, &key, "bob"), ["id"]);
}

fn reader_may_re_enter(server: &Server, protocol: Protocol) {
    // Also while a writer waits: behind it the reader could only wait for itself.
    let key = unique_key("reader");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED", "REENTRANT", "one"]).as_token();
    let _writer = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "writer", 60_000, "BLOCK", 0]);
    let again = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED", "REENTRANT", "two"]).as_token();
    assert_eq!(again, token);
}

fn id_on_a_hold_without_ids_is_refused(server: &Server, protocol: Protocol) {
    // The hold's first part has no id, so its plain release would end the second part's hold with it.
    let key = unique_key("plain");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let reply = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000, "REENTRANT", "id"]);
    assert_eq!(reply.error_code(), Some("HELD"));
    assert_eq!(ids(&mut conn, &key, "alice"), [""; 0]);
    assert!(left_ms(&mut conn, &key, "alice") <= 60_000);
}

fn request_without_an_id_is_satisfied_by_a_hold_with_ids(server: &Server, protocol: Protocol) {
    // The same owner is the same request: the token comes back, and no id is made up.
    let key = unique_key("without");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", "id"]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token(), token);
    assert_eq!(ids(&mut conn, &key, "alice"), ["id"]);
}

fn new_is_refused_for_a_second_id(server: &Server, protocol: Protocol) {
    // Report B3: NEW is for an owner that must not hold the lock yet, under whatever id.
    let key = unique_key("new");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", "one"]).as_token();
    let reply = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", "two", "NEW"]);
    assert_eq!(reply.error_code(), Some("HELD"));
    assert_eq!(ids(&mut conn, &key, "alice"), ["one"]);
}

fn re_entry_takes_the_longer_lease(server: &Server, protocol: Protocol) {
    // Report D3 (redisson #1110): the longer of what is left and what is asked; never the shorter, never the sum.
    let mut conn = server.connect(protocol);
    for (first_ms, second_ms, longer_ms) in [
        (60_000, 600_000, 600_000),
        (600_000, 60_000, 600_000),
        (60_000, 60_000, 60_000),
        (86_400_000, 1, 86_400_000),
        (60_000, 86_400_000, 86_400_000),
    ] {
        let key = unique_key("lease");
        conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", first_ms, "REENTRANT", "one"]).as_token();
        conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", second_ms, "REENTRANT", "two"]).as_token();
        let left = left_ms(&mut conn, &key, "alice");
        assert!((longer_ms - 30_000..=longer_ms).contains(&left), "{first_ms} {second_ms} {left}");
    }
}

fn release_of_one_id_keeps_the_lease(server: &Server, protocol: Protocol) {
    // The lease belongs to the hold, not to the id that asked for it.
    let key = unique_key("lease kept");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000, "REENTRANT", "long"]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", "short"]).as_token();
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "ID", "long"]);
    assert!(left_ms(&mut conn, &key, "alice") > 500_000);
}

fn waiter_is_granted_after_the_last_id(server: &Server, protocol: Protocol) {
    // Not after the first release, and in the same step as the last.
    let key = unique_key("waiter");
    let mut conn = server.connect(protocol);
    for id in ["one", "two"] {
        conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", id]).as_token();
    }
    let mut waiter = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "bob", 60_000, "BLOCK", 0]);
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "ID", "one"]);
    assert_eq!(waiters(&mut conn, &key), ["bob"]);
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "ID", "two"]);
    assert_eq!(holders(&mut conn, &key), ["bob"]);
    waiter.recv().as_token();
}

fn waiter_brings_its_id(server: &Server, protocol: Protocol) {
    // A grant that came by waiting is a re-entrant hold like any other: its release needs the id.
    let key = unique_key("brings");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let request = args!["FLOCK.ACQUIRE", key, "bob", 60_000, "REENTRANT", "id", "BLOCK", 0];
    let mut waiter = waiting(server, protocol, &request);
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    waiter.recv().as_token();
    assert_eq!(ids(&mut conn, &key, "bob"), ["id"]);
}

/// Fills a hold of alice's with the ids 0 to 63.
#[track_caller]
fn fill(conn: &mut Conn, key: &str) {
    for number in 0..64 {
        conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", number]).as_token();
    }
}

fn sixty_four_ids_fit(server: &Server, protocol: Protocol) {
    // The documented bound is reached, not missed by one; and the hold still ends with the last of them.
    let key = unique_key("fit");
    let mut conn = server.connect(protocol);
    fill(&mut conn, &key);
    for number in 0..64 {
        assert_eq!(holders(&mut conn, &key), ["alice"]);
        assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "ID", number]), Reply::Int(1));
    }
    assert_eq!(holders(&mut conn, &key), [""; 0]);
}

fn sixty_fifth_id_is_refused(server: &Server, protocol: Protocol) {
    // An unbounded set is a way to fill the memory under one key; the refusal must not extend the lease either.
    let key = unique_key("full");
    let mut conn = server.connect(protocol);
    fill(&mut conn, &key);
    let reply = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000, "REENTRANT", 64]);
    assert_eq!(reply.error_code(), Some("IDSFULL"));
    assert!(reply.error_text().contains("64"), "{reply}");
    assert_eq!(ids(&mut conn, &key, "alice").len(), 64);
    assert!(left_ms(&mut conn, &key, "alice") <= 60_000);
}

fn full_hold_still_takes_its_own_ids_again(server: &Server, protocol: Protocol) {
    // A retry adds nothing, so the bound is not in its way.
    let key = unique_key("full retry");
    let mut conn = server.connect(protocol);
    fill(&mut conn, &key);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", 63]).as_token();
}

fn longest_id_is_accepted(server: &Server, protocol: Protocol) {
    // 256 bytes: an id cut short would be another id.
    let key = unique_key("longest");
    let mut conn = server.connect(protocol);
    let (longest, other) = ("x".repeat(256), "x".repeat(255));
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", longest]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "ID", other]), Reply::Int(0));
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "ID", longest]), Reply::Int(1));
}

fn ids_are_bytes(server: &Server, protocol: Protocol) {
    // NUL, CRLF and bytes that are no text are as good as letters, and are shown as they came.
    let key = unique_key("bytes");
    let mut conn = server.connect(protocol);
    let strange = [&b"\0"[..], b"\r\n", b"\xff\xfe", b"ALL"];
    for id in strange {
        conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", id]).as_token();
    }
    let shown = holder(&mut conn, &key, "alice").field("ids").clone();
    let in_byte_order = [&b"\0"[..], b"\r\n", b"ALL", b"\xff\xfe"];
    assert_eq!(shown, Reply::Array(in_byte_order.map(Reply::bulk).to_vec()));
    for id in strange {
        assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "ID", id]), Reply::Int(1));
    }
    assert_eq!(holders(&mut conn, &key), [""; 0]);
}

fn conversion_keeps_the_ids(server: &Server, protocol: Protocol) {
    // The mode changes, what the hold is needed for does not: also across the new token of a writer.
    let key = unique_key("converted");
    let mut conn = server.connect(protocol);
    let mut token = 0;
    for id in ["one", "two"] {
        token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED", "REENTRANT", id]).as_token();
    }
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "CONVERT", token]).as_token();
    assert_eq!(ids(&mut conn, &key, "alice"), ["one", "two"]);
}

fn ids_do_not_outlive_the_lease(server: &Server, protocol: Protocol) {
    // The next hold of the same owner is a new one: an id left over from the last would keep it for ever.
    let key = unique_key("over");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 20, "REENTRANT", "old"]).as_token();
    wait_until("the lease is over", ANSWER_WITHIN, || holders(&mut conn, &key).is_empty());
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "REENTRANT", "new"]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "ID", "old"]), Reply::Int(0));
    assert_eq!(ids(&mut conn, &key, "alice"), ["new"]);
}

fn most_ids_are_configurable(builder: Builder) {
    // flock.ids-max is asked at each request, so an operator can lower it without a restart.
    let server = builder.module_arg("ids-max").module_arg("2").start();
    let mut conn = server.connect(Protocol::Resp2);
    let mut enter = |id: &str| conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 60_000, "REENTRANT", id]);
    enter("one").as_token();
    enter("two").as_token();
    assert_eq!(enter("three").error_code(), Some("IDSFULL"));
}
