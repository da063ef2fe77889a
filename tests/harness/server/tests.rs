//! The guard, tested with plain servers: what it starts, what it ends, and what it complains of.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;

use super::*;
use crate::args;
use crate::reply::Reply;

const GENERATIONS: [Generation; 2] = [Generation::New, Generation::Old];

fn plain() -> Builder {
    Server::builder().without_module()
}

/// Whether there is such a process, and it is more than an exit status that nobody has asked for.
fn exists(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status"));
    status.is_ok_and(|status| !status.contains("State:\tZ"))
}

/// What the drop of `server` complains of.
fn complaint(server: Server) -> String {
    let panic = catch_unwind(AssertUnwindSafe(|| drop(server))).expect_err("the guard should complain");
    let text = panic.downcast::<String>().expect("the complaint is a string");
    let kept = text.split_whitespace().find(|word| word.contains("failed/")).expect("the complaint names a path");
    fs::remove_dir_all(kept).expect("the path is a directory");
    *text
}

#[test]
fn both_generations_start_and_end_with_their_guard() {
    for generation in GENERATIONS {
        let server = plain().generation(generation).start();
        server.assert_alive();
        let (pid, dir) = (server.pid(), server.dir().to_path_buf());
        assert!(exists(pid) && dir.exists());
        drop(server);
        assert!(!exists(pid) && !dir.exists());
    }
}

