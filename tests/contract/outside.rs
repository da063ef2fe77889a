//! What others do to a lock's key while somebody holds the lock and others wait for it.
//!
//! | afterwards | the holder hears | who waits |
//! |---|---|---|
//! | the key is free | lost: removed | the next is granted |
//! | the key has a value of another type | lost: removed | ends with WRONGTYPE |
//! | another lock is there | lost: removed | waits for that one |
//! | the database is flushed | lost: flushed | ends with FLUSHED |
//! | databases are swapped | nothing: the lock has moved | waits for what has the name in its database now |
//! | the server itself took the key (expiry, eviction) | nothing: the lock is put back | waits on |
//!
//! And whatever is done, the next token is above all earlier ones.

use std::time::Duration;

use flock_core::refusal::{EndReason, LossReason};
use flock_tests::random::Random;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::{Builder, Server, unique_key};
use flock_tests::subscriber::Subscriber;
use flock_tests::topology::Replicated;
use flock_tests::wait::{let_pass, wait_until};
use flock_tests::{args, on_own_servers, on_shared_servers};

use crate::lock_view::{holders, left_ms, waiters, waiting};
use crate::scene::{
    Heard, LEASE_MS, QUIET, ended, hear, hear_grant, held_by_alice, hold, hold_with_channel, listener, lost, queue,
    release, transaction, wait_until_free, waiter,
};

on_shared_servers![
    // The key is free afterwards.
    del_serves_the_next,
    unlink_serves_the_next,
    rename_away_serves_the_next,
    renamenx_away_serves_the_next,
    move_away_serves_the_next,
    del_in_a_transaction_serves_the_next,
    del_in_a_script_serves_the_next,
    del_after_set_in_one_step_serves_the_next,
    rename_away_and_back_serves_the_next,
    // The key has another type afterwards.
    set_ends_waits_with_wrongtype,
    set_in_a_transaction_ends_waits_with_wrongtype,
    rename_of_another_type_onto_the_lock_ends_waits_with_wrongtype,
    copy_of_another_type_onto_the_lock_ends_waits_with_wrongtype,
    store_onto_the_lock_ends_waits_with_wrongtype,
    restore_of_another_type_onto_the_lock_ends_waits_with_wrongtype,
    // Another lock is there afterwards.
    restored_lock_is_waited_for,
    restored_lock_is_held_by_its_holder_again,
    restored_hold_of_a_waiter_answers_it,
    rename_of_a_lock_onto_another_serves_both_queues,
    // Nothing has happened to the lock.
    commands_for_other_types_are_refused,
    copy_of_a_lock_is_refused,
    move_of_a_lock_onto_a_key_is_refused,
    expiry_of_the_key_that_is_taken_back_changes_nothing,
    expiry_of_the_key_outlives_no_hold,
    // The server took the key by itself.
    lock_whose_key_expires_is_put_back,
    lock_that_was_put_back_is_handed_over_by_its_release,
    lock_that_was_put_back_ends_with_its_lease,
    session_that_was_put_back_still_ends_with_its_connection,
    expiry_in_the_past_leaves_nobody_asleep,
    expiry_in_the_past_of_a_value_that_replaced_the_lock_leaves_nobody_asleep,
    lock_that_somebody_had_since_is_not_put_back,
    // What was carried away.
    value_renamed_away_is_nobodys,
    value_renamed_away_becomes_the_next_holders,
    value_moved_away_is_nobodys,
    // Order.
    newcomer_in_the_same_step_as_a_del_waits_its_turn,
    queued_requests_of_readers_are_served_together_after_a_del,
    holder_that_comes_back_after_a_del_is_granted_anew,
];

on_own_servers![
    flushdb_ends_waits_with_flushed,
    flushdb_sync_ends_waits_with_flushed,
    flushdb_async_ends_waits_with_flushed,
    flushall_sync_ends_waits_with_flushed,
    flushall_async_ends_waits_with_flushed,
    flush_in_a_transaction_ends_waits_with_flushed,
    flushdb_of_another_database_changes_nothing,
    flush_and_a_new_request_in_one_step_grants_it,
    tokens_rise_over_a_flush,
    names_can_be_locked_again_and_again_between_asynchronous_flushes,
    swapdb_serves_who_waits_for_a_name_that_is_free_now,
    swapdb_lets_wait_for_the_lock_that_came,
    swapdb_takes_the_hold_along,
    swapdb_tells_no_holder,
    lease_of_a_swapped_lock_ends_in_its_new_database,
    swapdb_with_another_type_ends_waits_with_wrongtype,
    locks_overwritten_while_the_keyspace_grows_leave_what_was_written,
    lock_whose_key_is_evicted_is_put_back,
    check_that_finds_the_key_expired_knows_the_hold,
    info_that_finds_the_key_expired_knows_the_hold,
    renewal_that_finds_the_key_expired_renews_the_hold,
    request_that_finds_the_key_expired_is_not_granted,
    lock_overwritten_where_its_key_had_expired_is_lost,
    lock_overwritten_where_its_key_had_expired_does_not_come_back,
    lock_that_was_put_back_reaches_the_replica,
    migrate_serves_the_next,
    reload_ends_waits_with_flushed,
    reload_keeps_the_hold,
    reload_takes_no_hold_for_lost,
    grant_after_a_removal_reaches_the_replica_after_it,
    grant_after_a_removal_is_logged_after_it,
];

/// Alice holds the lock, bob waits for it over a connection, carol in the queue; all can be heard.
struct Scene {
    key: String,
    alice: Conn,
    alice_hears: Subscriber,
    token: u64,
    bob: Conn,
    carol_hears: Subscriber,
}

impl Scene {
    #[track_caller]
    fn new(server: &Server, protocol: Protocol) -> Scene {
        let key = unique_key("lock");
        let (alice_channel, carol_channel) = (unique_key("alice"), unique_key("carol"));
        let mut alice = server.connect(protocol);
        let alice_hears = listener(server, protocol, &alice_channel);
        let carol_hears = listener(server, protocol, &carol_channel);
        let token = hold_with_channel(&mut alice, &key, "alice", &alice_channel);
        let bob = waiter(server, protocol, &key, "bob");
        queue(&mut alice, &key, "carol", &carol_channel);
        Scene { key, alice, alice_hears, token, bob, carol_hears }
    }

