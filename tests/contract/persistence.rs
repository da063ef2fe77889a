//! What is on disk: every acknowledged grant and release, and no lease longer or shorter than it was.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use flock_tests::args;
use flock_tests::args::encode;
use flock_tests::on_own_servers;
use flock_tests::random::Random;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::{Builder, Server};
use flock_tests::wait::{let_pass, wait_until};

use crate::acknowledged::Load;
use crate::lock_view::{holder, holders, left_ms};
use crate::scene::{LEASE_MS, hold, long_tier, outlast, release, rounds, waiter};
use crate::traffic::{Traffic, assert_same, contents, held, wait_settled};

on_own_servers![
    hold_with_every_option_survives_every_form,
    random_traffic_survives_every_form,
    acknowledged_requests_survive_a_kill,
    changes_count_towards_the_next_snapshot,
    lease_after_a_restart_is_exact,
    lease_that_ended_while_down_is_over,
    restarts_in_a_loop_extend_nothing,
    lease_loaded_without_its_boot_starts_when_loading_has_ended,
    waiters_are_not_persisted,
    waiter_survives_a_reload,
    session_hold_ends_after_a_restart_unless_renewed,
    restored_value_is_held_with_its_lease,
    restored_value_over_a_held_lock_replaces_it,
    truncated_value_is_refused,
    damaged_value_is_refused_or_sound,
    value_of_a_newer_type_version_is_refused,
    value_of_a_newer_encoding_is_refused,
    snapshot_of_a_newer_version_is_refused_with_its_reason,
    truncated_snapshot_is_refused,
    unknown_change_in_the_append_only_file_is_logged,
    data_are_refused_without_the_module_and_load_with_it,
    thousand_locks_survive_reloads,
    append_only_file_that_is_cut_loads_what_is_whole,
    snapshot_passes_the_servers_checker,
    append_only_file_passes_the_servers_checker,
    value_with_a_token_far_ahead_is_refused,
    snapshot_of_the_first_version_loads,
    append_only_file_of_the_first_version_loads,
    snapshot_without_a_lock_loads_without_the_module,
    time_to_live_that_is_over_at_a_start_frees_the_lock,
    requests_in_an_append_only_file_grant_and_block_nothing,
];

const REWRITE: &[&str] = &["BGREWRITEAOF"];

