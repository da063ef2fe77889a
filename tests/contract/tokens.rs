//! Fencing tokens never go back, whatever is done to the key, to the data, to the server and to the clock.
//!
//! The wall clock alone would make most of this true; so the tests first make the counter run ahead of it, by a FLOOR half a day
//! away: then only what was stored or replicated can keep tokens rising.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use flock_tests::args;
use flock_tests::args::encode;
use flock_tests::on_own_servers;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::{Builder, Server};
use flock_tests::topology::{Replicated, demote, promote, wait_in_step};
use flock_tests::wait::wait_until;

use crate::lock_view::holders;
use crate::scene::{LEASE_MS, hold, outlast, quiet, release, transaction};

on_own_servers![
    token_rises_whatever_is_done_to_the_key,
    token_rises_inside_one_transaction,
    token_rises_inside_one_script,
    copy_is_refused,
    renamed_hold_is_nobodys,
    moved_hold_is_nobodys,
    renamed_hold_gives_way_to_a_new_one,
    swapped_database_keeps_its_holds,
    restored_value_of_before_does_not_turn_the_counter_back,
    token_rises_over_debug_reload,
    token_rises_over_debug_loadaof,
    token_rises_over_a_kill_with_a_stale_snapshot,
    token_rises_over_a_kill_with_a_rewritten_plain_file,
    token_rises_over_a_regular_restart,
    token_rises_over_a_restart_with_nothing,
    token_rises_on_a_replica_that_missed_2000_grants,
    token_rises_on_a_replica_whose_primary_rewrote_its_files,
    token_rises_on_a_replica_of_a_primary_that_was_paused_as_it_loaded,
    two_primaries_never_give_the_same_token,
    replica_forgets_no_token_of_its_own_past,
    floor_raises_the_counter_though_the_lock_is_held,
    floor_is_replicated,
    floor_survives_a_kill,
    floor_too_far_ahead_is_refused,
    floors_in_a_row_reach_no_further_than_one,
    lua_prints_the_token_in_full,
    clock_thirty_seconds_behind_on_the_replica_does_not_matter,
    clock_thirty_seconds_ahead_on_the_replica_does_not_matter,
    clock_put_back_at_a_restart_does_not_matter,
    clock_before_1970_counts_as_the_date_of_the_build,
    clock_after_2056_is_ignored,
];

/// A year in seconds, for a wall clock that is far off.
const YEAR_S: i64 = 365 * 24 * 3600;
/// Half a day in tokens: one is 10 us.
const HALF_A_DAY: u64 = 12 * 3600 * 100_000;

/// Makes the counter run ahead of the clock; answers a token from there.
#[track_caller]
fn run_ahead(conn: &mut Conn) -> u64 {
    let token = one_token(conn);
    conn.cmd(&args!["FLOCK.ACQUIRE", "probe", "nobody else", 1, "FLOOR", token + HALF_A_DAY]).as_token()
}

/// The next token of this server, from a lock that is given back at once.
#[track_caller]
fn one_token(conn: &mut Conn) -> u64 {
    let token = hold(conn, "one token", "probe");
    release(conn, "one token", "probe");
    token
}

/// The last token of `count` grants.
#[track_caller]
fn many_tokens(conn: &mut Conn, count: u64) -> u64 {
    let script = "local token for i = 1, ARGV[1] do \
                  token = redis.call('FLOCK.ACQUIRE', KEYS[1], 'probe', 60000) \
                  redis.call('FLOCK.RELEASE', KEYS[1], 'probe') end return token";
    conn.cmd(&args!["EVAL", script, 1, "many tokens", count]).as_token()
}

#[track_caller]
fn assert_rises(server: &Server, before: u64) {
    let after = one_token(&mut server.connect(Protocol::Resp2));
    assert!(after > before, "{after} after {before}");
}

