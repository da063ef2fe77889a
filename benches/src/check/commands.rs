//! How many commands the server runs for one contended acquisition, its release included: as the server counts them.

use std::time::{Duration, Instant};

use flock_client::{Flock, WaitMode};
use flock_tests::args;
use flock_tests::random::Random;
use flock_tests::resp::Protocol;
use flock_tests::server::Server;

use super::{builder, runtime, settle};
use crate::measure::Summary;
use crate::names::{self, OWNER_BYTES};
use crate::report::{Report, Unit};
use crate::scheme::LONG_LEASE_MS;

const KEY: &str = "lock:wanted-by-many";
const CONTENDERS: usize = 8;
const RUN: Duration = Duration::from_secs(2);
/// What the harness sends to connect and to ask.
const OURS: [&str; 4] = ["config|resetstat", "info", "hello", "client|id"];

/// The goals. What clients do to keep their connections counts too; what this bench asks to know the count does not.
pub fn per_acquisition(report: &mut Report, random: &mut Random) {
    report.section("Commands per contended acquisition and release: 8 contenders on one lock, INFO commandstats");
    let server = builder().start();
    settle();
    reset(&server);
    let acquired = by_blocking(&server, random);
    let (each, parts) = per_acquired(&server, acquired);
    report.goal("BLOCK, connections of their own", each, 2.0, Unit::Ratio);
    report.note(&format!("  {parts}"));
    for (what, mode, limit) in
        [("flock-client, Push (QUEUE)", WaitMode::Push, Some(3.0)), ("flock-client, Poll", WaitMode::Poll, None)]
    {
        let acquired = by_client(&server, mode);
        let (each, parts) = per_acquired(&server, acquired);
        match limit {
            Some(limit) => report.goal(what, each, limit, Unit::Ratio),
            None => report.shown(what, each, Unit::Ratio),
        }
        report.note(&format!("  {parts}"));
    }
}

fn by_blocking(server: &Server, random: &mut Random) -> u64 {
    let end = Instant::now() + RUN;
    let contend = |owners: Random| {
        let mut owners = owners;
        let mut conn = server.connect(Protocol::Resp2);
        let mut acquired = 0;
        while Instant::now() < end {
            let owner = names::owner(&mut owners, OWNER_BYTES);
            conn.cmd(&args!["FLOCK.ACQUIRE", KEY, owner, LONG_LEASE_MS, "BLOCK", 0]).as_token();
            assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", KEY, owner]).as_int(), 1);
            acquired += 1;
        }
        acquired
    };
    std::thread::scope(|scope| {
        let contenders: Vec<_> = (0..CONTENDERS)
            .map(|_| {
                let owners = Random::from_seed(random.number());
                scope.spawn(move || contend(owners))
            })
            .collect();
        contenders.into_iter().map(|contender| contender.join().expect("a contender is answered")).sum()
    })
}

/// Every contender has a client of its own, as in a process of its own.
fn by_client(server: &Server, mode: WaitMode) -> u64 {
    runtime().block_on(async {
        let mut clients = Vec::new();
        for _ in 0..CONTENDERS {
            clients.push(Flock::connect(format!("valkey://{}", server.addr())).await.expect("the server answers"));
        }
        reset(server);
        let end = Instant::now() + RUN;
        let contenders = clients.into_iter().map(|flock| {
            tokio::spawn(async move {
                let mut acquired = 0;
                while Instant::now() < end {
                    let guard = flock.lock(KEY).wait_mode(mode).await.expect("the lock is granted in turn");
                    let _ = guard.release().await.expect("the lock is given back");
                    acquired += 1;
                }
                acquired
            })
        });
        let mut acquired = 0;
        for contender in contenders.collect::<Vec<_>>() {
            acquired += contender.await.expect("a contender does not fail");
        }
        acquired
    })
}

fn reset(server: &Server) {
    server.connect(Protocol::Resp2).cmd(&["CONFIG", "RESETSTAT"]);
}

/// The commands since the reset, each with its number.
fn calls(server: &Server) -> Vec<(String, u64)> {
    let reply = server.connect(Protocol::Resp2).cmd(&["INFO", "commandstats"]);
    let lines = reply.as_str().lines().filter_map(|line| line.strip_prefix("cmdstat_")?.split_once(":calls="));
    let calls = lines.map(|(name, rest)| {
        let calls = rest.split(',').next().and_then(|calls| calls.parse().ok());
        (name.to_owned(), calls.expect("INFO says how many"))
    });
    calls.filter(|(name, _)| !OURS.contains(&name.as_str())).collect()
}

/// All commands for each acquisition, and which they were.
fn per_acquired(server: &Server, acquired: u64) -> (Summary, String) {
    let calls = calls(server);
    let each = |calls: u64| calls as f64 / acquired as f64;
    let sum = Summary::exactly(each(calls.iter().map(|(_, calls)| calls).sum()));
    let parts = calls.iter().map(|(name, calls)| format!("{name} {:.2}", each(*calls)));
    (sum, parts.collect::<Vec<_>>().join(", "))
}
