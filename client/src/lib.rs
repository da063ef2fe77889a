//! The async Rust client of FLOCK: fenced distributed locks in Valkey. The server must have FLOCK's module loaded (`--loadmodule
//! .../libflock.so`); without it connecting fails with [`ConnectError::NoModule`].
//!
//! ```no_run
//! use std::time::Duration;
//! use flock_client::{Flock, Released};
//!
//! # async fn write_order(_token: flock_client::Token) -> std::io::Result<()> { Ok(()) }
//! #[tokio::main]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let flock = Flock::connect("valkey://127.0.0.1:6379").await?; // cheap to clone
//!     let outcome = serve(&flock).await;
//!     let ended = flock.shutdown(Duration::from_secs(5)).await; // before main returns, however it went
//!     outcome?;
//!     Ok(ended?)
//! }
//!
//! async fn serve(flock: &Flock) -> Result<(), Box<dyn std::error::Error>> {
//!     // Waits in the server's queue for up to 3 s; renewed in the background from then on.
//!     let guard = flock.lock("order:1001").lease(Duration::from_secs(30)).wait(Duration::from_secs(3)).await?;
//!     // Stores the token, then reads and writes; a token lower than the last is refused there. Cancelled if the lock is lost. So there are
//!     // two errors, the lock's and the work's: `Ok` alone is no success.
//!     guard.watch(write_order(guard.token())).await??;
//!     // After the commit. Whatever comes here, the work is done: an error is no reason to do it again. (Whatever drops the guard, a `?`
//!     // or a panic, releases too, in the background.)
//!     match guard.release().await {
//!         Ok(Released::Released) => {}
//!         Ok(Released::AlreadyLost) => {} // others may have come in between: the storage has refused what came after them
//!         Err(error) => eprintln!("goes on in the background: {error:?}"),
//!     }
//!
//!     // Or all of that in one.
//!     flock.lock("order:1001").wait(Duration::from_secs(3)).run(|token| write_order(token)).await??;
//!     Ok(())
//! }
//! ```
//!
//! # What it can do
//!
//! | to | by |
//! |---|---|
//! | wait in turn, for a while, not at all | [`Lock`] awaited, [`Lock::wait`], [`Lock::try_acquire`] |
//! | share: readers, a semaphore (all say the same number); change between | [`Lock::shared`], [`Lock::limit`]; [`Guard::convert`] |
//! | hold several, each in its own mode, or none | [`Flock::lock_all`], [`LockAll::and_shared`]; each one's token by [`GuardSet::get`] |
//! | bound work that may hang | [`Lock::max_hold`] |
//! | acquire again what the same owner holds | [`Lock::reentrant`] |
//! | have the grant on replicas before it counts | [`Lock::acknowledged_by`] |
//! | have the lock end soon after its process | [`Lock::session`] |
//! | cancel work whose lock is lost; hear of a loss | [`Lock::run`], [`Guard::watch`]; [`Guard::lost`], [`Flock::events`] |
//! | test what uses it, without a server | `flock_client::testing::Server`, with the feature `testing` |
//! | reach the server | by TCP, by a Unix socket, by TLS with the feature `tls`; by Sentinel; as a cluster |
//!
//! # How to use it
//!
//! * **One client for a process**, cloned to wherever it is needed, and shut down before `main` returns, on errors too. A shutdown does not
//!   wait for work: what is still held is lost and given back, and work under it is cancelled. End or await your own tasks first.
//! * **A lease for the worst case.** It is renewed at a third, so its length says two things only: how long others wait after this process
//!   has died, and how long an outage the hold survives: about two thirds of it. (A hold of the first tenth of a second: [`Builder::claim`],
//!   which is 5 s unless set.) It does *not* say how long the work may take: work that hangs is renewed for ever, unless bounded by
//!   [`Lock::max_hold`].
//! * **A bound for every wait** ([`Lock::wait`]), unless waiting for ever is what is meant: without one, whatever may be better later (no
//!   connection, a replica, a full queue) is asked again and again, and told by [`Flock::events`] only. Unless set otherwise a lease is 30 s, and
//!   connecting, a try, a renewal or a release takes 5 s at most, which is what they take while the server is silent.
//! * **The token before the first read, and with every write.** The storage refuses a token lower than the highest it has seen, and it has
//!   seen yours only when you have told it: store the token first, or in the transaction that reads, with the row locked. Otherwise a late
//!   write of the holder before you is accepted after you have read. Each of several locks has its own token, for what that lock guards.
//! * **A number for each piece of work**, the same each time it is tried (an order's, never the token), to see by it whether the work was
//!   done: in the storage, in the transaction that writes. A gateway or a mail cannot refuse a token: send it *the number* as idempotency
//!   key (the token is another at each try), look at [`Guard::is_valid`] just before, and expect two calls all the same. A lock says *not at
//!   the same time*, and never *once*.
//! * **The work under [`Lock::run`] or [`Guard::watch`]**, or with a look at [`Guard::is_valid`] before each step. Where a call cut short is
//!   worse than one too many, as to a gateway under a `limit`, keep the guard beside the call and do not watch.
//! * **Several locks by [`Flock::lock_all`]**, which asks in one order whatever yours is. Two who acquire one after the other, and each has
//!   what the other wants, wait for ever.
//! * **Commit, then release**, and look at the answer: [`Released::AlreadyLost`] says that others may have come in between.
//! * **Futures are awaited or dropped.** One that is neither, as an arm that a loop keeps and does not poll, holds its place or its lock. One
//!   that is dropped has lost its place: a wait in a `select!` that loops is made and pinned before the loop, and polled by `&mut`.
//!
//! | outcome | means | then |
//! |---|---|---|
//! | [`AcquireError::TimedOut`], `None` of a try | others held it, or came first, when the server last answered | later, or not at all |
//! | [`AcquireError::Unavailable`], [`NotDurable`](AcquireError::NotDurable), [`Lost`](AcquireError::Lost) | no answer in time, or not all that was asked for; nothing is held | later |
//! | [`AcquireError::Server`], [`HoldError::Server`], [`ConnectError::Server`] | the server has refused: a permission, a password, a key of another type, a limit | if it is retryable, later; or else mend it |
//! | [`ConnectError::NoModule`], [`ConnectError::Tls`] | the server has not loaded FLOCK; there is no trust | mend it |
//! | [`AcquireError::Config`] and others of that name | it makes no sense; nothing was sent | mend it |
//! | [`HoldError::Unknown`] of a release | no answer in time | nothing: the work is done, and the release goes on in the background |
//! | [`HoldError::Unknown`] of a renewal, a conversion | it may have happened | the same call again |
//! | [`HoldError::Refused`] of an upgrade | others share the lock, or the server was just promoted | release it, then wait for it exclusively; do not loop: two who both upgrade refuse each other for ever |
//! | [`RunError::Lost`], [`HoldError::Lost`], [`Guard::lost`] | others may hold it by now | stop; the outcome is unknown until this: acquire anew, *store the new token first* (from then on nothing under the old one is accepted), and only then look whether the work was done, by its number |
//! | [`Released::AlreadyLost`] | others may have come between the work and the release | nothing, if the storage checks tokens; or else as a loss |
//! | the storage refuses the token | a later holder was there | as a loss; if it refuses a new one too, see [`Lock::floor`] |
//! | [`AcquireError::ShutDown`] | the client has ended | leave it to another process |
//!
//! Each error has `is_retryable`: whether the same *request* may succeed later, after a pause, and not for ever. Of your work it says nothing: after
//! a release the work is done, whatever it says; and a loss is not retryable, though the work is to be taken up again. Of leases and timeouts, zero and
//! more than a year are refused as [`AcquireError::Config`] or [`ConnectError::Config`] before anything is sent; the server refuses a lease
//! above its `flock.lease-max-ms`: one day unless it is set, 10 days at most. A wait of zero is a try.
//!
//! # What it promises
//!
//! * **Order.** Waiting requests are queued in the server, first come first served, and the grant is pushed to the next the moment the
//!   lock is free. Nobody polls, unless told to ([`WaitMode::Poll`]).
//! * **A belief that ends first.** [`Guard::is_valid`] says no before the lease ends at the server: it counts from before the
//!   request was sent, on a clock that counts suspended time, less a margin. A process that was stopped sees the loss before it acts.
//!   What ends a hold before its lease (FLOCK.REVOKE, a deleted key, a flush, a failover) is told when it has happened, not foreseen.
//! * **Nothing stays behind.** Dropping any future or guard, at any point and anywhere, gives back what it had or waited for, while the
//!   process lives: [`Flock::shutdown`] waits for that. A request that reaches the server when its connection is dead costs
//!   [`Builder::claim`], not a lease; that of a re-entrant handle costs the lease.
//! * **Retries that are safe.** Each acquisition has an owner of its own, and every request of it may be repeated.
//! * **Connections that heal.** Two connections (in a cluster, to each primary that is needed), watched by heartbeats, replaced when they
//!   break or fall silent; who waits asks again, and has kept its place if the server has.
//! * **Trust is never off.** With TLS, certificates and host names are checked; there is no switch against that.
//! * **Your runtime is not in the way**, unless it was given to [`Builder::on_runtime`]. Connections, renewals, waits and what is given
//!   back are the business of a thread of the client's own: a busy or blocked runtime costs no lease, and a future needs no particular
//!   runtime, or none. Only the first request of an operation is made where its future is polled; [`Lock`] tells what becomes of one that is
//!   polled no more.
//!
//! # What it does not promise
//!
//! * **No lock service excludes a paused process.** Between the look at [`Guard::is_valid`] and the write, time passes. Send
//!   [`Guard::token`] with every write and let the storage accept it only if it is higher than the last, or the last itself.
//! * **Cancelling is dropping.** A request that was sent may still be carried out, and what the work has spawned (a task, a thread) goes
//!   on: end that yourself, or give it the token and a look at [`Guard::is_valid`]. Between two awaits nothing is interrupted.
//! * **Tokens fence exclusive holds.** Of those who share a lock each has a token, and they are there together: do not compare them among
//!   each other, or the storage refuses the one that came first. So what was read while shared is not fenced: after an upgrade store the
//!   new [`Guard::token`], and *read again* before you write.
//! * **A token does not tell your own writes apart.** Of two under one token both are accepted, the late one too. So a write that got no answer
//!   is repeated, with its number; another in its place might be followed by it.
//! * **A failover can grant twice.** Valkey replicates asynchronously: what the old primary granted last may be unknown to the new one.
//!   The token covers that, if the storage checks it. [`Lock::acknowledged_by`] makes it less likely, or impossible if *every* replica
//!   that may be promoted acknowledges.
//! * **A killed process gives nothing back.** Its locks are free when their leases are over. One that panics and unwinds gives back at once,
//!   and the next holder meets what was half done.
//! * **Servers are reached directly**: one, one that Sentinel finds, or the nodes of a cluster (see [`Flock::connect`]). A connection
//!   pooler in between would mix up whose connection is whose.
//! * **A cluster is several servers.** Several locks at once are acquired one after the other, as ever; tokens rise for each lock, and
//!   are not comparable between locks; a lock whose slot is on its way, by the older way of moving slots, is not waited for in order.
//!   There are no sessions. See the operations guide.
//!
//! # Features
//!
//! | feature | what it adds |
//! |---|---|
//! | `blocking` | the same without an async runtime |
//! | `metrics` | counts and times for the `metrics` facade: below |
//! | `testing` | a server in memory, for the tests of what uses this crate |
//! | `tls` | `valkeys://` and `rediss://` URLs, [`Builder::ca_certificates`](Builder), [`Builder::client_certificate`](Builder); installs *ring* as the process's cryptography, unless the program has installed another |
//!
//! None is on unless asked for: a plain connection needs none of them.
//!
//! # What can be watched
//!
//! [`Flock::events`] is for programs. For people there is `tracing`: a span `flock.acquire` for each acquisition (`key`, `owner`, `token`,
//! `outcome`), a span `flock.hold` for each hold (`key`, `token`, `ended`) with its renewals as events at debug, a loss as a warning. With
//! the feature `metrics` also:
//!
//! | metric | kind | labels | watch for |
//! |---|---|---|---|
//! | `flock_client_acquire_total` | counter | `outcome` | less than 95 % `acquired` |
//! | `flock_client_acquire_seconds` | histogram | `outcome` | p50 above 1 ms, p99 above 5 ms where nobody has to wait |
//! | `flock_client_acquire_retries_total` | counter | | two for one acquisition |
//! | `flock_client_held` | gauge | | |
//! | `flock_client_hold_seconds` | histogram | | |
//! | `flock_client_renew_failures_total` | counter | | any |
//! | `flock_client_release_failures_total` | counter | | any |
//! | `flock_client_lost_total` | counter | `reason` | any `expired` |
//! | `flock_client_connections_total` | counter | `link` | more than one for each client and server that it needs |
//!
//! An outcome is one of `acquired`, `busy`, `timed_out`, `cancelled`, `unavailable`, `refused`, `not_durable`, `lost`, `bad_request` and
//! `shut_down`; a reason, one of [`LossReason`] in lower case. Neither URLs nor passwords are told anywhere.
//!
//! # Where to read
//!
//! [`Flock`] connects, [`Lock`] asks, [`Guard`] holds; [`error`] tells the outcomes apart; [`Event`] is for logs. Whole programs are in
//! `client/examples/`: `quickstart`, `fenced_write`, `blocking`.
#![forbid(unsafe_code)]
#![warn(clippy::missing_errors_doc, clippy::missing_panics_doc)]

mod acknowledgement;
mod acquire;
mod address;
mod admin;
#[cfg(feature = "blocking")]
pub mod blocking;
mod client;
mod clock;
mod dialer;
mod engine;
pub mod error;
mod event;
mod guard;
mod hold;
mod in_place;
mod jitter;
mod keepalive;
mod line;
mod link;
mod lock;
mod mutex;
mod nodes;
mod observe;
mod parties;
mod retry;
mod sentinel;
mod shard_channel;
mod slot;
mod slot_map;
mod tally;
#[cfg(feature = "testing")]
pub mod testing;
mod text;
#[cfg(feature = "tls")]
mod tls;
mod turns;
mod wire;

pub use admin::{AdminError, HeldLock, Holder, HolderState, LockInfo, Locks, Stats, Waiter};
pub use client::{Builder, Flock, ShutdownTimedOut};
pub use error::{AcquireError, ConnectError, HoldError, LossReason, RunError, ServerError};
pub use event::{Event, Events};
pub use flock_core::token::TokenOutOfRange;
pub use flock_core::wire::error::ErrorCode;
pub use flock_core::{Mode, Token};
pub use guard::{Guard, GuardSet, Released};
pub use lock::{Lock, LockAll, WaitMode};
