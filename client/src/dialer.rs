//! How a link opens a connection.

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, RedisError};

#[derive(Clone, Debug)]
pub(crate) enum Dialer {
    Network(Client),
    #[cfg(feature = "testing")]
    InMemory(crate::testing::Server, Client),
}

impl Dialer {
    pub(crate) async fn open(&self, config: AsyncConnectionConfig) -> Result<MultiplexedConnection, RedisError> {
        match self {
            Self::Network(client) => client.get_multiplexed_async_connection_with_config(&config).await,
            #[cfg(feature = "testing")]
            Self::InMemory(server, client) => {
                let settings = client.get_connection_info().redis_settings();
                let opening = MultiplexedConnection::new_with_config(settings, server.open()?, config);
                let (connection, driver) = opening.await?;
                tokio::spawn(driver);
                Ok(connection)
            }
        }
    }
}
