//! The client: pairs beside those of a plain connection, and what it costs to keep many locks, and to wait.

use std::time::{Duration, Instant};

use flock_client::{Flock, Guard};
use flock_tests::args;
use flock_tests::cpu::main_thread_cpu;
use flock_tests::random::Random;
use flock_tests::resp::{ANSWER_WITHIN, Protocol};
use flock_tests::server::{Info, Server};
use flock_tests::wait::{let_pass, wait_until};
use redis::AsyncConnectionConfig;
use redis::aio::MultiplexedConnection;
use rustix::time::{ClockId, clock_gettime};
use tokio::runtime::Runtime;

use super::{builder, runtime, settle};
use crate::measure::{Summary, alternate};
use crate::names::{self, KEY_BYTES, OWNER_BYTES};
use crate::report::{Report, Unit};
use crate::scheme::{COMPARE_AND_DELETE, LONG_LEASE_MS};

/// The time of a turn.
const TURN: Duration = Duration::from_millis(100);
const ROUNDS: usize = 25;
const LEASE: Duration = Duration::from_secs(30);

const HELD: usize = 10_000;
/// Renewed every second: at a third.
const SHORT_LEASE: Duration = Duration::from_secs(3);
const WATCHED_FOR: Duration = Duration::from_secs(10);

const WAITERS: usize = 1000;
const WANTED: &str = "lock:wanted-by-a-thousand";
/// So long that each waiter has asked again, as it does every 30 s.
const WAITED_FOR: Duration = Duration::from_secs(31);

/// The goals of the throughput: a lock taken and given back, on one connection.
pub fn beside_plain_connection(report: &mut Report, random: &mut Random) {
    report.section("Client: pairs per second / the redis crate's with SET NX PX and a compare-and-delete by EVALSHA, one connection");
    let server = builder().start();
    settle();
    let runtime = runtime();
    let flock = runtime.block_on(Flock::connect(format!("valkey://{}", server.addr()))).expect("the server answers");
    let beside = Flock::builder(format!("valkey://{}", server.addr())).on_runtime(runtime.handle().clone());
    let beside = runtime.block_on(beside.connect()).expect("the server answers");
    let plain = runtime.block_on(Plain::connect(&server));
    for tasks in [1, 64, 512] {
        let mut seeds = Random::from_seed(random.number());
        let mut more_seeds = Random::from_seed(random.number());
        let mut other_seeds = Random::from_seed(random.number());
        let (mut our_cpu, mut their_cpu, mut beside_cpu) = (CpuEach::default(), CpuEach::default(), CpuEach::default());
        let rates = alternate(
            ROUNDS,
            &mut [
                &mut || our_cpu.watch(|| pairs_of_flock(&runtime, &flock, &mut seeds, tasks)),
                &mut || their_cpu.watch(|| pairs_of_plain(&runtime, &plain, &mut more_seeds, tasks)),
                &mut || beside_cpu.watch(|| pairs_of_flock(&runtime, &beside, &mut other_seeds, tasks)),
            ],
        );
        let [ours, theirs, besides] = &rates[..] else { return };
        report.goal_at_least(&format!("{tasks} tasks"), Summary::of_ratios(ours, theirs), 1.00, Unit::Ratio);
        // The redis crate's connection is driven by the caller's runtime; so can ours be, at the price of a promise.
        let what = format!("{tasks} tasks, on the caller's runtime");
        report.shown(&what, Summary::of_ratios(besides, theirs), Unit::Ratio);
        report.shown("  flock-client, pairs per second", Summary::of(ours), Unit::Count);
        report.shown("  redis crate, pairs per second", Summary::of(theirs), Unit::Count);
        // On a machine with other work the rates say how long threads wait for a processor; this does not.
        report.shown("  flock-client, CPU of the process per pair", Summary::of(&our_cpu.0), Unit::Time);
        report.shown("  the same on the caller's runtime", Summary::of(&beside_cpu.0), Unit::Time);
        report.shown("  redis crate, CPU of the process per pair", Summary::of(&their_cpu.0), Unit::Time);
    }
}

/// Nanoseconds of this process for each pair, turn by turn.
#[derive(Default)]
struct CpuEach(Vec<f64>);

