//! A lock that is held: [`Guard`], and [`GuardSet`] for several.

use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use flock_core::{Acquire, Millis, Mode, Token};

use crate::acquire::Held;
use crate::client::Flock;
use crate::engine::Engine;
use crate::error::{HoldError, LossReason};
use crate::hold::Hold;
use crate::in_place::leave_the_caller;
use crate::keepalive;
use crate::retry::Tries;
use crate::wire::{self, Acquired};

/// How giving a lock back ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a lock that was lost before may have been another's meanwhile"]
pub enum Released {
    /// It was held until now.
    Released,
    /// It had been lost before; somebody else may have held it meanwhile.
    AlreadyLost,
}

/// A lock that is held, until this is released, dropped, or the lock is lost.
///
/// Dropping it releases in the background, wherever it is dropped: in a task, on a plain thread, while a runtime shuts down.
/// [`Guard::release`] waits for the server's answer.
///
/// *A guard is a belief.* The lock may be lost at any time: a lease that could not be renewed, an administrator, a server that died.
/// [`Guard::lost`] and [`Guard::is_valid`] tell. The belief ends before the server's *lease* does; what ends a hold earlier (a revocation,
/// a deleted key, a flush, a failover) is told when it has happened. And between the look and the act time passes. Only the storage that
/// checks [`Guard::token`], from before the first read on, closes these gaps.
#[must_use = "dropping a guard releases the lock"]
pub struct Guard {
    held: Held,
    /// Keeps the client's thread alive.
    flock: Flock,
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("key", &format_args!("{}", self.key().escape_ascii()))
            .field("token", &self.token())
            .field("valid", &self.is_valid())
            .finish_non_exhaustive()
    }
}

impl Guard {
    pub(crate) fn new(held: Held, flock: Flock) -> Self {
        Self { held, flock }
    }

    fn hold(&self) -> &Arc<Hold> {
        &self.held.hold
    }

    fn engine(&self) -> &Arc<Engine> {
        &self.held.engine
    }

    /// Whether others held the lock when it was asked for.
    pub(crate) fn has_waited(&self) -> bool {
        self.held.has_waited
    }

    /// The lock's name.
    #[must_use]
    pub fn key(&self) -> &[u8] {
        &self.hold().name.key
    }

    /// The fencing token: higher than that of every earlier holder. Send it with every write; the storage accepts it if it is
    /// greater than the highest one seen, or equal. An upgrade changes it. Keep the guard too: `lock.await?.token()` drops it, and the lock is
    /// free again.
    #[must_use]
    pub fn token(&self) -> Token {
        self.hold().token()
    }

