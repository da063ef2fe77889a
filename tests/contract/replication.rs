//! Replicas show what the primary shows, decide nothing, and can take over at any moment.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use flock_core::refusal::LossReason;
use flock_tests::args;
use flock_tests::args::encode;
use flock_tests::cpu::main_thread_cpu;
use flock_tests::on_own_servers;
use flock_tests::random::Random;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::{Builder, Info, Server};
use flock_tests::topology::{Replicated, SYNC_WITHIN, demote, promote, wait_in_step};
use flock_tests::wait::{holds_for, let_pass, wait_until};

use crate::lock_view::{holder, holders, left_ms, waiters};
use crate::scene::{
    Heard, LEASE_MS, QUIET, hear, hold, hold_with_channel, listener, long_tier, lost, outlast, release, rounds,
    transaction, waiter,
};
use crate::traffic::{Background, Traffic, assert_same, contents, held, wait_settled};

on_own_servers![
    random_traffic_leaves_all_replicas_equal,
    replica_that_attaches_under_load_is_equal,
    replica_that_resumes_under_load_is_equal,
    replica_whose_backlog_was_too_short_is_equal,
    replica_that_comes_when_the_backlog_was_given_up_is_equal,
    replica_that_resumes_with_a_restarted_primary_is_equal,
    sub_replica_of_a_promoted_replica_is_equal,
    replicas_own_append_only_file_is_complete,
    lease_that_ends_while_a_replica_waits_for_its_snapshot_is_replicated,
    append_only_file_begun_under_load_is_complete,
    append_only_file_begun_in_a_transaction_is_complete,
    stream_carries_effects_and_no_requests,
    kill_of_a_connection_is_not_replicated,
    handoff_after_a_deletion_follows_it,
    replica_ends_nothing_by_itself,
    replica_shows_an_ended_hold_as_expired,
    replica_refuses_every_verb,
    writable_replica_refuses_every_verb,
    writable_replica_survives_changes_of_its_own,
    transaction_is_applied_as_one,
    replica_never_shows_two_holders,
    lease_is_the_same_on_the_replica,
    promoted_replica_keeps_holds_and_their_tokens,
    lease_runs_on_after_promotion,
    promotion_with_many_locks_is_short,
    session_hold_ends_after_promotion_unless_renewed,
    promotion_grace_suspends_new_grants_only,
    demotion_ends_waits_and_they_can_begin_again,
    demoted_primary_decides_nothing,
    full_synchronization_takes_no_hold_for_lost,
    isolated_primary_hands_nothing_over,
    blocking_request_of_a_primary_blocks_no_link,
    messages_are_heard_at_the_primary_alone,
];

/// How much a test of the quick tier asks; the long tier asks 20 times as much.
fn steps(quick: u64) -> u64 {
    rounds(quick, 20 * quick)
}

#[track_caller]
fn assert_equal(primary: &Server, replica: &Server) {
    wait_in_step(primary, replica);
    assert_same(&contents(replica), &contents(primary), "replica and primary");
}

/// Waits until the server has found out that nobody receives what it replicates: it looks once a second.
fn wait_until_nobody_listens() {
    let_pass(Duration::from_millis(1200));
}

/// Waits until the first append-only file is complete: its manifest comes last.
#[track_caller]
fn wait_for_append_only_file(server: &Server) {
    let manifest = server.dir().join("appendonlydir/appendonly.aof.manifest");
    wait_until("the append-only file is there", ANSWER_WITHIN, || manifest.exists());
}

fn random_traffic_leaves_all_replicas_equal(builder: Builder) {
    // S10. A change that is decided and not replicated, or replicated and applied otherwise, makes a replica differ: in who
    // holds, under which token, in which mode, with which terms. Sub-replicas get the same stream from the replica.
    let servers = Replicated::start(&builder, 1);
    let (primary, replica) = (&servers.primary, &servers.replicas[0]);
    let sub_replica = builder.replica_of(replica).start();
    let mut traffic = Traffic::new(Random::new(), 8);
    let mut conn = primary.connect(Protocol::Resp2);
    for _ in 0..steps(3000) {
        traffic.step(&mut conn);
    }
    wait_settled(primary);
    assert_equal(primary, replica);
    wait_in_step(replica, &sub_replica);
    assert_same(&contents(&sub_replica), &contents(primary), "sub-replica and primary");
}

fn replica_that_attaches_under_load_is_equal(builder: Builder) {
    // A server without replicas hands nothing to the replication stream. The first effect after the snapshot that a new replica
    // is built from must be in the stream again, in every way to make and send one.
    for way in [
        &[("repl-diskless-sync", "yes")][..],
        &[("repl-diskless-sync", "no")],
        &[("repl-diskless-sync", "yes"), ("repl-diskless-load", "swapdb")],
        &[("dual-channel-replication-enabled", "yes")],
    ] {
        let builder = way.iter().fold(builder.clone(), |builder, (name, value)| builder.config(name, value));
        let primary = builder.start();
        let load = Background::start(&primary, Traffic::new(Random::new(), 50));
        wait_until_nobody_listens();
        let replica = builder.clone().replica_of(&primary).start();
        let mut conn = replica.connect(Protocol::Resp2);
        wait_until("the replica is connected", SYNC_WITHIN, || {
            Info::ask(&mut conn, "replication").text("master_link_status") == "up"
        });
        load.wait_steps(100);
        load.stop();
        wait_settled(&primary);
        wait_in_step(&primary, &replica);
        assert_same(&contents(&replica), &contents(&primary), &format!("{way:?}"));
    }
}

