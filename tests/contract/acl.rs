//! Who may do what: commands, keys, channels, and the command that is nobody's.

use flock_tests::args;
use flock_tests::on_shared_servers;
use flock_tests::reply::Reply;
use flock_tests::resp::{Conn, Protocol};
use flock_tests::server::{Server, unique_key};

use crate::lock_view::holders;
use crate::scene::{LEASE_MS, hold, transaction};

on_shared_servers![
    category_gives_all_that_a_user_of_locks_needs,
    category_gives_nothing_else,
    category_does_not_give_revoke,
    revoke_is_dangerous,
    revoke_is_for_administrators,
    user_without_the_key_is_refused_every_verb,
    reader_of_the_key_may_look_and_check_only,
    writer_of_the_key_may_lock_and_not_look,
    channel_needs_its_own_permission,
    refused_channel_leaves_the_request_undone,
    list_shows_readable_keys_only,
    list_hides_keys_that_may_only_be_written,
    list_shows_what_a_selector_lets_read,
    dry_run_agrees_with_what_is_done,
    dry_run_knows_nothing_of_the_channel,
    user_of_a_prefix_sees_nothing_outside,
    user_of_a_prefix_changes_nothing_outside,
    permissions_of_two_selectors_do_not_add_up,
    internal_command_is_refused_to_everybody,
    internal_command_is_refused_in_a_transaction,
    internal_command_is_refused_in_a_script,
    internal_command_is_refused_to_a_client_that_plays_a_replica,
];

/// A connection of a new user with these rules, who can also say hello.
#[track_caller]
fn user(server: &Server, protocol: Protocol, rules: &[&str]) -> Conn {
    user_called(server, protocol, &unique_key("user"), rules)
}

/// The same, of a name that the test knows.
#[track_caller]
fn user_called(server: &Server, protocol: Protocol, name: &str, rules: &[&str]) -> Conn {
    let mut conn = server.connect(protocol);
    let mut define = args!["ACL", "SETUSER", name, "on", ">secret", "resetkeys", "resetchannels"].to_vec();
    define.extend(rules.iter().map(|rule| rule.as_bytes().to_vec()));
    assert_eq!(conn.cmd(&define), Reply::ok(), "{rules:?}");
    assert_eq!(conn.cmd(&args!["AUTH", name, "secret"]), Reply::ok());
    conn
}

#[track_caller]
fn assert_refused(conn: &mut Conn, request: &[Vec<u8>]) {
    let reply = conn.cmd(request);
    let words = request.iter().map(|word| word.escape_ascii().to_string()).collect::<Vec<_>>();
    assert_eq!(reply.error_code(), Some("NOPERM"), "{words:?}: {reply}");
}

#[track_caller]
fn assert_allowed(conn: &mut Conn, request: &[Vec<u8>]) -> Reply {
    let reply = conn.cmd(request);
    let words = request.iter().map(|word| word.escape_ascii().to_string()).collect::<Vec<_>>();
    assert_eq!(reply.error_code(), None, "{words:?}: {reply}");
    reply
}

/// Every verb about one key, but ACQUIRE.
fn verbs_on(key: &str) -> [Vec<Vec<u8>>; 5] {
    [
        args!["FLOCK.RENEW", key, "alice", LEASE_MS].to_vec(),
        args!["FLOCK.CHECK", key, 1].to_vec(),
        args!["FLOCK.INFO", key].to_vec(),
        args!["FLOCK.RELEASE", key, "alice"].to_vec(),
        args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS].to_vec(),
    ]
}

