//! Shared holds, LIMIT, CONVERT, and one fair queue for readers and writers.

use flock_tests::args;
use flock_tests::on_shared_servers;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::{Server, unique_key};
use flock_tests::wait::wait_until;

use crate::lock_view::{holder, holders, left_ms, waiters, waiting};

on_shared_servers![
    readers_hold_together,
    readers_have_their_own_tokens,
    writer_is_refused_while_readers_hold,
    reader_is_refused_while_a_writer_holds,
    writer_is_granted_after_the_last_reader,
    writer_is_granted_when_the_last_readers_lease_ends,
    repeated_shared_request_is_still_one_hold,
    each_reader_has_its_own_lease,
    short_reader_does_not_cut_a_long_one,
    long_reader_does_not_prolong_a_short_one,
    exclusive_request_of_a_reader_is_refused,
    mode_is_free_again_after_the_last_release,
    limit_bounds_the_holders,
    limit_of_one_is_exclusive_among_readers,
    release_makes_room_under_the_limit,
    expiry_makes_room_under_the_limit,
    limit_is_the_requests_own,
    holder_is_not_refused_by_its_own_limit,
    largest_limit_is_accepted,
    waiter_with_a_limit_is_granted_when_there_is_room,
    waiter_kept_by_its_limit_holds_its_place,
    waiting_reader_holds_a_place_before_a_later_writer,
    reader_behind_a_waiting_writer_waits,
    writer_passes_a_stream_of_readers,
    readers_pass_a_stream_of_writers,
    adjacent_readers_are_granted_together,
    readers_behind_the_next_writer_are_not_granted,
    waiters_are_granted_in_their_order,
    waiter_gone_at_the_handoff_leaves_one_owner,
    conversion_to_shared_keeps_the_token,
    conversion_to_shared_lets_readers_in,
    conversion_to_shared_grants_waiting_readers_up_to_the_next_writer,
    conversion_to_shared_twice_is_the_same,
    conversion_to_exclusive_has_a_new_token,
    conversion_to_exclusive_ends_the_old_token,
    conversion_to_exclusive_keeps_readers_out,
    conversion_to_exclusive_beside_another_reader_is_nil,
    refused_conversion_keeps_the_shared_hold,
    conversion_retried_with_the_old_token_is_the_same,
    conversion_to_shared_with_an_earlier_token_is_refused,
    conversion_of_the_last_reader_passes_waiting_writers,
    two_converting_readers_do_not_wait_for_each_other,
    converted_writers_token_exceeds_all_readers,
    conversion_with_a_wrong_token_is_refused,
    conversion_without_a_hold_is_refused,
    conversion_by_another_owner_is_refused,
    conversion_after_the_lease_is_refused,
    conversion_there_and_back_works,
    conversion_extends_the_lease_and_never_shortens_it,
];

fn readers_hold_together(server: &Server, protocol: Protocol) {
    // Shared that is not shared would serialise all readers.
    let key = unique_key("together");
    let mut conn = server.connect(protocol);
    for owner in ["alice", "bob", "carol"] {
        conn.cmd(&args!["FLOCK.ACQUIRE", key, owner, 60_000, "SHARED"]).as_token();
    }
    assert_eq!(holders(&mut conn, &key), ["alice", "bob", "carol"]);
}

fn readers_have_their_own_tokens(server: &Server, protocol: Protocol) {
    // Readers that shared a token could not be told apart by CHECK once one of them is gone.
    let key = unique_key("tokens");
    let mut conn = server.connect(protocol);
    let first = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED"]).as_token();
    let second = conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 60_000, "SHARED"]).as_token();
    assert!(second > first, "{first} {second}");
}

fn writer_is_refused_while_readers_hold(server: &Server, protocol: Protocol) {
    // Never exclusive beside anything.
    let key = unique_key("readers");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "reader", 60_000, "SHARED"]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "writer", 60_000]), Reply::Nil);
}

fn reader_is_refused_while_a_writer_holds(server: &Server, protocol: Protocol) {
    // The other way round; a limit makes no difference.
    let key = unique_key("writer");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "writer", 60_000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "reader", 60_000, "SHARED"]), Reply::Nil);
    let reply = conn.cmd(&args!["FLOCK.ACQUIRE", key, "reader", 60_000, "SHARED", "LIMIT", 9]);
    assert_eq!(reply, Reply::Nil);
}

