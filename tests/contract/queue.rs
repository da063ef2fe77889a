//! ACQUIRE QUEUE: a request that waits without holding its connection, and hears of its grant on its channel.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use flock_core::effect::Notice;
use flock_core::refusal::EndReason;
use flock_tests::random::Random;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::{Builder, Server, unique_key};
use flock_tests::subscriber::Subscriber;
use flock_tests::topology::{Replicated, demote};
use flock_tests::{args, on_own_servers, on_shared_servers};

use crate::lock_view::{holders, waiters, waiting};
use crate::scene::{
    Heard, LEASE_MS, QUIET, claimed, ended, granted, hear, hear_grant, heard_channel, held_by_alice, hold, listener,
    long_tier, position, queue, queue_request, release, transaction, wait_until_free, waiter,
};

on_shared_servers![
    // Joining.
    queued_request_for_a_free_lock_is_granted_at_once,
    queued_request_without_a_channel_is_refused,
    queued_request_with_no_time_to_wait_is_refused,
    queued_request_answers_its_position,
    position_counts_those_who_still_wait,
    request_queues_in_a_transaction,
    request_queues_in_a_script,
    request_queues_on_a_subscribed_connection,
    // The grant.
    grant_is_published_on_the_channel,
    grant_with_a_claim_says_so,
    claim_that_is_confirmed_becomes_the_lease,
    claim_that_is_only_repeated_ends,
    one_channel_serves_many_owners,
    adjacent_shared_requests_are_told_together,
    handoff_is_told_to_one_waiter_only,
    blocked_and_queued_requests_share_one_order,
    // Repeating.
    repeated_request_keeps_its_place,
    repeated_request_is_still_one_request,
    repeated_request_restarts_the_wait,
    repeated_request_changes_the_lease_it_asks,
    repeated_request_answers_the_token_once_granted,
    plain_try_of_a_queued_owner_keeps_its_place,
    // Who cannot hear.
    unheard_request_is_passed_over,
    passed_over_request_keeps_its_place,
    unheard_request_is_passed_over_for_a_blocked_one,
    listener_that_has_closed_is_not_heard,
    listener_by_pattern_is_heard,
    unheard_writer_is_passed_over_for_a_reader,
    head_is_granted_when_nobody_hears,
    head_that_nobody_hears_is_granted_under_its_claim,
    sixteenth_request_is_still_looked_at,
    seventeenth_request_is_not_looked_at,
    // Two requests of one owner.
    newer_request_on_another_channel_supersedes_the_older,
    newer_request_on_the_same_channel_is_told_nothing,
    newer_blocked_request_supersedes_a_queued_one,
    newer_queued_request_supersedes_a_blocked_one,
    newer_blocked_request_supersedes_a_blocked_one,
    request_in_another_mode_goes_to_the_tail,
    request_in_another_mode_supersedes_the_older,
    request_in_another_mode_on_the_same_channel_is_told_nothing,
    writer_that_asks_shared_instead_is_granted_with_the_readers,
    // How a wait ends without a grant.
    timed_out_request_is_told,
    timed_out_request_is_gone,
    timed_out_writer_lets_readers_behind_it_in,
    cancelled_request_is_gone_without_a_word,
    cancellation_is_answered_once,
    cancellation_by_another_owner_finds_nothing,
    cancellation_with_a_token_finds_nothing,
    cancellation_with_an_id_needs_the_waiting_one,
    cancelled_writer_lets_readers_behind_it_in,
    queued_request_outlives_its_connection,
];

on_own_servers![
    request_beyond_the_most_waiters_is_refused,
    limit_of_waiters_counts_all_keys,
    repeated_request_needs_no_more_room,
    waiter_that_leaves_makes_room,
    demotion_ends_queued_requests,
    many_queues_are_served_each_in_its_order,
];

fn queued_request_for_a_free_lock_is_granted_at_once(server: &Server, protocol: Protocol) {
    // The reply is the token itself: no message is needed, so nobody need listen.
    let key = unique_key("free");
    let mut alice = server.connect(protocol);
    let token = alice.cmd(&queue_request(&key, "alice", "nobody listens")).as_token();
    assert_eq!(alice.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(1));
}

fn queued_request_without_a_channel_is_refused(server: &Server, protocol: Protocol) {
    // It could never hear of its grant.
    let key = unique_key("deaf");
    let mut alice = server.connect(protocol);
    let reply = alice.cmd(&args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS, "QUEUE", 1000]);
    assert_eq!(reply.error_code(), Some("ERR"), "{reply}");
}

fn queued_request_with_no_time_to_wait_is_refused(server: &Server, protocol: Protocol) {
    // 0 means no limit for BLOCK, which dies with its connection. A queued request has none, so it needs a limit.
    let key = unique_key("zero");
    let mut alice = server.connect(protocol);
    let reply = alice.cmd(&args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS, "QUEUE", 0, "CHANNEL", "c"]);
    assert_eq!(reply.error_code(), Some("ERR"), "{reply}");
}