    /// How it is held, by the last answer of the server: a conversion changes it.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.hold().mode()
    }

    /// The owner this hold has at the server: for `FLOCK.RELEASE` by other means, after [`Guard::leak`]. That of a re-entrant handle is
    /// the one given to [`Lock::reentrant`](crate::Lock::reentrant).
    #[must_use]
    pub fn owner(&self) -> &[u8] {
        &self.hold().name.owner
    }

    /// Whether the lock is held, as far as can be known without asking: no I/O, cheap enough for every step of the work. False
    /// before the server's lease ends, also in a process that was stopped or starved, and for a suspended machine. What ends the hold
    /// before its lease is known when the server's message is here; to a client that hears none ([`WaitMode::Poll`](crate::WaitMode::Poll),
    /// [`Builder::without_pubsub`](crate::Builder::without_pubsub)) by the next renewal, at a third of the lease.
    /// What is lost while there is no connection is known about a tenth of a second after there is one again: then every hold is asked after.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.hold().is_valid(self.engine().clock.now())
    }

    /// For how long it is certainly held if it is never renewed again; zero once it is lost. Of a new hold that is what is left of its
    /// claim ([`Builder::claim`](crate::Builder::claim), 5 s), until it is confirmed a tenth of a second later: then it is the lease.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        if self.hold().is_kept() { self.engine().clock.until(self.hold().believed_until()) } else { Duration::ZERO }
    }

    /// Ends when the lock is lost, with the reason; with `None` when it was released, dropped or leaked before that.
    ///
    /// The future borrows nothing, so it goes into a `select!` beside work that uses the guard. It keeps the client alive. Each time it
    /// is polled it looks at the clock: in a process that was stopped for longer than the lease it is ready before anybody has told. So it
    /// comes first, and `biased` keeps it first; or else the work may go on before the loss is seen. [`Guard::watch`] needs no such care, and
    /// looks again when the work is done: prefer it where it fits.
    ///
    /// ```no_run
    /// # async fn work(_token: flock_client::Token) {}
    /// # async fn example(guard: flock_client::Guard) {
    /// tokio::select! {
    ///     biased;
    ///     Some(reason) = guard.lost() => println!("stopped: {reason}"),
    ///     () = work(guard.token()) => {}
    /// }
    /// # }
    /// ```
    ///
    /// # Cancel safety
    /// Dropping it has no effect.
    pub fn lost(&self) -> impl Future<Output = Option<LossReason>> + Send + use<> {
        let (hold, flock) = (Arc::clone(self.hold()), self.flock.clone());
        async move {
            let mut told = pin!(hold.lost());
            let reason = std::future::poll_fn(|context| {
                // One that has ended was given back, whatever the clock says.
                match hold.loss(flock.engine().clock.now()).filter(|_| hold.is_kept()) {
                    Some(reason) => {
                        flock.engine().lose(&hold, reason); // for good, whatever an answer that is under way says
                        Poll::Ready(Some(reason))
                    }
                    None => told.as_mut().poll(context),
                }
            });
            let reason = reason.await;
            drop(flock); // until then the thread must live that tells
            reason
        }
    }

    /// Runs `work` until it is done, or until the lock is lost: then `work` is dropped. Each time `work` is polled the belief is
    /// checked, so that nothing is done under a lock that was lost while this process did not run.
    ///
    /// # Errors
    /// The reason of the loss, also if `work` ended only after it.
    ///
    /// # Cancel safety
    /// Dropping the future drops `work`; the guard is as before.
    pub async fn watch<T>(&self, work: impl Future<Output = T>) -> Result<T, LossReason> {
        watch(work, self.lost_while_here(), || self.loss()).await
    }

    /// As [`Guard::lost`]: while it is borrowed, nobody gives it back.
    async fn lost_while_here(&self) -> LossReason {
        match self.lost().await {
            Some(reason) => reason,
            None => std::future::pending().await,
        }
    }

    fn loss(&self) -> Option<LossReason> {
        self.hold().loss(self.engine().clock.now())
    }

    /// Renews the lease now: it lasts its full length from here. Only needed without keep-alive.
    ///
    /// # Errors
    /// [`HoldError::Lost`] if the lock is lost, [`HoldError::Unknown`] if no answer came within the operation timeout,
    /// [`HoldError::Server`] if the server refused.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the lease renewed or not.
    pub async fn renew(&self) -> Result<(), HoldError> {
        let (engine, hold) = (Arc::clone(self.engine()), Arc::clone(self.hold()));
        self.engine().thread.ask(renew(engine, hold)).await.map_err(|_| HoldError::Lost(LossReason::ShutDown))?
    }

    /// Changes how the lock is held: [`Guard::downgrade`] for [`Mode::Shared`], [`Guard::upgrade`] for [`Mode::Exclusive`]. To the
    /// mode that it has already, it changes nothing.
    ///
    /// A conversion never waits for others, so two holders cannot wait for each other. If it fails, the hold stays as it was, in its
    /// mode and under its token: give it back before waiting for the lock in the other mode.
    ///
    /// # Errors
    /// [`HoldError::Refused`] if others hold the lock shared, [`HoldError::Lost`] if the lock is lost, [`HoldError::Unknown`] if no
    /// answer came: then calling it again settles it. [`HoldError::Config`] for a re-entrant handle: others rely on its mode.
    /// [`HoldError::Server`] if the server refused.
    ///
    /// # Cancel safety
    /// The conversion goes on in the background if the future is dropped or not polled any more, and [`Guard::token`] may then change by
    /// itself.
    pub async fn convert(&mut self, mode: Mode) -> Result<(), HoldError> {
        let (engine, hold) = (Arc::clone(self.engine()), Arc::clone(self.hold()));
        // Half a conversion is none.
        let converted = self.engine().thread.carry_out(convert(engine, hold, mode)).await;
        converted.unwrap_or(Err(HoldError::Lost(LossReason::ShutDown)))
    }

    /// From exclusive to shared, at once; waiting readers up to the next writer are let in. The token stays.
    ///
    /// # Errors
    /// As [`Guard::convert`]; it is never [`HoldError::Refused`].
    ///
    /// # Cancel safety
    /// As [`Guard::convert`].
    pub async fn downgrade(&mut self) -> Result<(), HoldError> {
        self.convert(Mode::Shared).await
    }

    /// From shared to exclusive, if this is the only holder: a try that never waits, and so cannot deadlock. The token is a new,
    /// higher one. What was read while shared is not fenced: store the new token, and read again before you write.
    ///
    /// # Errors
    /// As [`Guard::convert`]: [`HoldError::Refused`] if others hold the lock shared.
    ///
    /// # Cancel safety
    /// As [`Guard::convert`].
    pub async fn upgrade(&mut self) -> Result<(), HoldError> {
        self.convert(Mode::Exclusive).await
    }

    /// Gives the lock back and waits for the server's answer. With transactions: commit first, then release. A re-entrant handle gives
    /// back its share, and the last one the lock.
    ///
    /// # Errors
    /// [`HoldError::Unknown`] if no answer came within the operation timeout, [`HoldError::Server`] if the server refused. The
    /// lock is given back in the background all the same; at the latest it is free when its lease is over.
    ///
    /// # Cancel safety
    /// The lock is given back though the future is dropped, or put aside after its first poll.
    pub async fn release(self) -> Result<Released, HoldError> {
        let was_lost = self.loss().is_some();
        let engine = self.engine();
        let shut_down = || HoldError::Unknown("the client is shut down".into());
        let errand = engine.end(self.hold());
        if was_lost {
            if let Some(errand) = errand {
                engine.give_back(errand);
            }
            return Ok(Released::AlreadyLost);
        }
        let errand = errand.ok_or_else(shut_down)?;
        match engine.thread.carry_out(Arc::clone(engine).given_back(errand)).await.map_err(|_| shut_down())?? {
            true => Ok(Released::Released),
            false => Ok(Released::AlreadyLost),
        }
    }

    /// Lets go of the guard but not of the lock: it is renewed no more, and stays held until its lease is over or somebody
    /// releases it with its owner ([`Guard::owner`]) and the token that is returned.
    pub fn leak(self) -> Token {
        let hold = self.hold();
        let counted = self.engine().errands.add();
        if hold.end() {
            hold.holding.leaked(hold.is_lost());
            // Known until its lease is over: a message of its grant that comes late is not one that nobody waits for.
            let (engine, number) = (self.engine().clone(), hold.name.number);
            let lasts = crate::clock::duration(hold.keeping.lease);
            let runtime = engine.runtime().clone();
            // What is only claimed ends with the claim: it is confirmed first, and the client's end waits for that.
            let unconfirmed = (!hold.is_confirmed()).then(|| (Arc::clone(hold), counted));
            runtime.spawn(async move {
                if let Some((hold, counted)) = unconfirmed {
                    let _ = renew(Arc::clone(&engine), hold).await; // if not, the server has ended it, or will soon
                    drop(counted);
                }
                tokio::time::sleep(lasts).await;
                engine.parties.leave(number);
            });
        }
        hold.token()
    }
}

