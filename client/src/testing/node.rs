//! What the server knows, and what it does with a request: the shell around flock-core's table, as the module is in a real server.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZeroU64;

use flock_core::effect::KeyAction;
use flock_core::lock::{Change, Start};
use flock_core::table::Caller;
use flock_core::token::WallClock;
use flock_core::wire;
use flock_core::wire::command::{Check, Command, Info, List};
use flock_core::wire::error::{ErrorCode, WireError};
use flock_core::wire::message::OwnerMessage;
use flock_core::wire::report;
use flock_core::{
    Acquire, Acquired, Audience, Decision, Due, Effect, Limits, Lock, LockId, Millis, Place, Release, Renew, Revoke,
    Table, Time, Token, Wait,
};
use tokio::sync::mpsc::UnboundedSender;

use super::replication::Replicated;
use super::resp::{Encoded, Reply, Request};

/// The first moment of the server's tokens, in microseconds since 1970: the same in every test.
const WALL_CLOCK_US: u64 = 1_767_225_600_000_000;

pub(super) struct Node {
    /// Whether connections can be made.
    pub(super) reachable: bool,
    table: Table,
    keys: Keys,
    connections: Connections,
    connections_ever: u64,
    /// Where what is replicated goes, if anybody follows.
    followers: Vec<UnboundedSender<Replicated>>,
}

/// The commands that a replica refuses.
const DECIDING: [&str; 5] = [Acquire::NAME, Release::NAME, Renew::NAME, Check::NAME, Revoke::NAME];

/// The keyspace: a key exists if and only if its lock is held.
type Keys = BTreeMap<(u16, Box<[u8]>), LockId>;
type Connections = BTreeMap<u64, Connection>;

struct Connection {
    /// To its writer. Letting go of it closes the connection.
    out: UnboundedSender<Vec<u8>>,
    from: SocketAddr,
    db: u16,
    channels: BTreeSet<Vec<u8>>,
}

impl Connection {
    fn send(&self, reply: &Reply) {
        // It may be closing at this moment.
        let _ = self.out.send(reply.encoded());
    }
}

/// Who listens on a channel.
struct Listeners<'a>(&'a Connections);

impl Audience for Listeners<'_> {
    fn hears(&mut self, channel: &[u8]) -> bool {
        self.0.values().any(|connection| connection.channels.contains(channel))
    }
}

impl Node {
    /// A primary.
    pub(super) fn new(now: Time) -> Self {
        let mut primary = Self::replica();
        primary.promote(now, wall_clock());
        primary
    }

    /// One that follows.
    pub(super) fn replica() -> Self {
        Self {
            reachable: true,
            table: Table::new(Limits::DEFAULT),
            keys: Keys::new(),
            connections: Connections::new(),
            connections_ever: 0,
            followers: Vec::new(),
        }
    }

    /// All that it knew is forgotten, but which tokens it may have handed out. It can be reached.
    pub(super) fn restart(&mut self, now: Time) {
        self.cut_all();
        let mut next = Self { connections_ever: self.connections_ever, ..Self::replica() };
        if self.is_primary() {
            next.table.saw_mark(self.table.counter().mark());
            next.promote(now, wall_clock());
        }
        *self = next;
    }

    /// Whether it decides; else it follows.
    fn is_primary(&self) -> bool {
        self.table.counter().is_seeded()
    }

    /// Answers the number above which its tokens will be.
    pub(super) fn promote(&mut self, now: Time, wall: WallClock) -> u64 {
        let mark = self.table.promoted(now, wall, Millis(0));
        self.replicate(0, b"", &Change::Mark(mark));
        self.table.counter().value()
    }

    pub(super) fn demote(&mut self) {
        self.followers.clear();
        let decision = self.table.demoted();
        self.perform_effects(None, decision);
    }

    /// A copy of all that is durable, and from then on all that changes.
    pub(super) fn followed_by(&mut self, follower: UnboundedSender<Replicated>) {
        let mark = Replicated::new(0, b"", &Change::Mark(self.table.counter().mark()));
        let held = self.table.places(0, self.table.places_end());
        let grants = held.flat_map(|(_, _, name, lock)| {
            lock.holds().map(|hold| Replicated::new(name.db(), name.key(), &Change::Grant(hold.to_grant())))
        });
        for change in std::iter::once(mark).chain(grants) {
            let _ = follower.send(change); // it may be gone already
        }
        self.followers.push(follower);
    }

