//! The primary is found by Sentinel, and followed when it moves.

use std::future::IntoFuture;
use std::time::{Duration, Instant};

use flock_client::{Builder, ConnectError, Event, Events, Flock, Guard, LossReason};
use flock_tests::args;
use flock_tests::on_own_servers;
use flock_tests::reply::Reply;
use flock_tests::resp::Protocol;
use flock_tests::server::{self, Server};
use flock_tests::topology::{Guarded, promote, wait_in_step};
use flock_tests::wait::{let_pass, wait_until};
use tokio::time::{sleep, timeout};

use crate::load::{Load, WITH_LOSS};
use crate::scene::{
    SOON, assert_in_time, assert_kept, connections, give_back, held, is_current, long_tier, ms, wait_until_waiting,
    within_bounds,
};

on_own_servers![
    killed_primary_is_replaced,
    service_that_no_sentinel_knows_is_told,
    failover_by_hand_is_followed,
    frozen_primary_is_left,
    returned_primary_is_left_alone,
    demoted_primary_is_left,
    sentinels_may_be_down,
    users_need_few_permissions,
    acknowledgements_move_too,
];

/// How long a failover may take on a busy machine: detection, an election or two, and the news of it.
const MOVED_WITHIN: Duration = Duration::from_secs(20);
/// A lease that outlasts the time between the promotion of a replica and the client's hearing of it.
const LEASE: Duration = Duration::from_secs(9);

fn url(sentinels: &[Server]) -> String {
    let addresses: Vec<_> = sentinels.iter().map(|sentinel| sentinel.addr().to_string()).collect();
    format!("valkey+sentinel://{}/{}", addresses.join(","), Guarded::SERVICE)
}

fn builder_for(servers: &Guarded) -> Builder {
    Flock::builder(url(&servers.sentinels))
}

async fn connect(servers: &Guarded) -> Flock {
    builder_for(servers).connect().await.expect("the sentinels are there")
}

fn calls(server: &Server, command: &str) -> u64 {
    let stats = server.info("commandstats");
    let stat = stats.get(&format!("cmdstat_{command}"));
    stat.and_then(|stat| stat.strip_prefix("calls=")?.split(',').next()?.parse().ok()).unwrap_or(0)
}

/// Clients at work on some locks, all of them on the one primary.
fn load(flock: &Flock) -> Load {
    Load::start(flock, &["load0", "load1", "load2", "load3"].map(str::to_owned))
}

async fn until(events: &mut Events, wanted: fn(&Event) -> bool) {
    while !wanted(&events.next().await.expect("the client lives")) {}
}

async fn lost(guard: &Guard) -> LossReason {
    timeout(MOVED_WITHIN, guard.lost()).await.expect("the loss is told").expect("it is lost")
}

/// Waits until the client is with the new primary, which it must be before the old one is told that it is none any more; then until
/// that. Nobody asks the old one for anything then.
fn wait_until_moved(servers: &Guarded, old: usize, new: usize) {
    wait_until("the client listens to the new primary", SOON, || !connections(&servers.servers[new], true).is_empty());
    servers.wait_demoted(old);
    let old = &servers.servers[old];
    assert!(connections(old, true).is_empty());
    let before = calls(old, "flock.acquire");
    let_pass(ms(1000));
    assert_eq!(calls(old, "flock.acquire"), before);
}

/// Under load the primary goes, by `end`. What it had told the replicas stays held, and is renewed; who waits is granted by the new
/// one; what it had told nobody is lost.
fn primary_goes(builder: &server::Builder, end: fn(&mut Guarded), after: fn(&Guarded, usize)) {
    let mut servers = Guarded::start(builder, 2, 3);
    within_bounds(async {
        let (flock, other) = (connect(&servers).await, connect(&servers).await);
        let kept = flock.lock("kept").lease(ms(15_000)).acknowledged_by(2, SOON).await.unwrap();
        let first = other.lock("k").lease(ms(15_000)).acknowledged_by(2, SOON).await.unwrap();
        let waiting = tokio::spawn(flock.lock("k").wait(ms(35_000)).into_future());
        wait_until_waiting(&servers.servers[0], 1);
        let load = self::load(&flock);
        sleep(ms(200)).await;

        // The replicas hear nothing more, so that there is something that they do not know.
        for replica in &servers.servers[1..] {
            replica.sigstop();
        }
        let mut admin = servers.servers[0].connect(Protocol::Resp2);
        assert_eq!(admin.cmd(&["CLIENT", "KILL", "TYPE", "replica"]).as_int(), 2);
        let unheard = flock.lock("unheard").lease(ms(6000)).await.unwrap();
        let (began, asked) = (Instant::now(), asked(&servers));
        end(&mut servers);
        for replica in &servers.servers[1..] {
            replica.sigcont();
        }

        let (reason, new) = (lost(&unheard).await, servers.wait_moved(0));
        println!("{reason:?} after {:?}", began.elapsed());
        assert!(matches!(reason, LossReason::Gone | LossReason::Expired), "{reason:?}");
        let next = held(&flock, "unheard").await;
        assert!(next.token() > unheard.token());
        // Two clients of two connections each: at every attempt up to three sentinels are asked.
        assert!(self::asked(&servers) - asked < 4 * 3 * 50);
        let token = first.token();
        give_back(first).await;
        let second = timeout(SOON, waiting).await.unwrap().unwrap().unwrap();
        assert!(second.token() > token && is_current(&servers.servers[new], &second));
        after(&servers, new);
        load.end(&WITH_LOSS).await;
        kept.renew().await.unwrap();
        assert!(kept.is_valid() && is_current(&servers.servers[new], &kept));
    });
}

