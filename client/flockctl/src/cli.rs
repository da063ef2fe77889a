//! The command line. What is said here is the help, the man page and the completions.

use std::ffi::OsString;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use crate::failure::BUSY;

/// Fenced locks in Valkey: run a command under a lock, and see the locks there are
#[derive(Debug, Parser)]
#[command(name = "flockctl", version, disable_help_subcommand = true, after_help = NOTES)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    #[command(subcommand)]
    pub(crate) command: Command,
}

const NOTES: &str = "Environment: FLOCK_URL, the server; FLOCK_PASSWORD, its password; FLOCK_CA_FILE, FLOCK_CERT_FILE and \
                     FLOCK_CERT_KEY_FILE, as the options; NO_COLOR, no colours.\n\n\
                     Exit codes: 0 done, 1 nothing found, 64 usage, 69 server unreachable, 71 system error, 75 busy, \
                     76 refused by the server, 79 lock lost. `run` returns the command's own status, 128 + N if it was \
                     killed by signal N, 126 or 127 if it cannot be run.";

/// Not a doc comment: the brackets would be links there.
const URL: &str = "The server: valkey://[user@]host[:port][/db], valkeys:// with TLS, unix:///path, \
                   valkey+sentinel://host,.../service, or valkey+cluster://host,... \
                   A password is better in FLOCK_PASSWORD than here, where `ps` shows it";

/// Where the server is.
#[derive(Args, Debug)]
pub(crate) struct ServerArgs {
    #[arg(long, global = true, env = "FLOCK_URL", hide_env_values = true, value_name = "URL", help = URL)]
    #[arg(default_value = "valkey://127.0.0.1:6379")]
    pub(crate) url: String,

    /// Whom to trust with TLS: certificates in PEM. Unless given, whom this machine trusts
    #[arg(long, global = true, env = "FLOCK_CA_FILE", value_name = "FILE")]
    pub(crate) ca_file: Option<PathBuf>,

    /// Our own certificate, with its chain, in PEM
    #[arg(long, global = true, env = "FLOCK_CERT_FILE", value_name = "FILE", requires = "cert_key_file")]
    pub(crate) cert_file: Option<PathBuf>,

    /// The private key of our certificate, in PEM
    #[arg(long, global = true, env = "FLOCK_CERT_KEY_FILE", value_name = "FILE", requires = "cert_file")]
    pub(crate) cert_key_file: Option<PathBuf>,

    /// How long to try to connect
    #[arg(long, global = true, value_name = "TIME", default_value = "5s", value_parser = time)]
    pub(crate) connect_timeout: Duration,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command under a lock
    ///
    /// Takes the lock, runs the command, and gives the lock back when the command and all that it has started have ended: the job. The
    /// command finds the fencing token in FLOCK_TOKEN and the lock's name in FLOCK_KEY, but neither FLOCK_PASSWORD nor a FLOCK_URL with a
    /// password in it. Signals are passed on to its process group.
    /// If the lock is lost, the job gets SIGTERM and, after the grace, SIGKILL; if the lease cannot be renewed, both come before it is
    /// over. If flockctl itself is killed, so is the job.
    Run(RunArgs),
    /// List the locks that are held
    Ls(LsArgs),
    /// Show who holds a lock and who waits for it
    Info(InfoArgs),
    /// Watch the held locks; without a terminal, show them once
    Top(TopArgs),
    /// End the holds of a lock
    ///
    /// Their owners are told, and the next one in the queue is let in. Waiting requests stay.
    Revoke(RevokeArgs),
    /// Measure the way to the server and back, on throw-away locks
    ///
    /// A look at this connection with everything that is on it: this program, the network, the server and whoever else uses it.
    Bench(BenchArgs),
    /// Print completions for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the man page
    Man {
        /// Write a page for each subcommand into this directory instead
        #[arg(long)]
        dir: Option<PathBuf>,
    },
}

#[derive(Args, Debug)]
pub(crate) struct RunArgs {
    /// How long to wait for the lock; 0s only tries. Without it the wait has no end
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub(crate) wait: Option<Duration>,

    /// How long the lock outlives flockctl if that dies. It is renewed at a third of this
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time)]
    pub(crate) lease: Duration,

    /// Together with other shared holders
    #[arg(long)]
    pub(crate) shared: bool,

    /// Together with other shared holders, so many at most; all should give the same number
    #[arg(long, value_name = "N")]
    pub(crate) limit: Option<NonZeroU32>,

    /// What `flockctl info` shows beside the hold: who, where, why. Unless said: host, process and program
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<OsString>,

    /// The lock is free this soon after flockctl or its connection has died, however long the lease; at least 2.5s
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub(crate) session: Option<Duration>,

    /// How long the command has between SIGTERM and SIGKILL when the lock is lost
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = time)]
    pub(crate) grace: Duration,

    /// The exit code if somebody else holds the lock
    #[arg(short = 'E', long, value_name = "CODE", default_value_t = BUSY)]
    pub(crate) busy_code: u8,

    /// The lock's name
    pub(crate) key: OsString,

    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

#[derive(Args, Debug)]
pub(crate) struct LsArgs {
    /// Only locks whose names match this glob, as order:*
    #[arg(default_value = "*")]
    pub(crate) pattern: OsString,

    /// Only locks that this owner holds
    #[arg(long)]
    pub(crate) owner: Option<OsString>,

    /// A JSON array. What is not UTF-8 is {"hex": "..."}
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct InfoArgs {
    /// The lock's name
    pub(crate) key: OsString,

    /// Show so many waiters
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    pub(crate) waiters: u32,

    /// A JSON object; null if nobody holds the lock or waits for it
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct TopArgs {
    /// Only locks whose names match this glob
    #[arg(default_value = "*")]
    pub(crate) pattern: OsString,

    /// How often to look
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    pub(crate) interval: Duration,

    /// Once, as a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct RevokeArgs {
    /// The lock's name
    pub(crate) key: OsString,

    /// Only this owner's hold
    #[arg(long, conflicts_with = "token")]
    pub(crate) owner: Option<OsString>,

    /// Only the hold with this fencing token
    #[arg(long)]
    pub(crate) token: Option<u64>,

    /// Do not ask. Needed without a terminal
    #[arg(short, long)]
    pub(crate) yes: bool,

    /// A JSON object with the number of holds that were ended
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    /// How long to measure, each of the three things
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = interval)]
    pub(crate) time: Duration,

    /// Tasks that take and give back locks at the same time, over one connection
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) tasks: u32,

    /// A JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

fn time(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|error| format!("{error}; write 30s, 500ms, 1m 30s"))
}

fn interval(text: &str) -> Result<Duration, String> {
    match time(text)? {
        time if time.is_zero() => Err("zero".into()),
        time => Ok(time),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn options_of_the_command_are_the_commands() {
        let cli = Cli::try_parse_from(["flockctl", "run", "--wait", "1s", "k", "--", "sh", "--wait", "-c"]).unwrap();
        let Command::Run(run) = cli.command else { panic!("not run") };
        assert_eq!(run.command, ["sh", "--wait", "-c"]);
        assert_eq!(run.wait, Some(Duration::from_secs(1)));
    }
}
