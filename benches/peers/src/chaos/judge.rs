//! What came of a run: from what the workers say that they did, and what the server was seen to hold.
//!
//! * An *orphan* is a hold that the server keeps for longer than [`ORPHANED_AFTER`] though nobody uses it: its acquisition was given up,
//!   or its holder has given it back or dropped it. (What lasts shorter is a round trip, or a claim.)
//! * A *holder that went on after its loss* acted, and somebody else had been granted the lock before that: the grant was known to its
//!   client by then.
//! * Who still waits when everybody else is served and gone is *hung*.

use std::collections::BTreeMap;
use std::fmt;

const ORPHANED_AFTER: u64 = 1_000_000_000;

/// What a task did.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    Asked,
    GaveUp,
    Failed,
    Granted,
    Acted,
    Dropped,
    Released,
}

const WORDS: [(What, &str); 7] = [
    (What::Asked, "asked"),
    (What::GaveUp, "gave-up"),
    (What::Failed, "failed"),
    (What::Granted, "granted"),
    (What::Acted, "acted"),
    (What::Dropped, "dropped"),
    (What::Released, "released"),
];

/// Something that a task did, at a time of the machine's monotonic clock, with what the server calls the hold.
pub(crate) struct Event {
    pub(crate) at: u64,
    pub(crate) what: What,
    pub(crate) lock: String,
    pub(crate) name: String,
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = WORDS.iter().find(|(what, _)| *what == self.what).map_or("", |(_, word)| word);
        write!(f, "{} {word} {} {}", self.at, self.lock, self.name)
    }
}

impl Event {
    /// Of a line of a worker.
    pub(crate) fn parse(line: &str) -> Event {
        let mut words = line.split(' ');
        let mut next = || words.next().unwrap_or_else(|| panic!("a worker said: {line}"));
        let (at, word, lock, name) = (next(), next(), next(), next());
        let what = WORDS.iter().find(|(_, known)| *known == word).unwrap_or_else(|| panic!("a worker said: {line}")).0;
        Event { at: at.parse().expect("a time"), what, lock: lock.to_owned(), name: name.to_owned() }
    }
}

/// A hold that the server was seen to have.
pub(crate) struct Sighting {
    pub(crate) at: u64,
    pub(crate) holder: String,
}

/// What came of it.
#[derive(Default)]
pub(crate) struct Verdict {
    pub(crate) acquisitions: usize,
    pub(crate) given_up: usize,
    /// Holds that were left without anybody: whose acquisition was given up, whose holder dropped them, whose holder gave them back.
    orphans: [usize; 3],
    orphans_ns: u64,
    pub(crate) waiting: usize,
    holders_after_loss: usize,
    actions_after_loss: usize,
}

impl Verdict {
    pub(crate) fn figures(&self) -> String {
        let [given_up, dropped, released] = self.orphans;
        let seconds = self.orphans_ns as f64 / 1e9;
        format!(
            "{given_up},{dropped},{released},{seconds:.1},{},{},{}",
            self.waiting, self.holders_after_loss, self.actions_after_loss
        )
    }
}

/// How somebody used a hold.
struct Use {
    lock: String,
    granted: u64,
    acted: Vec<u64>,
    ended: Option<(u64, What)>,
}

pub(crate) fn judge(workers: &[Vec<Event>], sightings: &[Sighting]) -> Verdict {
    let events = || workers.iter().flatten();
    let count = |what| events().filter(|event| event.what == what).count();
    let [asked, granted, given_up, failed] = [What::Asked, What::Granted, What::GaveUp, What::Failed].map(count);
    let waiting = asked - granted - given_up - failed;
    let mut verdict = Verdict { acquisitions: granted, given_up, waiting, ..Verdict::default() };

    let mut uses: BTreeMap<&str, Use> = BTreeMap::new();
    for event in events() {
        match event.what {
            What::Granted => {
                let new = Use { lock: event.lock.clone(), granted: event.at, acted: Vec::new(), ended: None };
                uses.insert(&event.name, new);
            }
            What::Acted | What::Dropped | What::Released => {
                let hold = uses.get_mut(event.name.as_str()).expect("who has a lock was granted it");
                match event.what {
                    What::Acted => hold.acted.push(event.at),
                    what => hold.ended = Some((event.at, what)),
                }
            }
            What::Asked | What::GaveUp | What::Failed => {}
        }
    }

    let mut seen: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for sighting in sightings {
        seen.entry(&sighting.holder).or_insert((sighting.at, sighting.at)).1 = sighting.at;
    }
    for (name, (first, last)) in seen {
        let (since, cause) = match uses.get(name).map(|hold| hold.ended) {
            None => (first, 0),
            Some(None) => continue,
            Some(Some((at, What::Dropped))) => (at, 1),
            Some(Some((at, _))) => (at, 2),
        };
        let alone = last.saturating_sub(since);
        if alone > ORPHANED_AFTER {
            verdict.orphans[cause] += 1;
            verdict.orphans_ns += alone;
        }
    }

    for hold in uses.values() {
        let next = uses.values().filter(|other| other.lock == hold.lock && other.granted > hold.granted);
        let Some(lost) = next.map(|other| other.granted).min() else { continue };
        let actions = hold.acted.iter().filter(|at| **at > lost).count();
        verdict.actions_after_loss += actions;
        verdict.holders_after_loss += usize::from(actions > 0);
    }
    verdict
}
