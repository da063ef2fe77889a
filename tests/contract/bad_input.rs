//! Bad input: one clear error, nothing changed, and the connection as good as before.
//!
//! The table below has every kind of wrong request that a client, a typing error or an attacker may send. Each entry is sent plainly,
//! in a transaction and in a script. Then: what bytes may arrive as, and what a server may be in no state to do.

use flock_core::wire::error::ErrorCode;
use flock_tests::args;
use flock_tests::args::encode;
use flock_tests::reply::Reply;
use flock_tests::resp::{Conn, Protocol};
use flock_tests::server::{Builder, Info, Server, unique_key};
use flock_tests::topology::Replicated;
use flock_tests::{on_own_servers, on_shared_servers};

use crate::lock_view::{holders, waiters, waiting};

on_own_servers![
    bad_request_is_one_error_and_changes_nothing,
    bad_request_in_a_transaction_is_one_error_and_changes_nothing,
    bad_request_in_a_script_is_one_error_and_changes_nothing,
    megabyte_in_any_argument_is_refused_in_a_short_sentence,
    oversized_argument_is_refused_by_the_server,
    full_server_makes_no_new_lock,
    full_server_lets_holders_go_on,
    full_server_hands_over,
    full_server_grants_nothing_in_scripts,
    replica_decides_nothing,
    writable_replica_decides_nothing,
    slow_log_shows_the_commands,
    monitor_shows_the_commands,
    unauthenticated_client_is_refused,
];

on_shared_servers![
    both_ends_of_every_range_are_accepted,
    request_split_at_any_byte_is_read,
    inline_request_is_read,
    bad_inline_request_is_one_error,
    ten_thousand_pipelined_requests_are_answered_in_order,
    requests_without_replies_are_carried_out,
    skipped_reply_is_skipped,
    granted_waiter_without_replies_stays_silent,
    bytes_of_any_kind_name_locks_and_owners,
    empty_key_is_a_key,
    key_of_a_megabyte_is_a_key,
    subscriber_of_the_old_protocol_is_refused,
];

/// A bad request: what is sent, the code of the error, and what its sentence must contain.
#[derive(Debug)]
struct Bad {
    request: Vec<Vec<u8>>,
    code: &'static str,
    says: Vec<String>,
}

/// A request written in one line; two spaces enclose an empty argument.
fn words(line: &str) -> Vec<Vec<u8>> {
    line.split(' ').map(|word| word.as_bytes().to_vec()).collect()
}

