//! The goals of `make bench-check`.
//!
//! | file | goals |
//! |---|---|
//! | [`pair`] | what an ACQUIRE and a RELEASE cost the server, beside what a user would write instead, and with many locks held |
//! | [`handoff`] | a handoff does not depend on how many wait, and takes little longer than a round trip |
//! | [`commands`] | how many commands a contended acquisition takes |
//! | [`readers`] | a release among many readers |
//! | [`memory`] | bytes per held lock and per waiter; nothing per released name |
//! | [`burst`] | leases that all end at once do not stop the server |
//! | [`client`] | the client beside a plain connection; what it costs to keep many locks |

pub mod burst;
pub mod client;
pub mod commands;
pub mod handoff;
pub mod memory;
pub mod pair;
pub mod readers;

use std::time::Duration;

use flock_tests::resp::Protocol;
use flock_tests::server::{Builder, Info, Server};
use flock_tests::wait::{let_pass, wait_until};
use tokio::runtime::Runtime;

/// The module finds out within about a second of its start whether anybody receives what it replicates; it works less if nobody does.
const SETTLES_WITHIN: Duration = Duration::from_millis(1500);
/// A table of a million keys is rehashed in the background.
const REHASHED_WITHIN: Duration = Duration::from_secs(30);

/// A server as most measurements want it: the newest, one module, no snapshots.
pub fn builder() -> Builder {
    // Both sides could trigger a rewrite of the append-only file, whose fork would be counted to whoever runs then.
    Server::builder().config("auto-aof-rewrite-percentage", 0)
}

/// A runtime for clients: as many threads as there are processors on the smallest machine that is of interest.
fn runtime() -> Runtime {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("the machine has threads")
}

/// Waits until servers that have just started behave as they will later.
pub fn settle() {
    let_pass(SETTLES_WITHIN);
}

/// Waits until the server's own tables are as they will stay: growing them takes a while after a load.
pub fn wait_until_rehashed(server: &Server) {
    let mut conn = server.connect(Protocol::Resp2);
    // The server does a millisecond of it each time its cron runs.
    conn.cmd(&["CONFIG", "SET", "hz", "500"]);
    wait_until("the server's tables are rehashed", REHASHED_WITHIN, || {
        Info::ask(&mut conn, "memory").number("mem_overhead_db_hashtable_rehashing") == 0
    });
    conn.cmd(&["CONFIG", "SET", "hz", "10"]);
}
