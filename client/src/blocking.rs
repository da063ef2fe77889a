//! The same client for programs without an async runtime: calls that wait on the calling thread.
//!
//! ```no_run
//! use std::time::Duration;
//! use flock_client::Released;
//! use flock_client::blocking::Flock;
//!
//! # fn write_order(_token: flock_client::Token) -> std::io::Result<()> { Ok(()) }
//! # fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let flock = Flock::connect("valkey://127.0.0.1:6379")?; // cheap to clone
//!
//! let guard = flock.lock("order:1001").lease(Duration::from_secs(30)).wait(Duration::from_secs(3)).acquire()?;
//! write_order(guard.token())?; // stores the token, then reads and writes; a token lower than the last is refused there
//! // After the commit. Whatever comes here, the work is done: an error is no reason to do it again. (Dropping the guard releases too,
//! // in the background.)
//! match guard.release() {
//!     Ok(Released::Released) => {}
//!     Ok(Released::AlreadyLost) => {} // others may have come in between: the storage has refused what came after them
//!     Err(error) => eprintln!("goes on in the background: {error}"),
//! }
//!
//! // Or: released after the work. Nobody can stop a thread, so the work itself looks now and then.
//! flock.lock("order:1001").run(|guard| {
//!     while guard.is_valid() {
//!         // one more step
//! #       break;
//!     }
//! })?;
//!
//! flock.shutdown(Duration::from_secs(5))?; // before main returns
//! # Ok(())
//! # }
//! ```
//!
//! What each call promises is written at the asynchronous type of the same name, which it waits for. All the work is done by the
//! client's own thread; so leases are renewed while the calling thread computes or blocks. Everything may be used from any thread.
//!
//! # Panics
//! Every call that waits panics in an asynchronous task: it would stop all the others of that thread. There, use the asynchronous
//! types, or `tokio::task::spawn_blocking`.

use std::fmt;
use std::future::Future;
use std::num::NonZeroU32;
use std::time::Duration;

use flock_core::{Mode, Token};
use tokio::task::JoinSet;

use crate::client::{Builder, ShutdownTimedOut};
use crate::error::{AcquireError, ConnectError, HoldError, LossReason, RunError};
use crate::guard::Released;
use crate::in_place::leave_the_caller;
use crate::lock::WaitMode;

/// A client of one primary, or of a cluster; see [`crate::Flock`]. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Flock {
    inner: crate::Flock,
}

impl From<crate::Flock> for Flock {
    fn from(inner: crate::Flock) -> Self {
        Self { inner }
    }
}

impl Flock {
    /// Connects with the default settings.
    ///
    /// # Errors
    /// See [`Builder::connect`].
    ///
    /// # Panics
    /// In an asynchronous task.
    pub fn connect(url: impl AsRef<str>) -> Result<Self, ConnectError> {
        Self::connect_with(crate::Flock::builder(url))
    }

    /// Connects with settings of one's own: those of [`crate::Flock::builder`].
    ///
    /// # Errors
    /// See [`Builder::connect`].
    ///
    /// # Panics
    /// In an asynchronous task.
    pub fn connect_with(builder: Builder) -> Result<Self, ConnectError> {
        // There is no client's thread yet to wait for.
        let waiting = tokio::runtime::Builder::new_current_thread().build();
        let waiting = waiting.map_err(|error| ConnectError::Unavailable(error.into()))?;
        Ok(Self { inner: waiting.block_on(builder.connect())? })
    }

    /// A lock, exclusive unless told otherwise; nothing happens until it is acquired.
    pub fn lock(&self, key: impl AsRef<[u8]>) -> Lock {
        Lock { inner: self.inner.lock(key), flock: self.clone() }
    }

    /// The asynchronous client: for what has no call of its own here, with [`Flock::wait_for`].
    #[must_use]
    pub fn inner(&self) -> &crate::Flock {
        &self.inner
    }

