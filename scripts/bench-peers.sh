#!/bin/sh
# FLOCK beside other lock systems: fetches the peers into target/tools/peers, starts those that are servers, runs the bench.
#
#   scripts/bench-peers.sh [contention] [cost] [readers] [handoff] [load] [scale] [chaos] [plots]        all of them if none is named
#
# Needs what `make setup build` makes. Crates come by cargo; redis-py by pip, if there is python3; ioredis and node-redlock by npm, if
# there is node; etcd from Debian, if its package is known; PostgreSQL by scripts/setup.sh. What cannot be had is skipped, with the reason.
set -eu
cd "$(dirname "$0")/.."
. target/tools/env.sh
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target}"
: "${FLOCK_MODULE:=$(cd "$CARGO_TARGET_DIR" && pwd)/release/libflock.so}"
export FLOCK_MODULE
peers=$PWD/target/tools/peers
run=$(mktemp -d)
mkdir -p "$peers"
say() { echo "bench-peers: $*" >&2; }
skip() { say "$1 is skipped: $2"; }

started=
stop() {
    for pid in $started; do kill "$pid" 2>/dev/null && wait "$pid" || :; done
    rm -rf "$run"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

case "${*:-contention}" in *contention* | *readers*) wanted=yes ;; *) wanted= ;; esac # the others meet no peer that is a program

redis_py=8.1.0 ioredis=6.0.0 node_redlock=4.2.0
if [ -n "$wanted" ]; then
    if ! command -v python3 >/dev/null; then
        skip redis-py "there is no python3"
    elif [ -x "$peers/venv/bin/python" ] || { python3 -m venv "$peers/venv" && "$peers/venv/bin/pip" install -q "redis==$redis_py"; }; then
        export PEERS_PYTHON="$peers/venv/bin/python"
    else
        rm -rf "$peers/venv"
        skip redis-py "pip could not fetch it"
    fi

    if ! command -v npm >/dev/null; then
        skip node-redlock "there is no node with npm"
    elif [ -d "$peers/node/node_modules/redlock" ] ||
        npm install --silent --no-audit --no-fund --prefix "$peers/node" "ioredis@$ioredis" "redlock@$node_redlock"; then
        export PEERS_NODE="$(command -v node)" NODE_PATH="$peers/node/node_modules"
    else
        skip node-redlock "npm could not fetch it"
    fi

    # A port that nobody has: the kernel's choice.
    free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
    # PostgreSQL refuses to run as root.
    as_user=
    [ "$(id -u)" != 0 ] || as_user="setpriv --reuid=65534 --regid=65534 --clear-groups"
    wait_for() { # what  log  words
        tries=0
        until grep -q "$3" "$2" 2>/dev/null; do
            tries=$((tries + 1))
            [ $tries -lt 200 ] || { cat "$2" >&2; return 1; }
            sleep 0.1
        done
        say "$1 is ready"
    }

    if [ -z "${POSTGRES_BIN:-}" ]; then
        skip postgres "POSTGRES_BIN is not set (scripts/setup.sh postgres)"
    elif ! $as_user "$POSTGRES_BIN/postgres" --version >/dev/null 2>&1; then
        skip postgres "$POSTGRES_BIN cannot be run by a user who is not root"
    else
        chmod 755 "$run"
        mkdir "$run/postgres"
        [ "$(id -u)" != 0 ] || chown 65534:65534 "$run/postgres"
        (cd "$run/postgres" && $as_user "$POSTGRES_BIN/initdb" --auth=trust --username=postgres --no-locale --no-sync -D data >/dev/null)
        (cd "$run/postgres" && exec $as_user "$POSTGRES_BIN/postgres" -D data -c listen_addresses= -c unix_socket_directories="$run/postgres" \
            -c max_connections=400) >"$run/postgres.log" 2>&1 &
        started="$started $!"
        wait_for PostgreSQL "$run/postgres.log" "ready to accept connections"
        export PEERS_POSTGRES="host=$run/postgres user=postgres"
    fi

    if [ ! -x "$peers/etcd/usr/bin/etcd" ]; then
        rm -rf "$peers/etcd"
        mkdir "$peers/etcd"
        (cd "$peers/etcd" && apt-get -q download etcd-server && dpkg-deb -x etcd-server_*.deb .) >"$run/etcd.log" 2>&1 || :
    fi
    if [ ! -x "$peers/etcd/usr/bin/etcd" ]; then
        skip etcd "apt could not fetch etcd-server: $(tail -n 1 "$run/etcd.log")"
    else
        client=http://127.0.0.1:$(free_port) peer=http://127.0.0.1:$(free_port)
        "$peers/etcd/usr/bin/etcd" --data-dir "$run/etcd" --listen-client-urls "$client" --advertise-client-urls "$client" \
            --listen-peer-urls "$peer" --initial-advertise-peer-urls "$peer" --initial-cluster "default=$peer" >"$run/etcd.log" 2>&1 &
        started="$started $!"
        wait_for etcd "$run/etcd.log" "ready to serve client requests"
        export PEERS_ETCD="${client#http://}"
    fi
fi

cargo build --release --manifest-path benches/peers/Cargo.toml
"$CARGO_TARGET_DIR/release/bench-peers" "$@"
