"""A worker of a job that stands still, or seems to: ``kvps-launch -n 2 -s 2 -- python .../standstill_worker.py CASE``.

Each rank prints how its calls ended, and after how many seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import torch

import kvps
import kvps.torch

ONES = torch.ones(4)
BUSY_S = 12.0
"""Longer than it takes to tell those that stand still."""


def store() -> kvps.KVStore:
    kv = kvps.create("dist_sync", name="weights")
    kv.init(["v", "w"], [torch.zeros(4), torch.zeros(4)])
    kv.pushpull("w", ONES)
    return kv


def barrier() -> None:
    kv = store()
    if kv.rank == 0:
        kv.pushpull("w", ONES)
    else:
        kv.barrier()


def keys() -> None:
    kv = store()
    handle = kv.pushpull("w" if kv.rank else "v", ONES, async_op=True)
    handle.wait()


def wrapped_on_rank_0() -> None:
    """The other rank counts its batches by a barrier."""
    kv = store()
    model = torch.nn.Linear(2, 1)
    if kv.rank == 0:
        kvps.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    else:
        kv.barrier()


def frozen_later() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    kv = kvps.create("dist_sync")
    own = kvps.Trainer(model, "sgd", {"lr": 0.1}, kvstore=kv)
    for step in range(3):
        if step == 2 and kv.rank == 1:
            model[0].requires_grad_(requires_grad=False)
        model.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        own.step(4)
    kv.barrier()


def group() -> None:
    """A push on one rank, and a collective of a process group on the other."""
    torch.distributed.init_process_group("kvps")
    kv = store()
    torch.distributed.all_reduce(torch.ones(4))
    if kv.rank == 0:
        kv.pushpull("w", ONES)
    torch.distributed.all_reduce(torch.ones(4))
    kv.pushpull("w", ONES)


def replaced() -> None:
    """Rank 1 dies once, and its replacement makes a step less than rank 0."""
    kv = kvps.create("dist_sync", name="weights")
    kv.init("w", torch.zeros(4))
    start = kv.resume("w")
    for step in range(start, 5 - kv.rank):
        if step == 2 and kv.rank == 1 and not start:
            os.kill(os.getpid(), signal.SIGKILL)
        kv.pushpull("w", ONES)
    kv.barrier()


def helper() -> None:
    """The main threads wait for a thread that has made no call yet."""
    kv = store()
    if kv.rank == 0:
        kv.pushpull("w", ONES)
    else:
        threading.Thread(target=lambda: (time.sleep(BUSY_S), kv.pushpull("w", ONES))).start()
    kv.barrier()


def main() -> None:
    case = globals()[sys.argv[1]]
    began = time.monotonic()
    try:
        case()
    except kvps.errors.KvpsError as error:
        said = f"{type(error).__name__} after {time.monotonic() - began:.0f} s: {error}"
    else:
        said = "well"
    print(said, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
