//! Many want one lock: how much of the time it is held, and how evenly the waiting is spread.
//!
//! A contender acquires, holds for a while, gives back, and begins again, at once or after a pause, until the run is over. Holding is sleeping, on a thread of its
//! own, which is more exact than the timer of a runtime; how long it really took is measured, and the share of the run in which somebody
//! held the lock is the share of the ideal. Settings take turns, and within a setting the peers.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use flock_client::WaitMode;
use flock_tests::resp::Protocol;
use flock_tests::server::Server;
use tokio::runtime::Runtime;

use crate::data::{Table, quantile};
use crate::peers::{Contender, crates, etcd, flock, postgres, redisson, scripts};

/// What is asked of the contenders.
#[derive(Clone, Copy)]
pub(crate) struct Setting {
    pub(crate) contenders: usize,
    pub(crate) hold: Duration,
    /// Between giving back and asking again.
    pub(crate) pause: Duration,
    pub(crate) length: Duration,
}

/// What came of a run.
pub(crate) struct Outcome {
    pub(crate) elapsed: Duration,
    /// How long the lock was held, of that.
    pub(crate) held: Duration,
    /// The waits of those who had it only after the run was over.
    pub(crate) late: Vec<Duration>,
    /// The waits of each contender that ended in time.
    pub(crate) waits: Vec<Vec<Duration>>,
}

const PEERS: [&str; 12] = [
    "flock BLOCK",
    "flock-client push",
    "flock-client on_runtime",
    "flock-client poll",
    "rslock",
    "redlock",
    "redis-py",
    "node-redlock",
    "redisson",
    "redisson fair",
    "postgres",
    "etcd",
];
const ROUNDS: usize = 3;
/// The number of contenders that is measured in every round; the others, in the first only.
const GOALS_SPEAK_OF: [usize; 1] = [8];
const LENGTH: Duration = Duration::from_millis(1500);

pub(crate) fn run() {
    let mut table = Table::new(
        "contention",
        "round,contenders,hold_ms,pause_ms,peer,per_s,held,p50_ms,p99_ms,max_ms,max_in_fair_shares,jain",
    );
    let server = Server::builder().start();
    let runtime = runtime();
    for round in 1..=ROUNDS {
        for (contenders, hold, pause) in settings(round) {
            // So that in a fair order everybody has the lock a few times.
            let turns = hold * u32::try_from(contenders * 3).unwrap_or(u32::MAX);
            let setting = Setting { contenders, hold, pause, length: LENGTH.max(turns) };
            for peer in 0..PEERS.len() {
                let peer = PEERS[(peer + round) % PEERS.len()];
                server.connect(Protocol::Resp2).cmd(&["FLUSHALL"]);
                match compete(&runtime, &server, peer, setting) {
                    Some(outcome) => table.row(&row(round, peer, setting, &outcome)),
                    None if round == 1 => println!("  {peer}: skipped, it is not here (see scripts/bench-peers.sh)"),
                    None => {}
                }
            }
        }
    }
}

/// Contenders, hold, pause. Who does not pause may have the lock again before anybody else has asked.
fn settings(round: usize) -> Vec<(usize, Duration, Duration)> {
    let counts = if round == 1 { &[2, 8, 32, 256][..] } else { &GOALS_SPEAK_OF[..] };
    let mut settings = Vec::new();
    for count in counts {
        settings.extend([0, 1, 10].map(|hold_ms| (*count, Duration::from_millis(hold_ms), Duration::ZERO)));
    }
    settings.extend([8, 32].map(|count| (count, Duration::from_millis(1), Duration::from_millis(1))));
    settings
}

pub(crate) fn runtime() -> Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    // A blocking thread for each that sleeps or uses a client without an async interface.
    builder.worker_threads(2).max_blocking_threads(600).enable_all().build().expect("the machine has threads")
}

