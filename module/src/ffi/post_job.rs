//! Work to do right after the running command, atomically with it: what `unlinked` must not do itself.
//!
//! A write made inside a deletion would be replicated before the deletion and undone by it. A job runs after the whole execution unit (the
//! command, the script, the MULTI block), and what it replicates belongs to the unit.

use std::ffi::c_void;
use std::ptr;

use valkey_module::raw;

use super::api::{OK, server_fn};
use super::barrier::{Callback, barrier};
use super::ctx::Ctx;

/// Schedules one call of `crate::server_events::on_post_job`, in the context's database. `false` while loading and on a read-only
/// replica, where there is nothing to do.
pub(crate) fn schedule(ctx: &Ctx<'_>) -> bool {
    let add_job = server_fn!(RedisModule_AddPostNotificationJob);
    // SAFETY: the context is live and has a client; there is no data to free.
    unsafe { add_job(ctx.as_ptr(), Some(on_job), ptr::null_mut(), None) == OK }
}

extern "C" fn on_job(ctx: *mut raw::RedisModuleCtx, _data: *mut c_void) {
    // SAFETY: the server keeps the context, which has a temporary client, until we return.
    if let Some(ctx) = unsafe { Ctx::from_raw(ctx) } {
        barrier(Callback::PostJob, (), || crate::server_events::on_post_job(&ctx));
    }
}
