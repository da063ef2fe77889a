//! What an administrator asks: which locks there are, who holds and waits, how the server is doing; and the end of a hold.
//!
//! The replies are read in both of their forms: a RESP3 map, and the flat array that RESP2 makes of it. Fields that are not known here
//! are left alone: a later server may say more.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use flock_core::wire::command::{Info, List};
use flock_core::{Mode, Revoke, Token};
use redis::{Cmd, Value};

use crate::client::Flock;
use crate::engine::Engine;
use crate::error::{ServerError, Source};
use crate::link::CallError;
use crate::nodes::Node;
use crate::retry::Tries;
use crate::text::Text;
use crate::wire;

/// Why an administrative call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdminError {
    /// The server gave no answer within the operation timeout. Nothing was changed.
    #[error("the server cannot be reached")]
    Unavailable(#[source] Source),
    /// A revocation was sent and no answer came: it may have happened, or not.
    #[error("no answer from the server: it may have happened")]
    Unknown(#[source] Source),
    /// The server refused the request: no permission, no such command, a key of another type.
    #[error("the server refused the request")]
    Server(#[source] ServerError),
    /// The server carried out the request, and answered what this version of the crate cannot read.
    #[error("the server's answer cannot be read")]
    Unreadable,
    /// The client is shut down.
    #[error("the client is shut down")]
    ShutDown,
}

impl From<CallError> for AdminError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Server(error) => Self::Server(error), // nothing was done
            CallError::NotSent(source) | CallError::Unanswered(source) => Self::Unavailable(source),
        }
    }
}

impl AdminError {
    /// Whether trying again later makes sense. After [`AdminError::Unknown`] look first: a second revocation would end the hold of the
    /// next one in the queue.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Unavailable(_) => true,
            Self::Unknown(_) | Self::Unreadable | Self::ShutDown => false,
            Self::Server(error) => error.is_retryable(),
        }
    }
}

/// One lock: who holds it and who waits, at the moment the server answered.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockInfo {
    /// How it is held; none if it is not, and somebody waits for the end of a promotion's grace.
    pub mode: Option<Mode>,
    /// How many hold it.
    pub holder_count: u64,
    /// How many wait for it. A replica knows of none.
    pub waiter_count: u64,
    /// For how long no new grants are made, after a promotion.
    pub grace_left: Duration,
    /// The holders, the earliest first; at most 10,000.
    pub holders: Vec<Holder>,
    /// The first of the waiters, the next first.
    pub waiters: Vec<Waiter>,
}

/// One holder of a lock.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// Who: the name of one acquisition.
    pub owner: Vec<u8>,
    /// The fencing token.
    pub token: Token,
    /// Whether it is a hold, a claim, or over.
    pub state: HolderState,
    /// The lease as last asked for.
    pub lease: Duration,
    /// What is left of the grant.
    pub remaining: Duration,
    /// How long it has been held.
    pub held_for: Duration,
    /// What the holder says of itself; may be empty.
    pub label: Vec<u8>,
    /// The ids of a re-entered hold; empty for a plain one.
    pub ids: Vec<Vec<u8>>,
}

impl fmt::Debug for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { owner, token, state, lease, remaining, held_for, label, ids } = self;
        f.debug_struct("Holder")
            .field("owner", &Text(owner))
            .field("token", token)
            .field("state", state)
            .field("lease", lease)
            .field("remaining", remaining)
            .field("held_for", held_for)
            .field("label", &Text(label))
            .field("ids", &ids.iter().map(|id| Text(id)).collect::<Vec<_>>())
            .finish()
    }
}

/// How far a hold has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HolderState {
    /// Confirmed and running.
    Held,
    /// Granted, and not confirmed yet by its holder.
    Claimed,
    /// Past its deadline and not ended yet: in a pause, while the server refuses writes, or on a replica.
    Expired,
    /// Something that only a later server knows.
    Unknown,
}

/// One who waits for a lock.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiter {
    /// Who.
    pub owner: Vec<u8>,
    /// How it is to be held.
    pub mode: Mode,
    /// Its place: 1 for the next.
    pub position: u64,
    /// For how long it has waited.
    pub waiting_for: Duration,
    /// What the waiter says of itself; may be empty.
    pub label: Vec<u8>,
}

