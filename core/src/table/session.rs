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
use core::num::NonZeroU64;

/// A connection, as the shell numbers it.
pub type ClientId = NonZeroU64;

#[derive(Clone, Debug, Default)]
pub(super) struct Sessions {
    holds: BTreeMap<Token, (LockId, Option<ClientId>)>,
    by_client: BTreeSet<(ClientId, Token)>,
    waiters: BTreeSet<(ClientId, WaiterId)>,
}

impl Sessions {
    /// Called before `change` alters `lock`.
    pub(super) fn before(&mut self, id: LockId, lock: &Lock, change: &Change) {
        match change {
            Change::Grant(grant) if grant.terms.as_ref().is_some_and(|terms| terms.session.is_some()) => {
                self.holds.entry(grant.token).or_insert((id, None));
            }
            Change::Mode { old, new, .. } if old != new => {
                if let Some((lock, client)) = self.forget(*old) {
                    self.holds.insert(*new, (lock, None));
                    self.bind(*new, client);
                }
            }
            Change::End { token: Some(token) } => drop(self.forget(*token)),
            Change::End { token: None } => self.forget_all(lock),
            Change::Grant(_) | Change::Mode { .. } | Change::Renew { .. } | Change::Ids { .. } | Change::Mark(_) => {}
        }
    }

    /// The lock is gone with all its holds.
    pub(super) fn forget_all(&mut self, lock: &Lock) {
        if !self.holds.is_empty() {
            for hold in lock.holds() {
                self.forget(hold.token);
            }
        }
    }

    fn forget(&mut self, token: Token) -> Option<(LockId, Option<ClientId>)> {
        if self.holds.is_empty() {
            return None;
        }
        let session = self.holds.remove(&token)?;
        if let Some(client) = session.1 {
            self.by_client.remove(&(client, token));
        }
        Some(session)
    }

    /// The session hold with this token now lives on this connection.
    pub(super) fn bind(&mut self, token: Token, client: Option<ClientId>) {
        let Some((_, bound)) = self.holds.get_mut(&token) else {
            return;
        };
        if let Some(old) = core::mem::replace(bound, client) {
            self.by_client.remove(&(old, token));
        }
        if let Some(client) = client {
            self.by_client.insert((client, token));
        }
    }

    /// The session hold was renewed over this connection; over none (a script) it stays where it is.
    pub(super) fn rebind(&mut self, token: Token, client: Option<ClientId>) {
        if client.is_some() {
            self.bind(token, client);
        }
    }

    /// The connection has closed: its holds, which have none from now on.
    pub(super) fn unbind_client(&mut self, client: ClientId) -> Vec<(LockId, Token)> {
        let tokens: Vec<Token> =
            self.by_client.range((client, FIRST)..=(client, LAST)).map(|(_, token)| *token).collect();
        tokens
            .into_iter()
            .filter_map(|token| {
                self.bind(token, None);
                self.holds.get(&token).map(|(lock, _)| (*lock, token))
            })
            .collect()
    }

    /// Every session hold without a connection.
    pub(super) fn unbound(&self) -> Vec<(LockId, Token)> {
        self.holds
            .iter()
            .filter(|(_, (_, client))| client.is_none())
            .map(|(token, (lock, _))| (*lock, *token))
            .collect()
    }

    /// The connection this hold lives on.
    pub(super) fn client_of(&self, token: Token) -> Option<ClientId> {
        self.holds.get(&token).and_then(|(_, client)| *client)
    }

    /// No connection counts any more (demotion).
    pub(super) fn unbind_all(&mut self) {
        self.by_client.clear();
        self.waiters.clear();
        for (_, client) in self.holds.values_mut() {
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

const FIRST: Token = match Token::new(1) {
    Some(token) => token,
    None => unreachable!(),
};
const LAST: Token = match Token::new(Token::MAX) {
    Some(token) => token,
    None => unreachable!(),
};