fn category_gives_all_that_a_user_of_locks_needs(server: &Server, protocol: Protocol) {
    // The rules of the documentation must be enough, or people give +@all. Each verb and each option once, within the prefix.
    let key = unique_key("app:key");
    let mut conn = user(server, protocol, &["~app:*", "&app:*", "+@flock"]);
    let token = assert_allowed(
        &mut conn,
        &args![
            "FLOCK.ACQUIRE",
            key,
            "alice",
            LEASE_MS,
            "CHANNEL",
            "app:news",
            "CLAIM",
            5000,
            "SESSION",
            5000,
            "LABEL",
            "x"
        ],
    )
    .as_token();
    let queued = args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "QUEUE", 5000, "CHANNEL", "app:bob"];
    assert_eq!(assert_allowed(&mut conn, &queued).as_array()[0], Reply::bulk("QUEUED"));
    assert_eq!(assert_allowed(&mut conn, &args!["FLOCK.RELEASE", key, "bob"]), Reply::Int(1));
    assert!(assert_allowed(&mut conn, &args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "BLOCK", 1]).is_nil());
    assert_eq!(assert_allowed(&mut conn, &args!["FLOCK.RENEW", key, "alice", LEASE_MS, "TOKEN", token]), Reply::Int(1));
    assert_eq!(assert_allowed(&mut conn, &args!["FLOCK.CHECK", key, token]), Reply::Int(1));
    assert_allowed(&mut conn, &args!["FLOCK.INFO", key]);
    assert_allowed(&mut conn, &args!["FLOCK.LIST", "MATCH", key]);
    assert_eq!(assert_allowed(&mut conn, &args!["FLOCK.RELEASE", key, "alice"]), Reply::Int(1));
}

fn category_gives_nothing_else(server: &Server, protocol: Protocol) {
    // A category that took other commands along would give away more than its name says.
    let key = unique_key("app:key");
    let mut conn = user(server, protocol, &["~app:*", "&app:*", "+@flock"]);
    for request in
        [&args!["GET", key][..], &args!["DEL", key], &args!["PUBLISH", "app:x", "y"], &args!["FLOCK._APPLY", "MARK 1"]]
    {
        assert_refused(&mut conn, request);
    }
}

fn category_does_not_give_revoke(server: &Server, protocol: Protocol) {
    // REVOKE ends what is another's: it is an administrator's command, given by name or by @admin, and not to whoever may lock.
    let key = unique_key("app:key");
    hold(&mut server.connect(protocol), &key, "alice");
    let mut conn = user(server, protocol, &["~app:*", "&app:*", "+@flock"]);
    assert_refused(&mut conn, &args!["FLOCK.REVOKE", key]);
    assert_eq!(holders(&mut server.connect(protocol), &key), ["alice"]);
}

fn revoke_is_dangerous(server: &Server, protocol: Protocol) {
    // Many sites give applications `+@all -@dangerous`.
    let key = unique_key("key");
    hold(&mut server.connect(protocol), &key, "alice");
    let mut conn = user(server, protocol, &["~*", "&*", "+@all", "-@dangerous"]);
    assert_refused(&mut conn, &args!["FLOCK.REVOKE", key]);
    assert_eq!(assert_allowed(&mut conn, &args!["FLOCK.RELEASE", key, "alice"]), Reply::Int(1));
}

fn revoke_is_for_administrators(server: &Server, protocol: Protocol) {
    // Both ways to give it: by category, and by name.
    for rules in [["~*", "+@admin"], ["~*", "+flock.revoke"]] {
        let key = unique_key("key");
        hold(&mut server.connect(protocol), &key, "alice");
        let mut conn = user(server, protocol, &rules);
        assert_eq!(assert_allowed(&mut conn, &args!["FLOCK.REVOKE", key]), Reply::Int(1));
    }
}

fn user_without_the_key_is_refused_every_verb(server: &Server, protocol: Protocol) {
    // A verb whose key the server does not know as a key would work on any.
    let key = unique_key("other:key");
    hold(&mut server.connect(protocol), &key, "alice");
    let mut conn = user(server, protocol, &["~app:*", "&*", "+@flock", "+flock.revoke"]);
    for request in verbs_on(&key) {
        assert_refused(&mut conn, &request);
    }
    assert_refused(&mut conn, &args!["FLOCK.REVOKE", key]);
    assert_eq!(holders(&mut server.connect(protocol), &key), ["alice"]);
}

fn reader_of_the_key_may_look_and_check_only(server: &Server, protocol: Protocol) {
    // CHECK is sent to the primary like a write, but only reads: a storage that verifies tokens needs no more than that.
    let key = unique_key("key");
    let token = hold(&mut server.connect(protocol), &key, "alice");
    let mut conn = user(server, protocol, &["%R~key*", "+@flock"]);
    assert_eq!(assert_allowed(&mut conn, &args!["FLOCK.CHECK", key, token]), Reply::Int(1));
    assert_allowed(&mut conn, &args!["FLOCK.INFO", key]);
    for request in [
        &args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS][..],
        &args!["FLOCK.RENEW", key, "alice", LEASE_MS],
        &args!["FLOCK.RELEASE", key, "alice"],
    ] {
        assert_refused(&mut conn, request);
    }
}

