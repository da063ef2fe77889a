//! CLAIM: a grant that lasts only until somebody proves that it arrived.

use flock_tests::args;
use flock_tests::on_shared_servers;
use flock_tests::reply::Reply;
use flock_tests::resp::{ANSWER_WITHIN, Protocol};
use flock_tests::server::{Server, unique_key};
use flock_tests::wait::wait_until;

use crate::lock_view::{holder, holders, left_ms, waiting};

on_shared_servers![
    claimed_grant_lasts_the_claim,
    claimed_grant_is_shown_as_claimed,
    unconfirmed_grant_ends_with_its_claim,
    renewal_with_the_token_confirms,
    confirmed_hold_lasts_the_renewed_lease,
    renewal_without_the_token_does_not_confirm,
    renewal_with_a_wrong_token_does_not_confirm,
    repeated_request_does_not_confirm,
    repeated_request_does_not_prolong_the_claim,
    conversion_does_not_confirm,
    claim_as_long_as_the_lease_is_accepted,
    claim_of_a_confirmed_hold_changes_nothing,
    token_of_a_claimed_grant_is_current,
    claimed_grant_can_be_released,
    waiter_is_granted_under_its_claim,
    dead_waiter_costs_its_claim,
];

fn claimed_grant_lasts_the_claim(server: &Server, protocol: Protocol) {
    // claim_ms, not lease_ms: otherwise a grant that nobody received costs a whole lease.
    let key = unique_key("claim");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000, "CLAIM", 60_000]).as_token();
    let left = left_ms(&mut conn, &key, "alice");
    assert!((30_000..=60_000).contains(&left), "{left}");
}

fn claimed_grant_is_shown_as_claimed(server: &Server, protocol: Protocol) {
    // An operator must see why a hold is about to end though its lease is long.
    let key = unique_key("shown");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000, "CLAIM", 60_000]).as_token();
    let hold = holder(&mut conn, &key, "alice");
    assert_eq!(hold.field("state").as_str(), "claimed");
    assert_eq!(hold.field("lease_ms"), &Reply::Int(600_000));
    conn.cmd(&args!["FLOCK.RENEW", key, "alice", 600_000, "TOKEN", token]);
    assert_eq!(holder(&mut conn, &key, "alice").field("state").as_str(), "held");
}

fn unconfirmed_grant_ends_with_its_claim(server: &Server, protocol: Protocol) {
    // A request delivered late from a dead connection costs claim_ms, not a lease.
    let key = unique_key("unconfirmed");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000, "CLAIM", 20]).as_token();
    wait_until("the claim is over", ANSWER_WITHIN, || conn.cmd(&args!["EXISTS", key]) == Reply::Int(0));
}

fn renewal_with_the_token_confirms(server: &Server, protocol: Protocol) {
    // Who knows the token has received the grant: from now on the lease counts. Another hold tells when the claim is over.
    let (key, other) = (unique_key("confirmed"), unique_key("as long as the claim"));
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000, "CLAIM", 600_000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", key, "alice", 60_000, "TOKEN", token]), Reply::Int(1));
    conn.cmd(&args!["FLOCK.ACQUIRE", other, "alice", 600_000, "CLAIM", 30]).as_token();
    wait_until("the other claim is over", ANSWER_WITHIN, || conn.cmd(&args!["EXISTS", other]) == Reply::Int(0));
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(1));
}

fn confirmed_hold_lasts_the_renewed_lease(server: &Server, protocol: Protocol) {
    // The confirmation's own lease_ms counts from now, as in any renewal.
    let key = unique_key("renewed");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000, "CLAIM", 60_000]).as_token();
    conn.cmd(&args!["FLOCK.RENEW", key, "alice", 300_000, "TOKEN", token]);
    let left = left_ms(&mut conn, &key, "alice");
    assert!((270_000..=300_000).contains(&left), "{left}");
}

fn renewal_without_the_token_does_not_confirm(server: &Server, protocol: Protocol) {
    // A keep-alive that only knows the owner proves nothing about the grant.
    let key = unique_key("no token");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000, "CLAIM", 60_000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", key, "alice", 600_000]), Reply::Int(1));
    let hold = holder(&mut conn, &key, "alice");
    assert_eq!(hold.field("state").as_str(), "claimed");
    assert!(hold.field("left_ms").as_int() <= 60_000, "{hold}");
}

fn renewal_with_a_wrong_token_does_not_confirm(server: &Server, protocol: Protocol) {
    // 0, and the claim goes on as it was.
    let key = unique_key("wrong token");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000, "CLAIM", 60_000]).as_token();
    let reply = conn.cmd(&args!["FLOCK.RENEW", key, "alice", 600_000, "TOKEN", token + 1]);
    assert_eq!(reply, Reply::Int(0));
    assert_eq!(holder(&mut conn, &key, "alice").field("state").as_str(), "claimed");
}

