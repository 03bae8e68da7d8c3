#!/bin/sh
# Write DIRECTORY/README.md, and charts if gnuplot is there, from DIRECTORY/results.csv.
# Called by report.sh, and again by whoever changes the words.
#
# usage: tests/bench/report-page.sh DIRECTORY

set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
root=$(CDPATH='' cd -- "$here/../.." && pwd)
directory=${1:?}
csv=$directory/results.csv
page=$directory/README.md

# What all programs below have in common: the medians of a key of a table. After it ROWS runtimes
# are ROW[1..], and COLUMNS cases COLUMN[1..], in the order in which they were measured first.
medians='
    function sort(v, n,   i, j, t) {
        for (i = 2; i <= n; i++)
            for (j = i; j > 1 && v[j - 1] > v[j]; j--) { t = v[j]; v[j] = v[j - 1]; v[j - 1] = t }
    }
    function middle(row, column,   n, i, v) {
        n = count[row, column]
        for (i = 1; i <= n; i++) v[i] = values[row, column, i]
        sort(v, n)
        least = v[1]; most = v[n]
        return n % 2 ? v[(n + 1) / 2] : (v[n / 2] + v[n / 2 + 1]) / 2
    }
    # Cases that are numbers go by size.
    function order(   i, j, t) {
        for (i = 1; i <= ncolumns; i++) if (column[i] !~ /^[0-9]+$/) return
        for (i = 2; i <= ncolumns; i++)
            for (j = i; j > 1 && column[j - 1] + 0 > column[j] + 0; j--) {
                t = column[j]; column[j] = column[j - 1]; column[j - 1] = t
            }
    }
    function number(x) {
        if (x >= 1000) return sprintf("%d", x + 0.5)
        return x >= 10 ? sprintf("%.1f", x) : sprintf("%.3g", x)
    }
    $1 == table && $5 == key {
        if (!($2 in rows)) { rows[$2] = 1; row[++nrows] = $2 }
        if (!($3 in columns)) { columns[$3] = 1; column[++ncolumns] = $3 }
        values[$2, $3, ++count[$2, $3]] = $6 + 0
    }'

with_medians() {
    program=$1
    shift
    awk -F, "$@" "$medians $program" "$csv"
}

# origin TABLE: of which commit, and when
origin() {
    awk -F, -v table="$1" '$1 == table {
        if ($5 == "commit") split($6, of, " ")
        else if ($4 + 1 > rounds) rounds = $4 + 1
    } END { printf "Commit %s, %s, %d rounds.\n\n", of[1], of[2], rounds }' "$csv"
}

measured() { awk -F, -v table="$1" '$1 == table { found = 1 } END { exit !found }' "$csv"; }

# show TABLE KEY HEAD: the medians, and how far the rounds are apart; nothing if there are none. A
# line for each runtime, or for each case if these are many.
show() {
    with_medians 'function cell(row, column) {
        if (!count[row, column]) return " |"
        m = middle(row, column)
        return " " number(m) (m > 0 ? sprintf(" ±%d%%", 50 * (most - least) / m + 0.5) : "") " |"
    }
    function table_of(rows, nrows, columns, ncolumns, across,   i, j) {
        printf "| |"; for (j = 1; j <= ncolumns; j++) printf " %s |", columns[j]; print ""
        printf "|---|"; for (j = 1; j <= ncolumns; j++) printf "---:|"; print ""
        for (i = 1; i <= nrows; i++) {
            printf "| %s |", rows[i]
            for (j = 1; j <= ncolumns; j++)
                printf "%s", across ? cell(columns[j], rows[i]) : cell(rows[i], columns[j])
            print ""
        }
        print ""
    }
    END {
        if (!nrows) exit
        order()
        printf "**%s**\n\n", head
        if (ncolumns > 10) table_of(column, ncolumns, row, nrows, 1)
        else table_of(row, nrows, column, ncolumns, 0)
    }' -v table="$1" -v key="$2" -v head="$3"
}