fn writer_of_the_key_may_lock_and_not_look(server: &Server, protocol: Protocol) {
    // Who holds a lock, and its label, is content: without read permission it is not shown.
    let key = unique_key("key");
    let mut conn = user(server, protocol, &["%W~key*", "+@flock"]);
    assert_refused(&mut conn, &args!["FLOCK.INFO", key]);
    assert_refused(&mut conn, &args!["FLOCK.CHECK", key, 1]);
}

fn channel_needs_its_own_permission(server: &Server, protocol: Protocol) {
    // CHANNEL makes the server publish where the caller says: without the check anybody who may lock could write to any channel.
    let key = unique_key("app:key");
    let mut conn = user(server, protocol, &["~app:*", "&app:*", "+@flock"]);
    for request in [
        &args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS, "CHANNEL", "other:news"][..],
        &args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS, "QUEUE", 5000, "CHANNEL", "other:news"],
        &args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS, "channel", "app"],
    ] {
        assert_refused(&mut conn, request);
    }
    let mut mute = user(server, protocol, &["~app:*", "+@flock"]);
    assert_refused(&mut mute, &args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS, "CHANNEL", "app:news"]);
    assert_allowed(&mut mute, &args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS]).as_token();
}

fn refused_channel_leaves_the_request_undone(server: &Server, protocol: Protocol) {
    // Refused means nothing has happened: no grant, no place in the queue, no longer lease, no new channel for the hold.
    let (free, held) = (unique_key("app:free"), unique_key("app:held"));
    let mut admin = server.connect(protocol);
    admin.cmd(&args!["FLOCK.ACQUIRE", held, "alice", 20_000]).as_token();
    let mut conn = user(server, protocol, &["~app:*", "&app:*", "+@flock"]);
    assert_refused(&mut conn, &args!["FLOCK.ACQUIRE", free, "alice", LEASE_MS, "CHANNEL", "other"]);
    assert_refused(&mut conn, &args!["FLOCK.ACQUIRE", held, "alice", LEASE_MS, "CHANNEL", "other"]);
    assert_refused(&mut conn, &args!["FLOCK.ACQUIRE", held, "bob", LEASE_MS, "QUEUE", 5000, "CHANNEL", "other"]);
    assert!(admin.cmd(&args!["FLOCK.INFO", free]).is_nil());
    let info = admin.cmd(&args!["FLOCK.INFO", held]);
    assert_eq!(info.field("waiter_count").as_int(), 0);
    assert!(info.field("holders").as_array()[0].field("left_ms").as_int() <= 20_000, "{info}");
}

#[track_caller]
fn listed(conn: &mut Conn, pattern: &str) -> Vec<String> {
    let mut cursor = 0;
    let mut keys = Vec::new();
    loop {
        let page = assert_allowed(conn, &args!["FLOCK.LIST", "CURSOR", cursor, "COUNT", 1000, "MATCH", pattern]);
        let locks = page.as_array()[1].as_array().iter();
        keys.extend(locks.map(|lock| lock.field("key").as_str().to_owned()));
        cursor = page.as_array()[0].as_int();
        if cursor == 0 {
            keys.sort();
            return keys;
        }
    }
}

/// Two held locks of one test, `<run>:mine` and `<run>:theirs`, and the pattern of both.
#[track_caller]
fn two_locks(server: &Server, protocol: Protocol) -> (String, String, String) {
    let run = unique_key("run");
    let (mine, theirs) = (format!("{run}:mine"), format!("{run}:theirs"));
    let mut conn = server.connect(protocol);
    hold(&mut conn, &mine, "alice");
    hold(&mut conn, &theirs, "alice");
    assert_eq!(listed(&mut conn, &format!("{run}:*")), [mine.clone(), theirs.clone()]);
    (mine, theirs, format!("{run}:*"))
}

fn list_shows_readable_keys_only(server: &Server, protocol: Protocol) {
    // LIST names keys in its reply, which the server cannot check beforehand: names and owners of others must not leak.
    let (mine, _, pattern) = two_locks(server, protocol);
    let mut conn = user(server, protocol, &[&format!("~{mine}"), "+@flock"]);
    assert_eq!(listed(&mut conn, &pattern), [mine]);
}

