//! A hold over time: it is kept, converted, and lost in every way there is; and the holder hears of it.

use std::future::IntoFuture;
use std::time::{Duration, Instant};

use flock_client::{Flock, HoldError, LossReason, Mode, Released};
use flock_tests::args;
use flock_tests::on_own_servers;
use flock_tests::proxy::{Cut, Direction, Fault, Proxy};
use flock_tests::resp::Protocol;
use flock_tests::server::Builder;
use flock_tests::wait::wait_until;
use tokio::time::{sleep, timeout};

use crate::scene::{
    SOON, assert_in_time, assert_kept, connect, connections, give_back, held, held_and_waiting, is_current, kill, ms,
    on, quick, revoke, settled, stalled_since, wait_until_called, watch_the_machine,
};

on_own_servers![
    hold_is_kept_over_many_leases,
    many_holds_are_kept_by_few_commands,
    hold_without_keep_alive_expires,
    renewal_by_hand_keeps_a_hold,
    belief_ends_before_the_servers_lease,
    revoked_hold_is_told_at_once,
    removed_hold_is_told_at_once,
    flushed_hold_is_told_at_once,
    unreachable_server_is_a_loss_at_the_local_deadline,
    renewal_finds_a_loss_that_was_not_heard,
    loss_that_went_with_the_message_link_is_told_with_the_next,
    loss_is_told_over_the_next_command_link_where_no_messages_are_heard,
    new_link_costs_one_renewal_of_each_hold,
    longest_hold_ends_though_it_is_kept_alive,
    session_ends_soon_after_its_connection,
    session_moves_to_the_next_connection,
    session_waits_over_the_next_connection,
    session_shorter_than_the_signs_of_life_is_refused,
    downgrade_lets_readers_in,
    downgrade_after_an_unanswered_upgrade_finds_its_token,
    upgrade_gets_a_higher_token,
    upgrade_beside_another_reader_is_refused,
    converted_hold_is_kept,
    lost_hold_is_released_as_lost,
    leaked_hold_stays_until_its_lease_is_over,
    leaked_claim_becomes_a_lease,
    blocked_runtime_keeps_its_lock,
];

fn hold_is_kept_over_many_leases(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let guard = flock.lock("k").lease(ms(1000)).await.unwrap();
        let began = Instant::now();
        while began.elapsed() < ms(3500) {
            assert_kept(&server, &guard, began, ms(1000));
            sleep(ms(20)).await;
        }
    });
}

fn many_holds_are_kept_by_few_commands(builder: Builder) {
    // 300 holds over three leases: none is lost.
    on(&builder, async |server, flock: Flock| {
        let (mut guards, began) = (Vec::new(), Instant::now());
        for number in 0..300 {
            guards.push(flock.lock(format!("k{number}")).lease(ms(1500)).await.unwrap());
        }
        sleep(ms(4800)).await;
        for guard in &guards {
            assert_kept(&server, guard, began, ms(1500));
        }
    });
}

fn hold_without_keep_alive_expires(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let guard = flock.lock("k").lease(ms(200)).keep_alive(false).await.unwrap();
        assert_eq!(timeout(SOON, guard.lost()).await.unwrap(), Some(LossReason::Expired));
        assert!(!guard.is_valid());
        assert_eq!(guard.remaining(), Duration::ZERO);
        wait_until("the server ends it too", SOON, || held_and_waiting(&server).0 == 0);
    });
}

fn renewal_by_hand_keeps_a_hold(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let guard = flock.lock("k").lease(ms(1000)).keep_alive(false).await.unwrap();
        let began = Instant::now();
        for _ in 0..6 {
            sleep(ms(300)).await;
            assert_kept(&server, &guard, began, ms(1000));
            let _ = guard.renew().await;
        }
    });
}

fn belief_ends_before_the_servers_lease(builder: Builder) {
    // S5, watched from both sides: whenever the guard says yes before and after, the server said yes between.
    on(&builder, async |server, flock: Flock| {
        for lease in [40, 100, 250] {
            let guard = flock.lock("k").lease(ms(lease)).keep_alive(false).wait(SOON).await.unwrap();
            let mut conn = server.connect(Protocol::Resp2);
            let mut looks = 0;
            loop {
                let before = guard.is_valid();
                let held = conn.cmd(&args!["FLOCK.CHECK", "k", guard.token().get()]).as_int() == 1;
                assert!(held || !guard.is_valid(), "believed beyond a lease of {lease} ms");
                if !before && !held {
                    break;
                }
                looks += 1;
            }
            assert!(looks > 0);
        }
    });
}

