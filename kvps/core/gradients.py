"""Dense gradients: neighbouring elements, in one piece of memory or several, and their sums.

A gradient that came in a frame is one piece. One that is lent lies where its sender's tensors lie:
several pieces, one for each run of tensors that happen to be neighbours in memory, too. What is
done with gradients (:class:`GradientSum`) goes from edge to edge.

A gradient of a table may also be :class:`~kvps.core.row_gradients.RowGradient`. A sum of such ones
alone stays so; a sum of both kinds is taken as if all were dense.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, repeat

import numpy as np
import torch

from kvps.core.row_gradients import RowGradient, added
from kvps.dtypes import BY_ID
from kvps.tensors import NAMES, SMALL_BYTES, TORCH, accumulator, from_frame

HALF = torch.float16, torch.bfloat16
_new = object.__new__


class DenseGradient:
    """Flat tensors of one type, end to end. They are only read."""

    __slots__ = ("_pieces", "dtype", "edges", "frame", "is_lent", "may_be_sum")
    kind = 0
    """Its place in a sum: behind what is added up already, and before row gradients."""

    def __init__(
        self, pieces: Sequence[torch.Tensor], dtype: torch.dtype | None = None, *, is_lent: bool = False
    ) -> None:
        self._pieces = tuple(pieces)
        self.is_lent = is_lent
        """It is its sender's memory, and must not be written to."""
        self.frame: memoryview | None = None
        """All elements, if they are few and no halves, and nobody has asked for tensors of them."""
        self.dtype = dtype or self._pieces[0].dtype
        """The type of its elements."""
        self.edges = tuple(accumulate(map(torch.Tensor.numel, pieces)))
        """The element at which each piece ends."""
        self.may_be_sum = not is_lent and len(self.edges) == 1 and self.dtype not in HALF
        """It can become a sum where it lies: in one piece, of the type in which sums are taken."""

    @classmethod
    def of(cls, payload: Sequence[memoryview], dtype: int, *, is_lent: bool = False) -> DenseGradient:
        """Return the elements that came in ``payload``: one frame, or loans of several places."""
        kind, frame = BY_ID[dtype], payload[0]
        if len(payload) > 1 or kind.kind == "half" or not 0 < frame.nbytes <= SMALL_BYTES:
            return cls([*map(from_frame, payload, repeat(kind.name))], is_lent=is_lent)
        made = _new(cls)
        made.frame, made._pieces, made.dtype = frame, (), TORCH[kind.name]
        made.edges, made.is_lent, made.may_be_sum = (frame.nbytes // kind.itemsize,), is_lent, not is_lent
        return made

    @property
    def pieces(self) -> tuple[torch.Tensor, ...]:
        """The tensors. They may be a copy of the frame, and may be written to."""
        if self.frame is not None:
            self._pieces, self.frame = (from_frame(self.frame, NAMES[self.dtype]),), None
        return self._pieces

    def __len__(self) -> int:
        return self.edges[-1]

    def within(self, start: int, stop: int) -> torch.Tensor:
        """Return the elements from ``start`` to ``stop``, which lie in one piece."""
        index = bisect_right(self.edges, start)
        piece = self.pieces[index]
        begin = self.edges[index - 1] if index else 0
        if start == begin and stop == self.edges[index]:
            return piece
        return piece[start - begin : stop - begin]

    def part(self, start: int, stop: int) -> DenseGradient:
        """Return the elements from ``start`` to ``stop`` as a gradient."""
        if start == 0 and stop == self.edges[-1]:
            return self
        edges = [start, *[edge for edge in self.edges if start < edge < stop], stop]
        return DenseGradient([self.within(*ends) for ends in pairwise(edges)], is_lent=self.is_lent)

    def joined(self) -> torch.Tensor:
        """Return all elements in one piece; a copy if there were several."""
        return self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces)


Part = DenseGradient | RowGradient
"""A gradient: all of its elements, or some rows."""


