"""Which elements of which chunks a list of keys stands for.

A plan is made once for a list of keys and used for every push and pull of that list. It turns
keys into *shares*, one for each chunk that holds some of them, and each share into runs of
neighbouring elements. From there on, nothing on the way of a gradient knows of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kvps.messages import Ask, Run
from kvps.specs import BY_NAME, Spec
from kvps.tensors import Memory, unowned

WINDOWS_MAX = 8
"""In how many places a share's elements are remembered."""


class Held(NamedTuple):
    """A piece of a key: where it lies, and which elements of the key it is."""

    server: int
    chunk: int
    start: int
    size: int
    offset: int


@dataclass(slots=True)
class Key:
    """What a worker knows of one key."""

    name: str
    spec: Spec
    pieces: tuple[Held, ...] = ()
    number: int = 0
    """The number of this rank's next push."""
    applied: int = 0
    """How many pushes this rank knows to be applied on all parts: where push numbers are round
    numbers the version, else this rank's own."""
    is_refused: bool = False
    """A push was refused, so which number is owed next has to be asked."""
    broadcasts: int = 0
    """How many times this rank has broadcast it."""


class Segment(NamedTuple):
    """Neighbouring elements of a chunk that belong to one key of the plan."""

    start: int
    size: int
    key: int
    """Index of the key in the plan."""
    offset: int
    """Where the elements begin inside the key."""


@dataclass(slots=True)
class Share:
    """The part of a plan that lies in one chunk."""

    server: int
    chunk: int
    dtype: str
    segments: list[Segment] = field(default_factory=list)
    """In the order of the chunk."""
    blocks: list[tuple[int, int]] = field(default_factory=list)
    """(start, size) of what the segments cover, neighbours joined."""
    size: int = 0
    _cuts: list[tuple[int, slice | None]] = field(default_factory=list)
    """For each segment its key's index, and which of the key's elements; None for all."""
    _sizes: list[int] = field(default_factory=list)
    _shapes: list[tuple[int, ...]] = field(default_factory=list)
    """For each segment its size, and its shape as it lies in a row."""
    _windows: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """By address of the elements of this share, a tensor for each segment."""

    def seal(self, keys: Sequence[Key]) -> None:
        """Prepare for use: all segments are there."""
        self.segments.sort()
        for start, size, index, offset in self.segments:
            if self.blocks and sum(self.blocks[-1]) == start:
                self.blocks[-1] = (self.blocks[-1][0], self.blocks[-1][1] + size)
            else:
                self.blocks.append((start, size))
            whole = size == keys[index].spec.count
            self._cuts.append((index, None if whole else slice(offset, offset + size)))
            self._sizes.append(size)
            self._shapes.append(keys[index].spec.shape if whole else (size,))
            self.size += size

    def runs(self, numbers: Sequence[int]) -> tuple[Run, ...]:
        """Return the runs of a push, where ``numbers[i]`` is that of the plan's i-th key."""
        if _all_equal(numbers):
            return tuple([Run(start, size, numbers[0]) for start, size in self.blocks])
        runs: list[Run] = []
        stop, last = -1, -1
        for segment in self.segments:
            number = numbers[segment.key]
            if segment.start == stop and number == last:
                runs[-1] = Run(runs[-1].start, runs[-1].size + segment.size, number)
            else:
                runs.append(Run(segment.start, segment.size, number))
            stop, last = segment.start + segment.size, number
        return tuple(runs)

    def asks(self, after: Sequence[int], least: Sequence[int]) -> tuple[Ask, ...]:
        """Return the runs of a pull, with each key's conditions."""
        if _all_equal(after) and _all_equal(least):
            return tuple([Ask(start, size, after[0], least[0]) for start, size in self.blocks])
        asks: list[Ask] = []
        stop, last = -1, (-1, -1)
        for segment in self.segments:
            conditions = (after[segment.key], least[segment.key])
            if segment.start == stop and conditions == last:
                asks[-1] = asks[-1]._replace(size=asks[-1].size + segment.size)
            else:
                asks.append(Ask(segment.start, segment.size, *conditions))
            stop, last = segment.start + segment.size, conditions
        return tuple(asks)

    def gather(self, rows: Sequence[torch.Tensor], memory: Memory) -> torch.Tensor:
        """Return this share's elements of ``rows``, one contiguous tensor per key of the plan.

        They are copied into ``memory``, unless they lie there side by side already.
        """
        parts = self._parts(rows)
        if memory.holds(parts[0]) and _adjoin(parts):
            return parts[0].as_strided((self.size,), (1,))
        out = memory.empty(self.size, self.dtype)
        torch._foreach_copy_(self._windows_of(out), parts)
        return out

    def scatter(self, values: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
        """Copy this share's elements back into ``rows``."""
        torch._foreach_copy_(self._parts(rows), self._windows_of(values))

    def _parts(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the part of each row that lies in this share; a whole row as it is."""
        return [rows[key] if cut is None else rows[key].view(-1)[cut] for key, cut in self._cuts]

    def _windows_of(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return one tensor for each segment, which together are ``values``.

        A share's elements come to lie in the same few places again and again, and to make a
        thousand tensors takes longer than to copy them: so they are remembered by address. They
        keep no memory alive, and are only used while ``values`` does.
        """
        if len(self.segments) == 1:
            return [values.view(self._shapes[0])]
        address = values.data_ptr()
        windows = self._windows.get(address)
        if windows is None:
            if len(self._windows) >= WINDOWS_MAX:
                self._windows.clear()
            parts = torch.split(unowned(values), self._sizes)
            windows = [one.view(shape) for one, shape in zip(parts, self._shapes, strict=True)]
            self._windows[address] = windows
        return windows

    @property
    def payload_bytes(self) -> int:
        """Bytes of all elements of this share."""
        return self.size * BY_NAME[self.dtype].itemsize


def _adjoin(parts: Sequence[torch.Tensor]) -> bool:
    """Whether ``parts`` lie side by side in one piece of memory."""
    if len(parts) == 1:
        return True
    at = parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != at:
            return False
        at += part.nbytes
    whole = parts[0].untyped_storage()
    return at <= whole.data_ptr() + whole.nbytes()


def _all_equal(numbers: Sequence[int]) -> bool:
    return numbers.count(numbers[0]) == len(numbers)


@dataclass(slots=True)
class Plan:
    """A list of keys, by chunk."""

    keys: tuple[Key, ...]
    shares: list[Share]


def make(keys: Sequence[Key]) -> Plan:
    """Return the plan of ``keys``."""
    shares: dict[tuple[int, int], Share] = {}
    for index, key in enumerate(keys):
        for piece in key.pieces:
            share = shares.get((piece.server, piece.chunk))
            if share is None:
                share = Share(piece.server, piece.chunk, key.spec.dtype)
                shares[piece.server, piece.chunk] = share
            share.segments.append(Segment(piece.start, piece.size, index, piece.offset))
    for share in shares.values():
        share.seal(keys)
    # Chunk by chunk over the servers, so that all of them have work from the first message on.
    rank_in_server: dict[int, int] = {}
    order: list[tuple[int, int, Share]] = []
    for (server, _), share in sorted(shares.items()):
        rank_in_server[server] = rank_in_server.get(server, -1) + 1
        order.append((rank_in_server[server], server, share))
    return Plan(tuple(keys), [share for _, _, share in sorted(order, key=lambda one: one[:2])])
