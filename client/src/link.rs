//! One connection that is always being kept up: it is watched, given up when it is dead or silent, and made anew.
//!
//! A client has two to each server that it needs. Commands go over one, messages come over the other: a subscription's confirmations on a
//! connection that also carries commands could be taken for replies, and then every later reply would go to the wrong caller.
//!
//! A connection is given up when it breaks, when a reply cannot be one, and after [`LinkConfig::timeouts_max`] *sequential* timeouts:
//! a command counts only if it was sent after the timeout counted before, so a wave of commands that time out together counts once.
//! A heartbeat finds a silent connection though nobody uses it; while it is used, its answers are as good. Commands in flight then fail
//! and are *not* sent again here: whoever sent them knows whether that is safe. Each new connection has a higher *epoch*: who waits for
//! a message asks again when it rises, and what is held is asked after. For what was published in between is lost, and the server may be
//! another, or have begun anew.
//!
//! What was sent over a connection that is given up may still be on its way: the server would carry it out after what is sent over the
//! next one. So the next one begins by killing its predecessor: then the server reads nothing more from it. It is named by number *and*
//! address as the server sees them, so that after a restart of the server, which counts from 1 again, nobody else is hit. A user that
//! may not do that, or comes over a Unix socket, falls back on the claim, which bounds what a late request costs.
//!
//! Delays between attempts are random below a doubling, bounded ceiling: many clients cut off together do not return together.

use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use flock_core::Time;
use flock_core::wire::error::ErrorCode;
use redis::{AsyncConnectionConfig, Cmd, ErrorKind, Pipeline, PushInfo, PushKind, RedisError, Value};
use tokio::sync::{broadcast, watch};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::clock::Clock;
use crate::dialer::{Destination, Dialer};
use crate::error::{AcquireError, ConnectError, HoldError, ServerError, Source};
use crate::event::Event;
use crate::in_place::leave_the_caller;
use crate::jitter::{Backoff, Jitter};
use crate::line::Line;
use crate::mutex::lock;
use crate::nodes::NodeKit;
use crate::observe;

/// Requests that may wait for the socket; more make their senders wait.
const BUFFERED_MAX: usize = 4096;
const RECONNECT_DELAY_FIRST: Duration = Duration::from_millis(20);
/// The next connection after one that has lived for so long is made as soon as the first.
const STABLE_AFTER: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkConfig {
    pub(crate) connect_timeout: Duration,
    pub(crate) response_timeout: Duration,
    pub(crate) heartbeat: Duration,
    pub(crate) timeouts_max: u32,
    pub(crate) reconnect_delay_max: Duration,
}

/// Takes a message, in the read loop: it must not block.
pub(crate) type Hear = Box<dyn Fn(&[u8]) + Send + Sync>;

/// Takes the name of a shard channel, and whether it is subscribed to; in the read loop.
pub(crate) type HearOfSubscription = Box<dyn Fn(&[u8], bool) + Send + Sync>;

/// What a link is for.
pub(crate) enum Purpose {
    Commands,
    /// Hears what is published on `channel`.
    Messages {
        channel: Arc<str>,
        hear: Hear,
    },
    /// Hears what is published on the shard channels that are subscribed to over it; and which those are: the node may end a subscription
    /// by itself.
    Shards {
        hear: Hear,
        subscription: HearOfSubscription,
    },
}

/// What has gone wrong below. The `redis` crate says what it has from below itself, and names it as its source too: here that is said
/// once.
#[derive(Debug)]
pub(crate) struct Cause(Arc<RedisError>);

impl Cause {
    pub(crate) fn of(error: impl Into<Arc<RedisError>>) -> Source {
        Box::new(Self(error.into()))
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Cause {}

/// Why a call has no answer.
#[derive(Debug)]
pub(crate) enum CallError {
    /// There was no connection: nothing was sent.
    NotSent(Source),
    /// It was sent, or perhaps was; what became of it is unknown.
    Unanswered(Source),
    /// The server answered with an error: nothing was done.
    Server(ServerError),
}

impl CallError {
    /// Whether the same request may have an answer a moment later.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Self::NotSent(_) | Self::Unanswered(_) => true,
            Self::Server(error) => error.is_retryable(),
        }
    }