    /// A10, C10, L1: alice hears that she has lost the lock, bob and then carol are granted it.
    #[track_caller]
    fn expect_next_served(mut self) {
        let heard = hear(&mut self.alice_hears);
        assert_eq!(heard, Heard::new(lost(self.token, LossReason::Removed), &self.key, "alice"));
        let bobs = self.bob.recv().as_token();
        assert!(bobs > self.token, "{} {bobs}", self.token);
        let check = args!["FLOCK.CHECK", self.key, self.token];
        assert_eq!(self.alice.cmd(&check), Reply::Int(0));
        release(&mut self.bob, &self.key, "bob");
        let carols = hear_grant(&mut self.carol_hears, &self.key, "carol");
        assert!(carols > bobs, "{bobs} {carols}");
    }

    /// A10, C10: alice hears that she has lost the lock, bob and carol that there is nothing to wait for.
    #[track_caller]
    fn expect_wrong_type(mut self) {
        let heard = hear(&mut self.alice_hears);
        assert_eq!(heard, Heard::new(lost(self.token, LossReason::Removed), &self.key, "alice"));
        let reply = self.bob.recv();
        assert_eq!(reply.error_code(), Some("WRONGTYPE"), "{reply}");
        let heard = hear(&mut self.carol_hears);
        assert_eq!(heard, Heard::new(ended(EndReason::WrongType), &self.key, "carol"));
        // And the lock can be had again, above all earlier tokens.
        assert_eq!(self.alice.cmd(&args!["DEL", self.key]), Reply::Int(1));
        assert!(hold(&mut self.alice, &self.key, "dave") > self.token);
    }

    /// A10, C10: alice hears that she has lost the lock, bob and carol that they wait no longer.
    #[track_caller]
    fn expect_flushed(mut self) {
        let heard = hear(&mut self.alice_hears);
        assert_eq!(heard, Heard::new(lost(self.token, LossReason::Flushed), &self.key, "alice"));
        self.expect_waits_flushed();
    }

    #[track_caller]
    fn expect_waits_flushed(&mut self) {
        let reply = self.bob.recv();
        assert_eq!(reply.error_code(), Some("FLUSHED"), "{reply}");
        let heard = hear(&mut self.carol_hears);
        assert_eq!(heard, Heard::new(ended(EndReason::Flushed), &self.key, "carol"));
    }

    /// Servers differ in whether a time to live in the past expires the key or deletes it. Either way the lock is held by exactly one
    /// who knows it.
    #[track_caller]
    fn expect_nobody_asleep(mut self) {
        let check = args!["FLOCK.CHECK", self.key, self.token];
        if self.alice.cmd(&check) == Reply::Int(1) {
            self.expect_nothing_happened();
        } else {
            self.expect_next_served();
        }
    }

    /// Alice holds, bob and carol wait, nobody has heard anything.
    #[track_caller]
    fn expect_nothing_happened(mut self) {
        self.alice_hears.expect_silence(QUIET);
        assert_eq!(holders(&mut self.alice, &self.key), ["alice"]);
        assert_eq!(waiters(&mut self.alice, &self.key), ["bob", "carol"]);
        let check = args!["FLOCK.CHECK", self.key, self.token];
        assert_eq!(self.alice.cmd(&check), Reply::Int(1));
        release(&mut self.alice, &self.key, "alice");
        self.bob.recv().as_token();
    }
}

/// What a test does to the lock with this key.
type Deed = fn(&mut Conn, &str);

#[track_caller]
fn serves_the_next(server: &Server, protocol: Protocol, deed: Deed) {
    let mut scene = Scene::new(server, protocol);
    deed(&mut scene.alice, &scene.key);
    scene.expect_next_served();
}

#[track_caller]
fn ends_with_wrong_type(server: &Server, protocol: Protocol, deed: Deed) {
    let mut scene = Scene::new(server, protocol);
    deed(&mut scene.alice, &scene.key);
    scene.expect_wrong_type();
}

#[track_caller]
fn ends_with_flushed(builder: &Builder, deed: Deed) {
    let server = builder.start();
    let mut scene = Scene::new(&server, Protocol::Resp3);
    deed(&mut scene.alice, &scene.key);
    scene.expect_flushed();
}

fn del_serves_the_next(server: &Server, protocol: Protocol) {
    // A10: an administrator's way out that leaves the waiters asleep.
    serves_the_next(server, protocol, |conn, key| {
        assert_eq!(conn.cmd(&args!["DEL", key]), Reply::Int(1));
    });
}

fn unlink_serves_the_next(server: &Server, protocol: Protocol) {
    // A10: the value may be freed on another thread.
    serves_the_next(server, protocol, |conn, key| {
        assert_eq!(conn.cmd(&args!["UNLINK", key]), Reply::Int(1));
    });
}

fn rename_away_serves_the_next(server: &Server, protocol: Protocol) {
    // A10: the value lives on elsewhere; here the name is free.
    serves_the_next(server, protocol, |conn, key| {
        assert_eq!(conn.cmd(&args!["RENAME", key, unique_key("away")]), Reply::ok());
    });
}

fn renamenx_away_serves_the_next(server: &Server, protocol: Protocol) {
    // A10: as RENAME.
    serves_the_next(server, protocol, |conn, key| {
        assert_eq!(conn.cmd(&args!["RENAMENX", key, unique_key("away")]), Reply::Int(1));
    });
}

fn move_away_serves_the_next(server: &Server, protocol: Protocol) {
    // A10: as RENAME, into another database.
    serves_the_next(server, protocol, |conn, key| {
        assert_eq!(conn.cmd(&args!["MOVE", key, 1]), Reply::Int(1));
    });
}

fn del_in_a_transaction_serves_the_next(server: &Server, protocol: Protocol) {
    // A10: removed in the middle of an execution unit.
    serves_the_next(server, protocol, |conn, key| {
        assert_eq!(transaction(conn, &[&args!["DEL", key]]), [Reply::Int(1)]);
    });
}

