//! One acquisition, from its first request to a hold or to nothing.
//!
//! ```text
//!   listed as waiter ─► ACQUIRE ... QUEUE ─┬─ token ──────────────────────────────────────────► hold
//!        ▲                                 ├─ QUEUED ─► wait: granted on the channel ─► (RENEW) ─► hold
//!        │                                 │             timed out, ended, reconnected, 30 s ─┐
//!        └─────────────────────────────────┴─ no answer, or "try again" ◄────────────────────┘
//! ```
//!
//! Every request of an acquisition carries the same owner, so asking again is safe: it keeps the place, or fetches the token of a
//! grant that was not heard. Every grant is a claim at first: what the server grants to a request that arrives late, from a connection
//! that is dead by then, costs the claim and not the lease.
//!
//! From when may a grant be believed? From before the sending of the request that got it, if that is the only one it can have been.
//! Otherwise nobody here knows how old the grant is: then a RENEW with its token comes first, and the belief counts from that.
//!
//! A re-entrant handle is an id of a hold that its owner may have already. Each request adds the id, if it is not there, and extends the
//! lease: so any answer "granted" may be believed from its own request on, and nothing is to be confirmed.
//!
//! The first request is made in the caller's own future. What it does not settle at once goes on on the client's thread. There,
//! waiting goes on though the caller does not run; a grant to a caller that is never heard of again before that lasts for its claim.
//!
//! Whatever ends an acquisition without a hold (an error, the deadline, a dropped future) releases its owner in the background.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use flock_core::wire::error::WireError;
use flock_core::{Acquire, EndReason, Millis, Mode, Time, Token, Wait};
use tokio::sync::SemaphorePermit;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tracing::{Instrument, Span};

use crate::acknowledgement::Acknowledgement;
use crate::clock::{believed_until, duration, millis};
use crate::engine::{Engine, Errand};
use crate::error::{AcquireError, ServerError};
use crate::event::Event;
use crate::hold::{Grant, Hold, Keeping, Name, Session};
use crate::in_place::leave_the_caller;
use crate::jitter::Backoff;
use crate::keepalive::is_asked_elsewhere;
use crate::link::{CallError, Pulse, Up};
use crate::nodes::{Epochs, Node};
use crate::observe::{self, Acquisition, Holding};
use crate::parties::{News, Waiter};
use crate::retry::{pause, pauses};
use crate::shard_channel::Inbox;
use crate::tally::Counted;
use crate::wire::{self, Acquired};

/// Who waits asks again this often, in case a message was lost on a connection that lives.
const ASK_AGAIN: Duration = Duration::from_secs(30);
/// And then at a whole multiple of this by the client's clock: a thousand who wait wake its thread four times a second, and not each by
/// itself.
const ASK_TOGETHER: Millis = Millis(250);
/// The server forgets a queued request that was not repeated for this long.
const QUEUED_MAX: Duration = Duration::from_secs(120);
/// The caller's deadline is kept here; the server's comes a little later, so that it does not decide.
const SERVER_WAITS_LONGER: Duration = Duration::from_millis(250);
/// Polling: how the ceiling of the random delay grows.
const POLL_FIRST: Duration = Duration::from_millis(10);
const POLL_MOST: Duration = Duration::from_secs(1);

/// How long to wait for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    Try,
    AtMost(Duration),
    Forever,
}

#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) key: Box<[u8]>,
    /// Whose handle it is to be, if it is a re-entrant one.
    pub(crate) reentrant: Option<Box<[u8]>>,
    pub(crate) lease: Duration,
    pub(crate) mode: Mode,
    pub(crate) limit: Option<NonZeroU32>,
    pub(crate) label: Option<Box<[u8]>>,
    pub(crate) floor: Option<Token>,
    pub(crate) keep_alive: bool,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) session: Option<Duration>,
    pub(crate) acknowledgement: Option<Acknowledgement>,
    pub(crate) patience: Patience,
    pub(crate) polls: bool,
    /// Others of the same set had to be waited for.
    pub(crate) has_waited: bool,
}

