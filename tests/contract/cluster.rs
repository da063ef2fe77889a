//! Cluster mode: requests, messages and numbers keep to the node that serves the key's slot, and to its replica; a node that does not
//! serve it says so before anything is changed.

use std::fs;
use std::time::Duration;

use flock_core::refusal::{EndReason, LossReason};
use flock_core::wire::spec::{APPLY, COMMANDS};
use flock_tests::migration::Migration;
use flock_tests::reply::Reply;
use flock_tests::resp::{Conn, Protocol};
use flock_tests::server::{Builder, Server, unique_key};
use flock_tests::subscriber::Subscriber;
use flock_tests::topology::{Cluster, SYNC_WITHIN, wait_in_step};
use flock_tests::wait::wait_until;
use flock_tests::{args, on_own_servers, on_shared_cluster};

use crate::lock_view::{holders, waiters};
use crate::scene::{
    LEASE_MS, QUIET, ended, granted, hear, hear_grant, hold, hold_with_channel, long_tier, lost, position,
    queue_request, release, wait_until_free, waiter,
};

on_shared_cluster![
    every_command_is_routed_by_its_key,
    request_for_two_slots_changes_nothing,
    channel_must_be_in_the_keys_slot,
    messages_stay_in_their_shard,
    messages_follow_their_slot,
    each_node_has_its_own_numbers,
    each_replica_shows_its_primarys_locks_and_decides_nothing,
    there_is_one_database,
];

on_own_servers![
    databases_have_their_own_locks,
    waits_end_when_the_cluster_goes_down,
    slot_that_is_assigned_to_nobody_is_not_served,
    node_without_the_module_harms_nobody,
    replica_without_the_module_harms_nobody,
];

/// How many primaries the shared cluster has: `nodes[PRIMARIES + n]` is the replica of `nodes[n]`.
const PRIMARIES: usize = 3;

/// A hash tag of the test's own for each of the first nodes of a cluster, with which a key is that node's; and connections to them.
struct Shards<'a> {
    cluster: &'a Cluster,
    tags: Vec<String>,
    conns: Vec<Conn>,
}

impl Shards<'_> {
    #[track_caller]
    fn of(cluster: &Cluster, primaries: usize) -> Shards<'_> {
        let mut tags = vec![None; primaries];
        while tags.iter().any(Option::is_none) {
            let tag = format!("{{{}}}", unique_key("tag"));
            if let Some(of_node) = tags.get_mut(cluster.owner_of(&tag)) {
                of_node.get_or_insert(tag);
            }
        }
        let conns = cluster.nodes[..primaries].iter().map(|node| node.connect(Protocol::Resp3)).collect();
        Shards { cluster, tags: tags.into_iter().flatten().collect(), conns }
    }

    /// A key of that node.
    fn key(&self, node: usize, name: &str) -> String {
        format!("{}{name}", self.tags[node])
    }

    fn node(&self, node: usize) -> &Server {
        &self.cluster.nodes[node]
    }
}

/// A cluster of the test's own: without replicas in the quick tier, since these take seconds to start.
#[track_caller]
fn own_cluster(builder: &Builder) -> Cluster {
    if long_tier() { Cluster::start_replicated(builder, PRIMARIES) } else { Cluster::start(builder, 2) }
}

fn every_command_is_routed_by_its_key(cluster: &Cluster) {
    // A client asks anybody and is sent to the right one, whatever it asks; a hash tag keeps keys together. Replicas send it there too.
    let mut shards = Shards::of(cluster, PRIMARIES);
    let (key, sibling) = (shards.key(0, "k"), shards.key(0, "sibling"));
    let slot = shards.conns[0].cmd(&["CLUSTER", "KEYSLOT", &key]).as_int();
    assert_eq!(shards.conns[0].cmd(&["CLUSTER", "KEYSLOT", &sibling]), Reply::Int(slot));
    let moved = format!("-MOVED {slot} 127.0.0.1:{}", shards.node(0).port());
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
    let grants = |node: usize| cluster.nodes[node].info("flock").number("flock_grants");
    let others = 1..cluster.nodes.len();
    let before: Vec<_> = others.clone().map(grants).collect();
    for node in others.clone() {
        let mut conn = cluster.nodes[node].connect(Protocol::Resp3);
        for request in &requests {
            assert_eq!(conn.cmd(request).to_string(), moved, "node {node}: {request:?}");
        }
        assert_eq!(conn.cmd(&["FLOCK.LIST"]).error_code(), None, "it has no key");
    }
    assert_eq!(others.map(grants).collect::<Vec<_>>(), before);
    for request in &requests {
        let reply = shards.conns[0].cmd(request);
        assert_eq!(reply.error_code(), None, "{reply}");
    }
}

