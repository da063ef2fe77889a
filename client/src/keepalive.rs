//! The keep-alive: renews every hold of the client before its lease is over, and says so at once when that has failed.
//!
//! One heap of due times, one task. What falls due within a short while is renewed in one go, so ten thousand holds cost a few pipelines a
//! second and not ten thousand timers. The first renewal comes soon after the grant: it confirms the claim. A hold that is given back
//! before that costs no renewal, and no more than one entry here. Then it renews at a third of the lease, a little earlier at random. A
//! renewal without an answer is tried again until the local deadline; an answer of 0 is final. A hold that is over, given back or leaked
//! is never renewed again: each renewal carries the token.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use flock_core::wire::error::ErrorCode;
use flock_core::{Millis, Time, Token};
use tokio::sync::Notify;
use tokio::time::sleep;

use crate::clock::{believed_until, duration};
use crate::engine::Engine;
use crate::error::LossReason;
use crate::event::Event;
use crate::hold::Hold;
use crate::link::{Answer, CallError, Pulse};
use crate::mutex::lock;
use crate::nodes::Node;
use crate::wire;

/// A hold that has lasted for this long is taken in charge, at the latest: it is confirmed if it is a claim, and its end is watched.
/// Holds shorter than half of it never cost a renewal. Most are; and it is little beside a claim, which is seconds.
const SETTLED_AFTER: Duration = Duration::from_millis(100);
/// What is due within this is done now; for short leases a twentieth of the lease.
const COALESCE: Duration = Duration::from_millis(50);
const BATCH_MAX: usize = 500;
const RETRY_AFTER: Duration = Duration::from_millis(100);
/// The timer's clock stops while the machine sleeps; so it looks at the other one this often.
const SLEEP_MAX: Duration = Duration::from_secs(1);
/// Entries that are stale stay until they fall due, or until there are this many and then twice as many as live ones.
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
    hold: Arc<Hold>,
}

