//! What the server tells about the commands, held against the table they are registered from (`flock_core::wire::spec`).

use std::collections::BTreeSet;

use flock_core::wire::spec::{APPLY, ArgKind, ArgSpec, COMMANDS, CommandSpec, KeyFlag, KeySpec};
use flock_tests::on_shared_servers;
use flock_tests::reply::Reply;
use flock_tests::resp::{Conn, Protocol};
use flock_tests::server::Server;

on_shared_servers![
    module_has_exactly_the_commands_of_the_table,
    arity_is_as_in_the_table,
    flags_are_as_in_the_table,
    categories_are_as_in_the_table,
    revoke_is_an_administrators_command,
    tips_are_as_in_the_table,
    key_position_is_as_in_the_table,
    key_flags_are_as_in_the_table,
    documentation_is_as_in_the_table,
    arguments_are_as_in_the_table,
    keys_of_a_request_are_found,
    keys_of_a_request_are_found_with_their_flags,
    requests_without_a_key_have_none,
    only_the_internal_command_is_refused_to_clients,
];

/// The entry of COMMAND INFO, a list of ten.
#[track_caller]
fn command_info(conn: &mut Conn, name: &str) -> Vec<Reply> {
    let reply = conn.cmd(&["COMMAND", "INFO", name]);
    let entry = reply.as_array()[0].as_array().to_vec();
    assert_eq!(entry[0].as_str(), name);
    entry
}

#[track_caller]
fn words(list: &Reply) -> BTreeSet<String> {
    list.as_array().iter().map(|word| word.as_str().to_owned()).collect()
}

fn split(words: &str) -> BTreeSet<String> {
    words.split_whitespace().map(str::to_owned).collect()
}

fn module_has_exactly_the_commands_of_the_table(server: &Server, protocol: Protocol) {
    // A command that is registered beside the table is documented and protected by nothing.
    let mut conn = server.connect(protocol);
    let live = words(&conn.cmd(&["COMMAND", "LIST", "FILTERBY", "MODULE", "flock"]));
    let table: BTreeSet<_> = COMMANDS.iter().map(|spec| spec.name.to_owned()).collect();
    assert_eq!(live, table);
}

fn arity_is_as_in_the_table(server: &Server, protocol: Protocol) {
    // With a wrong arity the server refuses good requests, or lets transactions queue bad ones.
    let mut conn = server.connect(protocol);
    for spec in COMMANDS {
        let info = command_info(&mut conn, spec.name);
        assert_eq!(info[1], Reply::Int(spec.arity.into()), "{}", spec.name);
    }
}

fn flags_are_as_in_the_table(server: &Server, protocol: Protocol) {
    // Flags decide what a replica, a full server and a read-only script may run. The server has its own spelling of some.
    let mut conn = server.connect(protocol);
    for spec in COMMANDS {
        let mut expected: BTreeSet<String> = BTreeSet::from(["module".to_owned()]);
        for flag in spec.flags.split(' ') {
            let flag = match flag {
                "deny-oom" => "denyoom",
                "deny-script" => "noscript",
                "no-mandatory-keys" => "no_mandatory_keys",
                other => other,
            };
            expected.insert(flag.to_owned());
        }
        assert_eq!(words(&command_info(&mut conn, spec.name)[2]), expected, "{}", spec.name);
    }
}

fn categories_are_as_in_the_table(server: &Server, protocol: Protocol) {
    // A command in no category is missed by every ACL rule that names one.
    let mut conn = server.connect(protocol);
    for spec in COMMANDS {
        let expected = spec.acl_categories.split(' ').map(|category| format!("@{category}"));
        let live = words(&command_info(&mut conn, spec.name)[6]);
        assert_eq!(live, expected.collect(), "{}", spec.name);
    }
}

fn revoke_is_an_administrators_command(server: &Server, protocol: Protocol) {
    // It ends what is another's: who excludes @admin or @dangerous must exclude it, and +@flock must not include it. The verbs of
    // ordinary users are the other way round.
    let mut conn = server.connect(protocol);
    for spec in COMMANDS {
        let live = words(&command_info(&mut conn, spec.name)[6]);
        let administrators = ["FLOCK.REVOKE", APPLY].contains(&spec.name);
        assert_eq!(live.contains("@admin"), administrators, "{}", spec.name);
        assert_eq!(live.contains("@dangerous"), administrators, "{}", spec.name);
        assert_eq!(live.contains("@flock"), !administrators, "{}", spec.name);
    }
}

