"""Leases of memory between two processes, given and taken.

A process that sends a reference to its memory instead of bytes gives a numbered *lease*, and does not change
the memory until the lease is returned. The receiver returns it when nothing refers to those bytes any more.

A RELEASE does not list what is returned but what is *not*: of all leases below a number, it names
those that are still held. So a lost return does no harm, the next says the same and more; and a
lease that never arrived, because its packet was lost, is returned all the same. A packet that
arrives after its lease was so returned comes too late, and counts as lost.

Mostly leases are returned in order. Then a number says it all: no lease below it is held. The receiver posts
that number in the first page of its own memory, where the sender reads it before it serves a packet, and no
RELEASE travels (:class:`Postings`). :mod:`kvps.net.shm.transport` sends, posts and takes back.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

from kvps.core.effects import Hold
from kvps.protocol.transports import Release

NAMED_MAX = 4096
"""How many leases that are still held one RELEASE names."""
FIRST_POSTING = 2
"""The first posting of a page, in numbers of 8 bytes: behind the nonce, at a multiple of 16 bytes."""
POSTINGS_MAX = 255
"""The number of postings that a page of 4,096 bytes has room for."""


class Lent:
    """The memory of this process that one peer may be reading."""

    def __init__(self) -> None:
        self.count = 0
        """How many leases were given."""
        self.open: dict[int, tuple[object, Hold | None]] = {}
        """By number, in order: what must stay alive, and what must stay unchanged."""

    def give(self, keep: object, hold: Hold | None) -> int:
        """Return the number of a new lease."""
        self.count += 1
        self.open[self.count] = (keep, hold)
        return self.count

    def release(self, message: Release) -> None:
        """The peer has returned leases."""
        held = {n: self.open.pop(n) for n in message.but if n < message.before and n in self.open}
        self.release_below(message.before)
        self.open = held | self.open

    def release_below(self, before: float) -> None:
        """The peer holds none of the leases below this number; infinity if it is gone."""
        while self.open and (number := next(iter(self.open))) < before:
            _, hold = self.open.pop(number)
            if hold is not None:
                hold.release()

    def __len__(self) -> int:
        return len(self.open)


class Lease:
    """A lease that was taken; it is given back when the last reference to it dies."""

    __slots__ = ("__weakref__",)


class _Held(weakref.ref[Lease]):
    """Notes the end of a lease by functions of the interpreter alone."""

    __slots__ = ("number",)
    number: int


class Borrowed:
    """The memory of one peer that this process reads."""

    def __init__(self) -> None:
        self._top = 0
        self._told = 0
        self._held: dict[int, _Held] = {}
        """By number, in order."""
        self.dropped: deque[_Held] = deque()
        """Given back, by whatever thread dropped the last reference."""
        self.unsaid = 0
        """The number of leases that were given back and that the peer was not told of."""

    @property
    def returned(self) -> int:
        """How many were given back since the peer was last told."""
        return len(self.dropped) + self.unsaid

    def take(self, number: int) -> Lease | None:
        """Return the lease of a packet; None if it comes too late."""
        if number <= self._told or number in self._held:
            return None
        if number > self._top:
            self._top = number
        lease = Lease()
        held = self._held[number] = _Held(lease, self.dropped.append)
        held.number = number
        return lease

    def post(self, postings: Postings, lender: int) -> bool:
        """Post the number below which no lease is held, if that tells the lender everything.

        Args:
            postings: of this process.
            lender: the nonce of the lender's memory.

        Returns:
            Whether it was posted.
        """
        while self.dropped:
            del self._held[self.dropped.popleft().number]
            self.unsaid += 1
        before = min(self._held, default=self._top + 1)
        # Else some behind it were given back.
        if self._top + 1 - before > len(self._held) or not postings.post(lender, before):
            return False
        self.unsaid = 0
        self._told = max(self._told, self._top)
        return True

    def release(self) -> Release | None:
        """Return what the peer must be told; None if nothing was given back."""
        if not self.returned:
            return None
        while self.dropped:
            del self._held[self.dropped.popleft().number]
        self.unsaid = 0
        held = sorted(self._held)
        if len(held) > NAMED_MAX:
            before = held[NAMED_MAX]
            held = held[:NAMED_MAX]
        else:
            before = self._top + 1
        self._told = max(self._told, before - 1)
        return Release(before, tuple(held))


class Postings:
    """Returned leases, posted in the first page of this process's memory: one *posting* for each lender.

    A posting is two numbers of 8 bytes in the order of the machine: the nonce of the lender's memory, and the
    number below which this process holds none of its leases. Each number is written by one store.
    """

    def __init__(self, page: memoryview) -> None:
        self._numbers = page.cast("Q")
        self._at: dict[int, int] = {}
        """Nonce -> where its posting is."""
        self._free = [FIRST_POSTING + 2 * index for index in reversed(range(POSTINGS_MAX))]
        self._fence = threading.Lock()

    def post(self, lender: int, before: int) -> bool:
        """Tell a lender that no lease below ``before`` is held; False if the page is full."""
        # A lock orders the reads of that memory before the number that permits to write there.
        with self._fence:
            at = self._at.get(lender)
        if at is not None:
            self._numbers[at + 1] = before
            return True
        if not self._free:
            return False
        at = self._at[lender] = self._free.pop()
        self._numbers[at + 1] = before
        with self._fence:  # a lender that finds the nonce finds the number
            self._numbers[at] = lender
        return True

    def forget(self, lender: int) -> None:
        """Make room: the lender has ended."""
        at = self._at.pop(lender, None)
        if at is not None:
            self._numbers[at] = 0
            self._free.append(at)


class PostingsOfPeer:
    """Postings of a peer about the leases that this process gave it."""

    def __init__(self, page: memoryview, lender: int) -> None:
        """Read the page of a peer; ``lender`` is the nonce of our own memory."""
        self._numbers = page.cast("Q")
        self._lender = lender
        self._at = FIRST_POSTING

    def before(self) -> int:
        """Return the number below which the peer holds no lease; 0 if it has posted none."""
        numbers, lender = self._numbers, self._lender
        if numbers[self._at] != lender:
            last = FIRST_POSTING + 2 * POSTINGS_MAX
            posted = (at for at in range(FIRST_POSTING, last, 2) if numbers[at] == lender)
            self._at = next(posted, FIRST_POSTING)
            if numbers[self._at] != lender:
                return 0
        return numbers[self._at + 1]
