//! Which of many numbered things is due first.
//!
//! A four-ary heap of deadlines with a table from number to place. Made for leases: they are mostly equal in length, so that a new
//! one belongs at the end (one comparison); renewed often, which costs nothing here (a later deadline is noted when the old one
//! comes up); and given back before they end, which removes the entry, so that memory follows what is held.
//!
//! An entry is 8 bytes: a number, and a time in steps of 1.024 ms *modulo 2^32* (50 days). Entries of one heap must lie within 25
//! days of each other: then their order is defined, and the earliest, whose full time is kept, gives all others theirs. They do: none
//! is further ahead than [`DURATION_MAX`], and whatever has been overdue for days when another is added (nobody may end anything in a
//! pause or on a replica, and a suspended machine ends nothing) is due from then on.

use crate::paged::Pages;
use crate::time::{Millis, Time};

/// The longest duration a deadline may lie ahead: 10 days.
pub const DURATION_MAX: Millis = Millis(10 * 24 * 3600 * 1000);

/// log2 of a step in microseconds.
const STEP_SHIFT: u32 = 10;
/// What is overdue for longer is brought forward: 10 days.
const OVERDUE_MAX_STEPS: u64 = (10 * 24 * 3600 * 1_000_000) >> STEP_SHIFT;
/// Children per node: shallower than a binary heap, and four entries share a cache line.
const ARITY: usize = 4;
/// An empty heap keeps memory up to this size.
const KEPT_BYTES: usize = 16 * 1024;
/// What one deadline takes: its entry, and its number's place.
pub(crate) const ENTRY_BYTES: usize = size_of::<Entry>() + size_of::<u32>();
/// Not in the heap.
const ABSENT: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Entry {
    step: u32,
    number: u32,
}

impl Entry {
    fn is_before(self, other: Self) -> bool {
        self.step.wrapping_sub(other.step) > u32::MAX / 2
    }
}

/// Deadlines of numbered things, one each.
#[derive(Clone, Debug, Default)]
pub struct Deadlines {
    heap: Pages<Entry>,
    /// From number to place in the heap.
    places: Pages<u32>,
    /// Where the next [`Deadlines::sweep`] goes on, downwards.
    swept: usize,
    /// The first entry's time in steps, in full.
    first_step: u64,
}

impl Deadlines {
    /// How many things have a deadline.
    #[must_use]
    pub fn len(&self) -> usize {
        self.heap.len()
    }

    /// Whether nothing has a deadline.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }

    /// `number` is due at `at`. If it was due earlier so far, the earlier time stays the hint: [`Deadlines::first`] may name a thing
    /// too early (the caller knows better and calls [`Deadlines::postpone`]), never too late. A time that has passed counts as `now`, and
    /// one beyond the longest duration as the end of that.
    pub fn set(&mut self, number: u32, at: Time, now: Time) {
        self.bring_forward(now);
        let step = step_of(at.min(now.after(DURATION_MAX))).max(step_before(now));
        let entry = Entry { step: low(step), number };
        match self.place_of(number) {
            None => {
                if self.heap.is_empty() {
                    self.first_step = step;
                }
                self.note_place(number, self.heap.len());
                self.heap.push(entry);
                self.sift_up(self.heap.len() - 1);
            }
            Some(place) => {
                if self.heap.get(place).is_some_and(|current| entry.is_before(*current)) {
                    if place == 0 {
                        self.first_changes_to(entry);
                    }
                    self.put(place, entry);
                    self.sift_up(place);
                }
            }
        }
    }

    /// `number` is due at `at`, which is later than noted.
    pub fn postpone(&mut self, number: u32, at: Time, now: Time) {
        self.remove(number);
        self.set(number, at, now);
    }

    /// `number` has no deadline any more.
    pub fn remove(&mut self, number: u32) {
        let Some(place) = self.place_of(number) else { return };
        self.note_absent(number);
        let Some(last) = self.heap.pop() else { return };
        if place == self.heap.len() {
            // It was the last itself.
            if place == 0 {
                self.give_back();
            }
            return;
        }
        if place == 0 {
            self.first_changes_to(last);
        }
        self.put(place, last);
        self.sift_up(place);
        self.sift_down(place);
    }

    /// The first deadline (rounded up to a step, or too early after [`Deadlines::set`] with a later time) and whose it is.
    #[must_use]
    pub fn first(&self) -> Option<(Time, u32)> {
        let first = self.heap.get(0)?;
        Some((Time::from_us(self.first_step << STEP_SHIFT), first.number))
    }

    /// Looks at a few entries, and drops those of things that need none. Called for each thing that stops to need one while those
    /// are more than the others, it keeps up with them.
    pub fn sweep(&mut self, is_needed: impl Fn(u32) -> bool) {
        for _ in 0..ARITY {
            let Some(place) = self.swept.min(self.heap.len()).checked_sub(1).or(self.heap.len().checked_sub(1)) else {
                return;
            };
            self.swept = place;
            if let Some(number) = self.heap.get(place).map(|entry| entry.number).filter(|number| !is_needed(*number)) {
                self.remove(number);
            }
        }
    }

