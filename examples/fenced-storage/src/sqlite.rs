//! SQLite: the same row, the same condition. One writer at a time writes the whole file, so transactions never interleave.
//!
//! BEGIN IMMEDIATE takes the file's write lock at once, waiting for whoever has it; a transaction that begins by reading may fail when
//! it comes to write. A process that is stopped inside its transaction keeps the file locked: nobody else can end that, so all that
//! takes time is done before.

use std::path::Path;
use std::time::Duration;

use flock_client::Token;
use rusqlite::{Connection, TransactionBehavior, params};

use crate::{DepositError, Payment, stored};

/// The tables. A lock that guards several rows may have its fence in a row of its own, written in the same way.
const SCHEMA: &str = "
    CREATE TABLE IF NOT EXISTS accounts (name TEXT PRIMARY KEY, cents INTEGER NOT NULL, fence INTEGER NOT NULL) STRICT;
    CREATE TABLE IF NOT EXISTS entries (number INTEGER PRIMARY KEY, account TEXT NOT NULL, cents INTEGER NOT NULL) STRICT;
";

/// Opens the file, or `:memory:`, and makes the tables if there are none.
///
/// # Errors
/// Those of the database.
pub fn open(path: impl AsRef<Path>) -> Result<Connection, DepositError> {
    let db = Connection::open(path)?;
    db.busy_timeout(Duration::from_secs(5))?; // how long to wait for another writer
    db.execute_batch(SCHEMA)?;
    Ok(db)
}

/// Deposits on an account, which is opened if need be, under the token of the lock that guards it. What was deposited before is not
/// deposited again.
///
/// # Errors
/// [`DepositError::Stale`] if a later holder has written; nothing has changed then. [`DepositError::Storage`] otherwise.
pub fn deposit(db: &mut Connection, payment: &Payment<'_>, token: Token) -> Result<(), DepositError> {
    let Payment { number, account, cents } = payment;
    let transaction = db.transaction_with_behavior(TransactionBehavior::Immediate)?; // rolled back if it is dropped
    // Matches the row only if no later holder has written it.
    let fenced = "INSERT INTO accounts VALUES (?1, 0, ?2) ON CONFLICT (name) DO UPDATE
                  SET fence = excluded.fence WHERE fence <= excluded.fence";
    if transaction.execute(fenced, params![account, stored(token)])? == 0 {
        return Err(DepositError::Stale { token });
    }
    let booked = "INSERT INTO entries VALUES (?1, ?2, ?3) ON CONFLICT DO NOTHING";
    if transaction.execute(booked, params![number, account, cents])? == 1 {
        transaction.execute("UPDATE accounts SET cents = cents + ?2 WHERE name = ?1", params![account, cents])?;
    }
    transaction.commit()?; // only now may the lock be released
    Ok(())
}
