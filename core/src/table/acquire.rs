//! ACQUIRE: granted, queued, or neither.

use super::{Audience, Caller, LockId, Place, Step, Table};
use crate::effect::{Channel, Decision, Effect, Effects, Notice, WaitOutcome};
use crate::lock::{Change, Grant, Id, Mode, Owner, Terms};
use crate::refusal::{EndReason, Refusal};
use crate::request::{Acquire, Wait};
use crate::time::{Millis, Time};
use crate::token::{Token, WallClock};
use crate::wait_queue::{Ear, Waiter, WaiterId};
use alloc::boxed::Box;

/// What became of an ACQUIRE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acquired {
    /// The owner holds the lock under this token.
    Granted(Token),
    /// Somebody else does, and the request does not wait.
    Busy,
    /// The request waits.
    Queued {
        /// Its number, for the shell that blocks its connection.
        waiter: WaiterId,
        /// 1 for the next in line.
        position: usize,
    },
}

impl Table {
    /// Raises the counter before an ACQUIRE with FLOOR, whatever becomes of the latter.
    pub fn floor(&mut self, floor: u64, wall: WallClock) -> Decision<Result<(), Refusal>> {
        let mut effects = self.effects();
        let max = self.counter.floor_max(wall);
        let answer = if floor > max { Err(Refusal::FloorTooHigh { max }) } else { Ok(()) };
        if answer.is_ok()
            && let Some(mark) = self.counter.raise(floor)
        {
            effects.push(Effect::Change(Change::Mark(mark)));
        }
        Decision::keyless(answer, effects)
    }

    /// Grants the lock to `request.owner`, or lets it wait if it asked to.
    ///
    /// The same owner again is the same request: a holder gets its token again and its lease is never shortened; a waiter keeps its
    /// place. `request.floor` has been dealt with by [`Table::floor`].
    ///
    /// # Refuses
    /// See [`Refusal`]; nothing has changed then, except what was due anyway.
    pub fn acquire(
        &mut self,
        now: Time,
        place: Place<'_>,
        request: &Acquire<'_>,
        caller: Caller,
        audience: &mut dyn Audience,
    ) -> Decision<Result<Acquired, Refusal>> {
        let mut step = self.begin(now, place, audience);
        let answer = self.decide_acquire(Asked { now, place, request, caller }, &mut step, audience);
        match answer {
            Err(_) => self.stats.refused += 1,
            Ok(Acquired::Busy) => self.stats.busy += 1,
            Ok(_) => {}
        }
        self.conclude(step, answer)
    }

    fn decide_acquire(
        &mut self,
        asked: Asked<'_>,
        step: &mut Step,
        audience: &mut dyn Audience,
    ) -> Result<Acquired, Refusal> {
        let Asked { now, place, request, .. } = asked;
        let lock = step.lock.and_then(|lock| self.lock(lock));
        if let (Some(id), Some(token)) =
            (step.lock, lock.and_then(|lock| lock.held_by(request.owner)).map(|hold| hold.token))
        {
            return self.acquire_again(asked, id, token, audience, &mut step.effects);
        }
        if request.convert.is_some() {
            return Err(Refusal::NotHeld);
        }
        if request.wait != Wait::No
            && let Some(lock) = step.lock
            && let Some(waiter) = self.queues.of_lock(lock).and_then(|queue| self.queues.find(queue, request.owner))
        {
            let same_turn = self.queues.get(waiter).is_some_and(|waiter| waiter.mode == request.mode);
            if same_turn {
                return Ok(self.wait_again(asked, lock, waiter, audience, &mut step.effects));
            }
            // In another mode the turn is lost: the request starts anew at the end, if there is one.
            let max = self.limits.waiters_max;
            if self.queues.len() > max {
                return Err(Refusal::QueueFull { max });
            }
            if let Some(old) = self.take_waiter(waiter) {
                let listens = matches!(request.wait, Wait::Queue(_));
                let kept = request.channel.filter(|_| listens).map(Channel::new);
                self.supersede(place, &old, kept.as_ref(), &mut step.effects);
            }
            self.serve(now, lock, None, audience, &mut step.effects);
        }
        let answer = self.acquire_anew(asked, step)?;
        match (answer, step.lock) {
            // Whoever just came hears; those ahead may all be deaf.
            (Acquired::Queued { waiter, .. }, Some(lock)) => {
                Ok(self.serve_asking(now, lock, waiter, request.owner, audience, &mut step.effects))
            }
            _ => Ok(answer),
        }
    }

