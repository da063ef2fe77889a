//! What flockctl prints: `ls`, `info`, `revoke`, `bench`, the generated files; and how it finds its server.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use flock_tests::args;
use flock_tests::on_own_servers;
use flock_tests::resp::Protocol;
use flock_tests::server::Builder;
use serde_json::{Value, json};

use crate::scene::{ask, finish, flockctl, held, hold, wait_until_waiting};

on_own_servers![
    held_locks_are_listed,
    list_is_whole_over_many_pages,
    one_lock_is_shown_with_holders_and_waiters,
    free_lock_is_nothing,
    holds_are_revoked,
    hold_of_one_owner_is_revoked,
    revocation_without_a_terminal_needs_a_yes,
    bytes_that_are_no_text_go_both_ways,
    labels_cannot_drive_a_terminal,
    snapshot_of_top,
    bench_measures_and_leaves_nothing,
    unreachable_server_has_its_code,
    password_is_taken_from_the_environment_and_never_shown,
    server_without_the_module_refuses,
    wrong_use_has_its_code,
    completions_and_man_pages_are_generated,
    page_names_every_option_and_no_other,
];

#[track_caller]
fn json_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn held_locks_are_listed(builder: Builder) {
    let server = builder.start();
    assert_eq!(finish(flockctl(&server, &["ls", "--json"])).out.trim(), "[]");
    let token = hold(&server, "order:1", "alice");
    hold(&server, "other", "bob");
    let list = finish(flockctl(&server, &["ls", "order:*"]));
    let lines: Vec<Vec<_>> = list.out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["KEY", "MODE", "HOLDERS", "WAITERS", "TOKEN", "LEFT", "OWNER"]);
    assert_eq!(lines[1][..5], ["order:1", "exclusive", "1", "0", &token.to_string()]);
    assert_eq!((lines.len(), lines[1].last(), list.code), (2, Some(&"alice"), Some(0)));
    assert!(!list.out.contains('\x1b'), "{}", list.out);
    let list = json_of(&finish(flockctl(&server, &["ls", "--json"])).out);
    let left = list[0]["left_ms"].as_u64().unwrap();
    assert!((50_000..=60_000).contains(&left));
    let expected = json!({"key": "order:1", "mode": "exclusive", "holder_count": 1, "waiter_count": 0, "owner": "alice",
        "token": token, "left_ms": left});
    assert_eq!(list[0], expected);
    assert_eq!(list[1]["key"], "other");
    let list = json_of(&finish(flockctl(&server, &["ls", "--owner", "bob", "--json"])).out);
    assert_eq!((list.as_array().unwrap().len(), &list[0]["key"]), (1, &json!("other")));
}

fn list_is_whole_over_many_pages(builder: Builder) {
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    for number in 0..2_500 {
        conn.cmd(&args!["FLOCK.ACQUIRE", format!("k{number}"), "alice", 60_000]).as_token();
    }
    let list = json_of(&finish(flockctl(&server, &["ls", "--json"])).out);
    assert_eq!(list.as_array().unwrap().len(), 2_500);
}

fn one_lock_is_shown_with_holders_and_waiters(builder: Builder) {
    let server = builder.start();
    let token = hold(&server, "k", "alice");
    let mut waiter = server.connect(Protocol::Resp2);
    waiter.send(&args!["FLOCK.ACQUIRE", "k", "bob", 5000, "SHARED", "BLOCK", 0, "LABEL", "later"]);
    server.wait_until_blocked(&waiter);
    let info = finish(flockctl(&server, &["info", "k"]));
    assert_eq!(info.code, Some(0));
    assert!(info.out.starts_with("k: exclusive, 1 holding, 1 waiting\n"), "{}", info.out);
    for expected in [token.to_string().as_str(), "alice", "why", "bob", "shared", "later"] {
        assert!(info.out.contains(expected), "{expected} is not in {}", info.out);
    }
    let info = json_of(&finish(flockctl(&server, &["info", "k", "--json"])).out);
    assert_eq!(info["holders"][0]["token"], token);
    assert_eq!(info["holders"][0]["label"], "why");
    assert_eq!(info["holders"][0]["state"], "held");
    assert_eq!(info["waiters"][0]["owner"], "bob");
    assert_eq!(info["waiters"][0]["position"], 1);
    let info = json_of(&finish(flockctl(&server, &["info", "k", "--json", "--waiters", "0"])).out);
    assert_eq!((&info["waiter_count"], &info["waiters"]), (&json!(1), &json!([])));
}

