//! What the server publishes: to owners on their channels, to anybody on the lock's own channel, and as keyspace events.

use std::time::{Duration, Instant};

use flock_core::effect::Ended;
use flock_core::refusal::LossReason;
use flock_core::wire::message::{Announcement, OwnerMessage};
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Protocol};
use flock_tests::server::{Builder, Server, unique_key};
use flock_tests::subscriber::Subscriber;
use flock_tests::wait::wait_until;
use flock_tests::{args, on_own_servers, on_shared_servers};

use crate::lock_view::waiting;
use crate::scene::{
    Heard, LEASE_MS, QUIET, fencing_token, hear, hear_grant, heard_channel, held_by_alice, hold, hold_with_channel,
    listener, lost, queue, release, transaction, wait_until_free, waiter,
};

on_shared_servers![
    // To a holder.
    expired_holder_hears_it,
    unconfirmed_holder_hears_that_its_claim_expired,
    revoked_holder_hears_it,
    removed_holder_hears_it,
    every_holder_hears_of_its_own_hold,
    holder_that_was_blocked_hears_of_its_loss,
    holder_that_was_queued_hears_of_its_loss,
    loss_is_told_at_once,
    loss_is_told_before_the_next_grant,
    loss_is_told_on_the_channel_given_last,
    holder_that_releases_hears_nothing,
    holder_that_renews_hears_nothing,
    holder_without_a_channel_is_told_nothing,
    message_of_a_transaction_is_told,
    key_and_owner_of_any_bytes_are_read_back,
    empty_key_is_read_back,
    // To anybody.
    release_is_not_announced_unless_configured,
];

on_own_servers![
    flushed_holder_hears_it,
    release_is_announced,
    expiry_is_announced,
    revocation_is_announced,
    handoff_is_announced_with_both_tokens,
    handoff_by_expiry_is_announced_with_both_tokens,
    undelivered_grant_is_announced,
    release_to_readers_is_announced_once,
    release_of_one_reader_is_announced,
    release_of_one_of_two_ids_is_not_announced,
    cancelled_wait_is_not_announced,
    announcement_can_be_switched_on_and_off,
    granted_lock_is_an_event,
    granted_waiter_is_an_event,
    renewed_lock_is_no_granted_event,
    relabelled_lock_is_no_granted_event,
    lock_that_is_put_back_is_no_granted_event,
    refused_request_is_no_event,
    released_lock_is_an_event,
    expired_lock_is_an_event,
    revoked_lock_is_an_event,
    events_are_off_without_their_class,
];

fn expired_holder_hears_it(server: &Server, protocol: Protocol) {
    // C10: a holder that is not told goes on working.
    let (key, channel) = (unique_key("expired"), unique_key("channel"));
    let mut ears = listener(server, protocol, &channel);
    let request = args!["FLOCK.ACQUIRE", key, "alice", 50, "CHANNEL", channel];
    let token = server.connect(protocol).cmd(&request).as_token();
    assert_eq!(hear(&mut ears), Heard::new(lost(token, LossReason::Expired), &key, "alice"));
}

fn unconfirmed_holder_hears_that_its_claim_expired(server: &Server, protocol: Protocol) {
    // C10: a claim is a lease until it is confirmed, and ends like one.
    let (key, channel) = (unique_key("claim"), unique_key("channel"));
    let mut ears = listener(server, protocol, &channel);
    let request = args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS, "CHANNEL", channel, "CLAIM", 50];
    let token = server.connect(protocol).cmd(&request).as_token();
    assert_eq!(hear(&mut ears), Heard::new(lost(token, LossReason::Expired), &key, "alice"));
}

fn revoked_holder_hears_it(server: &Server, protocol: Protocol) {
    // C10.
    let (key, channel) = (unique_key("revoked"), unique_key("channel"));
    let mut ears = listener(server, protocol, &channel);
    let mut alice = server.connect(protocol);
    let token = hold_with_channel(&mut alice, &key, "alice", &channel);
    assert_eq!(alice.cmd(&args!["FLOCK.REVOKE", key]), Reply::Int(1));
    assert_eq!(hear(&mut ears), Heard::new(lost(token, LossReason::Revoked), &key, "alice"));
}

