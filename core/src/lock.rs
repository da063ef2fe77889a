//! Who holds one lock, and how a change alters it.
//!
//! A [`Change`] is a decided fact: granted, renewed, converted, ended. The primary decides one, applies it here, and replicates it;
//! a replica, or a server that loads its log, applies the same value with the same code. So at equal offset both hold the same
//! state, by construction. Nothing in this file decides.
//!
//! Changes name holds by token, carry durations, and are idempotent: a grant applied twice is one hold.

use crate::bytes::Bytes;
use crate::deadlines::DURATION_MAX;
use crate::tenure::Tenure;
use crate::time::{Millis, Time};
use crate::token::Token;
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::fmt;
use core::num::NonZeroU32;

/// Who asks: bytes chosen by the client, compared as they are, fresh per acquisition. Up to 38 bytes (any UUID) need no allocation.
pub type Owner = Bytes<38>;
/// One member of a re-entered hold.
pub type Id = Bytes<38>;

/// Whether others may hold the lock at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mode {
    /// Nobody else.
    Exclusive,
    /// Other shared holders.
    Shared,
}

/// The conditions of a request that few requests have; kept with the waiter and then with the hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// The grant lasts only this long until a RENEW with its token confirms it. `None` once confirmed.
    pub claim: Option<Millis>,
    /// When the connection closes, the lease is cut to this.
    pub session: Option<Millis>,
    /// Where the server speaks to this owner; empty for none.
    pub channel: Bytes<38>,
    /// Shown in FLOCK.INFO; empty for none.
    pub label: Bytes<22>,
    /// The ids of a re-entered hold; empty for a plain one.
    pub ids: BTreeSet<Id>,
    /// The token this hold had before its last conversion: a retried CONVERT with it is answered alike.
    pub converted_from: Option<Token>,
}

impl Terms {
    fn is_plain(&self) -> bool {
        *self == Self::default()
    }
}

/// A current grant.
#[derive(Clone, PartialEq, Eq)]
pub struct Hold {
    /// Who holds.
    pub owner: Owner,
    /// The fencing token.
    pub token: Token,
    tenure: Tenure,
    /// The rarely used conditions.
    pub terms: Option<Box<Terms>>,
}

impl Hold {
    /// When it ends: the hold is the half-open interval up to here. `Time::NEVER`: loaded, and its lease has not started yet.
    #[must_use]
    pub fn deadline(&self) -> Time {
        self.tenure.deadline()
    }

    /// When it was granted (or loaded), rounded down to a millisecond. `Time::NEVER`: loaded, and its lease has not started yet.
    #[must_use]
    pub fn granted(&self) -> Time {
        self.tenure.granted()
    }

    /// How long a grant lasts: what a server on another boot starts anew.
    #[must_use]
    pub fn lease(&self) -> Millis {
        self.tenure.lease()
    }

