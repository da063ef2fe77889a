#!/bin/sh
# Builds the module with AddressSanitizer and runs the contract tests against it, on both servers.
#
#   scripts/asan.sh                 all of them; some minutes
#   scripts/asan.sh replication     those whose name contains a word (arguments go to the test program)
#
# Every access of the module's code is checked, and everything that the servers or the module allocate is laid out for that: the
# servers' own allocator is the C library's or is made so, and both take the sanitizer's instead, which is preloaded. The module is the
# one that is shipped but for the checks; its memory comes from the server, as always. The standard library is not instrumented, but
# what it has of generic code is compiled into the module, and is.
#
# A report ends its server and so fails the test that runs; reports, of forked children too, are also collected and printed here.
# Leaks are not looked for: a server frees nothing when it ends, and what the module holds goes with it.
#
# Left out are three tests: one starts a server that has no sanitizer, two call the server by another name, which the wrapper hides.
#
# Needs rustup and cc. A nightly toolchain is fetched by rustup if there is none.
set -eu
cd "$(dirname "$0")/.."

say() { echo "asan: $*" >&2; }
command -v rustup >/dev/null || { say "a sanitizer needs the nightly compiler, and this script needs rustup to find it"; exit 1; }
rustup run nightly rustc --version >/dev/null 2>&1 || {
    say "fetching the nightly toolchain (rustup, minimal profile)"
    rustup toolchain install nightly --profile minimal
}
scripts/setup.sh
. target/tools/env.sh

host=$(rustup run nightly rustc -vV | sed -n 's/^host: //p')
mkdir -p "${CARGO_TARGET_DIR:-target}/asan"
out=$(cd "${CARGO_TARGET_DIR:-target}/asan" && pwd)

say "building the module with $(rustup run nightly rustc --version)"
# With --target the flags reach the module alone, not the build scripts and macros. Without LTO: half the time, and better reports.
RUSTFLAGS="-Zsanitizer=address -Cforce-frame-pointers=yes" CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
    cargo +nightly build --release -p flock-module --target "$host" --target-dir "$out"

# The compiler's runtime is made for programs. Without its one part that only a program can have, it can be preloaded.
runtime=$(rustup run nightly rustc --print target-libdir)/librustc-nightly_rt.asan.a
cp "$runtime" "$out/runtime.a"
ar d "$out/runtime.a" asan_preinit.cpp.o
cc -shared -o "$out/runtime.so" -Wl,--whole-archive "$out/runtime.a" -Wl,--no-whole-archive -lpthread -ldl -lrt -lm

# A server loads its modules with RTLD_DEEPBIND: they would find the C library's malloc before the sanitizer's. And Valkey 8.0 from
# Debian uses two functions that only jemalloc has; with them it would hand the sanitizer's memory to jemalloc.
cc -shared -fPIC -O1 -x c -o "$out/shim.so" - <<'C'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
void *dlopen(const char *file, int mode) {
    void *(*next)(const char *, int) = (void *(*)(const char *, int))dlsym(RTLD_NEXT, "dlopen");
    return next(file, mode & ~RTLD_DEEPBIND);
}
void sdallocx(void *block, size_t size, int flags) { (void)size, (void)flags, free(block); }
size_t nallocx(size_t size, int flags) { (void)flags; return size; }
C

reports=$out/reports
rm -rf "$reports"
mkdir "$reports"
# A server asks for impossible sizes, of forged values, and expects to be told no. What is freed is kept from use only so long that
# the tests which weigh a server still can.
options="detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=32:log_path=$reports/report:${ASAN_OPTIONS:-}"
with_sanitizer() { # name  server
    cat >"$out/$1" <<WRAPPER
#!/bin/sh
# What a test preloads itself comes first.
ASAN_OPTIONS="$options" LD_PRELOAD="\${LD_PRELOAD:+\$LD_PRELOAD:}$out/shim.so:$out/runtime.so" exec "$2" "\$@"
WRAPPER
    chmod 755 "$out/$1"
}
with_sanitizer valkey-server "$VALKEY_SERVER"
with_sanitizer valkey-server-old "$VALKEY_SERVER_OLD"

failed=0
VALKEY_SERVER=$out/valkey-server VALKEY_SERVER_OLD=$out/valkey-server-old FLOCK_MODULE=$out/$host/release/libflock.so \
    cargo test -p flock-tests --test contract -- "$@" --skip the_servers_checker --skip redis_refuses || failed=1
for report in "$reports"/*; do
    # An impossible size is a warning.
    ! grep -q 'ERROR: AddressSanitizer' "$report" 2>/dev/null || { failed=1; cat "$report"; }
done
[ "$failed" = 0 ] || { say "failed; reports, if any, are in $reports"; exit 1; }
say "no report"
