//! Whether replicas have a grant: what `acknowledged_by` asks.
//!
//! WAIT answers for the last write of the connection that it is sent on, and holds up everything behind it. So it never goes over the
//! commands link, where renewals would stand behind it, but over a connection of its own, right behind a renewal of the hold: that is a
//! write later than the grant, whichever connection the grant came about on (a handoff comes about on another client's). A replica
//! receives writes in order; one that has the renewal has the grant.
//!
//! Each acquisition that waits has a connection to itself, or they would wait for each other. A few are kept for the next.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Pipeline, RedisError, Value};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use crate::clock::millis;
use crate::dialer::Dialer;
use crate::engine::Engine;
use crate::error::{AcquireError, HoldError, LossReason, ServerError};
use crate::guard;
use crate::hold::Hold;
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
    connection: MultiplexedConnection,
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

    /// Ends when enough replicas have the grant of this hold; fails when the time is over.
    pub(crate) async fn acknowledge(
        &self,
        engine: &Arc<Engine>,
        hold: &Arc<Hold>,
        asked: Acknowledgement,
    ) -> Result<(), AcquireError> {
        let lost = |reason| AcquireError::Lost { key: hold.name.key.to_vec(), reason };
        let _room = self.room.acquire().await; // never closed
        let (Some(lease), token) = (hold.keeping.lease_at(engine.clock.now()), hold.sure_token()) else {
            return Err(lost(LossReason::MaxHold));
        };
        let mut requests = wire::pipeline([wire::renewal(&hold.name, lease, token)]);
        requests.cmd("WAIT").arg(asked.replicas).arg(millis(asked.within).as_ms());
        let replies =
            self.send(&requests, asked.within).await.map_err(|error| AcquireError::Unavailable(error.into()))?;
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
        if acknowledged < asked.replicas {
            return Err(AcquireError::NotDurable { acknowledged, wanted: asked.replicas });
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
    async fn send(&self, requests: &Pipeline, within: Duration) -> Result<Replies, RedisError> {
        while let Some(connection) = self.take_idle() {
            match self.send_over(connection, requests, within).await {
                Err(error) if !error.is_timeout() => {} // closed while it was idle
                outcome => return outcome,
            }
        }
        let config = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
        let connection = timeout(self.connect_timeout, self.dialer.open(config)).await.map_err(|_| no_answer())??;
        self.send_over(connection, requests, within).await
    }

    async fn send_over(
        &self,
        mut connection: MultiplexedConnection,
        requests: &Pipeline,
        within: Duration,
    ) -> Result<Replies, RedisError> {
        let replies = connection.send_packed_commands(requests, 0, 2);
        let mut replies = timeout(within + self.response_timeout, replies).await.map_err(|_| no_answer())??.into_iter();
        let (Some(renewal), Some(acknowledged)) = (replies.next(), replies.next()) else {
            return Err(no_answer());
        };
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < IDLE_MAX {
            idle.push(Idle { connection, since: Instant::now() });
        }
        Ok(Replies { renewal, acknowledged })
    }

    /// The connection that was used last.
    fn take_idle(&self) -> Option<MultiplexedConnection> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|idle| idle.since.elapsed() < IDLE_FOR);
        idle.pop().map(|idle| idle.connection)
    }
}

fn server_error(error: &redis::ServerError) -> ServerError {
    ServerError::new(error.code(), error.details().unwrap_or_default())
}

fn no_answer() -> RedisError {
    std::io::Error::new(std::io::ErrorKind::TimedOut, "no answer in time").into()
}