fn queued_request_answers_its_position(server: &Server, protocol: Protocol) {
    // A13: "held" and "queued" must not look alike; 1 is the next.
    let (key, mut conn) = held_by_alice(server, protocol, "position");
    assert_eq!(queue(&mut conn, &key, "bob", "c"), 1);
    assert_eq!(queue(&mut conn, &key, "carol", "c"), 2);
    assert_eq!(queue(&mut conn, &key, "dave", "c"), 3);
}

fn position_counts_those_who_still_wait(server: &Server, protocol: Protocol) {
    // Exact on joining, also after others have left.
    let (key, mut conn) = held_by_alice(server, protocol, "position");
    for owner in ["bob", "carol", "dave"] {
        queue(&mut conn, &key, owner, "c");
    }
    release(&mut conn, &key, "bob");
    release(&mut conn, &key, "carol");
    assert_eq!(queue(&mut conn, &key, "erin", "c"), 2);
}

fn request_queues_in_a_transaction(server: &Server, protocol: Protocol) {
    // It holds no connection, so nothing is in its way there.
    let (key, mut conn) = held_by_alice(server, protocol, "multi");
    let replies = transaction(&mut conn, &[&queue_request(&key, "bob", "c")]);
    assert_eq!(position(&replies[0]), 1);
    assert_eq!(waiters(&mut conn, &key), ["bob"]);
}

fn request_queues_in_a_script(server: &Server, protocol: Protocol) {
    // As in a transaction.
    let (key, mut conn) = held_by_alice(server, protocol, "script");
    let script = "return server.call('FLOCK.ACQUIRE', KEYS[1], 'bob', 60000, 'QUEUE', 60000, 'CHANNEL', 'c')";
    let reply = conn.cmd(&args!["EVAL", script, 1, key]);
    assert_eq!(position(&reply), 1);
    assert_eq!(waiters(&mut conn, &key), ["bob"]);
}

fn request_queues_on_a_subscribed_connection(server: &Server, protocol: Protocol) {
    // RESP3 mixes replies and messages, so one connection is enough to queue and to hear. (RESP2 refuses all but pub/sub there.)
    if protocol == Protocol::Resp2 {
        return;
    }
    let (key, channel) = (unique_key("one connection"), unique_key("channel"));
    let mut alice = server.connect(protocol);
    hold(&mut alice, &key, "alice");
    let mut bob = server.connect(protocol);
    bob.send(&args!["SUBSCRIBE", channel]);
    bob.push_within(ANSWER_WITHIN).expect("the subscription is confirmed");
    assert_eq!(queue(&mut bob, &key, "bob", &channel), 1);
    release(&mut alice, &key, "alice");
    let push = bob.push_within(ANSWER_WITHIN).expect("the grant is pushed");
    assert!(push.as_array()[2].as_str().starts_with("granted "), "{push}");
}

fn grant_is_published_on_the_channel(server: &Server, protocol: Protocol) {
    // A1: no second request is needed; the message has all that a holder needs.
    let key = unique_key("granted");
    let mut alice = server.connect(protocol);
    let first = hold(&mut alice, &key, "alice");
    let mut ears = queued(server, protocol, &key, "bob");
    release(&mut alice, &key, "alice");
    let second = hear_grant(&mut ears, &key, "bob");
    assert!(second > first);
    assert_eq!(alice.cmd(&args!["FLOCK.CHECK", key, second]), Reply::Int(1));
}

fn grant_with_a_claim_says_so(server: &Server, protocol: Protocol) {
    // A client that takes the claim for the lease, or the other way round, believes too long.
    let (key, mut alice) = held_by_alice(server, protocol, "claim");
    let (channel, mut ears) = heard_channel(server, protocol);
    let request = [&queue_request(&key, "bob", &channel)[..], &args!["CLAIM", 5000]].concat();
    position(&alice.cmd(&request));
    release(&mut alice, &key, "alice");
    let heard = hear(&mut ears);
    let Notice::Granted { token, .. } = heard.notice else {
        panic!("{heard:?}");
    };
    assert_eq!(heard, Heard::new(claimed(token.get(), 5000), &key, "bob"));
}

fn claim_that_is_confirmed_becomes_the_lease(server: &Server, protocol: Protocol) {
    // L2: RENEW with the token proves that the grant arrived.
    let (key, mut alice) = held_by_alice(server, protocol, "confirmed");
    let (channel, mut ears) = heard_channel(server, protocol);
    let request = [&queue_request(&key, "bob", &channel)[..], &args!["CLAIM", 5000]].concat();
    position(&alice.cmd(&request));
    release(&mut alice, &key, "alice");
    let Notice::Granted { token, .. } = hear(&mut ears).notice else {
        panic!("bob is granted the lock");
    };
    let renew = args!["FLOCK.RENEW", key, "bob", LEASE_MS, "TOKEN", token.get()];
    assert_eq!(alice.cmd(&renew), Reply::Int(1));
    let left = crate::lock_view::left_ms(&mut alice, &key, "bob");
    assert!(left > 50_000, "{left}");
}

