//! How a lock is asked for: [`Lock`], and [`LockAll`] for several at once.

use std::collections::BTreeMap;
use std::future::{Future, IntoFuture};
use std::num::NonZeroU32;
use std::pin::Pin;
use std::time::Duration;

use flock_core::request::Limits;
use flock_core::{Mode, Token};

use crate::acknowledgement::Acknowledgement;
use crate::acquire::{self, Patience, Request};
use crate::client::Flock;
use crate::clock;
use crate::error::{AcquireError, LossReason, RunError};
use crate::guard::{Guard, GuardSet, Released};
use crate::observe::Acquisition;

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
/// What it can be told, in any order: how to hold it ([`shared`](Lock::shared), [`limit`](Lock::limit),
/// [`reentrant`](Lock::reentrant)), how long ([`lease`](Lock::lease), [`max_hold`](Lock::max_hold), [`keep_alive`](Lock::keep_alive),
/// [`session`](Lock::session)), how to wait ([`wait`](Lock::wait), [`wait_mode`](Lock::wait_mode)), and what else is to be true
/// ([`floor`](Lock::floor), [`acknowledged_by`](Lock::acknowledged_by)). What does not go together is refused as [`AcquireError::Config`].
///
/// # Errors
/// Awaiting it fails as [`Lock::acquire`] does.
///
/// # Cancel safety
/// Dropping the future at any point leaves neither a hold nor a place in the queue: both are given back in the background.
///
/// One that is neither dropped nor polled any more, because its thread is blocked or it was put aside, has what its first request has got
/// it: a place in the queue, or the lock, for [`Builder::claim`](crate::Builder::claim) only, as it may never be polled again. If that
/// request was lost with its connection, it has no place until it is polled. Once polled after the answer it waits on the client's thread,
/// and keeps what it gets there until it is dropped. (A release or a conversion that is polled no more is carried out all the same, at most
/// two response timeouts later.)
#[derive(Clone, Debug)]
#[must_use = "nothing happens until it is awaited"]
pub struct Lock {
    flock: Flock,
    request: Box<Request>,
}

impl Lock {
    pub(crate) fn new(flock: Flock, key: &[u8]) -> Self {
        let request = Box::new(Request {
            key: key.into(),
            reentrant: None,
            lease: flock.lease_default(),
            mode: Mode::Exclusive,
            limit: None,
            label: None,
            floor: None,
            keep_alive: true,
            max_hold: None,
            session: None,
            acknowledgement: None,
            patience: Patience::Forever,
            polls: false,
            has_waited: false,
        });
        Self { flock, request }
    }

