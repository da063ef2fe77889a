//! How a link opens a connection.

use std::sync::Arc;

use redis::{AsyncConnectionConfig, Client, RedisError};

use crate::address::Address;
use crate::error::ServerError;
use crate::line::Line;
use crate::sentinel::{Primary, Sentinels};
use crate::slot_map::SlotMap;

#[derive(Clone, Debug)]
pub(crate) enum Dialer {
    Network(Client),
    Sentinel(Arc<Sentinels>),
    /// One node of a cluster.
    Node(Arc<SlotMap>, Address),
    #[cfg(feature = "testing")]
    InMemory(crate::testing::Process, Client),
}

/// Where a connection leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Destination {
    /// There is one server, or one name for it.
    Only,
    Primary(Primary),
}

impl Dialer {
    /// To be bounded by the caller.
    pub(crate) async fn open(&self, config: AsyncConnectionConfig) -> Result<(Line, Destination), RedisError> {
        match self {
            Self::Network(client) => Ok((Line::open(client, config).await?, Destination::Only)),
            Self::Sentinel(sentinels) => {
                let (line, primary) = sentinels.open(&config).await?;
                Ok((line, Destination::Primary(primary)))
            }
            Self::Node(map, address) => Ok((map.open(address, config).await?, Destination::Only)),
            #[cfg(feature = "testing")]
            Self::InMemory(process, client) => {
                let settings = client.get_connection_info().redis_settings();
                Ok((Line::over(process.open()?, settings, config).await?, Destination::Only))
            }
        }
    }

    /// Ends when the locks are not served there any more, but at another.
    pub(crate) async fn moved(&self, from: &Destination) {
        match (self, from) {
            (Self::Sentinel(sentinels), Destination::Primary(primary)) => sentinels.moved(primary).await,
            _ => std::future::pending().await,
        }
    }

    /// Whether the locks are served there, as far as we know.
    pub(crate) fn is_current(&self, destination: &Destination) -> bool {
        match (self, destination) {
            (Self::Sentinel(sentinels), Destination::Primary(primary)) => sentinels.is_current(primary),
            _ => true,
        }
    }

    /// A connection fails: what it leads to may be served elsewhere.
    pub(crate) fn doubt(&self) {
        if let Self::Node(map, _) = self {
            map.doubt();
        }
    }

    /// The server has answered with an error, which may tell who else is to be asked.
    pub(crate) fn learn_from(&self, error: &ServerError) {
        if let Self::Node(map, address) = self {
            map.learn_from(address, error);
        }
    }

    /// Whether a server that is no primary any more has a successor that [`Dialer::open`] finds.
    pub(crate) fn finds_successors(&self) -> bool {
        matches!(self, Self::Sentinel(_))
    }
}
