//! Small faults, many a second: of connections on their way through the proxies and at the server, of keys, and of the server for a moment.
//!
//! Several saboteurs are at work at once, each at gates of its own, beside the operator: so faults overlap.

use std::sync::RwLock;
use std::time::Duration;

use flock_tests::args;
use flock_tests::history::now_ns;
use flock_tests::proxy::{Cut, Direction, Fault};
use flock_tests::random::Random;
use flock_tests::reply::Reply;
use flock_tests::wait::let_pass;

use crate::faults::{Kind, Log, Loss};
use crate::site::{GATES, LOCKS, ask};
use crate::worker::Work;

/// How many are at work.
pub(crate) const SABOTEURS: usize = 3;
/// Where RENAME carries a lock, and what makes memory short.
const ELSEWHERE: &str = "elsewhere";

/// One of those who inject small faults.
pub(crate) struct Saboteur<'a> {
    pub(crate) work: &'a Work,
    pub(crate) log: &'a Log,
    pub(crate) number: usize,
    /// See the operator.
    pub(crate) change: &'a RwLock<()>,
    /// Held during pauses: Valkey 8.0.1 dies of `CLIENT UNBLOCK` for a client that a pause holds up, with and without a module; and
    /// pauses end by the wall clock, which the operator steps.
    pub(crate) pause: &'a RwLock<()>,
    pub(crate) random: Random,
    /// False for a planted bug: deletions are not told to the history, as if the server lost locks by itself.
    pub(crate) tells: bool,
}

