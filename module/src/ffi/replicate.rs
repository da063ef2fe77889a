//! Commands written by the module: to replicas and the append-only file ([`Ctx::replicate`]), and to a file that is
//! being rewritten or a slot that is being moved ([`AofWriter::emit`]).
//!
//! Both server functions are variadic and take a format: `b` is a pointer and a length, `s` a server string (no copy).

use std::ffi::{CStr, c_char};
use std::marker::PhantomData;
use std::ptr::NonNull;

use valkey_module::raw;

use super::api::{OK, server_fn};
use super::ctx::Ctx;
use super::string::ServerStr;

impl Ctx<'_> {
    /// Sends `command change [key]` to the replicas and the append-only file: after the running command, with whatever
    /// else it replicates, as one unit.
    ///
    /// The command must be one of the server's. Outside a client's write command the caller must have found this node a
    /// primary and [`Ctx::avoid_replica_traffic`] false: the server asserts on it.
    pub(crate) fn replicate(&self, command: &'static CStr, change: &[u8], key: Option<ServerStr<'_>>) -> bool {
        let replicate = server_fn!(RedisModule_Replicate);
        let (start, length) = (change.as_ptr().cast::<c_char>(), change.len());
        let (ctx, command) = (self.as_ptr(), command.as_ptr());
        let status = match key {
            // SAFETY: context and key are live; `b` takes the bytes, which the server copies, `s` the key, of which it
            // takes a reference of its own.
            Some(key) => unsafe { replicate(ctx, command, c"bs".as_ptr(), start, length, key.as_ptr()) },
            // SAFETY: as above, without a key.
            None => unsafe { replicate(ctx, command, c"b".as_ptr(), start, length) },
        };
        status == OK
    }
}

/// Where the commands that recreate one key go: the new append-only file, or the target of a slot migration. In a fork
/// child.
pub(crate) struct AofWriter<'a> {
    io: NonNull<raw::RedisModuleIO>,
    callback: PhantomData<&'a raw::RedisModuleIO>,
}

impl AofWriter<'_> {
    /// # Safety
    /// `io` is null, or what the server passed to a running `aof_rewrite` callback.
    pub(super) unsafe fn from_raw(io: *mut raw::RedisModuleIO) -> Option<Self> {
        NonNull::new(io).map(|io| Self { io, callback: PhantomData })
    }

    /// Writes `command change key`. Errors of the file stay with the server, which fails the rewrite.
    pub(crate) fn emit(&mut self, command: &'static CStr, change: &[u8], key: ServerStr<'_>) {
        let emit_aof = server_fn!(RedisModule_EmitAOF);
        let (start, length) = (change.as_ptr().cast::<c_char>(), change.len());
        // SAFETY: the callback is running and the key is live; `b` takes the bytes, which the server copies, `s` the key.
        unsafe { emit_aof(self.io.as_ptr(), command.as_ptr(), c"bs".as_ptr(), start, length, key.as_ptr()) }
    }
}