fn token_rises_whatever_is_done_to_the_key(builder: Builder) {
    // S2. A counter kept with the key would begin anew in each of these cases; one that takes the key's word would fall.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let mut before = run_ahead(&mut conn);
    let ways: [&[&[Vec<u8>]]; 14] = [
        &[&args!["FLOCK.RELEASE", "k", "alice"]],
        &[&args!["FLOCK.REVOKE", "k"]],
        &[&args!["DEL", "k"]],
        &[&args!["UNLINK", "k"]],
        &[&args!["SET", "k", "no lock"], &args!["DEL", "k"]],
        &[&args!["SET", "k", "no lock", "PX", 1]],
        &[&args!["RENAME", "k", "elsewhere"]],
        &[&args!["SET", "other", "x"], &args!["RENAME", "other", "k"], &args!["DEL", "k"]],
        &[&args!["MOVE", "k", 1]],
        &[&args!["SWAPDB", 0, 2]],
        &[&args!["FLUSHDB", "SYNC"]],
        &[&args!["FLUSHDB", "ASYNC"]],
        &[&args!["FLUSHALL", "SYNC"]],
        &[&args!["FLUSHALL", "ASYNC"]],
    ];
    for way in ways {
        let token = hold(&mut conn, "k", "alice");
        assert!(token > before, "{token} after {before}");
        let words = way.iter().flat_map(|command| command.iter()).map(|word| word.escape_ascii().to_string());
        let words: Vec<_> = words.collect();
        for command in way {
            assert_eq!(conn.cmd(command).error_code(), None, "{words:?}");
        }
        // After PX the key may live for a moment as a string.
        wait_until("the key is gone", ANSWER_WITHIN, || conn.cmd(&["EXISTS", "k"]) == Reply::Int(0));
        let next = hold(&mut conn, "k", "bob");
        assert!(next > token, "{words:?}: {next} after {token}");
        assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(0), "{words:?}");
        release(&mut conn, "k", "bob");
        before = next;
    }
}

fn token_rises_inside_one_transaction(builder: Builder) {
    // What a deletion causes is done after the transaction: the counter must not wait for it.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let replies = transaction(
        &mut conn,
        &[
            &args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS],
            &args!["DEL", "k"],
            &args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS],
            &args!["FLUSHALL"],
            &args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS],
            &args!["RENAME", "k", "elsewhere"],
            &args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS],
            &args!["FLOCK.ACQUIRE", "elsewhere", "alice", LEASE_MS],
        ],
    );
    let tokens = [0, 2, 4, 6, 7].map(|index| replies[index].as_token());
    assert!(tokens.is_sorted_by(|one, next| one < next), "{tokens:?}");
}

fn token_rises_inside_one_script(builder: Builder) {
    // The same in a script, whose commands come from a client of its own.
    let server = builder.start();
    let script = "local tokens = {} \
                  local function take() \
                  tokens[#tokens + 1] = redis.call('FLOCK.ACQUIRE', KEYS[1], 'alice', 60000) end \
                  take() redis.call('DEL', KEYS[1]) \
                  take() redis.call('SET', KEYS[1], 'x') redis.call('DEL', KEYS[1]) \
                  take() redis.call('FLUSHALL') \
                  take() redis.call('FLOCK.RELEASE', KEYS[1], 'alice') \
                  take() return tokens";
    let reply = server.connect(Protocol::Resp2).cmd(&args!["EVAL", script, 1, "k"]);
    let tokens: Vec<_> = reply.as_array().iter().map(Reply::as_token).collect();
    assert_eq!(tokens.len(), 5);
    assert!(tokens.is_sorted_by(|one, next| one < next), "{tokens:?}");
}

fn copy_is_refused(builder: Builder) {
    // A copied lock would be one token held under two names.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    hold(&mut conn, "k", "alice");
    assert_eq!(conn.cmd(&args!["COPY", "k", "copy"]).error_code(), Some("ERR"));
    assert_eq!(conn.cmd(&args!["COPY", "k", "k", "DB", 1, "REPLACE"]).error_code(), Some("ERR"));
    assert_eq!(conn.cmd(&["EXISTS", "copy"]), Reply::Int(0));
}