    /// Waits for a future of this crate.
    ///
    /// ```no_run
    /// # fn example(flock: flock_client::blocking::Flock) -> Result<(), Box<dyn std::error::Error>> {
    /// let both = flock.wait_for(async { flock.inner().lock_all(["account:1", "account:2"]).await })?;
    /// let _ = flock.wait_for(both.release())?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    /// In an asynchronous task.
    pub fn wait_for<T>(&self, future: impl Future<Output = T>) -> T {
        self.inner.engine().runtime().block_on(future)
    }

    /// Ends the client for all its clones; see [`crate::Flock::shutdown`].
    ///
    /// # Errors
    /// [`ShutdownTimedOut`] if that took longer than `timeout`.
    ///
    /// # Panics
    /// In an asynchronous task.
    pub fn shutdown(&self, timeout: Duration) -> Result<(), ShutdownTimedOut> {
        self.wait_for(self.inner.shutdown(timeout))
    }
}

/// A lock that is about to be asked for; see [`crate::Lock`].
#[derive(Clone, Debug)]
#[must_use = "nothing happens until it is acquired"]
pub struct Lock {
    inner: crate::Lock,
    flock: Flock,
}

macro_rules! settings {
    ($($name:ident($($arg:ident: $type:ty),*);)*) => {
        impl Lock {
            $(
                #[doc = concat!("See [`crate::Lock::", stringify!($name), "`].")]
                pub fn $name(self, $($arg: $type),*) -> Self {
                    Self { inner: self.inner.$name($($arg),*), flock: self.flock }
                }
            )*
        }
    };
}

settings! {
    lease(lease: Duration);
    wait(wait: Duration);
    wait_mode(mode: WaitMode);
    shared();
    limit(holders: NonZeroU32);
    reentrant(owner: impl AsRef<[u8]>);
    label(label: impl AsRef<[u8]>);
    floor(token: Token);
    keep_alive(keep_alive: bool);
    max_hold(most: Duration);
    session(grace: Duration);
    acknowledged_by(replicas: u32, within: Duration);
}

impl Lock {
    /// Acquires the lock, waiting for its turn as long as [`Lock::wait`] says.
    ///
    /// # Errors
    /// See [`AcquireError`].
    ///
    /// # Panics
    /// In an asynchronous task.
    pub fn acquire(self) -> Result<Guard, AcquireError> {
        let Self { inner, flock } = self;
        flock.wait_for(async { inner.await }).map(|inner| Guard::new(inner, flock))
    }

    /// Acquires the lock if nobody is in the way; see [`crate::Lock::try_acquire`].
    ///
    /// # Errors
    /// See [`crate::Lock::try_acquire`].
    ///
    /// # Panics
    /// In an asynchronous task.
    pub fn try_acquire(self) -> Result<Option<Guard>, AcquireError> {
        let Self { inner, flock } = self;
        let guard = flock.wait_for(inner.try_acquire())?;
        Ok(guard.map(|inner| Guard::new(inner, flock)))
    }

    /// Acquires the lock, runs `work` under it, and releases it after that, also if `work` panics.
    ///
    /// Unlike [`crate::Lock::run`] it cannot end the work when the lock is lost. The work asks [`Guard::is_valid`] before each step
    /// that counts, or is told by [`Guard::on_lost`].
    ///
    /// # Errors
    /// [`RunError::Acquire`] if `work` was not begun, [`RunError::Lost`] if it was not finished under the lock.
    ///
    /// # Panics
    /// In an asynchronous task.
    pub fn run<T>(self, work: impl FnOnce(&mut Guard) -> T) -> Result<T, RunError> {
        let mut guard = self.acquire()?;
        let value = work(&mut guard);
        if let Some(reason) = guard.loss() {
            return Err(RunError::Lost(reason));
        }
        match guard.release() {
            // Some of what `work` did was done after the lock.
            Ok(Released::AlreadyLost) => Err(RunError::Lost(LossReason::Gone)),
            // An answer that does not come is waited for in the background.
            Ok(Released::Released) | Err(_) => Ok(value),
        }
    }
}

