//! Who waits, for which lock, in which order.
//!
//! One FIFO queue per lock for all modes. Grants leave from the front: a shared request behind an exclusive one waits, so a stream
//! of readers cannot starve a writer. Waiters live on the primary only: never saved, never replicated; a waiter is as mortal as the
//! connection it waits on.
//!
//! A queue belongs to a *name*. While the lock is held it is attached to the lock, so that a handoff finds it without a search; when
//! the lock is gone and the queue could not be served at once (the key was deleted, new grants are suspended), it waits under its
//! name. Leaving from any place, being next and being found by owner cost O(log n) or less.

use crate::deadlines::Deadlines;
use crate::lock::{Mode, Owner, Terms};
use crate::name::Name;
use crate::paged::Slab;
use crate::table::LockId;
use crate::time::{Millis, Time};
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use core::num::{NonZeroU32, NonZeroU64};

/// A waiter's number, valid until it leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WaiterId(u32);

impl WaiterId {
    pub(crate) const FIRST: Self = Self(0);
    pub(crate) const LAST: Self = Self(u32::MAX);
}

/// A queue's number, valid while somebody waits in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct QueueId(u32);

/// How a waiter hears of its grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ear {
    /// Its connection is blocked; the shell knows it by this number.
    Blocked(u64),
    /// On the channel in its terms.
    Channel,
}

/// A queued request.
#[derive(Clone, Debug)]
pub struct Waiter {
    /// Who asks.
    pub owner: Owner,
    /// The conditions; the channel is one of them.
    pub terms: Option<Box<Terms>>,
    /// When it gives up; `Time::NEVER` for no limit.
    pub deadline: Time,
    /// When it joined.
    pub since: Time,
    /// How it hears.
    pub ear: Ear,
    /// The lease it asks.
    pub lease: Millis,
    /// Grant only while fewer than this many hold the lock.
    pub limit: Option<NonZeroU32>,
    /// The mode it asks.
    pub mode: Mode,
    /// Its connection, if the request dies with it.
    pub client: Option<NonZeroU64>,
}

impl Waiter {
    /// The channel it listens on; empty for none.
    #[must_use]
    pub fn channel(&self) -> &[u8] {
        self.terms.as_ref().map_or(b"", |terms| &terms.channel)
    }
}

#[derive(Clone, Debug)]
struct Node {
    waiter: Waiter,
    queue: u32,
    previous: u32,
    next: u32,
    ticket: u64,
}

#[derive(Clone, Debug)]
struct Queue {
    name: Name,
    lock: Option<LockId>,
    head: u32,
    tail: u32,
    len: usize,
    next_ticket: u64,
}

const NONE: u32 = u32::MAX;

/// All queues of the server.
#[derive(Clone, Debug, Default)]
pub struct Queues {
    nodes: Slab<Node>,
    queues: Slab<Queue>,
    by_lock: BTreeMap<LockId, QueueId>,
    unheld: BTreeMap<Name, QueueId>,
    /// (queue, hash of the owner, waiter): found by owner without a second copy of the owner.
    by_owner: BTreeSet<(u32, u64, u32)>,
    deadlines: Deadlines,
}

impl Queues {
    /// How many wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether nobody waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// The queue attached to a lock.
    #[must_use]
    #[inline]
    pub fn of_lock(&self, lock: LockId) -> Option<QueueId> {
        if self.by_lock.is_empty() { None } else { self.by_lock.get(&lock).copied() }
    }

    /// The queue that waits under a name whose lock is not held.
    #[must_use]
    #[inline]
    pub fn of_name(&self, db: u16, key: &[u8]) -> Option<QueueId> {
        if self.unheld.is_empty() { None } else { self.find_unheld(db, key) }
    }

    #[inline(never)]
    fn find_unheld(&self, db: u16, key: &[u8]) -> Option<QueueId> {
        self.unheld.get(&Name::new(db, key)).copied()
    }

    /// How many wait in this queue.
    #[must_use]
    pub fn queue_len(&self, queue: QueueId) -> usize {
        self.queues.get(queue.0).map_or(0, |queue| queue.len)
    }

    /// The name this queue waits for.
    #[must_use]
    pub fn name(&self, queue: QueueId) -> Option<&Name> {
        self.queues.get(queue.0).map(|queue| &queue.name)
    }

    /// The lock this queue is attached to.
    #[must_use]
    pub fn lock(&self, queue: QueueId) -> Option<LockId> {
        self.queues.get(queue.0).and_then(|queue| queue.lock)
    }