/// A hold that ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) hold: Arc<Hold>,
    /// Whether others held the lock first.
    pub(crate) has_waited: bool,
    pub(crate) engine: Arc<Engine>,
    /// Where its loss is told stays subscribed to.
    _told: Option<Counted>,
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(errand) = self.engine.end(&self.hold) {
            self.engine.give_back(errand);
        }
    }
}

/// Acquires the lock; `None` if it was only tried, and others hold it. Dropping it undoes it.
pub(crate) async fn acquire(
    engine: Arc<Engine>,
    request: Box<Request>,
    acquisition: Acquisition,
) -> Result<Option<Held>, AcquireError> {
    let span = acquisition.span().clone();
    let outcome = acquire_in(engine, request, &acquisition).instrument(span).await;
    match &outcome {
        Ok(Some(held)) => acquisition.granted(held.hold.token()),
        Ok(None) => acquisition.found_busy(),
        Err(error) => acquisition.failed(error),
    }
    outcome
}

async fn acquire_in(
    engine: Arc<Engine>,
    request: Box<Request>,
    acquisition: &Acquisition,
) -> Result<Option<Held>, AcquireError> {
    if *engine.closing.borrow() {
        return Err(AcquireError::ShutDown);
    }
    let limit = match request.patience {
        Patience::Try => Some(engine.operation_timeout),
        Patience::AtMost(wait) => Some(wait),
        Patience::Forever => None,
    };
    let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
    let mut attempt = Attempt::new(&engine, request, deadline);
    acquisition.asks_as(&attempt.waiter.name.owner);
    let found = match attempt.ask_in_place(limit).await? {
        Some(Step::Found(found)) => Some(found),
        first => Box::pin(attempt.go_on(first)).await?, // boxed, as all that is rare: what is usual is small then
    };
    let Some(found) = found else { return Ok(None) };
    let acknowledgement = attempt.request.acknowledgement;
    let held = attempt.become_hold(found, acquisition.span());
    if *engine.closing.borrow() {
        return Err(AcquireError::ShutDown); // who ends the client may not have seen this one as a hold
    }
    match acknowledgement {
        Some(asked) => Box::pin(acknowledged(held, asked)).await.map(Some),
        None => Ok(Some(held)),
    }
}

/// Waits until replicas have the grant; gives it back if they have not in time.
async fn acknowledged(held: Held, asked: Acknowledgement) -> Result<Held, AcquireError> {
    let engine = &held.engine;
    let _counted = engine.waits.add();
    leave_the_caller().await;
    let mut closing = engine.closing.subscribe();
    let node = engine.node(&held.hold.name.key);
    let acknowledged = tokio::select! {
        biased;
        _ = closing.wait_for(|closing| *closing) => Err(AcquireError::ShutDown),
        Some(reason) = held.hold.lost() => Err(AcquireError::Lost { key: held.hold.name.key.to_vec(), reason }),
        acknowledged = node.replicas.acknowledge(engine, &held.hold, asked) => acknowledged,
    };
    if acknowledged.is_err()
        && let Some(errand) = engine.end(&held.hold)
    {
        // Who reads the error finds the lock free, if the server answers.
        let _ = engine.runtime().spawn(Arc::clone(engine).given_back(errand)).await;
    }
    acknowledged.map(|()| held)
}

/// As long as `delay`, or a little longer: until the next moment at which others of this client ask again too.
fn in_step(now: Time, delay: Duration) -> Duration {
    let earliest = now.after(millis(delay)).as_us();
    Duration::from_micros(earliest.next_multiple_of(ASK_TOGETHER.as_us()) - now.as_us())
}

