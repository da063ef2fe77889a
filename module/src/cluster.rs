//! What cluster mode adds: waits end when their slot moves away, and nodes tell each other their marks.
//!
//! Nobody else ends the wait of a client whose slot has moved, so the module looks, every cron tick, whether this node still serves
//! the names somebody waits for. Marks travel on the cluster bus: who takes a slot over (a promotion, an import) starts above what
//! any other node may have handed out. They are remembered when heard and applied only then.

use crate::ffi::cluster::SlotOwner;
use crate::ffi::ctx::{Ctx, LogLevel};
use crate::ffi::string::{ServerStr, ServerString};
use crate::perform::Shell;
use crate::state::{self, with_table};
use flock_core::lock::Change;
use flock_core::refusal::EndReason;
use flock_core::wait_queue::QueueId;
use flock_core::{Name, wire};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// So many queues are looked at per tick: a check costs about a microsecond.
const QUEUES_PER_TICK: usize = 1_000;

/// Where the next tick goes on, so that all are looked at in turn.
static NEXT_QUEUE: AtomicUsize = AtomicUsize::new(0);
/// The highest mark that another node has announced.
static HEARD: AtomicU64 = AtomicU64::new(0);

/// Ends the waits for names that this node serves no more. Called from the server's cron.
pub(crate) fn dismiss_moved(ctx: &Ctx<'_>) {
    if !ctx.flags().is_cluster() {
        return;
    }
    let from = NEXT_QUEUE.load(Ordering::Relaxed);
    let queues: Vec<(QueueId, Name)> = with_table(|table| {
        let queues = table.queues();
        let some = queues.all().skip(from).take(QUEUES_PER_TICK);
        some.filter_map(|queue| Some((queue, queues.name(queue)?.clone()))).collect()
    })
    .unwrap_or_default();
    let is_end = queues.len() < QUEUES_PER_TICK;
    NEXT_QUEUE.store(if is_end { 0 } else { from + QUEUES_PER_TICK }, Ordering::Relaxed);
    for (queue, name) in queues {
        let Some(reason) = why_not_served(ctx, ServerString::new(name.key()).as_str()) else { continue };
        if let Some(decision) = with_table(|table| table.dismiss(queue, reason)) {
            Shell::in_turn(ctx).perform_keyless(decision);
        }
    }
}

/// Why this node may grant nothing under this name, if it may not.
pub(crate) fn why_not_served(ctx: &Ctx<'_>, name: ServerStr<'_>) -> Option<EndReason> {
    match ctx.slot_owner(name) {
        SlotOwner::Here => None,
        SlotOwner::Elsewhere => Some(EndReason::Moved),
        SlotOwner::Nobody => Some(EndReason::ClusterDown),
    }
}

/// Tells the other nodes this one's mark.
pub(crate) fn tell_mark(ctx: &Ctx<'_>, mark: u64) {
    if ctx.flags().is_cluster() {
        let mut message = Vec::new();
        wire::change::encode(&Change::Mark(mark), state::boot(), &mut message);
        ctx.broadcast(&message);
    }
}

/// Another node's message.
pub(crate) fn on_message(ctx: &Ctx<'_>, message: &[u8]) {
    match wire::change::decode(message, state::boot()) {
        Ok(Change::Mark(mark)) => drop(HEARD.fetch_max(mark, Ordering::Relaxed)),
        Ok(_) => ctx.log(LogLevel::Warning, "another node sent a change that only replication may carry: ignored"),
        // Perhaps a later version speaks of more.
        Err(corrupt) => {
            ctx.log(LogLevel::Verbose, &format!("a message of another node is ignored: {}", corrupt.reason()))
        }
    }
}

/// Applies the marks heard so far: this node takes over what others may have granted.
pub(crate) fn apply_heard_marks() {
    with_table(|table| table.saw_mark(HEARD.load(Ordering::Relaxed)));
}
