//! Requests of every kind about a few locks, and what two servers must show alike: for tests of replication and persistence.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{JoinHandle, spawn};

use flock_tests::args;
use flock_tests::random::Random;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::{Info, Server};
use flock_tests::wait::wait_until;

/// Leases are either over within this, or longer than any test.
const SHORT_LEASE_MS: u64 = 30;
const LONG_LEASE_MS: u64 = 600_000;

/// Random requests, one after the other; the same ones from the same seed, as far as the clock is not concerned.
pub(crate) struct Traffic {
    random: Random,
    keys: u64,
    /// The last token of each owner at each key, for what needs one.
    tokens: BTreeMap<(String, String), u64>,
}

impl Traffic {
    /// Requests about `keys` locks.
    pub(crate) fn new(random: Random, keys: u64) -> Traffic {
        Traffic { random, keys, tokens: BTreeMap::new() }
    }

    /// Sends one request and takes its answer, whatever it is.
    #[track_caller]
    pub(crate) fn step(&mut self, conn: &mut Conn) {
        let key = self.key();
        let owner = self.random.pick(&["alice", "bob", "carol", "dave"]).to_owned();
        let token = self.tokens.get(&(key.clone(), owner.clone())).copied().unwrap_or(1);
        let lease = self.lease();
        let request = match self.random.below(20) {
            0..9 => self.acquisition(&key, &owner, lease),
            9 => args!["FLOCK.ACQUIRE", key, owner, lease, "SHARED", "CONVERT", token].to_vec(),
            10 => args!["FLOCK.ACQUIRE", key, owner, lease, "CONVERT", token].to_vec(),
            11 => args!["FLOCK.RENEW", key, owner, lease].to_vec(),
            12 => args!["FLOCK.RENEW", key, owner, lease, "TOKEN", token].to_vec(),
            13 => args!["FLOCK.RELEASE", key, owner, "ID", "1"].to_vec(),
            14 | 15 => args!["FLOCK.RELEASE", key, owner, "ALL"].to_vec(),
            16 => args!["FLOCK.REVOKE", key].to_vec(),
            17 => args!["FLOCK.REVOKE", key, "OWNER", owner].to_vec(),
            _ => self.outside_request(&key),
        };
        let answer = conn.cmd(&request);
        if let (Reply::Int(token), b"FLOCK.ACQUIRE") = (&answer, request[0].as_slice()) {
            let token = u64::try_from(*token).expect("a token is not negative");
            self.tokens.insert((key, owner), token);
        }
    }

    fn acquisition(&mut self, key: &str, owner: &str, lease: u64) -> Vec<Vec<u8>> {
        let mut request = args!["FLOCK.ACQUIRE", key, owner, lease].to_vec();
        let mut add = |words: &[&str]| request.extend(words.iter().map(|word| word.as_bytes().to_vec()));
        if !self.random.one_in(3) {
            add(&["SHARED"]);
        }
        if self.random.one_in(3) {
            let id = self.random.pick(&["1", "2", "3"]);
            add(&["REENTRANT", id]);
        }
        if self.random.one_in(4) {
            add(&["LABEL", "nightly run"]);
        }
        if self.random.one_in(4) {
            add(&["CHANNEL", "news of alice"]);
        }
        if self.random.one_in(6) {
            add(&["CLAIM", "20"]);
        }
        if self.random.one_in(6) {
            add(&["SESSION", "20"]);
        }
        if self.random.one_in(6) {
            add(&["QUEUE", "50"]);
            if !request.contains(&b"CHANNEL".to_vec()) {
                request.extend([b"CHANNEL".to_vec(), b"a queue".to_vec()]);
            }
        }
        request
    }

    fn outside_request(&mut self, key: &str) -> Vec<Vec<u8>> {
        let other = self.key();
        match self.random.below(6) {
            0 => args!["DEL", key].to_vec(),
            1 => args!["UNLINK", key].to_vec(),
            2 => args!["RENAME", key, other].to_vec(),
            3 => args!["MOVE", key, 1].to_vec(),
            4 => args!["PEXPIRE", key, SHORT_LEASE_MS].to_vec(),
            _ => args!["SET", key, "no lock", "PX", SHORT_LEASE_MS].to_vec(),
        }
    }

    fn key(&mut self) -> String {
        format!("lock {}", self.random.below(self.keys))
    }

    fn lease(&mut self) -> u64 {
        if self.random.one_in(3) { 1 + self.random.below(SHORT_LEASE_MS) } else { LONG_LEASE_MS }
    }
}