impl CpuEach {
    /// Does a turn, and gives what it gives: pairs per second.
    fn watch(&mut self, turn: impl FnOnce() -> f64) -> f64 {
        let (start, cpu) = (Instant::now(), own_cpu());
        let per_second = turn();
        let pairs = per_second * start.elapsed().as_secs_f64();
        self.0.push((own_cpu() - cpu).as_secs_f64() * 1e9 / pairs);
        per_second
    }
}

fn pairs_of_flock(runtime: &Runtime, flock: &Flock, seeds: &mut Random, tasks: usize) -> f64 {
    rate(runtime, seeds, tasks, |mut random, end| {
        let flock = flock.clone();
        async move {
            let mut pairs = 0;
            while Instant::now() < end {
                let key = names::key(&mut random, KEY_BYTES);
                pair_of_flock(&flock, &key).await;
                pairs += 1;
            }
            pairs
        }
    })
}

/// Takes a lock with flock-client and gives it back.
pub async fn pair_of_flock(flock: &Flock, key: &[u8]) {
    let guard = flock.lock(key).lease(LEASE).try_acquire().await.expect("the server answers");
    let _ = guard.expect("nobody else has it").release().await.expect("it is given back");
}

fn pairs_of_plain(runtime: &Runtime, plain: &Plain, seeds: &mut Random, tasks: usize) -> f64 {
    rate(runtime, seeds, tasks, |mut random, end| {
        let mut plain = plain.clone();
        async move {
            let mut pairs = 0;
            while Instant::now() < end {
                let (key, owner) = (names::key(&mut random, KEY_BYTES), names::owner(&mut random, OWNER_BYTES));
                plain.pair(&key, &owner).await;
                pairs += 1;
            }
            pairs
        }
    })
}

/// Pairs per second that `tasks` do together.
fn rate<F>(runtime: &Runtime, seeds: &mut Random, tasks: usize, work: impl Fn(Random, Instant) -> F) -> f64
where
    F: Future<Output = u64> + Send + 'static,
{
    runtime.block_on(async {
        let start = Instant::now();
        let tasks = (0..tasks).map(|_| tokio::spawn(work(Random::from_seed(seeds.number()), start + TURN)));
        let mut pairs = 0;
        for task in tasks.collect::<Vec<_>>() {
            pairs += task.await.expect("a task does not fail");
        }
        pairs as f64 / start.elapsed().as_secs_f64()
    })
}

/// What a user would write with the `redis` crate.
#[derive(Clone, Debug)]
pub struct Plain {
    conn: MultiplexedConnection,
    give: String,
}

impl Plain {
    /// Connects; the script is loaded then.
    pub async fn connect(server: &Server) -> Plain {
        let client = redis::Client::open(format!("redis://{}", server.addr())).expect("the address is one");
        // A busy machine may be slower than the timeout it has unless told otherwise.
        let config = AsyncConnectionConfig::new().set_response_timeout(Some(ANSWER_WITHIN));
        let conn = client.get_multiplexed_async_connection_with_config(&config).await;
        let mut conn = conn.expect("the server answers");
        let load = redis::cmd("SCRIPT").arg("LOAD").arg(COMPARE_AND_DELETE).query_async(&mut conn).await;
        Plain { conn, give: load.expect("the script is one") }
    }

    /// Takes a lock and gives it back.
    pub async fn pair(&mut self, key: &[u8], owner: &[u8]) {
        let lease_ms = 30_000;
        let mut take = redis::cmd("SET");
        take.arg(key).arg(owner).arg("NX").arg("PX").arg(lease_ms);
        let taken: Option<String> = take.query_async(&mut self.conn).await.expect("the server answers");
        assert!(taken.is_some(), "nobody else has it");
        let mut give = redis::cmd("EVALSHA");
        give.arg(&self.give).arg(1).arg(key).arg(owner);
        let given: u64 = give.query_async(&mut self.conn).await.expect("the server answers");
        assert_eq!(given, 1, "it was there");
    }
}