fn removed_holder_hears_it(server: &Server, protocol: Protocol) {
    // C10: these know nothing of locks, and each takes the key away in its own manner.
    let (channel, other) = (unique_key("channel"), unique_key("other"));
    let mut ears = listener(server, protocol, &channel);
    let mut alice = server.connect(protocol);
    hold(&mut alice, &other, "bob");
    let value = alice.cmd(&args!["DUMP", other]);
    let ways = |key: &str| {
        [
            args!["DEL", key].to_vec(),
            args!["UNLINK", key].to_vec(),
            args!["SET", key, "no lock"].to_vec(),
            args!["RENAME", key, unique_key("elsewhere")].to_vec(),
            args!["MOVE", key, 1].to_vec(),
            args!["SUNIONSTORE", key, "no such set"].to_vec(),
            args!["RESTORE", key, 0, value.as_bytes(), "REPLACE"].to_vec(),
            args!["RENAME", other, key].to_vec(),
        ]
    };
    for way in 0..ways("").len() {
        let key = unique_key("removed");
        let token = hold_with_channel(&mut alice, &key, "alice", &channel);
        let request = &ways(&key)[way];
        assert_eq!(alice.cmd(request).error_code(), None);
        let words = request[0].escape_ascii();
        assert_eq!(hear(&mut ears), Heard::new(lost(token, LossReason::Removed), &key, "alice"), "{words}");
    }
}

fn flushed_holder_hears_it(builder: Builder) {
    // C10: a flush removes keys without telling of each.
    let server = builder.start();
    let mut ears = listener(&server, Protocol::Resp2, "channel");
    let mut alice = server.connect(Protocol::Resp2);
    let token = hold_with_channel(&mut alice, "k", "alice", "channel");
    assert_eq!(alice.cmd(&["FLUSHALL"]), Reply::ok());
    assert_eq!(hear(&mut ears), Heard::new(lost(token, LossReason::Flushed), "k", "alice"));
}

fn every_holder_hears_of_its_own_hold(server: &Server, protocol: Protocol) {
    // C10: several holds end in one step; each has its own token, owner and channel.
    let key = unique_key("readers");
    let mut conn = server.connect(protocol);
    let mut readers: Vec<_> = ["reader 1", "reader 2", "reader 3"]
        .into_iter()
        .map(|owner| {
            let channel = unique_key("channel");
            let ears = listener(server, protocol, &channel);
            let request = args!["FLOCK.ACQUIRE", key, owner, LEASE_MS, "SHARED", "CHANNEL", channel];
            (owner, conn.cmd(&request).as_token(), ears)
        })
        .collect();
    assert_eq!(conn.cmd(&args!["FLOCK.REVOKE", key]), Reply::Int(3));
    for (owner, token, ears) in &mut readers {
        assert_eq!(hear(ears), Heard::new(lost(*token, LossReason::Revoked), &key, owner));
    }
}

fn holder_that_was_blocked_hears_of_its_loss(server: &Server, protocol: Protocol) {
    // C10: the channel must survive the queue.
    let (key, mut alice) = held_by_alice(server, protocol, "blocked");
    let (channel, mut ears) = heard_channel(server, protocol);
    let request = args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "BLOCK", 0, "CHANNEL", channel];
    let mut bob = waiting(server, protocol, &request);
    release(&mut alice, &key, "alice");
    let token = bob.recv().as_token();
    alice.cmd(&args!["FLOCK.REVOKE", key]);
    assert_eq!(hear(&mut ears), Heard::new(lost(token, LossReason::Revoked), &key, "bob"));
}

