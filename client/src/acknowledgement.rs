//! Whether replicas have a grant: what `acknowledged_by` asks.
//!
//! WAIT answers for the last write of the connection that it is sent on, and holds up everything behind it. So it never goes over the
//! commands link, where renewals would stand behind it, but over a connection of its own, right behind a renewal of the hold: that is a
//! write later than the grant, whichever connection the grant came about on (a handoff comes about on another client's). A replica
//! receives writes in order; one that has the renewal has the grant.
//!
//! Each acquisition that waits has a connection to itself, or they would wait for each other. A few are kept for the next.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::{AsyncConnectionConfig, Pipeline, RedisError, Value};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use crate::clock::millis;
use crate::dialer::{Destination, Dialer};
use crate::engine::Engine;
use crate::error::{AcquireError, HoldError, LossReason, ServerError};
use crate::guard;
use crate::hold::Hold;
use crate::line::Line;
use crate::link::Cause;
use crate::mutex::lock;
use crate::wire;

/// Connections of one client that wait for replicas at the same time.
const CONNECTIONS_MAX: usize = 64;
/// Connections that are kept for the next, and for how long: an older one may be dead without our knowing.
const IDLE_MAX: usize = 8;
const IDLE_FOR: Duration = Duration::from_secs(10);

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Acknowledgement {
    pub(crate) replicas: u32,
    pub(crate) within: Duration,
}

struct Idle {
    line: Line,
    destination: Destination,
    since: Instant,
}

pub(crate) struct Replicas {
    dialer: Dialer,
    connect_timeout: Duration,
    response_timeout: Duration,
    idle: Mutex<Vec<Idle>>,
    room: Semaphore,
}

impl std::fmt::Debug for Replicas {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replicas").field("room", &self.room).finish_non_exhaustive()
    }
}

/// The replies to the two requests.
struct Replies {
    renewal: Value,
    acknowledged: Value,
}

impl Replicas {
    pub(crate) fn new(dialer: Dialer, connect_timeout: Duration, response_timeout: Duration) -> Self {
        let room = Semaphore::new(CONNECTIONS_MAX);
        Self { dialer, connect_timeout, response_timeout, idle: Mutex::default(), room }
    }

    /// Ends when enough replicas have the grant of this hold; fails when the time is over, whatever it was spent on. Only the server's
    /// answer may come later: by as much as any may take.
    pub(crate) async fn acknowledge(
        &self,
        engine: &Arc<Engine>,
        hold: &Arc<Hold>,
        asked: Acknowledgement,
    ) -> Result<(), AcquireError> {
        let deadline = Instant::now() + asked.within;
        let in_time =
            timeout_at(deadline + self.response_timeout, self.acknowledge_by(deadline, engine, hold, asked.replicas));
        in_time.await.unwrap_or_else(|_| Err(AcquireError::Unavailable(Cause::of(no_answer()))))
    }

    async fn acknowledge_by(
        &self,
        deadline: Instant,
        engine: &Arc<Engine>,
        hold: &Arc<Hold>,
        wanted: u32,
    ) -> Result<(), AcquireError> {
        let lost = |reason| AcquireError::Lost { key: hold.name.key.to_vec(), reason };
        let Ok(_room) = timeout_at(deadline, self.room.acquire()).await else {
            return Err(AcquireError::NotDurable { acknowledged: 0, wanted });
        };
        let (Some(lease), token) = (hold.keeping.lease_at(engine.clock.now()), hold.sure_token()) else {
            return Err(lost(LossReason::MaxHold));
        };
        let requests = || {
            let mut requests = wire::pipeline([wire::renewal(&hold.name, lease, token)]);
            let left = millis(deadline - Instant::now()).as_ms().max(1); // 0 would be for ever
            requests.cmd("WAIT").arg(wanted).arg(left);
            requests
        };
        let replies =
            self.send(requests, deadline).await.map_err(|error| AcquireError::Unavailable(Cause::of(error)))?;
        if let Value::ServerError(error) = &replies.renewal {
            return Err(AcquireError::Server(server_error(error)));
        }
        if wire::renewed(&hold.name, token, &replies.renewal) != Some(true) {
            engine.lose(hold, LossReason::Gone);
            return Err(lost(hold.loss(engine.clock.now()).unwrap_or(LossReason::Gone)));
        }
        let acknowledged = match &replies.acknowledged {
            Value::Int(replicas) => u32::try_from(*replicas).unwrap_or(0),
            Value::ServerError(error) => return Err(AcquireError::Server(server_error(error))),
            _ => 0,
        };
        if acknowledged < wanted {
            return Err(AcquireError::NotDurable { acknowledged, wanted });
        }
        if hold.session.is_some() {
            // The renewal has moved the session to that other connection: back, before anybody relies on it.
            guard::renew(Arc::clone(engine), Arc::clone(hold)).await.map_err(|error| match error {
                HoldError::Lost(reason) => lost(reason),
                HoldError::Server(error) => AcquireError::Server(error),
                HoldError::Unknown(source) => AcquireError::Unavailable(source),
                HoldError::Refused | HoldError::Config(_) => AcquireError::Unavailable(error.into()),
            })?;
        }
        Ok(())
    }

    /// Sends the requests, over a kept connection if there is one that works. One that is merely silent may deliver them yet: they are
    /// not sent again then.
    async fn send(&self, requests: impl Fn() -> Pipeline, deadline: Instant) -> Result<Replies, RedisError> {
        while let Some((line, destination)) = self.take_idle() {
            match self.send_over(line, destination, &requests()).await {
                Err(error) if !error.is_timeout() => {} // closed while it was idle
                outcome => return outcome,
            }
        }
        let config = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
        let open_until = deadline.min(Instant::now() + self.connect_timeout);
        let opening = timeout_at(open_until, self.dialer.open(config));
        let (line, destination) = opening.await.map_err(|_| no_answer())??;
        self.send_over(line, destination, &requests()).await
    }

    async fn send_over(
        &self,
        line: Line,
        destination: Destination,
        requests: &Pipeline,
    ) -> Result<Replies, RedisError> {
        let mut replies = line.send_all(requests, 2).await?.into_iter();
        let (Some(renewal), Some(acknowledged)) = (replies.next(), replies.next()) else {
            return Err(no_answer());
        };
        let mut idle = lock(&self.idle);
        if idle.len() < IDLE_MAX {
            idle.push(Idle { line, destination, since: Instant::now() });
        }
        Ok(Replies { renewal, acknowledged })
    }

    /// The connection that was used last.
    fn take_idle(&self) -> Option<(Line, Destination)> {
        let mut idle = lock(&self.idle);
        idle.retain(|idle| idle.since.elapsed() < IDLE_FOR && self.dialer.is_current(&idle.destination));
        idle.pop().map(|idle| (idle.line, idle.destination))
    }
}

fn server_error(error: &redis::ServerError) -> ServerError {
    ServerError::new(error.code(), error.details().unwrap_or_default())
}

fn no_answer() -> RedisError {
    std::io::Error::new(std::io::ErrorKind::TimedOut, "no answer in time").into()
}
