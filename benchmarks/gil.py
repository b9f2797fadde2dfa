"""What a busy interpreter costs: a pushpull while the script's thread runs pure Python, as a data
loader does.

    .venv/bin/python benchmarks/gil.py [--workload resnet50] [--rounds 60] [--intervals 5 1 0.5 0.2]

One worker and one server, so that each has a processor. The script's thread starts a pushpull and
then waits; or keeps its processor busy without the interpreter lock, which tells what the
processor alone costs; or splits and counts words, which holds the lock for as long as others let
it. The last is done with several switch intervals: the time, in ms, after which a thread that
waits for the lock may ask for it (5 in CPython; ``-`` is what kvps does by itself). A round ends
when the loop's thread has the result. The ways take turns. Printed are p50 and p99 in ms, their
ratio to waiting, and how many words per ms the script counted meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch

from kvps.tools.bench.workloads import shapes_of

WORDS = "the loop must not wait for the script which counts the words of the text " * 20
BLOCK = bytes(1 << 20)


def count_words() -> int:
    """Count words for some 50 us, by the interpreter."""
    seen: dict[str, int] = {}
    for word in WORDS.split():
        seen[word] = seen.get(word, 0) + 1
    return len(WORDS)


def checksum() -> int:
    """Keep the processor busy for some hundred us, without the interpreter lock."""
    return zlib.crc32(BLOCK) & 0


def work(rounds: int, workload: str, intervals: list[float]) -> dict[str, list[float]]:
    """Return the ms of all rounds, by way, and the words per ms under ``words WAY``."""
    import kvps

    torch.set_num_threads(1)
    shapes = shapes_of(workload)
    ways: dict[str, tuple[float | None, Callable[[], int] | None]] = {
        "waits": (None, None),
        "busy without the lock": (None, checksum),
        "Python, -": (None, count_words),
    }
    ways |= {f"Python, {interval:g}": (interval, count_words) for interval in intervals}
    found: dict[str, list[float]] = {}
    with kvps.create("dist_sync") as kv:
        names = [str(index) for index in range(len(shapes))]
        gradients = [torch.randn(shape) for shape in shapes]
        out = [torch.empty(shape) for shape in shapes]
        kv.init(names, gradients)
        usual = sys.getswitchinterval()
        for at in range(rounds + 3):
            for way, (interval, busy) in ways.items():
                sys.setswitchinterval(usual if interval is None else interval / 1000)
                ended: list[float] = []
                done, began = 0, time.perf_counter()
                handle = kv.pushpull(names, gradients, out=out, async_op=True)
                handle.when_over(lambda ended=ended: ended.append(time.perf_counter()))
                while busy is not None and not ended:
                    done += busy()
                handle.wait()
                sys.setswitchinterval(usual)
                if at >= 3:
                    ms = 1000 * (ended[0] - began)
                    found.setdefault(way, []).append(ms)
                    found.setdefault(f"words {way}", []).append(done / 6 / ms)
    return found


def main() -> None:
    """Start a job of this file, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="resnet50", help="as kvps bench has it")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--intervals", type=float, nargs="*", default=[5, 1, 0.5, 0.2])
    flags = parser.parse_args()
    if os.environ.get("KVPS_SCHEDULER"):
        found = work(flags.rounds, flags.workload, flags.intervals)
        print(json.dumps(found), flush=True)
        return
    launch = Path(sys.executable).parent / "kvps-launch"
    command = [launch, "-n", "1", "-s", "1", "--", sys.executable, *sys.argv]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if "{" in line)
    found = json.loads(line[line.index("{") :])
    base = statistics.median(found["waits"])
    for way, times in found.items():
        if way.startswith("words "):
            continue
        p50, p99 = statistics.median(times), sorted(times)[int(0.99 * len(times))]
        words = statistics.median(found[f"words {way}"])
        print(f"{way:24} p50 {p50:7.1f}  p99 {p99:7.1f}  {p50 / base:5.2f}x  {words:6.0f} words/ms")


if __name__ == "__main__":
    main()
