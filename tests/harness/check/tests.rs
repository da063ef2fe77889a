//! One planted violation of each kind, which must be found, beside the nearest innocent history, which must not.

use super::{Order, Rules, Violation, check};
use crate::history::{Call, Event, OpId, Phase, Verb};

/// A history written by hand: operation `n` of client 0, with times in milliseconds.
#[derive(Default)]
struct Script {
    events: Vec<Event>,
    next_op: u64,
}

impl Script {
    fn op(&mut self, sent_ms: u64, call: Call, done_ms: u64, outcome: Phase) -> OpId {
        let op = self.next_op;
        self.next_op += 1;
        for (at_ms, phase) in [(sent_ms, Phase::Invoke(call)), (done_ms, outcome)] {
            self.events.push(Event { at_ns: at_ms * 1_000_000, process: 0, op, phase });
        }
        (0, op)
    }

    fn granted(&mut self, sent_ms: u64, call: Call, done_ms: u64, token: u64) -> OpId {
        self.op(sent_ms, call, done_ms, Phase::Ok { token: Some(token) })
    }

    fn done(&mut self, sent_ms: u64, call: Call, done_ms: u64) -> OpId {
        self.op(sent_ms, call, done_ms, Phase::Ok { token: None })
    }

    fn refused(&mut self, sent_ms: u64, call: Call, done_ms: u64) -> OpId {
        self.op(sent_ms, call, done_ms, Phase::Refused)
    }

    #[track_caller]
    fn finds(&self, violations: &[Violation]) {
        assert_eq!(check(&self.events, &Rules::default()), violations);
    }
}

fn acquire(owner: &str) -> Call {
    Call::new(Verb::Acquire, "k", owner).lease_ms(100)
}

fn renew(owner: &str, lease_ms: u64) -> Call {
    Call::new(Verb::Renew, "k", owner).lease_ms(lease_ms)
}

fn release(owner: &str, token: u64) -> Call {
    Call::new(Verb::Release, "k", owner).token(token)
}

fn write(owner: &str, token: u64) -> Call {
    Call::new(Verb::Write, "k", owner).token(token)
}

#[test]
fn ordinary_run_is_sound() {
    let mut script = Script::default();
    script.granted(0, acquire("a"), 1, 10);
    script.done(2, write("a", 10), 3);
    script.refused(2, acquire("b"), 3);
    script.done(4, release("a", 10), 5);
    script.granted(5, acquire("c"), 6, 11);
    script.done(50, renew("c", 100), 51);
    script.granted(152, acquire("d"), 153, 12);
    script.refused(160, write("a", 10), 161);
    // Nothing newer had been written yet, but d's write was under way.
    script.done(155, write("d", 12), 170);
    script.finds(&[]);
}

#[test]
fn missing_outcome_is_found() {
    let mut script = Script::default();
    let op = script.refused(0, acquire("a"), 1);
    script.events.pop();
    script.finds(&[Violation::Unanswered(op)]);
}

#[test]
fn second_outcome_is_found() {
    let mut script = Script::default();
    let op = script.refused(0, acquire("a"), 1);
    script.events.push(script.events[1].clone());
    script.finds(&[Violation::Malformed(op)]);
}

#[test]
fn grant_without_token_is_found() {
    let mut script = Script::default();
    let op = script.done(0, acquire("a"), 1);
    script.finds(&[Violation::NoToken(op)]);
}

#[test]
fn token_of_two_owners_is_found() {
    let mut script = Script::default();
    let first = script.granted(0, acquire("a"), 1, 10);
    script.done(2, release("a", 10), 3);
    let second = script.granted(4, acquire("b"), 5, 10);
    script.finds(&[Violation::TokenTwice(10, first, second)]);
}

