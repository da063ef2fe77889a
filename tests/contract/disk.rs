//! The disk is full: what cannot be written is not granted, and what was granted with `appendfsync always` is there.
//!
//! The kernel's bound on the size of files stands in for a full disk: set on the running server it makes writes fail, in the middle of
//! one, and lifted it makes them succeed again; for any user, on any file system.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use flock_tests::args;
use flock_tests::on_own_servers;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::{Builder, Server};
use flock_tests::wait::wait_until;

use crate::acknowledged::Load;
use crate::lock_view::{holders, waiting};
use crate::scene::{LEASE_MS, QUIET, hold, release, waiter};

on_own_servers![
    full_disk_refuses_requests,
    full_disk_grants_nothing_to_waiters,
    snapshot_that_fails_refuses_requests,
    acknowledged_requests_survive_a_full_disk,
];

/// How big the server's files may become: unlimited if `None`.
#[track_caller]
fn limit_files(server: &Server, bytes: Option<u64>) {
    // The soft limit only: the server's user may raise it again.
    let limit = bytes.map_or("unlimited:".to_owned(), |bytes| format!("{bytes}:"));
    let status = Command::new("prlimit")
        .args(["--pid", &server.pid().to_string(), &format!("--fsize={limit}")])
        .status()
        .expect("prlimit (package util-linux) runs");
    assert!(status.success(), "the limit cannot be set");
}

/// Servers that are told of a file too big by an error, as they are of a full disk, and not by a signal. (What a process ignores, the
/// program that it becomes ignores too; a server by itself dies of this signal.) They are started by a script in the directory of the
/// server that is answered beside them.
#[track_caller]
fn filling_up(builder: Builder) -> (Builder, Server) {
    let scratch = builder.start();
    let is_old = scratch.info("server").text("valkey_version").starts_with("8.");
    let variable = if is_old { "VALKEY_SERVER_OLD" } else { "VALKEY_SERVER" };
    let script = scratch.dir().join("ignore-xfsz.sh");
    let text = format!("#!/bin/sh\ntrap '' XFSZ\nexec \"${variable}\" \"$@\"\n");
    fs::write(&script, text).expect("a script can be written");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("a script can be made executable");
    (builder.binary(script), scratch)
}

/// The newest append-only file's size.
fn file_bytes(server: &Server) -> u64 {
    let file = server.dir().join("appendonlydir/appendonly.aof.1.incr.aof");
    fs::metadata(file).expect("the file is there").len()
}

/// Fills the disk, and waits until the server has noticed.
#[track_caller]
fn fill_disk(server: &Server, conn: &mut Conn) {
    limit_files(server, Some(file_bytes(server) + 50));
    wait_until("the server notices that the disk is full", ANSWER_WITHIN, || {
        conn.cmd(&["SET", "filler", "0123456789"]).error_code() == Some("MISCONF")
    });
}

fn full_disk_refuses_requests(builder: Builder) {
    // C9. A grant that is never written is forgotten at the next start, and granted again. Once the disk has room, all goes on.
    let (builder, _scratch) = filling_up(builder);
    let server = builder.config("appendonly", "yes").config("appendfsync", "everysec").start();
    let mut conn = server.connect(Protocol::Resp2);
    let token = hold(&mut conn, "held", "alice");
    fill_disk(&server, &mut conn);
    for request in [
        &args!["FLOCK.ACQUIRE", "free", "bob", LEASE_MS][..],
        &args!["FLOCK.ACQUIRE", "free", "bob", LEASE_MS, "BLOCK", 0],
        &args!["FLOCK.ACQUIRE", "held", "bob", LEASE_MS, "BLOCK", 0],
        &args!["FLOCK.ACQUIRE", "held", "bob", LEASE_MS, "QUEUE", 5000, "CHANNEL", "news"],
        &args!["FLOCK.RELEASE", "held", "alice"],
        &args!["FLOCK.RENEW", "held", "alice", LEASE_MS],
        &args!["FLOCK.REVOKE", "held"],
    ] {
        assert_eq!(conn.cmd(request).error_code(), Some("MISCONF"), "{}", request[0].escape_ascii());
    }
    assert_eq!(holders(&mut conn, "held"), ["alice"]);
    assert_eq!(holders(&mut conn, "free"), [""; 0]);
    limit_files(&server, None);
    wait_until("the server notices that the disk has room", ANSWER_WITHIN, || {
        conn.cmd(&["SET", "filler", "0"]) == Reply::ok()
    });
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "held", token]), Reply::Int(1));
    release(&mut conn, "held", "alice");
    assert!(hold(&mut conn, "held", "bob") > token);
}