fn holder_that_was_queued_hears_of_its_loss(server: &Server, protocol: Protocol) {
    // C10: as above.
    let (key, mut alice) = held_by_alice(server, protocol, "queued");
    let (channel, mut ears) = heard_channel(server, protocol);
    queue(&mut alice, &key, "bob", &channel);
    release(&mut alice, &key, "alice");
    let token = hear_grant(&mut ears, &key, "bob");
    alice.cmd(&args!["FLOCK.REVOKE", key]);
    assert_eq!(hear(&mut ears), Heard::new(lost(token, LossReason::Revoked), &key, "bob"));
}

fn loss_is_told_at_once(server: &Server, protocol: Protocol) {
    // C10 wants it within 100 ms. The bound is ten times that, for machines with more to do; a loss that is found at the next poll takes longer.
    let (key, channel) = (unique_key("at once"), unique_key("channel"));
    let mut ears = listener(server, protocol, &channel);
    let mut alice = server.connect(protocol);
    hold_with_channel(&mut alice, &key, "alice", &channel);
    let start = Instant::now();
    alice.cmd(&args!["UNLINK", key]);
    hear(&mut ears);
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
}

fn loss_is_told_before_the_next_grant(server: &Server, protocol: Protocol) {
    // S5: who listens to both must see them in the order in which they happened. By expiry, by REVOKE and by DEL.
    for way in ["expiry", "FLOCK.REVOKE", "DEL"] {
        let (key, channel) = (unique_key("order"), unique_key("channel"));
        let mut ears = listener(server, protocol, &channel);
        let mut conn = server.connect(protocol);
        let lease_ms = if way == "expiry" { 50 } else { LEASE_MS };
        let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", lease_ms, "CHANNEL", channel]).as_token();
        queue(&mut conn, &key, "bob", &channel);
        let reason = match way {
            "expiry" => LossReason::Expired,
            "DEL" => LossReason::Removed,
            _ => LossReason::Revoked,
        };
        if way != "expiry" {
            assert_eq!(conn.cmd(&args![way, key]), Reply::Int(1));
        }
        assert_eq!(hear(&mut ears), Heard::new(lost(token, reason), &key, "alice"), "{way}");
        assert!(hear_grant(&mut ears, &key, "bob") > token, "{way}");
    }
}

fn loss_is_told_on_the_channel_given_last(server: &Server, protocol: Protocol) {
    // A holder that moved to another channel does not listen to the old one any more.
    let (key, old, new) = (unique_key("moved"), unique_key("channel"), unique_key("channel"));
    let mut old_ears = listener(server, protocol, &old);
    let mut new_ears = listener(server, protocol, &new);
    let mut alice = server.connect(protocol);
    let token = hold_with_channel(&mut alice, &key, "alice", &old);
    assert_eq!(hold_with_channel(&mut alice, &key, "alice", &new), token);
    alice.cmd(&args!["FLOCK.REVOKE", key]);
    assert_eq!(hear(&mut new_ears), Heard::new(lost(token, LossReason::Revoked), &key, "alice"));
    old_ears.expect_silence(QUIET);
}

fn holder_that_releases_hears_nothing(server: &Server, protocol: Protocol) {
    // What one did oneself is no loss.
    let (key, channel) = (unique_key("released"), unique_key("channel"));
    let mut ears = listener(server, protocol, &channel);
    let mut alice = server.connect(protocol);
    hold_with_channel(&mut alice, &key, "alice", &channel);
    release(&mut alice, &key, "alice");
    ears.expect_silence(QUIET);
}

fn holder_that_renews_hears_nothing(server: &Server, protocol: Protocol) {
    // The deadline that was renewed passes; a note of it that stayed behind must not speak.
    let (key, channel) = (unique_key("renewed"), unique_key("channel"));
    let mut ears = listener(server, protocol, &channel);
    let mut alice = server.connect(protocol);
    alice.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 100, "CHANNEL", channel]).as_token();
    assert_eq!(alice.cmd(&args!["FLOCK.RENEW", key, "alice", LEASE_MS]), Reply::Int(1));
    ears.expect_silence(Duration::from_millis(150));
}

