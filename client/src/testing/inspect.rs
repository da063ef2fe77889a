//! `FLOCK.INFO` and `FLOCK.LIST`: what the module answers, word for word.

use flock_core::wait_queue::Waiter;
use flock_core::wire::command::{Info, List};
use flock_core::wire::pattern;
use flock_core::{Hold, Lock, LockId, Mode, Name, Table, Time};

use super::resp::Reply;

/// LIST looks at so many places per lock it was asked for, at most: a page may be short.
const PLACES_PER_LOCK: u32 = 10;

pub(super) fn info(table: &Table, db: u16, lock: Option<LockId>, request: &Info<'_>, now: Time) -> Reply {
    let queues = table.queues();
    let queue = lock.and_then(|lock| queues.of_lock(lock)).or_else(|| queues.of_name(db, request.key));
    let lock = lock.and_then(|lock| table.lock(lock)).filter(|lock| !lock.is_free());
    if lock.is_none() && queue.is_none() {
        return Reply::Nil;
    }
    let limit = usize::try_from(request.limit).unwrap_or(usize::MAX);
    let waiters = queue.into_iter().flat_map(|queue| queues.iter(queue)).take(limit);
    let waiters = (1..).zip(waiters).map(|(position, (_, waiter))| describe_waiter(waiter, position, now));
    map(vec![
        ("mode", mode_of(lock)),
        ("holder_count", count(lock.map_or(0, Lock::len))),
        ("waiter_count", count(queue.map_or(0, |queue| queues.queue_len(queue)))),
        ("grace_left_ms", Reply::Integer(0)),
        (
            "holders",
            Reply::Array(lock.into_iter().flat_map(Lock::holds).map(|hold| describe_hold(hold, now)).collect()),
        ),
        ("waiters", Reply::Array(waiters.collect())),
    ])
}

fn describe_hold(hold: &Hold, now: Time) -> Reply {
    let state = if hold.claim().is_some() { "claimed" } else { "held" };
    map(vec![
        ("owner", Reply::bulk(&hold.owner[..])),
        ("token", Reply::Integer(hold.token.get())),
        ("state", Reply::bulk(state)),
        ("lease_ms", Reply::Integer(hold.lease().as_ms().into())),
        ("left_ms", Reply::Integer(hold.deadline().left_from(now).as_ms().into())),
        ("held_ms", Reply::Integer(now.us_since(hold.granted()) / 1000)),
        ("label", Reply::bulk(hold.label())),
        ("ids", Reply::Array(hold.ids().map(|id| Reply::bulk(&id[..])).collect())),
    ])
}

fn describe_waiter(waiter: &Waiter, position: u64, now: Time) -> Reply {
    let label: &[u8] = waiter.terms.as_ref().map_or(b"", |terms| &terms.label);
    map(vec![
        ("owner", Reply::bulk(&waiter.owner[..])),
        ("mode", Reply::bulk(mode_text(waiter.mode))),
        ("position", Reply::Integer(position)),
        ("waiting_ms", Reply::Integer(now.us_since(waiter.since) / 1000)),
        ("label", Reply::bulk(label)),
    ])
}

pub(super) fn list(table: &Table, db: u16, request: &List<'_>, now: Time) -> Reply {
    let wanted = |name: &Name, lock: &Lock| {
        name.db() == db
            && request.pattern.is_none_or(|pattern| pattern::matches(pattern, name.key()))
            && request.owner.is_none_or(|owner| lock.held_by(owner).is_some())
    };
    let page_max = usize::try_from(request.count).unwrap_or(usize::MAX);
    let end = request.cursor.saturating_add(request.count.saturating_mul(PLACES_PER_LOCK));
    let mut page = Vec::new();
    let mut next = (end < table.places_end()).then_some(end);
    for (place, id, name, lock) in table.places(request.cursor, end) {
        if page.len() == page_max {
            next = Some(place);
            break;
        }
        if wanted(name, lock) {
            page.push(summarise(table, id, name, lock, now));
        }
    }
    Reply::Array(vec![Reply::Integer(next.unwrap_or(0).into()), Reply::Array(page)])
}

fn summarise(table: &Table, id: LockId, name: &Name, lock: &Lock, now: Time) -> Reply {
    let queues = table.queues();
    let first = lock.holds().next();
    let owner: &[u8] = first.map_or(b"", |hold| &hold.owner);
    map(vec![
        ("key", Reply::bulk(name.key())),
        ("mode", mode_of(Some(lock))),
        ("holder_count", count(lock.len())),
        ("waiter_count", count(queues.of_lock(id).map_or(0, |queue| queues.queue_len(queue)))),
        ("owner", Reply::bulk(owner)),
        ("token", Reply::Integer(first.map_or(0, |hold| hold.token.get()))),
        ("left_ms", Reply::Integer(first.map_or(0, |hold| hold.deadline().left_from(now).as_ms()).into())),
    ])
}

fn mode_of(lock: Option<&Lock>) -> Reply {
    Reply::bulk(lock.and_then(Lock::mode).map_or("free", mode_text))
}

fn mode_text(mode: Mode) -> &'static str {
    match mode {
        Mode::Exclusive => "exclusive",
        Mode::Shared => "shared",
    }
}

fn count(count: usize) -> Reply {
    Reply::Integer(u64::try_from(count).unwrap_or(u64::MAX))
}

fn map(fields: Vec<(&'static str, Reply)>) -> Reply {
    Reply::Map(fields.into_iter().map(|(name, value)| (Reply::bulk(name), value)).collect())
}
