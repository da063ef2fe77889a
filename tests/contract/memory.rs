//! What locks cost, that the server knows of it, and that nothing stays.

use flock_tests::args;
use flock_tests::cpu::used_memory;
use flock_tests::on_own_servers;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Conn, Protocol};
use flock_tests::server::{Builder, Server};
use flock_tests::wait::wait_until;

use crate::scene::{LEASE_MS, hold, long_tier, release, waiter};

on_own_servers![
    held_locks_count_in_used_memory,
    memory_usage_tells_what_a_lock_takes,
    nothing_is_left_of_a_released_name,
    nothing_is_left_of_an_expired_name,
    nothing_is_left_of_a_waiter,
    policy_that_evicts_locks_is_warned_of,
    policy_that_spares_locks_is_not_warned_of,
    server_out_of_memory_makes_no_new_locks,
    server_out_of_memory_gives_back_and_hands_over,
    evicted_lock_is_still_held,
];

/// Takes `count` locks of different names, and gives each back at once if `release`.
#[track_caller]
fn take(conn: &mut Conn, count: u32, lease_ms: u32, release: bool) {
    let script = "for i = ARGV[1], ARGV[2] do \
                  redis.call('FLOCK.ACQUIRE', 'name ' .. i, 'alice', ARGV[3]) \
                  if ARGV[4] == '1' then redis.call('FLOCK.RELEASE', 'name ' .. i, 'alice') end end";
    for first in (1..=count).step_by(10_000) {
        let last = count.min(first + 9_999);
        let reply = conn.cmd(&args!["EVAL", script, 0, first, last, lease_ms, i32::from(release)]);
        assert!(reply.is_nil(), "{reply}");
    }
}

fn held_locks_count_in_used_memory(builder: Builder) {
    // Memory from another allocator than the server's would be invisible to `maxmemory`. A lock takes 104 bytes beside its key.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let before = used_memory(&mut conn);
    take(&mut conn, 20_000, 600_000, false);
    let used = used_memory(&mut conn) - before;
    assert!((20_000 * 150..20_000 * 600).contains(&used), "{used}");
}

fn memory_usage_tells_what_a_lock_takes(builder: Builder) {
    // MEMORY USAGE must follow what is stored: a long owner and a label are more, a hundred holders much more.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    hold(&mut conn, "plain", "alice");
    let long = "x".repeat(250);
    conn.cmd(&args!["FLOCK.ACQUIRE", "big", long, LEASE_MS, "LABEL", long]).as_token();
    for number in 0..100 {
        conn.cmd(&args!["FLOCK.ACQUIRE", "many", format!("owner {number}"), LEASE_MS, "SHARED"]).as_token();
    }
    let [plain, big, many] = ["plain", "big", "many"].map(|key| conn.cmd(&args!["MEMORY", "USAGE", key]).as_int());
    assert!((100..600).contains(&plain), "{plain}");
    assert!((plain + 500..plain + 1500).contains(&big), "{plain} {big}");
    assert!((100 * 80..100 * 1000).contains(&many), "{many}");
}

fn nothing_is_left_of_a_released_name(builder: Builder) {
    // Report of every counter-per-key design: one key per name for ever. A hundred thousand names, and the memory of before.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    take(&mut conn, 1000, 60_000, true);
    let before = used_memory(&mut conn);
    take(&mut conn, if long_tier() { 1_000_000 } else { 100_000 }, 60_000, true);
    let after = used_memory(&mut conn);
    assert_eq!(conn.cmd(&["DBSIZE"]), Reply::Int(0));
    assert!(after < before + 200_000, "{before} {after}");
}

fn nothing_is_left_of_an_expired_name(builder: Builder) {
    // The same where nobody gives anything back, and the table was large for a while.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    take(&mut conn, 1000, 1, false);
    wait_until("all have ended", ANSWER_WITHIN, || conn.cmd(&["DBSIZE"]) == Reply::Int(0));
    let before = server.info("flock").number("flock_table_bytes");
    take(&mut conn, 50_000, 1, false);
    wait_until("all have ended", ANSWER_WITHIN, || conn.cmd(&["DBSIZE"]) == Reply::Int(0));
    let after = server.info("flock").number("flock_table_bytes");
    assert!(after < before + 200_000, "{before} {after}");
}

