//! The scene that most of these tests begin with: somebody holds a lock, others wait for it, somebody listens.

use std::time::{Duration, Instant};

use flock_core::Token;
use flock_core::effect::Notice;
use flock_core::refusal::{EndReason, LossReason};
use flock_core::time::Millis;
use flock_core::wire::message::{OwnerMessage, PROBE};
use flock_tests::args;
use flock_tests::cpu::Stopwatch;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::{Builder, Server, unique_key};
use flock_tests::subscriber::Subscriber;
use flock_tests::wait::wait_until;

use crate::lock_view::{waiters, waiting};

/// A lease far longer than any test: whatever happens to it meanwhile is not its end.
pub(crate) const LEASE_MS: u32 = 60_000;

/// How late a thing on time may be, by a [`Stopwatch`](flock_tests::cpu::Stopwatch): a tick. The servers that are judged by it have a
/// cron once a second, which cannot stand in for the module's timer.
pub(crate) const TICK: Duration = Duration::from_millis(10);
/// What is judged: the last slice before a thread is put aside is not counted as waiting for a processor.
const TICK_JUDGED: Duration = Duration::from_millis(20);

/// A handoff takes half a round trip; the bound only tells it from a lease that ran out, which takes [`LEASE_MS`].
pub(crate) const HANDOFF_WITHIN: Duration = Duration::from_secs(2);

/// How long nothing must happen, where something would come at once if it came at all.
pub(crate) const QUIET: Duration = Duration::from_millis(40);

/// How big the tests are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tier {
    Quick,
    Long,
    Soak,
}

/// The tier that `FLOCK_TEST_TIER` names; the quick one unless it does.
fn tier() -> Tier {
    match std::env::var("FLOCK_TEST_TIER").as_deref() {
        Ok("long") => Tier::Long,
        Ok("soak") => Tier::Soak,
        Ok("quick") | Err(_) => Tier::Quick,
        Ok(other) => panic!("FLOCK_TEST_TIER is quick, long or soak, not {other}"),
    }
}

/// Whether the long tier runs, or more: the same tests, bigger.
pub(crate) fn long_tier() -> bool {
    tier() != Tier::Quick
}

/// How many rounds a test makes: those of the quick or of the long tier. The soak makes as many times those of the long one as
/// `MINUTES` says: the largest tests of the long tier take about a minute, so they then take about so long.
pub(crate) fn rounds(quick: u64, long: u64) -> u64 {
    match tier() {
        Tier::Quick => quick,
        Tier::Long => long,
        Tier::Soak => {
            let minutes = std::env::var("MINUTES").unwrap_or_else(|_| "60".into());
            long * minutes.parse::<u64>().unwrap_or_else(|_| panic!("MINUTES is a whole number, not {minutes}"))
        }
    }
}

/// A server whose cron comes once a second, so that it cannot stand in for the module's timer.
#[track_caller]
pub(crate) fn quiet(builder: &Builder) -> Server {
    builder.clone().config("hz", 1).config("dynamic-hz", "no").start()
}

/// What the watch was started for, and was to last so long, has just ended: within a [`TICK`].
#[track_caller]
pub(crate) fn on_time(watch: &Stopwatch, lasts_ms: u64) {
    let late = watch.late(Duration::from_millis(lasts_ms));
    assert!(late <= TICK_JUDGED, "{late:?} late");
}

/// Somebody waits for a lock, the lease of which began at `begun`, for `lease_ms`; and must get it within a [`TICK`] of its end.
#[track_caller]
pub(crate) fn outlast(server: &Server, key: &str, begun: Instant, lease_ms: u64) {
    let mut conn = server.connect(Protocol::Resp2);
    let watch = Stopwatch::start(server);
    let left = Duration::from_millis(lease_ms).saturating_sub(begun.elapsed());
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "who outlasts it", LEASE_MS, "BLOCK", 0]).as_token();
    let late = watch.late(left);
    assert!(late <= TICK_JUDGED, "{late:?} late");
}

/// `owner` takes the lock exclusively, for [`LEASE_MS`].
#[track_caller]
pub(crate) fn hold(conn: &mut Conn, key: &str, owner: &str) -> u64 {
    conn.cmd(&args!["FLOCK.ACQUIRE", key, owner, LEASE_MS]).as_token()
}

/// A lock of the test's own, which alice holds, and her connection.
#[track_caller]
pub(crate) fn held_by_alice(server: &Server, protocol: Protocol, name: &str) -> (String, Conn) {
    let key = unique_key(name);
    let mut conn = server.connect(protocol);
    hold(&mut conn, &key, "alice");
    (key, conn)
}

/// As [`hold`], and the server speaks to the holder on `channel`.
#[track_caller]
pub(crate) fn hold_with_channel(conn: &mut Conn, key: &str, owner: &str, channel: &str) -> u64 {
    conn.cmd(&args!["FLOCK.ACQUIRE", key, owner, LEASE_MS, "CHANNEL", channel]).as_token()
}

/// `owner` gives the lock back.
#[track_caller]
pub(crate) fn release(conn: &mut Conn, key: &str, owner: &str) {
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, owner]), Reply::Int(1));
}

