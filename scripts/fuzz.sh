#!/bin/sh
# Fuzzes the core: parsers and decoders, and the rules against the naive server of the tests. See fuzz/fuzz_targets/.
#
#   scripts/fuzz.sh                   each target for 60 seconds
#   scripts/fuzz.sh 600 snapshot      one target, for ten minutes
#
# Prints the executions of each target, and fails at the first input that breaks one, with the command that shows it again.
# Debug assertions and overflow checks are on; there is no sanitizer, because the core has no unsafe code (scripts/asan.sh is for the
# module). What is found on the way is kept in target/fuzz and used the next time; the seeds in fuzz/corpus are only read.
#
# Needs rustup, and a C++ compiler for libFuzzer. What is missing is fetched: a nightly toolchain by rustup, and cargo-fuzz into
# target/tools.
set -eu
cd "$(dirname "$0")/.."

say() { echo "fuzz: $*" >&2; }
seconds=${1:-60}
targets=${2:-parse_command snapshot change message differential}
case $seconds in '' | *[!0-9]*) say "'$seconds' is no number of seconds"; exit 2 ;; esac

command -v rustup >/dev/null || { say "libFuzzer needs the nightly compiler, and this script needs rustup to find it"; exit 1; }
rustup run nightly rustc --version >/dev/null 2>&1 || {
    say "fetching the nightly toolchain (rustup, minimal profile)"
    rustup toolchain install nightly --profile minimal
}
tools=$PWD/target/tools/cargo
[ -x "$tools/bin/cargo-fuzz" ] || {
    say "building cargo-fuzz into target/tools"
    cargo install --quiet cargo-fuzz --version 0.13.2 --locked --root "$tools"
}
mkdir -p "${CARGO_TARGET_DIR:-target}/fuzz"
out=$(cd "${CARGO_TARGET_DIR:-target}/fuzz" && pwd)
host=$(rustup run nightly rustc -vV | sed -n 's/^host: //p')
say "$("$tools/bin/cargo-fuzz" --version), $(rustup run nightly rustc --version)"
PATH="$tools/bin:$PATH" cargo +nightly fuzz build --sanitizer none --target-dir "$out"

for target in $targets; do
    corpus=$out/corpus/$target artifacts=$out/artifacts/$target log=$out/$target.log program=$out/$host/release/$target
    mkdir -p "$corpus" "$artifacts"
    set -- -max_total_time="$seconds" -timeout=10 -print_final_stats=1 -artifact_prefix="$artifacts/"
    [ ! -e "fuzz/dictionaries/$target.dict" ] || set -- "$@" -dict="fuzz/dictionaries/$target.dict"
    say "$target, for $seconds s"
    "$program" "$@" "$corpus" "fuzz/corpus/$target" >"$log" 2>&1 || {
        grep -a -A 3 'panicked at\|ERROR: libFuzzer' "$log" >&2 || tail -n 20 "$log" >&2
        found=$(sed -n 's/.*Test unit written to //p' "$log")
        say "$target failed; the whole log is $log"
        say "again:   $program $found"
        say "smaller: $program -minimize_crash=1 -max_total_time=60 -artifact_prefix=$artifacts/ $found"
        exit 1
    }
    awk -v target="$target" '/^stat::number_of_executed_units/ {runs = $2} /^stat::average_exec_per_sec/ {rate = $2}
        END {printf "%-14s %11d executions, %7d a second\n", target, runs, rate}' "$log"
done