fn del_in_a_script_serves_the_next(server: &Server, protocol: Protocol) {
    // A10: as in a transaction.
    serves_the_next(server, protocol, |conn, key| {
        let script = "return server.call('DEL', KEYS[1])";
        assert_eq!(conn.cmd(&args!["EVAL", script, 1, key]), Reply::Int(1));
    });
}

fn del_after_set_in_one_step_serves_the_next(server: &Server, protocol: Protocol) {
    // A10: what counts is what is there afterwards, not what was there for a moment.
    serves_the_next(server, protocol, |conn, key| {
        transaction(conn, &[&args!["SET", key, "value"], &args!["DEL", key]]);
    });
}

fn rename_away_and_back_serves_the_next(server: &Server, protocol: Protocol) {
    // DESIGN 5.8: the value that comes back is nobody's, so the name is free for the next.
    serves_the_next(server, protocol, |conn, key| {
        let away = unique_key("away");
        transaction(conn, &[&args!["RENAME", key, away], &args!["RENAME", away, key]]);
    });
}

fn set_ends_waits_with_wrongtype(server: &Server, protocol: Protocol) {
    // A10: nobody can be granted a lock under this name, perhaps never again.
    ends_with_wrong_type(server, protocol, |conn, key| {
        assert_eq!(conn.cmd(&args!["SET", key, "value"]), Reply::ok());
    });
}

fn set_in_a_transaction_ends_waits_with_wrongtype(server: &Server, protocol: Protocol) {
    // A10.
    ends_with_wrong_type(server, protocol, |conn, key| {
        assert_eq!(transaction(conn, &[&args!["SET", key, "value"]]), [Reply::ok()]);
    });
}

fn rename_of_another_type_onto_the_lock_ends_waits_with_wrongtype(server: &Server, protocol: Protocol) {
    // A10: overwritten under the name of the destination.
    ends_with_wrong_type(server, protocol, |conn, key| {
        let other = unique_key("string");
        conn.cmd(&args!["SET", other, "value"]);
        assert_eq!(conn.cmd(&args!["RENAME", other, key]), Reply::ok());
    });
}

fn copy_of_another_type_onto_the_lock_ends_waits_with_wrongtype(server: &Server, protocol: Protocol) {
    // A10.
    ends_with_wrong_type(server, protocol, |conn, key| {
        let other = unique_key("string");
        conn.cmd(&args!["SET", other, "value"]);
        assert_eq!(conn.cmd(&args!["COPY", other, key, "REPLACE"]), Reply::Int(1));
    });
}

fn store_onto_the_lock_ends_waits_with_wrongtype(server: &Server, protocol: Protocol) {
    // A10: commands that store a result replace whatever is there.
    ends_with_wrong_type(server, protocol, |conn, key| {
        let other = unique_key("set");
        conn.cmd(&args!["SADD", other, "member"]);
        assert_eq!(conn.cmd(&args!["SUNIONSTORE", key, other]), Reply::Int(1));
    });
}

fn restore_of_another_type_onto_the_lock_ends_waits_with_wrongtype(server: &Server, protocol: Protocol) {
    // A10.
    ends_with_wrong_type(server, protocol, |conn, key| {
        let other = unique_key("string");
        conn.cmd(&args!["SET", other, "value"]);
        let dump = conn.cmd(&args!["DUMP", other]);
        let restore = args!["RESTORE", key, 0, dump.as_bytes(), "REPLACE"];
        assert_eq!(conn.cmd(&restore), Reply::ok());
    });
}

fn restored_lock_is_waited_for(server: &Server, protocol: Protocol) {
    // A10: the lock is held again, by somebody else: who waits for its name waits for that.
    let mut scene = Scene::new(server, protocol);
    let dump = dump_of_a_hold(&mut scene.alice, "zoe");
    let restore = args!["RESTORE", scene.key, 0, dump, "REPLACE"];
    assert_eq!(scene.alice.cmd(&restore), Reply::ok());
    let heard = hear(&mut scene.alice_hears);
    assert_eq!(heard, Heard::new(lost(scene.token, LossReason::Removed), &scene.key, "alice"));
    scene.bob.expect_silence(QUIET);
    assert_eq!(waiters(&mut scene.alice, &scene.key), ["bob", "carol"]);
    release(&mut scene.alice, &scene.key, "zoe");
    assert!(scene.bob.recv().as_token() > scene.token);
}

fn restored_lock_is_held_by_its_holder_again(server: &Server, protocol: Protocol) {
    // What is restored is a hold, not only a name: it renews, and ends.
    let mut scene = Scene::new(server, protocol);
    let dump = dump_of_a_hold(&mut scene.alice, "zoe");
    scene.alice.cmd(&args!["RESTORE", scene.key, 0, dump, "REPLACE"]);
    assert_eq!(holders(&mut scene.alice, &scene.key), ["zoe"]);
    let renew = args!["FLOCK.RENEW", scene.key, "zoe", 50];
    assert_eq!(scene.alice.cmd(&renew), Reply::Int(1));
    scene.bob.recv().as_token();
}

fn restored_hold_of_a_waiter_answers_it(server: &Server, protocol: Protocol) {
    // S6: bob waits for a lock that he holds all at once. The same owner again is the same request: it is answered with the token it has.
    let (key, other) = (unique_key("lock"), unique_key("dumped"));
    let mut alice = server.connect(protocol);
    let token = alice.cmd(&args!["FLOCK.ACQUIRE", other, "bob", LEASE_MS, "SHARED"]).as_token();
    let dump = alice.cmd(&args!["DUMP", other]);
    hold(&mut alice, &key, "alice");
    let request = args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "SHARED", "BLOCK", 0];
    let mut bob = waiting(server, protocol, &request);
    let restore = args!["RESTORE", key, 0, dump.as_bytes(), "REPLACE"];
    assert_eq!(alice.cmd(&restore), Reply::ok());
    assert_eq!(bob.recv().as_token(), token);
}

