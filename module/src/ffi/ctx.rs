//! The context of a call from the server: who calls, in which state is the server, in which database are we.
//!
//! A [`Ctx`] lives as long as the callback it came with, and always has a client: a context without one (the server
//! makes such contexts for clients that are gone) crashes the server in the next call, so this layer never makes a
//! `Ctx` of it.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};

use valkey_module::raw;

use super::api::{self, OK, server_fn};
pub(crate) use super::context_flags::ContextFlags;
use super::main_thread;
use super::string::{CText, ServerString};

/// The client id of the client that replays the append-only file.
const AOF_CLIENT: u64 = u64::MAX;

/// What [`Ctx::connection`] found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Connection {
    /// It receives messages: a reply that comes late could be taken for one, or the other way round.
    pub(crate) has_subscriptions: bool,
}

/// How loud a log line is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LogLevel {
    Verbose,
    Notice,
    Warning,
}

/// A live context of the server.
pub(crate) struct Ctx<'a> {
    raw: NonNull<raw::RedisModuleCtx>,
    callback: PhantomData<&'a raw::RedisModuleCtx>,
}

impl Ctx<'_> {
    /// # Safety
    /// `ctx` is null, or a context that has a client and lives for the lifetime the caller gives to the result.
    pub(super) unsafe fn from_raw(ctx: *mut raw::RedisModuleCtx) -> Option<Self> {
        NonNull::new(ctx).map(|raw| Self { raw, callback: PhantomData })
    }

    pub(super) fn as_ptr(&self) -> *mut raw::RedisModuleCtx {
        self.raw.as_ptr()
    }

    /// One line in the server's log; cut at about 1000 bytes.
    #[cold]
    pub(crate) fn log(&self, level: LogLevel, message: &str) {
        // SAFETY: the context is live.
        unsafe { log_with(self.as_ptr(), level, message) }
    }

    /// The state of the server and of the calling client, as bits: ask once, look often.
    pub(crate) fn flags(&self) -> ContextFlags {
        let get_context_flags = server_fn!(RedisModule_GetContextFlags);
        // SAFETY: the context is live.
        ContextFlags::from_raw(unsafe { get_context_flags(self.as_ptr()) })
    }

    /// The calling client's id. Per process: it means nothing after a failover, and in a script it is the script's.
    pub(crate) fn client_id(&self) -> u64 {
        let get_client_id = server_fn!(RedisModule_GetClientId);
        // SAFETY: the context is live.
        unsafe { get_client_id(self.as_ptr()) }
    }

    /// Does the command come from where it cannot be refused: the primary, the append-only file, an imported slot?
    /// `flags` are those of this context. No client can make this true.
    pub(crate) fn must_obey_client(&self, flags: ContextFlags) -> bool {
        // SAFETY: the context is live and has a client.
        flags.is_replicated() || self.client_id() == AOF_CLIENT || unsafe { api::must_obey_client(self.as_ptr()) }
    }

    /// The calling connection. `None` for a caller that is none: a script, or a call by another module. Costs a system
    /// call.
    pub(crate) fn connection(&self) -> Option<Connection> {
        // Asked first: the next function crashes Valkey 9.1.2 for a caller that is no connection.
        self.connected_user_name()?;
        let get_client_info = server_fn!(RedisModule_GetClientInfoById);
        let mut info = raw::RedisModuleClientInfoV1 {
            version: u64::from(raw::REDISMODULE_CLIENTINFO_VERSION),
            flags: 0,
            id: 0,
            addr: [0; 46],
            port: 0,
            db: 0,
        };
        let address: *mut c_void = (&raw mut info).cast();
        // SAFETY: the structure is of the version it says, and lives on this stack while the server fills it.
        let known = unsafe { get_client_info(address, self.client_id()) == OK };
        known.then_some(Connection {
            has_subscriptions: info.flags & u64::from(raw::REDISMODULE_CLIENTINFO_FLAG_PUBSUB) != 0,
        })
    }

    /// The user of the calling connection; `None` if the caller is no connection, or has no user (the replication
    /// link).
    pub(super) fn connected_user_name(&self) -> Option<ServerString> {
        let user_name_by_id = server_fn!(RedisModule_GetClientUserNameById);
        // SAFETY: the context is live; the server looks the id up among its connections.
        let name = unsafe { user_name_by_id(self.as_ptr(), self.client_id()) };
        // SAFETY: null, or made for us: no context of ours has automatic memory.
        unsafe { ServerString::from_raw(name) }
    }

    /// The database that keys of this context are in.
    pub(crate) fn selected_db(&self) -> i32 {
        let get_selected_db = server_fn!(RedisModule_GetSelectedDb);
        // SAFETY: the context is live and has a client.
        unsafe { get_selected_db(self.as_ptr()) }
    }

    /// Moves this context to another database; `false` if there is no such one. In a command it moves the calling
    /// client, for good.
    pub(crate) fn select_db(&self, db: i32) -> bool {
        let select_db = server_fn!(RedisModule_SelectDb);
        // SAFETY: the context is live and has a client.
        unsafe { select_db(self.as_ptr(), db) == OK }
    }

    /// Would replicating now, outside a client's write command, be wrong (and crash the server)? True in CLIENT PAUSE
    /// WRITE, in FAILOVER, in a shutdown that waits for replicas.
    pub(crate) fn avoid_replica_traffic(&self) -> bool {
        let avoid_replica_traffic = server_fn!(RedisModule_AvoidReplicaTraffic);
        // SAFETY: reads the server's state; a `Ctx` exists on the main thread only.
        unsafe { avoid_replica_traffic() != 0 }
    }
}

