"""The watch over the memory of a server's machine or container: a thread that tells the loop how
much is in use.

It reads four times a second, and tells the loop once a second; each time where memory is nearly
all in use. A reading takes 0.1 ms where caches are cold: files are found and opened once in ten seconds,
of a process only the lines are parsed that are wanted, and of a group that is far from its limit no
statistics are asked for.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvps.net.memory import CGROUP, PROCESS, groups, machine_bytes

EVERY_S = 0.25
"""Time between two readings."""
TELL_EVERY = 4
"""The loop is told each so many readings, while there is memory."""
FIND_EVERY = 40
"""Readings after which it is looked anew which control groups have limits."""
NEAR = 0.8
"""From this part of the memory on the loop is told each reading. By default servers hold no more
values than that."""
FILE_BYTES_MAX = 16384
"""No file that is read here is longer, as far as it matters."""

_OWN = re.compile(rb"^Rss(?:Anon|Shmem):\s*(\d+)", re.M)
"""Finds the KiB of a process, without pages of files."""


class MemoryUse(NamedTuple):
    """The memory in use, of how much there is."""

    used_bytes: int
    total_bytes: int


Read = Callable[[float], MemoryUse]
"""Returns a reading; of one below this part of all memory the pages of files may not be subtracted."""


@contextmanager
def memory_reader(cgroup: Path = CGROUP, process: Path = PROCESS) -> Iterator[Read]:
    """Open files, and give a function that returns how much memory is in use, of how much.

    The figures are those of the control group that is nearest to its limit, with all its processes, as the
    kernel kills a process of the group at the limit. Where no group has a limit: this process's memory, of
    the machine's. Pages of files do not count, because the kernel frees them before.

    Example::

        with memory_reader() as read:
            used, total = read(0.0)
    """
    whole = machine_bytes()
    with ExitStack() as opened:

        def file(path: Path) -> int:
            """Open a file; return -1, of which nothing can be read, where that fails."""
            try:
                found = os.open(path, os.O_RDONLY)
            except OSError:
                return -1
            opened.callback(os.close, found)
            return found

        own = file(process / "status")
        limited = [
            (file(folder / version.used), file(folder / "memory.stat"), version.caches, limit)
            for folder, version, limit in groups(cgroup, process)
            if 0 < limit < whole
        ]

        def read(exact_from: float) -> MemoryUse:
            nearest = MemoryUse(_sum(own, _OWN) << 10, whole)
            for current, statistics, caches, limit in limited:
                with suppress(OSError, ValueError):
                    used = int(os.pread(current, FILE_BYTES_MAX, 0))
                    if used >= exact_from * limit:
                        used = max(0, used - _sum(statistics, caches))
                    if used * nearest.total_bytes > nearest.used_bytes * limit:
                        nearest = MemoryUse(used, limit)
            return nearest

        yield read


def _sum(file: int, numbers: re.Pattern[bytes]) -> int:
    """Return the sum of some numbers in a file; 0 where it cannot be read."""
    try:
        return sum(map(int, numbers.findall(os.pread(file, FILE_BYTES_MAX, 0))))
    except OSError:
        return 0


class MemoryWatch:
    """A thread that reads the memory in use, while the block runs.

    Args:
        tell: told the bytes in use and the bytes that there are, by the thread.
        reader: opens what is read, as :func:`memory_reader` does.
        every_s: seconds between two readings.

    Example::

        with MemoryWatch(lambda used, total: inbox.put(Server.on_memory, used, total)):
            drive(core, transport, inbox)
    """

    def __init__(
        self,
        tell: Callable[[int, int], None],
        reader: Callable[[], AbstractContextManager[Read]] = memory_reader,
        every_s: float = EVERY_S,
    ) -> None:
        self._tell = tell
        self._reader = reader
        self._every_s = every_s
        self._runs = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvps memory", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._runs.acquire()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._runs.release()
        self._thread.join()

    def _run(self) -> None:
        tell, has_ended, every_s = self._tell, self._runs.acquire, self._every_s
        untold = TELL_EVERY
        while True:
            with self._reader() as read:
                for _ in range(FIND_EVERY):
                    untold += 1
                    is_due = untold >= TELL_EVERY
                    used, total = read(0.0 if is_due else NEAR)
                    if is_due or used >= NEAR * total:
                        tell(used, total)
                        untold = 0
                    if has_ended(timeout=every_s):
                        return
