//! Server cost of a pair: ACQUIRE and RELEASE of a free lock.

use flock_tests::random::Random;
use flock_tests::server::Server;
use flock_tests::topology::Replicated;

use super::{builder, settle};
use crate::measure::{Summary, alternate};
use crate::report::{Report, Unit};
use crate::scheme::{Pairs, Scheme};

/// Distinct names of each contestant.
const NAMES: usize = 1 << 16;
const DEPTH: usize = 64;
/// Pairs per turn: about 8 ms of the server.
const TURN: usize = 24 * DEPTH;

/// Goals against what a user would write instead, without append-only file and replica; and how it is with them.
pub fn beside_the_usual(report: &mut Report, random: &mut Random) {
    report.section(
        "Pair: ACQUIRE + RELEASE of free locks, main-thread CPU; no append-only file, no replica, save \"\"; key 20 bytes, owner 32",
    );
    let server = builder().start();
    let plain = builder().without_module().start();
    let lua = Scheme::fenced_lua(&server);
    settle();
    for (depth, turn, rounds) in [(DEPTH, TURN, 150), (1, 256, 60)] {
        let names = if depth == 1 { NAMES / 8 } else { NAMES };
        let mut flock = Pairs::new(&server, &Scheme::Flock, random, depth, names);
        let mut set = Pairs::new(&server, &Scheme::SetDelIfEq, random, depth, names);
        let mut scripts = Pairs::new(&server, &lua, random, depth, names);
        let mut elsewhere = Pairs::new(&plain, &Scheme::SetDelIfEq, random, depth, names);
        let cost = alternate(
            rounds,
            &mut [&mut || flock.cost(turn), &mut || set.cost(turn), &mut || scripts.cost(turn), &mut || {
                elsewhere.cost(turn)
            }],
        );
        let [flock, set, scripts, elsewhere] = &cost[..] else { return };
        let what = |what: &str| format!("pipeline {depth}: {what}");
        let (beside_set, beside_lua) = (Summary::of_ratios(flock, set), Summary::of_ratios(flock, scripts));
        if depth == DEPTH {
            report.goal(&what("/ SET NX PX + DELIFEQ"), beside_set, 1.00, Unit::Ratio);
            report.goal(&what("/ fenced Lua pair (EVALSHA)"), beside_lua, 0.40, Unit::Ratio);
        } else {
            report.shown(&what("/ SET NX PX + DELIFEQ"), beside_set, Unit::Ratio);
            report.shown(&what("/ fenced Lua pair (EVALSHA)"), beside_lua, Unit::Ratio);
        }
        let beside_plain = Summary::of_ratios(flock, elsewhere);
        report.shown(&what("/ SET NX PX + DELIFEQ, server without the module"), beside_plain, Unit::Ratio);
        report.shown(&what("FLOCK pair"), Summary::of(flock), Unit::Time);
        report.shown(&what("SET NX PX + DELIFEQ"), Summary::of(set), Unit::Time);
        report.shown(&what("fenced Lua pair"), Summary::of(scripts), Unit::Time);
    }
    drop((server, plain));

    let logging = builder().config("appendonly", "yes").config("appendfsync", "everysec").start();
    with_listeners(report, random, &logging, "append-only file, everysec");
    drop(logging);
    let servers = Replicated::start(&builder(), 1);
    with_listeners(report, random, &servers.primary, "one replica");
}

/// With somebody to replicate to.
fn with_listeners(report: &Report, random: &mut Random, server: &Server, who: &str) {
    settle();
    let mut flock = Pairs::new(server, &Scheme::Flock, random, DEPTH, NAMES);
    let mut set = Pairs::new(server, &Scheme::SetDelIfEq, random, DEPTH, NAMES);
    let cost = alternate(80, &mut [&mut || flock.cost(TURN), &mut || set.cost(TURN)]);
    let [flock, set] = &cost[..] else { return };
    let what = format!("pipeline {DEPTH}, {who}:");
    report.shown(&format!("{what} / SET NX PX + DELIFEQ"), Summary::of_ratios(flock, set), Unit::Ratio);
    report.shown(&format!("{what} FLOCK pair"), Summary::of(flock), Unit::Time);
}

/// The goal with many others held. `few` and `many` hold locks, `many_strings` holds as many strings.
pub fn with_others_held(
    report: &mut Report,
    random: &mut Random,
    few: &Server,
    many: &Server,
    few_strings: &Server,
    many_strings: &Server,
) {
    report.section("Pair with 1,000,000 other locks held (leases of 12 h) / with 1,000; pipeline 64");
    let mut pairs = [
        Pairs::new(many, &Scheme::Flock, random, DEPTH, NAMES),
        Pairs::new(few, &Scheme::Flock, random, DEPTH, NAMES),
        Pairs::new(many_strings, &Scheme::SetDelIfEq, random, DEPTH, NAMES),
        Pairs::new(few_strings, &Scheme::SetDelIfEq, random, DEPTH, NAMES),
    ];
    let [a, b, c, d] = &mut pairs;
    let cost =
        alternate(120, &mut [&mut || a.cost(TURN), &mut || b.cost(TURN), &mut || c.cost(TURN), &mut || d.cost(TURN)]);
    let [many, few, many_strings, few_strings] = &cost[..] else { return };
    report.goal("FLOCK pair, 1,000,000 / 1,000", Summary::of_ratios(many, few), 1.25, Unit::Ratio);
    report.shown("FLOCK pair, 1,000,000", Summary::of(many), Unit::Time);
    report.shown("FLOCK pair, 1,000", Summary::of(few), Unit::Time);
    let strings = Summary::of_ratios(many_strings, few_strings);
    report.shown("SET NX PX + DELIFEQ with as many strings, 1,000,000 / 1,000", strings, Unit::Ratio);
    let beside = Summary::of_ratios(many, many_strings);
    report.shown("FLOCK pair / SET NX PX + DELIFEQ, both with 1,000,000", beside, Unit::Ratio);
}
