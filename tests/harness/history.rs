//! What the clients of a run did and saw, one JSON line per event.
//!
//! Every operation is written down twice: before it is sent, and when its outcome is known. An operation whose connection died
//! ends as *unknown*: it may have happened, it may happen yet. Times are nanoseconds of the machine's monotonic clock, so
//! the histories of several processes can be put together, and a process stopped by SIGSTOP is seen to have been.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// What an operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verb {
    /// Take a lock, or ask again for the one already held or waited for.
    Acquire,
    /// Change the mode of a hold. The hold of before counts as ended when this is sent.
    Convert,
    /// Make the lease last longer.
    Renew,
    /// Give the lock back, or leave the queue.
    Release,
    /// End holds from outside (REVOKE, DEL, FLUSHALL): of one owner, or of all if none is named.
    Revoke,
    /// Write to the storage that the lock guards, showing the token.
    Write,
}

/// How a lock is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Alone.
    #[default]
    Exclusive,
    /// Beside other readers.
    Shared,
}

/// What was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// The operation.
    pub verb: Verb,
    /// The lock.
    pub key: String,
    /// Who asks. Fresh for each acquisition: the checker takes two acquisitions by one owner for one and its retry.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub owner: String,
    /// The mode asked for.
    #[serde(default)]
    pub mode: Mode,
    /// How many may share the lock; all holders of one lock must say the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
    /// How long the server promises the lock from the moment it performs this; with CLAIM, the claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_ms: Option<u64>,
    /// The token shown, if one was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<u64>,
    /// The place in the queue, if the run knows in which order the requests of a lock have arrived.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ticket: Option<u64>,
}

impl Call {
    /// An operation with nothing said but what it is, on what, and by whom.
    pub fn new(verb: Verb, key: &str, owner: &str) -> Call {
        Call {
            verb,
            key: key.to_owned(),
            owner: owner.to_owned(),
            mode: Mode::Exclusive,
            limit: None,
            lease_ms: None,
            token: None,
            ticket: None,
        }
    }

    /// Asks to share the lock.
    pub fn shared(mut self) -> Call {
        self.mode = Mode::Shared;
        self
    }

    /// Says how many may share.
    pub fn limit(mut self, limit: u32) -> Call {
        self.limit = Some(limit);
        self
    }

    /// Says the lease.
    pub fn lease_ms(mut self, lease_ms: u64) -> Call {
        self.lease_ms = Some(lease_ms);
        self
    }

    /// Shows a token.
    pub fn token(mut self, token: u64) -> Call {
        self.token = Some(token);
        self
    }

    /// Says the place in the queue.
    pub fn ticket(mut self, ticket: u64) -> Call {
        self.ticket = Some(ticket);
        self
    }
}

/// One of the two events of an operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "lowercase")]
pub enum Phase {
    /// About to be sent.
    Invoke(Call),
    /// It was done; an acquisition tells its token.
    Ok {
        /// The token granted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        token: Option<u64>,
    },
    /// It was not done, and will not be: nil, 0 or an error.
    Refused,
    /// The request waits in the queue; another acquisition by the same owner tells how it went on.
    Queued,
    /// Nobody knows.
    Unknown,
}

/// One line of a history.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When, in nanoseconds of the monotonic clock.
    pub at_ns: u64,
    /// Which client, across all test processes.
    pub process: u32,
    /// Which operation of that client.
    pub op: u64,
    /// What happened.
    #[serde(flatten)]
    pub phase: Phase,
}

/// The name of an operation that has begun: the client and a number.
pub type OpId = (u32, u64);

/// Writes a history; shared by the threads of a run.
#[derive(Debug, Default)]
pub struct Recorder {
    written: Mutex<Written>,
    next_op: AtomicU64,
}

#[derive(Debug, Default)]
struct Written {
    events: Vec<Event>,
    file: Option<File>,
}

impl Recorder {
    /// A history in memory.
    pub fn new() -> Recorder {
        Recorder::default()
    }

    /// A history in memory, and in a file line by line: what is there survives the death of this process.
    ///
    /// # Errors
    /// If the file cannot be made.
    pub fn with_file(path: &Path) -> io::Result<Recorder> {
        let recorder = Recorder::new();
        recorder.written().file = Some(File::create(path)?);
        Ok(recorder)
    }

