#!/usr/bin/env bash
# Builds the image, runs the cluster of docker-compose.yml to its end, and checks it: every exit code
# is 0, the model is good, the image has no compiler and does not run as root. Then once more, scaled; and scaled up
# while a job waits, where the additional worker is refused.
#
# Takes whatever engine and Compose there are (docker compose or docker-compose). With
# KVPS_BUILD_NETWORK=host the build uses this machine's network.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! docker info >/dev/null 2>&1; then
  echo "test-docker: no container engine answers 'docker info'; start one and try again" >&2
  exit 1
fi
if docker compose version >/dev/null 2>&1; then
  compose=(docker compose)
else
  compose=(docker-compose)
fi
compose+=(-p "kvps-test-$$" -f deploy/docker-compose.yml)
export KVPS_TAG="test-$$"
# The base by its digest, where it came from a registry: so all builds of this run have the same one.
[ -n "${KVPS_BASE:-}" ] || [ ! -f deploy/.env ] || . deploy/.env
base="${KVPS_BASE:-python:3.11-slim-bookworm}"
docker image inspect "$base" >/dev/null 2>&1 || docker pull "$base" >/dev/null
digest=$(docker image inspect -f '{{range .RepoDigests}}{{println .}}{{end}}' "$base" | head -n 1)
export KVPS_BASE="${digest:-$base}"
echo "test-docker: base $KVPS_BASE"
# The lock files are for this processor; KVPS_LOCKED=0 takes what there is for another.
[ "$(uname -m)" = x86_64 ] && export KVPS_LOCKED="${KVPS_LOCKED:-1}"

cleanup() {
  "${compose[@]}" down --volumes --remove-orphans >/dev/null 2>&1 || true
  docker image rm "kvps:$KVPS_TAG" >/dev/null 2>&1 || true
}
trap cleanup EXIT

fail() {
  echo "test-docker: $1" >&2
  "${compose[@]}" logs --no-color 2>&1 | tail -n 60 >&2
  exit 1
}

# confined ID: print what limits a container.
confined() {
  docker inspect -f '{{.HostConfig.ReadonlyRootfs}} {{.HostConfig.CapDrop}} {{.HostConfig.SecurityOpt}} {{.HostConfig.PidsLimit}} {{.HostConfig.Memory}} {{.Config.User}}' "$1"
}

# round WORKERS SERVERS: run a job to its end and check it.
round() {
  export KVPS_WORKERS=$1 KVPS_SERVERS=$2
  echo "test-docker: $1 workers, $2 servers"
  "${compose[@]}" up -d --scale worker="$1" --scale server="$2" >/dev/null
  finish "$1" "$2"
}

# refused WORKERS SERVERS: scale the workers up beyond the size of the job, and down again; then it runs to its end.
refused() {
  export KVPS_WORKERS=$1 KVPS_SERVERS=$2
  echo "test-docker: $(($1 + 1)) workers for a job of $1"
  # A server is missing, so that the job waits.
  "${compose[@]}" up -d --scale worker="$1" --scale server="$(($2 - 1))" >/dev/null
  local scheduler held told
  scheduler=$("${compose[@]}" ps -q scheduler)
  for _ in $(seq 60); do
    held=$(docker exec "$scheduler" kvps status --scheduler tcp://127.0.0.1:9091 --keys /keys/scheduler 2>/dev/null |
      grep -c '^worker .* held ' || true)
    [ "$held" = "$1" ] && break
    sleep 1
  done
  [ "$held" = "$1" ] || fail "$held of $1 workers have joined"
  "${compose[@]}" up -d --scale worker="$(($1 + 1))" --scale server="$(($2 - 1))" >/dev/null
  for _ in $(seq 60); do
    told=$("${compose[@]}" logs --no-color worker 2>&1)
    [[ $told == *"the job already has $1 workers"* ]] && break
    sleep 1
  done
  [[ $told == *"the job already has $1 workers"* ]] || fail "the additional worker was not refused"
  "${compose[@]}" up -d --scale worker="$1" --scale server="$2" >/dev/null
  finish "$1" "$2"
}

# finish WORKERS SERVERS: wait for the end of a job, and check it.
finish() {
  local ids id code
  local confined="true [ALL] [no-new-privileges:true] 512"
  ids=$("${compose[@]}" ps -a -q 2>/dev/null || "${compose[@]}" ps -q)
  # The scheduler, and the one that makes the keys.
  [ "$(wc -w <<<"$ids")" -eq $(($1 + $2 + 2)) ] || fail "expected $(($1 + $2 + 2)) containers"
  for id in $ids; do
    [[ "$(confined "$id")" == "$confined "[1-9]*" kvps" ]] || fail "container $id is confined by: $(confined "$id")"
    code=$(timeout 300 docker wait "$id") || fail "container $id did not end in 300 s"
    [ "$code" = 0 ] || fail "$(docker inspect -f '{{.Name}}' "$id") ended with exit code $code"
  done
  local accuracy log
  log=$("${compose[@]}" logs --no-color 2>&1)
  accuracy=$(sed -n 's/.*test accuracy \([0-9.]*\).*/\1/p' <<<"$log" | head -n 1)
  [ -n "$accuracy" ] || fail "no worker printed its accuracy"
  awk -v a="$accuracy" 'BEGIN { exit !(a >= 0.97) }' || fail "test accuracy $accuracy is below 0.97"
  echo "test-docker: test accuracy $accuracy, every exit code 0"
  "${compose[@]}" down --volumes >/dev/null 2>&1
}

"${compose[@]}" build scheduler
docker run --rm "kvps:$KVPS_TAG" sh -c 'test "$(id -u)" != 0' || fail "the image runs as root"
docker run --rm --read-only "kvps:$KVPS_TAG" sh -c '! touch /home/kvps/file 2>/dev/null && ! touch /opt/kvps/file 2>/dev/null' ||
  fail "the image can be written to"
docker run --rm "kvps:$KVPS_TAG" sh -c '! command -v cc && ! command -v gcc' ||
  fail "the image has a compiler"
round 2 2
round 3 1
refused 2 2
