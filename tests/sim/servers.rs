//! A primary and a replica that lags behind it, promotions, and what a promotion may lose.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use flock_client::testing::{Replicated, Server};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};

use crate::Plant;
use crate::judge::{Judge, KEYS};

/// The wall clocks are about here, microseconds since 1970. They differ, and step.
const WALL_CLOCK_US: u64 = 1_800_000_000_000_000;
pub(crate) const HOUR_US: u64 = 3_600_000_000;

/// The servers as clients and faults see them.
#[derive(Clone, Debug)]
pub(crate) struct Servers(Arc<Mutex<Site>>);

#[derive(Debug)]
struct Site {
    primary: Server,
    /// Follows the primary, unless it is being made anew.
    replica: Option<Server>,
    /// An old primary that does not know yet that it is none any more.
    old: Option<Server>,
    lag: Arc<Mutex<Duration>>,
    replication: Option<AbortHandle>,
    plant: Plant,
}

impl Servers {
    pub(crate) fn start(plant: Plant) -> Servers {
        let lag = Arc::default();
        let site = Site { primary: Server::new(), replica: None, old: None, lag, replication: None, plant };
        let servers = Servers(Arc::new(Mutex::new(site)));
        servers.add_replica();
        servers
    }

    /// The server that a client finds: some find the old primary as long as it is there.
    pub(crate) fn found_by(&self, finds_old: bool) -> Server {
        let site = self.site();
        site.old.clone().filter(|_| finds_old).unwrap_or_else(|| site.primary.clone())
    }

    pub(crate) fn primary(&self) -> Server {
        self.site().primary.clone()
    }

    pub(crate) fn old(&self) -> Option<Server> {
        self.site().old.clone()
    }

    pub(crate) fn replica(&self) -> Option<Server> {
        self.site().replica.clone()
    }

    pub(crate) fn set_lag(&self, lag: Duration) {
        *self.site().lag.lock().unwrap_or_else(PoisonError::into_inner) = lag;
    }

    /// A server begins to follow the primary.
    pub(crate) fn add_replica(&self) {
        let mut site = self.site();
        let (replica, mut changes) = (Server::replica(), site.primary.replicated());
        // It counts as a replica once it has loaded all that there is.
        while let Ok(change) = changes.try_recv() {
            site.plant.lets_pass(&change).then(|| replica.apply(&change));
        }
        let carrying = tokio::spawn(carry(changes, replica.clone(), Arc::clone(&site.lag), site.plant));
        site.replication = Some(carrying.abort_handle());
        site.replica = Some(replica);
    }

    /// Promotes the replica with what it has received so far. The old primary dies, or goes on beside it. False if there is no replica.
    pub(crate) fn promote(&self, beside: bool, clock_ahead_us: i64, judge: &Judge) -> bool {
        let mut site = self.site();
        let Some(new) = site.replica.take() else { return false };
        if let Some(replication) = site.replication.take() {
            replication.abort();
        }
        for key in KEYS {
            // The other way round too: a hold whose end the replica has not heard of goes on there, below what was granted since.
            for token in site.primary.holders(key).into_iter().chain(new.holders(key)) {
                let (known, held) = (new.lease_left(key, token), site.primary.lease_left(key, token));
                if beside || known < held || held.is_none() {
                    judge.may_be_lost(token);
                }
            }
        }
        let wall_clock_us = if site.plant == Plant::PromotionForgetsTheCounter {
            0
        } else {
            WALL_CLOCK_US.saturating_add_signed(clock_ahead_us)
        };
        let floor = new.promote(wall_clock_us);
        judge.promoted(floor);
        let old = std::mem::replace(&mut site.primary, new);
        if beside {
            site.old = Some(old);
        } else {
            old.stop();
        }
        true
    }

    /// The old primary, if there is one beside the new, hears that it is none any more, and its clients lose it.
    pub(crate) fn demote_old(&self, judge: &Judge) {
        judge.excuse_old(self);
        if let Some(old) = self.site().old.take() {
            old.demote();
            old.stop();
        }
    }

    fn site(&self) -> MutexGuard<'_, Site> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Brings each change to the replica, in order, the lag of that moment later.
async fn carry(mut changes: UnboundedReceiver<Replicated>, replica: Server, lag: Arc<Mutex<Duration>>, plant: Plant) {
    let mut under_way: VecDeque<(Instant, Replicated)> = VecDeque::new();
    loop {
        let next = under_way.front().map(|(at, _)| *at);
        tokio::select! {
            biased;
            change = changes.recv() => match change {
                Some(change) if !plant.lets_pass(&change) => {}
                Some(change) => {
                    let lag = *lag.lock().unwrap_or_else(PoisonError::into_inner);
                    under_way.push_back((Instant::now() + lag, change));
                }
                None => return,
            },
            () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {
                if let Some((_, change)) = under_way.pop_front() {
                    replica.apply(&change);
                }
            }
        }
    }
}
