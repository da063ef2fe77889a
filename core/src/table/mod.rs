//! All locks of a server, and the verbs that change them.
//!
//! The shell finds a key in the keyspace and calls a verb with what it found there (a [`Place`]), the request and the time. The
//! verb first performs what is due at that place, then the request, and returns a [`Decision`] to perform. Everything that is not a
//! client's request (a lease ends, a wait is over, a connection closes, a key was deleted) is noted and comes out of
//! [`Table::advance`] when the shell is free to act: on a primary, outside a pause.
//!
//! | file | verbs |
//! |---|---|
//! | `acquire.rs` | [`Table::acquire`], [`Table::floor`] |
//! | `holder.rs` | [`Table::release`], [`Table::renew`], [`Table::revoke`], [`Table::check`] |
//! | `serve.rs` | the handoff: who is next |
//! | `due.rs` | [`Table::advance`], [`Table::look`]: deadlines, cut sessions, places to look at |
//! | `environment.rs` | what others do: deletions, flushes, swaps, connections, promotion, demotion |
//! | `reinstatement.rs` | [`Table::taken_by_server`]: keys that the server itself took away come back |
//! | `replay.rs` | [`Table::apply`], [`Table::load`]: replicas and loading apply, they never decide |
//!
//! A lock's number ([`LockId`]) is the value stored in the keyspace. It stays taken until the server frees that value
//! ([`Table::freed`]), so a number found in the keyspace always means the lock it was made for.

mod acquire;
mod due;
mod environment;
mod holder;
mod reinstatement;
mod replay;
mod serve;
mod session;

pub use acquire::Acquired;
pub use due::Due;
pub use replay::Incredible;
pub use session::ClientId;

use crate::deadlines::Deadlines;
use crate::effect::{Channel, Decision, Effect, Effects, Ended, KeyAction, Notice};
use crate::lock::{Change, Lock, Mode, Owner, Start};
use crate::name::Name;
use crate::paged::Slab;
use crate::refusal::LossReason;
use crate::request::Limits;
use crate::stats::Stats;
use crate::time::Time;
use crate::token::{Token, TokenCounter};
use crate::wait_queue::{Ear, Queues};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::num::NonZeroU32;

/// The number of a lock: what the keyspace stores as the key's value.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LockId(NonZeroU32);

impl LockId {
    /// From the number stored in the keyspace.
    #[must_use]
    pub const fn new(number: NonZeroU32) -> Self {
        Self(number)
    }

    /// The number to store.
    #[must_use]
    pub const fn get(self) -> NonZeroU32 {
        self.0
    }

    fn from_slot(slot: u32) -> Option<Self> {
        slot.checked_add(1).and_then(NonZeroU32::new).map(Self)
    }

    fn slot(self) -> u32 {
        self.0.get() - 1
    }
}

/// A key, and the lock found there.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// The database.
    pub db: u16,
    /// The key.
    pub key: &'a [u8],
    /// The lock stored at the key; `None` if the key does not exist.
    pub lock: Option<LockId>,
}

impl Place<'_> {
    fn name(&self) -> Name {
        Name::new(self.db, self.key)
    }
}

/// How the shell knows who asks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Caller {
    /// The number under which the shell will know this request's blocked connection, should it wait with BLOCK.
    pub blocked: u64,
    /// The connection.
    pub client: Option<ClientId>,
}

/// Who can be heard of a grant at this moment. Sensed by the shell, like the time.
pub trait Audience {
    /// Whether anybody listens on this channel, here and now.
    fn hears(&mut self, channel: &[u8]) -> bool;
}

/// An audience in which nobody listens.
#[derive(Clone, Copy, Debug)]
pub struct Deaf;

impl Audience for Deaf {
    fn hears(&mut self, _channel: &[u8]) -> bool {
        false
    }
}

/// All locks, queues and deadlines of a server, and its token counter.
#[derive(Clone, Debug, Default)]
pub struct Table {
    counter: TokenCounter,
    limits: Limits,
    stats: Stats,
    locks: Slab<Entry>,
    held: usize,
    deadlines: Deadlines,
    queues: Queues,
    sessions: session::Sessions,
    pending: VecDeque<due::Pending>,
    /// Grants that could not be delivered: they end when their place is looked at.
    undelivered: BTreeSet<(LockId, Token)>,
    just_removed: Option<reinstatement::JustRemoved>,
    to_put_back: BTreeMap<Name, reinstatement::JustRemoved>,
    /// No new grants before this (after a promotion).
    grace_until: Option<Time>,
    /// The empty buffer of the last effects, to be used again.
    spare: Option<Vec<Effect>>,
}

