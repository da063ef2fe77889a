//! SESSION: a hold or a wait that ends with the connection it lives on.

use std::time::{Duration, Instant};

use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::{Builder, Server, unique_key};
use flock_tests::topology::{Replicated, promote};
use flock_tests::wait::wait_until;
use flock_tests::{args, on_own_servers, on_shared_servers};

use crate::lock_view::{holders, left_ms, waiters, waiting};
use crate::scene::{
    LEASE_MS, hear_grant, heard_channel, held_by_alice, hold, listener, position, queue_request, release, transaction,
    wait_until_free, wait_until_waiting, waiter,
};

on_shared_servers![
    // The connection closes.
    closed_connection_cuts_the_lease_to_its_grace,
    reset_connection_cuts_the_lease,
    half_closed_connection_cuts_the_lease,
    killed_connection_cuts_the_lease,
    closed_connection_cuts_all_its_holds,
    closed_connection_leaves_holds_without_session_alone,
    closed_connection_leaves_other_readers_alone,
    closed_connection_never_lengthens_a_lease,
    closed_connection_leaves_the_next_holder_alone,
    closed_connection_cuts_an_unconfirmed_claim,
    closed_connection_cuts_a_converted_hold,
    reset_of_an_open_connection_cuts_nothing,
    closed_connection_that_only_looked_cuts_nothing,
    // Renewed, or repeated, elsewhere.
    renewal_within_the_grace_restores_the_lease,
    renewal_over_another_connection_binds_the_hold_to_it,
    repeated_request_over_another_connection_binds_the_hold_to_it,
    refused_renewal_binds_nothing,
    renewal_in_a_transaction_keeps_the_hold_bound,
    renewal_in_a_script_keeps_the_hold_bound,
    session_can_be_asked_later,
    // Waiting.
    blocked_request_is_bound_to_its_own_connection,
    queued_request_dies_with_its_connection,
    queued_request_that_dies_lets_readers_behind_it_in,
    queued_request_repeated_over_another_connection_lives_with_that,
    queued_request_is_bound_to_its_connection_once_granted,
    grant_to_a_session_killed_in_the_same_step_goes_to_the_next,
    // Where it is refused.
    session_in_a_script_is_refused,
    session_in_a_function_is_refused,
    session_in_a_transaction_is_taken,
];

on_own_servers![
    connection_that_closes_in_a_pause_cuts_the_lease_after_it,
    cut_lease_reaches_the_replica,
    restart_cuts_the_lease_to_its_grace,
    restart_leaves_leases_without_session_alone,
    renewal_after_a_restart_restores_the_lease,
    reload_cuts_the_lease_to_its_grace,
    promotion_cuts_the_lease_to_its_grace,
    renewal_after_a_promotion_restores_the_lease,
];

const GRACE_MS: u32 = 100;
/// Above any grace here and below any lease, in what INFO says is left.
const CUT_MS: i64 = 10_000;

fn closed_connection_cuts_the_lease_to_its_grace(server: &Server, protocol: Protocol) {
    // C2, C13: not at once, for the client may come back; and not after the lease.
    let key = unique_key("closed");
    let mut alice = server.connect(protocol);
    hold_in_session(&mut alice, &key, "alice");
    let mut bob = waiter(server, protocol, &key, "bob");
    let start = Instant::now();
    drop(alice);
    bob.recv().as_token();
    let grace = Duration::from_millis(GRACE_MS.into());
    assert!(start.elapsed() >= grace, "{:?}", start.elapsed());
}

fn reset_connection_cuts_the_lease(server: &Server, protocol: Protocol) {
    // By RST.
    let key = unique_key("reset");
    let mut alice = server.connect(protocol);
    hold_in_session(&mut alice, &key, "alice");
    alice.abort();
    wait_until_free(&mut server.connect(protocol), &key);
}

fn half_closed_connection_cuts_the_lease(server: &Server, protocol: Protocol) {
    // A client that will not send any more can never renew.
    let key = unique_key("half closed");
    let mut alice = server.connect(protocol);
    hold_in_session(&mut alice, &key, "alice");
    alice.close_sending();
    wait_until_free(&mut server.connect(protocol), &key);
}

