//! The checker against a simulated lock server: right ones are never accused, wrong ones are found out.
//!
//! Clients, a network with delays and lost replies, and a server that grants shared and exclusive leases, all in virtual time.
//! The server has a switch for each way to be wrong.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use super::{Rules, Violation, check};
use crate::history::{Call, Event, Mode, Phase, Verb};
use crate::random::Random;

const CLIENTS: u32 = 6;
const KEYS: [&str; 2] = ["k", "l"];
const MS: u64 = 1_000_000;
const STEPS: usize = 4000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    TokenRepeats,
    TokenFalls,
    LeaseEndsEarly,
    ReleaseEndsAll,
    WriterBesideReaders,
}

struct Hold {
    owner: String,
    token: u64,
    mode: Mode,
    deadline: u64,
}

struct Server {
    bug: Bug,
    counter: u64,
    holds: BTreeMap<String, Vec<Hold>>,
}

impl Server {
    fn perform(&mut self, now: u64, call: &Call, random: &mut Random) -> Phase {
        let holds = self.holds.entry(call.key.clone()).or_default();
        holds.retain(|hold| hold.deadline > now);
        let mine = holds.iter().position(|hold| hold.owner == call.owner);
        let lease = call.lease_ms.unwrap_or(0) * MS;
        let lease = if self.bug == Bug::LeaseEndsEarly { lease / 2 } else { lease };
        match (call.verb, mine) {
            (Verb::Acquire, Some(index)) => {
                let hold = &mut holds[index];
                hold.deadline = hold.deadline.max(now + lease);
                Phase::Ok { token: Some(hold.token) }
            }
            (Verb::Acquire, None) => {
                let beside = |hold: &Hold| hold.mode == Mode::Shared && call.mode == Mode::Shared;
                let careless = self.bug == Bug::WriterBesideReaders && call.mode == Mode::Exclusive;
                let fits = |hold: &Hold| beside(hold) || careless && hold.mode == Mode::Shared;
                if !holds.iter().all(fits) {
                    return Phase::Refused;
                }
                self.counter = match self.bug {
                    Bug::TokenRepeats if random.one_in(10) => self.counter,
                    Bug::TokenFalls if random.one_in(10) => self.counter - 150,
                    _ => self.counter + 1,
                };
                let token = self.counter;
                // A fallen counter must not repeat a token too: that would be another violation.
                self.counter += u64::from(self.bug == Bug::TokenFalls) * 100;
                holds.push(Hold { owner: call.owner.clone(), token, mode: call.mode, deadline: now + lease });
                Phase::Ok { token: Some(token) }
            }
            (Verb::Renew, Some(index)) => {
                holds[index].deadline = now + lease;
                Phase::Ok { token: None }
            }
            (Verb::Release, Some(index)) => {
                holds.remove(index);
                if self.bug == Bug::ReleaseEndsAll {
                    holds.clear();
                }
                Phase::Ok { token: None }
            }
            _ => Phase::Refused,
        }
    }
}

/// What a client does next: a new acquisition now and then, a retry after a lost reply, else something with its hold.
struct Client {
    call: Call,
    acquisitions: u64,
    /// What it knows of the last acquisition: nothing after a lost reply.
    holds: Option<bool>,
}

impl Client {
    fn next(&mut self, id: u32, random: &mut Random) -> Call {
        let verb = match self.holds {
            None if !random.one_in(3) => return self.call.clone(),
            Some(true) if random.one_in(2) => Verb::Renew,
            Some(true) => Verb::Release,
            None | Some(false) => Verb::Acquire,
        };
        if verb == Verb::Acquire {
            self.acquisitions += 1;
            self.call = Call::new(verb, random.pick(&KEYS), &format!("{id}-{}", self.acquisitions));
            if random.one_in(2) {
                self.call = self.call.clone().shared();
            }
        }
        let mut call = self.call.clone().lease_ms(5 + random.below(40));
        call.verb = verb;
        if verb == Verb::Acquire {
            self.call = call.clone();
        }
        call
    }