/// The forms in which data are on disk, and the command that makes the server write them anew, if any.
fn forms(builder: &Builder) -> [(&'static str, Builder, &'static [&'static str]); 5] {
    let aof = |preamble| builder.clone().appendonly().config("aof-use-rdb-preamble", preamble);
    [
        ("snapshot", builder.clone(), &["SAVE"]),
        ("commands", aof("yes"), &[]),
        ("commands after a snapshot", aof("yes"), REWRITE),
        ("rewritten commands", aof("no"), REWRITE),
        ("commands of a plain file", aof("no"), &[]),
    ]
}

/// Makes the server write, and waits until it has.
#[track_caller]
fn write(server: &Server, command: &[&str]) {
    if command.is_empty() {
        return;
    }
    let mut conn = server.connect(Protocol::Resp2);
    // The first rewrite may still be scheduled: it is what makes the file.
    assert_eq!(conn.cmd(command).error_code(), None);
    wait_until("it is written", ANSWER_WITHIN, || {
        let info = server.info("persistence");
        info.number("aof_rewrite_in_progress") == 0 && info.number("aof_rewrite_scheduled") == 0
    });
}

fn hold_with_every_option_survives_every_form(builder: Builder) {
    // S11. A field that one form forgets shows in the digest, which covers all but the running time, or in INFO.
    for (form, builder, command) in forms(&builder) {
        let mut server = builder.start();
        let mut conn = server.connect(Protocol::Resp2);
        let odd = "o w\0n\r\ner\u{ff}";
        for (key, options) in [
            ("plain", &[][..]),
            ("labelled", &["LABEL", "nightly \0 run"]),
            ("reentrant", &["REENTRANT", "first id"]),
            ("claimed", &["CLAIM", "50000"]),
            ("session", &["SESSION", "80000000"]),
            ("channel", &["CHANNEL", "news \u{ff}"]),
            ("shared", &["SHARED", "LIMIT", "3"]),
            (
                "all",
                &["SHARED", "LABEL", "x", "REENTRANT", "1", "CLAIM", "50000", "SESSION", "80000000", "CHANNEL", "c"],
            ),
        ] {
            let mut request = args!["FLOCK.ACQUIRE", key, odd, LEASE_MS].to_vec();
            request.extend(options.iter().map(|option| option.as_bytes().to_vec()));
            conn.cmd(&request).as_token();
        }
        conn.cmd(&args!["FLOCK.ACQUIRE", "reentrant", odd, LEASE_MS, "REENTRANT", "second id"]).as_token();
        conn.cmd(&args!["FLOCK.ACQUIRE", "shared", "another", LEASE_MS, "SHARED"]).as_token();
        let read = conn.cmd(&args!["FLOCK.ACQUIRE", "converted", odd, LEASE_MS, "SHARED"]).as_token();
        conn.cmd(&args!["FLOCK.ACQUIRE", "converted", odd, LEASE_MS, "CONVERT", read]).as_token();
        conn.cmd(&["SELECT", "1"]);
        hold(&mut conn, "in another database", "alice");
        write(&server, command);
        let before = contents(&server);
        server.kill9();
        server.start_again();
        assert_same(&contents(&server), &before, form);
        let mut conn = server.connect(Protocol::Resp2);
        let all = holder(&mut conn, "all", odd);
        assert_eq!(all.field("state").as_str(), "claimed", "{form}");
        assert_eq!(all.field("label").as_str(), "x", "{form}");
        assert_eq!(all.field("ids").as_array(), [Reply::bulk("1")], "{form}");
        assert_eq!(holder(&mut conn, "labelled", odd).field("label").as_str(), "nightly \0 run", "{form}");
        assert_eq!(holders(&mut conn, "shared"), [odd, "another"], "{form}");
    }
}

fn random_traffic_survives_every_form(builder: Builder) {
    // S11, C1. What a long history leaves behind: many holders of one lock, converted ones, ended values.
    for (form, builder, command) in forms(&builder) {
        let mut server = builder.start();
        let mut conn = server.connect(Protocol::Resp2);
        let mut traffic = Traffic::new(Random::new(), 8);
        for _ in 0..rounds(500, 20_000) {
            traffic.step(&mut conn);
        }
        drop(conn);
        wait_settled(&server);
        write(&server, command);
        let before = held(&server);
        server.kill9();
        server.start_again();
        assert_same(&held(&server), &before, form);
    }
}

fn acknowledged_requests_survive_a_kill(builder: Builder) {
    // C2. With `appendfsync always` an answer means: it is on the disk. The server is killed in the middle of the load; the last
    // request may have been done or not, every answered one must be there.
    for _ in 0..rounds(5, 20) {
        let mut server = builder.clone().appendonly().start();
        let mut load = Load::start(&server);
        load.wait_answers(500);
        server.kill9();
        server.start_again();
        load.assert_done(&mut server.connect(Protocol::Resp2));
    }
}

fn changes_count_towards_the_next_snapshot(builder: Builder) {
    // `save <seconds> <changes>` goes by the server's count of changes: also of those that nobody else receives, and of a lease
    // that ends by itself. A server that counts none never saves.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let changes = || server.info("persistence").number("rdb_changes_since_last_save");
    // Long enough for the server to find out that it has no replica and no file.
    let_pass(Duration::from_millis(300));
    let start = changes();
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 1_000]).as_token();
    // Where nobody listens it counts with the next tick of the server's cron.
    wait_until("the grant is counted", ANSWER_WITHIN, || changes() > start);
    let granted = changes();
    wait_until("the lease has ended", ANSWER_WITHIN, || conn.cmd(&["EXISTS", "k"]) == Reply::Int(0));
    wait_until("its end is counted", ANSWER_WITHIN, || changes() > granted);
}

fn lease_after_a_restart_is_exact(builder: Builder) {
    // On the same boot the old deadline holds: the time that the server was down counts, and nothing is added.
    for (form, builder, command) in forms(&builder) {
        let mut server = builder.start();
        let mut conn = server.connect(Protocol::Resp2);
        let asked = Instant::now();
        conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 20_000]).as_token();
        let granted = Instant::now();
        write(&server, command);
        server.kill9();
        server.start_again();
        let mut conn = server.connect(Protocol::Resp2);
        let longest = Duration::from_millis(20_001).saturating_sub(granted.elapsed()); // INFO rounds up
        let left = Duration::from_millis(left_ms(&mut conn, "k", "alice").unsigned_abs());
        let shortest = Duration::from_millis(20_000).saturating_sub(asked.elapsed());
        assert!((shortest..=longest).contains(&left), "{form}: {left:?} of {shortest:?}..={longest:?}");
    }
}

fn lease_that_ended_while_down_is_over(builder: Builder) {
    // The holder gave up its belief long ago: who waits after the start must not wait for a lease begun anew.
    for (form, builder, command) in forms(&builder) {
        let mut server = builder.start();
        let mut conn = server.connect(Protocol::Resp2);
        conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 400]).as_token();
        let granted = Instant::now();
        write(&server, command);
        server.kill9();
        let_pass(Duration::from_millis(400).saturating_sub(granted.elapsed()));
        server.start_again();
        // The first request: whether the server has looked at its deadlines since or not.
        let reply = server.connect(Protocol::Resp2).cmd(&args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS]);
        assert!(matches!(reply, Reply::Int(1..)), "{form}: {reply}");
    }
}