fn free_lock_is_nothing(builder: Builder) {
    let server = builder.start();
    let info = finish(flockctl(&server, &["info", "k"]));
    assert_eq!((info.code, info.out.as_str()), (Some(1), "k is free\n"));
    let info = finish(flockctl(&server, &["info", "k", "--json"]));
    assert_eq!((info.code, info.out.as_str()), (Some(1), "null\n"));
}

fn holds_are_revoked(builder: Builder) {
    let server = builder.start();
    hold(&server, "k", "alice");
    let revoked = finish(flockctl(&server, &["revoke", "k", "--yes"]));
    assert_eq!((revoked.code, revoked.out.as_str()), (Some(0), "1 ended\n"));
    assert_eq!(held(&server), 0);
    let revoked = finish(flockctl(&server, &["revoke", "k", "--yes", "--json"]));
    assert_eq!((revoked.code, json_of(&revoked.out)), (Some(1), json!({"revoked": 0})));
}

fn hold_of_one_owner_is_revoked(builder: Builder) {
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let [mut alice, mut bob] = ["alice", "bob"]
        .map(|owner| conn.cmd(&args!["FLOCK.ACQUIRE", "k", owner, 60_000, "SHARED"]).as_token().to_string());
    let is_held = |token: &str| ask(&server, &["FLOCK.CHECK", "k", token]).as_int() == 1;
    let revoked = finish(flockctl(&server, &["revoke", "k", "--yes", "--token", "1"]));
    assert_eq!((revoked.code, is_held(&alice), is_held(&bob)), (Some(1), true, true));
    let revoked = finish(flockctl(&server, &["revoke", "k", "--yes", "--token", &alice]));
    assert_eq!((revoked.code, is_held(&alice), is_held(&bob)), (Some(0), false, true));
    std::mem::swap(&mut alice, &mut bob);
    let revoked = finish(flockctl(&server, &["revoke", "k", "--yes", "--owner", "carol"]));
    assert_eq!((revoked.code, is_held(&alice)), (Some(1), true));
    let revoked = finish(flockctl(&server, &["revoke", "k", "--yes", "--owner", "bob"]));
    assert_eq!((revoked.code, is_held(&alice)), (Some(0), false));
}

fn revocation_without_a_terminal_needs_a_yes(builder: Builder) {
    let server = builder.start();
    hold(&server, "k", "alice");
    let refused = finish(flockctl(&server, &["revoke", "k"]));
    assert_eq!((refused.code, held(&server)), (Some(64), 1));
    assert!(refused.err.contains("--yes"), "{}", refused.err);
}

fn bytes_that_are_no_text_go_both_ways(builder: Builder) {
    let server = builder.start();
    let (key, owner) = (b"caf\xe9\n", b"\xff\x00me");
    let mut conn = server.connect(Protocol::Resp2);
    conn.cmd(&args!["FLOCK.ACQUIRE", &key[..], &owner[..], 60_000]).as_token();
    let list = finish(flockctl(&server, &["ls"]));
    assert!(list.out.contains("caf\\xe9\\n") && list.out.contains("\\xff\\0me"), "{}", list.out);
    let list = json_of(&finish(flockctl(&server, &["ls", "--json"])).out);
    assert_eq!((&list[0]["key"], &list[0]["owner"]), (&json!({"hex": "636166e90a"}), &json!({"hex": "ff006d65"})));
    let key = OsStr::from_bytes(key);
    assert_eq!(finish(flockctl(&server, &[OsStr::new("info"), key])).code, Some(0));
    assert_eq!(finish(flockctl(&server, &[OsStr::new("revoke"), OsStr::new("--yes"), key])).code, Some(0));
    let command = ["sh", "-c", "printf %s \"$FLOCK_KEY\" | od -An -tx1"].map(OsStr::new);
    let run = finish(flockctl(&server, &[&[OsStr::new("run"), key], &command[..]].concat()));
    assert_eq!(run.out.trim(), "63 61 66 e9 0a");
}