impl fmt::Debug for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { owner, mode, position, waiting_for, label } = self;
        f.debug_struct("Waiter")
            .field("owner", &Text(owner))
            .field("mode", mode)
            .field("position", position)
            .field("waiting_for", waiting_for)
            .field("label", &Text(label))
            .finish()
    }
}

/// One line of the list of held locks. Owner, token and lease are those of the earliest holder.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeldLock {
    /// The lock's name.
    pub key: Vec<u8>,
    /// How it is held.
    pub mode: Mode,
    /// How many hold it.
    pub holder_count: u64,
    /// How many wait for it.
    pub waiter_count: u64,
    /// The earliest holder.
    pub owner: Vec<u8>,
    /// Its fencing token.
    pub token: Token,
    /// What is left of its lease.
    pub remaining: Duration,
}

impl fmt::Debug for HeldLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, mode, holder_count, waiter_count, owner, token, remaining } = self;
        f.debug_struct("HeldLock")
            .field("key", &Text(key))
            .field("mode", mode)
            .field("holder_count", holder_count)
            .field("waiter_count", waiter_count)
            .field("owner", &Text(owner))
            .field("token", token)
            .field("remaining", remaining)
            .finish()
    }
}

/// The numbers of `INFO flock`, by name. Counters count from the start of the server. Of a cluster, they are those of all primaries
/// together: counts are added up; of tokens, of delays and of yes or no the highest is shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    fields: BTreeMap<String, String>,
}

/// What is not added up.
const HIGHEST: [&str; 6] = [
    "flock_counter",
    "flock_mark",
    "flock_lead_over_clock",
    "flock_lateness_last_us",
    "flock_lateness_max_us",
    "flock_evictable",
];

impl Stats {
    /// A field as it came, as `flock_wait_ms` with its `lt_8=3`; none if the server has no such field.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.fields.get(name).map(String::as_str)
    }

    /// A field that is a whole number.
    #[must_use]
    pub fn number(&self, name: &str) -> Option<i64> {
        self.get(name)?.parse().ok()
    }

    /// Those of another server, too.
    fn add(&mut self, other: Self) {
        for (name, theirs) in other.fields {
            let together = self.get(&name).map(|ours| combined(&name, ours, &theirs));
            self.fields.insert(name, together.unwrap_or(theirs));
        }
    }

    /// All fields, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.fields.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }
}

/// A number, or a list as `lt_1=2,lt_8=3`, of two servers.
fn combined(name: &str, ours: &str, theirs: &str) -> String {
    if let (Ok(ours), Ok(theirs)) = (ours.parse::<i64>(), theirs.parse::<i64>()) {
        let both = if HIGHEST.contains(&name) { ours.max(theirs) } else { ours.saturating_add(theirs) };
        return both.to_string();
    }
    let entries = |list| str::split(list, ',').filter_map(|entry| entry.split_once('='));
    let mut both: Vec<(&str, i64)> = Vec::new();
    for (entry, count) in entries(ours).chain(entries(theirs)) {
        let count = count.parse().unwrap_or(0);
        match both.iter_mut().find(|(known, _)| *known == entry) {
            Some((_, sum)) => *sum += count,
            None => both.push((entry, count)),
        }
    }
    both.iter().map(|(entry, count)| format!("{entry}={count}")).collect::<Vec<_>>().join(",")
}

/// The held locks of the server, page by page; see [`Flock::list`].
#[derive(Clone, Debug)]
#[must_use = "nothing happens until a page is asked for"]
pub struct Locks {
    flock: Flock,
    pattern: Box<[u8]>,
    owner: Option<Box<[u8]>>,
    page_size: u32,
    cursor: u32,
    /// The servers that have more, the next one last; none before the first page.
    servers: Option<Vec<Arc<Node>>>,
}

impl Locks {
    /// Only locks that this owner holds.
    pub fn owner(mut self, owner: impl AsRef<[u8]>) -> Self {
        self.owner = Some(owner.as_ref().into());
        self
    }

