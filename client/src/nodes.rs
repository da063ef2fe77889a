//! Which server a request goes to: the only one, or the node of a cluster that serves the key's slot.
//!
//! A [`Node`] is a server with our links to it. In a cluster there is one for each primary that is needed, made when it is needed first
//! and given up when no slot is its own any more. Whoever asks for something asks for the key's node each time anew: so every retry,
//! renewal and release follows the slot, and a hold has no server of its own.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use redis::{Cmd, Value};
use tokio::runtime::Handle;
use tokio::sync::{broadcast, watch};
use tokio::task::AbortHandle;

use crate::acknowledgement::Replicas;
use crate::address::Address;
use crate::clock::Clock;
use crate::dialer::Dialer;
use crate::engine::Engine;
use crate::error::ServerError;
use crate::event::Event;
use crate::hold::Hold;
use crate::jitter::Jitter;
use crate::link::{Answer, CallError, Link, LinkConfig, Purpose};
use crate::mutex::lock;
use crate::shard_channel::{Inbox, ShardChannel};
use crate::slot::{Slot, slot_of};
use crate::slot_map::SlotMap;
use crate::turns::Turns;
use crate::wire;

/// The newest connections to a key's node, or subscriptions there: what was told before they were there may not have been heard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Epochs {
    pub(crate) messages: u64,
    pub(crate) commands: u64,
}

/// A server, and our connections to it.
pub(crate) struct Node {
    pub(crate) commands: Arc<Link>,
    pub(crate) messages: Arc<Link>,
    pub(crate) turns: Turns,
    pub(crate) replicas: Replicas,
    /// What keeps the links up, if they end with the node.
    tasks: Vec<AbortHandle>,
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node").finish_non_exhaustive()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// What all nodes of a client are made with.
#[derive(Clone, Debug)]
pub(crate) struct NodeKit {
    pub(crate) config: LinkConfig,
    pub(crate) clock: Clock,
    pub(crate) jitter: Arc<Jitter>,
    pub(crate) events: broadcast::Sender<Event>,
    /// Tells that there is a new connection, or that a key's node is another one.
    pub(crate) anew: watch::Sender<()>,
    /// How many connections were tried, to whichever node: each has a number of its own.
    pub(crate) attempts: Arc<AtomicU64>,
}

impl NodeKit {
    /// Its links are down until somebody keeps them up.
    pub(crate) fn node(&self, dialer: &Dialer, messages: Purpose) -> Node {
        let link = |purpose| Link::new(self, dialer.clone(), purpose);
        Node {
            commands: link(Purpose::Commands),
            messages: link(messages),
            turns: Turns::new(),
            replicas: Replicas::new(dialer.clone(), self.config.connect_timeout, self.config.response_timeout),
            tasks: Vec::new(),
        }
    }
}

#[derive(Debug)]
pub(crate) enum Nodes {
    /// Standalone, or what Sentinel watches over: one primary, wherever it is.
    One {
        node: Arc<Node>,
        channel: Arc<str>,
    },
    Cluster(Arc<Cluster>),
}

impl Nodes {
    pub(crate) fn of(&self, key: &[u8]) -> Arc<Node> {
        match self {
            Self::One { node, .. } => Arc::clone(node),
            Self::Cluster(cluster) => cluster.node_at(&cluster.map.primary(slot_of(key))),
        }
    }

    /// All that serve anything.
    pub(crate) fn all(&self) -> Vec<Arc<Node>> {
        match self {
            Self::One { node, .. } => vec![Arc::clone(node)],
            Self::Cluster(cluster) => cluster.map.primaries().iter().map(|address| cluster.node_at(address)).collect(),
        }
    }

    pub(crate) fn inbox(&self, key: &[u8]) -> Inbox<'_> {
        match self {
            Self::One { node, channel } => Inbox::Client { node, channel },
            Self::Cluster(cluster) => cluster.inbox(slot_of(key)),
        }
    }

    /// The holds of each node.
    pub(crate) fn share_out(&self, holds: Vec<Arc<Hold>>) -> Vec<(Arc<Node>, Vec<Arc<Hold>>)> {
        let mut shares: Vec<(Arc<Node>, Vec<Arc<Hold>>)> = Vec::new();
        for hold in holds {
            let node = self.of(&hold.name.key);
            match shares.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &node)) {
                Some((_, share)) => share.push(hold),
                None => shares.push((node, vec![hold])),
            }
        }
        shares
    }

    /// The epochs that there are now for a key.
    pub(crate) fn epochs(&self, key: &[u8]) -> Epochs {
        match self {
            Self::One { node, .. } => Epochs { messages: node.messages.epoch(), commands: node.commands.epoch() },
            Self::Cluster(cluster) => {
                let commands = self.of(key).commands.epoch();
                Epochs { messages: cluster.subscriptions(slot_of(key)), commands }
            }
        }
    }

    /// Whom a node has named for this one request: it has the key no more, and has the slot still.
    fn asked_instead(&self, error: &ServerError) -> Option<Arc<Node>> {
        match self {
            Self::One { .. } => None,
            Self::Cluster(cluster) => cluster.map.asked_instead(error).map(|address| cluster.node_at(&address)),
        }
    }
}

impl Engine {
    pub(crate) fn node(&self, key: &[u8]) -> Arc<Node> {
        self.nodes.of(key)
    }

