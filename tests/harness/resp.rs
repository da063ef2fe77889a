//! A connection that can do what a test needs and a client library rightly hides.
//!
//! Tests leave a blocked command in flight while others act, read pushes in the order they came, send half a command, garbage
//! or the inline form, and break off with FIN or RST. So this is a small client of our own, on a blocking socket, and shares
//! no code with what it tests. Every read has a deadline; a read that ran into it loses no byte, and can be repeated.

use std::collections::VecDeque;
use std::fmt;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::args::{Words, encode};
use crate::reply::{Reply, parse};

/// How long [`Conn::recv`] waits: far beyond any answer of a healthy server, even on a machine with more to do than it can.
pub const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// The protocol version of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// What every client speaks.
    Resp2,
    /// Maps, truth values, and pushes beside replies.
    Resp3,
}

/// Why no reply came.
#[derive(Debug, PartialEq, Eq)]
pub enum RecvError {
    /// Nothing, or only a part, came in time. The connection can still be used.
    TimedOut,
    /// The other side closed or reset the connection.
    Closed,
    /// What came is no RESP.
    Broken(String),
}

/// One connection to a server.
pub struct Conn {
    stream: TcpStream,
    /// Bytes that came and are not parsed yet.
    inbox: Vec<u8>,
    /// What was parsed while something else was looked for.
    replies: VecDeque<Reply>,
    pushes: VecDeque<Reply>,
    id: Option<i64>,
}

impl Conn {
    /// Connects, says hello in `protocol` and learns the connection's id.
    ///
    /// # Panics
    /// If nobody answers.
    #[track_caller]
    pub fn open(address: SocketAddr, protocol: Protocol) -> Conn {
        let mut conn = Conn::open_raw(address);
        if protocol == Protocol::Resp3 {
            let hello = conn.cmd(&["HELLO", "3"]);
            assert_eq!(hello.error_code(), None, "no RESP3 at {address}");
        }
        conn.id = match conn.cmd(&["CLIENT", "ID"]) {
            Reply::Int(id) => Some(id),
            _ => None, // Not allowed to this user: the connection is usable all the same.
        };
        conn
    }

    /// Connects and sends nothing.
    ///
    /// # Panics
    /// If nobody listens.
    #[track_caller]
    pub fn open_raw(address: SocketAddr) -> Conn {
        match Conn::try_open_raw(address) {
            Ok(conn) => conn,
            Err(error) => panic!("cannot connect to {address}: {error}"),
        }
    }