    /// Nothing needs its entry any more: the memory goes back, unless it is little.
    pub fn give_back(&mut self) {
        if self.heap_bytes() > KEPT_BYTES {
            *self = Self::default();
        }
    }

    /// Bytes allocated.
    #[must_use]
    pub fn heap_bytes(&self) -> usize {
        self.heap.heap_bytes() + self.places.heap_bytes()
    }

    /// What was overdue for days is due now: no order is lost among the others, so the heap stays one.
    #[inline]
    fn bring_forward(&mut self, now: Time) {
        let due = step_before(now);
        if due > self.first_step.saturating_add(OVERDUE_MAX_STEPS) {
            self.bring_all_forward(due);
        }
    }

    #[cold]
    fn bring_all_forward(&mut self, due: u64) {
        let first = low(self.first_step);
        for place in 0..self.heap.len() {
            if let Some(entry) = self.heap.get_mut(place) {
                let at = self.first_step.saturating_add(u64::from(entry.step.wrapping_sub(first)));
                entry.step = low(at.max(due));
            }
        }
        self.first_step = due;
    }

    fn sift_up(&mut self, mut place: usize) {
        let Some(entry) = self.heap.get(place).copied() else {
            return;
        };
        while place > 0 {
            let parent = (place - 1) / ARITY;
            let Some(above) = self.heap.get(parent).copied() else {
                break;
            };
            if !entry.is_before(above) {
                break;
            }
            if parent == 0 {
                self.first_changes_to(entry);
            }
            self.put(place, above);
            place = parent;
        }
        self.put(place, entry);
    }

    fn sift_down(&mut self, mut place: usize) {
        let Some(entry) = self.heap.get(place).copied() else {
            return;
        };
        loop {
            let first_child = place * ARITY + 1;
            let mut least: Option<(usize, Entry)> = None;
            for child in first_child..first_child + ARITY {
                let Some(candidate) = self.heap.get(child).copied() else {
                    break;
                };
                if least.is_none_or(|(_, current)| candidate.is_before(current)) {
                    least = Some((child, candidate));
                }
            }
            match least {
                Some((child, below)) if below.is_before(entry) => {
                    if place == 0 {
                        self.first_changes_to(below);
                    }
                    self.put(place, below);
                    place = child;
                }
                _ => break,
            }
        }
        self.put(place, entry);
    }

    /// The first entry's full time follows from the old one's, which is at most 25 days away in either direction.
    fn first_changes_to(&mut self, entry: Entry) {
        let ahead = entry.step.wrapping_sub(low(self.first_step));
        self.first_step = if ahead <= u32::MAX / 2 {
            self.first_step.saturating_add(u64::from(ahead))
        } else {
            self.first_step.saturating_sub(u64::from(ahead.wrapping_neg()))
        };
    }

    fn put(&mut self, place: usize, entry: Entry) {
        if let Some(slot) = self.heap.get_mut(place) {
            *slot = entry;
        }
        self.note_place(entry.number, place);
    }

    fn place_of(&self, number: u32) -> Option<usize> {
        self.places.get(number as usize).filter(|place| **place != ABSENT).map(|place| *place as usize)
    }

    fn note_place(&mut self, number: u32, place: usize) {
        while self.places.len() <= number as usize {
            self.places.push(ABSENT);
        }
        if let (Some(slot), Ok(place)) = (self.places.get_mut(number as usize), u32::try_from(place)) {
            *slot = place;
        }
    }

    fn note_absent(&mut self, number: u32) {
        if let Some(slot) = self.places.get_mut(number as usize) {
            *slot = ABSENT;
        }
    }
}

/// Steps since the clock's zero, rounded up: late, never early.
fn step_of(at: Time) -> u64 {
    at.as_us().div_ceil(1 << STEP_SHIFT)
}

/// The last step that has passed: what is due at it is due now.
fn step_before(now: Time) -> u64 {
    now.as_us() >> STEP_SHIFT
}

