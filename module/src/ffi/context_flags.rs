//! The state of the server and of the calling client, as the server packs it.

use std::ffi::c_int;
use std::ptr;

use valkey_module::raw;

use super::api::server_fn;

/// What [`Ctx::flags`](super::ctx::Ctx::flags) found.
#[derive(Clone, Copy)]
pub(crate) struct ContextFlags(c_int);

impl ContextFlags {
    pub(super) fn from_raw(flags: c_int) -> Self {
        Self(flags)
    }

    /// The server's own state, with no client: for callbacks that have no context.
    pub(super) fn of_server() -> Self {
        let get_context_flags = server_fn!(RedisModule_GetContextFlags);
        // SAFETY: no context is a documented argument; called on the main thread, in a callback.
        Self(unsafe { get_context_flags(ptr::null_mut()) })
    }

    fn has(self, flag: u32) -> bool {
        self.0.cast_unsigned() & flag != 0
    }

    pub(crate) fn is_primary(self) -> bool {
        self.has(raw::REDISMODULE_CTX_FLAGS_MASTER)
    }

    /// The dataset is being loaded, from disk or from a primary.
    pub(crate) fn is_loading(self) -> bool {
        self.has(raw::REDISMODULE_CTX_FLAGS_LOADING | raw::REDISMODULE_CTX_FLAGS_ASYNC_LOADING)
    }

    /// The command came over the replication link, or from an imported slot.
    pub(crate) fn is_replicated(self) -> bool {
        self.has(raw::REDISMODULE_CTX_FLAGS_REPLICATED)
    }

    /// The calling client must not be blocked.
    pub(crate) fn denies_blocking(self) -> bool {
        self.has(raw::REDISMODULE_CTX_FLAGS_DENY_BLOCKING) || self.in_multi_or_script()
    }

    pub(crate) fn in_multi_or_script(self) -> bool {
        self.has(raw::REDISMODULE_CTX_FLAGS_LUA | raw::REDISMODULE_CTX_FLAGS_MULTI)
    }

    pub(crate) fn in_script(self) -> bool {
        self.has(raw::REDISMODULE_CTX_FLAGS_LUA)
    }

    pub(crate) fn is_cluster(self) -> bool {
        self.has(raw::REDISMODULE_CTX_FLAGS_CLUSTER)
    }

    /// This process is a fork child: a copy that saves, and is then gone.
    pub(crate) fn is_fork_child(self) -> bool {
        self.has(raw::REDISMODULE_CTX_FLAGS_IS_CHILD)
    }
}
