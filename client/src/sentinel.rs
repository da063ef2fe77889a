//! Where the primary is, by the word of the sentinels.
//!
//! Plain commands, and not the `redis` crate's own sentinel client: that one checks the server's role over another connection than the
//! one it returns, has timeouts of its own, and tells an old word from a new one by nothing, so it can lead back to a demoted primary.
//!
//! Sentinels number their words: each failover has a higher *configuration epoch*. A word older than one we have heard counts only if
//! most sentinels agree on it (an operator has set the service up anew). What one connection learns moves all others: each watches
//! whether the primary is still where it leads, and one sentinel, another each time, is asked at every heartbeat.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Mutex;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, Client, ConnectionInfo, ErrorKind, FromRedisValue, RedisConnectionInfo, RedisError, Value,
};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::address::{Address, HostsUrl};
use crate::jitter::Jitter;
use crate::line::Line;
use crate::mutex::lock;
#[cfg(feature = "tls")]
use crate::tls::is_distrust;

const KIND: &str = "sentinel";
const SENTINEL_PORT: u16 = 26_379;

/// A primary as the sentinels name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Primary {
    address: Address,
    config_epoch: u64,
}

/// What `valkey+sentinel://[user][:password@]host[:port],.../service[/db]` says.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SentinelUrl {
    sentinels: Vec<Address>,
    service: String,
    /// The URL of a server as it would be at the first sentinel's host: with the scheme, the credentials and the database of them all.
    pub(crate) server: String,
}

impl SentinelUrl {
    pub(crate) fn is_one(url: &str) -> bool {
        HostsUrl::is_one(url, KIND)
    }

    pub(crate) fn parse(url: &str) -> Option<Self> {
        let url = HostsUrl::parse(url, KIND, SENTINEL_PORT)?;
        let (service, db) = url.path?.split_once('/').unwrap_or((url.path?, "0"));
        let server = url.server(db)?;
        (!service.is_empty()).then(|| Self { service: service.to_owned(), server, sentinels: url.hosts })
    }
}

/// Who a client is, to a server or to the sentinels.
#[derive(Clone, Default)]
pub(crate) struct Credentials {
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
}

impl Credentials {
    /// What is not said stays as it is.
    pub(crate) fn added_to(&self, mut settings: RedisConnectionInfo) -> RedisConnectionInfo {
        if let Some(user) = &self.user {
            settings = settings.set_username(user);
        }
        if let Some(password) = &self.password {
            settings = settings.set_password(password);
        }
        settings
    }
}

/// The sentinels we know, in the order in which they are asked.
struct Known {
    addresses: VecDeque<Address>,
    connections: HashMap<Address, MultiplexedConnection>,
}

/// The sentinels of one service, shared by all connections of a client.
pub(crate) struct Sentinels {
    service: String,
    /// Those of the URL: they are never forgotten.
    named: Vec<Address>,
    /// How sentinels are connected to, but for the address.
    sentinel: ConnectionInfo,
    /// How the service's servers are.
    server: ConnectionInfo,
    connect_timeout: Duration,
    heartbeat: Duration,
    jitter: Jitter,
    known: Mutex<Known>,
    /// The newest word.
    primary: watch::Sender<Option<Primary>>,
}

impl fmt::Debug for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sentinels").field("service", &self.service).field("named", &self.named).finish_non_exhaustive()
    }
}

impl Sentinels {
    /// `server` is how the URL's [`server`](SentinelUrl::server) is connected to; the sentinels are in the same way, but for who we are.
    pub(crate) fn new(
        url: SentinelUrl,
        server: &ConnectionInfo,
        credentials: &Credentials,
        connect_timeout: Duration,
        heartbeat: Duration,
    ) -> Self {
        let settings = RedisConnectionInfo::default().set_protocol(server.redis_settings().protocol());
        let settings = credentials.added_to(settings);
        let (seed, _) = uuid::Uuid::new_v4().as_u64_pair();
        Self {
            service: url.service,
            known: Mutex::new(Known { addresses: url.sentinels.clone().into(), connections: HashMap::new() }),
            named: url.sentinels,
            sentinel: server.clone().set_redis_settings(settings),
            server: server.clone(),
            connect_timeout,
            heartbeat,
            jitter: Jitter::new(seed),
            primary: watch::Sender::new(None),
        }
    }

