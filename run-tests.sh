#!/bin/sh
# Run the tests, after building what has to be built.
#
# usage: sh run-tests.sh [NAME]...
#
# NAME is a suite of tests/fiber/ (timers for tests/fiber/timers.lisp), or
# "upstream": SBCL's own regression tests, each of its files counted as one
# (to run one of them: cd build/sbcl/tests && sh run-tests.sh FILE).
# Without a name, all are run.  The last line says how many checks passed and
# how many failed.  A suite that crashes, or takes longer than SUITE_TIMEOUT
# seconds (300), counts as one that failed.  Logs are left in build/tests/.

set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
. "$root/tools-for-build/fork-functions.sh"

case ${1-} in --help | -h) sed -n '2,/^$/{s/^# \{0,1\}//p;}' "$0"; exit ;; esac

if [ $# = 0 ]; then
    for file in "$root"/tests/fiber/*.lisp; do
        name=${file##*/} name=${name%.lisp}
        case $name in package | run) ;; *) set -- "$@" "$name" ;; esac
    done
    set -- "$@" upstream
fi
for name; do
    [ "$name" = upstream ] || [ -f "$root/tests/fiber/$name.lisp" ] ||
        die "there is no suite $name: no file tests/fiber/$name.lisp"
done

needs=
lisp=/usr/share/common-lisp/source
[ "$*" = upstream ] ||
    needs="cl-fiveam=$lisp/fiveam cl-hunchentoot=$lisp/hunchentoot
           cl-usocket=$lisp/usocket cl-bordeaux-threads=$lisp/bordeaux-threads
           cl-cffi=$lisp/cl-cffi"
case " $* " in *" upstream "*) needs="$needs procps=ps" ;; esac
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
    status=0
    timeout -k 10 "${SUITE_TIMEOUT:-300}" \
        sh "$root/run-sbcl.sh" --noinform --disable-ldb \
        --no-sysinit --no-userinit --non-interactive \
        --load "$root/tests/fiber/run.lisp" "$1" \
        </dev/null >"$logs/$1.log" 2>&1 || status=$?
    counts=$(sed -n "s/^$1: \([0-9]*\) passed, \([0-9]*\) failed.*/\1 \2/p" \
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
            then echo "$1: stopped after ${SUITE_TIMEOUT:-300} seconds"
            else echo "$1: crashed (exit status $status)"
            fi ;;
    esac
    count $counts
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

for name; do
    case $name in upstream) upstream ;; *) suite "$name" ;; esac
done
echo "$passed passed, $failed failed"
[ $failed = 0 ]