fn nothing_is_left_of_a_waiter(builder: Builder) {
    // A waiter that came and went, a thousand times, in each of three ways.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    hold(&mut conn, "k", "alice");
    let mut before = 0;
    for round in 0..1000 {
        if round == 100 {
            before = used_memory(&mut conn);
        }
        let owner = format!("owner {round}");
        assert!(conn.cmd(&args!["FLOCK.ACQUIRE", "k", owner, LEASE_MS, "BLOCK", 1]).is_nil());
        let queue = args!["FLOCK.ACQUIRE", "k", owner, LEASE_MS, "QUEUE", LEASE_MS, "CHANNEL", owner];
        assert_eq!(conn.cmd(&queue).as_array()[0], Reply::bulk("QUEUED"));
        release(&mut conn, "k", &owner);
    }
    let after = used_memory(&mut conn);
    assert!(after < before + 200_000, "{before} {after}");
    assert_eq!(server.info("flock").number("flock_waiters"), 0);
}

fn policy_that_evicts_locks_is_warned_of(builder: Builder) {
    // Under an allkeys policy the server throws locks away when memory is short: the operator must hear of it at the start, and
    // when the policy is set later.
    let warning = "may evict held locks";
    let early = builder.clone().config("maxmemory-policy", "allkeys-lru").start();
    assert!(early.log().contains(warning), "{}", early.log());
    let evictable = |server: &Server| server.info("flock").number("flock_evictable");
    assert_eq!(evictable(&early), 1);
    let late = builder.start();
    assert!(!late.log().contains(warning), "{}", late.log());
    let set = |policy| late.connect(Protocol::Resp2).cmd(&args!["CONFIG", "SET", "maxmemory-policy", policy]);
    assert_eq!((evictable(&late), set("allkeys-random")), (0, Reply::ok()));
    wait_until("it is logged", ANSWER_WITHIN, || late.log().contains(warning));
    assert_eq!((evictable(&late), set("noeviction"), evictable(&late)), (1, Reply::ok(), 0));
}

fn policy_that_spares_locks_is_not_warned_of(builder: Builder) {
    // Locks have no expiry of their own: a volatile policy does not touch them. A warning for nothing is soon overlooked.
    let server = builder.config("maxmemory-policy", "volatile-lru").start();
    assert!(!server.log().contains("evict"), "{}", server.log());
}

/// Lets the server be above its limit.
#[track_caller]
fn run_out(conn: &mut Conn) {
    assert_eq!(conn.cmd(&["CONFIG", "SET", "maxmemory-policy", "noeviction", "maxmemory", "1"]), Reply::ok());
}

fn server_out_of_memory_makes_no_new_locks(builder: Builder) {
    // G6. The server's own error; nothing was granted.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    run_out(&mut conn);
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", LEASE_MS]).error_code(), Some("OOM"));
    assert_eq!(conn.cmd(&["EXISTS", "k"]), Reply::Int(0));
}

fn server_out_of_memory_gives_back_and_hands_over(builder: Builder) {
    // G6. Whatever keeps a hold, or ends it, must work: a holder that cannot renew would lose its lock to a full memory.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let token = hold(&mut conn, "k", "alice");
    hold(&mut conn, "other", "alice");
    let mut next = waiter(&server, Protocol::Resp2, "k", "bob");
    run_out(&mut conn);
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", "k", "alice", LEASE_MS]), Reply::Int(1));
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(1));
    release(&mut conn, "k", "alice");
    next.recv().as_token();
    assert_eq!(conn.cmd(&["FLOCK.REVOKE", "other"]), Reply::Int(1));
}

fn evicted_lock_is_still_held(builder: Builder) {
    // Nobody has given the lock back: its holder was promised a lease, and the token must still be good.
    let server = builder.start();
    let mut conn = server.connect(Protocol::Resp2);
    let token = hold(&mut conn, "k", "alice");
    let limit = used_memory(&mut conn) + 500_000;
    let policy = args!["CONFIG", "SET", "maxmemory-policy", "allkeys-random", "maxmemory", limit];
    assert_eq!(conn.cmd(&policy), Reply::ok());
    for number in 0..2000 {
        conn.cmd(&args!["SET", format!("filler {number}"), "x".repeat(1000)]);
        assert_eq!(conn.cmd(&args!["FLOCK.CHECK", "k", token]), Reply::Int(1), "after {number}");
    }
    assert!(server.info("stats").number("evicted_keys") > 100);
}
