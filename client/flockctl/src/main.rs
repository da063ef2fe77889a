//! `flockctl`: run a command under one of FLOCK's locks, and see the locks there are.
//!
//! | file | what it is |
//! |---|---|
//! | `cli.rs` | the command line: options and their help |
//! | `server.rs` | where the server is, and the connection to it |
//! | `run.rs` | `run`: the lock around a command |
//! | `job.rs`, `signals.rs`, `terminal.rs` | the command as a process group: signals, suspension, its end |
//! | `helper.rs` | this program in two other roles: becoming the command, and ending it when we are killed |
//! | `locks.rs` | `ls`, `info`, `revoke` |
//! | `top.rs` | `top` |
//! | `bench.rs` | `bench` |
//! | `table.rs`, `output.rs` | what people read, what scripts read |
//! | `failure.rs` | what goes wrong, and the exit code of each |
#![forbid(unsafe_code)]

mod bench;
mod cli;
mod failure;
mod helper;
mod job;
mod locks;
mod members;
mod output;
mod run;
mod server;
mod signals;
mod table;
mod terminal;
mod top;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use crate::cli::{Cli, Command};
use crate::failure::{Failure, USAGE};

fn main() -> ExitCode {
    signals::unblock();
    if let Some(code) = helper::role() {
        return code;
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { USAGE } else { 0 });
        }
    };
    match perform(cli) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            failure.report();
            ExitCode::from(failure.code())
        }
    }
}

fn perform(cli: Cli) -> Result<u8, Failure> {
    let server = &cli.server;
    // On this thread: the command is a child of the thread that starts it, and would die with any other.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        match cli.command {
            Command::Run(args) => run::run(server, &args).await,
            Command::Ls(args) => locks::ls(server, &args).await,
            Command::Info(args) => locks::info(server, &args).await,
            Command::Revoke(args) => locks::revoke(server, &args).await,
            Command::Top(args) => top::top(server, &args).await,
            Command::Bench(args) => bench::bench(server, &args).await,
            Command::Completions { shell } => {
                let mut script = Vec::new();
                clap_complete::generate(shell, &mut Cli::command(), "flockctl", &mut script);
                output::print(script)
            }
            Command::Man { dir: Some(dir) } => Ok(clap_mangen::generate_to(Cli::command(), dir).map(|()| 0)?),
            Command::Man { dir: None } => {
                let mut page = Vec::new();
                clap_mangen::Man::new(Cli::command()).render(&mut page)?;
                output::print(page)
            }
        }
    })
}
