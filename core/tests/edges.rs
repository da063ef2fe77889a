//! The ends of every range: no token left, a server that has not started, limits that are reached. Clean answers, and nothing hangs.

mod support;

use flock_core::deadlines::DURATION_MAX;
use flock_core::lock::{Mode, Start};
use flock_core::request::ReleaseScope;
use flock_core::snapshot::Image;
use flock_core::table::{Caller, Deaf};
use flock_core::token::WallClock;
use flock_core::{
    Acquire, Acquired, Change, Due, Grant, Limits, Millis, Name, Owner, Place, Refusal, Release, Table, Time, Token,
    TokenCounter, Wait,
};
use support::world::{World, wall};

const KEYS: [(u16, &str); 1] = [(0, "k")];
const LEASE: Millis = Millis(1000);

/// A world whose server has so many tokens left.
fn world_with_tokens_left(left: u64) -> World {
    let mut world = World::new(Limits::DEFAULT, &KEYS, &["a", "b", "c"]);
    world.primary.table.saw_counter(Token::MAX - left);
    world.replica.table.saw_mark(Token::MAX);
    world
}

fn ask(owner: &str) -> Acquire<'_> {
    Acquire::new(b"k", owner.as_bytes(), LEASE)
}

fn release(owner: &str) -> Release<'_> {
    Release { key: b"k", owner: owner.as_bytes(), token: None, scope: ReleaseScope::Plain }
}

fn last(world: &World) -> Result<Acquired, Refusal> {
    Ok(Acquired::Granted(world.primary.holds(0).last().expect("it is held").token))
}

#[test]
fn last_token_is_granted_and_then_none() {
    let mut world = world_with_tokens_left(1);
    assert_eq!(world.acquire(0, &ask("a"), None), Ok(Acquired::Granted(Token::new(Token::MAX).expect("the last"))));
    assert_eq!(world.release(0, &release("a")), Ok(true));
    assert_eq!(world.acquire(0, &ask("a"), None), Err(Refusal::TokensExhausted));
    assert!(!world.primary.exists(0), "a refused grant leaves no key");
    world.check_always();
}

#[test]
fn waiter_without_a_token_waits_until_its_time_is_up() {
    let mut world = world_with_tokens_left(1);
    assert_eq!(world.acquire(0, &ask("a"), None), last(&world));
    let waits = Acquire { wait: Wait::Block(Some(LEASE)), ..ask("b") };
    assert!(matches!(world.acquire(0, &waits, None), Ok(Acquired::Queued { .. })));
    assert_eq!(world.release(0, &release("a")), Ok(true));
    world.wake();
    assert_eq!(world.primary.waiters(0).count(), 1, "nobody can be granted");
    world.pass(Millis(1002));
    world.wake();
    assert_eq!(world.primary.waiters(0).count(), 0);
    world.check_always();
}

#[test]
fn conversion_without_a_token_leaves_the_hold_as_it_was() {
    let mut world = world_with_tokens_left(1);
    assert_eq!(world.acquire(0, &Acquire { mode: Mode::Shared, ..ask("a") }, None), last(&world));
    let convert = Acquire { convert: Token::new(Token::MAX), ..ask("a") };
    assert_eq!(world.acquire(0, &convert, None), Err(Refusal::TokensExhausted));
    assert_eq!(world.primary.holds(0).next().map(|hold| hold.mode()), Some(Mode::Shared));
    world.check_always();
}

#[test]
fn repeated_acquire_and_release_need_no_token() {
    let mut world = world_with_tokens_left(1);
    let granted = world.acquire(0, &ask("a"), None);
    assert_eq!(world.acquire(0, &ask("a"), None), granted);
    assert_eq!(world.release(0, &release("a")), Ok(true));
}

