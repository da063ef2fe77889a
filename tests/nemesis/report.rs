//! The folder that a run leaves: `target/nemesis/<seed>/<generation>/` with `report.md`, its plots, the history and the faults.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use flock_tests::history::{Event, save};

use crate::faults::Kind;
use crate::judge::{Evidence, Verdict};
use crate::plots::{self, Plot};
use crate::run::Plan;
use crate::worker::Counts;

/// Writes it all down, and says where.
///
/// # Panics
/// If it cannot be written.
pub(crate) fn write(plan: &Plan, evidence: &Evidence, verdict: &Verdict, counts: &Counts, version: &str) -> PathBuf {
    let folder = folder(plan);
    fs::create_dir_all(&folder).expect("cannot make the report's folder");
    save(&folder.join("history.jsonl"), &evidence.events).expect("cannot write the history");
    fs::write(folder.join("faults.jsonl"), fault_lines(evidence)).expect("cannot write the faults");
    let plots = plots::draw(&folder, evidence, verdict);
    fs::write(folder.join("report.md"), markdown(plan, evidence, verdict, counts, version, &plots))
        .expect("cannot write the report");
    if !verdict.shrunk.is_empty() {
        save(&folder.join("shrunk.jsonl"), &verdict.shrunk).expect("cannot write the shrunk history");
    }
    folder
}

fn folder(plan: &Plan) -> PathBuf {
    target().join("nemesis").join(plan.seed.to_string()).join(plan.name)
}

fn fault_lines(evidence: &Evidence) -> String {
    let line = |(from_ns, until_ns, kind, node): &(u64, u64, Kind, usize)| {
        format!("{{\"from_ns\":{from_ns},\"until_ns\":{until_ns},\"kind\":\"{}\",\"server\":{node}}}\n", kind.words())
    };
    evidence.faults.faults.iter().map(line).collect()
}

fn markdown(
    plan: &Plan,
    evidence: &Evidence,
    verdict: &Verdict,
    counts: &Counts,
    version: &str,
    plots: &[Plot],
) -> String {
    let mut text = format!(
        "# Nemesis, seed {}\n\nServer {version}, {} workers, {} s of faults.\n",
        plan.seed,
        plan.workers,
        plan.lasts.as_secs()
    );
    table(&mut text, "Summary", &summary(evidence, verdict));
    table(&mut text, "Judgement", &judgement(evidence, verdict));
    if !verdict.violations.is_empty() {
        text += "\n## Violations\n\n";
        for violation in &verdict.violations {
            let _ = writeln!(text, "* {violation}");
        }
    }
    table(&mut text, "Clients", &clients(counts));
    let totals: Vec<_> = evidence.audit.totals.iter().map(|(name, total)| ((*name).to_owned(), *total)).collect();
    table(&mut text, "Servers, summed over all starts and roles", &shown(totals));
    table(&mut text, "Times", &times(evidence, verdict));
    let faults = evidence.faults.by_kind();
    let mut rows: Vec<_> = faults.iter().map(|(kind, count)| (kind.words(), *count)).collect();
    rows.push(("all".into(), faults.values().sum()));
    table(&mut text, "Faults", &shown(rows));
    text += "\n## Plots\n";
    for (file, caption) in plots {
        let _ = write!(text, "\n{caption}:\n\n![{caption}]({file})\n");
    }
    text
}

/// What a run is about. INFO's counters are looked at many times a second, so what a server counted right before its death is not in them.
fn summary(evidence: &Evidence, verdict: &Verdict) -> Vec<(String, String)> {
    let counted = |name: &str| evidence.audit.totals.get(name).copied().unwrap_or(0).to_string();
    vec![
        ("violations".into(), verdict.violations.len().to_string()),
        ("faults injected, by kind below".into(), evidence.faults.faults.len().to_string()),
        ("grants, handoffs included".into(), counted("flock_grants")),
        ("handoffs to waiters".into(), counted("flock_handoffs")),
        ("waits whose time was up".into(), counted("flock_timed_out")),
        ("waits that ended otherwise, without a grant".into(), counted("flock_waits_ended")),
        ("leases that ended by themselves (expiries)".into(), counted("flock_expired")),
    ]
}

fn shown<T: ToString>(rows: Vec<(String, T)>) -> Vec<(String, String)> {
    rows.into_iter().map(|(name, value)| (name, value.to_string())).collect()
}

