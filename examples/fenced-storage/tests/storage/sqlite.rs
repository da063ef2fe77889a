//! SQLite, in a file of its own for each test that has two connections, else in memory.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use fenced_storage::sqlite::{deposit, open};
use flock_client::{Guard, Released};
use rusqlite::{Connection, TransactionBehavior};

use crate::scene::{assert_stale, held, on, paused_program_is_refused, payment, stale_and_current, url};

/// A folder with a database file, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("fenced-sqlite-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).expect("cannot make a folder");
        Folder(path)
    }

    fn file(&self) -> PathBuf {
        self.0.join("bank.sqlite")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The balance, the highest token, and what was entered in the book, in order.
fn contents(db: &Connection) -> (i64, i64, Vec<i64>) {
    let account = db.query_row("SELECT cents, fence FROM accounts", [], |row| Ok((row.get(0)?, row.get(1)?)));
    let mut entries = db.prepare("SELECT cents FROM entries ORDER BY number").unwrap();
    let entries = entries.query_map([], |row| row.get(0)).unwrap().collect::<Result<_, _>>().unwrap();
    let (cents, fence) = account.unwrap();
    (cents, fence, entries)
}

fn fence(guard: &Guard) -> i64 {
    i64::try_from(guard.token().get()).unwrap()
}

#[test]
fn stale_holder_is_refused() {
    on(async |server, flock| {
        let mut db = open(":memory:").unwrap();
        let (stale, current) = stale_and_current(&server, &flock).await;
        deposit(&mut db, &payment(20), current.token()).unwrap();
        for _ in 0..2 {
            assert_stale(deposit(&mut db, &payment(1), stale.token()), &stale);
            assert_eq!(contents(&db), (20, fence(&current), vec![20]));
        }
        deposit(&mut db, &payment(300), current.token()).unwrap();
        assert_eq!(contents(&db), (320, fence(&current), vec![20, 300]));
    });
}

#[test]
fn payment_that_is_repeated_is_deposited_once() {
    on(async |_server, flock| {
        let mut db = open(":memory:").unwrap();
        let (payment, guard) = (payment(20), held(&flock).await);
        for _ in 0..2 {
            deposit(&mut db, &payment, guard.token()).unwrap();
        }
        assert_eq!(guard.release().await.unwrap(), Released::Released);
        let next = held(&flock).await;
        deposit(&mut db, &payment, next.token()).unwrap();
        assert_eq!(contents(&db), (20, fence(&next), vec![20]));
    });
}

#[test]
fn several_writes_under_one_hold_are_accepted() {
    on(async |_server, flock| {
        let mut db = open(":memory:").unwrap();
        let mut last = 0;
        for _ in 0..2 {
            let guard = held(&flock).await;
            for _ in 0..3 {
                deposit(&mut db, &payment(5), guard.token()).unwrap();
            }
            assert!(fence(&guard) > last);
            last = fence(&guard);
            assert_eq!(guard.release().await.unwrap(), Released::Released);
        }
        assert_eq!(contents(&db), (30, last, vec![5; 6]));
    });
}

#[test]
fn transactions_never_interleave() {
    on(async |server, flock| {
        let folder = Folder::new();
        let (mut a, mut b) = (open(folder.file()).unwrap(), open(folder.file()).unwrap());
        let (stale, current) = stale_and_current(&server, &flock).await;
        // Somebody writes. The next holder waits, is first, and the stale one comes after it.
        let writing = a.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        let token = current.token();
        let second = std::thread::spawn(move || {
            let deposited = deposit(&mut b, &payment(20), token);
            (b, deposited)
        });
        flock_tests::wait::let_pass(std::time::Duration::from_millis(50));
        assert!(!second.is_finished(), "two write at once");
        writing.commit().unwrap();
        let (b, deposited) = second.join().unwrap();
        deposited.unwrap();
        assert_stale(deposit(&mut a, &payment(1), stale.token()), &stale);
        assert_eq!(contents(&b), (20, fence(&current), vec![20]));
    });
}

#[test]
fn paused_holder_is_refused() {
    on(async |server, flock| {
        let folder = Folder::new();
        let mut db = open(folder.file()).unwrap();
        let (url, file, mut fenced) = (url(&server), folder.file(), 0);
        let args = [&url[..], file.to_str().unwrap()];
        paused_program_is_refused(&flock, env!("CARGO_BIN_EXE_fenced_sqlite"), &args, async |next| {
            deposit(&mut db, &payment(20), next.token()).unwrap();
            fenced = fence(next);
        })
        .await;
        assert_eq!(contents(&db), (20, fenced, vec![20]));
    });
}
