//! Locks as values of the keyspace: saved, loaded, rewritten, digested, unlinked.

use crate::apply;
use crate::ffi;
use crate::ffi::ctx::{Ctx, LogLevel, log_without_ctx};
use crate::ffi::data_type::Handle;
use crate::ffi::rdb_io::{Digest, RdbReader, RdbWriter};
use crate::ffi::replicate::AofWriter;
use crate::ffi::string::ServerStr;
use crate::ffi::timer_fd;
use crate::perform::APPLY;
use crate::state::{self, handle_of, lock_of, with_table};
use flock_core::lock::{Change, Start};
use flock_core::refusal::LossReason;
use flock_core::snapshot::{self, CounterImage};
use flock_core::{Name, Time, wire};
use std::sync::atomic::{AtomicI64, Ordering};

/// The version that values and counters carry in snapshots.
const ENCODING_VERSION: i32 = if cfg!(feature = "next-format") { 2 } else { 1 };
/// No stored lock is bigger: 256 MiB are about a million shared holders.
const VALUE_BYTES_MAX: usize = 256 << 20;
const COUNTER_BYTES_MAX: usize = 1024;

/// Registers the type.
pub(crate) fn register(ctx: &Ctx<'_>) -> Result<(), String> {
    ffi::data_type::register(ctx, ENCODING_VERSION)
}

/// A value from a snapshot, or from a user's RESTORE: then nothing in it may be believed.
pub(crate) fn load(reader: &mut RdbReader<'_>, encoding_version: i32) -> Option<Handle> {
    match try_load(reader, encoding_version) {
        Ok(handle) => Some(handle),
        Err(reason) => {
            log_without_ctx(LogLevel::Warning, &format!("a stored lock is refused: {reason}"));
            None
        }
    }
}

fn try_load(reader: &mut RdbReader<'_>, encoding_version: i32) -> Result<Handle, String> {
    if encoding_version > ENCODING_VERSION {
        return Err(format!("version {encoding_version} is newer than this module's {ENCODING_VERSION}"));
    }
    let bytes = reader.load_bytes(VALUE_BYTES_MAX).ok_or("it is cut short or too long")?;
    let image = snapshot::decode(&bytes, state::boot()).map_err(|corrupt| corrupt.reason().to_owned())?;
    let db = reader.db().and_then(|db| u16::try_from(db).ok()).ok_or("it is in a database above 65535")?;
    let name = Name::new(db, reader.key_name().map(ServerStr::bytes).unwrap_or_default());
    let flags = reader.server_flags();
    let loading = flags.is_loading();
    let start = if loading { Start::AfterLoading } else { Start::Now(state::now()) };
    with_table(|table| {
        if !loading && flags.is_primary() {
            table.credible(&image, state::wall_clock()).map_err(|highest| {
                format!(
                    "its token or mark is above {}: ahead of this server and more than a day ahead of the clock",
                    highest.max
                )
            })?;
        }
        table.load(name, &image, start).map(handle_of).ok_or_else(|| "too many locks".to_owned())
    })
    .unwrap_or_else(|| Err("the module is busy".to_owned()))
}

/// Writes a value to a snapshot. `false` fails the snapshot: better none than one without a lock.
pub(crate) fn save(writer: &mut RdbWriter<'_>, handle: Handle) -> bool {
    let mut bytes = Vec::new();
    let known = with_table(|table| {
        let lock = table.lock(lock_of(handle))?;
        snapshot::encode(lock, table.counter().mark(), state::boot(), &mut bytes);
        Some(())
    });
    writer.save_bytes(&bytes);
    known.flatten().is_some()
}

/// Writes the commands that recreate a value: into a rewritten append-only file, or to the target of a slot migration.
pub(crate) fn aof_rewrite(writer: &mut AofWriter<'_>, key: ServerStr<'_>, handle: Handle) -> bool {
    let mut bytes = Vec::new();
    let known = with_table(|table| {
        let lock = table.lock(lock_of(handle))?;
        for hold in lock.holds() {
            bytes.clear();
            wire::change::encode(&Change::Grant(hold.to_grant()), state::boot(), &mut bytes);
            writer.emit(APPLY, &bytes, key);
        }
        Some(())
    });
    known.flatten().is_some()
}