fn claim_that_is_only_repeated_ends(server: &Server, protocol: Protocol) {
    // L2: a request delivered late, from a connection that is dead, repeats itself and proves nothing.
    let (key, mut alice) = held_by_alice(server, protocol, "claim");
    let (channel, mut ears) = heard_channel(server, protocol);
    let request = [&queue_request(&key, "bob", &channel)[..], &args!["CLAIM", 100]].concat();
    position(&alice.cmd(&request));
    let mut carol = waiter(server, protocol, &key, "carol");
    release(&mut alice, &key, "alice");
    hear(&mut ears);
    alice.cmd(&request);
    carol.recv().as_token();
}

fn one_channel_serves_many_owners(server: &Server, protocol: Protocol) {
    // Each message names its key and its owner; nothing else tells them apart.
    let channel = unique_key("channel");
    let mut conn = server.connect(protocol);
    let mut ears = listener(server, protocol, &channel);
    let keys = ["first", "second"].map(unique_key);
    for key in &keys {
        hold(&mut conn, key, "alice");
        queue(&mut conn, key, &format!("waits for {key}"), &channel);
    }
    for key in keys.iter().rev() {
        release(&mut conn, key, "alice");
        hear_grant(&mut ears, key, &format!("waits for {key}"));
    }
}

fn adjacent_shared_requests_are_told_together(server: &Server, protocol: Protocol) {
    // S8: one release, two grants, two messages, two tokens.
    let (key, mut alice) = held_by_alice(server, protocol, "together");
    let (channel, mut ears) = heard_channel(server, protocol);
    for owner in ["bob", "carol"] {
        let request = [&queue_request(&key, owner, &channel)[..], &args!["SHARED"]].concat();
        position(&alice.cmd(&request));
    }
    release(&mut alice, &key, "alice");
    let first = hear_grant(&mut ears, &key, "bob");
    let second = hear_grant(&mut ears, &key, "carol");
    assert!(second > first);
}

fn handoff_is_told_to_one_waiter_only(server: &Server, protocol: Protocol) {
    // A11: told to all, every release would be answered by as many requests as there are waiters.
    let (key, mut alice) = held_by_alice(server, protocol, "one");
    let mut bob = queued(server, protocol, &key, "bob");
    let mut carol = queued(server, protocol, &key, "carol");
    release(&mut alice, &key, "alice");
    hear_grant(&mut bob, &key, "bob");
    carol.expect_silence(QUIET);
}

fn cancellation_with_an_id_needs_the_waiting_one(server: &Server, protocol: Protocol) {
    // S4: another id is another part of the owner's program.
    let (key, mut conn) = held_by_alice(server, protocol, "cancelled");
    let request = [&queue_request(&key, "bob", "c")[..], &args!["REENTRANT", "1"]].concat();
    position(&conn.cmd(&request));
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "bob", "ID", "2"]), Reply::Int(0));
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "bob", "ID", "1"]), Reply::Int(1));
    assert!(waiters(&mut conn, &key).is_empty());
}

fn blocked_and_queued_requests_share_one_order(server: &Server, protocol: Protocol) {
    // S9: two queues side by side would serve one of them first.
    let (key, mut alice) = held_by_alice(server, protocol, "one order");
    let mut bob = queued(server, protocol, &key, "bob");
    let mut carol = waiter(server, protocol, &key, "carol");
    let mut dave = queued(server, protocol, &key, "dave");
    release(&mut alice, &key, "alice");
    hear_grant(&mut bob, &key, "bob");
    release(&mut alice, &key, "bob");
    carol.recv().as_token();
    release(&mut alice, &key, "carol");
    hear_grant(&mut dave, &key, "dave");
}

fn repeated_request_keeps_its_place(server: &Server, protocol: Protocol) {
    // S6: a retry that goes to the tail waits for ever if it is repeated often enough.
    let (key, mut conn) = held_by_alice(server, protocol, "repeat");
    for owner in ["bob", "carol", "dave"] {
        queue(&mut conn, &key, owner, "c");
    }
    assert_eq!(queue(&mut conn, &key, "bob", "c"), 1);
    assert_eq!(waiters(&mut conn, &key), ["bob", "carol", "dave"]);
}

fn repeated_request_is_still_one_request(server: &Server, protocol: Protocol) {
    // B1: two entries of one owner would be two grants.
    let (key, mut conn) = held_by_alice(server, protocol, "repeat");
    for _ in 0..3 {
        assert_eq!(queue(&mut conn, &key, "bob", "c"), 1);
    }
    assert_eq!(waiters(&mut conn, &key), ["bob"]);
}

