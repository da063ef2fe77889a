//! `make bench-peers`: FLOCK beside other lock systems. Writes `benches/data/*.csv`, and draws `benches/plots/*.svg` from them.
//!
//! `bench-peers contention cost` runs these groups only; the groups are listed below. `scripts/bench-peers.sh` fetches the peers, starts
//! those that are servers, and tells by variables where they are; a peer whose variable is not set is skipped, and named.

#![forbid(unsafe_code)]

mod chaos;
mod contention;
mod cost;
mod data;
mod handoff;
mod load;
mod peers;
mod plots;
mod readers;
mod scale;

const GROUPS: [(&str, fn()); 8] = [
    ("contention", contention::run),
    ("cost", cost::run),
    ("readers", readers::run),
    ("handoff", handoff::run),
    ("load", load::run),
    ("scale", scale::run),
    ("chaos", chaos::run),
    ("plots", plots::draw),
];

fn main() {
    let chosen: Vec<String> = std::env::args().skip(1).collect();
    if let Some((chaos::worker::ARGUMENT, rest)) = chosen.split_first().map(|(first, rest)| (first.as_str(), rest)) {
        return chaos::worker::work(rest);
    }
    if let Some(unknown) = chosen.iter().find(|chosen| GROUPS.iter().all(|(group, _)| group != chosen)) {
        eprintln!("bench-peers: there is no group {unknown}, only {}", GROUPS.map(|(group, _)| group).join(", "));
        std::process::exit(2);
    }
    for (group, run) in GROUPS {
        if chosen.is_empty() || chosen.iter().any(|chosen| chosen == group) {
            println!("\n{group}: load average {}", data::load());
            run();
        }
    }
}