/// How often the sentinels were asked.
fn asked(servers: &Guarded) -> u64 {
    servers.sentinels.iter().map(|sentinel| calls(sentinel, "sentinel|get-master-addr-by-name")).sum()
}

fn killed_primary_is_replaced(builder: server::Builder) {
    primary_goes(&builder, |servers| servers.servers[0].kill9(), |_, _| ());
}

fn frozen_primary_is_left(builder: server::Builder) {
    // It comes back when all is over, and believes that it is still the primary: nobody is with it any more.
    if !long_tier() {
        return;
    }
    let freeze = |servers: &mut Guarded| servers.servers[0].sigstop();
    primary_goes(&builder, freeze, |servers, new| {
        servers.servers[0].sigcont();
        wait_until_moved(servers, 0, new);
    });
}

fn service_that_no_sentinel_knows_is_told(builder: server::Builder) {
    let servers = Guarded::start(&builder, 0, 1);
    within_bounds(async {
        let began = Instant::now();
        let sentinel = servers.sentinels[0].addr();
        let error = Flock::connect(format!("valkey+sentinel://u:secret@{sentinel}/other")).await.unwrap_err();
        assert_in_time(began, began.elapsed(), ms(2000));
        let text = format!("bad configuration: no sentinel knows the service \"other\"; asked: {sentinel}");
        assert_eq!(error.to_string(), text);
        assert!(!error.is_retryable());

        // One that is not there may know it: so it is waited for.
        let gone = Server::builder().without_module().start().addr();
        let url = format!("valkey+sentinel://u:secret@{gone},{sentinel}/other");
        let error = Flock::builder(url).connect_timeout(ms(500)).connect().await.unwrap_err();
        let ConnectError::Unavailable(source) = &error else { panic!("{error:?}") };
        let source = source.to_string();
        assert!(source.contains("no primary of \"other\"") && source.contains(&gone.to_string()), "{source}");
        assert!(!source.contains("secret") && error.is_retryable(), "{source}");

        let flock = connect(&servers).await;
        assert!(is_current(&servers.servers[0], &held(&flock, "k").await));
        for wrong in ["valkey+sentinel://", "valkey+sentinel://h", "valkey+sentinel://h/", "valkey+sentinel://h:x/s"] {
            let error = Flock::connect(wrong).await.unwrap_err();
            assert!(matches!(error, ConnectError::Config(_)), "{wrong}: {error:?}");
        }
    });
}

fn failover_by_hand_is_followed(builder: server::Builder) {
    if !long_tier() {
        return;
    }
    let servers = Guarded::start(&builder, 2, 3);
    within_bounds(async {
        let flock = connect(&servers).await;
        let kept = flock.lock("kept").lease(LEASE).acknowledged_by(2, SOON).await.unwrap();
        let began = Instant::now();
        let load = self::load(&flock);
        sleep(ms(500)).await;
        servers.fail_over();
        let new = servers.wait_moved(0);
        wait_until_moved(&servers, 0, new);
        load.end(&WITH_LOSS).await;
        assert_kept(&servers.servers[new], &kept, began, LEASE);
    });
}

fn returned_primary_is_left_alone(builder: server::Builder) {
    // It starts as a primary, and is one until a sentinel tells it otherwise, some seconds later.
    if !long_tier() {
        return;
    }
    let mut servers = Guarded::start(&builder, 2, 3);
    within_bounds(async {
        let flock = connect(&servers).await;
        let load = self::load(&flock);
        sleep(ms(200)).await;
        servers.servers[0].kill9();
        let new = servers.wait_moved(0);
        servers.servers[0].start_again();
        let late = connect(&servers).await;
        assert!(is_current(&servers.servers[new], &held(&late, "late").await));
        servers.wait_demoted(0);
        load.end(&WITH_LOSS).await;
        assert_eq!(calls(&servers.servers[0], "flock.acquire"), 0);
    });
}