fn judgement(evidence: &Evidence, verdict: &Verdict) -> Vec<(String, String)> {
    let doubles = &verdict.double_holdings;
    shown(vec![
        ("events in the history".into(), evidence.events.len()),
        ("windows searched for an order".into(), verdict.opinion.windows),
        ("operations in them".into(), verdict.opinion.operations),
        ("grants that clients heard of".into(), verdict.grants.0),
        ("of them, not at once met by a fault that may lose holds".into(), verdict.grants.1),
        ("looks of the auditor".into(), usize::try_from(evidence.audit.looks).unwrap_or(usize::MAX)),
        ("of them, undisturbed".into(), usize::try_from(evidence.audit.quiet_looks).unwrap_or(usize::MAX)),
        ("queues compared".into(), evidence.audit.queues.len()),
        ("fenced store: writes accepted".into(), usize::try_from(evidence.fenced.accepted).unwrap_or(usize::MAX)),
        ("fenced store: stale writes refused".into(), usize::try_from(evidence.fenced.refused).unwrap_or(usize::MAX)),
        ("unfenced store: visits".into(), usize::try_from(evidence.visits).unwrap_or(usize::MAX)),
        ("unfenced store: double holdings, a holder overstayed".into(), doubles.overstayed),
        ("unfenced store: double holdings, a fault lost the hold".into(), doubles.lost),
        ("unfenced store: double holdings, unexplained".into(), doubles.unexplained),
    ])
}

fn clients(counts: &Counts) -> Vec<(String, String)> {
    let rows = [
        ("acquisitions", &counts.acquisitions),
        ("granted to a try", &counts.by_try),
        ("granted to BLOCK", &counts.by_block),
        ("granted to QUEUE, by its answer", &counts.by_queue),
        ("granted to QUEUE, heard on the channel", &counts.heard),
        ("refused", &counts.refused),
        ("given up", &counts.given_up),
        ("answers that never came, or say nothing", &counts.unknown),
        ("renewals", &counts.renewals),
        ("holds found lost", &counts.lost),
        ("releases", &counts.released),
        ("left to their lease", &counts.abandoned),
        ("crashes", &counts.crashed),
        ("hangs beyond the lease", &counts.hung),
    ];
    rows.map(|(name, counter)| (name.to_owned(), counter.load(Ordering::Relaxed).to_string())).to_vec()
}

fn times(evidence: &Evidence, verdict: &Verdict) -> Vec<(String, String)> {
    let waited_us: Vec<i64> = verdict.told.iter().filter_map(|told| told.waited_us).collect();
    let mut rows = vec![
        (
            "ms from the first request in BLOCK or QUEUE until its client heard of the grant".into(),
            quantiles(&in_ms(&waited_us)),
        ),
        ("lateness in us, nothing suspended".to_owned(), quantiles(&evidence.audit.lateness_us)),
        ("lateness in us, server stopped, paused or busy".to_owned(), quantiles(&evidence.audit.lateness_suspended_us)),
    ];
    let by_kind = verdict.unavailable_us_by_kind();
    rows.extend(
        by_kind.iter().map(|(kind, us)| (format!("ms without a grant after: {}", kind.words()), quantiles(&in_ms(us)))),
    );
    rows
}

fn in_ms(values_us: &[i64]) -> Vec<i64> {
    values_us.iter().map(|us| us / 1000).collect()
}

fn quantiles(values: &[i64]) -> String {
    match Quantiles::of(values) {
        Some(Quantiles { p50, p99, max }) => format!("p50 {p50}, p99 {p99}, max {max} ({} values)", values.len()),
        None => "none".into(),
    }
}

/// What is told of many times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quantiles {
    pub(crate) p50: i64,
    pub(crate) p99: i64,
    pub(crate) max: i64,
}

impl Quantiles {
    /// Nothing of no values.
    pub(crate) fn of(values: &[i64]) -> Option<Quantiles> {
        let mut values = values.to_vec();
        values.sort_unstable();
        let max = *values.last()?;
        let at = |hundredths: usize| values[(values.len() * hundredths / 100).min(values.len() - 1)];
        Some(Quantiles { p50: at(50), p99: at(99), max })
    }
}

fn table(text: &mut String, title: &str, rows: &[(String, String)]) {
    let _ = write!(text, "\n## {title}\n\n| | |\n|---|---|\n");
    for (name, value) in rows {
        let _ = writeln!(text, "| {name} | {value} |");
    }
}

/// The lines of a history, for a person.
pub(crate) fn lines(events: &[Event]) -> String {
    events.iter().map(|event| format!("{event:?}\n")).collect()
}

/// Cargo's target directory: the one above its folder for what integration tests write.
fn target() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().map_or_else(std::env::temp_dir, Path::to_path_buf)
}

