//! A slot moves to another node while a lock in it is held and waited for.

use std::thread::sleep;
use std::time::{Duration, Instant};

use flock_tests::migration::Migration;
use flock_tests::reply::Reply;
use flock_tests::resp::Protocol;
use flock_tests::server::{Builder, Generation, Info, Server};
use flock_tests::subscriber::Subscriber;
use flock_tests::topology::{Cluster, SYNC_WITHIN, wait_in_step};
use flock_tests::wait::wait_until;
use flock_tests::{args, on_own_servers};

use crate::lock_view::holders;
use crate::scene::{LEASE_MS, QUIET, waiter};

on_own_servers![
    waiter_of_a_moved_slot_is_sent_on_and_the_hold_arrives,
    lease_of_a_slot_that_is_not_here_yet_is_not_ended,
    tokens_rise_in_a_moved_slot,
    failover_of_a_cluster_ends_waits,
];

fn waiter_of_a_moved_slot_is_sent_on_and_the_hold_arrives(builder: Builder) {
    // MIGRATE deletes the key on the old node: without a look at who serves the slot, its waiter would be granted there what is held on
    // the new node, and its holder told that it has lost what it holds.
    let cluster = Cluster::start(&builder, 2);
    let mut way = Migration::between_two(&cluster, "{k}");
    let subscribed = way.source_node.connect(Protocol::Resp2);
    let mut alice = Subscriber::new(subscribed, "SSUBSCRIBE", &["{k}alice"]);
    let ask = args!["FLOCK.ACQUIRE", "{k}", "alice", LEASE_MS, "CHANNEL", "{k}alice"];
    let token = way.source.cmd(&ask).as_token();
    let mut bob = waiter(way.source_node, Protocol::Resp2, "{k}", "bob");

    way.begin();
    way.carry("{k}");
    assert_eq!(bob.recv().error_code(), Some("TRYAGAIN"));
    assert_eq!(way.source.cmd(&args!["CLUSTER", "COUNTKEYSINSLOT", way.slot]), Reply::Int(0));
    alice.expect_silence(QUIET);

    way.end();
    assert_eq!(holders(&mut way.target, "{k}"), ["alice"]);
    assert_eq!(way.target.cmd(&args!["FLOCK.CHECK", "{k}", token]), Reply::Int(1));
}

fn lease_of_a_slot_that_is_not_here_yet_is_not_ended(builder: Builder) {
    // The importing node has the key and its deadline, but nobody else may see it end there before the slot is its own.
    let cluster = Cluster::start(&builder, 2);
    let mut way = Migration::between_two(&cluster, "k");
    let token = way.source.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 400]).as_token();
    way.begin();
    way.carry("k");
    sleep(Duration::from_millis(700));
    assert_eq!(way.target.cmd(&args!["CLUSTER", "COUNTKEYSINSLOT", way.slot]), Reply::Int(1));
    way.end();
    let ended = Instant::now();
    let target = &mut way.target;
    wait_until("the lease ends on the new node", Duration::from_secs(2), || {
        target.cmd(&args!["EXISTS", "k"]) == Reply::Int(0)
    });
    assert!(ended.elapsed() < Duration::from_secs(1), "{:?}", ended.elapsed());
    assert!(way.target.cmd(&args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS]).as_token() > token);
}

fn tokens_rise_in_a_moved_slot(builder: Builder) {
    // The key was deleted before the move, so nothing travels with the slot, and the old node was hours ahead: the new one knows it by
    // the mark that it heard on the bus. It follows that mark only now: two nodes that followed each other's at once would never stop.
    let cluster = Cluster::start(&builder, 2);
    let mut way = Migration::between_two(&cluster, "k");
    let now = Info::ask(&mut way.source, "flock").number("flock_counter");
    let ahead = now + 100_000 * 3600 * 5;
    let token = way.source.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS, "FLOOR", ahead]).as_token();
    assert_eq!(way.source.cmd(&args!["FLOCK.RELEASE", "k", "alice"]), Reply::Int(1));
    sleep(Duration::from_millis(2500)); // marks are told once a second
    assert!(
        Info::ask(&mut way.target, "flock").number("flock_mark") < ahead,
        "a mark is followed as soon as it is heard"
    );
    way.begin();
    way.end();
    assert!(way.target.cmd(&args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS]).as_token() > token, "at once");
}

/// On Valkey 9 alone: slots move as a whole, and the new node takes over in one instant.
mod atomically {
    use super::*;

    fn cluster() -> Cluster {
        Cluster::start(&Server::builder().generation(Generation::New), 2)
    }