fn repeated_request_restarts_the_wait(server: &Server, protocol: Protocol) {
    // A4, A5: repeating proves the waiter alive; whoever repeats in time is never timed out, and no time is added up.
    let (key, mut conn) = held_by_alice(server, protocol, "restart");
    let (channel, mut ears) = heard_channel(server, protocol);
    let request = args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "QUEUE", 200, "CHANNEL", channel];
    position(&conn.cmd(&request));
    ears.expect_silence(Duration::from_millis(100));
    let start = Instant::now();
    position(&conn.cmd(&request));
    assert_eq!(hear(&mut ears), Heard::new(Notice::TimedOut, &key, "bob"));
    assert!(start.elapsed() >= Duration::from_millis(200), "{:?}", start.elapsed());
}

fn repeated_request_changes_the_lease_it_asks(server: &Server, protocol: Protocol) {
    // The newer request takes the place with all that it asks.
    let (key, mut conn) = held_by_alice(server, protocol, "lease");
    let (channel, mut ears) = heard_channel(server, protocol);
    queue(&mut conn, &key, "bob", &channel);
    let request = args!["FLOCK.ACQUIRE", key, "bob", 5000, "QUEUE", 1000, "CHANNEL", channel];
    position(&conn.cmd(&request));
    release(&mut conn, &key, "alice");
    let heard = hear(&mut ears);
    let Notice::Granted { token, .. } = heard.notice else {
        panic!("{heard:?}");
    };
    assert_eq!(heard.notice, granted(token.get(), 5000));
}

fn repeated_request_answers_the_token_once_granted(server: &Server, protocol: Protocol) {
    // A lost message costs one repetition, not the lock.
    let (key, mut alice) = held_by_alice(server, protocol, "repeat");
    let channel = unique_key("channel");
    let mut ears = listener(server, protocol, &channel);
    queue(&mut alice, &key, "bob", &channel);
    release(&mut alice, &key, "alice");
    let token = hear_grant(&mut ears, &key, "bob");
    assert_eq!(alice.cmd(&queue_request(&key, "bob", &channel)).as_token(), token);
}

fn plain_try_of_a_queued_owner_keeps_its_place(server: &Server, protocol: Protocol) {
    // It does not ask to wait, so it says nothing about the request that does.
    let (key, mut conn) = held_by_alice(server, protocol, "try");
    queue(&mut conn, &key, "bob", "c");
    queue(&mut conn, &key, "carol", "c");
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS]), Reply::Nil);
    assert_eq!(waiters(&mut conn, &key), ["bob", "carol"]);
}

fn unheard_request_is_passed_over(server: &Server, protocol: Protocol) {
    // L2: a grant that nobody can hear would cost those behind it a claim, or a lease.
    let (key, mut alice) = held_by_alice(server, protocol, "unheard");
    queue(&mut alice, &key, "bob", "nobody listens");
    let mut carol = queued(server, protocol, &key, "carol");
    release(&mut alice, &key, "alice");
    hear_grant(&mut carol, &key, "carol");
}

fn passed_over_request_keeps_its_place(server: &Server, protocol: Protocol) {
    // Whoever was only away for a moment must not start again behind everybody.
    let (key, channel) = (unique_key("unheard"), unique_key("channel"));
    let mut alice = server.connect(protocol);
    hold(&mut alice, &key, "alice");
    queue(&mut alice, &key, "bob", &channel);
    let mut carol = queued(server, protocol, &key, "carol");
    let _dave = queued(server, protocol, &key, "dave");
    release(&mut alice, &key, "alice");
    hear_grant(&mut carol, &key, "carol");
    assert_eq!(waiters(&mut alice, &key), ["bob", "dave"]);
    let mut bob = listener(server, protocol, &channel);
    release(&mut alice, &key, "carol");
    hear_grant(&mut bob, &key, "bob");
}

fn unheard_request_is_passed_over_for_a_blocked_one(server: &Server, protocol: Protocol) {
    // A live connection hears.
    let (key, mut alice) = held_by_alice(server, protocol, "unheard");
    queue(&mut alice, &key, "bob", "nobody listens");
    let mut carol = waiter(server, protocol, &key, "carol");
    release(&mut alice, &key, "alice");
    carol.recv().as_token();
    assert_eq!(waiters(&mut alice, &key), ["bob"]);
}

fn listener_that_has_closed_is_not_heard(server: &Server, protocol: Protocol) {
    // A7: who listened when the request was queued may be gone when it is granted.
    let (key, mut alice) = held_by_alice(server, protocol, "gone");
    let bob = queued(server, protocol, &key, "bob");
    let mut carol = queued(server, protocol, &key, "carol");
    let bob = bob.into_conn();
    let id = bob.id();
    drop(bob);
    server.wait_until_gone(id);
    release(&mut alice, &key, "alice");
    hear_grant(&mut carol, &key, "carol");
}

