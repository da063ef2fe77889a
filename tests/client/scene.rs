//! The stage of each test: a server of its own, a client, and a bound on how long it may take.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use flock_client::{Builder, Flock, Guard, Released};
use flock_tests::args;
use flock_tests::resp::Protocol;
use flock_tests::server::{self, Server};
use flock_tests::wait::{let_pass, wait_until};
use tokio::runtime::Runtime;
use tokio::time::timeout;

/// No test takes longer: whoever hangs fails.
const TEST_WITHIN: Duration = Duration::from_secs(40);
/// For what should take a round trip, on a busy machine.
pub(crate) const SOON: Duration = Duration::from_secs(5);

pub(crate) fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Whether the long tier runs, or more: the same tests, bigger.
pub(crate) fn long_tier() -> bool {
    std::env::var("FLOCK_TEST_TIER").is_ok_and(|tier| tier != "quick")
}

/// How late a thread that only sleeps 2 ms at a time woke up, and when. A machine with more to do than it can stops everybody for a
/// while, the client's thread too: a bound on time then says nothing about the client.
static STALLS: Mutex<Vec<(Instant, Duration)>> = Mutex::new(Vec::new());

pub(crate) fn watch_the_machine() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        std::thread::spawn(|| {
            loop {
                let began = Instant::now();
                let_pass(ms(2));
                let late = began.elapsed().saturating_sub(ms(2));
                if late > ms(5) {
                    STALLS.lock().unwrap_or_else(PoisonError::into_inner).push((Instant::now(), late));
                }
            }
        });
    });
}

/// The longest stall since then.
pub(crate) fn stalled_since(began: Instant) -> Duration {
    let stalls = STALLS.lock().unwrap_or_else(PoisonError::into_inner);
    stalls.iter().rev().take_while(|(at, _)| *at >= began).map(|(_, late)| *late).max().unwrap_or_default()
}

/// Wants `elapsed`, of what began then, below `bound`; more if the machine stalled: several threads have their part in everything.
#[track_caller]
pub(crate) fn assert_in_time(began: Instant, elapsed: Duration, bound: Duration) {
    let stalled = stalled_since(began);
    assert!(elapsed < bound + 20 * stalled, "{elapsed:?}, and the longest stall was {stalled:?}");
}

/// Wants the hold kept, unless the machine stalled for so long that it could not be.
#[track_caller]
pub(crate) fn assert_kept(server: &Server, guard: &Guard, began: Instant, lease: Duration) {
    let kept = guard.is_valid() && is_current(server, guard);
    let stalled = stalled_since(began);
    assert!(kept || stalled > lease / 10, "a hold was lost, and the longest stall was {stalled:?}");
}

/// A runtime as users have it.
pub(crate) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("cannot make a runtime")
}

/// Runs a test with a server and a client.
#[track_caller]
pub(crate) fn on<F: Future<Output = ()>>(builder: &server::Builder, test: impl FnOnce(Arc<Server>, Flock) -> F) {
    let server = Arc::new(builder.start());
    within_bounds(async {
        let flock = connect(server.addr()).await;
        test(Arc::clone(&server), flock).await;
    });
}

/// Runs a test that makes its servers and clients by itself.
#[track_caller]
pub(crate) fn within_bounds(test: impl Future<Output = ()>) {
    watch_the_machine();
    let (runtime, began) = (runtime(), Instant::now());
    let done = runtime.block_on(async { timeout(TEST_WITHIN, test).await });
    runtime.shutdown_background();
    let stalled = stalled_since(began);
    assert!(
        done.is_ok(),
        "the test took longer than {TEST_WITHIN:?}; the longest stall was {stalled:?}, threads: {}",
        threads()
    );
}

/// The threads of this process with their states, to tell one that is stuck (R, D) from one that nobody has woken (S).
fn threads() -> String {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let stats = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
    // "17 (flock-client) S ..."
    stats.filter_map(|stat| stat.rsplit_once(')').map(|(name, rest)| format!("{name}){} ", &rest[..2]))).collect()
}

pub(crate) fn url(address: SocketAddr) -> String {
    format!("valkey://{address}")
}

