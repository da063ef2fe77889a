//! INFO and LIST: who holds what, since when, and who waits. They change nothing, and work on replicas.

use crate::commands;
use crate::ffi::acl::CurrentUser;
use crate::ffi::args::Args;
use crate::ffi::ctx::Ctx;
use crate::ffi::key::{Key, KeyState, Mode};
use crate::ffi::reply;
use crate::ffi::string::ServerString;
use crate::state::{self, with_table};
use flock_core::wait_queue::{QueueId, Waiter};
use flock_core::wire::command::{Info, List};
use flock_core::wire::error::{ErrorCode, WireError};
use flock_core::wire::pattern;
use flock_core::{Hold, Lock, Name, Place, Table, Time};

/// INFO shows so many holders at most: a reply that the server builds in one go.
const HOLDERS_MAX: usize = 10_000;
/// LIST looks at so many places per lock it was asked for, at most: a page may be short, like one of SCAN.
const PLACES_PER_LOCK: u32 = 10;

/// `FLOCK.INFO key [LIMIT n]`.
pub(crate) fn info(ctx: &Ctx<'_>, args: Args<'_>) -> Result<(), WireError> {
    let request = commands::parse::<Info<'_>>(args)?;
    let db = u16::try_from(ctx.selected_db()).unwrap_or(u16::MAX);
    let name = args.string(1).ok_or(WireError::fixed(ErrorCode::Err, "no key given"))?;
    let state = Key::open(ctx, name, Mode::Read).state();
    let lock = match state {
        KeyState::OtherType => return Err(WireError::WRONG_TYPE),
        KeyState::Empty => None,
        KeyState::Lock(handle) => Some(state::lock_of(handle)),
    };
    let limit = usize::try_from(request.limit).unwrap_or(usize::MAX);
    with_table(|table| {
        let queue =
            lock.and_then(|lock| table.queues().of_lock(lock)).or_else(|| table.queues().of_name(db, request.key));
        let away = table.away(Place { db, key: request.key, lock });
        let lock = lock.and_then(|lock| table.lock(lock)).or(away.as_ref()).filter(|lock| !lock.is_free());
        match (lock, queue) {
            (None, None) => reply::nil(ctx),
            (lock, queue) => describe(ctx, table, lock, queue, limit, state::now()),
        }
    });
    Ok(())
}

fn describe(ctx: &Ctx<'_>, table: &Table, lock: Option<&Lock>, queue: Option<QueueId>, limit: usize, now: Time) {
    let holders = lock.map_or(0, Lock::len);
    let waiters = queue.map_or(0, |queue| table.queues().queue_len(queue));
    reply::map(ctx, 6);
    text(ctx, "mode", mode_of(lock).as_bytes());
    count(ctx, "holder_count", holders);
    count(ctx, "waiter_count", waiters);
    let grace = table.grace_until().map_or(0, |until| until.left_from(now).as_ms());
    field(ctx, "grace_left_ms", grace.into());
    reply::bulk(ctx, b"holders");
    reply::array(ctx, holders.min(HOLDERS_MAX));
    for hold in lock.into_iter().flat_map(Lock::holds).take(HOLDERS_MAX) {
        describe_hold(ctx, hold, now);
    }
    reply::bulk(ctx, b"waiters");
    reply::array(ctx, waiters.min(limit));
    let queue = queue.into_iter().flat_map(|queue| table.queues().iter(queue));
    for (position, (_, waiter)) in (1..).zip(queue.take(limit)) {
        describe_waiter(ctx, waiter, position, now);
    }
}

fn describe_hold(ctx: &Ctx<'_>, hold: &Hold, now: Time) {
    reply::map(ctx, 8);
    text(ctx, "owner", &hold.owner);
    field(ctx, "token", hold.token.get());
    // Past its deadline and still here: in a pause, or on a replica, which ends nothing.
    let state = match (hold.is_over(now), hold.claim()) {
        (true, _) => "expired",
        (false, Some(_)) => "claimed",
        (false, None) => "held",
    };
    text(ctx, "state", state.as_bytes());
    field(ctx, "lease_ms", hold.lease().as_ms().into());
    let left = if hold.deadline() == Time::NEVER { hold.lease() } else { hold.deadline().left_from(now) };
    field(ctx, "left_ms", left.as_ms().into());
    field(ctx, "held_ms", now.us_since(hold.granted()) / 1000);
    text(ctx, "label", hold.label());
    reply::bulk(ctx, b"ids");
    reply::array(ctx, hold.ids().count());
    for id in hold.ids() {
        reply::bulk(ctx, id);
    }
}

