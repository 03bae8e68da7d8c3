#!/bin/sh
# Run the SBCL built in build/sbcl, where it is.
#
# usage: sh run-sbcl.sh [ARGUMENT]...     (SBCL's own arguments)

set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
. "$root/tools-for-build/fork-functions.sh"

[ -f "$build/built" ] || die "there is no whole build in $build: run 'sh make.sh'"
# A fiber costs no thread, but a connection still costs a descriptor.
ulimit -n "$(ulimit -Hn)" 2>/dev/null || :
# Another SBCL of the same version may have compiled what is in the usual place.
: "${ASDF_OUTPUT_TRANSLATIONS:=/:$build/cache/}"
export ASDF_OUTPUT_TRANSLATIONS
SBCL_HOME=$tree/obj/sbcl-home
export SBCL_HOME
exec "$tree/src/runtime/sbcl" --core "$tree/output/sbcl.core" "$@"
