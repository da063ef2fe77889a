//! Random numbers that can be had again: the seed of a run is printed, and can be given.

/// The environment variable that gives the seed.
const SEED: &str = "FLOCK_SEED";

/// A generator of random numbers (SplitMix64): small, fast, and the same everywhere.
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// Starts from `$FLOCK_SEED`, or from a seed of its own, and prints it: a test that fails shows how to run it again.
    ///
    /// # Panics
    /// If the variable is no number.
    pub fn new() -> Random {
        let seed = match std::env::var(SEED) {
            Ok(text) => text.parse().unwrap_or_else(|_| panic!("{SEED} should be a number, not {text}")),
            Err(_) => crate::history::now_ns(),
        };
        println!("{SEED}={seed}");
        Random::from_seed(seed)
    }

    /// Starts from a seed.
    pub fn from_seed(seed: u64) -> Random {
        Random { state: seed }
    }

    /// Any number.
    pub fn number(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, which must not be zero. Small bounds only: the bias is `bound / 2^64`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.number() % bound
    }

    /// True in one of `times` cases.
    pub fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// One of `items`, which must not be empty.
    pub fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        let index = self.below(items.len() as u64);
        items[usize::try_from(index).expect("an index fits")]
    }
}

impl Default for Random {
    fn default() -> Random {
        Random::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_tells_all() {
        let mut random = Random::from_seed(42);
        let first: Vec<_> = (0..3).map(|_| random.number()).collect();
        // From the reference implementation of SplitMix64.
        assert_eq!(first, [13_679_457_532_755_275_413, 2_949_826_092_126_892_291, 5_139_283_748_462_763_858]);
    }

    #[test]
    fn every_item_is_picked() {
        let mut random = Random::from_seed(1);
        let picked: std::collections::BTreeSet<_> = (0..100).map(|_| random.pick(&[1, 2, 3])).collect();
        assert_eq!(picked.len(), 3);
    }
}
