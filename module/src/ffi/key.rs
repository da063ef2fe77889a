//! One key of the keyspace, open for a moment: what is there, put a lock there, take it away.
//!
//! At most one key is open at a time. The server's key handle points at the value it found; if other code deleted that
//! key meanwhile, closing the handle would read freed memory. So a second `open` before the first is dropped is refused
//! (it is a bug of ours, and reads as another type's key), and so is a keyspace notification, which runs other modules'
//! code.

use std::ffi::c_int;
use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use valkey_module::raw;

use super::api::{OK, server_fn};
use super::ctx::{Ctx, LogLevel};
use super::data_type::{self, Handle};
use super::string::ServerStr;

/// What a key is opened for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// To look, leaving no trace: no access time, no hit or miss counted, no `keymiss` event. A primary deletes the key if it
    /// finds its time to live over, as for any reader.
    Read,
    /// To look and to change.
    Write,
}

/// What a key holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyState {
    Empty,
    Lock(Handle),
    OtherType,
}

/// Is a key open? Touched on the main thread only, where every `Ctx` lives.
static OPEN: AtomicBool = AtomicBool::new(false);

/// Is a key open at this moment?
pub(super) fn any_open() -> bool {
    OPEN.load(Ordering::Relaxed)
}

/// While this lives, opening a key is refused: the server is in the middle of changing one.
pub(super) struct NoKeyMayOpen {
    was_open: bool,
}

impl NoKeyMayOpen {
    pub(super) fn begin() -> Self {
        Self { was_open: OPEN.swap(true, Ordering::Relaxed) }
    }
}

impl Drop for NoKeyMayOpen {
    fn drop(&mut self) {
        OPEN.store(self.was_open, Ordering::Relaxed);
    }
}

/// An open key; closed when dropped. Closing signals nothing: see [`Ctx::signal_modified`].
pub(crate) struct Key<'a> {
    /// Null if the key was absent and opened to read, or refused.
    raw: *mut raw::RedisModuleKey,
    state: KeyState,
    refused: bool,
    ctx: PhantomData<&'a Ctx<'a>>,
}

impl<'a> Key<'a> {
    /// Opens the key `name` of the context's database.
    pub(crate) fn open(ctx: &'a Ctx<'_>, name: ServerStr<'_>, mode: Mode) -> Self {
        if any_open() {
            debug_assert!(false, "a key was opened while another was open or being changed");
            ctx.log(LogLevel::Warning, "a key was opened while another was open or being changed: refused");
            return Self { raw: ptr::null_mut(), state: KeyState::OtherType, refused: true, ctx: PhantomData };
        }
        let mode = match mode {
            Mode::Read => {
                raw::REDISMODULE_READ
                    | raw::REDISMODULE_OPEN_KEY_NOTOUCH
                    | raw::REDISMODULE_OPEN_KEY_NONOTIFY
                    | raw::REDISMODULE_OPEN_KEY_NOSTATS
            }
            Mode::Write => raw::REDISMODULE_READ | raw::REDISMODULE_WRITE,
        };
        let open_key = server_fn!(RedisModule_OpenKey);
        // SAFETY: context and name are live; the server keeps a reference of its own to the name while the key is open.
        let raw = unsafe { open_key(ctx.as_ptr(), name.as_ptr(), mode.cast_signed()) }.cast();
        OPEN.store(true, Ordering::Relaxed);
        // SAFETY: null, or the key opened above.
        let state = unsafe { state_of(raw) };
        Self { raw, state, refused: false, ctx: PhantomData }
    }

    /// What the key holds.
    pub(crate) fn state(&self) -> KeyState {
        self.state
    }

    /// Puts a lock in the key, instead of whatever it holds (the old value is unlinked and freed). `false`, with
    /// nothing changed, if the key was opened to read.
    pub(crate) fn set(&mut self, handle: Handle) -> bool {
        let set_value = server_fn!(RedisModule_ModuleTypeSetValue);
        // SAFETY: the key is open (null is caught below); the type was registered at load; the value is a number, not a
        // pointer.
        let done =
            !self.raw.is_null() && unsafe { set_value(self.raw, data_type::server_type(), handle.to_value()) } == OK;
        if done {
            self.state = KeyState::Lock(handle);
        }
        done
    }

    /// Removes the key. `false`, with nothing changed, if the key was opened to read.
    pub(crate) fn delete(&mut self) -> bool {
        let delete_key = server_fn!(RedisModule_DeleteKey);
        // SAFETY: the key is open (null is caught before the call).
        let done = !self.raw.is_null() && unsafe { delete_key(self.raw) } == OK;
        if done {
            self.state = KeyState::Empty;
        }
        done
    }
}

impl Drop for Key<'_> {
    fn drop(&mut self) {
        if self.refused {
            return;
        }
        if !self.raw.is_null() {
            let close_key = server_fn!(RedisModule_CloseKey);
            // SAFETY: opened by us, closed here and only here; its context is still live ('a).
            unsafe { close_key(self.raw) }
        }
        OPEN.store(false, Ordering::Relaxed);
    }
}

/// # Safety
/// `key` is null or an open key.
unsafe fn state_of(key: *mut raw::RedisModuleKey) -> KeyState {
    if key.is_null() {
        return KeyState::Empty;
    }
    let get_type = server_fn!(RedisModule_ModuleTypeGetType);
    // SAFETY: the caller's promise.
    let value_type = unsafe { get_type(key) };
    if value_type.is_null() {
        let key_type = server_fn!(RedisModule_KeyType);
        // SAFETY: the caller's promise.
        let is_empty = unsafe { key_type(key) } == EMPTY;
        return if is_empty { KeyState::Empty } else { KeyState::OtherType };
    }
    if value_type != data_type::server_type() {
        return KeyState::OtherType;
    }
    let get_value = server_fn!(RedisModule_ModuleTypeGetValue);
    // SAFETY: the caller's promise; the value is of our type.
    let value = unsafe { get_value(key) };
    Handle::from_value(value).map_or(KeyState::OtherType, KeyState::Lock)
}

/// `REDISMODULE_KEYTYPE_EMPTY`, in the type the function answers.
const EMPTY: c_int = 0;
