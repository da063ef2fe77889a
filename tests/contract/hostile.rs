//! Values and files that somebody has tampered with: refused, or loaded as what they say; never the end of the server, never the end of
//! its tokens. (Single damaged bytes, cut values, newer versions: `persistence.rs`.)

use std::fs;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::{SystemTime, UNIX_EPOCH};

use flock_tests::args;
use flock_tests::cpu::used_memory;
use flock_tests::on_own_servers;
use flock_tests::random::Random;
use flock_tests::reply::Reply;
use flock_tests::resp::{Conn, Protocol};
use flock_tests::server::{Builder, Info, Server};

use crate::persistence::{body, sign};
use crate::scene::{LEASE_MS, hold, rounds};

on_own_servers![
    forged_value_is_refused_or_sound,
    forged_value_does_not_use_up_the_tokens,
    forged_snapshot_is_refused_or_loads,
    forged_append_only_file_is_refused_or_loads,
];

/// How far ahead of the counter and the clock a value may reach: a day, in token units of 10 us.
const DAY: u64 = 24 * 3600 * 100_000;
/// 2025-01-01T00:00Z, from where tokens count.
const EPOCH_S: u64 = 1_735_689_600;

fn wall_clock() -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).expect("it is after 1970");
    u64::try_from(since_1970.as_micros() / 10).expect("the clock fits") - EPOCH_S * 100_000
}

/// Locks of every kind, and the value of an ended one; answers their keys and the last token.
#[track_caller]
fn locks_of_every_kind(conn: &mut Conn) -> (Vec<&'static str>, u64) {
    for (key, options) in [
        ("plain", &[][..]),
        ("labelled", &["LABEL", "nightly run"]),
        ("reentrant", &["REENTRANT", "1"]),
        ("claimed", &["CLAIM", "50000"]),
        ("session", &["SESSION", "80000000"]),
        ("channel", &["CHANNEL", "news"]),
        ("shared", &["SHARED", "LIMIT", "3"]),
        ("all", &["SHARED", "LABEL", "x", "REENTRANT", "1", "CLAIM", "50000", "SESSION", "80000000", "CHANNEL", "c"]),
    ] {
        let mut request = args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS].to_vec();
        request.extend(options.iter().map(|option| option.as_bytes().to_vec()));
        conn.cmd(&request).as_token();
    }
    conn.cmd(&args!["FLOCK.ACQUIRE", "reentrant", "alice", LEASE_MS, "REENTRANT", "2"]).as_token();
    for owner in ["bob", "carol"] {
        conn.cmd(&args!["FLOCK.ACQUIRE", "shared", owner, LEASE_MS, "SHARED", "LIMIT", 3]).as_token();
    }
    let read = conn.cmd(&args!["FLOCK.ACQUIRE", "converted", "alice", LEASE_MS, "SHARED"]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", "converted", "alice", LEASE_MS, "CONVERT", read]).as_token();
    hold(conn, "renamed", "alice");
    assert_eq!(conn.cmd(&["RENAME", "renamed", "nobody's"]), Reply::ok());
    let last = hold(conn, "last", "alice");
    let keys = vec![
        "plain",
        "labelled",
        "reentrant",
        "claimed",
        "session",
        "channel",
        "shared",
        "all",
        "converted",
        "nobody's",
        "last",
    ];
    (keys, last)
}

/// The kind of a module's value, its type's id in nine bytes, the kind of what follows (a string); then the string's length.
const FRAME_BYTES: usize = 11;

/// What the module itself has stored in a dumped value.
fn stored(value: &[u8]) -> Vec<u8> {
    let framed = &body(value)[FRAME_BYTES..];
    let length_bytes = if framed[0] & 0xc0 == 0 { 1 } else { 2 };
    framed[length_bytes..framed.len() - 1].to_vec()
}

/// A dumped value that holds `stored` instead.
fn framed(stored: &[u8], original: &[u8]) -> Vec<u8> {
    let mut bytes = body(original)[..FRAME_BYTES].to_vec();
    let length = u16::try_from(stored.len()).expect("a value of a test is short");
    match length.to_be_bytes() {
        [0, low @ 0..64] => bytes.push(low),
        [high, low] => bytes.extend([high | 0x40, low]),
    }
    bytes.extend_from_slice(stored);
    bytes.push(0); // the end of a module's value
    sign(&bytes, original)
}

fn place(random: &mut Random, bytes: &[u8]) -> usize {
    usize::try_from(random.below(bytes.len().max(1) as u64)).expect("an index fits")
}

