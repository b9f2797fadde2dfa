"""The files of kvps that one push and one pull pass, on the worker and on the server.

A store of one worker and one server in this process pushes a gradient of one key and pulls its weights, after
a few rounds of the same that are not counted. Every function that runs meanwhile, in any thread,
is traced. This is done several times, and a function counts that ran each time: so beats and other
timers do not.

    python benchmarks/path.py
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

import torch

import kvps

ROOT = Path(kvps.__file__).parent
TRACES = 5


def main() -> None:
    """Print the files, and how many functions of each ran."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    traces: list[set[tuple[str, str]]] = []
    is_counting = False

    def trace(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if is_counting and event == "call" and code.co_filename.startswith(str(ROOT)):
            traces[-1].add((code.co_filename, code.co_qualname))

    threading.setprofile(trace)
    with kvps.LocalCluster(workers=1, servers=1), kvps.create("dist_sync") as kv:
        weight, gradient = torch.zeros(1000), torch.randn(1000)
        kv.init("w", weight)
        kv.set_optimizer("sgd", lr=0.1)
        for _ in range(3):
            kv.push("w", gradient)
            kv.pull("w", out=weight)
        kv.barrier()
        sys.setprofile(trace)
        for _ in range(TRACES):
            traces.append(set())
            is_counting = True
            kv.push("w", gradient)
            kv.pull("w", out=weight)
            is_counting = False
        sys.setprofile(None)
    threading.setprofile(None)
    passed = set.intersection(*traces)
    files = Counter(str(Path(name).relative_to(ROOT)) for name, _ in passed)
    for name in sorted(files):
        print(f"{files[name]:4}  {name}")
    print(f"{len(files)} files, {len(passed)} functions")


if __name__ == "__main__":
    main()
