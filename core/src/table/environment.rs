//! What others do: keys deleted, databases flushed or swapped, connections closed, the server promoted or demoted.
//!
//! These verbs are called from notifications, in the middle of somebody else's command. They only change this table and take note;
//! what must be replicated or published comes out of [`Table::advance`], after that command.

use super::due::{Pending, push_outcome};
use super::reinstatement::JustRemoved;
use super::{ClientId, LockId, Table, loss_notice};
use crate::deadlines::Deadlines;
use crate::effect::{Decision, Effect, Effects, WaitOutcome};
use crate::lock::{Change, Hold, Lock, Start};
use crate::name::Name;
use crate::refusal::{EndReason, LossReason};
use crate::time::{Millis, Time};
use crate::token::{Token, WallClock};
use crate::wait_queue::{QueueId, WaiterId};
use alloc::vec::Vec;

impl Table {
    /// The key of this lock was deleted, overwritten, renamed, moved or evicted: the lock is free, wherever its value may live on.
    ///
    /// `speak`: this server is a primary. Its holders hear why, and its waiters are served when the place is looked at.
    pub fn removed(&mut self, lock: LockId, reason: LossReason, speak: bool) {
        // First: also where an ended value goes, an earlier removal of the same key was somebody's decision.
        self.settle_removed();
        if self.lock(lock).is_none_or(Lock::is_free) {
            return;
        }
        if speak && let (Some(held), Some(name)) = (self.lock(lock), self.name(lock).cloned()) {
            // Nobody knows of a grant that was not delivered: it is over, whoever took the key.
            let known = || held.holds().filter(|hold| !self.undelivered.contains(&(lock, hold.token)));
            if reason == LossReason::Removed {
                let holds =
                    known().map(|hold| (hold.to_grant(), self.sessions.client_of((lock, hold.token)))).collect();
                self.just_removed = Some(JustRemoved { name, holds });
            } else {
                let tell = |hold: &Hold| Some(loss_notice(&name, hold.channel()?, &hold.owner, hold.token, reason));
                let lost: Vec<Effect> = known().filter_map(tell).collect();
                self.pending.extend(lost.into_iter().map(Pending::Say));
            }
        }
        if speak {
            self.stats.removed += self.lock(lock).map_or(0, |lock| lock.len() as u64);
        }
        self.change(lock, &Change::End { token: None }, Start::AfterLoading);
        if let Some(name) = self.queues.detach(lock) {
            self.pending.push_back(Pending::Look(name));
        }
    }

    /// The server has freed the value with this number: the number may be used again.
    pub fn freed(&mut self, lock: LockId) {
        if self.lock(lock).is_some_and(|lock| !lock.is_free()) {
            self.removed(lock, LossReason::Removed, false);
        }
        while self.take_undelivered(lock).is_some() {}
        self.locks.remove(lock.slot());
    }

    /// A database (`None`: all) is being flushed: its locks are free, its waiters end with an error.
    pub fn flushed(&mut self, db: Option<u16>, speak: bool) -> Decision<()> {
        let in_db = |name: &Name| db.is_none_or(|db| db == name.db());
        let locks: Vec<LockId> = self
            .places(0, self.places_end())
            .filter(|(_, _, name, _)| in_db(name))
            .map(|(_, lock, _, _)| lock)
            .collect();
        let queues: Vec<QueueId> =
            self.queues.all().filter(|queue| self.queues.name(*queue).is_some_and(in_db)).collect();
        let mut effects = self.effects();
        for queue in queues {
            self.dismiss_queue(queue, EndReason::Flushed, &mut effects);
        }
        for lock in locks {
            self.removed(lock, LossReason::Flushed, speak);
        }
        self.settle_removed();
        self.give_up_putting_back(in_db);
        Decision::keyless((), effects)
    }

    /// Two databases have changed places: the locks went with the data, the waiters wait for the same names as before.
    pub fn swapped(&mut self, a: u16, b: u16) {
        self.settle_removed(); // what expires under that name from now on was in the other database
        let locks: Vec<(LockId, u16)> = self
            .locks
            .iter()
            .filter_map(|(slot, entry)| {
                let to = if entry.name.db() == a { b } else { a };
                let moves = entry.name.db() == a || entry.name.db() == b;
                moves.then(|| LockId::from_slot(slot)).flatten().map(|lock| (lock, to))
            })
            .collect();
        for (lock, to) in locks {
            if let Some(entry) = self.entry_mut(lock) {
                entry.name.move_to(to);
            }
            if let Some(name) = self.queues.detach(lock) {
                self.pending.push_back(Pending::Look(name));
            }
        }
        // Where a grant that was not delivered must be taken back has another name now.
        let places = self.undelivered.iter().filter_map(|(lock, _)| self.name(*lock).cloned());
        self.pending.extend(places.map(Pending::Look).collect::<Vec<_>>());
    }

