//! The blocking facade: the same promises to plain threads, with no runtime in sight.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use flock_client::blocking::{Flock, Guard};
use flock_client::{AcquireError, ConnectError, HoldError, LossReason, Released, RunError};
use flock_tests::on_own_servers;
use flock_tests::server::{Builder, Server};
use flock_tests::wait::wait_until;

use crate::scene::{
    SOON, assert_in_time, held_and_waiting, ms, revoke, runtime, url, wait_until_nothing_is_left, wait_until_waiting,
    watch_the_machine,
};

on_own_servers![
    lock_is_acquired_used_and_given_back,
    threads_wait_in_order,
    wait_ends_at_its_deadline,
    dropped_guard_is_given_back,
    hold_is_kept_while_its_thread_computes,
    loss_ends_the_wait_for_it_and_calls_back,
    released_lock_calls_nobody_back,
    work_that_outlives_the_lock_is_lost,
    work_that_panics_gives_back,
    readers_upgrade_and_downgrade,
    what_has_no_call_of_its_own_can_be_waited_for,
    calls_after_the_shutdown_end_at_once,
    asynchronous_task_is_refused,
];

fn start(builder: &Builder) -> (Server, Flock) {
    watch_the_machine();
    let server = builder.start();
    let flock = Flock::connect(url(server.addr())).expect("the server is there");
    (server, flock)
}

#[track_caller]
fn held(flock: &Flock, key: &str) -> Guard {
    flock.lock(key).wait(SOON).acquire().expect("the lock should be free soon")
}

fn lock_is_acquired_used_and_given_back(builder: Builder) {
    let (server, flock) = start(&builder);
    let first = held(&flock, "k");
    assert!(first.is_valid() && first.remaining() > ms(1) && first.key() == b"k");
    first.renew().unwrap();
    assert!(flock.lock("k").try_acquire().unwrap().is_none());
    let token = first.token();
    assert_eq!(first.release().unwrap(), Released::Released);
    let second = flock.lock("k").try_acquire().unwrap().expect("it is free");
    assert!(second.token() > token);
    assert!(flock.lock("l").run(|guard| guard.token() > token).unwrap());
    drop(second);
    flock.shutdown(SOON).unwrap();
    assert_eq!(held_and_waiting(&server), (0, 0));
}