fn restarts_in_a_loop_extend_nothing(builder: Builder) {
    // A server that crashes at every start must not keep a dead holder's lock for ever.
    let mut server = builder.appendonly().start();
    let asked = Instant::now();
    let mut conn = server.connect(Protocol::Resp2);
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 1500]).as_token();
    let granted = Instant::now();
    for _ in 0..4 {
        server.kill9();
        let_pass(Duration::from_millis(100));
        server.start_again();
    }
    outlast(&server, "k", granted, 1500);
    assert!(asked.elapsed() >= Duration::from_millis(1500), "{:?}", asked.elapsed());
}

fn lease_loaded_without_its_boot_starts_when_loading_has_ended(builder: Builder) {
    // From another host or boot a deadline means nothing: the whole lease starts, late and never early, and it does start. The
    // file is given another boot by hand.
    let mut server = builder.appendonly().start();
    let mut conn = server.connect(Protocol::Resp2);
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 700]).as_token();
    server.kill9();
    let file = server.dir().join("appendonlydir/appendonly.aof.1.incr.aof");
    let text = String::from_utf8(fs::read(&file).expect("the file is there")).expect("the file is text");
    let at = text.find('@').expect("a grant has its deadline and boot");
    let other = if text[at + 1..].starts_with("0123") { "9876543210abcdef" } else { "0123456789abcdef" };
    let changed = format!("{}@{other}{}", &text[..at], &text[at + 17..]);
    fs::write(&file, changed).expect("the file can be written");
    let_pass(Duration::from_millis(300));
    let start = Instant::now();
    server.start_again();
    outlast(&server, "k", Instant::now(), 700);
    assert!(start.elapsed() >= Duration::from_millis(700), "{:?}", start.elapsed());
}

fn waiters_are_not_persisted(builder: Builder) {
    // A waiter is a connection: after a restart there is none, and one that was stored would be granted a lock nobody uses.
    for (form, builder, command) in forms(&builder) {
        let mut server = builder.start();
        let mut conn = server.connect(Protocol::Resp2);
        hold(&mut conn, "k", "alice");
        let _blocked = waiter(&server, Protocol::Resp2, "k", "bob");
        let queue = args!["FLOCK.ACQUIRE", "k", "carol", LEASE_MS, "QUEUE", LEASE_MS, "CHANNEL", "news"];
        assert_eq!(conn.cmd(&queue).as_array()[0], Reply::bulk("QUEUED"));
        write(&server, command);
        server.kill9();
        server.start_again();
        let mut conn = server.connect(Protocol::Resp2);
        assert_eq!(server.info("flock").number("flock_waiters"), 0, "{form}");
        release(&mut conn, "k", "alice");
        assert_eq!(conn.cmd(&["EXISTS", "k"]), Reply::Int(0), "{form}");
    }
}

fn waiter_survives_a_reload(builder: Builder) {
    // DEBUG RELOAD drops and loads all data while connections stay: who waits must hear something at last, a grant or an error.
    let server = builder.appendonly().start();
    let mut conn = server.connect(Protocol::Resp2);
    for reload in ["RELOAD", "LOADAOF"] {
        hold(&mut conn, "k", "alice");
        let mut queued = waiter(&server, Protocol::Resp2, "k", "bob");
        assert_eq!(conn.cmd(&args!["DEBUG", reload]), Reply::ok());
        release(&mut conn, "k", "alice");
        let reply = queued.recv();
        let heard = matches!(reply, Reply::Int(1..)) || reply.error_code() == Some("FLUSHED");
        assert!(heard, "{reload}: {reply}");
        conn.cmd(&args!["FLOCK.RELEASE", "k", "bob"]);
    }
}

fn session_hold_ends_after_a_restart_unless_renewed(builder: Builder) {
    // The connection of before is gone with the server.
    let mut server = builder.appendonly().start();
    let mut conn = server.connect(Protocol::Resp2);
    for key in ["silent", "renewed"] {
        conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS, "SESSION", 700]).as_token();
    }
    server.kill9();
    server.start_again();
    let mut conn = server.connect(Protocol::Resp2);
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", "renewed", "alice", LEASE_MS]), Reply::Int(1));
    wait_until("the silent one has ended", ANSWER_WITHIN, || conn.cmd(&["EXISTS", "silent"]) == Reply::Int(0));
    assert!(left_ms(&mut conn, "renewed", "alice") > 10_000);
}