    /// A connection has closed: its session holds keep their grace, its session waits end.
    pub fn client_gone(&mut self, client: ClientId) {
        self.unbind_away(client);
        for (lock, token) in self.sessions.unbind_client(client) {
            self.pending.push_back(Pending::Cut(lock, token));
        }
        for waiter in self.sessions.waiters_of(client) {
            if self.leave(waiter).is_some() {
                self.stats.wait_ended += 1;
            }
        }
    }

    /// A blocked connection is gone, or an administrator unblocked it: its request leaves the queue.
    pub fn left(&mut self, waiter: WaiterId) {
        if self.leave(waiter).is_some() {
            self.stats.wait_ended += 1;
        }
    }

    /// A grant was made to a blocked connection that turned out to be gone: it goes to the next in line. `lock`: the number that the
    /// lock had then. O(1), or O(n) if the server has taken the key since and the lock was put back.
    pub fn undelivered(&mut self, lock: LockId, token: Token) {
        if self.stay_away(token) {
            return;
        }
        let has_it = |lock: &Lock| lock.get(token).is_some();
        let found = if self.lock(lock).is_some_and(has_it) {
            Some(lock)
        } else {
            self.places(0, self.places_end()).find(|(.., lock)| has_it(lock)).map(|(_, lock, ..)| lock)
        };
        if let Some(lock) = found
            && let Some(name) = self.name(lock).cloned()
        {
            self.undelivered.insert((lock, token));
            self.pending.push_back(Pending::Look(name));
        }
    }

    /// Ends every wait in one queue: its key cannot become a lock (`WrongType`), or its slot has moved.
    pub fn dismiss(&mut self, queue: QueueId, reason: EndReason) -> Decision<()> {
        let mut effects = self.effects();
        self.dismiss_queue(queue, reason, &mut effects);
        Decision::keyless((), effects)
    }

    /// Ends every wait on this server.
    pub fn dismiss_all(&mut self, reason: EndReason) -> Decision<()> {
        let mut effects = self.effects();
        let queues: Vec<QueueId> = self.queues.all().collect();
        for queue in queues {
            self.dismiss_queue(queue, reason, &mut effects);
        }
        Decision::keyless((), effects)
    }

    fn dismiss_queue(&mut self, queue: QueueId, reason: EndReason, effects: &mut Effects) {
        let Some(name) = self.queues.name(queue).cloned() else {
            return;
        };
        while let Some(waiter) = self.queues.head(queue) {
            let Some(taken) = self.take_waiter(waiter) else { return };
            self.stats.wait_ended += 1;
            push_outcome(&name, &taken, WaitOutcome::Ended(reason), effects);
        }
    }

    /// This server starts to decide: it has booted and loaded, or it was promoted. Seeds the counter, suspends new grants for
    /// `grace`, and starts the grace of session holds, whose connections are unknown. Returns the mark to announce before anything is
    /// granted.
    #[must_use]
    pub fn promoted(&mut self, now: Time, wall: WallClock, grace: Millis) -> u64 {
        self.cut_unbound_sessions();
        self.grace_until = (grace.as_ms() > 0).then(|| now.after(grace));
        self.counter.seed(wall)
    }

    /// This server takes over names that others served, who have announced tokens up to `heard`: what is granted from now on is above
    /// that, and above the clock. A mark may have to be announced ([`Table::announce_mark`]).
    pub fn took_over(&mut self, heard: u64, wall: WallClock) {
        if self.counter.is_seeded() {
            self.counter.take_over(heard, wall);
        }
    }

    /// Nobody may end the holds of this lock here for now: its slot is not this node's. It comes up again after `pause`, or when
    /// [`Table::recall`] is called.
    pub fn defer(&mut self, now: Time, lock: LockId, pause: Millis) {
        if self.lock(lock).is_some_and(|lock| !lock.is_free()) {
            self.deadlines.postpone(lock.slot(), now.after(pause), now);
        }
    }

    /// Every lease comes up at its time again. O(n).
    pub fn recall(&mut self, now: Time) {
        self.deadlines = Deadlines::default();
        for slot in 0..self.locks.end() {
            if let Some(lock) = LockId::from_slot(slot) {
                let deadline = self.lock(lock).map_or(Time::NEVER, Lock::next_deadline);
                self.note_deadline(lock, deadline, Start::Now(now));
            }
        }
    }

    /// Session holds without a connection keep their grace.
    pub(super) fn cut_unbound_sessions(&mut self) {
        let unbound = self.sessions.unbound();
        self.pending.extend(unbound.into_iter().map(|(lock, token)| Pending::Cut(lock, token)));
    }

    /// This server decides no more: every wait ends, and what was noted is forgotten (the new primary's stream says what is true).
    pub fn demoted(&mut self) -> Decision<()> {
        let decision = self.dismiss_all(EndReason::RoleChanged);
        self.pending.clear();
        self.just_removed = None;
        self.to_put_back.clear();
        self.undelivered.clear();
        self.grace_until = None;
        self.sessions.unbind_all();
        self.counter.retire();
        decision
    }

    /// Announces a fresh mark (a rewrite child was born, a slot was imported).
    #[must_use]
    pub fn announce_mark(&mut self) -> u64 {
        self.counter.reserve()
    }
}