    /// A new queue, for the first waiter of a name.
    pub fn create(&mut self, name: Name, lock: Option<LockId>) -> Option<QueueId> {
        let queue = Queue { name: name.clone(), lock, head: NONE, tail: NONE, len: 0, next_ticket: 0 };
        let id = QueueId(self.queues.insert(queue)?);
        match lock {
            Some(lock) => self.by_lock.insert(lock, id),
            None => self.unheld.insert(name, id),
        };
        Some(id)
    }

    /// The queue that waits under a name now waits for this lock.
    pub fn attach(&mut self, queue: QueueId, lock: LockId) {
        let Some(entry) = self.queues.get_mut(queue.0) else {
            return;
        };
        debug_assert!(entry.lock.is_none());
        entry.lock = Some(lock);
        self.unheld.remove(&entry.name);
        self.by_lock.insert(lock, queue);
    }

    /// The lock is gone: its queue, if any, waits under its name. Returns the name if somebody waits.
    #[inline]
    pub fn detach(&mut self, lock: LockId) -> Option<Name> {
        if self.by_lock.is_empty() { None } else { self.detach_from(lock) }
    }

    #[inline(never)]
    fn detach_from(&mut self, lock: LockId) -> Option<Name> {
        let queue = self.by_lock.remove(&lock)?;
        let entry = self.queues.get_mut(queue.0)?;
        entry.lock = None;
        self.unheld.insert(entry.name.clone(), queue);
        Some(entry.name.clone())
    }

    /// Adds a waiter at the end.
    pub fn push(&mut self, queue: QueueId, waiter: Waiter) -> Option<WaiterId> {
        let (tail, ticket) = self.queues.get(queue.0).map(|entry| (entry.tail, entry.next_ticket))?;
        let hash = hash(&waiter.owner);
        let (deadline, now) = (waiter.deadline, waiter.since);
        let number = self.nodes.insert(Node { waiter, queue: queue.0, previous: tail, next: NONE, ticket })?;
        if let Some(before) = self.nodes.get_mut(tail) {
            before.next = number;
        }
        let entry = self.queues.get_mut(queue.0)?;
        entry.tail = number;
        if entry.head == NONE {
            entry.head = number;
        }
        entry.len += 1;
        entry.next_ticket += 1;
        self.by_owner.insert((queue.0, hash, number));
        if deadline != Time::NEVER {
            self.deadlines.set(number, deadline, now);
        }
        Some(WaiterId(number))
    }

    /// Takes a waiter out; its queue disappears with its last waiter.
    pub fn remove(&mut self, waiter: WaiterId) -> Option<Waiter> {
        let node = self.nodes.remove(waiter.0)?;
        self.deadlines.remove(waiter.0);
        self.by_owner.remove(&(node.queue, hash(&node.waiter.owner), waiter.0));
        if let Some(before) = self.nodes.get_mut(node.previous) {
            before.next = node.next;
        }
        if let Some(after) = self.nodes.get_mut(node.next) {
            after.previous = node.previous;
        }
        if let Some(entry) = self.queues.get_mut(node.queue) {
            if entry.head == waiter.0 {
                entry.head = node.next;
            }
            if entry.tail == waiter.0 {
                entry.tail = node.previous;
            }
            entry.len -= 1;
            if entry.len == 0 {
                self.drop_queue(node.queue);
            }
        }
        Some(node.waiter)
    }

    /// The waiter.
    #[must_use]
    pub fn get(&self, waiter: WaiterId) -> Option<&Waiter> {
        self.nodes.get(waiter.0).map(|node| &node.waiter)
    }

    /// Replaces a waiter's request in place: it keeps its turn. The owner must be the same.
    pub fn replace(&mut self, waiter: WaiterId, request: Waiter) -> Option<Waiter> {
        let (deadline, now) = (request.deadline, request.since);
        let node = self.nodes.get_mut(waiter.0)?;
        debug_assert_eq!(node.waiter.owner, request.owner);
        let since = node.waiter.since;
        let old = core::mem::replace(&mut node.waiter, Waiter { since, ..request });
        if deadline == Time::NEVER {
            self.deadlines.remove(waiter.0);
        } else {
            self.deadlines.set(waiter.0, deadline, now);
        }
        Some(old)
    }

    /// The queue a waiter is in.
    #[must_use]
    pub fn queue_of(&self, waiter: WaiterId) -> Option<QueueId> {
        self.nodes.get(waiter.0).map(|node| QueueId(node.queue))
    }

