//! Transactions, WATCH, scripts and functions: nothing waits there, all effects stay together, and CHECK guards other writes.

use flock_tests::args;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::{Builder, Info, Server, unique_key};
use flock_tests::topology::Replicated;
use flock_tests::wait::wait_until;
use flock_tests::{on_own_servers, on_shared_servers};

use crate::lock_view::{holders, waiters, waiting};

on_shared_servers![
    transaction_answers_as_outside,
    transaction_takes_and_gives_back,
    check_guards_a_transaction_by_watch,
    discarded_transaction_grants_nothing,
    transaction_with_a_bad_arity_grants_nothing,
    bad_argument_in_a_transaction_spoils_no_other_command,
    block_in_a_transaction_is_a_plain_try,
    block_in_a_transaction_takes_a_free_lock,
    queue_in_a_transaction_joins_the_queue,
    release_in_a_transaction_hands_over,
    waiter_of_a_transaction_hears_after_it,
    watched_lock_is_touched_by_what_changes_it,
    watched_lock_is_not_touched_by_what_changes_nothing,
    watched_lock_is_touched_by_the_end_of_its_lease,
    watched_lock_is_touched_by_a_handoff,
    script_gets_a_number,
    script_gets_false_if_not_granted,
    script_of_the_new_protocol_gets_maps_and_nil,
    token_is_exact_in_lua,
    check_guards_a_write_in_a_script,
    block_in_a_script_is_a_plain_try,
    session_in_a_script_is_refused,
    refusal_raises_in_a_script,
    refusal_can_be_caught_in_a_script,
    failing_script_keeps_its_grant,
    failing_script_keeps_its_handoff,
    tokens_rise_within_a_script,
    script_in_a_transaction_grants,
    read_only_script_may_look,
    read_only_script_may_not_decide,
    internal_command_is_refused_in_scripts,
    function_grants_and_gives_back,
    read_only_function_may_not_decide,
];

on_own_servers![effects_of_transactions_and_scripts_are_replicated_once, effects_of_one_step_are_replicated_together,];

/// Runs commands as one transaction and returns their replies.
#[track_caller]
fn transaction(conn: &mut Conn, commands: &[Vec<Vec<u8>>]) -> Vec<Reply> {
    assert_eq!(conn.cmd(&["MULTI"]), Reply::ok());
    for command in commands {
        assert_eq!(conn.cmd(command), Reply::Simple("QUEUED".into()));
    }
    conn.cmd(&["EXEC"]).as_array().to_vec()
}

/// Runs a script on one key.
fn eval(conn: &mut Conn, script: &str, key: &str) -> Reply {
    conn.cmd(&args!["EVAL", script, 1, key])
}

fn transaction_answers_as_outside(server: &Server, protocol: Protocol) {
    // The same replies, only later: token, nil, numbers, and a map of the protocol that the client speaks.
    let key = unique_key("replies");
    let mut conn = server.connect(protocol);
    let replies = transaction(
        &mut conn,
        &[
            args!["FLOCK.ACQUIRE", key, "alice", 60_000].to_vec(),
            args!["FLOCK.ACQUIRE", key, "bob", 60_000].to_vec(),
            args!["FLOCK.RENEW", key, "alice", 60_000].to_vec(),
            args!["FLOCK.INFO", key].to_vec(),
            args!["FLOCK.RELEASE", key, "alice"].to_vec(),
            args!["FLOCK.INFO", key].to_vec(),
        ],
    );
    let [token, busy, renewed, info, released, free] = &replies[..] else { panic!("{replies:?}") };
    token.as_token();
    assert_eq!((busy, renewed, released, free), (&Reply::Nil, &Reply::Int(1), &Reply::Int(1), &Reply::Nil));
    assert_eq!(info.field("holders").as_array()[0].field("token"), token);
}

fn transaction_takes_and_gives_back(server: &Server, protocol: Protocol) {
    // Each command sees what the one before it did; the second grant has a higher token.
    let key = unique_key("cycle");
    let mut conn = server.connect(protocol);
    let acquire = args!["FLOCK.ACQUIRE", key, "alice", 60_000].to_vec();
    let release = args!["FLOCK.RELEASE", key, "alice"].to_vec();
    let replies = transaction(&mut conn, &[acquire.clone(), release.clone(), acquire, release]);
    assert!(replies[2].as_token() > replies[0].as_token(), "{replies:?}");
    assert_eq!((&replies[1], &replies[3]), (&Reply::Int(1), &Reply::Int(1)));
    assert_eq!(conn.cmd(&args!["EXISTS", key]), Reply::Int(0));
}

