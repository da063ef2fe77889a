//! What a lock taken and given back costs the server: processor time of its main thread, everybody in turns on the same server.

use flock_benches::check::{builder, settle, wait_until_rehashed};
use flock_benches::measure::{Summary, alternate};
use flock_benches::names::{KEY_BYTES, OWNER_BYTES};
use flock_benches::scheme::{Pairs, Scheme, hold};
use flock_tests::random::Random;
use flock_tests::server::{Builder, Server};
use flock_tests::topology::Replicated;

use crate::data::Table;

const ROUNDS: usize = 40;
const NAMES: usize = 1 << 14;

pub(crate) fn run() {
    let mut table = Table::new("cost", "server,pipeline,scheme,us,us_low,us_high,to_flock,to_flock_low,to_flock_high");
    let mut random = Random::new();
    let plain = builder();
    let logging = builder().config("appendonly", "yes").config("appendfsync", "everysec");
    for (what, builder, replicas) in [
        ("no file; no replica", &plain, 0),
        ("append-only file everysec", &logging, 0),
        ("one replica", &plain, 1),
        ("append-only file everysec; one replica", &logging, 1),
    ] {
        let servers = start(builder, replicas);
        for depth in [64, 1] {
            measure(&mut table, &mut random, what, &servers.primary, depth);
        }
    }
    for (what, count) in [("1000 other locks held", 1000), ("1000000 other locks held", 1_000_000)] {
        let server = plain.start();
        hold(&server, &Scheme::Flock, &mut random, count, KEY_BYTES, OWNER_BYTES);
        wait_until_rehashed(&server);
        for depth in [64, 1] {
            measure(&mut table, &mut random, what, &server, depth);
        }
    }
}

fn start(builder: &Builder, replicas: usize) -> Replicated {
    let servers = Replicated::start(builder, replicas);
    settle();
    servers
}

fn measure(table: &mut Table, random: &mut Random, what: &str, server: &Server, depth: usize) {
    let schemes = [
        ("FLOCK", Scheme::Flock),
        ("PING PING", Scheme::Ping),
        ("SET + DELIFEQ", Scheme::SetDelIfEq),
        ("SET + script", Scheme::set_script(server)),
        ("fenced Lua", Scheme::fenced_lua(server)),
        ("Redisson", Scheme::redisson(server)),
        ("Redisson fair", Scheme::redisson_fair(server)),
    ];
    let turn = if depth == 1 { 256 } else { 16 * depth };
    let mut pairs: Vec<Pairs<'_>> =
        schemes.iter().map(|(_, scheme)| Pairs::new(server, scheme, random, depth, NAMES)).collect();
    let mut costs: Vec<_> = pairs.iter_mut().map(|pairs| move || pairs.cost(turn)).collect();
    let mut contestants: Vec<&mut dyn FnMut() -> f64> = costs.iter_mut().map(|cost| cost as _).collect();
    let samples = alternate(ROUNDS, &mut contestants);
    let Some((flock, _)) = samples.split_first() else { return };
    for ((name, _), samples) in schemes.iter().zip(&samples) {
        let (us, ratio) = (Summary::of(samples).scaled(1e-3), Summary::of_ratios(samples, flock));
        let figures = [us, ratio].map(|figure| format!("{:.2},{:.2},{:.2}", figure.median, figure.low, figure.high));
        table.row(&format!("{what},{depth},{name},{}", figures.join(",")));
    }
}
