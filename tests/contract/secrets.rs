//! Who holds a lock is told to whoever asks about it, and to nobody else. (An owner is a name, no password: see `docs/GUARANTEES.md`.)

use std::fs;

use flock_tests::args;
use flock_tests::args::encode;
use flock_tests::on_own_servers;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol, RecvError};
use flock_tests::server::{Builder, Server};
use flock_tests::subscriber::Subscriber;
use flock_tests::topology::{Replicated, promote};
use flock_tests::wait::wait_until;

use crate::lock_view::waiting;
use crate::persistence::{FOOTER_BYTES, without_last};
use crate::scene::{LEASE_MS, QUIET, listener, queue};

on_own_servers![owner_shows_only_where_it_was_asked_for, owner_shows_in_no_log];

/// An owner that occurs nowhere by chance.
const CANARY: &str = "canary-owner-5e1f";

fn shows(bytes: &[u8]) -> bool {
    bytes.windows(CANARY.len()).any(|window| window == CANARY.as_bytes())
}

#[track_caller]
fn reply_shows(conn: &mut Conn, request: &[&str]) -> bool {
    let reply = conn.cmd(request);
    assert_eq!(reply.error_code(), None, "{request:?}: {reply}");
    shows(reply.to_string().as_bytes())
}

/// The payloads of all that was heard.
#[track_caller]
fn heard(listener: &mut Subscriber) -> Vec<Vec<u8>> {
    let mut payloads = Vec::new();
    loop {
        match listener.message_within(QUIET) {
            Ok(message) => payloads.push([message.channel, message.payload].concat()),
            Err(RecvError::TimedOut) => return payloads,
            Err(error) => panic!("expected messages, or none: {error:?}"),
        }
    }
}

/// The canary does all that an owner can do: it is granted, waits, is handed over to, queues, renews, converts, is refused, is revoked,
/// runs out, is cut off, and asks for nonsense.
#[track_caller]
fn live(server: &Server, conn: &mut Conn) {
    let mut ask = |request: &[Vec<u8>]| conn.cmd(request);
    let token = ask(&args!["FLOCK.ACQUIRE", "k", CANARY, LEASE_MS, "LABEL", "x", "SESSION", 50]).as_token();
    assert!(ask(&args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS]).is_nil());
    assert_eq!(ask(&args!["FLOCK.RENEW", "k", CANARY, LEASE_MS, "TOKEN", token]), Reply::Int(1));
    for refused in [
        &args!["FLOCK.ACQUIRE", "k", CANARY, LEASE_MS, "NEW"][..],
        &args!["FLOCK.ACQUIRE", "k", CANARY, "soon"],
        &args!["FLOCK.ACQUIRE", "k", CANARY, LEASE_MS, CANARY],
        &args!["FLOCK.RELEASE", "k", CANARY, "TOKEN", CANARY],
        &args!["FLOCK._APPLY", CANARY, "k"],
    ] {
        assert!(ask(refused).error_code().is_some());
    }
    let mut waiter = waiting(server, Protocol::Resp2, &args!["FLOCK.ACQUIRE", "k", "bob", LEASE_MS, "BLOCK", 0]);
    assert_eq!(ask(&["FLOCK.REVOKE", "k"].map(|word| word.as_bytes().to_vec())), Reply::Int(1));
    waiter.recv().as_token();
    let mut next = waiting(server, Protocol::Resp2, &args!["FLOCK.ACQUIRE", "k", CANARY, 30, "BLOCK", 0]);
    let mut last = waiting(server, Protocol::Resp2, &args!["FLOCK.ACQUIRE", "k", CANARY, LEASE_MS, "BLOCK", 20]);
    assert_eq!(ask(&args!["FLOCK.RELEASE", "k", "bob"]), Reply::Int(1));
    // The newer request of one owner takes the place of the older.
    let replies = [next.recv(), last.recv()];
    assert!(replies.iter().any(|reply| matches!(reply, Reply::Int(1..))), "{replies:?}");
    ask(&args!["FLOCK.RELEASE", "k", CANARY]);
    let mut cut_off = server.connect(Protocol::Resp2);
    cut_off.cmd(&args!["FLOCK.ACQUIRE", "cut", CANARY, LEASE_MS, "SESSION", 20]).as_token();
    drop(cut_off);
    ask(&args!["FLOCK.ACQUIRE", "short", CANARY, 10]).as_token();
    ask(&args!["FLOCK.ACQUIRE", "deleted", CANARY, LEASE_MS]).as_token();
    ask(&args!["DEL", "deleted"]);
    ask(&args!["FLOCK.ACQUIRE", "from", CANARY, LEASE_MS]).as_token();
    ask(&args!["RENAME", "from", "to"]);
    wait_until("all of it is over", ANSWER_WITHIN, || conn.cmd(&["EXISTS", "k", "cut", "short"]) == Reply::Int(0));
}

