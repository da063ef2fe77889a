//! Other modules call commands as clients do, without a client: from a command of theirs, from a timer, from within an event of ours.

use std::env;

use flock_tests::args;
use flock_tests::c_library;
use flock_tests::on_own_servers;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::{Builder, Server};
use flock_tests::topology::Replicated;
use flock_tests::wait::wait_for;

use crate::lock_view::{holders, waiters};
use crate::scene::{LEASE_MS, hold, release, wait_until_free, waiter};
use crate::traffic::{assert_same, contents};

on_own_servers![
    call_of_a_module_is_answered_as_a_clients,
    block_in_a_modules_call_is_a_plain_try,
    call_that_may_wait_is_refused_if_it_would,
    session_in_a_modules_call_is_refused,
    call_from_a_timer_is_answered,
    call_in_script_mode_is_answered,
    internal_command_is_refused_to_modules,
    call_as_the_user_needs_the_users_permissions,
    call_from_within_an_event_takes_its_turn,
    module_that_hears_first_of_an_expired_key_may_call_at_other_places,
    calls_of_modules_are_replicated_as_effects,
    mark_that_falls_due_in_an_unreplicated_call_is_announced,
];

/// A server with the module of `caller.c` beside ours.
fn with_caller(builder: &Builder) -> Builder {
    builder.clone().config("loadmodule", c_library("contract/caller.c").display())
}

/// The module calls `request` at once.
#[track_caller]
fn call(conn: &mut Conn, flags: &str, request: &[Vec<u8>]) -> Reply {
    conn.cmd(&[&args!["CALLER.CALL", flags][..], request].concat())
}

/// The module calls `request` from a timer; answers what it was answered, as the protocol writes it.
#[track_caller]
fn call_later(conn: &mut Conn, flags: &str, request: &[Vec<u8>]) -> String {
    assert_eq!(conn.cmd(&[&args!["CALLER.LATER", flags][..], request].concat()), Reply::Simple("OK".into()));
    outcome(conn)
}

/// The module will call `request` from within the next event of this name.
#[track_caller]
fn call_on(conn: &mut Conn, event: &str, request: &[Vec<u8>]) {
    assert_eq!(conn.cmd(&[&args!["CALLER.ON", event, "!"][..], request].concat()), Reply::Simple("OK".into()));
}

#[track_caller]
fn outcome(conn: &mut Conn) -> String {
    wait_for("the module's call is answered", ANSWER_WITHIN, || match conn.cmd(&["CALLER.OUTCOME"]) {
        Reply::Nil => None,
        text => Some(text.as_str().to_owned()),
    })
}

#[track_caller]
fn token_in(outcome: &str) -> u64 {
    let number = outcome.strip_prefix(':').and_then(|rest| rest.trim_end().parse().ok());
    number.unwrap_or_else(|| panic!("expected a token, got {outcome:?}"))
}

fn acquire(key: &str, owner: &str) -> [Vec<u8>; 4] {
    args!["FLOCK.ACQUIRE", key, owner, LEASE_MS]
}

fn blocking(key: &str, owner: &str, wait_ms: u32) -> [Vec<u8>; 6] {
    args!["FLOCK.ACQUIRE", key, owner, LEASE_MS, "BLOCK", wait_ms]
}

fn start(builder: &Builder) -> (Server, Conn) {
    let server = with_caller(builder).start();
    let conn = server.connect(Protocol::Resp2);
    (server, conn)
}

fn call_of_a_module_is_answered_as_a_clients(builder: Builder) {
    // Every verb once: the caller of a call is a client that is nobody's connection.
    let (server, mut conn) = start(&builder);
    let token = call(&mut conn, "", &acquire("k", "alice")).as_token();
    assert_eq!(call(&mut conn, "", &acquire("k", "bob")), Reply::Nil);
    assert_eq!(call(&mut conn, "", &args!["FLOCK.CHECK", "k", token]), Reply::Int(1));
    assert_eq!(call(&mut conn, "", &args!["FLOCK.RENEW", "k", "alice", LEASE_MS, "TOKEN", token]), Reply::Int(1));
    assert_eq!(call(&mut conn, "", &args!["FLOCK.INFO", "k"]).field("mode").as_str(), "exclusive");
    assert_eq!(call(&mut conn, "", &args!["FLOCK.LIST"]).as_array()[1].as_array().len(), 1);
    let queue = args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS, "QUEUE", 5000, "CHANNEL", "news"];
    assert_eq!(call(&mut conn, "", &queue).as_array()[0], Reply::bulk("QUEUED"));
    assert_eq!(call(&mut conn, "", &args!["FLOCK.RELEASE", "k", "alice"]), Reply::Int(1));
    assert_eq!(holders(&mut conn, "k"), ["bob"]);
    assert_eq!(call(&mut conn, "", &args!["FLOCK.REVOKE", "k"]), Reply::Int(1));
    assert_eq!(call(&mut conn, "E", &args!["FLOCK.RENEW", "k", "alice", "soon"]).error_code(), Some("ERR"));
    assert_eq!(server.info("flock").number("flock_held"), 0);
}

