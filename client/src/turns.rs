//! Whose turn it is to send a request to a server, of those that may be many: so the others, the renewals above all, find room.
//!
//! What is with its caller may stay there unpolled, and keep its turn: so these have a number of their own. Who finds none moves to the
//! client's thread, where everybody goes on.

use tokio::sync::{Semaphore, SemaphorePermit};

use crate::in_place::{is_with_caller, leave_the_caller};

/// What is asked for at the same time, and what is given back. More would make the renewals wait: they go over the same connection,
/// behind what was sent before, and the server answers about a hundred of these a millisecond.
const ASKED_AT_ONCE: usize = 256;
const ERRANDS_AT_ONCE: usize = 256;
const IN_PLACE_AT_ONCE: usize = 512;

/// The turns at one server.
#[derive(Debug)]
pub(crate) struct Turns {
    in_place: Semaphore,
    asking: Semaphore,
    returning: Semaphore,
}

impl Turns {
    pub(crate) fn new() -> Self {
        Self {
            in_place: Semaphore::new(IN_PLACE_AT_ONCE),
            asking: Semaphore::new(ASKED_AT_ONCE),
            returning: Semaphore::new(ERRANDS_AT_ONCE),
        }
    }

    /// A turn with the caller, if there is one.
    pub(crate) fn in_place(&self) -> Option<SemaphorePermit<'_>> {
        self.in_place.try_acquire().ok()
    }

    /// A turn to ask for a lock, on the client's thread.
    pub(crate) async fn to_ask(&self) -> Option<SemaphorePermit<'_>> {
        self.asking.acquire().await.ok()
    }

    /// A turn to give one back. Always one: the semaphores are never closed.
    pub(crate) async fn to_return(&self) -> Option<SemaphorePermit<'_>> {
        if is_with_caller() {
            if let Some(turn) = self.in_place() {
                return Some(turn);
            }
            leave_the_caller().await;
        }
        self.returning.acquire().await.ok()
    }
}
