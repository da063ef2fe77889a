//! Valkey itself: FLOCK.CHECK in a script, and before MULTI under WATCH.

use std::collections::BTreeMap;
use std::time::Duration;

use fenced_storage::valkey::{connect, deposit, deposit_in_transaction};
use fenced_storage::{ACCOUNT, DepositError, LOCK, Payment};
use flock_client::{Flock, Guard, Released, Token};
use flock_tests::server::Server;
use redis::AsyncTypedCommands;
use redis::aio::MultiplexedConnection;

use crate::scene::{assert_stale, held, on, paused_program_is_refused, payment, revoke, stale_and_current, url};

/// The balance, and what was entered in the book, in order.
async fn contents(db: &mut MultiplexedConnection) -> (i64, Vec<i64>) {
    let cents = redis::cmd("GET").arg(format!("{ACCOUNT}:cents")).query_async::<Option<i64>>(db).await.unwrap();
    let entries = redis::cmd("HGETALL").arg(format!("{ACCOUNT}:entries")).query_async(db).await;
    let entries: BTreeMap<i64, i64> = entries.unwrap();
    (cents.unwrap_or(0), entries.into_values().collect())
}

/// In both ways.
#[derive(Clone, Copy, Debug)]
enum Way {
    Script,
    Transaction,
}

async fn deposit_by(
    way: Way,
    db: &mut MultiplexedConnection,
    payment: &Payment<'_>,
    token: Token,
) -> Result<(), DepositError> {
    match way {
        Way::Script => deposit(db, LOCK, payment, token).await,
        Way::Transaction => deposit_in_transaction(db, LOCK, payment, token).await,
    }
}

fn both_ways(test: impl AsyncFn(Way, Server, Flock)) {
    for way in [Way::Script, Way::Transaction] {
        on(async |server, flock| test(way, server, flock).await);
    }
}

#[test]
fn stale_holder_is_refused() {
    both_ways(async |way, server, flock| {
        let mut db = connect(&url(&server)).await.unwrap();
        let (stale, current) = stale_and_current(&server, &flock).await;
        // Even before the current holder has written.
        assert_stale(deposit_by(way, &mut db, &payment(1), stale.token()).await, &stale);
        deposit_by(way, &mut db, &payment(20), current.token()).await.unwrap();
        assert_stale(deposit_by(way, &mut db, &payment(1), stale.token()).await, &stale);
        deposit_by(way, &mut db, &payment(300), current.token()).await.unwrap();
        assert_eq!(contents(&mut db).await, (320, vec![20, 300]));
    });
}

#[test]
fn holder_that_gave_back_is_refused() {
    both_ways(async |way, server, flock| {
        let mut db = connect(&url(&server)).await.unwrap();
        let guard = held(&flock).await;
        let token = guard.token();
        assert_eq!(guard.release().await.unwrap(), Released::Released);
        let refused = deposit_by(way, &mut db, &payment(1), token).await;
        assert!(matches!(refused, Err(DepositError::Stale { .. })), "{refused:?}");
        assert_eq!(contents(&mut db).await, (0, vec![]));
    });
}

#[test]
fn payment_that_is_repeated_is_deposited_once() {
    both_ways(async |way, server, flock| {
        let mut db = connect(&url(&server)).await.unwrap();
        let (payment, guard) = (payment(20), held(&flock).await);
        for _ in 0..2 {
            deposit_by(way, &mut db, &payment, guard.token()).await.unwrap();
        }
        // The connection watches nothing any more: the next transaction is carried out, whatever is touched.
        deposit_by(way, &mut db, &self::payment(3), guard.token()).await.unwrap();
        assert_eq!(contents(&mut db).await, (23, vec![20, 3]));
    });
}

#[test]
fn several_writes_under_one_hold_are_accepted() {
    both_ways(async |way, server, flock| {
        let mut db = connect(&url(&server)).await.unwrap();
        for _ in 0..2 {
            let guard = held(&flock).await;
            for _ in 0..3 {
                deposit_by(way, &mut db, &payment(5), guard.token()).await.unwrap();
            }
            assert_eq!(guard.release().await.unwrap(), Released::Released);
        }
        assert_eq!(contents(&mut db).await, (30, vec![5; 6]));
    });
}

