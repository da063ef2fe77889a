//! Which node of a cluster serves which slot, as far as we have heard.
//!
//! Three tell: `CLUSTER SLOTS`, asked of one node after the other; `MOVED`, which a node answers for a slot that is not its own; and
//! what fails. A node that is cut off tells what was true once. As among the nodes themselves, a slot is whose claim has the higher
//! *configuration epoch*: who wins an election or imports a slot takes one that nobody has had. So an older claim counts only where the
//! node that we know is not one of the cluster any more.
//!
//! Nothing is asked while all is well but once in half a minute. What fails makes us *doubt*: for some seconds we ask again and again,
//! with random delays below a doubling ceiling, however many requests fail meanwhile.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use flock_core::wire::error::ErrorCode;
use redis::{AsyncConnectionConfig, Client, ConnectionInfo, RedisError, Value};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};

use crate::address::Address;
use crate::error::{ConnectError, ServerError};
use crate::jitter::{Backoff, Jitter};
use crate::line::Line;
use crate::link;
use crate::mutex::lock;
use crate::slot::{SLOTS, Slot};

/// How often the nodes are asked while all is well.
const ASK_EVERY: Duration = Duration::from_secs(30);
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MOST: Duration = Duration::from_secs(1);
/// How long a doubt lasts unless there are new ones.
const DOUBT: Duration = Duration::from_secs(3);

/// Who serves a slot, by its configuration epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Claim {
    primary: Arc<Address>,
    /// What the cluster calls the primary; unknown if another node has only pointed to it.
    id: Arc<str>,
    epoch: u64,
}

/// Who serves what, as one node tells it or as we know it.
#[derive(Debug)]
struct Known {
    /// By slot.
    claims: Vec<Option<Claim>>,
    /// All nodes that are well, replicas too.
    nodes: Vec<Address>,
    /// The configuration epochs of all nodes, by their ids.
    epochs: HashMap<String, u64>,
}

impl Known {
    fn nothing() -> Self {
        Self { claims: vec![None; usize::from(SLOTS)], nodes: Vec::new(), epochs: HashMap::new() }
    }

    fn claim(&self, slot: Slot) -> Option<&Claim> {
        self.claims.get(usize::from(slot))?.as_ref()
    }

    fn primary(&self, slot: Slot) -> Option<&Arc<Address>> {
        self.claim(slot).map(|claim| &claim.primary)
    }

    /// True if it is another primary than before.
    fn assign(&mut self, slot: Slot, claim: Claim) -> bool {
        let Some(known) = self.claims.get_mut(usize::from(slot)) else { return false };
        let before = known.replace(claim);
        before.map(|before| before.primary) != known.as_ref().map(|claim| Arc::clone(&claim.primary))
    }

    /// Takes what a node tells; true if a slot has another primary than before.
    fn learn(&mut self, word: Known) -> bool {
        let (mut news, mut is_old) = (false, false);
        for (slot, claim) in (0..).zip(word.claims) {
            let Some(claim) = claim else { continue };
            let is_older = |known: &Claim| known.epoch > claim.epoch && word.epochs.contains_key(&*known.id);
            if self.claim(slot).is_some_and(is_older) {
                is_old = true;
            } else {
                news |= self.assign(slot, claim);
            }
        }
        if !is_old {
            self.nodes = word.nodes;
        }
        news
    }
}

pub(crate) struct SlotMap {
    /// Those of the URL: they are never forgotten.
    named: Vec<Address>,
    /// How nodes are connected to, but for the address.
    node: ConnectionInfo,
    connect_timeout: Duration,
    jitter: Jitter,
    known: watch::Sender<Known>,
    doubted: Mutex<Option<Instant>>,
    doubt: Notify,
    turns: AtomicUsize,
}

impl fmt::Debug for SlotMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotMap").field("named", &self.named).finish_non_exhaustive()
    }
}

impl SlotMap {
    pub(crate) fn new(named: Vec<Address>, node: ConnectionInfo, connect_timeout: Duration) -> Self {
        let (seed, _) = uuid::Uuid::new_v4().as_u64_pair();
        Self {
            named,
            node,
            connect_timeout,
            jitter: Jitter::new(seed),
            known: watch::Sender::new(Known::nothing()),
            doubted: Mutex::default(),
            doubt: Notify::new(),
            turns: AtomicUsize::new(0),
        }
    }

    /// The primary of a slot; if nobody is known to be that, somebody who will say so.
    pub(crate) fn primary(&self, slot: Slot) -> Arc<Address> {
        let primary = self.known.borrow().primary(slot).cloned();
        primary.unwrap_or_else(|| {
            self.doubt();
            Arc::new(self.turn().swap_remove(0))
        })
    }

