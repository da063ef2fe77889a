//! What cluster mode adds: waits end when their slot moves away, and nodes tell each other their marks.
//!
//! Nobody else ends the wait of a client whose slot has moved, so the module looks, every cron tick, whether this node still serves
//! the names somebody waits for. Marks travel on the cluster bus: who takes a slot over (a promotion, an import) starts above what
//! any other node may have handed out. They are remembered when heard and applied only then: two nodes that followed each other's
//! marks would drive each other up for ever.
//!
//! An atomic migration says when slots have arrived. The older way (SETSLOT, MIGRATE) says nothing. So this node knows its slots: it looks
//! once a second which it serves or imports, and takes over when there is one more, or when a command for a slot that it does not know
//! gets here, whichever is first.

use crate::ffi::cluster::SlotOwner;
use crate::ffi::ctx::{Ctx, LogLevel};
use crate::ffi::events::SlotMigration;
use crate::ffi::main_thread::MainThread;
use crate::ffi::string::{ServerStr, ServerString};
use crate::perform::Shell;
use crate::state::{self, with_table};
use crate::turn;
use flock_core::lock::Change;
use flock_core::refusal::EndReason;
use flock_core::wait_queue::QueueId;
use flock_core::{Name, wire};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// So many queues are looked at per tick: a check costs about a microsecond.
const QUEUES_PER_TICK: usize = 1_000;

/// How often this node looks which slots it has.
const LOOK_EVERY_US: u64 = 1_000_000;

/// Atomic migrations away from this node.
static EXPORTS: AtomicUsize = AtomicUsize::new(0);
/// Whether this server runs in cluster mode, which does not change.
static IS_ON: AtomicBool = AtomicBool::new(false);
static LOOKED_AT_US: AtomicU64 = AtomicU64::new(0);
static SLOTS: MainThread<Slots> = MainThread::new();
/// Where the next tick goes on, so that all are looked at in turn.
static NEXT_QUEUE: AtomicUsize = AtomicUsize::new(0);
/// The highest mark that another node has announced.
static HEARD: AtomicU64 = AtomicU64::new(0);

/// Called from the server's cron.
pub(crate) fn look(ctx: &Ctx<'_>) {
    if !IS_ON.load(Ordering::Relaxed) {
        return;
    }
    dismiss_moved(ctx);
    let now = state::now().as_us();
    if now.saturating_sub(LOOKED_AT_US.load(Ordering::Relaxed)) >= LOOK_EVERY_US {
        LOOKED_AT_US.store(now, Ordering::Relaxed);
        let slots = Slots::of_this_node(&ctx.cluster_nodes());
        let gained = SLOTS.with(|known| slots.exceed(&std::mem::replace(known, slots)));
        if gained == Some(true) {
            take_over();
        }
        // Again and again: nodes come later, and links break.
        if let Some(mark) = with_table(|table| table.counter().is_seeded().then(|| table.counter().mark())).flatten() {
            tell_mark(ctx, mark);
        }
    }
}

/// An atomic migration has begun or ended.
pub(crate) fn on_slot_migration(ctx: &Ctx<'_>, stage: SlotMigration) {
    match stage {
        SlotMigration::ExportStarted => drop(EXPORTS.fetch_add(1, Ordering::Relaxed)),
        SlotMigration::ExportAborted | SlotMigration::ExportCompleted => {
            let exports = EXPORTS.load(Ordering::Relaxed);
            EXPORTS.store(exports.saturating_sub(1), Ordering::Relaxed);
            dismiss_moved(ctx);
            turn::announce_mark_soon();
        }
        SlotMigration::ImportCompleted => {
            take_over();
            with_table(|table| table.recall(state::now()));
        }
    }
}

/// Whether slots of this node are on their way to another. Until they are there, nothing without a key may be replicated: the server
/// would give the migration up.
pub(crate) fn is_exporting() -> bool {
    EXPORTS.load(Ordering::Relaxed) > 0
}

/// A command for this key got here, so its slot is this node's, or on its way.
#[inline]
pub(crate) fn meet(ctx: &Ctx<'_>, key: ServerStr<'_>) {
    if IS_ON.load(Ordering::Relaxed) {
        meet_slot_of(ctx, key);
    }
}

