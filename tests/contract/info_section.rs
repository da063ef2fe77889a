//! `INFO flock`: the numbers an operator watches, and that they count what they say.

use flock_tests::args;
use flock_tests::on_own_servers;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Protocol};
use flock_tests::server::{Builder, Info, Server};
use flock_tests::wait::wait_until;

use crate::scene::{LEASE_MS, hold, queue, release, waiter};

on_own_servers![
    sections_are_shown_when_asked_for,
    grants_releases_and_renewals_are_counted,
    refusals_are_counted_by_kind,
    expiries_revocations_and_removals_are_counted,
    handoffs_and_ends_of_waits_are_counted,
    gauges_follow_what_is_there,
    mark_is_ahead_of_the_counter,
    histograms_count_every_hold_and_wait,
    lateness_is_measured,
    crash_report_has_the_counters,
    commands_are_in_the_servers_statistics,
    waiting_counts_as_no_slowness,
];

/// Each end of the change of one field: what it was, what it is.
#[track_caller]
fn change(before: &Info, after: &Info, field: &str) -> i64 {
    after.number(field) - before.number(field)
}

fn sections_are_shown_when_asked_for(builder: Builder) {
    // Monitoring asks for a section by name; the plain INFO stays as short as it was.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    for section in ["flock", "flock_locks", "modules", "everything"] {
        assert_eq!(Info::ask(&mut conn, section).number("flock_held"), 0, "{section}");
    }
    assert_eq!(Info::ask(&mut conn, "default").get("flock_held"), None);
}

fn grants_releases_and_renewals_are_counted(builder: Builder) {
    // The rates of a healthy server. A repeated request is no second grant.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let before = server.info("flock");
    hold(&mut conn, "k", "alice");
    hold(&mut conn, "k", "alice");
    hold(&mut conn, "other", "alice");
    conn.cmd(&args!["FLOCK.RENEW", "k", "alice", LEASE_MS]);
    conn.cmd(&args!["FLOCK.RENEW", "k", "bob", LEASE_MS]);
    release(&mut conn, "k", "alice");
    conn.cmd(&args!["FLOCK.RELEASE", "k", "alice"]);
    let after = server.info("flock");
    assert_eq!(change(&before, &after, "flock_grants"), 2);
    assert_eq!(change(&before, &after, "flock_renewals"), 1);
    assert_eq!(change(&before, &after, "flock_releases"), 1);
}

fn refusals_are_counted_by_kind(builder: Builder) {
    // Nil is contention, an error is a mistake: whoever watches must tell them apart.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    hold(&mut conn, "k", "alice");
    let before = server.info("flock");
    assert!(conn.cmd(&args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS]).is_nil());
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS, "NEW"]).error_code(), Some("HELD"));
    let after = server.info("flock");
    assert_eq!(change(&before, &after, "flock_busy"), 1);
    assert_eq!(change(&before, &after, "flock_refused"), 1);
    assert_eq!(change(&before, &after, "flock_grants"), 0);
}

fn expiries_revocations_and_removals_are_counted(builder: Builder) {
    // The three ways to lose a hold: each points to another cause.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let before = server.info("flock");
    conn.cmd(&args!["FLOCK.ACQUIRE", "short", "alice", 1]).as_token();
    hold(&mut conn, "revoked", "alice");
    conn.cmd(&["FLOCK.REVOKE", "revoked"]);
    for key in ["deleted", "renamed", "flushed"] {
        hold(&mut conn, key, "alice");
    }
    conn.cmd(&["DEL", "deleted"]);
    conn.cmd(&["RENAME", "renamed", "elsewhere"]);
    conn.cmd(&["FLUSHALL"]);
    wait_until("the short lease has ended", ANSWER_WITHIN, || {
        change(&before, &server.info("flock"), "flock_expired")
            + change(&before, &server.info("flock"), "flock_removed")
            == 4
    });
    let after = server.info("flock");
    assert_eq!(change(&before, &after, "flock_revoked"), 1);
    assert_eq!(change(&before, &after, "flock_releases"), 0);
    assert!(change(&before, &after, "flock_removed") >= 3);
}

fn handoffs_and_ends_of_waits_are_counted(builder: Builder) {
    // A wait ends by a grant, by its time, or otherwise.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    hold(&mut conn, "k", "alice");
    let before = server.info("flock");
    assert!(conn.cmd(&args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS, "BLOCK", 1]).is_nil());
    queue(&mut conn, "k", "carol", "news");
    release(&mut conn, "k", "carol");
    let mut next = waiter(&server, Protocol::Resp2, "k", "dave");
    release(&mut conn, "k", "alice");
    next.recv().as_token();
    let after = server.info("flock");
    assert_eq!(change(&before, &after, "flock_timed_out"), 1);
    assert_eq!(change(&before, &after, "flock_waits_ended"), 1);
    assert_eq!(change(&before, &after, "flock_handoffs"), 1);
}

fn gauges_follow_what_is_there(builder: Builder) {
    // What is held and who waits at this moment; back to zero when all is over.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    hold(&mut conn, "k", "alice");
    hold(&mut conn, "other", "alice");
    queue(&mut conn, "k", "carol", "news");
    let waiting = waiter(&server, Protocol::Resp2, "k", "bob");
    let info = server.info("flock");
    assert_eq!(
        (info.number("flock_held"), info.number("flock_waiters"), info.number("flock_blocked_clients")),
        (2, 2, 1)
    );
    let id = waiting.id();
    drop(waiting);
    server.wait_until_gone(id);
    release(&mut conn, "k", "carol");
    release(&mut conn, "k", "alice");
    release(&mut conn, "other", "alice");
    let info = server.info("flock");
    assert_eq!(
        (info.number("flock_held"), info.number("flock_waiters"), info.number("flock_blocked_clients")),
        (0, 0, 0)
    );
}

