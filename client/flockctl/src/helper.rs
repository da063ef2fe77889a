//! This program in three other roles, started by itself. None can be asked for on the command line by accident.
//!
//! * **Becoming the command.** Only a process itself can ask the kernel to be killed when its parent dies. So what is started is this
//!   program, which asks that and then *becomes* the command: same process, same pid.
//! * **Ending the job.** The kernel kills the command when we die, but not what the command has started. So a second process waits for
//!   the end of a pipe from us: if it ends without a word, the members of the job are killed.
//! * **Dying of the interrupt key.** A shell ends its loop only if what it ran has died of the signal. A program that catches a signal
//!   does not die of it, and this one becomes one that does not.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::thread;

use nix::sys::signal::SigSet;
use rustix::process::{Pid, Signal, getpid, getppid, kill_process, set_parent_process_death_signal};

use crate::failure::{SYSTEM, say};
use crate::job::killed_by;
use crate::members::{self, Members};
use crate::terminal::Terminal;

/// Ourselves, also when the file was replaced meanwhile.
const OURSELVES: &str = "/proc/self/exe";
const BECOME: &str = "--become-the-command";
const WATCH: &str = "--end-the-job";
const DIE: &str = "--die-of-the-interrupt";
const WITH_TERMINAL: &str = "with-terminal";
/// A process that cannot die yet, for the kernel is busy with it, needs no other signal: ten seconds are for those that start others.
const KILLED_MAX: usize = 500;
const CANNOT_RUN: u8 = 126;
const NOT_FOUND: u8 = 127;

/// A process that will be `command`, in a group of its own, and dies with this thread.
pub(crate) fn dying_with_us(command: &[OsString], with_terminal: bool) -> Command {
    let terminal = if with_terminal { WITH_TERMINAL } else { "" };
    let mut start = Command::new(OURSELVES);
    start.arg0("flockctl").arg(BECOME).arg(getpid().to_string()).arg(terminal).args(command).process_group(0);
    start
}

/// A process that kills the job when we are gone, unless it was dismissed.
#[derive(Debug)]
pub(crate) struct Watchman {
    process: Child,
    lifeline: ChildStdin,
}

impl Watchman {
    pub(crate) fn over(members: &Members) -> io::Result<Self> {
        let mut process = Command::new(OURSELVES)
            .arg0("flockctl")
            .arg(WATCH)
            .args(members.to_args())
            // Within another job it is none of that one's members: when that one is killed, it has this one to end.
            .env_remove(members::TOKEN)
            .env_remove(members::KEY)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0) // the keys of the terminal are not for it
            .spawn()?;
        let lifeline = process.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
        Ok(Self { process, lifeline })
    }

    pub(crate) fn dismiss(mut self) {
        let _ = self.lifeline.write_all(b".");
        let _ = self.process.wait();
    }
}

/// Does not return, unless it fails.
pub(crate) fn die_of_the_interrupt() -> io::Error {
    Command::new(OURSELVES).arg0("flockctl").arg(DIE).exec()
}

/// What to exit with, if this process has one of the roles.
pub(crate) fn role() -> Option<ExitCode> {
    let mut args = env::args_os().skip(1);
    let role = args.next()?;
    if role == BECOME {
        Some(become_the_command(args))
    } else if role == WATCH {
        watch(args)
    } else if role == DIE {
        let _ = kill_process(getpid(), Signal::INT);
        Some(ExitCode::from(killed_by(Signal::INT.as_raw()))) // it was ignored
    } else {
        None
    }
}

fn become_the_command(mut args: impl Iterator<Item = OsString>) -> ExitCode {
    let (Some(parent), Some(terminal), Some(program)) = (pid(args.next()), args.next(), args.next()) else {
        return ExitCode::from(SYSTEM);
    };
    // Then look: it may have died before.
    if set_parent_process_death_signal(Some(Signal::KILL)).is_err() || getppid() != Some(parent) {
        return ExitCode::from(SYSTEM);
    }
    if let Some(terminal) = Terminal::open().filter(|_| terminal == WITH_TERMINAL) {
        terminal.take();
    }
    // The signal mask is reset on the way.
    let error = Command::new(&program).args(args).exec();
    say(format_args!("cannot run {}: {error}", program.display()));
    ExitCode::from(if error.kind() == io::ErrorKind::NotFound { NOT_FOUND } else { CANNOT_RUN })
}

fn watch(mut args: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    let members = Members::new(pid(args.next())?, &args.next()?, &args.next()?);
    let _ = SigSet::all().thread_block();
    let dismissed = io::stdin().read_exact(&mut [0]).is_ok();
    if !dismissed {
        end(&members);
    }
    Some(ExitCode::SUCCESS)
}

fn end(members: &Members) {
    for _ in 0..KILLED_MAX {
        members.signal_all(Signal::KILL);
        thread::sleep(members::KILL_AGAIN);
        if members.are_gone() {
            return;
        }
    }
}

fn pid(arg: Option<OsString>) -> Option<Pid> {
    Pid::from_raw(arg.as_deref().and_then(OsStr::to_str)?.parse().ok()?)
}
