//! The server's function table: which functions we need, and how one is called.
//!
//! The server hands its functions out by name, once, into the `raw::RedisModule_*` statics. A name it does not know
//! leaves the static empty, and calling an empty one would crash the server. So every function used in this layer
//! stands in the list below; `load` refuses the server if one of them is missing, and [`server_fn!`] compiles for
//! listed names only. Functions younger than the oldest server are looked up by [`lookup`].

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::mem::transmute;
use std::ptr;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, Ordering};

use valkey_module::raw;

pub(super) const OK: c_int = 0;
pub(super) const ERR: c_int = 1;

macro_rules! required {
    ($($name:ident)*) => {
        /// One marker for each required function: [`server_fn!`] names it, so that a function missing from the list
        /// does not compile.
        pub(super) mod required {
            $(
                #[allow(non_camel_case_types, dead_code, reason = "a marker with the server's own name, and no value")]
                pub(in crate::ffi) struct $name;
            )*
        }

        /// The first required function this server does not have.
        pub(super) fn first_missing() -> Option<&'static str> {
            $(
                // SAFETY: a plain read of a static that is written by `load` alone, earlier on this same thread.
                if unsafe { raw::$name }.is_none() {
                    return Some(stringify!($name));
                }
            )*
            None
        }
    };
}

required! {
    RedisModule_ACLCheckChannelPermissions RedisModule_ACLCheckKeyPermissions RedisModule_AddACLCategory
    RedisModule_Alloc RedisModule_AvoidReplicaTraffic RedisModule_BlockClient
    RedisModule_BlockClientGetPrivateData RedisModule_BlockClientSetPrivateData
    RedisModule_Call RedisModule_CallReplyArrayElement RedisModule_CallReplyInteger RedisModule_CallReplyStringPtr RedisModule_CallReplyType
    RedisModule_CachedMicroseconds RedisModule_Calloc RedisModule_CloseKey RedisModule_CreateCommand RedisModule_CreateDataType
    RedisModule_CreateString RedisModule_DeleteKey RedisModule_DigestAddStringBuffer
    RedisModule_DigestEndSequence RedisModule_EmitAOF RedisModule_EventLoopAdd RedisModule_EventLoopDel RedisModule_Free
    RedisModule_FreeCallReply RedisModule_FreeModuleUser RedisModule_FreeServerInfo RedisModule_FreeString
    RedisModule_GetApi RedisModule_GetBlockedClientPrivateData RedisModule_GetClientId RedisModule_GetClientInfoById
    RedisModule_GetClientUserNameById RedisModule_GetCommand RedisModule_GetContextFlags RedisModule_GetCurrentUserName
    RedisModule_GetDbIdFromIO RedisModule_GetDetachedThreadSafeContext
    RedisModule_GetKeyNameFromIO RedisModule_GetModuleOptionsAll
    RedisModule_GetModuleUserFromUserName RedisModule_GetSelectedDb RedisModule_GetServerInfo
    RedisModule_GetServerVersion RedisModule_InfoAddFieldCString RedisModule_InfoAddFieldULongLong
    RedisModule_InfoAddSection RedisModule_InfoBeginDictField RedisModule_InfoEndDictField
    RedisModule_IsBlockedReplyRequest RedisModule_IsBlockedTimeoutRequest RedisModule_IsIOError
    RedisModule_IsModuleNameBusy RedisModule_KeyType RedisModule_LoadConfigs RedisModule_LoadStringBuffer
    RedisModule_Log RedisModule_ModuleTypeGetType RedisModule_ModuleTypeGetValue
    RedisModule_ModuleTypeSetValue RedisModule_NotifyKeyspaceEvent RedisModule_OpenKey RedisModule_PublishMessage
    RedisModule_PublishMessageShard RedisModule_RegisterBoolConfig RedisModule_RegisterClusterMessageReceiver
    RedisModule_RegisterInfoFunc RedisModule_RegisterNumericConfig RedisModule_Replicate
    RedisModule_ReplyWithArray RedisModule_ReplyWithError RedisModule_ReplyWithLongLong RedisModule_ReplyWithMap
    RedisModule_ReplyWithNull RedisModule_ReplyWithSimpleString RedisModule_ReplyWithStringBuffer
    RedisModule_SaveStringBuffer RedisModule_SelectDb RedisModule_SendClusterMessage
    RedisModule_ServerInfoGetFieldC RedisModule_SetCommandACLCategories RedisModule_SetCommandInfo
    RedisModule_SetDisconnectCallback RedisModule_SetModuleAttribs RedisModule_SetModuleOptions
    RedisModule_SignalModifiedKey RedisModule_StringPtrLen RedisModule_SubscribeToKeyspaceEvents RedisModule_SubscribeToServerEvent RedisModule_UnblockClient
}

