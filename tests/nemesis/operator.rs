//! Faults of whole servers: kills and restarts, stops, failovers, steps of the clock. One at a time.
//!
//! What each may lose follows docs/GUARANTEES.md. Nothing: a stop, a reload, `FAILOVER`, and a kill with `appendfsync always`. Any hold: a
//! kill with another `appendfsync`, and a promotion that the old primary does not know of.

use std::net::SocketAddr;
use std::sync::RwLock;
use std::time::Duration;

use flock_tests::args;
use flock_tests::history::now_ns;
use flock_tests::network::{Damage, Network, Way};
use flock_tests::proxy::Cut;
use flock_tests::random::Random;
use flock_tests::reply::Reply;
use flock_tests::resp::Protocol;
use flock_tests::server::{Info, Server};
use flock_tests::topology::{demote, promote};
use flock_tests::wait::{let_pass, poll};

use crate::faults::{Kind, Log, Loss, Outage, Split};
use crate::site::{GATES, NODES, ask, to_clients, to_server};
use crate::worker::Work;

/// A replica that is not in step after this is not promoted: the fault is left out.
const LINK_UP_WITHIN: Duration = Duration::from_secs(5);
const FAILOVER_TIMEOUT_MS: u64 = 3000;
/// Once the replica has agreed, the primary tries to reach it for so long; cuts of the network may be in its way several times in a row.
const FAILOVER_WITHIN: Duration = Duration::from_secs(60);
const DAY_S: u64 = 24 * 3600;

/// Who has the servers' processes.
pub(crate) struct Operator<'a> {
    pub(crate) work: &'a Work,
    pub(crate) log: &'a Log,
    pub(crate) servers: &'a mut [Server],
    /// Held while a server or a role changes: what the server takes and the module puts back must not fall into that gap
    /// (docs/GUARANTEES.md: a lock that was put back can be lost by a failover).
    pub(crate) change: &'a RwLock<()>,
    /// See the saboteur.
    pub(crate) pause: &'a RwLock<()>,
    pub(crate) random: Random,
    /// For a planted bug: it only promotes across a cut, and tells neither the history nor the judge.
    pub(crate) splits_silently: bool,
}

