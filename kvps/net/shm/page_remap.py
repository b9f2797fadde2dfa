"""Values that lie in several segments, mapped side by side as one array.

A key that is cut over servers has its parts in several segments, and a reader wants one tensor. If
every part begins at a page and all but the last end at one, the pages can be mapped a second time,
one behind the other; nothing is copied. As a server's chunk takes turns between two places, the
same few arrangements come again and again, and are kept.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvps.net.shm.segment import PAGE_BYTES, Block, Mapping

KEPT_MAX = 16384
"""The number of separate ranges that are kept: each is a mapping, of which a process may have 65,530."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_longlong,
)
_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10


Ranges = tuple[tuple[int, int], ...]
"""(address, bytes) of each part."""


class RemappedPart(NamedTuple):
    """Neighbouring bytes of one segment."""

    nonce: int
    offset: int
    size_bytes: int


class PageRemapper:
    """Arrangements of pages of other processes' segments.

    Args:
        mappings: returns the segments that are mapped now.
    """

    def __init__(self, mappings: Callable[[], Iterable[Mapping]]) -> None:
        self._mappings = mappings
        self._kept: dict[Ranges, object] = {}
        """The holder of the pages of each arrangement."""
        self._mapped: set[tuple[int, int]] = set()
        """The segments whose pages may be mapped, and where they are: (nonce, address)."""

    def beside(self, ranges: Ranges, keep: object) -> Block | None:
        """Return what lies in ``ranges`` as one block, for reading; None if that cannot be.

        Args:
            ranges: (address, bytes), as they are mapped here.
            keep: what must live as long as the block is referred to.
        """
        mappings = list(self._mappings())
        mapped = {(mapping.offer.nonce, mapping.address) for mapping in mappings}
        if mapped != self._mapped:  # pages of those who are gone must not be kept
            self._mapped = mapped
            self._kept.clear()
        whole = self._kept.get(ranges)
        if whole is None:
            whole = _arrange(mappings, ranges)
            if whole is None:
                return None
            if sum(map(len, self._kept)) + len(ranges) > KEPT_MAX:
                self._kept.clear()
            self._kept[ranges] = whole
        size_bytes = sum([size_bytes for _, size_bytes in ranges])
        block = Block((size_bytes,), np.uint8, whole)  # type: ignore[arg-type]  # a ctypes array is a buffer
        block.keep = (whole, keep)
        return block


def _arrange(mappings: Sequence[Mapping], ranges: Ranges) -> object | None:
    """Map ``ranges`` one behind the other; None if they are not pages of these mappings."""
    parts = [_part(mappings, *found) for found in ranges]
    known = [part for part in parts if part is not None]
    return _stitch(mappings, known) if len(known) == len(parts) and _are_pages(known) else None


def _part(mappings: Iterable[Mapping], address: int, size_bytes: int) -> RemappedPart | None:
    for mapping in mappings:
        offset = address - mapping.address
        if 0 <= offset <= mapping.offer.size - size_bytes:
            return RemappedPart(mapping.offer.nonce, offset, size_bytes)
    return None


def _are_pages(parts: Sequence[RemappedPart]) -> bool:
    """Whether ``parts`` can be mapped one behind the other."""
    return all(part.offset % PAGE_BYTES == 0 for part in parts) and all(
        part.size_bytes % PAGE_BYTES == 0 for part in parts[:-1]
    )


def _stitch(mappings: Iterable[Mapping], parts: Sequence[RemappedPart]) -> object | None:
    by_nonce = {mapping.offer.nonce: mapping for mapping in mappings}
    size_bytes = sum(part.size_bytes for part in parts)
    held = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = int(np.frombuffer(held, np.uint8).ctypes.data)
    at = address
    for part in parts:
        fd = by_nonce[part.nonce].open()
        if fd is None:
            return None
        try:
            got = _libc.mmap(
                at, part.size_bytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, part.offset
            )
        finally:
            os.close(fd)
        if got == _FAILED:
            return None
        at += part.size_bytes
    whole = (ctypes.c_ubyte * size_bytes).from_address(address)
    # Unmapped, as a whole, when nothing refers to it any more.
    whole.held = held  # type: ignore[attr-defined]  # ctypes arrays take attributes
    return whole