fn check_guards_a_transaction_by_watch(server: &Server, protocol: Protocol) {
    // Without scripts: watch the lock, check the token, write. If the hold ends in between, nothing is written.
    let (key, data) = (unique_key("lock"), unique_key("data"));
    let mut conn = server.connect(protocol);
    let mut admin = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    for (revoked, expected) in [(false, Reply::Array(vec![Reply::ok()])), (true, Reply::Nil)] {
        conn.cmd(&args!["WATCH", key]);
        assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(1));
        if revoked {
            admin.cmd(&args!["FLOCK.REVOKE", key]);
        }
        conn.cmd(&["MULTI"]);
        conn.cmd(&args!["SET", data, "v"]);
        assert_eq!(conn.cmd(&["EXEC"]), expected);
    }
}

fn discarded_transaction_grants_nothing(server: &Server, protocol: Protocol) {
    // Queued is not done.
    let key = unique_key("discarded");
    let mut conn = server.connect(protocol);
    conn.cmd(&["MULTI"]);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]);
    assert_eq!(conn.cmd(&["DISCARD"]), Reply::ok());
    assert_eq!(conn.cmd(&args!["EXISTS", key]), Reply::Int(0));
}

fn transaction_with_a_bad_arity_grants_nothing(server: &Server, protocol: Protocol) {
    // The server knows each command's arity: such a mistake is found before anything is done.
    let key = unique_key("arity");
    let mut conn = server.connect(protocol);
    conn.cmd(&["MULTI"]);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]);
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice"]).error_code(), Some("ERR"));
    assert_eq!(conn.cmd(&["EXEC"]).error_code(), Some("EXECABORT"));
    assert_eq!(conn.cmd(&args!["EXISTS", key]), Reply::Int(0));
}

fn bad_argument_in_a_transaction_spoils_no_other_command(server: &Server, protocol: Protocol) {
    // As with every command of the server: the others are executed, the error stands in its place.
    let key = unique_key("argument");
    let mut conn = server.connect(protocol);
    let replies = transaction(
        &mut conn,
        &[
            args!["FLOCK.ACQUIRE", key, "alice", 60_000].to_vec(),
            args!["FLOCK.RENEW", key, "alice", "soon"].to_vec(),
            args!["FLOCK.RELEASE", key, "alice"].to_vec(),
        ],
    );
    replies[0].as_token();
    assert_eq!(replies[1].error_code(), Some("ERR"));
    assert_eq!(replies[2], Reply::Int(1));
}

fn block_in_a_transaction_is_a_plain_try(server: &Server, protocol: Protocol) {
    // A transaction that waited would stop the server; one that left a waiter behind would be granted to nobody.
    let key = unique_key("try");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let try_it = args!["FLOCK.ACQUIRE", key, "bob", 60_000, "BLOCK", 0].to_vec();
    assert_eq!(transaction(&mut conn, &[try_it]), [Reply::Nil]);
    assert_eq!(waiters(&mut conn, &key), [""; 0]);
}

fn block_in_a_transaction_takes_a_free_lock(server: &Server, protocol: Protocol) {
    // A plain try is granted where it can be.
    let key = unique_key("free");
    let mut conn = server.connect(protocol);
    let try_it = args!["FLOCK.ACQUIRE", key, "alice", 60_000, "BLOCK", 1000].to_vec();
    transaction(&mut conn, &[try_it])[0].as_token();
    assert_eq!(holders(&mut conn, &key), ["alice"]);
}

fn queue_in_a_transaction_joins_the_queue(server: &Server, protocol: Protocol) {
    // QUEUE holds no connection, so nothing is in its way: the request waits like one from outside.
    let key = unique_key("queued");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let queue = args!["FLOCK.ACQUIRE", key, "bob", 60_000, "QUEUE", 60_000, "CHANNEL", key].to_vec();
    let replies = transaction(&mut conn, &[queue]);
    assert_eq!(replies[0].as_array()[..2], [Reply::bulk("QUEUED"), Reply::Int(1)]);
    assert_eq!(waiters(&mut conn, &key), ["bob"]);
}

