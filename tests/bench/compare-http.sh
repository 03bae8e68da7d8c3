#!/bin/sh
# Compare Hunchentoot on fibers, with its own acceptors and with those of
# sb-fiber-hunchentoot (fast), Clack's handler (clack), the HTTP engine below
# both (engine) and a loop that only reads and writes (raw, raw-threads), with Hunchentoot on
# a thread for each connection, by the hello world of run.sh and wrk. Prints a
# line for each kind of server and number of connections, with the medians of
# all rounds, and one for each with the ratio to threads:
#
#   RESULT http sbcl-fiber mode=fibers c=10 rps=... p50_ms=... p99_ms=... user_us=... sys_us=...
#          errors=... rss_mb=...
#   RESULT http-ratio sbcl-fiber mode=fibers c=10 rps=... p99=...
#
# usage: tests/bench/compare-http.sh [ROUNDS [SECONDS]]    default: 3 rounds, 10 s
#
# errors is the sum of wrk's socket errors, time-outs and bad responses, the
# highest of all rounds; rss_mb the most memory that the server had resident;
# user_us and sys_us the server's processor time for each request.
#
# environment:
#   CONNECTIONS   default: 10 100 1000 10000
#   KINDS         default: fibers fast clack engine raw threads. Others are those
#                 of PEERS: NAME, or NAME-raw, is what serves by
#                 "sh PEERS/run.sh NAME http PORT", or http-raw
#   PEERS         a directory of servers in other languages; default: peers
#   HEADERS       how many fields, 10 at most, that browsers send are added to
#                 each request; default: 0
#   PORT          default: 4299
#   P, SBCL, BODY, DELAY as for run.sh

set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
rounds=${1:-3} seconds=${2:-10}
port=${PORT:-4299}
peers=${PEERS:-$here/peers}
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

listening() {
    grep -q "^ *[0-9]*: [0-9A-F]*:$(printf %04X "$port") 0*:0000 0A" /proc/net/tcp /proc/net/tcp6
}

start_server() {
    case $1 in
        fibers | fast | clack | engine | file | raw | raw-threads | threads | woo)
            set -- sh "$here/run.sh" http "$port" "$1" ;;
        *-raw) set -- sh "$peers/run.sh" "${1%-raw}" http-raw "$port" ;;
        *) set -- sh "$peers/run.sh" "$1" http "$port" ;;
    esac
    TMPDIR=$dir "$@" </dev/null >"$dir/log" 2>&1 &
    server=$!
    until listening; do
        kill -0 "$server" 2>/dev/null ||
            { cat "$dir/log" >&2; echo "${0##*/}: no server" >&2; exit 1; }
        sleep 0.1
    done
    # The first requests compile methods.
    wrk -t1 -c4 -d1s "$url" >/dev/null
}

# The first $HEADERS of what a browser sends, as arguments of wrk.
browser_fields() {
    awk -v n="${HEADERS:-0}" 'NR <= n { print "-H"; print }' <<'END'
User-Agent: Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0
Accept: text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8
Accept-Language: en-US,en;q=0.5
Accept-Encoding: gzip, deflate, br, zstd
Referer: http://127.0.0.1/index.html
Upgrade-Insecure-Requests: 1
Sec-Fetch-Dest: document
Sec-Fetch-Mode: navigate
Sec-Fetch-Site: same-origin
Priority: u=0, i
END
}

# What the server has used of processors, in ticks: for itself, and in the kernel.
ticks() {
    sed 's/.*) //' "/proc/$server/stat" | cut -d ' ' -f 12,13
}

# measure MODE CONNECTIONS: appends
# "MODE CONNECTIONS RPS P50_MS P99_MS USER_US SYS_US ERRORS RSS_MB" to $dir/raw.
measure() {
    start_server "$1"
    before=$(ticks)
    (   IFS='
'
        wrk -t2 -c"$2" -d"${seconds}s" $(browser_fields) --latency "$url" >"$dir/wrk"
    ) || :
    after=$(ticks)
    rss=$(awk '/^VmHWM/ { print int($2 / 1024) }' "/proc/$server/status" 2>/dev/null) || :
    stop_server
    awk -v mode="$1" -v c="$2" -v rss="${rss:--1}" -v ticks="$before $after" \
        -v second="$(getconf CLK_TCK)" '
        function ms(time) {
            return time * (time ~ /us$/ ? 0.001 : time ~ /ms$/ ? 1 : time ~ /m$/ ? 60000 : 1000)
        }
        function us(ticks) { return requests ? ticks * 1000000 / second / requests : 0 }
        $1 == "50%" { p50 = ms($2) }
        $1 == "99%" { p99 = ms($2) }
        / requests in / { requests = $1 }
        $1 == "Requests/sec:" { rps = $2 }
        /Socket errors:/ { gsub(/[^0-9 ]/, ""); errors += $1 + $2 + $3 + $4 }
        /Non-2xx/ { errors += $NF }
        END { split(ticks, t, " ")
              printf "%s %d %.0f %.3f %.3f %.2f %.2f %d %d\n", mode, c, rps, p50, p99,
                  us(t[3] - t[1]), us(t[4] - t[2]), errors, rss }
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
            printf "RESULT http sbcl-fiber mode=%s c=%d rps=%.0f p50_ms=%.3f p99_ms=%.3f " \
                "user_us=%.2f sys_us=%.2f errors=%d rss_mb=%d\n",
                mode, c, mrps[mode], median(p50, n), mp99[mode], median(user, n),
                median(sys, n), errors, rss
            n = errors = rss = 0
        }
        $2 != c { next }
        $1 != mode { line(); mode = $1 }
        { n++; rps[n] = $3 + 0; p50[n] = $4 + 0; p99[n] = $5 + 0; user[n] = $6 + 0; sys[n] = $7 + 0
          if ($8 > errors) errors = $8
          if ($9 > rss) rss = $9 }
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
