#!/usr/bin/env bash
# The network part of LOG.md: kvps and gloo in turns on links of a set rate. Run it as root.
#
#   benchmarks/network.sh [RATE] [DIR]     400mbit, and no files unless there is a DIR for them
#
# PYTHON names another interpreter than that of .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
rate=${1:-400mbit}
folder=${2:-}
python=${PYTHON:-.venv/bin/python}

for layout in 2x2 4x4 4x1 8@1x4; do
    files=()
    if [ -n "$folder" ]; then
        mkdir -p "$folder/$layout"
        files=(--json "$folder/$layout/network.json" --plot "$folder/$layout")
    fi
    "$python" -m benchmarks.compare --network "$layout" --rate "$rate" --workloads resnet50 small "${files[@]}"
done
