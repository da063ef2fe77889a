//! A FLOCK server in memory, for tests of code that uses this crate: no process, no socket, and time that a test may pause.
//!
//! Its rules are the real server's, not an imitation: the same crate `flock-core` decides in both. A client of it is the real client
//! too: requests, replies and messages are encoded, sent over an in-memory pipe, and parsed. What is different is what a test wants
//! different: it all runs on the test's own runtime and goes by that runtime's time.
//!
//! ```
//! use std::time::Duration;
//! use flock_client::testing::Server;
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // In a #[tokio::test(start_paused = true)]:
//! let server = Server::new();
//! let (alice, bob) = (server.client().await, server.client().await);
//!
//! let guard = alice.lock("jobs").lease(Duration::from_secs(30)).await?;
//! tokio::time::sleep(Duration::from_secs(3600)).await; // takes no time at all
//! assert!(guard.is_valid()); // renewed all the while
//!
//! server.stop(); // nobody can renew any more: the client knows before others get in
//! guard.lost().await;
//!
//! server.start();
//! let next = bob.lock("jobs").await?;
//! assert!(next.token() > guard.token());
//! # Ok(())
//! # }
//! ```
//!
//! # Time
//!
//! With `start_paused = true` (feature `test-util` of tokio) an hour passes at once when everybody sleeps. `tokio::time::sleep` lets the
//! client do its work meanwhile, as if the time had really passed. `tokio::time::advance` jumps: nobody did anything meanwhile, as if
//! the whole process had been stopped, so leases run out. Without pausing it all goes in real time.
//!
//! # What is not here
//!
//! No statistics, and no replica that could acknowledge a grant. A replica is told of changes by the test, and promoted by
//! it ([`Server::replicated`]). Nobody is asked for a password. The commands are those that this crate sends; other clients, BLOCK, MULTI and
//! scripts need a real server.

mod node;
mod process;
mod replication;
mod resp;

pub use process::Process;
pub use replication::Replicated;

use std::fmt;
use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use flock_core::token::WallClock;
use flock_core::{Time, Token};
use tokio::io::{AsyncWriteExt, BufReader, DuplexStream, duplex, split};
use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc};
use tokio::time::sleep;

use crate::client::{Builder, Flock};
use crate::clock::Clock;
use crate::mutex::lock;
use node::Node;

/// Bytes under way in one direction of a connection.
const PIPE_BYTES: usize = 64 * 1024;

/// A server in memory. Cheap to clone; it ends with its last clone and its last client.
#[derive(Clone)]
pub struct Server {
    shared: Arc<Shared>,
}

struct Shared {
    node: Mutex<Node>,
    clock: Clock,
    runtime: Handle,
    clients_ever: Arc<AtomicU64>,
    /// Something may be due earlier than it was.
    earlier: Arc<Notify>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.earlier.notify_one();
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("testing::Server").finish_non_exhaustive()
    }
}

impl Default for Server {
    fn default() -> Self {
        Self::new()
    }
}

impl Server {
    /// A server with no locks, on the current runtime.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    #[must_use]
    pub fn new() -> Self {
        let clock = Clock::of_runtime();
        let node = Node::new(clock.now());
        Self::with_node(node, clock)
    }

    /// A server with no locks that decides nothing: it applies what it is told, and refuses requests, until it is promoted. See
    /// [`Server::replicated`].
    ///
    /// # Panics
    /// Outside a tokio runtime.
    #[must_use]
    pub fn replica() -> Self {
        Self::with_node(Node::replica(), Clock::of_runtime())
    }

    fn with_node(node: Node, clock: Clock) -> Self {
        let shared = Arc::new(Shared {
            node: Mutex::new(node),
            clock,
            runtime: Handle::current(),
            clients_ever: Arc::default(),
            earlier: Arc::default(),
        });
        shared.runtime.spawn(keep_time(Arc::downgrade(&shared), Arc::clone(&shared.earlier)));
        Self { shared }
    }

    /// A client with the default settings. Each stands for a process of its own.
    ///
    /// # Panics
    /// If the server is stopped: there is nothing to connect to.
    ///
    /// # Cancel safety
    /// As [`Builder::connect`].
    #[must_use = "a client that is dropped closes its connections"]
    pub async fn client(&self) -> Flock {
        self.builder().connect().await.expect("a server in memory that is not stopped can be connected to")
    }

    /// A client with settings of its own. It runs on this server's runtime, not on a thread of its own.
    pub fn builder(&self) -> Builder {
        let server = self.clone();
        Process::over(
            Arc::clone(&self.shared.clients_ever),
            self.shared.clock.clone(),
            self.shared.runtime.clone(),
            Arc::new(move || server.open()),
        )
        .builder()
    }

    /// From now on the server cannot be reached: every connection ends, and new ones are refused. Leases run on.
    pub fn stop(&self) {
        self.with(|node, _| {
            node.reachable = false;
            node.cut_all();
        });
    }

    /// The server can be reached again. It knows what it knew.
    pub fn start(&self) {
        self.with(|node, _| node.reachable = true);
    }

    /// The server can be reached again, and knows nothing any more: one without persistence that was restarted. Whoever was connected is not
    /// any more. Its tokens are above all earlier ones, as those of a real server are by its clock.
    ///
    /// ```
    /// # use flock_client::LossReason;
    /// # use flock_client::testing::Server;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let server = Server::new();
    /// let (alice, bob) = (server.client().await, server.client().await);
    /// let guard = alice.lock("jobs").await?;
    /// server.stop();
    /// server.start_empty();
    /// let next = bob.lock("jobs").await?; // at once, though the lease of the first has not run out
    /// assert_eq!(guard.lost().await, Some(LossReason::Gone));
    /// assert!(next.token() > guard.token());
    /// # Ok(())
    /// # }
    /// ```
    pub fn start_empty(&self) {
        self.with(|node, now| node.restart(now));
    }