fn listener_by_pattern_is_heard(server: &Server, protocol: Protocol) {
    // It receives what is published on the channel, as any other listener: it must not be taken for nobody.
    let (key, channel) = (unique_key("pattern"), unique_key("channel"));
    let mut alice = server.connect(protocol);
    hold(&mut alice, &key, "alice");
    let pattern = format!("{channel}*");
    let mut bob = Subscriber::new(server.connect(protocol), "PSUBSCRIBE", &[&pattern]);
    queue(&mut alice, &key, "bob", &channel);
    let _carol = queued(server, protocol, &key, "carol");
    release(&mut alice, &key, "alice");
    assert_eq!(holders(&mut alice, &key), ["bob"]);
    hear_grant(&mut bob, &key, "bob");
}

fn unheard_writer_is_passed_over_for_a_reader(server: &Server, protocol: Protocol) {
    // L2: passed over in whatever mode: those behind are judged as if it were not there.
    let (key, mut alice) = held_by_alice(server, protocol, "unheard");
    hold_place_unheard(&mut alice, &key, "writer");
    let request = args!["FLOCK.ACQUIRE", key, "reader", LEASE_MS, "SHARED", "BLOCK", 0];
    let mut reader = waiting(server, protocol, &request);
    release(&mut alice, &key, "alice");
    reader.recv().as_token();
    assert_eq!(waiters(&mut alice, &key), ["writer"]);
}

fn head_is_granted_when_nobody_hears(server: &Server, protocol: Protocol) {
    // L1: otherwise the lock would stay free while somebody waits. Without a claim it is granted for its lease.
    let (key, mut alice) = held_by_alice(server, protocol, "nobody");
    hold_place_unheard(&mut alice, &key, "bob");
    hold_place_unheard(&mut alice, &key, "carol");
    release(&mut alice, &key, "alice");
    assert_eq!(holders(&mut alice, &key), ["bob"]);
    assert_eq!(waiters(&mut alice, &key), ["carol"]);
}

fn head_that_nobody_hears_is_granted_under_its_claim(server: &Server, protocol: Protocol) {
    // L2: a dead waiter costs its claim; then it is the next one's turn.
    let (key, mut alice) = held_by_alice(server, protocol, "nobody");
    let request = [&queue_request(&key, "bob", "nobody listens")[..], &args!["CLAIM", 100]].concat();
    position(&alice.cmd(&request));
    release(&mut alice, &key, "alice");
    assert_eq!(holders(&mut alice, &key), ["bob"]);
    wait_until_free(&mut alice, &key);
}

fn sixteenth_request_is_still_looked_at(server: &Server, protocol: Protocol) {
    // The bound keeps a handoff cheap, however many are deaf.
    let (key, mut alice) = held_by_alice(server, protocol, "sixteen");
    for number in 1..=15 {
        hold_place_unheard(&mut alice, &key, &format!("deaf {number}"));
    }
    let mut bob = waiter(server, protocol, &key, "bob");
    release(&mut alice, &key, "alice");
    bob.recv().as_token();
}

fn seventeenth_request_is_not_looked_at(server: &Server, protocol: Protocol) {
    // As above: then the head is granted, though nobody hears it.
    let (key, mut alice) = held_by_alice(server, protocol, "seventeen");
    for number in 1..=16 {
        hold_place_unheard(&mut alice, &key, &format!("deaf {number}"));
    }
    let _bob = waiter(server, protocol, &key, "bob");
    release(&mut alice, &key, "alice");
    assert_eq!(holders(&mut alice, &key), ["deaf 1"]);
}

fn newer_request_on_another_channel_supersedes_the_older(server: &Server, protocol: Protocol) {
    // The older listener must hear that it waits no longer; the newer one has the place.
    let (key, other) = (unique_key("superseded"), unique_key("channel"));
    let mut alice = server.connect(protocol);
    hold(&mut alice, &key, "alice");
    let mut older = queued(server, protocol, &key, "bob");
    queue(&mut alice, &key, "carol", "c");
    let mut newer = listener(server, protocol, &other);
    assert_eq!(queue(&mut alice, &key, "bob", &other), 1);
    assert_eq!(hear(&mut older), Heard::new(ended(EndReason::Superseded), &key, "bob"));
    release(&mut alice, &key, "alice");
    hear_grant(&mut newer, &key, "bob");
}

fn newer_request_on_the_same_channel_is_told_nothing(server: &Server, protocol: Protocol) {
    // A repeated request that hears "superseded" would take itself for ended.
    let (key, mut alice) = held_by_alice(server, protocol, "superseded");
    let (channel, mut ears) = heard_channel(server, protocol);
    queue(&mut alice, &key, "bob", &channel);
    queue(&mut alice, &key, "bob", &channel);
    ears.expect_silence(QUIET);
}

