//! The README and the pages under docs/ say what is true: every block is executed, every table is compared with the code.
//!
//! How a block is read follows from the word after its fence:
//!
//! | word | what happens |
//! |---|---|
//! | `console` | a session: each command is run, and what it prints is compared with what is shown ([`session`]) |
//! | `sh` | each line is run and must succeed; of `make`, only that there is such a target |
//! | `conf` | a server is started with these lines, and must answer |
//! | `python`, `js`, `go` | the FLOCK command in each call is sent to a server, and must not be refused |
//! | `sql` | a fenced write, run in SQLite against what other holders left there |
//! | `text` | not run: grammars, diagrams; the syntax of a command is compared with the core's table |
//!
//! Any other word is refused, so that no block escapes.

mod page;
mod session;
mod terminal;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Command;

use flock_core::wire::error::ErrorCode;
use flock_core::wire::spec::{ArgKind, ArgSpec, COMMANDS, CommandSpec};
use flock_tests::args;
use flock_tests::on_own_servers;
use flock_tests::resp::Protocol;
use flock_tests::server::{Builder, Server};

use page::{Block, Page, root};
use session::Session;

on_own_servers![
    readme_sessions_go_as_shown,
    commands_sessions_go_as_shown,
    guarantees_sessions_go_as_shown,
    operations_sessions_go_as_shown,
    other_sessions_go_as_shown,
    shown_configurations_start,
    calls_of_client_libraries_are_accepted,
    config_tables_agree_with_the_server,
    info_table_agrees_with_the_server,
];

fn readme_sessions_go_as_shown(builder: Builder) {
    sessions_go_as_shown(&builder, "README.md");
}

fn commands_sessions_go_as_shown(builder: Builder) {
    sessions_go_as_shown(&builder, "docs/COMMANDS.md");
}

fn guarantees_sessions_go_as_shown(builder: Builder) {
    sessions_go_as_shown(&builder, "docs/GUARANTEES.md");
}

fn operations_sessions_go_as_shown(builder: Builder) {
    sessions_go_as_shown(&builder, "docs/OPERATIONS.md");
}

fn other_sessions_go_as_shown(builder: Builder) {
    let own_test = ["README.md", "docs/COMMANDS.md", "docs/GUARANTEES.md", "docs/OPERATIONS.md"];
    for page in Page::all().iter().filter(|page| !own_test.contains(&page.path.as_str())) {
        sessions_go_as_shown(&builder, &page.path);
    }
}