    /// Applies what its primary has replicated. Decides nothing.
    pub(super) fn apply(&mut self, now: Time, replicated: &Replicated) -> Result<(), wire::Corrupt> {
        match replicated.change()? {
            Change::Mark(mark) => self.table.saw_mark(mark),
            change => self
                .decide(replicated.db, &replicated.key, |table, place, _| table.apply(place, &change, Start::Now(now))),
        }
        Ok(())
    }

    fn replicate(&mut self, db: u16, key: &[u8], change: &Change) {
        let replicated = Replicated::new(db, key, change);
        self.followers.retain(|follower| follower.send(replicated.clone()).is_ok());
    }

    /// A connection from this address, or from one that no other has.
    pub(super) fn connected(&mut self, out: UnboundedSender<Vec<u8>>, from: Option<SocketAddr>) -> u64 {
        self.connections_ever += 1;
        let from = from.unwrap_or_else(|| address(self.connections_ever));
        let connection = Connection { out, from, db: 0, channels: BTreeSet::new() };
        self.connections.insert(self.connections_ever, connection);
        self.connections_ever
    }

    pub(super) fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Ends a connection; false if it had ended.
    pub(super) fn cut(&mut self, id: u64) -> bool {
        let was_open = self.connections.remove(&id).is_some();
        if let Some(client) = NonZeroU64::new(id).filter(|_| was_open) {
            self.table.client_gone(client);
        }
        was_open
    }

    pub(super) fn cut_all(&mut self) {
        for id in self.connections.keys().copied().collect::<Vec<_>>() {
            self.cut(id);
        }
    }

    pub(super) fn revoke(&mut self, now: Time, key: &[u8]) -> usize {
        self.decide(0, key, |table, place, listeners| table.revoke(now, place, &Revoke { key, owner: None }, listeners))
    }

    pub(super) fn holders(&self, key: &[u8]) -> Vec<Token> {
        let lock = self.lock_at(0, key).and_then(|lock| self.table.lock(lock));
        lock.into_iter().flat_map(Lock::holds).map(|hold| hold.token).collect()
    }

    /// Until when the hold with this token lasts, if there is one.
    pub(super) fn deadline(&self, key: &[u8], token: Token) -> Option<Time> {
        let hold = self.table.lock(self.lock_at(0, key)?)?.get(token)?;
        Some(hold.deadline())
    }

    pub(super) fn waiters(&self, key: &[u8]) -> usize {
        let queues = self.table.queues();
        let of_lock = self.lock_at(0, key).and_then(|lock| queues.of_lock(lock));
        of_lock.or_else(|| queues.of_name(0, key)).map_or(0, |queue| queues.queue_len(queue))
    }

    pub(super) fn next_deadline(&self) -> Option<Time> {
        self.table.next_deadline().filter(|_| self.is_primary())
    }

    /// Performs everything that is due; a replica waits to be told.
    pub(super) fn perform_due(&mut self, now: Time) {
        while self.is_primary() {
            match self.table.advance(now) {
                Due::Nothing => return,
                Due::Done(decision) => self.perform_effects(None, decision),
                Due::Look(name, expected) => self.decide(name.db(), name.key(), |table, place, listeners| {
                    table.look(now, place, expected, listeners)
                }),
            }
        }
    }

    /// Answers a request.
    pub(super) fn execute(&mut self, now: Time, id: u64, request: &Request) {
        let words: Vec<&[u8]> = request.iter().map(Vec::as_slice).collect();
        let Some((name, args)) = words.split_first() else { return };
        let name = String::from_utf8_lossy(name).to_ascii_uppercase();
        let reply = match self.answer(now, id, &name, args) {
            Ok(reply) => reply,
            Err(error) => Reply::Error(error.to_string()),
        };
        if let Some(connection) = self.connections.get(&id) {
            connection.send(&reply);
        }
    }