fn writer_is_granted_after_the_last_reader(server: &Server, protocol: Protocol) {
    // Not after the first, and with a token above all of theirs.
    let key = unique_key("last");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED"]).as_token();
    let readers = conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 60_000, "SHARED"]).as_token();
    conn.cmd(&args!["FLOCK.RELEASE", key, "bob"]);
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "writer", 60_000]), Reply::Nil);
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    let writers = conn.cmd(&args!["FLOCK.ACQUIRE", key, "writer", 60_000]).as_token();
    assert!(writers > readers, "{writers} {readers}");
}

fn writer_is_granted_when_the_last_readers_lease_ends(server: &Server, protocol: Protocol) {
    // Each reader's end must be looked at, not only that of the first or of the last to come.
    let key = unique_key("dead readers");
    let mut conn = server.connect(protocol);
    for owner in ["alice", "bob"] {
        conn.cmd(&args!["FLOCK.ACQUIRE", key, owner, 60_000, "SHARED"]).as_token();
    }
    let mut writer = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "writer", 60_000, "BLOCK", 0]);
    conn.cmd(&args!["FLOCK.RENEW", key, "bob", 20]);
    wait_until("bob's lease is over", ANSWER_WITHIN, || holders(&mut conn, &key) == ["alice"]);
    conn.cmd(&args!["FLOCK.RENEW", key, "alice", 20]);
    writer.recv().as_token();
}

fn repeated_shared_request_is_still_one_hold(server: &Server, protocol: Protocol) {
    // A retry that counted twice would fill a semaphore with dead holders.
    let key = unique_key("retry");
    let mut conn = server.connect(protocol);
    let first = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED"]).as_token();
    let again = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED"]).as_token();
    assert_eq!(again, first);
    assert_eq!(holders(&mut conn, &key), ["alice"]);
}

fn each_reader_has_its_own_lease(server: &Server, protocol: Protocol) {
    // A hold per reader, not one lease for all of them.
    let key = unique_key("leases");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED"]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 600_000, "SHARED"]).as_token();
    assert!(left_ms(&mut conn, &key, "alice") <= 60_000);
    assert!(left_ms(&mut conn, &key, "bob") > 500_000);
}

fn short_reader_does_not_cut_a_long_one(server: &Server, protocol: Protocol) {
    // Report D1 (redisson #2144): the end of a short lease took the long lease's reader with it.
    let key = unique_key("short later");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "long", 60_000, "SHARED"]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "short", 20, "SHARED"]).as_token();
    wait_until("the short lease is over", ANSWER_WITHIN, || holders(&mut conn, &key) == ["long"]);
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(1));
    assert!(left_ms(&mut conn, &key, "long") > 30_000);
}

fn long_reader_does_not_prolong_a_short_one(server: &Server, protocol: Protocol) {
    // Report D1, the reverse: a later, longer lease must not keep the earlier reader.
    let key = unique_key("long later");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "short", 50, "SHARED"]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "long", 60_000, "SHARED"]).as_token();
    wait_until("the short lease is over", ANSWER_WITHIN, || holders(&mut conn, &key) == ["long"]);
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(0));
}

fn exclusive_request_of_a_reader_is_refused(server: &Server, protocol: Protocol) {
    // Its shared hold would be in its own way for ever; it must say what it wants: CONVERT.
    let key = unique_key("heldshared");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED"]).as_token();
    let reply = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]);
    assert_eq!(reply.error_code(), Some("HELDSHARED"));
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(1));
}

fn mode_is_free_again_after_the_last_release(server: &Server, protocol: Protocol) {
    // A mode that sticks to the name would refuse the next writer.
    let key = unique_key("sticky");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED"]).as_token();
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.INFO", key]).field("mode").as_str(), "exclusive");
}

/// A try for one of `limit` places.
fn take_place(conn: &mut Conn, key: &str, owner: &str, limit: u32) -> Reply {
    conn.cmd(&args!["FLOCK.ACQUIRE", key, owner, 60_000, "SHARED", "LIMIT", limit])
}

fn limit_bounds_the_holders(server: &Server, protocol: Protocol) {
    // A counting semaphore of three: the fourth is refused.
    let key = unique_key("three");
    let mut conn = server.connect(protocol);
    for owner in ["a", "b", "c"] {
        take_place(&mut conn, &key, owner, 3).as_token();
    }
    assert_eq!(take_place(&mut conn, &key, "d", 3), Reply::Nil);
}

