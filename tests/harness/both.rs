//! One test, run on every supported server and protocol version, as separate tests with names of their own.
//!
//! The macros only list functions. So the functions stay ordinary code: formatted, linted, and reported as unused if they
//! are on no list.

use std::thread::panicking;

use crate::resp::Protocol;
use crate::server::{Builder, Generation, Server, tail};
use crate::topology::Cluster;

/// Makes four tests of each `fn(&Server, Protocol)`: `name::v9_resp2`, `v9_resp3`, `v8_resp2`, `v8_resp3`.
///
/// All run on servers that other tests use at the same time; see [`Server::shared`](crate::server::Server::shared) for what they must leave alone.
#[macro_export]
macro_rules! on_shared_servers {
    ($($name:ident),+ $(,)?) => {$(
        mod $name {
            use $crate::{both::run_on_shared, resp::Protocol, server::Generation};

            #[test]
            fn v9_resp2() {
                run_on_shared(Generation::New, Protocol::Resp2, super::$name);
            }

            #[test]
            fn v9_resp3() {
                run_on_shared(Generation::New, Protocol::Resp3, super::$name);
            }

            #[test]
            fn v8_resp2() {
                run_on_shared(Generation::Old, Protocol::Resp2, super::$name);
            }

            #[test]
            fn v8_resp3() {
                run_on_shared(Generation::Old, Protocol::Resp3, super::$name);
            }
        }
    )+};
}

/// Makes two tests of each `fn(Builder)`: `name::v9` and `name::v8`. Each starts servers of its own from the builder.
#[macro_export]
macro_rules! on_own_servers {
    ($($name:ident),+ $(,)?) => {$(
        mod $name {
            use $crate::{both::run_on_own, server::Generation};

            #[test]
            fn v9() {
                run_on_own(Generation::New, super::$name);
            }

            #[test]
            fn v8() {
                run_on_own(Generation::Old, super::$name);
            }
        }
    )+};
}

/// Makes two tests of each `fn(&Cluster)`: `name::v9` and `name::v8`, on a cluster of three primaries and three replicas that other tests
/// use too, before and afterwards; see [`Cluster::shared`](crate::topology::Cluster::shared) for what they must leave alone.
#[macro_export]
macro_rules! on_shared_cluster {
    ($($name:ident),+ $(,)?) => {$(
        mod $name {
            use $crate::{both::run_on_shared_cluster, server::Generation};

            #[test]
            fn v9() {
                run_on_shared_cluster(Generation::New, super::$name);
            }

            #[test]
            fn v8() {
                run_on_shared_cluster(Generation::Old, super::$name);
            }
        }
    )+};
}

/// Runs `test` on the shared server, which must then be as well as before.
///
/// # Panics
/// If the test does, or if the server is not well.
pub fn run_on_shared(generation: Generation, protocol: Protocol, test: fn(&Server, Protocol)) {
    let server = Server::shared(generation);
    let log_start = server.log_length();
    let _printer = LogPrinter { server: &server, log_start };
    test(&server, protocol);
    server.assert_alive_since(log_start);
}

/// Runs `test` with a builder for this generation.
pub fn run_on_own(generation: Generation, test: fn(Builder)) {
    test(Server::builder().generation(generation));
}

/// Runs `test` on the shared cluster, which must then be as well as before.
///
/// # Panics
/// If the test does, or if a node is not well.
pub fn run_on_shared_cluster(generation: Generation, test: fn(&Cluster)) {
    let shared = Cluster::shared(generation);
    let cluster = shared.as_ref().expect("it has been started");
    let printers: Vec<_> =
        cluster.nodes.iter().map(|server| LogPrinter { server, log_start: server.log_length() }).collect();
    test(cluster);
    for printer in &printers {
        printer.server.assert_alive_since(printer.log_start);
    }
}

/// Prints what a shared server has logged during a test that failed; its guard lives on and will not.
struct LogPrinter<'a> {
    server: &'a Server,
    log_start: u64,
}

impl Drop for LogPrinter<'_> {
    fn drop(&mut self) {
        if panicking() {
            let log = self.server.log_since(self.log_start);
            eprintln!("the shared server's log during this test:\n{}", tail(&log));
        }
    }
}