fn request_for_two_slots_changes_nothing(cluster: &Cluster) {
    let mut shards = Shards::of(cluster, PRIMARIES);
    let (here, there) = (shards.key(0, "k"), shards.key(1, "k"));
    let conn = &mut shards.conns[0];
    let acquire = |key: &str| args!["FLOCK.ACQUIRE", key, "o", LEASE_MS].to_vec();
    let grants = |node: usize| cluster.nodes[node].info("flock").number("flock_grants");
    let before = [grants(0), grants(1)];
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
    for (node, key) in [here, there].iter().enumerate() {
        assert_eq!(shards.conns[node].cmd(&args!["EXISTS", key]), Reply::Int(0));
    }
    assert_eq!([grants(0), grants(1)], [before[0] + 1, before[1]], "the script's own");
}

fn channel_must_be_in_the_keys_slot(cluster: &Cluster) {
    // In cluster mode messages stay within the shard: a channel of another slot would hear nothing. It is refused before anything is
    // granted or queued; one with the key's hash tag is the key's.
    let mut shards = Shards::of(cluster, PRIMARIES);
    let (key, inbox, elsewhere) = (shards.key(0, "k"), shards.key(0, "inbox"), shards.key(1, "inbox"));
    let conn = &mut shards.conns[0];
    let at_once = |channel: &str| args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS, "CHANNEL", channel].to_vec();
    for channel in [&elsewhere, "elsewhere"] {
        assert_eq!(conn.cmd(&at_once(channel)).error_code(), Some("CROSSSLOT"));
        assert_eq!(conn.cmd(&queue_request(&key, "alice", channel)).error_code(), Some("CROSSSLOT"));
    }
    assert_eq!(conn.cmd(&args!["EXISTS", key]), Reply::Int(0));
    conn.cmd(&at_once(&inbox)).as_token();
    assert_eq!(conn.cmd(&queue_request(&key, "bob", &elsewhere)).error_code(), Some("CROSSSLOT"));
    assert!(waiters(conn, &key).is_empty());
    assert_eq!(position(&conn.cmd(&queue_request(&key, "bob", &inbox))), 1);
    release(conn, &key, "alice");
}

/// Who listens on a shard channel of this node.
#[track_caller]
fn shard_listener(server: &Server, channel: &str) -> Subscriber {
    Subscriber::new(server.connect(Protocol::Resp3), "SSUBSCRIBE", &[channel])
}

fn messages_stay_in_their_shard(cluster: &Cluster) {
    // Grants, losses and releases are published in the shard of the slot: heard at the primary and at its replica, and nowhere else.
    let mut shards = Shards::of(cluster, PRIMARIES);
    let (key, alice, bob) = (shards.key(0, "k"), shards.key(0, "alice"), shards.key(0, "bob"));
    for other in [1, 2, PRIMARIES + 1, PRIMARIES + 2] {
        let refused = cluster.nodes[other].connect(Protocol::Resp3).cmd(&["SSUBSCRIBE", &alice]);
        assert_eq!(refused.error_code(), Some("MOVED"));
    }
    let mut hers = shard_listener(shards.node(0), &alice);
    let mut his = shard_listener(shards.node(0), &bob);
    let mut his_at_the_replica = shard_listener(shards.node(PRIMARIES), &bob);
    let mut released = shard_listener(shards.node(0), &key);
    let everywhere = |node: &Server| Subscriber::new(node.connect(Protocol::Resp3), "PSUBSCRIBE", &["*"]);
    let mut unsharded: Vec<_> = cluster.nodes.iter().map(everywhere).collect();

    let conn = &mut shards.conns[0];
    let first = hold_with_channel(conn, &key, "alice", &alice);
    assert_eq!(position(&conn.cmd(&queue_request(&key, "bob", &bob))), 1);
    release(conn, &key, "alice");
    let second = hear(&mut his);
    let flock_core::effect::Notice::Granted { token, .. } = second.notice else { panic!("{second:?}") };
    assert_eq!(second.notice, granted(token.get(), LEASE_MS));
    assert!(token.get() > first);
    assert_eq!(hear(&mut his_at_the_replica), second);
    let text = String::from_utf8(released.message().payload).unwrap();
    assert!(text.contains(&first.to_string()), "{text}");
    assert_eq!(conn.cmd(&["FLOCK.REVOKE", &key]), Reply::Int(1));
    for listener in [&mut his, &mut his_at_the_replica] {
        assert_eq!(hear(listener).notice, lost(token.get(), LossReason::Revoked));
    }
    hers.expect_silence(QUIET);
    for listener in &mut unsharded {
        listener.expect_silence(QUIET / 4);
    }
}