fn list_hides_keys_that_may_only_be_written(server: &Server, protocol: Protocol) {
    // Write permission alone does not let read, here as in INFO.
    let (mine, theirs, pattern) = two_locks(server, protocol);
    let mut conn = user(server, protocol, &[&format!("%R~{mine}"), &format!("%W~{theirs}"), "+@flock"]);
    assert_eq!(listed(&mut conn, &pattern), [mine]);
}

fn list_shows_what_a_selector_lets_read(server: &Server, protocol: Protocol) {
    // A user's permissions may be in a selector; the root ones are then empty.
    let (mine, _, pattern) = two_locks(server, protocol);
    let mut conn = user(server, protocol, &["+@flock", &format!("(~{mine} +@flock)")]);
    assert_eq!(listed(&mut conn, &pattern), [mine]);
}

/// Every command, about `key` where it is about one.
fn every_command(key: &str) -> Vec<Vec<Vec<u8>>> {
    let mut requests = verbs_on(key).to_vec();
    requests.push(args!["FLOCK.REVOKE", key].to_vec());
    requests.push(args!["FLOCK.LIST", "COUNT", 1].to_vec());
    requests.push(args!["FLOCK._APPLY", "nonsense", key].to_vec());
    requests
}

fn dry_run_agrees_with_what_is_done(server: &Server, protocol: Protocol) {
    // H1. Administrators try permissions by ACL DRYRUN: it must not promise what is refused, nor refuse what is done.
    let run = unique_key("run");
    let (mine, theirs) = (format!("{run}:mine"), format!("{run}:theirs"));
    let mut admin = server.connect(protocol);
    let (all, read, write) = (format!("~{mine}"), format!("%R~{mine}"), format!("%W~{mine}"));
    let (mut allowed, mut refused) = (0, 0);
    for rules in [
        &[&all[..], "+@flock"][..],
        &[&read, "+@flock"],
        &[&write, "+@flock"],
        &[&all, "+@all"],
        &[&all, "+@all", "-@dangerous"],
        &[&all, "+@all", "-@flock"],
        &[&all, "+@read"],
        &[&all, "+@write"],
        &[&all, "+@admin"],
        &[&all, "+flock.check", "+flock.revoke"],
        &["~*", "+@all"],
        &["+@flock"],
        &[&all],
        &["+@flock", &format!("({all} +@flock)")],
        &[&read, "+flock.info", &format!("({all} +flock.acquire)")],
    ] {
        let name = unique_key("user");
        let mut conn = user_called(server, protocol, &name, rules);
        for request in [every_command(&mine), every_command(&theirs)].concat() {
            let dry_run = [&args!["ACL", "DRYRUN", name][..], &request].concat();
            let may = admin.cmd(&dry_run) == Reply::ok();
            if may {
                allowed += 1
            } else {
                refused += 1
            }
            let reply = conn.cmd(&request);
            let words = request.iter().map(|word| word.escape_ascii().to_string()).collect::<Vec<_>>();
            assert_eq!(reply.error_code() != Some("NOPERM"), may, "{rules:?}: {words:?}: {reply}");
        }
    }
    assert!(allowed > 50 && refused > 50, "{allowed} allowed, {refused} refused: the test proves little");
}

fn dry_run_knows_nothing_of_the_channel(server: &Server, protocol: Protocol) {
    // H2. The server has no way to be told where in a request a module's channel stands, so it says yes; the module says no.
    let (key, name) = (unique_key("app:key"), unique_key("user"));
    let mut conn = user_called(server, protocol, &name, &["~app:*", "&app:*", "+@flock"]);
    let request = args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS, "CHANNEL", "other"];
    let dry_run = [&args!["ACL", "DRYRUN", name][..], &request].concat();
    assert_eq!(server.connect(protocol).cmd(&dry_run), Reply::ok());
    assert_refused(&mut conn, &request);
}

/// A lock that alice holds and bob queues for, outside of everything that begins with `app:`.
#[track_caller]
fn lock_outside(server: &Server, protocol: Protocol) -> (String, u64) {
    let key = unique_key("other:key");
    let mut admin = server.connect(protocol);
    let request = args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS, "LABEL", "secret label", "CHANNEL", "other:news"];
    let token = admin.cmd(&request).as_token();
    let queue = args!["FLOCK.ACQUIRE", key, "bob", LEASE_MS, "QUEUE", LEASE_MS, "CHANNEL", "other:news"];
    assert_eq!(admin.cmd(&queue).as_array()[0], Reply::bulk("QUEUED"));
    (key, token)
}

