//! Replies to the calling client, on either protocol: maps and nulls become arrays and null bulks on RESP2.
//!
//! The layer counts what is owed: a command owes one value, an array of n adds n to what is owed. When a command or a
//! reply callback ends in debt (it panicked, or forgot), the rest is paid with errors; what is not owed is not sent. So
//! the client always gets exactly one well-formed reply.

use std::ffi::{CStr, c_long};
use std::sync::atomic::{AtomicI64, Ordering};

use super::api::server_fn;
use super::ctx::Ctx;
use super::string::CText;

/// Values still owed to the client of the running callback. Touched on the main thread only.
static OWED: AtomicI64 = AtomicI64::new(0);

/// Notes one value paid, and `more` values owed. `false`: nothing was owed, so there must be no reply (it would be read
/// as the reply of the client's next command).
fn pay(more: i64) -> bool {
    let owed = OWED.load(Ordering::Relaxed);
    debug_assert!(owed > 0, "a reply that nobody waits for");
    if owed > 0 {
        OWED.store(owed - 1 + more, Ordering::Relaxed);
    }
    owed > 0
}

/// Runs a callback that owes its client one reply.
pub(super) fn owing_one(ctx: &Ctx<'_>, body: impl FnOnce()) {
    let outer = OWED.load(Ordering::Relaxed);
    OWED.store(1, Ordering::Relaxed);
    body();
    while OWED.load(Ordering::Relaxed) > 0 {
        error(ctx, b"ERR internal error: the command failed in the module");
    }
    OWED.store(outer, Ordering::Relaxed);
}

/// Does the running command owe its whole reply still? False outside commands, once a reply was begun, and once the
/// client was blocked.
pub(super) fn is_owed_whole() -> bool {
    OWED.load(Ordering::Relaxed) == 1
}

/// The client was blocked: its reply is owed later, by another callback.
pub(super) fn owe_later() {
    OWED.store(0, Ordering::Relaxed);
}

/// An integer.
pub(crate) fn integer(ctx: &Ctx<'_>, number: i64) {
    if !pay(0) {
        return;
    }
    let reply = server_fn!(RedisModule_ReplyWithLongLong);
    // SAFETY: the context is live.
    unsafe { reply(ctx.as_ptr(), number) };
}

/// Nil.
pub(crate) fn nil(ctx: &Ctx<'_>) {
    if !pay(0) {
        return;
    }
    let reply = server_fn!(RedisModule_ReplyWithNull);
    // SAFETY: the context is live.
    unsafe { reply(ctx.as_ptr()) };
}

/// A simple string, as `c"OK"`.
pub(crate) fn simple(ctx: &Ctx<'_>, text: &'static CStr) {
    if !pay(0) {
        return;
    }
    let reply = server_fn!(RedisModule_ReplyWithSimpleString);
    // SAFETY: the context is live, the text NUL-terminated.
    unsafe { reply(ctx.as_ptr(), text.as_ptr()) };
}

/// A bulk string of any bytes.
pub(crate) fn bulk(ctx: &Ctx<'_>, bytes: &[u8]) {
    if !pay(0) {
        return;
    }
    let reply = server_fn!(RedisModule_ReplyWithStringBuffer);
    // SAFETY: the context is live; the server copies `len` bytes.
    unsafe { reply(ctx.as_ptr(), bytes.as_ptr().cast(), bytes.len()) };
}

/// An error. The first word is its code. Line ends and NUL become spaces; cut at 1 KiB.
#[cold]
pub(crate) fn error(ctx: &Ctx<'_>, text: &[u8]) {
    if !pay(0) {
        return;
    }
    let text = CText::<1024>::new(text);
    let reply = server_fn!(RedisModule_ReplyWithError);
    // SAFETY: the context is live, the text NUL-terminated; the server copies it and does not read it as a format.
    unsafe { reply(ctx.as_ptr(), text.as_ptr()) };
}

/// The head of an array; `len` values must follow.
pub(crate) fn array(ctx: &Ctx<'_>, len: usize) {
    let len = to_c_long(len);
    if !pay(len) {
        return;
    }
    let reply = server_fn!(RedisModule_ReplyWithArray);
    // SAFETY: the context is live.
    unsafe { reply(ctx.as_ptr(), len) };
}

/// The head of a map of `len` pairs; twice as many values must follow. On RESP2 a flat array.
pub(crate) fn map(ctx: &Ctx<'_>, len: usize) {
    let len = to_c_long(len);
    if !pay(2 * len) {
        return;
    }
    let reply = server_fn!(RedisModule_ReplyWithMap);
    // SAFETY: the context is live.
    unsafe { reply(ctx.as_ptr(), len) };
}

fn to_c_long(len: usize) -> c_long {
    c_long::try_from(len).unwrap_or(c_long::MAX / 4)
}
