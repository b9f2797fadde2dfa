"""The digest of a core's state: equal for two cores that hold the same, bit for bit.

It follows every attribute of every object. It leaves out what is of no meaning: memory that nothing was written to yet,
scratch space, addresses, functions, and where values lie.
"""

from __future__ import annotations

import enum
import struct
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from itertools import count
from types import GeneratorType
from typing import Any

SKIPPED = {
    "_memory",
    "memory",
    "_blocks",
    "_spans",
    "_windows",
    "_other",
    "_memo",
    "lap",
    "_wake",
    "_process",
    "on_reply",
    "fill",
    "retry",
    "why",
}
"""Attributes without meaning: where values lie, scratch space, caches, functions, and the wall clock."""


def digest(root: object, *, values: bool = True) -> str:
    """Return the digest of ``root`` in hexadecimal.

    Args:
        root: a core, or a part of one.
        values: whether the elements of tensors count, and not only their shapes.
    """
    walk = _Walk(values)
    walk.add(root)
    return walk.hash.hexdigest()


class _Walk:
    """One walk over all that a core holds."""

    def __init__(self, values: bool) -> None:
        self.hash = blake2b(digest_size=16)
        self._values = values
        self._seen: dict[int, int] = {}
        self._kept: list[object] = []
        """All things that were seen, so that no address is used twice."""

    def _say(self, *words: object) -> None:
        self.hash.update(("\0".join([str(word) for word in words]) + "\1").encode())

    def add(self, one: Any) -> None:
        """Add one thing; without recursion, as lists of objects may be long chains."""
        stack: list[Iterator[Any]] = [iter((one,))]
        while stack:
            try:
                item = next(stack[-1])
            except StopIteration:
                stack.pop()
                continue
            inner = self._enter(item)
            if inner is not None:
                stack.append(inner)

    def _enter(self, one: Any) -> Iterator[Any] | None:
        """Add ``one`` itself; return what is inside."""
        if one is None or isinstance(one, bool | int | str):
            self._say(type(one).__name__, repr(one))
            return None
        if isinstance(one, float):
            self.hash.update(b"float" + struct.pack("<d", one))
            return None
        if isinstance(one, enum.Enum | type) or (callable(one) and hasattr(one, "__qualname__")):
            self._say(
                "name",
                getattr(one, "__qualname__", type(one).__qualname__),
                getattr(one, "name", ""),
            )
            return None
        if isinstance(one, bytes | bytearray | memoryview):
            self._octets(one)
            return None
        if id(one) in self._seen:
            self._say("again", self._seen[id(one)])
            return None
        self._seen[id(one)] = len(self._seen)
        self._kept.append(one)
        if hasattr(one, "data_ptr"):  # a tensor
            self._say("tensor", one.dtype, tuple(one.shape))
            if one.numel():
                flat = one.detach().cpu().contiguous().reshape(-1)
                self._octets(flat.numpy().tobytes() if one.dtype.itemsize != 2 else _halves(flat))
            return None
        if hasattr(one, "__array_interface__"):
            self._say("array", one.dtype, one.shape)
            self._octets(one.tobytes())
            return None
        return self._inside(one)

    def _octets(self, octets: bytes | bytearray | memoryview) -> None:
        self._say("octets", memoryview(octets).nbytes)
        if self._values:
            self.hash.update(octets)

    def _inside(self, one: Any) -> Iterator[Any] | None:
        self._say(type(one).__qualname__)
        match one:
            case Counter() | Mapping():
                self._say(len(one))
                return iter([part for item in one.items() for part in item])
            case list() | tuple() | deque():
                self._say(len(one))
                return iter(list(one))
            case set() | frozenset():
                self._say(*sorted([digest(part, values=self._values) for part in one]))
                return None
            case GeneratorType():
                frame = one.gi_frame
                self._say(one.__qualname__, -1 if frame is None else frame.f_lasti)
                return None
            case count():
                self._say(repr(one))
                return None
            case _:
                return iter(self._parts(one))

    def _parts(self, one: Any) -> list[Any]:
        """Return the attributes of an object; of memory only what was written to."""
        match f"{type(one).__module__}.{type(one).__qualname__}":
            case "kvps.core.server.chunks.slab.Chunk":
                # The short form does not record when readers have let go of a buffer.
                holds = one.buffer.holds if self._values else None
                return [_without_gaps(one), holds, *_attributes(one, {"buffer"})]
            case "kvps.core.embedding.id_index.IdIndex":
                return [one._ids[: one.used], *_attributes(one, {"_ids"})]
            case "kvps.core.embedding.table.EmbeddingRows":
                slots = one._stamps[: one._index.used].nonzero()[0]
                return [one._arenas.read(slots), *_attributes(one, {"_arenas"})]
            case _:
                return _attributes(one)


def _halves(flat: Any) -> bytes:
    """Return the bytes of a tensor of 2-byte elements: numpy may not know their type."""
    octets: bytes = flat.view(sys.modules["torch"].int16).numpy().tobytes()
    return octets


def _attributes(one: object, but: set[str] | None = None) -> list[Any]:
    """Return names and values of the attributes of ``one``, sorted by name."""
    names = set(getattr(one, "__dict__", ()))
    for cls in type(one).__mro__:
        slots = getattr(cls, "__slots__", ())
        names.update((slots,) if isinstance(slots, str) else slots)
    names -= SKIPPED | (but or set()) | {"__dict__", "__weakref__"}
    found: list[Any] = []
    for name in sorted(names):
        if hasattr(one, name):
            found += [name, getattr(one, name)]
    return found


def _without_gaps(chunk: Any) -> list[Any]:
    """Return the values of a chunk that were ever written."""
    values = chunk.buffer.tensor
    return [
        values[start:stop]
        for _, start, stop in chunk.pieces(0, chunk.used)
        if start not in chunk._blank and start not in chunk._retired
    ]
