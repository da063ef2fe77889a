//! Offered load: lock operations come at a given rate, whether or not the earlier ones are done.
//!
//! They come in bursts, one each millisecond, dealt to some connections: acquisitions in one, the releases in the next. An operation
//! waits from the moment it should have been sent, so a server that falls behind shows it. The generator runs beside the server, on the
//! same two processors.

use std::time::{Duration, Instant};

use flock_benches::check::{builder, settle};
use flock_benches::generator::{Answer, Batch, Pipe};
use flock_benches::names::{self, KEY_BYTES, OWNER_BYTES};
use flock_benches::scheme::Scheme;
use flock_tests::cpu::main_thread_cpu;
use flock_tests::random::Random;
use flock_tests::server::Server;
use flock_tests::wait::let_pass;

use crate::data::{Table, quantile};

const RATES: [usize; 4] = [25_000, 50_000, 75_000, 100_000];
const LENGTH: Duration = Duration::from_secs(60);
const TICK: Duration = Duration::from_millis(1);
const CONNECTIONS: usize = 5;
/// Batches made beforehand for each connection; they are used again and again.
const BATCHES: usize = 256;

pub(crate) fn run() {
    let mut table = Table::new("load", "scheme,offered,achieved,p50_ms,p99_ms,p999_ms,max_ms,server_cpu");
    let server = builder().start();
    settle();
    let mut random = Random::new();
    for (name, scheme) in [("FLOCK", Scheme::Flock), ("SET + DELIFEQ", Scheme::SetDelIfEq)] {
        for rate in RATES {
            table.row(&format!("{name},{rate},{}", offer(&server, &scheme, &mut random, rate)));
        }
    }
}

fn offer(server: &Server, scheme: &Scheme, random: &mut Random, rate: usize) -> String {
    let per_burst = rate / 1000 / CONNECTIONS;
    let mut pipes: Vec<Pipe> = (0..CONNECTIONS).map(|_| Pipe::open(server.addr())).collect();
    let batches: Vec<Vec<[Batch; 2]>> =
        (0..CONNECTIONS).map(|_| (0..BATCHES).map(|_| batch(scheme, random, per_burst)).collect()).collect();
    let ticks = LENGTH.as_millis() as usize;
    let mut waits = Vec::with_capacity(ticks * CONNECTIONS);
    let (cpu, start) = (main_thread_cpu(server.pid()), Instant::now());
    for tick in 0..ticks {
        let due = start + TICK * tick as u32;
        let_pass(due.saturating_duration_since(Instant::now()));
        let of = |connection: usize| &batches[connection][tick / 2 % BATCHES][tick % 2];
        for (connection, pipe) in pipes.iter_mut().enumerate() {
            pipe.send(of(connection));
        }
        for (connection, pipe) in pipes.iter_mut().enumerate() {
            pipe.receive(of(connection));
            // All of a batch are answered in one write: its last is not later than its first by much.
            waits.push(due.elapsed().as_secs_f64() * 1e3);
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let busy = (main_thread_cpu(server.pid()) - cpu).as_secs_f64() / seconds;
    waits.sort_by(f64::total_cmp);
    let achieved = (ticks * CONNECTIONS * per_burst) as f64 / seconds;
    let [p50, p99, p999, max] = [0.5, 0.99, 0.999, 1.0].map(|part| quantile(&waits, part));
    format!("{achieved:.0},{p50:.3},{p99:.3},{p999:.3},{max:.3},{busy:.2}")
}

/// Acquisitions, and the releases of the same.
fn batch(scheme: &Scheme, random: &mut Random, count: usize) -> [Batch; 2] {
    let (mut take, mut give) = (Batch::new(scheme.taken()), Batch::new(Answer::One));
    for _ in 0..count {
        let (key, owner) = (names::key(random, KEY_BYTES), names::owner(random, OWNER_BYTES));
        take.push(&scheme.take(&key, &owner, 30_000));
        for command in scheme.give(&key, &owner) {
            give.push(&command);
        }
    }
    [take, give]
}
