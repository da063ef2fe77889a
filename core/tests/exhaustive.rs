//! Every sequence of operations on a small lock, judged from outside after every step.
//!
//! Breadth first over all sequences: three owners, one key (and where RENAME and SWAPDB can carry it). States that differ only in
//! what nobody can tell apart (which owner is which, how long ago the past was, how high the tokens are) are visited once.
//!
//! The judge keeps its own books from what clients see: answers, messages, and the stream of changes. It never asks the table what
//! to expect; at the end of each step the table must agree with the books, entry by entry. Checked after every step:
//! S1 no two incompatible promises at one time, nor a lease cut short; S2, S3 a new token exceeds all before it; S4 a "no" changes
//! nothing that was not due; S6 a repeated request is answered alike and changes nothing; S7 a hold lives while its ids do;
//! S8 modes, limits and conversions; S9 no live waiter is overtaken; S10 the replica agrees; L1 nobody waits for a lock that could be
//! granted; L3, L4 nothing that is over remains after the server has woken; every wait is answered exactly once.

mod support;

use core::num::{NonZeroU32, NonZeroU64};
use flock_core::effect::{Ended, Notice, WaitOutcome};
use flock_core::lock::Grant;
use flock_core::request::ReleaseScope;
use flock_core::table::ClientId;
use flock_core::wait_queue::Ear;
use flock_core::{
    Acquire, Acquired, Change, EndReason, Limits, LossReason, Millis, Mode, Refusal, Release, Renew, Revoke, Time,
    Token, Wait,
};
use std::collections::HashSet;
use std::time::Instant;
use support::world::{Happened, Node, Spot, World};

const OWNERS: [&str; 3] = ["a", "b", "c"];
const CHANNELS: [&str; 3] = ["~a", "~b", "~c"];
const NAMES: [&str; 6] = ["a", "b", "c", "~a", "~b", "~c"];
const IDS: [&[u8]; 2] = [b"1", b"2"];
/// The key that all verbs are about; its twin in the other database; where RENAME carries its value.
const KEYS: [(u16, &str); 3] = [(0, "k"), (1, "k"), (0, "r")];
const KEY: Spot = 0;

/// 125 steps of the deadlines' resolution: what falls due at a moment is performed at that moment.
const UNIT: Millis = Millis(128);
const LEASE: Millis = Millis(256);
/// A wait of one unit can end together with a lease of two.
const WAIT: Millis = Millis(128);
const CLAIM: Millis = Millis(128);
const SESSION: Millis = Millis(128);
const PROMOTION: Millis = Millis(128);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Try,
    Block,
    Queue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    /// The token of the current hold.
    Current,
    /// The token of a hold that is gone, or that a conversion has replaced.
    Stale,
}

/// An ACQUIRE without its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ask {
    shared: bool,
    limit: Option<NonZeroU32>,
    how: How,
    new: bool,
    id: Option<usize>,
    convert: Option<Which>,
    floor: bool,
    claim: bool,
    session: bool,
}

const X: Ask = Ask {
    shared: false,
    limit: None,
    how: How::Try,
    new: false,
    id: None,
    convert: None,
    floor: false,
    claim: false,
    session: false,
};
const S: Ask = Ask { shared: true, ..X };

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Give {
    Plain,
    Id(usize),
    All,
    Token(Which),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    Acquire(usize, Ask),
    Release(usize, Give),
    Renew(usize, Option<Which>),
    Revoke(Option<usize>),
    /// Time passes; the server does not wake by itself.
    Pass(u32),
    /// The server performs what is due, as before each sleep.
    Wake,
    Delete,
    /// The server takes the key away; nobody gave the lock up.
    Evict,
    Overwrite,
    /// The value leaves the key.
    RenameAway,
    /// The value comes back to the key.
    RenameBack,
    Swap,
    Flush,
    /// The owner's connection closes; it comes back with a new one.
    Close(usize),
    /// CLIENT UNBLOCK.
    Unblock(usize),
    /// The grant just answered to this owner's blocked connection did not arrive.
    Undelivered(usize),
    /// The owner subscribes to its channel, or unsubscribes.
    Listen(usize),
    /// The replica takes over; no new grants for so many units.
    FailOver(u32),
}

fn base_alphabet() -> Vec<Op> {
    let mut ops = Vec::new();
    for owner in 0..3 {
        ops.extend(
            [
                X,
                S,
                Ask { how: How::Block, ..X },
                Ask { how: How::Queue, ..S },
                Ask { how: How::Block, limit: NonZeroU32::new(2), ..S },
            ]
            .map(|ask| Op::Acquire(owner, ask)),
        );
        ops.extend([Op::Release(owner, Give::Plain), Op::Renew(owner, None)]);
    }
    ops.extend([Op::Pass(1), Op::Pass(2), Op::Wake, Op::Delete]);
    ops
}

fn full_alphabet() -> Vec<Op> {
    let mut ops = base_alphabet();
    let (block, queue) = (How::Block, How::Queue);
    for owner in 0..3 {
        ops.extend(
            [
                Ask { new: true, ..X },
                Ask { new: true, how: block, ..S },
                Ask { how: queue, ..X },
                Ask { limit: NonZeroU32::new(2), ..S },
                Ask { convert: Some(Which::Current), ..X },
                Ask { convert: Some(Which::Current), ..S },
                Ask { convert: Some(Which::Stale), ..X },
                Ask { convert: Some(Which::Stale), ..S },
                Ask { convert: Some(Which::Current), id: Some(1), ..S },
                Ask { id: Some(0), ..X },
                Ask { id: Some(1), ..X },
                Ask { id: Some(1), how: block, ..S },
                Ask { claim: true, ..X },
                Ask { claim: true, how: queue, ..X },
                Ask { claim: true, how: block, ..S },
                Ask { session: true, ..X },
                Ask { session: true, how: queue, ..S },
                Ask { session: true, claim: true, how: block, ..X },
                Ask { floor: true, ..X },
            ]
            .map(|ask| Op::Acquire(owner, ask)),
        );
        ops.extend([
            Op::Release(owner, Give::Id(0)),
            Op::Release(owner, Give::Id(1)),
            Op::Release(owner, Give::All),
            Op::Release(owner, Give::Token(Which::Current)),
            Op::Release(owner, Give::Token(Which::Stale)),
            Op::Renew(owner, Some(Which::Current)),
            Op::Renew(owner, Some(Which::Stale)),
            Op::Revoke(Some(owner)),
            Op::Close(owner),
            Op::Unblock(owner),
            Op::Undelivered(owner),
            Op::Listen(owner),
        ]);
    }
    ops.extend([
        Op::Revoke(None),
        Op::Evict,
        Op::Overwrite,
        Op::RenameAway,
        Op::RenameBack,
        Op::Swap,
        Op::Flush,
        Op::FailOver(0),
        Op::FailOver(1),
    ]);
    ops
}

/// What a holder was promised, as it knows it.
#[derive(Clone, Debug)]
struct Promise {
    owner: usize,
    shared: bool,
    token: Token,
    until: Time,
    claim: Option<Millis>,
    session: Option<Millis>,
    /// The connection of a session hold, while it lives.
    client: Option<ClientId>,
    channel: bool,
    ids: Vec<usize>,
    converted_from: Option<Token>,
}

/// A request that was told to wait.
#[derive(Clone, Debug)]
struct Waiting {
    owner: usize,
    ask: Ask,
    until: Time,
    blocked: Option<u64>,
    client: ClientId,
}

#[derive(Clone, Debug, Default)]
struct View {
    promises: Vec<Promise>,
    queue: Vec<Waiting>,
    /// The server has taken the key away; the next verb there, or the server when it wakes, puts it back.
    away: bool,
}

