#!/bin/sh
# Mutation testing of the core: changes one thing at a time in a copy of it, and demands that its tests notice.
#
#   scripts/mutants.sh                          the whole core; hours
#   scripts/mutants.sh core/src/lock.rs ...     these files
#
# First the quick tests, built as fast as possible; then, for what they let pass, all of the core's tests. What nothing noticed is in
# target/mutants/mutants.out/missed.txt; docs/RELIABILITY.md says of each why. Not among the tests: `planted_bugs`, which compares the
# sources with a list. Needs cargo-mutants, which is fetched into target/tools if it is not there.
set -euf # a pattern of files is for cargo-mutants to read
cd "$(dirname "$0")/.."

tools=$PWD/target/tools/cargo
PATH="$PATH:$tools/bin"
command -v cargo-mutants >/dev/null || {
    echo "mutants: building cargo-mutants into target/tools" >&2
    cargo install --quiet cargo-mutants --version 27.1.0 --locked --root "$tools"
}
out=${CARGO_TARGET_DIR:-$PWD/target}/mutants
unset CARGO_TARGET_DIR # each copy has its own
mkdir -p "$out"
files=
for file; do files="$files --file $file"; done
run() { for test; do printf -- '--cargo-arg=--test=%s ' "$test"; done; }
quick="--cargo-arg=--lib $(run accounts edges report scenarios token_design model)"
all="$quick $(run exhaustive refused_input wire_roundtrip)"

# Statuses 2 and 3 say that something was missed, or hung; others are failures.
mutate() { # cases of the model  options...
    cases=$1; shift
    status=0
    # shellcheck disable=SC2086
    FLOCK_MODEL_CASES=$cases FLOCK_MODEL_SEED=1 cargo mutants --package flock-core --output "$out" --no-shuffle --colors never \
        --baseline skip --timeout 60 $files "$@" || status=$?
    case $status in 0 | 2 | 3) ;; *) exit "$status" ;; esac
}
# shellcheck disable=SC2086
mutate 200 --cargo-arg=--config=profile.dev.package.flock-core.opt-level=0 --cargo-arg=--config=profile.dev.debug=false $quick
echo "mutants: once more, with all tests, what was missed" >&2
# shellcheck disable=SC2086
mutate 8000 --iterate $all
# The second run leaves the first beside its own.
both() { cat "$out/mutants.out.old/$1.txt" "$out/mutants.out/$1.txt" | sort -u | wc -l; }
printf 'mutants: %s caught, %s hung, %s missed, %s cannot be built\n' \
    "$(both caught)" "$(both timeout)" "$(wc -l <"$out/mutants.out/missed.txt")" "$(both unviable)"
