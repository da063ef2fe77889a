//! One hold as the client believes in it: its token, until when, and whether it is lost.
//!
//! The belief ends before the server's lease does (DESIGN S5): it counts from *before* the request was sent that got or renewed it,
//! on a clock that counts suspended time, less a margin. Nothing here does I/O, and everything may be asked from any thread.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use flock_core::request::ReleaseScope;
use flock_core::{Millis, Mode, Time, Token};
use tokio::sync::Notify;

use crate::clock::believed_until;
use crate::error::LossReason;
use crate::link::Pulse;
use crate::mutex::lock;
use crate::nodes::Epochs;
use crate::observe::Holding;

/// What a hold is to be kept by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Keeping {
    pub(crate) lease: Millis,
    pub(crate) keep_alive: bool,
    /// When it ends, renewed or not.
    pub(crate) ends: Option<Time>,
}

impl Keeping {
    /// The lease to ask for at `now`: what `max_hold` leaves of it.
    pub(crate) fn lease_at(&self, now: Time) -> Option<Millis> {
        let Some(ends) = self.ends else { return Some(self.lease) };
        let left_ms = ends.us_since(now) / 1000;
        let left = Millis(u32::try_from(left_ms).unwrap_or(u32::MAX));
        (left > Millis(0)).then(|| self.lease.min(left))
    }
}

/// A grant as it was received.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant {
    pub(crate) token: Token,
    pub(crate) mode: Mode,
    pub(crate) believed_until: Time,
    /// Whether it is for the lease, and not a claim.
    pub(crate) confirmed: bool,
    /// The newest connections before it was asked for.
    pub(crate) epochs: Epochs,
}

/// What a session hold lives on: when that connection closes, the server cuts the lease to `grace`.
#[derive(Debug)]
pub(crate) struct Session {
    grace: Millis,
    pulse: Mutex<Arc<Pulse>>,
}

impl Session {
    pub(crate) fn new(grace: Millis, pulse: Arc<Pulse>) -> Self {
        Self { grace, pulse: Mutex::new(pulse) }
    }

    pub(crate) fn grace(&self) -> Millis {
        self.grace
    }

    /// The connection may have closed right after it was last known to be alive.
    fn believed_until(&self) -> Time {
        believed_until(lock(&self.pulse).last(), self.grace)
    }
}

/// What tells a hold from all others.
#[derive(Clone, Debug, Default)]
pub(crate) struct Name {
    /// The acquisition's number: the last part of its owner, or of its id.
    pub(crate) number: u64,
    pub(crate) key: Box<[u8]>,
    pub(crate) owner: Box<[u8]>,
    /// Of a re-entrant handle: it shares the server's hold with the owner's other ids.
    pub(crate) id: Option<Box<[u8]>>,
}

impl Name {
    /// What of the server's hold is this one's.
    pub(crate) fn scope(&self) -> ReleaseScope<'_> {
        self.id.as_deref().map_or(ReleaseScope::Plain, ReleaseScope::Id)
    }
}

#[derive(Debug)]
pub(crate) struct Hold {
    pub(crate) name: Arc<Name>,
    pub(crate) keeping: Keeping,
    pub(crate) session: Option<Session>,
    /// Who watches hears of it by this.
    pub(crate) holding: Holding,
    token: AtomicU64,
    is_shared: AtomicBool,
    lease_until_us: AtomicU64,
    /// Whether a RENEW with the token has been answered: the grant is no mere claim any more.
    confirmed: AtomicBool,
    /// The newest connections before the server was last asked that has said that it is held. Of what was told since the end of one of
    /// them we may have heard nothing.
    epochs: Mutex<Epochs>,
    /// Whether the keep-alive has taken it in charge.
    in_charge: AtomicBool,
    /// An upgrade is under way, or nobody knows how it ended: the server may have another token than we.
    converting: AtomicBool,
    /// One conversion at a time: one may go on though its future was dropped.
    pub(crate) conversion: tokio::sync::Mutex<()>,
    /// The number of the entry by which it is to be renewed; others are stale.
    pub(crate) renewal: AtomicU64,
    /// Given back or leaked by its holder: no loss is told any more, and nothing is renewed.
    ended: AtomicBool,
    loss: OnceLock<LossReason>,
    /// It was lost or has ended.
    over: Notify,
}

impl Hold {
    pub(crate) fn new(
        name: Arc<Name>,
        keeping: Keeping,
        session: Option<Session>,
        grant: Grant,
        holding: Holding,
    ) -> Self {
        Self {
            name,
            keeping,
            session,
            holding,
            token: AtomicU64::new(grant.token.get()),
            is_shared: AtomicBool::new(grant.mode == Mode::Shared),
            lease_until_us: AtomicU64::new(grant.believed_until.as_us()),
            confirmed: AtomicBool::new(grant.confirmed),
            epochs: Mutex::new(grant.epochs),
            in_charge: AtomicBool::new(false),
            converting: AtomicBool::new(false),
            conversion: tokio::sync::Mutex::default(),
            renewal: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            loss: OnceLock::new(),
            over: Notify::new(),
        }
    }

