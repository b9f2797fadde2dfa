"""One worker of kvps under measurement, and how it pushes and pulls.

``copy`` takes gradients from the caller's tensors and writes results into others, in one round
trip; so does any codec, by which both are compressed. ``in-place`` writes gradients where the store
sends them from and reads results where they lie; ``in-place-pushpull`` does so in one call. Run by
``kvps bench``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

import kvps
from kvps.tools.bench import rounds
from kvps.tools.bench.rounds import Row
from kvps.tools.bench.workloads import Shapes


class _Worker:
    """The common part: a worker of a store that has all keys."""

    def __init__(self, shapes: Shapes, rule: str) -> None:
        self._kv = opened(shapes, rule)
        self.rank: int = self._kv.rank
        self.workers: int = self._kv.num_workers
        self._keys = list(range(len(shapes)))

    def ready(self) -> None:
        """Wait for all workers."""
        self._kv.barrier()

    def close(self) -> None:
        """Close the store."""
        self._kv.close()


class Copying(_Worker):
    """Pushes from tensors of its own and pulls into others."""

    def __init__(self, shapes: Shapes, rule: str, codec: str = "none") -> None:
        super().__init__(shapes, rule)
        if codec != "none":
            self._kv.set_gradient_compression(
                {"rules": [{"pattern": "*", "type": codec, "pull": True, "min_bytes": 0}]}
            )
        self._gradients = [torch.empty(shape) for shape in shapes]
        self._outs = [torch.empty(shape) for shape in shapes]
        self._rows = rows_of(self._gradients)

    def gradients(self) -> Sequence[Row]:
        """Return the gradients as rows."""
        return self._rows

    def step(self) -> None:
        """Push and pull in one call."""
        self._kv.pushpull(self._keys, self._gradients, out=self._outs)

    def results(self) -> Sequence[Row]:
        """Return the outputs as rows."""
        return rows_of(self._outs)


class InPlace(_Worker):
    """Pushes from the store's own memory and reads the pulled values there."""

    def __init__(self, shapes: Shapes, rule: str, *, in_one_call: bool = False) -> None:
        self._in_one_call = in_one_call
        super().__init__(shapes, rule)
        self._gradients = self._kv.empty_like(self._keys)
        self._results: Sequence[torch.Tensor] = ()

    def gradients(self) -> Sequence[Row]:
        """Return the store's memory as rows."""
        return rows_of(self._gradients)

    def ready(self) -> None:
        """Release the values that were read, as a training step does, and wait for all workers."""
        self._results = ()
        super().ready()

    def step(self) -> None:
        """Push and pull without a copy."""
        if self._in_one_call:
            self._results = self._kv.pushpull(self._keys, self._gradients, copy=False)
            return
        self._kv.push(self._keys, self._gradients)
        self._results = self._kv.pull(self._keys, copy=False)

    def results(self) -> Sequence[Row]:
        """Return the values where they lie, as rows."""
        return rows_of(self._results)

    def close(self) -> None:
        """Close the store."""
        self._results = ()
        super().close()


def opened(shapes: Shapes, rule: str) -> Any:
    """Return a store with all keys at their first weights."""
    torch.set_num_threads(1)
    kv = kvps.create("dist_sync")
    if rule == "sgd":
        kv.set_optimizer("sgd", lr=rounds.LR, momentum=rounds.MOMENTUM)
    weights = [torch.empty(shape) for shape in shapes]
    rounds.spread(rounds.first_weights(), rows_of(weights))
    kv.init(list(range(len(shapes))), weights)
    return kv


def rows_of(tensors: Sequence[torch.Tensor]) -> list[Row]:
    """Return tensors as flat rows of numpy, in the same memory."""
    return [tensor.view(-1).numpy() for tensor in tensors]


def make(shapes: Shapes, how: str, rule: str) -> rounds.SystemUnderTest:
    """Return the worker that pushes and pulls as ``how`` says."""
    if how.startswith("in-place"):
        return InPlace(shapes, rule, in_one_call=how == "in-place-pushpull")
    return Copying(shapes, rule, "none" if how == "copy" else how)


if __name__ == "__main__":
    rounds.main(make, sys.argv[1:])
