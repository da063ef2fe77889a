//! FLOCK.LIST: the held locks, page by page. Other tests' locks are on the same server, so most tests ask for their own by MATCH.

use std::collections::BTreeMap;

use flock_tests::args;
use flock_tests::random::Random;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::{Builder, Server, unique_key};
use flock_tests::topology::Replicated;
use flock_tests::wait::wait_until;
use flock_tests::{on_own_servers, on_shared_servers};

use crate::lock_view::waiting;
use crate::scene::hold;

on_shared_servers![
    held_lock_is_listed,
    entry_is_a_map_or_its_flat_list,
    released_lock_is_not_listed,
    expired_lock_is_not_listed,
    deleted_lock_is_not_listed,
    key_of_another_type_is_not_listed,
    match_is_a_glob,
    owner_selects_the_locks_it_holds,
    every_lock_is_met_once_whatever_the_page,
    every_lock_is_met_once_while_others_come_and_go,
    page_is_no_longer_than_count,
    cursor_beyond_the_end_ends,
    only_the_selected_database_is_listed,
    only_readable_keys_are_listed,
];

on_own_servers![
    empty_server_lists_nothing,
    list_needs_no_keyspace_walk,
    match_agrees_with_keys_on_random_patterns,
    replica_lists_the_same,
    flushed_locks_are_not_listed,
    scan_finds_locks_by_their_type,
];

/// All entries that match, over as many pages as it takes.
#[track_caller]
fn all(conn: &mut Conn, options: &[Vec<u8>]) -> Vec<Reply> {
    let mut entries = Vec::new();
    let mut cursor = 0;
    loop {
        let mut command = args!["FLOCK.LIST", "CURSOR", cursor].to_vec();
        command.extend_from_slice(options);
        let reply = conn.cmd(&command);
        let [next, page] = reply.as_array() else { panic!("expected a cursor and a page, got {reply}") };
        entries.extend_from_slice(page.as_array());
        cursor = next.as_int();
        if cursor == 0 {
            return entries;
        }
    }
}

#[track_caller]
fn keys(conn: &mut Conn, options: &[Vec<u8>]) -> Vec<String> {
    let entries = all(conn, options);
    let mut keys: Vec<_> = entries.iter().map(|entry| entry.field("key").as_str().to_owned()).collect();
    keys.sort();
    keys
}

fn held_lock_is_listed(server: &Server, protocol: Protocol) {
    // Every field of an entry, with its value.
    let key = unique_key("listed");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "SHARED"]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 600_000, "SHARED"]).as_token();
    let _waiter = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "carol", 60_000, "BLOCK", 0]);
    let entries = all(&mut conn, &args!["MATCH", key]);
    let [entry] = &entries[..] else { panic!("{entries:?}") };
    assert_eq!(entry.field("key").as_str(), key);
    assert_eq!(entry.field("mode").as_str(), "shared");
    assert_eq!(entry.field("holder_count"), &Reply::Int(2));
    assert_eq!(entry.field("waiter_count"), &Reply::Int(1));
    assert_eq!(entry.field("owner").as_str(), "alice");
    assert_eq!(entry.field("token").as_token(), token);
    let left = entry.field("left_ms").as_int();
    assert!((30_000..=60_000).contains(&left), "{left}");
}

fn entry_is_a_map_or_its_flat_list(server: &Server, protocol: Protocol) {
    // As with INFO: maps for RESP3, flat lists for RESP2.
    let key = unique_key("map");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let entries = all(&mut conn, &args!["MATCH", key]);
    match protocol {
        Protocol::Resp2 => assert!(matches!(entries[0], Reply::Array(_)), "{entries:?}"),
        Protocol::Resp3 => assert!(matches!(entries[0], Reply::Map(_)), "{entries:?}"),
    }
}

fn released_lock_is_not_listed(server: &Server, protocol: Protocol) {
    // An index that forgets to forget shows locks that nobody holds.
    let key = unique_key("released");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    assert_eq!(keys(&mut conn, &args!["MATCH", key]), [""; 0]);
}

