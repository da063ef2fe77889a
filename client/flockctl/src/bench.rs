//! `bench`: how far away the server is, and what a lock costs from here.
//!
//! What is measured is this program, its runtime, the network and the server together, at this moment. It is a look at a connection, not
//! a comparison of servers.

use std::time::{Duration, Instant};

use flock_client::Flock;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::cli::{BenchArgs, ServerArgs};
use crate::failure::{Failure, SYSTEM};
use crate::job::killed_by;
use crate::output;
use crate::signals::{ENDING, Signals};
use crate::table::{Columns, cell};

/// Short enough to be granted without a claim: no renewal is part of what is measured.
const LEASE: Duration = Duration::from_secs(5);
const HANDOFF_WITHIN: Duration = Duration::from_secs(10);
const GIVE_BACK_WITHIN: Duration = Duration::from_secs(2);

pub(crate) async fn bench(server: &ServerArgs, args: &BenchArgs) -> Result<u8, Failure> {
    let mut signals = Signals::default();
    signals.take(ENDING)?;
    let (one, other) = (server.connect().await?, server.connect().await?);
    let measured = tokio::select! {
        biased;
        signal = signals.next() => Err(killed_by(signal.as_raw())),
        report = measure(&one, &other, args) => Ok(report),
    };
    // What was held at an interrupt is given back.
    for flock in [one, other] {
        let _ = flock.shutdown(GIVE_BACK_WITHIN).await;
    }
    match measured {
        Ok(report) if args.json => output::print_json(&report?.json()),
        Ok(report) => output::print(report?.text()),
        Err(code) => Ok(code),
    }
}

#[derive(Debug)]
struct Report {
    tasks: u32,
    /// Try-and-release pairs a second.
    pairs_per_second: f64,
    ping: Latencies,
    acquire: Latencies,
    release: Latencies,
    handoff: Latencies,
}

async fn measure(one: &Flock, other: &Flock, args: &BenchArgs) -> Result<Report, Failure> {
    let prefix = format!("flockctl:bench:{}", uuid::Uuid::new_v4());
    let ping = pings(one, args.time).await?;
    let (pairs_per_second, acquire, release) = pairs(one, &prefix, args).await?;
    let handoff = handoffs(one, other, &format!("{prefix}:handoff"), args.time).await?;
    Ok(Report { tasks: args.tasks, pairs_per_second, ping, acquire, release, handoff })
}

async fn pings(flock: &Flock, time: Duration) -> Result<Latencies, Failure> {
    let begun = Instant::now();
    let mut times = Vec::new();
    while begun.elapsed() < time {
        let sent = Instant::now();
        flock.ping().await?;
        times.push(sent.elapsed());
    }
    Ok(Latencies::of(times))
}

/// Each task has a lock of its own: there is no waiting in these numbers.
async fn pairs(flock: &Flock, prefix: &str, args: &BenchArgs) -> Result<(f64, Latencies, Latencies), Failure> {
    let begun = Instant::now();
    let until = begun + args.time;
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..args.tasks {
        let (flock, key) = (flock.clone(), format!("{prefix}:{task}"));
        tasks.spawn(async move { take_and_give_back(&flock, &key, until).await });
    }
    let (mut acquired, mut released) = (Vec::new(), Vec::new());
    while let Some(task) = tasks.join_next().await {
        let (acquire, release) = task.map_err(|error| Failure::new(SYSTEM, error))??;
        acquired.extend(acquire);
        released.extend(release);
    }
    #[expect(clippy::cast_precision_loss, reason = "nobody measures 2^52 pairs")]
    let per_second = released.len() as f64 / begun.elapsed().as_secs_f64();
    Ok((per_second, Latencies::of(acquired), Latencies::of(released)))
}