    /// At most so many locks a page, 1 to 10,000; 100 unless said.
    pub fn page_size(mut self, locks: u32) -> Self {
        self.page_size = locks;
        self
    }

    /// The next page; none at the end. A page may be short or empty before the end. A lock that is held all the while is shown
    /// exactly once.
    ///
    /// # Errors
    /// As [`Flock::info`]. The same page is asked for the next time.
    ///
    /// # Cancel safety
    /// Dropping the future loses no page.
    pub async fn next_page(&mut self) -> Result<Option<Vec<HeldLock>>, AdminError> {
        let servers = self.servers.get_or_insert_with(|| self.flock.engine().nodes.all());
        let Some(server) = servers.last() else { return Ok(None) };
        let pattern = Some(&*self.pattern).filter(|pattern| *pattern != b"*");
        let request = List { cursor: self.cursor, count: self.page_size, pattern, owner: self.owner.as_deref() };
        let asked = Asked::Server(Arc::clone(server));
        let (next, page) = self.flock.look(asked, wire::command(&request), read_page).await?;
        self.cursor = next;
        if next == 0 {
            servers.pop();
        }
        Ok(Some(page))
    }

    /// All that is left, in one list.
    ///
    /// # Errors
    /// As [`Locks::next_page`]; what was read is dropped.
    ///
    /// # Cancel safety
    /// Dropping the future drops what was read.
    pub async fn all(mut self) -> Result<Vec<HeldLock>, AdminError> {
        let mut locks = Vec::new();
        while let Some(page) = self.next_page().await? {
            locks.extend(page);
        }
        Ok(locks)
    }
}

impl Flock {
    /// Who holds a lock and who waits for it; none if nobody does either. Shows up to `waiters_max` waiters (at most 10,000); the
    /// counts are always whole.
    ///
    /// # Errors
    /// [`AdminError::Unavailable`] if there was no answer within the operation timeout, with its retries; [`AdminError::Server`] if the
    /// server refused; [`AdminError::Unreadable`] if this crate is too old for the answer; [`AdminError::ShutDown`] after
    /// [`Flock::shutdown`].
    ///
    /// # Cancel safety
    /// Dropping the future has no effect: nothing is changed.
    pub async fn info(&self, key: impl AsRef<[u8]>, waiters_max: u32) -> Result<Option<LockInfo>, AdminError> {
        let request = Info { key: key.as_ref(), limit: waiters_max };
        self.look(Asked::ServerOf(request.key.into()), wire::command(&request), read_info).await
    }

    /// The held locks whose keys match a glob, as `order:*`; `*` is all. Only the database of the URL, and only keys that this user may
    /// read. Nothing is asked until a page is. Of a cluster, those of one primary after the other: a lock whose slot moves meanwhile may be
    /// shown twice, or not.
    ///
    /// ```no_run
    /// # async fn example(flock: flock_client::Flock) -> Result<(), flock_client::AdminError> {
    /// let mut locks = flock.list("order:*");
    /// while let Some(page) = locks.next_page().await? {
    ///     for lock in page {
    ///         println!("{} since token {}", lock.key.escape_ascii(), lock.token);
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn list(&self, pattern: impl AsRef<[u8]>) -> Locks {
        let page_size = List::default().count;
        Locks {
            flock: self.clone(),
            pattern: pattern.as_ref().into(),
            owner: None,
            page_size,
            cursor: 0,
            servers: None,
        }
    }

    /// Ends all holds of a lock, tells their owners, and grants the next in the queue. Returns how many were ended. Waiting requests stay.
    ///
    /// It is sent once: a second one could end the hold of the next.
    ///
    /// # Errors
    /// [`AdminError::Unavailable`] if it was not sent within the operation timeout, [`AdminError::Unknown`] if it was and no answer came,
    /// [`AdminError::Server`] if the server refused: the user needs permission for `FLOCK.REVOKE`. The others as [`Flock::info`].
    ///
    /// # Cancel safety
    /// Dropping the future leaves the holds ended or not.
    pub async fn revoke(&self, key: impl AsRef<[u8]>) -> Result<u64, AdminError> {
        let request = Revoke { key: key.as_ref(), owner: None };
        self.call(Asked::ServerOf(request.key.into()), wire::command(&request), number, false).await
    }

