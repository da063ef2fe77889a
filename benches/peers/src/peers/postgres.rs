//! Advisory locks of PostgreSQL: a session waits in the server. `$PEERS_POSTGRES` says how to connect.

use tokio_postgres::{Client, NoTls, Statement};

use super::{Contender, Reader};

/// A session.
pub(crate) struct Session {
    client: Client,
    lock: Statement,
    unlock: Statement,
    lock_shared: Statement,
    unlock_shared: Statement,
}

/// `count` sessions; none if there is no server.
pub(crate) async fn sessions(count: usize) -> Option<Vec<Session>> {
    let params = std::env::var("PEERS_POSTGRES").ok()?;
    let mut all = Vec::new();
    for _ in 0..count {
        let (client, connection) = tokio_postgres::connect(&params, NoTls).await.expect("the database is there");
        tokio::spawn(connection);
        let prepare = async |call: &str| {
            let statement = client.prepare(&format!("SELECT {call}(42)")).await;
            statement.expect("there is such a function")
        };
        let lock = prepare("pg_advisory_lock").await;
        let unlock = prepare("pg_advisory_unlock").await;
        let lock_shared = prepare("pg_advisory_lock_shared").await;
        let unlock_shared = prepare("pg_advisory_unlock_shared").await;
        all.push(Session { client, lock, unlock, lock_shared, unlock_shared });
    }
    Some(all)
}

impl Session {
    async fn run(&self, statement: &Statement) {
        self.client.query_one(statement, &[]).await.expect("the database answers");
    }
}

impl Contender for Session {
    async fn acquire(&mut self) {
        self.run(&self.lock).await;
    }

    async fn release(&mut self) {
        self.run(&self.unlock).await;
    }
}

impl Reader for Session {
    async fn acquire_shared(&mut self) {
        self.run(&self.lock_shared).await;
    }

    async fn release_shared(&mut self) {
        self.run(&self.unlock_shared).await;
    }
}
