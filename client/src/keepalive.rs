//! The keep-alive: renews every hold of the client before its lease is over, and says so at once when that has failed.
//!
//! One heap of due times, one task. What falls due within a short while is renewed in one go, so ten thousand holds cost a few pipelines a
//! second and not ten thousand timers. The first renewal comes soon after the grant: it confirms the claim. A hold that is given back
//! before that costs no renewal, and no more than one entry here. Then it renews at a third of the lease, a little earlier at random. A
//! renewal without an answer is tried again until the local deadline; an answer of 0 is final. A hold that is over, given back or leaked
//! is never renewed again: each renewal carries the token.
//!
//! A connection that is made anew, of whichever kind and for whatever reason, puts every hold of its node in doubt: its loss may have been
//! told in between, or the server knows nothing any more. So all are renewed at once, in the same batches; one that is not kept alive is
//! asked after by CHECK. A session lives on the new connection only from then on.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use flock_core::wire::command::Check;
use flock_core::wire::error::ErrorCode;
use flock_core::{Millis, Time, Token};
use redis::{Cmd, Value};
use tokio::sync::Notify;
use tokio::time::sleep;

use crate::clock::{believed_until, duration};
use crate::engine::Engine;
use crate::error::LossReason;
use crate::event::Event;
use crate::hold::Hold;
use crate::link::{Answer, CallError};
use crate::mutex::lock;
use crate::nodes::{Epochs, Node};
use crate::wire;

/// A hold that has lasted for this long is taken in charge, at the latest: it is confirmed if it is a claim, and its end is watched.
/// Holds shorter than half of it never cost a renewal. Most are; and it is little beside a claim, which is seconds.
const SETTLED_AFTER: Duration = Duration::from_millis(100);
/// What is due within this is done now; for short leases a twentieth of the lease.
const COALESCE: Duration = Duration::from_millis(50);
const BATCH_MAX: usize = 500;
/// Connections that are made within this after a first one are one reason to ask, and not several. As a rule both links break together.
const ROUNDS_APART: Duration = Duration::from_millis(100);
const RETRY_AFTER: Duration = Duration::from_millis(100);
/// The timer's clock stops while the machine sleeps; so it looks at the other one this often.
const SLEEP_MAX: Duration = Duration::from_secs(1);
/// Entries that are stale stay until they fall due, or until there are this many and twice as many as were live the last time.
const PRUNE_ABOVE_MIN: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// Take it in charge.
    Settle,
    /// If this is still the number of the hold's next renewal.
    Renew(u64),
    /// Look whether the belief has run out.
    Expire,
}

#[derive(Debug)]
struct Entry {
    /// When it is done, alone or with others.
    at: Time,
    /// From when on it may be done with others.
    earliest: Time,
    what: What,
    /// The hold's number, and not the hold: most have ended long before, and their memory is to be used again at once.
    hold: u64,
}

impl Entry {
    /// Its hold, unless there is nothing to be done: that has ended, or is renewed at another time.
    fn hold(&self, engine: &Engine) -> Option<Arc<Hold>> {
        let hold = engine.parties.held(self.hold)?;
        let replaced = matches!(self.what, What::Renew(number) if number != hold.renewal.load(Relaxed));
        (!replaced && hold.is_kept()).then_some(hold)
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        self.at.cmp(&other.at)
    }
}

/// What the server is asked about one hold.
#[derive(Debug)]
struct Question {
    hold: Arc<Hold>,
    /// None while the server may have another one.
    token: Option<Token>,
    /// For how long it is renewed; none if it is only to be known whether it is held.
    lease: Option<Millis>,
    /// The newest connections before this was sent.
    epochs: Epochs,
}

impl Question {
    /// Whether there is something to ask for: what is not to last longer is asked after by its token, and a conversion may have given it
    /// another one, which we do not know yet.
    fn has_subject(hold: &Hold) -> bool {
        Self::renews(hold) || hold.sure_token().is_some()
    }

    fn renews(hold: &Hold) -> bool {
        hold.keeping.keep_alive || !hold.is_confirmed()
    }

    /// None if there is nothing to be asked any more.
    fn new(engine: &Engine, now: Time, hold: Arc<Hold>) -> Option<Self> {
        let token = hold.sure_token();
        let lease = if Self::renews(&hold) { Some(hold.keeping.lease_at(now)?) } else { None };
        let epochs = engine.nodes.epochs(&hold.name.key);
        hold.is_kept().then_some(Self { hold, token, lease, epochs })
    }

