//! The folder that a run leaves: `target/nemesis/<seed>/<generation>/` with `report.md`, the history and the faults.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use flock_tests::history::{Event, save};

use crate::faults::Kind;
use crate::judge::{Evidence, Verdict};
use crate::run::Plan;
use crate::worker::Counts;

/// Writes it all down, and says where.
///
/// # Panics
/// If it cannot be written.
pub(crate) fn write(plan: &Plan, evidence: &Evidence, verdict: &Verdict, counts: &Counts, version: &str) -> PathBuf {
    let folder = target().join("nemesis").join(plan.seed.to_string()).join(plan.name);
    fs::create_dir_all(&folder).expect("cannot make the report's folder");
    save(&folder.join("history.jsonl"), &evidence.events).expect("cannot write the history");
    fs::write(folder.join("faults.jsonl"), fault_lines(evidence)).expect("cannot write the faults");
    fs::write(folder.join("report.md"), markdown(plan, evidence, verdict, counts, version))
        .expect("cannot write the report");
    if !verdict.shrunk.is_empty() {
        save(&folder.join("shrunk.jsonl"), &verdict.shrunk).expect("cannot write the shrunk history");
    }
    folder
}

fn fault_lines(evidence: &Evidence) -> String {
    let line = |(from_ns, until_ns, kind, node): &(u64, u64, Kind, usize)| {
        format!("{{\"from_ns\":{from_ns},\"until_ns\":{until_ns},\"kind\":\"{}\",\"server\":{node}}}\n", kind.words())
    };
    evidence.faults.faults.iter().map(line).collect()
}

fn markdown(plan: &Plan, evidence: &Evidence, verdict: &Verdict, counts: &Counts, version: &str) -> String {
    let mut text = format!(
        "# Nemesis, seed {}\n\nServer {version}, {} workers, {} s of faults.\n",
        plan.seed,
        plan.workers,
        plan.lasts.as_secs()
    );
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
    text
}

fn shown<T: ToString>(rows: Vec<(String, T)>) -> Vec<(String, String)> {
    rows.into_iter().map(|(name, value)| (name, value.to_string())).collect()
}

fn judgement(evidence: &Evidence, verdict: &Verdict) -> Vec<(String, String)> {
    let doubles = &verdict.double_holdings;
    shown(vec![
        ("violations".into(), verdict.violations.len()),
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
    let mut rows = vec![
        ("lateness in us, nothing suspended".to_owned(), quantiles(&evidence.audit.lateness_us)),
        ("lateness in us, server stopped, paused or busy".to_owned(), quantiles(&evidence.audit.lateness_suspended_us)),
    ];
    let mut kinds: Vec<_> = verdict.unavailable_ms.iter().map(|(outage, _)| outage.kind).collect();
    kinds.sort();
    kinds.dedup();
    for kind in kinds {
        let of_kind = verdict.unavailable_ms.iter().filter(|(outage, _)| outage.kind == kind);
        let gaps: Vec<i64> = of_kind.map(|(_, ms)| i64::try_from(*ms).unwrap_or(i64::MAX)).collect();
        rows.push((format!("ms without a grant after: {}", kind.words()), quantiles(&gaps)));
    }
    rows
}

fn quantiles(values: &[i64]) -> String {
    let mut values = values.to_vec();
    values.sort_unstable();
    let at = |hundredths: usize| values.get((values.len() * hundredths / 100).min(values.len().saturating_sub(1)));
    match (at(50), at(99), values.last()) {
        (Some(p50), Some(p99), Some(max)) => format!("p50 {p50}, p99 {p99}, max {max} ({} values)", values.len()),
        _ => "none".into(),
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

/// Cargo's target directory, which the running binary is in and which has a tag file of a fixed name.
fn target() -> PathBuf {
    let executable = std::env::current_exe().unwrap_or_default();
    let found = executable.ancestors().find(|directory| directory.join("CACHEDIR.TAG").exists());
    found.map_or_else(std::env::temp_dir, Path::to_path_buf)
}
