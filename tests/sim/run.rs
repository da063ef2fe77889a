//! One simulation: everybody at work while everything around them fails, then a world that is whole again, or the part of it that is.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use flock_tests::random::Random;
use tokio::runtime::Builder;
use tokio::time::{Instant, advance, sleep, timeout_at};

use crate::Plant;
use crate::judge::{Judge, KEYS, Outcome};
use crate::network::Cut;
use crate::process::{Process, Stage};
use crate::servers::{HOUR_US, Servers};

const PROCESSES: u32 = 4;
const FAULTS_LAST: Duration = Duration::from_secs(90);
/// Everybody who waits when the faults are over has been granted within this: the leases and claims that others left behind, a connection
/// made anew, and work under the lock; less than it takes until a waiter asks again by itself.
const PROGRESS_WITHIN: Duration = Duration::from_secs(20);
/// A place in the queue lasts two minutes if nobody asks for it again; then the dead who waited have had their claims too.
const DEAD_ARE_GONE_WITHIN: Duration = Duration::from_secs(180);
const LOOKS_EVERY: Duration = Duration::from_millis(23);

/// Everything that happens follows from the seed.
pub(crate) fn simulate(seed: u64, plant: Plant) -> Outcome {
    let mut builder = Builder::new_current_thread();
    builder.enable_time().start_paused(true);
    // The runtime's own choices too; only with `--cfg tokio_unstable`, see scripts/sim.sh.
    #[cfg(tokio_unstable)]
    builder.rng_seed(tokio::runtime::RngSeed::from_bytes(&seed.to_le_bytes()));
    builder.build().expect("a runtime without I/O can be made").block_on(live(seed, plant))
}

async fn live(seed: u64, plant: Plant) -> Outcome {
    let mut random = Random::from_seed(seed);
    let stage = Stage {
        servers: Servers::start(plant),
        judge: Judge::new(),
        plant,
        is_closing: Arc::new(AtomicBool::new(false)),
    };
    let looking = {
        let stage = stage.clone();
        tokio::spawn(async move {
            loop {
                stage.judge.look(&stage.servers);
                sleep(LOOKS_EVERY).await;
            }
        })
    };
    let mut world = World { processes: Vec::new(), processes_ever: 0, stage: stage.clone() };
    (0..PROCESSES).for_each(|_| world.add_process(&mut random));
    world.fail(&mut random).await;
    world.settle(&mut random).await;
    looking.abort();
    world.end().await;
    stage.judge.outcome()
}

struct World {
    processes: Vec<Process>,
    processes_ever: u32,
    stage: Stage,
}

impl World {
    fn add_process(&mut self, random: &mut Random) {
        self.processes_ever += 1;
        self.processes.push(Process::start(self.processes_ever, &self.stage, random));
    }

