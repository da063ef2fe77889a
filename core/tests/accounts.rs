//! What the shell asks of the table apart from decisions: how much memory it takes, when it must be woken, whether connections matter,
//! which bounds hold. And that what it gives back is used again.

use std::num::NonZeroU64;

use flock_core::deadlines::Deadlines;
use flock_core::lock::Start;
use flock_core::request::ReleaseScope;
use flock_core::snapshot::Image;
use flock_core::table::{Caller, Incredible};
use flock_core::token::WallClock;
use flock_core::{
    Acquire, Acquired, Change, Deaf, Due, Effects, EndReason, Grant, Limits, Lock, LockId, LossReason, Millis, Mode,
    Name, Owner, Place, Refusal, Release, Renew, Revoke, Table, Time, Token, Wait,
};

const LEASE: Millis = Millis(1000);
/// What a lock takes in the table, and its deadline: as the tests beside the code have it.
const LOCK_BYTES: usize = 96 + 12;

fn started() -> Table {
    let mut table = Table::new(Limits::DEFAULT);
    let _mark = table.promoted(Time::ZERO, WallClock::from_unix_us(0), Millis(0));
    table
}

fn at(ms: u64) -> Time {
    Time::from_us(ms * 1000)
}

fn place(key: &[u8], lock: Option<LockId>) -> Place<'_> {
    Place { db: 0, key, lock }
}

fn grant(table: &mut Table, request: &Acquire<'_>, caller: Caller) -> (LockId, Effects) {
    let decision = table.acquire(Time::ZERO, place(request.key, None), request, caller, &mut Deaf);
    assert!(matches!(decision.answer, Ok(Acquired::Granted(_))), "{:?}", decision.answer);
    (decision.lock.expect("what is granted is there"), decision.effects)
}

fn granted(table: &mut Table, key: &[u8], owner: &[u8]) -> LockId {
    let (lock, effects) = grant(table, &Acquire::new(key, owner, LEASE), Caller::default());
    table.recycle(effects);
    lock
}

fn granted_with_id(table: &mut Table) -> LockId {
    let request = Acquire { id: Some(b"i"), ..Acquire::new(b"r", b"o", LEASE) };
    let (lock, effects) = grant(table, &request, Caller::default());
    table.recycle(effects);
    lock
}

fn release(table: &mut Table, key: &[u8], owner: &[u8], lock: LockId) {
    let request = Release { key, owner, token: None, scope: ReleaseScope::Plain };
    let decision = table.release(at(1), place(key, Some(lock)), &request, &mut Deaf);
    assert_eq!(decision.answer, Ok(true));
    table.freed(lock);
    table.recycle(decision.effects);
}

#[test]
fn lock_takes_its_place_its_long_name_and_its_long_owner() {
    let mut table = started();
    let short = granted(&mut table, b"k", b"o");
    let long = granted(&mut table, &[b'k'; 100], &[b'o'; 200]);
    assert_eq!(table.memory_of(short), LOCK_BYTES);
    assert_eq!(table.memory_of(long), LOCK_BYTES + 100 + 200);
    release(&mut table, b"k", b"o", short);
    assert_eq!(table.memory_of(short), 0);
}

#[test]
fn memory_of_the_table_follows_what_is_held() {
    let mut table = started();
    let empty = table.heap_bytes();
    let keys: Vec<_> = (0..10_000_u32).map(u32::to_be_bytes).collect();
    let locks: Vec<_> = keys.iter().map(|key| granted(&mut table, key, b"o")).collect();
    let full = table.heap_bytes() - empty;
    assert!(full > keys.len() * LOCK_BYTES && full < keys.len() * LOCK_BYTES * 11 / 10 + 65_536, "{full}");
    for (key, lock) in keys.iter().zip(locks) {
        release(&mut table, key, b"o", lock);
    }
    assert!(table.heap_bytes() < empty + 65_536, "{}", table.heap_bytes());
}

#[test]
fn deadlines_of_locks_that_are_free_do_not_pile_up_while_one_is_held() {
    let mut table = started();
    granted(&mut table, b"kept", b"o");
    let keys: Vec<_> = (0..10_000_u32).map(u32::to_be_bytes).collect();
    let locks: Vec<_> = keys.iter().map(|key| granted(&mut table, key, b"o")).collect();
    let full = table.heap_bytes();
    for (key, lock) in keys.iter().zip(locks) {
        release(&mut table, key, b"o", lock);
    }
    assert!(table.heap_bytes() + 60_000 < full, "{full} bytes, and {} when they are free", table.heap_bytes());
}