impl Entry {
    /// Whether there is nothing to be done: the hold has ended, or is renewed at another time.
    fn is_stale(&self) -> bool {
        let replaced = matches!(self.what, What::Renew(number) if number != self.hold.renewal.load(Relaxed));
        replaced || !self.hold.is_kept()
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
    pub(crate) fn keep(&self, engine: &Engine, hold: &Arc<Hold>) {
        let now = engine.clock.now();
        let latest = Duration::from_micros(hold.believed_until().us_since(now)) / 3;
        // Without keep-alive the lease starts with the confirmation, so there is no reason to wait.
        let at_once = !hold.is_confirmed() && !hold.keeping.keep_alive;
        let after = if at_once { Duration::ZERO } else { SETTLED_AFTER.min(latest) };
        self.push(later(now, after), after / 2, What::Settle, hold);
    }

    /// Does what is due, for ever; runs on the client's thread.
    pub(crate) async fn run(&self, engine: &Arc<Engine>) {
        let mut epoch = engine.nodes.commands_epoch();
        loop {
            let now = engine.clock.now();
            if engine.nodes.commands_epoch() != epoch {
                epoch = engine.nodes.commands_epoch();
                self.rebind_sessions(engine, now);
            }
            let (due, next) = self.take_due(now);
            let mut renewals = Vec::new();
            for entry in due {
                match entry.what {
                    _ if entry.is_stale() => {}
                    What::Settle => {
                        self.watch_end(&entry.hold);
                        if !entry.hold.is_confirmed() {
                            renewals.push(entry.hold);
                        } else if entry.hold.keeping.keep_alive {
                            self.renew_at(self.next_renewal(engine, now, &entry.hold), &entry.hold);
                        }
                    }
                    What::Renew(_) if entry.hold.is_fresh(now) => {
                        self.renew_at(self.next_renewal(engine, now, &entry.hold), &entry.hold);
                    }
                    What::Renew(_) if entry.hold.keeping.lease_at(now).is_some() => renewals.push(entry.hold),
                    What::Renew(_) => {} // as long as allowed: the lease runs out
                    What::Expire if now >= entry.hold.believed_until() => {
                        engine.lose(&entry.hold, entry.hold.expiry_reason(now));
                    }
                    What::Expire => self.watch_end(&entry.hold),
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
                () = engine.nodes.commands_newer_than(epoch) => {}
                () = sleep(pause) => {}
            }
        }
    }

    /// Renews holds of one node.
    async fn renew(&self, engine: &Arc<Engine>, node: &Node, batch: Vec<Arc<Hold>>) {
        let now = engine.clock.now();
        let asked: Vec<_> = batch
            .into_iter()
            .filter(|hold| hold.is_kept())
            .filter_map(|hold| hold.keeping.lease_at(now).map(|lease| (lease, hold.sure_token(), hold)))
            .collect();
        if asked.is_empty() {
            return; // all were given back meanwhile
        }
        let requests =
            wire::pipeline(asked.iter().map(|(lease, token, hold)| wire::renewal(&hold.name, *lease, *token)));
        let answer = node.commands.call_all(&requests, asked.len(), |position, reply| {
            asked.get(position).and_then(|(_, token, hold)| wire::renewed(&hold.name, *token, reply))
        });
        let answer = answer.await;
        match answer {
            Ok(answer) => {
                for ((lease, token, hold), reply) in asked.iter().zip(answer.reply) {
                    let answer = Answer { reply, sent: answer.sent, pulse: Arc::clone(&answer.pulse) };
                    self.settle(engine, hold, *lease, *token, answer);
                }
            }
            Err(error) => {
                tracing::debug!(holds = asked.len(), ?error, "renewals without an answer");
                for (_, _, hold) in &asked {
                    self.try_again(engine, hold);
                }
            }
        }
    }

    /// Takes the answer to one renewal, whoever sent it.
    fn settle(
        &self,
        engine: &Arc<Engine>,
        hold: &Arc<Hold>,
        lease: Millis,
        token: Option<Token>,
        answer: Answer<Result<bool, CallError>>,
    ) {
        match answer.reply {
            Ok(true) => {
                engine.renewed(hold, lease, token, answer.sent, &answer.pulse);
                if hold.keeping.keep_alive {
                    self.renew_at(self.next_renewal(engine, answer.sent, hold), hold);
                }
            }
            // The token changed while this was under way: it says nothing about the hold.
            Ok(false) if token != hold.sure_token() => self.try_again(engine, hold),
            Ok(false) => engine.lose(hold, LossReason::Gone),
            Err(error) if is_not_held(&error) => engine.lose(hold, LossReason::Gone),
            Err(error) if is_asked_elsewhere(&error) => {
                let (engine, hold) = (Arc::clone(engine), Arc::clone(hold));
                tokio::spawn(async move { engine.keepalive.renew_elsewhere(&engine, &hold, lease, token).await });
            }
            Err(error) => self.try_again_after(engine, hold, &error),
        }
    }

    /// The key has left its node, the slot not yet: the renewal is sent by itself, so that it can be sent on.
    async fn renew_elsewhere(&self, engine: &Arc<Engine>, hold: &Arc<Hold>, lease: Millis, token: Option<Token>) {
        let renewal = wire::renewal(&hold.name, lease, token);
        let answer = engine.call(&hold.name.key, &renewal, |reply| wire::renewed(&hold.name, token, reply)).await;
        match answer {
            Ok(Answer { reply, sent, pulse }) => {
                self.settle(engine, hold, lease, token, Answer { reply: Ok(reply), sent, pulse });
            }
            Err(error) => self.try_again_after(engine, hold, &error),
        }
    }

    fn try_again_after(&self, engine: &Engine, hold: &Arc<Hold>, error: &CallError) {
        tracing::debug!(key = %hold.name.key.escape_ascii(), ?error, "a lease was not renewed");
        self.try_again(engine, hold);
    }

    fn try_again(&self, engine: &Engine, hold: &Arc<Hold>) {
        if !hold.is_kept() {
            return;
        }
        hold.holding.renewal_failed();
        let _ = engine.events.send(Event::RenewFailed { key: hold.name.key.to_vec(), token: hold.token() });
        let after = engine.jitter.around(RETRY_AFTER).min(duration(hold.keeping.lease) / 10);
        self.renew_at(later(engine.clock.now(), after), hold);
    }

    /// A third of the lease after `from`, or up to a sixth earlier than that. Of a session's grace, if that is shorter: should a renewal
    /// that is late bind the session to a connection that has closed, the next one comes before the server has ended it.
    fn next_renewal(&self, engine: &Engine, from: Time, hold: &Hold) -> Time {
        let lasts = hold.session.as_ref().map_or(hold.keeping.lease, |session| session.grace().min(hold.keeping.lease));
        let third = duration(lasts) / 3;
        later(from, third - engine.jitter.up_to(third / 6))
    }

    /// A new connection: session holds live on it only once they have been renewed over it.
    fn rebind_sessions(&self, engine: &Engine, now: Time) {
        for hold in engine.parties.holds() {
            if hold.session.is_some() && hold.keeping.keep_alive {
                self.renew_at(now, &hold);
            }
        }
    }

    /// Renews then, and not at the time planned before.
    fn renew_at(&self, at: Time, hold: &Arc<Hold>) {
        let number = hold.renewal.fetch_add(1, Relaxed) + 1;
        let slack = COALESCE.min(duration(hold.keeping.lease) / 20);
        self.push(at, slack, What::Renew(number), hold);
    }

    /// Looks when the belief ends now whether it has ended.
    fn watch_end(&self, hold: &Arc<Hold>) {
        self.push(hold.believed_until(), Duration::ZERO, What::Expire, hold);
    }

    fn push(&self, at: Time, slack: Duration, what: What, hold: &Arc<Hold>) {
        let earliest = Time::from_us(at.as_us().saturating_sub(u64::try_from(slack.as_micros()).unwrap_or(u64::MAX)));
        let entry = Entry { at, earliest, what, hold: Arc::clone(hold) };
        let mut due = lock(&self.due);
        let is_first = due.heap.peek().is_none_or(|Reverse(first)| entry.at < first.at);
        due.heap.push(Reverse(entry));
        if due.heap.len() > due.prune_above {
            due.heap.retain(|Reverse(entry)| !entry.is_stale());
            due.prune_above = PRUNE_ABOVE_MIN.max(2 * due.heap.len());
        }
        drop(due);
        if is_first {
            self.earlier.notify_one();
        }
    }

    /// What may be done now, and when to look again.
    fn take_due(&self, now: Time) -> (Vec<Entry>, Option<Time>) {
        let mut due = lock(&self.due);
        let mut taken = Vec::new();
        while due.heap.peek().is_some_and(|Reverse(first)| first.earliest <= now) {
            taken.extend(due.heap.pop().map(|Reverse(entry)| entry));
        }
        // Not the first's earliest: what comes next may well be done together with it.
        (taken, due.heap.peek().map(|Reverse(first)| first.at))
    }
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
    /// A renewal sent at `sent` was answered yes.
    pub(crate) fn renewed(&self, hold: &Hold, lease: Millis, token: Option<Token>, sent: Time, pulse: &Arc<Pulse>) {
        if token.is_some() {
            hold.confirm();
        }
        hold.renewed(believed_until(sent, lease), pulse);
        hold.holding.renewed();
    }
}

#[cfg(all(test, feature = "testing"))]
mod tests {
    use std::time::Duration;

    use crate::testing::Server;

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