fn holder_without_a_channel_is_told_nothing(server: &Server, protocol: Protocol) {
    // There is no channel to tell it on, and no other one may be guessed.
    let key = unique_key("untold");
    let mut everything = Subscriber::new(server.connect(protocol), "PSUBSCRIBE", &[format!("*{key}*")]);
    let mut alice = server.connect(protocol);
    hold(&mut alice, &key, "alice");
    alice.cmd(&args!["FLOCK.REVOKE", key]);
    everything.expect_silence(QUIET);
}

fn message_of_a_transaction_is_told(server: &Server, protocol: Protocol) {
    // Published inside EXEC.
    let (key, channel) = (unique_key("multi"), unique_key("channel"));
    let mut ears = listener(server, protocol, &channel);
    let mut alice = server.connect(protocol);
    let token = hold_with_channel(&mut alice, &key, "alice", &channel);
    transaction(&mut alice, &[&args!["FLOCK.REVOKE", key]]);
    assert_eq!(hear(&mut ears), Heard::new(lost(token, LossReason::Revoked), &key, "alice"));
}

fn key_and_owner_of_any_bytes_are_read_back(server: &Server, protocol: Protocol) {
    // The words of a message are told apart by spaces; key and owner may contain spaces, words of the grammar, and anything else.
    let channel = unique_key("channel");
    let mut ears = listener(server, protocol, &channel);
    let mut conn = server.connect(protocol);
    let unique = unique_key("bytes");
    for (key, owner) in [
        ("two words", "two words"),
        (" leading", " leading"),
        ("12 granted 1 1 lease", "lost expired 7 1 k o"),
        ("\r\n\0", "\0\n"),
        ("\u{1F512}", "\u{1F511}"),
    ] {
        let key = format!("{key}{unique}");
        let token = hold_with_channel(&mut conn, &key, owner, &channel);
        conn.cmd(&args!["FLOCK.REVOKE", key]);
        assert_eq!(hear(&mut ears), Heard::new(lost(token, LossReason::Revoked), &key, owner));
    }
}

fn empty_key_is_read_back(server: &Server, protocol: Protocol) {
    // A key may be empty. (The database is this test's own.)
    let database = match protocol {
        Protocol::Resp2 => 14,
        Protocol::Resp3 => 15,
    };
    let channel = unique_key("channel");
    let mut ears = listener(server, protocol, &channel);
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["SELECT", database]);
    hold_with_channel(&mut conn, "", "alice", &channel);
    conn.cmd(&args!["FLOCK.REVOKE", ""]);
    let message = ears.message();
    let message = OwnerMessage::parse(&message.payload).expect("it is a message");
    assert_eq!((message.key, message.owner), (&b""[..], &b"alice"[..]));
}

fn release_is_not_announced_unless_configured(server: &Server, protocol: Protocol) {
    // Every release would cost a publication that nobody wants.
    let key = unique_key("quiet");
    let mut ears = listener(server, protocol, &key);
    let mut alice = server.connect(protocol);
    hold(&mut alice, &key, "alice");
    release(&mut alice, &key, "alice");
    ears.expect_silence(QUIET);
}

fn release_is_announced(builder: Builder) {
    // For those who wait by other means than our queue.
    let server = announcing(&builder);
    let mut ears = listener(&server, Protocol::Resp3, "k");
    let mut alice = server.connect(Protocol::Resp3);
    let token = hold(&mut alice, "k", "alice");
    release(&mut alice, "k", "alice");
    assert_eq!(announced(&mut ears), announcement(Ended::Released, token, None));
}

fn expiry_is_announced(builder: Builder) {
    // Without any request.
    let server = announcing(&builder);
    let mut ears = listener(&server, Protocol::Resp3, "k");
    let mut alice = server.connect(Protocol::Resp3);
    let token = alice.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 50]).as_token();
    assert_eq!(announced(&mut ears), announcement(Ended::Expired, token, None));
}

