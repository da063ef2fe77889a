#!/bin/sh
# Checks that everything compiles with the oldest Rust that Cargo.toml promises (`rust-version`).
#
# Needs rustup, which fetches that toolchain if it is not there, and libclang (scripts/setup.sh).
set -eu
cd "$(dirname "$0")/.."

rust=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
command -v rustup >/dev/null || {
    echo "skipped: Rust $rust: this needs rustup"
    exit 0
}
rustup run "$rust" rustc --version 2>/dev/null || {
    echo "msrv: fetching Rust $rust (rustup, minimal profile)" >&2
    rustup toolchain install "$rust" --profile minimal --no-self-update
}
rustup run "$rust" cargo check --locked --workspace --all-targets --all-features --target-dir "${CARGO_TARGET_DIR:-target}/msrv"
