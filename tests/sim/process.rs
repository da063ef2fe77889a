//! One client process: the real client on a clock of its own, behind a network of its own, and the workers that use it.

use std::future::IntoFuture;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use flock_client::testing::Process as Ground;
use flock_client::{AcquireError, Flock};
use flock_tests::random::Random;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::Plant;
use crate::judge::{Judge, KEYS};
use crate::network::Link;
use crate::servers::Servers;

const WORKERS: u32 = 2;
/// The clock of a machine may run as much faster or slower; the client allows for 1 %.
const CLOCK_PPM_MAX: u64 = 2000;
const LEASE_MS_MAX: u64 = 8000;

/// What all processes share.
#[derive(Clone, Debug)]
pub(crate) struct Stage {
    pub(crate) servers: Servers,
    pub(crate) judge: Judge,
    pub(crate) plant: Plant,
    /// Workers are to finish what they have begun, and begin nothing more.
    pub(crate) is_closing: Arc<AtomicBool>,
}

/// A process with its workers.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) number: u32,
    pub(crate) link: Link,
    /// Whether it finds an old primary as long as there is one.
    finds_old: Arc<AtomicBool>,
    pub(crate) workers: Vec<JoinHandle<()>>,
}

impl Process {
    pub(crate) fn start(number: u32, stage: &Stage, random: &mut Random) -> Process {
        let host = Ipv4Addr::from_bits(Ipv4Addr::new(10, 0, 0, 0).to_bits() + number);
        let link = Link::new(host, Random::from_seed(random.number()), stage.plant == Plant::MessagesGetLost);
        let finds_old = Arc::new(AtomicBool::new(random.one_in(2)));
        let connect = {
            let (link, servers, finds_old) = (link.clone(), stage.servers.clone(), Arc::clone(&finds_old));
            move || link.connect(&servers.found_by(finds_old.load(Ordering::Relaxed)))
        };
        let ppm = i32::try_from(random.below(2 * CLOCK_PPM_MAX)).expect("it is small") - 2000;
        // A clock at half speed makes its holders believe for twice their lease.
        let ppm = if stage.plant == Plant::BelievesTwice { -500_000 } else { ppm };
        let ground = Ground::new(number, connect).clock_rate(ppm);
        let workers = (0..WORKERS).map(|_| {
            let worker = Worker {
                process: number,
                stage: stage.clone(),
                link: link.clone(),
                random: Random::from_seed(random.number()),
            };
            let ground = ground.clone();
            tokio::spawn(worker.run(ground))
        });
        let workers = workers.collect();
        Process { number, link, finds_old, workers }
    }

    pub(crate) fn finds_old(&self, finds_old: bool) {
        self.finds_old.store(finds_old, Ordering::Relaxed);
    }

    /// From one moment to the next the process is not there any more.
    pub(crate) fn crash(self, judge: &Judge) {
        self.link.crash();
        self.workers.iter().for_each(JoinHandle::abort);
        drop(judge.crashed(self.number));
    }
}

struct Worker {
    process: u32,
    stage: Stage,
    link: Link,
    random: Random,
}

impl Worker {
    async fn run(mut self, ground: Ground) {
        let Some(flock) = self.connect(&ground).await else { return };
        while !self.stage.is_closing.load(Ordering::Relaxed) {
            self.one_acquisition(&flock).await;
            self.pause(500).await;
        }
    }

    async fn connect(&mut self, ground: &Ground) -> Option<Flock> {
        while !self.stage.is_closing.load(Ordering::Relaxed) {
            if let Ok(flock) = ground.builder().connect().await {
                return Some(flock);
            }
            self.pause(500).await;
        }
        None
    }

    async fn one_acquisition(&mut self, flock: &Flock) {
        let key = self.random.pick(&KEYS);
        let is_shared = self.random.one_in(4);
        let lease = Duration::from_millis(500 + self.random.below(LEASE_MS_MAX - 500));
        let mut lock = flock.lock(key).lease(lease).keep_alive(!self.random.one_in(4));
        if is_shared {
            lock = lock.shared();
        }
        if self.random.one_in(5) {
            lock = lock.session(Duration::from_secs(4));
        }
        match self.random.below(6) {
            0 => lock = lock.wait(Duration::ZERO),
            1 => lock = lock.wait(Duration::from_millis(1 + self.random.below(5000))),
            _ => {}
        }
        let patience = Duration::from_millis(if self.random.one_in(8) { self.random.below(3000) } else { 1 << 40 });
        self.stage.judge.note(&format!("process {} asks for {key} for {lease:?}", self.process));
        let asked = Instant::now();
        match timeout(patience, lock.into_future()).await {
            Ok(Ok(guard)) => {
                let Stage { judge, servers, .. } = &self.stage;
                let number = judge.granted(self.process, key, is_shared, asked, guard, servers);
                judge.look(servers);
                self.hold(number, lease).await;
            }
            Ok(Err(AcquireError::TimedOut | AcquireError::Unavailable(_))) | Err(_) => {}
            Ok(Err(error)) => {
                self.stage.judge.violated(&format!("process {} cannot acquire {key}: {error:?}", self.process));
            }
        }
    }

    async fn hold(&mut self, number: u64, lease: Duration) {
        for _ in 0..self.random.below(5) {
            if !self.stage.judge.believes(number) {
                break;
            }
            if self.random.one_in(12) && !self.stage.is_closing.load(Ordering::Relaxed) {
                // It has looked, and hangs before it writes: for longer than its lease, cut off from the server.
                self.stage.judge.note(&format!("process {} hangs", self.process));
                let hangs = lease * 2;
                self.link.silence(true, true, hangs);
                let until = Instant::now() + hangs;
                while Instant::now() < until && !self.stage.is_closing.load(Ordering::Relaxed) {
                    sleep(Duration::from_millis(100)).await;
                }
            }
            self.stage.judge.write(number);
            self.pause(700).await;
        }
        let Some(guard) = self.stage.judge.take(number) else { return };
        if self.random.one_in(3) {
            drop(guard);
        } else {
            // Lost or not: it is over.
            let _ = guard.release().await;
        }
    }

    async fn pause(&mut self, most_ms: u64) {
        sleep(Duration::from_millis(1 + self.random.below(most_ms))).await;
    }
}
