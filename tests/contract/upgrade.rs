//! Two versions of the module side by side, while servers are upgraded one by one: what an older one does not know it refuses, and says so.
//!
//! There is no newer version yet, so the test is one: a primary that speaks the replication protocol, and changes that nobody knows.
//! (Snapshots and stored values of a newer version: `persistence.rs`.)

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use flock_tests::args::encode;
use flock_tests::reply::Reply;
use flock_tests::resp::Protocol;
use flock_tests::server::Builder;
use flock_tests::topology::promote;
use flock_tests::wait::wait_until;
use flock_tests::{args, on_own_servers};

use crate::lock_view::holders;

on_own_servers![replica_of_a_newer_primary_refuses_what_it_does_not_know];

/// How long nobody may be silent.
const PATIENCE: Duration = Duration::from_secs(10);

/// A primary that sends this snapshot and these commands to the first replica that comes, and then says nothing more.
struct NewerPrimary {
    address: SocketAddr,
}

impl NewerPrimary {
    fn start(snapshot: Vec<u8>, commands: Vec<u8>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it has an address");
        thread::spawn(move || {
            // Each that asks for a synchronisation gets the same; one that is turned away comes again.
            while let Ok((replica, _)) = listener.accept() {
                let _ = serve(replica, &snapshot, &commands);
            }
        });
        Self { address }
    }
}

/// The handshake, the snapshot, the commands; until the replica goes away.
fn serve(mut replica: TcpStream, snapshot: &[u8], commands: &[u8]) -> std::io::Result<()> {
    replica.set_read_timeout(Some(PATIENCE))?;
    let mut requests = BufReader::new(replica.try_clone()?);
    loop {
        let request = next_request(&mut requests)?;
        match request.first().map(|word| word.to_ascii_uppercase()).as_deref() {
            Some("PING") => replica.write_all(b"+PONG\r\n")?,
            Some("PSYNC" | "SYNC") => break,
            _ => replica.write_all(b"+OK\r\n")?, // who it is, what it can do
        }
    }
    let head = format!("+FULLRESYNC {} 0\r\n${}\r\n", "7".repeat(40), snapshot.len());
    replica.write_all(&[head.as_bytes(), snapshot, commands].concat())?;
    loop {
        next_request(&mut requests)?; // how far it has come
    }
}

fn next_request(requests: &mut impl BufRead) -> std::io::Result<Vec<String>> {
    let number = |requests: &mut dyn BufRead, mark: char| -> std::io::Result<usize> {
        let mut line = String::new();
        if requests.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let number = line.trim().strip_prefix(mark).and_then(|number| number.parse().ok());
        number.ok_or_else(|| std::io::Error::other(line))
    };
    let words = number(requests, '*')?;
    (0..words)
        .map(|_| {
            let mut word = vec![0; number(requests, '$')? + 2];
            requests.read_exact(&mut word)?;
            Ok(String::from_utf8_lossy(&word).trim_end().to_owned())
        })
        .collect()
}

fn replica_of_a_newer_primary_refuses_what_it_does_not_know(builder: Builder) {
    // The operator has upgraded the primary first. Its old replica misreads nothing, keeps what it can read, and the log names the cause.
    let mut empty = builder.clone().without_module().start();
    assert_eq!(empty.connect(Protocol::Resp2).cmd(&["SAVE"]), Reply::ok());
    empty.kill9();
    let snapshot = fs::read(empty.dir().join("dump.rdb")).expect("the snapshot is there");
    let apply = |change: &str, key: &str| encode(&args!["FLOCK._APPLY", change, key]);
    let commands = [
        encode(&["SELECT", "0"]),
        apply("GRANT X 7000000000001 60000 - alice", "known"),
        apply("GRANT-9 X 7000000000002 60000 - bob rest", "unknown"),
        apply("SHIELD 7000000000001", "known"),
        apply("GRANT X 7000000000003 60000 - carol", "later"),
        encode(&["SET", "plain", "value"]),
    ];
    let primary = NewerPrimary::start(snapshot, commands.concat());
    let replica = builder.start();
    let mut conn = replica.connect(Protocol::Resp3);
    let port = primary.address.port();
    assert_eq!(conn.cmd(&args!["REPLICAOF", "127.0.0.1", port]), Reply::ok());
    wait_until("all has been received", PATIENCE, || conn.cmd(&["GET", "plain"]) == Reply::bulk("value"));
    let refusals = replica.log().matches("an unknown change: perhaps a later version wrote it").count();
    assert!(refusals >= 2, "each is told: {}", replica.log());
    assert_eq!(holders(&mut conn, "known"), ["alice"]);
    assert_eq!(holders(&mut conn, "later"), ["carol"]);
    assert!(conn.cmd(&["FLOCK.INFO", "unknown"]).is_nil(), "nothing is guessed");
    // What it has understood it can be promoted with.
    promote(&replica);
    let next = conn.cmd(&args!["FLOCK.ACQUIRE", "unknown", "dave", 60_000]).as_token();
    assert!(next > 7_000_000_000_003, "{next}");
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", "known", "alice"]), Reply::Int(1));
    replica.assert_alive();
}
