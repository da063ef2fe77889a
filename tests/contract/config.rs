//! The settings: their names, defaults and ranges, and that each does what it says.

use flock_tests::args;
use flock_tests::on_own_servers;
use flock_tests::reply::Reply;
use flock_tests::resp::{Conn, Protocol};
use flock_tests::server::{Builder, Server};

use crate::lock_view::left_ms;
use crate::scene::{LEASE_MS, hold, listener, release, waiter};

use std::time::Duration;

on_own_servers![
    settings_have_their_defaults,
    value_out_of_range_is_refused_and_nothing_changes,
    refused_value_takes_the_others_of_its_command_back,
    line_of_the_configuration_file_is_taken,
    rewritten_file_keeps_what_was_set,
    rewritten_file_overrides_module_arguments,
    lease_max_bounds_new_leases_only,
    wait_max_bounds_waits,
    waiters_max_bounds_the_queue,
    no_waiters_at_all_is_possible,
    owner_max_bounds_owners,
    label_max_bounds_labels,
    ids_max_bounds_ids,
    floor_can_be_forbidden,
    release_notifications_are_off_until_switched_on,
];

const DEFAULTS: [(&str, &str); 9] = [
    ("flock.lease-max-ms", "86400000"),
    ("flock.wait-max-ms", "86400000"),
    ("flock.waiters-max", "100000"),
    ("flock.owner-max-bytes", "256"),
    ("flock.label-max-bytes", "256"),
    ("flock.ids-max", "64"),
    ("flock.promotion-grace-ms", "0"),
    ("flock.floor-enabled", "yes"),
    ("flock.release-notifications", "no"),
];

#[track_caller]
fn get(conn: &mut Conn, name: &str) -> String {
    conn.cmd(&args!["CONFIG", "GET", name]).field(name).as_str().to_owned()
}

#[track_caller]
fn set(conn: &mut Conn, name: &str, value: &str) {
    assert_eq!(conn.cmd(&args!["CONFIG", "SET", name, value]), Reply::ok(), "{name} {value}");
}

#[track_caller]
fn assert_err(reply: &Reply, says: &str) {
    assert_eq!(reply.error_code(), Some("ERR"), "{reply}");
    assert!(reply.error_text().contains(says), "{reply} should say {says}");
}

fn settings_have_their_defaults(builder: Builder) {
    // The documented limits; and there is no setting that nobody documented.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp3);
    let Reply::Map(found) = conn.cmd(&["CONFIG", "GET", "flock.*"]) else { panic!("a map") };
    let mut found: Vec<_> = found.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let mut expected = DEFAULTS.to_vec();
    found.sort_unstable();
    expected.sort_unstable();
    assert_eq!(found, expected);
}

fn value_out_of_range_is_refused_and_nothing_changes(builder: Builder) {
    // The bounds of each setting, one beyond them, and nonsense.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    for (name, least, most) in [
        ("flock.lease-max-ms", 1, 864_000_000_i64),
        ("flock.wait-max-ms", 1, 864_000_000),
        ("flock.waiters-max", 0, 10_000_000),
        ("flock.owner-max-bytes", 1, 4096),
        ("flock.label-max-bytes", 0, 4096),
        ("flock.ids-max", 1, 1024),
        ("flock.promotion-grace-ms", 0, 864_000_000),
    ] {
        let before = get(&mut conn, name);
        for bad in [(least - 1).to_string(), (most + 1).to_string(), "1.5".into(), "many".into(), String::new()] {
            let reply = conn.cmd(&args!["CONFIG", "SET", name, bad]);
            assert_eq!(reply.error_code(), Some("ERR"), "{name} {bad:?}: {reply}");
            assert_eq!(get(&mut conn, name), before);
        }
        set(&mut conn, name, &least.to_string());
        set(&mut conn, name, &most.to_string());
    }
    for name in ["flock.floor-enabled", "flock.release-notifications"] {
        let before = get(&mut conn, name);
        assert_eq!(conn.cmd(&args!["CONFIG", "SET", name, "maybe"]).error_code(), Some("ERR"));
        assert_eq!(get(&mut conn, name), before);
    }
}

