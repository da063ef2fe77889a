//! Several servers that know each other: a primary with replicas, these with sentinels, a cluster.

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use crate::args;
use crate::reply::Reply;
use crate::resp::{ANSWER_WITHIN, Conn, Protocol};
use crate::server::{Builder, Generation, Info, Server};
use crate::wait::{wait_for, wait_until};

/// A full sync of a test's data takes milliseconds, but a replica that lost its link tries again once a second only.
pub const SYNC_WITHIN: Duration = Duration::from_secs(20);
/// Three nodes agree in about 2 s: gossip goes out once a second.
const CLUSTER_WITHIN: Duration = Duration::from_secs(30);
/// Sentinels hear of each other every 2 s, and ask the servers whom they know every 10 s, but soon after they have met them.
const SENTINELS_WITHIN: Duration = Duration::from_secs(30);
const SLOTS: usize = 16_384;

/// A primary and its replicas. The fields are there to be used: any of them may be stopped, promoted or replaced.
#[derive(Debug)]
pub struct Replicated {
    /// The primary, as long as nobody demotes it.
    pub primary: Server,
    /// Its replicas.
    pub replicas: Vec<Server>,
}

impl Replicated {
    /// Starts a primary and `replicas` replicas, all alike, and waits until they are in step.
    ///
    /// # Panics
    /// If one does not start or does not come in step.
    #[track_caller]
    pub fn start(builder: &Builder, replicas: usize) -> Replicated {
        let primary = builder.start();
        let follow = builder.clone().replica_of(&primary);
        let replicas: Vec<_> = (0..replicas).map(|_| follow.start()).collect();
        let servers = Replicated { primary, replicas };
        servers.wait_in_step();
        servers
    }

    /// Waits until every replica is connected and has applied all that the primary has written.
    ///
    /// # Panics
    /// If one has not after [`SYNC_WITHIN`].
    #[track_caller]
    pub fn wait_in_step(&self) {
        for replica in &self.replicas {
            wait_in_step(&self.primary, replica);
        }
    }
}

/// Waits until `replica` is connected to `primary` and has applied all that it has written: from then on both must show the
/// same, as long as nobody writes.
///
/// # Panics
/// If it has not after [`SYNC_WITHIN`].
#[track_caller]
pub fn wait_in_step(primary: &Server, replica: &Server) {
    let mut above = primary.connect(Protocol::Resp2);
    let mut below = replica.connect(Protocol::Resp2);
    let what = format!("replica {} is in step with {}", replica.port(), primary.port());
    wait_until(&what, SYNC_WITHIN, || {
        // The primary is asked last: what it writes meanwhile can only make the two differ, not agree.
        let replica = Info::ask(&mut below, "replication");
        let connected = replica.get("master_link_status") == Some("up");
        connected
            && replica.number("master_port") == i64::from(primary.port())
            && replica.number("slave_repl_offset") == Info::ask(&mut above, "replication").number("master_repl_offset")
    });
}

/// Makes `replica` a primary by REPLICAOF NO ONE, as an operator would whose primary is lost.
///
/// # Panics
/// If it refuses.
#[track_caller]
pub fn promote(replica: &Server) {
    let reply = replica.connect(Protocol::Resp2).cmd(&["REPLICAOF", "NO", "ONE"]);
    assert_eq!(reply, Reply::ok());
    wait_role(replica, "master");
}

/// Makes `server` a replica of `primary`; it loses what the primary does not have.
///
/// # Panics
/// If it refuses.
#[track_caller]
pub fn demote(server: &Server, primary: &Server) {
    let mut conn = server.connect(Protocol::Resp2);
    let reply = conn.cmd(&args!["REPLICAOF", primary.addr().ip().to_string(), primary.port()]);
    assert_eq!(reply, Reply::ok());
    wait_role(server, "slave");
}