#[test]
fn locks_that_come_and_go_take_no_deadline_from_those_that_stay() {
    let mut table = started();
    let kept: Vec<_> = (0..2000_u32).map(|number| [b"kept", &number.to_be_bytes()[..]].concat()).collect();
    let kept: Vec<_> = kept.iter().map(|key| (key, granted(&mut table, key, b"o"))).collect();
    for number in 0..20_000_u32 {
        let key = number.to_be_bytes();
        let lock = granted(&mut table, &key, b"o");
        release(&mut table, &key, b"o", lock);
    }
    assert_eq!(table.held(), kept.len());
    for (key, lock) in kept {
        let next = table.next_deadline().expect("something is held");
        assert!(next > at(998) && next < at(1002), "{next:?}");
        release(&mut table, key, b"o", lock);
    }
    assert_eq!(table.held(), 0);
    assert_eq!(table.next_deadline(), None, "what is free has no deadline");
}

#[test]
fn replica_forgets_the_deadline_of_a_lock_that_is_free() {
    let mut replica = Table::new(Limits::DEFAULT);
    let token = Token::MIN;
    let (owner, deadline, terms) = (Owner::new(b"o"), None, None);
    let grant = Change::Grant(Grant { owner, mode: Mode::Exclusive, token, lease: LEASE, deadline, terms });
    let lock = replica.apply(place(b"k", None), &grant, Start::Now(Time::ZERO)).lock;
    assert!(replica.next_deadline().is_some());
    let end = Change::End { token: Some(token) };
    drop(replica.apply(place(b"k", lock), &end, Start::Now(at(1))));
    assert_eq!(replica.next_deadline(), None);
}

#[test]
fn each_kind_of_end_is_counted() {
    let mut table = started();
    let lock = granted(&mut table, b"k", b"o");
    release(&mut table, b"k", b"o", lock);
    let lock = granted(&mut table, b"k", b"o");
    drop(table.revoke(at(1), place(b"k", Some(lock)), &Revoke { key: b"k", owner: None }, &mut Deaf));
    table.freed(lock);
    let lock = granted(&mut table, b"k", b"o");
    drop(table.look(at(2000), place(b"k", Some(lock)), None, &mut Deaf));
    table.freed(lock);
    let lock = granted(&mut table, b"k", b"o");
    let token = table.lock(lock).and_then(|lock| lock.holds().next()).expect("it is held").token;
    table.undelivered(lock, token);
    drop(table.look(at(1), place(b"k", Some(lock)), None, &mut Deaf));
    let stats = table.stats();
    assert_eq!((stats.releases, stats.revoked, stats.expired, stats.undelivered), (1, 1, 1, 1));
}

#[test]
fn next_deadline_is_the_earliest_of_leases_and_waits() {
    let mut table = started();
    assert_eq!(table.next_deadline(), None);
    let lock = granted(&mut table, b"k", b"o");
    // Within a step, in which deadlines are kept: 1.024 ms.
    let lease_ends = table.next_deadline().expect("a lease");
    assert!(lease_ends > at(998) && lease_ends < at(1002), "{lease_ends:?}");
    let wait = Acquire { wait: Wait::Block(Some(Millis(300))), ..Acquire::new(b"k", b"p", LEASE) };
    let caller = Caller { blocked: 7, client: None };
    let queued = table.acquire(Time::ZERO, place(b"k", Some(lock)), &wait, caller, &mut Deaf);
    assert!(matches!(queued.answer, Ok(Acquired::Queued { .. })), "{:?}", queued.answer);
    let wait_ends = table.next_deadline().expect("a wait");
    assert!(wait_ends > at(298) && wait_ends < at(302), "{wait_ends:?}");
    // What is noted wants to be looked at now.
    table.undelivered(lock, table.lock(lock).and_then(|lock| lock.holds().next()).expect("it is held").token);
    assert_eq!(table.next_deadline(), Some(Time::ZERO));
}