/// Why the step's effects may be what they are.
#[derive(Clone, Copy, Debug)]
enum Cause<'a> {
    Acquire(usize, &'a Ask),
    Release(usize, Give),
    Renew(usize, bool),
    Revoke(Option<usize>),
    Wake,
    Flush,
    FailOver,
}

/// The books of somebody who sees only what clients and replicas see.
#[derive(Clone, Debug)]
struct Judge {
    views: [View; 3],
    /// The highest token so far.
    highest: u64,
    grace_until: Option<Time>,
    /// Grants known to have been lost on the way.
    undelivered: Vec<Token>,
    /// Holders that must yet be told that they lost their hold.
    owed: Vec<(usize, Token, LossReason)>,
    /// What was noted since the server last woke, by kind: part of the state.
    noted: Vec<u32>,
}

#[derive(Clone, Debug)]
struct State {
    world: World,
    judge: Judge,
    /// How many connections each owner has had.
    connections: [u64; 3],
    /// The last token that an owner no longer holds.
    stale: [Option<Token>; 3],
    /// The grant answered to the owner's blocked connection since the server last woke, if the owner has not been heard of since.
    fresh: [Option<Token>; 3],
}

fn client_of(owner: usize, connection: u64) -> ClientId {
    NonZeroU64::new(connection * 3 + owner as u64 + 1).expect("one added")
}

fn owner_index(name: &[u8]) -> usize {
    OWNERS.iter().position(|owner| owner.as_bytes() == name).expect("an owner of this world")
}

impl Promise {
    /// Whether this grant is the very promise again.
    fn is_put_back_by(&self, grant: &Grant) -> bool {
        self.token == grant.token
            && Some(self.until) == grant.deadline
            && self.claim == grant.terms.as_ref().and_then(|terms| terms.claim)
            && self.session == grant.terms.as_ref().and_then(|terms| terms.session)
            && self.channel == grant.terms.as_ref().is_some_and(|terms| !terms.channel.is_empty())
            && self.shared == (grant.mode == Mode::Shared)
            && OWNERS[self.owner].as_bytes() == grant.owner.as_slice()
    }

    fn is_live(&self, now: Time) -> bool {
        self.until > now
    }
}

impl View {
    fn of_token(&mut self, token: Token) -> &mut Promise {
        let found = self.promises.iter_mut().find(|promise| promise.token == token);
        found.expect("a change is about a hold that exists")
    }

    fn of_owner(&self, owner: usize) -> Option<&Promise> {
        self.promises.iter().find(|promise| promise.owner == owner)
    }

    fn take_waiting(&mut self, owner: usize) -> Waiting {
        let index = self.queue.iter().position(|waiting| waiting.owner == owner).expect("who hears of its wait waits");
        self.queue.remove(index)
    }

    /// Whether the promises alone keep a request out. Nobody may be counted who is over.
    fn keeps_out(&self, now: Time, ask: &Ask) -> bool {
        let live = self.promises.iter().filter(|promise| promise.is_live(now));
        let (mut count, mut exclusive) = (0, false);
        for promise in live {
            count += 1;
            exclusive |= !promise.shared;
        }
        exclusive || (count > 0 && !ask.shared) || ask.limit.is_some_and(|limit| count >= limit.get())
    }
}

impl State {
    fn new() -> Self {
        let mut world = World::new(Limits::DEFAULT, &KEYS, &NAMES);
        for channel in CHANNELS {
            world.listeners.come(channel);
        }
        let highest = world.primary.table.counter().value();
        let judge = Judge {
            views: Default::default(),
            highest,
            grace_until: None,
            undelivered: Vec::new(),
            owed: Vec::new(),
            noted: Vec::new(),
        };
        Self { world, judge, connections: [0; 3], stale: [None; 3], fresh: [None; 3] }
    }

    fn client(&self, owner: usize) -> ClientId {
        client_of(owner, self.connections[owner])
    }

    fn token(&self, owner: usize, which: Which) -> Option<Token> {
        match which {
            Which::Current => self.judge.views[KEY].of_owner(owner).map(|promise| promise.token),
            Which::Stale => self.stale[owner],
        }
    }

    /// Operations that cannot differ from nothing are left out.
    fn is_enabled(&self, op: Op) -> bool {
        let waits = |owner: usize| self.judge.views[KEY].queue.iter().find(|waiting| waiting.owner == owner);
        match op {
            Op::Acquire(owner, Ask { convert: Some(which), .. })
            | Op::Release(owner, Give::Token(which))
            | Op::Renew(owner, Some(which)) => self.token(owner, which).is_some(),
            Op::Release(owner, Give::Id(_) | Give::All) | Op::Revoke(Some(owner)) => {
                self.judge.views[KEY].of_owner(owner).is_some() || waits(owner).is_some()
            }
            Op::Close(owner) => {
                let client = self.client(owner);
                self.judge.views.iter().any(|view| {
                    view.promises.iter().any(|promise| promise.client == Some(client))
                        || view.queue.iter().any(|waiting| waiting.client == client)
                })
            }
            Op::Unblock(owner) => self
                .judge
                .views
                .iter()
                .flat_map(|view| &view.queue)
                .any(|waiting| waiting.owner == owner && waiting.blocked.is_some()),
            Op::Undelivered(owner) => self.fresh[owner].is_some(),
            Op::Delete | Op::Evict | Op::Overwrite | Op::RenameAway => self.world.primary.exists(KEY),
            Op::RenameBack => self.world.primary.exists(2),
            // The random comparison covers the databases that change places while a lock is away.
            Op::Swap => !self.judge.views[KEY].away,
            Op::Acquire(..)
            | Op::Release(_, Give::Plain)
            | Op::Renew(_, None)
            | Op::Revoke(None)
            | Op::Pass(_)
            | Op::Wake
            | Op::Flush
            | Op::Listen(_)
            | Op::FailOver(_) => true,
        }
    }

