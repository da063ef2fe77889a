//! The arguments of a command, where the server keeps them: nothing is copied.

use std::ffi::c_int;
use std::marker::PhantomData;

use valkey_module::raw;

use super::string::{ServerStr, argument_slice};

/// The arguments of the running command; index 0 is the command's name.
#[derive(Clone, Copy)]
pub(crate) struct Args<'a> {
    argv: &'a [*mut raw::RedisModuleString],
    owner: PhantomData<&'a raw::RedisModuleString>,
}

impl<'a> Args<'a> {
    /// # Safety
    /// `argv` points to `argc` strings that live, unchanged, for `'a`.
    pub(super) unsafe fn from_raw(argv: *mut *mut raw::RedisModuleString, argc: c_int) -> Self {
        // SAFETY: the caller's promise.
        let argv = unsafe { argument_slice(argv, argc) };
        Self { argv, owner: PhantomData }
    }

    /// The server's own string: for a key that is opened, signalled or replicated.
    pub(crate) fn string(self, index: usize) -> Option<ServerStr<'a>> {
        let string = *self.argv.get(index)?;
        // SAFETY: an element of `argv`: the server keeps it until the command returns.
        unsafe { ServerStr::from_raw(string) }
    }

    /// The bytes of one argument.
    pub(crate) fn bytes(self, index: usize) -> Option<&'a [u8]> {
        self.string(index).map(ServerStr::bytes)
    }

    /// All arguments from `start` on.
    pub(crate) fn iter_from(self, start: usize) -> impl Iterator<Item = &'a [u8]> {
        let strings = self.argv.get(start..).unwrap_or_default();
        // SAFETY: elements of `argv`: the server keeps them until the command returns.
        strings.iter().filter_map(|string| unsafe { ServerStr::from_raw(*string) }).map(ServerStr::bytes)
    }
}
