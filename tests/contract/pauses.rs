//! While the server must not write, nothing is decided; when it may again, everything happens at once.
//!
//! Replicating outside a client's command during a pause fails an assertion of the server. So every test here has leases, waits
//! and sessions fall due in the pause, with a replica and an append-only file, and wants the server alive.

use std::time::Duration;

use flock_tests::args;
use flock_tests::on_own_servers;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::{Builder, Server};
use flock_tests::topology::{Replicated, fail_over, wait_in_step};
use flock_tests::wait::{holds_for, let_pass, wait_until};

use crate::lock_view::{holder, holders};
use crate::scene::{LEASE_MS, waiter};
use crate::traffic::{assert_same, contents};

on_own_servers![
    pause_of_writes_defers_what_is_due,
    pause_of_everything_defers_what_is_due,
    pause_shows_ended_holds_as_expired,
    waits_that_end_in_a_pause_end_after_it,
    failover_with_leases_due_is_clean,
    failover_that_is_given_up_resumes,
    shutdown_that_waits_for_a_replica_decides_nothing,
    shutdown_ends_waits,
];

/// How many leases fall due together.
const LEASES: u32 = 1_000;

/// [`LEASES`] leases, ten of them with a waiter behind, and session holds on a connection of their own.
struct Crowd {
    sessions: Conn,
    waiters: Vec<Conn>,
}

#[track_caller]
fn gather(server: &Server) -> Crowd {
    let mut sessions = server.connect(Protocol::Resp2);
    let script =
        "for i = 1, ARGV[1] do redis.call('FLOCK.ACQUIRE', 'short ' .. i, 'alice', ARGV[2], 'CHANNEL', 'news') end";
    assert!(sessions.cmd(&args!["EVAL", script, 0, LEASES, LEASE_MS]).is_nil());
    for number in 0..20 {
        let key = format!("session {number}");
        sessions.cmd(&args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS, "SESSION", 1]).as_token();
    }
    let waiters = (1..=10).map(|number| waiter(server, Protocol::Resp2, &format!("short {number}"), "bob")).collect();
    Crowd { sessions, waiters }
}

/// From now on the leases last `lease_ms`; and the server gets `then` together with that, however long the test was about its crowd.
#[track_caller]
fn shorten_leases(conn: &mut Conn, lease_ms: u32, then: &[Vec<u8>]) {
    let script = "for i = 1, ARGV[1] do redis.call('FLOCK.RENEW', 'short ' .. i, 'alice', ARGV[2]) end";
    conn.send(&args!["EVAL", script, 0, LEASES, lease_ms]);
    conn.send(then);
    assert!(conn.recv().is_nil());
    assert_eq!(conn.recv(), Reply::ok());
}

impl Crowd {
    /// Connections go in the pause: that of the sessions, and half of the waiters.
    fn leave(self) -> Vec<Conn> {
        drop(self.sessions);
        let mut waiters = self.waiters;
        waiters.truncate(5);
        waiters
    }
}

/// What must be true once writes are possible again: every lock without a live waiter is free, the others are handed over.
#[track_caller]
fn assert_all_done(server: &Server, waiters: Vec<Conn>) {
    for mut conn in waiters {
        conn.recv().as_token();
    }
    let mut conn = server.connect(Protocol::Resp2);
    wait_until("only the waiters' locks are held", ANSWER_WITHIN, || conn.cmd(&["DBSIZE"]) == Reply::Int(5));
    for number in 1..=5 {
        assert_eq!(holders(&mut conn, &format!("short {number}")), ["bob"]);
    }
    server.assert_alive();
}

#[track_caller]
fn assert_pause_defers(builder: &Builder, mode: &str) {
    let servers = Replicated::start(&builder.clone().appendonly(), 1);
    let (primary, replica) = (&servers.primary, &servers.replicas[0]);
    let mut admin = primary.connect(Protocol::Resp2);
    let crowd = gather(primary);
    servers.wait_in_step();
    shorten_leases(&mut admin, 300, &args!["CLIENT", "PAUSE", 800, mode]);
    let waiters = crowd.leave();
    let mut reader = replica.connect(Protocol::Resp2);
    holds_for("nothing is written", Duration::from_millis(500), || {
        reader.cmd(&["DBSIZE"]) == Reply::Int(i64::from(LEASES) + 20)
    });
    assert_all_done(primary, waiters);
    servers.wait_in_step();
    assert_same(&contents(replica), &contents(primary), mode);
}

fn pause_of_writes_defers_what_is_due(builder: Builder) {
    // A lease that is ended in the pause is replicated in the pause: the server dies of it.
    assert_pause_defers(&builder, "WRITE");
}

fn pause_of_everything_defers_what_is_due(builder: Builder) {
    // The same where reads are paused too.
    assert_pause_defers(&builder, "ALL");
}

