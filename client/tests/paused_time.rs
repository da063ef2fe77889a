//! The client against a server in memory, in time that passes at once: what takes an hour or happens in one microsecond is exact here.

use std::future::{Future, IntoFuture};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use flock_client::testing::{Process, Server};
use flock_client::{AcquireError, Event, Guard, HoldError, LossReason, Released, RunError};
use tokio::task::AbortHandle;
use tokio::time::{Instant, advance, sleep, timeout};

/// The runtime's timers tick in milliseconds; a wait ends in the tick after its end.
const TICK: Duration = Duration::from_millis(2);

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

#[track_caller]
fn assert_on_time(elapsed: Duration, expected: Duration) {
    assert!(elapsed >= expected && elapsed < expected + TICK, "{elapsed:?} instead of {expected:?}");
}

#[tokio::test(start_paused = true)]
async fn lease_of_30_s_is_kept_for_an_hour() {
    let server = Server::new();
    let flock = server.client().await;
    let guard = flock.lock("k").lease(secs(30)).await.unwrap();
    for _ in 0..3600 {
        sleep(secs(1)).await;
        assert!(guard.is_valid() && guard.remaining() > secs(18), "{:?}", guard.remaining());
        assert!(server.holders("k").contains(&guard.token()));
    }
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    assert!(server.holders("k").is_empty());
}

#[tokio::test(start_paused = true)]
async fn loss_is_noticed_exactly_at_the_end_of_the_belief() {
    let server = Server::new();
    let flock = server.client().await;
    let guard = flock.lock("k").lease(secs(30)).await.unwrap();
    sleep(secs(100)).await;
    server.stop();
    let (stopped, remaining) = (Instant::now(), guard.remaining());
    assert!(remaining > secs(18) && remaining <= ms(29_700), "{remaining:?}");
    assert_eq!(guard.lost().await, Some(LossReason::Expired));
    assert_on_time(stopped.elapsed(), remaining);
    assert!(!guard.is_valid());
    // The server still keeps it: the margin, 1 % of the lease.
    assert!(server.holders("k").contains(&guard.token()));
    sleep(ms(301)).await;
    assert!(!server.holders("k").contains(&guard.token()));
}

#[tokio::test(start_paused = true)]
async fn stopped_process_sees_the_loss_before_it_acts() {
    let server = Server::new();
    let flock = server.client().await;
    let guard = flock.lock("k").lease(secs(30)).await.unwrap();
    sleep(secs(1)).await;
    advance(secs(60)).await;
    assert!(!guard.is_valid());
    assert!(matches!(guard.renew().await, Err(HoldError::Lost(LossReason::Expired | LossReason::Gone))));
    let mut touched = false;
    let watched = guard.watch(async { touched = true }).await;
    assert!(watched.is_err() && !touched, "work was begun under a lost lock");
}

#[tokio::test(start_paused = true)]
async fn lock_without_keep_alive_ends_with_its_lease() {
    let server = Server::new();
    let flock = server.client().await;
    let begun = Instant::now();
    let guard = flock.lock("k").lease(secs(10)).keep_alive(false).await.unwrap();
    assert_eq!(guard.lost().await, Some(LossReason::Expired));
    assert_on_time(begun.elapsed(), ms(9900));
}

#[tokio::test(start_paused = true)]
async fn clients_are_served_in_the_order_in_which_they_came() {
    let server = Server::new();
    let holder = server.client().await.lock("k").await.unwrap();
    let (order, mut served) = tokio::sync::mpsc::unbounded_channel();
    for number in 0..20 {
        let (flock, order) = (server.client().await, order.clone());
        tokio::spawn(async move {
            let guard = flock.lock("k").await.unwrap();
            order.send((number, guard.token())).unwrap();
            sleep(secs(7)).await;
        });
        while server.waiters("k") <= number {
            sleep(ms(1)).await;
        }
    }
    let mut last = holder.token();
    sleep(secs(300)).await;
    assert_eq!(holder.release().await.unwrap(), Released::Released);
    for number in 0..20 {
        let (who, token) = served.recv().await.unwrap();
        assert!(who == number && token > last, "{who} instead of {number}, or {token} after {last}");
        last = token;
    }
}

