//! A handoff does not depend on how many wait, and takes little longer than a round trip.
//!
//! For its cost the server runs a burst of releases, each of which hands the lock to the next in line; for the time it takes there is one
//! release after the other. Then those who had the lock join the end of the queue again, which is not measured.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use flock_tests::args;
use flock_tests::random::Random;
use flock_tests::resp::{Conn, Protocol};
use flock_tests::server::Server;
use flock_tests::subscriber::Subscriber;
use flock_tests::wait::wait_until;

use super::{builder, settle};
use crate::generator::{Answer, Batch, Pipe};
use crate::measure::{Summary, alternate, cpu_ns_each};
use crate::names::{self, OWNER_BYTES};
use crate::report::{Report, Unit};
use crate::scheme::LONG_LEASE_MS;

const KEY: &str = "lock:handed-from-one";
/// Handoffs per turn.
const BURST: usize = 50;
/// The connections that the waiters of a queue listen on, where the time of a handoff is measured.
const LISTENERS: usize = 10;

/// Both goals of the cost, and how it goes on with more waiters: a cost that grows with the logarithm looks different from one that is proportional.
pub fn independent_of_waiters(report: &mut Report, random: &mut Random) {
    report.section("Handoff: main-thread CPU from a RELEASE to the next waiter's grant, in bursts of 50");
    let servers = [(); 7].map(|()| builder().start());
    let (block, queue) = servers.split_at(3);
    settle();
    let mut lines: Vec<Blocked<'_>> =
        block.iter().zip([100, 1000, 4000]).map(|(server, waiters)| Blocked::new(server, random, waiters)).collect();
    let [few, many, more] = &mut lines[..] else { return };
    let cost = alternate(80, &mut [&mut || few.burst(), &mut || many.burst(), &mut || more.burst()]);
    let [few, many, more] = &cost[..] else { return };
    report.goal("BLOCK, 1,000 waiters / 100", Summary::of_ratios(many, few), 1.30, Unit::Ratio);
    report.shown("BLOCK, 4,000 waiters / 100", Summary::of_ratios(more, few), Unit::Ratio);
    report.shown("BLOCK, 1,000 waiters", Summary::of(many), Unit::Time);
    drop(lines);

    let mut lines: Vec<Queued<'_>> = queue
        .iter()
        .zip([100, 1000, 10_000, 100_000])
        .map(|(server, waiters)| Queued::new(server, random, waiters, 1))
        .collect();
    let [few, some, many, most] = &mut lines[..] else { return };
    let cost =
        alternate(150, &mut [&mut || few.burst(), &mut || some.burst(), &mut || many.burst(), &mut || most.burst()]);
    let [few, some, many, most] = &cost[..] else { return };
    report.shown("QUEUE, 1,000 waiters / 100", Summary::of_ratios(some, few), Unit::Ratio);
    report.goal("QUEUE, 10,000 waiters / 100", Summary::of_ratios(many, few), 1.30, Unit::Ratio);
    report.shown("QUEUE, 100,000 waiters / 100", Summary::of_ratios(most, few), Unit::Ratio);
    report.shown("QUEUE, 100 waiters", Summary::of(few), Unit::Time);
    report.shown("QUEUE, 10,000 waiters", Summary::of(many), Unit::Time);
}

/// The goals of the time, in round trips of a PING.
pub fn within_round_trips(report: &mut Report, random: &mut Random) {
    report.section(
        "Handoff: from sending a RELEASE until the next waiter has read its grant / PING round trip, one after the other",
    );
    let servers = [(); 3].map(|()| builder().start());
    settle();
    let mut few = Blocked::new(&servers[0], random, 20);
    let mut many = Blocked::new(&servers[1], random, 1000);
    let mut queue = Queued::new(&servers[2], random, 1000, LISTENERS);
    let mut conn = servers[0].connect(Protocol::Resp2);
    // Both measure the same queue, in turns that do not overlap.
    let queue = std::cell::RefCell::new(&mut queue);
    let times = alternate(
        100,
        &mut [
            &mut || ping(&mut conn),
            &mut || few.one_by_one(),
            &mut || many.one_by_one(),
            &mut || queue.borrow_mut().one_by_one(false),
            &mut || queue.borrow_mut().one_by_one(true),
        ],
    );
    let [ping, few, many, queue, confirmed] = &times[..] else { return };
    report.shown("PING round trip", Summary::of(ping), Unit::Time);
    report.goal("BLOCK, 20 waiters", Summary::of_ratios(few, ping), 1.60, Unit::Ratio);
    report.goal("BLOCK, 1,000 waiters", Summary::of_ratios(many, ping), 2.00, Unit::Ratio);
    let what = format!("QUEUE, 1,000 waiters on {LISTENERS} connections");
    report.goal(&what, Summary::of_ratios(queue, ping), 2.50, Unit::Ratio);
    report.shown("  and until a RENEW that confirms it is answered", Summary::of_ratios(confirmed, ping), Unit::Ratio);
}

