//! Benchmarks of FLOCK, and what they stand on.
//!
//! | module | what it is |
//! |---|---|
//! | [`generator`] | batches of commands made beforehand, and the connection that sends them |
//! | [`line`](mod@line) | a lock that is handed on: its holder, and those who wait |
//! | [`names`] | random keys and owners of a given length |
//! | [`scheme`] | ways to take a lock and to give it back: FLOCK's, and what a user would write instead |
//! | [`redisson`] | Redisson's locks, as scripts |
//! | [`measure`] | processor time of a server, taken in turns; medians and quartiles |
//! | [`report`] | goals, what was measured, and whether they are met |
//! | [`check`] | the goals of `make bench-check`, one file per group |
//! | [`rig`] | the core without a server: a table of locks and a keyspace in miniature |
//!
//! `benches/core.rs` is the Criterion bench of the core; `tests/allocations.rs` counts its allocations; `peers/` compares with
//! other lock systems; `RESULTS.md` says what came
//! of it all, on which machine.

#![forbid(unsafe_code)]

pub mod check;
pub mod generator;
pub mod line;
pub mod measure;
pub mod names;
pub mod redisson;
pub mod report;
pub mod rig;
pub mod scheme;
