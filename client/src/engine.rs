//! What all parts of a client share, and the thread it runs on.
//!
//! A client has a thread of its own with a small runtime: connections, renewals, waiting and giving back go on though the caller's
//! runtime is busy, blocked, or gone. A guard may be dropped anywhere: on a plain thread, or while the caller's runtime shuts down.
//!
//! The caller's futures only wait for an answer from here. So dropping one, at any point, is seen here, where it is undone.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use flock_core::wire::message::OwnerMessage;
use flock_core::{Release, Time, Token};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, broadcast, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::clock::Clock;
use crate::error::{HoldError, LossReason, Source};
use crate::event::Event;
use crate::hold::{Hold, Name};
use crate::jitter::{Backoff, Jitter};
use crate::keepalive::KeepAlive;
use crate::link::{Answer, CallError};
use crate::nodes::Nodes;
use crate::observe;
use crate::waiters::{Heard, Parties};
use crate::wire;

const RETRY_FIRST: Duration = Duration::from_millis(10);
const RETRY_MOST: Duration = Duration::from_millis(500);
/// What is given back at the same time; more would make the renewals wait when a connection is back.
pub(crate) const ERRANDS_AT_ONCE: usize = 256;
/// When the last handle of a client is gone, its thread stays this long at most for what is still to be given back.
const LINGER: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) name: String,
    pub(crate) clock: Clock,
    pub(crate) jitter: Arc<Jitter>,
    pub(crate) events: broadcast::Sender<Event>,
    pub(crate) nodes: Nodes,
    pub(crate) parties: Parties,
    pub(crate) keepalive: KeepAlive,
    /// How long an operation that does not wait for others may take, with its retries.
    pub(crate) operation_timeout: Duration,
    pub(crate) claim: Duration,
    /// Whether there are links for messages.
    pub(crate) listens: bool,
    /// The shortest grace of a session: the connection's signs of life come about this often. None where there are no sessions.
    pub(crate) grace_min: Option<Duration>,
    pub(crate) runtime: Handle,
    pub(crate) numbers: AtomicU64,
    /// Whether the client is shut down: nothing new is begun.
    pub(crate) closing: watch::Sender<bool>,
    /// How many holds and requests are being given back.
    pub(crate) errands: watch::Sender<usize>,
    /// Whose turn it is to ask for that.
    pub(crate) turns: Semaphore,
}

/// Something to be given back: a hold, or whatever became of a request.
#[derive(Debug)]
pub(crate) struct Errand {
    pub(crate) name: Name,
    pub(crate) token: Option<Token>,
    /// After this the server has ended it by itself.
    pub(crate) until: Time,
}

/// How giving back ended; `Err` if nobody knows.
pub(crate) type GivenBack = Result<bool, HoldError>;

impl Engine {
    pub(crate) fn next_number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// The owner of one acquisition: fresh each time, and ours to recognize.
    pub(crate) fn owner(&self, number: u64) -> Box<[u8]> {
        format!("{}:{number}", self.name).into_bytes().into()
    }

    /// Runs on the client's thread until `stop`; then gives back what is still to be given back.
    pub(crate) async fn run(self: Arc<Self>, mut stop: watch::Receiver<bool>) {
        let mut tasks = JoinSet::new(); // they end with this
        match &self.nodes {
            Nodes::One { node, .. } => {
                tasks.spawn(Arc::clone(&node.commands).keep_up());
                if self.listens {
                    tasks.spawn(Arc::clone(&node.messages).keep_up());
                }
            }
            Nodes::Cluster(cluster) => drop(tasks.spawn(Arc::clone(cluster).run())),
        }
        let keeper = Arc::clone(&self);
        tasks.spawn(async move { keeper.keepalive.run(&keeper).await });
        // An error means that the other end is gone: the same.
        let _ = stop.wait_for(|stop| *stop).await;
        // An acquisition that was dropped last may not know it yet: what waits gives up, and then back what it has.
        self.closing.send_replace(true);
        let _ = timeout(LINGER, async {
            self.parties.nobody_waits().await;
            self.errands_done().await;
        })
        .await;
    }

