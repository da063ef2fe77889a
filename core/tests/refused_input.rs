//! Wrong arguments, one per row: each gets one clear error that names the argument, the value's problem and the range.
//!
//! What could break: a value taken for another (a lease of "1e3" read as 1), an option silently ignored, a sentence that repeats
//! hostile bytes into a reply or a log. Each row states the input, the code, and a part of the sentence; every sentence is also held
//! against the rules for sentences. The rows that follow from the kind of argument (every integer, every text) are made from tables.

use flock_core::request::{Acquire, Limits, Release, Renew, Revoke};
use flock_core::wire::command::{Check, Command, Info, List};
use flock_core::wire::error::{ErrorCode, WireError};

/// Parses one command given as a name and its arguments.
fn parse(command: &str, args: &[&[u8]], limits: &Limits) -> Result<(), WireError> {
    let args = args.iter().copied();
    match command {
        "ACQUIRE" => Acquire::parse(args, limits).map(drop),
        "RELEASE" => Release::parse(args, limits).map(drop),
        "RENEW" => Renew::parse(args, limits).map(drop),
        "CHECK" => Check::parse(args, limits).map(drop),
        "INFO" => Info::parse(args, limits).map(drop),
        "LIST" => List::parse(args, limits).map(drop),
        "REVOKE" => Revoke::parse(args, limits).map(drop),
        _ => panic!("no such command: {command}"),
    }
}

#[track_caller]
fn is_refused_by(limits: &Limits, command: &str, args: &[&[u8]], fragment: &str) {
    let error = parse(command, args, limits).expect_err(fragment);
    assert_eq!(error.code, ErrorCode::Err, "{error}");
    assert!(error.message.contains(fragment), "{command}: \"{}\" does not contain \"{fragment}\"", error.message);
    // A sentence can be sent as it is: one line of printable ASCII, of bounded length, without a full stop.
    assert!(error.message.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()), "{error}");
    assert!(error.message.len() < 400, "{} bytes", error.message.len());
    assert!(!error.message.ends_with('.'), "{error}");
    assert!(error.to_string().starts_with("ERR "), "{error}");
}

#[track_caller]
fn is_refused(command: &str, args: &[&[u8]], fragment: &str) {
    is_refused_by(&Limits::DEFAULT, command, args, fragment);
}

/// A line of words separated by single spaces; an empty word between two spaces.
#[track_caller]
fn line_is_refused(line: &str, fragment: &str) {
    let mut words = line.split(' ');
    let command = words.next().unwrap_or_default();
    let args: Vec<&[u8]> = words.map(str::as_bytes).collect();
    is_refused(command, &args, fragment);
}

#[test]
fn missing_and_superfluous_arguments_are_refused() {
    for (line, fragment) in [
        ("ACQUIRE", "argument key is missing"),
        ("ACQUIRE k", "argument owner is missing"),
        ("ACQUIRE k o", "argument lease_ms is missing"),
        ("RELEASE", "argument key is missing"),
        ("RELEASE k", "argument owner is missing"),
        ("RENEW", "argument key is missing"),
        ("RENEW k", "argument owner is missing"),
        ("RENEW k o", "argument lease_ms is missing"),
        ("CHECK", "argument key is missing"),
        ("CHECK k", "argument token is missing"),
        ("CHECK k 1 2", "unexpected argument \"2\""),
        ("INFO", "argument key is missing"),
        ("INFO k 5", "unknown option \"5\" (allowed: LIMIT)"),
        ("LIST 0", "unknown option \"0\" (allowed: CURSOR, COUNT, MATCH, OWNER)"),
        ("REVOKE", "argument key is missing"),
        ("REVOKE k o", "unknown option \"o\" (allowed: OWNER)"),
    ] {
        line_is_refused(line, fragment);
    }
}

#[test]
fn unknown_options_are_named_with_the_known_ones() {
    for (line, fragment) in [
        (
            "ACQUIRE k o 1 SHARD",
            "unknown option \"SHARD\" (allowed: SHARED, LIMIT, BLOCK, QUEUE, CHANNEL, NEW, REENTRANT, ",
        ),
        ("ACQUIRE k o 1 EXCLUSIVE", "unknown option \"EXCLUSIVE\""),
        ("ACQUIRE k o 1 SHARED 3", "unknown option \"3\""),
        ("ACQUIRE k o 1 ", "unknown option \"\""),
        ("ACQUIRE k o 1 SHARED=1", "unknown option \"SHARED=1\""),
        ("ACQUIRE k o 1 PX 5", "unknown option \"PX\""),
        ("RELEASE k o BLOCK", "unknown option \"BLOCK\" (allowed: TOKEN, ID, ALL)"),
        ("RELEASE k o 17", "unknown option \"17\""),
        ("RENEW k o 1 17", "unknown option \"17\" (allowed: TOKEN)"),
    ] {
        line_is_refused(line, fragment);
    }
}