    /// The first waiter.
    #[must_use]
    pub fn head(&self, queue: QueueId) -> Option<WaiterId> {
        self.queues.get(queue.0).and_then(|queue| (queue.head != NONE).then_some(WaiterId(queue.head)))
    }

    /// The waiters in order.
    pub fn iter(&self, queue: QueueId) -> impl Iterator<Item = (WaiterId, &Waiter)> {
        let mut next = self.queues.get(queue.0).map_or(NONE, |queue| queue.head);
        core::iter::from_fn(move || {
            let node = self.nodes.get(next)?;
            let id = WaiterId(next);
            next = node.next;
            Some((id, &node.waiter))
        })
    }

    /// This owner's waiter.
    #[must_use]
    pub fn find(&self, queue: QueueId, owner: &[u8]) -> Option<WaiterId> {
        let hash = hash(owner);
        self.by_owner
            .range((queue.0, hash, 0)..=(queue.0, hash, NONE))
            .map(|(_, _, number)| WaiterId(*number))
            .find(|waiter| self.get(*waiter).is_some_and(|waiter| waiter.owner.as_slice() == owner))
    }

    /// 1 for the next in line. Exact for a waiter that just joined, later an upper bound (some ahead may have left).
    #[must_use]
    pub fn position(&self, waiter: WaiterId) -> usize {
        let Some(node) = self.nodes.get(waiter.0) else { return 0 };
        let Some(queue) = self.queues.get(node.queue) else {
            return 0;
        };
        if queue.tail == waiter.0 {
            return queue.len;
        }
        let first = self.nodes.get(queue.head).map_or(node.ticket, |head| head.ticket);
        let ahead = usize::try_from(node.ticket.saturating_sub(first)).unwrap_or(usize::MAX);
        // At least one waits behind.
        ahead.saturating_add(1).min(queue.len - 1)
    }

    /// When the first wait may be over (never too late), and whose it is.
    #[must_use]
    pub fn first_deadline(&self) -> Option<(Time, WaiterId)> {
        self.deadlines.first().map(|(at, number)| (at, WaiterId(number)))
    }

    /// The waiter's deadline turned out to be later than noted.
    pub fn postpone(&mut self, waiter: WaiterId, at: Time, now: Time) {
        self.deadlines.postpone(waiter.0, at, now);
    }

    /// All queues.
    pub fn all(&self) -> impl Iterator<Item = QueueId> {
        self.queues.iter().map(|(number, _)| QueueId(number))
    }

    /// Bytes allocated, about.
    #[must_use]
    pub fn heap_bytes(&self) -> usize {
        self.nodes.heap_bytes()
            + self.queues.heap_bytes()
            + self.deadlines.heap_bytes()
            + self.by_owner.len() * size_of::<(u32, u64, u32)>()
    }

    fn drop_queue(&mut self, number: u32) {
        if let Some(queue) = self.queues.remove(number) {
            match queue.lock {
                Some(lock) => self.by_lock.remove(&lock),
                None => self.unheld.remove(&queue.name),
            };
        }
    }

    /// Asserts what must hold between the parts. For tests: O(n).
    pub fn check_invariants(&self) {
        let mut waiters = 0;
        for id in self.all() {
            let mut tickets = self.iter(id).filter_map(|(waiter, _)| self.nodes.get(waiter.0)).map(|node| node.ticket);
            let mut previous = tickets.next();
            assert!(previous.is_some(), "a queue exists only while somebody waits in it");
            for ticket in tickets {
                assert!(previous < Some(ticket), "tickets rise along the queue");
                previous = Some(ticket);
            }
            let len = self.iter(id).count();
            assert_eq!(len, self.queue_len(id));
            waiters += len;
            for (waiter, request) in self.iter(id) {
                assert_eq!(self.find(id, &request.owner), Some(waiter), "found by owner; one request per owner");
                assert_eq!(self.queue_of(waiter), Some(id));
            }
            match self.lock(id) {
                Some(lock) => assert_eq!(self.of_lock(lock), Some(id)),
                None => assert_eq!(self.name(id).and_then(|name| self.of_name(name.db(), name.key())), Some(id)),
            }
        }
        assert_eq!(waiters, self.nodes.len());
        assert_eq!(waiters, self.by_owner.len());
        assert_eq!(self.queues.len(), self.by_lock.len() + self.unheld.len());
    }
}

/// FNV-1a. Not secret: owners with equal hashes are told apart by their bytes, they only share a bucket.
fn hash(owner: &[u8]) -> u64 {
    owner.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}