fn owner_shows_only_where_it_was_asked_for(builder: Builder) {
    // H6. Who watches keys, reads statistics or lists clients need not see the owners' names. Commands themselves are shown where the
    // server shows commands, and whoever may read a lock sees who holds it.
    let server = builder
        .appendonly()
        .config("slowlog-log-slower-than", 0)
        .config("slowlog-max-len", 1000)
        .config("notify-keyspace-events", "AKEdmn")
        .config("flock.release-notifications", "yes")
        .start();
    let mut conn = server.connect(Protocol::Resp2);
    let mut monitor = server.connect(Protocol::Resp2);
    assert_eq!(monitor.cmd(&["MONITOR"]), Reply::ok());
    let mut releases = Subscriber::new(server.connect(Protocol::Resp2), "SUBSCRIBE", &["k", "cut", "short", "deleted"]);
    let mut events = Subscriber::new(server.connect(Protocol::Resp2), "PSUBSCRIBE", &["__key*__:*"]);
    let mut own = listener(&server, Protocol::Resp2, "own news");
    live(&server, &mut conn);
    conn.cmd(&args!["FLOCK.ACQUIRE", "held", CANARY, LEASE_MS, "CHANNEL", "own news"]).as_token();
    conn.cmd(&args!["FLOCK.ACQUIRE", "other", "bob", LEASE_MS]).as_token();
    queue(&mut conn, "other", CANARY, "own news");
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", "other", "bob"]), Reply::Int(1));

    let release_notices = heard(&mut releases);
    assert!(release_notices.len() >= 3, "{release_notices:?}");
    assert!(!release_notices.iter().any(|notice| shows(notice)), "a release notification names the owner");
    let events = heard(&mut events);
    assert!(events.len() >= 3, "{events:?}");
    assert!(!events.iter().any(|event| shows(event)), "a keyspace event names the owner");
    for silent in [
        &["INFO", "everything"][..],
        &["CLIENT", "LIST"],
        &["CLIENT", "INFO"],
        &["ACL", "LOG"],
        &["LATENCY", "LATEST"],
        &["MEMORY", "STATS"],
        &["MODULE", "LIST"],
        &["CONFIG", "GET", "*"],
        &["PUBSUB", "CHANNELS"],
        &["OBJECT", "ENCODING", "held"],
        &["DEBUG", "OBJECT", "held"],
        &["DEBUG", "DIGEST-VALUE", "held"],
        &["TYPE", "held"],
        &["SCAN", "0"],
    ] {
        assert!(!reply_shows(&mut conn, silent), "{silent:?} names the owner");
    }

    // And this is where it shows.
    assert!(heard(&mut own).iter().any(|notice| shows(notice)), "the owner's own messages name it");
    for asked in [&["FLOCK.INFO", "held"][..], &["FLOCK.LIST"], &["SLOWLOG", "GET", "-1"], &["DUMP", "held"]] {
        assert!(reply_shows(&mut conn, asked), "{asked:?} does not name the owner");
    }
    wait_until("MONITOR shows the command", ANSWER_WITHIN, || shows(monitor.recv().as_bytes()));
    let file = fs::read(server.dir().join("appendonlydir/appendonly.aof.1.incr.aof")).expect("the file is there");
    assert!(shows(&file), "the append-only file does not name the owner");
    assert!(!shows(server.log().as_bytes()), "the log names the owner:\n{}", server.log());
}

fn owner_shows_in_no_log(builder: Builder) {
    // H6. Logs are kept long and are read by many. At the most talkative level, over everything that the module has a line for: saved and
    // loaded, refused values, a changed eviction policy, replicas, a promotion.
    let builder = builder.appendonly().config("loglevel", "debug");
    let mut servers = Replicated::start(&builder, 1);
    let mut conn = servers.primary.connect(Protocol::Resp2);
    live(&servers.primary, &mut conn);
    conn.cmd(&args!["FLOCK.ACQUIRE", "held", CANARY, LEASE_MS]).as_token();
    let value = conn.cmd(&["DUMP", "held"]).as_bytes().to_vec();
    let cut_short = without_last(FOOTER_BYTES + 1, &value);
    assert_eq!(conn.cmd(&args!["RESTORE", "restored", 0, cut_short]).error_code(), Some("ERR"));
    conn.cmd(&["CONFIG", "SET", "maxmemory-policy", "allkeys-random"]);
    for reload in ["RELOAD", "LOADAOF"] {
        assert_eq!(conn.cmd(&["DEBUG", reload]), Reply::ok());
    }
    conn.cmd(&["BGREWRITEAOF"]);
    servers.wait_in_step();
    // A change that this version does not know.
    servers.primary.kill9();
    let path = servers.primary.dir().join("appendonlydir");
    let file = fs::read_dir(path)
        .expect("the directory is there")
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.to_string_lossy().ends_with(".incr.aof"))
        .max()
        .expect("the file is there");
    let mut bytes = fs::read(&file).expect("the file can be read");
    bytes.extend(encode(&args!["FLOCK._APPLY", format!("GRANT-9 X 1 2 - {CANARY}"), "other"]));
    fs::write(&file, bytes).expect("the file can be written");
    servers.primary.start_again();
    assert!(servers.primary.log().contains("an unknown change"), "{}", servers.primary.log());
    promote(&servers.replicas[0]);
    live(&servers.replicas[0], &mut servers.replicas[0].connect(Protocol::Resp2));
    for server in [&servers.primary, &servers.replicas[0]] {
        let log = server.log();
        let line = log.lines().find(|line| shows(line.as_bytes()));
        assert_eq!(line, None);
    }
}