fn expired_lock_is_not_listed(server: &Server, protocol: Protocol) {
    // The end of a lease takes the lock off the list without another command about it.
    let key = unique_key("expired");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 20]).as_token();
    wait_until("the lock is off the list", ANSWER_WITHIN, || keys(&mut conn, &args!["MATCH", key]).is_empty());
}

fn deleted_lock_is_not_listed(server: &Server, protocol: Protocol) {
    // The module's index must follow what others do to the key.
    let mut conn = server.connect(protocol);
    for verb in ["DEL", "UNLINK"] {
        let key = unique_key("deleted");
        conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
        conn.cmd(&args![verb, key]);
        assert_eq!(keys(&mut conn, &args!["MATCH", key]), [""; 0], "{verb}");
    }
}

fn key_of_another_type_is_not_listed(server: &Server, protocol: Protocol) {
    // LIST is about locks, not about keys.
    let key = unique_key("string");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["SET", key, "v"]);
    assert_eq!(keys(&mut conn, &args!["MATCH", key]), [""; 0]);
}

fn match_is_a_glob(server: &Server, protocol: Protocol) {
    // The same language as KEYS and SCAN: what one finds, the other must find too.
    let base = unique_key("glob");
    let mut conn = server.connect(protocol);
    let names = ["a", "ab", "b", "*", "?", "[a]", "A"].map(|name| format!("{base}:{name}"));
    for name in &names {
        conn.cmd(&args!["FLOCK.ACQUIRE", name, "alice", 60_000]).as_token();
    }
    for pattern in ["*", "a", "a*", "?", "[ab]", "[^a]", "[a-b]", "\\*", "\\[a\\]", "**b", "", "[", "a\\"] {
        let pattern = format!("{base}:{pattern}");
        let found = conn.cmd(&args!["KEYS", pattern]);
        let mut expected: Vec<_> = found.as_array().iter().map(|key| key.as_str().to_owned()).collect();
        expected.sort();
        assert_eq!(keys(&mut conn, &args!["MATCH", pattern]), expected, "{pattern}");
    }
}

fn owner_selects_the_locks_it_holds(server: &Server, protocol: Protocol) {
    // "What does this process hold?" Also where it is one of many holders, and not where it only waits.
    let base = unique_key("owner");
    let (me, other) = (unique_key("me"), unique_key("other"));
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", format!("{base}:1"), me, 60_000]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", format!("{base}:2"), other, 60_000, "SHARED"]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", format!("{base}:2"), me, 60_000, "SHARED"]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", format!("{base}:3"), other, 60_000]).as_token();
    let _waiter = waiting(server, protocol, &args!["FLOCK.ACQUIRE", format!("{base}:3"), me, 60_000, "BLOCK", 0]);
    let held = keys(&mut conn, &args!["OWNER", me]);
    assert_eq!(held, [format!("{base}:1"), format!("{base}:2")]);
}

fn every_lock_is_met_once_whatever_the_page(server: &Server, protocol: Protocol) {
    // Pages that overlap or leave gaps: a lock that is held all the while must be met exactly once.
    let base = unique_key("pages");
    let mut conn = server.connect(protocol);
    let expected: Vec<_> = (10..60).map(|number| format!("{base}:{number}")).collect();
    for key in &expected {
        conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    }
    for count in [1, 7, 100, 10_000] {
        let found = keys(&mut conn, &args!["COUNT", count, "MATCH", format!("{base}:*")]);
        assert_eq!(found, expected, "COUNT {count}");
    }
}

