//! How a lock is asked for: [`Lock`], and [`LockAll`] for several at once.

use std::future::{Future, IntoFuture};
use std::num::NonZeroU32;
use std::pin::Pin;
use std::time::Duration;

use flock_core::request::Limits;
use flock_core::{Mode, Token};

use crate::acquire::{self, Patience, Request};
use crate::client::Flock;
use crate::error::{AcquireError, RunError};
use crate::guard::{Guard, GuardSet};

/// How a client learns that its turn has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum WaitMode {
    /// The server queues the request, in order, and publishes the grant. The default.
    #[default]
    Push,
    /// The client tries again and again, with random delays up to a second. There is no order, and a loss is noticed by
    /// the next renewal only.
    Poll,
}

/// A lock that is about to be asked for. Awaiting it acquires; so does [`Lock::try_acquire`] or [`Lock::run`].
///
/// What it can be told, in any order: how to hold it ([`shared`](Lock::shared), [`limit`](Lock::limit)), how long
/// ([`lease`](Lock::lease), [`max_hold`](Lock::max_hold), [`keep_alive`](Lock::keep_alive), [`session`](Lock::session)), and how to wait
/// ([`wait`](Lock::wait), [`wait_mode`](Lock::wait_mode)).
///
/// # Cancel safety
/// Dropping the future at any point leaves neither a hold nor a place in the queue: both are given back in the background.
#[derive(Clone, Debug)]
#[must_use = "nothing happens until it is awaited"]
pub struct Lock {
    flock: Flock,
    request: Request,
}

impl Lock {
    pub(crate) fn new(flock: Flock, key: &[u8]) -> Self {
        let request = Request {
            key: key.into(),
            lease: flock.lease_default(),
            mode: Mode::Exclusive,
            limit: None,
            label: None,
            floor: None,
            keep_alive: true,
            max_hold: None,
            session: None,
            patience: Patience::Forever,
            polls: false,
        };
        Self { flock, request }
    }

    /// How long a grant lasts unless it is renewed; rounded up to whole milliseconds, at most what the server allows (24 h unless
    /// configured). The keep-alive renews it at a third, so it bounds how long others wait after this process has died.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.request.lease = lease;
        self
    }

    /// Wait for at most this long, then fail with [`AcquireError::TimedOut`]. Without it the wait has no end; zero only tries.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.request.patience = if wait.is_zero() { Patience::Try } else { Patience::AtMost(wait) };
        self
    }

    /// How to learn that the turn has come; see [`WaitMode`].
    pub fn wait_mode(mut self, mode: WaitMode) -> Self {
        self.request.polls = mode == WaitMode::Poll;
        self
    }

    /// Together with other shared holders. A waiting exclusive request goes before later shared ones.
    pub fn shared(mut self) -> Self {
        self.request.mode = Mode::Shared;
        self
    }

    /// Shared by at most `holders`: a counting semaphore. All who use the lock should give the same number.
    pub fn limit(mut self, holders: NonZeroU32) -> Self {
        self.request.mode = Mode::Shared;
        self.request.limit = Some(holders);
        self
    }

    /// A text of up to 256 bytes that `FLOCK.INFO` shows beside the hold: who, where, why.
    pub fn label(mut self, label: impl AsRef<[u8]>) -> Self {
        self.request.label = Some(label.as_ref().into());
        self
    }

    /// The token will be higher than this one: for a storage that has seen a higher token than the server hands out.
    pub fn floor(mut self, token: Token) -> Self {
        self.request.floor = Some(token);
        self
    }

    /// Whether the lease is renewed in the background (the default). Without it the hold is lost after `lease`, unless
    /// [`Guard::renew`] is called in time.
    pub fn keep_alive(mut self, keep_alive: bool) -> Self {
        self.request.keep_alive = keep_alive;
        self
    }

    /// The hold is lost after this long, renewed or not: a bound for work that hangs.
    pub fn max_hold(mut self, most: Duration) -> Self {
        self.request.max_hold = Some(most);
        self
    }

    /// The hold lives on the client's connection: when that closes, the server cuts the lease to at most `grace`. So the lock of a
    /// process that dies is free soon, however long its lease is. The keep-alive renews over its next connection at once; if that takes
    /// longer than the grace, the hold is lost as [`Disconnected`](crate::LossReason::Disconnected).
    ///
    /// `grace` is at least two heartbeats and a response timeout (2.5 s with the defaults): a connection that is silent for that long
    /// may have been closed already. Not through a connection pooler.
    pub fn session(mut self, grace: Duration) -> Self {
        self.request.session = Some(grace);
        self
    }

    /// Acquires the lock if nobody is in the way; `None` if somebody holds it or waits for it. One round trip.
    ///
    /// # Errors
    /// [`AcquireError::Unavailable`] if the server gave no answer within the operation timeout, [`AcquireError::Server`] if it
    /// refused, [`AcquireError::Config`] for a value that makes no sense.
    ///
    /// # Cancel safety
    /// As [`Lock`].
    pub async fn try_acquire(mut self) -> Result<Option<Guard>, AcquireError> {
        self.request.patience = Patience::Try;
        self.acquire().await
    }

    /// Acquires the lock, runs `work` under it, and releases it after that.
    ///
    /// `work` gets the fencing token, for the storage to check. If the lock is lost, `work` is dropped at its next await; a
    /// process that was stopped finds that out before it goes on. What happens between two awaits is not interrupted.
    ///
    /// # Errors
    /// [`RunError::Acquire`] if `work` was not begun, [`RunError::Lost`] if it was not finished under the lock.
    ///
    /// # Cancel safety
    /// Dropping the future drops `work` and releases the lock in the background.
    pub async fn run<T, W>(self, work: impl FnOnce(Token) -> W) -> Result<T, RunError>
    where
        W: Future<Output = T>,
    {
        let guard = self.await?;
        let value = guard.watch(work(guard.token())).await.map_err(RunError::Lost)?;
        // What `work` did was done under the lock. An answer that does not come is waited for in the background.
        let _ = guard.release().await;
        Ok(value)
    }

    async fn acquire(mut self) -> Result<Option<Guard>, AcquireError> {
        self.request.polls |= !self.flock.engine().listens;
        let engine = self.flock.engine();
        check(&self.request, engine.grace_min)?;
        let held = engine.ask(acquire::acquire(engine.clone(), self.request)).await;
        let held = held.map_err(|_| AcquireError::ShutDown)??;
        Ok(held.map(|held| Guard::new(held, self.flock)))
    }
}