#[cfg(test)]
mod tests {
    use flock_tests::history::{Call, Phase, Verb};
    use flock_tests::server::Generation;

    use super::*;
    use crate::audit::Audit;
    use crate::faults::{Entries, Outage};
    use crate::judge::judge;
    use crate::plan;

    const MS: u64 = 1_000_000;

    /// Two seconds: a grant at every 10 ms to a waiter in BLOCK, of 1 to 200 ms.
    fn history() -> Vec<Event> {
        let acquired = |op: u64| {
            let (key, owner) = (format!("k{op}"), format!("b-1-{op}-500"));
            let call = Call::new(Verb::Acquire, &key, &owner).lease_ms(1);
            let granted = Phase::Ok { token: Some(op) };
            [(op * 10 * MS, Phase::Invoke(call)), (op * 11 * MS, granted)].map(|(at_ns, phase)| Event {
                at_ns,
                process: 1,
                op,
                phase,
            })
        };
        let mut events: Vec<_> = (1..=200).flat_map(acquired).collect();
        events.sort_by_key(|event| event.at_ns);
        events
    }

    fn evidence() -> Evidence {
        let fault = |at_ms: u64, kind| (at_ms * MS, (at_ms + 5) * MS, kind, 0);
        let faults = vec![fault(300, Kind::Failover), fault(500, Kind::Cut), fault(700, Kind::Cut)];
        let outages = vec![Outage { kind: Kind::Failover, from_ns: 300 * MS, node: 0 }];
        let counted = [
            ("flock_grants", 201),
            ("flock_handoffs", 199),
            ("flock_timed_out", 7),
            ("flock_waits_ended", 5),
            ("flock_expired", 3),
        ];
        Evidence {
            events: history(),
            faults: Entries { faults, splits: Vec::new(), outages },
            audit: Audit { lateness_us: vec![90, 110], totals: counted.into(), ..Audit::default() },
            fenced: flock_tests::fenced_store::Counts::default(),
            visits: 0,
            meetings: Vec::new(),
            remains: vec!["something is left".into()],
        }
    }

    /// The folder, without what an earlier run of the test has left there, and the report.
    fn written(name: &'static str, evidence: &Evidence) -> (PathBuf, String) {
        let plan = Plan { seed: 0, ..plan(name, Generation::New) };
        let _ = fs::remove_dir_all(folder(&plan));
        let folder = write(&plan, evidence, &judge(evidence), &Counts::default(), "0");
        let report = fs::read_to_string(folder.join("report.md")).expect("there is a report");
        (folder, report)
    }

    #[test]
    fn report_states_what_happened_and_names_its_plots() {
        let (folder, report) = written("made-up", &evidence());
        for row in [
            "| violations | 1 |",
            "| faults injected, by kind below | 3 |",
            "| grants, handoffs included | 201 |",
            "| handoffs to waiters | 199 |",
            "| waits whose time was up | 7 |",
            "| waits that ended otherwise, without a grant | 5 |",
            "| leases that ended by themselves (expiries) | 3 |",
            "until its client heard of the grant | p50 101, p99 199, max 200 (200 values) |",
            "| failover | 1 |",
            "| cut | 2 |",
        ] {
            assert!(report.contains(row), "{row} is not in {report}");
        }
        let links = report.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        let plots: Vec<_> = links.collect();
        assert_eq!(plots, ["over-time.svg", "waits.svg", "faults.svg", "unavailable.svg", "lateness.svg"]);
        let shown = [
            &[
                "grants per second, as clients heard of them: 200 in all",
                ": 1 in all",
                ": 2 in all",
                "seconds since the beginning",
            ][..],
            &["p50 101 ms", "p99 199 ms", "max 200 ms", "grants, 200 in all"],
            &["failover", "cut", "3 in all"],
            &["failover (1)", "ms (log scale)"],
            &["max 0.11 ms", "times seen, 2 in all"],
        ];
        for (file, shown) in plots.iter().zip(shown) {
            let svg = fs::read_to_string(folder.join(file)).expect("there is the plot");
            assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{file}");
            for text in shown {
                assert!(svg.contains(text), "{text} is not in {file}");
            }
        }
    }

    #[test]
    fn plots_without_anything_to_show_are_not_named() {
        let evidence = Evidence { faults: Entries::default(), audit: Audit::default(), ..evidence() };
        let (_, report) = written("made-up-quiet", &evidence);
        assert_eq!(report.matches(".svg").count(), 2, "{report}");
    }
}
