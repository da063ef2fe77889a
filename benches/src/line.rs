//! A lock that is handed on: its holder, and those who wait for it in line, by `BLOCK` and by `QUEUE`.
//!
//! Whoever has released the lock is out of the line until [`Blocked::rejoin`] or [`Queued::rejoin`], so that a handoff can be measured
//! without what comes after it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use flock_tests::args;
use flock_tests::random::Random;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::Server;
use flock_tests::subscriber::Subscriber;
use flock_tests::wait::wait_until;

use crate::generator::{Answer, Batch, Pipe};
use crate::measure::cpu_ns_each;
use crate::names::{self, KEY_BYTES, OWNER_BYTES};
use crate::scheme::LONG_LEASE_MS;

/// Handoffs in a burst.
pub const BURST: usize = 50;
/// The connections that the waiters of a queue listen on, where the time of a handoff is measured.
pub const LISTENERS: usize = 10;

fn releases<'a>(key: &[u8], owners: impl Iterator<Item = &'a Vec<u8>>) -> Batch {
    let mut batch = Batch::new(Answer::One);
    for owner in owners {
        batch.push(&args!["FLOCK.RELEASE", key, owner]);
    }
    batch
}

/// One holder, and waiters whose connections are blocked.
#[derive(Debug)]
pub struct Blocked<'server> {
    server: &'server Server,
    pipe: Pipe,
    admin: Conn,
    key: Vec<u8>,
    /// The holder comes first.
    line: VecDeque<Blocking>,
    gone: Vec<Blocking>,
}

#[derive(Debug)]
struct Blocking {
    owner: Vec<u8>,
    conn: Conn,
}

impl Blocking {
    fn granted(&mut self) {
        self.conn.recv().as_token();
    }
}

impl<'server> Blocked<'server> {
    /// A holder and `waiters`, each on a connection of its own.
    pub fn new(server: &'server Server, random: &mut Random, waiters: usize) -> Self {
        let mut blocked = Blocked {
            server,
            pipe: Pipe::open(server.addr()),
            admin: server.connect(Protocol::Resp3),
            key: names::key(random, KEY_BYTES),
            line: VecDeque::new(),
            gone: Vec::new(),
        };
        for _ in 0..=waiters {
            let (owner, conn) = (names::owner(random, OWNER_BYTES), Conn::open_raw(server.addr()));
            blocked.join(Blocking { owner, conn });
        }
        blocked
    }

    /// Returns when the server has it in line: the next one joins behind it, and nothing is left to do when the next release comes.
    fn join(&mut self, mut waiter: Blocking) {
        waiter.conn.send(&args!["FLOCK.ACQUIRE", self.key, waiter.owner, LONG_LEASE_MS, "BLOCK", 0]);
        if self.line.is_empty() {
            waiter.granted();
        } else {
            let (admin, key, waiters) = (&mut self.admin, &self.key, self.line.len());
            wait_until("it waits", ANSWER_WITHIN, || {
                let info = admin.cmd(&args!["FLOCK.INFO", key, "LIMIT", 0]);
                usize::try_from(info.field("waiter_count").as_int()) == Ok(waiters)
            });
        }
        self.line.push_back(waiter);
    }

    /// Those who have released the lock wait for it again.
    pub fn rejoin(&mut self) {
        for waiter in std::mem::take(&mut self.gone) {
            self.join(waiter);
        }
    }

    /// One handoff: from sending the release until the next in line has read its grant.
    ///
    /// # Panics
    /// If nobody is in line.
    pub fn hand_over(&mut self) -> Duration {
        let mut holder = self.line.pop_front().expect("somebody holds the lock");
        let release = args!["FLOCK.RELEASE", self.key, holder.owner];
        let start = Instant::now();
        holder.conn.send(&release);
        self.line[0].granted();
        let took = start.elapsed();
        assert_eq!(holder.conn.recv().as_int(), 1, "the holder held it");
        self.gone.push(holder);
        took
    }

    /// Nanoseconds of the server for each of many handoffs at once.
    pub fn burst(&mut self) -> f64 {
        let batch = releases(&self.key, self.line.iter().take(BURST).map(|waiter| &waiter.owner));
        let (server, pipe) = (self.server, &mut self.pipe);
        let cost = cpu_ns_each(server, BURST, || pipe.run(&batch));
        self.gone.extend(self.line.drain(..BURST));
        // Read when the server has done all: a reader that waits would have to be woken, at the server's cost.
        for granted in self.gone.iter_mut().skip(1).chain(self.line.front_mut()) {
            granted.granted();
        }
        self.rejoin();
        cost
    }
}

