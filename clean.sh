#!/bin/sh
# Remove what make.sh and run-tests.sh made, but not the archive they fetched.
#
# usage: sh clean.sh [--all] [--force]
#
#   --all       remove the archive too
#   --force     even if files in build/sbcl were edited

set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
. "$root/tools-for-build/fork-functions.sh"

all=false force=false
for option; do
    case $option in
        --all) all=true ;;
        --force) force=true ;;
        *) sed -n '2,/^$/{s/^# \{0,1\}//p;}' "$0"; exit 1 ;;
    esac
done

edited=$(edited_files)
[ ! "$edited" ] || $force || die "edited in $tree, and would be lost (take" \
    "them home with 'sh tools-for-build/make-patch.sh --all', or use --force):" \
    $edited
# First of all what calls the rest whole.
rm -f "$build/built" "$build/upstream-from"
cd "$build" 2>/dev/null || exit 0
rm -rf sbcl laid upstream cache tests plain rejects ./*.tmp options lock ./*.log
if $all; then
    sed -n 's/^[0-9a-f]\{64\}  //p' "$root/UPSTREAM" | xargs rm -f
    cd "$root"
    rmdir "$build" 2>/dev/null || say "not ours, and still there: $build/*"
fi
