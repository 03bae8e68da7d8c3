#!/bin/sh
# Measure all tables of the benchmark page, and write it: DIRECTORY/README.md with
# results.csv and, where gnuplot is, charts. Each table is measured by this run;
# programs whose tools are missing are left out, with a line that says so.
#
# usage: tests/bench/report.sh [--quick] [--tables "NAMES"] [DIRECTORY]
#
#   --quick    shorter rounds, and fewer numbers of connections and carriers
#   --tables   some of: http scheduler pipes blobs rpc scale lisp
#   DIRECTORY  default: doc/benchmarks
#
# A round runs all programs of a table in turns; there are ROUNDS, by default 3.
# What all programs said is in build/report.log.
# The machine should do nothing else: it takes some minutes, or within an hour
# without --quick.
#
# environment:
#   ROUNDS        see above
#   JAVA, JAVAC, RUBY  as for peers/run.sh
#   WOO_SOURCE    a directory with the sources of Woo and of what it needs: then
#                 Woo is in the table lisp

set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
root=$(CDPATH='' cd -- "$here/../.." && pwd)
quick=
tables="http scheduler pipes blobs rpc scale lisp"
while [ $# -gt 0 ]; do
    case $1 in
        --quick) quick=yes ;;
        --tables) tables=$2; shift ;;
        -*) sed -n '2,/^$/{s/^# \{0,1\}//p;}' "$0" >&2; exit 2 ;;
        *) break ;;
    esac
    shift
done
directory=${1:-$root/doc/benchmarks}
rounds=${ROUNDS:-3}
log=$root/build/report.log
mkdir -p "$directory" "$root/build"
: >"$log"
csv=$directory/results.csv
[ -s "$csv" ] || echo "table,runtime,case,round,key,value" >"$csv"

if [ "$quick" ]; then
    seconds=1
    connections="10 100 1000" landmarks=$connections
    carriers="1 2 16"
    shapes="5x2000 100x100 1000x10"
    populations="1000 10000 100000"
    switches=200000
else
    seconds=2
    connections="10 50 100 250 500 1000 2500 5000 10000" landmarks="10 100 1000 10000"
    carriers="1 2 4 8 16"
    shapes="5x20000 10x10000 100x1000 1000x100 10x100000"
    populations="1000 10000 100000 1000000"
    switches=1000000
fi

missing=
# Is the tool for the peer $1 there?
have() {
    case $1 in
        c) set -- gcc "$1" ;;
        rust) set -- cargo "$1" ;;
        java) set -- "${JAVAC:-javac}" "$1" ;;
        ruby) set -- "${RUBY:-ruby}" "$1" ;;
        *) set -- "$1" "$1" ;;
    esac
    command -v "$1" >/dev/null 2>&1 && return
    case " $missing " in *" $2 "*) ;; *)
        missing="$missing $2"
        echo "${0##*/}: $2 is left out, there is no $1" >&2 ;;
    esac
    return 1
}

# record TABLE RUNTIME CASE: a line of $csv for each key of the RESULT lines on standard input.
record() {
    tee -a "$log" | awk -v table="$1" -v runtime="$2" -v name="$3" -v round="$round" '
        $1 == "RESULT" {
            # It prints a line for no fibers as well.
            if ($2 == "gcpause") for (i = 4; i <= NF; i++) if ($i ~ /^n=/) name = substr($i, 3)
            for (i = 4; i <= NF; i++)
                if (split($i, field, "=") == 2)
                    printf "%s,%s,%s,%d,%s,%s\n", table, runtime, name, round, field[1], field[2]
        }' >>"$csv"
}

# take TABLE RUNTIME CASE COMMAND... None of these names has a comma.
take() {
    in_table=$1 of=$2 name=$3
    shift 3
    echo "$in_table, round $((round + 1)): $of, $name" >&2
    { timeout 600 "$@" 2>>"$log" </dev/null || echo "FAILED $*"; } |
        record "$in_table" "$of" "$name"
}

ours() { take "$1" "$2" "$3" sh "$here/run.sh" $4; }
peer() { ! have "$2" || take "$1" "$3" "$4" sh "$here/peers/run.sh" "$2" $5; }

# serve TABLE RUNTIME KIND CONNECTIONS [CASE]: what wrk measures
serve() {
    for c in $4; do
        take "$1" "$2" "${5:-$c}" env KINDS="$3" CONNECTIONS="$c" \
            sh "$here/compare-http.sh" 1 "$seconds"
    done
}

#### the tables

http_round() {
    for P in $carriers; do
        export P
        case $P in 2) list=$connections ;; *) list=$landmarks ;; esac
        serve http "Hunchentoot on fibers P=$P" fast "$list"
    done
    unset P
    serve http "Hunchentoot on threads" threads "$connections"
    ! have go || serve http "Go net/http" go "$connections"
    ! have rust || serve http "hyper" rust "$connections"
    ! have java || serve http "Java HttpServer" java "$connections"
}