fn revocation_is_announced(builder: Builder) {
    // As a release, with its own word.
    let server = announcing(&builder);
    let mut ears = listener(&server, Protocol::Resp3, "k");
    let mut alice = server.connect(Protocol::Resp3);
    let token = hold(&mut alice, "k", "alice");
    alice.cmd(&args!["FLOCK.REVOKE", "k"]);
    assert_eq!(announced(&mut ears), announcement(Ended::Revoked, token, None));
}

fn handoff_is_announced_with_both_tokens(builder: Builder) {
    // One message: "released" alone would send everybody after a lock that is taken.
    let server = announcing(&builder);
    let mut ears = listener(&server, Protocol::Resp3, "k");
    let mut alice = server.connect(Protocol::Resp3);
    let first = hold(&mut alice, "k", "alice");
    let mut bob = waiter(&server, Protocol::Resp3, "k", "bob");
    release(&mut alice, "k", "alice");
    let second = bob.recv().as_token();
    assert_eq!(announced(&mut ears), announcement(Ended::Released, first, Some(second)));
}

fn handoff_by_expiry_is_announced_with_both_tokens(builder: Builder) {
    // As above, without any request.
    let server = announcing(&builder);
    let mut ears = listener(&server, Protocol::Resp3, "k");
    let mut alice = server.connect(Protocol::Resp3);
    let first = alice.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 100]).as_token();
    let mut bob = waiter(&server, Protocol::Resp3, "k", "bob");
    let second = bob.recv().as_token();
    assert_eq!(announced(&mut ears), announcement(Ended::Expired, first, Some(second)));
}

fn undelivered_grant_is_announced(builder: Builder) {
    // Who has heard that the lock was handed over must hear that it was not.
    let server = announcing(&builder);
    let mut ears = listener(&server, Protocol::Resp3, "k");
    let mut alice = server.connect(Protocol::Resp3);
    let first = hold(&mut alice, "k", "alice");
    let bob = waiter(&server, Protocol::Resp3, "k", "bob");
    transaction(&mut alice, &[&args!["FLOCK.RELEASE", "k", "alice"], &args!["CLIENT", "KILL", "ID", bob.id()]]);
    let handed_over = announced(&mut ears);
    let second = handed_over.handed_to.expect("it was handed over").get();
    assert_eq!(handed_over, announcement(Ended::Released, first, Some(second)));
    assert_eq!(announced(&mut ears), announcement(Ended::Undelivered, second, None));
}

fn release_to_readers_is_announced_once(builder: Builder) {
    // One hold has ended, however many are granted in its place.
    let server = announcing(&builder);
    let mut ears = listener(&server, Protocol::Resp3, "k");
    let mut alice = server.connect(Protocol::Resp3);
    let first = hold(&mut alice, "k", "alice");
    let mut readers = ["reader 1", "reader 2"].map(|owner| {
        let request = args!["FLOCK.ACQUIRE", "k", owner, LEASE_MS, "SHARED", "BLOCK", 0];
        waiting(&server, Protocol::Resp3, &request)
    });
    release(&mut alice, "k", "alice");
    let second = readers[0].recv().as_token();
    assert_eq!(announced(&mut ears), announcement(Ended::Released, first, Some(second)));
    ears.expect_silence(QUIET);
}

fn release_of_one_reader_is_announced(builder: Builder) {
    // The lock is still held, but that hold has ended: a semaphore has a place.
    let server = announcing(&builder);
    let mut ears = listener(&server, Protocol::Resp3, "k");
    let mut conn = server.connect(Protocol::Resp3);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", "k", "reader 1", LEASE_MS, "SHARED"]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "reader 2", LEASE_MS, "SHARED"]).as_token();
    release(&mut conn, "k", "reader 1");
    assert_eq!(announced(&mut ears), announcement(Ended::Released, token, None));
}