fn replica_that_resumes_under_load_is_equal(builder: Builder) {
    // A partial resync sends what was missed, once: an effect twice or not at all shows here.
    let servers = Replicated::start(&builder, 1);
    let (primary, replica) = (&servers.primary, &servers.replicas[0]);
    let load = Background::start(primary, Traffic::new(Random::new(), 50));
    load.wait_steps(100);
    assert_eq!(primary.connect(Protocol::Resp2).cmd(&["CLIENT", "KILL", "TYPE", "replica"]), Reply::Int(1));
    wait_until("the replica has resumed", SYNC_WITHIN, || primary.info("stats").number("sync_partial_ok") == 1);
    load.wait_steps(100);
    load.stop();
    wait_settled(primary);
    assert_equal(primary, replica);
    assert_eq!(primary.info("stats").number("sync_full"), 1);
}

fn replica_whose_backlog_was_too_short_is_equal(builder: Builder) {
    // The second full resync replaces data that are there already: locks and their deadlines of before must be forgotten.
    let servers = Replicated::start(&builder.config("repl-backlog-size", 16_384), 1);
    let (primary, replica) = (&servers.primary, &servers.replicas[0]);
    let load = Background::start(primary, Traffic::new(Random::new(), 50));
    load.wait_steps(100);
    replica.sigstop();
    let mut conn = primary.connect(Protocol::Resp2);
    conn.cmd(&["CLIENT", "KILL", "TYPE", "replica"]);
    for _ in 0..40 {
        conn.cmd(&args!["SET", "filler", "x".repeat(10_000)]);
    }
    conn.cmd(&["DEL", "filler"]);
    load.wait_steps(100);
    replica.sigcont();
    wait_until("the replica was synced anew", SYNC_WITHIN, || primary.info("stats").number("sync_full") == 2);
    load.wait_steps(100);
    load.stop();
    wait_settled(primary);
    assert_equal(primary, replica);
}

fn replica_that_comes_when_the_backlog_was_given_up_is_equal(builder: Builder) {
    // Some time after its last replica has gone a server gives up its backlog, and stops handing over effects. The replica that
    // comes back then must get everything anew, and what is written from its snapshot on.
    let builder = builder.config("repl-backlog-ttl", 1);
    let mut servers = Replicated::start(&builder, 1);
    let (primary, replica) = (&servers.primary, &mut servers.replicas[0]);
    let load = Background::start(primary, Traffic::new(Random::new(), 50));
    load.wait_steps(100);
    replica.shutdown_nosave();
    wait_until("the backlog is given up", SYNC_WITHIN, || {
        primary.info("replication").number("repl_backlog_active") == 0
    });
    wait_until_nobody_listens();
    replica.start_again();
    let mut conn = replica.connect(Protocol::Resp2);
    wait_until("the replica is connected", SYNC_WITHIN, || {
        Info::ask(&mut conn, "replication").text("master_link_status") == "up"
    });
    load.wait_steps(100);
    load.stop();
    wait_settled(primary);
    assert_equal(primary, replica);
}

fn replica_that_resumes_with_a_restarted_primary_is_equal(builder: Builder) {
    // A primary that ends in the regular way keeps its place in the stream: its replica resumes without a snapshot. Leases that
    // were over at the start, and the new mark, must come in the stream.
    let mut servers = Replicated::start(&builder.config("save", "3600 1"), 1);
    let mut conn = servers.primary.connect(Protocol::Resp2);
    let mut traffic = Traffic::new(Random::new(), 20);
    for _ in 0..500 {
        traffic.step(&mut conn);
    }
    servers.primary.sigterm();
    assert!(servers.primary.wait_exit(ANSWER_WITHIN).success());
    servers.primary.start_again();
    let primary = &servers.primary;
    let mut conn = primary.connect(Protocol::Resp2);
    wait_until("the replica has resumed", SYNC_WITHIN, || primary.info("stats").number("sync_partial_ok") == 1);
    for _ in 0..100 {
        traffic.step(&mut conn);
    }
    drop(conn);
    wait_settled(primary);
    assert_equal(primary, &servers.replicas[0]);
    assert_eq!(primary.info("stats").number("sync_full"), 0);
}

fn sub_replica_of_a_promoted_replica_is_equal(builder: Builder) {
    // The replica in between passed its primary's stream on, and now writes its own.
    let servers = Replicated::start(&builder, 1);
    let (primary, replica) = (&servers.primary, &servers.replicas[0]);
    let sub_replica = builder.replica_of(replica).start();
    wait_in_step(replica, &sub_replica);
    let mut traffic = Traffic::new(Random::new(), 20);
    let mut conn = primary.connect(Protocol::Resp2);
    for _ in 0..500 {
        traffic.step(&mut conn);
    }
    servers.wait_in_step();
    promote(replica);
    let mut conn = replica.connect(Protocol::Resp2);
    for _ in 0..500 {
        traffic.step(&mut conn);
    }
    drop(conn);
    wait_settled(replica);
    assert_equal(replica, &sub_replica);
}

