//! PostgreSQL: the row remembers the highest token that has written it, and the first statement of the transaction asks for no less.
//!
//! Under READ COMMITTED, the default, the statement takes the row's lock, waiting for whoever has it, and then judges the row as it is
//! *by then*. So from there to COMMIT nobody else writes, and whoever comes with a lower token is refused. Under REPEATABLE READ and
//! SERIALIZABLE the database refuses in place of the condition if somebody else has written: also right, with another error.
//!
//! A process that is stopped inside its transaction would keep the row's lock for as long: [`connect`] has the database end such a
//! transaction by itself.

use tokio_postgres::{Client, NoTls};

use flock_client::Token;

use crate::{DepositError, Payment, stored};

/// The tables. A lock that guards several rows may have its fence in a row of its own, written in the same way.
const SCHEMA: &str = "
    CREATE TABLE IF NOT EXISTS accounts (name text PRIMARY KEY, cents bigint NOT NULL, fence bigint NOT NULL);
    CREATE TABLE IF NOT EXISTS entries (number bigint PRIMARY KEY, account text NOT NULL, cents bigint NOT NULL);
";

/// Connects, by a text as `host=localhost user=postgres`, and makes the tables if there are none.
///
/// # Errors
/// Those of the database.
pub async fn connect(params: &str) -> Result<Client, DepositError> {
    let (db, connection) = tokio_postgres::connect(params, NoTls).await?;
    tokio::spawn(connection); // it drives the client, and ends with it
    // About as long as the lock's lease: after that the next holder wants to write.
    db.batch_execute("SET idle_in_transaction_session_timeout = '2s'; SET client_min_messages = 'warning'").await?;
    db.batch_execute(SCHEMA).await?;
    Ok(db)
}

/// Deposits on an account, which is opened if need be, under the token of the lock that guards it. What was deposited before is not
/// deposited again.
///
/// # Errors
/// [`DepositError::Stale`] if a later holder has written; nothing has changed then. [`DepositError::Storage`] otherwise.
pub async fn deposit(db: &mut Client, payment: &Payment<'_>, token: Token) -> Result<(), DepositError> {
    let Payment { number, account, cents } = payment;
    let transaction = db.transaction().await?; // rolled back if it is dropped before its commit
    // First of all: locks the row until the end, and matches it only if no later holder has written it.
    let fenced = "INSERT INTO accounts VALUES ($1, 0, $2) ON CONFLICT (name) DO UPDATE
                  SET fence = excluded.fence WHERE accounts.fence <= excluded.fence";
    if transaction.execute(fenced, &[account, &stored(token)]).await? == 0 {
        return Err(DepositError::Stale { token });
    }
    // No second time: it may have been done before, by a COMMIT that had no answer.
    let booked = "INSERT INTO entries VALUES ($1, $2, $3) ON CONFLICT DO NOTHING";
    if transaction.execute(booked, &[number, account, cents]).await? == 1 {
        transaction.execute("UPDATE accounts SET cents = cents + $2 WHERE name = $1", &[account, cents]).await?;
    }
    transaction.commit().await?; // only now may the lock be released
    Ok(())
}
