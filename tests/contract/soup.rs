//! Everything at once: many clients send anything to a few keys, and to the server itself.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::scope;
use std::time::{Duration, Instant};

use flock_tests::args;
use flock_tests::args::encode;
use flock_tests::check::{Rules, assert_sound};
use flock_tests::history::{Call, OpId, Recorder, Verb};
use flock_tests::on_own_servers;
use flock_tests::random::Random;
use flock_tests::reply::Reply;
use flock_tests::resp::{Conn, Protocol, RecvError};
use flock_tests::server::{Builder, Server};
use flock_tests::topology::Replicated;
use flock_tests::wait::let_pass;

use crate::scene::long_tier;
use crate::traffic::{assert_same, contents, wait_settled};

on_own_servers![soup_of_commands_breaks_nothing];

const CLIENTS: u32 = 8;
const KEYS: [&str; 5] = ["a", "b", "c", "d", "numbers"];
/// After the soup, whoever still waits must hear something within this: an answer, or that the connection is closed.
const ALL_ANSWERED_WITHIN: Duration = Duration::from_secs(20);

fn soup_of_commands_breaks_nothing(builder: Builder) {
    // B6. The server lives, nothing panics, every client is answered or cut off, no token comes twice or out of order, and at the end
    // the replica is like the primary.
    let lasts = Duration::from_secs(if long_tier() { 60 } else { 4 });
    let servers = Replicated::start(&builder.config("maxmemory-policy", "allkeys-random"), 1);
    let (primary, replica) = (&servers.primary, &servers.replicas[0]);
    let soup = Soup {
        server: primary,
        recorder: Recorder::new(),
        owners: AtomicU64::new(0),
        client_ids: Mutex::new(BTreeMap::new()),
        is_over: AtomicBool::new(false),
    };
    let mut random = Random::new();
    scope(|threads| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|number| {
                let random = Random::from_seed(random.number());
                let soup = &soup;
                threads.spawn(move || Client::new(soup, number, random).run())
            })
            .collect();
        let_pass(lasts);
        soup.is_over.store(true, Ordering::Relaxed);
        // Who waits without limit hears of the flush.
        let mut admin = primary.connect(Protocol::Resp2);
        admin.cmd(&["CONFIG", "SET", "maxmemory", "0"]);
        while clients.iter().any(|client| !client.is_finished()) {
            admin.cmd(&["FLUSHALL"]);
            let_pass(Duration::from_millis(20));
        }
    });
    let mut admin = primary.connect(Protocol::Resp2);
    // A hold may have been left with a long lease; those stay. What is short ends.
    admin.cmd(&["CONFIG", "SET", "maxmemory", "0"]);
    wait_settled(primary);
    servers.wait_in_step();
    assert_same(&contents(replica), &contents(primary), "replica and primary");
    // Who holds what, was decided by too many to be judged here; tokens are judged over all keys.
    let rules = Rules { exclusion: false, leases: false, fifo: false, ..Rules::default() };
    let events = soup.recorder.events();
    println!("{} acquisitions", events.len() / 2);
    assert_sound(&events, &rules);
    for server in [primary, replica] {
        let info = server.info("flock");
        for field in ["flock_panics_caught", "flock_waiters", "flock_blocked_clients"] {
            assert_eq!(info.number(field), 0, "{field}");
        }
        server.assert_alive();
    }
}

/// What the clients share.
struct Soup<'a> {
    server: &'a Server,
    recorder: Recorder,
    owners: AtomicU64,
    /// The connection of each client, for the others to kill.
    client_ids: Mutex<BTreeMap<u32, i64>>,
    is_over: AtomicBool,
}

struct Client<'a> {
    soup: &'a Soup<'a>,
    number: u32,
    random: Random,
    conn: Conn,
    /// A value that this client dumped.
    dumped: Vec<u8>,
    /// Owners and tokens of before, to be used again.
    known: Vec<(String, u64)>,
}

