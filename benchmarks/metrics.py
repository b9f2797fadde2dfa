"""Measures what metrics and the dashboard's figures cost: rounds of kvps bench with and without
KVPS_HTTP, in turns.

    .venv/bin/python -m benchmarks.metrics --turns 5

With KVPS_HTTP each process samples its counters once per second, and the scheduler asks the
servers for theirs. The ratio is the median over turns of the two rounds of each turn, so what else
the machine does meets both. The order of a turn alternates. On a busy machine rounds differ more
between runs than metrics could cost. So the processor time of each part is measured as well, in
this process and by its own clock: that of a push, which is counted in any case, and those of a
sample and of an answer to the scheduler, each once per second.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

ON = {"KVPS_HTTP": "127.0.0.1:0"}


class Run(NamedTuple):
    """One run of kvps bench."""

    ms: float
    """The median round."""
    cpu_s: float
    """Processor time of all its processes, from their start to their end."""


def run(more: dict[str, str], flags: argparse.Namespace, path: Path) -> Run:
    """Run kvps bench once."""
    argv = [sys.executable, "-m", "kvps.cli.main", "bench", "--systems", "kvps", "--workloads"]
    argv += [flags.workload, "--rounds", str(flags.rounds), "--repeat", "1", "--no-limits"]
    env = {key: value for key, value in os.environ.items() if key != "KVPS_HTTP"} | more
    before = cpu_s()
    subprocess.run([*argv, "--json", str(path)], env=env, check=True, stdout=subprocess.DEVNULL)
    (row,) = json.loads(path.read_text())["rows"]
    return Run(float(row["median_ms"]), cpu_s() - before)


def cpu_s() -> float:
    """Return the processor time of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def parts() -> None:
    """Print the processor time of each part, on a server that has ResNet-50's 161 arrays."""
    from kvps.core.server.meter import Meter
    from kvps.protocol.membership import Measure
    from kvps.protocol.values import Run as Elements
    from kvps.runtime import server_process
    from kvps.tools.bench.workloads import shapes_of
    from tests.support.server_harness import ServerStage

    meter, elements = Meter(), (Elements(0, 1 << 18, 1),)

    def push() -> None:
        meter.on_push("counted", (1,), ())
        meter.on_count("kv", (1,), meter.now - 0.01)
        meter.on_values(5, elements, 4)

    stage = ServerStage(2)
    stage.open()
    for number, shape in enumerate(shapes_of("resnet50")):
        stage.init(str(number), torch.zeros(math.prod(shape)))
        for rank in range(2):
            if len(stage.pieces[str(number)]) == 1:
                stage.push(rank, str(number), torch.zeros(math.prod(shape)), 0)

    def sample() -> None:
        server_process.state_of(stage.server, stage.now)
        stage.server.counts.values()
        stage.server.counts.durations()

    def answer() -> None:
        stage.scheduler(Measure(1))

    for name, part, count in (("push", push, 20_000), ("sample", sample, 200), ("answer", answer, 200)):
        print(f"{name}: {least_us(part, count):.1f} us of a processor")


def least_us(part: Callable[[], None], count: int) -> float:
    """Return the least of seven means of the processor time of a call, in microseconds."""
    means = []
    for _ in range(7):
        began = time.thread_time()
        for _ in range(count):
            part()
        means.append((time.thread_time() - began) / count)
    return 1e6 * min(means)


def main() -> None:
    """Take turns, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--workload", default="resnet50")
    flags = parser.parse_args()
    parts()
    found: dict[str, list[Run]] = {"on": [], "off": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.json"
        for turn in range(flags.turns):
            order = [("off", {}), ("on", ON)] if turn % 2 else [("on", ON), ("off", {})]
            for name, more in order:
                item = run(more, flags, path)
                found[name].append(item)
                load = os.getloadavg()[0]
                print(
                    f"{name}: {item.ms:.1f} ms, {item.cpu_s:.1f} s of processors, load {load:.1f}", flush=True
                )
    for title, values in (
        ("round", [[item.ms for item in found[name]] for name in ("on", "off")]),
        ("processor time", [[item.cpu_s for item in found[name]] for name in ("on", "off")]),
    ):
        ratios = [on / off for on, off in zip(*values, strict=True)]
        print(
            f"{title}, on / off: {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}"
        )


if __name__ == "__main__":
    main()