    /// Connects to the primary, and says which that is. The sentinels are asked in turn, until one names a server that says the same
    /// of itself. To be bounded by the caller.
    pub(crate) async fn open(&self, config: &AsyncConnectionConfig) -> Result<(Line, Primary), RedisError> {
        let sentinels = self.turn();
        let mut round = Round::default();
        for sentinel in &sentinels {
            match self.ask(sentinel).await {
                Ok(Some(primary)) if !self.believe(&primary) => round.older.push(primary),
                Ok(Some(primary)) if round.tried.contains(&primary) => {}
                Ok(Some(primary)) => match self.enter(&primary, config).await {
                    Ok(line) => return Ok((line, primary)),
                    Err(error) => round.failed(primary, error),
                },
                Ok(None) => round.strangers += 1,
                Err(error) => round.silent(sentinel, error),
            }
        }
        let agreed = round.older.len() > sentinels.len() / 2;
        if let Some(primary) = round.older.iter().filter(|_| agreed).max_by_key(|primary| primary.config_epoch) {
            tracing::warn!(service = self.service, primary = %primary.address, "the sentinels have begun anew");
            self.primary.send_replace(Some(primary.clone()));
            return self.enter(primary, config).await.map(|line| (line, primary.clone()));
        }
        Err(round.verdict(&self.service, &sentinels))
    }

    /// Ends when the primary is not the one at `here` any more, as far as any of our connections has heard.
    pub(crate) async fn moved(&self, here: &Primary) {
        let mut primary = self.primary.subscribe();
        let ask = async {
            loop {
                sleep(self.jitter.around(self.heartbeat)).await;
                let Some(sentinel) = self.turn().pop() else { continue };
                match self.ask(&sentinel).await {
                    Ok(Some(primary)) => drop(self.believe(&primary)),
                    Ok(None) => tracing::debug!(%sentinel, service = self.service, "does not know the service"),
                    Err(error) => tracing::debug!(%sentinel, %error, "no answer of a sentinel"),
                }
            }
        };
        tokio::select! {
            _ = primary.wait_for(|primary| primary.as_ref() != Some(here)) => {}
            () = ask => {}
        }
    }

    /// Whether `here` is the primary, as far as we have heard.
    pub(crate) fn is_current(&self, here: &Primary) -> bool {
        self.primary.borrow().as_ref() == Some(here)
    }

    /// Takes a word for the newest, unless it is older than what we have heard or contradicts it.
    fn believe(&self, word: &Primary) -> bool {
        let news = self.primary.send_if_modified(|primary| {
            let news = primary.as_ref().is_none_or(|known| known.config_epoch < word.config_epoch);
            if news {
                *primary = Some(word.clone());
            }
            news
        });
        news || self.is_current(word)
    }

    /// Connects to what may be the primary. The connection is of use only if it is one; ends early if it is not any more.
    async fn enter(&self, primary: &Primary, config: &AsyncConnectionConfig) -> Result<Line, RedisError> {
        let entering = async {
            let client = Client::open(primary.address.put_into(&self.server))?;
            let line = Line::open(&client, config.clone()).await?;
            // Not ROLE, for which a user needs a permission: HELLO is allowed to all, and tells the role too.
            let hello: HashMap<String, Value> = line.query(&redis::cmd("HELLO")).await?;
            let role = hello.get("role").map(String::from_redis_value_ref).transpose()?;
            match role.as_deref() {
                Some("master" | "primary") => Ok(line),
                _ => Err(failed(format!("no primary; its role: {}", role.as_deref().unwrap_or("none")))),
            }
        };
        tokio::select! {
            outcome = entering => outcome,
            () = self.moved(primary) => Err(failed("not the primary any more".into())),
        }
    }