/// One bad request per line: `request => CODE words of the sentence | more words`.
const LINES: &str = "\
FLOCK.ACQUIRE => ERR wrong number of arguments
FLOCK.ACQUIRE free => ERR wrong number of arguments
FLOCK.ACQUIRE free owner => ERR wrong number of arguments
FLOCK.RELEASE => ERR wrong number of arguments
FLOCK.RELEASE free => ERR wrong number of arguments
FLOCK.RENEW => ERR wrong number of arguments
FLOCK.RENEW free owner => ERR wrong number of arguments
FLOCK.CHECK => ERR wrong number of arguments
FLOCK.CHECK free => ERR wrong number of arguments
FLOCK.CHECK free 5 6 => ERR wrong number of arguments
FLOCK.INFO => ERR wrong number of arguments
FLOCK.REVOKE => ERR wrong number of arguments
FLOCK.UNLOCK free => ERR unknown command
FLOCK._APPLY => ERR wrong number of arguments
FLOCK._APPLY x => ERR internal
FLOCK._APPLY x free => ERR internal
FLOCK._APPLY x held => ERR internal
FLOCK.ACQUIRE free owner 5000 SHARD => ERR unknown option \"SHARD\" | SHARED, LIMIT
FLOCK.ACQUIRE free owner 5000 EXCLUSIVE => ERR unknown option \"EXCLUSIVE\"
FLOCK.ACQUIRE free owner 5000 PX 5 => ERR unknown option \"PX\"
FLOCK.ACQUIRE free owner 5000 SHARED=1 => ERR unknown option \"SHARED=1\"
FLOCK.ACQUIRE free owner 5000 SHARED 3 => ERR unknown option \"3\"
FLOCK.ACQUIRE free owner 5000  => ERR unknown option \"\"
FLOCK.RELEASE held alice 17 => ERR unknown option \"17\" | TOKEN, ID, ALL
FLOCK.RELEASE held alice BLOCK 5 => ERR unknown option \"BLOCK\"
FLOCK.RENEW held alice 5000 17 => ERR unknown option \"17\" | TOKEN
FLOCK.INFO held 5 => ERR unknown option \"5\" | LIMIT
FLOCK.LIST 0 => ERR unknown option \"0\" | CURSOR, COUNT, MATCH, OWNER
FLOCK.REVOKE held alice => ERR unknown option \"alice\" | OWNER
FLOCK.ACQUIRE free owner 5000 SHARED shared => ERR SHARED is given twice
FLOCK.ACQUIRE free owner 5000 LABEL a LABEL a => ERR LABEL is given twice
FLOCK.ACQUIRE free owner 5000 BLOCK 0 block 0 => ERR BLOCK is given twice
FLOCK.RELEASE held alice TOKEN 5 TOKEN 5 => ERR TOKEN is given twice
FLOCK.RELEASE held alice ALL ALL => ERR ALL is given twice
FLOCK.LIST COUNT 5 COUNT 5 => ERR COUNT is given twice
FLOCK.ACQUIRE free owner 5000 SHARED LIMIT => ERR LIMIT n has no value
FLOCK.ACQUIRE free owner 5000 BLOCK => ERR BLOCK wait_ms has no value
FLOCK.ACQUIRE free owner 5000 QUEUE => ERR QUEUE wait_ms has no value
FLOCK.ACQUIRE free owner 5000 CHANNEL => ERR CHANNEL channel has no value
FLOCK.ACQUIRE free owner 5000 REENTRANT => ERR REENTRANT id has no value
FLOCK.ACQUIRE free owner 5000 CONVERT => ERR CONVERT token has no value
FLOCK.ACQUIRE free owner 5000 FLOOR => ERR FLOOR token has no value
FLOCK.ACQUIRE free owner 5000 CLAIM => ERR CLAIM claim_ms has no value
FLOCK.ACQUIRE free owner 5000 SESSION => ERR SESSION grace_ms has no value
FLOCK.ACQUIRE free owner 5000 LABEL => ERR LABEL text has no value
FLOCK.RELEASE held alice TOKEN => ERR TOKEN token has no value
FLOCK.RELEASE held alice ID => ERR ID id has no value
FLOCK.RENEW held alice 5000 TOKEN => ERR TOKEN token has no value
FLOCK.INFO held LIMIT => ERR LIMIT n has no value
FLOCK.LIST CURSOR => ERR CURSOR c has no value
FLOCK.LIST COUNT => ERR COUNT n has no value
FLOCK.LIST MATCH => ERR MATCH pattern has no value
FLOCK.LIST OWNER => ERR OWNER owner has no value
FLOCK.REVOKE held OWNER => ERR OWNER owner has no value
FLOCK.ACQUIRE free owner 5000 BLOCK 0 QUEUE 1 CHANNEL c => ERR BLOCK and QUEUE
FLOCK.ACQUIRE free owner 5000 QUEUE 1 => ERR QUEUE needs CHANNEL
FLOCK.ACQUIRE free owner 5000 LIMIT 3 => ERR LIMIT needs SHARED
FLOCK.ACQUIRE held alice 5000 CONVERT 5 BLOCK 0 => ERR CONVERT and BLOCK
FLOCK.ACQUIRE held alice 5000 CONVERT 5 QUEUE 1 CHANNEL c => ERR CONVERT and QUEUE
FLOCK.ACQUIRE held alice 5000 CONVERT 5 NEW => ERR CONVERT and NEW
FLOCK.ACQUIRE held alice 5000 CONVERT 5 REENTRANT a => ERR CONVERT and REENTRANT
FLOCK.ACQUIRE held alice 5000 CONVERT 5 CLAIM 5 => ERR CONVERT and CLAIM
FLOCK.ACQUIRE held alice 5000 CONVERT 5 SHARED LIMIT 5 => ERR CONVERT and LIMIT
FLOCK.ACQUIRE free owner 5000 CLAIM 5001 => ERR CLAIM claim_ms | longer than lease_ms | 1 to 5000
FLOCK.RELEASE ids alice ID a ALL => ERR ID and ALL
FLOCK.RELEASE ids alice ALL ID a => ERR ID and ALL
FLOCK.ACQUIRE free  5000 => ERR owner is empty | 1 to 256 bytes
FLOCK.RELEASE held  => ERR owner is empty | 1 to 4096 bytes
FLOCK.RENEW held  5000 => ERR owner is empty | 1 to 4096 bytes
FLOCK.REVOKE held OWNER  => ERR OWNER owner is empty | 1 to 4096 bytes
FLOCK.LIST OWNER  => ERR OWNER owner is empty | 1 to 4096 bytes
FLOCK.ACQUIRE free owner 5000 REENTRANT  => ERR REENTRANT id is empty | 1 to 256 bytes
FLOCK.RELEASE ids alice ID  => ERR ID id is empty | 1 to 4096 bytes
FLOCK.ACQUIRE free owner 5000 CHANNEL  => ERR CHANNEL channel is empty | 1 to 512 bytes
FLOCK.ACQUIRE string owner 5000 => WRONGTYPE wrong kind of value
FLOCK.ACQUIRE string owner 5000 BLOCK 0 => WRONGTYPE wrong kind of value
FLOCK.ACQUIRE string owner 5000 QUEUE 5000 CHANNEL c => WRONGTYPE wrong kind of value
FLOCK.RELEASE string owner => WRONGTYPE wrong kind of value
FLOCK.RENEW string owner 5000 => WRONGTYPE wrong kind of value
FLOCK.CHECK string 5 => WRONGTYPE wrong kind of value
FLOCK.INFO string => WRONGTYPE wrong kind of value
FLOCK.REVOKE string => WRONGTYPE wrong kind of value
FLOCK.ACQUIRE held alice 60000 NEW => HELD already holds
FLOCK.ACQUIRE held alice 60000 REENTRANT x => HELD without ids
FLOCK.ACQUIRE shared reader 60000 => HELDSHARED CONVERT
FLOCK.ACQUIRE shared reader 60000 BLOCK 0 => HELDSHARED CONVERT
FLOCK.ACQUIRE held alice 60000 SHARED CONVERT 5 => NOTHELD CONVERT
FLOCK.ACQUIRE held stranger 60000 SHARED CONVERT 5 => NOTHELD CONVERT
FLOCK.ACQUIRE free owner 60000 CONVERT 5 => NOTHELD CONVERT
FLOCK.ACQUIRE free owner 60000 FLOOR 9007199254740991 => TOKENFLOOR FLOOR token | 1 to
FLOCK.RELEASE ids alice => ERR ID | ALL";

