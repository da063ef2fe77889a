//! A primary and its replica in miniature: two tables, two tiny keyspaces, and a clock that the test moves.
//!
//! This is the shell that the core expects, without a server: it looks up a key, calls a verb, does to the key what the decision
//! says, performs the effects in order, and feeds the replica with the changes among them. It checks what no verb may break, whatever
//! the rules are: keys are bound and unbound alternately, a blocked connection is answered exactly once, the replica agrees.

use flock_core::effect::{Ended, KeyAction, Notice, WaitOutcome};
use flock_core::lock::Start;
use flock_core::snapshot::{self, CounterImage};
use flock_core::table::{Caller, ClientId};
use flock_core::token::WallClock;
use flock_core::wait_queue::{Ear, Waiter, WaiterId};
use flock_core::{
    Acquire, Acquired, Audience, Change, Decision, Due, Effect, EndReason, Hold, Limits, Lock, LockId, LossReason,
    Millis, Name, Place, Refusal, Release, Renew, Revoke, Table, Time, Token, Wait,
};
use std::collections::BTreeMap;

/// How many things may fall due at one moment before the server is said to hang.
const DUE_MAX: usize = 5000;

/// The number of a key of the world: see [`World::new`].
pub(crate) type Spot = usize;

/// What a key holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Value {
    Nothing,
    Lock(LockId),
    /// A value of another type.
    Foreign,
}

/// One server: its table and its keyspace.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) table: Table,
    keys: Vec<(u16, &'static str, Value)>,
}

/// What became visible outside, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Happened {
    /// A change was replicated.
    Changed(Spot, Change),
    /// The server's reservation was replicated.
    Marked,
    /// A blocked connection was answered.
    Answered { owner: &'static str, blocked: u64, outcome: WaitOutcome },
    /// A message was published to an owner.
    Told { owner: &'static str, channel: &'static str, spot: Spot, notice: Notice },
    /// A hold's end was announced to anybody.
    Announced { spot: Spot, ended: Ended, token: Token, handed_to: Option<Token> },
}

/// Channels with a listener.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Listeners(Vec<&'static str>);

impl Listeners {
    pub(crate) fn come(&mut self, channel: &'static str) {
        if !self.0.contains(&channel) {
            self.0.push(channel);
        }
    }

    pub(crate) fn leave(&mut self, channel: &str) {
        self.0.retain(|known| *known != channel);
    }

    pub(crate) fn are_on(&self, channel: &str) -> bool {
        self.0.contains(&channel)
    }
}

impl Audience for Listeners {
    fn hears(&mut self, channel: &[u8]) -> bool {
        self.0.iter().any(|known| known.as_bytes() == channel)
    }
}

/// A blocked connection, as the shell remembers it.
#[derive(Clone, Copy, Debug)]
struct Blocked {
    number: u64,
    waiter: WaiterId,
    owner: &'static str,
    client: Option<ClientId>,
}

/// A primary, its replica, and whoever is connected to them.
#[derive(Clone, Debug)]
pub(crate) struct World {
    pub(crate) now: Time,
    pub(crate) primary: Node,
    pub(crate) replica: Node,
    pub(crate) listeners: Listeners,
    /// What happened since [`World::forget`].
    pub(crate) happened: Vec<Happened>,
    /// Every name that may come back as bytes.
    names: Vec<&'static str>,
    blocked: Vec<Blocked>,
    blocked_ever: u64,
    /// Which lock a blocked connection was granted, as the shell remembers until it is told.
    granted: BTreeMap<Token, LockId>,
    /// Whether the replica goes by the primary's clock; another host starts every duration when it applies it.
    pub(crate) one_clock: bool,
}

/// A wall clock from before the source was dated: it counts as that date.
pub(crate) fn wall() -> WallClock {
    WallClock::from_unix_us(0)
}

