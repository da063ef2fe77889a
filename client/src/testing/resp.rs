//! The server's half of RESP3: requests in, replies and pushes out.

use std::fmt::Display;
use std::io::{self, ErrorKind};

use flock_core::wire::report::{self, Reply as _};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt};

/// The words of a request.
pub(super) type Request = Vec<Vec<u8>>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    Word(&'static str),
    Integer(u64),
    Nil,
    Bulk(Vec<u8>),
    Array(Vec<Reply>),
    Map(Vec<(Reply, Reply)>),
    /// Not an answer: what comes by itself.
    Push(Vec<Reply>),
    Error(String),
    /// One value, written already.
    Encoded(Encoded),
}

impl Reply {
    pub(super) fn bulk(bytes: impl AsRef<[u8]>) -> Self {
        Self::Bulk(bytes.as_ref().to_vec())
    }

    pub(super) fn encoded(&self) -> Vec<u8> {
        let mut out = Encoded::default();
        self.encode(&mut out);
        out.0
    }

    fn encode(&self, out: &mut Encoded) {
        match self {
            Self::Word(word) => out.line('+', word),
            Self::Integer(number) => out.integer(*number),
            Self::Nil => out.nil(),
            Self::Error(error) => out.line('-', error),
            Self::Bulk(bytes) => out.bulk(bytes),
            Self::Array(items) => {
                out.array(items.len());
                items.iter().for_each(|item| item.encode(out));
            }
            Self::Push(items) => {
                out.line('>', items.len());
                items.iter().for_each(|item| item.encode(out));
            }
            Self::Map(pairs) => {
                out.map(pairs.len());
                for (key, value) in pairs {
                    key.encode(out);
                    value.encode(out);
                }
            }
            Self::Encoded(value) => out.0.extend_from_slice(&value.0),
        }
    }
}

/// Values as they go over the connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Encoded(Vec<u8>);

impl Encoded {
    fn line(&mut self, kind: char, rest: impl Display) {
        self.0.extend_from_slice(format!("{kind}{rest}\r\n").as_bytes());
    }
}

impl report::Reply for Encoded {
    fn nil(&mut self) {
        self.line('_', "");
    }

    fn integer(&mut self, number: u64) {
        self.line(':', number);
    }

    fn bulk(&mut self, bytes: &[u8]) {
        self.line('$', bytes.len());
        self.0.extend_from_slice(bytes);
        self.0.extend_from_slice(b"\r\n");
    }

    fn array(&mut self, len: usize) {
        self.line('*', len);
    }

    fn map(&mut self, len: usize) {
        self.line('%', len);
    }
}

/// Reads the next request, an array of bulk strings; `None` at the end.
pub(super) async fn read_request(stream: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Option<Request>> {
    if stream.fill_buf().await?.is_empty() {
        return Ok(None);
    }
    let mut request = Vec::new();
    for _ in 0..read_length(stream, b'*').await? {
        let mut word = vec![0; read_length(stream, b'$').await?];
        stream.read_exact(&mut word).await?;
        stream.read_exact(&mut [0; 2]).await?; // CR LF
        request.push(word);
    }
    Ok(Some(request))
}

async fn read_length(stream: &mut (impl AsyncBufRead + Unpin), kind: u8) -> io::Result<usize> {
    let mut line = Vec::new();
    stream.read_until(b'\n', &mut line).await?;
    let number = line.strip_prefix(&[kind]).and_then(|line| line.strip_suffix(b"\r\n"));
    let number = number.and_then(|number| str::from_utf8(number).ok()?.parse().ok());
    number.ok_or(ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn requests_are_read_one_after_the_other() {
        let mut stream = &b"*2\r\n$4\r\nPING\r\n$2\r\n\r\n\r\n*1\r\n$1\r\nx\r\n"[..];
        let words = |words: &[&str]| words.iter().map(|word| word.as_bytes().to_vec()).collect::<Request>();
        assert_eq!(read_request(&mut stream).await.unwrap(), Some(words(&["PING", "\r\n"])));
        assert_eq!(read_request(&mut stream).await.unwrap(), Some(words(&["x"])));
        assert_eq!(read_request(&mut stream).await.unwrap(), None);
    }

    #[tokio::test]
    async fn what_is_no_request_is_an_error() {
        for bytes in ["PING\r\n", "*1\r\n:7\r\n", "*1\r\n$5\r\nab", "*-1\r\n", "*1"] {
            assert!(read_request(&mut bytes.as_bytes()).await.is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn replies_are_encoded_as_resp3() {
        let reply = Reply::Map(vec![(Reply::bulk("k"), Reply::Array(vec![Reply::Integer(7), Reply::Nil]))]);
        assert_eq!(reply.encoded(), b"%1\r\n$1\r\nk\r\n*2\r\n:7\r\n_\r\n");
        assert_eq!(Reply::Push(vec![Reply::Word("x")]).encoded(), b">1\r\n+x\r\n");
        assert_eq!(Reply::Error("ERR no".into()).encoded(), b"-ERR no\r\n");
    }
}
