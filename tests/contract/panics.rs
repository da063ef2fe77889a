//! A panic inside the module, planted in every kind of callback: an error at most, never the end of the server.
//!
//! The library that is shipped has nothing planted. These tests load another one, with the feature `planted-panics`, that the long tier
//! builds (and with the feature `next-format`, for `upgrade.rs`); in the usual tier they do nothing.

use flock_tests::args;
use flock_tests::on_own_servers;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::{Builder, Server, planted_module};
use flock_tests::topology::Cluster;
use flock_tests::wait::{wait_for, wait_until};

use crate::lock_view::waiting;
use crate::scene::{LEASE_MS, hold, long_tier, release, wait_until_free, waiter};

on_own_servers![
    load_that_panics_refuses_to_load,
    command_that_panics_is_one_error,
    reply_that_panics_is_one_error,
    timeout_that_panics_is_one_error,
    disconnect_that_panics_is_survived,
    waiter_whose_freeing_panics_is_survived,
    server_event_that_panics_is_survived,
    cluster_message_that_panics_is_survived,
    keyspace_event_that_panics_is_survived,
    timer_that_panics_is_survived,
    load_of_a_value_that_panics_is_one_error,
    save_of_a_value_that_panics_is_no_value,
    snapshot_that_panics_fails,
    rewrite_that_panics_fails,
    memory_usage_that_panics_is_survived,
    digest_that_panics_is_survived,
    free_that_panics_is_survived,
    unlink_that_panics_is_survived,
    snapshot_whose_counter_panics_fails,
    load_of_a_counter_that_panics_is_refused,
    setting_that_panics_is_one_error,
    info_that_panics_is_cut_short,
];

const CAUGHT: &str = "a bug was caught in the";

/// Servers in which call number `turn` of this kind of callback panics; none in the usual tier.
fn planted(builder: &Builder, kind: &str, turn: u32) -> Option<Builder> {
    if !long_tier() {
        println!("not run: planted panics are for the long tier, which builds a library that has them");
        return None;
    }
    let plan = format!("{kind}:{turn}");
    Some(builder.clone().module(planted_module()).env("FLOCK_PLANTED_PANIC", &plan).allow_panics())
}

/// The same, started.
#[track_caller]
fn start(builder: &Builder, kind: &str, turn: u32) -> Option<(Server, Conn)> {
    let server = planted(builder, kind, turn)?.start();
    let conn = server.connect(Protocol::Resp2);
    Some((server, conn))
}

/// The panic has happened, was counted once and logged; and everything works.
#[track_caller]
fn assert_survived(server: &Server, kind: &str) {
    wait_until("the panic is counted", ANSWER_WITHIN, || server.info("flock").get("flock_panics_caught") == Some("1"));
    let line = format!("{CAUGHT} {kind} callback, the server goes on: planted");
    assert!(server.log().contains(&line), "{}", server.log());
    assert_works(server);
}

/// Somebody takes a lock, somebody waits for it and gets it, a lease ends, a wait ends.
#[track_caller]
fn assert_works(server: &Server) {
    let mut conn = server.connect(Protocol::Resp2);
    let first = hold(&mut conn, "afterwards", "alice");
    let mut next = waiter(server, Protocol::Resp2, "afterwards", "bob");
    release(&mut conn, "afterwards", "alice");
    assert!(next.recv().as_token() > first);
    release(&mut conn, "afterwards", "bob");
    conn.cmd(&args!["FLOCK.ACQUIRE", "afterwards", "carol", 50]).as_token();
    assert!(conn.cmd(&args!["FLOCK.ACQUIRE", "afterwards", "dave", LEASE_MS, "BLOCK", 10]).is_nil());
    conn.cmd(&args!["FLOCK.ACQUIRE", "afterwards", "dave", LEASE_MS, "BLOCK", 0]).as_token();
    release(&mut conn, "afterwards", "dave");
    server.assert_alive();
}

#[track_caller]
fn assert_one_error(conn: &mut Conn, reply: &Reply) {
    assert!(reply.error_text().contains("internal error"), "{reply}");
    assert_eq!(conn.cmd(&["PING"]), Reply::Simple("PONG".into()), "one reply, not two");
}

