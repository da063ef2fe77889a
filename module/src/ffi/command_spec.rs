//! The core's table of commands, translated for the server: what COMMAND DOCS, COMMAND INFO and `valkey-cli` show.

use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr;

use flock_core::wire::spec::{ArgKind, ArgSpec, CommandSpec, KeyFlag, KeySpec};
use valkey_module::raw;

/// Text for C; an error if it contains NUL.
pub(super) fn c_string(text: &str) -> Result<CString, &'static str> {
    CString::new(text).map_err(|_| "a text with a NUL byte")
}

/// Runs `body` with the server's form of `spec`, which lives until `body` returns.
pub(super) fn with_command_info<R>(
    spec: &CommandSpec,
    body: impl FnOnce(&raw::RedisModuleCommandInfo) -> R,
) -> Result<R, &'static str> {
    let mut texts = Texts::default();
    let mut lists = Vec::new();
    let mut key_specs = Vec::with_capacity(2);
    if let Some(key) = &spec.key {
        key_specs.push(to_server_key_spec(key, texts.add(key.notes.unwrap_or_default())?));
    }
    key_specs.push(END_OF_KEY_SPECS);
    let args = to_server_args(spec.args, &mut texts, &mut lists)?;
    let version = raw::RedisModuleCommandInfoVersion {
        version: 1,
        sizeof_historyentry: size_of::<raw::RedisModuleCommandHistoryEntry>(),
        sizeof_keyspec: size_of::<raw::RedisModuleCommandKeySpec>(),
        sizeof_arg: size_of::<raw::RedisModuleCommandArg>(),
    };
    let info = raw::RedisModuleCommandInfo {
        version: &raw const version,
        summary: texts.add(spec.summary)?,
        complexity: texts.add(spec.complexity)?,
        since: texts.add(spec.since)?,
        history: ptr::null_mut(),
        tips: texts.add(spec.tips)?,
        arity: spec.arity,
        key_specs: key_specs.as_mut_ptr(),
        args,
    };
    Ok(body(&info))
}

/// The texts of one description. Each keeps its address while others are added.
#[derive(Default)]
struct Texts(Vec<CString>);

impl Texts {
    /// Null for an empty text.
    fn add(&mut self, text: &str) -> Result<*const c_char, &'static str> {
        if text.is_empty() {
            return Ok(ptr::null());
        }
        self.0.push(c_string(text)?);
        Ok(self.0.last().map_or(ptr::null(), |text: &CString| CStr::as_ptr(text)))
    }
}

/// Translates a list of arguments and, before it, their parts. The lists end with an argument without a name, and stay
/// where they are: each in its own allocation, kept by `lists`.
fn to_server_args(
    args: &[ArgSpec],
    texts: &mut Texts,
    lists: &mut Vec<Box<[raw::RedisModuleCommandArg]>>,
) -> Result<*mut raw::RedisModuleCommandArg, &'static str> {
    if args.is_empty() {
        return Ok(ptr::null_mut());
    }
    let mut list = Vec::with_capacity(args.len() + 1);
    for arg in args {
        let subargs = to_server_args(arg.args, texts, lists)?;
        list.push(to_server_arg(arg, texts, subargs)?);
    }
    list.push(END_OF_ARGS);
    lists.push(list.into_boxed_slice());
    Ok(lists.last_mut().map_or(ptr::null_mut(), |list| list.as_mut_ptr()))
}

fn to_server_arg(
    arg: &ArgSpec,
    texts: &mut Texts,
    subargs: *mut raw::RedisModuleCommandArg,
) -> Result<raw::RedisModuleCommandArg, &'static str> {
    Ok(raw::RedisModuleCommandArg {
        name: texts.add(arg.name)?,
        type_: kind_number(arg.kind),
        key_spec_index: if arg.kind == ArgKind::Key { 0 } else { -1 },
        token: texts.add(arg.token.unwrap_or_default())?,
        summary: texts.add(arg.summary.unwrap_or_default())?,
        since: ptr::null(),
        flags: if arg.optional { raw::REDISMODULE_CMD_ARG_OPTIONAL.cast_signed() } else { 0 },
        deprecated_since: ptr::null(),
        subargs,
        display_text: ptr::null(),
    })
}