/// Loaded, and not seeded yet: a token made now could have been made before.
#[test]
fn server_that_has_not_started_makes_no_token() {
    let mut table = Table::new(Limits::DEFAULT);
    let grant = Grant {
        owner: Owner::new(b"a"),
        mode: Mode::Shared,
        token: Token::new(7).expect("in range"),
        lease: LEASE,
        deadline: None,
        terms: None,
    };
    let place = Place { db: 0, key: b"k", lock: None };
    let start = flock_core::lock::Start::Now(Time::ZERO);
    let decision = table.apply(place, &Change::Grant(grant), start);
    let place = Place { lock: decision.lock, ..place };
    let mut acquire =
        |request: &Acquire<'_>| table.acquire(Time::ZERO, place, request, Caller::default(), &mut Deaf).answer;
    assert_eq!(acquire(&Acquire { mode: Mode::Shared, ..ask("b") }), Err(Refusal::NotReady));
    assert_eq!(acquire(&Acquire { convert: Token::new(7), ..ask("a") }), Err(Refusal::NotReady));
}

#[test]
fn floor_is_accepted_up_to_a_day_ahead() {
    let mut world = World::new(Limits::DEFAULT, &KEYS, &["a"]);
    let max = world.primary.table.counter().highest_credible(wall());
    assert_eq!(world.floor(max + 1), Err(Refusal::FloorTooHigh { max }));
    assert_eq!(world.floor(max), Ok(()));
    assert_eq!(world.floor(1), Ok(()), "a low floor raises nothing");
    assert_eq!(world.acquire(0, &ask("a"), None), Ok(Acquired::Granted(Token::new(max + 1).expect("in range"))));
    world.check_always();
}

#[test]
fn counter_never_passes_the_last_token() {
    let mut counter = TokenCounter::default();
    counter.saw(u64::MAX);
    counter.saw_mark(u64::MAX);
    assert_eq!((counter.value(), counter.mark()), (Token::MAX, Token::MAX));
    assert_eq!(counter.seed(WallClock::from_unix_us(u64::MAX)), Token::MAX);
    assert_eq!(counter.raise(u64::MAX), None);
    assert!(counter.take_next().is_err());
    assert_eq!(counter.highest_credible(wall()), Token::MAX);
}

#[test]
fn queue_is_full_at_its_limit_and_free_again_below() {
    let limits = Limits { waiters_max: 1, ..Limits::DEFAULT };
    let mut world = World::new(limits, &KEYS, &["a", "b", "c"]);
    assert_eq!(world.acquire(0, &ask("a"), None), last(&world));
    let waits = |owner| Acquire { wait: Wait::Block(None), ..ask(owner) };
    assert!(matches!(world.acquire(0, &waits("b"), None), Ok(Acquired::Queued { position: 1, .. })));
    assert_eq!(world.acquire(0, &waits("c"), None), Err(Refusal::QueueFull { max: 1 }));
    assert!(matches!(world.acquire(0, &waits("b"), None), Ok(Acquired::Queued { position: 1, .. })), "its own place");
    assert_eq!(world.release(0, &release("a")), Ok(true));
    assert!(matches!(world.acquire(0, &waits("c"), None), Ok(Acquired::Queued { position: 1, .. })));
    world.check_always();
}

/// The longest wait and lease, from the latest moment a clock can show.
#[test]
fn time_ends_without_overflow() {
    let mut world = World::new(Limits::DEFAULT, &KEYS, &["a", "b"]);
    world.now = Time::from_us(u64::MAX - 1);
    let request = Acquire { lease: Limits::DEFAULT.lease_max, ..ask("a") };
    assert_eq!(world.acquire(0, &request, None), last(&world));
    let waits = Acquire { wait: Wait::Block(Some(Limits::DEFAULT.wait_max)), ..ask("b") };
    assert!(matches!(world.acquire(0, &waits, None), Ok(Acquired::Queued { .. })));
    world.wake();
}

