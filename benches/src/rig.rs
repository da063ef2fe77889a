//! The core without a server: a table of locks, and the keyspace in miniature that the table needs.
//!
//! It does what the module does around a verb, and nothing else: finds the key's lock, calls the verb, creates or deletes the key, gives
//! the list of effects back. Names and owners are made beforehand and go by number.

use flock_core::effect::KeyAction;
use flock_core::lock::Start;
use flock_core::refusal::LossReason;
use flock_core::request::ReleaseScope;
use flock_core::table::{Caller, ClientId};
use flock_core::token::WallClock;
use flock_core::{
    Acquire, Acquired, Audience, Change, Decision, Due, Limits, LockId, Millis, Mode, Place, Refusal, Release, Renew,
    Revoke, Table, Time, Token, Wait,
};
use flock_tests::random::Random;

use crate::names;

/// The lease of the locks that are held beside what is measured.
pub const LONG: Millis = Millis(12 * 3600 * 1000);
/// One step of the clock: about what a command takes.
const STEP_US: u64 = 4;

/// An audience in which everybody listens.
struct Everybody;

impl Audience for Everybody {
    fn hears(&mut self, _channel: &[u8]) -> bool {
        true
    }
}

/// A table, its keys, and the time.
#[derive(Debug)]
pub struct Rig {
    table: Table,
    now: Time,
    names: Vec<Vec<u8>>,
    owners: Vec<Vec<u8>>,
    /// What the keyspace stores under each name.
    stored: Vec<Option<LockId>>,
    /// The name that each lock is stored under.
    name_of: Vec<usize>,
    held: usize,
    blocked: u64,
}

impl Rig {
    /// Names of `key_bytes` and owners of `owner_bytes`: the first `held` names are locks held by the owners of the same numbers, `spare`
    /// more are free.
    pub fn new(held: usize, spare: usize, key_bytes: usize, owner_bytes: usize) -> Rig {
        let mut random = Random::from_seed(7);
        let limits = Limits { waiters_max: usize::MAX, ..Limits::DEFAULT };
        let mut table = Table::new(limits);
        let now = Time::from_us(3_600_000_000);
        // The mark goes to replicas: here are none.
        let _ = table.promoted(now, WallClock::from_unix_us(0), Millis(0));
        let count = held + spare;
        let mut rig = Rig {
            table,
            now,
            names: (0..count).map(|_| names::key(&mut random, key_bytes)).collect(),
            owners: (0..count).map(|_| names::owner(&mut random, owner_bytes)).collect(),
            stored: vec![None; count],
            name_of: vec![usize::MAX; count + 1],
            held,
            blocked: 0,
        };
        for name in 0..held {
            must_be_granted(rig.acquire(name, name, LONG));
        }
        rig
    }

    /// The number of the first spare name; those behind it are spare too.
    pub fn first_spare(&self) -> usize {
        self.held
    }

    /// The table.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// The table, the time and the place of a name, for verbs of the bench's own.
    fn parts(&mut self, name: usize) -> (&mut Table, Time, Place<'_>) {
        self.now = Time::from_us(self.now.as_us() + STEP_US);
        let place = Place { db: 0, key: &self.names[name], lock: self.stored[name] };
        (&mut self.table, self.now, place)
    }

    /// Does to the key what was decided.
    fn perform<T>(&mut self, name: usize, decision: Decision<T>) -> T {
        let Decision { answer, lock, key, effects } = decision;
        match (key, lock) {
            (KeyAction::Bind, Some(lock)) => {
                self.stored[name] = Some(lock);
                self.name_of[index(lock)] = name;
            }
            (KeyAction::Unbind, Some(lock)) => {
                // The server calls back for the value while it unlinks it, and again when it frees it.
                self.table.removed(lock, LossReason::Removed, true);
                self.table.freed(lock);
                self.stored[name] = None;
            }
            _ => {}
        }
        self.table.recycle(effects);
        answer
    }