/// Hands the role over by FAILOVER: writes are paused, nothing is lost, the two change places.
///
/// # Panics
/// If the roles have not changed after [`SYNC_WITHIN`].
#[track_caller]
pub fn fail_over(primary: &Server, replica: &Server) {
    let mut conn = primary.connect(Protocol::Resp2);
    let reply = conn.cmd(&args!["FAILOVER", "TO", replica.addr().ip().to_string(), replica.port()]);
    assert_eq!(reply, Reply::ok());
    wait_role(replica, "master");
    wait_role(primary, "slave");
}

#[track_caller]
fn wait_role(server: &Server, role: &str) {
    let mut conn = server.connect(Protocol::Resp2);
    wait_until(&format!("{} has the role {role}", server.port()), SYNC_WITHIN, || {
        conn.cmd(&["ROLE"]).as_array()[0] == Reply::bulk(role)
    });
}

/// A primary and its replicas, watched over by sentinels: they promote a replica when the primary is silent for [`Guarded::DOWN_AFTER`].
#[derive(Debug)]
pub struct Guarded {
    /// The first one is the primary, until a failover.
    pub servers: Vec<Server>,
    /// The sentinels. Each waits longer than the one before it: what they notice at the same time ends, now and then, in an election
    /// that nobody wins, and the next one is many seconds later.
    pub sentinels: Vec<Server>,
}

impl Guarded {
    /// What the sentinels call these servers.
    pub const SERVICE: &str = "main";
    /// How long a server may be silent for the first sentinel; for the second it is twice as long, and so on.
    pub const DOWN_AFTER: Duration = Duration::from_millis(500);

    /// Starts everything and waits until the sentinels know all servers and each other.
    ///
    /// # Panics
    /// If they do not within 30 s.
    #[track_caller]
    pub fn start(builder: &Builder, replicas: usize, sentinels: usize) -> Guarded {
        let Replicated { primary, replicas } = Replicated::start(builder, replicas);
        let service = Self::SERVICE;
        let sentinel = |number: usize| {
            let silence_ms = Self::DOWN_AFTER.as_millis() * (number as u128 + 1);
            builder
                .clone()
                .sentinel()
                // One may call for a failover; most must vote for it all the same.
                .config("sentinel", format!("monitor {service} 127.0.0.1 {} 1", primary.port()))
                .config("sentinel", format!("down-after-milliseconds {service} {silence_ms}"))
                .config("sentinel", format!("failover-timeout {service} 6000"))
                .start()
        };
        let sentinels = (0..sentinels).map(sentinel).collect();
        let servers = std::iter::once(primary).chain(replicas).collect();
        let guarded = Guarded { servers, sentinels };
        guarded.wait_acquainted();
        guarded
    }

    #[track_caller]
    fn wait_acquainted(&self) {
        for sentinel in &self.sentinels {
            let mut conn = sentinel.connect(Protocol::Resp3);
            wait_until(&format!("sentinel {} knows all", sentinel.port()), SENTINELS_WITHIN, || {
                let primary = conn.cmd(&["SENTINEL", "MASTER", Self::SERVICE]);
                let knows = |field: &str, count: usize| primary.field(field).as_str() == count.to_string();
                let replicas = conn.cmd(&["SENTINEL", "REPLICAS", Self::SERVICE]);
                knows("num-other-sentinels", self.sentinels.len() - 1)
                    && replicas.as_array().len() == self.servers.len() - 1
                    && replicas.as_array().iter().all(|replica| replica.field("master-link-status").as_str() == "ok")
            });
        }
    }

