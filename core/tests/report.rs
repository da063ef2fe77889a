//! What INFO and LIST say, as text.

use std::fmt::Write;

use flock_core::lock::Start;
use flock_core::table::Caller;
use flock_core::token::WallClock;
use flock_core::wire::command::{Info, List};
use flock_core::wire::report::{self, Reply};
use flock_core::{
    Acquire, Acquired, Change, Deaf, Grant, Limits, LockId, Millis, Mode, Owner, Place, Table, Time, Token, Wait,
};

const LEASE: Millis = Millis(1000);

/// One value after the other; a map in braces and an array in brackets, with what they say they hold.
#[derive(Default)]
struct Text {
    said: String,
    /// For each array or map that is open: what is owed, and how it ends.
    open: Vec<(usize, char)>,
}

impl Text {
    fn value(&mut self, text: &str) {
        self.said += text;
        self.said.push(' ');
        while let Some((owed, end)) = self.open.last_mut() {
            *owed -= 1;
            if *owed > 0 {
                return;
            }
            self.said.push(*end);
            self.said.push(' ');
            self.open.pop();
        }
    }

    fn open(&mut self, begin: char, len: usize, end: char) {
        if len == 0 {
            return self.value(&format!("{begin}{end}"));
        }
        write!(self.said, "{begin} ").expect("into a string");
        self.open.push((len, end));
    }
}

impl Reply for Text {
    fn nil(&mut self) {
        self.value("nil");
    }

    fn integer(&mut self, number: u64) {
        self.value(&number.to_string());
    }

    fn bulk(&mut self, bytes: &[u8]) {
        self.value(&if bytes.is_empty() { "''".into() } else { bytes.escape_ascii().to_string() });
    }

    fn array(&mut self, len: usize) {
        self.open('[', len, ']');
    }

    fn map(&mut self, len: usize) {
        self.open('{', 2 * len, '}');
    }
}

fn at(ms: u64) -> Time {
    Time::from_us(ms * 1000)
}

fn started() -> Table {
    let mut table = Table::new(Limits::DEFAULT);
    let _mark = table.promoted(Time::ZERO, WallClock::from_unix_us(0), Millis(0));
    table
}

/// The lock that this is granted or queued at.
fn ask(table: &mut Table, now: Time, lock: Option<LockId>, request: &Acquire<'_>) -> Option<LockId> {
    let place = Place { db: 0, key: request.key, lock };
    let decision = table.acquire(now, place, request, Caller::default(), &mut Deaf);
    assert!(matches!(decision.answer, Ok(Acquired::Granted(_) | Acquired::Queued { .. })), "{:?}", decision.answer);
    decision.lock
}

fn first_token(table: &Table, lock: Option<LockId>) -> Token {
    let lock = lock.and_then(|lock| table.lock(lock)).expect("the lock is there");
    lock.holds().next().expect("it is held").token
}

fn info(table: &Table, key: &str, lock: Option<LockId>, limit: u32, now: Time) -> String {
    let mut text = Text::default();
    let request = Info { key: key.as_bytes(), limit };
    report::info(&mut text, table, Place { db: 0, key: key.as_bytes(), lock }, &request, now);
    assert!(text.open.is_empty(), "it owes something");
    text.said.trim_end().to_owned()
}

fn list(table: &Table, db: u16, request: &List<'_>, may_see: impl Fn(&[u8]) -> bool) -> String {
    let mut text = Text::default();
    report::list(&mut text, table, db, request, may_see, at(400));
    assert!(text.open.is_empty(), "it owes something");
    text.said.trim_end().to_owned()
}

/// The cursor, and the names on the page.
fn page(table: &Table, request: &List<'_>) -> (u32, Vec<String>) {
    let said = list(table, 0, request, |_| true);
    let mut words = said.split(' ').skip(1);
    let cursor = words.next().and_then(|word| word.parse().ok()).expect("a cursor");
    let words: Vec<&str> = words.collect();
    (cursor, words.windows(2).filter(|pair| pair[0] == "key").map(|pair| pair[1].to_owned()).collect())
}

const ALL: List<'_> = List { cursor: 0, count: 100, pattern: None, owner: None };

