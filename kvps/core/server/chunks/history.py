"""The history of a chunk: compressed differences of its versions, and the rows that its last
versions changed.

What a round makes of the weights is written by a codec, and only what was written becomes the values that are
pulled; the *residual* stays here and goes into the next step. So every pull of a version gets the same values
to the bit, whether in full or as deltas, and nothing is lost::

    with an optimizer      weights = values + residual     step = codec(weights - values)
                                                       values += step
    without                sum     = sum + residual        step = codec(sum)
                                                       values  = step

A worker that has the values of some version needs only the steps since. A few are kept, as long as
together they are smaller than the values.

Change log
----------
Versions come one by one. One that changed more than some rows, by a dense gradient say, is not added, and
what came before it is of no use any more: from there on nothing is known, and a reader takes all. So nothing
has to be told here but what *was* by rows, and values that are set without a version
(:meth:`Chunk.forget_changes <kvps.core.server.chunks.slab.Chunk.forget_changes>`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvps.compression.codecs import decode, encode
from kvps.compression.spec import TABLE, CodecSpec, fits, seeded
from kvps.core.row_gradients import numbered

STEPS_MAX = 16
_KEPT = 0.5
"""Maximum bytes of steps that are kept, as a share of the bytes of the values."""

Step = tuple[CodecSpec, torch.Tensor]


@dataclass(slots=True)
class DeltaLog:
    """The last steps of one piece of a key."""

    size: int
    version: int
    """The version that the newest step led to."""
    adds: bool
    """Whether steps are added to the values; else the newest step is the values."""
    steps: deque[Step] = field(default_factory=deque)
    """Encoded steps, oldest first."""

    def lead(self, held: int) -> list[Step] | None:
        """Return the steps to the values from those of version ``held``; None if they are gone.

        From -1, which is none, only a step that does not add up leads anywhere.
        """
        if not self.adds:
            return [self.steps[-1]]
        missing = self.version - held
        if held < 0 or not 0 <= missing <= len(self.steps):
            return None
        return list(self.steps)[len(self.steps) - missing :]

    def check(self) -> None:
        """Assert the invariants."""
        assert 1 <= len(self.steps) <= (STEPS_MAX if self.adds else 1)


class CompressedHistory:
    """The compressed side of a chunk: residuals, and the last steps of each piece."""

    def __init__(self, capacity: int) -> None:
        self.residual = torch.zeros(capacity, dtype=torch.float32)
        """Difference of exact and published values, float32 [capacity]."""
        self.trails: dict[int, DeltaLog] = {}
        """Start of a piece -> its steps."""
        self._owing: set[int] = set()
        """Starts of pieces with a residual."""
        self._kept: torch.Tensor | None = None
        """The residuals that a snapshot refers to: they are not written to."""

    def own_residual(self) -> torch.Tensor:
        """Return the residuals for writing; a copy if a snapshot refers to them."""
        if self.residual is self._kept:
            self.residual = self.residual.clone()
        return self.residual

    def keep(self) -> Callable[[], None]:
        """Freeze the present residuals; return a function that releases them."""
        self._kept = self.residual

        def release() -> None:
            self._kept = None

        return release

    def forget(self, start: int, stop: int) -> None:
        """Drop the residuals and steps from ``start`` to ``stop``: the values there are new."""
        self.own_residual()[start:stop] = 0
        for begin in [piece for piece in self._owing if start <= piece < stop]:
            self._owing.remove(begin)
            self.trails.pop(begin, None)

    def settle(self, values: torch.Tensor, start: int, stop: int) -> None:
        """Add the residuals from ``start`` to ``stop`` to the values, and drop them."""
        values[start:stop] += self.residual[start:stop]
        self.forget(start, stop)

    def owes(self, start: int, stop: int) -> bool:
        """Return whether values from ``start`` to ``stop`` have residuals."""
        return any(start <= piece < stop for piece in self._owing)

    def revive(self, start: int, residual: torch.Tensor) -> None:
        """Restore the residual of the piece that begins at ``start``."""
        self.own_residual()[start : start + len(residual)] = residual
        self._owing.add(start)

    def publish(
        self, values: torch.Tensor, start: int, stop: int, version: int, code: CodecSpec | None, *, adds: bool
    ) -> None:
        """Move the values of one piece to ``version`` by what the codec can express of their residuals.

        Args:
            values: of the whole chunk, for writing.
            start, stop: where the piece lies.
            version: that its values will have.
            code: how to write the step; None to write it as it is. So is one that is not finite.
            adds: the step is added to the values; else it becomes them.
        """
        residual, target = self.own_residual()[start:stop], values[start:stop]
        if code is None or not torch.isfinite(residual.sum()):
            target.copy_(target + residual if adds else residual)
            residual.zero_()
            self.trails.pop(start, None)
            self._owing.discard(start)
            return
        self._owing.add(start)
        octets = encode(code, residual)
        step = decode(code, octets, torch.empty(stop - start, dtype=torch.float32))
        target.copy_(target + step if adds else step)
        trail = self.trails.get(start)
        if trail is None or trail.version != version - 1 or trail.adds is not adds:
            trail = self.trails[start] = DeltaLog(stop - start, version, adds)
        trail.version = version
        trail.steps.append((code, octets))
        self._trim(trail)

    def _trim(self, trail: DeltaLog) -> None:
        """Drop the oldest steps beyond the limits."""
        octets = sum([len(encoded) for _, encoded in trail.steps])
        most = STEPS_MAX if trail.adds else 1
        while len(trail.steps) > 1 and (len(trail.steps) > most or octets > _KEPT * 4 * trail.size):
            octets -= len(trail.steps.popleft()[1])

    def lead(self, start: int, size: int, version: int, held: int) -> list[Step] | None:
        """Return the steps from the values of ``held`` to those of ``version``; None if there are
        none that lead there."""
        trail = self.trails.get(start)
        if trail is None or (trail.size, trail.version) != (size, version):
            return None
        return trail.lead(held)

    def check(self) -> None:
        """Assert the invariants."""
        assert self.trails.keys() <= self._owing
        for trail in self.trails.values():
            trail.check()


def code_of(code: CodecSpec | None, version: int, lr: float | None) -> CodecSpec | None:
    """Return the codec of the step to ``version``; None for none.

    Args:
        code: what the pushes ask for.
        version: to which it leads.
        lr: the learning rate by which it was made, of which thresholds are multiples; None where a
            step is a gradient.
    """
    if code is None:
        return None
    if "threshold" in TABLE[code.codec].takes and lr is not None:
        code = code._replace(scale=abs(lr))
        return code if fits(code) else None
    return seeded(code, version)


VERSION_COUNT = 64
"""Overhead of remembering one version, in rows."""
LEAST_COUNT = 64 * VERSION_COUNT
"""Minimum size of a log, in rows, however small the piece."""


NONE = torch.empty(0, dtype=torch.int64)


class ChangeLog:
    """The rows in which each of the last versions of one piece differs from the one before.

    Example:
        >>> import torch
        >>> changes = ChangeLog(rows=8)
        >>> for version, row in ((4, 2), (5, 1), (6, 2)):
        ...     changes.add(version, torch.tensor([row]))
        >>> changes.since(4, now=6).tolist(), changes.since(2, now=6)
        ([1, 2], None)
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._newest = 0
        self._known: deque[torch.Tensor] = deque()
        self._count = 0

    def add(self, version: int, ids: torch.Tensor) -> None:
        """Remember that ``version`` differs from the one before in the rows ``ids``, and in no others."""
        if version != self._newest + 1:
            self._known.clear()
            self._count = 0
        self._newest = version
        self._known.append(ids if len(ids) else NONE)
        self._count += len(ids)
        most = max(self._rows // 2, LEAST_COUNT)
        while self._count + VERSION_COUNT * len(self._known) > most:
            self._count -= len(self._known.popleft())

    def since(self, version: int, now: int) -> torch.Tensor | None:
        """Return the rows that differ between two versions, ascending.

        None if that is not known, or they are more than half: then all may as well be read.
        """
        if version == now:
            return NONE
        if now != self._newest or not 0 < now - version <= len(self._known):
            return None
        newest = list(self._known)[version - now :]
        ids = newest[0] if len(newest) == 1 else numbered(torch.cat(newest), are_runs=True)[0]
        return ids if len(ids) <= self._rows // 2 else None

    def check(self) -> None:
        """Assert the invariants."""
        assert self._count == sum(map(len, self._known))
        assert self._count + VERSION_COUNT * len(self._known) <= max(self._rows // 2, LEAST_COUNT)
        assert len(self._known) <= self._newest
