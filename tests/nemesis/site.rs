//! Where a run takes place: three servers, and the proxies through which its clients reach them.
//!
//! Where it can be, the servers are hosts of a real network, on which each gate has an address of its own; administrators have another, and
//! are never cut off.
//!
//! The processes belong to the operator (`operator.rs`), who kills and restarts them. All others know addresses only, and which
//! server is the primary as far as anybody knows.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use flock_tests::network::{Network, Way, between};
use flock_tests::proxy::Proxy;
use flock_tests::reply::Reply;
use flock_tests::resp::Conn;
use flock_tests::server::Server;

/// A primary and two replicas.
pub(crate) const NODES: usize = 3;
/// Each client goes through one gate, to whichever server; so a fault of the network meets a part of the clients.
pub(crate) const GATES: usize = 6;

/// The locks of a run, and how many may share the semaphores among them.
pub(crate) const LOCKS: [Lock; 10] = [
    Lock { name: "lock:a", limit: None },
    Lock { name: "lock:b", limit: None },
    Lock { name: "lock:c", limit: None },
    Lock { name: "lock:d", limit: None },
    Lock { name: "lock:e", limit: None },
    Lock { name: "lock:f", limit: None },
    Lock { name: "lock:g", limit: None },
    Lock { name: "slots:h", limit: Some(1) },
    Lock { name: "slots:i", limit: Some(2) },
    Lock { name: "slots:j", limit: Some(3) },
];

/// One of the locks that everybody wants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lock {
    /// Its key.
    pub(crate) name: &'static str,
    /// A semaphore's limit; no limit for a lock of readers and writers.
    pub(crate) limit: Option<u32>,
}

/// The servers as their users see them.
#[derive(Debug)]
pub(crate) struct Site {
    addresses: Vec<SocketAddr>,
    gates: Vec<Vec<Proxy>>,
    network: Option<Network>,
    primary: AtomicUsize,
    suspensions: AtomicUsize,
    suspensions_made: AtomicU64,
    is_over: AtomicBool,
}

impl Site {
    /// The first of `servers` is the primary. Each is on the host of its number, if there is a network.
    pub(crate) fn new(servers: &[Server], network: Option<Network>) -> Site {
        let addresses: Vec<_> = servers.iter().map(Server::addr).collect();
        let gate = |gate| {
            let source = network.as_ref().and_then(|network| network.clients().nth(gate));
            addresses.iter().map(|address| Proxy::from_to(source, *address)).collect()
        };
        Site {
            gates: (0..GATES).map(gate).collect(),
            addresses,
            network,
            primary: AtomicUsize::new(0),
            suspensions: AtomicUsize::new(0),
            suspensions_made: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
        }
    }

    /// The number of the primary.
    pub(crate) fn primary(&self) -> usize {
        self.primary.load(Ordering::SeqCst)
    }

    /// Makes clients that connect from now on go there.
    pub(crate) fn set_primary(&self, node: usize) {
        self.primary.store(node, Ordering::SeqCst);
    }

    /// The way through a gate to a server.
    pub(crate) fn gate(&self, gate: usize, node: usize) -> &Proxy {
        &self.gates[gate % GATES][node]
    }

    /// All ways to all servers.
    pub(crate) fn all_gates(&self) -> impl Iterator<Item = &Proxy> {
        self.gates.iter().flatten()
    }

    /// The network that can be cut; none where the servers are where the test is.
    pub(crate) fn network(&self) -> Option<&Network> {
        self.network.as_ref()
    }

    /// A connection past all proxies, if the server accepts it.
    pub(crate) fn admin(&self, node: usize) -> Option<Conn> {
        Conn::try_open_raw(self.addresses[node]).ok()
    }

    /// Whether the clients are to come to an end.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// Tells all to come to an end.
    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
    }

    /// From now until the guard is dropped, nobody can expect that what is due happens: a server is stopped, paused, busy, or
    /// changes its role.
    pub(crate) fn suspend(&self) -> Suspension<'_> {
        self.suspensions.fetch_add(1, Ordering::SeqCst);
        self.suspensions_made.fetch_add(1, Ordering::SeqCst);
        Suspension(self)
    }

    /// A number that is the same at two moments only if nothing was suspended at them or in between; none while something is.
    pub(crate) fn undisturbed(&self) -> Option<u64> {
        let made = self.suspensions_made.load(Ordering::SeqCst);
        (self.suspensions.load(Ordering::SeqCst) == 0).then_some(made)
    }
}

/// The ways between a server and the clients of a gate, both.
pub(crate) fn to_clients(network: &Network, node: usize, gate: usize) -> [Way; 2] {
    let client = network.clients().nth(gate % GATES).expect("each gate has an address");
    between(host(network, node), client)
}

/// The ways between two servers, both.
pub(crate) fn to_server(network: &Network, node: usize, other: usize) -> [Way; 2] {
    between(host(network, node), host(network, other))
}

fn host(network: &Network, node: usize) -> Ipv4Addr {
    network.hosts()[node].address()
}

/// See [`Site::suspend`].
#[derive(Debug)]
pub(crate) struct Suspension<'a>(&'a Site);

impl Drop for Suspension<'_> {
    fn drop(&mut self) {
        self.0.suspensions.fetch_sub(1, Ordering::SeqCst);
    }
}

/// How long an administrator waits for an answer: a server may be stopped for seconds, or be loading.
const ADMIN_WITHIN: Duration = Duration::from_secs(60);

/// Asks once over a connection of its own; no reply if the server is gone or goes away meanwhile. When this returns, the command has
/// been performed or never will be.
pub(crate) fn ask<A: AsRef<[u8]>>(site: &Site, node: usize, args: &[A]) -> Option<Reply> {
    let mut conn = site.admin(node)?;
    conn.try_send_bytes(&flock_tests::args::encode(args)).ok()?;
    conn.recv_within(ADMIN_WITHIN).ok()
}
