//! The module is loaded, or says why not; the server survives either.

use flock_tests::args;
use flock_tests::on_own_servers;
use flock_tests::reply::Reply;
use flock_tests::resp::Protocol;
use flock_tests::server::{Builder, Server};

on_own_servers![
    load_is_logged_with_the_version,
    module_argument_is_a_setting,
    bad_module_argument_is_refused_with_its_name,
    bad_line_of_the_configuration_file_is_refused,
    load_while_running_is_complete,
    bad_load_while_running_leaves_the_server_as_it_was,
    second_load_is_refused,
    unload_is_refused_and_locks_stay,
];

const GRANTED: &str = "a lock can be taken";

#[track_caller]
fn assert_grants(server: &Server) {
    let reply = server.connect(Protocol::Resp2).cmd(&args!["FLOCK.ACQUIRE", "probe", GRANTED, 1]);
    assert!(matches!(reply, Reply::Int(1..)), "{reply}");
}

fn module_path() -> String {
    std::env::var("FLOCK_MODULE").expect("FLOCK_MODULE names the module")
}

fn load_is_logged_with_the_version(builder: Builder) {
    // Without a line of its own nobody can tell from a log which version was running when something happened.
    let server = builder.start();
    let line = concat!("flock ", env!("CARGO_PKG_VERSION"), " loaded");
    assert!(server.log().contains(line), "{}", server.log());
}

fn module_argument_is_a_setting(builder: Builder) {
    // An argument that is taken and then forgotten would leave the operator with limits that nobody set.
    let server = builder.module_arg("lease-max-ms 5000").module_arg("flock.floor-enabled no").start();
    let mut conn = server.connect(Protocol::Resp2);
    let settings = conn.cmd(&args!["CONFIG", "GET", "flock.lease-max-ms", "flock.floor-enabled"]);
    assert_eq!(settings.field("flock.lease-max-ms").as_str(), "5000");
    assert_eq!(settings.field("flock.floor-enabled").as_str(), "no");
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 5001]).error_code(), Some("ERR"));
}

fn bad_module_argument_is_refused_with_its_name(builder: Builder) {
    // A server that starts with a misspelt limit has another limit than its operator believes. Each start must end by itself
    // (no signal, no crash report), with one line that names the argument.
    for (arguments, named) in [
        ("lease-max-ms", "pairs"),
        ("no-such-setting 1", "no-such-setting"),
        ("lease-max-ms soon", "lease-max-ms"),
        ("lease-max-ms 5s", "lease-max-ms"),
        ("lease-max-ms 0", "lease-max-ms"),
        ("lease-max-ms -1", "lease-max-ms"),
        ("lease-max-ms 99999999999999999999", "lease-max-ms"),
        ("waiters-max 10000001", "waiters-max"),
        ("floor-enabled maybe", "floor-enabled"),
        ("\"\" 1", "argument"),
        ("lease-max-ms 5000 lease-max-ms 6000", "lease-max-ms"),
    ] {
        let failure = match builder.clone().module_arg(arguments).try_start() {
            Err(failure) => failure,
            Ok(_) => panic!("the server starts with {arguments:?}"),
        };
        assert_eq!(failure.status.and_then(|status| status.code()), Some(1), "{arguments}: {}", failure.log);
        let line = failure.log.lines().find(|line| line.contains("not loaded: "));
        assert!(line.is_some_and(|line| line.contains(named)), "{arguments}: {}", failure.log);
        assert!(!failure.log.contains("panicked at"), "{}", failure.log);
    }
}

fn bad_line_of_the_configuration_file_is_refused(builder: Builder) {
    // The same for a line of the file, which the server itself reads.
    let failure = builder.config("flock.lease-max-ms", 0).try_start().expect_err("0 is out of range");
    assert_eq!(failure.status.and_then(|status| status.code()), Some(1), "{}", failure.log);
    assert!(failure.log.contains("lease-max-ms"), "{}", failure.log);
}