impl Node {
    fn new(limits: Limits, keys: &[(u16, &'static str)]) -> Self {
        let keys = keys.iter().map(|(db, key)| (*db, *key, Value::Nothing)).collect();
        Self { table: Table::new(limits), keys }
    }

    pub(crate) fn value(&self, spot: Spot) -> Value {
        self.keys[spot].2
    }

    pub(crate) fn lock_at(&self, spot: Spot) -> Option<LockId> {
        match self.value(spot) {
            Value::Lock(lock) => Some(lock),
            Value::Nothing | Value::Foreign => None,
        }
    }

    /// The lock stored at a key, held or not.
    pub(crate) fn lock(&self, spot: Spot) -> Option<&Lock> {
        self.lock_at(spot).and_then(|lock| self.table.lock(lock))
    }

    /// The holds at a key, oldest token first.
    pub(crate) fn holds(&self, spot: Spot) -> impl Iterator<Item = &Hold> {
        self.lock(spot).into_iter().flat_map(Lock::holds)
    }

    /// Whether the key exists.
    pub(crate) fn exists(&self, spot: Spot) -> bool {
        self.value(spot) != Value::Nothing
    }

    fn place(&self, spot: Spot) -> Place<'static> {
        let (db, key, _) = self.keys[spot];
        Place { db, key: key.as_bytes(), lock: self.lock_at(spot) }
    }

    fn spot_of(&self, db: u16, key: &[u8]) -> Spot {
        let found = self.keys.iter().position(|(known_db, known, _)| *known_db == db && known.as_bytes() == key);
        found.unwrap_or_else(|| panic!("no key {db}:{} in this world", key.escape_ascii()))
    }

    fn spot_of_lock(&self, lock: LockId) -> Spot {
        let name = self.table.name(lock).expect("a lock has a name");
        let spot = self.spot_of(name.db(), name.key());
        assert_eq!(self.lock_at(spot), Some(lock), "the table knows where the lock is stored");
        spot
    }

    /// The queue at a key, wherever it hangs.
    pub(crate) fn waiters(&self, spot: Spot) -> impl Iterator<Item = (WaiterId, &Waiter)> {
        let queues = self.table.queues();
        let (db, key, _) = self.keys[spot];
        let queue =
            queues.of_name(db, key.as_bytes()).or_else(|| self.lock_at(spot).and_then(|lock| queues.of_lock(lock)));
        queue.into_iter().flat_map(|queue| queues.iter(queue))
    }

    /// A key exists if and only if its lock is held: so creations and deletions alternate.
    fn perform_on_key(&mut self, spot: Spot, lock: Option<LockId>, action: KeyAction) {
        match action {
            KeyAction::Keep => {}
            KeyAction::Bind => {
                assert_eq!(self.value(spot), Value::Nothing, "a key is created where there is none");
                self.keys[spot].2 = Value::Lock(lock.expect("a created key holds a lock"));
            }
            KeyAction::Unbind => {
                let Value::Lock(stored) = self.value(spot) else { panic!("a key is deleted that does not exist") };
                assert_eq!(lock, Some(stored), "the deleted key holds this lock");
                self.delete(spot, true);
            }
        }
    }

    /// The server deletes a key: it calls back for the value while it unlinks it, and again when it frees it.
    fn delete(&mut self, spot: Spot, speak: bool) {
        if let Some(lock) = self.lock_at(spot) {
            self.table.removed(lock, LossReason::Removed, speak);
            self.table.freed(lock);
        }
        self.keys[spot].2 = Value::Nothing;
    }

    /// The value lives on under the new key; the server calls back for the old one only, after it has deleted the target.
    fn rename(&mut self, from: Spot, to: Spot, speak: bool) {
        self.delete(to, speak);
        if let Some(lock) = self.lock_at(from) {
            self.table.removed(lock, LossReason::Removed, speak);
        }
        self.keys[to].2 = core::mem::replace(&mut self.keys[from].2, Value::Nothing);
    }

    fn swap(&mut self, a: u16, b: u16) {
        for spot in 0..self.keys.len() {
            let (db, key, value) = self.keys[spot];
            if db == a
                && let Some(other) = self.keys.iter().position(|(known_db, known, _)| *known_db == b && *known == key)
            {
                self.keys[spot].2 = self.keys[other].2;
                self.keys[other].2 = value;
            }
        }
        self.table.swapped(a, b);
    }

    /// S11: what a server has after it has loaded a snapshot of this one: on the same boot, or on another host.
    fn copied(&self, now: Time, same_boot: bool) -> Self {
        let mut copy = Self { table: Table::new(*self.table.limits()), keys: self.keys.clone() };
        let counter = self.table.counter();
        let mut bytes = Vec::new();
        snapshot::encode_counter(CounterImage { value: counter.value(), mark: counter.mark() }, &mut bytes);
        let counter = snapshot::decode_counter(&bytes).expect("what was stored can be loaded");
        copy.table.saw_counter(counter.value);
        copy.table.saw_mark(counter.mark);
        for spot in 0..self.keys.len() {
            let Some(lock) = self.lock(spot) else { continue };
            bytes.clear();
            snapshot::encode(lock, counter.mark, 1, &mut bytes);
            let image = snapshot::decode(&bytes, if same_boot { 1 } else { 2 }).expect("what was stored can be loaded");
            let (db, key, _) = self.keys[spot];
            let loaded = copy.table.load(Name::new(db, key.as_bytes()), &image, Start::AfterLoading);
            copy.keys[spot].2 = Value::Lock(loaded.expect("there is room"));
        }
        copy.table.start_loaded(now);
        copy
    }

    fn flush(&mut self, db: Option<u16>, speak: bool) -> Decision<()> {
        let decision = self.table.flushed(db, speak);
        for spot in (0..self.keys.len()).filter(|spot| db.is_none_or(|db| db == self.keys[*spot].0)).collect::<Vec<_>>()
        {
            if let Some(lock) = self.lock_at(spot) {
                self.table.freed(lock);
            }
            self.keys[spot].2 = Value::Nothing;
        }
        decision
    }
}

impl World {
    /// A primary that is ready to grant, and an empty replica. `keys` are all keys there can be, `names` all owners and channels.
    pub(crate) fn new(limits: Limits, keys: &[(u16, &'static str)], names: &[&'static str]) -> Self {
        let mut world = Self {
            now: Time::ZERO.after(Millis(128_000)),
            primary: Node::new(limits, keys),
            replica: Node::new(limits, keys),
            listeners: Listeners::default(),
            happened: Vec::new(),
            names: names.to_vec(),
            blocked: Vec::new(),
            blocked_ever: 0,
            granted: BTreeMap::new(),
            one_clock: false,
        };
        let mark = world.primary.table.promoted(world.now, wall(), Millis(0));
        world.replica.table.saw_mark(mark);
        world
    }

    pub(crate) fn spots(&self) -> core::ops::Range<Spot> {
        0..self.primary.keys.len()
    }

    pub(crate) fn spot(&self, db: u16, key: &str) -> Spot {
        self.primary.spot_of(db, key.as_bytes())
    }

    pub(crate) fn key(&self, spot: Spot) -> (u16, &'static str) {
        let (db, key, _) = self.primary.keys[spot];
        (db, key)
    }

    /// Starts a new list of what happened.
    pub(crate) fn forget(&mut self) {
        self.happened.clear();
    }

    pub(crate) fn pass(&mut self, duration: Millis) {
        self.now = self.now.after(duration);
    }

    pub(crate) fn acquire(
        &mut self,
        spot: Spot,
        request: &Acquire<'_>,
        client: Option<ClientId>,
    ) -> Result<Acquired, Refusal> {
        if let Some(floor) = request.floor {
            self.floor(floor)?;
        }
        self.blocked_ever += 1;
        let caller = Caller { blocked: self.blocked_ever, client };
        let place = self.primary.place(spot);
        let decision = self.primary.table.acquire(self.now, place, request, caller, &mut self.listeners);
        // The connection is blocked before the effects are performed: they may be about its own request.
        if let (Ok(Acquired::Queued { waiter, .. }), Wait::Block(_)) = (&decision.answer, request.wait) {
            let owner = self.name(request.owner);
            self.blocked.push(Blocked { number: caller.blocked, waiter: *waiter, owner, client });
        }
        self.perform(spot, decision)
    }

    /// What an ACQUIRE with FLOOR does first.
    pub(crate) fn floor(&mut self, floor: u64) -> Result<(), Refusal> {
        let decision = self.primary.table.floor(floor, wall());
        self.perform(0, decision)
    }

    pub(crate) fn release(&mut self, spot: Spot, request: &Release<'_>) -> Result<bool, Refusal> {
        let place = self.primary.place(spot);
        let decision = self.primary.table.release(self.now, place, request, &mut self.listeners);
        self.perform(spot, decision)
    }

    pub(crate) fn renew(&mut self, spot: Spot, request: &Renew<'_>, client: Option<ClientId>) -> bool {
        let place = self.primary.place(spot);
        let caller = Caller { blocked: 0, client };
        let decision = self.primary.table.renew(self.now, place, request, caller, &mut self.listeners);
        self.perform(spot, decision)
    }

    pub(crate) fn revoke(&mut self, spot: Spot, request: &Revoke<'_>) -> usize {
        let place = self.primary.place(spot);
        let decision = self.primary.table.revoke(self.now, place, request, &mut self.listeners);
        self.perform(spot, decision)
    }

    pub(crate) fn check(&self, spot: Spot, token: Token) -> bool {
        self.primary.table.check(self.now, self.primary.place(spot), token)
    }

    /// Performs what is due at one key.
    pub(crate) fn look(&mut self, spot: Spot) {
        let place = self.primary.place(spot);
        let decision = self.primary.table.look(self.now, place, None, &mut self.listeners);
        self.perform(spot, decision);
    }

    /// Performs everything that is due, as the server does before it sleeps.
    pub(crate) fn wake(&mut self) {
        for _ in 0..DUE_MAX {
            match self.primary.table.advance(self.now) {
                Due::Nothing => {
                    let next = self.primary.table.next_deadline();
                    assert!(next != Some(Time::ZERO), "nothing is due, and yet the timer is set to now");
                    return;
                }
                Due::Done(decision) => {
                    let spot = decision.lock.map_or(0, |lock| self.primary.spot_of_lock(lock));
                    self.perform(spot, decision);
                }
                Due::Look(name, expected) => {
                    let spot = self.primary.spot_of(name.db(), name.key());
                    if self.primary.value(spot) == Value::Foreign {
                        self.dismiss(spot, EndReason::WrongType);
                    } else {
                        let place = self.primary.place(spot);
                        let decision = self.primary.table.look(self.now, place, expected, &mut self.listeners);
                        self.perform(spot, decision);
                    }
                }
            }
        }
        panic!("the server hangs: more than {DUE_MAX} things due at one moment");
    }

    /// The key is deleted from outside.
    pub(crate) fn delete(&mut self, spot: Spot) {
        self.primary.delete(spot, true);
        self.replica.delete(spot, false);
    }

    /// The server evicts or expires the key: it deletes it, then says why. A replica sees the deletion alone.
    pub(crate) fn evict(&mut self, spot: Spot) {
        if self.primary.exists(spot) {
            let (db, key) = self.key(spot);
            self.delete(spot);
            self.primary.table.taken_by_server(db, key.as_bytes());
        }
    }

    /// The key is overwritten with a value of another type.
    pub(crate) fn overwrite(&mut self, spot: Spot) {
        self.delete(spot);
        self.primary.keys[spot].2 = Value::Foreign;
        self.replica.keys[spot].2 = Value::Foreign;
    }

    /// RENAME, or MOVE. Nothing happens if there is no value.
    pub(crate) fn rename(&mut self, from: Spot, to: Spot) {
        if self.primary.exists(from) && from != to {
            self.primary.rename(from, to, true);
            self.replica.rename(from, to, false);
        }
    }

    /// SWAPDB.
    pub(crate) fn swap(&mut self, a: u16, b: u16) {
        self.primary.swap(a, b);
        self.replica.swap(a, b);
    }

    /// FLUSHALL, or FLUSHDB of one database.
    pub(crate) fn flush(&mut self, db: Option<u16>) {
        let decision = self.primary.flush(db, true);
        self.perform(0, decision);
        let on_replica = self.replica.flush(db, false);
        assert!(on_replica.effects.is_empty(), "a replica says nothing");
    }

    /// A connection is closed: the server tells so, then gives back what was blocked on it.
    pub(crate) fn close(&mut self, client: ClientId) {
        self.primary.table.client_gone(client);
        let (gone, blocked) = self.blocked.iter().partition(|blocked| blocked.client == Some(client));
        self.blocked = blocked;
        let gone: Vec<Blocked> = gone;
        for blocked in gone {
            // A session waiter has left with its connection; its number is not in use again yet.
            if self.primary.table.queues().get(blocked.waiter).is_some() {
                self.primary.table.left(blocked.waiter);
            }
        }
    }

    /// CLIENT UNBLOCK: the server answers the connection itself. Says whether this owner's connection was blocked.
    pub(crate) fn unblock(&mut self, owner: &str) -> bool {
        let Some(index) = self.blocked.iter().position(|blocked| blocked.owner == owner) else {
            return false;
        };
        let blocked = self.blocked.remove(index);
        self.primary.table.left(blocked.waiter);
        true
    }

    /// CLIENT UNBLOCK of the connection that waits at this key.
    pub(crate) fn unblock_at(&mut self, spot: Spot, owner: &str) {
        let waits = |(waiter, request): &(WaiterId, &Waiter)| {
            (request.owner.as_slice() == owner.as_bytes() && request.ear != Ear::Channel).then_some(*waiter)
        };
        let found = self.primary.waiters(spot).find_map(|waiting| waits(&waiting));
        if let Some(waiter) = found {
            self.blocked.retain(|blocked| blocked.waiter != waiter);
            self.primary.table.left(waiter);
        }
    }

    /// The connection to which a grant was to be answered turned out to be gone.
    pub(crate) fn undelivered(&mut self, token: Token) {
        if let Some(lock) = self.granted.remove(&token) {
            self.primary.table.undelivered(lock, token);
        }
    }

    /// The primary is demoted and its replica promoted in its place.
    pub(crate) fn fail_over(&mut self, grace: Millis) {
        let decision = self.primary.table.demoted();
        self.perform(0, decision);
        assert!(self.blocked.is_empty(), "nobody stays blocked on a replica");
        core::mem::swap(&mut self.primary, &mut self.replica);
        let _announced = self.primary.table.promoted(self.now, wall(), grace);
        self.replica = self.primary.copied(self.now, self.one_clock);
    }

    /// Dismisses every waiter at a key (its slot has moved).
    pub(crate) fn dismiss(&mut self, spot: Spot, reason: EndReason) {
        let place = self.primary.place(spot);
        let queues = self.primary.table.queues();
        let queue = queues.of_name(place.db, place.key).or_else(|| place.lock.and_then(|lock| queues.of_lock(lock)));
        if let Some(queue) = queue {
            let decision = self.primary.table.dismiss(queue, reason);
            self.perform(spot, decision);
        }
    }

    /// Does to the key what the decision says, then performs the effects in order.
    fn perform<T>(&mut self, spot: Spot, decision: Decision<T>) -> T {
        let Decision { answer, lock, key, effects } = decision;
        self.primary.perform_on_key(spot, lock, key);
        let mut granted = None;
        for effect in &effects {
            let before = granted.take();
            let happened = match effect {
                Effect::Granted(token) => {
                    assert_eq!(before, Some(*token), "a new grant is the change before");
                    continue;
                }
                Effect::Change(Change::Mark(mark)) => {
                    self.replica.table.saw_mark(*mark);
                    Happened::Marked
                }
                Effect::Change(change) => {
                    if let Change::Grant(grant) = change {
                        granted = Some(grant.token);
                    }
                    self.replicate(spot, change);
                    Happened::Changed(spot, change.clone())
                }
                Effect::Finish { blocked, outcome } => {
                    let index = self.blocked.iter().position(|waiting| waiting.number == *blocked);
                    let index = index.unwrap_or_else(|| panic!("connection {blocked} is answered and does not wait"));
                    let waiting = self.blocked.remove(index);
                    if let (WaitOutcome::Granted(token), Some(lock)) = (outcome, lock) {
                        self.granted.insert(*token, lock);
                    }
                    Happened::Answered { owner: waiting.owner, blocked: *blocked, outcome: *outcome }
                }
                Effect::Tell { channel, name, owner, notice } => Happened::Told {
                    owner: self.name(owner),
                    channel: self.name(channel),
                    spot: self.primary.spot_of(name.db(), name.key()),
                    notice: *notice,
                },
                Effect::Announce { ended, token, handed_to } => {
                    Happened::Announced { spot, ended: *ended, token: *token, handed_to: *handed_to }
                }
            };
            self.happened.push(happened);
        }
        self.primary.table.recycle(effects);
        answer
    }

    /// Another host applies the change: its clock is another, so it goes by the durations alone.
    /// (A loader on the same boot takes the exact deadlines: [`World::one_clock`].)
    fn replicate(&mut self, spot: Spot, change: &Change) {
        let mut change = change.clone();
        match &mut change {
            Change::Grant(grant) if !self.one_clock => grant.deadline = None,
            Change::Renew { deadline, .. } if !self.one_clock => *deadline = None,
            Change::Grant(_) | Change::Renew { .. } => {}
            Change::Mode { .. } | Change::End { .. } | Change::Ids { .. } | Change::Mark(_) => {}
        }
        let place = self.replica.place(spot);
        let Decision { answer: (), lock, key, effects } =
            self.replica.table.apply(place, &change, Start::Now(self.now));
        assert!(effects.is_empty(), "a replica applies, it decides nothing");
        self.replica.perform_on_key(spot, lock, key);
    }

    fn name(&self, bytes: &[u8]) -> &'static str {
        let known = self.names.iter().find(|name| name.as_bytes() == bytes);
        known.unwrap_or_else(|| panic!("no name {} in this world", bytes.escape_ascii()))
    }

