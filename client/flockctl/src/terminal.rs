//! The terminal that flockctl was started from, and who of us may use it.
//!
//! The command is in a process group of its own, so that all of it can be ended at once. A group reads from its terminal, and gets the
//! signals of its keys, only while it is the one in front. So the command's group is put there as a shell would: at once if our input
//! and output are the terminal, else when it first wants to use it (in a pipeline, another program may have to read the terminal).

use std::fs::File;
use std::io::{self, IsTerminal};

use nix::sys::signal::{SigSet, Signal};
use rustix::process::{Pid, getpgrp};
use rustix::termios::{tcgetpgrp, tcsetpgrp};

#[derive(Debug)]
pub(crate) struct Terminal {
    tty: File,
    lent: bool,
}

impl Terminal {
    /// The controlling terminal; none where there is none, as under cron.
    pub(crate) fn open() -> Option<Self> {
        let tty = File::options().read(true).write(true).open("/dev/tty").ok()?;
        // Or we would be stopped when we take it back.
        SigSet::from(Signal::SIGTTOU).thread_block().ok()?;
        Some(Self { tty, lent: false })
    }

    /// Whether a command that we start should have it from the start.
    pub(crate) fn is_for_the_command(&self) -> bool {
        io::stdin().is_terminal() && io::stdout().is_terminal() && self.is_ours()
    }

    /// Whether our own group is in front.
    pub(crate) fn is_ours(&self) -> bool {
        tcgetpgrp(&self.tty) == Ok(getpgrp())
    }

    pub(crate) fn is_lent(&self) -> bool {
        self.lent
    }

    /// The command has taken it.
    pub(crate) fn is_taken(&mut self) {
        self.lent = true;
    }

    /// Puts our own group in front.
    pub(crate) fn take(&self) {
        let _ = tcsetpgrp(&self.tty, getpgrp());
    }

    pub(crate) fn lend(&mut self, group: Pid) {
        self.lent = self.is_ours() && tcsetpgrp(&self.tty, group).is_ok();
    }

    pub(crate) fn take_back(&mut self) {
        if std::mem::take(&mut self.lent) {
            self.take();
        }
    }
}