fn labels_cannot_drive_a_terminal(builder: Builder) {
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 60_000, "LABEL", "\x1b]0;title\x07"]).as_token();
    let info = finish(flockctl(&server, &["info", "k"]));
    assert!(!info.out.contains('\x1b') && info.out.contains("\\u{1b}]0;title"), "{}", info.out);
}

fn snapshot_of_top(builder: Builder) {
    let server = builder.start();
    hold(&server, "quiet", "alice");
    hold(&server, "wanted", "alice");
    let mut waiter = server.connect(Protocol::Resp2);
    waiter.send(&args!["FLOCK.ACQUIRE", "wanted", "bob", 5000, "BLOCK", 0]);
    wait_until_waiting(&server, 1);
    let top = finish(flockctl(&server, &["top"]));
    assert_eq!(top.code, Some(0));
    assert!(top.out.starts_with("2 held, 1 waiting\nsince the start: 2 grants"), "{}", top.out);
    assert!(top.out.find("wanted") < top.out.find("quiet"), "{}", top.out); // the longest queue first
    assert!(!top.out.contains('\x1b'));
    let top = json_of(&finish(flockctl(&server, &["top", "--json", "q*"])).out);
    assert_eq!((&top["stats"]["flock_held"], &top["locks"][0]["key"]), (&json!(2), &json!("quiet")));
}

fn bench_measures_and_leaves_nothing(builder: Builder) {
    let server = builder.start();
    let bench = finish(flockctl(&server, &["bench", "--time", "200ms", "--tasks", "4", "--json"]));
    let report = json_of(&bench.out);
    assert_eq!((bench.code, &report["tasks"]), (Some(0), &json!(4)));
    assert!(report["pairs_per_second"].as_f64().unwrap() > 0.0);
    for name in ["ping", "acquire", "release", "handoff"] {
        let [count, p50, p99] = ["count", "p50_us", "p99_us"].map(|field| report[name][field].as_u64().unwrap());
        assert!(count > 0 && p50 > 0 && p50 <= p99, "{name}: {report}");
    }
    assert_eq!(ask(&server, &["DBSIZE"]).as_int(), 0);
    let bench = finish(flockctl(&server, &["bench", "--time", "50ms"]));
    assert!(bench.out.contains("try-and-release pairs a second: 16 tasks"), "{}", bench.out);
    assert_eq!(ask(&server, &["DBSIZE"]).as_int(), 0);
}

fn unreachable_server_has_its_code(builder: Builder) {
    let server = builder.start();
    for command in [&["ls"][..], &["info", "k"], &["run", "k", "true"], &["top"], &["bench"]] {
        let options = ["--url", "valkey://127.0.0.1:1", "--connect-timeout", "100ms"];
        let failed = finish(flockctl(&server, &[&options, command].concat()));
        assert_eq!(failed.code, Some(69), "{command:?}");
        assert!(failed.err.contains("the server cannot be reached: Connection refused"), "{}", failed.err);
    }
}