    /// Performs one operation and judges it.
    fn step(&mut self, op: Op) {
        self.world.forget();
        match op {
            Op::Acquire(owner, ask) => self.acquire(owner, &ask),
            Op::Release(owner, give) => self.release(owner, give),
            Op::Renew(owner, which) => self.renew(owner, which),
            Op::Revoke(owner) => {
                let request =
                    Revoke { key: KEYS[KEY].1.as_bytes(), owner: owner.map(|owner| OWNERS[owner].as_bytes()) };
                self.world.revoke(KEY, &request);
                self.judge_effects(Cause::Revoke(owner));
                let left = self.judge.views[KEY]
                    .promises
                    .iter()
                    .any(|promise| owner.is_none_or(|owner| promise.owner == owner));
                // Whoever was granted in this very step came after.
                let granted_now = self
                    .world
                    .happened
                    .iter()
                    .any(|happened| matches!(happened, Happened::Changed(_, Change::Grant(_))));
                assert!(!left || granted_now, "REVOKE leaves nothing behind");
                self.check_served(KEY);
            }
            Op::Pass(units) => (0..units).for_each(|_| self.world.pass(UNIT)),
            Op::Wake => self.wake(),
            Op::Delete => {
                self.lose(KEY, LossReason::Removed);
                self.world.delete(KEY);
                self.judge.noted.push(1);
            }
            Op::Evict => {
                self.world.evict(KEY);
                let view = &mut self.judge.views[KEY];
                // What was not delivered does not come back.
                view.promises.retain(|promise| !self.judge.undelivered.contains(&promise.token));
                view.away = !view.promises.is_empty();
                self.judge.noted.push(9);
            }
            Op::Overwrite => {
                self.lose(KEY, LossReason::Removed);
                self.world.overwrite(KEY);
                self.judge.noted.push(1);
                self.wake_foreign();
            }
            Op::RenameAway => self.rename(KEY, 2),
            Op::RenameBack => self.rename(2, KEY),
            Op::Swap => {
                self.world.swap(0, 1);
                let (near, far) = self.judge.views.split_at_mut(1);
                core::mem::swap(&mut near[0].promises, &mut far[0].promises);
                // `r` has no twin in the other database; it is moved by nobody.
                self.judge.noted.push(2);
            }
            Op::Flush => {
                self.world.flush(None);
                for spot in 0..KEYS.len() {
                    self.lose(spot, LossReason::Flushed);
                }
                self.judge_effects(Cause::Flush);
                self.judge.noted.push(3);
            }
            Op::Close(owner) => self.close(owner),
            Op::Unblock(owner) => {
                assert!(self.world.unblock(OWNERS[owner]));
                for view in &mut self.judge.views {
                    view.queue.retain(|waiting| waiting.owner != owner || waiting.blocked.is_none());
                }
                self.judge.noted.push(4);
            }
            Op::Undelivered(owner) => {
                if let Some(token) = self.fresh[owner].take() {
                    let view = self
                        .judge
                        .views
                        .iter_mut()
                        .find(|view| view.promises.iter().any(|promise| promise.token == token));
                    match view {
                        Some(view) if view.away => {
                            view.promises.retain(|promise| promise.token != token);
                            view.away = !view.promises.is_empty();
                        }
                        Some(_) => self.judge.undelivered.push(token),
                        None => {}
                    }
                    self.world.undelivered(token);
                    self.judge.noted.push(5);
                }
            }
            Op::Listen(owner) => {
                if self.world.listeners.are_on(CHANNELS[owner]) {
                    self.world.listeners.leave(CHANNELS[owner]);
                } else {
                    self.world.listeners.come(CHANNELS[owner]);
                }
            }
            Op::FailOver(units) => self.fail_over(units),
        }
        if matches!(op, Op::Acquire(..) | Op::Release(..) | Op::Renew(..) | Op::Revoke(_) | Op::Wake) {
            self.judge.views[KEY].away = false;
        }
        self.world.check_always();
        self.check_books();
    }

    fn request<'a>(&self, owner: usize, ask: &Ask) -> Acquire<'a> {
        let mut request = Acquire::new(KEYS[KEY].1.as_bytes(), OWNERS[owner].as_bytes(), LEASE);
        request.mode = if ask.shared { Mode::Shared } else { Mode::Exclusive };
        request.limit = ask.limit;
        request.wait = match ask.how {
            How::Try => Wait::No,
            How::Block => Wait::Block(Some(WAIT)),
            How::Queue => Wait::Queue(WAIT),
        };
        request.channel = (ask.how == How::Queue).then(|| CHANNELS[owner].as_bytes());
        request.new = ask.new;
        request.id = ask.id.map(|id| IDS[id]);
        request.convert = ask.convert.and_then(|which| self.token(owner, which));
        request.floor = ask.floor.then_some(self.judge.highest + 7);
        request.claim = ask.claim.then_some(CLAIM);
        request.session = ask.session.then_some(SESSION);
        request
    }

    fn acquire(&mut self, owner: usize, ask: &Ask) {
        let before = self.world.clone();
        let request = self.request(owner, ask);
        let client = self.client(owner);
        self.fresh[owner] = None;
        let answer = self.world.acquire(KEY, &request, Some(client));
        if let Some(floor) = request.floor {
            self.judge.highest = self.judge.highest.max(floor);
        }
        self.give_up_turn(owner, ask);
        self.judge_effects(Cause::Acquire(owner, ask));
        let now = self.world.now;
        let in_grace = self.judge.in_grace(now);
        let view = &mut self.judge.views[KEY];
        match answer {
            Ok(Acquired::Granted(token)) => {
                let promise = view.of_token(token);
                assert_eq!(promise.owner, owner, "S4: a token is answered to its owner");
                assert!(promise.is_live(now), "an answered grant lasts");
                assert!(ask.shared || !promise.shared, "S8: a reader's hold is not answered to a writer");
                assert!(ask.convert.is_none() || promise.shared == ask.shared, "S8: converted as asked");
                assert!(
                    promise.claim.is_some() || promise.until >= now.after(LEASE),
                    "the lease lasts at least what was asked"
                );
                assert!(ask.id.is_none_or(|id| promise.ids.contains(&id)), "S7: the id has joined");
                if promise.session.is_some() {
                    promise.client = Some(client);
                }
                assert!(view.queue.iter().all(|waiting| waiting.owner != owner), "who holds does not wait");
            }
            Ok(Acquired::Busy) => {
                assert!(ask.how == How::Try || ask.convert.is_some(), "who asked to wait is not sent away");
                let converts_up = ask.convert.is_some() && view.promises.len() > 1;
                let queued = view.queue.iter().any(|waiting| waiting.until > now);
                assert!(
                    converts_up || in_grace || (ask.convert.is_none() && (queued || view.keeps_out(now, ask))),
                    "L1: nil although nobody is in the way"
                );
            }
            Ok(Acquired::Queued { position, .. }) => {
                assert!(ask.how != How::Try && ask.convert.is_none());
                let place = view.queue.iter().position(|waiting| waiting.owner == owner).expect("the books have it");
                assert!(place < position && position <= view.queue.len(), "a position is an upper bound");
                assert!(place + 1 < view.queue.len() || position == place + 1, "a position at the end is exact");
            }
            Err(refusal) => {
                let promise = view.of_owner(owner);
                let justified = match refusal {
                    Refusal::AlreadyHeld => ask.new && promise.is_some(),
                    Refusal::HeldWithoutIds => {
                        ask.id.is_some() && promise.is_some_and(|promise| promise.ids.is_empty())
                    }
                    Refusal::HeldShared => {
                        !ask.shared && ask.convert.is_none() && promise.is_some_and(|promise| promise.shared)
                    }
                    Refusal::NotHeld => {
                        ask.convert.is_some() && promise.is_none_or(|promise| Some(promise.token) != request.convert)
                    }
                    Refusal::NeedsIdOrAll
                    | Refusal::TooManyIds { .. }
                    | Refusal::QueueFull { .. }
                    | Refusal::FloorTooHigh { .. }
                    | Refusal::TokensExhausted
                    | Refusal::NotReady => false,
                };
                assert!(justified, "refused without a reason: {refusal:?}");
            }
        }
        match answer {
            Ok(Acquired::Granted(_) | Acquired::Queued { .. }) if !ask.new => {
                self.check_repeat(
                    |world| world.acquire(KEY, &request, Some(client)).map(without_number),
                    answer.map(without_number),
                );
            }
            Ok(Acquired::Granted(_) | Acquired::Queued { .. }) => {}
            Ok(Acquired::Busy) | Err(_) => self.check_unchanged(before, request.floor),
        }
        self.check_served(KEY);
    }

    /// Who waits on its channel and asks there in another mode loses its turn, before others are served, and is not told.
    fn give_up_turn(&mut self, owner: usize, ask: &Ask) {
        let queue = &mut self.judge.views[KEY].queue;
        let turn = queue.iter().position(|waiting| {
            waiting.owner == owner && waiting.blocked.is_none() && waiting.ask.shared != ask.shared
        });
        // Unless it was granted or told that its time is up, before.
        let ended_before = self.world.happened.iter().any(|happened| match happened {
            Happened::Changed(_, Change::Grant(grant)) => {
                grant.owner.as_slice() == OWNERS[owner].as_bytes() && (grant.mode == Mode::Shared) != ask.shared
            }
            Happened::Told { owner: to, notice: Notice::TimedOut, .. } => *to == OWNERS[owner],
            _ => false,
        });
        if let Some(turn) = turn.filter(|_| ask.how == How::Queue && !ended_before) {
            queue.remove(turn);
        }
    }

