"""The gate of local steps: a pseudo-gradient far longer than the others' counts little, or not at all.

A worker whose data, memory or learning rate is broken may push a pseudo-gradient a thousand times longer than
the others', and a single push of that kind ruins the weights of all. So each worker tells its norm before it
pushes, and compares it with the median of those that most workers have told for this merge: no minority can
move the median far. A gate lets a pseudo-gradient count or not. A penalty multiplies its weight in the
mean by the square of the median over its norm.

The norms are in a table without rounds (:class:`kvps.torch.local_steps.pace.Reports`), which has for each
fragment the number of the merge and the norm. A worker that is lost is not waited for, and a replacement
tells again what its predecessor has told.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Sequence

import torch

from kvps.errors import ConfigError, Timeout
from kvps.store.options import StoreOptions
from kvps.torch.local_steps.pace import Reports

log = logging.getLogger("kvps")

SHARE = 1e-6
"""The weight of a push that does not count, in parts of the usual weight; a mean needs weights above 0."""
LONGEST = 1000.0
"""The gate's factor where a penalty is all that was asked for: there its weight is :data:`SHARE`."""
LOOK_S = 0.02
"""Seconds between two looks at the table while others have not come to this merge."""


class Gate:
    """The norms of all workers' pseudo-gradients.

    Args:
        owner: the front end.
        options: of the front end's stores.
        factor: times the median from which a norm is too large.
        fragments: their number.
        is_penal: a norm above the median lowers the weight.

    Attributes:
        closed: how often this worker's pseudo-gradient did not count.
        share: the part of its weight by which this worker's pseudo-gradient counted when a fragment last
            left; 0 if it did not count.
    """

    def __init__(
        self, owner: str, options: StoreOptions, factor: float, fragments: int, *, is_penal: bool = False
    ) -> None:
        self._factor, self._timeout_s, self._is_penal = factor, options.timeout_s, is_penal
        self._reports = Reports(f"{owner}.gate", options, 2 * fragments)
        self._merges = [0] * fragments
        self.closed, self.share = 0, 1.0
        self.close = self._reports.close

    def begin(self, merges: Sequence[int]) -> None:
        """Begin with these merges of each fragment made."""
        self._merges = list(merges)

    def leave(self) -> None:
        """Let the others no longer wait for this worker, which makes no more merges."""
        own = self._reports.table[self._reports.rank]
        own[0::2] = math.inf
        self._reports.send(own.tolist())
        self._reports.wait()

    def share_of(self, fragment: int, values: Sequence[torch.Tensor]) -> float:
        """Tell the norm of a fragment that is to leave; return the part of its weight by which it counts.

        Raises:
            Timeout: if too few workers came to this merge.
        """
        norm = math.hypot(*[float(torch.linalg.vector_norm(value, dtype=torch.float64)) for value in values])
        until = time.monotonic() + self._timeout_s
        merge, rollbacks = self._merges[fragment] + 1, self._reports.rollbacks
        table = self._reports.table
        while True:
            own = table[self._reports.rank].tolist()
            own[2 * fragment : 2 * fragment + 2] = merge, norm
            self._reports.send(own)
            self._reports.wait()
            if self._reports.rollbacks != rollbacks:  # the push is told of it, too, and begins the turn again
                return 1.0
            here = table[table[:, 2 * fragment] >= merge]
            if len(here) > (len(table) - self._reports.lost()) // 2:
                break
            if time.monotonic() > until:
                raise Timeout(
                    f"{len(here)} of {len(table)} workers came to merge {merge} of fragment {fragment} in "
                    f"{self._timeout_s:g} s, and the gate needs more than half. Nothing was pushed; the "
                    "fragment is due again after the next step"
                )
            time.sleep(LOOK_S)
        told = here[here[:, 2 * fragment] < math.inf]  # without those that have left
        median = statistics.median_low(told[:, 2 * fragment + 1].tolist())
        is_shut = norm > self._factor * median
        self.share = 0.0 if is_shut else 1.0
        if self._is_penal and median < norm <= self._factor * median:
            self.share = (median / norm) ** 2
        self.closed += is_shut
        if is_shut:
            log.warning(
                "rank %d: the pseudo-gradient of fragment %d has norm %.3g, over %g times the median %.3g: "
                "it does not count, and this worker takes the others' weights. Check its data, its loss and "
                "its learning rate",
                self._reports.rank,
                fragment,
                norm,
                self._factor,
                median,
            )
        return self.share

    def left(self, fragment: int) -> None:
        """Note that a fragment has left."""
        self._merges[fragment] += 1


def counted(share: float, values: list[torch.Tensor], weight: float) -> tuple[list[torch.Tensor], float]:
    """Return what a worker gives to a mean, and its weight, if it counts by a ``share`` of its weight."""
    return (values, share * weight) if share else (list(map(torch.zeros_like, values)), SHARE * weight)


def factor_of(gate: object, penalty: bool, quorum: object, *, is_mean: bool) -> float | None:
    """Return the factor of a gate; None for neither gate nor penalty.

    Raises:
        ConfigError: if the gate is no number above 1, or not all workers take part in a mean.
    """
    if gate is None and not penalty:
        return None
    factor: object = LONGEST if gate is None else gate
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 1:
        raise ConfigError(f"gate={gate!r:.40}: use a number above 1, or None")
    if not is_mean or quorum is not None:
        raise ConfigError(
            f"{'penalty' if gate is None else 'gate'}= needs mode='sync' and late='drop', without quorum=: "
            "all workers come to a merge, of which servers compute the mean"
        )
    return float(factor)
