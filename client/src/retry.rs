//! Trying again: what may be over a moment later is asked for again after a random pause, what will not be is told.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::in_place::leave_the_caller;
use crate::jitter::{Backoff, Jitter};
use crate::link::CallError;

const FIRST: Duration = Duration::from_millis(10);
const MOST: Duration = Duration::from_millis(500);

/// The tries of one operation.
#[derive(Debug)]
pub(crate) struct Tries {
    backoff: Backoff,
    until: Instant,
}

impl Tries {
    /// Tries for so long; a try that has begun by then is waited for.
    pub(crate) fn within(time: Duration) -> Self {
        Self { backoff: Backoff::new(FIRST, MOST), until: Instant::now() + time }
    }

    /// After a try that failed: ends when the next is due, on the client's thread. Fails with the error if there is to be none.
    pub(crate) async fn next(&mut self, jitter: &Jitter, error: CallError) -> Result<(), CallError> {
        if !error.is_passing() || Instant::now() >= self.until {
            return Err(error);
        }
        pause(&mut self.backoff, jitter).await;
        Ok(())
    }
}

/// The pauses of an operation whose end is somebody else's matter.
pub(crate) fn pauses() -> Backoff {
    Backoff::new(FIRST, MOST)
}

/// A pause, on the client's thread.
pub(crate) async fn pause(backoff: &mut Backoff, jitter: &Jitter) {
    // Boxed: it is rare, and what is usual is small then.
    Box::pin(async {
        leave_the_caller().await;
        sleep(backoff.next(jitter)).await;
    })
    .await;
}