/// The goals of the keep-alive.
pub fn keep_alive(report: &mut Report, random: &mut Random) {
    report
        .section("Client: 10,000 locks held, leases of 3 s, renewed every second, for 10 s; CPU of the whole process");
    let server = builder().start();
    let runtime = runtime();
    let flock = runtime.block_on(Flock::connect(format!("valkey://{}", server.addr()))).expect("the server answers");
    let guards = runtime.block_on(hold(&flock, random));
    let renewals = || {
        let reply = server.connect(Protocol::Resp2).cmd(&["INFO", "commandstats"]);
        let calls = reply.as_str().split_once("cmdstat_FLOCK.RENEW:calls=").map_or("0", |(_, rest)| rest);
        calls.split(',').next().and_then(|calls| calls.parse::<u64>().ok()).unwrap_or_default()
    };
    let_pass(SHORT_LEASE);
    let (renewals_before, cpu_before) = (renewals(), own_cpu());
    let_pass(WATCHED_FOR);
    let (renewals, cpu) = (renewals() - renewals_before, own_cpu() - cpu_before);
    let each = cpu.as_secs_f64() * 1e9 / renewals as f64;
    report.goal("CPU per renewal", Summary::exactly(each), 5000.0, Unit::Time);
    let expired = Info::ask(&mut server.connect(Protocol::Resp2), "flock_locks").number("flock_expired");
    let invalid = guards.iter().filter(|guard| !guard.is_valid()).count();
    report.goal("leases that ended", Summary::exactly(expired as f64), 0.0, Unit::Count);
    report.goal("guards that are not valid", Summary::exactly(invalid as f64), 0.0, Unit::Count);
    report.shown("renewals in 10 s", Summary::exactly(renewals as f64), Unit::Count);
    drop(guards);
    // Or what is measured next pays for giving them back.
    runtime.block_on(flock.shutdown(ANSWER_WITHIN)).expect("all is given back");
}

async fn hold(flock: &Flock, random: &mut Random) -> Vec<Guard> {
    let mut guards = Vec::with_capacity(HELD);
    while guards.len() < HELD {
        let tasks = (0..100).map(|_| {
            let lock = flock.lock(names::key(random, KEY_BYTES)).lease(SHORT_LEASE);
            tokio::spawn(lock.try_acquire())
        });
        for task in tasks.collect::<Vec<_>>() {
            let guard = task.await.expect("a task does not fail").expect("the server answers");
            guards.push(guard.expect("nobody else has it"));
        }
    }
    guards
}

/// The goals of idle waiting.
pub fn idle_waiters(report: &mut Report) {
    report.section("Client: 1,000 tasks of one client wait for a lock that is held, for 31 s; CPU per second");
    let (server, control) = (builder().start(), builder().start());
    let runtime = runtime();
    let flock = runtime.block_on(Flock::connect(format!("valkey://{}", server.addr()))).expect("the server answers");
    let mut holder = server.connect(Protocol::Resp2);
    holder.cmd(&args!["FLOCK.ACQUIRE", WANTED, "holder", LONG_LEASE_MS]).as_token();
    let waiters: Vec<_> = (0..WAITERS).map(|_| runtime.spawn(flock.lock(WANTED).acquire())).collect();
    let waiting = || server.info("flock").number("flock_waiters");
    wait_until("all wait", ANSWER_WITHIN, || usize::try_from(waiting()) == Ok(WAITERS));
    settle();
    let cpu = || [own_cpu(), main_thread_cpu(server.pid()), main_thread_cpu(control.pid())];
    let before = cpu();
    let_pass(WAITED_FOR);
    let per_second = |now: Duration, before| (now - before).as_nanos() as f64 / WAITED_FOR.as_secs_f64();
    let [client, server_cpu, idle] = cpu();
    let [client_before, server_before, idle_before] = before;
    let idle = per_second(idle, idle_before);
    report.goal("the client", Summary::exactly(per_second(client, client_before)), 5e6, Unit::Time);
    let more = per_second(server_cpu, server_before) - idle;
    report.goal("the server, beyond one that does nothing", Summary::exactly(more), 5e6, Unit::Time);
    report.shown("a server that does nothing", Summary::exactly(idle), Unit::Time);
    let connections = server.info("clients").number("connected_clients");
    report.shown("connections of the client", Summary::exactly(connections as f64 - 2.0), Unit::Count);
    report.goal("waiters that are gone", Summary::exactly(WAITERS as f64 - waiting() as f64), 0.0, Unit::Count);
    waiters.iter().for_each(tokio::task::JoinHandle::abort);
}

/// Processor time of this process, of its threads that have ended too.
fn own_cpu() -> Duration {
    let spent = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(spent.tv_sec.unsigned_abs(), u32::try_from(spent.tv_nsec).unwrap_or_default())
}