    fn release(&mut self, owner: usize, give: Give) {
        let before = self.world.clone();
        let token = match give {
            Give::Token(which) => self.token(owner, which),
            Give::Plain | Give::Id(_) | Give::All => None,
        };
        let scope = match give {
            Give::Plain | Give::Token(_) => ReleaseScope::Plain,
            Give::Id(id) => ReleaseScope::Id(IDS[id]),
            Give::All => ReleaseScope::All,
        };
        self.fresh[owner] = None;
        let request = Release { key: KEYS[KEY].1.as_bytes(), owner: OWNERS[owner].as_bytes(), token, scope };
        let answer = self.world.release(KEY, &request);
        let granted_first = self.world.happened.iter().any(|happened| {
            matches!(happened, Happened::Changed(_, Change::Grant(grant)) if grant.owner.as_slice() == request.owner)
        });
        // A waiter on a channel that gives up is not told; it leaves before others are served.
        let queue = &mut self.judge.views[KEY].queue;
        let waits = queue.iter().position(|waiting| waiting.owner == owner && waiting.blocked.is_none());
        let cancelled = waits.filter(|_| answer == Ok(true) && !granted_first).map(|place| queue.remove(place));
        let waited = cancelled.is_some() || queue.iter().any(|waiting| waiting.owner == owner);
        self.judge_effects(Cause::Release(owner, give));
        let gave = self.world.happened.iter().any(|happened| {
            matches!(
                happened,
                Happened::Announced { ended: Ended::Released, .. }
                    | Happened::Changed(_, Change::Ids { joined: false, .. })
            )
        });
        let view = &mut self.judge.views[KEY];
        match answer {
            Ok(true) if !gave => {
                assert!(waited, "RELEASE says it ended something and did not");
                assert!(view.queue.iter().all(|waiting| waiting.owner != owner), "RELEASE leaves a waiter behind");
            }
            Ok(true) => {}
            Ok(false) => {
                assert!(!gave);
                let holds = view.of_owner(owner).is_some();
                let waits = view.queue.iter().any(|waiting| waiting.owner == owner);
                assert!(
                    matches!(give, Give::Id(_) | Give::Token(_)) || !(holds || waits),
                    "RELEASE denies what there is"
                );
            }
            Err(refusal) => {
                assert_eq!(refusal, Refusal::NeedsIdOrAll);
                assert!(view.of_owner(owner).is_some_and(|promise| !promise.ids.is_empty()));
            }
        }
        if answer != Ok(true) {
            self.check_unchanged(before, None);
        }
        self.check_served(KEY);
    }

    fn renew(&mut self, owner: usize, which: Option<Which>) {
        let before = self.world.clone();
        let token = which.and_then(|which| self.token(owner, which));
        let request = Renew { key: KEYS[KEY].1.as_bytes(), owner: OWNERS[owner].as_bytes(), lease: LEASE, token };
        let client = self.client(owner);
        self.fresh[owner] = None;
        let answer = self.world.renew(KEY, &request, Some(client));
        self.judge_effects(Cause::Renew(owner, token.is_some()));
        let now = self.world.now;
        let promise = self.judge.views[KEY].promises.iter_mut().find(|promise| promise.owner == owner);
        if answer {
            let promise = promise.expect("S4: who renews holds");
            assert!(token.is_none_or(|token| token == promise.token), "S4: renewed under another token");
            let lasts = promise.claim.map_or(LEASE, |claim| claim.min(LEASE));
            assert_eq!(promise.until, now.after(lasts), "RENEW replaces what was left");
            if promise.session.is_some() {
                promise.client = Some(client);
            }
            self.check_repeat(|world| world.renew(KEY, &request, Some(client)), answer);
        } else {
            let current = promise.map(|promise| promise.token);
            assert!(
                current.is_none() || token.is_some_and(|token| Some(token) != current),
                "RENEW denies a hold that is there"
            );
            self.check_unchanged(before, None);
        }
        self.check_served(KEY);
    }

    fn wake(&mut self) {
        self.world.wake();
        let now = self.world.now;
        if self.judge.grace_until.is_some_and(|until| until <= now) {
            self.judge.grace_until = None;
        }
        self.judge_effects(Cause::Wake);
        self.judge.noted.clear();
        self.fresh = [None; 3];
        // Not granted at all any more, so that it could not end either.
        self.judge.undelivered.clear();
        assert!(self.judge.owed.is_empty(), "a holder was not told of its loss: {:?}", self.judge.owed);
        for (spot, view) in self.judge.views.iter().enumerate() {
            assert!(view.promises.iter().all(|promise| promise.is_live(now)), "L4: a lease that is over remains");
            assert!(view.queue.iter().all(|waiting| waiting.until > now), "L3: a wait that is over remains");
            let silent = |promise: &Promise| promise.session.is_some() && promise.client.is_none();
            for promise in view.promises.iter().filter(|promise| silent(promise)) {
                let grace = promise.claim.map_or(SESSION, |claim| claim.min(SESSION));
                assert!(promise.until <= now.after(grace), "a session hold outlives its connection");
            }
            if !self.judge.in_grace(now) && view.promises.is_empty() {
                assert!(view.queue.is_empty(), "L1: a free lock and a waiter at {spot}");
            }
        }
    }

    /// A key of another type is no lock: the shell ends its waiters when it is told to look there.
    fn wake_foreign(&mut self) {
        self.world.wake();
        self.judge_effects(Cause::Wake);
        self.judge.noted.clear();
        self.fresh = [None; 3];
        assert!(self.judge.views[KEY].queue.is_empty(), "nobody waits for a key of another type");
        // The key goes on as an empty one.
        self.world.delete(KEY);
    }

    /// The holds at a key are gone, by somebody else's doing.
    fn lose(&mut self, spot: Spot, reason: LossReason) {
        let view = &mut self.judge.views[spot];
        // Of what the server took away first, the holders hear as of a deletion.
        let reason = if core::mem::take(&mut view.away) { LossReason::Removed } else { reason };
        for promise in view.promises.drain(..) {
            self.stale[promise.owner] = Some(promise.token);
            if promise.channel && !self.judge.undelivered.contains(&promise.token) {
                self.judge.owed.push((promise.owner, promise.token, reason));
            }
            self.judge.undelivered.retain(|token| *token != promise.token);
        }
    }

    fn rename(&mut self, from: Spot, to: Spot) {
        if self.world.primary.exists(from) {
            // What is away does not lie at the key: it will be put back there, in place of the ended value.
            if !self.judge.views[to].away {
                self.lose(to, LossReason::Removed);
            }
            self.lose(from, LossReason::Removed);
        }
        self.world.rename(from, to);
        self.judge.noted.push(6);
    }

    fn close(&mut self, owner: usize) {
        let client = self.client(owner);
        self.world.close(client);
        self.connections[owner] += 1;
        for view in &mut self.judge.views {
            for promise in view.promises.iter_mut().filter(|promise| promise.client == Some(client)) {
                promise.client = None;
            }
            view.queue
                .retain(|waiting| waiting.client != client || (waiting.blocked.is_none() && !waiting.ask.session));
        }
        self.judge.noted.push(7);
    }

