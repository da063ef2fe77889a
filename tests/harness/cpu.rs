//! What a process used, as the kernel counts it; and what it could not have.

use std::fs;
use std::time::{Duration, Instant};

use crate::resp::Conn;
use crate::server::{Info, Server};

/// Processor time of the main thread, in which a server runs its commands; to the nanosecond, so the difference over a run
/// tells the cost per command however busy the machine was.
///
/// # Panics
/// If there is no such process, or the kernel keeps no such count.
#[track_caller]
pub fn main_thread_cpu(pid: u32) -> Duration {
    scheduling(&format!("{pid}/task/{pid}"))[0]
}

/// Tells how late something is, and leaves out what the machine did to it: the time in which the server's main thread or the thread
/// that judges was ready to run and had no processor. So a bound can be tight, and hold on a machine that is busy with other things.
#[derive(Clone, Copy, Debug)]
pub struct Stopwatch {
    pid: u32,
    start: Instant,
    stalls: Duration,
}

impl Stopwatch {
    /// Starts now.
    ///
    /// # Panics
    /// If the server is not running.
    #[track_caller]
    pub fn start(server: &Server) -> Stopwatch {
        let pid = server.pid();
        Stopwatch { pid, start: Instant::now(), stalls: stalls(pid) }
    }

    /// All the time since the start.
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// How far the time since the start exceeds `lasts`, without the stalls of the server and of this thread, which must be the one
    /// that started the watch. Zero if it does not.
    ///
    /// # Panics
    /// If the server is gone.
    #[track_caller]
    pub fn late(&self, lasts: Duration) -> Duration {
        // The time first: what stalls afterwards is nobody's excuse.
        let elapsed = self.elapsed();
        elapsed.saturating_sub(lasts).saturating_sub(stalls(self.pid) - self.stalls)
    }
}

/// How long the server's main thread and this one have waited for a processor, in all.
#[track_caller]
fn stalls(pid: u32) -> Duration {
    scheduling(&format!("{pid}/task/{pid}"))[1] + scheduling("thread-self")[1]
}

/// How long a thread has run, and how long it was ready to run and did not.
#[track_caller]
fn scheduling(thread: &str) -> [Duration; 2] {
    let path = format!("/proc/{thread}/schedstat");
    let text = read(&path);
    let mut numbers = text.split_whitespace().map(str::parse).map_while(Result::ok).map(Duration::from_nanos);
    match (numbers.next(), numbers.next()) {
        (Some(ran), Some(waited)) => [ran, waited],
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
    fn lateness_leaves_out_the_wait_for_a_processor_only() {
        // A pause is late in full. A server that shares its processor with busy threads is late too, and not by its own fault.
        let server = Server::builder().without_module().start();
        let mut conn = server.connect(Protocol::Resp2);
        let watch = Stopwatch::start(&server);
        conn.cmd(&["DEBUG", "SLEEP", "0.1"]);
        let late = watch.late(Duration::from_millis(20));
        assert!((Duration::from_millis(70)..=watch.elapsed()).contains(&late), "{late:?} of {:?}", watch.elapsed());
        let watch = Stopwatch::start(&server);
        assert_eq!(watch.late(Duration::from_secs(60)), Duration::ZERO);
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