    /// Asks one sentinel for the primary; none if it does not know the service. Learns from it which others there are.
    async fn ask(&self, sentinel: &Address) -> Result<Option<Primary>, RedisError> {
        let asking = async {
            let kept = lock(&self.known).connections.get(sentinel).cloned();
            if let Some(connection) = kept {
                match self.ask_over(connection).await {
                    Err(error) if error.kind() == ErrorKind::Io => {} // closed since the last time
                    outcome => return outcome,
                }
            }
            let config = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
            let client = Client::open(sentinel.put_into(&self.sentinel))?;
            let connection = client.get_multiplexed_async_connection_with_config(&config).await?;
            lock(&self.known).connections.insert(sentinel.clone(), connection.clone());
            self.ask_over(connection).await
        };
        // All of them together have half of the time, so that there is some left for the primary.
        let share =
            self.connect_timeout / (2 * u32::try_from(lock(&self.known).addresses.len()).unwrap_or(u32::MAX)).max(1);
        let answer = timeout(share, asking).await.unwrap_or_else(|_| Err(failed("no answer in time".into())));
        match answer {
            Ok((primary, others)) => {
                self.learn(sentinel, others);
                Ok(primary)
            }
            Err(error) => {
                lock(&self.known).connections.remove(sentinel);
                Err(error)
            }
        }
    }

    async fn ask_over(
        &self,
        mut sentinel: MultiplexedConnection,
    ) -> Result<(Option<Primary>, Vec<Address>), RedisError> {
        // The old word, "master", is the one that every sentinel understands. MASTER has the epoch; its address is the old one until
        // all replicas have been told of the new. The epoch is asked for first: should the two not match, it is the lower one.
        let mut requests = redis::pipe();
        requests.ignore_errors();
        for question in ["MASTER", "GET-MASTER-ADDR-BY-NAME", "SENTINELS"] {
            requests.cmd("SENTINEL").arg(question).arg(&self.service);
        }
        let replies = sentinel.send_packed_commands(&requests, 0, 3).await?;
        let [state, address, others] =
            <[Value; 3]>::try_from(replies).map_err(|_| failed("an answer that cannot be one".into()))?;
        let Some((host, port)) = read::<Option<(String, u16)>>(address)? else {
            return Ok((None, Vec::new()));
        };
        let state: HashMap<String, String> = read(state)?;
        let config_epoch = state.get("config-epoch").and_then(|epoch| epoch.parse().ok());
        let config_epoch = config_epoch.ok_or_else(|| failed("no configuration epoch".into()))?;
        let others: Vec<HashMap<String, String>> = read(others)?;
        let others = others
            .iter()
            .filter_map(|other| {
                Some(Address { host: other.get("ip")?.clone(), port: other.get("port")?.parse().ok()? })
            })
            .collect();
        Ok((Some(Primary { address: Address { host, port }, config_epoch }), others))
    }

    /// Forgets who is neither in the URL, nor the sentinel that has just answered, nor known to that.
    fn learn(&self, answered: &Address, others: Vec<Address>) {
        let mut known = lock(&self.known);
        let Known { addresses, connections } = &mut *known;
        addresses.retain(|address| address == answered || self.named.contains(address) || others.contains(address));
        for other in others {
            if !addresses.contains(&other) {
                addresses.push_back(other);
            }
        }
        connections.retain(|address, _| addresses.contains(address));
    }

    /// All sentinels, each time beginning with another.
    fn turn(&self) -> Vec<Address> {
        let mut known = lock(&self.known);
        known.addresses.rotate_left(1);
        known.addresses.iter().cloned().collect()
    }
}

/// What one round of asking has brought.
#[derive(Default)]
struct Round {
    /// Words older than the newest that we have heard.
    older: Vec<Primary>,
    tried: Vec<Primary>,
    /// How many sentinels do not know the service.
    strangers: usize,
    complaints: Vec<String>,
    /// Why we were refused: it will be so again.
    refusal: Option<RedisError>,
}

impl Round {
    fn failed(&mut self, primary: Primary, error: RedisError) {
        self.complaints.push(format!("server {}: {error}", primary.address));
        self.tried.push(primary);
        if is_distrust(&error) || error.kind() != ErrorKind::Io {
            self.refusal = Some(error);
        }
    }

    fn silent(&mut self, sentinel: &Address, error: RedisError) {
        self.complaints.push(format!("sentinel {sentinel}: {error}"));
        if let Some(code @ ("NOAUTH" | "WRONGPASS" | "NOPERM")) = error.code() {
            self.refusal = Some(redis::make_extension_error(code.to_owned(), self.complaints.last().cloned()));
        } else if is_distrust(&error) {
            self.refusal = Some(error);
        }
    }

