//! Re-entrant handles: one owner acquires again, here and elsewhere, and the lock is free when the last handle is given back.

use std::future::IntoFuture;
use std::time::{Duration, Instant};

use flock_client::{AcquireError, Flock, HoldError, Lock, LossReason, Mode, Released};
use flock_tests::args;
use flock_tests::on_own_servers;
use flock_tests::proxy::{Direction, Fault, Proxy};
use flock_tests::resp::Protocol;
use flock_tests::server::{Builder, Server};
use tokio::time::{sleep, timeout};

use crate::scene::{
    SOON, assert_in_time, assert_kept, connect, connections, give_back, held, held_and_waiting, is_current, kill, ms,
    on, quick, revoke, wait_until_called, wait_until_nothing_is_left, wait_until_waiting,
};

on_own_servers![
    lock_is_free_when_its_last_handle_is_released,
    other_owners_wait_for_the_last_handle,
    dropped_handle_leaves_the_others_theirs,
    handles_of_two_clients_are_one_hold,
    loss_is_the_loss_of_all_handles,
    loss_reaches_the_handles_of_other_clients,
    short_lease_does_not_cut_a_long_one,
    every_handle_keeps_the_hold_alive,
    handles_that_wait_together_are_granted_together,
    wait_that_is_given_up_leaves_the_others_theirs,
    waits_of_two_clients_are_both_granted,
    handle_after_a_loss_is_a_new_hold,
    lost_replies_add_no_handle,
    handles_outlive_their_connections,
    handles_that_poll_are_granted_together,
    what_a_reentrant_lock_cannot_be_is_refused,
];

fn handle(flock: &Flock) -> Lock {
    flock.lock("k").reentrant("job:7").wait(SOON)
}

#[track_caller]
fn ids(server: &Server) -> usize {
    let info = server.connect(Protocol::Resp3).cmd(&args!["FLOCK.INFO", "k"]);
    info.field("holders").as_array()[0].field("ids").as_array().len()
}

fn lock_is_free_when_its_last_handle_is_released(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let outer = handle(&flock).await.unwrap();
        let inner = handle(&flock).try_acquire().await.unwrap().expect("its own owner is not in the way");
        assert_eq!((outer.token(), outer.owner()), (inner.token(), b"job:7".as_slice()));
        assert_eq!(ids(&server), 2);
        assert_eq!(inner.release().await.unwrap(), Released::Released);
        assert!(outer.is_valid() && is_current(&server, &outer));
        assert_eq!(outer.release().await.unwrap(), Released::Released);
        assert_eq!(held_and_waiting(&server), (0, 0));
    });
}

fn other_owners_wait_for_the_last_handle(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let handles = [handle(&flock).await.unwrap(), handle(&flock).await.unwrap()];
        let waiting = tokio::spawn(flock.lock("k").reentrant("job:8").wait(SOON).into_future());
        wait_until_waiting(&server, 1);
        // Whoever waits is not overtaken by others, but the owner is in already.
        let third = handle(&flock).await.unwrap();
        for handle in handles {
            give_back(handle).await;
        }
        assert_eq!(held_and_waiting(&server), (1, 1));
        let token = third.token();
        give_back(third).await;
        assert!(waiting.await.unwrap().unwrap().token() > token);
    });
}

fn dropped_handle_leaves_the_others_theirs(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let outer = handle(&flock).await.unwrap();
        for _ in 0..3 {
            drop(handle(&flock).await.unwrap());
        }
        flock_tests::wait::wait_until("the dropped handles are gone", SOON, || ids(&server) == 1);
        assert!(outer.is_valid() && is_current(&server, &outer));
        drop(outer);
        wait_until_nothing_is_left(&server, SOON);
    });
}

fn handles_of_two_clients_are_one_hold(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let elsewhere = connect(server.addr()).await;
        let (here, there) = (handle(&flock).await.unwrap(), handle(&elsewhere).await.unwrap());
        assert_eq!(here.token(), there.token());
        give_back(here).await;
        assert!(there.is_valid() && is_current(&server, &there));
        give_back(there).await;
        assert_eq!(held_and_waiting(&server), (0, 0));
    });
}

