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
use crate::lock::{Change, Grant, Lock, Start};
use crate::name::Name;
use crate::time::Time;
use alloc::vec::Vec;

/// A lock whose key went: the last one, while it is not known yet why, or one to be put back.
#[derive(Clone, Debug)]
pub(super) struct JustRemoved {
    pub(super) name: Name,
    pub(super) holds: Vec<(Grant, Option<ClientId>)>,
    /// What to tell its holders if they have lost it.
    pub(super) lost: Vec<Effect>,
}

impl Table {
    /// The server evicted or expired this key: the lock that was removed just now was not given up by anybody.
    pub fn taken_by_server(&mut self, db: u16, key: &[u8]) {
        let Some(removed) = self.just_removed.take_if(|removed| removed.name == Name::new(db, key)) else { return };
        self.stats.removed -= removed.holds.len() as u64;
        self.stats.put_back += removed.holds.len() as u64;
        // SWAPDB may have brought another lock here since an earlier one was taken: the later one is this place's.
        self.give_up_putting_back(|name| *name == removed.name);
        self.pending.push_back(Pending::Look(removed.name.clone()));
        self.to_put_back.push(removed);
    }

    /// Nobody has said that the server took the last key: its holders have lost it.
    pub(super) fn settle_removed(&mut self) {
        if let Some(removed) = self.just_removed.take() {
            self.tell_lost(removed);
        }
    }

    /// Before anything else: who has lost a lock hears so before the next is granted it.
    fn tell_lost(&mut self, removed: JustRemoved) {
        for lost in removed.lost.into_iter().rev() {
            self.pending.push_front(Pending::Say(lost));
        }
    }

    /// These locks will not be put back after all: their holders have lost them. Says whether there were any.
    pub(super) fn give_up_putting_back(&mut self, which: impl Fn(&Name) -> bool) -> bool {
        let given_up: Vec<JustRemoved> = self.to_put_back.extract_if(.., |removed| which(&removed.name)).collect();
        let any = !given_up.is_empty();
        given_up.into_iter().for_each(|removed| self.tell_lost(removed));
        any
    }

    /// A connection has closed while holds of its session were away.
    pub(super) fn unbind_away(&mut self, client: ClientId) {
        for (_, bound) in
            self.just_removed.iter_mut().chain(&mut self.to_put_back).flat_map(|removed| &mut removed.holds)
        {
            if *bound == Some(client) {
                *bound = None;
            }
        }
    }

    /// The lock that is about to be put back here.
    #[must_use]
    pub fn away(&self, place: Place<'_>) -> Option<Lock> {
        if self.to_put_back.is_empty() {
            return None;
        }
        let name = place.name();
        let removed = self.to_put_back.iter().find(|removed| removed.name == name)?;
        let mut lock = Lock::default();
        for (grant, _) in &removed.holds {
            lock.apply(&Change::Grant(grant.clone()), Start::AfterLoading);
        }
        Some(lock)
    }

    /// Puts the holds of this place back, if the server took its key and nobody has put anything else there since.
    pub(super) fn put_back(&mut self, now: Time, place: Place<'_>, step: &mut Step) {
        if self.to_put_back.is_empty() {
            return;
        }
        let name = place.name();
        let Some(index) = self.to_put_back.iter().position(|put_back| put_back.name == name) else { return };
        let removed = self.to_put_back.swap_remove(index);
        if step.was_held {
            return self.tell_lost(removed);
        }
        let Some(lock) = step.lock.or_else(|| self.new_entry(name)) else { return };
        step.lock = Some(lock);
        for (grant, client) in removed.holds {
            self.put_back_hold(now, lock, grant, client, step);
        }
    }

    fn put_back_hold(&mut self, now: Time, lock: LockId, grant: Grant, client: Option<ClientId>, step: &mut Step) {
        let token = grant.token;
        if client.is_none() && grant.terms.as_ref().is_some_and(|terms| terms.session.is_some()) {
            self.pending.push_back(Pending::Cut(lock, token));
        }
        self.decide(now, lock, Change::Grant(grant), &mut step.effects);
        self.sessions.bind(token, client);
    }
}