    /// The owner neither holds the lock nor waits for it.
    fn acquire_anew(&mut self, asked: Asked<'_>, step: &mut Step) -> Result<Acquired, Refusal> {
        let Asked { now, place, request, caller } = asked;
        if !self.counter.is_seeded() {
            return Err(Refusal::NotReady);
        }
        let admitted = match step.lock {
            None => true,
            Some(lock) => {
                // A plain try never overtakes a queue.
                self.queues.of_lock(lock).is_none()
                    && self.lock(lock).is_some_and(|lock| lock.admits(request.mode, request.limit))
            }
        };
        if admitted && !self.in_grace(now) {
            let lock = step.lock.or_else(|| self.new_entry(place.name())).ok_or(Refusal::NotReady)?;
            step.lock = Some(lock);
            let ask = Ask {
                owner: Owner::new(request.owner),
                mode: request.mode,
                lease: request.lease,
                terms: terms_of(request),
                client: caller.client,
            };
            return self.grant(now, lock, ask, &mut step.effects).map(Acquired::Granted);
        }
        match waiter_of(now, request, caller) {
            None => Ok(Acquired::Busy),
            Some(waiter) => self.join_queue(step, place, waiter),
        }
    }

    fn join_queue(&mut self, step: &Step, place: Place<'_>, waiter: Waiter) -> Result<Acquired, Refusal> {
        let max = self.limits.waiters_max;
        if self.queues.len() >= max {
            return Err(Refusal::QueueFull { max });
        }
        let queue = match step.lock {
            Some(lock) => self.queues.of_lock(lock).or_else(|| self.queues.create(place.name(), Some(lock))),
            None => self.queues.of_name(place.db, place.key).or_else(|| self.queues.create(place.name(), None)),
        };
        let client = waiter.client;
        let waiter = queue.and_then(|queue| self.queues.push(queue, waiter)).ok_or(Refusal::QueueFull { max })?;
        if let Some(client) = client {
            self.sessions.add_waiter(client, waiter);
        }
        Ok(Acquired::Queued { waiter, position: self.queues.position(waiter) })
    }

    /// The owner waits already and asks again in the same mode: it keeps its place with the new request's conditions.
    fn wait_again(
        &mut self,
        asked: Asked<'_>,
        lock: LockId,
        waiter: WaiterId,
        audience: &mut dyn Audience,
        effects: &mut Effects,
    ) -> Acquired {
        let Asked { now, request, caller, .. } = asked;
        if let Some(renewed) = waiter_of(now, request, caller) {
            let (ear, client) = (renewed.ear, renewed.client);
            let channel = Channel::new(renewed.channel());
            if let Some(old) = self.queues.replace(waiter, renewed) {
                if let Some(client) = old.client {
                    self.sessions.remove_waiter(client, waiter);
                }
                let kept = (ear == Ear::Channel).then_some(&channel);
                if let Some(name) = self.name(lock).cloned() {
                    let place = Place { db: name.db(), key: name.key(), lock: Some(lock) };
                    self.supersede(place, &old, kept, effects);
                }
            }
            if let Some(client) = client {
                self.sessions.add_waiter(client, waiter);
            }
        }
        // It may have been passed over while nobody heard it: now it can be granted.
        self.serve_asking(now, lock, waiter, request.owner, audience, effects)
    }

    /// Serves the queue of a waiter that is asking at this moment.
    fn serve_asking(
        &mut self,
        now: Time,
        lock: LockId,
        waiter: WaiterId,
        owner: &[u8],
        audience: &mut dyn Audience,
        effects: &mut Effects,
    ) -> Acquired {
        self.serve(now, lock, Some(waiter), audience, effects);
        // It may have come with a channel where nobody listens: then it is passed over from now on.
        self.serve(now, lock, None, audience, effects);
        match self.lock(lock).and_then(|lock| lock.held_by(owner)) {
            Some(hold) => Acquired::Granted(hold.token),
            None => Acquired::Queued { waiter, position: self.queues.position(waiter) },
        }
    }

    /// Tells the older of two waiting requests of one owner that it has ended; not on the channel where the newer one listens.
    fn supersede(&mut self, place: Place<'_>, old: &Waiter, kept: Option<&Channel>, effects: &mut Effects) {
        match old.ear {
            Ear::Blocked(blocked) => {
                self.stats.wait_ended += 1;
                effects.push(Effect::Finish { blocked, outcome: WaitOutcome::Ended(EndReason::Superseded) });
            }
            Ear::Channel => {
                let channel = Channel::new(old.channel());
                if kept != Some(&channel) {
                    self.stats.wait_ended += 1;
                    effects.push(Effect::Tell {
                        channel,
                        name: place.name(),
                        owner: old.owner.clone(),
                        notice: Notice::Ended(EndReason::Superseded),
                    });
                }
            }
        }
    }

