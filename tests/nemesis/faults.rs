//! The kinds of faults, and the record of those that were injected.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use flock_tests::history::{Call, OpId, Verb, now_ns};

use crate::site::LOCKS;
use crate::worker::{PROCESSES_PER_NODE, Work};

/// What is done to the servers, the network, the keys and the connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    // Processes and roles: one at a time, by the operator.
    KillPrimaryFsyncAlways,
    KillPrimaryFsyncEverysec,
    KillPrimaryFsyncNo,
    KillReplica,
    StopPrimary,
    StopReplica,
    Failover,
    PromoteBesideOldPrimary,
    PromoteAcrossCut,
    KillPrimaryAndPromote,
    ClockStep,
    DebugReload,
    DebugLoadAof,
    // Real packets, between the primary and the clients of a gate, a replica, or all of them.
    NetworkCutClients,
    NetworkLoseRequests,
    NetworkLoseReplies,
    NetworkCutReplica,
    NetworkLoseStream,
    NetworkLoseAcknowledgements,
    NetworkCutPrimary,
    NetworkLoseSome,
    // Connections, at one of the gates.
    Cut,
    Reset,
    HalfOpen,
    Delay,
    DropReplies,
    DropRequests,
    HoldReplies,
    Trickle,
    CutWithinReply,
    // The server, for a moment.
    PauseWrites,
    PauseAll,
    DebugSleep,
    BusyScript,
    Bgsave,
    BgrewriteAof,
    Evict,
    ConfigSet,
    // Connections.
    KillNormal,
    KillPubsub,
    KillReplicaLinks,
    KillOne,
    UnblockTimeout,
    UnblockError,
    // Locks.
    Flushall,
    Del,
    Unlink,
    Rename,
    Overwrite,
    Expire,
    Revoke,
}

impl Kind {
    /// As the report shows it: `KillReplica` as "kill replica".
    pub(crate) fn words(self) -> String {
        let mut words = String::new();
        for letter in format!("{self:?}").chars() {
            if letter.is_uppercase() && !words.is_empty() {
                words.push(' ');
            }
            words.push(letter.to_ascii_lowercase());
        }
        words
    }

    pub(crate) fn group(self) -> Group {
        match self {
            Kind::KillPrimaryFsyncAlways
            | Kind::KillPrimaryFsyncEverysec
            | Kind::KillPrimaryFsyncNo
            | Kind::KillReplica
            | Kind::StopPrimary
            | Kind::StopReplica
            | Kind::Failover
            | Kind::PromoteBesideOldPrimary
            | Kind::PromoteAcrossCut
            | Kind::KillPrimaryAndPromote
            | Kind::DebugReload
            | Kind::DebugLoadAof => Group::Servers,
            Kind::ClockStep => Group::Clock,
            Kind::NetworkCutClients
            | Kind::NetworkLoseRequests
            | Kind::NetworkLoseReplies
            | Kind::NetworkCutReplica
            | Kind::NetworkLoseStream
            | Kind::NetworkLoseAcknowledgements
            | Kind::NetworkCutPrimary
            | Kind::NetworkLoseSome => Group::Network,
            Kind::Cut
            | Kind::Reset
            | Kind::HalfOpen
            | Kind::Delay
            | Kind::DropReplies
            | Kind::DropRequests
            | Kind::HoldReplies
            | Kind::Trickle
            | Kind::CutWithinReply => Group::Proxies,
            Kind::PauseWrites
            | Kind::PauseAll
            | Kind::DebugSleep
            | Kind::BusyScript
            | Kind::Bgsave
            | Kind::BgrewriteAof
            | Kind::Evict
            | Kind::ConfigSet => Group::Moments,
            Kind::KillNormal
            | Kind::KillPubsub
            | Kind::KillReplicaLinks
            | Kind::KillOne
            | Kind::UnblockTimeout
            | Kind::UnblockError => Group::Connections,
            Kind::Flushall
            | Kind::Del
            | Kind::Unlink
            | Kind::Rename
            | Kind::Overwrite
            | Kind::Expire
            | Kind::Revoke => Group::Locks,
        }
    }
}

