//! One turn of the event loop: what is due without a request is performed here, and only here.
//!
//! The server calls it in BeforeSleep: an execution unit of its own, outside any command, in which replicating is sound as long as
//! this node is a primary, replica traffic is not to be avoided (a pause, a failover), and a client's write would not be refused (an
//! old primary that lost its replicas must not go on granting to its queue). Otherwise everything waits.

use crate::ffi::ctx::{self, Ctx};
use crate::ffi::key::{Key, KeyState, Mode};
use crate::ffi::main_thread::MainThread;
use crate::ffi::string::ServerString;
use crate::ffi::timer_fd;
use crate::perform::{Listeners, Shell};
use crate::state::{self, with_table};
use crate::{cluster, propagation, role};
use flock_core::effect::Notice;
use flock_core::refusal::{EndReason, LossReason};
use flock_core::table::Due;
use flock_core::{Effect, LockId, Millis, Name, Place, Time};

/// How long one turn may work before clients are served again. A burst of leases that end together takes several turns.
const TURN_US: u64 = 1_000;
/// The C library merges small freed blocks when it must, all at once: after a burst of ended leases that stops the server for longer
/// than all of the turns. Asking it for a large block makes it merge those of one turn.
const LARGE_BLOCK_BYTES: usize = 128 << 10;
/// The clock is read once per so many things done.
const CLOCK_EVERY: u32 = 16;
/// A lease of a slot that is not this node's is looked at again after this.
const DEFER: Millis = Millis(100);
/// When replica traffic is to be avoided, look again after this.
const RETRY_US: u64 = 10_000;

/// What has to be done at the next opportunity.
#[derive(Default)]
struct Agenda {
    /// Look at what is due, whatever the timer says.
    look: bool,
    /// A rewrite child was born: announce a mark, so that the file it writes is followed by one.
    mark: bool,
    /// The lateness of what was performed last, and at worst.
    lateness_us: u64,
    lateness_max_us: u64,
}

static AGENDA: MainThread<Agenda> = MainThread::new();

/// An empty agenda. Once, while loading the module.
pub(crate) fn install() {
    AGENDA.install(Agenda::default());
}

/// A fresh mark must be announced.
pub(crate) fn announce_mark_soon() {
    AGENDA.with(|agenda| agenda.mark = true);
}

/// What is due must be looked at in this turn, which is not over yet.
pub(crate) fn look_soon() {
    AGENDA.with(|agenda| agenda.look = true);
}

/// As [`look_soon`], from a callback that may come after this turn's BeforeSleep: makes another turn, if there is anything to do.
pub(crate) fn wake() {
    if with_table(|table| table.next_deadline()).flatten() == Some(Time::ZERO) {
        timer_fd::arm(0);
    }
}

/// How late due things were performed: the last one, and the worst, in microseconds.
pub(crate) fn lateness_us() -> (u64, u64) {
    AGENDA.with(|agenda| (agenda.lateness_us, agenda.lateness_max_us)).unwrap_or_default()
}

/// Performs what is due.
pub(crate) fn run(ctx: &Ctx<'_>) {
    let Some((next, is_new)) = with_table(|table| (table.next_deadline(), !table.counter().is_seeded())) else {
        return;
    };
    let (mark, look) = AGENDA.with(|agenda| (agenda.mark, std::mem::take(&mut agenda.look))).unwrap_or_default();
    let mark = mark && !cluster::is_exporting();
    let fired = timer_fd::take_fired();
    if !(is_new || mark || look || fired || next == Some(Time::ZERO)) {
        arm(next);
        return;
    }
    if !role::is_primary(ctx) {
        return;
    }
    if ctx.avoid_replica_traffic() || refuses_writes(ctx) {
        role::begin(ctx);
        timer_fd::arm(state::now().as_us() + RETRY_US);
        return;
    }
    if !role::decides(ctx) {
        return;
    }
    if mark {
        AGENDA.with(|agenda| agenda.mark = false);
        if let Some(mark) = with_table(|table| table.announce_mark()) {
            Shell::in_turn(ctx).announce_mark(mark);
        }
    } else if look
        && propagation::take_kept_back()
        && let Some(mark) = with_table(|table| table.counter().mark())
    {
        Shell::in_turn(ctx).announce_mark(mark);
    }
    perform_due(ctx);
    arm(with_table(|table| table.next_deadline()).flatten());
}

/// Whether a client's write would be refused now. A cluster node can only tell for keys of its own: for one it holds.
fn refuses_writes(ctx: &Ctx<'_>) -> bool {
    let name = with_table(|table| table.any_name().map(|name| ServerString::new(name.key()))).flatten();
    name.is_some_and(|name| ctx.refuses_writes(name.as_str()))
}

