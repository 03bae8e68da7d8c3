#!/bin/sh
# Run a benchmark of fibers. Prints RESULT BENCH sbcl-fiber KEY=VALUE...
#
# usage: tests/bench/run.sh BENCH ARGUMENT...
#
#   switch N [BINDINGS]   two fibers yield to each other N times each, with
#                         BINDINGS special bindings: ns for each switch
#   create N              N fibers are made, each yields once and ends: ms for
#                         all, us for each
#   scope N               the same in a scope, which waits for them
#   mutex N               two fibers pass mutexes to each other N times each: ns
#                         for each time
#   condvar N             the same with a condition variable
#   channel N [CAPACITY]  one fiber sends N numbers to a channel, another receives
#                         them: ns for each
#   select N [CHANNELS]   a fiber for each of CHANNELS, 2 by default, sends to it, and
#                         one receives N numbers of any: ns for each
#   mutex-free N          WITH-MUTEX N times with a mutex that nobody else wants,
#                         in a fiber, in a thread, and in the Lisp that PLAIN
#                         starts: ns for each, and ratios
#   pipe W N [KIND]       W fibers, or threads if KIND says that, are each asked N times by
#                         another one, over two pipes: s for all, us for each
#   rpc C [SECONDS [KIND]]
#                         C fibers, or threads, ask others over loopback TCP, an octet at a
#                         time, for 3 seconds by default: round trips a second
#   fairness C [SECONDS]  the same for 10 seconds: Jain's index of how often each did, and
#                         how long they waited
#   wake N                a thread that runs no fibers wakes a fiber, which wakes the
#                         thread, N times: ns for each
#   timers N              N fibers sleep, all at once, and wake at random times: how much too
#                         late they woke; and with N in a heap of deadlines, ns for
#                         putting one in and taking it out
#   idle N                N fibers park, are woken and end: growth of the
#                         resident set and of the page tables for each, ms
#                         until all have parked, and from waking to the end
#   gcpause N             collections of the nursery with no fibers and with N
#                         that are parked: ms, median and worst of 51, and of a
#                         full collection
#   burst N               N fibers that have been 100 kB deep: the resident set
#                         before they were made and after they have ended
#   httpidle N [KIND]     N connections to Hunchentoot that have had an answer,
#                         and wait, KIND as for http: growth of the resident set, the heap and the
#                         page tables for each
#   http PORT KIND [CARRIERS]
#                         hello world on 127.0.0.1, until killed. KIND is, for Hunchentoot, fibers
#                         (a stock acceptor), fast (EASY-FIBER-ACCEPTOR) or threads; clack,
#                         its handler; engine, the HTTP engine itself, or file, that with a
#                         file; raw or raw-threads, a loop that reads and writes, and looks at
#                         nothing; woo, if WOO_SOURCE is a directory with its sources
#
# first_ns and first_ms are of the first round of the process, ns and ms the
# median of the five after it.
#
# environment:
#   P      how many carriers: by default 1, and a carrier for each processor
#          with http, pipe, rpc, fairness and wake
#   SBCL   another Lisp to run
#   POLLER persistent: with pollers of that kind
#   DELAY  with http, how many milliseconds the handlers of Hunchentoot and Clack wait
#   BODY   with http, how many octets a reply has, instead of hello world
#   OCTETS with http, if set, Hunchentoot's handler returns octets, and not a string
#   PLAIN  for mutex-free, the command of an SBCL without fibers, say
#          SBCL_BUILD=/tmp/plain sh make.sh --without-sb-fiber
#          PLAIN="env SBCL_BUILD=/tmp/plain sh run-sbcl.sh"

set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)

case ${1-} in
    switch | create | scope | mutex | condvar | channel | select) file=fibers.lisp P=${P:-1} ;;
    pipe | rpc | fairness | wake) file=io.lisp P=${P:-$(nproc)} ;;
    timers) file=timers.lisp P=${P:-1} ;;
    idle | gcpause | burst) file=memory.lisp P=${P:-1} ;;
    mutex-free) file=mutex-free.lisp P=1 ;;
    httpidle) file=httpidle.lisp P=${P:-1} ;;
    http) file=http.lisp P=${P:-$(nproc)} ;;
    *) sed -n '2,/^$/{s/^# \{0,1\}//p;}' "$0" >&2; exit 2 ;;
esac
[ $# -ge 2 ] || { echo "${0##*/}: $1 needs an argument" >&2; exit 2; }
export P
ulimit -n "$(ulimit -Hn)"
exec ${SBCL:-sh "$here/../../run-sbcl.sh"} --script "$here/$file" "$@"