async fn passed(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

enum Step {
    Found(Grant),
    Busy,
    Queued,
    /// At a node that does not serve the slot yet: nobody tells how it goes on.
    Between,
    Again,
}

struct Attempt<'a> {
    engine: &'a Arc<Engine>,
    request: Box<Request>,
    lease: Millis,
    claim: Option<Millis>,
    deadline: Option<Instant>,
    waiter: Arc<Waiter>,
    inbox: Inbox<'a>,
    backoff: Backoff,
    /// Another client asks in the name of the same owner, or the slot is between two nodes.
    contested: Backoff,
    /// The newest connections before the last request: what is told over others it may have missed.
    epochs: Epochs,
    /// Just before the last request was sent that was answered.
    answered: Option<Time>,
    /// Requests that may have been sent.
    requests: u32,
    /// Whether one of them may still be carried out, or was with its answer lost.
    unanswered: bool,
    /// Whether the server has ever queued the request, or granted it.
    admitted: bool,
    /// Whether a claim may have been confirmed, so that it lasts for the lease.
    confirming: bool,
    /// Whether the server has ever answered that others hold the lock.
    others_hold: bool,
    trouble: Option<AcquireError>,
    /// Of the connection over which the server answered last: a session lives on that.
    pulse: Option<Arc<Pulse>>,
    taken: bool,
}

impl<'a> Attempt<'a> {
    fn new(engine: &'a Arc<Engine>, mut request: Box<Request>, deadline: Option<Instant>) -> Self {
        let number = engine.next_number();
        let lease = request.max_hold.map_or(request.lease, |most| request.lease.min(most));
        let lease = millis(lease);
        let (key, unique) = (std::mem::take(&mut request.key), engine.owner(number));
        let (owner, id) = match request.reentrant.take() {
            Some(owner) => (owner, Some(unique)),
            None => (unique, None),
        };
        // Handles of one owner share one lease: the confirmation of one handle's claim would cut the lease of the others.
        let claim = Some(millis(engine.claim)).filter(|claim| *claim < lease && id.is_none());
        let inbox = engine.nodes.inbox(&key);
        Self {
            waiter: engine.parties.wait(Arc::new(Name { number, key, owner, id })),
            claim,
            epochs: Epochs::default(),
            inbox,
            engine,
            request,
            lease,
            deadline,
            backoff: pauses(),
            contested: Backoff::new(POLL_FIRST, POLL_MOST),
            answered: None,
            requests: 0,
            unanswered: false,
            admitted: false,
            confirming: false,
            others_hold: false,
            trouble: None,
            pulse: None,
            taken: false,
        }
    }

    /// Makes the first request, where the caller is. None, and nothing is sent, if that would have to wait.
    async fn ask_in_place(&mut self, limit: Option<Duration>) -> Result<Option<Step>, AcquireError> {
        let node = self.engine.node(&self.waiter.name.key);
        let (Some(up), Some(turn)) = (node.commands.up_now(), node.turns.in_place()) else { return Ok(None) };
        let is_short = limit.is_some_and(|limit| limit < node.commands.response_timeout());
        let deadline = self.deadline.filter(|_| is_short);
        let wait = self.wait();
        let ask = self.ask_over(&node, &up, Some(turn), wait);
        match deadline {
            Some(deadline) => timeout_at(deadline, ask).await.unwrap_or(Ok(Step::Again)),
            None => ask.await,
        }
        .map(Some)
    }

    /// Goes on from the first answer, if there was one, on the client's thread until it is over.
    async fn go_on(&mut self, first: Option<Step>) -> Result<Option<Grant>, AcquireError> {
        if let (Patience::Try, Some(Step::Busy | Step::Queued | Step::Between)) = (self.request.patience, &first) {
            return Ok(None);
        }
        let _counted = self.engine.waits.add();
        leave_the_caller().await;
        let mut closing = self.engine.closing.subscribe();
        let deadline = self.deadline;
        tokio::select! {
            biased;
            _ = closing.wait_for(|closing| *closing) => return Err(AcquireError::ShutDown),
            outcome = self.run(first) => return outcome,
            () = passed(deadline) => {}
        }
        Err(self.at_deadline())
    }

    async fn run(&mut self, first: Option<Step>) -> Result<Option<Grant>, AcquireError> {
        match self.request.patience {
            Patience::Try => self.try_once(first).await,
            Patience::AtMost(_) | Patience::Forever if self.request.polls => self.poll(first).await.map(Some),
            Patience::AtMost(_) | Patience::Forever => self.queue(first).await.map(Some),
        }
    }