    /// A request with options.
    ///
    /// # Errors
    /// What the core refuses.
    pub fn ask(
        &mut self,
        name: usize,
        owner: usize,
        lease: Millis,
        options: impl FnOnce(&mut Acquire<'_>),
    ) -> Result<Acquired, Refusal> {
        self.blocked += 1;
        let caller = Caller { blocked: self.blocked, client: ClientId::new(1) };
        self.now = Time::from_us(self.now.as_us() + STEP_US);
        let place = Place { db: 0, key: &self.names[name], lock: self.stored[name] };
        let mut request = Acquire::new(place.key, &self.owners[owner], lease);
        options(&mut request);
        let decision = self.table.acquire(self.now, place, &request, caller, &mut Everybody);
        self.perform(name, decision)
    }

    /// A plain try.
    ///
    /// # Errors
    /// What the core refuses.
    pub fn acquire(&mut self, name: usize, owner: usize, lease: Millis) -> Result<Acquired, Refusal> {
        self.ask(name, owner, lease, |_| {})
    }

    /// A shared try.
    ///
    /// # Errors
    /// What the core refuses.
    pub fn acquire_shared(&mut self, name: usize, owner: usize) -> Result<Acquired, Refusal> {
        self.ask(name, owner, LONG, |request| request.mode = Mode::Shared)
    }

    /// A request that waits on its connection.
    ///
    /// # Errors
    /// What the core refuses.
    pub fn block(&mut self, name: usize, owner: usize, wait: Option<Millis>) -> Result<Acquired, Refusal> {
        self.ask(name, owner, LONG, |request| request.wait = Wait::Block(wait))
    }

    /// A request that queues.
    ///
    /// # Errors
    /// What the core refuses.
    pub fn queue(&mut self, name: usize, owner: usize) -> Result<Acquired, Refusal> {
        self.ask(name, owner, LONG, |request| {
            request.wait = Wait::Queue(LONG);
            request.channel = Some(b"channel");
        })
    }

    /// Gives the lock back, or cancels a queued request.
    ///
    /// # Errors
    /// What the core refuses.
    pub fn release(&mut self, name: usize, owner: usize) -> Result<bool, Refusal> {
        self.now = Time::from_us(self.now.as_us() + STEP_US);
        let place = Place { db: 0, key: &self.names[name], lock: self.stored[name] };
        let request = Release { key: place.key, owner: &self.owners[owner], token: None, scope: ReleaseScope::Plain };
        let decision = self.table.release(self.now, place, &request, &mut Everybody);
        self.perform(name, decision)
    }

    /// Renews the lease.
    pub fn renew(&mut self, name: usize, owner: usize) -> bool {
        self.now = Time::from_us(self.now.as_us() + STEP_US);
        let place = Place { db: 0, key: &self.names[name], lock: self.stored[name] };
        let request = Renew { key: place.key, owner: &self.owners[owner], lease: LONG, token: None };
        let decision = self.table.renew(self.now, place, &request, Caller::default(), &mut Everybody);
        self.perform(name, decision)
    }

    /// Whether a lock has this token.
    pub fn check(&mut self, name: usize, token: Token) -> bool {
        let (table, now, place) = self.parts(name);
        table.check(now, place, token)
    }

    /// Ends every hold.
    pub fn revoke(&mut self, name: usize) -> usize {
        let (table, now, place) = self.parts(name);
        let request = Revoke { key: place.key, owner: None };
        let decision = table.revoke(now, place, &request, &mut Everybody);
        self.perform(name, decision)
    }

    /// Applies a change, as a replica does.
    pub fn apply(&mut self, name: usize, change: &Change) {
        let (table, now, place) = self.parts(name);
        let decision = table.apply(place, change, Start::Now(now));
        self.perform(name, decision);
    }

    /// Lets time go by.
    pub fn pass(&mut self, duration: Millis) {
        self.now = self.now.after(duration);
    }

    /// Performs what is due: at least `count` ends of leases or waits. (Where somebody leaves a queue, its lock is looked at too: here
    /// that is always the lock of name 0.)
    ///
    /// # Panics
    /// If it is less.
    pub fn perform_due(&mut self, count: usize) {
        let mut done = 0;
        loop {
            match self.table.advance(self.now) {
                Due::Nothing => break,
                Due::Done(decision) => self.perform(0, decision),
                Due::Look(_, lock) => {
                    let name = lock.map_or(0, |lock| self.name_of[index(lock)]);
                    let (table, now, place) = self.parts(name);
                    let decision = table.look(now, place, lock, &mut Everybody);
                    self.perform(name, decision);
                }
            }
            done += 1;
        }
        assert!(done >= count, "{done} of {count} ended");
    }
}

fn index(lock: LockId) -> usize {
    usize::try_from(lock.get().get()).unwrap_or(usize::MAX)
}

/// The token of a grant.
///
/// # Panics
/// If it was none.
pub fn token_of(answer: Result<Acquired, Refusal>) -> Token {
    match answer {
        Ok(Acquired::Granted(token)) => token,
        other => panic!("expected a grant, got {other:?}"),
    }
}

/// Wants a grant.
///
/// # Panics
/// If it was none.
pub fn must_be_granted(answer: Result<Acquired, Refusal>) {
    token_of(answer);
}

/// Wants a request to wait.
///
/// # Panics
/// If it does not.
pub fn must_wait(answer: Result<Acquired, Refusal>) {
    assert!(matches!(answer, Ok(Acquired::Queued { .. })), "expected to wait, got {answer:?}");
}

/// Wants somebody else to hold the lock.
///
/// # Panics
/// If nobody does.
pub fn must_be_busy(answer: Result<Acquired, Refusal>) {
    assert_eq!(answer, Ok(Acquired::Busy));
}

/// Wants a hold to have ended.
///
/// # Panics
/// If none did.
pub fn must_end(answer: Result<bool, Refusal>) {
    assert_eq!(answer, Ok(true));
}
