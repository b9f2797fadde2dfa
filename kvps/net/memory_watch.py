"""The watch over the memory of a server's machine or container: a thread that tells the loop how
much is in use.

It reads four times a second, and tells the loop once a second; each time where memory is nearly
all in use. A reading takes a quarter of a millisecond.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvps.net.memory import MemoryUse, memory_use

EVERY_S = 0.25
"""Time between two readings."""
TELL_EVERY = 4
"""The loop is told each so many readings, while there is memory."""
NEAR = 0.8
"""From this part of the memory on the loop is told each reading. By default servers hold no more
values than that."""


class MemoryWatch:
    """A thread that reads the memory in use, while the block runs.

    Args:
        tell: told the bytes in use and the bytes that there are, by the thread.
        read: returns the reading.
        every_s: seconds between two readings.

    Example::

        with MemoryWatch(lambda used, total: inbox.put(Server.on_memory, used, total)):
            drive(core, transport, inbox)
    """

    def __init__(
        self,
        tell: Callable[[int, int], None],
        read: Callable[[], MemoryUse] = memory_use,
        every_s: float = EVERY_S,
    ) -> None:
        self._tell = tell
        self._read = read
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvps memory", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        untold = TELL_EVERY
        while True:
            reading, untold = self._read(), untold + 1
            if untold >= TELL_EVERY or reading.used_bytes >= NEAR * reading.total_bytes:
                self._tell(reading.used_bytes, reading.total_bytes)
                untold = 0
            if self._ended.wait(self._every_s):
                return