fn revoked_hold_is_told_at_once(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let guard = settled(&flock, "k").await;
        let began = Instant::now();
        revoke(&server, "k");
        assert_eq!(timeout(SOON, guard.lost()).await.unwrap(), Some(LossReason::Revoked));
        assert_in_time(began, began.elapsed(), ms(1000));
        assert!(!guard.is_valid());
        assert!(matches!(guard.renew().await, Err(HoldError::Lost(LossReason::Revoked))));
    });
}

fn removed_hold_is_told_at_once(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let guard = settled(&flock, "k").await;
        server.connect(Protocol::Resp2).cmd(&["DEL", "k"]);
        assert_eq!(timeout(SOON, guard.lost()).await.unwrap(), Some(LossReason::Removed));
    });
}

fn flushed_hold_is_told_at_once(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let guard = settled(&flock, "k").await;
        server.connect(Protocol::Resp2).cmd(&["FLUSHALL"]);
        assert_eq!(timeout(SOON, guard.lost()).await.unwrap(), Some(LossReason::Flushed));
    });
}

fn unreachable_server_is_a_loss_at_the_local_deadline(builder: Builder) {
    on(&builder, async |server, _| {
        let proxy = Proxy::to(server.addr());
        let flock = connect(proxy.addr()).await;
        let guard = flock.lock("k").lease(ms(400)).await.unwrap();
        proxy.refuse();
        proxy.cut(Cut::Reset);
        let began = Instant::now();
        assert_eq!(timeout(SOON, guard.lost()).await.unwrap(), Some(LossReason::Expired));
        assert_in_time(began, began.elapsed(), ms(700));
    });
}

fn renewal_finds_a_loss_that_was_not_heard(builder: Builder) {
    // The message of the loss goes nowhere: the channel is somebody else's.
    on(&builder, async |server, flock: Flock| {
        let guard = flock.lock("k").lease(ms(900)).wait_mode(flock_client::WaitMode::Poll).await.unwrap();
        revoke(&server, "k");
        assert_eq!(timeout(SOON, guard.lost()).await.unwrap(), Some(LossReason::Gone));
    });
}

fn loss_that_went_with_the_message_link_is_told_with_the_next(builder: Builder) {
    // The connection ends in the same step as the hold: nobody hears the message. The next renewal is due in ten seconds; what is not
    // renewed at all is asked after as well.
    on(&builder, async |server, flock: Flock| {
        for end in [["FLOCK.REVOKE", "k"].as_slice(), &["DEL", "k"], &["FLUSHALL"]] {
            for keep_alive in [true, false] {
                let guard = flock.lock("k").keep_alive(keep_alive).wait(SOON).await.unwrap();
                guard.renew().await.unwrap();
                let kept = settled(&flock, "kept").await;
                sleep(ms(150)).await; // in charge of the keep-alive
                let listening = connections(&server, true).len();
                let mut admin = server.connect(Protocol::Resp2);
                for command in [["MULTI"].as_slice(), &["CLIENT", "KILL", "TYPE", "pubsub"], end, &["EXEC"]] {
                    admin.cmd(command);
                }
                let began = Instant::now();
                assert_eq!(timeout(SOON, guard.lost()).await.expect("it is told"), Some(LossReason::Gone));
                assert_in_time(began, began.elapsed(), ms(1000));
                if end != ["FLUSHALL"] {
                    assert_kept(&server, &kept, began, ms(30_000));
                }
                wait_until("it listens again", SOON, || connections(&server, true).len() == listening);
            }
        }
    });
}

fn loss_is_told_over_the_next_command_link_where_no_messages_are_heard(builder: Builder) {
    on(&builder, async |server, _| {
        let flock = quick(server.addr()).without_pubsub().connect().await.unwrap();
        let guard = settled(&flock, "k").await;
        sleep(ms(150)).await; // in charge of the keep-alive
        revoke(&server, "k");
        kill(&server, &connections(&server, false));
        let began = Instant::now();
        assert_eq!(timeout(SOON, guard.lost()).await.expect("it is told"), Some(LossReason::Gone));
        assert_in_time(began, began.elapsed(), ms(1000));
    });
}

