//! Who of this client is to hear what a server publishes on the client's channels.
//!
//! An acquisition is listed from before its first request until its hold has ended, so no message finds nobody because it was quick.
//! A grant that nobody here waits for any more (the future was dropped, and the cancellation came second) is returned to the caller,
//! who gives it back: a hold that nobody knows of must not last.
//!
//! Messages name the owner. Usually that is one acquisition; an owner that its user has named may have several, and all of them hear.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use flock_core::effect::Notice;
use flock_core::wire::message::OwnerMessage;
use flock_core::{EndReason, Token};
use tokio::sync::Notify;

use crate::error::LossReason;
use crate::hold::{Hold, Name};
use crate::mutex::lock;

/// News of a queued request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum News {
    Granted(Token),
    TimedOut,
    Ended(EndReason),
    /// Another request of the same owner has left, and perhaps the place in the queue with it.
    AskAgain,
}

/// A request that waits. The newest news replaces older ones: a grant that was superseded by an end is no grant.
#[derive(Debug)]
pub(crate) struct Waiter {
    pub(crate) name: Arc<Name>,
    news: Mutex<Option<News>>,
    arrived: Notify,
}

impl Waiter {
    fn new(name: Arc<Name>) -> Self {
        Self { name, news: Mutex::default(), arrived: Notify::new() }
    }

    /// The next news.
    pub(crate) async fn news(&self) -> News {
        loop {
            // A permit is kept if the news arrives between the look and the wait.
            if let Some(news) = self.take() {
                return news;
            }
            self.arrived.notified().await;
        }
    }

    pub(crate) fn take(&self) -> Option<News> {
        lock(&self.news).take()
    }

    fn put(&self, news: News) {
        *lock(&self.news) = Some(news);
        self.arrived.notify_one();
    }
}

#[derive(Debug)]
enum Party {
    /// With the highest token that was lost before the hold was listed.
    Waiter(Arc<Waiter>, Option<(Token, LossReason)>),
    Holder(Arc<Hold>),
}

/// What the engine must do about a message.
#[derive(Debug)]
pub(crate) enum Heard {
    Nothing,
    /// A grant without a taker.
    Stray(Token),
    /// A hold that has just been marked as lost.
    Lost(Arc<Hold>, LossReason),
}

/// A lock's key, and an owner that its user has named.
type Shared = (Box<[u8]>, Box<[u8]>);

#[derive(Debug, Default)]
struct Listed {
    by_number: BTreeMap<u64, Party>,
    /// The numbers of the acquisitions of each named owner, and the other way round.
    by_owner: BTreeMap<Shared, Vec<u64>>,
    owners: BTreeMap<u64, Shared>,
}

#[derive(Debug, Default)]
pub(crate) struct Parties {
    listed: Mutex<Listed>,
}

impl Parties {
    /// Lists an acquisition; with its owner, if messages to that are for others too.
    pub(crate) fn wait(&self, name: Arc<Name>) -> Arc<Waiter> {
        let waiter = Arc::new(Waiter::new(name));
        let name = &waiter.name;
        let mut listed = lock(&self.listed);
        listed.by_number.insert(name.number, Party::Waiter(Arc::clone(&waiter), None));
        if name.id.is_some() {
            let shared = (name.key.clone(), name.owner.clone());
            listed.by_owner.entry(shared.clone()).or_default().push(name.number);
            listed.owners.insert(name.number, shared);
        }
        waiter
    }

    /// The waiter becomes a holder. A loss that was told meanwhile counts, and is returned.
    pub(crate) fn hold(&self, hold: &Arc<Hold>) -> Option<LossReason> {
        let before = lock(&self.listed).by_number.insert(hold.name.number, Party::Holder(Arc::clone(hold)));
        let Some(Party::Waiter(_, lost)) = before else { return None };
        let (_, reason) = lost.filter(|(token, _)| *token >= hold.token())?;
        hold.lose(reason).then_some(reason)
    }

