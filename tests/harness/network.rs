//! A network of the test's own, in the kernel: its hosts lose what they send each other while the test reaches all of them. For
//! partitions that the servers themselves know nothing of.
//!
//! Each host is a network namespace: servers are placed in it ([`Builder::within`](crate::server::Builder::within)). Every host has one
//! link, to a router, which is a namespace too, and so has the test. The router's packet filter (nftables) drops what is to be lost,
//! silently and in each direction by itself, as a broken switch does: no connection is refused or reset. It needs root, `nft` (nftables;
//! `$NFT`), `unshare` and `nsenter` (util-linux), and `ip` (iproute2).
//!
//! A namespace has no name: it ends with the last process in it, and its links, addresses and rules with it. The kernel ends these
//! processes with the test process, so nothing is left behind, however that ends. (A connection that is broken off keeps its namespace
//! for up to two minutes.) Where the test itself is, there is one more link, which ends with the router; no rule is ever set there.

use std::collections::BTreeMap;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::port::PortLease;
use crate::process;
use crate::wait::poll;

/// Making a namespace takes milliseconds.
const MADE_WITHIN: Duration = Duration::from_secs(10);
/// A host's link, as the host calls it.
const UPLINK: &str = "uplink";
/// The link to the test, as the router calls it.
const TEST: &str = "test";
/// The first address of a network that is set aside for tests of networks (RFC 2544), of 131,072 addresses.
const FIRST_ADDRESS: u32 = u32::from_be_bytes([198, 18, 0, 0]);
/// The router's rules: a set of ways for each [`Damage`].
const RULES: &str = "
table ip flock {
    set cut { type ipv4_addr . ipv4_addr; }
    set thin { type ipv4_addr . ipv4_addr; }
    chain forward {
        type filter hook forward priority 0;
        ip saddr . ip daddr @cut drop
        ip saddr . ip daddr @thin numgen random mod 10 < 2 drop
    }
}
";

/// See the module's text.
#[derive(Debug)]
pub struct Network {
    router: Namespace,
    hosts: Vec<Host>,
    clients: Vec<Address>,
    test: Address,
    gateway: Address,
    /// How often each was begun and not ended.
    damages: Mutex<BTreeMap<(Damage, Way), usize>>,
}

/// A machine for servers.
#[derive(Debug)]
pub struct Host {
    namespace: Namespace,
    address: Address,
}

/// From an address to another.
pub type Way = (Ipv4Addr, Ipv4Addr);

/// What becomes of the packets that are sent on a way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Damage {
    /// All are lost.
    Cut,
    /// Two in ten are lost, whichever.
    Thin,
}

/// Where a server is to run.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) namespace: PathBuf,
    pub(crate) address: Ipv4Addr,
}

impl Network {
    /// So many hosts, all connected, and so many addresses for clients of the test ([`Network::clients`]). None where this machine or this
    /// user cannot have them: then it says so, and why, past the test runner, which shows what a test prints only if it fails.
    ///
    /// # Panics
    /// If anything fails once there is a router: what a network needs of the machine is there then.
    #[track_caller]
    pub fn for_test(test: &str, hosts: usize, clients: usize) -> Option<Network> {
        match Namespace::router() {
            Ok(router) => Some(Network::around(router, hosts, clients).expect("the network is made")),
            Err(reason) => {
                let _ =
                    writeln!(std::io::stderr(), "skipped: {test}: this needs root, nftables and iproute2: {reason}");
                None
            }
        }
    }

    fn around(router: Namespace, hosts: usize, clients: usize) -> Result<Network, String> {
        let host = |_| Ok(Host { namespace: Namespace::try_new()?, address: Address::take() });
        let network = Network {
            router,
            hosts: (0..hosts).map(host).collect::<Result<_, String>>()?,
            clients: (0..clients).map(|_| Address::take()).collect(),
            test: Address::take(),
            gateway: Address::take(),
            damages: Mutex::default(),
        };
        network.connect_test()?;
        for (number, host) in network.hosts.iter().enumerate() {
            network.connect_host(number, host)?;
        }
        Ok(network)
    }

    fn connect_test(&self) -> Result<(), String> {
        let (test, gateway, outside) = (self.test.number, self.gateway.number, self.outside());
        ip(&format!("link add {outside} type veth peer name {TEST} netns {}", self.router.keeper.id()))?;
        ip(&format!("address add {test} peer {gateway} dev {outside}"))?;
        ip(&format!("link set {outside} up"))?;
        self.router.ip(&format!("address add {gateway} peer {test} dev {TEST}"))?;
        self.router.ip(&format!("link set {TEST} up"))?;
        self.clients.iter().try_for_each(|client| {
            ip(&format!("address add {} dev {outside}", client.number))?;
            self.router.ip(&format!("route add {} via {test} dev {TEST}", client.number))
        })
    }