/// Nanoseconds of a round trip.
fn ping(conn: &mut Conn) -> f64 {
    let mut took = Vec::with_capacity(BURST);
    for _ in 0..BURST {
        let start = Instant::now();
        conn.cmd(&["PING"]);
        took.push(start.elapsed().as_secs_f64() * 1e9);
    }
    Summary::of(&took).median
}

fn releases<'a>(owners: impl Iterator<Item = &'a Vec<u8>>) -> Batch {
    let mut batch = Batch::new(Answer::One);
    for owner in owners {
        batch.push(&args!["FLOCK.RELEASE", KEY, owner]);
    }
    batch
}

/// One holder, and waiters whose connections are blocked.
pub(super) struct Blocked<'server> {
    server: &'server Server,
    pipe: Pipe,
    admin: Conn,
    conns: HashMap<Vec<u8>, Conn>,
    waiters: usize,
}

impl<'server> Blocked<'server> {
    pub(super) fn new(server: &'server Server, random: &mut Random, waiters: usize) -> Self {
        let conns = (0..=waiters).map(|_| (names::owner(random, OWNER_BYTES), Conn::open_raw(server.addr())));
        let mut blocked = Blocked {
            server,
            pipe: Pipe::open(server.addr()),
            admin: server.connect(Protocol::Resp3),
            conns: conns.collect(),
            waiters,
        };
        let all: Vec<Vec<u8>> = blocked.conns.keys().cloned().collect();
        blocked.join(&all);
        let [holder, ..] = &blocked.first_in_line(1)[..] else { panic!("nobody holds the lock") };
        blocked.granted(holder);
        blocked
    }

    fn join(&mut self, owners: &[Vec<u8>]) {
        for owner in owners {
            self.conn_of(owner).send(&join_blocking(owner));
        }
        let (admin, waiters) = (&mut self.admin, self.waiters);
        wait_until("all wait", flock_tests::resp::ANSWER_WITHIN, || {
            let info = admin.cmd(&args!["FLOCK.INFO", KEY, "LIMIT", 1]);
            !info.is_nil() && usize::try_from(info.field("waiter_count").as_int()) == Ok(waiters)
        });
    }

    /// The holder, and those next in line: `count` in all. The order in which connections were served is the server's.
    fn first_in_line(&mut self, count: usize) -> Vec<Vec<u8>> {
        let info = self.admin.cmd(&args!["FLOCK.INFO", KEY, "LIMIT", count]);
        let [holders, waiters] = ["holders", "waiters"].map(|field| info.field(field).as_array());
        let owners = holders.iter().chain(waiters).map(|entry| entry.field("owner").as_bytes().to_vec());
        owners.take(count).collect()
    }

    fn granted(&mut self, owner: &[u8]) {
        self.conn_of(owner).recv().as_token();
    }

    fn conn_of(&mut self, owner: &[u8]) -> &mut Conn {
        self.conns.get_mut(owner).expect("every owner has a connection")
    }

    /// Nanoseconds from sending a release until the next in line has its grant.
    fn one_by_one(&mut self) -> f64 {
        let mut line = VecDeque::from(self.first_in_line(BURST + 1));
        let mut took = Vec::with_capacity(BURST);
        for _ in 0..BURST {
            let holder = line.pop_front().expect("somebody holds the lock");
            let release = args!["FLOCK.RELEASE", KEY, holder];
            let start = Instant::now();
            self.conn_of(&holder).send(&release);
            self.granted(&line[0]);
            took.push(start.elapsed().as_secs_f64() * 1e9);
            assert_eq!(self.conn_of(&holder).recv().as_int(), 1, "the holder held it");
            self.conn_of(&holder).send(&join_blocking(&holder));
            // What was sent before is served before: nothing is left to do when the next release comes.
            self.admin.cmd(&["PING"]);
            line.push_back(holder);
        }
        Summary::of(&took).median
    }

    /// Nanoseconds per handoff.
    fn burst(&mut self) -> f64 {
        let line = self.first_in_line(BURST + 1);
        let batch = releases(line.iter().take(BURST));
        let (server, pipe) = (self.server, &mut self.pipe);
        let cost = cpu_ns_each(server, BURST, || pipe.run(&batch));
        // Read when the server has done all: a reader that waits would have to be woken, at the server's cost.
        for owner in &line[1..] {
            self.granted(owner);
        }
        self.join(&line[..BURST]);
        cost
    }
}

