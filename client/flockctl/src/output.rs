//! What goes to standard output: text for people, JSON for scripts, and bytes that may be anything.

use std::fmt::{self, Write as _};
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use flock_client::{HolderState, Mode};
use serde::ser::{Serialize, SerializeMap, Serializer};

use crate::failure::Failure;

/// Prints all of it. A reader that has gone, such as `head`, has read what it wanted.
pub(crate) fn print(text: impl AsRef<[u8]>) -> Result<u8, Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_ref()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(0),
    }
}

pub(crate) fn print_json(value: &serde_json::Value) -> Result<u8, Failure> {
    print(format!("{value:#}\n"))
}

/// Whether standard output wants colours: it is a terminal, and nobody has set NO_COLOR.
pub(crate) fn colours() -> bool {
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    io::stdout().is_terminal() && !no_color
}

/// Bytes that somebody else has chosen: a key, an owner, a label.
///
/// For people: what a terminal could take for a command, and what is not UTF-8, is escaped. For scripts: a string, or
/// `{"hex": "..."}` for what is not UTF-8.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bytes<'a>(pub(crate) &'a [u8]);

impl fmt::Display for Bytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for chunk in self.0.utf8_chunks() {
            for c in chunk.valid().chars() {
                match c {
                    '"' | '\'' => f.write_char(c)?,
                    c => write!(f, "{}", c.escape_debug())?,
                }
            }
            for byte in chunk.invalid() {
                write!(f, "\\x{byte:02x}")?;
            }
        }
        Ok(())
    }
}

impl Serialize for Bytes<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match str::from_utf8(self.0) {
            Ok(text) => serializer.serialize_str(text),
            Err(_) => {
                let hex: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
                let mut map = serializer.serialize_map(Some(1))?;
                map.serialize_entry("hex", &hex)?;
                map.end()
            }
        }
    }
}

pub(crate) fn mode(mode: Option<Mode>) -> &'static str {
    match mode {
        None => "free",
        Some(Mode::Exclusive) => "exclusive",
        Some(Mode::Shared) => "shared",
    }
}

pub(crate) fn state(state: HolderState) -> &'static str {
    match state {
        HolderState::Held => "held",
        HolderState::Claimed => "claimed",
        HolderState::Expired => "expired",
        _ => "unknown",
    }
}

pub(crate) fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A duration as people read it: no more than they want to know.
pub(crate) fn brief(duration: Duration) -> String {
    let ms = ms(duration);
    let step = match ms {
        0..1_000 => 1,
        1_000..60_000 => 100,
        60_000.. => 1_000,
    };
    humantime::format_duration(Duration::from_millis(ms / step * step)).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_cannot_drive_a_terminal() {
        assert_eq!(Bytes(b"caf\xc3\xa9 \"x\"").to_string(), "café \"x\"");
        assert_eq!(Bytes(b"a\x1b[2J\n\\\xff").to_string(), "a\\u{1b}[2J\\n\\\\\\xff");
        assert_eq!(Bytes("\u{202e}".as_bytes()).to_string(), "\\u{202e}"); // turns the line around
    }

    #[test]
    fn bytes_are_exact_in_json() {
        assert_eq!(serde_json::to_string(&Bytes(b"a\n")).unwrap(), r#""a\n""#);
        assert_eq!(serde_json::to_string(&Bytes(b"a\xff")).unwrap(), r#"{"hex":"61ff"}"#);
    }

    #[test]
    fn durations_are_brief() {
        assert_eq!(brief(Duration::from_micros(7_900)), "7ms");
        assert_eq!(brief(Duration::from_millis(29_987)), "29s 900ms");
        assert_eq!(brief(Duration::from_millis(61_987)), "1m 1s");
        assert_eq!(brief(Duration::ZERO), "0s");
    }
}