    /// Exclusive or shared.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.tenure.mode()
    }

    /// Whether the lease is over.
    #[must_use]
    pub fn is_over(&self, now: Time) -> bool {
        self.deadline() <= now
    }

    /// The claim that still waits for its confirmation.
    #[must_use]
    pub fn claim(&self) -> Option<Millis> {
        self.terms.as_ref().and_then(|terms| terms.claim)
    }

    /// The grace of a session hold.
    #[must_use]
    pub fn session(&self) -> Option<Millis> {
        self.terms.as_ref().and_then(|terms| terms.session)
    }

    /// The owner's channel.
    #[must_use]
    pub fn channel(&self) -> Option<&Bytes<38>> {
        channel_in(self.terms.as_deref())
    }

    /// The label.
    #[must_use]
    pub fn label(&self) -> &[u8] {
        self.terms.as_ref().map_or(b"", |terms| &terms.label)
    }

    /// The ids of a re-entered hold, in byte order.
    pub fn ids(&self) -> impl Iterator<Item = &Id> {
        self.terms.iter().flat_map(|terms| terms.ids.iter())
    }

    /// Whether the hold is re-entrant.
    #[must_use]
    pub fn has_ids(&self) -> bool {
        self.terms.as_ref().is_some_and(|terms| !terms.ids.is_empty())
    }

    /// Whether `id` is one of the hold's ids.
    #[must_use]
    pub fn has_id(&self, id: &[u8]) -> bool {
        self.terms.as_ref().is_some_and(|terms| terms.ids.contains(id))
    }

    /// Whether `token` is this hold's token, or was before its last conversion.
    #[must_use]
    pub fn had_token(&self, token: Token) -> bool {
        self.token == token || self.terms.as_ref().is_some_and(|terms| terms.converted_from == Some(token))
    }

    /// The grant that would create this hold.
    #[must_use]
    pub fn to_grant(&self) -> Grant {
        Grant {
            owner: self.owner.clone(),
            mode: self.mode(),
            token: self.token,
            lease: self.lease(),
            deadline: Some(self.deadline()).filter(|deadline| *deadline != Time::NEVER),
            terms: self.terms.clone(),
        }
    }

    fn edit_terms(&mut self, edit: impl FnOnce(&mut Terms)) {
        let mut terms = self.terms.take().unwrap_or_default();
        edit(&mut terms);
        self.terms = (!terms.is_plain()).then_some(terms);
    }

    fn heap_bytes(&self) -> usize {
        let terms = self.terms.as_ref().map_or(0, |terms| {
            size_of::<Terms>()
                + terms.channel.heap_bytes()
                + terms.label.heap_bytes()
                + terms.ids.iter().map(|id| size_of::<Id>() + id.heap_bytes()).sum::<usize>()
        });
        self.owner.heap_bytes() + terms
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold")
            .field("owner", &self.owner)
            .field("token", &self.token)
            .field("mode", &self.mode())
            .field("granted", &self.granted())
            .field("deadline", &self.deadline())
            .field("lease", &self.lease())
            .field("terms", &self.terms)
            .finish()
    }
}

/// A decided fact about one lock: the replication language.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The lock is granted (or, with a known token, the hold is now as stated).
    Grant(Grant),
    /// The hold now lasts `lease`; a pending claim is confirmed.
    Renew {
        /// Which hold.
        token: Token,
        /// From now.
        lease: Millis,
        /// When it ends, where the same clock is running.
        deadline: Option<Time>,
    },
    /// The hold has another mode and token.
    Mode {
        /// Its token so far.
        old: Token,
        /// Its token from now on.
        new: Token,
        /// Its mode from now on.
        mode: Mode,
    },
    /// The hold (`None`: every hold) has ended.
    End {
        /// Which hold.
        token: Option<Token>,
    },
    /// An id joined or left a re-entered hold.
    Ids {
        /// Which hold.
        token: Token,
        /// The id.
        id: Id,
        /// Whether it joined.
        joined: bool,
    },
    /// The server has reserved tokens up to here. Concerns no key.
    Mark(u64),
}

/// A grant with all its conditions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// To whom.
    pub owner: Owner,
    /// Exclusive or shared.
    pub mode: Mode,
    /// The fencing token.
    pub token: Token,
    /// How long.
    pub lease: Millis,
    /// When it ends, where the same clock is running; otherwise the lease (or claim) starts when it is applied.
    pub deadline: Option<Time>,
    /// The rarely used conditions.
    pub terms: Option<Box<Terms>>,
}

impl Grant {
    /// The claim if one is pending, else the lease: how long the grant lasts if nobody does anything.
    #[must_use]
    pub fn lasts(&self) -> Millis {
        self.terms.as_ref().and_then(|terms| terms.claim).unwrap_or(self.lease)
    }

    /// The owner's channel.
    #[must_use]
    pub fn channel(&self) -> Option<&Bytes<38>> {
        channel_in(self.terms.as_deref())
    }
}

