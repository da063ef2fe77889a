//! The same faults for each client: what do they leave behind?
//!
//! Four processes, four tasks in each, want four locks. A task asks, and sometimes loses patience; works in small steps, before each of
//! which it looks whether it still has its lock, as far as its client can tell; gives back, or just drops what it has. Meanwhile
//! connections are killed, processes are stopped for longer than a lease, and the server is killed and started again on an append-only
//! file that has every write. Then all faults end, nobody begins anew, and whoever waits has to be served.
//!
//! | part | what it does |
//! |---|---|
//! | [`worker`] | one of the processes |
//! | [`lockers`] | the clients that are compared |
//! | [`judge`] | what came of it, from what the workers did and what the server held |

pub(crate) mod judge;
mod lockers;
pub(crate) mod worker;

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, scope, spawn};
use std::time::{Duration, Instant};

use flock_tests::history::now_ns;
use flock_tests::random::Random;
use flock_tests::reply::Reply;
use flock_tests::resp::{Conn, Protocol};
use flock_tests::server::Server;
use flock_tests::wait::{let_pass, poll};

use self::judge::{Event, Sighting};
use self::lockers::{FLOCK, PEERS};
use crate::data::Table;

/// What each grant lasts, of every client.
pub(crate) const LEASE: Duration = Duration::from_secs(2);
/// The locks, and how many tasks of a process want them.
pub(crate) const LOCKS: [&str; 4] = ["lock:a", "lock:b", "lock:c", "lock:d"];
const PROCESSES: u64 = 4;
const LENGTH: Duration = Duration::from_secs(90);
/// After the last fault: many leases, so that whoever is not served by then has been forgotten.
const SERVED_WITHIN: Duration = Duration::from_secs(20);
/// The same faults at about the same times for every client.
const SEED: u64 = 20_261_130;
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// How often what was done.
#[derive(Default)]
struct Faults {
    kills: u64,
    stops: u64,
    restarts: u64,
}

pub(crate) fn run() {
    let columns = "peer,acquisitions,given_up,connections_killed,processes_stopped,servers_killed,orphans_given_up,orphans_dropped,\
                   orphans_released,orphans_s,hung,holders_after_loss,actions_after_loss";
    let mut table = Table::new("chaos", columns);
    for peer in PEERS {
        table.row(&one_run(peer));
    }
}

fn one_run(peer: &str) -> String {
    let mut server = Server::builder().appendonly().start();
    let mut workers: Vec<_> = (0..PROCESSES).map(|number| Worker::start(peer, server.addr(), SEED + number)).collect();
    let is_over = AtomicBool::new(false);
    let address = server.addr();
    let (faults, sightings, hung) = scope(|threads| {
        let watch = threads.spawn(|| watch(address, peer, &is_over));
        let faults = disturb(&mut server, &workers);
        workers.iter_mut().for_each(Worker::say_end);
        let hung = poll(SERVED_WITHIN, || workers.iter_mut().all(Worker::has_ended).then_some(()));
        is_over.store(true, Ordering::Relaxed);
        (faults, watch.join().expect("the server is watched to the end"), hung.is_none())
    });
    let events: Vec<_> = workers.into_iter().map(Worker::events).collect();
    let verdict = judge::judge(&events, &sightings);
    assert!(hung || verdict.waiting == 0, "a worker has ended and somebody in it waits");
    let Faults { kills, stops, restarts } = faults;
    format!("{peer},{},{},{kills},{stops},{restarts},{}", verdict.acquisitions, verdict.given_up, verdict.figures())
}

/// One of the processes.
struct Worker {
    process: Child,
    reader: JoinHandle<Vec<Event>>,
}

impl Worker {
    fn start(peer: &str, server: SocketAddr, seed: u64) -> Worker {
        let program = std::env::current_exe().expect("this program has a path");
        let mut command = Command::new(program);
        command.args([worker::ARGUMENT, peer, &server.to_string(), &seed.to_string()]);
        let mut process =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a process can be started");
        let lines = BufReader::new(process.stdout.take().expect("its output is piped")).lines();
        let reader = spawn(|| lines.map_while(Result::ok).map(|line| Event::parse(&line)).collect());
        Worker { process, reader }
    }

    /// Whoever waits is to be served, and nobody begins anew.
    fn say_end(&mut self) {
        drop(self.process.stdin.take());
    }

    fn has_ended(&mut self) -> bool {
        self.process.try_wait().expect("the state of a child can be asked").is_some()
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([&format!("-{name}"), &self.process.id().to_string()]).status();
        assert!(sent.expect("there is kill").success(), "a worker has died");
    }

    fn events(mut self) -> Vec<Event> {
        let _ = self.process.kill();
        let _ = self.process.wait();
        self.reader.join().expect("what a worker says can be read")
    }
}

/// One fault after the other.
fn disturb(server: &mut Server, workers: &[Worker]) -> Faults {
    let mut random = Random::from_seed(SEED);
    let mut faults = Faults::default();
    let end = Instant::now() + LENGTH;
    let mut stopped: Option<(&Worker, Instant)> = None;
    while Instant::now() < end {
        let_pass(Duration::from_millis(200 + random.below(200)));
        if let Some((worker, _)) = stopped.take_if(|(_, until)| Instant::now() >= *until) {
            worker.signal("CONT");
        }
        match random.below(16) {
            0 => {
                faults.restarts += 1;
                server.kill9();
                server.start_again();
            }
            1..9 if stopped.is_none() => {
                faults.stops += 1;
                let worker = &workers[usize::try_from(random.below(PROCESSES)).expect("an index fits")];
                worker.signal("STOP");
                stopped = Some((worker, Instant::now() + LEASE + Duration::from_millis(random.below(1000))));
            }
            _ => {
                let mut admin = server.connect(Protocol::Resp2);
                for kind in ["normal", "pubsub"] {
                    let killed = admin.cmd(&["CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes"]);
                    faults.kills += u64::try_from(killed.as_int()).expect("a count");
                }
            }
        }
    }
    if let Some((worker, _)) = stopped {
        worker.signal("CONT");
    }
    faults
}

/// Who held what, as the server saw it.
fn watch(server: SocketAddr, peer: &str, is_over: &AtomicBool) -> Vec<Sighting> {
    let mut sightings = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        // While the server is down nobody is seen, and the connection is made anew.
        let Ok(mut conn) = Conn::try_open_raw(server) else {
            let_pass(LOOK_EVERY);
            continue;
        };
        while !is_over.load(Ordering::Relaxed) {
            let seen: Option<Vec<_>> = LOCKS.iter().map(|lock| holder(&mut conn, peer, lock)).collect();
            let Some(seen) = seen else { break };
            let at = now_ns();
            let held = seen.into_iter().flatten();
            sightings.extend(held.map(|holder| Sighting { at, holder }));
            let_pass(LOOK_EVERY);
        }
    }
    sightings
}

/// By the name that its client has for it: `Some(None)` if nobody holds the lock, `None` if the server does not answer.
fn holder(conn: &mut Conn, peer: &str, lock: &str) -> Option<Option<String>> {
    let command = if peer == FLOCK { "FLOCK.INFO" } else { "GET" };
    match conn.try_cmd(&[command, lock]).ok()? {
        Reply::Nil => Some(None),
        error if error.error_code().is_some() => None,
        info if peer == FLOCK => Some(Some(info.field("holders").as_array()[0].field("token").as_int().to_string())),
        value => Some(Some(lockers::hexadecimal(value.as_bytes()))),
    }
}
