//! An operation begins in its caller's own future and goes on on the client's thread: whatever becomes of the caller meanwhile.

use std::future::{Future, IntoFuture, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use flock_client::{AcquireError, ConnectError, Flock, HolderState, LossReason, Released};
use flock_tests::on_own_servers;
use flock_tests::proxy::{Cut, Direction, Fault, Proxy};
use flock_tests::server::{Builder, Server};
use flock_tests::wait::{let_pass, wait_until};
use tokio::runtime::Runtime;
use tokio::time::sleep;

use crate::scene::{
    SOON, assert_in_time, assert_kept, connect, give_back, held, held_and_waiting, is_current, ms, on, quick,
    stalled_since, url, wait_until_nothing_is_left, wait_until_waiting, watch_the_machine,
};

on_own_servers![
    caller_needs_no_runtime,
    short_hold_costs_no_renewal,
    hold_that_lasts_is_confirmed,
    dropped_release_is_carried_out,
    release_of_a_blocked_caller_outlives_its_connection,
    blocked_caller_gets_its_turn_and_keeps_it,
    future_that_is_not_polled_again_costs_its_claim,
    shutdown_does_not_wait_for_futures_that_nobody_polls,
    many_requests_at_once_starve_no_renewal,
    refusal_that_may_pass_is_told_at_the_deadline,
    client_on_its_callers_runtime_does_the_same,
];

/// The executor of somebody who has none.
fn block_on<T>(work: impl Future<Output = T>) -> T {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut work = pin!(work);
    loop {
        if let Poll::Ready(value) = work.as_mut().poll(&mut Context::from_waker(&waker)) {
            return value;
        }
        std::thread::park();
    }
}

fn caller_needs_no_runtime(builder: Builder) {
    // Neither tokio nor its timers are there; also not for what waits, fails and times out.
    let server = builder.start();
    block_on(async {
        let flock = connect(server.addr()).await;
        let guard = held(&flock, "k").await;
        guard.renew().await.unwrap();
        let waited = flock.lock("k").wait(ms(100)).await;
        assert!(matches!(waited, Err(AcquireError::TimedOut)));
        assert_eq!(guard.release().await.unwrap(), Released::Released);
        let nowhere = Flock::builder("valkey://127.0.0.1:1").connect_timeout(ms(100)).connect().await;
        assert!(nowhere.is_err());
        flock.shutdown(SOON).await.unwrap();
    });
    assert_eq!(held_and_waiting(&server), (0, 0));
}

fn calls(server: &Server, command: &str) -> i64 {
    let stats = server.info("commandstats");
    let calls =
        stats.get(&format!("cmdstat_{command}")).and_then(|stat| stat.strip_prefix("calls=")?.split(',').next());
    calls.map_or(0, |calls| calls.parse().expect("a number"))
}

fn short_hold_costs_no_renewal(builder: Builder) {
    // Two commands a pair: also where others wait, and the grant comes by a message.
    on(&builder, async |server, flock: Flock| {
        let contend = async || {
            let mut longest = Duration::ZERO;
            for _ in 0..100 {
                let began = Instant::now();
                give_back(held(&flock, "k").await).await;
                longest = longest.max(began.elapsed());
            }
            longest
        };
        let (one, other) = tokio::join!(contend(), contend());
        let renewals = calls(&server, "FLOCK.RENEW");
        println!("{renewals} renewals");
        assert!(
            renewals == 0 || one.max(other) > ms(50),
            "{renewals} renewals, the longest pair took {:?}",
            one.max(other)
        );
        assert_eq!(calls(&server, "FLOCK.RELEASE"), 200);
    });
}

fn hold_that_lasts_is_confirmed(builder: Builder) {
    on(&builder, async |_server, flock: Flock| {
        let _guard = flock.lock("k").lease(Duration::from_secs(60)).await.unwrap();
        let state = async || flock.info("k", 0).await.unwrap().expect("it is held").holders[0].state;
        let began = Instant::now();
        while state().await != HolderState::Held {
            assert!(began.elapsed() < ms(1000) + stalled_since(began), "still a claim");
            sleep(ms(10)).await;
        }
    });
}

/// Polls once; whether there is no answer yet.
async fn begin(work: &mut (impl Future + Unpin)) -> bool {
    poll_fn(|context| Poll::Ready(Pin::new(&mut *work).poll(context).is_pending())).await
}

/// A server whose answers come late enough for whoever is to miss them.
fn distant(server: &Server) -> Proxy {
    let proxy = Proxy::to(server.addr());
    proxy.set(Direction::ToClient, Fault::Delay(ms(20)));
    proxy
}

fn dropped_release_is_carried_out(builder: Builder) {
    on(&builder, async |server, flock: Flock| {
        for _ in 0..100 {
            let mut release = Box::pin(held(&flock, "k").await.release());
            begin(&mut release).await;
        }
        drop(held(&flock, "k").await.release()); // not even begun
        wait_until_nothing_is_left(&server, SOON);
    });
}

fn release_of_a_blocked_caller_outlives_its_connection(builder: Builder) {
    // The request is lost with its connection, and the caller's runtime is blocked. Others have the lock long before the lease is over.
    watch_the_machine();
    let server = builder.start();
    let proxy = Proxy::to(server.addr());
    single_threaded().block_on(async {
        let flock = quick(proxy.addr()).response_timeout(ms(200)).connect().await.unwrap();
        let guard = flock.lock("k").lease(Duration::from_secs(600)).await.unwrap();
        proxy.set_existing(Direction::ToServer, Fault::Drop);
        let mut release = Box::pin(guard.release());
        assert!(begin(&mut release).await);
        let_pass(ms(50)); // for the client's thread to send it
        proxy.cut(Cut::Reset);
        assert_eq!(held_and_waiting(&server), (1, 0));
        let began = Instant::now();
        wait_until_nothing_is_left(&server, SOON); // on this thread
        println!("given back after {:?}", began.elapsed());
        assert_in_time(began, began.elapsed(), ms(1500));
        assert_eq!(release.await.unwrap(), Released::Released);
    });
}

fn single_threaded() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("cannot make a runtime")
}