fn threads_wait_in_order(builder: Builder) {
    let (server, flock) = start(&builder);
    let holder = held(&flock, "k");
    let (order, served) = mpsc::channel();
    let threads: Vec<_> = (0..8)
        .map(|number| {
            let (flock, order) = (flock.clone(), order.clone());
            let thread = thread::spawn(move || {
                let guard = held(&flock, "k");
                order.send((number, guard.token())).unwrap();
                assert_eq!(guard.release().unwrap(), Released::Released);
            });
            wait_until_waiting(&server, i64::from(number) + 1);
            thread
        })
        .collect();
    let mut last = holder.token();
    drop(holder);
    for number in 0..8 {
        let (who, token) = served.recv_timeout(SOON).unwrap();
        assert_eq!(who, number);
        assert!(token > last);
        last = token;
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

fn wait_ends_at_its_deadline(builder: Builder) {
    let (_server, flock) = start(&builder);
    let _holder = held(&flock, "k");
    let began = Instant::now();
    assert!(matches!(flock.lock("k").wait(ms(150)).acquire(), Err(AcquireError::TimedOut)));
    assert!(began.elapsed() >= ms(150));
    assert_in_time(began, began.elapsed(), ms(350));
    let nobody = Flock::connect_with(flock_client::Flock::builder("valkey://127.0.0.1:1").connect_timeout(ms(50)));
    assert!(matches!(nobody, Err(ConnectError::Unavailable(_))));
}

fn dropped_guard_is_given_back(builder: Builder) {
    let (server, flock) = start(&builder);
    drop(held(&flock, "k"));
    wait_until_nothing_is_left(&server, SOON);
    // The last handle is gone before the last guard.
    let guard = held(&flock, "k");
    drop(flock);
    assert!(guard.is_valid());
    drop(guard);
    wait_until_nothing_is_left(&server, SOON);
}

fn hold_is_kept_while_its_thread_computes(builder: Builder) {
    let (_server, flock) = start(&builder);
    let guard = flock.lock("k").lease(ms(1000)).acquire().unwrap();
    let began = Instant::now();
    while began.elapsed() < ms(2500) {
        std::hint::spin_loop();
    }
    let stalled = crate::scene::stalled_since(began);
    assert!(guard.is_valid() || stalled > ms(100), "lost, and the longest stall was {stalled:?}");
}

fn loss_ends_the_wait_for_it_and_calls_back(builder: Builder) {
    let (server, flock) = start(&builder);
    let mut guard = held(&flock, "k");
    let began = Instant::now();
    assert_eq!(guard.lost_within(ms(50)), None);
    assert!(began.elapsed() >= ms(50));
    let (tell, told) = mpsc::channel();
    guard.on_lost(move |reason| tell.send(reason).unwrap());
    revoke(&server, "k");
    assert_eq!(guard.lost_within(SOON), Some(LossReason::Revoked));
    assert_eq!(told.recv_timeout(SOON), Ok(LossReason::Revoked));
    assert!(!guard.is_valid());
    assert_eq!(guard.lost_within(Duration::ZERO), Some(LossReason::Revoked));
    assert!(matches!(guard.renew(), Err(HoldError::Lost(LossReason::Revoked))));
    assert_eq!(guard.release().unwrap(), Released::AlreadyLost);
}

fn released_lock_calls_nobody_back(builder: Builder) {
    let (server, flock) = start(&builder);
    let (tell, told) = mpsc::channel();
    for release in [true, false] {
        let (mut guard, tell) = (held(&flock, "k"), tell.clone());
        guard.on_lost(move |reason| tell.send(reason).unwrap());
        if release {
            assert_eq!(guard.release().unwrap(), Released::Released);
        } else {
            drop(guard);
        }
    }
    drop(tell);
    // The callbacks are gone, and with them what they held: the channel ends.
    assert_eq!(told.recv_timeout(SOON), Err(mpsc::RecvTimeoutError::Disconnected));
    drop(flock);
    wait_until("the client has disconnected", SOON, || crate::scene::connections(&server, true).is_empty());
}

fn work_that_outlives_the_lock_is_lost(builder: Builder) {
    let (server, flock) = start(&builder);
    let outcome = flock.lock("k").wait(SOON).run(|guard| {
        revoke(&server, "k");
        guard.lost_within(SOON)
    });
    // The first renewal may be quicker than the message.
    assert!(matches!(outcome, Err(RunError::Lost(LossReason::Revoked | LossReason::Gone))), "{outcome:?}");
}

fn work_that_panics_gives_back(builder: Builder) {
    let (server, flock) = start(&builder);
    let work = AssertUnwindSafe(|| flock.lock("k").wait(SOON).run(|_| panic!("on purpose")));
    assert!(catch_unwind(work).is_err());
    wait_until_nothing_is_left(&server, SOON);
}

fn readers_upgrade_and_downgrade(builder: Builder) {
    let (_server, flock) = start(&builder);
    let mut first = flock.lock("k").shared().acquire().unwrap();
    let second = flock.lock("k").shared().acquire().unwrap();
    assert!(matches!(first.upgrade(), Err(HoldError::Refused)));
    assert_eq!(second.release().unwrap(), Released::Released);
    first.upgrade().unwrap();
    assert!(flock.lock("k").shared().try_acquire().unwrap().is_none());
    first.downgrade().unwrap();
    assert!(flock.lock("k").shared().try_acquire().unwrap().is_some());
}

fn what_has_no_call_of_its_own_can_be_waited_for(builder: Builder) {
    let (server, flock) = start(&builder);
    let both = flock.wait_for(async { flock.inner().lock_all(["a", "b"]).wait(SOON).await }).unwrap();
    assert_eq!(held_and_waiting(&server), (2, 0));
    assert_eq!(flock.wait_for(both.release()).unwrap(), Released::Released);
    assert_eq!(held_and_waiting(&server), (0, 0));
}

fn calls_after_the_shutdown_end_at_once(builder: Builder) {
    let (_server, flock) = start(&builder);
    let guard = held(&flock, "k");
    flock.shutdown(SOON).unwrap();
    assert!(matches!(flock.lock("k").acquire(), Err(AcquireError::ShutDown)));
    assert_eq!(guard.lost_within(SOON), Some(LossReason::ShutDown));
    assert_eq!(guard.release().unwrap(), Released::AlreadyLost);
}

fn asynchronous_task_is_refused(builder: Builder) {
    let (server, flock) = start(&builder);
    let url = url(server.addr());
    let runtime = runtime();
    runtime.block_on(async {
        let refused = catch_unwind(AssertUnwindSafe(|| flock.lock("k").acquire().map(drop)));
        let said = refused.expect_err("it should panic");
        let said = said.downcast_ref::<String>().cloned().or(said.downcast_ref::<&str>().map(|said| (*said).into()));
        assert!(said.is_some_and(|said| said.contains("Cannot start a runtime from within a runtime")));
        assert!(catch_unwind(|| Flock::connect(&url).map(drop)).is_err());
        // A thread for blocking calls is the place for them.
        let elsewhere = flock.clone();
        let token = tokio::task::spawn_blocking(move || elsewhere.lock("k").run(|guard| guard.token()));
        assert!(token.await.unwrap().is_ok());
    });
    wait_until_nothing_is_left(&server, SOON);
}