    fn command(&self) -> Cmd {
        match (self.lease, self.token) {
            (None, Some(token)) => wire::command(&Check { key: &self.hold.name.key, token }),
            (lease, token) => wire::renewal(&self.hold.name, lease.unwrap_or(self.hold.keeping.lease), token),
        }
    }

    /// Whether the answer is that it is held.
    fn read(&self, reply: &Value) -> Option<bool> {
        match self.lease {
            Some(_) => wire::renewed(&self.hold.name, self.token, reply),
            None => wire::yes_or_no(reply),
        }
    }
}

#[derive(Debug)]
struct Due {
    heap: BinaryHeap<Reverse<Entry>>,
    prune_above: usize,
}

#[derive(Debug)]
pub(crate) struct KeepAlive {
    due: Mutex<Due>,
    earlier: Notify,
}

impl KeepAlive {
    pub(crate) fn new() -> Self {
        Self { due: Mutex::new(Due { heap: BinaryHeap::new(), prune_above: PRUNE_ABOVE_MIN }), earlier: Notify::new() }
    }

    /// Takes charge of a new hold.
    pub(crate) fn keep(&self, engine: &Engine, hold: &Hold) {
        let now = engine.clock.now();
        let latest = Duration::from_micros(hold.believed_until().us_since(now)) / 3;
        // Without keep-alive the lease starts with the confirmation, so there is no reason to wait.
        let at_once = !hold.is_confirmed() && !hold.keeping.keep_alive;
        let after = if at_once { Duration::ZERO } else { SETTLED_AFTER.min(latest) };
        self.push(later(now, after), after / 2, What::Settle, hold);
    }

    /// Does what is due, for ever; runs on the client's thread.
    pub(crate) async fn run(&self, engine: &Arc<Engine>) {
        loop {
            let now = engine.clock.now();
            let (due, next) = self.take_due(engine, now);
            let mut renewals = Vec::new();
            for entry in due {
                let Some(hold) = entry.hold(engine) else { continue };
                match entry.what {
                    What::Settle => {
                        hold.take_in_charge();
                        self.watch_end(&hold);
                        if !hold.is_confirmed() || is_in_doubt(engine, &hold) {
                            renewals.push(hold);
                        } else if hold.keeping.keep_alive {
                            self.renew_at(self.next_renewal(engine, now, &hold), &hold);
                        }
                    }
                    What::Renew(_) if hold.is_fresh(now) && !is_in_doubt(engine, &hold) => {
                        self.renew_at(self.next_renewal(engine, now, &hold), &hold);
                    }
                    What::Renew(_) if hold.keeping.lease_at(now).is_some() => renewals.push(hold),
                    What::Renew(_) => {} // as long as allowed: the lease runs out
                    What::Expire if now >= hold.believed_until() => engine.lose(&hold, hold.expiry_reason(now)),
                    What::Expire => self.watch_end(&hold),
                }
            }
            for (node, share) in engine.nodes.share_out(renewals) {
                for batch in share.chunks(BATCH_MAX) {
                    let (engine, node, batch) = (Arc::clone(engine), Arc::clone(&node), batch.to_vec());
                    tokio::spawn(async move { engine.keepalive.renew(&engine, &node, batch).await });
                }
            }
            let pause = next.map_or(SLEEP_MAX, |next| engine.clock.until(next).min(SLEEP_MAX));
            tokio::select! {
                () = self.earlier.notified() => {}
                () = sleep(pause) => {}
            }
        }
    }

    /// Asks after holds whenever there is a new connection, for ever; runs on the client's thread.
    pub(crate) async fn ask_after_holds(&self, engine: &Arc<Engine>) {
        let mut anew = engine.anew.subscribe();
        while anew.changed().await.is_ok() {
            sleep(ROUNDS_APART).await;
            anew.mark_unchanged();
            let now = engine.clock.now();
            for hold in engine.parties.holds() {
                // Who is not in charge of it yet will be in a moment, and looks then.
                if hold.is_in_charge() && is_in_doubt(engine, &hold) {
                    self.renew_at(now, &hold);
                }
            }
        }
    }