#[tokio::test(start_paused = true)]
async fn wait_times_out_exactly() {
    let server = Server::new();
    let flock = server.client().await;
    let _holder = flock.lock("k").await.unwrap();
    let begun = Instant::now();
    // Longer than the server keeps a place without being asked again.
    let error = flock.lock("k").wait(secs(600)).await.unwrap_err();
    assert!(matches!(error, AcquireError::TimedOut), "{error:?}");
    assert_on_time(begun.elapsed(), secs(600));
    sleep(ms(1)).await;
    assert_eq!(server.waiters("k"), 0);
}

#[tokio::test(start_paused = true)]
async fn wait_without_a_server_times_out_exactly() {
    let server = Server::new();
    let flock = server.client().await;
    server.stop();
    sleep(secs(1)).await;
    let begun = Instant::now();
    let error = flock.lock("k").wait(secs(40)).await.unwrap_err();
    assert!(matches!(error, AcquireError::Unavailable(_)), "{error:?}");
    assert_on_time(begun.elapsed(), secs(40));
}

#[tokio::test(start_paused = true)]
async fn dropping_gives_back() {
    let server = Server::new();
    let (alice, bob) = (server.client().await, server.client().await);
    let guard = alice.lock("k").await.unwrap();
    let mut waiting = Box::pin(bob.lock("k").into_future());
    assert!(timeout(secs(1), &mut waiting).await.is_err());
    assert_eq!((server.holders("k").len(), server.waiters("k")), (1, 1));
    drop(waiting);
    sleep(ms(1)).await;
    assert_eq!((server.holders("k").len(), server.waiters("k")), (1, 0));
    drop(guard);
    sleep(ms(1)).await;
    assert_eq!((server.holders("k").len(), server.waiters("k")), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn holds_and_places_outlive_their_connections() {
    let server = Server::new();
    let (alice, bob, carol) = (server.client().await, server.client().await, server.client().await);
    let guard = alice.lock("k").lease(secs(30)).await.unwrap();
    let token = guard.token();
    let mut waits = Vec::new();
    for (flock, position) in [(bob, 1), (carol, 2)] {
        waits.push(tokio::spawn(async move { flock.lock("k").await.unwrap().token() }));
        while server.waiters("k") < position {
            sleep(ms(1)).await;
        }
    }
    let mut events = alice.events();
    for _ in 0..20 {
        server.cut_connections();
        sleep(secs(9)).await;
        assert!(guard.is_valid() && server.holders("k").contains(&token));
        assert_eq!(server.waiters("k"), 2);
    }
    let lost = |event: &Event| matches!(event, Event::Lost { .. });
    while let Ok(event) = timeout(ms(1), events.next()).await {
        assert!(!event.as_ref().is_some_and(lost), "{event:?}");
    }
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    let mut tokens = Vec::new();
    for wait in waits {
        tokens.push(wait.await.unwrap());
    }
    assert!(token < tokens[0] && tokens[0] < tokens[1], "{token} {tokens:?}");
}

#[tokio::test(start_paused = true)]
async fn outage_shorter_than_the_belief_costs_nothing() {
    let server = Server::new();
    let flock = server.client().await;
    let guard = flock.lock("k").lease(secs(30)).await.unwrap();
    sleep(ms(200)).await; // it is no claim any more
    for _ in 0..10 {
        server.stop();
        sleep(secs(17)).await;
        assert!(guard.is_valid());
        server.start();
        sleep(secs(12)).await;
        assert!(guard.is_valid() && server.holders("k").contains(&guard.token()));
    }
}

#[tokio::test(start_paused = true)]
async fn session_ends_when_its_connection_does_not_return() {
    let server = Server::new();
    let flock = server.client().await;
    let guard = flock.lock("k").lease(secs(600)).session(secs(5)).await.unwrap();
    sleep(secs(60)).await;
    assert!(guard.is_valid());
    server.cut_connections(); // and come back
    sleep(secs(60)).await;
    assert!(guard.is_valid());
    server.stop();
    let stopped = Instant::now();
    assert_eq!(guard.lost().await, Some(LossReason::Disconnected));
    assert!(stopped.elapsed() < secs(5), "{:?}", stopped.elapsed());
    sleep(secs(5)).await;
    assert!(server.holders("k").is_empty());
}

/// Behind one address a server takes the place of another. The connection for messages goes there first: what the old server says at its
/// end, that it serves nobody any more, is not heard.
#[tokio::test(start_paused = true)]
async fn waiter_whose_server_was_replaced_asks_the_new_one() {
    let (old, new) = (Server::new(), Server::new());
    let behind_the_address = Arc::new(Mutex::new(old.clone()));
    let dialled = Arc::new(Mutex::new(Vec::new()));
    let process = {
        let (behind_the_address, dialled) = (Arc::clone(&behind_the_address), Arc::clone(&dialled));
        Process::new(1, move || {
            let (theirs, mut client_end) = tokio::io::duplex(4096);
            let (mut server_end, ours) = tokio::io::duplex(4096);
            let port = 40_000 + u16::try_from(dialled.lock().unwrap().len()).unwrap();
            behind_the_address.lock().unwrap().accept(ours, ([127, 0, 0, 1], port).into())?;
            let carrying =
                tokio::spawn(async move { tokio::io::copy_bidirectional(&mut client_end, &mut server_end).await });
            dialled.lock().unwrap().push(carrying.abort_handle());
            Ok(theirs)
        })
    };
    let flock = process.builder().connect().await.unwrap();
    let _holder = old.client().await.lock("k").await.unwrap();
    let waiter = tokio::spawn(flock.lock("k").into_future());
    while old.waiters("k") == 0 {
        sleep(ms(1)).await;
    }
    *behind_the_address.lock().unwrap() = new.clone();
    let messages: AbortHandle = dialled.lock().unwrap()[1].clone();
    messages.abort();
    sleep(secs(2)).await;
    assert_eq!(new.connections(), 1);
    old.demote();
    old.stop();
    let begun = Instant::now();
    let guard = waiter.await.unwrap().unwrap();
    assert!(new.holders("k").contains(&guard.token()) && begun.elapsed() < secs(2), "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn revoked_holder_is_told_at_once() {
    let server = Server::new();
    let flock = server.client().await;
    let guard = flock.lock("k").await.unwrap();
    sleep(secs(1)).await;
    let begun = Instant::now();
    assert_eq!(server.revoke("k"), 1);
    assert_eq!(guard.lost().await, Some(LossReason::Revoked));
    assert!(begun.elapsed() < TICK);
    assert_eq!(server.revoke("k"), 0);
}

#[tokio::test(start_paused = true)]
async fn shared_holders_upgrade_and_downgrade() {
    let server = Server::new();
    let flock = server.client().await;
    let mut first = flock.lock("k").shared().await.unwrap();
    let second = flock.lock("k").shared().await.unwrap();
    assert_eq!(server.holders("k").len(), 2);
    assert!(matches!(first.upgrade().await, Err(HoldError::Refused)));
    assert_eq!(second.release().await.unwrap(), Released::Released);
    let before = first.token();
    first.upgrade().await.unwrap();
    assert!(first.token() > before);
    assert!(flock.lock("k").shared().try_acquire().await.unwrap().is_none());
    first.downgrade().await.unwrap();
    assert!(flock.lock("k").shared().try_acquire().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn holders_and_waiters_are_shown() {
    let server = Server::new();
    let (alice, bob) = (server.client().await, server.client().await);
    let guard = alice.lock("k").lease(secs(30)).label("backup").await.unwrap();
    let waiting = tokio::spawn(bob.lock("k").into_future());
    sleep(secs(7)).await;
    let info = bob.info("k", 10).await.unwrap().unwrap();
    assert_eq!((info.holders[0].token, &info.holders[0].label[..]), (guard.token(), &b"backup"[..]));
    assert_eq!(info.holders[0].held_for, secs(7));
    assert_eq!(info.waiters[0].waiting_for, secs(7));
    assert!(bob.info("free", 10).await.unwrap().is_none());
    let mut guards = Vec::new();
    for number in 0..250 {
        guards.push(alice.lock(format!("many:{number}")).await.unwrap());
    }
    let listed = bob.list("many:*").page_size(100).all().await.unwrap();
    let mut keys: Vec<_> = listed.into_iter().map(|lock| lock.key).collect();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), 250);
    assert_eq!(bob.revoke("k").await.unwrap(), 1);
    assert!(waiting.await.unwrap().unwrap().token() > guard.token());
}

#[tokio::test(start_paused = true)]
async fn client_without_pubsub_polls() {
    let server = Server::new();
    let flock = server.builder().without_pubsub().connect().await.unwrap();
    let guard = flock.lock("k").await.unwrap();
    let waiting = tokio::spawn(flock.lock("k").wait(secs(60)).into_future());
    sleep(secs(10)).await;
    assert_eq!(server.waiters("k"), 0);
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    assert!(waiting.await.unwrap().is_ok());
}

#[tokio::test(start_paused = true)]
async fn refusal_that_may_pass_is_an_event_and_ends_no_wait() {
    let server = Server::replica();
    let flock = server.client().await;
    let mut events = flock.events();
    let waiting = tokio::spawn(flock.lock("leader").acquire());
    let refused = async {
        loop {
            if let Event::AcquireRefused { key, code, .. } = events.next().await.unwrap() {
                return (key, code);
            }
        }
    };
    assert_eq!(timeout(secs(1), refused).await.unwrap(), (b"leader".to_vec(), "READONLY".to_owned()));
    sleep(secs(60)).await;
    assert!(!waiting.is_finished());
    let _ = server.promote(1_800_000_000_000_000); // 2027
    assert!(waiting.await.unwrap().unwrap().is_valid());
}

#[tokio::test(start_paused = true)]
async fn shutdown_gives_everything_back() {
    let server = Server::new();
    let flock = server.client().await;
    let guard = flock.lock("k").await.unwrap();
    flock.shutdown(secs(1)).await.unwrap();
    assert_eq!(server.connections(), 0, "though there are handles still");
    assert!(server.holders("k").is_empty());
    assert_eq!(guard.lost().await, Some(LossReason::ShutDown));
    assert!(matches!(flock.lock("k").await, Err(AcquireError::ShutDown)));
}

#[tokio::test(start_paused = true)]
async fn shutdown_goes_on_though_its_future_is_dropped() {
    let server = Server::new();
    let flock = server.client().await;
    let guard = flock.lock("k").await.unwrap();
    assert!(timeout(Duration::ZERO, flock.shutdown(secs(1))).await.is_err());
    assert_eq!(guard.lost().await, Some(LossReason::ShutDown));
    sleep(secs(2)).await;
    assert!(server.holders("k").is_empty());
    server.cut_connections();
    sleep(secs(2)).await;
    assert_eq!(server.connections(), 0); // nobody keeps them up
}

/// Polls once, and loses the answer with the connection.
async fn begin_and_cut(server: &Server, work: &mut (impl Future + Unpin)) {
    assert!(timeout(Duration::ZERO, work).await.is_err());
    server.cut_connections();
}

#[tokio::test(start_paused = true)]
async fn release_that_nobody_polls_is_carried_out() {
    let server = Server::new();
    let flock = server.client().await;
    let guard = flock.lock("k").lease(secs(600)).await.unwrap();
    let mut release = Box::pin(guard.release());
    begin_and_cut(&server, &mut release).await;
    assert_eq!(server.holders("k").len(), 1, "the request was lost");
    sleep(ms(1100)).await; // two response timeouts, and a new connection
    assert!(server.holders("k").is_empty());
    assert_eq!(release.await.unwrap(), Released::Released);
}

#[tokio::test(start_paused = true)]
async fn release_that_nobody_polls_does_not_hold_up_a_shutdown() {
    let server = Server::new();
    let flock = server.client().await;
    let mut release = Box::pin(flock.lock("k").lease(secs(600)).await.unwrap().release());
    assert!(timeout(Duration::ZERO, &mut release).await.is_err());
    let begun = Instant::now();
    flock.shutdown(secs(5)).await.unwrap();
    assert_on_time(begun.elapsed(), Duration::ZERO);
    assert_eq!(release.await.unwrap(), Released::Released);
}

#[tokio::test(start_paused = true)]
async fn conversion_that_nobody_polls_holds_up_no_other() {
    let server = Server::new();
    let flock = server.client().await;
    let mut guard = flock.lock("k").shared().await.unwrap();
    let before = guard.token();
    let mut upgrade = Box::pin(guard.upgrade());
    begin_and_cut(&server, &mut upgrade).await;
    std::mem::forget(upgrade);
    timeout(secs(2), guard.downgrade()).await.unwrap().unwrap();
    assert!(guard.token() > before, "the upgrade was carried out first");
    assert!(flock.lock("k").shared().try_acquire().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn conversion_that_was_given_up_ends_with_its_hold() {
    // The upgrade and the release are both tried again until the server can be reached. If the upgrade came first, the release would name a
    // token that is no more.
    let server = Server::new();
    for number in 0..50 {
        let flock = server.client().await;
        let mut guard = flock.lock("k").shared().lease(secs(600)).await.unwrap();
        server.stop();
        assert!(timeout(ms(200), guard.upgrade()).await.is_err());
        let release = tokio::spawn(guard.release());
        sleep(ms(2000 + 30 * number)).await;
        server.start();
        let released = release.await.unwrap();
        assert_eq!((released.unwrap(), server.holders("k")), (Released::Released, vec![]), "{number}");
        flock.shutdown(secs(5)).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn loss_is_not_waited_for_after_a_release() {
    let server = Server::new();
    let flock = server.client().await;
    let ends: [fn(Guard); 2] = [drop, |guard| {
        let _token = guard.leak();
    }];
    for end in ends {
        let guard = flock.lock("k").lease(secs(1)).await.unwrap();
        let lost = guard.lost();
        end(guard);
        assert_eq!(timeout(ms(1), lost).await, Ok(None));
        sleep(secs(2)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn work_that_ended_after_its_lock_is_not_done() {
    let server = Server::new();
    let flock = server.builder().without_pubsub().connect().await.unwrap(); // it is not told
    let outcome = flock.lock("k").run(|_| async { server.revoke("k") }).await;
    assert!(matches!(outcome, Err(RunError::Lost(LossReason::Gone))), "{outcome:?}");
}

#[tokio::test(start_paused = true)]
async fn set_of_locks_waits_for_a_dead_server_once() {
    let server = Server::new();
    let flock = server.client().await;
    let guards = flock.lock_all(["a", "b", "c", "d"]).await.unwrap();
    server.stop();
    let begun = Instant::now();
    assert!(matches!(guards.release().await, Err(HoldError::Unknown(_))));
    assert!(begun.elapsed() < secs(7), "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn connection_that_does_not_last_is_not_made_again_at_once() {
    let server = Server::new();
    let flock = server.client().await;
    let mut events = flock.events();
    let connected = tokio::spawn(async move {
        let mut connected = 0;
        while let Some(event) = events.next().await {
            connected += u32::from(matches!(event, Event::Connected { .. }));
        }
        connected
    });
    for _ in 0..10_000 {
        server.cut_connections();
        sleep(ms(1)).await;
    }
    drop(flock);
    let connected = connected.await.unwrap();
    assert!(connected > 4 && connected < 200, "{connected} connections in 10 s"); // two links, every half second
}

#[tokio::test(start_paused = true)]
async fn client_that_is_dropped_closes_its_connections() {
    let server = Server::new();
    let flock = server.client().await;
    assert_eq!(server.connections(), 2);
    drop(flock);
    sleep(ms(1)).await;
    assert_eq!(server.connections(), 0);
}

#[tokio::test(start_paused = true)]
async fn server_that_is_stopped_cannot_be_connected_to() {
    let server = Server::new();
    server.stop();
    let begun = Instant::now();
    let error = server.builder().connect().await.unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
    assert_on_time(begun.elapsed(), secs(5));
    server.start();
    assert!(server.builder().connect().await.is_ok());
}

#[tokio::test]
async fn time_need_not_be_paused() {
    let server = Server::new();
    let flock = server.client().await;
    let begun = Instant::now();
    let guard = flock.lock("k").lease(ms(100)).keep_alive(false).await.unwrap();
    guard.lost().await;
    assert!(begun.elapsed() >= ms(50));
    assert!(flock.lock("k").wait(secs(5)).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn owner_named_for_another_lock_keeps_the_two_apart() {
    let server = Server::new();
    let flock = server.client().await;
    let first = flock.lock("k1").await.unwrap();
    let second = flock.lock("k2").reentrant(first.owner()).await.unwrap();
    assert_eq!(server.revoke("k2"), 1);
    assert_eq!(second.lost().await, Some(LossReason::Revoked));
    assert!(first.is_valid(), "the other lock of this owner is still held");
    assert_eq!(server.revoke("k1"), 1);
    assert_eq!(first.lost().await, Some(LossReason::Revoked));
}