    fn fail_over(&mut self, units: u32) {
        let grace = Millis(units * PROMOTION.as_ms());
        self.world.fail_over(grace);
        let now = self.world.now;
        self.judge.grace_until = (units > 0).then(|| now.after(grace));
        self.judge.owed.clear();
        self.judge.undelivered.clear();
        self.judge.noted.clear();
        self.fresh = [None; 3];
        self.judge_effects(Cause::FailOver);
        for (spot, view) in self.judge.views.iter_mut().enumerate() {
            assert!(view.queue.is_empty(), "every wait ends at a demotion");
            if core::mem::take(&mut view.away) {
                // The replica saw its key go, and nothing come back.
                view.promises.drain(..).for_each(|promise| self.stale[promise.owner] = Some(promise.token));
            }
            for (promise, hold) in view.promises.iter_mut().zip(self.world.primary.holds(spot)) {
                assert!(hold.deadline() >= promise.until, "a lease ends earlier after a failover");
                promise.until = hold.deadline();
                promise.client = None;
            }
        }
        self.judge.highest = self.judge.highest.max(self.world.primary.table.counter().value());
        self.judge.noted.push(8);
    }

    fn judge_effects(&mut self, cause: Cause<'_>) {
        let happened = core::mem::take(&mut self.world.happened);
        let verdict = self.judge.read(&self.world, cause, &happened, self.connections);
        for (owner, token) in verdict.ended {
            self.stale[owner] = Some(token);
        }
        for (owner, token) in verdict.answered_blocked {
            self.fresh[owner] = Some(token);
        }
        self.world.happened = happened;
    }

    /// S6: the same request again, at once, is answered alike and changes nothing.
    fn check_repeat<T: PartialEq + core::fmt::Debug>(&self, again: impl FnOnce(&mut World) -> T, answer: T) {
        let mut world = self.world.clone();
        world.forget();
        assert_eq!(again(&mut world), answer, "S6: a repeated request is answered otherwise");
        // A repeated RENEW is replicated again (under a claim: as the grant that it is); it says the same.
        let changes = world.happened.iter().any(|happened| match happened {
            Happened::Changed(spot, Change::Grant(grant)) => {
                self.world.primary.lock(*spot).is_none_or(|lock| lock.get(grant.token).is_none())
            }
            Happened::Changed(_, change) => !matches!(change, Change::Renew { .. }),
            _ => false,
        });
        assert!(!changes, "S6: a repeated request changes something: {:?}", world.happened);
        assert!(look_alike(&self.world.primary, &world.primary), "S6: a repeated request leaves another state");
    }

    /// S4, A5: a request that is answered "no" has changed nothing, except what was due at its key.
    fn check_unchanged(&self, mut before: World, floor: Option<u64>) {
        if let Some(floor) = floor {
            before.floor(floor).expect("it was accepted once");
        }
        before.look(KEY);
        assert!(look_alike(&before, &self.world), "S4: a request that is answered no changes something");

        fn look_alike(a: &World, b: &World) -> bool {
            self::look_alike(&a.primary, &b.primary)
        }
    }

    /// L1: after a verb, nobody at its key waits for a grant that could be made.
    fn check_served(&self, spot: Spot) {
        let now = self.world.now;
        if self.judge.in_grace(now) {
            return;
        }
        let view = &self.judge.views[spot];
        let live = || view.queue.iter().filter(|waiting| waiting.until > now);
        let next = live().find(|waiting| self.judge.hears(&self.world, waiting)).or_else(|| live().next());
        if let Some(next) = next {
            assert!(view.keeps_out(now, &next.ask), "L1: {} waits for a lock that admits it", OWNERS[next.owner]);
        }
    }

    /// The table agrees with the books.
    fn check_books(&self) {
        for (spot, view) in self.judge.views.iter().enumerate() {
            let mut holds = self.world.primary.holds(spot);
            let mut promises: Vec<&Promise> = view.promises.iter().filter(|_| !view.away).collect();
            promises.sort_by_key(|promise| promise.token);
            for promise in promises {
                let hold = holds.next().expect("a promised hold is there");
                assert_eq!(hold.owner.as_slice(), OWNERS[promise.owner].as_bytes());
                assert_eq!(hold.token, promise.token);
                assert_eq!(hold.mode() == Mode::Shared, promise.shared);
                assert_eq!(hold.deadline(), promise.until, "S1: a lease ends when it was promised to end");
                assert_eq!(hold.claim(), promise.claim);
                assert_eq!(hold.session(), promise.session);
                assert!(hold.ids().map(|id| id.as_slice()).eq(promise.ids.iter().map(|id| IDS[*id])), "S7: other ids");
            }
            assert!(holds.next().is_none(), "a hold that nobody was promised");
            let queue = self.world.primary.waiters(spot).map(|(_, waiter)| owner_index(&waiter.owner));
            assert!(queue.eq(view.queue.iter().map(|waiting| waiting.owner)), "S9: the queue is in another order");
            let carried = self.world.primary.lock(spot).is_some_and(flock_core::Lock::is_free);
            assert_eq!(
                self.world.primary.exists(spot),
                (!view.promises.is_empty() && !view.away) || carried,
                "a key exists iff it is held"
            );
        }
    }

    /// Everything that can make a difference later, in a form that does not depend on who is who, on the age of the world, or on how
    /// high the tokens are.
    fn digest(&self) -> u64 {
        let now = self.world.now;
        let mut tokens: Vec<Token> = Vec::new();
        for view in &self.judge.views {
            tokens.extend(
                view.promises.iter().flat_map(|promise| [Some(promise.token), promise.converted_from]).flatten(),
            );
        }
        tokens.extend(self.stale.into_iter().flatten());
        tokens.sort_unstable();
        tokens.dedup();
        let rank =
            |token: Option<Token>| token.map_or(0, |token| 1 + tokens.partition_point(|other| *other < token) as u64);
        let left = |until: Time| u64::from(until.left_from(now).as_ms() / UNIT.as_ms());
        let millis =
            |duration: Option<Millis>| u64::from(duration.map_or(0, |duration| duration.as_ms() / UNIT.as_ms()));

        let mut owners: [Vec<u64>; 3] = Default::default();
        for (owner, record) in owners.iter_mut().enumerate() {
            record.push(rank(self.stale[owner]));
            record.push(u64::from(self.fresh[owner].is_some()));
            record.push(u64::from(self.world.listeners.are_on(CHANNELS[owner])));
            for (spot, view) in self.judge.views.iter().enumerate() {
                // After SWAPDB an owner can hold and wait at one key.
                for promise in view.promises.iter().filter(|promise| promise.owner == owner) {
                    // The replica's deadline counts after a failover.
                    let replica = self.world.replica.lock(spot).and_then(|lock| lock.get(promise.token));
                    let lease =
                        self.world.primary.lock(spot).and_then(|lock| lock.get(promise.token)).map(|hold| hold.lease());
                    record.extend([
                        1000 + spot as u64,
                        rank(Some(promise.token)),
                        rank(promise.converted_from),
                        left(promise.until) * 100 + replica.map_or(0, |hold| left(hold.deadline())),
                        millis(lease) * 100 + millis(promise.claim) * 10 + millis(promise.session),
                        u64::from(promise.shared) * 16
                            + u64::from(promise.client.is_some()) * 8
                            + u64::from(promise.channel) * 4
                            + u64::from(self.judge.undelivered.contains(&promise.token)),
                    ]);
                    record.extend(promise.ids.iter().map(|id| 20 + *id as u64));
                }
                for (place, waiting) in view.queue.iter().enumerate().filter(|(_, waiting)| waiting.owner == owner) {
                    let ask = &waiting.ask;
                    record.extend([
                        2000 + spot as u64,
                        place as u64,
                        left(waiting.until),
                        ask.limit.map_or(0, |limit| u64::from(limit.get())) * 100
                            + ask.id.map_or(0, |id| id as u64 + 1),
                        u64::from(ask.shared) * 16
                            + u64::from(ask.claim) * 8
                            + u64::from(ask.session) * 4
                            + u64::from(waiting.blocked.is_some()) * 2
                            + u64::from(waiting.client == self.client(owner)),
                    ]);
                }
            }
            for (_, _, reason) in self.judge.owed.iter().filter(|(to, _, _)| *to == owner) {
                record.push(3000 + *reason as u64);
            }
        }
        owners.sort_unstable();

        let mut hash = Hash(0x9e37_79b9_7f4a_7c15);
        for record in &owners {
            hash.add(record.len() as u64);
            record.iter().for_each(|number| hash.add(*number));
        }
        for spot in self.world.spots() {
            let carried = self.world.primary.lock(spot).is_some_and(flock_core::Lock::is_free);
            hash.add(u64::from(carried));
        }
        hash.add(self.judge.grace_until.map_or(9, left) * 2 + u64::from(self.judge.views[KEY].away));
        // When the server will wake: early, if a lease was renewed; never late.
        let table = &self.world.primary.table;
        for wakes in [table.next_deadline(), table.queues().first_deadline().map(|(at, _)| at)] {
            hash.add(wakes.map_or(99, left));
        }
        self.judge.noted.iter().for_each(|note| hash.add(u64::from(*note)));
        hash.0
    }
}