#[test]
fn writes_go_on_while_the_lease_is_renewed() {
    // Each renewal touches the key, and EXEC answers nil to who watches it: no reason to be refused. Thousands of times as often as a
    // lease asks for it, yet not so often that no EXEC would ever come through.
    on(async |server, flock| {
        let mut db = connect(&url(&server)).await.unwrap();
        let guard = held(&flock).await;
        let token = guard.token();
        let writing = async {
            for _ in 0..300 {
                deposit_in_transaction(&mut db, LOCK, &payment(1), token).await.unwrap();
            }
        };
        let renewing = async {
            for _ in 0..300 {
                guard.renew().await.unwrap();
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::join!(writing, renewing);
        assert_eq!(contents(&mut db).await, (300, vec![1; 300]));
    });
}

#[test]
fn nothing_is_written_once_the_hold_has_ended() {
    both_ways(async |way, server, flock| {
        let mut admin = connect(&url(&server)).await.unwrap();
        for _ in 0..30 {
            let guard = held(&flock).await;
            let (mut db, token) = (connect(&url(&server)).await.unwrap(), guard.token());
            let before = contents(&mut admin).await.0;
            let writing =
                tokio::spawn(async move { while deposit_by(way, &mut db, &payment(1), token).await.is_ok() {} });
            while contents(&mut admin).await.0 == before {}
            // In the middle of a deposit, most likely: what is the balance in the instant in which the hold ends?
            let mut ending = redis::pipe();
            ending.atomic().cmd("FLOCK.REVOKE").arg(LOCK).cmd("GET").arg(format!("{ACCOUNT}:cents"));
            let (ended, balance): (i64, i64) = ending.query_async(&mut admin).await.unwrap();
            writing.await.unwrap();
            assert_eq!((ended, contents(&mut admin).await.0), (1, balance));
        }
    });
}

/// The hold ends between the check and EXEC, in a way that the key sees.
async fn exec_after(end: impl AsyncFnOnce(&Server, Guard), server: Server, guard: Guard) {
    let mut db = connect(&url(&server)).await.unwrap();
    let token = guard.token().get();
    redis::cmd("WATCH").arg(LOCK).exec_async(&mut db).await.unwrap();
    assert!(redis::cmd("FLOCK.CHECK").arg(LOCK).arg(token).query_async::<bool>(&mut db).await.unwrap());
    end(&server, guard).await;
    let mut write = redis::pipe();
    write.atomic().incr("cents", 1);
    let outcome: redis::Value = write.query_async(&mut db).await.unwrap();
    assert_eq!(outcome, redis::Value::Nil, "EXEC must be refused");
    assert_eq!(db.get("cents").await.unwrap(), None);
}

#[test]
fn whatever_ends_the_hold_before_exec_refuses_it() {
    on(async |server, flock| {
        let guard = held(&flock).await;
        exec_after(async |_, guard| assert_eq!(guard.release().await.unwrap(), Released::Released), server, guard)
            .await;
    });
    on(async |server, flock| {
        let guard = held(&flock).await;
        exec_after(async |server, _guard| revoke(server), server, guard).await;
    });
    on(async |server, flock| {
        let guard = flock.lock(LOCK).lease(Duration::from_millis(300)).keep_alive(false).await.unwrap();
        exec_after(
            async |_, guard| {
                guard.lost().await;
                tokio::time::sleep(Duration::from_millis(100)).await; // the margin
            },
            server,
            guard,
        )
        .await;
    });
    on(async |server, flock| {
        // Handed over: the key exists all the while.
        let guard = held(&flock).await;
        let next = tokio::spawn(async move { held(&flock).await });
        exec_after(
            async |_, guard| {
                assert_eq!(guard.release().await.unwrap(), Released::Released);
                std::mem::forget(next.await.unwrap());
            },
            server,
            guard,
        )
        .await;
    });
}

#[test]
fn paused_holder_is_refused() {
    on(async |server, flock| {
        let url = url(&server);
        let mut db = connect(&url).await.unwrap();
        // The next holder writes nothing: being held is enough.
        paused_program_is_refused(&flock, env!("CARGO_BIN_EXE_fenced_valkey"), &[&url], async |_next| {}).await;
        assert_eq!(contents(&mut db).await, (0, vec![]));
    });
}