fn killed_connection_cuts_the_lease(server: &Server, protocol: Protocol) {
    // E13: by an administrator.
    let key = unique_key("killed");
    let mut alice = server.connect(protocol);
    hold_in_session(&mut alice, &key, "alice");
    let mut admin = server.connect(protocol);
    assert_eq!(admin.cmd(&args!["CLIENT", "KILL", "ID", alice.id()]), Reply::Int(1));
    wait_until_free(&mut admin, &key);
}

fn closed_connection_cuts_all_its_holds(server: &Server, protocol: Protocol) {
    // A connection has as many as it likes.
    let keys = ["one", "two", "three"].map(unique_key);
    let mut alice = server.connect(protocol);
    for key in &keys {
        hold_in_session(&mut alice, key, "alice");
    }
    drop(alice);
    let mut conn = server.connect(protocol);
    for key in &keys {
        wait_until_free(&mut conn, key);
    }
}

fn closed_connection_leaves_holds_without_session_alone(server: &Server, protocol: Protocol) {
    // E14: SESSION is asked for, never guessed; beside it on the same connection is a hold without.
    let (bound, free) = (unique_key("with session"), unique_key("without"));
    let mut alice = server.connect(protocol);
    hold(&mut alice, &free, "alice");
    hold_in_session(&mut alice, &bound, "alice");
    drop(alice);
    let mut conn = server.connect(protocol);
    wait_until_free(&mut conn, &bound);
    assert!(left_ms(&mut conn, &free, "alice") > CUT_MS);
}

fn closed_connection_leaves_other_readers_alone(server: &Server, protocol: Protocol) {
    // D1: each holder has its own lease.
    let key = unique_key("readers");
    let (mut alice, mut bob) = (server.connect(protocol), server.connect(protocol));
    for (conn, owner) in [(&mut alice, "alice"), (&mut bob, "bob")] {
        let request = args!["FLOCK.ACQUIRE", key, owner, LEASE_MS, "SHARED", "SESSION", GRACE_MS];
        conn.cmd(&request).as_token();
    }
    drop(alice);
    wait_until("alice has lost her hold", ANSWER_WITHIN, || holders(&mut bob, &key) == ["bob"]);
    assert!(left_ms(&mut bob, &key, "bob") > CUT_MS);
}

fn closed_connection_never_lengthens_a_lease(server: &Server, protocol: Protocol) {
    // "At most grace": a grace longer than what is left of the lease gives nothing.
    let key = unique_key("short");
    let mut alice = server.connect(protocol);
    let request = args!["FLOCK.ACQUIRE", key, "alice", 200, "SESSION", LEASE_MS];
    alice.cmd(&request).as_token();
    let id = alice.id();
    drop(alice);
    server.wait_until_gone(id);
    wait_until_free(&mut server.connect(protocol), &key);
}

fn closed_connection_leaves_the_next_holder_alone(server: &Server, protocol: Protocol) {
    // S4: what is bound to the connection is a hold, not the lock, nor the owner.
    let key = unique_key("next");
    let mut alice = server.connect(protocol);
    hold_in_session(&mut alice, &key, "alice");
    release(&mut alice, &key, "alice");
    let mut bob = server.connect(protocol);
    hold(&mut bob, &key, "alice");
    let id = alice.id();
    drop(alice);
    server.wait_until_gone(id);
    assert!(left_ms(&mut bob, &key, "alice") > CUT_MS);
}

fn closed_connection_cuts_an_unconfirmed_claim(server: &Server, protocol: Protocol) {
    // A claim longer than the grace would outlive the connection that could confirm it.
    let key = unique_key("claim");
    let mut alice = server.connect(protocol);
    let request = args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS, "CLAIM", LEASE_MS, "SESSION", GRACE_MS];
    alice.cmd(&request).as_token();
    drop(alice);
    wait_until_free(&mut server.connect(protocol), &key);
}

fn closed_connection_cuts_a_converted_hold(server: &Server, protocol: Protocol) {
    // D4: a conversion to exclusive gives the hold another token; it must not lose its connection by it.
    let key = unique_key("converted");
    let mut alice = server.connect(protocol);
    let request = args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS, "SHARED", "SESSION", GRACE_MS];
    let reader = alice.cmd(&request).as_token();
    let convert = args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS, "CONVERT", reader];
    assert!(alice.cmd(&convert).as_token() > reader);
    drop(alice);
    wait_until_free(&mut server.connect(protocol), &key);
}

