//! A handoff does not depend on how many wait.
//!
//! The server runs a burst of releases, each of which hands the lock to the next in line; then those who had it join the end of the queue
//! again, which is not measured.

use std::collections::{HashMap, VecDeque};

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
const CHANNEL: &str = "to-all-waiters";
/// Handoffs per turn.
const BURST: usize = 50;

/// Both goals, and how it goes on with more waiters: a cost that grows with the logarithm looks different from one that is proportional.
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
        .map(|(server, waiters)| Queued::new(server, random, waiters))
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

fn releases<'a>(owners: impl Iterator<Item = &'a Vec<u8>>) -> Batch {
    let mut batch = Batch::new(Answer::One);
    for owner in owners {
        batch.push(&args!["FLOCK.RELEASE", KEY, owner]);
    }
    batch
}

/// One holder, and waiters whose connections are blocked.
struct Blocked<'server> {
    server: &'server Server,
    pipe: Pipe,
    admin: Conn,
    conns: HashMap<Vec<u8>, Conn>,
    waiters: usize,
}

impl<'server> Blocked<'server> {
    fn new(server: &'server Server, random: &mut Random, waiters: usize) -> Self {
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
            let conn = self.conns.get_mut(owner).expect("every owner has a connection");
            conn.send(&args!["FLOCK.ACQUIRE", KEY, owner, LONG_LEASE_MS, "BLOCK", 0]);
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
        self.conns.get_mut(owner).expect("every owner has a connection").recv().as_token();
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

/// One holder, and waiters who all listen to one channel, on one connection.
struct Queued<'server> {
    server: &'server Server,
    pipe: Pipe,
    subscriber: Subscriber,
    random: Random,
    line: VecDeque<Vec<u8>>,
}

impl<'server> Queued<'server> {
    fn new(server: &'server Server, random: &mut Random, waiters: usize) -> Self {
        let subscriber = Subscriber::new(server.connect(Protocol::Resp2), "SUBSCRIBE", &[CHANNEL]);
        let pipe = Pipe::open(server.addr());
        let mut queued =
            Queued { server, pipe, subscriber, random: Random::from_seed(random.number()), line: VecDeque::new() };
        let holder = names::owner(random, OWNER_BYTES);
        let mut batch = Batch::new(Answer::Token);
        batch.push(&args!["FLOCK.ACQUIRE", KEY, holder, LONG_LEASE_MS]);
        queued.pipe.run(&batch);
        queued.line.push_back(holder);
        queued.join(waiters);
        queued
    }

    fn join(&mut self, count: usize) {
        for start in (0..count).step_by(BURST) {
            let mut batch = Batch::new(Answer::Queued);
            for _ in start..count.min(start + BURST) {
                let owner = names::owner(&mut self.random, OWNER_BYTES);
                let wait_ms = LONG_LEASE_MS;
                let join = args!["FLOCK.ACQUIRE", KEY, owner, LONG_LEASE_MS, "QUEUE", wait_ms, "CHANNEL", CHANNEL];
                batch.push(&join);
                self.line.push_back(owner);
            }
            self.pipe.run(&batch);
        }
    }

    /// Nanoseconds per handoff.
    fn burst(&mut self) -> f64 {
        let batch = releases(self.line.iter().take(BURST));
        self.line.drain(..BURST);
        let (server, pipe) = (self.server, &mut self.pipe);
        let cost = cpu_ns_each(server, BURST, || pipe.run(&batch));
        for _ in 0..BURST {
            let message = self.subscriber.message();
            assert!(message.payload.starts_with(b"granted "), "{message:?}");
        }
        self.join(BURST);
        cost
    }
}
