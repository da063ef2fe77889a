//! A deterministic simulation: the real client, the core's rules, and a world that fails, all in one thread and from one seed.
//!
//! | part | what it is |
//! |---|---|
//! | `process` | client processes: the real client on a clock that runs a little wrong, and workers that take, hold, hang, give back |
//! | `network` | what lies between a process and the servers: bytes are late, much later, silent, cut for one side before the other |
//! | `servers` | a primary, a replica that lags, promotions: the old primary dead, or granting on beside the new one |
//! | `judge` | what may be believed, which tokens may be granted, what a storage may refuse |
//! | `run` | first faults at any time (safety), then a world that is whole, or what is left of it, and must make progress (liveness) |
//!
//! Time is the runtime's, paused: two minutes pass in some milliseconds. `make sim SEEDS=n [SEED=first]` runs many seeds, each exactly as it
//! ran before: it is built so that the choices of the runtime follow from the seed too, which an ordinary build cannot.

mod judge;
mod network;
mod process;
mod run;
mod servers;

use flock_client::testing::Replicated;

use crate::judge::Counts;
use crate::run::simulate;

/// What is wrong on purpose, to see that it is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plant {
    Nothing,
    /// Clients believe in their lease for twice its length.
    BelievesTwice,
    /// A promoted replica knows nothing of the tokens that its primary had reserved, and its clock is no help.
    PromotionForgetsTheCounter,
    /// What the server tells waiters and holders does not arrive: a lost wake-up.
    MessagesGetLost,
}

impl Plant {
    /// Whether the replica hears of this.
    fn lets_pass(self, replicated: &Replicated) -> bool {
        self != Plant::PromotionForgetsTheCounter || !replicated.is_mark()
    }
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok().filter(|text| !text.is_empty())?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is a whole number, not {text}")))
}

/// The first seed, and how many.
fn seeds() -> std::ops::Range<u64> {
    let first = number("SEED").unwrap_or(1);
    first..first + number("SEEDS").unwrap_or(20)
}

#[test]
fn every_promise_is_kept_in_every_simulated_world() {
    let seeds = seeds();
    let runs = seeds.end - seeds.start;
    let mut total = Counts::default();
    for seed in seeds {
        let outcome = simulate(seed, Plant::Nothing);
        assert!(
            outcome.violations.is_empty(),
            "make sim SEED={seed} SEEDS=1: {:#?}\nits history:\n{}",
            outcome.violations,
            outcome.history
        );
        let counts = outcome.counts;
        total.grants += counts.grants;
        total.excused += counts.excused;
        total.promotions += counts.promotions;
        total.faults += counts.faults;
        total.looks += counts.looks;
        total.writes += counts.writes;
        total.stale_writes_refused += counts.stale_writes_refused;
    }
    println!("sim: {runs} seeds, {total:?}");
    assert!(total.grants > 20 * runs && total.faults > 20 * runs && total.promotions > runs, "{total:?}");
}

/// The violations of the first seeds, until one says this.
fn is_found(plant: Plant, what: &str) -> bool {
    (1..=30).any(|seed| simulate(seed, plant).violations.iter().any(|violation| violation.contains(what)))
}

#[test]
fn holder_that_believes_twice_its_lease_is_found() {
    assert!(is_found(Plant::BelievesTwice, "believe to hold"));
}

#[test]
fn promotion_that_forgets_the_counter_is_found() {
    assert!(is_found(Plant::PromotionForgetsTheCounter, "was granted twice"));
}

#[test]
fn wake_up_that_is_lost_is_found() {
    assert!(is_found(Plant::MessagesGetLost, "still waits"));
}

#[cfg(tokio_unstable)]
#[test]
fn one_seed_is_one_history() {
    for seed in 1..=5 {
        assert_eq!(simulate(seed, Plant::Nothing), simulate(seed, Plant::Nothing), "seed {seed}");
    }
}
