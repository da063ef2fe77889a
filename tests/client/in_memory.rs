//! The server in memory answers as the real one: one story is told to both, and what the client sees must be the same.

use std::num::NonZeroU32;
use std::time::Duration;

use flock_client::testing;
use flock_client::{AcquireError, Flock, Guard, LockInfo, Token};
use flock_tests::on_own_servers;
use flock_tests::server::Builder;
use tokio::time::{sleep, timeout};

use crate::scene::{SOON, connect, ms, within_bounds};

/// Longer than the story takes.
const HALF: Duration = Duration::from_secs(50);

on_own_servers![server_in_memory_answers_as_the_real_one];

fn server_in_memory_answers_as_the_real_one(builder: Builder) {
    let server = builder.start();
    within_bounds(async {
        let real = story(&connect(server.addr()).await, &connect(server.addr()).await).await;
        let in_memory = testing::Server::new();
        let imitated = story(&in_memory.client().await, &in_memory.client().await).await;
        for (real, imitated) in real.iter().zip(&imitated) {
            assert_eq!(real, imitated);
        }
        assert_eq!(real.len(), imitated.len());
    });
}

/// What happens, without what is never the same twice: tokens are told by their order, owners not at all, times roughly.
#[derive(Default)]
struct Told {
    lines: Vec<String>,
    tokens: Vec<Token>,
}

impl Told {
    fn tell(&mut self, what: &str, outcome: impl std::fmt::Debug) {
        self.lines.push(format!("{what}: {outcome:?}"));
    }

    /// Which grant this is.
    fn number(&mut self, token: Token) -> usize {
        if !self.tokens.contains(&token) {
            assert!(self.tokens.iter().all(|earlier| *earlier < token), "tokens rise");
            self.tokens.push(token);
        }
        self.tokens.iter().position(|known| *known == token).unwrap_or_default()
    }

    fn guard(&mut self, what: &str, guard: &Guard) {
        let number = self.number(guard.token());
        self.tell(what, (number, guard.key().escape_ascii().to_string(), guard.is_valid()));
    }

    fn refused<T>(&mut self, what: &str, outcome: Result<T, AcquireError>) {
        self.tell(what, outcome.map(|_| "granted").map_err(|error| error.to_string()));
    }

    fn info(&mut self, what: &str, info: Option<LockInfo>) {
        let roughly = |duration: Duration| if duration > HALF { "much" } else { "little" };
        let told = info.map(|info| {
            let holders = info.holders.iter().map(|holder| {
                let times = (holder.lease, roughly(holder.remaining), roughly(holder.held_for));
                (self.number(holder.token), holder.state, times, holder.label.clone(), holder.ids.clone())
            });
            let holders: Vec<_> = holders.collect();
            let waiters = info
                .waiters
                .iter()
                .map(|waiting| (waiting.mode, waiting.position, roughly(waiting.waiting_for), waiting.label.clone()));
            let counts = (info.mode, info.holder_count, info.waiter_count, info.grace_left);
            (counts, holders, waiters.collect::<Vec<_>>())
        });
        self.tell(what, told);
    }
}

async fn until_waiting(flock: &Flock, requests: u64) {
    while flock.info("k", 0).await.unwrap().is_none_or(|info| info.waiter_count != requests) {
        sleep(ms(1)).await;
    }
}

async fn story(alice: &Flock, bob: &Flock) -> Vec<String> {
    let mut told = Told::default();

    let mut guard = alice.lock("k").lease(2 * HALF).label("first").await.unwrap();
    guard.renew().await.unwrap(); // a claim until then
    told.guard("exclusive", &guard);
    told.tell("tried by another", bob.lock("k").try_acquire().await.unwrap().is_some());
    told.refused("waited for too long", bob.lock("k").wait(ms(30)).await);
    until_waiting(alice, 0).await;
    told.info("held", bob.info("k", 10).await.unwrap());

    let reader = bob.lock("k").shared().label("reader").wait(SOON);
    let reader = tokio::spawn(async move { reader.await.unwrap() });
    until_waiting(alice, 1).await;
    told.info("waited for", bob.info("k", 10).await.unwrap());
    told.info("waited for, counted only", bob.info("k", 0).await.unwrap());
    guard.downgrade().await.unwrap();
    let reader = reader.await.unwrap();
    reader.renew().await.unwrap();
    told.guard("reader beside the former writer", &reader);
    told.info("shared", bob.info("k", 10).await.unwrap());
    told.tell("upgrade beside a reader", guard.upgrade().await.map_err(|error| error.to_string()));
    told.tell("release", reader.release().await.unwrap());
    told.tell("upgrade", guard.upgrade().await.is_ok());
    told.guard("upgraded", &guard);
    told.tell("revoked", bob.revoke("k").await.unwrap());
    told.tell("lost", timeout(SOON, guard.lost()).await.unwrap().unwrap());
    told.tell("released when lost", guard.release().await.unwrap());
    told.info("free", alice.info("k", 10).await.unwrap());

    let two = NonZeroU32::new(2).unwrap();
    let permits = [alice.lock("s").limit(two).await.unwrap(), bob.lock("s").limit(two).await.unwrap()];
    told.tell("third of two", alice.lock("s").limit(two).try_acquire().await.unwrap().is_some());
    drop(permits);

    let outer = alice.lock("r").reentrant("job").await.unwrap();
    let inner = bob.lock("r").reentrant("job").await.unwrap();
    told.tell("the same hold", outer.token() == inner.token());
    told.tell("inner release", inner.release().await.unwrap());
    told.tell("still held", outer.is_valid());
    told.tell("outer release", outer.release().await.unwrap());

    told.refused("lease beyond the limit", alice.lock("k").lease(Duration::from_secs(1_000_000)).await);
    let far = Token::new(9_000_000_000_000_000).unwrap();
    let floor = alice.lock("k").floor(far).await.err().map(|error| error.is_retryable());
    told.tell("floor beyond the clock", floor);

    let expiring = alice.lock("e").lease(ms(100)).keep_alive(false).await.unwrap();
    told.tell("expired", timeout(SOON, expiring.lost()).await.unwrap().unwrap());
    let many: Vec<Guard> = {
        let mut guards = Vec::new();
        for number in 0..25 {
            guards.push(alice.lock(format!("many:{number}")).await.unwrap());
        }
        guards
    };
    let mut listed = bob.list("many:1*").page_size(7).all().await.unwrap();
    listed.sort_by(|one, other| one.key.cmp(&other.key));
    for lock in listed {
        let left = lock.remaining > ms(1000);
        told.tell(
            "listed",
            (lock.key.escape_ascii().to_string(), lock.mode, lock.holder_count, lock.waiter_count, left),
        );
    }
    drop(many);
    told.lines
}
