//! Random keys and owners.

use flock_tests::random::Random;

/// The length of the keys that the goals speak of.
pub const KEY_BYTES: usize = 20;
/// The length of the owners that the goals speak of: a UUID without dashes.
pub const OWNER_BYTES: usize = 32;

/// A random key of `length` bytes: `lock:` and base-32 digits, which make it distinct from all others.
pub fn key(random: &mut Random, length: usize) -> Vec<u8> {
    let mut key = b"lock:".to_vec();
    push_random(&mut key, random, length, b"abcdefghijklmnopqrstuvwxyz234567");
    key
}

/// A random owner of `length` bytes, as a UUID in hexadecimal.
pub fn owner(random: &mut Random, length: usize) -> Vec<u8> {
    let mut owner = Vec::with_capacity(length);
    push_random(&mut owner, random, length, b"0123456789abcdef");
    owner
}

/// Appends random digits until `out` is `length` bytes long.
fn push_random(out: &mut Vec<u8>, random: &mut Random, length: usize, digits: &[u8]) {
    while out.len() < length {
        let mut number = random.number();
        for _ in 0..(length - out.len()).min(12) {
            let digit = number % digits.len() as u64;
            number /= digits.len() as u64;
            out.extend(usize::try_from(digit).ok().and_then(|digit| digits.get(digit)));
        }
    }
    out.truncate(length);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_as_long_as_asked_and_distinct() {
        let mut random = Random::from_seed(1);
        for length in [6, 20, 32, 40] {
            let (first, second) = (key(&mut random, length), key(&mut random, length));
            assert_eq!((first.len(), owner(&mut random, length).len()), (length, length));
            assert_ne!(first, second);
        }
    }
}
