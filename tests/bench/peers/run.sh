#!/bin/sh
# Run a benchmark in another language. Prints RESULT BENCH RUNTIME KEY=VALUE... as ../run.sh does.
#
# usage: tests/bench/peers/run.sh c|go|java|ruby|rust BENCH ARGUMENT...
#
# Builds the program first if its source is newer. Where the tool for that is missing it
# says so, and exits with 77. README.md says what the benchmarks are.
#
# environment:
#   P                  how many carriers: by default 1 for switch, create, idle, channel and
#                      select, and one for each processor otherwise
#   JAVA, JAVAC, RUBY  other programs; the JDK must be 21 or newer
#   JAVA_OPTS          options for JAVA

set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
root=$(CDPATH='' cd -- "$here/../../.." && pwd)
out=$root/build/peers
mkdir -p "$out"
[ $# -ge 2 ] || { sed -n '2,/^$/{s/^# \{0,1\}//p;}' "$0" >&2; exit 2; }
name=$1
shift
case $1 in switch | create | idle | channel | select) P=${P:-1} ;; *) P=${P:-$(nproc)} ;; esac
export P
ulimit -n "$(ulimit -Hn)"

need() {
    command -v "$1" >/dev/null 2>&1 || { echo "${0##*/}: $name is skipped, there is no $1" >&2; exit 77; }
}
newer() { [ -e "$1" ] && [ -z "$(find "$2" -newer "$1" -type f)" ]; }

case $name in
    c)  need gcc
        newer "$out/c" "$here/c" || gcc -O2 -Wall -pthread -o "$out/c" "$here/c/peer.c"
        exec "$out/c" "$@" ;;
    go) need go
        newer "$out/go" "$here/go" || (cd "$here/go" && go build -o "$out/go" .)
        exec "$out/go" "$@" ;;
    rust)
        need cargo
        program=$out/rust/release/peer
        newer "$program" "$here/rust" || {
            mkdir -p "$out/rust-source"
            cp -R "$here/rust/." "$out/rust-source" # for Cargo.lock
            cargo build -q --release --manifest-path "$out/rust-source/Cargo.toml" \
                --target-dir "$out/rust" &&
                touch "$program"
        }
        exec "$program" "$@" ;;
    java)
        need "${JAVA:-java}"
        need "${JAVAC:-javac}"
        newer "$out/java/Peer.class" "$here/java" || "${JAVAC:-javac}" -nowarn \
            --add-exports java.base/jdk.internal.vm=ALL-UNNAMED -d "$out/java" "$here/java/Peer.java"
        exec "${JAVA:-java}" -cp "$out/java" --add-exports java.base/jdk.internal.vm=ALL-UNNAMED \
            -Djdk.virtualThreadScheduler.parallelism="$P" \
            -Djdk.virtualThreadScheduler.maxPoolSize="$P" \
            -Dsun.net.httpserver.nodelay=true -Dsun.net.httpserver.maxIdleConnections=20000 \
            ${JAVA_OPTS-} Peer "$@" ;;
    ruby)
        need "${RUBY:-ruby}"
        exec "${RUBY:-ruby}" -W:no-experimental "$here/ruby/peer.rb" "$@" ;;
    *)  echo "${0##*/}: $name is none of c, go, java, ruby and rust" >&2
        exit 2 ;;
esac
