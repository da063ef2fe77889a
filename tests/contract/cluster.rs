//! Cluster mode without any move: requests, messages and numbers keep to the node that serves the key's slot, and a node that does not
//! serve it says so before anything is changed.

use std::time::Duration;

use flock_core::refusal::{EndReason, LossReason};
use flock_core::wire::spec::{APPLY, COMMANDS};
use flock_tests::migration::Migration;
use flock_tests::reply::Reply;
use flock_tests::resp::{Conn, Protocol};
use flock_tests::server::{Builder, Server};
use flock_tests::subscriber::Subscriber;
use flock_tests::topology::Cluster;
use flock_tests::wait::wait_until;
use flock_tests::{args, on_own_servers};

use crate::scene::{
    LEASE_MS, QUIET, ended, granted, hear, hold, hold_with_channel, lost, position, queue_request, release, waiter,
};

on_own_servers![
    every_command_is_routed_by_its_key,
    request_for_two_slots_changes_nothing,
    messages_stay_in_their_shard,
    each_node_has_its_own_numbers,
    there_is_one_database,
    waits_end_when_the_cluster_goes_down,
    slot_that_is_assigned_to_nobody_is_not_served,
    replica_shows_and_decides_nothing,
    node_without_the_module_harms_nobody,
];

/// Keys of one slot for each of the two nodes of a cluster, and connections to them.
struct Two {
    cluster: Cluster,
    tags: [&'static str; 2],
    conns: [Conn; 2],
}

impl Two {
    #[track_caller]
    fn of(cluster: Cluster) -> Two {
        let conns = [0, 1].map(|node| cluster.nodes[node].connect(Protocol::Resp3));
        let tags = ["{a}", "{b}"];
        assert_eq!(tags.map(|tag| cluster.owner_of(tag)), [1, 0], "CRC16 does not change");
        Two { cluster, tags: ["{b}", "{a}"], conns }
    }

    #[track_caller]
    fn start(builder: &Builder) -> Two {
        Two::of(Cluster::start(builder, 2))
    }

    /// A key of that node.
    fn key(&self, node: usize, name: &str) -> String {
        format!("{}{name}", self.tags[node])
    }