/// One holder, and waiters who listen on some connections, each to a channel of its own.
pub(super) struct Queued<'server> {
    server: &'server Server,
    pipe: Pipe,
    conn: Conn,
    subscribers: Vec<Subscriber>,
    random: Random,
    /// The owners, and which subscriber hears for them.
    line: VecDeque<(Vec<u8>, usize)>,
    joined: usize,
}

fn channel(listener: usize) -> String {
    format!("to-waiters-{listener}")
}

impl<'server> Queued<'server> {
    pub(super) fn new(server: &'server Server, random: &mut Random, waiters: usize, listeners: usize) -> Self {
        let subscribers = (0..listeners)
            .map(|listener| Subscriber::new(server.connect(Protocol::Resp2), "SUBSCRIBE", &[channel(listener)]));
        let mut queued = Queued {
            server,
            pipe: Pipe::open(server.addr()),
            conn: server.connect(Protocol::Resp2),
            subscribers: subscribers.collect(),
            random: Random::from_seed(random.number()),
            line: VecDeque::new(),
            joined: 0,
        };
        let holder = names::owner(random, OWNER_BYTES);
        let mut batch = Batch::new(Answer::Token);
        batch.push(&args!["FLOCK.ACQUIRE", KEY, holder, LONG_LEASE_MS]);
        queued.pipe.run(&batch);
        queued.line.push_back((holder, 0));
        queued.join(waiters);
        queued
    }

    pub(super) fn join(&mut self, count: usize) {
        for start in (0..count).step_by(BURST) {
            let mut batch = Batch::new(Answer::Queued);
            for _ in start..count.min(start + BURST) {
                let owner = names::owner(&mut self.random, OWNER_BYTES);
                let listener = self.joined % self.subscribers.len();
                self.joined += 1;
                batch.push(&join(&owner, &channel(listener)));
                self.line.push_back((owner, listener));
            }
            self.pipe.run(&batch);
        }
    }

    /// Takes the message of a grant, and gives the token.
    fn granted(&mut self, listener: usize) -> String {
        let message = self.subscribers[listener].message();
        let text = String::from_utf8_lossy(&message.payload);
        let token = text.strip_prefix("granted ").and_then(|rest| rest.split(' ').next());
        token.unwrap_or_else(|| panic!("expected a grant, got {message:?}")).to_owned()
    }

    /// Nanoseconds of the server per handoff.
    fn burst(&mut self) -> f64 {
        let batch = releases(self.line.iter().take(BURST).map(|(owner, _)| owner));
        let next: Vec<usize> = self.line.range(1..=BURST).map(|(_, listener)| *listener).collect();
        self.line.drain(..BURST);
        let (server, pipe) = (self.server, &mut self.pipe);
        let cost = cpu_ns_each(server, BURST, || pipe.run(&batch));
        for listener in next {
            self.granted(listener);
        }
        self.join(BURST);
        cost
    }

    /// Nanoseconds from sending a release until the next in line has read its grant; and, if it is to be confirmed, has done so.
    fn one_by_one(&mut self, confirm: bool) -> f64 {
        let mut took = Vec::with_capacity(BURST);
        for _ in 0..BURST {
            let (holder, _) = self.line.pop_front().expect("there is a holder");
            let (next, listener) = self.line[0].clone();
            let release = args!["FLOCK.RELEASE", KEY, holder];
            let start = Instant::now();
            self.conn.send(&release);
            let token = self.granted(listener);
            if !confirm {
                took.push(start.elapsed().as_secs_f64() * 1e9);
            }
            assert_eq!(self.conn.recv().as_int(), 1, "the holder held it");
            if confirm {
                let renewed = self.conn.cmd(&args!["FLOCK.RENEW", KEY, next, LONG_LEASE_MS, "TOKEN", token]);
                took.push(start.elapsed().as_secs_f64() * 1e9);
                assert_eq!(renewed.as_int(), 1, "the next holds it");
            }
        }
        self.join(BURST);
        Summary::of(&took).median
    }
}

fn join_blocking(owner: &[u8]) -> Vec<Vec<u8>> {
    args!["FLOCK.ACQUIRE", KEY, owner, LONG_LEASE_MS, "BLOCK", 0].to_vec()
}

fn join(owner: &[u8], channel: &str) -> Vec<Vec<u8>> {
    let wait_ms = LONG_LEASE_MS;
    args!["FLOCK.ACQUIRE", KEY, owner, LONG_LEASE_MS, "QUEUE", wait_ms, "CHANNEL", channel].to_vec()
}
