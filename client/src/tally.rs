//! A number of things under way, and a wait until there are none.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Notify;

/// Counts for as long as the [`Counted`] of each thing lives.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    count: AtomicUsize,
    none_left: Notify,
}

#[derive(Debug)]
pub(crate) struct Counted(Arc<Inner>);

impl Tally {
    pub(crate) fn add(&self) -> Counted {
        self.0.count.fetch_add(1, Ordering::AcqRel);
        Counted(Arc::clone(&self.0))
    }

    pub(crate) async fn until_none(&self) {
        loop {
            let mut none_left = std::pin::pin!(self.0.none_left.notified());
            none_left.as_mut().enable(); // before the look: what ends between the two is not missed
            if self.0.count.load(Ordering::Acquire) == 0 {
                return;
            }
            none_left.await;
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.0.count.load(Ordering::Acquire)
    }
}

impl Clone for Counted {
    fn clone(&self) -> Self {
        Tally(Arc::clone(&self.0)).add()
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.none_left.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn wait_ends_when_the_last_has_ended() {
        let tally = Tally::default();
        let (first, second) = (tally.add(), tally.add());
        let waiting = tokio::spawn({
            let tally = tally.clone();
            async move { tally.until_none().await }
        });
        drop(first);
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(second);
        waiting.await.unwrap();
        tally.until_none().await;
    }
}
