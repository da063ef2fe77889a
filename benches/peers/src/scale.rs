//! A million locks held: how long a save, a load, a synchronization and a promotion take, and how the server answers meanwhile.

use std::time::{Duration, Instant};

use flock_benches::check::{builder, settle, wait_until_rehashed};
use flock_benches::names::{KEY_BYTES, OWNER_BYTES};
use flock_benches::scheme::{Scheme, hold};
use flock_tests::args;
use flock_tests::random::Random;
use flock_tests::resp::{Conn, Protocol};
use flock_tests::server::{Builder, Generation, Info, Server};
use flock_tests::topology::{promote, wait_in_step};
use flock_tests::wait::{let_pass, wait_until};

use crate::data::{Table, quantile};

const MANY: usize = 1_000_000;
const SAVED_WITHIN: Duration = Duration::from_secs(120);
const PROMOTIONS: usize = 5;
const IDLE_FOR: Duration = Duration::from_secs(2);

pub(crate) fn run() {
    let columns = "server,step,seconds,ping_p50_ms,ping_p99_ms,ping_max_ms,info_p50_ms,info_max_ms";
    let mut table = Table::new("scale", columns);
    let mut random = Random::new();
    for generation in [Generation::New, Generation::Old] {
        let builder = builder().generation(generation).ready_within(SAVED_WITHIN);
        let server = builder.start();
        settle();
        let version = Info::ask(&mut server.connect(Protocol::Resp2), "server").text("valkey_version").to_owned();
        let step = |table: &mut Table, what: &str, server: &Server, work: &mut dyn FnMut()| {
            table.row(&format!("{version},{what},{}", watched(server, work)));
        };
        step(&mut table, "nothing held; idle", &server, &mut || let_pass(IDLE_FOR));
        hold(&server, &Scheme::Flock, &mut random, MANY, KEY_BYTES, OWNER_BYTES);
        wait_until_rehashed(&server);
        step(&mut table, "1000000 held; idle", &server, &mut || let_pass(IDLE_FOR));
        step(&mut table, "BGSAVE", &server, &mut || background_save(&server));
        let mut start_from = |what: &str, builder: &Builder, server: &Server| {
            let start = Instant::now();
            let copy = builder.clone().copy_data_from(server).start();
            let seconds = start.elapsed().as_secs_f64();
            assert_eq!(held(&copy), MANY as i64, "the file has all locks");
            table.row(&format!("{version},{what},{seconds:.2},,,,,"));
        };
        start_from("start from the file", &builder, &server);
        let logging = builder.clone().appendonly();
        let logged = logging.start();
        hold(&logged, &Scheme::Flock, &mut random, MANY, KEY_BYTES, OWNER_BYTES);
        start_from("start from the append-only file (a grant for each)", &logging, &logged);
        drop(logged);
        for _ in 0..PROMOTIONS {
            let replica = builder.clone().replica_of(&server).start();
            step(&mut table, "full synchronization (as the primary answers)", &server, &mut || {
                wait_in_step(&server, &replica)
            });
            assert_eq!(held(&replica), MANY as i64, "the replica has all locks");
            step(&mut table, "promotion until it grants a lock", &replica, &mut || {
                promote(&replica);
                let mut conn = replica.connect(Protocol::Resp2);
                conn.cmd(&args!["FLOCK.ACQUIRE", "lock:after-promotion", "owner", 30_000]).as_token();
            });
        }
    }
}

fn held(server: &Server) -> i64 {
    Info::ask(&mut server.connect(Protocol::Resp2), "flock_locks").number("flock_held")
}

fn background_save(server: &Server) {
    let mut conn = server.connect(Protocol::Resp2);
    conn.cmd(&["BGSAVE"]);
    wait_until("the save is done", SAVED_WITHIN, || {
        Info::ask(&mut conn, "persistence").number("rdb_bgsave_in_progress") == 0
    });
}

/// Does `work`; how many seconds it took, and how long PING and INFO took meanwhile.
fn watched(server: &Server, work: &mut dyn FnMut()) -> String {
    let done = std::sync::atomic::AtomicBool::new(false);
    let (address, done) = (server.addr(), &done);
    let [mut pings, mut infos, seconds] = std::thread::scope(|scope| {
        let probe = |command: &'static [&'static str], every: Duration| {
            scope.spawn(move || {
                let mut conn = Conn::open_raw(address);
                let mut took = Vec::new();
                while !done.load(std::sync::atomic::Ordering::Relaxed) || took.is_empty() {
                    let start = Instant::now();
                    conn.cmd(command);
                    took.push(start.elapsed().as_secs_f64() * 1e3);
                    let_pass(every);
                }
                took
            })
        };
        let pings = probe(&["PING"], Duration::from_millis(1));
        let infos = probe(&["INFO", "everything"], Duration::from_millis(20));
        let start = Instant::now();
        work();
        let seconds = start.elapsed().as_secs_f64();
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        [pings.join().expect("the probe is answered"), infos.join().expect("the probe is answered"), vec![seconds]]
    });
    pings.sort_by(f64::total_cmp);
    infos.sort_by(f64::total_cmp);
    let [p50, p99, max] = [0.5, 0.99, 1.0].map(|part| quantile(&pings, part));
    let (info, info_max) = (quantile(&infos, 0.5), quantile(&infos, 1.0));
    format!("{:.3},{p50:.3},{p99:.3},{max:.3},{info:.3},{info_max:.3}", seconds[0])
}