    /// The index of the server that the first running sentinel names.
    ///
    /// # Panics
    /// If none answers.
    #[track_caller]
    pub fn primary(&self) -> usize {
        let sentinel = self.sentinels.iter().find(|sentinel| sentinel.is_running()).expect("a sentinel runs");
        let mut conn = sentinel.connect(Protocol::Resp2);
        let address = conn.cmd(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", Self::SERVICE]);
        let port = address.as_array()[1].as_str().to_owned();
        self.servers.iter().position(|server| server.port().to_string() == port).expect("the primary is one of ours")
    }

    /// Has the first sentinel promote a replica though the primary is well. It does so in the background.
    ///
    /// # Panics
    /// If it refuses.
    #[track_caller]
    pub fn fail_over(&self) {
        let mut conn = self.sentinels[0].connect(Protocol::Resp2);
        assert_eq!(conn.cmd(&["SENTINEL", "FAILOVER", Self::SERVICE]), Reply::ok());
    }

    /// Waits until the sentinels have made a server a replica, which was the primary: that may be 10 s after the failover. They close all
    /// its connections then, so this asks it nothing but reads its log.
    ///
    /// # Panics
    /// If they have not within 30 s.
    #[track_caller]
    pub fn wait_demoted(&self, index: usize) {
        let old = &self.servers[index];
        wait_until(&format!("{} is a replica", old.port()), SENTINELS_WITHIN, || {
            old.log().contains("REPLICAOF 127.0.0.1:")
        });
    }

    /// Waits until all running sentinels agree that the primary is another than `old`, and it says so itself; returns its index.
    ///
    /// # Panics
    /// If they do not within 30 s.
    #[track_caller]
    pub fn wait_moved(&self, old: usize) -> usize {
        for sentinel in self.sentinels.iter().filter(|sentinel| sentinel.is_running()) {
            let mut conn = sentinel.connect(Protocol::Resp3);
            wait_until(&format!("sentinel {} names another primary", sentinel.port()), SENTINELS_WITHIN, || {
                let primary = conn.cmd(&["SENTINEL", "MASTER", Self::SERVICE]);
                primary.field("port").as_str() != self.servers[old].port().to_string()
            });
        }
        let new = self.primary();
        wait_role(&self.servers[new], "master");
        new
    }
}

/// A cluster of primaries that share the slots evenly, and of replicas added to them.
#[derive(Debug)]
pub struct Cluster {
    /// The nodes; the first ones are the primaries, in the order of their slots.
    pub nodes: Vec<Server>,
}

impl Cluster {
    /// Starts `primaries` nodes, shares out the slots and waits until all agree that the cluster is well.
    ///
    /// # Panics
    /// If they do not within 30 s.
    #[track_caller]
    pub fn start(builder: &Builder, primaries: usize) -> Cluster {
        Self::of(&vec![builder.clone(); primaries])
    }

    /// As [`Cluster::start`], each primary with a builder of its own.
    ///
    /// # Panics
    /// If they do not agree within 30 s.
    #[track_caller]
    pub fn of(primaries: &[Builder]) -> Cluster {
        let nodes: Vec<_> = primaries.iter().map(|builder| builder.clone().cluster().start()).collect();
        let primaries = primaries.len();
        for (number, node) in nodes.iter().enumerate() {
            let mut conn = node.connect(Protocol::Resp2);
            let first = number * SLOTS / primaries;
            let last = (number + 1) * SLOTS / primaries - 1;
            let reply = conn.cmd(&args!["CLUSTER", "ADDSLOTSRANGE", first, last]);
            assert_eq!(reply, Reply::ok());
            // Distinct from the start: otherwise the nodes argue about them for a while.
            let reply = conn.cmd(&args!["CLUSTER", "SET-CONFIG-EPOCH", number + 1]);
            assert_eq!(reply, Reply::ok());
            if number > 0 {
                meet(&mut conn, &nodes[0]);
            }
        }
        let cluster = Cluster { nodes };
        cluster.wait_well();
        cluster
    }

    /// As [`Cluster::start`], and as many replicas: `nodes[primaries + n]` follows `nodes[n]`.
    ///
    /// # Panics
    /// If they do not come in step.
    #[track_caller]
    pub fn start_replicated(builder: &Builder, primaries: usize) -> Cluster {
        Self::of_replicated(&vec![builder.clone(); primaries], builder)
    }

