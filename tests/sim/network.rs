//! The network between one client's process and the servers: bytes arrive in order, late, much later, or never.

use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use flock_client::testing::Server;
use flock_tests::random::Random;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf, duplex, split};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

const PIPE_BYTES: usize = 64 * 1024;
const CHUNK_BYTES: usize = 4096;
/// How often a connection that is silent looks whether it still is.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// How the server's messages to owners begin, apart from replies.
const MESSAGE: &[u8] = b">3\r\n$7\r\nmessage\r\n";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    ToServer,
    ToClient,
}

/// How a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// For both at once; what is under way is lost.
    Both,
    /// For the client at once; what it has sent arrives later, from a connection that is dead by then.
    ClientFirst,
    /// For the server at once; the client hears nothing any more.
    ServerFirst,
}

/// All connections of one process, from its first to its last.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    state: Arc<Mutex<State>>,
    host: Ipv4Addr,
    /// Messages to owners are swallowed: a planted bug.
    loses_messages: bool,
}

#[derive(Debug)]
struct State {
    random: Random,
    latency_ms_max: u64,
    silent_to_server_until: Instant,
    silent_to_client_until: Instant,
    /// No connection can be made; for good, after a crash.
    is_refused: bool,
    open: Vec<watch::Sender<Option<Cut>>>,
    /// Of the next connection.
    port: u16,
}

impl Link {
    pub(crate) fn new(host: Ipv4Addr, random: Random, loses_messages: bool) -> Link {
        let now = Instant::now();
        let state = State {
            random,
            latency_ms_max: 1,
            silent_to_server_until: now,
            silent_to_client_until: now,
            is_refused: false,
            open: Vec::new(),
            port: 1024,
        };
        Link { state: Arc::new(Mutex::new(state)), host, loses_messages }
    }

    /// Opens a connection to `server`; the client's end.
    pub(crate) fn connect(&self, server: &Server) -> std::io::Result<DuplexStream> {
        let mut state = self.state();
        if state.is_refused {
            return Err(std::io::ErrorKind::ConnectionRefused.into());
        }
        state.port += 1;
        let from = (self.host, state.port).into();
        drop(state);
        let (theirs, client) = duplex(PIPE_BYTES);
        let (ours, server_end) = duplex(PIPE_BYTES);
        server.accept(server_end, from)?;
        let cut = watch::Sender::new(None);
        let mut state = self.state();
        state.open.retain(|cut| !cut.is_closed());
        state.open.push(cut.clone());
        drop(state);
        let ((from_client, to_client), (from_server, to_server)) = (split(client), split(ours));
        let pump = |direction| Pump { link: self.clone(), direction, cut: cut.clone(), ended: cut.subscribe() };
        tokio::spawn(pump(Direction::ToServer).run(from_client, to_server));
        tokio::spawn(pump(Direction::ToClient).run(from_server, to_client));
        Ok(theirs)
    }

    /// Ends all connections.
    pub(crate) fn cut(&self, how: Cut) {
        for open in std::mem::take(&mut self.state().open) {
            open.send_if_modified(|cut| cut.is_none() && cut.replace(how).is_none());
        }
    }

    /// Bytes take up to this from now on.
    pub(crate) fn set_latency(&self, most_ms: u64) {
        self.state().latency_ms_max = most_ms;
    }

    /// Nothing arrives for so long, in one direction or both.
    pub(crate) fn silence(&self, to_server: bool, to_client: bool, lasts: Duration) {
        let (mut state, until) = (self.state(), Instant::now() + lasts);
        if to_server {
            state.silent_to_server_until = until;
        }
        if to_client {
            state.silent_to_client_until = until;
        }
    }

    /// The process is gone, and nobody will connect from there again.
    pub(crate) fn crash(&self) {
        self.state().is_refused = true;
        self.cut(Cut::Both);
    }

    /// As good as a network gets.
    pub(crate) fn heal(&self) {
        self.set_latency(1);
        self.silence(true, true, Duration::ZERO);
    }

    async fn passes(&self, direction: Direction) {
        let latency_ms = {
            let mut state = self.state();
            let most = state.latency_ms_max + 1;
            state.random.below(most)
        };
        sleep(Duration::from_millis(latency_ms)).await;
        loop {
            let until = match direction {
                Direction::ToServer => self.state().silent_to_server_until,
                Direction::ToClient => self.state().silent_to_client_until,
            };
            let left = until - Instant::now();
            if left.is_zero() {
                return;
            }
            sleep(left.min(LOOK_AGAIN)).await;
        }
    }

    fn lateness(&self) -> Duration {
        Duration::from_millis(self.state().random.below(4000))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One direction of one connection.
struct Pump {
    link: Link,
    direction: Direction,
    cut: watch::Sender<Option<Cut>>,
    ended: watch::Receiver<Option<Cut>>,
}

impl Pump {
    async fn run(mut self, mut reader: ReadHalf<DuplexStream>, mut writer: WriteHalf<DuplexStream>) {
        let mut chunk = vec![0; CHUNK_BYTES];
        let (cut, under_way) = loop {
            let length = tokio::select! {
                biased;
                cut = cut(&mut self.ended) => break (cut, 0),
                length = reader.read(&mut chunk) => length.unwrap_or(0),
            };
            if length == 0 {
                break (Cut::Both, 0);
            }
            tokio::select! {
                biased;
                cut = cut(&mut self.ended) => break (cut, length),
                () = self.link.passes(self.direction) => {}
            }
            let is_swallowed = self.link.loses_messages && chunk[..length].starts_with(MESSAGE);
            if !is_swallowed && writer.write_all(&chunk[..length]).await.is_err() {
                break (Cut::Both, 0);
            }
        };
        match (cut, self.direction) {
            (Cut::Both, _) | (Cut::ClientFirst, Direction::ToClient) => {}
            (Cut::ClientFirst, Direction::ToServer) => {
                drop(reader);
                sleep(self.link.lateness()).await;
                // The server may have gone meanwhile.
                let _ = writer.write_all(&chunk[..under_way]).await;
                sleep(Duration::from_millis(1)).await;
            }
            (Cut::ServerFirst, Direction::ToServer) => {
                drop(writer);
                while reader.read(&mut chunk).await.is_ok_and(|length| length > 0) {}
            }
            (Cut::ServerFirst, Direction::ToClient) => {
                drop(reader);
                // Until the client has closed its end: then the other direction ends the connection for both.
                let _ = self.ended.wait_for(|cut| *cut == Some(Cut::Both)).await;
                return;
            }
        }
        self.cut.send_if_modified(|already| {
            let ends = already.is_none() || *already == Some(Cut::ServerFirst);
            if ends {
                *already = Some(Cut::Both);
            }
            ends
        });
    }
}

async fn cut(ended: &mut watch::Receiver<Option<Cut>>) -> Cut {
    match ended.wait_for(Option::is_some).await {
        Ok(cut) => cut.unwrap_or(Cut::Both),
        Err(_) => Cut::Both,
    }
}
