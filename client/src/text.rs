//! Keys, owners and labels, which are bytes, as text.

use std::fmt;

/// Shown as what it mostly is: text in quotes, with escapes for what is none.
pub(crate) struct Text<'a>(pub(crate) &'a [u8]);

impl fmt::Debug for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}
