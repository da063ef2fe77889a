//! flockctl on a terminal: the command has it, keys end and suspend the command, `top` leaves it as it was.

use flock_tests::on_own_servers;
use flock_tests::server::{Builder, Server};
use flock_tests::wait::wait_until;

use crate::pty::Pty;
use crate::scene::{SOON, ask, held, hold, program};

on_own_servers![
    command_reads_from_the_terminal,
    interrupt_key_ends_the_command,
    command_behind_a_pipe_gets_the_terminal_when_it_wants_it,
    suspended_command_goes_on_under_its_lock,
    suspended_command_does_not_go_on_without_its_lock,
    top_ends_at_a_key_and_restores_the_terminal,
    top_ended_by_a_signal_restores_the_terminal,
    tables_have_colours_only_where_they_are_wanted,
    revocation_is_asked_for,
];

/// A shell with job control, at its prompt.
fn shell(server: &Server) -> Pty {
    let bash = Pty::start(server, "bash", &["--norc", "--noprofile", "-i"], &[("PS1", "ready> ")]);
    bash.wait_until_shown("ready> ");
    bash
}

fn command_reads_from_the_terminal(builder: Builder) {
    let server = builder.start();
    let mut pty = Pty::flockctl(&server, &["run", "k", "sh", "-c", "echo begun; read x; echo \"got $x\""], &[]);
    pty.wait_until_shown("begun");
    pty.types("hello\n");
    pty.wait_until_shown("got hello");
    assert_eq!(pty.end(), Some(0));
    assert_eq!(held(&server), 0);
}

fn interrupt_key_ends_the_command(builder: Builder) {
    // And the loop that it is in: to the shell it must look as if flockctl itself had died of the key.
    let server = builder.start();
    let mut bash = shell(&server);
    let script = "echo be\"\"gun; exec sleep 100";
    bash.types(&format!("for i in 1 2; do {} run k sh -c '{script}'; done\n", program().display()));
    bash.wait_until_shown("begun");
    bash.types("\x03");
    wait_until("it is given back", SOON, || held(&server) == 0);
    bash.types("echo code=$?\n");
    bash.wait_until_shown("code=130");
    assert_eq!(bash.screen().matches("begun").count(), 1);
}

fn command_behind_a_pipe_gets_the_terminal_when_it_wants_it(builder: Builder) {
    // Its output is not the terminal, so it is not put in front at once; it is stopped when it reads, and then is.
    let server = builder.start();
    let mut bash = shell(&server);
    let script = "echo be''gun >&2; read x </dev/tty; echo \"got $x\"";
    bash.types(&format!("{} run k sh -c '{script}' | cat\n", program().display()));
    bash.wait_until_shown("begun");
    bash.types("hello\n");
    bash.wait_until_shown("got hello");
}

fn suspended_command_goes_on_under_its_lock(builder: Builder) {
    let server = builder.start();
    let mut bash = shell(&server);
    let script = "echo be\"\"gun; read x; echo \"got $x\"";
    bash.types(&format!("{} run k sh -c '{script}'\n", program().display()));
    bash.wait_until_shown("begun");
    bash.types("\x1a");
    bash.wait_until_shown("Stopped");
    bash.types("fg\n");
    bash.types("hello\n");
    bash.wait_until_shown("got hello");
    bash.types("echo code=$?\n");
    bash.wait_until_shown("code=0");
    assert_eq!(held(&server), 0);
}

fn suspended_command_does_not_go_on_without_its_lock(builder: Builder) {
    // Nobody renews while both are suspended: somebody else may have had the lock when the command goes on.
    let server = builder.start();
    let mut bash = shell(&server);
    // A shell that starts processes all the time may be stopped within a vfork, where nobody sees that it is.
    let script = "trap \"echo went on\" CONT; echo be\"\"gun; read x; read x";
    bash.types(&format!("{} run --lease 1s k sh -c '{script}'\n", program().display()));
    bash.wait_until_shown("begun");
    bash.types("\x1a");
    bash.wait_until_shown("Stopped");
    wait_until("the lease is over", SOON, || held(&server) == 0);
    bash.types("fg\n");
    bash.wait_until_shown("the command is ended");
    bash.types("echo code=$?\n");
    bash.wait_until_shown("code=79");
    assert!(!bash.screen().contains("went on\r\n"), "{}", bash.screen());
}

fn top_ends_at_a_key_and_restores_the_terminal(builder: Builder) {
    let server = builder.start();
    hold(&server, "my-lock", "alice");
    for key in ["q", "\x1b", "\x03"] {
        let mut pty = Pty::flockctl(&server, &["top", "--interval", "50ms"], &[]);
        pty.wait_until_shown("my-lock");
        pty.wait_until_shown("grants"); // the rates of a second look
        assert!(!pty.is_restored(), "top reads single keys");
        pty.types(key);
        assert_eq!(pty.end(), Some(0), "{key:?}");
        assert!(pty.is_restored(), "{key:?}");
        pty.wait_until_shown("\x1b[?1049l"); // back from the alternate screen
    }
}

fn top_ended_by_a_signal_restores_the_terminal(builder: Builder) {
    let server = builder.start();
    let mut pty = Pty::flockctl(&server, &["top"], &[]);
    pty.wait_until_shown("0 held");
    pty.signal(nix::sys::signal::Signal::SIGTERM);
    assert_eq!(pty.end(), Some(128 + 15));
    assert!(pty.is_restored());
}

fn tables_have_colours_only_where_they_are_wanted(builder: Builder) {
    let server = builder.start();
    hold(&server, "k", "alice");
    for (env, coloured) in [(&[][..], true), (&[("NO_COLOR", "1")], false)] {
        let mut pty = Pty::flockctl(&server, &["ls"], env);
        assert_eq!(pty.end(), Some(0));
        pty.wait_until_shown("alice");
        assert_eq!(pty.screen().contains('\x1b'), coloured, "{:?}", pty.screen());
    }
}

fn revocation_is_asked_for(builder: Builder) {
    let server = builder.start();
    hold(&server, "k", "alice");
    for (answer, code, left) in [("\n", 1, 1), ("n\n", 1, 1), ("y\n", 0, 0)] {
        let mut pty = Pty::flockctl(&server, &["revoke", "k"], &[]);
        pty.wait_until_shown("End the holds of k? [y/N]");
        assert!(pty.screen().contains("alice"));
        pty.types(answer);
        assert_eq!((pty.end(), held(&server)), (Some(code), left), "{answer:?}");
    }
    assert_eq!(ask(&server, &["EXISTS", "k"]).as_int(), 0);
}
