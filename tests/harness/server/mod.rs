//! A valkey-server process of the test's own, with the module loaded.
//!
//! The guard owns everything: the port, the directory, the process. Dropping it kills exactly that process; if the process
//! had died by itself, or the module had panicked, the test fails, whatever it checked. When a test fails, the tail of the
//! server's log is printed and its directory kept.

mod builder;
mod info;
#[cfg(test)]
mod tests;

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use builder::Role;
pub use builder::{Builder, StartFailure};
pub use info::Info;

use crate::network::Place;
use crate::port::PortLease;
use crate::process;
use crate::resp::{ANSWER_WITHIN, Conn, Protocol};
use crate::wait::{poll, wait_for, wait_until};
use crate::work_dir::WorkDir;

const LOG_LINES_SHOWN: usize = 60;

/// What a server writes once it serves; data are loaded by then. That the line is in *our* log also tells that it is our
/// server that has the port.
const READY: &str = "Ready to accept connections";
/// The same of a sentinel.
const READY_SENTINEL: &str = "Sentinel ID is";
/// What no log may contain: a Rust panic, be it caught or not; a failed assertion; a crash; a sanitizer's report.
const ALARMS: [&str; 4] = ["panicked at", "ASSERTION FAILED", "BUG REPORT START", "AddressSanitizer"];

/// The file in a server's directory that says how far its wall clock is off; see `clocks.c`.
const WALL_CLOCK: &str = "wall-clock";

/// Which of the supported servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Generation {
    /// The newest: `$VALKEY_SERVER`.
    New,
    /// The oldest: `$VALKEY_SERVER_OLD`.
    Old,
}

impl Generation {
    fn binary(self) -> PathBuf {
        path_from_env(match self {
            Generation::New => "VALKEY_SERVER",
            Generation::Old => "VALKEY_SERVER_OLD",
        })
    }
}

/// A module that panics on request, and writes a format that the tested one does not know: `$FLOCK_MODULE_PLANTED`. It is built for the
/// long tier.
#[track_caller]
pub fn planted_module() -> PathBuf {
    path_from_env("FLOCK_MODULE_PLANTED")
}

#[track_caller]
fn path_from_env(variable: &str) -> PathBuf {
    match std::env::var_os(variable) {
        Some(path) => PathBuf::from(path),
        None => panic!("{variable} is not set: run these tests by `make test`, which sets up all they need"),
    }
}