fn rename_of_a_lock_onto_another_serves_both_queues(server: &Server, protocol: Protocol) {
    // A10: the one name is free, and at the other is a value that is nobody's: both can be granted.
    let mut from = Scene::new(server, protocol);
    let onto = Scene::new(server, protocol);
    assert_eq!(from.alice.cmd(&args!["RENAME", from.key, onto.key]), Reply::ok());
    from.expect_next_served();
    onto.expect_next_served();
}

fn commands_for_other_types_are_refused(server: &Server, protocol: Protocol) {
    // A lock is no string: what reads or changes one must not get at it, GETDEL and SET .. GET included.
    let mut scene = Scene::new(server, protocol);
    let key = scene.key.clone();
    for command in [
        args!["GET", key].to_vec(),
        args!["GETDEL", key].to_vec(),
        args!["GETEX", key, "PERSIST"].to_vec(),
        args!["GETSET", key, "value"].to_vec(),
        args!["SET", key, "value", "GET"].to_vec(),
        args!["APPEND", key, "value"].to_vec(),
        args!["LPUSH", key, "value"].to_vec(),
    ] {
        let reply = scene.alice.cmd(&command);
        assert_eq!(reply.error_code(), Some("WRONGTYPE"), "{reply}");
    }
    scene.expect_nothing_happened();
}

fn copy_of_a_lock_is_refused(server: &Server, protocol: Protocol) {
    // S1: a copy would be a second lock with the first one's tokens.
    let mut scene = Scene::new(server, protocol);
    let copy = unique_key("copy");
    let reply = scene.alice.cmd(&args!["COPY", scene.key, copy]);
    assert_eq!(reply.error_code(), Some("ERR"), "{reply}");
    assert_eq!(scene.alice.cmd(&args!["EXISTS", copy]), Reply::Int(0));
    scene.expect_nothing_happened();
}

fn move_of_a_lock_onto_a_key_is_refused(server: &Server, protocol: Protocol) {
    // MOVE replaces nothing; where it fails the lock must be as before.
    let mut scene = Scene::new(server, protocol);
    let mut there = server.connect(protocol);
    there.cmd(&["SELECT", "1"]);
    there.cmd(&args!["SET", scene.key, "value"]);
    assert_eq!(scene.alice.cmd(&args!["MOVE", scene.key, 1]), Reply::Int(0));
    scene.expect_nothing_happened();
}

fn expiry_of_the_key_that_is_taken_back_changes_nothing(server: &Server, protocol: Protocol) {
    // A hold's lease is its own; EXPIRE and PERSIST are about the key.
    let mut scene = Scene::new(server, protocol);
    assert_eq!(scene.alice.cmd(&args!["EXPIRE", scene.key, 100]), Reply::Int(1));
    assert_eq!(scene.alice.cmd(&args!["PERSIST", scene.key]), Reply::Int(1));
    assert!(left_ms(&mut scene.alice, &scene.key, "alice") > 50_000);
    scene.expect_nothing_happened();
}

fn expiry_of_the_key_outlives_no_hold(server: &Server, protocol: Protocol) {
    // C3, E6: an EXPIRE that was meant for one hold must not take the lock from a later one.
    let mut scene = Scene::new(server, protocol);
    assert_eq!(scene.alice.cmd(&args!["PEXPIRE", scene.key, 300]), Reply::Int(1));
    release(&mut scene.alice, &scene.key, "alice");
    let token = scene.bob.recv().as_token();
    release(&mut scene.bob, &scene.key, "bob");
    hear_grant(&mut scene.carol_hears, &scene.key, "carol");
    release(&mut scene.bob, &scene.key, "carol");
    let next = hold(&mut scene.bob, &scene.key, "dave");
    assert!(next > token);
    assert_eq!(scene.bob.cmd(&args!["PTTL", scene.key]), Reply::Int(-1));
}

fn lock_whose_key_expires_is_put_back(server: &Server, protocol: Protocol) {
    // E6, A10: somebody gave the lock's key a time to live. The hold has a lease of its own, which was promised; nobody may hear of a
    // loss, and nobody is left asleep.
    let mut scene = Scene::new(server, protocol);
    expire(&mut scene.alice, &scene.key);
    scene.expect_nothing_happened();
}

fn lock_that_was_put_back_is_handed_over_by_its_release(server: &Server, protocol: Protocol) {
    // L1: the queue must find its way back to the lock.
    let mut scene = Scene::new(server, protocol);
    expire(&mut scene.alice, &scene.key);
    release(&mut scene.alice, &scene.key, "alice");
    assert!(scene.bob.recv().as_token() > scene.token);
    release(&mut scene.bob, &scene.key, "bob");
    hear_grant(&mut scene.carol_hears, &scene.key, "carol");
}

fn lock_that_was_put_back_ends_with_its_lease(server: &Server, protocol: Protocol) {
    // A3: put back with the end it had, which must be armed again.
    let mut scene = Scene::new(server, protocol);
    let renew = args!["FLOCK.RENEW", scene.key, "alice", 400];
    assert_eq!(scene.alice.cmd(&renew), Reply::Int(1));
    expire(&mut scene.alice, &scene.key);
    let heard = hear(&mut scene.alice_hears);
    assert_eq!(heard, Heard::new(lost(scene.token, LossReason::Expired), &scene.key, "alice"));
    assert!(scene.bob.recv().as_token() > scene.token);
}

fn session_that_was_put_back_still_ends_with_its_connection(server: &Server, protocol: Protocol) {
    // C13: put back without its connection, it would last its whole lease.
    let key = unique_key("session");
    let mut alice = server.connect(protocol);
    let request = args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS, "SESSION", 50];
    alice.cmd(&request).as_token();
    let mut conn = server.connect(protocol);
    expire(&mut conn, &key);
    assert_eq!(holders(&mut conn, &key), ["alice"]);
    drop(alice);
    wait_until_free(&mut conn, &key);
}

fn expiry_in_the_past_leaves_nobody_asleep(server: &Server, protocol: Protocol) {
    // A10
    let mut scene = Scene::new(server, protocol);
    assert_eq!(scene.alice.cmd(&args!["EXPIREAT", scene.key, 1]), Reply::Int(1));
    scene.expect_nobody_asleep();
}