fn messages_follow_their_slot(cluster: &Cluster) {
    // The slot goes to another shard and back. Each time who waits there hears that its wait has ended, and the server ends the
    // subscription; what is granted and lost from then on is published by the new node, and nobody can listen at the old one.
    let shards = Shards::of(cluster, PRIMARIES);
    let (key, inbox) = (shards.key(0, "k"), shards.key(0, "inbox"));
    let mut token = 0;
    for (from, to) in [(0, 1), (1, 0)] {
        let mut way = Migration::new(cluster, &key, to);
        let mut inbox_before = shard_listener(way.source_node, &inbox);
        hold(&mut way.source, &key, "alice");
        assert_eq!(position(&way.source.cmd(&queue_request(&key, "bob", &inbox))), 1);
        way.begin();
        way.carry(&key);
        way.end();
        assert_eq!(hear(&mut inbox_before).notice, ended(EndReason::Moved));
        assert_eq!(inbox_before.message().kind, "sunsubscribe");
        let refused = way.source_node.connect(Protocol::Resp3).cmd(&["SSUBSCRIBE", &inbox]);
        assert_eq!(refused.error_code(), Some("MOVED"));
        way.wait_until_known(&key);

        let mut inbox_now = shard_listener(way.target_node, &inbox);
        assert_eq!(position(&way.target.cmd(&queue_request(&key, "bob", &inbox))), 1);
        // Replicas have followed: the hold is the new shard's, and no longer the old one's.
        for (primary, count) in [(to, 1), (from, 0)] {
            let replica = &cluster.nodes[PRIMARIES + primary];
            wait_in_step(&cluster.nodes[primary], replica);
            assert_eq!(listed(&mut reader(replica), &shards.tags[0]), count);
        }
        release(&mut way.target, &key, "alice");
        let next = hear_grant(&mut inbox_now, &key, "bob");
        assert!(next > token);
        assert_eq!(way.target.cmd(&["FLOCK.REVOKE", &key]), Reply::Int(1));
        assert_eq!(hear(&mut inbox_now).notice, lost(next, LossReason::Revoked));
        token = next;
    }
}

/// A connection that may read at a replica.
#[track_caller]
fn reader(replica: &Server) -> Conn {
    let mut conn = replica.connect(Protocol::Resp3);
    assert_eq!(conn.cmd(&["READONLY"]), Reply::ok());
    conn
}

/// How many locks of this hash tag a node lists.
#[track_caller]
fn listed(conn: &mut Conn, tag: &str) -> usize {
    let list = args!["FLOCK.LIST", "MATCH", format!("{tag}*"), "COUNT", 1000];
    conn.cmd(&list).as_array()[1].as_array().len()
}

