#!/bin/sh
# Run the tests, after building what has to be built.
#
# usage: sh run-tests.sh [NAME]...
#
# NAME is a suite of tests/fiber/ (socket for tests/fiber/socket.lisp), or
#   in-fibers      tests of SBCL, bordeaux-threads, usocket and CFFI, run in a
#                  thread and in fibers (see tests/in-fibers/harness.lisp);
#   NAME-moving    a suite of tests/fiber/ such that each fiber is resumed by
#                  another carrier than before;
#   NAME-persistent, NAME-moving-persistent
#                  a suite of tests/fiber/ with pollers of that kind;
#   NAME-sliced    a suite of tests/fiber/ with time slices of a millisecond;
#   long           fibers made and ended in all ways for twenty minutes, after
#                  which no memory, descriptor or stack is lost;
#   plain          is a build without fibers upstream's SBCL, file by file: the C
#                  and what the host Lisp compiles (see
#                  tools-for-build/compare-plain.sh);
#   upstream       SBCL's own regression tests, each of its files counted as one
#                  (to run one of them:
#                  cd build/sbcl/tests && sh run-tests.sh FILE).
# Without a name, all but long are run, and those about locks, waits, descriptors,
# time, channels and scopes also as NAME-moving, those about descriptors also as
# NAME-persistent and NAME-moving-persistent, and some as NAME-sliced.  The last line says
# how many checks passed and how many failed.  A suite that crashes, or takes longer than
# SUITE_TIMEOUT seconds (300; 1800 for long), counts as one that failed.  Logs are left in
# build/tests/.

set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
. "$root/tools-for-build/fork-functions.sh"

case ${1-} in --help | -h) sed -n '2,/^$/{s/^# \{0,1\}//p;}' "$0"; exit ;; esac

if [ $# = 0 ]; then
    for file in "$root"/tests/fiber/*.lisp; do
        name=${file##*/} name=${name%.lisp}
        case $name in package | run | long) ;; *) set -- "$@" "$name" ;; esac
    done
    for name in locks mutex concurrency waits deadlock disturbances io select closing socket sleep \
                yield occasion scope; do
        set -- "$@" "$name-moving"
    done
    for name in io socket select closing hunchentoot http-server; do
        set -- "$@" "$name-persistent" "$name-moving-persistent"
    done
    set -- "$@" reuse-persistent # which is about the order on one carrier
    for name in mixture locks channel hunchentoot; do
        set -- "$@" "$name-sliced"
    done
    set -- "$@" in-fibers plain upstream
fi

# file_of NAME: NAME without what tells how it is run
file_of() {
    set -- "${1%-persistent}"
    set -- "${1%-sliced}"
    echo "${1%-moving}"
}

for name; do
    case $name in in-fibers | plain | upstream) continue ;; esac
    file=$(file_of "$name")
    [ -f "$root/tests/fiber/$file.lisp" ] ||
        die "there is no suite $name: no file tests/fiber/$file.lisp"
done

# Hunchentoot's own tests are in its release, and not in Debian's package: in
# HUNCHENTOOT_SOURCE, or fetched.
hunchentoot_tests() {
    [ "${HUNCHENTOOT_SOURCE-}" ] && return
    version=1.2.38
    HUNCHENTOOT_SOURCE=$build/hunchentoot-v$version
    export HUNCHENTOOT_SOURCE
    [ -d "$HUNCHENTOOT_SOURCE" ] && return
    archive=$build/hunchentoot.tar.gz
    for mirror in $(debian_mirrors); do
        if /usr/lib/apt/apt-helper download-file \
               "$mirror/pool/main/h/hunchentoot/hunchentoot_$version.orig.tar.gz" "$archive" \
               SHA256:9a29698453a04c5cc1ff37edfe961122eb1baf5cb5c02a50efd34f525ef99dae
        then
            tar -xzf "$archive" -C "$build"
            return
        fi
    done >"$build/fetch.log" 2>&1
    return 1
}

