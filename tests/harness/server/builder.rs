//! How a server is started: its configuration, and what is tried until it is ready.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Mutex;
use std::time::Duration;

use super::{Generation, Server, WALL_CLOCK, path_from_env};
use crate::c_library;
use crate::network::{Host, Place};
use crate::port::PortLease;
use crate::work_dir::WorkDir;

/// An idle machine has a server ready in 40 ms; loading data, valgrind and a busy machine take longer.
const READY_WITHIN: Duration = Duration::from_secs(20);
/// Somebody else may take a port between our look and the server's bind; not this often in a row.
const PORT_TRIES: u32 = 8;
pub(super) const PORT_IS_TAKEN: &str = "Failed listening on port";

/// How a server is to be started. Every method takes and returns the builder; clones start servers alike.
#[derive(Clone, Debug)]
pub struct Builder {
    binary: Option<PathBuf>,
    generation: Generation,
    module: Module,
    module_args: Vec<String>,
    config: Vec<(String, String)>,
    env: Vec<(String, String)>,
    wall_clock: Option<i64>,
    role: Role,
    place: Option<Place>,
    data_from: Option<PathBuf>,
    ready_within: Duration,
    panics_allowed: bool,
}

/// What the program is started as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Server,
    ClusterNode,
    Sentinel,
}

#[derive(Clone, Debug)]
enum Module {
    FromEnv,
    At(PathBuf),
    None,
}

/// A server that did not become ready.
#[derive(Debug)]
pub struct StartFailure {
    /// How it ended; none if it was still running and had to be killed.
    pub status: Option<ExitStatus>,
    /// Everything it said.
    pub log: String,
}

impl Builder {
    pub(super) fn new() -> Builder {
        Builder {
            binary: None,
            generation: Generation::New,
            module: Module::FromEnv,
            module_args: Vec::new(),
            config: Vec::new(),
            env: Vec::new(),
            wall_clock: None,
            role: Role::Server,
            place: None,
            data_from: None,
            ready_within: READY_WITHIN,
            panics_allowed: false,
        }
    }

    /// Which server; the newest unless said.
    pub fn generation(mut self, generation: Generation) -> Builder {
        self.generation = generation;
        self
    }

    /// Another server binary than the two generations'.
    pub fn binary(mut self, path: impl Into<PathBuf>) -> Builder {
        self.binary = Some(path.into());
        self
    }

    /// A line of the configuration file, taken as it is: `.config("client-output-buffer-limit", "normal 0 0 0")`. Later lines win.
    pub fn config(mut self, name: &str, value: impl ToString) -> Builder {
        self.config.push((name.to_owned(), value.to_string()));
        self
    }

    /// One more argument for the module.
    pub fn module_arg(mut self, arg: &str) -> Builder {
        self.module_args.push(arg.to_owned());
        self
    }

    /// Another module file than `$FLOCK_MODULE`: one built for a sanitizer, or of an older version.
    pub fn module(mut self, path: impl Into<PathBuf>) -> Builder {
        self.module = Module::At(path.into());
        self
    }

    /// No module at all: a plain server.
    pub fn without_module(mut self) -> Builder {
        self.module = Module::None;
        self
    }

    /// Starts as a replica of `primary`.
    pub fn replica_of(self, primary: &Server) -> Builder {
        self.config("replicaof", format!("{} {}", primary.addr().ip(), primary.port()))
    }

    /// With the append-only file, synced at every write, so that what was acknowledged survives [`Server::kill9`].
    pub fn appendonly(self) -> Builder {
        self.config("appendonly", "yes").config("appendfsync", "always")
    }

    /// As a cluster node, knowing nobody yet; see [`crate::topology::Cluster`].
    pub fn cluster(mut self) -> Builder {
        self.role = Role::ClusterNode;
        self
    }

    /// As a sentinel, of what `sentinel monitor` lines of its configuration say; see [`crate::topology::Guarded`].
    pub fn sentinel(mut self) -> Builder {
        self.role = Role::Sentinel;
        self.without_module()
    }

    /// On a host of a network, instead of where the test itself is.
    pub fn within(mut self, host: &Host) -> Builder {
        self.place = Some(host.place());
        self
    }

    /// Puts the server's wall clock off by so many seconds, from its very start; [`Server::set_wall_clock`] changes it. Its clocks since
    /// boot stay true.
    pub fn wall_clock(mut self, offset_s: i64) -> Builder {
        self.wall_clock = Some(offset_s);
        self
    }

    /// On a system that has no timers, only the server's cron.
    pub fn without_timer(self) -> Builder {
        self.wall_clock(0).env("NO_TIMER", "yes")
    }

