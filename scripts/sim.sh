#!/bin/sh
# Runs simulated worlds (tests/sim), each from a seed and exactly as it ran before.
#
#   scripts/sim.sh 1000          a thousand of them
#   scripts/sim.sh 1 4711        that of seed 4711
#
# The build is one of its own: where two things could come next, the runtime of tokio chooses at random, and only with
# `--cfg tokio_unstable` does it take that from a seed.
set -eu
cd "$(dirname "$0")/.."
SEEDS=${1:-100} SEED=${2:-1}
export SEEDS SEED
out=${CARGO_TARGET_DIR:-target}/sim
fast() { printf -- '--config=profile.dev.package.%s.opt-level=1 ' "$@"; }
# shellcheck disable=SC2046
RUSTFLAGS="${RUSTFLAGS:-} --cfg tokio_unstable" \
    cargo test $(fast tokio flock-client flock-tests flock-sim) --target-dir "$out" -p flock-sim -- --nocapture
