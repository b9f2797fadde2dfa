"""The floor of TCP: bare sockets that move the bytes of a round, and kvps over TCP, in turns.

    python benchmarks/sockets.py [resnet50] [--rounds 30] [--turns 3] [--keys]
    sudo python benchmarks/sockets.py --network --workers 4 --servers 4 --rate 400mbit --rounds 5

As many processes as workers and servers: each of these sockets' workers has one connection to each
of their servers. In a round the arrays of a workload of ``kvps bench`` pass once each way, both
ways at once, an equal part on each connection. Nothing is gathered, summed, scattered or checked.
kvps's rounds are those of ``benchmarks/where.py``.

Printed are the median of the rounds in milliseconds, and the processor time of all processes for
each GB that goes one way, at both ends together. A round moves the arrays twice for each worker.

With ``--network`` every process is on a host of its own behind a link of the rate, as in
``benchmarks.compare``, and only the sockets are measured: the most that any protocol over TCP can
have of these links. Their share of M/B is printed, where B is the rate of the link and M the bytes
of the arrays.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.compare.networks.layout import bytes_per_s  # noqa: E402  # benchmarks is not installed
from benchmarks.compare.networks.namespaces import Namespaces  # noqa: E402  # as above
from benchmarks.where import rows  # noqa: E402  # as above
from kvps.tools.bench.workloads import FLOAT_BYTES, shapes_of  # noqa: E402

BLOCK_BYTES = 1 << 20
"""Bytes of a system call."""
WARM_UP = 3


class Figures(NamedTuple):
    """The figures of one system in one turn."""

    round_ms: float
    cpu_s_per_gb: float


def main() -> None:
    """Take turns, and print both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", nargs="?", default="resnet50", help="as kvps bench has it")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--keys", action="store_true", help="kvps encrypts (CURVE)")
    parser.add_argument("--network", action="store_true", help="a host for each process; as root")
    parser.add_argument("--rate", default="400mbit", help="the rate of each link, with --network")
    given = parser.parse_args()
    if given.network:
        on_links(given)
        return
    sys.stdout.write("turn  sockets ms  kvps ms  ratio  sockets s/GB  kvps s/GB\n")
    ratios = []
    for turn in range(given.turns):
        floor, ours = sockets(given), kvps(given)
        ratios.append(ours.round_ms / floor.round_ms)
        sys.stdout.write(
            f"{turn + 1:4}{floor.round_ms:12.1f}{ours.round_ms:9.1f}{ratios[-1]:7.2f}"
            f"{floor.cpu_s_per_gb:14.3f}{ours.cpu_s_per_gb:11.3f}\n"
        )
        sys.stdout.flush()
    sys.stdout.write(f"median ratio of the times: {statistics.median(ratios):.2f}\n")


def on_links(given: argparse.Namespace) -> None:
    """Print what bare sockets have of links of a set rate."""
    floor_ms = 1e3 * moved_gb(given) * 1e9 / (2 * given.workers) / bytes_per_s(given.rate)
    with Namespaces(given.workers + given.servers, given.rate) as hosts:
        found = sockets(given, hosts)
    sys.stdout.write(
        f"M/B {floor_ms:.0f} ms, sockets {found.round_ms:.0f} ms: {floor_ms / found.round_ms:.1%} of M/B, "
        f"{found.cpu_s_per_gb:.2f} s of processor time per GB\n"
    )


def moved_gb(given: argparse.Namespace) -> float:
    """Return the GB that a round moves: all arrays, to the servers and back, for each worker."""
    count = sum(math.prod(shape) for shape in shapes_of(given.workload))
    return 2 * given.workers * FLOAT_BYTES * count / 1e9


