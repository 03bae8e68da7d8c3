# What the fork's shell scripts share.  To be sourced, with the repository's
# root in $root.
#
# Everything that is made goes to $build:
#   ARCHIVE     the release as fetched (the name is in UPSTREAM)
#   upstream/   the release, unpacked and never changed
#   laid/       the fork's files as they were last laid over it, patches applied
#   sbcl/       upstream/ with laid/ over it, in which SBCL is built
#   cache/      fasls of ASDF systems, compiled by the SBCL in sbcl/
#   tests/      logs of run-tests.sh
#   plain/      what compare-plain.sh compares

build=${SBCL_BUILD:-$root/build}
case $build in /*) ;; *) build=$PWD/$build ;; esac
tree=$build/sbcl
# SBCL's make-config.sh asks git for a version, and would be told this
# repository's.
GIT_CEILING_DIRECTORIES=$build
export GIT_CEILING_DIRECTORIES

say() { printf '%s\n' "$*" >&2; }
die() { say "${0##*/}: $*"; exit 1; }

# need PACKAGE[=COMMAND|=/PATH]...
# See to it that every command is in PATH and every path is there.  Debian's
# packages of those that are not get installed, if we may.
need() {
    packages=$(missing "$@")
    [ "$packages" ] || return 0
    install="apt-get install -y --no-install-recommends $packages"
    command -v apt-get >/dev/null || die "please install first: $packages"
    [ "$(id -u)" = 0 ] || die "something is missing; run: sudo $install"
    say "Installing $packages"
    export DEBIAN_FRONTEND=noninteractive
    # A fresh machine has no lists, and an old one lists of files now gone.
    $install </dev/null >&2 ||
        { apt-get update </dev/null >&2 && $install </dev/null >&2; } ||
        die "could not install $packages; run '$install' and see why"
    packages=$(missing "$@")
    [ ! "$packages" ] || die "installed, but not to be found: $packages"
}

missing() (
    packages=
    for item; do
        case ${item#*=} in
            /*) [ -e "${item#*=}" ] ;;
            *) command -v "${item#*=}" >/dev/null ;;
        esac || packages="$packages ${item%%=*}"
    done
    echo $packages
)

# What make.sh needs, for need, with the host Lisp and options of the build.
build_needs() {
    compiler=${CC:-cc}
    echo gcc="${compiler%% *}" make="${GNUMAKE:-make}" xz-utils=xz patch diffutils=diff
    compiles stdio.h || echo libc6-dev=/usr/include/stdio.h
    host=sbcl
    for option; do
        case $option in
            --xc-host=*) host=${option#*=} ;;
            --fancy | --with-sb-core-compression)
                compiles zstd.h || echo libzstd-dev=/usr/include/zstd.h ;;
        esac
    done
    case $host in sbcl | "sbcl "*) echo sbcl ;; esac
}
compiles() { echo "#include <$1>" | ${CC:-cc} -E - >/dev/null 2>&1; }

# The mirrors of apt's .list and .sources files.
debian_mirrors() {
    cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list \
        /etc/apt/sources.list.d/*.sources 2>/dev/null |
        sed -n -e 's/^deb[[:blank:]]*\(\[[^]]*\]\)*[[:blank:]]*\([^ ]*\) .*/\2/p' \
               -e 's/^URIs:[[:blank:]]*//p' |
        tr ' ' '\n' | grep -v security | sort -u
}

release=$(sed -n 's/^release //p' "$root/UPSTREAM")

# known_sum FILE: set $sum to FILE's; fail if it is not in UPSTREAM.
known_sum() {
    sum=$(sha256sum <"$1") && sum=${sum%% *} && grep -q "^$sum " "$root/UPSTREAM"
}

# The files of the fork that go into the tree, relative to the root: all in
# SBCL's own directories, and patches of files at the top.
fork_files() (
    cd "$root"
    find src contrib tests doc tools-for-build -type f \
         ! -name '.*' ! -name '*~' ! -name '#*' ! -name '*.orig' \
         ! -name '*.rej' ! -name '*.fasl' 2>/dev/null |
        while read -r file; do
            case $file in
                tests/fiber/* | tests/in-fibers/* | tests/bench/* | tools-for-build/*.sh) ;;
                *.patch) echo "$file" ;;
                # An ASDF system of ours, which SBCL's build knows nothing of.
                contrib/*/*)
                    dir=${file#contrib/} dir=contrib/${dir%%/*}
                    if [ -d "$build/upstream/$dir" ] || [ -f "$dir/Makefile" ]
                    then echo "$file"; fi ;;
                *) echo "$file" ;;
            esac
        done
    find . -maxdepth 1 -name '*.patch' | sed 's,^\./,,'
)

# The fork's ASDF systems: contribs with an .asd and without a Makefile.
fork_systems() (
    cd "$root"
    for asd in contrib/*/*.asd; do
        dir=${asd%/*}
        [ ! -f "$asd" ] || [ -f "$dir/Makefile" ] ||
            [ -d "$build/upstream/$dir" ] || echo "$asd"
    done
)

# stage DIR: make DIR hold the fork's files as they are to be in the tree.
# The names of patches that do not apply are printed, and make it fail.
stage() (
    rm -rf "$1"
    mkdir "$1"
    fork_files | {
        status=0
        while read -r file; do
            target=$1/${file%.patch}
            mkdir -p "${target%/*}"
            case $file in
                *.patch)
                    patched "$root/$file" "$build/upstream/${file%.patch}" "$target" ||
                        { echo "$file"; status=1; } ;;
                *) cp -p "$root/$file" "$target" ;;
            esac
        done
        exit $status
    }
)

# patched PATCH ORIGINAL TARGET: what PATCH makes of ORIGINAL, into TARGET.
# With GNU patch's usual fuzz one line of context would match anywhere.
patched() {
    [ -f "$2" ] && cp -p "$2" "$3" &&
        patch -s -F0 --no-backup-if-mismatch -r - "$3" "$1" >&2
}

# edited_files [DIR]: files in the tree that someone has edited: neither
# upstream's, nor as they were laid, nor as they are to be laid from the staged
# DIR.  SBCL's build itself notes new hash functions in xperfecthash*.
edited_files() (
    [ -d "$tree" ] && cd "$tree" || return 0
    {
        LC_ALL=C diff -rq "$build/upstream" . |
            sed -n 's,^Files .* and \./\(.*\) differ$,\1,p'
        { cd "$build/laid" && find . -type f; } 2>/dev/null | sed 's,^\./,,'
    } | grep -v '^xperfecthash' | sort -u | while read -r file; do
        [ ! -f "$file" ] || cmp -s "$build/upstream/$file" "$file" ||
            cmp -s "$build/laid/$file" "$file" ||
            cmp -s "${1-}/$file" "$file" || echo "$file"
    done
)