    /// All primaries that have slots, sorted.
    pub(crate) fn primaries(&self) -> Vec<Arc<Address>> {
        let known = self.known.borrow();
        let mut primaries: Vec<_> = known.claims.iter().flatten().map(|claim| Arc::clone(&claim.primary)).collect();
        drop(known);
        primaries.sort_by(|a, b| (&a.host, a.port).cmp(&(&b.host, b.port)));
        primaries.dedup();
        primaries
    }

    /// Ends when the slot is known to be served elsewhere than at `here`.
    pub(crate) async fn moved(&self, slot: Slot, here: &Address) {
        let mut known = self.known.subscribe();
        let elsewhere = |known: &Known| known.primary(slot).is_some_and(|primary| **primary != *here);
        let _ = known.wait_for(elsewhere).await; // the sender is ours
    }

    /// Tells that the map has changed.
    pub(crate) fn changes(&self) -> watch::Receiver<impl Sized + use<>> {
        self.known.subscribe()
    }

    /// Something has failed that would if the map were wrong: the nodes are asked soon.
    pub(crate) fn doubt(&self) {
        let now = Instant::now();
        let before = lock(&self.doubted).replace(now);
        if before.is_none_or(|before| now.duration_since(before) > DOUBT) {
            self.doubt.notify_one();
        }
    }

    /// Takes what an error that a node has answered tells of the map.
    pub(crate) fn learn_from(&self, node: &Address, error: &ServerError) {
        if error.known() == Some(ErrorCode::Moved)
            && let Some((slot, primary)) = redirection(error, |_| node.host.clone())
        {
            // What the nodes say next counts, whichever its epoch.
            let claim = Claim { primary: Arc::new(primary), id: "".into(), epoch: 0 };
            self.known.send_if_modified(|known| known.assign(slot, claim));
        }
        if matches!(error.known(), Some(ErrorCode::Moved | ErrorCode::ReadOnly | ErrorCode::ClusterDown)) {
            self.doubt();
        }
    }

    /// Whom a node names for one request: it has the slot still, and the key no more.
    pub(crate) fn asked_instead(&self, error: &ServerError) -> Option<Address> {
        let is_ask = error.known() == Some(ErrorCode::Ask);
        is_ask.then(|| redirection(error, |slot| self.primary(slot).host.clone()))?.map(|(_, address)| address)
    }

    /// Asks until a node has told; fails when none has by `until`, and at once if they refuse us.
    pub(crate) async fn first_known(&self, until: Instant) -> Result<(), ConnectError> {
        let mut backoff = Backoff::new(RETRY_FIRST, RETRY_MOST);
        loop {
            let Err(trouble) = self.ask_all().await else { return Ok(()) };
            let trouble = Arc::new(trouble);
            if let Some(refusal) = link::refusal(&trouble) {
                return Err(refusal);
            }
            let pause = backoff.next(&self.jitter);
            if Instant::now() + pause >= until {
                return Err(ConnectError::Unavailable(link::Cause::of(trouble)));
            }
            sleep(pause).await;
        }
    }

    /// Keeps the map up to date, for ever; runs on the client's thread.
    pub(crate) async fn keep_known(&self) {
        let mut backoff = Backoff::new(RETRY_FIRST, RETRY_MOST);
        loop {
            let doubted = *lock(&self.doubted);
            if doubted.is_some_and(|doubted| doubted.elapsed() <= DOUBT) {
                sleep(backoff.next(&self.jitter)).await;
            } else {
                backoff.reset();
                tokio::select! {
                    () = self.doubt.notified() => continue,
                    () = sleep(self.jitter.around(ASK_EVERY)) => {}
                }
            }
            if let Err(error) = self.ask_all().await {
                tracing::debug!(%error, "no node tells who serves which slot");
            }
        }
    }

    /// Asks the nodes in turn, until one tells.
    async fn ask_all(&self) -> Result<(), RedisError> {
        let nodes = self.turn();
        let share = self.connect_timeout / u32::try_from(nodes.len()).unwrap_or(u32::MAX).max(1);
        let mut trouble = link::timed_out("no node to ask");
        for node in nodes {
            let asking = timeout(share, self.ask(&node)).await;
            match asking.unwrap_or_else(|_| Err(link::timed_out("no answer in time"))) {
                // It was reset, or is new: no other node would be known after this.
                Ok(word) if word.nodes.is_empty() => trouble = link::timed_out("a node that knows of no slots"),
                Ok(word) => {
                    self.known.send_if_modified(|known| known.learn(word));
                    return Ok(());
                }
                Err(error) => {
                    tracing::debug!(%node, %error, "does not tell who serves which slot");
                    trouble = error;
                }
            }
        }
        Err(trouble)
    }

