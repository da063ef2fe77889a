//! ACQUIRE BLOCK: a request that waits in the server, and everything that can end it.

use std::time::{Duration, Instant};

use flock_tests::args::encode;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Protocol};
use flock_tests::server::{Builder, Server, unique_key};
use flock_tests::topology::{Replicated, demote, fail_over};
use flock_tests::wait::let_pass;
use flock_tests::{args, on_own_servers, on_shared_servers};

use crate::lock_view::{holders, waiters, waiting};
use crate::scene::{
    HANDOFF_WITHIN, LEASE_MS, QUIET, held_by_alice, hold, listener, release, transaction, wait_until_free, waiter,
};

on_shared_servers![
    // Served in turn.
    release_hands_over_to_the_waiter,
    handoff_does_not_wait_for_a_lease,
    waiters_are_granted_in_the_order_they_came,
    revoke_hands_over_to_the_waiter,
    renewal_wakes_nobody,
    request_of_the_releaser_in_the_same_step_goes_behind_the_queue,
    plain_try_does_not_overtake_a_queue,
    shared_request_waits_behind_a_waiting_writer,
    adjacent_shared_waiters_are_granted_together,
    semaphore_hands_over_one_place_at_a_time,
    conversion_to_shared_grants_readers_up_to_the_next_writer,
    reentrant_waiter_is_granted_with_its_id,
    waits_in_two_databases_are_apart,
    lease_of_a_waiter_starts_at_its_grant,
    lock_of_a_waiter_with_a_channel_is_told_by_its_reply_only,
    release_at_every_byte_of_the_request_is_never_missed,
    // Where it cannot wait.
    block_in_a_transaction_is_a_plain_try,
    block_in_a_script_is_a_plain_try,
    block_on_a_subscribed_connection_is_refused,
    block_after_unsubscribing_waits,
    // The connection itself.
    commands_behind_a_wait_are_answered_after_it,
    waits_pipelined_on_one_connection_are_served_in_turn,
    release_pipelined_behind_its_own_wait_is_performed_after_it,
    reset_behind_a_wait_is_performed_after_it,
    reset_by_a_holder_keeps_its_hold,
    silenced_waiter_is_granted_without_a_word,
    // How a wait ends without a grant.
    wait_without_limit_outlasts_a_limited_one,
    timed_out_waiter_is_answered_nil_and_leaves,
    client_unblock_answers_nil,
    client_unblock_timeout_answers_nil,
    client_unblock_error_answers_unblocked,
    cancelled_waiter_is_answered_cancelled,
    release_with_a_token_does_not_cancel_a_wait,
    leaving_writer_lets_readers_behind_it_in,
];

on_own_servers![
    wait_without_limit_outlasts_the_longest_allowed_wait,
    module_with_waiters_is_not_unloaded,
    lease_that_ends_in_a_write_pause_is_handed_over_after_it,
    wait_that_ends_in_a_pause_is_answered_after_it,
    client_unblock_works_in_a_write_pause,
    waiter_that_closes_in_a_pause_is_gone_after_it,
    shutdown_closes_waiters,
    shutdown_that_is_given_up_hands_over_what_fell_due,
    replicas_are_counted_for_a_grant_that_was_waited_for,
    leases_that_end_while_a_shutdown_waits_for_replicas_do_no_harm,
    demotion_ends_waits_with_unblocked,
    failover_ends_waits_with_unblocked,
];

fn release_hands_over_to_the_waiter(server: &Server, protocol: Protocol) {
    // A2, A3: a waiter that is not told sleeps until the lease is over.
    let key = unique_key("handover");
    let mut alice = server.connect(protocol);
    let first = hold(&mut alice, &key, "alice");
    let mut bob = waiter(server, protocol, &key, "bob");
    release(&mut alice, &key, "alice");
    let second = bob.recv().as_token();
    assert!(second > first, "{first} {second}");
}

fn handoff_does_not_wait_for_a_lease(server: &Server, protocol: Protocol) {
    // A2: a missed wake-up shows as a stall until some poll. Thirty handoffs to and fro, each far below the lease.
    let key = unique_key("pingpong");
    let (mut holder, mut next) = (server.connect(protocol), server.connect(protocol));
    hold(&mut holder, &key, "owner 0");
    for round in 0..30 {
        let owner = format!("owner {}", round + 1);
        next.send(&args!["FLOCK.ACQUIRE", key, owner, LEASE_MS, "BLOCK", 0]);
        server.wait_until_blocked(&next);
        let start = Instant::now();
        release(&mut holder, &key, &format!("owner {round}"));
        next.recv().as_token();
        assert!(start.elapsed() < HANDOFF_WITHIN, "round {round} took {:?}", start.elapsed());
        std::mem::swap(&mut holder, &mut next);
    }
}