/// Every argument that is a whole number: what comes before it, what it is called, its range. It is the last one.
const INTEGERS: [(&str, &str, u64, u64); 15] = [
    ("FLOCK.ACQUIRE free owner", "lease_ms", 1, 86_400_000),
    ("FLOCK.ACQUIRE held bob 1 BLOCK", "BLOCK wait_ms", 0, 86_400_000),
    ("FLOCK.ACQUIRE held bob 1 CHANNEL c QUEUE", "QUEUE wait_ms", 1, 86_400_000),
    ("FLOCK.ACQUIRE free owner 1 SHARED LIMIT", "LIMIT n", 1, 4_294_967_295),
    ("FLOCK.ACQUIRE held alice 1 CONVERT", "CONVERT token", 1, 9_007_199_254_740_991),
    ("FLOCK.ACQUIRE free owner 1 FLOOR", "FLOOR token", 1, 9_007_199_254_740_991),
    ("FLOCK.ACQUIRE free owner 86400000 CLAIM", "CLAIM claim_ms", 1, 86_400_000),
    ("FLOCK.ACQUIRE free owner 1 SESSION", "SESSION grace_ms", 1, 86_400_000),
    ("FLOCK.RELEASE held alice TOKEN", "TOKEN token", 1, 9_007_199_254_740_991),
    ("FLOCK.RENEW held alice", "lease_ms", 1, 86_400_000),
    ("FLOCK.RENEW held alice 1 TOKEN", "TOKEN token", 1, 9_007_199_254_740_991),
    ("FLOCK.CHECK held", "token", 1, 9_007_199_254_740_991),
    ("FLOCK.INFO held LIMIT", "LIMIT n", 0, 10_000),
    ("FLOCK.LIST CURSOR", "CURSOR c", 0, 4_294_967_295),
    ("FLOCK.LIST COUNT", "COUNT n", 1, 10_000),
];

/// What is no whole number.
const NOT_WHOLE: [&[u8]; 24] = [
    b"",
    b" 5",
    b"5 ",
    b"+5",
    b"05",
    b"-0",
    b"-",
    b"5.0",
    b".5",
    b"0x5",
    b"1e3",
    b"1e30",
    b"NaN",
    b"inf",
    b"5s",
    b"1,000",
    b"1_000",
    b"five",
    b"5\0",
    b"\0",
    b"5\r\n",
    b"\xff\xfe",
    b"$3\r\nabc\r\n",
    "\u{ff15}".as_bytes(), // a digit, but no ASCII one
];

/// Whole numbers that are in nobody's range.
const FAR: [&str; 7] = [
    "-1",
    "-9223372036854775808",
    "9007199254740992",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551616",
    "9999999999999999999999999999999999999999",
];

/// Every argument that is a text: what comes before it, what it is called, the longest, what comes after it.
const TEXTS: [(&str, &str, usize, &str); 9] = [
    ("FLOCK.ACQUIRE free", "owner", 256, "5000"),
    ("FLOCK.RENEW held", "owner", 4096, "5000"),
    ("FLOCK.REVOKE held OWNER", "OWNER owner", 4096, ""),
    ("FLOCK.LIST OWNER", "OWNER owner", 4096, ""),
    ("FLOCK.ACQUIRE free owner 5000 REENTRANT", "REENTRANT id", 256, ""),
    ("FLOCK.RELEASE ids alice ID", "ID id", 4096, ""),
    ("FLOCK.ACQUIRE free owner 5000 CHANNEL", "CHANNEL channel", 512, ""),
    ("FLOCK.ACQUIRE free owner 5000 LABEL", "LABEL text", 256, ""),
    ("FLOCK.LIST MATCH", "MATCH pattern", 1024, ""),
];

/// The whole table.
fn table() -> Vec<Bad> {
    let mut table: Vec<Bad> = LINES.lines().map(bad_line).collect();
    for (before, name, least, most) in INTEGERS {
        let bad = |value: &[u8], problem: &str| Bad {
            request: with(before, value, ""),
            code: "ERR",
            says: vec![format!("{name} {problem}"), format!("allowed: {least} to {most}")],
        };
        table.extend(NOT_WHOLE.map(|value| bad(value, "is not a whole number")));
        table.extend(FAR.map(|value| bad(value.as_bytes(), "is out of range")));
        table.push(bad((most + 1).to_string().as_bytes(), "is out of range"));
        table.extend(least.checked_sub(1).map(|below| bad(below.to_string().as_bytes(), "is out of range")));
    }
    for (before, name, most, after) in TEXTS {
        table.push(Bad {
            request: with(before, &vec![b'x'; most + 1], after),
            code: "ERR",
            says: vec![format!("{name} is too long: {} bytes", most + 1), format!(" to {most} bytes")],
        });
    }
    table
}