fn limit_of_one_is_exclusive_among_readers(server: &Server, protocol: Protocol) {
    // The lower end of the range.
    let key = unique_key("one");
    let mut conn = server.connect(protocol);
    take_place(&mut conn, &key, "a", 1).as_token();
    assert_eq!(take_place(&mut conn, &key, "b", 1), Reply::Nil);
}

fn release_makes_room_under_the_limit(server: &Server, protocol: Protocol) {
    // A semaphore that counted up but not down would close for good.
    let key = unique_key("room");
    let mut conn = server.connect(protocol);
    for owner in ["a", "b"] {
        take_place(&mut conn, &key, owner, 2).as_token();
    }
    conn.cmd(&args!["FLOCK.RELEASE", key, "a"]);
    take_place(&mut conn, &key, "c", 2).as_token();
    assert_eq!(take_place(&mut conn, &key, "d", 2), Reply::Nil);
}

fn expiry_makes_room_under_the_limit(server: &Server, protocol: Protocol) {
    // A dead holder gives its place back by the end of its lease, one place only.
    let key = unique_key("dead");
    let mut conn = server.connect(protocol);
    take_place(&mut conn, &key, "a", 2).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "b", 20, "SHARED", "LIMIT", 2]).as_token();
    wait_until("c has the dead holder's place", ANSWER_WITHIN, || !take_place(&mut conn, &key, "c", 2).is_nil());
    assert_eq!(take_place(&mut conn, &key, "d", 2), Reply::Nil);
}

fn limit_is_the_requests_own(server: &Server, protocol: Protocol) {
    // "At most n holders" is judged by each request: who allows more company gets in, who gives no limit too.
    let key = unique_key("own");
    let mut conn = server.connect(protocol);
    take_place(&mut conn, &key, "a", 1).as_token();
    assert_eq!(take_place(&mut conn, &key, "b", 1), Reply::Nil);
    take_place(&mut conn, &key, "c", 2).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "d", 60_000, "SHARED"]).as_token();
    assert_eq!(take_place(&mut conn, &key, "e", 3), Reply::Nil);
}

fn holder_is_not_refused_by_its_own_limit(server: &Server, protocol: Protocol) {
    // A retry of the last holder finds the semaphore full, by itself: it is the same request.
    let key = unique_key("full");
    let mut conn = server.connect(protocol);
    take_place(&mut conn, &key, "a", 2).as_token();
    let token = take_place(&mut conn, &key, "b", 2).as_token();
    assert_eq!(take_place(&mut conn, &key, "b", 2).as_token(), token);
    assert_eq!(take_place(&mut conn, &key, "b", 1).as_token(), token);
}

fn largest_limit_is_accepted(server: &Server, protocol: Protocol) {
    // The upper end of the range: a limit cut to fewer bits would become 0 or 1.
    let key = unique_key("largest");
    let mut conn = server.connect(protocol);
    take_place(&mut conn, &key, "a", u32::MAX).as_token();
    take_place(&mut conn, &key, "b", u32::MAX).as_token();
}

fn waiter_with_a_limit_is_granted_when_there_is_room(server: &Server, protocol: Protocol) {
    // The handoff must judge by the waiter's own limit: one free place, one grant.
    let key = unique_key("semaphore");
    let mut conn = server.connect(protocol);
    for owner in ["a", "b"] {
        take_place(&mut conn, &key, owner, 2).as_token();
    }
    let [mut first, _second] = ["c", "d"].map(|owner| {
        let request = args!["FLOCK.ACQUIRE", key, owner, 60_000, "SHARED", "LIMIT", 2, "BLOCK", 0];
        waiting(server, protocol, &request)
    });
    conn.cmd(&args!["FLOCK.RELEASE", key, "a"]);
    first.recv().as_token();
    assert_eq!(holders(&mut conn, &key), ["b", "c"]);
    assert_eq!(waiters(&mut conn, &key), ["d"]);
}