impl<'a> Client<'a> {
    fn new(soup: &'a Soup<'a>, number: u32, mut random: Random) -> Client<'a> {
        let conn = connect(soup, number, &mut random);
        Client { soup, number, random, conn, dumped: Vec::new(), known: vec![("nobody".into(), 1)] }
    }

    fn run(mut self) {
        while !self.soup.is_over.load(Ordering::Relaxed) {
            let outcome = match self.random.below(20) {
                0..8 => self.acquire(),
                8..12 => self.use_lock(),
                12 => self.transaction(),
                13 => self.script(),
                14..18 => self.outside(),
                _ => self.server_wide(),
            };
            if outcome.is_err() {
                self.conn = connect(self.soup, self.number, &mut self.random);
            }
        }
    }

    /// Sends a command and takes its answer; an error if the connection was closed meanwhile.
    fn ask<A: AsRef<[u8]>>(&mut self, args: &[A]) -> Result<Reply, RecvError> {
        self.conn.try_send_bytes(&encode(args)).map_err(|_| RecvError::Closed)?;
        self.answer()
    }

    fn answer(&mut self) -> Result<Reply, RecvError> {
        let mut over_since = None;
        loop {
            match self.conn.recv_within(Duration::from_millis(200)) {
                Err(RecvError::TimedOut) => {}
                Err(RecvError::Broken(what)) => panic!("the server sent nonsense: {what}"),
                outcome => return outcome,
            }
            if self.soup.is_over.load(Ordering::Relaxed) {
                let waited = over_since.get_or_insert_with(Instant::now).elapsed();
                assert!(waited < ALL_ANSWERED_WITHIN, "client {} is never answered", self.number);
            }
        }
    }

    fn key(&mut self) -> &'static str {
        self.random.pick(&KEYS)
    }

    fn lease_ms(&mut self) -> u64 {
        if self.random.one_in(12) { 600_000 } else { 1 + self.random.below(150) }
    }

    fn fresh_owner(&self) -> String {
        format!("owner {}", self.soup.owners.fetch_add(1, Ordering::Relaxed))
    }

    fn known(&mut self) -> (String, u64) {
        let index = self.random.below(self.known.len() as u64);
        self.known[usize::try_from(index).expect("an index fits")].clone()
    }

    fn learn(&mut self, owner: String, token: u64) {
        if self.known.len() == 8 {
            self.known.remove(0);
        }
        self.known.push((owner, token));
    }

    /// An acquisition by an owner of its own, with any options.
    fn acquisition(&mut self, owner: &str, may_wait: bool) -> Vec<Vec<u8>> {
        let mut request = args!["FLOCK.ACQUIRE", self.key(), owner, self.lease_ms()].to_vec();
        if self.random.one_in(2) {
            request.push(b"SHARED".to_vec());
            if self.random.one_in(3) {
                request.extend(args!["LIMIT", 1 + self.random.below(4)]);
            }
        }
        if may_wait {
            match self.random.below(10) {
                0 => request.extend(args!["BLOCK", 0]),
                1..6 => request.extend(args!["BLOCK", 1 + self.random.below(300)]),
                6 | 7 => request.extend(args!["QUEUE", 1 + self.random.below(200), "CHANNEL", "news"]),
                _ => {}
            }
            if self.random.one_in(5) {
                request.extend(args!["SESSION", 1 + self.random.below(50)]);
            }
        }
        if self.random.one_in(5) {
            request.extend(args!["REENTRANT", self.random.below(3)]);
        }
        if self.random.one_in(5) {
            request.extend(args!["CLAIM", 1 + self.random.below(50)]);
        }
        if self.random.one_in(8) {
            request.extend(args!["LABEL", "soup"]);
        }
        if self.random.one_in(8) {
            request.push(b"NEW".to_vec());
        }
        if self.random.one_in(8) {
            let (_, token) = self.known();
            request.extend(args!["FLOOR", token]);
        }
        request
    }

    fn begin(&self, owner: &str) -> OpId {
        self.soup.recorder.invoke(self.number, Call::new(Verb::Acquire, "any", owner))
    }

    fn end(&mut self, op: OpId, owner: String, outcome: Option<&Reply>) {
        match outcome {
            Some(Reply::Int(token)) => {
                let token = u64::try_from(*token).expect("a token is not negative");
                self.soup.recorder.ok(op, Some(token));
                self.learn(owner, token);
            }
            Some(Reply::Array(_)) => self.soup.recorder.queued(op),
            Some(_) => self.soup.recorder.refused(op),
            None => self.soup.recorder.unknown(op),
        }
    }

    fn acquire(&mut self) -> Result<(), RecvError> {
        let owner = self.fresh_owner();
        let request = self.acquisition(&owner, true);
        let op = self.begin(&owner);
        let outcome = self.ask(&request);
        self.end(op, owner, outcome.as_ref().ok());
        outcome.map(drop)
    }

    /// What is done with a lock that somebody has, or had.
    fn use_lock(&mut self) -> Result<(), RecvError> {
        let key = self.key();
        let (owner, token) = self.known();
        let lease_ms = self.lease_ms();
        let request = match self.random.below(12) {
            0 => args!["FLOCK.RELEASE", key, owner].to_vec(),
            1 => args!["FLOCK.RELEASE", key, owner, "TOKEN", token].to_vec(),
            2 => args!["FLOCK.RELEASE", key, owner, "ID", self.random.below(3)].to_vec(),
            3 => args!["FLOCK.RELEASE", key, owner, "ALL"].to_vec(),
            4 => args!["FLOCK.RENEW", key, owner, lease_ms].to_vec(),
            5 => args!["FLOCK.RENEW", key, owner, lease_ms, "TOKEN", token].to_vec(),
            6 => args!["FLOCK.CHECK", key, token].to_vec(),
            7 => args!["FLOCK.INFO", key, "LIMIT", self.random.below(3)].to_vec(),
            8 => args!["FLOCK.LIST", "COUNT", 1 + self.random.below(10), "MATCH", "*"].to_vec(),
            9 => args!["FLOCK.REVOKE", key].to_vec(),
            // The token stays: a hold of before, and no grant.
            10 => args!["FLOCK.ACQUIRE", key, owner, lease_ms, "SHARED", "CONVERT", token].to_vec(),
            _ => args!["FLOCK.ACQUIRE", key, owner, lease_ms, "CONVERT", token].to_vec(),
        };
        self.ask(&request).map(drop)
    }

    fn transaction(&mut self) -> Result<(), RecvError> {
        let owner = self.fresh_owner();
        let other = self.key();
        let (known, _) = self.known();
        let acquisition = self.acquisition(&owner, false);
        self.ask(&["MULTI"])?;
        self.ask(&args!["FLOCK.RELEASE", other, known])?;
        self.ask(&args!["DEL", other])?;
        let op = self.begin(&owner);
        if let Err(error) = self.ask(&acquisition) {
            // Only queued, never run.
            self.soup.recorder.refused(op);
            return Err(error);
        }
        let outcome = self.ask(&["EXEC"]);
        let granted = match &outcome {
            Ok(Reply::Array(replies)) => replies.last().cloned(),
            Ok(_) => Some(Reply::Nil), // refused as a whole
            Err(_) => None,
        };
        self.end(op, owner, granted.as_ref());
        outcome.map(drop)
    }

    fn script(&mut self) -> Result<(), RecvError> {
        const SCRIPT: &str = "redis.pcall('UNLINK', KEYS[1]) \
                              local token = redis.pcall('FLOCK.ACQUIRE', KEYS[1], ARGV[1], ARGV[2]) \
                              redis.pcall('FLOCK.CHECK', KEYS[1], 1) \
                              if ARGV[3] == '1' then redis.pcall('FLOCK.RELEASE', KEYS[1], ARGV[1]) end \
                              return token";
        let owner = self.fresh_owner();
        let request = args!["EVAL", SCRIPT, 1, self.key(), owner, self.lease_ms(), self.random.below(2)];
        let op = self.begin(&owner);
        let outcome = self.ask(&request);
        self.end(op, owner, outcome.as_ref().ok());
        outcome.map(drop)
    }

    /// What others do to the keys.
    fn outside(&mut self) -> Result<(), RecvError> {
        let (key, other) = (self.key(), self.key());
        let soon_ms = 1 + self.random.below(60);
        let request = match self.random.below(22) {
            0 => args!["DEL", key, other].to_vec(),
            1 => args!["UNLINK", key].to_vec(),
            2 => args!["RENAME", key, other].to_vec(),
            3 => args!["RENAMENX", key, other].to_vec(),
            4 => args!["COPY", key, other, "REPLACE"].to_vec(),
            5 => args!["COPY", key, other, "DB", 1, "REPLACE"].to_vec(),
            6 => args!["MOVE", key, self.random.below(2)].to_vec(),
            7 => args!["PEXPIRE", key, soon_ms].to_vec(),
            8 => args!["EXPIRE", key, 0].to_vec(),
            9 => args!["PERSIST", key].to_vec(),
            10 => args!["SET", key, "no lock", "PX", soon_ms].to_vec(),
            11 => args!["GETDEL", key].to_vec(),
            12 => args!["OBJECT", "ENCODING", key].to_vec(),
            13 => args!["OBJECT", "IDLETIME", key].to_vec(),
            14 => args!["SCAN", 0, "COUNT", 100].to_vec(),
            15 => args!["RPUSH", "numbers", 3, 1, 2].to_vec(),
            16 => args!["SORT", "numbers", "STORE", key].to_vec(),
            17 => args!["MEMORY", "USAGE", key].to_vec(),
            18 => args!["SELECT", self.random.below(2)].to_vec(),
            19 => args!["DEBUG", "DIGEST-VALUE", key].to_vec(),
            20 => {
                if let Reply::Bulk(value) = self.ask(&args!["DUMP", key])? {
                    self.dumped = value;
                }
                return Ok(());
            }
            _ => args!["RESTORE", key, 0, self.dumped, "REPLACE"].to_vec(),
        };
        self.ask(&request).map(drop)
    }

    /// What concerns more than a key.
    fn server_wide(&mut self) -> Result<(), RecvError> {
        let victim = self.victim();
        let request = match self.random.below(14) {
            0 => args!["FLUSHALL"].to_vec(),
            1 => args!["FLUSHDB", "ASYNC"].to_vec(),
            2 => args!["SWAPDB", 0, 1].to_vec(),
            3 => args!["CLIENT", "KILL", "ID", victim].to_vec(),
            4 | 5 => args!["CLIENT", "UNBLOCK", victim, "TIMEOUT"].to_vec(),
            6 | 7 => args!["CLIENT", "UNBLOCK", victim, "ERROR"].to_vec(),
            // Everything is too much; soon after, nothing is.
            8 => {
                self.ask(&["CONFIG", "SET", "maxmemory", "1"])?;
                let other = self.key();
                self.ask(&args!["SET", other, "x"])?;
                args!["CONFIG", "SET", "maxmemory", 0].to_vec()
            }
            9 if self.random.one_in(4) => args!["DEBUG", "RELOAD"].to_vec(),
            10 => args!["INFO", "everything"].to_vec(),
            11 => args!["RESET"].to_vec(),
            12 => args!["CLIENT", "LIST"].to_vec(),
            _ => args!["CONFIG", "SET", "maxmemory", 0].to_vec(),
        };
        self.ask(&request).map(drop)
    }

    fn victim(&mut self) -> i64 {
        let number = u32::try_from(self.random.below(u64::from(CLIENTS))).expect("a client's number");
        let ids = self.soup.client_ids.lock().unwrap_or_else(PoisonError::into_inner);
        ids.get(&number).copied().unwrap_or(1)
    }
}

/// A connection in either protocol, perhaps made while the server reloads, or killed before it knows its id.
fn connect(soup: &Soup<'_>, number: u32, random: &mut Random) -> Conn {
    let is_new = random.one_in(2);
    loop {
        let mut conn = Conn::open_raw(soup.server.addr());
        if is_new && conn.try_cmd(&["HELLO", "3"]).is_err() {
            continue;
        }
        if let Ok(Reply::Int(id)) = conn.try_cmd(&["CLIENT", "ID"]) {
            let mut ids = soup.client_ids.lock().unwrap_or_else(PoisonError::into_inner);
            ids.insert(number, id);
            return conn;
        }
    }
}