#[inline(never)]
fn meet_slot_of(ctx: &Ctx<'_>, key: ServerStr<'_>) {
    if let Some(slot) = ctx.key_slot(key).and_then(|slot| usize::try_from(slot).ok())
        && SLOTS.with(|known| known.insert(slot)) == Some(true)
    {
        take_over();
    }
}

/// Slots have come, or begin to come, from another node: what is granted from now on is above what that node may have granted.
fn take_over() {
    with_table(|table| table.took_over(HEARD.load(Ordering::Relaxed), state::wall_clock()));
    turn::announce_mark_soon();
}

/// This node is no primary any more: what it exports, it does not.
pub(crate) fn demoted() {
    EXPORTS.store(0, Ordering::Relaxed);
}

/// Whether the key of this name is another node's.
pub(crate) fn has_moved(ctx: &Ctx<'_>, name: &Name) -> bool {
    IS_ON.load(Ordering::Relaxed)
        && why_not_served(ctx, ServerString::new(name.key()).as_str()) == Some(EndReason::Moved)
}

/// Ends the waits for names that this node serves no more.
pub(crate) fn dismiss_moved(ctx: &Ctx<'_>) {
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
    if IS_ON.load(Ordering::Relaxed) {
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

/// The slots that a node serves or imports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Slots([u64; Self::COUNT / 64]);

impl Slots {
    const COUNT: usize = 16_384;

    /// Those of the node that says `myself`, from what `CLUSTER NODES` says: after eight other words `5`, `7-9`, `[93->-id]` for one
    /// that leaves, `[94-<-id]` for one that comes.
    fn of_this_node(nodes: &str) -> Self {
        let mut slots = Self([0; Self::COUNT / 64]);
        let own = nodes.lines().find(|line| line.split(' ').nth(2).is_some_and(|flags| flags.contains("myself")));
        for word in own.unwrap_or_default().split(' ').skip(8) {
            let range = match word.strip_prefix('[') {
                Some(moving) => moving.split_once("-<-").map(|(slot, _)| (slot, slot)),
                None => word.split_once('-').or(Some((word, word))),
            };
            let range =
                range.and_then(|(first, last)| Some((first.parse::<usize>().ok()?, last.parse::<usize>().ok()?)));
            for slot in range.map(|(first, last)| first..=last).into_iter().flatten().take(Self::COUNT) {
                slots.insert(slot);
            }
        }
        slots
    }

    /// Adds a slot. Says whether it is new.
    fn insert(&mut self, slot: usize) -> bool {
        let Some(word) = self.0.get_mut(slot / 64) else { return false };
        let before = std::mem::replace(word, *word | 1 << (slot % 64));
        before != *word
    }

    /// Whether there is a slot in here that is not in `other`.
    fn exceed(&self, other: &Self) -> bool {
        self.0.iter().zip(other.0).any(|(here, there)| here & !there != 0)
    }
}

/// No slots. Once, while loading the module.
pub(crate) fn install(ctx: &Ctx<'_>) {
    SLOTS.install(Slots::of_this_node(""));
    IS_ON.store(ctx.flags().is_cluster(), Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_read_as_the_server_writes_them() {
        let text = "07c3 127.0.0.1:30004@31004,h slave e7d1 0 14262 4 connected\n\
            e7d1 127.0.0.1:30001@31001,h myself,master - 0 0 1 connected 0 64-66 16383 [70->-07c3] [71-<-07c3]\n\
            6ec2 127.0.0.1:30002@31002,h master - 0 14263 2 connected 5461-10922\n";
        let slots = Slots::of_this_node(text);
        let known: Vec<usize> = (0..Slots::COUNT).filter(|slot| slots.0[slot / 64] >> (slot % 64) & 1 == 1).collect();
        assert_eq!(known, [0, 64, 65, 66, 71, 16_383]);
        let without = Slots::of_this_node(&text.replace(" [71-<-07c3]", ""));
        assert!(slots.exceed(&without) && !without.exceed(&slots) && !slots.exceed(&slots));
        let none = Slots::of_this_node("");
        assert!(!none.exceed(&slots));
        assert_eq!(Slots::of_this_node("x y myself - 0 0 1 connected 16384-99999999999 [5 -7 a-b"), none);
    }
}
