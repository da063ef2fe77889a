//! A storage that checks nothing, and sees who is at work on it at the same time: what leases alone give.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use flock_tests::history::{Mode, now_ns};

/// Somebody who works under a lock, by what he believes.
#[derive(Clone, Debug)]
pub(crate) struct Visitor {
    pub(crate) owner: String,
    pub(crate) mode: Mode,
    pub(crate) limit: Option<u32>,
    /// When the lock was asked for.
    pub(crate) asked_ns: u64,
    /// Until when it is believed to be held.
    pub(crate) believed_until_ns: u64,
}

/// Two who worked at one time, and should not have.
#[derive(Clone, Debug)]
pub(crate) struct Meeting {
    pub(crate) key: String,
    pub(crate) at_ns: u64,
    pub(crate) first: Visitor,
    pub(crate) second: Visitor,
}

impl Meeting {
    /// Whether one of the two went on although, by its own count, its lease was over: a process that was paused.
    pub(crate) fn somebody_overstayed(&self) -> bool {
        self.first.believed_until_ns <= self.at_ns || self.second.believed_until_ns <= self.at_ns
    }
}

/// The storage.
#[derive(Debug, Default)]
pub(crate) struct UnfencedStore {
    inside: Mutex<Inside>,
}

#[derive(Debug, Default)]
struct Inside {
    visitors: BTreeMap<String, Vec<Visitor>>,
    visits: u64,
    meetings: Vec<Meeting>,
}

impl UnfencedStore {
    /// `visitor` begins to work on what `key` guards.
    pub(crate) fn enter(&self, key: &str, visitor: Visitor) {
        let mut inside = self.lock();
        // Under the mutex, so that nobody is taken to have come in time and is then kept waiting here.
        let at_ns = now_ns();
        inside.visits += 1;
        let present = inside.visitors.entry(key.to_owned()).or_default();
        let shares = |other: &Visitor| other.mode == Mode::Shared && visitor.mode == Mode::Shared;
        let is_full = visitor.limit.is_some_and(|limit| present.len() >= limit as usize);
        // One too many: any of those present may be the one who has lost its hold, or should have left.
        let over_limit = present.iter().filter(|_| is_full).min_by_key(|other| other.believed_until_ns).cloned();
        let asked_ns = present.iter().map(|other| other.asked_ns).min().unwrap_or(at_ns);
        let over_limit = over_limit.map(|other| Visitor { asked_ns, ..other });
        let rivals = present.iter().filter(|other| !shares(other)).cloned();
        let met: Vec<_> = rivals.chain(over_limit).collect();
        present.push(visitor.clone());
        inside.meetings.extend(met.into_iter().map(|first| Meeting {
            key: key.to_owned(),
            at_ns,
            first,
            second: visitor.clone(),
        }));
    }

    /// A renewal was confirmed while its owner was at work.
    pub(crate) fn believe(&self, key: &str, owner: &str, believed_until_ns: u64) {
        let mut inside = self.lock();
        let present = inside.visitors.get_mut(key).into_iter().flatten();
        for visitor in present.filter(|visitor| visitor.owner == owner) {
            visitor.believed_until_ns = believed_until_ns;
        }
    }

    /// `owner` has finished.
    pub(crate) fn leave(&self, key: &str, owner: &str) {
        if let Some(present) = self.lock().visitors.get_mut(key) {
            present.retain(|visitor| visitor.owner != owner);
        }
    }

    /// How often somebody worked.
    pub(crate) fn visits(&self) -> u64 {
        self.lock().visits
    }

    /// How often somebody worked, and who met.
    pub(crate) fn outcome(&self) -> (u64, Vec<Meeting>) {
        let inside = self.lock();
        (inside.visits, inside.meetings.clone())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn visitor(owner: &str, mode: Mode) -> Visitor {
        let limit = (mode == Mode::Shared).then_some(2);
        Visitor { owner: owner.into(), mode, limit, asked_ns: 0, believed_until_ns: u64::MAX }
    }

    fn meetings(store: &UnfencedStore) -> Vec<(String, String)> {
        store.outcome().1.into_iter().map(|meeting| (meeting.first.owner, meeting.second.owner)).collect()
    }

    #[test]
    fn writer_meets_whoever_is_there() {
        let store = UnfencedStore::default();
        store.enter("k", visitor("a", Mode::Exclusive));
        store.enter("other", visitor("b", Mode::Exclusive));
        assert_eq!(meetings(&store), []);
        store.enter("k", visitor("c", Mode::Shared));
        assert_eq!(meetings(&store), [("a".into(), "c".into())]);
    }

    #[test]
    fn readers_share_up_to_their_limit_and_who_left_is_not_met() {
        let store = UnfencedStore::default();
        store.enter("k", visitor("a", Mode::Shared));
        store.enter("k", visitor("b", Mode::Shared));
        store.leave("k", "a");
        store.enter("k", visitor("c", Mode::Shared));
        assert_eq!(meetings(&store), []);
        store.enter("k", visitor("d", Mode::Shared));
        assert_eq!(meetings(&store), [("b".into(), "d".into())]);
    }

    #[test]
    fn overstaying_is_told_from_a_lock_that_failed() {
        let store = UnfencedStore::default();
        store.enter("k", visitor("a", Mode::Exclusive));
        store.enter("k", visitor("b", Mode::Exclusive));
        store.believe("k", "a", 1);
        store.enter("k", visitor("c", Mode::Exclusive));
        let told: Vec<_> = store.outcome().1.iter().map(Meeting::somebody_overstayed).collect();
        assert_eq!(told, [false, true, false]);
    }
}
