//! A TCP proxy that does to a connection what networks do: nothing, delay, silence, doubling, loss, and a cut.
//!
//! Faults are set per direction and at run time, for all links or only for those that exist: so new connections can get
//! through while old ones are dead. What the proxy cannot show is a peer whose *kernel* is gone: its own answers TCP keepalives.
//!
//! Each link has two threads per direction. The reader stamps what arrives and queues it; the writer waits until the fault in
//! force lets it go. So a delay delays each byte once, however many follow it.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};

use crate::port::PortLease;
use crate::resp::reset_on_close;
use crate::wait::poll;

/// Chunks a direction may hold back; beyond that the sender feels the pressure, as with a real network.
const CHUNKS_HELD_MAX: usize = 4096;
/// A writer whose peer does not read looks this often whether its link was cut.
const WRITE_LOOK: Duration = Duration::from_millis(20);
/// Bound on waiting for the threads of a cut link: each looks at least every [`WRITE_LOOK`].
const CUT_WITHIN: Duration = Duration::from_secs(5);
const CONNECT_WITHIN: Duration = Duration::from_secs(2);
/// A server that is being started in another thread has copies of all our sockets from its fork to its exec, so a listener
/// may live for that long after it was closed.
const SOCKET_FREE_WITHIN: Duration = Duration::from_secs(5);

/// Which bytes a fault is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Requests.
    ToServer,
    /// Replies.
    ToClient,
}

/// What happens to the bytes of a direction, and to the FIN at their end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// They arrive.
    Pass,
    /// They are kept, and arrive once the fault is another one.
    Hold,
    /// They vanish. Both directions at once make a half-open link: neither side learns that the other has closed.
    Drop,
    /// They arrive so much later.
    Delay(Duration),
    /// They arrive one by one, each so long after the one before.
    Trickle(Duration),
    /// They arrive twice.
    Duplicate,
    /// So many more bytes arrive, then the link is cut.
    CutAfter(usize, Cut),
}

/// How a link ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// In order: both sides read the end of the stream.
    Fin,
    /// By a reset: both sides get an error.
    Reset,
}

/// A proxy in front of one server, on a port of its own. Dropping it resets its links.
#[derive(Debug)]
pub struct Proxy {
    port: PortLease,
    shared: Arc<Shared>,
    acceptor: Mutex<Option<Acceptor>>,
}

#[derive(Debug)]
struct Acceptor {
    thread: JoinHandle<()>,
    stop: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Shared {
    /// None where the kernel is to choose.
    source: Option<Ipv4Addr>,
    upstream: SocketAddr,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// The faults of links to come.
    faults: [Fault; 2],
    links: BTreeMap<u64, Link>,
    links_made: u64,
    /// Threads that still hold sockets, of all links.
    threads: usize,
    arrived: [u64; 2],
    passed: [u64; 2],
    dropped: [u64; 2],
}

/// Links stay listed until both directions have ended or they are cut.
#[derive(Debug)]
struct Link {
    client: Arc<TcpStream>,
    server: Arc<TcpStream>,
    faults: [Fault; 2],
    ended: [bool; 2],
}

impl Proxy {
    /// A proxy to `upstream` that passes everything.
    ///
    /// # Panics
    /// If it cannot listen.
    #[track_caller]
    pub fn to(upstream: SocketAddr) -> Proxy {
        Proxy::from_to(None, upstream)
    }

    /// The same, which connects from this address, if one is given: one of [`Network::clients`](crate::network::Network::clients).
    ///
    /// # Panics
    /// If it cannot listen.
    #[track_caller]
    pub fn from_to(source: Option<Ipv4Addr>, upstream: SocketAddr) -> Proxy {
        let state = State {
            faults: [Fault::Pass; 2],
            links: BTreeMap::new(),
            links_made: 0,
            threads: 0,
            arrived: [0; 2],
            passed: [0; 2],
            dropped: [0; 2],
        };
        let proxy = Proxy {
            port: PortLease::take(),
            shared: Arc::new(Shared { source, upstream, state: Mutex::new(state), changed: Condvar::new() }),
            acceptor: Mutex::new(None),
        };
        proxy.accept();
        proxy
    }

