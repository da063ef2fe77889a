//! Listening to channels.

use std::time::Duration;

use crate::reply::Reply;
use crate::resp::{ANSWER_WITHIN, Conn, RecvError};

/// A message of a channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// `message`, `pmessage`, `smessage`; or `sunsubscribe`, when a slot has moved away.
    pub kind: String,
    /// Where it was published.
    pub channel: Vec<u8>,
    /// What was published.
    pub payload: Vec<u8>,
}

/// A connection that only listens. It hears the same in both protocol versions.
#[derive(Debug)]
pub struct Subscriber {
    conn: Conn,
}

impl Subscriber {
    /// Subscribes with `verb` (SUBSCRIBE, PSUBSCRIBE or SSUBSCRIBE); returns when the server has confirmed every channel.
    ///
    /// # Panics
    /// If it does not.
    #[track_caller]
    pub fn new<C: AsRef<[u8]>>(mut conn: Conn, verb: &str, channels: &[C]) -> Subscriber {
        let mut command = vec![verb.as_bytes()];
        command.extend(channels.iter().map(AsRef::as_ref));
        conn.send(&command);
        let mut subscriber = Subscriber { conn };
        for _ in channels {
            let confirmation = subscriber.conn.frame_within(ANSWER_WITHIN);
            match &confirmation {
                Ok(Reply::Array(_) | Reply::Push(_)) => {}
                other => panic!("expected {verb} to be confirmed, got {other:?}"),
            }
        }
        subscriber
    }

    /// Takes a connection whose subscription has been confirmed already: for servers that may not confirm it.
    pub fn subscribed(conn: Conn) -> Subscriber {
        Subscriber { conn }
    }

    /// The next message, if it comes in time.
    ///
    /// # Errors
    /// Why there is none.
    ///
    /// # Panics
    /// If something else comes.
    #[track_caller]
    pub fn message_within(&mut self, within: Duration) -> Result<Message, RecvError> {
        let frame = self.conn.frame_within(within)?;
        let [kind, about @ ..] = frame.as_array() else {
            panic!("expected a message, got {frame}");
        };
        // A pmessage names its pattern before the channel; a sunsubscribe ends with a count.
        let at = usize::from(kind.as_bytes() == b"pmessage");
        let payload = match about.get(at + 1) {
            Some(Reply::Int(count)) => count.to_string().into_bytes(),
            Some(payload) => payload.as_bytes().to_vec(),
            None => panic!("expected a message, got {frame}"),
        };
        Ok(Message { kind: kind.as_str().to_owned(), channel: about[at].as_bytes().to_vec(), payload })
    }

    /// The next message.
    ///
    /// # Panics
    /// If there is none within [`ANSWER_WITHIN`].
    #[track_caller]
    pub fn message(&mut self) -> Message {
        match self.message_within(ANSWER_WITHIN) {
            Ok(message) => message,
            Err(error) => panic!("expected a message: {error:?}"),
        }
    }

    /// Wants no message for `during`.
    ///
    /// # Panics
    /// If there is one, or if the connection ends.
    #[track_caller]
    pub fn expect_silence(&mut self, during: Duration) {
        match self.message_within(during) {
            Err(RecvError::TimedOut) => {}
            other => panic!("expected no message for {during:?}, got {other:?}"),
        }
    }

    /// The connection below: to close it, or to ask its id.
    pub fn into_conn(self) -> Conn {
        self.conn
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resp::Protocol;
    use crate::server::Server;

    #[test]
    fn both_protocols_hear_the_same() {
        for protocol in [Protocol::Resp2, Protocol::Resp3] {
            let server = Server::builder().without_module().start();
            let mut publisher = server.connect(Protocol::Resp2);
            let mut plain = Subscriber::new(server.connect(protocol), "SUBSCRIBE", &["news", "more"]);
            let mut pattern = Subscriber::new(server.connect(protocol), "PSUBSCRIBE", &["n*"]);
            let mut shard = Subscriber::new(server.connect(protocol), "SSUBSCRIBE", &["news"]);
            assert_eq!(publisher.cmd(&["PUBLISH", "news", "a\r\nb"]), Reply::Int(2));
            assert_eq!(publisher.cmd(&["SPUBLISH", "news", "a\r\nb"]), Reply::Int(1));
            for (subscriber, kind) in [(&mut plain, "message"), (&mut pattern, "pmessage"), (&mut shard, "smessage")] {
                let message = subscriber.message();
                assert_eq!(message.kind, kind);
                assert_eq!(message.channel, b"news");
                assert_eq!(message.payload, b"a\r\nb");
                subscriber.expect_silence(Duration::from_millis(10));
            }
        }
    }
}
