//! A thousand random lives of three clients and two locks: they acquire, wait, give up, drop and release, while connections break, the
//! server goes away and comes back, an administrator revokes, and time passes or jumps. After every step nobody holds a lock beside
//! anybody else, and in the end nothing is left behind.
//!
//! `FLOCK_SEED=n cargo test -p flock-client --test random_schedules` runs one of them.

use std::collections::BTreeSet;
use std::future::IntoFuture;
use std::panic::catch_unwind;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use flock_client::testing::Server;
use flock_client::{AcquireError, Flock, Guard, Token};
use tokio::task::JoinHandle;
use tokio::time::{advance, sleep};

const SCHEDULES: u64 = 1000;
const STEPS: u64 = 40;
const KEYS: [&str; 2] = ["k", "l"];
const LEASE: Duration = Duration::from_secs(10);

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        let index = self.below(items.len() as u64);
        &items[usize::try_from(index).unwrap()]
    }

    /// Up to 20 s; half of them up to 200 ms.
    fn pause(&mut self) -> Duration {
        let most = *self.pick(&[200, 20_000]);
        Duration::from_millis(self.below(most))
    }
}

/// A hold, as the storage that it guards sees it.
struct Held {
    key: usize,
    shared: bool,
    guard: Guard,
}

/// The storage: the highest token that has written, for each key.
#[derive(Default)]
struct Seen {
    held: Vec<Held>,
    last: [Option<Token>; 2],
    revoked: BTreeSet<Token>,
    grants: u64,
}

struct Life {
    server: Server,
    clients: Vec<Flock>,
    seen: Arc<Mutex<Seen>>,
    asking: Vec<JoinHandle<()>>,
}

impl Life {
    async fn begin() -> Self {
        let server = Server::new();
        let mut clients = Vec::new();
        for _ in 0..3 {
            clients.push(server.builder().heartbeat(Duration::from_secs(3)).connect().await.unwrap());
        }
        Self { server, clients, seen: Arc::default(), asking: Vec::new() }
    }

    /// Asks for a lock in a task of its own, which notes the guard.
    fn ask(&mut self, random: &mut Random) {
        let key = usize::from(random.below(2) == 0);
        let shared = random.below(3) == 0;
        let mut lock = random.pick(&self.clients).lock(KEYS[key]).lease(LEASE);
        if shared {
            lock = lock.shared();
        }
        if random.below(4) == 0 {
            lock = lock.session(Duration::from_secs(7));
        }
        lock = lock.keep_alive(random.below(4) != 0);
        lock = match random.below(3) {
            0 => lock.wait(Duration::ZERO),
            1 => lock.wait(random.pause() + Duration::from_millis(1)),
            _ => lock,
        };
        let seen = Arc::clone(&self.seen);
        self.asking.push(tokio::spawn(async move {
            match lock.into_future().await {
                Ok(guard) => seen.lock().unwrap().granted(Held { key, shared, guard }),
                Err(AcquireError::TimedOut | AcquireError::Unavailable(_)) => {}
                Err(error) => panic!("{error:?}"),
            }
        }));
    }

    async fn step(&mut self, random: &mut Random) {
        match random.below(16) {
            0..=4 => self.ask(random),
            5 | 6 => drop(self.take(random)),
            7 => {
                if let Some(held) = self.take(random) {
                    let _lost_or_not = held.guard.release().await;
                }
            }
            8 => {
                self.asking.retain(|task| !task.is_finished());
                if !self.asking.is_empty() {
                    let index = random.below(self.asking.len() as u64);
                    self.asking.swap_remove(usize::try_from(index).unwrap()).abort();
                }
            }
            9 => self.server.cut_connections(),
            10 => self.server.stop(),
            11 => self.server.start(),
            12 => self.revoke(random),
            13 => advance(random.pause()).await,
            _ => sleep(random.pause()).await,
        }
    }

    /// What an administrator ends is not believed any more when its holder hears of it, and that may be later.
    fn revoke(&self, random: &mut Random) {
        let key = random.pick(&KEYS);
        self.seen.lock().unwrap().revoked.extend(self.server.holders(key));
        self.server.revoke(key);
    }

    fn take(&self, random: &mut Random) -> Option<Held> {
        let mut seen = self.seen.lock().unwrap();
        if seen.held.is_empty() {
            return None;
        }
        let index = random.below(seen.held.len() as u64);
        Some(seen.held.swap_remove(usize::try_from(index).unwrap()))
    }

    /// Whoever believes to hold a lock does, and nobody beside it who must not.
    fn check(&self) {
        let seen = self.seen.lock().unwrap();
        let is_valid = |held: &&Held| held.guard.is_valid() && !seen.revoked.contains(&held.guard.token());
        let valid: Vec<&Held> = seen.held.iter().filter(is_valid).collect();
        for held in &valid {
            let token = held.guard.token();
            assert!(
                self.server.holders(KEYS[held.key]).contains(&token),
                "token {token} of a valid guard is not current"
            );
            let beside = valid.iter().filter(|other| other.key == held.key).count();
            assert!(held.shared || beside == 1, "an exclusive holder is not alone");
        }
    }

    /// Lets go of everything: nothing stays on the server, not even until the leases end.
    async fn end(mut self) -> u64 {
        self.server.start();
        sleep(Duration::from_secs(3)).await; // everybody has connected again
        for task in self.asking.drain(..) {
            task.abort();
            let _ = task.await;
        }
        let (held, grants) = {
            let mut seen = self.seen.lock().unwrap();
            (std::mem::take(&mut seen.held), seen.grants)
        };
        drop(held);
        sleep(Duration::from_secs(2)).await;
        for key in KEYS {
            assert_eq!((self.server.holders(key), self.server.waiters(key)), (vec![], 0), "left behind at {key}");
        }
        grants
    }
}

impl Seen {
    /// Fences: each grant of an exclusive lock has a higher token than all before it; of a shared one, than the last exclusive.
    fn granted(&mut self, held: Held) {
        let token = held.guard.token();
        let last = &mut self.last[held.key];
        // Shared holders may hear of their grants in another order. One that was lost on the way may be heard of late: it is not valid.
        if held.guard.is_valid() && !self.revoked.contains(&token) {
            assert!(last.is_none_or(|last| last < token), "{token} was granted after {last:?}");
            if !held.shared {
                *last = Some(token);
            }
        }
        self.grants += 1;
        self.held.push(held);
    }
}

fn run(seed: u64) -> u64 {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let mut random = Random(seed);
        let mut life = Life::begin().await;
        for _ in 0..STEPS {
            life.step(&mut random).await;
            life.check();
        }
        life.end().await
    })
}

#[test]
fn nobody_holds_a_lock_beside_anybody_else() {
    if let Ok(seed) = std::env::var("FLOCK_SEED") {
        run(seed.parse().unwrap());
        return;
    }
    // Half of them in each of two threads.
    let run_every_second = |first: u64| {
        let seeds = (first..SCHEDULES).step_by(2);
        seeds.map(|seed| catch_unwind(|| run(seed)).unwrap_or_else(|_| panic!("schedule {seed} failed"))).sum::<u64>()
    };
    let grants = std::thread::scope(|scope| {
        let even = scope.spawn(|| run_every_second(0));
        run_every_second(1) + even.join().unwrap()
    });
    assert!(grants > 4 * SCHEDULES, "only {grants} grants: the schedules do next to nothing");
}
