//! What a server answers: RESP2 and RESP3 in one type, and the parser of both.

use std::fmt;

/// A reply. Only what the protocol can tell apart and a test may want to: a RESP3 set is an `Array`, a verbatim string and a
/// big number are `Bulk`, and all three spellings of nothing are `Nil`.
#[derive(Clone, PartialEq)]
pub enum Reply {
    /// Nothing: `$-1`, `*-1` or `_`.
    Nil,
    /// A whole number.
    Int(i64),
    /// A string of any bytes.
    Bulk(Vec<u8>),
    /// A status line, such as OK.
    Simple(String),
    /// A list.
    Array(Vec<Reply>),
    /// A RESP3 map. RESP2 sends the same as a flat `Array`; [`Reply::field`] reads both.
    Map(Vec<(Reply, Reply)>),
    /// A RESP3 truth value.
    Bool(bool),
    /// A RESP3 floating-point number.
    Double(f64),
    /// An error: its first word, and the whole line.
    Error {
        /// The first word: `ERR`, `WRONGTYPE`, ...
        code: String,
        /// Everything the server said, the code included.
        text: String,
    },
    /// A RESP3 message that answers no command.
    Push(Vec<Reply>),
}

impl Reply {
    /// A bulk string, to compare with.
    pub fn bulk(bytes: impl AsRef<[u8]>) -> Reply {
        Reply::Bulk(bytes.as_ref().to_vec())
    }

    /// The status OK, to compare with.
    pub fn ok() -> Reply {
        Reply::Simple("OK".into())
    }

    /// The number.
    ///
    /// # Panics
    /// If it is none; so do the other `as_` functions.
    #[track_caller]
    pub fn as_int(&self) -> i64 {
        match self {
            Reply::Int(number) => *number,
            other => panic!("expected an integer, got {other}"),
        }
    }

    /// The fencing token of a grant: an integer above zero.
    #[track_caller]
    pub fn as_token(&self) -> u64 {
        match u64::try_from(self.as_int()) {
            Ok(token) if token > 0 => token,
            _ => panic!("expected a fencing token, got {self}"),
        }
    }

    /// The bytes of a bulk or simple string.
    #[track_caller]
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Reply::Bulk(bytes) => bytes,
            Reply::Simple(text) => text.as_bytes(),
            other => panic!("expected a string, got {other}"),
        }
    }

    /// The text of a bulk or simple string.
    #[track_caller]
    pub fn as_str(&self) -> &str {
        match std::str::from_utf8(self.as_bytes()) {
            Ok(text) => text,
            Err(_) => panic!("expected UTF-8, got {self}"),
        }
    }

    /// The elements of a list or a push.
    #[track_caller]
    pub fn as_array(&self) -> &[Reply] {
        match self {
            Reply::Array(items) | Reply::Push(items) => items,
            other => panic!("expected a list, got {other}"),
        }
    }

    /// Whether there was nothing.
    pub fn is_nil(&self) -> bool {
        *self == Reply::Nil
    }

    /// The first word of an error; none if this is no error.
    pub fn error_code(&self) -> Option<&str> {
        match self {
            Reply::Error { code, .. } => Some(code),
            _ => None,
        }
    }

    /// The whole line of an error.
    #[track_caller]
    pub fn error_text(&self) -> &str {
        match self {
            Reply::Error { text, .. } => text,
            other => panic!("expected an error, got {other}"),
        }
    }

    /// The value beside `name` in a map, be it a RESP3 map or the flat list that RESP2 makes of it.
    pub fn get(&self, name: &str) -> Option<&Reply> {
        let is_name = |key: &Reply| {
            matches!(key, Reply::Bulk(bytes) if bytes == name.as_bytes())
                || matches!(key, Reply::Simple(text) if text == name)
        };
        match self {
            Reply::Map(pairs) => pairs.iter().find(|(key, _)| is_name(key)).map(|(_, value)| value),
            Reply::Array(items) => items.chunks_exact(2).find(|pair| is_name(&pair[0])).map(|pair| &pair[1]),
            _ => None,
        }
    }

    /// The value beside `name`.
    ///
    /// # Panics
    /// If there is none.
    #[track_caller]
    pub fn field(&self, name: &str) -> &Reply {
        match self.get(name) {
            Some(value) => value,
            None => panic!("expected a map with the field {name}, got {self}"),
        }
    }
}

