//! The client: how it is made, shared and shut down.

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use flock_core::Acquire;
use flock_core::wire::command::Command;
#[cfg(feature = "tls")]
use redis::ConnectionAddr;
use redis::{Client, IntoConnectionInfo, ProtocolVersion};
use tokio::runtime::Handle;
use tokio::sync::{broadcast, oneshot, watch};
use tokio::time::{Instant, timeout_at};

use crate::address::HostsUrl;
use crate::clock::{self, Clock};
use crate::dialer::Dialer;
use crate::engine::Engine;
use crate::error::ConnectError;
use crate::event::{EVENTS_KEPT, Events};
use crate::in_place::ClientThread;
use crate::jitter::Jitter;
use crate::keepalive::KeepAlive;
use crate::link::{CallError, Link, LinkConfig, Purpose};
use crate::lock::{Lock, LockAll};
use crate::nodes::{Cluster, HearShared, NodeKit, Nodes};
use crate::parties::Parties;
use crate::sentinel::{Credentials, SentinelUrl, Sentinels};
use crate::slot_map::SlotMap;
use crate::tally::Tally;
#[cfg(feature = "tls")]
use crate::tls::Certificates;

/// The kind of URL that names nodes of a cluster, and their port unless it is said.
const CLUSTER: &str = "cluster";
const CLUSTER_PORT: u16 = 6379;

/// How a client is to be. Every method takes and returns the builder; [`Builder::connect`] ends it, and refuses what makes no sense.
///
/// ```no_run
/// # use std::time::Duration;
/// # async fn example(password: &str) -> Result<(), flock_client::ConnectError> {
/// let flock = flock_client::Flock::builder("valkey://locks.example:6379")
///     .credentials(Some("orders"), password)
///     .lease(Duration::from_secs(60))
///     .connect()
///     .await?;
/// # drop(flock);
/// # Ok(())
/// # }
/// ```
///
/// | setting | unless said |
/// |---|---|
/// | `lease` | 30 s |
/// | `claim` | 5 s |
/// | `connect_timeout` | 5 s |
/// | `response_timeout` | 500 ms |
/// | `operation_timeout` | 5 s |
/// | `heartbeat` | 1 s |
/// | `timeouts_max` | 3 |
/// | `reconnect_delay_max` | 1 s |
/// | `on_runtime` | a thread of its own |
#[derive(Clone)]
#[must_use = "nothing happens until it connects"]
pub struct Builder {
    url: String,
    lease: Duration,
    claim: Duration,
    operation_timeout: Duration,
    listens: bool,
    runtime: Option<Handle>,
    link: LinkConfig,
    /// Who we are to the server, if it is not said by the URL.
    credentials: Credentials,
    /// Who we are to the sentinels.
    sentinel_credentials: Credentials,
    #[cfg(feature = "tls")]
    certificates: Certificates,
    #[cfg(feature = "testing")]
    process: Option<crate::testing::Process>,
}

impl fmt::Debug for Builder {
    /// The URL may carry a password, so it is not shown.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("lease", &self.lease)
            .field("claim", &self.claim)
            .field("operation_timeout", &self.operation_timeout)
            .field("listens", &self.listens)
            .field("link", &self.link)
            .finish_non_exhaustive()
    }
}

impl Builder {
    fn new(url: &str) -> Self {
        Self {
            url: url.to_owned(),
            lease: Duration::from_secs(30),
            claim: Duration::from_secs(5),
            operation_timeout: Duration::from_secs(5),
            listens: true,
            runtime: None,
            link: LinkConfig {
                connect_timeout: Duration::from_secs(5),
                response_timeout: Duration::from_millis(500),
                heartbeat: Duration::from_secs(1),
                timeouts_max: 3,
                reconnect_delay_max: Duration::from_secs(1),
            },
            credentials: Credentials::default(),
            sentinel_credentials: Credentials::default(),
            #[cfg(feature = "tls")]
            certificates: Certificates::default(),
            #[cfg(feature = "testing")]
            process: None,
        }
    }

