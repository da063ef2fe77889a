#!/bin/sh
# Builds the module and starts a Valkey with it, in a temporary folder, on 127.0.0.1. Nothing is left behind.
#
#   scripts/run.sh           on a terminal: stays until Ctrl-C; otherwise: the demo
#   SERVE=1 scripts/run.sh   stays until it is told to end, also without a terminal
#   DEMO=1 scripts/run.sh    the demo: a short session with the real replies; fails if one is not as it should be
#   PORT=7000 ...            this port, instead of the first free one from 7379
#
# The server is VALKEY_SERVER, else a `valkey-server` on PATH that is new enough (8.0), else the pinned one; likewise VALKEY_CLI.
set -eu
cd "$(dirname "$0")/.."

say() { echo "run: $*" >&2; }
die() { say "$*"; exit 1; }

new_enough() { # prints the path of a program on PATH if it is version 8.0 or later
    major=$("$1" --version 2>/dev/null | sed -n 's/^[^0-9]*\([0-9]*\)\..*/\1/p')
    [ "${major:-0}" -ge 8 ] && command -v "$1"
}
: "${VALKEY_SERVER:=$(new_enough valkey-server || true)}" "${VALKEY_CLI:=$(new_enough valkey-cli || true)}"
export VALKEY_SERVER VALKEY_CLI
scripts/setup.sh server cli libclang
. target/tools/env.sh
make --no-print-directory build
module=$(cd "${CARGO_TARGET_DIR:-target}" && pwd)/release/libflock.so

dir=$(mktemp -d "${TMPDIR:-/tmp}/flock-run.XXXXXX")
server=
stop() {
    trap '' HUP INT TERM
    [ -z "$server" ] || { kill "$server" 2>/dev/null || true; wait "$server" || true; }
    rm -rf "$dir"
}
trap stop EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# Starts the server on port $1; false if the port is taken.
start() {
    : >"$dir/log"
    "$VALKEY_SERVER" --bind 127.0.0.1 --port "$1" --dir "$dir" --save "" --logfile "$dir/log" --loadmodule "$module" \
        >"$dir/out" 2>&1 &
    server=$!
    for _ in $(seq 100); do
        ! grep -q 'Ready to accept connections' "$dir/log" || return 0
        kill -0 "$server" 2>/dev/null || break
        sleep 0.1
    done
    wait "$server" || true
    server=
    grep -q 'Address already in use' "$dir/log" && return 1
    cat "$dir/out" "$dir/log" >&2
    die "the server did not start; its words are above"
}
port=${PORT:-7379}
until start "$port"; do
    [ -z "${PORT:-}" ] || die "port $PORT is taken"
    port=$((port + 1))
done
say "a Valkey with FLOCK listens on 127.0.0.1:$port (log: $dir/log); to talk to it: $VALKEY_CLI -p $port"

if [ "${DEMO:-0}" != 1 ] && { [ "${SERVE:-0}" = 1 ] || { [ -t 0 ] && [ -t 1 ]; }; }; then
    say "Ctrl-C stops it and removes $dir"
    trap 'exit 0' INT
    wait "$server"
    exit
fi

cli() { "$VALKEY_CLI" -p "$port" --no-raw "$@"; }
note() { printf '\n# %s\n' "$*"; }
ask() { # command...   leaves what came back in $reply
    printf '127.0.0.1:%s> %s\n' "$port" "$*"
    reply=$(cli "$@")
    printf '%s\n' "$reply"
}
number() { printf '%s' "$1" | sed -n 's/^(integer) \([0-9][0-9]*\)$/\1/p'; }
expect() { # what came back  what it should be  words
    [ "$1" = "$2" ] || die "$3: expected '$2', got '$1'"
}

note "alice takes the lock for 30 s. The reply is her fencing token."
ask FLOCK.ACQUIRE jobs alice 30000
first=$(number "$reply")
[ -n "$first" ] || die "alice got no token"

note "bob asks for it too, and waits in the server for at most 10 s."
printf '127.0.0.1:%s> %s\n' "$port" "FLOCK.ACQUIRE jobs bob 30000 BLOCK 10000"
cli FLOCK.ACQUIRE jobs bob 30000 BLOCK 10000 >"$dir/bob" &
bob=$!
for _ in $(seq 50); do
    cli FLOCK.INFO jobs | grep -q '"bob"' && break
    sleep 0.1
done

note "Who holds it, who waits?"
ask FLOCK.INFO jobs
case $reply in *'"alice"'*'"bob"'*) ;; *) die "FLOCK.INFO does not show alice as holder and bob as waiter" ;; esac

note "alice gives it back: in the same step it is bob's."
ask FLOCK.RELEASE jobs alice TOKEN "$first"
expect "$reply" "(integer) 1" "alice's release"
wait "$bob" || die "bob's connection broke"
note "What bob's waiting command got: his token."
cat "$dir/bob"
second=$(number "$(cat "$dir/bob")")
[ -n "$second" ] || die "bob got no token"
[ "$second" -gt "$first" ] || die "bob's token is not above alice's"

note "A write that alice sends late carries her old token: refused. Bob's is good."
ask FLOCK.CHECK jobs "$first"
expect "$reply" "(integer) 0" "the check of the stale token"
ask FLOCK.CHECK jobs "$second"
expect "$reply" "(integer) 1" "the check of the fresh token"
echo
say "the demo went as it should"