fn waiters_are_granted_in_the_order_they_came(server: &Server, protocol: Protocol) {
    // A6, S9: a queue that is a set, or a stack, serves somebody else first.
    let key = unique_key("fifo");
    let mut alice = server.connect(protocol);
    let mut last = hold(&mut alice, &key, "alice");
    let owners = ["bob", "carol", "dave", "erin"];
    let mut conns: Vec<_> = owners.iter().map(|owner| waiter(server, protocol, &key, owner)).collect();
    assert_eq!(waiters(&mut alice, &key), owners);
    release(&mut alice, &key, "alice");
    for (conn, owner) in conns.iter_mut().zip(owners) {
        let token = conn.recv().as_token();
        assert!(token > last, "{last} {token}");
        last = token;
        release(conn, &key, owner);
    }
}

fn revoke_hands_over_to_the_waiter(server: &Server, protocol: Protocol) {
    // A10: an administrator's reset that leaves the waiters asleep.
    let (key, mut alice) = held_by_alice(server, protocol, "revoke");
    let mut bob = waiter(server, protocol, &key, "bob");
    assert_eq!(alice.cmd(&args!["FLOCK.REVOKE", key]), Reply::Int(1));
    bob.recv().as_token();
}

fn renewal_wakes_nobody(server: &Server, protocol: Protocol) {
    // B14: a renewal that runs the release's code.
    let (key, mut alice) = held_by_alice(server, protocol, "renew");
    let mut bob = waiter(server, protocol, &key, "bob");
    assert_eq!(alice.cmd(&args!["FLOCK.RENEW", key, "alice", LEASE_MS]), Reply::Int(1));
    bob.expect_silence(QUIET);
}

fn request_of_the_releaser_in_the_same_step_goes_behind_the_queue(server: &Server, protocol: Protocol) {
    // A9: a handoff that only wakes the waiter lets whoever comes first barge in; here nobody can be faster.
    let (key, mut alice) = held_by_alice(server, protocol, "barge");
    let mut bob = waiter(server, protocol, &key, "bob");
    let replies = transaction(
        &mut alice,
        &[&args!["FLOCK.RELEASE", key, "alice"], &args!["FLOCK.ACQUIRE", key, "alice again", LEASE_MS]],
    );
    assert_eq!(replies, [Reply::Int(1), Reply::Nil]);
    bob.recv().as_token();
}

fn plain_try_does_not_overtake_a_queue(server: &Server, protocol: Protocol) {
    // A9, D7: readers that are let past a waiting writer starve it.
    let key = unique_key("overtake");
    let mut alice = server.connect(protocol);
    alice.cmd(&args!["FLOCK.ACQUIRE", key, "reader", LEASE_MS, "SHARED"]).as_token();
    let _writer = waiter(server, protocol, &key, "writer");
    let reply = alice.cmd(&args!["FLOCK.ACQUIRE", key, "reader 2", LEASE_MS, "SHARED"]);
    assert_eq!(reply, Reply::Nil);
}

fn shared_request_waits_behind_a_waiting_writer(server: &Server, protocol: Protocol) {
    // D7: as above, for a reader that may wait: it is served after the writer, not before.
    let key = unique_key("writer first");
    let mut alice = server.connect(protocol);
    alice.cmd(&args!["FLOCK.ACQUIRE", key, "reader", LEASE_MS, "SHARED"]).as_token();
    let mut writer = waiter(server, protocol, &key, "writer");
    let mut reader =
        waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "reader 2", LEASE_MS, "SHARED", "BLOCK", 0]);
    release(&mut alice, &key, "reader");
    let written = writer.recv().as_token();
    reader.expect_silence(QUIET);
    release(&mut writer, &key, "writer");
    assert!(reader.recv().as_token() > written);
}