    /// What holds in every world after every step, whatever the rules say.
    pub(crate) fn check_always(&self) {
        self.primary.table.check_invariants(self.now);
        self.replica.table.check_invariants(self.now);
        self.check_replica();
        let mut waiting = 0;
        for spot in self.spots() {
            for (waiter, request) in self.primary.waiters(spot) {
                if let Ear::Blocked(number) = request.ear {
                    waiting += 1;
                    let known = self.blocked.iter().find(|blocked| blocked.number == number);
                    let known = known.unwrap_or_else(|| panic!("connection {number} waits and was answered"));
                    assert_eq!(known.waiter, waiter);
                }
            }
        }
        assert_eq!(waiting, self.blocked.len(), "who is blocked waits in a queue");
    }

    /// S10: at equal offset the replica holds the same, but for running time; and it never ends a lease before the primary would.
    fn check_replica(&self) {
        for spot in self.spots() {
            let (here, there) = (self.primary.lock(spot), self.replica.lock(spot));
            assert_eq!(self.primary.exists(spot), self.replica.exists(spot), "S10: a key exists on one side only");
            assert_eq!(here.map(Lock::len), there.map(Lock::len), "S10: other holds");
            for (here, there) in self.primary.holds(spot).zip(self.replica.holds(spot)) {
                assert!(
                    here.owner == there.owner
                        && here.mode() == there.mode()
                        && here.token == there.token
                        && here.lease() == there.lease()
                        && here.terms == there.terms,
                    "S10: {here:?} on the primary, {there:?} on the replica"
                );
                assert!(there.deadline() >= here.deadline(), "a lease ends earlier after a failover");
            }
        }
        let (here, there) = (self.primary.table.counter(), self.replica.table.counter());
        assert!(there.mark() >= here.value(), "a replica would not start above what its primary has granted");
        assert!(self.replica.table.queues().is_empty(), "nobody waits on a replica");
    }
}
