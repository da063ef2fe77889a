//! Keys that the server takes away by itself: it evicts them, or their time to live is over.
//!
//! Only these classes are subscribed to. The server asks the mask of each subscription at every keyspace event, which is cheap; it calls
//! us for the two. They come after the key has gone, in the same step: while it goes, nothing may be looked up (see
//! `crate::data_type::unlinked`).

use std::ffi::{c_char, c_int};

use valkey_module::raw;

use super::api::{OK, server_fn};
use super::barrier::{Callback, barrier};
use super::ctx::Ctx;
use super::string::ServerStr;

const TAKEN: c_int = raw::REDISMODULE_NOTIFY_EVICTED | raw::REDISMODULE_NOTIFY_EXPIRED;

/// Makes the server tell `crate::server_events::on_taken` of every key it takes away. Once, while loading the module.
pub(crate) fn subscribe(ctx: &Ctx<'_>) -> Result<(), String> {
    let subscribe = server_fn!(RedisModule_SubscribeToKeyspaceEvents);
    // SAFETY: the context is live; the callback has the type the server expects and lives in this library.
    let status = unsafe { subscribe(ctx.as_ptr(), TAKEN, Some(on_keyspace_event)) };
    if status == OK { Ok(()) } else { Err("the server refuses a subscription to evicted and expired keys".into()) }
}

extern "C" fn on_keyspace_event(
    ctx: *mut raw::RedisModuleCtx,
    _class: c_int,
    _event: *const c_char,
    key: *mut raw::RedisModuleString,
) -> c_int {
    barrier(Callback::KeyspaceEvent, (), || {
        // SAFETY: the server keeps the context, which has a temporary client in the key's database, until we return.
        let ctx = unsafe { Ctx::from_raw(ctx) };
        // SAFETY: as above, for the key's name.
        let key = unsafe { ServerStr::from_raw(key) };
        if let (Some(ctx), Some(key)) = (ctx, key) {
            crate::server_events::on_taken(&ctx, key);
        }
    });
    OK
}