/// A lock that is held; see [`crate::Guard`]. Dropping it releases in the background.
#[must_use = "dropping a guard releases the lock"]
pub struct Guard {
    /// What is to be told of a loss. They end with the guard.
    tell: JoinSet<()>,
    inner: crate::Guard,
    flock: Flock,
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl Guard {
    fn new(inner: crate::Guard, flock: Flock) -> Self {
        Self { tell: JoinSet::new(), inner, flock }
    }

    /// The lock's name.
    #[must_use]
    pub fn key(&self) -> &[u8] {
        self.inner.key()
    }

    /// The fencing token, for the storage; see [`crate::Guard::token`].
    #[must_use]
    pub fn token(&self) -> Token {
        self.inner.token()
    }

    /// How it is held; see [`crate::Guard::mode`].
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.inner.mode()
    }

    /// The owner this hold has at the server.
    #[must_use]
    pub fn owner(&self) -> &[u8] {
        self.inner.owner()
    }

    /// Whether the lock is held, as far as can be known without asking; see [`crate::Guard::is_valid`].
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.inner.is_valid()
    }

    /// For how long it is certainly held if it is never renewed again; zero once it is lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.inner.remaining()
    }

    /// Waits until the lock is lost, for at most `timeout`; says why, or `None` if it is held for all that time.
    ///
    /// # Panics
    /// In an asynchronous task.
    #[must_use]
    pub fn lost_within(&self, timeout: Duration) -> Option<LossReason> {
        if let Some(reason) = self.loss() {
            return Some(reason);
        }
        // Timed on the client's thread; if that is gone, so is the lock.
        let lost = self.inner.lost();
        let lost = async move {
            leave_the_caller().await;
            tokio::time::timeout(timeout, lost).await.ok().flatten()
        };
        let waited = self.flock.inner.engine().thread.ask(lost);
        self.flock.wait_for(waited).unwrap_or(Some(LossReason::ShutDown))
    }

    /// Calls `tell` once when the lock is lost, or soon if it is already; not if the guard is released, dropped or leaked before.
    ///
    /// It is called on the client's thread, which renews all other locks: set a flag, close a socket, but do not wait there.
    pub fn on_lost(&mut self, tell: impl FnOnce(LossReason) + Send + 'static) {
        let lost = self.inner.lost();
        let told = async move {
            if let Some(reason) = lost.await {
                tell(reason);
            }
        };
        self.tell.spawn_on(told, self.flock.inner.engine().runtime());
    }

    /// Renews the lease now; see [`crate::Guard::renew`].
    ///
    /// # Errors
    /// See [`crate::Guard::renew`].
    ///
    /// # Panics
    /// In an asynchronous task.
    pub fn renew(&self) -> Result<(), HoldError> {
        self.flock.wait_for(self.inner.renew())
    }

    /// From exclusive to shared, at once; see [`crate::Guard::downgrade`].
    ///
    /// # Errors
    /// See [`crate::Guard::downgrade`].
    ///
    /// # Panics
    /// In an asynchronous task.
    pub fn downgrade(&mut self) -> Result<(), HoldError> {
        self.flock.wait_for(self.inner.downgrade())
    }

    /// From shared to exclusive, if this is the only holder; see [`crate::Guard::upgrade`].
    ///
    /// # Errors
    /// See [`crate::Guard::upgrade`].
    ///
    /// # Panics
    /// In an asynchronous task.
    pub fn upgrade(&mut self) -> Result<(), HoldError> {
        self.flock.wait_for(self.inner.upgrade())
    }

    /// Gives the lock back and waits for the server's answer; see [`crate::Guard::release`]. With transactions: commit first.
    ///
    /// # Errors
    /// See [`crate::Guard::release`].
    ///
    /// # Panics
    /// In an asynchronous task.
    pub fn release(self) -> Result<Released, HoldError> {
        let Self { tell, inner, flock } = self;
        drop(tell);
        flock.wait_for(inner.release())
    }

    /// Lets go of the guard but not of the lock; see [`crate::Guard::leak`].
    pub fn leak(self) -> Token {
        self.inner.leak()
    }

    /// Why it is not held any more, if it is not.
    fn loss(&self) -> Option<LossReason> {
        self.flock.wait_for(self.inner.watch(async {})).err()
    }
}
