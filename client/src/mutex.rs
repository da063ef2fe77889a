//! Mutexes that are held for a moment only.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks it. No panic leaves what is behind one of ours half done, so a poisoned one is as good as another.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