fn adjacent_shared_waiters_are_granted_together(server: &Server, protocol: Protocol) {
    // S8: readers granted one by one would each wait for the one before; readers behind the next writer must stay.
    let (key, mut alice) = held_by_alice(server, protocol, "together");
    let reader = |owner: &str| {
        let request = args!["FLOCK.ACQUIRE", key, owner, LEASE_MS, "SHARED", "BLOCK", 0];
        waiting(server, protocol, &request)
    };
    let _first = reader("reader 1");
    let _second = reader("reader 2");
    let _writer = waiter(server, protocol, &key, "writer");
    let _third = reader("reader 3");
    release(&mut alice, &key, "alice");
    assert_eq!(holders(&mut alice, &key), ["reader 1", "reader 2"]);
    assert_eq!(waiters(&mut alice, &key), ["writer", "reader 3"]);
}

fn semaphore_hands_over_one_place_at_a_time(server: &Server, protocol: Protocol) {
    // A17: a place given back lets exactly one in.
    let key = unique_key("semaphore");
    let mut alice = server.connect(protocol);
    for owner in ["one", "two"] {
        let request = args!["FLOCK.ACQUIRE", key, owner, LEASE_MS, "SHARED", "LIMIT", 2];
        alice.cmd(&request).as_token();
    }
    let places = ["three", "four"].map(|owner| {
        let request = args!["FLOCK.ACQUIRE", key, owner, LEASE_MS, "SHARED", "LIMIT", 2, "BLOCK", 0];
        waiting(server, protocol, &request)
    });
    release(&mut alice, &key, "one");
    assert_eq!(holders(&mut alice, &key), ["two", "three"]);
    assert_eq!(waiters(&mut alice, &key), ["four"]);
    drop(places);
}

fn conversion_to_shared_grants_readers_up_to_the_next_writer(server: &Server, protocol: Protocol) {
    // D4, S8: a conversion makes room without any release.
    let key = unique_key("convert");
    let mut alice = server.connect(protocol);
    let token = hold(&mut alice, &key, "alice");
    let request = args!["FLOCK.ACQUIRE", key, "reader", LEASE_MS, "SHARED", "BLOCK", 0];
    let mut reader = waiting(server, protocol, &request);
    let _writer = waiter(server, protocol, &key, "writer");
    let convert = args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS, "SHARED", "CONVERT", token];
    assert_eq!(alice.cmd(&convert).as_token(), token);
    reader.recv().as_token();
    assert_eq!(waiters(&mut alice, &key), ["writer"]);
}

fn reentrant_waiter_is_granted_with_its_id(server: &Server, protocol: Protocol) {
    // S7: the id must survive the queue, or the release by it finds nothing.
    let (key, mut alice) = held_by_alice(server, protocol, "reentrant");
    let request = args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "REENTRANT", "call 1", "BLOCK", 0];
    let mut bob = waiting(server, protocol, &request);
    release(&mut alice, &key, "alice");
    bob.recv().as_token();
    assert_eq!(bob.cmd(&args!["FLOCK.RELEASE", key, "bob", "ID", "call 1"]), Reply::Int(1));
    wait_until_free(&mut bob, &key);
}

fn waits_in_two_databases_are_apart(server: &Server, protocol: Protocol) {
    // A name is a name in one database: a release in another one must wake nobody.
    let key = unique_key("database");
    let mut here = server.connect(protocol);
    let mut there = server.connect(protocol);
    assert_eq!(there.cmd(&["SELECT", "1"]), Reply::ok());
    hold(&mut here, &key, "alice");
    hold(&mut there, &key, "alice");
    let mut bob = waiter(server, protocol, &key, "bob");
    release(&mut there, &key, "alice");
    bob.expect_silence(QUIET);
    release(&mut here, &key, "alice");
    bob.recv().as_token();
}

fn lease_of_a_waiter_starts_at_its_grant(server: &Server, protocol: Protocol) {
    // B13: time spent waiting must not be taken off the lease. What is left and what was held make the whole, at any moment.
    let (key, mut alice) = held_by_alice(server, protocol, "lease");
    let mut bob = waiter(server, protocol, &key, "bob");
    let_pass(Duration::from_millis(100));
    release(&mut alice, &key, "alice");
    bob.recv().as_token();
    let info = bob.cmd(&args!["FLOCK.INFO", key]);
    let hold = &info.field("holders").as_array()[0];
    let whole = hold.field("left_ms").as_int() + hold.field("held_ms").as_int();
    // Both are cut to whole milliseconds.
    assert!((59_998..=60_001).contains(&whole), "{whole}");
}

