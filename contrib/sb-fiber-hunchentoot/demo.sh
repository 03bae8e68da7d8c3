#!/bin/sh
# Serve http://127.0.0.1:4242/ from fibers, having built and installed what
# that needs.
#
# usage: sh contrib/sb-fiber-hunchentoot/demo.sh [ARGUMENT]...   (SBCL's own)

set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
. "$root/tools-for-build/fork-functions.sh"

needs=cl-hunchentoot=/usr/share/common-lisp/source/hunchentoot
[ -f "$build/built" ] || needs="$needs $(build_needs)"
need $needs
sh "$root/make.sh" --again
exec sh "$root/run-sbcl.sh" "$@" \
     --load "$root/contrib/sb-fiber-hunchentoot/demo.lisp"
