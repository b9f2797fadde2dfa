#!/usr/bin/env bash
# Pins the base image of deploy/Dockerfile: writes deploy/.env with the digest that the registry has for its tag now.
# Compose reads that file, and so does deploy/test.sh. Another tag, or a mirror: deploy/lock-base.sh mirror.example/python:3.12-slim
set -euo pipefail
cd "$(dirname "$0")"
base="${1:-python:3.11-slim-bookworm}"
base="${base%@*}"
docker pull --quiet "$base" >/dev/null
digest=$(docker image inspect -f '{{range .RepoDigests}}{{println .}}{{end}}' "$base" | sed -n 's/.*@\(sha256:[0-9a-f]\{64\}\)$/\1/p' | head -n 1)
if [ -z "$digest" ]; then
  echo "lock-base: $base has no digest, because it came from no registry; nothing was written" >&2
  exit 1
fi
echo "KVPS_BASE=$base@$digest" >.env
echo "deploy/.env: KVPS_BASE=$base@$digest"
