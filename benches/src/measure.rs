//! Measuring on a machine that has other things to do.
//!
//! What is compared is measured in turns of a few milliseconds, in another order each round, and compared within each round: whatever
//! slows the machine down slows down both. The median over the rounds is the figure; the quartiles beside it say how sure it is.

use std::fs;
use std::time::{Duration, Instant};

use flock_tests::cpu::main_thread_cpu;
use flock_tests::resp::Conn;
use flock_tests::server::Server;
use flock_tests::wait::wait_for;

/// No turn takes longer, on any machine.
const SLEEPS_WITHIN: Duration = Duration::from_secs(10);

/// Processor time of the server's main thread, once it sleeps: then everything it was given is done, and the kernel, which counts the time
/// of a running thread at its ticks only, has counted all of it.
pub fn settled_cpu(server: &Server) -> Duration {
    wait_for("the server sleeps", SLEEPS_WITHIN, || {
        let before = main_thread_cpu(server.pid());
        let asleep = is_asleep(server.pid());
        let now = main_thread_cpu(server.pid());
        (asleep && now == before).then_some(now)
    })
}

/// Whether the main thread waits for something to do, and not for a processor.
fn is_asleep(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/task/{pid}/stat")).unwrap_or_default();
    // The name before the state is in parentheses, and may have any in it.
    stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('S'))
}

/// How long the server's main thread and the calling one have waited for a processor so far: what other programs took from them.
pub fn waited_for_processor(server_pid: u32) -> Duration {
    let waited = |path: &str| {
        let schedstat = fs::read_to_string(path).unwrap_or_default();
        let nanoseconds = schedstat.split_whitespace().nth(1).and_then(|waited| waited.parse().ok());
        Duration::from_nanos(nanoseconds.unwrap_or_default())
    };
    waited(&format!("/proc/{server_pid}/task/{server_pid}/schedstat")) + waited("/proc/thread-self/schedstat")
}

/// Nanoseconds that the server's main thread used for `work`, each of its `times`.
pub fn cpu_ns_each(server: &Server, times: usize, work: impl FnOnce()) -> f64 {
    let before = settled_cpu(server);
    work();
    let used = settled_cpu(server) - before;
    used.as_secs_f64() * 1e9 / times as f64
}

/// A PING and its answer: what times are compared with.
pub fn round_trip(conn: &mut Conn) -> Duration {
    let start = Instant::now();
    conn.cmd(&["PING"]);
    start.elapsed()
}

/// Runs every contestant once a round, in another order each time, and returns what each measured, round by round. The first round is a
/// warm-up and does not count.
pub fn alternate(rounds: usize, contestants: &mut [&mut dyn FnMut() -> f64]) -> Vec<Vec<f64>> {
    let count = contestants.len();
    let mut samples = vec![Vec::with_capacity(rounds); count];
    for round in 0..=rounds {
        for turn in 0..count {
            let turn = if round % 2 == 0 { turn } else { count - 1 - turn };
            let contestant = (turn + round / 2) % count;
            let sample = contestants[contestant]();
            if round > 0 {
                samples[contestant].push(sample);
            }
        }
    }
    samples
}

/// The median of some samples, and their quartiles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// Half are below it.
    pub median: f64,
    /// A quarter is below it.
    pub low: f64,
    /// A quarter is above it.
    pub high: f64,
}

impl Summary {
    /// Of these samples, at least one.
    ///
    /// # Panics
    /// If there is none.
    pub fn of(samples: &[f64]) -> Summary {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |part: usize| sorted[(sorted.len() - 1) * part / 4];
        Summary { median: at(2), low: at(1), high: at(3) }
    }

    /// Of the ratios `a / b`, round by round.
    pub fn of_ratios(a: &[f64], b: &[f64]) -> Summary {
        let ratios: Vec<f64> = a.iter().zip(b).map(|(a, b)| a / b).collect();
        Summary::of(&ratios)
    }

    /// One value, measured once: it has no spread.
    pub fn exactly(value: f64) -> Summary {
        Summary { median: value, low: value, high: value }
    }

    /// In another unit.
    pub fn scaled(self, factor: f64) -> Summary {
        Summary { median: self.median * factor, low: self.low * factor, high: self.high * factor }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_is_of_the_sorted_samples() {
        let summary = Summary::of(&[5.0, 1.0, 3.0, 2.0, 4.0]);
        assert_eq!(summary, Summary { median: 3.0, low: 2.0, high: 4.0 });
        assert_eq!(Summary::of(&[7.0]), Summary::exactly(7.0));
        assert_eq!(Summary::of_ratios(&[2.0, 8.0], &[1.0, 4.0]), Summary::exactly(2.0));
    }

    #[test]
    fn everyone_runs_once_a_round_and_the_first_round_does_not_count() {
        let mut times = 0.0;
        let mut count = || {
            times += 1.0;
            times
        };
        let samples = alternate(3, &mut [&mut count, &mut || 0.5]);
        assert_eq!(samples, [vec![2.0, 3.0, 4.0], vec![0.5; 3]]);
    }
}