    fn answer(&mut self, now: Time, id: u64, name: &str, args: &[&[u8]]) -> Result<Reply, WireError> {
        let is_primary = self.is_primary();
        let Some(connection) = self.connections.get_mut(&id) else {
            return Ok(Reply::Nil); // it was cut meanwhile: nobody reads this
        };
        let db = connection.db;
        let client = NonZeroU64::new(id);
        if DECIDING.contains(&name) && !is_primary {
            return Err(WireError::READ_ONLY);
        }
        match name {
            Acquire::NAME => self.acquire(now, db, client, &parse(args)?),
            Release::NAME => {
                let request: Release<'_> = parse(args)?;
                let released = self.decide(db, request.key, |table, place, listeners| {
                    table.release(now, place, &request, listeners)
                })?;
                Ok(Reply::Integer(released.into()))
            }
            Renew::NAME => {
                let request: Renew<'_> = parse(args)?;
                let caller = Caller { blocked: 0, client };
                let renewed = self.decide(db, request.key, |table, place, listeners| {
                    table.renew(now, place, &request, caller, listeners)
                });
                Ok(Reply::Integer(renewed.into()))
            }
            Check::NAME => {
                let Check { key, token } = parse(args)?;
                let place = Place { db, key, lock: self.lock_at(db, key) };
                Ok(Reply::Integer(self.table.check(now, place, token).into()))
            }
            Info::NAME => {
                let request: Info<'_> = parse(args)?;
                let place = Place { db, key: request.key, lock: self.lock_at(db, request.key) };
                let mut reply = Encoded::default();
                report::info(&mut reply, &self.table, place, &request, now);
                Ok(Reply::Encoded(reply))
            }
            List::NAME => {
                let mut reply = Encoded::default();
                report::list(&mut reply, &self.table, db, &parse(args)?, |_| true, now);
                Ok(Reply::Encoded(reply))
            }
            Revoke::NAME => {
                let request: Revoke<'_> = parse(args)?;
                let ended = self
                    .decide(db, request.key, |table, place, listeners| table.revoke(now, place, &request, listeners));
                Ok(Reply::Integer(u64::try_from(ended).unwrap_or(u64::MAX)))
            }
            "HELLO" => Ok(Reply::Map(vec![
                (Reply::bulk("server"), Reply::bulk("flock-client::testing")),
                (Reply::bulk("version"), Reply::bulk(env!("CARGO_PKG_VERSION"))),
                (Reply::bulk("proto"), Reply::Integer(3)),
                (Reply::bulk("id"), Reply::Integer(id)),
            ])),
            "AUTH" => Ok(Reply::Word("OK")),
            "WAIT" => Ok(Reply::Integer(0)), // so many replicas there are
            "PING" => Ok(Reply::Word("PONG")),
            "SELECT" => {
                connection.db = number(args.first()).ok_or(INVALID_DB)?;
                Ok(Reply::Word("OK"))
            }
            "SUBSCRIBE" => Ok(subscription("subscribe", args, connection, |channels, channel| {
                channels.insert(channel);
            })),
            "UNSUBSCRIBE" => Ok(subscription("unsubscribe", args, connection, |channels, channel| {
                channels.remove(&channel);
            })),
            "CLIENT" => self.client(id, args),
            _ => Err(unknown(name)),
        }
    }

    fn acquire(
        &mut self,
        now: Time,
        db: u16,
        client: Option<NonZeroU64>,
        request: &Acquire<'_>,
    ) -> Result<Reply, WireError> {
        if let Wait::Block(_) = request.wait {
            return Err(NO_BLOCK);
        }
        if let Some(floor) = request.floor {
            self.table.floor(floor, wall_clock()).answer?;
        }
        let caller = Caller { blocked: 0, client };
        let answer = self
            .decide(db, request.key, |table, place, listeners| table.acquire(now, place, request, caller, listeners))?;
        Ok(match answer {
            Acquired::Granted(token) => Reply::Integer(token.get()),
            Acquired::Busy => Reply::Nil,
            Acquired::Queued { position, .. } => {
                let position = u64::try_from(position).unwrap_or(u64::MAX);
                Reply::Array(vec![Reply::bulk("QUEUED"), Reply::Integer(position)])
            }
        })
    }

    fn client(&mut self, id: u64, args: &[&[u8]]) -> Result<Reply, WireError> {
        let words: Vec<String> = args.iter().map(|arg| String::from_utf8_lossy(arg).into_owned()).collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        match words.as_slice() {
            ["SETINFO" | "SETNAME", ..] => Ok(Reply::Word("OK")),
            ["INFO"] => {
                let from = self.connections.get(&id).map_or_else(|| address(id), |connection| connection.from);
                Ok(Reply::Bulk(format!("id={id} addr={from} sub=0").into_bytes()))
            }
            ["KILL", "ID", other, "ADDR", its_address] => {
                let is_it = |connection: &Connection| connection.from.to_string() == *its_address;
                let other = other.parse().ok().filter(|other| self.connections.get(other).is_some_and(is_it));
                Ok(Reply::Integer(other.is_some_and(|other| self.cut(other)).into()))
            }
            _ => Err(unknown("CLIENT with these arguments")),
        }
    }