/// So many deadlines of locks that are free may be kept, beside as many as there are held locks.
const IDLE_DEADLINES_MAX: usize = 1024;

/// One lock: 96 bytes beside what the keyspace takes.
#[derive(Clone, Debug)]
struct Entry {
    name: Name,
    /// Free: the key is about to be deleted, or RENAME or MOVE carried the value of an ended lock here.
    lock: Lock,
}

/// A verb at work: the place it acts on, as it was found and as it will be left.
struct Step {
    lock: Option<LockId>,
    /// Whether the key existed.
    bound: bool,
    /// Whether the lock was held.
    was_held: bool,
    effects: Effects,
}

impl Table {
    /// An empty table.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// The bounds on requests.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// New bounds; what was granted under the old ones stays.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// The token counter.
    #[must_use]
    pub fn counter(&self) -> &TokenCounter {
        &self.counter
    }

    /// The counters of what happened.
    #[must_use]
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// How many locks are held.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held
    }

    /// Who waits.
    #[must_use]
    pub fn queues(&self) -> &Queues {
        &self.queues
    }

    /// Whether a connection matters to any hold.
    #[must_use]
    pub fn has_sessions(&self) -> bool {
        !self.sessions.is_empty()
    }

    /// Until when no new grants are made.
    #[must_use]
    pub fn grace_until(&self) -> Option<Time> {
        self.grace_until
    }

    /// The holders of a lock.
    #[must_use]
    pub fn lock(&self, lock: LockId) -> Option<&Lock> {
        self.locks.get(lock.slot()).map(|entry| &entry.lock)
    }

    /// The name of a lock.
    #[must_use]
    pub fn name(&self, lock: LockId) -> Option<&Name> {
        self.locks.get(lock.slot()).map(|entry| &entry.name)
    }

    /// The held locks in the places from `from` up to, not including, `to`. A lock that is held all the while keeps its place, so
    /// that whoever goes through the places meets it exactly once.
    pub fn places(&self, from: u32, to: u32) -> impl Iterator<Item = (u32, LockId, &Name, &Lock)> {
        (from..to.min(self.places_end())).filter_map(|place| {
            let entry = self.locks.get(place).filter(|entry| !entry.lock.is_free())?;
            Some((place, LockId::from_slot(place)?, &entry.name, &entry.lock))
        })
    }

    /// The end of [`Table::places`].
    #[must_use]
    pub fn places_end(&self) -> u32 {
        self.locks.end()
    }

    /// The name of some lock that is held or waited for, if there is one.
    #[must_use]
    pub fn any_name(&mut self) -> Option<&Name> {
        while let Some((_, slot)) = self.deadlines.first() {
            if self.locks.get(slot).is_some_and(|entry| !entry.lock.is_free()) {
                return self.locks.get(slot).map(|entry| &entry.name);
            }
            self.deadlines.remove(slot);
        }
        self.queues.all().next().and_then(|queue| self.queues.name(queue))
    }

    /// When something will be due: the shell's one timer. Perhaps too early, never too late.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        if !self.pending.is_empty() || self.just_removed.is_some() {
            return Some(Time::ZERO);
        }
        let lease = self.deadlines.first().map(|(at, _)| at);
        let wait = self.queues.first_deadline().map(|(at, _)| at);
        [lease, wait, self.grace_until].into_iter().flatten().min()
    }

    /// Bytes that one lock takes in this table.
    #[must_use]
    pub fn memory_of(&self, lock: LockId) -> usize {
        let Some(entry) = self.locks.get(lock.slot()) else {
            return 0;
        };
        size_of::<Entry>() + crate::deadlines::ENTRY_BYTES + entry.name.heap_bytes() + entry.lock.heap_bytes()
    }

    /// Bytes that the table itself has allocated, about (what single locks allocate beside it is in [`Table::memory_of`]).
    #[must_use]
    pub fn heap_bytes(&self) -> usize {
        self.locks.heap_bytes() + self.deadlines.heap_bytes() + self.queues.heap_bytes()
    }

    /// Takes back the list of a performed decision, so that the next one needs no allocation.
    pub fn recycle(&mut self, effects: Effects) {
        let mut buffer = effects.into_vec();
        if self.spare.is_none() && buffer.capacity() <= 256 {
            buffer.clear();
            self.spare = Some(buffer);
        }
    }

    fn effects(&mut self) -> Effects {
        Effects::with_buffer(self.spare.take().unwrap_or_default())
    }

    fn entry_mut(&mut self, lock: LockId) -> Option<&mut Entry> {
        self.locks.get_mut(lock.slot())
    }

    fn new_entry(&mut self, name: Name) -> Option<LockId> {
        self.locks.insert(Entry { name, lock: Lock::default() }).and_then(LockId::from_slot)
    }

    /// The place as it was found.
    fn step(&mut self, place: Place<'_>) -> Step {
        Step {
            lock: place.lock,
            bound: place.lock.is_some(),
            was_held: place.lock.and_then(|lock| self.lock(lock)).is_some_and(|lock| !lock.is_free()),
            effects: self.effects(),
        }
    }

    /// Starts a verb: looks up the place and performs what is due there.
    fn begin(&mut self, now: Time, place: Place<'_>, audience: &mut dyn Audience) -> Step {
        self.settle_removed_here(place);
        let mut step = self.step(place);
        self.put_back(now, place, &mut step);
        // Somebody waits under this name though no lock was held here: the queue goes before any newcomer.
        if let Some(queue) = self.queues.of_name(place.db, place.key) {
            step.lock = step.lock.or_else(|| self.new_entry(place.name()));
            if let Some(lock) = step.lock {
                self.queues.attach(queue, lock);
            }
        }
        let Some(lock) = step.lock else { return step };
        if !step.was_held {
            // An ended lock that was carried here: from now on it is this place's.
            if let Some(entry) = self.entry_mut(lock) {
                entry.name = place.name();
            }
        }
        self.end_what_is_over(now, lock, &mut step.effects);
        self.serve(now, lock, None, audience, &mut step.effects);
        step
    }

    /// Ends a verb: a key exists if and only if the lock is held.
    fn conclude<T>(&mut self, step: Step, answer: T) -> Decision<T> {
        let Step { mut lock, bound, was_held, effects } = step;
        let held = lock.and_then(|lock| self.lock(lock)).is_some_and(|lock| !lock.is_free());
        if let Some(free) = lock.filter(|_| !held) {
            // Waiters stay although nobody holds the lock: only while no new grants are made (the end of a promotion's grace
            // looks at every queue), or no token is left.
            self.queues.detach(free);
            if !bound {
                self.locks.remove(free.slot());
                lock = None;
            }
        }
        // In between, an ended value may have been granted and given back: a replica, which applies one change at a time, deletes it.
        let ended = || effects.iter().any(|effect| matches!(effect, Effect::Change(Change::End { .. })));
        let key = match (bound, held) {
            (false, true) => KeyAction::Bind,
            (true, false) if was_held || ended() => KeyAction::Unbind,
            _ => KeyAction::Keep,
        };
        Decision { answer, lock, key, effects }
    }

    /// Applies a change and keeps the indexes true. Every change of a lock goes through here, on a primary and on a replica.
    fn change(&mut self, lock: LockId, change: &Change, start: Start) {
        let Some(entry) = self.locks.get_mut(lock.slot()) else {
            return;
        };
        let was_held = !entry.lock.is_free();
        self.sessions.before(lock, &entry.lock, change);
        entry.lock.apply(change, start);
        let deadline = entry.lock.next_deadline();
        match (was_held, !entry.lock.is_free()) {
            (false, true) => self.held += 1,
            (true, false) => self.held -= 1,
            _ => {}
        }
        self.note_deadline(lock, deadline, start);
    }

    /// A lock that is free keeps its entry until it comes up, or is held again: most are given back long before their lease ends, and
    /// their number is the next to be used. Only a primary, where entries come up, and only as long as they do not outnumber the held.
    /// While loading nothing is noted: [`Table::start_loaded`] notes all.
    fn note_deadline(&mut self, lock: LockId, deadline: Time, start: Start) {
        match deadline {
            Time::NEVER => {
                if !self.counter.is_seeded() || self.deadlines.len() > 2 * self.held + IDLE_DEADLINES_MAX {
                    self.deadlines.remove(lock.slot());
                    let locks = &self.locks;
                    self.deadlines.sweep(|slot| locks.get(slot).is_some_and(|entry| !entry.lock.is_free()));
                }
                if self.held == 0 {
                    self.deadlines.give_back();
                }
            }
            deadline => {
                if let Start::Now(now) = start {
                    self.deadlines.set(lock.slot(), deadline, now);
                }
            }
        }
    }

    /// Applies a change on the primary, which also replicates it.
    fn decide(&mut self, now: Time, lock: LockId, change: Change, effects: &mut Effects) {
        self.change(lock, &change, Start::Now(now));
        effects.push(Effect::Change(change));
    }

    /// Ends one hold, tells its holder if it did not ask for it, and announces it.
    fn end(&mut self, now: Time, lock: LockId, token: Token, ended: Ended, effects: &mut Effects) {
        let Some(hold) = self.lock(lock).and_then(|lock| lock.get(token)) else {
            return;
        };
        let held_us = now.us_since(hold.granted());
        let loss = match ended {
            Ended::Released | Ended::Undelivered => None,
            Ended::Expired => Some(LossReason::Expired),
            Ended::Revoked => Some(LossReason::Revoked),
        };
        let notice = loss
            .and_then(|reason| Some(loss_notice(self.name(lock)?, hold.channel()?, &hold.owner, hold.token, reason)));
        self.stats.hold_ms.add_us(held_us);
        match ended {
            Ended::Released => self.stats.releases += 1,
            Ended::Expired => self.stats.expired += 1,
            Ended::Revoked => self.stats.revoked += 1,
            Ended::Undelivered => self.stats.undelivered += 1,
        }
        self.decide(now, lock, Change::End { token: Some(token) }, effects);
        if let Some(notice) = notice {
            effects.push(notice);
        }
        effects.push(Effect::Announce { ended, token, handed_to: None });
    }

    fn end_what_is_over(&mut self, now: Time, lock: LockId, effects: &mut Effects) {
        while let Some(token) = self.lock(lock).and_then(|held| held.first_over(now)) {
            self.end(now, lock, token, Ended::Expired, effects);
        }
        while let Some(token) = self.take_undelivered(lock) {
            self.end(now, lock, token, Ended::Undelivered, effects);
        }
    }

    #[inline]
    fn take_undelivered(&mut self, lock: LockId) -> Option<Token> {
        if self.undelivered.is_empty() { None } else { self.take_one_undelivered(lock) }
    }

    #[inline(never)]
    fn take_one_undelivered(&mut self, lock: LockId) -> Option<Token> {
        let first = *self.undelivered.range((lock, Token::MIN)..).next().filter(|(at, _)| *at == lock)?;
        self.undelivered.remove(&first);
        Some(first.1)
    }

    /// Asserts what one state shows of the invariants (S1, half of S2, and L1 where nothing is pending), and that the indexes agree.
    /// For tests: O(n).
    ///
    /// # Panics
    /// If an invariant is broken.
    pub fn check_invariants(&self, now: Time) {
        self.queues.check_invariants();
        let mut held = 0;
        for (slot, entry) in self.locks.iter() {
            let lock = &entry.lock;
            held += usize::from(!lock.is_free());
            if lock.len() > 1 {
                assert!(lock.holds().all(|hold| hold.mode() == Mode::Shared), "S1: exclusive beside another hold");
            }
            for hold in lock.holds() {
                assert!(hold.token.get() <= self.counter.value(), "S2: a token above the counter");
                assert_eq!(lock.held_by(&hold.owner).map(|hold| hold.token), Some(hold.token), "one hold per owner");
                assert!(lock.next_deadline() <= hold.deadline());
            }
            assert!(
                lock.is_free() || self.counter.value() <= self.counter.mark() || !self.counter.is_seeded(),
                "tokens beyond the announced mark"
            );
            let Some(id) = LockId::from_slot(slot) else { continue };
            if let Some(queue) = self.queues.of_lock(id) {
                assert!(!lock.is_free(), "a queue is attached to held locks only");
                let head = self.queues.head(queue).and_then(|head| self.queues.get(head));
                let grantable = head.is_some_and(|head| {
                    head.ear != Ear::Channel && head.deadline > now && lock.admits(head.mode, head.limit)
                });
                assert!(
                    !grantable || !self.pending.is_empty() || self.grace_until.is_some(),
                    "L1: a grantable lock while somebody waits"
                );
            }
        }
        assert_eq!(held, self.held);
    }
}

/// What a holder with a channel hears of its loss.
fn loss_notice(name: &Name, channel: &Channel, owner: &Owner, token: Token, reason: LossReason) -> Effect {
    let notice = Notice::Lost { token, reason };
    Effect::Tell { channel: channel.clone(), name: name.clone(), owner: owner.clone(), notice }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_held_lock_takes_96_bytes_of_the_table_and_12_of_its_deadlines() {
        assert_eq!(size_of::<Option<Entry>>(), 96);
    }
}
