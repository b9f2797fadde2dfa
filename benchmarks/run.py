"""Measures kvps beside torch's gloo on this machine, in alternating runs.

    make bench                                     the whole table
    .venv/bin/python benchmarks/run.py --workloads small --repeat 1

Every figure is the median over rounds of one push and pull of all arrays, of the slower worker, and
then the median over runs. Machines drift: only figures of one run of this script compare.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from workloads import WORKLOADS, megabytes

WORKER = str(Path(__file__).parent / "worker.py")
SYSTEMS = {
    "kvps, sum": ("kvps", "none"),
    "kvps, SGD on the servers": ("kvps", "sgd"),
    "gloo, 25 MiB buckets": ("gloo", "none"),
}


def main() -> None:
    """Parse the flags, measure, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10, help="measured rounds of one run")
    parser.add_argument("--repeat", type=int, default=3, help="alternating runs of each system")
    parser.add_argument("--json", help="write the figures to this file, too")
    flags = parser.parse_args()
    console = Console()
    figures: dict[str, dict[str, list[float]]] = {
        workload: {system: [] for system in SYSTEMS} for workload in flags.workloads
    }
    with Progress(console=console) as progress:
        task = progress.add_task(
            "measuring", total=len(flags.workloads) * flags.repeat * len(SYSTEMS)
        )
        for workload in flags.workloads:
            for _ in range(flags.repeat):
                for system, (kind, optimizer) in SYSTEMS.items():
                    figures[workload][system].append(_measure(kind, workload, optimizer, flags))
                    progress.advance(task)
    _print(console, figures, flags)
    if flags.json:
        Path(flags.json).write_text(json.dumps(figures, indent=2) + "\n")


def _measure(kind: str, workload: str, optimizer: str, flags: argparse.Namespace) -> float:
    """Run one system once; return the slower worker's median in milliseconds."""
    command = [sys.executable, WORKER, kind, workload, optimizer, str(flags.rounds)]
    env = dict(os.environ, OMP_NUM_THREADS="1")
    if kind == "kvps":
        launch = [sys.executable, "-m", "kvps.cli.launch"]
        launch += ["-n", str(flags.workers), "-s", str(flags.servers), "--"]
        output = subprocess.run(
            [*launch, *command], env=env, check=True, capture_output=True
        ).stdout
    else:
        output = _run_gloo(command, env, flags.workers)
    lines = [line.split("RESULT ")[1] for line in output.decode().splitlines() if "RESULT " in line]
    if len(lines) != flags.workers:
        raise RuntimeError(f"{kind} {workload}: {len(lines)} of {flags.workers} workers finished")
    return max(json.loads(line)["median_ms"] for line in lines)


def _run_gloo(command: list[str], env: dict[str, str], workers: int) -> bytes:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = dict(env, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(workers))
    with tempfile.TemporaryFile() as output:
        processes = [
            subprocess.Popen(command, env=dict(env, RANK=str(rank)), stdout=output)
            for rank in range(workers)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError(f"gloo workers ended with {codes}")
        output.seek(0)
        return output.read()


def _print(
    console: Console, figures: dict[str, dict[str, list[float]]], flags: argparse.Namespace
) -> None:
    console.print(
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}; {flags.workers} workers, {flags.servers} servers, one host; "
        f"median ms of {flags.rounds} rounds, then of {flags.repeat} alternating runs"
    )
    table = Table("workload", "MB", *SYSTEMS)
    for workload, systems in figures.items():
        cells = [f"{statistics.median(times):.1f}" for times in systems.values()]
        table.add_row(workload, f"{megabytes(WORKLOADS[workload]):.0f}", *cells)
    console.print(table)


if __name__ == "__main__":
    main()
