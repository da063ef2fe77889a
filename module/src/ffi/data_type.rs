//! The server's side of a lock: a value of our own type, `flocklock`, in the keyspace.
//!
//! What the server stores is not a pointer but a number, the [`Handle`]; the lock itself lives in the module's table.
//! So whatever the server does with a value, and on whichever thread, it can neither read nor free our memory. It may
//! free a value on a background thread: [`drain_freed`] carries the news to the main thread. There is no copy callback
//! (COPY of a lock is refused) and no defragmentation.

use std::ffi::{CStr, c_int, c_void};
use std::num::NonZeroU32;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use valkey_module::raw;

use super::api::{ERR, OK, server_fn};
use super::barrier::{Callback, barrier};
use super::ctx::{ContextFlags, Ctx, LogLevel, log_without_ctx};
use super::key::NoKeyMayOpen;
use super::main_thread;
use super::rdb_io::{Digest, RdbReader, RdbWriter};
use super::replicate::AofWriter;
use super::string::ServerStr;

/// Nine characters, as the server demands; TYPE prints it.
const NAME: &CStr = c"flocklock";

/// The name of one lock in the module's table: what a key holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Handle(pub(crate) NonZeroU32);

impl Handle {
    pub(super) fn to_value(self) -> *mut c_void {
        ptr::without_provenance_mut(self.0.get() as usize)
    }

    pub(super) fn from_value(value: *const c_void) -> Option<Self> {
        u32::try_from(value.addr()).ok().and_then(NonZeroU32::new).map(Self)
    }
}

/// `REDISMODULE_AUX_BEFORE_RDB`: our data that is not under a key stands before the keys, so that it is there whatever comes after.
const BEFORE_KEYS: c_int = 1;

static TYPE: AtomicPtr<raw::RedisModuleType> = AtomicPtr::new(ptr::null_mut());

/// The registered type, or null before [`register`].
pub(super) fn server_type() -> *mut raw::RedisModuleType {
    TYPE.load(Ordering::Relaxed)
}

/// Registers the type, with the version its snapshots carry, and the module's options. Once, while loading the module.
pub(crate) fn register(ctx: &Ctx<'_>, encoding_version: i32) -> Result<(), String> {
    set_options(ctx);
    let mut methods = raw::RedisModuleTypeMethods {
        version: u64::from(raw::REDISMODULE_TYPE_METHOD_VERSION),
        rdb_load: Some(rdb_load),
        rdb_save: Some(rdb_save),
        aof_rewrite: Some(aof_rewrite),
        mem_usage: None, // superseded by mem_usage2
        digest: Some(digest),
        free: Some(free),
        aux_load: Some(aux_load),
        aux_save: None, // aux_save2: a snapshot without our data loads on a server without us
        aux_save_triggers: BEFORE_KEYS,
        free_effort: None, // a number is freed at once, whatever there is to free: the table holds the lock
        unlink: None,      // superseded by unlink2
        copy: None,        // a lock must not be cloned: the server refuses COPY
        defrag: None,      // a number has no memory to move
        mem_usage2: Some(mem_usage),
        free_effort2: None,
        unlink2: Some(unlink),
        copy2: None,
        aux_save2: Some(aux_save),
    };
    let create_data_type = server_fn!(RedisModule_CreateDataType);
    // SAFETY: the context is live; the server copies the table and the name.
    let data_type = unsafe { create_data_type(ctx.as_ptr(), NAME.as_ptr(), encoding_version, &raw mut methods) };
    if data_type.is_null() {
        return Err(format!("the server refuses the data type {NAME:?}: is its name taken by another module?"));
    }
    TYPE.store(data_type, Ordering::Relaxed);
    Ok(())
}

/// Locks may travel in an atomic slot migration (Valkey 9; the bindings are older): a module that does not say so keeps the whole
/// server from it.
const HANDLE_ATOMIC_SLOT_MIGRATION: u32 = 1 << 5;

/// All options in one call: each call replaces the last.
fn set_options(ctx: &Ctx<'_>) {
    // Reading errors are ours to handle (otherwise a forged RESTORE ends the server), and so is telling that a key has
    // changed (a failed ACQUIRE must not break a WATCH). What we replicate are our own commands: looking each up costs
    // a third of replicating it.
    let wanted = raw::REDISMODULE_OPTIONS_HANDLE_IO_ERRORS
        | raw::REDISMODULE_OPTION_NO_IMPLICIT_SIGNAL_MODIFIED
        | raw::VALKEYMODULE_OPTIONS_SKIP_COMMAND_VALIDATION
        | HANDLE_ATOMIC_SLOT_MIGRATION;
    let options_all = server_fn!(RedisModule_GetModuleOptionsAll);
    // SAFETY: a function without arguments.
    let known = unsafe { options_all() };
    let set_module_options = server_fn!(RedisModule_SetModuleOptions);
    // SAFETY: the context is live.
    unsafe { set_module_options(ctx.as_ptr(), wanted.cast_signed() & known) };
}

/// Handles of values the server has freed on another thread, or while the table was busy.
static FREED: Mutex<Vec<Handle>> = Mutex::new(Vec::new());
/// How many there are: read without the lock.
static FREED_COUNT: AtomicUsize = AtomicUsize::new(0);

/// Moves the handles of freed values to the end of `into`; `false` if there were none. Costs one read when there is
/// nothing.
#[inline]
pub(crate) fn drain_freed(into: &mut Vec<Handle>) -> bool {
    FREED_COUNT.load(Ordering::Acquire) != 0 && drain(into)
}