#[track_caller]
fn dump(conn: &mut Conn, key: &str) -> Vec<u8> {
    conn.cmd(&args!["DUMP", key]).as_bytes().to_vec()
}

#[track_caller]
fn restore(conn: &mut Conn, key: &str, value: &[u8]) -> Reply {
    conn.cmd(&args!["RESTORE", key, 0, value])
}

/// The last ten bytes of a dumped value: the version of the format, and the checksum of all before it.
const CHECKSUM_BYTES: usize = 8;
pub(crate) const FOOTER_BYTES: usize = CHECKSUM_BYTES + 2;

/// A dumped value with another body, under a correct checksum: anybody can compute it.
pub(crate) fn sign(body: &[u8], original: &[u8]) -> Vec<u8> {
    let version = &original[original.len() - FOOTER_BYTES..original.len() - CHECKSUM_BYTES];
    let mut value = [body, version].concat();
    value.extend_from_slice(&crc64(&value).to_le_bytes());
    value
}

pub(crate) fn body(value: &[u8]) -> &[u8] {
    &value[..value.len() - FOOTER_BYTES]
}

/// A dumped value whose body is cut short. By more than the footer: the server reads on in that, and a checksum can happen to be what is
/// missing.
pub(crate) fn without_last(bytes: usize, value: &[u8]) -> Vec<u8> {
    assert!(bytes > FOOTER_BYTES);
    sign(&body(value)[..body(value).len() - bytes], value)
}

/// The server's checksum: CRC-64 of Jones, bit by bit, lowest first.
fn crc64(bytes: &[u8]) -> u64 {
    const POLYNOMIAL: u64 = 0x95ac_9329_ac4b_c9b5;
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ u64::from(*byte), |crc, _| if crc & 1 == 1 { (crc >> 1) ^ POLYNOMIAL } else { crc >> 1 })
    })
}

fn restored_value_is_held_with_its_lease(builder: Builder) {
    // What was dumped and restored at once is the same hold: owner, token, what is left of the lease.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let token = hold(&mut conn, "k", "alice");
    let value = dump(&mut conn, "k");
    assert_eq!(sign(body(&value), &value), value, "the checksum is the server's");
    conn.cmd(&["DEL", "k"]);
    assert_eq!(restore(&mut conn, "k", &value), Reply::ok());
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(1));
    assert!((1..=60_000).contains(&left_ms(&mut conn, "k", "alice")));
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS]), Reply::Nil);
}

fn restored_value_over_a_held_lock_replaces_it(builder: Builder) {
    // RESTORE REPLACE is a person's decision: the hold of now ends, that of the value is there.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let old = hold(&mut conn, "k", "alice");
    let value = dump(&mut conn, "k");
    release(&mut conn, "k", "alice");
    let token = hold(&mut conn, "k", "bob");
    assert_eq!(conn.cmd(&args!["RESTORE", "k", 0, value, "REPLACE"]), Reply::ok());
    assert_eq!(holders(&mut conn, "k"), ["alice"]);
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(0));
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "k", old]), Reply::Int(1));
    assert_eq!(server.info("flock").number("flock_held"), 1);
}

#[track_caller]
fn assert_restore_refused(conn: &mut Conn, value: &[u8], what: &str) {
    let reply = restore(conn, "restored", value);
    assert_eq!(reply.error_code(), Some("ERR"), "{what}: {reply}");
    assert_eq!(conn.cmd(&["EXISTS", "restored"]), Reply::Int(0), "{what}");
}

fn truncated_value_is_refused(builder: Builder) {
    // B4. A value cut short anywhere, correctly signed, must not end the server, and not become a lock.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS, "SHARED", "LABEL", "x", "REENTRANT", "1", "CLAIM", 5000])
        .as_token();
    let value = dump(&mut conn, "k");
    for bytes in FOOTER_BYTES + 1..body(&value).len() {
        assert_restore_refused(&mut conn, &without_last(bytes, &value), &format!("{bytes} bytes less"));
    }
    assert_eq!(server.info("flock").number("flock_held"), 1);
}

