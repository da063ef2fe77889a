//! Which hold or waiter dies with which connection.
//!
//! A hold remembers durably *that* it is a session's (its grace); *which* connection is known on the primary only, and only as long
//! as that connection lives. After a load or a promotion a session hold has no connection until it is renewed.

use crate::lock::{Change, Lock};
use crate::table::LockId;
use crate::token::Token;
use crate::wait_queue::WaiterId;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::num::{NonZeroU32, NonZeroU64};

/// A connection, as the shell numbers it.
pub type ClientId = NonZeroU64;

/// A hold. Not by its token alone: RESTORE can bring a second hold with the same one.
type HoldId = (LockId, Token);

#[derive(Clone, Debug, Default)]
pub(super) struct Sessions {
    holds: BTreeMap<HoldId, Option<ClientId>>,
    by_client: BTreeSet<(ClientId, HoldId)>,
    waiters: BTreeSet<(ClientId, WaiterId)>,
}

impl Sessions {
    /// Whether there is no session hold.
    pub(super) fn is_empty(&self) -> bool {
        self.holds.is_empty()
    }

    /// Called before `change` alters `lock`.
    pub(super) fn before(&mut self, id: LockId, lock: &Lock, change: &Change) {
        match change {
            Change::Grant(grant) if grant.terms.as_ref().is_some_and(|terms| terms.session.is_some()) => {
                self.holds.entry((id, grant.token)).or_default();
            }
            Change::Mode { old, new, .. } if old != new => {
                if let Some(client) = self.forget((id, *old)) {
                    self.holds.insert((id, *new), None);
                    self.bind((id, *new), client);
                }
            }
            Change::End { token: Some(token) } => drop(self.forget((id, *token))),
            Change::End { token: None } => self.forget_all(id, lock),
            Change::Grant(_) | Change::Mode { .. } | Change::Renew { .. } | Change::Ids { .. } | Change::Mark(_) => {}
        }
    }

    /// The lock is gone with all its holds.
    fn forget_all(&mut self, id: LockId, lock: &Lock) {
        if !self.holds.is_empty() {
            for hold in lock.holds() {
                self.forget((id, hold.token));
            }
        }
    }

    fn forget(&mut self, hold: HoldId) -> Option<Option<ClientId>> {
        if self.holds.is_empty() {
            return None;
        }
        let client = self.holds.remove(&hold)?;
        if let Some(client) = client {
            self.by_client.remove(&(client, hold));
        }
        Some(client)
    }

    /// This session hold now lives on this connection.
    pub(super) fn bind(&mut self, hold: HoldId, client: Option<ClientId>) {
        let Some(bound) = self.holds.get_mut(&hold) else { return };
        if let Some(old) = core::mem::replace(bound, client) {
            self.by_client.remove(&(old, hold));
        }
        if let Some(client) = client {
            self.by_client.insert((client, hold));
        }
    }

    /// The session hold was renewed over this connection; over none (a script) it stays where it is.
    pub(super) fn rebind(&mut self, hold: HoldId, client: Option<ClientId>) {
        if client.is_some() {
            self.bind(hold, client);
        }
    }

    /// The connection has closed: its holds, which have none from now on.
    pub(super) fn unbind_client(&mut self, client: ClientId) -> Vec<HoldId> {
        let holds: Vec<HoldId> = self
            .by_client
            .range((client, FIRST)..)
            .take_while(|(of, _)| *of == client)
            .map(|(_, hold)| *hold)
            .collect();
        for hold in &holds {
            self.bind(*hold, None);
        }
        holds
    }

    /// Every session hold without a connection.
    pub(super) fn unbound(&self) -> Vec<HoldId> {
        self.holds.iter().filter(|(_, client)| client.is_none()).map(|(hold, _)| *hold).collect()
    }

    /// The connection this hold lives on.
    pub(super) fn client_of(&self, hold: HoldId) -> Option<ClientId> {
        self.holds.get(&hold).copied().flatten()
    }

    /// No connection counts any more (demotion).
    pub(super) fn unbind_all(&mut self) {
        self.by_client.clear();
        self.waiters.clear();
        for client in self.holds.values_mut() {
            *client = None;
        }
    }

    pub(super) fn add_waiter(&mut self, client: ClientId, waiter: WaiterId) {
        self.waiters.insert((client, waiter));
    }

    pub(super) fn remove_waiter(&mut self, client: ClientId, waiter: WaiterId) {
        self.waiters.remove(&(client, waiter));
    }

    /// The waiters that die with this connection.
    pub(super) fn waiters_of(&self, client: ClientId) -> Vec<WaiterId> {
        self.waiters.range((client, WaiterId::FIRST)..=(client, WaiterId::LAST)).map(|(_, waiter)| *waiter).collect()
    }
}

/// The least of all.
const FIRST: HoldId = (LockId::new(NonZeroU32::MIN), Token::MIN);