fn release_in_a_transaction_hands_over(server: &Server, protocol: Protocol) {
    // In the same step, so that the transaction itself cannot take the lock again past the waiter.
    let key = unique_key("handoff");
    let mut conn = server.connect(protocol);
    let first = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let mut waiter = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "bob", 60_000, "BLOCK", 0]);
    let replies = transaction(
        &mut conn,
        &[args!["FLOCK.RELEASE", key, "alice"].to_vec(), args!["FLOCK.ACQUIRE", key, "alice", 60_000].to_vec()],
    );
    assert_eq!(replies, [Reply::Int(1), Reply::Nil]);
    assert!(waiter.recv().as_token() > first);
}

fn waiter_of_a_transaction_hears_after_it(server: &Server, protocol: Protocol) {
    // Granted and ended again within one transaction: the waiter must not be left without an answer, and the token it is told must be
    // stale.
    let key = unique_key("within");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let mut waiter = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "bob", 60_000, "BLOCK", 0]);
    let replies = transaction(
        &mut conn,
        &[args!["FLOCK.RELEASE", key, "alice"].to_vec(), args!["FLOCK.RELEASE", key, "bob"].to_vec()],
    );
    assert_eq!(replies, [Reply::Int(1), Reply::Int(1)]);
    let token = waiter.recv().as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(0));
}

/// Whether a transaction that watches `key` is aborted when another connection does `what` in between.
#[track_caller]
fn aborts(server: &Server, protocol: Protocol, key: &str, what: impl FnOnce()) -> bool {
    let mut watcher = server.connect(protocol);
    assert_eq!(watcher.cmd(&args!["WATCH", key]), Reply::ok());
    what();
    watcher.cmd(&["MULTI"]);
    watcher.cmd(&["PING"]);
    watcher.cmd(&["EXEC"]).is_nil()
}

fn watched_lock_is_touched_by_what_changes_it(server: &Server, protocol: Protocol) {
    // Whoever watches a lock relies on hearing of every change of it.
    let mut conn = server.connect(protocol);
    for (held_before, change) in [
        (false, "FLOCK.ACQUIRE {key} alice 60000"),
        (true, "FLOCK.RELEASE {key} alice"),
        (true, "FLOCK.REVOKE {key}"),
        (true, "FLOCK.RENEW {key} alice 600000"),
        (true, "FLOCK.ACQUIRE {key} alice 600000"),
        (true, "FLOCK.ACQUIRE {key} alice 1 LABEL new"),
        (true, "DEL {key}"),
    ] {
        let key = unique_key("touched");
        if held_before {
            conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
        }
        let change = change.replace("{key}", &key);
        let command: Vec<&str> = change.split(' ').collect();
        let aborted = aborts(server, protocol, &key, || {
            assert_eq!(conn.cmd(&command).error_code(), None, "{change}");
        });
        assert!(aborted, "{change}");
    }
}

fn watched_lock_is_not_touched_by_what_changes_nothing(server: &Server, protocol: Protocol) {
    // Opening a key for writing marks it as changed unless told otherwise: then every failed try of anybody would abort.
    let mut conn = server.connect(protocol);
    for no_change in [
        "FLOCK.ACQUIRE {key} bob 60000",
        "FLOCK.ACQUIRE {key} alice 1",
        "FLOCK.ACQUIRE {key} alice 60000 NEW",
        "FLOCK.ACQUIRE {key} alice soon",
        "FLOCK.RELEASE {key} bob",
        "FLOCK.RELEASE {key} alice TOKEN 1",
        "FLOCK.RENEW {key} bob 60000",
        "FLOCK.RENEW {key} alice 60000 TOKEN 1",
        "FLOCK.REVOKE {key} OWNER bob",
        "FLOCK.CHECK {key} 1",
        "FLOCK.INFO {key}",
        "FLOCK.LIST MATCH {key}",
        "FLOCK.ACQUIRE {key} bob 60000 QUEUE 60000 CHANNEL c",
    ] {
        let key = unique_key("untouched");
        conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
        let no_change = no_change.replace("{key}", &key);
        let command: Vec<&str> = no_change.split(' ').collect();
        let aborted = aborts(server, protocol, &key, || drop(conn.cmd(&command)));
        assert!(!aborted, "{no_change}");
    }
}

