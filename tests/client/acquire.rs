//! Taking a lock: alone, in turn, together, within a time, several at once.

use std::future::IntoFuture;
use std::num::NonZeroU32;
use std::time::Instant;

use flock_client::{AcquireError, ConnectError, Event, Flock, LossReason, Released, RunError, WaitMode};
use flock_tests::args;
use flock_tests::on_own_servers;
use flock_tests::resp::Protocol;
use flock_tests::server::Builder;
use flock_tests::topology::Replicated;

use crate::scene::{
    SOON, assert_in_time, connect, give_back, held, held_and_waiting, is_current, ms, on, quick, revoke, settled, url,
    wait_until_called, wait_until_nothing_is_left, wait_until_waiting, within_bounds,
};

on_own_servers![
    lock_is_acquired_and_released,
    try_of_a_held_lock_is_none,
    waiter_is_told_the_moment_the_lock_is_free,
    waiters_are_served_in_order,
    wait_ends_at_its_deadline,
    polling_acquires_too,
    readers_share_and_a_writer_waits,
    semaphore_admits_its_limit,
    tokens_rise_and_respect_the_floor,
    label_is_shown,
    run_releases_after_the_work,
    run_cancels_the_work_when_the_lock_is_lost,
    locks_taken_together_are_released_together,
    locks_that_cannot_all_be_had_leave_none,
    crossing_sets_of_locks_do_not_deadlock,
    refusal_of_the_server_is_told,
    refused_acquisition_leaves_nothing_to_give_back,
    user_without_pubsub_polls,
    wrong_password_is_told_at_once,
    missing_password_is_told_with_its_cure,
    server_without_the_module_is_told_at_once,
    events_tell_of_a_loss,
];

fn lock_is_acquired_and_released(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let guard = flock.lock("k").await.unwrap();
        assert_eq!(guard.key(), b"k");
        assert!(guard.is_valid() && guard.remaining() > ms(1000));
        assert!(is_current(&server, &guard));
        assert_eq!(guard.release().await.unwrap(), Released::Released);
        assert_eq!(held_and_waiting(&server), (0, 0));
    });
}

fn try_of_a_held_lock_is_none(builder: Builder) {
    on(&builder, async |_, flock: Flock| {
        let guard = flock.lock("k").try_acquire().await.unwrap().expect("the lock is free");
        assert!(flock.lock("k").try_acquire().await.unwrap().is_none());
        give_back(guard).await;
        assert!(flock.lock("k").try_acquire().await.unwrap().is_some());
    });
}

fn waiter_is_told_the_moment_the_lock_is_free(builder: Builder) {
    // By the push, not by asking again: that would take 30 s.
    on(&builder, async |server, flock: Flock| {
        let first = held(&flock, "k").await;
        let waiting = tokio::spawn(held(&flock, "k"));
        wait_until_waiting(&server, 1);
        let token = first.token();
        let began = Instant::now();
        give_back(first).await;
        let second = waiting.await.unwrap();
        assert_in_time(began, began.elapsed(), ms(1000));
        assert!(second.token() > token && second.is_valid());
        assert!(is_current(&server, &second));
    });
}

fn waiters_are_served_in_order(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let first = held(&flock, "k").await;
        let (order, mut served) = tokio::sync::mpsc::unbounded_channel();
        for number in 0..10 {
            let (waiting, order) = (held(&flock, "k"), order.clone());
            tokio::spawn(async move {
                let guard = waiting.await;
                order.send(number).unwrap();
                give_back(guard).await;
            });
            wait_until_waiting(&server, number + 1);
        }
        give_back(first).await;
        for number in 0..10 {
            assert_eq!(served.recv().await, Some(number));
        }
    });
}

fn wait_ends_at_its_deadline(builder: Builder) {
    // Neither much later than asked nor as another error; and the queue is left.
    on(&builder, async |server, flock: Flock| {
        let _first = held(&flock, "k").await;
        for mode in [WaitMode::Push, WaitMode::Poll] {
            let began = Instant::now();
            let error = flock.lock("k").wait(ms(100)).wait_mode(mode).await.unwrap_err();
            assert!(matches!(error, AcquireError::TimedOut), "{error:?}");
            assert!(began.elapsed() >= ms(100));
            assert_in_time(began, began.elapsed(), ms(1000));
            wait_until_waiting(&server, 0);
        }
    });
}

fn polling_acquires_too(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let first = held(&flock, "k").await;
        let waiting = tokio::spawn(flock.lock("k").wait_mode(WaitMode::Poll).wait(SOON).into_future());
        wait_until_called(&server, "FLOCK.ACQUIRE", 1 + 2);
        drop(first);
        assert!(waiting.await.unwrap().unwrap().is_valid());
    });
}