    /// How long a grant lasts unless it is renewed; rounded up to whole milliseconds, at most what the server allows (24 h unless
    /// configured). The keep-alive renews it at a third, so it bounds how long others wait after this process has died. A
    /// new hold is a claim at first, for [`Builder::claim`](crate::Builder::claim), until it is confirmed a tenth of a second later.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.request.lease = lease;
        self
    }

    /// Wait for at most this long, then fail with [`AcquireError::TimedOut`]. Without it the wait has no end; zero only tries,
    /// as [`Lock::try_acquire`] does.
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

    /// As a re-entrant lock: `owner` may acquire it again while it holds it, at once, under the same token. Each acquisition is a handle
    /// of its own, and the lock is free when every handle is released, dropped, or leaked and over.
    ///
    /// The owner stands for whoever may be in the lock together: a job, a request, a task and what it calls. Its handles may be in one
    /// process or in several that know its name; take one that nobody else takes by chance, as a UUID. Who knows it is let in.
    ///
    /// ```no_run
    /// # async fn example(flock: flock_client::Flock) -> Result<(), Box<dyn std::error::Error>> {
    /// let outer = flock.lock("account:1").reentrant("transfer:77").await?;
    /// let inner = flock.lock("account:1").reentrant("transfer:77").await?; // in a function that knows nothing of `outer`
    /// assert_eq!(outer.token(), inner.token());
    /// let _ = inner.release().await?; // still held
    /// let _ = outer.release().await?; // free
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// * The lease lasts as long as the handle wants that wants it longest. A hold that is lost is lost for all its handles: those of
    ///   the client that acquired last are told, others learn it by their next renewal, at a third of the lease.
    /// * What a process that died held of it is given back by nobody: the lock is then free when the lease is over that the last of the
    ///   others asked for.
    /// * Requests of one owner that wait at the same time share one place in the queue; the newest says for how long.
    /// * A request that reaches the server when its connection is dead costs the lease and not [`Builder::claim`](crate::Builder::claim).
    /// * All handles of one owner are to come from this crate: a bare `FLOCK.RENEW` or a `CLAIM` in the owner's name cuts their lease.
    /// * It is exclusive, and has no session: [`Lock::shared`], [`Lock::limit`] and [`Lock::session`] are refused beside it, and so are
    ///   conversions. At most 64 handles at once, unless the server is configured otherwise.
    pub fn reentrant(mut self, owner: impl AsRef<[u8]>) -> Self {
        self.request.reentrant = Some(owner.as_ref().into());
        self
    }

    /// A text of up to 256 bytes that `FLOCK.INFO` and [`Flock::info`] show beside the hold: who, where, why.
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
    /// may have been closed already. Not through a connection pooler, and not in a cluster, where it is refused: a slot that moves leaves
    /// the connection behind.
    pub fn session(mut self, grace: Duration) -> Self {
        self.request.session = Some(grace);
        self
    }

    /// The grant counts only if at least this many replicas acknowledge within this time that they have it (`WAIT` of the server); else
    /// the acquisition fails with [`AcquireError::NotDurable`], and the lock is given back. If it is lost meanwhile, it fails with
    /// [`AcquireError::Lost`].
    ///
    /// A grant that a replica has is not lost by a failover *to that replica*. Only if the replicas that may be promoted are among those
    /// that acknowledged is no failover able to grant twice: with `n` replicas, any of which may be promoted, ask for `n`. It is about the
    /// grant, not about an upgrade later on. The token covers the rest, if the storage checks it.
    ///
    /// `within` counts from the grant, beside [`Lock::wait`]; the server's answer may come a response timeout later. It costs the round trip from the
    /// server to its replicas and one from here, over a connection that no renewal waits behind. Not for re-entrant locks.
    pub fn acknowledged_by(mut self, replicas: u32, within: Duration) -> Self {
        self.request.acknowledgement = Some(Acknowledgement { replicas, within });
        self
    }

    /// Acquires the lock: the same as awaiting the request itself.
    ///
    /// # Errors
    /// [`AcquireError::TimedOut`] if the wait was over before its turn came, [`AcquireError::Unavailable`] if there was no answer by then;
    /// without a bound it waits for a server as it waits for its turn. [`AcquireError::Server`] if the server refused,
    /// [`AcquireError::Config`] for a value that makes no sense, [`AcquireError::NotDurable`] and [`AcquireError::Lost`] as
    /// [`Lock::acknowledged_by`] says, [`AcquireError::ShutDown`] after [`Flock::shutdown`].
    ///
    /// # Cancel safety
    /// As [`Lock`].
    pub async fn acquire(self) -> Result<Guard, AcquireError> {
        self.await
    }

    /// Acquires the lock if nobody is in the way; `None` if somebody holds it or waits for it. One round trip; at a
    /// server that says nothing, [`Builder::operation_timeout`](crate::Builder::operation_timeout) (5 s).
    ///
    /// # Errors
    /// [`AcquireError::Unavailable`] if the server gave no answer within the operation timeout; the others as [`Lock::acquire`].
    ///
    /// # Cancel safety
    /// As [`Lock`].
    pub async fn try_acquire(mut self) -> Result<Option<Guard>, AcquireError> {
        self.request.patience = Patience::Try;
        self.ask().await
    }

    /// Acquires the lock, runs `work` under it, and releases it after that.
    ///
    /// `work` gets the fencing token, for the storage to check. If the lock is lost, `work` is dropped at its next await; a
    /// process that was stopped finds that out before it goes on. What happens between two awaits is not interrupted, and an await that is
    /// ready at once is none.
    ///
    /// # Errors
    /// [`RunError::Acquire`] if `work` was not begun, [`RunError::Lost`] if it was not finished under the lock: also if it had ended, and
    /// only the release found the hold gone. What it returned is dropped then; where that is needed, acquire, [`Guard::watch`] and release
    /// by hand. A release without an answer is no error: it goes on in the background.
    ///
    /// # Cancel safety
    /// Dropping the future drops `work` and releases the lock in the background.
    pub async fn run<T, W>(self, work: impl FnOnce(Token) -> W) -> Result<T, RunError>
    where
        W: Future<Output = T>,
    {
        let guard = self.await?;
        let value = guard.watch(work(guard.token())).await.map_err(RunError::Lost)?;
        match guard.release().await {
            // Some of what `work` did was done after the lock.
            Ok(Released::AlreadyLost) => Err(RunError::Lost(LossReason::Gone)),
            // An answer that does not come is waited for in the background.
            Ok(Released::Released) | Err(_) => Ok(value),
        }
    }

    async fn ask(mut self) -> Result<Option<Guard>, AcquireError> {
        let engine = self.flock.engine();
        self.request.polls |= !engine.listens;
        let acquisition = Acquisition::begin(&engine.clock, &self.request.key);
        if let Err(error) = check(&self.request, engine.grace_min) {
            acquisition.failed(&error);
            return Err(error);
        }
        let held = engine.thread.ask(acquire::acquire(engine.clone(), self.request, acquisition)).await;
        let held = held.map_err(|_| AcquireError::ShutDown)??;
        Ok(held.map(|held| Guard::new(held, self.flock)))
    }
}