    #[cfg(feature = "testing")]
    pub(crate) fn in_memory(process: crate::testing::Process) -> Self {
        Self { process: Some(process), ..Self::new("valkey://in-memory") }
    }

    /// The lease of locks that do not say theirs; see [`Lock::lease`].
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// How long a grant lasts until the client has confirmed it: what it costs others when a request reaches the server late, from a
    /// connection or a client that is dead by then. Leases up to this are granted as they are. A hold is confirmed when it has lasted for a
    /// tenth of a second; if the server cannot be reached just then, and for longer than this, the hold is lost.
    pub fn claim(mut self, claim: Duration) -> Self {
        self.claim = claim;
        self
    }

    /// How long a connection may take to be made, and how long [`Builder::connect`] tries.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.link.connect_timeout = timeout;
        self
    }

    /// How long the server may take to answer one command. What may be repeated is then sent again.
    pub fn response_timeout(mut self, timeout: Duration) -> Self {
        self.link.response_timeout = timeout;
        self
    }

    /// How long a try, a renewal, a conversion, a release or a question of an administrator may take, with its retries. How long a lock is
    /// waited for is said by [`Lock::wait`].
    pub fn operation_timeout(mut self, timeout: Duration) -> Self {
        self.operation_timeout = timeout;
        self
    }

    /// One connection only, for a user that may not subscribe to `flock:*` channels: every wait is a [`WaitMode::Poll`], and a loss is
    /// noticed by the next renewal, at a third of the lease or over a new connection.
    ///
    /// [`WaitMode::Poll`]: crate::WaitMode::Poll
    pub fn without_pubsub(mut self) -> Self {
        self.listens = false;
        self
    }

    /// Runs the client on this runtime, and not on a thread of its own. Where one task acquires and releases one lock after the other that
    /// is twice as fast, as no thread is woken in between; where many share a client it is slower.
    ///
    /// *It gives up a promise:* if that runtime, or *any one* of its threads, is blocked for longer than a lease, leases may not be renewed;
    /// if it is shut down, every hold is lost at once and nothing is given back. While nobody drives it, nothing ends, timeouts included.
    /// Best is a current-thread runtime that is always being driven.
    pub fn on_runtime(mut self, runtime: Handle) -> Self {
        self.runtime = Some(runtime);
        self
    }

    /// How often each connection is asked whether it is there, unless answers come over it anyway.
    pub fn heartbeat(mut self, interval: Duration) -> Self {
        self.link.heartbeat = interval;
        self
    }

    /// After so many timeouts in a row a connection is replaced.
    pub fn timeouts_max(mut self, timeouts: u32) -> Self {
        self.link.timeouts_max = timeouts;
        self
    }

    /// The longest pause between two attempts to connect; each is random below a ceiling that doubles up to this.
    pub fn reconnect_delay_max(mut self, delay: Duration) -> Self {
        self.link.reconnect_delay_max = delay;
        self
    }

    /// Who the client is to the server, instead of what the URL says: so that a password need not be written into one. Without a user
    /// it is that of the URL, or the server's default one. A user that needs no password (`nopass`) has any: give an empty one.
    pub fn credentials(mut self, user: Option<&str>, password: &str) -> Self {
        self.credentials = Credentials { user: user.map(str::to_owned), password: Some(password.to_owned()) };
        self
    }

    /// Who the client is to the sentinels, if they want to know; the URL's user and password are for the servers that hold the locks.
    /// Without a user it is their default one. Nothing else reads this.
    pub fn sentinel_credentials(mut self, user: Option<&str>, password: &str) -> Self {
        self.sentinel_credentials = Credentials { user: user.map(str::to_owned), password: Some(password.to_owned()) };
        self
    }

    /// Trust these certificate authorities, and no others; PEM, one or more. Without it the platform's are trusted. What cannot be read, and
    /// a URL without TLS, is refused when it connects.
    #[cfg(feature = "tls")]
    pub fn ca_certificates(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.certificates.authorities = Some(pem.into());
        self
    }

    /// Show this certificate to the server (mutual TLS): the chain and its private key, both PEM.
    #[cfg(feature = "tls")]
    pub fn client_certificate(mut self, chain_pem: impl Into<Vec<u8>>, key_pem: impl Into<Vec<u8>>) -> Self {
        self.certificates.own = Some((chain_pem.into(), key_pem.into()));
        self
    }

    /// Connects, and tries again and again until the connect timeout is over, unless the server refuses us: both connections are up and the
    /// client's channel is subscribed when this returns. Of a cluster one node has answered then who serves what; connections to the nodes
    /// are made when they are needed.
    ///
    /// From then on the client keeps them up by itself, for ever.
    ///
    /// # Errors
    /// [`ConnectError::Config`] for a URL or a setting that makes no sense, or if no sentinel knows the service;
    /// [`ConnectError::Unavailable`] if there is no connection within the connect timeout, [`ConnectError::Server`] if the server refuses
    /// us, [`ConnectError::NoModule`] if it has not loaded FLOCK (of a cluster no node is asked: its first request says so),
    /// [`ConnectError::Tls`] if it is not to be trusted or does not trust us.
    ///
    /// # Panics
    /// If [`Builder::on_runtime`] was given a runtime that was built without its timers or its I/O.
    ///
    /// # Cancel safety
    /// Dropping the future closes what was opened.
    pub async fn connect(self) -> Result<Flock, ConnectError> {
        self.check()?;
        let topology = self.topology()?;
        let flock = self.launch(topology)?;
        let engine = flock.engine();
        let until = engine.clone();
        let patience = self.link.connect_timeout;
        let up = engine.thread.ask(async move {
            let deadline = Instant::now() + patience;
            match &until.nodes {
                Nodes::One { node, .. } => {
                    node.commands.first_up(deadline).await?;
                    if until.listens {
                        node.messages.first_up(deadline).await?;
                    }
                    knows_our_commands(&node.commands, deadline).await
                }
                Nodes::Cluster(cluster) => cluster.map.first_known(deadline).await,
            }
        });
        up.await.map_err(|error| ConnectError::Unavailable(error.into()))??;
        Ok(flock)
    }

    fn check(&self) -> Result<(), ConnectError> {
        let durations = [
            ("lease", self.lease),
            ("claim", self.claim),
            ("operation_timeout", self.operation_timeout),
            ("connect_timeout", self.link.connect_timeout),
            ("response_timeout", self.link.response_timeout),
            ("heartbeat", self.link.heartbeat),
            ("reconnect_delay_max", self.link.reconnect_delay_max),
        ];
        for (name, duration) in durations {
            clock::check(name, duration).map_err(|wrong| ConnectError::Config(wrong.into()))?;
        }
        match self.link.timeouts_max {
            0 => Err(ConnectError::Config("timeouts_max is zero".into())),
            _ => Ok(()),
        }
    }

    fn topology(&self) -> Result<Topology, ConnectError> {
        if !HostsUrl::is_one(&self.url, CLUSTER) {
            return self.dialer().map(Box::new).map(Topology::One);
        }
        let form = || {
            ConnectError::Config("not a URL of the form valkey+cluster://[user][:password@]host[:port],...[/db]".into())
        };
        let url = HostsUrl::parse(&self.url, CLUSTER, CLUSTER_PORT).ok_or_else(form)?;
        let db = url.path.filter(|path| !path.is_empty()).unwrap_or("0");
        let node = self.client(&url.server(db).ok_or_else(form)?)?;
        let map = SlotMap::new(url.hosts, node.get_connection_info().clone(), self.link.connect_timeout);
        Ok(Topology::Cluster(Arc::new(map)))
    }

    fn dialer(&self) -> Result<Dialer, ConnectError> {
        #[cfg(feature = "testing")]
        if let Some(process) = &self.process {
            return Ok(Dialer::InMemory(process.clone(), self.client(&self.url)?));
        }
        if !SentinelUrl::is_one(&self.url) {
            return Ok(Dialer::Network(self.client(&self.url)?));
        }
        let form = "not a URL of the form valkey+sentinel://[user][:password@]host[:port],.../service[/db]";
        let url = SentinelUrl::parse(&self.url).ok_or(ConnectError::Config(form.into()))?;
        let server = self.client(&url.server)?;
        let LinkConfig { connect_timeout, heartbeat, .. } = self.link;
        let sentinels =
            Sentinels::new(url, server.get_connection_info(), &self.sentinel_credentials, connect_timeout, heartbeat);
        Ok(Dialer::Sentinel(Arc::new(sentinels)))
    }

    fn client(&self, url: &str) -> Result<Client, ConnectError> {
        // The error of the parser is not kept: it may quote the password.
        let wrong = |_| {
            ConnectError::Config(
                "not a URL of the form valkey://[user][:password@]host[:port][/db]; in a password write %2F for /"
                    .into(),
            )
        };
        let scheme = url.split(':').next().unwrap_or_default().to_ascii_lowercase();
        if !cfg!(feature = "tls") && matches!(&*scheme, "rediss" | "valkeys") {
            return Err(ConnectError::Config("TLS needs this crate's feature \"tls\"".into()));
        }
        if url.contains('#') {
            return Err(ConnectError::Config(
                "a URL with a fragment: there is no insecure mode; in a password write %23 for #".into(),
            ));
        }
        if !is_unix(&scheme) && url.contains('?') {
            return Err(ConnectError::Config(
                "a URL with a query: it would not be obeyed; in a password write %3F for ?".into(),
            ));
        }
        let info = url.into_connection_info().map_err(wrong)?;
        let settings = self.credentials.added_to(info.redis_settings().clone()).set_protocol(ProtocolVersion::RESP3);
        // It would not be sent: who is named would not be who asks.
        if settings.username().is_some() && settings.password().is_none() {
            return Err(ConnectError::Config(
                "a user without a password: write :password@ for a password alone, or give one with Builder::credentials".into(),
            ));
        }
        let tcp = info.tcp_settings().clone().set_nodelay(true);
        let info = info.set_redis_settings(settings).set_tcp_settings(tcp);
        #[cfg(feature = "tls")]
        if matches!(info.addr(), ConnectionAddr::TcpTls { .. }) {
            return self.certificates.client(info);
        } else if !self.certificates.are_none() {
            return Err(ConnectError::Config("certificates, and a URL without TLS: write valkeys://".into()));
        }
        Client::open(info).map_err(wrong)
    }

    /// Starts the client: on a thread of its own, on the runtime it is told, or in the process in memory that it is for.
    fn launch(&self, topology: Topology) -> Result<Flock, ConnectError> {
        #[cfg(feature = "testing")]
        if let Some(process) = &self.process {
            let (clock, runtime) = (process.clock.clone(), process.runtime.clone());
            let environment = Environment { id: process.next_client(), clock, topology, runtime };
            return Ok(self.launch_on(environment));
        }
        let environment = |runtime: &Handle| Environment {
            id: uuid::Uuid::new_v4(),
            clock: Clock::Boottime,
            topology,
            runtime: runtime.clone(),
        };
        if let Some(runtime) = &self.runtime {
            return Ok(self.launch_on(environment(runtime)));
        }
        let no_thread = |error: std::io::Error| ConnectError::Unavailable(error.into());
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .max_blocking_threads(2) // for name look-ups
            .build()
            .map_err(no_thread)?;
        let (flock, running) = self.assemble(environment(runtime.handle()));
        thread::Builder::new()
            .name("flock-client".into())
            .spawn(move || {
                runtime.block_on(running);
                runtime.shutdown_background(); // a name look-up may hang
            })
            .map_err(no_thread)?;
        Ok(flock)
    }

    /// Starts the client beside others on a runtime that is there.
    fn launch_on(&self, environment: Environment) -> Flock {
        let runtime = environment.runtime.clone();
        let (flock, running) = self.assemble(environment);
        runtime.spawn(running);
        flock
    }

    /// Puts the client together. It lives as long as the future that comes with it runs.
    fn assemble(&self, environment: Environment) -> (Flock, impl Future<Output = ()> + Send + use<>) {
        let Environment { id, clock, topology, runtime } = environment;
        let (seed, _) = id.as_u64_pair();
        let jitter = Arc::new(Jitter::new(seed));
        let name = id.simple().to_string();
        let (events, _) = broadcast::channel(EVENTS_KEPT);
        let (thread, door) = ClientThread::new(runtime.clone());
        let anew = watch::Sender::new(());
        let kit = NodeKit {
            config: self.link,
            clock: clock.clone(),
            jitter: Arc::clone(&jitter),
            events: events.clone(),
            anew: anew.clone(),
            attempts: Arc::default(),
        };
        let engine = Arc::new_cyclic(|engine: &Weak<Engine>| {
            let listener = engine.clone();
            let hear = move |message: &[u8]| {
                if let Some(engine) = listener.upgrade() {
                    engine.hear(message);
                }
            };
            let is_cluster = matches!(topology, Topology::Cluster(_));
            let nodes = match topology {
                Topology::One(dialer) => {
                    let channel: Arc<str> = format!("flock:{name}").into();
                    let messages = Purpose::Messages { channel: Arc::clone(&channel), hear: Box::new(hear) };
                    Nodes::One { node: Arc::new(kit.node(&dialer, messages)), channel }
                }
                Topology::Cluster(map) => {
                    let hear: HearShared = Arc::new(hear);
                    Nodes::Cluster(Cluster::new(map, kit, &name, &runtime, self.listens, hear))
                }
            };
            Engine {
                nodes,
                name,
                clock: clock.clone(),
                jitter: Arc::clone(&jitter),
                events: events.clone(),
                anew: anew.clone(),
                parties: Parties::default(),
                keepalive: KeepAlive::new(),
                response_timeout: self.link.response_timeout,
                operation_timeout: self.operation_timeout,
                claim: self.claim,
                listens: self.listens,
                grace_min: (!is_cluster).then_some(2 * self.link.heartbeat + self.link.response_timeout),
                thread,
                numbers: AtomicU64::new(1),
                closing: watch::Sender::new(false),
                is_clean: AtomicBool::new(false),
                waits: Tally::default(),
                errands: Tally::default(),
            }
        });
        let stop = watch::Sender::new(false);
        let running = Arc::clone(&engine).run(door, stop.subscribe());
        (Flock { shared: Arc::new(Shared { engine, stop, lease: self.lease }) }, running)
    }
}

