#!/bin/sh
# Try the fork's patches against a release of SBCL.
#
# usage: sh tools-for-build/try-patches.sh [ARCHIVE | DIRECTORY]
#
# Without an argument, the release in UPSTREAM.  To move to the next release,
# change UPSTREAM, run this, and mend in each patch that it names the hunks
# that it shows; then, after make.sh, make-patch.sh --all renews line numbers.

set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
. "$root/tools-for-build/fork-functions.sh"

temp=$(mktemp -d)
trap 'rm -rf "$temp"' EXIT
if [ $# = 0 ]; then
    sh "$root/make.sh" --source
    source=$build/upstream
elif [ -d "$1" ]; then
    source=$1
else
    tar -C "$temp" -xf "$1" || die "cannot unpack $1"
    source=$(echo "$temp"/*)
fi
[ -f "$source/make-config.sh" ] || die "$source holds no source of SBCL"

good=0 bad=0
for file in $(fork_files); do
    original=$source/${file%.patch}
    case $file in
        *.patch) ;;
        *) if [ -f "$original" ]; then
               echo "$file: SBCL has a file of that name now"
               bad=$((bad + 1))
           fi
           continue ;;
    esac
    if [ ! -f "$original" ]; then
        echo "$file: SBCL has no such file"
        bad=$((bad + 1))
    elif cp "$original" "$temp/file" &&
            patch -F0 --no-backup-if-mismatch -r "$temp/rejects" \
                  "$temp/file" "$root/$file" >"$temp/report"; then
        good=$((good + 1))
        # Lines that moved are no fault, but worth a look.
        sed -n "s,^Hunk,$file: &,p" "$temp/report"
    else
        bad=$((bad + 1))
        sed -n "s,^Hunk,$file: &,p" "$temp/report"
        sed 's/^/    /' "$temp/rejects"
    fi
done
echo "$good patches apply, $bad files need mending"
[ $bad = 0 ]