fn refused_value_takes_the_others_of_its_command_back(builder: Builder) {
    // CONFIG SET of several is all or nothing: what is in effect must follow, not only what is shown.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let both = args!["CONFIG", "SET", "flock.lease-max-ms", 1000, "flock.waiters-max", -1];
    assert_eq!(conn.cmd(&both).error_code(), Some("ERR"));
    assert_eq!(get(&mut conn, "flock.lease-max-ms"), "86400000");
    hold(&mut conn, "k", "alice");
}

fn line_of_the_configuration_file_is_taken(builder: Builder) {
    // Most settings are made there.
    let server = builder.config("flock.lease-max-ms", 5000).config("flock.floor-enabled", "no").start();
    let mut conn = server.connect(Protocol::Resp2);
    assert_eq!(get(&mut conn, "flock.floor-enabled"), "no");
    assert_err(&conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 5001]), "5000");
}

fn rewritten_file_keeps_what_was_set(builder: Builder) {
    // CONFIG REWRITE must write our settings where the next start finds them.
    let mut server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    set(&mut conn, "flock.lease-max-ms", "7000");
    set(&mut conn, "flock.release-notifications", "yes");
    assert_eq!(conn.cmd(&["CONFIG", "REWRITE"]), Reply::ok());
    server.restart();
    let mut conn = server.connect(Protocol::Resp2);
    assert_eq!(get(&mut conn, "flock.lease-max-ms"), "7000");
    assert_eq!(get(&mut conn, "flock.release-notifications"), "yes");
    assert_err(&conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 7001]), "7000");
}

fn rewritten_file_overrides_module_arguments(builder: Builder) {
    // The arguments stay in the file; what was set later must win over them, even where it is the built-in default.
    let mut server = builder.module_arg("lease-max-ms 5000").start();
    let mut conn = server.connect(Protocol::Resp2);
    assert_eq!(get(&mut conn, "flock.lease-max-ms"), "5000");
    set(&mut conn, "flock.lease-max-ms", "86400000");
    assert_eq!(conn.cmd(&["CONFIG", "REWRITE"]), Reply::ok());
    server.restart();
    assert_eq!(get(&mut server.connect(Protocol::Resp2), "flock.lease-max-ms"), "86400000");
}

fn lease_max_bounds_new_leases_only(builder: Builder) {
    // A lower limit must not end what was granted under the higher one.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    hold(&mut conn, "k", "alice");
    set(&mut conn, "flock.lease-max-ms", "1000");
    assert_err(&conn.cmd(&args!["FLOCK.ACQUIRE", "other", "alice", 1001]), "1000");
    assert_err(&conn.cmd(&args!["FLOCK.RENEW", "k", "alice", 1001]), "1000");
    assert!(left_ms(&mut conn, "k", "alice") > 10_000);
    conn.cmd(&args!["FLOCK.ACQUIRE", "other", "alice", 1000]).as_token();
}

fn wait_max_bounds_waits(builder: Builder) {
    // Both ways to wait. Without a limit (BLOCK 0) is another thing than long, and stays possible.
    let server = builder.config("flock.wait-max-ms", 1000).start();
    let mut conn = server.connect(Protocol::Resp2);
    hold(&mut conn, "k", "alice");
    assert_err(&conn.cmd(&args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS, "BLOCK", 1001]), "1000");
    let queue = args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS, "QUEUE", 1001, "CHANNEL", "news"];
    assert_err(&conn.cmd(&queue), "1000");
    let mut waiting = waiter(&server, Protocol::Resp2, "k", "bob");
    release(&mut conn, "k", "alice");
    waiting.recv().as_token();
}

