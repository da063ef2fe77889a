//! The times of one hold, in 16 bytes.

use crate::lock::Mode;
use crate::time::{Millis, Time};

/// When a hold ends and when it began, how long its lease is, and its mode. There is one for every held lock, so it is packed:
///
/// | word | bits | |
/// |---|---|---|
/// | 0 | 9..64 | the deadline in microseconds: 1141 years; all ones are [`Time::NEVER`] |
/// | 0 | 8 | set if shared |
/// | 0 | 0..8 | the beginning in milliseconds, upper 8 bits of 40: 34 years; all ones are [`Time::NEVER`] |
/// | 1 | 32..64 | its lower 32 bits |
/// | 1 | 0..32 | the lease in milliseconds |
///
/// The beginning is for statistics and is rounded down; the rest is exact.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tenure([u64; 2]);

const DEADLINE_SHIFT: u32 = 9;
const DEADLINE_NEVER: u64 = Time::LAST.as_us() + 1;
const SHARED: u64 = 1 << 8;
const GRANTED_NEVER: u64 = (1 << 40) - 1;
const LOW_32: u64 = u32::MAX as u64;

impl Tenure {
    pub(crate) fn new(deadline: Time, granted: Time, lease: Millis, mode: Mode) -> Self {
        let mut tenure = Self([0, u64::from(lease.as_ms())]);
        tenure.set_deadline(deadline);
        tenure.set_granted(granted);
        tenure.set_mode(mode);
        tenure
    }

    pub(crate) fn deadline(self) -> Time {
        match self.0[0] >> DEADLINE_SHIFT {
            DEADLINE_NEVER => Time::NEVER,
            us => Time::from_us(us),
        }
    }

    pub(crate) fn set_deadline(&mut self, deadline: Time) {
        let us = if deadline == Time::NEVER { DEADLINE_NEVER } else { deadline.min(Time::LAST).as_us() };
        self.0[0] = (us << DEADLINE_SHIFT) | (self.0[0] & ((1 << DEADLINE_SHIFT) - 1));
    }

    pub(crate) fn granted(self) -> Time {
        match ((self.0[0] & 0xff) << 32) | (self.0[1] >> 32) {
            GRANTED_NEVER => Time::NEVER,
            ms => Time::from_us(ms * 1000),
        }
    }

    pub(crate) fn set_granted(&mut self, granted: Time) {
        let ms = if granted == Time::NEVER { GRANTED_NEVER } else { (granted.as_us() / 1000).min(GRANTED_NEVER - 1) };
        self.0[0] = (self.0[0] & !0xff) | (ms >> 32);
        self.0[1] = (ms << 32) | (self.0[1] & LOW_32);
    }

    pub(crate) fn lease(self) -> Millis {
        Millis(u32::try_from(self.0[1] & LOW_32).unwrap_or(u32::MAX))
    }

    pub(crate) fn set_lease(&mut self, lease: Millis) {
        self.0[1] = (self.0[1] & !LOW_32) | u64::from(lease.as_ms());
    }

    pub(crate) fn mode(self) -> Mode {
        if self.0[0] & SHARED == 0 { Mode::Exclusive } else { Mode::Shared }
    }

    pub(crate) fn set_mode(&mut self, mode: Mode) {
        match mode {
            Mode::Exclusive => self.0[0] &= !SHARED,
            Mode::Shared => self.0[0] |= SHARED,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_is_kept_whatever_the_others_are() {
        let times = [0, 1_000, 12_345_000, 1000 << 38].map(Time::from_us);
        let times = times.into_iter().chain([Time::NEVER]);
        for deadline in times.clone() {
            for granted in times.clone() {
                for lease in [0, 1, u32::MAX].map(Millis) {
                    for mode in [Mode::Exclusive, Mode::Shared] {
                        let whole = Tenure::new(deadline, granted, lease, mode);
                        let mut changed = Tenure::new(Time::NEVER, Time::NEVER, Millis(u32::MAX), Mode::Shared);
                        changed.set_mode(mode);
                        changed.set_lease(lease);
                        changed.set_granted(granted);
                        changed.set_deadline(deadline);
                        for tenure in [whole, changed] {
                            assert_eq!(tenure.deadline(), deadline);
                            assert_eq!(tenure.granted(), granted);
                            assert_eq!((tenure.lease(), tenure.mode()), (lease, mode));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_deadline_is_exact_to_the_microsecond_and_a_beginning_to_the_millisecond() {
        let tenure = Tenure::new(Time::from_us(1_234_567), Time::from_us(1_234_567), Millis(7), Mode::Exclusive);
        assert_eq!(tenure.deadline(), Time::from_us(1_234_567));
        assert_eq!(tenure.granted(), Time::from_us(1_234_000));
    }

    #[test]
    fn a_beginning_too_late_to_be_kept_is_still_a_beginning() {
        let tenure = Tenure::new(Time::NEVER, Time::LAST, Millis(7), Mode::Exclusive);
        assert!(tenure.granted() < Time::NEVER);
    }
}
