"""The heap of this process: how much memory the machine or container has, and what malloc keeps
for the next message.

glibc maps every block of 128 KiB or more anew and unmaps it when it is freed. A message of a
megabyte then costs hundreds of page faults, which take longer than to copy it. With these limits
such blocks are cut from the heap and stay there for the next message.

A tensor of some megabytes stays there, too, and glibc before 2.38 does not find such a block again when the
next tensor asks for one, so that the heap grows to several times of what is in use. A process that trains a
model larger than its memory calls :func:`be_tight`: large blocks are then given back when they are
freed. Smaller blocks leave gaps all over the heap, which such a process gives back from time to
time by :func:`give_back`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CGROUP = Path("/sys/fs/cgroup")
_PROCESS = Path("/proc/self")
SHARE = 0.8
"""The part of it that servers take by default; the rest is for what packets take on their way, and
for others."""


def share_bytes(servers: int = 1) -> int:
    """Return how much each of so many servers may have that are started together."""
    return int(SHARE * memory_bytes()) // servers


class MemoryUse(NamedTuple):
    """The memory in use, of how much there is."""

    used_bytes: int
    total_bytes: int


class _Version(NamedTuple):
    """The names of one version of control groups."""

    limit: str
    used: str
    caches: tuple[str, ...]
    """Lines of memory.stat: pages of files, which the kernel frees before it kills a process."""


_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_V2 = _Version("memory.max", "memory.current", ("active_file", "inactive_file"))


def memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Return how much memory this process may have: that of the machine, or of a control group
    that it is in."""
    limits = [_number(group / version.limit) for group, version in _groups(cgroup, _PROCESS)]
    return min([machine_bytes(), *[limit for limit in limits if limit is not None]])


def memory_use(cgroup: Path = _CGROUP, process: Path = _PROCESS) -> MemoryUse:
    """Return how much memory is in use, of how much.

    That of the control group that is nearest to its limit, with all its processes, as the kernel
    kills one of them at the limit. Where no group has a limit, that of this process, of the
    machine's. Pages of files do not count, because the kernel frees them before.
    """
    whole = machine_bytes()
    uses = [MemoryUse(_own_bytes(process), whole)]
    for group, version in _groups(cgroup, process):
        limit, used = _number(group / version.limit), _number(group / version.used)
        if limit is not None and used is not None and 0 < limit < whole:
            cached = _numbers(group / "memory.stat")
            caches = sum([cached.get(name, 0) for name in version.caches])
            uses.append(MemoryUse(max(0, used - caches), limit))
    return max(uses, key=lambda use: use.used_bytes / use.total_bytes)


def machine_bytes() -> int:
    """Return how much memory this machine has."""
    return PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")


def _own_bytes(process: Path) -> int:
    """Return how much memory this process has, without pages of files; 0 where that is not known."""
    kib = _numbers(process / "status")
    return (kib.get("RssAnon", 0) + kib.get("RssShmem", 0)) << 10


def _groups(cgroup: Path, process: Path) -> Iterator[tuple[Path, _Version]]:
    """Yield the folders of the memory's control groups that this process is in, outermost first.

    In a container its own group is often the root of what it sees, and the path that the kernel
    names is not there.
    """
    yield cgroup, _V2
    yield cgroup / "memory", _V1
    try:
        lines = (process / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            roots = [(cgroup, _V2), (cgroup / "unified", _V2)]
        elif "memory" in controllers.split(","):
            roots = [(cgroup / "memory", _V1)]
        else:
            continue
        for root, version in roots:
            folder = root
            for name in Path(path).parts[1:]:
                folder /= name
                yield folder, version


def _number(path: Path) -> int | None:
    """Return the number in a file; None if there is none, as where it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers of a file with lines such as ``name 12`` or ``name: 12 kB``, by name."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    pairs = [line.split()[:2] for line in lines]
    return {
        pair[0].removesuffix(":"): int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()
    }


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
