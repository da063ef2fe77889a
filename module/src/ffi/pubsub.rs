//! What the module tells others: messages, keyspace events, invalidations.

use std::ffi::{CStr, c_int};
use std::slice;

use valkey_module::raw;

use super::api::{OK, server_fn};
use super::ctx::{Ctx, LogLevel};
use super::key;
use super::string::ServerStr;

/// Which of the server's two sorts of channel. In cluster mode a shard channel stays within the shard of its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChannelKind {
    Plain,
    Shard,
}

impl Ctx<'_> {
    /// Publishes `message`; answers how many clients of *this* node received it. Not replicated; in cluster mode the
    /// bus carries it. No ACL is asked: see [`super::acl::CurrentUser`].
    pub(crate) fn publish(&self, kind: ChannelKind, channel: ServerStr<'_>, message: ServerStr<'_>) -> usize {
        let publish = match kind {
            ChannelKind::Plain => server_fn!(RedisModule_PublishMessage),
            ChannelKind::Shard => server_fn!(RedisModule_PublishMessageShard),
        };
        // SAFETY: context and strings are live; the server takes references of its own where it keeps them.
        let receivers: c_int = unsafe { publish(self.as_ptr(), channel.as_ptr(), message.as_ptr()) };
        usize::try_from(receivers).unwrap_or(0)
    }

    /// How many clients of this node subscribe to `channel` by its name (patterns are not counted). Costs about a
    /// microsecond.
    pub(crate) fn subscribers(&self, kind: ChannelKind, channel: ServerStr<'_>) -> usize {
        let subcommand = match kind {
            ChannelKind::Plain => c"NUMSUB",
            ChannelKind::Shard => c"SHARDNUMSUB",
        };
        let call = server_fn!(RedisModule_Call);
        // SAFETY: the context is live; `c` takes the NUL-terminated text, `s` the live string.
        let reply =
            unsafe { call(self.as_ptr(), c"PUBSUB".as_ptr(), c"cs".as_ptr(), subcommand.as_ptr(), channel.as_ptr()) };
        let Some(reply) = CallReply::new(reply) else { return 0 };
        usize::try_from(reply.second_integer()).unwrap_or(0)
    }

    /// How many patterns the clients of this node subscribe to, whatever they match.
    pub(crate) fn patterns(&self) -> usize {
        let call = server_fn!(RedisModule_Call);
        // SAFETY: the context is live; `c` takes the NUL-terminated text.
        let reply = unsafe { call(self.as_ptr(), c"PUBSUB".as_ptr(), c"c".as_ptr(), c"NUMPAT".as_ptr()) };
        let Some(reply) = CallReply::new(reply) else { return 0 };
        usize::try_from(reply.integer()).unwrap_or(0)
    }

    /// Emits a keyspace event of the module class (`d` in `notify-keyspace-events`), under the context's database. Runs
    /// the code of other modules that listen: refused while a key is open.
    pub(crate) fn notify_keyspace_event(&self, event: &'static CStr, key_name: ServerStr<'_>) -> bool {
        if key::any_open() {
            debug_assert!(false, "a keyspace event was emitted while a key was open");
            self.log(LogLevel::Warning, "a keyspace event was emitted while a key was open: refused");
            return false;
        }
        let notify = server_fn!(RedisModule_NotifyKeyspaceEvent);
        // SAFETY: context and name are live, the event is NUL-terminated.
        unsafe { notify(self.as_ptr(), raw::REDISMODULE_NOTIFY_MODULE, event.as_ptr(), key_name.as_ptr()) == OK }
    }

    /// Tells WATCH and client-side caching that the key has changed. Nothing else in this layer does so.
    pub(crate) fn signal_modified(&self, key_name: ServerStr<'_>) {
        let signal_modified_key = server_fn!(RedisModule_SignalModifiedKey);
        // SAFETY: context and name are live.
        unsafe { signal_modified_key(self.as_ptr(), key_name.as_ptr()) };
    }
}

/// The reply of a called command, freed when dropped.
pub(super) struct CallReply(*mut raw::RedisModuleCallReply);

impl CallReply {
    pub(super) fn new(reply: *mut raw::RedisModuleCallReply) -> Option<Self> {
        (!reply.is_null()).then(|| Self(reply))
    }

    pub(super) fn is_error(&self) -> bool {
        // SAFETY: the reply is live.
        unsafe { reply_type(self.0) == ERROR }
    }

    /// The bytes that the reply is; else none.
    pub(super) fn bytes(&self) -> &[u8] {
        let string_ptr = server_fn!(RedisModule_CallReplyStringPtr);
        let mut length = 0;
        // SAFETY: the reply is live; the server answers null if it is no string.
        let start = unsafe { string_ptr(self.0, &raw mut length) };
        if start.is_null() {
            return &[];
        }
        // SAFETY: `start` and `length` delimit the string, which lives as long as the reply.
        unsafe { slice::from_raw_parts(start.cast(), length) }
    }

    /// The second element of an array, if it is an integer; else 0.
    fn second_integer(&self) -> i64 {
        let array_element = server_fn!(RedisModule_CallReplyArrayElement);
        // SAFETY: the reply is live; the server answers null if it is no array or too short.
        let element = unsafe { array_element(self.0, 1) };
        // SAFETY: null, or an element, which lives as long as its array.
        unsafe { integer_of(element) }
    }

    /// The integer that the reply is; else 0.
    fn integer(&self) -> i64 {
        // SAFETY: the reply is live.
        unsafe { integer_of(self.0) }
    }
}

/// # Safety
/// `reply` is null or live.
unsafe fn reply_type(reply: *mut raw::RedisModuleCallReply) -> c_int {
    let call_reply_type = server_fn!(RedisModule_CallReplyType);
    // SAFETY: the caller's promise; of null, the server answers that the type is unknown.
    unsafe { call_reply_type(reply) }
}

/// The integer that a reply is; else 0.
///
/// # Safety
/// `reply` is null or a live reply.
unsafe fn integer_of(reply: *mut raw::RedisModuleCallReply) -> i64 {
    // SAFETY: the caller's promise.
    if unsafe { reply_type(reply) } != INTEGER {
        return 0;
    }
    let integer = server_fn!(RedisModule_CallReplyInteger);
    // SAFETY: the caller's promise; it is an integer.
    unsafe { integer(reply) }
}

impl Drop for CallReply {
    fn drop(&mut self) {
        let free_call_reply = server_fn!(RedisModule_FreeCallReply);
        // SAFETY: a reply given to us, freed once; elements are freed with it.
        unsafe { free_call_reply(self.0) }
    }
}

/// `REDISMODULE_REPLY_ERROR` and `REDISMODULE_REPLY_INTEGER`, in the type the function answers.
const ERROR: c_int = 1;
const INTEGER: c_int = 2;
