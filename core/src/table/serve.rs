//! The handoff: whoever frees a lock grants it to the next in line in the same step.

use super::acquire::Ask;
use super::{Audience, LockId, Table};
use crate::effect::{Channel, Effect, Effects, Notice, WaitOutcome};
use crate::lock::Mode;
use crate::refusal::Refusal;
use crate::time::{Millis, Time};
use crate::wait_queue::{Ear, QueueId, WaiterId};

/// How many waiters are asked whether they hear, before the first gets the grant unheard.
const CANDIDATES: usize = 16;

impl Table {
    /// Grants the lock to those whose turn it is: one exclusive waiter, or adjacent shared ones.
    ///
    /// `requester` is the waiter that is asking right now: it hears the answer, and needs no message.
    #[inline]
    pub(super) fn serve(
        &mut self,
        now: Time,
        lock: LockId,
        requester: Option<WaiterId>,
        audience: &mut dyn Audience,
        effects: &mut Effects,
    ) {
        // As a rule nobody waits.
        if self.queues.of_lock(lock).is_some() {
            self.serve_queue(now, lock, requester, audience, effects);
        }
    }

    #[inline(never)]
    fn serve_queue(
        &mut self,
        now: Time,
        lock: LockId,
        requester: Option<WaiterId>,
        audience: &mut dyn Audience,
        effects: &mut Effects,
    ) {
        let mut deaf = 0;
        while let Some(queue) = self.queues.of_lock(lock) {
            if self.time_out_front(now, queue, effects) {
                continue;
            }
            let Some(waiter) = self.next_in_turn(now, lock, queue, requester, &mut deaf, audience) else {
                return;
            };
            if self.hand_over(now, lock, waiter, requester, effects).is_err() {
                return; // no token is left: nobody can be granted
            }
        }
    }

    /// A wait that is over leaves the front of its queue: a free lock is not kept for it, nor a newcomer sent away.
    fn time_out_front(&mut self, now: Time, queue: QueueId, effects: &mut Effects) -> bool {
        let front = self.queues.head(queue).and_then(|front| Some((front, self.queues.get(front)?)));
        let Some((front, _)) = front.filter(|(_, waiter)| waiter.deadline <= now) else {
            return false;
        };
        let name = self.queues.name(queue).cloned();
        if let (Some(name), Some(taken)) = (name, self.take_waiter(front)) {
            self.say_timed_out(&name, &taken, effects);
        }
        true
    }

    /// The first live waiter, if the lock admits it. Who does not hear is passed over and keeps its place; if nobody near the front
    /// hears, the head gets the grant all the same, under its claim.
    ///
    /// `deaf`: so many at the front were asked in this step already, and do not hear.
    fn next_in_turn(
        &self,
        now: Time,
        lock: LockId,
        queue: QueueId,
        requester: Option<WaiterId>,
        deaf: &mut usize,
        audience: &mut dyn Audience,
    ) -> Option<WaiterId> {
        let lock = self.lock(lock)?;
        if lock.mode() == Some(Mode::Exclusive) || self.in_grace(now) || !self.counter.is_seeded() {
            return None;
        }
        let mut unheard = None;
        let in_time = self.queues.iter(queue).filter(|(_, waiter)| waiter.deadline > now);
        let mut asked = 0;
        for (id, waiter) in in_time.take(CANDIDATES) {
            let admitted = lock.admits(waiter.mode, waiter.limit);
            let hears = requester == Some(id)
                || match waiter.ear {
                    Ear::Blocked(_) => true,
                    Ear::Channel => asked >= *deaf && audience.hears(waiter.channel()),
                };
            if hears {
                *deaf = asked;
                return admitted.then_some(id);
            }
            asked += 1;
            unheard = unheard.or(Some((id, admitted)));
        }
        *deaf = asked.saturating_sub(1); // without the head, which leaves
        unheard.and_then(|(id, admitted)| admitted.then_some(id))
    }

    fn hand_over(
        &mut self,
        now: Time,
        lock: LockId,
        waiter: WaiterId,
        requester: Option<WaiterId>,
        effects: &mut Effects,
    ) -> Result<(), Refusal> {
        let Some(asked) = self.queues.get(waiter) else {
            return Ok(());
        };
        let ask = Ask {
            owner: asked.owner.clone(),
            mode: asked.mode,
            lease: asked.lease,
            terms: asked.terms.clone(),
            client: asked.client,
        };
        // SWAPDB or RESTORE may have brought a hold of this very owner: it answers the request, as it answers a repeated one.
        let own = self
            .lock(lock)
            .and_then(|lock| lock.held_by(&ask.owner))
            .map(|hold| (hold.token, hold.claim(), hold.deadline()));
        let (token, claim, lasts) = match own {
            Some((token, claim, deadline)) => (token, claim, whole_ms(deadline.us_since(now))),
            None => {
                let claim = ask.terms.as_ref().and_then(|terms| terms.claim);
                let lasts = claim.unwrap_or(ask.lease);
                (self.grant(now, lock, ask, effects)?, claim, lasts)
            }
        };
        let Some(taken) = self.take_waiter(waiter) else {
            return Ok(());
        };
        self.stats.wait_ms.add_us(now.us_since(taken.since));
        if own.is_none() {
            self.stats.handoffs += 1;
            effects.handed_over(token);
        }
        if requester == Some(waiter) {
            return Ok(());
        }
        match taken.ear {
            Ear::Blocked(blocked) => effects.push(Effect::Finish { blocked, outcome: WaitOutcome::Granted(token) }),
            Ear::Channel => {
                let notice = Notice::Granted { token, lasts, claim: claim.is_some() };
                if let Some(name) = self.name(lock).cloned() {
                    let channel = Channel::new(taken.channel());
                    effects.push(Effect::Tell { channel, name, owner: taken.owner, notice });
                }
            }
        }
        Ok(())
    }
}

/// Rounded down: nobody believes in a lease that is over.
fn whole_ms(us: u64) -> Millis {
    Millis(u32::try_from(us / 1000).unwrap_or(u32::MAX))
}