    /// Renews holds of one node.
    async fn renew(&self, engine: &Arc<Engine>, node: &Node, batch: Vec<Arc<Hold>>) {
        // First: it is asked over the connection that there is then, and what is said of that must not be taken for the last one's.
        if let Err(error) = node.commands.up().await {
            return self.try_all_again(engine, &batch, &error);
        }
        let now = engine.clock.now();
        let (asked, put_off): (Vec<_>, Vec<_>) = batch.into_iter().partition(|hold| Question::has_subject(hold));
        for hold in put_off {
            self.renew_at(later(now, RETRY_AFTER), &hold);
        }
        let questions: Vec<_> = asked.into_iter().filter_map(|hold| Question::new(engine, now, hold)).collect();
        if questions.is_empty() {
            return; // all were given back meanwhile
        }
        let requests = wire::pipeline(questions.iter().map(Question::command));
        let answer = node.commands.call_all(&requests, questions.len(), |position, reply| {
            questions.get(position).and_then(|question| question.read(reply))
        });
        let answer = answer.await;
        match answer {
            Ok(answer) => {
                for (question, reply) in questions.into_iter().zip(answer.reply) {
                    let answer = Answer { reply, sent: answer.sent, pulse: Arc::clone(&answer.pulse) };
                    self.settle(engine, question, answer);
                }
            }
            Err(error) => {
                let holds: Vec<_> = questions.into_iter().map(|question| question.hold).collect();
                self.try_all_again(engine, &holds, &error);
            }
        }
    }

    /// Takes the answer to one question, whoever sent it.
    fn settle(&self, engine: &Arc<Engine>, question: Question, answer: Answer<Result<bool, CallError>>) {
        let Question { hold, token, lease, epochs } = &question;
        let Answer { reply, sent, pulse } = answer;
        match reply {
            Ok(true) => {
                match *lease {
                    Some(lease) => engine.renewed(hold, lease, *token, *epochs, &Answer { reply: (), sent, pulse }),
                    None => hold.asked_over(*epochs),
                }
                if hold.keeping.keep_alive {
                    self.renew_at(self.next_renewal(engine, sent, hold), hold);
                }
            }
            // The token changed while this was under way: it says nothing about the hold.
            Ok(false) if *token != hold.sure_token() => self.try_again(engine, hold),
            Ok(false) => engine.lose(hold, LossReason::Gone),
            Err(error) if is_not_held(&error) => engine.lose(hold, LossReason::Gone),
            Err(error) if is_asked_elsewhere(&error) => {
                let engine = Arc::clone(engine);
                tokio::spawn(async move { engine.keepalive.ask_elsewhere(&engine, question).await });
            }
            // Who may not ask hears nothing, and believes until the lease is over.
            Err(CallError::Server(error)) if lease.is_none() && !error.is_retryable() => hold.asked_over(*epochs),
            Err(error) => self.try_again_after(engine, hold, &error),
        }
    }

    /// The key has left its node, the slot not yet: the question is sent by itself, so that it can be sent on.
    async fn ask_elsewhere(&self, engine: &Arc<Engine>, question: Question) {
        let answer = engine.call(&question.hold.name.key, &question.command(), |reply| question.read(reply)).await;
        match answer {
            Ok(Answer { reply, sent, pulse }) => {
                self.settle(engine, question, Answer { reply: Ok(reply), sent, pulse })
            }
            Err(error) => self.try_again_after(engine, &question.hold, &error),
        }
    }

    fn try_all_again(&self, engine: &Engine, holds: &[Arc<Hold>], error: &CallError) {
        tracing::debug!(holds = holds.len(), ?error, "renewals without an answer");
        for hold in holds {
            self.try_again(engine, hold);
        }
    }

    fn try_again_after(&self, engine: &Engine, hold: &Hold, error: &CallError) {
        tracing::debug!(key = %hold.name.key.escape_ascii(), ?error, "a lease was not renewed");
        self.try_again(engine, hold);
    }

    fn try_again(&self, engine: &Engine, hold: &Hold) {
        if !hold.is_kept() {
            return;
        }
        hold.holding.renewal_failed();
        let _ = engine.events.send(Event::RenewFailed { key: hold.name.key.to_vec(), token: hold.token() });
        let after = engine.jitter.around(RETRY_AFTER).min(duration(hold.keeping.lease) / 10);
        self.renew_at(later(engine.clock.now(), after), hold);
    }

    /// A third of the lease after `from`, or up to a sixth earlier than that. Of a session's grace, if that is shorter: should a renewal
    /// that is late bind the session to a connection that has closed, the next one comes before the server has ended it. At once if there
    /// is a new connection already.
    fn next_renewal(&self, engine: &Engine, from: Time, hold: &Hold) -> Time {
        if is_in_doubt(engine, hold) {
            return from;
        }
        let lasts = hold.session.as_ref().map_or(hold.keeping.lease, |session| session.grace().min(hold.keeping.lease));
        let third = duration(lasts) / 3;
        later(from, third - engine.jitter.up_to(third / 6))
    }