/// What is certainly wrong costs no round trip.
fn check(request: &Request, grace_min: Option<Duration>) -> Result<(), AcquireError> {
    let wrong = |what| Err(AcquireError::Config(what));
    let durations = [
        ("the lease", Some(request.lease)),
        ("max_hold", request.max_hold),
        ("the session's grace", request.session),
        ("the time to be acknowledged in", request.acknowledgement.map(|asked| asked.within)),
    ];
    for (name, duration) in durations {
        if let Some(Err(what)) = duration.map(|duration| clock::check(name, duration)) {
            return wrong(what.into());
        }
    }
    match (request.session, grace_min) {
        (Some(_), None) => {
            return wrong("a cluster has no sessions: a slot that moves leaves the connection behind".into());
        }
        (Some(grace), Some(min)) if grace < min => {
            return wrong(
                format!("the session's grace is below {min:?}: two heartbeats and a response timeout").into(),
            );
        }
        _ => {}
    }
    if request.acknowledgement.is_some_and(|asked| asked.replicas == 0) {
        return wrong("acknowledged by no replicas".into());
    }
    if let Some(owner) = &request.reentrant {
        let max = Limits::DEFAULT.owner_max_bytes;
        if owner.is_empty() || owner.len() > max {
            return wrong(format!("the owner has no bytes, or more than {max}").into());
        }
        if request.mode == Mode::Shared {
            return wrong("a re-entrant lock is exclusive".into());
        }
        if request.acknowledgement.is_some() {
            // Extending its lease may write nothing, and WAIT answers for writes.
            return wrong("a re-entrant lock is not acknowledged by replicas".into());
        }
        if request.session.is_some() {
            return wrong("a re-entrant lock has no session: its handles may be on several connections".into());
        }
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
        Box::pin(async { self.ask().await?.ok_or(AcquireError::TimedOut) })
    }
}

/// Several locks that are about to be asked for, all or nothing. Awaiting it acquires all, into a [`GuardSet`]; so do
/// [`LockAll::acquire`] and [`LockAll::try_acquire`].
///
/// The keys are asked for in sorted order, one after the other, so that two callers cannot wait for each other. One deadline counts
/// for all. What is held already is kept alive while the next is waited for. If one cannot be had, or one is lost meanwhile, those
/// that were acquired are released.
///
/// ```no_run
/// # async fn example(flock: flock_client::Flock) -> Result<(), flock_client::AcquireError> {
/// let transfer = flock.lock_all(["account:1", "account:2"]).and_shared(["tariff"]);
/// let guards = transfer.wait(std::time::Duration::from_secs(3)).await?;
/// # drop(guards);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Awaiting it fails as [`Lock::acquire`] does, and with [`AcquireError::Lost`] if one was lost before the last was acquired.
///
/// # Cancel safety
/// Dropping the future releases everything in the background.
#[derive(Clone, Debug)]
#[must_use = "nothing happens until it is awaited"]
pub struct LockAll {
    /// What counts for each: all but the key, the mode and the limit.
    template: Lock,
    parts: BTreeMap<Box<[u8]>, Share>,
}

/// How one of several locks is to be held. A key that is named twice is locked once, in the way that admits fewer others: so the
/// order of these is that of how much they admit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Share {
    Exclusive,
    Limited(NonZeroU32),
    Shared,
}

impl LockAll {
    pub(crate) fn new(flock: Flock, keys: impl IntoIterator<Item = impl AsRef<[u8]>>) -> Self {
        Self { template: Lock::new(flock, b""), parts: BTreeMap::new() }.and(keys, Share::Exclusive)
    }