fn pause_shows_ended_holds_as_expired(builder: Builder) {
    // A hold that is over and may not be ended yet is over all the same: whoever asks is told so. (CHECK is a write for the server,
    // and waits.)
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 30]).as_token();
    assert_eq!(conn.cmd(&["CLIENT", "PAUSE", "600", "WRITE"]), Reply::ok());
    let_pass(Duration::from_millis(60));
    assert_eq!(holder(&mut conn, "k", "alice").field("state").as_str(), "expired");
    assert_eq!(conn.cmd(&["CLIENT", "UNPAUSE"]), Reply::ok());
    wait_until("it is ended", ANSWER_WITHIN, || conn.cmd(&["EXISTS", "k"]) == Reply::Int(0));
}

fn waits_that_end_in_a_pause_end_after_it(builder: Builder) {
    // A wait whose time is over in the pause hears nil after it, and does not hold up the queue.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS]).as_token();
    let mut impatient = server.connect(Protocol::Resp2);
    impatient.send(&args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS, "BLOCK", 500]);
    server.wait_until_blocked(&impatient);
    assert_eq!(conn.cmd(&["CLIENT", "PAUSE", "900", "WRITE"]), Reply::ok());
    assert!(impatient.recv().is_nil());
    let mut patient = waiter(&server, Protocol::Resp2, "k", "carol");
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", "k", "alice"]), Reply::Int(1));
    patient.recv().as_token();
}

fn failover_with_leases_due_is_clean(builder: Builder) {
    // FAILOVER pauses writes until the replica has everything, then changes the roles: what falls due in between is the new
    // primary's to perform; the old one's waiters hear that it decides no more.
    let servers = Replicated::start(&builder.appendonly(), 1);
    let (old, new) = (&servers.primary, &servers.replicas[0]);
    let mut admin = old.connect(Protocol::Resp2);
    let crowd = gather(old);
    servers.wait_in_step();
    new.sigstop();
    shorten_leases(&mut admin, 300, &args!["FAILOVER", "TO", "127.0.0.1", new.port()]);
    let waiters = crowd.leave();
    let_pass(Duration::from_millis(400));
    new.sigcont();
    for mut conn in waiters {
        assert_eq!(conn.recv().error_code(), Some("UNBLOCKED"));
    }
    let mut conn = new.connect(Protocol::Resp2);
    wait_until("the leases have ended on the new primary", ANSWER_WITHIN, || conn.cmd(&["DBSIZE"]) == Reply::Int(0));
    wait_in_step(new, old);
    assert_same(&contents(old), &contents(new), "after the failover");
    fail_over(new, old);
    old.assert_alive();
    new.assert_alive();
}

fn failover_that_is_given_up_resumes(builder: Builder) {
    // A failover that times out leaves a primary that was paused: it goes on as after any pause.
    let servers = Replicated::start(&builder, 1);
    let (primary, replica) = (&servers.primary, &servers.replicas[0]);
    let mut admin = primary.connect(Protocol::Resp2);
    let crowd = gather(primary);
    servers.wait_in_step();
    replica.sigstop();
    // The renewals are something that the stopped replica has not got: the failover waits for it.
    let failover = args!["FAILOVER", "TO", "127.0.0.1", replica.port(), "TIMEOUT", 500];
    shorten_leases(&mut admin, 200, &failover);
    let waiters = crowd.leave();
    wait_until("the failover is given up", ANSWER_WITHIN, || {
        primary.info("replication").text("master_failover_state") == "no-failover"
    });
    assert_all_done(primary, waiters);
    replica.sigcont();
    servers.wait_in_step();
    assert_same(&contents(replica), &contents(primary), "after the failover that was not");
}

fn shutdown_that_waits_for_a_replica_decides_nothing(builder: Builder) {
    // SIGTERM with a replica that lags pauses writes and waits for it: leases fall due and connections go meanwhile.
    let mut servers = Replicated::start(&builder.appendonly().config("shutdown-timeout", 1), 1);
    let crowd = gather(&servers.primary);
    servers.wait_in_step();
    servers.replicas[0].sigstop();
    // The renewals are what the replica lags behind by.
    shorten_leases(&mut servers.primary.connect(Protocol::Resp2), 200, &args!["SET", "other", "value", "PX", 1]);
    servers.primary.sigterm();
    let_pass(Duration::from_millis(100));
    let _waiters = crowd.leave();
    let status = servers.primary.wait_exit(ANSWER_WITHIN);
    assert!(status.success(), "{status}: {}", servers.primary.log());
    servers.replicas[0].sigcont();
    // Nothing was lost: what fell due is performed at the next start.
    servers.primary.start_again();
    let mut conn = servers.primary.connect(Protocol::Resp2);
    wait_until("the leases have ended", ANSWER_WITHIN, || conn.cmd(&["DBSIZE"]) == Reply::Int(0));
}

fn shutdown_ends_waits(builder: Builder) {
    // A waiter of a server that goes must not hang: its connection is closed, and the server exits in the regular way.
    let mut server = builder.start();
    server.connect(Protocol::Resp2).cmd(&args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS]).as_token();
    let mut waiting = waiter(&server, Protocol::Resp2, "k", "bob");
    server.sigterm();
    waiting.expect_close();
    assert!(server.wait_exit(ANSWER_WITHIN).success());
}
