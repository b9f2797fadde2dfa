"""Measures how much of a step's communication hides behind its computation, beside DDP on gloo.

    sudo .venv/bin/python benchmarks/overlap.py [--rate 400mbit] [--steps 6] [--plot FILE.png]

Four workers and four servers, each in a network namespace behind a link of the rate given. Two cores
cannot compute for eight processes, so an accelerator is emulated: ResNet-50's 161 arrays are layers of a
model whose forward and backward functions wait (by the clock of an accelerator that does not stand still
while Python gets from one layer to the next), and hand over a random gradient. By default backward
takes as long as the model takes on a link, M/B, and forward half of that. The ways take turns:

    ddp gloo             DistributedDataParallel, ring all-reduce, 25 MiB buckets
    kvps, no overlap     the Trainer: push and pull in step()
    kvps                 DistributedOptimizer: gradients leave during backward
    kvps, forward too    overlap_forward=True: modules wait in the next forward pass

Printed is the median step of worker 0, and its ratio to max(computation, M/B). The picture shows worker 0's
computation, and the bytes on its link, over one step. Root, Linux.
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
from typing import Any

from benchmarks.compare.networks.namespaces import Namespaces, demand_root
from kvps import config
from kvps.tools.bench.workloads import resnet50

WORKERS = SERVERS = 4
WAYS = ("ddp gloo", "kvps, no overlap", "kvps", "kvps, forward too")
SAMPLE_S = 0.02
WORKER = Path(__file__).with_name("overlap_worker.py")


def main() -> None:
    """Take the ways in turns, and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="400mbit", help="rate of each link, as tc takes it")
    parser.add_argument("--steps", type=int, default=6, help="timed steps in each turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument(
        "--forward", type=float, default=0.5, help="seconds of forward per second of backward"
    )
    parser.add_argument("--ways", nargs="*", default=WAYS)
    parser.add_argument("--json", type=Path, help="write all figures")
    parser.add_argument("--plot", type=Path, help="plot one step of each way")
    flags = parser.parse_args()
    demand_root()
    transfer_s = 8 * _bytes() / _bits(flags.rate)
    compute_s = transfer_s * (1 + flags.forward)
    found: dict[str, list[Any]] = {way: [] for way in flags.ways}
    with Namespaces(WORKERS + SERVERS, flags.rate) as hosts:
        for turn in range(flags.turns):
            for way in flags.ways:
                print(f"turn {turn + 1} of {flags.turns}: {way} ...", file=sys.stderr, flush=True)
                waits = (transfer_s * flags.forward, transfer_s)
                found[way].append(_run(hosts, way, flags.steps, waits))
    floor_s = max(compute_s, transfer_s)
    print(
        f"ResNet-50's arrays, {WORKERS} workers, {SERVERS} servers, links of {flags.rate}: M/B "
        f"{transfer_s:.2f} s, computation {compute_s:.2f} s\n"
    )
    print("| way | step, s | of max(computation, M/B) |\n|---|---|---|")
    for way, turns in found.items():
        step_s = statistics.median([item for turn in turns for item in turn["times"]])
        print(f"| {way} | {step_s:.2f} | {step_s / floor_s:.2f} |")
    if flags.json:
        flags.json.write_text(json.dumps(found))
    if flags.plot:
        _draw({way: turns[-1] for way, turns in found.items()}, flags.plot, flags.rate)


def _bytes() -> int:
    count = 0
    for shape in resnet50():
        size = 1
        for item in shape:
            size *= item
        count += size
    return 4 * count


def _bits(rate: str) -> float:
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise SystemExit(f"--rate {rate}: write it as 400mbit or 1gbit")


def _run(hosts: Namespaces, way: str, steps: int, waits: tuple[float, float]) -> Any:
    scheduler = f"tcp://{hosts.address(WORKERS)}:9091"
    place = {"KVPS_SCHEDULER": scheduler, "KVPS_TRANSPORT": "tcp", "OMP_NUM_THREADS": "1"}
    env = {**config.environment(place, {}), "PATH": os.environ["PATH"]}
    started: list[subprocess.Popen[bytes]] = []

    def start(host: int, *words: str, **more: str) -> None:
        argv = hosts.inside(host, [sys.executable, *words])
        started.append(subprocess.Popen(argv, env={**env, **more}))

    if way != "ddp gloo":
        counts = ("--workers", str(WORKERS), "--servers", str(SERVERS))
        start(WORKERS, "-m", "kvps.cli.scheduler", *counts, "--bind", scheduler, "--insecure")
        for rank in range(SERVERS):
            bind = f"tcp://{hosts.address(WORKERS + rank)}:0"
            server = ("-m", "kvps.cli.server", "--scheduler", scheduler, "--bind", bind)
            start(WORKERS + rank, *server, "--insecure")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = [way, str(steps), *(str(wait) for wait in waits), str(SAMPLE_S), str(report)]
        for rank in range(WORKERS):
            where = {
                **{"RANK": str(rank), "WORLD_SIZE": str(WORKERS), "KVPS_RANK": str(rank)},
                **{"MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29500"},
                "GLOO_SOCKET_IFNAME": "eth0",
            }
            start(rank, str(WORKER), *words, **where)
        codes = [process.wait() for process in reversed(started)]
        if any(codes):
            raise SystemExit(f"{way}: the processes ended with {codes}")
        return json.loads(report.read_text())


def _draw(found: dict[str, Any], path: Path, rate: str) -> None:
    """Draw one step of each way: what is computed, and what is on the link."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    longest = max(item["step"][1] - item["step"][0] for item in found.values())
    figure, rows = pyplot.subplots(
        len(found), 1, figsize=(9, 1.9 * len(found)), sharex=True, layout="constrained", squeeze=False
    )
    for (way, item), axes in zip(found.items(), rows[:, 0], strict=True):
        begin, end = item["step"]
        for what, height, colour in (("forward", 0, "tab:green"), ("backward", 0, "tab:blue")):
            bars = [(at - begin, to - at) for name, at, to in item["spans"] if name == what]
            axes.broken_barh(bars, (height, -18), color=colour, label=what)
        samples = [row for row in item["traffic"] if begin - 0.1 <= row[0] <= end + 0.1]
        for column, label, colour in ((1, "sent", "tab:orange"), (2, "received", "tab:red")):
            pairs = list(zip(samples, samples[4:], strict=False))
            times = [(a[0] + b[0]) / 2 - begin for a, b in pairs]
            speeds = [8e-6 * (b[column] - a[column]) / (b[0] - a[0]) for a, b in pairs]
            axes.plot(times, speeds, color=colour, label=f"{label}, Mbit/s")
        axes.axvline(end - begin, color="black", linewidth=1)
        axes.set(title=f"{way}: {end - begin:.2f} s a step", xlim=(0, 1.05 * longest))
    rows[0, 0].legend(loc="upper right", fontsize="small")
    rows[-1, 0].set_xlabel(f"seconds of worker 0, links of {rate}")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
