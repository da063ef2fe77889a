//! The clock that beliefs are judged by: `CLOCK_BOOTTIME`, which counts suspended time and knows no steps.
//!
//! `std::time::Instant` stops while the machine sleeps: a lease would seem to last that much longer. The seam is one function, so that
//! tests can set the time.

use std::time::Duration;

use flock_core::{Millis, Time};
use rustix::time::{ClockId, clock_gettime};

/// Nothing smaller is promised between two clocks that run for one lease.
const MARGIN_US_MIN: u64 = 20_000;

/// Longer is taken for a mistake: what is added to it must not leave the clocks' range.
const DURATION_MAX: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// As on a machine that has run for a while.
#[cfg(feature = "testing")]
const RUNTIME_STARTS_US: u64 = 1_000_000_000;

#[derive(Clone, Debug)]
pub(crate) enum Clock {
    Boottime,
    /// The time of a runtime, which may be paused.
    #[cfg(feature = "testing")]
    Runtime {
        runtime: tokio::runtime::Handle,
        start: tokio::time::Instant,
        faster_ppm: i32,
    },
    #[cfg(test)]
    Set(std::sync::Arc<std::sync::atomic::AtomicU64>),
}

impl Clock {
    /// The clock of the current runtime; panics outside one.
    #[cfg(feature = "testing")]
    pub(crate) fn of_runtime() -> Self {
        let (runtime, start) = (tokio::runtime::Handle::current(), tokio::time::Instant::now());
        Self::Runtime { runtime, start, faster_ppm: 0 }
    }

    /// The same clock, but it runs faster by so many millionths.
    #[cfg(feature = "testing")]
    pub(crate) fn at_rate(mut self, ppm: i32) -> Self {
        if let Self::Runtime { faster_ppm, .. } = &mut self {
            *faster_ppm = ppm;
        }
        self
    }

    pub(crate) fn now(&self) -> Time {
        match self {
            Self::Boottime => {
                let now = clock_gettime(ClockId::Boottime);
                let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
                let nanos = u64::try_from(now.tv_nsec).unwrap_or(0);
                Time::from_us(seconds * 1_000_000 + nanos / 1000)
            }
            #[cfg(feature = "testing")]
            Self::Runtime { runtime, start, faster_ppm } => {
                let _on_any_thread = runtime.enter();
                let us = i128::try_from(start.elapsed().as_micros()).unwrap_or(i128::MAX);
                let us = us.saturating_add(us.saturating_mul((*faster_ppm).into()) / 1_000_000);
                Time::from_us(u64::try_from(us).unwrap_or(0).saturating_add(RUNTIME_STARTS_US))
            }
            #[cfg(test)]
            Self::Set(us) => Time::from_us(us.load(std::sync::atomic::Ordering::Relaxed)),
        }
    }

    /// How long from now until `at`; zero if it has passed.
    pub(crate) fn until(&self, at: Time) -> Duration {
        Duration::from_micros(at.us_since(self.now()))
    }
}

/// Until when a grant of `lasts` may be believed that the server made at `sent` or later: the server's own count ends after that.
///
/// The margin is for two clocks that run a little differently: 1 % of the time, at least 20 ms, and never more than half of it.
pub(crate) fn believed_until(sent: Time, lasts: Millis) -> Time {
    let lasts_us = lasts.as_us();
    let margin_us = (lasts_us / 100).max(MARGIN_US_MIN).min(lasts_us / 2);
    Time::from_us(sent.as_us().saturating_add(lasts_us - margin_us))
}

/// Refuses a setting that makes no sense as a duration, in the words of an error.
pub(crate) fn check(name: &str, duration: Duration) -> Result<(), String> {
    if duration.is_zero() {
        return Err(format!("{name} is zero"));
    }
    if duration > DURATION_MAX {
        return Err(format!("{name} is longer than a year"));
    }
    Ok(())
}

/// A duration as the server counts it: whole milliseconds, rounded up.
pub(crate) fn millis(duration: Duration) -> Millis {
    let ms = duration.as_nanos().div_ceil(1_000_000);
    Millis(u32::try_from(ms).unwrap_or(u32::MAX))
}

pub(crate) fn duration(millis: Millis) -> Duration {
    Duration::from_millis(millis.as_ms().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn belief_ends_before_the_lease() {
        let ends = |lease| believed_until(Time::from_us(0), Millis(lease)).as_us();
        assert_eq!(ends(30_000), 29_700_000);
        assert_eq!(ends(1000), 980_000);
        assert_eq!(ends(10), 5000);
        assert_eq!(ends(1), 500);
    }

    #[test]
    fn part_of_a_millisecond_is_rounded_up() {
        assert_eq!(millis(Duration::from_micros(1)), Millis(1));
        assert_eq!(millis(Duration::from_millis(7)), Millis(7));
        assert_eq!(millis(Duration::MAX), Millis(u32::MAX));
    }

    #[test]
    fn time_left_follows_the_clock() {
        let us = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(5000));
        let clock = Clock::Set(us.clone());
        assert_eq!(clock.until(Time::from_us(7000)), Duration::from_millis(2));
        us.store(9000, std::sync::atomic::Ordering::Relaxed); // as after a sleep of the machine
        assert_eq!(clock.until(Time::from_us(7000)), Duration::ZERO);
    }

    #[test]
    fn boottime_runs() {
        let clock = Clock::Boottime;
        let before = clock.now();
        std::thread::sleep(Duration::from_millis(2));
        assert!(clock.now() > before);
        assert_eq!(clock.until(before), Duration::ZERO);
    }
}
