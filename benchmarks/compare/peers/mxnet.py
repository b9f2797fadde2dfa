"""One worker of MXNet's ``dist_sync`` KVStore: the contract that kvps has, measured beside it.

Runs in MXNet's own interpreter, whose numpy is old and which has no torch. Its servers and its
scheduler are the same interpreter importing mxnet: they never return from that.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import mxnet as mx
import numpy as np

from kvps.tools.bench import rounds
from kvps.tools.bench.rounds import Row
from kvps.tools.bench.workloads import Shapes


class MxNet:
    """Pushes from arrays of MXNet and pulls into others."""

    def __init__(self, shapes: Shapes, rule: str) -> None:
        self._kv = mx.kv.create("dist_sync")
        self.rank: int = self._kv.rank
        self.workers: int = self._kv.num_workers
        self._shapes = shapes
        self._keys = [str(number) for number in range(len(shapes))]
        self._rows = [np.empty(int(np.prod(shape)), np.float32) for shape in shapes]
        self._gradients = [mx.nd.empty(shape) for shape in shapes]
        self._outs = [mx.nd.empty(shape) for shape in shapes]
        if rule == "sgd":
            sgd = mx.optimizer.SGD(learning_rate=rounds.LR, momentum=rounds.MOMENTUM)
            self._kv.set_optimizer(sgd)
        rounds.spread(rounds.first_weights(), self._rows)
        self._take()
        self._kv.init(self._keys, self._gradients)

    def gradients(self) -> Sequence[Row]:
        """Return rows that :meth:`ready` copies into MXNet's arrays."""
        return self._rows

    def ready(self) -> None:
        """Copy the gradients into MXNet's arrays and wait for all workers."""
        self._take()
        self._kv._barrier()

    def step(self) -> None:
        """Push, pull, and wait for MXNet's engine."""
        self._kv.push(self._keys, self._gradients)
        self._kv.pull(self._keys, out=self._outs)
        mx.nd.waitall()

    def results(self) -> Sequence[Row]:
        """Return copies of the outputs."""
        return [out.asnumpy().reshape(-1) for out in self._outs]

    def close(self) -> None:
        """MXNet leaves when the process ends."""

    def _take(self) -> None:
        for gradient, row, shape in zip(self._gradients, self._rows, self._shapes, strict=True):
            gradient[:] = row.reshape(shape)
        mx.nd.waitall()


def make(shapes: Shapes, how: str, rule: str) -> rounds.SystemUnderTest:
    """Return a worker; there is one way to push and pull."""
    return MxNet(shapes, rule)


if __name__ == "__main__":
    rounds.main(make, sys.argv[1:])