/// Kinds that have something in common, as the plots show them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Group {
    Servers,
    Clock,
    Network,
    Proxies,
    Moments,
    Connections,
    Locks,
}

impl Group {
    pub(crate) const ALL: [Group; 7] = [
        Group::Servers,
        Group::Clock,
        Group::Network,
        Group::Proxies,
        Group::Moments,
        Group::Connections,
        Group::Locks,
    ];

    pub(crate) fn words(self) -> &'static str {
        match self {
            Group::Servers => "servers killed, stopped, promoted, loaded anew",
            Group::Clock => "steps of the clock",
            Group::Network => "packets of the real network lost",
            Group::Proxies => "proxies cut, delay, drop",
            Group::Moments => "server paused, busy, evicting or saving",
            Group::Connections => "connections killed, waits unblocked",
            Group::Locks => "locks deleted, overwritten, revoked",
        }
    }
}

/// A time in which an old primary goes on beside its successor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Split {
    /// The number of the old primary.
    pub(crate) node: usize,
    pub(crate) from_ns: u64,
    pub(crate) until_ns: u64,
}

/// A fault after which clients have no primary for a while.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outage {
    pub(crate) kind: Kind,
    pub(crate) from_ns: u64,
    /// The primary afterwards.
    pub(crate) node: usize,
}

/// What was injected, and when.
#[derive(Debug, Default)]
pub(crate) struct Log(Mutex<Entries>);

#[derive(Clone, Debug, Default)]
pub(crate) struct Entries {
    /// Begin, end, kind and server of each fault.
    pub(crate) faults: Vec<(u64, u64, Kind, usize)>,
    pub(crate) splits: Vec<Split>,
    pub(crate) outages: Vec<Outage>,
}

impl Entries {
    /// How many of each kind.
    pub(crate) fn by_kind(&self) -> BTreeMap<Kind, usize> {
        let mut counts = BTreeMap::new();
        for (_, _, kind, _) in &self.faults {
            *counts.entry(*kind).or_default() += 1;
        }
        counts
    }
}

impl Log {
    /// A fault that has begun at `from_ns` is over.
    pub(crate) fn injected(&self, kind: Kind, node: usize, from_ns: u64) {
        self.entries().faults.push((from_ns, now_ns(), kind, node));
    }

    pub(crate) fn split(&self, split: Split) {
        self.entries().splits.push(split);
    }

    pub(crate) fn outage(&self, outage: Outage) {
        self.entries().outages.push(outage);
    }

    pub(crate) fn all(&self) -> Entries {
        self.entries().clone()
    }

    fn entries(&self) -> std::sync::MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What those who inject faults are called in a history.
const NEMESIS: u32 = PROCESSES_PER_NODE * 9;

/// A time in which holds may be lost, written to the history as a revocation: of a hold that was asked for before the end of this time,
/// nothing is known from its beginning on. All other holds are judged.
#[derive(Debug)]
pub(crate) struct Loss<'a> {
    work: &'a Work,
    ops: Vec<OpId>,
}

impl<'a> Loss<'a> {
    /// Of the locks with these names, from now on.
    pub(crate) fn of(work: &'a Work, names: &[&str]) -> Loss<'a> {
        let ops = names.iter().map(|name| work.recorder.invoke(NEMESIS, Call::new(Verb::Revoke, name, ""))).collect();
        Loss { work, ops }
    }

    /// Of every lock.
    pub(crate) fn of_all(work: &'a Work) -> Loss<'a> {
        Loss::of(work, &LOCKS.map(|lock| lock.name))
    }
}

impl Drop for Loss<'_> {
    fn drop(&mut self) {
        for op in &self.ops {
            self.work.recorder.ok(*op, None);
        }
    }
}