/// A grant that its waiter must hear of: spot, owner, token, connection.
type Untold = (Spot, usize, Token, Option<u64>);

/// What a step's effects said.
#[derive(Default)]
struct Verdict {
    ended: Vec<(usize, Token)>,
    answered_blocked: Vec<(usize, Token)>,
}

impl Judge {
    fn in_grace(&self, now: Time) -> bool {
        self.grace_until.is_some_and(|until| now < until)
    }

    fn hears(&self, world: &World, waiting: &Waiting) -> bool {
        waiting.blocked.is_some() || world.listeners.are_on(CHANNELS[waiting.owner])
    }

    /// Reads the effects of one step in order, and checks that each may be.
    fn read(&mut self, world: &World, cause: Cause<'_>, happened: &[Happened], connections: [u64; 3]) -> Verdict {
        let now = world.now;
        let mut verdict = Verdict::default();
        let mut ending: Vec<(Spot, Promise)> = Vec::new();
        let mut untold: Vec<Untold> = Vec::new();
        for event in happened {
            match event {
                Happened::Marked => {}
                Happened::Changed(spot, Change::Grant(grant)) => {
                    if self.views[*spot].away
                        && self.views[*spot].promises.iter().any(|promise| promise.is_put_back_by(grant))
                    {
                        continue;
                    }
                    if self.views[*spot].promises.iter().any(|promise| promise.token == grant.token) {
                        self.read_amended(now, cause, *spot, grant);
                    } else {
                        untold.extend(self.read_grant(world, cause, *spot, grant));
                    }
                }
                Happened::Changed(spot, Change::Renew { token, lease, deadline }) => {
                    let promise = self.views[*spot].of_token(*token);
                    let until = deadline.expect("the primary knows the deadline");
                    assert_eq!(until, now.after(*lease));
                    match cause {
                        Cause::Acquire(owner, _) => {
                            assert!(owner == promise.owner && until > promise.until && promise.claim.is_none());
                        }
                        Cause::Renew(owner, with_token) => {
                            assert!(
                                owner == promise.owner && (with_token || promise.claim.is_none()),
                                "S4: a claim is confirmed"
                            );
                        }
                        Cause::Wake => {
                            assert!(
                                promise.client.is_none() && promise.session == Some(*lease) && until < promise.until
                            );
                            assert!(promise.claim.is_none());
                        }
                        Cause::Release(..) | Cause::Revoke(_) | Cause::Flush | Cause::FailOver => {
                            panic!("{cause:?} renews")
                        }
                    }
                    promise.until = until;
                    promise.claim = None;
                }
                Happened::Changed(spot, Change::Mode { old, new, mode }) => {
                    let in_grace = self.in_grace(now);
                    let alone = self.views[*spot].promises.len() == 1;
                    let highest = self.highest;
                    let promise = self.views[*spot].of_token(*old);
                    let converts = matches!(cause, Cause::Acquire(owner, ask)
                        if owner == promise.owner && ask.convert == Some(Which::Current));
                    assert!(converts, "S4: a conversion needs the owner and the current token");
                    match mode {
                        Mode::Shared => assert!(!promise.shared && old == new, "S8: a conversion down keeps its token"),
                        Mode::Exclusive => {
                            assert!(promise.shared && alone, "S8: only the sole reader becomes the writer");
                            assert!(new.get() > highest, "S8: a writer's token exceeds all earlier readers'");
                            assert!(!in_grace, "no new grant while a promotion's grace lasts");
                            promise.converted_from = Some(*old);
                            verdict.ended.push((promise.owner, *old));
                        }
                    }
                    promise.shared = *mode == Mode::Shared;
                    promise.token = *new;
                    self.highest = self.highest.max(new.get());
                }
                Happened::Changed(spot, Change::End { token }) => {
                    let token = token.expect("the primary ends holds one by one");
                    let view = &mut self.views[*spot];
                    let index =
                        view.promises.iter().position(|promise| promise.token == token).expect("what ends was held");
                    ending.push((*spot, view.promises.remove(index)));
                }
                Happened::Changed(spot, Change::Ids { token, id, joined }) => {
                    let promise = self.views[*spot].of_token(*token);
                    let id = IDS.iter().position(|known| *known == id.as_slice()).expect("a known id");
                    if *joined {
                        assert!(
                            matches!(cause, Cause::Acquire(owner, ask) if owner == promise.owner && ask.id == Some(id))
                        );
                        assert!(!promise.ids.contains(&id) && !promise.ids.is_empty());
                        promise.ids.push(id);
                        promise.ids.sort_unstable();
                    } else {
                        assert!(
                            matches!(cause, Cause::Release(owner, Give::Id(gone)) if owner == promise.owner && gone == id)
                        );
                        promise.ids.retain(|known| *known != id);
                        assert!(!promise.ids.is_empty(), "S7: a hold outlives its last id");
                    }
                }
                Happened::Changed(_, Change::Mark(_)) => unreachable!("reported as Marked"),
                Happened::Announced { spot, ended, token, handed_to } => {
                    let index =
                        ending.iter().position(|(_, promise)| promise.token == *token).expect("announced and ended");
                    let (at, promise) = ending.remove(index);
                    assert_eq!(at, *spot);
                    self.read_end(now, cause, &promise, *ended);
                    verdict.ended.push((promise.owner, *token));
                    assert!(handed_to.is_none_or(|to| to > *token), "S2: handed to an older token");
                }
                Happened::Told { owner, channel, spot, notice } => {
                    let owner = owner_index(owner.as_bytes());
                    assert_eq!(*channel, CHANNELS[owner]);
                    match notice {
                        Notice::Granted { token, lasts, claim } => {
                            self.read_granted(&mut untold, (*spot, owner, *token, None));
                            let promise = self.views[*spot].of_token(*token);
                            assert_eq!((promise.until, promise.claim.is_some()), (now.after(*lasts), *claim));
                        }
                        Notice::TimedOut => self.read_wait_end(now, cause, *spot, owner, None, None),
                        Notice::Ended(reason) => self.read_wait_end(now, cause, *spot, owner, None, Some(*reason)),
                        Notice::Lost { token, reason } => {
                            let dying = ending.iter().find(|(_, promise)| promise.token == *token);
                            if let Some((_, promise)) = dying {
                                let expected =
                                    if promise.until <= now { LossReason::Expired } else { LossReason::Revoked };
                                assert_eq!((promise.owner, expected), (owner, *reason));
                            } else {
                                let index = self.owed.iter().position(|owed| *owed == (owner, *token, *reason));
                                self.owed.remove(index.expect("who hears of a loss has lost"));
                            }
                        }
                    }
                }
                Happened::Answered { owner, blocked, outcome } => {
                    let owner = owner_index(owner.as_bytes());
                    match outcome {
                        WaitOutcome::Granted(token) => {
                            let granted = untold.iter().find(|(_, _, granted, _)| granted == token);
                            let spot = granted.map_or_else(|| self.spot_waiting(*blocked), |(spot, ..)| *spot);
                            self.read_granted(&mut untold, (spot, owner, *token, Some(*blocked)));
                            verdict.answered_blocked.push((owner, *token));
                        }
                        WaitOutcome::TimedOut => {
                            let spot = self.spot_waiting(*blocked);
                            self.read_wait_end(now, cause, spot, owner, Some(*blocked), None);
                        }
                        WaitOutcome::Ended(reason) => {
                            let spot = self.spot_waiting(*blocked);
                            self.read_wait_end(now, cause, spot, owner, Some(*blocked), Some(*reason));
                        }
                    }
                }
            }
        }
        assert!(ending.is_empty(), "a hold ended and nobody was told");
        if let Cause::Acquire(owner, ask) = cause {
            // The answer itself tells the requester.
            untold.retain(|(_, to, _, _)| *to != owner);
            self.note_waiting(world, owner, ask, connections[owner]);
        }
        assert!(untold.is_empty(), "a waiter was granted and not told: {untold:?}");
        verdict
    }

