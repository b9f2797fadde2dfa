"""Measures what metrics and the dashboard's figures cost: rounds of kvps bench with and without KVPS_HTTP, in turns.

    .venv/bin/python -m benchmarks.metrics --turns 5

With KVPS_HTTP each process samples its counters once per second, and the scheduler asks the servers for theirs.
The ratio is the median over turns of the two rounds of each turn, so what else the machine does meets both. The
order of a turn alternates.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ON = {"KVPS_HTTP": "127.0.0.1:0"}


def round_ms(more: dict[str, str], flags: argparse.Namespace, path: Path) -> float:
    """Return the median round of one run of kvps bench."""
    argv = [sys.executable, "-m", "kvps.cli.main", "bench", "--systems", "kvps", "--workloads"]
    argv += [flags.workload, "--rounds", str(flags.rounds), "--repeat", "1", "--no-limits"]
    env = {key: value for key, value in os.environ.items() if key != "KVPS_HTTP"} | more
    subprocess.run([*argv, "--json", str(path)], env=env, check=True, stdout=subprocess.DEVNULL)
    (row,) = json.loads(path.read_text())["rows"]
    return float(row["median_ms"])


def main() -> None:
    """Take turns, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--workload", default="resnet50")
    flags = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.json"
        for turn in range(flags.turns):
            order = [("off", {}), ("on", ON)] if turn % 2 else [("on", ON), ("off", {})]
            ms = {name: round_ms(more, flags, path) for name, more in order}
            ratios.append(ms["on"] / ms["off"])
            load = os.getloadavg()[0]
            print(
                f"turn {turn}: on {ms['on']:.1f} ms, off {ms['off']:.1f} ms, load {load:.1f}",
                flush=True,
            )
    print(
        f"on / off: median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}"
    )


if __name__ == "__main__":
    main()
