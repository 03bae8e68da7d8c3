#!/bin/sh
# Show that without fibers this tree is upstream's SBCL.
#
# usage: sh tools-for-build/compare-plain.sh
#
# The release and this tree, as --without-sb-fiber has it, are cross-compiled
# side by side in build/plain/, up to the point where SBCL begins to compile
# itself, and what came of it is compared: each fasl, and each object of the C
# runtime.  They are the same but for line numbers, which are made 0 in both.
# The last line says how many files are the same and how many differ.

set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
. "$root/tools-for-build/fork-functions.sh"

case ${1-} in --help | -h) sed -n '2,/^$/{s/^# \{0,1\}//p;}' "$0"; exit ;; esac

sh "$root/make.sh" --source
plain=$build/plain
rm -rf "$plain"
mkdir "$plain"
stage "$plain/laid" || die "patches do not apply"
for name in upstream ours; do cp -Rp "$build/upstream" "$plain/$name"; done
cp -Rp "$plain/laid/." "$plain/ours"
# Fasls hold the dates of their sources.
(cd "$plain/laid" && find . -type f) |
    while read -r file; do
        [ ! -f "$build/upstream/$file" ] || touch -r "$build/upstream/$file" "$plain/ours/$file"
    done

# Fasls tell where in a source the forms are, and in a toplevel form its parts:
# have them all at the beginning.
for name in upstream ours; do
    file=$plain/$name/src/compiler/debug-dump.lisp
    sed -e 's/(file-info-positions file-info)/(substitute-if 0 (constantly t) &)/' \
        -e 's/(source-path-form-number path)/0/' "$file" >"$file.new"
    ! cmp -s "$file" "$file.new" || die "debug-dump.lisp is not as it was"
    touch -r "$file" "$file.new"
    mv "$file.new" "$file"
done

# cross_compile NAME: the first steps of SBCL's make.sh.
cross_compile() (
    cd "$plain/$1"
    echo "\"$release.plain\"" >version.lisp-expr
    CC="${CC:-cc} -D__LINE__=0 -Wno-builtin-macro-redefined"
    SOURCE_DATE_EPOCH=0 # else the objects tell when they were made
    export CC SOURCE_DATE_EPOCH
    sh make-config.sh --dynamic-space-size=8GB &&
        . output/prefix.def && . output/build-config &&
        sh make-host-1.sh && sh make-target-1.sh && sh make-host-2.sh
) >"$plain/$1.log" 2>&1 </dev/null

cross_compile upstream & pid=$!
cross_compile ours || { tail -n 25 "$plain/ours.log"; die "cannot build a plain SBCL"; }
wait $pid || { tail -n 25 "$plain/upstream.log"; die "cannot build the release"; }

same=0 different=0
# compare FILE: in both trees.
compare() {
    if cmp -s "$plain/upstream/$1" "$plain/ours/$1"
    then same=$((same + 1))
    else different=$((different + 1)); echo "$1 differs"
    fi
}
for object in "$plain"/*/src/runtime/*.o; do strip -g "$object"; done
files=$(for name in upstream ours; do
            cd "$plain/$name" && find obj/from-xc src/runtime -name '*-obj' -o -name '*.o'
        done | sort -u)
for file in $files; do compare "$file"; done
echo "plain: $same passed, $different failed"
[ $different = 0 ] && [ $same -gt 0 ]