    /// As [`Cluster::start_replicated`], each primary with a builder of its own.
    ///
    /// # Panics
    /// If they do not come in step.
    #[track_caller]
    pub fn of_replicated(primaries: &[Builder], replicas: &Builder) -> Cluster {
        let mut cluster = Self::of(primaries);
        cluster.add_replicas(replicas, &(0..primaries.len()).collect::<Vec<_>>());
        cluster
    }

    /// Three primaries with a replica each, of this generation, that the tests of this process share, one after the other: starting them
    /// takes seconds. They are started at the first call. Nodes publish releases (`flock.release-notifications yes`).
    ///
    /// A test on it uses keys of its own, leaves no setting changed, and every slot and role where it was. A cluster on which a test has
    /// failed is not used again. The kernel ends it with the test process.
    #[track_caller]
    pub fn shared(generation: Generation) -> MutexGuard<'static, Option<Cluster>> {
        static NEW: Mutex<Option<Cluster>> = Mutex::new(None);
        static OLD: Mutex<Option<Cluster>> = Mutex::new(None);
        let slot = match generation {
            Generation::New => &NEW,
            Generation::Old => &OLD,
        };
        let mut shared = slot.lock().unwrap_or_else(|poisoned| {
            slot.clear_poison();
            let mut shared = poisoned.into_inner();
            // Never dropped: its guards would complain to this caller, who has nothing to do with it.
            std::mem::forget(shared.take());
            shared
        });
        shared.get_or_insert_with(|| {
            let builder = Server::builder().generation(generation).config("flock.release-notifications", "yes");
            Self::start_replicated(&builder, 3)
        });
        shared
    }

    /// Adds a replica of `nodes[of]`, waits until it is in step, and returns its index in `nodes`.
    ///
    /// # Panics
    /// If it does not come in step.
    #[track_caller]
    pub fn add_replica(&mut self, builder: &Builder, of: usize) -> usize {
        self.add_replicas(builder, &[of]);
        self.nodes.len() - 1
    }

    #[track_caller]
    fn add_replicas(&mut self, builder: &Builder, of: &[usize]) {
        for _ in of {
            let node = builder.clone().cluster().start();
            meet(&mut node.connect(Protocol::Resp2), &self.nodes[0]);
            self.nodes.push(node);
        }
        self.wait_well();
        let replicas = &self.nodes[self.nodes.len() - of.len()..];
        for (replica, of) in replicas.iter().zip(of) {
            let reply = replica.connect(Protocol::Resp2).cmd(&args!["CLUSTER", "REPLICATE", self.id(*of)]);
            assert_eq!(reply, Reply::ok());
        }
        for (replica, of) in replicas.iter().zip(of) {
            wait_in_step(&self.nodes[*of], replica);
        }
    }

    /// Has `nodes[replica]` take its primary's place: with `how` as `TAKEOVER` without asking anybody, else in good order.
    ///
    /// # Panics
    /// If it is no primary within [`SYNC_WITHIN`].
    #[track_caller]
    pub fn fail_over(&self, replica: usize, how: Option<&str>) {
        if how.is_none() {
            self.wait_settled();
        }
        let request: Vec<_> = ["CLUSTER", "FAILOVER"].into_iter().chain(how).collect();
        assert_eq!(self.nodes[replica].connect(Protocol::Resp2).cmd(&request), Reply::ok());
        wait_role(&self.nodes[replica], "master");
    }

    /// Waits until all nodes are connected to all others, and agree who belongs together. One that has just come back asks in vain for
    /// votes before: they come over the voters' own connections. And one that is restarted before may not come back: Valkey 8.0.1 does
    /// not read what it then has written of the cluster.
    ///
    /// # Panics
    /// If they are not within 30 s.
    #[track_caller]
    pub fn wait_settled(&self) {
        for node in &self.nodes {
            let mut conn = node.connect(Protocol::Resp3);
            wait_until(&format!("node {} is at one with all others", node.port()), CLUSTER_WITHIN, || {
                let nodes = conn.cmd(&["CLUSTER", "NODES"]);
                let primaries = nodes.as_str().lines().filter(|node| node.contains("master")).count();
                nodes.as_str().lines().all(|node| node.split(' ').nth(7) == Some("connected"))
                    && conn.cmd(&["CLUSTER", "SHARDS"]).as_array().len() == primaries
            });
        }
    }