/// The low 32 bits.
fn low(step: u64) -> u32 {
    u32::try_from(step & u64::from(u32::MAX)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;

    const DAY_US: u64 = 24 * 3600 * 1_000_000;

    /// Against a sorted set, with times spread over days and a clock that passes 2^32 steps.
    #[test]
    fn first_is_the_least_at_any_distance_from_the_clocks_zero() {
        let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = move || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed
        };
        for start_day in [0, 49, 60, 397, 20_000] {
            let mut now = start_day * DAY_US;
            let mut deadlines = Deadlines::default();
            let mut expected: BTreeSet<(u64, u32)> = BTreeSet::new();
            for _ in 0..20_000 {
                now += random() % (DAY_US / 100);
                let number = u32::try_from(random() % 500).unwrap();
                let current = expected.iter().find(|(_, n)| *n == number).copied();
                match random() % 4 {
                    0 => {
                        deadlines.remove(number);
                        expected.retain(|(_, n)| *n != number);
                    }
                    _ => {
                        let at = now + random() % (10 * DAY_US);
                        let step = at.div_ceil(1 << STEP_SHIFT);
                        match current {
                            Some((old, _)) if old <= step => {
                                deadlines.postpone(number, Time::from_us(at), Time::from_us(now))
                            }
                            _ => deadlines.set(number, Time::from_us(at), Time::from_us(now)),
                        }
                        expected.retain(|(_, n)| *n != number);
                        expected.insert((step, number));
                    }
                }
                // What is long overdue goes, as in the table: entries lie within the longest duration of each other.
                while let Some((step, number)) =
                    expected.first().copied().filter(|(step, _)| (step << STEP_SHIFT) + DAY_US < now)
                {
                    deadlines.remove(number);
                    expected.remove(&(step, number));
                }
                assert_eq!(deadlines.len(), expected.len());
                let first = deadlines.first().map(|(at, _)| at.as_us() >> STEP_SHIFT);
                assert_eq!(first, expected.first().map(|(step, _)| *step));
            }
        }
    }

    #[test]
    fn a_later_deadline_is_a_hint_until_postponed() {
        let mut deadlines = Deadlines::default();
        deadlines.set(1, Time::from_us(1024), Time::ZERO);
        deadlines.set(2, Time::from_us(2048), Time::ZERO);
        deadlines.set(1, Time::from_us(10_240), Time::ZERO);
        assert_eq!(deadlines.first(), Some((Time::from_us(1024), 1)));
        deadlines.postpone(1, Time::from_us(10_240), Time::ZERO);
        assert_eq!(deadlines.first(), Some((Time::from_us(2048), 2)));
        deadlines.set(1, Time::from_us(1), Time::ZERO);
        assert_eq!(deadlines.first(), Some((Time::from_us(1024), 1)));
    }

    #[test]
    fn a_machine_that_slept_for_a_year_finds_everything_due() {
        let mut deadlines = Deadlines::default();
        deadlines.set(1, Time::from_us(1000), Time::ZERO);
        let (at, number) = deadlines.first().unwrap();
        assert_eq!(number, 1);
        assert!(at < Time::from_us(365 * DAY_US));
    }

    #[test]
    fn what_was_overdue_for_days_is_brought_forward() {
        let day = |day: u64| Time::from_us(day * DAY_US);
        let mut deadlines = Deadlines::default();
        for number in 0..50 {
            deadlines.set(number, day(u64::from(number) % 9), day(0));
        }
        // Without this, an entry of the first days would look later than one of day 45.
        let now = day(40);
        deadlines.set(50, day(45), now);
        deadlines.set(51, day(39), now);
        for _ in 0..51 {
            let (at, number) = deadlines.first().unwrap();
            assert!(number != 50 && at <= now && now.us_since(at) < 1 << STEP_SHIFT, "{number} at {at:?}");
            deadlines.remove(number);
        }
        assert_eq!(deadlines.first().map(|(_, number)| number), Some(50));
    }

    #[test]
    fn made_up_deadline_counts_as_the_longest() {
        let mut deadlines = Deadlines::default();
        deadlines.set(1, Time::LAST, Time::ZERO);
        deadlines.set(2, Time::from_us(DAY_US), Time::ZERO);
        assert_eq!(deadlines.first().map(|(_, number)| number), Some(2));
        deadlines.remove(2);
        let at = deadlines.first().map(|(at, _)| at.us_since(Time::from_us(DURATION_MAX.as_us())));
        assert!(at.is_some_and(|late_us| late_us < 1 << STEP_SHIFT));
    }

    #[test]
    fn idle_entries_are_swept_as_fast_as_they_come() {
        let mut deadlines = Deadlines::default();
        for number in 0..10_000 {
            deadlines.set(number, Time::from_us(u64::from(number) << STEP_SHIFT), Time::ZERO);
        }
        // The first half becomes idle, unnoticed; then each of the rest says so.
        for idle in 5000..10_000 {
            deadlines.remove(idle);
            deadlines.sweep(|number| number > idle);
            let needed = 9_999 - idle as usize;
            // It may have to come past those that are needed first.
            assert!(deadlines.len() <= 2 * needed + 10_000 / ARITY, "{} entries for {needed}", deadlines.len());
        }
        assert!(deadlines.is_empty());
    }

    #[test]
    fn removing_the_last_entry_keeps_all_others() {
        let mut deadlines = Deadlines::default();
        for number in 0..10_000 {
            deadlines.set(number, Time::from_us(u64::from(number) << STEP_SHIFT), Time::ZERO);
        }
        assert!(deadlines.heap_bytes() > KEPT_BYTES && !deadlines.is_empty());
        for number in (1..10_000).rev() {
            deadlines.remove(number);
            assert_eq!(deadlines.len(), number as usize);
        }
        assert_eq!(deadlines.first(), Some((Time::ZERO, 0)));
    }

    #[test]
    fn memory_is_given_back() {
        let mut deadlines = Deadlines::default();
        for number in 0..10_000 {
            deadlines.set(number, Time::from_us(u64::from(number)), Time::ZERO);
        }
        for number in 0..10_000 {
            deadlines.remove(number);
        }
        assert!(deadlines.heap_bytes() <= 512 * 8);
    }
}