    pub(crate) fn leave(&self, number: u64) {
        let mut listed = lock(&self.listed);
        listed.by_number.remove(&number);
        let Some(shared) = listed.owners.remove(&number) else { return };
        if let Some(numbers) = listed.by_owner.get_mut(&shared) {
            numbers.retain(|other| *other != number);
            if numbers.is_empty() {
                listed.by_owner.remove(&shared);
            }
        }
    }

    /// The acquisitions of a named owner.
    pub(crate) fn of_owner(&self, key: &[u8], owner: &[u8]) -> Vec<u64> {
        let listed = lock(&self.listed);
        if listed.by_owner.is_empty() {
            return Vec::new(); // as usual: nothing is allocated to find that out
        }
        listed.by_owner.get(&(key.into(), owner.into())).cloned().unwrap_or_default()
    }

    /// Makes those of a named owner who wait ask again.
    pub(crate) fn ask_again(&self, key: &[u8], owner: &[u8]) {
        let numbers = self.of_owner(key, owner);
        let listed = lock(&self.listed);
        for number in numbers {
            if let Some(Party::Waiter(waiter, _)) = listed.by_number.get(&number) {
                waiter.put(News::AskAgain);
            }
        }
    }

    /// What is held under this number.
    pub(crate) fn held(&self, number: u64) -> Option<Arc<Hold>> {
        match lock(&self.listed).by_number.get(&number)? {
            Party::Holder(hold) => Some(Arc::clone(hold)),
            Party::Waiter(..) => None,
        }
    }

    /// Everything that is held, for the client's end.
    pub(crate) fn holds(&self) -> Vec<Arc<Hold>> {
        lock(&self.listed)
            .by_number
            .values()
            .filter_map(|party| match party {
                Party::Holder(hold) => Some(Arc::clone(hold)),
                Party::Waiter(..) => None,
            })
            .collect()
    }

    /// Everything that is asked for, for the client's end.
    pub(crate) fn asked(&self) -> Vec<Arc<Name>> {
        lock(&self.listed)
            .by_number
            .values()
            .filter_map(|party| match party {
                Party::Waiter(waiter, _) => Some(Arc::clone(&waiter.name)),
                Party::Holder(_) => None,
            })
            .collect()
    }

    pub(crate) fn hear(&self, number: u64, message: &OwnerMessage<'_>) -> Heard {
        let mut listed = lock(&self.listed);
        let party = listed.by_number.get_mut(&number);
        if let Some(Party::Holder(hold)) = &party
            && *hold.name.key != *message.key
        {
            return Heard::Nothing; // the same owner, named for another lock
        }
        match (party, message.notice) {
            (Some(Party::Waiter(waiter, _)), Notice::Granted { token, .. }) => waiter.put(News::Granted(token)),
            (Some(Party::Waiter(waiter, _)), Notice::TimedOut) => waiter.put(News::TimedOut),
            (Some(Party::Waiter(waiter, _)), Notice::Ended(reason)) => waiter.put(News::Ended(reason)),
            (Some(Party::Waiter(_, lost)), Notice::Lost { token, reason }) => {
                if lost.is_none_or(|(earlier, _)| earlier < token) {
                    *lost = Some((token, reason.into()));
                }
            }
            (Some(Party::Holder(hold)), Notice::Lost { token, reason }) => {
                // A lower token is one that this acquisition had before: under a claim that ran out.
                if token >= hold.token() && hold.lose(reason.into()) {
                    return Heard::Lost(Arc::clone(hold), reason.into());
                }
            }
            (Some(Party::Holder(_)), Notice::Granted { .. } | Notice::TimedOut | Notice::Ended(_)) => {}
            (None, Notice::Granted { token, .. }) => return Heard::Stray(token),
            (None, Notice::TimedOut | Notice::Ended(_) | Notice::Lost { .. }) => {}
        }
        Heard::Nothing
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::hold::{Grant, Keeping};
    use crate::nodes::Epochs;
    use crate::observe::Holding;
    use flock_core::{Millis, Mode, Time};

    fn token(number: u64) -> Token {
        Token::new(number).unwrap()
    }

    fn message(notice: Notice) -> OwnerMessage<'static> {
        OwnerMessage { notice, key: b"k", owner: b"o" }
    }