    /// The same for one owner's hold only: 1 if it was ended, 0 if this owner has none.
    ///
    /// # Errors
    /// As [`Flock::revoke`].
    ///
    /// # Cancel safety
    /// Dropping the future leaves the hold ended or not.
    pub async fn revoke_owner(&self, key: impl AsRef<[u8]>, owner: impl AsRef<[u8]>) -> Result<u64, AdminError> {
        let request = Revoke { key: key.as_ref(), owner: Some(owner.as_ref()) };
        self.call(Asked::ServerOf(request.key.into()), wire::command(&request), number, false).await
    }

    /// The server's numbers about locks: `INFO flock`. Their meaning is in the operations guide.
    ///
    /// # Errors
    /// As [`Flock::info`].
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub async fn stats(&self) -> Result<Stats, AdminError> {
        let mut command = redis::cmd("INFO");
        command.arg("flock");
        let mut stats = Stats::default();
        for server in self.engine().nodes.all() {
            stats.add(self.look(Asked::Server(server), command.clone(), read_stats).await?);
        }
        Ok(stats)
    }

    /// One round trip that asks nothing: whether the server is there, and how far away. In a cluster, one to each primary.
    ///
    /// # Errors
    /// As [`Flock::info`].
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub async fn ping(&self) -> Result<(), AdminError> {
        for server in self.engine().nodes.all() {
            self.look(Asked::Server(server), redis::cmd("PING"), |reply| text(reply).map(drop)).await?;
        }
        Ok(())
    }

    /// Asks what changes nothing: again and again, until the operation timeout.
    async fn look<T: Send + 'static>(
        &self,
        asked: Asked,
        command: Cmd,
        read: fn(&Value) -> Option<T>,
    ) -> Result<T, AdminError> {
        self.call(asked, command, read, true).await
    }

    async fn call<T: Send + 'static>(
        &self,
        asked: Asked,
        command: Cmd,
        read: fn(&Value) -> Option<T>,
        repeatable: bool,
    ) -> Result<T, AdminError> {
        let engine = self.engine();
        engine
            .thread
            .ask(call(Arc::clone(engine), asked, command, read, repeatable))
            .await
            .map_err(|_| AdminError::ShutDown)?
    }
}

/// Who is asked.
#[derive(Clone, Debug)]
enum Asked {
    /// Whoever has this key, at the time.
    ServerOf(Box<[u8]>),
    Server(Arc<Node>),
}

async fn call<T>(
    engine: Arc<Engine>,
    asked: Asked,
    command: Cmd,
    read: fn(&Value) -> Option<T>,
    repeatable: bool,
) -> Result<T, AdminError> {
    let mut tries = Tries::within(engine.operation_timeout);
    loop {
        // What cannot be read says nothing about the connection: a later server may answer what we do not know.
        let answer = match &asked {
            Asked::ServerOf(key) => engine.call(key, &command, |reply| Some(read(reply))).await,
            Asked::Server(node) => node.commands.call(&command, |reply| Some(read(reply))).await,
        };
        let error = match answer {
            Ok(answer) => return answer.reply.ok_or(AdminError::Unreadable),
            Err(CallError::Unanswered(source)) if !repeatable => return Err(AdminError::Unknown(source)),
            Err(error) => error,
        };
        tries.next(&engine.jitter, error).await?;
        if *engine.closing.borrow() {
            return Err(AdminError::ShutDown);
        }
    }
}

fn read_info(reply: &Value) -> Option<Option<LockInfo>> {
    if *reply == Value::Nil {
        return Some(None);
    }
    Some(Some(LockInfo {
        mode: match bytes(field(reply, "mode")?)? {
            b"free" => None,
            word => Some(mode(word)?),
        },
        holder_count: count(reply, "holder_count")?,
        waiter_count: count(reply, "waiter_count")?,
        grace_left: millis(reply, "grace_left_ms")?,
        holders: items(field(reply, "holders")?)?.iter().map(read_holder).collect::<Option<_>>()?,
        waiters: items(field(reply, "waiters")?)?.iter().map(read_waiter).collect::<Option<_>>()?,
    }))
}