    fn verdict(self, service: &str, sentinels: &[Address]) -> RedisError {
        if let Some(refusal) = self.refusal {
            return refusal;
        }
        let asked = sentinels.iter().map(Address::to_string).collect::<Vec<_>>().join(", ");
        if self.strangers == sentinels.len() {
            let detail = format!("no sentinel knows the service \"{service}\"; asked: {asked}");
            return (ErrorKind::MasterNameNotFoundBySentinel, "unknown service", detail).into();
        }
        failed(format!("no primary of \"{service}\" by the sentinels {asked} ({})", self.complaints.join("; ")))
    }
}

#[cfg(not(feature = "tls"))]
fn is_distrust(_: &RedisError) -> bool {
    false
}

fn failed(what: String) -> RedisError {
    std::io::Error::other(what).into()
}

fn read<T: FromRedisValue>(reply: Value) -> Result<T, RedisError> {
    Ok(T::from_redis_value(reply.extract_error()?)?)
}

#[cfg(test)]
mod tests {
    use redis::IntoConnectionInfo;

    use super::*;

    fn address(host: &str, port: u16) -> Address {
        Address { host: host.to_owned(), port }
    }

    #[test]
    fn url_names_sentinels_service_and_database() {
        let url = "valkey+sentinel://me:p%40ss@a,b:1,[::1]:2,[fe80::1]/main/3";
        let sentinels = vec![address("a", 26_379), address("b", 1), address("::1", 2), address("fe80::1", 26_379)];
        let server = "valkey://me:p%40ss@a:26379/3".to_owned();
        assert_eq!(SentinelUrl::parse(url), Some(SentinelUrl { sentinels, service: "main".into(), server }));
        let short = SentinelUrl::parse("rediss+sentinel://h/s").unwrap();
        assert_eq!(short.server, "rediss://h:26379/0");
        assert_eq!(SentinelUrl::parse("redis+sentinel://[::1]/s").unwrap().server, "redis://[::1]:26379/0");
    }

    #[test]
    fn url_that_makes_no_sense_is_none() {
        for url in [
            "", "://", "/s", "h", "h/", "h,/s", "h:x/s", "h:1:2/s", "[::1/s", "[::1]1/s", "h/s/x", "h/s/1/2",
            "h/s?a=b", "h/s#x",
        ] {
            assert_eq!(SentinelUrl::parse(&format!("valkey+sentinel://{url}")), None, "{url}");
        }
        assert_eq!(SentinelUrl::parse("http+sentinel://h/s"), None);
        assert!(SentinelUrl::is_one("http+sentinel://h") && !SentinelUrl::is_one("valkey://me:+sentinel@h"));
    }

    fn sentinels() -> Sentinels {
        let url = SentinelUrl::parse("valkey+sentinel://a,b/main").unwrap();
        let server = url.server.as_str().into_connection_info().unwrap();
        let second = Duration::from_secs(1);
        Sentinels::new(url, &server, &Credentials::default(), second, second)
    }

    #[test]
    fn newer_word_is_believed_and_an_older_one_is_not() {
        let sentinels = sentinels();
        let word = |port, config_epoch| Primary { address: address("h", port), config_epoch };
        assert!(sentinels.believe(&word(1, 3)));
        assert!(sentinels.believe(&word(1, 3)), "the same again");
        assert!(!sentinels.believe(&word(2, 2)) && !sentinels.believe(&word(2, 3)));
        assert!(sentinels.is_current(&word(1, 3)));
        assert!(sentinels.believe(&word(2, 4)));
        assert!(sentinels.is_current(&word(2, 4)) && !sentinels.is_current(&word(1, 3)));
    }

    #[test]
    fn each_turn_begins_with_another_and_the_unknown_are_forgotten() {
        let sentinels = sentinels();
        let [a, b, c, d] = ["a", "b", "c", "d"].map(|host| address(host, SENTINEL_PORT));
        assert_eq!(sentinels.turn(), [b.clone(), a.clone()]);
        assert_eq!(sentinels.turn(), [a.clone(), b.clone()]);
        sentinels.learn(&a, vec![c.clone(), d]);
        sentinels.learn(&c, vec![a.clone()]);
        assert_eq!(sentinels.turn(), [b, c, a], "d is known to nobody, b is named");
    }
}
