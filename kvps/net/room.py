"""The memory that this process may use: the machine's, or its container's share."""

from __future__ import annotations

import os
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
"""Of version 2 and of version 1, as a container sees its own."""


def memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Return how much memory this process may have."""
    found = [PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")]
    for name in _LIMITS:
        try:
            found.append(int((cgroup / name).read_text()))
        except (OSError, ValueError):  # there is none, or it says "max"
            continue
    return min(found)
