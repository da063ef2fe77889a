//! The name of a lock: a key in one of the server's databases.

use alloc::boxed::Box;
use core::fmt;

/// Database and key. Two names are the same lock if and only if both agree, byte for byte.
///
/// 24 bytes; a key of up to 20 bytes needs no allocation. (Not [`Bytes`](crate::bytes::Bytes) beside a number: that would be 32.)
#[derive(Clone)]
pub struct Name(Form);

#[derive(Clone)]
enum Form {
    Inline { db: u16, len: u8, key: [u8; INLINE] },
    Heap { db: u16, key: Box<[u8]> },
}

const INLINE: usize = 20;

impl Name {
    /// The lock named `key` in database `db`.
    #[must_use]
    pub fn new(db: u16, key: &[u8]) -> Self {
        let mut inline = [0; INLINE];
        match (inline.get_mut(..key.len()), u8::try_from(key.len())) {
            (Some(target), Ok(len)) => {
                target.copy_from_slice(key);
                Self(Form::Inline { db, len, key: inline })
            }
            _ => Self(Form::Heap { db, key: key.into() }),
        }
    }

    /// The database's number.
    #[must_use]
    pub fn db(&self) -> u16 {
        match self.0 {
            Form::Inline { db, .. } | Form::Heap { db, .. } => db,
        }
    }

    /// The key.
    #[must_use]
    pub fn key(&self) -> &[u8] {
        match &self.0 {
            // `len` was the length of a slice of `key`, so `get` cannot miss.
            Form::Inline { len, key, .. } => key.get(..usize::from(*len)).unwrap_or_default(),
            Form::Heap { key, .. } => key,
        }
    }

    /// The same key in another database (after SWAPDB).
    pub(crate) fn move_to(&mut self, to: u16) {
        match &mut self.0 {
            Form::Inline { db, .. } | Form::Heap { db, .. } => *db = to,
        }
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        match &self.0 {
            Form::Inline { .. } => 0,
            Form::Heap { key, .. } => key.len(),
        }
    }
}

impl PartialEq for Name {
    fn eq(&self, other: &Self) -> bool {
        self.db() == other.db() && self.key() == other.key()
    }
}

impl Eq for Name {}

impl PartialOrd for Name {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Name {
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        (self.db(), self.key()).cmp(&(other.db(), other.key()))
    }
}

impl core::hash::Hash for Name {
    fn hash<H: core::hash::Hasher>(&self, state: &mut H) {
        (self.db(), self.key()).hash(state);
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:\"{}\"", self.db(), self.key().escape_ascii())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;

    #[test]
    fn a_name_is_its_database_and_its_key_in_either_form() {
        assert_eq!(size_of::<Name>(), 24);
        for len in [0, 1, 20, 21, 300] {
            let key = alloc::vec![b'k'; len];
            let mut name = Name::new(7, &key);
            assert_eq!((name.db(), name.key()), (7, &key[..]));
            assert_eq!(name.heap_bytes(), if len <= 20 { 0 } else { len });
            name.move_to(8);
            assert!(name > Name::new(7, &key));
        }
    }

    #[test]
    fn names_are_equal_if_both_parts_are() {
        let name = Name::new(7, b"k");
        assert_eq!(name, Name::new(7, b"k"));
        assert_ne!(name, Name::new(8, b"k"));
        assert_ne!(name, Name::new(7, b"j"));
        let names = BTreeSet::from([name.clone(), Name::new(8, b"k"), Name::new(7, b"j"), Name::new(7, b"k")]);
        assert_eq!(names.len(), 3);
        assert_eq!(alloc::format!("{name:?}"), "7:\"k\"");
    }
}
