//! Grants that count only when replicas have them.

use std::future::{Future, IntoFuture};
use std::sync::Arc;
use std::time::{Duration, Instant};

use flock_client::{AcquireError, Flock};
use flock_tests::args;
use flock_tests::on_own_servers;
use flock_tests::resp::Protocol;
use flock_tests::server::Builder;
use flock_tests::topology::Replicated;
use tokio::time::timeout;

use crate::scene::{
    SOON, assert_in_time, assert_kept, connect, give_back, held, held_and_waiting, is_current, kill, ms, quick,
    wait_until_nothing_is_left, wait_until_waiting, within_bounds,
};

on_own_servers![
    acknowledged_grant_is_on_the_replica,
    handed_over_lock_is_acknowledged_too,
    stopped_replica_is_not_durable_and_nothing_stays_locked,
    waiting_for_a_stopped_replica_holds_up_nobody,
    server_without_replicas_is_not_durable,
    killed_replica_is_not_durable,
    one_of_two_replicas_is_not_two,
    dropped_wait_for_replicas_leaves_nothing,
    shutdown_ends_the_wait_for_replicas,
    broken_connections_are_replaced,
    acknowledged_session_lives_on_the_clients_connection,
    several_locks_are_acknowledged,
    acknowledgement_by_nobody_is_refused,
];

fn on<F: Future<Output = ()>>(builder: &Builder, replicas: usize, test: impl FnOnce(Arc<Replicated>, Flock) -> F) {
    let servers = Arc::new(Replicated::start(builder, replicas));
    within_bounds(async {
        let flock = connect(servers.primary.addr()).await;
        test(servers, flock).await;
    });
}

#[track_caller]
fn assert_not_durable(error: &AcquireError, counts: (u32, u32)) {
    match error {
        AcquireError::NotDurable { acknowledged, wanted, .. } => assert_eq!((*acknowledged, *wanted), counts),
        _ => panic!("{error:?}"),
    }
    assert!(error.is_retryable());
}

fn acknowledged_grant_is_on_the_replica(builder: Builder) {
    // No waiting for the replica here: it has each grant when the client has it.
    on(&builder, 1, async |servers, flock| {
        let mut reader = servers.replicas[0].connect(Protocol::Resp3);
        for _ in 0..50 {
            let guard = flock.lock("k").acknowledged_by(1, SOON).await.unwrap();
            let info = reader.cmd(&args!["FLOCK.INFO", "k"]);
            let token = info.field("holders").as_array()[0].field("token").as_token();
            assert_eq!(token, guard.token().get());
            give_back(guard).await;
        }
    });
}

fn handed_over_lock_is_acknowledged_too(builder: Builder) {
    // The grant comes about on another client's connection, while no replica listens.
    on(&builder, 1, async |servers, flock| {
        let first = held(&flock, "k").await;
        let waiting = tokio::spawn(flock.lock("k").wait(SOON).acknowledged_by(1, ms(300)).into_future());
        wait_until_waiting(&servers.primary, 1);
        servers.replicas[0].sigstop();
        give_back(first).await;
        assert_not_durable(&waiting.await.unwrap().unwrap_err(), (0, 1));
        assert_eq!(held_and_waiting(&servers.primary), (0, 0));
        servers.replicas[0].sigcont();
        assert!(flock.lock("k").acknowledged_by(1, SOON).await.unwrap().is_valid());
    });
}

fn stopped_replica_is_not_durable_and_nothing_stays_locked(builder: Builder) {
    on(&builder, 1, async |servers, flock| {
        servers.replicas[0].sigstop();
        let began = Instant::now();
        let lock = flock.lock("k").lease(Duration::from_secs(600)).acknowledged_by(1, ms(300));
        assert_not_durable(&lock.clone().await.unwrap_err(), (0, 1));
        assert!(began.elapsed() >= ms(300), "{:?}", began.elapsed());
        assert_in_time(began, began.elapsed(), ms(1300));
        assert_eq!(held_and_waiting(&servers.primary), (0, 0), "given back before the error is told");
        assert_not_durable(&lock.clone().try_acquire().await.unwrap_err(), (0, 1));
        servers.replicas[0].sigcont();
        assert!(lock.acknowledged_by(1, SOON).await.unwrap().is_valid());
    });
}

fn waiting_for_a_stopped_replica_holds_up_nobody(builder: Builder) {
    // Twenty wait for the replica at once: none waits for another, and meanwhile leases of a second are renewed.
    on(&builder, 1, async |servers, flock| {
        let kept = flock.lock("kept").lease(ms(1000)).await.unwrap();
        servers.replicas[0].sigstop();
        let began = Instant::now();
        let waiting: Vec<_> = (0..20)
            .map(|number| tokio::spawn(flock.lock(format!("k{number}")).acknowledged_by(1, ms(2500)).into_future()))
            .collect();
        while began.elapsed() < ms(2400) {
            let asked = Instant::now();
            drop(flock.lock("other").wait(SOON).await.unwrap());
            assert_in_time(asked, asked.elapsed(), ms(1000));
            tokio::time::sleep(ms(50)).await;
        }
        assert_kept(&servers.primary, &kept, began, ms(1000));
        for waiting in waiting {
            assert_not_durable(&waiting.await.unwrap().unwrap_err(), (0, 1));
        }
        assert_in_time(began, began.elapsed(), ms(4000));
        assert_kept(&servers.primary, &kept, began, ms(1000));
        servers.replicas[0].sigcont();
    });
}

