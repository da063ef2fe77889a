//! A Valkey with the module, clients of it, and programs that are stopped while they hold the lock.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use fenced_storage::{ACCOUNT, DepositError, LOCK, Payment};
use flock_client::{Flock, Guard};
use flock_tests::args;
use flock_tests::resp::Protocol;
use flock_tests::server::Server;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

pub(crate) const SOON: Duration = Duration::from_secs(20);

/// Runs a test with a server and a client.
pub(crate) fn on<F: Future<Output = ()>>(test: impl FnOnce(Server, Flock) -> F) {
    let server = Server::builder().start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("cannot make a runtime");
    let done = runtime.block_on(async {
        let flock = Flock::connect(url(&server)).await.expect("the server is there");
        tokio::time::timeout(3 * SOON, test(server, flock)).await
    });
    done.expect("the test took too long");
}

pub(crate) fn url(server: &Server) -> String {
    format!("valkey://{}", server.addr())
}

pub(crate) async fn held(flock: &Flock) -> Guard {
    flock.lock(LOCK).wait(SOON).await.expect("the lock should be free soon")
}

pub(crate) fn revoke(server: &Server) {
    let reply = server.connect(Protocol::Resp2).cmd(&args!["FLOCK.REVOKE", LOCK]);
    assert_eq!(reply.as_int(), 1);
}

/// Two holders, one after the other; the first has lost the lock and does not know it yet.
pub(crate) async fn stale_and_current(server: &Server, flock: &Flock) -> (Guard, Guard) {
    let stale = held(flock).await;
    revoke(server);
    let current = held(flock).await;
    assert!(stale.token() < current.token());
    (stale, current)
}

/// A payment of its own each time, with rising numbers.
pub(crate) fn payment(cents: i64) -> Payment<'static> {
    static NEXT: AtomicI64 = AtomicI64::new(1);
    Payment { number: NEXT.fetch_add(1, Ordering::Relaxed), account: ACCOUNT, cents }
}

#[track_caller]
pub(crate) fn assert_stale(deposited: Result<(), DepositError>, guard: &Guard) {
    let Err(DepositError::Stale { token }) = deposited else {
        panic!("a stale holder is refused as stale: {deposited:?}")
    };
    assert_eq!(token, guard.token());
}

/// One of the programs of this package. It is killed when this is dropped.
pub(crate) struct Program {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Program {
    /// Starts one, and waits until it holds the lock.
    pub(crate) fn holding(path: &str, args: &[&str]) -> Program {
        let mut command = Command::new(path);
        let mut child = command
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {path}: {error}"));
        let (input, output) = (child.stdin.take().expect("it is piped"), child.stdout.take().expect("it is piped"));
        let mut program = Program { child, input, output: BufReader::new(output) };
        let line = program.line();
        assert!(line.starts_with("holding under token"), "{line}");
        program
    }

    pub(crate) fn pause(&self) {
        self.signal(Signal::SIGSTOP);
    }

    pub(crate) fn resume(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// Presses Enter: it deposits when it runs.
    pub(crate) fn tell_to_deposit(&mut self) {
        self.input.write_all(b"\n").expect("it reads");
    }

    /// The next line it writes; empty at the end.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("it writes text");
        line
    }

    /// Whether it ends well.
    pub(crate) fn succeeds(&mut self) -> bool {
        self.child.wait().expect("it is our child").success()
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().cast_signed());
        kill(pid, signal).expect("it has not been waited for");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A holder is stopped; the next one waits for the lease, holds the lock, and does `meanwhile`. The stopped one then runs on and
/// deposits: it must be refused.
pub(crate) async fn paused_program_is_refused(
    flock: &Flock,
    path: &str,
    args: &[&str],
    meanwhile: impl AsyncFnOnce(&Guard),
) {
    let mut paused = Program::holding(path, args);
    paused.pause();
    let next = held(flock).await;
    meanwhile(&next).await;
    paused.tell_to_deposit();
    paused.resume();
    let line = paused.line();
    assert!(line.starts_with("refused: token") && line.contains("is stale"), "{line}");
    assert_eq!(paused.line(), "AlreadyLost\n");
    assert!(paused.succeeds());
}