    async fn try_once(&mut self, mut step: Option<Step>) -> Result<Option<Grant>, AcquireError> {
        loop {
            match step {
                Some(Step::Found(found)) => return Ok(Some(found)),
                Some(Step::Busy | Step::Queued | Step::Between) => return Ok(None),
                Some(Step::Again) => self.pause().await,
                None => {}
            }
            step = Some(self.ask(Wait::No).await?);
        }
    }

    async fn poll(&mut self, mut step: Option<Step>) -> Result<Grant, AcquireError> {
        let mut delay = Backoff::new(POLL_FIRST, POLL_MOST);
        loop {
            match step {
                Some(Step::Found(found)) => return Ok(found),
                Some(Step::Busy | Step::Queued | Step::Between) => sleep(delay.next(&self.engine.jitter)).await,
                Some(Step::Again) => self.pause().await,
                None => {}
            }
            step = Some(self.ask(Wait::No).await?);
        }
    }

    async fn queue(&mut self, mut first: Option<Step>) -> Result<Grant, AcquireError> {
        let waiter = Arc::clone(&self.waiter);
        loop {
            let wait = self.wait();
            let step = match first.take() {
                Some(step) => Ok(step),
                None => tokio::select! {
                    biased;
                    step = self.ask(wait) => Ok(step?),
                    // The command link may be dead while the grant arrives on the other.
                    news = waiter.news() => Err(news),
                },
            };
            let news = match step {
                Ok(Step::Found(found)) => return Ok(found),
                Ok(Step::Again | Step::Busy) => {
                    self.pause().await;
                    continue;
                }
                Ok(Step::Between) => {
                    sleep(self.contested.next(&self.engine.jitter)).await;
                    continue;
                }
                Ok(Step::Queued) => {
                    let again = in_step(self.engine.clock.now(), self.engine.jitter.around(ASK_AGAIN));
                    let epochs = self.epochs;
                    let node = self.engine.node(&self.waiter.name.key);
                    tokio::select! {
                        biased;
                        news = waiter.news() => news,
                        () = self.inbox.newer_than(epochs.messages) => continue, // a message may have been lost between
                        // With a session it has died with the last connection; and the server that is there now may be another.
                        () = node.commands.other_than(epochs.commands) => continue,
                        () = sleep(again) => continue,
                    }
                }
                Err(news) => news,
            };
            if let Some(found) = self.take_news(news).await? {
                return Ok(found);
            }
        }
    }

    /// How the server is to wait.
    fn wait(&self) -> Wait {
        if self.request.polls || self.request.patience == Patience::Try {
            return Wait::No;
        }
        let left = self.deadline.map_or(QUEUED_MAX, |deadline| deadline - Instant::now() + SERVER_WAITS_LONGER);
        Wait::Queue(millis(left.min(QUEUED_MAX)))
    }

    async fn take_news(&mut self, news: News) -> Result<Option<Grant>, AcquireError> {
        match news {
            // Perhaps to another request of this owner: asking again adds this one's id.
            News::Granted(_) if self.waiter.name.id.is_some() => {
                self.others_hold = true;
                Ok(None)
            }
            News::Granted(token) => {
                self.others_hold = true;
                match self.answered.filter(|_| self.requests == 1) {
                    Some(sent) if self.is_fresh(sent) => Ok(Some(self.believe(token, sent))),
                    _ => self.confirm(token).await,
                }
            }
            News::TimedOut | News::AskAgain => Ok(None),
            News::Ended(reason @ (EndReason::Cancelled | EndReason::WrongType)) => {
                let error = WireError::from(reason);
                Err(AcquireError::Server(ServerError::new(error.code.code(), error.message)))
            }
            // By a request of the same owner from elsewhere: asking again takes the place back. Both get the lock when either does,
            // so there is no hurry.
            News::Ended(EndReason::Superseded) => {
                sleep(self.contested.next(&self.engine.jitter)).await;
                Ok(None)
            }
            // Asked again after a moment, in the same way.
            News::Ended(EndReason::Flushed | EndReason::RoleChanged | EndReason::Moved | EndReason::ClusterDown) => {
                self.pause().await;
                Ok(None)
            }
        }
    }

