//! A server with one key that applies what others decided, then takes over: the part of the shell that two targets need.
#![allow(dead_code, reason = "each target uses its own part of this")]

use flock_core::effect::KeyAction;
use flock_core::lock::Start;
use flock_core::snapshot::Image;
use flock_core::token::WallClock;
use flock_core::{Change, Deaf, Decision, Due, Limits, Lock, LockId, LossReason, Millis, Name, Place, Table, Time};

const DB: u16 = 0;
const KEY: &[u8] = b"k";

/// How many things may fall due at one moment before the server is said to hang.
const DUE_MAX: usize = 5000;

/// The table, and what the key holds.
#[derive(Debug)]
pub(crate) struct Replica {
    pub(crate) now: Time,
    pub(crate) table: Table,
    stored: Option<LockId>,
}

impl Replica {
    pub(crate) fn new() -> Self {
        Self { now: Time::from_us(1_000_000), table: Table::new(Limits::DEFAULT), stored: None }
    }

    /// The lock at the key.
    pub(crate) fn lock(&self) -> Option<&Lock> {
        self.stored.and_then(|stored| self.table.lock(stored))
    }

    /// Takes in a snapshot's value while loading.
    pub(crate) fn load(&mut self, image: &Image) {
        self.stored = self.table.load(Name::new(DB, KEY), image, Start::AfterLoading);
        assert!(self.stored.is_some(), "an empty table has room");
    }

    pub(crate) fn apply(&mut self, change: &Change) {
        let decision = self.table.apply(self.place(), change, Start::Now(self.now));
        assert!(decision.effects.is_empty(), "a replica applies, it decides nothing");
        self.perform(decision);
    }

    /// Loading has ended; the server begins to decide, without a grace.
    pub(crate) fn take_over(&mut self) {
        self.table.start_loaded(self.now);
        let _mark = self.table.promoted(self.now, WallClock::from_unix_us(0), Millis(0));
    }

    /// Lets `duration` pass and performs what is due then.
    pub(crate) fn wake_after(&mut self, duration: Millis) {
        self.now = self.now.after(duration);
        for _ in 0..DUE_MAX {
            let decision = match self.table.advance(self.now) {
                Due::Nothing => return,
                Due::Done(decision) => decision,
                Due::Look(_, expected) => self.table.look(self.now, self.place(), expected, &mut Deaf),
            };
            self.perform(decision);
        }
        panic!("the server hangs: more than {DUE_MAX} things due at one moment");
    }

    fn place(&self) -> Place<'static> {
        Place { db: DB, key: KEY, lock: self.stored }
    }

    /// Does to the key what the decision says.
    fn perform(&mut self, decision: Decision<()>) {
        match decision.key {
            KeyAction::Keep => {}
            KeyAction::Bind => {
                assert_eq!(self.stored, None, "a key is created where there is none");
                self.stored = decision.lock;
            }
            KeyAction::Unbind => {
                let stored = self.stored.take().expect("a key is deleted that does not exist");
                self.table.removed(stored, LossReason::Removed, true);
                self.table.freed(stored);
            }
        }
        self.table.recycle(decision.effects);
    }
}
