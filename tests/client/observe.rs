//! What a client tells of its doing: spans, events, counts. Subscribers and recorders belong to the process, so each test has one.

use std::collections::{BTreeMap, HashMap};
use std::fmt::{self, Write};
use std::future::IntoFuture;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use flock_client::Flock;
use flock_tests::proxy::{Direction, Fault, Proxy};
use flock_tests::resp::Protocol;
use flock_tests::server::Server;
use flock_tests::wait::wait_until;
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tokio::time::timeout;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::apart::alone;
use crate::scene::{
    SOON, give_back, held, ms, quick, revoke, settled, wait_until_nothing_is_left, wait_until_waiting, within_bounds,
};

/// What happens in both tests, to a client with a password: each outcome once.
async fn play(server: &Server) {
    server.connect(Protocol::Resp2).cmd(&["ACL", "SETUSER", "u", "on", ">secret", "+@all", "~*", "&*"]);
    let flock = Flock::connect(format!("valkey://u:secret@{}", server.addr())).await.unwrap();
    let guard = settled(&flock, "k").await;
    assert!(flock.lock("k").try_acquire().await.unwrap().is_none());
    flock.lock("k").wait(ms(50)).await.unwrap_err();
    wait_until_waiting(server, 0);
    let waiting = tokio::spawn(flock.lock("k").into_future());
    wait_until_waiting(server, 1);
    waiting.abort();
    wait_until_waiting(server, 0);
    server.connect(Protocol::Resp2).cmd(&["SET", "string", "x"]);
    flock.lock("string").await.unwrap_err();
    flock.lock("k").lease(ms(0)).await.unwrap_err();
    revoke(server, "k");
    timeout(SOON, guard.lost()).await.unwrap();
    drop(guard);
    give_back(held(&flock, "k").await).await;
    flock.lock("leaked").await.unwrap().leak();
    let kept = held(&flock, "kept").await;
    // Replies are lost: the request is sent again, and so is the renewal.
    let proxy = Proxy::to(server.addr());
    let unlucky = quick(proxy.addr()).response_timeout(ms(100)).connect().await.unwrap();
    let renewed = unlucky.lock("renewed").lease(ms(5000)).await.unwrap();
    proxy.set_existing(Direction::ToClient, Fault::Drop);
    give_back(held(&unlucky, "retried").await).await;
    proxy.set_existing(Direction::ToClient, Fault::Drop);
    renewed.renew().await.unwrap();
    drop(renewed);
    flock.shutdown(SOON).await.unwrap(); // "kept" is lost
    drop(kept);
    unlucky.shutdown(SOON).await.unwrap();
    server.connect(Protocol::Resp2).cmd(&["DEL", "leaked"]);
    wait_until_nothing_is_left(server, SOON);
}

#[derive(Clone, Default)]
struct Collector(Arc<Collected>);

#[derive(Default)]
struct Collected {
    next: AtomicU64,
    spans: Mutex<BTreeMap<u64, Told>>,
    events: Mutex<Vec<Told>>,
}

#[derive(Clone, Debug, Default)]
struct Told {
    name: String,
    fields: HashMap<String, String>,
    /// Span: how many handles there are; it is closed when there is none.
    handles: u64,
}

impl Visit for Told {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = self.fields.entry(field.name().to_owned()).or_default();
        text.clear();
        write!(text, "{value:?}").unwrap();
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.fields.insert(field.name().to_owned(), value.to_owned());
    }
}

impl Subscriber for Collector {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("flock_client")
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let mut told = Told { name: attributes.metadata().name().to_owned(), handles: 1, ..Told::default() };
        attributes.record(&mut told);
        let id = 1 + self.0.next.fetch_add(1, Ordering::Relaxed);
        self.0.spans.lock().unwrap().insert(id, told);
        Id::from_u64(id)
    }

    fn record(&self, span: &Id, values: &Record<'_>) {
        values.record(self.0.spans.lock().unwrap().get_mut(&span.into_u64()).unwrap());
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut told = Told { name: event.metadata().level().to_string(), ..Told::default() };
        event.record(&mut told);
        self.0.events.lock().unwrap().push(told);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}

    fn clone_span(&self, span: &Id) -> Id {
        self.0.spans.lock().unwrap().get_mut(&span.into_u64()).unwrap().handles += 1;
        span.clone()
    }

    fn try_close(&self, span: Id) -> bool {
        let mut spans = self.0.spans.lock().unwrap();
        let told = spans.get_mut(&span.into_u64()).unwrap();
        told.handles -= 1;
        told.handles == 0
    }
}