fn release_of_one_of_two_ids_is_not_announced(builder: Builder) {
    // S7: the hold lives on.
    let server = announcing(&builder);
    let mut ears = listener(&server, Protocol::Resp3, "k");
    let mut conn = server.connect(Protocol::Resp3);
    for id in ["1", "2"] {
        conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS, "REENTRANT", id]).as_token();
    }
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", "k", "alice", "ID", "1"]), Reply::Int(1));
    ears.expect_silence(QUIET);
}

fn cancelled_wait_is_not_announced(builder: Builder) {
    // No hold has ended.
    let server = announcing(&builder);
    let mut ears = listener(&server, Protocol::Resp3, "k");
    let mut conn = server.connect(Protocol::Resp3);
    hold(&mut conn, "k", "alice");
    queue(&mut conn, "k", "bob", "c");
    release(&mut conn, "k", "bob");
    ears.expect_silence(QUIET);
}

fn announcement_can_be_switched_on_and_off(builder: Builder) {
    // At run time, by CONFIG SET: what is announced is what the setting says at that moment.
    let server = builder.start();
    let mut ears = listener(&server, Protocol::Resp3, "k");
    let mut conn = server.connect(Protocol::Resp3);
    let mut told = Vec::new();
    for setting in ["yes", "no", "yes"] {
        let reply = conn.cmd(&["CONFIG", "SET", "flock.release-notifications", setting]);
        assert_eq!(reply, Reply::ok());
        let token = hold(&mut conn, "k", "alice");
        release(&mut conn, "k", "alice");
        if setting == "yes" {
            told.push(announcement(Ended::Released, token, None));
        }
    }
    assert_eq!([announced(&mut ears), announced(&mut ears)][..], told);
    ears.expect_silence(QUIET);
}

fn granted_lock_is_an_event(builder: Builder) {
    // Both forms of event: by key, and by event.
    let server = builder.config("notify-keyspace-events", "KEd").start();
    let mut by_key = listener(&server, Protocol::Resp3, "__keyspace@0__:k");
    let mut by_event = listener(&server, Protocol::Resp3, "__keyevent@0__:flock.granted");
    hold(&mut server.connect(Protocol::Resp3), "k", "alice");
    assert_eq!(by_key.message().payload, b"flock.granted");
    assert_eq!(by_event.message().payload, b"k");
}

fn granted_waiter_is_an_event(builder: Builder) {
    // A handoff is two events, in the order in which they happened.
    let (server, mut events) = with_events(&builder);
    let mut alice = server.connect(Protocol::Resp3);
    hold(&mut alice, "k", "alice");
    let mut bob = waiter(&server, Protocol::Resp3, "k", "bob");
    release(&mut alice, "k", "alice");
    bob.recv().as_token();
    assert_eq!(next_events(&mut events, 3), ["flock.granted", "flock.released", "flock.granted"]);
}

fn renewed_lock_is_no_granted_event(builder: Builder) {
    // B14: nothing was granted by it, nor by a repeated request; a watcher that counts grants would be misled.
    let (server, mut events) = with_events(&builder);
    let mut alice = server.connect(Protocol::Resp3);
    hold(&mut alice, "k", "alice");
    alice.cmd(&args!["FLOCK.RENEW", "k", "alice", LEASE_MS]);
    hold(&mut alice, "k", "alice");
    assert_eq!(next_events(&mut events, 1), ["flock.granted"]);
    events.expect_silence(QUIET);
}

fn relabelled_lock_is_no_granted_event(builder: Builder) {
    // As above, with a new label: the token is the same, so it is the same grant.
    let (server, mut events) = with_events(&builder);
    let mut alice = server.connect(Protocol::Resp3);
    let token = hold(&mut alice, "k", "alice");
    let again = alice.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS, "LABEL", "new"]).as_token();
    assert_eq!(again, token);
    assert_eq!(next_events(&mut events, 1), ["flock.granted"]);
    events.expect_silence(QUIET);
}

