//! Keys that the server took away by itself come back.
//!
//! A held lock must not end because memory is short or because somebody gave its key a time to live: its owner was promised a
//! lease. Deleting, overwriting or renaming the key is a person's decision and ends the hold; eviction and expiry of the key are
//! not, and do not. When the key goes, [`Table::removed`] cannot know which it is; if [`Table::taken_by_server`] says so right
//! afterwards, the same holds are put back under the same tokens, by the next verb at that place or by the next
//! [`Table::advance`], whichever comes first, and replicated like grants.

use super::due::Pending;
use super::session::ClientId;
use super::{LockId, Place, Step, Table, loss_notice};
use crate::lock::{Change, Grant, Lock, Start};
use crate::name::Name;
use crate::refusal::LossReason;
use crate::time::Time;
use crate::token::Token;
use alloc::vec::Vec;

/// A lock whose key went: the last one, while it is not known yet why, or one to be put back.
#[derive(Clone, Debug)]
pub(super) struct JustRemoved {
    pub(super) name: Name,
    pub(super) holds: Vec<(Grant, Option<ClientId>)>,
}

impl Table {
    /// The server evicted or expired this key: the lock that was removed just now was not given up by anybody.
    pub fn taken_by_server(&mut self, db: u16, key: &[u8]) {
        let Some(removed) = self.just_removed.take_if(|removed| removed.name == Name::new(db, key)) else { return };
        if removed.holds.is_empty() {
            return; // of its grants, none was delivered
        }
        self.stats.removed -= removed.holds.len() as u64;
        self.stats.put_back += removed.holds.len() as u64;
        self.pending.push_back(Pending::Look(removed.name.clone()));
        // SWAPDB may have brought another lock here since an earlier one was taken: the later one is this place's.
        if let Some(earlier) = self.to_put_back.insert(removed.name.clone(), removed) {
            self.tell_lost(earlier);
        }
    }

    /// Nobody has said that the server took the last key: its holders have lost it.
    pub(super) fn settle_removed(&mut self) {
        if let Some(removed) = self.just_removed.take() {
            self.tell_lost(removed);
        }
    }

    /// Somebody asks for the lock that went last: whatever the server says of this key from now on, it speaks of another value. Verbs at
    /// other places may come in between: another module that hears of an expired key first, and takes a lock of its own.
    #[inline]
    pub(super) fn settle_removed_here(&mut self, place: Place<'_>) {
        if let Some(removed) = self.just_removed.take_if(|removed| removed.name == place.name()) {
            self.tell_lost(removed);
        }
    }

    /// Before anything else: who has lost a lock hears so before the next is granted it.
    fn tell_lost(&mut self, removed: JustRemoved) {
        for (hold, _) in removed.holds.iter().rev() {
            if let Some(channel) = hold.channel() {
                let lost = loss_notice(&removed.name, channel, &hold.owner, hold.token, LossReason::Removed);
                self.pending.push_front(Pending::Say(lost));
            }
        }
    }

    /// These locks will not be put back after all: their holders have lost them. Says whether there were any.
    pub(super) fn give_up_putting_back(&mut self, which: impl Fn(&Name) -> bool) -> bool {
        let given_up: Vec<Name> = self.to_put_back.keys().filter(|name| which(name)).cloned().collect();
        for name in &given_up {
            if let Some(removed) = self.to_put_back.remove(name) {
                self.tell_lost(removed);
            }
        }
        !given_up.is_empty()
    }

    /// A grant that is away was not delivered: it does not come back. Says whether there was one.
    pub(super) fn stay_away(&mut self, token: Token) -> bool {
        let is_it = |(grant, _): &(Grant, Option<ClientId>)| grant.token == token;
        let Some(removed) = self.to_put_back.values_mut().find(|removed| removed.holds.iter().any(is_it)) else {
            return false;
        };
        removed.holds.retain(|hold| !is_it(hold));
        self.to_put_back.retain(|_, removed| !removed.holds.is_empty());
        self.stats.put_back -= 1;
        self.stats.undelivered += 1;
        true
    }

    /// A connection has closed while holds of its session were away.
    pub(super) fn unbind_away(&mut self, client: ClientId) {
        for (_, bound) in
            self.just_removed.iter_mut().chain(self.to_put_back.values_mut()).flat_map(|removed| &mut removed.holds)
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
        let removed = self.to_put_back.get(&place.name())?;
        let mut lock = Lock::default();
        for (grant, _) in &removed.holds {
            lock.apply(&Change::Grant(grant.clone()), Start::AfterLoading);
        }
        Some(lock)
    }

    /// Puts the holds of this place back, if the server took its key and nobody has put anything else there since.
    #[inline]
    pub(super) fn put_back(&mut self, now: Time, place: Place<'_>, step: &mut Step) {
        if !self.to_put_back.is_empty() {
            self.put_back_at(now, place, step);
        }
    }

    #[cold]
    fn put_back_at(&mut self, now: Time, place: Place<'_>, step: &mut Step) {
        let name = place.name();
        let Some(removed) = self.to_put_back.remove(&name) else { return };
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
        self.sessions.bind((lock, token), client);
    }
}