    /// Connects and sends nothing.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn try_open_raw(address: SocketAddr) -> std::io::Result<Conn> {
        let stream = TcpStream::connect_timeout(&address, ANSWER_WITHIN)?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(ANSWER_WITHIN))?;
        Ok(Conn { stream, inbox: Vec::new(), replies: VecDeque::new(), pushes: VecDeque::new(), id: None })
    }

    /// The server's id of this connection, as in CLIENT LIST.
    ///
    /// # Panics
    /// If it was never learnt: on a raw connection, or for a user who may not ask.
    #[track_caller]
    pub fn id(&self) -> i64 {
        self.id.expect("this connection does not know its id")
    }

    /// The address of this end.
    pub fn local_addr(&self) -> SocketAddr {
        self.stream.local_addr().expect("a connection has two ends")
    }

    /// Sends a command and waits for its reply.
    ///
    /// # Panics
    /// If there is none within [`ANSWER_WITHIN`].
    #[track_caller]
    pub fn cmd<A: AsRef<[u8]>>(&mut self, args: &[A]) -> Reply {
        match self.try_cmd(args) {
            Ok(reply) => reply,
            Err(error) => panic!("no reply to {}: {error:?}", Words(args)),
        }
    }

    /// Sends a command and waits for its reply, for servers that may die meanwhile.
    ///
    /// # Errors
    /// `Closed` also if the command could not be sent.
    pub fn try_cmd<A: AsRef<[u8]>>(&mut self, args: &[A]) -> Result<Reply, RecvError> {
        self.try_send_bytes(&encode(args)).map_err(|_| RecvError::Closed)?;
        self.recv_within(ANSWER_WITHIN)
    }

    /// Sends a command and does not wait: [`Conn::recv`] takes the reply, whenever it comes.
    ///
    /// # Panics
    /// If the connection is closed.
    #[track_caller]
    pub fn send<A: AsRef<[u8]>>(&mut self, args: &[A]) {
        self.send_bytes(&encode(args));
    }

    /// Sends bytes as they are: a part of a command, the inline form, nonsense.
    ///
    /// # Panics
    /// If the connection is closed.
    #[track_caller]
    pub fn send_bytes(&mut self, bytes: &[u8]) {
        if let Err(error) = self.try_send_bytes(bytes) {
            panic!("cannot send \"{}\": {error}", bytes.escape_ascii());
        }
    }

    /// Sends bytes as they are, to a server that may not want them.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn try_send_bytes(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// The next reply; pushes that come before it are kept for [`Conn::push_within`].
    ///
    /// # Panics
    /// If there is none within [`ANSWER_WITHIN`].
    #[track_caller]
    pub fn recv(&mut self) -> Reply {
        match self.recv_within(ANSWER_WITHIN) {
            Ok(reply) => reply,
            Err(error) => panic!("expected a reply: {error:?}"),
        }
    }

    /// The next reply, if it comes in time.
    ///
    /// # Errors
    /// Why there is none.
    pub fn recv_within(&mut self, within: Duration) -> Result<Reply, RecvError> {
        let deadline = Instant::now() + within;
        loop {
            if let Some(reply) = self.replies.pop_front() {
                return Ok(reply);
            }
            self.sort_in_next(deadline)?;
        }
    }

    /// The next push, if it comes in time; replies that come before it are kept for [`Conn::recv`].
    ///
    /// # Errors
    /// Why there is none.
    pub fn push_within(&mut self, within: Duration) -> Result<Reply, RecvError> {
        let deadline = Instant::now() + within;
        loop {
            if let Some(push) = self.pushes.pop_front() {
                return Ok(push);
            }
            self.sort_in_next(deadline)?;
        }
    }

    /// Wants no reply for `during`: a blocked command must stay blocked.
    ///
    /// # Panics
    /// If there is one, or if the connection ends.
    #[track_caller]
    pub fn expect_silence(&mut self, during: Duration) {
        match self.recv_within(during) {
            Err(RecvError::TimedOut) => {}
            other => panic!("expected silence for {during:?}, got {other:?}"),
        }
    }

    /// Wants the server to close this connection; replies that come before are skipped.
    ///
    /// # Panics
    /// If it is still open after [`ANSWER_WITHIN`].
    #[track_caller]
    pub fn expect_close(&mut self) {
        let deadline = Instant::now() + ANSWER_WITHIN;
        loop {
            match self.recv_within(deadline.saturating_duration_since(Instant::now())) {
                Ok(_) => {}
                Err(RecvError::Closed) => return,
                Err(error) => panic!("expected the connection to be closed: {error:?}"),
            }
        }
    }

    /// Says that nothing more will be sent (FIN), and goes on reading.
    pub fn close_sending(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Breaks the connection off with RST, as a crashed host that came back would.
    pub fn abort(self) {
        reset_on_close(&self.stream);
    }

    /// The next reply or push, whichever is there: RESP2 sends messages as replies, RESP3 as pushes.
    pub(crate) fn frame_within(&mut self, within: Duration) -> Result<Reply, RecvError> {
        let deadline = Instant::now() + within;
        loop {
            if let Some(frame) = self.pushes.pop_front().or_else(|| self.replies.pop_front()) {
                return Ok(frame);
            }
            self.sort_in_next(deadline)?;
        }
    }

    fn sort_in_next(&mut self, deadline: Instant) -> Result<(), RecvError> {
        loop {
            if let Some((reply, length)) = parse(&self.inbox).map_err(RecvError::Broken)? {
                self.inbox.drain(..length);
                match reply {
                    Reply::Push(_) => self.pushes.push_back(reply),
                    _ => self.replies.push_back(reply),
                }
                return Ok(());
            }
            self.read_more(deadline)?;
        }
    }

    fn read_more(&mut self, deadline: Instant) -> Result<(), RecvError> {
        // Zero would mean to wait for ever. A deadline that has passed still takes what is there.
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_micros(100));
        self.stream.set_read_timeout(Some(left)).expect("a positive read timeout is accepted");
        let mut chunk = [0; 65_536];
        match self.stream.read(&mut chunk) {
            Ok(0) => Err(RecvError::Closed),
            Ok(length) => {
                self.inbox.extend_from_slice(&chunk[..length]);
                Ok(())
            }
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut => Err(RecvError::TimedOut),
                ErrorKind::Interrupted => Ok(()),
                _ => Err(RecvError::Closed),
            },
        }
    }
}