fn block_in_a_modules_call_is_a_plain_try(builder: Builder) {
    // A module that does not say that it can wait gets its answer at once, and leaves nobody in the queue.
    let (_server, mut conn) = start(&builder);
    hold(&mut conn, "held", "alice");
    for flags in ["", "!", "E", "C"] {
        assert_eq!(call(&mut conn, flags, &blocking("held", "bob", 0)), Reply::Nil, "{flags}");
    }
    assert_eq!(waiters(&mut conn, "held"), [""; 0]);
    call(&mut conn, "", &blocking("free", "bob", 0)).as_token();
}

fn call_that_may_wait_is_refused_if_it_would(builder: Builder) {
    // The flag K says that the caller can wait; but what would wait is a client that the server lends for one call. It is refused, without
    // a waiter that nobody would ever answer.
    let (server, mut conn) = start(&builder);
    hold(&mut conn, "k", "alice");
    for wait_ms in [0, 20] {
        assert_eq!(call(&mut conn, "K", &blocking("k", "bob", wait_ms)).error_code(), Some("ERR"));
        let outcome = call_later(&mut conn, "K", &blocking("k", "bob", wait_ms));
        assert!(outcome.starts_with("-ERR"), "{outcome}");
    }
    assert_eq!(waiters(&mut conn, "k"), [""; 0]);
    release(&mut conn, "k", "alice");
    wait_until_free(&mut conn, "k");
    assert_eq!(server.info("flock").number("flock_blocked_clients"), 0);
}

fn session_in_a_modules_call_is_refused(builder: Builder) {
    // There is no connection whose end could end the hold.
    let (_server, mut conn) = start(&builder);
    let session = args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS, "SESSION", 1000];
    assert_eq!(call(&mut conn, "", &session).error_code(), Some("ERR"));
    let outcome = call_later(&mut conn, "", &session);
    assert!(outcome.starts_with("-ERR"), "{outcome}");
    assert_eq!(conn.cmd(&["EXISTS", "k"]), Reply::Int(0));
}

fn call_from_a_timer_is_answered(builder: Builder) {
    // Nobody's command is running then.
    let (server, mut conn) = start(&builder);
    let first = token_in(&call_later(&mut conn, "", &acquire("k", "alice")));
    let mut bob = waiter(&server, Protocol::Resp2, "k", "bob");
    assert_eq!(call_later(&mut conn, "", &args!["FLOCK.RELEASE", "k", "alice"]).trim_end(), ":1");
    assert!(bob.recv().as_token() > first);
}

fn call_in_script_mode_is_answered(builder: Builder) {
    // What scripts may call, modules may in that mode; and no more. (With E: without it the newest server itself crashes when it refuses.)
    let (_server, mut conn) = start(&builder);
    call(&mut conn, "SE", &acquire("k", "alice")).as_token();
    assert_eq!(call(&mut conn, "SE", &blocking("k", "bob", 0)), Reply::Nil);
    assert_eq!(call(&mut conn, "SE", &args!["FLOCK._APPLY", "END all", "k"]).error_code(), Some("ERR"));
    assert_eq!(call(&mut conn, "WE", &acquire("other", "alice")).error_code(), Some("ERR"));
    assert_eq!(holders(&mut conn, "k"), ["alice"]);
}

