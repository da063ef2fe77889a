//! The module's own sections of INFO, and what the module reads of the server's.

use std::ffi::{CStr, c_int};
use std::marker::PhantomData;
use std::ptr::{self, NonNull};

use valkey_module::raw;

use super::api::{OK, server_fn};
use super::barrier::{Callback, barrier};
use super::ctx::Ctx;
use super::string::CText;

/// Writes fields into an INFO that somebody asked for. The server puts `flock_` before section and field names.
pub(crate) struct InfoWriter<'a> {
    raw: NonNull<raw::RedisModuleInfoCtx>,
    for_crash_report: bool,
    callback: PhantomData<&'a raw::RedisModuleInfoCtx>,
}

/// Makes INFO ask `crate::info::report`. Once, while loading the module.
pub(crate) fn register(ctx: &Ctx<'_>) -> Result<(), String> {
    let register_info_func = server_fn!(RedisModule_RegisterInfoFunc);
    // SAFETY: the context is live; the callback lives in this library.
    let status = unsafe { register_info_func(ctx.as_ptr(), Some(on_info)) };
    if status == OK { Ok(()) } else { Err("the server refuses the INFO section".into()) }
}

impl InfoWriter<'_> {
    /// Is the server crashing, and this its last report? Then no lock may be taken and nothing big be done.
    pub(crate) fn for_crash_report(&self) -> bool {
        self.for_crash_report
    }

    /// Starts a section. `false` if nobody asked for it: its fields may be skipped (the server ignores them).
    pub(crate) fn section(&mut self, name: &'static CStr) -> bool {
        let add_section = server_fn!(RedisModule_InfoAddSection);
        // SAFETY: the callback is running; the server copies the name.
        unsafe { add_section(self.raw.as_ptr(), name.as_ptr()) == OK }
    }

    pub(crate) fn field_u64(&mut self, name: &'static CStr, value: u64) {
        let add_field = server_fn!(RedisModule_InfoAddFieldULongLong);
        // SAFETY: as above.
        unsafe { add_field(self.raw.as_ptr(), name.as_ptr(), value) };
    }

    /// Line ends and NUL become spaces; cut at 255 bytes.
    pub(crate) fn field_str(&mut self, name: &'static CStr, value: &str) {
        let text = CText::<256>::new(value.as_bytes());
        let add_field = server_fn!(RedisModule_InfoAddFieldCString);
        // SAFETY: as above; the server copies the value.
        unsafe { add_field(self.raw.as_ptr(), name.as_ptr(), text.as_ptr()) };
    }

    /// One field made of `name=value` pairs: those that `body` adds.
    pub(crate) fn dict(&mut self, name: &'static CStr, body: impl FnOnce(&mut Self)) {
        let begin = server_fn!(RedisModule_InfoBeginDictField);
        // SAFETY: as above.
        unsafe { begin(self.raw.as_ptr(), name.as_ptr()) };
        body(self);
        let end = server_fn!(RedisModule_InfoEndDictField);
        // SAFETY: as above. Without an open dict (the section was not asked for) the server answers an error, and
        // nothing else.
        unsafe { end(self.raw.as_ptr()) };
    }
}

extern "C" fn on_info(info: *mut raw::RedisModuleInfoCtx, for_crash_report: c_int) {
    barrier(Callback::Info, (), || {
        if let Some(raw) = NonNull::new(info) {
            let for_crash_report = for_crash_report != 0;
            crate::info::report(&mut InfoWriter { raw, for_crash_report, callback: PhantomData });
        }
    });
}

/// One field of the server's own INFO, such as `maxmemory_policy` of `memory`. Builds the whole section: not for hot
/// paths.
pub(crate) fn server_field(_ctx: &Ctx<'_>, section: &'static CStr, field: &'static CStr) -> Option<String> {
    let get_server_info = server_fn!(RedisModule_GetServerInfo);
    // SAFETY: no context means that the data is ours to free; a `Ctx` shows that this is the main thread.
    let data = unsafe { get_server_info(ptr::null_mut(), section.as_ptr()) };
    if data.is_null() {
        return None;
    }
    let get_field = server_fn!(RedisModule_ServerInfoGetFieldC);
    // SAFETY: live data, NUL-terminated name; the server answers null for a field that is not there.
    let value = unsafe { get_field(data, field.as_ptr()) };
    // SAFETY: a NUL-terminated value that lives as long as the data.
    let text = (!value.is_null()).then(|| unsafe { CStr::from_ptr(value) }.to_string_lossy().into_owned());
    let free_server_info = server_fn!(RedisModule_FreeServerInfo);
    // SAFETY: made above without a context, freed once; the value was copied.
    unsafe { free_server_info(ptr::null_mut(), data) };
    text
}