    /// An environment variable for the server.
    pub fn env(mut self, name: &str, value: &str) -> Builder {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts on a copy of what `server` has on disk: its RDB and AOF files.
    pub fn copy_data_from(mut self, server: &Server) -> Builder {
        self.data_from = Some(server.dir().to_path_buf());
        self
    }

    /// How long the server may take to be ready; for valgrind and large data sets.
    pub fn ready_within(mut self, within: Duration) -> Builder {
        self.ready_within = within;
        self
    }

    /// Tolerates panics and crash reports in the log, for tests that plant one.
    pub fn allow_panics(mut self) -> Builder {
        self.panics_allowed = true;
        self
    }

    /// Starts the server and waits until it is ready.
    ///
    /// # Panics
    /// With the log, if it does not become ready.
    #[track_caller]
    pub fn start(&self) -> Server {
        match self.try_start() {
            Ok(server) => server,
            Err(failure) => panic!("the server did not become ready ({:?}); its log:\n{}", failure.status, failure.log),
        }
    }

    /// Starts a server that may refuse to: bad module arguments, broken data files.
    ///
    /// # Errors
    /// How it ended, and its log.
    pub fn try_start(&self) -> Result<Server, StartFailure> {
        for _ in 1..PORT_TRIES {
            match self.try_start_once() {
                Err(failure) if failure.log.contains(PORT_IS_TAKEN) => {}
                outcome => return outcome,
            }
        }
        self.try_start_once()
    }

    fn try_start_once(&self) -> Result<Server, StartFailure> {
        let dir = WorkDir::new();
        let port = PortLease::take();
        let bus = (self.role == Role::ClusterNode).then(PortLease::take);
        if let Some(source) = &self.data_from {
            copy_data(source, dir.path());
        }
        fs::write(dir.path().join("valkey.conf"), self.config_file(&port, bus.as_ref()))
            .expect("cannot write the configuration file");
        let mut env = self.env.clone();
        if let Some(offset_s) = self.wall_clock {
            let clock = dir.path().join(WALL_CLOCK);
            fs::write(&clock, offset_s.to_ne_bytes()).expect("cannot write the wall clock");
            let preload = c_library("harness/clocks.c");
            env.extend([("LD_PRELOAD", preload), ("WALL_CLOCK", clock)].map(|(name, path)| {
                (name.to_owned(), path.to_str().expect("a target directory has a name in UTF-8").to_owned())
            }));
        }
        let server = Server {
            binary: self.binary.clone().unwrap_or_else(|| self.generation.binary()),
            role: self.role,
            place: self.place.clone(),
            env,
            ready_within: self.ready_within,
            panics_allowed: self.panics_allowed,
            process: Mutex::new(None),
            port,
            bus,
            dir,
        };
        match server.launch() {
            Ok(()) => Ok(server),
            Err(failure) => {
                server.forget_process();
                Err(failure)
            }
        }
    }

    /// A file rather than arguments, so that CONFIG REWRITE works and a restart finds what it wrote.
    fn config_file(&self, port: &PortLease, bus: Option<&PortLease>) -> String {
        let address = self.place.as_ref().map_or(Ipv4Addr::LOCALHOST, |place| place.address);
        let mut lines = vec![format!("bind {address}"), format!("port {}", port.number())];
        if self.place.is_some() {
            // Only the test can reach it, and comes from another address than the server's own.
            lines.push("protected-mode no".to_owned());
        }
        if self.role != Role::Sentinel {
            lines.extend([
                "save \"\"".to_owned(),
                "enable-debug-command yes".to_owned(),
                // The default of 5 s waits for more replicas to come; a test knows how many there are.
                "repl-diskless-sync-delay 0".to_owned(),
                // The memory test after a crash only delays the report.
                "crash-memcheck-enabled no".to_owned(),
            ]);
        }
        if let Some(bus) = bus {
            lines.push("cluster-enabled yes".to_owned());
            lines.push(format!("cluster-port {}", bus.number()));
        }
        if let Some(module) = self.module_file() {
            let args = self.module_args.iter().map(|arg| format!(" {arg}"));
            lines.push(format!("loadmodule \"{}\"{}", module.display(), args.collect::<String>()));
        }
        lines.extend(self.config.iter().map(|(name, value)| format!("{name} {value}")));
        lines.join("\n") + "\n"
    }

    fn module_file(&self) -> Option<PathBuf> {
        match &self.module {
            Module::None => None,
            Module::At(path) => Some(path.clone()),
            Module::FromEnv => Some(path_from_env("FLOCK_MODULE")),
        }
    }
}

/// RDB and AOF files, and nothing that belongs to the running server.
fn copy_data(source: &Path, target: &Path) {
    let copy = |from: &Path, to: &Path| {
        fs::copy(from, to).unwrap_or_else(|error| panic!("cannot copy {}: {error}", from.display()));
    };
    let rdb = source.join("dump.rdb");
    if rdb.exists() {
        copy(&rdb, &target.join("dump.rdb"));
    }
    let aof = source.join("appendonlydir");
    for entry in fs::read_dir(&aof).into_iter().flatten().flatten() {
        let to = target.join("appendonlydir");
        fs::create_dir_all(&to).expect("cannot make the AOF directory");
        copy(&entry.path(), &to.join(entry.file_name()));
    }
}
