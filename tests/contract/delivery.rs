//! Connections that close, at every stage of a handoff: nobody waits behind a dead one, and no grant is lost with it.

use flock_tests::args::encode;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::{Builder, Server, unique_key};
use flock_tests::wait::wait_until;
use flock_tests::{args, on_own_servers, on_shared_servers};

use crate::lock_view::{holders, waiters, waiting};
use crate::scene::{LEASE_MS, held_by_alice, hold, release, transaction, wait_until_free, wait_until_waiting, waiter};

on_shared_servers![
    request_cut_short_by_a_close_never_waits,
    closed_waiter_leaves_the_queue,
    reset_waiter_leaves_the_queue,
    half_closed_waiter_leaves_the_queue,
    killed_waiter_leaves_the_queue,
    waiter_whose_user_is_deleted_leaves_the_queue,
    grant_to_a_connection_killed_in_the_same_step_goes_to_the_next,
    grant_to_three_killed_connections_goes_to_the_fourth,
    grant_to_a_killed_connection_with_nobody_next_frees_the_lock,
    killed_reader_leaves_the_others_granted_with_it,
    grant_to_a_connection_unblocked_by_error_in_the_same_step_goes_to_the_next,
    grant_wins_over_an_unblock_by_timeout_in_the_same_step,
    closed_holder_keeps_its_lease,
    grant_that_is_removed_in_the_same_step_goes_to_the_next,
    grant_to_a_killed_connection_that_is_removed_goes_to_the_next,
    silent_waiters_cost_a_claim_each_and_no_lease,
    release_by_a_holder_that_closes_at_once_hands_over,
];

on_own_servers![
    request_of_a_connection_that_is_gone_before_it_is_read_does_not_stay,
    waiter_that_closes_while_its_grant_is_made_passes_it_on,
    all_waiters_killed_by_type_leave_the_server_clean,
];

fn request_cut_short_by_a_close_never_waits(server: &Server, protocol: Protocol) {
    // A7: what a connection has begun to say when it closes was never said.
    let (key, mut alice) = held_by_alice(server, protocol, "half");
    let request = encode(&args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "BLOCK", 0]);
    let mut bob = server.connect(protocol);
    bob.send_bytes(&request[..request.len() - 1]);
    let id = bob.id();
    drop(bob);
    server.wait_until_gone(id);
    assert!(waiters(&mut alice, &key).is_empty());
}

fn closed_waiter_leaves_the_queue(server: &Server, protocol: Protocol) {
    // A7: a dead connection at the head of the queue blocks all behind it.
    waiter_leaves_the_queue(server, protocol, |_, bob| {
        drop(bob);
        None
    });
}

fn reset_waiter_leaves_the_queue(server: &Server, protocol: Protocol) {
    // A7: broken off by RST.
    waiter_leaves_the_queue(server, protocol, |_, bob| {
        bob.abort();
        None
    });
}

fn half_closed_waiter_leaves_the_queue(server: &Server, protocol: Protocol) {
    // A7: who will not send any more is gone, as with the server's own blocking commands.
    waiter_leaves_the_queue(server, protocol, |_, mut bob| {
        bob.close_sending();
        Some(bob)
    });
}

fn killed_waiter_leaves_the_queue(server: &Server, protocol: Protocol) {
    // E13.
    waiter_leaves_the_queue(server, protocol, |admin, bob| {
        assert_eq!(admin.cmd(&args!["CLIENT", "KILL", "ID", bob.id()]), Reply::Int(1));
        Some(bob)
    });
}

/// The head of the queue goes; the second is the next, at once and not after a timeout.
#[track_caller]
fn waiter_leaves_the_queue(server: &Server, protocol: Protocol, go: fn(&mut Conn, Conn) -> Option<Conn>) {
    let (key, mut alice) = held_by_alice(server, protocol, "dead");
    let bob = waiter(server, protocol, &key, "bob");
    let mut carol = waiter(server, protocol, &key, "carol");
    let bob = go(&mut alice, bob);
    wait_until_waiting(&mut alice, &key, &["carol"]);
    release(&mut alice, &key, "alice");
    carol.recv().as_token();
    if let Some(mut bob) = bob {
        bob.expect_close();
    }
}

