#!/bin/sh
# Plants the bugs of core/tests/planted_bugs.md, one by one, in a copy of the core, and demands that the tests catch each of them.
#
#   scripts/planted-bugs.sh           all of them; a few minutes
#   scripts/planted-bugs.sh barging   one
set -eu
cd "$(dirname "$0")/.."
FLOCK_PLANTED_BUGS=${1:-all} cargo test -p flock-core --test planted_bugs -- --nocapture