/// Runs `work` until it is done or something is lost, which is looked for before and after each of its steps.
async fn watch<T, L>(
    work: impl Future<Output = T>,
    lost: impl Future<Output = L>,
    loss: impl Fn() -> Option<L>,
) -> Result<T, L> {
    let (mut work, mut lost) = (pin!(work), pin!(lost));
    std::future::poll_fn(|context| {
        if let Poll::Ready(lost) = lost.as_mut().poll(context) {
            return Poll::Ready(Err(lost));
        }
        if let Some(lost) = loss() {
            return Poll::Ready(Err(lost));
        }
        let Poll::Ready(value) = work.as_mut().poll(context) else {
            return Poll::Pending;
        };
        Poll::Ready(loss().map_or(Ok(value), Err))
    })
    .await
}

/// Renews until the server has answered.
pub(crate) async fn renew(engine: Arc<Engine>, hold: Arc<Hold>) -> Result<(), HoldError> {
    let mut tries = Tries::within(engine.operation_timeout);
    loop {
        let lease = lease_now(&engine, &hold)?;
        let (token, epochs) = (hold.sure_token(), engine.nodes.epochs(&hold.name.key));
        let command = wire::renewal(&hold.name, lease, token);
        let error = match engine.call(&hold.name.key, &command, |reply| wire::renewed(&hold.name, token, reply)).await {
            Ok(answer) if answer.reply => {
                engine.renewed(&hold, lease, token, epochs, &answer);
                return Ok(());
            }
            Ok(_) => return Err(gone(&engine, &hold)),
            Err(error) if keepalive::is_not_held(&error) => return Err(gone(&engine, &hold)),
            Err(error) => error,
        };
        hold.holding.renewal_failed();
        tries.next(&engine.jitter, error).await?;
    }
}

