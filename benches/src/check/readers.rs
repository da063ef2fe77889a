//! Many readers: what a release costs among them.

use flock_tests::args;
use flock_tests::random::Random;
use flock_tests::server::Server;

use super::{builder, settle};
use crate::generator::{Answer, Batch, Pipe};
use crate::measure::{Summary, alternate, cpu_ns_each};
use crate::names::{self, OWNER_BYTES};
use crate::report::{Report, Unit};
use crate::scheme::LONG_LEASE_MS;

const KEY: &str = "lock:read-by-many";
/// Releases per turn: about 1 % of the most readers.
const BURST: usize = 100;

/// The goals: a bound on the time, and that it grows as a logarithm does.
pub fn release_among_many(report: &mut Report, random: &mut Random) {
    report.section("Readers: main-thread CPU of a RELEASE, in bursts of 100 of random readers");
    let servers = [(); 3].map(|()| builder().start());
    settle();
    let mut readers = servers
        .iter()
        .zip([100, 1000, 10_000])
        .map(|(server, count)| Readers::new(server, random, count))
        .collect::<Vec<_>>();
    let [few, some, many] = &mut readers[..] else { return };
    let cost = alternate(80, &mut [&mut || few.burst(), &mut || some.burst(), &mut || many.burst()]);
    let [few, some, many] = &cost[..] else { return };
    report.goal("10,000 readers", Summary::of(many), 50_000.0, Unit::Time);
    // Two is log 10,000 / log 100.
    report.goal("10,000 readers / 100", Summary::of_ratios(many, few), 2.00, Unit::Ratio);
    report.shown("1,000 readers / 100", Summary::of_ratios(some, few), Unit::Ratio);
    report.shown("100 readers", Summary::of(few), Unit::Time);
}

/// Those who share a lock.
struct Readers<'server> {
    server: &'server Server,
    pipe: Pipe,
    random: Random,
    owners: Vec<Vec<u8>>,
}

impl<'server> Readers<'server> {
    /// `count` of them while a burst of releases goes on, on average.
    fn new(server: &'server Server, random: &mut Random, count: usize) -> Self {
        let random = Random::from_seed(random.number());
        let mut readers = Readers { server, pipe: Pipe::open(server.addr()), random, owners: Vec::new() };
        readers.join(count + BURST / 2);
        readers
    }

    fn join(&mut self, count: usize) {
        let mut batch = Batch::new(Answer::Token);
        for _ in 0..count {
            let owner = names::owner(&mut self.random, OWNER_BYTES);
            batch.push(&args!["FLOCK.ACQUIRE", KEY, owner, LONG_LEASE_MS, "SHARED"]);
            self.owners.push(owner);
        }
        self.pipe.run(&batch);
    }

    /// Nanoseconds per release.
    fn burst(&mut self) -> f64 {
        let mut batch = Batch::new(Answer::One);
        for _ in 0..BURST {
            let all = self.owners.len() as u64;
            let one = usize::try_from(self.random.below(all)).expect("an index fits");
            batch.push(&args!["FLOCK.RELEASE", KEY, self.owners.swap_remove(one)]);
        }
        let (server, pipe) = (self.server, &mut self.pipe);
        let cost = cpu_ns_each(server, BURST, || pipe.run(&batch));
        self.join(BURST);
        cost
    }
}
