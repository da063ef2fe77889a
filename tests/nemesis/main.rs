//! The nemesis: clients at work on a primary with two replicas while everything around them fails, and a judge of what they saw.
//!
//! | part | what it does |
//! |---|---|
//! | `worker` | takes locks in every way, works under them, gives back, crashes, hangs |
//! | `operator` | kills, stops, restarts and promotes servers, moves their clocks |
//! | `cutter` | loses packets of the real network, where there is one |
//! | `saboteur` | cuts, delays, drops, pauses, kills connections, deletes and evicts keys: many a second |
//! | `audit` | looks at the primary past all proxies: nobody waits for a free lock, nothing lasts beyond its time |
//! | `unfenced` | a storage without a fence, which counts who works beside whom |
//! | `judge`, `search` | the rules, and a second opinion by a search for an order |
//! | `report`, `plots` | `target/nemesis/<seed>/`: tables, plots, history, faults |
//!
//! Where network namespaces and a packet filter can be had, each server is on a host of its own (`flock_tests::network`), and packets between
//! servers, and between them and the clients of each proxy, are lost in the kernel. Elsewhere the run says `skipped` and why, and does
//! without the cutter.
//!
//! A seed decides what every worker and every fault does; which of them meet, the machine decides. So a seed that failed is run again
//! several times, and the history is kept. `FLOCK_SEED`, or `SEED`, gives the seed; the quick tier lasts 20 s, the long one 5 minutes, the
//! soak as many as `MINUTES` says.

mod audit;
mod cutter;
mod faults;
mod judge;
mod operator;
mod plots;
mod report;
mod run;
mod saboteur;
mod search;
mod site;
mod unfenced;
mod worker;

use std::time::Duration;

use flock_tests::history::now_ns;
use flock_tests::network::Network;
use flock_tests::server::{Generation, Server};

use crate::run::{Plan, Plant, run, run_soundly};
use crate::site::{GATES, NODES};

/// How long a run lasts, and how many work.
fn size() -> (Duration, u32) {
    match std::env::var("FLOCK_TEST_TIER").as_deref() {
        Ok("long") => (Duration::from_secs(300), 32),
        Ok("soak") => {
            let minutes = std::env::var("MINUTES").unwrap_or_else(|_| "60".into());
            let minutes: u64 = minutes.parse().unwrap_or_else(|_| panic!("MINUTES is a whole number, not {minutes}"));
            (Duration::from_secs(60 * minutes), 64)
        }
        _ => (Duration::from_secs(20), 16),
    }
}

fn seed() -> u64 {
    let given =
        ["FLOCK_SEED", "SEED"].into_iter().find_map(|name| std::env::var(name).ok()).filter(|seed| !seed.is_empty());
    given.map_or_else(now_ns, |seed| seed.parse().unwrap_or_else(|_| panic!("a seed is a whole number, not {seed}")))
}

fn plan(name: &'static str, generation: Generation) -> Plan {
    let (lasts, workers) = size();
    Plan {
        name,
        builder: Server::builder().generation(generation),
        seed: seed(),
        workers,
        lasts,
        visits_min: 0,
        with_operator: true,
        with_small_faults: true,
        plant: Plant::Nothing,
    }
}

#[test]
fn locks_keep_their_promises_under_faults_v9() {
    // D6, C2, C3, F7, L1 to L6.
    run_soundly(&plan("v9", Generation::New), network("cuts of the network, v9"));
}

#[test]
fn locks_keep_their_promises_under_faults_v8() {
    run_soundly(&plan("v8", Generation::Old), network("cuts of the network, v8"));
}

/// A host for each server, and an address for each gate.
fn network(faults: &str) -> Option<Network> {
    Network::for_test(faults, NODES, GATES)
}

/// A short run with a bug planted, and with small faults only; what was found.
fn found(name: &'static str, plant: Plant) -> Vec<String> {
    let plan = Plan { with_operator: false, ..short(name, plant) };
    run(&plan, None).violations
}

fn short(name: &'static str, plant: Plant) -> Plan {
    Plan { lasts: Duration::from_secs(4), visits_min: 250, workers: 16, plant, ..plan(name, Generation::New) }
}

#[test]
fn holder_that_believes_twice_its_lease_is_found() {
    let found = found("believes-twice", Plant::BelievesTwice);
    assert!(found.iter().any(|violation| violation.contains("neither had overstayed")), "{found:?}");
}

#[test]
fn lock_that_the_server_loses_is_found_by_both_opinions() {
    let found = found("silent-deletions", Plant::SilentDeletions);
    assert!(found.iter().any(|violation| violation.contains("lost within its lease")), "{found:?}");
    assert!(found.iter().any(|violation| violation.contains("no order explains")), "{found:?}");
}

#[test]
fn two_primaries_across_a_cut_are_found() {
    let Some(network) = network("two primaries across a cut") else { return };
    let plan = Plan { visits_min: 150, with_small_faults: false, ..short("silent-splits", Plant::SilentSplits) };
    let found = run(&plan, Some(network)).violations;
    assert!(found.iter().any(|violation| violation.contains("held at the same time")), "{found:?}");
    assert!(found.iter().any(|violation| violation.contains("no order explains")), "{found:?}");
}