fn expiry_in_the_past_of_a_value_that_replaced_the_lock_leaves_nobody_asleep(server: &Server, protocol: Protocol) {
    // A10: what a server calls expired here is a string, in the step in which the lock was deleted.
    let mut scene = Scene::new(server, protocol);
    let key = &scene.key;
    transaction(&mut scene.alice, &[&args!["DEL", key], &args!["SET", key, "value"], &args!["PEXPIREAT", key, 1]]);
    scene.expect_nobody_asleep();
}

fn lock_that_somebody_had_since_is_not_put_back(server: &Server, protocol: Protocol) {
    // S2: the token that would come back is below one that was granted since.
    let (mut conn, key) = (server.connect(protocol), unique_key("since"));
    let token = hold(&mut conn, &key, "alice");
    transaction(
        &mut conn,
        &[
            &args!["DEL", key],
            &args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS],
            &args!["FLOCK.RELEASE", key, "bob"],
            &args!["SET", key, "value"],
            &args!["PEXPIREAT", key, 1],
        ],
    );
    assert!(holders(&mut conn, &key).is_empty());
    assert!(hold(&mut conn, &key, "carol") > token + 1);
}

/// Lets the server expire the key, and waits until the lock is there again, with no time to live.
#[track_caller]
fn expire(conn: &mut Conn, key: &str) {
    assert_eq!(conn.cmd(&args!["PEXPIRE", key, 20]), Reply::Int(1));
    wait_until("the key has expired and the lock is put back", ANSWER_WITHIN, || {
        conn.cmd(&args!["PTTL", key]) == Reply::Int(-1)
    });
}

fn value_renamed_away_is_nobodys(server: &Server, protocol: Protocol) {
    // DESIGN 5.8, S1: the hold has ended; carried along it would be a lock under a name that nobody locked.
    let (key, away) = (unique_key("lock"), unique_key("away"));
    let mut alice = server.connect(protocol);
    let token = hold(&mut alice, &key, "alice");
    assert_eq!(alice.cmd(&args!["RENAME", key, away]), Reply::ok());
    assert_eq!(alice.cmd(&args!["FLOCK.CHECK", away, token]), Reply::Int(0));
    assert_eq!(alice.cmd(&args!["FLOCK.RELEASE", away, "alice"]), Reply::Int(0));
    assert_eq!(alice.cmd(&args!["FLOCK.RENEW", away, "alice", LEASE_MS]), Reply::Int(0));
    assert!(holders(&mut alice, &away).is_empty());
}

fn value_renamed_away_becomes_the_next_holders(server: &Server, protocol: Protocol) {
    // DESIGN 5.8: the next ACQUIRE there reuses it, and it is then a lock like any other.
    let (key, away) = (unique_key("lock"), unique_key("away"));
    let mut alice = server.connect(protocol);
    let token = hold(&mut alice, &key, "alice");
    assert_eq!(alice.cmd(&args!["RENAME", key, away]), Reply::ok());
    assert!(hold(&mut alice, &away, "bob") > token);
    let mut carol = waiter(server, protocol, &away, "carol");
    release(&mut alice, &away, "bob");
    carol.recv().as_token();
    release(&mut carol, &away, "carol");
    assert_eq!(alice.cmd(&args!["EXISTS", away]), Reply::Int(0));
}

fn value_moved_away_is_nobodys(server: &Server, protocol: Protocol) {
    // DESIGN 5.8: as renamed, with the same name in another database.
    let key = unique_key("lock");
    let mut alice = server.connect(protocol);
    let token = hold(&mut alice, &key, "alice");
    assert_eq!(alice.cmd(&args!["MOVE", key, 1]), Reply::Int(1));
    alice.cmd(&["SELECT", "1"]);
    assert_eq!(alice.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(0));
    assert!(hold(&mut alice, &key, "bob") > token);
}

fn newcomer_in_the_same_step_as_a_del_waits_its_turn(server: &Server, protocol: Protocol) {
    // A9: between the DEL and the handoff is a moment in which the key is free and a queue exists.
    let (key, mut alice) = held_by_alice(server, protocol, "barge");
    let mut bob = waiter(server, protocol, &key, "bob");
    let replies = transaction(&mut alice, &[&args!["DEL", key], &args!["FLOCK.ACQUIRE", key, "newcomer", LEASE_MS]]);
    assert_eq!(replies, [Reply::Int(1), Reply::Nil]);
    bob.recv().as_token();
}

fn queued_requests_of_readers_are_served_together_after_a_del(server: &Server, protocol: Protocol) {
    // S8: a handoff like any other.
    let (key, mut alice) = held_by_alice(server, protocol, "readers");
    let mut readers = ["reader 1", "reader 2"].map(|owner| {
        let request = args!["FLOCK.ACQUIRE", key, owner, LEASE_MS, "SHARED", "BLOCK", 0];
        waiting(server, protocol, &request)
    });
    assert_eq!(alice.cmd(&args!["DEL", key]), Reply::Int(1));
    for reader in &mut readers {
        reader.recv().as_token();
    }
}

fn holder_that_comes_back_after_a_del_is_granted_anew(server: &Server, protocol: Protocol) {
    // S2, S4: the hold is gone for good. The same owner again is a new acquisition with a token of its own.
    let key = unique_key("anew");
    let mut alice = server.connect(protocol);
    let token = hold(&mut alice, &key, "alice");
    assert_eq!(alice.cmd(&args!["DEL", key]), Reply::Int(1));
    assert_eq!(alice.cmd(&args!["FLOCK.RENEW", key, "alice", LEASE_MS]), Reply::Int(0));
    assert!(hold(&mut alice, &key, "alice") > token);
}

fn flushdb_ends_waits_with_flushed(builder: Builder) {
    // A10: a flush tells of no key.
    ends_with_flushed(&builder, |conn, _| assert_eq!(conn.cmd(&["FLUSHDB"]), Reply::ok()));
}