fn full_disk_grants_nothing_to_waiters(builder: Builder) {
    // C9. Nobody sends anything: a lease ends, and a waiter is next. That grant could not be written either.
    let (builder, _scratch) = filling_up(builder);
    let server = builder.config("appendonly", "yes").config("appendfsync", "everysec").start();
    let mut conn = server.connect(Protocol::Resp2);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 300]).as_token();
    let mut bob = waiter(&server, Protocol::Resp2, "k", "bob");
    let mut carol =
        waiting(&server, Protocol::Resp2, &args!["FLOCK.ACQUIRE", "k", "carol", LEASE_MS, "BLOCK", LEASE_MS]);
    fill_disk(&server, &mut conn);
    wait_until("alice's lease is over", ANSWER_WITHIN, || {
        let info = conn.cmd(&["FLOCK.INFO", "k"]);
        info.get("holders").is_none_or(|holders| holders.as_array()[0].field("state").as_str() == "expired")
    });
    bob.expect_silence(QUIET);
    assert_eq!(holders(&mut conn, "k"), ["alice"], "over, and not ended");
    limit_files(&server, None);
    assert!(bob.recv().as_token() > token);
    release(&mut conn, "k", "bob");
    carol.recv().as_token();
}

fn snapshot_that_fails_refuses_requests(builder: Builder) {
    // The other way to be unable to write: a snapshot that is due and fails. `stop-writes-on-bgsave-error` is on by default.
    let (builder, _scratch) = filling_up(builder);
    let server = builder.config("save", "3600 1000000").start();
    let mut conn = server.connect(Protocol::Resp2);
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 500]).as_token();
    let mut bob = waiter(&server, Protocol::Resp2, "k", "bob");
    limit_files(&server, Some(10));
    assert_eq!(conn.cmd(&["BGSAVE"]).error_code(), None);
    wait_until("the snapshot has failed", ANSWER_WITHIN, || {
        server.info("persistence").text("rdb_last_bgsave_status") == "err"
    });
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", "free", "bob", LEASE_MS]).error_code(), Some("MISCONF"));
    wait_until("alice's lease is over", ANSWER_WITHIN, || {
        let info = conn.cmd(&["FLOCK.INFO", "k"]);
        info.get("holders").is_none_or(|holders| holders.as_array()[0].field("state").as_str() == "expired")
    });
    bob.expect_silence(QUIET);
    limit_files(&server, None);
    assert_eq!(conn.cmd(&["BGSAVE"]).error_code(), None);
    bob.recv().as_token();
    hold(&mut conn, "free", "bob");
}

fn acknowledged_requests_survive_a_full_disk(builder: Builder) {
    // C9. With `appendfsync always` the server ends itself rather than to answer what it could not write. What it has answered is there
    // at the next start.
    let (builder, _scratch) = filling_up(builder);
    let mut server = builder.appendonly().start();
    let mut load = Load::start(&server);
    load.wait_answers(100);
    limit_files(&server, Some(file_bytes(&server) + 20_000));
    let status = server.wait_exit(ANSWER_WITHIN);
    assert_eq!(status.code(), Some(1), "{}", server.log());
    // The new process has no limit.
    server.start_again();
    load.assert_done(&mut server.connect(Protocol::Resp2));
}
