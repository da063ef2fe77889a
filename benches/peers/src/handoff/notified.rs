//! Waiters who are told by a message that the lock is free, and then try: Redisson's plain lock, by its scripts.
//!
//! They are in ten processes, each with one subscription and one connection for all its tries, as Redisson has it; fewer if there are fewer
//! waiters. The release is a script that deletes and publishes. In Redisson a message awakens one waiter of each process; a client that
//! does not hold the others back awakens them all, and sends their tries at once. One thread serves all processes; the tries
//! are encoded before the release.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use flock_benches::names::{self, KEY_BYTES, OWNER_BYTES};
use flock_benches::redisson::{FREED, Names};
use flock_benches::scheme::{LONG_LEASE_MS, Scheme};
use flock_tests::args::encode;
use flock_tests::random::Random;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::Server;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::Line;

const PROCESSES: usize = 10;

/// Whom a message awakens.
#[derive(Clone, Copy)]
pub(super) enum Awakened {
    OneOfEachProcess,
    All,
}

/// Those who wait.
pub(super) struct Notified {
    runtime: Runtime,
    scheme: Scheme,
    key: Vec<u8>,
    awakened: Awakened,
    conn: Conn,
    holder: Vec<u8>,
    processes: Vec<Process>,
}

/// Waiters who share a subscription and a connection.
struct Process {
    number: usize,
    messages: TcpStream,
    message: Vec<u8>,
    conn: BufReader<TcpStream>,
    waiters: Vec<Vec<u8>>,
    /// What they send when they are told.
    tries: Vec<u8>,
    tried: usize,
}

/// Who has the lock, and since when.
struct Won {
    process: usize,
    waiter: usize,
    at: Instant,
}

impl Notified {
    pub(super) fn new(server: &Server, random: &mut Random, waiters: usize, awakened: Awakened) -> Notified {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("the machine has threads");
        let key = names::key(random, KEY_BYTES);
        let count = waiters.min(PROCESSES);
        let processes = (0..count).map(|number| {
            let owners = (number..waiters).step_by(count).map(|_| names::owner(random, OWNER_BYTES));
            let owners = owners.collect();
            let channel = Names::of(&String::from_utf8_lossy(&key)).channel;
            let _entered = runtime.enter();
            Process::new(number, server.addr(), &channel, owners)
        });
        let processes = processes.collect();
        let mut conn = server.connect(Protocol::Resp2);
        let (scheme, holder) = (Scheme::redisson(server), names::owner(random, OWNER_BYTES));
        assert!(conn.cmd(&scheme.take(&key, &holder, LONG_LEASE_MS)).is_nil(), "the lock is free");
        Notified { runtime, scheme, key, awakened, conn, holder, processes }
    }
}

impl Line for Notified {
    fn hand_over(&mut self) -> (Duration, usize) {
        for process in &mut self.processes {
            process.prepare(&self.scheme, &self.key, self.awakened);
        }
        let Ok([release, forget]) = <[_; 2]>::try_from(self.scheme.give(&self.key, &self.holder)) else {
            unreachable!("Redisson's release is two commands")
        };
        let (conn, mut processes) = (&mut self.conn, std::mem::take(&mut self.processes));
        let work = async {
            let mut all = JoinSet::new();
            for process in processes.drain(..) {
                all.spawn(process.hear_and_try());
            }
            // All listen before the release is sent.
            tokio::task::yield_now().await;
            let start = Instant::now();
            conn.send(&release);
            let mut won = None;
            while let Some(done) = all.join_next().await {
                let (process, has_won) = done.expect("a process does not fail");
                processes.push(process);
                won = won.or(has_won);
            }
            (won, start)
        };
        let done = self.runtime.block_on(async { tokio::time::timeout(ANSWER_WITHIN, work).await });
        let (won, start) = done.expect("all are told and answered in time");
        let won = won.expect("one of those who tried has the lock");
        assert_eq!(self.conn.recv().as_int(), 1, "the holder held it");
        // Redisson does not wait for this one.
        assert_eq!(self.conn.cmd(&forget).as_int(), 1, "the release left its result");
        processes.sort_by_key(|process| process.number);
        let tried: usize = processes.iter().map(|process| process.tried).sum();
        // Whoever had the lock waits in the place of the one who has it.
        std::mem::swap(&mut self.holder, &mut processes[won.process].waiters[won.waiter]);
        self.processes = processes;
        (won.at - start, 2 + tried)
    }

    fn rejoin(&mut self) {}
}

impl Process {
    fn new(number: usize, server: SocketAddr, channel: &str, waiters: Vec<Vec<u8>>) -> Process {
        let mut messages = connect(server);
        messages.write_all(&encode(&["SUBSCRIBE", channel])).expect("the server reads");
        let expected = format!("*3\r\n$9\r\nsubscribe\r\n${}\r\n{channel}\r\n:1\r\n", channel.len());
        let mut confirmed = vec![0; expected.len()];
        messages.read_exact(&mut confirmed).expect("the server answers");
        assert_eq!(confirmed, expected.into_bytes());
        Process {
            number,
            messages: of_runtime(messages),
            message: encode(&["message", channel, FREED]),
            conn: BufReader::new(of_runtime(connect(server))),
            waiters,
            tries: Vec::new(),
            tried: 0,
        }
    }

    fn prepare(&mut self, scheme: &Scheme, key: &[u8], awakened: Awakened) {
        self.tried = match awakened {
            Awakened::OneOfEachProcess => 1,
            Awakened::All => self.waiters.len(),
        };
        self.tries.clear();
        for owner in &self.waiters[..self.tried] {
            self.tries.extend(encode(&scheme.take(key, owner, LONG_LEASE_MS)));
        }
    }

    /// Returns when all its tries are answered.
    async fn hear_and_try(mut self) -> (Process, Option<Won>) {
        let mut message = vec![0; self.message.len()];
        self.messages.read_exact(&mut message).await.expect("the server sends");
        assert_eq!(message, self.message);
        self.conn.get_mut().write_all(&self.tries).await.expect("the server reads");
        let (mut won, mut line) = (None, Vec::new());
        for waiter in 0..self.tried {
            line.clear();
            self.conn.read_until(b'\n', &mut line).await.expect("the server answers");
            match line.first() {
                // Nil: taken. A number: the lease that is left.
                Some(b'$') => won = Some(Won { process: self.number, waiter, at: Instant::now() }),
                Some(b':') => {}
                _ => panic!("expected a lease or nil, got \"{}\"", line.escape_ascii()),
            }
        }
        (self, won)
    }
}

fn connect(server: SocketAddr) -> std::net::TcpStream {
    let stream = std::net::TcpStream::connect(server).expect("the server listens");
    stream.set_nodelay(true).expect("a TCP socket takes TCP_NODELAY");
    stream
}

fn of_runtime(stream: std::net::TcpStream) -> TcpStream {
    stream.set_nonblocking(true).expect("a TCP socket can be non-blocking");
    TcpStream::from_std(stream).expect("there is a runtime")
}