#[test]
fn request_that_is_repeated_has_waited_since_the_first() {
    let mut table = started();
    let lock = granted(&mut table, b"k", b"o");
    let wait = Acquire { wait: Wait::Block(None), ..Acquire::new(b"k", b"p", LEASE) };
    for (blocked, now) in [(7, at(1)), (8, at(100))] {
        let caller = Caller { blocked, client: None };
        drop(table.acquire(now, place(b"k", Some(lock)), &wait, caller, &mut Deaf));
    }
    let queue = table.queues().of_lock(lock).expect("somebody waits");
    let waiters: Vec<_> = table.queues().iter(queue).map(|(_, waiter)| waiter.since).collect();
    assert_eq!(waiters, [at(1)]);
}

#[test]
fn connections_matter_only_where_a_hold_is_bound_to_one() {
    let mut table = started();
    granted(&mut table, b"k", b"o");
    assert!(!table.has_sessions());
    let bound = Acquire { session: Some(Millis(10)), ..Acquire::new(b"l", b"o", LEASE) };
    let (lock, effects) = grant(&mut table, &bound, Caller { blocked: 0, client: NonZeroU64::new(5) });
    table.recycle(effects);
    assert!(table.has_sessions());
    release(&mut table, b"l", b"o", lock);
    assert!(!table.has_sessions());
}

#[test]
fn name_of_some_lock_is_that_of_one_that_is_held_or_waited_for() {
    let mut table = started();
    assert!(table.any_name().is_none());
    let lock = granted(&mut table, b"held", b"o");
    assert_eq!(table.any_name().map(Name::key), Some(&b"held"[..]));
    release(&mut table, b"held", b"o", lock);
    assert!(table.any_name().is_none());
    // Nothing is granted for a while, so somebody waits though nobody holds.
    let _mark = table.promoted(at(2), WallClock::from_unix_us(0), LEASE);
    assert_eq!(table.grace_until(), Some(at(2).after(LEASE)));
    let wait = Acquire { wait: Wait::Block(None), ..Acquire::new(b"waited for", b"p", LEASE) };
    let caller = Caller { blocked: 7, client: None };
    let queued = table.acquire(at(3), place(b"waited for", None), &wait, caller, &mut Deaf);
    assert!(matches!(queued.answer, Ok(Acquired::Queued { .. })), "{:?}", queued.answer);
    assert_eq!(table.any_name().map(Name::key), Some(&b"waited for"[..]));
}

/// RENAME and MOVE carry a value along, an ended one too, before it is deleted.
#[test]
fn ended_lock_that_was_carried_elsewhere_is_granted_under_its_new_name() {
    let mut table = started();
    let lock = granted(&mut table, b"k", b"o");
    let request = Release { key: b"k", owner: b"o", token: None, scope: ReleaseScope::Plain };
    drop(table.release(at(1), place(b"k", Some(lock)), &request, &mut Deaf));
    assert_eq!(table.name(lock).map(Name::key), Some(&b"k"[..]));
    let moved = Acquire::new(b"moved", b"p", LEASE);
    let decision = table.acquire(at(2), place(b"moved", Some(lock)), &moved, Caller::default(), &mut Deaf);
    assert!(matches!(decision.answer, Ok(Acquired::Granted(_))), "{:?}", decision.answer);
    assert_eq!(table.name(lock).map(Name::key), Some(&b"moved"[..]));
}

#[test]
fn waiters_take_memory() {
    let mut table = started();
    let lock = granted(&mut table, b"k", b"o");
    let before = table.heap_bytes();
    let owners: Vec<_> = (0..5000_u32).map(u32::to_be_bytes).collect();
    for (blocked, owner) in (1..).zip(&owners) {
        let wait = Acquire { wait: Wait::Block(Some(LEASE)), ..Acquire::new(b"k", owner, LEASE) };
        let caller = Caller { blocked, client: None };
        drop(table.acquire(Time::ZERO, place(b"k", Some(lock)), &wait, caller, &mut Deaf));
    }
    let full = table.heap_bytes() - before;
    // A place in the queue and one in the heap of deadlines, an entry by owner, and a little for the queue itself.
    assert_eq!(full / owners.len(), 165);
}