fn perform_due(ctx: &Ctx<'_>) {
    let start = state::now();
    let mut now = start;
    for done in 1u32.. {
        let overdue = with_table(|table| table.next_deadline()).flatten();
        match with_table(|table| table.advance(now)) {
            None | Some(Due::Nothing) => return,
            Some(Due::Done(decision)) => perform_keyless_in_db(ctx, decision),
            Some(Due::Look(name, lock)) => look(&name, lock, now),
        }
        note_lateness(overdue, now);
        if done.is_multiple_of(CLOCK_EVERY) {
            now = state::now();
            if now.us_since(start) > TURN_US {
                drop(std::hint::black_box(Vec::<u8>::with_capacity(LARGE_BLOCK_BYTES)));
                timer_fd::arm(0); // clients first, then the rest
                return;
            }
        }
    }
}

fn note_lateness(deadline: Option<Time>, now: Time) {
    if let Some(deadline) = deadline.filter(|deadline| *deadline != Time::ZERO) {
        AGENDA.with(|agenda| {
            agenda.lateness_us = now.us_since(deadline);
            agenda.lateness_max_us = agenda.lateness_max_us.max(agenda.lateness_us);
        });
    }
}

/// A session's cut lease must be replicated under its key; everything else in such a decision is keyless.
fn perform_keyless_in_db(ctx: &Ctx<'_>, decision: flock_core::Decision<()>) {
    let name = decision.lock.and_then(|lock| with_table(|table| table.name(lock).cloned()).flatten());
    let Some(name) = name else {
        if !decision.effects.iter().any(|effect| tells_of_a_move(ctx, effect)) {
            Shell::in_turn(ctx).perform_keyless(decision);
        }
        return;
    };
    let Some(ctx) = ctx::detached(i32::from(name.db())) else {
        return;
    };
    let key_name = ServerString::new(name.key());
    let key = Key::open(&ctx, key_name.as_str(), Mode::Read);
    Shell::in_turn(&ctx).perform(key, key_name.as_str(), decision);
}

/// Whether a holder would be told that its lock is lost, when its slot has moved and took the lock along.
fn tells_of_a_move(ctx: &Ctx<'_>, effect: &Effect) -> bool {
    let removed = |notice: &Notice| matches!(notice, Notice::Lost { reason: LossReason::Removed, .. });
    matches!(effect, Effect::Tell { name, notice, .. } if removed(notice) && cluster::has_moved(ctx, name))
}

/// Looks at one key: ends what is over there and serves who is next.
fn look(name: &Name, expected: Option<LockId>, now: Time) {
    let Some(ctx) = ctx::detached(i32::from(name.db())) else {
        return;
    };
    let key_name = ServerString::new(name.key());
    // The key may have gone because its slot moves: whoever waits here would be granted what is held there. Or it may be on its way
    // here: its lease is not this node's to end before the slot is.
    if let Some(reason) = cluster::why_not_served(&ctx, key_name.as_str()) {
        dismiss(&ctx, name, expected, reason);
        if let Some(lock) = expected {
            with_table(|table| table.defer(now, lock, DEFER));
        }
        return;
    }
    let key = Key::open(&ctx, key_name.as_str(), Mode::Write);
    let lock = match key.state() {
        KeyState::Empty => None,
        KeyState::Lock(handle) => Some(state::lock_of(handle)),
        KeyState::OtherType => {
            drop(key);
            if let Some(gone) = expected {
                with_table(|table| table.removed(gone, LossReason::Removed, true));
            }
            dismiss(&ctx, name, None, EndReason::WrongType);
            return;
        }
    };
    let place = Place { db: name.db(), key: name.key(), lock };
    let decision = with_table(|table| table.look(now, place, expected, &mut Listeners(&ctx)));
    if let Some(decision) = decision {
        Shell::in_turn(&ctx).perform(key, key_name.as_str(), decision);
    }
}

/// Ends the waits under a name that cannot be granted here.
fn dismiss(ctx: &Ctx<'_>, name: &Name, lock: Option<LockId>, reason: EndReason) {
    let decision = with_table(|table| {
        let queues = table.queues();
        let queue = lock.and_then(|lock| queues.of_lock(lock)).or_else(|| queues.of_name(name.db(), name.key()))?;
        Some(table.dismiss(queue, reason))
    });
    if let Some(decision) = decision.flatten() {
        Shell::in_turn(ctx).perform_keyless(decision);
    }
}

fn arm(next: Option<Time>) {
    if let Some(next) = next {
        timer_fd::arm(next.as_us());
    }
}
