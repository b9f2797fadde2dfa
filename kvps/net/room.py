"""The memory that this process may use: the machine's, or its container's share."""

from __future__ import annotations

import os
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
"""Of version 2 and of version 1, as a container sees its own."""


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
