//! Commands written by the module: to replicas and the append-only file ([`Ctx::replicate`]), and to a file that is
//! being rewritten or a slot that is being moved ([`AofWriter::emit`]).
//!
//! Both server functions are variadic and take a format: `s` is a server string (no copy), `b` a pointer and a length.
//! The format and the arguments stay on the stack; what a format does not name, C does not read, so one call of fixed
//! width serves every shorter command. Longer ones than [`WIDTH_MAX`] take a detour over server strings.

use std::ffi::{CStr, c_char};
use std::iter;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};

use valkey_module::raw;

use super::api::{OK, server_fn};
use super::ctx::Ctx;
use super::string::{ServerStr, ServerString};

/// The most arguments that travel on the stack, not counting the key.
const WIDTH_MAX: usize = 16;

/// The format for `count` arguments, after a key or without one: `sbbb`, NUL-terminated. `None` if there are too many.
fn format(has_key: bool, count: usize) -> Option<[u8; WIDTH_MAX + 2]> {
    let mut format = [0; WIDTH_MAX + 2];
    let letters = has_key.then_some(b's').into_iter().chain(iter::repeat_n(b'b', count));
    for (to, letter) in format.iter_mut().zip(letters) {
        *to = letter;
    }
    (count <= WIDTH_MAX).then_some(format)
}

/// The pointer and length of one argument; past the end, of nothing.
fn part(args: &[&[u8]], index: usize) -> (*const c_char, usize) {
    args.get(index).map_or((ptr::null(), 0), |bytes| (bytes.as_ptr().cast(), bytes.len()))
}

/// Calls the variadic `$function($target, $command, $format, ...)` with the key, if there is one, and as many parts as
/// there are indices.
macro_rules! call_with_parts {
    ($function:expr, $target:expr, $command:expr, $format:expr, $key:expr, $args:expr, [$($index:literal)*]) => {
        match $key {
            // SAFETY: the target, the command and the key are live; the format names the key and not more parts than
            // there are arguments.
            Some(key) => unsafe {
                let format = $format.as_ptr().cast();
                $function($target, $command, format, key.as_ptr() $(, part($args, $index).0, part($args, $index).1)*)
            },
            // SAFETY: as above, and the format names no key.
            None => unsafe {
                let format = $format.as_ptr().cast();
                $function($target, $command, format $(, part($args, $index).0, part($args, $index).1)*)
            },
        }
    };
}

/// Calls a variadic server function with a command of any length.
macro_rules! call_with_args {
    ($function:expr, $target:expr, $command:expr, $key:expr, $args:expr) => {{
        let (function, target, command, key, args) = ($function, $target, $command, $key, $args);
        match format(key.is_some(), args.len()) {
            Some(format) if args.len() <= 4 => {
                call_with_parts!(function, target, command, format, key, args, [0 1 2 3])
            }
            Some(format) if args.len() <= 8 => {
                call_with_parts!(function, target, command, format, key, args, [0 1 2 3 4 5 6 7])
            }
            Some(format) => {
                call_with_parts!(function, target, command, format, key, args, [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15])
            }
            None => {
                let strings: Vec<ServerString> = args.iter().map(|bytes| ServerString::new(bytes)).collect();
                let key = key.map(ServerStr::as_ptr);
                let all: Vec<*mut raw::RedisModuleString> =
                    key.into_iter().chain(strings.iter().map(|string| string.as_str().as_ptr())).collect();
                // SAFETY: the target and the command are live; `v` takes a vector of live strings and its length.
                unsafe { function(target, command, c"v".as_ptr(), all.as_ptr(), all.len()) }
            }
        }
    }};
}

impl Ctx<'_> {
    /// Sends one command to the replicas and the append-only file: after the running command, with whatever else it
    /// replicates, as one unit.
    ///
    /// The command must be one of the server's. Outside a client's write command the caller must have found this node a
    /// primary and [`Ctx::avoid_replica_traffic`] false: the server asserts on it.
    pub(crate) fn replicate(&self, command: &'static CStr, key: Option<ServerStr<'_>>, args: &[&[u8]]) -> bool {
        let replicate = server_fn!(RedisModule_Replicate);
        call_with_args!(replicate, self.as_ptr(), command.as_ptr(), key, args) == OK
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

    /// Writes one command. Errors of the file stay with the server, which fails the rewrite.
    pub(crate) fn emit(&mut self, command: &'static CStr, key: Option<ServerStr<'_>>, args: &[&[u8]]) {
        let emit_aof = server_fn!(RedisModule_EmitAOF);
        call_with_args!(emit_aof, self.io.as_ptr(), command.as_ptr(), key, args)
    }
}