    pub(crate) fn token(&self) -> Token {
        // What is stored came from a token. MIN stands for the impossible.
        const FIRST: Token = match Token::new(1) {
            Some(token) => token,
            None => unreachable!(),
        };
        Token::new(self.token.load(Ordering::Acquire)).unwrap_or(FIRST)
    }

    pub(crate) fn mode(&self) -> Mode {
        if self.is_shared.load(Ordering::Acquire) { Mode::Shared } else { Mode::Exclusive }
    }

    /// The token, unless the server may have another one by now.
    pub(crate) fn sure_token(&self) -> Option<Token> {
        (!self.converting.load(Ordering::SeqCst)).then(|| self.token())
    }

    pub(crate) fn believed_until(&self) -> Time {
        let lease_until = self.lease_until();
        self.session.as_ref().map_or(lease_until, |session| lease_until.min(session.believed_until()))
    }

    fn lease_until(&self) -> Time {
        Time::from_us(self.lease_until_us.load(Ordering::Acquire))
    }

    /// A renewal was answered yes, over the connection with this pulse.
    pub(crate) fn renewed(&self, believed_until: Time, pulse: &Arc<Pulse>) {
        if let Some(session) = &self.session {
            *lock(&session.pulse) = Arc::clone(pulse);
        }
        // It replaces the lease. Of two renewals in flight the server has performed both, so the later end holds.
        self.lease_until_us.fetch_max(believed_until.as_us(), Ordering::AcqRel);
    }

    /// The server, asked when these were the newest connections, has said that it is held.
    pub(crate) fn asked_over(&self, epochs: Epochs) {
        *lock(&self.epochs) = epochs;
    }

    /// Whether these are still the newest connections: then its loss would have been heard, where it is told.
    pub(crate) fn was_asked_over(&self, epochs: Epochs) -> bool {
        *lock(&self.epochs) == epochs
    }

    pub(crate) fn take_in_charge(&self) {
        self.in_charge.store(true, Ordering::Release);
    }

    pub(crate) fn is_in_charge(&self) -> bool {
        self.in_charge.load(Ordering::Acquire)
    }

    pub(crate) fn is_confirmed(&self) -> bool {
        self.confirmed.load(Ordering::Acquire)
    }

    pub(crate) fn confirm(&self) {
        self.confirmed.store(true, Ordering::Release);
    }

    /// Begins one; false if the hold has ended. It marks first and then looks, and `end` does the same the other way round: so either the
    /// conversion is not begun, or the release names no token.
    pub(crate) fn begin_conversion(&self) -> bool {
        let was_unsure = self.converting.swap(true, Ordering::SeqCst);
        let has_ended = self.ended.load(Ordering::SeqCst);
        if has_ended {
            self.converting.store(was_unsure, Ordering::SeqCst);
        }
        !has_ended
    }

    pub(crate) fn end_conversion(&self, token: Token, mode: Mode) {
        self.is_shared.store(mode == Mode::Shared, Ordering::Release);
        self.token.store(token.get(), Ordering::Release);
        self.converting.store(false, Ordering::Release);
    }

    /// Whether its holder is done with it.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Whether the server is still to be asked to keep it.
    pub(crate) fn is_kept(&self) -> bool {
        !self.has_ended() && self.loss.get().is_none()
    }

    /// Whether somebody has said so.
    pub(crate) fn is_lost(&self) -> bool {
        self.loss.get().is_some()
    }

    pub(crate) fn is_valid(&self, now: Time) -> bool {
        self.is_kept() && now < self.believed_until()
    }

    /// As if the time of its belief were over.
    #[cfg(all(test, feature = "testing"))]
    pub(crate) fn expire(&self) {
        self.lease_until_us.store(0, Ordering::Release);
    }

    /// Why it is not valid; none if it is. A belief that has run out is a loss though nobody has said so yet.
    pub(crate) fn loss(&self, now: Time) -> Option<LossReason> {
        match self.loss.get() {
            Some(reason) => Some(*reason),
            None if now < self.believed_until() => None,
            None => Some(self.expiry_reason(now)),
        }
    }

    /// The reason for a belief that has run out.
    pub(crate) fn expiry_reason(&self, now: Time) -> LossReason {
        // The belief ends a margin before `max_hold` does.
        let spent = self.keeping.ends.is_some_and(|ends| {
            let left = Millis(u32::try_from(ends.us_since(now) / 1000).unwrap_or(u32::MAX));
            now >= ends || left <= Millis(self.keeping.lease.as_ms() / 50 + 25)
        });
        match (spent, now < self.lease_until()) {
            (_, true) => LossReason::Disconnected,
            (true, false) => LossReason::MaxHold,
            (false, false) => LossReason::Expired,
        }
    }

    /// Marks it lost; false if it was lost or ended already.
    pub(crate) fn lose(&self, reason: LossReason) -> bool {
        if self.ended.load(Ordering::Acquire) || self.loss.set(reason).is_err() {
            return false;
        }
        self.over.notify_waiters();
        true
    }

