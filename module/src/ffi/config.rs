//! Settings: `flock.<name>` in CONFIG GET, CONFIG SET and the configuration file, read by the module as plain atomics.

use std::ffi::{CStr, c_char, c_int, c_longlong, c_void};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use valkey_module::raw;

use super::api::{ERR, OK, server_fn};
use super::barrier::{Callback, barrier};
use super::ctx::Ctx;
use super::string::ServerString;

/// An integer setting. The server checks the range.
pub(crate) struct IntConfig {
    /// Without the module's name: `lease-max-ms`.
    pub(crate) name: &'static CStr,
    pub(crate) default: i64,
    pub(crate) min: i64,
    pub(crate) max: i64,
    pub(crate) immutable: bool,
    pub(crate) value: AtomicI64,
    /// Why a value in range is refused all the same, if it is.
    pub(crate) refusal: Option<fn(i64) -> Option<&'static str>>,
}

/// A yes-or-no setting.
pub(crate) struct BoolConfig {
    pub(crate) name: &'static CStr,
    pub(crate) default: bool,
    pub(crate) immutable: bool,
    pub(crate) value: AtomicBool,
    pub(crate) refusal: Option<fn(bool) -> Option<&'static str>>,
}

impl IntConfig {
    pub(crate) const fn new(name: &'static CStr, default: i64, min: i64, max: i64) -> Self {
        Self { name, default, min, max, immutable: false, value: AtomicI64::new(default), refusal: None }
    }

    pub(crate) fn get(&self) -> i64 {
        self.value.load(Ordering::Relaxed)
    }

    /// Registers the setting, with `default` instead of its own default (from the module's arguments).
    pub(crate) fn register(&'static self, ctx: &Ctx<'_>, default: i64) -> Result<(), String> {
        if default < self.min || default > self.max {
            return Err(format!("{:?} must be in {}..={}, not {default}", self.name, self.min, self.max));
        }
        let register = server_fn!(RedisModule_RegisterNumericConfig);
        // SAFETY: the context is live; the server copies the name; the data is this static, read as such in the
        // callbacks.
        let status = unsafe {
            register(
                ctx.as_ptr(),
                self.name.as_ptr(),
                default,
                flags(self.immutable),
                self.min,
                self.max,
                Some(get_int),
                Some(set_int),
                None,
                std::ptr::from_ref(self).cast_mut().cast(),
            )
        };
        registered(status, self.name)
    }
}

impl BoolConfig {
    pub(crate) const fn new(name: &'static CStr, default: bool) -> Self {
        Self { name, default, immutable: false, value: AtomicBool::new(default), refusal: None }
    }

    pub(crate) fn get(&self) -> bool {
        self.value.load(Ordering::Relaxed)
    }

    /// Registers the setting, with `default` instead of its own default (from the module's arguments).
    pub(crate) fn register(&'static self, ctx: &Ctx<'_>, default: bool) -> Result<(), String> {
        let register = server_fn!(RedisModule_RegisterBoolConfig);
        // SAFETY: as for integers.
        let status = unsafe {
            register(
                ctx.as_ptr(),
                self.name.as_ptr(),
                c_int::from(default),
                flags(self.immutable),
                Some(get_bool),
                Some(set_bool),
                None,
                std::ptr::from_ref(self).cast_mut().cast(),
            )
        };
        registered(status, self.name)
    }
}

/// Gives every registered setting its value from the configuration file, or its default. Once, after the last
/// registration.
pub(crate) fn load_values(ctx: &Ctx<'_>) -> Result<(), String> {
    let load_configs = server_fn!(RedisModule_LoadConfigs);
    // SAFETY: the context of the load callback is live.
    let status = unsafe { load_configs(ctx.as_ptr()) };
    if status == OK {
        Ok(())
    } else {
        Err("a setting in the configuration file was refused; the line before says which".into())
    }
}

fn flags(immutable: bool) -> u32 {
    if immutable { raw::REDISMODULE_CONFIG_IMMUTABLE } else { raw::REDISMODULE_CONFIG_DEFAULT }
}

fn registered(status: c_int, name: &CStr) -> Result<(), String> {
    if status == OK { Ok(()) } else { Err(format!("the server refuses the setting {name:?}")) }
}

/// Hands the reason of a refusal to the server.
fn refuse(reason: &str, error: *mut *mut raw::RedisModuleString) -> c_int {
    if !error.is_null() {
        // SAFETY: the server's place for the reason; it frees the string.
        unsafe { *error = ServerString::new(reason.as_bytes()).into_raw() };
    }
    ERR
}

extern "C" fn get_int(_name: *const c_char, data: *mut c_void) -> c_longlong {
    barrier(Callback::Config, 0, || {
        // SAFETY: the data of this callback is a static `IntConfig`.
        unsafe { data.cast::<IntConfig>().as_ref() }.map_or(0, IntConfig::get)
    })
}

extern "C" fn set_int(
    _name: *const c_char,
    value: c_longlong,
    data: *mut c_void,
    error: *mut *mut raw::RedisModuleString,
) -> c_int {
    barrier(Callback::Config, ERR, || {
        // SAFETY: the data of this callback is a static `IntConfig`.
        let Some(config) = (unsafe { data.cast::<IntConfig>().as_ref() }) else {
            return ERR;
        };
        match config.refusal.and_then(|refusal| refusal(value)) {
            Some(reason) => refuse(reason, error),
            None => {
                config.value.store(value, Ordering::Relaxed);
                OK
            }
        }
    })
}

extern "C" fn get_bool(_name: *const c_char, data: *mut c_void) -> c_int {
    let value = barrier(Callback::Config, false, || {
        // SAFETY: the data of this callback is a static `BoolConfig`.
        unsafe { data.cast::<BoolConfig>().as_ref() }.is_some_and(BoolConfig::get)
    });
    c_int::from(value)
}

extern "C" fn set_bool(
    _name: *const c_char,
    value: c_int,
    data: *mut c_void,
    error: *mut *mut raw::RedisModuleString,
) -> c_int {
    barrier(Callback::Config, ERR, || {
        // SAFETY: the data of this callback is a static `BoolConfig`.
        let Some(config) = (unsafe { data.cast::<BoolConfig>().as_ref() }) else {
            return ERR;
        };
        match config.refusal.and_then(|refusal| refusal(value != 0)) {
            Some(reason) => refuse(reason, error),
            None => {
                config.value.store(value != 0, Ordering::Relaxed);
                OK
            }
        }
    })
}