#[test]
fn a_repeated_option_is_refused_in_any_case() {
    for (line, fragment) in [
        ("ACQUIRE k o 1 SHARED shared", "option SHARED is given twice"),
        ("ACQUIRE k o 1 NEW LABEL x New", "option NEW is given twice"),
        ("ACQUIRE k o 1 BLOCK 1 block 1", "option BLOCK is given twice"),
        ("ACQUIRE k o 1 LABEL a LABEL a", "option LABEL is given twice"),
        ("RELEASE k o TOKEN 1 TOKEN 1", "option TOKEN is given twice"),
        ("RELEASE k o ID a ID b", "option ID is given twice"),
        ("RELEASE k o ALL ALL", "option ALL is given twice"),
        ("LIST COUNT 1 COUNT 1", "option COUNT is given twice"),
    ] {
        line_is_refused(line, fragment);
    }
}

#[test]
fn an_option_without_its_value_is_refused() {
    for (line, fragment) in [
        ("ACQUIRE k o 1 SHARED LIMIT", "option LIMIT n has no value"),
        ("ACQUIRE k o 1 BLOCK", "option BLOCK wait_ms has no value"),
        ("ACQUIRE k o 1 QUEUE", "option QUEUE wait_ms has no value"),
        ("ACQUIRE k o 1 CHANNEL", "option CHANNEL channel has no value"),
        ("ACQUIRE k o 1 REENTRANT", "option REENTRANT id has no value"),
        ("ACQUIRE k o 1 CONVERT", "option CONVERT token has no value"),
        ("ACQUIRE k o 1 FLOOR", "option FLOOR token has no value"),
        ("ACQUIRE k o 1 CLAIM", "option CLAIM claim_ms has no value"),
        ("ACQUIRE k o 1 SESSION", "option SESSION grace_ms has no value"),
        ("ACQUIRE k o 1 LABEL", "option LABEL text has no value"),
        ("RELEASE k o TOKEN", "option TOKEN token has no value"),
        ("RELEASE k o ID", "option ID id has no value"),
        ("RENEW k o 1 TOKEN", "option TOKEN token has no value"),
        ("INFO k LIMIT", "option LIMIT n has no value"),
        ("LIST CURSOR", "option CURSOR c has no value"),
        ("LIST COUNT", "option COUNT n has no value"),
        ("LIST MATCH", "option MATCH pattern has no value"),
        ("LIST OWNER", "option OWNER owner has no value"),
        ("REVOKE k OWNER", "option OWNER owner has no value"),
    ] {
        line_is_refused(line, fragment);
    }
}

#[test]
fn options_that_contradict_each_other_are_refused() {
    for (line, fragment) in [
        ("ACQUIRE k o 1 BLOCK 1 QUEUE 1 CHANNEL c", "options BLOCK and QUEUE exclude each other"),
        ("ACQUIRE k o 1 BLOCK 0 QUEUE 1 CHANNEL c", "options BLOCK and QUEUE exclude each other"),
        ("ACQUIRE k o 1 QUEUE 1", "option QUEUE needs CHANNEL"),
        ("ACQUIRE k o 1 LIMIT 3", "option LIMIT needs SHARED"),
        ("ACQUIRE k o 1 CONVERT 1 BLOCK 1", "options CONVERT and BLOCK exclude each other"),
        ("ACQUIRE k o 1 BLOCK 0 CONVERT 1", "options CONVERT and BLOCK exclude each other"),
        ("ACQUIRE k o 1 CONVERT 1 QUEUE 1 CHANNEL c", "options CONVERT and QUEUE exclude each other"),
        ("ACQUIRE k o 1 CONVERT 1 NEW", "options CONVERT and NEW exclude each other"),
        ("ACQUIRE k o 1 CONVERT 1 REENTRANT a", "options CONVERT and REENTRANT exclude each other"),
        ("ACQUIRE k o 1 CONVERT 1 CLAIM 1", "options CONVERT and CLAIM exclude each other"),
        ("ACQUIRE k o 1 CONVERT 1 SHARED LIMIT 1", "options CONVERT and LIMIT exclude each other"),
        ("ACQUIRE k o 1000 CLAIM 1001", "CLAIM claim_ms is longer than lease_ms: \"1001\" (allowed: 1 to 1000)"),
        ("RELEASE k o ID a ALL", "options ID and ALL exclude each other"),
        ("RELEASE k o ALL ID a", "options ID and ALL exclude each other"),
    ] {
        line_is_refused(line, fragment);
    }
}