fn server_without_replicas_is_not_durable(builder: Builder) {
    on(&builder, 0, async |servers, flock| {
        let error = flock.lock("k").acknowledged_by(1, ms(50)).await.unwrap_err();
        assert_not_durable(&error, (0, 1));
        assert_eq!(error.to_string(), "0 of 1 replicas acknowledged the grant in time");
        assert_eq!(held_and_waiting(&servers.primary), (0, 0));
    });
}

fn killed_replica_is_not_durable(builder: Builder) {
    within_bounds(async {
        let mut servers = Replicated::start(&builder, 1);
        let flock = connect(servers.primary.addr()).await;
        assert!(flock.lock("k").acknowledged_by(1, SOON).await.unwrap().is_valid());
        servers.replicas[0].kill9();
        let error = flock.lock("k").wait(SOON).acknowledged_by(1, ms(200)).await.unwrap_err();
        assert_not_durable(&error, (0, 1));
        assert_eq!(held_and_waiting(&servers.primary), (0, 0));
    });
}

fn one_of_two_replicas_is_not_two(builder: Builder) {
    on(&builder, 2, async |servers, flock| {
        servers.replicas[0].sigstop();
        assert!(flock.lock("a").acknowledged_by(1, SOON).await.unwrap().is_valid());
        let error = flock.lock("b").acknowledged_by(2, ms(300)).await.unwrap_err();
        assert_not_durable(&error, (1, 2));
        servers.replicas[0].sigcont();
        assert!(flock.lock("b").acknowledged_by(2, SOON).await.unwrap().is_valid());
    });
}

fn dropped_wait_for_replicas_leaves_nothing(builder: Builder) {
    on(&builder, 1, async |servers, flock| {
        servers.replicas[0].sigstop();
        let lock = flock.lock("k").lease(Duration::from_secs(600)).acknowledged_by(1, Duration::from_secs(600));
        assert!(timeout(ms(200), lock.into_future()).await.is_err());
        wait_until_nothing_is_left(&servers.primary, SOON);
        servers.replicas[0].sigcont();
    });
}

fn shutdown_ends_the_wait_for_replicas(builder: Builder) {
    on(&builder, 1, async |servers, flock| {
        servers.replicas[0].sigstop();
        let lock = flock.lock("k").lease(Duration::from_secs(600)).acknowledged_by(1, Duration::from_secs(600));
        let waiting = tokio::spawn(lock.into_future());
        flock_tests::wait::wait_until("it is granted", SOON, || held_and_waiting(&servers.primary).0 == 1);
        flock.shutdown(SOON).await.unwrap();
        assert!(matches!(waiting.await.unwrap(), Err(AcquireError::ShutDown | AcquireError::Lost { .. })));
        assert_eq!(held_and_waiting(&servers.primary), (0, 0));
        servers.replicas[0].sigcont();
    });
}

/// The ids of all connections of clients of this crate.
fn all_connections(servers: &Replicated) -> Vec<i64> {
    [false, true].map(|listening| crate::scene::connections(&servers.primary, listening)).concat()
}

fn broken_connections_are_replaced(builder: Builder) {
    on(&builder, 1, async |servers, flock| {
        for _ in 0..3 {
            let guard = flock.lock("k").wait(SOON).acknowledged_by(1, SOON).await.unwrap();
            give_back(guard).await;
            kill(&servers.primary, &all_connections(&servers));
        }
        assert!(flock.lock("k").wait(SOON).acknowledged_by(1, SOON).await.unwrap().is_valid());
    });
}

fn acknowledged_session_lives_on_the_clients_connection(builder: Builder) {
    // Not on that on which the replicas were waited for: killing that one costs nothing.
    on(&builder, 1, async |servers, _| {
        const GRACE: Duration = Duration::from_millis(1500);
        let flock = quick(servers.primary.addr()).heartbeat(ms(200)).response_timeout(ms(200)).connect().await.unwrap();
        let before = all_connections(&servers);
        let lock = flock.lock("k").lease(Duration::from_secs(600)).session(GRACE);
        let guard = lock.acknowledged_by(1, SOON).await.unwrap();
        let began = Instant::now();
        let mut new = all_connections(&servers);
        new.retain(|id| !before.contains(id));
        assert_eq!(new.len(), 1, "one connection more, for the replicas");
        kill(&servers.primary, &new);
        tokio::time::sleep(GRACE * 3 / 2).await;
        assert_kept(&servers.primary, &guard, began, GRACE);
        assert!(is_current(&servers.primary, &guard));
    });
}

fn several_locks_are_acknowledged(builder: Builder) {
    on(&builder, 1, async |servers, flock| {
        let guards = flock.lock_all(["a", "b"]).and_shared(["c"]).acknowledged_by(1, SOON).await.unwrap();
        assert!(guards.is_valid());
        let _ = guards.release().await.unwrap();
        servers.replicas[0].sigstop();
        let error = flock.lock_all(["a", "b"]).acknowledged_by(1, ms(100)).await.unwrap_err();
        assert_not_durable(&error, (0, 1));
        wait_until_nothing_is_left(&servers.primary, SOON);
        servers.replicas[0].sigcont();
    });
}

fn acknowledgement_by_nobody_is_refused(builder: Builder) {
    on(&builder, 0, async |_, flock| {
        for lock in [
            flock.lock("k").acknowledged_by(0, SOON),
            flock.lock("k").acknowledged_by(1, Duration::ZERO),
            flock.lock("k").acknowledged_by(1, SOON).reentrant("job"),
        ] {
            let error = lock.await.unwrap_err();
            assert!(matches!(error, AcquireError::Config(_)), "{error:?}");
        }
    });
}