fn newer_blocked_request_supersedes_a_queued_one(server: &Server, protocol: Protocol) {
    // The grant will be this connection's reply, so the channel hears that its wait has ended.
    let (key, mut alice) = held_by_alice(server, protocol, "superseded");
    let mut older = queued(server, protocol, &key, "bob");
    queue(&mut alice, &key, "carol", "c");
    let mut newer = waiter(server, protocol, &key, "bob");
    assert_eq!(hear(&mut older), Heard::new(ended(EndReason::Superseded), &key, "bob"));
    assert_eq!(waiters(&mut alice, &key), ["bob", "carol"]);
    release(&mut alice, &key, "alice");
    newer.recv().as_token();
}

fn newer_queued_request_supersedes_a_blocked_one(server: &Server, protocol: Protocol) {
    // The blocked connection is let go, by an error; the channel hears the grant.
    let (key, mut alice) = held_by_alice(server, protocol, "superseded");
    let (channel, mut ears) = heard_channel(server, protocol);
    let mut older = waiter(server, protocol, &key, "bob");
    assert_eq!(queue(&mut alice, &key, "bob", &channel), 1);
    let reply = older.recv();
    assert_eq!(reply.error_code(), Some("SUPERSEDED"), "{reply}");
    release(&mut alice, &key, "alice");
    hear_grant(&mut ears, &key, "bob");
}

fn newer_blocked_request_supersedes_a_blocked_one(server: &Server, protocol: Protocol) {
    // B1: a request that is sent again over another connection because the first seems dead.
    let (key, mut alice) = held_by_alice(server, protocol, "superseded");
    let mut older = waiter(server, protocol, &key, "bob");
    let _carol = waiter(server, protocol, &key, "carol");
    let mut newer = waiter(server, protocol, &key, "bob");
    let reply = older.recv();
    assert_eq!(reply.error_code(), Some("SUPERSEDED"), "{reply}");
    release(&mut alice, &key, "alice");
    newer.recv().as_token();
}

fn request_in_another_mode_goes_to_the_tail(server: &Server, protocol: Protocol) {
    // S9: a reader's place must not become a writer's, for whom the others would have waited less.
    let (key, mut conn) = held_by_alice(server, protocol, "mode");
    queue(&mut conn, &key, "bob", "c");
    queue(&mut conn, &key, "carol", "c");
    let request = [&queue_request(&key, "bob", "c")[..], &args!["SHARED"]].concat();
    assert_eq!(position(&conn.cmd(&request)), 2);
    assert_eq!(waiters(&mut conn, &key), ["carol", "bob"]);
}

fn request_in_another_mode_supersedes_the_older(server: &Server, protocol: Protocol) {
    // As in the same mode: the older one hears it.
    let (key, mut alice) = held_by_alice(server, protocol, "mode");
    let mut older = waiter(server, protocol, &key, "bob");
    let request = [&queue_request(&key, "bob", "c")[..], &args!["SHARED"]].concat();
    assert_eq!(position(&alice.cmd(&request)), 1);
    let reply = older.recv();
    assert_eq!(reply.error_code(), Some("SUPERSEDED"), "{reply}");
}

fn request_in_another_mode_on_the_same_channel_is_told_nothing(server: &Server, protocol: Protocol) {
    // The newer request would take "superseded" for its own end: a message names the owner, not which of its requests.
    let (key, mut alice) = held_by_alice(server, protocol, "mode");
    let (channel, mut ears) = heard_channel(server, protocol);
    queue(&mut alice, &key, "bob", &channel);
    let request = [&queue_request(&key, "bob", &channel)[..], &args!["SHARED"]].concat();
    assert_eq!(position(&alice.cmd(&request)), 1);
    ears.expect_silence(QUIET);
}

fn writer_that_asks_shared_instead_is_granted_with_the_readers(server: &Server, protocol: Protocol) {
    // L1: with the writer gone from the head nobody keeps the readers out, itself included.
    let key = unique_key("mode");
    let mut alice = server.connect(protocol);
    alice.cmd(&args!["FLOCK.ACQUIRE", key, "reader", LEASE_MS, "SHARED"]).as_token();
    let mut older = waiter(server, protocol, &key, "bob");
    let request = args!["FLOCK.ACQUIRE", key, "carol", LEASE_MS, "SHARED", "BLOCK", 0];
    let mut carol = waiting(server, protocol, &request);
    let request = args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "SHARED", "BLOCK", 0];
    let token = server.connect(protocol).cmd(&request).as_token();
    assert!(carol.recv().as_token() < token);
    let reply = older.recv();
    assert_eq!(reply.error_code(), Some("SUPERSEDED"), "{reply}");
}

fn timed_out_request_is_told(server: &Server, protocol: Protocol) {
    // L3: a waiter that hears nothing cannot tell "time is up" from a lost message.
    let (key, mut conn) = held_by_alice(server, protocol, "timed out");
    let (channel, mut ears) = heard_channel(server, protocol);
    let request = args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "QUEUE", 50, "CHANNEL", channel];
    position(&conn.cmd(&request));
    assert_eq!(hear(&mut ears), Heard::new(Notice::TimedOut, &key, "bob"));
}

