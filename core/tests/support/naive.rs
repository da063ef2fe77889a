//! A second implementation of the rules, written from the description alone: lists, loops, no indexes, no economy.
//!
//! It shares nothing with the core but the rules. Time is a number of microseconds, a token a number from 1 on, an owner a name.

use std::collections::BTreeSet;

pub(crate) type Name = &'static str;
pub(crate) type Key = usize;

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Hold {
    pub(crate) owner: Name,
    pub(crate) token: u64,
    pub(crate) shared: bool,
    pub(crate) until: u64,
    pub(crate) claim_ms: Option<u64>,
    pub(crate) session_ms: Option<u64>,
    pub(crate) connection: Option<u64>,
    pub(crate) has_channel: bool,
    pub(crate) label: Option<Name>,
    pub(crate) ids: BTreeSet<Name>,
    /// The token before the last conversion.
    pub(crate) was: Option<u64>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Waiter {
    pub(crate) owner: Name,
    pub(crate) until: Option<u64>,
    pub(crate) blocked: bool,
    connection: u64,
    ask: Ask,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Patience {
    None,
    Block(Option<u64>),
    Queue(u64),
}

/// An ACQUIRE: what it asks, but for the key and the owner.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Ask {
    pub(crate) lease_ms: u64,
    pub(crate) shared: bool,
    pub(crate) limit: Option<usize>,
    pub(crate) patience: Patience,
    pub(crate) has_channel: bool,
    pub(crate) new: bool,
    pub(crate) id: Option<Name>,
    pub(crate) convert: Option<u64>,
    pub(crate) claim_ms: Option<u64>,
    pub(crate) session_ms: Option<u64>,
    pub(crate) label: Option<Name>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Scope {
    Plain,
    Id(Name),
    All,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Place {
    pub(crate) holds: Vec<Hold>,
    pub(crate) queue: Vec<Waiter>,
    /// An ended value lies here that RENAME or MOVE has carried.
    pub(crate) carried: bool,
    /// What the server took away without anybody's wish: it comes back when somebody looks.
    away: Vec<Hold>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Answer {
    Nothing,
    Granted(u64),
    Nil,
    Queued {
        exactly: Option<usize>,
        at_most: usize,
    },
    Yes,
    No,
    Count(usize),
    /// Refused, for one of these reasons: where several apply, any may be named.
    Refused(Vec<&'static str>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Word {
    Granted(u64),
    TimedOut,
    Ended(&'static str),
    Lost(u64, &'static str),
}

/// What somebody hears.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Said {
    /// On its blocked connection.
    Answered(Name, Word),
    /// On its channel.
    Told(Name, Word),
    /// Everybody: a hold has ended, and how.
    Announced(u64, &'static str),
}

/// A whole server, with everybody who listens.
#[derive(Clone, Debug)]
pub(crate) struct Server {
    pub(crate) now: u64,
    pub(crate) places: Vec<Place>,
    pub(crate) deaf: BTreeSet<Name>,
    pub(crate) waiters_max: usize,
    pub(crate) ids_max: usize,
    last_token: u64,
    grace_until: Option<u64>,
    /// To be said when the server wakes.
    unsaid: Vec<Said>,
    /// Session holds whose connection has closed: cut when the server wakes.
    to_cut: BTreeSet<u64>,
    /// Grants that were not delivered.
    undelivered: BTreeSet<u64>,
    /// Grants answered to a blocked connection since the server last woke, whose owner has not been heard of since.
    pub(crate) fresh: Vec<(Name, Key, u64)>,
    /// What the last step answered, said, and granted (key, owner, token).
    pub(crate) answer: Answer,
    pub(crate) said: Vec<Said>,
    pub(crate) granted: Vec<(Key, Name, u64)>,
}

const MS: u64 = 1000;

impl Server {
    pub(crate) fn new(now: u64, places: usize, waiters_max: usize, ids_max: usize) -> Self {
        Self {
            now,
            places: vec![Place::default(); places],
            deaf: BTreeSet::new(),
            waiters_max,
            ids_max,
            last_token: 0,
            grace_until: None,
            unsaid: Vec::new(),
            to_cut: BTreeSet::new(),
            undelivered: BTreeSet::new(),
            fresh: Vec::new(),
            answer: Answer::Nothing,
            said: Vec::new(),
            granted: Vec::new(),
        }
    }

    /// Every token handed out so far is at most this.
    pub(crate) fn last_token(&self) -> u64 {
        self.last_token
    }

    pub(crate) fn begin_step(&mut self) {
        self.answer = Answer::Nothing;
        self.said.clear();
        self.granted.clear();
    }

    pub(crate) fn acquire(&mut self, key: Key, owner: Name, ask: &Ask, connection: u64) {
        self.fresh.retain(|(who, _, _)| *who != owner);
        self.due(key, None);
        self.answer = self.decide(key, owner, ask, connection);
    }

    fn decide(&mut self, key: Key, owner: Name, ask: &Ask, connection: u64) -> Answer {
        if self.hold_of(key, owner).is_some() {
            return self.acquire_again(key, owner, ask, connection);
        }
        if ask.convert.is_some() {
            return Answer::Refused(vec!["not held"]);
        }
        let place = self.places[key].queue.iter().position(|waiter| waiter.owner == owner);
        if let Some(place) = place.filter(|_| ask.patience != Patience::None) {
            let old = self.places[key].queue[place].clone();
            // Two waiting requests of one owner: the older ends. It is not told so where the newer one listens.
            if old.blocked {
                self.said.push(Said::Answered(owner, Word::Ended("superseded")));
            } else if !matches!(ask.patience, Patience::Queue(_)) {
                self.said.push(Said::Told(owner, Word::Ended("superseded")));
            }
            if old.ask.shared == ask.shared {
                self.places[key].queue[place] = self.waiter(owner, ask, connection);
                return self.wait(key, owner, false);
            }
            self.places[key].queue.remove(place);
            self.due(key, None);
        }
        let nobody_waits = self.places[key].queue.is_empty();
        if nobody_waits && self.admits(key, ask) && !self.in_grace() {
            let waiter = self.waiter(owner, ask, connection);
            return Answer::Granted(self.grant(key, &waiter));
        }
        if ask.patience == Patience::None {
            return Answer::Nil;
        }
        if self.places.iter().map(|place| place.queue.len()).sum::<usize>() >= self.waiters_max {
            return Answer::Refused(vec!["queue full"]);
        }
        let waiter = self.waiter(owner, ask, connection);
        self.places[key].queue.push(waiter);
        self.wait(key, owner, true)
    }

    /// The owner waits and asks at this moment: it hears. Then it is like the others.
    fn wait(&mut self, key: Key, owner: Name, joined: bool) -> Answer {
        self.due(key, Some(owner));
        self.due(key, None);
        if let Some(hold) = self.hold_of(key, owner) {
            return Answer::Granted(hold.token);
        }
        let queue = &self.places[key].queue;
        let ahead = queue.iter().position(|waiter| waiter.owner == owner).expect("it waits");
        Answer::Queued { exactly: joined.then_some(ahead + 1), at_most: queue.len() }
    }

    fn acquire_again(&mut self, key: Key, owner: Name, ask: &Ask, connection: u64) -> Answer {
        let hold = self.hold_of(key, owner).expect("the caller has looked").clone();
        let mut refused = Vec::new();
        if ask.new {
            refused.push("held already");
        }
        if let Some(id) = ask.id {
            if hold.ids.is_empty() {
                refused.push("held without ids");
            } else if !hold.ids.contains(id) && hold.ids.len() >= self.ids_max {
                refused.push("too many ids");
            }
        }
        // A retry of a conversion to exclusive may name the token that it replaced.
        let retried = !hold.shared && !ask.shared && ask.convert.is_some() && ask.convert == hold.was;
        match ask.convert {
            None if hold.shared && !ask.shared => refused.push("held shared"),
            Some(token) if token != hold.token && !retried => refused.push("not held"),
            _ => {}
        }
        if !refused.is_empty() {
            return Answer::Refused(refused);
        }
        let converts = ask.convert.is_some() && !retried && hold.shared != ask.shared;
        if converts && !ask.shared && (self.places[key].holds.len() > 1 || self.in_grace()) {
            return Answer::Nil;
        }
        let (now, mut token) = (self.now, hold.token);
        if converts && !ask.shared {
            token = self.next_token();
            self.granted.push((key, owner, token));
        }
        let held = self.hold_mut(key, owner);
        if converts {
            held.shared = ask.shared;
            if token != held.token {
                held.was = Some(held.token);
                held.token = token;
            }
        }
        held.ids.extend(ask.id);
        if held.claim_ms.is_none() {
            held.until = held.until.max(now + ask.lease_ms * MS);
        }
        held.has_channel |= ask.has_channel;
        held.label = ask.label.or(held.label);
        held.session_ms = ask.session_ms.or(held.session_ms);
        held.connection = held.session_ms.map(|_| connection);
        self.due(key, None);
        Answer::Granted(token)
    }

    pub(crate) fn release(&mut self, key: Key, owner: Name, token: Option<u64>, scope: Scope) {
        self.fresh.retain(|(who, _, _)| *who != owner);
        self.due(key, None);
        self.answer = match self.hold_of(key, owner).cloned() {
            Some(hold) if token.is_some_and(|token| token != hold.token) => Answer::No,
            Some(hold) => match scope {
                Scope::Plain if !hold.ids.is_empty() => Answer::Refused(vec!["needs an id or all"]),
                Scope::Plain | Scope::All => self.end(key, hold.token, "released"),
                Scope::Id(id) if !hold.ids.contains(id) => Answer::No,
                Scope::Id(_) if hold.ids.len() == 1 => self.end(key, hold.token, "released"),
                Scope::Id(id) => {
                    self.hold_mut(key, owner).ids.remove(id);
                    Answer::Yes
                }
            },
            None => self.cancel(key, owner, token, scope),
        };
        if self.answer == Answer::Yes {
            self.due(key, None);
        }
    }

    fn cancel(&mut self, key: Key, owner: Name, token: Option<u64>, scope: Scope) -> Answer {
        let queue = &mut self.places[key].queue;
        let Some(place) = queue.iter().position(|waiter| waiter.owner == owner) else { return Answer::No };
        let named = match scope {
            Scope::Plain | Scope::All => true,
            Scope::Id(id) => queue[place].ask.id == Some(id),
        };
        if token.is_some() || !named {
            return Answer::No;
        }
        if queue.remove(place).blocked {
            self.said.push(Said::Answered(owner, Word::Ended("cancelled")));
        }
        Answer::Yes
    }

    pub(crate) fn renew(&mut self, key: Key, owner: Name, lease_ms: u64, token: Option<u64>, connection: u64) {
        self.fresh.retain(|(who, _, _)| *who != owner);
        self.due(key, None);
        let now = self.now;
        self.answer = Answer::No;
        if self.hold_of(key, owner).is_some_and(|hold| token.is_none_or(|token| token == hold.token)) {
            let hold = self.hold_mut(key, owner);
            if token.is_some() {
                hold.claim_ms = None;
            }
            hold.until = now + hold.claim_ms.map_or(lease_ms, |claim| claim.min(lease_ms)) * MS;
            hold.connection = hold.session_ms.map(|_| connection);
            self.answer = Answer::Yes;
        }
    }

    pub(crate) fn revoke(&mut self, key: Key, owner: Option<Name>) {
        self.due(key, None);
        let named = |hold: &&Hold| owner.is_none_or(|owner| owner == hold.owner);
        let tokens: Vec<u64> = self.places[key].holds.iter().filter(named).map(|hold| hold.token).collect();
        for token in &tokens {
            self.end(key, *token, "revoked");
        }
        self.due(key, None);
        self.answer = Answer::Count(tokens.len());
    }

    pub(crate) fn check(&mut self, key: Key, token: u64) {
        // What is away counts as long as nothing else lies at the key.
        let place = &self.places[key];
        let holds = if self.exists(key) { &place.holds } else { &place.away };
        let held = holds.iter().any(|hold| hold.token == token && hold.until > self.now);
        self.answer = if held { Answer::Yes } else { Answer::No };
    }

    pub(crate) fn exists(&self, key: Key) -> bool {
        self.places[key].carried || !self.places[key].holds.is_empty()
    }

    pub(crate) fn delete(&mut self, key: Key) {
        self.lose(key, "removed");
        self.places[key].carried = false;
    }

    /// Eviction, or a time to live that somebody gave the key.
    pub(crate) fn evict(&mut self, key: Key) {
        let place = &mut self.places[key];
        let mut given_up = Vec::new();
        // A grant that was not delivered does not come back.
        let mut taken = core::mem::take(&mut place.holds);
        taken.retain(|hold| !self.undelivered.contains(&hold.token));
        if !taken.is_empty() {
            given_up = core::mem::replace(&mut place.away, taken);
        }
        place.carried = false;
        // SWAPDB had brought another lock here after the first was taken: only the later one comes back.
        self.mourn(given_up, "removed");
    }

    /// What is away comes back, unless something else is held there by now.
    fn put_back(&mut self, key: Key) {
        let place = &mut self.places[key];
        let away = core::mem::take(&mut place.away);
        if away.is_empty() {
        } else if place.holds.is_empty() {
            place.carried = false;
            place.holds = away;
        } else {
            self.mourn(away, "removed");
        }
    }

    /// RENAME, or MOVE.
    pub(crate) fn carry(&mut self, from: Key, to: Key) {
        if self.exists(from) && from != to {
            self.lose(to, "removed");
            self.lose(from, "removed");
            self.places[from].carried = false;
            self.places[to].carried = true;
        }
    }

    /// SWAPDB: the values change places, the waiters stay.
    pub(crate) fn swap(&mut self) {
        let (a, b) = self.places.split_at_mut(1);
        core::mem::swap(&mut a[0].holds, &mut b[0].holds);
        core::mem::swap(&mut a[0].carried, &mut b[0].carried);
    }

    /// FLUSHALL, or FLUSHDB: every key is in a database of its own.
    pub(crate) fn flush(&mut self, only: Option<Key>) {
        for key in (0..self.places.len()).filter(|key| only.is_none_or(|only| only == *key)) {
            self.dismiss(key, "flushed");
            self.lose(key, "flushed");
            let away = core::mem::take(&mut self.places[key].away);
            self.mourn(away, "removed");
            self.places[key].carried = false;
        }
    }

    pub(crate) fn close(&mut self, connection: u64) {
        for place in &mut self.places {
            let all = place.holds.iter_mut().chain(&mut place.away);
            for hold in all.filter(|hold| hold.connection == Some(connection)) {
                hold.connection = None;
                self.to_cut.insert(hold.token);
            }
            place.queue.retain(|waiter| {
                waiter.connection != connection || (!waiter.blocked && waiter.ask.session_ms.is_none())
            });
        }
    }

    pub(crate) fn unblock(&mut self, key: Key, owner: Name) {
        self.places[key].queue.retain(|waiter| waiter.owner != owner || !waiter.blocked);
    }

    pub(crate) fn undelivered(&mut self, grant: (Name, Key, u64)) {
        self.fresh.retain(|known| *known != grant);
        if self.places.iter().flat_map(|place| &place.holds).any(|hold| hold.token == grant.2) {
            self.undelivered.insert(grant.2);
        }
        self.places.iter_mut().for_each(|place| place.away.retain(|hold| hold.token != grant.2));
    }

    /// Another server with the same holds goes on.
    pub(crate) fn fail_over(&mut self, grace_ms: u64) {
        for key in 0..self.places.len() {
            self.dismiss(key, "role changed");
        }
        self.places.iter_mut().for_each(|place| place.away.clear());
        self.unsaid.clear();
        self.to_cut.clear();
        self.undelivered.clear();
        self.fresh.clear();
        self.grace_until = (grace_ms > 0).then_some(self.now + grace_ms * MS);
        for hold in self.places.iter_mut().flat_map(|place| &mut place.holds).filter(|hold| hold.session_ms.is_some()) {
            hold.connection = None;
            self.to_cut.insert(hold.token);
        }
    }

    /// The server performs all that is due.
    pub(crate) fn wake(&mut self) {
        for key in 0..self.places.len() {
            self.put_back(key);
        }
        self.said.append(&mut self.unsaid);
        let now = self.now;
        for hold in self.places.iter_mut().flat_map(|place| &mut place.holds) {
            let Some(grace_ms) =
                hold.session_ms.filter(|_| hold.connection.is_none() && self.to_cut.contains(&hold.token))
            else {
                continue;
            };
            if hold.until > now + grace_ms * MS {
                hold.until = now + grace_ms * MS;
                hold.claim_ms = hold.claim_ms.map(|claim| claim.min(grace_ms));
            }
        }
        self.to_cut.clear();
        for key in 0..self.places.len() {
            self.due(key, None);
            let queue = core::mem::take(&mut self.places[key].queue);
            for waiter in queue {
                if waiter.until.is_some_and(|until| until <= now) {
                    self.say(&waiter, Word::TimedOut);
                } else {
                    self.places[key].queue.push(waiter);
                }
            }
            self.due(key, None);
        }
        self.undelivered.clear();
        self.fresh.clear();
        if !self.in_grace() {
            self.grace_until = None;
        }
    }

    /// Performs what is due at one key.
    pub(crate) fn look(&mut self, key: Key) {
        self.due(key, None);
    }

    /// What is due at one key: leases that are over, grants not delivered, then whoever is next. `asking`: who hears at this moment.
    fn due(&mut self, key: Key, asking: Option<Name>) {
        self.put_back(key);
        let now = self.now;
        let mut over: Vec<(u64, u64)> = self.places[key].holds.iter().map(|hold| (hold.until, hold.token)).collect();
        over.retain(|(until, _)| *until <= now);
        over.sort_unstable();
        for (_, token) in over {
            self.end(key, token, "expired");
        }
        let mut lost: Vec<u64> = self.places[key].holds.iter().map(|hold| hold.token).collect();
        lost.retain(|token| self.undelivered.contains(token));
        for token in lost {
            self.end(key, token, "not delivered");
        }
        loop {
            let front_is_over =
                |place: &Place| place.queue.first().is_some_and(|front| front.until.is_some_and(|until| until <= now));
            while front_is_over(&self.places[key]) {
                let front = self.places[key].queue.remove(0);
                self.say(&front, Word::TimedOut);
            }
            if self.in_grace() {
                return;
            }
            let Some(next) = self.next(key, asking) else { return };
            let waiter = self.places[key].queue.remove(next);
            let own = self.hold_of(key, waiter.owner).map(|hold| hold.token);
            let token = own.unwrap_or_else(|| self.grant(key, &waiter));
            if asking != Some(waiter.owner) {
                self.say(&waiter, Word::Granted(token));
                if waiter.blocked {
                    self.fresh.push((waiter.owner, key, token));
                }
            }
        }
    }

    /// Who is next at a key: the first live waiter who hears, or if none does the first; if the lock admits it.
    fn next(&self, key: Key, asking: Option<Name>) -> Option<usize> {
        let queue = &self.places[key].queue;
        let live = |place: &usize| queue[*place].until.is_none_or(|until| until > self.now);
        let hears = |place: &usize| {
            let waiter = &queue[*place];
            waiter.blocked || asking == Some(waiter.owner) || !self.deaf.contains(waiter.owner)
        };
        let heard = (0..queue.len()).filter(live).find(hears);
        let next = heard.or_else(|| (0..queue.len()).find(live))?;
        self.admits(key, &queue[next].ask).then_some(next)
    }

    fn admits(&self, key: Key, ask: &Ask) -> bool {
        let holds = &self.places[key].holds;
        let alone = holds.is_empty();
        let shares = ask.shared && holds.iter().all(|hold| hold.shared);
        alone || (shares && ask.limit.is_none_or(|limit| holds.len() < limit))
    }

    fn in_grace(&self) -> bool {
        self.grace_until.is_some_and(|until| self.now < until)
    }

    fn next_token(&mut self) -> u64 {
        self.last_token += 1;
        self.last_token
    }

    fn grant(&mut self, key: Key, waiter: &Waiter) -> u64 {
        let token = self.next_token();
        let ask = &waiter.ask;
        let hold = Hold {
            owner: waiter.owner,
            token,
            shared: ask.shared,
            until: self.now + ask.claim_ms.unwrap_or(ask.lease_ms) * MS,
            claim_ms: ask.claim_ms,
            session_ms: ask.session_ms,
            connection: ask.session_ms.map(|_| waiter.connection),
            has_channel: ask.has_channel,
            label: ask.label,
            ids: ask.id.into_iter().collect(),
            was: None,
        };
        self.granted.push((key, waiter.owner, token));
        self.places[key].holds.push(hold);
        self.places[key].carried = false;
        token
    }

    fn end(&mut self, key: Key, token: u64, how: &'static str) -> Answer {
        let holds = &mut self.places[key].holds;
        let hold = holds.remove(holds.iter().position(|hold| hold.token == token).expect("what ends is held"));
        if hold.has_channel && (how == "expired" || how == "revoked") {
            self.said.push(Said::Told(hold.owner, Word::Lost(token, how)));
        }
        self.said.push(Said::Announced(token, how));
        Answer::Yes
    }

    /// Somebody else's doing: noted, and said when the server wakes.
    fn lose(&mut self, key: Key, why: &'static str) {
        let mut lost = core::mem::take(&mut self.places[key].holds);
        // Nobody knows of a grant that was not delivered.
        lost.retain(|hold| !self.undelivered.contains(&hold.token));
        self.mourn(lost, why);
    }

    fn mourn(&mut self, lost: Vec<Hold>, why: &'static str) {
        for hold in lost.into_iter().filter(|hold| hold.has_channel) {
            self.unsaid.push(Said::Told(hold.owner, Word::Lost(hold.token, why)));
        }
    }

    fn dismiss(&mut self, key: Key, why: &'static str) {
        for waiter in core::mem::take(&mut self.places[key].queue) {
            self.say(&waiter, Word::Ended(why));
        }
    }

    fn say(&mut self, waiter: &Waiter, word: Word) {
        let owner = waiter.owner;
        self.said.push(if waiter.blocked { Said::Answered(owner, word) } else { Said::Told(owner, word) });
    }

    fn waiter(&self, owner: Name, ask: &Ask, connection: u64) -> Waiter {
        let until = match ask.patience {
            Patience::None | Patience::Block(None) => None,
            Patience::Block(Some(ms)) | Patience::Queue(ms) => Some(self.now + ms * MS),
        };
        let blocked = matches!(ask.patience, Patience::Block(_));
        Waiter { owner, until, blocked, connection, ask: ask.clone() }
    }

    fn hold_of(&self, key: Key, owner: Name) -> Option<&Hold> {
        self.places[key].holds.iter().find(|hold| hold.owner == owner)
    }

    fn hold_mut(&mut self, key: Key, owner: Name) -> &mut Hold {
        self.places[key].holds.iter_mut().find(|hold| hold.owner == owner).expect("the caller has looked")
    }
}
