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
use flock_tests::history::{Event, Phase, Recorder};
use flock_tests::on_own_servers;
use flock_tests::random::Random;
use flock_tests::reply::Reply;
use flock_tests::resp::Protocol;
use flock_tests::server::{Builder, Server};
use flock_tests::topology::{Replicated, demote, promote, wait_in_step};
use flock_tests::wait::let_pass;

use crate::contender::Contender;
use crate::scene::{LEASE_MS, hold, long_tier, release};
use crate::traffic::{assert_same, contents, wait_settled};

on_own_servers![
    clients_of_a_killed_primary_go_on_at_its_stale_replica,
    storage_believes_the_newer_of_two_primaries,
    grant_that_no_replica_has_is_known_by_wait,
];

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
