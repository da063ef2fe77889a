//! A cluster: each key at the node that serves its slot, and followed when the slot moves or its node fails.

use std::future::IntoFuture;
use std::time::{Duration, Instant};

use flock_client::{AcquireError, ConnectError, Flock, Guard, HoldError, LossReason, Released};
use flock_tests::migration::Migration;
use flock_tests::network::{Damage, Network, between};
use flock_tests::reply::Reply;
use flock_tests::resp::Protocol;
use flock_tests::server::{self, Generation, Server, planted_module};
use flock_tests::topology::Cluster;
use flock_tests::wait::wait_until;
use flock_tests::{args, on_own_servers};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::load::{Load, WITH_LOSS, WITHOUT_LOSS};
use crate::scene::{
    SOON, assert_in_time, give_back, held, held_and_waiting, is_current, long_tier, ms, wait_until_waiting,
    within_bounds,
};

on_own_servers![
    every_key_is_asked_for_at_its_node,
    lock_follows_its_slot_by_the_older_way,
    key_that_has_left_before_its_slot_is_followed,
    nothing_is_lost_while_slots_move,
    killed_primary_is_replaced,
    primary_that_is_taken_over_is_left,
    primary_that_is_cut_off_is_left,
    rolling_restart_loses_nothing,
    rolling_upgrade_loses_nothing,
    loss_that_went_with_the_message_link_is_told_with_the_next,
    loss_by_a_failover_is_told_where_no_messages_are_heard,
    outage_is_no_storm,
    what_makes_no_sense_in_a_cluster_is_told,
    users_need_few_permissions,
];

/// How long a failover may take on a busy machine: the nodes notice, and vote.
const MOVED_WITHIN: Duration = Duration::from_secs(20);
const PRIMARIES: usize = 3;

fn url(cluster: &Cluster) -> String {
    let addresses: Vec<_> = cluster.nodes.iter().map(|node| node.addr().to_string()).collect();
    format!("valkey+cluster://{}", addresses.join(","))
}

async fn connect(cluster: &Cluster) -> Flock {
    Flock::connect(url(cluster)).await.expect("the cluster is there")
}

/// Nodes notice soon that one is gone.
fn attentive(builder: &server::Builder) -> server::Builder {
    builder.clone().config("cluster-node-timeout", 1500)
}

/// Primaries with a replica each, which notice soon that one of them is gone.
fn replicated(builder: &server::Builder) -> Cluster {
    Cluster::start_replicated(&attentive(builder), PRIMARIES)
}

/// A hash tag for each of the first nodes, with which a key is that node's.
fn tags(cluster: &Cluster, nodes: usize) -> Vec<String> {
    let mut tags = vec![None; nodes];
    for number in 0.. {
        let tag = format!("{{{number}}}");
        let owner = cluster.owner_of(&tag);
        tags[owner].get_or_insert(tag);
        if tags.iter().all(Option::is_some) {
            break;
        }
    }
    tags.into_iter().flatten().collect()
}

/// Somebody waits for the lock, without a limit that a test would reach.
fn waits(flock: &Flock, key: &str) -> JoinHandle<Result<Guard, AcquireError>> {
    tokio::spawn(flock.lock(key).wait(ms(35_000)).into_future())
}

async fn granted(waiting: JoinHandle<Result<Guard, AcquireError>>) -> Guard {
    timeout(SOON, waiting).await.expect("it is granted soon").expect("it has not panicked").expect("it is granted")
}

