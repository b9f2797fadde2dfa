"""The start of a job: 4 workers and 2 servers to their first barrier, beside as many processes that import torch.

    .venv/bin/python benchmarks/startup.py                 # kvps-launch, and Ray if it is installed
    .venv/bin/python benchmarks/startup.py --repeat 7 --only launch

Both are measured in turns, so that other work on the machine meets both. Of a job by kvps-launch the time is that from
the command to the moment when all workers have passed the barrier; the other six are ``python -c "import torch"`` side by
side. With Ray, it is the time from ``kvps.ray.cluster`` to that moment, in a Ray that runs already and has no idle
processes that have imported torch; the other six are actors that import torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

WORKERS, SERVERS = 4, 2
SCRIPT = """
import time
import kvps
kv = kvps.create("dist_sync")
kv.barrier()
print("barrier", time.monotonic(), flush=True)
kv.close()
"""


def by_launch() -> float:
    """Return the seconds from kvps-launch to the barrier."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT, encoding="utf-8")
        launch = Path(sys.executable).parent / "kvps-launch"
        command = [launch, "-n", str(WORKERS), "-s", str(SERVERS), "--", sys.executable, script]
        began = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    passed = [
        float(line.split("barrier")[1]) for line in done.stdout.splitlines() if "barrier" in line
    ]
    assert len(passed) == WORKERS, done.stdout
    return max(passed) - began


def by_python() -> float:
    """Return the seconds until six processes have imported torch."""
    began = time.monotonic()
    command = [sys.executable, "-c", "import torch"]
    started = [subprocess.Popen(command) for _ in range(WORKERS + SERVERS)]
    for process in started:
        assert process.wait() == 0
    return time.monotonic() - began


def by_ray() -> float:
    """Return the seconds from kvps.ray.cluster to the barrier."""
    import ray

    import kvps.ray

    @ray.remote(num_cpus=1, max_calls=1)  # a process of its own, as an actor has
    def train(seat: kvps.ray.Seat) -> float:
        with seat:
            import kvps

            kv = kvps.create("dist_sync")
            kv.barrier()
            return time.monotonic()

    began = time.monotonic()
    with kvps.ray.cluster(WORKERS, SERVERS) as cluster:
        return max(ray.get([train.remote(cluster.seat(rank)) for rank in range(WORKERS)])) - began


def by_actors() -> float:
    """Return the seconds until six actors have imported torch."""
    import ray

    @ray.remote(num_cpus=1)
    class Importer:
        def load(self) -> None:
            import torch  # noqa: F401

    began = time.monotonic()
    actors = [Importer.remote() for _ in range(WORKERS + SERVERS)]
    ray.get([one.load.remote() for one in actors])
    took_s = time.monotonic() - began
    for one in actors:
        ray.kill(one)
    return took_s


def settle() -> None:
    """Wait until Ray has its resources back, and its pool of fresh processes."""
    import ray

    while ray.available_resources().get("CPU", 0) < WORKERS + SERVERS:
        time.sleep(0.1)
    time.sleep(5.0)


def in_turns(
    name: str,
    ours: Callable[[], float],
    theirs: Callable[[], float],
    repeat: int,
    between: Callable[[], None],
) -> None:
    """Print the medians of both, and their ratio."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeat + 1):
        for measure, found in zip((ours, theirs), times, strict=True):
            between()
            took_s = measure()
            if turn:  # the first fills the caches
                found.append(took_s)
                print(f"  turn {turn}, {measure.__name__}: {took_s:.2f} s", flush=True)
    mine, other = (statistics.median(found) for found in times)
    load = os.getloadavg()[0]
    print(
        f"{name}: {mine:.2f} s, {other:.2f} s, ratio {mine / other:.2f} (load {load:.1f})",
        flush=True,
    )


def main() -> int:
    """Measure; return the exit code."""
    parser = argparse.ArgumentParser(description="The start of a job, beside that of torch.")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", choices=("launch", "ray"))
    flags = parser.parse_args()
    print(
        f"{WORKERS} workers + {SERVERS} servers to the first barrier, {WORKERS + SERVERS} import torch"
    )
    if flags.only != "ray":
        name = 'kvps-launch, python -c "import torch"'
        in_turns(name, by_launch, by_python, flags.repeat, lambda: None)
    if flags.only == "launch":
        return 0
    if importlib.util.find_spec("ray") is None:
        print("Ray: not installed (pip install 'kvps[ray]')")
        return 0
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.init(num_cpus=WORKERS + SERVERS, include_dashboard=False, log_to_driver=False)
    in_turns("kvps.ray.cluster, actors of Ray", by_ray, by_actors, flags.repeat, settle)
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
