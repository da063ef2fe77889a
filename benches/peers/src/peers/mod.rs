//! The peers, each as somebody who wants a lock.
//!
//! | file | peer |
//! |---|---|
//! | [`flock`] | flock-client, by push and by polling; plain connections that block |
//! | [`crates`] | the crates `rslock` and `redlock` |
//! | [`redisson`] | Redisson's two locks, by its scripts and its way of waiting |
//! | [`postgres`] | advisory locks of PostgreSQL |
//! | [`etcd`] | the lock service of etcd, through its JSON gateway |
//! | [`scripts`] | redis-py and node-redlock, each in a process of its own |

pub(crate) mod crates;
pub(crate) mod etcd;
pub(crate) mod flock;
pub(crate) mod postgres;
pub(crate) mod redisson;
pub(crate) mod scripts;

use std::time::Duration;

/// The lock that all want.
pub(crate) const LOCK: &str = "lock:wanted-by-all";
/// Longer than anybody holds it: nobody renews.
pub(crate) const LEASE: Duration = Duration::from_secs(60);
/// More contenders than this share clients, as tasks of one process do.
pub(crate) const CLIENTS: usize = 8;

/// Somebody who wants the lock, again and again.
pub(crate) trait Contender: Send + 'static {
    /// Returns when it has the lock.
    fn acquire(&mut self) -> impl Future<Output = ()> + Send;
    /// Gives it back.
    fn release(&mut self) -> impl Future<Output = ()> + Send;
}

/// Somebody who can also share it.
pub(crate) trait Reader: Contender {
    /// Returns when it shares the lock.
    fn acquire_shared(&mut self) -> impl Future<Output = ()> + Send;
    /// Gives its share back.
    fn release_shared(&mut self) -> impl Future<Output = ()> + Send;
}