fn readers_share_and_a_writer_waits(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let readers = [flock.lock("k").shared().await.unwrap(), flock.lock("k").shared().await.unwrap()];
        let writer = tokio::spawn(held(&flock, "k"));
        wait_until_waiting(&server, 1);
        // Behind the waiting writer.
        assert!(flock.lock("k").shared().try_acquire().await.unwrap().is_none());
        let highest = readers.iter().map(|reader| reader.token()).max().unwrap();
        for reader in readers {
            give_back(reader).await;
        }
        assert!(writer.await.unwrap().token() > highest);
    });
}

fn semaphore_admits_its_limit(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let three = NonZeroU32::new(3).unwrap();
        let mut guards = Vec::new();
        for _ in 0..3 {
            guards.push(flock.lock("k").limit(three).try_acquire().await.unwrap().expect("there is room"));
        }
        let fourth = tokio::spawn(flock.lock("k").limit(three).wait(SOON).into_future());
        wait_until_waiting(&server, 1);
        guards.pop();
        assert!(fourth.await.unwrap().unwrap().is_valid());
    });
}

fn tokens_rise_and_respect_the_floor(builder: Builder) {
    on(&builder, async |_, flock: Flock| {
        let first = held(&flock, "a").await.token();
        let floor = flock_client::Token::new(first.get() + 1000).unwrap();
        let second = flock.lock("b").floor(floor).await.unwrap();
        assert!(second.token() > floor);
    });
}

fn label_is_shown(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let _guard = flock.lock("k").label("nightly report").await.unwrap();
        let info = server.connect(Protocol::Resp3).cmd(&args!["FLOCK.INFO", "k"]);
        assert_eq!(info.field("holders").as_array()[0].field("label").as_str(), "nightly report");
    });
}

fn run_releases_after_the_work(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let inside = async |token: flock_client::Token| (token, held_and_waiting(&server));
        let (token, held) = flock.lock("k").run(inside).await.unwrap();
        assert_eq!(held, (1, 0));
        assert_eq!(held_and_waiting(&server), (0, 0));
        assert!(held_token(&flock).await > token);
    });
}

async fn held_token(flock: &Flock) -> flock_client::Token {
    held(flock, "k").await.token()
}

fn run_cancels_the_work_when_the_lock_is_lost(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let work = flock.lock("k").run(async |_| {
            revoke(&server, "k");
            std::future::pending::<()>().await;
        });
        let error = work.await.unwrap_err();
        // The first renewal may be quicker than the message.
        assert!(matches!(error, RunError::Lost(LossReason::Revoked | LossReason::Gone)), "{error:?}");
    });
}

fn locks_taken_together_are_released_together(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let guards = flock.lock_all(["c", "a", "b", "a"]).wait(SOON).await.unwrap();
        let keys: Vec<_> = guards.guards().iter().map(flock_client::Guard::key).collect();
        assert_eq!(keys, [b"a", b"b", b"c"]);
        assert!(guards.is_valid() && guards.get("b").is_some() && guards.get("d").is_none());
        assert_eq!(guards.release().await.unwrap(), Released::Released);
        assert_eq!(held_and_waiting(&server), (0, 0));
    });
}

fn locks_that_cannot_all_be_had_leave_none(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let blocker = held(&flock, "c").await;
        let began = Instant::now();
        let error = flock.lock_all(["a", "b", "c"]).wait(ms(100)).await.unwrap_err();
        assert!(matches!(error, AcquireError::TimedOut), "{error:?}");
        assert_in_time(began, began.elapsed(), ms(1000));
        drop(blocker);
        wait_until_nothing_is_left(&server, SOON);
    });
}

fn crossing_sets_of_locks_do_not_deadlock(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let mut tasks = Vec::new();
        for keys in [["a", "b", "c"], ["c", "b", "a"], ["b", "c", "a"]] {
            for _ in 0..10 {
                let lock = flock.lock_all(keys).wait(SOON);
                tasks.push(tokio::spawn(async move { lock.await.unwrap().release().await.unwrap() }));
            }
        }
        for task in tasks {
            assert_eq!(task.await.unwrap(), Released::Released);
        }
        assert_eq!(held_and_waiting(&server), (0, 0));
    });
}

fn refusal_of_the_server_is_told(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        server.connect(Protocol::Resp2).cmd(&["SET", "k", "a string"]);
        let error = flock.lock("k").wait(SOON).await.unwrap_err();
        let AcquireError::Server(error) = error else { panic!("{error:?}") };
        assert_eq!(error.code(), "WRONGTYPE");
        assert!(!error.is_retryable());
    });
}

