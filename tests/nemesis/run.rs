//! One run: servers, workers, faults, an end in good order, and what is left then.

use std::sync::{Mutex, RwLock};
use std::thread::scope;
use std::time::Duration;

use flock_tests::cpu::used_memory;
use flock_tests::fenced_store::FencedStore;
use flock_tests::history::Recorder;
use flock_tests::network::Network;
use flock_tests::proxy::Cut;
use flock_tests::random::Random;
use flock_tests::reply::Reply;
use flock_tests::resp::Protocol;
use flock_tests::server::{Builder, Server};
use flock_tests::topology::wait_in_step;
use flock_tests::wait::{let_pass, poll};

use crate::audit::{Audit, Auditor, is_idle};
use crate::cutter::{CUTTERS, Cutter};
use crate::faults::Log;
use crate::judge::{Evidence, Verdict, judge};
use crate::operator::Operator;
use crate::report;
use crate::saboteur::{SABOTEURS, Saboteur};
use crate::site::{LOCKS, NODES, Site, ask};
use crate::unfenced::UnfencedStore;
use crate::worker::{Counts, Work, Worker};

/// Everything that is held ends by its lease within this, on any machine.
const IDLE_WITHIN: Duration = Duration::from_secs(30);
/// Backlogs and buffers of replicas come and go; locks that stay would be found by their count.
const MEMORY_GROWTH_MAX: u64 = 16 << 20;
const TABLE_GROWTH_MAX: i64 = 256 << 10;
const VISITS_WITHIN: Duration = Duration::from_secs(60);
const VIOLATIONS_SHOWN: usize = 10;

/// What is wrong on purpose, to see that the judge finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plant {
    Nothing,
    /// Holders believe in their lease for twice its length.
    BelievesTwice,
    /// Deletions of locks are kept from the history, as if the server lost them by itself.
    SilentDeletions,
    /// Replicas are promoted across cuts of the network, and nobody is told: as if the servers let two hold by themselves.
    SilentSplits,
}

/// A run to be made.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) name: &'static str,
    pub(crate) builder: Builder,
    pub(crate) seed: u64,
    pub(crate) workers: u32,
    pub(crate) lasts: Duration,
    /// The run goes on until there was so much work, on a machine that is busy with other things too; within bounds.
    pub(crate) visits_min: u64,
    /// Whether whole servers are killed, stopped and promoted.
    pub(crate) with_operator: bool,
    /// Whether the saboteurs and the cutters are at work.
    pub(crate) with_small_faults: bool,
    pub(crate) plant: Plant,
}

/// Makes the run, on this network if there is one, and judges it.
pub(crate) fn run(plan: &Plan, network: Option<Network>) -> Verdict {
    println!("nemesis: {} seed {}, {} workers, {:?}", plan.name, plan.seed, plan.workers, plan.lasts);
    let mut servers = start(plan, network.as_ref());
    let work = Work {
        site: Site::new(&servers, network),
        recorder: Recorder::new(),
        fenced: FencedStore::new(),
        unfenced: UnfencedStore::default(),
        counts: Counts::default(),
        sent_again: Mutex::default(),
        beliefs: if plan.plant == Plant::BelievesTwice { 2 } else { 1 },
    };
    let memory_before = memory(&servers[0]);
    let log = Log::default();
    let audit = disturb(plan, &work, &log, &mut servers);
    let remains = remains(&work, &servers, memory_before);
    let (visits, meetings) = work.unfenced.outcome();
    let evidence = Evidence {
        events: work.recorder.events(),
        faults: log.all(),
        audit,
        fenced: work.fenced.counts(),
        visits,
        meetings,
        remains,
    };
    let verdict = judge(&evidence);
    let version = servers[0].info("server").text("valkey_version").to_owned();
    let folder = report::write(plan, &evidence, &verdict, &work.counts, &version);
    if !verdict.violations.is_empty() {
        for (node, server) in servers.iter().enumerate() {
            let log = folder.join(format!("server-{node}.log"));
            std::fs::write(log, server.log()).expect("the folder of the report takes a log");
        }
    }
    println!(
        "nemesis: seed {}: {} faults, {} violations; fenced {:?}; unfenced {:?} in {visits} visits; {}",
        plan.seed,
        evidence.faults.faults.len(),
        verdict.violations.len(),
        evidence.fenced,
        verdict.double_holdings,
        folder.display()
    );
    verdict
}

/// The same, and wants nothing wrong.
#[track_caller]
pub(crate) fn run_soundly(plan: &Plan, network: Option<Network>) {
    let verdict = run(plan, network);
    let shown: Vec<_> = verdict.violations.iter().take(VIOLATIONS_SHOWN).cloned().collect();
    assert!(
        shown.is_empty(),
        "seed {}: {} violations:\n{}\nthe first, shrunk:\n{}",
        plan.seed,
        verdict.violations.len(),
        shown.join("\n"),
        report::lines(&verdict.shrunk)
    );
}