/// Fails if the server has no FLOCK. It is sent a command without arguments: how many there are is looked at before permissions are, so that
/// every user learns it, and nothing is done. A server that does not answer just now is no worse than one that breaks a moment later.
async fn knows_our_commands(commands: &Link, deadline: Instant) -> Result<(), ConnectError> {
    match timeout_at(deadline, commands.call(&redis::cmd(Acquire::NAME), |_| Some(()))).await {
        Ok(Err(CallError::Server(error))) if error.is_unknown_command() => Err(ConnectError::NoModule(error)),
        _ => Ok(()),
    }
}

/// Whether a URL with this scheme names a socket in the file system.
fn is_unix(scheme: &str) -> bool {
    scheme.split('+').any(|part| part == "unix")
}

/// What a client needs beside its settings.
struct Environment {
    id: uuid::Uuid,
    clock: Clock,
    topology: Topology,
    runtime: Handle,
}

/// How servers are found.
enum Topology {
    One(Box<Dialer>),
    Cluster(Arc<SlotMap>),
}

/// A client of one primary, or of a cluster: cheap to clone, and usable from any thread and any async runtime.
///
/// It has two connections (of a cluster, two to each primary that it needs) and a thread of its own, which live until the last clone and
/// the last guard are gone; acquisitions that wait for replicas have a few connections more. A process that returns from `main` ends
/// that thread too: call [`Flock::shutdown`] before, or what was just dropped may not be given back.
#[derive(Clone)]
pub struct Flock {
    shared: Arc<Shared>,
}