fn user_of_a_prefix_sees_nothing_outside(server: &Server, protocol: Protocol) {
    // H1, H2. Tenants of one server: that a lock of another exists, who holds it, who waits, and what is told of it.
    let (key, token) = lock_outside(server, protocol);
    let mut conn = user(server, protocol, &["~app:*", "&app:*", "+@flock", "+flock.revoke", "+@pubsub", "+eval"]);
    let shows = |reply: &Reply| {
        let text = reply.to_string();
        [key.as_str(), "secret label", "other:news", &token.to_string()].iter().any(|secret| text.contains(secret))
    };
    let to_an_administrator = server.connect(protocol).cmd(&args!["FLOCK.INFO", key]);
    assert!(shows(&to_an_administrator), "{to_an_administrator}");
    for request in every_command(&key) {
        let reply = conn.cmd(&request);
        assert!(!shows(&reply), "{}: {reply}", request[0].escape_ascii());
    }
    for pattern in [key.as_str(), "*", "other:*", "[a-z]*"] {
        assert_eq!(listed(&mut conn, pattern).iter().find(|name| !name.starts_with("app:")), None, "{pattern}");
    }
    let by_owner = assert_allowed(&mut conn, &args!["FLOCK.LIST", "COUNT", 10_000, "OWNER", "alice"]);
    assert!(!shows(&by_owner), "{by_owner}");
    for channel in [key.as_str(), "other:news"] {
        for subscribe in ["SUBSCRIBE", "PSUBSCRIBE"] {
            assert_refused(&mut conn, &args![subscribe, channel]);
        }
    }
    for script in [
        "return redis.call('FLOCK.INFO', ARGV[1])",
        "return redis.call('FLOCK.CHECK', ARGV[1], ARGV[2])",
        "return redis.pcall('FLOCK.INFO', ARGV[1])['err']",
        "return redis.call('FLOCK.LIST', 'COUNT', 10000, 'OWNER', 'alice')[2]",
    ] {
        let reply = conn.cmd(&args!["EVAL", script, 0, key, token]);
        assert!(!shows(&reply), "{script}: {reply}");
    }
}

fn user_of_a_prefix_changes_nothing_outside(server: &Server, protocol: Protocol) {
    // H1, H7. Also not with the right owner, the right token, in a transaction, a script, or with a key of his own in front.
    let (key, token) = lock_outside(server, protocol);
    let mut conn =
        user(server, protocol, &["~app:*", "&app:*", "+@flock", "+flock.revoke", "+eval", "+multi", "+exec"]);
    let mine = unique_key("app:key");
    for request in [
        &args!["FLOCK.RELEASE", key, "alice", "TOKEN", token][..],
        &args!["FLOCK.RELEASE", key, "bob"],
        &args!["FLOCK.RENEW", key, "alice", 1, "TOKEN", token],
        &args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS, "SHARED", "CONVERT", token],
        &args!["FLOCK.ACQUIRE", key, "carol", LEASE_MS, "BLOCK", 0],
        &args!["FLOCK.REVOKE", key, "OWNER", "alice"],
    ] {
        assert_refused(&mut conn, request);
        let script = "return redis.call(unpack(ARGV))";
        let scripted = [&args!["EVAL", script, 1, mine][..], request].concat();
        assert!(conn.cmd(&scripted).error_code().is_some(), "{}", request[0].escape_ascii());
        assert_eq!(conn.cmd(&["MULTI"]), Reply::ok());
        assert_eq!(conn.cmd(request).error_code(), Some("NOPERM"));
        assert_eq!(conn.cmd(&["EXEC"]).error_code(), Some("EXECABORT"));
    }
    let info = server.connect(protocol).cmd(&args!["FLOCK.INFO", key]);
    assert_eq!(info.field("holders").as_array()[0].field("token"), &Reply::Int(i64::try_from(token).expect("a token")));
    assert_eq!(info.field("waiters").as_array().len(), 1, "{info}");
}