# behind TABLE KEY higher|lower OURS: the cases in which another program is better than the best of
# those whose names match OURS.
behind() {
    with_medians 'END {
        order()
        sign = better == "higher" ? 1 : -1
        for (j = 1; j <= ncolumns; j++) {
            found = other = 0
            for (i = 1; i <= nrows; i++)
                if (count[row[i], column[j]]) {
                    m = middle(row[i], column[j])
                    if (row[i] ~ ours) {
                        if (!found || sign * m > sign * best) { best = m; found = 1 }
                    } else if (!other || sign * m > sign * theirs) {
                        theirs = m; who = row[i]; other = 1
                    }
                }
            if (found && other && sign * theirs > sign * best)
                printf "- %s: %s has %s, we %s%s\n", column[j], who, number(theirs),
                    number(best), (theirs > 0 ? sprintf(" (%.2f)", best / theirs) : "")
        }
    }' -v table="$1" -v key="$2" -v better="$3" -v ours="$4" >"$directory/.behind"
    if [ -s "$directory/.behind" ]; then
        echo "Where we lose:"
        echo
        cat "$directory/.behind"
    else
        echo "We lose nowhere in this table."
    fi
    echo
    rm -f "$directory/.behind"
}

# chart TABLE KEY NAME TITLE XLABEL [OPTIONS]: a line for each runtime over the cases.
chart() {
    command -v gnuplot >/dev/null 2>&1 || return 0
    with_medians 'END {
        order()
        for (i = 1; i <= nrows; i++) {
            printf "\"%s\"\n", row[i]
            for (j = 1; j <= ncolumns; j++)
                if (count[row[i], column[j]]) print column[j] + 0, middle(row[i], column[j])
            print ""; print ""
        }
    }' -v table="$1" -v key="$2" >"$directory/.data"
    n=$(grep -c '^"' "$directory/.data")
    gnuplot <<END
set terminal svg size 800,480 background "white"
set output "$directory/$3.svg"
set title "$4"
set xlabel "$5"
set logscale x
set key outside right
set grid
${6-set yrange [0:*]}
plot for [i=0:$((n - 1))] "$directory/.data" index i using 1:2 with linespoints \\
    title columnheader(1)
END
    rm -f "$directory/.data"
    echo "![$4]($3.svg)"
    echo
}

# bars TABLE KEY CASES UNIT ROW...: bars of the ROWs at some CASES, as text
bars() {
    table=$1 key=$2 cases=$3 unit=$4
    shift 4
    rows=$(IFS='|'; echo "$*")
    with_medians 'END {
        n = split(cases, c, " "); m = split(rows_wanted, r, "|")
        for (j = 1; j <= n; j++) for (i = 1; i <= m; i++)
            if (count[r[i], c[j]] && middle(r[i], c[j]) > top) top = middle(r[i], c[j])
        for (j = 1; j <= n; j++) {
            printf "%s %s\n", c[j], unit
            for (i = 1; i <= m; i++) if (count[r[i], c[j]]) {
                x = middle(r[i], c[j])
                printf "  %-28s %7d ", r[i], x
                for (k = 0; k < 36 * x / top; k++) printf "#"
                print ""
            }
        }
    }' -v table="$table" -v key="$key" -v cases="$cases" -v unit="$unit" -v rows_wanted="$rows"
}

version() { command -v "$1" >/dev/null 2>&1 && { shift; "$@" 2>&1 | head -n 1; } || :; }

