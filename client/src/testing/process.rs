//! Where a client in memory runs: its way to the server, and its clock.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::DuplexStream;
use tokio::runtime::Handle;
use uuid::Uuid;

use crate::client::Builder;
use crate::clock::Clock;

/// A process of its own, for simulations: clients that run in it reach their server over a network that the simulation makes, and go by
/// a clock that may run a little faster or slower than others.
///
/// Clients of a [`Server`](super::Server) need none: [`Server::builder`](super::Server::builder) makes one that reaches it at once.
#[derive(Clone)]
pub struct Process {
    connect: Arc<dyn Fn() -> io::Result<DuplexStream> + Send + Sync>,
    pub(crate) clock: Clock,
    pub(crate) runtime: Handle,
    clients_ever: Arc<AtomicU64>,
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("testing::Process").finish_non_exhaustive()
    }
}

impl Process {
    /// A process on the current runtime. `connect` opens a connection to whatever server is there at that moment; the other end of the
    /// stream goes to [`Server::accept`](super::Server::accept), at once or through what delays and breaks it. Processes with different
    /// numbers have different clients; one with the same number as before has the same.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    #[must_use]
    pub fn new(number: u32, connect: impl Fn() -> io::Result<DuplexStream> + Send + Sync + 'static) -> Self {
        Self::over(
            Arc::new(AtomicU64::new(u64::from(number) << 32)),
            Clock::of_runtime(),
            Handle::current(),
            Arc::new(connect),
        )
    }

    pub(super) fn over(
        clients_ever: Arc<AtomicU64>,
        clock: Clock,
        runtime: Handle,
        connect: Arc<dyn Fn() -> io::Result<DuplexStream> + Send + Sync>,
    ) -> Self {
        Self { connect, clock, runtime, clients_ever }
    }

    /// Its clock runs faster than the runtime's by so many millionths; slower, if negative.
    #[must_use]
    pub fn clock_rate(mut self, faster_ppm: i32) -> Self {
        self.clock = self.clock.at_rate(faster_ppm);
        self
    }

    /// A client with settings of its own. It runs on this process's runtime, not on a thread of its own.
    pub fn builder(&self) -> Builder {
        Builder::in_memory(self.clone())
    }

    /// The name of the next client: not random, so that a test that fails does so again.
    pub(crate) fn next_client(&self) -> Uuid {
        Uuid::from_u64_pair(self.clients_ever.fetch_add(1, Ordering::Relaxed) + 1, 0)
    }

    /// Opens a connection.
    pub(crate) fn open(&self) -> io::Result<DuplexStream> {
        (self.connect)()
    }
}