/// Changes `bytes` in one to four places: bits, bytes, numbers; something missing, something too much, something of another value.
fn mutate(random: &mut Random, bytes: &mut Vec<u8>, other: &[u8]) {
    for _ in 0..1 + random.below(4) {
        if bytes.is_empty() {
            return;
        }
        let at = place(random, bytes);
        match random.below(8) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = u8::try_from(random.below(256)).expect("a byte"),
            2 => bytes[at] = random.pick(&[0, 1, 0x7f, 0x80, 0xff]),
            3 => drop(bytes.remove(at)),
            4 => bytes.insert(at, u8::try_from(random.below(256)).expect("a byte")),
            // A number of nine bytes, as big as it gets.
            5 => drop(bytes.splice(at..at, [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f])),
            6 => {
                let end = at + place(random, &bytes[at..]);
                let twice = bytes[at..end].to_vec();
                bytes.splice(at..at, twice);
            }
            _ => {
                let from = place(random, other);
                bytes.truncate(at);
                bytes.extend_from_slice(&other[from..]);
            }
        }
    }
}

/// A lock that came from such a value must be one like any other.
#[track_caller]
fn assert_sound(conn: &mut Conn, key: &str, token_max: u64, what: &str) {
    let info = conn.cmd(&args!["FLOCK.INFO", key]);
    if !info.is_nil() {
        let holders = info.field("holders").as_array();
        assert!(!holders.is_empty(), "{what}: {info}");
        assert!(holders.len() == 1 || info.field("mode").as_str() == "shared", "{what}: {info}");
        let mut last = 0;
        for holder in holders {
            let token = holder.field("token").as_token();
            assert!(token > last && token <= token_max, "{what}: {info}");
            last = token;
            let owner = holder.field("owner");
            assert!(holders.iter().filter(|other| other.field("owner") == owner).count() == 1, "{what}: {info}");
            assert!(holder.field("left_ms").as_int() >= 0, "{what}: {info}");
            let is_over = holder.field("state").as_str() == "expired";
            let check = conn.cmd(&args!["FLOCK.CHECK", key, token]);
            assert!(is_over || matches!(check, Reply::Int(0 | 1)), "{what}: {check}");
        }
    }
    // It can be stored again, and is then the same.
    let again = conn.cmd(&args!["DUMP", key]);
    if !again.is_nil() {
        let digest = |conn: &mut Conn, key: &str| conn.cmd(&args!["DEBUG", "DIGEST-VALUE", key]);
        let before = digest(conn, key);
        let reply = conn.cmd(&args!["RESTORE", "again", 0, again.as_bytes(), "REPLACE"]);
        assert_eq!(reply, Reply::ok(), "{what}");
        let copy = digest(conn, "again");
        // Meanwhile a hold may have come to its end: of both, as it is the same.
        if digest(conn, key) == before {
            assert_eq!(copy, before, "{what}");
        }
        conn.cmd(&["DEL", "again"]);
    }
}

#[track_caller]
fn counter(conn: &mut Conn) -> u64 {
    let counter = Info::ask(conn, "flock").number("flock_counter");
    u64::try_from(counter).expect("the counter is not negative")
}

fn forged_value_is_refused_or_sound(builder: Builder) {
    // B4. Anybody who may RESTORE can make such values, and sign them: the checksum is no secret.
    let server = builder.config("rdbcompression", "no").start();
    let mut conn = server.connect(Protocol::Resp2);
    let mut random = Random::new();
    let (keys, _) = locks_of_every_kind(&mut conn);
    let values: Vec<_> = keys.iter().map(|key| conn.cmd(&args!["DUMP", key]).as_bytes().to_vec()).collect();
    for value in &values {
        assert_eq!(framed(&stored(value), value), *value, "a value is understood by this test");
    }
    let memory = used_memory(&mut conn);
    let rounds = rounds(3000, 100_000);
    let mut accepted = 0;
    for round in 0..rounds {
        let value = &values[place(&mut random, &vec![0; values.len()])];
        let other = stored(&values[place(&mut random, &vec![0; values.len()])]);
        let forged = if random.one_in(4) {
            // The frame too; but a module's value it stays: what the server makes of others is its own affair.
            let (kind, rest) = body(value).split_at(1);
            let mut rest = rest.to_vec();
            mutate(&mut random, &mut rest, &other);
            sign(&[kind, &rest].concat(), value)
        } else {
            let mut bytes = stored(value);
            mutate(&mut random, &mut bytes, &other);
            framed(&bytes, value)
        };
        let what = format!("round {round}, value {}", forged.escape_ascii());
        let token_max = counter(&mut conn).max(wall_clock()) + DAY;
        let key = format!("forged {}", round % 7);
        let reply = conn.cmd(&args!["RESTORE", key, 0, forged, "REPLACE"]);
        if reply == Reply::ok() {
            accepted += 1;
            assert!(counter(&mut conn) <= token_max + 1, "{what}");
            assert_sound(&mut conn, &key, token_max + DAY / 1000, &what);
        } else {
            assert_eq!(reply.error_code(), Some("ERR"), "{what}: {reply}");
        }
        if round % 500 == 499 {
            let now = used_memory(&mut conn);
            assert!(now < memory + (8 << 20), "{now} bytes after {memory}: {what}");
        }
    }
    println!("{accepted} of {rounds} were accepted");
    for number in 0..7 {
        conn.cmd(&args!["DEL", format!("forged {number}")]);
    }
    let before = counter(&mut conn);
    assert!(hold(&mut conn, "elsewhere", "alice") > before);
    assert!(used_memory(&mut conn) < memory + (4 << 20), "something of the values stays");
    assert_eq!(server.info("flock").number("flock_panics_caught"), 0);
    server.assert_alive();
}