fn waiter_kept_by_its_limit_holds_its_place(server: &Server, protocol: Protocol) {
    // One queue: a reader without a limit that came later could be granted at once, and would keep the first waiting for ever.
    let key = unique_key("kept");
    let mut conn = server.connect(protocol);
    take_place(&mut conn, &key, "a", 1).as_token();
    let first = args!["FLOCK.ACQUIRE", key, "first", 60_000, "SHARED", "LIMIT", 1, "BLOCK", 0];
    let mut first = waiting(server, protocol, &first);
    let _later = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "later", 60_000, "SHARED", "BLOCK", 0]);
    assert_eq!(waiters(&mut conn, &key), ["first", "later"]);
    conn.cmd(&args!["FLOCK.RELEASE", key, "a"]);
    first.recv().as_token();
    assert_eq!(holders(&mut conn, &key), ["first", "later"]);
}

fn waiting_reader_holds_a_place_before_a_later_writer(server: &Server, protocol: Protocol) {
    // One queue for all: a writer that came later must not be granted first.
    let key = unique_key("fifo");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "holder", 60_000]).as_token();
    let mut reader = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "r", 60_000, "SHARED", "BLOCK", 0]);
    let _writer = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "w", 60_000, "BLOCK", 0]);
    conn.cmd(&args!["FLOCK.RELEASE", key, "holder"]);
    reader.recv().as_token();
    assert_eq!(holders(&mut conn, &key), ["r"]);
    assert_eq!(waiters(&mut conn, &key), ["w"]);
}

fn reader_behind_a_waiting_writer_waits(server: &Server, protocol: Protocol) {
    // Report D7 (minio #2629): a reader that joins those who hold, past the waiting writer, starves it.
    let key = unique_key("behind");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "r1", 60_000, "SHARED"]).as_token();
    let mut writer = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "w", 60_000, "BLOCK", 0]);
    let mut reader = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "r2", 60_000, "SHARED", "BLOCK", 0]);
    assert_eq!(waiters(&mut conn, &key), ["w", "r2"]);
    conn.cmd(&args!["FLOCK.RELEASE", key, "r1"]);
    let first = writer.recv().as_token();
    assert_eq!(holders(&mut conn, &key), ["w"]);
    conn.cmd(&args!["FLOCK.RELEASE", key, "w"]);
    assert!(reader.recv().as_token() > first);
}

fn writer_passes_a_stream_of_readers(server: &Server, protocol: Protocol) {
    // Report D7: fifty overlapping readers, there is always one that holds; the writer still comes before all that came later.
    let key = unique_key("stream");
    let mut conn = server.connect(protocol);
    for number in 0..50 {
        conn.cmd(&args!["FLOCK.ACQUIRE", key, format!("r{number}"), 60_000, "SHARED"]).as_token();
    }
    let mut writer = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "w", 60_000, "BLOCK", 0]);
    for number in 0..50 {
        let late = conn.cmd(&args!["FLOCK.ACQUIRE", key, format!("late{number}"), 60_000, "SHARED"]);
        assert_eq!(late, Reply::Nil, "{number}");
        conn.cmd(&args!["FLOCK.RELEASE", key, format!("r{number}")]);
    }
    writer.recv().as_token();
    assert_eq!(holders(&mut conn, &key), ["w"]);
}

fn readers_pass_a_stream_of_writers(server: &Server, protocol: Protocol) {
    // Report D7, the reverse: readers are not starved by writers that keep coming.
    let key = unique_key("writers");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "w0", 60_000]).as_token();
    let mut writer = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "w1", 60_000, "BLOCK", 0]);
    let mut reader = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "r", 60_000, "SHARED", "BLOCK", 0]);
    let _late =
        ["w2", "w3"].map(|owner| waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, owner, 60_000, "BLOCK", 0]));
    conn.cmd(&args!["FLOCK.RELEASE", key, "w0"]);
    writer.recv().as_token();
    conn.cmd(&args!["FLOCK.RELEASE", key, "w1"]);
    reader.recv().as_token();
    assert_eq!(waiters(&mut conn, &key), ["w2", "w3"]);
}

fn adjacent_readers_are_granted_together(server: &Server, protocol: Protocol) {
    // One by one they would wait for each other's release for nothing.
    let key = unique_key("adjacent");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "writer", 60_000]).as_token();
    let readers = ["r1", "r2", "r3"]
        .map(|owner| waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, owner, 60_000, "SHARED", "BLOCK", 0]));
    conn.cmd(&args!["FLOCK.RELEASE", key, "writer"]);
    assert_eq!(holders(&mut conn, &key), ["r1", "r2", "r3"]);
    let tokens = readers.map(|mut reader| reader.recv().as_token());
    assert!(tokens.is_sorted_by(|one, next| one < next), "{tokens:?}");
}