    /// A waiter hears of its grant: just made, or of a hold that SWAPDB brought while it waited.
    fn read_granted(&mut self, untold: &mut Vec<Untold>, heard: Untold) {
        if let Some(index) = untold.iter().position(|grant| *grant == heard) {
            untold.remove(index);
            return;
        }
        let (spot, owner, token, blocked) = heard;
        assert_eq!(self.views[spot].of_token(token).owner, owner, "a waiter hears of another's grant");
        assert_eq!(self.views[spot].take_waiting(owner).blocked, blocked, "a waiter hears where it waits");
    }

    fn spot_waiting(&self, blocked: u64) -> Spot {
        let waits = |view: &View| view.queue.iter().any(|waiting| waiting.blocked == Some(blocked));
        self.views.iter().position(waits).expect("who is answered waits")
    }

    /// A new grant. Returns it if it went to a waiter, who must hear of it.
    fn read_grant(&mut self, world: &World, cause: Cause<'_>, spot: Spot, grant: &Grant) -> Option<Untold> {
        let now = world.now;
        assert!(grant.token.get() > self.highest, "S2: token {} after {}", grant.token, self.highest);
        self.highest = grant.token.get();
        assert!(!self.in_grace(now), "no new grant while a promotion's grace lasts");
        let owner = owner_index(&grant.owner);
        let shared = grant.mode == Mode::Shared;
        let view = &self.views[spot];
        for promise in &view.promises {
            assert!(promise.is_live(now), "S1: a grant before an overdue hold has ended");
            assert!(promise.shared && shared, "S1: exclusive beside another hold");
            assert_ne!(promise.owner, owner, "an owner has one hold");
        }
        let asks = match cause {
            Cause::Acquire(asking, ask) if asking == owner => Some(ask),
            _ => None,
        };
        let hears = |waiting: &Waiting| self.hears(world, waiting);
        let live = |waiting: &Waiting| waiting.until > now;
        let (asked, client, waiter) = if let Some(index) = view.queue.iter().position(|waiting| waiting.owner == owner)
        {
            let waiting = &view.queue[index];
            // Who asks again in this step, now on a channel where nobody listens, is passed over from then on.
            let goes_deaf = |ahead: &Waiting| {
                matches!(cause, Cause::Acquire(by, ask) if by == ahead.owner && ask.how == How::Queue)
                    && !world.listeners.are_on(CHANNELS[ahead.owner])
            };
            let unfair = view.queue[..index].iter().any(|ahead| live(ahead) && hears(ahead) && !goes_deaf(ahead));
            assert!(!unfair, "S9: a live waiter is overtaken");
            if !hears(waiting) && asks.is_none() {
                assert!(!view.queue[..index].iter().any(live), "S9: a deaf waiter overtakes another");
                assert!(
                    !view.queue[index..].iter().any(|behind| live(behind) && hears(behind)),
                    "a deaf waiter before a hearing one"
                );
            }
            assert!(live(waiting) || asks.is_some(), "a waiter is granted after its time");
            (waiting.ask, waiting.client, Some(waiting.blocked))
        } else {
            let ask = asks.expect("who is granted has asked");
            // A try never overtakes a queue; a request that waits passes those whom no grant could reach.
            let passes = |ahead: &Waiting| live(ahead) && (ask.how == How::Try || hears(ahead));
            assert!(!view.queue.iter().any(passes), "S9: a newcomer overtakes a queue");
            (*ask, NonZeroU64::MIN, None)
        };
        let terms = grant.terms.as_deref();
        let matches = |ask: &Ask| {
            ask.shared == shared
                && ask.limit.is_none_or(|limit| view.promises.len() < limit.get() as usize)
                && terms.and_then(|terms| terms.claim).is_some() == ask.claim
                && terms.and_then(|terms| terms.session).is_some() == ask.session
                && terms.is_some_and(|terms| !terms.channel.is_empty()) == (ask.how == How::Queue)
                && terms.into_iter().flat_map(|terms| &terms.ids).map(|id| id.as_slice()).eq(ask.id.map(|id| IDS[id]))
        };
        let granted_as = if matches(&asked) {
            &asked
        } else {
            asks.filter(|ask| matches(ask)).expect("S8: granted as asked, and no more than LIMIT")
        };
        let until = grant.deadline.expect("the primary knows the deadline");
        assert_eq!(grant.lease, LEASE);
        assert_eq!(until, now.after(if granted_as.claim { CLAIM } else { LEASE }));
        let promise = Promise {
            owner,
            shared,
            token: grant.token,
            until,
            claim: granted_as.claim.then_some(CLAIM),
            session: granted_as.session.then_some(SESSION),
            client: (granted_as.session && waiter.is_some()).then_some(client),
            channel: granted_as.how == How::Queue,
            ids: granted_as.id.into_iter().collect(),
            converted_from: None,
        };
        let view = &mut self.views[spot];
        view.promises.push(promise);
        let blocked = waiter?;
        view.take_waiting(owner);
        Some((spot, owner, grant.token, blocked))
    }

    /// A hold is stated anew: under new conditions, or with a claim that goes on.
    fn read_amended(&mut self, now: Time, cause: Cause<'_>, spot: Spot, grant: &Grant) {
        let promise = self.views[spot].of_token(grant.token);
        assert_eq!(owner_index(&grant.owner), promise.owner);
        assert_eq!(grant.mode == Mode::Shared, promise.shared);
        let until = grant.deadline.expect("the primary knows the deadline");
        let terms = grant.terms.as_deref();
        let claim = terms.and_then(|terms| terms.claim);
        match cause {
            Cause::Acquire(owner, _) => {
                assert_eq!(owner, promise.owner);
                assert!(until >= promise.until, "a repeated ACQUIRE shortens a lease");
                assert!(until == promise.until || promise.claim.is_none(), "a repeated ACQUIRE prolongs a claim");
                assert_eq!(claim, promise.claim, "S4: a claim is confirmed by a repeated ACQUIRE");
            }
            Cause::Renew(owner, with_token) => {
                assert!(owner == promise.owner && !with_token && promise.claim.is_some());
                assert_eq!(claim, promise.claim);
            }
            Cause::Wake => {
                assert!(promise.client.is_none() && promise.session.is_some() && promise.claim.is_some());
                assert!(until <= promise.until && until >= promise.until.min(now.after(SESSION)));
                promise.claim = claim;
            }
            Cause::Release(..) | Cause::Revoke(_) | Cause::Flush | Cause::FailOver => panic!("{cause:?} amends a hold"),
        }
        promise.until = until;
        promise.session = terms.and_then(|terms| terms.session);
        promise.channel = terms.is_some_and(|terms| !terms.channel.is_empty());
    }

