"""What threads of a server that wait cost: its processor time for a round, by how OpenMP lets them wait.

    python benchmarks/server_threads.py [--elements 1000 20000000] [--turns 2]

One worker with one thread of torch, and one server with torch's own number, push and pull one key
with SGD and momentum on the server, :data:`PAUSE_S` apart. The processor time is that of the
server's process, all threads together. Linux.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import kvps
from kvps.tools.bench.local import free_port

PAUSE_S = 0.005
WARM_UP = 20
WAYS = {
    "threads spin": {"OMP_WAIT_POLICY": "ACTIVE"},
    "kvps-server as it is": {},
    "GOMP_SPINCOUNT=0": {"GOMP_SPINCOUNT": "0"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
OF_THREADS = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def main() -> None:
    """Print milliseconds of a round for each number of elements, and each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, nargs="+", default=[1000, 20_000_000])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--server", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.server is not None:
        train(given.elements[0], given.rounds, given.server)
        return
    for elements in given.elements:
        for _ in range(given.turns):
            for way, env in WAYS.items():
                used_ms, call_ms = measured(elements, given.rounds, env)
                print(f"{elements:9,} elements, {way:20}: processor {used_ms:.1f} ms, call {call_ms:.1f} ms")


def measured(elements: int, rounds: int, env: dict[str, str]) -> tuple[float, float]:
    """Return the server's processor time, and the median time of a call, in milliseconds of a round."""
    address = f"tcp://127.0.0.1:{free_port()}"
    plain = {name: value for name, value in os.environ.items() if name not in OF_THREADS}
    plain |= {"KVPS_SCHEDULER": address, "KVPS_INSECURE": "1"}
    command = [sys.executable, "-m", "kvps.cli.scheduler", "--workers", "1", "--servers", "1"]
    scheduler = subprocess.Popen([*command, "--bind", address], env=plain)
    server = subprocess.Popen([sys.executable, "-m", "kvps.cli.server"], env=plain | env)
    words = ["--elements", str(elements), "--rounds", str(rounds), "--server", str(server.pid)]
    command = [sys.executable, __file__, *words]
    try:
        found = subprocess.run(command, env=plain, stdout=subprocess.PIPE, text=True, check=True)
        for process in (server, scheduler):
            process.wait(60)
    finally:
        for process in (server, scheduler):
            process.kill()
    used_ms, call_ms = map(float, found.stdout.split())
    return used_ms, call_ms


def train(elements: int, rounds: int, server: int) -> None:
    """Be the worker; print both times."""
    torch.set_num_threads(1)
    gradient, weight = torch.randn(elements), torch.empty(elements)
    taken_s = []
    with kvps.create("dist_sync") as kv:
        kv.init("w", torch.randn(elements))
        kv.set_optimizer("sgd", lr=0.1, momentum=0.9)
        for _ in range(WARM_UP):
            kv.pushpull("w", gradient, out=weight)
        before_s = processor_s(server)
        for _ in range(rounds):
            begun_s = time.perf_counter()
            kv.pushpull("w", gradient, out=weight)
            taken_s.append(time.perf_counter() - begun_s)
            time.sleep(PAUSE_S)
        used_s = processor_s(server) - before_s
    print(1e3 * used_s / rounds, 1e3 * statistics.median(taken_s))


def processor_s(pid: int) -> float:
    """Return the processor time of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
