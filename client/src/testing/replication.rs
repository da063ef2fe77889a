//! What a server in memory tells one that follows it: in the bytes that real servers send.

use flock_core::lock::Change;
use flock_core::wire::{Corrupt, change};

/// The followers are other machines: a deadline on the sender's clock means nothing there.
const BOOT_UNKNOWN: u64 = 0;

/// One change of one lock, or a mark, as a primary replicates it; see [`Server::replicated`](super::Server::replicated).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replicated {
    pub(super) db: u16,
    pub(super) key: Box<[u8]>,
    change: Box<[u8]>,
}

impl Replicated {
    pub(super) fn new(db: u16, key: &[u8], change: &Change) -> Self {
        let mut bytes = Vec::new();
        change::encode(change, BOOT_UNKNOWN, &mut bytes);
        Self { db, key: key.into(), change: bytes.into() }
    }

    pub(super) fn change(&self) -> Result<Change, Corrupt> {
        change::decode(&self.change, BOOT_UNKNOWN)
    }

    /// Whether it reserves tokens, and changes no lock.
    #[must_use]
    pub fn is_mark(&self) -> bool {
        self.change.starts_with(b"MARK ")
    }
}