/// The context of nobody in particular, made once at load.
static DETACHED: AtomicPtr<raw::RedisModuleCtx> = AtomicPtr::new(ptr::null_mut());

/// Makes the detached context. Called once, by `load`.
pub(super) fn make_detached(ctx: &Ctx<'_>) {
    let get_detached = server_fn!(RedisModule_GetDetachedThreadSafeContext);
    // SAFETY: the context is live; the new one is ours until the process ends.
    let detached = unsafe { get_detached(ctx.as_ptr()) };
    DETACHED.store(detached, Ordering::Release);
}

/// The detached context, in database `db`: for callbacks that come without a usable context. `None` before load, off
/// the main thread, or without such a database. Uses nest: the database of an outer use is back when the inner one is
/// dropped.
pub(crate) fn detached(db: i32) -> Option<Detached> {
    if !main_thread::is_current() {
        return None;
    }
    // SAFETY: null, or the context made at load, which has a client of its own and is never freed.
    let ctx: Ctx<'static> = unsafe { Ctx::from_raw(DETACHED.load(Ordering::Acquire)) }?;
    let previous_db = ctx.selected_db();
    let selected = ctx.select_db(db);
    selected.then(|| Detached { ctx, previous_db })
}

/// A use of the detached context; replies to it go nowhere.
pub(crate) struct Detached {
    ctx: Ctx<'static>,
    previous_db: i32,
}

impl Deref for Detached {
    type Target = Ctx<'static>;

    fn deref(&self) -> &Self::Target {
        &self.ctx
    }
}

impl Drop for Detached {
    fn drop(&mut self) {
        self.ctx.select_db(self.previous_db);
    }
}

/// A log line from a place that has no context. May be called on any thread once the module is loaded.
pub(crate) fn log_without_ctx(level: LogLevel, message: &str) {
    // SAFETY: null (which the server's log takes), or the detached context, which is never freed; of it, logging reads
    // the module's name only.
    unsafe { log_with(DETACHED.load(Ordering::Acquire), level, message) }
}

/// # Safety
/// `ctx` is null or a live context.
unsafe fn log_with(ctx: *mut raw::RedisModuleCtx, level: LogLevel, message: &str) {
    let log = server_fn!(RedisModule_Log);
    let level = match level {
        LogLevel::Verbose => c"verbose",
        LogLevel::Notice => c"notice",
        LogLevel::Warning => c"warning",
    };
    // The server cuts a line at 1024 bytes itself.
    let text = CText::<1024>::new(message.as_bytes());
    // SAFETY: the caller's promise; `%s` takes one NUL-terminated string, which lives on this stack.
    unsafe { log(ctx, level.as_ptr(), c"%s".as_ptr(), text.as_ptr()) }
}