impl Operator<'_> {
    /// Injects one fault after the other until the run is over.
    pub(crate) fn run(mut self) {
        while !self.work.site.is_over() {
            let_pass(Duration::from_millis(200 + self.random.below(900)));
            let from_ns = now_ns();
            let primary = self.work.site.primary();
            let kind = self.kind();
            let injected = match kind {
                Kind::KillPrimaryFsyncAlways => self.kill_primary("always"),
                Kind::KillPrimaryFsyncEverysec => self.kill_primary("everysec"),
                Kind::KillPrimaryFsyncNo => self.kill_primary("no"),
                Kind::KillReplica => self.kill_replica(),
                Kind::StopPrimary => self.stop(primary),
                Kind::StopReplica => {
                    let replica = self.replica();
                    self.stop(replica)
                }
                Kind::Failover => self.fail_over(),
                Kind::PromoteBesideOldPrimary | Kind::PromoteAcrossCut => self.promote_beside(kind),
                Kind::KillPrimaryAndPromote => self.kill_and_promote(),
                Kind::ClockStep => self.step_clock(),
                Kind::DebugReload => self.reload("RELOAD"),
                _ => self.reload("LOADAOF"),
            };
            if injected {
                self.log.injected(kind, primary, from_ns);
            }
        }
    }

    fn kind(&mut self) -> Kind {
        if self.splits_silently {
            return Kind::PromoteAcrossCut;
        }
        let kinds = if self.work.site.network().is_some() { 28 } else { 24 };
        match self.random.below(kinds) {
            24..28 => Kind::PromoteAcrossCut,
            0..3 => Kind::KillPrimaryFsyncAlways,
            3 => Kind::KillPrimaryFsyncEverysec,
            4 => Kind::KillPrimaryFsyncNo,
            5..7 => Kind::KillReplica,
            7..10 => Kind::StopPrimary,
            10..12 => Kind::StopReplica,
            12..15 => Kind::Failover,
            15..17 => Kind::PromoteBesideOldPrimary,
            17..19 => Kind::KillPrimaryAndPromote,
            19..22 => Kind::ClockStep,
            22 => Kind::DebugLoadAof,
            _ => Kind::DebugReload,
        }
    }

    fn replica(&mut self) -> usize {
        let step = 1 + usize::try_from(self.random.below(2)).expect("one or two");
        (self.work.site.primary() + step) % NODES
    }

    fn primary_config(&self, name: &str, value: &str) -> bool {
        let primary = self.work.site.primary();
        ask(&self.work.site, primary, &["CONFIG", "SET", name, value]) == Some(Reply::ok())
    }

    /// Kills the primary under load, with data that are synced so, and starts it again on what it has on disk.
    fn kill_primary(&mut self, fsync: &str) -> bool {
        if !self.primary_config("appendfsync", fsync) {
            return false;
        }
        let_pass(Duration::from_millis(self.random.below(300)));
        let _change = self.change.write().expect("nobody panics with the lock");
        let _suspension = self.work.site.suspend();
        let node = self.work.site.primary();
        let _loss = (fsync != "always").then(|| Loss::of_all(self.work));
        let from_ns = now_ns();
        self.servers[node].kill9();
        self.servers[node].set_config("replicaof", "no one");
        self.servers[node].set_config("appendfsync", fsync);
        self.servers[node].set_wall_clock(0);
        self.servers[node].start_again();
        let kind = match fsync {
            "always" => Kind::KillPrimaryFsyncAlways,
            "everysec" => Kind::KillPrimaryFsyncEverysec,
            _ => Kind::KillPrimaryFsyncNo,
        };
        self.log.outage(Outage { kind, from_ns, node });
        true
    }

    fn kill_replica(&mut self) -> bool {
        let node = self.replica();
        let primary = self.servers[self.work.site.primary()].addr();
        let _change = self.change.write().expect("nobody panics with the lock");
        self.servers[node].kill9();
        let_pass(Duration::from_millis(self.random.below(200)));
        self.start_as_replica(node, primary);
        true
    }

    fn start_as_replica(&mut self, node: usize, primary: SocketAddr) {
        self.servers[node].set_config("replicaof", &format!("{} {}", primary.ip(), primary.port()));
        self.servers[node].set_wall_clock(0);
        self.servers[node].start_again();
    }

    fn stop(&mut self, node: usize) -> bool {
        let _suspension = self.work.site.suspend();
        let longest_ms = if self.random.one_in(4) { 2800 } else { 500 };
        self.servers[node].sigstop();
        let_pass(Duration::from_millis(200 + self.random.below(longest_ms)));
        self.servers[node].sigcont();
        // What came due is performed in the next turn of its event loop.
        ask(&self.work.site, node, &["PING"]);
        true
    }

    /// Hands the role over in good order: nothing may be lost.
    fn fail_over(&mut self) -> bool {
        let (old, new) = (self.work.site.primary(), self.replica());
        let _change = self.change.write().expect("nobody panics with the lock");
        if !self.wait_link_up(new) {
            return false;
        }
        let _suspension = self.work.site.suspend();
        let from_ns = now_ns();
        let target = self.servers[new].addr();
        let request = args!["FAILOVER", "TO", target.ip().to_string(), target.port(), "TIMEOUT", FAILOVER_TIMEOUT_MS];
        if ask(&self.work.site, old, &request) != Some(Reply::ok()) {
            return false;
        }
        // Either it is done or it was given up: then both are what they were.
        let is_replica = poll(FAILOVER_WITHIN, || {
            let info = self.servers[old].info("replication");
            let is_over = info.get("master_failover_state").is_none_or(|state| state == "no-failover");
            is_over.then(|| info.text("role") == "slave")
        });
        assert!(is_replica.is_some(), "a failover neither succeeds nor is given up");
        if is_replica == Some(false) {
            return false;
        }
        self.work.site.set_primary(new);
        self.others_follow(new, old);
        self.log.outage(Outage { kind: Kind::Failover, from_ns, node: new });
        true
    }

    /// Promotes a replica while the old primary goes on granting, which is demoted later: holds of either may be beside those of the
    /// other. The tokens of the new one are above. Across a cut, each goes on with the clients of its side, who are told where their primary
    /// is now, as Sentinel would tell them; and the replica has heard nothing since the cut.
    fn promote_beside(&mut self, kind: Kind) -> bool {
        let (old, new) = (self.work.site.primary(), self.replica());
        let across = self.work.site.network().filter(|_| kind == Kind::PromoteAcrossCut);
        let half = usize::from(across.is_some() && self.random.one_in(2));
        let (near, far): (Vec<_>, Vec<_>) = (0..GATES).partition(|gate| gate % 2 == half);
        let ways = across.map(|network| ways_across(network, old, &near, &far)).unwrap_or_default();
        let _change = self.change.write().expect("nobody panics with the lock");
        if !self.wait_link_up(new) {
            return false;
        }
        let _suspension = self.work.site.suspend();
        let loss = (!self.splits_silently).then(|| Loss::of_all(self.work));
        let from_ns = now_ns();
        if let Some(network) = across {
            network.begin(Damage::Cut, &ways);
            let_pass(Duration::from_millis(self.random.below(400)));
        } else {
            self.fall_behind(old, new);
        }
        self.servers[new].sigcont();
        promote(&self.servers[new]);
        self.work.site.set_primary(new);
        self.log.outage(Outage { kind, from_ns, node: new });
        if across.is_some() {
            far.iter().for_each(|gate| self.work.site.gate(*gate, old).cut(Cut::Reset));
        }
        let_pass(Duration::from_millis(100 + self.random.below(1200)));
        if let Some(network) = across {
            network.end(Damage::Cut, &ways);
        }
        demote(&self.servers[old], &self.servers[new]);
        self.others_follow(new, old);
        if !self.splits_silently {
            self.log.split(Split { node: old, from_ns, until_ns: now_ns() });
        }
        drop(loss);
        true
    }

    /// The primary dies for good, and a replica that may lack its last writes takes over. The old one comes back as a replica.
    fn kill_and_promote(&mut self) -> bool {
        let (old, new) = (self.work.site.primary(), self.replica());
        let _change = self.change.write().expect("nobody panics with the lock");
        if !self.wait_link_up(new) {
            return false;
        }
        let _suspension = self.work.site.suspend();
        let loss = Loss::of_all(self.work);
        self.fall_behind(old, new);
        let from_ns = now_ns();
        self.servers[old].kill9();
        self.servers[new].sigcont();
        promote(&self.servers[new]);
        self.work.site.set_primary(new);
        drop(loss);
        self.log.outage(Outage { kind: Kind::KillPrimaryAndPromote, from_ns, node: new });
        self.others_follow(new, old);
        let_pass(Duration::from_millis(self.random.below(400)));
        let primary = self.servers[new].addr();
        self.start_as_replica(old, primary);
        true
    }

    /// Stops a replica, and cuts its link: it lacks all that its primary grants from then on. In half of the cases.
    fn fall_behind(&mut self, primary: usize, replica: usize) {
        if self.random.one_in(2) {
            self.servers[replica].sigstop();
            ask(&self.work.site, primary, &["CLIENT", "KILL", "TYPE", "replica"]);
            let_pass(Duration::from_millis(50 + self.random.below(250)));
        }
    }

    fn others_follow(&self, primary: usize, except: usize) {
        for node in (0..NODES).filter(|node| *node != primary && *node != except) {
            demote(&self.servers[node], &self.servers[primary]);
        }
    }

    /// A killed primary's snapshot child keeps its connections: a replica may seem to be linked and know nothing of the primary that has
    /// been started since, nor of its tokens. The name of the stream tells. A cut of the network does the same for a while: so the replica
    /// must have heard all that was said up to now, by which it knows of the tokens (docs/GUARANTEES.md).
    fn wait_link_up(&self, node: usize) -> bool {
        let primary = &self.servers[self.work.site.primary()];
        let said = primary.info("replication");
        let (port, stream) = (i64::from(primary.port()), said.text("master_replid"));
        let mut conn = self.servers[node].connect(Protocol::Resp2);
        poll(LINK_UP_WITHIN, || {
            let info = Info::ask(&mut conn, "replication");
            let is_up = info.get("master_link_status") == Some("up") && info.number("master_port") == port;
            let has_heard = || info.number("slave_repl_offset") >= said.number("master_repl_offset");
            (is_up && info.text("master_replid") == stream && has_heard()).then_some(())
        })
        .is_some()
    }

    fn step_clock(&mut self) -> bool {
        let node = usize::try_from(self.random.below(NODES as u64)).expect("a small number");
        let distance_s = i64::try_from(self.random.below(DAY_S)).expect("a day is short");
        let offset_s = if self.random.one_in(2) { distance_s } else { -distance_s };
        // Keys with a time to live live by this clock; and pauses: put back by hours, it makes one last for hours, in which not even
        // CLIENT UNPAUSE is heard.
        let _change = self.change.write().expect("nobody panics with the lock");
        let _unpaused = self.pause.read().expect("nobody panics with the lock");
        self.servers[node].set_wall_clock(offset_s);
        true
    }

    /// Lets the primary read its data anew.
    fn reload(&mut self, what: &str) -> bool {
        let _change = self.change.write().expect("nobody panics with the lock");
        let _suspension = self.work.site.suspend();
        ask(&self.work.site, self.work.site.primary(), &["DEBUG", what]) == Some(Reply::ok())
    }
}

/// Both ways of all links between two sides: a server with the clients of the gates near it, and all other servers with the clients of the
/// far gates.
fn ways_across(network: &Network, node: usize, near: &[usize], far: &[usize]) -> Vec<Way> {
    let others = || (0..NODES).filter(|other| *other != node);
    let servers = others().flat_map(|other| to_server(network, node, other));
    let from_near = others().flat_map(|other| near.iter().flat_map(move |gate| to_clients(network, other, *gate)));
    let from_far = far.iter().flat_map(|gate| to_clients(network, node, *gate));
    servers.chain(from_near).chain(from_far).collect()
}
