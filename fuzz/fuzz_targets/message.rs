//! What clients read from channels: messages to an owner, and announcements to anybody.
//!
//! Reading never panics, and one message has one text: what is accepted is written again byte for byte.
#![no_main]

use flock_core::wire::message::{Announcement, OwnerMessage};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    let mut written = Vec::new();
    if let Ok(message) = OwnerMessage::parse(text) {
        message.encode(&mut written);
        assert_eq!(written, text, "{message:?}");
    }
    if let Ok(announcement) = Announcement::parse(text) {
        written.clear();
        announcement.encode(&mut written);
        assert_eq!(written, text, "{announcement:?}");
    }
});