/// A message that nobody hears would grant to somebody who does not know.
#[test]
fn waiter_whose_channel_nobody_hears_is_passed_over() {
    let mut table = started();
    let lock = granted(&mut table, b"k", b"o");
    let deaf = Acquire { wait: Wait::Queue(LEASE), channel: Some(b"c"), ..Acquire::new(b"k", b"p", LEASE) };
    for (request, blocked) in [(deaf, 0), (blocking(b"q"), 7)] {
        assert!(matches!(ask(&mut table, at(1), Some(lock), &request, blocked), Ok(Acquired::Queued { .. })));
    }
    let request = Release { key: b"k", owner: b"o", token: None, scope: ReleaseScope::Plain };
    drop(table.release(at(1), place(b"k", Some(lock)), &request, &mut Deaf));
    assert!(table.lock(lock).is_some_and(|lock| lock.held_by(b"q").is_some()));
    assert_eq!((table.stats().grants, table.stats().handoffs), (2, 1));
}

#[test]
fn new_limits_hold_from_then_on() {
    let mut table = started();
    let lock = granted(&mut table, b"k", b"o");
    table.set_limits(Limits { waiters_max: 0, ..Limits::DEFAULT });
    assert_eq!(table.limits().waiters_max, 0);
    let wait = Acquire { wait: Wait::Block(None), ..Acquire::new(b"k", b"p", LEASE) };
    let refused = table.acquire(Time::ZERO, place(b"k", Some(lock)), &wait, Caller::default(), &mut Deaf);
    assert!(matches!(refused.answer, Err(Refusal::QueueFull { .. })), "{:?}", refused.answer);
}

#[test]
fn list_of_effects_that_was_given_back_is_used_again() {
    let mut table = started();
    let owners: Vec<_> = (0..40_u8).map(|number| [number]).collect();
    let shared = |owner| Acquire { mode: Mode::Shared, ..Acquire::new(b"k", owner, LEASE) };
    let lock = grant(&mut table, &shared(b"first"), Caller::default()).0;
    for owner in &owners {
        drop(table.acquire(Time::ZERO, place(b"k", Some(lock)), &shared(owner), Caller::default(), &mut Deaf));
    }
    let ended = table.revoke(at(1), place(b"k", Some(lock)), &Revoke { key: b"k", owner: None }, &mut Deaf);
    assert_eq!(ended.answer, 41);
    table.freed(lock);
    let many = ended.effects.iter().len();
    table.recycle(ended.effects);
    let (_, effects) = grant(&mut table, &Acquire::new(b"l", b"o", LEASE), Caller::default());
    assert!(!effects.is_empty() && effects.iter().len() < many);
    let list = effects.into_vec();
    assert!(list.capacity() >= many, "{} of {many}", list.capacity());
    // Who only looks has nothing to perform.
    let busy =
        table.acquire(Time::ZERO, place(b"m", None), &Acquire::new(b"m", b"o", LEASE), Caller::default(), &mut Deaf);
    let lock = busy.lock;
    let again =
        table.acquire(Time::ZERO, place(b"m", lock), &Acquire::new(b"m", b"p", LEASE), Caller::default(), &mut Deaf);
    assert_eq!(again.answer, Ok(Acquired::Busy));
    assert!(again.effects.is_empty());
}

#[test]
fn heap_of_deadlines_gives_its_memory_back() {
    let mut deadlines = Deadlines::default();
    for number in 0..100_000 {
        deadlines.set(number, at(u64::from(number)), Time::ZERO);
    }
    assert!(deadlines.heap_bytes() >= 100_000 * 12);
    for number in 0..100_000 {
        deadlines.remove(number);
    }
    deadlines.give_back();
    assert!(deadlines.heap_bytes() < 65_536, "{}", deadlines.heap_bytes());
}

/// Asks for `k` with a connection that waits under this number.
fn ask(
    table: &mut Table,
    now: Time,
    lock: Option<LockId>,
    request: &Acquire<'_>,
    blocked: u64,
) -> Result<Acquired, Refusal> {
    let decision = table.acquire(now, place(request.key, lock), request, Caller { blocked, client: None }, &mut Deaf);
    decision.answer
}

fn blocking<'a>(owner: &'a [u8]) -> Acquire<'a> {
    Acquire { wait: Wait::Block(None), ..Acquire::new(b"k", owner, LEASE) }
}