fn lock_of_a_waiter_with_a_channel_is_told_by_its_reply_only(server: &Server, protocol: Protocol) {
    // A grant told twice would be taken for two.
    let key = unique_key("once");
    let channel = unique_key("channel");
    let mut ears = listener(server, protocol, &channel);
    let mut alice = server.connect(protocol);
    hold(&mut alice, &key, "alice");
    let request = args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "BLOCK", 0, "CHANNEL", channel];
    let mut bob = waiting(server, protocol, &request);
    release(&mut alice, &key, "alice");
    bob.recv().as_token();
    ears.expect_silence(QUIET);
}

fn release_at_every_byte_of_the_request_is_never_missed(server: &Server, protocol: Protocol) {
    // A1: the release comes between the failed try and the wait. The request is cut at every byte, and the lock released there.
    let (mut alice, mut bob) = (server.connect(protocol), server.connect(protocol));
    let length = encode(&args!["FLOCK.ACQUIRE", unique_key("cut"), "bob", LEASE_MS, "BLOCK", 0]).len();
    for cut in 0..=length {
        let key = unique_key("cut");
        let request = encode(&args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "BLOCK", 0]);
        let (head, tail) = request.split_at(cut.min(request.len()));
        hold(&mut alice, &key, "alice");
        bob.send_bytes(head);
        // Not waiting for the reply: the release and the rest of the request are under way at the same time.
        alice.send(&args!["FLOCK.RELEASE", key, "alice"]);
        bob.send_bytes(tail);
        bob.recv().as_token();
        assert_eq!(alice.recv(), Reply::Int(1));
        release(&mut bob, &key, "bob");
    }
}

fn block_in_a_transaction_is_a_plain_try(server: &Server, protocol: Protocol) {
    // E13: a transaction cannot stop halfway. It is answered at once, and nothing of the request stays in the queue.
    let (key, mut alice) = held_by_alice(server, protocol, "multi");
    let request = args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "BLOCK", 0];
    assert_eq!(transaction(&mut alice, &[&request]), [Reply::Nil]);
    assert!(waiters(&mut alice, &key).is_empty());
}

fn block_in_a_script_is_a_plain_try(server: &Server, protocol: Protocol) {
    // E13: as in a transaction.
    let (key, mut alice) = held_by_alice(server, protocol, "script");
    let script = "return server.call('FLOCK.ACQUIRE', KEYS[1], 'bob', 60000, 'BLOCK', 0)";
    assert_eq!(alice.cmd(&args!["EVAL", script, 1, key]), Reply::Nil);
    assert!(waiters(&mut alice, &key).is_empty());
}

fn block_on_a_subscribed_connection_is_refused(server: &Server, protocol: Protocol) {
    // A late reply beside messages could be taken for one of them. (In RESP2 the server itself refuses.)
    let key = unique_key("subscribed");
    for verb in ["SUBSCRIBE", "PSUBSCRIBE", "SSUBSCRIBE"] {
        let mut alice = server.connect(protocol);
        alice.send(&[verb, "news"]);
        match protocol {
            Protocol::Resp2 => drop(alice.recv()),
            Protocol::Resp3 => drop(alice.push_within(ANSWER_WITHIN).expect("the subscription is confirmed")),
        }
        let reply = alice.cmd(&args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS, "BLOCK", 0]);
        assert_eq!(reply.error_code(), Some("ERR"), "{verb}: {reply}");
    }
    assert!(holders(&mut server.connect(protocol), &key).is_empty());
}

fn block_after_unsubscribing_waits(server: &Server, protocol: Protocol) {
    // The refusal is about subscriptions that exist, not about a connection that once had one.
    let (key, mut alice) = held_by_alice(server, protocol, "unsubscribed");
    let mut bob = server.connect(protocol);
    for verb in ["SUBSCRIBE", "UNSUBSCRIBE"] {
        bob.send(&[verb, "news"]);
        match protocol {
            Protocol::Resp2 => drop(bob.recv()),
            Protocol::Resp3 => drop(bob.push_within(ANSWER_WITHIN).expect("a confirmation")),
        }
    }
    bob.send(&args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "BLOCK", 0]);
    server.wait_until_blocked(&bob);
    release(&mut alice, &key, "alice");
    bob.recv().as_token();
}

fn commands_behind_a_wait_are_answered_after_it(server: &Server, protocol: Protocol) {
    // A command that overtakes the blocked one would get its reply, and the other way round for ever after.
    let (key, mut alice) = held_by_alice(server, protocol, "pipeline");
    let mut bob = waiter(server, protocol, &key, "bob");
    bob.send(&["ECHO", "one"]);
    bob.send(&["ECHO", "two"]);
    bob.expect_silence(QUIET);
    release(&mut alice, &key, "alice");
    bob.recv().as_token();
    assert_eq!(bob.recv(), Reply::bulk("one"));
    assert_eq!(bob.recv(), Reply::bulk("two"));
}

