//! The storage that a lock guards, in the test process: the last judge of a run.
//!
//! It applies the storage rule of FLOCK and nothing else. Beside it, it counts what a storage without that
//! rule would have let happen: what leases alone give.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// A storage that refuses stale writers, for any number of keys and threads.
#[derive(Debug, Default)]
pub struct FencedStore {
    inside: Mutex<Inside>,
}

#[derive(Debug, Default)]
struct Inside {
    last: BTreeMap<String, (u64, String)>,
    counts: Counts,
}

/// What a store was offered and did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Writes accepted.
    pub accepted: u64,
    /// Writes refused as stale: each would have damaged data in a storage without the rule.
    pub refused: u64,
}

impl FencedStore {
    /// An empty store.
    pub fn new() -> FencedStore {
        FencedStore::default()
    }

    /// Offers a write; true if it is accepted.
    ///
    /// # Source
    /// docs/GUARANTEES.md, the storage rule: `token > last`, or `token == last` and it is the same owner.
    pub fn write(&self, key: &str, owner: &str, token: u64) -> bool {
        let mut inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        let accepted = match inside.last.get(key) {
            None => true,
            Some((last, writer)) => token > *last || token == *last && writer == owner,
        };
        if accepted {
            inside.last.insert(key.to_owned(), (token, owner.to_owned()));
            inside.counts.accepted += 1;
        } else {
            inside.counts.refused += 1;
        }
        accepted
    }

    /// What it has done so far.
    pub fn counts(&self) -> Counts {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner).counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_token_is_refused() {
        let store = FencedStore::new();
        assert!(store.write("k", "a", 1));
        assert!(store.write("k", "b", 3));
        assert!(!store.write("k", "a", 1));
        assert_eq!(store.counts(), Counts { accepted: 2, refused: 1 });
    }

    #[test]
    fn same_token_is_accepted_from_the_same_owner_only() {
        let store = FencedStore::new();
        assert!(store.write("k", "a", 1));
        assert!(store.write("k", "a", 1));
        assert!(!store.write("k", "b", 1));
    }

    #[test]
    fn keys_are_judged_apart() {
        let store = FencedStore::new();
        assert!(store.write("k", "a", 5));
        assert!(store.write("l", "b", 1));
    }
}
