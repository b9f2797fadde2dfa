"""The memory of a reader for one version: where its tensors lie, and the requests that fill it."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from kvps import protocol as p
from kvps.core import deltas
from kvps.core.manifest import Published
from kvps.core.reader import Ask
from kvps.dtypes import BY_NAME
from kvps.protocol.envelope import Packet
from kvps.protocol.publications import CHANGES_BYTES_MAX, READ_BYTES_MAX
from kvps.tensors import TORCH

ALIGN = 64
RELAYED_BYTES_MIN, RELAYED_BYTES_MAX, RELAYED_PARTS = 128 << 10, 512 << 10, 128
"""Bytes of one request that a relay may answer, and requests for a version that is neither small nor large. A
relay passes bytes on once all of a request are there, and several stand in a row."""
GAP_BYTES = 4096
"""Bytes between two parts of a block for which one request reads both."""

Copy = tuple[int, int, int]
"""Where bytes go, where they begin in a block or an answer, and their number."""
Octets: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


class Part(NamedTuple):
    """Neighbouring bytes of a block that are neighbours here, too."""

    to: int
    """Where they begin here."""
    start: int
    """Where they begin in the block."""
    size: int
    width: int
    """The least bytes of an element."""


class VersionMemory:
    """The tensors of a version side by side, each at a multiple of :data:`ALIGN`.

    Args:
        published: the tensors.
        shard: the rows of them that are read, as :func:`kvps.subscribe` has it.
    """

    def __init__(self, published: list[Published], shard: tuple[int, int] | None) -> None:
        self.published = published
        self.bytes_read = 0
        """Payload that came."""
        self.unproved: list[tuple[int, int, Part]] = []
        """The server, the block and the place of bytes that are other ones than the server has."""
        self._octets: Octets = np.empty(0, np.uint8)
        self._places: list[tuple[Published, int, tuple[int, ...]]] = []
        self._parts: dict[tuple[int, int], list[Part]] = {}
        share = sum([tensor.size for tensor in published]) // RELAYED_PARTS // ALIGN * ALIGN
        self._relayed_bytes = min(RELAYED_BYTES_MAX, max(RELAYED_BYTES_MIN, share))
        end = 0
        for tensor in published:
            (first, stop), shape = rows_of(tensor, shard)
            self._places.append((tensor, end, shape))
            width = BY_NAME[tensor.spec.dtype].itemsize
            for extent in tensor.extents:
                low, high = max(first, extent.offset), min(stop, extent.offset + extent.size)
                if low < high:
                    part = Part(end + low - first, extent.start + low - extent.offset, high - low, width)
                    self._parts.setdefault((extent.server, extent.block), []).append(part)
            end += -(-(stop - first) // ALIGN) * ALIGN
        self._parts = {at: _merged(parts) for at, parts in sorted(self._parts.items())}
        self._end = max(end, ALIGN)  # nothing at all has no strides, and no view of another type

    def begin(self, older: VersionMemory | None, *, is_given: bool, copies: bool) -> None:
        """Have memory: that of an older version, unless somebody else has it.

        Args:
            older: the memory of an older version, which ends.
            is_given: somebody else has it.
            copies: begin with what is there.
        """
        octets = None if older is None else older._octets
        if octets is None or is_given or len(octets) != self._end:
            self._octets = torch.empty(self._end, dtype=torch.uint8).numpy()
            if copies and octets is not None:
                self._octets[:] = octets
        else:
            self._octets = octets

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, which share this memory."""
        return {tensor.name: self._view(tensor, start, shape) for tensor, start, shape in self._places}

    def _view(self, tensor: Published, start: int, shape: tuple[int, ...]) -> torch.Tensor:
        count = int(np.prod(shape, dtype=np.int64))
        octets = self._octets[start : start + count * BY_NAME[tensor.spec.dtype].itemsize]
        dtype = torch.bool if tensor.is_bool else TORCH[tensor.spec.dtype]
        return torch.from_numpy(octets).view(dtype).view(shape)

    # --- requests -----------------------------------------------------------------------------------

    def asks(
        self,
        name: str,
        number: int,
        bases: Mapping[int, int],
        *,
        proves: bool = False,
        relayed: Collection[int] = (),
    ) -> Iterator[Ask]:
        """Yield the requests for a version.

        Args:
            name: the publication.
            number: the version.
            bases: server -> the older version that is in this memory, of which its changes are asked; others
                are asked for all.
            proves: somebody else may have written to this memory.
            relayed: servers whose bytes may come from other readers.
        """
        for (server, block), parts in self._parts.items():
            base, relays = bases.get(server), server in relayed
            if base is None:
                yield from self._reads(name, number, server, block, parts, relays=relays)
                continue
            for part in _cut(parts, self._relayed_bytes if relays else CHANGES_BYTES_MAX):
                ask = p.ReadChanges(name, number, block, *part[1:3], base, part.width, proves, relays)
                yield Ask(server, ask, partial(self._take_changes, server, block, part))

    def reads_again(self, name: str, number: int) -> Iterator[Ask]:
        """Yield requests for the bytes that are other ones than the server has."""
        unproved, self.unproved = self.unproved, []
        for server, block, part in unproved:
            yield from self._reads(name, number, server, block, [part])

    def _reads(
        self, name: str, number: int, server: int, block: int, parts: list[Part], *, relays: bool = False
    ) -> Iterator[Ask]:
        for start, size, group in _grouped(parts, self._relayed_bytes if relays else READ_BYTES_MAX):
            yield Ask(server, p.Read(name, number, block, start, size, relays), partial(self._take, group))

    def _take(self, copies: list[Copy], packet: Packet) -> bool:
        """Copy what was read to where it belongs."""
        octets = np.frombuffer(packet.payload[0], np.uint8)
        self.bytes_read += len(octets)
        for to, start, size in copies:
            self._octets[to : to + size] = octets[start : start + size]
        return True

    def _take_changes(self, server: int, block: int, part: Part, packet: Packet) -> bool:
        """Write what has changed; note the part if it is then not what the server has."""
        message = packet.message
        if isinstance(message, p.Octets):
            return self._take([(part.to, 0, part.size)], packet)
        assert isinstance(message, p.Changes)
        octets = self._octets[part.to : part.to + part.size]
        if message.size:
            self.bytes_read += message.size
            deltas.apply(octets, part.width, message.count, message.run_count, packet.payload[0])
        if message.check and message.check != 1 << 32 | zlib.crc32(octets.data):
            self.unproved.append((server, block, part))
        return True


