//! FLOOR: raises the token counter above what a storage has seen. Tokens on a shared server only rise, so raising them is harmless there.

use flock_tests::args;
use flock_tests::reply::Reply;
use flock_tests::resp::{Conn, Protocol};
use flock_tests::server::{Builder, Info, Server, unique_key};
use flock_tests::{on_own_servers, on_shared_servers};

use crate::lock_view::{holder, holders};

on_shared_servers![
    next_token_exceeds_the_floor,
    floor_is_raised_though_the_lock_is_busy,
    floor_is_raised_though_the_request_is_refused,
    floor_does_not_change_the_token_of_a_hold,
    conversion_to_exclusive_exceeds_the_floor,
    floor_below_the_counter_changes_nothing,
    incredible_floor_is_refused,
    refused_floor_grants_nothing,
];

on_own_servers![
    highest_credible_floor_is_one_day_ahead,
    refused_floor_leaves_the_counter,
    bad_request_does_not_raise_the_counter,
    raised_counter_stays_raised,
    floor_can_be_disabled,
];

/// Ten seconds of tokens.
const FAR: u64 = 1_000_000;

fn next_token_exceeds_the_floor(server: &Server, protocol: Protocol) {
    // The storage has seen a higher token and refuses everybody until the counter is above it.
    let key = unique_key("exceeds");
    let mut conn = server.connect(protocol);
    let first = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    let second = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000, "FLOOR", first + FAR]).as_token();
    assert!(second > first + FAR, "{first} {second}");
}

fn floor_is_raised_though_the_lock_is_busy(server: &Server, protocol: Protocol) {
    // "Whatever then happens": the storage is healed also if somebody else holds the lock at this moment.
    let key = unique_key("busy");
    let mut conn = server.connect(protocol);
    let first = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 5000, "FLOOR", first + FAR]), Reply::Nil);
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    let second = conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 5000]).as_token();
    assert!(second > first + FAR, "{first} {second}");
}

fn floor_is_raised_though_the_request_is_refused(server: &Server, protocol: Protocol) {
    // "Whatever then happens", with an error instead of nil.
    let key = unique_key("refused");
    let mut conn = server.connect(protocol);
    let first = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    let reply = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000, "NEW", "FLOOR", first + FAR]);
    assert_eq!(reply.error_code(), Some("HELD"));
    let second = conn.cmd(&args!["FLOCK.ACQUIRE", unique_key("other"), "bob", 5000]).as_token();
    assert!(second > first + FAR, "{first} {second}");
}

fn floor_does_not_change_the_token_of_a_hold(server: &Server, protocol: Protocol) {
    // A retry with FLOOR is still the same request: same token, though it is below the floor.
    let key = unique_key("same");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    let again = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000, "FLOOR", token + FAR]).as_token();
    assert_eq!(again, token);
    assert_eq!(holder(&mut conn, &key, "alice").field("token").as_token(), token);
}

fn conversion_to_exclusive_exceeds_the_floor(server: &Server, protocol: Protocol) {
    // A conversion is a grant of a new token, so it heals the storage as well.
    let key = unique_key("converted");
    let mut conn = server.connect(protocol);
    let old = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000, "SHARED"]).as_token();
    let new = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000, "CONVERT", old, "FLOOR", old + FAR]).as_token();
    assert!(new > old + FAR, "{old} {new}");
}

fn floor_below_the_counter_changes_nothing(server: &Server, protocol: Protocol) {
    // FLOOR only raises: a counter set back would hand out tokens twice.
    let key = unique_key("below");
    let mut conn = server.connect(protocol);
    let first = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000]).as_token();
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    let second = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000, "FLOOR", 1]).as_token();
    assert!(second > first, "{first} {second}");
}

fn incredible_floor_is_refused(server: &Server, protocol: Protocol) {
    // One such request near 2^53 would use up all tokens for good. The refusal names the argument and the range.
    let key = unique_key("incredible");
    let mut conn = server.connect(protocol);
    let reply = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000, "FLOOR", 9_007_199_254_740_991_u64]);
    assert_eq!(reply.error_code(), Some("TOKENFLOOR"));
    assert!(reply.error_text().contains("FLOOR token"), "{reply}");
    assert!(reply.error_text().contains("allowed now: 1 to "), "{reply}");
}

fn refused_floor_grants_nothing(server: &Server, protocol: Protocol) {
    // A grant under a token that the storage refuses is no use; the caller was told that the request failed.
    let key = unique_key("nothing");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000, "FLOOR", 9_007_199_254_740_991_u64]);
    assert_eq!(holders(&mut conn, &key), [""; 0]);
    assert_eq!(conn.cmd(&args!["EXISTS", key]), Reply::Int(0));
}

fn counter(conn: &mut Conn) -> i64 {
    Info::ask(conn, "flock").number("flock_counter")
}

/// The highest floor that is accepted, as the refusal of a higher one tells it.
#[track_caller]
fn highest_floor(conn: &mut Conn) -> u64 {
    let reply = conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 5000, "FLOOR", 9_007_199_254_740_991_u64]);
    let (_, range) = reply.error_text().split_once("1 to ").expect("the refusal tells the range");
    range.trim_end_matches(')').parse().expect("the range ends with a number")
}

fn highest_credible_floor_is_one_day_ahead(builder: Builder) {
    // A day of tokens above counter or clock: the named bound is accepted, twice the day is not.
    const DAY: u64 = 8_640_000_000;
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let highest = highest_floor(&mut conn);
    let too_high = conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 5000, "FLOOR", highest + DAY]);
    assert_eq!(too_high.error_code(), Some("TOKENFLOOR"));
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 5000, "FLOOR", highest]).as_token();
    assert_eq!(token, highest + 1);
}

fn refused_floor_leaves_the_counter(builder: Builder) {
    // Refused means: not even raised to what would have been allowed.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let before = counter(&mut conn);
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 5000, "FLOOR", 9_007_199_254_740_991_u64]);
    assert_eq!(counter(&mut conn), before);
}

fn bad_request_does_not_raise_the_counter(builder: Builder) {
    // Bad input changes nothing: a request that names no lock, or has a typing error, must not leave a trace.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    conn.cmd(&args!["SET", "string", "v"]);
    let before = counter(&mut conn);
    let floor = u64::try_from(before).expect("a counter is positive") + FAR;
    let wrong_type = conn.cmd(&args!["FLOCK.ACQUIRE", "string", "alice", 5000, "FLOOR", floor]);
    assert_eq!(wrong_type.error_code(), Some("WRONGTYPE"));
    let typo = conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 5000, "FLOOR", floor, "SHARD"]);
    assert_eq!(typo.error_code(), Some("ERR"));
    assert_eq!(counter(&mut conn), before);
}

fn raised_counter_stays_raised(builder: Builder) {
    // Flushing takes the locks, never the counter: the storage has seen what it has seen.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let floor = highest_floor(&mut conn);
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 5000, "FLOOR", floor]).as_token();
    conn.cmd(&["FLUSHALL"]);
    assert!(conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 5000]).as_token() > floor);
}

fn floor_can_be_disabled(builder: Builder) {
    // flock.floor-enabled no: an operator who trusts no client with the counter. Other requests are not touched.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let before = counter(&mut conn);
    conn.cmd(&["CONFIG", "SET", "flock.floor-enabled", "no"]);
    let reply = conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 5000, "FLOOR", 5]);
    assert_eq!(reply.error_code(), Some("ERR"));
    assert!(reply.error_text().contains("flock.floor-enabled"), "{reply}");
    assert_eq!(counter(&mut conn), before);
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 5000]).as_token();
}
