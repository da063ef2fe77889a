//! Looks at the primary again and again, past all proxies, and judges what has not happened though it should have.
//!
//! Nothing here is judged by how long the test waited. A waiter that could be granted, a wait that is over and a lease that is over
//! are wrong only if they are seen in several looks in a row: between two looks the server's event loop has turned, and every turn
//! performs what is due. How long something lasted is told by the server. So a busy machine makes the looks rarer, and none of them wrong.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;
use std::time::Duration;

use flock_tests::args;
use flock_tests::reply::Reply;
use flock_tests::resp::Conn;
use flock_tests::server::Info;
use flock_tests::wait::let_pass;

use crate::site::{LOCKS, Lock};
use crate::worker::Work;

const PERIOD: Duration = Duration::from_millis(30);
/// An answer takes longer while the server is stopped or paused.
const LOOK_WITHIN: Duration = Duration::from_secs(60);
/// So often in a row, nothing being suspended at them or in between, makes a violation. Faults that suspend come several times a second,
/// so no bound in seconds would ever be reached; and so many turns of the event loop are more than any.
const LOOKS: u32 = 5;

/// What was seen of a run.
#[derive(Debug, Default)]
pub(crate) struct Audit {
    /// What should not have been seen.
    pub(crate) complaints: Vec<String>,
    pub(crate) looks: u64,
    /// Looks of which the look before, and all in between, was undisturbed too.
    pub(crate) quiet_looks: u64,
    pub(crate) queues: Vec<Queue>,
    /// How late what was due last was performed, in microseconds: seen while nothing was suspended, and at any time.
    pub(crate) lateness_us: Vec<i64>,
    pub(crate) lateness_suspended_us: Vec<i64>,
    /// INFO's counters, summed over all incarnations of all primaries.
    pub(crate) totals: BTreeMap<&'static str, i64>,
}

/// Who waited for a lock at one moment.
#[derive(Clone, Debug)]
pub(crate) struct Queue {
    pub(crate) key: &'static str,
    /// From the front.
    pub(crate) owners: Vec<String>,
    /// The last token that the server had handed out, a little later.
    pub(crate) counter: u64,
}

/// The counters that are summed.
const COUNTERS: [&str; 12] = [
    "flock_grants",
    "flock_handoffs",
    "flock_releases",
    "flock_renewals",
    "flock_renewals_lost",
    "flock_expired",
    "flock_timed_out",
    "flock_waits_ended",
    "flock_removed",
    "flock_put_back",
    "flock_undelivered",
    "flock_panics_caught",
];

/// Who looks.
pub(crate) struct Auditor<'a> {
    work: &'a Work,
    audit: Audit,
    streaks: Streaks,
    /// Counters at the last look, by server; they start anew with the process.
    counters: BTreeMap<(usize, &'static str), i64>,
    last_queue: BTreeMap<&'static str, Vec<String>>,
    last_lateness: i64,
    /// What the site said at the last look.
    undisturbed: Option<u64>,
}

