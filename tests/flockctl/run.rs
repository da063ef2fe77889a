//! `flockctl run`: a command under a lock, from its wait to its status.

use std::fs;
use std::time::Instant;

use flock_tests::args;
use flock_tests::on_own_servers;
use flock_tests::resp::Protocol;
use flock_tests::server::Builder;
use flock_tests::wait::{holds_for, wait_until};
use nix::sys::signal::Signal;

use crate::scene::{SOON, ask, finish, flockctl, flockctl_with_all_signals, held, hold, ms, start, wait_until_waiting};

on_own_servers![
    status_is_that_of_the_command,
    command_finds_its_token_and_key,
    lock_that_is_held_is_busy,
    wait_ends_at_its_time,
    waiter_runs_when_its_turn_comes,
    readers_run_together,
    signals_are_passed_on,
    ignored_signal_stays_ignored,
    interrupted_wait_leaves_the_queue,
    lock_is_kept_until_the_group_is_gone,
    label_and_lease_are_shown,
];

fn status_is_that_of_the_command(builder: Builder) {
    let server = builder.start();
    let status = |command: &[&str]| finish(flockctl(&server, &[&["run", "k", "--"], command].concat())).code;
    assert_eq!(status(&["true"]), Some(0));
    assert_eq!(status(&["sh", "-c", "exit 3"]), Some(3));
    assert_eq!(status(&["sh", "-c", "kill -KILL $$"]), Some(128 + 9));
    assert_eq!(status(&["sh", "-c", "kill -s 35 $$"]), Some(128 + 35)); // a real-time signal has no name
    assert_eq!(status(&["/nowhere/at-all"]), Some(127));
    assert_eq!(status(&["/dev/null"]), Some(126));
    assert_eq!(held(&server), 0);
}

fn command_finds_its_token_and_key(builder: Builder) {
    let server = builder.start();
    let script = "echo $FLOCK_TOKEN; echo \"$FLOCK_KEY\"; echo \"password: ${FLOCK_PASSWORD-none}\"; read _";
    let mut command = flockctl(&server, &["run", "my key", "sh", "-c", script]);
    command.env("FLOCK_PASSWORD", "secret"); // the default user of this server takes any
    let mut run = start(command);
    let token = run.line();
    assert_eq!(run.line(), "my key");
    assert_eq!(run.line(), "password: none");
    assert_eq!(ask(&server, &["FLOCK.CHECK", "my key", &token]).as_int(), 1);
    run.close_input();
    assert_eq!(run.end().code, Some(1)); // `read` found the end
    assert_eq!(ask(&server, &["FLOCK.CHECK", "my key", &token]).as_int(), 0);
}

fn lock_that_is_held_is_busy(builder: Builder) {
    let server = builder.start();
    hold(&server, "k", "alice");
    let busy = finish(flockctl(&server, &["run", "--wait", "0s", "k", "echo", "ran"]));
    assert_eq!((busy.code, busy.out.as_str()), (Some(75), ""));
    assert!(busy.err.contains("timed out waiting for the lock"), "{}", busy.err);
    let busy = finish(flockctl(&server, &["run", "--wait", "0s", "--busy-code", "5", "k", "echo", "ran"]));
    assert_eq!((busy.code, busy.out.as_str()), (Some(5), ""));
    assert_eq!(finish(flockctl(&server, &["run", "--wait=0s", "-E", "0", "k", "echo"])).code, Some(0));
}

fn wait_ends_at_its_time(builder: Builder) {
    let server = builder.start();
    hold(&server, "k", "alice");
    let began = Instant::now();
    let busy = finish(flockctl(&server, &["run", "--wait", "300ms", "k", "echo", "ran"]));
    assert_eq!((busy.code, busy.out.as_str()), (Some(75), ""));
    assert!(began.elapsed() >= ms(300));
    wait_until_waiting(&server, 0);
}

fn waiter_runs_when_its_turn_comes(builder: Builder) {
    let server = builder.start();
    hold(&server, "k", "alice");
    let mut run = start(flockctl(&server, &["run", "--wait", "1m", "k", "echo", "ran"]));
    wait_until_waiting(&server, 1);
    assert!(run.is_running());
    ask(&server, &["FLOCK.RELEASE", "k", "alice"]);
    assert_eq!(run.line(), "ran");
    assert_eq!(run.end().code, Some(0));
}