    /// Renews then, and not at the time planned before.
    fn renew_at(&self, at: Time, hold: &Hold) {
        let number = hold.renewal.fetch_add(1, Relaxed) + 1;
        let slack = COALESCE.min(duration(hold.keeping.lease) / 20);
        self.push(at, slack, What::Renew(number), hold);
    }

    /// Looks when the belief ends now whether it has ended.
    fn watch_end(&self, hold: &Hold) {
        self.push(hold.believed_until(), Duration::ZERO, What::Expire, hold);
    }

    fn push(&self, at: Time, slack: Duration, what: What, hold: &Hold) {
        let earliest = Time::from_us(at.as_us().saturating_sub(u64::try_from(slack.as_micros()).unwrap_or(u64::MAX)));
        let entry = Entry { at, earliest, what, hold: hold.name.number };
        let mut due = lock(&self.due);
        let is_first = due.heap.peek().is_none_or(|Reverse(first)| entry.at < first.at);
        due.heap.push(Reverse(entry));
        drop(due);
        if is_first {
            self.earlier.notify_one();
        }
    }

    /// What may be done now, and when to look again.
    fn take_due(&self, engine: &Engine, now: Time) -> (Vec<Entry>, Option<Time>) {
        let mut due = lock(&self.due);
        let mut taken = Vec::new();
        while due.heap.peek().is_some_and(|Reverse(first)| first.earliest <= now) {
            taken.extend(due.heap.pop().map(|Reverse(entry)| entry));
        }
        if due.heap.len() > due.prune_above {
            due.heap.retain(|Reverse(entry)| entry.hold(engine).is_some());
            due.prune_above = PRUNE_ABOVE_MIN.max(2 * due.heap.len());
        }
        // Not the first's earliest: what comes next may well be done together with it.
        (taken, due.heap.peek().map(|Reverse(first)| first.at))
    }
}

/// Whether a connection of its node is newer than the server's last word on it.
fn is_in_doubt(engine: &Engine, hold: &Hold) -> bool {
    !hold.was_asked_over(engine.nodes.epochs(&hold.name.key))
}

/// Whether the server says that there is no such hold.
pub(crate) fn is_not_held(error: &CallError) -> bool {
    matches!(error, CallError::Server(error) if error.known() == Some(ErrorCode::NotHeld))
}

/// Whether the server names another one to ask this once.
pub(crate) fn is_asked_elsewhere(error: &CallError) -> bool {
    matches!(error, CallError::Server(error) if error.known() == Some(ErrorCode::Ask))
}

fn later(from: Time, after: Duration) -> Time {
    let us = u64::try_from(after.as_micros()).unwrap_or(u64::MAX);
    Time::from_us(from.as_us().saturating_add(us))
}

impl Engine {
    /// A renewal was answered yes, which was sent when these were the newest connections.
    pub(crate) fn renewed<T>(
        &self,
        hold: &Hold,
        lease: Millis,
        token: Option<Token>,
        epochs: Epochs,
        answer: &Answer<T>,
    ) {
        if token.is_some() {
            hold.confirm();
        }
        hold.renewed(believed_until(answer.sent, lease), &answer.pulse);
        hold.asked_over(epochs);
        hold.holding.renewed();
    }
}

#[cfg(all(test, feature = "testing"))]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use crate::guard::Released;
    use crate::testing::Server;

    #[tokio::test(start_paused = true)]
    async fn hold_that_was_given_back_takes_no_memory() {
        let server = Server::new();
        let flock = server.client().await;
        let guard = flock.lock("k").await.unwrap();
        let hold = Arc::downgrade(&flock.engine().parties.holds().pop().unwrap());
        assert_eq!(guard.release().await.unwrap(), Released::Released);
        assert_eq!(hold.strong_count(), 0, "what was to be renewed has it still");
    }

    #[tokio::test(start_paused = true)]
    async fn batch_whose_holds_were_all_given_back_costs_no_connection() {
        let server = Server::new();
        let flock = server.client().await;
        let engine = flock.engine();
        let node = engine.node(b"k");
        let epoch = node.commands.epoch();
        engine.keepalive.renew(engine, &node, Vec::new()).await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(node.commands.epoch(), epoch, "the connection was replaced");
    }
}
