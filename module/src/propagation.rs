//! Whether anybody can receive what is replicated.
//!
//! Handing an effect to the server costs it two strings and a look-up, about a quarter of a whole command, also where it then finds that
//! nobody listens: no replica, no backlog that a replica could resume from, no append-only file, no slot on its way to another
//! server. On such a server effects are not handed over.
//!
//! This must never be wrong, so the answer "nobody" is earned and easily lost:
//!
//! * It is given only after the server's own INFO has said so, looked at once a second at most.
//! * It ends with the birth of any fork child, which the server reports before it runs another command. Nobody can start to listen
//!   without one: a new replica, a new append-only file and a slot migration all begin with a snapshot made by a child, and the
//!   snapshot contains what was done before. (A replica that resumes without a snapshot needs a backlog, and with one the answer is
//!   not "nobody".)
//! * It ends with a change of role.
//!
//! The server counts changes to know when to make a snapshot (`save 300 100`); what is kept back counts as one change per tick of the
//! server's cron, ten a second by default.
//!
//! `docs/decisions/0003-effects-without-listeners.md` has the argument and the measurements.

use crate::ffi::ctx::Ctx;
use crate::ffi::info::server_field;
use crate::ffi::timer_fd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// INFO is asked this often.
const LOOK_EVERY_US: u64 = 1_000_000;

static NOBODY_LISTENS: AtomicBool = AtomicBool::new(false);
static LOOKED_AT_US: AtomicU64 = AtomicU64::new(0);
/// Something was kept back in this turn.
static KEPT_BACK: AtomicBool = AtomicBool::new(false);

/// Must the effects of a command be handed to the server? If not, one effect follows all the same, with the next tick of its cron
/// ([`take_kept_back`]).
pub(crate) fn is_needed() -> bool {
    let needed = !NOBODY_LISTENS.load(Ordering::Relaxed);
    if !needed {
        KEPT_BACK.store(true, Ordering::Relaxed);
    }
    needed
}

/// Was anything kept back since this was last asked? Then a mark must be replicated: nobody hears it, but the server counts it as a
/// change, and so makes the snapshots that its save points ask for.
pub(crate) fn take_kept_back() -> bool {
    KEPT_BACK.load(Ordering::Relaxed) && KEPT_BACK.swap(false, Ordering::Relaxed)
}

/// Somebody may listen from now on.
pub(crate) fn somebody_may_listen() {
    NOBODY_LISTENS.store(false, Ordering::Relaxed);
    LOOKED_AT_US.store(timer_fd::boottime_us(), Ordering::Relaxed);
}

/// Looks whether anybody listens. Called from the server's cron.
pub(crate) fn look(ctx: &Ctx<'_>) {
    if NOBODY_LISTENS.load(Ordering::Relaxed) {
        return; // stays true until an event ends it
    }
    let now = timer_fd::boottime_us();
    if now.saturating_sub(LOOKED_AT_US.load(Ordering::Relaxed)) < LOOK_EVERY_US {
        return;
    }
    LOOKED_AT_US.store(now, Ordering::Relaxed);
    let says = |section, field, nobody: &str| server_field(ctx, section, field).is_some_and(|value| value == nobody);
    let nobody = says(c"replication", c"role", "master")
        && says(c"replication", c"connected_slaves", "0")
        && says(c"replication", c"repl_backlog_active", "0")
        && says(c"persistence", c"aof_enabled", "0")
        && says(c"persistence", c"rdb_bgsave_in_progress", "0")
        && says(c"persistence", c"aof_rewrite_in_progress", "0")
        // A slot migration lasts longer than its child; in cluster mode nobody is never certain.
        && !ctx.flags().is_cluster();
    NOBODY_LISTENS.store(nobody, Ordering::Relaxed);
}