fn bad_line(line: &'static str) -> Bad {
    let (request, error) = line.split_once(" => ").expect("a line has an arrow");
    let (code, says) = error.split_once(' ').expect("an error has a sentence");
    Bad { request: words(request), code, says: says.split(" | ").map(str::to_owned).collect() }
}

fn with(before: &str, value: &[u8], after: &str) -> Vec<Vec<u8>> {
    let mut request = words(before);
    request.push(value.to_vec());
    if !after.is_empty() {
        request.extend(words(after));
    }
    request
}

/// A server with something to spoil: held locks of every kind, one that waits, and a key that is no lock.
struct Scene {
    server: Server,
    /// Bob's request for the lock `busy`.
    _waiter: Conn,
}

impl Scene {
    fn start(builder: &Builder) -> Scene {
        let server = builder.start();
        let mut conn = server.connect(Protocol::Resp2);
        conn.cmd(&args!["SET", "string", "v"]);
        for request in [
            "FLOCK.ACQUIRE held alice 80000000 LABEL why CHANNEL c",
            "FLOCK.ACQUIRE busy alice 80000000",
            "FLOCK.ACQUIRE shared reader 80000000 SHARED",
            "FLOCK.ACQUIRE ids alice 80000000 REENTRANT a",
            "FLOCK.ACQUIRE ids alice 80000000 REENTRANT b",
        ] {
            conn.cmd(&words(request)).as_token();
        }
        let waiter = waiting(&server, Protocol::Resp2, &words("FLOCK.ACQUIRE busy bob 80000000 BLOCK 0"));
        Scene { server, _waiter: waiter }
    }
}

/// All that a bad request might change: the data with their leases, the queue, the token counter.
fn state(conn: &mut Conn) -> Vec<Reply> {
    let info = Info::ask(conn, "flock");
    let mut state: Vec<_> = ["flock_counter", "flock_mark", "flock_held", "flock_waiters"]
        .map(|field| Reply::Int(info.number(field)))
        .to_vec();
    for look in ["DEBUG DIGEST", "DBSIZE"] {
        state.push(conn.cmd(&words(look)));
    }
    for key in ["held", "busy", "shared", "ids"] {
        let info = conn.cmd(&args!["FLOCK.INFO", key]);
        let lists = ["holders", "waiters"].map(|list| info.field(list).as_array().to_vec());
        for entry in lists.concat() {
            // All but the running time.
            state.extend(
                ["owner", "token", "state", "lease_ms", "label", "ids"]
                    .map(|field| entry.get(field).cloned().unwrap_or(Reply::Nil)),
            );
        }
    }
    state
}

#[track_caller]
fn assert_is(reply: &Reply, bad: &Bad) {
    let shown = bad.request.iter().map(|arg| arg.escape_ascii().to_string()).collect::<Vec<_>>().join(" ");
    assert_eq!(reply.error_code(), Some(bad.code), "{shown}: {reply}");
    let text = reply.error_text();
    assert!(ErrorCode::parse(text.as_bytes()).is_some(), "{shown}: {text} has a code that is in no table");
    for fragment in &bad.says {
        assert!(text.contains(fragment.as_str()), "{shown}: {text} does not say {fragment}");
    }
    // Whatever was sent comes back escaped and cut: one line of bounded length.
    assert!(text.bytes().all(|byte| (b' '..=b'~').contains(&byte)), "{shown}: {text:?}");
    assert!(text.len() < 400, "{shown}: {} bytes", text.len());
}

fn bad_request_is_one_error_and_changes_nothing(builder: Builder) {
    // Report B4 (redisson #7089) among many: a value that slips through becomes a lease of no length or of a million years. A PING right
    // behind the request tells that there was one error, no more, and that the connection is in step.
    let scene = Scene::start(&builder);
    for protocol in [Protocol::Resp2, Protocol::Resp3] {
        let mut conn = scene.server.connect(protocol);
        let before = state(&mut conn);
        for bad in table() {
            conn.send_bytes(&[encode(&bad.request), encode(&["PING"])].concat());
            assert_is(&conn.recv(), &bad);
            assert_eq!(conn.recv(), Reply::Simple("PONG".into()), "{bad:?}");
            assert_eq!(state(&mut conn), before, "{bad:?}");
        }
    }
}

