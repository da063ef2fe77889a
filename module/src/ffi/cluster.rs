//! The cluster: whose slot is a key in, and the module's own messages on the cluster bus.

use std::ffi::{c_char, c_uchar};
use std::io;
use std::ptr;
use std::slice;

use valkey_module::raw;

use super::api::{self, OK, server_fn};
use super::barrier::{Callback, barrier};
use super::ctx::Ctx;
use super::pubsub::CallReply;
use super::string::ServerStr;

/// Who serves a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotOwner {
    /// This node, or there is no cluster.
    Here,
    /// Another node, or none yet; or this one is giving the slot away, and the key is not (or no longer) here.
    Elsewhere,
    /// Nobody: the cluster is down, or takes no writes.
    Nobody,
}

/// `errno` of a call that may not run on this node: EROFS, ENETDOWN.
const CLUSTER_IS_DOWN: [i32; 2] = [30, 100];
/// `errno` of a write that is refused for lack of replicas, or for a disk that fails: ESPIPE, ENOSPC.
const WRITES_ARE_REFUSED: [i32; 2] = [29, 28];

impl Ctx<'_> {
    /// Who would be asked to write `key` now? The server decides, by checking a write without running it: about a
    /// microsecond in a cluster.
    pub(crate) fn slot_owner(&self, key: ServerStr<'_>) -> SlotOwner {
        if !self.flags().is_cluster() {
            return SlotOwner::Here;
        }
        let call = server_fn!(RedisModule_Call);
        // SAFETY: the context is live; `D` checks and does not run, `s` takes the live string.
        let reply = unsafe { call(self.as_ptr(), c"DEL".as_ptr(), c"Ds".as_ptr(), key.as_ptr()) };
        let reason = io::Error::last_os_error().raw_os_error();
        // Where nothing stands against the write, Valkey 8 answers no reply and Valkey 9 an empty one.
        match CallReply::new(reply).filter(CallReply::is_error) {
            None => SlotOwner::Here,
            Some(_) if reason.is_some_and(|reason| CLUSTER_IS_DOWN.contains(&reason)) => SlotOwner::Nobody,
            Some(_) => SlotOwner::Elsewhere,
        }
    }

    /// Would a client's write be refused now because too few replicas listen (`min-replicas-to-write`) or the disk fails? The
    /// server decides, by checking a write of `key`, which must be this node's, without running it: about a microsecond.
    pub(crate) fn refuses_writes(&self, key: ServerStr<'_>) -> bool {
        let call = server_fn!(RedisModule_Call);
        // SAFETY: the context is live; `D` checks and does not run, `S` checks as for a script, `s` takes the live string.
        let reply = unsafe { call(self.as_ptr(), c"DEL".as_ptr(), c"DSs".as_ptr(), key.as_ptr()) };
        let reason = io::Error::last_os_error().raw_os_error();
        let refused = CallReply::new(reply).is_some_and(|reply| reply.is_error());
        refused && reason.is_some_and(|reason| WRITES_ARE_REFUSED.contains(&reason))
    }

    /// What `CLUSTER NODES` says, one node a line. Empty without a cluster.
    pub(crate) fn cluster_nodes(&self) -> String {
        let call = server_fn!(RedisModule_Call);
        // SAFETY: the context is live; `c` takes the NUL-terminated text.
        let reply = unsafe { call(self.as_ptr(), c"CLUSTER".as_ptr(), c"c".as_ptr(), c"NODES".as_ptr()) };
        CallReply::new(reply).map(|reply| String::from_utf8_lossy(reply.bytes()).into_owned()).unwrap_or_default()
    }

    /// The hash slot of a key or a shard channel.
    pub(crate) fn key_slot(&self, name: ServerStr<'_>) -> Option<u32> {
        // SAFETY: the string is live.
        unsafe { api::cluster_key_slot(name.as_ptr()) }
    }

    /// Sends `payload` to every other node that has the module; `crate::server_events::on_cluster_message` receives it
    /// there. No promise that it arrives. `false` without a cluster.
    pub(crate) fn broadcast(&self, payload: &[u8]) -> bool {
        let send = server_fn!(RedisModule_SendClusterMessage);
        let Ok(length) = u32::try_from(payload.len()) else {
            return false;
        };
        // SAFETY: the context is live; no target means all; the server copies `length` bytes.
        self.flags().is_cluster()
            && unsafe { send(self.as_ptr(), ptr::null(), MESSAGE_TYPE, payload.as_ptr().cast(), length) } == OK
    }

    /// Starts receiving what other nodes broadcast. Once, while loading the module; without a cluster it does nothing.
    pub(crate) fn receive_broadcasts(&self) {
        let register_receiver = server_fn!(RedisModule_RegisterClusterMessageReceiver);
        // SAFETY: the context is live; the callback lives in this library.
        unsafe { register_receiver(self.as_ptr(), MESSAGE_TYPE, Some(on_message)) };
    }
}

/// Messages are told apart by the module's name and this.
const MESSAGE_TYPE: u8 = 1;

extern "C" fn on_message(
    ctx: *mut raw::RedisModuleCtx,
    _sender: *const c_char,
    _message_type: u8,
    payload: *const c_uchar,
    length: u32,
) {
    barrier(Callback::ClusterMessage, (), || {
        let length = usize::try_from(length).unwrap_or(0);
        // SAFETY: the server keeps the context, which has a temporary client, until we return.
        let ctx = unsafe { Ctx::from_raw(ctx) };
        let payload = if payload.is_null() {
            &[]
        } else {
            // SAFETY: the server keeps `length` bytes there until we return.
            unsafe { slice::from_raw_parts(payload, length) }
        };
        if let Some(ctx) = ctx {
            crate::server_events::on_cluster_message(&ctx, payload);
        }
    });
}
