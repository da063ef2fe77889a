//! Reads `planted_bugs.md`, and plants its bugs.
//!
//! That the page fits the sources is tested always. Planting takes minutes, since each bug is compiled: `scripts/planted-bugs.sh`
//! asks for it by setting `FLOCK_PLANTED_BUGS`, to `all` or to the name of one bug.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Instant;

struct Bug {
    name: String,
    file: String,
    find: String,
    plant: String,
    /// Test program and test.
    caught_by: Vec<(String, String)>,
}

fn crate_folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|fault| panic!("{}: {fault}", path.display()))
}

fn bugs() -> Vec<Bug> {
    let page = read(&crate_folder().join("tests/planted_bugs.md"));
    let mut entries = page.split("\n## ");
    entries.next();
    entries.map(bug).collect()
}

fn bug(entry: &str) -> Bug {
    let name = entry.lines().next().unwrap_or_default().trim().to_owned();
    let values = |field: &str| -> Vec<String> {
        let start = format!("- {field}: `");
        let lines = entry.lines().filter_map(|line| line.strip_prefix(&start));
        lines
            .map(|line| line.strip_suffix('`').unwrap_or_else(|| panic!("{name}: {field} ends with `")).to_owned())
            .collect()
    };
    let value = |field: &str| {
        let [value] = <[String; 1]>::try_from(values(field)).unwrap_or_else(|_| panic!("{name}: one {field}"));
        value
    };
    let caught_by = values("caught by").into_iter().map(|test| {
        let (program, test) = test.split_once("::").unwrap_or_else(|| panic!("{name}: `program::test`"));
        (program.to_owned(), test.to_owned())
    });
    Bug { file: value("in"), find: value("find"), plant: value("plant"), caught_by: caught_by.collect(), name }
}

/// The source with the bug in it.
fn planted(bug: &Bug, source: &str) -> String {
    let found = source.matches(&bug.find).count();
    assert_eq!(found, 1, "{}: `{}` is found {found} times in {}", bug.name, bug.find, bug.file);
    source.replace(&bug.find, &bug.plant)
}

/// What the page says is found in the sources, and who shall catch it exists.
#[test]
fn every_planted_bug_fits_the_sources() {
    let bugs = bugs();
    let names: BTreeSet<&str> = bugs.iter().map(|bug| bug.name.as_str()).collect();
    assert_eq!(names.len(), bugs.len(), "a bug has a name of its own");
    assert!(bugs.len() >= 8, "{} bugs were read", bugs.len());
    for bug in &bugs {
        let source = read(&crate_folder().join("src").join(&bug.file));
        assert_ne!(planted(bug, &source), source, "{}: nothing is planted", bug.name);
        assert!(!bug.caught_by.is_empty(), "{}: nobody catches it", bug.name);
        for (program, test) in &bug.caught_by {
            let program = read(&crate_folder().join("tests").join(program).with_extension("rs"));
            let exists = program.lines().any(|line| line.trim() == test || line.trim() == format!("fn {test}() {{"));
            assert!(exists, "{}: there is no test {test}", bug.name);
        }
    }
}

/// Each bug, planted in a copy of the crate, makes each of its tests fail by an assertion.
#[test]
fn every_planted_bug_is_caught() {
    let Some(wanted) = std::env::var_os("FLOCK_PLANTED_BUGS") else {
        println!("not planted: scripts/planted-bugs.sh does it");
        return;
    };
    let bugs = bugs();
    let chosen: Vec<&Bug> = bugs.iter().filter(|bug| wanted == "all" || wanted == *bug.name).collect();
    assert!(!chosen.is_empty(), "there is no bug {}", wanted.display());
    let copy = CrateCopy::new();
    let mut missed = Vec::new();
    for bug in chosen {
        let began = Instant::now();
        let path = copy.folder.join("core/src").join(&bug.file);
        let source = read(&path);
        write(&path, &planted(bug, &source));
        missed.extend(copy.missed(bug));
        write(&path, &source);
        println!("{}: {:.0} s", bug.name, began.elapsed().as_secs_f64());
    }
    assert!(missed.is_empty(), "not caught:\n{}", missed.join("\n"));
}

fn write(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap_or_else(|fault| panic!("{}: {fault}", path.display()));
}

/// A workspace with nothing in it but a copy of this crate.
struct CrateCopy {
    folder: PathBuf,
}

impl CrateCopy {
    fn new() -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("planted-bugs");
        let root = crate_folder().parent().expect("the crate lies in the workspace");
        let manifest: String = read(&root.join("Cargo.toml"))
            .lines()
            .map(|line| match line.split_once(" = [") {
                Some(("members" | "default-members", _)) => {
                    line.split_once(" = ").map_or("", |(key, _)| key).to_owned() + " = [\"core\"]\n"
                }
                _ => line.to_owned() + "\n",
            })
            .collect();
        let _ = std::fs::remove_dir_all(folder.join("core"));
        copy_folder(crate_folder(), &folder.join("core"));
        write(&folder.join("Cargo.toml"), &manifest);
        write(&folder.join("Cargo.lock"), &read(&root.join("Cargo.lock")));
        Self { folder }
    }

    fn cargo(&self, arguments: &[&str]) -> Output {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["test", "--offline", "-p", "flock-core"]).args(arguments);
        cargo.current_dir(&self.folder).env("CARGO_TARGET_DIR", self.folder.join("target")).env("RUST_BACKTRACE", "0");
        cargo.output().expect("cargo runs")
    }

    /// The tests that do not catch the bug, and how.
    fn missed(&self, bug: &Bug) -> Vec<String> {
        let mut missed = Vec::new();
        for (program, test) in &bug.caught_by {
            let built = self.cargo(&["--test", program, "--no-run"]);
            if !built.status.success() {
                missed.push(format!("{}: does not compile\n{}", bug.name, String::from_utf8_lossy(&built.stderr)));
                return missed;
            }
            let run = self.cargo(&["--test", program, "--", "--exact", test, "--nocapture"]);
            let said = String::from_utf8_lossy(&run.stdout).into_owned() + &String::from_utf8_lossy(&run.stderr);
            let ran = said.contains("running 1 test");
            let asserted = said.contains("panicked at") && said.contains("test result: FAILED. 0 passed; 1 failed");
            if !(ran && asserted && !run.status.success()) {
                missed.push(format!("{}: by {program}::{test}", bug.name));
            }
        }
        missed
    }
}

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap_or_else(|fault| panic!("{}: {fault}", to.display()));
    let entries = std::fs::read_dir(from).unwrap_or_else(|fault| panic!("{}: {fault}", from.display()));
    for entry in entries {
        let from = entry.expect("the folder can be read").path();
        let to = to.join(from.file_name().expect("an entry has a name"));
        if from.is_dir() {
            copy_folder(&from, &to);
        } else {
            std::fs::copy(&from, &to).unwrap_or_else(|fault| panic!("{}: {fault}", from.display()));
        }
    }
}
