//! Leases that all end at once do not stop the server.
//!
//! The probe's longest round trip is shown as it was, and without the time in which server or probe waited for a processor that
//! another program had: the goal is about the latter. On an idle machine they are the same.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use flock_tests::random::Random;
use flock_tests::resp::{Conn, Protocol};
use flock_tests::server::{Generation, Info, Server};
use flock_tests::wait::{let_pass, wait_until};

use super::{builder, settle};
use crate::generator::{Batch, Pipe};
use crate::measure::{Summary, waited_for_processor};
use crate::names::{self, KEY_BYTES, OWNER_BYTES};
use crate::report::{Report, Unit};
use crate::scheme::{Pairs, Scheme};

/// Leases that end together.
#[derive(Clone, Copy)]
struct Burst {
    leases: usize,
    /// They end within this.
    window: Duration,
    /// Long enough to take them all before.
    lead: Duration,
}

const SMALL: Burst = Burst { leases: 100_000, window: Duration::from_millis(100), lead: Duration::from_millis(3000) };
const MILLION: Burst = Burst { leases: 1_000_000, window: Duration::from_secs(1), lead: Duration::from_secs(30) };
const PROBE_EVERY: Duration = Duration::from_millis(1);
const RUNS: usize = 5;
const RUNS_OF_STRINGS: usize = 3;
const RUNS_OF_A_MILLION: usize = 3;
/// Strings are slow to go; nothing else should be.
const GONE_WITHIN: Duration = Duration::from_secs(20);

/// Both goals.
pub fn no_stall(report: &mut Report, random: &mut Random) {
    report.section(
        "Burst: 100,000 leases end within the same 100 ms; longest PING round trip on another connection, one every ms",
    );
    let server = builder().start();
    settle();
    let idle = Probe::start(&server);
    let_pass(Duration::from_millis(500));
    show(report, "while nothing happens", &[idle.longest()]);
    let mut pairs = Pairs::new(&server, &Scheme::SetDelIfEq, random, 64, 4096);
    let busy = Probe::start(&server);
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(500) {
        pairs.run(64);
    }
    show(report, "while the server is busy with SET NX PX + DELIFEQ", &[busy.longest()]);

    let (stalls, ends) = runs(&server, &Scheme::Flock, SMALL, random, RUNS);
    let own = seconds(&stalls, |stall| stall.own);
    report.goal("while the leases end", Summary::of(&own), 0.010, Unit::Duration);
    show(report, "while the leases end", &stalls);
    report.goal("from the end of the last lease until all locks are free", Summary::of(&ends), 2.0, Unit::Duration);

    let (stalls, ends) = runs(&server, &Scheme::SetDelIfEq, SMALL, random, RUNS_OF_STRINGS);
    show(report, "the same with SET NX PX", &stalls);
    report.shown("the same with SET NX PX: until all keys are gone", Summary::of(&ends), Unit::Duration);
}

/// The goal of a million, with the allocators of both servers.
pub fn no_stall_by_a_million(report: &mut Report, random: &mut Random) {
    report.section("Burst: 1,000,000 leases end within the same second");
    for (generation, allocator) in [(Generation::New, "libc"), (Generation::Old, "jemalloc")] {
        let server = builder().generation(generation).start();
        settle();
        let (stalls, ends) = runs(&server, &Scheme::Flock, MILLION, random, RUNS_OF_A_MILLION);
        let own = seconds(&stalls, |stall| stall.own);
        report.goal(&format!("while the leases end, {allocator}"), Summary::of(&own), 0.010, Unit::Duration);
        show(report, &format!("while the leases end, {allocator}"), &stalls);
        report.shown("from the end of the last lease until all locks are free", Summary::of(&ends), Unit::Duration);
    }
}

