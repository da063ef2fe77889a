//! The name of a lock: a key in one of the server's databases.

use crate::bytes::Bytes;
use core::fmt;

/// Database and key. Two names are the same lock if and only if both agree, byte for byte.
///
/// 24 bytes; a key of up to 20 bytes needs no allocation.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name {
    db: u16,
    key: Bytes<20>,
}

impl Name {
    /// The lock named `key` in database `db`.
    #[must_use]
    pub fn new(db: u16, key: &[u8]) -> Self {
        Self { db, key: Bytes::new(key) }
    }

    /// The database's number.
    #[must_use]
    pub fn db(&self) -> u16 {
        self.db
    }

    /// The key.
    #[must_use]
    pub fn key(&self) -> &[u8] {
        self.key.as_slice()
    }

    /// The same key in another database (after SWAPDB).
    pub(crate) fn move_to(&mut self, db: u16) {
        self.db = db;
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.key.heap_bytes()
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{:?}", self.db, self.key)
    }
}