fn readers_behind_the_next_writer_are_not_granted(server: &Server, protocol: Protocol) {
    // Granted together are adjacent readers only: one behind a writer keeps its turn.
    let key = unique_key("fence");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "holder", 60_000]).as_token();
    let _queue = [("r1", true), ("w", false), ("r2", true)].map(|(owner, shared)| {
        let mut request = args!["FLOCK.ACQUIRE", key, owner, 60_000, "BLOCK", 0].to_vec();
        request.extend(shared.then(|| b"SHARED".to_vec()));
        waiting(server, protocol, &request)
    });
    conn.cmd(&args!["FLOCK.RELEASE", key, "holder"]);
    assert_eq!(holders(&mut conn, &key), ["r1"]);
    assert_eq!(waiters(&mut conn, &key), ["w", "r2"]);
}

fn waiters_are_granted_in_their_order(server: &Server, protocol: Protocol) {
    // First come, first served, and each grant has a higher token than the one before.
    let key = unique_key("order");
    let mut conn = server.connect(protocol);
    let mut last = conn.cmd(&args!["FLOCK.ACQUIRE", key, "w0", 60_000]).as_token();
    let queue: Vec<_> = (1..=8)
        .map(|number| {
            let owner = format!("w{number}");
            let request = args!["FLOCK.ACQUIRE", key, owner, 60_000, "BLOCK", 0];
            (owner, waiting(server, protocol, &request))
        })
        .collect();
    let mut holder = "w0".to_owned();
    for (owner, mut waiter) in queue {
        assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, holder]), Reply::Int(1));
        let token = waiter.recv().as_token();
        assert!(token > last, "{owner}: {token} after {last}");
        assert_eq!(holders(&mut conn, &key), [owner.as_str()]);
        (holder, last) = (owner, token);
    }
}

fn waiter_gone_at_the_handoff_leaves_one_owner(server: &Server, protocol: Protocol) {
    // Report D6 (etcd #16221): the connection of a queued writer ends while the holder releases; exactly one of the others may
    // have the lock, and nobody waits for the dead.
    for _ in 0..20 {
        let key = unique_key("race");
        let mut conn = server.connect(protocol);
        conn.cmd(&args!["FLOCK.ACQUIRE", key, "holder", 60_000]).as_token();
        let dying = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "dying", 60_000, "BLOCK", 0]);
        let mut next = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "next", 60_000, "BLOCK", 0]);
        let id = dying.id();
        conn.send(&args!["FLOCK.RELEASE", key, "holder"]);
        dying.abort();
        assert_eq!(conn.recv(), Reply::Int(1));
        server.wait_until_gone(id);
        // Either the dying waiter was granted before its end was noticed, and holds until its lease is over; or the next one holds.
        let holders = holders(&mut conn, &key);
        assert!(holders == ["next"] || (holders == ["dying"] && waiters(&mut conn, &key) == ["next"]), "{holders:?}");
        conn.cmd(&args!["FLOCK.RELEASE", key, "dying"]);
        let token = next.recv().as_token();
        assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(1));
    }
}

fn conversion_to_shared_keeps_the_token(server: &Server, protocol: Protocol) {
    // At once, and under the token that the storage already knows.
    let key = unique_key("down");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let reply = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED", "CONVERT", token]);
    assert_eq!(reply.as_token(), token);
    assert_eq!(conn.cmd(&args!["FLOCK.INFO", key]).field("mode").as_str(), "shared");
}

fn conversion_to_shared_lets_readers_in(server: &Server, protocol: Protocol) {
    // The mode that INFO shows must be the mode that grants go by.
    let key = unique_key("let in");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED", "CONVERT", token]);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 60_000, "SHARED"]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "carol", 60_000]), Reply::Nil);
}

fn conversion_to_shared_grants_waiting_readers_up_to_the_next_writer(server: &Server, protocol: Protocol) {
    // In the same step: who waits must not stay behind a lock that has room for it.
    let key = unique_key("wave");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let _queue = [("r1", true), ("r2", true), ("w", false), ("r3", true)].map(|(owner, shared)| {
        let mut request = args!["FLOCK.ACQUIRE", key, owner, 60_000, "BLOCK", 0].to_vec();
        request.extend(shared.then(|| b"SHARED".to_vec()));
        waiting(server, protocol, &request)
    });
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED", "CONVERT", token]).as_token();
    assert_eq!(holders(&mut conn, &key), ["alice", "r1", "r2"]);
    assert_eq!(waiters(&mut conn, &key), ["w", "r3"]);
}

