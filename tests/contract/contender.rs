//! A client of a few locks that others want too, which writes to a storage that checks tokens; what it sees is recorded.

use std::time::Duration;

use flock_tests::args;
use flock_tests::fenced_store::FencedStore;
use flock_tests::history::{Call, Recorder, Verb};
use flock_tests::random::Random;
use flock_tests::reply::Reply;
use flock_tests::resp::{Conn, Protocol};
use flock_tests::server::Server;
use flock_tests::wait::let_pass;

/// The locks that all contenders want: of one slot, so of one node where there is a cluster.
pub(crate) const WANTED: [&str; 3] = ["{w}a", "{w}b", "{w}c"];

/// One of the clients of a run.
pub(crate) struct Contender<'a> {
    process: u32,
    acquisitions: u64,
    conn: Conn,
    random: Random,
    recorder: &'a Recorder,
    store: &'a FencedStore,
}

/// The server has refused by an error, or the connection is gone: what was asked last may have been done or not.
#[derive(Debug)]
pub(crate) struct Interrupted;

impl<'a> Contender<'a> {
    /// A client of `server`; `process` is its name in the history, and no other's.
    #[track_caller]
    pub(crate) fn new(
        server: &Server,
        process: u32,
        random: Random,
        recorder: &'a Recorder,
        store: &'a FencedStore,
    ) -> Contender<'a> {
        let conn = server.connect(Protocol::Resp2);
        Contender { process, acquisitions: 0, conn, random, recorder, store }
    }

    /// Takes a lock, perhaps; writes; renews, perhaps; gives it back or leaves it to its lease.
    pub(crate) fn one_acquisition(&mut self) -> Result<(), Interrupted> {
        self.acquisitions += 1;
        let owner = &format!("owner {} {}", self.process, self.acquisitions);
        let key = self.random.pick(&WANTED);
        let lease_ms = 20 + self.random.below(180);
        let mut request = args!["FLOCK.ACQUIRE", key, owner, lease_ms].to_vec();
        let mut call = Call::new(Verb::Acquire, key, owner).lease_ms(lease_ms);
        // Readers have tokens of their own and do not write.
        let reads = self.random.one_in(3);
        if reads {
            request.push(b"SHARED".to_vec());
            call = call.shared();
        }
        if !self.random.one_in(4) {
            request.extend(args!["BLOCK", 1 + self.random.below(300)]);
        }
        let Some(token) = self.ask(call, &request)? else { return Ok(()) };
        if !reads {
            self.write(key, owner, token);
        }
        if self.random.one_in(2) {
            let_pass(Duration::from_millis(self.random.below(60)));
            let call = Call::new(Verb::Renew, key, owner).lease_ms(lease_ms).token(token);
            self.ask(call, &args!["FLOCK.RENEW", key, owner, lease_ms, "TOKEN", token])?;
            // Also if the renewal was refused: such a client is what the storage must be guarded from.
            if !reads {
                self.write(key, owner, token);
            }
        }
        if !self.random.one_in(4) {
            let call = Call::new(Verb::Release, key, owner).token(token);
            self.ask(call, &args!["FLOCK.RELEASE", key, owner, "TOKEN", token])?;
        }
        Ok(())
    }

    /// What was answered, if it was not refused; recorded.
    fn ask(&mut self, call: Call, request: &[Vec<u8>]) -> Result<Option<u64>, Interrupted> {
        let is_acquisition = call.verb == Verb::Acquire;
        let op = self.recorder.invoke(self.process, call);
        match self.conn.try_cmd(request) {
            Ok(Reply::Int(token @ 1..)) => {
                let token = u64::try_from(token).expect("it is positive");
                self.recorder.ok(op, is_acquisition.then_some(token));
                Ok(Some(token))
            }
            Ok(Reply::Int(0) | Reply::Nil) => {
                self.recorder.refused(op);
                Ok(None)
            }
            Ok(_) | Err(_) => {
                self.recorder.unknown(op);
                Err(Interrupted)
            }
        }
    }

    fn write(&self, key: &str, owner: &str, token: u64) {
        let op = self.recorder.invoke(self.process, Call::new(Verb::Write, key, owner).token(token));
        if self.store.write(key, owner, token) {
            self.recorder.ok(op, None);
        } else {
            self.recorder.refused(op);
        }
    }
}
