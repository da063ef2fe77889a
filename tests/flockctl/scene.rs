//! The stage: flockctl as a process whose lines, end and children can be waited for.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use flock_tests::args;
use flock_tests::reply::Reply;
use flock_tests::resp::Protocol;
use flock_tests::server::Server;
use flock_tests::wait::{wait_for, wait_until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// For `env`: nothing is ignored, whatever the tests were started with.
pub(crate) const DEFAULT_SIGNALS: &str = "--default-signal=HUP,INT,QUIT,TERM,USR1,USR2,TSTP";

/// For what takes a moment, on a busy machine.
pub(crate) const SOON: Duration = Duration::from_secs(10);

pub(crate) fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// The program: `$FLOCKCTL`, or as built from this tree.
pub(crate) fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| std::env::var_os("FLOCKCTL").map_or_else(build, PathBuf::from))
}

/// Cargo makes a package's programs for its own tests only, and these tests are of another package.
fn build() -> PathBuf {
    let test = std::env::current_exe().expect("a test has a file"); // <target>/<profile>/deps/flockctl-<hash>
    let target = test.ancestors().nth(3).expect("the test is in a target directory");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.args(["build", "--quiet", "--package", "flockctl", "--target-dir"]).arg(target);
    build.current_dir(env!("CARGO_MANIFEST_DIR"));
    // What `cargo test` says of this package: a build script that looks at it would make all above it be built again.
    for (name, _) in std::env::vars_os() {
        if ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|ours| name.as_encoded_bytes().starts_with(ours.as_bytes())) {
            build.env_remove(name);
        }
    }
    assert!(build.status().expect("cargo can be run").success(), "flockctl cannot be built");
    target.join("debug/flockctl")
}

/// flockctl for this server, with nothing in its environment that a test does not know of.
pub(crate) fn flockctl<A: AsRef<OsStr>>(server: &Server, args: &[A]) -> Command {
    let mut command = Command::new(program());
    set_environment(&mut command, server);
    command.args(args);
    command
}

pub(crate) fn set_environment(command: &mut Command, server: &Server) {
    command.env("FLOCK_URL", format!("valkey://{}", server.addr()));
    command.env_remove("FLOCK_PASSWORD").env_remove("NO_COLOR").env("TERM", "xterm");
}

/// The same, with no signal ignored: a shell that starts the tests with `&` ignores some, and that is inherited.
pub(crate) fn flockctl_with_all_signals<A: AsRef<OsStr>>(server: &Server, args: &[A]) -> Command {
    let mut command = Command::new("env");
    set_environment(&mut command, server);
    command.arg(DEFAULT_SIGNALS).arg(program()).args(args);
    command
}

/// A process that was started. It is killed when this is dropped.
pub(crate) struct Running {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    errors: Option<JoinHandle<String>>,
}

/// How a process has ended, and what it has said that was not read before.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

pub(crate) fn start(mut command: Command) -> Running {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("flockctl can be started");
    let input = child.stdin.take();
    let out = BufReader::new(child.stdout.take().expect("it is a pipe"));
    let mut err = child.stderr.take().expect("it is a pipe");
    let (send, lines) = channel();
    thread::spawn(move || {
        for line in out.split(b'\n').map_while(Result::ok) {
            if send.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                return;
            }
        }
    });
    let errors = thread::spawn(move || {
        let mut text = Vec::new();
        let _ = err.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    });
    Running { child, input, lines, errors: Some(errors) }
}

/// Runs it to its end.
#[track_caller]
pub(crate) fn finish(command: Command) -> Ended {
    let mut running = start(command);
    running.close_input();
    running.end()
}

impl Running {
    /// The next line of its output.
    #[track_caller]
    pub(crate) fn line(&mut self) -> String {
        match self.lines.recv_timeout(SOON) {
            Ok(line) => line,
            Err(error) => panic!("no line of output: {error}"),
        }
    }

    /// The next line, as a process id.
    #[track_caller]
    pub(crate) fn pid_line(&mut self) -> i32 {
        self.line().parse().expect("a process id")
    }

    pub(crate) fn close_input(&mut self) {
        self.input = None;
    }

    #[track_caller]
    pub(crate) fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).expect("a pid fits in 31 bits");
        kill(Pid::from_raw(pid), signal).expect("flockctl can be signalled");
    }

    /// The processes that it has started.
    #[track_caller]
    pub(crate) fn children(&self) -> Vec<i32> {
        let pid = self.child.id();
        let children = || fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok();
        let both = || children().map(|list| list.split_whitespace().map(|pid| pid.parse().expect("a pid")).collect());
        // The command may speak before the last of them is there.
        wait_for("it has two children", SOON, || both().filter(|pids: &Vec<i32>| pids.len() == 2))
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("the state of a child can be asked").is_none()
    }

    #[track_caller]
    pub(crate) fn end(mut self) -> Ended {
        let status = wait_for("flockctl has ended", SOON, || self.child.try_wait().expect("it can be waited for"));
        let out = self.lines.iter().map(|line| line + "\n").collect();
        let err = self.errors.take().map(|errors| errors.join().expect("the reader does not panic"));
        Ended { code: status.code(), out, err: err.unwrap_or_default() }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether the process runs; one that has ended and is not waited for yet does not.
pub(crate) fn is_alive(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state stands behind the name, which is in parentheses.
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['Z', 'X']))
}

#[track_caller]
pub(crate) fn wait_until_dead(pid: i32) {
    wait_until(&format!("process {pid} is dead"), SOON, || !is_alive(pid));
}

/// Takes a lock for somebody else, for a minute.
#[track_caller]
pub(crate) fn hold(server: &Server, key: impl AsRef<[u8]>, owner: &str) -> u64 {
    let mut conn = server.connect(Protocol::Resp2);
    conn.cmd(&args!["FLOCK.ACQUIRE", key.as_ref(), owner, 60_000, "LABEL", "why"]).as_token()
}

#[track_caller]
pub(crate) fn ask(server: &Server, command: &[&str]) -> Reply {
    server.connect(Protocol::Resp2).cmd(command)
}

#[track_caller]
pub(crate) fn held(server: &Server) -> i64 {
    server.info("flock").number("flock_held")
}

#[track_caller]
pub(crate) fn wait_until_waiting(server: &Server, requests: i64) {
    let waiting = || server.info("flock").number("flock_waiters") == requests;
    wait_until(&format!("{requests} wait"), SOON, waiting);
}
