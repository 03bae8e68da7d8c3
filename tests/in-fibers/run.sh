#!/bin/sh
# Run a part of a suite of tests/in-fibers in a process of its own.
#
# usage: sh tests/in-fibers/run.sh DIR SUITE K/N [MODE]...
#
# SUITE is one of suites.lisp, of which every Nth test is run, beginning with
# the Kth, in a thread and then in each MODE (body-1, all-16, ..., see
# harness.lisp; all if none is given).  The output is in DIR/SUITE-K.log, and
# what the tests write in DIR/SUITE-K/.

set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
. "$root/tools-for-build/fork-functions.sh"

dir=$1/$2-${3%/*}
shift
rm -rf "$dir"
mkdir -p "$dir"
cd "$dir"
# SBCL's tests look for files beside them, and write there.
ln -s "$tree"/tests/* .
exec timeout -k 10 "${SUITE_TIMEOUT:-300}" \
    sh "$root/run-sbcl.sh" --noinform --disable-ldb \
    --no-sysinit --no-userinit --non-interactive \
    --load "$root/tests/in-fibers/run.lisp" -- "$@" \
    </dev/null >"$dir.log" 2>&1