pub(crate) fn quick(address: SocketAddr) -> Builder {
    Flock::builder(url(address))
}

pub(crate) async fn connect(address: SocketAddr) -> Flock {
    quick(address).connect().await.expect("the server is there")
}

/// Acquires within a time that no test should reach.
#[track_caller]
pub(crate) fn held(flock: &Flock, key: &str) -> impl Future<Output = Guard> + use<> {
    let lock = flock.lock(key).wait(SOON);
    async { lock.await.expect("the lock should be free soon") }
}

/// Gives back what is held until then.
pub(crate) async fn give_back(guard: Guard) {
    assert_eq!(guard.release().await.expect("the server answers"), Released::Released);
}

/// Acquires, and renews: so the next renewal is far away, and does not find out what a message is to tell.
pub(crate) async fn settled(flock: &Flock, key: &str) -> Guard {
    let guard = held(flock, key).await;
    guard.renew().await.expect("the lock is held");
    guard
}

/// The locks held on the server, and the requests that wait.
#[track_caller]
pub(crate) fn held_and_waiting(server: &Server) -> (i64, i64) {
    let info = server.info("flock");
    (info.number("flock_held"), info.number("flock_waiters"))
}

#[track_caller]
pub(crate) fn wait_until_nothing_is_left(server: &Server, within: Duration) {
    wait_until("nothing is held and nobody waits", within, || held_and_waiting(server) == (0, 0));
}

#[track_caller]
pub(crate) fn wait_until_waiting(server: &Server, requests: i64) {
    wait_until(&format!("{requests} wait"), SOON, || held_and_waiting(server).1 == requests);
}

/// The same, where the runtime must go on meanwhile because it is the only thread that works.
pub(crate) async fn until_waiting(server: &Server, requests: i64) {
    let waiting = async {
        while held_and_waiting(server).1 != requests {
            tokio::time::sleep(ms(1)).await;
        }
    };
    assert!(timeout(SOON, waiting).await.is_ok(), "waited {SOON:?} in vain until {requests} wait");
}

/// Waits until the server has been asked to do this at least so many times, by its own count.
#[track_caller]
pub(crate) fn wait_until_called(server: &Server, command: &str, times: i64) {
    let field = format!("cmdstat_{command}");
    wait_until(&format!("{command} was called {times} times"), SOON, || {
        let stats = server.info("commandstats");
        let calls = stats.get(&field).and_then(|stat| stat.strip_prefix("calls=")?.split(',').next()?.parse().ok());
        calls.unwrap_or(0) >= times
    });
}

/// Whether a current holder has this token.
#[track_caller]
pub(crate) fn is_current(server: &Server, guard: &Guard) -> bool {
    let reply = server.connect(Protocol::Resp2).cmd(&args!["FLOCK.CHECK", guard.key(), guard.token().get()]);
    reply.as_int() == 1
}

#[track_caller]
pub(crate) fn revoke(server: &Server, key: &str) {
    server.connect(Protocol::Resp2).cmd(&args!["FLOCK.REVOKE", key]);
}

/// The ids of the connections of clients of this crate: those that listen, or those that do not.
pub(crate) fn connections(server: &Server, listening: bool) -> Vec<i64> {
    let mut admin = server.connect(Protocol::Resp2);
    let list = admin.cmd(&["CLIENT", "LIST"]).as_str().to_owned();
    let mut ids = Vec::new();
    for line in list.lines() {
        let field = |name: &str| line.split_whitespace().find_map(|field| field.strip_prefix(name));
        let ours = field("lib-name=").is_some_and(|name| name.starts_with("redis-rs"));
        if ours && (field("sub=") != Some("0")) == listening {
            ids.extend(field("id=").and_then(|id| id.parse::<i64>().ok()));
        }
    }
    ids.sort_unstable();
    ids
}

#[track_caller]
pub(crate) fn kill(server: &Server, connections: &[i64]) {
    let mut admin = server.connect(Protocol::Resp2);
    for id in connections {
        admin.cmd(&args!["CLIENT", "KILL", "ID", *id]);
    }
}
