//! Child processes that never outlive the test process.

use std::io;
use std::process::{Child, Command};
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};
use std::thread;

type Request = (Command, Sender<io::Result<Child>>);

/// A command that runs `program` and is killed by the kernel when the test process ends, even by SIGKILL.
///
/// `setpriv` (util-linux) sets the parent-death signal and then *becomes* the program: same process, same pid.
pub(crate) fn command(program: &std::path::Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

/// Starts `command` from a thread that lives as long as this process.
///
/// The kernel sends the parent-death signal when the *thread* that started the child ends, and the test harness gives every
/// test a thread of its own: a shared server started by one test would die at the end of it.
pub(crate) fn spawn(command: Command) -> io::Result<Child> {
    static SPAWNER: OnceLock<Sender<Request>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (requests, inbox) = channel::<Request>();
        thread::Builder::new()
            .name("spawner".into())
            .spawn(move || {
                for (mut command, answer) in inbox {
                    let _ = answer.send(command.spawn());
                }
            })
            .expect("cannot start the spawner thread");
        requests
    });
    let (answer, child) = channel();
    spawner.send((command, answer)).expect("the spawner thread is gone");
    child.recv().expect("the spawner thread is gone")
}