fn flushdb_sync_ends_waits_with_flushed(builder: Builder) {
    // A10.
    ends_with_flushed(&builder, |conn, _| {
        assert_eq!(conn.cmd(&["FLUSHDB", "SYNC"]), Reply::ok());
    });
}

fn flushdb_async_ends_waits_with_flushed(builder: Builder) {
    // A10: the values are freed later, on another thread.
    ends_with_flushed(&builder, |conn, _| {
        assert_eq!(conn.cmd(&["FLUSHDB", "ASYNC"]), Reply::ok());
    });
}

fn flushall_sync_ends_waits_with_flushed(builder: Builder) {
    // A10.
    ends_with_flushed(&builder, |conn, _| {
        assert_eq!(conn.cmd(&["FLUSHALL", "SYNC"]), Reply::ok());
    });
}

fn flushall_async_ends_waits_with_flushed(builder: Builder) {
    // A10.
    ends_with_flushed(&builder, |conn, _| {
        assert_eq!(conn.cmd(&["FLUSHALL", "ASYNC"]), Reply::ok());
    });
}

fn flush_in_a_transaction_ends_waits_with_flushed(builder: Builder) {
    // A10.
    ends_with_flushed(&builder, |conn, _| {
        assert_eq!(transaction(conn, &[&args!["FLUSHALL"]]), [Reply::ok()]);
    });
}

fn flushdb_of_another_database_changes_nothing(builder: Builder) {
    // A flush of one database, taken for a flush of all.
    let server = builder.start();
    let scene = Scene::new(&server, Protocol::Resp3);
    let mut there = server.connect(Protocol::Resp3);
    there.cmd(&["SELECT", "1"]);
    hold(&mut there, &scene.key, "zoe");
    assert_eq!(there.cmd(&["FLUSHDB"]), Reply::ok());
    assert!(holders(&mut there, &scene.key).is_empty());
    scene.expect_nothing_happened();
}

fn flush_and_a_new_request_in_one_step_grants_it(builder: Builder) {
    // The places in the queue are gone, so the newcomer is the next.
    let server = builder.start();
    let mut scene = Scene::new(&server, Protocol::Resp3);
    let request = args!["FLOCK.ACQUIRE", scene.key, "newcomer", LEASE_MS];
    let replies = transaction(&mut scene.alice, &[&args!["FLUSHDB"], &request]);
    assert!(replies[1].as_token() > scene.token);
    scene.expect_waits_flushed();
}

fn tokens_rise_over_a_flush(builder: Builder) {
    // S2: no key is left from which the counter could be read again.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp3);
    let mut last = 0;
    for command in ["FLUSHALL", "FLUSHDB", "FLUSHALL"] {
        let token = hold(&mut conn, "k", "alice");
        assert!(token > last, "{last} {token}");
        last = token;
        assert_eq!(conn.cmd(&[command]), Reply::ok());
    }
    assert!(hold(&mut conn, "another", "alice") > last);
}

fn names_can_be_locked_again_and_again_between_asynchronous_flushes(builder: Builder) {
    // S12: values of one round are freed by another thread while the next round makes new ones: a lock's number that is used again too early
    // would be freed under its new holder.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp3);
    for _ in 0..20 {
        for number in 0..200 {
            conn.send(&args!["FLOCK.ACQUIRE", format!("k{number}"), "alice", LEASE_MS]);
        }
        let tokens: Vec<_> = (0..200).map(|_| conn.recv().as_token()).collect();
        for (number, token) in tokens.iter().enumerate() {
            conn.send(&args!["FLOCK.CHECK", format!("k{number}"), token]);
        }
        for _ in &tokens {
            assert_eq!(conn.recv(), Reply::Int(1));
        }
        assert_eq!(conn.cmd(&["FLUSHALL", "ASYNC"]), Reply::ok());
    }
    let held = server.info("flock").number("flock_held");
    assert_eq!(held, 0);
}

fn swapdb_serves_who_waits_for_a_name_that_is_free_now(builder: Builder) {
    // A10: the lock has gone to the other database; here the name is free.
    let server = builder.start();
    let mut scene = Scene::new(&server, Protocol::Resp3);
    assert_eq!(scene.alice.cmd(&["SWAPDB", "0", "1"]), Reply::ok());
    assert!(scene.bob.recv().as_token() > scene.token);
    release(&mut scene.bob, &scene.key, "bob");
    hear_grant(&mut scene.carol_hears, &scene.key, "carol");
}

fn swapdb_lets_wait_for_the_lock_that_came(builder: Builder) {
    // A10: the queue belongs to a name in a database, not to the lock that was there.
    let server = builder.start();
    let mut scene = Scene::new(&server, Protocol::Resp3);
    let mut there = server.connect(Protocol::Resp3);
    there.cmd(&["SELECT", "1"]);
    hold(&mut there, &scene.key, "zoe");
    assert_eq!(scene.alice.cmd(&["SWAPDB", "0", "1"]), Reply::ok());
    scene.bob.expect_silence(QUIET);
    assert_eq!(holders(&mut scene.alice, &scene.key), ["zoe"]);
    assert_eq!(waiters(&mut scene.alice, &scene.key), ["bob", "carol"]);
    release(&mut scene.alice, &scene.key, "zoe");
    scene.bob.recv().as_token();
}

fn swapdb_takes_the_hold_along(builder: Builder) {
    // The data have moved, and a lock is data: its holder finds it in the other database.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp3);
    let token = hold(&mut conn, "k", "alice");
    assert_eq!(conn.cmd(&["SWAPDB", "0", "1"]), Reply::ok());
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(0));
    conn.cmd(&["SELECT", "1"]);
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(1));
    release(&mut conn, "k", "alice");
}

fn swapdb_tells_no_holder(builder: Builder) {
    // Nothing is lost.
    let server = builder.start();
    let mut scene = Scene::new(&server, Protocol::Resp3);
    assert_eq!(scene.alice.cmd(&["SWAPDB", "0", "1"]), Reply::ok());
    scene.bob.recv().as_token();
    scene.alice_hears.expect_silence(QUIET);
}

