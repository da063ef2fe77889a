//! Short byte strings that live inside their owner.
//!
//! Lock names, owners and ids are small and many. [`Bytes`] keeps up to `N` bytes in place and moves longer ones to the heap, so
//! that the usual acquire allocates nothing, and a held lock costs no second allocation.

use alloc::boxed::Box;
use core::fmt;

/// A byte string; `N` is how many bytes fit without an allocation.
#[derive(Clone)]
pub struct Bytes<const N: usize>(Form<N>);

#[derive(Clone)]
enum Form<const N: usize> {
    Inline { len: u8, buf: [u8; N] },
    Heap(Box<[u8]>),
}

impl<const N: usize> Bytes<N> {
    /// Copies `bytes`.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Self {
        let mut buf = [0; N];
        match (buf.get_mut(..bytes.len()), u8::try_from(bytes.len())) {
            (Some(target), Ok(len)) => {
                target.copy_from_slice(bytes);
                Self(Form::Inline { len, buf })
            }
            _ => Self(Form::Heap(bytes.into())),
        }
    }

    /// The bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        match &self.0 {
            // `len` was the length of a slice of `buf`, so `get` cannot miss.
            Form::Inline { len, buf } => buf.get(..usize::from(*len)).unwrap_or_default(),
            Form::Heap(bytes) => bytes,
        }
    }

    /// Bytes allocated outside this value.
    #[must_use]
    pub fn heap_bytes(&self) -> usize {
        match &self.0 {
            Form::Inline { .. } => 0,
            Form::Heap(bytes) => bytes.len(),
        }
    }
}

impl<const N: usize> core::ops::Deref for Bytes<N> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.as_slice()
    }
}

impl<const N: usize> Default for Bytes<N> {
    fn default() -> Self {
        Self::new(b"")
    }
}

impl<const N: usize> From<&[u8]> for Bytes<N> {
    fn from(bytes: &[u8]) -> Self {
        Self::new(bytes)
    }
}

impl<const N: usize> PartialEq for Bytes<N> {
    fn eq(&self, other: &Self) -> bool {
        self.as_slice() == other.as_slice()
    }
}

impl<const N: usize> Eq for Bytes<N> {}

impl<const N: usize> PartialOrd for Bytes<N> {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<const N: usize> Ord for Bytes<N> {
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        self.as_slice().cmp(other.as_slice())
    }
}

impl<const N: usize> core::hash::Hash for Bytes<N> {
    fn hash<H: core::hash::Hasher>(&self, state: &mut H) {
        self.as_slice().hash(state);
    }
}

impl<const N: usize> core::borrow::Borrow<[u8]> for Bytes<N> {
    fn borrow(&self) -> &[u8] {
        self.as_slice()
    }
}

impl<const N: usize> fmt::Debug for Bytes<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.as_slice().escape_ascii())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use core::hash::{Hash, Hasher};

    #[test]
    fn short_strings_stay_inline_and_long_ones_move_to_the_heap() {
        for len in [0, 1, 19, 20, 21, 300] {
            let text = alloc::vec![b'x'; len];
            let bytes = Bytes::<20>::new(&text);
            assert_eq!(bytes.as_slice(), &text[..]);
            assert_eq!(bytes.heap_bytes(), if len <= 20 { 0 } else { len });
        }
    }

    #[test]
    fn equality_and_order_do_not_depend_on_the_form() {
        assert_eq!(Bytes::<2>::new(b"ab"), Bytes::<2>::new(b"ab"));
        assert!(Bytes::<2>::new(b"abc") > Bytes::<2>::new(b"ab"));
        assert!(Bytes::<2>::new(b"abc") < Bytes::<2>::new(b"b"));
    }

    /// As [`core::borrow::Borrow`] demands.
    #[test]
    fn hash_is_that_of_the_slice() {
        #[derive(Default, PartialEq, Debug)]
        struct Written(Vec<u8>);
        impl Hasher for Written {
            fn finish(&self) -> u64 {
                0
            }
            fn write(&mut self, bytes: &[u8]) {
                self.0.extend(bytes);
            }
        }
        let written = |value: &dyn Fn(&mut Written)| {
            let mut written = Written::default();
            value(&mut written);
            written
        };
        for text in [&b""[..], b"ab", b"abc"] {
            let bytes = Bytes::<2>::new(text);
            assert_eq!(written(&|hasher| bytes.hash(hasher)), written(&|hasher| text.hash(hasher)));
        }
    }

    #[test]
    fn shown_as_text_whatever_the_bytes_are() {
        assert_eq!(alloc::format!("{:?}", Bytes::<2>::new(b"a\"\0")), "\"a\\\"\\x00\"");
    }
}