    /// Sends the request once.
    async fn ask(&mut self, wait: Wait) -> Result<Step, AcquireError> {
        let node = self.engine.node(&self.waiter.name.key);
        let up = match node.commands.up().await {
            Ok(up) => up,
            Err(error) => return self.without_answer(error),
        };
        let turn = node.turns.to_ask().await;
        self.ask_over(&node, &up, turn, wait).await
    }

    async fn ask_over(
        &mut self,
        node: &Node,
        up: &Up,
        turn: Option<SemaphorePermit<'_>>,
        wait: Wait,
    ) -> Result<Step, AcquireError> {
        let command = wire::command(&Acquire {
            mode: self.request.mode,
            limit: self.request.limit,
            wait,
            channel: (!self.request.polls).then_some(self.inbox.channel()),
            floor: self.request.floor.map(Token::get),
            claim: self.claim,
            session: self.request.session.map(millis),
            label: self.request.label.as_deref(),
            id: self.waiter.name.id.as_deref(),
            ..Acquire::new(&self.waiter.name.key, &self.waiter.name.owner, self.lease)
        });
        // There may be a newer connection than the one that this goes over.
        self.epochs = Epochs { commands: up.epoch(), ..self.engine.nodes.epochs(&self.waiter.name.key) };
        // Noted first: this future may be dropped at the await. Not before there is a connection: what is noted is to be given back.
        let unanswered = std::mem::replace(&mut self.unanswered, true);
        self.requests += 1;
        let answer = node.commands.call_over(up, &command, wire::acquired).await;
        let is_between = answer.as_ref().is_err_and(is_asked_elsewhere);
        let answer = self.engine.follow(answer, &command, wire::acquired).await;
        drop(turn); // what is confirmed after this is no new request
        match answer {
            Ok(answer) => {
                self.unanswered = unanswered;
                self.answered = Some(answer.sent);
                self.pulse = Some(answer.pulse);
                self.backoff.reset();
                self.trouble = None;
                self.admitted |= answer.reply != Acquired::Busy;
                match answer.reply {
                    // Without a claim each request extends the lease: it counts from this one.
                    Acquired::Granted(token) if self.waiter.name.id.is_some() => {
                        let grant = self.believe(token, answer.sent);
                        let is_over = self.engine.clock.now() >= grant.believed_until; // looked at too late
                        Ok(if is_over { Step::Again } else { Step::Found(grant) })
                    }
                    // It may be an older grant; or it is from now and came, or was looked at, so late that too little is left of it.
                    Acquired::Granted(token)
                        if unanswered || (self.others_hold && !self.request.polls) || !self.is_fresh(answer.sent) =>
                    {
                        leave_the_caller().await;
                        Ok(Box::pin(self.confirm(token)).await?.map_or(Step::Again, Step::Found))
                    }
                    Acquired::Granted(token) => Ok(Step::Found(self.believe(token, answer.sent))),
                    Acquired::Busy => {
                        self.others_hold = true;
                        Ok(Step::Busy)
                    }
                    Acquired::Queued => {
                        self.others_hold = true;
                        Ok(if is_between { Step::Between } else { Step::Queued })
                    }
                }
            }
            Err(error) => {
                if matches!(error, CallError::Server(_)) {
                    self.unanswered = unanswered;
                }
                self.without_answer(error)
            }
        }
    }

    fn without_answer(&mut self, error: CallError) -> Result<Step, AcquireError> {
        self.note(error).map(|()| Step::Again)
    }

    /// Renews first: then it is known from when the lease counts. `None` if the grant is over already.
    async fn confirm(&mut self, token: Token) -> Result<Option<Grant>, AcquireError> {
        let engine = self.engine;
        self.confirming = true;
        loop {
            let Name { key, owner, .. } = &*self.waiter.name;
            let request = flock_core::Renew { key, owner, lease: self.lease, token: Some(token) };
            match engine.call(key, &wire::command(&request), wire::yes_or_no).await {
                Ok(answer) => {
                    self.pulse = Some(answer.pulse);
                    let believed_until = believed_until(answer.sent, self.lease);
                    return Ok(answer.reply.then_some(Grant {
                        token,
                        mode: self.request.mode,
                        believed_until,
                        confirmed: true,
                        epochs: self.epochs,
                    }));
                }
                Err(error) => self.note(error)?,
            }
            self.pause().await;
        }
    }