    /// Writes down that `process` is about to send `call`.
    pub fn invoke(&self, process: u32, call: Call) -> OpId {
        let op = self.next_op.fetch_add(1, Ordering::Relaxed);
        self.push(process, op, Phase::Invoke(call));
        (process, op)
    }

    /// Writes down that an operation was done.
    pub fn ok(&self, op: OpId, token: Option<u64>) {
        self.push(op.0, op.1, Phase::Ok { token });
    }

    /// Writes down that an operation was refused.
    pub fn refused(&self, op: OpId) {
        self.push(op.0, op.1, Phase::Refused);
    }

    /// Writes down that an acquisition was queued.
    pub fn queued(&self, op: OpId) {
        self.push(op.0, op.1, Phase::Queued);
    }

    /// Writes down that nobody knows what became of an operation.
    pub fn unknown(&self, op: OpId) {
        self.push(op.0, op.1, Phase::Unknown);
    }

    /// Everything so far.
    pub fn events(&self) -> Vec<Event> {
        self.written().events.clone()
    }

    /// The clock is read under the mutex, so the lines of a file are in the order of their times.
    fn push(&self, process: u32, op: u64, phase: Phase) {
        let mut written = self.written();
        let event = Event { at_ns: now_ns(), process, op, phase };
        if let Some(file) = &mut written.file {
            file.write_all(line(&event).as_bytes()).expect("cannot write to the history file");
        }
        written.events.push(event);
    }

    fn written(&self) -> std::sync::MutexGuard<'_, Written> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads a history file.
///
/// # Errors
/// If it cannot be read, or a line is no event.
pub fn load(path: &Path) -> io::Result<Vec<Event>> {
    let text = fs::read_to_string(path)?;
    text.lines().map(|line| serde_json::from_str(line).map_err(io::Error::from)).collect()
}

/// Writes a history file.
///
/// # Errors
/// If it cannot be written.
pub fn save(path: &Path, events: &[Event]) -> io::Result<()> {
    fs::write(path, events.iter().map(line).collect::<String>())
}

/// The monotonic clock of the machine, in nanoseconds.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("Linux has a monotonic clock");
    let seconds = u64::try_from(now.tv_sec()).expect("monotonic time is not negative");
    let nanoseconds = u64::try_from(now.tv_nsec()).expect("nanoseconds are not negative");
    seconds * 1_000_000_000 + nanoseconds
}

fn line(event: &Event) -> String {
    serde_json::to_string(event).expect("an event has no key that is not a string") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_as_documented() {
        let call = Call::new(Verb::Acquire, "k", "o").lease_ms(500).ticket(3);
        let event = |phase| Event { at_ns: 1, process: 2, op: 7, phase };
        assert_eq!(
            line(&event(Phase::Invoke(call))),
            r#"{"at_ns":1,"process":2,"op":7,"phase":"invoke","verb":"acquire","key":"k","owner":"o","mode":"exclusive","lease_ms":500,"ticket":3}"#
                .to_owned() + "\n"
        );
        assert_eq!(
            line(&event(Phase::Ok { token: Some(9) })),
            r#"{"at_ns":1,"process":2,"op":7,"phase":"ok","token":9}"#.to_owned() + "\n"
        );
    }

    #[test]
    fn file_holds_what_was_recorded() {
        let dir = crate::work_dir::WorkDir::new();
        let path = dir.path().join("history.jsonl");
        let recorder = Recorder::with_file(&path).expect("cannot make the file");
        let acquire = recorder.invoke(1, Call::new(Verb::Acquire, "k", "o").shared().limit(2));
        recorder.ok(acquire, Some(5));
        let release = recorder.invoke(1, Call::new(Verb::Release, "k", "o").token(5));
        recorder.unknown(release);
        assert_eq!(load(&path).expect("cannot read the file"), recorder.events());
        save(&path, &recorder.events()).expect("cannot write the file");
        assert_eq!(load(&path).expect("cannot read the file"), recorder.events());
    }
}