#[test]
fn token_again_after_its_release_is_found() {
    let mut script = Script::default();
    let first = script.granted(0, acquire("a"), 1, 10);
    script.done(2, release("a", 10), 3);
    let second = script.granted(4, acquire("a"), 5, 10);
    script.finds(&[Violation::TokenTwice(10, first, second)]);
}

#[test]
fn retry_may_return_the_token_again() {
    let mut script = Script::default();
    script.granted(0, acquire("a"), 1, 10);
    script.granted(0, Call::new(Verb::Acquire, "other", "b"), 1, 11);
    script.granted(4, acquire("a"), 5, 10);
    script.finds(&[]);
}

#[test]
fn smaller_token_of_a_later_grant_is_found() {
    let mut script = Script::default();
    let earlier = script.granted(0, acquire("a"), 1, 10);
    let later = script.granted(2, Call::new(Verb::Acquire, "other", "b"), 3, 9);
    let order = Violation::TokenOrder { earlier: (earlier, 10), later: (later, 9) };
    script.finds(&[order]);
    let rules = Rules { order: Order::PerKey, ..Rules::default() };
    assert_eq!(check(&script.events, &rules), []);
}

#[test]
fn grant_whose_first_reply_was_lost_may_have_an_early_token() {
    let mut script = Script::default();
    script.op(0, acquire("a"), 50, Phase::Unknown);
    script.granted(10, Call::new(Verb::Acquire, "other", "b"), 11, 11);
    script.granted(51, acquire("a"), 52, 10);
    script.finds(&[]);
}

#[test]
fn queued_grant_may_have_an_early_token() {
    let mut script = Script::default();
    script.op(0, acquire("a"), 1, Phase::Queued);
    script.granted(10, Call::new(Verb::Acquire, "other", "b"), 11, 11);
    script.granted(51, acquire("a"), 52, 10);
    script.finds(&[]);
}

#[test]
fn two_exclusive_holds_are_found() {
    let mut script = Script::default();
    let first = script.granted(0, acquire("a"), 1, 10);
    let second = script.granted(98, acquire("b"), 99, 11);
    script.finds(&[Violation::Overlap(first, second)]);
}

#[test]
fn next_hold_after_the_lease_is_no_overlap() {
    let mut script = Script::default();
    script.granted(0, acquire("a"), 1, 10);
    script.granted(98, acquire("b"), 100, 11);
    script.finds(&[]);
}

#[test]
fn renewed_hold_overlaps() {
    let mut script = Script::default();
    let first = script.granted(0, acquire("a"), 1, 10);
    script.done(90, renew("a", 100), 91);
    let second = script.granted(150, acquire("b"), 151, 11);
    script.finds(&[Violation::Overlap(first, second)]);
}

#[test]
fn renewal_may_shorten_the_lease() {
    let mut script = Script::default();
    script.granted(0, acquire("a"), 1, 10);
    script.done(2, renew("a", 10), 3);
    script.granted(13, acquire("b"), 14, 11);
    script.finds(&[]);
}

#[test]
fn renewal_in_doubt_may_shorten_a_later_one() {
    let mut script = Script::default();
    script.granted(0, acquire("a"), 1, 10);
    script.op(2, renew("a", 10), 3, Phase::Unknown);
    script.done(4, renew("a", 100), 5);
    // The renewal in doubt arrives after the other, and ends the hold 10 ms later.
    script.granted(20, acquire("b"), 21, 11);
    script.finds(&[]);
}

#[test]
fn writer_beside_a_reader_is_found() {
    let mut script = Script::default();
    let reader = script.granted(0, acquire("a").shared(), 1, 10);
    script.granted(0, acquire("b").shared(), 1, 11);
    let writer = script.granted(5, acquire("c"), 6, 12);
    let late_reader = script.granted(7, acquire("d").shared(), 8, 13);
    script.finds(&[Violation::Overlap(reader, writer), Violation::Overlap(writer, late_reader)]);
}