    fn connect_host(&self, number: usize, host: &Host) -> Result<(), String> {
        let (test, gateway, outside) = (self.test.number, self.gateway.number, self.outside());
        let (link, address, namespace) = (format!("host{number}"), host.address(), &host.namespace);
        self.router.ip(&format!("link add {link} type veth peer name {UPLINK} netns {}", namespace.keeper.id()))?;
        self.router.ip(&format!("address add {gateway} peer {address} dev {link}"))?;
        self.router.ip(&format!("link set {link} up"))?;
        namespace.ip("link set lo up")?;
        namespace.ip(&format!("address add {address} peer {gateway} dev {UPLINK}"))?;
        namespace.ip(&format!("link set {UPLINK} up"))?;
        namespace.ip(&format!("route add default via {gateway}"))?;
        ip(&format!("route add {address} via {gateway} dev {outside} src {test}"))
    }

    /// The test's end of its link: a name that nobody else has.
    fn outside(&self) -> String {
        format!("flock{}", self.test.lease.number())
    }

    /// The hosts.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// Addresses from which the test may connect to hosts, beside the one that it has by itself: so that some of its connections can be cut
    /// and others not.
    pub fn clients(&self) -> impl Iterator<Item = Ipv4Addr> {
        self.clients.iter().map(|client| client.number)
    }

    /// From now on these ways are damaged, until [`Network::end`] has been called as often for them.
    ///
    /// # Panics
    /// If the packet filter refuses.
    #[track_caller]
    pub fn begin(&self, damage: Damage, ways: &[Way]) {
        let mut damages = self.damages.lock().unwrap_or_else(PoisonError::into_inner);
        let mut new = Vec::new();
        for way in ways {
            let count = damages.entry((damage, *way)).or_default();
            *count += 1;
            new.extend((*count == 1).then_some(*way));
        }
        self.change("add", damage, &new);
    }

    /// Takes back a call of [`Network::begin`].
    ///
    /// # Panics
    /// If there was none.
    #[track_caller]
    pub fn end(&self, damage: Damage, ways: &[Way]) {
        let mut damages = self.damages.lock().unwrap_or_else(PoisonError::into_inner);
        let mut over = Vec::new();
        for way in ways {
            let count = damages.get_mut(&(damage, *way)).expect("it was begun");
            *count -= 1;
            if *count == 0 {
                damages.remove(&(damage, *way));
                over.push(*way);
            }
        }
        self.change("delete", damage, &over);
    }

    #[track_caller]
    fn change(&self, verb: &str, damage: Damage, ways: &[Way]) {
        if ways.is_empty() {
            return;
        }
        let set = match damage {
            Damage::Cut => "cut",
            Damage::Thin => "thin",
        };
        let elements: Vec<_> = ways.iter().map(|(from, to)| format!("{from} . {to}")).collect();
        let rule = format!("{verb} element ip flock {set} {{ {} }}\n", elements.join(", "));
        self.router.filter(&rule).expect("the packet filter takes elements of a set");
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // At once: the router's end of it may last as long as one of its packets.
        let _ = ip(&format!("link delete {}", self.outside()));
    }
}

impl Host {
    /// Its address.
    pub fn address(&self) -> Ipv4Addr {
        self.address.number
    }

    pub(crate) fn place(&self) -> Place {
        Place { namespace: self.namespace.path(), address: self.address() }
    }
}

/// Both ways between two addresses.
pub fn between(one: Ipv4Addr, other: Ipv4Addr) -> [Way; 2] {
    [(one, other), (other, one)]
}

/// An address that is the test's own.
#[derive(Debug)]
struct Address {
    number: Ipv4Addr,
    lease: PortLease,
}

impl Address {
    fn take() -> Address {
        let lease = PortLease::take();
        Address { number: Ipv4Addr::from_bits(FIRST_ADDRESS + u32::from(lease.number())), lease }
    }
}

/// A network namespace.
#[derive(Debug)]
struct Namespace {
    /// Keeps it while nobody else is in it.
    keeper: Child,
}

impl Namespace {
    /// One that sends on what is meant for others, and filters it; or why this machine or this user cannot have it: not every user may, and
    /// not every kernel can.
    fn router() -> Result<Namespace, String> {
        let nft = nft();
        let programs = [OsStr::new("unshare"), OsStr::new("nsenter"), OsStr::new("ip"), &nft];
        if let Some(program) = programs.into_iter().find(|program| !is_here(program)) {
            return Err(format!("there is no {}", program.display()));
        }
        let router = Namespace::try_new()?;
        run(router.command("tee").arg("/proc/sys/net/ipv4/ip_forward"), "1\n")?;
        router.filter(RULES)?;
        Ok(router)
    }

