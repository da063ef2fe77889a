//! The internal command that replicas, the append-only file and imported slots run: it applies what was decided elsewhere.

use crate::ffi::args::Args;
use crate::ffi::ctx::{Ctx, LogLevel};
use crate::ffi::key::{Key, KeyState, Mode};
use crate::ffi::reply;
use crate::ffi::string::ServerStr;
use crate::perform::{APPLY, Shell};
use crate::state::{self, with_table};
use flock_core::lock::{Change, Start};
use flock_core::wire;
use flock_core::wire::error::{ErrorCode, WireError};
use flock_core::{LockId, Place};
use std::sync::atomic::{AtomicBool, Ordering};

/// This replica has refused a change since it was synchronised: it lacks what its primary has.
static LACKS_CHANGES: AtomicBool = AtomicBool::new(false);

/// Whether what this node has is not what it should have. It must not be saved: a replica that is started on it would go on from
/// there, with only what its primary has sent since.
pub(crate) fn lacks_changes() -> bool {
    LACKS_CHANGES.load(Ordering::Relaxed)
}

/// Nothing is lacking any more: all data come anew, or this node is a primary, and what it has is what there is.
pub(crate) fn forget_refusals() {
    LACKS_CHANGES.store(false, Ordering::Relaxed);
}

/// `FLOCK._APPLY effect [key]`. Users cannot run it, whatever their permissions.
pub(crate) fn apply(ctx: &Ctx<'_>, args: Args<'_>) -> Result<(), WireError> {
    let flags = ctx.flags();
    if !ctx.must_obey_client(flags) {
        return Err(INTERNAL);
    }
    let text = args.bytes(1).unwrap_or_default();
    let change = wire::change::decode(text, state::boot()).map_err(|corrupt| refused(ctx, corrupt.reason()))?;
    let start = if flags.is_loading() { Start::AfterLoading } else { Start::Now(state::now()) };
    match (&change, args.string(2)) {
        (Change::Mark(mark), _) => drop(with_table(|table| table.saw_mark(*mark))),
        (change, Some(name)) => apply_to_key(ctx, name, change, start)?,
        (_, None) => return Err(refused(ctx, "it names no key")),
    }
    if !flags.is_loading() {
        // Into this replica's own append-only file.
        ctx.replicate(APPLY, text, args.string(2));
    }
    reply::simple(ctx, c"OK");
    Ok(())
}

fn apply_to_key(ctx: &Ctx<'_>, name: ServerStr<'_>, change: &Change, start: Start) -> Result<(), WireError> {
    let db = u16::try_from(ctx.selected_db()).map_err(|_| refused(ctx, "it is for a database above 65535"))?;
    let key = Key::open(ctx, name, Mode::Write);
    let lock: Option<LockId> = match key.state() {
        KeyState::Lock(handle) => Some(state::lock_of(handle)),
        // A grant replaces what is there: on the primary the key was free.
        KeyState::Empty | KeyState::OtherType => None,
    };
    let place = Place { db, key: name.bytes(), lock };
    if let Some(decision) = with_table(|table| table.apply(place, change, start)) {
        Shell::in_turn(ctx).perform(key, name, decision);
    }
    Ok(())
}

const INTERNAL: WireError =
    WireError::fixed(ErrorCode::Err, "FLOCK._APPLY is internal: only replication and loading may run it");

/// A change that cannot be applied means that this server's data differs from the primary's, or that the primary's module is newer.
fn refused(ctx: &Ctx<'_>, reason: &'static str) -> WireError {
    let flags = ctx.flags();
    if !flags.is_primary() && !flags.is_loading() {
        LACKS_CHANGES.store(true, Ordering::Relaxed);
    }
    ctx.log(LogLevel::Warning, &format!("a change from replication or the append-only file is refused: {reason}"));
    WireError { code: ErrorCode::Err, message: format!("the change is refused: {reason}").into() }
}
