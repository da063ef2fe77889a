//! The async Rust client of FLOCK. Nothing is here yet.
//!
//! It will be a thin layer over the `redis` crate: acquire a lock and get a guard with its fencing token, keep the lease alive in the
//! background, and tell the caller when the lock is lost. The commands and their replies come from `flock-core`.
#![forbid(unsafe_code)]