    /// The owner holds the lock and asks again.
    fn acquire_again(
        &mut self,
        asked: Asked<'_>,
        lock: LockId,
        token: Token,
        audience: &mut dyn Audience,
        effects: &mut Effects,
    ) -> Result<Acquired, Refusal> {
        let Asked { now, request, caller, .. } = asked;
        if request.new {
            return Err(Refusal::AlreadyHeld);
        }
        // Before anything changes: a refusal leaves the hold as it was.
        self.check_id(lock, token, request)?;
        let Some(token) = self.settle_mode(now, lock, token, request, effects)? else {
            return Ok(Acquired::Busy);
        };
        self.join_id(now, lock, token, request, effects);
        self.extend(now, lock, token, request, effects);
        self.sessions.rebind((lock, token), caller.client);
        // A conversion to shared may have made room for waiting readers.
        self.serve(now, lock, None, audience, effects);
        Ok(Acquired::Granted(token))
    }

    /// The hold's mode becomes, or already is, what was asked. `None`: a conversion to exclusive that others are in the way of.
    fn settle_mode(
        &mut self,
        now: Time,
        lock: LockId,
        token: Token,
        request: &Acquire<'_>,
        effects: &mut Effects,
    ) -> Result<Option<Token>, Refusal> {
        let Some(hold) = self.lock(lock).and_then(|lock| lock.get(token)) else {
            return Err(Refusal::NotHeld);
        };
        let Some(asked) = request.convert else {
            return match (hold.mode(), request.mode) {
                (Mode::Shared, Mode::Exclusive) => Err(Refusal::HeldShared),
                _ => Ok(Some(token)),
            };
        };
        if hold.token != asked {
            // A retry of the conversion that replaced this token is answered alike; anything else under it comes too late.
            let retried = hold.had_token(asked) && (hold.mode(), request.mode) == (Mode::Exclusive, Mode::Exclusive);
            return if retried { Ok(Some(token)) } else { Err(Refusal::NotHeld) };
        }
        match (hold.mode(), request.mode) {
            (Mode::Exclusive, Mode::Shared) => {
                self.decide(now, lock, Change::Mode { old: token, new: token, mode: Mode::Shared }, effects);
                Ok(Some(token))
            }
            (Mode::Shared, Mode::Exclusive) if self.lock(lock).is_some_and(|lock| lock.len() > 1) => Ok(None),
            // It is a new grant: another reader may hold on to one that was lost with the old primary.
            (Mode::Shared, Mode::Exclusive) if self.in_grace(now) => Ok(None),
            (Mode::Shared, Mode::Exclusive) => {
                // A writer's token must exceed all earlier readers'.
                let new = self.next_token(effects)?;
                self.decide(now, lock, Change::Mode { old: token, new, mode: Mode::Exclusive }, effects);
                Ok(Some(new))
            }
            // Converted before: a retry.
            (Mode::Exclusive, Mode::Exclusive) | (Mode::Shared, Mode::Shared) => Ok(Some(token)),
        }
    }

    /// Whether the request's id, if it has one, is or may become one of the hold's.
    fn check_id(&self, lock: LockId, token: Token, request: &Acquire<'_>) -> Result<(), Refusal> {
        let (Some(id), Some(hold)) = (request.id, self.lock(lock).and_then(|lock| lock.get(token))) else {
            return Ok(());
        };
        let max = self.limits.ids_max;
        match (hold.has_ids(), hold.has_id(id)) {
            (false, _) => Err(Refusal::HeldWithoutIds),
            (true, false) if hold.ids().count() >= max => Err(Refusal::TooManyIds { max }),
            (true, _) => Ok(()),
        }
    }

    fn join_id(&mut self, now: Time, lock: LockId, token: Token, request: &Acquire<'_>, effects: &mut Effects) {
        let (Some(id), Some(hold)) = (request.id, self.lock(lock).and_then(|lock| lock.get(token))) else {
            return;
        };
        if !hold.has_id(id) {
            self.decide(now, lock, Change::Ids { token, id: Id::new(id), joined: true }, effects);
        }
    }