    pub(crate) fn into_source(self) -> Source {
        match self {
            Self::NotSent(source) | Self::Unanswered(source) => source,
            Self::Server(error) => error.into(),
        }
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotSent(source) | Self::Unanswered(source) => source.fmt(f),
            Self::Server(error) => error.fmt(f),
        }
    }
}

impl From<CallError> for AcquireError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Server(error) => Self::Server(error),
            CallError::NotSent(source) | CallError::Unanswered(source) => Self::Unavailable(source),
        }
    }
}

impl From<CallError> for HoldError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Server(error) if !error.is_retryable() => Self::Server(error),
            error => Self::Unknown(error.into_source()),
        }
    }
}

/// A reply, and when its request was sent: not earlier than that.
#[derive(Clone, Debug)]
pub(crate) struct Answer<T> {
    pub(crate) reply: T,
    pub(crate) sent: Time,
    /// Of the connection it came over.
    pub(crate) pulse: Arc<Pulse>,
}

/// When a connection was certainly alive: the sending of the last request that was answered, or the arrival of a message. It stands
/// still once the connection is gone.
#[derive(Debug, Default)]
pub(crate) struct Pulse(AtomicU64);

impl Pulse {
    pub(crate) fn beat(&self, sent: Time) {
        self.0.fetch_max(sent.as_us(), Ordering::AcqRel);
    }

    pub(crate) fn last(&self) -> Time {
        Time::from_us(self.0.load(Ordering::Acquire))
    }
}

/// A connection that is up, or was a moment ago.
pub(crate) struct Up {
    epoch: u64,
    line: Line,
    destination: Destination,
    pulse: Arc<Pulse>,
}

impl Up {
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }
}

/// The timeouts of the newest connection.
#[derive(Debug, Default)]
struct Health {
    /// How many in a row.
    timeouts: AtomicU32,
    /// When the last counted one was noticed: what was sent before that belongs to the same wave.
    counted: Mutex<Option<Time>>,
}

impl Health {
    fn reset(&self) {
        self.answered();
        *lock(&self.counted) = None;
    }

    fn answered(&self) {
        if self.timeouts.load(Ordering::Acquire) > 0 {
            self.timeouts.store(0, Ordering::Release);
        }
    }

    /// Counts one, and says how many there are in a row.
    fn timed_out(&self, sent: Time, now: Time) -> u32 {
        let mut counted = lock(&self.counted);
        if counted.is_none_or(|counted| sent >= counted) {
            *counted = Some(now);
            self.timeouts.fetch_add(1, Ordering::AcqRel);
        }
        self.timeouts.load(Ordering::Acquire)
    }
}

pub(crate) struct Link {
    config: LinkConfig,
    dialer: Dialer,
    purpose: Purpose,
    clock: Clock,
    jitter: Arc<Jitter>,
    events: broadcast::Sender<Event>,
    /// Tells that there is a new connection.
    anew: watch::Sender<()>,
    up: watch::Sender<Option<Arc<Up>>>,
    /// The highest epoch that is to be given up.
    condemned: watch::Sender<u64>,
    /// The number of the last attempt, to whichever node: each has its own, so that the end of one that failed is not taken for that of
    /// the next, nor a node's connection for that of the node before.
    attempts: Arc<AtomicU64>,
    /// The number of the newest connection that came about.
    epoch: AtomicU64,
    health: Health,
    /// Why the last attempt failed.
    trouble: Mutex<Option<Arc<RedisError>>>,
    /// The last connection, as the server sees it.
    predecessor: Mutex<Option<Identity>>,
}

/// A connection as the server names it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Identity {
    id: String,
    /// Never of a Unix socket: the server has one address for all its connections, so that it would tell nobody apart.
    address: SocketAddr,
}

impl Identity {
    /// Reads what CLIENT INFO answers.
    fn parse(reply: &Value) -> Option<Self> {
        let text = match reply {
            Value::BulkString(text) => str::from_utf8(text).ok()?,
            Value::VerbatimString { text, .. } => text,
            _ => return None,
        };
        let field = |name| text.split_whitespace().find_map(|field| field.strip_prefix(name));
        Some(Self { id: field("id=")?.to_owned(), address: field("addr=")?.parse().ok()? })
    }
}

/// Takes a link's connection away when it is dropped: nobody watches over that any more.
struct Down<'a>(&'a Link);

