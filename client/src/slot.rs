//! Which hash slot of a cluster a name is in.

use std::sync::LazyLock;

use crc::{CRC_16_XMODEM, Crc, Table};

/// A hash slot of a cluster.
pub(crate) type Slot = u16;

pub(crate) const SLOTS: Slot = 16_384;

static CRC: Crc<u16, Table<1>> = Crc::<u16, Table<1>>::new(&CRC_16_XMODEM);

/// For each slot a number which, as a hash tag, leads there.
static TAGS: LazyLock<Vec<u32>> = LazyLock::new(|| {
    let mut tags = vec![None; usize::from(SLOTS)];
    let mut missing = SLOTS;
    for number in 0.. {
        let tag = tags.get_mut(usize::from(hash(number.to_string().as_bytes())));
        if let Some(tag @ None) = tag {
            *tag = Some(number);
            missing -= 1;
        }
        if missing == 0 {
            break;
        }
    }
    tags.into_iter().flatten().collect()
});

/// The slot of a key or a shard channel. Only what stands between the first `{` and the next `}` counts, if there is anything.
pub(crate) fn slot_of(name: &[u8]) -> Slot {
    let tag = || {
        let open = name.iter().position(|byte| *byte == b'{')? + 1;
        let length = name.get(open..)?.iter().position(|byte| *byte == b'}')?;
        name.get(open..open + length).filter(|tag| !tag.is_empty())
    };
    hash(tag().unwrap_or(name))
}

/// The tag that makes a name belong to this slot: `{tag}` anywhere in it, before any other brace.
pub(crate) fn tag_of(slot: Slot) -> u32 {
    TAGS.get(usize::from(slot)).copied().unwrap_or_default()
}

fn hash(bytes: &[u8]) -> Slot {
    CRC.checksum(bytes) % SLOTS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_the_server() {
        // What CLUSTER KEYSLOT answers.
        for (name, slot) in
            [("", 0), ("foo", 12_182), ("123456789", 12_739), ("{foo}bar", 12_182), ("a{foo}{bar}", 12_182)]
        {
            assert_eq!(slot_of(name.as_bytes()), slot, "{name}");
        }
        for plain in ["{}foo", "{foo", "}foo{"] {
            assert_eq!(slot_of(plain.as_bytes()), hash(plain.as_bytes()), "{plain}");
        }
    }

    #[test]
    fn every_slot_has_a_tag() {
        for slot in 0..SLOTS {
            assert_eq!(slot_of(format!("flock:{{{}}}:x", tag_of(slot)).as_bytes()), slot);
        }
    }
}