    #[test]
    fn hold_arrives_with_its_lease_and_its_waiter_is_sent_on() {
        let cluster = cluster();
        let mut way = Migration::between_two(&cluster, "{k}");
        let subscribed = way.source_node.connect(Protocol::Resp2);
        let mut alice = Subscriber::new(subscribed, "SSUBSCRIBE", &["{k}alice"]);
        let ask = args!["FLOCK.ACQUIRE", "{k}", "alice", LEASE_MS, "CHANNEL", "{k}alice", "LABEL", "nightly"];
        let token = way.source.cmd(&ask).as_token();
        let shared = args!["FLOCK.ACQUIRE", "{k}shared", "r1", LEASE_MS, "SHARED"];
        let reader = way.source.cmd(&shared).as_token();
        let mut bob = waiter(way.source_node, Protocol::Resp2, "{k}", "bob");
        way.ask_for_atomic();
        assert_eq!(bob.recv().error_code(), Some("TRYAGAIN"));
        way.wait_until_there("{k}");
        assert_eq!(holders(&mut way.target, "{k}"), ["alice"]);
        assert_eq!(way.target.cmd(&args!["FLOCK.CHECK", "{k}", token]), Reply::Int(1));
        assert_eq!(way.target.cmd(&args!["FLOCK.CHECK", "{k}shared", reader]), Reply::Int(1));
        let info = way.target.cmd(&args!["FLOCK.INFO", "{k}"]);
        let left = info.field("holders").as_array()[0].field("left_ms").as_int();
        assert!((LEASE_MS - 40_000..LEASE_MS).contains(&u32::try_from(left).unwrap()), "the lease goes on: {info}");
        // The holder has lost nothing, so it hears nothing; the end of its subscription is the server's own word.
        assert!(!way.source_node.log().contains("panic"));
        let heard = alice.message_within(QUIET);
        assert!(
            heard.as_ref().map_or(true, |message| !String::from_utf8_lossy(&message.payload).contains("lost")),
            "{heard:?}"
        );
        // The next token is above the last, and the owner can renew and release on the new node.
        assert_eq!(way.target.cmd(&args!["FLOCK.RENEW", "{k}", "alice", LEASE_MS, "TOKEN", token]), Reply::Int(1));
        assert_eq!(way.target.cmd(&args!["FLOCK.RELEASE", "{k}", "alice", "TOKEN", token]), Reply::Int(1));
        assert!(way.target.cmd(&args!["FLOCK.ACQUIRE", "{k}", "bob", LEASE_MS]).as_token() > reader.max(token));
    }

    #[test]
    fn migration_that_is_given_up_leaves_the_source_as_it_was() {
        let cluster = cluster();
        let mut way = Migration::between_two(&cluster, "k");
        let token = way.source.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS]).as_token();
        let mut bob = waiter(way.source_node, Protocol::Resp2, "k", "bob");
        way.target_node.sigstop();
        way.ask_for_atomic();
        assert_eq!(way.source.cmd(&["CLUSTER", "CANCELSLOTMIGRATIONS"]), Reply::ok());
        way.target_node.sigcont();
        cluster.wait_well();
        assert_eq!(holders(&mut way.source, "k"), ["alice"]);
        assert_eq!(way.source.cmd(&args!["FLOCK.RELEASE", "k", "alice", "TOKEN", token]), Reply::Int(1));
        assert!(bob.recv().as_token() > token, "the waiter is served where it waits");
        assert_eq!(way.target.cmd(&args!["CLUSTER", "COUNTKEYSINSLOT", way.slot]), Reply::Int(0));
    }

    #[test]
    fn leases_that_end_during_the_move_end_once_and_on_time() {
        // Hundreds of short leases are under way while their slot moves: none ends early, none stays, the server does not assert.
        let cluster = cluster();
        let mut way = Migration::between_two(&cluster, "{k}");
        for number in 0..300 {
            let ask = args!["FLOCK.ACQUIRE", format!("{{k}}{number}"), "alice", 200 + 5 * number];
            way.source.cmd(&ask).as_token();
        }
        way.ask_for_atomic();
        way.wait_until_there("{k}");
        let target = &mut way.target;
        wait_until("all leases have ended", Duration::from_secs(10), || {
            target.cmd(&args!["CLUSTER", "COUNTKEYSINSLOT", way.slot]) == Reply::Int(0)
        });
        way.source_node.assert_alive();
        way.target_node.assert_alive();
    }
}

fn failover_of_a_cluster_ends_waits(builder: Builder) {
    // In cluster mode the server itself tells none of a module's waiters that its node is a replica now: they would wait for ever.
    let mut cluster = Cluster::start(&builder, 1);
    let replica = cluster.add_replica(&builder, 0);
    let mut conn = cluster.nodes[0].connect(Protocol::Resp2);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS]).as_token();
    let mut bob = waiter(&cluster.nodes[0], Protocol::Resp2, "k", "bob");
    wait_in_step(&cluster.nodes[0], &cluster.nodes[replica]);
    let mut promoted = cluster.nodes[replica].connect(Protocol::Resp2);
    assert_eq!(promoted.cmd(&["CLUSTER", "FAILOVER"]), Reply::ok());
    assert_eq!(bob.recv().error_code(), Some("UNBLOCKED"));
    wait_until("the replica has taken over", SYNC_WITHIN, || {
        promoted.cmd(&args!["FLOCK.CHECK", "k", token]) == Reply::Int(1)
    });
    assert_eq!(promoted.cmd(&args!["FLOCK.RELEASE", "k", "alice"]), Reply::Int(1));
    assert!(promoted.cmd(&args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS]).as_token() > token);
}
