//! `run`: a command that lives no longer than its lock.
//!
//! A lease that cannot be renewed ends at a time that is known beforehand. So the command is asked to end before that, early enough
//! for its grace, and killed when the lease is over and not later. A hold that was taken away (revoked, deleted) is gone already: then
//! the command gets its grace. Between the loss and its end the command may still write; only the token, checked by what it writes to,
//! closes that gap.

use std::cell::Cell;
use std::convert::Infallible;
use std::future::Future;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process;
use std::time::Duration;

use flock_client::{Flock, Guard, Lock, LossReason, Released};
use rustix::process::Signal;
use tokio::time::sleep;

use crate::cli::{RunArgs, ServerArgs};
use crate::failure::{BUSY, Failure, LOST, say};
use crate::helper;
use crate::job::{End, Job, killed_by};
use crate::members::{KILL_AGAIN, Members};
use crate::signals::{ENDING, OTHERS, Signals};

/// How long to wait, before we exit, for what is still to be given back.
const GIVE_BACK_WITHIN: Duration = Duration::from_secs(2);
/// The clock of `sleep` stands still while the machine is suspended, that of the lease does not.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
const LABEL_MAX_BYTES: usize = 256;

pub(crate) async fn run(server: &ServerArgs, args: &RunArgs) -> Result<u8, Failure> {
    let mut signals = Signals::default();
    signals.take(ENDING)?;
    let end = match unless_ended(&mut signals, server.connect()).await {
        Ok(connected) => {
            let flock = connected?;
            let outcome = run_under_lock(&flock, args, &mut signals).await;
            let _ = flock.shutdown(GIVE_BACK_WITHIN).await;
            outcome?
        }
        Err(end) => end,
    };
    if end.by_interrupt {
        return Err(helper::die_of_the_interrupt().into());
    }
    Ok(end.code)
}

async fn run_under_lock(flock: &Flock, args: &RunArgs, signals: &mut Signals) -> Result<End, Failure> {
    let exit = |code| Ok(End { code, by_interrupt: false });
    let acquired = async {
        let guard = args.lock(flock).await?;
        // A grant may be a claim at first. From here on it is known to last for its lease.
        guard.renew().await?;
        Ok::<_, Failure>(guard)
    };
    let guard = match unless_ended(signals, acquired).await {
        Ok(Ok(guard)) => guard,
        Ok(Err(failure)) if failure.code() == BUSY => {
            failure.report();
            return exit(args.busy_code);
        }
        Ok(Err(failure)) => return Err(failure),
        Err(end) => return Ok(end),
    };
    signals.take(OTHERS)?;
    let job = Job::start(&args.command, &guard)?;
    let members = job.members();
    let lost = Cell::new(false);
    let end = tokio::select! {
        end = job.ended(signals, || guard.is_valid()) => end,
        never = end_when_lost(&guard, &members, args, &lost) => match never {},
    };
    if lost.get() {
        return exit(LOST); // what there may be to give back is given back on the way out
    }
    match guard.release().await {
        Ok(Released::Released) => Ok(end),
        Ok(Released::AlreadyLost) => Err(Failure::new(LOST, "the lock was lost before the command had ended")),
        Err(error) => {
            say(format_args!("the lock was not given back and ends with its lease: {error}"));
            Ok(end)
        }
    }
}

/// The outcome of `work`, or how we end if a signal comes first.
async fn unless_ended<T>(signals: &mut Signals, work: impl Future<Output = T>) -> Result<T, End> {
    tokio::select! {
        biased;
        signal = signals.next() => Err(End { code: killed_by(signal.as_raw()), by_interrupt: signal == Signal::INT }),
        outcome = work => Ok(outcome),
    }
}

/// Ends the job when the lock is lost, or is about to be.
async fn end_when_lost(guard: &Guard, members: &Members, args: &RunArgs, lost: &Cell<bool>) -> Infallible {
    let taken_away = tokio::select! {
        biased;
        Some(reason) = guard.lost() => {
            say(format_args!("the lock is lost ({reason}); the command is ended"));
            !matches!(reason, LossReason::Expired | LossReason::Disconnected)
        }
        () = runs_out(guard, args.warning()) => {
            say("the lock is as good as lost (its lease cannot be renewed); the command is ended");
            false
        }
    };
    lost.set(true);
    members.signal_all(Signal::TERM);
    members.signal_all(Signal::CONT); // or a suspended command does not hear it
    let grace = sleep(args.grace);
    if taken_away {
        grace.await;
    } else {
        tokio::select! { () = grace => {}, () = runs_out(guard, Duration::ZERO) => {} }
    }
    loop {
        members.signal_all(Signal::KILL);
        sleep(KILL_AGAIN).await;
    }
}

/// Ends when the hold is certain for no longer than `left`.
async fn runs_out(guard: &Guard, left: Duration) {
    loop {
        match guard.remaining().checked_sub(left) {
            None | Some(Duration::ZERO) => return,
            Some(time) => sleep(time.min(LOOK_AGAIN)).await,
        }
    }
}

impl RunArgs {
    fn lock(&self, flock: &Flock) -> Lock {
        let mut lock = flock.lock(self.key.as_bytes()).lease(self.lease).label(self.label());
        if let Some(wait) = self.wait {
            lock = lock.wait(wait);
        }
        if self.shared {
            lock = lock.shared();
        }
        if let Some(limit) = self.limit {
            lock = lock.limit(limit);
        }
        if let Some(grace) = self.session {
            lock = lock.session(grace);
        }
        lock
    }

    /// How long before its lease is over the command is asked to end. Two renewals have failed by then.
    fn warning(&self) -> Duration {
        let lasts = self.session.map_or(self.lease, |grace| self.lease.min(grace));
        self.grace.min(lasts / 3)
    }

    /// The arguments are not in it: they may be nobody's business.
    fn label(&self) -> Vec<u8> {
        if let Some(label) = &self.label {
            return label.as_bytes().to_vec();
        }
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let program = self.command.first().and_then(|program| Path::new(program).file_name()).unwrap_or_default();
        let mut label = format!("{}:{} ", host.trim(), process::id()).into_bytes();
        label.extend_from_slice(program.as_bytes());
        label.truncate(LABEL_MAX_BYTES);
        label
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn args(options: &[&str]) -> RunArgs {
        let line = ["flockctl", "run"].iter().chain(options).chain(&["k", "/bin/true", "secret"]);
        match Cli::try_parse_from(line).unwrap().command {
            Command::Run(args) => args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn warning_leaves_room_for_renewals() {
        assert_eq!(args(&[]).warning(), Duration::from_secs(10));
        assert_eq!(args(&["--lease", "3s"]).warning(), Duration::from_secs(1));
        assert_eq!(args(&["--session", "3s"]).warning(), Duration::from_secs(1));
        assert_eq!(args(&["--grace", "1s"]).warning(), Duration::from_secs(1));
    }

    #[test]
    fn label_names_the_program_and_not_its_arguments() {
        let label = String::from_utf8(args(&[]).label()).unwrap();
        assert!(label.ends_with(&format!(":{} true", process::id())), "{label}");
        assert_eq!(args(&["--label", "why"]).label(), b"why");
    }
}