@dataclass(slots=True)
class GradientSum:
    """Gradients that are to be added up, in this order, and divided by a number if it is not 1.

    Dense gradients come before row gradients.
    """

    parts: tuple[Part, ...]
    divisor: float = 1

    @property
    def is_sparse(self) -> bool:
        """Whether every part has only some of its rows."""
        return isinstance(self.parts[0], RowGradient)

    def gathered(self) -> RowGradient:
        """Return a sparse sum as one row gradient, in memory of its own."""
        return added([part for part in self.parts if isinstance(part, RowGradient)], self.divisor)

    def __len__(self) -> int:
        return len(self.parts[0])

    def read(self, scratch: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return the sum of the elements from ``start`` to ``stop``, which are not written to."""
        part = self.parts[0]
        if isinstance(part, RowGradient) or len(self.parts) > 1 or self.divisor != 1:
            return self.block(scratch, start, stop)
        is_there = len(part.edges) == 1 and part.dtype == scratch.dtype
        return part.within(start, stop) if is_there else self.block(scratch, start, stop)

    def block(self, scratch: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return the sum of the elements from ``start`` to ``stop``, which may be overwritten."""
        out = scratch[: stop - start]
        self.into(out, start, stop)
        return out

    def into(self, out: torch.Tensor, start: int, stop: int) -> None:
        """Write the sum of the elements from ``start`` to ``stop`` into ``out``.

        ``out`` is of the type that sums are taken in.
        """
        dense, rows, edges = [], [], {stop}
        for part in self.parts:
            if isinstance(part, RowGradient):
                rows.append(part)
                continue
            dense.append(part)
            if len(part.edges) > 1:
                edges.update([edge for edge in part.edges if start < edge < stop])
        begin = start
        for end in sorted(edges):
            pieces = [*map(DenseGradient.within, dense, repeat(begin), repeat(end))]
            _add(pieces, out if end - begin == stop - start else out[begin - start : end - start])
            begin = end
        for part in rows:
            part.add_to(out, start, stop)
        if self.divisor != 1:
            out.div_(self.divisor)

    def into_frame(self, out: memoryview, dtype: str) -> bool:
        """Write the sum into ``out``, of type ``dtype``; return whether it was: it is small, and no mean."""
        if self.divisor != 1:
            return False
        frames: list[memoryview] = []
        for part in self.parts:
            frame = None if isinstance(part, RowGradient) else part.frame
            if frame is None or frame.nbytes != out.nbytes or TORCH[dtype] != part.dtype:
                return False
            frames.append(frame)
        if len(frames) == 1:
            out[:] = frames[0]
            return True
        total = np.frombuffer(out, dtype)
        np.add(np.frombuffer(frames[0], dtype), np.frombuffer(frames[1], dtype), out=total)
        for frame in frames[2:]:
            np.add(total, np.frombuffer(frame, dtype), out=total)
        return True

    def new(self) -> torch.Tensor:
        """Return memory for the sum."""
        return accumulator(torch.empty(0, dtype=self.parts[0].dtype)).new_empty(len(self))

    def whole(self) -> torch.Tensor:
        """Return the sum in memory of its own."""
        out = self.new()
        self.into(out, 0, len(self))
        return out

    def cut(self, at: int) -> tuple[GradientSum, GradientSum]:
        """Return the sums of the elements before ``at``, and from there on."""
        left = tuple([part.part(0, at) for part in self.parts])
        right = tuple([part.part(at, len(part)) for part in self.parts])
        return replace(self, parts=left), replace(self, parts=right)


class OwnSum(GradientSum):
    """A sum that is computed already: one part, in memory that may be overwritten."""

    __slots__ = ()

    def block(self, scratch: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return the elements from ``start`` to ``stop`` where they lie."""
        part = self.parts[0]
        assert isinstance(part, DenseGradient)
        return part.within(start, stop)


def _add(parts: list[torch.Tensor], out: torch.Tensor) -> None:
    if not parts:
        out.zero_()
        return
    first, *others = parts
    if others and first.dtype == others[0].dtype == out.dtype:
        torch.add(first, others.pop(0), out=out)
    else:
        out.copy_(first)
    for part in others:
        out.add_(part)
