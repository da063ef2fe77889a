//! A terminal: a process in a session of its own, with somebody who types and reads.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use flock_tests::server::Server;
use flock_tests::wait::{poll, wait_for};
use nix::pty::{Winsize, openpty};
use nix::sys::signal::{Signal, kill};
use nix::sys::termios::{Termios, tcgetattr};
use nix::unistd::Pid;

use crate::scene::{DEFAULT_SIGNALS, SOON, program, set_environment};

/// A process on a terminal. It is killed when this is dropped.
pub(crate) struct Pty {
    keyboard: File,
    line: OwnedFd,
    child: Child,
    screen: Arc<Mutex<Vec<u8>>>,
    before: Termios,
}

impl Pty {
    /// flockctl itself.
    pub(crate) fn flockctl(server: &Server, args: &[&str], env: &[(&str, &str)]) -> Pty {
        Pty::start(server, program().as_os_str().to_str().expect("the path is UTF-8"), args, env)
    }

    pub(crate) fn start(server: &Server, program: &str, args: &[&str], env: &[(&str, &str)]) -> Pty {
        let size = Winsize { ws_row: 24, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 };
        let pty = openpty(Some(&size), None).expect("a terminal can be had");
        let before = tcgetattr(&pty.slave).expect("it is a terminal");
        let end = || pty.slave.try_clone().expect("a descriptor can be cloned");
        // Who runs the tests in the background may have had signals ignored. setsid (util-linux) makes a session, takes the terminal and
        // becomes the program.
        let mut command = Command::new("env");
        set_environment(&mut command, server);
        command.args([DEFAULT_SIGNALS, "setsid", "--ctty"]).arg(program).args(args).envs(env.iter().copied());
        command.stdin(end()).stdout(end()).stderr(end());
        let child = command.spawn().expect("env can be started");
        let screen = Arc::<Mutex<Vec<u8>>>::default();
        let keyboard = File::from(pty.master);
        let mut output = keyboard.try_clone().expect("a descriptor can be cloned");
        let shown = Arc::clone(&screen);
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                shown.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(&bytes[..count]);
            }
        });
        Pty { keyboard, line: pty.slave, child, screen, before }
    }

    pub(crate) fn types(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).expect("the terminal takes keys");
    }

    #[track_caller]
    pub(crate) fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).expect("a pid fits in 31 bits");
        kill(Pid::from_raw(pid), signal).expect("it can be signalled");
    }

    /// Everything that was shown.
    pub(crate) fn screen(&self) -> String {
        String::from_utf8_lossy(&self.screen.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }

    #[track_caller]
    pub(crate) fn wait_until_shown(&self, text: &str) {
        let shown = poll(SOON, || self.screen().contains(text).then_some(()));
        assert!(shown.is_some(), "{text:?} is not shown on {:?}", self.screen());
    }

    /// The exit code.
    #[track_caller]
    pub(crate) fn end(&mut self) -> Option<i32> {
        wait_for("it has ended", SOON, || self.child.try_wait().expect("it can be waited for")).code()
    }

    /// Whether the terminal is as it was: lines, echo and keys.
    pub(crate) fn is_restored(&self) -> bool {
        let after = tcgetattr(&self.line).expect("it is a terminal");
        (after.local_flags, after.input_flags, after.output_flags)
            == (self.before.local_flags, self.before.input_flags, self.before.output_flags)
    }
}

impl Drop for Pty {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