    /// Ends every connection; clients connect anew.
    pub fn cut_connections(&self) {
        self.with(|node, _| node.cut_all());
    }

    /// Ends the holds of one lock, as an administrator does; the next in the queue has it. Answers how many there were.
    pub fn revoke(&self, key: impl AsRef<[u8]>) -> usize {
        self.with(|node, now| node.revoke(now, key.as_ref()))
    }

    /// The tokens of those who hold this lock, as the server sees it; the oldest first.
    #[must_use]
    pub fn holders(&self, key: impl AsRef<[u8]>) -> Vec<Token> {
        self.with(|node, _| node.holders(key.as_ref()))
    }

    /// How many wait for this lock in the server's queue.
    #[must_use]
    pub fn waiters(&self, key: impl AsRef<[u8]>) -> usize {
        self.with(|node, _| node.waiters(key.as_ref()))
    }

    /// How many connections are open; a client has two, one without pub/sub.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.with(|node, _| node.connections())
    }

    /// How long the hold with this token lasts from now on, as this server sees it, if there is one.
    #[must_use]
    pub fn lease_left(&self, key: impl AsRef<[u8]>, token: Token) -> Option<Duration> {
        let deadline = self.with(|node, _| node.deadline(key.as_ref(), token));
        deadline.map(|deadline| self.shared.clock.until(deadline))
    }

    /// A copy of all that is durable, and from then on all that changes. Nothing arrives by itself: whoever plays the network brings it to
    /// [`Server::apply`] of a replica, in order and as late as it pleases. What has not been brought when that is promoted is lost, as with
    /// real servers.
    #[must_use]
    pub fn replicated(&self) -> mpsc::UnboundedReceiver<Replicated> {
        let (follower, changes) = mpsc::unbounded_channel();
        self.with(|node, _| node.followed_by(follower));
        changes
    }

    /// Applies what the primary has replicated.
    ///
    /// # Panics
    /// If it cannot be read, which is a bug of this crate.
    pub fn apply(&self, replicated: &Replicated) {
        self.with(|node, now| node.apply(now, replicated)).expect("what a server replicates can be read");
    }

    /// This replica decides from now on. Its wall clock says so many microseconds since 1970. Answers the number above which all its tokens
    /// will be.
    pub fn promote(&self, wall_clock_us: u64) -> u64 {
        self.with(|node, now| node.promote(now, WallClock::from_unix_us(wall_clock_us)))
    }

    /// This primary decides no more: all waits end, and requests are refused. Its connections stay.
    pub fn demote(&self) {
        self.with(|node, _| node.demote());
    }

    /// Opens a connection.
    fn open(&self) -> io::Result<DuplexStream> {
        let (theirs, ours) = duplex(PIPE_BYTES);
        self.take_in(ours, None)?;
        Ok(theirs)
    }

    /// Serves a connection from this address, whose other end is a client's. It ends when either end is dropped. No two connections come
    /// from one address: by that and its number, a client ends the one that it had before.
    ///
    /// # Errors
    /// [`io::ErrorKind::ConnectionRefused`] if this server is stopped.
    pub fn accept(&self, stream: DuplexStream, from: SocketAddr) -> io::Result<()> {
        self.take_in(stream, Some(from))
    }

    fn take_in(&self, stream: DuplexStream, from: Option<SocketAddr>) -> io::Result<()> {
        let (out, replies) = mpsc::unbounded_channel();
        let id = self.with(|node, _| node.reachable.then(|| node.connected(out, from)));
        let id = id.ok_or(io::ErrorKind::ConnectionRefused)?;
        self.shared.runtime.spawn(serve(self.clone(), id, stream, replies));
        Ok(())
    }

    /// Does something to the server at this moment, and before and after it what is due.
    fn with<T>(&self, act: impl FnOnce(&mut Node, Time) -> T) -> T {
        self.shared.with(act)
    }
}

impl Shared {
    fn with<T>(&self, act: impl FnOnce(&mut Node, Time) -> T) -> T {
        let now = self.clock.now();
        let mut node = lock(&self.node);
        node.perform_due(now);
        let outcome = act(&mut node, now);
        node.perform_due(now);
        drop(node);
        self.earlier.notify_one();
        outcome
    }
}

/// Performs what is due when it is due, as long as the server exists.
async fn keep_time(server: Weak<Shared>, earlier: Arc<Notify>) {
    loop {
        let pause = {
            let Some(server) = server.upgrade() else { return };
            let now = server.clock.now();
            let mut node = lock(&server.node);
            node.perform_due(now);
            node.next_deadline().map(|at| server.clock.until(at))
        };
        let due = async {
            match pause {
                Some(pause) => sleep(pause).await,
                None => pending().await,
            }
        };
        tokio::select! {
            () = due => {}
            () = earlier.notified() => {}
        }
    }
}

/// Serves one connection until either end closes it.
async fn serve(server: Server, id: u64, stream: DuplexStream, mut replies: mpsc::UnboundedReceiver<Vec<u8>>) {
    let (reader, mut writer) = split(stream);
    let reading = async {
        let mut reader = BufReader::new(reader);
        while let Ok(Some(request)) = resp::read_request(&mut reader).await {
            server.with(|node, now| node.execute(now, id, &request));
        }
    };
    // Ends when the node has let go of the connection: it has the other end.
    let writing = async {
        while let Some(reply) = replies.recv().await {
            if writer.write_all(&reply).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = reading => {}
        () = writing => {}
    }
    server.with(|node, _| node.cut(id));
}
