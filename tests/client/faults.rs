//! Connections that break, fall silent and deliver late; servers that restart. Nobody hangs, nothing is believed that is not so.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use flock_client::{Flock, LossReason};
use flock_tests::on_own_servers;
use flock_tests::proxy::{Cut, Direction, Fault, Proxy};
use flock_tests::resp::Protocol;
use flock_tests::server::Builder;
use flock_tests::wait::wait_until;
use tokio::time::{sleep, timeout};

use crate::scene::{
    SOON, assert_in_time, assert_kept, connect, connections, give_back, held, held_and_waiting, is_current, kill, ms,
    on, quick, settled, stalled_since, url, wait_until_nothing_is_left, wait_until_waiting, within_bounds,
};

on_own_servers![
    killed_connections_hold_up_nobody,
    silent_message_link_is_replaced,
    silent_command_link_is_replaced,
    lost_replies_lock_nothing_twice,
    restarted_server_is_found_again,
    loss_by_a_restart_is_told_when_the_server_is_back,
    hold_survives_a_short_cut,
    late_request_of_a_dead_connection_costs_nothing,
    late_request_costs_its_claim_where_connections_may_not_be_killed,
    killed_predecessor_is_nobody_else,
    grant_that_is_heard_late_is_renewed_first,
];

fn killed_connections_hold_up_nobody(builder: Builder) {
    // CLIENT.md section 5: 50 tasks on 4 keys; every 120 ms some connection of the client is killed.
    // No wait takes longer than a second, nobody times out, and no two hold at once.
    on(&builder, async |server, flock: Flock| {
        let stop = Arc::new(AtomicBool::new(false));
        let inside: Arc<[AtomicBool; 4]> = Arc::default();
        let mut tasks = Vec::new();
        for number in 0..50_usize {
            let (flock, stop, inside) = (flock.clone(), Arc::clone(&stop), Arc::clone(&inside));
            tasks.push(tokio::spawn(async move {
                let (mut acquired, mut longest) = (0_u32, Duration::ZERO);
                let key = format!("k{}", number % 4);
                while !stop.load(Ordering::Relaxed) {
                    let began = Instant::now();
                    let guard = flock.lock(&key).lease(SOON).wait(Duration::from_secs(20)).await.unwrap();
                    longest = longest.max(began.elapsed());
                    assert!(!inside[number % 4].swap(true, Ordering::SeqCst), "two hold {key}");
                    sleep(ms(1)).await;
                    let valid = guard.is_valid() || stalled_since(began) > ms(500);
                    inside[number % 4].store(false, Ordering::SeqCst);
                    assert!(valid);
                    give_back(guard).await;
                    acquired += 1;
                }
                (acquired, longest)
            }));
        }
        let (mut kills, chaos) = (0, Instant::now());
        for round in 0..25 {
            sleep(ms(120)).await;
            // The messages, the commands, both.
            let mut victims = Vec::new();
            if round % 3 != 1 {
                victims.extend(connections(&server, true));
            }
            if round % 3 != 0 {
                victims.extend(connections(&server, false));
            }
            kill(&server, &victims);
            kills += victims.len();
        }
        stop.store(true, Ordering::Relaxed);
        let (mut acquired, mut longest) = (0, Duration::ZERO);
        for task in tasks {
            let (count, wait) = task.await.unwrap();
            acquired += count;
            longest = longest.max(wait);
        }
        println!("{kills} kills, {acquired} acquired, longest wait {longest:?}");
        assert!(kills >= 20 && acquired > 100, "{kills} {acquired}");
        assert_in_time(chaos, longest, ms(1000));
        wait_until_nothing_is_left(&server, SOON);
    });
}

fn silent_message_link_is_replaced(builder: Builder) {
    // The link on which the grant is published says nothing more. The heartbeat finds that; who waits asks again.
    silent_link_is_replaced(&builder, [Direction::ToClient].as_slice());
}

fn silent_command_link_is_replaced(builder: Builder) {
    // Neither direction passes anything, on either link.
    silent_link_is_replaced(&builder, [Direction::ToClient, Direction::ToServer].as_slice());
}

