//! Clients that wait inside a command.
//!
//! The server keeps a handle for each blocked client until it is unblocked, exactly once: never is a leak, twice is a
//! crash. Here the handle is a value that is consumed: [`BlockedClient::unblock`], or dropping it, unblocks. What is
//! attached to it is a number that the module chose for the waiter, never a pointer, so a late callback can at worst
//! name a waiter that is gone.
//!
//! The callbacks of one waiter, all on the main thread: `on_timeout` (CLIENT UNBLOCK TIMEOUT) or `on_disconnect` (the
//! connection is gone, or CLIENT UNBLOCK ERROR, or a demotion), each while the module still holds the handle or just
//! after it gave it back; then, once it was unblocked, `on_reply` if the client is still there; last `on_free`, always.

use std::ffi::{c_int, c_void};
use std::num::NonZeroU64;
use std::ptr::{self, NonNull};

use valkey_module::raw;

use super::api::{OK, server_fn};
use super::barrier::{Callback, barrier};
use super::ctx::Ctx;
use super::reply;

/// A client that waits. Consumed by unblocking it; dropping it unblocks it too.
pub(crate) struct BlockedClient {
    raw: NonNull<raw::RedisModuleBlockedClient>,
    waiter: NonZeroU64,
}

/// Blocks the calling client until it is unblocked; the server itself sets no limit of time. The running command must
/// not reply.
///
/// `None`, with nothing done, where a client cannot wait: in MULTI, in a script, called by a module, on a replication
/// link, outside a command; or if the command has replied, or blocked the client, already (blocking twice crashes the
/// server).
pub(crate) fn block(ctx: &Ctx<'_>, waiter: NonZeroU64) -> Option<BlockedClient> {
    let flags = ctx.flags();
    if !reply::is_owed_whole() || flags.denies_blocking() || ctx.must_obey_client(flags) || in_blocked_callback(ctx) {
        return None;
    }
    let block_client = server_fn!(RedisModule_BlockClient);
    // SAFETY: the context is live, with a client that may be blocked; the callbacks have the types the server expects.
    let client = unsafe { block_client(ctx.as_ptr(), Some(on_reply), Some(on_timeout), Some(on_free), 0) };
    let raw = NonNull::new(client)?;
    reply::owe_later();
    let set_private_data = server_fn!(RedisModule_BlockClientSetPrivateData);
    // SAFETY: the handle was just made. The data is a number.
    unsafe { set_private_data(raw.as_ptr(), to_data(waiter)) };
    let set_disconnect_callback = server_fn!(RedisModule_SetDisconnectCallback);
    // SAFETY: as above.
    unsafe { set_disconnect_callback(raw.as_ptr(), Some(on_disconnect)) };
    Some(BlockedClient { raw, waiter })
}

impl BlockedClient {
    /// Lets the client go: `on_reply` (if it is still there) and `on_free` follow later, from the event loop. Must be
    /// called also after `on_timeout` and `on_disconnect`, which leave the handle alive.
    pub(crate) fn unblock(self) {
        drop(self);
    }
}

impl Drop for BlockedClient {
    fn drop(&mut self) {
        let unblock_client = server_fn!(RedisModule_UnblockClient);
        // SAFETY: the one handle made by `block`, and the one time it is given back: a drop happens once.
        unsafe { unblock_client(self.raw.as_ptr(), to_data(self.waiter)) };
    }
}

/// Is this a reply or timeout callback of a blocked client, which cannot be blocked again?
fn in_blocked_callback(ctx: &Ctx<'_>) -> bool {
    let is_reply_request = server_fn!(RedisModule_IsBlockedReplyRequest);
    let is_timeout_request = server_fn!(RedisModule_IsBlockedTimeoutRequest);
    // SAFETY: the context is live.
    let replying = unsafe { is_reply_request(ctx.as_ptr()) };
    // SAFETY: the context is live.
    let timing_out = unsafe { is_timeout_request(ctx.as_ptr()) };
    replying != 0 || timing_out != 0
}

fn to_data(waiter: NonZeroU64) -> *mut c_void {
    // Lossless: the module is built for 64-bit systems only (asserted in timer_fd.rs).
    ptr::without_provenance_mut(usize::try_from(waiter.get()).unwrap_or_default())
}

fn to_waiter(data: *mut c_void) -> Option<NonZeroU64> {
    NonZeroU64::new(data.addr() as u64)
}

extern "C" fn on_reply(ctx: *mut raw::RedisModuleCtx, _argv: *mut *mut raw::RedisModuleString, _argc: c_int) -> c_int {
    reply_from(Callback::Reply, ctx, crate::blocking::on_reply)
}

extern "C" fn on_timeout(
    ctx: *mut raw::RedisModuleCtx,
    _argv: *mut *mut raw::RedisModuleString,
    _argc: c_int,
) -> c_int {
    reply_from(Callback::Timeout, ctx, crate::blocking::on_timeout)
}

fn reply_from(callback: Callback, ctx: *mut raw::RedisModuleCtx, body: fn(&Ctx<'_>, NonZeroU64)) -> c_int {
    let private_data = server_fn!(RedisModule_GetBlockedClientPrivateData);
    // SAFETY: the live context of a blocked client's callback.
    let waiter = to_waiter(unsafe { private_data(ctx) });
    // SAFETY: the server calls back for a client that is still there, and keeps the context until we return.
    if let Some(ctx) = unsafe { Ctx::from_raw(ctx) } {
        reply::owing_one(&ctx, || {
            barrier(callback, (), || {
                if let Some(waiter) = waiter {
                    body(&ctx, waiter);
                }
            });
        });
    }
    OK
}

extern "C" fn on_disconnect(_ctx: *mut raw::RedisModuleCtx, client: *mut raw::RedisModuleBlockedClient) {
    let private_data = server_fn!(RedisModule_BlockClientGetPrivateData);
    // SAFETY: the server passes the live handle; the context is not used: its client is on its way out.
    let waiter = to_waiter(unsafe { private_data(client) });
    barrier(Callback::Disconnect, (), || {
        if let Some(waiter) = waiter {
            crate::blocking::on_disconnect(waiter);
        }
    });
}

extern "C" fn on_free(_ctx: *mut raw::RedisModuleCtx, data: *mut c_void) {
    barrier(Callback::FreeWaiter, (), || {
        if let Some(waiter) = to_waiter(data) {
            crate::blocking::on_free(waiter);
        }
    });
}