impl<'a> Auditor<'a> {
    pub(crate) fn new(work: &'a Work) -> Auditor<'a> {
        Auditor {
            work,
            audit: Audit::default(),
            streaks: Streaks::default(),
            counters: BTreeMap::new(),
            last_queue: BTreeMap::new(),
            last_lateness: 0,
            undisturbed: None,
        }
    }

    /// Looks until the run is over.
    pub(crate) fn run(mut self) -> Audit {
        while !self.work.site.is_over() {
            let node = self.work.site.primary();
            self.streaks = Streaks::default();
            self.undisturbed = None;
            if let Some(mut conn) = self.work.site.admin(node) {
                while !self.work.site.is_over() && self.work.site.primary() == node && self.look(&mut conn, node) {
                    let_pass(PERIOD);
                }
            }
            let_pass(PERIOD);
        }
        self.audit
    }

    /// False if the server is gone.
    fn look(&mut self, conn: &mut Conn, node: usize) -> bool {
        let mut seen = BTreeMap::new();
        for lock in &LOCKS {
            let Some(info) = answer(conn, &args!["FLOCK.INFO", lock.name, "LIMIT", 1000]) else { return false };
            if matches!(info, Reply::Array(_)) {
                let sent_again = self.work.sent_again.lock().unwrap_or_else(PoisonError::into_inner);
                seen.extend(wrongs(lock, &info, &sent_again));
                drop(sent_again);
                self.note_queue(lock, &info);
            }
        }
        let Some(Reply::Bulk(info)) = answer(conn, &args!["INFO", "flock"]) else { return false };
        let undisturbed = self.work.site.undisturbed();
        // Since the look before, this one included.
        let is_quiet = undisturbed.is_some() && self.undisturbed == undisturbed;
        self.undisturbed = undisturbed;
        self.audit.looks += 1;
        self.audit.quiet_looks += u64::from(is_quiet);
        self.read_counters(node, &String::from_utf8_lossy(&info), is_quiet);
        self.audit.complaints.extend(self.streaks.look(seen, is_quiet));
        true
    }

    fn note_queue(&mut self, lock: &Lock, info: &Reply) {
        let waiters = info.field("waiters").as_array();
        let queue: Vec<_> = waiters.iter().map(|waiter| waiter.field("owner").as_str().to_owned()).collect();
        if queue.len() > 1 && self.last_queue.get(lock.name) != Some(&queue) {
            self.last_queue.insert(lock.name, queue.clone());
            self.audit.queues.push(Queue { key: lock.name, owners: queue, counter: u64::MAX });
        }
    }

    fn read_counters(&mut self, node: usize, info: &str, is_quiet: bool) {
        let field = |name: &str| {
            let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|value| value.trim().parse::<i64>().ok()).unwrap_or(0)
        };
        let counter = u64::try_from(field("flock_counter")).unwrap_or(0);
        for queue in self.audit.queues.iter_mut().rev().take_while(|queue| queue.counter == u64::MAX) {
            queue.counter = counter;
        }
        for name in COUNTERS {
            let now = field(name);
            let last = self.counters.insert((node, name), now).unwrap_or(0);
            let more = if now >= last { now - last } else { now };
            *self.audit.totals.entry(name).or_default() += more;
        }
        let late = field("flock_lateness_last_us");
        if late != self.last_lateness {
            self.last_lateness = late;
            if is_quiet { &mut self.audit.lateness_us } else { &mut self.audit.lateness_suspended_us }.push(late);
        }
    }
}

/// What has been seen in every look for some time.
#[derive(Debug, Default)]
struct Streaks {
    /// In how many looks, and what the server's clock said at the first, in milliseconds.
    seen: BTreeMap<String, (u32, i64)>,
}

impl Streaks {
    /// Takes in what one look has seen; answers what has now been seen too often. A look that was disturbed ends all streaks.
    fn look(&mut self, seen: BTreeMap<String, i64>, is_quiet: bool) -> Vec<String> {
        let earlier = std::mem::take(&mut self.seen);
        let mut complaints = Vec::new();
        for (what, now_ms) in seen.into_iter().filter(|_| is_quiet) {
            let (looks, since_ms) = earlier.get(&what).copied().unwrap_or((0, now_ms));
            // A streak ends with the complaint, so that each wrong is told once.
            if looks + 1 >= LOOKS {
                complaints.push(format!("{what}: seen {} times in {} ms", looks + 1, now_ms - since_ms));
            } else {
                self.seen.insert(what, (looks + 1, since_ms));
            }
        }
        complaints
    }
}

/// What is wrong with a lock if it lasts, with a time of the server's in milliseconds.
fn wrongs(lock: &Lock, info: &Reply, sent_again: &BTreeSet<String>) -> BTreeMap<String, i64> {
    let mut seen = BTreeMap::new();
    let holders = info.field("holders").as_array();
    let waiters = info.field("waiters").as_array();
    for holder in holders.iter().filter(|holder| holder.field("state").as_str() == "expired") {
        let owner = holder.field("owner").as_str();
        seen.insert(format!("{} is held beyond its lease by {owner}", lock.name), holder.field("held_ms").as_int());
    }
    for waiter in waiters {
        let (owner, waiting_ms) = (waiter.field("owner").as_str(), waiter.field("waiting_ms").as_int());
        // Of a request that was sent again, nobody knows how long it may wait.
        let wait_ms = owner.strip_prefix("b-").and_then(|rest| rest.rsplit('-').next()?.parse::<i64>().ok());
        if wait_ms.is_some_and(|wait_ms| waiting_ms > wait_ms) && !sent_again.contains(owner) {
            seen.insert(format!("{owner} waits for {} beyond its wait", lock.name), waiting_ms);
        }
    }
    if let Some(first) = waiters.first() {
        let owner = first.field("owner").as_str();
        // Beside readers, a reader in QUEUE for whom nobody listens is passed over, as long as somebody behind can be heard. A free
        // lock goes to the front if nobody can.
        let joins = info.field("mode").as_str() == "shared"
            && first.field("mode").as_str() == "shared"
            && owner.starts_with("b-")
            && lock.limit.is_none_or(|limit| holders.len() < limit as usize);
        let in_grace = info.field("grace_left_ms").as_int() > 0;
        if (holders.is_empty() || joins) && !in_grace {
            let beside = holders.len();
            let what = format!("{} could be granted to {owner} beside {beside} holders", lock.name);
            seen.insert(what, first.field("waiting_ms").as_int());
        }
    }
    seen
}

