//! What leaves the server, and what comes in: commands, errors, messages, and changes as bytes.
//!
//! Module and client share these files, so the two ends cannot drift apart. Each format has its encoder beside its parser, and
//! parsing is total: any bytes give a value or an error, never a panic, and never an allocation sized by an unchecked number.
//!
//! | file | format | written by | read by |
//! |---|---|---|---|
//! | [`command`] | a user command's arguments | client | module |
//! | [`spec`] | the table of the commands: arity, flags, keys, arguments | | server, `COMMAND DOCS` |
//! | [`error`] | the table of error codes, and their sentences | module | client |
//! | [`message`] | what is published on channels | module | client |
//! | [`change`] | the effects that replicas and the AOF apply | module | module |
//! | [`pattern`] | the glob of `FLOCK.LIST MATCH` | | module |
//! | [`report`] | what `FLOCK.INFO` and `FLOCK.LIST` answer | module | client |
//! | [`text`] | numbers and words, which all of them use | | |
//!
//! The binary form of a stored lock is in [`crate::snapshot`].

pub mod change;
pub mod command;
pub mod error;
pub mod message;
pub mod pattern;
pub mod report;
pub mod spec;
pub mod text;

use core::fmt;

/// No owner is longer than this, whatever the configuration says: a stored or replicated form with a longer one is refused.
pub const OWNER_BYTES_MAX: usize = 4096;
/// The same for an id of a re-entered hold.
pub const ID_BYTES_MAX: usize = 4096;
/// The same for a channel name.
pub const CHANNEL_BYTES_MAX: usize = 4096;
/// The same for a label.
pub const LABEL_BYTES_MAX: usize = 4096;
/// The same for the number of ids of one hold.
pub const IDS_MAX: usize = 1024;

/// Bytes that are no valid encoding: cut short, damaged, made up, or written by a later version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Corrupt {
    reason: &'static str,
}

impl Corrupt {
    pub(crate) const fn new(reason: &'static str) -> Self {
        Self { reason }
    }

    /// What is wrong, for the log.
    #[must_use]
    pub const fn reason(self) -> &'static str {
        self.reason
    }
}

impl fmt::Display for Corrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.reason)
    }
}

impl core::error::Error for Corrupt {}
