//! A network of two sides that can be cut between them while the test reaches both: for partitions that the servers themselves know
//! nothing of.
//!
//! Each side is a network namespace: servers in it ([`Builder::within`](crate::server::Builder::within)) see each other, the other side
//! by one link, and the test by another. The cut drops what is sent on the first link, silently and both ways, as a broken switch does:
//! no connection is refused or reset. It needs root, `unshare` and `nsenter` (util-linux), and `ip` and `tc` (iproute2).
//!
//! A namespace has no name: it ends with the last process in it, and its links with it. The kernel ends these processes with the test
//! process, so nothing is left behind, however that ends. (A connection that is broken off keeps its namespace for up to two minutes.)

use std::fs;
use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::port::PortLease;
use crate::process;
use crate::wait::poll;

/// Making a namespace takes milliseconds.
const MADE_WITHIN: Duration = Duration::from_secs(10);
/// The link between the two sides, as both call it.
const BETWEEN: &str = "between";
/// The link to the test, as each side calls it.
const TEST: &str = "test";
/// The first address of a network that is set aside for tests of networks (RFC 2544), of 131,072 addresses.
const FIRST_ADDRESS: u32 = u32::from_be_bytes([198, 18, 0, 0]);

/// See the module's text.
#[derive(Debug)]
pub struct SplitNetwork {
    sides: [Side; 2],
    /// Makes the names and addresses the test's own.
    _lease: PortLease,
}

/// One of the two sides.
#[derive(Debug)]
pub struct Side {
    /// Keeps the namespace while no server is in it.
    keeper: Child,
    address: Ipv4Addr,
    /// The test's end of the link to it.
    outside: String,
}

/// Where a server is to run.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) namespace: PathBuf,
    pub(crate) address: Ipv4Addr,
}

impl SplitNetwork {
    /// Both sides, connected. None where this machine or this user cannot have them: then it says so, and why, past the test runner, which
    /// shows what a test prints only if it fails.
    pub fn for_test(test: &str) -> Option<SplitNetwork> {
        let network = SplitNetwork::try_new();
        if let Err(reason) = &network {
            let _ = writeln!(std::io::stderr(), "skipped: {test}: this needs root and iproute2: {reason}");
        }
        network.ok()
    }

    fn try_new() -> Result<SplitNetwork, String> {
        let lease = PortLease::take();
        let address = |number: u32| Ipv4Addr::from_bits(FIRST_ADDRESS + 4 * u32::from(lease.number()) + number);
        let side = |number| Side::try_new(address(number), format!("flock{}-{number}", lease.number()));
        let sides = [side(0)?, side(1)?];
        let test = address(2);
        for side in &sides {
            let outside = &side.outside;
            run(&format!("ip link add {outside} type veth peer name {TEST} netns {}", side.keeper.id()))?;
            run(&format!("ip address add {test} peer {} dev {outside}", side.address))?;
            run(&format!("ip link set {outside} up"))?;
            side.run(&format!("ip address add {} peer {test} dev {TEST}", side.address))?;
            side.run(&format!("ip link set {TEST} up"))?;
            side.run("ip link set lo up")?;
        }
        let [one, other] = &sides;
        one.run(&format!("ip link add {BETWEEN} type veth peer name {BETWEEN} netns {}", other.keeper.id()))?;
        for (side, across) in [(one, other), (other, one)] {
            side.run(&format!("ip address add {} peer {} dev {BETWEEN}", side.address, across.address))?;
            side.run(&format!("ip link set {BETWEEN} up"))?;
        }
        let network = SplitNetwork { sides, _lease: lease };
        // Not every kernel can drop what is sent.
        network.try_cut()?;
        network.try_heal()?;
        Ok(network)
    }

    /// The two sides.
    pub fn sides(&self) -> &[Side; 2] {
        &self.sides
    }

    /// From now on nothing that one side sends arrives at the other.
    ///
    /// # Panics
    /// If it cannot be done.
    #[track_caller]
    pub fn cut(&self) {
        self.try_cut().expect("the network can be cut: it was, once");
    }