/// Each block has a server of its own, so that it means the same wherever it stands.
#[track_caller]
fn sessions_go_as_shown(builder: &Builder, path: &str) {
    let blocks = Page::read(path).blocks();
    let failures: Vec<String> = blocks
        .iter()
        .filter(|block| ["console", "sh"].contains(&block.kind.as_str()))
        .filter_map(|block| Session::run(&builder.start(), block).err())
        .collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn shown_configurations_start(builder: Builder) {
    // A setting that the module renamed would stop the server of everybody who copied the page.
    let module = std::env::var("FLOCK_MODULE").expect("`make test` sets FLOCK_MODULE");
    for block in blocks_of_kind("conf") {
        let lines = block.lines.iter().map(|line| line.split('#').next().unwrap_or_default().trim());
        let builder = lines.filter(|line| !line.is_empty()).fold(builder.clone().without_module(), |builder, line| {
            let (name, value) = line.split_once(' ').unwrap_or_else(|| panic!("{}: \"{line}\"", block.place));
            builder.config(name, value.replace("/path/to/libflock.so", &module))
        });
        let server = builder.try_start().unwrap_or_else(|failure| panic!("{}: {}", block.place, failure.log));
        if block.lines.iter().any(|line| line.starts_with("loadmodule")) {
            let listed = server.connect(Protocol::Resp2).cmd(&["FLOCK.LIST"]);
            assert_eq!(listed.error_code(), None, "{}", block.place);
        }
    }
}

fn calls_of_client_libraries_are_accepted(builder: Builder) {
    // The libraries are not installed here; what they send is known: the strings and numbers of the call, in order.
    let server = builder.start();
    for kind in ["python", "js", "go"] {
        let blocks = blocks_of_kind(kind);
        let lines = blocks.iter().flat_map(|block| block.lines.iter().map(move |line| (&block.place, line)));
        for (place, line) in lines.filter(|(_, line)| line.contains("FLOCK.")) {
            let mut conn = server.connect(Protocol::Resp2);
            let command = terminal::call_args(line);
            let reply = conn.cmd(&command);
            assert_eq!(reply.error_code(), None, "{place}: {command:?}: {reply}");
        }
    }
}

#[test]
fn rust_is_compiled_elsewhere() {
    // The first page of the client's documentation is compiled as a test of the client, the fenced write with its example; what the
    // pages show is taken from there.
    let read =
        |path: &str| std::fs::read_to_string(page::root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
    let (first_page, example) = (read("client/src/lib.rs"), read("examples/fenced-storage/src/postgres.rs"));
    let first_page = first_page.lines().filter_map(|line| line.strip_prefix("//!"));
    let compiled: Vec<&str> = first_page.chain(example.lines()).map(str::trim).collect();
    let blocks = blocks_of_kind("rust");
    assert!(!blocks.is_empty(), "README.md shows how to use the client");
    for line in blocks.iter().flat_map(|block| &block.lines) {
        assert!(compiled.contains(&line.trim()), "this line is compiled nowhere: {line}");
    }
}

#[test]
fn every_block_is_of_a_known_kind() {
    let known = ["console", "sh", "conf", "python", "js", "go", "rust", "sql", "text"];
    for block in Page::all().iter().flat_map(Page::blocks) {
        assert!(
            known.contains(&block.kind.as_str()),
            "{}: a block of kind \"{}\" would not be checked",
            block.place,
            block.kind
        );
    }
}

#[test]
fn fenced_writes_refuse_the_stale_holder() {
    // The storage rule, tried in a real database: the statement is run against rows that other holders left behind.
    let blocks = blocks_of_kind("sql");
    assert!(!blocks.is_empty(), "no page shows a fenced write");
    for block in blocks {
        let script = "
import sqlite3, sys
statement = sys.stdin.read()
def rows(fence, owner):
    db = sqlite3.connect(':memory:')
    db.execute('create table accounts (id integer primary key, balance integer, fence integer, fence_owner text)')
    db.execute('insert into accounts values (1, 100, ?, ?)', (fence, owner))
    return db.execute(statement, {'balance': 90, 'id': 1, 'token': 70, 'owner': 'me'}).rowcount
assert rows(0, '') == 1, 'the first write is refused'
assert rows(69, 'other') == 1, 'a write with a higher token is refused'
assert rows(70, 'me') == 1, 'the same holder is refused'
assert rows(70, 'other') == 0, 'another owner with the same token is accepted'
assert rows(71, 'other') == 0, 'a stale holder is accepted'
";
        let output = run_with_input(Command::new("python3").args(["-c", script]), &block.lines.join("\n"));
        assert!(output.is_ok(), "{}: {}", block.place, output.unwrap_err());
    }
}

fn run_with_input(command: &mut Command, input: &str) -> Result<(), String> {
    use std::io::Write;
    use std::process::Stdio;
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("cannot run {command:?}: {error}"))?;
    let sent = child.stdin.take().map_or(Ok(()), |mut stdin| stdin.write_all(input.as_bytes()));
    let output = child.wait_with_output().map_err(|error| error.to_string())?;
    match sent {
        Ok(()) if output.status.success() => Ok(()),
        _ => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

#[test]
fn command_tables_agree_with_the_core() {
    let page = Page::read("docs/COMMANDS.md");
    let overview: BTreeMap<String, Vec<String>> = by_first_cell(page.table("All commands"));
    let commands: Vec<&CommandSpec> = COMMANDS.iter().collect();
    assert_eq!(overview.len(), commands.len(), "the table of all commands has other rows than the core");
    for spec in commands {
        let row = overview.get(&code(spec.name)).unwrap_or_else(|| panic!("{} is not in the table", spec.name));
        let expected = [spec.arity.to_string(), code(spec.flags), code(spec.acl_categories)];
        assert_eq!(row[1..4], expected, "{}", spec.name);
    }
}

#[test]
fn command_sections_agree_with_the_core() {
    let page = Page::read("docs/COMMANDS.md");
    for spec in COMMANDS.iter().filter(|spec| !spec.name.contains('_')) {
        let section = page.section(spec.name).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(section.contains(spec.summary), "{}: the summary is not \"{}\"", spec.name, spec.summary);
        assert!(section.contains(spec.complexity), "{}: the complexity is not \"{}\"", spec.name, spec.complexity);
        let syntax = page.blocks_under(spec.name).into_iter().find(|block| block.kind == "text");
        let shown = syntax.map(|block| block.lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" "));
        assert_eq!(shown.as_deref(), Some(syntax_of(spec).as_str()), "{}: the syntax", spec.name);
        let rows: Vec<String> = page.table(spec.name).into_iter().map(|row| row[0].clone()).collect();
        assert_eq!(rows, arguments_of(spec.args), "{}: the arguments", spec.name);
    }
}

fn syntax_of(spec: &CommandSpec) -> String {
    let args = spec.args.iter().map(|arg| format!(" {}", syntax_of_arg(arg)));
    format!("{}{}", spec.name, args.collect::<String>())
}

fn syntax_of_arg(arg: &ArgSpec) -> String {
    let parts = |separator| arg.args.iter().map(syntax_of_arg).collect::<Vec<_>>().join(separator);
    let text = match (arg.kind, arg.token) {
        (ArgKind::OneOf, _) => parts(" | "),
        (ArgKind::Block, _) => parts(" "),
        (ArgKind::PureToken, token) => token.unwrap_or(arg.name).to_owned(),
        (_, Some(token)) => format!("{token} {}", arg.name),
        (_, None) => arg.name.to_owned(),
    };
    if arg.optional { format!("[{text}]") } else { text }
}

/// `key`, `SHARED`, `LIMIT n`: as the first column of a table shows them.
fn arguments_of(args: &[ArgSpec]) -> Vec<String> {
    args.iter()
        .flat_map(|arg| match arg.kind {
            ArgKind::OneOf | ArgKind::Block => arguments_of(arg.args),
            _ => vec![code(syntax_of_arg(&ArgSpec { optional: false, ..*arg }).as_str())],
        })
        .collect()
}

#[test]
fn error_table_agrees_with_the_core() {
    let shown = Page::read("docs/COMMANDS.md").table("Errors");
    let shown: Vec<[&str; 3]> = shown.iter().map(|row| [row[0].as_str(), row[1].as_str(), row[2].as_str()]).collect();
    let codes: Vec<String> = ErrorCode::ALL.iter().map(|error| code(error.code())).collect();
    let expected: Vec<[&str; 3]> = ErrorCode::ALL
        .iter()
        .zip(&codes)
        .map(|(error, code)| [code.as_str(), if error.is_retryable() { "yes" } else { "no" }, error.meaning()])
        .collect();
    assert_eq!(shown, expected);
}

fn config_tables_agree_with_the_server(builder: Builder) {
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let live = conn.cmd(&["CONFIG", "GET", "flock.*"]);
    let live: BTreeMap<String, String> =
        live.as_array().chunks(2).map(|pair| (code(pair[0].as_str()), pair[1].as_str().to_owned())).collect();
    for path in ["README.md", "docs/OPERATIONS.md"] {
        let table = Page::read(path).table("Configure");
        let names: BTreeSet<&String> = table.iter().map(|row| &row[0]).collect();
        assert_eq!(names, live.keys().collect(), "{path}: the settings");
        for row in &table {
            let (name, unit, range, default) = (&row[0], &row[1], &row[2], &row[3]);
            assert_eq!(plain_number(default), live[name], "{path}: the default of {name}");
            assert_eq!(unit, unit_of(name), "{path}: the unit of {name}");
            let set = |value: i128| {
                server.connect(Protocol::Resp2).cmd(&args!["CONFIG", "SET", name.trim_matches('`'), value])
            };
            if let Some((least, most)) = range.split_once(" to ") {
                let (least, most) = (number(least), number(most));
                assert_eq!(set(most).error_code(), None, "{path}: {name} = {most}");
                assert_eq!(set(most + 1).error_code(), Some("ERR"), "{path}: {name} = {most} + 1");
                assert_eq!(set(least).error_code(), None, "{path}: {name} = {least}");
                assert_eq!(set(least - 1).error_code(), Some("ERR"), "{path}: {name} = {least} - 1");
            } else {
                assert_eq!(range, "yes, no", "{path}: the range of {name}");
            }
        }
    }
}

/// The unit is the last word of the name, as everywhere in this project.
fn unit_of(name: &str) -> &'static str {
    match name.trim_matches('`').rsplit('-').next() {
        Some("ms") => "ms",
        Some("bytes") => "bytes",
        _ => "",
    }
}

fn plain_number(text: &str) -> String {
    text.replace(',', "")
}

#[track_caller]
fn number(text: &str) -> i128 {
    plain_number(text).parse().unwrap_or_else(|_| panic!("\"{text}\" is no number"))
}

fn info_table_agrees_with_the_server(builder: Builder) {
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let live = conn.cmd(&["INFO", "flock"]);
    let live: BTreeSet<String> =
        live.as_str().lines().filter_map(|line| line.split_once(':')).map(|(name, _)| code(name)).collect();
    let shown: Vec<String> =
        Page::read("docs/OPERATIONS.md").table("Monitor").into_iter().map(|row| row[0].clone()).collect();
    let known: BTreeSet<String> = shown.iter().cloned().collect();
    assert_eq!(known.len(), shown.len(), "a field stands twice in the table");
    assert_eq!(known, live);
}

#[test]
fn log_lines_are_those_of_the_code() {
    // Whoever greps a log for a line of the page must find it; a line that nobody writes any more must leave the page.
    let source: String = files_under("module/src").iter().map(|path| fs::read_to_string(path).unwrap()).collect();
    for row in Page::read("docs/OPERATIONS.md").table("What the log says") {
        for part in row[0].trim_matches('`').split("...").map(str::trim).filter(|part| !part.is_empty()) {
            assert!(source.contains(part), "no code writes \"{part}\"");
        }
    }
}

#[test]
fn futures_of_the_client_say_what_dropping_them_does() {
    // That there are sections for errors and panics is checked by clippy (`client/src/lib.rs`).
    const CANCEL_SAFETY: &str = "# Cancel safety";
    let (mut futures, mut complaints) = (0, Vec::new());
    for path in files_under("client/src") {
        let source = fs::read_to_string(&path).unwrap();
        let awaited: Vec<String> = source
            .lines()
            .filter_map(|line| line.strip_prefix("impl IntoFuture for ")?.split_whitespace().next())
            .map(|name| format!("pub struct {name} "))
            .collect();
        let mut described = false;
        for (number, line) in (1..).zip(source.lines().map(str::trim_start)) {
            let is_future = line.starts_with("pub async fn ")
                || line.starts_with("pub fn ") && line.contains("-> impl Future")
                || awaited.iter().any(|name| line.starts_with(name.as_str()));
            if is_future {
                futures += 1;
                if !described {
                    complaints.push(format!("{}:{number}: {line}", path.display()));
                }
            }
            let goes_on = line.starts_with("///") || line.starts_with("#[");
            described = goes_on && (described || line == format!("/// {CANCEL_SAFETY}"));
        }
    }
    assert!(futures > 20, "only {futures} futures were found");
    assert!(complaints.is_empty(), "without \"{CANCEL_SAFETY}\":\n{}", complaints.join("\n"));
}

#[test]
fn named_files_and_tests_exist() {
    // `path.rs` must be a file, and in `path.rs::name` it must have a function of that name.
    let mut complaints = Vec::new();
    for page in Page::all() {
        for (line, span) in page.code_spans() {
            let (path, function) =
                span.split_once("::").map_or((span.as_str(), None), |(path, name)| (path, Some(name)));
            let is_ours = path.split_once('/').is_some_and(|(top, _)| top != "target" && root().join(top).is_dir());
            if !is_ours || path.contains(['*', ' ', '<']) {
                continue;
            }
            let file = root().join(path);
            let found = file.exists()
                && function.is_none_or(|name| {
                    fs::read_to_string(&file).is_ok_and(|text| text.contains(&format!("fn {name}(")))
                });
            if !found {
                complaints.push(format!("{}:{line}: there is no `{span}`", page.path));
            }
        }
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

#[test]
fn every_guarantee_names_a_test() {
    // A promise that nothing shows is a wish. Where there is no test yet, the page says so.
    let page = Page::read("docs/GUARANTEES.md");
    for row in ["Safety", "Liveness", "Tokens"].into_iter().flat_map(|section| page.table(section)) {
        let shown_by = row.last().unwrap();
        assert!(shown_by.contains(".rs::") || shown_by.ends_with("no test yet"), "{} is shown by nothing", row[0]);
    }
}

#[test]
fn every_limit_names_a_test() {
    // What is not promised is part of the promise: whoever reads that it is so may see it.
    let page = Page::read("docs/GUARANTEES.md");
    for (section, mark) in [("What FLOCK cannot give you", "\n**"), ("Time", "\n* ")] {
        for limit in page.section(section).split(mark).filter(|limit| !limit.trim().is_empty()) {
            assert!(limit.contains(".rs::") || limit.contains("](#"), "nothing shows this: {limit}");
        }
    }
}

#[test]
fn every_trap_names_a_test() {
    // Knowledge that nothing checks is forgotten at the next change.
    let page = Page::read("docs/TRAPS.md");
    for row in page.sections().into_iter().flat_map(|section| page.table(section)) {
        assert!(row.last().is_some_and(|tests| tests.contains(".rs::")), "no test falls for: {}", row[0]);
    }
}

#[test]
fn every_report_about_another_lock_names_a_test() {
    // That the tests exist is seen above.
    let page = Page::read("docs/REPORTS.md");
    let rows: Vec<_> = page.sections().into_iter().flat_map(|section| page.table(section)).collect();
    assert_eq!(rows.len(), 57, "so many reports were collected");
    for row in rows {
        assert!(row[3].contains(".rs::"), "{} is answered by nothing", row[0]);
    }
}

#[test]
fn links_lead_somewhere() {
    let mut complaints = Vec::new();
    for page in Page::all() {
        for (line, target) in page.links() {
            if target.contains("://") {
                continue;
            }
            let (path, anchor) =
                target.split_once('#').map_or((target.as_str(), None), |(path, anchor)| (path, Some(anchor)));
            let base = root().join(&page.path);
            let file = if path.is_empty() { base } else { base.parent().unwrap().join(path) };
            let found = file.exists()
                && anchor.is_none_or(|anchor| {
                    fs::read_to_string(&file).is_ok_and(|text| page::anchors(&text).contains(anchor))
                });
            if !found {
                complaints.push(format!("{}:{line}: {target} leads nowhere", page.path));
            }
        }
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

#[test]
fn shown_make_targets_exist() {
    let makefile = fs::read_to_string(root().join("Makefile")).unwrap();
    for page in Page::all() {
        for (line, span) in page.code_spans() {
            if let Some(target) = span.strip_prefix("make ") {
                assert!(has_target(&makefile, target), "{}:{line}: there is no target in `{span}`", page.path);
            }
        }
    }
}

fn has_target(makefile: &str, target: &str) -> bool {
    makefile.lines().any(|line| line.split_once(':').is_some_and(|(name, _)| name == target))
}

#[test]
fn every_decision_is_linked_from_the_architecture() {
    let architecture = Page::read("docs/ARCHITECTURE.md");
    let linked: BTreeSet<String> = architecture.links().into_iter().map(|(_, target)| target).collect();
    for page in Page::all().iter().filter(|page| page.path.starts_with("docs/decisions/")) {
        let target = page.path.trim_start_matches("docs/");
        assert!(linked.contains(target), "{target} is not linked");
    }
}

/// The formatter of these tests stands in for valkey-cli: so it must print what valkey-cli prints.
#[test]
fn terminal_prints_what_valkey_cli_prints() {
    let server = Server::builder().start();
    let mut conn = server.connect(Protocol::Resp2);
    conn.cmd(&args!["FLOCK.ACQUIRE", "k", "a\"\n\x01é", 60_000, "REENTRANT", "one", "LABEL", ""]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", "other", "b", 60_000, "SHARED"]).as_token();
    let commands: [&[&str]; 7] = [
        &["FLOCK.LIST"],
        &["FLOCK.LIST", "MATCH", "no"],
        &["FLOCK.ACQUIRE", "k", "c", "1"],
        &["FLOCK.CHECK", "k", "1"],
        &["FLOCK.ACQUIRE", "k", "c"],
        &["FLOCK.INFO", "k"],
        &["SET", "s", "1"],
    ];
    let cli = std::env::var("VALKEY_CLI").expect("`make test` sets VALKEY_CLI");
    for (protocol, flag) in [(Protocol::Resp2, "-2"), (Protocol::Resp3, "-3")] {
        let mut conn = server.connect(protocol);
        for command in commands {
            let output = Command::new(&cli)
                .args([flag, "--no-raw", "-p", &server.port().to_string()])
                .args(command)
                .output()
                .expect("valkey-cli starts");
            let printed: Vec<String> = String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
            let ours = terminal::lines_of(&conn.cmd(command));
            let trimmed: Vec<String> = printed.iter().map(|line| line.trim_end().to_owned()).collect();
            assert_eq!(session::without_running_times(&ours), session::without_running_times(&trimmed), "{command:?}");
        }
    }
}

fn blocks_of_kind(kind: &str) -> Vec<Block> {
    let blocks = Page::all().into_iter().flat_map(|page| page.blocks());
    blocks.filter(|block| block.kind == kind).collect()
}

fn by_first_cell(rows: Vec<Vec<String>>) -> BTreeMap<String, Vec<String>> {
    rows.into_iter().map(|row| (row[0].clone(), row)).collect()
}

fn code(text: &str) -> String {
    format!("`{text}`")
}

fn files_under(folder: &str) -> Vec<std::path::PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()) {
            if entry.is_dir() { folders.push(entry) } else { files.push(entry) }
        }
    }
    files
}
