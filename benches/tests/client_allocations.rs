//! Allocations of a program that takes a lock and gives it back, with flock-client and with the plain `redis` crate: all threads, the names
//! of key and owner included. Prints them; a pair with flock-client is to take no more than one with the plain crate.
//!
//! `make bench`, or with FLOCK_MODULE: `cargo test --release -p flock-benches --test client_allocations -- --nocapture`

mod counting;

use flock_benches::check::builder;
use flock_benches::check::client::{Plain, pair_of_flock};
use flock_benches::names::{self, KEY_BYTES, OWNER_BYTES};
use flock_client::Flock;
use flock_tests::random::Random;
use tokio::runtime::Runtime;

const PAIRS: usize = 16_384;

/// Allocations for each of so many pairs, done by `tasks` together.
fn each<F>(runtime: &Runtime, tasks: usize, work: impl Fn(Random, usize) -> F) -> f64
where
    F: Future<Output = ()> + Send + 'static,
{
    runtime.block_on(async {
        let before = counting::by_all_threads();
        let tasks: Vec<_> =
            (0..tasks as u64).map(|task| tokio::spawn(work(Random::from_seed(task), PAIRS / tasks))).collect();
        for task in tasks {
            task.await.expect("a task does not fail");
        }
        (counting::by_all_threads() - before) as f64 / PAIRS as f64
    })
}

#[test]
fn pair_allocates_no_more_than_with_the_plain_crate() {
    let server = builder().start();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("the machine has threads");
    let flock = runtime.block_on(Flock::connect(format!("valkey://{}", server.addr()))).expect("the server answers");
    let plain = runtime.block_on(Plain::connect(&server));
    for tasks in [1, 64, 512] {
        let ours = |mut random: Random, pairs| {
            let flock = flock.clone();
            async move {
                for _ in 0..pairs {
                    let key = names::key(&mut random, KEY_BYTES);
                    pair_of_flock(&flock, &key).await;
                }
            }
        };
        let theirs = |mut random: Random, pairs| {
            let mut plain = plain.clone();
            async move {
                for _ in 0..pairs {
                    let (key, owner) = (names::key(&mut random, KEY_BYTES), names::owner(&mut random, OWNER_BYTES));
                    plain.pair(&key, &owner).await;
                }
            }
        };
        // The first time all buffers grow to what is needed.
        let [_, ours] = [(); 2].map(|()| each(&runtime, tasks, ours));
        let [_, theirs] = [(); 2].map(|()| each(&runtime, tasks, theirs));
        println!("{tasks:>4} tasks: flock-client {ours:.2}, redis crate {theirs:.2} allocations for a pair");
        assert!(ours <= theirs, "{ours} and {theirs}");
    }
}