/// One holder, and waiters who listen on some connections, each to a channel of its own.
#[derive(Debug)]
pub struct Queued<'server> {
    server: &'server Server,
    pipe: Pipe,
    conn: Conn,
    key: Vec<u8>,
    subscribers: Vec<Subscriber>,
    random: Random,
    /// The owners, and which subscriber hears for them. The holder comes first.
    line: VecDeque<(Vec<u8>, usize)>,
    gone: usize,
    joined: usize,
}

fn channel(listener: usize) -> String {
    format!("to-waiters-{listener}")
}

impl<'server> Queued<'server> {
    /// A holder and `waiters`, who hear of their grants on `listeners` connections.
    pub fn new(server: &'server Server, random: &mut Random, waiters: usize, listeners: usize) -> Self {
        let subscribers = (0..listeners)
            .map(|listener| Subscriber::new(server.connect(Protocol::Resp2), "SUBSCRIBE", &[channel(listener)]));
        let mut queued = Queued {
            server,
            pipe: Pipe::open(server.addr()),
            conn: server.connect(Protocol::Resp2),
            key: names::key(random, KEY_BYTES),
            subscribers: subscribers.collect(),
            random: Random::from_seed(random.number()),
            line: VecDeque::new(),
            gone: 0,
            joined: 0,
        };
        let holder = names::owner(random, OWNER_BYTES);
        let mut batch = Batch::new(Answer::Token);
        batch.push(&args!["FLOCK.ACQUIRE", queued.key, holder, LONG_LEASE_MS]);
        queued.pipe.run(&batch);
        queued.line.push_back((holder, 0));
        queued.join(waiters);
        queued
    }

    /// So many more wait.
    pub fn join(&mut self, count: usize) {
        for start in (0..count).step_by(BURST) {
            let mut batch = Batch::new(Answer::Queued);
            for _ in start..count.min(start + BURST) {
                let owner = names::owner(&mut self.random, OWNER_BYTES);
                let listener = self.joined % self.subscribers.len();
                self.joined += 1;
                let channel = channel(listener);
                let (key, wait_ms) = (&self.key, LONG_LEASE_MS);
                batch.push(&args!["FLOCK.ACQUIRE", key, owner, LONG_LEASE_MS, "QUEUE", wait_ms, "CHANNEL", channel]);
                self.line.push_back((owner, listener));
            }
            self.pipe.run(&batch);
        }
    }

    /// As many wait again as have released the lock.
    pub fn rejoin(&mut self) {
        let count = std::mem::take(&mut self.gone);
        self.join(count);
    }

    /// Takes the message of a grant, and gives the token.
    fn granted(&mut self, listener: usize) -> String {
        let message = self.subscribers[listener].message();
        let text = String::from_utf8_lossy(&message.payload);
        let token = text.strip_prefix("granted ").and_then(|rest| rest.split(' ').next());
        token.unwrap_or_else(|| panic!("expected a grant, got {message:?}")).to_owned()
    }

    /// One handoff: from sending the release until the next in line has read its grant; and, if it is to be confirmed, has done so.
    ///
    /// # Panics
    /// If nobody is in line.
    pub fn hand_over(&mut self, confirm: bool) -> Duration {
        let (holder, _) = self.line.pop_front().expect("there is a holder");
        let (next, listener) = self.line[0].clone();
        let release = args!["FLOCK.RELEASE", self.key, holder];
        let start = Instant::now();
        self.conn.send(&release);
        let token = self.granted(listener);
        let mut took = start.elapsed();
        assert_eq!(self.conn.recv().as_int(), 1, "the holder held it");
        if confirm {
            let renewed = self.conn.cmd(&args!["FLOCK.RENEW", self.key, next, LONG_LEASE_MS, "TOKEN", token]);
            took = start.elapsed();
            assert_eq!(renewed.as_int(), 1, "the next holds it");
        }
        self.gone += 1;
        took
    }

    /// Nanoseconds of the server for each of many handoffs at once.
    pub fn burst(&mut self) -> f64 {
        let batch = releases(&self.key, self.line.iter().take(BURST).map(|(owner, _)| owner));
        let next: Vec<usize> = self.line.range(1..=BURST).map(|(_, listener)| *listener).collect();
        self.line.drain(..BURST);
        self.gone += BURST;
        let (server, pipe) = (self.server, &mut self.pipe);
        let cost = cpu_ns_each(server, BURST, || pipe.run(&batch));
        for listener in next {
            self.granted(listener);
        }
        self.rejoin();
        cost
    }
}