#[test]
fn each_kind_of_answer_is_counted() {
    let mut table = started();
    let lock = Some(granted(&mut table, b"k", b"o"));
    assert_eq!(ask(&mut table, at(1), lock, &Acquire::new(b"k", b"p", LEASE), 0), Ok(Acquired::Busy));
    let anew = Acquire { new: true, ..Acquire::new(b"k", b"o", LEASE) };
    assert_eq!(ask(&mut table, at(1), lock, &anew, 0), Err(Refusal::AlreadyHeld));
    for blocked in [7, 8] {
        assert!(matches!(ask(&mut table, at(1), lock, &blocking(b"p"), blocked), Ok(Acquired::Queued { .. })));
    }
    let stats = table.stats();
    assert_eq!((stats.grants, stats.busy, stats.refused, stats.wait_ended), (1, 1, 1, 1));
    // On channels, too: whoever listens elsewhere now is told there that the older request has ended.
    for channel in [&b"c"[..], b"d"] {
        let wait = Acquire { wait: Wait::Queue(LEASE), channel: Some(channel), ..Acquire::new(b"k", b"q", LEASE) };
        let shared = Acquire { mode: if channel == b"c" { Mode::Shared } else { Mode::Exclusive }, ..wait };
        assert!(matches!(ask(&mut table, at(1), lock, &shared, 0), Ok(Acquired::Queued { .. })));
    }
    assert_eq!(table.stats().wait_ended, 2);
}

