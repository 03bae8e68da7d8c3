#!/bin/sh
# Build SBCL with fibers in build/sbcl: fetch the release of SBCL named in
# UPSTREAM, lay the fork's files and patches over it, run SBCL's own make.sh.
#
# usage: sh make.sh [--again | OPTION...]
#        sh make.sh --source     only fetch and unpack the release
#
#   --again     the options of the last build, whatever they were
#   OPTION      one of SBCL's make-config.sh: --prefix=, --xc-host=,
#               --dynamic-space-size=, --fancy, --with-FEATURE, ...;
#               --without-sb-fiber builds a plain SBCL from the same tree
#
# environment:
#   SBCL_SOURCE     an archive or a directory of the release, instead of
#                   fetching it
#   SBCL_BUILD      where to build, instead of build/
#   SBCL_MAKE_JOBS  make's -j option, instead of a job for each processor
#
# A second run does as little as is safe: nothing, the C runtime alone, what
# SBCL compiles with itself, the contribs, or everything.

set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
. "$root/tools-for-build/fork-functions.sh"

case ${1-} in --help | -h) sed -n '2,/^$/{s/^# \{0,1\}//p;}' "$0"; exit ;; esac

mkdir -p "$build"
if command -v flock >/dev/null; then
    exec 9>"$build/lock"
    flock -n 9 || die "another make.sh is at work in $build"
fi
# A killed run leaves some.
rm -rf "$build"/*.tmp
trap 'rm -rf "$build"/*.tmp' EXIT
trap 'exit 130' HUP INT TERM

source_only=false
if [ "${1-}" = --source ]; then shift; source_only=true; fi
if [ "${1-}" = --again ]; then
    shift
    if [ -f "$build/options" ]; then
        set --
        while IFS= read -r option; do set -- "$@" "$option"; done <"$build/options"
    fi
fi
if [ $# -gt 0 ]; then printf '%s\n' "$@"; fi >"$build/options.tmp"

need $(build_needs "$@")
host=sbcl
for option; do
    case $option in --xc-host=*) host=${option#*=} ;; esac
done
command -v "${host%% *}" >/dev/null ||
    die "there is no ${host%% *}: --xc-host= must name a Common Lisp to build with"

### The release, in $build/upstream

# fetch_from_debian NAME: get the archive NAME of Debian's source package sbcl
# from a mirror this machine uses, in apt's ways (proxies, credentials) but
# with lists and a state of its own.  What we trust is the archive's sum.
fetch_from_debian() {
    command -v apt-get >/dev/null || return 1
    name=$1 apt=$build/apt.tmp
    set -- -q -o Dir::Etc::sourcelist="$apt/sources.list" \
        -o Dir::Etc::sourceparts=- -o Dir::State="$apt" \
        -o Dir::Cache="$apt/cache" -o APT::Sandbox::User=root
    for mirror in $(debian_mirrors); do
        for suite in $(sed -n 's/^suites //p' "$root/UPSTREAM"); do
            rm -rf "$apt"
            mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
            echo "deb-src [trusted=yes] $mirror $suite main" >"$apt/sources.list"
            apt-get "$@" update || continue
            uri=$(apt-get "$@" source --print-uris sbcl |
                  sed -n "s,^'\([^']*/$name\)' .*,\1,p")
            [ "$uri" ] || continue
            /usr/lib/apt/apt-helper "$@" download-file "$uri" "$build/$name.tmp" &&
                return
        done
    done >"$build/fetch.log" 2>&1
    return 1
}

# Find the release: sets $source, and $from to what tells it from others.
find_source() {
    if [ "${SBCL_SOURCE-}" ]; then
        source=$SBCL_SOURCE
        [ -e "$source" ] || die "there is no $source, which SBCL_SOURCE names"
        if [ -d "$source" ]; then from="directory"; return; fi
        known_sum "$source" || die "$source is not an archive that UPSTREAM" \
            "knows (SHA-256 $sum): set SBCL_SOURCE to one that is"
    else
        names=$(sed -n 's/^[0-9a-f]\{64\}  //p' "$root/UPSTREAM")
        for name in $names; do
            source=$build/$name
            ! [ -f "$source" ] || known_sum "$source" ||
                die "$source has a wrong SHA-256 sum: remove it and run again"
            if [ -f "$source" ]; then from=$sum; return; fi
        done
        # Unpacked before, and the archive removed since.
        source=
        from=$(sed -n "s/^$release //p" "$build/upstream-from" 2>/dev/null) || :
        if grep -q "^${from:-none}  " "$root/UPSTREAM"; then return; fi
        fetch
    fi
    from=$sum
}

