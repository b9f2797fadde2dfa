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
    parts = [
        next((owner for owner in mappings if 0 <= at - owner.address <= owner.offer.size - size), None)
        for at, size in ranges
    ]
    starts = [at - owner.address for (at, _), owner in zip(ranges, parts, strict=True) if owner is not None]
    if len(starts) < len(parts) or any(start % PAGE_BYTES for start in starts):
        return None
    if any(size % PAGE_BYTES for _, size in ranges[:-1]):
        return None
    size_bytes = sum([size for _, size in ranges])
    held = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    at = address = int(np.frombuffer(held, np.uint8).ctypes.data)
    for owner, start, (_, size) in zip(parts, starts, ranges, strict=True):
        fd = None if owner is None else owner.open()
        if fd is None:
            return None
        try:
            got = _libc.mmap(at, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, start)
        finally:
            os.close(fd)
        if got == _FAILED:
            return None
        at += size
    whole = (ctypes.c_ubyte * size_bytes).from_address(address)
    # Unmapped, as a whole, when nothing refers to it any more.
    whole.held = held  # type: ignore[attr-defined]  # ctypes arrays take attributes
    return whole