fn timed_out_request_is_gone(server: &Server, protocol: Protocol) {
    // A7.
    let (key, mut alice) = held_by_alice(server, protocol, "timed out");
    let (channel, mut ears) = heard_channel(server, protocol);
    let request = args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "QUEUE", 50, "CHANNEL", channel];
    position(&alice.cmd(&request));
    let mut carol = waiter(server, protocol, &key, "carol");
    hear(&mut ears);
    assert_eq!(waiters(&mut alice, &key), ["carol"]);
    release(&mut alice, &key, "alice");
    carol.recv().as_token();
}

fn timed_out_writer_lets_readers_behind_it_in(server: &Server, protocol: Protocol) {
    // L1: see the same of a blocked writer.
    let (key, channel) = (unique_key("timed out"), unique_key("channel"));
    let mut alice = server.connect(protocol);
    alice.cmd(&args!["FLOCK.ACQUIRE", key, "reader", LEASE_MS, "SHARED"]).as_token();
    let _ears = listener(server, protocol, &channel);
    let request = args!["FLOCK.ACQUIRE", key, "writer", LEASE_MS, "QUEUE", 100, "CHANNEL", channel];
    position(&alice.cmd(&request));
    let mut reader = server.connect(protocol);
    let request = args!["FLOCK.ACQUIRE", key, "reader 2", LEASE_MS, "SHARED", "BLOCK", 0];
    reader.cmd(&request).as_token();
}

fn cancelled_request_is_gone_without_a_word(server: &Server, protocol: Protocol) {
    // Who cancels has said that it wants to hear no more; and the next one is the next.
    let (key, mut alice) = held_by_alice(server, protocol, "cancelled");
    let (channel, mut bob) = heard_channel(server, protocol);
    queue(&mut alice, &key, "bob", &channel);
    let mut carol = queued(server, protocol, &key, "carol");
    release(&mut alice, &key, "bob");
    release(&mut alice, &key, "alice");
    hear_grant(&mut carol, &key, "carol");
    bob.expect_silence(QUIET);
}

fn cancellation_is_answered_once(server: &Server, protocol: Protocol) {
    // B2: the second one finds nothing, and says so.
    let (key, mut conn) = held_by_alice(server, protocol, "cancelled");
    queue(&mut conn, &key, "bob", "c");
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "bob"]), Reply::Int(1));
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "bob"]), Reply::Int(0));
}

fn cancellation_by_another_owner_finds_nothing(server: &Server, protocol: Protocol) {
    // S4.
    let (key, mut conn) = held_by_alice(server, protocol, "cancelled");
    queue(&mut conn, &key, "bob", "c");
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "bo"]), Reply::Int(0));
    assert_eq!(waiters(&mut conn, &key), ["bob"]);
}

fn cancellation_with_a_token_finds_nothing(server: &Server, protocol: Protocol) {
    // S4: a token names a hold, and a queued request has none.
    let key = unique_key("cancelled");
    let mut conn = server.connect(protocol);
    let token = hold(&mut conn, &key, "alice");
    queue(&mut conn, &key, "bob", "c");
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "bob", "TOKEN", token]), Reply::Int(0));
    assert_eq!(waiters(&mut conn, &key), ["bob"]);
}

fn cancelled_writer_lets_readers_behind_it_in(server: &Server, protocol: Protocol) {
    // L1: in the same step, as a release would.
    let (key, channel) = (unique_key("cancelled"), unique_key("channel"));
    let mut alice = server.connect(protocol);
    alice.cmd(&args!["FLOCK.ACQUIRE", key, "reader", LEASE_MS, "SHARED"]).as_token();
    let _ears = listener(server, protocol, &channel);
    queue(&mut alice, &key, "writer", &channel);
    let request = args!["FLOCK.ACQUIRE", key, "reader 2", LEASE_MS, "SHARED", "BLOCK", 0];
    let mut reader = waiting(server, protocol, &request);
    release(&mut alice, &key, "writer");
    reader.recv().as_token();
}

fn queued_request_outlives_its_connection(server: &Server, protocol: Protocol) {
    // It holds none: any connection may ask, another may listen, a third may repeat.
    let (key, mut alice) = held_by_alice(server, protocol, "outlives");
    let channel = unique_key("channel");
    let mut ears = listener(server, protocol, &channel);
    let mut asks = server.connect(protocol);
    queue(&mut asks, &key, "bob", &channel);
    let id = asks.id();
    drop(asks);
    server.wait_until_gone(id);
    release(&mut alice, &key, "alice");
    hear_grant(&mut ears, &key, "bob");
}

