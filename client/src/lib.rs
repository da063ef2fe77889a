//! The async Rust client of FLOCK: fenced distributed locks in Valkey.
//!
//! ```no_run
//! use std::time::Duration;
//! use flock_client::Flock;
//!
//! # async fn write_order(_token: flock_client::Token) {}
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let flock = Flock::connect("valkey://127.0.0.1:6379").await?; // cheap to clone
//!
//! // Waits in the server's queue for up to 3 s; renewed in the background from then on.
//! let guard = flock.lock("order:1001").lease(Duration::from_secs(30)).wait(Duration::from_secs(3)).await?;
//! write_order(guard.token()).await; // the storage refuses a token lower than the last it saw
//! guard.release().await?; // after the commit; dropping the guard releases in the background
//!
//! // Or: released after the work, and the work is cancelled if the lock is lost.
//! flock.lock("order:1001").run(|token| write_order(token)).await?;
//!
//! flock.shutdown(Duration::from_secs(5)).await?; // before main returns
//! # Ok(())
//! # }
//! ```
//!
//! # What it promises
//!
//! * **Order.** Waiting requests are queued in the server, first come first served, and the grant is pushed to the next the moment the
//!   lock is free. Nobody polls, unless told to ([`WaitMode::Poll`]).
//! * **A belief that ends first.** [`Guard::is_valid`] says no before the server lets anybody else in: it counts from before the
//!   request was sent, on a clock that counts suspended time, less a margin. A process that was stopped sees the loss before it acts.
//! * **Nothing stays behind.** Dropping any future or guard, at any point and anywhere, gives back what it had or waited for. A
//!   request that reaches the server when its connection is dead costs [`Builder::claim`], not a lease.
//! * **Retries that are safe.** Each acquisition has an owner of its own, and every request of it may be repeated.
//! * **Connections that heal.** Two connections, watched by heartbeats, replaced when they break or fall silent; who waits asks again.
//! * **Your runtime is not in the way.** All that runs on a thread of the client's own: a busy or blocked runtime costs no lease.
//!
//! # What it does not promise
//!
//! * **No lock service excludes a paused process.** Between the look at [`Guard::is_valid`] and the write, time passes. Send
//!   [`Guard::token`] with every write and let the storage accept it only if it is higher than the last, or the last itself.
//! * **A failover can grant twice.** Valkey replicates asynchronously: what the old primary granted last may be unknown to the new one.
//!   The token covers that, if the storage checks it.
//! * **A killed process gives nothing back.** Its locks are free when their leases are over.
//! * **One server, reached directly.** Cluster and Sentinel are not supported yet, nor is TLS. A connection pooler in between would mix
//!   up whose connection is whose.
//!
//! # Where to read
//!
//! [`Flock`] connects, [`Lock`] asks, [`Guard`] holds; [`error`] tells the outcomes apart; [`Event`] is for logs.
#![forbid(unsafe_code)]

mod acquire;
mod client;
mod clock;
mod engine;
pub mod error;
mod event;
mod guard;
mod hold;
mod jitter;
mod keepalive;
mod link;
mod lock;
mod waiters;
mod wire;

pub use client::{Builder, Flock, ShutdownTimedOut};
pub use error::{AcquireError, ConnectError, HoldError, LossReason, RunError, ServerError};
pub use event::{Event, Events};
pub use flock_core::Token;
pub use flock_core::wire::error::ErrorCode;
pub use guard::{Guard, GuardSet, Released};
pub use lock::{Lock, LockAll, WaitMode};