needs=
lisp=/usr/share/common-lisp/source
[ "$*" = upstream ] || [ "$*" = plain ] ||
    needs="cl-fiveam=$lisp/fiveam cl-hunchentoot=$lisp/hunchentoot
           cl-usocket=$lisp/usocket cl-bordeaux-threads=$lisp/bordeaux-threads
           cl-cffi=$lisp/cl-cffi"
case " $* " in *" upstream "*) needs="$needs procps=ps" ;; esac
case " $* " in
    *" foreign "* | *" foreign-moving "* | *" foreign-random "* | *" foreign-random-moving "*)
        compiler=${CC:-cc}
        needs="$needs gcc=${compiler%% *}"
        compiles stdio.h || needs="$needs libc6-dev=/usr/include/stdio.h" ;;
esac
case " $* " in
    *" ssl "* | *" ssl-moving "* | *" http-tls "* | *" http-tls-moving "* | *" manual "*)
        needs="$needs cl-plus-ssl=$lisp/cl+ssl openssl" ;;
esac
case " $* " in
    *" hunchentoot-suite"*) needs="$needs cl-drakma=$lisp/drakma cl-who=$lisp/cl-who" ;;
esac
case " $* " in *" build "*) needs="$needs texinfo=makeinfo" ;; esac
case " $* " in
    *" in-fibers "*)
        needs="$needs cl-rt=$lisp/rt pkg-config"
        compiles ffi.h || needs="$needs libffi-dev=/usr/include/x86_64-linux-gnu/ffi.h" ;;
esac
# All at once: whoever may not install gets one line to run.
[ -f "$build/built" ] || needs="$needs $(build_needs)"
need $needs
sh "$root/make.sh" --again

logs=$build/tests
rm -rf "$logs"
mkdir "$logs"
passed=0 failed=0

# count PASSED FAILED
count() { passed=$((passed + $1)) failed=$((failed + $2)); }

suite() {
    status=0 file=$(file_of "$1")
    case $1 in *-moving*) moving=1 ;; *) moving=${SB_FIBER_FORCE_MIGRATION-} ;; esac
    case $1 in *-persistent) poller=persistent ;; *) poller=${SB_FIBER_POLLER-} ;; esac
    case $1 in *-sliced) slice=1 ;; *) slice=${SB_FIBER_TIME_SLICE-} ;; esac
    case $1 in long) limit=${SUITE_TIMEOUT:-1800} ;; *) limit=${SUITE_TIMEOUT:-300} ;; esac
    SB_FIBER_FORCE_MIGRATION=$moving SB_FIBER_POLLER=$poller SB_FIBER_TIME_SLICE=$slice \
        timeout -k 10 "$limit" \
        sh "$root/run-sbcl.sh" --noinform --disable-ldb \
        --no-sysinit --no-userinit --non-interactive \
        --load "$root/tests/fiber/run.lisp" "$file" \
        </dev/null >"$logs/$1.log" 2>&1 || status=$?
    counts=$(sed -n "s/^$file: \([0-9]*\) passed, \([0-9]*\) failed.*/\1 \2/p" \
                 "$logs/$1.log" | tail -n 1)
    case $counts:$status in
        *" 0:0" | *" "[1-9]*:1)
            if [ $status = 0 ]
            then tail -n 1 "$logs/$1.log"
            else cat "$logs/$1.log"
            fi ;;
        *)  cat "$logs/$1.log"
            counts=${counts:-0 0}
            counts="${counts% *} $((${counts#* } + 1))"
            if [ $status = 124 ] || [ $status = 137 ]
            then echo "$1: stopped after $limit seconds"
            else echo "$1: crashed (exit status $status)"
            fi ;;
    esac
    count $counts
}

