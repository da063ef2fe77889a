//! `libflock.so`: the Valkey API on one side, [`flock_core`] on the other. The rules are in the core; this crate translates.
//!
//! The life of a request:
//!
//! 1. [`ffi`] receives the command and calls [`commands`], which parses it (`flock_core::wire`), opens the key once,
//! 2. and calls the verb of the core's table with what it found and the time. The verb returns a decision.
//! 3. [`perform`] performs the decision, in one place: the key appears or disappears, effects are replicated, messages published,
//!    waiting clients answered ([`blocking`]). Then the command replies.
//! 4. What is due without a request (leases, waits, closed connections) is performed in [`turn`], in the server's BeforeSleep event.
//! 5. Replicas and loading run [`apply`] and [`data_type`]: they apply what was decided, and decide nothing.
//!
//! Everything runs on the server's main thread. All `unsafe` is in [`ffi`], behind a panic barrier.
#![deny(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic))]

mod apply;
mod blocking;
mod cluster;
mod commands;
mod config;
mod data_type;
#[allow(unsafe_code, reason = "the wall around the server's C interface: each block says why it is sound")]
mod ffi;
mod info;
mod inspect;
mod perform;
mod propagation;
mod role;
mod server_events;
mod state;
mod turn;

use ffi::ctx::{Ctx, LogLevel};

/// The module's version as the server numbers it: major * 10000 + minor * 100 + patch.
pub(crate) const MODULE_VERSION: i32 = 100;

/// Everything that is registered when the module is loaded.
pub(crate) fn load(ctx: &Ctx<'_>, args: &[&[u8]]) -> Result<(), String> {
    data_type::register(ctx)?;
    commands::register(ctx)?;
    config::register(ctx, args)?;
    ffi::info::register(ctx)?;
    ffi::events::subscribe(ctx)?;
    ffi::keyspace_events::subscribe(ctx)?;
    ctx.receive_broadcasts();
    if !ffi::timer_fd::open() {
        ctx.log(LogLevel::Warning, "this system has no timerfd: leases end up to 100 ms late");
    }
    state::install();
    cluster::install(ctx);
    config::warn_of_eviction(ctx);
    ctx.log(LogLevel::Notice, concat!("flock ", env!("CARGO_PKG_VERSION"), " loaded"));
    Ok(())
}