fn load_that_panics_refuses_to_load(builder: Builder) {
    // The server ends as it does for any module that refuses.
    let Some(builder) = planted(&builder, "Load", 1) else { return };
    let failure = builder.try_start().expect_err("the module does not load");
    assert_eq!(failure.status.and_then(|status| status.code()), Some(1), "{}", failure.log);
    assert!(failure.log.contains("a bug was caught in the Load callback"), "{}", failure.log);
}

fn command_that_panics_is_one_error(builder: Builder) {
    let Some((server, mut conn)) = start(&builder, "Command", 1) else { return };
    let reply = conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS]);
    assert_one_error(&mut conn, &reply);
    assert_eq!(conn.cmd(&["DBSIZE"]), Reply::Int(0));
    assert_survived(&server, "Command");
}

fn reply_that_panics_is_one_error(builder: Builder) {
    // The waiter was granted the lock and does not hear of it: a grant that is not delivered ends.
    let Some((server, mut conn)) = start(&builder, "Reply", 1) else { return };
    hold(&mut conn, "k", "alice");
    let mut bob = waiter(&server, Protocol::Resp2, "k", "bob");
    release(&mut conn, "k", "alice");
    let reply = bob.recv();
    assert_one_error(&mut bob, &reply);
    wait_until_free(&mut conn, "k");
    assert_survived(&server, "Reply");
}

#[track_caller]
fn unblock(conn: &mut Conn, waiter: &Conn, how: &str) {
    assert_eq!(conn.cmd(&args!["CLIENT", "UNBLOCK", waiter.id(), how]), Reply::Int(1));
}

fn timeout_that_panics_is_one_error(builder: Builder) {
    let Some((server, mut conn)) = start(&builder, "Timeout", 1) else { return };
    hold(&mut conn, "k", "alice");
    let mut bob = waiter(&server, Protocol::Resp2, "k", "bob");
    unblock(&mut conn, &bob, "TIMEOUT");
    let reply = bob.recv();
    assert_one_error(&mut bob, &reply);
    release(&mut conn, "k", "alice");
    assert_survived(&server, "Timeout");
}

fn disconnect_that_panics_is_survived(builder: Builder) {
    for by_error in [true, false] {
        let Some((server, mut conn)) = start(&builder, "Disconnect", 1) else { return };
        hold(&mut conn, "k", "alice");
        let mut bob = waiter(&server, Protocol::Resp2, "k", "bob");
        if by_error {
            unblock(&mut conn, &bob, "ERROR");
            assert_eq!(bob.recv().error_code(), Some("UNBLOCKED"));
        } else {
            let id = bob.id();
            bob.abort();
            server.wait_until_gone(id);
        }
        release(&mut conn, "k", "alice");
        assert_survived(&server, "Disconnect");
    }
}

fn waiter_whose_freeing_panics_is_survived(builder: Builder) {
    let Some((server, mut conn)) = start(&builder, "FreeWaiter", 1) else { return };
    hold(&mut conn, "k", "alice");
    let mut bob = waiter(&server, Protocol::Resp2, "k", "bob");
    release(&mut conn, "k", "alice");
    bob.recv().as_token();
    assert_survived(&server, "FreeWaiter");
}

fn server_event_that_panics_is_survived(builder: Builder) {
    // One of very many: the first ones are those of a server that starts.
    for turn in [1, 2, 3, 5, 8, 20, 60, 150] {
        let Some((server, _)) = start(&builder, "ServerEvent", turn) else { return };
        assert_works(&server);
        assert_survived(&server, "ServerEvent");
    }
}

