//! What goes wrong, in one sentence for people and one exit code for scripts.
//!
//! The codes are those of `sysexits.h` where there is one; what was lost has the first number above them. A command that is run keeps
//! its own: see `docs/FLOCKCTL.md`.

use std::error::Error;
use std::fmt::{self, Display};
use std::io;

use flock_client::{AcquireError, AdminError, ConnectError, HoldError};

/// Nothing was found: nobody holds the lock.
pub(crate) const NOTHING: u8 = 1;
/// The command line makes no sense.
pub(crate) const USAGE: u8 = 64;
/// The server cannot be reached.
pub(crate) const UNREACHABLE: u8 = 69;
/// A file, a process or a terminal could not be had.
pub(crate) const SYSTEM: u8 = 71;
/// Somebody else holds the lock, and the time to wait is over.
pub(crate) const BUSY: u8 = 75;
/// The server refused, or we do not understand each other, or do not trust: no permission, no such command, no such certificate.
pub(crate) const REFUSED: u8 = 76;
/// The lock was lost while the command ran.
pub(crate) const LOST: u8 = 79;

#[derive(Debug)]
pub(crate) struct Failure {
    code: u8,
    message: String,
}

impl Failure {
    pub(crate) fn new(code: u8, message: impl Display) -> Self {
        Self { code, message: message.to_string() }
    }

    /// With the reasons below the error, down to the first.
    fn of(code: u8, error: &dyn Error) -> Self {
        let mut message = error.to_string();
        let mut below = error.source();
        while let Some(source) = below {
            message = format!("{message}: {source}");
            below = source.source();
        }
        Self { code, message }
    }

    pub(crate) fn code(&self) -> u8 {
        self.code
    }

    pub(crate) fn report(&self) {
        say(self);
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// A line to standard error, from us and not from the command.
pub(crate) fn say(what: impl Display) {
    use io::Write;
    // Nobody may be there to read it.
    let _ = writeln!(io::stderr(), "flockctl: {what}");
}

impl From<ConnectError> for Failure {
    fn from(error: ConnectError) -> Self {
        let code = match error {
            ConnectError::Config(_) => USAGE,
            ConnectError::Server(_) | ConnectError::NoModule(_) | ConnectError::Tls(_) => REFUSED,
            _ => UNREACHABLE,
        };
        Self::of(code, &error)
    }
}

impl From<AcquireError> for Failure {
    fn from(error: AcquireError) -> Self {
        let code = match error {
            AcquireError::TimedOut => BUSY,
            AcquireError::Config(_) => USAGE,
            AcquireError::Server(_) => REFUSED,
            _ => UNREACHABLE,
        };
        Self::of(code, &error)
    }
}

impl From<HoldError> for Failure {
    fn from(error: HoldError) -> Self {
        let code = match error {
            HoldError::Lost(_) => LOST,
            HoldError::Server(_) | HoldError::Refused => REFUSED,
            _ => UNREACHABLE,
        };
        Self::of(code, &error)
    }
}

impl From<AdminError> for Failure {
    fn from(error: AdminError) -> Self {
        let code = match error {
            AdminError::Server(_) | AdminError::Unreadable => REFUSED,
            _ => UNREACHABLE,
        };
        Self::of(code, &error)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::of(SYSTEM, &error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_told_down_to_the_first() {
        let first = io::Error::other("connection refused");
        let failure = Failure::from(AdminError::Unavailable(first.into()));
        assert_eq!(failure.code(), UNREACHABLE);
        assert_eq!(failure.message, "the server cannot be reached: connection refused");
    }
}
