//! Where the server speaks to an acquisition and its hold.
//!
//! One server: on the client's one channel. In a cluster a message stays within the shard of its slot, so there the client has a channel
//! for each slot in which it waits or holds, subscribed to at the node that serves the slot.
//!
//! Such a subscription is one task. It follows the slot: when the node ends the subscription (the slot has gone), when its connection is
//! gone, or when another node is known to serve the slot, it subscribes there. What was published in between is lost; so each new
//! subscription counts as a new *epoch*, at which who waits asks again.
//!
//! Nobody waits for a subscription to begin with: a request that is queued before it is there asks again once it is.

use std::future::Future;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

use crate::mutex::lock;
use crate::nodes::{Cluster, Node};
use crate::retry::pauses;
use crate::slot::{Slot, tag_of};
use crate::tally::{Counted, Tally};

/// A subscription that nobody uses is ended after about this.
const IDLE: Duration = Duration::from_secs(30);

/// The channel on which the server answers one acquisition, and tells the loss of its hold. Dropped, it may end.
#[derive(Debug)]
pub(crate) enum Inbox<'a> {
    /// The client's own.
    Client {
        node: &'a Node,
        channel: &'a str,
    },
    Shard {
        channel: Arc<ShardChannel>,
        used: Counted,
    },
}

impl Inbox<'_> {
    pub(crate) fn channel(&self) -> &[u8] {
        match self {
            Self::Client { channel, .. } => channel.as_bytes(),
            Self::Shard { channel, .. } => channel.name.as_bytes(),
        }
    }

    /// Keeps the channel for somebody else too.
    pub(crate) fn used(&self) -> Option<Counted> {
        match self {
            Self::Client { .. } => None, // it is there as long as the client
            Self::Shard { used, .. } => Some(used.clone()),
        }
    }

    /// Ends when there is a subscription with a higher epoch.
    pub(crate) async fn newer_than(&self, epoch: u64) {
        match self {
            Self::Client { node, .. } => node.messages.other_than(epoch).await,
            Self::Shard { channel, .. } => above(&channel.confirmed, epoch).await,
        }
    }
}

/// A client's channel for one slot.
#[derive(Debug)]
pub(crate) struct ShardChannel {
    slot: Slot,
    name: String,
    /// How often the server has said that it is subscribed.
    confirmed: watch::Sender<u64>,
    /// How often a node has ended the subscription.
    ended: watch::Sender<u64>,
    task: OnceLock<AbortHandle>,
    users: Tally,
}

impl ShardChannel {
    pub(crate) fn new(slot: Slot, client: &str) -> Self {
        let name = format!("flock:{{{}}}:{client}", tag_of(slot));
        Self {
            slot,
            name,
            confirmed: watch::Sender::new(0),
            ended: watch::Sender::new(0),
            task: OnceLock::new(),
            users: Tally::default(),
        }
    }

    /// Uses it. To be called under the lock of the list: what is not used may be taken from there.
    pub(crate) fn inbox(self: &Arc<Self>) -> Inbox<'static> {
        Inbox::Shard { channel: Arc::clone(self), used: self.users.add() }
    }

    pub(crate) fn is_kept_up_by(&self, task: AbortHandle) {
        let _ = self.task.set(task); // there is one, from the beginning
    }

    /// Keeps it up no more.
    pub(crate) fn stop(&self) {
        if let Some(task) = self.task.get() {
            task.abort();
        }
    }

    /// Rises with each new subscription.
    pub(crate) fn epoch(&self) -> u64 {
        *self.confirmed.borrow()
    }

    pub(crate) fn confirm(&self) {
        self.confirmed.send_modify(|count| *count += 1);
    }

    pub(crate) fn end(&self) {
        self.ended.send_modify(|count| *count += 1);
    }

    /// Keeps it subscribed where its slot is served, as long as somebody uses it.
    pub(crate) async fn keep_up(self: Arc<Self>, cluster: Arc<Cluster>) {
        let mut backoff = pauses();
        loop {
            let address = cluster.map.primary(self.slot);
            let node = cluster.node_at(&address);
            let ended = *self.ended.borrow();
            tokio::select! {
                link = self.subscribe(&cluster, &node) => if let Some(link) = link {
                    backoff.reset();
                    tokio::select! {
                        () = above(&self.ended, ended) => {}
                        () = node.messages.other_than(link) => {}
                        () = cluster.map.moved(self.slot, &address) => {}
                        () = self.unused(&cluster) => return self.leave(&node).await,
                    }
                },
                () = cluster.map.moved(self.slot, &address) => {}
                () = self.unused(&cluster) => return,
            }
            sleep(backoff.next(&cluster.kit.jitter)).await;
        }
    }

    /// Subscribes; the epoch of the connection it is on, if the node says that it is.
    async fn subscribe(&self, cluster: &Cluster, node: &Node) -> Option<u64> {
        let before = *self.confirmed.borrow();
        let mut command = redis::cmd("SSUBSCRIBE");
        command.arg(&self.name);
        let up = node.messages.up().await.ok()?;
        let link = up.epoch();
        // What comes as the reply may be the word of another subscription that has ended: only the push counts.
        if let Err(error) = node.messages.call_over(&up, &command, |_| Some(())).await {
            tracing::debug!(channel = self.name, ?error, "not subscribed");
            return None;
        }
        let patience = cluster.kit.config.response_timeout;
        timeout(patience, above(&self.confirmed, before)).await.ok().map(|()| link)
    }

    async fn leave(&self, node: &Node) {
        let mut command = redis::cmd("SUNSUBSCRIBE");
        command.arg(&self.name);
        let _ = node.messages.call(&command, |_| Some(())).await;
    }

    /// Ends when nobody has used it for a while; it is forgotten then.
    async fn unused(&self, cluster: &Cluster) {
        let mut idle = false;
        loop {
            sleep(cluster.kit.jitter.around(IDLE / 2)).await;
            let mut channels = lock(&cluster.channels);
            let is_idle = self.users.count() == 0;
            if idle && is_idle {
                channels.remove(&self.slot);
                return;
            }
            idle = is_idle;
        }
    }
}

/// Ends when the number is higher than that.
fn above(number: &watch::Sender<u64>, than: u64) -> impl Future<Output = ()> + Send + use<> {
    let mut number = number.subscribe();
    async move {
        let _ = number.wait_for(|number| *number > than).await; // whoever waits has the sender
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slot::slot_of;

    #[test]
    fn channel_is_in_its_slot_and_in_the_clients_name() {
        for slot in [0, 1, 16_383] {
            let channel = ShardChannel::new(slot, "me");
            assert_eq!(slot_of(channel.name.as_bytes()), slot);
            assert!(channel.name.starts_with("flock:") && channel.name.ends_with(":me"), "{}", channel.name);
        }
    }
}
