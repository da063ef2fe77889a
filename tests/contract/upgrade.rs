//! Two versions of the module side by side, while servers are upgraded one by one: what an older one does not know it refuses, and says so.
//!
//! There is no newer version yet. In the quick tier the test plays one: a primary that speaks the replication protocol, and changes that
//! nobody knows. The long tier builds a library with the feature `next-format`, which writes what this version does not know, and reads both.
//! (Snapshots and stored values of a newer version: `persistence.rs`. Under load, in a cluster: `tests/client/cluster.rs`.)

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use flock_tests::args::encode;
use flock_tests::migration::Migration;
use flock_tests::reply::Reply;
use flock_tests::resp::Protocol;
use flock_tests::server::{Builder, Server, planted_module};
use flock_tests::topology::{Cluster, Replicated, demote, fail_over, promote, wait_in_step};
use flock_tests::wait::{wait_for, wait_until};
use flock_tests::{args, on_own_servers};

use crate::lock_view::{holder, holders};
use crate::scene::{LEASE_MS, hold, long_tier, release};
use crate::traffic::{assert_same, contents};

on_own_servers![
    replica_of_a_newer_primary_refuses_what_it_does_not_know,
    rolling_upgrade_keeps_every_hold,
    replica_that_is_not_upgraded_cannot_join_a_newer_primary,
    slot_does_not_leave_for_an_older_node,
];

/// How long nobody may be silent.
const PATIENCE: Duration = Duration::from_secs(10);

/// What the log says of each change that is refused because nobody knows it. (The server repeats the end of it.)
const REFUSED: &str = "append-only file is refused: an unknown change: perhaps a later version wrote it";

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
    assert_eq!(replica.log().matches(REFUSED).count(), 2, "each is told: {}", replica.log());
    assert_eq!(holders(&mut conn, "known"), ["alice"]);
    assert_eq!(holders(&mut conn, "later"), ["carol"]);
    assert!(conn.cmd(&["FLOCK.INFO", "unknown"]).is_nil(), "nothing is guessed");
    // Nobody shall go on from a snapshot of that.
    assert_eq!(outcome_of_a_snapshot(&replica), "err");
    // What it has understood it can be promoted with.
    promote(&replica);
    assert_eq!(outcome_of_a_snapshot(&replica), "ok");
    let next = conn.cmd(&args!["FLOCK.ACQUIRE", "unknown", "dave", 60_000]).as_token();
    assert!(next > 7_000_000_000_003, "{next}");
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", "known", "alice"]), Reply::Int(1));
    // And so is all well when it gets everything anew from a primary that it understands.
    assert_eq!(conn.cmd(&args!["REPLICAOF", "127.0.0.1", port]), Reply::ok());
    wait_until("it refuses again", PATIENCE, || replica.log().matches(REFUSED).count() >= 4);
    assert_eq!(outcome_of_a_snapshot(&replica), "err");
    let primary = builder.start();
    demote(&replica, &primary);
    wait_in_step(&primary, &replica);
    assert_eq!(outcome_of_a_snapshot(&replica), "ok");
    replica.assert_alive();
}

/// `ok` or `err`, of a snapshot in the background.
#[track_caller]
fn outcome_of_a_snapshot(server: &Server) -> String {
    assert_eq!(server.connect(Protocol::Resp2).cmd(&["BGSAVE"]).error_code(), None);
    wait_for("the snapshot has ended", PATIENCE, || {
        let info = server.info("persistence");
        (info.text("rdb_bgsave_in_progress") == "0").then(|| info.text("rdb_last_bgsave_status").to_owned())
    })
}

/// Whether there is a library of the next version; if not, says so.
fn is_built() -> bool {
    let built = long_tier();
    if !built {
        println!("not run: the next version is for the long tier, which builds it");
    }
    built
}

/// How a server may be stopped. It saves a snapshot at a shutdown unless it is told not to: that is Valkey's default.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stop {
    WithoutSaving,
    Saving,
    Kill,
}