fn answer(conn: &mut Conn, args: &[Vec<u8>]) -> Option<Reply> {
    conn.try_send_bytes(&flock_tests::args::encode(args)).ok()?;
    conn.recv_within(LOOK_WITHIN).ok()
}

/// What a server must show when all is over: nothing held, nobody waiting.
pub(crate) fn is_idle(conn: &mut Conn) -> bool {
    let info = Info::ask(conn, "flock");
    ["flock_held", "flock_waiters", "flock_blocked_clients"].iter().all(|name| info.number(name) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCK: Lock = Lock { name: "k", limit: Some(2) };

    fn map(fields: &[(&str, Reply)]) -> Reply {
        Reply::Map(fields.iter().map(|(name, value)| (Reply::bulk(name), value.clone())).collect())
    }

    /// FLOCK.INFO of a lock with these holders' states, and these waiters, all sharing.
    fn info(holders: &[&str], waiters: &[(&str, i64)]) -> Reply {
        let text = |text: &str| Reply::bulk(text);
        let holder =
            |state: &&str| map(&[("owner", text("holder")), ("state", text(state)), ("held_ms", Reply::Int(7))]);
        let waiter = |(owner, waiting_ms): &(&str, i64)| {
            map(&[("owner", text(owner)), ("mode", text("shared")), ("waiting_ms", Reply::Int(*waiting_ms))])
        };
        map(&[
            ("mode", text(if holders.is_empty() { "free" } else { "shared" })),
            ("grace_left_ms", Reply::Int(0)),
            ("holders", Reply::Array(holders.iter().map(holder).collect())),
            ("waiters", Reply::Array(waiters.iter().map(waiter).collect())),
        ])
    }

    fn seen(info: &Reply) -> Vec<String> {
        wrongs(&LOCK, info, &BTreeSet::from(["b-1-9-50".to_owned()])).into_keys().collect()
    }

    #[test]
    fn every_wrong_is_seen_and_nothing_else() {
        assert_eq!(seen(&info(&["held", "held"], &[("q-1-1", 10)])), Vec::<String>::new());
        assert_eq!(seen(&info(&["held"], &[("b-1-1-50", 10)])), ["k could be granted to b-1-1-50 beside 1 holders"]);
        assert_eq!(seen(&info(&["held"], &[("q-1-1", 10)])), Vec::<String>::new());
        assert_eq!(seen(&info(&[], &[("q-1-1", 10)])), ["k could be granted to q-1-1 beside 0 holders"]);
        assert_eq!(seen(&info(&["expired", "held"], &[])), ["k is held beyond its lease by holder"]);
        assert_eq!(seen(&info(&["held", "held"], &[("b-1-1-50", 50)])), Vec::<String>::new());
        assert_eq!(seen(&info(&["held", "held"], &[("b-1-1-50", 51)])), ["b-1-1-50 waits for k beyond its wait"]);
        // Sent again: its wait began anew.
        assert_eq!(seen(&info(&["held", "held"], &[("b-1-9-50", 51)])), Vec::<String>::new());
    }

    #[test]
    fn wrong_that_lasts_is_told_and_one_that_goes_by_is_not() {
        let wrong = |at_ms| BTreeMap::from([("wrong".to_owned(), at_ms)]);
        let mut streaks = Streaks::default();
        for at_ms in [0, 30, 60, 90] {
            assert_eq!(streaks.look(wrong(at_ms), true), Vec::<String>::new());
        }
        assert_eq!(streaks.look(wrong(120), true), ["wrong: seen 5 times in 120 ms"]);
        for disturbance in [(BTreeMap::new(), true), (wrong(0), false)] {
            let mut streaks = Streaks::default();
            for at_ms in [0, 30, 60, 90] {
                streaks.look(wrong(at_ms), true);
            }
            streaks.look(disturbance.0, disturbance.1);
            assert_eq!(streaks.look(wrong(150), true), Vec::<String>::new());
        }
    }
}
