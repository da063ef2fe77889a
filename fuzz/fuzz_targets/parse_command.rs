//! The arguments of every command: the first line of the input is the command's name, each further line one argument.
//!
//! Parsing never panics. A request that is accepted comes back from its own arguments, and means the same where more is allowed. A
//! refusal is one line of printable text, whatever the argument was.
#![no_main]

use flock_core::wire::command::{Check, Command, Info, List};
use flock_core::wire::error::{ErrorCode, WireError};
use flock_core::{Acquire, Limits, Millis, Release, Renew, Revoke};
use libfuzzer_sys::{Corpus, fuzz_target};

/// Settings that stand in the way of nothing: what is left are the bounds that no setting lifts.
const WIDEST: Limits = Limits {
    lease_max: Millis(u32::MAX),
    wait_max: Millis(u32::MAX),
    owner_max_bytes: usize::MAX,
    label_max_bytes: usize::MAX,
    channel_max_bytes: usize::MAX,
    ids_max: usize::MAX,
    waiters_max: usize::MAX,
    floor_enabled: true,
};

fuzz_target!(|input: &[u8]| -> Corpus {
    let mut lines = input.split(|byte| *byte == b'\n');
    let name = lines.next().unwrap_or_default();
    // A macro, because the request and what comes back borrow from different places: they are of different types.
    macro_rules! commands {
        ($($command:ident)*) => {
            $(if name == $command::NAME.as_bytes() {
                let widest = $command::parse(lines.clone(), &WIDEST);
                match $command::parse(lines, &Limits::DEFAULT) {
                    Ok(request) => assert_eq!(widest.as_ref(), Ok(&request), "wider limits change the meaning"),
                    Err(refusal) => check_refusal(&refusal),
                }
                if let Ok(request) = widest {
                    let args = request.to_args();
                    assert_eq!($command::parse(args.iter().map(Vec::as_slice), &WIDEST), Ok(request));
                }
                return Corpus::Keep;
            })*
        };
    }
    commands!(Acquire Release Renew Check Info List Revoke);
    Corpus::Reject
});

fn check_refusal(refusal: &WireError) {
    assert_eq!(refusal.code, ErrorCode::Err);
    let printable = refusal.message.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic());
    assert!(printable, "a refusal that breaks a reply or a log line: {refusal:?}");
}
