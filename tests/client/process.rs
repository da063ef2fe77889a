//! The client's process: stopped and continued; and next to the server, over a Unix socket.

use std::io::BufRead;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use flock_client::{Flock, LossReason};
use flock_tests::on_own_servers;
use flock_tests::server::{Builder, Generation, Server};
use flock_tests::wait::{let_pass, wait_until};
use tokio::time::timeout;

use crate::apart::{Apart, say, task};
use crate::scene::{
    SOON, connect, connections, give_back, held, held_and_waiting, is_current, kill, ms, revoke, runtime,
    stalled_since, wait_until_nothing_is_left, wait_until_waiting, watch_the_machine, within_bounds,
};

on_own_servers![
    everything_works_over_a_unix_socket,
    broken_unix_connections_are_made_anew,
    restarted_server_is_found_again_over_a_unix_socket,
];

fn over_unix_socket(builder: Builder) -> (Server, String) {
    let server = builder.config("unixsocket", "valkey.sock").start();
    let path: PathBuf = server.dir().join("valkey.sock");
    let url = format!("unix://{}", path.to_str().unwrap());
    (server, url)
}

fn everything_works_over_a_unix_socket(builder: Builder) {
    within_bounds(async {
        let (server, url) = over_unix_socket(builder);
        let flock = Flock::connect(&url).await.unwrap();
        let mut first = held(&flock, "k").await;
        let waiting = tokio::spawn(held(&flock, "k"));
        wait_until_waiting(&server, 1);
        first.renew().await.unwrap();
        first.downgrade().await.unwrap();
        first.upgrade().await.unwrap();
        give_back(first).await;
        let second = waiting.await.unwrap();
        assert!(is_current(&server, &second));
        second.renew().await.unwrap();
        revoke(&server, "k");
        assert_eq!(timeout(SOON, second.lost()).await.unwrap(), Some(LossReason::Revoked));
        let session = flock.lock("s").session(ms(2500)).await.unwrap();
        let set = flock.lock_all(["a", "b"]).and_shared(["c"]).await.unwrap();
        assert!(session.is_valid() && set.is_valid());
        drop((session, set));
        wait_until_nothing_is_left(&server, SOON);
    });
}

fn broken_unix_connections_are_made_anew(builder: Builder) {
    within_bounds(async {
        let (server, url) = over_unix_socket(builder);
        let flock = Flock::connect(&url).await.unwrap();
        let guard = flock.lock("k").lease(ms(3000)).await.unwrap();
        for _ in 0..5 {
            kill(&server, &[false, true].map(|listening| connections(&server, listening)).concat());
            give_back(held(&flock, "other").await).await;
        }
        assert!(guard.is_valid() && is_current(&server, &guard));
    });
}

fn restarted_server_is_found_again_over_a_unix_socket(builder: Builder) {
    // All connections have the same address there, and the numbers start again: nobody must kill somebody else's.
    within_bounds(async {
        let (mut server, url) = over_unix_socket(builder);
        let mut clients = Vec::new();
        for _ in 0..4 {
            clients.push(Flock::connect(&url).await.unwrap());
        }
        server.restart();
        for flock in &clients {
            give_back(held(flock, "k").await).await;
        }
        wait_until("all are back", SOON, || connections(&server, true).len() == 4);
        let before = (connections(&server, true), connections(&server, false));
        tokio::time::sleep(ms(300)).await;
        assert_eq!((connections(&server, true), connections(&server, false)), before);
    });
}

/// Stands for a process that works under a lock: whenever it is told to, it looks, and acts if it still believes.
fn work_when_told(address: &str, lease: Duration) {
    let runtime = runtime();
    let guard = runtime.block_on(async {
        let flock = Flock::connect(format!("valkey://{address}")).await.unwrap();
        flock.lock("k").lease(lease).await.unwrap()
    });
    say("acquired");
    for _ in std::io::stdin().lock().lines() {
        say(if guard.is_valid() { "acted" } else { "lost" });
    }
}

fn servers() -> impl Iterator<Item = Server> {
    watch_the_machine();
    [Generation::New, Generation::Old].into_iter().map(|generation| Server::builder().generation(generation).start())
}