fn every_lock_is_met_once_while_others_come_and_go(server: &Server, protocol: Protocol) {
    // Between two pages locks are released and others take their places; those that stay must neither be missed nor met twice.
    let base = unique_key("churn");
    let mut conn = server.connect(protocol);
    let stay: Vec<_> = (10..40).map(|number| format!("{base}:stay{number}")).collect();
    for (key, passing) in stay.iter().zip(0..) {
        conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
        conn.cmd(&args!["FLOCK.ACQUIRE", format!("{base}:pass{passing}"), "alice", 60_000]).as_token();
    }
    let mut met = Vec::new();
    let mut cursor = 0;
    for round in 0.. {
        let reply = conn.cmd(&args!["FLOCK.LIST", "CURSOR", cursor, "COUNT", 1, "MATCH", format!("{base}:stay*")]);
        let page = reply.as_array()[1].as_array();
        met.extend(page.iter().map(|entry| entry.field("key").as_str().to_owned()));
        cursor = reply.as_array()[0].as_int();
        if cursor == 0 {
            break;
        }
        conn.cmd(&args!["FLOCK.RELEASE", format!("{base}:pass{}", round % 30), "alice"]);
        conn.cmd(&args!["FLOCK.ACQUIRE", format!("{base}:new{round}"), "alice", 60_000]).as_token();
    }
    met.sort();
    assert_eq!(met, stay);
}

fn page_is_no_longer_than_count(server: &Server, protocol: Protocol) {
    // COUNT bounds the reply; the cursor goes on where the page ended.
    let base = unique_key("short");
    let mut conn = server.connect(protocol);
    for number in 0..10 {
        conn.cmd(&args!["FLOCK.ACQUIRE", format!("{base}:{number}"), "alice", 60_000]).as_token();
    }
    let reply = conn.cmd(&args!["FLOCK.LIST", "COUNT", 3]);
    assert_eq!(reply.as_array()[1].as_array().len(), 3);
    assert!(reply.as_array()[0].as_int() > 0, "there is more: {reply}");
}

fn cursor_beyond_the_end_ends(server: &Server, protocol: Protocol) {
    // A cursor is any number a client sends: the largest must neither overflow nor go on for ever.
    let mut conn = server.connect(protocol);
    let reply = conn.cmd(&args!["FLOCK.LIST", "CURSOR", 4_294_967_295_u32, "COUNT", 10_000]);
    assert_eq!(reply, Reply::Array(vec![Reply::Int(0), Reply::Array(vec![])]));
}

fn only_the_selected_database_is_listed(server: &Server, protocol: Protocol) {
    // An entry names no database, so it could be taken for a key of the selected one.
    let key = unique_key("database");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    conn.cmd(&args!["SELECT", 7]);
    assert_eq!(keys(&mut conn, &args!["MATCH", key]), [""; 0]);
    conn.cmd(&args!["SELECT", 0]);
    assert_eq!(keys(&mut conn, &args!["MATCH", key]), [key]);
}

fn only_readable_keys_are_listed(server: &Server, protocol: Protocol) {
    // LIST has no key argument, so the server cannot check: names and owners of others' locks would leak.
    let base = unique_key("acl");
    let mut admin = server.connect(protocol);
    for name in ["read", "both", "write", "none"] {
        admin.cmd(&args!["FLOCK.ACQUIRE", format!("{base}:{name}"), "alice", 60_000]).as_token();
    }
    let user = unique_key("user");
    let rules = args![
        "ACL",
        "SETUSER",
        user,
        "on",
        "nopass",
        "+@all",
        "resetkeys",
        format!("%R~{base}:read"),
        format!("~{base}:both"),
        format!("%W~{base}:write"),
    ];
    assert_eq!(admin.cmd(&rules), Reply::ok());
    let mut conn = server.connect(protocol);
    assert_eq!(conn.cmd(&args!["AUTH", user, "x"]), Reply::ok());
    let found = keys(&mut conn, &args!["MATCH", format!("{base}:*")]);
    admin.cmd(&args!["ACL", "DELUSER", user]);
    assert_eq!(found, [format!("{base}:both"), format!("{base}:read")]);
}

fn empty_server_lists_nothing(builder: Builder) {
    // Nothing held: one page, and it is the last.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let nothing = Reply::Array(vec![Reply::Int(0), Reply::Array(vec![])]);
    assert_eq!(conn.cmd(&["FLOCK.LIST"]), nothing);
}