fn bad_request_in_a_transaction_is_one_error_and_changes_nothing(builder: Builder) {
    // There nothing waits, and an error has a place of its own among the replies. A wrong number of arguments is found earlier.
    let scene = Scene::start(&builder);
    for protocol in [Protocol::Resp2, Protocol::Resp3] {
        let mut conn = scene.server.connect(protocol);
        let before = state(&mut conn);
        for bad in table() {
            conn.cmd(&["MULTI"]);
            let queued = conn.cmd(&bad.request);
            let replies = conn.cmd(&["EXEC"]);
            match queued.error_code() {
                Some(_) => {
                    assert_is(&queued, &bad);
                    assert_eq!(replies.error_code(), Some("EXECABORT"), "{bad:?}");
                }
                None => assert_is(&replies.as_array()[0], &bad),
            }
            assert_eq!(state(&mut conn), before, "{bad:?}");
        }
    }
}

fn bad_request_in_a_script_is_one_error_and_changes_nothing(builder: Builder) {
    // The server says some of it in its own words there, so only the code is looked at.
    let scene = Scene::start(&builder);
    for protocol in [Protocol::Resp2, Protocol::Resp3] {
        let mut conn = scene.server.connect(protocol);
        let before = state(&mut conn);
        for bad in table() {
            let mut command = args!["EVAL", "return redis.pcall(unpack(ARGV))", 0].to_vec();
            command.extend(bad.request.iter().cloned());
            let reply = conn.cmd(&command);
            assert_eq!(reply.error_code(), Some(bad.code), "{bad:?}: {reply}");
            assert_eq!(state(&mut conn), before, "{bad:?}");
        }
    }
}

fn megabyte_in_any_argument_is_refused_in_a_short_sentence(builder: Builder) {
    // A refusal that quotes its cause fills logs and slow logs. (Keys may be as long as the server allows.)
    let scene = Scene::start(&builder);
    let mut conn = scene.server.connect(Protocol::Resp2);
    let before = state(&mut conn);
    let megabyte = vec![b'\xff'; 1 << 20];
    let integers = INTEGERS.map(|(before, name, ..)| (before, name, ""));
    let texts = TEXTS.map(|(before, name, _, after)| (before, name, after));
    let options = [("FLOCK.ACQUIRE free owner 5000", "unknown option", "")];
    for (first, name, after) in integers.into_iter().chain(texts).chain(options) {
        let bad = Bad {
            request: with(first, &megabyte, after),
            code: "ERR",
            says: vec![name.to_owned(), "1048576 bytes".to_owned()],
        };
        let reply = conn.cmd(&bad.request);
        let short = Bad { request: words(first), ..bad };
        assert_is(&reply, &short);
        assert_eq!(state(&mut conn), before, "{first}");
    }
}

fn oversized_argument_is_refused_by_the_server(builder: Builder) {
    // More than proto-max-bulk-len: refused when it is declared, before a byte of it has come. Others are served as before.
    let server = builder.start();
    let mut conn = Conn::open_raw(server.addr());
    conn.send_bytes(b"*4\r\n$13\r\nFLOCK.ACQUIRE\r\n$536870913\r\n");
    assert_eq!(conn.recv().error_code(), Some("ERR"));
    conn.expect_close();
    server.assert_alive();
}

fn both_ends_of_every_range_are_accepted(server: &Server, protocol: Protocol) {
    // Guards the table above: a module that refuses everything would pass it. In a transaction, where nothing waits.
    let mut conn = server.connect(protocol);
    for (before, name, least, most) in INTEGERS {
        // Credible floors depend on the clock (`floor.rs`), conversions on a hold (`modes.rs`).
        let most = if name == "FLOOR token" { 1 } else { most };
        if name == "CONVERT token" {
            continue;
        }
        for value in [least, most] {
            let (free, held) = (unique_key("free"), unique_key("held"));
            let request = before.replace(" free ", &format!(" {free} ")).replace(" held", &format!(" {held}"));
            conn.cmd(&["MULTI"]);
            conn.cmd(&args!["FLOCK.ACQUIRE", held, "alice", 60_000]);
            conn.cmd(&with(&request, value.to_string().as_bytes(), ""));
            conn.cmd(&args!["FLOCK.RELEASE", held, "alice"]);
            conn.cmd(&args!["DEL", free]);
            let replies = conn.cmd(&["EXEC"]);
            assert_eq!(replies.as_array()[1].error_code(), None, "{name} {value}: {replies}");
        }
    }
}

fn request_split_at_any_byte_is_read(server: &Server, protocol: Protocol) {
    // Packets end anywhere. Between the two parts another client is answered, so the server has read the first by then.
    let key = unique_key("split");
    let mut conn = server.connect(protocol);
    let mut other = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let good = encode(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "LABEL", b"\r\n"]);
    let bad = encode(&args!["FLOCK.RENEW", key, "alice", "\r\n", "TOKEN", token]);
    for at in 1..good.len() {
        conn.send_bytes(&good[..at]);
        other.cmd(&["PING"]);
        conn.send_bytes(&good[at..]);
        assert_eq!(conn.recv().as_token(), token, "split at {at}");
    }
    for at in 1..bad.len() {
        conn.send_bytes(&bad[..at]);
        other.cmd(&["PING"]);
        conn.send_bytes(&bad[at..]);
        assert_eq!(conn.recv().error_code(), Some("ERR"), "split at {at}");
    }
}

