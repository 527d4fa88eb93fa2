#!/bin/sh
# Starts workers and a router that keeps shared prefixes on one worker.
#
#   examples/router.sh [WORKERS] [flags of the workers ...]
#
# The router listens on port 30000 (PORT), the workers on the ports after it; Ctrl-C ends all.
# PYTHON names the interpreter (default: that of .venv, if there is one).
set -eu

workers=${1:-2}
[ $# -gt 0 ] && shift
port=${PORT:-30000}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)}
# Workers on one machine share its cores: one thread each more than that only makes them wait.
threads=$(($(nproc) / workers))

trap 'trap - EXIT; kill $pids 2>/dev/null || true; wait' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
pids=
urls=
for number in $(seq "$workers"); do
    "$python" -m sglang_minima.launch_server --port $((port + number)) \
        --cpu-threads $((threads > 0 ? threads : 1)) --log-level warning "$@" &
    pids="$pids $!"
    urls="$urls http://127.0.0.1:$((port + number))"
done

await() {
    until curl -fs -o /dev/null "$1"; do
        for pid in $pids; do
            kill -0 "$pid" 2>/dev/null || { echo "a process ended while starting" >&2; exit 1; }
        done
        sleep 0.5
    done
}

for url in $urls; do await "$url/health"; done
# The circuit breaker is off because it takes the 400 of a bad request for a fault of the worker:
# ten of them, and a healthy worker gets no traffic. Health checks alone find a lost worker, within
# a second; requests are repeated for longer than that, so that another worker answers them.
"$python" -m sglang_router.launch_router --host 127.0.0.1 --port "$port" \
    --policy cache_aware --disable-circuit-breaker --retry-initial-backoff-ms 300 \
    --health-check-interval-secs 1 --health-failure-threshold 1 --health-success-threshold 1 \
    --prometheus-port $((port + workers + 1)) \
    --log-level warn --worker-urls $urls &
pids="$pids $!"
await "http://127.0.0.1:$port/readiness"
echo "$workers workers behind http://127.0.0.1:$port; try: curl http://127.0.0.1:$port/workers"
wait
