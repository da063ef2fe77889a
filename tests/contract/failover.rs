//! Failovers while clients are at work: what an asynchronous replica has missed costs a hold, never a token.
//!
//! A storage that checks tokens is the last judge. What it cannot see, a second holder beside a first that still believes, is what
//! `docs/GUARANTEES.md` says of failovers; so exclusion is not asked for here.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Scope, ScopedJoinHandle, scope};
use std::time::Duration;

use flock_tests::args;
use flock_tests::check::{Order, Rules, assert_sound};
use flock_tests::fenced_store::FencedStore;
use flock_tests::history::{Event, Phase, Recorder, now_ns};
use flock_tests::network::{Damage, Network, between};
use flock_tests::on_own_servers;
use flock_tests::random::Random;
use flock_tests::reply::Reply;
use flock_tests::resp::Protocol;
use flock_tests::server::{Builder, Generation, Server};
use flock_tests::topology::{Cluster, Replicated, demote, promote, wait_in_step};
use flock_tests::wait::{let_pass, poll, wait_until};

use crate::contender::{Contender, WANTED};
use crate::scene::{LEASE_MS, hold, long_tier, release, waiter};
use crate::traffic::{assert_same, contents, held, wait_settled};

on_own_servers![
    clients_of_a_killed_primary_go_on_at_its_stale_replica,
    storage_believes_the_newer_of_two_primaries,
    minority_primary_that_is_cut_off_stops_granting,
    grant_that_no_replica_has_is_known_by_wait,
];

/// How long a node of a cluster may be silent.
const NODE_TIMEOUT: Duration = Duration::from_millis(1500);
/// An election, and the way back of whoever has lost it.
const HEALED_WITHIN: Duration = Duration::from_secs(30);

/// Of one server; those of the next begin with twice the number.
const CLIENTS: u32 = 6;

/// Holds may be lost, and two may believe; nothing else.
const WITH_LOSS: Rules =
    Rules { order: Order::Everywhere, exclusion: false, leases: false, fifo: true, answered: true };

/// How long each part of a run takes.
fn a_while() -> Duration {
    Duration::from_millis(if long_tier() { 5000 } else { 500 })
}

/// What all clients of a run share.
#[derive(Default)]
struct Run {
    recorder: Recorder,
    store: FencedStore,
    is_over: AtomicBool,
}

impl Run {
    /// Clients of one server, until it refuses or the run is over. `first` is the number of the first of them.
    fn clients<'run>(
        &'run self,
        threads: &'run Scope<'run, '_>,
        server: &Server,
        first: u32,
        random: &mut Random,
    ) -> Vec<ScopedJoinHandle<'run, ()>> {
        let one_client = |process| {
            let seed = random.number();
            let mut client = Contender::new(server, process, Random::from_seed(seed), &self.recorder, &self.store);
            threads.spawn(move || {
                let mut goes_on = true;
                while goes_on && !self.is_over.load(Ordering::Relaxed) {
                    goes_on = client.one_acquisition().is_ok();
                }
            })
        };
        (first..first + CLIENTS).map(one_client).collect()
    }

    /// Waits until all of these clients have ended by an error. If one does not, all end, and the test.
    #[track_caller]
    fn wait_refused(&self, clients: &[ScopedJoinHandle<'_, ()>]) {
        let are_refused = || clients.iter().all(ScopedJoinHandle::is_finished).then_some(());
        if poll(HEALED_WITHIN, are_refused).is_none() {
            self.is_over.store(true, Ordering::Relaxed);
            panic!("the old primary still serves its clients after {HEALED_WITHIN:?}");
        }
    }
}

/// The tokens granted to the clients of one server, the smallest and the largest.
#[track_caller]
fn tokens_of(events: &[Event], first: u32) -> (u64, u64) {
    let tokens = || {
        events.iter().filter(|event| (first..first + CLIENTS).contains(&event.process)).filter_map(|event| match event
            .phase
        {
            Phase::Ok { token } => token,
            _ => None,
        })
    };
    (tokens().min().expect("something was granted"), tokens().max().expect("something was granted"))
}

fn clients_of_a_killed_primary_go_on_at_its_stale_replica(builder: Builder) {
    // D2, S2, L5. The replica has stopped for a while, and lacks all that was granted meanwhile, when its primary dies.
    let mut servers = Replicated::start(&builder, 1);
    let mut random = Random::new();
    let run = Run::default();
    scope(|threads| {
        let clients = run.clients(threads, &servers.primary, 0, &mut random);
        let_pass(a_while());
        servers.replicas[0].sigstop();
        let_pass(a_while());
        servers.primary.kill9();
        for client in clients {
            client.join().expect("a client ends with its connection");
        }
        servers.replicas[0].sigcont();
        promote(&servers.replicas[0]);
        run.clients(threads, &servers.replicas[0], 2 * CLIENTS, &mut random);
        let_pass(a_while());
        run.is_over.store(true, Ordering::Relaxed);
    });
    let events = run.recorder.events();
    let (old, new) = (tokens_of(&events, 0), tokens_of(&events, 2 * CLIENTS));
    println!("tokens {old:?}, then {new:?}; {:?}", run.store.counts());
    assert_sound(&events, &WITH_LOSS);
}