/// What is certainly wrong costs no round trip.
fn check(request: &Request, grace_min: Duration) -> Result<(), AcquireError> {
    let wrong = |what| Err(AcquireError::Config(what));
    if request.lease.is_zero() {
        return wrong("the lease is zero".into());
    }
    if request.max_hold.is_some_and(|most| most.is_zero()) {
        return wrong("max_hold is zero".into());
    }
    if request.session.is_some_and(|grace| grace < grace_min) {
        return wrong(
            format!("the session's grace is below {grace_min:?}: two heartbeats and a response timeout").into(),
        );
    }
    let max = Limits::DEFAULT.label_max_bytes;
    match &request.label {
        Some(label) if label.len() > max => wrong(format!("the label is longer than {max} bytes").into()),
        _ => Ok(()),
    }
}

impl IntoFuture for Lock {
    type Output = Result<Guard, AcquireError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        // `None` is for tries only.
        Box::pin(async { self.acquire().await?.ok_or(AcquireError::TimedOut) })
    }
}

/// Several locks that are about to be asked for, all or nothing. Awaiting it acquires.
///
/// The keys are asked for in sorted order, one after the other, so that two callers cannot wait for each other. One deadline counts
/// for all. If one cannot be had, those that were are released.
///
/// # Cancel safety
/// Dropping the future releases everything in the background.
#[derive(Clone, Debug)]
#[must_use = "nothing happens until it is awaited"]
pub struct LockAll {
    template: Lock,
    keys: Vec<Vec<u8>>,
}

impl LockAll {
    pub(crate) fn new(flock: Flock, keys: impl IntoIterator<Item = impl AsRef<[u8]>>) -> Self {
        let mut keys: Vec<_> = keys.into_iter().map(|key| key.as_ref().to_vec()).collect();
        keys.sort_unstable();
        keys.dedup();
        Self { template: Lock::new(flock, b""), keys }
    }

    /// As [`Lock::lease`], for each.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.template = self.template.lease(lease);
        self
    }

    /// Wait for at most this long, for all of them together.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.template = self.template.wait(wait);
        self
    }

    /// As [`Lock::shared`], for each.
    pub fn shared(mut self) -> Self {
        self.template = self.template.shared();
        self
    }

    /// As [`Lock::label`], for each.
    pub fn label(mut self, label: impl AsRef<[u8]>) -> Self {
        self.template = self.template.label(label);
        self
    }

    async fn acquire(self) -> Result<GuardSet, AcquireError> {
        let begun = std::time::Instant::now();
        let mut guards = Vec::with_capacity(self.keys.len());
        for key in self.keys {
            let mut lock = self.template.clone();
            lock.request.key = key.into();
            if let Patience::AtMost(wait) = lock.request.patience {
                lock = lock.wait(wait.saturating_sub(begun.elapsed()));
            }
            guards.push(lock.await?);
        }
        Ok(GuardSet::new(guards))
    }
}

impl IntoFuture for LockAll {
    type Output = Result<GuardSet, AcquireError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.acquire())
    }
}
