//! `make bench-check`: every goal with its measured value, PASS or MISS; fails if one is missed.
//!
//! All figures are ratios within one run, or bounds on memory and time. `bench-check pair memory` runs these groups only; the groups
//! are listed below; `million` takes two minutes and runs if asked for only. The server and the module are told by `VALKEY_SERVER`,
//! `VALKEY_SERVER_OLD` and `FLOCK_MODULE`.

use std::fs;
use std::process::ExitCode;
use std::time::Instant;

use flock_benches::check::{builder, burst, client, commands, handoff, memory, pair, readers};
use flock_benches::names::{KEY_BYTES, OWNER_BYTES};
use flock_benches::report::Report;
use flock_benches::scheme::{Scheme, hold};
use flock_tests::random::Random;

const GROUPS: [&str; 14] = [
    "pair",
    "handoff",
    "time",
    "commands",
    "readers",
    "memory",
    "others",
    "waiters",
    "names",
    "burst",
    "client",
    "keep-alive",
    "idle",
    "million",
];
/// What runs if asked for only.
const LONG: &str = "million";

fn main() -> ExitCode {
    let chosen: Vec<String> = std::env::args().skip(1).collect();
    if let Some(unknown) = chosen.iter().find(|group| !GROUPS.contains(&group.as_str())) {
        eprintln!("bench-check: there is no group {unknown}, only {}", GROUPS.join(", "));
        return ExitCode::FAILURE;
    }
    let wanted = |group: &str| (chosen.is_empty() && group != LONG) || chosen.iter().any(|chosen| chosen == group);
    let began = Instant::now();
    println!("FLOCK bench-check: medians over alternating rounds (first and third quartile)");
    describe_machine();
    let mut random = Random::new();
    let mut report = Report::default();
    if wanted("pair") {
        pair::beside_the_usual(&mut report, &mut random);
    }
    if wanted("handoff") {
        handoff::independent_of_waiters(&mut report, &mut random);
    }
    if wanted("time") {
        handoff::within_round_trips(&mut report, &mut random);
    }
    if wanted("commands") {
        commands::per_acquisition(&mut report, &mut random);
    }
    if wanted("readers") {
        readers::release_among_many(&mut report, &mut random);
    }
    if wanted("memory") || wanted("others") {
        let (many, many_strings) = memory::per_lock(&mut report, &mut random);
        if wanted("others") {
            let (few, few_strings) = (builder().start(), builder().start());
            hold(&few, &Scheme::Flock, &mut random, 1000, KEY_BYTES, OWNER_BYTES);
            hold(&few_strings, &Scheme::SetDelIfEq, &mut random, 1000, KEY_BYTES, OWNER_BYTES);
            pair::with_others_held(&mut report, &mut random, &few, &many, &few_strings, &many_strings);
        }
    }
    if wanted("waiters") {
        memory::per_waiter(&mut report, &mut random);
    }
    if wanted("names") {
        memory::per_released_name(&mut report, &mut random);
    }
    if wanted("burst") {
        burst::no_stall(&mut report, &mut random);
    }
    if wanted("client") {
        client::beside_plain_connection(&mut report, &mut random);
    }
    if wanted("keep-alive") {
        client::keep_alive(&mut report, &mut random);
    }
    if wanted("idle") {
        client::idle_waiters(&mut report);
    }
    if wanted(LONG) {
        burst::no_stall_by_a_million(&mut report, &mut random);
    }
    println!("\nit took {:.0} s; {}", began.elapsed().as_secs_f64(), load());
    report.verdict()
}

fn describe_machine() {
    let server = builder().start();
    let info = server.info("everything");
    let module = std::env::var("FLOCK_MODULE").unwrap_or_default();
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let model = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = model.lines().find_map(|line| line.strip_prefix("model name\t: ")).unwrap_or("unknown");
    println!("server {} ({}); module {module}", info.text("valkey_version"), info.text("mem_allocator"));
    println!("{cpus} processors, {model}; {}; {}", info.text("os"), load());
}

fn load() -> String {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let averages: Vec<&str> = load.split_whitespace().take(3).collect();
    format!("load average {}", averages.join(", "))
}