fn waits_pipelined_on_one_connection_are_served_in_turn(server: &Server, protocol: Protocol) {
    // The second wait begins when the first has ended, also if its lock was free before.
    let (first, second) = (unique_key("first"), unique_key("second"));
    let mut alice = server.connect(protocol);
    hold(&mut alice, &first, "alice");
    hold(&mut alice, &second, "alice");
    let mut bob = waiter(server, protocol, &first, "bob");
    bob.send(&args!["FLOCK.ACQUIRE", second, "bob", LEASE_MS, "BLOCK", 0]);
    release(&mut alice, &second, "alice");
    bob.expect_silence(QUIET);
    release(&mut alice, &first, "alice");
    let token = bob.recv().as_token();
    assert!(bob.recv().as_token() > token);
}

fn release_pipelined_behind_its_own_wait_is_performed_after_it(server: &Server, protocol: Protocol) {
    // A client that gave up and sends its cancellation over the same connection: it is not seen before the grant, and then releases.
    let (key, mut alice) = held_by_alice(server, protocol, "cancel");
    let mut bob = waiter(server, protocol, &key, "bob");
    bob.send(&args!["FLOCK.RELEASE", key, "bob"]);
    assert_eq!(waiters(&mut alice, &key), ["bob"]);
    release(&mut alice, &key, "alice");
    bob.recv().as_token();
    assert_eq!(bob.recv(), Reply::Int(1));
    wait_until_free(&mut alice, &key);
}

fn reset_behind_a_wait_is_performed_after_it(server: &Server, protocol: Protocol) {
    // E13: RESET clears a connection's state, and this connection is blocked.
    let (key, mut alice) = held_by_alice(server, protocol, "reset");
    let mut bob = waiter(server, protocol, &key, "bob");
    bob.send(&["RESET"]);
    bob.expect_silence(QUIET);
    assert_eq!(waiters(&mut alice, &key), ["bob"]);
    release(&mut alice, &key, "alice");
    bob.recv().as_token();
    assert_eq!(bob.recv(), Reply::Simple("RESET".into()));
}

fn reset_by_a_holder_keeps_its_hold(server: &Server, protocol: Protocol) {
    // A hold belongs to its owner, not to a connection.
    let (key, mut alice) = held_by_alice(server, protocol, "reset");
    assert_eq!(alice.cmd(&["RESET"]), Reply::Simple("RESET".into()));
    assert_eq!(holders(&mut alice, &key), ["alice"]);
}

fn silenced_waiter_is_granted_without_a_word(server: &Server, protocol: Protocol) {
    // CLIENT REPLY OFF: the grant stands although its reply is suppressed, and the connection stays in step.
    let (key, mut alice) = held_by_alice(server, protocol, "silent");
    let mut bob = server.connect(protocol);
    bob.send(&["CLIENT", "REPLY", "OFF"]);
    bob.send(&args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "BLOCK", 0]);
    server.wait_until_blocked(&bob);
    release(&mut alice, &key, "alice");
    assert_eq!(holders(&mut alice, &key), ["bob"]);
    assert_eq!(bob.cmd(&["CLIENT", "REPLY", "ON"]), Reply::ok());
}

fn wait_without_limit_outlasts_a_limited_one(server: &Server, protocol: Protocol) {
    // A5: BLOCK 0 must not be taken for a wait that is over at once.
    let (key, _alice) = held_by_alice(server, protocol, "unlimited");
    let mut bob = waiter(server, protocol, &key, "bob");
    let mut carol = server.connect(protocol);
    let limited = args!["FLOCK.ACQUIRE", key, "carol", LEASE_MS, "BLOCK", 100];
    assert_eq!(carol.cmd(&limited), Reply::Nil);
    bob.expect_silence(QUIET);
}

fn wait_without_limit_outlasts_the_longest_allowed_wait(builder: Builder) {
    // A5: live waiters dropped after some allowance. The allowance is for those who name a limit.
    let server = builder.module_arg("wait-max-ms").module_arg("50").start();
    let mut alice = server.connect(Protocol::Resp3);
    hold(&mut alice, "k", "alice");
    let mut bob = waiter(&server, Protocol::Resp3, "k", "bob");
    bob.expect_silence(Duration::from_millis(200));
    release(&mut alice, "k", "alice");
    bob.recv().as_token();
}