fn damaged_value_is_refused_or_sound(builder: Builder) {
    // B4. With one byte changed a value may still be one; then it must be a lock like any other: INFO and REVOKE work, nothing is
    // left, and the server still grants.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let options = ["SHARED", "LABEL", "x", "REENTRANT", "1", "CLAIM", "5000"];
    let mut request = args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS].to_vec();
    request.extend(options.map(|option| option.as_bytes().to_vec()));
    conn.cmd(&request).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS, "SHARED"]).as_token();
    let value = dump(&mut conn, "k");
    let mut random = Random::new();
    for _ in 0..rounds(2000, 100_000) {
        let mut changed = body(&value).to_vec();
        let at = random.below(changed.len() as u64);
        changed[usize::try_from(at).expect("an index fits")] = u8::try_from(random.below(256)).expect("a byte");
        if restore(&mut conn, "restored", &sign(&changed, &value)) != Reply::ok() {
            continue;
        }
        assert_eq!(conn.cmd(&["FLOCK.INFO", "restored"]).error_code(), None);
        assert_eq!(conn.cmd(&["FLOCK.REVOKE", "restored"]).error_code(), None);
        conn.cmd(&["DEL", "restored"]);
    }
    hold(&mut conn, "next", "alice");
    assert_eq!(server.info("flock").number("flock_held"), 2);
}

/// The version of a module's type is in the lowest ten bits of the type's id: eight bytes after the kind and a length byte.
const TYPE_VERSION_AT: usize = 9;

fn value_of_a_newer_type_version_is_refused(builder: Builder) {
    // A later module writes what this one cannot read: it must say so, and not guess.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    hold(&mut conn, "k", "alice");
    let value = dump(&mut conn, "k");
    let mut newer = body(&value).to_vec();
    assert_eq!(newer[TYPE_VERSION_AT], 1, "{newer:?}");
    newer[TYPE_VERSION_AT] = 2;
    assert_restore_refused(&mut conn, &sign(&newer, &value), "version 2");
    assert!(server.log().contains("version 2 is newer than this module's 1"), "{}", server.log());
}

fn value_of_a_newer_encoding_is_refused(builder: Builder) {
    // The value has a version of its own, its first byte.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    hold(&mut conn, "k", "alice");
    let value = dump(&mut conn, "k");
    // The kind, the id in nine bytes, the kind of what follows, its length, and then the value.
    let mut newer = body(&value).to_vec();
    assert_eq!(newer[12], 1, "{newer:?}");
    newer[12] = 2;
    assert_restore_refused(&mut conn, &sign(&newer, &value), "encoding 2");
    assert!(server.log().contains("an unknown version"), "{}", server.log());
}

fn value_with_a_token_far_ahead_is_refused(builder: Builder) {
    // H8. A value from a server whose clock is days ahead would take this one's counter along, for good.
    let other = builder.clone().wall_clock(3 * 24 * 3600).start();
    let mut conn = other.connect(Protocol::Resp2);
    hold(&mut conn, "k", "alice");
    let value = dump(&mut conn, "k");
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let before = hold(&mut conn, "k", "alice");
    assert_restore_refused(&mut conn, &value, "3 days ahead");
    assert!(server.log().contains("more than a day ahead"), "{}", server.log());
    assert_eq!(hold(&mut conn, "next", "alice"), before + 1);
}

fn snapshot_of_a_newer_version_is_refused_with_its_reason(builder: Builder) {
    // C10. A downgrade: the server must not start with half of the locks, and the log must say what is wrong.
    let mut server = builder.clone().config("rdbchecksum", "no").start();
    let mut conn = server.connect(Protocol::Resp2);
    hold(&mut conn, "k", "alice");
    let value = dump(&mut conn, "k");
    assert_eq!(conn.cmd(&["SAVE"]), Reply::ok());
    server.kill9();
    let file = server.dir().join("dump.rdb");
    let mut bytes = fs::read(&file).expect("the snapshot is there");
    // The type's id, in every place: of the value and of the counter.
    let id = &value[2..10];
    let places: Vec<_> = (0..bytes.len() - id.len()).filter(|at| &bytes[*at..at + id.len()] == id).collect();
    assert_eq!(places.len(), 2, "the counter and one lock");
    for at in places {
        bytes[at + id.len() - 1] = 2;
    }
    fs::write(&file, bytes).expect("the snapshot can be written");
    let failure = builder.copy_data_from(&server).try_start().expect_err("a newer snapshot is refused");
    // The server ends as after any file that it cannot read: how, is its own affair.
    assert!(failure.status.is_some_and(|status| status.code().is_some()), "{}", failure.log);
    assert!(failure.log.contains("newer"), "{}", failure.log);
}

fn truncated_snapshot_is_refused(builder: Builder) {
    // A disk that was full: the server must end by itself, wherever the cut is.
    let mut server = builder.clone().start();
    let mut conn = server.connect(Protocol::Resp2);
    hold(&mut conn, "k", "alice");
    assert_eq!(conn.cmd(&["SAVE"]), Reply::ok());
    server.kill9();
    let file = server.dir().join("dump.rdb");
    let bytes = fs::read(&file).expect("the snapshot is there");
    for cut in [1, 9, 20, 40, 60] {
        fs::write(&file, &bytes[..bytes.len() - cut]).expect("the snapshot can be written");
        let failure = builder.clone().copy_data_from(&server).try_start().expect_err("a cut snapshot is refused");
        assert_eq!(failure.status.and_then(|status| status.code()), Some(1), "{cut}: {}", failure.log);
    }
}