    /// Remembers what may be over a moment later; fails with what will not.
    fn note(&mut self, error: CallError) -> Result<(), AcquireError> {
        if !error.is_passing() {
            return Err(error.into());
        }
        if let CallError::Server(error) = &error {
            let (key, code) = (self.waiter.name.key.to_vec(), error.code().to_owned());
            let _ = self.engine.events.send(Event::AcquireRefused { key, code });
        }
        self.trouble = Some(error.into());
        Ok(())
    }

    fn believe(&self, token: Token, sent: Time) -> Grant {
        let lasts = self.claim.unwrap_or(self.lease);
        Grant {
            token,
            mode: self.request.mode,
            believed_until: believed_until(sent, lasts),
            confirmed: self.claim.is_none(),
            epochs: self.epochs,
        }
    }

    /// Whether more than half of the grant is left, counted from `sent`.
    fn is_fresh(&self, sent: Time) -> bool {
        let half_us = self.claim.unwrap_or(self.lease).as_us() / 2;
        self.engine.clock.now().us_since(sent) < half_us
    }

    async fn pause(&mut self) {
        observe::retried();
        pause(&mut self.backoff, &self.engine.jitter).await;
    }

    fn at_deadline(&mut self) -> AcquireError {
        // Who waited for the first of a set has spent the time on others, though for this one it was too short for an answer.
        let has_waited = self.request.has_waited && self.trouble.is_none();
        if (self.others_hold || has_waited) && self.request.patience != Patience::Try {
            return AcquireError::TimedOut;
        }
        self.trouble.take().unwrap_or_else(|| AcquireError::Unavailable("no answer in time".into()))
    }

    fn become_hold(&mut self, found: Grant, acquisition: &Span) -> Held {
        self.taken = true;
        let engine = self.engine;
        let keeping = Keeping {
            lease: self.lease,
            keep_alive: self.request.keep_alive,
            ends: self.request.max_hold.map(|most| engine.after(most)),
        };
        let session =
            self.request.session.map(|grace| Session::new(millis(grace), self.pulse.take().unwrap_or_default()));
        let holding = Holding::begin(&engine.clock, &self.waiter.name.key, found.token, acquisition);
        let name = Arc::clone(&self.waiter.name);
        let hold = Arc::new(Hold::new(name, keeping, session, found, holding));
        if let Some(reason) = engine.parties.hold(&hold) {
            engine.tell_loss(&hold, reason);
        }
        engine.keepalive.keep(engine, &hold);
        Held { hold, has_waited: self.others_hold, engine: Arc::clone(engine), _told: self.inbox.used() }
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if self.taken {
            return;
        }
        let counted = self.engine.errands.add();
        self.engine.parties.leave(self.waiter.name.number);
        // Who was refused, or has found others only, has left nothing behind.
        if self.unanswered || self.admitted {
            // A queued request that is not released ends by itself, and so does the grant that it may become.
            let lasts = self.claim.filter(|_| !self.confirming).unwrap_or(self.lease);
            let lasts = QUEUED_MAX + duration(lasts);
            self.engine.give_back(Errand {
                name: Arc::clone(&self.waiter.name),
                token: None,
                lasts,
                _counted: counted,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_who_began_at_different_times_ask_again_together() {
        let asks_at = |began_us: u64, delay_ms: u64| {
            let after = in_step(Time::from_us(began_us), Duration::from_millis(delay_ms));
            let late = after.checked_sub(Duration::from_millis(delay_ms)).expect("not earlier");
            assert!(late < duration(ASK_TOGETHER), "{late:?} late");
            began_us + u64::try_from(after.as_micros()).unwrap()
        };
        assert_eq!(asks_at(1, 30_000), 30_250_000);
        assert_eq!(asks_at(249_999, 29_990), 30_250_000);
        assert_eq!(asks_at(250_000, 30_000), 30_250_000);
        assert_eq!(asks_at(250_001, 30_000), 30_500_000);
    }
}