fn timed_out_waiter_is_answered_nil_and_leaves(server: &Server, protocol: Protocol) {
    // A7: a waiter that has given up and stays queued is granted a lock that nobody takes.
    let (key, mut alice) = held_by_alice(server, protocol, "timeout");
    let mut bob = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "BLOCK", 50]);
    let mut carol = waiter(server, protocol, &key, "carol");
    assert_eq!(bob.recv(), Reply::Nil);
    assert_eq!(waiters(&mut alice, &key), ["carol"]);
    release(&mut alice, &key, "alice");
    carol.recv().as_token();
}

fn client_unblock_answers_nil(server: &Server, protocol: Protocol) {
    // E13: the default of CLIENT UNBLOCK is what a timeout looks like.
    unblocked_waiter_is_answered(server, protocol, &[], |reply| assert_eq!(reply, Reply::Nil));
}

fn client_unblock_timeout_answers_nil(server: &Server, protocol: Protocol) {
    // E13.
    unblocked_waiter_is_answered(server, protocol, &["TIMEOUT"], |reply| assert_eq!(reply, Reply::Nil));
}

fn client_unblock_error_answers_unblocked(server: &Server, protocol: Protocol) {
    // E13.
    unblocked_waiter_is_answered(server, protocol, &["ERROR"], |reply| {
        assert_eq!(reply.error_code(), Some("UNBLOCKED"), "{reply}");
    });
}

/// The waiter hears it, its connection can be used, and the next in the queue is the next to be granted.
#[track_caller]
fn unblocked_waiter_is_answered(server: &Server, protocol: Protocol, how: &[&str], check: fn(Reply)) {
    let (key, mut alice) = held_by_alice(server, protocol, "unblock");
    let mut bob = waiter(server, protocol, &key, "bob");
    let mut carol = waiter(server, protocol, &key, "carol");
    let id = bob.id().to_string();
    let unblock = [&["CLIENT", "UNBLOCK", &id], how].concat();
    assert_eq!(alice.cmd(&unblock), Reply::Int(1));
    check(bob.recv());
    assert_eq!(bob.cmd(&["PING"]).as_str(), "PONG");
    release(&mut alice, &key, "alice");
    carol.recv().as_token();
}

fn cancelled_waiter_is_answered_cancelled(server: &Server, protocol: Protocol) {
    // The owner's RELEASE over another connection: the wait ends at once, by an error and not by nil, which means "time is up".
    let (key, mut alice) = held_by_alice(server, protocol, "cancel");
    let mut bob = waiter(server, protocol, &key, "bob");
    assert_eq!(alice.cmd(&args!["FLOCK.RELEASE", key, "bob"]), Reply::Int(1));
    let reply = bob.recv();
    assert_eq!(reply.error_code(), Some("CANCELLED"), "{reply}");
}

fn release_with_a_token_does_not_cancel_a_wait(server: &Server, protocol: Protocol) {
    // S4: a late RELEASE of an earlier hold names its token; it must not end the same owner's new wait.
    let key = unique_key("token");
    let mut alice = server.connect(protocol);
    let old = hold(&mut alice, &key, "bob");
    release(&mut alice, &key, "bob");
    hold(&mut alice, &key, "alice");
    let mut bob = waiter(server, protocol, &key, "bob");
    assert_eq!(alice.cmd(&args!["FLOCK.RELEASE", key, "bob", "TOKEN", old]), Reply::Int(0));
    bob.expect_silence(QUIET);
}

