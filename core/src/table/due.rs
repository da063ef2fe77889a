//! What happens without a request: a lease or a wait is over, a connection has closed, a place must be looked at.

use super::{Audience, LockId, Place, Table};
use crate::effect::{Channel, Decision, Effect, Effects, KeyAction, Notice, WaitOutcome};
use crate::lock::{Change, Lock};
use crate::name::Name;
use crate::refusal::LossReason;
use crate::time::Time;
use crate::token::Token;
use crate::wait_queue::{Ear, Waiter, WaiterId};
use alloc::vec::Vec;

/// Something noted, to be performed when the shell may act.
#[derive(Clone, Debug)]
pub(super) enum Pending {
    /// Look at this place: somebody may have to be served.
    Look(Name),
    /// The connection of this session hold has closed.
    Cut(LockId, Token),
    /// Tell somebody.
    Say(Effect),
}

impl Pending {
    pub(super) fn is_loss_by_flush(&self) -> bool {
        matches!(self, Self::Say(Effect::Tell { notice: Notice::Lost { reason: LossReason::Flushed, .. }, .. }))
    }
}

/// The next thing due.
#[derive(Debug)]
pub enum Due {
    /// Nothing: sleep until [`Table::next_deadline`].
    Nothing,
    /// Find this key in the keyspace and call [`Table::look`].
    Look(Name, Option<LockId>),
    /// Done already: perform it.
    Done(Decision<()>),
}

impl Table {
    /// The next thing that is due, one at a time: the shell calls this in BeforeSleep while it may act, until `Nothing` comes or its
    /// time is used up. A waiter whose time is up in the instant in which a lease ends is too late: it is told so.
    pub fn advance(&mut self, now: Time) -> Due {
        self.settle_removed();
        loop {
            if let Some(pending) = self.pending.pop_front() {
                match self.perform_pending(now, pending) {
                    Some(due) => return due,
                    None => continue,
                }
            }
            if let Some((lock, name)) = self.next_lock_over(now) {
                return Due::Look(name, Some(lock));
            }
            if let Some(waiter) = self.next_wait_over(now) {
                return Due::Done(self.time_out(waiter));
            }
            if self.grace_until.is_some_and(|until| until <= now) {
                self.end_grace();
                continue;
            }
            // Every place was looked at: what could not be put back so far (a value of another type lies there) never will be.
            if self.give_up_putting_back(|_| true) {
                continue;
            }
            return Due::Nothing;
        }
    }

    /// Performs what is due at a place: ended leases, and whoever is next. `expected` is what [`Due::Look`] named; if the key holds
    /// something else by now, that lock is gone.
    pub fn look(
        &mut self,
        now: Time,
        place: Place<'_>,
        expected: Option<LockId>,
        audience: &mut dyn Audience,
    ) -> Decision<()> {
        if let Some(gone) = expected.filter(|lock| Some(*lock) != place.lock) {
            self.removed(gone, LossReason::Removed, true);
        }
        let step = self.begin(now, place, audience);
        self.conclude(step, ())
    }

    fn perform_pending(&mut self, now: Time, pending: Pending) -> Option<Due> {
        match pending {
            Pending::Look(name) => Some(Due::Look(name, None)),
            Pending::Cut(lock, token) => self.cut_session(now, lock, token).map(Due::Done),
            Pending::Say(effect) => {
                let mut effects = self.effects();
                effects.push(effect);
                Some(Due::Done(Decision::keyless((), effects)))
            }
        }
    }

    /// The lease of a session hold lasts at most its grace once its connection has closed.
    fn cut_session(&mut self, now: Time, lock: LockId, token: Token) -> Option<Decision<()>> {
        if self.sessions.client_of((lock, token)).is_some() {
            return None; // renewed over another connection meanwhile
        }
        let hold = self.lock(lock)?.get(token)?;
        let grace = hold.session()?;
        let deadline = now.after(grace);
        if hold.deadline() <= deadline {
            return None;
        }
        let change = match hold.claim() {
            None => Change::Renew { token, lease: grace, deadline: Some(deadline) },
            Some(claim) => {
                let mut grant = hold.to_grant();
                grant.deadline = Some(deadline.min(hold.deadline()));
                if let Some(terms) = grant.terms.as_mut() {
                    terms.claim = Some(claim.min(grace));
                }
                Change::Grant(grant)
            }
        };
        let mut effects = self.effects();
        self.decide(now, lock, change, &mut effects);
        Some(Decision { answer: (), lock: Some(lock), key: KeyAction::Keep, effects })
    }

    /// A lock with a lease that is over, the longest overdue first; hints that came up too early are put right.
    fn next_lock_over(&mut self, now: Time) -> Option<(LockId, Name)> {
        loop {
            let (at, slot) = self.deadlines.first()?;
            if at > now {
                return None;
            }
            let lock = LockId::from_slot(slot)?;
            match self.lock(lock).map(Lock::next_deadline) {
                Some(Time::NEVER) | None => self.deadlines.remove(slot),
                Some(deadline) if deadline > now => self.deadlines.postpone(slot, deadline, now),
                Some(_) => return self.name(lock).cloned().map(|name| (lock, name)),
            }
        }
    }

    fn next_wait_over(&mut self, now: Time) -> Option<WaiterId> {
        loop {
            let (at, waiter) = self.queues.first_deadline()?;
            if at > now {
                return None;
            }
            let deadline = self.queues.get(waiter)?.deadline;
            if deadline <= now {
                return Some(waiter);
            }
            self.queues.postpone(waiter, deadline, now);
        }
    }

    fn time_out(&mut self, waiter: WaiterId) -> Decision<()> {
        let mut effects = self.effects();
        if let Some((name, taken)) = self.leave(waiter) {
            self.say_timed_out(&name, &taken, &mut effects);
        }
        Decision::keyless((), effects)
    }

    pub(super) fn say_timed_out(&mut self, name: &Name, waiter: &Waiter, effects: &mut Effects) {
        self.stats.timed_out += 1;
        push_outcome(name, waiter, WaitOutcome::TimedOut, effects);
    }

    /// A waiter leaves; whoever is behind it may be next now.
    pub(super) fn leave(&mut self, waiter: WaiterId) -> Option<(Name, Waiter)> {
        let queue = self.queues.queue_of(waiter)?;
        let name = self.queues.name(queue)?.clone();
        let taken = self.take_waiter(waiter)?;
        if self.queues.queue_len(queue) > 0 {
            self.pending.push_back(Pending::Look(name.clone()));
        }
        Some((name, taken))
    }

    fn end_grace(&mut self) {
        self.grace_until = None;
        let names: Vec<Name> = self.queues.all().filter_map(|queue| self.queues.name(queue).cloned()).collect();
        self.pending.extend(names.into_iter().map(Pending::Look));
    }
}

/// How a waiter hears that its wait has ended without a grant.
pub(super) fn push_outcome(name: &Name, waiter: &Waiter, outcome: WaitOutcome, effects: &mut Effects) {
    match waiter.ear {
        Ear::Blocked(blocked) => effects.push(Effect::Finish { blocked, outcome }),
        Ear::Channel => {
            let notice = match outcome {
                WaitOutcome::TimedOut => Notice::TimedOut,
                WaitOutcome::Ended(reason) => Notice::Ended(reason),
                WaitOutcome::Granted(_) => return,
            };
            effects.push(Effect::Tell {
                channel: Channel::new(waiter.channel()),
                name: name.clone(),
                owner: waiter.owner.clone(),
                notice,
            });
        }
    }
}