fn refused_acquisition_leaves_nothing_to_give_back(builder: Builder) {
    // By a replica for being one, by the lock for being a string, or because others hold it: in no case is there anything to release.
    let servers = Replicated::start(&builder, 1);
    within_bounds(async {
        let [flock, follower] = [&servers.primary, &servers.replicas[0]].map(|server| server.addr());
        let (flock, follower) = (connect(flock).await, connect(follower).await);
        let error = follower.lock("k").wait(ms(100)).await.unwrap_err();
        assert!(matches!(&error, AcquireError::Server(error) if error.code() == "READONLY"), "{error:?}");
        let began = Instant::now();
        follower.shutdown(SOON).await.unwrap();
        assert_in_time(began, began.elapsed(), ms(1000));
        let _held = held(&flock, "k").await;
        assert!(flock.lock("k").try_acquire().await.unwrap().is_none());
        servers.primary.connect(Protocol::Resp2).cmd(&["SET", "string", "x"]);
        flock.lock("string").await.unwrap_err();
        flock.ping().await.unwrap();
        assert_eq!(servers.primary.info("commandstats").get("cmdstat_FLOCK.RELEASE"), None);
    });
}

fn user_without_pubsub_polls(builder: Builder) {
    on(&builder, async |server, _| {
        server.connect(Protocol::Resp2).cmd(&["ACL", "SETUSER", "u", "on", ">p", "+@all", "~*", "resetchannels"]);
        let url = format!("valkey://u:p@{}", server.addr());
        let error = Flock::connect(&url).await.unwrap_err();
        assert!(error.to_string().contains("&flock:*") && error.to_string().contains("without_pubsub"), "{error}");
        let ConnectError::Server(error) = error else { panic!("{error:?}") };
        assert_eq!(error.code(), "NOPERM");
        let flock = Flock::builder(&url).without_pubsub().connect().await.unwrap();
        let first = held(&flock, "k").await;
        let waiting = tokio::spawn(held(&flock, "k"));
        wait_until_called(&server, "FLOCK.ACQUIRE", 1 + 2);
        assert_eq!(held_and_waiting(&server), (1, 0));
        give_back(first).await;
        assert!(waiting.await.unwrap().is_valid());
    });
}

fn wrong_password_is_told_at_once(builder: Builder) {
    on(&builder, async |server, _| {
        let began = Instant::now();
        let error = Flock::connect(format!("valkey://nobody:secret@{}", server.addr())).await.unwrap_err();
        assert_in_time(began, began.elapsed(), ms(1000));
        assert!(!error.is_retryable(), "{error:?}");
        assert!(!format!("{error:?}").contains("secret"), "{error:?}");
    });
}

fn missing_password_is_told_with_its_cure(builder: Builder) {
    on(&builder, async |server, _| {
        let mut admin = server.connect(Protocol::Resp2);
        admin.cmd(&["ACL", "SETUSER", "open", "on", "nopass", "+@all", "~*", "&*"]);
        admin.cmd(&["CONFIG", "SET", "requirepass", "secret"]);
        let error = Flock::connect(&url(server.addr())).await.unwrap_err();
        assert!(matches!(&error, ConnectError::Server(error) if error.code() == "NOAUTH"), "{error:?}");
        assert!(error.to_string().contains("Builder::credentials"), "{error}");
        let flock = quick(server.addr()).credentials(Some("open"), "").connect().await.unwrap();
        assert!(held(&flock, "k").await.is_valid());
    });
}

fn server_without_the_module_is_told_at_once(builder: Builder) {
    let server = builder.without_module().start();
    // To a user who may do nothing, too; and that is no answer to somebody who has the wrong password.
    server.connect(Protocol::Resp2).cmd(&["ACL", "SETUSER", "nobody", "on", ">p", "&flock:*", "+subscribe"]);
    within_bounds(async {
        for user in ["", "nobody:p@"] {
            let began = Instant::now();
            let error = Flock::connect(format!("valkey://{user}{}", server.addr())).await.unwrap_err();
            assert_in_time(began, began.elapsed(), ms(1000));
            assert!(matches!(error, ConnectError::NoModule(_)) && !error.is_retryable(), "{error:?}");
        }
        let error = Flock::connect(format!("valkey://nobody:wrong@{}", server.addr())).await.unwrap_err();
        assert!(matches!(error, ConnectError::Server(_)), "{error:?}");
    });
}

fn events_tell_of_a_loss(builder: Builder) {
    on(&builder, async |server, _| {
        let flock = quick(server.addr()).connect().await.unwrap();
        let mut events = flock.events();
        let guard = settled(&flock, "k").await;
        revoke(&server, "k");
        match events.next().await {
            Some(Event::Lost { key, token, reason, .. }) => {
                assert_eq!((&key[..], token, reason), (&b"k"[..], guard.token(), LossReason::Revoked));
            }
            other => panic!("{other:?}"),
        }
    });
}