fn every_key_is_asked_for_at_its_node(builder: server::Builder) {
    let cluster = Cluster::start(&builder, PRIMARIES);
    within_bounds(async {
        let (flock, other) = (connect(&cluster).await, connect(&cluster).await);
        let keys: Vec<_> = tags(&cluster, PRIMARIES).iter().map(|tag| format!("{tag}k")).collect();
        for (key, node) in keys.iter().zip(&cluster.nodes) {
            let guard = held(&flock, key).await;
            assert!(is_current(node, &guard));
            let waiting = waits(&other, key);
            wait_until_waiting(node, 1);
            sleep(ms(100)).await; // its channel is subscribed to by then: the grant is pushed, and not asked for
            let began = Instant::now();
            give_back(guard).await;
            let next = granted(waiting).await;
            assert_in_time(began, began.elapsed(), ms(250));
            drop(next);
        }
        let all = flock.lock_all(&keys).wait(SOON).acquire().await.unwrap();
        assert!(other.lock_all(&keys).try_acquire().await.unwrap().is_none());
        assert_eq!(flock.stats().await.unwrap().number("flock_held"), Some(3));
        flock.ping().await.unwrap();
        let all = all.into_guards();
        let mut listed = flock.list("*").page_size(1).all().await.unwrap();
        listed.sort_by(|a, b| a.key.cmp(&b.key));
        assert!(listed.iter().map(|lock| &*lock.key).eq(all.iter().map(Guard::key)), "{listed:?}");
        for guard in &all {
            assert_eq!(flock.info(guard.key(), 0).await.unwrap().unwrap().holders[0].token, guard.token());
            guard.renew().await.unwrap(); // the next renewal is far away: it is the message that tells
            assert_eq!(other.revoke(guard.key()).await.unwrap(), 1);
            assert_eq!(timeout(SOON, guard.lost()).await.unwrap(), Some(LossReason::Revoked));
        }
        drop(all);
        for node in &cluster.nodes {
            wait_until("nothing is left", SOON, || held_and_waiting(node) == (0, 0));
        }
    });
}