fn rolling_upgrade_keeps_every_hold(builder: Builder) {
    // As the manual says: the replica, then the failover, then the old primary. Until that is upgraded too it is an old replica under a
    // new primary, and refuses what it does not know. Started again on a snapshot of that, it would follow from there, without what it has
    // refused, and nobody would know: no such snapshot is loaded. From all others it comes back by itself.
    if !is_built() {
        return;
    }
    let plain = builder.config("save", "3600 1");
    let with_log = plain.clone().appendonly();
    // A snapshot that lacks holds must not be loaded; a log says by itself what it lacks.
    for (builder, stop, is_refused) in [
        (&plain, Stop::WithoutSaving, false),
        (&plain, Stop::Kill, false),
        (&plain, Stop::Saving, true),
        (&with_log, Stop::Saving, false),
    ] {
        let mut servers = Replicated::start(builder, 1);
        let (old, new) = (&mut servers.primary, &mut servers.replicas[0]);
        let mut conn = old.connect(Protocol::Resp2);
        let first = conn.cmd(&args!["FLOCK.ACQUIRE", "first", "alice", LEASE_MS, "LABEL", "nightly"]).as_token();
        new.set_module(&planted_module());
        // It does not stop before what it has been sent is in its own log.
        wait_until("no log is being written", PATIENCE, || {
            let persistence = new.info("persistence");
            ["aof_rewrite_in_progress", "aof_rewrite_scheduled"].iter().all(|field| persistence.number(field) == 0)
        });
        new.restart();
        wait_in_step(old, new);
        let mixed = hold(&mut conn, "mixed", "alice");
        wait_in_step(old, new);
        let mut above = new.connect(Protocol::Resp2);
        for (key, token) in [("first", first), ("mixed", mixed)] {
            assert_eq!(holder(&mut above, key, "alice").field("token").as_token(), token, "n reads what n-1 writes");
        }
        assert_eq!(conn.cmd(&["SAVE"]), Reply::ok());

        fail_over(old, new);
        wait_in_step(new, old);
        let mut conn = new.connect(Protocol::Resp2);
        let tokens = [hold(&mut conn, "window", "bob"), hold(&mut conn, "window too", "carol")];
        assert!(first < mixed && mixed < tokens[0] && tokens[0] < tokens[1]);
        release(&mut conn, "first", "alice");
        wait_in_step(new, old);
        assert_eq!(old.log().matches(REFUSED).count(), 2, "{}", old.log());
        let mut below = old.connect(Protocol::Resp2);
        assert!(below.cmd(&["FLOCK.INFO", "window"]).is_nil(), "nothing is guessed");
        assert_eq!(holders(&mut below, "mixed"), ["alice"]);
        assert_eq!(below.cmd(&["EXISTS", "first"]), Reply::Int(0), "what it knows it follows");
        assert_eq!(outcome_of_a_snapshot(old), "err");

        old.set_module(&planted_module());
        match stop {
            Stop::WithoutSaving => drop(old.shutdown_nosave()),
            Stop::Kill => old.kill9(),
            Stop::Saving => {
                old.sigterm();
                old.wait_exit(PATIENCE);
            }
        }
        old.set_config("replicaof", &format!("127.0.0.1 {}", new.port()));
        let outcome = old.try_start_again();
        assert_eq!(outcome.is_err(), is_refused, "{stop:?}");
        if let Err(failure) = outcome {
            assert!(
                failure.log.contains("it was saved by a replica that had refused changes: remove the file"),
                "{}",
                failure.log
            );
            fs::remove_file(old.dir().join("dump.rdb")).expect("the snapshot is there");
            old.start_again();
        }
        wait_in_step(new, old);
        assert_same(&contents(old), &contents(new), &format!("both upgraded, {stop:?}"));
        assert_eq!(holders(&mut old.connect(Protocol::Resp2), "window"), ["bob"]);
        fail_over(new, old);
        let mut conn = old.connect(Protocol::Resp2);
        assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "window", tokens[0]]), Reply::Int(1));
        assert!(hold(&mut conn, "afterwards", "dave") > tokens[1]);
    }
}

fn replica_that_is_not_upgraded_cannot_join_a_newer_primary(builder: Builder) {
    // The operator has upgraded the primary first. The old replica gets a snapshot that it cannot read: it ends as after any such file, and
    // says why. The primary goes on, and with the new file so does the replica.
    if !is_built() {
        return;
    }
    let primary = builder.clone().module(planted_module()).start();
    let mut conn = primary.connect(Protocol::Resp2);
    let token = hold(&mut conn, "k", "alice");
    let mut replica = builder.start();
    let follow = args!["REPLICAOF", "127.0.0.1", primary.port()];
    assert_eq!(replica.connect(Protocol::Resp2).cmd(&follow), Reply::ok());
    let status = replica.wait_exit(PATIENCE);
    assert!(status.code().is_some(), "{status}");
    let reason = "the snapshot's token counter is from a newer version of this module";
    assert!(replica.log().contains(reason), "{}", replica.log());
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(1));
    replica.set_module(&planted_module());
    replica.set_config("replicaof", &format!("127.0.0.1 {}", primary.port()));
    replica.start_again();
    wait_in_step(&primary, &replica);
    assert_same(&contents(&replica), &contents(&primary), "the replica and its primary");
}

fn slot_does_not_leave_for_an_older_node(builder: Builder) {
    // One shard has been upgraded, another has not, and a slot is to go from the first to the second. It does not, by either way, while
    // something is held in it; the other way round it does.
    if !is_built() {
        return;
    }
    let newer = builder.clone().module(planted_module());
    let cluster = Cluster::of(&[newer, builder]);
    let key = "{b}k";
    assert_eq!(cluster.owner_of(key), 0, "CRC16 does not change");
    let mut way = Migration::new(&cluster, key, 1);
    let token = hold(&mut way.source, key, "alice");
    way.begin();
    let carry = args!["MIGRATE", "127.0.0.1", way.target_node.port(), key, 0, 5000];
    assert_eq!(way.source.cmd(&carry).error_code(), Some("ERR"), "the target cannot read it");
    for conn in [&mut way.source, &mut way.target] {
        assert_eq!(conn.cmd(&args!["CLUSTER", "SETSLOT", way.slot, "STABLE"]), Reply::ok());
    }
    assert!(way.target_node.log().contains("is newer than this module's"), "{}", way.target_node.log());
    if way.source_node.info("server").text("valkey_version").starts_with("9.") {
        way.ask_for_atomic();
        let source = &mut way.source;
        wait_until("the migration is given up", PATIENCE, || {
            source.cmd(&["CLUSTER", "GETSLOTMIGRATIONS"]).to_string().contains("failed")
        });
    }
    assert_eq!(way.source.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(1));
    assert_eq!(way.target.cmd(&args!["CLUSTER", "COUNTKEYSINSLOT", way.slot]), Reply::Int(0));

    let key = "{a}k";
    let mut way = Migration::new(&cluster, key, 0);
    let token = hold(&mut way.source, key, "alice");
    way.begin();
    way.carry(key);
    way.end();
    assert_eq!(way.target.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(1));
}
