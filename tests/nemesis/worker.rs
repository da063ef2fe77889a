//! A client that takes locks in every way, works under them, and behaves as clients do: most give back, some crash, some hang.
//!
//! It is a careful client up to the moment of its write: it counts its lease from before it sent the request, and looks at the clock
//! before it writes. What it cannot do is look and write in one step, and sometimes it hangs in between.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use flock_core::effect::Notice;
use flock_core::wire::message::OwnerMessage;
use flock_tests::args;
use flock_tests::args::encode;
use flock_tests::fenced_store::FencedStore;
use flock_tests::history::{Call, Mode, Recorder, Verb, now_ns};
use flock_tests::random::Random;
use flock_tests::reply::Reply;
use flock_tests::resp::{Conn, RecvError};
use flock_tests::subscriber::Subscriber;
use flock_tests::wait::let_pass;

use crate::site::{LOCKS, Lock, Site};
use crate::unfenced::{UnfencedStore, Visitor};

/// Clients of one server are numbered from a multiple of this: so a history tells which server was asked.
pub(crate) const PROCESSES_PER_NODE: u32 = 1000;

/// How long a client waits for an answer beyond the wait that it asked for.
const PATIENCE_MS: u64 = 1500;
const PATIENCE: Duration = Duration::from_millis(PATIENCE_MS);
const WAIT_MS_MAX: u64 = 1550;
/// No client hears an answer later than this after its request.
pub(crate) const ANSWERED_WITHIN_NS: u64 = (WAIT_MS_MAX + PATIENCE_MS) * NS_PER_MS;
const ATTEMPTS_MAX: u32 = 4;
const NS_PER_MS: u64 = 1_000_000;
/// No lease of a run is longer.
const LEASE_MS_MAX: u64 = 500;

/// What all workers share.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) site: Site,
    pub(crate) recorder: Recorder,
    pub(crate) fenced: FencedStore,
    pub(crate) unfenced: UnfencedStore,
    pub(crate) counts: Counts,
    /// Owners whose request was sent again: how long they wait in all is not told by one wait.
    pub(crate) sent_again: Mutex<BTreeSet<String>>,
    /// How many leases a holder believes its lease to last: 1, but for a planted bug.
    pub(crate) beliefs: u64,
}

/// What became of the requests.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) acquisitions: AtomicU64,
    pub(crate) by_try: AtomicU64,
    pub(crate) by_block: AtomicU64,
    pub(crate) by_queue: AtomicU64,
    pub(crate) heard: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) given_up: AtomicU64,
    pub(crate) unknown: AtomicU64,
    pub(crate) renewals: AtomicU64,
    pub(crate) lost: AtomicU64,
    pub(crate) released: AtomicU64,
    pub(crate) abandoned: AtomicU64,
    pub(crate) crashed: AtomicU64,
    pub(crate) hung: AtomicU64,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// How a lock is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Try,
    Block,
    Queue,
}

/// What one acquisition asks for.
struct Wish {
    lock: Lock,
    owner: String,
    mode: Mode,
    form: Form,
    wait: Duration,
    lease_ms: u64,
    claim_ms: Option<u64>,
    grace_ms: Option<u64>,
}

impl Wish {
    /// What a renewal promises: under a session, the connection may close at once.
    fn promised_ms(&self) -> u64 {
        self.grace_ms.map_or(self.lease_ms, |grace_ms| grace_ms.min(self.lease_ms))
    }

    /// What a grant promises, until it is confirmed.
    fn granted_ms(&self) -> u64 {
        self.claim_ms.map_or(self.promised_ms(), |claim_ms| claim_ms.min(self.promised_ms()))
    }

    fn acquisition(&self, channel: &str) -> Vec<Vec<u8>> {
        let mut request = args!["FLOCK.ACQUIRE", self.lock.name, self.owner, self.lease_ms].to_vec();
        if self.mode == Mode::Shared {
            request.push(b"SHARED".to_vec());
            if let Some(limit) = self.lock.limit {
                request.extend(args!["LIMIT", limit]);
            }
        }
        let wait_ms = u64::try_from(self.wait.as_millis()).expect("a wait is short");
        match self.form {
            Form::Try => {}
            Form::Block => request.extend(args!["BLOCK", wait_ms]),
            Form::Queue => request.extend(args!["QUEUE", wait_ms, "CHANNEL", channel]),
        }
        if let Some(claim_ms) = self.claim_ms {
            request.extend(args!["CLAIM", claim_ms]);
        }
        if let Some(grace_ms) = self.grace_ms {
            request.extend(args!["SESSION", grace_ms]);
        }
        request
    }

    fn call(&self, verb: Verb) -> Call {
        let mut call = Call::new(verb, self.lock.name, &self.owner);
        call.mode = self.mode;
        call.limit = self.lock.limit;
        call
    }
}

