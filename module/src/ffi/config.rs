//! Settings: `flock.<name>` in CONFIG GET, CONFIG SET and the configuration file, read by the module as plain atomics.

use std::ffi::{CStr, c_char, c_int, c_longlong, c_void};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use valkey_module::raw;

use super::api::{ERR, OK, server_fn};
use super::barrier::{Callback, barrier};
use super::ctx::Ctx;

/// An integer setting. The server checks the range.
pub(crate) struct IntConfig {
    /// Without the module's name: `lease-max-ms`.
    pub(crate) name: &'static CStr,
    pub(crate) default: i64,
    pub(crate) min: i64,
    pub(crate) max: i64,
    value: AtomicI64,
}

/// A yes-or-no setting.
pub(crate) struct BoolConfig {
    pub(crate) name: &'static CStr,
    pub(crate) default: bool,
    value: AtomicBool,
}

impl IntConfig {
    pub(crate) const fn new(name: &'static CStr, default: i64, min: i64, max: i64) -> Self {
        Self { name, default, min, max, value: AtomicI64::new(default) }
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
                raw::REDISMODULE_CONFIG_DEFAULT,
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
        Self { name, default, value: AtomicBool::new(default) }
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
                raw::REDISMODULE_CONFIG_DEFAULT,
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

fn registered(status: c_int, name: &CStr) -> Result<(), String> {
    if status == OK { Ok(()) } else { Err(format!("the server refuses the setting {name:?}")) }
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
    _error: *mut *mut raw::RedisModuleString,
) -> c_int {
    barrier(Callback::Config, ERR, || {
        // SAFETY: the data of this callback is a static `IntConfig`.
        let Some(config) = (unsafe { data.cast::<IntConfig>().as_ref() }) else {
            return ERR;
        };
        config.value.store(value, Ordering::Relaxed);
        OK
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
    _error: *mut *mut raw::RedisModuleString,
) -> c_int {
    barrier(Callback::Config, ERR, || {
        // SAFETY: the data of this callback is a static `BoolConfig`.
        let Some(config) = (unsafe { data.cast::<BoolConfig>().as_ref() }) else {
            return ERR;
        };
        config.value.store(value != 0, Ordering::Relaxed);
        OK
    })
}