def kvps(given: argparse.Namespace) -> Figures:
    """Return the figures of kvps over TCP."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "figures.json")
        words = [given.workload, "--transport", "tcp", "--rounds", given.rounds, "--json", file]
        words += ["--workers", given.workers, "--servers", given.servers]
        words += [] if given.keys else ["--no-keys"]
        argv = [sys.executable, str(ROOT / "benchmarks" / "where.py"), *map(str, words)]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, env=os.environ)
        found = json.loads(file.read_text())
    cpu_ms = sum(
        cpu_ms
        for name, times in found["processes"].items()
        for _, kind, _, cpu_ms, _ in rows(name, times, given.rounds)
        if kind == "all"
    )
    return Figures(statistics.median(found["rounds_ms"]), cpu_ms / 1e3 / moved_gb(given))


def sockets(given: argparse.Namespace, hosts: Namespaces | None = None) -> Figures:
    """Return the figures of bare sockets, on this host or on ``hosts``: those of servers first."""
    each_bytes = round(moved_gb(given) * 1e9) // (2 * given.workers * given.servers)
    context = multiprocessing.get_context("fork")
    doors = [_door(hosts, server) for server in range(given.servers)]
    gate = context.Barrier(given.workers + given.servers)
    reports = []
    processes = []
    addresses = [door.getsockname() for door in doors]
    for number in range(given.servers + given.workers):
        ours, theirs = context.Pipe()
        door = doors[number] if number < given.servers else None
        told = (door, addresses, given, each_bytes, gate, theirs)
        processes.append(context.Process(target=_on, args=(hosts, number, told), daemon=True))
        reports.append(ours)
    for process in processes:
        process.start()
    found: list[tuple[list[float], float]] = [report.recv() for report in reports]
    for process in processes:
        process.join()
    for door in doors:
        door.close()
    rounds_ms = [max(times) for times in zip(*[times for times, _ in found], strict=True)]
    cpu_s = sum(cpu_s for _, cpu_s in found) / given.rounds
    return Figures(statistics.median(rounds_ms), cpu_s / moved_gb(given))


def _door(hosts: Namespaces | None, server: int) -> socket.socket:
    """Return a listening socket of a server."""
    if hosts is None:
        return socket.create_server(("127.0.0.1", 0))
    with hosts.entered(server):
        return socket.create_server((hosts.address(server), 0))


def _on(hosts: Namespaces | None, number: int, told: tuple[Any, ...]) -> None:
    """Be process ``number``, on its host."""
    with nullcontext() if hosts is None else hosts.entered(number):
        _be(*told)


def _be(
    door: socket.socket | None,
    addresses: Sequence[tuple[str, int]],
    given: argparse.Namespace,
    each_bytes: int,
    gate: threading.Barrier,
    report: Connection,
) -> None:
    """Be a worker, or the server behind ``door``: send and receive on all connections in each round."""
    if door is None:
        links = [socket.create_connection(address) for address in addresses]
    else:
        links = [door.accept()[0] for _ in range(given.workers)]
    works: list[Callable[[], None]] = []
    for link in links:
        works.append(partial(_send, link, memoryview(bytearray(os.urandom(1)) * each_bytes)))
        works.append(partial(_receive, link, memoryview(bytearray(each_bytes))))
    times_ms: list[float] = []
    cpu_s = 0.0
    for number in range(WARM_UP + given.rounds):
        gate.wait()
        began, cpu_before = time.perf_counter(), time.process_time()
        threads = [threading.Thread(target=work) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if number >= WARM_UP:
            times_ms.append(1e3 * (time.perf_counter() - began))
            cpu_s += time.process_time() - cpu_before
    report.send((times_ms, cpu_s))


def _send(link: socket.socket, values: memoryview) -> None:
    for begin in range(0, len(values), BLOCK_BYTES):
        link.sendall(values[begin : begin + BLOCK_BYTES])


def _receive(link: socket.socket, values: memoryview) -> None:
    at = 0
    while at < len(values):
        at += link.recv_into(values[at:], min(BLOCK_BYTES, len(values) - at))


if __name__ == "__main__":
    main()