fn permissions_of_two_selectors_do_not_add_up(server: &Server, protocol: Protocol) {
    // H1. One selector gives the command, another the key: neither gives both.
    let (free, held) = (unique_key("app:free"), unique_key("app:held"));
    let token = hold(&mut server.connect(protocol), &held, "alice");
    let mut conn = user(server, protocol, &["(~app:* +get)", "(~other:* &* +@flock)", "(%R~app:* +flock.check)"]);
    assert_refused(&mut conn, &args!["FLOCK.ACQUIRE", free, "alice", LEASE_MS]);
    assert_refused(&mut conn, &args!["FLOCK.RELEASE", held, "alice"]);
    assert_refused(&mut conn, &args!["FLOCK.INFO", held]);
    assert_eq!(assert_allowed(&mut conn, &args!["FLOCK.CHECK", held, token]), Reply::Int(1));
    assert!(server.connect(protocol).cmd(&args!["FLOCK.INFO", free]).is_nil());
}

/// Effects that would take a lock away, give one, or poison the counter.
fn effects(key: &str) -> [Vec<Vec<u8>>; 4] {
    [
        args!["FLOCK._APPLY", "END all", key].to_vec(),
        args!["FLOCK._APPLY", "GRANT X 9007199254740991 60000 - mallory", key].to_vec(),
        args!["FLOCK._APPLY", "MARK 9007199254740991"].to_vec(),
        args!["FLOCK._APPLY", "nonsense", key].to_vec(),
    ]
}

/// A lock that alice holds, and that must stay as it is.
#[track_caller]
fn with_lock_untouched(server: &Server, protocol: Protocol, attempt: impl FnOnce(&mut Conn, &str)) {
    let key = unique_key("key");
    let mut conn = server.connect(protocol);
    let token = hold(&mut conn, &key, "alice");
    attempt(&mut conn, &key);
    assert_eq!(server.connect(protocol).cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(1));
    let next = server.connect(protocol).cmd(&args!["FLOCK.ACQUIRE", unique_key("next"), "bob", LEASE_MS]).as_token();
    assert!(next < 99_999_999_999_999, "{next}");
}

fn internal_command_is_refused_to_everybody(server: &Server, protocol: Protocol) {
    // No flag hides a module's command: it must refuse by itself, and the default user may everything.
    with_lock_untouched(server, protocol, |conn, key| {
        for effect in effects(key) {
            assert_eq!(conn.cmd(&effect).error_code(), Some("ERR"));
        }
    });
}

fn internal_command_is_refused_in_a_transaction(server: &Server, protocol: Protocol) {
    // EXEC runs commands from another place in the server, with other flags.
    with_lock_untouched(server, protocol, |conn, key| {
        let effects = effects(key);
        let commands: Vec<&[Vec<u8>]> = effects.iter().map(Vec::as_slice).collect();
        for reply in transaction(conn, &commands) {
            assert_eq!(reply.error_code(), Some("ERR"), "{reply}");
        }
    });
}

fn internal_command_is_refused_in_a_script(server: &Server, protocol: Protocol) {
    // Scripts and functions run commands by a client of their own, which has no user and no connection.
    let call = "return redis.call('FLOCK._APPLY', 'END all', KEYS[1])";
    with_lock_untouched(server, protocol, |conn, key| {
        assert_eq!(conn.cmd(&args!["EVAL", call, 1, key]).error_code(), Some("ERR"));
        let library = unique_key("library").replace('#', "_");
        let code = format!("#!lua name={library}\nserver.register_function('{library}', function(KEYS) {call} end)");
        assert_eq!(conn.cmd(&args!["FUNCTION", "LOAD", code.replace("server.", "redis.")]), Reply::bulk(&library));
        assert_eq!(conn.cmd(&args!["FCALL", library, 1, key]).error_code(), Some("ERR"));
    });
}

fn internal_command_is_refused_to_a_client_that_plays_a_replica(server: &Server, protocol: Protocol) {
    // The replication link may apply; a client that only says what replicas say is no such link.
    with_lock_untouched(server, protocol, |conn, key| {
        for hello in [&args!["REPLCONF", "listening-port", 1][..], &args!["REPLCONF", "capa", "eof", "capa", "psync2"]]
        {
            assert_eq!(conn.cmd(hello), Reply::ok());
        }
        for effect in effects(key) {
            assert_eq!(conn.cmd(&effect).error_code(), Some("ERR"));
        }
    });
}