/// Bytes that a value takes.
pub(crate) fn mem_usage(handle: Handle) -> usize {
    with_table(|table| table.memory_of(lock_of(handle))).unwrap_or_default()
}

/// Everything that two equal locks have in common: all but the running time.
pub(crate) fn digest(digest: &mut Digest<'_>, handle: Handle) {
    with_table(|table| {
        let Some(lock) = table.lock(lock_of(handle)) else {
            return;
        };
        for hold in lock.holds() {
            let mut grant = hold.to_grant();
            grant.deadline = None;
            let mut bytes = Vec::new();
            wire::change::encode(&Change::Grant(grant), 0, &mut bytes);
            digest.add_bytes(&bytes);
            digest.end_sequence();
        }
    });
}

/// When a held lock's key went last: the beginning of that command.
static UNLINKED_IN: AtomicI64 = AtomicI64::new(0);

/// Whether somebody holds the lock stored as this value. `false` also while the table is busy: then it caused this itself.
pub(crate) fn is_held(handle: Handle) -> bool {
    with_table(|table| table.lock(lock_of(handle)).is_some_and(|lock| !lock.is_free())).unwrap_or(false)
}

/// The key of a held lock is going away (or, for RENAME and MOVE, the value goes elsewhere): the lock is free. If the server takes it by
/// itself, it says so right afterwards ([`crate::server_events::on_taken`]).
///
/// No key may be looked up here: where a value is overwritten, the server holds a pointer into its table of keys, and a lookup moves
/// entries while that table grows. (Valkey 9 then wrote the new value to where the old one had been.)
pub(crate) fn unlinked(handle: Handle) {
    let Some(flags) = ffi::ctx::detached(0).map(|ctx| ctx.flags()) else { return };
    // Loading replays what was decided: it notes nothing.
    let decides = flags.is_primary() && !flags.is_loading();
    UNLINKED_IN.store(timer_fd::command_began_us(), Ordering::Relaxed);
    let is_pending = with_table(|table| {
        table.removed(lock_of(handle), LossReason::Removed, decides);
        table.next_deadline() == Some(Time::ZERO)
    });
    if is_pending == Some(true) {
        timer_fd::arm(0);
    }
}

/// Whether a held lock's key went in the running command.
pub(crate) fn was_unlinked_in_this_command() -> bool {
    UNLINKED_IN.load(Ordering::Relaxed) == timer_fd::command_began_us()
}

/// Writes the counter and its mark to a snapshot. `false` fails the snapshot where that can be done (in a child of the server's);
/// elsewhere it makes one that nobody will load.
pub(crate) fn aux_save(writer: &mut RdbWriter<'_>) -> bool {
    let mut bytes = Vec::new();
    if apply::lacks_changes() {
        log_without_ctx(
            LogLevel::Warning,
            "this replica has refused changes of its primary: no snapshot of it is usable",
        );
        snapshot::encode_incomplete(&mut bytes);
        writer.save_bytes(&bytes);
        return false;
    }
    let is_primary = writer.server_flags().is_primary();
    with_table(|table| {
        let counter = table.counter();
        if !counter.is_used() {
            return; // a snapshot of a server that never saw a lock loads without the module
        }
        let mark = if is_primary { counter.mark_once_seeded(state::wall_clock()) } else { counter.mark() };
        snapshot::encode_counter(CounterImage { value: counter.value(), mark }, &mut bytes);
    });
    if !bytes.is_empty() {
        writer.save_bytes(&bytes);
    }
    true
}

/// Reads the counter of a snapshot. It only ever raises.
pub(crate) fn aux_load(reader: &mut RdbReader<'_>, encoding_version: i32) -> bool {
    if encoding_version > ENCODING_VERSION {
        log_without_ctx(LogLevel::Warning, "the snapshot's token counter is from a newer version of this module");
        return false;
    }
    let Some(bytes) = reader.load_bytes(COUNTER_BYTES_MAX) else {
        return false;
    };
    match snapshot::decode_counter(&bytes) {
        Ok(counter) => with_table(|table| {
            table.saw_counter(counter.value);
            table.saw_mark(counter.mark);
        })
        .is_some(),
        Err(corrupt) => {
            log_without_ctx(
                LogLevel::Warning,
                &format!("the snapshot's token counter is refused: {}", corrupt.reason()),
            );
            false
        }
    }
}
