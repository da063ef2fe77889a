//! Performing a decision: the only place that changes keys, replicates, publishes, and answers waiting clients.

use crate::config;
use crate::ffi::ctx::{ContextFlags, Ctx, LogLevel};
use crate::ffi::key::Key;
use crate::ffi::main_thread::MainThread;
use crate::ffi::pubsub::ChannelKind;
use crate::ffi::string::{ServerStr, ServerString};
use crate::{blocking, cluster, propagation, role, state, turn};
use flock_core::effect::{Ended, KeyAction, WaitOutcome};
use flock_core::lock::Change;
use flock_core::wire;
use flock_core::wire::message::{self, Announcement, OwnerMessage};
use flock_core::{Audience, Decision, Effect, LockId, Token};
use std::cell::Cell;
use std::ffi::CStr;

/// The command that carries effects to replicas and the append-only file.
pub(crate) const APPLY: &CStr = c"FLOCK._APPLY";

/// The buffer in which effects and messages are written, used again and again.
static BUFFER: MainThread<Vec<u8>> = MainThread::new();

/// Room for the buffer. Once, while loading the module.
pub(crate) fn install() {
    BUFFER.install(Vec::with_capacity(512));
}

/// Performs decisions in one execution unit of the server.
pub(crate) struct Shell<'a> {
    ctx: &'a Ctx<'a>,
    unit: Unit,
    /// The grant made last in this step.
    granted: Cell<Option<Token>>,
}

/// What kind of execution unit.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unit {
    /// A client's command.
    Command,
    /// A turn of the event loop, or a notification.
    Turn,
}

impl<'a> Shell<'a> {
    /// In a client's command.
    pub(crate) fn in_command(ctx: &'a Ctx<'_>) -> Self {
        Self { ctx, unit: Unit::Command, granted: Cell::new(None) }
    }

    /// Outside any command.
    pub(crate) fn in_turn(ctx: &'a Ctx<'_>) -> Self {
        Self { ctx, unit: Unit::Turn, granted: Cell::new(None) }
    }

    /// Performs a decision about the key `name`, which is open, and gives the answer back.
    pub(crate) fn perform<T>(&self, mut key: Key<'_>, name: ServerStr<'_>, decision: Decision<T>) -> T {
        let Decision { answer, lock, key: action, effects } = decision;
        let done = match (action, lock) {
            (KeyAction::Bind, Some(lock)) => key.set(state::handle_of(lock)),
            (KeyAction::Unbind, _) => key.delete(),
            (KeyAction::Keep, _) => true,
            (KeyAction::Bind, None) => false,
        };
        drop(key); // closed: what follows may run other modules' code
        if !done {
            debug_assert!(false, "a decision changes a key that was opened to read, or binds no lock");
            self.ctx.log(LogLevel::Warning, "a key could not be changed as decided");
        }
        let mut changed = action != KeyAction::Keep;
        for effect in &effects {
            changed |= matches!(effect, Effect::Change(change) if !matches!(change, Change::Mark(_)));
            self.perform_effect(Some(name), lock, effect);
        }
        if changed {
            self.ctx.signal_modified(name);
        }
        state::with_table(|table| table.recycle(effects));
        answer
    }

    /// Performs a decision that touches no key: waits that ended, messages, a mark.
    pub(crate) fn perform_keyless<T>(&self, decision: Decision<T>) -> T {
        debug_assert!(decision.key == KeyAction::Keep);
        for effect in &decision.effects {
            self.perform_effect(None, decision.lock, effect);
        }
        state::with_table(|table| table.recycle(decision.effects));
        decision.answer
    }

    /// Replicates a mark, and tells the other nodes of a cluster.
    pub(crate) fn announce_mark(&self, mark: u64) {
        if !cluster::is_exporting() {
            self.replicate(None, &Change::Mark(mark));
        }
        if self.unit == Unit::Command || cluster::is_exporting() {
            // Another module may have called the command and kept what it replicates to itself.
            turn::announce_mark_soon();
        }
        cluster::tell_mark(self.ctx, mark);
        role::warn_of_lead(self.ctx);
    }

    fn perform_effect(&self, name: Option<ServerStr<'_>>, lock: Option<LockId>, effect: &Effect) {
        match effect {
            Effect::Change(Change::Mark(mark)) => self.announce_mark(*mark),
            Effect::Change(change) => self.replicate(name, change),
            Effect::Granted(token) => {
                self.granted.set(Some(*token));
                if let Some(name) = name {
                    self.ctx.notify_keyspace_event(c"flock.granted", name);
                }
            }
            Effect::Finish { blocked, outcome } => {
                // A hold that its owner had before is not taken back if this connection turns out to be gone.
                let is_new = matches!(outcome, WaitOutcome::Granted(token) if self.granted.get() == Some(*token));
                blocking::finish(*blocked, *outcome, lock.filter(|_| is_new));
            }
            Effect::Tell { channel, name, owner, notice } => {
                self.tell(channel, OwnerMessage { notice: *notice, key: name.key(), owner });
            }
            Effect::Announce { ended, token, handed_to } => {
                let Some(name) = name else { return };
                if config::RELEASE_NOTIFICATIONS.get() {
                    self.announce(name, Announcement { ended: *ended, token: *token, handed_to: *handed_to });
                }
                self.ctx.notify_keyspace_event(event_of(*ended), name);
            }
        }
    }

    fn replicate(&self, name: Option<ServerStr<'_>>, change: &Change) {
        if self.unit == Unit::Turn || propagation::is_needed() {
            self.hand_to_server(name, change);
        }
    }

    #[inline(never)]
    fn hand_to_server(&self, name: Option<ServerStr<'_>>, change: &Change) {
        with_buffer(|buffer| {
            wire::change::encode(change, state::boot(), buffer);
            self.ctx.replicate(APPLY, buffer, name);
        });
    }

    #[inline(never)]
    fn tell(&self, channel: &[u8], message: OwnerMessage<'_>) {
        with_buffer(|buffer| {
            message.encode(buffer);
            self.publish(ServerString::new(channel).as_str(), buffer);
        });
    }

    #[inline(never)]
    fn announce(&self, name: ServerStr<'_>, announcement: Announcement) {
        with_buffer(|buffer| {
            announcement.encode(buffer);
            self.publish(name, buffer);
        });
    }

    fn publish(&self, channel: ServerStr<'_>, message: &[u8]) {
        self.ctx.publish(channel_kind(self.ctx.flags()), channel, ServerString::new(message).as_str());
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

/// In cluster mode messages stay within the shard.
fn channel_kind(flags: ContextFlags) -> ChannelKind {
    if flags.is_cluster() { ChannelKind::Shard } else { ChannelKind::Plain }
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
        let kind = channel_kind(self.0.flags());
        let channel = ServerString::new(channel);
        if self.0.subscribers(kind, channel.as_str()) > 0 {
            return true;
        }
        // Whether a pattern matches, only a message tells.
        kind == ChannelKind::Plain
            && self.0.patterns() > 0
            && self.0.publish(kind, channel.as_str(), ServerString::new(message::PROBE).as_str()) > 0
    }
}