fn unknown_change_in_the_append_only_file_is_logged(builder: Builder) {
    // A later module's change, or a damaged file: a lock that silently is not there after a start would be the worst outcome.
    let mut server = builder.appendonly().start();
    hold(&mut server.connect(Protocol::Resp2), "k", "alice");
    server.kill9();
    let file = server.dir().join("appendonlydir/appendonly.aof.1.incr.aof");
    let mut bytes = fs::read(&file).expect("the file is there");
    bytes.extend(flock_tests::args::encode(&args!["FLOCK._APPLY", "GRANT-9 X 1 2 - bob", "other"]));
    fs::write(&file, bytes).expect("the file can be written");
    server.start_again();
    assert!(server.log().contains("an unknown change: perhaps a later version wrote it"), "{}", server.log());
    assert_eq!(holders(&mut server.connect(Protocol::Resp2), "k"), ["alice"]);
}

fn data_are_refused_without_the_module_and_load_with_it(builder: Builder) {
    // C10. Somebody forgets the `loadmodule` line: the server must not start with half of the data, must name what is missing, and must
    // leave the files as they are for the next start.
    for (form, builder, command) in forms(&builder) {
        let mut server = with_holds(builder);
        write(&server, command);
        let before = contents(&server);
        server.kill9();
        let files = files_of(&server);
        let config = server.dir().join("valkey.conf");
        let with_module = fs::read_to_string(&config).expect("the configuration can be read");
        let without_module: Vec<_> = with_module.lines().filter(|line| !line.starts_with("loadmodule")).collect();
        fs::write(&config, without_module.join("\n")).expect("the configuration can be written");
        let failure = server.try_start_again().expect_err("data of a module are refused without it");
        assert_eq!(failure.status.and_then(|status| status.code()), Some(1), "{form}: {}", failure.log);
        assert!(failure.log.to_lowercase().contains("flock"), "{form}: {}", failure.log);
        assert_eq!(files_of(&server), files, "{form}");
        fs::write(&config, with_module).expect("the configuration can be written");
        server.start_again();
        assert_same(&contents(&server), &before, form);
    }
}

/// The names and the bytes of the data files.
#[track_caller]
fn files_of(server: &Server) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut paths = vec![server.dir().join("dump.rdb")];
    let append_only = fs::read_dir(server.dir().join("appendonlydir"));
    paths.extend(append_only.into_iter().flatten().flatten().map(|entry| entry.path()));
    paths.into_iter().filter_map(|path| fs::read(&path).ok().map(|bytes| (path, bytes))).collect()
}

fn thousand_locks_survive_reloads(builder: Builder) {
    // C1, S11. Mixed holds in numbers: the same digests and no lease shorter than before, also after a background save and a restart.
    let mut server = builder.appendonly().start();
    let mut conn = server.connect(Protocol::Resp2);
    for number in 0..if long_tier() { 20_000 } else { 1000 } {
        let options: &[&str] = match number % 5 {
            0 => &[],
            1 => &["SHARED", "LIMIT", "4"],
            2 => &["REENTRANT", "1", "LABEL", "nightly run"],
            3 => &["CHANNEL", "news", "CLAIM", "3000000"],
            _ => &["SESSION", "80000000"],
        };
        let options: Vec<_> = options.iter().map(|option| option.as_bytes().to_vec()).collect();
        let owners = if number % 5 == 1 { 3 } else { 1 };
        for owner in 0..owners {
            conn.send(&[&args!["FLOCK.ACQUIRE", format!("k{number}"), owner, 3_600_000][..], &options].concat());
        }
        for _ in 0..owners {
            conn.recv().as_token();
        }
    }
    let before = contents(&server);
    let asked = Instant::now();
    let left = left_ms(&mut conn, "k0", "0");
    for reload in [["DEBUG", "RELOAD"], ["DEBUG", "LOADAOF"]] {
        assert_eq!(conn.cmd(&reload), Reply::ok());
        assert_same(&contents(&server), &before, reload[1]);
    }
    write(&server, REWRITE);
    server.kill9();
    server.start_again();
    assert_same(&contents(&server), &before, "restart");
    let mut conn = server.connect(Protocol::Resp2);
    let passed = i64::try_from(asked.elapsed().as_millis()).expect("a test is short");
    let later = left_ms(&mut conn, "k0", "0");
    assert!((left - passed - 1..=left).contains(&later), "{left} ms left, and {later} after {passed}");
}