    fn node(&self, node: usize) -> &Server {
        &self.cluster.nodes[node]
    }
}

fn every_command_is_routed_by_its_key(builder: Builder) {
    // A client asks anybody and is sent to the right one, whatever it asks; a hash tag keeps keys together.
    let mut two = Two::start(&builder);
    let key = two.key(0, "k");
    let slot = two.conns[0].cmd(&["CLUSTER", "KEYSLOT", &key]).as_int();
    assert_eq!(two.conns[0].cmd(&["CLUSTER", "KEYSLOT", &two.key(0, "other")]), Reply::Int(slot));
    let moved = format!("MOVED {slot} 127.0.0.1:{}", two.node(0).port());
    let requests = [
        args!["FLOCK.ACQUIRE", key, "o", LEASE_MS].to_vec(),
        args!["FLOCK.CHECK", key, 1].to_vec(),
        args!["FLOCK.INFO", key].to_vec(),
        args!["FLOCK.RENEW", key, "o", LEASE_MS].to_vec(),
        args!["FLOCK.RELEASE", key, "o"].to_vec(),
        args!["FLOCK.REVOKE", key].to_vec(),
    ];
    let with_key = COMMANDS.iter().filter(|spec| spec.key.is_some() && spec.name != APPLY).count();
    assert_eq!(requests.len(), with_key, "all of them");
    for request in &requests {
        let refusal = two.conns[1].cmd(request);
        assert_eq!(refusal.to_string(), format!("-{moved}"), "{request:?}");
        let reply = two.conns[0].cmd(request);
        assert_eq!(reply.error_code(), None, "{reply}");
    }
    assert_eq!(two.node(1).info("flock").number("flock_grants"), 0);
    for node in 0..2 {
        assert_eq!(two.conns[node].cmd(&["FLOCK.LIST"]).error_code(), None, "it has no key");
    }
}

fn request_for_two_slots_changes_nothing(builder: Builder) {
    let mut two = Two::start(&builder);
    let (here, there) = (two.key(0, "k"), two.key(1, "k"));
    let conn = &mut two.conns[0];
    let acquire = |key: &str| args!["FLOCK.ACQUIRE", key, "o", LEASE_MS].to_vec();
    // In a script all keys must be of one slot, and must be declared.
    let script = "return redis.call('FLOCK.ACQUIRE', KEYS[1], 'o', 1000)";
    assert_eq!(conn.cmd(&args!["EVAL", script, 2, here, there]).error_code(), Some("CROSSSLOT"));
    let script = format!(
        "redis.call('FLOCK.ACQUIRE', KEYS[1], 'o', 1000) return redis.call('FLOCK.ACQUIRE', '{there}', 'o', 1)"
    );
    let reply = conn.cmd(&args!["EVAL", script, 1, here]);
    assert!(reply.error_code().is_some(), "{reply}");
    release(conn, &here, "o"); // the script's own: what it did before its error is done
    // In a transaction each is queued or refused by itself, and one that was refused ends it all.
    assert_eq!(conn.cmd(&["MULTI"]), Reply::ok());
    assert_eq!(conn.cmd(&acquire(&here)), Reply::Simple("QUEUED".into()));
    assert_eq!(conn.cmd(&acquire(&there)).error_code(), Some("MOVED"));
    assert_eq!(conn.cmd(&["EXEC"]).error_code(), Some("EXECABORT"));
    // A channel elsewhere would hear nothing.
    let channel = two.key(1, "inbox");
    for request in [
        args!["FLOCK.ACQUIRE", here, "o", LEASE_MS, "CHANNEL", channel].to_vec(),
        args!["FLOCK.ACQUIRE", here, "o", LEASE_MS, "QUEUE", 1000, "CHANNEL", channel].to_vec(),
    ] {
        assert_eq!(two.conns[0].cmd(&request).error_code(), Some("CROSSSLOT"));
    }
    for node in 0..2 {
        assert_eq!(two.conns[node].cmd(&["DBSIZE"]), Reply::Int(0));
        assert_eq!(two.node(node).info("flock").number("flock_held"), 0);
    }
}

/// Who listens on a shard channel of this node.
#[track_caller]
fn shard_listener(server: &Server, channel: &str) -> Subscriber {
    Subscriber::new(server.connect(Protocol::Resp3), "SSUBSCRIBE", &[channel])
}

fn messages_stay_in_their_shard(builder: Builder) {
    // Grants, losses and releases are published in the shard of the slot: heard at the primary and at its replica, and nowhere else.
    let mut cluster = Cluster::start(&builder.config("flock.release-notifications", "yes"), 2);
    cluster.add_replica(&Server::builder(), 0);
    let mut two = Two::of(cluster);
    let (key, alice, bob) = (two.key(0, "k"), two.key(0, "alice"), two.key(0, "bob"));
    let refused = two.conns[1].cmd(&["SSUBSCRIBE", &alice]);
    assert_eq!(refused.error_code(), Some("MOVED"));
    let mut hers = shard_listener(two.node(0), &alice);
    let mut his = shard_listener(two.node(0), &bob);
    let mut released = shard_listener(two.node(0), &key);
    let mut everywhere = Subscriber::new(two.node(0).connect(Protocol::Resp3), "PSUBSCRIBE", &["*"]);
    let mut elsewhere = Subscriber::new(two.node(1).connect(Protocol::Resp3), "PSUBSCRIBE", &["*"]);

    let conn = &mut two.conns[0];
    let first = hold_with_channel(conn, &key, "alice", &alice);
    assert_eq!(position(&conn.cmd(&queue_request(&key, "bob", &bob))), 1);
    release(conn, &key, "alice");
    let second = hear(&mut his);
    let flock_core::effect::Notice::Granted { token, .. } = second.notice else { panic!("{second:?}") };
    assert_eq!(second.notice, granted(token.get(), LEASE_MS));
    assert!(token.get() > first);
    let text = String::from_utf8(released.message().payload).unwrap();
    assert!(text.contains(&first.to_string()), "{text}");
    assert_eq!(conn.cmd(&["FLOCK.REVOKE", &key]), Reply::Int(1));
    assert_eq!(hear(&mut his).notice, lost(token.get(), LossReason::Revoked));
    hers.expect_silence(QUIET);
    everywhere.expect_silence(QUIET);
    elsewhere.expect_silence(QUIET);
}

fn each_node_has_its_own_numbers(builder: Builder) {
    // INFO and LIST are a node's own, and so is the counter: what one grants does not raise the other's.
    let mut two = Two::start(&builder);
    let idle = two.node(1).info("flock").number("flock_counter");
    for number in 0..50 {
        let key = two.key(0, &number.to_string());
        hold(&mut two.conns[0], &key, "alice");
    }
    let (busy, quiet) = (two.node(0).info("flock"), two.node(1).info("flock"));
    assert_eq!((busy.number("flock_held"), busy.number("flock_grants")), (50, 50));
    assert_eq!((quiet.number("flock_held"), quiet.number("flock_grants")), (0, 0));
    assert_eq!(quiet.number("flock_counter"), idle);
    let listed = |conn: &mut Conn| conn.cmd(&args!["FLOCK.LIST", "COUNT", 1000]).as_array()[1].as_array().len();
    assert_eq!([0, 1].map(|node| listed(&mut two.conns[node])), [50, 0]);
}

fn there_is_one_database(builder: Builder) {
    // Unless Valkey 9 is told otherwise: then locks of one name in two databases are two locks, in a cluster as elsewhere.
    let two = Two::start(&builder);
    let mut conn = two.node(0).connect(Protocol::Resp2);
    assert_eq!(conn.cmd(&["SELECT", "1"]).error_code(), Some("ERR"));
    let is_old = two.node(0).info("server").text("valkey_version").starts_with("8.");
    if !is_old {
        let server = Two::start(&builder.config("cluster-databases", 2));
        let (mut zero, mut one) = (server.node(0).connect(Protocol::Resp2), server.node(0).connect(Protocol::Resp2));
        assert_eq!(one.cmd(&["SELECT", "1"]), Reply::ok());
        let key = server.key(0, "k");
        hold(&mut zero, &key, "alice");
        let mut waiting = waiter(server.node(0), Protocol::Resp2, &key, "bob");
        hold(&mut one, &key, "carol");
        release(&mut one, &key, "carol");
        release(&mut zero, &key, "alice");
        waiting.recv().as_token();
    }
}

fn waits_end_when_the_cluster_goes_down(builder: Builder) {
    // Half of the slots are nobody's: nothing is granted any more, and who waits hears why. What was held is held when it is back.
    let mut two = Two::start(&builder.config("cluster-node-timeout", 1000));
    let (key, channel) = (two.key(0, "k"), two.key(0, "bob"));
    let token = hold(&mut two.conns[0], &key, "alice");
    let mut blocked = waiter(two.node(0), Protocol::Resp2, &key, "carol");
    let mut bob = shard_listener(two.node(0), &channel);
    two.conns[0].cmd(&queue_request(&key, "bob", &channel));
    two.cluster.nodes[1].kill9();
    assert_eq!(
        blocked
            .recv_within(Duration::from_secs(20))
            .map(|reply| reply.error_code().map(str::to_owned))
            .unwrap()
            .as_deref(),
        Some("CLUSTERDOWN")
    );
    assert_eq!(hear(&mut bob).notice, ended(EndReason::ClusterDown));
    let conn = &mut two.conns[0];
    for request in [
        args!["FLOCK.ACQUIRE", key, "dave", LEASE_MS].to_vec(),
        args!["FLOCK.RENEW", key, "alice", LEASE_MS].to_vec(),
        args!["FLOCK.RELEASE", key, "alice"].to_vec(),
        args!["FLOCK.CHECK", key, token].to_vec(),
    ] {
        assert_eq!(conn.cmd(&request).error_code(), Some("CLUSTERDOWN"));
    }
    two.cluster.nodes[1].start_again();
    two.cluster.wait_well();
    assert_eq!(two.conns[0].cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(1));
    release(&mut two.conns[0], &key, "alice");
}

fn slot_that_is_assigned_to_nobody_is_not_served(builder: Builder) {
    let mut two = Two::start(&builder.config("cluster-require-full-coverage", "no"));
    let (gone, stays) = (two.key(0, "k"), two.key(1, "k"));
    let slot = two.conns[0].cmd(&["CLUSTER", "KEYSLOT", &gone]).as_int();
    let mut waiting = {
        hold(&mut two.conns[0], &gone, "alice");
        waiter(two.node(0), Protocol::Resp2, &gone, "bob")
    };
    for conn in &mut two.conns {
        assert_eq!(conn.cmd(&args!["CLUSTER", "DELSLOTS", slot]), Reply::ok());
    }
    let refusal = waiting.recv();
    assert!(matches!(refusal.error_code(), Some("CLUSTERDOWN" | "TRYAGAIN")), "{refusal}");
    let acquire = args!["FLOCK.ACQUIRE", gone, "carol", LEASE_MS];
    for conn in &mut two.conns {
        assert_eq!(conn.cmd(&acquire).error_code(), Some("CLUSTERDOWN"));
    }
    let token = hold(&mut two.conns[1], &stays, "alice");
    assert_eq!(two.conns[0].cmd(&args!["CLUSTER", "ADDSLOTS", slot]), Reply::ok());
    two.cluster.wait_well();
    let conn = &mut two.conns[0];
    // The server drops the keys of a slot that is not its own any more, or keeps them: the lock is free, or alice's.
    wait_until("the slot is served", Duration::from_secs(10), || conn.cmd(&acquire).error_code().is_none());
    assert_eq!(two.conns[1].cmd(&args!["FLOCK.CHECK", stays, token]), Reply::Int(1));
}

fn replica_shows_and_decides_nothing(builder: Builder) {
    let mut cluster = Cluster::start(&builder, 2);
    let replica = cluster.add_replica(&builder, 0);
    let mut two = Two::of(cluster);
    let key = two.key(0, "k");
    let token = hold(&mut two.conns[0], &key, "alice");
    assert_eq!(two.conns[0].cmd(&args!["WAIT", 1, 10_000]), Reply::Int(1));
    let mut conn = two.node(replica).connect(Protocol::Resp3);
    assert_eq!(conn.cmd(&["FLOCK.INFO", &key]).error_code(), Some("MOVED"));
    assert_eq!(conn.cmd(&["READONLY"]), Reply::ok());
    let info = conn.cmd(&["FLOCK.INFO", &key]);
    assert_eq!(info.field("holders").as_array()[0].field("token").as_token(), token);
    assert_eq!(conn.cmd(&args!["FLOCK.LIST"]).as_array()[1].as_array().len(), 1);
    for request in [
        args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS].to_vec(),
        args!["FLOCK.CHECK", key, token].to_vec(),
        args!["FLOCK.RENEW", key, "alice", LEASE_MS].to_vec(),
        args!["FLOCK.RELEASE", key, "alice"].to_vec(),
        args!["FLOCK.REVOKE", key].to_vec(),
    ] {
        let refusal = conn.cmd(&request);
        assert_eq!(refusal.error_code(), Some("MOVED"), "to the primary: {refusal}");
    }
    assert_eq!(two.conns[0].cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(1));
}

