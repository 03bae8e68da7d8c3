#!/bin/sh
# Compare Hunchentoot on fibers, with its own acceptors and with those of
# sb-fiber-hunchentoot (fast), Clack's handler (clack), the HTTP engine below
# both (engine) and a loop that only reads and writes (raw), with Hunchentoot on
# a thread for each connection, by the hello world of run.sh and wrk. Prints a
# line for each kind of server and number of connections, with the medians of
# all rounds, and one for each with the ratio to threads:
#
#   RESULT http sbcl-fiber mode=fibers c=10 rps=... p99_ms=... errors=... rss_mb=...
#   RESULT http-ratio sbcl-fiber mode=fibers c=10 rps=... p99=...
#
# usage: tests/bench/compare-http.sh [ROUNDS [SECONDS]]    default: 3 rounds, 10 s
#
# errors is the sum of wrk's socket errors, time-outs and bad responses, the
# highest of all rounds; rss_mb the most memory that the server had resident.
#
# environment:
#   CONNECTIONS   default: 10 100 1000 10000
#   KINDS         default: fibers fast clack engine raw threads
#   PORT          default: 4299
#   P, SBCL       as for run.sh

set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
rounds=${1:-3} seconds=${2:-10}
port=${PORT:-4299}
url=http://127.0.0.1:$port/
root=$(CDPATH='' cd -- "$here/../.." && pwd)
. "$root/tools-for-build/fork-functions.sh"
need wrk cl-hunchentoot=/usr/share/common-lisp/source/hunchentoot
ulimit -n "$(ulimit -Hn)"

dir=$(mktemp -d)
server=
stop_server() {
    [ "$server" ] || return 0
    kill -KILL "$server" 2>/dev/null || :
    wait "$server" 2>/dev/null || :
    server=
}
trap 'stop_server; rm -rf "$dir"' EXIT
trap 'exit 130' HUP INT TERM

start_server() {
    # What the last server wrote there is not what this one says.
    : >"$dir/log"
    sh "$here/run.sh" http "$port" "$1" </dev/null >>"$dir/log" 2>&1 &
    server=$!
    until grep -q '^Listening' "$dir/log"; do
        kill -0 "$server" 2>/dev/null ||
            { cat "$dir/log" >&2; echo "${0##*/}: no server" >&2; exit 1; }
        sleep 0.1
    done
    # The first requests compile methods.
    wrk -t1 -c4 -d1s "$url" >/dev/null
}

# measure MODE CONNECTIONS: appends "MODE CONNECTIONS RPS P99_MS ERRORS RSS_MB"
# to $dir/raw.
measure() {
    start_server "$1"
    wrk -t2 -c"$2" -d"${seconds}s" --latency "$url" >"$dir/wrk" || :
    rss=$(awk '/^VmHWM/ { print int($2 / 1024) }' "/proc/$server/status" 2>/dev/null) || :
    stop_server
    awk -v mode="$1" -v c="$2" -v rss="${rss:--1}" '
        function ms(time) {
            return time * (time ~ /us$/ ? 0.001 : time ~ /ms$/ ? 1 : time ~ /m$/ ? 60000 : 1000)
        }
        $1 == "99%" { p99 = ms($2) }
        $1 == "Requests/sec:" { rps = $2 }
        /Socket errors:/ { gsub(/[^0-9 ]/, ""); errors += $1 + $2 + $3 + $4 }
        /Non-2xx/ { errors += $NF }
        END { printf "%s %d %.0f %.3f %d %d\n", mode, c, rps, p99, errors, rss }
    ' "$dir/wrk" | tee -a "$dir/raw" >&2
}

# report CONNECTIONS
report() {
    sort -k1,1 "$dir/raw" | awk -v c="$1" '
        function median(values, n,   i, j, t) {
            for (i = 2; i <= n; i++)
                for (j = i; j > 1 && values[j - 1] > values[j]; j--) {
                    t = values[j]; values[j] = values[j - 1]; values[j - 1] = t
                }
            return n % 2 ? values[(n + 1) / 2] : (values[n / 2] + values[n / 2 + 1]) / 2
        }
        function line(   i) {
            if (!n) return
            mrps[mode] = median(rps, n); mp99[mode] = median(p99, n)
            printf "RESULT http sbcl-fiber mode=%s c=%d rps=%.0f p99_ms=%.3f errors=%d rss_mb=%d\n",
                mode, c, mrps[mode], mp99[mode], errors, rss
            n = errors = rss = 0
        }
        $2 != c { next }
        $1 != mode { line(); mode = $1 }
        { n++; rps[n] = $3 + 0; p99[n] = $4 + 0
          if ($5 > errors) errors = $5
          if ($6 > rss) rss = $6 }
        END {
            line()
            if (mrps["threads"] && mp99["threads"])
                for (mode in mrps)
                    if (mode != "threads")
                        printf "RESULT http-ratio sbcl-fiber mode=%s c=%d rps=%.2f p99=%.2f\n",
                            mode, c, mrps[mode] / mrps["threads"], mp99[mode] / mp99["threads"]
        }'
}

for connections in ${CONNECTIONS:-10 100 1000 10000}; do
    round=0
    while [ $round -lt "$rounds" ]; do
        for kind in ${KINDS:-fibers fast clack engine raw threads}; do
            measure "$kind" "$connections"
        done
        round=$((round + 1))
    done
    report "$connections"
done
