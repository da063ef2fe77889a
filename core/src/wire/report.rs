//! What `FLOCK.INFO` and `FLOCK.LIST` answer: who holds what, since when, and who waits.

use alloc::vec::Vec;

use crate::lock::{Hold, Lock, Mode};
use crate::name::Name;
use crate::table::{LockId, Place, Table};
use crate::time::Time;
use crate::wait_queue::Waiter;
use crate::wire::command::{Info, List};
use crate::wire::pattern;

/// INFO shows so many holders at most: the server builds a reply in one go.
const HOLDERS_MAX: usize = 10_000;
/// LIST looks at so many places per lock it was asked for, at most: a page may be short, like one of SCAN.
const PLACES_PER_LOCK: u32 = 10;

/// Where a reply is written, value by value. A reply is one value; an array and a map make it owe their contents.
pub trait Reply {
    /// Nothing.
    fn nil(&mut self);
    /// A number.
    fn integer(&mut self, number: u64);
    /// Any bytes.
    fn bulk(&mut self, bytes: &[u8]);
    /// `len` values follow.
    fn array(&mut self, len: usize);
    /// `len` pairs of a name and a value follow.
    fn map(&mut self, len: usize);
}

/// Answers INFO about what is held, or about to be put back, at `place`, and who waits for it.
pub fn info(reply: &mut impl Reply, table: &Table, place: Place<'_>, request: &Info<'_>, now: Time) {
    let queues = table.queues();
    let queue = place.lock.and_then(|lock| queues.of_lock(lock)).or_else(|| queues.of_name(place.db, place.key));
    let away = table.away(place);
    let lock = place.lock.and_then(|lock| table.lock(lock)).or(away.as_ref()).filter(|lock| !lock.is_free());
    if lock.is_none() && queue.is_none() {
        return reply.nil();
    }
    let (holders, waiters) = (lock.map_or(0, Lock::len), queue.map_or(0, |queue| queues.queue_len(queue)));
    reply.map(6);
    text(reply, "mode", mode_of(lock).as_bytes());
    count(reply, "holder_count", holders);
    count(reply, "waiter_count", waiters);
    let grace = table.grace_until().map_or(0, |until| until.left_from(now).as_ms());
    number(reply, "grace_left_ms", grace.into());
    reply.bulk(b"holders");
    reply.array(holders.min(HOLDERS_MAX));
    for hold in lock.into_iter().flat_map(Lock::holds).take(HOLDERS_MAX) {
        describe_hold(reply, hold, now);
    }
    let shown = usize::try_from(request.limit).unwrap_or(usize::MAX);
    reply.bulk(b"waiters");
    reply.array(waiters.min(shown));
    let queue = queue.into_iter().flat_map(|queue| queues.iter(queue));
    for (position, (_, waiter)) in (1..).zip(queue.take(shown)) {
        describe_waiter(reply, waiter, position, now);
    }
}

fn describe_hold(reply: &mut impl Reply, hold: &Hold, now: Time) {
    reply.map(8);
    text(reply, "owner", &hold.owner);
    number(reply, "token", hold.token.get());
    // Past its deadline and still here: in a pause, or on a replica, which ends nothing.
    let state = match (hold.is_over(now), hold.claim()) {
        (true, _) => "expired",
        (false, Some(_)) => "claimed",
        (false, None) => "held",
    };
    text(reply, "state", state.as_bytes());
    number(reply, "lease_ms", hold.lease().as_ms().into());
    number(reply, "left_ms", left_ms(hold, now));
    number(reply, "held_ms", now.us_since(hold.granted()) / 1000);
    text(reply, "label", hold.label());
    reply.bulk(b"ids");
    reply.array(hold.ids().count());
    for id in hold.ids() {
        reply.bulk(id);
    }
}

fn describe_waiter(reply: &mut impl Reply, waiter: &Waiter, position: u64, now: Time) {
    reply.map(5);
    text(reply, "owner", &waiter.owner);
    text(reply, "mode", mode_text(waiter.mode).as_bytes());
    number(reply, "position", position);
    number(reply, "waiting_ms", now.us_since(waiter.since) / 1000);
    text(reply, "label", waiter.terms.as_ref().map_or(b"", |terms| &terms.label));
}

/// Answers LIST with the locks of database `db` that the caller may see.
pub fn list(
    reply: &mut impl Reply,
    table: &Table,
    db: u16,
    request: &List<'_>,
    may_see: impl Fn(&[u8]) -> bool,
    now: Time,
) {
    let wanted = |name: &Name, lock: &Lock| {
        name.db() == db
            && request.pattern.is_none_or(|pattern| pattern::matches(pattern, name.key()))
            && request.owner.is_none_or(|owner| lock.held_by(owner).is_some())
            && may_see(name.key())
    };
    let page_max = usize::try_from(request.count).unwrap_or(usize::MAX);
    let end = request.cursor.saturating_add(request.count.saturating_mul(PLACES_PER_LOCK));
    let mut page: Vec<(LockId, &Name, &Lock)> = Vec::new();
    let mut next = (end < table.places_end()).then_some(end);
    for (place, id, name, lock) in table.places(request.cursor, end) {
        if page.len() == page_max {
            next = Some(place);
            break;
        }
        if wanted(name, lock) {
            page.push((id, name, lock));
        }
    }
    reply.array(2);
    reply.integer(next.unwrap_or(0).into());
    reply.array(page.len());
    for (id, name, lock) in page {
        let waiters = table.queues().of_lock(id).map_or(0, |queue| table.queues().queue_len(queue));
        summarise(reply, name, lock, waiters, now);
    }
}

fn summarise(reply: &mut impl Reply, name: &Name, lock: &Lock, waiters: usize, now: Time) {
    reply.map(7);
    text(reply, "key", name.key());
    text(reply, "mode", mode_of(Some(lock)).as_bytes());
    count(reply, "holder_count", lock.len());
    count(reply, "waiter_count", waiters);
    // The holder that has held longest; INFO shows all.
    let first = lock.holds().next();
    text(reply, "owner", first.map_or(b"", |hold| &hold.owner));
    number(reply, "token", first.map_or(0, |hold| hold.token.get()));
    number(reply, "left_ms", first.map_or(0, |hold| left_ms(hold, now)));
}

/// What is left of its grant; of one that was loaded and has not begun, all.
fn left_ms(hold: &Hold, now: Time) -> u64 {
    let left = if hold.deadline() == Time::NEVER { hold.lease() } else { hold.deadline().left_from(now) };
    left.as_ms().into()
}

fn mode_of(lock: Option<&Lock>) -> &'static str {
    lock.and_then(Lock::mode).map_or("free", mode_text)
}

fn mode_text(mode: Mode) -> &'static str {
    match mode {
        Mode::Exclusive => "exclusive",
        Mode::Shared => "shared",
    }
}

fn text(reply: &mut impl Reply, name: &str, value: &[u8]) {
    reply.bulk(name.as_bytes());
    reply.bulk(value);
}

fn number(reply: &mut impl Reply, name: &str, value: u64) {
    reply.bulk(name.as_bytes());
    reply.integer(value);
}

fn count(reply: &mut impl Reply, name: &str, value: usize) {
    number(reply, name, value as u64);
}