struct Shared {
    engine: Arc<Engine>,
    stop: watch::Sender<bool>,
    lease: Duration,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.stop.send_replace(true);
    }
}

impl fmt::Debug for Flock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flock").field("name", &self.shared.engine.name).finish_non_exhaustive()
    }
}

/// [`Flock::shutdown`] was not done in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not everything was given back in time")]
pub struct ShutdownTimedOut;

impl Flock {
    /// Connects with the default settings: `valkey://[user][:password@]host[:port][/db]`, `redis://...`, or
    /// `unix:///path[?db=..&user=..&pass=..]`; with the feature `tls` also `valkeys://...` and `rediss://...`.
    ///
    /// Where Sentinel watches over the servers: `valkey+sentinel://[user][:password@]host1[:port],host2[:port],.../service[/db]`, or
    /// `redis+sentinel://...`; the port is 26379 unless said. The sentinels named are asked for the primary of the service, and for
    /// sentinels that are not named. With `valkeys+sentinel://...` and `rediss+sentinel://...` servers and sentinels speak TLS, all of
    /// them. The client follows the primary from one server to another: what waits is asked for again, what is held is renewed, and
    /// lost if the new primary does not know it.
    ///
    /// A cluster: `valkey+cluster://[user][:password@]host1[:port],host2[:port],...[/db]`, or `redis+cluster://...`; with
    /// `valkeys+cluster://...` and `rediss+cluster://...` by TLS. The port is 6379 unless said. One of the nodes named is enough to learn of
    /// the others. Each lock is asked for at the node that serves its slot, and followed when the slot moves or the node fails. The user
    /// needs `+ssubscribe +sunsubscribe +asking +cluster|slots +cluster|nodes` beside what one server wants.
    ///
    /// # Errors
    /// As [`Builder::connect`].
    ///
    /// # Cancel safety
    /// Dropping the future closes what was opened.
    pub async fn connect(url: impl AsRef<str>) -> Result<Self, ConnectError> {
        Self::builder(url).connect().await
    }

