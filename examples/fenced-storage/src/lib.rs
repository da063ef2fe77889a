//! A lock cannot stop a holder that was paused: it wakes up after its lease, believes that it still holds, and writes. The storage can.
//!
//! One job, done in three storages: deposit money, which adds to a balance and writes an entry in a book. It comes with the fencing
//! token of the lock it was done under: if a later holder has written before, neither the balance nor the book changes. And it comes with
//! the number of the payment: who repeats it, because a COMMIT had no answer or a hold was lost, finds it done and adds nothing.
//!
//! | storage | who knows the token | what refuses |
//! |---|---|---|
//! | [`postgres`] | the row: its highest so far | the condition of the first statement, before COMMIT |
//! | [`sqlite`] | the row: its highest so far | the same |
//! | [`valkey`] | the lock itself, in the same server | `FLOCK.CHECK` in a script, or before MULTI under WATCH |
//!
//! Each has a program that shows it. Start it in two terminals, stop the first with Ctrl-Z while it holds the lock, let the second
//! have its turn, wake the first with `fg`, and see it refused:
//!
//! ```console
//! $ cargo run -p fenced-storage --bin fenced_postgres -- valkey://127.0.0.1:7379 "host=localhost user=postgres"
//! holding under token 6031254167076; Enter deposits
//! ```
//!
//! The order of things is the same everywhere: acquire, write with the token in one transaction, commit, release. Whoever releases
//! before the commit has two holders writing at once.
#![forbid(unsafe_code)]

pub mod postgres;
pub mod sqlite;
pub mod valkey;

use std::io::{Write, stdin, stdout};
use std::time::{Duration, SystemTime};

use flock_client::{Flock, Token};

/// Whose money it is, and which lock guards it.
pub const ACCOUNT: &str = "alice";
/// The lock of [`ACCOUNT`].
pub const LOCK: &str = "account:alice";
/// How long the others wait for a holder that was stopped.
const LEASE: Duration = Duration::from_secs(2);

/// What is to be deposited.
#[derive(Clone, Copy, Debug)]
pub struct Payment<'a> {
    /// Given by whoever has ordered it, and the same each time it is tried: the idempotency key.
    pub number: i64,
    /// To which account.
    pub account: &'a str,
    /// How much.
    pub cents: i64,
}

impl Payment<'static> {
    /// A euro for [`ACCOUNT`], ordered now.
    ///
    /// # Panics
    /// If the clock stands before 1970.
    #[must_use]
    pub fn ordered_now() -> Self {
        let since_1970 = SystemTime::UNIX_EPOCH.elapsed().expect("it is after 1970");
        let number = i64::try_from(since_1970.as_micros()).expect("it is before the year 290,000");
        Self { number, account: ACCOUNT, cents: 100 }
    }
}

/// Why nothing was deposited.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DepositError {
    /// The lock was lost before the write: a later holder has written, or holds it. The transaction was rolled back. Do not try again
    /// under this hold: start over from acquiring the lock, and from reading what you have read.
    #[error("token {token} is stale: the lock was lost, and nothing was written")]
    Stale {
        /// The token the write came with.
        token: Token,
    },
    /// The storage failed. If the connection broke during COMMIT, nobody knows whether it was done.
    #[error("the storage failed")]
    Storage(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// For `?` in this crate.
macro_rules! storage_errors {
    ($($error:ty),*) => {
        $(impl From<$error> for DepositError {
            fn from(error: $error) -> Self {
                Self::Storage(error.into())
            }
        })*
    };
}

storage_errors!(tokio_postgres::Error, rusqlite::Error, redis::RedisError);

/// A token as databases store it. It fits: tokens are below 2^53.
fn stored(token: Token) -> i64 {
    token.get().cast_signed()
}

/// What each of the programs does: acquires the lock, deposits when it is told to, and releases.
///
/// It does not look at `Guard::is_valid` before it writes: a process may be stopped between the look and the write, and this is about
/// the storage.
///
/// # Errors
/// What kept it from being done, but for a deposit that was refused: that is printed.
pub async fn play(
    url: &str,
    deposit: impl AsyncFnOnce(Token) -> Result<(), DepositError>,
) -> Result<(), Box<dyn std::error::Error>> {
    let flock = Flock::connect(url).await?;
    let outcome = deposit_under_lock(&flock, deposit).await;
    let ended = flock.shutdown(Duration::from_secs(5)).await; // however it went
    outcome?;
    Ok(ended?)
}

async fn deposit_under_lock(
    flock: &Flock,
    deposit: impl AsyncFnOnce(Token) -> Result<(), DepositError>,
) -> Result<(), Box<dyn std::error::Error>> {
    let guard = flock.lock(LOCK).lease(LEASE).wait(Duration::from_secs(60)).await?;
    println!("holding under token {}; Enter deposits", guard.token());
    stdout().flush()?;
    stdin().read_line(&mut String::new())?;
    match deposit(guard.token()).await {
        Ok(()) => println!("deposited"),
        Err(error @ DepositError::Stale { .. }) => println!("refused: {error}"),
        Err(error) => return Err(error.into()),
    }
    println!("{:?}", guard.release().await?); // after the commit
    Ok(())
}