fn leaving_writer_lets_readers_behind_it_in(server: &Server, protocol: Protocol) {
    // L1: the lock is shared, and only a waiting writer keeps a reader out. However the writer leaves, nobody else will ever wake the reader.
    let mut admin = server.connect(protocol);
    for departure in ["TIMEOUT", "ERROR", "KILL", "RELEASE", "wait is over"] {
        let key = unique_key("leaving");
        admin.cmd(&args!["FLOCK.ACQUIRE", key, "reader", LEASE_MS, "SHARED"]).as_token();
        let wait_ms = if departure == "wait is over" { 100 } else { 0 };
        let request = args!["FLOCK.ACQUIRE", key, "writer", LEASE_MS, "BLOCK", wait_ms];
        let writer = waiting(server, protocol, &request);
        let request = args!["FLOCK.ACQUIRE", key, "reader 2", LEASE_MS, "SHARED", "BLOCK", 0];
        let mut reader = server.connect(protocol);
        reader.send(&request);
        match departure {
            "TIMEOUT" | "ERROR" => drop(admin.cmd(&args!["CLIENT", "UNBLOCK", writer.id(), departure])),
            "KILL" => drop(admin.cmd(&args!["CLIENT", "KILL", "ID", writer.id()])),
            "RELEASE" => drop(admin.cmd(&args!["FLOCK.RELEASE", key, "writer"])),
            _ => {}
        }
        match reader.recv_within(ANSWER_WITHIN) {
            Ok(reply) => drop(reply.as_token()),
            Err(error) => panic!("{departure}: the reader hears nothing: {error:?}"),
        }
    }
}

fn module_with_waiters_is_not_unloaded(builder: Builder) {
    // E13: the code must stay for those who will come back to it.
    let server = builder.start();
    let mut alice = server.connect(Protocol::Resp2);
    hold(&mut alice, "k", "alice");
    let mut bob = waiter(&server, Protocol::Resp2, "k", "bob");
    let reply = alice.cmd(&["MODULE", "UNLOAD", "flock"]);
    assert_eq!(reply.error_code(), Some("ERR"), "{reply}");
    release(&mut alice, "k", "alice");
    bob.recv().as_token();
}

fn lease_that_ends_in_a_write_pause_is_handed_over_after_it(builder: Builder) {
    // E13: to replicate anything in a pause aborts the server, so the handoff comes after it; late, never early, never lost.
    let server = builder.appendonly().start();
    let mut alice = server.connect(Protocol::Resp2);
    alice.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 100]).as_token();
    let mut bob = waiter(&server, Protocol::Resp2, "k", "bob");
    let start = Instant::now();
    assert_eq!(alice.cmd(&["CLIENT", "PAUSE", "300", "WRITE"]), Reply::ok());
    bob.recv().as_token();
    // The server counts a pause in whole milliseconds of its clock: it may be shorter by one.
    assert!(start.elapsed() >= Duration::from_millis(298), "{:?}", start.elapsed());
    server.assert_alive();
}

fn wait_that_ends_in_a_pause_is_answered_after_it(builder: Builder) {
    // E13: everything that is no client's write command is deferred, and then done.
    let server = builder.appendonly().start();
    let mut alice = server.connect(Protocol::Resp2);
    hold(&mut alice, "k", "alice");
    let mut bob = waiting(&server, Protocol::Resp2, &args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS, "BLOCK", 200]);
    assert_eq!(alice.cmd(&["CLIENT", "PAUSE", "300", "ALL"]), Reply::ok());
    assert_eq!(bob.recv(), Reply::Nil);
}

fn client_unblock_works_in_a_write_pause(builder: Builder) {
    // E13: it writes nothing, so it need not wait.
    let server = builder.appendonly().start();
    let mut alice = server.connect(Protocol::Resp2);
    hold(&mut alice, "k", "alice");
    let mut bob = waiter(&server, Protocol::Resp2, "k", "bob");
    assert_eq!(alice.cmd(&["CLIENT", "PAUSE", "60000", "WRITE"]), Reply::ok());
    assert_eq!(alice.cmd(&args!["CLIENT", "UNBLOCK", bob.id(), "ERROR"]), Reply::Int(1));
    let reply = bob.recv();
    assert_eq!(reply.error_code(), Some("UNBLOCKED"), "{reply}");
}

fn waiter_that_closes_in_a_pause_is_gone_after_it(builder: Builder) {
    // A7, E13: a departure that is noted in a pause must not be forgotten in it.
    let server = builder.appendonly().start();
    let mut alice = server.connect(Protocol::Resp2);
    alice.cmd(&args!["FLOCK.ACQUIRE", "k", "reader", LEASE_MS, "SHARED"]).as_token();
    let writer = waiter(&server, Protocol::Resp2, "k", "writer");
    let request = args!["FLOCK.ACQUIRE", "k", "reader 2", LEASE_MS, "SHARED", "BLOCK", 0];
    let mut reader = waiting(&server, Protocol::Resp2, &request);
    assert_eq!(alice.cmd(&["CLIENT", "PAUSE", "200", "WRITE"]), Reply::ok());
    drop(writer);
    reader.recv().as_token();
}