/// Every integer argument: the command before it, the name in the sentence, the range.
const INTEGERS: [(&str, &str, u64, u64); 15] = [
    ("ACQUIRE k o", "lease_ms", 1, 86_400_000),
    ("ACQUIRE k o 1 BLOCK", "BLOCK wait_ms", 0, 86_400_000),
    ("ACQUIRE k o 1 CHANNEL c QUEUE", "QUEUE wait_ms", 1, 86_400_000),
    ("ACQUIRE k o 1 SHARED LIMIT", "LIMIT n", 1, 4_294_967_295),
    ("ACQUIRE k o 1 CONVERT", "CONVERT token", 1, 9_007_199_254_740_991),
    ("ACQUIRE k o 1 FLOOR", "FLOOR token", 1, 9_007_199_254_740_991),
    ("ACQUIRE k o 86400000 CLAIM", "CLAIM claim_ms", 1, 86_400_000),
    ("ACQUIRE k o 1 SESSION", "SESSION grace_ms", 1, 86_400_000),
    ("RELEASE k o TOKEN", "TOKEN token", 1, 9_007_199_254_740_991),
    ("RENEW k o", "lease_ms", 1, 86_400_000),
    ("RENEW k o 1 TOKEN", "TOKEN token", 1, 9_007_199_254_740_991),
    ("CHECK k", "token", 1, 9_007_199_254_740_991),
    ("INFO k LIMIT", "LIMIT n", 0, 10_000),
    ("LIST CURSOR", "CURSOR c", 0, 4_294_967_295),
    ("LIST COUNT", "COUNT n", 1, 10_000),
];

fn words(line: &str) -> (&str, Vec<&[u8]>) {
    let mut words = line.split(' ');
    (words.next().unwrap_or_default(), words.map(str::as_bytes).collect())
}

#[test]
fn what_is_no_whole_number_is_refused_for_every_integer() {
    for (line, name, min, max) in INTEGERS {
        let fragment = format!("{name} is not a whole number: \"");
        let range = format!("(allowed: {min} to {max})");
        for value in [
            &b""[..],
            b" 5",
            b"5 ",
            b"+5",
            b"05",
            b"00",
            b"-0",
            b"-",
            b"5.0",
            b"0x5",
            b"1e3",
            b"NaN",
            b"inf",
            b"5s",
            b"1_000",
            b"1,000",
            b"5\0",
            b"\0",
            b"5\r\n",
            b"\xff\xfe",
            b"$3\r\nabc",
            "５".as_bytes(),
            &[b'x'; 1_000_000],
        ] {
            let (command, mut args) = words(line);
            args.push(value);
            is_refused(command, &args, &fragment);
            is_refused(command, &args, &range);
        }
    }
}

#[test]
fn a_number_out_of_range_is_refused_for_every_integer() {
    let far = ["-1", "-9223372036854775808", "9223372036854775808", "18446744073709551616"].map(str::to_string);
    for (line, name, min, max) in INTEGERS {
        let mut values = far.to_vec();
        values.push((u128::from(max) + 1).to_string());
        values.push("9".repeat(40));
        values.extend(min.checked_sub(1).map(|below| below.to_string()));
        for value in values {
            let (command, mut args) = words(line);
            args.push(value.as_bytes());
            is_refused(command, &args, &format!("{name} is out of range: \"{value}\" (allowed: {min} to {max})"));
        }
    }
}

#[test]
fn both_ends_of_every_range_are_accepted() {
    // Guards the two tests above: a parser that refuses everything would pass them.
    for (line, _, min, max) in INTEGERS {
        for value in [min, max] {
            let (command, mut args) = words(line);
            let value = value.to_string();
            args.push(value.as_bytes());
            assert_eq!(parse(command, &args, &Limits::DEFAULT), Ok(()), "{line} {value}");
        }
    }
}