fn replicas_own_append_only_file_is_complete(builder: Builder) {
    // A replica writes what it applies into a file of its own: once, and all of it. Then it is killed and starts alone.
    let servers = Replicated::start(&builder, 0);
    let primary = &servers.primary;
    let mut replica = builder.clone().appendonly().replica_of(primary).start();
    wait_in_step(primary, &replica);
    // After a full synchronisation the file is begun anew, in the background: before that there is nothing to start from.
    wait_until("the replica's file is begun", ANSWER_WITHIN, || {
        let info = replica.info("persistence");
        info.number("aof_rewrite_in_progress") == 0 && info.number("aof_rewrite_scheduled") == 0
    });
    let mut conn = primary.connect(Protocol::Resp2);
    let mut traffic = Traffic::new(Random::new(), 20);
    for _ in 0..500 {
        traffic.step(&mut conn);
    }
    drop(conn);
    wait_settled(primary);
    wait_in_step(primary, &replica);
    let before = contents(primary);
    replica.kill9();
    replica.set_config("replicaof", "no one");
    replica.start_again();
    assert_same(&contents(&replica), &before, "the replica alone, and its primary");
}

fn lease_that_ends_while_a_replica_waits_for_its_snapshot_is_replicated(builder: Builder) {
    // Between the arrival of a first replica and the birth of its snapshot there is a backlog, but nothing of ours is written to
    // it yet. What is done meanwhile, by commands and by the clock, must be in the snapshot, and no command of a user in the stream.
    let primary = builder.clone().config("repl-diskless-sync-delay", 1).start();
    let mut conn = primary.connect(Protocol::Resp2);
    hold(&mut conn, "k", "alice");
    wait_until_nobody_listens();
    let follow = builder.replica_of(&primary);
    let replica = follow.start();
    let ended_before = primary.info("flock").number("flock_expired");
    wait_until("the replica waits for its snapshot", ANSWER_WITHIN, || {
        primary.info("replication").number("connected_slaves") == 1
    });
    let mut queued = waiter(&primary, Protocol::Resp2, "k", "bob");
    release(&mut conn, "k", "alice");
    queued.recv().as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", "short", "alice", 5]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", "handed", "alice", 5]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", "handed", "bob", LEASE_MS, "BLOCK", 0]).as_token();
    wait_until("the leases have ended", ANSWER_WITHIN, || {
        primary.info("flock").number("flock_expired") == ended_before + 2
    });
    assert!(primary.info("stats").number("sync_full") <= 1, "the test was too slow: the snapshot came first");
    assert_equal(&primary, &replica);
    assert_eq!(holders(&mut replica.connect(Protocol::Resp2), "handed"), ["bob"]);
}

fn append_only_file_begun_under_load_is_complete(builder: Builder) {
    // The same for an append-only file that is switched on later: what is acknowledged once it is there survives a kill, whether
    // the file begins with a snapshot or with commands.
    for preamble in ["yes", "no"] {
        let mut server =
            builder.clone().config("appendfsync", "always").config("aof-use-rdb-preamble", preamble).start();
        let load = Background::start(&server, Traffic::new(Random::new(), 50));
        wait_until_nobody_listens();
        let mut conn = server.connect(Protocol::Resp2);
        assert_eq!(conn.cmd(&["CONFIG", "SET", "appendonly", "yes"]), Reply::ok());
        wait_for_append_only_file(&server);
        load.wait_steps(200);
        load.stop();
        wait_settled(&server);
        let before = held(&server);
        server.kill9();
        server.set_config("appendonly", "yes");
        server.start_again();
        assert_same(&held(&server), &before, &format!("aof-use-rdb-preamble {preamble}"));
    }
}

fn append_only_file_begun_in_a_transaction_is_complete(builder: Builder) {
    // One transaction takes a lock, switches the file on, and takes another; a replica that waits for its snapshot makes the
    // server keep the transaction's commands. The user's own command must not get into the file: a loader refuses it.
    let mut server = builder.clone().config("appendfsync", "always").config("repl-diskless-sync-delay", 60).start();
    wait_until_nobody_listens();
    let _replica = builder.replica_of(&server).start();
    wait_until("the replica waits for its snapshot", ANSWER_WITHIN, || {
        server.info("replication").number("connected_slaves") == 1
    });
    let mut conn = server.connect(Protocol::Resp2);
    let replies = transaction(
        &mut conn,
        &[
            &args!["FLOCK.ACQUIRE", "before", "alice", LEASE_MS],
            &args!["CONFIG", "SET", "appendonly", "yes"],
            &args!["FLOCK.ACQUIRE", "after", "alice", LEASE_MS],
        ],
    );
    assert_eq!(replies[1], Reply::ok());
    wait_for_append_only_file(&server);
    server.kill9();
    server.set_config("appendonly", "yes");
    server.start_again();
    let mut conn = server.connect(Protocol::Resp2);
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "before", replies[0].as_token()]), Reply::Int(1));
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "after", replies[2].as_token()]), Reply::Int(1));
    assert!(!server.log().contains("CRITICAL"), "{}", server.log());
}