/// The lease to ask for now, if it is still held.
fn lease_now(engine: &Engine, hold: &Hold) -> Result<Millis, HoldError> {
    let now = engine.clock.now();
    match hold.loss(now) {
        Some(reason) => Err(HoldError::Lost(reason)),
        None => hold.keeping.lease_at(now).ok_or(HoldError::Lost(LossReason::MaxHold)),
    }
}

fn gone(engine: &Engine, hold: &Arc<Hold>) -> HoldError {
    engine.lose(hold, LossReason::Gone);
    HoldError::Lost(hold.loss(engine.clock.now()).unwrap_or(LossReason::Gone))
}

/// Changes the mode, again and again until the server has answered: each retry is the same conversion.
///
/// Meanwhile the server may have a new token that we do not know: renewals and a release then name the owner only. That proves no
/// claim, so the claim is confirmed first.
async fn convert(engine: Arc<Engine>, hold: Arc<Hold>, mode: Mode) -> Result<(), HoldError> {
    if hold.name.id.is_some() {
        return Err(HoldError::Config(
            "a re-entrant hold has other handles, which rely on its mode and its token".into(),
        ));
    }
    let _one_at_a_time = match hold.conversion.try_lock() {
        Ok(alone) => alone,
        Err(_) => {
            leave_the_caller().await;
            hold.conversion.lock().await
        }
    };
    if !hold.is_confirmed() {
        renew(Arc::clone(&engine), Arc::clone(&hold)).await?;
    }
    if hold.sure_token().is_none() && mode == Mode::Shared {
        // An upgrade without an answer: only its repetition tells the token.
        match convert_to(&engine, &hold, Mode::Exclusive).await {
            Ok(()) | Err(HoldError::Refused) => {}
            Err(error) => return Err(error),
        }
    }
    convert_to(&engine, &hold, mode).await
}

async fn convert_to(engine: &Engine, hold: &Arc<Hold>, mode: Mode) -> Result<(), HoldError> {
    let mut tries = Tries::within(engine.operation_timeout);
    let token = hold.token();
    if !hold.begin_conversion() {
        return Err(gone(engine, hold)); // its future was dropped, and then the guard was
    }
    loop {
        let lease = lease_now(engine, hold)?;
        let request = Acquire { mode, convert: Some(token), ..Acquire::new(&hold.name.key, &hold.name.owner, lease) };
        let error = match engine.call(&hold.name.key, &wire::command(&request), wire::acquired).await {
            Ok(answer) => {
                let (token, mode, outcome) = match answer.reply {
                    Acquired::Granted(new) => (new, mode, Ok(())),
                    Acquired::Busy | Acquired::Queued => (token, hold.mode(), Err(HoldError::Refused)),
                };
                hold.end_conversion(token, mode);
                if outcome.is_ok() {
                    hold.holding.converted(token);
                }
                return outcome;
            }
            // The server has no hold with that token: a conversion does not revive it.
            Err(error) if keepalive::is_not_held(&error) => return Err(gone(engine, hold)),
            Err(error) => error,
        };
        if let Err(error) = tries.next(&engine.jitter, error).await {
            if !error.is_passing() {
                hold.end_conversion(token, hold.mode());
            }
            return Err(error.into());
        }
    }
}

/// Several locks that are held together; see [`Flock::lock_all`]. Dropping it releases all in the background.
#[must_use = "dropping the guards releases the locks"]
#[derive(Debug)]
pub struct GuardSet {
    guards: Vec<Guard>,
}