fn compete(runtime: &Runtime, server: &Server, peer: &str, setting: Setting) -> Option<Outcome> {
    let (address, count) = (server.addr(), setting.contenders);
    runtime.block_on(async {
        Some(match peer {
            "flock BLOCK" => contend(flock::blocking(address, count).await, setting).await,
            "flock-client push" => contend(flock::clients(address, count, WaitMode::Push).await, setting).await,
            "flock-client on_runtime" => contend(flock::clients_on_runtime(address, count).await, setting).await,
            "flock-client poll" => contend(flock::clients(address, count, WaitMode::Poll).await, setting).await,
            "rslock" => contend(crates::rslock(address, count), setting).await,
            "redlock" => contend(crates::redlock(address, count), setting).await,
            "redis-py" => in_another_process(scripts::redis_py, address, setting).await?,
            "node-redlock" => in_another_process(scripts::node_redlock, address, setting).await?,
            "redisson" => contend(redisson::contenders(address, count, false).await, setting).await,
            "redisson fair" => contend(redisson::contenders(address, count, true).await, setting).await,
            "postgres" => contend(postgres::sessions(count).await?, setting).await,
            "etcd" => contend(etcd::sessions(count).await?, setting).await,
            _ => unreachable!("{peer} is no peer"),
        })
    })
}

/// Without holding up the connections of others that the runtime still closes.
async fn in_another_process(
    script: fn(SocketAddr, Setting) -> Option<Outcome>,
    address: SocketAddr,
    setting: Setting,
) -> Option<Outcome> {
    tokio::task::spawn_blocking(move || script(address, setting)).await.expect("the script runs")
}

async fn contend<C: Contender>(contenders: Vec<C>, setting: Setting) -> Outcome {
    let end = Instant::now() + setting.length;
    let tasks: Vec<_> = contenders.into_iter().map(|one| tokio::spawn(take_turns(one, setting, end))).collect();
    let mut outcome = Outcome { elapsed: setting.length, held: Duration::ZERO, late: Vec::new(), waits: Vec::new() };
    for task in tasks {
        let (waits, late, held) = task.await.expect("a contender does not fail");
        outcome.waits.push(waits);
        outcome.late.extend(late);
        outcome.held += held;
    }
    outcome
}

/// The waits in time, the one that was not, and how long it held the lock.
async fn take_turns<C: Contender>(
    mut one: C,
    setting: Setting,
    end: Instant,
) -> (Vec<Duration>, Option<Duration>, Duration) {
    let (mut waits, mut held) = (Vec::new(), Duration::ZERO);
    loop {
        let asked = Instant::now();
        if asked >= end {
            return (waits, None, held);
        }
        one.acquire().await;
        let got = Instant::now();
        if got >= end {
            one.release().await;
            return (waits, Some(got - asked), held);
        }
        waits.push(got - asked);
        sleep(setting.hold).await;
        held += got.elapsed();
        one.release().await;
        sleep(setting.pause).await;
    }
}

/// To the accuracy of the kernel, about 60 us.
pub(crate) async fn sleep(hold: Duration) {
    if !hold.is_zero() {
        tokio::task::spawn_blocking(move || std::thread::sleep(hold)).await.expect("a thread sleeps");
    }
}

fn row(round: usize, peer: &str, setting: Setting, outcome: &Outcome) -> String {
    let counts: Vec<f64> = outcome.waits.iter().map(|waits| waits.len() as f64).collect();
    let acquired: f64 = counts.iter().sum();
    let squares: f64 = counts.iter().map(|count| count * count).sum();
    let jain = acquired * acquired / (squares * counts.len() as f64);
    let seconds = outcome.elapsed.as_secs_f64();
    let mut waits: Vec<f64> =
        outcome.waits.iter().flatten().chain(&outcome.late).map(|wait| wait.as_secs_f64() * 1e3).collect();
    waits.sort_by(f64::total_cmp);
    let max = waits.last().copied().unwrap_or(f64::NAN);
    // In a fair order everybody waits until all others have had it.
    let fair_ms = setting.contenders as f64 * seconds * 1e3 / acquired;
    format!(
        "{round},{},{},{},{peer},{:.1},{:.3},{:.3},{:.3},{max:.3},{:.2},{jain:.3}",
        setting.contenders,
        setting.hold.as_millis(),
        setting.pause.as_millis(),
        acquired / seconds,
        outcome.held.as_secs_f64() / seconds,
        quantile(&waits, 0.5),
        quantile(&waits, 0.99),
        max / fair_ms,
    )
}
