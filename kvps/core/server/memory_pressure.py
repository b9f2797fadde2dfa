"""Memory pressure of a server: whether its machine or container is so short of memory that new work is refused.

The memory budget counts what values take. It does not see the Python objects of keys and requests, packets on their way,
plug-ins, and other processes of the container. When memory runs out, the kernel kills the largest process there, which
is usually the server. Its job would roll back, grow again, and lose it again.

So a server that is short of memory refuses what would make it grow for good: stores, keys, optimizers, tables and
pushes to them. Rounds ahead of the oldest one wait. What it has, it serves: pushes to keys, pulls and checkpoints go on.
The readings come from outside.
"""

from __future__ import annotations

from kvps.core.limits import TABLE, remedy
from kvps.errors import Overload
from kvps.phrases import bytes_in_words

RELIEF = 0.95
"""New work is taken again below this part of the limit: a reading that wavers does not change the answer each time."""


class MemoryPressure:
    """The last reading of the memory in use, and what follows from it.

    Args:
        percent_max: percent of the memory in use, from which on new work is refused.

    Example:
        >>> pressure = MemoryPressure(95)
        >>> pressure.take_in(15 << 30, 16 << 30), pressure.is_high
        ('', False)
        >>> pressure.take_in(31 << 29, 16 << 30)
        'is short of memory: 15.5 GiB of 16 GiB are in use (97 %), and new work is refused from 95 % on'
    """

    def __init__(self, percent_max: int = TABLE["used_memory"].default) -> None:
        self._percent_max = percent_max
        self.used_bytes, self.total_bytes = 0, 0
        """The last reading: memory in use, and all that the machine or container has; 0 before the first."""
        self.is_high = False
        """New work is refused."""

    @property
    def used_share(self) -> float:
        """The memory in use as a part of all; 0 before the first reading."""
        return self.used_bytes / self.total_bytes if self.total_bytes else 0.0

    def take_in(self, used_bytes: int, total_bytes: int) -> str:
        """Take in a reading; return what has changed by it, for the log, and "" if nothing has.

        Args:
            used_bytes: memory in use, without what the kernel can free at once.
            total_bytes: memory of the machine or container.
        """
        self.used_bytes, self.total_bytes = used_bytes, total_bytes
        percent = 100 * self.used_share
        was_high = self.is_high
        self.is_high = percent >= self._percent_max * (RELIEF if was_high else 1.0)
        if self.is_high == was_high:
            return ""
        if self.is_high:
            return (
                f"is short of memory: {self}, and new work is refused from {self._percent_max} % on"
            )
        return f"has memory again: {self}, and new work is taken"

    def demand_room(self, what: str) -> None:
        """Check that new work may begin.

        Raises:
            Overload: if the server is short of memory.
        """
        if self.is_high:
            raise Overload(
                f"{what} is refused: {self} on this server's machine or container, and new work is refused from "
                f"{self._percent_max} % on. Give it more memory, end other processes there, or add servers; or "
                f"{remedy('used_memory')}",
                limit="used_memory",
            )

    def __str__(self) -> str:
        return (
            f"{bytes_in_words(self.used_bytes)} of {bytes_in_words(self.total_bytes)} are in use "
            f"({100 * self.used_share:.0f} %)"
        )