    /// Sends a command to the key's node.
    pub(crate) async fn call<T>(
        &self,
        key: &[u8],
        command: &Cmd,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Answer<T>, CallError> {
        let answer = self.node(key).commands.call(command, &read).await;
        self.follow(answer, command, read).await
    }

    /// Where a slot is on its way, the node that it leaves may name another one, for this request only: then that is asked.
    pub(crate) async fn follow<T>(
        &self,
        answer: Result<Answer<T>, CallError>,
        command: &Cmd,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Answer<T>, CallError> {
        let next = match &answer {
            Err(CallError::Server(error)) => self.nodes.asked_instead(error),
            Ok(_) | Err(CallError::NotSent(_) | CallError::Unanswered(_)) => None,
        };
        let Some(next) = next else { return answer };
        let requests = wire::pipeline([redis::cmd("ASKING"), command.clone()]);
        let read = |position, reply: &Value| if position == 0 { Some(None) } else { read(reply).map(Some) };
        let answers = Box::pin(next.commands.call_all(&requests, 2, read)).await?; // boxed, as it is rare
        let unread = || CallError::Unanswered("an answer that cannot be one".into());
        let mut replies = answers.reply.into_iter();
        replies.next().ok_or_else(unread)??; // whose user may not ask so is told, and not sent back to where it came from
        let reply = replies.next().ok_or_else(unread)??.ok_or_else(unread)?;
        Ok(Answer { reply, sent: answers.sent, pulse: answers.pulse })
    }
}

/// Takes a message, in the read loop.
pub(crate) type HearShared = Arc<dyn Fn(&[u8]) + Send + Sync>;

/// The nodes of a cluster that a client has to do with, and its channels there.
pub(crate) struct Cluster {
    pub(crate) map: Arc<SlotMap>,
    pub(crate) kit: NodeKit,
    /// The client's name, which is a part of its channels'.
    client: String,
    runtime: Handle,
    listens: bool,
    hear: HearShared,
    nodes: Mutex<HashMap<Address, Arc<Node>>>,
    pub(crate) channels: Mutex<HashMap<Slot, Arc<ShardChannel>>>,
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster").field("map", &self.map).finish_non_exhaustive()
    }
}

/// Ends what the cluster's nodes and channels do, when this is dropped.
struct End<'a>(&'a Cluster);

impl Drop for End<'_> {
    fn drop(&mut self) {
        lock(&self.0.nodes).clear();
        for channel in lock(&self.0.channels).drain().map(|(_, channel)| channel) {
            channel.stop();
        }
    }
}

impl Cluster {
    pub(crate) fn new(
        map: Arc<SlotMap>,
        kit: NodeKit,
        client: &str,
        runtime: &Handle,
        listens: bool,
        hear: HearShared,
    ) -> Arc<Self> {
        let (client, runtime) = (client.to_owned(), runtime.clone());
        let (nodes, channels) = (Mutex::default(), Mutex::default());
        Arc::new(Self { map, kit, client, runtime, listens, hear, nodes, channels })
    }

    /// Runs on the client's thread, for ever.
    pub(crate) async fn run(self: Arc<Self>) {
        let _end = End(&self);
        let give_up = async {
            let mut changes = self.map.changes();
            while changes.changed().await.is_ok() {
                let primaries = self.map.primaries();
                lock(&self.nodes).retain(|address, _| primaries.iter().any(|primary| **primary == *address));
                self.kit.anew.send_replace(()); // what was held at a node that has gone is held at another one, or not at all
            }
        };
        tokio::join!(self.map.keep_known(), give_up);
    }

    /// The node at this address, with links that are up or will be.
    pub(crate) fn node_at(self: &Arc<Self>, address: &Address) -> Arc<Node> {
        let mut nodes = lock(&self.nodes);
        if let Some(node) = nodes.get(address) {
            return Arc::clone(node);
        }
        let dialer = Dialer::Node(Arc::clone(&self.map), address.clone());
        let hear = Arc::clone(&self.hear);
        let cluster = Arc::downgrade(self);
        let messages = Purpose::Shards {
            hear: Box::new(move |message| hear(message)),
            subscription: Box::new(move |channel, is_on| {
                if let Some(cluster) = cluster.upgrade() {
                    cluster.hear_of_subscription(channel, is_on);
                }
            }),
        };
        let mut node = self.kit.node(&dialer, messages);
        let mut keep_up = |link: &Arc<Link>| {
            node.tasks.push(self.runtime.spawn(Arc::clone(link).keep_up()).abort_handle());
        };
        keep_up(&node.commands);
        if self.listens {
            keep_up(&node.messages);
        }
        let node = Arc::new(node);
        nodes.insert(address.clone(), Arc::clone(&node));
        node
    }

    /// Our channel for a slot: it is subscribed to soon.
    fn inbox(self: &Arc<Self>, slot: Slot) -> Inbox<'static> {
        let mut channels = lock(&self.channels);
        let channel = channels.entry(slot).or_insert_with(|| {
            let channel = Arc::new(ShardChannel::new(slot, &self.client));
            if self.listens {
                let task = self.runtime.spawn(Arc::clone(&channel).keep_up(Arc::clone(self)));
                channel.is_kept_up_by(task.abort_handle());
            }
            channel
        });
        channel.inbox()
    }

    /// How often our channel for a slot has been subscribed to.
    fn subscriptions(&self, slot: Slot) -> u64 {
        lock(&self.channels).get(&slot).map_or(0, |channel| channel.epoch())
    }

    /// A node says that a channel is subscribed to, or that it is not any more.
    fn hear_of_subscription(&self, channel: &[u8], is_on: bool) {
        if let Some(channel) = lock(&self.channels).get(&slot_of(channel)) {
            if is_on {
                channel.confirm();
                self.kit.anew.send_replace(());
            } else {
                channel.end();
            }
        }
    }
}
