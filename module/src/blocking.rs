//! Clients that wait in the server: which connection belongs to which waiter of the core.
//!
//! A waiting client passes through these states, each callback at most once:
//!
//! ```text
//! waiting ── finish(outcome) ──► unblocked ── on_reply: answered ──► on_free
//!    │                              └── the connection was gone: a grant is taken back ──► on_free
//!    ├── on_timeout (CLIENT UNBLOCK id TIMEOUT): answered nil ──► on_free
//!    └── on_disconnect (closed, CLIENT UNBLOCK id ERROR, demoted) ──► on_free
//! ```

use crate::ffi::blocking::{BlockedClient, block};
use crate::ffi::ctx::Ctx;
use crate::ffi::main_thread::MainThread;
use crate::ffi::reply;
use crate::state::with_table;
use crate::turn;
use flock_core::effect::WaitOutcome;
use flock_core::wait_queue::WaiterId;
use flock_core::wire::error::WireError;
use flock_core::{LockId, Token};
use std::collections::HashMap;
use std::num::NonZeroU64;

static WAITING: MainThread<Waiting> = MainThread::new();

struct Waiting {
    next: NonZeroU64,
    clients: HashMap<NonZeroU64, Client>,
    /// Grants on their way to a blocked client that nobody has been told of yet.
    untold: HashMap<Token, LockId>,
}

struct Client {
    /// Until it is unblocked.
    blocked: Option<BlockedClient>,
    waiter: WaiterId,
    /// Once the wait is over.
    outcome: Option<WaitOutcome>,
}

/// No clients. Once, while loading the module.
pub(crate) fn install() {
    WAITING.install(Waiting { next: NonZeroU64::MIN, clients: HashMap::new(), untold: HashMap::new() });
}

/// The number that the next blocked client will have.
pub(crate) fn next_number() -> u64 {
    WAITING.with(|waiting| waiting.next.get()).unwrap_or_default()
}

/// Blocks the calling client for a request that has just been queued under [`next_number`]. `false` if it cannot be blocked.
pub(crate) fn wait(ctx: &Ctx<'_>, waiter: WaiterId) -> bool {
    WAITING
        .with(|waiting| {
            let number = waiting.next;
            let Some(blocked) = block(ctx, number) else {
                return false;
            };
            waiting.next = number.checked_add(1).unwrap_or(NonZeroU64::MIN);
            let client = Client { blocked: Some(blocked), waiter, outcome: None };
            waiting.clients.insert(number, client);
            true
        })
        .unwrap_or(false)
}

/// How many clients wait or are about to be answered.
pub(crate) fn count() -> usize {
    WAITING.with(|waiting| waiting.clients.len()).unwrap_or_default()
}

/// The wait of a client is over: it is answered from the event loop. The only place that unblocks for an outcome.
pub(crate) fn finish(number: u64, outcome: WaitOutcome, lock: Option<LockId>) {
    let Some(number) = NonZeroU64::new(number) else { return };
    WAITING.with(|waiting| {
        if let Some(client) = waiting.clients.get_mut(&number)
            && let Some(blocked) = client.blocked.take()
        {
            client.outcome = Some(outcome);
            blocked.unblock();
            if let (WaitOutcome::Granted(token), Some(lock)) = (outcome, lock) {
                waiting.untold.insert(token, lock);
            }
        }
    });
}

/// An owner is told that it holds the lock under this token: by its blocked connection, or, asking again, by another one. From then on
/// the grant stands whatever becomes of the blocked one.
pub(crate) fn told(token: Token) {
    WAITING.with(|waiting| {
        if !waiting.untold.is_empty() {
            waiting.untold.remove(&token);
        }
    });
}

/// The client was unblocked and is still there.
pub(crate) fn on_reply(ctx: &Ctx<'_>, number: NonZeroU64) {
    let outcome = WAITING.with(|waiting| waiting.clients.get(&number).and_then(|client| client.outcome)).flatten();
    if let Some(outcome) = outcome {
        answer(ctx, outcome);
    }
}

/// CLIENT UNBLOCK id TIMEOUT.
pub(crate) fn on_timeout(ctx: &Ctx<'_>, number: NonZeroU64) {
    answer(ctx, give_up(number).unwrap_or(WaitOutcome::TimedOut));
}

/// The connection is gone, or was unblocked with an error that the server itself sends.
pub(crate) fn on_disconnect(number: NonZeroU64) {
    give_up(number);
}

/// The end of a blocked client. A grant that nobody was told of goes to the next in line.
pub(crate) fn on_free(number: NonZeroU64) {
    let untold = WAITING.with(|waiting| match waiting.clients.remove(&number)?.outcome? {
        WaitOutcome::Granted(token) => waiting.untold.remove(&token).map(|lock| (lock, token)),
        WaitOutcome::TimedOut | WaitOutcome::Ended(_) => None,
    });
    if let Some((lock, token)) = untold.flatten() {
        with_table(|table| table.undelivered(lock, token));
        turn::wake();
    }
}

/// The client stops waiting. Answers how its wait had ended before, if it had.
fn give_up(number: NonZeroU64) -> Option<WaitOutcome> {
    let (waiter, blocked, outcome) = WAITING
        .with(|waiting| {
            let client = waiting.clients.get_mut(&number)?;
            Some((client.waiter, client.blocked.take(), client.outcome))
        })
        .flatten()?;
    if let Some(blocked) = blocked {
        with_table(|table| table.left(waiter));
        blocked.unblock();
        turn::wake();
    }
    outcome
}

fn answer(ctx: &Ctx<'_>, outcome: WaitOutcome) {
    match outcome {
        WaitOutcome::Granted(token) => {
            told(token);
            reply::integer(ctx, i64::try_from(token.get()).unwrap_or(i64::MAX));
        }
        WaitOutcome::TimedOut => reply::nil(ctx),
        WaitOutcome::Ended(reason) => reply::error(ctx, WireError::from(reason).to_string().as_bytes()),
    }
}
