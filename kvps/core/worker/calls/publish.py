"""The call publish(): rank 0 gives a number to a set of tensors, for processes that are no members to read.

Values of keys are frozen where they are: nothing but names travels. Other values are cut into blocks, which
go to the servers in turn. Then the version is announced, to server 0 at last, with a manifest of what is
where.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from functools import partial

import torch

from kvps import protocol as p
from kvps.core import manifest
from kvps.core.manifest import Extent, Published
from kvps.core.worker.calls.base import Call, Operation, Values, frozen, settle
from kvps.core.worker.connection import Request, route_of
from kvps.core.worker.consistent_read import Step
from kvps.core.worker.store import WorkerStore
from kvps.dtypes import BY_ID, BY_NAME, Spec
from kvps.errors import ConfigError
from kvps.protocol.envelope import Packet
from kvps.protocol.wire import ARRAY_MAX, FRAME_BYTES_MAX
from kvps.tensors import NAMES, TORCH, Memory

BLOCK_BYTES, LENT_BLOCK_BYTES = 8 << 20, 32 << 20
"""Bytes of a block, and at most of a block that servers read where it lies: no packet waits behind that.
Each server has two of these at least: both copy at once."""
ALIGN = 64
"""Tensors begin at multiples of so many bytes of what is published."""

Segment = tuple[torch.Tensor, int, torch.dtype]
"""Neighbouring elements of a tensor, flat; where they begin in a block; and the type that they get there."""


@frozen
class Publish(Call):
    """Publish the values of ``keys``, or the tensors ``rows``; finishes with the number of the version."""

    title = "publish()"

    publication: str
    keep: int
    as_dtype: int
    """The number of the type that floating-point values get; 0 to leave them."""
    known: int
    """The number of the last version that this process knows; 0 if it knows none."""
    keys: tuple[str, ...]
    names: tuple[str, ...]
    rows: tuple[torch.Tensor, ...]
    """Contiguous, by ``names``."""

    def values(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that are given."""
        return self.rows

    def run(self, store: WorkerStore, values: Values) -> Operation:
        if store.rank != 0:
            least = 0 if store.is_resumed and not self.known else self.known + 1
            asked = p.LastVersion(store.name, self.publication, least)
            answers = yield [Request(0, asked)]
            return _number(answers[0])
        number = self.known + 1
        if not self.known:
            answers = yield store.everywhere(p.LastVersion(store.name, self.publication, 0))
            number = max(map(_number, answers)) + 1
        tensors, first = [], 0
        if self.keys:
            tensors = yield from self._freeze(store, number)
            first = 1 + max([extent.block for tensor in tensors for extent in tensor.extents], default=0)
        if self.names:
            tensors += yield from self._put(store, number, values, first)
        octets = torch.frombuffer(bytearray(manifest.encode(tensors)), dtype=torch.uint8)
        if len(octets) > FRAME_BYTES_MAX:
            raise ConfigError(f"publish() of {len(tensors)} tensors: their names and places take over 64 MiB")
        announce = partial(p.Announce, store.name, self.publication, number, self.keep)
        yield [Request(server, announce(0)) for server in range(1, store.servers)]
        yield [Request(0, announce(len(octets)), lambda route: (octets,), len(octets))]
        return number

    def _freeze(self, store: WorkerStore, number: int) -> Generator[Step, list[Packet], list[Published]]:
        """Have the servers keep the present values of the keys, which this rank's pushes are in."""
        yield from settle(store, self.keys)
        chunks: defaultdict[int, set[int]] = defaultdict(set)
        tensors = []
        for name in self.keys:
            key = store.key(name)
            for piece in key.pieces:
                chunks[piece.server].add(piece.chunk)
            dtype = _type_of(key.spec.dtype, self.as_dtype)
            width = BY_NAME[dtype].itemsize
            extents = [Extent(at.server, at.chunk, *[n * width for n in at[2:]]) for at in key.pieces]
            tensors.append(Published(name, Spec(dtype, key.spec.shape), tuple(extents)))
        freeze = partial(p.Freeze, store.name, self.publication, number, self.keep, self.as_dtype)
        yield [
            Request(server, freeze(tuple(part)))
            for server, held in sorted(chunks.items())
            for part in _slices(sorted(held), ARRAY_MAX)
        ]
        return tensors

    def _put(
        self, store: WorkerStore, number: int, values: Values, first: int
    ) -> Generator[Step, list[Packet], list[Published]]:
        """Give the servers the tensors, in blocks that are numbered from ``first`` on."""
        blocks: list[list[Segment]] = []
        most, share = BLOCK_BYTES, sum([row.nbytes for row in values]) // (2 * store.servers)
        if all(store.memory.lends(route_of(server), ()) for server in range(store.servers)):
            most = max(most, min(share, LENT_BLOCK_BYTES) // ALIGN * ALIGN)
        room, tensors = 0, []
        placed: dict[tuple[int, torch.dtype, torch.Size], tuple[Extent, ...]] = {}
        for name, row in zip(self.names, values, strict=True):
            is_bool = row.dtype is torch.bool
            row = row.view(torch.uint8) if is_bool else row
            dtype = _type_of(NAMES[row.dtype], self.as_dtype)
            identity = row.data_ptr(), row.dtype, row.shape
            if identity not in placed or not row.numel():  # tied weights are one
                width, flat, extents, offset = BY_NAME[dtype].itemsize, row.view(-1), [], 0
                while offset < flat.numel() * width:
                    if not room:
                        blocks.append([])
                        room = most
                    size, start = min(room, flat.numel() * width - offset), most - room
                    part = flat[offset // width : (offset + size) // width]
                    blocks[-1].append((part, start, TORCH[dtype]))
                    block = len(blocks) - 1
                    extents.append(Extent(block % store.servers, first + block, start, size, offset))
                    offset, room = offset + size, room - -(-size // ALIGN) * ALIGN
                placed[identity] = tuple(extents)
            tensors.append(Published(name, Spec(dtype, tuple(row.shape)), placed[identity], is_bool))
        requests = []
        for block, segments in enumerate(blocks):
            part, start, kind = segments[-1]
            size = start + part.numel() * kind.itemsize
            put = p.Put(store.name, self.publication, number, self.keep, first + block, size)
            fill = partial(_filled, segments, size, store.memory)
            requests.append(Request(block % store.servers, put, fill, size))
        yield requests
        return tensors


def _filled(segments: Sequence[Segment], size: int, memory: Memory, route: str) -> tuple[torch.Tensor, ...]:
    """Return the bytes of a block."""
    block = memory.empty(size, "uint8")
    for part, start, dtype in segments:
        block[start : start + part.numel() * dtype.itemsize].view(dtype).copy_(part)
    return (block,)


def _type_of(dtype: str, as_dtype: int) -> str:
    """Return the type in which elements are read."""
    return BY_ID[as_dtype].name if as_dtype and BY_NAME[dtype].kind != "int" else dtype


def _number(answer: Packet) -> int:
    assert isinstance(answer.message, p.VersionIs)
    return answer.message.number


def _slices(items: Sequence[int], most: int) -> list[Sequence[int]]:
    return [items[start : start + most] for start in range(0, len(items), most)]
