"""The digest of a core's state: equal for two cores that hold the same, bit for bit.

It follows every attribute of every object. It omits values without a meaning: memory that nothing
was written to yet, scratch space, addresses, functions, and where values lie.
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
    *("_memory", "memory", "_blocks", "_spans", "_windows", "_other", "_memo", "lap", "_wake"),
    *("named", "tier", "_tier", "outbox", "_outbox", "_process", "on_reply", "fill", "retry", "why"),
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

    def add(self, value: Any) -> None:
        """Add one thing; without recursion, as lists of objects may be long chains."""
        stack: list[Iterator[Any]] = [iter((value,))]
        while stack:
            try:
                item = next(stack[-1])
            except StopIteration:
                stack.pop()
                continue
            inner = self._enter(item)
            if inner is not None:
                stack.append(inner)

    def _enter(self, value: Any) -> Iterator[Any] | None:
        """Add ``value`` itself; return its parts."""
        if value is None or isinstance(value, bool | int | str):
            self._say(type(value).__name__, repr(value))
            return None
        if isinstance(value, float):
            self.hash.update(b"float" + struct.pack("<d", value))
            return None
        if isinstance(value, enum.Enum | type) or (callable(value) and hasattr(value, "__qualname__")):
            self._say(
                "name", getattr(value, "__qualname__", type(value).__qualname__), getattr(value, "name", "")
            )
            return None
        if isinstance(value, bytes | bytearray | memoryview):
            self._octets(value)
            return None
        if id(value) in self._seen:
            self._say("again", self._seen[id(value)])
            return None
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        if hasattr(value, "data_ptr"):  # a tensor
            self._say("tensor", value.dtype, tuple(value.shape))
            if value.numel():
                flat = value.detach().cpu().contiguous().reshape(-1)
                self._octets(flat.numpy().tobytes() if value.dtype.itemsize != 2 else _halves(flat))
            return None
        if hasattr(value, "__array_interface__"):
            self._say("array", value.dtype, value.shape)
            self._octets(value.tobytes())
            return None
        return self._inside(value)

    def _octets(self, octets: bytes | bytearray | memoryview) -> None:
        self._say("octets", memoryview(octets).nbytes)
        if self._values:
            self.hash.update(octets)

    def _inside(self, value: Any) -> Iterator[Any] | None:
        self._say(type(value).__qualname__)
        match value:
            case Counter() | Mapping():
                self._say(len(value))
                return iter([part for item in value.items() for part in item])
            case list() | tuple() | deque():
                self._say(len(value))
                return iter(list(value))
            case set() | frozenset():
                self._say(*sorted([digest(part, values=self._values) for part in value]))
                return None
            case GeneratorType():
                frame = value.gi_frame
                self._say(value.__qualname__, -1 if frame is None else frame.f_lasti)
                return None
            case count():
                self._say(repr(value))
                return None
            case _:
                return iter(self._parts(value))

    def _parts(self, value: Any) -> list[Any]:
        """Return the attributes of an object; of memory, only the part that was written to."""
        match f"{type(value).__module__}.{type(value).__qualname__}":
            case "kvps.core.server.chunks.slab.Chunk":
                # The short form does not record when readers have let go of a buffer.
                holds = value.buffer.holds if self._values else None
                return [_without_gaps(value), holds, *_attributes(value, {"buffer"})]
            case "kvps.core.embedding.id_index.IdIndex":
                return [value._ids[: value.used], *_attributes(value, {"_ids"})]
            case "kvps.core.embedding.table.EmbeddingRows":
                slots = value._stamps[: value.index.used].nonzero()[0]
                return [value.arenas.read(slots), *_attributes(value, {"arenas"})]
            case _:
                return _attributes(value)


def _halves(flat: Any) -> bytes:
    """Return the bytes of a tensor of 2-byte elements: numpy may not know their type."""
    octets: bytes = flat.view(sys.modules["torch"].int16).numpy().tobytes()
    return octets


def _attributes(holder: object, but: set[str] | None = None) -> list[Any]:
    """Return names and values of the attributes of ``one``, sorted by name."""
    names = set(getattr(holder, "__dict__", ()))
    for cls in type(holder).__mro__:
        slots = getattr(cls, "__slots__", ())
        names.update((slots,) if isinstance(slots, str) else slots)
    names -= SKIPPED | (but or set()) | {"__dict__", "__weakref__"}
    found: list[Any] = []
    for name in sorted(names):
        if hasattr(holder, name):
            found += [name, getattr(holder, name)]
    return found


def _without_gaps(chunk: Any) -> list[Any]:
    """Return the values of a chunk that were ever written."""
    values = chunk.buffer.tensor
    return [
        values[start:stop]
        for _, start, stop in chunk.pieces(0, chunk.used)
        if start not in chunk._blank and start not in chunk._retired
    ]