fn lock_that_is_put_back_is_no_granted_event(builder: Builder) {
    // E6: the server has expired the key and the lock is there again, under the same token: nothing was granted.
    let (server, mut events) = with_events(&builder);
    let mut alice = server.connect(Protocol::Resp3);
    hold(&mut alice, "k", "alice");
    assert_eq!(alice.cmd(&["PEXPIRE", "k", "20"]), Reply::Int(1));
    wait_until("the lock is put back", ANSWER_WITHIN, || alice.cmd(&["PTTL", "k"]) == Reply::Int(-1));
    assert_eq!(next_events(&mut events, 1), ["flock.granted"]);
    events.expect_silence(QUIET);
}

fn refused_request_is_no_event(builder: Builder) {
    // Neither a failed try nor a queued request changes the lock.
    let (server, mut events) = with_events(&builder);
    let mut conn = server.connect(Protocol::Resp3);
    hold(&mut conn, "k", "alice");
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS]), Reply::Nil);
    queue(&mut conn, "k", "carol", "c");
    assert_eq!(next_events(&mut events, 1), ["flock.granted"]);
    events.expect_silence(QUIET);
}

fn released_lock_is_an_event(builder: Builder) {
    // Each end has its own name.
    let (server, mut events) = with_events(&builder);
    let mut alice = server.connect(Protocol::Resp3);
    hold(&mut alice, "k", "alice");
    release(&mut alice, "k", "alice");
    assert_eq!(next_events(&mut events, 2), ["flock.granted", "flock.released"]);
}

fn expired_lock_is_an_event(builder: Builder) {
    // Without any request.
    let (server, mut events) = with_events(&builder);
    let mut alice = server.connect(Protocol::Resp3);
    alice.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 50]).as_token();
    assert_eq!(next_events(&mut events, 2), ["flock.granted", "flock.expired"]);
}

fn revoked_lock_is_an_event(builder: Builder) {
    // As above.
    let (server, mut events) = with_events(&builder);
    let mut alice = server.connect(Protocol::Resp3);
    hold(&mut alice, "k", "alice");
    alice.cmd(&args!["FLOCK.REVOKE", "k"]);
    assert_eq!(next_events(&mut events, 2), ["flock.granted", "flock.revoked"]);
}

fn events_are_off_without_their_class(builder: Builder) {
    // All classes but the modules'.
    let server = builder.config("notify-keyspace-events", "KEg$lshzxet").start();
    let mut events = listener(&server, Protocol::Resp3, "__keyspace@0__:k");
    let mut alice = server.connect(Protocol::Resp3);
    hold(&mut alice, "k", "alice");
    events.expect_silence(QUIET);
    release(&mut alice, "k", "alice");
    wait_until_free(&mut alice, "k");
}

/// A server that announces every end of a hold.
#[track_caller]
fn announcing(builder: &Builder) -> Server {
    builder.clone().module_arg("release-notifications").module_arg("yes").start()
}

/// The next announcement.
#[track_caller]
fn announced(ears: &mut Subscriber) -> Announcement {
    let payload = ears.message().payload;
    match Announcement::parse(&payload) {
        Ok(announcement) => announcement,
        Err(error) => panic!("expected an announcement, got \"{}\": {error:?}", payload.escape_ascii()),
    }
}

fn announcement(ended: Ended, token: u64, handed_to: Option<u64>) -> Announcement {
    Announcement { ended, token: fencing_token(token), handed_to: handed_to.map(fencing_token) }
}

/// A server that emits the modules' events, and who listens to those of the key `k`.
#[track_caller]
fn with_events(builder: &Builder) -> (Server, Subscriber) {
    let server = builder.clone().config("notify-keyspace-events", "Kd").start();
    let events = listener(&server, Protocol::Resp3, "__keyspace@0__:k");
    (server, events)
}

#[track_caller]
fn next_events(events: &mut Subscriber, count: usize) -> Vec<String> {
    (0..count).map(|_| String::from_utf8_lossy(&events.message().payload).into_owned()).collect()
}