fn reset_of_an_open_connection_cuts_nothing(server: &Server, protocol: Protocol) {
    // The RESET command ends what a connection has set, not the connection.
    let key = unique_key("reset");
    let mut alice = server.connect(protocol);
    hold_in_session(&mut alice, &key, "alice");
    assert_eq!(alice.cmd(&["RESET"]), Reply::Simple("RESET".into()));
    assert!(left_ms(&mut alice, &key, "alice") > CUT_MS);
}

fn closed_connection_that_only_looked_cuts_nothing(server: &Server, protocol: Protocol) {
    // CHECK, INFO, a failed try and a RENEW of another's hold bind nothing.
    let key = unique_key("looked");
    let mut alice = server.connect(protocol);
    let token = hold_in_session(&mut alice, &key, "alice");
    let mut bob = server.connect(protocol);
    assert_eq!(bob.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(1));
    assert_eq!(holders(&mut bob, &key), ["alice"]);
    let request = args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "SESSION", GRACE_MS];
    assert_eq!(bob.cmd(&request), Reply::Nil);
    assert_eq!(bob.cmd(&args!["FLOCK.RENEW", key, "bob", LEASE_MS]), Reply::Int(0));
    let id = bob.id();
    drop(bob);
    server.wait_until_gone(id);
    assert!(left_ms(&mut alice, &key, "alice") > CUT_MS);
}

fn renewal_within_the_grace_restores_the_lease(server: &Server, protocol: Protocol) {
    // The grace is there for a client whose connection broke and that comes back.
    let key = unique_key("restored");
    let mut alice = server.connect(protocol);
    let request = args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS, "SESSION", 5000];
    alice.cmd(&request).as_token();
    drop(alice);
    let mut alice = server.connect(protocol);
    wait_until_cut(&mut alice, &key);
    assert_eq!(alice.cmd(&args!["FLOCK.RENEW", key, "alice", LEASE_MS]), Reply::Int(1));
    assert!(left_ms(&mut alice, &key, "alice") > CUT_MS);
}

fn renewal_over_another_connection_binds_the_hold_to_it(server: &Server, protocol: Protocol) {
    // E7: the old connection's end may be noticed long after the new one is in use.
    let key = unique_key("rebound");
    let (mut old, mut new) = (server.connect(protocol), server.connect(protocol));
    hold_in_session(&mut old, &key, "alice");
    assert_eq!(new.cmd(&args!["FLOCK.RENEW", key, "alice", LEASE_MS]), Reply::Int(1));
    let mut conn = server.connect(protocol);
    close(server, old);
    assert!(left_ms(&mut conn, &key, "alice") > CUT_MS);
    close(server, new);
    wait_until_free(&mut conn, &key);
}

fn repeated_request_over_another_connection_binds_the_hold_to_it(server: &Server, protocol: Protocol) {
    // S6: a retry after a broken connection is the connection that acquired, as far as anybody can tell.
    let key = unique_key("rebound");
    let (mut old, mut new) = (server.connect(protocol), server.connect(protocol));
    let token = hold_in_session(&mut old, &key, "alice");
    assert_eq!(hold_in_session(&mut new, &key, "alice"), token);
    let mut conn = server.connect(protocol);
    close(server, old);
    assert!(left_ms(&mut conn, &key, "alice") > CUT_MS);
    close(server, new);
    wait_until_free(&mut conn, &key);
}

fn refused_renewal_binds_nothing(server: &Server, protocol: Protocol) {
    // S4: with another token it is another's renewal.
    let key = unique_key("refused");
    let (mut alice, mut other) = (server.connect(protocol), server.connect(protocol));
    let token = hold_in_session(&mut alice, &key, "alice");
    let renew = args!["FLOCK.RENEW", key, "alice", LEASE_MS, "TOKEN", token - 1];
    assert_eq!(other.cmd(&renew), Reply::Int(0));
    close(server, alice);
    wait_until_free(&mut other, &key);
}

fn renewal_in_a_transaction_keeps_the_hold_bound(server: &Server, protocol: Protocol) {
    // A transaction runs on its connection.
    let key = unique_key("multi");
    let mut alice = server.connect(protocol);
    hold_in_session(&mut alice, &key, "alice");
    let replies = transaction(&mut alice, &[&args!["FLOCK.RENEW", key, "alice", LEASE_MS]]);
    assert_eq!(replies, [Reply::Int(1)]);
    close(server, alice);
    wait_until_free(&mut server.connect(protocol), &key);
}

