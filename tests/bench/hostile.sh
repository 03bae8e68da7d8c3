#!/bin/sh
# Measure what a good client sees of an HTTP server while others are slow,
# silent or confused: 10,000 that say nothing, 400 that send an octet now and
# then, 100 that read slowly, 40 that connect and go away, or send garbage.
# Prints the medians of all rounds, without the others and with them:
#
#   RESULT hostile sbcl-fiber mode=fast p50_ms=... p99_ms=... p50_hostile_ms=...
#          p99_hostile_ms=... p99_ratio=... errors=...
#
# usage: tests/bench/hostile.sh [KIND [ROUNDS [SECONDS]]]
#        KIND as for run.sh http, fast by default; 3 rounds, 5 s
#
# environment: PORT (default: 4298); P, SBCL as for run.sh

set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
kind=${1:-fast} rounds=${2:-3} seconds=${3:-5}
port=${PORT:-4298}
root=$(CDPATH='' cd -- "$here/../.." && pwd)
. "$root/tools-for-build/fork-functions.sh"
need wrk cl-hunchentoot=/usr/share/common-lisp/source/hunchentoot
ulimit -n "$(ulimit -Hn)"

dir=$(mktemp -d)
server= others=
end() { for pid in $server $others; do kill -KILL "$pid" 2>/dev/null || :; done; }
trap 'end; rm -rf "$dir"' EXIT
trap 'exit 130' HUP INT TERM

# start NAME LINE COMMAND...: run it until it has printed LINE.
start() {
    log=$dir/$1 line=$2
    shift 2
    # What was written there in the last round is not what this one says.
    : >"$log"
    "$@" </dev/null >>"$log" 2>&1 &
    until grep -q "^$line" "$log"; do
        kill -0 $! 2>/dev/null || { cat "$log" >&2; exit 1; }
        sleep 0.1
    done
}

# good NAME: appends "NAME P50 P99 ERRORS", in ms, to $dir/raw.
good() {
    wrk -t1 -c1 -d"${seconds}s" --latency "http://127.0.0.1:$port/" >"$dir/wrk"
    awk -v name="$1" '
        function ms(time) { return time * (time ~ /us$/ ? 0.001 : time ~ /ms$/ ? 1 : 1000) }
        $1 == "50%" { p50 = ms($2) }
        $1 == "99%" { p99 = ms($2) }
        /Socket errors:/ { gsub(/[^0-9 ]/, ""); errors += $1 + $2 + $3 + $4 }
        /Non-2xx/ { errors += $NF }
        END { print name, p50, p99, errors + 0 }' "$dir/wrk" | tee -a "$dir/raw" >&2
}

round=0
while [ $round -lt "$rounds" ]; do
    start server Listening sh "$here/run.sh" http "$port" "$kind"
    server=$!
    wrk -t1 -c4 -d1s "http://127.0.0.1:$port/" >/dev/null
    good alone
    # They would be other machines: they get what processors have nothing else to do.
    start others Hostile chrt -i 0 ${SBCL:-sh "$root/run-sbcl.sh"} --script "$here/hostile.lisp" "$port"
    others=$!
    good hostile
    end
    wait $server $others 2>/dev/null || :
    server= others=
    round=$((round + 1))
done
column() { awk -v n="$1" -v c="$2" '$1 == n { print $c }' "$dir/raw" | sort -n |
    awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
errors=$(awk '{ n += $4 } END { print n }' "$dir/raw")
echo "RESULT hostile sbcl-fiber mode=$kind p50_ms=$(column alone 2) p99_ms=$(column alone 3)" \
    "p50_hostile_ms=$(column hostile 2) p99_hostile_ms=$(column hostile 3)" \
    "p99_ratio=$(echo "$(column hostile 3) $(column alone 3)" | awk '{ printf "%.2f", $1 / $2 }')" \
    "errors=$errors"
