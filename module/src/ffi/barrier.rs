//! The wall between a panic and the server.
//!
//! A panic that reached C would abort the server. So every function the server can call runs its body in [`barrier`],
//! which turns a panic into a given fallback, counts it, and writes one log line per kind of callback (a broken
//! callback in a loop must not fill the disk). After a panic the module's state is as the panic left it: plan first,
//! change last.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::ctx::{LogLevel, log_without_ctx};

/// Where the server called us.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Callback {
    Load,
    Command,
    Reply,
    Timeout,
    Disconnect,
    FreeWaiter,
    ServerEvent,
    ClusterMessage,
    KeyspaceEvent,
    Timer,
    RdbLoad,
    RdbSave,
    AofRewrite,
    MemUsage,
    Digest,
    Free,
    Unlink,
    AuxSave,
    AuxLoad,
    Config,
    Info,
}

static CAUGHT: AtomicU64 = AtomicU64::new(0);
/// One bit per [`Callback`] that has had its log line.
static LOGGED: AtomicU32 = AtomicU32::new(0);
/// Where the last panic started; the panic itself does not carry it.
static PLACE: Mutex<String> = Mutex::new(String::new());

/// How many panics were caught since the module was loaded. Anything but 0 is a bug worth a report.
pub(crate) fn panics_caught() -> u64 {
    CAUGHT.load(Ordering::Relaxed)
}

/// Runs `body`, the whole of a callback; answers `fallback` if it panics.
pub(super) fn barrier<R>(callback: Callback, fallback: R, body: impl FnOnce() -> R) -> R {
    let guarded = || {
        #[cfg(feature = "planted-panics")]
        planted::panic_if_its_turn(callback);
        body()
    };
    match catch_unwind(AssertUnwindSafe(guarded)) {
        Ok(answer) => answer,
        Err(payload) => {
            report(callback, payload.as_ref());
            // Never dropped: dropping a foreign payload could panic again, outside the wall. A few bytes per bug.
            std::mem::forget(payload);
            fallback
        }
    }
}

/// Makes panics remember their place instead of writing to the server's standard error.
pub(super) fn install_panic_hook() {
    std::panic::set_hook(Box::new(|info| {
        if let Some(location) = info.location() {
            *PLACE.lock().unwrap_or_else(PoisonError::into_inner) = location.to_string();
        }
    }));
}

#[cold]
fn report(callback: Callback, payload: &(dyn Any + Send)) {
    CAUGHT.fetch_add(1, Ordering::Relaxed);
    let bit = 1 << (callback as u32);
    if LOGGED.fetch_or(bit, Ordering::Relaxed) & bit != 0 {
        return;
    }
    let text = match payload.downcast_ref::<&str>() {
        Some(text) => text,
        None => payload.downcast_ref::<String>().map_or("no message", String::as_str),
    };
    let place = PLACE.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let message = format!(
        "a bug was caught in the {callback:?} callback, the server goes on: {text} ({place}). \
         Further ones of this kind are only counted."
    );
    log_without_ctx(LogLevel::Warning, &message);
}

/// Panics on purpose, for the tests of this wall; never in the library that is shipped.
///
/// `FLOCK_PLANTED_PANIC=Unlink:3` in the server's environment makes the third call of that kind of callback panic before it does
/// anything.
#[cfg(feature = "planted-panics")]
mod planted {
    use super::Callback;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    struct Plan {
        kind: String,
        turn: u64,
    }

    static PLAN: OnceLock<Option<Plan>> = OnceLock::new();
    static CALLS: AtomicU64 = AtomicU64::new(0);

    #[allow(clippy::panic, reason = "this is what it is for")]
    pub(super) fn panic_if_its_turn(callback: Callback) {
        let Some(plan) = PLAN.get_or_init(plan) else { return };
        if format!("{callback:?}") == plan.kind && CALLS.fetch_add(1, Ordering::Relaxed) + 1 == plan.turn {
            panic!("planted");
        }
    }

    fn plan() -> Option<Plan> {
        let text = std::env::var("FLOCK_PLANTED_PANIC").ok()?;
        let (kind, turn) = text.split_once(':')?;
        Some(Plan { kind: kind.to_owned(), turn: turn.parse().ok()? })
    }
}
