#!/bin/sh
# Install the SBCL that make.sh built: by its own install.sh, and then the
# fork's ASDF systems, so that asdf:load-system finds them.
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
sh install.sh --prefix="$prefix"

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