#[test]
fn process_stopped_for_longer_than_its_lease_does_not_act() {
    const LEASE: Duration = Duration::from_millis(1000);
    if let Some(address) = task() {
        return work_when_told(&address, LEASE);
    }
    for server in servers() {
        let name = "process::process_stopped_for_longer_than_its_lease_does_not_act";
        let began = Instant::now();
        let mut worker = Apart::start(name, &server.addr().to_string());
        assert_eq!(worker.hear(SOON), "acquired");
        let_pass(3 * LEASE / 2); // it is kept alive
        worker.tell("act");
        let heard = worker.hear(SOON);
        assert!(heard == "acted" || stalled_since(began) > LEASE / 10, "{heard}");
        worker.stop(SOON);
        wait_until("its lease is over", SOON, || held_and_waiting(&server).0 == 0);
        // The first thing it sees when it goes on is that it may act, and it must find that it may not.
        worker.tell("act");
        worker.go_on();
        assert_eq!(worker.hear(SOON), "lost");
    }
}

#[test]
fn work_of_a_process_stopped_for_longer_than_its_lease_is_cancelled() {
    const LEASE: Duration = Duration::from_millis(1000);
    if let Some(address) = task() {
        return runtime().block_on(async {
            let (sender, mut told) = tokio::sync::mpsc::unbounded_channel();
            std::thread::spawn(move || std::io::stdin().lock().lines().try_for_each(|line| sender.send(line)));
            let flock = Flock::connect(format!("valkey://{address}")).await.unwrap();
            let work = flock.lock("k").lease(LEASE).run(async |_| {
                say("acquired");
                while told.recv().await.is_some() {
                    // Stopped within a step, the process goes on within it: an await that has its answer already ends no step.
                    tokio::task::yield_now().await;
                    say("acted");
                }
            });
            say(&format!("{:?}", work.await));
        });
    }
    for server in servers() {
        let name = "process::work_of_a_process_stopped_for_longer_than_its_lease_is_cancelled";
        let mut worker = Apart::start(name, &server.addr().to_string());
        assert_eq!(worker.hear(SOON), "acquired");
        worker.tell("act");
        assert_eq!(worker.hear(SOON), "acted");
        worker.stop(SOON);
        wait_until("its lease is over", SOON, || held_and_waiting(&server).0 == 0);
        worker.tell("act");
        worker.go_on();
        let end = worker.hear(SOON);
        assert!(end.starts_with("Err(Lost("), "{end}");
    }
}

#[test]
fn process_stopped_for_less_than_its_lease_keeps_its_lock() {
    const LEASE: Duration = Duration::from_millis(3000);
    if let Some(address) = task() {
        return work_when_told(&address, LEASE);
    }
    for server in servers() {
        let began = Instant::now();
        let name = "process::process_stopped_for_less_than_its_lease_keeps_its_lock";
        let mut worker = Apart::start(name, &server.addr().to_string());
        assert_eq!(worker.hear(SOON), "acquired");
        worker.stop(SOON);
        let_pass(LEASE / 3);
        worker.go_on();
        let_pass(LEASE + ms(500)); // only renewals can have kept it until then
        worker.tell("act");
        let heard = worker.hear(SOON);
        assert!(heard == "acted" || stalled_since(began) > LEASE / 10, "{heard}");
    }
}

#[test]
fn killed_process_leaves_its_lock_for_no_longer_than_its_lease() {
    const LEASE: Duration = Duration::from_millis(1500);
    if let Some(address) = task() {
        return work_when_told(&address, LEASE);
    }
    for server in servers() {
        let name = "process::killed_process_leaves_its_lock_for_no_longer_than_its_lease";
        let worker = Apart::start(name, &server.addr().to_string());
        assert_eq!(worker.hear(SOON), "acquired");
        let_pass(LEASE);
        let began = Instant::now();
        drop(worker); // killed
        runtime().block_on(async {
            let flock = connect(server.addr()).await;
            assert!(held(&flock, "k").await.is_valid());
        });
        crate::scene::assert_in_time(began, began.elapsed(), LEASE + ms(500));
    }
}