fn channel_in(terms: Option<&Terms>) -> Option<&Bytes<38>> {
    terms.map(|terms| &terms.channel).filter(|channel| !channel.is_empty())
}

/// When a duration that arrives in a change starts to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Now.
    Now(Time),
    /// When loading has ended ([`Lock::start`]).
    AfterLoading,
}

impl Start {
    fn deadline(self, duration: Millis) -> Time {
        match self {
            Self::Now(now) => now.after(duration.min(DURATION_MAX)),
            Self::AfterLoading => Time::NEVER,
        }
    }

    /// The deadline that came with a change, or else the duration from the start. A deadline may be made up: none lies further ahead than
    /// the longest duration, since all that are noted must lie within days of each other.
    fn until(self, deadline: Option<Time>, duration: Millis) -> Time {
        match (self, deadline) {
            (Self::Now(now), Some(deadline)) => deadline.min(now.after(DURATION_MAX)),
            (Self::AfterLoading, Some(deadline)) => deadline,
            (_, None) => self.deadline(duration),
        }
    }

    fn granted(self) -> Time {
        match self {
            Self::Now(now) => now,
            Self::AfterLoading => Time::NEVER,
        }
    }
}

/// The holders of one lock. Almost every lock has one; the rest pay for an index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lock(Holders);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Holders {
    #[default]
    None,
    One(Hold),
    Many(Box<Many>),
}

/// Many shared holders, findable by token, by owner and by deadline: each change costs O(log n).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Many {
    by_token: BTreeMap<Token, Hold>,
    by_owner: BTreeMap<Owner, Token>,
    by_deadline: BTreeSet<(Time, Token)>,
}

impl Many {
    fn insert(&mut self, hold: Hold) {
        self.remove(hold.token);
        self.by_owner.insert(hold.owner.clone(), hold.token);
        self.by_deadline.insert((hold.deadline(), hold.token));
        self.by_token.insert(hold.token, hold);
    }

    fn remove(&mut self, token: Token) -> Option<Hold> {
        let hold = self.by_token.remove(&token)?;
        self.by_deadline.remove(&(hold.deadline(), token));
        // Only if the owner's entry is this hold's: a newer hold of the same owner keeps its own.
        if self.by_owner.get(&hold.owner) == Some(&token) {
            self.by_owner.remove(&hold.owner);
        }
        Some(hold)
    }
}

impl Lock {
    /// Whether nobody holds it.
    #[must_use]
    pub fn is_free(&self) -> bool {
        matches!(self.0, Holders::None)
    }