fn grant_to_a_connection_killed_in_the_same_step_goes_to_the_next(server: &Server, protocol: Protocol) {
    // D6, E13: the release has granted the lock to bob when his connection dies, before he could be told.
    let (key, mut alice) = held_by_alice(server, protocol, "killed");
    let bob = waiter(server, protocol, &key, "bob");
    let mut carol = waiter(server, protocol, &key, "carol");
    let replies =
        transaction(&mut alice, &[&args!["FLOCK.RELEASE", key, "alice"], &args!["CLIENT", "KILL", "ID", bob.id()]]);
    assert_eq!(replies, [Reply::Int(1), Reply::Int(1)]);
    carol.recv().as_token();
    assert_eq!(holders(&mut alice, &key), ["carol"]);
}

fn grant_to_three_killed_connections_goes_to_the_fourth(server: &Server, protocol: Protocol) {
    // A7: each grant that cannot be delivered must be taken back in turn.
    let (key, mut alice) = held_by_alice(server, protocol, "killed");
    let dead = ["bob", "carol", "dave"].map(|owner| waiter(server, protocol, &key, owner));
    let mut erin = waiter(server, protocol, &key, "erin");
    let mut commands = vec![args!["FLOCK.RELEASE", key, "alice"].to_vec()];
    commands.extend(dead.iter().map(|conn| args!["CLIENT", "KILL", "ID", conn.id()].to_vec()));
    let commands: Vec<_> = commands.iter().map(Vec::as_slice).collect();
    transaction(&mut alice, &commands);
    erin.recv().as_token();
    assert!(waiters(&mut alice, &key).is_empty());
}

fn grant_to_a_killed_connection_with_nobody_next_frees_the_lock(server: &Server, protocol: Protocol) {
    // B10: a grant that nobody knows of must not last a lease.
    let (key, mut alice) = held_by_alice(server, protocol, "killed");
    let bob = waiter(server, protocol, &key, "bob");
    transaction(&mut alice, &[&args!["FLOCK.RELEASE", key, "alice"], &args!["CLIENT", "KILL", "ID", bob.id()]]);
    wait_until_free(&mut alice, &key);
}

fn killed_reader_leaves_the_others_granted_with_it(server: &Server, protocol: Protocol) {
    // Taking back one of several grants made in one step must not take back the others.
    let (key, mut alice) = held_by_alice(server, protocol, "killed reader");
    let reader = |owner: &str| {
        let request = args!["FLOCK.ACQUIRE", key, owner, LEASE_MS, "SHARED", "BLOCK", 0];
        waiting(server, protocol, &request)
    };
    let mut first = reader("reader 1");
    let second = reader("reader 2");
    let mut third = reader("reader 3");
    transaction(&mut alice, &[&args!["FLOCK.RELEASE", key, "alice"], &args!["CLIENT", "KILL", "ID", second.id()]]);
    first.recv().as_token();
    third.recv().as_token();
    wait_until("the killed reader's hold is taken back", ANSWER_WITHIN, || {
        holders(&mut alice, &key) == ["reader 1", "reader 3"]
    });
}

fn grant_to_a_connection_unblocked_by_error_in_the_same_step_goes_to_the_next(server: &Server, protocol: Protocol) {
    // E13: bob is told UNBLOCKED by the server itself, so he does not have the lock, whatever was decided before. One reply, not two.
    let (key, mut alice) = held_by_alice(server, protocol, "unblocked");
    let mut bob = waiter(server, protocol, &key, "bob");
    let mut carol = waiter(server, protocol, &key, "carol");
    transaction(&mut alice, &[&args!["FLOCK.RELEASE", key, "alice"], &args!["CLIENT", "UNBLOCK", bob.id(), "ERROR"]]);
    let reply = bob.recv();
    assert_eq!(reply.error_code(), Some("UNBLOCKED"), "{reply}");
    carol.recv().as_token();
    assert_eq!(bob.cmd(&["PING"]).as_str(), "PONG");
}

