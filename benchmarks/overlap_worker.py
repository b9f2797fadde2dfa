"""One worker of overlap.py: trains layers that wait, and reports what worker 0 saw.

Arguments: the way, steps that are timed, seconds of forward and of backward in a step, seconds between two
looks at the link, and the file for the report.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from kvps.tools.bench.workloads import resnet50

BEGUN = time.perf_counter()
LINK = Path("/sys/class/net/eth0/statistics")


def now() -> float:
    """Return the seconds since this process began."""
    return time.perf_counter() - BEGUN


class Accelerator:
    """Waits as long as one would compute.

    It does not stand still while Python gets from one layer to the next, so its clock goes on from where
    the layer before ended, unless Python had something else to wait for.
    """

    GAP_S = 0.02

    def __init__(self) -> None:
        self._idle_at = 0.0
        self.spans: list[tuple[str, float, float]] = []
        """What was computed, from when to when."""

    def compute(self, what: str, seconds: float) -> None:
        """Be busy for so long."""
        begin = self._idle_at if now() - self._idle_at < self.GAP_S else now()
        self._idle_at = begin + seconds
        time.sleep(max(0.0, self._idle_at - now()))
        self.spans.append((what, begin, self._idle_at))


ACCELERATOR = Accelerator()


class Computed(torch.autograd.Function):
    """A layer that takes its time, and whose gradient is known before."""

    @staticmethod
    def forward(context: Any, x: Any, weight: Any, gradient: Any, waits: Any) -> Any:
        """Wait."""
        context.save_for_backward(gradient)
        context.backward_s = waits[1]
        ACCELERATOR.compute("forward", waits[0])
        return x.clone()

    @staticmethod
    def backward(context: Any, x: Any) -> Any:
        """Wait, and hand over the gradient."""
        ACCELERATOR.compute("backward", context.backward_s)
        return x, context.saved_tensors[0].clone(), None, None


class Layer(torch.nn.Module):
    """One array of the model."""

    def __init__(self, shape: tuple[int, ...], forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(shape))
        self.gradient = torch.randn(shape)
        self.waits = forward_s, backward_s

    def forward(self, x: torch.Tensor) -> Any:
        """Return ``x``, later."""
        return Computed.apply(x, self.weight, self.gradient, self.waits)  # type: ignore[no-untyped-call]


def trained(way: str, model: torch.nn.Module) -> tuple[Any, Any]:
    """Return what is called, and what makes a step."""
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if way == "ddp gloo":
        torch.distributed.init_process_group("gloo")
        return torch.nn.parallel.DistributedDataParallel(model), sgd.step
    import kvps.torch

    if way == "kvps, no overlap":
        trainer = kvps.Trainer(model, sgd, kvstore="dist_sync", update_on_kvstore=False)
        return model, lambda: trainer.step(trainer_batch())
    ahead = way == "kvps, forward too"
    return model, kvps.torch.DistributedOptimizer(sgd, model, overlap_forward=ahead).step


def trainer_batch() -> int:
    """Return by what the Trainer divides sums of means."""
    return int(os.environ["WORLD_SIZE"])


def watch(traffic: list[list[float]], is_over: threading.Event, every_s: float) -> None:
    """Note the time, and the bytes that this host has sent and received."""
    with (LINK / "tx_bytes").open() as sent, (LINK / "rx_bytes").open() as received:
        while not is_over.wait(every_s):
            row = [now()]
            for file in (sent, received):
                file.seek(0)
                row.append(int(file.read()))
            traffic.append(row)


def main(way: str, steps: int, forward_s: float, backward_s: float, every_s: float) -> Any:
    """Train; return what worker 0 saw."""
    shapes = resnet50()
    each = forward_s / len(shapes), backward_s / len(shapes)
    model = torch.nn.Sequential(*(Layer(shape, *each) for shape in shapes))
    called, step = trained(way, model)
    traffic: list[list[float]] = []
    is_over = threading.Event()
    ends: list[float] = []
    for number in range(steps + 2):  # the first is not timed, and the last only shows how it goes on
        if number == steps:
            threading.Thread(target=watch, args=(traffic, is_over, every_s), daemon=True).start()
        model.zero_grad()
        called(torch.ones(1, requires_grad=True)).sum().backward()
        step()
        ends.append(now())
    is_over.set()
    if way == "ddp gloo":
        torch.distributed.barrier()
    times = [after - before for before, after in pairwise(ends)][:-1]
    last = ends[-3], ends[-2]
    return {"times": times, "spans": ACCELERATOR.spans, "traffic": traffic, "step": last}


if __name__ == "__main__":
    way, steps, *seconds, report = sys.argv[1:]
    seen = main(way, int(steps), *map(float, seconds))
    if os.environ["RANK"] == "0":
        Path(report).write_text(json.dumps(seen))
