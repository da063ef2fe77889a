//! A lock as bytes in somebody's RDB file, damaged or made up.
//!
//! Reading never panics. What is accepted is written again byte for byte, reads the same on another boot but for its deadlines, and
//! can be loaded into a table that keeps its invariants, decides, and lets every lease end.
#![no_main]

mod replica;

use flock_core::lock::{Lock, Start};
use flock_core::snapshot::{self, Image};
use flock_core::{Change, Millis};
use libfuzzer_sys::fuzz_target;
use replica::Replica;

fuzz_target!(|bytes: &[u8]| {
    check_counter(bytes);
    let Some(boot) = boot_in(bytes) else { return };
    let Ok(image) = snapshot::decode(bytes, boot) else { return };
    assert_eq!(written(&image, boot), bytes, "{image:?}");

    let mut without_deadlines = image.clone();
    without_deadlines.grants.iter_mut().for_each(|grant| grant.deadline = None);
    assert_eq!(snapshot::decode(bytes, !boot).as_ref(), Ok(&without_deadlines));

    for image in [image, without_deadlines] {
        let mut server = Replica::new();
        server.load(&image);
        server.table.check_invariants(server.now);
        server.take_over();
        server.table.check_invariants(server.now);
        // What was overdue for days counts as due at the next step of the deadlines, a millisecond later.
        for duration in [Millis(0), Millis(1000), Millis(u32::MAX), Millis(2)] {
            server.wake_after(duration);
            server.table.check_invariants(server.now);
        }
        assert_eq!(server.table.held(), 0, "a lease outlives the longest duration");
    }
});

/// The boot that the bytes name: after the version and the mark.
fn boot_in(bytes: &[u8]) -> Option<u64> {
    let mark_ends = bytes.iter().skip(1).position(|byte| byte & 0x80 == 0)? + 2;
    let boot = bytes.get(mark_ends..mark_ends + 8)?;
    Some(u64::from_le_bytes(boot.try_into().ok()?))
}

fn written(image: &Image, boot: u64) -> Vec<u8> {
    let mut lock = Lock::default();
    for grant in &image.grants {
        lock.apply(&Change::Grant(grant.clone()), Start::AfterLoading);
    }
    let mut bytes = Vec::new();
    snapshot::encode(&lock, image.mark, boot, &mut bytes);
    bytes
}

fn check_counter(bytes: &[u8]) {
    if let Ok(counter) = snapshot::decode_counter(bytes) {
        let mut written = Vec::new();
        snapshot::encode_counter(counter, &mut written);
        assert_eq!(written, bytes, "{counter:?}");
    }
}