fn show(report: &Report, what: &str, stalls: &[Stall]) {
    let (own, whole) = (seconds(stalls, |stall| stall.own), seconds(stalls, |stall| stall.whole));
    if stalls.len() == 1 {
        report.shown(what, Summary::of(&own), Unit::Duration);
    } else {
        let worst = own.iter().copied().fold(0.0, f64::max);
        report.shown(&format!("{what}, the worst of {} runs", stalls.len()), Summary::exactly(worst), Unit::Duration);
    }
    report.shown("  and with the waiting for a processor", Summary::of(&whole), Unit::Duration);
}

fn seconds(stalls: &[Stall], which: impl Fn(&Stall) -> Duration) -> Vec<f64> {
    stalls.iter().map(|stall| which(stall).as_secs_f64()).collect()
}

/// The longest round trip of each run, and how many seconds after the last end all was free.
fn runs(server: &Server, scheme: &Scheme, burst: Burst, random: &mut Random, times: usize) -> (Vec<Stall>, Vec<f64>) {
    (0..times).map(|_| run(server, scheme, burst, random)).unzip()
}

fn run(server: &Server, scheme: &Scheme, burst: Burst, random: &mut Random) -> (Stall, f64) {
    let mut conn = server.connect(Protocol::Resp2);
    let mut pipe = Pipe::open(server.addr());
    let Burst { leases, window, lead } = burst;
    let window_ms = u32::try_from(window.as_millis()).unwrap_or(u32::MAX);
    let first_end = Instant::now() + lead;
    let mut later = 0;
    for _ in 0..leases / 250 {
        let left = first_end.saturating_duration_since(Instant::now());
        assert!(!left.is_zero(), "the machine is too slow to take {leases} locks in {lead:?}");
        let left = u32::try_from(left.as_millis()).unwrap_or(u32::MAX);
        let mut batch = Batch::new(scheme.taken());
        for _ in 0..250 {
            let (key, owner) = (names::key(random, KEY_BYTES), names::owner(random, OWNER_BYTES));
            batch.push(&scheme.take(&key, &owner, left + later));
            later = (later + 1) % window_ms;
        }
        pipe.run(&batch);
    }
    assert_eq!(count(&mut conn, scheme), i64::try_from(leases).unwrap_or_default(), "all are held");
    let_pass((first_end - Duration::from_millis(50)).saturating_duration_since(Instant::now()));
    let probe = Probe::start(server);
    let last_end = first_end + window;
    let_pass(last_end.saturating_duration_since(Instant::now()));
    wait_until("all is free", GONE_WITHIN, || count(&mut conn, scheme) == 0);
    let late = Instant::now().saturating_duration_since(last_end);
    (probe.longest(), late.as_secs_f64())
}

/// How many are there.
fn count(conn: &mut Conn, scheme: &Scheme) -> i64 {
    match scheme {
        Scheme::Flock => Info::ask(conn, "flock_locks").number("flock_held"),
        _ => conn.cmd(&["DBSIZE"]).as_int(),
    }
}

/// A round trip.
#[derive(Clone, Copy, Default)]
struct Stall {
    /// As it was.
    whole: Duration,
    /// Without the time in which somebody else had the processor.
    own: Duration,
}

/// Asks for a PONG every millisecond, on a thread and a connection of its own.
struct Probe {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Stall>,
}

impl Probe {
    fn start(server: &Server) -> Probe {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let (mut conn, pid) = (Conn::open_raw(server.addr()), server.pid());
        let thread = std::thread::spawn(move || {
            let mut longest = Stall::default();
            while !seen.load(Ordering::Relaxed) {
                let waited = waited_for_processor(pid);
                let sent = Instant::now();
                conn.cmd(&["PING"]);
                let whole = sent.elapsed();
                let own = whole.saturating_sub(waited_for_processor(pid).saturating_sub(waited));
                longest = Stall { whole: longest.whole.max(whole), own: longest.own.max(own) };
                let_pass(PROBE_EVERY.saturating_sub(sent.elapsed()));
            }
            longest
        });
        Probe { stop, thread }
    }

    /// The longest round trips since the start, of either kind.
    fn longest(self) -> Stall {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the probe is answered")
    }
}
