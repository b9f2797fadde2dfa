"""The heap of this process: how much memory the machine or container has, and what malloc keeps for the next message.

glibc maps every block of 128 KiB or more anew and unmaps it when it is freed. A message of a
megabyte then costs hundreds of page faults, which take longer than to copy it. With these limits
such blocks are cut from the heap and stay there for the next message.

A tensor of some megabytes stays there, too, and glibc before 2.38 does not find such a block again when the
next tensor asks for one, so that the heap grows to several times of what is in use. A process that trains a
model larger than its memory says so; blocks larger than a message are then given back.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import NamedTuple

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
"""Files of cgroup version 2 and version 1, as seen in a container."""


SHARE = 0.8
"""The part of it that servers take by default; the rest is for what packets take on their way, and for others."""


def share_bytes(servers: int = 1) -> int:
    """Return how much each of so many servers may have that are started together."""
    return int(SHARE * memory_bytes()) // servers


def memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Return how much memory this process may have."""
    found = [PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")]
    for name in _LIMITS:
        try:
            found.append(int((cgroup / name).read_text()))
        except (OSError, ValueError):  # there is none, or it says "max"
            continue
    return min(found)


class Limits(NamedTuple):
    """The limits under which freed memory stays in the heap."""

    map_from_bytes: int
    """Blocks from this size on are mapped, and given back when they are freed."""
    keep_bytes: int
    """So much may be free at the end of the heap."""


ROOMY = Limits(32 << 20, 256 << 20)
TIGHT = Limits(5 << 20, 64 << 20)
"""The first still keeps a chunk that travels in frames, which has up to 4 MiB."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_limits = ROOMY


def keep_freed_memory() -> None:
    """Have this process keep what it frees, up to a limit; without effect where libc is not glibc.

    For processes through which payload travels in frames.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _limits.map_from_bytes)
        mallopt(_M_TRIM_THRESHOLD, _limits.keep_bytes)


def be_tight() -> None:
    """Have this process keep little of what it frees, from now on and for good."""
    global _limits
    _limits = TIGHT
    keep_freed_memory()


def give_back() -> None:
    """Give the system what is free now: after more came than there is ever use for."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