impl GuardSet {
    pub(crate) fn new(guards: Vec<Guard>) -> Self {
        Self { guards }
    }

    /// The guards, sorted by key.
    pub fn guards(&self) -> &[Guard] {
        &self.guards
    }

    /// The guard of one lock.
    #[must_use]
    pub fn get(&self, key: impl AsRef<[u8]>) -> Option<&Guard> {
        let found = self.guards.binary_search_by(|guard| guard.key().cmp(key.as_ref())).ok()?;
        self.guards.get(found)
    }

    /// Whether all are held; see [`Guard::is_valid`].
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.guards.iter().all(Guard::is_valid)
    }

    /// Ends when the first of them is lost; of an empty set, never.
    ///
    /// # Cancel safety
    /// Dropping it has no effect.
    pub async fn lost(&self) -> LossReason {
        self.first_lost().await.1
    }

    /// As [`Guard::watch`]: `work` is dropped when one of the locks is lost.
    ///
    /// # Errors
    /// The reason of the first loss.
    ///
    /// # Cancel safety
    /// Dropping the future drops `work`; the guards are as before.
    pub async fn watch<T>(&self, work: impl Future<Output = T>) -> Result<T, LossReason> {
        self.keep(work).await.map_err(|(_, reason)| reason)
    }

    /// As [`GuardSet::watch`]; tells which was lost.
    pub(crate) async fn keep<T>(&self, work: impl Future<Output = T>) -> Result<T, (&Guard, LossReason)> {
        let loss = || self.guards.iter().find_map(|guard| guard.loss().map(|reason| (guard, reason)));
        watch(work, self.first_lost(), loss).await
    }

    async fn first_lost(&self) -> (&Guard, LossReason) {
        let mut losses: Vec<_> = self.guards.iter().map(|guard| (guard, Box::pin(guard.lost_while_here()))).collect();
        std::future::poll_fn(|context| {
            let lost = losses.iter_mut().find_map(|(guard, lost)| match lost.as_mut().poll(context) {
                Poll::Ready(reason) => Some((*guard, reason)),
                Poll::Pending => None,
            });
            lost.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    /// Adds a guard whose key comes after those of all others.
    pub(crate) fn push(&mut self, guard: Guard) {
        self.guards.push(guard);
    }

    /// The guards, sorted by key, to be given back one by one.
    #[must_use = "dropping the guards releases the locks"]
    pub fn into_guards(self) -> Vec<Guard> {
        self.guards
    }

    /// Gives all back, the last acquired first, and waits for the answers. [`Released::AlreadyLost`] if any had been lost.
    ///
    /// # Errors
    /// The first error, as [`Guard::release`] has it; the other locks are given back all the same.
    ///
    /// # Cancel safety
    /// The locks are given back though the future is dropped, or put aside after its first poll.
    pub async fn release(self) -> Result<Released, HoldError> {
        let mut outcome = Ok(Released::Released);
        // All are begun before the first answer is waited for: a server that is silent is waited for once.
        let begin = |guard: Guard| guard.engine().runtime().clone().spawn(guard.release());
        let releases: Vec<_> = self.guards.into_iter().rev().map(begin).collect();
        for released in releases {
            let released = released.await.unwrap_or_else(|gone| Err(HoldError::Unknown(gone.into())));
            match (released, &outcome) {
                (Ok(Released::AlreadyLost), Ok(_)) => outcome = Ok(Released::AlreadyLost),
                (Err(error), Ok(_)) => outcome = Err(error),
                _ => {}
            }
        }
        outcome
    }
}

#[cfg(all(test, feature = "testing"))]
mod tests {
    use super::*;
    use crate::testing::Server;

    #[tokio::test(start_paused = true)]
    async fn stopped_process_hears_of_the_loss_before_it_works_on() {
        let server = Server::new();
        let flock = server.client().await;
        let guard = flock.lock("k").lease(Duration::from_secs(30)).await.unwrap();
        let mut lost = Box::pin(guard.lost());
        let mut poll = || {
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            lost.as_mut().poll(&mut context)
        };
        assert!(poll().is_pending());
        guard.hold().expire(); // nobody has told: the client's thread has not run yet
        assert_eq!(poll(), Poll::Ready(Some(LossReason::Expired)));
    }
}