/// Every text argument: the command before it, the name in the sentence, the shortest and the longest.
/// Who names a hold that exists may name it as long as any hold's name can be: the setting may have been lowered since.
const TEXTS: [(&str, &str, usize, usize); 11] = [
    ("ACQUIRE k", "owner", 1, 256),
    ("RELEASE k", "owner", 1, 4096),
    ("RENEW k", "owner", 1, 4096),
    ("REVOKE k OWNER", "OWNER owner", 1, 4096),
    ("LIST OWNER", "OWNER owner", 1, 4096),
    ("ACQUIRE k o 1 REENTRANT", "REENTRANT id", 1, 256),
    ("RELEASE k o ID", "ID id", 1, 4096),
    ("ACQUIRE k o 1 CHANNEL", "CHANNEL channel", 1, 512),
    ("ACQUIRE k o 1 LABEL", "LABEL text", 0, 256),
    ("LIST MATCH", "MATCH pattern", 0, 1024),
    ("ACQUIRE k o 1 SHARED REENTRANT", "REENTRANT id", 1, 256),
];

#[test]
fn texts_that_are_empty_or_too_long_are_refused() {
    for (line, name, min, max) in TEXTS {
        for len in [max + 1, 1_000_000] {
            let (command, mut args) = words(line);
            let value = vec![b'x'; len];
            args.push(&value);
            is_refused(command, &args, &format!("{name} is too long: {len} bytes (allowed: {min} to {max} bytes)"));
        }
        if min > 0 {
            let (command, mut args) = words(line);
            args.push(b"");
            is_refused(command, &args, &format!("{name} is empty (allowed: {min} to {max} bytes)"));
        }
    }
}

#[test]
fn texts_of_any_bytes_are_taken_as_they_are() {
    // Owners, ids and keys are bytes: nothing in them is special.
    for value in [&b"\0"[..], b"\r\n", b"\xff\xfe\xfd", b"*1\r\n$4\r\nPING\r\n", b"{}", b"{a}b", b" ", b"-1"] {
        for (line, ..) in TEXTS.into_iter().filter(|(line, ..)| line.len() > "ACQUIRE k".len()) {
            let (command, mut args) = words(line);
            args.push(value);
            assert_eq!(parse(command, &args, &Limits::DEFAULT), Ok(()), "{line} {}", value.escape_ascii());
        }
        let request = Acquire::parse([value, value, b"1"], &Limits::DEFAULT).expect("a valid request");
        assert_eq!((request.key, request.owner), (value, value));
    }
    assert_eq!(parse("ACQUIRE", &[b"", b"o", b"1"], &Limits::DEFAULT), Ok(()), "the empty key is a key");
}

#[test]
fn hostile_bytes_are_shown_escaped_and_cut() {
    is_refused("ACQUIRE", &[b"k", b"o", b"\r\n-ERR x"], "lease_ms is not a whole number: \"\\r\\n-ERR x\" (");
    is_refused("ACQUIRE", &[b"k", b"o", b"1", b"\0\xff\""], "unknown option \"\\x00\\xff\\\"\" (");
    let shown = "y".repeat(64);
    is_refused("CHECK", &[b"k", b"1", &[b'y'; 65]], &format!("unexpected argument \"{shown}\"... (65 bytes)"));
    is_refused("CHECK", &[b"k", b"1", &[b'y'; 64]], &format!("unexpected argument \"{shown}\""));
}

#[test]
fn configured_limits_appear_in_the_sentence() {
    let limits = Limits {
        lease_max: flock_core::Millis(500),
        wait_max: flock_core::Millis(600),
        owner_max_bytes: 2,
        label_max_bytes: 3,
        channel_max_bytes: 4,
        floor_enabled: false,
        ..Limits::DEFAULT
    };
    for (line, fragment) in [
        ("ACQUIRE k o 501", "lease_ms is out of range: \"501\" (allowed: 1 to 500)"),
        ("ACQUIRE k o 1 BLOCK 601", "BLOCK wait_ms is out of range: \"601\" (allowed: 0 to 600)"),
        ("ACQUIRE k o 1 SESSION 501", "SESSION grace_ms is out of range: \"501\" (allowed: 1 to 500)"),
        ("ACQUIRE k own 1", "owner is too long: 3 bytes (allowed: 1 to 2 bytes)"),
        ("ACQUIRE k o 1 REENTRANT own", "REENTRANT id is too long: 3 bytes (allowed: 1 to 2 bytes)"),
        ("ACQUIRE k o 1 LABEL text", "LABEL text is too long: 4 bytes (allowed: 0 to 3 bytes)"),
        ("ACQUIRE k o 1 CHANNEL there", "CHANNEL channel is too long: 5 bytes (allowed: 1 to 4 bytes)"),
        ("ACQUIRE k o 1 FLOOR 5", "option FLOOR is disabled (configuration: flock.floor-enabled)"),
        ("RENEW k o 501", "lease_ms is out of range: \"501\" (allowed: 1 to 500)"),
    ] {
        let (command, args) = words(line);
        is_refused_by(&limits, command, &args, fragment);
    }
}