fn node_without_the_module_harms_nobody(builder: Builder) {
    // It knows no such command. A held lock does not go there: the source says why, and goes on with all that it has.
    let mut two = Two::of(Cluster::of(&[builder.clone(), builder.without_module()]));
    let (here, there) = (two.key(0, "k"), two.key(1, "k"));
    let reply = two.conns[1].cmd(&args!["FLOCK.ACQUIRE", there, "alice", LEASE_MS]);
    assert!(reply.to_string().contains("unknown command"), "{reply}");
    let token = hold(&mut two.conns[0], &here, "alice");
    let mut waiting = waiter(two.node(0), Protocol::Resp2, &here, "bob");
    let cluster = &two.cluster;
    let mut way = Migration::between_two(cluster, &here);
    way.begin();
    let carry = args!["MIGRATE", "127.0.0.1", way.target_node.port(), here, 0, 5000];
    assert_eq!(way.source.cmd(&carry).error_code(), Some("ERR"), "the target cannot read it");
    for conn in [&mut way.source, &mut way.target] {
        assert_eq!(conn.cmd(&args!["CLUSTER", "SETSLOT", way.slot, "STABLE"]), Reply::ok());
    }
    let is_old = two.node(0).info("server").text("valkey_version").starts_with("8.");
    if !is_old {
        way.ask_for_atomic();
        let source = &mut way.source;
        wait_until("the migration is given up", Duration::from_secs(20), || {
            let jobs = source.cmd(&["CLUSTER", "GETSLOTMIGRATIONS"]).to_string();
            jobs.contains("failed")
        });
    }
    assert_eq!(way.source.cmd(&args!["FLOCK.CHECK", here, token]), Reply::Int(1));
    release(&mut two.conns[0], &here, "alice");
    let reply = waiting.recv();
    assert!(reply.error_code() == Some("TRYAGAIN") || reply.as_token() > token, "{reply}");
    for node in &two.cluster.nodes {
        node.assert_alive();
    }
}
