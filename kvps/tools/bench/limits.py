"""Upper bounds of this machine: bytes copied, bytes summed, bytes through loopback TCP.

Each figure is the best of some attempts, since a limit is what nothing else held up, in GB of
payload per second: a copy of 1 GB counts as 1, though it reads and writes, and so does a sum of
1 GB and 1 GB. All blocks are larger than caches.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np

BLOCK_BYTES = 128 << 20
TCP_BYTES = 512 << 20
FRAME_BYTES = 1 << 20
ATTEMPTS = 5
SEED = 1


def measured() -> dict[str, float]:
    """Return each limit by its name, in GB per second."""
    cores = len(os.sched_getaffinity(0))
    limits = {}
    for name, work in (("copy", _copy), ("add", _add)):
        alone = [work(BLOCK_BYTES)]
        limits[f"{name}, one core"] = _best(partial(_together, alone, BLOCK_BYTES))
        works = [work(BLOCK_BYTES // cores) for _ in range(cores)]
        limits[f"{name}, all {cores} cores"] = _best(partial(_together, works, BLOCK_BYTES))
    limits["loopback TCP, one connection"] = _best(lambda: _tcp(1, both_ways=False))
    limits["loopback TCP, 4 connections both ways"] = _best(lambda: _tcp(4, both_ways=True))
    return limits


def _best(attempt: Callable[[], float]) -> float:
    return max(attempt() for _ in range(ATTEMPTS))


def _together(works: Sequence[Callable[[], object]], count_bytes: int) -> float:
    """Return the GB per second that threads do together, outside of the interpreter lock."""
    gate = threading.Barrier(len(works) + 1)

    def run(work: Callable[[], object]) -> None:
        gate.wait()
        work()
        gate.wait()

    started = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in started:
        thread.start()
    gate.wait()
    began = time.perf_counter()
    gate.wait()
    took_s = time.perf_counter() - began
    for thread in started:
        thread.join()
    return count_bytes / took_s / 1e9


def _copy(count_bytes: int) -> Callable[[], object]:
    source, target = _random(count_bytes), _random(count_bytes)
    return lambda: np.copyto(target, source)


def _add(count_bytes: int) -> Callable[[], object]:
    addend, other, target = (_random(count_bytes) for _ in range(3))
    return lambda: np.add(addend, other, out=target)


def _random(count_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return random numbers, in memory that has been written to: zeros may lie nowhere."""
    row = np.empty(count_bytes // 4, np.float32)
    np.random.default_rng(SEED).random(out=row, dtype=np.float32)
    return row


def _tcp(connections: int, *, both_ways: bool) -> float:
    """Return how many GB per second all connections carry together, in all directions."""
    frame = _random(FRAME_BYTES).tobytes()
    frames = TCP_BYTES // FRAME_BYTES // connections // (2 if both_ways else 1)
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        works: list[Callable[[], object]] = []
        for _ in range(connections):
            near = stack.enter_context(socket.create_connection(server.getsockname()))
            far = stack.enter_context(server.accept()[0])
            for sender, receiver in ((near, far), (far, near)) if both_ways else ((near, far),):
                works.append(partial(_send, sender, frame, frames))
                works.append(partial(_receive, receiver, frames * FRAME_BYTES))
        return _together(works, TCP_BYTES)


def _send(sender: socket.socket, frame: bytes, count: int) -> None:
    for _ in range(count):
        sender.sendall(frame)


def _receive(receiver: socket.socket, count_bytes: int) -> None:
    buffer = bytearray(FRAME_BYTES)
    while count_bytes:
        count_bytes -= receiver.recv_into(buffer)