fn new_link_costs_one_renewal_of_each_hold(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let (mut guards, began) = (Vec::new(), Instant::now());
        for number in 0..300 {
            guards.push(flock.lock(format!("k{number}")).lease(ms(60_000)).await.unwrap());
        }
        wait_until_called(&server, "FLOCK.RENEW", 300); // the claims are confirmed
        sleep(ms(200)).await;
        // The messages' link alone, and then both, as in a restart.
        for (only_messages, renewals) in [(true, 600), (false, 900)] {
            let killed: Vec<_> = [true, false].into_iter().filter(|messages| *messages || !only_messages).collect();
            for messages in killed {
                kill(&server, &connections(&server, messages));
            }
            wait_until_called(&server, "FLOCK.RENEW", renewals);
            sleep(ms(500)).await;
            let stats = server.info("commandstats");
            let called = stats.get("cmdstat_FLOCK.RENEW").expect("some were sent");
            assert!(called.starts_with(&format!("calls={renewals},")), "{called}");
        }
        for guard in &guards {
            assert_kept(&server, guard, began, ms(5000));
        }
    });
}

fn downgrade_after_an_unanswered_upgrade_finds_its_token(builder: Builder) {
    // The upgrade is carried out, its answers are lost, its future is dropped: the server has a token that nobody here knows.
    on(&builder, async |server, _| {
        let proxy = Proxy::to(server.addr());
        let flock = quick(proxy.addr()).response_timeout(ms(100)).connect().await.unwrap();
        let mut guard = flock.lock("k").shared().await.unwrap();
        guard.renew().await.unwrap();
        let before = guard.token();
        proxy.set_existing(Direction::ToClient, Fault::Drop);
        assert!(timeout(ms(50), guard.upgrade()).await.is_err());
        guard.downgrade().await.unwrap();
        assert!(guard.token() > before);
        assert!(guard.is_valid() && is_current(&server, &guard));
    });
}

fn longest_hold_ends_though_it_is_kept_alive(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let began = Instant::now();
        let guard = flock.lock("k").lease(ms(600)).max_hold(ms(1500)).await.unwrap();
        let reason = timeout(SOON, guard.lost()).await.unwrap();
        let in_full = reason == Some(LossReason::MaxHold) && began.elapsed() > ms(1200);
        assert!(in_full || stalled_since(began) > ms(60), "{reason:?} after {:?}", began.elapsed());
        assert_in_time(began, began.elapsed(), ms(2000));
        wait_until("the server ends it too", SOON, || held_and_waiting(&server).0 == 0);
    });
}

const GRACE: Duration = Duration::from_millis(1500);

/// A client whose shortest session grace is 600 ms.
async fn lively(address: std::net::SocketAddr) -> Flock {
    quick(address).heartbeat(ms(200)).response_timeout(ms(200)).connect().await.expect("the server is there")
}

fn session_ends_soon_after_its_connection(builder: Builder) {
    // As if the client had died: the lease of ten minutes is cut to the grace. And the belief ends before the server's count.
    on(&builder, async |server, _| {
        let proxy = Proxy::to(server.addr());
        let flock = lively(proxy.addr()).await;
        let guard = flock.lock("k").lease(Duration::from_secs(600)).session(GRACE).await.unwrap();
        let acquired = Instant::now();
        sleep(GRACE * 3 / 2).await;
        assert_kept(&server, &guard, acquired, GRACE);
        proxy.refuse();
        proxy.cut(Cut::Reset);
        let began = Instant::now();
        let mut conn = server.connect(Protocol::Resp2);
        loop {
            let held = conn.cmd(&args!["FLOCK.CHECK", "k", guard.token().get()]).as_int() == 1;
            assert!(held || !guard.is_valid(), "believed beyond the grace");
            if !held {
                break;
            }
        }
        assert_in_time(began, began.elapsed(), GRACE + ms(1000));
        assert_eq!(timeout(SOON, guard.lost()).await.unwrap(), Some(LossReason::Disconnected));
    });
}

fn session_moves_to_the_next_connection(builder: Builder) {
    on(&builder, async |server, _| {
        let flock = lively(server.addr()).await;
        let guard = flock.lock("k").lease(Duration::from_secs(600)).session(GRACE).await.unwrap();
        let began = Instant::now();
        for _ in 0..5 {
            kill(&server, &connections(&server, false));
            sleep(GRACE / 4).await;
            assert_kept(&server, &guard, began, GRACE);
        }
        sleep(GRACE * 3 / 2).await;
        assert_kept(&server, &guard, began, GRACE);
    });
}

