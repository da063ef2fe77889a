//! Numbers and words in text: the alphabet that commands, messages and changes share.
//!
//! A number is written in one way only, the way the server itself reads integers: no sign but a minus, no leading zero, no space,
//! no exponent. So two texts of one value are equal byte for byte.

use crate::time::Millis;
use crate::token::Token;
use crate::wire::Corrupt;
use alloc::vec::Vec;

/// Why bytes are no number of a wanted range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumberFault {
    /// Not a whole number in decimal digits.
    NotWhole,
    /// A whole number, but negative or above 2^64 - 1.
    OutOfRange,
}

/// Reads a whole number of 0 to 2^64 - 1.
///
/// # Source
/// `string2ll` of the server (`src/util.c`): the same texts are numbers.
pub fn parse_number(bytes: &[u8]) -> Result<u64, NumberFault> {
    if bytes == b"0" {
        return Ok(0);
    }
    let (negative, digits) = match bytes.strip_prefix(b"-") {
        Some(digits) => (true, digits),
        None => (false, bytes),
    };
    if !matches!(digits.first(), Some(b'1'..=b'9')) {
        return Err(NumberFault::NotWhole);
    }
    let mut number = Some(0u64); // none: too big
    for digit in digits {
        let value = digit.wrapping_sub(b'0');
        if value > 9 {
            return Err(NumberFault::NotWhole);
        }
        number = number.and_then(|number| number.checked_mul(10)?.checked_add(value.into()));
    }
    number.filter(|_| !negative).ok_or(NumberFault::OutOfRange)
}

/// A number as decimal text, without an allocation.
#[derive(Clone, Copy, Debug)]
pub struct Decimal {
    /// 2^64 - 1 has 20 digits.
    digits: [u8; 20],
    start: usize,
}

impl Decimal {
    /// `number` as text.
    #[must_use]
    pub fn new(number: u64) -> Self {
        let mut digits = [b'0'; 20];
        let mut start = digits.len();
        let mut rest = number;
        // Two digits a division: the divisions wait for each other, and a grant has four numbers.
        for pair in digits.rchunks_exact_mut(2) {
            let value = (rest % 100) as u8;
            rest /= 100;
            if let [tens, ones] = pair {
                *tens = b'0' + value / 10;
                *ones = b'0' + value % 10;
            }
            start -= if rest == 0 && value < 10 { 1 } else { 2 };
            if rest == 0 {
                break;
            }
        }
        Self { digits, start }
    }

    /// The text.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.digits.get(self.start..).unwrap_or_default()
    }
}

/// Appends `number` in decimal.
pub fn push_number(out: &mut Vec<u8>, number: u64) {
    out.extend_from_slice(Decimal::new(number).as_bytes());
}

/// Appends a length in decimal.
pub(crate) fn push_len(out: &mut Vec<u8>, len: usize) {
    // A length in memory is below 2^64 on every machine there is.
    push_number(out, u64::try_from(len).unwrap_or(u64::MAX));
}

/// Reads a text from the front: words, each followed by one space, then bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Words<'a> {
    rest: &'a [u8],
}

impl<'a> Words<'a> {
    pub(crate) fn new(text: &'a [u8]) -> Self {
        Self { rest: text }
    }

    /// The next word; the space after it is consumed.
    pub(crate) fn word(&mut self) -> Result<&'a [u8], Corrupt> {
        let end = self.rest.iter().position(|byte| *byte == b' ').ok_or(Corrupt::new("a word is missing"))?;
        let (word, rest) = self.rest.split_at_checked(end).ok_or(Corrupt::new("a word is missing"))?;
        self.rest = rest.strip_prefix(b" ").unwrap_or_default();
        Ok(word)
    }

    /// The next word, a number of at most `max`.
    pub(crate) fn number(&mut self, max: u64) -> Result<u64, Corrupt> {
        let word = self.word()?;
        number(word, max)
    }

    /// The next word, a duration in milliseconds.
    pub(crate) fn millis(&mut self) -> Result<Millis, Corrupt> {
        let word = self.word()?;
        millis(word)
    }

    /// The next word, a token.
    pub(crate) fn token(&mut self) -> Result<Token, Corrupt> {
        let word = self.word()?;
        token(word)
    }

    /// The next word, the length of something that follows and is at most `max` bytes long.
    pub(crate) fn len(&mut self, max: usize) -> Result<usize, Corrupt> {
        let len = self.number(u64::MAX)?;
        usize::try_from(len).ok().filter(|len| *len <= max).ok_or(Corrupt::new("a length is out of range"))
    }

    /// The next `len` bytes.
    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8], Corrupt> {
        let (bytes, rest) = self.rest.split_at_checked(len).ok_or(Corrupt::new("cut short"))?;
        self.rest = rest;
        Ok(bytes)
    }

    /// The space that ends a piece of raw bytes.
    pub(crate) fn space(&mut self) -> Result<(), Corrupt> {
        self.rest = self.rest.strip_prefix(b" ").ok_or(Corrupt::new("a length disagrees with its bytes"))?;
        Ok(())
    }

    /// All that is left.
    pub(crate) fn rest(self) -> &'a [u8] {
        self.rest
    }
}

pub(crate) fn number(word: &[u8], max: u64) -> Result<u64, Corrupt> {
    let number = parse_number(word).map_err(|_| Corrupt::new("not a number"))?;
    if number <= max { Ok(number) } else { Err(Corrupt::new("a number is out of range")) }
}

pub(crate) fn millis(word: &[u8]) -> Result<Millis, Corrupt> {
    let ms = number(word, u64::from(u32::MAX))?;
    Ok(Millis(u32::try_from(ms).unwrap_or(u32::MAX)))
}

pub(crate) fn token(word: &[u8]) -> Result<Token, Corrupt> {
    Token::new(number(word, Token::MAX)?).ok_or(Corrupt::new("a token is zero"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_the_texts_that_the_server_takes_for_integers() {
        // Both ends must agree on what a number is, or a proxy could read another lease than the server.
        for (text, number) in
            [("0", 0), ("1", 1), ("10", 10), ("9007199254740991", (1 << 53) - 1), ("18446744073709551615", u64::MAX)]
        {
            assert_eq!(parse_number(text.as_bytes()), Ok(number), "{text}");
        }
        for text in
            ["", " 5", "5 ", "+5", "05", "00", "-0", "-", "--1", "0x5", "1e3", "5.0", "NaN", "5\0", "५", "1_000"]
        {
            assert_eq!(parse_number(text.as_bytes()), Err(NumberFault::NotWhole), "{text:?}");
        }
        for text in ["-1", "18446744073709551616", "9999999999999999999999999999999999999999"] {
            assert_eq!(parse_number(text.as_bytes()), Err(NumberFault::OutOfRange), "{text}");
        }
    }

    #[test]
    fn decimal_writes_every_length_of_number() {
        for (number, text) in [(0, "0"), (9, "9"), (10, "10"), (100, "100"), (u64::MAX, "18446744073709551615")] {
            assert_eq!(Decimal::new(number).as_bytes(), text.as_bytes());
        }
    }

    #[test]
    fn words_end_with_a_space_and_the_rest_is_raw() {
        let mut words = Words::new(b"one 22 a b");
        assert_eq!(words.word(), Ok(&b"one"[..]));
        assert_eq!(words.number(22), Ok(22));
        assert_eq!(words.rest(), b"a b");
        assert!(Words::new(b"one").word().is_err());
        assert!(Words::new(b"23 ").number(22).is_err());
    }
}