fn conversion_to_shared_twice_is_the_same(server: &Server, protocol: Protocol) {
    // A retry after a lost reply.
    let key = unique_key("down again");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    for _ in 0..2 {
        let reply = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED", "CONVERT", token]);
        assert_eq!(reply.as_token(), token);
    }
    assert_eq!(holders(&mut conn, &key), ["alice"]);
}

fn conversion_to_exclusive_has_a_new_token(server: &Server, protocol: Protocol) {
    // Report D4 (redisson #4796): the only reader's upgrade is immediate. Readers granted after it may have higher tokens, and a
    // writer's must exceed them: so the token is new.
    let key = unique_key("up");
    let mut conn = server.connect(protocol);
    let old = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED"]).as_token();
    let new = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "CONVERT", old]).as_token();
    assert!(new > old, "{old} {new}");
    assert_eq!(conn.cmd(&args!["FLOCK.INFO", key]).field("mode").as_str(), "exclusive");
    assert_eq!(holder(&mut conn, &key, "alice").field("token").as_token(), new);
}

fn conversion_to_exclusive_ends_the_old_token(server: &Server, protocol: Protocol) {
    // One hold, one token: the shared one is stale for CHECK, RENEW and RELEASE.
    let key = unique_key("stale");
    let mut conn = server.connect(protocol);
    let old = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED"]).as_token();
    let new = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "CONVERT", old]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, old]), Reply::Int(0));
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", key, "alice", 60_000, "TOKEN", old]), Reply::Int(0));
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "TOKEN", old]), Reply::Int(0));
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, new]), Reply::Int(1));
}

fn conversion_to_exclusive_keeps_readers_out(server: &Server, protocol: Protocol) {
    // The mode that INFO shows must be the mode that grants go by.
    let key = unique_key("alone");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED"]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "CONVERT", token]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 60_000, "SHARED"]), Reply::Nil);
}

fn conversion_to_exclusive_beside_another_reader_is_nil(server: &Server, protocol: Protocol) {
    // Report D4: answered at once. A conversion that waited for the other reader could wait for ever.
    let key = unique_key("beside");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED"]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 60_000, "SHARED"]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "CONVERT", token]), Reply::Nil);
    conn.cmd(&args!["FLOCK.RELEASE", key, "bob"]);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "CONVERT", token]).as_token();
}

fn refused_conversion_keeps_the_shared_hold(server: &Server, protocol: Protocol) {
    // Nil must leave the reader what it had: its token, and its lease as it was.
    let key = unique_key("stays");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED"]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 60_000, "SHARED"]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000, "CONVERT", token]);
    assert_eq!(holders(&mut conn, &key), ["alice", "bob"]);
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(1));
    assert!(left_ms(&mut conn, &key, "alice") <= 60_000);
}

fn conversion_retried_with_the_old_token_is_the_same(server: &Server, protocol: Protocol) {
    // The reply with the new token was lost, so the retry can only name the old one. A second conversion, or NOTHELD, would
    // leave the writer without a token.
    let key = unique_key("up again");
    let mut conn = server.connect(protocol);
    let old = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED"]).as_token();
    let new = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "CONVERT", old]).as_token();
    let again = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "CONVERT", old]).as_token();
    assert_eq!(again, new);
}

fn conversion_to_shared_with_an_earlier_token_is_refused(server: &Server, protocol: Protocol) {
    // The earlier token is good for the retry of the conversion that replaced it, and for nothing else: a request from before that
    // conversion, arriving late, must not weaken the writer's hold.
    let key = unique_key("earlier");
    let mut conn = server.connect(protocol);
    let old = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED"]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "CONVERT", old]).as_token();
    let late = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED", "CONVERT", old]);
    assert_eq!(late.error_code(), Some("NOTHELD"));
    assert_eq!(conn.cmd(&args!["FLOCK.INFO", key]).field("mode").as_str(), "exclusive");
}