fn password_is_taken_from_the_environment_and_never_shown(builder: Builder) {
    let server = builder.config("requirepass", "p@ss/%41").start();
    let with_password = |password: &str, args: &[&str]| {
        let mut command = flockctl(&server, args);
        command.env("FLOCK_PASSWORD", password);
        finish(command)
    };
    assert_eq!(with_password("p@ss/%41", &["ls"]).code, Some(0));
    let refused = with_password("hunter2", &["ls"]);
    assert_eq!(refused.code, Some(76), "{}", refused.err);
    assert!(!refused.err.contains("hunter2"), "{}", refused.err);
    assert_eq!(finish(flockctl(&server, &["ls"])).code, Some(76));
    for args in [&["--help"][..], &["ls", "--help"], &["--url", "valkey://:hunter2@h:x", "ls"], &["nonsense"]] {
        let mut command = flockctl(&server, args);
        command.env("FLOCK_URL", "valkey://:hunter2@127.0.0.1:1");
        let said = finish(command);
        assert!(!(said.out + &said.err).contains("hunter2"), "{args:?}");
    }
}

fn server_without_the_module_refuses(builder: Builder) {
    let server = builder.without_module().start();
    let refused = finish(flockctl(&server, &["run", "k", "echo", "ran"]));
    assert_eq!((refused.code, refused.out.as_str()), (Some(76), ""));
    assert!(refused.err.contains("has not loaded FLOCK's module"), "{}", refused.err);
}

fn wrong_use_has_its_code(builder: Builder) {
    let server = builder.start();
    let wrong = [
        &[][..],
        &["dance"],
        &["run", "k"],
        &["run", "--wait", "soon", "k", "true"],
        &["run", "--lease", "0s", "k", "true"],
        &["run", "--session", "1s", "k", "true"],
        &["run", "--limit", "0", "k", "true"],
        &["--url", "http://h", "ls"],
        &["top", "--interval", "0s"],
    ];
    for args in wrong {
        let failed = finish(flockctl(&server, args));
        assert_eq!((failed.code, failed.out.as_str()), (Some(64), ""), "{args:?}: {}", failed.err);
        assert!(!failed.err.is_empty());
    }
    assert_eq!(finish(flockctl(&server, &["--version"])).code, Some(0));
}

fn completions_and_man_pages_are_generated(builder: Builder) {
    let server = builder.start();
    for shell in ["bash", "zsh", "fish"] {
        let script = finish(flockctl(&server, &["completions", shell]));
        assert!(script.code == Some(0) && script.out.contains("revoke"), "{shell}");
    }
    let man = finish(flockctl(&server, &["man"]));
    assert!(man.out.contains(".TH flockctl") && man.out.contains("FLOCK_URL"), "{}", man.out);
    assert!(!man.out.contains("become-the-command"));
    let dir = server.dir().join("man");
    std::fs::create_dir(&dir).unwrap();
    assert_eq!(finish(flockctl(&server, &["man", "--dir", dir.to_str().unwrap()])).code, Some(0));
    assert!(dir.join("flockctl-run.1").exists());
}

fn page_names_every_option_and_no_other(builder: Builder) {
    let server = builder.start();
    let options = |text: &str| -> BTreeSet<String> {
        let begins = text.match_indices("--").map(|(begin, _)| &text[begin + 2..]);
        let names = begins.map(|rest| rest.split(|c: char| !(c.is_ascii_lowercase() || c == '-')).next().unwrap());
        names.filter(|name| name.starts_with(|c: char| c.is_ascii_lowercase())).map(str::to_owned).collect()
    };
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/FLOCKCTL.md")).unwrap();
    let mut known = BTreeSet::new();
    for subcommand in ["run", "ls", "info", "top", "revoke", "bench", "completions", "man"] {
        let help = finish(flockctl(&server, &[subcommand, "--help"]));
        known.extend(options(&help.out));
        assert!(page.contains(&format!("{subcommand} ")), "the page does not tell of {subcommand}");
    }
    known.remove("help");
    let mut shown = options(&page);
    shown.remove("release"); // cargo's
    assert_eq!(shown, known);
}
