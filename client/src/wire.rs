//! Commands out, replies in. Beside this file only [`crate::link`] and [`crate::client`] know types of the `redis` crate.
//!
//! The arguments come from flock-core, where the server's parser is; a reply that is not exactly one of those documented is no reply:
//! the connection it came on is out of step, and is dropped.

use flock_core::Token;
use flock_core::wire::command::Command;
use redis::{Cmd, Pipeline, Value};

/// What ACQUIRE answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Acquired {
    Granted(Token),
    Busy,
    Queued,
}

pub(crate) fn command<'a, C: Command<'a>>(request: &C) -> Cmd {
    let mut cmd = redis::cmd(C::NAME);
    request.args(|arg| {
        cmd.arg(arg);
    });
    cmd
}

pub(crate) fn pipeline<'a, C: Command<'a>>(requests: impl IntoIterator<Item = C>) -> Pipeline {
    let mut pipeline = redis::pipe();
    pipeline.ignore_errors(); // each reply is judged by itself
    for request in requests {
        pipeline.add_command(command(&request));
    }
    pipeline
}

pub(crate) fn acquired(reply: &Value) -> Option<Acquired> {
    match reply {
        Value::Int(token) => u64::try_from(*token).ok().and_then(Token::new).map(Acquired::Granted),
        Value::Nil => Some(Acquired::Busy),
        Value::Array(items) => match items.first() {
            Some(Value::BulkString(word)) if word == b"QUEUED" => Some(Acquired::Queued),
            _ => None,
        },
        _ => None,
    }
}

/// What RELEASE and RENEW answer.
pub(crate) fn yes_or_no(reply: &Value) -> Option<bool> {
    match reply {
        Value::Int(0) => Some(false),
        Value::Int(1) => Some(true),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flock_core::{Acquire, Millis, Wait};

    #[test]
    fn command_is_what_the_servers_parser_reads() {
        let request =
            Acquire { wait: Wait::Queue(Millis(5)), channel: Some(b"c"), ..Acquire::new(b"k", b"o", Millis(7)) };
        let packed = command(&request).get_packed_command();
        let expected = "*8\r\n$13\r\nFLOCK.ACQUIRE\r\n$1\r\nk\r\n$1\r\no\r\n$1\r\n7\r\n$5\r\nQUEUE\r\n$1\r\n5\r\n$7\r\nCHANNEL\r\n$1\r\nc\r\n";
        assert_eq!(String::from_utf8(packed), Ok(expected.to_owned()));
    }

    #[test]
    fn replies_are_read_strictly() {
        assert_eq!(acquired(&Value::Int(7)), Token::new(7).map(Acquired::Granted));
        assert_eq!(acquired(&Value::Nil), Some(Acquired::Busy));
        let queued = Value::Array(vec![Value::BulkString(b"QUEUED".to_vec()), Value::Int(1)]);
        assert_eq!(acquired(&queued), Some(Acquired::Queued));
        for wrong in [Value::Int(0), Value::Int(-1), Value::Okay, Value::Array(vec![]), Value::SimpleString("x".into())]
        {
            assert_eq!(acquired(&wrong), None, "{wrong:?}");
        }
        assert_eq!(yes_or_no(&Value::Int(1)), Some(true));
        assert_eq!(yes_or_no(&Value::Int(2)), None);
    }
}