    fn granted(number: u64) -> OwnerMessage<'static> {
        message(Notice::Granted { token: token(number), lasts: Millis(1), claim: true })
    }

    fn lost(number: u64) -> OwnerMessage<'static> {
        message(Notice::Lost { token: token(number), reason: flock_core::LossReason::Revoked })
    }

    fn name(number: u64) -> Arc<Name> {
        Arc::new(Name { number, key: (*b"k").into(), owner: (*b"o").into(), id: None })
    }

    fn hold(held: u64) -> Arc<Hold> {
        let keeping = Keeping { lease: Millis(1000), keep_alive: true, ends: None };
        let grant = Grant {
            token: token(held),
            mode: Mode::Exclusive,
            believed_until: Time::NEVER,
            confirmed: true,
            epochs: Epochs::default(),
        };
        let holding = Holding::begin(&Clock::Boottime, b"k", grant.token, &tracing::Span::none());
        Arc::new(Hold::new(name(1), keeping, None, grant, holding))
    }

    #[test]
    fn grant_that_nobody_waits_for_is_returned() {
        let parties = Parties::default();
        assert!(matches!(parties.hear(1, &granted(7)), Heard::Stray(stray) if stray == token(7)));
        parties.wait(name(1));
        assert!(matches!(parties.hear(1, &granted(7)), Heard::Nothing));
        parties.leave(1);
        assert!(matches!(parties.hear(1, &granted(7)), Heard::Stray(_)));
    }

    #[test]
    fn loss_told_before_the_hold_is_listed_counts() {
        let parties = Parties::default();
        parties.wait(name(1));
        parties.hear(1, &lost(7));
        let hold = hold(7);
        assert_eq!(parties.hold(&hold), Some(LossReason::Revoked));
        assert_eq!(hold.loss(Time::ZERO), Some(LossReason::Revoked));
    }

    #[test]
    fn loss_of_an_earlier_token_of_this_acquisition_does_not_count() {
        let parties = Parties::default();
        parties.wait(name(1));
        parties.hear(1, &lost(6));
        let hold = hold(7);
        assert_eq!(parties.hold(&hold), None);
        assert!(matches!(parties.hear(1, &lost(6)), Heard::Nothing));
        assert_eq!(hold.loss(Time::ZERO), None);
        assert!(matches!(parties.hear(1, &lost(7)), Heard::Lost(..)));
    }

    #[test]
    fn acquisitions_of_a_named_owner_are_found_until_they_leave() {
        let parties = Parties::default();
        let handle = |number| Arc::new(Name { id: Some((*b"i").into()), ..Name::clone(&name(number)) });
        let waiter = parties.wait(handle(1));
        parties.wait(handle(2));
        parties.wait(name(3));
        assert_eq!(parties.of_owner(b"k", b"o"), [1, 2]);
        assert!(parties.of_owner(b"other", b"o").is_empty());
        parties.leave(2);
        parties.ask_again(b"k", b"o");
        assert_eq!(waiter.take(), Some(News::AskAgain));
        parties.leave(1);
        assert!(parties.of_owner(b"k", b"o").is_empty());
        assert!(lock(&parties.listed).by_owner.is_empty() && lock(&parties.listed).owners.is_empty());
    }

    #[tokio::test]
    async fn news_that_came_first_is_not_missed() {
        let parties = Parties::default();
        let waiter = parties.wait(name(1));
        parties.hear(1, &granted(7));
        assert_eq!(waiter.news().await, News::Granted(token(7)));
        assert_eq!(waiter.take(), None);
    }
}