#[track_caller]
fn silent_link_is_replaced(builder: &Builder, directions: &[Direction]) {
    on(builder, async |server, admin: Flock| {
        let proxy = Proxy::to(server.addr());
        let flock = quick(proxy.addr()).heartbeat(ms(200)).response_timeout(ms(200)).connect().await.unwrap();
        let first = held(&admin, "k").await;
        let waiting = tokio::spawn(held(&flock, "k"));
        wait_until_waiting(&server, 1);
        for direction in directions {
            proxy.set_existing(*direction, Fault::Drop);
        }
        let began = Instant::now();
        give_back(first).await;
        let guard = waiting.await.unwrap();
        println!("waited {:?} over silent links", began.elapsed());
        assert_in_time(began, began.elapsed(), ms(2500));
        assert!(guard.is_valid() && is_current(&server, &guard));
    });
}

fn lost_replies_lock_nothing_twice(builder: Builder) {
    // The request arrives, its reply does not. The retry is the same request: it gets the same hold, and believes in it only
    // from a renewal on.
    on(&builder, async |server, _| {
        let proxy = Proxy::to(server.addr());
        let flock = quick(proxy.addr()).response_timeout(ms(100)).connect().await.unwrap();
        proxy.set_existing(Direction::ToClient, Fault::Drop);
        let guard = held(&flock, "k").await;
        assert_eq!(held_and_waiting(&server), (1, 0));
        assert!(guard.is_valid() && is_current(&server, &guard));
        assert_eq!(server.info("flock").number("flock_grants"), 1);
    });
}

fn restarted_server_is_found_again(builder: Builder) {
    // Nothing is saved: holds are gone, and who holds hears so. Who waits joins the new queue.
    within_bounds(async {
        let mut server = builder.start();
        let flock = connect(server.addr()).await;
        let guard = flock.lock("k").lease(ms(600)).await.unwrap();
        let waiting = tokio::spawn(held(&flock, "k"));
        wait_until_waiting(&server, 1);
        server.restart();
        let next = waiting.await.unwrap();
        let reason = timeout(SOON, guard.lost()).await.unwrap();
        assert!(matches!(reason, Some(LossReason::Gone | LossReason::Expired)), "{reason:?}");
        assert!(next.token() > guard.token());
    });
}

fn loss_by_a_restart_is_told_when_the_server_is_back(builder: Builder) {
    // Nothing is saved, and others get the locks at once. The next renewal is due in ten seconds.
    within_bounds(async {
        let mut server = builder.start();
        let flock = connect(server.addr()).await;
        let mut guards = vec![settled(&flock, "k").await];
        for keep_alive in [true, false] {
            guards.push(flock.lock(format!("{keep_alive}")).keep_alive(keep_alive).await.unwrap());
        }
        sleep(ms(150)).await; // in charge of the keep-alive
        server.restart();
        let began = Instant::now();
        for guard in guards {
            assert_eq!(timeout(SOON, guard.lost()).await.expect("it is told"), Some(LossReason::Gone));
        }
        assert_in_time(began, began.elapsed(), ms(2500)); // the pauses between attempts to connect are below a second
    });
}

fn hold_survives_a_short_cut(builder: Builder) {
    on(&builder, async |server, _| {
        let proxy = Proxy::to(server.addr());
        let flock = connect(proxy.addr()).await;
        let guard = flock.lock("k").lease(ms(3000)).await.unwrap();
        let began = Instant::now();
        proxy.refuse();
        proxy.cut(Cut::Reset);
        sleep(ms(500)).await;
        proxy.accept();
        sleep(ms(4000)).await;
        assert_kept(&server, &guard, began, ms(3000));
    });
}