/// All that the server has written into its append-only file.
#[track_caller]
fn append_only_file(server: &Server) -> String {
    let file = server.dir().join("appendonlydir/appendonly.aof.1.incr.aof");
    String::from_utf8_lossy(&std::fs::read(file).expect("the file is there")).into_owned()
}

fn stream_carries_effects_and_no_requests(builder: Builder) {
    // A request in the stream would be decided a second time, by a replica with another clock; one that waits would block the
    // replica's link for ever. The append-only file has the same content as the stream.
    let server = builder.appendonly().start();
    let mut conn = server.connect(Protocol::Resp2);
    let mut traffic = Traffic::new(Random::new(), 8);
    for _ in 0..500 {
        traffic.step(&mut conn);
    }
    hold(&mut conn, "waited for", "alice");
    let mut queued = waiter(&server, Protocol::Resp2, "waited for", "bob");
    release(&mut conn, "waited for", "alice");
    queued.recv().as_token();
    let file = append_only_file(&server);
    for request in ["ACQUIRE", "RELEASE", "RENEW", "REVOKE", "CHECK"] {
        assert!(!file.contains(&format!("FLOCK.{request}")), "{request} is in the file");
    }
    assert!(file.contains("FLOCK._APPLY"));
}

fn kill_of_a_connection_is_not_replicated(builder: Builder) {
    // What a closed connection causes, replicated from within the command that closed it, would drag that command along: CLIENT
    // KILL with a number that is somebody else's on the replica.
    let server = builder.appendonly().start();
    let mut conn = server.connect(Protocol::Resp2);
    let mut session = server.connect(Protocol::Resp2);
    session.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS, "SESSION", 1]).as_token();
    let queued = waiter(&server, Protocol::Resp2, "k", "bob");
    let mut last = waiter(&server, Protocol::Resp2, "k", "carol");
    assert_eq!(conn.cmd(&args!["CLIENT", "KILL", "ID", queued.id()]), Reply::Int(1));
    assert_eq!(conn.cmd(&args!["CLIENT", "KILL", "ID", session.id()]), Reply::Int(1));
    last.recv().as_token();
    assert!(!append_only_file(&server).contains("KILL"), "{}", append_only_file(&server));
}

fn handoff_after_a_deletion_follows_it(builder: Builder) {
    // The next grant, replicated before the DEL that made room for it, would be deleted on the replica.
    let servers = Replicated::start(&builder, 1);
    let mut conn = servers.primary.connect(Protocol::Resp2);
    let mut reader = servers.replicas[0].connect(Protocol::Resp2);
    for (round, deletion) in [
        &args!["DEL", "k"][..],
        &args!["UNLINK", "k"],
        &args!["RENAME", "k", "elsewhere"],
        &args!["MOVE", "k", 1],
        &args!["EVAL", "return redis.call('DEL', KEYS[1])", 1, "k"],
        &args!["SWAPDB", 0, 2],
    ]
    .into_iter()
    .enumerate()
    {
        hold(&mut conn, "k", "alice");
        let next = format!("bob {round}");
        let mut queued = waiter(&servers.primary, Protocol::Resp2, "k", &next);
        assert_eq!(conn.cmd(deletion).error_code(), None);
        queued.recv().as_token();
        servers.wait_in_step();
        assert_eq!(holders(&mut reader, "k"), [next.as_str()], "{}", deletion[0].escape_ascii());
        release(&mut conn, "k", &next);
    }
}

fn replica_ends_nothing_by_itself(builder: Builder) {
    // A replica that ends a lease on its own clock differs from its primary, and frees a lock that was renewed meanwhile.
    let servers = Replicated::start(&builder, 1);
    let replica = &servers.replicas[0];
    let mut conn = servers.primary.connect(Protocol::Resp2);
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 200]).as_token();
    servers.wait_in_step();
    servers.primary.sigstop();
    let mut reader = replica.connect(Protocol::Resp2);
    holds_for("the key exists on the replica", Duration::from_millis(500), || {
        reader.cmd(&["EXISTS", "k"]) == Reply::Int(1)
    });
    servers.primary.sigcont();
    wait_until("the primary has ended it", ANSWER_WITHIN, || reader.cmd(&["EXISTS", "k"]) == Reply::Int(0));
}

fn replica_shows_an_ended_hold_as_expired(builder: Builder) {
    // Whoever reads a replica must see that the lease is over, though the key is still there.
    let servers = Replicated::start(&builder, 1);
    let mut conn = servers.primary.connect(Protocol::Resp2);
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 100]).as_token();
    servers.wait_in_step();
    servers.primary.sigstop();
    let mut reader = servers.replicas[0].connect(Protocol::Resp3);
    wait_until("the lease is over", ANSWER_WITHIN, || left_ms(&mut reader, "k", "alice") == 0);
    assert_eq!(holder(&mut reader, "k", "alice").field("state").as_str(), "expired");
    servers.primary.sigcont();
}

