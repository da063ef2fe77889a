//! Reading and writing values in the server's snapshot format, and adding them to a digest.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::slice;

use valkey_module::raw;

use super::api::server_fn;
use super::ctx::ContextFlags;
use super::string::ServerStr;

/// What a value is read from: a snapshot, a full synchronisation, or the payload of a RESTORE, which any user can
/// forge. So every read can fail, and what was read must be checked for meaning by the reader of it.
pub(crate) struct RdbReader<'a> {
    io: NonNull<raw::RedisModuleIO>,
    callback: PhantomData<&'a raw::RedisModuleIO>,
}

impl<'a> RdbReader<'a> {
    /// # Safety
    /// `io` is null, or what the server passed to a callback that lasts for 'a.
    pub(super) unsafe fn from_raw(io: *mut raw::RedisModuleIO) -> Option<Self> {
        NonNull::new(io).map(|io| Self { io, callback: PhantomData })
    }

    /// The next string, if it is at most `len_max` bytes long. (The server reads it whole before we see its length; it
    /// cannot be longer than the payload it stands in, unless that is compressed.)
    pub(crate) fn load_bytes(&mut self, len_max: usize) -> Option<Vec<u8>> {
        let load_string_buffer = server_fn!(RedisModule_LoadStringBuffer);
        let mut length = 0;
        // SAFETY: the callback is running; the length goes to this stack.
        let start = unsafe { load_string_buffer(self.io.as_ptr(), &raw mut length) };
        if start.is_null() {
            return None;
        }
        let accepted = !self.has_failed() && length <= len_max;
        // SAFETY: the server gave us a buffer of that length, and keeps no reference to it.
        let bytes = accepted.then(|| unsafe { slice::from_raw_parts(start.cast::<u8>(), length) }.to_vec());
        let free = server_fn!(RedisModule_Free);
        // SAFETY: the buffer is ours to free, once; the copy above is complete.
        unsafe { free(start.cast()) };
        bytes
    }

    /// The key the value will be under; `None` for data outside the keyspace.
    pub(crate) fn key_name(&self) -> Option<ServerStr<'a>> {
        let key_name = server_fn!(RedisModule_GetKeyNameFromIO);
        // SAFETY: the callback is running.
        let name = unsafe { key_name(self.io.as_ptr()) };
        // SAFETY: the name lives until the callback returns ('a).
        unsafe { ServerStr::from_raw(name) }
    }

    /// The database the value will be in; `None` where the server does not say.
    pub(crate) fn db(&self) -> Option<i32> {
        let db = server_fn!(RedisModule_GetDbIdFromIO);
        // SAFETY: the callback is running.
        let db = unsafe { db(self.io.as_ptr()) };
        (db >= 0).then_some(db)
    }

    /// The state of the server: on a primary that is not loading, the value comes from a user's RESTORE.
    pub(crate) fn server_flags(&self) -> ContextFlags {
        ContextFlags::of_server()
    }

    fn has_failed(&self) -> bool {
        let is_io_error = server_fn!(RedisModule_IsIOError);
        // SAFETY: the callback is running.
        unsafe { is_io_error(self.io.as_ptr()) != 0 }
    }
}

/// What a value is written to. Mostly in a fork child. Errors of the file stay with the server, which fails the save.
pub(crate) struct RdbWriter<'a> {
    io: NonNull<raw::RedisModuleIO>,
    callback: PhantomData<&'a raw::RedisModuleIO>,
}

impl RdbWriter<'_> {
    /// # Safety
    /// `io` is null, or what the server passed to a running callback.
    pub(super) unsafe fn from_raw(io: *mut raw::RedisModuleIO) -> Option<Self> {
        NonNull::new(io).map(|io| Self { io, callback: PhantomData })
    }

    /// The state of the server, in whose fork child this may run.
    pub(crate) fn server_flags(&self) -> ContextFlags {
        ContextFlags::of_server()
    }

    pub(crate) fn save_bytes(&mut self, bytes: &[u8]) {
        let save_string_buffer = server_fn!(RedisModule_SaveStringBuffer);
        // SAFETY: the callback is running; the server copies `len` bytes.
        unsafe { save_string_buffer(self.io.as_ptr(), bytes.as_ptr().cast(), bytes.len()) }
    }
}

/// The digest of one value, as DEBUG DIGEST-VALUE prints it. What belongs together in order goes between two
/// [`Digest::end_sequence`].
pub(crate) struct Digest<'a> {
    raw: NonNull<raw::RedisModuleDigest>,
    callback: PhantomData<&'a raw::RedisModuleDigest>,
}

impl Digest<'_> {
    /// # Safety
    /// `digest` is null, or what the server passed to a running digest callback.
    pub(super) unsafe fn from_raw(digest: *mut raw::RedisModuleDigest) -> Option<Self> {
        NonNull::new(digest).map(|raw| Self { raw, callback: PhantomData })
    }

    pub(crate) fn add_bytes(&mut self, bytes: &[u8]) {
        let add_string_buffer = server_fn!(RedisModule_DigestAddStringBuffer);
        // SAFETY: the callback is running; the server reads `len` bytes.
        unsafe { add_string_buffer(self.raw.as_ptr(), bytes.as_ptr().cast(), bytes.len()) }
    }

    pub(crate) fn end_sequence(&mut self) {
        let end_sequence = server_fn!(RedisModule_DigestEndSequence);
        // SAFETY: the callback is running.
        unsafe { end_sequence(self.raw.as_ptr()) }
    }
}
