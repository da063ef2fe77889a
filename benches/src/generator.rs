//! The load generator: it must cost little beside the server, which it shares the machine with.
//!
//! Commands are encoded before the clock starts; a batch is one write, and its answers are counted by line and checked as they come.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use flock_tests::args::encode;
use flock_tests::resp::ANSWER_WITHIN;

/// What every command of a batch must be answered with: anything else ends the bench.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// A fencing token, or the counter of a script.
    Token,
    /// 1: it was there, and is gone.
    One,
    /// OK.
    Ok,
    /// PONG.
    Pong,
    /// Nil: how some scripts say that the lock is taken.
    Nil,
    /// `QUEUED` and a position.
    Queued,
}

impl Answer {
    /// Lines per answer.
    fn lines(self) -> usize {
        match self {
            Answer::Token | Answer::One | Answer::Ok | Answer::Pong | Answer::Nil => 1,
            Answer::Queued => 4,
        }
    }

    fn admits(self, line: &[u8]) -> bool {
        match self {
            Answer::Token => line.first() == Some(&b':') && line != b":0",
            Answer::One => line == b":1",
            Answer::Ok => line == b"+OK",
            Answer::Pong => line == b"+PONG",
            Answer::Nil => line == b"$-1",
            Answer::Queued => line.first() == Some(&b':') || line == b"*2" || line == b"$6" || line == b"QUEUED",
        }
    }
}

/// Commands that are sent in one write.
#[derive(Clone, Debug)]
pub struct Batch {
    bytes: Vec<u8>,
    commands: usize,
    answer: Answer,
}

impl Batch {
    /// An empty batch; every command of it is to be answered alike.
    pub fn new(answer: Answer) -> Batch {
        Batch { bytes: Vec::new(), commands: 0, answer }
    }

    /// Adds a command.
    pub fn push<A: AsRef<[u8]>>(&mut self, args: &[A]) {
        self.bytes.extend(encode(args));
        self.commands += 1;
    }

    /// How many commands there are.
    pub fn len(&self) -> usize {
        self.commands
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.commands == 0
    }
}

/// A connection that sends batches.
#[derive(Debug)]
pub struct Pipe {
    stream: TcpStream,
    inbox: Vec<u8>,
    /// Bytes of the inbox that are not a whole line yet.
    filled: usize,
}

impl Pipe {
    /// Connects.
    ///
    /// # Panics
    /// If nobody listens.
    pub fn open(address: SocketAddr) -> Pipe {
        let stream = TcpStream::connect(address).expect("the server listens");
        stream.set_nodelay(true).expect("a TCP socket takes TCP_NODELAY");
        stream.set_read_timeout(Some(ANSWER_WITHIN)).expect("a positive timeout is accepted");
        Pipe { stream, inbox: vec![0; 1 << 16], filled: 0 }
    }

    /// Sends a batch and takes all its answers.
    ///
    /// # Panics
    /// If one is not as it should be, or does not come.
    pub fn run(&mut self, batch: &Batch) {
        self.send(batch);
        self.receive(batch);
    }

    /// Sends a batch, whose answers are to be received before the next is sent.
    ///
    /// # Panics
    /// If the server does not read.
    pub fn send(&mut self, batch: &Batch) {
        self.stream.write_all(&batch.bytes).expect("the server reads");
    }

    /// Takes all answers to a batch that was sent.
    ///
    /// # Panics
    /// If one is not as it should be, or does not come.
    pub fn receive(&mut self, batch: &Batch) {
        let mut lines = batch.commands * batch.answer.lines();
        while lines > 0 {
            let read = self.stream.read(&mut self.inbox[self.filled..]).expect("the server answers");
            assert!(read > 0, "the server closed the connection");
            let end = self.filled + read;
            let mut start = 0;
            while let Some(length) = self.inbox[start..end].iter().position(|byte| *byte == b'\n') {
                let line = self.inbox[start..start + length].trim_ascii_end();
                assert!(batch.answer.admits(line), "expected {:?}, got \"{}\"", batch.answer, line.escape_ascii());
                start += length + 1;
                lines -= 1;
            }
            self.inbox.copy_within(start..end, 0);
            self.filled = end - start;
        }
    }
}
