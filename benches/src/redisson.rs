//! Two locks as Redisson makes them: written by us from its published algorithm (Redisson 3.x), without its Java client.
//!
//! A lock is a hash `owner -> holds` that expires. A release publishes to those who wait, and leaves its result in a key of its own, so
//! that it can be repeated; the client deletes that key afterwards. The fair lock has a list of those who wait and a sorted set of their
//! deadlines, by the clock of the client.

/// KEYS: lock. ARGV: lease, owner. Nil if taken, else the lease that is left.
pub const TAKE: &str = "\
if redis.call('exists', KEYS[1]) == 0 or redis.call('hexists', KEYS[1], ARGV[2]) == 1 then
  redis.call('hincrby', KEYS[1], ARGV[2], 1)
  redis.call('pexpire', KEYS[1], ARGV[1])
  return nil
end
return redis.call('pttl', KEYS[1])";

/// KEYS: lock, channel, result of this release. ARGV: message, lease, owner, lifetime of the result. 1 if free.
pub const GIVE: &str = "\
local done = redis.call('get', KEYS[3])
if done ~= false then return tonumber(done) end
if redis.call('hexists', KEYS[1], ARGV[3]) == 0 then return nil end
if redis.call('hincrby', KEYS[1], ARGV[3], -1) > 0 then
  redis.call('pexpire', KEYS[1], ARGV[2])
  redis.call('set', KEYS[3], 0, 'px', ARGV[4])
  return 0
end
redis.call('del', KEYS[1])
redis.call('publish', KEYS[2], ARGV[1])
redis.call('set', KEYS[3], 1, 'px', ARGV[4])
return 1";

/// KEYS: lock, queue, deadlines. ARGV: lease, owner, allowance for a waiter, now. Nil if taken, else how long to wait.
pub const TAKE_FAIR: &str = "\
while true do
  local first = redis.call('lindex', KEYS[2], 0)
  if first == false then break end
  local deadline = redis.call('zscore', KEYS[3], first)
  if deadline == false or tonumber(deadline) > tonumber(ARGV[4]) then break end
  redis.call('zrem', KEYS[3], first)
  redis.call('lpop', KEYS[2])
end
if redis.call('exists', KEYS[1]) == 0
  and (redis.call('exists', KEYS[2]) == 0 or redis.call('lindex', KEYS[2], 0) == ARGV[2]) then
  redis.call('lpop', KEYS[2])
  redis.call('zrem', KEYS[3], ARGV[2])
  local waiters = redis.call('zrange', KEYS[3], 0, -1)
  for i = 1, #waiters do redis.call('zincrby', KEYS[3], -tonumber(ARGV[3]), waiters[i]) end
  redis.call('hset', KEYS[1], ARGV[2], 1)
  redis.call('pexpire', KEYS[1], ARGV[1])
  return nil
end
if redis.call('hexists', KEYS[1], ARGV[2]) == 1 then
  redis.call('hincrby', KEYS[1], ARGV[2], 1)
  redis.call('pexpire', KEYS[1], ARGV[1])
  return nil
end
if redis.call('zscore', KEYS[3], ARGV[2]) ~= false then return math.max(0, redis.call('pttl', KEYS[1])) end
local last = redis.call('lindex', KEYS[2], -1)
local wait
if last ~= false and last ~= ARGV[2] then
  wait = tonumber(redis.call('zscore', KEYS[3], last)) - tonumber(ARGV[4])
else
  wait = redis.call('pttl', KEYS[1])
end
if redis.call('zadd', KEYS[3], wait + tonumber(ARGV[3]) + tonumber(ARGV[4]), ARGV[2]) == 1 then
  redis.call('rpush', KEYS[2], ARGV[2])
end
return wait";

/// KEYS: lock, queue, deadlines, channels' prefix, result of this release. ARGV: message, lease, owner, now, lifetime of the result.
pub const GIVE_FAIR: &str = "\
local done = redis.call('get', KEYS[5])
if done ~= false then return tonumber(done) end
while true do
  local first = redis.call('lindex', KEYS[2], 0)
  if first == false then break end
  local deadline = redis.call('zscore', KEYS[3], first)
  if deadline == false or tonumber(deadline) > tonumber(ARGV[4]) then break end
  redis.call('zrem', KEYS[3], first)
  redis.call('lpop', KEYS[2])
end
if redis.call('hexists', KEYS[1], ARGV[3]) == 0 then return nil end
if redis.call('hincrby', KEYS[1], ARGV[3], -1) > 0 then
  redis.call('pexpire', KEYS[1], ARGV[2])
  redis.call('set', KEYS[5], 0, 'px', ARGV[5])
  return 0
end
redis.call('del', KEYS[1])
redis.call('set', KEYS[5], 1, 'px', ARGV[5])
local next = redis.call('lindex', KEYS[2], 0)
if next ~= false then redis.call('publish', KEYS[4] .. ':' .. next, ARGV[1]) end
return 1";

/// How much later than the one before a waiter of a fair lock gives up, in milliseconds: Redisson's default.
pub const ALLOWANCE_MS: u32 = 300_000;
/// How long the result of a release stays unless it is deleted, in milliseconds.
pub const RESULT_MS: u32 = 10_000;
/// The message to those who wait.
pub const FREED: &str = "0";

/// The names of a lock's keys and channels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    /// The hash.
    pub lock: String,
    /// The list of those who wait.
    pub queue: String,
    /// Their deadlines.
    pub deadlines: String,
    /// The channel; with the owner appended in a fair lock.
    pub channel: String,
}

impl Names {
    /// Of the lock with this name.
    pub fn of(lock: &str) -> Names {
        Names {
            lock: lock.to_owned(),
            queue: format!("redisson_lock_queue:{{{lock}}}"),
            deadlines: format!("redisson_lock_timeout:{{{lock}}}"),
            channel: format!("redisson_lock__channel:{{{lock}}}"),
        }
    }

    /// The key of the result of a release.
    pub fn result(&self, release: &str) -> String {
        format!("redisson_unlock_latch:{{{}}}:{release}", self.lock)
    }
}