#[track_caller]
fn assert_nobodys(conn: &mut Conn, key: &str, token: u64) {
    assert!(conn.cmd(&args!["FLOCK.INFO", key]).is_nil());
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(0));
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", key, "alice", LEASE_MS]), Reply::Int(0));
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]), Reply::Int(0));
    let next = hold(conn, key, "bob");
    assert!(next > token, "{next} after {token}");
}

fn renamed_hold_is_nobodys(builder: Builder) {
    // The value lives on under the new name: to take it for a hold there would give its owner a lock it never asked for.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let token = hold(&mut conn, "k", "alice");
    assert_eq!(conn.cmd(&["RENAME", "k", "elsewhere"]), Reply::ok());
    assert_nobodys(&mut conn, "elsewhere", token);
}

fn moved_hold_is_nobodys(builder: Builder) {
    // The same in another database.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let token = hold(&mut conn, "k", "alice");
    assert_eq!(conn.cmd(&["MOVE", "k", "1"]), Reply::Int(1));
    conn.cmd(&["SELECT", "1"]);
    assert_nobodys(&mut conn, "k", token);
}

fn renamed_hold_gives_way_to_a_new_one(builder: Builder) {
    // RENAME over a held lock ends both: the one that was there, and the one that was carried there.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    hold(&mut conn, "from", "alice");
    let token = hold(&mut conn, "to", "carol");
    assert_eq!(conn.cmd(&["RENAME", "from", "to"]), Reply::ok());
    assert_nobodys(&mut conn, "to", token);
    let other = hold(&mut conn, "from", "alice");
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "from", other]), Reply::Int(1));
}

fn swapped_database_keeps_its_holds(builder: Builder) {
    // SWAPDB moves no value: the same lock has the same name in the other database, and must end there in time.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let token = hold(&mut conn, "k", "alice");
    conn.cmd(&args!["FLOCK.ACQUIRE", "short", "alice", 50]).as_token();
    assert_eq!(conn.cmd(&["SWAPDB", "0", "1"]), Reply::ok());
    assert!(conn.cmd(&["FLOCK.INFO", "k"]).is_nil());
    let next = hold(&mut conn, "k", "bob");
    assert!(next > token, "{next} after {token}");
    conn.cmd(&["SELECT", "1"]);
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(1));
    wait_until("the short lease has ended there", ANSWER_WITHIN, || conn.cmd(&["EXISTS", "short"]) == Reply::Int(0));
}

fn restored_value_of_before_does_not_turn_the_counter_back(builder: Builder) {
    // A value from yesterday brings an old token and an old mark with it: loads only ever raise.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    hold(&mut conn, "k", "alice");
    let old = conn.cmd(&["DUMP", "k"]);
    release(&mut conn, "k", "alice");
    let before = run_ahead(&mut conn);
    assert_eq!(conn.cmd(&args!["RESTORE", "k", 0, old.as_bytes()]), Reply::ok());
    assert_eq!(conn.cmd(&["FLOCK.REVOKE", "k"]), Reply::Int(1));
    assert_rises(&server, before);
}

fn token_rises_over_debug_reload(builder: Builder) {
    // Everything is saved, dropped and loaded: the counter comes back from the snapshot, or was never dropped.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let before = run_ahead(&mut conn);
    assert_eq!(conn.cmd(&["DEBUG", "RELOAD"]), Reply::ok());
    assert_rises(&server, before);
}

fn token_rises_over_debug_loadaof(builder: Builder) {
    // The same from the append-only file.
    let server = builder.appendonly().start();
    let mut conn = server.connect(Protocol::Resp2);
    let before = run_ahead(&mut conn);
    assert_eq!(conn.cmd(&["DEBUG", "LOADAOF"]), Reply::ok());
    assert_rises(&server, before);
}

