"""The delta log: compressed differences of versions, encoded once and kept for pullers.

What a round makes of the weights is written by a codec, and only what was written becomes the
values that are pulled; the *rest* stays here and goes into the next step. So whoever pulls a
version gets the same values to the bit, whether as they are or by steps, and nothing is lost::

    with an optimizer      weights = values + rest     step = codec(weights - values)
                                                       values += step
    without                sum     = sum + rest        step = codec(sum)
                                                       values  = step

A worker that has the values of some version needs only the steps since. A few are kept, as long as
together they are smaller than the values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvps.compression.codecs import decode, encode
from kvps.compression.spec import BIT1, BIT2, RANDOMK, CodecSpec, fits, seeded

STEPS_MAX = 16
_KEPT = 0.5
"""How many bytes of steps are kept, in those of the values."""

Step = tuple[CodecSpec, torch.Tensor]


@dataclass(slots=True)
class DeltaLog:
    """The last steps of one piece of a key."""

    size: int
    version: int
    """To which the last one led."""
    adds: bool
    """They add up; else the last is the values."""
    steps: deque[Step] = field(default_factory=deque)
    """The oldest first."""

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
    """What a chunk knows of the way back: the rests, and the last steps of each piece."""

    def __init__(self, capacity: int) -> None:
        self.rest = torch.zeros(capacity)
        """What the values lack, of each element."""
        self.trails: dict[int, DeltaLog] = {}
        """By where a piece begins."""
        self._owing: set[int] = set()
        """Where pieces begin whose values lack something."""
        self._kept: torch.Tensor | None = None
        """The rests as an image has them: nobody writes to these."""

    def own_rest(self) -> torch.Tensor:
        """Return the rests for writing; a copy if an image has them."""
        if self.rest is self._kept:
            self.rest = self.rest.clone()
        return self.rest

    def keep(self) -> Callable[[], None]:
        """Let nobody write to the present rests until what is returned was called."""
        self._kept = self.rest

        def release() -> None:
            self._kept = None

        return release

    def forget(self, start: int, stop: int) -> None:
        """The values from ``start`` to ``stop`` are new: they lack nothing, and no step leads there."""
        self.own_rest()[start:stop] = 0
        for begin in [one for one in self._owing if start <= one < stop]:
            self._owing.remove(begin)
            self.trails.pop(begin, None)

    def settle(self, values: torch.Tensor, start: int, stop: int) -> None:
        """Let the values from ``start`` to ``stop`` lack nothing: add to them what they do."""
        values[start:stop] += self.rest[start:stop]
        self.forget(start, stop)

    def owes(self, start: int, stop: int) -> bool:
        """Whether values from ``start`` to ``stop`` lack something."""
        return any(start <= one < stop for one in self._owing)

    def revive(self, start: int, rest: torch.Tensor) -> None:
        """Let the values of a piece that begins at ``start`` lack this."""
        self.own_rest()[start : start + len(rest)] = rest
        self._owing.add(start)

    def publish(
        self,
        values: torch.Tensor,
        start: int,
        stop: int,
        version: int,
        code: CodecSpec | None,
        *,
        adds: bool,
    ) -> None:
        """Move the values of one piece to ``version`` by what can be written of their rests.

        Args:
            values: of the whole chunk, for writing.
            start, stop: where the piece lies.
            version: that its values will have.
            code: how to write the step; None to write it as it is. So is one that is not finite.
            adds: the step is added to the values; else it becomes them.
        """
        rest, target = self.own_rest()[start:stop], values[start:stop]
        if code is None or not torch.isfinite(rest.sum()):
            target.copy_(target + rest if adds else rest)
            rest.zero_()
            self.trails.pop(start, None)
            self._owing.discard(start)
            return
        self._owing.add(start)
        octets = encode(code, rest)
        step = decode(code, octets, torch.empty(stop - start))
        target.copy_(target + step if adds else step)
        trail = self.trails.get(start)
        if trail is None or trail.version != version - 1 or trail.adds is not adds:
            trail = self.trails[start] = DeltaLog(stop - start, version, adds)
        trail.version = version
        trail.steps.append((code, octets))
        self._trim(trail)

    def _trim(self, trail: DeltaLog) -> None:
        """Drop the oldest steps, as many as are too many."""
        octets = sum([len(one) for _, one in trail.steps])
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
    """Return how the step to ``version`` is written; None for as it is.

    Args:
        code: what the pushes ask for.
        version: to which it leads.
        lr: the learning rate by which it was made, of which thresholds are multiples; None where a
            step is a gradient.
    """
    if code is None:
        return None
    if code.codec in (BIT1, BIT2) and lr is not None:
        code = code._replace(scale=abs(lr))
        return code if fits(code) else None
    return seeded(code, version) if code.codec == RANDOMK else code