fn watched_lock_is_touched_by_the_end_of_its_lease(server: &Server, protocol: Protocol) {
    // No command ends it, so no command can tell.
    let key = unique_key("expiring");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 50]).as_token();
    let aborted = aborts(server, protocol, &key, || {
        wait_until("the lease is over", ANSWER_WITHIN, || conn.cmd(&args!["EXISTS", key]) == Reply::Int(0));
    });
    assert!(aborted);
}

fn watched_lock_is_touched_by_a_handoff(server: &Server, protocol: Protocol) {
    // The key exists before and after; its holder is another one.
    let key = unique_key("handed over");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let mut waiter = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "bob", 60_000, "BLOCK", 0]);
    let aborted = aborts(server, protocol, &key, || {
        conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
        waiter.recv().as_token();
    });
    assert!(aborted);
}

fn script_gets_a_number(server: &Server, protocol: Protocol) {
    // A token as a string would compare as text: "9" > "10".
    let key = unique_key("number");
    let mut conn = server.connect(protocol);
    let script = "return type(redis.call('FLOCK.ACQUIRE', KEYS[1], 'alice', 60000))";
    assert_eq!(eval(&mut conn, script, &key).as_str(), "number");
}

fn script_gets_false_if_not_granted(server: &Server, protocol: Protocol) {
    // The script's own spelling of nil, so that `if token then` says what it means.
    let key = unique_key("false");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let script = "return tostring(redis.call('FLOCK.ACQUIRE', KEYS[1], 'bob', 60000))";
    assert_eq!(eval(&mut conn, script, &key).as_str(), "false");
}

fn script_of_the_new_protocol_gets_maps_and_nil(server: &Server, protocol: Protocol) {
    // A script chooses its own protocol version, whatever its client speaks.
    let key = unique_key("setresp");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let script = "redis.setresp(3) return redis.call('FLOCK.INFO', KEYS[1])['map']['mode']";
    assert_eq!(eval(&mut conn, script, &key).as_str(), "exclusive");
    let script = "redis.setresp(3) return tostring(redis.call('FLOCK.ACQUIRE', KEYS[1], 'bob', 60000))";
    assert_eq!(eval(&mut conn, script, &key).as_str(), "nil");
}

fn token_is_exact_in_lua(server: &Server, protocol: Protocol) {
    // Lua writes numbers with 14 digits: a longer token would come out rounded, and be nobody's.
    let key = unique_key("exact");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token().to_string();
    for conversion in ["tostring(token)", "token .. ''", "cjson.encode(token)", "token"] {
        let script = format!(
            "local token = redis.call('FLOCK.ACQUIRE', KEYS[1], 'alice', 60000)
             return redis.call('FLOCK.CHECK', KEYS[1], {conversion})"
        );
        assert_eq!(eval(&mut conn, &script, &key), Reply::Int(1), "{conversion}");
    }
    let script = "return tostring(redis.call('FLOCK.ACQUIRE', KEYS[1], 'alice', 60000))";
    assert_eq!(eval(&mut conn, script, &key).as_str(), token);
}

fn check_guards_a_write_in_a_script(server: &Server, protocol: Protocol) {
    // Valkey as its own fenced storage: a stale writer's value must not arrive.
    let (key, data) = (unique_key("{guard}lock"), unique_key("{guard}data"));
    let mut conn = server.connect(protocol);
    let script = "if redis.call('FLOCK.CHECK', KEYS[1], ARGV[1]) == 0 then return redis.error_reply('STALE') end
                  return redis.call('SET', KEYS[2], ARGV[2])";
    let old = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    let new = conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 60_000]).as_token();
    assert_eq!(conn.cmd(&args!["EVAL", script, 2, key, data, new, "bob's"]), Reply::ok());
    let stale = conn.cmd(&args!["EVAL", script, 2, key, data, old, "alice's"]);
    assert!(stale.error_code().is_some(), "{stale}");
    assert_eq!(conn.cmd(&args!["GET", data]), Reply::bulk("bob's"));
}

fn block_in_a_script_is_a_plain_try(server: &Server, protocol: Protocol) {
    // A script cannot wait: nil, and nobody in the queue.
    let key = unique_key("script try");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let script = "return redis.call('FLOCK.ACQUIRE', KEYS[1], 'bob', 60000, 'BLOCK', 0)";
    assert_eq!(eval(&mut conn, script, &key), Reply::Nil);
    assert_eq!(waiters(&mut conn, &key), [""; 0]);
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    eval(&mut conn, script, &key).as_token();
}