#[test]
fn server_ends_with_its_process() {
    const CHILD: &str = "FLOCK_TESTS_CHILD";
    if std::env::var_os(CHILD).is_some() {
        // The parent-death signal comes at the end of the starting thread: a server must survive that of a test.
        let starter = std::thread::spawn(|| plain().start());
        let server = starter.join().expect("the server starts");
        server.assert_alive();
        println!("pid {}", server.pid());
        std::process::abort();
    }
    let output = Command::new(std::env::current_exe().expect("this test has a binary"))
        .args(["--exact", "server::tests::server_ends_with_its_process", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .expect("this binary can be run");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let pid = said.split("pid ").nth(1).and_then(|rest| rest.split_whitespace().next());
    let pid: u32 = pid.and_then(|pid| pid.parse().ok()).unwrap_or_else(|| panic!("no pid in {said:?}"));
    wait_until("the server is gone", ANSWER_WITHIN, || !exists(pid));
}

#[test]
fn death_by_itself_is_a_failure() {
    let server = plain().start();
    server.signal(Signal::SIGKILL);
    wait_until("the server has died", ANSWER_WITHIN, || !server.is_running());
    assert!(complaint(server).contains("died by itself"));
}

#[test]
fn crash_report_is_a_failure() {
    let server = plain().start();
    let mut conn = server.connect(Protocol::Resp2);
    conn.send(&["DEBUG", "SEGFAULT"]);
    conn.expect_close();
    wait_until("the server has died", ANSWER_WITHIN, || !server.is_running());
    let complaint = complaint(server);
    assert!(complaint.contains("died by itself"), "{complaint}");
    assert!(complaint.contains("BUG REPORT END"), "the log's end should be shown: {complaint}");
}

#[test]
fn panic_in_the_log_is_a_failure_unless_allowed() {
    for allowed in [false, true] {
        let builder = if allowed { plain().allow_panics() } else { plain() };
        let server = builder.start();
        let line = "thread '<unnamed>' panicked at src/lib.rs:1:1:\n";
        let log = OpenOptions::new().append(true).open(server.log_path());
        log.and_then(|mut log| log.write_all(line.as_bytes())).expect("the log can be written");
        if allowed {
            server.assert_alive();
        } else {
            assert!(complaint(server).contains("panicked at"));
        }
    }
}

#[test]
fn shutdown_and_kill_by_the_test_are_no_failure() {
    let mut server = plain().start();
    assert!(server.shutdown_nosave().success());
    server.start_again();
    server.kill9();
    assert!(!server.is_running());
    server.start_again();
    server.sigterm();
    assert!(server.wait_exit(ANSWER_WITHIN).success());
}

#[test]
fn restart_keeps_port_and_data() {
    for generation in GENERATIONS {
        let mut server = plain().generation(generation).appendonly().start();
        let port = server.port();
        assert_eq!(server.connect(Protocol::Resp3).cmd(&["SET", "k", "v"]), Reply::ok());
        server.kill9();
        server.start_again();
        assert_eq!(server.port(), port);
        assert_eq!(server.connect(Protocol::Resp3).cmd(&["GET", "k"]), Reply::bulk("v"));
        server.set_config("maxmemory", "99mb");
        server.set_config("maxmemory", "123mb");
        server.restart();
        assert_eq!(server.info("memory").number("maxmemory"), 123 << 20);
        let file = fs::read_to_string(server.dir().join("valkey.conf")).expect("it was started with one");
        assert_eq!(file.lines().filter(|line| line.starts_with("maxmemory ")).collect::<Vec<_>>(), ["maxmemory 123mb"]);
    }
}

#[test]
fn data_are_copied_to_a_new_server() {
    let old = plain().generation(Generation::Old).appendonly().start();
    let mut conn = old.connect(Protocol::Resp2);
    conn.cmd(&["SET", "k", "v"]);
    let new = plain().appendonly().copy_data_from(&old).start();
    assert_eq!(new.connect(Protocol::Resp2).cmd(&["GET", "k"]), Reply::bulk("v"));
}

#[test]
fn refused_start_tells_why() {
    let failure = plain().config("no-such-directive", "1").try_start().expect_err("nonsense is refused");
    assert!(failure.status.is_some_and(|status| !status.success()));
    assert!(failure.log.contains("no-such-directive"), "{}", failure.log);
}

#[test]
fn taken_port_is_recognised() {
    let other = plain().start();
    for generation in GENERATIONS {
        let builder = plain().generation(generation);
        for builder in [
            builder.clone().config("port", other.port()),
            builder.clone().cluster().config("cluster-port", other.port()),
        ] {
            let failure = builder.try_start().expect_err("the port is taken");
            assert!(failure.log.contains(builder::PORT_IS_TAKEN), "{}", failure.log);
        }
    }
}

#[test]
fn stopped_server_is_silent_until_it_goes_on() {
    let server = plain().start();
    let mut conn = server.connect(Protocol::Resp2);
    server.sigstop();
    conn.send(&["PING"]);
    conn.expect_silence(Duration::from_millis(50));
    assert!(server.is_running());
    server.sigcont();
    assert_eq!(conn.recv().as_str(), "PONG");
}

#[test]
fn end_of_a_connection_is_seen_on_the_side_of_a_stopped_server() {
    let server = plain().start();
    for by_reset in [false, true] {
        let conn = server.connect(Protocol::Resp2);
        let peer = conn.local_addr();
        server.sigstop();
        assert!(!server.is_hung_up(peer));
        if by_reset {
            conn.abort();
        } else {
            drop(conn);
        }
        server.wait_until_hung_up(peer);
        server.sigcont();
    }
}

#[test]
fn blocked_and_gone_clients_are_seen() {
    for generation in GENERATIONS {
        let server = plain().generation(generation).start();
        let mut waiting = server.connect(Protocol::Resp3);
        let id = waiting.id();
        waiting.send(&["BLPOP", "list", "0"]);
        server.wait_until_blocked(&waiting);
        waiting.abort();
        server.wait_until_gone(id);
    }
}

#[test]
fn environment_reaches_the_server() {
    // A server that sets its title moves its environment away from where the kernel shows it.
    let server = plain().config("set-proc-title", "no").env("FLOCK_TESTS_WORD", "quorum").start();
    let environment = fs::read(format!("/proc/{}/environ", server.pid())).expect("the server has an environment");
    let environment = String::from_utf8_lossy(&environment).into_owned();
    assert!(environment.contains("FLOCK_TESTS_WORD=quorum"));
}

#[test]
fn unique_keys_differ() {
    assert_ne!(unique_key("k"), unique_key("k"));
}

#[test]
fn arguments_arrive_whatever_is_in_them() {
    let server = plain().start();
    let mut conn = server.connect(Protocol::Resp2);
    let value = b"\0\r\n$-1\r\n\xff";
    assert_eq!(conn.cmd(&args!["SET", value, 5]), Reply::ok());
    assert_eq!(conn.cmd(&args!["KEYS", "*"]), Reply::Array(vec![Reply::bulk(value)]));
}
