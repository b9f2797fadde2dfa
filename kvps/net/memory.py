"""The heap of this process: how much memory the machine or container has, and what malloc keeps
for the next message.

glibc maps every block of 128 KiB or more anew and unmaps it when it is freed. A message of a
megabyte then costs hundreds of page faults, which take longer than to copy it. With these limits
such blocks are cut from the heap and stay there for the next message.

A tensor of some megabytes stays there, too, and glibc before 2.38 does not find such a block again when the
next tensor asks for one, so that the heap grows to several times the memory in use. A process that trains a
model larger than its memory calls :func:`be_tight`: large blocks are then given back when they are
freed. Smaller blocks leave gaps all over the heap, which such a process gives back from time to
time by :func:`give_back`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
CGROUP = Path("/sys/fs/cgroup")
PROCESS = Path("/proc/self")
SHARE = 0.8
"""The part of it that servers take by default; the rest is for what packets take on their way, and
for others."""


def share_bytes(servers: int = 1) -> int:
    """Return how much each of so many servers may have that are started together."""
    return int(SHARE * memory_bytes()) // servers


class Version(NamedTuple):
    """The names of one version of control groups."""

    limit: str
    used: str
    caches: re.Pattern[bytes]
    """Finds numbers in memory.stat: of pages of files, which the kernel frees before it kills a process."""


V1 = Version(
    "memory.limit_in_bytes", "memory.usage_in_bytes", re.compile(rb"^total_(?:in)?active_file (\d+)", re.M)
)
V2 = Version("memory.max", "memory.current", re.compile(rb"^(?:in)?active_file (\d+)", re.M))


class Group(NamedTuple):
    """A control group that has a limit."""

    folder: Path
    version: Version
    limit_bytes: int


def memory_bytes(cgroup: Path = CGROUP, process: Path = PROCESS) -> int:
    """Return the bytes of memory that a process may have: the machine's, or its control group's limit."""
    return min([machine_bytes(), *[group.limit_bytes for group in groups(cgroup, process)]])


def machine_bytes() -> int:
    """Return how much memory this machine has."""
    return PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")


def groups(cgroup: Path = CGROUP, process: Path = PROCESS) -> Iterator[Group]:
    """Yield the control groups that a process is in and that limit its memory, outermost first.

    Example::

        [group.limit_bytes >> 20 for group in groups()]  # MiB
    """
    for folder, version in _folders(cgroup, process):
        with contextlib.suppress(OSError, ValueError):  # it is not there, or says "max"
            yield Group(folder, version, int((folder / version.limit).read_text()))


def _folders(cgroup: Path, process: Path) -> Iterator[tuple[Path, Version]]:
    """Yield the folders of the memory's control groups that a process is in, outermost first.

    In a container its own group is often the root of what it sees, and the path that the kernel
    names is not there.
    """
    yield cgroup, V2
    yield cgroup / "memory", V1
    try:
        lines = (process / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            roots = [(cgroup, V2), (cgroup / "unified", V2)]
        elif "memory" in controllers.split(","):
            roots = [(cgroup / "memory", V1)]
        else:
            continue
        for root, version in roots:
            folder = root
            for name in Path(path).parts[1:]:
                folder /= name
                yield folder, version


class Limits(NamedTuple):
    """The limits under which freed memory stays in the heap."""

    map_from_bytes: int
    """Blocks from this size on are mapped, and given back when they are freed."""
    keep_bytes: int
    """So much may be free at the end of the heap."""


ROOMY = Limits(32 << 20, 256 << 20)
TIGHT = Limits(5 << 20, 16 << 20)
"""The first keeps every chunk that travels in frames. The second keeps those between hosts, of 384
KiB by default; those through sockets of one host, of 8 MiB, are mapped anew."""

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
    """Give the system all pages that are free now, also between blocks in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