fn read_holder(entry: &Value) -> Option<Holder> {
    Some(Holder {
        owner: owned(entry, "owner")?,
        token: Token::new(count(entry, "token")?)?,
        state: match bytes(field(entry, "state")?)? {
            b"held" => HolderState::Held,
            b"claimed" => HolderState::Claimed,
            b"expired" => HolderState::Expired,
            _ => HolderState::Unknown,
        },
        lease: millis(entry, "lease_ms")?,
        remaining: millis(entry, "left_ms")?,
        held_for: millis(entry, "held_ms")?,
        label: owned(entry, "label")?,
        ids: items(field(entry, "ids")?)?.iter().map(|id| bytes(id).map(<[u8]>::to_vec)).collect::<Option<_>>()?,
    })
}

fn read_waiter(entry: &Value) -> Option<Waiter> {
    Some(Waiter {
        owner: owned(entry, "owner")?,
        mode: mode(bytes(field(entry, "mode")?)?)?,
        position: count(entry, "position")?,
        waiting_for: millis(entry, "waiting_ms")?,
        label: owned(entry, "label")?,
    })
}

fn read_page(reply: &Value) -> Option<(u32, Vec<HeldLock>)> {
    let [next, page] = items(reply)? else { return None };
    let next = u32::try_from(number(next)?).ok()?;
    Some((next, items(page)?.iter().map(read_held_lock).collect::<Option<_>>()?))
}

fn read_held_lock(entry: &Value) -> Option<HeldLock> {
    Some(HeldLock {
        key: owned(entry, "key")?,
        mode: mode(bytes(field(entry, "mode")?)?)?,
        holder_count: count(entry, "holder_count")?,
        waiter_count: count(entry, "waiter_count")?,
        owner: owned(entry, "owner")?,
        token: Token::new(count(entry, "token")?)?,
        remaining: millis(entry, "left_ms")?,
    })
}

fn read_stats(reply: &Value) -> Option<Stats> {
    let fields = text(reply)?.lines().filter_map(|line| line.split_once(':'));
    Some(Stats { fields: fields.map(|(name, value)| (name.to_owned(), value.to_owned())).collect() })
}

/// The value beside `name`, in a map or in a flat list of names and values.
fn field<'a>(reply: &'a Value, name: &str) -> Option<&'a Value> {
    let is_name = |value: &Value| bytes(value) == Some(name.as_bytes());
    match reply {
        Value::Map(pairs) => pairs.iter().find(|(name, _)| is_name(name)).map(|(_, value)| value),
        Value::Array(flat) => flat.chunks_exact(2).find(|pair| pair.first().is_some_and(is_name))?.last(),
        _ => None,
    }
}

fn items(value: &Value) -> Option<&[Value]> {
    match value {
        Value::Array(items) => Some(items),
        _ => None,
    }
}

fn bytes(value: &Value) -> Option<&[u8]> {
    match value {
        Value::BulkString(bytes) => Some(bytes),
        Value::SimpleString(text) | Value::VerbatimString { text, .. } => Some(text.as_bytes()),
        _ => None,
    }
}

fn text(value: &Value) -> Option<&str> {
    str::from_utf8(bytes(value)?).ok()
}

fn owned(entry: &Value, name: &str) -> Option<Vec<u8>> {
    bytes(field(entry, name)?).map(<[u8]>::to_vec)
}

fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}

fn count(entry: &Value, name: &str) -> Option<u64> {
    number(field(entry, name)?)
}

fn millis(entry: &Value, name: &str) -> Option<Duration> {
    count(entry, name).map(Duration::from_millis)
}