#[test]
fn info_shows_holders_and_waiters_in_order() {
    let mut table = started();
    assert_eq!(info(&table, "k", None, 10, at(0)), "nil");
    let first = Acquire { label: Some(b"host 1"), id: Some(b"i"), ..Acquire::new(b"k", b"a", LEASE) };
    let lock = ask(&mut table, at(0), None, &first);
    let waits = |owner, wait| Acquire {
        wait: Wait::Queue(Millis(wait)),
        channel: Some(b"c"),
        ..Acquire::new(b"k", owner, LEASE)
    };
    ask(&mut table, at(100), lock, &Acquire { mode: Mode::Shared, label: Some(b"x"), ..waits(b"b", 5000) });
    ask(&mut table, at(200), lock, &waits(b"c", 5000));
    let token = first_token(&table, lock).get();
    let holders = format!(
        "holder_count 1 waiter_count 2 grace_left_ms 0 holders [ {{ owner a token {token} state held lease_ms 1000 left_ms 600 \
         held_ms 400 label host 1 ids [ i ] }} ]"
    );
    let b = "{ owner b mode shared position 1 waiting_ms 300 label x }";
    let c = "{ owner c mode exclusive position 2 waiting_ms 200 label '' }";
    assert_eq!(info(&table, "k", lock, 10, at(400)), format!("{{ mode exclusive {holders} waiters [ {b} {c} ] }}"));
    assert_eq!(info(&table, "k", lock, 1, at(400)), format!("{{ mode exclusive {holders} waiters [ {b} ] }}"));
    assert_eq!(info(&table, "k", lock, 0, at(400)), format!("{{ mode exclusive {holders} waiters [] }}"));
    // Nobody has ended it yet, as in a pause.
    assert!(info(&table, "k", lock, 0, at(1001)).contains("state expired lease_ms 1000 left_ms 0 held_ms 1001"));
}

#[test]
fn info_tells_a_claim_from_a_hold_and_how_long_nothing_is_granted() {
    let mut table = started();
    let claim = Acquire { claim: Some(Millis(50)), mode: Mode::Shared, ..Acquire::new(b"k", b"a", LEASE) };
    let lock = ask(&mut table, at(0), None, &claim);
    let said = info(&table, "k", lock, 0, at(10));
    assert!(said.starts_with("{ mode shared ") && said.contains("state claimed lease_ms 1000 left_ms 40"), "{said}");
    let _mark = table.promoted(at(10), WallClock::from_unix_us(0), Millis(300));
    assert!(info(&table, "k", lock, 0, at(110)).contains("grace_left_ms 200"));
}

/// Its lease begins when the server has loaded everything.
#[test]
fn what_is_being_loaded_has_all_of_its_lease() {
    let mut table = Table::new(Limits::DEFAULT);
    let grant = Grant {
        owner: Owner::new(b"o"),
        mode: Mode::Exclusive,
        token: Token::MIN,
        lease: LEASE,
        deadline: None,
        terms: None,
    };
    let lock = table.apply(Place { db: 0, key: b"k", lock: None }, &Change::Grant(grant), Start::AfterLoading).lock;
    assert!(info(&table, "k", lock, 0, at(400)).contains("lease_ms 1000 left_ms 1000"));
    assert!(list(&table, 0, &ALL, |_| true).contains("left_ms 1000"));
}

#[test]
fn list_shows_the_earliest_holder_of_each_lock() {
    let mut table = started();
    let shared = |owner| Acquire { mode: Mode::Shared, ..Acquire::new(b"k", owner, LEASE) };
    let lock = ask(&mut table, at(0), None, &shared(b"a"));
    ask(&mut table, at(300), lock, &shared(b"b"));
    ask(
        &mut table,
        at(300),
        lock,
        &Acquire { wait: Wait::Queue(LEASE), channel: Some(b"c"), ..Acquire::new(b"k", b"w", LEASE) },
    );
    let token = first_token(&table, lock).get();
    let shown =
        format!("[ 0 [ {{ key k mode shared holder_count 2 waiter_count 1 owner a token {token} left_ms 600 }} ] ]");
    assert_eq!(list(&table, 0, &ALL, |_| true), shown);
    assert_eq!(list(&table, 0, &List { owner: Some(b"b"), ..ALL }, |_| true), shown);
    let none = "[ 0 [] ]";
    assert_eq!(list(&table, 0, &List { owner: Some(b"w"), ..ALL }, |_| true), none, "who waits holds nothing");
    assert_eq!(list(&table, 0, &List { pattern: Some(b"x*"), ..ALL }, |_| true), none);
    assert_eq!(list(&table, 0, &ALL, |key| key != b"k"), none, "not for this user");
    assert_eq!(list(&table, 1, &ALL, |_| true), none, "in another database");
}

#[test]
fn pages_of_a_list_show_each_lock_once() {
    let mut table = started();
    let keys: Vec<String> = (0..100).map(|number| format!("k{number}")).collect();
    for key in &keys {
        ask(&mut table, at(0), None, &Acquire::new(key.as_bytes(), b"o", LEASE));
    }
    for count in [1, 7, 100, 1000] {
        let (mut seen, mut cursor) = (Vec::new(), 0);
        loop {
            let (next, names) = page(&table, &List { cursor, count, ..ALL });
            assert!(names.len() <= count as usize);
            seen.extend(names);
            if next == 0 {
                break;
            }
            assert!(next > cursor);
            cursor = next;
        }
        assert_eq!(seen, keys, "by {count}");
    }
    // It looks at ten places for each that it was asked for, and goes on from there.
    let found_nothing = page(&table, &List { count: 3, pattern: Some(b"k99"), ..ALL });
    assert_eq!(found_nothing, (30, vec![]));
    assert_eq!(page(&table, &List { cursor: 90, count: 3, pattern: Some(b"k99"), ..ALL }), (0, vec!["k99".to_owned()]));
}
