//! Who belongs to a job: its process group, and whoever has made a group of its own in the same session, as `timeout` does.
//!
//! Those are known by the token and the key in their environment, which every process of the job has from the command, and nobody else:
//! no token is handed out twice. A process that makes a session of its own, as a daemon does, has left the job.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use nix::unistd::{self, getpgid, getsid};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, getpgrp, kill_process, kill_process_group, test_kill_process_group};

/// The environment variables that the command gets.
pub(crate) const TOKEN: &str = "FLOCK_TOKEN";
pub(crate) const KEY: &str = "FLOCK_KEY";

/// Who is killed may have started another one just before: so all are killed again after this, until they are gone.
pub(crate) const KILL_AGAIN: Duration = Duration::from_millis(20);

#[derive(Clone, Debug)]
pub(crate) struct Members {
    /// Its number is not given to anybody else while a process of it is there.
    group: Pid,
    token: OsString,
    key: OsString,
}

impl Members {
    pub(crate) fn new(group: Pid, token: &OsStr, key: &OsStr) -> Self {
        Self { group, token: token.to_owned(), key: key.to_owned() }
    }

    /// What makes them again in another process.
    pub(crate) fn to_args(&self) -> [OsString; 3] {
        [self.group.to_string().into(), self.token.clone(), self.key.clone()]
    }

    pub(crate) fn group(&self) -> Pid {
        self.group
    }

    /// Signals the group: what a terminal would do. The others hear it from those of the group who care for them.
    pub(crate) fn signal_group(&self, signal: Signal) {
        let _ = kill_process_group(self.group, signal); // it may be gone
    }

    pub(crate) fn signal_all(&self, signal: Signal) {
        self.signal_group(signal);
        let own = getpgrp();
        for (pid, group) in self.apart() {
            // With the whole of its group: not all that it has started need have its environment.
            let _ = if group == own { kill_process(pid, signal) } else { kill_process_group(group, signal) };
        }
    }

    pub(crate) fn are_gone(&self) -> bool {
        test_kill_process_group(self.group) == Err(Errno::SRCH) && self.apart().is_empty()
    }

    /// Those outside the group, and their groups. A process that has ended and was not reaped yet has no environment any more.
    fn apart(&self) -> Vec<(Pid, Pid)> {
        let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
        let session = getsid(None);
        let member = |entry: fs::DirEntry| {
            let number = entry.file_name().to_str()?.parse().ok()?;
            let process = Some(unistd::Pid::from_raw(number));
            // A kernel thread has neither: both are 0 there.
            let (pid, group) = (Pid::from_raw(number)?, Pid::from_raw(getpgid(process).ok()?.as_raw())?);
            let is_apart = getsid(process) == session && group != self.group && self.have_marked(pid);
            is_apart.then_some((pid, group))
        };
        processes.flatten().filter_map(member).collect()
    }

    fn have_marked(&self, pid: Pid) -> bool {
        let Ok(environment) = fs::read(format!("/proc/{pid}/environ")) else { return false };
        let has = |name: &str, value: &OsStr| {
            let is_it = |variable: &[u8]| {
                variable.strip_prefix(name.as_bytes())?.strip_prefix(b"=").map(|it| it == value.as_bytes())
            };
            environment.split(|byte| *byte == 0).any(|variable| is_it(variable) == Some(true))
        };
        has(TOKEN, &self.token) && has(KEY, &self.key)
    }
}
