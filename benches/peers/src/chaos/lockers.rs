//! The clients that are compared, each used as its documentation shows.

use std::fmt::Write;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use flock_client::{Flock, Guard};
use rslock::{Lock, LockManager};

use super::LEASE;

pub(crate) const FLOCK: &str = "flock-client";
pub(crate) const RSLOCK: &str = "rslock";
/// Also looks at the time that `rslock` says its lock is valid for, which its documentation does not ask for.
pub(crate) const RSLOCK_TIMED: &str = "rslock with a look at the clock";
pub(crate) const PEERS: [&str; 3] = [FLOCK, RSLOCK, RSLOCK_TIMED];

/// A grant that nobody has heard of lasts so long.
const CLAIM: Duration = Duration::from_millis(500);

/// A client.
pub(crate) trait Locker: Clone + Send + Sync + 'static {
    /// A lock that it has.
    type Held: Send;
    /// Returns when it has the lock; none if it gave up.
    fn acquire(&self, lock: &'static str) -> impl Future<Output = Option<Self::Held>> + Send;
    /// What the server holds the lock under.
    fn name(held: &Self::Held) -> String;
    /// Whether it may go on.
    fn believes(&self, held: &Self::Held) -> bool;
    /// Called at every third of the lease. False if the lock is known to be lost.
    fn keep(&self, held: &mut Self::Held) -> impl Future<Output = bool> + Send;
    /// Gives it back.
    fn release(&self, held: Self::Held) -> impl Future<Output = ()> + Send;
}

/// `flock-client`, which keeps its locks by itself and knows when one is lost.
#[derive(Clone)]
pub(crate) struct OurClient(Flock);

impl OurClient {
    pub(crate) async fn connect(server: SocketAddr) -> OurClient {
        let flock = Flock::builder(format!("valkey://{server}")).claim(CLAIM).connect().await;
        OurClient(flock.expect("the server answers"))
    }
}

impl Locker for OurClient {
    type Held = Guard;

    async fn acquire(&self, lock: &'static str) -> Option<Guard> {
        self.0.lock(lock).lease(LEASE).await.ok()
    }

    fn name(held: &Guard) -> String {
        held.token().get().to_string()
    }

    fn believes(&self, held: &Guard) -> bool {
        held.is_valid()
    }

    async fn keep(&self, _held: &mut Guard) -> bool {
        true
    }

    async fn release(&self, held: Guard) {
        let _ = held.release().await;
    }
}

/// `rslock`, on one server.
#[derive(Clone)]
pub(crate) struct Rslock {
    manager: LockManager,
    looks_at_the_clock: bool,
}

/// Its lock, and until when it is valid.
pub(crate) struct Timed {
    lock: Lock,
    until: Instant,
}

impl Timed {
    fn new(lock: Lock) -> Timed {
        let until = Instant::now() + Duration::from_millis(lock.validity_time as u64);
        Timed { lock, until }
    }
}

impl Rslock {
    pub(crate) fn new(server: SocketAddr, looks_at_the_clock: bool) -> Rslock {
        Rslock { manager: LockManager::new(vec![format!("redis://{server}/")]), looks_at_the_clock }
    }
}

impl Locker for Rslock {
    type Held = Timed;

    async fn acquire(&self, lock: &'static str) -> Option<Timed> {
        self.manager.acquire(lock, LEASE).await.ok().map(|guard| Timed::new(guard.lock))
    }

    fn name(held: &Timed) -> String {
        hexadecimal(&held.lock.val)
    }

    fn believes(&self, held: &Timed) -> bool {
        !self.looks_at_the_clock || Instant::now() < held.until
    }

    async fn keep(&self, held: &mut Timed) -> bool {
        match self.manager.extend(&held.lock, LEASE).await {
            Ok(lock) => {
                *held = Timed::new(lock);
                true
            }
            Err(_) => false,
        }
    }

    async fn release(&self, held: Timed) {
        held.lock.release().await;
    }
}

/// Bytes as a word.
pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    let mut word = String::new();
    for byte in bytes {
        let _ = write!(word, "{byte:02x}");
    }
    word
}
