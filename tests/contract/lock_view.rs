//! What FLOCK.INFO shows of one lock, and requests that wait: for tests that look at a lock from outside.

use flock_tests::args;
use flock_tests::reply::Reply;
use flock_tests::resp::{Conn, Protocol};
use flock_tests::server::Server;

/// The entry of one holder.
#[track_caller]
pub(crate) fn holder(conn: &mut Conn, key: &str, owner: &str) -> Reply {
    let info = conn.cmd(&args!["FLOCK.INFO", key]);
    assert!(!info.is_nil(), "nobody holds {key}");
    let mut holders = info.field("holders").as_array().iter();
    match holders.find(|holder| *holder.field("owner") == Reply::bulk(owner)) {
        Some(holder) => holder.clone(),
        None => panic!("{owner} does not hold {key}: {info}"),
    }
}

/// What is left of one holder's lease, in milliseconds.
#[track_caller]
pub(crate) fn left_ms(conn: &mut Conn, key: &str, owner: &str) -> i64 {
    holder(conn, key, owner).field("left_ms").as_int()
}

/// The owners that hold the lock, the earliest grant first.
#[track_caller]
pub(crate) fn holders(conn: &mut Conn, key: &str) -> Vec<String> {
    owners(conn, key, "holders")
}

/// The owners that wait for the lock, the next one first.
#[track_caller]
pub(crate) fn waiters(conn: &mut Conn, key: &str) -> Vec<String> {
    owners(conn, key, "waiters")
}

#[track_caller]
fn owners(conn: &mut Conn, key: &str, list: &str) -> Vec<String> {
    let info = conn.cmd(&args!["FLOCK.INFO", key]);
    if info.is_nil() {
        return Vec::new();
    }
    let entries = info.field(list).as_array().iter();
    entries.map(|entry| entry.field("owner").as_str().to_owned()).collect()
}

/// A connection whose request waits in the server; its answer is still to come.
#[track_caller]
pub(crate) fn waiting<A: AsRef<[u8]>>(server: &Server, protocol: Protocol, request: &[A]) -> Conn {
    let mut conn = server.connect(protocol);
    conn.send(request);
    server.wait_until_blocked(&conn);
    conn
}
