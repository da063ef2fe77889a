//! A slot on its way from one node of a cluster to another, in both of the ways that there are.

use std::time::Duration;

use crate::args;
use crate::reply::Reply;
use crate::resp::{Conn, Protocol};
use crate::server::Server;
use crate::topology::Cluster;
use crate::wait::wait_until;

/// How long a migration of a nearly empty slot may take.
const MIGRATED_WITHIN: Duration = Duration::from_secs(30);

/// One slot, from the node that serves it to another.
#[derive(Debug)]
pub struct Migration<'a> {
    cluster: &'a Cluster,
    /// The node that serves the slot at the beginning.
    pub source_node: &'a Server,
    /// The node that is to.
    pub target_node: &'a Server,
    source_id: String,
    target_id: String,
    /// Which slot.
    pub slot: i64,
    /// A connection to the source.
    pub source: Conn,
    /// A connection to the target.
    pub target: Conn,
}

impl<'a> Migration<'a> {
    /// Of the slot of `key`, to `nodes[to]`.
    ///
    /// # Panics
    /// If no node serves it.
    #[track_caller]
    pub fn new(cluster: &'a Cluster, key: &str, to: usize) -> Migration<'a> {
        let from = cluster.owner_of(key);
        assert!(from != to, "{key} is there already");
        let (source_node, target_node) = (&cluster.nodes[from], &cluster.nodes[to]);
        let mut source = source_node.connect(Protocol::Resp2);
        let target = target_node.connect(Protocol::Resp2);
        let slot = source.cmd(&args!["CLUSTER", "KEYSLOT", key]).as_int();
        let (source_id, target_id) = (cluster.id(from), cluster.id(to));
        Migration { cluster, source_node, target_node, source_id, target_id, slot, source, target }
    }

    /// Of the slot of `key`, in a cluster of two nodes.
    ///
    /// # Panics
    /// If no node serves it.
    #[track_caller]
    pub fn between_two(cluster: &'a Cluster, key: &str) -> Migration<'a> {
        Self::new(cluster, key, 1 - cluster.owner_of(key))
    }

    /// The older way, step by step: the target imports.
    ///
    /// # Panics
    /// If a node refuses.
    #[track_caller]
    pub fn begin(&mut self) {
        let importing = args!["CLUSTER", "SETSLOT", self.slot, "IMPORTING", self.source_id];
        assert_eq!(self.target.cmd(&importing), Reply::ok());
        let migrating = args!["CLUSTER", "SETSLOT", self.slot, "MIGRATING", self.target_id];
        assert_eq!(self.source.cmd(&migrating), Reply::ok());
    }

    /// The key goes over, by MIGRATE.
    ///
    /// # Panics
    /// If it does not.
    #[track_caller]
    pub fn carry(&mut self, key: &str) {
        let port = self.target_node.port();
        assert_eq!(self.source.cmd(&args!["MIGRATE", "127.0.0.1", port, key, 0, 5000]), Reply::ok());
    }

    /// All keys of the slot go over, as many as there are.
    ///
    /// # Panics
    /// If one does not.
    #[track_caller]
    pub fn carry_all(&mut self) {
        loop {
            let keys = self.source.cmd(&args!["CLUSTER", "GETKEYSINSLOT", self.slot, 100]);
            if keys.as_array().is_empty() {
                return;
            }
            let mut request = args!["MIGRATE", "127.0.0.1", self.target_node.port(), "", 0, 5000, "KEYS"].to_vec();
            request.extend(keys.as_array().iter().map(|key| key.as_bytes().to_vec()));
            let carried = self.source.cmd(&request);
            // Those that ended meanwhile are gone: NOKEY.
            assert!(matches!(&carried, Reply::Simple(_)), "{carried}");
        }
    }

    /// The slot is the target's.
    ///
    /// # Panics
    /// If a node refuses.
    #[track_caller]
    pub fn end(&mut self) {
        for conn in [&mut self.target, &mut self.source] {
            assert_eq!(conn.cmd(&args!["CLUSTER", "SETSLOT", self.slot, "NODE", self.target_id]), Reply::ok());
        }
    }

    /// The newer way, all at once: asks for it.
    ///
    /// # Panics
    /// If the source refuses.
    #[track_caller]
    pub fn ask_for_atomic(&mut self) {
        let ask = args!["CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", self.slot, self.slot, "NODE", self.target_id];
        assert_eq!(self.source.cmd(&ask), Reply::ok());
    }

    /// Waits until the target serves `key`.
    ///
    /// # Panics
    /// If it does not within 30 s.
    #[track_caller]
    pub fn wait_until_there(&mut self, key: &str) {
        let target = &mut self.target;
        wait_until("the slot is the target's", MIGRATED_WITHIN, || {
            target.cmd(&args!["TYPE", key]).error_code().is_none()
        });
    }

    /// Waits until every node names the target as the slot's.
    ///
    /// # Panics
    /// If one does not within 30 s.
    #[track_caller]
    pub fn wait_until_known(&self, key: &str) {
        for node in self.cluster.nodes.iter().filter(|node| node.is_running() && node.port() != self.target_node.port())
        {
            let (mut conn, port) = (node.connect(Protocol::Resp2), self.target_node.port());
            wait_until("all nodes know where the slot is", MIGRATED_WITHIN, || {
                let reply = conn.cmd(&args!["TYPE", key]);
                reply.error_code() == Some("MOVED") && reply.to_string().ends_with(&format!(":{port}"))
            });
        }
    }
}