fn loss_is_the_loss_of_all_handles(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let handles = [handle(&flock).await.unwrap(), handle(&flock).await.unwrap()];
        let began = Instant::now();
        revoke(&server, "k");
        for handle in handles {
            assert_eq!(timeout(SOON, handle.lost()).await.unwrap(), Some(LossReason::Revoked));
            assert!(!handle.is_valid());
            assert_eq!(handle.release().await.unwrap(), Released::AlreadyLost);
        }
        assert_in_time(began, began.elapsed(), ms(1000));
    });
}

fn loss_reaches_the_handles_of_other_clients(builder: Builder) {
    // The message goes to the client that acquired last; the other one finds out by its next renewal.
    on(&builder, async |server, flock: Flock| {
        let elsewhere = connect(server.addr()).await;
        let here = handle(&flock).lease(ms(900)).await.unwrap();
        let _there = handle(&elsewhere).lease(ms(900)).await.unwrap();
        revoke(&server, "k");
        let reason = timeout(SOON, here.lost()).await.unwrap();
        assert!(matches!(reason, Some(LossReason::Gone | LossReason::Expired)), "{reason:?}");
        let error = here.renew().await.unwrap_err();
        assert!(matches!(error, HoldError::Lost(_)), "{error:?}");
    });
}

fn short_lease_does_not_cut_a_long_one(builder: Builder) {
    // S5 for both: a handle with a short lease renews, and the long belief of the other stays true.
    on(&builder, async |server, flock: Flock| {
        let long = handle(&flock).lease(Duration::from_secs(60)).keep_alive(false).await.unwrap();
        let short = handle(&flock).lease(ms(300)).await.unwrap();
        short.renew().await.unwrap();
        let began = Instant::now();
        sleep(ms(700)).await;
        assert_kept(&server, &short, began, ms(300));
        give_back(short).await;
        sleep(ms(600)).await;
        assert!(long.remaining() > Duration::from_secs(50) && is_current(&server, &long));
    });
}

fn every_handle_keeps_the_hold_alive(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let first = handle(&flock).lease(ms(1000)).await.unwrap();
        let second = handle(&flock).lease(ms(1000)).await.unwrap();
        give_back(first).await;
        let began = Instant::now();
        sleep(ms(2500)).await;
        assert_kept(&server, &second, began, ms(1000));
    });
}

fn handles_that_wait_together_are_granted_together(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let blocker = held(&flock, "k").await;
        let waiting = [(); 3].map(|()| tokio::spawn(handle(&flock).into_future()));
        wait_until_called(&server, "FLOCK.ACQUIRE", 1 + 3);
        assert_eq!(held_and_waiting(&server).1, 1, "one place for all");
        let began = Instant::now();
        give_back(blocker).await;
        let mut handles = Vec::new();
        for waiting in waiting {
            handles.push(waiting.await.unwrap().unwrap());
        }
        assert_in_time(began, began.elapsed(), ms(1000));
        assert_eq!(ids(&server), 3);
        drop(handles);
        wait_until_nothing_is_left(&server, SOON);
    });
}

fn wait_that_is_given_up_leaves_the_others_theirs(builder: Builder) {
    // The newest has the place in the queue; when it leaves, the older must not be forgotten.
    on(&builder, async |server, flock: Flock| {
        let blocker = held(&flock, "k").await;
        let older = tokio::spawn(handle(&flock).into_future());
        wait_until_waiting(&server, 1);
        let newer = tokio::spawn(handle(&flock).into_future());
        wait_until_called(&server, "FLOCK.ACQUIRE", 1 + 2);
        newer.abort();
        assert!(newer.await.unwrap_err().is_cancelled());
        wait_until_called(&server, "FLOCK.RELEASE", 1);
        wait_until_called(&server, "FLOCK.ACQUIRE", 1 + 2 + 1);
        assert_eq!(held_and_waiting(&server).1, 1);
        let began = Instant::now();
        give_back(blocker).await;
        let guard = older.await.unwrap().unwrap();
        assert_in_time(began, began.elapsed(), ms(1000));
        assert_eq!(ids(&server), 1);
        give_back(guard).await;
        assert_eq!(held_and_waiting(&server), (0, 0));
    });
}