fn describe_waiter(ctx: &Ctx<'_>, waiter: &Waiter, position: u64, now: Time) {
    reply::map(ctx, 5);
    text(ctx, "owner", &waiter.owner);
    text(ctx, "mode", mode_text(waiter.mode).as_bytes());
    field(ctx, "position", position);
    field(ctx, "waiting_ms", now.us_since(waiter.since) / 1000);
    text(ctx, "label", waiter.terms.as_ref().map_or(b"", |terms| &terms.label));
}

/// `FLOCK.LIST [CURSOR c] [COUNT n] [MATCH pattern] [OWNER owner]`.
pub(crate) fn list(ctx: &Ctx<'_>, args: Args<'_>) -> Result<(), WireError> {
    let request = commands::parse::<List<'_>>(args)?;
    let db = u16::try_from(ctx.selected_db()).unwrap_or(u16::MAX);
    let user = CurrentUser::of(ctx);
    let wanted = |name: &Name, lock: &Lock| {
        name.db() == db
            && request.pattern.is_none_or(|pattern| pattern::matches(pattern, name.key()))
            && request.owner.is_none_or(|owner| lock.held_by(owner).is_some())
            && user.may_read_key(ServerString::new(name.key()).as_str())
    };
    with_table(|table| {
        let count = usize::try_from(request.count).unwrap_or(usize::MAX);
        let end = request.cursor.saturating_add(request.count.saturating_mul(PLACES_PER_LOCK));
        let mut page: Vec<(&Name, &Lock, flock_core::LockId)> = Vec::new();
        let mut next = None;
        for (place, lock, name, holders) in table.places(request.cursor, end) {
            if page.len() == count {
                next = Some(place);
                break;
            }
            if wanted(name, holders) {
                page.push((name, holders, lock));
            }
        }
        let next = next.or_else(|| (end < table.places_end()).then_some(end)).unwrap_or(0);
        reply::array(ctx, 2);
        reply::integer(ctx, next.into());
        reply::array(ctx, page.len());
        for (name, holders, lock) in page {
            let waiters = table.queues().of_lock(lock).map_or(0, |queue| table.queues().queue_len(queue));
            summarise(ctx, name, holders, waiters, state::now());
        }
    });
    Ok(())
}

fn summarise(ctx: &Ctx<'_>, name: &Name, lock: &Lock, waiters: usize, now: Time) {
    reply::map(ctx, 7);
    text(ctx, "key", name.key());
    text(ctx, "mode", mode_of(Some(lock)).as_bytes());
    count(ctx, "holder_count", lock.len());
    count(ctx, "waiter_count", waiters);
    // The holder that has held longest; INFO shows all.
    let first = lock.holds().next();
    text(ctx, "owner", first.map_or(b"", |hold| &hold.owner));
    field(ctx, "token", first.map_or(0, |hold| hold.token.get()));
    field(ctx, "left_ms", first.map_or(0, |hold| hold.deadline().left_from(now).as_ms()).into());
}

fn mode_of(lock: Option<&Lock>) -> &'static str {
    lock.and_then(Lock::mode).map_or("free", mode_text)
}

fn mode_text(mode: flock_core::Mode) -> &'static str {
    match mode {
        flock_core::Mode::Exclusive => "exclusive",
        flock_core::Mode::Shared => "shared",
    }
}

fn text(ctx: &Ctx<'_>, name: &str, value: &[u8]) {
    reply::bulk(ctx, name.as_bytes());
    reply::bulk(ctx, value);
}

fn field(ctx: &Ctx<'_>, name: &str, value: u64) {
    reply::bulk(ctx, name.as_bytes());
    reply::integer(ctx, i64::try_from(value).unwrap_or(i64::MAX));
}

fn count(ctx: &Ctx<'_>, name: &str, value: usize) {
    field(ctx, name, value as u64);
}
