"""What one pushpull() costs in Python: its calls, and its processor time with warm and with cold caches.

    python benchmarks/calls.py [--size 16384] [--rounds 300]

A local store pushes and pulls one array: the rules of a worker and of a server run in this
process, without sockets. Counted are the Python functions that are called meanwhile, kvps's and
others'. The processor time of the calling thread is taken in a loop, and where
:data:`EVICTED_BYTES` are read between two calls, as other processes of a host do between two messages.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from types import FrameType

import torch

import kvps

EVICTED_BYTES = 64 << 20
WARM_UP = 300
TURNS = 5


def main() -> None:
    """Print the number of calls, and both times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=16384, help="elements of the array, float32")
    parser.add_argument("--rounds", type=int, default=300, help="calls of a turn")
    given = parser.parse_args()
    torch.set_num_threads(1)
    gradients, weights = [torch.randn(given.size)], [torch.empty(given.size)]
    others = torch.randn(EVICTED_BYTES // 4)
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    with kvps.create("local") as kv:
        kv.init(["w"], gradients)

        def taken_us(is_cold: bool) -> float:
            """Return the processor time of a call, in microseconds."""
            total_s = 0.0
            for _ in range(given.rounds):
                if is_cold:
                    others.sum()
                begun_s = time.thread_time()
                kv.pushpull(["w"], gradients, out=weights)
                total_s += time.thread_time() - begun_s
            return 1e6 * total_s / given.rounds

        for _ in range(WARM_UP):
            kv.pushpull(["w"], gradients, out=weights)
        sys.setprofile(trace)
        kv.pushpull(["w"], gradients, out=weights)
        sys.setprofile(None)
        turns = [(taken_us(False), taken_us(True)) for _ in range(TURNS)]
    warm, cold = (statistics.median(times) for times in zip(*turns, strict=True))
    print(f"{count} calls; {warm:.0f} us in a loop, {cold:.0f} us with cold caches")


if __name__ == "__main__":
    main()