fn session_in_a_script_is_refused(server: &Server, protocol: Protocol) {
    // A script has no connection of its own whose end could end the hold.
    let key = unique_key("session");
    let mut conn = server.connect(protocol);
    let script = "return redis.call('FLOCK.ACQUIRE', KEYS[1], 'alice', 60000, 'SESSION', 1000)";
    let reply = eval(&mut conn, script, &key);
    assert_eq!(reply.error_code(), Some("ERR"));
    assert!(reply.error_text().contains("SESSION"), "{reply}");
    assert_eq!(conn.cmd(&args!["EXISTS", key]), Reply::Int(0));
}

fn refusal_raises_in_a_script(server: &Server, protocol: Protocol) {
    // `call` stops the script with the command's own code.
    let key = unique_key("raised");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED"]).as_token();
    let script = "redis.call('FLOCK.ACQUIRE', KEYS[1], 'alice', 60000) return 'not reached'";
    assert_eq!(eval(&mut conn, script, &key).error_code(), Some("HELDSHARED"));
}

fn refusal_can_be_caught_in_a_script(server: &Server, protocol: Protocol) {
    // `pcall` hands the same code to the script.
    let key = unique_key("caught");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let script = "return redis.pcall('FLOCK.ACQUIRE', KEYS[1], 'alice', 60000, 'NEW')['err']:match('^%u+')";
    assert_eq!(eval(&mut conn, script, &key).as_str(), "HELD");
}

fn failing_script_keeps_its_grant(server: &Server, protocol: Protocol) {
    // Scripts are not rolled back: what was granted before the failure is held, and must be releasable.
    let key = unique_key("failing");
    let mut conn = server.connect(protocol);
    let script = "redis.call('FLOCK.ACQUIRE', KEYS[1], 'alice', 60000) error('deliberate')";
    assert!(eval(&mut conn, script, &key).error_text().contains("deliberate"));
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 60_000]), Reply::Nil);
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]), Reply::Int(1));
}

fn failing_script_keeps_its_handoff(server: &Server, protocol: Protocol) {
    // The waiter that a failing script has granted must hear of it.
    let key = unique_key("failing handoff");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let mut waiter = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "bob", 60_000, "BLOCK", 0]);
    let script = "redis.call('FLOCK.RELEASE', KEYS[1], 'alice') error('deliberate')";
    assert!(eval(&mut conn, script, &key).error_text().contains("deliberate"));
    waiter.recv().as_token();
    assert_eq!(holders(&mut conn, &key), ["bob"]);
}

fn tokens_rise_within_a_script(server: &Server, protocol: Protocol) {
    // A script is one instant; its grants still have an order.
    let key = unique_key("instant");
    let mut conn = server.connect(protocol);
    let script = "local tokens = {}
                  for i = 1, 100 do
                      tokens[i] = redis.call('FLOCK.ACQUIRE', KEYS[1], 'alice', 60000)
                      redis.call('FLOCK.RELEASE', KEYS[1], 'alice')
                  end
                  return tokens";
    let reply = eval(&mut conn, script, &key);
    let tokens: Vec<_> = reply.as_array().iter().map(Reply::as_token).collect();
    assert_eq!(tokens.len(), 100);
    assert!(tokens.is_sorted_by(|one, next| one < next), "{tokens:?}");
}

fn script_in_a_transaction_grants(server: &Server, protocol: Protocol) {
    // Both at once.
    let key = unique_key("both");
    let mut conn = server.connect(protocol);
    let script = "return redis.call('FLOCK.ACQUIRE', KEYS[1], 'alice', 60000, 'BLOCK', 0)";
    let replies = transaction(
        &mut conn,
        &[args!["EVAL", script, 1, key].to_vec(), args!["FLOCK.RELEASE", key, "alice"].to_vec()],
    );
    replies[0].as_token();
    assert_eq!(replies[1], Reply::Int(1));
}