/// The numbers of the stored form: seven bits a byte, lowest first.
fn number(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(u8::try_from(value & 0x7f).expect("seven bits") | 0x80);
        value >>= 7;
    }
    bytes.push(u8::try_from(value).expect("seven bits"));
    bytes
}

fn forged_value_does_not_use_up_the_tokens(builder: Builder) {
    // H8, B4. A value may reach a day ahead. If each may reach a day further than the last, a loop of them reaches the end of all
    // tokens, and long before that the end of what Lua can print: nobody could ever lock anything again.
    let server = builder.config("rdbcompression", "no").start();
    let mut conn = server.connect(Protocol::Resp2);
    hold(&mut conn, "k", "alice");
    let value = conn.cmd(&["DUMP", "k"]).as_bytes().to_vec();
    let stored = stored(&value);
    // The version, the mark, the boot in eight bytes, the count of holds, the flags; then the token, and the rest of the hold.
    let mark_bytes = stored[1..].iter().take_while(|byte| **byte >= 0x80).count() + 1;
    let token_at = 1 + mark_bytes + 8 + 2;
    let token_bytes = stored[token_at..].iter().take_while(|byte| **byte >= 0x80).count() + 1;
    for _ in 0..100 {
        let token = number(counter(&mut conn).max(wall_clock()) + DAY - 1000);
        let forged = [&stored[..token_at], &token, &stored[token_at + token_bytes..]].concat();
        conn.cmd(&args!["RESTORE", "forged", 0, framed(&forged, &value), "REPLACE"]);
    }
    let ahead = counter(&mut conn).saturating_sub(wall_clock());
    assert!(ahead <= 2 * DAY, "the counter is {} days ahead of the clock", ahead / DAY);
}

/// A server on a copy of the data of `of`, whose file at `path` is forged; its end, if it refuses them.
#[track_caller]
fn start_on_forged(builder: &Builder, of: &Server, path: &str, forged: &[u8], last: u64, what: &str) {
    let file: PathBuf = of.dir().join(path);
    fs::write(&file, forged).expect("the file can be written");
    // The guard would take a crash report of the server for a failure; here the log is judged below.
    match builder.clone().allow_panics().copy_data_from(of).try_start() {
        Ok(server) => {
            assert!(is_orderly(&server.log()), "{what}: {}", server.log());
            let mut conn = server.connect(Protocol::Resp2);
            let token = hold(&mut conn, "elsewhere", "nobody else");
            assert!(token > last, "{what}: {token} after {last}");
            for key in conn.cmd(&["KEYS", "*"]).as_array() {
                conn.cmd(&args!["FLOCK.INFO", key.as_bytes()]);
            }
            assert_eq!(server.info("flock").number("flock_panics_caught"), 0, "{what}");
            server.assert_alive();
        }
        Err(failure) => {
            let log = &failure.log;
            // What it has refused it goes through once more with its own checker, which asks no module: that passes over a module's
            // value (rdbLoadCheckModuleValue) without minding the end of the file, for ever if the value is cut short.
            let is_checking = log.contains("Checking RDB file");
            let ended_by_itself = |status: ExitStatus| status.code().is_some() || has_a_key_twice(log);
            assert!(failure.status.map_or(is_checking, ended_by_itself), "{what}: {:?}\n{log}", failure.status);
            assert!(is_orderly(log), "{what}: {log}");
            let lines = log.lines().filter(|line| line.contains(" # ")).count();
            assert!(lines > 0, "{what}: no word of what is wrong: {log}");
        }
    }
}

