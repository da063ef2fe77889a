//! Who of this client is to hear what the server publishes on the client's channel.
//!
//! An acquisition is listed from before its first request until its hold has ended, so no message finds nobody because it was quick.
//! A grant that nobody here waits for any more (the future was dropped, and the cancellation came second) is returned to the caller,
//! who gives it back: a hold that nobody knows of must not last.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flock_core::effect::Notice;
use flock_core::wire::message::OwnerMessage;
use flock_core::{EndReason, Token};
use tokio::sync::Notify;

use crate::error::LossReason;
use crate::hold::Hold;

/// News of a queued request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum News {
    Granted(Token),
    TimedOut,
    Ended(EndReason),
}

/// A request that waits. The newest news replaces older ones: a grant that was superseded by an end is no grant.
#[derive(Debug, Default)]
pub(crate) struct Waiter {
    news: Mutex<Option<News>>,
    /// The highest token that was lost before the hold was listed.
    lost: Mutex<Option<(Token, LossReason)>>,
    arrived: Notify,
}

impl Waiter {
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
        self.news.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn put(&self, news: News) {
        *self.news.lock().unwrap_or_else(PoisonError::into_inner) = Some(news);
        self.arrived.notify_one();
    }
}

#[derive(Debug)]
enum Party {
    Waiter(Arc<Waiter>),
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

#[derive(Debug, Default)]
pub(crate) struct Parties {
    by_number: Mutex<HashMap<u64, Party>>,
}

impl Parties {
    pub(crate) fn wait(&self, number: u64) -> Arc<Waiter> {
        let waiter = Arc::new(Waiter::default());
        self.lock().insert(number, Party::Waiter(Arc::clone(&waiter)));
        waiter
    }

    /// The waiter becomes a holder. A loss that was told meanwhile counts.
    pub(crate) fn hold(&self, hold: &Arc<Hold>) {
        let before = self.lock().insert(hold.number, Party::Holder(Arc::clone(hold)));
        if let Some(Party::Waiter(waiter)) = before {
            let lost = waiter.lost.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some((_, reason)) = lost.filter(|(token, _)| *token >= hold.token()) {
                hold.lose(reason);
            }
        }
    }

    pub(crate) fn leave(&self, number: u64) {
        self.lock().remove(&number);
    }

    /// Everything that is held, for the client's end.
    pub(crate) fn holds(&self) -> Vec<Arc<Hold>> {
        let holds = self.lock();
        holds
            .values()
            .filter_map(|party| match party {
                Party::Holder(hold) => Some(Arc::clone(hold)),
                Party::Waiter(_) => None,
            })
            .collect()
    }

    pub(crate) fn anybody_waits(&self) -> bool {
        self.lock().values().any(|party| matches!(party, Party::Waiter(_)))
    }

    pub(crate) fn hear(&self, number: u64, message: &OwnerMessage<'_>) -> Heard {
        let parties = self.lock();
        match (parties.get(&number), message.notice) {
            (Some(Party::Waiter(waiter)), Notice::Granted { token, .. }) => waiter.put(News::Granted(token)),
            (Some(Party::Waiter(waiter)), Notice::TimedOut) => waiter.put(News::TimedOut),
            (Some(Party::Waiter(waiter)), Notice::Ended(reason)) => waiter.put(News::Ended(reason)),
            (Some(Party::Waiter(waiter)), Notice::Lost { token, reason }) => {
                let mut lost = waiter.lost.lock().unwrap_or_else(PoisonError::into_inner);
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

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Party>> {
        self.by_number.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hold::{Grant, Keeping};
    use flock_core::{Millis, Time};

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

    fn hold(held: u64) -> Arc<Hold> {
        let keeping = Keeping { lease: Millis(1000), keep_alive: true, ends: None };
        let grant = Grant { token: token(held), believed_until: Time::NEVER, confirmed: true };
        Arc::new(Hold::new(1, (*b"k").into(), (*b"o").into(), keeping, None, grant))
    }

    #[test]
    fn grant_that_nobody_waits_for_is_returned() {
        let parties = Parties::default();
        assert!(matches!(parties.hear(1, &granted(7)), Heard::Stray(stray) if stray == token(7)));
        parties.wait(1);
        assert!(matches!(parties.hear(1, &granted(7)), Heard::Nothing));
        parties.leave(1);
        assert!(matches!(parties.hear(1, &granted(7)), Heard::Stray(_)));
    }

    #[test]
    fn loss_told_before_the_hold_is_listed_counts() {
        let parties = Parties::default();
        parties.wait(1);
        parties.hear(1, &lost(7));
        let hold = hold(7);
        parties.hold(&hold);
        assert_eq!(hold.loss(Time::ZERO), Some(LossReason::Revoked));
    }

    #[test]
    fn loss_of_an_earlier_token_of_this_acquisition_does_not_count() {
        let parties = Parties::default();
        parties.wait(1);
        parties.hear(1, &lost(6));
        let hold = hold(7);
        parties.hold(&hold);
        assert!(matches!(parties.hear(1, &lost(6)), Heard::Nothing));
        assert_eq!(hold.loss(Time::ZERO), None);
        assert!(matches!(parties.hear(1, &lost(7)), Heard::Lost(..)));
    }

    #[tokio::test]
    async fn news_that_came_first_is_not_missed() {
        let parties = Parties::default();
        let waiter = parties.wait(1);
        parties.hear(1, &granted(7));
        assert_eq!(waiter.news().await, News::Granted(token(7)));
        assert_eq!(waiter.take(), None);
    }
}