    /// How many hold it.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.0 {
            Holders::None => 0,
            Holders::One(_) => 1,
            Holders::Many(many) => many.by_token.len(),
        }
    }

    /// Whether nobody holds it (the customary twin of [`Lock::len`]).
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.is_free()
    }

    /// How it is held.
    #[must_use]
    pub fn mode(&self) -> Option<Mode> {
        match &self.0 {
            Holders::None => None,
            Holders::One(hold) => Some(hold.mode()),
            Holders::Many(many) => many.by_token.values().next().map(Hold::mode),
        }
    }

    /// Whether one more hold of this mode fits beside the current ones. `limit`: at most so many shared holders.
    #[must_use]
    pub fn admits(&self, mode: Mode, limit: Option<NonZeroU32>) -> bool {
        match self.mode() {
            None => true,
            Some(Mode::Exclusive) => false,
            Some(Mode::Shared) => mode == Mode::Shared && limit.is_none_or(|max| self.len() < max.get() as usize),
        }
    }

    /// The hold with this token.
    #[must_use]
    pub fn get(&self, token: Token) -> Option<&Hold> {
        match &self.0 {
            Holders::One(hold) if hold.token == token => Some(hold),
            Holders::Many(many) => many.by_token.get(&token),
            _ => None,
        }
    }

    /// The hold of this owner.
    #[must_use]
    pub fn held_by(&self, owner: &[u8]) -> Option<&Hold> {
        match &self.0 {
            Holders::One(hold) if hold.owner.as_slice() == owner => Some(hold),
            Holders::Many(many) => many.by_owner.get(owner).and_then(|token| many.by_token.get(token)),
            _ => None,
        }
    }

    /// The holds, oldest token first.
    pub fn holds(&self) -> impl Iterator<Item = &Hold> {
        let (one, many) = match &self.0 {
            Holders::None => (None, None),
            Holders::One(hold) => (Some(hold), None),
            Holders::Many(many) => (None, Some(many.by_token.values())),
        };
        one.into_iter().chain(many.into_iter().flatten())
    }

    /// When the first hold ends; `Time::NEVER` if none does.
    #[must_use]
    pub fn next_deadline(&self) -> Time {
        match &self.0 {
            Holders::None => Time::NEVER,
            Holders::One(hold) => hold.deadline(),
            Holders::Many(many) => many.by_deadline.first().map_or(Time::NEVER, |(deadline, _)| *deadline),
        }
    }

    /// A hold whose lease is over, the longest overdue first.
    #[must_use]
    pub fn first_over(&self, now: Time) -> Option<Token> {
        match &self.0 {
            Holders::One(hold) if hold.is_over(now) => Some(hold.token),
            Holders::Many(many) => {
                many.by_deadline.first().filter(|(deadline, _)| *deadline <= now).map(|(_, token)| *token)
            }
            _ => None,
        }
    }

    /// Alters the lock as decided. Unknown tokens are ignored: the change has been applied before, or its hold has ended since.
    pub fn apply(&mut self, change: &Change, start: Start) {
        match change {
            Change::Grant(grant) => self.insert(grant, start),
            Change::Renew { token, lease, deadline } => self.edit(*token, |hold| {
                hold.tenure.set_lease(*lease);
                hold.tenure.set_deadline(start.until(*deadline, *lease));
                if hold.claim().is_some() {
                    hold.edit_terms(|terms| terms.claim = None);
                }
            }),
            Change::Mode { old, new, mode } => self.edit(*old, |hold| {
                hold.tenure.set_mode(*mode);
                hold.token = *new;
                if old != new {
                    hold.edit_terms(|terms| terms.converted_from = Some(*old));
                }
            }),
            Change::End { token: Some(token) } => self.end(*token),
            Change::End { token: None } => self.0 = Holders::None,
            Change::Ids { token, id, joined } => self.edit(*token, |hold| {
                hold.edit_terms(|terms| {
                    if *joined {
                        terms.ids.insert(id.clone());
                    } else {
                        terms.ids.remove(id.as_slice());
                    }
                });
            }),
            Change::Mark(_) => {}
        }
    }

    /// Starts the leases that were loaded without a deadline.
    pub fn start(&mut self, now: Time) {
        let waiting: Vec<Token> =
            self.holds().filter(|hold| hold.granted() == Time::NEVER).map(|hold| hold.token).collect();
        for token in waiting {
            self.edit(token, |hold| hold.tenure.set_granted(now));
        }
        // An exact deadline of this boot stays, one that has not started yet starts.
        self.cap(now);
    }

    /// Shortens every hold that would last longer than one granted now.
    pub(crate) fn cap(&mut self, now: Time) {
        let tokens: Vec<Token> = self.holds().map(|hold| hold.token).collect();
        for token in tokens {
            self.edit(token, |hold| {
                let longest = Start::Now(now).deadline(hold.claim().unwrap_or(hold.lease()));
                hold.tenure.set_deadline(hold.deadline().min(longest));
            });
        }
    }

    /// Bytes allocated outside this value.
    #[must_use]
    pub fn heap_bytes(&self) -> usize {
        match &self.0 {
            Holders::None => 0,
            Holders::One(hold) => hold.heap_bytes(),
            Holders::Many(many) => {
                // Three tree entries a hold; the trees' own slack is about a third.
                let entry = size_of::<(Token, Hold)>() + size_of::<(Owner, Token)>() + size_of::<(Time, Token)>();
                let holds: usize = many.by_token.values().map(|hold| entry + entry / 3 + hold.heap_bytes()).sum();
                size_of::<Many>() + holds
            }
        }
    }

    fn insert(&mut self, grant: &Grant, start: Start) {
        let granted = self.get(grant.token).map_or_else(|| start.granted(), Hold::granted);
        let deadline = start.until(grant.deadline, grant.lasts());
        let hold = Hold {
            owner: grant.owner.clone(),
            token: grant.token,
            tenure: Tenure::new(deadline, granted, grant.lease, grant.mode),
            terms: grant.terms.clone().filter(|terms| !terms.is_plain()),
        };
        self.put(hold);
    }

    fn put(&mut self, hold: Hold) {
        match &mut self.0 {
            Holders::None => self.0 = Holders::One(hold),
            Holders::One(current) if current.token == hold.token => *current = hold,
            Holders::One(_) => {
                let mut many = Box::<Many>::default();
                if let Holders::One(current) = core::mem::take(&mut self.0) {
                    many.insert(current);
                }
                many.insert(hold);
                self.0 = Holders::Many(many);
            }
            Holders::Many(many) => many.insert(hold),
        }
    }

    fn end(&mut self, token: Token) {
        match &mut self.0 {
            Holders::One(hold) if hold.token == token => self.0 = Holders::None,
            Holders::Many(many) => {
                many.remove(token);
                if many.by_token.is_empty() {
                    self.0 = Holders::None;
                }
            }
            _ => {}
        }
    }

    /// Alters one hold and keeps the indexes true.
    fn edit(&mut self, token: Token, edit: impl FnOnce(&mut Hold)) {
        match &mut self.0 {
            Holders::One(hold) if hold.token == token => edit(hold),
            Holders::Many(many) => {
                if let Some(mut hold) = many.remove(token) {
                    edit(&mut hold);
                    many.insert(hold);
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Millis = Millis(1000);
    const NOW: Start = Start::Now(Time::ZERO);

    fn token(number: u64) -> Token {
        Token::new(number).expect("a token")
    }

    fn grant(number: u64, owner: &[u8], mode: Mode, terms: Terms) -> Change {
        let terms = Some(Box::new(terms));
        Change::Grant(Grant {
            owner: Owner::new(owner),
            mode,
            token: token(number),
            lease: LEASE,
            deadline: None,
            terms,
        })
    }

    #[test]
    fn a_lock_with_one_holder_is_small() {
        // Memory follows held locks: these two sizes are most of it.
        assert_eq!(size_of::<Hold>(), 72);
        assert_eq!(size_of::<Lock>(), 72);
    }

    #[test]
    fn what_a_hold_allocates_is_its_long_owner_and_what_it_asked_for() {
        let mut lock = Lock::default();
        assert_eq!((lock.heap_bytes(), lock.is_empty()), (0, true));
        // Terms that say nothing are not kept.
        lock.apply(&grant(1, b"short", Mode::Exclusive, Terms::default()), NOW);
        assert_eq!((lock.heap_bytes(), lock.is_empty()), (0, false));
        let mut lock = Lock::default();
        lock.apply(&grant(1, &[b'o'; 200], Mode::Exclusive, Terms::default()), NOW);
        assert_eq!(lock.heap_bytes(), 200);
        let terms = Terms {
            channel: Bytes::new(&[b'c'; 100]),
            label: Bytes::new(&[b'l'; 60]),
            ids: [Id::new(b"short"), Id::new(&[b'i'; 90])].into(),
            ..Terms::default()
        };
        lock.apply(&grant(1, &[b'o'; 200], Mode::Exclusive, terms), NOW);
        assert_eq!(lock.heap_bytes(), 200 + size_of::<Terms>() + 100 + 60 + 2 * size_of::<Id>() + 90);
    }

    #[test]
    fn end_of_another_hold_ends_nothing() {
        let mut lock = Lock::default();
        lock.apply(&grant(1, b"a", Mode::Shared, Terms::default()), NOW);
        lock.apply(&Change::End { token: Some(token(2)) }, NOW);
        assert!(lock.get(token(1)).is_some());
        lock.apply(&grant(2, b"b", Mode::Shared, Terms::default()), NOW);
        lock.apply(&Change::End { token: Some(token(3)) }, NOW);
        assert_eq!(lock.len(), 2);
    }

    #[test]
    fn end_of_an_older_hold_of_an_owner_leaves_it_the_newer() {
        let mut lock = Lock::default();
        for number in 1..=3 {
            let owner: &[u8] = if number == 2 { b"other" } else { b"o" };
            lock.apply(&grant(number, owner, Mode::Shared, Terms::default()), NOW);
        }
        lock.apply(&Change::End { token: Some(token(1)) }, NOW);
        assert_eq!(lock.held_by(b"o").map(|hold| hold.token), Some(token(3)));
        lock.apply(&Change::End { token: Some(token(3)) }, NOW);
        assert!(lock.held_by(b"o").is_none() && lock.held_by(b"other").is_some());
    }

    #[test]
    fn renewal_of_another_hold_renews_nothing() {
        let mut lock = Lock::default();
        lock.apply(&grant(1, b"a", Mode::Exclusive, Terms::default()), NOW);
        let lease = Millis(5000);
        lock.apply(&Change::Renew { token: token(2), lease, deadline: None }, NOW);
        assert_eq!(lock.get(token(1)).map(Hold::lease), Some(LEASE));
        lock.apply(&Change::Renew { token: token(1), lease, deadline: None }, NOW);
        assert_eq!(lock.get(token(1)).map(Hold::lease), Some(lease));
    }

    #[test]
    fn loaded_leases_begin_when_everything_is_loaded() {
        let at = |ms: u64| Time::from_us(ms * 1000);
        let mut lock = Lock::default();
        lock.apply(&grant(1, b"new", Mode::Shared, Terms::default()), NOW);
        lock.apply(&grant(2, b"loaded", Mode::Shared, Terms::default()), Start::AfterLoading);
        lock.start(at(700));
        let held = |number| lock.get(token(number)).map(|hold| (hold.granted(), hold.deadline()));
        assert_eq!(held(1), Some((Time::ZERO, at(1000))));
        assert_eq!(held(2), Some((at(700), at(1700))));
    }

    #[test]
    fn confirmed_claim_leaves_nothing_behind() {
        let mut lock = Lock::default();
        let claim = Terms { claim: Some(Millis(100)), ..Terms::default() };
        lock.apply(&grant(1, b"a", Mode::Exclusive, claim), NOW);
        assert_eq!(lock.heap_bytes(), size_of::<Terms>());
        lock.apply(&Change::Renew { token: token(1), lease: LEASE, deadline: None }, NOW);
        assert_eq!(lock.heap_bytes(), 0);
    }

    #[test]
    fn each_of_several_holds_pays_for_its_entries_and_itself() {
        let mut lock = Lock::default();
        let shared = |number, owner: &[u8]| grant(number, owner, Mode::Shared, Terms::default());
        lock.apply(&shared(1, &[b'o'; 200]), NOW);
        lock.apply(&shared(2, b"b"), NOW);
        let two = lock.heap_bytes();
        lock.apply(&shared(3, &[b'o'; 150]), NOW);
        let three = lock.heap_bytes();
        // Three tree entries and the trees' slack: a token and the hold, the owner and a token, a deadline and a token.
        let entries = size_of::<(Token, Hold)>() + size_of::<(Owner, Token)>() + size_of::<(Time, Token)>();
        assert_eq!(three - two, entries + entries / 3 + 150);
        assert_eq!(two, size_of::<Many>() + 2 * (entries + entries / 3) + 200);
    }
}