fn request_beyond_the_most_waiters_is_refused(builder: Builder) {
    // G5, S12: without a bound the queue is where a server's memory goes. Queued and blocked requests alike.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp3);
    assert_eq!(conn.cmd(&["CONFIG", "SET", "flock.waiters-max", "2"]), Reply::ok());
    hold(&mut conn, "k", "alice");
    queue(&mut conn, "k", "bob", "c");
    let _carol = waiter(&server, Protocol::Resp3, "k", "carol");
    for request in
        [queue_request("k", "dave", "c").to_vec(), args!["FLOCK.ACQUIRE", "k", "dave", LEASE_MS, "BLOCK", 0].to_vec()]
    {
        let reply = conn.cmd(&request);
        assert_eq!(reply.error_code(), Some("QUEUEFULL"), "{reply}");
    }
    assert_eq!(waiters(&mut conn, "k"), ["bob", "carol"]);
}

fn limit_of_waiters_counts_all_keys(builder: Builder) {
    // S12: a bound per key would bound nothing.
    let server = builder.module_arg("waiters-max").module_arg("2").start();
    let mut conn = server.connect(Protocol::Resp3);
    for key in ["k1", "k2", "k3"] {
        hold(&mut conn, key, "alice");
    }
    queue(&mut conn, "k1", "bob", "c");
    queue(&mut conn, "k2", "bob", "c");
    let reply = conn.cmd(&queue_request("k3", "bob", "c"));
    assert_eq!(reply.error_code(), Some("QUEUEFULL"), "{reply}");
}

fn repeated_request_needs_no_more_room(builder: Builder) {
    // S6: a retry of a request that waits must not be refused because others wait.
    let server = builder.module_arg("waiters-max").module_arg("1").start();
    let mut conn = server.connect(Protocol::Resp3);
    hold(&mut conn, "k", "alice");
    queue(&mut conn, "k", "bob", "c");
    assert_eq!(queue(&mut conn, "k", "bob", "c"), 1);
}

fn waiter_that_leaves_makes_room(builder: Builder) {
    // G5: a count that only rises refuses everybody in the end.
    let server = builder.module_arg("waiters-max").module_arg("1").start();
    let mut conn = server.connect(Protocol::Resp3);
    hold(&mut conn, "k", "alice");
    queue(&mut conn, "k", "bob", "c");
    release(&mut conn, "k", "bob");
    assert_eq!(queue(&mut conn, "k", "carol", "c"), 1);
}

fn demotion_ends_queued_requests(builder: Builder) {
    // A10: the listener is still there and would wait for a message that only a primary sends.
    let servers = Replicated::start(&builder, 1);
    let mut alice = servers.primary.connect(Protocol::Resp3);
    hold(&mut alice, "k", "alice");
    let mut ears = listener(&servers.primary, Protocol::Resp3, "channel");
    queue(&mut alice, "k", "bob", "channel");
    demote(&servers.primary, &servers.replicas[0]);
    assert_eq!(hear(&mut ears), Heard::new(ended(EndReason::RoleChanged), "k", "bob"));
}

fn many_queues_are_served_each_in_its_order(builder: Builder) {
    // A17: semaphore waiters starve under hundreds of locks. Released in random order, each queue must be served strictly in its own.
    let (locks, waiters_each) = if long_tier() { (100, 50) } else { (20, 20) };
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp3);
    let mut ears = listener(&server, Protocol::Resp3, "channel");
    for lock in 0..locks {
        let key = format!("lock {lock}");
        conn.cmd(&args!["FLOCK.ACQUIRE", key, 0, LEASE_MS, "SHARED", "LIMIT", 1]).as_token();
        for waiter in 1..=waiters_each {
            let request =
                [&queue_request(&key, &waiter.to_string(), "channel")[..], &args!["SHARED", "LIMIT", 1]].concat();
            assert_eq!(position(&conn.cmd(&request)), waiter);
        }
    }
    let mut random = Random::new();
    let mut held: BTreeMap<String, i64> = (0..locks).map(|lock| (format!("lock {lock}"), 0)).collect();
    while !held.is_empty() {
        let keys: Vec<_> = held.keys().map(String::as_str).collect();
        let key = random.pick(&keys).to_owned();
        let holder = held[&key];
        release(&mut conn, &key, &holder.to_string());
        if holder == waiters_each {
            held.remove(&key);
        } else {
            hear_grant(&mut ears, &key, &(holder + 1).to_string());
            held.insert(key, holder + 1);
        }
    }
    assert_eq!(server.info("flock").number("flock_held"), 0);
}

/// `owner` queues for the lock; answers who listens for it, on a channel of its own.
#[track_caller]
fn queued(server: &Server, protocol: Protocol, key: &str, owner: &str) -> Subscriber {
    let channel = unique_key("channel");
    let ears = listener(server, protocol, &channel);
    queue(&mut server.connect(protocol), key, owner, &channel);
    ears
}

/// `owner` queues, and nobody listens for it.
#[track_caller]
fn hold_place_unheard(conn: &mut Conn, key: &str, owner: &str) {
    queue(conn, key, owner, "nobody listens");
}
