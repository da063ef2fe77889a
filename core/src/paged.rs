//! Growing storage without moving what is in it.
//!
//! A `Vec` that doubles copies everything at once and keeps up to half of its memory idle: at a million locks that is a pause and a
//! waste. Pages of a fixed size cost neither.

use alloc::vec::Vec;

/// Entries per page.
const PAGE: usize = PAGE_U32 as usize;
const PAGE_U32: u32 = 512;

/// A stack of values in pages.
#[derive(Clone, Debug)]
pub struct Pages<T> {
    pages: Vec<Vec<T>>,
    len: usize,
}

impl<T> Default for Pages<T> {
    fn default() -> Self {
        Self { pages: Vec::new(), len: 0 }
    }
}

impl<T> Pages<T> {
    /// How many values there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The value at `index`.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<&T> {
        self.pages.get(index / PAGE)?.get(index % PAGE)
    }

    /// The value at `index`, to alter.
    pub fn get_mut(&mut self, index: usize) -> Option<&mut T> {
        self.pages.get_mut(index / PAGE)?.get_mut(index % PAGE)
    }

    /// Adds a value at the end.
    pub fn push(&mut self, value: T) {
        if self.len.is_multiple_of(PAGE) && self.pages.len() == self.len / PAGE {
            self.pages.push(Vec::with_capacity(PAGE));
        }
        if let Some(page) = self.pages.get_mut(self.len / PAGE) {
            page.push(value);
            self.len += 1;
        }
    }

    /// Takes the last value. Keeps at most one empty page.
    pub fn pop(&mut self) -> Option<T> {
        let last = self.len.checked_sub(1)?;
        let value = self.pages.get_mut(last / PAGE)?.pop()?;
        self.len = last;
        self.pages.truncate(last.div_ceil(PAGE) + 1);
        Some(value)
    }

    /// The values in order.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.pages.iter().flatten()
    }

    /// Bytes allocated.
    #[must_use]
    pub fn heap_bytes(&self) -> usize {
        self.pages.len() * PAGE * size_of::<T>()
    }
}

/// Numbered places: a value keeps its number until it is removed, then the number is used again.
///
/// A page in which nothing is left goes back at once, so that memory follows what is held and the end of a million values is spread over
/// their removals. One is kept, or a single busy value would allocate it each time.
#[derive(Clone, Debug)]
pub struct Slab<T> {
    pages: Vec<Page<T>>,
    /// The page that takes the next value, or [`NONE`]: the first in the list of those with room.
    roomy: u32,
    /// The page that became empty last; it may be in use again.
    spare: u32,
    len: usize,
}

#[derive(Clone, Debug)]
struct Page<T> {
    /// Allocated with the first value. Room for more is after the end as well as in the vacant ones.
    slots: Vec<Slot<T>>,
    /// The first vacant slot, or [`NONE`].
    vacant: u32,
    used: u32,
    /// The next page with room, or [`NONE`].
    next: u32,
}

#[derive(Clone, Debug)]
enum Slot<T> {
    Used(T),
    /// Next vacant slot of the page, or [`NONE`].
    Vacant(u32),
}

/// No slot, no page.
const NONE: u32 = u32::MAX;

impl<T> Page<T> {
    const fn unallocated(next: u32) -> Self {
        Self { slots: Vec::new(), vacant: NONE, used: 0, next }
    }

    fn is_full(&self) -> bool {
        self.used as usize == PAGE
    }

    /// Stores a value where there is room. In the slot that was left last: it is in the cache still.
    fn insert(&mut self, value: T) -> Option<u32> {
        let index = if self.vacant == NONE {
            let index = u32::try_from(self.slots.len()).ok()?;
            if self.slots.capacity() == 0 {
                self.slots.reserve_exact(PAGE);
            }
            self.slots.push(Slot::Used(value));
            index
        } else {
            let index = self.vacant;
            let slot = self.slots.get_mut(index as usize)?;
            if let Slot::Vacant(next) = slot {
                self.vacant = *next;
            }
            *slot = Slot::Used(value);
            index
        };
        self.used += 1;
        Some(index)
    }

    fn remove(&mut self, index: u32) -> Option<T> {
        let slot = self.slots.get_mut(index as usize)?;
        if let Slot::Vacant(_) = slot {
            return None;
        }
        let Slot::Used(value) = core::mem::replace(slot, Slot::Vacant(self.vacant)) else {
            return None;
        };
        self.vacant = index;
        self.used -= 1;
        Some(value)
    }
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { pages: Vec::new(), roomy: NONE, spare: NONE, len: 0 }
    }
}

impl<T> Slab<T> {
    /// How many values there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Above all numbers in use.
    #[must_use]
    pub fn end(&self) -> u32 {
        let last = self.pages.last().map_or(0, |page| page.slots.len());
        u32::try_from(self.pages.len().saturating_sub(1) * PAGE + last).unwrap_or(NONE)
    }