/// As a person would write it; bytes that are no text are escaped.
impl fmt::Display for Reply {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reply::Nil => write!(out, "(nil)"),
            Reply::Int(number) => write!(out, "{number}"),
            Reply::Bulk(bytes) => write!(out, "\"{}\"", bytes.escape_ascii()),
            Reply::Simple(text) => write!(out, "+{text}"),
            Reply::Array(items) => out.debug_list().entries(items).finish(),
            Reply::Map(pairs) => out.debug_map().entries(pairs.iter().map(|(key, value)| (key, value))).finish(),
            Reply::Bool(truth) => write!(out, "#{truth}"),
            Reply::Double(number) => write!(out, "{number:?}"),
            Reply::Error { text, .. } => write!(out, "-{text}"),
            Reply::Push(items) => {
                write!(out, ">")?;
                out.debug_list().entries(items).finish()
            }
        }
    }
}

impl fmt::Debug for Reply {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, out)
    }
}

/// Takes the first reply off `input`: the reply and how many bytes it took, or nothing if its end is not there yet.
///
/// # Errors
/// What is wrong, if the bytes are no RESP.
pub fn parse(input: &[u8]) -> Result<Option<(Reply, usize)>, String> {
    let mut cursor = Cursor { input, at: 0 };
    match cursor.reply() {
        Ok(reply) => Ok(Some((reply, cursor.at))),
        Err(Stop::Incomplete) => Ok(None),
        Err(Stop::Broken(why)) => Err(why),
    }
}

enum Stop {
    Incomplete,
    Broken(String),
}

