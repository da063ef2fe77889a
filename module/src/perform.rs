//! Performing a decision: the only place that changes keys, replicates, publishes, and answers waiting clients.

use crate::config;
use crate::ffi::ctx::Ctx;
use crate::ffi::key::Key;
use crate::ffi::main_thread::MainThread;
use crate::ffi::pubsub::ChannelKind;
use crate::ffi::string::{ServerStr, ServerString};
use crate::{blocking, state};
use flock_core::effect::{Ended, KeyAction};
use flock_core::lock::Change;
use flock_core::wire;
use flock_core::wire::message::{Announcement, OwnerMessage};
use flock_core::{Audience, Decision, Effect, LockId};
use std::ffi::CStr;

/// The command that carries effects to replicas and the append-only file.
pub(crate) const APPLY: &CStr = c"FLOCK._APPLY";

/// The buffer in which effects and messages are written, used again and again.
static BUFFER: MainThread<Vec<u8>> = MainThread::new();

/// Room for the buffer. Once, while loading the module.
pub(crate) fn install() {
    BUFFER.install(Vec::with_capacity(512));
}

/// Performs a decision about the key `name`, which is open, and gives the answer back.
pub(crate) fn perform<T>(ctx: &Ctx<'_>, mut key: Key<'_>, name: ServerStr<'_>, decision: Decision<T>) -> T {
    let Decision { answer, lock, key: action, effects } = decision;
    match (action, lock) {
        (KeyAction::Bind, Some(lock)) => drop(key.set(state::handle_of(lock))),
        (KeyAction::Unbind, _) => drop(key.delete()),
        (KeyAction::Keep | KeyAction::Bind, _) => {}
    }
    drop(key); // closed: what follows may run other modules' code
    let mut changed = action != KeyAction::Keep;
    for effect in &effects {
        changed |= matches!(effect, Effect::Change(change) if !matches!(change, Change::Mark(_)));
        perform_effect(ctx, Some(name), lock, effect);
    }
    if changed {
        ctx.signal_modified(name);
    }
    state::with_table(|table| table.recycle(effects));
    answer
}

/// Performs a decision that touches no key: waits that ended, messages, a mark.
pub(crate) fn perform_keyless<T>(ctx: &Ctx<'_>, decision: Decision<T>) -> T {
    debug_assert_eq!(decision.key, KeyAction::Keep);
    for effect in &decision.effects {
        perform_effect(ctx, None, decision.lock, effect);
    }
    state::with_table(|table| table.recycle(decision.effects));
    decision.answer
}

/// Replicates a mark.
pub(crate) fn announce_mark(ctx: &Ctx<'_>, mark: u64) {
    replicate(ctx, None, &Change::Mark(mark));
}

fn perform_effect(ctx: &Ctx<'_>, name: Option<ServerStr<'_>>, lock: Option<LockId>, effect: &Effect) {
    match effect {
        Effect::Change(Change::Mark(mark)) => announce_mark(ctx, *mark),
        Effect::Change(change) => replicate(ctx, name, change),
        Effect::Finish { blocked, outcome } => blocking::finish(*blocked, *outcome, lock),
        Effect::Tell { channel, name, owner, notice } => {
            with_buffer(|buffer| {
                OwnerMessage { notice: *notice, key: name.key(), owner }.encode(buffer);
                publish(ctx, ServerString::new(channel).as_str(), buffer);
            });
        }
        Effect::Announce { ended, token, handed_to } => {
            let Some(name) = name else { return };
            if config::RELEASE_NOTIFICATIONS.get() {
                with_buffer(|buffer| {
                    Announcement { ended: *ended, token: *token, handed_to: *handed_to }.encode(buffer);
                    publish(ctx, name, buffer);
                });
            }
            ctx.notify_keyspace_event(event_of(*ended), name);
        }
    }
}

/// The keyspace event of the module class for the end of a hold.
fn event_of(ended: Ended) -> &'static CStr {
    match ended {
        Ended::Released | Ended::Undelivered => c"flock.released",
        Ended::Expired => c"flock.expired",
        Ended::Revoked => c"flock.revoked",
    }
}

fn replicate(ctx: &Ctx<'_>, name: Option<ServerStr<'_>>, change: &Change) {
    with_buffer(|buffer| {
        wire::change::encode(change, state::boot(), buffer);
        match name {
            Some(name) => ctx.replicate(APPLY, None, &[buffer, name.bytes()]),
            None => ctx.replicate(APPLY, None, &[buffer]),
        };
    });
    if let (Change::Grant(_), Some(name)) = (change, name) {
        ctx.notify_keyspace_event(c"flock.granted", name);
    }
}

fn publish(ctx: &Ctx<'_>, channel: ServerStr<'_>, message: &[u8]) {
    ctx.publish(channel_kind(ctx), channel, ServerString::new(message).as_str());
}

/// In cluster mode messages stay within the shard.
pub(crate) fn channel_kind(ctx: &Ctx<'_>) -> ChannelKind {
    if ctx.flags().is_cluster() { ChannelKind::Shard } else { ChannelKind::Plain }
}

/// Runs `body` on the emptied buffer.
fn with_buffer(body: impl FnOnce(&mut Vec<u8>)) {
    BUFFER.with(|buffer| {
        buffer.clear();
        body(buffer);
    });
}

/// Who listens, as the server knows it at this moment.
pub(crate) struct Listeners<'a>(pub(crate) &'a Ctx<'a>);

impl Audience for Listeners<'_> {
    fn hears(&mut self, channel: &[u8]) -> bool {
        self.0.subscribers(channel_kind(self.0), ServerString::new(channel).as_str()) > 0
    }
}