fn blocked_caller_gets_its_turn_and_keeps_it(builder: Builder) {
    // Its turn comes while the whole of its runtime is blocked, for longer than the claim and the lease.
    watch_the_machine();
    let server = builder.start();
    single_threaded().block_on(async {
        let admin = connect(server.addr()).await;
        let flock = quick(server.addr()).claim(ms(300)).connect().await.unwrap();
        let first = held(&admin, "k").await;
        let mut waiting = flock.lock("k").lease(ms(600)).into_future();
        assert!(begin(&mut waiting).await);
        wait_until_waiting(&server, 1);
        sleep(ms(200)).await; // for the answer, which nobody looks at
        assert!(begin(&mut waiting).await);
        drop(first);
        let began = Instant::now();
        let_pass(ms(2000));
        let guard = waiting.await.unwrap();
        assert_kept(&server, &guard, began, ms(300));
        assert_eq!(server.info("flock").number("flock_grants"), 2, "it was granted once");
    });
}

fn future_that_is_not_polled_again_costs_its_claim(builder: Builder) {
    // The answer arrives and nobody looks. Others have the lock when the claim is over; who looks after that waits for its turn again.
    on(&builder, async |server, admin: Flock| {
        let proxy = distant(&server);
        let flock = quick(proxy.addr()).claim(ms(300)).connect().await.unwrap();
        let mut forgotten = flock.lock("k").lease(Duration::from_secs(600)).into_future();
        assert!(begin(&mut forgotten).await);
        wait_until("it is held", SOON, || held_and_waiting(&server).0 == 1);
        let other = held(&admin, "k").await;
        let token = other.token();
        tokio::select! {
            biased;
            _ = &mut forgotten => panic!("believed in a grant that was over"),
            () = sleep(ms(200)) => {}
        }
        assert!(other.is_valid());
        drop(other);
        let guard = forgotten.await.unwrap();
        assert!(guard.token() > token && guard.is_valid() && is_current(&server, &guard));
    });
}