    /// A client with settings of its own.
    pub fn builder(url: impl AsRef<str>) -> Builder {
        Builder::new(url.as_ref())
    }

    /// A lock, exclusive unless told otherwise; nothing happens until it is awaited.
    pub fn lock(&self, key: impl AsRef<[u8]>) -> Lock {
        Lock::new(self.clone(), key.as_ref())
    }

    /// Several locks, all or nothing. A key that is named twice is locked once; of no keys at all, an empty set is acquired at once.
    pub fn lock_all(&self, keys: impl IntoIterator<Item = impl AsRef<[u8]>>) -> LockAll {
        LockAll::new(self.clone(), keys)
    }

    /// What happens to this client from now on: its connections, refusals that may pass, failed renewals, losses.
    #[must_use]
    pub fn events(&self) -> Events {
        Events { receiver: self.shared.engine.events.subscribe() }
    }

    /// Ends the client for all its clones: waiting acquisitions fail, what is still held is lost and given back, and this returns
    /// when the server has confirmed all that. It does not wait for futures that nobody polls: what they were to release is released for
    /// them.
    ///
    /// # Errors
    /// [`ShutdownTimedOut`] if that took longer than `timeout`; what is left ends with its lease.
    ///
    /// # Cancel safety
    /// The shutdown goes on in the background if the future is dropped once it was polled.
    pub async fn shutdown(&self, timeout: Duration) -> Result<(), ShutdownTimedOut> {
        let engine = self.engine();
        engine.closing.send_replace(true);
        engine.end_all();
        let (done, is_done) = oneshot::channel();
        let (ending, stop) = (engine.clone(), self.shared.stop.clone());
        engine.runtime().spawn(async move {
            let given_back = async {
                // What waits gives up by itself, in its own task; or it has become a hold a moment ago.
                ending.waits.until_none().await;
                ending.end_asked();
                ending.end_all();
                ending.thread.take_over_all();
                ending.errands.until_none().await;
            };
            let is_clean = tokio::time::timeout(timeout, given_back).await.is_ok();
            ending.end_all();
            ending.is_clean.store(is_clean, Ordering::Release);
            let _ = done.send(is_clean);
            stop.send_replace(true);
        });
        // The client's thread may have ended by now: what the last shutdown came to stands then.
        let is_clean = is_done.await.unwrap_or_else(|_| engine.is_clean.load(Ordering::Acquire));
        if is_clean { Ok(()) } else { Err(ShutdownTimedOut) }
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.shared.engine
    }