fn mode(word: &[u8]) -> Option<Mode> {
    match word {
        b"exclusive" => Some(Mode::Exclusive),
        b"shared" => Some(Mode::Shared),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    fn waiting() -> Vec<(Value, Value)> {
        vec![
            (bulk("owner"), Value::BulkString(vec![0xff])),
            (bulk("mode"), bulk("shared")),
            (bulk("position"), Value::Int(1)),
            (bulk("waiting_ms"), Value::Int(5)),
            (bulk("label"), bulk("")),
            (bulk("later"), Value::Boolean(true)),
        ]
    }

    #[test]
    fn map_and_flat_array_are_the_same() {
        let flat = waiting().into_iter().flat_map(|(name, value)| [name, value]).collect();
        let expected = Waiter {
            owner: vec![0xff],
            mode: Mode::Shared,
            position: 1,
            waiting_for: Duration::from_millis(5),
            label: vec![],
        };
        assert_eq!(read_waiter(&Value::Map(waiting())), Some(expected.clone()));
        assert_eq!(read_waiter(&Value::Array(flat)), Some(expected));
    }

    #[test]
    fn field_that_is_missing_or_wrong_is_no_reply() {
        for position in 0..5 {
            let (mut missing, mut wrong) = (waiting(), waiting());
            missing.remove(position);
            wrong[position].1 = Value::Boolean(true);
            assert_eq!(read_waiter(&Value::Map(missing)), None);
            assert_eq!(read_waiter(&Value::Map(wrong)), None);
        }
    }

    #[test]
    fn value_is_not_taken_for_a_name() {
        let flat = Value::Array(vec![bulk("label"), bulk("owner"), bulk("owner"), bulk("me")]);
        assert_eq!(owned(&flat, "owner"), Some(b"me".to_vec()));
    }

    #[test]
    fn state_of_a_later_server_is_unknown() {
        let entry = |state| {
            let (text, number) = (|name| (bulk(name), bulk("")), |name| (bulk(name), Value::Int(1)));
            let mut entry = vec![text("owner"), number("token"), (bulk("state"), bulk(state)), text("label")];
            entry.extend(["lease_ms", "left_ms", "held_ms"].map(number));
            entry.push((bulk("ids"), Value::Array(vec![])));
            read_holder(&Value::Map(entry)).unwrap().state
        };
        assert_eq!(entry("held"), HolderState::Held);
        assert_eq!(entry("suspended"), HolderState::Unknown);
    }

    #[cfg(feature = "testing")]
    #[tokio::test(start_paused = true)]
    async fn answer_that_cannot_be_read_is_told_at_once_and_costs_no_connection() {
        let server = crate::testing::Server::new();
        let flock = server.client().await;
        let node = flock.engine().node(b"k");
        let (epoch, begun) = (node.commands.epoch(), tokio::time::Instant::now());
        let asked = Asked::Server(Arc::clone(&node));
        let error = flock.look(asked, redis::cmd("PING"), |_| None::<()>).await.unwrap_err();
        assert!(matches!(error, AdminError::Unreadable), "{error:?}");
        assert!(begun.elapsed() < Duration::from_millis(100));
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(node.commands.epoch(), epoch);
    }

    #[test]
    fn free_lock_is_nothing() {
        assert_eq!(read_info(&Value::Nil), Some(None));
        assert_eq!(read_info(&Value::Int(0)), None);
    }

    #[test]
    fn stats_are_read_by_name() {
        let text = "# flock_locks\r\nflock_held:3\r\nflock_lead_over_clock:-7\r\nflock_wait_ms:lt_1=2,lt_8=3\r\n";
        let stats = read_stats(&Value::VerbatimString { format: redis::VerbatimFormat::Text, text: text.into() });
        let stats = stats.unwrap();
        assert_eq!(stats.number("flock_held"), Some(3));
        assert_eq!(stats.number("flock_lead_over_clock"), Some(-7));
        assert_eq!(stats.get("flock_wait_ms"), Some("lt_1=2,lt_8=3"));
        assert_eq!(stats.number("flock_wait_ms"), None);

        let mut both = stats;
        let mut other = both.clone();
        other.fields.insert("flock_mark".into(), "7".into());
        other.fields.insert("flock_lead_over_clock".into(), "-9".into());
        both.add(other);
        assert_eq!(both.number("flock_held"), Some(6));
        assert_eq!((both.number("flock_mark"), both.number("flock_lead_over_clock")), (Some(7), Some(-7)));
        assert_eq!(both.get("flock_wait_ms"), Some("lt_1=4,lt_8=6"));
    }
}