fn renewal_in_a_script_keeps_the_hold_bound(server: &Server, protocol: Protocol) {
    // A script has no connection: bound to it, the hold would be bound to nothing that can close.
    let key = unique_key("script");
    let mut alice = server.connect(protocol);
    hold_in_session(&mut alice, &key, "alice");
    let script = "return server.call('FLOCK.RENEW', KEYS[1], 'alice', 60000)";
    assert_eq!(alice.cmd(&args!["EVAL", script, 1, key]), Reply::Int(1));
    close(server, alice);
    wait_until_free(&mut server.connect(protocol), &key);
}

fn session_can_be_asked_later(server: &Server, protocol: Protocol) {
    // A repeated request brings its own conditions.
    let key = unique_key("later");
    let mut alice = server.connect(protocol);
    let token = hold(&mut alice, &key, "alice");
    assert_eq!(hold_in_session(&mut alice, &key, "alice"), token);
    close(server, alice);
    wait_until_free(&mut server.connect(protocol), &key);
}

fn blocked_request_is_bound_to_its_own_connection(server: &Server, protocol: Protocol) {
    // The grant is made while another connection's command runs; that connection may go.
    let (key, mut alice) = held_by_alice(server, protocol, "blocked");
    let request = args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "BLOCK", 0, "SESSION", GRACE_MS];
    let mut bob = waiting(server, protocol, &request);
    release(&mut alice, &key, "alice");
    bob.recv().as_token();
    close(server, alice);
    let mut conn = server.connect(protocol);
    assert!(left_ms(&mut conn, &key, "bob") > CUT_MS);
    close(server, bob);
    wait_until_free(&mut conn, &key);
}

fn queued_request_dies_with_its_connection(server: &Server, protocol: Protocol) {
    // C12, D6: no grant to a dead session.
    let (key, mut alice) = held_by_alice(server, protocol, "queued");
    let mut bob = server.connect(protocol);
    assert_eq!(queue_in_session(&mut bob, &key, "bob", "nobody listens"), 1);
    let _carol = waiter(server, protocol, &key, "carol");
    drop(bob);
    wait_until_waiting(&mut alice, &key, &["carol"]);
}

fn queued_request_that_dies_lets_readers_behind_it_in(server: &Server, protocol: Protocol) {
    // L1: nothing else will ever wake them.
    let (key, channel) = (unique_key("queued"), unique_key("channel"));
    let mut alice = server.connect(protocol);
    alice.cmd(&args!["FLOCK.ACQUIRE", key, "reader", LEASE_MS, "SHARED"]).as_token();
    let _ears = listener(server, protocol, &channel);
    let mut writer = server.connect(protocol);
    queue_in_session(&mut writer, &key, "writer", &channel);
    let request = args!["FLOCK.ACQUIRE", key, "reader 2", LEASE_MS, "SHARED", "BLOCK", 0];
    let mut reader = waiting(server, protocol, &request);
    drop(writer);
    reader.recv().as_token();
}

fn queued_request_repeated_over_another_connection_lives_with_that(server: &Server, protocol: Protocol) {
    // E7: as with a hold: the connection that spoke last.
    let (key, mut alice) = held_by_alice(server, protocol, "queued");
    let (mut old, mut new) = (server.connect(protocol), server.connect(protocol));
    queue_in_session(&mut old, &key, "bob", "c");
    queue_in_session(&mut new, &key, "bob", "c");
    close(server, old);
    assert_eq!(waiters(&mut alice, &key), ["bob"]);
    close(server, new);
    wait_until_waiting(&mut alice, &key, &[]);
}

fn queued_request_is_bound_to_its_connection_once_granted(server: &Server, protocol: Protocol) {
    // C12: the session goes on from the wait into the hold.
    let (key, mut alice) = held_by_alice(server, protocol, "queued");
    let (channel, mut ears) = heard_channel(server, protocol);
    let mut bob = server.connect(protocol);
    queue_in_session(&mut bob, &key, "bob", &channel);
    release(&mut alice, &key, "alice");
    hear_grant(&mut ears, &key, "bob");
    drop(bob);
    wait_until_free(&mut alice, &key);
}