fn each_node_has_its_own_numbers(cluster: &Cluster) {
    // INFO and LIST are a node's own, and so is the counter: what one grants does not raise the others'. A replica counts what is held,
    // as its primary does, and has granted nothing.
    let mut shards = Shards::of(cluster, PRIMARIES);
    let fields = ["flock_held", "flock_grants", "flock_counter"];
    let numbers = |node: usize| {
        let info = cluster.nodes[node].info("flock");
        fields.map(|field| info.number(field))
    };
    let all = || (0..cluster.nodes.len()).map(numbers).collect::<Vec<_>>();
    let before = all();
    let keys: Vec<_> = (0..50).map(|number| shards.key(0, &number.to_string())).collect();
    for key in &keys {
        hold(&mut shards.conns[0], key, "alice");
    }
    wait_in_step(&cluster.nodes[0], &cluster.nodes[PRIMARIES]);
    let after = all();
    assert_eq!(after[0], [before[0][0] + 50, before[0][1] + 50, before[0][2] + 50]);
    let replica = (before[PRIMARIES], after[PRIMARIES]);
    assert_eq!(replica.1[..2], [replica.0[0] + 50, replica.0[1]]);
    for other in [1, 2, PRIMARIES + 1, PRIMARIES + 2] {
        assert_eq!(after[other], before[other], "node {other}");
    }
    let tag = &shards.tags[0];
    let lists = (0..cluster.nodes.len()).map(|node| listed(&mut reader(&cluster.nodes[node]), tag));
    assert_eq!(lists.collect::<Vec<_>>(), [50, 0, 0, 50, 0, 0]);
    for key in &keys {
        release(&mut shards.conns[0], key, "alice");
    }
}

fn each_replica_shows_its_primarys_locks_and_decides_nothing(cluster: &Cluster) {
    // Unless it is told READONLY it sends everybody to the primary. Then it shows its own shard's locks, and no other's.
    let mut shards = Shards::of(cluster, PRIMARIES);
    let keys: Vec<_> = (0..PRIMARIES).map(|node| shards.key(node, "k")).collect();
    let tokens: Vec<_> = shards.conns.iter_mut().zip(&keys).map(|(conn, key)| hold(conn, key, "alice")).collect();
    for (node, key) in keys.iter().enumerate() {
        assert_eq!(shards.conns[node].cmd(&args!["WAIT", 1, 10_000]), Reply::Int(1));
        let replica = shards.node(PRIMARIES + node);
        let mut plain = replica.connect(Protocol::Resp3);
        assert_eq!(plain.cmd(&["FLOCK.INFO", key]).error_code(), Some("MOVED"));
        let mut conn = reader(replica);
        let info = conn.cmd(&["FLOCK.INFO", key]);
        assert_eq!(info.field("holders").as_array()[0].field("token").as_token(), tokens[node]);
        let other = &keys[(node + 1) % PRIMARIES];
        assert_eq!(conn.cmd(&["FLOCK.INFO", other]).error_code(), Some("MOVED"), "another shard's");
        let lists = shards.tags.iter().map(|tag| listed(&mut conn, tag));
        assert!(lists.enumerate().all(|(shard, count)| count == usize::from(shard == node)));
        for request in [
            args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS].to_vec(),
            args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "BLOCK", 0].to_vec(),
            args!["FLOCK.CHECK", key, tokens[node]].to_vec(),
            args!["FLOCK.RENEW", key, "alice", LEASE_MS].to_vec(),
            args!["FLOCK.RELEASE", key, "alice"].to_vec(),
            args!["FLOCK.REVOKE", key].to_vec(),
        ] {
            let refusal = conn.cmd(&request);
            assert_eq!(refusal.error_code(), Some("MOVED"), "to the primary: {refusal}");
        }
        assert_eq!(holders(&mut conn, key), ["alice"]);
        assert_eq!(shards.conns[node].cmd(&args!["FLOCK.CHECK", key, tokens[node]]), Reply::Int(1));
        release(&mut shards.conns[node], key, "alice");
        wait_until_free(&mut conn, key);
    }
}

fn there_is_one_database(cluster: &Cluster) {
    for node in &cluster.nodes {
        let mut conn = node.connect(Protocol::Resp2);
        assert_eq!(conn.cmd(&["SELECT", "1"]).error_code(), Some("ERR"));
        // The connection is still in the only one.
        assert!(conn.cmd(&["FLOCK.LIST"]).error_code().is_none());
    }
}

