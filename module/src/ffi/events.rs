//! What happens to the server: one subscription per event, one typed [`Event`] for the module.

use std::ffi::{CStr, c_char, c_void};
use std::marker::PhantomData;
use std::slice;

use valkey_module::raw;

use super::api::{OK, server_fn};
use super::barrier::{Callback, barrier};
use super::ctx::{self, Ctx};

/// A thing that happened.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event<'a> {
    /// The event loop is about to wait for input, before the append-only file is flushed: an execution unit of its own,
    /// outside any command.
    BeforeSleep,
    /// The server's own timer, as often a second as its setting `hz` says.
    Cron,
    /// This node became a primary, or a replica.
    RoleChanged { is_primary: bool },
    /// FLUSHALL (`db` is `None`), FLUSHDB, or the flush before a full synchronisation begins. Values may be freed later, on
    /// another thread.
    FlushStarted { db: Option<i32> },
    /// A dataset is being loaded. A start without any data file loads nothing, and has no such event.
    Loading(Loading),
    /// Two databases changed places.
    SwapDb(i32, i32),
    /// A connection is gone. Comes with the detached context: nothing can be replied to it. Do not replicate here, or
    /// the command that closed it is replicated as well.
    ClientDisconnected { client_id: u64 },
    /// A fork child was born, or has ended. In the parent.
    ForkChild { born: bool },
    /// Slots move atomically. Valkey 9.0 and later.
    SlotMigration(SlotMigration),
    /// Settings were changed by CONFIG SET.
    ConfigChanged(ConfigNames<'a>),
}

/// How far an atomic slot migration is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotMigration {
    /// Slots of this node are on their way to another.
    ExportStarted,
    /// They stay here after all.
    ExportAborted,
    /// They are the other node's.
    ExportCompleted,
    /// Slots of another node are this one's.
    ImportCompleted,
}

/// How far a load is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loading {
    RdbStarted,
    AofStarted,
    ReplicationStarted,
    Ended,
    Failed,
}

/// The names of changed settings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConfigNames<'a> {
    names: &'a [*const c_char],
}

impl<'a> ConfigNames<'a> {
    pub(crate) fn iter(self) -> impl Iterator<Item = &'a CStr> {
        // SAFETY: the server's NUL-terminated names, which live as long as the event ('a).
        self.names.iter().filter(|name| !name.is_null()).map(|name| unsafe { CStr::from_ptr(*name) })
    }
}

/// Atomic slot migration; the bindings are older than it.
const SLOT_MIGRATION: u64 = 19;

/// Subscribes to every event of [`Event`]. An error names the event that this server refuses; older servers have no slot migration.
pub(crate) fn subscribe(ctx: &Ctx<'_>) -> Result<(), String> {
    let required = [
        raw::REDISMODULE_EVENT_EVENTLOOP,
        raw::REDISMODULE_EVENT_CRON_LOOP,
        raw::REDISMODULE_EVENT_REPLICATION_ROLE_CHANGED,
        raw::REDISMODULE_EVENT_FLUSHDB,
        raw::REDISMODULE_EVENT_LOADING,
        raw::REDISMODULE_EVENT_SWAPDB,
        raw::REDISMODULE_EVENT_CLIENT_CHANGE,
        raw::REDISMODULE_EVENT_FORK_CHILD,
        raw::REDISMODULE_EVENT_CONFIG,
    ];
    match required.into_iter().find(|event| !subscribe_to(ctx, *event)) {
        Some(event) => Err(format!("the server refuses a subscription to its event number {event}")),
        None => {
            subscribe_to(ctx, SLOT_MIGRATION);
            Ok(())
        }
    }
}

fn subscribe_to(ctx: &Ctx<'_>, id: u64) -> bool {
    let subscribe_to_server_event = server_fn!(RedisModule_SubscribeToServerEvent);
    let event = raw::RedisModuleEvent { id, dataver: 1 };
    // SAFETY: the context is live; the callback has the type the server expects and lives in this library, which cannot
    // be unloaded.
    unsafe { subscribe_to_server_event(ctx.as_ptr(), event, Some(on_server_event)) == OK }
}

extern "C" fn on_server_event(
    ctx: *mut raw::RedisModuleCtx,
    event: raw::RedisModuleEvent,
    sub_event: u64,
    data: *mut c_void,
) {
    // SAFETY: the server passes the data of this event, alive until we return.
    let Some(what) = (unsafe { decode(event.id, sub_event, data, PhantomData) }) else {
        return;
    };
    barrier(Callback::ServerEvent, (), || {
        if matches!(what, Event::ClientDisconnected { .. }) {
            // This event's own context is the dying client.
            if let Some(detached) = ctx::detached(0) {
                crate::server_events::on_event(&detached, what);
            }
            return;
        }
        // SAFETY: the server keeps the context, which has a temporary client, until we return.
        if let Some(ctx) = unsafe { Ctx::from_raw(ctx) } {
            crate::server_events::on_event(&ctx, what);
        }
    });
}

