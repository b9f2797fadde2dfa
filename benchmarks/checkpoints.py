"""By how much a checkpoint slows the rounds down during which it is taken and written.

    python benchmarks/checkpoints.py [--megabytes 1000] [--workers 2] [--servers 2] [--dir DIR]

Workers push and pull all weights, again and again; the servers write a checkpoint every so often. A round
counts as one during a checkpoint if one was being written when it began or ended. Printed are medians, the
slowest round, and how long a checkpoint took.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

KEY = 1 << 20
"""Elements of a key."""


def main() -> None:
    """Start a cluster of this machine, or be one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--every", type=float, default=15.0)
    parser.add_argument("--dir")
    parser.add_argument("--as-worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_worker:
        work(given.megabytes, given.rounds, Path(given.dir))
        return
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        subprocess.run(
            [
                *(sys.executable, "-m", "kvps.cli.launch"),
                *("-n", str(given.workers), "-s", str(given.servers)),
                *("--checkpoint-dir", folder, "--checkpoint-every", str(given.every), "--"),
                *(sys.executable, __file__, "--as-worker", "--dir", folder),
                *("--megabytes", str(given.megabytes), "--rounds", str(given.rounds)),
            ],
            check=True,
        )


def work(megabytes: int, count: int, folder: Path) -> None:
    """Push and pull for a while; rank 0 prints what it took."""
    import torch

    import kvps

    names = [f"key{index}" for index in range(max(1, megabytes * 1_000_000 // (4 * KEY)))]
    kv = kvps.create("dist_sync", timeout=600)
    torch.manual_seed(kv.rank)
    values = [torch.randn(KEY) for _ in names]
    kv.set_optimizer("sgd", lr=1e-3)
    kv.init(names, values)
    out = [torch.empty(KEY) for _ in names]
    rounds: dict[bool, list[float]] = {True: [], False: []}
    writing: list[tuple[float, float]] = []
    """When each checkpoint was seen first and last without its manifest."""
    kv.pushpull(names, values, out=out)
    for _ in range(count):
        was_writing = is_writing(folder)
        begin = time.monotonic()
        kv.pushpull(names, values, out=out)
        took = time.monotonic() - begin
        rounds[was_writing or is_writing(folder)].append(took)
        if was_writing and writing and begin - writing[-1][1] < 2 * took:
            writing[-1] = (writing[-1][0], begin + took)
        elif was_writing:
            writing.append((begin, begin + took))
    if kv.rank == 0:
        usual, during = rounds[False], rounds[True]
        print(f"{len(names) * KEY * 4 / 1e9:.2f} GB, {kv.num_workers} workers")
        print(f"rounds without: {len(usual)}, median {statistics.median(usual):.3f} s")
        print(
            f"rounds during {len(writing)} checkpoints: {len(during)}, median "
            f"{statistics.median(during):.3f} s, slowest {max(during):.3f} s"
        )
        ratio = statistics.median(during) / statistics.median(usual)
        mean = statistics.mean(during) / statistics.mean(usual)
        print(f"ratio of medians {ratio:.2f}, of means {mean:.2f}")
        print("seen being written for", [round(b - a, 1) for a, b in writing], "s")


def is_writing(folder: Path) -> bool:
    """Whether a checkpoint is begun and not complete."""
    return any(not (cut / "manifest.json").exists() for cut in folder.glob("cut-*") if cut.is_dir())


if __name__ == "__main__":
    main()
