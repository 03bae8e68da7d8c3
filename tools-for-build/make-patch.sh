#!/bin/sh
# Take home what was edited in build/sbcl: FILE.patch of an upstream file, or
# the file itself if it is the fork's own.
#
# usage: sh tools-for-build/make-patch.sh FILE...
#        sh tools-for-build/make-patch.sh --all     all edited, and all patched
#
# FILE is src/code/unix.lisp, build/sbcl/src/code/unix.lisp, or
# src/code/unix.lisp.patch.  A file that is upstream's again loses its patch.

set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
. "$root/tools-for-build/fork-functions.sh"

[ $# -gt 0 ] || { sed -n '2,/^$/{s/^# \{0,1\}//p;}' "$0"; exit 1; }
[ -d "$tree" ] || die "there is no $tree: run 'sh make.sh'"
temp=$(mktemp -d)
trap 'rm -rf "$temp"' EXIT
if [ "$1" = --all ]; then
    set -- $({ edited_files; fork_files | grep '\.patch$'; } | sed 's/\.patch$//' | sort -u)
fi

# From here on, $file is laid as it is edited.
in_step() {
    mkdir -p "$(dirname "$build/laid/$file")"
    cp "$edited" "$build/laid/$file"
}

for file; do
    file=${file#"$PWD"/} file=${file#"$tree"/} file=${file#build/sbcl/}
    file=${file#./} file=${file%.patch}
    original=$build/upstream/$file patch=$root/$file.patch
    edited=$tree/$file laid=$build/laid/$file here=$temp/here
    [ -f "$edited" ] || die "there is no $edited"
    [ -f "$laid" ] || laid=$original
    if [ ! -f "$original" ]; then
        here=$root/$file
    elif [ -f "$patch" ]; then
        patched "$patch" "$original" "$here" || die "$file.patch does not apply"
    else
        cp "$original" "$here"
    fi

    # What is here must be what was laid, and then edited: else the changes of
    # whoever touched it here since would go.
    if ! cmp -s "$here" "$edited" && [ -f "$laid" ] && ! cmp -s "$here" "$laid"; then
        ! cmp -s "$edited" "$laid" ||
            die "$file has changed here since it was laid: run make.sh first"
        die "$file has changed since it was laid both here and in $tree:" \
            "merge it by hand"
    fi

    if [ ! -f "$original" ]; then
        if cmp -s "$edited" "$here"; then continue; fi
        mkdir -p "${here%/*}"
        cp "$edited" "$here"
        in_step
        say "$file: copied"
        continue
    fi
    if cmp -s "$edited" "$original"; then
        [ ! -f "$patch" ] || { rm "$patch"; say "$file.patch: removed"; }
        rm -f "$build/laid/$file"
        continue
    fi
    # Names without dates, or the patch would differ each time.
    diff -U1 --label "a/$file" --label "b/$file" "$original" "$edited" \
         >"$temp/patch" || [ $? = 1 ] || die "cannot compare $file"
    patched "$temp/patch" "$original" "$temp/again" &&
        cmp -s "$temp/again" "$edited" ||
        die "the patch of $file does not make $edited again"
    if cmp -s "$temp/patch" "$patch"; then continue; fi
    mkdir -p "${patch%/*}"
    cp "$temp/patch" "$patch"
    in_step
    say "$file.patch: $(sed 1,2d "$patch" | grep -c '^[-+]') lines changed"
done