#[track_caller]
fn assert_refuses_every_verb(replica: &Server, token: u64) {
    let mut conn = replica.connect(Protocol::Resp2);
    let before = contents(replica);
    for request in [
        &args!["FLOCK.ACQUIRE", "k", "alice", 1][..],
        &args!["FLOCK.ACQUIRE", "free", "bob", 1],
        &args!["FLOCK.ACQUIRE", "k", "bob", 1, "BLOCK", 1],
        &args!["FLOCK.ACQUIRE", "k", "bob", 1, "FLOOR", 1],
        &args!["FLOCK.RELEASE", "k", "alice"],
        &args!["FLOCK.RENEW", "k", "alice", 1],
        &args!["FLOCK.CHECK", "k", token],
        &args!["FLOCK.REVOKE", "k"],
    ] {
        let reply = conn.cmd(request);
        assert_eq!(reply.error_code(), Some("READONLY"), "{}: {reply}", request[0].escape_ascii());
    }
    assert_same(&contents(replica), &before, "the replica, after and before");
}

fn replica_refuses_every_verb(builder: Builder) {
    // A verb that a replica answers is decided by nobody: the primary knows nothing of it. CHECK too must ask the primary.
    let servers = Replicated::start(&builder, 1);
    let token = hold(&mut servers.primary.connect(Protocol::Resp2), "k", "alice");
    servers.wait_in_step();
    assert_refuses_every_verb(&servers.replicas[0], token);
}

fn writable_replica_refuses_every_verb(builder: Builder) {
    // With `replica-read-only no` the server lets writes through to the module, which must refuse them by itself, in a
    // transaction and a script too.
    let servers = Replicated::start(&builder.config("replica-read-only", "no"), 1);
    let replica = &servers.replicas[0];
    let token = hold(&mut servers.primary.connect(Protocol::Resp2), "k", "alice");
    servers.wait_in_step();
    assert_refuses_every_verb(replica, token);
    let mut conn = replica.connect(Protocol::Resp2);
    let request = args!["FLOCK.ACQUIRE", "free", "bob", 1];
    let replies = transaction(&mut conn, &[&request]);
    assert_eq!(replies[0].error_code(), Some("READONLY"));
    let script = "return redis.call('FLOCK.ACQUIRE', KEYS[1], 'bob', 1)";
    assert_eq!(conn.cmd(&args!["EVAL", script, 1, "free"]).error_code(), Some("READONLY"));
}

fn writable_replica_survives_changes_of_its_own(builder: Builder) {
    // On such a replica anybody may delete, move or overwrite a lock that the primary goes on to change: the change must find
    // its way or be dropped, and nothing may be decided or asserted.
    let servers = Replicated::start(&builder.config("replica-read-only", "no"), 1);
    let (primary, replica) = (&servers.primary, &servers.replicas[0]);
    let mut above = primary.connect(Protocol::Resp2);
    let mut below = replica.connect(Protocol::Resp2);
    for spoil in [
        &args!["DEL", "k"][..],
        &args!["SET", "k", "no lock"],
        &args!["RENAME", "k", "elsewhere"],
        &args!["MOVE", "k", 1],
        &args!["SWAPDB", 0, 1],
        &args!["FLUSHALL"],
        &args!["PEXPIRE", "k", 1],
    ] {
        hold(&mut above, "k", "alice");
        servers.wait_in_step();
        assert!(below.cmd(spoil).error_code().is_none(), "{}", spoil[0].escape_ascii());
        above.cmd(&args!["FLOCK.RENEW", "k", "alice", LEASE_MS]);
        above.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS, "REENTRANT", "1"]);
        above.cmd(&args!["FLOCK.RELEASE", "k", "alice"]);
        above.cmd(&args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS, "SHARED"]).as_token();
        above.cmd(&args!["FLOCK.ACQUIRE", "k", "carol", LEASE_MS, "SHARED"]).as_token();
        above.cmd(&args!["FLOCK.REVOKE", "k"]);
        servers.wait_in_step();
    }
    let token = hold(&mut above, "k", "alice");
    servers.wait_in_step();
    promote(replica);
    assert_eq!(below.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(1));
    replica.assert_alive();
}

fn transaction_is_applied_as_one(builder: Builder) {
    // Release, handoff and new grants of one transaction travel as one unit, in their order.
    let servers = Replicated::start(&builder, 1);
    let mut conn = servers.primary.connect(Protocol::Resp2);
    hold(&mut conn, "k", "alice");
    let mut queued = waiter(&servers.primary, Protocol::Resp2, "k", "bob");
    let replies = transaction(
        &mut conn,
        &[
            &args!["FLOCK.ACQUIRE", "other", "alice", LEASE_MS],
            &args!["FLOCK.RELEASE", "k", "alice"],
            &args!["FLOCK.ACQUIRE", "k", "carol", LEASE_MS],
            &args!["FLOCK.RELEASE", "other", "alice"],
            &args!["FLOCK.ACQUIRE", "other", "dave", LEASE_MS],
        ],
    );
    assert_eq!(replies[2], Reply::Nil);
    queued.recv().as_token();
    assert_equal(&servers.primary, &servers.replicas[0]);
    let mut reader = servers.replicas[0].connect(Protocol::Resp2);
    assert_eq!((holders(&mut reader, "k"), holders(&mut reader, "other")), (vec!["bob".into()], vec!["dave".into()]));
}