    /// The lease lasts at least what the repeated request asks, from now; new conditions replace the old ones. A claim stays a claim:
    /// only a RENEW with the token proves that the grant arrived.
    fn extend(&mut self, now: Time, lock: LockId, token: Token, request: &Acquire<'_>, effects: &mut Effects) {
        let Some(hold) = self.lock(lock).and_then(|lock| lock.get(token)) else {
            return;
        };
        let deadline = now.after(request.lease);
        let longer = hold.claim().is_none() && deadline > hold.deadline();
        let current = hold.terms.as_deref();
        let changed =
            request.channel.is_some_and(|asked| current.is_none_or(|terms| terms.channel.as_slice() != asked))
                || request.label.is_some_and(|asked| current.is_none_or(|terms| terms.label.as_slice() != asked))
                || request.session.is_some_and(|asked| current.is_none_or(|terms| terms.session != Some(asked)));
        if changed {
            let mut grant = hold.to_grant();
            let mut terms = grant.terms.take().unwrap_or_default();
            terms.channel = request.channel.map_or(terms.channel, Into::into);
            terms.label = request.label.map_or(terms.label, Into::into);
            terms.session = request.session.or(terms.session);
            grant.terms = Some(terms);
            if longer {
                grant.lease = request.lease;
                grant.deadline = Some(deadline);
            }
            self.decide(now, lock, Change::Grant(grant), effects);
        } else if longer {
            let renewal = Change::Renew { token, lease: request.lease, deadline: Some(deadline) };
            self.decide(now, lock, renewal, effects);
        }
    }

    /// Makes the grant. The caller has made sure that the lock admits it.
    pub(super) fn grant(&mut self, now: Time, lock: LockId, ask: Ask, effects: &mut Effects) -> Result<Token, Refusal> {
        let token = self.next_token(effects)?;
        let mut grant =
            Grant { owner: ask.owner, mode: ask.mode, token, lease: ask.lease, deadline: None, terms: ask.terms };
        grant.deadline = Some(now.after(grant.lasts()));
        self.decide(now, lock, Change::Grant(grant), effects);
        effects.push(Effect::Granted(token));
        self.sessions.bind((lock, token), ask.client);
        self.stats.grants += 1;
        Ok(token)
    }

    fn next_token(&mut self, effects: &mut Effects) -> Result<Token, Refusal> {
        if !self.counter.is_seeded() {
            return Err(Refusal::NotReady);
        }
        let (token, mark) = self.counter.take_next().map_err(|_| Refusal::TokensExhausted)?;
        if let Some(mark) = mark {
            effects.push(Effect::Change(Change::Mark(mark)));
        }
        Ok(token)
    }

    /// Whether new grants are suspended.
    pub(super) fn in_grace(&self, now: Time) -> bool {
        self.grace_until.is_some_and(|until| now < until)
    }

    /// Takes a waiter out of its queue, with everything that knows it.
    pub(super) fn take_waiter(&mut self, waiter: WaiterId) -> Option<Waiter> {
        let taken = self.queues.remove(waiter)?;
        if let Some(client) = taken.client {
            self.sessions.remove_waiter(client, waiter);
        }
        Some(taken)
    }
}

/// An ACQUIRE at work: the request, and what it came with.
#[derive(Clone, Copy)]
struct Asked<'a> {
    now: Time,
    place: Place<'a>,
    request: &'a Acquire<'a>,
    caller: Caller,
}

/// What is to be granted, and to whom.
pub(super) struct Ask {
    pub(super) owner: Owner,
    pub(super) mode: Mode,
    pub(super) lease: Millis,
    pub(super) terms: Option<Box<Terms>>,
    pub(super) client: Option<super::ClientId>,
}

/// The rarely used conditions of a request; `None` for the usual request, which so needs no allocation.
fn terms_of(request: &Acquire<'_>) -> Option<Box<Terms>> {
    let plain = request.claim.is_none()
        && request.session.is_none()
        && request.channel.is_none()
        && request.label.is_none()
        && request.id.is_none();
    (!plain).then(|| {
        Box::new(Terms {
            claim: request.claim,
            session: request.session,
            channel: request.channel.unwrap_or_default().into(),
            label: request.label.unwrap_or_default().into(),
            ids: request.id.map(Id::new).into_iter().collect(),
            converted_from: None,
        })
    })
}

/// The request as a waiter, if it asked to wait.
fn waiter_of(now: Time, request: &Acquire<'_>, caller: Caller) -> Option<Waiter> {
    let (ear, deadline) = match request.wait {
        Wait::No => return None,
        Wait::Block(None) => (Ear::Blocked(caller.blocked), Time::NEVER),
        Wait::Block(Some(wait)) => (Ear::Blocked(caller.blocked), now.after(wait)),
        Wait::Queue(wait) => (Ear::Channel, now.after(wait)),
    };
    Some(Waiter {
        owner: Owner::new(request.owner),
        terms: terms_of(request),
        deadline,
        since: now,
        ear,
        lease: request.lease,
        limit: request.limit,
        mode: request.mode,
        client: request.session.and(caller.client),
    })
}