fn read_only_script_may_look(server: &Server, protocol: Protocol) {
    // INFO and LIST are reads.
    let key = unique_key("look");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let script = "return redis.call('FLOCK.INFO', KEYS[1])[2]";
    assert_eq!(conn.cmd(&args!["EVAL_RO", script, 1, key]).as_str(), "exclusive");
    let script = "return redis.call('FLOCK.LIST', 'COUNT', 10000, 'MATCH', KEYS[1])[2][1][2]";
    assert_eq!(conn.cmd(&args!["EVAL_RO", script, 1, key]), Reply::bulk(&key));
}

fn read_only_script_may_not_decide(server: &Server, protocol: Protocol) {
    // CHECK too: it is flagged as a write so that it is never answered by a replica.
    let key = unique_key("decide");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    for command in [
        "'FLOCK.ACQUIRE', KEYS[1], 'bob', 60000",
        "'FLOCK.RELEASE', KEYS[1], 'alice'",
        "'FLOCK.RENEW', KEYS[1], 'alice', 1",
        "'FLOCK.REVOKE', KEYS[1]",
        "'FLOCK.CHECK', KEYS[1], 1",
    ] {
        let script = format!("return redis.call({command})");
        let reply = conn.cmd(&args!["EVAL_RO", script, 1, key]);
        assert_eq!(reply.error_code(), Some("ERR"), "{command}");
    }
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(1));
}

fn internal_command_is_refused_in_scripts(server: &Server, protocol: Protocol) {
    // What only replication may say: a script that could say it would grant itself any token.
    let key = unique_key("internal");
    let mut conn = server.connect(protocol);
    for change in ["GRANT 5 x 60000 alice", "END 5", ""] {
        let script = "return redis.call('FLOCK._APPLY', ARGV[1], KEYS[1])";
        let reply = conn.cmd(&args!["EVAL", script, 1, key, change]);
        assert_eq!(reply.error_code(), Some("ERR"), "{change}");
    }
    assert_eq!(conn.cmd(&args!["EXISTS", key]), Reply::Int(0));
}

/// Loads a library whose one function, of the same name, runs `body`.
#[track_caller]
fn load_function(conn: &mut Conn, name: &str, flags: &str, body: &str) {
    let code = format!(
        "#!lua name={name}
         server.register_function{{
             function_name = '{name}', flags = {{{flags}}},
             callback = function(keys, args) {body} end
         }}"
    );
    let loaded = conn.cmd(&args!["FUNCTION", "LOAD", code]);
    assert_eq!(loaded.error_code(), None, "{loaded}");
}

/// A name that Lua takes, and no other test.
fn function_name(name: &str) -> String {
    unique_key(name).replace('#', "_")
}

fn function_grants_and_gives_back(server: &Server, protocol: Protocol) {
    // Functions are scripts that stay: the same commands, the same answers.
    let (key, name) = (unique_key("function"), function_name("cycle"));
    let mut conn = server.connect(protocol);
    let body = "local token = server.call('FLOCK.ACQUIRE', keys[1], 'alice', 60000, 'BLOCK', 0)
                return {token, server.call('FLOCK.CHECK', keys[1], token), server.call('FLOCK.RELEASE', keys[1], 'alice')}";
    load_function(&mut conn, &name, "", body);
    let reply = conn.cmd(&args!["FCALL", name, 1, key]);
    conn.cmd(&args!["FUNCTION", "DELETE", name]);
    let [token, checked, released] = reply.as_array() else { panic!("{reply}") };
    token.as_token();
    assert_eq!((checked, released), (&Reply::Int(1), &Reply::Int(1)));
}

fn read_only_function_may_not_decide(server: &Server, protocol: Protocol) {
    // Declared as one that does not write: the server holds it to that.
    let (key, name) = (unique_key("read-only"), function_name("read_only"));
    let mut conn = server.connect(protocol);
    load_function(&mut conn, &name, "'no-writes'", "return server.call('FLOCK.CHECK', keys[1], 5)");
    let reply = conn.cmd(&args!["FCALL_RO", name, 1, key]);
    conn.cmd(&args!["FUNCTION", "DELETE", name]);
    assert_eq!(reply.error_code(), Some("ERR"), "{reply}");
}

/// How often a server has run a command, as far as its statistics know.
fn calls(conn: &mut Conn, command: &str) -> u64 {
    let stats = Info::ask(conn, "commandstats");
    let calls = stats.get(&format!("cmdstat_{command}")).and_then(|line| {
        let calls = line.strip_prefix("calls=")?.split(',').next()?;
        calls.parse().ok()
    });
    calls.unwrap_or(0)
}