    /// Stores a value; `None` if so many are stored already that there is no number left.
    pub fn insert(&mut self, value: T) -> Option<u32> {
        if self.roomy == NONE {
            self.add_page()?;
        }
        let page = self.pages.get_mut(self.roomy as usize)?;
        let number = self.roomy * PAGE_U32 + page.insert(value)?;
        if page.is_full() {
            self.roomy = page.next;
        }
        self.len += 1;
        Some(number)
    }

    #[cold]
    fn add_page(&mut self) -> Option<()> {
        let page = u32::try_from(self.pages.len()).ok().filter(|page| *page < NONE / PAGE_U32)?;
        self.pages.push(Page::unallocated(NONE));
        self.roomy = page;
        Some(())
    }

    /// The value with this number.
    #[must_use]
    pub fn get(&self, number: u32) -> Option<&T> {
        let page = self.pages.get((number / PAGE_U32) as usize)?;
        match page.slots.get((number % PAGE_U32) as usize)? {
            Slot::Used(value) => Some(value),
            Slot::Vacant(_) => None,
        }
    }

    /// The value with this number, to alter.
    pub fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        let page = self.pages.get_mut((number / PAGE_U32) as usize)?;
        match page.slots.get_mut((number % PAGE_U32) as usize)? {
            Slot::Used(value) => Some(value),
            Slot::Vacant(_) => None,
        }
    }

    /// Takes the value with this number.
    pub fn remove(&mut self, number: u32) -> Option<T> {
        let at = number / PAGE_U32;
        let page = self.pages.get_mut(at as usize)?;
        let was_full = page.is_full();
        let value = page.remove(number % PAGE_U32)?;
        let is_empty = page.used == 0;
        if was_full {
            page.next = self.roomy;
            self.roomy = at;
        }
        self.len -= 1;
        if self.len == 0 && self.pages.len() > 1 {
            *self = Self::default(); // nothing is numbered any more
        } else if is_empty && self.spare != at {
            self.keep_spare(at);
        }
        Some(value)
    }

    /// The page at `at` has become empty: it is kept, and the one before it is given back if it still is.
    #[cold]
    fn keep_spare(&mut self, at: u32) {
        if let Some(page) = self.pages.get_mut(self.spare as usize).filter(|page| page.used == 0) {
            // It stays in the list of those with room, where it is.
            *page = Page::unallocated(page.next);
        }
        self.spare = at;
    }

    /// The numbered values in order of their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        (0u32..).step_by(PAGE).zip(&self.pages).flat_map(|(first, page)| {
            (first..).zip(&page.slots).filter_map(|(number, slot)| match slot {
                Slot::Used(value) => Some((number, value)),
                Slot::Vacant(_) => None,
            })
        })
    }

    /// Bytes allocated for the values.
    #[must_use]
    pub fn heap_bytes(&self) -> usize {
        self.pages.iter().map(|page| page.slots.capacity() * size_of::<Slot<T>>()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_behave_like_a_stack() {
        let mut pages = Pages::default();
        for n in 0..3000u32 {
            pages.push(n);
        }
        assert_eq!(pages.len(), 3000);
        assert_eq!(pages.get(2999), Some(&2999));
        assert_eq!(pages.get(3000), None);
        for n in (0..3000u32).rev() {
            assert_eq!(pages.pop(), Some(n));
            assert_eq!(pages.len(), n as usize);
        }
        assert_eq!(pages.pop(), None);
        assert!(pages.heap_bytes() <= PAGE * 4, "at most one page is kept");
        pages.push(7);
        assert_eq!(pages.iter().collect::<Vec<_>>(), [&7]);
    }

    #[test]
    fn going_to_and_fro_across_the_end_of_a_page_takes_no_more_memory() {
        let mut pages = Pages::default();
        for n in 0..PAGE {
            pages.push(n);
        }
        for _ in 0..10 {
            pages.push(PAGE);
            assert_eq!(pages.heap_bytes(), 2 * PAGE * size_of::<usize>());
            assert_eq!(pages.pop(), Some(PAGE));
        }
        assert_eq!(pages.iter().copied().collect::<Vec<_>>(), (0..PAGE).collect::<Vec<_>>());
    }

    #[test]
    fn a_removed_number_is_used_again_and_the_others_stay() {
        let mut slab = Slab::default();
        assert!(slab.is_empty());
        let a = slab.insert("a").unwrap();
        assert!(!slab.is_empty());
        let b = slab.insert("b").unwrap();
        assert_eq!(slab.remove(a), Some("a"));
        assert_eq!(slab.remove(a), None);
        assert_eq!(slab.get(b), Some(&"b"));
        assert_eq!(slab.insert("c"), Some(a));
        assert_eq!(slab.iter().collect::<Vec<_>>(), [(a, &"c"), (b, &"b")]);
        assert_eq!(slab.len(), 2);
    }

    const PAGE_BYTES: usize = PAGE * size_of::<Slot<u32>>();

    fn filled(pages: u32) -> Slab<u32> {
        let mut slab = Slab::default();
        for n in 0..pages * PAGE_U32 {
            assert_eq!(slab.insert(n), Some(n));
        }
        assert_eq!((slab.heap_bytes(), slab.end()), (pages as usize * PAGE_BYTES, pages * PAGE_U32));
        slab
    }

    #[test]
    fn a_page_in_which_nothing_is_left_is_given_back_but_one() {
        let mut slab = filled(20);
        let mut left: Vec<u32> = (0..20).collect();
        // In an order of its own, and within each page too.
        for nth in [7, 0, 17, 3, 11, 5, 5, 0, 9, 2, 1, 8, 3, 0, 1, 4, 0, 2, 0] {
            let page = left.remove(nth);
            for n in 0..PAGE_U32 {
                let number = page * PAGE_U32 + (n * 77) % PAGE_U32;
                assert_eq!(slab.remove(number), Some(number));
            }
            assert_eq!(slab.heap_bytes(), (left.len() + 1) * PAGE_BYTES, "one is kept beside {left:?}");
            let values: Vec<u32> = slab.iter().map(|(number, _)| number / PAGE_U32).collect();
            assert_eq!(values.len(), slab.len());
            assert!(values.iter().step_by(PAGE).eq(&left), "the others stay");
        }
        // What was given back is numbered and filled again before there is a new page.
        let mut numbers: Vec<u32> = slab.iter().map(|(number, _)| number).collect();
        while slab.len() < 20 * PAGE {
            numbers.push(slab.insert(0).unwrap());
        }
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(0..20 * PAGE_U32));
        assert_eq!(slab.heap_bytes(), 20 * PAGE_BYTES);
        assert_eq!(slab.insert(0), Some(20 * PAGE_U32));
    }

    #[test]
    fn a_page_that_was_empty_and_is_in_use_again_is_not_given_back() {
        let mut slab = filled(2);
        for number in 0..PAGE_U32 {
            slab.remove(number);
        }
        let again = slab.insert(7).unwrap();
        assert!(again < PAGE_U32, "in the page that was empty");
        for number in PAGE_U32..2 * PAGE_U32 {
            slab.remove(number);
        }
        assert_eq!(slab.iter().collect::<Vec<_>>(), [(again, &7)]);
    }

    #[test]
    fn nothing_is_kept_of_many_but_a_page() {
        let mut slab = filled(3);
        for number in (0..3 * PAGE_U32).rev() {
            slab.remove(number);
        }
        assert_eq!((slab.heap_bytes(), slab.pages.capacity(), slab.end()), (0, 0, 0));
    }

    #[test]
    fn single_busy_value_allocates_nothing_wherever_it_is() {
        for beside in [0, 1, PAGE_U32 - 1, PAGE_U32, 3 * PAGE_U32 + 1] {
            let mut slab = Slab::default();
            for n in 0..beside {
                slab.insert(n);
            }
            let number = slab.insert(0).unwrap();
            slab.remove(number);
            let kept: Vec<*const Slot<u32>> = slab.pages.iter().map(|page| page.slots.as_ptr()).collect();
            for _ in 0..3 {
                assert_eq!(slab.insert(0), Some(number));
                assert_eq!(slab.remove(number), Some(0));
                assert!(slab.pages.iter().map(|page| page.slots.as_ptr()).eq(kept.iter().copied()), "beside {beside}");
            }
        }
    }

    /// Against a map, and never more pages than were full of values at one time.
    #[test]
    fn values_come_back_by_their_numbers_in_any_order() {
        let (mut slab, mut model) = (Slab::default(), alloc::collections::BTreeMap::new());
        let mut seed = 0x2545_f491_4f6c_dd1d_u64;
        let mut most = 0;
        for step in 0..200_000_u32 {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            // Grows and shrinks in turns.
            let grows = (step / 10_000) % 2 == 0;
            if (seed % 100 < 70) == grows {
                let number = slab.insert(step).unwrap();
                assert_eq!(model.insert(number, step), None, "{number} is in use");
            } else {
                let number = u32::try_from(seed >> 40).unwrap() % slab.end().max(1);
                assert_eq!(slab.remove(number), model.remove(&number));
            }
            most = most.max(model.len());
            assert_eq!(slab.len(), model.len());
            assert!(slab.heap_bytes() <= (most.div_ceil(PAGE) + 1) * PAGE_BYTES);
        }
        assert!(most > 3 * PAGE);
        assert!(slab.iter().eq(model.iter().map(|(number, value)| (*number, value))));
        assert!(model.iter().all(|(number, value)| slab.get(*number) == Some(value)));
    }
}