fn list_needs_no_keyspace_walk(builder: Builder) {
    // Two locks among 100,000 other keys: a walk over the keyspace would take pages, the module's own index takes one.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    conn.cmd(&args!["DEBUG", "POPULATE", 100_000]);
    for key in ["a", "b"] {
        conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    }
    let reply = conn.cmd(&args!["FLOCK.LIST", "COUNT", 2]);
    assert_eq!(reply.as_array()[0], Reply::Int(0), "{reply}");
    assert_eq!(reply.as_array()[1].as_array().len(), 2, "{reply}");
}

fn match_agrees_with_keys_on_random_patterns(builder: Builder) {
    // The odd corners of the glob language are documented nowhere: the server's own KEYS says what they mean. Every key of one or two
    // special bytes, and patterns of up to six.
    const BYTES: &[u8] = b"ab*?[]^-\\";
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    for first in BYTES {
        for key in BYTES.iter().map(|second| vec![*first, *second]).chain([vec![*first]]) {
            conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
        }
    }
    let mut random = Random::new();
    for _ in 0..1000 {
        let pattern: Vec<u8> = (0..random.below(7)).map(|_| random.pick(BYTES)).collect();
        let found = conn.cmd(&args!["KEYS", pattern]);
        let mut expected: Vec<_> = found.as_array().iter().map(Reply::as_bytes).collect();
        expected.sort_unstable();
        let listed = all(&mut conn, &args!["COUNT", 10_000, "MATCH", pattern]);
        let mut listed: Vec<_> = listed.iter().map(|entry| entry.field("key").as_bytes()).collect();
        listed.sort_unstable();
        assert_eq!(listed, expected, "{}", pattern.escape_ascii());
    }
}

fn replica_lists_the_same(builder: Builder) {
    // LIST is a read, as INFO: a replica has the holds, so it has the index.
    let servers = Replicated::start(&builder, 1);
    let mut primary = servers.primary.connect(Protocol::Resp2);
    for key in ["a", "b", "c"] {
        primary.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    }
    primary.cmd(&args!["FLOCK.RELEASE", "b", "alice"]);
    servers.wait_in_step();
    let mut replica = servers.replicas[0].connect(Protocol::Resp2);
    let tokens = |conn: &mut Conn| -> BTreeMap<String, u64> {
        let entries = all(conn, &[]);
        let pair = |entry: &Reply| (entry.field("key").as_str().to_owned(), entry.field("token").as_token());
        entries.iter().map(pair).collect()
    };
    let (above, below) = (tokens(&mut primary), tokens(&mut replica));
    assert_eq!(above.keys().collect::<Vec<_>>(), ["a", "c"]);
    assert_eq!(above, below);
}

fn flushed_locks_are_not_listed(builder: Builder) {
    // FLUSHALL ends every hold at once; an index of its own has to hear of it.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    for mode in ["SYNC", "ASYNC"] {
        conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 60_000]).as_token();
        assert_eq!(conn.cmd(&args!["FLUSHALL", mode]), Reply::ok());
        assert_eq!(keys(&mut conn, &[]), [""; 0], "{mode}");
    }
}

fn scan_finds_locks_by_their_type(builder: Builder) {
    // What an administrator has for any type: TYPE, SCAN ... TYPE, OBJECT ENCODING.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    conn.cmd(&["SET", "other", "x"]);
    hold(&mut conn, "k", "alice");
    assert_eq!(conn.cmd(&["TYPE", "k"]), Reply::Simple("flocklock".into()));
    let scan = conn.cmd(&["SCAN", "0", "COUNT", "100", "TYPE", "flocklock"]);
    assert_eq!(scan.as_array()[1].as_array(), [Reply::bulk("k")], "{scan}");
    assert_eq!(conn.cmd(&["OBJECT", "ENCODING", "k"]), Reply::bulk("raw"));
}