    pub(crate) fn lease_default(&self) -> Duration {
        self.shared.lease
    }

    #[cfg(test)]
    fn unconnected() -> Result<Self, ConnectError> {
        let builder = Self::builder("valkey://127.0.0.1:1");
        builder.launch(builder.topology()?)
    }
}

#[cfg(test)]
mod tests {
    use std::future::IntoFuture;

    use super::*;
    use crate::address::Address;
    use crate::error::AcquireError;

    #[test]
    fn password_is_shown_nowhere() {
        let builder = Flock::builder("valkey://user:secret@host:1");
        assert!(!format!("{builder:?}").contains("secret"));
        let error = Flock::builder("http://user:secret@host").dialer().unwrap_err();
        assert!(!format!("{error:?} {error}").contains("secret"));
    }

    #[test]
    fn small_requests_are_not_held_back() {
        let client = Flock::builder("").client("valkey://h").unwrap();
        assert!(client.get_connection_info().tcp_settings().nodelay());
        let node = Address { host: "n".into(), port: 1 }.put_into(client.get_connection_info());
        assert!(node.tcp_settings().nodelay(), "nor those to the other nodes");
    }

    #[test]
    fn urls_without_a_meaning_are_refused() {
        let told = |url| match Flock::builder(url).topology() {
            Err(ConnectError::Config(what)) => what,
            outcome => panic!("{url}: {outcome:?}", outcome = outcome.err()),
        };
        for url in ["", "host", "http://host", "valkey://:pass/word@host"] {
            assert!(told(url).starts_with("not a URL of the form"), "{url}");
        }
        let secure = cfg!(feature = "tls").then_some("rediss://host/#insecure");
        for url in ["valkey://host#x", "valkey://:pass#word@host"].into_iter().chain(secure) {
            assert!(told(url).contains("write %23"), "{url}");
        }
        for url in ["valkey://host?x=1", "valkey://host/1?protocol=resp2"] {
            assert!(told(url).contains("query"), "{url}");
        }
        for url in ["valkey://secret@host", "unix:///s?user=me", "valkey+sentinel://me@a/s", "valkey+cluster://me@a"] {
            assert!(told(url).starts_with("a user without a password"), "{url}");
            assert!(Flock::builder(url).credentials(None, "x").topology().is_ok(), "{url}");
        }
        for url in ["rediss://host", "valkeys://host"] {
            assert_eq!(Flock::builder(url).dialer().is_ok(), cfg!(feature = "tls"), "{url}");
        }
        for url in ["valkey://h", "redis://u:p@h:1/2", "unix:///run/valkey.sock"] {
            assert!(Flock::builder(url).dialer().is_ok(), "{url}");
        }
    }

