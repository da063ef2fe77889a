//! Replicas and loading: they apply what was decided elsewhere.

use super::{LockId, Place, Table};
use crate::effect::Decision;
use crate::lock::{Change, Start};
use crate::name::Name;
use crate::snapshot::Image;
use crate::time::Time;
use crate::token::WallClock;

/// A restored value carries a token or mark that neither the clock nor this server's own mark can explain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Incredible {
    /// The highest acceptable value now.
    pub max: u64,
}

impl Table {
    /// Applies a change from the replication stream or the log. Decides nothing, expires nothing, serves nobody.
    pub fn apply(&mut self, place: Place<'_>, change: &Change, start: Start) -> Decision<()> {
        let mut step = self.step(place);
        match change {
            Change::Grant(grant) => {
                self.counter.saw(grant.token.get());
                step.lock = step.lock.or_else(|| self.new_entry(place.name()));
            }
            Change::Mode { new, .. } => self.counter.saw(new.get()),
            Change::Renew { .. } | Change::End { .. } | Change::Ids { .. } | Change::Mark(_) => {}
        }
        if let Some(lock) = step.lock {
            if let Some(entry) = self.entry_mut(lock).filter(|entry| entry.lock.is_free()) {
                entry.name = place.name();
            }
            self.change(lock, change, start);
        }
        self.conclude(step, ())
    }

    /// Takes a mark from the replication stream or the log.
    pub fn saw_mark(&mut self, mark: u64) {
        self.counter.saw_mark(mark);
    }

    /// Takes a counter value from a snapshot.
    pub fn saw_counter(&mut self, value: u64) {
        self.counter.saw(value);
    }

    /// Takes in a stored lock: from a snapshot, or by RESTORE. The keyspace must now hold its number.
    pub fn load(&mut self, name: Name, image: &Image, start: Start) -> Option<LockId> {
        self.counter.saw_mark(image.mark);
        let lock = self.new_entry(name)?;
        for grant in &image.grants {
            self.counter.saw(grant.token.get());
            self.change(lock, &Change::Grant(grant.clone()), start);
        }
        if let (Start::Now(now), Some(entry)) = (start, self.entry_mut(lock)) {
            // A restored deadline may be made up: no hold lasts longer than a fresh one.
            entry.lock.cap(now);
            let deadline = entry.lock.next_deadline();
            self.note_deadline(lock, deadline, start);
        }
        Some(lock)
    }

    /// Whether a value may be brought in by RESTORE: a token far above the counter and the clock would poison the counter.
    pub fn credible(&self, image: &Image, wall: WallClock) -> Result<(), Incredible> {
        let max = self.counter.highest_credible(wall);
        let highest = image.grants.iter().map(|grant| grant.token.get()).max().unwrap_or(0).max(image.mark);
        if highest > max { Err(Incredible { max }) } else { Ok(()) }
    }

    /// A running server is about to be loaded anew from its own data: holders that were told nothing yet of the flush before it have
    /// lost nothing.
    pub fn reloading(&mut self) {
        self.pending.retain(|pending| !pending.is_loss_by_flush());
    }

    /// Loading has ended: leases that were loaded without a deadline start now, and the grace of session holds, if this server decides
    /// already.
    pub fn start_loaded(&mut self, now: Time) {
        for slot in 0..self.locks.end() {
            if let Some(entry) = self.locks.get_mut(slot) {
                entry.lock.start(now);
            }
        }
        self.recall(now);
        if self.counter.is_seeded() {
            self.cut_unbound_sessions();
        }
    }
}