fn load_while_running_is_complete(builder: Builder) {
    // MODULE LOAD takes another way than the configuration file: type, commands, events and timer must all be there. The lease
    // that ends by itself shows the last two.
    let server = builder.without_module().config("enable-module-command", "yes").start();
    let mut conn = server.connect(Protocol::Resp2);
    assert_eq!(conn.cmd(&args!["MODULE", "LOAD", module_path(), "lease-max-ms", 5000]), Reply::ok());
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 1]).as_token();
    let mut waiter = server.connect(Protocol::Resp2);
    conn.cmd(&args!["FLOCK.ACQUIRE", "q", "alice", 20]).as_token();
    waiter.cmd(&args!["FLOCK.ACQUIRE", "q", "bob", 5000, "BLOCK", 0]).as_token();
    assert_eq!(conn.cmd(&["EXISTS", "k"]), Reply::Int(0));
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", "q", "carol", 5001]).error_code(), Some("ERR"));
}

fn bad_load_while_running_leaves_the_server_as_it_was(builder: Builder) {
    // A load that fails half-way must take back what it has registered: a callback left behind points into an unloaded library,
    // and the next event jumps there. So the server is given events, and then the module once more.
    let server = builder.without_module().config("enable-module-command", "yes").start();
    let mut conn = server.connect(Protocol::Resp2);
    for _ in 0..3 {
        let load = args!["MODULE", "LOAD", module_path(), "no-such-setting", 1];
        assert_eq!(conn.cmd(&load).error_code(), Some("ERR"));
        assert_eq!(conn.cmd(&["SET", "k", "v"]), Reply::ok());
        assert_eq!(conn.cmd(&["DEBUG", "RELOAD"]), Reply::ok());
        assert_eq!(conn.cmd(&["FLUSHALL"]), Reply::ok());
        assert!(conn.cmd(&["INFO", "everything"]).error_code().is_none());
        assert_eq!(conn.cmd(&["FLOCK.LIST"]).error_code(), Some("ERR"));
    }
    assert_eq!(conn.cmd(&args!["MODULE", "LOAD", module_path()]), Reply::ok());
    assert_grants(&server);
}

fn second_load_is_refused(builder: Builder) {
    // The second copy would share the first one's statics, or register its type twice.
    let server = builder.config("enable-module-command", "yes").start();
    let mut conn = server.connect(Protocol::Resp2);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 60_000]).as_token();
    assert_eq!(conn.cmd(&args!["MODULE", "LOAD", module_path()]).error_code(), Some("ERR"));
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(1));
    assert_grants(&server);
}

fn unload_is_refused_and_locks_stay(builder: Builder) {
    // Values of an unloaded type would be pointers into nothing. The server refuses because of the type; nothing of the module
    // may be gone after that.
    let server = builder.config("enable-module-command", "yes").start();
    let mut conn = server.connect(Protocol::Resp2);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 60_000]).as_token();
    assert_eq!(conn.cmd(&["MODULE", "UNLOAD", "flock"]).error_code(), Some("ERR"));
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(1));
    assert_grants(&server);
}

fn redis() -> Builder {
    let path = std::env::var("REDIS_SERVER").expect("REDIS_SERVER names a Redis 7.0: run these tests by `make test`");
    Server::builder().binary(path)
}

#[test]
fn redis_refuses_to_start_with_it() {
    // Redis lacks the functions of Valkey's API: a module that calls one crashes the server. It must end by itself and say why.
    let failure = redis().try_start().expect_err("Redis is refused");
    assert_eq!(failure.status.and_then(|status| status.code()), Some(1), "{}", failure.log);
    let reason = "flock is not loaded: this server is not Valkey; flock needs Valkey 8.0 or later";
    assert!(failure.log.contains(reason), "{}", failure.log);
}

#[test]
fn running_redis_survives_the_attempt() {
    // The same at run time: nothing may be left that a later event runs into.
    let server = redis().without_module().config("enable-module-command", "yes").start();
    let mut conn = server.connect(Protocol::Resp2);
    for _ in 0..2 {
        assert_eq!(conn.cmd(&args!["MODULE", "LOAD", module_path()]).error_code(), Some("ERR"));
        assert_eq!(conn.cmd(&["SET", "k", "v"]), Reply::ok());
        assert_eq!(conn.cmd(&["DEBUG", "RELOAD"]), Reply::ok());
    }
    server.assert_alive();
}
