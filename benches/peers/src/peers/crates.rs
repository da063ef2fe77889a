//! The crates `rslock` and `redlock`, with the delays that they have unless told otherwise, on one server.

use std::net::SocketAddr;
use std::sync::Arc;

use ::redlock::RedLock;
use ::rslock::{LockGuard, LockManager};

use super::{CLIENTS, Contender, LEASE, LOCK};

/// A task that uses `rslock`.
pub(crate) struct Rslock {
    manager: LockManager,
    guard: Option<LockGuard>,
}

/// `count` tasks, dealt to at most [`CLIENTS`] managers.
pub(crate) fn rslock(server: SocketAddr, count: usize) -> Vec<Rslock> {
    let managers: Vec<_> =
        (0..count.min(CLIENTS)).map(|_| LockManager::new(vec![format!("redis://{server}/")])).collect();
    (0..count).map(|task| Rslock { manager: managers[task % managers.len()].clone(), guard: None }).collect()
}

impl Contender for Rslock {
    async fn acquire(&mut self) {
        self.guard = Some(self.manager.acquire(LOCK, LEASE).await.expect("it tries until it has the lock"));
    }

    async fn release(&mut self) {
        self.guard.take().expect("it holds the lock").release().await;
    }
}

/// A thread that uses `redlock`, which opens a connection for every command.
pub(crate) struct Redlock {
    manager: Arc<RedLock>,
    value: Vec<u8>,
}

/// `count` threads.
pub(crate) fn redlock(server: SocketAddr, count: usize) -> Vec<Redlock> {
    let manager = Arc::new(RedLock::new(vec![format!("redis://{server}/")]));
    (0..count).map(|_| Redlock { manager: Arc::clone(&manager), value: Vec::new() }).collect()
}

impl Contender for Redlock {
    async fn acquire(&mut self) {
        let manager = Arc::clone(&self.manager);
        let acquire = move || {
            loop {
                // An error is a connection that could not be had: the server's backlog is full.
                if let Ok(Some(lock)) = manager.lock(LOCK.as_bytes(), LEASE.as_millis() as usize) {
                    return lock.val;
                }
            }
        };
        self.value = tokio::task::spawn_blocking(acquire).await.expect("it tries until it has the lock");
    }

    async fn release(&mut self) {
        let (manager, val) = (Arc::clone(&self.manager), std::mem::take(&mut self.value));
        let release = move || {
            let lock_manager = manager.as_ref();
            manager.unlock(&::redlock::Lock { resource: LOCK.into(), val, validity_time: 0, lock_manager });
        };
        tokio::task::spawn_blocking(release).await.expect("it is given back");
    }
}