fn token_rises_over_a_kill_with_a_stale_snapshot(builder: Builder) {
    // C4. What was granted after the snapshot is on no disk: only the mark in the snapshot, which reserves ahead, covers it.
    let mut server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    run_ahead(&mut conn);
    assert_eq!(conn.cmd(&["SAVE"]), Reply::ok());
    let before = many_tokens(&mut conn, 5000);
    server.kill9();
    server.start_again();
    assert_rises(&server, before);
}

fn token_rises_over_a_kill_with_a_rewritten_plain_file(builder: Builder) {
    // C6. A file rewritten to plain commands holds only keys that exist, and no counter: the mark must be written after it. Twice,
    // because the second rewrite drops what was written after the first.
    let mut server = builder.appendonly().config("aof-use-rdb-preamble", "no").start();
    let mut conn = server.connect(Protocol::Resp2);
    let before = run_ahead(&mut conn);
    wait_until("the probe has ended", ANSWER_WITHIN, || conn.cmd(&["DBSIZE"]) == Reply::Int(0));
    for rewrites in 1..=2 {
        let before_rewrite = conn.cmd(&["INFO", "stats"]);
        assert!(before_rewrite.error_code().is_none());
        assert_eq!(conn.cmd(&["BGREWRITEAOF"]).error_code(), None);
        wait_until("the file is rewritten", ANSWER_WITHIN, || {
            let base = format!("appendonlydir/appendonly.aof.{}.base.aof", rewrites + 1);
            server.dir().join(base).exists() && server.info("persistence").number("aof_rewrite_in_progress") == 0
        });
    }
    server.kill9();
    server.start_again();
    assert_rises(&server, before);
}

fn token_rises_over_a_regular_restart(builder: Builder) {
    // The snapshot that a regular end writes.
    let mut server = builder.config("save", "3600 1").start();
    let before = run_ahead(&mut server.connect(Protocol::Resp2));
    server.sigterm();
    assert!(server.wait_exit(ANSWER_WITHIN).success());
    server.start_again();
    assert_rises(&server, before);
}

fn token_rises_over_a_restart_with_nothing(builder: Builder) {
    // With no data at all only the clock is left, and it is enough as long as the counter has not run ahead of it: so it is given the
    // moment it needs to catch up with a script that grants faster than 100,000 a second.
    let mut server = builder.start();
    let before = many_tokens(&mut server.connect(Protocol::Resp2), 5000);
    wait_until("the clock is ahead", ANSWER_WITHIN, || server.info("flock").number("flock_lead_over_clock") < 0);
    server.restart();
    assert_rises(&server, before);
}

/// The replica stops, the primary grants 2000 times more and dies, and the replica takes over.
#[track_caller]
fn assert_rises_on_the_replica(servers: &mut Replicated) {
    servers.replicas[0].sigstop();
    let before = many_tokens(&mut servers.primary.connect(Protocol::Resp2), 2000);
    servers.primary.kill9();
    servers.replicas[0].sigcont();
    promote(&servers.replicas[0]);
    assert_rises(&servers.replicas[0], before);
}

fn token_rises_on_a_replica_that_missed_2000_grants(builder: Builder) {
    // D2. What the dead primary granted and did not replicate is below the mark that it had announced.
    let mut servers = Replicated::start(&builder, 1);
    let mut conn = servers.primary.connect(Protocol::Resp2);
    run_ahead(&mut conn);
    servers.wait_in_step();
    assert_rises_on_the_replica(&mut servers);
}

fn token_rises_on_a_replica_whose_primary_rewrote_its_files(builder: Builder) {
    // The replica's mark comes with the snapshot of its full sync and with the stream: the second must not be skipped, whatever
    // else the primary saves meanwhile.
    let mut servers = Replicated::start(&builder, 1);
    let mut conn = servers.primary.connect(Protocol::Resp2);
    for _ in 0..3 {
        run_ahead_a_little(&mut conn);
        assert_eq!(conn.cmd(&["BGSAVE"]).error_code(), None);
        wait_until("it is saved", ANSWER_WITHIN, || {
            servers.primary.info("persistence").number("rdb_bgsave_in_progress") == 0
        });
    }
    servers.wait_in_step();
    assert_rises_on_the_replica(&mut servers);
}

