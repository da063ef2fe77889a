//! Growing storage without moving what is in it.
//!
//! A `Vec` that doubles copies everything at once and keeps up to half of its memory idle: at a million locks that is a pause and a
//! waste. Pages of a fixed size cost neither.

use alloc::vec::Vec;

/// Entries per page.
const PAGE: usize = 512;

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
#[derive(Clone, Debug)]
pub struct Slab<T> {
    slots: Pages<Slot<T>>,
    vacant: u32,
    len: usize,
}

#[derive(Clone, Debug)]
enum Slot<T> {
    Used(T),
    /// Next vacant slot, or [`NONE`].
    Vacant(u32),
}

/// No slot.
const NONE: u32 = u32::MAX;

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { slots: Pages::default(), vacant: NONE, len: 0 }
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

    /// One more than the highest number in use or vacant.
    #[must_use]
    pub fn end(&self) -> u32 {
        u32::try_from(self.slots.len()).unwrap_or(NONE)
    }

    /// Stores a value; `None` if 2^32 - 1 are stored already.
    pub fn insert(&mut self, value: T) -> Option<u32> {
        let number = if self.vacant == NONE {
            let number = u32::try_from(self.slots.len()).ok().filter(|number| *number != NONE)?;
            self.slots.push(Slot::Used(value));
            number
        } else {
            let number = self.vacant;
            let slot = self.slots.get_mut(number as usize)?;
            if let Slot::Vacant(next) = slot {
                self.vacant = *next;
            }
            *slot = Slot::Used(value);
            number
        };
        self.len += 1;
        Some(number)
    }

    /// The value with this number.
    #[must_use]
    pub fn get(&self, number: u32) -> Option<&T> {
        match self.slots.get(number as usize)? {
            Slot::Used(value) => Some(value),
            Slot::Vacant(_) => None,
        }
    }

    /// The value with this number, to alter.
    pub fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        match self.slots.get_mut(number as usize)? {
            Slot::Used(value) => Some(value),
            Slot::Vacant(_) => None,
        }
    }

    /// Takes the value with this number.
    pub fn remove(&mut self, number: u32) -> Option<T> {
        let slot = self.slots.get_mut(number as usize)?;
        if let Slot::Vacant(_) = slot {
            return None;
        }
        let Slot::Used(value) = core::mem::replace(slot, Slot::Vacant(self.vacant)) else {
            return None;
        };
        self.vacant = number;
        self.len -= 1;
        if self.len == 0 && self.slots.len() > PAGE {
            // Nothing is numbered any more: give the pages back. (One is kept, or a single busy lock would allocate it each time.)
            *self = Self::default();
        }
        Some(value)
    }

    /// The numbered values in order of their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        (0u32..).zip(self.slots.iter()).filter_map(|(number, slot)| match slot {
            Slot::Used(value) => Some((number, value)),
            Slot::Vacant(_) => None,
        })
    }

    /// Bytes allocated.
    #[must_use]
    pub fn heap_bytes(&self) -> usize {
        self.slots.heap_bytes()
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
}
