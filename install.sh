#!/bin/sh
# Install the SBCL that make.sh built: by its own install.sh, with the manual
# as info and HTML, and then the fork's README, NEWS and ASDF systems, so that
# asdf:load-system finds them.
#
# usage: sh install.sh [--prefix=DIR]     (else the prefix that make.sh was told)
#
# BUILD_ROOT in the environment is put before DIR, as for SBCL's install.sh.

set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
. "$root/tools-for-build/fork-functions.sh"

prefix=
for option; do
    case $option in
        --prefix=/*) prefix=${option#*=} ;;
        --prefix=?*) prefix=$PWD/${option#*=} ;;
        *) sed -n '2,/^$/{s/^# \{0,1\}//p;}' "$0"; exit 1 ;;
    esac
done
[ -f "$build/built" ] || die "there is no whole build in $build: run 'sh make.sh'"

umask 022
unset SBCL_HOME || :
cd "$tree"
. output/prefix.def
prefix=${prefix:-$SBCL_PREFIX}

# SBCL's install.sh takes the manual that it finds.  It is made again each time:
# make does not look whether docstrings have changed.
make_manual() (
    . output/build-config
    cd doc/manual
    rm -f "$build/manual.log"
    $GNUMAKE clean >"$build/manual.log" 2>&1
    need texinfo=makeinfo
    say "Formatting the manual (log: $build/manual.log)"
    $GNUMAKE info html >>"$build/manual.log" 2>&1 ||
        die "the manual could not be formatted; the log says why"
    # The owner of the tree must be able to clean it.
    chown -R --reference=. .
)
manual=true
make_manual || manual=false

sh install.sh --prefix="$prefix"

documents=${BUILD_ROOT-}$prefix/share/doc/sbcl
cp -f "$root/README" "$documents/README"
cp -f "$root/NEWS" "$documents/NEWS.fibers"
echo " text $documents/README"
echo " text $documents/NEWS.fibers"

# The sources are outside SBCL_HOME, because ASDF would write its fasls beside
# them there; the link is inside, because ASDF searches that without being told.
sources=share/common-lisp/source
systems=${BUILD_ROOT-}$prefix/lib/sbcl/systems
rm -rf "$systems"
mkdir -p "$systems"
fork_systems | while read -r asd; do
    name=${asd%/*} name=${name##*/}
    target=${BUILD_ROOT-}$prefix/$sources/$name
    rm -rf "$target"
    mkdir -p "${target%/*}"
    cp -R "$root/contrib/$name" "$target"
    # A script runs what is in the repository.
    find "$target" \( -name '*.fasl' -o -name '*.sh' \) -exec rm {} +
    ln -s "../../../$sources/$name/${asd##*/}" "$systems"
    echo " system $target"
done
$manual || say "The manual was NOT installed; why is said above.  It takes makeinfo, which Debian" \
    "has in the package texinfo.  When that is there, run install.sh again."