fn databases_have_their_own_locks(builder: Builder) {
    // Valkey 9 can be told that there are several: then locks of one name in two of them are two locks, in a cluster as elsewhere.
    // Valkey 8 does not know the setting.
    let builder = builder.config("cluster-databases", 2).cluster();
    let is_new = match builder.try_start() {
        Ok(server) => server.info("server").text("valkey_version").starts_with("9."),
        Err(failure) => {
            assert!(failure.log.contains("cluster-databases"), "{}", failure.log);
            false
        }
    };
    if is_new {
        let cluster = Cluster::start(&builder, 1);
        let (node, key) = (&cluster.nodes[0], "k");
        let (mut zero, mut one) = (node.connect(Protocol::Resp2), node.connect(Protocol::Resp2));
        assert_eq!(one.cmd(&["SELECT", "1"]), Reply::ok());
        hold(&mut zero, key, "alice");
        let mut waiting = waiter(node, Protocol::Resp2, key, "bob");
        hold(&mut one, key, "carol");
        release(&mut one, key, "carol");
        release(&mut zero, key, "alice");
        waiting.recv().as_token();
    }
}

fn waits_end_when_the_cluster_goes_down(builder: Builder) {
    // A shard has no node any more: nothing is granted, anywhere, and who waits hears why. What was held is held when it is back.
    let mut cluster = own_cluster(&builder.config("cluster-node-timeout", 1000));
    let lost: Vec<_> = if long_tier() { vec![1, PRIMARIES + 1] } else { vec![1] };
    let mut shards = Shards::of(&cluster, 2);
    let (key, channel) = (shards.key(0, "k"), shards.key(0, "bob"));
    let token = hold(&mut shards.conns[0], &key, "alice");
    let mut blocked = waiter(shards.node(0), Protocol::Resp2, &key, "carol");
    let mut bob = shard_listener(shards.node(0), &channel);
    let mut conn = shards.conns.swap_remove(0);
    conn.cmd(&queue_request(&key, "bob", &channel));
    // Its replica first: it would take over.
    for node in lost.iter().rev() {
        cluster.nodes[*node].kill9();
    }
    let refusal = blocked.recv_within(Duration::from_secs(20)).expect("it is answered");
    assert_eq!(refusal.error_code(), Some("CLUSTERDOWN"));
    assert_eq!(hear(&mut bob).notice, ended(EndReason::ClusterDown));
    for request in [
        args!["FLOCK.ACQUIRE", key, "dave", LEASE_MS].to_vec(),
        args!["FLOCK.RENEW", key, "alice", LEASE_MS].to_vec(),
        args!["FLOCK.RELEASE", key, "alice"].to_vec(),
        args!["FLOCK.CHECK", key, token].to_vec(),
    ] {
        assert_eq!(conn.cmd(&request).error_code(), Some("CLUSTERDOWN"));
    }
    for node in lost {
        cluster.nodes[node].start_again();
    }
    cluster.wait_well();
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(1));
    release(&mut conn, &key, "alice");
}

fn slot_that_is_assigned_to_nobody_is_not_served(builder: Builder) {
    let cluster = own_cluster(&builder.config("cluster-require-full-coverage", "no"));
    let mut shards = Shards::of(&cluster, 2);
    let (gone, stays) = (shards.key(0, "k"), shards.key(1, "k"));
    let slot = shards.conns[0].cmd(&["CLUSTER", "KEYSLOT", &gone]).as_int();
    hold(&mut shards.conns[0], &gone, "alice");
    let mut waiting = waiter(shards.node(0), Protocol::Resp2, &gone, "bob");
    let mut everybody: Vec<_> = cluster.nodes.iter().map(|node| node.connect(Protocol::Resp2)).collect();
    for conn in &mut everybody {
        assert_eq!(conn.cmd(&args!["CLUSTER", "DELSLOTS", slot]), Reply::ok());
    }
    let refusal = waiting.recv();
    assert!(matches!(refusal.error_code(), Some("CLUSTERDOWN" | "TRYAGAIN")), "{refusal}");
    let acquire = args!["FLOCK.ACQUIRE", gone, "carol", LEASE_MS];
    for conn in &mut everybody {
        assert_eq!(conn.cmd(&acquire).error_code(), Some("CLUSTERDOWN"));
    }
    let token = hold(&mut shards.conns[1], &stays, "alice");
    assert_eq!(shards.conns[0].cmd(&args!["CLUSTER", "ADDSLOTS", slot]), Reply::ok());
    cluster.wait_well();
    let conn = &mut shards.conns[0];
    // The server drops the keys of a slot that is not its own any more, or keeps them: the lock is free, or alice's.
    wait_until("the slot is served", Duration::from_secs(10), || conn.cmd(&acquire).error_code().is_none());
    assert_eq!(shards.conns[1].cmd(&args!["FLOCK.CHECK", stays, token]), Reply::Int(1));
}

