//! The description of a command as plain data, and its translation for the server: what COMMAND DOCS, COMMAND INFO and `valkey-cli` show.

use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr;

use valkey_module::raw;

/// All there is to say about one command. An empty text means "not said".
pub(crate) struct CommandSpec {
    pub(crate) name: &'static str,
    /// The server's flags, separated by spaces: `write deny-oom fast`.
    pub(crate) flags: &'static str,
    /// Without `@`, separated by spaces: `write fast flock`.
    pub(crate) acl_categories: &'static str,
    /// First key, last key, step; all 0 if there is none.
    pub(crate) keys: (c_int, c_int, c_int),
    /// The number of arguments, the name included; -n means at least n.
    pub(crate) arity: c_int,
    pub(crate) summary: &'static str,
    pub(crate) complexity: &'static str,
    pub(crate) since: &'static str,
    /// Command tips, separated by spaces.
    pub(crate) tips: &'static str,
    /// What changed, and in which version: (since, change).
    pub(crate) history: &'static [(&'static str, &'static str)],
    pub(crate) key_specs: &'static [KeySpec],
    pub(crate) args: &'static [ArgSpec],
}

/// Where a command finds keys, and what it does to them.
pub(crate) struct KeySpec {
    pub(crate) notes: &'static str,
    /// `raw` bits, see [`key_flags`].
    pub(crate) flags: u64,
    /// The argument that is the first key.
    pub(crate) first: c_int,
    /// The last one, counted from the first.
    pub(crate) last: c_int,
    pub(crate) step: c_int,
}

/// What a command does to a key: exactly one of the first four, then what happens to the contents.
pub(crate) mod key_flags {
    use valkey_module::raw;

    pub(crate) const READ_ONLY: u64 = raw::REDISMODULE_CMD_KEY_RO as u64;
    pub(crate) const READ_WRITE: u64 = raw::REDISMODULE_CMD_KEY_RW as u64;
    pub(crate) const OVERWRITE: u64 = raw::REDISMODULE_CMD_KEY_OW as u64;
    pub(crate) const REMOVE: u64 = raw::REDISMODULE_CMD_KEY_RM as u64;
    pub(crate) const ACCESS: u64 = raw::REDISMODULE_CMD_KEY_ACCESS as u64;
    pub(crate) const UPDATE: u64 = raw::REDISMODULE_CMD_KEY_UPDATE as u64;
    pub(crate) const INSERT: u64 = raw::REDISMODULE_CMD_KEY_INSERT as u64;
    pub(crate) const DELETE: u64 = raw::REDISMODULE_CMD_KEY_DELETE as u64;
}

/// One argument of a command; `OneOf` and `Block` have parts.
pub(crate) struct ArgSpec {
    pub(crate) name: &'static str,
    pub(crate) kind: ArgKind,
    /// The word that introduces the argument, or is it.
    pub(crate) token: &'static str,
    pub(crate) summary: &'static str,
    pub(crate) since: &'static str,
    pub(crate) optional: bool,
    pub(crate) repeats: bool,
    /// For a key: the index of its [`KeySpec`].
    pub(crate) key_spec: Option<c_int>,
    pub(crate) parts: &'static [ArgSpec],
}

/// What an argument is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ArgKind {
    String,
    Integer,
    Double,
    Key,
    Pattern,
    UnixTime,
    PureToken,
    OneOf,
    Block,
}

impl ArgSpec {
    /// A required argument; set the other fields with `..`.
    pub(crate) const fn new(name: &'static str, kind: ArgKind) -> Self {
        Self {
            name,
            kind,
            token: "",
            summary: "",
            since: "",
            optional: false,
            repeats: false,
            key_spec: None,
            parts: &[],
        }
    }
}

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
    let mut history = Vec::with_capacity(spec.history.len() + 1);
    for (since, changes) in spec.history {
        history.push(history_entry(texts.add(since)?, texts.add(changes)?));
    }
    history.push(history_entry(ptr::null(), ptr::null()));
    let mut key_specs = Vec::with_capacity(spec.key_specs.len() + 1);
    for key_spec in spec.key_specs {
        key_specs.push(to_server_key_spec(key_spec, texts.add(key_spec.notes)?));
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
        history: history.as_mut_ptr(),
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

/// Translates a list of arguments and, before it, their parts. The lists end with an argument without a name, and stay where they are: each in its
/// own allocation, kept by `lists`.
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
        let subargs = to_server_args(arg.parts, texts, lists)?;
        list.push(to_server_arg(arg, texts, subargs)?);
    }
    list.push(to_server_arg(&ArgSpec::new("", ArgKind::String), texts, ptr::null_mut())?);
    lists.push(list.into_boxed_slice());
    Ok(lists.last_mut().map_or(ptr::null_mut(), |list| list.as_mut_ptr()))
}

fn to_server_arg(
    arg: &ArgSpec,
    texts: &mut Texts,
    subargs: *mut raw::RedisModuleCommandArg,
) -> Result<raw::RedisModuleCommandArg, &'static str> {
    let flag = |is_set: bool, bit: u32| if is_set { bit } else { 0 };
    let flags =
        flag(arg.optional, raw::REDISMODULE_CMD_ARG_OPTIONAL) | flag(arg.repeats, raw::REDISMODULE_CMD_ARG_MULTIPLE);
    Ok(raw::RedisModuleCommandArg {
        name: texts.add(arg.name)?,
        type_: arg.kind as raw::RedisModuleCommandArgType, // declared in the server's order
        key_spec_index: arg.key_spec.unwrap_or(-1),
        token: texts.add(arg.token)?,
        summary: texts.add(arg.summary)?,
        since: texts.add(arg.since)?,
        flags: flags.cast_signed(),
        deprecated_since: ptr::null(),
        subargs,
        display_text: ptr::null(),
    })
}

fn history_entry(since: *const c_char, changes: *const c_char) -> raw::RedisModuleCommandHistoryEntry {
    raw::RedisModuleCommandHistoryEntry { since, changes }
}

fn to_server_key_spec(spec: &KeySpec, notes: *const c_char) -> raw::RedisModuleCommandKeySpec {
    raw::RedisModuleCommandKeySpec {
        notes,
        flags: spec.flags,
        begin_search_type: raw::RedisModuleKeySpecBeginSearchType_REDISMODULE_KSPEC_BS_INDEX,
        bs: raw::RedisModuleCommandKeySpec__bindgen_ty_1 {
            index: raw::RedisModuleCommandKeySpec__bindgen_ty_1__bindgen_ty_1 { pos: spec.first },
        },
        find_keys_type: raw::RedisModuleKeySpecFindKeysType_REDISMODULE_KSPEC_FK_RANGE,
        fk: range(spec.last, spec.step),
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
