"""Where weights lie in a server's memory: slabs of chunks, and who may write to them.

A *slab* holds all keys of one store and one element type, side by side, in *chunks* of at most
1 MiB. A chunk is what travels in one message, what is summed in one addition and updated in one
fused step. Small keys share a chunk; a part larger than a chunk gets several of its own.

The values of a chunk are *immutable while someone reads them*: a frame on its way out holds the
buffer, and an update of a held buffer goes to a fresh one. So a send without copying cannot
tear, and every answer is one version.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch

from kvps.core.rounds import Span
from kvps.core.updaters import State
from kvps.errors import ProtocolError
from kvps.messages import RUNS_MAX, Piece
from kvps.specs import BY_NAME
from kvps.tensors import TORCH

CHUNK_BYTES = 1 << 20
_OPEN_CHUNKS = 8
"""How many chunks with room left are remembered; bounds the search for a place."""


class Buffer:
    """Memory with a count of those who are reading it."""

    __slots__ = ("holds", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.holds = 0

    def hold(self) -> Buffer:
        """One more reader."""
        self.holds += 1
        return self

    def release(self) -> None:
        """One reader less."""
        assert self.holds > 0, "released more often than held"
        self.holds -= 1


class Chunk:
    """Up to 1 MiB of weights, their optimizer state, and the history of each part."""

    def __init__(self, number: int, dtype: str, capacity: int) -> None:
        self.number = number
        self.dtype = dtype
        self.store = ""
        self.buffer = Buffer(torch.empty(capacity, dtype=TORCH[dtype]))
        self.state: State | None = None
        self.used = 0
        self.keys: list[str] = []
        self.bounds: list[int] = [0]
        """``keys[i]`` lies from ``bounds[i]`` to ``bounds[i + 1]``; a retired key is ``""``."""
        self.spans: list[Span] = []
        self._starts: list[int] = []

    @property
    def capacity(self) -> int:
        """Elements that fit in."""
        return len(self.buffer.tensor)

    def append(self, key: str, count: int) -> Piece:
        """Give ``count`` elements to ``key``, behind those given before."""
        piece = Piece(self.number, self.used, count)
        self.used += count
        self.keys.append(key)
        self.bounds.append(self.used)
        self.spans.append(Span(piece.start, self.used))
        self._starts.append(piece.start)
        if len(self.spans) > 1 and self.spans[-2].may_join(self.spans[-1]):
            self._join(len(self.spans) - 2)
        return piece

    def retire(self, piece: Piece) -> None:
        """Take ``piece`` away from its key for ever."""
        self.cut(piece.start, piece.start + piece.size)
        low = bisect_left(self._starts, piece.start)
        high = bisect_left(self._starts, piece.start + piece.size)
        del self.spans[low:high], self._starts[low:high]
        self.keys[bisect_right(self.bounds, piece.start) - 1] = ""

    def writable(self) -> torch.Tensor:
        """Return the current values for writing; a fresh copy if someone still reads them."""
        if self.buffer.holds:
            self.buffer = Buffer(self.buffer.tensor.clone())
        return self.buffer.tensor

    def covering(self, start: int, stop: int) -> list[Span]:
        """Return the spans that ``start`` to ``stop`` touches, in order.

        Raises:
            ProtocolError: if the range is empty, cuts a key, or holds no key.
        """
        if not 0 <= start < stop <= self.used:
            raise ProtocolError(
                f"chunk {self.number} has {self.used} elements; {start} to {stop} is not a range"
            )
        for edge in (start, stop):
            if self.bounds[bisect_left(self.bounds, edge)] != edge:
                raise ProtocolError(f"chunk {self.number}: {edge} is not the edge of a key")
        low = bisect_right(self._starts, start) - 1
        high = bisect_left(self._starts, stop)
        spans = self.spans[max(low, 0) : high]
        held = sum(min(stop, one.stop) - max(start, one.start) for one in spans if one.stop > start)
        if held != stop - start:
            raise ProtocolError(f"chunk {self.number}: {start} to {stop} holds no key any more")
        return spans

    def cut(self, start: int, stop: int) -> list[Span]:
        """Return spans that tile ``start`` to ``stop`` exactly: split where needed, joined where
        their histories are equal."""
        spans = self.covering(start, stop)
        if len(spans) == 1 and spans[0].start == start and spans[0].stop == stop:
            return spans
        low = bisect_right(self._starts, start) - 1
        if self._starts[low] < start:
            self._split(low, start)
            low += 1
        high = bisect_left(self._starts, stop) - 1
        if self.spans[high].stop > stop:
            self._split(high, stop)
        index = low
        while index < high:
            if self.spans[index].may_join(self.spans[index + 1]):
                self._join(index)
                high -= 1
            else:
                index += 1
        return self.spans[low : high + 1]

    def pieces(self, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """Yield (key, start, stop) of each piece inside ``start`` to ``stop``."""
        index = bisect_right(self.bounds, start) - 1
        while index < len(self.keys) and self.bounds[index] < stop:
            yield self.keys[index], self.bounds[index], self.bounds[index + 1]
            index += 1

    def _split(self, index: int, at: int) -> None:
        right = self.spans[index].cut(at)
        self.spans.insert(index + 1, right)
        self._starts.insert(index + 1, at)

    def _join(self, index: int) -> None:
        self.spans[index].join(self.spans[index + 1])
        del self.spans[index + 1], self._starts[index + 1]

    def check(self) -> None:
        """Assert the invariants: spans lie in order, inside the chunk, on edges of keys."""
        assert [one.start for one in self.spans] == self._starts
        assert self.used <= self.capacity
        edges = set(self.bounds)
        last = 0
        for span in self.spans:
            assert last <= span.start
            assert {span.start, span.stop} <= edges
            last = span.stop
            span.check()


class Slab:
    """All chunks of one store and one element type."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.chunk_count = CHUNK_BYTES // BY_NAME[dtype].itemsize
        self._open: list[Chunk] = []

    def place(self, key: str, count: int, new: Callable[[str, int], Chunk]) -> list[Piece]:
        """Find room for ``count`` elements of ``key``; ``new`` makes a chunk when one is needed."""
        if count > self.chunk_count:
            shares = -(-count // self.chunk_count)
            cuts = [count * i // shares // 16 * 16 for i in range(shares)] + [count]
            sizes = [stop - start for start, stop in pairwise(cuts)]
            return [new(self.dtype, size).append(key, size) for size in sizes]
        for chunk in self._open:
            if chunk.capacity - chunk.used >= count and len(chunk.keys) < RUNS_MAX:
                break
        else:
            chunk = new(self.dtype, self.chunk_count)
            self._open = [*self._open[-_OPEN_CHUNKS + 1 :], chunk]
        return [chunk.append(key, count)]


class NewChunk:
    """Makes chunks and numbers them, within a limit of bytes."""

    def __init__(self) -> None:
        self.chunks: dict[int, Chunk] = {}
        self.weight_bytes = 0

    def __call__(self, dtype: str, capacity: int) -> Chunk:
        """Return a new chunk with the next number."""
        chunk = Chunk(len(self.chunks) + 1, dtype, capacity)
        self.chunks[chunk.number] = chunk
        self.weight_bytes += capacity * BY_NAME[dtype].itemsize
        return chunk
