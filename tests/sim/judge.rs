//! What the clients of a simulation believe and do, and whether they may.
//!
//! | rule | what it wants |
//! |---|---|
//! | exclusion | of those who believe to hold a lock exclusively, there is one at a time, and nobody beside it |
//! | belief | who believes to hold does, by the primary's count |
//! | tokens | no token names two grants; of two grants of a lock, the one heard of before the other was asked for has the smaller one |
//! | promotion | a new primary starts above every token that anybody has heard of |
//! | fence | a storage that compares tokens refuses nobody who holds |
//!
//! Not judged by the first two and the last: holds that a promotion may have lost ([`Judge::may_be_lost`]), which the storage is for, and
//! those that an administrator has ended, from then on.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flock_client::{Guard, Token};
use flock_tests::fenced_store::FencedStore;
use tokio::time::Instant;

use crate::servers::Servers;

/// The locks of a simulation.
pub(crate) const KEYS: [&str; 2] = ["accounts", "mail"];

/// Who judges; shared by all tasks of a simulation.
#[derive(Clone, Debug)]
pub(crate) struct Judge(Arc<Mutex<Ledger>>);

/// What has been seen.
#[derive(Debug)]
struct Ledger {
    begun: Instant,
    history: String,
    held: BTreeMap<u64, Held>,
    grants: Vec<Granted>,
    /// Tokens of holds that may be gone though their holders believe in them.
    excused: BTreeSet<u64>,
    store: FencedStore,
    violations: Vec<String>,
    counts: Counts,
}

/// A hold that somebody has, whether it still believes in it or not.
#[derive(Debug)]
struct Held {
    process: u32,
    key: &'static str,
    is_shared: bool,
    guard: Guard,
}

/// A grant that somebody has heard of.
#[derive(Debug)]
struct Granted {
    key: &'static str,
    token: u64,
    told: Instant,
}

/// How much happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) grants: u64,
    /// Of these: that a promotion or an administrator may have ended at some time.
    pub(crate) excused: u64,
    pub(crate) promotions: u64,
    pub(crate) faults: u64,
    pub(crate) looks: u64,
    pub(crate) writes: u64,
    pub(crate) stale_writes_refused: u64,
}

/// What came of a simulation.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) history: String,
    pub(crate) violations: Vec<String>,
    pub(crate) counts: Counts,
}

impl Judge {
    pub(crate) fn new() -> Judge {
        Judge(Arc::new(Mutex::new(Ledger {
            begun: Instant::now(),
            history: String::new(),
            held: BTreeMap::new(),
            grants: Vec::new(),
            excused: BTreeSet::new(),
            store: FencedStore::new(),
            violations: Vec::new(),
            counts: Counts::default(),
        })))
    }

    /// Writes a line into the history.
    pub(crate) fn note(&self, what: &str) {
        self.ledger().note(what);
    }

    pub(crate) fn violated(&self, what: &str) {
        self.ledger().violated(what.to_owned());
    }

    /// A fault is injected.
    pub(crate) fn fault(&self, what: &str) {
        let mut ledger = self.ledger();
        ledger.counts.faults += 1;
        ledger.note(what);
    }

    /// A client has heard that it holds a lock which it asked for at `asked`. Answers under which number that is kept here.
    pub(crate) fn granted(
        &self,
        process: u32,
        key: &'static str,
        is_shared: bool,
        asked: Instant,
        guard: Guard,
        servers: &Servers,
    ) -> u64 {
        self.excuse_old(servers);
        let mut ledger = self.ledger();
        let token = guard.token().get();
        ledger.note(&format!("process {process} holds {key}{} by {token}", if is_shared { " shared" } else { "" }));
        if let Some(earlier) = ledger.grants.iter().find(|earlier| earlier.token == token) {
            let twice = format!("{token} was granted twice, for {} and {key}", earlier.key);
            ledger.violated(twice);
        }
        // An old primary's tokens are below those of the new one, whenever they are heard of.
        let is_disorder = |earlier: &&Granted| earlier.key == key && earlier.told < asked && earlier.token > token;
        let is_excused = ledger.excused.contains(&token);
        if let Some(earlier) = ledger.grants.iter().find(is_disorder).filter(|_| !is_excused) {
            let fell = format!("{key} was granted with {token} after {}", earlier.token);
            ledger.violated(fell);
        }
        ledger.counts.grants += 1;
        ledger.grants.push(Granted { key, token, told: Instant::now() });
        let number = ledger.counts.grants;
        ledger.held.insert(number, Held { process, key, is_shared, guard });
        number
    }

