//! The rules of FLOCK's locks and their wire protocol, and nothing else.
//!
//! This crate performs no I/O, reads no clock, allocates only what it keeps, and contains no unsafe code. A *verb* takes the
//! state ([`Table`]), a request and the time, changes the state, and returns a [`Decision`]: the answer, and the *effects* the
//! shell (the Valkey module, a test, a simulator) must now perform. So one run can be asserted, logged, replicated and replayed.
//!
//! ```text
//!                     ACQUIRE, nobody in the way
//!      free ─────────────────────────────────────────► held ◄──┐ RENEW, ACQUIRE again (same owner, same token)
//!       ▲                                              │  ▲ └──┘
//!       │  last hold ends, nobody waits                │  │
//!       └───────────── RELEASE, lease over, REVOKE ────┤  │ handoff: the same step grants the next waiter
//!                                                      └──┘
//!      ACQUIRE BLOCK / QUEUE while held ──► waiting ──► granted | timed out | cancelled | superseded | ended
//! ```
//!
//! Where to read:
//! * [`table`]: the verbs. Start here.
//! * [`lock`]: who holds one lock, and how a [`Change`] alters it. The primary and its replicas run the same code.
//! * [`wait_queue`]: who waits, in which order.
//! * [`token`]: the fencing counter: seed, reserve ahead, raise, cap.
//! * [`snapshot`]: the durable form of a lock. [`wire`]: commands, replies, errors, messages, and changes as bytes.
//! * [`deadlines`], [`paged`], [`bytes`]: the three data structures under it, made for many small entries.
//!
//! The invariants are S1 to S13 and L1 to L6 of `docs/GUARANTEES.md`; [`Table::check_invariants`] asserts those that can be seen
//! in one state, and the tests run it after every step.
#![no_std]
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

extern crate alloc;

pub mod bytes;
pub mod deadlines;
pub mod effect;
pub mod lock;
pub mod name;
pub mod paged;
pub mod refusal;
pub mod request;
pub mod snapshot;
pub mod stats;
pub mod table;
mod tenure;
pub mod time;
pub mod token;
pub mod wait_queue;
pub mod wire;

pub use effect::{Decision, Effect, Effects};
pub use lock::{Change, Grant, Hold, Lock, Mode, Owner, Terms};
pub use name::Name;
pub use refusal::{EndReason, LossReason, Refusal};
pub use request::{Acquire, Limits, Release, Renew, Revoke, Wait};
pub use table::{Acquired, Audience, Deaf, Due, LockId, Place, Table};
pub use time::{Millis, Time};
pub use token::{Token, TokenCounter};