fn grant_to_a_session_killed_in_the_same_step_goes_to_the_next(server: &Server, protocol: Protocol) {
    // D6: two ends of one hold at once: it cannot be delivered, and its connection has closed. The next is granted without any grace.
    let (key, mut alice) = held_by_alice(server, protocol, "killed");
    let request = args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "BLOCK", 0, "SESSION", LEASE_MS];
    let bob = waiting(server, protocol, &request);
    let mut carol = waiter(server, protocol, &key, "carol");
    transaction(&mut alice, &[&args!["FLOCK.RELEASE", key, "alice"], &args!["CLIENT", "KILL", "ID", bob.id()]]);
    carol.recv().as_token();
}

fn session_in_a_script_is_refused(server: &Server, protocol: Protocol) {
    // A script has no connection of its own; what it is told to be is none that can close.
    let key = unique_key("script");
    let mut conn = server.connect(protocol);
    let script = "return server.call('FLOCK.ACQUIRE', KEYS[1], 'alice', 60000, 'SESSION', 1000)";
    let reply = conn.cmd(&args!["EVAL", script, 1, key]);
    assert_eq!(reply.error_code(), Some("ERR"), "{reply}");
    assert!(reply.error_text().contains("SESSION"), "{reply}");
    assert!(holders(&mut conn, &key).is_empty());
}

fn session_in_a_function_is_refused(server: &Server, protocol: Protocol) {
    // As in a script.
    let key = unique_key("function");
    let name = key.replace('#', "_");
    let mut conn = server.connect(protocol);
    let library = format!(
        "#!lua name={name}\nserver.register_function('{name}', function(keys) \
         return server.call('FLOCK.ACQUIRE', keys[1], 'alice', 60000, 'SESSION', 1000) end)"
    );
    assert_eq!(conn.cmd(&args!["FUNCTION", "LOAD", library]), Reply::bulk(&name));
    let reply = conn.cmd(&args!["FCALL", name, 1, key]);
    assert_eq!(reply.error_code(), Some("ERR"), "{reply}");
    assert!(holders(&mut conn, &key).is_empty());
}

fn session_in_a_transaction_is_taken(server: &Server, protocol: Protocol) {
    // A transaction runs on its connection.
    let key = unique_key("multi");
    let mut alice = server.connect(protocol);
    let request = args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS, "SESSION", GRACE_MS];
    transaction(&mut alice, &[&request])[0].as_token();
    close(server, alice);
    wait_until_free(&mut server.connect(protocol), &key);
}

fn connection_that_closes_in_a_pause_cuts_the_lease_after_it(builder: Builder) {
    // E13: the cut is replicated, and to replicate anything in a pause aborts the server.
    let server = builder.appendonly().start();
    let mut alice = server.connect(Protocol::Resp2);
    hold_in_session(&mut alice, "k", "alice");
    let mut bob = waiter(&server, Protocol::Resp2, "k", "bob");
    let start = Instant::now();
    assert_eq!(alice.cmd(&["CLIENT", "PAUSE", "200", "WRITE"]), Reply::ok());
    drop(alice);
    bob.recv().as_token();
    assert!(start.elapsed() >= Duration::from_millis(200), "{:?}", start.elapsed());
}

fn cut_lease_reaches_the_replica(builder: Builder) {
    // S10: the replica knows no connections; it must hear of the cut, or it would have the lease when it is promoted.
    let servers = Replicated::start(&builder, 1);
    let mut alice = servers.primary.connect(Protocol::Resp2);
    let request = args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS, "SESSION", 5000];
    alice.cmd(&request).as_token();
    drop(alice);
    wait_until_cut(&mut servers.primary.connect(Protocol::Resp2), "k");
    servers.wait_in_step();
    let left = left_ms(&mut servers.replicas[0].connect(Protocol::Resp2), "k", "alice");
    assert!(left <= 5000, "{left}");
}

fn restart_cuts_the_lease_to_its_grace(builder: Builder) {
    // E9: all connections are gone, and nobody was there to see them close.
    let server = restarted_with_a_session(&builder, GRACE_MS);
    wait_until_free(&mut server.connect(Protocol::Resp2), "k");
}