    /// Whether it was renewed so lately, by whomever, that the keep-alive need not do it again.
    pub(crate) fn is_fresh(&self, now: Time) -> bool {
        let left_us = self.believed_until().us_since(now);
        self.is_confirmed() && self.keeping.keep_alive && left_us > self.keeping.lease.as_us() / 6 * 5
    }

    /// Ends it on behalf of its holder; false if that was done before.
    pub(crate) fn end(&self) -> bool {
        let first = !self.ended.swap(true, Ordering::SeqCst);
        self.over.notify_waiters();
        first
    }

    /// Ends when it is lost; with `None` when it was given back or leaked instead.
    pub(crate) async fn lost(&self) -> Option<LossReason> {
        loop {
            let mut over = std::pin::pin!(self.over.notified());
            over.as_mut().enable(); // before the look: a loss between the two is not missed
            if let Some(reason) = self.loss.get() {
                return Some(*reason);
            }
            if self.ended.load(Ordering::Acquire) {
                return None;
            }
            over.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;

    fn hold(ends: Option<Time>) -> Hold {
        let keeping = Keeping { lease: Millis(1000), keep_alive: true, ends };
        let token = Token::new(7).unwrap();
        let grant = Grant {
            token,
            mode: Mode::Exclusive,
            believed_until: Time::from_us(980_000),
            confirmed: true,
            epochs: Epochs::default(),
        };
        let name = Name { number: 1, key: (*b"k").into(), owner: (*b"o").into(), id: None };
        let holding = Holding::begin(&Clock::Boottime, b"k", token, &tracing::Span::none());
        Hold::new(Arc::new(name), keeping, None, grant, holding)
    }

    #[test]
    fn session_is_believed_for_its_grace_after_the_last_sign_of_life() {
        let pulse = Arc::new(Pulse::default());
        let session = Session::new(Millis(100), Arc::clone(&pulse));
        let hold = Hold { session: Some(session), ..hold(None) };
        assert_eq!(hold.believed_until(), Time::from_us(80_000));
        pulse.beat(Time::from_us(500_000));
        assert_eq!(hold.believed_until(), Time::from_us(580_000));
        assert_eq!(hold.loss(Time::from_us(600_000)), Some(LossReason::Disconnected));
        pulse.beat(Time::from_us(5_000_000));
        assert_eq!(hold.believed_until(), Time::from_us(980_000)); // the lease
        let next = Arc::new(Pulse::default());
        hold.renewed(Time::from_us(2_000_000), &next);
        assert_eq!(hold.believed_until(), Time::from_us(80_000)); // over another connection
    }

    #[test]
    fn belief_ends_at_its_time_though_nobody_says_so() {
        let hold = hold(None);
        assert!(hold.is_valid(Time::from_us(979_999)));
        assert!(!hold.is_valid(Time::from_us(980_000)));
        assert_eq!(hold.loss(Time::from_us(980_000)), Some(LossReason::Expired));
    }

    #[test]
    fn first_reason_stays() {
        let hold = hold(None);
        assert!(hold.lose(LossReason::Revoked));
        assert!(!hold.lose(LossReason::Expired));
        assert_eq!(hold.loss(Time::ZERO), Some(LossReason::Revoked));
        assert!(!hold.is_valid(Time::ZERO));
    }

    #[test]
    fn hold_that_was_given_back_is_not_lost() {
        let hold = hold(None);
        assert!(hold.end());
        assert!(!hold.end());
        assert!(!hold.lose(LossReason::Expired));
        assert!(!hold.is_kept());
    }

    #[test]
    fn renewals_never_shorten_the_belief() {
        let hold = hold(None);
        hold.renewed(Time::from_us(2_000_000), &Arc::default());
        hold.renewed(Time::from_us(1_000_000), &Arc::default());
        assert_eq!(hold.believed_until(), Time::from_us(2_000_000));
    }

    #[test]
    fn longest_hold_cuts_the_lease() {
        let hold = hold(Some(Time::from_us(1_500_000)));
        assert_eq!(hold.keeping.lease_at(Time::ZERO), Some(Millis(1000)));
        assert_eq!(hold.keeping.lease_at(Time::from_us(1_000_000)), Some(Millis(500)));
        assert_eq!(hold.keeping.lease_at(Time::from_us(1_499_500)), None);
        assert_eq!(hold.expiry_reason(Time::from_us(1_480_000)), LossReason::MaxHold);
        assert_eq!(hold.expiry_reason(Time::from_us(980_000)), LossReason::Expired);
    }

    #[tokio::test]
    async fn loss_wakes_who_waits_for_it() {
        let hold = Arc::new(hold(None));
        let waiting = tokio::spawn({
            let hold = hold.clone();
            async move { hold.lost().await }
        });
        tokio::task::yield_now().await;
        hold.lose(LossReason::Flushed);
        assert_eq!(waiting.await.unwrap(), Some(LossReason::Flushed));
    }
}