fn storage_believes_the_newer_of_two_primaries(builder: Builder) {
    // D4, S3. The old primary goes on and does not know that it is replaced. Each token of the new one is above all of its own: whoever
    // was granted a lock by the new one is never refused in favour of one of the old. At the heal its clients hear errors.
    let servers = Replicated::start(&builder, 1);
    let (old, new) = (&servers.primary, &servers.replicas[0]);
    let mut random = Random::new();
    let run = Run::default();
    scope(|threads| {
        let stale = run.clients(threads, old, 0, &mut random);
        let_pass(a_while());
        promote(new);
        run.clients(threads, new, 2 * CLIENTS, &mut random);
        let_pass(a_while());
        demote(old, new);
        for client in stale {
            client.join().expect("a client of the old primary ends by an error");
        }
        let_pass(a_while());
        run.is_over.store(true, Ordering::Relaxed);
    });
    let events = run.recorder.events();
    let ((_, last_stale), (first_new, _)) = (tokens_of(&events, 0), tokens_of(&events, 2 * CLIENTS));
    println!("the last stale token is {last_stale}, the first new one {first_new}; {:?}", run.store.counts());
    assert!(last_stale < first_new, "{last_stale} {first_new}");
    assert_sound(&events, &Rules { order: Order::Nowhere, ..WITH_LOSS });
    wait_settled(new);
    wait_in_step(new, old);
    assert_same(&contents(old), &contents(new), "the old primary and the new one");
}

/// On Valkey 9 alone: 8.0.1 has no filter that drops every packet of the cluster bus.
#[test]
fn primary_that_hears_nobody_stops_granting() {
    // E5, S3. In a cluster a primary is cut off: it hears none of the others any more, while its clients still reach it, and its replica
    // takes over. For one and a half node timeouts at most both grant; then it says that the cluster is down, to those who wait there too.
    // The server's own filter cuts it off, so no rights are needed; that the others go on hearing it spares them an election, so they are
    // told to.
    const ALL_PACKETS: &str = "-2";
    const NO_PACKETS: &str = "-1";
    let builder = Server::builder().generation(Generation::New);
    let builder =
        builder.config("enable-debug-command", "yes").config("cluster-node-timeout", NODE_TIMEOUT.as_millis());
    let cluster = Cluster::start_replicated(&builder, 3);
    let old = cluster.owner_of(WANTED[0]);
    let (replica, filter) = (3 + old, ["DEBUG", "DROP-CLUSTER-PACKET-FILTER"]);
    let (old, new) = (&cluster.nodes[old], &cluster.nodes[replica]);
    let mut admin = old.connect(Protocol::Resp2);
    let mut random = Random::new();
    let run = Run::default();
    let (cut, refusal) = scope(|threads| {
        let stale = run.clients(threads, old, 0, &mut random);
        let_pass(a_while());
        let cut = now_ns();
        assert_eq!(admin.cmd(&[filter[0], filter[1], ALL_PACKETS]), Reply::ok());
        cluster.fail_over(replica, Some("TAKEOVER"));
        run.clients(threads, new, 2 * CLIENTS, &mut random);
        run.wait_refused(&stale);
        let refusal = admin.cmd(&args!["FLOCK.ACQUIRE", WANTED[0], "late", LEASE_MS]);
        let_pass(a_while());
        run.is_over.store(true, Ordering::Relaxed);
        (cut, refusal)
    });
    assert_eq!(refusal.error_code(), Some("CLUSTERDOWN"), "{refusal}");
    assert_replaced(&run, cut);

    // When it hears again it is a replica, and has what its successor has.
    assert_eq!(admin.cmd(&[filter[0], filter[1], NO_PACKETS]), Reply::ok());
    assert_follows(old, new);
}

/// The old primary has stopped granting soon after the cut, the new one has granted above all of its tokens, and nothing else is wrong.
#[track_caller]
fn assert_replaced(run: &Run, cut: u64) {
    let events = run.recorder.events();
    let grants =
        events.iter().filter(|event| event.process < CLIENTS && matches!(event.phase, Phase::Ok { token: Some(_) }));
    let stale: Vec<_> = grants.map(|grant| grant.at_ns).filter(|at_ns| *at_ns > cut).collect();
    let last = Duration::from_nanos(stale.last().expect("it has granted after the cut, too") - cut);
    let ((_, last_stale), (first_new, _)) = (tokens_of(&events, 0), tokens_of(&events, 2 * CLIENTS));
    println!(
        "{} stale grants, the last {last:?} after the cut; {last_stale}, {first_new}; {:?}",
        stale.len(),
        run.store.counts()
    );
    assert!(last_stale < first_new, "{last_stale} {first_new}");
    // A node is asked whether it is there when it has been silent for half of the timeout, and has all of it to answer.
    assert!(last < NODE_TIMEOUT * 3 / 2 + Duration::from_millis(1500), "{last:?}");
    assert_sound(&events, &Rules { order: Order::Nowhere, ..WITH_LOSS });
}

