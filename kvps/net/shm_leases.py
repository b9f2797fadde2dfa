"""Leases of memory between two processes, given and taken.

A process that sends a reference to its memory instead of bytes gives a numbered *lease*, and does not change
the memory until the lease is returned. The receiver returns it when nothing refers to those bytes any more.

A RELEASE does not list what is returned but what is *not*: of all leases below a number, it names
those that are still held. So a lost return does no harm, the next says the same and more; and a
lease that never arrived, because its packet was lost, is returned all the same. A packet that
arrives after its lease was so returned comes too late, and counts as lost.
"""

from __future__ import annotations

from collections import deque

from kvps.core.effects import Hold
from kvps.protocol.shared_memory import Release

NAMED_MAX = 4096
"""How many leases that are still held one RELEASE names."""


class Lent:
    """The memory of this process that one peer may be reading."""

    def __init__(self) -> None:
        self._count = 0
        self._open: dict[int, tuple[object, Hold | None]] = {}
        """By number, in order: what must stay alive, and what must stay unchanged."""

    def give(self, keep: object, hold: Hold | None) -> int:
        """Return the number of a new lease."""
        self._count += 1
        self._open[self._count] = (keep, hold)
        return self._count

    def release(self, message: Release) -> None:
        """The peer has returned leases."""
        kept = set(message.but)
        for number in list(self._open):
            if number >= message.before:
                break
            if number not in kept:
                self._end(number)

    def end(self) -> None:
        """The peer is gone, and reads nothing any more."""
        for number in list(self._open):
            self._end(number)

    def _end(self, number: int) -> None:
        _, hold = self._open.pop(number)
        if hold is not None:
            hold.release()

    def __len__(self) -> int:
        return len(self._open)


class Lease:
    """A loan that was taken; returned when the last reference to it dies."""

    __slots__ = ("_number", "_returned")

    def __init__(self, number: int, returned: deque[int]) -> None:
        self._number = number
        self._returned = returned

    def __del__(self) -> None:
        self._returned.append(self._number)


class Borrowed:
    """The memory of one peer that this process reads."""

    def __init__(self) -> None:
        self._top = 0
        self._told = 0
        self._held: dict[int, None] = {}
        """Numbers, in order."""
        self.returned: deque[int] = deque()
        """Given back since the peer was last told, by whatever thread dropped the last reference."""

    def take(self, number: int) -> Lease | None:
        """Return the lease of a packet; None if it comes too late."""
        if number <= self._told or number in self._held:
            return None
        self._top = max(self._top, number)
        self._held[number] = None
        return Lease(number, self.returned)

    def release(self) -> Release | None:
        """Return what the peer must be told; None if nothing was given back."""
        if not self.returned:
            return None
        while self.returned:
            del self._held[self.returned.popleft()]
        held = sorted(self._held)
        if len(held) > NAMED_MAX:
            before = held[NAMED_MAX]
            held = held[:NAMED_MAX]
        else:
            before = self._top + 1
        self._told = max(self._told, before - 1)
        return Release(before, tuple(held))