    /// Where clients connect.
    pub fn addr(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.port.number()))
    }

    /// Sets the fault of one direction, for the links that exist and for those to come.
    pub fn set(&self, direction: Direction, fault: Fault) {
        self.shared.lock().faults[index(direction)] = fault;
        self.set_existing(direction, fault);
    }

    /// Sets the fault of one direction for the links that exist only: a client that connects anew gets through.
    pub fn set_existing(&self, direction: Direction, fault: Fault) {
        for link in self.shared.lock().links.values_mut() {
            link.faults[index(direction)] = fault;
        }
        self.shared.changed.notify_all();
    }

    /// Ends all faults and accepts connections again; what was held arrives now.
    pub fn heal(&self) {
        self.set(Direction::ToServer, Fault::Pass);
        self.set(Direction::ToClient, Fault::Pass);
        self.accept();
    }

    /// Makes the existing links half-open: each side believes in a peer that hears and says nothing.
    pub fn half_open(&self) {
        self.set_existing(Direction::ToServer, Fault::Drop);
        self.set_existing(Direction::ToClient, Fault::Drop);
    }

    /// Cuts all existing links; the proxy has let go of them when this returns.
    ///
    /// # Panics
    /// If a thread of the proxy does not end.
    #[track_caller]
    pub fn cut(&self, how: Cut) {
        let mut state = self.shared.lock();
        let links: Vec<_> = state.links.keys().copied().collect();
        for link in links {
            state.cut(link, how);
        }
        self.shared.changed.notify_all();
        // The reset goes out when the last thread lets go of its socket.
        let (_state, timeout) = self
            .shared
            .changed
            .wait_timeout_while(state, CUT_WITHIN, |state| state.threads > 2 * 2 * state.links.len())
            .unwrap_or_else(PoisonError::into_inner);
        assert!(!timeout.timed_out(), "the threads of a cut link did not end in {CUT_WITHIN:?}");
    }

    /// Stops listening: new connections are refused by the kernel. Existing links stay.
    ///
    /// # Panics
    /// If somebody still listens after a while.
    #[track_caller]
    pub fn refuse(&self) {
        assert!(self.stop_listening(), "somebody listens on the proxy's port still");
    }

    /// Listens again after [`Proxy::refuse`].
    ///
    /// # Panics
    /// If it cannot.
    #[track_caller]
    pub fn accept(&self) {
        let mut acceptor = self.acceptor();
        if acceptor.is_some() {
            return;
        }
        let Some(listener) = poll(SOCKET_FREE_WITHIN, || TcpListener::bind(self.addr()).ok()) else {
            panic!("the proxy cannot listen on {}", self.addr());
        };
        let stop = Arc::new(AtomicBool::new(false));
        let (shared, stopped) = (Arc::clone(&self.shared), Arc::clone(&stop));
        let thread = thread::spawn(move || accept_until(&listener, &stopped, &shared));
        *acceptor = Some(Acceptor { thread, stop });
    }

    /// Ends the accepting thread and its listener; false if the port is not seen to be free.
    fn stop_listening(&self) -> bool {
        let connect = || TcpStream::connect_timeout(&self.addr(), CONNECT_WITHIN);
        if let Some(Acceptor { thread, stop }) = self.acceptor().take() {
            stop.store(true, Ordering::SeqCst);
            // The thread waits in accept() and sees the flag at the next connection: this one.
            let _ = connect();
            // If it panicked it has said so; and this runs in drop, where another panic would abort all tests.
            let _ = thread.join();
        }
        poll(SOCKET_FREE_WITHIN, || connect().err()).is_some()
    }

    fn acceptor(&self) -> MutexGuard<'_, Option<Acceptor>> {
        self.acceptor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many links there are: connections of clients that have not ended on both sides.
    pub fn links(&self) -> usize {
        self.shared.lock().links.len()
    }

    /// How many bytes of a direction have reached the proxy so far, whatever became of them.
    pub fn arrived(&self, direction: Direction) -> u64 {
        self.shared.lock().arrived[index(direction)]
    }

    /// How many bytes of a direction the proxy has sent on.
    pub fn passed(&self, direction: Direction) -> u64 {
        self.shared.lock().passed[index(direction)]
    }

    /// How many bytes of a direction are lost for good. A test that wants one reply lost waits for this before it heals.
    pub fn dropped(&self, direction: Direction) -> u64 {
        self.shared.lock().dropped[index(direction)]
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop_listening();
        let mut state = self.shared.lock();
        let links: Vec<_> = state.links.keys().copied().collect();
        for link in links {
            state.cut(link, Cut::Reset);
        }
        self.shared.changed.notify_all();
    }
}