#[test]
fn release_under_way_is_no_overlap() {
    let mut script = Script::default();
    script.granted(0, acquire("a"), 1, 10);
    script.op(2, release("a", 10), 50, Phase::Unknown);
    script.granted(2, acquire("b"), 3, 11);
    script.finds(&[]);
}

#[test]
fn release_of_another_token_ends_nothing() {
    let mut script = Script::default();
    let first = script.granted(0, acquire("a"), 1, 10);
    script.refused(2, release("a", 9), 3);
    let second = script.granted(4, acquire("b"), 5, 11);
    script.finds(&[Violation::Overlap(first, second)]);
}

#[test]
fn revocation_is_no_overlap() {
    let mut script = Script::default();
    script.granted(0, acquire("a"), 1, 10);
    script.done(2, Call::new(Verb::Revoke, "k", ""), 3);
    script.granted(2, acquire("b"), 3, 11);
    script.refused(4, renew("a", 100), 5);
    script.finds(&[]);
}

#[test]
fn conversion_ends_the_old_hold() {
    let mut script = Script::default();
    script.granted(0, acquire("a").shared(), 1, 10);
    script.granted(2, Call::new(Verb::Convert, "k", "a").lease_ms(100).token(10), 3, 11);
    script.finds(&[]);
    let second = script.granted(4, acquire("b").shared(), 5, 12);
    script.finds(&[Violation::Overlap((0, 1), second)]);
}

#[test]
fn holder_over_the_limit_is_found() {
    let mut script = Script::default();
    let shared = |owner: &str| acquire(owner).shared().limit(2);
    script.granted(0, shared("a"), 1, 10);
    script.granted(0, shared("b"), 2, 11);
    let third = script.granted(2, shared("c"), 3, 12);
    script.granted(102, shared("d"), 103, 13);
    script.finds(&[Violation::OverLimit(third)]);
}

#[test]
fn early_loss_is_found() {
    let mut script = Script::default();
    script.granted(0, acquire("a"), 1, 10);
    let lost = script.refused(97, renew("a", 100), 99);
    script.finds(&[Violation::LostEarly(lost)]);
}

#[test]
fn late_loss_is_none() {
    let mut script = Script::default();
    script.granted(0, acquire("a"), 1, 10);
    script.refused(97, renew("a", 100), 100);
    script.finds(&[]);
}

#[test]
fn overtaken_waiter_is_found() {
    let mut script = Script::default();
    let second = script.granted(0, acquire("b").ticket(2), 1, 10);
    let first = script.granted(0, acquire("a").ticket(1), 200, 11);
    let overtaken = Violation::OutOfTurn { overtaken: first, by: second };
    script.finds(&[overtaken]);
}

#[test]
fn waiter_that_gave_up_is_not_overtaken() {
    let mut script = Script::default();
    script.refused(0, acquire("a").ticket(1), 10);
    script.granted(0, acquire("b").ticket(2), 11, 10);
    script.finds(&[]);
}

#[test]
fn stale_write_is_found() {
    let mut script = Script::default();
    let newer = script.done(0, write("b", 11), 1);
    let stale = script.done(2, write("a", 10), 3);
    script.finds(&[Violation::StaleWrite { newer, stale }]);
}

#[test]
fn writes_at_the_same_time_may_come_in_either_order() {
    let mut script = Script::default();
    script.done(0, write("b", 11), 3);
    script.done(2, write("a", 10), 4);
    script.finds(&[]);
}

#[test]
fn two_writers_with_one_token_are_found() {
    let mut script = Script::default();
    let first = script.done(0, write("a", 10), 1);
    let second = script.done(2, write("b", 10), 3);
    script.finds(&[Violation::SharedToken(first, second)]);
}

#[test]
fn write_refused_without_reason_is_found() {
    let mut script = Script::default();
    script.done(0, write("a", 10), 1);
    let refused = script.refused(2, write("b", 11), 3);
    script.finds(&[Violation::WriteRefused(refused)]);
}