fn effects_of_transactions_and_scripts_are_replicated_once(builder: Builder) {
    // The replica gets what was decided, neither the script again nor anything twice; and ends up with the same state.
    let servers = Replicated::start(&builder, 1);
    let mut conn = servers.primary.connect(Protocol::Resp2);
    let mut replica = servers.replicas[0].connect(Protocol::Resp2);
    let request = args!["FLOCK.ACQUIRE", "handed-over", "bob", 60_000, "BLOCK", 0];
    conn.cmd(&args!["FLOCK.ACQUIRE", "handed-over", "alice", 60_000]).as_token();
    let _waiter = waiting(&servers.primary, Protocol::Resp2, &request);
    load_function(&mut conn, "take", "", "return server.call('FLOCK.ACQUIRE', keys[1], 'alice', 60000)");
    let failing = "redis.call('FLOCK.ACQUIRE', KEYS[1], 'alice', 60000) error('deliberate')";
    let nothing = "return redis.call('FLOCK.ACQUIRE', KEYS[1], 'stranger', 60000)";
    servers.wait_in_step();
    for (what, commands, changes) in [
        ("a grant", vec![args!["FLOCK.ACQUIRE", "plain", "alice", 60_000].to_vec()], 1),
        ("a grant repeated", vec![args!["FLOCK.ACQUIRE", "plain", "alice", 1].to_vec()], 0),
        ("a failing script", vec![args!["EVAL", failing, 1, "failing"].to_vec()], 1),
        ("a script that is refused", vec![args!["EVAL", nothing, 1, "failing"].to_vec()], 0),
        ("a function", vec![args!["FCALL", "take", 1, "function"].to_vec()], 1),
        (
            "a transaction with a handoff",
            vec![
                args!["MULTI"].to_vec(),
                args!["FLOCK.ACQUIRE", "other", "alice", 60_000].to_vec(),
                args!["FLOCK.RELEASE", "handed-over", "alice"].to_vec(),
                args!["FLOCK.CHECK", "other", 5].to_vec(),
                args!["EXEC"].to_vec(),
            ],
            3,
        ),
    ] {
        let before = calls(&mut replica, "FLOCK._APPLY");
        for command in commands {
            conn.cmd(&command);
        }
        servers.wait_in_step();
        assert_eq!(calls(&mut replica, "FLOCK._APPLY") - before, changes, "{what}");
    }
    assert_eq!(holders(&mut replica, "handed-over"), ["bob"]);
    let digest = ["DEBUG", "DIGEST"];
    assert_eq!(conn.cmd(&digest), replica.cmd(&digest));
}

fn effects_of_one_step_are_replicated_together(builder: Builder) {
    // A replica that applied the end of one hold and the next grant one by one could be promoted in between. What comes together is
    // wrapped in a transaction of its own.
    let servers = Replicated::start(&builder, 1);
    let mut conn = servers.primary.connect(Protocol::Resp2);
    let mut replica = servers.replicas[0].connect(Protocol::Resp2);
    conn.cmd(&args!["FLOCK.ACQUIRE", "a", "alice", 60_000]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", "b", "alice", 60_000]).as_token();
    let request = args!["FLOCK.ACQUIRE", "a", "bob", 60_000, "BLOCK", 0];
    let _waiter = waiting(&servers.primary, Protocol::Resp2, &request);
    let script = "redis.call('FLOCK.RELEASE', KEYS[1], 'alice') redis.call('FLOCK.ACQUIRE', KEYS[1], 'carol', 60000)";
    servers.wait_in_step();
    for (what, command, transactions) in [
        ("one grant", args!["FLOCK.ACQUIRE", "c", "alice", 60_000].to_vec(), 0),
        ("a handoff", args!["FLOCK.RELEASE", "a", "alice"].to_vec(), 1),
        ("a script", args!["EVAL", script, 1, "b"].to_vec(), 1),
    ] {
        let before = calls(&mut replica, "exec");
        conn.cmd(&command);
        servers.wait_in_step();
        assert_eq!(calls(&mut replica, "exec") - before, transactions, "{what}");
    }
    let digest = ["DEBUG", "DIGEST"];
    assert_eq!(conn.cmd(&digest), replica.cmd(&digest));
}