fn replica_never_shows_two_holders(builder: Builder) {
    // The end of one hold and the grant to the next are one step on the replica too: whoever reads between them would see the
    // lock free, or held twice.
    let servers = Replicated::start(&builder, 1);
    let mut conn = servers.primary.connect(Protocol::Resp2);
    let mut reader = servers.replicas[0].connect(Protocol::Resp2);
    hold(&mut conn, "k", "owner 0");
    servers.wait_in_step();
    for turn in 0..50 {
        let mut next = waiter(&servers.primary, Protocol::Resp2, "k", &format!("owner {}", turn + 1));
        conn.send(&args!["FLOCK.RELEASE", "k", format!("owner {turn}")]);
        for _ in 0..5 {
            let info = reader.cmd(&args!["FLOCK.INFO", "k"]);
            assert_eq!(info.field("holder_count").as_int(), 1, "{info}");
        }
        assert_eq!(conn.recv(), Reply::Int(1));
        next.recv().as_token();
    }
}

fn lease_is_the_same_on_the_replica(builder: Builder) {
    // On the same host and boot the replica takes the very deadline; one that started the lease anew at every resync would
    // prolong it. So it is compared after a full resync late in the lease.
    let primary = builder.start();
    let mut conn = primary.connect(Protocol::Resp2);
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 10_000]).as_token();
    let_pass(Duration::from_millis(300));
    let replica = builder.replica_of(&primary).start();
    wait_in_step(&primary, &replica);
    let mut reader = replica.connect(Protocol::Resp2);
    let upper = left_ms(&mut conn, "k", "alice");
    let left = left_ms(&mut reader, "k", "alice");
    let lower = left_ms(&mut conn, "k", "alice");
    assert!((lower..=upper).contains(&left), "{lower} {left} {upper}");
}

fn promoted_replica_keeps_holds_and_their_tokens(builder: Builder) {
    // A holder whose primary died goes on under the same token; nobody else gets its lock.
    let servers = Replicated::start(&builder, 1);
    let mut conn = servers.primary.connect(Protocol::Resp2);
    let token = hold(&mut conn, "k", "alice");
    servers.wait_in_step();
    promote(&servers.replicas[0]);
    let mut conn = servers.replicas[0].connect(Protocol::Resp2);
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(1));
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS]), Reply::Nil);
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", "k", "alice", LEASE_MS, "TOKEN", token]), Reply::Int(1));
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", "k", "alice", "TOKEN", token]), Reply::Int(1));
}

fn lease_runs_on_after_promotion(builder: Builder) {
    // L5. The new primary must end what the old one would have ended, at the same instant: not earlier, and not never.
    let servers = Replicated::start(&builder, 1);
    let replica = &servers.replicas[0];
    let mut conn = servers.primary.connect(Protocol::Resp2);
    let asked = Instant::now();
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 700]).as_token();
    let granted = Instant::now();
    servers.wait_in_step();
    promote(replica);
    outlast(replica, "k", granted, 700);
    assert!(asked.elapsed() >= Duration::from_millis(700), "{:?}", asked.elapsed());
}

fn promotion_with_many_locks_is_short(builder: Builder) {
    // A promotion that sorts or rebuilds anything per lock stops the server when it is needed most: with many locks it must take hardly
    // more than with few. Counted in processor time of the main thread.
    let few = promotion_cpu(&builder, 100);
    let many = promotion_cpu(&builder, if long_tier() { 1_000_000 } else { 100_000 });
    println!("promotion took {few:?} with a hundred locks, {many:?} with many");
    assert!(many < 3 * few + Duration::from_millis(2), "{few:?} with a hundred locks, {many:?} with many");
    assert!(many < Duration::from_millis(50), "{many:?}");
}

/// What the promotion of a replica with `count` locks, and the first grant after it, take of the processor.
#[track_caller]
fn promotion_cpu(builder: &Builder, count: u32) -> Duration {
    let servers = Replicated::start(builder, 1);
    let replica = &servers.replicas[0];
    take_many(&mut servers.primary.connect(Protocol::Resp2), count);
    servers.wait_in_step();
    let mut conn = replica.connect(Protocol::Resp2);
    assert_eq!(conn.cmd(&["DBSIZE"]), Reply::Int(i64::from(count)));
    let before = main_thread_cpu(replica.pid());
    assert_eq!(conn.cmd(&["REPLICAOF", "NO", "ONE"]), Reply::ok());
    hold(&mut conn, "one more", "alice");
    let used = main_thread_cpu(replica.pid()) - before;
    assert_eq!(Info::ask(&mut conn, "flock").number("flock_held"), i64::from(count) + 1);
    used
}

/// `count` locks named `many 1`, `many 2`, ..., each held by alice.
#[track_caller]
fn take_many(conn: &mut Conn, count: u32) {
    let script = "for i = ARGV[1], ARGV[2] do redis.call('FLOCK.ACQUIRE', 'many ' .. i, 'alice', 600000) end";
    for first in (1..=count).step_by(10_000) {
        let reply = conn.cmd(&args!["EVAL", script, 0, first, count.min(first + 9_999)]);
        assert!(reply.is_nil(), "{reply}");
    }
}

