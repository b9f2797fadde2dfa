"""Published weights: what a version costs the trainer, and how soon and how fast readers have it.

    kvps-launch -n 1 -s 2 -- .venv/bin/python benchmarks/publish.py [--mb 256] [--turns 5] [--readers 0 1 4]

The worker publishes ``--mb`` megabytes of bfloat16, as a state dict and as keys, with so many readers; the
last row has one reader that is stopped by SIGSTOP. Printed are medians over the turns, in milliseconds:
``copy`` is one copy of these bytes by torch, ``publish`` the call in the trainer, ``learn`` from its return
until the last reader knows the number, and ``read`` from there until that reader has all tensors. ``share``
is the copy's time divided by that.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time

import torch

import kvps

PIECES = 16
"""Tensors of the model."""


def read(turns: int) -> None:
    """Read versions as they come; print when each was known, and read."""
    with kvps.subscribe("bench") as versions:
        target: dict[str, torch.Tensor] = {}
        number = versions.wait(timeout=60)
        print("ready", flush=True)
        for _ in range(turns):
            number = versions.wait(newer_than=number, timeout=60)
            known = time.monotonic()
            if not target:
                target = {name: torch.empty_like(tensor) for name, tensor in versions.tensors()}
            else:
                versions._fetched(60)  # as load(), without its copy
            print(number, known, time.monotonic(), flush=True)


def measure(kv: kvps.KVStore, source: object, readers: int, turns: int, stops: bool) -> list[float]:
    """Return the medians of publish, learn and read, in seconds."""
    kv.publish("bench", source)
    command = [sys.executable, __file__, "--read", str(turns)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(readers + stops)]
    rows = []
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        if stops:
            os.kill(processes.pop().pid, signal.SIGSTOP)
        for _ in range(turns):
            began = time.monotonic()
            number = kv.publish("bench", source)
            ended = time.monotonic()
            lines = [process.stdout.readline().split() for process in processes if process.stdout]
            assert all(int(line[0]) == number for line in lines)
            known = max([float(line[1]) for line in lines], default=ended)
            got = max([float(line[2]) for line in lines], default=known)
            rows.append((ended - began, max(0.0, known - ended), got - known))
    finally:
        for process in processes:
            process.kill()
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Time publications and their readers.")
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--readers", type=int, nargs="*", default=[0, 1, 4])
    parser.add_argument("--read", type=int, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.read is not None:
        read(flags.read)
        return 0
    count = flags.mb * 1_000_000 // 2 // PIECES
    state = {f"w{index}": torch.randn(count).bfloat16() for index in range(PIECES)}
    target = [tensor.clone() for tensor in state.values()]
    times = []
    for _ in range(flags.turns):
        began = time.monotonic()
        for to, tensor in zip(target, state.values(), strict=True):
            to.copy_(tensor)
        times.append(time.monotonic() - began)
    copy = statistics.median(times)
    print(f"{flags.mb} MB; copy {1e3 * copy:.0f} ms")
    print(f"{'source':12}{'readers':>18}{'publish':>9}{'learn':>8}{'read':>8}{'share':>7}")
    with kvps.create("dist_sync", name="bench") as kv:
        kv.init(list(state), list(state.values()))
        for title, source in (("state dict", state), ("keys", list(state))):
            for readers, stops in [*[(readers, False) for readers in flags.readers], (1, True)]:
                publish, learn, took = measure(kv, source, readers, flags.turns, stops)
                who = f"{readers} and 1 stopped" if stops else f"{readers}"
                share = f"{copy / took:.2f}" if took else ""
                print(
                    f"{title:12}{who:>18}{1e3 * publish:9.1f}{1e3 * learn:8.1f}{1e3 * took:8.0f}{share:>7}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
