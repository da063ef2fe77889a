//! What the user behind a command may do beyond what the server has checked: keys and channels that the command names
//! in its own way.

use std::ffi::c_int;
use std::io;
use std::marker::PhantomData;
use std::ptr::NonNull;

use valkey_module::raw;

use super::api::{OK, server_fn};
use super::ctx::Ctx;
use super::string::{ServerStr, ServerString};

/// `errno` of a call that asked for the current user where there is none: ENOTSUP.
const NO_USER: i32 = 95;

/// The user a command runs as.
pub(crate) enum CurrentUser<'a> {
    /// No user is attached: the replication link, the append-only file, another module. The server checks nothing
    /// there, nor do we.
    Unrestricted,
    /// A user of the server's list.
    Listed(User<'a>),
    /// A user the list does not know (made by another module, or just deleted): may nothing.
    Unknown,
}

/// A handle on one user, freed when dropped.
pub(crate) struct User<'a> {
    raw: NonNull<raw::RedisModuleUser>,
    command: PhantomData<&'a Ctx<'a>>,
}

impl<'a> CurrentUser<'a> {
    /// The user of the running command. In a script it is the script's caller.
    pub(crate) fn of(ctx: &'a Ctx<'_>) -> Self {
        if ctx.must_obey_client(ctx.flags()) {
            return Self::Unrestricted;
        }
        let Some(name) = ctx.connected_user_name().or_else(|| unconnected_user_name(ctx)) else {
            return Self::Unrestricted;
        };
        let user_from_name = server_fn!(RedisModule_GetModuleUserFromUserName);
        // SAFETY: the name is a live string of its own (never a shared or encoded one).
        let user = unsafe { user_from_name(name.as_str().as_ptr()) };
        NonNull::new(user).map_or(Self::Unknown, |raw| Self::Listed(User { raw, command: PhantomData }))
    }

    /// May the user publish to and hear of `channel`, taken literally?
    pub(crate) fn may_access_channel(&self, channel: ServerStr<'_>) -> bool {
        let check = server_fn!(RedisModule_ACLCheckChannelPermissions);
        let access = raw::REDISMODULE_CMD_CHANNEL_PUBLISH | raw::REDISMODULE_CMD_CHANNEL_SUBSCRIBE;
        // SAFETY: user and channel are live.
        self.may(|user| unsafe { check(user, channel.as_ptr(), access.cast_signed()) })
    }

    /// May the user read `key`?
    pub(crate) fn may_read_key(&self, key: ServerStr<'_>) -> bool {
        let check = server_fn!(RedisModule_ACLCheckKeyPermissions);
        // SAFETY: user and key are live.
        self.may(|user| unsafe { check(user, key.as_ptr(), raw::REDISMODULE_CMD_KEY_ACCESS.cast_signed()) })
    }

    fn may(&self, check: impl FnOnce(*mut raw::RedisModuleUser) -> c_int) -> bool {
        match self {
            Self::Unrestricted => true,
            Self::Listed(user) => check(user.raw.as_ptr()) == OK,
            Self::Unknown => false,
        }
    }
}

impl Drop for User<'_> {
    fn drop(&mut self) {
        let free_module_user = server_fn!(RedisModule_FreeModuleUser);
        // SAFETY: made by GetModuleUserFromUserName, which lets us free the handle; the user itself stays.
        unsafe { free_module_user(self.raw.as_ptr()) };
    }
}

/// The user name of a caller that is none: a script, or a call by another module. `None` if no user is attached, which
/// the function for the name does not survive; so a call "as the current user" of a command that does not exist asks
/// first.
fn unconnected_user_name(ctx: &Ctx<'_>) -> Option<ServerString> {
    let call = server_fn!(RedisModule_Call);
    // SAFETY: the context is live; the format takes no argument. There is no such command, so nothing runs and no reply
    // is made.
    let reply = unsafe { call(ctx.as_ptr(), c"flock.no-such-command".as_ptr(), c"C".as_ptr()) };
    if reply.is_null() && io::Error::last_os_error().raw_os_error() == Some(NO_USER) {
        return None;
    }
    let current_user_name = server_fn!(RedisModule_GetCurrentUserName);
    // SAFETY: the context is live and its client has a user, as the call has shown.
    let name = unsafe { current_user_name(ctx.as_ptr()) };
    // SAFETY: as above.
    unsafe { ServerString::from_raw(name) }
}
