//! What is dropped leaves nothing behind: no hold, and no place in a queue.

use std::future::{Future, IntoFuture};
use std::time::{Duration, Instant};

use flock_client::{AcquireError, Flock};
use flock_tests::on_own_servers;
use flock_tests::random::Random;
use flock_tests::server::Builder;
use tokio::time::sleep;

use crate::scene::{
    SOON, assert_in_time, assert_kept, connect, held, held_and_waiting, long_tier, ms, on, quick, runtime,
    until_waiting, wait_until_nothing_is_left, wait_until_waiting,
};

on_own_servers![
    dropped_guard_releases,
    guard_dropped_on_a_plain_thread_releases,
    guard_dropped_while_panicking_releases,
    dropped_wait_leaves_the_queue,
    random_drops_leave_nothing,
    runtime_that_shuts_down_with_guards_leaves_nothing,
    single_threaded_runtime_that_shuts_down_with_guards_leaves_nothing,
    last_guard_keeps_the_client_alive,
    shutdown_ends_waits_and_gives_back_holds,
    client_that_goes_right_after_a_dropped_wait_leaves_no_place_in_the_queue,
];

fn dropped_guard_releases(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        drop(held(&flock, "k").await);
        wait_until_nothing_is_left(&server, SOON);
    });
}

fn guard_dropped_on_a_plain_thread_releases(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let guard = held(&flock, "k").await;
        std::thread::spawn(move || drop(guard)).join().unwrap();
        wait_until_nothing_is_left(&server, SOON);
    });
}

fn guard_dropped_while_panicking_releases(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let work = flock.lock("k").run(async |_| panic!("on purpose"));
        let work = tokio::spawn(async { work.await.map(|(): ()| ()) });
        assert!(work.await.unwrap_err().is_panic());
        wait_until_nothing_is_left(&server, SOON);
    });
}

fn dropped_wait_leaves_the_queue(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let _first = held(&flock, "k").await;
        let waiting = tokio::spawn(held(&flock, "k"));
        wait_until_waiting(&server, 1);
        waiting.abort();
        wait_until_waiting(&server, 0);
    });
}

fn random_drops_leave_nothing(builder: Builder) {
    // Eight tasks on three keys drop their futures and guards at random points. At the end nothing is held and nobody waits, a round
    // trip later; and every key can be locked at once: leases and waits are so long that nothing ends by itself.
    on(&builder, async |server, flock: Flock| {
        let drops_each = if long_tier() { 500 } else { 125 };
        let mut tasks = Vec::new();
        for seed in 0..8 {
            let flock = flock.clone();
            tasks.push(tokio::spawn(async move {
                let mut random = Random::from_seed(seed);
                let mut granted = 0;
                for _ in 0..drops_each {
                    let key = random.pick(&["a", "b", "c"]);
                    let lock = flock.lock(key).lease(Duration::from_secs(600)).wait(Duration::from_secs(600));
                    let lock = match random.below(6) {
                        0 | 1 => lock.shared(),
                        2 => lock.reentrant(format!("owner {}", random.below(2))),
                        _ => lock,
                    };
                    // From "polled once" to longer than a busy machine takes for an answer.
                    let doublings = random.below(16);
                    let patience = Duration::from_micros(random.below(1 << doublings));
                    let acquired = async {
                        if random.one_in(4) {
                            matches!(lock.try_acquire().await, Ok(Some(_)))
                        } else {
                            lock.await.is_ok()
                        }
                    };
                    granted += i32::from(ends_within(patience, acquired).await == Some(true));
                }
                granted
            }));
        }
        let mut granted = 0;
        for task in tasks {
            granted += task.await.unwrap();
        }
        let began = Instant::now();
        wait_until_nothing_is_left(&server, SOON);
        assert_in_time(began, began.elapsed(), ms(1000));
        println!("{} drops, {granted} of them of guards, gone after {:?}", 8 * drops_each, began.elapsed());
        assert!((1..8 * drops_each).contains(&granted), "the drops were not at random points: {granted}");
        for key in ["a", "b", "c"] {
            assert!(flock.lock(key).try_acquire().await.unwrap().is_some());
        }
    });
}

/// As `timeout`, to the microsecond: tokio's timers count milliseconds.
async fn ends_within<T>(patience: Duration, work: impl Future<Output = T>) -> Option<T> {
    let end = Instant::now() + patience;
    let over = async {
        while Instant::now() < end {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        biased;
        value = work => Some(value),
        () = over => None,
    }
}

fn runtime_that_shuts_down_with_guards_leaves_nothing(builder: Builder) {
    leaves_nothing(&builder, runtime());
}

fn single_threaded_runtime_that_shuts_down_with_guards_leaves_nothing(builder: Builder) {
    leaves_nothing(&builder, tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap());
}

/// Some guards are owned by tasks that the shutdown aborts, some are dropped just before it, some requests wait.
#[track_caller]
fn leaves_nothing(builder: &Builder, runtime: tokio::runtime::Runtime) {
    let server = builder.start();
    runtime.block_on(async {
        let flock = connect(server.addr()).await;
        for number in 0..20 {
            let guard = held(&flock, &format!("task {number}")).await;
            tokio::spawn(async move {
                guard.lost().await;
            });
            let waiting = held(&flock, &format!("task {number}"));
            tokio::spawn(waiting);
        }
        until_waiting(&server, 20).await;
        let _guards = [held(&flock, "x").await, held(&flock, "y").await];
        assert_eq!(held_and_waiting(&server), (22, 20));
    });
    drop(runtime);
    wait_until_nothing_is_left(&server, SOON);
}

fn last_guard_keeps_the_client_alive(builder: Builder) {
    on(&builder, async |server, _| {
        let flock = quick(server.addr()).connect().await.unwrap();
        let guard = flock.lock("k").lease(ms(1000)).await.unwrap();
        let began = Instant::now();
        drop(flock);
        sleep(ms(2500)).await;
        assert_kept(&server, &guard, began, ms(1000));
        drop(guard);
        wait_until_nothing_is_left(&server, SOON);
    });
}

fn shutdown_ends_waits_and_gives_back_holds(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let guard = held(&flock, "k").await;
        let waiting = tokio::spawn(flock.lock("k").into_future());
        wait_until_waiting(&server, 1);
        flock.shutdown(SOON).await.unwrap();
        assert_eq!(held_and_waiting(&server), (0, 0));
        assert!(matches!(waiting.await.unwrap(), Err(AcquireError::ShutDown)));
        assert!(!guard.is_valid());
        assert_eq!(guard.lost().await, Some(flock_client::LossReason::ShutDown));
        // Again, or by another clone: there is nothing left to end.
        sleep(ms(50)).await;
        flock.shutdown(SOON).await.unwrap();
    });
}

fn client_that_goes_right_after_a_dropped_wait_leaves_no_place_in_the_queue(builder: Builder) {
    // The last handle goes in the instant in which the wait is dropped: the client's thread must not end before it knows of that.
    on(&builder, async |server, flock: Flock| {
        let _first = held(&flock, "k").await;
        for _ in 0..10 {
            let another = connect(server.addr()).await;
            let waited = tokio::time::timeout(ms(50), another.lock("k").wait(ms(30_000)).into_future()).await;
            assert!(waited.is_err(), "the lock is held");
            drop(another);
        }
        wait_until_waiting(&server, 0);
    });
}
