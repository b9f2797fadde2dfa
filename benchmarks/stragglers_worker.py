"""One worker of stragglers.py: trains the digits ConvNet with timed waits, and reports what it did.

Arguments: the way, who is slow (one, random), seconds, the wait of a step in seconds, how many times longer a
slow one takes, and the folder for the report.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from digits import ConvNet, accuracy, load

BATCH = 16
LOOK_EVERY_S = 0.5
RATES = {"ddp gloo": 3e-3, "dist_sync": 3e-3, "dist_ssp": 1e-3, "dist_async": 1e-3}
"""Adam's; where each push counts by itself, four of them make as large a step as one mean."""


def main(way: str, slow: str, seconds: float, wait_s: float, times: float) -> Any:
    """Train for so long; return steps, seconds, and rank 0's accuracy over time."""
    torch.set_num_threads(1)
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = ConvNet()
    adam = torch.optim.Adam(model.parameters(), lr=RATES[way])
    called: Any = model
    kv: Any = None
    if way == "ddp gloo":
        torch.distributed.init_process_group("gloo")
        called, optimizer = torch.nn.parallel.DistributedDataParallel(model), adam
    else:
        import kvps
        from kvps.torch import DistributedOptimizer

        kv = kvps.create(way, average=way == "dist_sync", **({"staleness": 4} if way == "dist_ssp" else {}))
        optimizer = DistributedOptimizer(adam, model, kv, update_on_kvstore=True)
    data, unseen = load()
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, workers, rank))
    dice = torch.Generator().manual_seed(100 + rank)
    if kv is None:
        torch.distributed.barrier()
    else:
        kv.barrier()
    begin = look_at = time.perf_counter()
    steps, curve = 0, []
    over = torch.zeros(1)
    for images, labels in itertools.chain.from_iterable(itertools.repeat(loader)):
        is_slow = rank == workers - 1 if slow == "one" else torch.rand(1, generator=dice).item() < 0.1
        time.sleep(wait_s * (times if is_slow else 1.0))
        optimizer.zero_grad()
        F.cross_entropy(called(images), labels).backward()
        optimizer.step()
        steps += 1
        now = time.perf_counter() - begin
        if rank == 0 and now >= look_at - begin:
            curve.append((now, accuracy(model, unseen)))
            look_at += LOOK_EVERY_S
        over[0] = now >= seconds
        if kv is None and steps % 10 == 0:  # all ranks stop behind the same step
            torch.distributed.all_reduce(over)
        if over and (kv is not None or steps % 10 == 0):
            break
    elapsed = time.perf_counter() - begin
    if kv is not None:
        kvps.shutdown()
    return {"steps": steps, "seconds": elapsed, "curve": curve}


if __name__ == "__main__":
    way, slow, seconds, wait_s, times, folder = sys.argv[1:]
    seen = main(way, slow, float(seconds), float(wait_s), float(times))
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(seen))