impl Drop for Down<'_> {
    fn drop(&mut self) {
        self.0.up.send_replace(None);
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("name", &self.name()).field("epoch", &self.epoch()).finish_non_exhaustive()
    }
}

impl Link {
    pub(crate) fn new(kit: &NodeKit, dialer: Dialer, purpose: Purpose) -> Arc<Self> {
        Arc::new(Self {
            config: kit.config,
            dialer,
            purpose,
            clock: kit.clock.clone(),
            jitter: Arc::clone(&kit.jitter),
            events: kit.events.clone(),
            anew: kit.anew.clone(),
            up: watch::Sender::new(None),
            condemned: watch::Sender::new(0),
            attempts: Arc::clone(&kit.attempts),
            epoch: AtomicU64::new(0),
            health: Health::default(),
            trouble: Mutex::default(),
            predecessor: Mutex::default(),
        })
    }

    /// The number of the newest connection, up or not.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Ends when there is a working connection that is not the one with this number: which may have been another node's.
    pub(crate) async fn other_than(&self, epoch: u64) {
        let mut up = self.up.subscribe();
        // The sender is `self.up`: it lives as long as this borrow.
        let _ = up.wait_for(|up| up.as_ref().is_some_and(|up| up.epoch != epoch)).await;
    }

    /// Ends when the link is up; fails with the last trouble when it is not by `until`, and at once if the server refuses us.
    pub(crate) async fn first_up(&self, until: Instant) -> Result<(), ConnectError> {
        let refused = async {
            loop {
                if let Some(error) = self.refusal() {
                    return error;
                }
                sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! {
            up = self.up_by(until) => match up {
                Ok(_) => Ok(()),
                Err(CallError::NotSent(source) | CallError::Unanswered(source)) => Err(ConnectError::Unavailable(source)),
                Err(CallError::Server(error)) => Err(ConnectError::Server(error)),
            },
            error = refused => Err(error),
        }
    }

    /// The connection; waits for one if there is none, for as long as a reply may take: on the client's thread.
    pub(crate) async fn up(&self) -> Result<Arc<Up>, CallError> {
        match self.up_now() {
            Some(up) => Ok(up),
            None => Box::pin(self.up_by(Instant::now() + self.config.response_timeout)).await,
        }
    }

    /// The connection, if there is one.
    pub(crate) fn up_now(&self) -> Option<Arc<Up>> {
        self.up.borrow().clone()
    }

    /// How long an answer may take.
    pub(crate) fn response_timeout(&self) -> Duration {
        self.config.response_timeout
    }

    /// Sends a command, as soon as there is a connection.
    pub(crate) async fn call<T>(
        &self,
        cmd: &Cmd,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Answer<T>, CallError> {
        self.call_over(&*self.up().await?, cmd, read).await
    }

    /// Sends a command over this connection.
    pub(crate) async fn call_over<T>(
        &self,
        up: &Up,
        cmd: &Cmd,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Answer<T>, CallError> {
        let sent = self.clock.now();
        let outcome = timeout(self.config.response_timeout, up.line.send(cmd)).await;
        let reply = self.judge(up, sent, outcome)?;
        let reply = self.read(up.epoch, &reply, read)?;
        Ok(Answer { reply, sent, pulse: Arc::clone(&up.pulse) })
    }

    /// Sends commands in one go; the replies are judged one by one, by their positions.
    pub(crate) async fn call_all<T>(
        &self,
        pipeline: &Pipeline,
        count: usize,
        read: impl Fn(usize, &Value) -> Option<T>,
    ) -> Result<Answer<Vec<Result<T, CallError>>>, CallError> {
        let up = self.up().await?;
        let sent = self.clock.now();
        let outcome = timeout(self.config.response_timeout, up.line.send_all(pipeline, count)).await;
        let replies = self.judge(&up, sent, outcome)?;
        let each = |(position, reply)| self.read(up.epoch, reply, |reply| read(position, reply));
        let reply = replies.iter().enumerate().map(each).collect();
        Ok(Answer { reply, sent, pulse: Arc::clone(&up.pulse) })
    }

    /// Keeps the link up until this is dropped; runs on the client's thread.
    pub(crate) async fn keep_up(self: Arc<Self>) {
        let _down_at_last = Down(&self);
        let mut backoff = Backoff::new(RECONNECT_DELAY_FIRST, self.config.reconnect_delay_max);
        loop {
            let epoch = self.attempts.fetch_add(1, Ordering::Relaxed) + 1;
            let begun = self.clock.now();
            let pulse = Arc::new(Pulse::default());
            let attempt = timeout(self.config.connect_timeout, self.connect(epoch, &pulse)).await;
            match attempt.unwrap_or_else(|_| Err(timed_out("connecting timed out"))) {
                Ok((line, destination)) => {
                    let connected = Instant::now();
                    *lock(&self.trouble) = None;
                    self.epoch.store(epoch, Ordering::Release);
                    self.health.reset();
                    pulse.beat(begun);
                    let up = Arc::new(Up { epoch, line, destination, pulse });
                    self.up.send_replace(Some(Arc::clone(&up)));
                    self.anew.send_replace(());
                    observe::connected(self.name(), epoch);
                    let _ = self.events.send(Event::Connected { link: self.name() });
                    self.watch_over(&up).await;
                    self.up.send_replace(None);
                    self.dialer.doubt();
                    tracing::warn!(link = self.name(), epoch, "connection given up");
                    let _ = self.events.send(Event::Disconnected { link: self.name() });
                    // One that is closed again as soon as it is made is as bad as none.
                    if connected.elapsed() >= STABLE_AFTER {
                        backoff.reset();
                    }
                }
                Err(error) => {
                    tracing::debug!(link = self.name(), %error, "cannot connect");
                    self.dialer.doubt();
                    *lock(&self.trouble) = Some(Arc::new(error));
                }
            }
            sleep(backoff.next(&self.jitter)).await;
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        match self.purpose {
            Purpose::Commands => "commands",
            Purpose::Messages { .. } | Purpose::Shards { .. } => "messages",
        }
    }

    async fn connect(self: &Arc<Self>, epoch: u64, pulse: &Arc<Pulse>) -> Result<(Line, Destination), RedisError> {
        let (link, pulse) = (Arc::downgrade(self), Arc::clone(pulse));
        let hear = move |push: PushInfo| {
            if let Some(link) = link.upgrade() {
                link.hear(epoch, &pulse, &push);
            }
            Ok::<_, redis::aio::SendError>(())
        };
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None) // both are ours
            .set_response_timeout(None)
            .set_pipeline_buffer_size(BUFFERED_MAX)
            .set_push_sender(hear);
        let (line, destination) = self.dialer.open(config).await?;
        self.replace_predecessor(&line).await?;
        if let Purpose::Messages { channel, .. } = &self.purpose {
            line.subscribe(channel).await?;
        }
        Ok((line, destination))
    }

    /// Ends the last connection at the server, if this user may, and becomes the last one.
    async fn replace_predecessor(&self, line: &Line) -> Result<(), RedisError> {
        let predecessor = lock(&self.predecessor).clone();
        let mut requests = redis::pipe();
        requests.ignore_errors();
        requests.cmd("CLIENT").arg("INFO");
        if let Some(last) = &predecessor {
            requests.cmd("CLIENT").arg("KILL").arg("ID").arg(&last.id).arg("ADDR").arg(last.address.to_string());
        }
        let count = 1 + usize::from(predecessor.is_some());
        let replies = line.send_all(&requests, count).await?;
        *lock(&self.predecessor) = replies.first().and_then(Identity::parse);
        Ok(())
    }

    /// Runs in the connection's read loop.
    fn hear(&self, epoch: u64, pulse: &Pulse, push: &PushInfo) {
        match (&push.kind, &self.purpose) {
            (PushKind::Message, Purpose::Messages { hear, .. })
            | (PushKind::SMessage, Purpose::Shards { hear, .. }) => {
                pulse.beat(self.clock.now());
                // What an older connection still delivers counts as well: each message is about one owner and one token.
                if let Some(Value::BulkString(message)) = push.data.get(1) {
                    hear(message);
                }
            }
            (PushKind::Subscribe, Purpose::Messages { .. }) => {}
            (PushKind::SSubscribe | PushKind::SUnsubscribe, Purpose::Shards { subscription, .. }) => {
                if let Some(Value::BulkString(channel)) = push.data.first() {
                    subscription(channel, push.kind == PushKind::SSubscribe);
                }
            }
            // The end of the connection, of the subscription, or something that has no business here.
            _ => self.condemn(epoch),
        }
    }

    /// Ends when the connection is condemned, or leads to a server that has a successor; asks it now and then whether it is there.
    async fn watch_over(&self, up: &Up) {
        let epoch = up.epoch;
        let mut condemned = self.condemned.subscribe();
        let beat = async {
            let ping = redis::cmd("PING");
            let (mut silent, mut asked) = (false, self.clock.now());
            loop {
                if !silent {
                    self.until_quiet(up, asked).await;
                }
                asked = self.clock.now();
                let outcome = timeout(self.config.response_timeout, up.line.send(&ping)).await;
                // After a timeout it is asked again at once. An error reply is a sign of life, and a broken link is condemned now.
                silent = outcome.is_err();
                let _ = self.judge(up, asked, outcome);
            }
        };
        tokio::select! {
            _ = condemned.wait_for(|condemned| *condemned >= epoch) => {}
            () = self.dialer.moved(&up.destination) => {}
            () = beat => {}
        }
    }

    /// Ends when nothing has been heard over this connection for about a heartbeat, and it was not asked: as long as something is heard,
    /// nobody need ask.
    async fn until_quiet(&self, up: &Up, asked: Time) {
        let heartbeat = self.jitter.around(self.config.heartbeat);
        loop {
            let since = up.pulse.last().max(asked);
            let quiet_for = Duration::from_micros(self.clock.now().us_since(since));
            match heartbeat.checked_sub(quiet_for) {
                Some(left) if !left.is_zero() => sleep(left).await,
                _ => return,
            }
        }
    }

    async fn up_by(&self, until: Instant) -> Result<Arc<Up>, CallError> {
        if let Some(up) = self.up_now() {
            return Ok(up);
        }
        leave_the_caller().await;
        let mut up = self.up.subscribe();
        match timeout_at(until, up.wait_for(Option::is_some)).await {
            Ok(Ok(up)) if up.is_some() => up.clone().ok_or_else(|| self.not_sent()),
            _ => Err(self.not_sent()),
        }
    }

    fn not_sent(&self) -> CallError {
        self.dialer.doubt();
        let trouble = lock(&self.trouble).clone();
        CallError::NotSent(Cause::of(trouble.unwrap_or_else(|| timed_out("no connection").into())))
    }

    /// Why there is no connection, if that was the last trouble and will be so again.
    fn refusal(&self) -> Option<ConnectError> {
        refusal(&lock(&self.trouble).clone()?)
    }

    fn judge<T>(
        &self,
        up: &Up,
        sent: Time,
        outcome: Result<Result<T, RedisError>, tokio::time::error::Elapsed>,
    ) -> Result<T, CallError> {
        match outcome {
            Ok(Ok(reply)) => {
                self.health.answered();
                up.pulse.beat(sent);
                Ok(reply)
            }
            Ok(Err(error)) => match server_error(&error) {
                Some(error) => Err(self.refused(up.epoch, error)),
                None => {
                    self.condemn(up.epoch);
                    Err(CallError::Unanswered(Cause::of(error)))
                }
            },
            Err(_) => {
                self.count_timeout(up.epoch, sent);
                Err(CallError::Unanswered(Cause::of(timed_out("no answer in time"))))
            }
        }
    }

    fn read<T>(&self, epoch: u64, reply: &Value, read: impl FnOnce(&Value) -> Option<T>) -> Result<T, CallError> {
        if let Value::ServerError(error) = reply {
            let message = error.details().unwrap_or_default();
            return Err(self.refused(epoch, ServerError::new(error.code(), message)));
        }
        read(reply).ok_or_else(|| {
            tracing::warn!(link = self.name(), epoch, "a reply that cannot be one: the connection is out of step");
            self.condemn(epoch);
            CallError::Unanswered(Cause::of(timed_out("a reply that cannot be one")))
        })
    }

    /// The server answered with an error. One that is no primary any more is left, if there is a way to its successor.
    fn refused(&self, epoch: u64, error: ServerError) -> CallError {
        self.dialer.learn_from(&error);
        if error.known() == Some(ErrorCode::ReadOnly) && self.dialer.finds_successors() {
            self.condemn(epoch);
        }
        CallError::Server(error)
    }

    fn count_timeout(&self, epoch: u64, sent: Time) {
        self.dialer.doubt();
        if epoch < self.epoch() {
            return; // it says nothing about the connection that there is now
        }
        if self.health.timed_out(sent, self.clock.now()) >= self.config.timeouts_max {
            self.condemn(epoch);
        }
    }

    fn condemn(&self, epoch: u64) {
        self.condemned.send_if_modified(|condemned| {
            let news = *condemned < epoch;
            *condemned = (*condemned).max(epoch);
            news
        });
    }
}

/// What that trouble is, if it will be so again.
pub(crate) fn refusal(trouble: &Arc<RedisError>) -> Option<ConnectError> {
    #[cfg(feature = "tls")]
    if crate::tls::is_distrust(trouble) {
        return Some(ConnectError::Tls(Cause::of(Arc::clone(trouble))));
    }
    if trouble.kind() == ErrorKind::MasterNameNotFoundBySentinel {
        return Some(ConnectError::Config(trouble.detail().unwrap_or_default().to_owned().into()));
    }
    server_error(trouble).filter(|error| !error.is_retryable()).map(ConnectError::Server)
}

pub(crate) fn timed_out(what: &'static str) -> RedisError {
    std::io::Error::new(std::io::ErrorKind::TimedOut, what).into()
}

fn server_error(error: &RedisError) -> Option<ServerError> {
    let detail = || error.detail().unwrap_or_default();
    match error.kind() {
        ErrorKind::AuthenticationFailed => Some(ServerError::new(ErrorCode::WrongPass.code(), detail())),
        ErrorKind::InvalidClientConfig => Some(ServerError::new(ErrorCode::Err.code(), detail())),
        _ => error.code().map(|code| ServerError::new(code, detail())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "testing")]
    #[tokio::test(start_paused = true)]
    async fn trouble_of_an_older_connection_is_none_of_the_newer_ones() {
        // Timeouts, broken pipes and nonsense that are noticed late must not end the connection that has replaced theirs.
        let server = crate::testing::Server::new();
        let flock = server.client().await;
        let node = flock.engine().node(b"k");
        let link = &node.commands;
        let old = link.epoch();
        server.cut_connections();
        link.other_than(old).await;
        let new = link.epoch();
        for _ in 0..10 {
            link.count_timeout(old, link.clock.now());
            sleep(Duration::from_millis(1)).await;
        }
        link.condemn(old);
        sleep(Duration::from_secs(5)).await;
        assert_eq!(link.epoch(), new, "the connection was replaced");
        link.condemn(new);
        link.other_than(new).await; // that is what would have happened
    }

    #[cfg(feature = "testing")]
    #[tokio::test(start_paused = true)]
    async fn connection_in_use_is_not_asked_whether_it_is_there() {
        let server = crate::testing::Server::new();
        let flock = server.builder().without_pubsub().connect().await.unwrap();
        let (node, heartbeat) = (flock.engine().node(b"k"), Duration::from_secs(1));
        let link = &node.commands;
        let pulse = || link.up_now().map(|up| up.pulse.last());
        for _ in 0..50 {
            sleep(heartbeat / 5).await;
            let before = pulse();
            let _ = flock.lock("k").await.unwrap().release().await.unwrap();
            assert_ne!(pulse(), before, "the answer counts as a sign of life");
            let after = pulse();
            sleep(heartbeat / 5).await;
            assert_eq!(pulse(), after, "it was asked though it had just answered");
        }
        let before = pulse();
        sleep(2 * heartbeat).await;
        assert_ne!(pulse(), before, "nobody has asked a quiet connection");
    }

    #[test]
    fn identity_is_read_from_what_the_server_says() {
        let reply = Value::BulkString(b"id=7 addr=127.0.0.1:5 laddr=127.0.0.1:6379 fd=8 name= sub=0".to_vec());
        let identity = Identity { id: "7".into(), address: SocketAddr::from(([127, 0, 0, 1], 5)) };
        assert_eq!(Identity::parse(&reply), Some(identity));
        assert_eq!(Identity::parse(&Value::Okay), None);
        assert_eq!(Identity::parse(&Value::BulkString(b"name=x".to_vec())), None);
        assert_eq!(Identity::parse(&Value::BulkString(b"id=7 addr=/run/valkey.sock:0 name=".to_vec())), None);
        let reply = Value::BulkString(b"id=7 addr=[::1]:5 name=".to_vec());
        assert_eq!(Identity::parse(&reply).map(|it| it.address.to_string()).as_deref(), Some("[::1]:5"));
    }
}