fn internal_command_is_refused_to_modules(builder: Builder) {
    // H3. A module runs with all permissions, but what only replication may say, it may not either: from nowhere, with no flag.
    let (server, mut conn) = start(&builder);
    let token = hold(&mut conn, "k", "alice");
    let changes = [
        args!["FLOCK._APPLY", "END all", "k"].to_vec(),
        args!["FLOCK._APPLY", "GRANT X 9007199254740991 60000 - mallory", "other"].to_vec(),
        args!["FLOCK._APPLY", "MARK 9007199254740991"].to_vec(),
        args!["FLOCK._APPLY", "nonsense", "k"].to_vec(),
    ];
    for change in &changes {
        for flags in ["", "!", "A", "R", "!A", "!R", "C", "CE", "E", "K", "M", "SE", "WE", "3", "0"] {
            let reply = call(&mut conn, flags, change);
            assert_eq!(reply.error_code(), Some("ERR"), "{flags}: {reply}");
        }
        for flags in ["", "!", "K"] {
            let outcome = call_later(&mut conn, flags, change);
            assert!(outcome.starts_with("-ERR"), "{flags}: {outcome}");
        }
        call_on(&mut conn, "flock.released", change);
        hold(&mut conn, "event", "alice");
        release(&mut conn, "event", "alice");
        let outcome = outcome(&mut conn);
        assert!(outcome.starts_with("-ERR"), "{outcome}");
    }
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(1));
    assert_eq!(conn.cmd(&["EXISTS", "other"]), Reply::Int(0));
    assert!(hold(&mut conn, "next", "alice") < token + 100);
    assert_eq!(server.info("flock").number("flock_panics_caught"), 0);
}

fn call_as_the_user_needs_the_users_permissions(builder: Builder) {
    // H1. With the flag C a module lends nobody more than he has: not a command, not a key, not a channel.
    let (server, mut conn) = start(&builder);
    hold(&mut conn, "other", "alice");
    for (name, rules, may_lock) in
        [("locker", ["~app:*", "&app:*", "+@flock"], true), ("stranger", ["~app:*", "&app:*", "+get"], false)]
    {
        let define =
            [&args!["ACL", "SETUSER", name, "on", ">secret", "+caller.call"][..], &args![rules[0], rules[1], rules[2]]];
        assert_eq!(conn.cmd(&define.concat()), Reply::ok());
        let mut user = server.connect(Protocol::Resp2);
        assert_eq!(user.cmd(&args!["AUTH", name, "secret"]), Reply::ok());
        let own = call(&mut user, "CE", &args!["FLOCK.ACQUIRE", "app:key", "bob", LEASE_MS, "CHANNEL", "app:news"]);
        assert_eq!(matches!(own, Reply::Int(1..)), may_lock, "{name}: {own}");
        for refused in [
            &args!["FLOCK.ACQUIRE", "other", "bob", LEASE_MS][..],
            &args!["FLOCK.RELEASE", "other", "alice"],
            &args!["FLOCK.INFO", "other"],
            &args!["FLOCK.REVOKE", "app:key"],
            &args!["FLOCK.ACQUIRE", "app:other", "bob", LEASE_MS, "CHANNEL", "other"],
        ] {
            let reply = call(&mut user, "CE", refused);
            assert_eq!(reply.error_code(), Some("NOPERM"), "{name}, {}: {reply}", refused[0].escape_ascii());
        }
        let listed = call(&mut user, "CE", &args!["FLOCK.LIST", "MATCH", "other"]);
        assert!(!may_lock || listed.as_array()[1].as_array().is_empty(), "{listed}");
    }
    assert_eq!(holders(&mut conn, "other"), ["alice"]);
    assert_eq!(conn.cmd(&["EXISTS", "app:other"]), Reply::Int(0));
}

