#!/bin/sh
# Builds the module and tests it against real servers. Each stage is timed.
#
#   scripts/test.sh quick    set-up, check, build, contract tests                                    (make test)
#   scripts/test.sh long     set-up, oldest Rust, simulated worlds, build, contract tests, long tier  (make test-long)
#   scripts/test.sh soak     the long tier, MINUTES times as many rounds                 (make soak)
#
# The contract tests see: FLOCK_MODULE, the module they load; FLOCK_MODULE_PLANTED, not in the quick tier, one that panics on request
# and writes the format of a later version; FLOCK_TEST_TIER, which is the argument; and the programs named in target/tools/env.sh.
# VALKEY_SERVER or VALKEY_SERVER_OLD in the environment replace those.
set -eu
cd "$(dirname "$0")/.."
tier=${1:?quick, long or soak}
case $tier in quick | long | soak) ;; *) echo "test: there is no tier '$tier'" >&2; exit 2 ;; esac

times=
stage() { # name  command...
    name=$1; shift
    echo "test: $name"
    began=$(date +%s)
    "$@" || { printf '%stest: %s failed after %s s\n' "$times" "$name" $(($(date +%s) - began)) >&2; exit 1; }
    times="$times$(printf '%6d s  %s' $(($(date +%s) - began)) "$name")
"
}

stage "set-up" scripts/setup.sh
. target/tools/env.sh
[ "$tier" != quick ] || stage "check" make --no-print-directory check
rust=
oldest_rust() {
    rust=$(scripts/msrv.sh) || return 1
    echo "$rust"
}
[ "$tier" = quick ] || stage "oldest Rust" oldest_rust
case $tier in long) worlds=2000 ;; soak) worlds=20000 ;; *) worlds= ;; esac
[ -z "$worlds" ] || stage "$worlds simulated worlds" scripts/sim.sh "$worlds"
stage "build" make --no-print-directory build

export FLOCK_TEST_TIER="$tier"
FLOCK_MODULE=$(cd "${CARGO_TARGET_DIR:-target}" && pwd)/release/libflock.so
export FLOCK_MODULE
if [ "$tier" != quick ]; then
    planted=${CARGO_TARGET_DIR:-target}/planted
    stage "build with planted panics and the next format" \
        cargo build --release -p flock-module --features planted-panics,next-format --target-dir "$planted"
    FLOCK_MODULE_PLANTED=$(cd "$planted" && pwd)/release/libflock.so
    export FLOCK_MODULE_PLANTED
fi
# Thousands of lines, and the servers' logs: what has failed, and why, is told once more at the end.
on_real_servers() {
    log=${CARGO_TARGET_DIR:-target}/test-$tier.log
    rm -f "$log.failed"
    { cargo test --no-fail-fast -p flock-tests -p fenced-storage 2>&1 || touch "$log.failed"; } | tee "$log"
    # What this machine or this user does not allow is not passed over in silence.
    { echo "$rust"; cat "$log"; } | grep -o 'skipped: .*: this needs .*' || true
    [ -e "$log.failed" ] || return 0
    rm "$log.failed"
    echo "test: once more, what failed (all of it: $log)"
    awk "/^thread '.*panicked at / { left = 20 } /^note: |^\$/ { left = 0 } left-- > 0" "$log"
    grep '^test .* FAILED$' "$log"
    return 1
}
stage "tests on real servers, $tier" on_real_servers

printf 'test: all passed\n%s' "$times"
