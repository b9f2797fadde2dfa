"""What this machine can do at best: bytes copied, bytes summed, bytes through loopback TCP.

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
        limits[f"{name}, one core"] = _best(_together, [work(BLOCK_BYTES)])
        works = [work(BLOCK_BYTES // cores) for _ in range(cores)]
        limits[f"{name}, all {cores} cores"] = _best(_together, works)
    limits["loopback TCP, one connection"] = _best(_tcp)
    return limits


def _best(attempt: Callable[..., float], *given: object) -> float:
    return max(attempt(*given) for _ in range(ATTEMPTS))


def _together(works: Sequence[Callable[[], object]]) -> float:
    """Return how many GB per second threads do together; numpy leaves Python meanwhile."""
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
    return BLOCK_BYTES / took_s / 1e9


def _copy(count_bytes: int) -> Callable[[], object]:
    source, target = _random(count_bytes), _random(count_bytes)
    return lambda: np.copyto(target, source)


def _add(count_bytes: int) -> Callable[[], object]:
    one, other, target = (_random(count_bytes) for _ in range(3))
    return lambda: np.add(one, other, out=target)


def _random(count_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return random numbers, in memory that has been written to: zeros may lie nowhere."""
    row = np.empty(count_bytes // 4, np.float32)
    np.random.default_rng(SEED).random(out=row, dtype=np.float32)
    return row


def _tcp() -> float:
    frame = _random(FRAME_BYTES).tobytes()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
    ):
        receiver, _ = server.accept()
        sending = threading.Thread(target=_send, args=(sender, frame))
        began = time.perf_counter()
        sending.start()
        with receiver:
            _receive(receiver)
        took_s = time.perf_counter() - began
        sending.join()
    return TCP_BYTES / took_s / 1e9


def _send(sender: socket.socket, frame: bytes) -> None:
    for _ in range(TCP_BYTES // FRAME_BYTES):
        sender.sendall(frame)


def _receive(receiver: socket.socket) -> None:
    buffer = bytearray(FRAME_BYTES)
    left = TCP_BYTES
    while left:
        left -= receiver.recv_into(buffer)
