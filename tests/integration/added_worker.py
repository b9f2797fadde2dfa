"""A training script for workers that come and go. Each of its pushes adds a one in the digits of its worker.

    kvps-worker -- python tests/integration/added_worker.py NAME STEPS POLICY FOLDER

It pushes so often, or until FOLDER has a file ``last`` or ``NAME-leaves`` if STEPS is 0, and prints how often, and
the value that it saw last.
A worker that is to ``die`` makes three steps and is killed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

import kvps

DIGITS = 10**5


def main(name: str, steps: int, policy: str, folder: Path) -> None:
    """Train."""
    kv = kvps.create("dist_sync", on_worker_lost=policy, bigarray_bound=1000, timeout=60.0)
    value = torch.zeros(3000, dtype=torch.int64)
    kv.init("w", value)
    kv.set_optimizer("test")
    begun = kv.resume(["w"])
    (folder / f"{name}-here").touch()
    item, made = torch.full_like(value, DIGITS ** ("first", "second", "third", "fourth").index(name)), 0
    ends = (folder / "last", folder / f"{name}-leaves")
    while made < steps or (steps == 0 and not any(end.exists() for end in ends)):
        kv.pushpull("w", item, out=value)
        made += 1
        if made == 20:
            (folder / f"{name}-trains").touch()
        if made == 3 and (folder / f"{name}-dies").exists():
            (folder / f"{name}-dies").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    assert len(value.unique()) == 1, value
    print(  # noqa: T201
        f"{name} is rank {kv.rank} of {kv.num_workers}, began at {begun}, made {made}, saw {value[0]}",
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