fn mark_is_ahead_of_the_counter(builder: Builder) {
    // The reservation that covers what is not replicated yet: half of 2^20 at least, whatever was granted.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let mut ahead = Vec::new();
    let token = hold(&mut conn, "k", "alice");
    for more in [0, 400_000, 800_000, 1_200_000] {
        conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS, "FLOOR", token + more]);
        let info = server.info("flock");
        ahead.push(info.number("flock_mark") - info.number("flock_counter"));
    }
    assert!(ahead.iter().all(|ahead| (524_288..=1_048_576).contains(ahead)), "{ahead:?}");
    let info = server.info("flock");
    // 1.2 million tokens of 10 us are 12 s; the test takes less than that.
    assert!((0..=1_200_000).contains(&info.number("flock_lead_over_clock")), "{}", info.text("flock_lead_over_clock"));
}

/// The sum over the buckets of a histogram.
#[track_caller]
fn sum(server: &Server, field: &str) -> i64 {
    let info = server.info("flock");
    let counts = info.text(field).split(',').map(|bucket| bucket.split_once('=').expect("a bucket is name=count").1);
    counts.map(|count| count.parse::<i64>().expect("a count is a number")).sum()
}

fn histograms_count_every_hold_and_wait(builder: Builder) {
    // How long people wait and hold: every ended hold and every granted wait is in one bucket.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    for _ in 0..3 {
        hold(&mut conn, "k", "alice");
        let mut next = waiter(&server, Protocol::Resp2, "k", "bob");
        release(&mut conn, "k", "alice");
        next.recv().as_token();
        release(&mut conn, "k", "bob");
    }
    assert_eq!(sum(&server, "flock_hold_ms"), 6);
    assert_eq!(sum(&server, "flock_wait_ms"), 3);
}

fn lateness_is_measured(builder: Builder) {
    // An overloaded server shows here first: how late leases ended.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 20]).as_token();
    conn.cmd(&args!["DEBUG", "SLEEP", "0.2"]);
    wait_until("the lease has ended", ANSWER_WITHIN, || conn.cmd(&["EXISTS", "k"]) == Reply::Int(0));
    let worst = server.info("flock").number("flock_lateness_max_us");
    assert!((100_000..5_000_000).contains(&worst), "{worst}");
}

fn crash_report_has_the_counters(builder: Builder) {
    // A server that crashes asks every module for its section once more: ours must answer in that state, and not make it worse.
    let server = builder.allow_panics().start();
    let mut conn = server.connect(Protocol::Resp2);
    hold(&mut conn, "k", "alice");
    conn.send(&["DEBUG", "SEGFAULT"]);
    conn.expect_close();
    let mut server = server;
    server.wait_exit(ANSWER_WITHIN);
    let log = server.log();
    assert!(log.contains("flock_held:1"), "{log}");
    assert!(log.contains("BUG REPORT END"), "{log}");
}

fn commands_are_in_the_servers_statistics(builder: Builder) {
    // INFO commandstats and LATENCY HISTOGRAM: what monitors read of any command.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp3);
    hold(&mut conn, "k", "alice");
    assert!(conn.cmd(&args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS]).is_nil());
    release(&mut conn, "k", "alice");
    assert!(server.info("commandstats").text("cmdstat_FLOCK.ACQUIRE").starts_with("calls=2,"));
    let histogram = conn.cmd(&["LATENCY", "HISTOGRAM", "FLOCK.ACQUIRE", "FLOCK.RELEASE"]);
    assert_eq!(histogram.field("FLOCK.ACQUIRE").field("calls"), &Reply::Int(2), "{histogram}");
    assert_eq!(histogram.field("FLOCK.RELEASE").field("calls"), &Reply::Int(1), "{histogram}");
}

fn waiting_counts_as_no_slowness(builder: Builder) {
    // A request that waits for long takes the server no time: it must not fill the slow log, nor be a latency spike.
    let server = builder.config("slowlog-log-slower-than", 500_000).config("latency-monitor-threshold", 500).start();
    let mut conn = server.connect(Protocol::Resp2);
    hold(&mut conn, "k", "alice");
    let mut bob = waiter(&server, Protocol::Resp2, "k", "bob");
    let mut carol = server.connect(Protocol::Resp2);
    assert!(carol.cmd(&args!["FLOCK.ACQUIRE", "k", "carol", LEASE_MS, "BLOCK", 700]).is_nil());
    release(&mut conn, "k", "alice");
    bob.recv().as_token();
    let slow = conn.cmd(&["SLOWLOG", "GET", "-1"]);
    let commands = slow.as_array().iter().map(|entry| entry.as_array()[3].as_array()[0].as_str().to_owned());
    assert!(!commands.collect::<Vec<_>>().contains(&"FLOCK.ACQUIRE".to_owned()), "{slow}");
    let spikes = conn.cmd(&["LATENCY", "LATEST"]);
    let events: Vec<_> = spikes.as_array().iter().map(|event| event.as_array()[0].as_str()).collect();
    assert!(!events.contains(&"command") && !events.contains(&"fast-command"), "{spikes}");
}
