//! What a client was answered, and what must therefore be there when its server starts again.

use std::sync::mpsc::{Receiver, channel};
use std::thread::{JoinHandle, spawn};

use flock_tests::args;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::Server;

use crate::scene::LEASE_MS;

/// A client that takes one lock after the other, and gives every third one back, until its server is gone.
pub(crate) struct Load {
    client: JoinHandle<()>,
    answers: Receiver<Answer>,
    log: Vec<Answer>,
}

#[derive(Clone)]
struct Answer {
    key: String,
    token: i64,
    is_release: bool,
}

impl Load {
    /// Starts it.
    #[track_caller]
    pub(crate) fn start(server: &Server) -> Load {
        let mut conn = server.connect(Protocol::Resp2);
        let (answered, answers) = channel();
        let client = spawn(move || {
            for number in 0.. {
                let key = format!("k{number}");
                let Ok(Reply::Int(token)) = conn.try_cmd(&args!["FLOCK.ACQUIRE", key, "alice", LEASE_MS]) else {
                    return;
                };
                let _ = answered.send(Answer { key: key.clone(), token, is_release: false });
                if number % 3 == 0 {
                    let Ok(Reply::Int(1)) = conn.try_cmd(&args!["FLOCK.RELEASE", key, "alice"]) else { return };
                    let _ = answered.send(Answer { key, token, is_release: true });
                }
            }
        });
        Load { client, answers, log: Vec::new() }
    }

    /// Waits until so many requests are answered.
    #[track_caller]
    pub(crate) fn wait_answers(&mut self, count: usize) {
        while self.log.len() < count {
            self.log.push(self.answers.recv_timeout(ANSWER_WITHIN).expect("the load goes on"));
        }
    }

    /// The server has gone, and is there again: every request that was answered must have been done. The one after the last may have
    /// been done or not.
    #[track_caller]
    pub(crate) fn assert_done(mut self, conn: &mut Conn) {
        self.client.join().expect("the load ends with the connection");
        self.log.extend(self.answers.try_iter());
        let last = self.log.last().expect("something was answered").key.clone();
        let answers = self.log.len();
        for Answer { key, token, is_release } in &self.log {
            let ended = *is_release || self.log.iter().any(|other| other.key == *key && other.is_release);
            // Its release may have been under way.
            if !ended && *key == last {
                continue;
            }
            let held = Reply::Int(i64::from(!ended));
            assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, token]), held, "{key} of {answers} answers");
        }
    }
}