    /// These too, shared with other shared holders.
    pub fn and_shared(self, keys: impl IntoIterator<Item = impl AsRef<[u8]>>) -> Self {
        self.and(keys, Share::Shared)
    }

    /// These too, each shared by at most `holders`; see [`Lock::limit`].
    pub fn and_limited(self, keys: impl IntoIterator<Item = impl AsRef<[u8]>>, holders: NonZeroU32) -> Self {
        self.and(keys, Share::Limited(holders))
    }

    fn and(mut self, keys: impl IntoIterator<Item = impl AsRef<[u8]>>, share: Share) -> Self {
        for key in keys {
            let part = self.parts.entry(key.as_ref().into()).or_insert(share);
            *part = share.min(*part);
        }
        self
    }

    /// All that were named so far are shared, whatever was said before.
    pub fn shared(mut self) -> Self {
        self.parts.values_mut().for_each(|share| *share = Share::Shared);
        self
    }

    /// As [`Lock::lease`], for each.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.template = self.template.lease(lease);
        self
    }

    /// Wait for at most this long, for all of them together, then fail with [`AcquireError::TimedOut`]. Zero only tries.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.template = self.template.wait(wait);
        self
    }

    /// As [`Lock::label`], for each.
    pub fn label(mut self, label: impl AsRef<[u8]>) -> Self {
        self.template = self.template.label(label);
        self
    }

    /// As [`Lock::max_hold`], for each, counted from its own grant.
    pub fn max_hold(mut self, most: Duration) -> Self {
        self.template = self.template.max_hold(most);
        self
    }

    /// As [`Lock::acknowledged_by`], for each.
    pub fn acknowledged_by(mut self, replicas: u32, within: Duration) -> Self {
        self.template = self.template.acknowledged_by(replicas, within);
        self
    }

    /// As [`Lock::session`], for each.
    pub fn session(mut self, grace: Duration) -> Self {
        self.template = self.template.session(grace);
        self
    }

    /// Acquires them all: the same as awaiting the request itself.
    ///
    /// # Errors
    /// As [`LockAll`].
    ///
    /// # Cancel safety
    /// As [`LockAll`].
    pub async fn acquire(self) -> Result<GuardSet, AcquireError> {
        self.await
    }

    /// Acquires them if nobody is in the way of any; `None` if somebody is. One round trip for each.
    ///
    /// # Errors
    /// As [`Lock::try_acquire`].
    ///
    /// # Cancel safety
    /// As [`LockAll`].
    pub async fn try_acquire(mut self) -> Result<Option<GuardSet>, AcquireError> {
        self.template.request.patience = Patience::Try;
        self.ask().await
    }

    async fn ask(self) -> Result<Option<GuardSet>, AcquireError> {
        let engine = self.template.flock.engine().clone();
        let deadline = match self.template.request.patience {
            Patience::AtMost(wait) => Some(engine.after(wait)),
            Patience::Try | Patience::Forever => None,
        };
        let mut set = GuardSet::new(Vec::with_capacity(self.parts.len()));
        let mut has_waited = false;
        for (key, share) in self.parts {
            let mut lock = self.template.clone();
            lock.request.key = key;
            lock.request.has_waited = has_waited;
            (lock.request.mode, lock.request.limit) = match share {
                Share::Exclusive => (Mode::Exclusive, None),
                Share::Limited(holders) => (Mode::Shared, Some(holders)),
                Share::Shared => (Mode::Shared, None),
            };
            if let Some(deadline) = deadline {
                let left = engine.clock.until(deadline);
                if left.is_zero() {
                    return Err(AcquireError::TimedOut);
                }
                lock.request.patience = Patience::AtMost(left);
            }
            let acquired = set.keep(lock.ask()).await;
            let acquired =
                acquired.map_err(|(lost, reason)| AcquireError::Lost { key: lost.key().to_vec(), reason })?;
            match acquired? {
                Some(guard) => {
                    has_waited |= guard.has_waited();
                    set.push(guard);
                }
                None => return Ok(None),
            }
        }
        Ok(Some(set))
    }
}

impl IntoFuture for LockAll {
    type Output = Result<GuardSet, AcquireError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        // `None` is for tries only.
        Box::pin(async { self.ask().await?.ok_or(AcquireError::TimedOut) })
    }
}