impl Saboteur<'_> {
    /// Injects one fault after the other until the run is over.
    pub(crate) fn run(mut self) {
        while !self.work.site.is_over() {
            let_pass(Duration::from_millis(self.random.below(60)));
            let kind = self.kind();
            let node = self.work.site.primary();
            let from_ns = now_ns();
            if self.inject(kind, node) {
                self.log.injected(kind, node, from_ns);
            }
        }
    }

    fn kind(&mut self) -> Kind {
        if !self.tells && self.random.one_in(2) {
            return self.random.pick(&[Kind::Del, Kind::Unlink, Kind::Revoke]);
        }
        match self.random.below(100) {
            0..8 => Kind::Cut,
            8..16 => Kind::Reset,
            16..20 => Kind::HalfOpen,
            20..28 => Kind::Delay,
            28..36 => Kind::DropReplies,
            36..40 => Kind::DropRequests,
            40..46 => Kind::HoldReplies,
            46..50 => Kind::Trickle,
            50..56 => Kind::CutWithinReply,
            56..58 => Kind::PauseWrites,
            58 => Kind::PauseAll,
            59..61 => Kind::DebugSleep,
            61..63 => Kind::BusyScript,
            63 => Kind::Bgsave,
            64 => Kind::BgrewriteAof,
            65..67 => Kind::Evict,
            67..70 => Kind::ConfigSet,
            70 => Kind::KillNormal,
            71..73 => Kind::KillPubsub,
            73 if self.random.one_in(4) => Kind::KillReplicaLinks,
            73..78 => Kind::KillOne,
            78..82 => Kind::UnblockTimeout,
            82..86 => Kind::UnblockError,
            86 if self.random.one_in(3) => Kind::Flushall,
            86..88 => Kind::Del,
            88..90 => Kind::Unlink,
            90..92 => Kind::Rename,
            92 => Kind::Overwrite,
            93..97 => Kind::Expire,
            _ => Kind::Revoke,
        }
    }

    /// False if it could not be done.
    fn inject(&mut self, kind: Kind, node: usize) -> bool {
        match kind {
            Kind::Cut | Kind::Reset => {
                let how = if kind == Kind::Cut { Cut::Fin } else { Cut::Reset };
                self.gate(node).cut(how);
                true
            }
            Kind::HalfOpen => {
                self.gate(node).half_open();
                true
            }
            Kind::Delay => {
                let delay = Duration::from_millis(5 + self.random.below(200));
                let direction = if self.random.one_in(2) { Direction::ToClient } else { Direction::ToServer };
                self.disturb(node, direction, Fault::Delay(delay))
            }
            Kind::DropReplies => self.disturb(node, Direction::ToClient, Fault::Drop),
            Kind::DropRequests => self.disturb(node, Direction::ToServer, Fault::Drop),
            Kind::HoldReplies => self.disturb(node, Direction::ToClient, Fault::Hold),
            Kind::Trickle => self.disturb(node, Direction::ToServer, Fault::Trickle(Duration::from_millis(1))),
            Kind::CutWithinReply => {
                let length = 1 + usize::try_from(self.random.below(40)).expect("a small number");
                self.disturb(node, Direction::ToClient, Fault::CutAfter(length, Cut::Reset))
            }
            Kind::PauseWrites => self.pause(node, "WRITE"),
            Kind::PauseAll => self.pause(node, "ALL"),
            Kind::DebugSleep => {
                let _suspension = self.work.site.suspend();
                let seconds = format!("0.{:03}", 20 + self.random.below(150));
                self.does(node, &["DEBUG", "SLEEP", &seconds])
            }
            Kind::BusyScript => {
                let _suspension = self.work.site.suspend();
                let rounds = 100_000 * (1 + self.random.below(20));
                self.does(node, &["EVAL", &format!("for i = 1, {rounds} do end return 1"), "0"])
            }
            Kind::Bgsave => self.does(node, &["BGSAVE"]),
            Kind::BgrewriteAof => self.does(node, &["BGREWRITEAOF"]),
            Kind::Evict => self.evict(node),
            Kind::ConfigSet => self.configure(node),
            Kind::KillNormal => {
                // The operator's own connections are normal ones.
                let Ok(_unchanged) = self.change.try_read() else { return false };
                self.does(node, &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"])
            }
            Kind::KillPubsub => self.does(node, &["CLIENT", "KILL", "TYPE", "pubsub"]),
            Kind::KillReplicaLinks => self.does(node, &["CLIENT", "KILL", "TYPE", "replica"]),
            Kind::KillOne => self.meet_a_client(node, |id| args!["CLIENT", "KILL", "ID", id].to_vec()),
            Kind::UnblockTimeout => self.meet_a_client(node, |id| args!["CLIENT", "UNBLOCK", id, "TIMEOUT"].to_vec()),
            Kind::UnblockError => self.meet_a_client(node, |id| args!["CLIENT", "UNBLOCK", id, "ERROR"].to_vec()),
            Kind::Flushall => {
                let _loss = Loss::of_all(self.work);
                self.does(node, &["FLUSHALL"])
            }
            Kind::Expire => self.expire(node),
            Kind::Del | Kind::Unlink | Kind::Rename | Kind::Overwrite | Kind::Revoke => self.take_away(kind, node),
            other => unreachable!("{other:?} is not for the saboteur"),
        }
    }

    /// A gate of this saboteur's own.
    fn gate(&mut self, node: usize) -> &flock_tests::proxy::Proxy {
        let own = self.number + SABOTEURS * usize::try_from(self.random.below((GATES / SABOTEURS) as u64)).unwrap_or(0);
        self.work.site.gate(own, node)
    }

    /// Puts a fault on the links of a gate for a moment.
    fn disturb(&mut self, node: usize, direction: Direction, fault: Fault) -> bool {
        let lasts = Duration::from_millis(10 + self.random.below(150));
        let gate = self.gate(node);
        gate.set_existing(direction, fault);
        let_pass(lasts);
        gate.heal();
        true
    }

    fn does<A: AsRef<[u8]>>(&self, node: usize, args: &[A]) -> bool {
        ask(&self.work.site, node, args).is_some_and(|reply| reply.error_code().is_none())
    }

    fn pause(&mut self, node: usize, what: &str) -> bool {
        let pause = self.pause;
        let _paused = pause.write().expect("nobody panics with the lock");
        let _suspension = self.work.site.suspend();
        let lasts_ms = 20 + self.random.below(250);
        let done = self.does(node, &args!["CLIENT", "PAUSE", lasts_ms, what]);
        // The server ends pauses in its cron; on a busy machine later than that, so that the rest is ended here.
        let_pass(Duration::from_millis(lasts_ms + 120));
        self.does(node, &["CLIENT", "UNPAUSE"]);
        done
    }

    /// Makes memory short for a moment: keys are evicted, and locks put back.
    fn evict(&mut self, node: usize) -> bool {
        let Ok(_unchanged) = self.change.try_read() else { return false };
        let _suspension = self.work.site.suspend();
        let short = ["CONFIG", "SET", "maxmemory-policy", "allkeys-lru", "maxmemory", "1"];
        let done = self.does(node, &short) && {
            self.does(node, &["SET", ELSEWHERE, "x"]);
            let_pass(Duration::from_millis(self.random.below(20)));
            true
        };
        self.does(node, &["CONFIG", "SET", "maxmemory", "0"]);
        // What was taken is put back, and told to the replicas, within the next turn of the event loop.
        self.does(node, &["DEL", ELSEWHERE]);
        self.does(node, &["PING"]);
        done
    }

    /// Gives a lock's key a time to live, which the module does not heed. Not in a pause: there the key stays, with its time over, and a
    /// server that loads it so drops it (docs/GUARANTEES.md).
    fn expire(&mut self, node: usize) -> bool {
        let (change, pause) = (self.change, self.pause);
        let (Ok(_unchanged), Ok(_unpaused)) = (change.try_read(), pause.try_read()) else { return false };
        let key = self.random.pick(&LOCKS).name;
        let done = self.does(node, &args!["PEXPIRE", key, 1]);
        let_pass(Duration::from_millis(3));
        self.does(node, &["EXISTS", key]);
        self.does(node, &["PING"]);
        done
    }

    fn configure(&mut self, node: usize) -> bool {
        let number = self.random.below(500).to_string();
        let (name, value) = match self.random.below(5) {
            0 => ("hz", (10 + self.random.below(90)).to_string()),
            1 => ("flock.release-notifications", if self.random.one_in(2) { "yes" } else { "no" }.to_owned()),
            2 => ("notify-keyspace-events", if self.random.one_in(2) { "Kd" } else { "" }.to_owned()),
            3 => ("flock.label-max-bytes", number),
            _ => ("repl-backlog-size", (16_384 << self.random.below(7)).to_string()),
        };
        self.does(node, &["CONFIG", "SET", name, &value])
    }

    fn meet_a_client(&mut self, node: usize, request: impl Fn(&str) -> Vec<Vec<u8>>) -> bool {
        let (change, pause) = (self.change, self.pause);
        let (Ok(_unchanged), Ok(_unpaused)) = (change.try_read(), pause.try_read()) else { return false };
        let Some(Reply::Bulk(list)) = ask(&self.work.site, node, &["CLIENT", "LIST", "TYPE", "normal"]) else {
            return false;
        };
        let list = String::from_utf8_lossy(&list);
        let ids: Vec<_> = list.lines().filter_map(|line| line.split(' ').next()?.strip_prefix("id=")).collect();
        !ids.is_empty() && {
            let id = self.random.pick(&ids);
            matches!(ask(&self.work.site, node, &request(id)), Some(Reply::Int(1)))
        }
    }

    /// What people do to keys, and to locks by the command that is for it: the holds end.
    fn take_away(&mut self, kind: Kind, node: usize) -> bool {
        let key = self.random.pick(&LOCKS).name;
        let _loss = self.tells.then(|| Loss::of(self.work, &[key]));
        match kind {
            Kind::Del => self.does(node, &["DEL", key]),
            Kind::Unlink => self.does(node, &["UNLINK", key]),
            Kind::Revoke => self.does(node, &["FLOCK.REVOKE", key]),
            Kind::Rename => self.does(node, &["RENAME", key, ELSEWHERE]) && self.does(node, &["DEL", ELSEWHERE]),
            _ => self.does(node, &["SET", key, "no lock"]) && self.does(node, &["DEL", key]),
        }
    }
}