/// What was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Token(u64),
    Done,
    No,
    Queued,
    /// No answer, or an error that says nothing of the lock.
    Unknown,
}

/// A grant that a worker knows of.
struct Held {
    token: u64,
    asked_ns: u64,
    believed_until_ns: u64,
}

/// One client.
pub(crate) struct Worker<'a> {
    work: &'a Work,
    number: u32,
    random: Random,
    acquisitions: u64,
    conn: Option<(Conn, usize)>,
    ears: Option<(Subscriber, usize)>,
    channel: String,
}

impl<'a> Worker<'a> {
    pub(crate) fn new(work: &'a Work, number: u32, random: Random) -> Worker<'a> {
        let channel = format!("inbox:{number}");
        Worker { work, number, random, acquisitions: 0, conn: None, ears: None, channel }
    }

    /// Works until the run is over.
    pub(crate) fn run(mut self) {
        while !self.work.site.is_over() {
            self.one_acquisition();
            let_pass(Duration::from_millis(self.random.below(8)));
        }
    }

    fn one_acquisition(&mut self) {
        let wish = self.wish();
        count(&self.work.counts.acquisitions);
        let Some(mut held) = self.acquire(&wish) else { return };
        if !self.confirm(&wish, &mut held) {
            // A client that writes all the same is what a storage must be guarded from.
            if self.random.one_in(2) {
                self.write(&wish, held.token);
            }
            return;
        }
        self.work_under(&wish, &mut held);
        self.finish(&wish, &held);
    }

    fn wish(&mut self) -> Wish {
        self.acquisitions += 1;
        let lock = self.random.pick(&LOCKS);
        let mode = if lock.limit.is_some() || self.random.one_in(3) { Mode::Shared } else { Mode::Exclusive };
        let form = match self.random.below(10) {
            0..2 => Form::Try,
            2..7 => Form::Block,
            _ => Form::Queue,
        };
        let wait_ms = 50 + self.random.below(WAIT_MS_MAX - 50);
        let lease_ms = 120 + self.random.below(LEASE_MS_MAX - 120);
        let claim_ms = self.random.one_in(4).then(|| 100 + self.random.below(lease_ms - 100));
        let grace_ms = self.random.one_in(5).then(|| 50 + self.random.below(150));
        // The auditor reads from the name how long a request may wait, the judge whether it does.
        let owner = match form {
            Form::Block => format!("b-{}-{}-{wait_ms}", self.number, self.acquisitions),
            Form::Try => format!("t-{}-{}", self.number, self.acquisitions),
            Form::Queue => format!("q-{}-{}", self.number, self.acquisitions),
        };
        Wish { lock, owner, mode, form, wait: Duration::from_millis(wait_ms), lease_ms, claim_ms, grace_ms }
    }

    /// Asks until there is an answer, or it gives up.
    fn acquire(&mut self, wish: &Wish) -> Option<Held> {
        let counts = &self.work.counts;
        let asked_ns = now_ns();
        for attempt in 0..ATTEMPTS_MAX {
            if attempt > 0 {
                self.work.sent_again.lock().unwrap_or_else(PoisonError::into_inner).insert(wish.owner.clone());
            }
            if wish.form == Form::Queue && !self.listens() {
                continue;
            }
            // A request that is repeated leaves a claim as it is: it may be almost over.
            let promised_ms = if attempt > 0 && wish.claim_ms.is_some() { 0 } else { wish.granted_ms() };
            let call = wish.call(Verb::Acquire).lease_ms(promised_ms);
            let request = wish.acquisition(&self.channel);
            let within = if wish.form == Form::Block { wish.wait + PATIENCE } else { PATIENCE };
            let sent_ns = now_ns();
            let answer = self.ask(call, &request, within);
            match answer {
                Answer::Token(token) => {
                    count(match wish.form {
                        Form::Try => &counts.by_try,
                        Form::Block => &counts.by_block,
                        Form::Queue => &counts.by_queue,
                    });
                    // Who has waited does not know since when it holds: it believes nothing until it has renewed.
                    let lasts_ms = if wish.form == Form::Try { wish.granted_ms() } else { 0 };
                    return Some(Held { token, asked_ns, believed_until_ns: sent_ns + self.belief_ns(lasts_ms) });
                }
                Answer::Queued => match self.listen(wish) {
                    Heard::Granted(token) => {
                        count(&counts.heard);
                        return Some(Held { token, asked_ns, believed_until_ns: 0 });
                    }
                    Heard::Ended => break,
                    Heard::Nothing => {}
                },
                Answer::No | Answer::Done => {
                    count(&counts.refused);
                    return None;
                }
                Answer::Unknown if self.random.one_in(3) => break,
                Answer::Unknown => {}
            }
            if self.work.site.is_over() {
                break;
            }
        }
        count(&counts.given_up);
        if self.random.one_in(2) {
            // Leaves the queue in good order; or a hold that it does not know of.
            let call = wish.call(Verb::Release);
            self.ask(call, &args!["FLOCK.RELEASE", wish.lock.name, wish.owner], PATIENCE);
        }
        None
    }

    /// Renews where the grant does not tell how long it may be believed; false if the hold is lost, or cannot be known.
    fn confirm(&mut self, wish: &Wish, held: &mut Held) -> bool {
        if wish.form == Form::Try && wish.claim_ms.is_none() {
            return true;
        }
        self.renew(wish, held) != Answer::No && held.believed_until_ns > now_ns()
    }

    fn renew(&mut self, wish: &Wish, held: &mut Held) -> Answer {
        let call = wish.call(Verb::Renew).lease_ms(wish.promised_ms()).token(held.token);
        let request = args!["FLOCK.RENEW", wish.lock.name, wish.owner, wish.lease_ms, "TOKEN", held.token];
        let sent_ns = now_ns();
        let answer = self.ask(call, &request, PATIENCE);
        match answer {
            Answer::Done | Answer::Token(_) => {
                count(&self.work.counts.renewals);
                held.believed_until_ns = sent_ns + self.belief_ns(wish.promised_ms());
                self.work.unfenced.believe(wish.lock.name, &wish.owner, held.believed_until_ns);
            }
            Answer::No => {
                count(&self.work.counts.lost);
                held.believed_until_ns = 0;
            }
            Answer::Queued | Answer::Unknown => {}
        }
        answer
    }

    fn belief_ns(&self, lasts_ms: u64) -> u64 {
        self.work.beliefs * lasts_ms * NS_PER_MS
    }

    /// Reads and writes for a while, as long as it believes that it holds.
    fn work_under(&mut self, wish: &Wish, held: &mut Held) {
        if held.believed_until_ns <= now_ns() {
            return;
        }
        let visitor = Visitor {
            owner: wish.owner.clone(),
            mode: wish.mode,
            limit: wish.lock.limit,
            asked_ns: held.asked_ns,
            believed_until_ns: held.believed_until_ns,
        };
        self.work.unfenced.enter(wish.lock.name, visitor);
        self.write(wish, held.token);
        for _ in 0..self.random.below(4) {
            let_pass(Duration::from_millis(self.random.below(20)));
            if self.work.beliefs > 1 && self.random.one_in(4) {
                // As long as the wrong belief allows.
                let_pass(Duration::from_millis(wish.lease_ms));
            }
            if self.random.one_in(2) && self.renew(wish, held) == Answer::No {
                break;
            }
            if self.random.one_in(40) {
                // Between the look at the clock and the write, the process stops.
                count(&self.work.counts.hung);
                let_pass(Duration::from_millis(wish.lease_ms + self.random.below(300)));
            } else if held.believed_until_ns <= now_ns() {
                break;
            }
            self.write(wish, held.token);
        }
        self.work.unfenced.leave(wish.lock.name, &wish.owner);
    }

    fn finish(&mut self, wish: &Wish, held: &Held) {
        match self.random.below(10) {
            0 => {
                count(&self.work.counts.crashed);
                if let Some((conn, _)) = self.conn.take() {
                    conn.abort();
                }
                self.ears = None;
            }
            1 => count(&self.work.counts.abandoned),
            _ => {
                let call = wish.call(Verb::Release).token(held.token);
                let request = args!["FLOCK.RELEASE", wish.lock.name, wish.owner, "TOKEN", held.token];
                if self.ask(call, &request, PATIENCE) == Answer::Done {
                    count(&self.work.counts.released);
                }
            }
        }
    }

    /// Offers a write to the storage that checks tokens. Readers have tokens of their own and do not write.
    fn write(&self, wish: &Wish, token: u64) {
        if wish.mode == Mode::Shared {
            return;
        }
        let op = self.work.recorder.invoke(self.number, wish.call(Verb::Write).token(token));
        if self.work.fenced.write(wish.lock.name, &wish.owner, token) {
            self.work.recorder.ok(op, None);
        } else {
            self.work.recorder.refused(op);
        }
    }

    /// Sends a request and takes the answer; recorded. After no answer the connection is given up: a late one would be taken for
    /// that of the next request.
    fn ask(&mut self, call: Call, request: &[Vec<u8>], within: Duration) -> Answer {
        let acquires = call.verb == Verb::Acquire;
        let Some((mut conn, node)) = self.conn.take().or_else(|| self.connect()) else {
            let_pass(Duration::from_millis(20));
            return Answer::Unknown;
        };
        let node_number = u32::try_from(node).expect("there are three servers");
        let op = self.work.recorder.invoke(PROCESSES_PER_NODE * node_number + self.number, call);
        let reply = match conn.try_send_bytes(&encode(request)) {
            Ok(()) => conn.recv_within(within),
            Err(_) => Err(RecvError::Closed),
        };
        let recorder = &self.work.recorder;
        let answer = match &reply {
            Ok(Reply::Int(token @ 1..)) if acquires => {
                let token = u64::try_from(*token).expect("it is positive");
                recorder.ok(op, Some(token));
                Answer::Token(token)
            }
            Ok(Reply::Int(1..)) => {
                recorder.ok(op, None);
                Answer::Done
            }
            Ok(Reply::Int(_) | Reply::Nil) => {
                recorder.refused(op);
                Answer::No
            }
            Ok(Reply::Array(_)) => {
                recorder.queued(op);
                Answer::Queued
            }
            // An error refuses an acquisition, unless the server ends a wait from outside: CLIENT UNBLOCK may hit a request in the instant of
            // its grant. Of a hold an error says nothing, neither that it is there nor that it is gone.
            Ok(Reply::Error { code, .. }) if acquires && code != "UNBLOCKED" => {
                recorder.refused(op);
                Answer::Unknown
            }
            Ok(Reply::Error { .. }) | Err(RecvError::TimedOut | RecvError::Closed) => {
                recorder.unknown(op);
                count(&self.work.counts.unknown);
                Answer::Unknown
            }
            Ok(other) => panic!("worker {} was answered {other}", self.number),
            Err(RecvError::Broken(what)) => panic!("worker {} was sent nonsense: {what}", self.number),
        };
        let is_misplaced = match &reply {
            Ok(reply) => matches!(reply.error_code(), Some("READONLY" | "LOADING" | "MASTERDOWN" | "UNBLOCKED")),
            Err(_) => true,
        };
        if is_misplaced {
            let_pass(Duration::from_millis(self.random.below(20)));
        } else {
            self.conn = Some((conn, node));
        }
        answer
    }

    fn connect(&self) -> Option<(Conn, usize)> {
        let node = self.work.site.primary();
        let gate = usize::try_from(self.number).expect("a worker's number is small");
        let conn = Conn::try_open_raw(self.work.site.gate(gate, node).addr()).ok()?;
        Some((conn, node))
    }

    /// Whether somebody listens to this worker's channel, at the server that is asked.
    fn listens(&mut self) -> bool {
        let asked = self.conn.as_ref().map(|(_, node)| *node).unwrap_or_else(|| self.work.site.primary());
        if self.ears.as_ref().is_some_and(|(_, node)| *node == asked) {
            return true;
        }
        self.ears = None;
        self.conn = self.conn.take().or_else(|| self.connect());
        let Some((mut ears, node)) = self.connect() else {
            let_pass(Duration::from_millis(20));
            return false;
        };
        if self.conn.as_ref().is_none_or(|(_, asked)| *asked != node) {
            // The primary has changed in between: both must be at the same server.
            self.conn = None;
            return false;
        }
        let subscribed = ears.try_send_bytes(&encode(&["SUBSCRIBE", &self.channel])).is_ok();
        if !subscribed || !matches!(ears.recv_within(PATIENCE), Ok(Reply::Array(_))) {
            return false;
        }
        self.ears = Some((Subscriber::subscribed(ears), node));
        true
    }

    /// Waits for the grant that is published; asks again halfway, as the protocol wants.
    fn listen(&mut self, wish: &Wish) -> Heard {
        let deadline = now_ns() + u64::try_from(wish.wait.as_nanos()).expect("a wait is short") / 2;
        while let Some(left_ns) = deadline.checked_sub(now_ns()) {
            let Some((ears, node)) = &mut self.ears else { return Heard::Nothing };
            let node = u32::try_from(*node).expect("there are three servers");
            let payload = match ears.message_within(Duration::from_nanos(left_ns)) {
                Ok(message) => message.payload,
                Err(RecvError::TimedOut) => return Heard::Nothing,
                Err(_) => {
                    self.ears = None;
                    return Heard::Nothing;
                }
            };
            let Ok(message) = OwnerMessage::parse(&payload) else { continue };
            if message.owner != wish.owner.as_bytes() || message.key != wish.lock.name.as_bytes() {
                continue; // late news of a request of before
            }
            match message.notice {
                Notice::Granted { token, .. } => {
                    let call = wish.call(Verb::Acquire).lease_ms(0);
                    let op = self.work.recorder.invoke(PROCESSES_PER_NODE * node + self.number, call);
                    self.work.recorder.ok(op, Some(token.get()));
                    return Heard::Granted(token.get());
                }
                Notice::TimedOut | Notice::Ended(_) => return Heard::Ended,
                Notice::Lost { .. } => {}
            }
        }
        Heard::Nothing
    }
}

/// What a queued request has heard on its channel.
enum Heard {
    Granted(u64),
    Ended,
    Nothing,
}