/// Just so far that half of the reservation is used, and a new mark is due.
#[track_caller]
fn run_ahead_a_little(conn: &mut Conn) {
    let token = one_token(conn);
    conn.cmd(&args!["FLOCK.ACQUIRE", "probe", "nobody else", 1, "FLOOR", token + 600_000]);
}

fn token_rises_on_a_replica_of_a_primary_that_was_paused_as_it_loaded(builder: Builder) {
    // Paused, a primary announces no mark, yet replicas copy it. Then it grants what none of them has heard of: from a counter that runs
    // ahead of the clock, or after a pause that was longer than the reservation lasts.
    assert_rises_after_a_pause(&builder, |conn| assert!(run_ahead(conn) > 0), |_| {});
    assert_rises_after_a_pause(&builder, |_| {}, |primary| primary.set_wall_clock(60));
}

/// A primary is paused while it loads, and copied in the pause, in which something happens; then its replica is cut off and takes over.
#[track_caller]
fn assert_rises_after_a_pause(builder: &Builder, before: fn(&mut Conn), in_the_pause: fn(&Server)) {
    let slow = builder
        .clone()
        .config("key-load-delay", 20_000)
        .config("loading-process-events-interval-bytes", 1024)
        .config("rdbcompression", "no");
    let mut primary = slow.wall_clock(0).start();
    let mut conn = primary.connect(Protocol::Resp2);
    one_token(&mut conn);
    before(&mut conn);
    for number in 0..30 {
        conn.cmd(&args!["SET", format!("long to load {number}"), "x".repeat(2048)]);
    }
    assert_eq!(conn.cmd(&["SAVE"]), Reply::ok());
    primary.kill9();
    let address = primary.addr();
    let pausing = std::thread::spawn(move || {
        wait_until("the loading server is paused", ANSWER_WITHIN, || {
            let Ok(mut conn) = Conn::try_open_raw(address) else { return false };
            // Both at once: the server looks up from loading now and then, and may have loaded the next time.
            let pause = encode(&args!["CLIENT", "PAUSE", 600_000, "WRITE"]);
            let state = encode(&args!["INFO", "persistence"]);
            if conn.try_send_bytes(&[pause, state].concat()).is_err() {
                return false;
            }
            let (paused, state) = (conn.recv_within(ANSWER_WITHIN), conn.recv_within(ANSWER_WITHIN));
            let is_paused = paused == Ok(Reply::ok());
            let was_loading = state.is_ok_and(|state| state.as_str().contains("\nloading:1"));
            assert!(!is_paused || was_loading, "it has loaded already");
            is_paused
        });
    });
    primary.start_again();
    pausing.join().expect("it loads for long enough");
    let replica = builder.clone().replica_of(&primary).start();
    wait_in_step(&primary, &replica);
    in_the_pause(&primary);
    replica.sigstop();
    let mut conn = primary.connect(Protocol::Resp2);
    assert_eq!(conn.cmd(&["CLIENT", "KILL", "TYPE", "replica"]), Reply::Int(1));
    assert_eq!(conn.cmd(&["CLIENT", "UNPAUSE"]), Reply::ok());
    let last = many_tokens(&mut conn, 100);
    primary.kill9();
    replica.sigcont();
    promote(&replica);
    assert_rises(&replica, last);
}

