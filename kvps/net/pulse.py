"""The pulse of a connection: whether bytes have moved along it lately.

Its opener asks for a sign of life every few seconds, and so does the far end of it answer. On a slow link
the question, or its answer, stands behind megabytes; so it is not the answer that counts but any byte
that comes, whatever it belongs to. And where megabytes go, and nothing comes, each that the other end's
kernel has taken is a sign, too. A few bytes are none: whatever stands between the two may have
taken those, and keep them.
"""

from __future__ import annotations

from typing import NamedTuple

MANY = 4096
"""Bytes that are under way, from which on it counts that some arrive: no heartbeat is as large."""
STILL_S = 5.0
"""Seconds between two looks after which this process itself was stopped, and could not ask for a sign of life."""


class Moved(NamedTuple):
    """The kernel's counters of a connection."""

    received: int
    """Bytes that came."""
    taken: int
    """Bytes that went, and are known to have arrived."""
    waiting: int
    """Bytes that go, and are not."""


class Pulse:
    """One connection, from when it was made."""

    def __init__(self, silence_s: float, now: float) -> None:
        self._silence_s = silence_s
        self._last = Moved(0, 0, 0)
        self._moved_at = self._looked_at = now

    def is_dead(self, now: float, moved: Moved) -> bool:
        """Take in what was counted by now; say whether nothing has moved for too long."""
        last, self._last = self._last, moved
        comes = moved.received > last.received
        goes = moved.taken > last.taken and max(moved.waiting, last.waiting) >= MANY
        if comes or goes or now > self._looked_at + STILL_S:
            self._moved_at = now
        self._looked_at = now
        return now >= self._moved_at + self._silence_s