fn grant_wins_over_an_unblock_by_timeout_in_the_same_step(server: &Server, protocol: Protocol) {
    // E13: bob holds the lock, so nil would be a lie; and the timeout's nil after the grant would be a second reply.
    let (key, mut alice) = held_by_alice(server, protocol, "unblocked");
    let mut bob = waiter(server, protocol, &key, "bob");
    transaction(&mut alice, &[&args!["FLOCK.RELEASE", key, "alice"], &args!["CLIENT", "UNBLOCK", bob.id(), "TIMEOUT"]]);
    let token = bob.recv().as_token();
    assert_eq!(bob.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(1));
}

fn waiter_whose_user_is_deleted_leaves_the_queue(server: &Server, protocol: Protocol) {
    // E13: the server closes all connections of a user that it deletes, blocked ones included.
    let (key, user) = (unique_key("user"), unique_key("user"));
    let mut alice = server.connect(protocol);
    hold(&mut alice, &key, "alice");
    alice.cmd(&args!["ACL", "SETUSER", user, "on", "nopass", "+@all", "~*", "&*"]);
    let mut bob = server.connect(protocol);
    assert_eq!(bob.cmd(&args!["AUTH", user, "any"]), Reply::ok());
    bob.send(&args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "BLOCK", 0]);
    server.wait_until_blocked(&bob);
    let mut carol = waiter(server, protocol, &key, "carol");
    assert_eq!(alice.cmd(&args!["ACL", "DELUSER", user]), Reply::Int(1));
    wait_until_waiting(&mut alice, &key, &["carol"]);
    release(&mut alice, &key, "alice");
    carol.recv().as_token();
}

fn grant_that_is_removed_in_the_same_step_goes_to_the_next(server: &Server, protocol: Protocol) {
    // A10: bob was granted the lock and has lost it before he could be told; carol has it. Both are answered, each once.
    let (key, mut alice) = held_by_alice(server, protocol, "removed");
    let mut bob = waiter(server, protocol, &key, "bob");
    let mut carol = waiter(server, protocol, &key, "carol");
    transaction(&mut alice, &[&args!["FLOCK.RELEASE", key, "alice"], &args!["DEL", key]]);
    let bobs = bob.recv().as_token();
    let carols = carol.recv().as_token();
    assert!(carols > bobs, "{bobs} {carols}");
    assert_eq!(alice.cmd(&args!["FLOCK.CHECK", key, bobs]), Reply::Int(0));
    assert_eq!(alice.cmd(&args!["FLOCK.CHECK", key, carols]), Reply::Int(1));
}

fn grant_to_a_killed_connection_that_is_removed_goes_to_the_next(server: &Server, protocol: Protocol) {
    // E13, A10: the grant that is to be taken back is not there any more, and its lock's number may be in use again.
    let (key, mut alice) = held_by_alice(server, protocol, "removed");
    let bob = waiter(server, protocol, &key, "bob");
    let mut carol = waiter(server, protocol, &key, "carol");
    let (release, kill) = (args!["FLOCK.RELEASE", key, "alice"], args!["CLIENT", "KILL", "ID", bob.id()]);
    let other = unique_key("other");
    let token = transaction(
        &mut alice,
        &[&release, &args!["DEL", key], &args!["FLOCK.ACQUIRE", other, "alice", LEASE_MS], &kill],
    )[2]
    .as_token();
    carol.recv().as_token();
    assert_eq!(holders(&mut alice, &key), ["carol"]);
    assert_eq!(alice.cmd(&args!["FLOCK.CHECK", other, token]), Reply::Int(1));
}

fn closed_holder_keeps_its_lease(server: &Server, protocol: Protocol) {
    // E14: without SESSION a hold does not hang on a connection: the reply has left the server, somebody may act on it.
    let (key, mut alice) = held_by_alice(server, protocol, "closed");
    let mut bob = waiter(server, protocol, &key, "bob");
    release(&mut alice, &key, "alice");
    bob.recv().as_token();
    let id = bob.id();
    drop(bob);
    server.wait_until_gone(id);
    assert_eq!(holders(&mut alice, &key), ["bob"]);
}

