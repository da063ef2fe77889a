//! Waiting, always with a bound. The only file of the tests that sleeps.

use std::thread::sleep;
use std::time::{Duration, Instant};

/// First and longest gap between two looks: short waits end quickly, long ones leave the processor to the server.
const GAP_MIN: Duration = Duration::from_millis(1);
const GAP_MAX: Duration = Duration::from_millis(10);

/// Waits until `condition` is true.
///
/// `what` completes the sentence "waited 5s in vain until ...".
///
/// # Panics
/// With that sentence, if the condition is still false after `within`.
#[track_caller]
pub fn wait_until(what: &str, within: Duration, mut condition: impl FnMut() -> bool) {
    wait_for(what, within, || condition().then_some(()));
}

/// Waits until `probe` yields a value, and returns it.
///
/// # Panics
/// If there is none after `within`.
#[track_caller]
pub fn wait_for<T>(what: &str, within: Duration, probe: impl FnMut() -> Option<T>) -> T {
    match poll(within, probe) {
        Some(value) => value,
        None => panic!("waited {within:?} in vain until {what}"),
    }
}

/// Looks until `probe` yields a value or the time is over. The last look is taken after the deadline, so a machine that
/// was busy for the whole time is not taken for a condition that never came.
pub fn poll<T>(within: Duration, mut probe: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + within;
    let mut gap = GAP_MIN;
    loop {
        let last_look = Instant::now() >= deadline;
        let found = probe();
        if found.is_some() || last_look {
            return found;
        }
        sleep(gap.min(deadline.saturating_duration_since(Instant::now())));
        gap = (gap * 2).min(GAP_MAX);
    }
}

/// Looks again and again for `during`, and wants `condition` true each time: for what must *not* happen yet.
///
/// # Panics
/// At the first look that finds it false.
#[track_caller]
pub fn holds_for(what: &str, during: Duration, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while start.elapsed() < during {
        assert!(condition(), "{what} should hold for {during:?}, and was false after {:?}", start.elapsed());
        sleep(GAP_MIN);
    }
}

/// Lets time go by, for what depends on nothing else: a lease that must have run out.
pub fn let_pass(duration: Duration) {
    sleep(duration);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn true_condition_returns_at_once() {
        let start = Instant::now();
        wait_until("it is true", Duration::from_secs(5), || true);
        assert!(start.elapsed() < Duration::from_secs(1));
    }

    #[test]
    fn late_value_is_returned() {
        let mut looks = 0;
        let value = wait_for("the third look", Duration::from_secs(5), || {
            looks += 1;
            (looks == 3).then_some(looks)
        });
        assert_eq!(value, 3);
    }

    #[test]
    fn false_condition_ends_after_the_deadline() {
        let start = Instant::now();
        assert_eq!(poll(Duration::from_millis(30), || None::<()>), None);
        assert!(start.elapsed() >= Duration::from_millis(30));
    }

    #[test]
    fn expired_deadline_still_gets_one_look() {
        assert_eq!(poll(Duration::ZERO, || Some(1)), Some(1));
    }
}
