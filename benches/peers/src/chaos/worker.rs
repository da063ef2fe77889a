//! One of the processes: tasks that want locks, and a line for everything they do.

use std::future::poll_fn;
use std::io::Read;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use flock_tests::history::now_ns;
use flock_tests::random::Random;
use tokio::time::timeout;

use super::judge::{Event, What};
use super::lockers::{FLOCK, Locker, OurClient, RSLOCK_TIMED, Rslock};
use super::{LEASE, LOCKS};
use crate::contention::{runtime, sleep};

/// Makes this program a worker; the client, the server and a seed follow.
pub(crate) const ARGUMENT: &str = "chaos-worker";

const TASKS: usize = 4;
/// Between two looks at the lock.
const STEP: Duration = Duration::from_millis(5);
const STEPS_OF_A_LEASE: u64 = (LEASE.as_millis() / STEP.as_millis()) as u64;

/// Works until its input ends and every task has had what it waits for.
pub(crate) fn work(arguments: &[String]) {
    let [peer, server, seed] = arguments else { panic!("a worker wants a client, a server and a seed") };
    let server: SocketAddr = server.parse().expect("an address");
    let random = Random::from_seed(seed.parse().expect("a number"));
    let is_over = Arc::new(AtomicBool::new(false));
    let over = Arc::clone(&is_over);
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        over.store(true, Ordering::Relaxed);
    });
    runtime().block_on(async {
        match peer.as_str() {
            FLOCK => work_with(&OurClient::connect(server).await, random, &is_over).await,
            _ => work_with(&Rslock::new(server, peer == RSLOCK_TIMED), random, &is_over).await,
        }
    });
}

async fn work_with<L: Locker>(locker: &L, mut random: Random, is_over: &Arc<AtomicBool>) {
    let tasks = (0..TASKS).map(|_| {
        let mut task =
            Task { locker: locker.clone(), random: Random::from_seed(random.number()), is_over: Arc::clone(is_over) };
        tokio::spawn(async move { task.run().await })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.expect("a task does not fail");
    }
}

/// Somebody who wants one lock after the other.
struct Task<L> {
    locker: L,
    random: Random,
    is_over: Arc<AtomicBool>,
}

impl<L: Locker> Task<L> {
    async fn run(&mut self) {
        while !self.is_over.load(Ordering::Relaxed) {
            let lock = self.random.pick(&LOCKS);
            tell(What::Asked, lock, "");
            // One in four loses patience, half of them while a request is under way.
            let acquire = self.locker.acquire(lock);
            let outcome = match self.random.below(8) {
                0 => polled(acquire, self.random.below(6)).await,
                1 => timeout(Duration::from_millis(self.random.below(100)), acquire).await.ok(),
                _ => Some(acquire.await),
            };
            match outcome {
                None => tell(What::GaveUp, lock, ""),
                Some(None) => tell(What::Failed, lock, ""),
                Some(Some(held)) => self.use_it(lock, held).await,
            }
            sleep(Duration::from_millis(self.random.below(200))).await;
        }
    }

    async fn use_it(&mut self, lock: &str, mut held: L::Held) {
        let name = L::name(&held);
        tell(What::Granted, lock, &name);
        // One in sixteen works for longer than a lease, and keeps the lock; the others are sure to be done in a twentieth of one.
        let is_long = self.random.one_in(16);
        let steps = if is_long { STEPS_OF_A_LEASE * 3 / 2 } else { 4 + self.random.below(20) };
        let mut kept = Instant::now();
        for _ in 0..steps {
            // The time is from before the look: a process that is stopped right after it cannot know.
            let at = now_ns();
            if !self.locker.believes(&held) {
                break;
            }
            tell_at(at, What::Acted, lock, &name);
            if is_long && kept.elapsed() >= LEASE / 3 {
                kept = Instant::now();
                if !self.locker.keep(&mut held).await {
                    break;
                }
            }
            sleep(STEP).await;
        }
        if self.random.one_in(8) {
            // As by a `?` in the middle of the work.
            tell(What::Dropped, lock, &name);
            drop(held);
        } else {
            tell(What::Released, lock, &name);
            self.locker.release(held).await;
        }
    }
}

fn tell(what: What, lock: &str, name: &str) {
    tell_at(now_ns(), what, lock, name);
}

fn tell_at(at: u64, what: What, lock: &str, name: &str) {
    println!("{}", Event { at, what, lock: lock.to_owned(), name: name.to_owned() });
}

/// Polls the future so often, and then drops it.
async fn polled<F: Future>(future: F, mut polls: u64) -> Option<F::Output> {
    let mut future = pin!(future);
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending if polls == 0 => Poll::Ready(None),
        Poll::Pending => {
            polls -= 1;
            Poll::Pending
        }
    })
    .await
}