    /// Whether the holder may still believe; false too if its process has crashed.
    pub(crate) fn believes(&self, number: u64) -> bool {
        self.ledger().held.get(&number).is_some_and(|held| held.guard.is_valid())
    }

    /// The holder of an exclusive lock writes to the storage; whether it has looked at its guard before is its own affair.
    pub(crate) fn write(&self, number: u64) {
        let mut ledger = self.ledger();
        let Some(held) = ledger.held.get(&number).filter(|held| !held.is_shared) else { return };
        let (key, token, believes) = (held.key, held.guard.token().get(), held.guard.is_valid());
        let owner = String::from_utf8_lossy(held.guard.owner()).into_owned();
        let accepted = ledger.store.write(key, &owner, token);
        ledger.note(&format!("write to {key} by {token}: {}", if accepted { "accepted" } else { "refused" }));
        ledger.counts.writes += 1;
        ledger.counts.stale_writes_refused += u64::from(!accepted);
        if !accepted && believes && !ledger.excused.contains(&token) {
            ledger.violated(format!("the storage refused {token}, which holds {key}"));
        }
    }

    /// The hold is about to be given back, or dropped.
    pub(crate) fn take(&self, number: u64) -> Option<Guard> {
        let mut ledger = self.ledger();
        let held = ledger.held.remove(&number)?;
        ledger.note(&format!("process {} lets go of {} by {}", held.process, held.key, held.guard.token()));
        Some(held.guard)
    }

    /// Everything that a process held is forgotten with it.
    pub(crate) fn crashed(&self, process: u32) -> Vec<Guard> {
        let mut ledger = self.ledger();
        let (gone, left) = std::mem::take(&mut ledger.held).into_iter().partition(|(_, held)| held.process == process);
        ledger.held = left;
        let gone: BTreeMap<u64, Held> = gone;
        gone.into_values().map(|held| held.guard).collect()
    }

    /// This hold may be gone from now on, or its lease be shorter than its holder knows.
    pub(crate) fn may_be_lost(&self, token: Token) {
        self.ledger().excused.insert(token.get());
    }

    /// Whatever an old primary grants or renews beside its successor.
    pub(crate) fn excuse_old(&self, servers: &Servers) {
        if let Some(old) = servers.old() {
            KEYS.iter().flat_map(|key| old.holders(key)).for_each(|token| self.may_be_lost(token));
        }
    }

    /// A server decides from now on; all its tokens will be above `floor`.
    pub(crate) fn promoted(&self, floor: u64) {
        let mut ledger = self.ledger();
        ledger.counts.promotions += 1;
        ledger.note(&format!("a replica is promoted, and starts above {floor}"));
        if let Some(highest) = ledger.grants.iter().map(|grant| grant.token).max().filter(|highest| *highest > floor) {
            ledger.violated(format!("a new primary starts above {floor} though {highest} has been granted"));
        }
    }

    /// Looks who believes at this moment.
    pub(crate) fn look(&self, servers: &Servers) {
        self.excuse_old(servers);
        let primary = servers.primary();
        let holders = KEYS.map(|key| (key, primary.holders(key)));
        let mut ledger = self.ledger();
        ledger.counts.looks += 1;
        let mut found = Vec::new();
        for (key, holders) in &holders {
            let believes = |held: &&Held| {
                held.key == *key && held.guard.is_valid() && !ledger.excused.contains(&held.guard.token().get())
            };
            let believers: Vec<_> = ledger.held.values().filter(believes).collect();
            for held in &believers {
                let token = held.guard.token();
                if !holders.contains(&token) {
                    found.push(format!("process {} believes to hold {key} by {token}, and does not", held.process));
                }
            }
            if believers.len() > 1 && believers.iter().any(|held| !held.is_shared) {
                let tokens: Vec<_> = believers.iter().map(|held| held.guard.token()).collect();
                found.push(format!("{tokens:?} believe to hold {key} at one time"));
            }
        }
        found.into_iter().for_each(|violation| ledger.violated(violation));
    }

    pub(crate) fn outcome(&self) -> Outcome {
        let mut ledger = self.ledger();
        let excused = ledger.grants.iter().filter(|grant| ledger.excused.contains(&grant.token)).count();
        ledger.counts.excused = excused as u64;
        Outcome { history: ledger.history.clone(), violations: ledger.violations.clone(), counts: ledger.counts }
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ledger {
    fn note(&mut self, what: &str) {
        let at = self.begun.elapsed();
        writeln!(self.history, "{:>6}.{:03} {what}", at.as_secs(), at.subsec_millis()).expect("memory can be written");
    }

    fn violated(&mut self, what: String) {
        self.note(&format!("VIOLATION: {what}"));
        if !self.violations.contains(&what) {
            self.violations.push(what);
        }
    }
}