/// The server function of that name, ready to be called: `let close = server_fn!(RedisModule_CloseKey);`
macro_rules! server_fn {
    ($name:ident) => {{
        let _ = $crate::ffi::api::required::$name;
        // SAFETY: a plain read; the static is written once, by `load`, before the server can call us in any other way.
        let function = unsafe { valkey_module::raw::$name };
        // SAFETY: the marker above puts the name on the required list, and `load` refuses a server that lacks one of
        // the list.
        unsafe { function.unwrap_unchecked() }
    }};
}
pub(super) use server_fn;

/// A server function by its full name, for those that the oldest supported server does not have.
pub(super) fn lookup(name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: a plain read of a static that is written by `load` alone, earlier on this same thread.
    let get_api = unsafe { raw::RedisModule_GetApi }?;
    let mut function: *mut c_void = ptr::null_mut();
    // SAFETY: the server reads the NUL-terminated name and writes one pointer to the address it is given; both live on
    // this stack.
    let found = unsafe { get_api(name.as_ptr(), (&raw mut function).cast()) } == OK;
    if found { NonNull::new(function) } else { None }
}

/// A function that only some servers have: looked up once, at load.
pub(super) struct Optional {
    name: &'static CStr,
    function: AtomicPtr<c_void>,
}

impl Optional {
    const fn new(name: &'static CStr) -> Self {
        Self { name, function: AtomicPtr::new(ptr::null_mut()) }
    }

    fn find(&self) {
        let found = lookup(self.name);
        self.function.store(found.map_or(ptr::null_mut(), NonNull::as_ptr), Ordering::Relaxed);
    }

    fn get(&self) -> Option<NonNull<c_void>> {
        NonNull::new(self.function.load(Ordering::Relaxed))
    }
}

/// 8.1 and later.
static MUST_OBEY_CLIENT: Optional = Optional::new(c"RedisModule_MustObeyClient");
/// 8.0 and later, but not in the bindings under this name.
static CLUSTER_KEY_SLOT: Optional = Optional::new(c"RedisModule_ClusterKeySlot");

/// Looks up the optional functions. Called once, by `load`.
pub(super) fn find_optional() {
    MUST_OBEY_CLIENT.find();
    CLUSTER_KEY_SLOT.find();
}

/// What `MustObeyClient` answers, `false` where the server has no such function.
///
/// # Safety
/// `ctx` is a live context with a client.
pub(super) unsafe fn must_obey_client(ctx: *mut raw::RedisModuleCtx) -> bool {
    type MustObeyClient = unsafe extern "C" fn(ctx: *mut raw::RedisModuleCtx) -> c_int;
    let Some(function) = MUST_OBEY_CLIENT.get() else {
        return false;
    };
    // SAFETY: the server gave this pointer under the name of a function of this type.
    let must_obey = unsafe { transmute::<NonNull<c_void>, MustObeyClient>(function) };
    // SAFETY: the caller's promise.
    unsafe { must_obey(ctx) == 1 }
}

/// What `ClusterKeySlot` answers, if the server has it.
///
/// # Safety
/// `key` is a live string.
pub(super) unsafe fn cluster_key_slot(key: *mut raw::RedisModuleString) -> Option<u32> {
    type ClusterKeySlot = unsafe extern "C" fn(key: *mut raw::RedisModuleString) -> c_uint;
    let function = CLUSTER_KEY_SLOT.get()?;
    // SAFETY: the server gave this pointer under the name of a function of this type.
    let key_slot = unsafe { transmute::<NonNull<c_void>, ClusterKeySlot>(function) };
    // SAFETY: the caller's promise.
    Some(unsafe { key_slot(key) })
}
