//! Several locks at once, each in its own mode: all or nothing, in one time.

use std::future::IntoFuture;
use std::num::NonZeroU32;
use std::time::Instant;

use flock_client::{AcquireError, Flock, LossReason, Mode, Released};
use flock_tests::args;
use flock_tests::on_own_servers;
use flock_tests::proxy::{Direction, Fault, Proxy};
use flock_tests::resp::Protocol;
use flock_tests::server::{Builder, Server};
use tokio::time::timeout;

use crate::scene::{
    SOON, assert_in_time, assert_kept, give_back, held, held_and_waiting, ms, on, quick, revoke, stalled_since,
    wait_until_nothing_is_left, wait_until_waiting,
};

on_own_servers![
    each_lock_has_its_own_mode,
    key_named_twice_is_held_in_the_stricter_mode,
    try_of_several_is_none_and_leaves_none,
    sets_with_a_shared_lock_in_common_hold_together,
    held_locks_are_kept_while_the_next_is_waited_for,
    lock_lost_while_the_next_is_waited_for_is_an_error,
    dropped_wait_for_several_leaves_none,
    set_that_waited_for_others_until_its_deadline_has_timed_out,
    loss_of_one_ends_the_work_under_all,
    conversion_follows_the_mode_asked_for,
    refused_conversion_leaves_the_hold_as_it_was,
];

#[track_caller]
fn mode(server: &Server, key: &str) -> String {
    let info = server.connect(Protocol::Resp3).cmd(&args!["FLOCK.INFO", key]);
    info.field("mode").as_str().to_owned()
}

fn each_lock_has_its_own_mode(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let two = NonZeroU32::new(2).unwrap();
        let lock = flock.lock_all(["c"]).and_shared(["a", "d"]).and_limited(["b"], two).wait(SOON);
        let guards = lock.await.unwrap();
        let keys: Vec<_> = guards.guards().iter().map(flock_client::Guard::key).collect();
        assert_eq!(keys, [b"a", b"b", b"c", b"d"]);
        assert_eq!(["a", "b", "c", "d"].map(|key| mode(&server, key)), ["shared", "shared", "exclusive", "shared"]);
        // One more fits beside the first, and then nobody.
        let _second = flock.lock("b").limit(two).try_acquire().await.unwrap().expect("there is room for two");
        assert!(flock.lock("b").limit(two).try_acquire().await.unwrap().is_none());
        assert_eq!(guards.release().await.unwrap(), Released::Released);
        assert_eq!(held_and_waiting(&server), (1, 0));
    });
}

fn key_named_twice_is_held_in_the_stricter_mode(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let (two, three) = (NonZeroU32::new(2).unwrap(), NonZeroU32::new(3).unwrap());
        let lock = flock.lock_all(["a"]).and_shared(["a", "b"]).and_limited(["b"], three).and_limited(["b"], two);
        let _guards = lock.wait(SOON).await.unwrap();
        assert_eq!(["a", "b"].map(|key| mode(&server, key)), ["exclusive", "shared"]);
        let _second = flock.lock("b").limit(two).try_acquire().await.unwrap().expect("there is room for two");
        assert!(flock.lock("b").limit(two).try_acquire().await.unwrap().is_none());
    });
}

fn try_of_several_is_none_and_leaves_none(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let blocker = held(&flock, "c").await;
        assert!(flock.lock_all(["a", "b", "c"]).try_acquire().await.unwrap().is_none());
        drop(blocker);
        wait_until_nothing_is_left(&server, SOON);
        assert!(flock.lock_all(["a", "b", "c"]).try_acquire().await.unwrap().is_some());
    });
}

fn sets_with_a_shared_lock_in_common_hold_together(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let first = flock.lock_all(["a"]).and_shared(["tariff"]).wait(SOON).await.unwrap();
        let second = flock.lock_all(["b"]).and_shared(["tariff"]).wait(SOON).await.unwrap();
        assert!(first.is_valid() && second.is_valid());
        assert_eq!(held_and_waiting(&server).0, 3, "three locks, one of them held twice");
        assert!(flock.lock("tariff").try_acquire().await.unwrap().is_none());
    });
}