fn tips_are_as_in_the_table(server: &Server, protocol: Protocol) {
    // Cluster clients route and cache by them.
    let mut conn = server.connect(protocol);
    for spec in COMMANDS {
        assert_eq!(words(&command_info(&mut conn, spec.name)[7]), split(spec.tips), "{}", spec.name);
    }
}

fn key_position_is_as_in_the_table(server: &Server, protocol: Protocol) {
    // Old clients find the key by first, last and step; a wrong one sends the request to the wrong node.
    let mut conn = server.connect(protocol);
    for spec in COMMANDS {
        let at = spec.key.map_or(0, |key| i64::from(key.position));
        let step = spec.key.map_or(0, |_| 1);
        let info = command_info(&mut conn, spec.name);
        assert_eq!(info[3..6], [Reply::Int(at), Reply::Int(at), Reply::Int(step)], "{}", spec.name);
    }
}

fn key_flag(flag: KeyFlag) -> String {
    let word = match flag {
        KeyFlag::ReadOnly => "RO",
        KeyFlag::ReadWrite => "RW",
        KeyFlag::Access => "access",
        KeyFlag::Update => "update",
        KeyFlag::Insert => "insert",
        KeyFlag::Delete => "delete",
    };
    word.to_owned()
}

fn key_flags(key: &KeySpec) -> BTreeSet<String> {
    key.flags.iter().copied().map(key_flag).collect()
}

fn key_flags_are_as_in_the_table(server: &Server, protocol: Protocol) {
    // ACL rules such as %R~ are judged by them.
    let mut conn = server.connect(protocol);
    for spec in COMMANDS {
        let info = command_info(&mut conn, spec.name);
        let live = info[8].as_array();
        assert_eq!(live.len(), usize::from(spec.key.is_some()), "{}", spec.name);
        if let (Some(key), [live]) = (spec.key, live) {
            assert_eq!(words(live.field("flags")), key_flags(&key), "{}", spec.name);
            let notes = live.get("notes").map(|notes| notes.as_str().to_owned());
            assert_eq!(notes.as_deref(), key.notes, "{}", spec.name);
        }
    }
}

#[track_caller]
fn command_docs(conn: &mut Conn, spec: &CommandSpec) -> Reply {
    conn.cmd(&["COMMAND", "DOCS", spec.name]).field(spec.name).clone()
}

fn documentation_is_as_in_the_table(server: &Server, protocol: Protocol) {
    // What `valkey-cli` and documentation tools show.
    let mut conn = server.connect(protocol);
    for spec in COMMANDS {
        let docs = command_docs(&mut conn, spec);
        assert_eq!(docs.field("summary").as_str(), spec.summary, "{}", spec.name);
        assert_eq!(docs.field("complexity").as_str(), spec.complexity, "{}", spec.name);
        assert_eq!(docs.field("since").as_str(), spec.since, "{}", spec.name);
        assert_eq!(docs.field("group").as_str(), "module", "{}", spec.name);
        assert_eq!(docs.field("module").as_str(), "flock", "{}", spec.name);
    }
}

fn arguments_are_as_in_the_table(server: &Server, protocol: Protocol) {
    // Every argument, in order, with its type, its option word and its parts: hints and generated clients are made of this.
    let mut conn = server.connect(protocol);
    for spec in COMMANDS {
        let docs = command_docs(&mut conn, spec);
        assert_arguments(docs.get("arguments"), spec.args, spec.name);
    }
}