fn index(direction: Direction) -> usize {
    match direction {
        Direction::ToServer => 0,
        Direction::ToClient => 1,
    }
}

fn accept_until(listener: &TcpListener, stop: &AtomicBool, shared: &Arc<Shared>) {
    for client in listener.incoming() {
        if stop.load(Ordering::SeqCst) {
            return;
        }
        let Ok(client) = client else { continue };
        match shared.connect() {
            Ok(server) => shared.link(client, server),
            // A server that is down refuses; so does its proxy, as far as it still can.
            Err(_) => reset_on_close(&client),
        }
    }
}

/// What a reader hands its writer.
struct Chunk {
    arrived: Instant,
    /// Empty for the end of the stream.
    bytes: Vec<u8>,
}

/// What a writer is to do with a chunk.
enum Action {
    Write { times: usize },
    Trickle(Duration),
    Discard,
    WriteThenCut(usize, Cut),
    Stop,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connect(&self) -> io::Result<TcpStream> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        if let Some(source) = self.source {
            socket.bind(&SocketAddr::from((source, 0)).into())?;
        }
        socket.connect_timeout(&self.upstream.into(), CONNECT_WITHIN)?;
        Ok(socket.into())
    }

    fn link(self: &Arc<Shared>, client: TcpStream, server: TcpStream) {
        for stream in [&client, &server] {
            stream.set_nodelay(true).expect("a TCP socket takes NODELAY");
            stream.set_write_timeout(Some(WRITE_LOOK)).expect("a TCP socket takes a write timeout");
        }
        let (client, server) = (Arc::new(client), Arc::new(server));
        let mut state = self.lock();
        let id = state.links_made;
        state.links_made += 1;
        let link =
            Link { client: Arc::clone(&client), server: Arc::clone(&server), faults: state.faults, ended: [false; 2] };
        state.links.insert(id, link);
        state.threads += 4;
        drop(state);
        self.pump(id, Direction::ToServer, Arc::clone(&client), Arc::clone(&server));
        self.pump(id, Direction::ToClient, server, client);
    }

    /// Starts the two threads of one direction.
    fn pump(self: &Arc<Shared>, link: u64, direction: Direction, from: Arc<TcpStream>, to: Arc<TcpStream>) {
        let (chunks, queue) = sync_channel(CHUNKS_HELD_MAX);
        let shared = Arc::clone(self);
        thread::spawn(move || {
            shared.read(direction, &from, &chunks);
            drop((from, chunks));
            shared.thread_ended();
        });
        let shared = Arc::clone(self);
        thread::spawn(move || {
            shared.write(link, direction, &to, &queue);
            drop((to, queue));
            shared.direction_ended(link, direction);
            shared.thread_ended();
        });
    }

    fn read(&self, direction: Direction, mut from: &TcpStream, chunks: &SyncSender<Chunk>) {
        let mut buffer = [0; 16_384];
        loop {
            // An error ends the stream for the other side as well.
            let length = match from.read(&mut buffer) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                outcome => outcome.unwrap_or(0),
            };
            self.lock().arrived[index(direction)] += length as u64;
            let chunk = Chunk { arrived: Instant::now(), bytes: buffer[..length].to_vec() };
            if chunks.send(chunk).is_err() || length == 0 {
                return;
            }
        }
    }

    fn write(&self, link: u64, direction: Direction, to: &TcpStream, queue: &Receiver<Chunk>) {
        for chunk in queue {
            let bytes = &chunk.bytes;
            let goes_on = match self.decide(link, direction, &chunk) {
                Action::Stop => false,
                Action::Discard => true,
                Action::Write { .. } | Action::Trickle(_) if bytes.is_empty() => {
                    let _ = to.shutdown(Shutdown::Write);
                    false
                }
                Action::Write { times } => (0..times).all(|_| self.write_all(link, direction, to, bytes)),
                Action::Trickle(gap) => bytes
                    .chunks(1)
                    .all(|byte| self.write_all(link, direction, to, byte) && self.pause(link, direction, gap)),
                Action::WriteThenCut(length, how) => {
                    self.write_all(link, direction, to, &bytes[..length]);
                    self.lock().cut(link, how);
                    self.changed.notify_all();
                    false
                }
            };
            if !goes_on || bytes.is_empty() {
                return;
            }
        }
    }

    /// Waits until something is to be done with `chunk`, and says what.
    fn decide(&self, link: u64, direction: Direction, chunk: &Chunk) -> Action {
        let mut state = self.lock();
        loop {
            let Some(link) = state.links.get_mut(&link) else {
                return Action::Stop;
            };
            let fault = &mut link.faults[index(direction)];
            let wait = match fault {
                Fault::Pass => return Action::Write { times: 1 },
                Fault::Duplicate => return Action::Write { times: 2 },
                Fault::Trickle(gap) => return Action::Trickle(*gap),
                Fault::Drop => {
                    state.dropped[index(direction)] += chunk.bytes.len() as u64;
                    return Action::Discard;
                }
                Fault::CutAfter(left, how) => {
                    let length = chunk.bytes.len();
                    if length >= *left {
                        return Action::WriteThenCut(*left, *how);
                    }
                    *left -= length;
                    return Action::Write { times: 1 };
                }
                Fault::Hold => Duration::MAX,
                Fault::Delay(delay) => match delay.checked_sub(chunk.arrived.elapsed()) {
                    Some(left) if !left.is_zero() => left,
                    _ => return Action::Write { times: 1 },
                },
            };
            state = self.wait(state, wait);
        }
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, at_most: Duration) -> MutexGuard<'a, State> {
        // A day stands for ever: what a thread waits for is always notified.
        let at_most = at_most.min(Duration::from_secs(86_400));
        let (state, _) = self.changed.wait_timeout(state, at_most).unwrap_or_else(PoisonError::into_inner);
        state
    }

    /// Waits out the gap between two trickled bytes; false if the link was cut meanwhile. A new fault ends the wait early.
    fn pause(&self, link: u64, direction: Direction, gap: Duration) -> bool {
        let trickles = |state: &mut State| {
            let link = state.links.get(&link);
            link.is_some_and(|link| link.faults[index(direction)] == Fault::Trickle(gap))
        };
        let (state, _) =
            self.changed.wait_timeout_while(self.lock(), gap, trickles).unwrap_or_else(PoisonError::into_inner);
        state.links.contains_key(&link)
    }

    /// Writes all of `bytes`; false if the link was cut or the peer is gone.
    fn write_all(&self, link: u64, direction: Direction, mut to: &TcpStream, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            match to.write(bytes) {
                Ok(length) => {
                    bytes = &bytes[length..];
                    self.lock().passed[index(direction)] += length as u64;
                }
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {
                        if !self.lock().links.contains_key(&link) {
                            return false;
                        }
                    }
                    _ => return false,
                },
            }
        }
        true
    }

    fn direction_ended(&self, link: u64, direction: Direction) {
        let mut state = self.lock();
        if let Some(ended) = state.links.get_mut(&link).map(|link| &mut link.ended) {
            ended[index(direction)] = true;
            if *ended == [true; 2] {
                // A side that was not told of the other's end is now: as a host that comes back answers for a socket it has forgotten.
                // Its reader waits for it otherwise, and nobody would find it in the list.
                state.cut(link, Cut::Fin);
            }
        }
    }

    fn thread_ended(&self) {
        self.lock().threads -= 1;
        self.changed.notify_all();
    }
}

impl State {
    /// Ends a link; its threads notice once the condition variable is notified, and let go of the sockets.
    fn cut(&mut self, link: u64, how: Cut) {
        let Some(link) = self.links.remove(&link) else {
            return;
        };
        for stream in [&link.client, &link.server] {
            // The shutdown wakes the reader. For a reset it must not send FIN first.
            let _ = match how {
                Cut::Fin => stream.shutdown(Shutdown::Both),
                Cut::Reset => {
                    reset_on_close(stream);
                    stream.shutdown(Shutdown::Read)
                }
            };
        }
    }
}

#[cfg(test)]
mod tests;