fn late_request_of_a_dead_connection_costs_nothing(builder: Builder) {
    // A request is held on its way and its connection given up; the retry over the next connection gets the lock, which is given
    // back. Then the first one would arrive: but the server has been told to close that connection.
    on(&builder, async |server, _| {
        let proxy = Proxy::to(server.addr());
        let flock = hasty(&url(proxy.addr())).await;
        deliver_late(&proxy, &flock).await;
        sleep(ms(200)).await;
        assert_eq!(server.info("flock").number("flock_grants"), 1);
        assert_eq!(held_and_waiting(&server), (0, 0));
    });
}

fn late_request_costs_its_claim_where_connections_may_not_be_killed(builder: Builder) {
    // As above, for a user that may not kill connections: the server grants to a request that nobody waits for any more. It must
    // cost the claim, not the lease of ten minutes.
    on(&builder, async |server, _| {
        let rules = ["ACL", "SETUSER", "u", "on", ">p", "+@all", "-client|kill", "~*", "&*"];
        server.connect(Protocol::Resp2).cmd(&rules);
        let proxy = Proxy::to(server.addr());
        let flock = hasty(&format!("valkey://u:p@{}", proxy.addr())).await;
        deliver_late(&proxy, &flock).await;
        let began = Instant::now();
        wait_until("it was granted late", SOON, || server.info("flock").number("flock_grants") == 2);
        wait_until_nothing_is_left(&server, SOON);
        println!("a late request cost {:?} of a claim of {CLAIM:?}", began.elapsed());
        assert_in_time(began, began.elapsed(), CLAIM + ms(300));
    });
}

const CLAIM: Duration = Duration::from_millis(500);

async fn hasty(url: &str) -> Flock {
    let builder = Flock::builder(url).claim(CLAIM).response_timeout(ms(100)).heartbeat(ms(100));
    builder.connect().await.expect("the server is there")
}

/// Acquires while the first request is held on its way, gives back, and lets the first request go on.
async fn deliver_late(proxy: &Proxy, flock: &Flock) {
    proxy.set_existing(Direction::ToServer, Fault::Hold);
    let guard = flock.lock("k").lease(Duration::from_secs(600)).wait(SOON).await.unwrap();
    give_back(guard).await;
    proxy.set_existing(Direction::ToServer, Fault::Pass);
}

fn grant_that_is_heard_late_is_renewed_first(builder: Builder) {
    // S5: the grant is published and held on its way for longer than its claim. Whoever hears it then holds nothing.
    on(&builder, async |server, admin: Flock| {
        let proxy = Proxy::to(server.addr());
        // Patient, so that the link is not replaced meanwhile.
        let flock = quick(proxy.addr()).claim(ms(300)).response_timeout(SOON).connect().await.unwrap();
        let first = held(&admin, "k").await;
        let waiting = tokio::spawn(held(&flock, "k"));
        wait_until_waiting(&server, 1);
        proxy.set(Direction::ToClient, Fault::Hold);
        give_back(first).await;
        wait_until("it was granted and its claim is over", SOON, || {
            server.info("flock").number("flock_grants") == 2 && held_and_waiting(&server).0 == 0
        });
        let other = held(&admin, "k").await;
        proxy.heal();
        sleep(ms(200)).await;
        assert!(!waiting.is_finished(), "believed in a grant that was over");
        assert!(other.is_valid());
        let token = other.token();
        give_back(other).await;
        let guard = waiting.await.unwrap();
        assert!(guard.token() > token && guard.is_valid() && is_current(&server, &guard));
    });
}

fn killed_predecessor_is_nobody_else(builder: Builder) {
    // A restarted server counts its connections from 1 again. Clients that come back kill what they had before: not each other.
    within_bounds(async {
        let mut server = builder.start();
        let mut clients = Vec::new();
        for _ in 0..8 {
            clients.push(connect(server.addr()).await);
        }
        server.restart();
        for (number, flock) in clients.iter().enumerate() {
            give_back(held(flock, &format!("k{number}")).await).await;
        }
        wait_until("all are back", SOON, || connections(&server, true).len() == 8);
        let before = (connections(&server, true), connections(&server, false));
        sleep(ms(300)).await;
        assert_eq!((connections(&server, true), connections(&server, false)), before);
    });
}