#[track_caller]
fn assert_arguments(live: Option<&Reply>, table: &[ArgSpec], command: &str) {
    let live = live.map_or(&[][..], Reply::as_array);
    let names: Vec<_> = live.iter().map(|arg| arg.field("name").as_str()).collect();
    let expected: Vec<_> = table.iter().map(|arg| arg.name).collect();
    assert_eq!(names, expected, "{command}");
    for (live, arg) in live.iter().zip(table) {
        let text = |field: &str| live.get(field).map(|value| value.as_str().to_owned());
        let kind = match arg.kind {
            ArgKind::String => "string",
            ArgKind::Integer => "integer",
            ArgKind::Key => "key",
            ArgKind::Pattern => "pattern",
            ArgKind::PureToken => "pure-token",
            ArgKind::OneOf => "oneof",
            ArgKind::Block => "block",
        };
        assert_eq!(text("type").as_deref(), Some(kind), "{command} {}", arg.name);
        assert_eq!(text("token").as_deref(), arg.token, "{command} {}", arg.name);
        assert_eq!(text("summary").as_deref(), arg.summary, "{command} {}", arg.name);
        let optional = live.get("flags").is_some_and(|flags| words(flags).contains("optional"));
        assert_eq!(optional, arg.optional, "{command} {}", arg.name);
        assert_arguments(live.get("arguments"), arg.args, command);
    }
}

/// A request of each command that has a key, the key being `the-key`.
const WITH_A_KEY: [&[&str]; 9] = [
    &["FLOCK.ACQUIRE", "the-key", "owner", "5000"],
    &["FLOCK.ACQUIRE", "the-key", "owner", "5000", "SHARED", "LIMIT", "2", "LABEL", "other-key", "CHANNEL", "c"],
    &["FLOCK.RELEASE", "the-key", "owner", "TOKEN", "5", "ALL"],
    &["FLOCK.RENEW", "the-key", "owner", "5000", "TOKEN", "5"],
    &["FLOCK.CHECK", "the-key", "5"],
    &["FLOCK.INFO", "the-key", "LIMIT", "5"],
    &["FLOCK.REVOKE", "the-key"],
    &["FLOCK.REVOKE", "the-key", "OWNER", "owner"],
    &[APPLY, "END 5", "the-key"],
];

fn keys_of_a_request_are_found(server: &Server, protocol: Protocol) {
    // Proxies and cluster clients ask the server where the key is.
    let mut conn = server.connect(protocol);
    for request in WITH_A_KEY {
        let question = [&["COMMAND", "GETKEYS"], request].concat();
        assert_eq!(conn.cmd(&question), Reply::Array(vec![Reply::bulk("the-key")]), "{request:?}");
    }
}

fn keys_of_a_request_are_found_with_their_flags(server: &Server, protocol: Protocol) {
    // The same, with what the command does to the key.
    let mut conn = server.connect(protocol);
    for request in WITH_A_KEY {
        let question = [&["COMMAND", "GETKEYSANDFLAGS"], request].concat();
        let reply = conn.cmd(&question);
        let [key_and_flags] = reply.as_array() else { panic!("{request:?}: {reply}") };
        let spec = COMMANDS.iter().find(|spec| spec.name == request[0]);
        let key = spec.and_then(|spec| spec.key).expect("the command has a key");
        assert_eq!(key_and_flags.as_array()[0].as_str(), "the-key");
        assert_eq!(words(&key_and_flags.as_array()[1]), key_flags(&key), "{request:?}");
    }
}

fn requests_without_a_key_have_none(server: &Server, protocol: Protocol) {
    // LIST spans all keys; an internal MARK concerns none. Neither may be taken for a request about some key.
    let mut conn = server.connect(protocol);
    for request in [&["FLOCK.LIST"][..], &["FLOCK.LIST", "MATCH", "the-key"], &[APPLY, "MARK 5"]] {
        let question = [&["COMMAND", "GETKEYS"], request].concat();
        let reply = conn.cmd(&question);
        let none = reply == Reply::Array(vec![]) || reply.error_code() == Some("ERR");
        assert!(none, "{request:?}: {reply}");
    }
}

fn only_the_internal_command_is_refused_to_clients(server: &Server, protocol: Protocol) {
    // No flag hides a command from users, so it must refuse them itself; and no other command may. The shortest request of each, all
    // arguments "1".
    let mut conn = server.connect(protocol);
    for spec in COMMANDS {
        let count = usize::try_from(spec.arity.unsigned_abs()).expect("an arity is small");
        let mut request = vec!["1"; count];
        request[0] = spec.name;
        let reply = conn.cmd(&request);
        assert_eq!(reply.error_code().is_some(), spec.name == APPLY, "{request:?}: {reply}");
    }
}