fn two_primaries_never_give_the_same_token(builder: Builder) {
    // S3, D4. The old primary does not know that it is replaced: its tokens stay below the new one's, so a storage that has seen
    // the new ones refuses the old ones. After the heal tokens rise further, on either.
    let servers = Replicated::start(&builder, 1);
    let (old, new) = (&servers.primary, &servers.replicas[0]);
    let mut stale = old.connect(Protocol::Resp2);
    run_ahead(&mut stale);
    servers.wait_in_step();
    promote(new);
    let mut fresh = new.connect(Protocol::Resp2);
    let mut stale_tokens = BTreeSet::new();
    let mut fresh_tokens = BTreeSet::new();
    for _ in 0..500 {
        stale_tokens.insert(one_token(&mut stale));
        fresh_tokens.insert(one_token(&mut fresh));
    }
    assert_eq!((stale_tokens.len(), fresh_tokens.len()), (500, 500));
    assert!(stale_tokens.last() < fresh_tokens.first(), "{:?} {:?}", stale_tokens.last(), fresh_tokens.first());
    demote(old, new);
    wait_in_step(new, old);
    let last = one_token(&mut fresh);
    wait_in_step(new, old);
    promote(old);
    assert_rises(old, last);
}

fn replica_forgets_no_token_of_its_own_past(builder: Builder) {
    // D7. A server that was a primary with a higher counter becomes a replica and loads a lower one: it must keep its own.
    for load in ["disabled", "swapdb"] {
        let other = builder.clone().start();
        let server = builder.clone().config("repl-diskless-load", load).start();
        let before = run_ahead(&mut server.connect(Protocol::Resp2));
        one_token(&mut other.connect(Protocol::Resp2));
        demote(&server, &other);
        wait_in_step(&other, &server);
        promote(&server);
        assert_rises(&server, before);
    }
}

fn floor_raises_the_counter_though_the_lock_is_held(builder: Builder) {
    // FLOOR tells of a higher token that somebody has seen: that is true whether this request is granted or not.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let floor = hold(&mut conn, "k", "alice") + HALF_A_DAY;
    assert!(conn.cmd(&args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS, "FLOOR", floor]).is_nil());
    assert_eq!(one_token(&mut conn), floor + 1);
}

fn floor_is_replicated(builder: Builder) {
    // A floor that only the primary knows is forgotten when it dies.
    let servers = Replicated::start(&builder, 1);
    let mut conn = servers.primary.connect(Protocol::Resp2);
    let floor = hold(&mut conn, "k", "alice") + HALF_A_DAY;
    assert!(conn.cmd(&args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS, "FLOOR", floor]).is_nil());
    servers.wait_in_step();
    promote(&servers.replicas[0]);
    assert_rises(&servers.replicas[0], floor);
}

fn floor_survives_a_kill(builder: Builder) {
    // The same in the append-only file, also where nothing is granted.
    let mut server = builder.appendonly().start();
    let mut conn = server.connect(Protocol::Resp2);
    let floor = hold(&mut conn, "k", "alice") + HALF_A_DAY;
    assert!(conn.cmd(&args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS, "FLOOR", floor]).is_nil());
    server.kill9();
    server.start_again();
    assert_rises(&server, floor);
}

fn floor_too_far_ahead_is_refused(builder: Builder) {
    // H8. One request with a huge number would use up the counter for everybody: more than a day ahead was never handed out.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let token = one_token(&mut conn);
    for floor in [token + 3 * HALF_A_DAY, (1 << 53) - 1] {
        let reply = conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS, "FLOOR", floor]);
        assert_eq!(reply.error_code(), Some("TOKENFLOOR"), "{reply}");
    }
    assert_eq!(conn.cmd(&["EXISTS", "k"]), Reply::Int(0));
    assert_eq!(one_token(&mut conn), token + 1);
}

fn floors_in_a_row_reach_no_further_than_one(builder: Builder) {
    // H8. The bound is a day above the *clock*: one that moves along with the counter lets a loop of requests use up all tokens.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let token = one_token(&mut conn);
    let ahead = |halves: u64| args!["FLOCK.ACQUIRE", "k", "alice", 1, "FLOOR", token + halves * HALF_A_DAY];
    assert_eq!(conn.cmd(&ahead(1)).error_code(), None);
    assert_eq!(conn.cmd(&ahead(3)).error_code(), Some("TOKENFLOOR"));
    assert_eq!(conn.cmd(&ahead(5)).error_code(), Some("TOKENFLOOR"));
}