#[cold]
fn drain(into: &mut Vec<Handle>) -> bool {
    // Never waits: in a fork child, a lock that another thread held at the birth of the child stays locked for ever.
    let Ok(mut freed) = FREED.try_lock() else {
        return false;
    };
    FREED_COUNT.store(0, Ordering::Release);
    into.append(&mut freed);
    true
}

extern "C" fn free(value: *mut c_void) {
    barrier(Callback::Free, (), || {
        if let Some(handle) = Handle::from_value(value)
            && !(main_thread::is_current() && crate::state::freed(handle))
        {
            let mut freed = FREED.lock().unwrap_or_else(PoisonError::into_inner);
            freed.push(handle);
            FREED_COUNT.store(freed.len(), Ordering::Release);
        }
    });
}

extern "C" fn rdb_load(io: *mut raw::RedisModuleIO, encoding_version: c_int) -> *mut c_void {
    barrier(Callback::RdbLoad, ptr::null_mut(), || {
        // SAFETY: the server's stream, live until we return.
        let Some(mut reader) = (unsafe { RdbReader::from_raw(io) }) else {
            return ptr::null_mut();
        };
        crate::data_type::load(&mut reader, encoding_version).map_or(ptr::null_mut(), Handle::to_value)
    })
}

extern "C" fn rdb_save(io: *mut raw::RedisModuleIO, value: *mut c_void) {
    let complete = barrier(Callback::RdbSave, false, || {
        // SAFETY: the server's stream, live until we return.
        let writer = unsafe { RdbWriter::from_raw(io) };
        match (writer, Handle::from_value(value)) {
            (Some(mut writer), Some(handle)) => crate::data_type::save(&mut writer, handle),
            _ => false,
        }
    });
    if !complete {
        log_without_ctx(LogLevel::Warning, LOCK_IS_LACKING);
    }
    fail_save_unless(complete);
}

extern "C" fn aof_rewrite(io: *mut raw::RedisModuleIO, key: *mut raw::RedisModuleString, value: *mut c_void) {
    let complete = barrier(Callback::AofRewrite, false, || {
        // SAFETY: the server's stream, live until we return.
        let writer = unsafe { AofWriter::from_raw(io) };
        // SAFETY: the key's name, live until we return.
        let key = unsafe { ServerStr::from_raw(key) };
        match (writer, key, Handle::from_value(value)) {
            (Some(mut writer), Some(key), Some(handle)) => crate::data_type::aof_rewrite(&mut writer, key, handle),
            _ => false,
        }
    });
    if !complete {
        log_without_ctx(LogLevel::Warning, LOCK_IS_LACKING);
    }
    fail_save_unless(complete);
}

extern "C" fn mem_usage(_key: *mut raw::RedisModuleKeyOptCtx, value: *const c_void, _sample_size: usize) -> usize {
    barrier(Callback::MemUsage, 0, || Handle::from_value(value).map_or(0, crate::data_type::mem_usage))
}

extern "C" fn digest(digest: *mut raw::RedisModuleDigest, value: *mut c_void) {
    barrier(Callback::Digest, (), || {
        // SAFETY: the server's digest, live until we return.
        let digest = unsafe { Digest::from_raw(digest) };
        if let (Some(mut digest), Some(handle)) = (digest, Handle::from_value(value)) {
            crate::data_type::digest(&mut digest, handle);
        }
    });
}

extern "C" fn unlink(_key: *mut raw::RedisModuleKeyOptCtx, value: *const c_void) {
    barrier(Callback::Unlink, (), || {
        // A lock that is free goes by our own doing.
        if let Some(handle) = Handle::from_value(value).filter(|handle| crate::data_type::is_held(*handle)) {
            let _closed = NoKeyMayOpen::begin();
            crate::data_type::unlinked(handle);
        }
    });
}

extern "C" fn aux_save(io: *mut raw::RedisModuleIO, _when: c_int) {
    let complete = barrier(Callback::AuxSave, false, || {
        // SAFETY: the server's stream, live until we return.
        match unsafe { RdbWriter::from_raw(io) } {
            Some(mut writer) => crate::data_type::aux_save(&mut writer),
            None => false,
        }
    });
    fail_save_unless(complete);
}

extern "C" fn aux_load(io: *mut raw::RedisModuleIO, encoding_version: c_int, _when: c_int) -> c_int {
    barrier(Callback::AuxLoad, ERR, || {
        // SAFETY: the server's stream, live until we return.
        let Some(mut reader) = (unsafe { RdbReader::from_raw(io) }) else {
            return ERR;
        };
        let accepted = crate::data_type::aux_load(&mut reader, encoding_version);
        if accepted { OK } else { ERR }
    })
}

const LOCK_IS_LACKING: &str = "a lock could not be saved: the save is incomplete";

/// What is incomplete must not replace a good file. The server has no way to be told, but a save runs in a fork child as a
/// rule, and a child that ends is a save that failed. Elsewhere (SAVE, DUMP) loading refuses what was written.
fn fail_save_unless(complete: bool) {
    if !complete && ContextFlags::of_server().is_fork_child() {
        // SAFETY: ends this process without running anything of the parent's.
        unsafe { _exit(1) };
    }
}

unsafe extern "C" {
    fn _exit(status: c_int) -> !;
}