#[test]
fn place_in_the_queue_is_never_said_too_low_nor_beyond_its_end() {
    let mut table = started();
    let lock = Some(granted(&mut table, b"k", b"o"));
    let mut waiters = Vec::new();
    for (blocked, owner) in (7..).zip([b"a", b"b", b"c", b"d"]) {
        match ask(&mut table, at(1), lock, &blocking(owner), blocked) {
            Ok(Acquired::Queued { waiter, position }) => waiters.push((waiter, position)),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(waiters.iter().map(|(_, position)| *position).collect::<Vec<_>>(), [1, 2, 3, 4]);
    let position = |table: &Table, place: usize| table.queues().position(waiters[place].0);
    table.left(waiters[1].0);
    // In the middle an upper bound, as one ahead has left; but somebody is behind it.
    assert_eq!([0, 2, 3].map(|place| position(&table, place)), [1, 2, 3]);
}

#[test]
fn bounds_are_reached_and_not_passed() {
    let mut table = started();
    table.set_limits(Limits { waiters_max: 1, ids_max: 2, ..Limits::DEFAULT });
    let with_id = |id| Acquire { id: Some(id), ..Acquire::new(b"k", b"o", LEASE) };
    let (lock, _) = grant(&mut table, &with_id(b"1"), Caller::default());
    let lock = Some(lock);
    assert!(matches!(ask(&mut table, at(1), lock, &with_id(b"2"), 0), Ok(Acquired::Granted(_))));
    assert_eq!(ask(&mut table, at(1), lock, &with_id(b"3"), 0), Err(Refusal::TooManyIds { max: 2 }));
    assert!(matches!(ask(&mut table, at(1), lock, &with_id(b"1"), 0), Ok(Acquired::Granted(_))));
    // The one that waits may wait in another mode, as long as it is one of those that may wait.
    let shared = Acquire { mode: Mode::Shared, ..blocking(b"p") };
    assert!(matches!(ask(&mut table, at(1), lock, &shared, 7), Ok(Acquired::Queued { .. })));
    assert!(matches!(ask(&mut table, at(1), lock, &blocking(b"p"), 8), Ok(Acquired::Queued { .. })));
    assert!(matches!(ask(&mut table, at(1), lock, &blocking(b"q"), 9), Err(Refusal::QueueFull { max: 1 })));
    table.set_limits(Limits { waiters_max: 0, ..Limits::DEFAULT });
    assert!(matches!(ask(&mut table, at(1), lock, &shared, 10), Err(Refusal::QueueFull { max: 0 })));
}

#[test]
fn grace_is_over_at_its_end() {
    let mut table = Table::new(Limits::DEFAULT);
    let _mark = table.promoted(Time::ZERO, WallClock::from_unix_us(0), Millis(100));
    let request = Acquire::new(b"k", b"o", LEASE);
    assert!(!matches!(ask(&mut table, Time::from_us(99_999), None, &request, 0), Ok(Acquired::Granted(_))));
    assert!(matches!(ask(&mut table, at(100), None, &request, 0), Ok(Acquired::Granted(_))));
}

/// A server that loads its own data anew flushes before: who is told nothing yet has lost nothing. What else is to be said stays.
#[test]
fn loading_anew_takes_back_what_the_flush_before_it_would_say() {
    let mut table = started();
    let channel = |key, owner| Acquire { channel: Some(b"c"), ..Acquire::new(key, owner, LEASE) };
    let _ = grant(&mut table, &channel(b"k", b"o"), Caller::default());
    let lock = granted(&mut table, b"l", b"p");
    let undelivered = table.lock(lock).and_then(|lock| lock.holds().next()).expect("it is held").token;
    table.undelivered(lock, undelivered);
    drop(table.flushed(None, true));
    let mut both = table.clone();
    both.reloading();
    let said = |table: &mut Table| {
        let (mut told, mut looked) = (0, 0);
        for _ in 0..10 {
            match table.advance(at(1)) {
                Due::Nothing => break,
                Due::Done(_) => told += 1,
                Due::Look(..) => looked += 1,
            }
        }
        (told, looked)
    };
    let (before, after) = (said(&mut table), said(&mut both));
    assert_eq!((before.0, after.0), (1, 0), "the loss by the flush");
    assert_eq!(before.1, after.1);
}

fn holder(table: &Table, lock: LockId) -> Token {
    table.lock(lock).and_then(|lock| lock.holds().next()).expect("it is held").token
}

/// Looks wherever somebody must look, as the shell does with these locks in the keyspace; says what was told.
fn look_around(table: &mut Table, now: Time, mut find: impl FnMut(&[u8]) -> Option<LockId>) -> usize {
    let mut told = 0;
    for _ in 0..100 {
        match table.advance(now) {
            Due::Nothing => return told,
            Due::Look(name, _) => {
                let decision = table.look(now, place(name.key(), find(name.key())), None, &mut Deaf);
                table.recycle(decision.effects);
            }
            Due::Done(decision) => {
                told += decision.effects.iter().count();
                table.recycle(decision.effects);
            }
        }
    }
    panic!("it does not come to rest");
}

#[test]
fn renewals_and_releases_are_counted() {
    let mut table = started();
    let lock = granted(&mut table, b"k", b"o");
    let renew = |table: &mut Table, owner: &[u8]| {
        let request = Renew { key: b"k", owner, lease: LEASE, token: None };
        table.renew(at(1), place(b"k", Some(lock)), &request, Caller::default(), &mut Deaf).answer
    };
    assert!(renew(&mut table, b"o") && !renew(&mut table, b"p"));
    let token = holder(&table, lock);
    assert!(table.check(at(999), place(b"k", Some(lock)), token));
    assert!(!table.check(at(1001), place(b"k", Some(lock)), token), "over, and not ended yet");
    let with_ids = granted_with_id(&mut table);
    let request = Release { key: b"r", owner: b"o", token: None, scope: ReleaseScope::Plain };
    let refused = table.release(at(1), place(b"r", Some(with_ids)), &request, &mut Deaf);
    assert_eq!(refused.answer, Err(Refusal::NeedsIdOrAll));
    release(&mut table, b"k", b"o", lock);
    let stats = table.stats();
    assert_eq!((stats.renewals, stats.renewals_lost, stats.releases, stats.refused), (1, 1, 1, 1));
}

#[test]
fn every_way_out_of_a_queue_is_counted() {
    let mut table = started();
    let lock = granted(&mut table, b"k", b"o");
    let mut ended = 0;
    let wait = |table: &mut Table, request: &Acquire<'_>, client| {
        let caller = Caller { blocked: 7, client: NonZeroU64::new(client) };
        let decision = table.acquire(at(1), place(b"k", Some(lock)), request, caller, &mut Deaf);
        let Ok(Acquired::Queued { waiter, .. }) = decision.answer else { panic!("{:?}", decision.answer) };
        waiter
    };
    let mut counts = |table: &Table, what: &str| {
        ended += 1;
        assert_eq!(table.stats().wait_ended, ended, "{what}");
    };
    let waiter = wait(&mut table, &blocking(b"p"), 0);
    table.left(waiter);
    counts(&table, "its connection is gone");
    wait(&mut table, &Acquire { session: Some(Millis(10)), ..blocking(b"p") }, 5);
    table.client_gone(NonZeroU64::new(5).expect("not zero"));
    counts(&table, "the connection of its session is gone");
    wait(&mut table, &blocking(b"p"), 0);
    let request = Release { key: b"k", owner: b"p", token: None, scope: ReleaseScope::Plain };
    drop(table.release(at(1), place(b"k", Some(lock)), &request, &mut Deaf));
    counts(&table, "it was cancelled");
    wait(&mut table, &blocking(b"p"), 0);
    drop(table.dismiss_all(EndReason::RoleChanged));
    counts(&table, "all were dismissed");
    wait(&mut table, &Acquire { wait: Wait::Block(Some(Millis(5))), ..blocking(b"p") }, 0);
    assert_eq!(look_around(&mut table, at(20), |_| Some(lock)), 1);
    assert_eq!((table.stats().timed_out, table.stats().wait_ended), (1, 4));
}

#[test]
fn what_the_server_has_taken_is_away_until_it_is_put_back() {
    let mut table = started();
    let lock = granted(&mut table, b"k", b"o");
    let token = holder(&table, lock);
    table.removed(lock, LossReason::Removed, true);
    table.freed(lock);
    assert_eq!((table.stats().removed, table.stats().put_back), (1, 0));
    table.taken_by_server(0, b"k");
    assert_eq!((table.stats().removed, table.stats().put_back), (0, 1));
    let away = table.away(place(b"k", None)).expect("it comes back");
    assert_eq!(away.holds().map(|hold| hold.token).collect::<Vec<_>>(), [token]);
    assert!(table.away(place(b"j", None)).is_none());
    assert!(table.check(at(1), place(b"k", None), token) && !table.check(at(1001), place(b"k", None), token));
    // Its grant turns out to have reached nobody.
    table.undelivered(lock, token);
    assert_eq!((table.stats().put_back, table.stats().undelivered), (0, 1));
    assert!(table.away(place(b"k", None)).is_none());
}

#[test]
fn removal_is_settled_by_what_comes_between_it_and_its_reason() {
    type Between = fn(&mut Table);
    let between: [(&str, Between, bool); 3] = [
        (
            "a verb elsewhere",
            |table| {
                granted(table, b"j", b"p");
            },
            true,
        ),
        (
            "a verb at this place",
            |table| {
                granted(table, b"k", b"p");
            },
            false,
        ),
        ("SWAPDB", |table| table.swapped(0, 1), false),
    ];
    for (what, between, is_put_back) in between {
        let mut table = started();
        let lock = granted(&mut table, b"k", b"o");
        table.removed(lock, LossReason::Removed, true);
        between(&mut table);
        table.taken_by_server(0, b"k");
        assert_eq!(table.away(place(b"k", None)).is_some(), is_put_back, "{what}");
    }
}

#[test]
fn hold_that_is_put_back_is_cut_only_if_its_session_has_no_connection() {
    for (session, client, cut) in [(None, None, false), (Some(10), NonZeroU64::new(5), false), (Some(10), None, true)] {
        let mut table = started();
        let request = Acquire { session: session.map(Millis), ..Acquire::new(b"k", b"o", LEASE) };
        let (lock, effects) = grant(&mut table, &request, Caller { blocked: 0, client });
        table.recycle(effects);
        // What is cut at once is not what this is about.
        look_around(&mut table, at(1), |_| Some(lock));
        table.removed(lock, LossReason::Removed, true);
        table.taken_by_server(0, b"k");
        table.freed(lock);
        let decision = table.look(at(2), place(b"k", None), None, &mut Deaf);
        let back = decision.lock.expect("it is back");
        look_around(&mut table, at(2), |_| Some(back));
        let deadline = table.lock(back).map(Lock::next_deadline);
        assert_eq!(deadline, Some(if cut { at(12) } else { at(1000) }), "{session:?} {client:?}");
    }
}

#[test]
fn lock_that_is_put_off_comes_up_later_or_when_it_is_recalled() {
    let mut table = started();
    let lock = granted(&mut table, b"k", b"o");
    table.defer(at(1), lock, Millis(5000));
    let next = table.next_deadline().expect("it comes up");
    assert!(next > at(4998) && next < at(5003), "{next:?}");
    table.recall(at(1));
    let next = table.next_deadline().expect("it comes up");
    assert!(next > at(998) && next < at(1003), "{next:?}");
    release(&mut table, b"k", b"o", lock);
    table.defer(at(1), lock, Millis(5000));
    assert!(table.next_deadline().is_none_or(|next| next < at(1003)), "nothing to put off");
}

#[test]
fn tokens_rise_above_what_others_have_announced_and_so_does_the_mark() {
    let mut table = started();
    let lock = granted(&mut table, b"k", b"o");
    let heard = holder(&table, lock).get() + 1_000_000_000;
    table.took_over(heard, WallClock::from_unix_us(0));
    assert!(table.announce_mark() > heard);
    let next = granted(&mut table, b"l", b"o");
    assert!(holder(&table, next).get() > heard);
    // Who does not decide yet takes over nothing.
    let mut loading = Table::new(Limits::DEFAULT);
    loading.took_over(heard, WallClock::from_unix_us(0));
    let _mark = loading.promoted(Time::ZERO, WallClock::from_unix_us(0), Millis(0));
    let first = granted(&mut loading, b"k", b"o");
    assert!(holder(&loading, first).get() < heard);
}

#[test]
fn databases_that_change_places_take_their_locks_along() {
    let mut table = started();
    let in_db = |table: &mut Table, db| {
        let request = Acquire::new(b"k", b"o", LEASE);
        let decision =
            table.acquire(Time::ZERO, Place { db, key: b"k", lock: None }, &request, Caller::default(), &mut Deaf);
        decision.lock.expect("it is granted")
    };
    let locks = [0, 1, 2].map(|db| in_db(&mut table, db));
    table.swapped(0, 2);
    assert_eq!(locks.map(|lock| table.name(lock).map(Name::db)), [Some(2), Some(1), Some(0)]);
}

/// A shared hold of a session on connection 5.
fn session_hold(table: &mut Table) -> LockId {
    let request = Acquire { session: Some(Millis(10)), mode: Mode::Shared, ..Acquire::new(b"k", b"o", LEASE) };
    let (lock, effects) = grant(table, &request, Caller { blocked: 0, client: NonZeroU64::new(5) });
    table.recycle(effects);
    lock
}

fn next_end(table: &Table, lock: LockId) -> Time {
    table.lock(lock).map_or(Time::NEVER, Lock::next_deadline)
}

#[test]
fn session_follows_its_hold_to_the_token_of_an_upgrade() {
    let mut table = started();
    let lock = session_hold(&mut table);
    let before = holder(&table, lock);
    let upgrade = Acquire { convert: Some(before), ..Acquire::new(b"k", b"o", LEASE) };
    assert!(matches!(ask(&mut table, at(1), Some(lock), &upgrade, 0), Ok(Acquired::Granted(token)) if token > before));
    table.client_gone(NonZeroU64::new(5).expect("not zero"));
    look_around(&mut table, at(2), |_| Some(lock));
    assert_eq!(next_end(&table, lock), at(12));
}

#[test]
fn session_ends_with_its_lock_and_its_connection_counts_no_more_after_a_demotion() {
    let mut table = started();
    let lock = session_hold(&mut table);
    let mut demoted = table.clone();
    table.removed(lock, LossReason::Revoked, true);
    assert!(!table.has_sessions());
    drop(demoted.demoted());
    assert!(demoted.has_sessions());
    let _mark = demoted.promoted(at(1), WallClock::from_unix_us(0), Millis(0));
    look_around(&mut demoted, at(1), |_| Some(lock));
    assert_eq!(next_end(&demoted, lock), at(11), "whether its client is still there is unknown");
}

#[test]
fn value_with_tokens_from_beyond_tomorrow_is_not_credible() {
    let mut table = started();
    let wall = WallClock::from_unix_us(1_700_000_000_000_000);
    let image = |table: &Table, token: u64, mark| {
        let (token, owner) = (Token::new(token).expect("a token"), Owner::new(b"o"));
        let grant = Grant { owner, mode: Mode::Exclusive, token, lease: LEASE, deadline: None, terms: None };
        table.credible(&Image { mark, grants: vec![grant] }, wall)
    };
    let Err(Incredible { max }) = image(&table, Token::MAX, 0) else { panic!("it is believed") };
    assert!(image(&table, max, max).is_ok());
    assert_eq!(image(&table, max + 1, 0), Err(Incredible { max }));
    assert_eq!(image(&table, 1, max + 1), Err(Incredible { max }));
    // What this server has announced itself it believes.
    table.took_over(max + 1_000_000_000, wall);
    let announced = table.announce_mark();
    assert!(announced > max && image(&table, announced, announced).is_ok());
}
