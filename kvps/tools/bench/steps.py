"""The steps of a training script that knows nothing of this module: the hooks of torch's optimizers
time them, and count gradients.

Run as ``python -m kvps.tools.bench.steps STEPS REPORT SCRIPT [ARG ...]``; the script ends after so many.
"""

from __future__ import annotations

import json
import runpy
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from kvps.runtime import device

WARM_UP = 2
"""Steps that do not count: the first ones allocate and compile."""


class Watch:
    """Notes when steps end, and when their gradients come up.

    Args:
        steps: those to time.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._optimizer: Any = None
        self._ends: list[float] = []
        self._first: float | None = None
        """When the first gradient of this step was ready."""
        self._backward: list[float] = []
        self._params: list[torch.Tensor] = []

    def on_step(self, optimizer: Any, *_: object) -> None:
        """Note that a step has ended.

        Raises:
            SystemExit: if it was the last one that counts.
        """
        if self._optimizer is None:
            self._optimizer = optimizer
            self._params = [
                param for group in optimizer.param_groups for param in group["params"] if param.requires_grad
            ]
            for param in self._params:
                register: Any = param.register_post_accumulate_grad_hook
                register(self._on_gradient)
        if optimizer is not self._optimizer:  # another one, as of a GAN: its steps are part of those
            return
        device.settle(self._params[0].device)
        self._ends.append(time.perf_counter())
        if self._first is not None:
            self._backward.append(self._ends[-1] - self._first)
            self._first = None
        if len(self._ends) > WARM_UP + self._steps:
            raise SystemExit(0)

    def _on_gradient(self, _: torch.Tensor) -> None:
        if self._first is None:
            self._first = time.perf_counter()

    def report(self) -> dict[str, float]:
        """Return what was seen.

        Raises:
            SystemExit: if there were too few steps.
        """
        ends = self._ends[WARM_UP:]
        if len(ends) < 2:
            raise SystemExit(
                f"the script made {len(self._ends)} steps of a torch optimizer; {WARM_UP + 2} are needed"
            )
        gaps = [after - before for before, after in pairwise(ends)]
        step_s = statistics.median(gaps)
        backward_s = statistics.median(self._backward[WARM_UP:] or [0.0])
        return {
            "step_s": step_s,
            "backward": min(1.0, backward_s / step_s),
            "model_bytes": sum([4 * param.numel() for param in self._params]),
            "arrays": len(self._params),
        }


def main(steps: str, report: str, script: str, *argv: str) -> None:
    """Run the script, and write the report."""
    watch = Watch(int(steps))
    register_optimizer_step_post_hook(watch.on_step)
    sys.argv = [script, *argv]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    Path(report).write_text(json.dumps(watch.report()))


if __name__ == "__main__":
    main(*sys.argv[1:])
