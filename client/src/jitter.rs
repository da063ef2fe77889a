//! Random delays, so that clients which were started, cut off or refused together do not come back together.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A splitmix64 generator; its randomness need be no better than that.
#[derive(Debug)]
pub(crate) struct Jitter(AtomicU64);

impl Jitter {
    pub(crate) fn new(seed: u64) -> Self {
        Self(AtomicU64::new(seed))
    }

    fn next(&self) -> u64 {
        const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
        let mut word = self.0.fetch_add(STEP, Ordering::Relaxed).wrapping_add(STEP);
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }

    /// From zero up to `most`, exclusive.
    pub(crate) fn up_to(&self, most: Duration) -> Duration {
        let most_us = u64::try_from(most.as_micros()).unwrap_or(u64::MAX);
        Duration::from_micros(self.next().checked_rem(most_us).unwrap_or(0))
    }

    /// Between three quarters of `about` and five quarters.
    pub(crate) fn around(&self, about: Duration) -> Duration {
        about * 3 / 4 + self.up_to(about / 2)
    }
}

/// Full jitter over a ceiling that doubles: the n-th delay is anywhere from zero to `first * 2^n`, and at most `most`.
#[derive(Clone, Debug)]
pub(crate) struct Backoff {
    first: Duration,
    most: Duration,
    ceiling: Duration,
}

impl Backoff {
    pub(crate) const fn new(first: Duration, most: Duration) -> Self {
        Self { first, most, ceiling: first }
    }

    pub(crate) fn next(&mut self, jitter: &Jitter) -> Duration {
        let delay = jitter.up_to(self.ceiling);
        self.ceiling = (self.ceiling * 2).min(self.most);
        delay
    }

    pub(crate) fn reset(&mut self) {
        self.ceiling = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_stay_in_their_bounds() {
        let jitter = Jitter::new(1);
        let second = Duration::from_secs(1);
        let mut backoff = Backoff::new(second / 100, second);
        for _ in 0..1000 {
            assert!(jitter.up_to(second) < second);
            assert!((second * 3 / 4..second * 5 / 4).contains(&jitter.around(second)));
            assert!(backoff.next(&jitter) < second);
        }
        backoff.reset();
        assert!(backoff.next(&jitter) < second / 100);
        assert_eq!(jitter.up_to(Duration::ZERO), Duration::ZERO);
    }
}