fn session_waits_over_the_next_connection(builder: Builder) {
    // The queued request has died with its connection: who waits must ask again.
    on(&builder, async |server, _| {
        let flock = lively(server.addr()).await;
        let first = held(&flock, "k").await;
        let waiting = tokio::spawn(flock.lock("k").session(GRACE).wait(SOON).into_future());
        wait_until("it waits", SOON, || held_and_waiting(&server).1 == 1);
        kill(&server, &connections(&server, false));
        wait_until_called(&server, "FLOCK.ACQUIRE", 1 + 2);
        assert_eq!(held_and_waiting(&server).1, 1);
        give_back(first).await;
        assert!(waiting.await.unwrap().unwrap().is_valid());
    });
}

fn session_shorter_than_the_signs_of_life_is_refused(builder: Builder) {
    on(&builder, async |_, flock: Flock| {
        let error = flock.lock("k").session(ms(2499)).await.unwrap_err();
        assert!(matches!(error, flock_client::AcquireError::Config(_)), "{error:?}");
        assert!(flock.lock("k").session(ms(2500)).await.is_ok());
    });
}

fn downgrade_lets_readers_in(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let mut guard = held(&flock, "k").await;
        let token = guard.token();
        assert!(flock.lock("k").shared().try_acquire().await.unwrap().is_none());
        assert_eq!(guard.mode(), Mode::Exclusive);
        guard.downgrade().await.unwrap();
        assert_eq!((guard.token(), guard.mode()), (token, Mode::Shared));
        assert!(flock.lock("k").shared().try_acquire().await.unwrap().is_some());
        assert!(guard.is_valid() && is_current(&server, &guard));
    });
}

fn upgrade_gets_a_higher_token(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let mut guard = flock.lock("k").shared().await.unwrap();
        let before = guard.token();
        guard.upgrade().await.unwrap();
        assert!(guard.token() > before && is_current(&server, &guard));
        assert_eq!(guard.mode(), Mode::Exclusive);
        assert!(flock.lock("k").shared().try_acquire().await.unwrap().is_none());
        guard.upgrade().await.unwrap(); // again: nothing changes
        assert_eq!(guard.release().await.unwrap(), Released::Released);
    });
}

fn upgrade_beside_another_reader_is_refused(builder: Builder) {
    on(&builder, async |_, flock: Flock| {
        let mut guard = flock.lock("k").shared().await.unwrap();
        let other = flock.lock("k").shared().await.unwrap();
        assert!(matches!(guard.upgrade().await, Err(HoldError::Refused)));
        assert_eq!(guard.mode(), Mode::Shared);
        assert!(guard.is_valid());
        give_back(other).await;
        guard.upgrade().await.unwrap();
    });
}

fn converted_hold_is_kept(builder: Builder) {
    // The keep-alive must not take the change of the token for a loss.
    on(&builder, async |server, flock: Flock| {
        let mut guard = flock.lock("k").lease(ms(600)).shared().await.unwrap();
        let began = Instant::now();
        for _ in 0..120 {
            if guard.upgrade().await.and(guard.downgrade().await).is_err() {
                break;
            }
            sleep(ms(10)).await;
        }
        assert_kept(&server, &guard, began, ms(600));
    });
}

fn lost_hold_is_released_as_lost(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let guard = held(&flock, "k").await;
        revoke(&server, "k");
        guard.lost().await;
        assert_eq!(guard.release().await.unwrap(), Released::AlreadyLost);
    });
}

fn leaked_claim_becomes_a_lease(builder: Builder) {
    // Let go of before it was confirmed, and kept for its lease all the same.
    on(&builder, async |server, _| {
        let flock = quick(server.addr()).claim(ms(300)).connect().await.unwrap();
        flock.lock("k").lease(Duration::from_secs(60)).await.unwrap().leak();
        sleep(ms(600)).await;
        assert_eq!(held_and_waiting(&server).0, 1);
    });
}

fn leaked_hold_stays_until_its_lease_is_over(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        let guard = flock.lock("k").lease(ms(300)).await.unwrap();
        let began = Instant::now();
        guard.leak();
        assert_eq!(held_and_waiting(&server), (1, 0));
        wait_until("its lease is over", SOON, || held_and_waiting(&server).0 == 0);
        assert!(began.elapsed() > ms(150), "{:?}", began.elapsed());
    });
}

fn blocked_runtime_keeps_its_lock(builder: Builder) {
    // The whole of the caller's runtime is blocked for four leases.
    watch_the_machine();
    let server = builder.start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let flock = quick(server.addr()).connect().await.unwrap();
        let guard = flock.lock("k").lease(ms(500)).await.unwrap();
        let began = Instant::now();
        flock_tests::wait::let_pass(ms(2000));
        assert_kept(&server, &guard, began, ms(500));
    });
}
