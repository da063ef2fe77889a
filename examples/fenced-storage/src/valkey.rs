//! Valkey itself: the data and the lock are in one server, so the write can ask the lock. No fence is stored.
//!
//! `FLOCK.CHECK lock token` is 1 only while the lock is held under exactly this token: so a holder whose lease is over is refused even
//! if nobody has come after it. It is as exact as the server: after a failover that lost the grant, the data written under it are lost
//! too, or were written by somebody who is refused now.
//!
//! * In a *script* ([`deposit`]) the check and the write are one step. The simplest; use it where you can.
//! * In *MULTI* ([`deposit_in_transaction`]) a reply decides nothing: all commands are carried out, whatever CHECK says. So it is asked
//!   before, under WATCH of the lock's key. Whatever ends or changes the hold between the check and EXEC touches the key, and EXEC
//!   answers nil. So does a renewal, which is no loss: asked again, CHECK tells the two apart.
//!
//! In a cluster the lock and the data must be in one slot: `{alice}:lock`, `{alice}:cents`.

use flock_client::Token;
use redis::aio::MultiplexedConnection;
use redis::{Client, Value};

use crate::{DepositError, Payment, stored};

/// Connects. The connection must not be shared: WATCH counts for all of it.
///
/// # Errors
/// Those of the server.
pub async fn connect(url: &str) -> Result<MultiplexedConnection, DepositError> {
    Ok(Client::open(url)?.get_multiplexed_async_connection().await?)
}

/// Deposits on an account under the token of the lock that guards it, in a script. What was deposited before is not deposited again.
///
/// # Errors
/// [`DepositError::Stale`] if the lock is not held under this token; nothing has changed then. [`DepositError::Storage`] otherwise.
pub async fn deposit(
    db: &mut MultiplexedConnection,
    lock: &str,
    payment: &Payment<'_>,
    token: Token,
) -> Result<(), DepositError> {
    let fenced = "if redis.call('FLOCK.CHECK', KEYS[1], ARGV[1]) == 0 then return 0 end
                  if redis.call('HEXISTS', KEYS[3], ARGV[2]) == 0 then
                      redis.call('INCRBY', KEYS[2], ARGV[3])
                      redis.call('HSET', KEYS[3], ARGV[2], ARGV[3])
                  end
                  return 1";
    let Payment { number, account, cents } = payment;
    let [cents_key, entries_key] = keys(account);
    let mut script = redis::cmd("EVAL");
    script.arg(fenced).arg(3).arg(lock).arg(cents_key).arg(entries_key).arg(stored(token)).arg(number).arg(cents);
    match script.query_async(db).await? {
        0 => Err(DepositError::Stale { token }),
        _ => Ok(()),
    }
}

/// The same in a transaction. It undoes nothing: if one of its commands fails, as INCRBY at a balance that is no number, the others are
/// carried out all the same, and the payment is booked. A script ends there.
///
/// # Errors
/// As [`deposit`].
pub async fn deposit_in_transaction(
    db: &mut MultiplexedConnection,
    lock: &str,
    payment: &Payment<'_>,
    token: Token,
) -> Result<(), DepositError> {
    let Payment { number, account, cents } = payment;
    let [cents_key, entries_key] = keys(account);
    loop {
        let mut check = redis::pipe();
        check.cmd("WATCH").arg(lock).arg(&entries_key).ignore();
        check.cmd("FLOCK.CHECK").arg(lock).arg(stored(token)).cmd("HEXISTS").arg(&entries_key).arg(number);
        let (is_held, is_deposited): (bool, bool) = check.query_async(db).await?;
        if !is_held || is_deposited {
            redis::cmd("UNWATCH").exec_async(db).await?;
            return if is_held { Ok(()) } else { Err(DepositError::Stale { token }) };
        }
        let mut write = redis::pipe();
        write.atomic().cmd("INCRBY").arg(&cents_key).arg(cents).cmd("HSET").arg(&entries_key).arg(number).arg(cents);
        match write.query_async(db).await? {
            Value::Nil => {} // a key was touched: the lock's by a renewal, or it is lost; or this payment was deposited just now
            _ => return Ok(()),
        }
    }
}

fn keys(account: &str) -> [String; 2] {
    [format!("{account}:cents"), format!("{account}:entries")]
}
