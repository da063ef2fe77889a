//! The replication stream and the log: each line of the input is one change.
//!
//! Reading never panics, and one change has one text. A replica can apply whatever was read without a panic and with the same result
//! when it is applied twice; of what a primary could have decided, every invariant holds after each step, and after taking over.
#![no_main]

mod replica;

use flock_core::lock::{Lock, Mode};
use flock_core::wire::change;
use flock_core::{Change, Millis};
use libfuzzer_sys::fuzz_target;
use replica::Replica;

/// This host's boot; the dictionary and the seeds name it.
const BOOT: u64 = 0x0123_4567_89ab_cdef;

fuzz_target!(|stream: &[u8]| {
    let (mut faithful, mut credulous) = (Replica::new(), Replica::new());
    for text in stream.split(|byte| *byte == b'\n') {
        let Ok(change) = change::decode(text, BOOT) else { continue };
        check_text(&change, text);
        credulous.apply(&change);
        let once = credulous.lock().cloned();
        credulous.apply(&change);
        assert_eq!(credulous.lock(), once.as_ref(), "{change:?} applied twice");
        if could_be_decided(faithful.lock(), &change) {
            faithful.apply(&change);
            faithful.table.check_invariants(faithful.now);
        }
    }
    credulous.apply(&Change::End { token: None });
    assert_eq!(credulous.table.held(), 0, "END all ends all");

    faithful.take_over();
    for duration in [Millis(0), Millis(1000), Millis(u32::MAX), Millis(2)] {
        faithful.wake_after(duration);
        faithful.table.check_invariants(faithful.now);
    }
});

/// One value, one text; only a deadline of another boot is left out on purpose.
fn check_text(change: &Change, text: &[u8]) {
    let mut written = Vec::new();
    change::encode(change, BOOT, &mut written);
    let deadline = match change {
        Change::Grant(grant) => grant.deadline,
        Change::Renew { deadline, .. } => *deadline,
        Change::Mode { .. } | Change::End { .. } | Change::Ids { .. } | Change::Mark(_) => None,
    };
    if deadline.is_none() && text.contains(&b'@') {
        assert_eq!(change::decode(&written, BOOT).as_ref(), Ok(change));
    } else {
        assert_eq!(written, text, "{change:?}");
    }
}

/// Whether a primary with this lock could have decided the change: one hold per owner, and an exclusive one alone.
fn could_be_decided(lock: Option<&Lock>, change: &Change) -> bool {
    let mut holds = lock.into_iter().flat_map(Lock::holds);
    match change {
        Change::Grant(grant) => holds.all(|hold| match (hold.token == grant.token, hold.owner == grant.owner) {
            (true, true) => grant.mode == hold.mode(),
            (false, false) => grant.mode == Mode::Shared && hold.mode() == Mode::Shared,
            _ => false,
        }),
        Change::Mode { old, new, mode } => {
            let alone = lock.is_none_or(|lock| lock.len() == 1);
            holds.all(|hold| hold.token == *old || hold.token != *new) && (alone || *mode == Mode::Shared)
        }
        Change::Renew { .. } | Change::End { .. } | Change::Ids { .. } | Change::Mark(_) => true,
    }
}
