//! The command line against real servers: what it prints, what it exits with, and that no command outlives its lock.
//!
//! | file | promise |
//! |---|---|
//! | `run.rs` | the lock around a command: status, environment, signals, waiting |
//! | `loss.rs` | the command ends when its lock is lost, and when flockctl is killed |
//! | `terminal.rs` | keys, suspension, `top`, colours |
//! | `locks.rs` | `ls`, `info`, `revoke`, `bench`, and how the server is found |
//! | `admin.rs` | the client's administrative calls, when answers are lost |
//! | `cluster.rs` | a cluster by its URL |
//! | `tls.rs` | a server that is trusted, and one that is not |
//! | `scene.rs`, `pty.rs` | flockctl as a process, with and without a terminal |

mod admin;
mod cluster;
mod locks;
mod loss;
mod pty;
mod run;
mod scene;
mod terminal;
mod tls;