struct Cursor<'a> {
    input: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn reply(&mut self) -> Result<Reply, Stop> {
        let line = self.line()?;
        let (kind, rest) =
            line.split_at_checked(1).ok_or_else(|| Stop::Broken("an empty line instead of a reply".into()))?;
        match kind {
            b"+" => Ok(Reply::Simple(text(rest))),
            b"-" => Ok(error(rest)),
            b":" => Ok(Reply::Int(number(rest)?)),
            b"_" => Ok(Reply::Nil),
            b"#" => Ok(Reply::Bool(rest == b"t")),
            b"," => Ok(Reply::Double(number(rest)?)),
            b"(" => Ok(Reply::bulk(rest)),
            b"$" => Ok(self.bytes(rest)?.map_or(Reply::Nil, Reply::bulk)),
            b"!" => Ok(self.bytes(rest)?.map_or(Reply::Nil, error)),
            // A verbatim string starts with three letters of format and a colon.
            b"=" => Ok(self.bytes(rest)?.map_or(Reply::Nil, |bytes| Reply::bulk(bytes.get(4..).unwrap_or_default()))),
            b"*" | b"~" => Ok(self.items(rest)?.map_or(Reply::Nil, Reply::Array)),
            b">" => Ok(self.items(rest)?.map_or(Reply::Nil, Reply::Push)),
            b"%" => Ok(Reply::Map(self.pairs(rest)?)),
            // Attributes are remarks about the reply that follows.
            b"|" => self.pairs(rest).and_then(|_| self.reply()),
            _ => Err(Stop::Broken(format!("no reply starts with \"{}\"", line.escape_ascii()))),
        }
    }

    /// Up to the next CRLF, which is taken too.
    fn line(&mut self) -> Result<&'a [u8], Stop> {
        let rest = &self.input[self.at..];
        let end = rest.windows(2).position(|pair| pair == b"\r\n").ok_or(Stop::Incomplete)?;
        self.at += end + 2;
        Ok(&rest[..end])
    }

    /// A string whose length `header` tells; nothing if that is negative.
    fn bytes(&mut self, header: &[u8]) -> Result<Option<&'a [u8]>, Stop> {
        let Ok(length) = usize::try_from(number::<i64>(header)?) else {
            return Ok(None);
        };
        let rest = &self.input[self.at..];
        let bytes = rest.get(..length).ok_or(Stop::Incomplete)?;
        match rest.get(length..length + 2) {
            None => Err(Stop::Incomplete),
            Some(b"\r\n") => {
                self.at += length + 2;
                Ok(Some(bytes))
            }
            Some(_) => Err(Stop::Broken("a string longer than it says".into())),
        }
    }

    fn items(&mut self, header: &[u8]) -> Result<Option<Vec<Reply>>, Stop> {
        match number::<i64>(header)? {
            ..0 => Ok(None),
            count => (0..count).map(|_| self.reply()).collect::<Result<_, _>>().map(Some),
        }
    }

    fn pairs(&mut self, header: &[u8]) -> Result<Vec<(Reply, Reply)>, Stop> {
        (0..number::<i64>(header)?).map(|_| Ok((self.reply()?, self.reply()?))).collect()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn error(line: &[u8]) -> Reply {
    let text = text(line);
    let code = text.split(' ').next().unwrap_or_default().to_owned();
    Reply::Error { code, text }
}

fn number<N: std::str::FromStr>(bytes: &[u8]) -> Result<N, Stop> {
    std::str::from_utf8(bytes)
        .ok()
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| Stop::Broken(format!("\"{}\" is no number", bytes.escape_ascii())))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every kind of reply, with what it should become.
    fn samples() -> Vec<(&'static [u8], Reply)> {
        let error = |code: &str, text: &str| Reply::Error { code: code.into(), text: text.into() };
        vec![
            (b"$-1\r\n", Reply::Nil),
            (b"*-1\r\n", Reply::Nil),
            (b"_\r\n", Reply::Nil),
            (b":-7\r\n", Reply::Int(-7)),
            (b"$4\r\na\r\nb\r\n", Reply::bulk(b"a\r\nb")),
            (b"$0\r\n\r\n", Reply::bulk(b"")),
            (b"+OK\r\n", Reply::ok()),
            (b"*0\r\n", Reply::Array(vec![])),
            (b"*2\r\n:1\r\n*1\r\n$-1\r\n", Reply::Array(vec![Reply::Int(1), Reply::Array(vec![Reply::Nil])])),
            (b"~1\r\n:1\r\n", Reply::Array(vec![Reply::Int(1)])),
            (b"%1\r\n+a\r\n:1\r\n", Reply::Map(vec![(Reply::Simple("a".into()), Reply::Int(1))])),
            (b"#t\r\n", Reply::Bool(true)),
            (b"#f\r\n", Reply::Bool(false)),
            (b",1.5\r\n", Reply::Double(1.5)),
            (b"(12345678901234567890\r\n", Reply::bulk("12345678901234567890")),
            (b"=6\r\ntxt:hi\r\n", Reply::bulk("hi")),
            (b"-WRONGTYPE no lock\r\n", error("WRONGTYPE", "WRONGTYPE no lock")),
            (b"!7\r\nERR a\r\n\r\n", error("ERR", "ERR a\r\n")),
            (b">1\r\n+hi\r\n", Reply::Push(vec![Reply::Simple("hi".into())])),
            (b"|1\r\n+ttl\r\n:1\r\n:5\r\n", Reply::Int(5)),
        ]
    }

    #[test]
    fn every_kind_is_parsed_to_its_end() {
        for (bytes, reply) in samples() {
            assert_eq!(parse(bytes), Ok(Some((reply, bytes.len()))));
        }
    }

    #[test]
    fn every_prefix_is_incomplete() {
        for (bytes, _) in samples() {
            for end in 0..bytes.len() {
                assert_eq!(parse(&bytes[..end]), Ok(None), "{}", bytes.escape_ascii());
            }
        }
    }

    #[test]
    fn nonsense_is_an_error() {
        for bytes in [&b"\r\n"[..], b"?\r\n", b":1x\r\n", b"$1\r\nabc\r\n", b"*one\r\n"] {
            assert!(parse(bytes).is_err(), "{}", bytes.escape_ascii());
        }
    }

    #[test]
    fn field_reads_a_map_and_the_flat_list_of_one() {
        let (name, value) = (Reply::bulk("mode"), Reply::bulk("shared"));
        let map = Reply::Map(vec![(name.clone(), value.clone())]);
        assert_eq!(map.field("mode"), &value);
        assert_eq!(Reply::Array(vec![name, value.clone()]).field("mode"), &value);
        assert_eq!(map.get("owner"), None);
    }
}