{
    cat <<END
# Benchmarks

Measured by \`sh tests/bench/report.sh\`. Each table was measured in one run, all programs in
turns; a cell is the median of the rounds, and half of the distance between the lowest and the
highest of them. Server and client share one
machine, so the figures are for comparing, and not for what a server alone could do; differences
smaller than the spread mean nothing. P is the number of carriers.

- Processor: $(nproc) x$(sed -n 's/^model name[^:]*://p' /proc/cpuinfo | head -n 1)
- Memory: $(awk '/^MemTotal/ { printf "%d GB", $2 / 1048576 + 0.5 }' /proc/meminfo)
- Kernel: $(uname -sr)
$(for line in "gcc: $(version gcc gcc --version)" "Go: $(version go go version)" \
    "Rust: $(version rustc rustc --version)" \
    "Java: $(version "${JAVA:-java}" "${JAVA:-java}" -version)" \
    "Ruby: $(version "${RUBY:-ruby}" "${RUBY:-ruby}" --version)"; do
    case $line in *": ") ;; *) echo "- $line" ;; esac
done)

The peers' programs are in tests/bench/peers, with a page that says what each benchmark is. Those
in C are loops over epoll, or over switches in assembly: they have no scheduler, and say what the
machine can do.

END
    if measured http; then
        cat <<END
## Hello world with Hunchentoot

Requests a second by the number of connections. *fibers*: EASY-FIBER-ACCEPTOR; *threads*:
Hunchentoot's own acceptor, a thread for each connection. For orientation, what the investigation
that this fork comes out of had with an earlier fork, on another machine (16 processors), at 10,000
connections: fibers 3,219 at first, and 86,560 with 4 carriers after three steps, 11,541 with 16
carriers; threads 48,000; Java's virtual threads 160,000.

END
        origin http
        chart http rps http "Hello world, requests a second" connections
        bars http rps "10 100 1000 10000" connections "Hunchentoot on fibers P=2" \
            "Hunchentoot on threads" "Go net/http" "hyper" "Java HttpServer" >"$directory/http.txt"
        show http rps "Requests a second"
        behind http rps higher "fibers"
        show http p50_ms "Half of the answers within, ms"
        show http p99_ms "99 of 100 answers within, ms"
        behind http p99_ms lower "fibers"
        show http user_us "Processor time of a request, us: the program"
        show http sys_us "Processor time of a request, us: the kernel on its behalf"
        show http errors "Errors, time-outs included"
    fi
    if measured scheduler; then
        cat <<END
## Scheduler

ns for each switch, message or turn.

END
        origin scheduler
        show scheduler ns "ns"
        behind scheduler ns lower "SBCL"
        show scheduler asm_ns "A switch in assembly, to nobody's queue: ns"
        show scheduler us_per_fiber "Fibers that are made, yield once and end: us for each"
        behind scheduler us_per_fiber lower "SBCL"
    fi
    if measured pipes; then
        cat <<END
## Pipes

Workers x requests: each worker is asked 8 octets over one pipe, and answers over another.

END
        origin pipes
        show pipes us_per_request "us for a request"
        behind pipes us_per_request lower "SBCL fibers"
    fi
    if measured blobs; then
        cat <<END
## Large replies

10 connections.

END
        origin blobs
        show blobs rps "Requests a second"
        behind blobs rps higher "fibers|engine"
    fi
    if measured rpc; then
        cat <<END
## Echo over loopback TCP

An octet there and back, client and server in one process, by the number of connections; then a
loop that reads requests and writes replies, and looks at nothing. \`one-shot\` and \`persistent\`
are the kinds of pollers; the first is the default.

END
        origin rpc
        show rpc ops_per_s "Round trips a second"
        behind rpc ops_per_s higher "SBCL fibers"
        show rpc rps "Requests a second to a server that looks at nothing"
        behind rpc rps higher "SBCL fibers"
    fi
    if measured scale; then
        cat <<END
## Many fibers

END
        origin scale
        show scale bytes_per_fiber "Parked fibers: resident bytes of each"
        behind scale bytes_per_fiber lower "SBCL"
        show scale page_table_bytes "Page tables for each, bytes"
        show scale create_ms "ms until all have parked"
        behind scale create_ms lower "SBCL"
        show scale wake_ms "ms from waking to the end of all"
        behind scale wake_ms lower "SBCL"
        show scale ms "Collection of the nursery with so many parked fibers, ms"
        show scale full_ms "Full collection, ms"
        show scale mean_us "Fibers that sleep at the same time: how much too late they wake, us"
        show scale heap_ns "A deadline in a heap of so many: ns to put in or take out"
    fi
    if measured lisp; then
        cat <<END
## Web servers in Lisp

END
        origin lisp
        show lisp rps "Requests a second"
        show lisp p99_ms "99 of 100 answers within, ms"
    fi
} >"$page"