    #[tokio::test]
    async fn settings_that_make_no_sense_are_refused() {
        let error = Flock::builder("valkey://h").lease(Duration::ZERO).connect().await.unwrap_err();
        assert_eq!(error.to_string(), "bad configuration: lease is zero");
        let settings: [fn(Builder, Duration) -> Builder; 6] = [
            Builder::claim,
            Builder::operation_timeout,
            Builder::connect_timeout,
            Builder::response_timeout,
            Builder::heartbeat,
            Builder::reconnect_delay_max,
        ];
        for set in settings {
            for wrong in [Duration::ZERO, Duration::MAX] {
                let refused = set(Flock::builder("valkey://h"), wrong).connect().await;
                assert!(matches!(refused, Err(ConnectError::Config(_))), "{refused:?}");
            }
        }
    }

    #[test]
    fn credentials_are_those_of_the_url_or_replace_them() {
        let login = |builder: Builder| {
            let client = builder.client(&builder.url).unwrap();
            let settings = client.get_connection_info().redis_settings();
            (settings.username().map(str::to_owned), settings.password().map(str::to_owned))
        };
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(login(Flock::builder("valkey://me:old@h")), (some("me"), some("old")));
        assert_eq!(
            login(Flock::builder("valkey://me:old@h").credentials(None, "p@/%41")),
            (some("me"), some("p@/%41"))
        );
        assert_eq!(login(Flock::builder("unix:///s").credentials(Some("you"), "x")), (some("you"), some("x")));
    }