fn waits_of_two_clients_are_both_granted(builder: Builder) {
    // Each takes the place from the other, now and then; the grant is for both.
    on(&builder, async |server, flock: Flock| {
        let elsewhere = connect(server.addr()).await;
        let blocker = held(&flock, "k").await;
        let waiting = [tokio::spawn(handle(&flock).into_future()), tokio::spawn(handle(&elsewhere).into_future())];
        wait_until_called(&server, "FLOCK.ACQUIRE", 1 + 2 + 4);
        assert_eq!(held_and_waiting(&server).1, 1);
        give_back(blocker).await;
        let mut handles = Vec::new();
        for waiting in waiting {
            handles.push(waiting.await.unwrap().unwrap());
        }
        assert_eq!(handles[0].token(), handles[1].token());
        assert_eq!(ids(&server), 2);
    });
}

fn handle_after_a_loss_is_a_new_hold(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let old = handle(&flock).await.unwrap();
        revoke(&server, "k");
        timeout(SOON, old.lost()).await.unwrap();
        let new = handle(&flock).await.unwrap();
        assert!(new.token() > old.token());
        // Giving the old one back touches the new one no more.
        assert_eq!(old.release().await.unwrap(), Released::AlreadyLost);
        new.renew().await.unwrap();
        assert!(new.is_valid() && is_current(&server, &new));
    });
}

fn lost_replies_add_no_handle(builder: Builder) {
    // The request arrives, its reply does not: the retry is the same handle.
    on(&builder, async |server, _| {
        let proxy = Proxy::to(server.addr());
        let flock = quick(proxy.addr()).response_timeout(ms(100)).connect().await.unwrap();
        let outer = handle(&flock).await.unwrap();
        proxy.set_existing(Direction::ToClient, Fault::Drop);
        let inner = handle(&flock).await.unwrap();
        assert_eq!((ids(&server), inner.token()), (2, outer.token()));
        proxy.set_existing(Direction::ToClient, Fault::Drop);
        give_back(inner).await;
        assert_eq!(ids(&server), 1);
        assert!(outer.is_valid() && is_current(&server, &outer));
        give_back(outer).await;
        assert_eq!(held_and_waiting(&server), (0, 0));
    });
}

fn handles_outlive_their_connections(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let handles = [handle(&flock).lease(ms(2000)).await.unwrap(), handle(&flock).lease(ms(2000)).await.unwrap()];
        let began = Instant::now();
        for _ in 0..4 {
            kill(&server, &[false, true].map(|listening| connections(&server, listening)).concat());
            sleep(ms(600)).await;
            for handle in &handles {
                assert_kept(&server, handle, began, ms(2000));
            }
        }
        for handle in handles {
            give_back(handle).await;
        }
        assert_eq!(held_and_waiting(&server), (0, 0));
    });
}

fn handles_that_poll_are_granted_together(builder: Builder) {
    on(&builder, async |server, _| {
        let flock = quick(server.addr()).without_pubsub().connect().await.unwrap();
        let blocker = held(&flock, "k").await;
        let waiting = [(); 2].map(|()| tokio::spawn(handle(&flock).into_future()));
        wait_until_called(&server, "FLOCK.ACQUIRE", 1 + 4);
        give_back(blocker).await;
        let mut handles = Vec::new();
        for waiting in waiting {
            handles.push(waiting.await.unwrap().unwrap());
        }
        assert_eq!(ids(&server), 2);
        drop(handles);
        wait_until_nothing_is_left(&server, SOON);
    });
}

fn what_a_reentrant_lock_cannot_be_is_refused(builder: Builder) {
    on(&builder, async |_, flock: Flock| {
        for lock in [
            handle(&flock).shared(),
            handle(&flock).session(Duration::from_secs(10)),
            flock.lock("k").reentrant(""),
            flock.lock("k").reentrant([b'x'; 257]),
        ] {
            let error = lock.await.unwrap_err();
            assert!(matches!(error, AcquireError::Config(_)), "{error:?}");
        }
        let mut guard = handle(&flock).await.unwrap();
        let error = guard.convert(Mode::Shared).await.unwrap_err();
        assert!(matches!(error, HoldError::Config(_)), "{error:?}");
        assert!(guard.is_valid());
    });
}