    fn hears(&mut self, verb: Verb, phase: &Phase) {
        match (verb, phase) {
            (Verb::Acquire, Phase::Ok { .. }) => self.holds = Some(true),
            (Verb::Acquire, Phase::Unknown) => self.holds = None,
            (Verb::Renew, Phase::Ok { .. } | Phase::Unknown) => {}
            _ => self.holds = Some(false),
        }
    }
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Send(u32),
    Perform(u32, u64),
    Hear(u32, u64),
}

fn simulate(seed: u64, bug: Bug) -> Vec<Event> {
    let mut random = Random::from_seed(seed);
    let mut server = Server { bug, counter: 1000, holds: BTreeMap::new() };
    let client = |_| Client { call: Call::new(Verb::Acquire, "k", ""), acquisitions: 0, holds: Some(false) };
    let mut clients: Vec<_> = (0..CLIENTS).map(client).collect();
    let mut agenda: BinaryHeap<_> = (0..CLIENTS).map(|id| Reverse((0, Step::Send(id)))).collect();
    let mut calls: BTreeMap<u64, Call> = BTreeMap::new();
    let mut answers: BTreeMap<u64, Phase> = BTreeMap::new();
    let mut events = Vec::new();
    let mut next_op = 0;
    for _ in 0..STEPS {
        let Some(Reverse((now, step))) = agenda.pop() else {
            break;
        };
        let mut record = |process, op, phase| {
            events.push(Event { at_ns: now, process, op, phase });
        };
        match step {
            Step::Send(id) => {
                let op = next_op;
                next_op += 1;
                let call = clients[id as usize].next(id, &mut random);
                record(id, op, Phase::Invoke(call.clone()));
                calls.insert(op, call);
                // Some requests are on their way for longer than their client waits.
                let way_max_ms = if random.one_in(10) { 30 } else { 3 };
                let way = random.below(way_max_ms * MS);
                let lost = random.one_in(8);
                agenda.push(Reverse((now + way, Step::Perform(id, op))));
                if lost {
                    answers.insert(op, Phase::Unknown);
                    agenda.push(Reverse((now + 10 * MS, Step::Hear(id, op))));
                }
            }
            Step::Perform(id, op) => {
                let answer = server.perform(now, &calls[&op], &mut random);
                if let std::collections::btree_map::Entry::Vacant(entry) = answers.entry(op) {
                    entry.insert(answer);
                    agenda.push(Reverse((now + random.below(3 * MS), Step::Hear(id, op))));
                }
            }
            Step::Hear(id, op) => {
                record(id, op, answers[&op].clone());
                clients[id as usize].hears(calls[&op].verb, &answers[&op]);
                agenda.push(Reverse((now + random.below(20 * MS), Step::Send(id))));
            }
        }
    }
    events
}

fn rules() -> Rules {
    // The run stops with operations under way.
    Rules { answered: false, ..Rules::default() }
}

#[test]
fn right_server_is_never_accused() {
    for seed in 0..60 {
        let violations = check(&simulate(seed, Bug::None), &rules());
        assert_eq!(violations, [], "seed {seed}");
    }
}

/// The kinds of violation that the checker sees in some runs of a wrong server.
fn kinds(bug: Bug) -> BTreeSet<&'static str> {
    (0..20)
        .flat_map(|seed| check(&simulate(seed, bug), &rules()))
        .map(|violation| match violation {
            Violation::TokenTwice(..) => "token twice",
            Violation::TokenOrder { .. } => "token order",
            Violation::Overlap(..) => "overlap",
            Violation::LostEarly(..) => "lost early",
            other => panic!("{bug:?} should not look like {other}"),
        })
        .collect()
}

#[test]
fn wrong_servers_are_found_out() {
    assert_eq!(kinds(Bug::TokenRepeats), BTreeSet::from(["token twice"]));
    assert_eq!(kinds(Bug::TokenFalls), BTreeSet::from(["token order"]));
    assert_eq!(kinds(Bug::WriterBesideReaders), BTreeSet::from(["overlap"]));
    // Who lost the lock hears of it at the next renewal, or another has it meanwhile.
    assert_eq!(kinds(Bug::LeaseEndsEarly), BTreeSet::from(["lost early", "overlap"]));
    assert_eq!(kinds(Bug::ReleaseEndsAll), BTreeSet::from(["lost early", "overlap"]));
}
