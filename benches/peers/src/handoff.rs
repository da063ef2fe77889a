//! How long it takes from a release until the next holder knows, and what it costs the server, with few waiters and with many.
//!
//! | line | how its waiters learn that they have the lock |
//! |---|---|
//! | BLOCK | by the answer to a command that blocks, each on a connection of its own |
//! | QUEUE | by a message to the one whose turn it is, on 10 connections |
//! | pub/sub | by trying, when a message to all says that it is free: [`notified`] |
//! | polling | by trying, again and again: [`polling`] |
//!
//! All lines are on one server and take turns, PING among them: a round trip takes twice as long as another if the server happens to be
//! on the generator's processor, and so does a handoff. Before each of them the server sleeps. The server's cost of a handoff is its
//! processor time from before the release until all who tried have their answers; that a waiter came is not in it.

mod notified;
mod polling;

use std::time::Duration;

use flock_benches::check::{builder, settle};
use flock_benches::line::{Blocked, LISTENERS, Queued};
use flock_benches::measure::{Summary, alternate, round_trip, settled_cpu};
use flock_tests::cpu::main_thread_cpu;
use flock_tests::random::Random;
use flock_tests::resp::{Conn, Protocol};
use flock_tests::server::Server;
use flock_tests::wait::let_pass;

use crate::data::{Table, quantile};
use notified::{Awakened, Notified};
use polling::Polling;

const WAITERS: [usize; 4] = [1, 20, 1000, 10_000];
/// Connections of all lines, and some to spare.
const CONNECTIONS: usize = 11_000;
const ROUNDS: usize = 40;
const IDLE_FOR: Duration = Duration::from_secs(2);

/// Those who wait for a lock, one way or another.
trait Line {
    /// One handoff: how long it took, and how many commands the server was sent.
    fn hand_over(&mut self) -> (Duration, usize);
    /// Whoever had the lock waits again.
    fn rejoin(&mut self);
    /// Lets time go by while nobody releases; how many commands the server was sent.
    fn idle(&mut self, during: Duration) -> usize {
        let_pass(during);
        0
    }
}

impl Line for Blocked<'_> {
    fn hand_over(&mut self) -> (Duration, usize) {
        (Blocked::hand_over(self), 1)
    }

    fn rejoin(&mut self) {
        Blocked::rejoin(self);
    }
}

impl Line for Queued<'_> {
    fn hand_over(&mut self) -> (Duration, usize) {
        (Queued::hand_over(self, false), 1)
    }

    fn rejoin(&mut self) {
        Queued::rejoin(self);
    }
}

/// No handoff at all.
impl Line for Conn {
    fn hand_over(&mut self) -> (Duration, usize) {
        (round_trip(self), 1)
    }

    fn rejoin(&mut self) {}
}

/// A handoff.
struct Sample {
    took: f64,
    cpu: f64,
    commands: f64,
}

/// A line, and what was measured of it.
struct Measured<'server> {
    name: &'static str,
    line: Box<dyn Line + 'server>,
    /// Handoffs in a turn.
    times: usize,
    turns: Vec<Vec<Sample>>,
}

pub(crate) fn run() {
    let columns = "waiters,scheme,handoffs,median_pings,p99_pings,max_pings,median_us,cpu_us,commands,idle_cpu_percent,\
                   idle_commands_per_s";
    let mut table = Table::new("handoff", columns);
    let mut random = Random::new();
    for waiters in WAITERS {
        let server = builder().config("maxclients", CONNECTIONS).start();
        settle();
        let mut all = lines(&server, &mut random, waiters);
        let mut turns: Vec<_> = all.iter_mut().map(|measured| || measured.turn(&server)).collect();
        let mut contestants: Vec<&mut dyn FnMut() -> f64> = turns.iter_mut().map(|turn| turn as _).collect();
        let medians = alternate(ROUNDS, &mut contestants);
        for measured in &mut all {
            let (figures, idle) = (measured.figures(&medians[0]), measured.idle(&server));
            table.row(&format!("{waiters},{},{figures},{idle}", measured.name));
        }
    }
}

/// PING first. The waiters of all lines but the one whose turn it is do nothing.
fn lines<'server>(server: &'server Server, random: &mut Random, waiters: usize) -> Vec<Measured<'server>> {
    let measured = |name, line: Box<dyn Line + 'server>, times| Measured { name, line, times, turns: Vec::new() };
    vec![
        measured("PING", Box::new(server.connect(Protocol::Resp2)), 25),
        measured("flock BLOCK", Box::new(Blocked::new(server, random, waiters)), 25),
        measured("flock QUEUE", Box::new(Queued::new(server, random, waiters, LISTENERS)), 25),
        measured("pub/sub 10 try", Box::new(Notified::new(server, random, waiters, Awakened::OneOfEachProcess)), 25),
        measured("pub/sub all try", Box::new(Notified::new(server, random, waiters, Awakened::All)), 5),
        measured("polling", Box::new(Polling::new(server, random, waiters)), 5),
    ]
}

impl Measured<'_> {
    /// Nanoseconds of a handoff, as the median of the turn.
    fn turn(&mut self, server: &Server) -> f64 {
        let mut turn = Vec::with_capacity(self.times);
        for _ in 0..self.times {
            let before = settled_cpu(server);
            let (took, commands) = self.line.hand_over();
            let cpu = settled_cpu(server) - before;
            self.line.rejoin();
            turn.push(Sample { took: nanoseconds(took), cpu: nanoseconds(cpu), commands: commands as f64 });
        }
        let took: Vec<f64> = turn.iter().map(|sample| sample.took).collect();
        self.turns.push(turn);
        Summary::of(&took).median
    }

    /// Times in the PINGs of the same round.
    fn figures(&self, pings: &[f64]) -> String {
        // The first turn was a warm-up.
        let turns = || self.turns.iter().skip(1);
        let mut ratios: Vec<f64> =
            turns().zip(pings).flat_map(|(turn, ping)| turn.iter().map(move |sample| sample.took / ping)).collect();
        ratios.sort_by(f64::total_cmp);
        let samples: Vec<&Sample> = turns().flatten().collect();
        let mean = |of: fn(&Sample) -> f64| samples.iter().map(|sample| of(sample)).sum::<f64>() / samples.len() as f64;
        let took: Vec<f64> = samples.iter().map(|sample| sample.took).collect();
        let [median, p99, max] = [0.5, 0.99, 1.0].map(|part| quantile(&ratios, part));
        format!(
            "{},{median:.2},{p99:.2},{max:.2},{:.1},{:.1},{:.1}",
            samples.len(),
            Summary::of(&took).median / 1e3,
            mean(|sample| sample.cpu) / 1e3,
            mean(|sample| sample.commands),
        )
    }

    /// What those who wait cost while nobody releases.
    fn idle(&mut self, server: &Server) -> String {
        let before = main_thread_cpu(server.pid());
        let commands = self.line.idle(IDLE_FOR);
        let used = settled_cpu(server) - before;
        let seconds = IDLE_FOR.as_secs_f64();
        format!("{:.1},{:.0}", used.as_secs_f64() / seconds * 100.0, commands as f64 / seconds)
    }
}

fn nanoseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e9
}