/// # Safety
/// `data` belongs to the event `id`, and lives for 'a.
unsafe fn decode<'a>(id: u64, sub_event: u64, data: *mut c_void, _event: PhantomData<&'a ()>) -> Option<Event<'a>> {
    match (id, sub_event) {
        (raw::REDISMODULE_EVENT_EVENTLOOP, raw::REDISMODULE_SUBEVENT_EVENTLOOP_BEFORE_SLEEP) => {
            Some(Event::BeforeSleep)
        }
        (raw::REDISMODULE_EVENT_CRON_LOOP, _) => Some(Event::Cron),
        (raw::REDISMODULE_EVENT_REPLICATION_ROLE_CHANGED, sub) => {
            Some(Event::RoleChanged { is_primary: sub == raw::REDISMODULE_EVENT_REPLROLECHANGED_NOW_MASTER })
        }
        (raw::REDISMODULE_EVENT_FLUSHDB, raw::REDISMODULE_SUBEVENT_FLUSHDB_START) => {
            // SAFETY: the data of this event is this structure.
            let info = unsafe { data.cast::<raw::RedisModuleFlushInfoV1>().as_ref() }?;
            Some(Event::FlushStarted { db: (info.dbnum >= 0).then_some(info.dbnum) })
        }
        (raw::REDISMODULE_EVENT_LOADING, sub) => loading(sub).map(Event::Loading),
        (raw::REDISMODULE_EVENT_SWAPDB, _) => {
            // SAFETY: the data of this event is this structure.
            let info = unsafe { data.cast::<raw::RedisModuleSwapDbInfoV1>().as_ref() }?;
            Some(Event::SwapDb(info.dbnum_first, info.dbnum_second))
        }
        (raw::REDISMODULE_EVENT_CLIENT_CHANGE, raw::REDISMODULE_SUBEVENT_CLIENT_CHANGE_DISCONNECTED) => {
            // SAFETY: the data of this event is this structure.
            let info = unsafe { data.cast::<raw::RedisModuleClientInfoV1>().as_ref() }?;
            Some(Event::ClientDisconnected { client_id: info.id })
        }
        (raw::REDISMODULE_EVENT_FORK_CHILD, sub) => {
            Some(Event::ForkChild { born: sub == raw::REDISMODULE_SUBEVENT_FORK_CHILD_BORN })
        }
        (SLOT_MIGRATION, sub) => slot_migration(sub).map(Event::SlotMigration),
        (raw::REDISMODULE_EVENT_CONFIG, _) => {
            // SAFETY: the data of this event is this structure.
            let info = unsafe { data.cast::<raw::RedisModuleConfigChangeV1>().as_ref() }?;
            // SAFETY: the structure's own count of names.
            let names = unsafe { slice_of(info.config_names, info.num_changes) };
            Some(Event::ConfigChanged(ConfigNames { names }))
        }
        _ => None,
    }
}

/// # Safety
/// `start` points to `count` values that live for 'a, or is null.
unsafe fn slice_of<'a, T>(start: *const T, count: u32) -> &'a [T] {
    match usize::try_from(count) {
        // SAFETY: the caller's promise.
        Ok(count) if !start.is_null() => unsafe { slice::from_raw_parts(start, count) },
        _ => &[],
    }
}

/// The server's numbers 0 and 2 are the beginning of an import, and its end without success.
fn slot_migration(sub_event: u64) -> Option<SlotMigration> {
    Some(match sub_event {
        1 => SlotMigration::ExportStarted,
        3 => SlotMigration::ExportAborted,
        4 => SlotMigration::ImportCompleted,
        5 => SlotMigration::ExportCompleted,
        _ => return None,
    })
}

fn loading(sub_event: u64) -> Option<Loading> {
    Some(match sub_event {
        raw::REDISMODULE_SUBEVENT_LOADING_RDB_START => Loading::RdbStarted,
        raw::REDISMODULE_SUBEVENT_LOADING_AOF_START => Loading::AofStarted,
        raw::REDISMODULE_SUBEVENT_LOADING_REPL_START => Loading::ReplicationStarted,
        raw::REDISMODULE_SUBEVENT_LOADING_ENDED => Loading::Ended,
        raw::REDISMODULE_SUBEVENT_LOADING_FAILED => Loading::Failed,
        _ => return None,
    })
}