/// The server's number for a kind of argument.
fn kind_number(kind: ArgKind) -> raw::RedisModuleCommandArgType {
    match kind {
        ArgKind::String => raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_STRING,
        ArgKind::Integer => raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_INTEGER,
        ArgKind::Key => raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_KEY,
        ArgKind::Pattern => raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_PATTERN,
        ArgKind::PureToken => raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_PURE_TOKEN,
        ArgKind::OneOf => raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_ONEOF,
        ArgKind::Block => raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_BLOCK,
    }
}

/// The server's bit for what happens to a key.
fn key_flag_bit(flag: KeyFlag) -> u32 {
    match flag {
        KeyFlag::ReadOnly => raw::REDISMODULE_CMD_KEY_RO,
        KeyFlag::ReadWrite => raw::REDISMODULE_CMD_KEY_RW,
        KeyFlag::Access => raw::REDISMODULE_CMD_KEY_ACCESS,
        KeyFlag::Update => raw::REDISMODULE_CMD_KEY_UPDATE,
        KeyFlag::Insert => raw::REDISMODULE_CMD_KEY_INSERT,
        KeyFlag::Delete => raw::REDISMODULE_CMD_KEY_DELETE,
    }
}

fn to_server_key_spec(spec: &KeySpec, notes: *const c_char) -> raw::RedisModuleCommandKeySpec {
    raw::RedisModuleCommandKeySpec {
        notes,
        flags: spec.flags.iter().fold(0, |bits, flag| bits | u64::from(key_flag_bit(*flag))),
        begin_search_type: raw::RedisModuleKeySpecBeginSearchType_REDISMODULE_KSPEC_BS_INDEX,
        bs: raw::RedisModuleCommandKeySpec__bindgen_ty_1 {
            index: raw::RedisModuleCommandKeySpec__bindgen_ty_1__bindgen_ty_1 { pos: spec.position },
        },
        find_keys_type: raw::RedisModuleKeySpecFindKeysType_REDISMODULE_KSPEC_FK_RANGE,
        fk: range(0, 1),
    }
}

const fn range(last: c_int, step: c_int) -> raw::RedisModuleCommandKeySpec__bindgen_ty_2 {
    raw::RedisModuleCommandKeySpec__bindgen_ty_2 {
        range: raw::RedisModuleCommandKeySpec__bindgen_ty_2__bindgen_ty_1 { lastkey: last, keystep: step, limit: 0 },
    }
}

/// The end of a list of key specs: one whose search type is 0.
const END_OF_KEY_SPECS: raw::RedisModuleCommandKeySpec = raw::RedisModuleCommandKeySpec {
    notes: ptr::null(),
    flags: 0,
    begin_search_type: raw::RedisModuleKeySpecBeginSearchType_REDISMODULE_KSPEC_BS_INVALID,
    bs: raw::RedisModuleCommandKeySpec__bindgen_ty_1 {
        index: raw::RedisModuleCommandKeySpec__bindgen_ty_1__bindgen_ty_1 { pos: 0 },
    },
    find_keys_type: raw::RedisModuleKeySpecFindKeysType_REDISMODULE_KSPEC_FK_OMITTED,
    fk: range(0, 0),
};

/// The end of a list of arguments: one without a name.
const END_OF_ARGS: raw::RedisModuleCommandArg = raw::RedisModuleCommandArg {
    name: ptr::null(),
    type_: raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_STRING,
    key_spec_index: -1,
    token: ptr::null(),
    summary: ptr::null(),
    since: ptr::null(),
    flags: 0,
    deprecated_since: ptr::null(),
    subargs: ptr::null_mut(),
    display_text: ptr::null(),
};