    /// Runs a verb at a key and performs what it decided.
    fn decide<T>(
        &mut self,
        db: u16,
        key: &[u8],
        verb: impl FnOnce(&mut Table, Place<'_>, &mut Listeners<'_>) -> Decision<T>,
    ) -> T {
        let place = Place { db, key, lock: self.lock_at(db, key) };
        let decision = verb(&mut self.table, place, &mut Listeners(&self.connections));
        match (decision.key, decision.lock) {
            (KeyAction::Bind, Some(lock)) => {
                self.keys.insert((db, key.into()), lock);
            }
            (KeyAction::Unbind, _) => {
                if let Some(lock) = self.keys.remove(&(db, key.into())) {
                    self.table.freed(lock);
                }
            }
            (KeyAction::Bind, None) | (KeyAction::Keep, _) => {}
        }
        self.perform_effects(Some((db, key)), decision)
    }

    /// Replicates, and speaks to the owners. What else there is to do is for blocked connections and notifications: there are none.
    fn perform_effects<T>(&mut self, place: Option<(u16, &[u8])>, decision: Decision<T>) -> T {
        let (db, key) = place.unwrap_or_default();
        for effect in &decision.effects {
            match effect {
                Effect::Change(change) => self.replicate(db, key, change),
                Effect::Tell { channel, name, owner, notice } => {
                    let mut message = Vec::new();
                    OwnerMessage { notice: *notice, key: name.key(), owner }.encode(&mut message);
                    let push =
                        Reply::Push(vec![Reply::bulk("message"), Reply::bulk(&channel[..]), Reply::Bulk(message)]);
                    let listeners =
                        self.connections.values().filter(|connection| connection.channels.contains(&channel[..]));
                    listeners.for_each(|connection| connection.send(&push));
                }
                Effect::Granted(_) | Effect::Finish { .. } | Effect::Announce { .. } => {}
            }
        }
        self.table.recycle(decision.effects);
        decision.answer
    }

    fn lock_at(&self, db: u16, key: &[u8]) -> Option<LockId> {
        self.keys.get(&(db, key.into())).copied()
    }
}

fn wall_clock() -> WallClock {
    WallClock::from_unix_us(WALL_CLOCK_US)
}

/// Where a connection seems to come from.
fn address(id: u64) -> SocketAddr {
    let port = u16::try_from(id % 65_536).unwrap_or_default();
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

fn parse<'a, C: Command<'a>>(args: &[&'a [u8]]) -> Result<C, WireError> {
    C::parse(args.iter().copied(), &Limits::DEFAULT)
}

fn number<N: std::str::FromStr>(arg: Option<&&[u8]>) -> Option<N> {
    str::from_utf8(arg?).ok()?.parse().ok()
}

/// Subscribes or unsubscribes; each channel is confirmed by a push, which stands for the reply.
fn subscription(
    word: &'static str,
    channels: &[&[u8]],
    connection: &mut Connection,
    change: impl Fn(&mut BTreeSet<Vec<u8>>, Vec<u8>),
) -> Reply {
    let mut confirmation = Reply::Nil;
    for (index, channel) in channels.iter().enumerate() {
        change(&mut connection.channels, channel.to_vec());
        if index > 0 {
            connection.send(&confirmation);
        }
        let count = u64::try_from(connection.channels.len()).unwrap_or(u64::MAX);
        confirmation = Reply::Push(vec![Reply::bulk(word), Reply::bulk(channel), Reply::Integer(count)]);
    }
    confirmation
}

fn unknown(what: &str) -> WireError {
    WireError { code: ErrorCode::Err, message: format!("unknown command: {what}").into() }
}

const INVALID_DB: WireError = WireError::fixed(ErrorCode::Err, "DB index is out of range");
const NO_BLOCK: WireError =
    WireError::fixed(ErrorCode::Err, "a server in memory does not block connections: use QUEUE");