fn restart_leaves_leases_without_session_alone(builder: Builder) {
    // What was not asked for must not be cut.
    let mut server = builder.appendonly().start();
    hold(&mut server.connect(Protocol::Resp2), "k", "alice");
    server.kill9();
    server.start_again();
    let left = left_ms(&mut server.connect(Protocol::Resp2), "k", "alice");
    assert!(left > CUT_MS, "{left}");
}

fn renewal_after_a_restart_restores_the_lease(builder: Builder) {
    // E7: who comes back in time has lost nothing, and the hold lives on the new connection.
    let server = restarted_with_a_session(&builder, 5000);
    let mut alice = server.connect(Protocol::Resp2);
    wait_until_cut(&mut alice, "k");
    assert_eq!(alice.cmd(&args!["FLOCK.RENEW", "k", "alice", LEASE_MS]), Reply::Int(1));
    assert!(left_ms(&mut alice, "k", "alice") > CUT_MS);
    close(&server, alice);
    wait_until_cut(&mut server.connect(Protocol::Resp2), "k");
}

fn reload_cuts_the_lease_to_its_grace(builder: Builder) {
    // What is loaded knows no connection, whether the process is a new one or not.
    let server = builder.start();
    let mut alice = server.connect(Protocol::Resp2);
    hold_in_session(&mut alice, "k", "alice");
    assert_eq!(alice.cmd(&["DEBUG", "RELOAD"]), Reply::ok());
    wait_until_free(&mut alice, "k");
}

fn promotion_cuts_the_lease_to_its_grace(builder: Builder) {
    // C13: the client's connection was to the old primary.
    let servers = promoted_with_a_session(&builder, GRACE_MS);
    wait_until_free(&mut servers.replicas[0].connect(Protocol::Resp2), "k");
}

fn renewal_after_a_promotion_restores_the_lease(builder: Builder) {
    // E7: as after a restart.
    let servers = promoted_with_a_session(&builder, 5000);
    let mut alice = servers.replicas[0].connect(Protocol::Resp2);
    wait_until_cut(&mut alice, "k");
    assert_eq!(alice.cmd(&args!["FLOCK.RENEW", "k", "alice", LEASE_MS]), Reply::Int(1));
    assert!(left_ms(&mut alice, "k", "alice") > CUT_MS);
}

/// A server that was killed and started again while alice held `k` in a session.
#[track_caller]
fn restarted_with_a_session(builder: &Builder, grace_ms: u32) -> Server {
    let mut server = builder.clone().appendonly().start();
    let request = args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS, "SESSION", grace_ms];
    server.connect(Protocol::Resp2).cmd(&request).as_token();
    server.kill9();
    server.start_again();
    server
}

/// A replica that was promoted because its primary is gone, where alice held `k` in a session.
#[track_caller]
fn promoted_with_a_session(builder: &Builder, grace_ms: u32) -> Replicated {
    let mut servers = Replicated::start(builder, 1);
    let mut alice = servers.primary.connect(Protocol::Resp2);
    let request = args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS, "SESSION", grace_ms];
    alice.cmd(&request).as_token();
    servers.wait_in_step();
    servers.primary.kill9();
    promote(&servers.replicas[0]);
    servers
}

/// `owner` takes the lock in a session with [`GRACE_MS`].
#[track_caller]
fn hold_in_session(conn: &mut Conn, key: &str, owner: &str) -> u64 {
    let request = args!["FLOCK.ACQUIRE", key, owner, LEASE_MS, "SESSION", GRACE_MS];
    conn.cmd(&request).as_token()
}

/// `owner` queues in a session; answers its position.
#[track_caller]
fn queue_in_session(conn: &mut Conn, key: &str, owner: &str, channel: &str) -> i64 {
    let request = [&queue_request(key, owner, channel)[..], &args!["SESSION", GRACE_MS]].concat();
    position(&conn.cmd(&request))
}

/// Closes a connection and waits until the server has noticed.
#[track_caller]
fn close(server: &Server, conn: Conn) {
    let id = conn.id();
    drop(conn);
    server.wait_until_gone(id);
}

/// Waits until alice's lease is cut to a grace, and still runs.
#[track_caller]
fn wait_until_cut(conn: &mut Conn, key: &str) {
    wait_until("the lease is cut", ANSWER_WITHIN, || left_ms(conn, key, "alice") <= CUT_MS);
}