/// A key no other test of this process uses: shared servers are never flushed.
pub fn unique_key(name: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    format!("{name}#{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A running server. See the module's text for what its drop does.
#[derive(Debug)]
pub struct Server {
    binary: PathBuf,
    role: Role,
    place: Option<Place>,
    env: Vec<(String, String)>,
    ready_within: Duration,
    panics_allowed: bool,
    /// None after an end that the test wanted.
    process: Mutex<Option<Child>>,
    port: PortLease,
    bus: Option<PortLease>,
    dir: WorkDir,
}

impl Server {
    /// How to start one: with the module, no persistence, DEBUG allowed.
    pub fn builder() -> Builder {
        Builder::new()
    }

    /// The server of this generation that the tests of this process share; started at the first call.
    ///
    /// A test on it uses keys of its own ([`unique_key`]) and leaves alone what belongs to all: no FLUSHALL, CONFIG SET,
    /// CLIENT KILL by type, CLIENT PAUSE or DEBUG. The kernel ends it with the test process.
    /// If it has crashed, the next caller gets a new one: the tests that were running when it did have failed.
    #[track_caller]
    pub fn shared(generation: Generation) -> Arc<Server> {
        static NEW: Mutex<Option<Arc<Server>>> = Mutex::new(None);
        static OLD: Mutex<Option<Arc<Server>>> = Mutex::new(None);
        let slot = match generation {
            Generation::New => &NEW,
            Generation::Old => &OLD,
        };
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(server) = slot.as_ref() {
            if server.is_running() {
                return Arc::clone(server);
            }
            // Never dropped: its guard would complain to this caller, who has nothing to do with it.
            std::mem::forget(Arc::clone(server));
        }
        let server = Arc::new(Server::builder().generation(generation).start());
        *slot = Some(Arc::clone(&server));
        server
    }

    /// The TCP port.
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// The port of the cluster bus.
    ///
    /// # Panics
    /// If this is no cluster node.
    #[track_caller]
    pub fn bus_port(&self) -> u16 {
        self.bus.as_ref().expect("not a cluster node").number()
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        let address = self.place.as_ref().map_or(Ipv4Addr::LOCALHOST, |place| place.address);
        SocketAddr::from((address, self.port()))
    }

    /// Its directory: data files and `valkey.conf`.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The process id; another one after a restart.
    ///
    /// # Panics
    /// If it was stopped.
    #[track_caller]
    pub fn pid(&self) -> u32 {
        match self.process().as_ref() {
            Some(child) => child.id(),
            None => panic!("the server was stopped"),
        }
    }

    /// A new connection.
    ///
    /// # Panics
    /// If there is no answer.
    #[track_caller]
    pub fn connect(&self, protocol: Protocol) -> Conn {
        Conn::open(self.addr(), protocol)
    }

    /// A section of INFO, asked over a connection of its own.
    ///
    /// # Panics
    /// If there is no answer.
    #[track_caller]
    pub fn info(&self, section: &str) -> Info {
        Info::ask(&mut self.connect(Protocol::Resp2), section)
    }

    /// Waits until the command that `conn` has sent is blocked.
    ///
    /// # Panics
    /// If it is not within [`ANSWER_WITHIN`]: it was answered, refused, or the connection is gone.
    #[track_caller]
    pub fn wait_until_blocked(&self, conn: &Conn) {
        let id = conn.id().to_string();
        let mut admin = self.connect(Protocol::Resp2);
        wait_until(&format!("client {id} is blocked"), ANSWER_WITHIN, || {
            let line = admin.cmd(&["CLIENT", "LIST", "ID", &id]);
            let mut fields = line.as_str().split_whitespace();
            let flags = fields.find_map(|field| field.strip_prefix("flags="));
            flags.is_some_and(|flags| flags.contains('b'))
        });
    }

    /// Waits until the server has noticed that the connection with this id is gone.
    ///
    /// # Panics
    /// If it has not within [`ANSWER_WITHIN`].
    #[track_caller]
    pub fn wait_until_gone(&self, client_id: i64) {
        let id = client_id.to_string();
        let mut admin = self.connect(Protocol::Resp2);
        wait_until(&format!("client {id} is gone"), ANSWER_WITHIN, || {
            admin.cmd(&["CLIENT", "LIST", "ID", &id]).as_bytes().is_empty()
        });
    }

    /// Waits until the end of the connection from `peer` has reached this server's side, where a server that is stopped will find it.
    /// The kernel may carry it over a little after the peer has closed, and behind what was sent later over another connection.
    ///
    /// # Panics
    /// If it has not within [`ANSWER_WITHIN`], or if the server is in a network of its own, whose connections are not listed here.
    #[track_caller]
    pub fn wait_until_hung_up(&self, peer: SocketAddr) {
        wait_until(&format!("the connection from {peer} has ended"), ANSWER_WITHIN, || self.is_hung_up(peer));
    }

    fn is_hung_up(&self, peer: SocketAddr) -> bool {
        assert!(self.place.is_none(), "the connections of another network are not listed here");
        const ESTABLISHED: &str = "01";
        // 127.0.0.1 as the kernel writes it: the word in the machine's order of bytes.
        let localhost = u32::from_ne_bytes(Ipv4Addr::LOCALHOST.octets());
        let end = |port: u16| format!("{localhost:08X}:{port:04X}");
        let connection = [end(self.port()), end(peer.port()), ESTABLISHED.to_owned()];
        let table = fs::read_to_string("/proc/net/tcp").expect("the kernel lists its connections");
        !table.lines().any(|line| line.split_whitespace().skip(1).take(3).eq(connection.iter()))
    }

    /// Whether the process is there; a stopped one (SIGSTOP) is.
    pub fn is_running(&self) -> bool {
        self.exit_status().is_none() && self.process().is_some()
    }

    /// How the process ended by itself; none while it runs.
    pub fn exit_status(&self) -> Option<ExitStatus> {
        let mut process = self.process();
        process.as_mut()?.try_wait().expect("the state of a child can be asked")
    }

    /// Wants the server alive, answering, and with nothing alarming in its log.
    ///
    /// # Panics
    /// If it is not so.
    #[track_caller]
    pub fn assert_alive(&self) {
        self.assert_alive_since(0);
    }

    /// The same, of the log from byte `log_start` on; for servers shared with tests that ran before.
    #[track_caller]
    pub(crate) fn assert_alive_since(&self, log_start: u64) {
        if let Err(complaint) = self.verdict(log_start) {
            panic!("{complaint}\n{}", tail(&self.log_since(log_start)));
        }
        let pong = self.connect(Protocol::Resp2).cmd(&["PING"]);
        assert_eq!(pong.as_bytes(), b"PONG", "the server is not well");
    }

    /// Everything the server has written so far, of all its starts.
    pub fn log(&self) -> String {
        self.log_since(0)
    }

    /// What it has written since its log was `start` bytes long; see [`Server::log_length`].
    pub fn log_since(&self, start: u64) -> String {
        let mut bytes = Vec::new();
        if let Ok(mut file) = File::open(self.log_path()) {
            // A log that cannot be read shows as empty: there may be nothing wrong but the directory being gone.
            let _ = file.seek(SeekFrom::Start(start)).and_then(|_| file.read_to_end(&mut bytes));
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// How many bytes it has written so far.
    pub fn log_length(&self) -> u64 {
        fs::metadata(self.log_path()).map_or(0, |metadata| metadata.len())
    }

    /// Stops the process where it is (SIGSTOP); the kernel still accepts connections for it. Returns when it has stopped: the signal
    /// alone is only a request, and what is sent meanwhile would still be served.
    #[track_caller]
    pub fn sigstop(&self) {
        self.signal(Signal::SIGSTOP);
        wait_until("the server has stopped", ANSWER_WITHIN, || {
            let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap_or_default();
            // The state stands behind the name, which is in parentheses.
            stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
        });
    }

    /// Lets it go on.
    #[track_caller]
    pub fn sigcont(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// Sets the wall clock of a server that was built with one ([`Builder::wall_clock`]): off by so many seconds from the true time.
    ///
    /// # Panics
    /// If it was built without.
    #[track_caller]
    pub fn set_wall_clock(&self, offset_s: i64) {
        // In place: the server has the file in its memory.
        let clock = OpenOptions::new().write(true).open(self.dir().join(WALL_CLOCK));
        let set = clock.and_then(|clock| clock.write_all_at(&offset_s.to_ne_bytes(), 0));
        set.expect("the server was built with a wall clock");
    }

    /// Asks it to shut down (SIGTERM) and does not wait; [`Server::wait_exit`] does.
    #[track_caller]
    pub fn sigterm(&self) {
        self.signal(Signal::SIGTERM);
    }

    /// Kills it at once, as a power cut would the process.
    pub fn kill9(&mut self) {
        self.forget_process();
    }

    /// Shuts it down in the regular way, saving nothing.
    ///
    /// # Panics
    /// If it does not exit.
    #[track_caller]
    pub fn shutdown_nosave(&mut self) -> ExitStatus {
        let mut conn = self.connect(Protocol::Resp2);
        conn.send(&["SHUTDOWN", "NOSAVE"]);
        self.wait_exit(ANSWER_WITHIN)
    }

    /// Waits for an end that the test expects; the guard then does not complain of it.
    ///
    /// # Panics
    /// If the server is still running after `within`.
    #[track_caller]
    pub fn wait_exit(&mut self, within: Duration) -> ExitStatus {
        let status = wait_for("the server has exited", within, || self.exit_status());
        self.forget_process();
        status
    }

    /// Starts it again after a stop: same port, same directory, same configuration file.
    ///
    /// # Panics
    /// If it is running, or does not become ready.
    #[track_caller]
    pub fn start_again(&mut self) {
        if let Err(failure) = self.try_start_again() {
            panic!("the server did not become ready again ({:?}); its log:\n{}", failure.status, tail(&failure.log));
        }
    }

    /// The same for a start that the server may refuse; it is then as after a stop.
    ///
    /// # Errors
    /// How it ended, and its log of this start.
    ///
    /// # Panics
    /// If it is running.
    #[track_caller]
    pub fn try_start_again(&mut self) -> Result<(), StartFailure> {
        assert!(self.process().is_none(), "the server has not been stopped");
        let outcome = self.launch();
        if outcome.is_err() {
            self.forget_process();
        }
        outcome
    }

    /// [`Server::shutdown_nosave`], then [`Server::start_again`].
    #[track_caller]
    pub fn restart(&mut self) {
        self.shutdown_nosave();
        self.start_again();
    }

    /// Loads another module file than before, from the next start on.
    ///
    /// # Panics
    /// If the configuration file cannot be read and written.
    pub fn set_module(&self, module: &Path) {
        self.edit_config(|line| match line.strip_prefix("loadmodule \"") {
            Some(rest) => {
                let args = rest.split_once('"').map_or("", |(_, args)| args);
                Some(format!("loadmodule \"{}\"{args}", module.display()))
            }
            None => Some(line.to_owned()),
        });
    }

    /// Sets a line of the configuration file for the next start, in the place of all that have this name. (Not behind them: a server that
    /// reads `replicaof no one` after the address of a primary starts as a primary, and yet connects to that address's port on its own
    /// machine and loads what it finds there.)
    ///
    /// # Panics
    /// If the configuration file cannot be read and written.
    pub fn set_config(&self, name: &str, value: &str) {
        self.remove_config(name);
        let file = OpenOptions::new().append(true).open(self.config_path());
        file.and_then(|mut file| writeln!(file, "{name} {value}")).expect("cannot add to the configuration file");
    }

    /// Removes all lines of this name from the configuration file, for the next start.
    ///
    /// # Panics
    /// If the configuration file cannot be read and written.
    pub fn remove_config(&self, name: &str) {
        self.edit_config(|line| (line.split(' ').next() != Some(name)).then(|| line.to_owned()));
    }

    fn edit_config(&self, edit: impl Fn(&str) -> Option<String>) {
        let before = fs::read_to_string(self.config_path()).expect("cannot read the configuration file");
        let after: String = before.lines().filter_map(edit).map(|line| line + "\n").collect();
        fs::write(self.config_path(), after).expect("cannot write the configuration file");
    }

    fn config_path(&self) -> PathBuf {
        self.dir().join("valkey.conf")
    }

    fn launch(&self) -> Result<(), StartFailure> {
        let log =
            OpenOptions::new().create(true).append(true).open(self.log_path()).expect("cannot open the server's log");
        let log_start = self.log_length();
        *self.process() = Some(self.spawn(log));
        let ready_line = if self.role == Role::Sentinel { READY_SENTINEL } else { READY };
        let ready = poll(self.ready_within, || {
            // Asked before the log is read: what a server says last is in it then.
            let status = self.exit_status();
            let log = self.log_since(log_start);
            match status {
                Some(_) => Some(Err(StartFailure { status, log })),
                None => log.contains(ready_line).then_some(Ok(())),
            }
        });
        ready.unwrap_or_else(|| {
            let log = self.log_since(log_start);
            Err(StartFailure { status: None, log })
        })
    }

    fn spawn(&self, log: File) -> Child {
        let errors = log.try_clone().expect("cannot share the server's log");
        let mut command = match &self.place {
            None => process::command(&self.binary),
            Some(place) => {
                let mut command = process::command(Path::new("nsenter"));
                command.arg(format!("--net={}", place.namespace.display())).arg(&self.binary);
                command
            }
        };
        command
            .arg("valkey.conf")
            .args((self.role == Role::Sentinel).then_some("--sentinel"))
            .current_dir(self.dir())
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(errors);
        process::spawn(command)
            .unwrap_or_else(|error| panic!("cannot start a server by `setpriv` (package util-linux): {error}"))
    }

    fn log_path(&self) -> PathBuf {
        self.dir().join("server.log")
    }

    fn process(&self) -> MutexGuard<'_, Option<Child>> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[track_caller]
    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.pid()).expect("a pid fits in 31 bits");
        if let Err(error) = kill(Pid::from_raw(pid), signal) {
            panic!("cannot send {signal} to the server: {error}");
        }
    }

    /// Ends the process if it runs, and takes it as ended by the test.
    fn forget_process(&self) {
        if let Some(mut child) = self.process().take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    fn verdict(&self, log_start: u64) -> Result<(), String> {
        if let Some(status) = self.exit_status() {
            return Err(format!("the server died by itself: {status}"));
        }
        let log = self.log_since(log_start);
        match ALARMS.iter().find(|alarm| log.contains(**alarm)) {
            Some(alarm) if !self.panics_allowed => Err(format!("the server's log says \"{alarm}\"")),
            _ => Ok(()),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let verdict = self.verdict(0);
        self.forget_process();
        let failing = std::thread::panicking();
        if verdict.is_ok() && !failing {
            return;
        }
        let tail = tail(&self.log());
        let kept = self.dir.keep().display();
        let complaint = verdict.err().unwrap_or_else(|| "the test failed".into());
        let report = format!("{complaint}; {kept} is kept; the server's log ends:\n{tail}");
        // A panic while unwinding would abort the whole test process.
        if failing {
            eprintln!("{report}");
        } else {
            panic!("{report}");
        }
    }
}

/// The last lines of a log.
pub(crate) fn tail(log: &str) -> String {
    let lines: Vec<_> = log.lines().collect();
    lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..].join("\n")
}
