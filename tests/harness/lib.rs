//! The harness: real servers, real sockets, faults on purpose, and a judge of what happened.
//!
//! | module | what it is |
//! |---|---|
//! | [`server`] | a valkey-server process with the module, gone when its guard is dropped |
//! | [`resp`], [`mod@args`], [`reply`] | a connection that can also wait, break off and send nonsense; what is sent; what comes back |
//! | [`subscriber`] | a connection that listens to channels |
//! | [`both`] | one test function, run on both server generations and both protocol versions |
//! | [`topology`] | a primary with replicas; with sentinels; a cluster |
//! | [`migration`] | a slot of a cluster that moves |
//! | [`network`] | hosts in network namespaces, and what is lost between them |
//! | [`proxy`] | a TCP proxy that holds, drops, delays, doubles and cuts |
//! | [`history`], [`check`], [`fenced_store`] | what clients saw, and whether it may have been so |
//! | [`random`] | random numbers that can be had again |
//! | [`cpu`] | what a server used: processor time, memory |
//! | [`c_library()`] | what tests give to servers in C: another module, clocks |
//! | [`wait`] | waiting with a bound; the only file that sleeps |
//!
//! A contract test, run four times (two servers, two protocol versions) on servers shared with other tests:
//!
//! ```no_run
//! use flock_tests::{args, on_shared_servers, resp::Protocol, reply::Reply, server::{Server, unique_key}};
//!
//! on_shared_servers![second_owner_is_refused];
//!
//! fn second_owner_is_refused(server: &Server, protocol: Protocol) {
//!     let key = unique_key("refused");
//!     let mut conn = server.connect(protocol);
//!     conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
//!     assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 5000]), Reply::Nil);
//! }
//! ```
//!
//! A test with servers of its own, run on both generations: one waiter, and a replica.
//!
//! ```no_run
//! use flock_tests::{args, on_own_servers, resp::Protocol, server::Builder, topology::Replicated};
//!
//! on_own_servers![replica_shows_the_handoff];
//!
//! fn replica_shows_the_handoff(builder: Builder) {
//!     let servers = Replicated::start(&builder, 1);
//!     let mut holder = servers.primary.connect(Protocol::Resp2);
//!     let mut waiter = servers.primary.connect(Protocol::Resp2);
//!     let first = holder.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 5000]).as_token();
//!     waiter.send(&args!["FLOCK.ACQUIRE", "k", "bob", 5000, "BLOCK", 0]);
//!     servers.primary.wait_until_blocked(&waiter);
//!     assert_eq!(holder.cmd(&args!["FLOCK.RELEASE", "k", "alice", "TOKEN", first]).as_int(), 1);
//!     assert!(waiter.recv().as_token() > first);
//!     servers.wait_in_step();
//!     let mut reader = servers.replicas[0].connect(Protocol::Resp3);
//!     assert_eq!(reader.cmd(&args!["FLOCK.INFO", "k"]).field("mode").as_str(), "exclusive");
//! }
//! ```
//!
//! Where the servers and the module are is told by `VALKEY_SERVER`, `VALKEY_SERVER_OLD` and `FLOCK_MODULE`; `make test` sets them.
//! What the tests leave on disk is below `target/flock-tests/`: directories of failed tests stay in `failed/`, all others go.

#![forbid(unsafe_code)]

pub mod args;
pub mod both;
mod c_library;
pub mod check;
pub mod cpu;
pub mod fenced_store;
pub mod history;
pub mod migration;
pub mod network;
mod port;
mod process;
pub mod proxy;
pub mod random;
pub mod reply;
pub mod resp;
pub mod server;
pub mod subscriber;
pub mod topology;
pub mod wait;
mod work_dir;

pub use c_library::c_library;
