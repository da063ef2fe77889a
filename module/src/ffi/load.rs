//! The first call: is this a server we can live in? Then the rest of the module is loaded.
//!
//! Everything before [`check_server`] has passed runs without allocating: the allocator is the server's, and may not be
//! there.

use std::ffi::{CStr, c_int};

use valkey_module::raw;

use super::api::{self, ERR, OK, server_fn};
use super::args::Args;
use super::barrier::{self, Callback};
use super::ctx::{self, Ctx, LogLevel};
use super::string::CText;
use super::{main_thread, timer_fd};

/// Memory comes from the server, so that it counts against `maxmemory` and shows in INFO. Tests run without a server.
#[cfg(not(test))]
#[global_allocator]
static ALLOCATOR: valkey_module::alloc::ValkeyAlloc = valkey_module::alloc::ValkeyAlloc;

const MODULE_NAME: &CStr = c"flock";
/// Valkey 8.0.0, as the server numbers itself: 0x00MMmmpp.
const OLDEST_SERVER: c_int = 0x0008_0000;

/// What Valkey calls.
#[unsafe(no_mangle)]
extern "C" fn ValkeyModule_OnLoad(
    ctx: *mut raw::RedisModuleCtx,
    argv: *mut *mut raw::RedisModuleString,
    argc: c_int,
) -> c_int {
    // SAFETY: the server calls with a live context and its arguments.
    unsafe { on_load(ctx, argv, argc) }
}

/// What servers before Valkey 8.0, and Redis, call: to be told no, with a reason.
#[unsafe(no_mangle)]
extern "C" fn RedisModule_OnLoad(
    ctx: *mut raw::RedisModuleCtx,
    argv: *mut *mut raw::RedisModuleString,
    argc: c_int,
) -> c_int {
    // SAFETY: the server calls with a live context and its arguments.
    unsafe { on_load(ctx, argv, argc) }
}

/// # Safety
/// Called by the server, on its main thread, with a live context and `argc` arguments.
unsafe fn on_load(ctx: *mut raw::RedisModuleCtx, argv: *mut *mut raw::RedisModuleString, argc: c_int) -> c_int {
    if ctx.is_null() {
        return ERR;
    }
    // SAFETY: the live context; fills the statics with the functions this server has.
    unsafe { raw::Export_RedisModule_InitAPI(ctx) };
    if let Err(refusal) = check_server() {
        refuse_server(ctx, refusal);
        return ERR;
    }
    main_thread::adopt();
    api::find_optional();
    let set_module_attribs = server_fn!(RedisModule_SetModuleAttribs);
    // SAFETY: the live context; the server copies the name. Whether the name is taken, it finds out itself.
    unsafe { set_module_attribs(ctx, MODULE_NAME.as_ptr(), crate::MODULE_VERSION, API_VERSION) };
    barrier::install_panic_hook();
    let loaded = barrier::barrier(Callback::Load, false, || {
        // SAFETY: the live context, which has a temporary client, until we return.
        let Some(ctx) = (unsafe { Ctx::from_raw(ctx) }) else {
            return false;
        };
        // SAFETY: the server keeps the arguments until we return.
        let args: Vec<&[u8]> = unsafe { Args::from_raw(argv, argc) }.iter_from(0).collect();
        ctx::make_detached(&ctx);
        match crate::load(&ctx, &args) {
            Ok(()) => true,
            Err(reason) => {
                ctx.log(LogLevel::Warning, &format!("not loaded: {reason}"));
                false
            }
        }
    });
    if !loaded {
        // What the server does not clean up after a failed load.
        timer_fd::close();
        return ERR;
    }
    OK
}

const API_VERSION: c_int = 1;

/// Why this server is refused.
#[derive(Clone, Copy)]
enum Refusal {
    NotValkey,
    TooOld,
    NameTaken,
    Lacks(&'static str),
}

fn check_server() -> Result<(), Refusal> {
    // Valkey answers to both families of names, Redis to one.
    if api::lookup(c"ValkeyModule_GetServerVersion").is_none() {
        return Err(Refusal::NotValkey);
    }
    // SAFETY: a plain read of a static that was filled just now, on this thread.
    match unsafe { raw::RedisModule_GetServerVersion } {
        // SAFETY: a function without arguments, present.
        Some(version) if unsafe { version() } >= OLDEST_SERVER => {}
        _ => return Err(Refusal::TooOld),
    }
    if let Some(name) = api::first_missing() {
        return Err(Refusal::Lacks(name));
    }
    let is_name_busy = server_fn!(RedisModule_IsModuleNameBusy);
    // SAFETY: the name is NUL-terminated.
    if unsafe { is_name_busy(MODULE_NAME.as_ptr()) } != 0 {
        return Err(Refusal::NameTaken);
    }
    Ok(())
}

/// Says no in the log, if the server has one.
fn refuse_server(ctx: *mut raw::RedisModuleCtx, refusal: Refusal) {
    // SAFETY: a plain read, as above; `server_fn!` is for servers that passed the check.
    let Some(log) = (unsafe { raw::RedisModule_Log }) else {
        return;
    };
    let (text, detail) = match refusal {
        Refusal::NotValkey => {
            (c"flock is not loaded: this server is not Valkey; flock needs Valkey 8.0 or later%s", "")
        }
        Refusal::TooOld => (c"flock is not loaded: this Valkey is too old; flock needs Valkey 8.0 or later%s", ""),
        Refusal::NameTaken => (c"flock is not loaded: a module named flock is loaded already%s", ""),
        Refusal::Lacks(name) => (c"flock is not loaded: this server lacks the module function %s", name),
    };
    let detail = CText::<128>::new(detail.as_bytes());
    // SAFETY: the live context; the format names one NUL-terminated string, which lives on this stack.
    unsafe { log(ctx, c"warning".as_ptr(), text.as_ptr(), detail.as_ptr()) };
}