scheduler_round() {
    for P in 1 2; do
        export P
        ours scheduler "SBCL fibers" "yield of 2 fibers P=$P" "switch $switches"
        ours scheduler "SBCL fibers" "yield with 10 bindings P=$P" "switch $switches 10"
        for capacity in 0 128; do
            ours scheduler "SBCL fibers" "channel of $capacity P=$P" "channel 300000 $capacity"
            peer scheduler go go "channel of $capacity P=$P" "channel 300000 $capacity"
        done
        for n in 2 16; do
            ours scheduler "SBCL fibers" "select among $n P=$P" "select 200000 $n"
            peer scheduler go go "select among $n P=$P" "select 200000 $n"
        done
        ours scheduler "SBCL fibers" "contended mutex P=$P" "mutex 200000"
    done
    export P=1
    for language in c go java ruby rust; do
        peer scheduler $language $language "yield of 2 fibers P=1" "switch $switches"
    done
    for n in 10000 100000; do
        ours scheduler "SBCL fibers" "create $n" "create $n"
        for language in c go java rust; do
            peer scheduler $language $language "create $n" "create $n"
        done
    done
    peer scheduler ruby ruby "create 10000" "create 10000"
    unset P
}

pipes_round() {
    for shape in $shapes; do
        arguments="${shape%x*} ${shape#*x}"
        for P in 1 2; do
            export P
            ours pipes "SBCL fibers P=$P" "$shape" "pipe $arguments"
            for language in c go java rust; do
                peer pipes $language "$language P=$P" "$shape" "pipe $arguments"
            done
        done
        unset P
        ours pipes "SBCL threads" "$shape" "pipe $arguments threads"
        peer pipes c "c threads" "$shape" "pipe-threads $arguments"
        for style in threads processes fibers; do
            peer pipes ruby "ruby $style" "$shape" "pipe-$style $arguments"
        done
    done
}

blobs_round() {
    for BODY in 115000 10000000; do
        export BODY
        export OCTETS=yes
        serve blobs "Hunchentoot on fibers (octets)" fast 10 "$BODY octets"
        serve blobs "Hunchentoot on threads (octets)" threads 10 "$BODY octets"
        unset OCTETS
        serve blobs "Hunchentoot on fibers (string)" fast 10 "$BODY octets"
        serve blobs "HTTP engine" engine 10 "$BODY octets"
        serve blobs "HTTP engine with a file" file 10 "$BODY octets"
        serve blobs "Hunchentoot on threads (string)" threads 10 "$BODY octets"
    done
    unset BODY
}

rpc_round() {
    for c in 1 100 1000; do
        for P in 1 2; do
            export P
            for POLLER in one-shot persistent; do
                export POLLER
                ours rpc "SBCL fibers P=$P $POLLER" "$c" "rpc $c $seconds"
            done
            unset POLLER
            for language in c go java rust; do
                peer rpc $language "$language P=$P" "$c" "rpc $c $seconds"
            done
        done
        unset P
        ours rpc "SBCL threads" "$c" "rpc $c $seconds threads"
    done
    for POLLER in one-shot persistent; do
        export POLLER
        serve rpc "SBCL fibers $POLLER" raw "10 100 1000"
    done
    unset POLLER
    serve rpc "SBCL threads" raw-threads "10 100 1000"
    ! have c || serve rpc c c "10 100 1000"
    for language in go rust; do
        ! have $language || serve rpc $language $language-raw "10 100 1000"
    done
}

scale_round() {
    export P=1
    for n in $populations; do
        ours scale "SBCL fibers" "$n" "gcpause $n"
        ours scale "SBCL fibers" "$n" "idle $n"
        ours scale "SBCL fibers" "$n" "timers $n"
        for language in c go java rust; do
            peer scale $language $language "$n" "idle $n"
        done
    done
    unset P
}

lisp_round() {
    for DELAY in 0 10; do
        what=hello
        if [ $DELAY = 0 ]; then unset DELAY; else export DELAY; what="waits 10 ms"; fi
        for c in 10 100 1000; do
            serve lisp "stock Hunchentoot on threads" threads "$c" "$what c=$c"
            serve lisp "stock Hunchentoot on fibers" fibers "$c" "$what c=$c"
            serve lisp "fiber-acceptor" fast "$c" "$what c=$c"
            serve lisp "Clack's handler" clack "$c" "$what c=$c"
            [ -z "${WOO_SOURCE-}" ] || serve lisp "Woo" woo "$c" "$what c=$c"
        done
    done
    unset DELAY
}

if [ -z "${WOO_SOURCE-}" ]; then
    case " $tables " in *" lisp "*)
        echo "${0##*/}: Woo is left out, WOO_SOURCE names no directory" >&2 ;;
    esac
fi

for table in $tables; do
    # A table is only what one run has measured.
    awk -F, -v table="$table" '$1 != table' "$csv" >"$csv.new"
    mv "$csv.new" "$csv"
    commit=$(git -C "$root" rev-parse --short HEAD 2>/dev/null || echo unknown)
    echo "$table,report,,0,commit,$commit $(date -u +%Y-%m-%d)" >>"$csv"
    round=0
    while [ "$round" -lt "$rounds" ]; do
        "${table}_round"
        round=$((round + 1))
    done
done
sh "$here/report-page.sh" "$directory"