#[test]
fn spans_tell_of_every_outcome_and_no_secret() {
    alone("observe::spans_tell_of_every_outcome_and_no_secret", || {
        let collector = Collector::default();
        tracing::subscriber::set_global_default(collector.clone()).unwrap();
        within_bounds(async {
            let server = Server::builder().start();
            play(&server).await;
        });
        wait_until("all spans are closed", SOON, || {
            collector.0.spans.lock().unwrap().values().all(|span| span.handles == 0)
        });
        let spans = collector.0.spans.lock().unwrap().clone();
        let field = |told: &Told, name: &str| told.fields.get(name).cloned().unwrap_or_default();
        let of = |name: &str| spans.values().filter(|span| span.name == name).collect::<Vec<_>>();

        let mut outcomes: Vec<_> =
            of("flock.acquire").iter().map(|span| (field(span, "key"), field(span, "outcome"))).collect();
        outcomes.sort_unstable();
        let expected = [
            ("k", "acquired"),
            ("k", "acquired"),
            ("k", "bad_request"),
            ("k", "busy"),
            ("k", "cancelled"),
            ("k", "timed_out"),
            ("kept", "acquired"),
            ("leaked", "acquired"),
            ("renewed", "acquired"),
            ("retried", "acquired"),
            ("string", "refused"),
        ];
        let expected = expected.map(|(key, outcome)| (key.to_owned(), outcome.to_owned()));
        assert_eq!(outcomes, expected);
        for span in of("flock.acquire") {
            let acquired = field(span, "outcome") == "acquired";
            assert_eq!(field(span, "token").parse::<u64>().is_ok(), acquired, "{span:?}");
            assert_eq!(field(span, "owner").is_empty(), field(span, "outcome") == "bad_request", "{span:?}");
        }
        let mut ends: Vec<_> = of("flock.hold").iter().map(|span| (field(span, "key"), field(span, "ended"))).collect();
        ends.sort_unstable();
        let expected = [
            ("k", "given_back"),
            ("k", "lost"),
            ("kept", "lost"),
            ("leaked", "leaked"),
            ("renewed", "given_back"),
            ("retried", "given_back"),
        ];
        assert_eq!(ends, expected.map(|(key, end)| (key.to_owned(), end.to_owned())));

        let events = collector.0.events.lock().unwrap().clone();
        let told = |level: &str, text: &str| {
            events.iter().filter(|event| event.name == level && field(event, "message") == text).count()
        };
        assert_eq!(told("WARN", "lock lost"), 2);
        let losses = events.iter().filter(|event| field(event, "message") == "lock lost");
        let losses: Vec<_> = losses.map(|loss| (field(loss, "key"), field(loss, "reason"))).collect();
        let expected = [("k", "revoked"), ("kept", "the client is shut down")];
        assert_eq!(losses, expected.map(|(key, reason)| (key.to_owned(), reason.to_owned())));
        let has_token = |event: &Told| field(event, "token").parse::<u64>().is_ok();
        assert!(events.iter().filter(|event| field(event, "message") == "lock lost").all(has_token));
        assert_eq!(told("WARN", "a lock could not be given back"), 0, "what was refused is not to be given back");
        assert!(told("DEBUG", "renewed") >= 2 && told("DEBUG", "renewal failed") >= 1);
        let everything = format!("{spans:?}{events:?}");
        assert!(everything.contains("renewed") && !everything.contains("secret"));
    });
}

/// What was counted since the last look: "name{label=value}" to the count, the level, or the number of times.
fn counts(snapshotter: &Snapshotter) -> BTreeMap<String, f64> {
    let mut counts = BTreeMap::new();
    for (key, _, _, value) in snapshotter.snapshot().into_vec() {
        let key = key.key();
        let labels: Vec<_> = key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
        let value = match value {
            DebugValue::Counter(count) => f64::from(u32::try_from(count).unwrap()),
            DebugValue::Gauge(level) => level.into_inner(),
            DebugValue::Histogram(values) => {
                assert!(values.iter().all(|seconds| (0.0..60.0).contains(&seconds.into_inner())), "{values:?}");
                f64::from(u32::try_from(values.len()).unwrap())
            }
        };
        counts.insert(format!("{}{{{}}}", key.name(), labels.join(",")), value);
    }
    counts
}

#[test]
fn metrics_count_what_happens() {
    alone("observe::metrics_count_what_happens", || {
        let recorder = DebuggingRecorder::new();
        let snapshotter = recorder.snapshotter();
        recorder.install().unwrap();
        within_bounds(async {
            let server = Server::builder().start();
            play(&server).await;
        });
        let mut counts = counts(&snapshotter);
        // How often something is tried again is a matter of time.
        for name in [
            "flock_client_acquire_retries_total{}",
            "flock_client_renew_failures_total{}",
            "flock_client_connections_total{link=commands}",
        ] {
            assert!(counts.remove(name).is_some_and(|count| count >= 1.0), "{name}: {counts:?}");
        }
        counts.remove("flock_client_release_failures_total{}");
        assert_eq!(
            counts.remove("flock_client_connections_total{link=messages}").map(|count| count >= 2.0),
            Some(true)
        );
        let mut expected = BTreeMap::new();
        for (outcome, count) in [
            ("acquired", 6.0),
            ("bad_request", 1.0),
            ("busy", 1.0),
            ("cancelled", 1.0),
            ("refused", 1.0),
            ("timed_out", 1.0),
        ] {
            expected.insert(format!("flock_client_acquire_total{{outcome={outcome}}}"), count);
            expected.insert(format!("flock_client_acquire_seconds{{outcome={outcome}}}"), count);
        }
        for (name, count) in [
            ("flock_client_held{}", 0.0),
            ("flock_client_hold_seconds{}", 6.0),
            ("flock_client_lost_total{reason=revoked}", 1.0),
            ("flock_client_lost_total{reason=shut_down}", 1.0),
        ] {
            expected.insert(name.to_owned(), count);
        }
        assert_eq!(counts, expected);
    });
}