def rows_of(tensor: Published, shard: tuple[int, int] | None) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Return the bytes of a tensor that a shard has, and their shape."""
    shape = tensor.spec.shape
    if shard is None or not shape:
        return (0, tensor.size), shape
    rank, size = shard
    first, stop = shape[0] * rank // size, shape[0] * (rank + 1) // size
    width = tensor.size // shape[0] if shape[0] else 0
    return (first * width, stop * width), (stop - first, *shape[1:])


def _merged(parts: list[Part]) -> list[Part]:
    """Return the parts of a block in order; those are one that lie alike here and there."""
    merged: list[Part] = []
    for part in sorted(parts, key=lambda part: part.start):
        last = merged[-1] if merged else part
        gap = part.start - last.start - last.size
        if merged and 0 <= gap < ALIGN and part.to - last.to == part.start - last.start:
            width = min(last.width, part.width)
            merged[-1] = Part(last.to, last.start, part.start + part.size - last.start, width)
        else:
            merged.append(part)
    return merged


def _cut(parts: list[Part], most: int) -> Iterator[Part]:
    """Yield parts of at most so many bytes, for whose changes one request may ask."""
    for to, start, size, width in parts:
        for at in range(0, size, most):
            yield Part(to + at, start + at, min(size - at, most), width)


def _grouped(parts: list[Part], most: int) -> Iterator[tuple[int, int, list[Copy]]]:
    """Yield requests for the parts of a block, each of at most so many bytes: where it begins, its size, and
    what to copy of the answer."""
    group: list[Copy] = []
    first = last = 0
    for to, start, size, _ in parts:
        while size:
            if group and (start > last + GAP_BYTES or start >= first + most):
                yield first, last - first, group
                group = []
            if not group:
                first = last = start
            taken = min(size, first + most - start)
            group.append((to, start - first, taken))
            to, start, size = to + taken, start + taken, size - taken
            last = max(last, start)
    if group:
        yield first, last - first, group
