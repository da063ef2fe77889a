//! PostgreSQL.

use fenced_storage::postgres::{connect, deposit};
use fenced_storage::{ACCOUNT, DepositError};
use flock_client::{Guard, Released};
use tokio_postgres::Client;

use crate::postgres_server::database;
use crate::scene::{
    Program, SOON, assert_stale, held, on, paused_program_is_refused, payment, revoke, stale_and_current, url,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_fenced_postgres");

/// The balance, the highest token, and what was entered in the book, in order.
async fn contents(db: &Client) -> (i64, i64, Vec<i64>) {
    let account = db.query_one("SELECT cents, fence FROM accounts WHERE name = $1", &[&ACCOUNT]).await.unwrap();
    let entries = db.query("SELECT cents FROM entries ORDER BY number", &[]).await.unwrap();
    (account.get(0), account.get(1), entries.iter().map(|row| row.get(0)).collect())
}

fn fence(guard: &Guard) -> i64 {
    i64::try_from(guard.token().get()).unwrap()
}

/// Waits until so many statements wait for a lock of the database.
async fn until_waiting(db: &Client, statements: i64) {
    let waiting =
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let all_wait = async {
        while db.query_one(waiting, &[]).await.unwrap().get::<_, i64>(0) != statements {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(SOON, all_wait).await.expect("the statements should wait");
}

#[test]
fn stale_holder_is_refused() {
    on(async |server, flock| {
        let params = database().await;
        let (mut a, mut b) = (connect(&params).await.unwrap(), connect(&params).await.unwrap());
        let (stale, current) = stale_and_current(&server, &flock).await;
        deposit(&mut b, &payment(20), current.token()).await.unwrap();
        assert_stale(deposit(&mut a, &payment(1), stale.token()).await, &stale);
        assert_eq!(contents(&a).await, (20, fence(&current), vec![20]));
        // Not by bad luck: it is refused for good, and its connection still serves.
        assert_stale(deposit(&mut a, &payment(1), stale.token()).await, &stale);
        deposit(&mut a, &payment(300), current.token()).await.unwrap();
        assert_eq!(contents(&b).await, (320, fence(&current), vec![20, 300]));
    });
}

#[test]
fn payment_that_is_repeated_is_deposited_once() {
    on(async |_server, flock| {
        let mut db = connect(&database().await).await.unwrap();
        let (payment, guard) = (payment(20), held(&flock).await);
        for _ in 0..2 {
            deposit(&mut db, &payment, guard.token()).await.unwrap();
        }
        assert_eq!(guard.release().await.unwrap(), Released::Released);
        // Lost and acquired anew; from then on the old token is refused, though nothing had to be added.
        let next = held(&flock).await;
        deposit(&mut db, &payment, next.token()).await.unwrap();
        assert_eq!(contents(&db).await, (20, fence(&next), vec![20]));
    });
}

#[test]
fn several_writes_under_one_hold_are_accepted() {
    on(async |_server, flock| {
        let mut db = connect(&database().await).await.unwrap();
        let mut last = 0;
        for _ in 0..2 {
            let guard = held(&flock).await;
            for _ in 0..3 {
                deposit(&mut db, &payment(5), guard.token()).await.unwrap();
            }
            assert!(fence(&guard) > last);
            last = fence(&guard);
            assert_eq!(guard.release().await.unwrap(), Released::Released);
        }
        assert_eq!(contents(&db).await, (30, last, vec![5; 6]));
    });
}

#[test]
fn stale_holder_that_waits_for_the_row_is_judged_by_what_it_becomes() {
    on(async |server, flock| {
        let params = database().await;
        let (mut a, mut b) = (connect(&params).await.unwrap(), connect(&params).await.unwrap());
        let (watcher, blocker) = (connect(&params).await.unwrap(), connect(&params).await.unwrap());
        let first = held(&flock).await;
        deposit(&mut a, &payment(4000), first.token()).await.unwrap();
        assert_eq!(first.release().await.unwrap(), Released::Released);
        let (stale, current) = stale_and_current(&server, &flock).await;
        // The current holder is past its fence, and has not committed.
        blocker.batch_execute("BEGIN; LOCK TABLE entries").await.unwrap();
        let token = current.token();
        let writing = tokio::spawn(async move { deposit(&mut b, &payment(20), token).await });
        until_waiting(&watcher, 1).await;
        // When the stale one asks for the row, the row still has the fence of the first.
        let token = stale.token();
        let late = tokio::spawn(async move { deposit(&mut a, &payment(1), token).await });
        until_waiting(&watcher, 2).await;
        blocker.batch_execute("COMMIT").await.unwrap();
        writing.await.unwrap().unwrap();
        assert_stale(late.await.unwrap(), &stale);
        assert_eq!(contents(&watcher).await, (4020, fence(&current), vec![4000, 20]));
    });
}

#[test]
fn transactions_never_interleave() {
    on(async |server, flock| {
        let params = database().await;
        let (mut a, mut b) = (connect(&params).await.unwrap(), connect(&params).await.unwrap());
        let (watcher, blocker) = (connect(&params).await.unwrap(), connect(&params).await.unwrap());
        let stale = held(&flock).await;
        // It is past its fence, and has not committed.
        blocker.batch_execute("BEGIN; LOCK TABLE entries").await.unwrap();
        let token = stale.token();
        let first = tokio::spawn(async move { deposit(&mut a, &payment(1), token).await });
        until_waiting(&watcher, 1).await;
        revoke(&server);
        let current = held(&flock).await;
        let token = current.token();
        let second = tokio::spawn(async move { deposit(&mut b, &payment(20), token).await });
        until_waiting(&watcher, 2).await; // the next holder waits for its row
        blocker.batch_execute("COMMIT").await.unwrap();
        first.await.unwrap().unwrap();
        second.await.unwrap().unwrap();
        // The first came before the second in all it wrote: as if it had been done while it held the lock.
        assert_eq!(contents(&watcher).await, (21, fence(&current), vec![1, 20]));
    });
}

#[test]
fn paused_holder_is_refused() {
    on(async |server, flock| {
        let params = database().await;
        let mut db = connect(&params).await.unwrap();
        let (url, mut fenced) = (url(&server), 0);
        paused_program_is_refused(&flock, PROGRAM, &[&url, &params], async |next| {
            deposit(&mut db, &payment(20), next.token()).await.unwrap();
            fenced = fence(next);
        })
        .await;
        assert_eq!(contents(&db).await, (20, fenced, vec![20]));
    });
}

#[test]
fn holder_paused_inside_its_transaction_does_not_hold_up_the_next() {
    on(async |server, flock| {
        let params = database().await;
        let mut db = connect(&params).await.unwrap();
        let (watcher, blocker) = (connect(&params).await.unwrap(), connect(&params).await.unwrap());
        let mut paused = Program::holding(PROGRAM, &[&url(&server), &params]);
        blocker.batch_execute("BEGIN; LOCK TABLE entries").await.unwrap();
        paused.tell_to_deposit();
        until_waiting(&watcher, 1).await;
        paused.pause(); // past its fence: it will never see the reply to its last statement
        blocker.batch_execute("COMMIT").await.unwrap();
        let next = held(&flock).await;
        deposit(&mut db, &payment(20), next.token()).await.unwrap(); // the database has ended the other's transaction
        paused.resume();
        assert_eq!(paused.line(), "", "its COMMIT has failed");
        assert!(!paused.succeeds());
        assert_eq!(contents(&db).await, (20, fence(&next), vec![20]));
    });
}

#[test]
fn database_that_is_away_is_no_stale_token() {
    on(async |_server, flock| {
        let mut db = connect(&database().await).await.unwrap();
        let guard = held(&flock).await;
        let ended = db.execute("SELECT pg_terminate_backend(pg_backend_pid())", &[]).await;
        assert!(ended.is_err());
        let failed = deposit(&mut db, &payment(1), guard.token()).await;
        assert!(matches!(failed, Err(DepositError::Storage(_))), "{failed:?}");
    });
}