async fn take_and_give_back(
    flock: &Flock,
    key: &str,
    until: Instant,
) -> Result<(Vec<Duration>, Vec<Duration>), Failure> {
    let (mut acquired, mut released) = (Vec::new(), Vec::new());
    while Instant::now() < until {
        let sent = Instant::now();
        let Some(guard) = flock.lock(key).lease(LEASE).try_acquire().await? else {
            continue;
        };
        acquired.push(sent.elapsed());
        let sent = Instant::now();
        let _ = guard.release().await?;
        released.push(sent.elapsed());
    }
    Ok((acquired, released))
}

/// From the call that releases, on one client, to the guard in the hands of the other. They take turns.
async fn handoffs(one: &Flock, other: &Flock, key: &str, time: Duration) -> Result<Latencies, Failure> {
    let begun = Instant::now();
    let mut times = Vec::new();
    let (mut holder, mut waiter) = (one, other);
    let mut guard = holder.lock(key).lease(LEASE).wait(HANDOFF_WITHIN).await?;
    while begun.elapsed() < time {
        let next = waiter.lock(key).lease(LEASE).wait(HANDOFF_WITHIN);
        let waiting = async {
            let guard = next.await?;
            Ok::<_, Failure>((guard, Instant::now()))
        };
        let releasing = async {
            while holder.info(key, 0).await?.is_none_or(|info| info.waiter_count == 0) {
                sleep(Duration::from_millis(1)).await;
            }
            let called = Instant::now();
            let _ = guard.release().await?;
            Ok::<_, Failure>(called)
        };
        let ((next, granted), called) = tokio::try_join!(waiting, releasing)?;
        times.push(granted.duration_since(called));
        guard = next;
        (holder, waiter) = (waiter, holder);
    }
    let _ = guard.release().await?;
    Ok(Latencies::of(times))
}

/// Times in order.
#[derive(Debug)]
struct Latencies(Vec<Duration>);

impl Latencies {
    fn of(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        Self(times)
    }

    /// The time that this share of all did not exceed.
    fn percentile(&self, percent: usize) -> Duration {
        let rank = (self.0.len() * percent).div_ceil(100).max(1);
        self.0.get(rank - 1).copied().unwrap_or_default()
    }

    fn json(&self) -> Value {
        let us = |percent| u64::try_from(self.percentile(percent).as_micros()).unwrap_or(u64::MAX);
        json!({ "count": self.0.len(), "p50_us": us(50), "p99_us": us(99) })
    }
}

impl Report {
    fn rows(&self) -> [(&'static str, &Latencies); 4] {
        [("ping", &self.ping), ("acquire", &self.acquire), ("release", &self.release), ("handoff", &self.handoff)]
    }

    fn text(&self) -> String {
        let mut table = Columns::new(&["", "COUNT>", "P50>", "P99>"]);
        for (name, latencies) in self.rows() {
            let us = |percent| format!("{} us", latencies.percentile(percent).as_micros());
            table.add([cell(name), cell(latencies.0.len()), cell(us(50)), cell(us(99))]);
        }
        format!(
            "{}\n\
             {:.0} try-and-release pairs a second: {} {}, each with a lock of its own, over one connection.\n\
             ping: one after the other, the floor of everything else. acquire and release: of the pairs, so with the other tasks in\n\
             the way (--tasks 1 for the bare time). handoff: from the release on one client to the guard in the hands of another,\n\
             both in this process. Client, network and server together; a look at this connection, not a comparison of servers.\n",
            table.text(),
            self.pairs_per_second,
            self.tasks,
            if self.tasks == 1 { "task" } else { "tasks" },
        )
    }

    fn json(&self) -> Value {
        let mut report = json!({ "tasks": self.tasks, "pairs_per_second": self.pairs_per_second });
        for (name, latencies) in self.rows() {
            report[name] = latencies.json();
        }
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentile_is_one_of_the_times() {
        let times = (1..=200).rev().map(Duration::from_micros).collect();
        let latencies = Latencies::of(times);
        assert_eq!(latencies.percentile(50), Duration::from_micros(100));
        assert_eq!(latencies.percentile(99), Duration::from_micros(198));
        assert_eq!(Latencies::of(vec![]).percentile(99), Duration::ZERO);
    }
}
