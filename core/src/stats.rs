//! Plain counters of what happened; the shell prints them.

/// Buckets of a [`Histogram`]: bucket `i` counts durations below 2^i ms, the last one everything longer.
pub const BUCKETS: usize = 24;

/// Counts since the server started. They only rise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Grants, handoffs included.
    pub grants: u64,
    /// Grants to a waiter.
    pub handoffs: u64,
    /// Holds given back by their owner.
    pub releases: u64,
    /// Successful RENEW.
    pub renewals: u64,
    /// RENEW of a hold that was lost.
    pub renewals_lost: u64,
    /// Holds that ended because their lease was over.
    pub expired: u64,
    /// Holds ended by an administrator.
    pub revoked: u64,
    /// Holds that were lost because something else happened to the key.
    pub removed: u64,
    /// Holds whose key the server evicted or expired, and which were put back.
    pub put_back: u64,
    /// Grants that could not be delivered.
    pub undelivered: u64,
    /// Waits that ended because their time was up.
    pub timed_out: u64,
    /// Waits that ended otherwise without a grant.
    pub wait_ended: u64,
    /// Tries answered nil.
    pub busy: u64,
    /// Requests refused with an error.
    pub refused: u64,
    /// How long granted waiters had waited.
    pub wait_ms: Histogram,
    /// How long holds lasted.
    pub hold_ms: Histogram,
}

/// A histogram in powers of two.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histogram([u64; BUCKETS]);

impl Histogram {
    /// Counts one duration.
    pub fn add_us(&mut self, us: u64) {
        let ms = us / 1000;
        let bucket = (u64::BITS - ms.leading_zeros()) as usize;
        if let Some(count) = self.0.get_mut(bucket.min(BUCKETS - 1)) {
            *count += 1;
        }
    }

    /// Counts per bucket: index `i` holds durations below 2^i ms and not below 2^(i-1) ms.
    #[must_use]
    pub fn buckets(&self) -> &[u64; BUCKETS] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_falls_below_its_power_of_two() {
        let mut histogram = Histogram::default();
        for us in [0, 999, 1000, 1999, 2000, 3_999_999_999_999] {
            histogram.add_us(us);
        }
        assert_eq!(histogram.buckets()[..3], [2, 2, 1]);
        assert_eq!(histogram.buckets()[BUCKETS - 1], 1);
    }
}