    fn read_end(&mut self, now: Time, cause: Cause<'_>, promise: &Promise, ended: Ended) {
        match ended {
            Ended::Expired => assert!(promise.until <= now, "S1: a lease ends early"),
            Ended::Released => {
                let Cause::Release(owner, give) = cause else { panic!("{cause:?} releases") };
                assert_eq!(owner, promise.owner, "S4: another owner's hold is released");
                match give {
                    Give::Plain => assert!(promise.ids.is_empty(), "S7: a re-entered hold is released without an id"),
                    Give::Id(id) => assert_eq!(promise.ids, [id], "S7: a hold ends before its last id"),
                    Give::All => {}
                    Give::Token(which) => assert_eq!(which, Which::Current, "S4: released under another token"),
                }
            }
            Ended::Revoked => {
                assert!(matches!(cause, Cause::Revoke(owner) if owner.is_none_or(|owner| owner == promise.owner)));
            }
            Ended::Undelivered => {
                let index = self.undelivered.iter().position(|token| *token == promise.token);
                self.undelivered.swap_remove(index.expect("a delivered grant is taken back"));
            }
        }
    }

    /// A waiter hears that its wait is over. `reason`: `None` for its time.
    fn read_wait_end(
        &mut self,
        now: Time,
        cause: Cause<'_>,
        spot: Spot,
        owner: usize,
        blocked: Option<u64>,
        reason: Option<EndReason>,
    ) {
        let view = &mut self.views[spot];
        let index = view.queue.iter().position(|waiting| waiting.owner == owner).expect("who hears of its wait waits");
        assert_eq!(view.queue[index].blocked, blocked, "a waiter hears where it waits");
        match reason {
            None => assert!(view.queue[index].until <= now, "L3: a wait ends early"),
            Some(EndReason::Superseded) => {
                let Cause::Acquire(by, ask) = cause else { panic!("{cause:?} supersedes") };
                assert!(by == owner && ask.how != How::Try);
                if ask.shared == view.queue[index].ask.shared {
                    // It keeps its place: the new request is noted when all is read.
                    return;
                }
            }
            Some(EndReason::Cancelled) => assert!(matches!(cause, Cause::Release(by, _) if by == owner)),
            Some(EndReason::Flushed) => assert!(matches!(cause, Cause::Flush)),
            Some(EndReason::RoleChanged) => assert!(matches!(cause, Cause::FailOver)),
            Some(EndReason::WrongType) => assert!(matches!(cause, Cause::Wake)),
            Some(EndReason::Moved | EndReason::ClusterDown) => panic!("nothing of the kind was done"),
        }
        view.queue.remove(index);
    }

    /// After an ACQUIRE: its request may wait now.
    fn note_waiting(&mut self, world: &World, owner: usize, ask: &Ask, connection: u64) {
        if ask.how == How::Try {
            return;
        }
        let found = world.primary.waiters(KEY).find(|(_, waiter)| waiter.owner.as_slice() == OWNERS[owner].as_bytes());
        let Some((_, waiter)) = found else { return };
        let blocked = match waiter.ear {
            Ear::Blocked(number) => Some(number),
            Ear::Channel => None,
        };
        assert_eq!(blocked.is_some(), ask.how == How::Block);
        let waiting =
            Waiting { owner, ask: *ask, until: world.now.after(WAIT), blocked, client: client_of(owner, connection) };
        assert_eq!(waiter.deadline, waiting.until);
        let view = &mut self.views[KEY];
        match view.queue.iter_mut().find(|waiting| waiting.owner == owner) {
            Some(place) if place.ask.shared == ask.shared => *place = waiting,
            Some(_) => panic!("S9: a turn is kept in another mode"),
            None => view.queue.push(waiting),
        }
    }
}

fn without_number(acquired: Acquired) -> (Option<Token>, usize) {
    match acquired {
        Acquired::Granted(token) => (Some(token), 0),
        Acquired::Busy => (None, 0),
        Acquired::Queued { position, .. } => (None, position),
    }
}

/// Whether two tables hold the same locks and queues; whose connection is blocked under which number does not count.
fn look_alike(a: &Node, b: &Node) -> bool {
    (0..KEYS.len()).all(|spot| {
        let waiters = |node: &Node| -> Vec<(Vec<u8>, Mode, Time, bool)> {
            node.waiters(spot)
                .map(|(_, waiter)| {
                    (waiter.owner.to_vec(), waiter.mode, waiter.deadline, matches!(waiter.ear, Ear::Blocked(_)))
                })
                .collect()
        };
        a.exists(spot) == b.exists(spot) && a.holds(spot).eq(b.holds(spot)) && waiters(a) == waiters(b)
    })
}

struct Hash(u64);

impl Hash {
    fn add(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(0xff51_afd7_ed55_8ccd);
        self.0 ^= self.0 >> 32;
    }
}

/// Prints the sequence that led to a failed assertion.
struct Trail<'a>(&'a [Op]);

impl Drop for Trail<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the sequence that breaks a rule:");
            for op in self.0 {
                eprintln!("    {op:?}");
            }
        }
    }
}

/// Tries every sequence of up to `depth` operations, and lets the server wake after each.
fn search(alphabet: &[Op], depth: usize) -> (usize, u64) {
    let began = Instant::now();
    let mut seen: HashSet<u64> = HashSet::from([State::new().digest()]);
    let mut level: Vec<Vec<Op>> = vec![Vec::new()];
    let mut transitions: u64 = 0;
    for length in 1..=depth {
        let mut next = Vec::new();
        for path in &level {
            let mut from = State::new();
            path.iter().for_each(|op| from.step(*op));
            for op in alphabet {
                if !from.is_enabled(*op) {
                    continue;
                }
                let mut sequence = path.clone();
                sequence.push(*op);
                let trail = Trail(&sequence);
                let mut to = from.clone();
                to.step(*op);
                transitions += 1;
                if seen.insert(to.digest()) {
                    if length == depth {
                        to.step(Op::Wake);
                    } else {
                        drop(trail);
                        next.push(sequence);
                        continue;
                    }
                }
                drop(trail);
            }
        }
        println!(
            "length {length}: {} states, {transitions} transitions, {:.1} s",
            seen.len(),
            began.elapsed().as_secs_f64()
        );
        level = next;
    }
    (seen.len(), transitions)
}

/// How many operations longer than usual the sequences shall be: `FLOCK_SEARCH_DEEPER=1` takes minutes.
fn deeper() -> usize {
    std::env::var("FLOCK_SEARCH_DEEPER").map_or(0, |depth| depth.parse().expect("FLOCK_SEARCH_DEEPER is a number"))
}

/// The usual verbs, deep.
#[test]
fn every_sequence_of_seven_usual_operations_keeps_the_rules() {
    let (states, _) = search(&base_alphabet(), 7 + deeper());
    assert!(states > 25_000, "the search has explored less than it used to");
}

/// Everything there is, less deep.
#[test]
fn every_sequence_of_four_operations_of_any_kind_keeps_the_rules() {
    let (states, _) = search(&full_alphabet(), 4 + deeper());
    assert!(states > 50_000, "the search has explored less than it used to");
}