# The suites of tests/in-fibers, in parts that take about the same time; most
# of it they sleep.
in_fibers_parts='
    sb-concurrency 1/2 sb-concurrency 2/2 cffi 1/1 usocket 1/1
    bordeaux-threads 1/2 bordeaux-threads 2/2
    deadline.impure 1/3 deadline.impure 2/3 deadline.impure 3/3
    threads.pure 1/3 threads.pure 2/3 threads.pure 3/3
    threads.impure 1/2 threads.impure 2/2 mutex.impure 1/2 mutex.impure 2/2
    threads-2.impure 1/3 threads-2.impure 2/3 threads-2.impure 3/3
    timer.impure 1/3 timer.impure 2/3 timer.impure 3/3
    timer-dead-thread.impure 1/1 make-thread.pure 1/1 join-thread-timeout.impure 1/1'

in_fibers() {
    dir=$logs/in-fibers good=0 bad=0
    mkdir "$dir"
    # All at once would compile the same libraries.
    sh "$root/run-sbcl.sh" --non-interactive --no-userinit --eval '(require :asdf)' \
        --eval '(mapc (function asdf:load-system)
                      (list "fiveam" "usocket-server" "rt" "cffi-libffi"))' \
        </dev/null >"$dir/libraries.log" 2>&1 || :
    echo $in_fibers_parts |
        xargs -n 2 -P 12 sh "$root/tests/in-fibers/run.sh" "$dir" || :
    set -- $in_fibers_parts
    while [ $# -gt 0 ]; do
        part=$1-${2%/*}
        shift 2
        log=$dir/$part.log
        sed -n -e "s/^\(.* fails in a thread as well\), .*/$part: \1/p" \
            -e "s/^\(.* is tried again\), .*/$part: \1/p" "$log" || :
        grep -A 20 -e '^FAILURE' -e ' hangs (' "$log" || :
        counts=$(sed -n 's/^.*: \([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p' "$log" |
                     tail -n 1)
        if [ ! "$counts" ]; then
            tail -n 40 "$log"
            echo "in-fibers: $part crashed, or took too long"
            counts="0 1"
        fi
        good=$((good + ${counts% *})) bad=$((bad + ${counts#* }))
    done
    echo "in-fibers: $good passed, $bad failed"
    count $good $bad
}

# Each file of SBCL's tests is a process, and prints "NAME: success" or
# "NAME: status N" here.
upstream() {
    log=$logs/upstream.log
    (cd "$tree/tests" && SBCL_PAREXEC_TMP=$logs SBCL_TEST_NO_SUMMARIZE=yes \
        timeout -k 10 1200 sh parallel-exec.sh --delete-logs "$(nproc)") \
        </dev/null >"$log" 2>&1 || :
    bad=$(sed -n 's/: status [0-9]* (.*//p' "$log")
    good=$(grep -c ': success (' "$log") || :
    set -- $bad
    for file; do
        # A profile comes after what matters.
        grep -A 15 -e FAILURE -e Unhandled -e fatal "$logs"/sbcl-test-logs-*/"$file" ||
            tail -n 40 "$logs"/sbcl-test-logs-*/"$file"
        echo "upstream: $file failed"
    done
    if grep -q '^Total realtime' "$log"; then
        echo "upstream: $good passed, $# failed"
        count "$good" $#
    else
        tail -n 40 "$log"
        echo "upstream: $good passed, $# failed, then the runner stopped"
        count "$good" $(($# + 1))
    fi
}

plain() {
    log=$logs/plain.log
    sh "$root/tools-for-build/compare-plain.sh" </dev/null >"$log" 2>&1 || :
    counts=$(sed -n 's/^plain: \([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p' "$log")
    if [ "${counts#* }" = 0 ]
    then tail -n 1 "$log"
    else tail -n 40 "$log"
    fi
    count ${counts:-0 1}
}

for name; do
    case $name in
        in-fibers) in_fibers ;;
        plain) plain ;;
        upstream) upstream ;;
        hunchentoot-suite*)
            if hunchentoot_tests
            then suite "$name"
            else echo "$name: skipped, as Hunchentoot's release cannot be fetched;" \
                      "HUNCHENTOOT_SOURCE may name its directory"
            fi ;;
        *) suite "$name" ;;
    esac
done
echo "$passed passed, $failed failed"
[ $failed = 0 ]