fn session_hold_ends_after_promotion_unless_renewed(builder: Builder) {
    // The new primary does not know the connections of the old one: a session hold that nobody renews is cut to its grace, one
    // that is renewed lives on.
    let servers = Replicated::start(&builder, 1);
    let mut conn = servers.primary.connect(Protocol::Resp2);
    for key in ["silent", "renewed"] {
        conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS, "SESSION", 700]).as_token();
    }
    servers.wait_in_step();
    promote(&servers.replicas[0]);
    let mut conn = servers.replicas[0].connect(Protocol::Resp2);
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", "renewed", "alice", LEASE_MS]), Reply::Int(1));
    wait_until("the silent one has ended", ANSWER_WITHIN, || conn.cmd(&["EXISTS", "silent"]) == Reply::Int(0));
    assert_eq!(holders(&mut conn, "renewed"), ["alice"]);
    assert!(left_ms(&mut conn, "renewed", "alice") > 10_000);
}

fn promotion_grace_suspends_new_grants_only(builder: Builder) {
    // For as long as the grace lasts nobody new is granted, so that holders of the old primary are sure to have ended; holders
    // renew and release; whoever waits is granted when it is over.
    let servers = Replicated::start(&builder.config("flock.promotion-grace-ms", 1000), 1);
    let (primary, replica) = (&servers.primary, &servers.replicas[0]);
    let mut conn = primary.connect(Protocol::Resp2);
    // The first primary too had its grace, at boot.
    wait_until("the boot's grace is over", ANSWER_WITHIN, || {
        !conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS]).is_nil()
    });
    servers.wait_in_step();
    let asked = Instant::now();
    promote(replica);
    let promoted = Instant::now();
    let mut conn = replica.connect(Protocol::Resp2);
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", "free", "bob", LEASE_MS]), Reply::Nil);
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", "k", "alice", LEASE_MS]), Reply::Int(1));
    release(&mut conn, "k", "alice");
    outlast(replica, "k", promoted, 1000);
    assert!(asked.elapsed() >= Duration::from_millis(1000), "{:?}", asked.elapsed());
}

fn demotion_ends_waits_and_they_can_begin_again(builder: Builder) {
    // A waiter of a server that decides no more would wait for ever: it must hear of it, by an error and not by nil, and queue
    // at the new primary.
    let servers = Replicated::start(&builder, 1);
    let (old, new) = (&servers.primary, &servers.replicas[0]);
    let mut conn = old.connect(Protocol::Resp2);
    hold(&mut conn, "k", "alice");
    let mut blocked: Vec<Conn> =
        ["bob", "carol"].map(|owner| waiter(old, Protocol::Resp3, "k", owner)).into_iter().collect();
    servers.wait_in_step();
    promote(new);
    demote(old, new);
    for conn in &mut blocked {
        let reply = conn.recv();
        assert_eq!(reply.error_code(), Some("UNBLOCKED"), "{reply}");
    }
    let mut again = waiter(new, Protocol::Resp3, "k", "bob");
    let mut conn = new.connect(Protocol::Resp2);
    assert_eq!(waiters(&mut conn, "k"), ["bob"]);
    release(&mut conn, "k", "alice");
    again.recv().as_token();
    wait_in_step(new, old);
    assert_eq!(old.info("flock").number("flock_waiters"), 0);
}

fn demoted_primary_decides_nothing(builder: Builder) {
    // What was due in the old primary's own table must not be performed by it any more: leases, sessions, waits.
    let servers = Replicated::start(&builder, 1);
    let (old, new) = (&servers.primary, &servers.replicas[0]);
    let mut conn = old.connect(Protocol::Resp2);
    conn.cmd(&args!["FLOCK.ACQUIRE", "short", "alice", 1500]).as_token();
    let mut holder = old.connect(Protocol::Resp2);
    holder.cmd(&args!["FLOCK.ACQUIRE", "session", "alice", LEASE_MS, "SESSION", 1500]).as_token();
    servers.wait_in_step();
    promote(new);
    let mut conn = new.connect(Protocol::Resp2);
    for key in ["short", "session"] {
        assert_eq!(conn.cmd(&args!["FLOCK.RENEW", key, "alice", LEASE_MS]), Reply::Int(1));
    }
    demote(old, new);
    drop(holder);
    wait_in_step(new, old);
    let_pass(Duration::from_millis(1700));
    assert_equal(new, old);
    assert_eq!(holders(&mut old.connect(Protocol::Resp2), "short"), ["alice"]);
}

