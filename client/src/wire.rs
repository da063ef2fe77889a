//! Commands out, replies in. Beside this file only those that have to do with connections know types of the `redis` crate:
//! [`crate::acknowledgement`], [`crate::client`], [`crate::dialer`], [`crate::link`], [`crate::sentinel`], and TLS.
//!
//! The arguments come from flock-core, where the server's parser is; a reply that is not exactly one of those documented is no reply:
//! the connection it came on is out of step, and is dropped.

use flock_core::wire::command::Command;
use flock_core::{Acquire, Millis, Renew, Token};
use redis::{Cmd, Pipeline, Value};

use crate::hold::Name;

/// What ACQUIRE answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Acquired {
    Granted(Token),
    Busy,
    Queued,
}

/// Room for most commands, so that it is allocated once.
const WORDS_USUAL: usize = 16;
const BYTES_USUAL: usize = 256;

pub(crate) fn command<'a, C: Command<'a>>(request: &C) -> Cmd {
    let mut cmd = Cmd::with_capacity(WORDS_USUAL, BYTES_USUAL);
    cmd.arg(C::NAME);
    request.args(|arg| {
        cmd.arg(arg);
    });
    cmd
}

pub(crate) fn pipeline(commands: impl IntoIterator<Item = Cmd>) -> Pipeline {
    let mut pipeline = redis::pipe();
    pipeline.ignore_errors(); // each reply is judged by itself
    for command in commands {
        pipeline.add_command(command);
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

/// The renewal of a hold.
///
/// RENEW replaces the lease. A re-entrant handle must not cut what its owner's other handles believe in: its renewal is a conversion to
/// the mode that the hold has, which extends the lease, never shortens it, and never grants anew.
pub(crate) fn renewal(name: &Name, lease: Millis, token: Option<Token>) -> Cmd {
    let Name { key, owner, id, .. } = name;
    match (id, token) {
        (Some(_), Some(token)) => command(&Acquire { convert: Some(token), ..Acquire::new(key, owner, lease) }),
        _ => command(&Renew { key, owner, lease, token }),
    }
}

/// Whether the answer to that renewal says that the hold is kept.
pub(crate) fn renewed(name: &Name, token: Option<Token>, reply: &Value) -> Option<bool> {
    match (&name.id, token) {
        (Some(_), Some(token)) => match acquired(reply)? {
            Acquired::Granted(granted) => Some(granted == token),
            Acquired::Busy => Some(false),
            Acquired::Queued => None,
        },
        _ => yes_or_no(reply),
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
    use flock_core::Wait;

    #[test]
    fn reentrant_handle_is_renewed_without_cutting_its_lease() {
        let (seven, eight) = (Token::new(7), Token::new(8));
        let plain = Name { number: 1, key: (*b"k").into(), owner: (*b"o").into(), id: None };
        let handle = Name { id: Some((*b"i").into()), ..plain.clone() };
        let packed = |name| String::from_utf8(renewal(name, Millis(5), seven).get_packed_command()).unwrap();
        assert!(packed(&plain).contains("FLOCK.RENEW") && packed(&plain).contains("TOKEN"));
        assert!(packed(&handle).contains("FLOCK.ACQUIRE") && packed(&handle).contains("CONVERT"));
        assert_eq!(renewed(&plain, seven, &Value::Int(1)), Some(true));
        assert_eq!(renewed(&plain, seven, &Value::Int(7)), None);
        assert_eq!(renewed(&handle, seven, &Value::Int(7)), Some(true));
        assert_eq!(renewed(&handle, eight, &Value::Int(7)), Some(false));
        assert_eq!(renewed(&handle, seven, &Value::Nil), Some(false));
    }

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