fn cluster_message_that_panics_is_survived(builder: Builder) {
    // Nodes tell each other their marks.
    let Some(builder) = planted(&builder, "ClusterMessage", 1) else { return };
    let cluster = Cluster::start(&builder, 2);
    let keys = ["a", "b", "c", "d", "e", "f"];
    for (key, floor) in keys.iter().zip(1u64..) {
        let mut conn = cluster.nodes[cluster.owner_of(key)].connect(Protocol::Resp2);
        let token = hold(&mut conn, key, "alice");
        conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS, "FLOOR", token + floor * 600_000]).as_token();
    }
    let hit = wait_for("a message was received", ANSWER_WITHIN, || {
        cluster.nodes.iter().find(|node| node.info("flock").get("flock_panics_caught") == Some("1"))
    });
    assert!(hit.log().contains("a bug was caught in the ClusterMessage callback"), "{}", hit.log());
    for key in keys {
        let mut conn = cluster.nodes[cluster.owner_of(key)].connect(Protocol::Resp2);
        release(&mut conn, key, "alice");
    }
}

fn keyspace_event_that_panics_is_survived(builder: Builder) {
    let builder = builder.config("maxmemory-policy", "allkeys-random");
    let Some((server, mut conn)) = start(&builder, "KeyspaceEvent", 1) else { return };
    assert_eq!(conn.cmd(&["SET", "victim", "x"]), Reply::ok());
    conn.cmd(&["CONFIG", "SET", "maxmemory", "1"]);
    conn.cmd(&["SET", "another", "x"]);
    conn.cmd(&["CONFIG", "SET", "maxmemory", "0"]);
    assert_survived(&server, "KeyspaceEvent");
}

fn timer_that_panics_is_survived(builder: Builder) {
    let Some((server, mut conn)) = start(&builder, "Timer", 1) else { return };
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 30]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS, "BLOCK", 0]).as_token();
    assert_survived(&server, "Timer");
}

fn load_of_a_value_that_panics_is_one_error(builder: Builder) {
    let Some((server, mut conn)) = start(&builder, "RdbLoad", 1) else { return };
    hold(&mut conn, "k", "alice");
    let value = conn.cmd(&["DUMP", "k"]).as_bytes().to_vec();
    assert_eq!(conn.cmd(&args!["RESTORE", "restored", 0, value]).error_code(), Some("ERR"));
    assert_eq!(conn.cmd(&["EXISTS", "restored"]), Reply::Int(0));
    assert_eq!(conn.cmd(&args!["RESTORE", "restored", 0, value]), Reply::ok());
    assert_survived(&server, "RdbLoad");
}

fn save_of_a_value_that_panics_is_no_value(builder: Builder) {
    // What DUMP answers then is no value that could be restored.
    let Some((server, mut conn)) = start(&builder, "RdbSave", 1) else { return };
    hold(&mut conn, "k", "alice");
    if let Reply::Bulk(value) = conn.cmd(&["DUMP", "k"]) {
        assert_eq!(conn.cmd(&args!["RESTORE", "restored", 0, value]).error_code(), Some("ERR"));
    }
    let value = conn.cmd(&["DUMP", "k"]).as_bytes().to_vec();
    assert_eq!(conn.cmd(&args!["RESTORE", "restored", 0, value]), Reply::ok());
    assert_survived(&server, "RdbSave");
}

/// What is to be written by a child of the server fails, and the lock is still there. The child counts its panic for itself.
#[track_caller]
fn assert_child_fails(server: &Server, conn: &mut Conn, kind: &str, command: &str, status: &str) {
    hold(conn, "k", "alice");
    assert_eq!(conn.cmd(&[command]).error_code(), None);
    wait_until("it has failed", ANSWER_WITHIN, || server.info("persistence").text(status) == "err");
    assert!(server.log().contains(&format!("{CAUGHT} {kind} callback")), "{}", server.log());
    release(conn, "k", "alice");
    assert_works(server);
}

fn snapshot_that_panics_fails(builder: Builder) {
    let Some((server, mut conn)) = start(&builder, "RdbSave", 1) else { return };
    assert_child_fails(&server, &mut conn, "RdbSave", "BGSAVE", "rdb_last_bgsave_status");
}