/// A queue of thousands: who leaves from anywhere leaves the others in order.
#[test]
fn many_waiters_leave_from_anywhere_and_the_rest_stay_in_order() {
    let names: Vec<&'static str> = (0..2000).map(|n| &*Box::leak(format!("w{n}").into_boxed_str())).collect();
    let mut world = World::new(Limits::DEFAULT, &KEYS, &names);
    for name in &names {
        let request = Acquire { wait: Wait::Block(None), ..ask(name) };
        assert!(world.acquire(0, &request, None).is_ok());
    }
    let holder = names[0];
    for name in names.iter().skip(1).step_by(3) {
        assert!(world.unblock(name));
    }
    world.wake();
    world.check_always();
    let rest: Vec<&str> = names.iter().enumerate().skip(1).filter(|(n, _)| n % 3 != 1).map(|(_, name)| *name).collect();
    assert!(
        world
            .primary
            .waiters(0)
            .map(|(_, waiter)| waiter.owner.to_vec())
            .eq(rest.iter().map(|name| name.as_bytes().to_vec()))
    );
    let mut current = holder;
    for next in &rest {
        assert_eq!(world.release(0, &release(current)), Ok(true));
        current = next;
        assert_eq!(world.primary.holds(0).map(|hold| hold.owner.to_vec()).collect::<Vec<_>>(), [current.as_bytes()]);
    }
}

#[test]
fn forged_deadline_delays_no_other_lease() {
    // Deadlines are ordered as long as they lie within days of each other. One of a made-up value, years ahead, must not get among them.
    let now = Time::from_us(1_000_000_000);
    let years_ahead = Time::from_us(now.as_us() + 10 * 365 * 24 * 3600 * 1_000_000);
    for start in [Start::Now(now), Start::AfterLoading] {
        let mut table = Table::new(Limits::DEFAULT);
        let _announced = table.promoted(now, wall(), Millis(0));
        let grant = Grant {
            owner: Owner::new(b"a"),
            mode: Mode::Exclusive,
            token: Token::new(1).expect("a token"),
            lease: LEASE,
            deadline: Some(years_ahead),
            terms: None,
        };
        table.load(Name::new(0, b"forged"), &Image { mark: 1, grants: vec![grant] }, start).expect("there is room");
        table.start_loaded(now);
        let place = Place { db: 0, key: b"k", lock: None };
        let acquired = table.acquire(now, place, &ask("b"), Caller::default(), &mut Deaf);
        let lock = acquired.lock.expect("it is held");
        // Both are over by then, the forged one capped to its lease.
        let later = now.after(Millis(1100));
        let mut over = Vec::new();
        while let Due::Look(name, Some(held)) = table.advance(later) {
            over.push(held);
            let place = Place { db: 0, key: name.key(), lock: Some(held) };
            let _performed = table.look(later, place, Some(held), &mut Deaf);
        }
        assert!(over.contains(&lock), "{start:?}: a lease did not end");
        assert_eq!(over.len(), 2, "{start:?}");
    }
}

#[test]
fn lease_ends_after_weeks_in_which_nothing_ran() {
    // A machine that was suspended: somebody asks for another lock before anything is looked at. Deadlines that lie so far apart are in
    // no order.
    for days in 0..60 {
        let mut table = Table::new(Limits::DEFAULT);
        let _announced = table.promoted(Time::ZERO, wall(), Millis(0));
        let place = |key| Place { db: 0, key, lock: None };
        let old = table.acquire(Time::ZERO, place(b"old"), &ask("a"), Caller::default(), &mut Deaf).lock;
        let waits = Acquire { wait: Wait::Block(Some(LEASE)), ..Acquire::new(b"old", b"c", LEASE) };
        let caller = Caller { blocked: 7, ..Caller::default() };
        drop(table.acquire(Time::ZERO, Place { lock: old, ..place(b"old") }, &waits, caller, &mut Deaf));
        let now = Time::from_us(days * 24 * 3600 * 1_000_000 + 1_002_000);
        let ahead = Acquire { lease: DURATION_MAX, ..Acquire::new(b"k", b"b", LEASE) };
        drop(table.acquire(now, place(b"k"), &ahead, Caller::default(), &mut Deaf));
        assert!(table.next_deadline().is_some_and(|at| at <= now), "after {days} days");
        let due = table.advance(now);
        assert!(matches!(due, Due::Look(_, lock) if lock == old), "after {days} days: {due:?}");
    }
}
