//! No command outlives its lock: what happens when the lock is lost, when it cannot be renewed, and when flockctl is killed.

use std::ffi::OsStr;
use std::time::Instant;

use flock_tests::on_own_servers;
use flock_tests::proxy::{Cut, Proxy};
use flock_tests::server::Builder;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::scene::{ask, flockctl, held, is_alive, ms, program, start, wait_until_dead};

on_own_servers![
    revoked_command_is_asked_to_end,
    command_that_does_not_end_is_killed_after_the_grace,
    grandchildren_end_with_the_lock,
    who_has_made_a_group_of_its_own_ends_with_the_lock,
    loss_that_nobody_told_is_noticed_at_the_end,
    command_ends_before_a_lease_that_cannot_be_renewed,
    stubborn_command_is_killed_before_the_lease_is_over,
    killed_flockctl_takes_all_along,
    killed_flockctl_takes_along_who_has_made_a_group_of_its_own,
    job_within_a_job_ends_with_it,
    killed_flockctl_takes_the_command_along_though_nobody_watches,
];

const STUBBORN: &str = "trap '' TERM; echo $$; while :; do sleep 0.02; done";

fn revoked_command_is_asked_to_end(builder: Builder) {
    let server = builder.start();
    let script = "trap 'echo asked; exit 0' TERM; echo ready; while :; do sleep 0.02; done";
    let mut run = start(flockctl(&server, &["run", "k", "sh", "-c", script]));
    assert_eq!(run.line(), "ready");
    ask(&server, &["FLOCK.REVOKE", "k"]);
    assert_eq!(run.line(), "asked");
    let ended = run.end();
    assert_eq!(ended.code, Some(79), "{}", ended.err);
    assert!(ended.err.contains("the lock is lost (revoked)"), "{}", ended.err);
}

fn command_that_does_not_end_is_killed_after_the_grace(builder: Builder) {
    let server = builder.start();
    let mut run = start(flockctl(&server, &["run", "--grace", "300ms", "k", "sh", "-c", STUBBORN]));
    let pid = run.pid_line();
    let began = Instant::now();
    ask(&server, &["FLOCK.REVOKE", "k"]);
    assert_eq!(run.end().code, Some(79));
    assert!(began.elapsed() >= ms(300), "{:?}", began.elapsed());
    assert!(!is_alive(pid));
}

fn grandchildren_end_with_the_lock(builder: Builder) {
    // The command obeys, and what it has started does not.
    let server = builder.start();
    let script = "sh -c \"$0\" & trap 'exit 0' TERM; wait";
    let mut run = start(flockctl(&server, &["run", "--grace", "200ms", "k", "sh", "-c", script, STUBBORN]));
    let grandchild = run.pid_line();
    ask(&server, &["FLOCK.REVOKE", "k"]);
    assert_eq!(run.end().code, Some(79));
    assert!(!is_alive(grandchild));
}

/// `timeout` makes a group of its own, in which it puts what it runs; here something that does not want to end, and has no environment.
const IN_A_GROUP_OF_ITS_OWN: &str = "timeout 100 env -i sh -c 'trap \"\" TERM; echo $$; while :; do sleep 0.02; done' & \
                                     trap 'exit 0' TERM; wait";

fn who_has_made_a_group_of_its_own_ends_with_the_lock(builder: Builder) {
    let server = builder.start();
    let mut run = start(flockctl(&server, &["run", "--grace", "200ms", "k", "sh", "-c", IN_A_GROUP_OF_ITS_OWN]));
    let apart = run.pid_line();
    ask(&server, &["FLOCK.REVOKE", "k"]);
    assert_eq!(run.end().code, Some(79));
    assert!(!is_alive(apart));
}

fn killed_flockctl_takes_along_who_has_made_a_group_of_its_own(builder: Builder) {
    let server = builder.start();
    let mut run = start(flockctl(&server, &["run", "k", "sh", "-c", IN_A_GROUP_OF_ITS_OWN]));
    let apart = run.pid_line();
    run.signal(Signal::SIGKILL);
    wait_until_dead(apart);
}