fn repeated_request_does_not_confirm(server: &Server, protocol: Protocol) {
    // The repetition may be the same bytes, sent again by a proxy: it proves no more than the first.
    let key = unique_key("again");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000, "CLAIM", 60_000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000, "CLAIM", 60_000]).as_token(), token);
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000]).as_token(), token);
    let hold = holder(&mut conn, &key, "alice");
    assert_eq!(hold.field("state").as_str(), "claimed");
    assert!(hold.field("left_ms").as_int() <= 60_000, "{hold}");
}

fn repeated_request_does_not_prolong_the_claim(server: &Server, protocol: Protocol) {
    // A client in a loop of lost replies would hold the lock for ever without knowing its token.
    let key = unique_key("loop");
    let mut conn = server.connect(protocol);
    let first = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000, "CLAIM", 50]).as_token();
    wait_until("a new grant is made though the request is repeated all the time", ANSWER_WITHIN, || {
        let again = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000, "CLAIM", 50]);
        again.as_token() > first
    });
}

fn conversion_does_not_confirm(server: &Server, protocol: Protocol) {
    // Only RENEW with the token confirms; after a conversion to exclusive, with the new one.
    let key = unique_key("converted");
    let mut conn = server.connect(protocol);
    let old = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000, "SHARED", "CLAIM", 60_000]).as_token();
    let new = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000, "CONVERT", old]).as_token();
    let hold = holder(&mut conn, &key, "alice");
    assert_eq!(hold.field("state").as_str(), "claimed");
    assert!(hold.field("left_ms").as_int() <= 60_000, "{hold}");
    assert_eq!(conn.cmd(&args!["FLOCK.RENEW", key, "alice", 600_000, "TOKEN", new]), Reply::Int(1));
    assert_eq!(holder(&mut conn, &key, "alice").field("state").as_str(), "held");
}

fn claim_as_long_as_the_lease_is_accepted(server: &Server, protocol: Protocol) {
    // The upper end of the range; longer is refused (`bad_input.rs`).
    let key = unique_key("equal");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000, "CLAIM", 60_000]).as_token();
    assert_eq!(holder(&mut conn, &key, "alice").field("state").as_str(), "claimed");
}

fn claim_of_a_confirmed_hold_changes_nothing(server: &Server, protocol: Protocol) {
    // A repeated request never shortens the lease: also not by a claim.
    let key = unique_key("confirmed already");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000, "CLAIM", 10]).as_token(), token);
    let hold = holder(&mut conn, &key, "alice");
    assert_eq!(hold.field("state").as_str(), "held");
    assert!(hold.field("left_ms").as_int() > 500_000, "{hold}");
}

fn token_of_a_claimed_grant_is_current(server: &Server, protocol: Protocol) {
    // A claim is a grant: it keeps others out, and its token is good.
    let key = unique_key("current");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000, "CLAIM", 60_000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.CHECK", key, token]), Reply::Int(1));
    assert_eq!(conn.cmd(&args!["FLOCK.ACQUIRE", key, "bob", 60_000]), Reply::Nil);
}

fn claimed_grant_can_be_released(server: &Server, protocol: Protocol) {
    // Who does not want the grant any more need not confirm it first.
    let key = unique_key("released");
    let mut conn = server.connect(protocol);
    let token = conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 600_000, "CLAIM", 60_000]).as_token();
    assert_eq!(conn.cmd(&args!["FLOCK.RELEASE", key, "alice", "TOKEN", token]), Reply::Int(1));
    assert_eq!(holders(&mut conn, &key), [""; 0]);
}

fn waiter_is_granted_under_its_claim(server: &Server, protocol: Protocol) {
    // The claim starts with the grant, not with the request.
    let key = unique_key("waiter");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let request = args!["FLOCK.ACQUIRE", key, "bob", 600_000, "CLAIM", 60_000, "BLOCK", 0];
    let mut waiter = waiting(server, protocol, &request);
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    waiter.recv().as_token();
    let hold = holder(&mut conn, &key, "bob");
    assert_eq!(hold.field("state").as_str(), "claimed");
    assert!((30_000..=60_000).contains(&hold.field("left_ms").as_int()), "{hold}");
}

fn dead_waiter_costs_its_claim(server: &Server, protocol: Protocol) {
    // The waiter is granted and never confirms; who waits behind it is served after the claim, long before the lease.
    let key = unique_key("dead waiter");
    let mut conn = server.connect(protocol);
    conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 60_000]).as_token();
    let request = args!["FLOCK.ACQUIRE", key, "dead", 600_000, "CLAIM", 50, "BLOCK", 0];
    let mut dead = waiting(server, protocol, &request);
    let mut next = waiting(server, protocol, &args!["FLOCK.ACQUIRE", key, "next", 60_000, "BLOCK", 0]);
    conn.cmd(&args!["FLOCK.RELEASE", key, "alice"]);
    let first = dead.recv().as_token();
    assert!(next.recv().as_token() > first);
}
