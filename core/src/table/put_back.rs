//! Keys that the server took away by itself come back.
//!
//! A held lock must not end because memory is short or because somebody gave its key a time to live: its owner was promised a
//! lease. Deleting, overwriting or renaming the key is a person's decision and ends the hold; eviction and expiry of the key are
//! not, and do not. When the key goes, [`Table::removed`] cannot know which it is; if [`Table::taken_by_server`] says so right
//! afterwards, the same holds are put back under the same tokens, by the next verb at that place or by the next
//! [`Table::advance`], whichever comes first, and replicated like grants.

use super::due::Pending;
use super::session::ClientId;
use super::{LockId, Place, Step, Table};
use crate::effect::Effect;
use crate::lock::{Change, Grant};
use crate::name::Name;
use crate::time::Time;
use alloc::vec::Vec;

/// The lock whose key went last, while it is not known yet why.
#[derive(Clone, Debug)]
pub(super) struct JustRemoved {
    pub(super) name: Name,
    pub(super) holds: Vec<(Grant, Option<ClientId>)>,
    /// What to tell its holders if they have lost it.
    pub(super) lost: Vec<Effect>,
}

/// A lock to be put back.
#[derive(Clone, Debug)]
pub(super) struct PutBack {
    name: Name,
    holds: Vec<(Grant, Option<ClientId>)>,
}

impl PutBack {
    pub(super) fn name(&self) -> &Name {
        &self.name
    }
}

impl Table {
    /// The server evicted or expired this key: the lock that was removed just now was not given up by anybody.
    pub fn taken_by_server(&mut self, db: u16, key: &[u8]) {
        let Some(removed) = self.just_removed.take_if(|removed| removed.name == Name::new(db, key)) else { return };
        self.stats.removed -= removed.holds.len() as u64;
        self.stats.put_back += removed.holds.len() as u64;
        self.pending.push_back(Pending::Look(removed.name.clone()));
        self.to_put_back.push(PutBack { name: removed.name, holds: removed.holds });
    }

    /// Nobody has said that the server took the last key: its holders have lost it.
    pub(super) fn settle_removed(&mut self) {
        if let Some(removed) = self.just_removed.take() {
            self.pending.extend(removed.lost.into_iter().map(Pending::Say));
        }
    }

    /// Puts the holds of this place back, if the server took its key and nobody has put anything else there since.
    pub(super) fn put_back(&mut self, now: Time, place: Place<'_>, step: &mut Step) {
        if self.to_put_back.is_empty() {
            return;
        }
        let name = place.name();
        let Some(index) = self.to_put_back.iter().position(|put_back| put_back.name == name) else { return };
        let holds = self.to_put_back.swap_remove(index).holds;
        if step.was_held {
            return;
        }
        let Some(lock) = step.lock.or_else(|| self.new_entry(name)) else { return };
        step.lock = Some(lock);
        for (grant, client) in holds {
            self.put_back_hold(now, lock, grant, client, step);
        }
    }

    fn put_back_hold(&mut self, now: Time, lock: LockId, grant: Grant, client: Option<ClientId>, step: &mut Step) {
        let token = grant.token;
        self.decide(now, lock, Change::Grant(grant), &mut step.effects);
        self.sessions.bind(token, client);
    }
}