fn node_without_the_module_harms_nobody(builder: Builder) {
    // It knows no such command. A held lock does not go there: the source says why, and goes on with all that it has.
    let cluster = Cluster::of(&[builder.clone(), builder.without_module()]);
    let mut shards = Shards::of(&cluster, 2);
    let (here, there) = (shards.key(0, "k"), shards.key(1, "k"));
    let reply = shards.conns[1].cmd(&args!["FLOCK.ACQUIRE", there, "alice", LEASE_MS]);
    assert!(reply.to_string().contains("unknown command"), "{reply}");
    let token = hold(&mut shards.conns[0], &here, "alice");
    let mut waiting = waiter(shards.node(0), Protocol::Resp2, &here, "bob");
    let mut way = Migration::between_two(&cluster, &here);
    way.begin();
    let carry = args!["MIGRATE", "127.0.0.1", way.target_node.port(), here, 0, 5000];
    assert_eq!(way.source.cmd(&carry).error_code(), Some("ERR"), "the target cannot read it");
    for conn in [&mut way.source, &mut way.target] {
        assert_eq!(conn.cmd(&args!["CLUSTER", "SETSLOT", way.slot, "STABLE"]), Reply::ok());
    }
    let is_old = shards.node(0).info("server").text("valkey_version").starts_with("8.");
    if !is_old {
        way.ask_for_atomic();
        let source = &mut way.source;
        wait_until("the migration is given up", Duration::from_secs(20), || {
            let jobs = source.cmd(&["CLUSTER", "GETSLOTMIGRATIONS"]).to_string();
            jobs.contains("failed")
        });
    }
    assert_eq!(way.source.cmd(&args!["FLOCK.CHECK", here, token]), Reply::Int(1));
    release(&mut shards.conns[0], &here, "alice");
    let reply = waiting.recv();
    assert!(reply.error_code() == Some("TRYAGAIN") || reply.as_token() > token, "{reply}");
    for node in &cluster.nodes {
        node.assert_alive();
    }
}

fn replica_without_the_module_harms_nobody(builder: Builder) {
    // Somebody has lost the line that loads it. The replica ends as after any data that it cannot read, and says whose they are; its
    // primary goes on, and with the line it follows again.
    let mut cluster = Cluster::start(&builder, 1);
    let replica = cluster.add_replica(&builder, 0);
    let (primary, replica) = cluster.nodes.split_at_mut(replica);
    let (primary, replica) = (&primary[0], &mut replica[0]);
    let mut conn = primary.connect(Protocol::Resp2);
    let token = hold(&mut conn, "k", "alice");
    replica.shutdown_nosave();
    let config = replica.dir().join("valkey.conf");
    let with_module = fs::read_to_string(&config).expect("the configuration is there");
    replica.remove_config("loadmodule");
    let failure = replica.try_start_again().expect_err("what it has on disk is refused");
    assert_eq!(failure.status.and_then(|status| status.code()), Some(1), "{}", failure.log);
    assert!(failure.log.contains("no matching module 'flocklock'"), "{}", failure.log);
    // Nor does it get further without that: it is ready, for as long as it takes to get what the primary has.
    fs::remove_file(replica.dir().join("dump.rdb")).expect("it was left by the synchronisation");
    let status = match replica.try_start_again() {
        Ok(()) => Some(replica.wait_exit(SYNC_WITHIN)),
        Err(failure) => failure.status,
    };
    assert_eq!(status.and_then(|status| status.code()), Some(1), "{status:?}");
    assert_eq!(replica.log().matches("no matching module 'flocklock'").count(), 2, "{}", replica.log());
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(1));
    release(&mut conn, "k", "alice");
    hold(&mut conn, "k", "bob");
    fs::write(&config, with_module).expect("the configuration can be written");
    replica.start_again();
    wait_in_step(primary, replica);
    assert_eq!(holders(&mut reader(replica), "k"), ["bob"]);
}