fn start(plan: &Plan, network: Option<&Network>) -> Vec<Server> {
    let builder = plan.builder.clone().appendonly().config("repl-backlog-size", "1mb").wall_clock(0);
    let placed = |builder: &Builder, node: usize| match network {
        Some(network) => builder.clone().within(&network.hosts()[node]),
        None => builder.clone(),
    };
    let primary = placed(&builder, 0).start();
    let follow = builder.replica_of(&primary);
    let mut servers = vec![primary];
    servers.extend((1..NODES).map(|node| placed(&follow, node).start()));
    for replica in &servers[1..] {
        wait_in_step(&servers[0], replica);
    }
    servers
}

/// Everybody at work at once, for as long as planned.
fn disturb(plan: &Plan, work: &Work, log: &Log, servers: &mut [Server]) -> Audit {
    let mut random = Random::from_seed(plan.seed);
    let (change, pause) = (&RwLock::new(()), &RwLock::new(()));
    scope(|threads| {
        let auditor = threads.spawn(move || Auditor::new(work).run());
        for number in 0..plan.workers {
            let random = Random::from_seed(random.number());
            threads.spawn(move || Worker::new(work, number, random).run());
        }
        for number in (0..SABOTEURS).filter(|_| plan.with_small_faults) {
            let random = Random::from_seed(random.number());
            let tells = plan.plant != Plant::SilentDeletions;
            threads.spawn(move || Saboteur { work, log, number, change, pause, random, tells }.run());
        }
        if plan.with_operator {
            let random = Random::from_seed(random.number());
            let splits_silently = plan.plant == Plant::SilentSplits;
            threads.spawn(move || Operator { work, log, servers, change, pause, random, splits_silently }.run());
        }
        if let Some(network) = work.site.network() {
            for _ in (0..CUTTERS).filter(|_| plan.with_small_faults) {
                let random = Random::from_seed(random.number());
                threads.spawn(move || Cutter { work, log, network, random }.run());
            }
        }
        let_pass(plan.lasts);
        poll(VISITS_WITHIN, || (work.unfenced.visits() >= plan.visits_min).then_some(()));
        work.site.end();
        auditor.join().expect("the auditor looks to the end")
    })
}

/// What is left that should not be, once all faults are over and all clients gone.
fn remains(work: &Work, servers: &[Server], memory_before: u64) -> Vec<String> {
    for gate in work.site.all_gates() {
        gate.heal();
        gate.cut(Cut::Reset);
    }
    let primary = work.site.primary();
    for command in [&["CLIENT", "UNPAUSE"][..], &["CONFIG", "SET", "maxmemory", "0"], &["DEL", "elsewhere"]] {
        ask(&work.site, primary, command);
    }
    // A string in the place of a lock, where a fault was cut short.
    for lock in &LOCKS {
        if ask(&work.site, primary, &["TYPE", lock.name]) == Some(Reply::Simple("string".into())) {
            ask(&work.site, primary, &["DEL", lock.name]);
        }
    }
    let mut remains = Vec::new();
    let mut conn = servers[primary].connect(Protocol::Resp2);
    if poll(IDLE_WITHIN, || is_idle(&mut conn).then_some(())).is_none() {
        remains.push(format!("{IDLE_WITHIN:?} after the end: {:?}", servers[primary].info("flock")));
    }
    for (node, server) in servers.iter().enumerate() {
        if node != primary {
            // After a cut, TCP may be silent for many seconds more. A new connection is not. Where nothing was cut, the link must do by itself.
            if work.site.network().is_some() {
                ask(&work.site, node, &["CLIENT", "KILL", "TYPE", "master"]);
            }
            wait_in_step(&servers[primary], server);
        }
        let mut conn = server.connect(Protocol::Resp2);
        if !is_idle(&mut conn) || conn.cmd(&["DBSIZE"]) != Reply::Int(0) {
            let keys = conn.cmd(&["KEYS", "*"]);
            remains.push(format!("server {node} still has {keys}: {:?}", server.info("flock")));
        }
        let info = server.info("flock");
        if info.number("flock_panics_caught") != 0 {
            remains.push(format!("server {node} has caught panics"));
        }
        if info.number("flock_table_bytes") > TABLE_GROWTH_MAX {
            remains.push(format!("the empty table of server {node} has {} bytes", info.text("flock_table_bytes")));
        }
        let memory = memory(server);
        if memory > memory_before + MEMORY_GROWTH_MAX {
            remains.push(format!("server {node} uses {memory} bytes, {memory_before} before"));
        }
        server.assert_alive();
    }
    remains
}

fn memory(server: &Server) -> u64 {
    used_memory(&mut server.connect(Protocol::Resp2))
}
