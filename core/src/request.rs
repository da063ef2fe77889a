//! What a client asks for, after parsing: values that cannot be wrong any more.

use crate::lock::Mode;
use crate::time::Millis;
use crate::token::Token;
use core::num::NonZeroU32;

/// `FLOCK.ACQUIRE`. The owner names this acquisition, not the machine: two requests with one owner are the same request, retried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acquire<'a> {
    /// The key.
    pub key: &'a [u8],
    /// Who asks.
    pub owner: &'a [u8],
    /// How long the grant lasts.
    pub lease: Millis,
    /// Exclusive, or shared with other shared holders.
    pub mode: Mode,
    /// With shared: grant only while fewer than this many hold the lock.
    pub limit: Option<NonZeroU32>,
    /// What to do if the lock cannot be granted now.
    pub wait: Wait,
    /// Where the server speaks to this owner.
    pub channel: Option<&'a [u8]>,
    /// Refuse if this owner already holds the lock.
    pub new: bool,
    /// The re-entrant id to add to the hold.
    pub id: Option<&'a [u8]>,
    /// Change the mode of the hold with this token.
    pub convert: Option<Token>,
    /// First raise the counter to this.
    pub floor: Option<u64>,
    /// The grant lasts only this long until a RENEW with its token confirms it.
    pub claim: Option<Millis>,
    /// When the connection closes, the lease is cut to this.
    pub session: Option<Millis>,
    /// Shown in FLOCK.INFO.
    pub label: Option<&'a [u8]>,
}

impl<'a> Acquire<'a> {
    /// A plain exclusive try: no option given.
    #[must_use]
    pub fn new(key: &'a [u8], owner: &'a [u8], lease: Millis) -> Self {
        Self {
            key,
            owner,
            lease,
            mode: Mode::Exclusive,
            limit: None,
            wait: Wait::No,
            channel: None,
            new: false,
            id: None,
            convert: None,
            floor: None,
            claim: None,
            session: None,
            label: None,
        }
    }
}

/// What to do if the lock cannot be granted now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Answer nil.
    No,
    /// Hold the connection until granted, or for at most this long (`None`: no limit).
    Block(Option<Millis>),
    /// Queue for at most this long and answer at once; the grant is published on the channel.
    Queue(Millis),
}

/// `FLOCK.RELEASE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Release<'a> {
    /// The key.
    pub key: &'a [u8],
    /// Whose hold, or whose queued request.
    pub owner: &'a [u8],
    /// Only the hold with this token.
    pub token: Option<Token>,
    /// How much of a re-entered hold.
    pub scope: ReleaseScope<'a>,
}

/// How much of a re-entered hold a RELEASE gives back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseScope<'a> {
    /// The hold, which must not have ids.
    Plain,
    /// This id of the hold; the hold ends with its last id.
    Id(&'a [u8]),
    /// The hold with all its ids.
    All,
}

/// `FLOCK.RENEW`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Renew<'a> {
    /// The key.
    pub key: &'a [u8],
    /// The holder.
    pub owner: &'a [u8],
    /// The lease from now; it replaces what was left.
    pub lease: Millis,
    /// Only the hold with this token; also confirms a claim.
    pub token: Option<Token>,
}

/// `FLOCK.REVOKE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Revoke<'a> {
    /// The key.
    pub key: &'a [u8],
    /// Only this owner's hold.
    pub owner: Option<&'a [u8]>,
}

/// Bounds on what a request may ask for. The shell fills them from its configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest lease, claim and session grace.
    pub lease_max: Millis,
    /// Longest wait (BLOCK 0 is no limit and stays allowed).
    pub wait_max: Millis,
    /// Longest owner and id, in bytes.
    pub owner_max_bytes: usize,
    /// Longest label, in bytes.
    pub label_max_bytes: usize,
    /// Longest channel name, in bytes.
    pub channel_max_bytes: usize,
    /// Most ids of one re-entered hold.
    pub ids_max: usize,
    /// Most waiters on this server.
    pub waiters_max: usize,
    /// Whether FLOOR is allowed.
    pub floor_enabled: bool,
}

impl Limits {
    /// The defaults of DESIGN: 24 h, 256 bytes, 64 ids, 100,000 waiters.
    pub const DEFAULT: Self = Self {
        lease_max: Millis(86_400_000),
        wait_max: Millis(86_400_000),
        owner_max_bytes: 256,
        label_max_bytes: 256,
        channel_max_bytes: 512,
        ids_max: 64,
        waiters_max: 100_000,
        floor_enabled: true,
    };
}

impl Default for Limits {
    fn default() -> Self {
        Self::DEFAULT
    }
}