fn rewrite_that_panics_fails(builder: Builder) {
    let builder = builder.appendonly().config("aof-use-rdb-preamble", "no");
    let Some((server, mut conn)) = start(&builder, "AofRewrite", 1) else { return };
    assert_child_fails(&server, &mut conn, "AofRewrite", "BGREWRITEAOF", "aof_last_bgrewrite_status");
}

fn snapshot_whose_counter_panics_fails(builder: Builder) {
    let Some((server, mut conn)) = start(&builder, "AuxSave", 1) else { return };
    assert_child_fails(&server, &mut conn, "AuxSave", "BGSAVE", "rdb_last_bgsave_status");
}

fn load_of_a_counter_that_panics_is_refused(builder: Builder) {
    // Without its counter a snapshot must not be served: its tokens would come again. The server ends as after any file that it cannot
    // read: how, is its own affair.
    let Some(planted) = planted(&builder, "AuxLoad", 1) else { return };
    let mut server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    hold(&mut conn, "k", "alice");
    assert_eq!(conn.cmd(&["SAVE"]), Reply::ok());
    server.kill9();
    let failure = planted.copy_data_from(&server).try_start().expect_err("the snapshot is refused");
    assert!(failure.status.is_some_and(|status| status.code().is_some()), "{}", failure.log);
    assert!(failure.log.contains("a bug was caught in the AuxLoad callback"), "{}", failure.log);
}

fn memory_usage_that_panics_is_survived(builder: Builder) {
    let Some((server, mut conn)) = start(&builder, "MemUsage", 1) else { return };
    hold(&mut conn, "k", "alice");
    conn.cmd(&["MEMORY", "USAGE", "k"]).as_int();
    assert_survived(&server, "MemUsage");
}

fn digest_that_panics_is_survived(builder: Builder) {
    let Some((server, mut conn)) = start(&builder, "Digest", 1) else { return };
    hold(&mut conn, "k", "alice");
    let wrong = conn.cmd(&["DEBUG", "DIGEST-VALUE", "k"]);
    assert_ne!(conn.cmd(&["DEBUG", "DIGEST-VALUE", "k"]), wrong);
    assert_survived(&server, "Digest");
}

fn free_that_panics_is_survived(builder: Builder) {
    let Some((server, mut conn)) = start(&builder, "Free", 1) else { return };
    hold(&mut conn, "k", "alice");
    assert_eq!(conn.cmd(&["DEL", "k"]), Reply::Int(1));
    hold(&mut conn, "k", "bob");
    assert_survived(&server, "Free");
}

fn unlink_that_panics_is_survived(builder: Builder) {
    // Nobody was told that the lock is free; who asks next gets it, and so does who waited.
    let Some((server, mut conn)) = start(&builder, "Unlink", 1) else { return };
    hold(&mut conn, "k", "alice");
    let mut bob = waiting(&server, Protocol::Resp2, &args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS, "BLOCK", 500]);
    assert_eq!(conn.cmd(&["DEL", "k"]), Reply::Int(1));
    let reply = bob.recv();
    assert!(matches!(reply, Reply::Nil | Reply::Int(1..)), "{reply}");
    conn.cmd(&["FLOCK.REVOKE", "k"]);
    hold(&mut conn, "k", "carol");
    assert_survived(&server, "Unlink");
}

fn setting_that_panics_is_one_error(builder: Builder) {
    // The calls before are those of the start.
    let Some((server, mut conn)) = start(&builder, "Config", 60) else { return };
    let mut errors = 0;
    for number in 0..100 {
        let reply = conn.cmd(&args!["CONFIG", "SET", "flock.lease-max-ms", 100_000 + number]);
        errors += u32::from(reply.error_code().is_some());
        assert_eq!(conn.cmd(&["PING"]), Reply::Simple("PONG".into()), "one reply, not two");
    }
    assert!(errors <= 1, "{errors} errors");
    assert_survived(&server, "Config");
}

fn info_that_panics_is_cut_short(builder: Builder) {
    let Some((server, mut conn)) = start(&builder, "Info", 1) else { return };
    assert!(!conn.cmd(&["INFO", "flock"]).as_str().contains("flock_counter"));
    assert_survived(&server, "Info");
}
