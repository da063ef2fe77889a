//! Whether this node decides: a primary whose data are loaded.
//!
//! Every command asks. The server's own answer costs it a twentieth of a command, so a yes is remembered until an event that may end
//! it: every change of role and every load has one, which the server sends before it runs another command.

use crate::ffi::ctx::{Ctx, LogLevel};
use crate::perform::Shell;
use crate::state::{self, with_table};
use crate::{cluster, config, turn};
use flock_core::token::{ClockFault, DAY_UNITS};
use std::sync::atomic::{AtomicBool, Ordering};

/// This node is a primary, its data are loaded, and it has taken over.
static DECIDES: AtomicBool = AtomicBool::new(false);

/// The role may have changed, or a load has begun.
pub(crate) fn may_have_changed() {
    DECIDES.store(false, Ordering::Relaxed);
}

/// Whether this node is a primary whose data are loaded.
pub(crate) fn is_primary(ctx: &Ctx<'_>) -> bool {
    // While loading only the append-only file's client runs commands, and it applies: it never asks.
    DECIDES.load(Ordering::Relaxed) || {
        let flags = ctx.flags();
        flags.is_primary() && !flags.is_loading()
    }
}

/// Whether this node may grant; if it has not yet, it takes over first. In a client's write command, or where replicating is sound.
#[inline]
pub(crate) fn decides(ctx: &Ctx<'_>) -> bool {
    DECIDES.load(Ordering::Relaxed) || may_decide_from_now_on(ctx)
}

#[cold]
fn may_decide_from_now_on(ctx: &Ctx<'_>) -> bool {
    let decides = is_primary(ctx) && take_over(ctx);
    DECIDES.store(decides, Ordering::Relaxed);
    decides
}

/// Says once, in the log, that tokens are a day ahead of the clock: after a loss of all data they would start below those handed out.
pub(crate) fn warn_of_lead(ctx: &Ctx<'_>) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    let lead = with_table(|table| table.counter().lead(state::wall_clock())).unwrap_or_default();
    if lead > DAY_UNITS.cast_signed() && !WARNED.swap(true, Ordering::Relaxed) {
        ctx.log(
            LogLevel::Warning,
            "the token counter is more than a day ahead of the clock (INFO flock, lead_over_clock): \
             if this server loses all its data, tokens will not rise until the clock has caught up",
        );
    }
}

/// The mark of this incarnation has not been announced yet.
static OWES_MARK: AtomicBool = AtomicBool::new(false);

/// Starts an incarnation, if this node has not yet, and announces its mark. False if that cannot be done now.
fn take_over(ctx: &Ctx<'_>) -> bool {
    begin(ctx);
    let Some(mark) = with_table(|table| table.counter().is_seeded().then(|| table.counter().mark())).flatten() else {
        return false;
    };
    if OWES_MARK.swap(false, Ordering::Relaxed) {
        Shell::in_turn(ctx).announce_mark(mark);
        // Again from the next turn: this may be a command that another module has called without replicating it.
        turn::announce_mark_soon();
    }
    true
}

/// Starts an incarnation of this primary, if it has not begun yet: the counter is seeded, and the grace of a promotion and that of session
/// holds begin. While nothing may be replicated (a pause, refused writes) the mark cannot be announced, but it goes into the snapshots
/// that replicas copy meanwhile, and stays the same however long that lasts. Both graces run meanwhile, as leases do.
pub(crate) fn begin(ctx: &Ctx<'_>) {
    if with_table(|table| table.counter().is_seeded()).unwrap_or(true) {
        return;
    }
    let wall = state::wall_clock();
    match wall.fault() {
        Some(ClockFault::BeforeBuild) => {
            ctx.log(
                LogLevel::Warning,
                "the wall clock is before this build's date: fencing tokens start from that date",
            );
        }
        Some(ClockFault::TooLate) => {
            ctx.log(LogLevel::Warning, "the wall clock is after 2056: ignored for fencing tokens");
        }
        None => {}
    }
    cluster::apply_heard_marks();
    let grace = config::promotion_grace();
    if with_table(|table| table.promoted(state::now(), wall, grace)).is_some() {
        OWES_MARK.store(true, Ordering::Relaxed);
    }
}
