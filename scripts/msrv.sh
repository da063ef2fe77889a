#!/bin/sh
# Checks that the workspace compiles with the oldest Rust that Cargo.toml promises (`rust-version`).
#
# Needs rustup, which fetches that toolchain if it is not there, and libclang (scripts/setup.sh). Where there is no such toolchain it is
# skipped, and says so.
set -eu
cd "$(dirname "$0")/.."

rust=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
skip() { echo "skipped: Rust $rust: this needs $1"; exit 0; }
command -v rustup >/dev/null || skip rustup
rustup run "$rust" rustc --version 2>/dev/null || {
    echo "msrv: fetching Rust $rust (rustup, minimal profile)" >&2
    rustup toolchain install "$rust" --profile minimal --no-self-update || skip "that toolchain, which rustup could not install"
}
rustup run "$rust" cargo check --locked --workspace --all-targets --all-features --target-dir "${CARGO_TARGET_DIR:-target}/msrv"