/// A thread that sends requests until it is told to stop.
pub(crate) struct Background {
    stop: Arc<AtomicBool>,
    steps: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Background {
    /// Starts it; the connection is its own.
    #[track_caller]
    pub(crate) fn start(server: &Server, mut traffic: Traffic) -> Background {
        let mut conn = server.connect(Protocol::Resp2);
        let stop = Arc::new(AtomicBool::new(false));
        let steps = Arc::new(AtomicU64::new(0));
        let (stopped, counted) = (Arc::clone(&stop), Arc::clone(&steps));
        let thread = spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                traffic.step(&mut conn);
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        Background { stop, steps, thread }
    }

    /// Waits until so many more requests have been answered.
    #[track_caller]
    pub(crate) fn wait_steps(&self, more: u64) {
        let goal = self.steps.load(Ordering::Relaxed) + more;
        wait_until(&format!("{more} more requests are answered"), ANSWER_WITHIN, || {
            self.steps.load(Ordering::Relaxed) >= goal
        });
    }

    /// Ends it after the answer that it waits for.
    #[track_caller]
    pub(crate) fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        if self.thread.join().is_err() {
            panic!("a request of the traffic had no answer");
        }
    }
}

/// Waits until nothing happens any more by itself: short leases, claims, graces and waits are over, keys with an expiry are gone.
#[track_caller]
pub(crate) fn wait_settled(server: &Server) {
    let mut conn = server.connect(Protocol::Resp2);
    wait_until("only long leases are left", ANSWER_WITHIN, || {
        let waiters = Info::ask(&mut conn, "flock").number("flock_waiters");
        // KEYS hides what has expired and is still there; the count of keys with an expiry does not.
        let keyspace = conn.cmd(&["INFO", "keyspace"]);
        let expiring = keyspace.as_str().lines().any(|line| line.starts_with("db") && !line.contains("expires=0"));
        waiters == 0 && !expiring && all_long(&mut conn)
    });
}

fn all_long(conn: &mut Conn) -> bool {
    every_key(conn).iter().all(|(db, key)| {
        conn.cmd(&args!["SELECT", db]);
        let info = conn.cmd(&args!["FLOCK.INFO", key]);
        // Nil: gone in between, or the value of an ended lock that RENAME or MOVE has carried here.
        let Some(holders) = info.get("holders") else { return true };
        holders.as_array().iter().all(|hold| hold.field("left_ms").as_int() > 10_000)
    })
}

#[track_caller]
fn every_key(conn: &mut Conn) -> Vec<(u16, Vec<u8>)> {
    let mut found = Vec::new();
    for db in [0, 1] {
        conn.cmd(&args!["SELECT", db]);
        let keys = conn.cmd(&["KEYS", "*"]);
        found.extend(keys.as_array().iter().map(|key| (db, key.as_bytes().to_vec())));
    }
    found
}

/// Every key of both databases with the digest of its value: what replicas and reloads must have alike.
#[track_caller]
pub(crate) fn contents(server: &Server) -> BTreeMap<String, String> {
    let mut conn = server.connect(Protocol::Resp2);
    let digest = |(db, key): &(u16, Vec<u8>)| {
        conn.cmd(&args!["SELECT", db]);
        let digest = conn.cmd(&args!["DEBUG", "DIGEST-VALUE", key]);
        (format!("{db}/{}", String::from_utf8_lossy(key)), digest.as_array()[0].as_str().to_owned())
    };
    let keys = every_key(&mut server.connect(Protocol::Resp2));
    keys.iter().map(digest).collect()
}

/// The same of held locks only: without the values of ended locks that RENAME and MOVE have carried elsewhere.
#[track_caller]
pub(crate) fn held(server: &Server) -> BTreeMap<String, String> {
    let mut conn = server.connect(Protocol::Resp2);
    let mut held = contents(server);
    for (db, key) in every_key(&mut conn) {
        conn.cmd(&args!["SELECT", db]);
        if conn.cmd(&args!["FLOCK.INFO", key]).is_nil() {
            held.remove(&format!("{db}/{}", String::from_utf8_lossy(&key)));
        }
    }
    held
}

/// Wants two servers, or one before and after, to contain the same. Shows what only one of them has, or has otherwise.
#[track_caller]
pub(crate) fn assert_same(found: &BTreeMap<String, String>, expected: &BTreeMap<String, String>, what: &str) {
    let keys = found.keys().chain(expected.keys());
    let differing: BTreeMap<_, _> = keys
        .filter(|key| found.get(*key) != expected.get(*key))
        .map(|key| (key, (found.get(key), expected.get(key))))
        .collect();
    assert!(differing.is_empty(), "{what}: (found, expected) differ in {differing:?}");
}
