"""The values that a worker was told last, of a store that rebuilds: payloads of answers, where they came."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from kvps.core.worker.plan import ChunkSlice, Numbers, Rows, TransferPlan, alike
from kvps.protocol.values import Run
from kvps.tensors import PRIVATE

AWAY = "away"
"""The route of values that are to be copied."""


class Held(NamedTuple):
    """The values of a share, as they were told last."""

    share: ChunkSlice
    broadcasts: int
    runs: tuple[Run, ...]
    """``number`` is their version."""
    frame: memoryview | torch.Tensor


class KeptValues:
    """The values that a worker was told last, of one store."""

    def __init__(self) -> None:
        self._held: dict[int, dict[tuple[tuple[int, int], ...], Held]] = {}
        """Chunk -> (start, size) of the elements -> their values."""

    def keep(self, held: Held) -> None:
        """Keep the values of a share in place of older ones."""
        there, at = self._held.setdefault(held.share.chunk, {}), tuple(held.share.blocks)
        if at not in there:
            for other in [other for other in there if _covers(at, other)]:
                del there[other]
        there[at] = held

    def of(self, server: int) -> Iterator[Held]:
        """Yield all that is kept of what lies on a server."""
        return (
            held for there in self._held.values() for held in there.values() if held.share.server == server
        )

    def versions(self, server: int) -> dict[tuple[int, int], int]:
        """Return the version of each piece on a server of which elements are kept, by its chunk and start."""
        found: dict[tuple[int, int], int] = {}
        for share, _, runs, _ in self.of(server):
            for start, _, _, _ in share.segments:
                version = next(number for at, size, number in runs if at <= start < at + size)
                place = share.chunk, start
                found[place] = max(version, found.get(place, 0))
        return found

    def keep_loaded(self, plan: TransferPlan, rows: Rows, versions: Numbers, broadcasts: int) -> None:
        """Keep a copy of what this rank loads itself: nobody tells it these values."""
        for share in plan.shares:
            (values,) = share.gather(rows, PRIVATE, AWAY)
            self.keep(Held(share, broadcasts, share.runs(alike(versions)), values))

    def clear(self) -> None:
        """Keep nothing of what is kept."""
        self._held.clear()


def _covers(blocks: Iterable[tuple[int, int]], others: Sequence[tuple[int, int]]) -> bool:
    return all(
        any(start <= at and at + size <= start + span for start, span in blocks) for at, size in others
    )