fn lua_prints_the_token_in_full(builder: Builder) {
    // Lua prints numbers of more than 14 digits with an exponent: a token that a script writes into a key would be another.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    run_ahead(&mut conn);
    let script = "local token = redis.call('FLOCK.ACQUIRE', KEYS[1], 'alice', 60000) \
                  return {token, tostring(token), token .. '', cjson.encode(token)}";
    let reply = conn.cmd(&args!["EVAL", script, 1, "k"]);
    let [token, printed @ ..] = reply.as_array() else { panic!("expected four values, got {reply}") };
    for text in printed {
        assert_eq!(text.as_str(), token.as_int().to_string());
    }
}

#[track_caller]
fn assert_replica_clock_does_not_matter(builder: Builder, offset_s: i64) {
    let mut primary = builder.start();
    let replica = builder.replica_of(&primary).wall_clock(offset_s).start();
    wait_in_step(&primary, &replica);
    let mut conn = primary.connect(Protocol::Resp2);
    let token = hold(&mut conn, "k", "alice");
    wait_in_step(&primary, &replica);
    let before = many_tokens(&mut conn, 1000);
    primary.kill9();
    promote(&replica);
    let mut conn = replica.connect(Protocol::Resp2);
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(1));
    assert_eq!(holders(&mut conn, "k"), ["alice"]);
    assert_rises(&replica, before);
}

fn clock_thirty_seconds_behind_on_the_replica_does_not_matter(builder: Builder) {
    // D3. By its own clock the replica would start 30 s, 3,000,000 tokens, too low.
    assert_replica_clock_does_not_matter(builder, -30);
}

fn clock_thirty_seconds_ahead_on_the_replica_does_not_matter(builder: Builder) {
    // D3. A lease that were a point on the wall clock would be over there.
    assert_replica_clock_does_not_matter(builder, 30);
}

fn clock_put_back_at_a_restart_does_not_matter(builder: Builder) {
    // C5. The snapshot is stale and the clock an hour late: the mark in the snapshot is all there is.
    let mut server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    one_token(&mut conn);
    assert_eq!(conn.cmd(&["SAVE"]), Reply::ok());
    let before = many_tokens(&mut conn, 5000);
    server.kill9();
    let later = builder.copy_data_from(&server).wall_clock(-3600).start();
    assert_rises(&later, before);
}

fn clock_before_1970_counts_as_the_date_of_the_build(builder: Builder) {
    // I4. A machine without a battery starts in the past, perhaps before the epoch of time itself: no panic, no token below those
    // of any real day before the build, a warning, and leases that end.
    let server = quiet(&builder.wall_clock(-80 * YEAR_S));
    let mut conn = server.connect(Protocol::Resp2);
    let token = one_token(&mut conn);
    // 2026-11-30, the date in the source, in units of 10 us since 2025.
    assert!(token > 6_031_040_000_000, "{token}");
    assert!(server.log().contains("the wall clock is before this build's date"), "{}", server.log());
    assert_lease_ends_on_time(&server, &mut conn);
}

fn clock_after_2056_is_ignored(builder: Builder) {
    // I4. Such a token would not fit into 14 digits, and the counter can never go back.
    let server = quiet(&builder.wall_clock(274 * YEAR_S));
    let mut conn = server.connect(Protocol::Resp2);
    let token = one_token(&mut conn);
    assert!(token < 99_999_999_999_999, "{token}");
    assert!(server.log().contains("the wall clock is after 2056"), "{}", server.log());
    assert_lease_ends_on_time(&server, &mut conn);
}

#[track_caller]
fn assert_lease_ends_on_time(server: &Server, conn: &mut Conn) {
    let asked = Instant::now();
    conn.cmd(&args!["FLOCK.ACQUIRE", "short", "alice", 100]).as_token();
    outlast(server, "short", Instant::now(), 100);
    assert!(asked.elapsed() >= Duration::from_millis(100), "{:?}", asked.elapsed());
}
