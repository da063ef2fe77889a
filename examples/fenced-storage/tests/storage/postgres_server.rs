//! A PostgreSQL of this test process: made once, ended with it.
//!
//! PostgreSQL refuses to run as root, so for root it is run as `nobody`. It listens on a socket in its own folder only.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};

use flock_tests::wait::wait_until;
use tokio_postgres::NoTls;

use crate::scene::SOON;

/// `nobody` and its group, on Debian.
const NOBODY: u32 = 65534;

/// A shell watches over the server. When this process ends, however it ends, the shell's input does too: it stops the server and
/// removes the folder.
const WATCHED: &str = r#"trap '' INT
"$0"/postgres -D "$1"/data -k "$1" -c listen_addresses= -c fsync=off -c shared_buffers=16MB -c jit=off >"$1"/log 2>&1 &
read -r _
kill -QUIT $!
wait $!
rm -rf "$1""#;

struct PostgresServer {
    folder: PathBuf,
    /// Never closed: see [`WATCHED`].
    _alive: ChildStdin,
    _watched: Child,
}

/// A new, empty database: the parameters to connect to it.
pub(crate) async fn database() -> String {
    static SERVER: LazyLock<PostgresServer> = LazyLock::new(PostgresServer::start);
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let params = |name: &str| format!("host={} user=postgres dbname={name}", SERVER.folder.display());
    let name = format!("test_{}", NEXT.fetch_add(1, Ordering::Relaxed));
    let (db, connection) = tokio_postgres::connect(&params("postgres"), NoTls).await.expect("the database is there");
    tokio::spawn(connection);
    db.batch_execute(&format!("CREATE DATABASE {name}")).await.expect("a database can be made");
    params(&name)
}

impl PostgresServer {
    fn start() -> PostgresServer {
        let programs = std::env::var_os("POSTGRES_BIN")
            .expect("POSTGRES_BIN is not set: run these tests by `make test`, which sets up all they need");
        let folder = std::env::temp_dir().join(format!("fenced-storage-{}", std::process::id()));
        fs::create_dir(&folder).expect("cannot make a folder");
        let is_root = fs::metadata("/proc/self").expect("there is /proc").uid() == 0;
        if is_root {
            chown(&folder, Some(NOBODY), Some(NOBODY)).expect("root may do that");
        }
        let as_user = |program: &Path| {
            let mut command = Command::new(program);
            command.current_dir(&folder);
            if is_root {
                command.uid(NOBODY).gid(NOBODY);
            }
            command
        };
        let mut programs = PathBuf::from(programs);
        let can_run = as_user(&programs.join("postgres")).arg("--version").stdout(Stdio::null()).status();
        if is_root && !can_run.is_ok_and(|status| status.success()) {
            // It lies where nobody else may look, as in root's home.
            let copy = folder.join("postgresql");
            run(Command::new("cp").arg("-r").arg(programs.join("..")).arg(&copy));
            run(Command::new("chown").arg("-R").arg(format!("{NOBODY}:{NOBODY}")).arg(&copy)); // who is to remove it
            programs = copy.join("bin");
        }
        let initdb = programs.join("initdb");
        let settings = ["--auth=trust", "--username=postgres", "--no-locale", "--encoding=UTF8", "--no-sync", "-D"];
        run(as_user(&initdb).args(settings).arg(folder.join("data")));
        let mut shell = as_user(Path::new("/bin/sh"));
        shell.args(["-c", WATCHED]).arg(&programs).arg(&folder);
        let mut watched = shell.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("there is a shell");
        let alive = watched.stdin.take().expect("it is piped");
        let log = || fs::read_to_string(folder.join("log")).unwrap_or_default();
        wait_until("PostgreSQL is ready", SOON, || {
            let log = log();
            assert!(!log.contains("FATAL"), "{log}");
            log.contains("ready to accept connections")
        });
        PostgresServer { folder, _alive: alive, _watched: watched }
    }
}

fn run(command: &mut Command) {
    let done = command.output().unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
    let _ = std::io::stderr().write_all(&done.stderr);
    assert!(done.status.success(), "{command:?} failed");
}