fn append_only_file_that_is_cut_loads_what_is_whole(builder: Builder) {
    // C7. Killed in the middle of a write: the last change may be cut anywhere. All before it counts, and tokens rise above its own too,
    // far ahead of the clock as they are: they were announced before.
    let builder = builder.config("appendonly", "yes").config("appendfsync", "no");
    let mut server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let mut take = |key, floor| conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 3_600_000, "FLOOR", floor]).as_token();
    let ahead = take("k", 1) + 4_000_000_000;
    take("ahead", ahead);
    let last = take("last", 1);
    server.kill9();
    let path = "appendonlydir/appendonly.aof.1.incr.aof";
    let whole = fs::read(server.dir().join(path)).expect("the file is there");
    let tail = whole.windows(4).rposition(|bytes| bytes == b"last").expect("the last grant is in the file");
    let last_change = whole[..tail].windows(2).rposition(|bytes| bytes == b"*3").expect("a change begins");
    let mut random = Random::new();
    let mut cuts: Vec<_> =
        (0..rounds(6, 200)).map(|_| last_change + index_below(&mut random, whole.len() - last_change)).collect();
    cuts.extend([last_change, whole.len()]);
    for cut in cuts {
        fs::write(server.dir().join(path), &whole[..cut]).expect("the file can be written");
        server.start_again();
        let mut conn = server.connect(Protocol::Resp2);
        assert_eq!(holders(&mut conn, "k"), ["alice"], "cut at {cut}");
        let is_whole = cut == whole.len();
        assert_eq!(conn.cmd(&["EXISTS", "last"]), Reply::Int(is_whole.into()), "cut at {cut} of {}", whole.len());
        let token = hold(&mut conn, "next", "alice");
        assert!(token > last, "cut at {cut}: {token} after {last}");
        server.kill9();
    }
}

fn index_below(random: &mut Random, bound: usize) -> usize {
    usize::try_from(random.below(bound as u64)).expect("an index fits")
}

/// The newest server's binary under another name is the checker, of the files of all servers.
#[track_caller]
fn check(server: &Server, tool: &str, file: &str) {
    let binary = std::env::var("VALKEY_SERVER").expect("VALKEY_SERVER names the server");
    let output = Command::new(binary).arg0(tool).arg(server.dir().join(file)).output().expect("the checker runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
}

/// Holds of every kind, on a server whose files are then looked at.
#[track_caller]
fn with_holds(builder: Builder) -> Server {
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    hold(&mut conn, "plain", "alice");
    conn.cmd(&args!["FLOCK.ACQUIRE", "all", "bob", LEASE_MS, "SHARED", "REENTRANT", "1", "LABEL", "x"]).as_token();
    server
}

fn snapshot_passes_the_servers_checker(builder: Builder) {
    // Operators check a file before they trust it: it must be readable without the module.
    let server = with_holds(builder);
    assert_eq!(server.connect(Protocol::Resp2).cmd(&["SAVE"]), Reply::ok());
    check(&server, "valkey-check-rdb", "dump.rdb");
}

fn append_only_file_passes_the_servers_checker(builder: Builder) {
    // The same for the append-only file. (One without a snapshot at its head: the checker of this version takes the snapshot of any
    // server, with or without modules, for a damaged file.)
    let server = with_holds(builder.appendonly().config("aof-use-rdb-preamble", "no"));
    write(&server, REWRITE);
    hold(&mut server.connect(Protocol::Resp2), "after", "alice");
    check(&server, "valkey-check-aof", "appendonlydir/appendonly.aof.manifest");
}

/// Files that version 0.1.0 wrote on Valkey 8.0.1, the oldest server, on another machine. They are never written anew: whatever a later
/// version writes, it must read these. (How they came about: `tests/fixtures/README.md`.)
fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

/// Everything that the fixtures have in them. On this boot their leases begin when they are loaded.
#[track_caller]
fn assert_fixture_is_loaded(server: &Server) {
    let mut conn = server.connect(Protocol::Resp3);
    let mut tokens = Vec::new();
    for (key, owners) in [
        ("plain", &["alice"][..]),
        ("every option", &["alice"]),
        ("readers", &["alice", "bob", "carol"]),
        ("converted", &["alice"]),
        ("bytes \r\n.", &["o\tw\r\ner"]),
    ] {
        let info = conn.cmd(&args!["FLOCK.INFO", key]);
        let entries = info.field("holders").as_array().to_vec();
        let held_by: Vec<_> = entries.iter().map(|entry| entry.field("owner").as_str()).collect();
        assert_eq!(held_by, owners, "{key}");
        for entry in &entries {
            let left = entry.field("left_ms").as_int();
            assert!((80_000_000..=86_400_000).contains(&left), "{key}: {entry}");
            let token = entry.field("token").as_token();
            assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(1), "{key}");
            tokens.push(token);
        }
    }
    let all = holder(&mut conn, "every option", "alice");
    assert_eq!(all.field("label").as_str(), "nightly run");
    assert_eq!(all.field("ids").as_array(), ["1", "2"].map(Reply::bulk));
    assert_eq!(conn.cmd(&["FLOCK.INFO", "every option"]).field("mode").as_str(), "shared");
    conn.cmd(&["SELECT", "3"]);
    assert_eq!(holders(&mut conn, "elsewhere"), ["alice"]);
    let next = hold(&mut conn, "next", "alice");
    assert!(tokens.iter().all(|token| *token < next), "{next} after {tokens:?}");
    release(&mut conn, "elsewhere", "alice");
}

