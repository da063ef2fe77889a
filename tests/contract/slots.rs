//! A slot moves to another node while a lock in it is held and waited for.

use flock_tests::reply::Reply;
use flock_tests::resp::Protocol;
use flock_tests::server::Builder;
use flock_tests::topology::Cluster;
use flock_tests::{args, on_own_servers};

use crate::lock_view::holders;
use crate::scene::{LEASE_MS, waiter};

on_own_servers![waiter_of_a_moved_slot_is_sent_on_and_the_hold_arrives, channel_must_be_in_the_keys_slot];

fn waiter_of_a_moved_slot_is_sent_on_and_the_hold_arrives(builder: Builder) {
    // MIGRATE deletes the key on the old node: without a look at who serves the slot, its waiter would be granted there what is held on
    // the new node.
    let cluster = Cluster::start(&builder, 2);
    let from = cluster.owner_of("k");
    let to = 1 - from;
    let (source, target) = (&cluster.nodes[from], &cluster.nodes[to]);
    let (mut at_source, mut at_target) = (source.connect(Protocol::Resp2), target.connect(Protocol::Resp2));
    let slot = at_source.cmd(&args!["CLUSTER", "KEYSLOT", "k"]).as_int();
    let token = at_source.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS]).as_token();
    let mut bob = waiter(source, Protocol::Resp2, "k", "bob");

    let (source_id, target_id) = (cluster.id(from), cluster.id(to));
    assert_eq!(at_target.cmd(&args!["CLUSTER", "SETSLOT", slot, "IMPORTING", source_id]), Reply::ok());
    assert_eq!(at_source.cmd(&args!["CLUSTER", "SETSLOT", slot, "MIGRATING", target_id]), Reply::ok());
    assert_eq!(at_source.cmd(&args!["MIGRATE", "127.0.0.1", target.port(), "k", 0, 5000]), Reply::ok());
    assert_eq!(bob.recv().error_code(), Some("TRYAGAIN"));
    assert_eq!(at_source.cmd(&args!["CLUSTER", "COUNTKEYSINSLOT", slot]), Reply::Int(0));

    assert_eq!(at_target.cmd(&args!["CLUSTER", "SETSLOT", slot, "NODE", target_id]), Reply::ok());
    assert_eq!(holders(&mut at_target, "k"), ["alice"]);
    assert_eq!(at_target.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(1));
}

fn channel_must_be_in_the_keys_slot(builder: Builder) {
    // In cluster mode messages stay within the shard: a channel of another slot would hear nothing.
    let cluster = Cluster::start(&builder, 2);
    let node = &cluster.nodes[cluster.owner_of("{k}1")];
    let mut conn = node.connect(Protocol::Resp2);
    let queue =
        |channel: &str| args!["FLOCK.ACQUIRE", "{k}1", "alice", LEASE_MS, "QUEUE", 1000, "CHANNEL", channel].to_vec();
    assert_eq!(conn.cmd(&queue("elsewhere")).error_code(), Some("CROSSSLOT"));
    conn.cmd(&queue("{k}client")).as_token();
}
