//! The signals that flockctl gets.
//!
//! What was ignored when it was started stays ignored, for us and for the command: that is how `nohup` and `&` work.

use std::future::poll_fn;
use std::task::Poll;
use std::{fs, io};

use nix::sys::signal::SigSet;
use rustix::process::Signal;
use tokio::signal::unix::{self, SignalKind};

/// What ends a wait, and is passed on to a command.
pub(crate) const ENDING: &[Signal] = &[Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM];
/// What else is passed on to a command.
pub(crate) const OTHERS: &[Signal] = &[Signal::USR1, Signal::USR2, Signal::TSTP, Signal::CONT];

/// Whoever starts us may have blocked some, and that is inherited: without them we would neither end when told nor see the command end.
pub(crate) fn unblock() {
    let _ = SigSet::all().thread_unblock(); // nothing here can fail
}

#[derive(Debug, Default)]
pub(crate) struct Signals {
    streams: Vec<(Signal, unix::Signal)>,
}

impl Signals {
    /// Takes these signals too, from now on.
    pub(crate) fn take(&mut self, signals: &[Signal]) -> io::Result<()> {
        let ignored = ignored()?;
        for signal in signals {
            if ignored >> (signal.as_raw() - 1) & 1 == 0 {
                self.streams.push((*signal, unix::signal(SignalKind::from_raw(signal.as_raw()))?));
            }
        }
        Ok(())
    }

    /// The next signal.
    pub(crate) async fn next(&mut self) -> Signal {
        poll_fn(|context| {
            for (signal, stream) in &mut self.streams {
                if stream.poll_recv(context).is_ready() {
                    return Poll::Ready(*signal);
                }
            }
            Poll::Pending
        })
        .await
    }
}

/// One bit for each signal that is ignored.
fn ignored() -> io::Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    Ok(mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0))
}
