#!/bin/sh
# A short session under valgrind's memcheck: a Valkey with the module grants, queues, hands over, expires, saves and loads again.
#
#   scripts/valgrind.sh     needs valgrind (apt-get install valgrind); the module is built if FLOCK_MODULE names none
#
# Fails at any error. One of the server's own is expected, and suppressed in its sources too: its compressor reads a table that it has not
# cleared, and checks what it finds. Leaks are not looked for.
set -eu
cd "$(dirname "$0")/.."

die() { echo "valgrind: $*" >&2; exit 1; }
command -v valgrind >/dev/null || die "there is no valgrind here (apt-get install valgrind)"
scripts/setup.sh server cli libclang
. target/tools/env.sh
[ -n "${FLOCK_MODULE:-}" ] || {
    make --no-print-directory build
    FLOCK_MODULE=$(cd "${CARGO_TARGET_DIR:-target}" && pwd)/release/libflock.so
}

dir=$(mktemp -d "${TMPDIR:-/tmp}/flock-valgrind.XXXXXX")
server=
trap '[ -z "$server" ] || kill -9 "$server" 2>/dev/null || true; rm -rf "$dir"' EXIT
socket=$dir/socket
cli() { "$VALKEY_CLI" -s "$socket" "$@"; }
expect() { # reply  command...
    want=$1; shift
    got=$(cli "$@")
    case $got in $want) ;; *) die "$*: expected '$want', got '$got'" ;; esac
}
printf '{\n   compressor\n   Memcheck:Cond\n   fun:lzf_compress\n}\n' >"$dir/suppressions"
start() {
    valgrind --quiet --log-file="$dir/errors" --keep-debuginfo=yes --suppressions="$dir/suppressions" \
        "$VALKEY_SERVER" --port 0 --unixsocket "$socket" --dir "$dir" --save "" --enable-debug-command yes --loadmodule "$FLOCK_MODULE" >"$dir/log" 2>&1 &
    server=$!
    for _ in $(seq 300); do
        ! cli PING >/dev/null 2>&1 || return 0
        sleep 0.2
    done
    cat "$dir/log" >&2
    die "the server did not start"
}

start
expect '[1-9]*' FLOCK.ACQUIRE jobs alice 600000
expect 'QUEUED*' FLOCK.ACQUIRE jobs carol 600000 QUEUE 600000 CHANNEL carol
cli FLOCK.ACQUIRE jobs bob 600000 BLOCK 600000 >"$dir/bob" &
bob=$!
until cli FLOCK.INFO jobs | grep -q bob; do sleep 0.2; done
expect 1 FLOCK.RELEASE jobs alice
wait "$bob"
grep -q '^[1-9]' "$dir/bob" || die "bob, who waited, was answered '$(cat "$dir/bob")'"
expect '[1-9]*' FLOCK.ACQUIRE shared one 600000 SHARED REENTRANT 1 LABEL "nightly run" SESSION 60000
expect '[1-9]*' FLOCK.ACQUIRE shared two 600000 SHARED CLAIM 60000
expect '[1-9]*' FLOCK.ACQUIRE short alice 100
sleep 2
expect '' FLOCK.INFO short
expect '*' FLOCK.LIST
expect 1 FLOCK.REVOKE jobs
expect OK DEBUG RELOAD
expect '*"one"*' --no-raw FLOCK.INFO shared
expect 1 FLOCK.RELEASE shared one ALL
expect 1 DEL shared
expect OK FLUSHALL
cli SHUTDOWN NOSAVE || true
wait "$server" || die "the server ended with status $?"
server=

[ ! -s "$dir/errors" ] || { cat "$dir/errors" >&2; die "there are errors"; }
echo "valgrind: no error ($(valgrind --version), $("$VALKEY_SERVER" --version | cut -d ' ' -f 1-3))"
