//! A test that needs a process of its own: to be stopped, or because what it watches belongs to the process. It is this binary again,
//! told to run that one test.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use flock_tests::wait::wait_until;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Tells the child that it is one, and what it is to work on.
const TASK: &str = "FLOCK_CHILD_TASK";
/// Stands before what the child says: the test harness says something too.
const MARK: &str = "> ";

/// What this process is to do, if it is a child.
pub(crate) fn task() -> Option<String> {
    std::env::var(TASK).ok()
}

/// Says something to the parent.
pub(crate) fn say(text: &str) {
    println!("\n{MARK}{text}");
}

/// Runs the body of the test with this name, and it alone, in a process of its own.
#[track_caller]
pub(crate) fn alone(test: &str, body: impl FnOnce()) {
    if task().is_some() {
        return body();
    }
    let output = command(test, "").output().expect("this binary can be started");
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{said}\n{complained}");
}

fn command(test: &str, task: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this binary has a path"));
    command.args(["--exact", test, "--nocapture"]).env(TASK, task);
    command
}

/// A process that runs the test with this name; killed when dropped.
pub(crate) struct Apart {
    child: Child,
    input: ChildStdin,
    said: Receiver<String>,
}

impl Apart {
    #[track_caller]
    pub(crate) fn start(test: &str, task: &str) -> Self {
        Self::start_in(test, task, &[])
    }

    /// The same, with environment variables of its own.
    #[track_caller]
    pub(crate) fn start_in(test: &str, task: &str, env: &[(&str, &Path)]) -> Self {
        let mut command = command(test, task);
        command.envs(env.iter().copied());
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("this binary can be started");
        let (input, output) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        let (sender, said) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if let Some(text) = line.strip_prefix(MARK)
                    && sender.send(text.to_owned()).is_err()
                {
                    break;
                }
            }
        });
        Self { child, input, said }
    }

    /// Writes a line that the child may read.
    #[track_caller]
    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.input, "{line}").and_then(|()| self.input.flush()).expect("the child reads");
    }

    /// The next thing it says.
    #[track_caller]
    pub(crate) fn hear(&self, within: Duration) -> String {
        self.said.recv_timeout(within).expect("the child says something in time")
    }

    /// Stops it where it is, and returns when it has stopped.
    #[track_caller]
    pub(crate) fn stop(&self, within: Duration) {
        kill(self.pid(), Signal::SIGSTOP).expect("the child is there");
        wait_until("the child has stopped", within, || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap_or_default();
            stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
        });
    }

    #[track_caller]
    pub(crate) fn go_on(&self) {
        kill(self.pid(), Signal::SIGCONT).expect("the child is there");
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id()).expect("a pid fits in 31 bits"))
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