fn conversion_of_the_last_reader_passes_waiting_writers(server: &Server, protocol: Protocol) {
    // "Granted if this is the only holder", whoever waits: behind a queued writer it could only wait for itself.
    let key = unique_key("queued writer");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED"]).as_token();
    let mut writer = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "w", 60_000, "BLOCK", 0]);
    let new = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "CONVERT", token]).as_token();
    assert_eq!(waiters(&mut conn, &key), ["w"]);
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    assert!(writer.recv().as_token() > new);
}

fn two_converting_readers_do_not_wait_for_each_other(server: &Server, protocol: Protocol) {
    // Report D4: two upgraders deadlock wherever upgrades wait. Here both are refused until one of them lets go.
    let key = unique_key("upgraders");
    let mut conn = server.connect(protocol);
    let alices = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED"]).as_token();
    let bobs = conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 60_000, "SHARED"]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "CONVERT", alices]), Reply::Nil);
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 60_000, "CONVERT", bobs]), Reply::Nil);
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 60_000, "CONVERT", bobs]).as_token();
}

fn converted_writers_token_exceeds_all_readers(server: &Server, protocol: Protocol) {
    // The earliest reader converts last: under its old token the storage would refuse it after the later reader.
    let key = unique_key("exceeds");
    let mut conn = server.connect(protocol);
    let first = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED"]).as_token();
    let second = conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 60_000, "SHARED"]).as_token();
    conn.cmd(&args!["FLOCK.RELEASE", key, "bob"]);
    let writers = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "CONVERT", first]).as_token();
    assert!(writers > second, "{writers} {second}");
}

fn conversion_with_a_wrong_token_is_refused(server: &Server, protocol: Protocol) {
    // The hold may be another one than the request means: an earlier one of this owner has ended.
    let key = unique_key("wrong");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED"]).as_token();
    for other in [token - 1, token + 1] {
        let reply = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "CONVERT", other]);
        assert_eq!(reply.error_code(), Some("NOTHELD"), "{other}");
    }
    assert_eq!(conn.cmd(&args!["FLOCK.INFO", key]).field("mode").as_str(), "shared");
}

fn conversion_without_a_hold_is_refused(server: &Server, protocol: Protocol) {
    // A free lock must not be granted by a conversion: whoever sends one believes to hold it already.
    let key = unique_key("free");
    let mut conn = server.connect(protocol);
    let reply = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "CONVERT", 5]);
    assert_eq!(reply.error_code(), Some("NOTHELD"));
    assert_eq!(conn.cmd(&args!["EXISTS", key]), Reply::Int(0));
}

fn conversion_by_another_owner_is_refused(server: &Server, protocol: Protocol) {
    // A token is no key to somebody else's hold.
    let key = unique_key("stranger");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let reply = conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 60_000, "SHARED", "CONVERT", token]);
    assert_eq!(reply.error_code(), Some("NOTHELD"));
    assert_eq!(conn.cmd(&args!["FLOCK.INFO", key]).field("mode").as_str(), "exclusive");
}

fn conversion_after_the_lease_is_refused(server: &Server, protocol: Protocol) {
    // Nobody has taken the lock since; still the hold is lost, and a conversion must not revive it.
    let key = unique_key("lost");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 1, "SHARED"]).as_token();
    wait_until("the lease is over", ANSWER_WITHIN, || conn.cmd(&args!["FLOCK.CHECK", key, token]) == Reply::Int(0));
    let reply = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "CONVERT", token]);
    assert_eq!(reply.error_code(), Some("NOTHELD"));
}

fn conversion_there_and_back_works(server: &Server, protocol: Protocol) {
    // Down, up, down, up: each upgrade has a token above the one before, each downgrade keeps it.
    let key = unique_key("there and back");
    let mut conn = server.connect(protocol);
    let mut token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    for _ in 0..3 {
        let down = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED", "CONVERT", token]);
        assert_eq!(down.as_token(), token);
        let up = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "CONVERT", token]).as_token();
        assert!(up > token, "{token} {up}");
        token = up;
    }
}

fn conversion_extends_the_lease_and_never_shortens_it(server: &Server, protocol: Protocol) {
    // A conversion is a repeated request: its lease_ms follows the same rule.
    let key = unique_key("lease");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000, "SHARED", "CONVERT", token]);
    assert!(left_ms(&mut conn, &key, "alice") > 500_000);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 1000, "CONVERT", token]);
    assert!(left_ms(&mut conn, &key, "alice") > 500_000);
}