/// No panic, no assertion, no crash.
fn is_orderly(log: &str) -> bool {
    let crashed = ["panicked at", "a bug was caught", "ASSERTION FAILED", "BUG REPORT START"];
    has_a_key_twice(log) || !crashed.iter().any(|words| log.contains(words))
}

/// Of such a file the server itself makes a crash report and ends by a signal, with or without modules.
fn has_a_key_twice(log: &str) -> bool {
    log.contains("Duplicated key found in RDB file")
}

fn forged_snapshot_is_refused_or_loads(builder: Builder) {
    // B5. Nothing but the checksum tells a damaged file, and the checksum can be switched off.
    let builder = builder.config("rdbchecksum", "no").config("rdbcompression", "no");
    let mut server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let (_, last) = locks_of_every_kind(&mut conn);
    assert_eq!(conn.cmd(&["SAVE"]), Reply::ok());
    let value = conn.cmd(&["DUMP", "plain"]).as_bytes().to_vec();
    server.kill9();
    let good = fs::read(server.dir().join("dump.rdb")).expect("the snapshot is there");
    // What is the module's begins with its type's id, in the counter; what is before is the server's own.
    let id = &value[1..FRAME_BYTES - 1];
    let start = good.windows(id.len()).position(|bytes| bytes == id).expect("the module's data are there");
    let mut random = Random::new();
    for number in 0..rounds(8, 100) {
        let (head, tail) = good.split_at(start);
        let mut forged = tail.to_vec();
        mutate(&mut random, &mut forged, tail);
        let what = format!("file {number}: {}", forged.escape_ascii());
        start_on_forged(&builder, &server, "dump.rdb", &[head, &forged].concat(), last, &what);
    }
}

fn forged_append_only_file_is_refused_or_loads(builder: Builder) {
    // B5. The file is text that a person may edit, and a disk may damage.
    let builder = builder.appendonly();
    let mut server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let (_, last) = locks_of_every_kind(&mut conn);
    conn.cmd(&["FLOCK.RELEASE", "plain", "alice"]);
    conn.cmd(&args!["FLOCK.RENEW", "labelled", "alice", 70_000]);
    server.kill9();
    let path = "appendonlydir/appendonly.aof.1.incr.aof";
    let good = fs::read(server.dir().join(path)).expect("the file is there");
    let mut random = Random::new();
    for number in 0..rounds(8, 100) {
        let forged =
            if random.one_in(2) { forge_change(&mut random, &good) } else { forge_anywhere(&mut random, &good) };
        let what = format!("file {number}: {}", forged.escape_ascii());
        start_on_forged(&builder, &server, path, &forged, last, &what);
    }
}

fn forge_anywhere(random: &mut Random, good: &[u8]) -> Vec<u8> {
    loop {
        let mut bytes = good.to_vec();
        mutate(random, &mut bytes, good);
        if !asks_for_too_much(&bytes) {
            return bytes;
        }
    }
}

/// Whether a length in the file is more than there is memory: the server itself, with or without a module, ends with a crash report
/// then ("Out Of Memory allocating").
fn asks_for_too_much(file: &[u8]) -> bool {
    file.split(|byte| *byte == b'\n').any(|line| {
        let digits = line.strip_prefix(b"$").or_else(|| line.strip_prefix(b"*")).unwrap_or_default();
        digits.iter().filter(|byte| byte.is_ascii_digit()).count() > 8
    })
}

/// Changes the text of one change, and its length with it: the server reads the file as good.
fn forge_change(random: &mut Random, good: &[u8]) -> Vec<u8> {
    const COMMAND: &[u8] = b"FLOCK._APPLY\r\n$";
    let places: Vec<_> = good.windows(COMMAND.len()).enumerate().filter(|(_, bytes)| *bytes == COMMAND).collect();
    let (at, _) = random.pick(&places);
    let length_at = at + COMMAND.len();
    let length_end = length_at + good[length_at..].iter().position(|byte| *byte == b'\r').expect("a length ends");
    let length: usize = std::str::from_utf8(&good[length_at..length_end]).expect("text").parse().expect("a length");
    let mut text = good[length_end + 2..length_end + 2 + length].to_vec();
    let other = text.clone();
    mutate(random, &mut text, &other);
    let head = &good[..length_at];
    let tail = &good[length_end + 2 + length..];
    [head, text.len().to_string().as_bytes(), b"\r\n", &text, tail].concat()
}