    /// Or why the kernel refuses it.
    ///
    /// # Panics
    /// If it takes too long.
    fn try_new() -> Result<Namespace, String> {
        let mut command = process::command(Path::new("unshare"));
        command.args(["--net", "--", "sleep", "infinity"]).stdin(Stdio::null()).stderr(Stdio::piped());
        let keeper = process::spawn(command).expect("setpriv starts");
        let mut namespace = Namespace { keeper };
        let own = fs::read_link("/proc/self/ns/net").expect("a process has a network namespace");
        let made = poll(MADE_WITHIN, || match namespace.keeper.try_wait() {
            Ok(None) => fs::read_link(namespace.path()).is_ok_and(|its| its != own).then_some(Ok(())),
            _ => Some(Err(namespace.complaint())),
        });
        made.unwrap_or_else(|| panic!("unshare has not made a network namespace within {MADE_WITHIN:?}"))?;
        Ok(namespace)
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

    fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/ns/net", self.keeper.id()))
    }

    /// A program in it.
    fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.path().display())).arg(program);
        command
    }

    fn ip(&self, arguments: &str) -> Result<(), String> {
        run(self.command("ip").args(arguments.split(' ')), "")
    }

    fn filter(&self, rules: &str) -> Result<(), String> {
        run(self.command(nft()).args(["-f", "-"]), rules)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}

fn nft() -> OsString {
    env::var_os("NFT").unwrap_or_else(|| OsString::from("nft"))
}

fn is_here(program: &OsStr) -> bool {
    env::split_paths(&env::var_os("PATH").unwrap_or_default()).any(|folder| folder.join(program).is_file())
}

/// `ip` where the test is.
fn ip(arguments: &str) -> Result<(), String> {
    run(Command::new("ip").args(arguments.split(' ')), "")
}

fn run(command: &mut Command, input: &str) -> Result<(), String> {
    let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let mut child = child.map_err(|error| format!("{command:?}: {error}"))?;
    // Who does not read has failed, and says so.
    let _ = child.stdin.take().map(|mut stdin| stdin.write_all(input.as_bytes()));
    let output = child.wait_with_output().map_err(|error| format!("{command:?}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proxy::Proxy;
    use crate::reply::Reply;
    use crate::resp::{Conn, Protocol, RecvError};
    use crate::server::Server;
    use crate::topology::SYNC_WITHIN;
    use crate::wait::{holds_for, wait_until};

    #[test]
    fn cut_is_silent_for_the_hosts_and_unknown_to_the_test() {
        let Some(network) = Network::for_test("a cut is silent", 2, 0) else { return };
        let [one, other] = network.hosts() else { panic!("two hosts") };
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
        let link = between(one.address(), other.address());
        network.begin(Damage::Cut, &link);
        arrives("meanwhile");
        holds_for("nothing arrives", Duration::from_millis(300), || below.cmd(&["GET", "k"]) == Reply::bulk("before"));
        assert_eq!(replica.info("replication").text("master_link_status"), "up", "nobody was told");
        network.end(Damage::Cut, &link);
        wait_until("it is replicated", SYNC_WITHIN, || below.cmd(&["GET", "k"]) == Reply::bulk("meanwhile"));
        assert!(!replica.log().contains("Connection with primary lost"), "{}", replica.log());
    }

    #[test]
    fn one_client_loses_its_answers_until_the_last_one_who_wants_it_ends_it() {
        let Some(network) = Network::for_test("one client loses its answers", 1, 2) else { return };
        let host = &network.hosts()[0];
        let server = Server::builder().without_module().within(host).start();
        let clients: Vec<_> = network.clients().collect();
        let proxies: Vec<_> = clients.iter().map(|client| Proxy::from_to(Some(*client), server.addr())).collect();
        let mut conns: Vec<_> = proxies.iter().map(|proxy| Conn::open(proxy.addr(), Protocol::Resp2)).collect();
        let replies = [(host.address(), clients[0])];
        network.begin(Damage::Cut, &replies);
        network.begin(Damage::Cut, &replies);
        conns[0].send(&["SET", "k", "v"]);
        assert_eq!(conns[0].recv_within(Duration::from_millis(300)), Err(RecvError::TimedOut));
        assert_eq!(conns[1].cmd(&["GET", "k"]), Reply::bulk("v"), "the request has arrived");
        network.end(Damage::Cut, &replies);
        assert_eq!(conns[0].recv_within(Duration::from_millis(300)), Err(RecvError::TimedOut));
        network.end(Damage::Cut, &replies);
        assert_eq!(conns[0].recv(), Reply::ok());
    }

    #[test]
    fn lossy_way_delivers_in_the_end() {
        let Some(network) = Network::for_test("a lossy way", 1, 1) else { return };
        let host = &network.hosts()[0];
        let server = Server::builder().without_module().within(host).start();
        let client = network.clients().next().expect("one client");
        let proxy = Proxy::from_to(Some(client), server.addr());
        let mut conn = Conn::open(proxy.addr(), Protocol::Resp2);
        assert_eq!(conn.cmd(&["SET", "k", "0"]), Reply::ok(), "the proxy has its connection too");
        network.begin(Damage::Thin, &between(host.address(), client));
        // TCP waits twice as long each time that the same packet is lost: once in a million runs for a minute.
        for number in 0..5 {
            conn.send(&["INCR", "k"]);
            assert_eq!(conn.recv_within(Duration::from_secs(60)), Ok(Reply::Int(number + 1)));
        }
    }
}
