//! Peers in other languages: a program that does one run and prints what came of it.
//!
//! It is given the server's port, the number of contenders, and in milliseconds the hold, the pause and the length of the run, and prints microseconds:
//! how long the run was and how long the lock was held in all; the waits that ended after the run; then a line of waits for each contender.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::contention::{Outcome, Setting};

/// redis-py's `Lock`; none if `$PEERS_PYTHON` names no Python that has it.
pub(crate) fn redis_py(server: SocketAddr, setting: Setting) -> Option<Outcome> {
    run(&std::env::var("PEERS_PYTHON").ok()?, "redis_py.py", server, setting)
}

/// node-redlock with ioredis; none if `$PEERS_NODE` names no Node.
pub(crate) fn node_redlock(server: SocketAddr, setting: Setting) -> Option<Outcome> {
    run(&std::env::var("PEERS_NODE").ok()?, "node_redlock.js", server, setting)
}

fn run(program: &str, script: &str, server: SocketAddr, setting: Setting) -> Option<Outcome> {
    let Setting { contenders, hold, pause, length } = setting;
    let mut command = Command::new(program);
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(script)).arg(server.port().to_string());
    command.arg(contenders.to_string());
    command.args([hold, pause, length].map(|time| time.as_millis().to_string()));
    let output = command.output().unwrap_or_else(|error| panic!("cannot run {program}: {error}"));
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut lines = text.lines().map(|line| {
        line.split_whitespace()
            .map(|micros| Duration::from_micros(micros.parse().expect("a number")))
            .collect::<Vec<_>>()
    });
    let [elapsed, held] = lines.next()?.try_into().expect("two numbers come first");
    Some(Outcome { elapsed, held, late: lines.next()?, waits: lines.collect() })
}
