"""Memory that messages come and go in: kept by the process, not given back after each.

glibc maps every block of 128 KiB or more anew and unmaps it when it is freed. A message of a
megabyte then costs hundreds of page faults, which take longer than to copy it. With these limits
such blocks are cut from the heap and stay there for the next message.
"""

from __future__ import annotations

import ctypes

MAP_FROM_BYTES = 32 << 20
KEEP_BYTES = 256 << 20
"""Blocks from this size on are still mapped; so much may be free at the end of the heap."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Have this process keep what it frees, up to a limit; without effect where libc is not glibc.

    For processes through which payload travels in frames.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MAP_FROM_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES)