fn shutdown_closes_waiters(builder: Builder) {
    // E13: a server that is asked to stop stops, in good order.
    let mut server = builder.start();
    let mut alice = server.connect(Protocol::Resp2);
    hold(&mut alice, "k", "alice");
    let mut bob = waiter(&server, Protocol::Resp2, "k", "bob");
    let status = server.shutdown_nosave();
    assert!(status.success(), "{status}");
    bob.expect_close();
}

fn shutdown_that_is_given_up_hands_over_what_fell_due(builder: Builder) {
    // E13: a shutdown that waits for a replica has paused the server; given up, it must leave nothing paused or forgotten.
    let servers = Replicated::start(&builder.config("shutdown-timeout", 60), 1);
    let mut alice = servers.primary.connect(Protocol::Resp2);
    alice.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 200]).as_token();
    let mut bob = waiter(&servers.primary, Protocol::Resp2, "k", "bob");
    servers.replicas[0].sigstop();
    // Something the replica has not got yet.
    alice.cmd(&["SET", "other", "value"]);
    servers.primary.sigterm();
    bob.expect_silence(Duration::from_millis(300));
    assert_eq!(alice.cmd(&["SHUTDOWN", "ABORT"]), Reply::ok());
    bob.recv().as_token();
    servers.replicas[0].sigcont();
}

fn replicas_are_counted_for_a_grant_that_was_waited_for(builder: Builder) {
    // B5, E1: WAIT counts from the last write of its connection, and this grant was written by another connection's release.
    let servers = Replicated::start(&builder, 1);
    for (key, replica_runs) in [("k1", true), ("k2", false)] {
        let mut alice = servers.primary.connect(Protocol::Resp2);
        hold(&mut alice, key, "alice");
        let mut bob = waiter(&servers.primary, Protocol::Resp2, key, "bob");
        servers.wait_in_step();
        if !replica_runs {
            servers.replicas[0].sigstop();
        }
        release(&mut alice, key, "alice");
        bob.recv().as_token();
        let wait_ms = if replica_runs { 5000 } else { 100 };
        assert_eq!(bob.cmd(&args!["WAIT", 1, wait_ms]), Reply::Int(replica_runs.into()));
    }
    servers.replicas[0].sigcont();
}

fn leases_that_end_while_a_shutdown_waits_for_replicas_do_no_harm(builder: Builder) {
    // E13: a shutdown pauses writes until its replicas are in step; one of them has stopped, and meanwhile leases end and waits too.
    let mut servers = Replicated::start(&builder.config("shutdown-timeout", 1), 1);
    let mut alice = servers.primary.connect(Protocol::Resp2);
    alice.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 300]).as_token();
    let _bob = waiter(&servers.primary, Protocol::Resp2, "k", "bob");
    let request = args!["FLOCK.ACQUIRE", "k", "carol", LEASE_MS, "BLOCK", 300];
    let _carol = waiting(&servers.primary, Protocol::Resp2, &request);
    servers.replicas[0].sigstop();
    // Something the replica has not got yet.
    alice.cmd(&["SET", "other", "value"]);
    servers.primary.sigterm();
    let status = servers.primary.wait_exit(ANSWER_WITHIN);
    servers.replicas[0].sigcont();
    assert!(status.success(), "{status}");
}

fn demotion_ends_waits_with_unblocked(builder: Builder) {
    // A10: a waiter of a server that decides nothing any more would wait for ever. By an error: nil would mean "time is up".
    let servers = Replicated::start(&builder, 1);
    let mut alice = servers.primary.connect(Protocol::Resp2);
    hold(&mut alice, "k", "alice");
    let mut bob = waiter(&servers.primary, Protocol::Resp2, "k", "bob");
    demote(&servers.primary, &servers.replicas[0]);
    let reply = bob.recv();
    assert_eq!(reply.error_code(), Some("UNBLOCKED"), "{reply}");
}

fn failover_ends_waits_with_unblocked(builder: Builder) {
    // A10, E13: as above, by FAILOVER, which pauses writes first.
    let servers = Replicated::start(&builder, 1);
    let mut alice = servers.primary.connect(Protocol::Resp2);
    hold(&mut alice, "k", "alice");
    let mut bob = waiter(&servers.primary, Protocol::Resp2, "k", "bob");
    fail_over(&servers.primary, &servers.replicas[0]);
    let reply = bob.recv();
    assert_eq!(reply.error_code(), Some("UNBLOCKED"), "{reply}");
}