    #[cfg(feature = "tls")]
    #[test]
    fn certificates_count_or_are_refused() {
        let with_authority = |url: &str| Flock::builder(url).ca_certificates("no certificate");
        for url in ["valkey://h", "redis://h", "unix:///run/valkey.sock"] {
            let error = with_authority(url).client(url).unwrap_err();
            assert!(error.to_string().contains("without TLS"), "{url}: {error}");
        }
        for url in ["valkeys://h", "REDISS://h", "Valkeys://h"] {
            let client = with_authority(url).client(url).unwrap();
            assert!(format!("{client:?}").contains("0 roots"), "{url}: {client:?}"); // what is given is trusted, and nothing else
        }
    }

    #[tokio::test]
    async fn server_that_is_not_there_is_unavailable() {
        let builder = Flock::builder("valkey://127.0.0.1:1").connect_timeout(Duration::from_millis(50));
        let error = builder.connect().await.unwrap_err();
        assert!(matches!(error, ConnectError::Unavailable(_)), "{error:?}");
        assert!(error.is_retryable());
        let first = std::error::Error::source(&error).unwrap();
        assert!(first.to_string().starts_with("Connection refused"), "{first}");
        assert!(first.source().is_none(), "the same reason again: {:?}", first.source());
    }

    #[tokio::test]
    async fn request_that_makes_no_sense_is_not_sent() {
        let flock = Flock::unconnected().unwrap();
        for lock in [
            flock.lock("k").lease(Duration::ZERO),
            flock.lock("k").max_hold(Duration::ZERO),
            flock.lock("k").lease(Duration::MAX),
            flock.lock("k").max_hold(Duration::MAX),
            flock.lock("k").session(Duration::MAX),
            flock.lock("k").acknowledged_by(1, Duration::MAX),
            flock.lock("k").label([b'x'; 257]),
        ] {
            assert!(matches!(lock.await, Err(AcquireError::Config(_))));
        }
    }

    #[tokio::test]
    async fn acquisition_without_a_server_ends_at_its_deadline() {
        let flock = Flock::unconnected().unwrap();
        let error = flock.lock("k").wait(Duration::from_millis(20)).await.unwrap_err();
        assert!(matches!(error, AcquireError::Unavailable(_)), "{error:?}");
    }

    #[tokio::test]
    async fn request_that_was_never_sent_is_not_given_back() {
        let flock = Flock::unconnected().unwrap();
        let waits = (0..100).map(|_| tokio::spawn(flock.lock("k").wait(Duration::from_millis(20)).into_future()));
        for wait in waits.collect::<Vec<_>>() {
            assert!(wait.await.unwrap().is_err());
        }
        // A dropped wait undoes itself on the client's thread.
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(flock.engine().errands.count(), 0);
    }

    #[tokio::test]
    async fn client_that_is_shut_down_acquires_nothing() {
        let flock = Flock::unconnected().unwrap();
        assert_eq!(flock.shutdown(Duration::from_millis(100)).await, Ok(()));
        assert!(matches!(flock.lock("k").await, Err(AcquireError::ShutDown)));
    }
}