fetch() {
    for name in $names; do
        source=$build/$name
        say "Fetching $name"
        case $name in
            *.orig.tar.*) fetch_from_debian "$name" ;;
            *) need curl
               curl -fL --retry 2 -o "$source.tmp" "$download_page/$name" ;;
        esac || continue
        known_sum "$source.tmp" || die "$name as fetched has a wrong SHA-256" \
            "sum ($sum): try again later, or name an archive in SBCL_SOURCE"
        mv "$source.tmp" "$source"
        return
    done
    die "cannot fetch SBCL $release (see $build/fetch.log): give its archive" \
        "or its directory in SBCL_SOURCE, or put one of these in $build:" $names
}
download_page=https://downloads.sourceforge.net/project/sbcl/sbcl/$release

find_source
if [ "$from" = directory ] ||
       [ "$(cat "$build/upstream-from" 2>/dev/null)" != "$release $from" ]; then
    mkdir "$build/unpack.tmp"
    if [ "$from" = directory ]; then
        [ -f "$source/make-config.sh" ] || die "$source is not SBCL's source"
        mkdir "$build/unpack.tmp/sbcl"
        tar -C "$source" --exclude=./.git --exclude=./obj --exclude=./output \
            --exclude=./src/runtime/ldb -cf - . |
            tar -C "$build/unpack.tmp/sbcl" -xf -
        (cd "$build/unpack.tmp/sbcl" && sh clean.sh) >/dev/null 2>&1 ||
            die "cannot clean a copy of $source: clean it yourself"
    else
        say "Unpacking ${source##*/}"
        tar -C "$build/unpack.tmp" -xf "$source" || die "cannot unpack $source"
    fi
    set -- "$build"/unpack.tmp/* "$@"
    [ -f "$1/make-config.sh" ] || die "$source holds no source of SBCL"
    rm -f "$1/version.lisp-expr"
    if ! diff -rq "$1" "$build/upstream" >/dev/null 2>&1; then
        edited=$(edited_files)
        [ ! "$edited" ] || die "edited in $tree, and would be lost:" $edited
        rm -rf "$build/upstream-from" "$build/built" "$tree" "$build/laid" \
           "$build/upstream"
        mv "$1" "$build/upstream"
    fi
    shift
    echo "$release $from" >"$build/upstream-from"
fi

if $source_only; then exit; fi

### The fork's files, over it in $tree

rejects=$(stage "$build/laid.tmp") ||
    die "does not apply to SBCL $release:" $rejects "(mend it; see" \
        "tools-for-build/try-patches.sh)"
cd "$build/laid.tmp"
# SBCL's build would rewrite such files, and make-patch.sh find them edited.
blanks=$(find . -name '*.lisp' -o -name '*.lisp-expr' -o -name '*.[ch]' \
              -o -name '*.asd' -o -name '*.texinfo' |
         xargs -r grep -l -e "$(printf '\t')" -e ' $') || :
[ ! "$blanks" ] || die "tabs or trailing blanks, take them out:" $blanks
cd "$root"
edited=$(edited_files "$build/laid.tmp")
[ ! "$edited" ] || die "edited in $tree, and would be lost (take them home with" \
    "'sh tools-for-build/make-patch.sh --all', or remove them there):" $edited

if [ ! -d "$tree" ]; then
    rm -f "$build/built"
    cp -Rp "$build/upstream" "$build/sbcl.tmp"
    mv "$build/sbcl.tmp" "$tree"
fi
(cd "$build/laid" 2>/dev/null && find . -type f) |
    while read -r file; do
        if [ -f "$build/laid.tmp/$file" ]; then continue; fi
        rm -f "$tree/$file"
        if [ -f "$build/upstream/$file" ]; then
            cp "$build/upstream/$file" "$tree/$file"
        fi
    done
(cd "$build/laid.tmp" && find . -type f) |
    while read -r file; do
        if cmp -s "$build/laid.tmp/$file" "$tree/$file"; then continue; fi
        mkdir -p "$tree/${file%/*}"
        # Not -p: make goes by the date.
        cp "$build/laid.tmp/$file" "$tree/$file"
    done
rm -rf "$build/laid"
mv "$build/laid.tmp" "$build/laid"
echo "\"$release.fibers\"" >"$tree/version.lisp-expr"

### What has to be built
#
# $build/built tells of what the last build was made, in lines "option OPTION"
# and "SUM  ./FILE", or "unknown ./FILE" if a build that failed came that far.

sed 's/^/option /' "$build/options.tmp" >"$build/header.tmp"
(cd "$build/laid" && find . -type f | sort | xargs -r sha256sum) >"$build/sums.tmp"

# built [FILE]: say that all has been built, but that of the files listed in
# FILE nobody knows: a build that fails or is killed must not pass for whole.
built() {
    if [ $# -gt 0 ]; then
        awk 'FNR == NR { changed[$0]; next } !($2 in changed)' "$1" "$build/sums.tmp"
        sed 's/^/unknown /' "$1"
    else
        cat "$build/sums.tmp"
    fi | cat "$build/header.tmp" - >"$build/built.tmp"
    mv "$build/built.tmp" "$build/built"
}

# The stems that SBCL compiles with itself: the second list of the build order.
warm() {
    sed -n '/^((/,${s/;.*//;p;}' "$tree/src/cold/build-order.lisp-expr" |
        grep -q "\"$1\""
}