fn demoted_primary_is_left(builder: server::Builder) {
    // An operator demotes the primary behind the sentinels' back. Its connections live, and it answers READONLY: so it is left at once,
    // and not come back to though the sentinels still name it. When it is a primary again, all goes on.
    if !long_tier() {
        return;
    }
    let servers = Guarded::start(&builder, 1, 1);
    within_bounds(async {
        let flock = connect(&servers).await;
        let first = held(&flock, "k").await;
        let waiting = tokio::spawn(flock.lock("k").wait(MOVED_WITHIN).into_future());
        wait_until_waiting(&servers.servers[0], 1);
        let mut events = flock.events();
        let demote = args!["REPLICAOF", "127.0.0.1", servers.servers[1].port()];
        servers.servers[1].connect(Protocol::Resp2).cmd(&["REPLICAOF", "NO", "ONE"]);
        servers.servers[0].connect(Protocol::Resp2).cmd(&demote);
        let left =
            timeout(SOON, until(&mut events, |event| matches!(event, Event::Disconnected { link: "commands", .. })));
        left.await.expect("a server that answers READONLY is left");
        let back = timeout(ms(1000), until(&mut events, |event| matches!(event, Event::Connected { .. }))).await;
        assert!(back.is_err() && servers.primary() == 0, "came back to a replica");
        promote(&servers.servers[0]);
        drop(first);
        let guard = timeout(MOVED_WITHIN, waiting).await.unwrap().unwrap().unwrap();
        assert!(is_current(&servers.servers[0], &guard));
    });
}

fn sentinels_may_be_down(builder: server::Builder) {
    if !long_tier() {
        return;
    }
    let mut servers = Guarded::start(&builder, 2, 3);
    within_bounds(async {
        // Named is one; the others it names itself.
        let flock = Flock::connect(url(&servers.sentinels[..1])).await.unwrap();
        let waited = held(&flock, "k").await;
        servers.sentinels[0].kill9();
        let named = url(&servers.sentinels);
        assert!(is_current(&servers.servers[0], &held(&Flock::connect(&named).await.unwrap(), "one").await));
        servers.servers[0].kill9();
        let new = servers.wait_moved(0);
        drop(waited);
        assert!(is_current(&servers.servers[new], &held(&flock, "k").await));

        servers.sentinels[1].kill9();
        let late = Flock::connect(&named).await.unwrap();
        assert!(is_current(&servers.servers[new], &held(&late, "two").await));
        // And none: what is connected goes on.
        servers.sentinels[2].kill9();
        sleep(ms(2500)).await;
        assert!(is_current(&servers.servers[new], &held(&flock, "none").await));
        let error = Flock::builder(&named).connect_timeout(ms(500)).connect().await.unwrap_err();
        assert!(matches!(error, ConnectError::Unavailable(_)), "{error:?}");
    });
}

fn users_need_few_permissions(builder: server::Builder) {
    if !long_tier() {
        return;
    }
    let servers = Guarded::start(&builder, 0, 1);
    within_bounds(async {
        let asker = "ACL SETUSER asker on >q +sentinel|master +sentinel|get-master-addr-by-name +sentinel|sentinels";
        let worker = "ACL SETUSER worker on >p%w ~* resetchannels &flock:* +@flock +subscribe +select";
        let mut admin = servers.servers[0].connect(Protocol::Resp2);
        assert_eq!(admin.cmd(&worker.split(' ').collect::<Vec<_>>()), Reply::ok());
        let mut sentinel = servers.sentinels[0].connect(Protocol::Resp2);
        assert_eq!(sentinel.cmd(&asker.split(' ').collect::<Vec<_>>()), Reply::ok());
        assert_eq!(sentinel.cmd(&["ACL", "SETUSER", "default", "off"]), Reply::ok());
        let url = |password| {
            let sentinel = servers.sentinels[0].addr();
            format!("redis+sentinel://worker:{password}@{sentinel}/{}/1", Guarded::SERVICE)
        };
        let right = Flock::builder(url("p%25w"));
        let flock = right.clone().sentinel_credentials(Some("asker"), "q").connect().await.unwrap();
        let guard = held(&flock, "k").await;
        assert_eq!(admin.cmd(&["SELECT", "1"]), Reply::ok());
        assert_eq!(admin.cmd(&args!["FLOCK.CHECK", "k", guard.token().get()]).as_int(), 1);

        for (builder, what) in [
            (right.clone(), "no credentials for the sentinels"),
            (right.sentinel_credentials(Some("asker"), "wrong"), "wrong ones"),
            (Flock::builder(url("wrong")).sentinel_credentials(Some("asker"), "q"), "wrong ones for the server"),
        ] {
            let error = builder.connect().await.unwrap_err();
            let ConnectError::Server(server) = &error else { panic!("{what}: {error:?}") };
            assert!(["WRONGPASS", "NOAUTH"].contains(&server.code()), "{what}: {error:?}");
        }
    });
}

fn acknowledgements_move_too(builder: server::Builder) {
    // The connections that wait for replicas are kept for a while: not those to the old primary.
    if !long_tier() {
        return;
    }
    let servers = Guarded::start(&builder, 1, 1);
    within_bounds(async {
        let flock = connect(&servers).await;
        drop(flock.lock("k").acknowledged_by(1, SOON).await.unwrap());
        servers.fail_over();
        let new = servers.wait_moved(0);
        wait_until_moved(&servers, 0, new);
        wait_in_step(&servers.servers[new], &servers.servers[0]);
        let guard = flock.lock("k").wait(SOON).acknowledged_by(1, SOON).await.unwrap();
        assert!(is_current(&servers.servers[new], &guard));
    });
}