impl fmt::Debug for Conn {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Conn({:?}, id {:?})", self.stream.peer_addr(), self.id)
    }
}

/// Makes the kernel send RST, not FIN, when the last handle of `stream` is closed.
pub(crate) fn reset_on_close(stream: &TcpStream) {
    let linger = nix::libc::linger { l_onoff: 1, l_linger: 0 };
    nix::sys::socket::setsockopt(stream, nix::sys::socket::sockopt::Linger, &linger)
        .expect("a TCP socket takes SO_LINGER");
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::server::Server;

    /// A connection, and its other end in the hands of the test.
    fn pair() -> (Conn, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("cannot listen");
        let address = listener.local_addr().expect("a listener has an address");
        let conn = Conn::open_raw(address);
        let (peer, _) = listener.accept().expect("cannot accept");
        (conn, peer)
    }

    fn say(peer: &mut TcpStream, bytes: &[u8]) {
        peer.write_all(bytes).expect("cannot write");
    }

    const SOON: Duration = Duration::from_millis(20);

    #[test]
    fn timed_out_read_loses_nothing() {
        let (mut conn, mut peer) = pair();
        say(&mut peer, b"$5\r\nhe");
        assert_eq!(conn.recv_within(SOON), Err(RecvError::TimedOut));
        say(&mut peer, b"llo\r\n:1\r\n");
        assert_eq!(conn.recv(), Reply::bulk("hello"));
        assert_eq!(conn.recv(), Reply::Int(1));
    }

    #[test]
    fn pushes_and_replies_are_kept_apart() {
        let (mut conn, mut peer) = pair();
        say(&mut peer, b">1\r\n+first\r\n:1\r\n>1\r\n+second\r\n:2\r\n");
        assert_eq!(conn.recv(), Reply::Int(1));
        let push = |text: &str| Ok(Reply::Push(vec![Reply::Simple(text.into())]));
        assert_eq!(conn.push_within(SOON), push("first"));
        assert_eq!(conn.push_within(SOON), push("second"));
        assert_eq!(conn.push_within(SOON), Err(RecvError::TimedOut));
        assert_eq!(conn.recv(), Reply::Int(2));
    }

    #[test]
    fn replies_before_a_close_are_read() {
        let (mut conn, mut peer) = pair();
        say(&mut peer, b":1\r\n");
        drop(peer);
        assert_eq!(conn.recv(), Reply::Int(1));
        assert_eq!(conn.recv_within(SOON), Err(RecvError::Closed));
    }

    #[test]
    fn nonsense_is_told_from_silence() {
        let (mut conn, mut peer) = pair();
        say(&mut peer, b"hello\r\n");
        assert!(matches!(conn.recv_within(SOON), Err(RecvError::Broken(_))));
    }

    #[test]
    fn abort_is_a_reset() {
        let (conn, mut peer) = pair();
        conn.abort();
        let error = peer.read(&mut [0]).expect_err("a reset is no end of stream");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }

    #[test]
    fn command_may_come_byte_by_byte_or_inline() {
        let server = Server::builder().without_module().start();
        let mut conn = Conn::open_raw(server.addr());
        for byte in encode(&["ECHO", "slow"]) {
            conn.send_bytes(&[byte]);
        }
        assert_eq!(conn.recv(), Reply::bulk("slow"));
        conn.send_bytes(b"ECHO inline\r\n");
        assert_eq!(conn.recv(), Reply::bulk("inline"));
    }

    #[test]
    fn resp3_differs_from_resp2() {
        let server = Server::builder().without_module().start();
        let config = ["CONFIG", "GET", "port"];
        let old = server.connect(Protocol::Resp2).cmd(&config);
        let new = server.connect(Protocol::Resp3).cmd(&config);
        assert!(matches!(old, Reply::Array(_)) && matches!(new, Reply::Map(_)), "{old} {new}");
        assert_eq!(old.field("port"), new.field("port"));
    }
}
