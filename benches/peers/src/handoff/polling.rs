//! Waiters who try, sleep for a random time, and try again: `SET NX PX` and `DELIFEQ`, the cheapest of such locks.
//!
//! Each sleeps from nothing to 200 ms (full jitter), which is `rslock`'s default. They are tasks of one process: tries that are due at the same
//! time go out in one write, over one connection. A sleep ends to the accuracy of the kernel, which is better than that of most runtimes.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io::{BufReader, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use flock_benches::names::{self, KEY_BYTES, OWNER_BYTES};
use flock_benches::scheme::{LONG_LEASE_MS, Scheme};
use flock_tests::args::encode;
use flock_tests::random::Random;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::Server;
use flock_tests::wait::let_pass;

use super::Line;

const LONGEST_SLEEP: Duration = Duration::from_millis(200);
const TAKEN: [u8; 5] = *b"+OK\r\n";
const BUSY: [u8; 5] = *b"$-1\r\n";

/// Those who wait.
pub(super) struct Polling {
    random: Random,
    key: Vec<u8>,
    conn: Conn,
    holder: Contender,
    tries: BufReader<TcpStream>,
    waiters: Vec<Contender>,
    /// Who tries when, by this line's clock.
    due: BinaryHeap<Reverse<(Duration, usize)>>,
    /// It stands still while others have their turns.
    clock: Duration,
}

struct Contender {
    owner: Vec<u8>,
    /// Its try: encoded before, as it must cost little.
    attempt: Vec<u8>,
}

impl Polling {
    pub(super) fn new(server: &Server, random: &mut Random, waiters: usize) -> Polling {
        let tries = TcpStream::connect(server.addr()).expect("the server listens");
        tries.set_nodelay(true).expect("a TCP socket takes TCP_NODELAY");
        tries.set_read_timeout(Some(ANSWER_WITHIN)).expect("a positive timeout is accepted");
        let key = names::key(random, KEY_BYTES);
        let mut contender = || {
            let owner = names::owner(random, OWNER_BYTES);
            let attempt = encode(&Scheme::SetDelIfEq.take(&key, &owner, LONG_LEASE_MS));
            Contender { owner, attempt }
        };
        let holder = contender();
        let waiters: Vec<_> = (0..waiters).map(|_| contender()).collect();
        let mut polling = Polling {
            random: Random::from_seed(random.number()),
            key,
            conn: server.connect(Protocol::Resp2),
            holder,
            tries: BufReader::new(tries),
            waiters,
            due: BinaryHeap::new(),
            clock: Duration::ZERO,
        };
        polling.conn.send_bytes(&polling.holder.attempt);
        assert_eq!(polling.conn.recv().as_str(), "OK", "the lock is free");
        for waiter in 0..polling.waiters.len() {
            polling.sleep(waiter, Duration::ZERO);
        }
        polling
    }

    fn sleep(&mut self, waiter: usize, now: Duration) {
        let until = now + self.jitter();
        self.due.push(Reverse((until, waiter)));
    }

    fn jitter(&mut self) -> Duration {
        let micros = LONGEST_SLEEP.as_micros() as u64;
        Duration::from_micros(self.random.below(micros))
    }

    /// Until the time is over, or somebody has the lock: who, and since when. And how many have tried.
    fn poll(&mut self, during: Duration) -> (Option<(usize, Instant)>, usize) {
        let (start, began) = (Instant::now(), self.clock);
        let (mut won, mut tried) = (None, 0);
        while won.is_none() && start.elapsed() < during {
            let now = began + start.elapsed();
            let first = self.due.peek().map_or(now, |Reverse((due, _))| *due);
            if first > now {
                let_pass((first - now).min(during.saturating_sub(start.elapsed())));
                continue;
            }
            let mut awake = Vec::new();
            while let Some(Reverse((due, waiter))) = self.due.pop() {
                if due > now {
                    self.due.push(Reverse((due, waiter)));
                    break;
                }
                awake.push(waiter);
            }
            won = self.attempt(&awake);
            tried += awake.len();
            let now = began + start.elapsed();
            for waiter in awake {
                self.sleep(waiter, now);
            }
        }
        self.clock = began + start.elapsed();
        (won, tried)
    }

    /// Who of them has the lock, and since when.
    fn attempt(&mut self, awake: &[usize]) -> Option<(usize, Instant)> {
        let tries: Vec<u8> = awake.iter().flat_map(|waiter| &self.waiters[*waiter].attempt).copied().collect();
        self.tries.get_mut().write_all(&tries).expect("the server reads");
        let mut won = None;
        for waiter in awake {
            if self.answer() {
                won = Some((*waiter, Instant::now()));
            }
        }
        won
    }

    /// Whether the lock is taken by the try that comes next.
    fn answer(&mut self) -> bool {
        let mut answer = [0; BUSY.len()];
        self.tries.read_exact(&mut answer).expect("the server answers");
        assert!(answer == TAKEN || answer == BUSY, "expected OK or nil, got \"{}\"", answer.escape_ascii());
        answer == TAKEN
    }
}

impl Line for Polling {
    fn hand_over(&mut self) -> (Duration, usize) {
        let give = Scheme::SetDelIfEq.give(&self.key, &self.holder.owner).concat();
        let start = Instant::now();
        self.conn.send(&give);
        let (won, tried) = self.poll(ANSWER_WITHIN);
        let (waiter, at) = won.expect("somebody tries in time");
        assert_eq!(self.conn.recv().as_int(), 1, "the holder held it");
        // Whoever had the lock sleeps in the place of the one who has it.
        std::mem::swap(&mut self.holder, &mut self.waiters[waiter]);
        (at - start, 1 + tried)
    }

    /// It is held for a while: until nobody's sleep has to do with the last release.
    fn rejoin(&mut self) {
        let held = LONGEST_SLEEP + self.jitter();
        self.idle(held);
    }

    fn idle(&mut self, during: Duration) -> usize {
        let (won, tried) = self.poll(during);
        assert!(won.is_none(), "the lock is held");
        tried
    }
}
