//! The server's strings, borrowed and owned, and short C text on the stack.

use std::ffi::{c_char, c_int};
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::slice;

use valkey_module::raw;

use super::api::server_fn;

/// A string that belongs to somebody else: an argument of the running command, the name of the key in a callback, a
/// [`ServerString`].
#[derive(Clone, Copy)]
pub(crate) struct ServerStr<'a> {
    raw: NonNull<raw::RedisModuleString>,
    owner: PhantomData<&'a raw::RedisModuleString>,
}

impl<'a> ServerStr<'a> {
    /// # Safety
    /// `string` is null, or a string that lives, unchanged, for `'a`.
    pub(super) unsafe fn from_raw(string: *const raw::RedisModuleString) -> Option<Self> {
        NonNull::new(string.cast_mut()).map(|raw| Self { raw, owner: PhantomData })
    }

    pub(super) fn as_ptr(self) -> *mut raw::RedisModuleString {
        self.raw.as_ptr()
    }

    /// The bytes, where they are: no copy.
    pub(crate) fn bytes(self) -> &'a [u8] {
        let string_ptr_len = server_fn!(RedisModule_StringPtrLen);
        let mut length = 0;
        // SAFETY: the string lives for 'a; the server writes the length to this stack and answers where the bytes are.
        let start = unsafe { string_ptr_len(self.as_ptr(), &raw mut length) };
        if start.is_null() {
            return &[];
        }
        // SAFETY: `start` and `length` delimit the string's bytes, which nobody changes while it is lent to us.
        unsafe { slice::from_raw_parts(start.cast(), length) }
    }
}

/// A string made by us, freed when dropped. For names that did not come as an argument.
pub(crate) struct ServerString {
    raw: NonNull<raw::RedisModuleString>,
}

impl ServerString {
    /// Copies `bytes` into a new server string.
    pub(crate) fn new(bytes: &[u8]) -> Self {
        let create_string = server_fn!(RedisModule_CreateString);
        // SAFETY: the server copies `len` bytes from the pointer; no context means that nobody but us frees the string.
        let string = unsafe { create_string(ptr::null_mut(), bytes.as_ptr().cast(), bytes.len()) };
        // SAFETY: the server aborts when it is out of memory; it never answers null.
        let raw = unsafe { NonNull::new_unchecked(string) };
        Self { raw }
    }

    /// # Safety
    /// `string` is null, or a string whose one reference is given to us.
    pub(super) unsafe fn from_raw(string: *mut raw::RedisModuleString) -> Option<Self> {
        NonNull::new(string).map(|raw| Self { raw })
    }

    pub(crate) fn as_str(&self) -> ServerStr<'_> {
        ServerStr { raw: self.raw, owner: PhantomData }
    }
}

impl Drop for ServerString {
    fn drop(&mut self) {
        let free_string = server_fn!(RedisModule_FreeString);
        // SAFETY: we hold one reference and give it back here, once.
        unsafe { free_string(ptr::null_mut(), self.raw.as_ptr()) }
    }
}

/// Text for C on the stack: cut to fit, NUL-terminated; NUL, CR and LF become spaces, so that text from users can break
/// neither a log line nor a reply.
pub(super) struct CText<const N: usize> {
    bytes: [u8; N],
}

impl<const N: usize> CText<N> {
    pub(super) fn new(text: &[u8]) -> Self {
        let mut bytes = [0; N];
        for (to, from) in bytes.iter_mut().take(N.saturating_sub(1)).zip(text) {
            *to = if matches!(from, 0 | b'\r' | b'\n') { b' ' } else { *from };
        }
        Self { bytes }
    }

    pub(super) fn as_ptr(&self) -> *const c_char {
        self.bytes.as_ptr().cast()
    }
}

/// The strings of a command call, as the server passes them.
///
/// # Safety
/// `argv` points to `argc` strings that live, unchanged, for `'a`; or `argc` is not positive.
pub(super) unsafe fn argument_slice<'a>(
    argv: *mut *mut raw::RedisModuleString,
    argc: c_int,
) -> &'a [*mut raw::RedisModuleString] {
    match usize::try_from(argc) {
        // SAFETY: the caller's promise.
        Ok(count) if count > 0 && !argv.is_null() => unsafe { slice::from_raw_parts(argv, count) },
        _ => &[],
    }
}
