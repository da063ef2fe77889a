//! State that belongs to the server's main thread.
//!
//! The server calls a module on its main thread, and now and then from another one (a background thread frees values).
//! The module's state is not made for two threads, so it sits in a cell that opens on the main thread only. A fork
//! child counts as the main thread: it is a copy of it, alone in its process.
//!
//! Callbacks nest: deleting a key calls `unlinked` while the deleting command is still on the stack. A second
//! [`MainThread::with`] inside the first answers `None` instead of panicking.

use std::cell::{Cell, UnsafeCell};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The server's main thread, which never ends; 0 before [`adopt`].
static MAIN: AtomicUsize = AtomicUsize::new(0);

/// What tells the threads of a process apart, at the price of two instructions. A fork child keeps that of the thread that forked; the
/// kernel's thread id would change.
fn mark() -> usize {
    // SAFETY: it has no conditions, and its answer is a number or an address of this size on every system the module is built for.
    unsafe { pthread_self() }
}

/// Takes the calling thread as the server's main thread. Called once, by `load`.
pub(super) fn adopt() {
    MAIN.store(mark(), Ordering::Relaxed);
}

/// Is this the server's main thread (or the only thread of a fork child)?
pub(crate) fn is_current() -> bool {
    MAIN.load(Ordering::Relaxed) == mark()
}

// An unsigned long in glibc, a pointer in musl: both in one register on 64-bit Linux, and never 0 for a thread that lives.
unsafe extern "C" {
    fn pthread_self() -> usize;
}

/// A value for a `static` that only the main thread can reach.
pub(crate) struct MainThread<T> {
    value: UnsafeCell<Option<T>>,
    borrowed: Cell<bool>,
}

// SAFETY: both cells are touched only after `is_current` has answered true, so by one thread of the process.
unsafe impl<T> Sync for MainThread<T> {}

impl<T> MainThread<T> {
    /// An empty cell.
    pub(crate) const fn new() -> Self {
        Self { value: UnsafeCell::new(None), borrowed: Cell::new(false) }
    }

    /// Puts `value` in. Refused (`false`) on another thread, or while the cell is open.
    pub(crate) fn install(&self, value: T) -> bool {
        self.open(|slot| *slot = Some(value)).is_some()
    }

    /// Runs `body` on the value. `None` if the cell is empty, is open further up the stack, or if this is another
    /// thread.
    pub(crate) fn with<R>(&self, body: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.open(|slot| slot.as_mut().map(body)).flatten()
    }

    fn open<R>(&self, body: impl FnOnce(&mut Option<T>) -> R) -> Option<R> {
        if !is_current() {
            debug_assert!(false, "the module's state was asked for on another thread");
            return None;
        }
        if self.borrowed.replace(true) {
            return None;
        }
        let _close = Close(&self.borrowed);
        // SAFETY: on the main thread, and `borrowed` was false: no other reference to the value exists until `_close`
        // is dropped.
        let slot = unsafe { &mut *self.value.get() };
        Some(body(slot))
    }
}

/// Closes the cell again, also when the body panics.
struct Close<'a>(&'a Cell<bool>);

impl Drop for Close<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}