fn job_within_a_job_ends_with_it(builder: Builder) {
    // The inner one is killed together with the outer one's job, and has no time to end its own.
    let server = builder.start();
    let outer = ["run", "--grace", "100ms", "k"].map(OsStr::new);
    let inner = ["run", "inner", "sh", "-c", "sh -c \"$0\" & wait", STUBBORN].map(OsStr::new);
    let program = program();
    let mut run = start(flockctl(&server, &[&outer[..], &[program.as_ref()], &inner].concat()));
    let inner = run.pid_line();
    ask(&server, &["FLOCK.REVOKE", "k"]);
    assert_eq!(run.end().code, Some(79));
    wait_until_dead(inner);
}

fn loss_that_nobody_told_is_noticed_at_the_end(builder: Builder) {
    // The key is deleted and the command ends while flockctl does not run: its success was not under the lock.
    let server = builder.start();
    let mut run = start(flockctl(&server, &["run", "k", "sh", "-c", "echo $$; read _; kill -STOP $PPID; exit 0"]));
    let pid = run.pid_line();
    run.close_input();
    wait_until_dead(pid);
    ask(&server, &["DEL", "k"]);
    run.signal(Signal::SIGCONT);
    assert_eq!(run.end().code, Some(79));
}

fn command_ends_before_a_lease_that_cannot_be_renewed(builder: Builder) {
    let server = builder.start();
    let proxy = Proxy::to(server.addr());
    let url = format!("valkey://{}", proxy.addr());
    let script = "echo $FLOCK_TOKEN; echo $$; exec sleep 100";
    let mut run = start(flockctl(&server, &["--url", &url, "run", "--lease", "3s", "k", "sh", "-c", script]));
    let (token, pid) = (run.line(), run.pid_line());
    proxy.refuse();
    proxy.cut(Cut::Reset);
    wait_until_dead(pid);
    // About a second before the server lets the next one in.
    assert_eq!(ask(&server, &["FLOCK.CHECK", "k", &token]).as_int(), 1);
    let ended = run.end();
    assert_eq!(ended.code, Some(79));
    assert!(ended.err.contains("cannot be renewed"), "{}", ended.err);
}

fn stubborn_command_is_killed_before_the_lease_is_over(builder: Builder) {
    // It has a minute of grace, and still not more than its lease.
    let server = builder.start();
    let proxy = Proxy::to(server.addr());
    let url = format!("valkey://{}", proxy.addr());
    let args = ["--url", &url, "run", "--lease", "2s", "--grace", "1m", "k", "sh", "-c", STUBBORN];
    let mut run = start(flockctl(&server, &args));
    let pid = run.pid_line();
    proxy.refuse();
    proxy.cut(Cut::Reset);
    wait_until_dead(pid);
    assert_eq!(run.end().code, Some(79));
}

fn killed_flockctl_takes_all_along(builder: Builder) {
    let server = builder.start();
    let script = "sh -c \"$0\" & echo $$; wait";
    let mut run = start(flockctl(&server, &["run", "k", "sh", "-c", script, STUBBORN]));
    let pids = [run.pid_line(), run.pid_line()];
    assert!(pids.into_iter().all(is_alive));
    assert_eq!(held(&server), 1);
    run.signal(Signal::SIGKILL);
    for pid in pids {
        wait_until_dead(pid);
    }
}

fn killed_flockctl_takes_the_command_along_though_nobody_watches(builder: Builder) {
    // As `killall -9` would: the process that ends the group dies first. The kernel ends the command itself.
    let server = builder.start();
    let mut run = start(flockctl(&server, &["run", "k", "sh", "-c", STUBBORN]));
    let pid = run.pid_line();
    let watchman = run.children().into_iter().find(|child| *child != pid).expect("somebody watches");
    kill(Pid::from_raw(watchman), Signal::SIGKILL).unwrap();
    wait_until_dead(watchman);
    assert!(is_alive(pid));
    run.signal(Signal::SIGKILL);
    wait_until_dead(pid);
}
