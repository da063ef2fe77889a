//! Ways to take a lock and to give it back.

use flock_tests::args;
use flock_tests::random::Random;
use flock_tests::resp::Protocol;
use flock_tests::server::Server;

use crate::generator::{Answer, Batch, Pipe};
use crate::measure::cpu_ns_each;
use crate::names::{self, KEY_BYTES, OWNER_BYTES};
use crate::redisson::{self, Names};

/// A lease that ends long after the bench.
pub const LONG_LEASE_MS: u32 = 12 * 3600 * 1000;
/// The lease of what is measured: the usual length, and shorter than that of the locks held beside it.
const LEASE_MS: u32 = 30_000;
/// A release of Redisson's has a name of its own, as long as this one.
const RELEASE: &str = "0123456789abcdef0123456789abcdef";
/// A clock, for the deadlines of a fair lock that nobody waits for.
const NOW_MS: u64 = 1_700_000_000_000;

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

/// Deletes a key that has the given value: the usual way to give back what `SET NX PX` took, where there is no `DELIFEQ`.
pub const COMPARE_AND_DELETE: &str = "\
if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end
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
    /// `SET NX PX`, and a script that compares and deletes, called by its digest: no fencing token.
    SetScript {
        /// The digest of the script.
        give: String,
    },
    /// [`redisson`]'s lock: three commands, with that which deletes the result of the release.
    Redisson {
        /// The digest of the script that takes.
        take: String,
        /// The digest of the script that gives back.
        give: String,
    },
    /// [`redisson`]'s fair lock, likewise.
    RedissonFair {
        /// The digest of the script that takes.
        take: String,
        /// The digest of the script that gives back.
        give: String,
    },
    /// Two PINGs: what any two commands cost.
    Ping,
}

impl Scheme {
    /// The scripts, made known to the server.
    pub fn fenced_lua(server: &Server) -> Scheme {
        Scheme::FencedLua { take: load(server, LUA_TAKE), give: load(server, LUA_GIVE) }
    }

    /// The script, made known to the server.
    pub fn set_script(server: &Server) -> Scheme {
        Scheme::SetScript { give: load(server, COMPARE_AND_DELETE) }
    }

    /// The scripts, made known to the server.
    pub fn redisson(server: &Server) -> Scheme {
        Scheme::Redisson { take: load(server, redisson::TAKE), give: load(server, redisson::GIVE) }
    }

    /// The scripts, made known to the server.
    pub fn redisson_fair(server: &Server) -> Scheme {
        Scheme::RedissonFair { take: load(server, redisson::TAKE_FAIR), give: load(server, redisson::GIVE_FAIR) }
    }

    /// The command that takes the lock.
    pub fn take(&self, key: &[u8], owner: &[u8], lease_ms: u32) -> Vec<Vec<u8>> {
        match self {
            Scheme::Flock => args!["FLOCK.ACQUIRE", key, owner, lease_ms].to_vec(),
            Scheme::SetDelIfEq | Scheme::SetScript { .. } => args!["SET", key, owner, "NX", "PX", lease_ms].to_vec(),
            Scheme::FencedLua { take, .. } => args!["EVALSHA", take, 2, key, "tokens", owner, lease_ms].to_vec(),
            Scheme::Redisson { take, .. } => args!["EVALSHA", take, 1, key, lease_ms, owner].to_vec(),
            Scheme::RedissonFair { take, .. } => {
                let Names { queue, deadlines, .. } = names_of(key);
                args!["EVALSHA", take, 3, key, queue, deadlines, lease_ms, owner, redisson::ALLOWANCE_MS, NOW_MS]
                    .to_vec()
            }
            Scheme::Ping => args!["PING"].to_vec(),
        }
    }

    /// The commands that give it back.
    pub fn give(&self, key: &[u8], owner: &[u8]) -> Vec<Vec<Vec<u8>>> {
        let one = match self {
            Scheme::Flock => args!["FLOCK.RELEASE", key, owner].to_vec(),
            Scheme::SetDelIfEq => args!["DELIFEQ", key, owner].to_vec(),
            Scheme::FencedLua { give, .. } | Scheme::SetScript { give } => {
                args!["EVALSHA", give, 1, key, owner].to_vec()
            }
            Scheme::Redisson { give, .. } => {
                let names = names_of(key);
                let (channel, result) = (&names.channel, names.result(RELEASE));
                let (freed, kept_ms) = (redisson::FREED, redisson::RESULT_MS);
                let give = args!["EVALSHA", give, 3, key, channel, result, freed, LEASE_MS, owner, kept_ms].to_vec();
                return vec![give, args!["DEL", result].to_vec()];
            }
            Scheme::RedissonFair { give, .. } => {
                let names = names_of(key);
                let (Names { queue, deadlines, channel, .. }, result) = (&names, names.result(RELEASE));
                let (freed, kept_ms) = (redisson::FREED, redisson::RESULT_MS);
                let mut release = args!["EVALSHA", give, 5, key, queue, deadlines, channel, result].to_vec();
                release.extend(args![freed, LEASE_MS, owner, NOW_MS, kept_ms]);
                return vec![release, args!["DEL", result].to_vec()];
            }
            Scheme::Ping => args!["PING"].to_vec(),
        };
        vec![one]
    }

    /// What a lock that could be taken is answered with.
    pub fn taken(&self) -> Answer {
        match self {
            Scheme::Flock | Scheme::FencedLua { .. } => Answer::Token,
            Scheme::SetDelIfEq | Scheme::SetScript { .. } => Answer::Ok,
            Scheme::Redisson { .. } | Scheme::RedissonFair { .. } => Answer::Nil,
            Scheme::Ping => Answer::Pong,
        }
    }

    /// What giving it back is answered with.
    pub fn given(&self) -> Answer {
        if *self == Scheme::Ping { Answer::Pong } else { Answer::One }
    }
}

fn load(server: &Server, script: &str) -> String {
    server.connect(Protocol::Resp2).cmd(&args!["SCRIPT", "LOAD", script]).as_str().to_owned()
}

fn names_of(key: &[u8]) -> Names {
    Names::of(&String::from_utf8_lossy(key))
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
            let (mut take, mut give) = (Batch::new(scheme.taken()), Batch::new(scheme.given()));
            for _ in 0..depth {
                let (key, owner) = (names::key(random, KEY_BYTES), names::owner(random, OWNER_BYTES));
                take.push(&scheme.take(&key, &owner, LEASE_MS));
                for command in scheme.give(&key, &owner) {
                    give.push(&command);
                }
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
