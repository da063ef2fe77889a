//! A session as a page shows it: run against a server, and compared.
//!
//! ```text
//! $ valkey-cli -p 7379 PING          a shell command; port 7379 stands for the server's
//! alice> FLOCK.ACQUIRE jobs a 5000   a command typed into the terminal called alice: each name is a connection of its own
//! (integer) 6031254167076            what it prints, as valkey-cli does
//! bob> FLOCK.ACQUIRE jobs b 5000 BLOCK 0
//! alice> FLOCK.RELEASE jobs a        bob's command shows nothing so far: it must be waiting
//! (integer) 1
//! bob>                               what bob's terminal prints next
//! (integer) 6031254167077
//! ```
//!
//! What differs from run to run:
//! * A number of ten digits or more stands for one number of the run, the same wherever it is shown, also in a command; numbers
//!   that are in order on the page are in order in the run. So a shown token that comes back, or rises, must do so.
//! * Times that run (`left_ms`, `held_ms`, `waiting_ms`, `grace_left_ms`) match any number.
//! * `...` matches anything within a line; a line of its own, any lines.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::Server;

use super::page::{Block, root};
use super::{has_target, terminal};

const SHOWN_PORT: &str = "7379";
const NUMBER_DIGITS_MIN: usize = 10;
const RUNNING_TIMES: [&str; 4] = ["\"left_ms\"", "\"held_ms\"", "\"waiting_ms\"", "\"grace_left_ms\""];

/// One run of one block.
pub(super) struct Session<'a> {
    server: &'a Server,
    terminals: BTreeMap<String, Conn>,
    numbers: Numbers,
}

/// What is typed, and what is shown below it.
struct Step {
    prompt: String,
    typed: String,
    shown: Vec<String>,
}

impl Session<'_> {
    /// Runs a block.
    ///
    /// # Errors
    /// The session as it really went, if that was otherwise than shown.
    pub(super) fn run(server: &Server, block: &Block) -> Result<(), String> {
        let mut session = Session { server, terminals: BTreeMap::new(), numbers: Numbers::default() };
        let mut transcript = String::new();
        let mut difference = None;
        for step in steps(block) {
            transcript += format!("{} {}", step.prompt, step.typed).trim_end();
            transcript.push('\n');
            let actual = session.perform(&step).map_err(|why| format!("{}: {why}\n{transcript}", block.place))?;
            let Some(actual) = actual else { continue };
            transcript += &actual.iter().map(|line| format!("{line}\n")).collect::<String>();
            let shown = without_running_times(&step.shown);
            if !matches(&shown, &without_running_times(&actual), &mut session.numbers) {
                difference.get_or_insert(step);
            }
        }
        difference.map_or(Ok(()), |step| {
            Err(format!("{}: \"{}\" did not go as shown; the session went:\n{transcript}", block.place, step.typed))
        })
    }

    /// What the step prints; `None` if that is not compared.
    fn perform(&mut self, step: &Step) -> Result<Option<Vec<String>>, String> {
        let typed = self.numbers.of_this_run(&step.typed);
        if step.prompt == "$" {
            return self.shell(&typed);
        }
        let server = self.server;
        let conn = self.terminals.entry(step.prompt.clone()).or_insert_with(|| server.connect(Protocol::Resp2));
        let words = terminal::words(&typed);
        if !words.is_empty() {
            conn.send(&words);
        }
        if step.shown.is_empty() {
            server.wait_until_blocked(conn);
            return Ok(None);
        }
        let reply = conn.recv_within(ANSWER_WITHIN).map_err(|error| format!("no reply: {error:?}"))?;
        if words.first().is_some_and(|word| word == "QUIT") {
            self.terminals.remove(&step.prompt);
        }
        let is_report = words.first().is_some_and(|word| word == "INFO");
        Ok(Some(if is_report {
            reply.as_str().lines().map(str::to_owned).collect()
        } else {
            terminal::lines_of(&reply)
        }))
    }

    fn shell(&self, typed: &str) -> Result<Option<Vec<String>>, String> {
        if let Some(target) =
            typed.split_whitespace().skip_while(|word| word.contains('=')).collect::<Vec<_>>().strip_prefix(&["make"])
        {
            let makefile = fs::read_to_string(root().join("Makefile")).map_err(|error| error.to_string())?;
            let missing = target.iter().find(|target| !has_target(&makefile, target));
            return missing.map_or(Ok(None), |target| Err(format!("make has no target {target}")));
        }
        let port = self.server.port().to_string();
        let tools = self.server.dir().join("bin");
        put_valkey_cli_into(&tools).map_err(|error| error.to_string())?;
        let path = format!("{}:{}", tools.display(), std::env::var("PATH").unwrap_or_default());
        let output = Command::new("timeout")
            .args(["20", "sh", "-c", &typed.replace(SHOWN_PORT, &port)])
            .env("PATH", path)
            .current_dir(self.server.dir())
            .output()
            .map_err(|error| error.to_string())?;
        let printed = String::from_utf8_lossy(&output.stdout).replace(&port, SHOWN_PORT);
        if !output.status.success() {
            return Err(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr)));
        }
        Ok(Some(printed.lines().map(|line| line.trim_end().to_owned()).collect()))
    }
}

