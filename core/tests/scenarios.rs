//! The rules as transcripts: one file in `scenarios/` for each, readable without Rust. `support/transcript.rs` says how to read them.
//!
//! Every bug that was found in the rules leaves its smallest transcript here.

mod support;

use std::collections::BTreeSet;
use std::path::Path;
use support::transcript::play;

/// Plays one file.
fn scenario(name: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scenarios").join(name).with_extension("txt");
    let text = std::fs::read_to_string(&path).expect("the transcript is there");
    assert!(text.starts_with("# "), "{name}: a transcript begins with the rule that it shows");
    if let Err(fault) = play(&text) {
        panic!("{name}.txt, {fault}");
    }
}

macro_rules! scenarios {
    ($($name:ident)*) => {
        const NAMES: &[&str] = &[$(stringify!($name)),*];
        $(
            #[test]
            fn $name() {
                scenario(stringify!($name));
            }
        )*
    };
}

scenarios! {
    a_deaf_writer_does_not_hold_up_readers
    adjacent_readers_are_granted_together
    cancelled_by_release
    claim_confirmed_by_renew_with_token
    claim_not_confirmed_passes_on
    convert_down_serves_readers
    convert_needs_the_current_token
    convert_up_needs_sole_reader
    deleted_key_serves_next
    evicted_after_somebody_gave_it_up
    evicted_lock_is_put_back
    evicted_session_hold_is_cut
    exclusive_satisfies_shared
    expiry_before_the_timer
    expiry_hands_over
    failover_ends_waits_and_keeps_holds
    floor_raises_the_counter
    flush_ends_everything
    free_lock_is_not_kept_for_a_wait_that_is_over
    handoff_on_release
    head_is_granted_if_nobody_listens
    lease_and_wait_end_together
    limit_semaphore
    lock_renewed_for_months_survives_failover
    moved_slot_ends_the_waits
    new_refuses
    only_the_owner_gives_back
    overwritten_key_ends_the_waits
    passed_over_waiter_keeps_place
    plain_try_never_overtakes
    promotion_grace
    queue_position
    reentrant_ids
    refusal_changes_nothing
    release_after_expiry_touches_nobody
    renamed_back_and_cancelled
    renamed_lock_is_nobodys
    renew_replaces_what_is_left
    renew_without_token_keeps_the_claim
    renewal_at_the_deadline_is_late
    repeated_queue_proves_life
    retry_returns_same_token
    revoke_tells_and_hands_over
    session_cut
    session_is_cut_after_failover
    session_waiter_dies_with_its_connection
    sixteen_deaf_waiters_are_asked
    superseded
    superseded_in_another_mode_goes_to_the_tail
    superseded_is_not_told_where_the_newer_listens
    suspended_for_a_month
    swapped_databases
    swapped_in_hold_answers_its_owners_wait
    unblocked_waiter_leaves
    undelivered_grant_goes_on
    undelivered_grant_is_not_put_back
    undelivered_grant_moved_with_its_database
    undelivered_grant_that_is_away_is_not_told
    wait_times_out
    writer_not_starved
    writer_times_out_and_readers_go_on
}

/// A transcript that nobody plays proves nothing.
#[test]
fn every_transcript_is_played() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scenarios");
    let files: BTreeSet<String> = std::fs::read_dir(folder)
        .expect("the folder is there")
        .map(|file| file.expect("it can be read").path())
        .map(|path| path.file_stem().expect("a file has a name").to_string_lossy().into_owned())
        .collect();
    assert_eq!(files, NAMES.iter().map(|name| (*name).to_owned()).collect());
}

/// What is wrong in a transcript is found, not skipped.
#[test]
fn a_wrong_transcript_fails() {
    let right = "at 0ms alice acquires order:1 for 30s -> granted 1\nat 1ms alice releases order:1 -> yes";
    assert_eq!(play(right), Ok(()));
    for (wrong, fault) in [
        ("", "an empty transcript"),
        ("at 0ms alice acquires order:1 for 30s", "an action has an outcome"),
        ("at 0ms alice acquires order:1 for 30s -> granted 2", "but it was granted 1"),
        ("at 0ms alice acquires order:1 for 30s -> granted 1; bob is granted 2", "but it was granted 1"),
        ("at 0ms alice acquires order:1 for 30s -> nothing", "but it was granted 1"),
        ("at 0ms alice acquires order:1 for 30 -> granted 1", "no duration"),
        ("at 0ms alice acquires order:1 for 30s quickly -> granted 1", "no option"),
        ("at 0ms alice acquires order for 30s -> granted 1", "no lock"),
        ("at 0ms alice admires order:1 -> granted 1", "no action"),
        ("at 0ms time passes slowly -> nothing", "not understood"),
        ("0ms alice acquires order:1 for 30s -> granted 1", "a line begins with"),
        ("at 2ms time passes -> nothing\nat 1ms time passes -> nothing", "time runs backwards"),
        ("at 0ms alice acquires order:1 for 30s -> granted 1\nthen order:1 is free", "the key exists"),
        ("at 0ms alice acquires order:1 for 30s -> granted 1\nthen order:1 is held by bob (1)", "by alice (1)"),
        ("at 0ms alice acquires order:1 for 30s -> granted 1\nthen order:1 is waited for by bob", "by nobody"),
        (
            "at 0ms alice acquires order:1 for 30s -> granted 1\n\
             at 1ms bob acquires order:1 for 30s blocking 1s -> waits, position 1\n\
             at 2ms alice releases order:1 -> yes",
            "but it was yes; bob is granted 2",
        ),
    ] {
        let said = play(wrong).expect_err("a wrong transcript fails");
        assert!(said.contains(fault), "{wrong}: {said}");
    }
}