/// The slot of a held lock goes to another node and back, by `carry`; somebody waits for it all the while.
fn lock_follows_its_slot(cluster: &Cluster, carry: fn(&mut Migration<'_>, &str)) {
    within_bounds(async {
        let (flock, other) = (connect(cluster).await, connect(cluster).await);
        let key = "{k}";
        let home = cluster.owner_of(key);
        let mut holder = flock.lock(key).lease(ms(6000)).await.unwrap();
        for to in [(home + 1) % PRIMARIES, home] {
            let waiting = waits(&other, key);
            let mut way = Migration::new(cluster, key, to);
            wait_until_waiting(way.source_node, 1);
            let began = Instant::now();
            carry(&mut way, key);
            way.wait_until_there(key);
            wait_until_waiting(way.target_node, 1);
            println!("waits at the new node after {:?}", began.elapsed());
            holder.renew().await.unwrap();
            assert!(is_current(way.target_node, &holder));
            sleep(ms(100)).await;
            let began = Instant::now();
            let token = holder.token();
            give_back(holder).await;
            let next = granted(waiting).await;
            assert_in_time(began, began.elapsed(), ms(250));
            assert!(next.token() > token && is_current(way.target_node, &next));
            holder = next;
            // What the new node says of the hold is heard.
            flock.revoke(key).await.unwrap();
            assert_eq!(timeout(SOON, holder.lost()).await.unwrap(), Some(LossReason::Revoked));
            holder = flock.lock(key).lease(ms(6000)).wait(SOON).await.unwrap();
        }
    });
}

fn loss_that_went_with_the_message_link_is_told_with_the_next(builder: server::Builder) {
    // The channel is subscribed to anew; the next renewal is due in ten seconds.
    let cluster = Cluster::start(&builder, PRIMARIES);
    within_bounds(async {
        let flock = connect(&cluster).await;
        let key = format!("{}k", tags(&cluster, PRIMARIES)[0]);
        let guard = held(&flock, &key).await;
        guard.renew().await.unwrap();
        sleep(ms(150)).await; // in charge of the keep-alive
        let mut admin = cluster.nodes[0].connect(Protocol::Resp2);
        for command in [["MULTI"].as_slice(), &["CLIENT", "KILL", "TYPE", "pubsub"], &["FLOCK.REVOKE", &key], &["EXEC"]]
        {
            admin.cmd(command);
        }
        let began = Instant::now();
        assert_eq!(timeout(SOON, guard.lost()).await.expect("it is told"), Some(LossReason::Gone));
        assert_in_time(began, began.elapsed(), ms(2000));
    });
}

fn loss_by_a_failover_is_told_where_no_messages_are_heard(builder: server::Builder) {
    // The promoted replica is asked as soon as it is known; the next renewal is due in ten seconds.
    let mut cluster = replicated(&builder);
    within_bounds(async {
        let flock = Flock::builder(url(&cluster)).without_pubsub().connect().await.unwrap();
        let key = format!("{}k", tags(&cluster, PRIMARIES)[0]);
        let guard = flock.lock(&key).lease(ms(30_000)).acknowledged_by(1, SOON).await.unwrap();
        guard.renew().await.unwrap();
        sleep(ms(150)).await; // in charge of the keep-alive
        cluster.fail_over(PRIMARIES, Some("TAKEOVER"));
        let new = &cluster.nodes[PRIMARIES];
        wait_until("the replica is a primary", MOVED_WITHIN, || new.info("replication").text("role") == "master");
        // Nobody hears of this: as if the grant had never reached it.
        assert_eq!(new.connect(Protocol::Resp2).cmd(&args!["FLOCK.REVOKE", key]), Reply::Int(1));
        cluster.nodes[0].kill9();
        let began = Instant::now();
        assert_eq!(timeout(SOON, guard.lost()).await.expect("it is told"), Some(LossReason::Gone));
        assert_in_time(began, began.elapsed(), ms(5000));
    });
}

fn lock_follows_its_slot_by_the_older_way(builder: server::Builder) {
    let cluster = Cluster::start(&builder, PRIMARIES);
    lock_follows_its_slot(&cluster, |way, key| {
        way.begin();
        way.carry(key);
        // The key has gone, the slot has not: who asks is sent on, each time.
        wait_until("somebody has been sent on", SOON, || {
            way.source_node.info("errorstats").get("errorstat_ASK").is_some()
        });
        way.end();
    });
}

/// A user with the rights that the manual says a client needs, and no others.
fn add_worker(node: &Server) {
    const RIGHTS: &str = "+@flock +ssubscribe +sunsubscribe +asking +cluster|slots +cluster|nodes";
    let user = format!("ACL SETUSER worker on >p%w ~* resetchannels &flock:* {RIGHTS}");
    assert_eq!(node.connect(Protocol::Resp2).cmd(&user.split(' ').collect::<Vec<_>>()), Reply::ok());
}

async fn connect_as_worker(cluster: &Cluster) -> Flock {
    cluster.nodes.iter().for_each(add_worker);
    let url = format!("valkey+cluster://worker@{}", cluster.nodes[0].addr());
    Flock::builder(url).credentials(None, "p%w").connect().await.unwrap()
}

fn key_that_has_left_before_its_slot_is_followed(builder: server::Builder) {
    // By the older way keys go one by one. The node that they leave names the other one for one request at a time, and only who says
    // that it was sent is answered there.
    let cluster = Cluster::start(&builder, PRIMARIES);
    within_bounds(async {
        let (flock, other) = (connect_as_worker(&cluster).await, connect_as_worker(&cluster).await);
        let key = "{k}";
        let lease = ms(3000);
        let guard = flock.lock(key).lease(lease).await.unwrap();
        let mut way = Migration::new(&cluster, key, (cluster.owner_of(key) + 1) % PRIMARIES);
        way.begin();
        way.carry(key);
        guard.renew().await.unwrap();
        sleep(lease * 2).await; // the keep-alive's renewals arrive as well
        assert!(guard.is_valid());
        assert!(other.lock(key).try_acquire().await.unwrap().is_none());
        assert_eq!(other.info(key, 0).await.unwrap().unwrap().holders[0].token, guard.token());
        let waiting = waits(&other, key);
        sleep(ms(300)).await;
        let token = guard.token();
        assert_eq!(guard.release().await.unwrap(), Released::Released);
        let next = granted(waiting).await;
        assert!(next.token() > token);
        assert_eq!(next.release().await.unwrap(), Released::Released);
        way.end();
        assert!(is_current(way.target_node, &held(&flock, key).await));
    });
}

#[test]
fn node_that_is_cut_off_is_not_believed() {
    // A client that knows nobody but a node which has heard of nothing: it is sent to the old primary, hears there that the cluster is
    // down, and asks the others.
    let builder = Server::builder().generation(Generation::New).config("enable-debug-command", "yes");
    let mut cluster = replicated(&builder);
    within_bounds(async {
        let tags = tags(&cluster, PRIMARIES);
        let (old, new) = (&cluster.nodes[0], &cluster.nodes[PRIMARIES]);
        let mut admin = old.connect(Protocol::Resp2);
        assert_eq!(admin.cmd(&["DEBUG", "DROP-CLUSTER-PACKET-FILTER", "-2"]), Reply::ok());
        cluster.fail_over(PRIMARIES, Some("TAKEOVER"));
        wait_until("the old primary has noticed", MOVED_WITHIN, || {
            admin.cmd(&["GET", &tags[0]]).error_code() == Some("CLUSTERDOWN")
        });
        let flock = Flock::connect(format!("valkey+cluster://{}", old.addr())).await.unwrap();
        let began = Instant::now();
        assert!(is_current(new, &held(&flock, &format!("{}k", tags[0])).await));
        println!("found after {:?}", began.elapsed());

        // Another primary dies, so the nodes are asked again and again, that one too: what it tells is older than what is known.
        drop(held(&flock, &tags[1]).await);
        cluster.nodes[1].kill9();
        let (old, new) = (&cluster.nodes[0], &cluster.nodes[PRIMARIES + 1]);
        let misled = || stat(old, "errorstats", "errorstat_CLUSTERDOWN", "count=");
        let before = (misled(), stat(old, "commandstats", "cmdstat_cluster|slots", "calls="));
        let moved = tokio::spawn(flock.lock(&tags[1]).wait(MOVED_WITHIN).into_future());
        while !moved.is_finished() {
            drop(held(&flock, &format!("{}k", tags[0])).await);
            sleep(ms(20)).await;
        }
        assert!(is_current(new, &moved.await.unwrap().unwrap()));
        assert!(stat(old, "commandstats", "cmdstat_cluster|slots", "calls=") > before.1, "it was asked");
        assert_eq!(misled(), before.0, "and believed");
    });
}

#[test]
fn lock_follows_its_slot_atomically() {
    let cluster = Cluster::start(&Server::builder().generation(Generation::New), PRIMARIES);
    lock_follows_its_slot(&cluster, |way, _| way.ask_for_atomic());
}

fn nothing_is_lost_while_slots_move(builder: server::Builder) {
    let cluster = Cluster::start(&builder, PRIMARIES);
    let atomic = !format!("{builder:?}").contains("Old");
    within_bounds(async {
        let flock = connect(&cluster).await;
        let keys: Vec<_> = ["{k}a", "{k}b", "{l}a", "{m}a"].map(str::to_owned).into();
        let kept = flock.lock("{k}kept").lease(ms(6000)).await.unwrap();
        let load = Load::start(&flock, &keys);
        for round in 0..if long_tier() { 12 } else { 4 } {
            sleep(ms(300)).await;
            let mut way = Migration::new(&cluster, "{k}", (cluster.owner_of("{k}") + 1) % PRIMARIES);
            if atomic && round % 2 == 0 {
                way.ask_for_atomic();
            } else {
                way.begin();
                way.carry_all();
                way.end();
            }
            way.wait_until_there("{k}");
            way.wait_until_known("{k}");
        }
        sleep(ms(300)).await;
        load.end(&WITHOUT_LOSS).await;
        kept.renew().await.unwrap();
        assert!(is_current(&cluster.nodes[cluster.owner_of("{k}")], &kept));
    });
}

/// Under load the first primary goes, by `end`. What its replica has heard of stays held and is renewed; who waits is granted by the
/// replica; the other nodes' locks do not notice.
fn primary_goes(mut cluster: Cluster, end: impl FnOnce(&mut Cluster)) {
    within_bounds(async {
        let (flock, other, idle) = (connect(&cluster).await, connect(&cluster).await, connect(&cluster).await);
        let tags = tags(&cluster, PRIMARIES);
        let (kept, contested) = (format!("{}kept", tags[0]), format!("{}k", tags[0]));
        let kept = flock.lock(kept).lease(ms(15_000)).acknowledged_by(1, SOON).await.unwrap();
        let first = other.lock(&contested).lease(ms(15_000)).acknowledged_by(1, SOON).await.unwrap();
        let waiting = waits(&flock, &contested);
        wait_until_waiting(&cluster.nodes[0], 1);
        // It does nothing else, so nothing that fails tells it of the failover.
        let next = waits(&idle, &contested);
        wait_until_waiting(&cluster.nodes[0], 2);
        let keys: Vec<_> = tags.iter().map(|tag| format!("{tag}load")).collect();
        let load = Load::start(&flock, &keys);
        let elsewhere = held(&flock, &format!("{}kept", tags[1])).await;
        sleep(ms(300)).await;

        let began = Instant::now();
        end(&mut cluster);
        let new = &cluster.nodes[PRIMARIES];
        wait_until("the replica is a primary", MOVED_WITHIN, || new.info("replication").text("role") == "master");
        println!("promoted after {:?}", began.elapsed());
        wait_until("both wait there", SOON, || {
            let mut conn = new.connect(Protocol::Resp3);
            let info = conn.cmd(&args!["FLOCK.INFO", contested]);
            !info.is_nil() && info.field("waiter_count").as_int() == 2
        });
        println!("both wait there after {:?}", began.elapsed());
        let token = first.token();
        give_back(first).await;
        // The two wait in whatever order they have come.
        let turn = async |waiting| {
            let guard = granted(waiting).await;
            assert!(guard.token() > token && is_current(new, &guard));
            give_back(guard).await;
        };
        tokio::join!(turn(waiting), turn(next));
        sleep(ms(300)).await;
        load.end(&WITH_LOSS).await;
        kept.renew().await.unwrap();
        assert!(kept.is_valid() && is_current(new, &kept) && elsewhere.is_valid());
    });
}

fn killed_primary_is_replaced(builder: server::Builder) {
    primary_goes(replicated(&builder), |cluster| cluster.nodes[0].kill9());
}

fn primary_that_is_taken_over_is_left(builder: server::Builder) {
    // It lives, and hears soon that it is a replica: until then two serve the same slots.
    primary_goes(replicated(&builder), |cluster| cluster.fail_over(PRIMARIES, Some("TAKEOVER")));
}

fn primary_that_is_cut_off_is_left(builder: server::Builder) {
    // It lives, the clients reach it, and it reaches no other node. It says that the cluster is down; the others know better.
    if !long_tier() {
        println!("not run: a cut network is for the long tier");
        return;
    }
    let Some(network) = Network::for_test("a primary that is cut off is left", 2, 0) else { return };
    let [minority, majority] = [0, 1].map(|host| &network.hosts()[host]);
    let cable = between(minority.address(), majority.address());
    let [minority, majority] = [minority, majority].map(|host| attentive(&builder).within(host));
    let cluster = Cluster::of_replicated(&[minority, majority.clone(), majority.clone()], &majority);
    primary_goes(cluster, |_| network.begin(Damage::Cut, &cable));
}

fn rolling_restart_loses_nothing(builder: server::Builder) {
    let shards = if long_tier() { PRIMARIES } else { 1 };
    one_shard_after_the_other(&builder, shards, Server::restart, |_| ());
}

fn rolling_upgrade_loses_nothing(builder: server::Builder) {
    // To a version that writes what this one does not know.
    if !long_tier() {
        println!("not run: the next version is for the long tier, which builds it");
        return;
    }
    let upgrade = |node: &mut Server| {
        node.set_module(&planted_module());
        node.restart();
    };
    let until_mixed = |old: &Server| {
        wait_until("the old version refuses what the next one writes", MOVED_WITHIN, || {
            old.log().contains("perhaps a later version wrote it")
        });
    };
    one_shard_after_the_other(&builder, PRIMARIES, upgrade, until_mixed);
}

/// How the module is upgraded: the replica first, then it takes over, then the old primary, once it has followed for as
/// long as `following` waits. Nothing is granted twice meanwhile.
fn one_shard_after_the_other(
    builder: &server::Builder,
    shards: usize,
    restart: fn(&mut Server),
    following: fn(&Server),
) {
    let mut cluster = Cluster::start_replicated(builder, PRIMARIES);
    within_bounds(async {
        let flock = connect(&cluster).await;
        let tags = tags(&cluster, PRIMARIES);
        let mut kept = Vec::new();
        for tag in &tags {
            kept.push(flock.lock(format!("{tag}kept")).lease(ms(9000)).await.unwrap());
        }
        let keys: Vec<_> = tags.iter().map(|tag| format!("{tag}load")).collect();
        let load = Load::start(&flock, &keys);
        for primary in 0..shards {
            let replica = PRIMARIES + primary;
            sleep(ms(300)).await;
            cluster.wait_settled();
            restart(&mut cluster.nodes[replica]);
            wait_in_step_under_load(&cluster.nodes[replica]);
            cluster.fail_over(replica, None);
            wait_in_step_under_load(&cluster.nodes[primary]);
            following(&cluster.nodes[primary]);
            cluster.wait_settled();
            restart(&mut cluster.nodes[primary]);
            wait_in_step_under_load(&cluster.nodes[primary]);
        }
        sleep(ms(300)).await;
        load.end(&WITHOUT_LOSS).await;
        for (tag, guard) in tags.iter().zip(&kept) {
            guard.renew().await.unwrap();
            assert!(is_current(&cluster.nodes[cluster.owner_of(tag)], guard));
        }
    });
}

/// Waits until a replica follows its primary, which goes on.
fn wait_in_step_under_load(replica: &Server) {
    wait_until("the replica follows", MOVED_WITHIN, || {
        let info = replica.info("replication");
        info.get("master_link_status") == Some("up") && info.get("master_sync_in_progress") == Some("0")
    });
}

fn outage_is_no_storm(builder: server::Builder) {
    // One of two nodes dies: the cluster is down, and the other says so at once, however often it is asked.
    let mut cluster = Cluster::start(&attentive(&builder), 2);
    within_bounds(async {
        let flock = connect(&cluster).await;
        let tags = tags(&cluster, 2);
        drop(held(&flock, &tags[0]).await);
        drop(held(&flock, &tags[1]).await);
        cluster.nodes[1].kill9();
        let living = &cluster.nodes[0];
        wait_until("the cluster is down", MOVED_WITHIN, || {
            let mut conn = living.connect(Protocol::Resp2);
            conn.cmd(&["GET", &tags[0]]).error_code() == Some("CLUSTERDOWN")
        });
        let refusals = || stat(living, "errorstats", "errorstat_CLUSTERDOWN", "count=");
        let questions = || stat(living, "commandstats", "cmdstat_cluster|slots", "calls=");
        let before = (refusals(), questions());
        let (down, dead) = tokio::join!(flock.lock(&tags[0]).wait(ms(5000)), flock.lock(&tags[1]).wait(ms(5000)));
        let error = down.unwrap_err();
        assert!(matches!(&error, AcquireError::Server(error) if error.code() == "CLUSTERDOWN"), "{error:?}");
        let error = dead.unwrap_err();
        assert!(matches!(error, AcquireError::Unavailable(_)) && error.is_retryable(), "{error:?}");
        let (refused, asked) = (refusals() - before.0, questions() - before.1);
        println!("refused {refused} times in 5 s, asked for the slots {asked} times");
        assert!((1..50).contains(&refused) && asked < 50, "{refused} {asked}");
    });
}

/// A number in one of the server's statistics; none is 0.
fn stat(server: &Server, section: &str, name: &str, field: &str) -> u64 {
    let info = server.info(section);
    let number = |stat: &str| stat.split(',').find_map(|pair| pair.strip_prefix(field)?.parse().ok());
    info.get(name).and_then(number).unwrap_or(0)
}

fn what_makes_no_sense_in_a_cluster_is_told(builder: server::Builder) {
    let cluster = Cluster::start(&builder, 1);
    let alone = builder.start();
    within_bounds(async {
        for wrong in [
            "valkey+cluster://",
            "valkey+cluster://h:x",
            "valkey+cluster://h/x",
            "http+cluster://h",
            "valkey+cluster://h?a=b",
        ] {
            let error = Flock::connect(wrong).await.unwrap_err();
            assert!(matches!(error, ConnectError::Config(_)), "{wrong}: {error:?}");
        }
        let began = Instant::now();
        let error = Flock::connect(format!("valkey+cluster://{}", alone.addr())).await.unwrap_err();
        let ConnectError::Server(server) = &error else { panic!("no cluster: {error:?}") };
        assert!(server.message().contains("cluster support disabled"), "{server}");
        let error = Flock::connect(format!("{}/7", url(&cluster))).await.unwrap_err();
        assert!(matches!(error, ConnectError::Server(_)), "wrong database: {error:?}");
        assert_in_time(began, began.elapsed(), ms(2000));
        let gone = Server::builder().without_module().start().addr();
        let builder = Flock::builder(format!("valkey+cluster://u:secret@{gone}")).connect_timeout(ms(300));
        let error = builder.connect().await.unwrap_err();
        assert!(matches!(error, ConnectError::Unavailable(_)) && !format!("{error:?}").contains("secret"), "{error:?}");

        // One that is not there does not matter.
        let flock = Flock::connect(format!("valkey+cluster://{gone},{}", cluster.nodes[0].addr())).await.unwrap();
        let error = flock.lock("k").session(ms(5000)).await.unwrap_err();
        assert!(matches!(error, AcquireError::Config(_)), "{error:?}");
        let guard = flock.lock("k").reentrant("me").await.unwrap();
        let mut again = flock.lock("k").reentrant("me").await.unwrap();
        assert_eq!(guard.token(), again.token());
        assert!(matches!(again.downgrade().await, Err(HoldError::Config(_))));
    });
}

fn users_need_few_permissions(builder: server::Builder) {
    let cluster = Cluster::start(&builder, 1);
    within_bounds(async {
        let node = &cluster.nodes[0];
        let mut admin = node.connect(Protocol::Resp2);
        add_worker(node);
        let right = Flock::builder(format!("redis+cluster://worker@{}", node.addr())).credentials(None, "p%w");
        let (flock, other) = (right.clone().connect().await.unwrap(), right.connect().await.unwrap());
        let guard = held(&flock, "k").await;
        let waiting = waits(&other, "k");
        sleep(ms(300)).await;
        let clients = admin.cmd(&["CLIENT", "LIST"]).as_str().to_owned();
        assert_eq!(clients.matches(" user=worker ").count(), 4, "two connections each: {clients}");
        assert_eq!(clients.matches(" ssub=1 ").count(), 2, "both listen: {clients}");
        give_back(guard).await;
        give_back(granted(waiting).await).await;
        let error = Flock::connect(format!("redis+cluster://worker:wrong@{}", node.addr())).await.unwrap_err();
        assert!(matches!(&error, ConnectError::Server(error) if error.code() == "WRONGPASS"), "{error:?}");
    });
}
