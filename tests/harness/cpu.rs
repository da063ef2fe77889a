//! What a process used, as the kernel counts it.

use std::fs;
use std::time::Duration;

use crate::resp::Conn;
use crate::server::Info;

/// Processor time of the main thread, in which a server runs its commands; to the nanosecond, so the difference over a run
/// tells the cost per command however busy the machine was.
///
/// # Panics
/// If there is no such process, or the kernel keeps no such count.
#[track_caller]
pub fn main_thread_cpu(pid: u32) -> Duration {
    let path = format!("/proc/{pid}/task/{pid}/schedstat");
    let text = read(&path);
    match text.split_whitespace().next().map(str::parse) {
        Some(Ok(nanoseconds)) => Duration::from_nanos(nanoseconds),
        _ => panic!("expected nanoseconds in {path}, got {text:?}"),
    }
}

/// Memory of the process that is in RAM, in bytes.
///
/// # Panics
/// If there is no such process.
#[track_caller]
pub fn resident_bytes(pid: u32) -> u64 {
    let path = format!("/proc/{pid}/status");
    let text = read(&path);
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    match line.and_then(|line| line.trim().strip_suffix(" kB")).map(str::parse::<u64>) {
        Some(Ok(kilobytes)) => kilobytes * 1024,
        _ => panic!("no VmRSS in {path}"),
    }
}

/// What the server itself counts as allocated, the module included, in bytes.
///
/// # Panics
/// If there is no answer.
#[track_caller]
pub fn used_memory(conn: &mut Conn) -> u64 {
    let bytes = Info::ask(conn, "memory").number("used_memory");
    u64::try_from(bytes).expect("used_memory is not negative")
}

#[track_caller]
fn read(path: &str) -> String {
    match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) => panic!("cannot read {path}: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use std::process::id;

    use super::*;
    use crate::args;
    use crate::resp::Protocol;
    use crate::server::Server;

    #[test]
    fn busy_server_is_seen_to_be() {
        let server = Server::builder().without_module().start();
        let mut conn = server.connect(Protocol::Resp2);
        let before = main_thread_cpu(server.pid());
        let idle_until = main_thread_cpu(server.pid());
        conn.cmd(&["EVAL", "for i = 1, 3000000 do end", "0"]);
        let busy = main_thread_cpu(server.pid()) - idle_until;
        assert!(idle_until - before < busy, "{busy:?}");
        assert!(busy > Duration::from_millis(1), "{busy:?}");
    }

    #[test]
    fn server_counts_what_it_stores() {
        let server = Server::builder().without_module().start();
        let mut conn = server.connect(Protocol::Resp2);
        let before = used_memory(&mut conn);
        conn.cmd(&args!["SETRANGE", "k", 10_000_000, "x"]);
        assert!(used_memory(&mut conn) >= before + 10_000_000);
    }

    #[test]
    fn resident_memory_is_plausible() {
        assert!((1 << 19..1 << 34).contains(&resident_bytes(id())));
    }
}
