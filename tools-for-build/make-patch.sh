#!/bin/sh
# Take home what was edited in build/sbcl: FILE.patch of an upstream file, or
# the file itself if it is the fork's own.
#
# usage: sh tools-for-build/make-patch.sh FILE...
#        sh tools-for-build/make-patch.sh --all     all that make.sh calls edited
#
# FILE is src/code/unix.lisp, build/sbcl/src/code/unix.lisp, or
# src/code/unix.lisp.patch.  A file that is upstream's again loses its patch.

set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
. "$root/tools-for-build/fork-functions.sh"

[ $# -gt 0 ] || { sed -n '2,/^$/{s/^# \{0,1\}//p;}' "$0"; exit 1; }
[ -d "$tree" ] || die "there is no $tree: run 'sh make.sh'"
temp=$build/make-patch.tmp
trap 'rm -rf "$temp"' EXIT
rm -rf "$temp"
mkdir "$temp"
if [ "$1" = --all ]; then set -- $(edited_files "$temp"); fi

# same A B: the same contents, or neither there.
same() { cmp -s "$1" "$2" || { [ ! -e "$1" ] && [ ! -e "$2" ]; }; }

for file; do
    file=${file#"$PWD"/} file=${file#"$tree"/} file=${file#build/sbcl/}
    file=${file#./} file=${file%.patch}
    original=$build/upstream/$file patch=$root/$file.patch
    [ -f "$tree/$file" ] || die "there is no $tree/$file"
    if [ ! -f "$original" ]; then
        same "$root/$file" "$build/laid/$file" || same "$root/$file" "$tree/$file" ||
            die "$file is edited both here and in $tree: merge them by hand"
        if same "$root/$file" "$tree/$file"; then continue; fi
        mkdir -p "$root/${file%/*}"
        cp "$tree/$file" "$root/$file"
        say "$file: copied"
        continue
    fi
    # What the patch here makes must be what was laid, and then edited: else
    # the changes of whoever touched the patch since would go.
    if [ -f "$patch" ]; then
        patched "$patch" "$original" "$temp/now" || die "$file.patch does not apply"
    else
        cp "$original" "$temp/now"
    fi
    if [ -f "$build/laid/$file" ]; then laid=$build/laid/$file; else laid=$original; fi
    cmp -s "$temp/now" "$laid" || cmp -s "$temp/now" "$tree/$file" ||
        die "$file.patch has changed since make.sh laid it, and the file was" \
            "edited in $tree: put the patch back as it was, or merge by hand"
    if cmp -s "$tree/$file" "$temp/now"; then continue; fi
    if cmp -s "$original" "$tree/$file"; then
        rm "$patch"
        say "$file.patch: removed"
        continue
    fi
    # Names without dates, or the patch would differ each time.
    diff -U1 --label "a/$file" --label "b/$file" "$original" "$tree/$file" \
         >"$temp/patch" || [ $? = 1 ] || die "cannot compare $file"
    patched "$temp/patch" "$original" "$temp/again" &&
        cmp -s "$temp/again" "$tree/$file" ||
        die "the patch of $file does not make $tree/$file again"
    mkdir -p "${patch%/*}"
    cp "$temp/patch" "$patch"
    say "$file.patch: $(sed 1,2d "$patch" | grep -c '^[-+]') lines changed"
done