fn readers_run_together(builder: Builder) {
    let server = builder.start();
    let script = "echo in; read _; exit 0";
    let options = [["--shared", "--wait=0s"], ["--limit=2", "--wait=0s"]];
    for option in options {
        let args = [&["run"], &option[..], &["k", "sh", "-c", script]].concat();
        let mut runs = [start(flockctl(&server, &args)), start(flockctl(&server, &args))];
        for run in &mut runs {
            assert_eq!(run.line(), "in");
        }
        let third = finish(flockctl(&server, &args));
        assert_eq!(third.code, Some(if option[0] == "--shared" { 0 } else { 75 }));
        for mut run in runs {
            run.close_input();
            assert_eq!(run.end().code, Some(0));
        }
    }
}

fn signals_are_passed_on(builder: Builder) {
    let server = builder.start();
    let script = "for s in HUP INT QUIT USR1 USR2; do trap \"echo $s\" $s; done; trap 'exit 7' TERM; echo ready; \
                  while :; do sleep 0.02; done";
    let mut run = start(flockctl_with_all_signals(&server, &["run", "k", "sh", "-c", script]));
    assert_eq!(run.line(), "ready");
    let signals = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGUSR2];
    for signal in signals {
        run.signal(signal);
        assert_eq!(format!("SIG{}", run.line()), signal.as_str());
    }
    assert_eq!(held(&server), 1);
    run.signal(Signal::SIGTERM);
    assert_eq!(run.end().code, Some(7));
    assert_eq!(held(&server), 0);
}

fn ignored_signal_stays_ignored(builder: Builder) {
    // As under `nohup`: the hang-up reaches neither flockctl nor the command.
    let server = builder.start();
    let mut command = std::process::Command::new("env");
    crate::scene::set_environment(&mut command, &server);
    command.arg("--ignore-signal=HUP").arg(crate::scene::program());
    command.args(["run", "k", "sh", "-c", "echo ready; read _; echo done"]);
    let mut run = start(command);
    assert_eq!(run.line(), "ready");
    run.signal(Signal::SIGHUP);
    holds_for("it runs", ms(100), || run.is_running());
    run.close_input();
    assert_eq!(run.line(), "done");
}

fn interrupted_wait_leaves_the_queue(builder: Builder) {
    let server = builder.start();
    hold(&server, "k", "alice");
    let run = start(flockctl_with_all_signals(&server, &["run", "k", "echo", "ran"]));
    wait_until_waiting(&server, 1);
    run.signal(Signal::SIGTERM);
    let ended = run.end();
    assert_eq!((ended.code, ended.out.as_str()), (Some(128 + 15), ""));
    assert_eq!(server.info("flock").number("flock_waiters"), 0);
    // Of the interrupt key it must die: a shell ends its loop only then.
    let run = start(flockctl_with_all_signals(&server, &["run", "k", "echo", "ran"]));
    wait_until_waiting(&server, 1);
    run.signal(Signal::SIGINT);
    let ended = run.end();
    assert_eq!((ended.code, ended.out.as_str()), (None, ""));
    assert_eq!(server.info("flock").number("flock_waiters"), 0);
}

fn lock_is_kept_until_the_group_is_gone(builder: Builder) {
    // The command ends and leaves something running, which is still the work that the lock protects.
    let server = builder.start();
    let flag = server.dir().join("flag");
    fs::write(&flag, "").unwrap();
    let script = "(while [ -e \"$0\" ]; do sleep 0.02; done) & echo $$; exit 4";
    let mut run = start(flockctl(&server, &["run", "k", "sh", "-c", script, flag.to_str().unwrap()]));
    crate::scene::wait_until_dead(run.pid_line());
    holds_for("the lock is held", ms(200), || held(&server) == 1 && run.is_running());
    fs::remove_file(&flag).unwrap();
    assert_eq!(run.end().code, Some(4));
    assert_eq!(held(&server), 0);
}

fn label_and_lease_are_shown(builder: Builder) {
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp3);
    for (options, expected) in [(&["--label", "nightly"][..], "nightly"), (&[], " sh")] {
        let args = [&["run", "--lease", "7s"], options, &["k", "sh", "-c", "echo in; read _"]].concat();
        let mut run = start(flockctl(&server, &args));
        run.line();
        let info = conn.cmd(&args!["FLOCK.INFO", "k"]);
        let holder = &info.field("holders").as_array()[0];
        assert!(holder.field("label").as_str().ends_with(expected));
        assert_eq!(holder.field("lease_ms").as_int(), 7000);
        assert_eq!(holder.field("state").as_str(), "held"); // confirmed before the command began
        run.close_input();
        run.end();
        wait_until("it is free", SOON, || held(&server) == 0);
    }
}