fn inline_request_is_read(server: &Server, protocol: Protocol) {
    // Typed by hand into a plain connection; bytes that are no text come in quotes.
    let key = unique_key("inline");
    let mut conn = server.connect(protocol);
    conn.send_bytes(format!("flock.acquire {key} \"\\x00al\\r\\nice\" 60000 label 'why not'\r\n").as_bytes());
    conn.recv().as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, b"\0al\r\nice"]), Reply::Int(1));
}

fn bad_inline_request_is_one_error(server: &Server, protocol: Protocol) {
    // One error per line, and the next line is read as a command of its own.
    let key = unique_key("bad inline");
    let mut conn = server.connect(protocol);
    conn.send_bytes(b"FLOCK.ACQUIRE\r\nFLOCK.ACQUIRE k o soon\r\nFLOCK.CHECK k 0\r\nPING\r\n");
    for _ in 0..3 {
        assert_eq!(conn.recv().error_code(), Some("ERR"));
    }
    assert_eq!(conn.recv(), Reply::Simple("PONG".into()));
    assert_eq!(conn.cmd(&args!["EXISTS", key]), Reply::Int(0));
}

fn ten_thousand_pipelined_requests_are_answered_in_order(server: &Server, protocol: Protocol) {
    // Good and bad ones mixed, all sent before the first reply is read: one reply each, in order.
    let key = unique_key("pipelined");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let five = [
        encode(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]),
        encode(&args!["FLOCK.ACQUIRE", key, "alice", 0]),
        encode(&args!["FLOCK.CHECK", key, token]),
        encode(&args!["FLOCK.RELEASE", key, "bob"]),
        encode(&args!["FLOCK.ACQUIRE", key, "bob", 60_000]),
    ];
    conn.send_bytes(&five.concat().repeat(2000));
    for round in 0..2000 {
        assert_eq!(conn.recv().as_token(), token, "{round}");
        assert_eq!(conn.recv().error_code(), Some("ERR"), "{round}");
        assert_eq!(conn.recv(), Reply::Int(1), "{round}");
        assert_eq!(conn.recv(), Reply::Int(0), "{round}");
        assert_eq!(conn.recv(), Reply::Nil, "{round}");
    }
    assert_eq!(conn.cmd(&["PING"]), Reply::Simple("PONG".into()));
}

fn requests_without_replies_are_carried_out(server: &Server, protocol: Protocol) {
    // CLIENT REPLY OFF: no reply and no error, and afterwards the connection is in step.
    let key = unique_key("silent");
    let mut conn = server.connect(protocol);
    conn.send(&["CLIENT", "REPLY", "OFF"]);
    conn.send(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]);
    conn.send(&args!["FLOCK.ACQUIRE", key, "alice", "soon"]);
    conn.send(&args!["FLOCK.INFO", key]);
    conn.send(&["CLIENT", "REPLY", "ON"]);
    assert_eq!(conn.recv(), Reply::ok());
    assert_eq!(holders(&mut conn, &key), ["alice"]);
}

fn skipped_reply_is_skipped(server: &Server, protocol: Protocol) {
    // CLIENT REPLY SKIP: of the next request only, be it good or bad.
    let key = unique_key("skipped");
    let mut conn = server.connect(protocol);
    for lease in ["60000", "soon"] {
        conn.send(&["CLIENT", "REPLY", "SKIP"]);
        conn.send(&args!["FLOCK.ACQUIRE", key, "alice", lease]);
        conn.send(&["PING"]);
        assert_eq!(conn.recv(), Reply::Simple("PONG".into()), "{lease}");
    }
    assert_eq!(holders(&mut conn, &key), ["alice"]);
}

fn granted_waiter_without_replies_stays_silent(server: &Server, protocol: Protocol) {
    // The reply to a blocked client is made later, at another place: it must honour REPLY OFF as well.
    let key = unique_key("silent waiter");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let mut waiter = server.connect(protocol);
    waiter.send(&["CLIENT", "REPLY", "OFF"]);
    waiter.send(&args!["FLOCK.ACQUIRE", key, "bob", 60_000, "BLOCK", 0]);
    server.wait_until_blocked(&waiter);
    waiter.send(&["CLIENT", "REPLY", "ON"]);
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    assert_eq!(waiter.recv(), Reply::ok());
    assert_eq!(holders(&mut conn, &key), ["bob"]);
}

fn bytes_of_any_kind_name_locks_and_owners(server: &Server, protocol: Protocol) {
    // Keys and owners are bytes: NUL, CRLF, 0xFF, things that look like the protocol, like numbers, like options.
    let mut conn = server.connect(protocol);
    for bytes in [
        &b"\0"[..],
        b"\0\0",
        b"\r\n",
        b"\xff\xfe\xfd",
        b"*1\r\n$4\r\nPING\r\n",
        b"-ERR no\r\n",
        b"{}",
        b"{a}b",
        b" ",
        b"-1",
        b"0",
        b"SHARED",
        b"%s%n",
        "\u{1F512}".as_bytes(),
    ] {
        let key = [unique_key("bytes").as_bytes(), bytes].concat();
        let shown = bytes.escape_ascii();
        let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, bytes, 60_000]).as_token();
        assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(1), "{shown}");
        assert_eq!(conn.cmd(&args!["FLOCK.RENEW", key, bytes, 60_000]), Reply::Int(1), "{shown}");
        assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "other", 60_000]), Reply::Nil, "{shown}");
        let info = conn.cmd(&args!["FLOCK.INFO", key]);
        assert_eq!(info.field("holders").as_array()[0].field("owner"), &Reply::bulk(bytes), "{shown}");
        assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, bytes]), Reply::Int(1), "{shown}");
        assert_eq!(conn.cmd(&args!["EXISTS", key]), Reply::Int(0), "{shown}");
    }
}