fn full_synchronization_takes_no_hold_for_lost(builder: Builder) {
    // To load another server's data a replica flushes its own, and the server says so as it does of a FLUSHALL: nobody has lost anything,
    // and the holders are told nothing.
    let servers = Replicated::start(&builder, 1);
    let (primary, replica) = (&servers.primary, &servers.replicas[0]);
    hold_with_channel(&mut primary.connect(Protocol::Resp2), "k", "alice", "news");
    servers.wait_in_step();
    let mut ears = listener(replica, Protocol::Resp2, "news");
    let removed = || replica.info("flock").number("flock_removed");
    let (before, syncs) = (removed(), primary.info("stats").number("sync_full"));
    // Another history: what the replica has is of no use.
    assert_eq!(primary.connect(Protocol::Resp2).cmd(&["DEBUG", "CHANGE-REPL-ID"]), Reply::ok());
    replica.connect(Protocol::Resp2).cmd(&["CLIENT", "KILL", "TYPE", "master"]);
    wait_until("all is sent again", SYNC_WITHIN, || primary.info("stats").number("sync_full") > syncs);
    servers.wait_in_step();
    assert_equal(primary, replica);
    assert_eq!(removed(), before);
    ears.expect_silence(QUIET);
}

fn isolated_primary_hands_nothing_over(builder: Builder) {
    // Behind its back a replica may have been promoted: where the server would refuse a client's write, a queue must not go on.
    let mut servers = Replicated::start(&builder.config("min-replicas-to-write", 1), 1);
    let primary = &servers.primary;
    let mut conn = primary.connect(Protocol::Resp2);
    hold(&mut conn, "k", "alice");
    let mut bob = waiter(primary, Protocol::Resp2, "k", "bob");
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", "k", "alice", 400]), Reply::Int(1));
    servers.replicas[0].kill9();
    bob.expect_silence(Duration::from_millis(700));
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", "other", "carol", LEASE_MS]).error_code(), Some("NOREPLICAS"));
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "k", 1]).error_code(), Some("NOREPLICAS"));
    assert_eq!(conn.cmd(&["CONFIG", "SET", "min-replicas-to-write", "0"]), Reply::ok());
    bob.recv().as_token();
}

fn blocking_request_of_a_primary_blocks_no_link(builder: Builder) {
    // Our module sends none, but another one or a later one may: a link to the primary that is blocked stays so for ever, and replication
    // stops without a word (8.0.1), or there is nothing to block at all (9.1.2).
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("there is a free port");
    let port = listener.local_addr().expect("it is bound").port();
    let replica = builder.config("replicaof", format!("127.0.0.1 {port}")).start();
    let (mut link, _) = listener.accept().expect("the replica connects");
    pretend_to_be_a_primary(&mut link);
    for request in [
        &args!["SELECT", 0][..],
        &args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS],
        &args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS, "BLOCK", 0],
        &args!["SET", "afterwards", "x"],
    ] {
        link.write_all(&encode(request)).expect("the replica reads");
    }
    let mut conn = replica.connect(Protocol::Resp2);
    wait_until("what comes later is applied", ANSWER_WITHIN, || conn.cmd(&["EXISTS", "afterwards"]) == Reply::Int(1));
    assert_eq!(conn.cmd(&["FLOCK.INFO", "k"]), Reply::Nil);
    assert_eq!(replica.info("flock").number("flock_blocked_clients"), 0);
}

fn messages_are_heard_at_the_primary_alone(builder: Builder) {
    // What a module publishes is not replicated: who listens at a replica hears nothing, until that is promoted.
    let servers = Replicated::start(&builder, 1);
    let (primary, replica) = (&servers.primary, &servers.replicas[0]);
    let [mut above, mut below] = [primary, replica].map(|server| listener(server, Protocol::Resp2, "news"));
    let mut conn = primary.connect(Protocol::Resp2);
    hold_with_channel(&mut conn, "k", "alice", "news");
    let token = hold_with_channel(&mut conn, "later", "alice", "news");
    assert_eq!(conn.cmd(&["FLOCK.REVOKE", "k"]), Reply::Int(1));
    assert_eq!(hear(&mut above).key, "k");
    servers.wait_in_step();
    below.expect_silence(QUIET);
    promote(replica);
    assert_eq!(replica.connect(Protocol::Resp2).cmd(&["FLOCK.REVOKE", "later"]), Reply::Int(1));
    assert_eq!(hear(&mut below), Heard::new(lost(token, LossReason::Revoked), "later", "alice"));
}

/// Answers as a primary does until the replica has all of its data: none.
#[track_caller]
fn pretend_to_be_a_primary(link: &mut TcpStream) {
    // No checksum: eight zeros. A replica of either generation reads this version.
    const EMPTY: &[u8] = b"REDIS0011\xff\0\0\0\0\0\0\0\0";
    let mut requests = BufReader::new(link.try_clone().expect("a socket can be shared"));
    loop {
        let mut line = String::new();
        assert!(requests.read_line(&mut line).expect("the replica speaks") > 0, "the replica has gone");
        let answer = match line.trim().to_ascii_uppercase().as_str() {
            "PING" => "+PONG\r\n".to_owned(),
            "REPLCONF" => "+OK\r\n".to_owned(),
            "PSYNC" => format!("+FULLRESYNC {} 1\r\n${}\r\n", "0".repeat(40), EMPTY.len()),
            _ => continue,
        };
        link.write_all(answer.as_bytes()).expect("the replica reads");
        if line.trim().eq_ignore_ascii_case("PSYNC") {
            return link.write_all(EMPTY).expect("the replica reads");
        }
    }
}