fn lease_of_a_swapped_lock_ends_in_its_new_database(builder: Builder) {
    // A3: a deadline that still names the old database ends nothing, or somebody else's hold.
    let server = builder.start();
    let (mut here, mut there) = (server.connect(Protocol::Resp3), server.connect(Protocol::Resp3));
    there.cmd(&["SELECT", "1"]);
    here.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 200]).as_token();
    hold(&mut there, "k", "zoe");
    assert_eq!(here.cmd(&["SWAPDB", "0", "1"]), Reply::ok());
    wait_until("alice's lease has ended", ANSWER_WITHIN, || there.cmd(&["EXISTS", "k"]) == Reply::Int(0));
    assert_eq!(holders(&mut here, "k"), ["zoe"]);
}

fn swapdb_with_another_type_ends_waits_with_wrongtype(builder: Builder) {
    // A10: what came under the name is no lock.
    let server = builder.start();
    let mut scene = Scene::new(&server, Protocol::Resp3);
    let mut there = server.connect(Protocol::Resp3);
    there.cmd(&["SELECT", "1"]);
    there.cmd(&args!["SET", scene.key, "value"]);
    assert_eq!(scene.alice.cmd(&["SWAPDB", "0", "1"]), Reply::ok());
    let reply = scene.bob.recv();
    assert_eq!(reply.error_code(), Some("WRONGTYPE"), "{reply}");
    let heard = hear(&mut scene.carol_hears);
    assert_eq!(heard, Heard::new(ended(EndReason::WrongType), &scene.key, "carol"));
}

fn locks_overwritten_while_the_keyspace_grows_leave_what_was_written(builder: Builder) {
    // The server keeps a pointer to the old value's place while it tells the module; and a growing keyspace moves values about.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let mut random = Random::new();
    for round in 0..40 {
        conn.cmd(&["FLUSHALL"]);
        let mut held = Vec::new();
        for n in 0..250 {
            let key = format!("lock {round} {n}");
            assert!(matches!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS]), Reply::Int(_)));
            held.push(key);
            if n % 2 == 0 {
                let key = held.swap_remove(usize::try_from(random.below(held.len() as u64)).unwrap());
                assert_eq!(conn.cmd(&["SET", &key, &key]), Reply::ok());
                assert_eq!(conn.cmd(&["GET", &key]), Reply::bulk(&key));
            }
        }
        assert_eq!(conn.cmd(&["DBSIZE"]), Reply::Int(250));
    }
}

fn lock_whose_key_is_evicted_is_put_back(builder: Builder) {
    // E6: eviction removes locks. The server may be told to evict any key; a holder was promised its lease all the same.
    let server = builder.start();
    let mut scene = Scene::new(&server, Protocol::Resp3);
    for (name, value) in [("maxmemory-policy", "allkeys-random"), ("maxmemory", "1")] {
        assert_eq!(scene.alice.cmd(&["CONFIG", "SET", name, value]), Reply::ok());
    }
    // Any command makes the server look at its memory.
    scene.alice.cmd(&["PING"]);
    wait_until("the server has evicted the key", ANSWER_WITHIN, || server.info("stats").number("evicted_keys") > 0);
    assert_eq!(scene.alice.cmd(&["CONFIG", "SET", "maxmemory", "0"]), Reply::ok());
    scene.expect_nothing_happened();
}

/// A server that deletes no expired key before somebody asks for it, and a lock held there by alice whose key has expired.
#[track_caller]
fn found_expired(builder: &Builder) -> (Server, Conn, u64) {
    let server = builder.start();
    let mut alice = server.connect(Protocol::Resp3);
    assert_eq!(alice.cmd(&["DEBUG", "SET-ACTIVE-EXPIRE", "0"]), Reply::ok());
    let token = hold(&mut alice, "k", "alice");
    assert_eq!(alice.cmd(&["PEXPIRE", "k", "1"]), Reply::Int(1));
    let_pass(Duration::from_millis(10));
    (server, alice, token)
}

fn check_that_finds_the_key_expired_knows_the_hold(builder: Builder) {
    // E6: the storage would refuse a holder that has the lock.
    let (_server, mut alice, token) = found_expired(&builder);
    assert_eq!(alice.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(1));
}

fn info_that_finds_the_key_expired_knows_the_hold(builder: Builder) {
    // E6: "nobody holds it" would be a lie.
    let (_server, mut alice, _) = found_expired(&builder);
    assert_eq!(holders(&mut alice, "k"), ["alice"]);
}

fn renewal_that_finds_the_key_expired_renews_the_hold(builder: Builder) {
    // E6: a refused renewal is final for a client.
    let (_server, mut alice, token) = found_expired(&builder);
    let renew = args!["FLOCK.RENEW", "k", "alice", LEASE_MS, "TOKEN", token];
    assert_eq!(alice.cmd(&renew), Reply::Int(1));
}

fn request_that_finds_the_key_expired_is_not_granted(builder: Builder) {
    // E6, S1: this very request has deleted the key, by looking for it.
    let (_server, mut alice, token) = found_expired(&builder);
    assert_eq!(alice.cmd(&args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS]), Reply::Nil);
    assert_eq!(alice.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(1));
}

fn lock_overwritten_where_its_key_had_expired_is_lost(builder: Builder) {
    // E6, C10: SET finds the key expired, deletes it for that, and puts a string there. The lock cannot be put back, so its holder has
    // lost it, and must hear so.
    let server = builder.start();
    let mut scene = Scene::new(&server, Protocol::Resp3);
    assert_eq!(scene.alice.cmd(&["DEBUG", "SET-ACTIVE-EXPIRE", "0"]), Reply::ok());
    assert_eq!(scene.alice.cmd(&args!["PEXPIRE", scene.key, 1]), Reply::Int(1));
    let_pass(Duration::from_millis(10));
    assert_eq!(scene.alice.cmd(&args!["SET", scene.key, "value"]), Reply::ok());
    scene.expect_wrong_type();
}