    /// Runs `work` on the client's thread and hands over its answer. If the caller stops waiting, the work is dropped.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, ThreadGone> {
        let (mut answer, answered) = oneshot::channel();
        self.runtime.spawn(async move {
            tokio::select! {
                // What cannot be handed over any more is dropped here, and undoes itself.
                value = work => drop(answer.send(value)),
                () = answer.closed() => {}
            }
        });
        answered.await.map_err(|_| ThreadGone)
    }

    /// Takes a message from our channel; runs in the read loop.
    pub(crate) fn hear(self: &Arc<Self>, message: &[u8]) {
        let Ok(message) = OwnerMessage::parse(message) else {
            return; // a later version's word
        };
        // An owner that its user has named (perhaps after another acquisition): all its acquisitions hear. Each has a share of its own in
        // what is granted.
        let named = self.parties.of_owner(message.key, message.owner);
        for number in &named {
            self.hear_as(*number, Some(self.owner(*number)), &message);
        }
        if let Some(number) = self.number_of(message.owner).filter(|_| named.is_empty()) {
            self.hear_as(number, None, &message);
        }
    }

    fn hear_as(self: &Arc<Self>, number: u64, id: Option<Box<[u8]>>, message: &OwnerMessage<'_>) {
        match self.parties.hear(number, message) {
            Heard::Nothing => {}
            Heard::Lost(hold, reason) => self.tell_loss(&hold, reason),
            Heard::Stray(token) => {
                tracing::debug!(%token, "a grant that nobody waits for: given back");
                let until = self.after(self.claim);
                let name = Name { number, key: message.key.into(), owner: message.owner.into(), id };
                self.give_back(Errand { name, token: Some(token), until }, None);
            }
        }
    }

    fn number_of(&self, owner: &[u8]) -> Option<u64> {
        let number = owner.strip_prefix(self.name.as_bytes())?.strip_prefix(b":")?;
        str::from_utf8(number).ok()?.parse().ok()
    }

    pub(crate) fn after(&self, duration: Duration) -> Time {
        let us = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        Time::from_us(self.clock.now().as_us().saturating_add(us))
    }

    /// Marks a hold as lost, once, and tells.
    pub(crate) fn lose(&self, hold: &Arc<Hold>, reason: LossReason) {
        if hold.lose(reason) {
            self.tell_loss(hold, reason);
        }
    }

    /// Tells of a loss that has just been marked.
    pub(crate) fn tell_loss(&self, hold: &Hold, reason: LossReason) {
        let token = hold.token();
        hold.holding.lost(reason);
        let _ = self.events.send(Event::Lost { key: hold.name.key.to_vec(), token, reason });
        self.parties.leave(hold.name.number);
    }

    /// Ends a hold on its holder's behalf. The answer goes to `answer`, if anybody wants it.
    pub(crate) fn end(self: &Arc<Self>, hold: &Hold, answer: Option<oneshot::Sender<GivenBack>>) {
        if !hold.end() {
            return;
        }
        self.parties.leave(hold.name.number);
        hold.holding.given_back(hold.is_lost());
        // The lease may have been renewed at any time up to now.
        let until = self.after(crate::clock::duration(hold.keeping.lease));
        let errand = Errand { name: hold.name.clone(), token: hold.sure_token(), until };
        self.give_back(errand, answer);
    }

    /// Ends all holds on the client's behalf.
    pub(crate) fn end_all(self: &Arc<Self>) {
        for hold in self.parties.holds() {
            self.lose(&hold, LossReason::ShutDown);
            self.end(&hold, None);
        }
    }

    /// Gives something back in the background, again and again until the server has answered or has ended it by itself.
    pub(crate) fn give_back(self: &Arc<Self>, errand: Errand, mut answer: Option<oneshot::Sender<GivenBack>>) {
        let count = ErrandCount::new(self);
        let engine = Arc::clone(self);
        self.runtime.spawn(async move {
            let _count = count;
            let Name { key, owner, id, .. } = &errand.name;
            let patience = Instant::now() + engine.operation_timeout;
            let mut backoff = Backoff::new(RETRY_FIRST, RETRY_MOST);
            let (mut unanswered, mut late) = (false, false);
            loop {
                let source: Source = match engine.give_back_once(&errand).await {
                    Ok(given) => {
                        // After a lost answer, 0 is what our own first request leaves behind.
                        tell(&mut answer, Ok(given.reply || unanswered));
                        if id.is_some() {
                            // The place in the queue that went with it may have been another's too.
                            engine.parties.ask_again(key, owner);
                        }
                        return;
                    }
                    Err(CallError::Server(error)) if !error.is_retryable() => {
                        observe::release_failed(key, &error);
                        tell(&mut answer, Err(HoldError::Server(error)));
                        return;
                    }
                    Err(CallError::Server(error)) => error.into(),
                    Err(CallError::NotSent(source)) => source,
                    Err(CallError::Unanswered(source)) => {
                        unanswered = true;
                        source
                    }
                };
                if Instant::now() >= patience && !late {
                    late = true;
                    observe::release_failed(key, &source);
                    tell(&mut answer, Err(HoldError::Unknown(source)));
                }
                if engine.clock.now() >= errand.until {
                    return;
                }
                sleep(backoff.next(&engine.jitter)).await;
            }
        });
    }

    /// Asks once for something to be given back. Who has no connection keeps nobody waiting.
    async fn give_back_once(&self, errand: &Errand) -> Result<Answer<bool>, CallError> {
        let Name { key, owner, .. } = &errand.name;
        let request = Release { key, owner, token: errand.token, scope: errand.name.scope() };
        let (node, command) = (self.node(key), wire::command(&request));
        let up = node.commands.up().await?;
        let _turn = self.turns.acquire().await; // never closed
        let given = node.commands.call_over(up, &command, wire::yes_or_no).await;
        self.follow(given, &command, wire::yes_or_no).await
    }

    /// Ends when nothing is being given back.
    pub(crate) async fn errands_done(&self) {
        let mut errands = self.errands.subscribe();
        let _ = errands.wait_for(|errands| *errands == 0).await;
    }
}

fn tell(answer: &mut Option<oneshot::Sender<GivenBack>>, given: GivenBack) {
    if let Some(answer) = answer.take() {
        let _ = answer.send(given);
    }
}

/// The client's thread has ended.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the client is shut down")]
pub(crate) struct ThreadGone;

struct ErrandCount(Arc<Engine>);

impl ErrandCount {
    fn new(engine: &Arc<Engine>) -> Self {
        engine.errands.send_modify(|count| *count += 1);
        Self(Arc::clone(engine))
    }
}

impl Drop for ErrandCount {
    fn drop(&mut self) {
        self.0.errands.send_modify(|count| *count -= 1);
    }
}