fn call_from_within_an_event_takes_its_turn(builder: Builder) {
    // A verb within a verb: while the effects of one are still performed, the next is decided. It sees what is decided, and overtakes
    // nobody.
    let (server, mut conn) = start(&builder);
    call_on(&mut conn, "flock.granted", &args!["FLOCK.RELEASE", "granted", "alice"]);
    let token = hold(&mut conn, "granted", "alice");
    assert_eq!(outcome(&mut conn).trim_end(), ":1");
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "granted", token]), Reply::Int(0));

    for (event, end) in [("flock.released", "FLOCK.RELEASE"), ("flock.revoked", "FLOCK.REVOKE"), ("del", "DEL")] {
        let end = if end == "FLOCK.RELEASE" { args![end, "k", "alice"].to_vec() } else { args![end, "k"].to_vec() };
        // Nobody waits: the module is the next one.
        let old = hold(&mut conn, "k", "alice");
        call_on(&mut conn, event, &acquire("k", "module"));
        assert_eq!(conn.cmd(&end), Reply::Int(1), "{event}");
        assert!(token_in(&outcome(&mut conn)) > old, "{event}");
        assert_eq!(holders(&mut conn, "k"), ["module"], "{event}");
        release(&mut conn, "k", "module");
        // Somebody waits, and is not overtaken.
        hold(&mut conn, "k", "alice");
        let mut bob = waiter(&server, Protocol::Resp2, "k", "bob");
        call_on(&mut conn, event, &acquire("k", "module"));
        assert_eq!(conn.cmd(&end), Reply::Int(1), "{event}");
        let nil = outcome(&mut conn);
        assert!(nil.starts_with("$-1") || nil.starts_with('_'), "{event}: {nil}");
        let token = bob.recv().as_token();
        assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(1), "{event}");
        release(&mut conn, "k", "bob");
    }

    // The end of a lease, which no command causes.
    call_on(&mut conn, "flock.expired", &acquire("k", "module"));
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 20]).as_token();
    token_in(&outcome(&mut conn));
    assert_eq!(holders(&mut conn, "k"), ["module"]);
    assert_eq!(server.info("flock").number("flock_panics_caught"), 0);
}

fn module_that_hears_first_of_an_expired_key_may_call_at_other_places(builder: Builder) {
    // E6. The server tells its modules in the order in which they were loaded: this one comes before ours, and takes a lock.
    let ours = env::var("FLOCK_MODULE").expect("the tests have a module");
    let server = builder.module(c_library("contract/caller.c")).config("loadmodule", ours).start();
    let mut conn = server.connect(Protocol::Resp2);
    let token = hold(&mut conn, "k", "alice");
    call_on(&mut conn, "expired", &acquire("other", "bob"));
    assert_eq!(conn.cmd(&args!["PEXPIRE", "k", 1]), Reply::Int(1));
    token_in(&outcome(&mut conn));
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(1));
}

fn calls_of_modules_are_replicated_as_effects(builder: Builder) {
    // From a command, a timer or an event of ours: the replica gets the effects, once, and no request. (The flag `!` is the caller's word that
    // what is called shall be replicated. Without it the server replicates nothing of it, here as for its own commands.)
    let servers = Replicated::start(&with_caller(&builder), 1);
    let (primary, replica) = (&servers.primary, &servers.replicas[0]);
    let mut conn = primary.connect(Protocol::Resp2);
    call(&mut conn, "!", &acquire("called", "alice")).as_token();
    token_in(&call_later(&mut conn, "!", &acquire("timed", "alice")));
    hold(&mut conn, "k", "alice");
    let mut bob = waiter(primary, Protocol::Resp2, "k", "bob");
    call_on(&mut conn, "flock.released", &acquire("from an event", "alice"));
    release(&mut conn, "k", "alice");
    bob.recv().as_token();
    call_on(&mut conn, "flock.granted", &args!["FLOCK.RELEASE", "granted", "alice"]);
    hold(&mut conn, "granted", "alice");
    servers.wait_in_step();
    assert_same(&contents(replica), &contents(primary), "replica and primary");
    let stats = replica.info("commandstats");
    for request in ["ACQUIRE", "RELEASE"] {
        assert_eq!(stats.get(&format!("cmdstat_FLOCK.{request}")), None, "the replica was asked");
    }
}

fn mark_that_falls_due_in_an_unreplicated_call_is_announced(builder: Builder) {
    // S3, T3. A call without `!` is the caller's word that *its* effects are replicated otherwise; the announcement of tokens is nobody's
    // effect. Dropped with the rest, the replica lags a whole reservation behind for the next 524,288 grants.
    let servers = Replicated::start(&with_caller(&builder), 1);
    let mut conn = servers.primary.connect(Protocol::Resp2);
    let token = hold(&mut conn, "k", "alice");
    call(&mut conn, "", &args!["FLOCK.ACQUIRE", "other", "alice", LEASE_MS, "FLOOR", token + 600_000]).as_token();
    hold(&mut conn, "next", "alice");
    servers.wait_in_step();
    let mark = |server: &Server| server.info("flock").number("flock_mark");
    assert_eq!(mark(&servers.replicas[0]), mark(&servers.primary));
}