/// `owner` waits for the lock over a connection of its own, without limit.
#[track_caller]
pub(crate) fn waiter(server: &Server, protocol: Protocol, key: &str, owner: &str) -> Conn {
    waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, owner, LEASE_MS, "BLOCK", 0])
}

/// `owner` queues, to be told on `channel`; answers its position.
#[track_caller]
pub(crate) fn queue(conn: &mut Conn, key: &str, owner: &str, channel: &str) -> i64 {
    position(&conn.cmd(&queue_request(key, owner, channel)))
}

/// The request of [`queue`].
pub(crate) fn queue_request(key: &str, owner: &str, channel: &str) -> [Vec<u8>; 8] {
    args!["FLOCK.ACQUIRE", key, owner, LEASE_MS, "QUEUE", LEASE_MS, "CHANNEL", channel]
}

/// The position in the reply of a request that was queued.
#[track_caller]
pub(crate) fn position(reply: &Reply) -> i64 {
    match reply {
        Reply::Array(items) if items[0] == Reply::bulk("QUEUED") => items[1].as_int(),
        other => panic!("expected to be queued, got {other}"),
    }
}

/// Somebody who listens to `channel`.
#[track_caller]
pub(crate) fn listener(server: &Server, protocol: Protocol, channel: &str) -> Subscriber {
    Subscriber::new(server.connect(protocol), "SUBSCRIBE", &[channel])
}

/// A channel of the test's own, and somebody who listens to it.
#[track_caller]
pub(crate) fn heard_channel(server: &Server, protocol: Protocol) -> (String, Subscriber) {
    let channel = unique_key("channel");
    let listener = listener(server, protocol, &channel);
    (channel, listener)
}

/// Runs `commands` as one transaction: no callback and no event comes between them. Answers their replies.
#[track_caller]
pub(crate) fn transaction(conn: &mut Conn, commands: &[&[Vec<u8>]]) -> Vec<Reply> {
    assert_eq!(conn.cmd(&["MULTI"]), Reply::ok());
    for command in commands {
        assert_eq!(conn.cmd(command), Reply::Simple("QUEUED".into()));
    }
    conn.cmd(&["EXEC"]).as_array().to_vec()
}

/// Waits until exactly these owners wait for the lock, in this order.
#[track_caller]
pub(crate) fn wait_until_waiting(conn: &mut Conn, key: &str, owners: &[&str]) {
    wait_until(&format!("{owners:?} wait for {key}"), ANSWER_WITHIN, || waiters(conn, key) == owners);
}

/// Waits until nobody holds the lock: then its key is gone.
#[track_caller]
pub(crate) fn wait_until_free(conn: &mut Conn, key: &str) {
    wait_until(&format!("{key} is free"), ANSWER_WITHIN, || conn.cmd(&["EXISTS", key]) == Reply::Int(0));
}

/// A message to an owner, as it was heard.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Heard {
    pub(crate) notice: Notice,
    pub(crate) key: String,
    pub(crate) owner: String,
}

impl Heard {
    /// What should be heard.
    pub(crate) fn new(notice: Notice, key: &str, owner: &str) -> Heard {
        Heard { notice, key: key.into(), owner: owner.into() }
    }
}

/// The next message to an owner; a probe says nothing. Keys and owners of these tests are UTF-8.
#[track_caller]
pub(crate) fn hear(listener: &mut Subscriber) -> Heard {
    let mut payload = listener.message().payload;
    while payload == PROBE {
        payload = listener.message().payload;
    }
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    match OwnerMessage::parse(&payload) {
        Ok(message) => Heard { notice: message.notice, key: text(message.key), owner: text(message.owner) },
        Err(error) => panic!("expected a message to an owner, got \"{}\": {error:?}", payload.escape_ascii()),
    }
}

/// The token of a grant that is to be heard next, to this owner and for a whole lease.
#[track_caller]
pub(crate) fn hear_grant(listener: &mut Subscriber, key: &str, owner: &str) -> u64 {
    let heard = hear(listener);
    let Notice::Granted { token, .. } = heard.notice else {
        panic!("expected a grant to {owner}, got {heard:?}");
    };
    assert_eq!(heard, Heard::new(granted(token.get(), LEASE_MS), key, owner));
    token.get()
}

/// A grant that lasts its lease.
pub(crate) fn granted(token: u64, lease_ms: u32) -> Notice {
    Notice::Granted { token: fencing_token(token), lasts: Millis(lease_ms), claim: false }
}

/// A grant that lasts its claim.
pub(crate) fn claimed(token: u64, claim_ms: u32) -> Notice {
    Notice::Granted { token: fencing_token(token), lasts: Millis(claim_ms), claim: true }
}

/// A hold is lost.
pub(crate) fn lost(token: u64, reason: LossReason) -> Notice {
    Notice::Lost { token: fencing_token(token), reason }
}

/// A wait has ended.
pub(crate) fn ended(reason: EndReason) -> Notice {
    Notice::Ended(reason)
}

pub(crate) fn fencing_token(number: u64) -> Token {
    Token::new(number).expect("a token is from 1 to 2^53 - 1")
}
