//! The command as a job: processes that are signalled, suspended and waited for as one.
//!
//! The job has ended when the command has, and everything that it has left behind. That is handed to us by the kernel (we are its
//! *subreaper*), so we hear of its end.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use flock_client::Guard;
use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitOptions, WaitStatus, getpid, kill_current_process_group, set_child_subreaper, wait,
};
use tokio::signal::unix::{self, SignalKind};
use tokio::time::sleep;

use crate::helper::{self, Watchman};
use crate::members::{self, Members};
use crate::server;
use crate::signals::Signals;
use crate::terminal::Terminal;

/// A process of the group whose parent is not of it ends without our hearing.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// How a job has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    /// The command's status, as a shell would say it.
    pub(crate) code: u8,
    /// Whether it was the terminal's interrupt key: the command has died of it, and was in front, so that we did not get it; or we got
    /// it before there was a command.
    pub(crate) by_interrupt: bool,
}

#[derive(Debug)]
pub(crate) struct Job {
    members: Members,
    children: unix::Signal,
    terminal: Option<Terminal>,
    /// What the command itself has ended with.
    status: Option<u8>,
    watchman: Watchman,
}

impl Job {
    /// Starts the command; with a token of the guard, for what it writes to.
    pub(crate) fn start(command: &[OsString], guard: &Guard) -> io::Result<Self> {
        set_child_subreaper(Some(getpid()))?;
        let children = unix::signal(SignalKind::child())?;
        let mut terminal = Terminal::open();
        let with_terminal = terminal.as_ref().is_some_and(Terminal::is_for_the_command);
        let mut start = helper::dying_with_us(command, with_terminal);
        server::withhold_passwords(&mut start);
        let (token, key) = (OsString::from(guard.token().get().to_string()), OsStr::from_bytes(guard.key()));
        let child = start.env(members::TOKEN, &token).env(members::KEY, key).spawn()?;
        if let Some(terminal) = terminal.as_mut().filter(|_| with_terminal) {
            terminal.is_taken();
        }
        let members = Members::new(Pid::from_child(&child), &token, key);
        let watchman = Watchman::over(&members).inspect_err(|_| members.signal_group(Signal::KILL))?;
        Ok(Self { members, children, terminal, status: None, watchman })
    }

    pub(crate) fn members(&self) -> Members {
        self.members.clone()
    }

    /// Passes signals on until the job has ended. A suspended command goes on only while `may_go_on`.
    pub(crate) async fn ended(mut self, signals: &mut Signals, may_go_on: impl Fn() -> bool) -> End {
        loop {
            while let Some((pid, status)) = reap() {
                if pid == self.members.group() {
                    self.changed(status, &may_go_on);
                }
            }
            if let Some(code) = self.status.filter(|_| self.members.are_gone()) {
                let was_in_front = self.terminal.as_ref().is_some_and(Terminal::is_lent);
                if let Some(terminal) = &mut self.terminal {
                    terminal.take_back();
                }
                self.watchman.dismiss();
                return End { code, by_interrupt: was_in_front && code == killed_by(Signal::INT.as_raw()) };
            }
            tokio::select! {
                _ = self.children.recv() => {}
                signal = signals.next() => match signal {
                    Signal::CONT => self.go_on(&may_go_on),
                    signal => self.members.signal_group(signal),
                },
                () = sleep(LOOK_AGAIN), if self.status.is_some() => {}
            }
        }
    }

    fn changed(&mut self, status: WaitStatus, may_go_on: &impl Fn() -> bool) {
        if let Some(code) = status.exit_status() {
            self.status = Some(u8::try_from(code).unwrap_or(u8::MAX));
        } else if let Some(signal) = status.terminating_signal() {
            self.status = Some(killed_by(signal));
        } else if let Some(signal) = status.stopping_signal() {
            self.stopped(signal, may_go_on);
        }
    }

    /// The command was suspended. A shell waits for us, not for it: so we stop too, and go on when the shell says so. Meanwhile nobody
    /// renews the lease, so it is looked at before the command goes on.
    fn stopped(&mut self, signal: i32, may_go_on: &impl Fn() -> bool) {
        let Some(terminal) = &mut self.terminal else { return };
        let wants_terminal = signal == Signal::TTIN.as_raw() || signal == Signal::TTOU.as_raw();
        let by_its_keys = wants_terminal || signal == Signal::TSTP.as_raw();
        if !by_its_keys && !terminal.is_lent() {
            return;
        }
        if wants_terminal && !terminal.is_lent() && terminal.is_ours() {
            terminal.lend(self.members.group());
            self.members.signal_group(Signal::CONT);
            return;
        }
        let was_lent = terminal.is_lent();
        terminal.take_back();
        // A signal that we do not catch. Where there is nobody who could let us go on, the kernel stops us not.
        let _ = kill_current_process_group(Signal::TTIN);
        if was_lent && terminal.is_ours() && may_go_on() {
            terminal.lend(self.members.group());
        }
        self.go_on(may_go_on);
    }

    fn go_on(&mut self, may_go_on: &impl Fn() -> bool) {
        if may_go_on() {
            self.members.signal_group(Signal::CONT);
        }
    }
}

/// The status that stands for a signal.
pub(crate) fn killed_by(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

/// The next child of ours that has ended or was stopped. Children of the command may be among them.
fn reap() -> Option<(Pid, WaitStatus)> {
    loop {
        match wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
            Ok(change) => return change,
            Err(Errno::INTR) => {}
            Err(_) => return None, // there is no child
        }
    }
}