fn shutdown_does_not_wait_for_futures_that_nobody_polls(builder: Builder) {
    on(&builder, async |server, _| {
        let proxy = distant(&server);
        let flock = connect(proxy.addr()).await;
        let mut forgotten = flock.lock("k").lease(Duration::from_secs(600)).into_future();
        assert!(begin(&mut forgotten).await);
        wait_until("it is held", SOON, || held_and_waiting(&server).0 == 1);
        flock.shutdown(SOON).await.unwrap();
        assert_eq!(held_and_waiting(&server), (0, 0));
        assert!(matches!(forgotten.await, Err(AcquireError::ShutDown)));
    });
}

fn many_requests_at_once_starve_no_renewal(builder: Builder) {
    // 30,000 requests want to be sent in one instant. What is held is renewed all the same.
    on(&builder, async |server, flock: Flock| {
        let lease = ms(3000);
        let guard = flock.lock("held").lease(lease).await.unwrap();
        let began = Instant::now();
        let wait = Duration::from_secs(30);
        let request = |number| tokio::spawn(flock.lock(format!("many:{number}")).wait(wait).into_future());
        let requests: Vec<_> = (0..30_000).map(request).collect();
        let mut guards = Vec::with_capacity(requests.len());
        for request in requests {
            guards.push(request.await.unwrap().expect("nobody else wants it"));
        }
        println!("30,000 acquired after {:?}", began.elapsed());
        assert_kept(&server, &guard, began, lease);
        drop(guards);
        drop(guard);
        wait_until_nothing_is_left(&server, Duration::from_secs(20));
    });
}

fn refusal_that_may_pass_is_told_at_the_deadline(builder: Builder) {
    // As many wait as may: that can be over in a moment, so it is asked again until the time is over. It was never told to wait.
    let builder = builder.config("flock.waiters-max", "1");
    on(&builder, async |server, flock: Flock| {
        let first = held(&flock, "k").await;
        let waiting = tokio::spawn(held(&flock, "k"));
        wait_until_waiting(&server, 1);
        let began = Instant::now();
        let error = flock.lock("k").wait(ms(300)).await.unwrap_err();
        assert!(began.elapsed() >= ms(290), "given up after {:?}", began.elapsed());
        let AcquireError::Server(refusal) = error else { panic!("{error:?}") };
        assert_eq!(refusal.code(), "QUEUEFULL");
        assert!(calls(&server, "FLOCK.ACQUIRE") > 3, "it was not asked again");
        drop(first);
        drop(waiting.await.unwrap());
    });
}

fn client_on_its_callers_runtime_does_the_same(builder: Builder) {
    // And no thread is made for it. When that runtime has gone, its calls end.
    let server = builder.start();
    let runtime = single_threaded();
    let there = Flock::builder(url(server.addr())).on_runtime(runtime.handle().clone());
    let (flock, kept) = runtime.block_on(async {
        let flock = there.clone().connect().await.unwrap();
        let guard = held(&flock, "k").await;
        let waiting = tokio::spawn(held(&flock, "k"));
        while held_and_waiting(&server).1 == 0 {
            sleep(ms(1)).await;
        }
        assert_eq!(guard.release().await.unwrap(), Released::Released);
        drop(waiting.await.unwrap());
        let kept = held(&flock, "kept").await;
        (flock, kept)
    });
    drop(runtime);
    // Nobody renews it any more, so it is lost now, and who waits for that hears.
    assert_eq!(block_on(kept.lost()), Some(LossReason::ShutDown));
    assert!(matches!(block_on(flock.lock("k").into_future()), Err(AcquireError::ShutDown)));
    assert!(matches!(block_on(there.connect()), Err(ConnectError::Unavailable(_))));
}