fn empty_key_is_a_key(server: &Server, protocol: Protocol) {
    // As everywhere in the server. The database of its own keeps it from other tests' empty keys.
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["SELECT", if protocol == Protocol::Resp2 { 11 } else { 12 }]);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", "", "alice", 60_000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "", token]), Reply::Int(1));
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", "", "bob", 60_000]), Reply::Nil);
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", "", "alice"]), Reply::Int(1));
}

fn key_of_a_megabyte_is_a_key(server: &Server, protocol: Protocol) {
    // The server has no lower bound than its longest argument, so neither has the module.
    let key = unique_key("long").repeat(1 << 17);
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(1));
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]), Reply::Int(1));
}

fn subscriber_of_the_old_protocol_is_refused(server: &Server, protocol: Protocol) {
    // In RESP2 a subscribed connection takes no other commands: the server's rule. In RESP3 it does.
    let key = unique_key("subscriber");
    let mut conn = server.connect(protocol);
    conn.send(&args!["SUBSCRIBE", key]);
    match protocol {
        Protocol::Resp2 => drop(conn.recv()),
        Protocol::Resp3 => drop(conn.push_within(flock_tests::resp::ANSWER_WITHIN)),
    }
    let reply = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]);
    match protocol {
        Protocol::Resp2 => assert_eq!(reply.error_code(), Some("ERR"), "{reply}"),
        Protocol::Resp3 => assert!(reply.as_token() > 0),
    }
}

/// Fills the server as far as it will ever be.
#[track_caller]
fn fill(conn: &mut Conn) {
    assert_eq!(conn.cmd(&["CONFIG", "SET", "maxmemory", "1"]), Reply::ok());
}

fn full_server_makes_no_new_lock(builder: Builder) {
    // A server above its memory limit refuses what would need memory, and nothing of it may stick.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    conn.cmd(&args!["FLOCK.ACQUIRE", "held", "alice", 60_000]).as_token();
    fill(&mut conn);
    for request in [
        "FLOCK.ACQUIRE free owner 5000",
        "FLOCK.ACQUIRE free owner 5000 BLOCK 0",
        "FLOCK.ACQUIRE held owner 5000 BLOCK 0",
        "FLOCK.ACQUIRE held owner 5000 QUEUE 5000 CHANNEL c",
    ] {
        assert_eq!(conn.cmd(&words(request)).error_code(), Some("OOM"), "{request}");
    }
    assert_eq!(conn.cmd(&["DBSIZE"]), Reply::Int(1));
    assert_eq!(waiters(&mut conn, "held"), [""; 0]);
}

fn full_server_lets_holders_go_on(builder: Builder) {
    // Report E6 (redis #9105): who holds a lock must be able to keep it, to look, and to give it back: that frees memory.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 60_000]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", "revoked", "alice", 60_000]).as_token();
    fill(&mut conn);
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", "k", "alice", 60_000, "TOKEN", token]), Reply::Int(1));
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(1));
    assert_eq!(holders(&mut conn, "k"), ["alice"]);
    assert_eq!(conn.cmd(&["FLOCK.LIST"]).as_array()[1].as_array().len(), 2);
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", "k", "alice"]), Reply::Int(1));
    assert_eq!(conn.cmd(&args!["FLOCK.REVOKE", "revoked"]), Reply::Int(1));
    assert_eq!(conn.cmd(&["DBSIZE"]), Reply::Int(0));
}

fn full_server_hands_over(builder: Builder) {
    // A waiter that had its place before the memory was short: the lock goes on to it, or nobody would ever get it.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let first = conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 60_000]).as_token();
    let mut waiter = waiting(&server, Protocol::Resp2, &args!["FLOCK.ACQUIRE", "k", "bob", 60_000, "BLOCK", 0]);
    fill(&mut conn);
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", "k", "alice"]), Reply::Int(1));
    assert!(waiter.recv().as_token() > first);
}

fn full_server_grants_nothing_in_scripts(builder: Builder) {
    // The rule is the command's, whoever runs it.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    fill(&mut conn);
    let script = "return redis.call('FLOCK.ACQUIRE', KEYS[1], 'alice', 60000)";
    assert_eq!(conn.cmd(&args!["EVAL", script, 1, "k"]).error_code(), Some("OOM"));
    conn.cmd(&["MULTI"]);
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 60_000]).error_code(), Some("OOM"));
    assert_eq!(conn.cmd(&["EXEC"]).error_code(), Some("EXECABORT"));
    assert_eq!(conn.cmd(&["DBSIZE"]), Reply::Int(0));
}