    async fn ask(&self, node: &Address) -> Result<Known, RedisError> {
        let config = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
        let line = self.open(node, config).await?;
        // One by one: a refusal is then told word for word. The epochs first: should the two not match, they are the lower ones.
        let nodes: String = line.query(redis::cmd("CLUSTER").arg("NODES")).await?;
        let slots: Value = line.query(redis::cmd("CLUSTER").arg("SLOTS")).await?;
        read(&slots, &nodes, node).ok_or_else(|| link::timed_out("an answer that cannot be one"))
    }

    /// To be bounded by the caller.
    pub(crate) async fn open(&self, node: &Address, config: AsyncConnectionConfig) -> Result<Line, RedisError> {
        Line::open(&Client::open(node.put_into(&self.node))?, config).await
    }

    /// All nodes, each time beginning with another. There is at least one: the URL names it.
    fn turn(&self) -> Vec<Address> {
        let mut nodes = self.known.borrow().nodes.clone();
        for named in &self.named {
            if !nodes.contains(named) {
                nodes.push(named.clone());
            }
        }
        let first = self.turns.fetch_add(1, Ordering::Relaxed) % nodes.len().max(1);
        nodes.rotate_left(first);
        nodes
    }
}

/// What `MOVED slot host:port` and `ASK slot host:port` say. Without a host it is that of the node which says so.
fn redirection(error: &ServerError, said_by: impl Fn(Slot) -> String) -> Option<(Slot, Address)> {
    let (slot, address) = error.message().split_once(' ')?;
    let (host, port) = address.rsplit_once(':')?;
    let slot = slot.parse().ok()?;
    let host = match host {
        "" => said_by(slot),
        "?" => return None, // a node that does not know its own name
        host => host.to_owned(),
    };
    Some((slot, Address { host, port: port.parse().ok()? }))
}

/// Reads what CLUSTER SLOTS answers, and the configuration epochs of what CLUSTER NODES does.
fn read(slots: &Value, nodes: &str, told_by: &Address) -> Option<Known> {
    let Value::Array(ranges) = slots else { return None };
    let mut known = Known { epochs: nodes.lines().filter_map(read_epoch).collect(), ..Known::nothing() };
    let mut unclaimed = SLOTS;
    for range in ranges {
        let Value::Array(range) = range else { return None };
        let [Value::Int(first), Value::Int(last), nodes @ ..] = range.as_slice() else { return None };
        let mut nodes = nodes.iter().map(|node| read_node(node, told_by));
        let primary = nodes.next()?;
        for (node, _) in primary.iter().cloned().chain(nodes.flatten()) {
            if !known.nodes.contains(&node) {
                known.nodes.push(node);
            }
        }
        let Some((primary, id)) = primary else { continue }; // it does not know its name yet
        let epoch = known.epochs.get(&id).copied().unwrap_or(0);
        let claim = Claim { primary: Arc::new(primary), id: id.into(), epoch };
        let slots = Slot::try_from(*first).ok()?..=Slot::try_from(*last).ok()?;
        // No slot is named twice: the answer is no longer than there are slots, whoever sends it.
        unclaimed = unclaimed.checked_sub(Slot::try_from(slots.len()).ok()?)?;
        for slot in slots {
            known.assign(slot, claim.clone());
        }
    }
    Some(known)
}

/// A node's id and epoch, of a line like `07c3 127.0.0.1:30004@31004,h master - 0 14262 4 connected 0-5460`.
fn read_epoch(line: &str) -> Option<(String, u64)> {
    let mut words = line.split(' ');
    Some((words.next()?.to_owned(), words.nth(5)?.parse().ok()?))
}

/// A node's address and id.
fn read_node(node: &Value, told_by: &Address) -> Option<(Address, String)> {
    let text = |value: &Value| match value {
        Value::Nil => Some(String::new()),
        Value::BulkString(text) => String::from_utf8(text.clone()).ok(),
        Value::SimpleString(text) => Some(text.clone()),
        _ => None,
    };
    let Value::Array(node) = node else { return None };
    let [host, Value::Int(port), id, ..] = node.as_slice() else { return None };
    let host = Some(text(host)?).filter(|host| !host.is_empty()).unwrap_or_else(|| told_by.host.clone());
    (host != "?").then_some((Address { host, port: u16::try_from(*port).ok()? }, text(id)?))
}