fn silent_waiters_cost_a_claim_each_and_no_lease(server: &Server, protocol: Protocol) {
    // L2, A7: connections that are open and behind which nobody lives any more. Each is granted, none confirms.
    let (key, mut alice) = held_by_alice(server, protocol, "claims");
    let silent = ["bob", "carol", "dave"].map(|owner| {
        let request = args!["FLOCK.ACQUIRE", key, owner, LEASE_MS, "BLOCK", 0, "CLAIM", 50];
        waiting(server, protocol, &request)
    });
    let mut erin = waiter(server, protocol, &key, "erin");
    release(&mut alice, &key, "alice");
    erin.recv().as_token();
    drop(silent);
}

fn request_of_a_connection_that_is_gone_before_it_is_read_does_not_stay(builder: Builder) {
    // A7: the server finds a request and, behind it, the end of the connection.
    let server = builder.start();
    let mut alice = server.connect(Protocol::Resp2);
    hold(&mut alice, "k", "alice");
    let mut bob = server.connect(Protocol::Resp2);
    server.sigstop();
    bob.send(&args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS, "BLOCK", 0]);
    let (id, bobs_end) = (bob.id(), bob.local_addr());
    drop(bob);
    server.wait_until_hung_up(bobs_end);
    server.sigcont();
    server.wait_until_gone(id);
    assert!(waiters(&mut alice, "k").is_empty());
}

fn waiter_that_closes_while_its_grant_is_made_passes_it_on(builder: Builder) {
    // D6: the server finds the RELEASE and the end of the waiter's connection in one look at its sockets, in either order.
    let server = builder.start();
    let mut alice = server.connect(Protocol::Resp2);
    for (key, release_first, by_reset) in [
        ("fin then release", false, false),
        ("rst then release", false, true),
        ("release then fin", true, false),
        ("release then rst", true, true),
    ] {
        hold(&mut alice, key, "alice");
        let bob = waiter(&server, Protocol::Resp2, key, "bob");
        let mut carol = waiter(&server, Protocol::Resp2, key, "carol");
        let release = args!["FLOCK.RELEASE", key, "alice"];
        server.sigstop();
        if release_first {
            alice.send(&release);
        }
        let bobs_end = bob.local_addr();
        if by_reset {
            bob.abort();
        } else {
            drop(bob);
        }
        server.wait_until_hung_up(bobs_end);
        if !release_first {
            alice.send(&release);
        }
        server.sigcont();
        assert_eq!(alice.recv(), Reply::Int(1));
        match carol.recv_within(ANSWER_WITHIN) {
            Ok(reply) => drop(reply.as_token()),
            Err(error) => panic!("{key}: {error:?}"),
        }
    }
}

fn release_by_a_holder_that_closes_at_once_hands_over(server: &Server, protocol: Protocol) {
    // B2: the handoff must not depend on the reply of the RELEASE being read.
    let (key, mut alice) = held_by_alice(server, protocol, "hang up");
    let mut bob = waiter(server, protocol, &key, "bob");
    alice.send(&args!["FLOCK.RELEASE", key, "alice"]);
    drop(alice);
    bob.recv().as_token();
}

fn all_waiters_killed_by_type_leave_the_server_clean(builder: Builder) {
    // E13, S12: a hundred disconnect callbacks in one command, whose killer is one of the killed.
    let server = builder.start();
    let mut alice = server.connect(Protocol::Resp2);
    hold(&mut alice, "k", "alice");
    let mut waiters: Vec<_> =
        (0..100).map(|number| waiter(&server, Protocol::Resp2, "k", &format!("waiter {number}"))).collect();
    alice.cmd(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "no"]);
    for waiter in &mut waiters {
        waiter.expect_close();
    }
    let mut conn = server.connect(Protocol::Resp2);
    wait_until_waiting(&mut conn, "k", &[]);
    release(&mut conn, "k", "alice");
    wait_until("no client is blocked", ANSWER_WITHIN, || server.info("flock").number("flock_blocked_clients") == 0);
}
