//! RELEASE, RENEW, REVOKE and CHECK: what a holder, an administrator and a storage do with a hold.

use super::{Audience, Caller, LockId, Place, Table};
use crate::effect::{Decision, Effect, Effects, Ended, WaitOutcome};
use crate::lock::{Change, Hold, Id};
use crate::refusal::{EndReason, Refusal};
use crate::request::{Release, ReleaseScope, Renew, Revoke};
use crate::time::Time;
use crate::token::Token;
use crate::wait_queue::Ear;
use alloc::vec::Vec;

impl Table {
    /// Gives a hold back, or one id of it, or cancels the owner's queued request. Answers whether there was one.
    ///
    /// Never touches anyone else's hold; a repeated release answers `false` and changes nothing.
    ///
    /// # Refuses
    /// `NeedsIdOrAll` if the hold is re-entrant and the request names neither.
    pub fn release(
        &mut self,
        now: Time,
        place: Place<'_>,
        request: &Release<'_>,
        audience: &mut dyn Audience,
    ) -> Decision<Result<bool, Refusal>> {
        let mut step = self.begin(now, place, audience);
        let answer = match step.lock {
            None => Ok(false),
            Some(lock) => self.decide_release(now, lock, request, &mut step.effects),
        };
        if let (Some(lock), Ok(true)) = (step.lock, answer) {
            self.serve(now, lock, None, audience, &mut step.effects);
        }
        if answer.is_err() {
            self.stats.refused += 1;
        }
        self.conclude(step, answer)
    }

    fn decide_release(
        &mut self,
        now: Time,
        lock: LockId,
        request: &Release<'_>,
        effects: &mut Effects,
    ) -> Result<bool, Refusal> {
        let Some(hold) = self.lock(lock).and_then(|lock| lock.held_by(request.owner)) else {
            return Ok(self.cancel_waiter(lock, request, effects));
        };
        let token = hold.token;
        if request.token.is_some_and(|asked| asked != token) {
            return Ok(false);
        }
        match request.scope {
            ReleaseScope::Plain if hold.has_ids() => return Err(Refusal::NeedsIdOrAll),
            ReleaseScope::Plain | ReleaseScope::All => self.end(now, lock, token, Ended::Released, effects),
            ReleaseScope::Id(id) if !hold.has_id(id) => return Ok(false),
            ReleaseScope::Id(_) if hold.ids().count() == 1 => self.end(now, lock, token, Ended::Released, effects),
            ReleaseScope::Id(id) => {
                self.decide(now, lock, Change::Ids { token, id: Id::new(id), joined: false }, effects);
            }
        }
        Ok(true)
    }

    /// The owner holds nothing: its queued request, if any, leaves. A token or another id names something else.
    fn cancel_waiter(&mut self, lock: LockId, request: &Release<'_>, effects: &mut Effects) -> bool {
        let found = self.queues.of_lock(lock).and_then(|queue| self.queues.find(queue, request.owner));
        let Some(waiter) = found else { return false };
        let names_it = request.token.is_none()
            && match request.scope {
                ReleaseScope::Plain | ReleaseScope::All => true,
                ReleaseScope::Id(id) => {
                    let terms = self.queues.get(waiter).and_then(|waiter| waiter.terms.as_ref());
                    terms.is_some_and(|terms| terms.ids.contains(id))
                }
            };
        if !names_it {
            return false;
        }
        if let Some(taken) = self.take_waiter(waiter) {
            self.stats.wait_ended += 1;
            // Who waits on a channel has just said that it does not want to hear any more.
            if let Ear::Blocked(blocked) = taken.ear {
                effects.push(Effect::Finish { blocked, outcome: WaitOutcome::Ended(EndReason::Cancelled) });
            }
        }
        true
    }

    /// Makes the owner's lease last `request.lease` from `now`: it replaces what was left. Answers `false` if there is no such hold:
    /// lost for good, a renewal never revives a lock. A renewal at the deadline is late.
    ///
    /// With the token it confirms a claim; without, a claim lasts at most its claim again.
    pub fn renew(
        &mut self,
        now: Time,
        place: Place<'_>,
        request: &Renew<'_>,
        caller: Caller,
        audience: &mut dyn Audience,
    ) -> Decision<bool> {
        let mut step = self.begin(now, place, audience);
        let hold = step.lock.and_then(|lock| self.lock(lock)).and_then(|lock| lock.held_by(request.owner));
        let renewal = hold
            .filter(|hold| request.token.is_none_or(|asked| asked == hold.token))
            .map(|hold| (hold.token, renewal(now, hold, request)));
        let renewed = renewal.is_some();
        if let (Some(lock), Some((token, change))) = (step.lock, renewal) {
            self.decide(now, lock, change, &mut step.effects);
            self.sessions.rebind((lock, token), caller.client);
            self.stats.renewals += 1;
        } else {
            self.stats.renewals_lost += 1;
        }
        self.conclude(step, renewed)
    }

    /// Ends every hold, or this owner's, and hands over. Answers how many.
    pub fn revoke(
        &mut self,
        now: Time,
        place: Place<'_>,
        request: &Revoke<'_>,
        audience: &mut dyn Audience,
    ) -> Decision<usize> {
        let mut step = self.begin(now, place, audience);
        let lock = step.lock.and_then(|lock| self.lock(lock));
        let tokens: Vec<Token> = match (lock, request.owner) {
            (None, _) => Vec::new(),
            (Some(lock), Some(owner)) => lock.held_by(owner).map(|hold| hold.token).into_iter().collect(),
            (Some(lock), None) => lock.holds().map(|hold| hold.token).collect(),
        };
        if let Some(lock) = step.lock {
            for token in &tokens {
                self.end(now, lock, *token, Ended::Revoked, &mut step.effects);
            }
            self.serve(now, lock, None, audience, &mut step.effects);
        }
        self.conclude(step, tokens.len())
    }

    /// Whether a current hold has exactly this token. Changes nothing.
    #[must_use]
    pub fn check(&self, now: Time, place: Place<'_>, token: Token) -> bool {
        match place.lock {
            Some(lock) => self.lock(lock).and_then(|lock| lock.get(token)).is_some_and(|hold| !hold.is_over(now)),
            // The server has taken the key, and the lock is about to be put back.
            None => self.away(place).is_some_and(|lock| lock.get(token).is_some_and(|hold| !hold.is_over(now))),
        }
    }
}

fn renewal(now: Time, hold: &Hold, request: &Renew<'_>) -> Change {
    match hold.claim() {
        Some(claim) if request.token.is_none() => {
            let mut grant = hold.to_grant();
            grant.lease = request.lease;
            grant.deadline = Some(now.after(claim.min(request.lease)));
            Change::Grant(grant)
        }
        _ => Change::Renew { token: hold.token, lease: request.lease, deadline: Some(now.after(request.lease)) },
    }
}