    /// Safety: faults of every kind, at any time.
    async fn fail(&mut self, random: &mut Random) {
        let until = Instant::now() + FAULTS_LAST;
        let mut old_until = None;
        let mut replica_at = None;
        while Instant::now() < until {
            sleep(Duration::from_millis(random.below(700))).await;
            let Stage { judge, servers, .. } = &self.stage;
            if old_until.is_some_and(|at| at <= Instant::now()) {
                old_until = None;
                servers.demote_old(judge);
                judge.note("the old primary is demoted");
            }
            if old_until.is_none() && replica_at.is_some_and(|at| at <= Instant::now()) {
                replica_at = None;
                servers.add_replica();
                judge.note("a replica follows");
            }
            let which = usize::try_from(random.below(u64::from(PROCESSES))).expect("it is small");
            let process = &self.processes[which];
            let number = process.number;
            match random.below(20) {
                0..4 => {
                    let how = random.pick(&[Cut::Both, Cut::ClientFirst, Cut::ServerFirst]);
                    judge.fault(&format!("connections of {number} are cut: {how:?}"));
                    process.link.cut(how);
                }
                4..8 => {
                    let (up, down) = random.pick(&[(true, true), (true, false), (false, true)]);
                    let longest = random.pick(&[300, 3000, 12_000]);
                    let lasts = Duration::from_millis(random.below(longest));
                    judge.fault(&format!("silence around {number} for {lasts:?}"));
                    process.link.silence(up, down, lasts);
                }
                8..10 => {
                    let most_ms = random.pick(&[1, 20, 200, 600]);
                    judge.fault(&format!("messages of {number} take up to {most_ms} ms"));
                    process.link.set_latency(most_ms);
                }
                10..12 => {
                    let lag = Duration::from_millis(random.pick(&[0, 5, 100, 2000]));
                    judge.fault(&format!("the replica lags by {lag:?}"));
                    servers.set_lag(lag);
                }
                12 => {
                    let key = random.pick(&KEYS);
                    judge.fault(&format!("an administrator ends what is held of {key}"));
                    servers.primary().holders(key).into_iter().for_each(|token| judge.may_be_lost(token));
                    servers.primary().revoke(key);
                }
                13..15 => {
                    let beside = random.one_in(2);
                    let ahead_us = i64::try_from(random.below(2 * HOUR_US)).expect("it is small") - 3_600_000_000;
                    if old_until.is_none() && servers.promote(beside, ahead_us, judge) {
                        judge.fault(if beside { "the old primary goes on" } else { "the old primary is dead" });
                        replica_at = Some(Instant::now() + Duration::from_millis(random.below(4000)));
                        old_until = beside.then(|| Instant::now() + Duration::from_millis(random.below(4000)));
                        for process in &self.processes {
                            process.finds_old(random.one_in(2));
                        }
                    }
                }
                15 => {
                    judge.fault(&format!("process {number} crashes"));
                    self.processes.remove(which).crash(&self.stage.judge);
                    self.add_process(random);
                }
                16 => {
                    let lasts = Duration::from_millis(random.below(10_000));
                    judge.fault(&format!("everything stands still for {lasts:?}"));
                    advance(lasts).await;
                }
                _ => {}
            }
        }
        let Stage { judge, servers, .. } = &self.stage;
        if old_until.is_some() {
            servers.demote_old(judge);
        }
    }

    /// Liveness: the faults are over, for those who are still there. They get what they wait for.
    async fn settle(&mut self, random: &mut Random) {
        let Stage { judge, servers, is_closing, .. } = &self.stage;
        is_closing.store(true, Ordering::Relaxed);
        if random.one_in(3) {
            let process = self.processes.remove(0);
            judge.fault(&format!("process {} crashes for good", process.number));
            process.crash(judge);
        }
        if servers.replica().is_none() {
            servers.add_replica();
        }
        servers.set_lag(Duration::ZERO);
        judge.note("the faults are over");
        self.processes.iter().for_each(|process| process.link.heal());
        let bound = Instant::now() + PROGRESS_WITHIN;
        for process in &mut self.processes {
            for worker in &mut process.workers {
                match timeout_at(bound, &mut *worker).await {
                    Ok(Ok(())) => {}
                    Ok(Err(panic)) => judge.violated(&format!("a worker of process {} died: {panic}", process.number)),
                    Err(_) => {
                        let seen = KEYS.map(|key| (servers.primary().holders(key), servers.primary().waiters(key)));
                        judge.note(&format!("held and waited for: {seen:?}"));
                        judge.violated(&format!("process {} still waits {PROGRESS_WITHIN:?} later", process.number));
                        worker.abort();
                    }
                }
            }
        }
    }

    /// Nothing stays behind, on the primary or its replica: what crashed processes held ends with its lease, what they waited for with
    /// their place in the queue, or a claim.
    async fn end(self) {
        let Stage { judge, servers, .. } = &self.stage;
        sleep(DEAD_ARE_GONE_WITHIN).await;
        let primary = servers.primary();
        for key in KEYS {
            let left = (primary.holders(key), primary.waiters(key));
            if left != (Vec::new(), 0) {
                judge.violated(&format!("{key} is left behind: {left:?}"));
            }
            if servers.replica().is_none_or(|replica| !replica.holders(key).is_empty()) {
                judge.violated(&format!("the replica still holds {key}"));
            }
        }
        judge.note("the end");
    }
}