runtime=false headers=false warm=false contribs=false all=false
sed '/^[0-9a-fu]/!d' "$build/built" 2>/dev/null |
    sort - "$build/sums.tmp" | uniq -u | awk '{ print $2 }' |
    sort -u >"$build/changed.tmp"
if [ ! -f "$build/built" ] ||
       ! sed '/^option/!d' "$build/built" | cmp -s - "$build/header.tmp"; then
    all=true
fi
while read -r file; do
    case $file in
        ./tests/* | ./doc/*) ;;
        # make has it among the dependencies of others.
        ./src/runtime/*.h) runtime=true headers=true
                           [ -f "$tree/$file" ] || all=true ;;
        ./src/runtime/*.[cS]) runtime=true ;;
        ./contrib/*) contribs=true ;;
        *.lisp) stem=${file#./} stem=${stem%.lisp}
                if warm "$stem"; then warm=true; else all=true; fi ;;
        *) all=true ;;
    esac
done <"$build/changed.tmp"

### Building

: "${SBCL_MAKE_JOBS=-j$(nproc)}"
export SBCL_MAKE_JOBS
unset SBCL_HOME || :

# in_tree COMMAND...: its output goes to make.log, its headings here as well.
in_tree() {
    { (cd "$tree" && "$@") </dev/null 2>&1 && : >"$build/done.tmp"; } |
        tee -a "$build/make.log" | grep --line-buffered '^//' >&2 || :
    rm "$build/done.tmp" 2>/dev/null ||
        { tail -n 25 "$build/make.log" >&2
          die "the build failed; all that it said is in $build/make.log"; }
}

build_runtime() {
    . output/build-config
    $GNUMAKE $SBCL_MAKE_JOBS -C src/runtime all
}

# What Lisp knows of C's headers, and whether that is still so.
same_headers() (
    cd "$tree/tools-for-build"
    . ../output/build-config
    rm -f grovel-headers
    $GNUMAKE -I../src/runtime grovel-headers &&
        ./grovel-headers >"$build/headers.tmp" &&
        cmp "$build/headers.tmp" ../output/stuff-groveled-from-headers.lisp
) >>"$build/make.log" 2>&1

: >"$build/make.log"
if ! $all && $headers; then same_headers || all=true; fi
if $all; then
    rm -f "$build/built"
    mv "$build/options.tmp" "$build/options"
    # A user's option comes later, and wins.
    set -- --dynamic-space-size=8GB "$@"
    case $(uname -sm) in "Linux x86_64") set -- --with-sb-fiber "$@" ;; esac
    say "Building SBCL $release.fibers in $tree (log: $build/make.log)"
    in_tree sh make.sh "$@"
else
    built "$build/changed.tmp"
    if $runtime; then say "Building the C runtime"; in_tree build_runtime; fi
    if $warm; then say "Building what SBCL compiles"; in_tree sh make-target-2.sh; fi
    if $warm || $contribs; then
        say "Building the contribs"
        rm -rf "$tree/obj/sbcl-home/contrib" "$tree/obj/from-self/contrib"
        in_tree sh make-target-contrib.sh
    fi
fi
$runtime || $warm || $contribs || $all || say "Nothing to build"

[ "$("$tree/src/runtime/sbcl" --version)" = "SBCL $release.fibers" ] ||
    die "$tree/src/runtime/sbcl does not run"
# ASDF looks for systems below SBCL_HOME, whatever its configuration says.
rm -rf "$tree/obj/sbcl-home/systems"
mkdir "$tree/obj/sbcl-home/systems"
fork_systems | while read -r asd; do
    ln -s "$root/$asd" "$tree/obj/sbcl-home/systems"
done
# Fasls of systems may have structures of the last build inlined.
if $all || $warm; then rm -rf "$build/cache"; fi
built
