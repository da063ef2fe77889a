//! FLOCK: the client, and plain connections.

use std::net::SocketAddr;

use flock_client::{Builder, Flock, Guard, WaitMode};
use redis::AsyncConnectionConfig;
use redis::aio::MultiplexedConnection;
use tokio::runtime::Handle;

use super::{CLIENTS, Contender, LEASE, LOCK, Reader};

/// A task that uses flock-client.
pub(crate) struct Client {
    flock: Flock,
    mode: WaitMode,
    guard: Option<Guard>,
}

/// `count` tasks, dealt to at most [`CLIENTS`] clients.
pub(crate) async fn clients(server: SocketAddr, count: usize, mode: WaitMode) -> Vec<Client> {
    clients_as(server, count, mode, |builder| builder).await
}

/// The same by push, without a thread of the client's own.
pub(crate) async fn clients_on_runtime(server: SocketAddr, count: usize) -> Vec<Client> {
    clients_as(server, count, WaitMode::Push, |builder| builder.on_runtime(Handle::current())).await
}

async fn clients_as(server: SocketAddr, count: usize, mode: WaitMode, set: fn(Builder) -> Builder) -> Vec<Client> {
    let mut flocks = Vec::new();
    for _ in 0..count.min(CLIENTS) {
        let builder = set(Flock::builder(format!("valkey://{server}")));
        flocks.push(builder.connect().await.expect("the server answers"));
    }
    let client = |task| Client { flock: flock_of(&flocks, task), mode, guard: None };
    (0..count).map(client).collect()
}

fn flock_of(flocks: &[Flock], task: usize) -> Flock {
    flocks[task % flocks.len()].clone()
}

impl Contender for Client {
    async fn acquire(&mut self) {
        let lock = self.flock.lock(LOCK).lease(LEASE).wait_mode(self.mode);
        self.guard = Some(lock.await.expect("the lock is granted"));
    }

    async fn release(&mut self) {
        let guard = self.guard.take().expect("it holds the lock");
        let _ = guard.release().await.expect("the lock is given back");
    }
}

impl Reader for Client {
    async fn acquire_shared(&mut self) {
        let lock = self.flock.lock(LOCK).lease(LEASE).wait_mode(self.mode).shared();
        self.guard = Some(lock.await.expect("the lock is granted"));
    }

    async fn release_shared(&mut self) {
        self.release().await;
    }
}

/// A connection that blocks while it waits.
pub(crate) struct Blocking {
    conn: MultiplexedConnection,
    owner: String,
    acquired: u64,
}

/// `count` connections.
pub(crate) async fn blocking(server: SocketAddr, count: usize) -> Vec<Blocking> {
    let client = redis::Client::open(format!("redis://{server}")).expect("the address is one");
    let mut all = Vec::new();
    for number in 0..count {
        let config = AsyncConnectionConfig::new().set_response_timeout(None);
        let conn = client.get_multiplexed_async_connection_with_config(&config).await.expect("the server answers");
        all.push(Blocking { conn, owner: format!("{number:08x}"), acquired: 0 });
    }
    all
}

impl Blocking {
    async fn ask(&mut self, share: bool) {
        self.acquired += 1;
        let mut command = redis::cmd("FLOCK.ACQUIRE");
        command.arg(LOCK).arg(self.owner()).arg(LEASE.as_millis() as u64);
        if share {
            command.arg("SHARED");
        }
        command.arg("BLOCK").arg(0);
        let token: u64 = command.query_async(&mut self.conn).await.expect("the lock is granted");
        assert!(token > 0);
    }

    /// Another for each acquisition, as long as a UUID.
    fn owner(&self) -> String {
        format!("{}{:024x}", self.owner, self.acquired)
    }
}

impl Contender for Blocking {
    async fn acquire(&mut self) {
        self.ask(false).await;
    }

    async fn release(&mut self) {
        let owner = self.owner();
        let released = redis::cmd("FLOCK.RELEASE").arg(LOCK).arg(owner).query_async::<u64>(&mut self.conn).await;
        assert_eq!(released.expect("the server answers"), 1);
    }
}

impl Reader for Blocking {
    async fn acquire_shared(&mut self) {
        self.ask(true).await;
    }

    async fn release_shared(&mut self) {
        self.release().await;
    }
}