/// The old primary becomes a replica of the new one, and holds what that holds.
#[track_caller]
fn assert_follows(old: &Server, new: &Server) {
    wait_until("the old primary is a replica", HEALED_WITHIN, || old.info("replication").text("role") == "slave");
    wait_settled(new);
    wait_in_step(new, old);
    assert_same(&held(old), &held(new), "the old primary and the new one");
}

fn minority_primary_that_is_cut_off_stops_granting(builder: Builder) {
    // E5, S3. A cable breaks between one primary and all the others. Its clients are on its side and go on, until it notices; the others
    // elect its replica. Then the cable is mended. What both have granted under one name: the storage takes the newer, and refuses the
    // older from then on.
    if !long_tier() {
        println!("not run: a cut network is for the long tier");
        return;
    }
    let Some(network) = Network::for_test("a minority primary that is cut off", 2, 0) else { return };
    let [minority, majority] = [0, 1].map(|host| &network.hosts()[host]);
    let cable = between(minority.address(), majority.address());
    let [minority, majority] = [minority, majority]
        .map(|host| builder.clone().within(host).config("cluster-node-timeout", NODE_TIMEOUT.as_millis()));
    let cluster = Cluster::of_replicated(&[minority, majority.clone(), majority.clone()], &majority);
    assert_eq!(cluster.owner_of(WANTED[0]), 0, "the slots are shared out in the order of the nodes");
    let (old, new) = (&cluster.nodes[0], &cluster.nodes[3]);
    let mut stale = old.connect(Protocol::Resp2);
    let (kept, contested) = ("{w}kept", "{w}contested");
    let kept_token = hold(&mut stale, kept, "carol");
    assert_eq!(stale.cmd(&args!["WAIT", 1, 10_000]), Reply::Int(1));
    let mut random = Random::new();
    let run = Run::default();
    let (cut, stale_token) = scope(|threads| {
        let clients = run.clients(threads, old, 0, &mut random);
        let_pass(a_while());
        let cut = now_ns();
        network.begin(Damage::Cut, &cable);
        let stale_token = hold(&mut stale, contested, "alice");
        let mut waiting = waiter(old, Protocol::Resp2, contested, "dave");
        run.wait_refused(&clients);
        assert_eq!(waiting.recv().error_code(), Some("CLUSTERDOWN"));
        let mut conn = new.connect(Protocol::Resp2);
        wait_until("the replica has been elected", HEALED_WITHIN, || conn.cmd(&["EXISTS", kept]) == Reply::Int(1));
        run.clients(threads, new, 2 * CLIENTS, &mut random);
        let_pass(a_while());
        run.is_over.store(true, Ordering::Relaxed);
        (cut, stale_token)
    });
    assert_replaced(&run, cut);
    let refusal = stale.cmd(&args!["FLOCK.ACQUIRE", kept, "late", LEASE_MS]);
    assert_eq!(refusal.error_code(), Some("CLUSTERDOWN"), "{refusal}");
    let mut conn = new.connect(Protocol::Resp2);
    let token = hold(&mut conn, contested, "bob");
    assert!(run.store.write(contested, "bob", token));
    assert!(!run.store.write(contested, "alice", stale_token), "{stale_token} after {token}");
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", kept, kept_token]), Reply::Int(1), "what had arrived is still held");

    network.end(Damage::Cut, &cable);
    assert_follows(old, new);
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", contested, token]), Reply::Int(1));
}

fn grant_that_no_replica_has_is_known_by_wait(builder: Builder) {
    // D10. WAIT after the grant tells whether a failover would know of it. If not, the holder gives the lock back unused, and nothing is
    // lost when the primary dies: the next one is granted, above the token that nobody has used.
    let mut servers = Replicated::start(&builder, 1);
    let mut conn = servers.primary.connect(Protocol::Resp2);
    hold(&mut conn, "safe", "alice");
    assert_eq!(conn.cmd(&args!["WAIT", 1, 5000]), Reply::Int(1));
    servers.replicas[0].sigstop();
    let token = hold(&mut conn, "unsafe", "alice");
    assert_eq!(conn.cmd(&args!["WAIT", 1, 100]), Reply::Int(0));
    release(&mut conn, "unsafe", "alice");
    servers.primary.kill9();
    servers.replicas[0].sigcont();
    promote(&servers.replicas[0]);
    let mut conn = servers.replicas[0].connect(Protocol::Resp2);
    assert!(conn.cmd(&args!["FLOCK.ACQUIRE", "safe", "bob", LEASE_MS]).is_nil());
    assert!(hold(&mut conn, "unsafe", "bob") > token);
}