#[cfg(test)]
mod tests {
    use redis::IntoConnectionInfo;

    use super::*;

    fn address(port: u16) -> Address {
        Address { host: "h".into(), port }
    }

    fn map() -> SlotMap {
        let node = "valkey://h:1".into_connection_info().unwrap();
        SlotMap::new(vec![address(1)], node, Duration::from_secs(1))
    }

    const NODES: &str = "id1 a:1@11,h myself,master - 0 0 5 connected 0-1\nid2 b:2@12 slave id1 0 1 4 connected\n\nx\n";

    fn node(host: Value, port: i64) -> Value {
        Value::Array(vec![host, Value::Int(port), bulk(&format!("id{port}")), Value::Array(vec![])])
    }

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    fn range(first: i64, last: i64, nodes: Vec<Value>) -> Value {
        Value::Array([vec![Value::Int(first), Value::Int(last)], nodes].concat())
    }

    #[test]
    fn slots_are_read_as_the_server_writes_them() {
        let told = Value::Array(vec![
            range(0, 1, vec![node(bulk("a"), 1), node(bulk(""), 2)]),
            range(3, 16_383, vec![node(Value::Nil, 3)]),
        ]);
        let known = read(&told, NODES, &address(9)).unwrap();
        assert_eq!([0, 3].map(|slot| known.claim(slot).unwrap().epoch), [5, 0], "of the third nothing is told");
        let primary = |slot| known.primary(slot).map(|primary| primary.to_string());
        assert_eq!([0, 1, 2, 3, 16_383].map(primary).map(Option::unwrap_or_default), ["a:1", "a:1", "", "h:3", "h:3"]);
        assert_eq!(known.nodes.iter().map(Address::to_string).collect::<Vec<_>>(), ["a:1", "h:2", "h:3"]);
        let unknown = Value::Array(vec![range(0, 1, vec![node(bulk("?"), 1)])]);
        assert_eq!(read(&unknown, "", &address(9)).unwrap().primary(0), None);
        let twice = [0, 1].map(|_| range(0, 16_383, vec![node(bulk("a"), 1)]));
        for wrong in [
            Value::Nil,
            Value::Array(vec![Value::Nil]),
            Value::Array(vec![range(-1, 2, vec![])]),
            Value::Array(twice.into()),
        ] {
            assert!(read(&wrong, NODES, &address(9)).is_none());
        }
    }

    #[test]
    fn older_claim_counts_only_if_the_newer_node_has_gone() {
        let word = |port, epoch, others: &[u16]| {
            let mut word = Known::nothing();
            word.assign(5, Claim { primary: Arc::new(address(port)), id: port.to_string().into(), epoch });
            word.epochs = others.iter().map(|port| (port.to_string(), epoch)).collect();
            word
        };
        let mut known = Known::nothing();
        assert!(known.learn(word(1, 3, &[1, 2])));
        assert!(known.learn(word(2, 4, &[1, 2])), "an election was won");
        assert!(!known.learn(word(2, 4, &[1, 2])), "the same again");
        assert!(!known.learn(word(1, 3, &[1, 2])), "a node that has not heard of it");
        assert_eq!(known.primary(5).map(|primary| primary.port), Some(2));
        assert!(known.learn(word(3, 1, &[1, 3])), "another cluster, or one that has begun anew");
        assert!(!known.learn(word(4, 0, &[3, 4])));
    }

    #[test]
    fn redirection_moves_one_slot() {
        let map = map();
        map.learn_from(&address(1), &ServerError::new("MOVED", "5 10.0.0.1:7"));
        map.learn_from(&address(1), &ServerError::new("MOVED", "6 :8"));
        map.learn_from(&address(1), &ServerError::new("MOVED", "7 ::1:9"));
        map.learn_from(&address(1), &ServerError::new("MOVED", "99999 h:9"));
        map.learn_from(&address(1), &ServerError::new("ASK", "8 h:9"));
        let primaries: Vec<_> = [5, 6, 7].map(|slot| map.primary(slot).to_string()).into();
        assert_eq!(primaries, ["10.0.0.1:7", "h:8", "[::1]:9"]);
        assert_eq!(*map.primary(8), address(1), "nobody is known: who is named in the URL");
        assert_eq!(map.primaries().len(), 3);
    }

    #[tokio::test]
    async fn slot_that_has_moved_is_told() {
        let map = map();
        map.learn_from(&address(1), &ServerError::new("MOVED", "5 h:7"));
        assert!(timeout(Duration::from_millis(20), map.moved(5, &address(7))).await.is_err());
        map.moved(5, &address(1)).await;
    }
}
