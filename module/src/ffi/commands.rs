//! Commands: registering them, and the one way in for each.

use std::ffi::{CStr, c_int};
use std::ptr::NonNull;

use flock_core::wire::spec::CommandSpec;
use valkey_module::raw;

use super::api::{OK, server_fn};
use super::args::Args;
use super::barrier::{Callback, barrier};
use super::command_spec::{c_string, with_command_info};
use super::ctx::Ctx;
use super::reply;

type Entry = extern "C" fn(*mut raw::RedisModuleCtx, *mut *mut raw::RedisModuleString, c_int) -> c_int;

/// One entry per command, each with its index built in: the server calls it, it calls `dispatch`, nothing is looked up.
static ENTRIES: [Entry; 8] =
    [entry::<0>, entry::<1>, entry::<2>, entry::<3>, entry::<4>, entry::<5>, entry::<6>, entry::<7>];

extern "C" fn entry<const INDEX: usize>(
    ctx: *mut raw::RedisModuleCtx,
    argv: *mut *mut raw::RedisModuleString,
    argc: c_int,
) -> c_int {
    // SAFETY: the server keeps the context, which has the calling client, until we return.
    if let Some(ctx) = unsafe { Ctx::from_raw(ctx) } {
        // SAFETY: the server keeps the arguments until we return.
        let args = unsafe { Args::from_raw(argv, argc) };
        reply::owing_one(&ctx, || barrier(Callback::Command, (), || crate::commands::dispatch(INDEX, &ctx, args)));
    }
    OK
}

/// Adds a category that ACL rules can name: `+@flock`. Before the commands that are in it.
pub(crate) fn add_acl_category(ctx: &Ctx<'_>, name: &'static CStr) -> Result<(), String> {
    let add_acl_category = server_fn!(RedisModule_AddACLCategory);
    // SAFETY: the context is live; the server copies the name.
    let status = unsafe { add_acl_category(ctx.as_ptr(), name.as_ptr()) };
    if status == OK { Ok(()) } else { Err(format!("the server refuses the ACL category {name:?}")) }
}

/// Registers the commands: call number i of `crate::commands::dispatch` is for `specs[i]`. Once, while loading the
/// module.
pub(crate) fn register(ctx: &Ctx<'_>, specs: &[&CommandSpec]) -> Result<(), String> {
    if specs.len() > ENTRIES.len() {
        return Err(format!("{} commands, but only {} entries for them", specs.len(), ENTRIES.len()));
    }
    for (spec, entry) in specs.iter().zip(ENTRIES) {
        register_one(ctx, spec, entry).map_err(|step| format!("the server refuses {step} of command {}", spec.name))?;
    }
    Ok(())
}

/// An error names the step that was refused.
fn register_one(ctx: &Ctx<'_>, spec: &CommandSpec, entry: Entry) -> Result<(), &'static str> {
    let name = c_string(spec.name)?;
    let flags = c_string(spec.flags)?;
    let key = spec.key.map_or(0, |key| key.position);
    let step = c_int::from(spec.key.is_some());
    let create_command = server_fn!(RedisModule_CreateCommand);
    // SAFETY: the context is live; the server copies both texts; the entry lives in this library.
    let status = unsafe { create_command(ctx.as_ptr(), name.as_ptr(), Some(entry), flags.as_ptr(), key, key, step) };
    if status != OK {
        return Err("the name or the flags");
    }
    let get_command = server_fn!(RedisModule_GetCommand);
    // SAFETY: the context is live, the name NUL-terminated.
    let command = NonNull::new(unsafe { get_command(ctx.as_ptr(), name.as_ptr()) }).ok_or("the name")?;

    let categories = c_string(spec.acl_categories)?;
    let set_categories = server_fn!(RedisModule_SetCommandACLCategories);
    // SAFETY: a command of ours; the server reads the text and keeps bits.
    if unsafe { set_categories(command.as_ptr(), categories.as_ptr()) } != OK {
        return Err("the ACL categories");
    }
    with_command_info(spec, |info| {
        let set_command_info = server_fn!(RedisModule_SetCommandInfo);
        // SAFETY: a command of ours; the server copies everything the structure points to, which lives until this
        // closure returns.
        let status = unsafe { set_command_info(command.as_ptr(), info) };
        if status == OK { Ok(()) } else { Err("the description") }
    })?
}
