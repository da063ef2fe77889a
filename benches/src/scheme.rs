//! Ways to take a lock and to give it back.

use flock_tests::args;
use flock_tests::random::Random;
use flock_tests::resp::Protocol;
use flock_tests::server::Server;

use crate::generator::{Answer, Batch, Pipe};
use crate::measure::cpu_ns_each;
use crate::names::{self, KEY_BYTES, OWNER_BYTES};

/// A lease that ends long after the bench.
pub const LONG_LEASE_MS: u32 = 12 * 3600 * 1000;
/// The lease of what is measured: the usual length, and shorter than that of the locks held beside it.
const LEASE_MS: u32 = 30_000;

/// Takes a lock, with a fencing token from one counter for all locks. (A counter for each, as usual, costs more and leaves it behind.)
const LUA_TAKE: &str = "\
if redis.call('exists', KEYS[1]) == 1 then return false end
local token = redis.call('incr', KEYS[2])
redis.call('hset', KEYS[1], 'owner', ARGV[1], 'token', token)
redis.call('pexpire', KEYS[1], ARGV[2])
return token";
/// Gives it back.
const LUA_GIVE: &str = "\
if redis.call('hget', KEYS[1], 'owner') == ARGV[1] then return redis.call('del', KEYS[1]) end
return 0";

/// How a lock is taken and given back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// `FLOCK.ACQUIRE`, `FLOCK.RELEASE`.
    Flock,
    /// `SET NX PX`, and `DELIFEQ` of Valkey 9: no fencing token.
    SetDelIfEq,
    /// Two scripts, called by their digests: a fencing token, and an owner that is compared.
    FencedLua {
        /// The digest of the script that takes.
        take: String,
        /// The digest of the script that gives back.
        give: String,
    },
}

impl Scheme {
    /// The scripts, made known to the server.
    pub fn fenced_lua(server: &Server) -> Scheme {
        let mut conn = server.connect(Protocol::Resp2);
        let mut load = |script| conn.cmd(&args!["SCRIPT", "LOAD", script]).as_str().to_owned();
        Scheme::FencedLua { take: load(LUA_TAKE), give: load(LUA_GIVE) }
    }

    /// The command that takes the lock.
    pub fn take(&self, key: &[u8], owner: &[u8], lease_ms: u32) -> Vec<Vec<u8>> {
        match self {
            Scheme::Flock => args!["FLOCK.ACQUIRE", key, owner, lease_ms].to_vec(),
            Scheme::SetDelIfEq => args!["SET", key, owner, "NX", "PX", lease_ms].to_vec(),
            Scheme::FencedLua { take, .. } => args!["EVALSHA", take, 2, key, "tokens", owner, lease_ms].to_vec(),
        }
    }

    /// The command that gives it back.
    pub fn give(&self, key: &[u8], owner: &[u8]) -> Vec<Vec<u8>> {
        match self {
            Scheme::Flock => args!["FLOCK.RELEASE", key, owner].to_vec(),
            Scheme::SetDelIfEq => args!["DELIFEQ", key, owner].to_vec(),
            Scheme::FencedLua { give, .. } => args!["EVALSHA", give, 1, key, owner].to_vec(),
        }
    }

    /// What a lock that could be taken is answered with.
    pub fn taken(&self) -> Answer {
        match self {
            Scheme::Flock | Scheme::FencedLua { .. } => Answer::Token,
            Scheme::SetDelIfEq => Answer::Ok,
        }
    }
}

/// Takes `count` locks with random names and keeps them.
pub fn hold(server: &Server, scheme: &Scheme, random: &mut Random, count: usize, key_bytes: usize, owner_bytes: usize) {
    let mut pipe = Pipe::open(server.addr());
    let mut left = count;
    while left > 0 {
        let mut batch = Batch::new(scheme.taken());
        for _ in 0..left.min(256) {
            let (key, owner) = (names::key(random, key_bytes), names::owner(random, owner_bytes));
            batch.push(&scheme.take(&key, &owner, LONG_LEASE_MS));
        }
        pipe.run(&batch);
        left -= batch.len();
    }
}

/// Takes locks and gives them back, on and on: `depth` commands in flight, all taking, then all giving back.
#[derive(Debug)]
pub struct Pairs<'server> {
    server: &'server Server,
    pipe: Pipe,
    batches: Vec<(Batch, Batch)>,
    next: usize,
}

impl<'server> Pairs<'server> {
    /// Makes the commands for `names` locks with random names and owners.
    pub fn new(server: &'server Server, scheme: &Scheme, random: &mut Random, depth: usize, names: usize) -> Self {
        let batches = (0..names / depth).map(|_| {
            let (mut take, mut give) = (Batch::new(scheme.taken()), Batch::new(Answer::One));
            for _ in 0..depth {
                let (key, owner) = (names::key(random, KEY_BYTES), names::owner(random, OWNER_BYTES));
                take.push(&scheme.take(&key, &owner, LEASE_MS));
                give.push(&scheme.give(&key, &owner));
            }
            (take, give)
        });
        Pairs { server, pipe: Pipe::open(server.addr()), batches: batches.collect(), next: 0 }
    }

    /// Takes and gives back about `pairs` locks; whole batches.
    pub fn run(&mut self, pairs: usize) -> usize {
        let mut done = 0;
        while done < pairs {
            let (take, give) = &self.batches[self.next];
            self.pipe.run(take);
            self.pipe.run(give);
            done += take.len();
            self.next = (self.next + 1) % self.batches.len();
        }
        done
    }

    /// Nanoseconds of the server's main thread per pair, over `pairs` of them (a multiple of the depth).
    pub fn cost(&mut self, pairs: usize) -> f64 {
        let server = self.server;
        cpu_ns_each(server, pairs, || assert_eq!(self.run(pairs), pairs))
    }
}