fn held_locks_are_kept_while_the_next_is_waited_for(builder: Builder) {
    // "a" is held over two of its leases before "b" is free.
    on(&builder, async |server, flock: Flock| {
        let began = Instant::now();
        let blocker = held(&flock, "b").await;
        let waiting = tokio::spawn(flock.lock_all(["a", "b"]).lease(ms(1000)).wait(SOON).into_future());
        wait_until_waiting(&server, 1);
        tokio::time::sleep(ms(2500)).await;
        give_back(blocker).await;
        match waiting.await.unwrap() {
            Ok(guards) => assert_kept(&server, guards.get("a").unwrap(), began, ms(1000)),
            Err(error) => assert!(stalled_since(began) > ms(100), "{error:?}"),
        }
    });
}

fn lock_lost_while_the_next_is_waited_for_is_an_error(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let blocker = held(&flock, "b").await;
        let waiting = tokio::spawn(flock.lock_all(["a", "b"]).wait(SOON).into_future());
        wait_until_waiting(&server, 1);
        revoke(&server, "a");
        let began = Instant::now();
        let error = waiting.await.unwrap().unwrap_err();
        assert_in_time(began, began.elapsed(), ms(1000));
        let AcquireError::Lost { key, reason, .. } = &error else { panic!("{error:?}") };
        assert_eq!(key, b"a");
        assert!(matches!(reason, LossReason::Revoked | LossReason::Gone), "{reason:?}");
        assert!(error.to_string().contains("\"a\""), "{error}");
        // The wait for "b" is given up, and "a" is free.
        wait_until_waiting(&server, 0);
        drop(blocker);
        wait_until_nothing_is_left(&server, SOON);
    });
}

fn dropped_wait_for_several_leaves_none(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let blocker = held(&flock, "b").await;
        let waiting = tokio::spawn(flock.lock_all(["a", "b"]).and_shared(["c"]).into_future());
        wait_until_waiting(&server, 1);
        assert_eq!(held_and_waiting(&server), (2, 1));
        waiting.abort();
        drop(blocker);
        wait_until_nothing_is_left(&server, SOON);
    });
}

fn set_that_waited_for_others_until_its_deadline_has_timed_out(builder: Builder) {
    // The time went by while another held the first lock; what is left is too short for an answer about the second. That is no sign of
    // a server that cannot be reached.
    on(&builder, async |server, admin: Flock| {
        let proxy = Proxy::to(server.addr());
        let flock = quick(proxy.addr()).response_timeout(SOON).connect().await.unwrap();
        let first = held(&admin, "a").await;
        let waiting = tokio::spawn(flock.lock_all(["a", "b"]).wait(ms(600)).into_future());
        wait_until_waiting(&server, 1);
        proxy.set(Direction::ToServer, Fault::Hold); // grants arrive, requests do not
        give_back(first).await;
        let error = waiting.await.unwrap().unwrap_err();
        assert!(matches!(error, AcquireError::TimedOut), "{error:?}");
        proxy.heal();
        wait_until_nothing_is_left(&server, SOON);
    });
}

fn loss_of_one_ends_the_work_under_all(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let guards = flock.lock_all(["a", "b"]).wait(SOON).await.unwrap();
        let work = guards.watch(async {
            revoke(&server, "b");
            std::future::pending::<()>().await;
        });
        let reason = timeout(SOON, work).await.unwrap().unwrap_err();
        assert!(matches!(reason, LossReason::Revoked | LossReason::Gone), "{reason:?}");
        assert_eq!(guards.watch(async {}).await, Err(reason), "later work is not begun");
        assert_eq!(guards.release().await.unwrap(), Released::AlreadyLost);
        assert_eq!(held_and_waiting(&server), (0, 0));
    });
}

fn conversion_follows_the_mode_asked_for(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let mut guard = held(&flock, "k").await;
        let token = guard.token();
        guard.convert(Mode::Shared).await.unwrap();
        assert_eq!((mode(&server, "k").as_str(), guard.token()), ("shared", token));
        guard.convert(Mode::Shared).await.unwrap(); // it is: nothing changes
        guard.convert(Mode::Exclusive).await.unwrap();
        assert_eq!(mode(&server, "k"), "exclusive");
        assert!(guard.token() > token && guard.is_valid());
    });
}

fn refused_conversion_leaves_the_hold_as_it_was(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let mut guard = flock.lock("k").shared().await.unwrap();
        let token = guard.token();
        let other = flock.lock("k").shared().await.unwrap();
        let error = guard.convert(Mode::Exclusive).await.unwrap_err();
        assert!(matches!(error, flock_client::HoldError::Refused), "{error:?}");
        assert_eq!((mode(&server, "k").as_str(), guard.token()), ("shared", token));
        assert!(guard.is_valid() && other.is_valid());
        guard.renew().await.unwrap();
    });
}
