//! Redisson's two locks: its scripts ([`flock_benches::redisson`]), and its way to wait: subscribe, try, wait for a message or the end of
//! the lease, try, unsubscribe. Every contender is a process of its own; in one process Redisson lets one of the waiting threads try.

use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use flock_benches::redisson::{self as scripts, ALLOWANCE_MS, FREED, Names, RESULT_MS};
use futures_util::{Stream, StreamExt};
use redis::aio::{MultiplexedConnection, PubSubSink};
use redis::{AsyncConnectionConfig, Msg};

use super::{Contender, LEASE, LOCK};

/// One who wants the lock.
pub(crate) struct Redisson {
    conn: MultiplexedConnection,
    sink: PubSubSink,
    messages: std::pin::Pin<Box<dyn Stream<Item = Msg> + Send>>,
    names: Names,
    owner: String,
    fair: bool,
    take: String,
    give: String,
    released: u64,
}

/// `count` of them.
pub(crate) async fn contenders(server: SocketAddr, count: usize, fair: bool) -> Vec<Redisson> {
    let client = redis::Client::open(format!("redis://{server}")).expect("the address is one");
    let (take, give) = if fair { (scripts::TAKE_FAIR, scripts::GIVE_FAIR) } else { (scripts::TAKE, scripts::GIVE) };
    let mut all = Vec::new();
    for number in 0..count {
        let config = AsyncConnectionConfig::new().set_response_timeout(None);
        let conn = client.get_multiplexed_async_connection_with_config(&config).await;
        let mut conn = conn.expect("the server answers");
        let (sink, messages) = client.get_async_pubsub().await.expect("the server answers").split();
        let mut digests = Vec::new();
        for script in [take, give] {
            let digest = redis::cmd("SCRIPT").arg("LOAD").arg(script).query_async::<String>(&mut conn).await;
            digests.push(digest.expect("the script is one"));
        }
        let [take, give] = digests.try_into().expect("there are two");
        all.push(Redisson {
            conn,
            sink,
            messages: Box::pin(messages),
            names: Names::of(LOCK),
            owner: format!("8743c9c0-0795-4907-87fd-6c719a6b4586:{number}"),
            fair,
            take,
            give,
            released: 0,
        });
    }
    all
}

impl Redisson {
    /// None if it has the lock now, else how long to wait at most.
    async fn attempt(&mut self) -> Option<Duration> {
        let Names { lock, queue, deadlines, .. } = &self.names;
        let lease_ms = LEASE.as_millis() as u64;
        let mut command = redis::cmd("EVALSHA");
        if self.fair {
            command.arg(&self.take).arg(3).arg(lock).arg(queue).arg(deadlines);
            command.arg(lease_ms).arg(&self.owner).arg(ALLOWANCE_MS).arg(now_ms());
        } else {
            command.arg(&self.take).arg(1).arg(lock).arg(lease_ms).arg(&self.owner);
        }
        let wait: Option<i64> = command.query_async(&mut self.conn).await.expect("the server answers");
        wait.map(|ms| Duration::from_millis(ms.max(0) as u64))
    }

    fn channel(&self) -> String {
        if self.fair { format!("{}:{}", self.names.channel, self.owner) } else { self.names.channel.clone() }
    }
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_millis() as u64)
}

impl Contender for Redisson {
    async fn acquire(&mut self) {
        if self.attempt().await.is_none() {
            return;
        }
        let channel = self.channel();
        self.sink.subscribe(&channel).await.expect("the server answers");
        while let Some(wait) = self.attempt().await {
            // It does not matter which of the two it was.
            let _ = tokio::time::timeout(wait, self.messages.next()).await;
        }
        self.sink.unsubscribe(&channel).await.expect("the server answers");
    }

    async fn release(&mut self) {
        self.released += 1;
        let result = self.names.result(&format!("{}:{}", self.owner, self.released));
        let Names { lock, queue, deadlines, channel } = &self.names;
        let lease_ms = LEASE.as_millis() as u64;
        let mut command = redis::cmd("EVALSHA");
        if self.fair {
            command.arg(&self.give).arg(5).arg(lock).arg(queue).arg(deadlines).arg(channel).arg(&result);
            command.arg(FREED).arg(lease_ms).arg(&self.owner).arg(now_ms()).arg(RESULT_MS);
        } else {
            command.arg(&self.give).arg(3).arg(lock).arg(channel).arg(&result);
            command.arg(FREED).arg(lease_ms).arg(&self.owner).arg(RESULT_MS);
        }
        let released: Option<i64> = command.query_async(&mut self.conn).await.expect("the server answers");
        assert_eq!(released, Some(1), "it held the lock");
        // Redisson does not wait for this one.
        let mut conn = self.conn.clone();
        tokio::spawn(async move { redis::cmd("DEL").arg(result).query_async::<u64>(&mut conn).await });
    }
}
