//! Clients at work: tasks that lock, write to a storage that checks tokens, and release, until they are stopped. Then the checker judges
//! what they saw, of each lock by itself: two nodes of a cluster may grant two locks under one token.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use flock_client::{Flock, Released};
use flock_tests::check::{Order, Rules, assert_sound};
use flock_tests::fenced_store::FencedStore;
use flock_tests::history::{Call, Recorder, Verb};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::scene::ms;

/// Where holds may be lost, and two may believe for a while; tokens rise for each lock all the same.
pub(crate) const WITH_LOSS: Rules =
    Rules { order: Order::PerKey, exclusion: false, leases: false, fifo: true, answered: true };
/// Where nothing is lost, on several servers with a counter each.
pub(crate) const WITHOUT_LOSS: Rules = Rules { exclusion: true, leases: true, ..WITH_LOSS };

/// How long a wait may last, on a busy machine with a failover in between.
const PATIENCE: Duration = Duration::from_secs(20);
/// Short: a release that the next primary has not heard of leaves the lock held there, until its lease is over.
const LEASE: Duration = Duration::from_millis(3000);
const TASKS_PER_KEY: usize = 4;

/// Everybody's work under one lock.
#[derive(Debug)]
struct Run {
    key: String,
    is_over: Arc<AtomicBool>,
    recorder: Recorder,
    store: FencedStore,
}

#[derive(Debug)]
pub(crate) struct Load {
    is_over: Arc<AtomicBool>,
    runs: Vec<Arc<Run>>,
    tasks: Vec<JoinHandle<(u32, Duration)>>,
}

impl Load {
    /// Several tasks for each key.
    pub(crate) fn start(flock: &Flock, keys: &[String]) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let run = |key: &String| {
            let (key, is_over) = (key.clone(), Arc::clone(&is_over));
            Arc::new(Run { key, is_over, recorder: Recorder::new(), store: FencedStore::new() })
        };
        let runs: Vec<_> = keys.iter().map(run).collect();
        let contenders = runs.iter().flat_map(|run| std::iter::repeat_n(run, TASKS_PER_KEY)).zip(0..);
        let tasks = contenders.map(|(run, number)| tokio::spawn(Arc::clone(run).work(flock.clone(), number))).collect();
        Self { is_over, runs, tasks }
    }

    /// Stops them, and judges. Each must have acquired something.
    pub(crate) async fn end(self, rules: &Rules) {
        self.is_over.store(true, Ordering::Relaxed);
        let (mut acquired, mut longest) = (0, Duration::ZERO);
        for task in self.tasks {
            let (count, wait) = task.await.expect("the task has not panicked");
            assert!(count > 0);
            (acquired, longest) = (acquired + count, longest.max(wait));
        }
        println!("{acquired} acquired, longest wait {longest:?}");
        for run in &self.runs {
            println!("{}: {:?}", run.key, run.store.counts());
            assert_sound(&run.recorder.events(), rules);
        }
    }
}

impl Run {
    async fn work(self: Arc<Self>, flock: Flock, number: u32) -> (u32, Duration) {
        let lease_ms = u64::try_from(LEASE.as_millis()).expect("a lease is short");
        let (mut acquired, mut longest) = (0, Duration::ZERO);
        while !self.is_over.load(Ordering::Relaxed) {
            let owner = format!("{number}:{acquired}");
            let call = |verb| Call::new(verb, &self.key, &owner);
            let began = Instant::now();
            let op = self.recorder.invoke(number, call(Verb::Acquire).lease_ms(lease_ms));
            let guard = flock.lock(&self.key).lease(LEASE).wait(PATIENCE).await.expect("nobody hangs");
            let token = guard.token().get();
            self.recorder.ok(op, Some(token));
            (acquired, longest) = (acquired + 1, longest.max(began.elapsed()));
            sleep(ms(2)).await;
            if guard.is_valid() {
                let op = self.recorder.invoke(number, call(Verb::Write).token(token));
                if self.store.write(&self.key, &owner, token) {
                    self.recorder.ok(op, None);
                } else {
                    self.recorder.refused(op);
                }
            }
            let op = self.recorder.invoke(number, call(Verb::Release).token(token));
            match guard.release().await {
                Ok(Released::Released) => self.recorder.ok(op, None),
                Ok(Released::AlreadyLost) => self.recorder.refused(op),
                Err(_) => self.recorder.unknown(op),
            }
        }
        (acquired, longest)
    }
}