/// What only a primary may answer: every verb that decides, and CHECK.
const DECIDING: [&str; 8] = [
    "FLOCK.ACQUIRE free owner 5000",
    "FLOCK.ACQUIRE k alice 5000",
    "FLOCK.ACQUIRE k owner 5000 BLOCK 0",
    "FLOCK.ACQUIRE k owner 5000 QUEUE 5000 CHANNEL c",
    "FLOCK.RELEASE k alice",
    "FLOCK.RENEW k alice 5000",
    "FLOCK.CHECK k 5",
    "FLOCK.REVOKE k",
];

/// Wants every deciding verb refused by a replica, plainly and in a script, and its state as it was.
fn assert_decides_nothing(builder: &Builder, in_scripts: bool) {
    let servers = Replicated::start(builder, 1);
    let mut primary = servers.primary.connect(Protocol::Resp2);
    primary.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 60_000]).as_token();
    servers.wait_in_step();
    for protocol in [Protocol::Resp2, Protocol::Resp3] {
        let mut replica = servers.replicas[0].connect(protocol);
        let before = replica.cmd(&["DEBUG", "DIGEST"]);
        for request in DECIDING {
            assert_eq!(replica.cmd(&words(request)).error_code(), Some("READONLY"), "{request}");
            if in_scripts {
                let mut script = args!["EVAL", "return redis.call(unpack(ARGV))", 0].to_vec();
                script.extend(words(request));
                assert_eq!(replica.cmd(&script).error_code(), Some("READONLY"), "in a script: {request}");
            }
        }
        assert_eq!(replica.cmd(&["DEBUG", "DIGEST"]), before);
        assert_eq!(holders(&mut replica, "k"), ["alice"]);
    }
}

fn replica_decides_nothing(builder: Builder) {
    // The usual replica: the server itself refuses commands that are flagged as writes, so CHECK is flagged as one.
    assert_decides_nothing(&builder, false);
}

fn writable_replica_decides_nothing(builder: Builder) {
    // replica-read-only no: the server lets writes through, and a grant made there would be nobody's but this replica's.
    assert_decides_nothing(&builder.config("replica-read-only", "no"), true);
}

fn slow_log_shows_the_commands(builder: Builder) {
    // Everything is logged, a command that waited too, with bytes that are no text: reading the log must work.
    let server = builder.config("slowlog-log-slower-than", 0).start();
    let mut conn = server.connect(Protocol::Resp2);
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", b"\0\r\n\xff", 60_000]).as_token();
    let mut waiter = waiting(&server, Protocol::Resp2, &args!["FLOCK.ACQUIRE", "k", "bob", 60_000, "BLOCK", 0]);
    conn.cmd(&args!["FLOCK.RELEASE", "k", b"\0\r\n\xff"]);
    waiter.recv().as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", "soon"]);
    let log = conn.cmd(&args!["SLOWLOG", "GET", -1]);
    let commands: Vec<_> = log.as_array().iter().map(|entry| entry.as_array()[3].as_array()).collect();
    let is_logged = |request: &[Vec<u8>]| commands.iter().any(|args| args.iter().map(Reply::as_bytes).eq(request));
    assert!(is_logged(&args!["FLOCK.ACQUIRE", "k", b"\0\r\n\xff", 60_000]), "{log}");
    assert!(is_logged(&args!["FLOCK.ACQUIRE", "k", "bob", 60_000, "BLOCK", 0]), "{log}");
    assert!(is_logged(&args!["FLOCK.RELEASE", "k", b"\0\r\n\xff"]), "{log}");
    assert!(is_logged(&args!["FLOCK.ACQUIRE", "k", "alice", "soon"]), "{log}");
}

fn monitor_shows_the_commands(builder: Builder) {
    // One line per command, escaped: an owner with a line end must not forge another line. REVOKE is left out, as the server
    // does with administrators' commands.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let mut monitor = server.connect(Protocol::Resp2);
    assert_eq!(monitor.cmd(&["MONITOR"]), Reply::ok());
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", b"a\r\n+OK\0", 60_000]).as_token();
    conn.cmd(&args!["FLOCK.REVOKE", "k"]);
    conn.cmd(&args!["FLOCK.CHECK", "k", 5]);
    for expected in [r#""FLOCK.ACQUIRE" "k" "a\r\n+OK\x00" "60000""#, r#""FLOCK.CHECK" "k" "5""#] {
        let line = monitor.recv();
        assert!(line.as_str().ends_with(expected), "{line}");
    }
}

fn unauthenticated_client_is_refused(builder: Builder) {
    // No command of the module is for everybody.
    let server = builder.start();
    let mut admin = server.connect(Protocol::Resp2);
    let mut conn = server.connect(Protocol::Resp2);
    admin.cmd(&["CONFIG", "SET", "requirepass", "secret"]);
    let mut stranger = Conn::open_raw(server.addr());
    for request in DECIDING.into_iter().chain(["FLOCK.INFO k", "FLOCK.LIST"]) {
        assert_eq!(stranger.cmd(&words(request)).error_code(), Some("NOAUTH"), "{request}");
    }
    assert_eq!(conn.cmd(&["DBSIZE"]), Reply::Int(0));
}