/// A valkey-cli that prints as on a terminal.
fn put_valkey_cli_into(folder: &std::path::Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let cli = std::env::var("VALKEY_CLI").expect("`make test` sets VALKEY_CLI");
    let script = folder.join("valkey-cli");
    if !script.exists() {
        fs::create_dir_all(folder)?;
        fs::write(&script, format!("#!/bin/sh\nexec \"{cli}\" --no-raw \"$@\"\n"))?;
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

fn steps(block: &Block) -> Vec<Step> {
    if block.kind == "sh" {
        let commands = block.lines.iter().filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
        return commands
            .map(|line| Step { prompt: "$".into(), typed: line.clone(), shown: vec!["...".into()] })
            .collect();
    }
    let mut steps: Vec<Step> = Vec::new();
    for line in &block.lines {
        match (prompt_of(line), steps.last_mut()) {
            (Some((prompt, typed)), _) => {
                steps.push(Step { prompt: prompt.to_owned(), typed: typed.to_owned(), shown: Vec::new() });
            }
            (None, Some(step)) => step.shown.push(line.trim_end().to_owned()),
            (None, None) => panic!("{}: the block does not begin with a prompt", block.place),
        }
    }
    steps
}

/// `$ typed`, `alice> typed`, or `alice>` alone.
fn prompt_of(line: &str) -> Option<(&str, &str)> {
    let (prompt, typed) = line.split_once(' ').unwrap_or((line, ""));
    let is_name = |name: &str| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_lowercase());
    (prompt == "$" || prompt.strip_suffix('>').is_some_and(is_name)).then_some((prompt, typed))
}

/// Times that run become `#`.
pub(super) fn without_running_times(lines: &[String]) -> Vec<String> {
    let mut after_name = false;
    lines
        .iter()
        .map(|line| {
            let is_time = |line: &str| RUNNING_TIMES.iter().any(|name| line.contains(name));
            let masked = if after_name || (is_time(line) && line.contains(" => ")) {
                let (before, _) = line.rsplit_once("(integer) ").unwrap_or((line, ""));
                format!("{before}(integer) #")
            } else {
                line.clone()
            };
            after_name = is_time(line) && !line.contains(" => ");
            masked
        })
        .collect()
}

/// The long numbers of a page, and what they are in this run.
#[derive(Clone, Default)]
struct Numbers(BTreeMap<u64, u64>);

impl Numbers {
    /// Takes note of a pair; `false` if it contradicts what is known.
    fn bind(&mut self, shown: u64, actual: u64) -> bool {
        let agrees = self.0.iter().all(|(known, real)| known.cmp(&shown) == real.cmp(&actual));
        self.0.insert(shown, actual);
        agrees
    }

    /// A command with the numbers of this run.
    fn of_this_run(&self, typed: &str) -> String {
        let mut text = String::new();
        let mut rest = typed;
        while let Some(at) = rest.find(|letter: char| letter.is_ascii_digit()) {
            text += &rest[..at];
            let digits = digits_of(&rest[at..]);
            let known = long_number(digits).and_then(|number| self.0.get(&number));
            text += &known.map_or(digits.to_owned(), u64::to_string);
            rest = &rest[at + digits.len()..];
        }
        text + rest
    }
}

fn digits_of(text: &str) -> &str {
    let end = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    &text[..end]
}

fn long_number(digits: &str) -> Option<u64> {
    (digits.len() >= NUMBER_DIGITS_MIN).then(|| digits.parse().ok()).flatten()
}

fn matches(shown: &[String], actual: &[String], numbers: &mut Numbers) -> bool {
    let (Some(first), rest) = (shown.first(), shown.get(1..).unwrap_or_default()) else {
        return actual.is_empty();
    };
    if first.trim() == "..." {
        return (0..=actual.len()).any(|skipped| {
            let mut tried = numbers.clone();
            let found = matches(rest, &actual[skipped..], &mut tried);
            if found {
                *numbers = tried;
            }
            found
        });
    }
    actual
        .split_first()
        .is_some_and(|(line, others)| line_matches(first, line, numbers) && matches(rest, others, numbers))
}

fn line_matches(shown: &str, actual: &str, numbers: &mut Numbers) -> bool {
    if let Some(rest) = shown.strip_prefix("...") {
        let mut ends = (0..=actual.len()).filter(|at| actual.is_char_boundary(*at));
        return ends.any(|at| {
            let mut tried = numbers.clone();
            let found = line_matches(rest, &actual[at..], &mut tried);
            if found {
                *numbers = tried;
            }
            found
        });
    }
    let (digits, actual_digits) = (digits_of(shown), digits_of(actual));
    if let (Some(number), Some(real)) = (long_number(digits), long_number(actual_digits)) {
        return numbers.bind(number, real)
            && line_matches(&shown[digits.len()..], &actual[actual_digits.len()..], numbers);
    }
    match (shown.chars().next(), actual.chars().next()) {
        (None, None) => true,
        (Some(letter), Some(real)) if letter == real => {
            line_matches(&shown[letter.len_utf8()..], &actual[real.len_utf8()..], numbers)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agree(shown: &[&str], actual: &[&str]) -> bool {
        let owned = |lines: &[&str]| lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>();
        matches(&owned(shown), &owned(actual), &mut Numbers::default())
    }

    #[test]
    fn long_numbers_stand_for_those_of_the_run() {
        assert!(agree(&["t 6031254167076", "6031254167077"], &["t 7000000000001", "7000000000005"]));
        // The same on the page, but not in the run; and the other way round; and out of order.
        assert!(!agree(&["6031254167076", "6031254167076"], &["7000000000001", "7000000000005"]));
        assert!(!agree(&["6031254167076", "6031254167077"], &["7000000000001", "7000000000001"]));
        assert!(!agree(&["6031254167076", "6031254167077"], &["7000000000005", "7000000000001"]));
        assert!(!agree(&["(integer) 1"], &["(integer) 2"]));
    }

    #[test]
    fn three_dots_match_anything() {
        assert!(agree(&["a", "...", "z"], &["a", "b", "c", "z"]));
        assert!(agree(&["a ... z"], &["a b z"]));
        assert!(!agree(&["a", "...", "z"], &["a", "b"]));
        assert!(!agree(&["a"], &["a", "b"]));
        assert!(!agree(&["a", "b"], &["a"]));
    }

    #[test]
    fn long_numbers_of_a_command_become_those_of_the_run() {
        let mut numbers = Numbers::default();
        assert!(numbers.bind(6_031_254_167_076, 7_000_000_000_001));
        assert_eq!(numbers.of_this_run("CHECK k1 6031254167076"), "CHECK k1 7000000000001");
        assert_eq!(numbers.of_this_run("CHECK 1234567890123 12"), "CHECK 1234567890123 12");
    }
}
