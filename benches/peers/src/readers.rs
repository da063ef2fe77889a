//! Readers and writers: how long a writer waits while readers come and go, and how many get the lock at all.
//!
//! Every contender decides by a throw each time; each holds for a millisecond. There are enough of them that readers overlap always.

use std::time::{Duration, Instant};

use flock_client::WaitMode;
use flock_tests::random::Random;
use flock_tests::server::Server;

use crate::contention::{runtime, sleep};
use crate::data::{Table, quantile};
use crate::peers::{Reader, flock, postgres};

const CONTENDERS: usize = 16;
const HOLD: Duration = Duration::from_millis(1);
const LENGTH: Duration = Duration::from_secs(3);
const ROUNDS: usize = 3;

/// Who waited how long, in milliseconds.
#[derive(Default)]
struct Waits {
    readers: Vec<f64>,
    writers: Vec<f64>,
}

pub(crate) fn run() {
    let columns = "round,writers_percent,peer,reads_per_s,writes_per_s,read_p50_ms,read_p99_ms,read_max_ms,\
                   write_p50_ms,write_p99_ms,write_max_ms";
    let mut table = Table::new("readers", columns);
    let server = Server::builder().start();
    let runtime = runtime();
    let mut random = Random::new();
    for round in 1..=ROUNDS {
        for writers in [5, 50] {
            for peer in ["flock BLOCK", "flock-client push", "postgres"] {
                let waits = runtime.block_on(async {
                    let address = server.addr();
                    Some(match peer {
                        "flock BLOCK" => mix(flock::blocking(address, CONTENDERS).await, writers, &mut random).await,
                        "postgres" => mix(postgres::sessions(CONTENDERS).await?, writers, &mut random).await,
                        _ => {
                            let clients = flock::clients(address, CONTENDERS, WaitMode::Push).await;
                            mix(clients, writers, &mut random).await
                        }
                    })
                });
                match waits {
                    Some(waits) => table.row(&format!("{round},{writers},{peer},{}", figures(waits))),
                    None => println!("  {peer}: skipped, it is not here (see scripts/bench-peers.sh)"),
                }
            }
        }
    }
}

async fn mix<R: Reader>(contenders: Vec<R>, writers: u64, random: &mut Random) -> Waits {
    let end = Instant::now() + LENGTH;
    let tasks = contenders.into_iter().map(|mut one| {
        let mut random = Random::from_seed(random.number());
        tokio::spawn(async move {
            let mut waits = Waits::default();
            while Instant::now() < end {
                let writes = random.below(100) < writers;
                let asked = Instant::now();
                if writes {
                    one.acquire().await
                } else {
                    one.acquire_shared().await
                }
                let wait = asked.elapsed().as_secs_f64() * 1e3;
                if writes { &mut waits.writers } else { &mut waits.readers }.push(wait);
                sleep(HOLD).await;
                if writes { one.release().await } else { one.release_shared().await }
            }
            waits
        })
    });
    let mut all = Waits::default();
    for task in tasks.collect::<Vec<_>>() {
        let waits = task.await.expect("a contender does not fail");
        all.readers.extend(waits.readers);
        all.writers.extend(waits.writers);
    }
    all
}

fn figures(waits: Waits) -> String {
    let Waits { mut readers, mut writers } = waits;
    let rate = |waits: &[f64]| format!("{:.0}", waits.len() as f64 / LENGTH.as_secs_f64());
    let rates = [rate(&readers), rate(&writers)];
    let quantiles = |waits: &mut Vec<f64>| {
        waits.sort_by(f64::total_cmp);
        [0.5, 0.99, 1.0].map(|part| format!("{:.3}", quantile(waits, part)))
    };
    [rates.to_vec(), quantiles(&mut readers).to_vec(), quantiles(&mut writers).to_vec()].concat().join(",")
}
