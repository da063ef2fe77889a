//! A handoff does not depend on how many wait, and takes little longer than a round trip.
//!
//! For its cost the server runs a burst of releases, each of which hands the lock to the next in line; for the time it takes there is one
//! release after the other. Then those who had the lock join the end of the queue again, which is not measured.

use std::cell::RefCell;
use std::time::Duration;

use flock_tests::random::Random;
use flock_tests::resp::Protocol;

use super::{builder, settle};
use crate::line::{BURST, Blocked, LISTENERS, Queued};
use crate::measure::{Summary, alternate, round_trip};
use crate::report::{Report, Unit};

/// Both goals of the cost, and how it goes on with more waiters: a cost that grows with the logarithm looks different from one that is proportional.
pub fn independent_of_waiters(report: &mut Report, random: &mut Random) {
    report.section("Handoff: main-thread CPU from a RELEASE to the next waiter's grant, in bursts of 50");
    let servers = [(); 7].map(|()| builder().start());
    let (block, queue) = servers.split_at(3);
    settle();
    let mut lines: Vec<Blocked<'_>> =
        block.iter().zip([100, 1000, 4000]).map(|(server, waiters)| Blocked::new(server, random, waiters)).collect();
    let [few, many, more] = &mut lines[..] else { return };
    let cost = alternate(80, &mut [&mut || few.burst(), &mut || many.burst(), &mut || more.burst()]);
    let [few, many, more] = &cost[..] else { return };
    report.goal("BLOCK, 1,000 waiters / 100", Summary::of_ratios(many, few), 1.30, Unit::Ratio);
    report.shown("BLOCK, 4,000 waiters / 100", Summary::of_ratios(more, few), Unit::Ratio);
    report.shown("BLOCK, 1,000 waiters", Summary::of(many), Unit::Time);
    drop(lines);

    let mut lines: Vec<Queued<'_>> = queue
        .iter()
        .zip([100, 1000, 10_000, 100_000])
        .map(|(server, waiters)| Queued::new(server, random, waiters, 1))
        .collect();
    let [few, some, many, most] = &mut lines[..] else { return };
    let cost =
        alternate(150, &mut [&mut || few.burst(), &mut || some.burst(), &mut || many.burst(), &mut || most.burst()]);
    let [few, some, many, most] = &cost[..] else { return };
    report.shown("QUEUE, 1,000 waiters / 100", Summary::of_ratios(some, few), Unit::Ratio);
    report.goal("QUEUE, 10,000 waiters / 100", Summary::of_ratios(many, few), 1.30, Unit::Ratio);
    report.shown("QUEUE, 100,000 waiters / 100", Summary::of_ratios(most, few), Unit::Ratio);
    report.shown("QUEUE, 100 waiters", Summary::of(few), Unit::Time);
    report.shown("QUEUE, 10,000 waiters", Summary::of(many), Unit::Time);
}

/// The goals of the time, in round trips of a PING.
pub fn within_round_trips(report: &mut Report, random: &mut Random) {
    report.section(
        "Handoff: from sending a RELEASE until the next waiter has read its grant / PING round trip, one after the other",
    );
    // One server for all: with two, one may happen to be on the generator's processor and the other not, which doubles a round trip.
    let server = builder().start();
    settle();
    let mut few = Blocked::new(&server, random, 20);
    let mut many = Blocked::new(&server, random, 1000);
    let mut queue = Queued::new(&server, random, 1000, LISTENERS);
    let mut conn = server.connect(Protocol::Resp2);
    // Both measure the same queue, in turns that do not overlap.
    let queue = RefCell::new(&mut queue);
    let queued = |confirm| {
        let median = one_by_one(|| queue.borrow_mut().hand_over(confirm));
        queue.borrow_mut().rejoin();
        median
    };
    let blocked = |line: &mut Blocked<'_>| {
        one_by_one(|| {
            let took = line.hand_over();
            line.rejoin();
            took
        })
    };
    let times = alternate(
        100,
        &mut [
            &mut || one_by_one(|| round_trip(&mut conn)),
            &mut || blocked(&mut few),
            &mut || blocked(&mut many),
            &mut || queued(false),
            &mut || queued(true),
        ],
    );
    let [ping, few, many, queue, confirmed] = &times[..] else { return };
    report.shown("PING round trip", Summary::of(ping), Unit::Time);
    report.goal("BLOCK, 20 waiters", Summary::of_ratios(few, ping), 1.60, Unit::Ratio);
    report.goal("BLOCK, 1,000 waiters", Summary::of_ratios(many, ping), 2.00, Unit::Ratio);
    let what = format!("QUEUE, 1,000 waiters on {LISTENERS} connections");
    report.goal(&what, Summary::of_ratios(queue, ping), 2.50, Unit::Ratio);
    report.shown("  and until a RENEW that confirms it is answered", Summary::of_ratios(confirmed, ping), Unit::Ratio);
}

/// Nanoseconds, of a turn.
fn one_by_one(mut once: impl FnMut() -> Duration) -> f64 {
    let took: Vec<f64> = (0..BURST).map(|_| once().as_secs_f64() * 1e9).collect();
    Summary::of(&took).median
}