fn lock_overwritten_where_its_key_had_expired_does_not_come_back(builder: Builder) {
    // E6, S4: as above; once the string is gone the name is free.
    let (_server, mut alice, token) = found_expired(&builder);
    assert_eq!(alice.cmd(&["SET", "k", "value"]), Reply::ok());
    assert_eq!(alice.cmd(&["DEL", "k"]), Reply::Int(1));
    let reply = alice.cmd(&args!["FLOCK.ACQUIRE", "k", "dave", LEASE_MS]);
    assert!(matches!(reply, Reply::Int(_)), "dave is not granted a free lock: {reply}");
    assert!(reply.as_token() > token);
}

fn lock_that_was_put_back_reaches_the_replica(builder: Builder) {
    // S10: the replica has the expiry too, and hears of the deletion; the lock must come after both.
    let servers = Replicated::start(&builder, 1);
    let mut alice = servers.primary.connect(Protocol::Resp3);
    let token = hold(&mut alice, "k", "alice");
    assert_eq!(alice.cmd(&["PEXPIRE", "k", "20"]), Reply::Int(1));
    wait_until("the lock is put back", ANSWER_WITHIN, || alice.cmd(&["PTTL", "k"]) == Reply::Int(-1));
    servers.wait_in_step();
    let mut replica = servers.replicas[0].connect(Protocol::Resp3);
    let info = replica.cmd(&["FLOCK.INFO", "k"]);
    assert!(!info.is_nil(), "the replica has no lock");
    assert_eq!(info.field("holders").as_array()[0].field("token").as_token(), token);
    assert_eq!(replica.cmd(&["PTTL", "k"]), Reply::Int(-1));
}

fn migrate_serves_the_next(builder: Builder) {
    // A10: the lock has gone to another server.
    let (server, other) = (builder.start(), builder.start());
    let mut scene = Scene::new(&server, Protocol::Resp3);
    let migrate = args!["MIGRATE", "127.0.0.1", other.port(), scene.key, 0, 5000];
    assert_eq!(scene.alice.cmd(&migrate), Reply::ok());
    scene.expect_next_served();
}

fn reload_ends_waits_with_flushed(builder: Builder) {
    // A10: a reload empties the data set first, and a queue is no data.
    let server = builder.start();
    let mut scene = Scene::new(&server, Protocol::Resp3);
    assert_eq!(scene.alice.cmd(&["DEBUG", "RELOAD"]), Reply::ok());
    scene.expect_waits_flushed();
}

fn reload_keeps_the_hold(builder: Builder) {
    // S11: the same hold, token and end, and who asks anew waits for it.
    let server = builder.start();
    let mut scene = Scene::new(&server, Protocol::Resp3);
    let renew = args!["FLOCK.RENEW", scene.key, "alice", 400];
    assert_eq!(scene.alice.cmd(&renew), Reply::Int(1));
    assert_eq!(scene.alice.cmd(&["DEBUG", "RELOAD"]), Reply::ok());
    let check = args!["FLOCK.CHECK", scene.key, scene.token];
    assert_eq!(scene.alice.cmd(&check), Reply::Int(1));
    let mut dave = waiter(&server, Protocol::Resp3, &scene.key, "dave");
    dave.expect_silence(QUIET);
    assert!(dave.recv().as_token() > scene.token);
}

fn reload_takes_no_hold_for_lost(builder: Builder) {
    // C10: a holder that hears of a loss stops working; here it holds the lock all the while.
    let server = builder.start();
    let mut scene = Scene::new(&server, Protocol::Resp3);
    assert_eq!(scene.alice.cmd(&["DEBUG", "RELOAD"]), Reply::ok());
    let check = args!["FLOCK.CHECK", scene.key, scene.token];
    assert_eq!(scene.alice.cmd(&check), Reply::Int(1));
    scene.alice_hears.expect_silence(Duration::from_millis(100));
}

/// Every way in which a key goes, or changes hands, by a command that knows nothing of locks; the key is free afterwards.
const REMOVALS: [&[&str]; 4] = [&["DEL", "k"], &["UNLINK", "k"], &["RENAME", "k", "away"], &["MOVE", "k", "1"]];

fn grant_after_a_removal_reaches_the_replica_after_it(builder: Builder) {
    // S10: replicated before the removal, the grant would be removed by it on the replica.
    let servers = Replicated::start(&builder, 1);
    let mut admin = servers.primary.connect(Protocol::Resp3);
    let mut replica = servers.replicas[0].connect(Protocol::Resp3);
    for removal in REMOVALS {
        let token = next_granted_after(&servers.primary, &mut admin, removal);
        servers.wait_in_step();
        let info = replica.cmd(&["FLOCK.INFO", "k"]);
        assert!(!info.is_nil(), "{removal:?}: the replica has no lock");
        let holder = &info.field("holders").as_array()[0];
        assert_eq!(holder.field("token").as_token(), token, "{removal:?}");
        admin.cmd(&["FLUSHALL"]);
    }
}

fn grant_after_a_removal_is_logged_after_it(builder: Builder) {
    // S11: as above, for the append-only file.
    let server = builder.appendonly().start();
    let mut admin = server.connect(Protocol::Resp3);
    for removal in REMOVALS {
        let token = next_granted_after(&server, &mut admin, removal);
        assert_eq!(admin.cmd(&["DEBUG", "LOADAOF"]), Reply::ok());
        assert_eq!(admin.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(1), "{removal:?}");
        admin.cmd(&["FLUSHALL"]);
    }
}

/// Alice holds `k`, bob waits for it, `removal` is done: answers bob's token.
#[track_caller]
fn next_granted_after(server: &Server, admin: &mut Conn, removal: &[&str]) -> u64 {
    hold(admin, "k", "alice");
    let mut bob = waiter(server, Protocol::Resp3, "k", "bob");
    let reply = admin.cmd(removal);
    assert_eq!(reply.error_code(), None, "{reply}");
    bob.recv().as_token()
}

/// The serialised value of a lock that `owner` held for a moment, under another name.
#[track_caller]
fn dump_of_a_hold(conn: &mut Conn, owner: &str) -> Vec<u8> {
    let key = unique_key("dumped");
    hold(conn, &key, owner);
    let dump = conn.cmd(&args!["DUMP", key]).as_bytes().to_vec();
    release(conn, &key, owner);
    dump
}