fn waiters_max_bounds_the_queue(builder: Builder) {
    // G5. Waiters cost memory that nobody may use up; a full queue is told at once, and a place that is free again can be taken.
    let server = builder.config("flock.waiters-max", 1).start();
    let mut conn = server.connect(Protocol::Resp2);
    hold(&mut conn, "k", "alice");
    hold(&mut conn, "other", "alice");
    let first = waiter(&server, Protocol::Resp2, "k", "bob");
    for key in ["k", "other"] {
        let reply = conn.cmd(&args!["FLOCK.ACQUIRE", key, "carol", LEASE_MS, "BLOCK", 0]);
        assert_eq!(reply.error_code(), Some("QUEUEFULL"), "{reply}");
    }
    let id = first.id();
    drop(first);
    server.wait_until_gone(id);
    let _second = waiter(&server, Protocol::Resp2, "other", "carol");
}

fn no_waiters_at_all_is_possible(builder: Builder) {
    // Zero is a value: every wait is refused, every try works.
    let server = builder.config("flock.waiters-max", 0).start();
    let mut conn = server.connect(Protocol::Resp2);
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS, "BLOCK", 0]).as_token();
    let reply = conn.cmd(&args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS, "BLOCK", 0]);
    assert_eq!(reply.error_code(), Some("QUEUEFULL"), "{reply}");
    assert!(conn.cmd(&args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS]).is_nil());
}

fn owner_max_bounds_owners(builder: Builder) {
    // A holder whose owner is longer than a new limit must still be able to give its lock back.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    hold(&mut conn, "k", "a long owner");
    set(&mut conn, "flock.owner-max-bytes", "5");
    assert_err(&conn.cmd(&args!["FLOCK.ACQUIRE", "other", "sixsix", LEASE_MS]), "owner");
    hold(&mut conn, "other", "five!");
    release(&mut conn, "k", "a long owner");
}

fn label_max_bounds_labels(builder: Builder) {
    // Zero forbids labels: they may carry what should not be seen.
    let server = builder.config("flock.label-max-bytes", 0).start();
    let mut conn = server.connect(Protocol::Resp2);
    assert_err(&conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS, "LABEL", "x"]), "LABEL");
    set(&mut conn, "flock.label-max-bytes", "1");
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS, "LABEL", "x"]).as_token();
}

fn ids_max_bounds_ids(builder: Builder) {
    // One more id is refused with its own code; one that is in the set already is no more.
    let server = builder.config("flock.ids-max", 2).start();
    let mut conn = server.connect(Protocol::Resp2);
    for id in ["1", "2"] {
        conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS, "REENTRANT", id]).as_token();
    }
    let third = conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS, "REENTRANT", "3"]);
    assert_eq!(third.error_code(), Some("IDSFULL"), "{third}");
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS, "REENTRANT", "2"]).as_token();
}

fn floor_can_be_forbidden(builder: Builder) {
    // An operator who trusts no client with the counter.
    let server = builder.config("flock.floor-enabled", "no").start();
    let mut conn = server.connect(Protocol::Resp2);
    assert_err(&conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS, "FLOOR", 1]), "FLOOR");
    assert_eq!(conn.cmd(&["EXISTS", "k"]), Reply::Int(0));
    set(&mut conn, "flock.floor-enabled", "yes");
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS, "FLOOR", 1]).as_token();
}

#[track_caller]
fn take_and_give_back(server: &Server) -> u64 {
    let mut conn = server.connect(Protocol::Resp2);
    let token = hold(&mut conn, "k", "alice");
    release(&mut conn, "k", "alice");
    token
}

fn release_notifications_are_off_until_switched_on(builder: Builder) {
    // They cost a publish for every end of a hold: only who wants them pays. Switched on, they come at once.
    let server = builder.start();
    let mut listening = listener(&server, Protocol::Resp2, "k");
    take_and_give_back(&server);
    listening.expect_silence(Duration::from_millis(30));
    set(&mut server.connect(Protocol::Resp2), "flock.release-notifications", "yes");
    let token = take_and_give_back(&server);
    assert_eq!(listening.message().payload, format!("released {token}").into_bytes());
}