    /// From now on everything arrives again.
    ///
    /// # Panics
    /// If it is not cut.
    #[track_caller]
    pub fn heal(&self) {
        self.try_heal().expect("the network is cut");
    }

    fn try_cut(&self) -> Result<(), String> {
        self.sides.iter().try_for_each(|side| side.run(&format!("tc qdisc add dev {BETWEEN} root blackhole")))
    }

    fn try_heal(&self) -> Result<(), String> {
        self.sides.iter().try_for_each(|side| side.run(&format!("tc qdisc del dev {BETWEEN} root")))
    }
}

impl Side {
    fn try_new(address: Ipv4Addr, outside: String) -> Result<Side, String> {
        let mut command = process::command(Path::new("unshare"));
        command.args(["--net", "--", "sleep", "infinity"]).stdin(Stdio::null()).stderr(Stdio::piped());
        let keeper = process::spawn(command).map_err(|error| format!("setpriv: {error}"))?;
        let mut side = Side { keeper, address, outside };
        let own = fs::read_link("/proc/self/ns/net").map_err(|error| format!("/proc/self/ns/net: {error}"))?;
        let made = poll(MADE_WITHIN, || match side.keeper.try_wait() {
            Ok(None) => fs::read_link(side.namespace()).is_ok_and(|its| its != own).then_some(Ok(())),
            _ => Some(Err(side.complaint())),
        });
        made.unwrap_or_else(|| Err("unshare makes no network namespace".to_owned()))?;
        Ok(side)
    }

    /// What the keeper has said before it ended.
    fn complaint(&mut self) -> String {
        let mut said = String::new();
        if let Some(mut stderr) = self.keeper.stderr.take() {
            // If it cannot be read, that it ended is all there is to tell.
            let _ = stderr.read_to_string(&mut said);
        }
        format!("no network namespace: {}", said.trim())
    }

    fn namespace(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/ns/net", self.keeper.id()))
    }

    pub(crate) fn place(&self) -> Place {
        Place { namespace: self.namespace(), address: self.address }
    }

    fn run(&self, command: &str) -> Result<(), String> {
        run(&format!("nsenter --net={} {command}", self.namespace().display()))
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        // Any of this may be gone already.
        let _ = run(&format!("ip link delete {}", self.outside));
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}

/// Runs a command, without a shell.
fn run(command: &str) -> Result<(), String> {
    let mut words = command.split(' ');
    let program = words.next().unwrap_or_default();
    let output = Command::new(program).args(words).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{command}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reply::Reply;
    use crate::resp::Protocol;
    use crate::server::Server;
    use crate::topology::SYNC_WITHIN;
    use crate::wait::{holds_for, wait_until};

    #[test]
    fn cut_is_silent_for_the_sides_and_unknown_to_the_test() {
        let Some(network) = SplitNetwork::for_test("a cut is silent") else { return };
        let [one, other] = network.sides();
        let builder = Server::builder().without_module();
        let primary = builder.clone().within(one).start();
        let replica = builder.within(other).replica_of(&primary).start();
        let mut above = primary.connect(Protocol::Resp2);
        let mut below = replica.connect(Protocol::Resp2);
        let mut arrives = |value: &str| {
            assert_eq!(above.cmd(&["SET", "k", value]), Reply::ok());
            Reply::bulk(value)
        };
        let expected = arrives("before");
        wait_until("it is replicated", SYNC_WITHIN, || below.cmd(&["GET", "k"]) == expected);
        network.cut();
        arrives("meanwhile");
        holds_for("nothing arrives", Duration::from_millis(300), || below.cmd(&["GET", "k"]) == Reply::bulk("before"));
        assert_eq!(replica.info("replication").text("master_link_status"), "up", "nobody was told");
        network.heal();
        wait_until("it is replicated", SYNC_WITHIN, || below.cmd(&["GET", "k"]) == Reply::bulk("meanwhile"));
        assert!(!replica.log().contains("Connection with primary lost"), "{}", replica.log());
    }
}
