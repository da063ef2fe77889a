//! Losses on the real network: packets of the primary's that do not arrive, for some moments or for longer than any client has patience.
//!
//! What the proxies cannot show: a peer whose machine is gone, so that nobody acknowledges anything; connections that nobody answers;
//! requests that arrive when the network is mended, long after their client has given up; replicas that fall behind and notice nothing.

use std::time::Duration;

use flock_tests::history::now_ns;
use flock_tests::network::{Damage, Network, Way};
use flock_tests::random::Random;
use flock_tests::wait::let_pass;

use crate::faults::{Kind, Log};
use crate::site::{GATES, NODES, to_clients, to_server};
use crate::worker::Work;

/// How many are at work: so losses overlap.
pub(crate) const CUTTERS: usize = 2;

/// One of those who cut the network.
pub(crate) struct Cutter<'a> {
    pub(crate) work: &'a Work,
    pub(crate) log: &'a Log,
    pub(crate) network: &'a Network,
    pub(crate) random: Random,
}

impl Cutter<'_> {
    /// Injects one fault after the other until the run is over.
    pub(crate) fn run(mut self) {
        while !self.work.site.is_over() {
            let_pass(Duration::from_millis(self.random.below(700)));
            let kind = self.kind();
            let node = self.work.site.primary();
            let from_ns = now_ns();
            self.inject(kind, node);
            self.log.injected(kind, node, from_ns);
        }
    }

    fn kind(&mut self) -> Kind {
        match self.random.below(13) {
            0..3 => Kind::NetworkCutClients,
            3..5 => Kind::NetworkLoseRequests,
            5..7 => Kind::NetworkLoseReplies,
            7..9 => Kind::NetworkCutReplica,
            9 => Kind::NetworkLoseStream,
            10 => Kind::NetworkLoseAcknowledgements,
            11 => Kind::NetworkCutPrimary,
            _ => Kind::NetworkLoseSome,
        }
    }

    fn inject(&mut self, kind: Kind, node: usize) {
        let gate = usize::try_from(self.random.below(GATES as u64)).expect("a small number");
        let replica = (node + self.random.pick(&[1, 2])) % NODES;
        let [reply, request] = to_clients(self.network, node, gate);
        let [stream, acknowledgement] = to_server(self.network, node, replica);
        let (damage, ways) = match kind {
            Kind::NetworkCutClients => (Damage::Cut, vec![reply, request]),
            Kind::NetworkLoseRequests => (Damage::Cut, vec![request]),
            Kind::NetworkLoseReplies => (Damage::Cut, vec![reply]),
            Kind::NetworkCutReplica => (Damage::Cut, vec![stream, acknowledgement]),
            Kind::NetworkLoseStream => (Damage::Cut, vec![stream]),
            Kind::NetworkLoseAcknowledgements => (Damage::Cut, vec![acknowledgement]),
            Kind::NetworkCutPrimary => (Damage::Cut, self.all_ways(node)),
            Kind::NetworkLoseSome => (Damage::Thin, self.all_ways(node)),
            other => unreachable!("{other:?} is not for the cutter"),
        };
        let lasts_ms = if self.random.one_in(6) { 1500 + self.random.below(1000) } else { 20 + self.random.below(500) };
        self.network.begin(damage, &ways);
        let_pass(Duration::from_millis(lasts_ms));
        self.network.end(damage, &ways);
    }

    /// Between a server and all others, and all clients.
    fn all_ways(&self, node: usize) -> Vec<Way> {
        let clients = (0..GATES).flat_map(|gate| to_clients(self.network, node, gate));
        let servers = (1..NODES).flat_map(|step| to_server(self.network, node, (node + step) % NODES));
        clients.chain(servers).collect()
    }
}