    /// Waits until every running node knows all others and says that the cluster is well.
    ///
    /// # Panics
    /// If one does not within 30 s.
    #[track_caller]
    pub fn wait_well(&self) {
        let count = self.nodes.len().to_string();
        for node in self.nodes.iter().filter(|node| node.is_running()) {
            let mut conn = node.connect(Protocol::Resp2);
            wait_until(&format!("node {} finds the cluster well", node.port()), CLUSTER_WITHIN, || {
                let info = conn.cmd(&["CLUSTER", "INFO"]);
                let says = |line: &str| info.as_str().lines().any(|said| said == line);
                says("cluster_state:ok") && says(&format!("cluster_known_nodes:{count}"))
            });
        }
    }

    /// The name by which the other nodes know `nodes[index]`.
    ///
    /// # Panics
    /// If it does not answer.
    #[track_caller]
    pub fn id(&self, index: usize) -> String {
        let mut conn = self.nodes[index].connect(Protocol::Resp2);
        conn.cmd(&["CLUSTER", "MYID"]).as_str().to_owned()
    }

    /// The index of the node that serves `key` now, by what the nodes themselves answer.
    ///
    /// # Panics
    /// If none serves it within [`ANSWER_WITHIN`].
    #[track_caller]
    pub fn owner_of(&self, key: &str) -> usize {
        wait_for(&format!("a node serves {key}"), ANSWER_WITHIN, || {
            let serves = |node: &Server| {
                // READONLY is not set, so a replica too answers MOVED for a key of its primary.
                let reply = node.connect(Protocol::Resp2).cmd(&["TYPE", key]);
                reply.error_code().is_none()
            };
            self.nodes.iter().position(|node| node.is_running() && serves(node))
        })
    }
}

#[track_caller]
fn meet(conn: &mut Conn, other: &Server) {
    let meet = args!["CLUSTER", "MEET", other.addr().ip().to_string(), other.port(), other.bus_port()];
    assert_eq!(conn.cmd(&meet), Reply::ok());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_follow_and_change_places() {
        for generation in [Generation::New, Generation::Old] {
            let servers = Replicated::start(&Server::builder().without_module().generation(generation), 1);
            let (primary, replica) = (&servers.primary, &servers.replicas[0]);
            let mut above = primary.connect(Protocol::Resp2);
            let mut below = replica.connect(Protocol::Resp2);
            above.cmd(&["SET", "k", "v"]);
            servers.wait_in_step();
            assert_eq!(below.cmd(&["GET", "k"]), Reply::bulk("v"));
            assert_eq!(below.cmd(&["SET", "k", "w"]).error_code(), Some("READONLY"));

            fail_over(primary, replica);
            wait_in_step(replica, primary);
            promote(primary);
            assert_eq!(above.cmd(&["SET", "k", "w"]), Reply::ok());
            demote(replica, primary);
            wait_in_step(primary, replica);
            assert_eq!(replica.connect(Protocol::Resp2).cmd(&["GET", "k"]), Reply::bulk("w"));
        }
    }

    #[test]
    fn cluster_serves_every_key_and_takes_a_replica() {
        let builder = Server::builder().without_module();
        let mut cluster = Cluster::start(&builder, 3);
        let owners: Vec<_> = ["a", "b", "c", "d", "e", "f"].map(|key| cluster.owner_of(key)).into();
        assert!((0..3).all(|node| owners.contains(&node)), "{owners:?}");
        let replica = cluster.add_replica(&builder, 1);
        assert_eq!(cluster.nodes[replica].info("replication").text("role"), "slave");
    }
}