fn snapshot_of_the_first_version_loads(builder: Builder) {
    // C10, S11. An upgrade must not lose what is held.
    let mut server = builder.start();
    server.kill9();
    fs::copy(fixture("0.1.0.rdb"), server.dir().join("dump.rdb")).expect("the fixture can be copied");
    server.start_again();
    assert_fixture_is_loaded(&server);
}

fn append_only_file_of_the_first_version_loads(builder: Builder) {
    // C10. The same of the commands in which changes are written; here no snapshot comes first.
    let mut server = builder.appendonly().config("aof-use-rdb-preamble", "no").start();
    server.kill9();
    let folder = server.dir().join("appendonlydir");
    fs::remove_dir_all(&folder).and_then(|()| fs::create_dir(&folder)).expect("the folder can be emptied");
    fs::copy(fixture("0.1.0.aof"), folder.join("appendonly.aof.1.incr.aof")).expect("the fixture can be copied");
    let manifest = "file appendonly.aof.1.incr.aof seq 1 type i\n";
    fs::write(folder.join("appendonly.aof.manifest"), manifest).expect("a manifest can be written");
    server.start_again();
    assert_fixture_is_loaded(&server);
}

fn snapshot_without_a_lock_loads_without_the_module(builder: Builder) {
    // Whoever only tried the module, and never took a lock, can do without it again: its counter is not in the file then.
    let mut server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    conn.cmd(&["SET", "other", "x"]);
    assert_eq!(conn.cmd(&["FLOCK.INFO", "k"]), Reply::Nil);
    assert_eq!(conn.cmd(&["SAVE"]), Reply::ok());
    server.kill9();
    let plain = builder.without_module().copy_data_from(&server).start();
    assert_eq!(plain.connect(Protocol::Resp2).cmd(&["GET", "other"]), Reply::bulk("x"));
}

fn time_to_live_that_is_over_at_a_start_frees_the_lock(builder: Builder) {
    // While it runs the server puts such a lock back. What it does not load it cannot put back: nobody must believe otherwise.
    let mut server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let token = hold(&mut conn, "k", "alice");
    assert_eq!(conn.cmd(&args!["PEXPIRE", "k", 300]), Reply::Int(1));
    assert_eq!(conn.cmd(&["SAVE"]), Reply::ok());
    let_pass(Duration::from_millis(400));
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(1));
    server.kill9();
    server.start_again();
    let mut conn = server.connect(Protocol::Resp2);
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(0));
    assert!(hold(&mut conn, "k", "bob") > token);
}

fn requests_in_an_append_only_file_grant_and_block_nothing(builder: Builder) {
    // The file's client is nobody who can wait: to block it ends the server, or the load never ends. A request is no effect, so it is
    // refused; what follows it is loaded.
    let mut server = builder.appendonly().config("aof-use-rdb-preamble", "no").start();
    let mut conn = server.connect(Protocol::Resp2);
    let token = hold(&mut conn, "k", "alice");
    server.kill9();
    let file = server.dir().join("appendonlydir/appendonly.aof.1.incr.aof");
    let mut bytes = fs::read(&file).expect("the file can be read");
    bytes.extend(encode(&args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS, "BLOCK", 0]));
    bytes.extend(encode(&args!["FLOCK.ACQUIRE", "free", "bob", LEASE_MS]));
    bytes.extend(encode(&args!["SET", "afterwards", "x"]));
    fs::write(&file, bytes).expect("the file can be written");
    server.start_again();
    let mut conn = server.connect(Protocol::Resp2);
    assert_eq!(conn.cmd(&["EXISTS", "afterwards"]), Reply::Int(1));
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(1));
    assert_eq!(conn.cmd(&["FLOCK.INFO", "free"]), Reply::Nil);
    assert_eq!(server.info("flock").number("flock_blocked_clients"), 0);
}
