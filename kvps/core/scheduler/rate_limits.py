"""Rate limits: of views to all members, and of the work that strangers can cause.

A view goes to every member, so that a thousand members that all leave at the end would make a million
messages. Few members are told of each change at once; of a large cluster, one that has changed again and
again is told of it together, some times in a second.
"""

from __future__ import annotations

import math

ROWS_PER_S = 1_000_000
"""Rows of views that are sent in a second, over all members: some 100 MB."""
ROWS_OF_A_MESSAGE = 50
"""Rows that cost as much as a message without any: 20,000 messages are sent in a second."""
AHEAD_S = 0.1
"""So far ahead of that it may be: a view is sent at once unless others have just been."""


class ViewRateLimiter:
    """Limits how often views are sent."""

    def __init__(self) -> None:
        self._paid_at = -math.inf
        """The time at which the messages sent so far would have been sent at an even pace."""

    @property
    def free_at(self) -> float:
        """When the next view may be sent."""
        return self._paid_at - AHEAD_S

    def spend(self, messages: int, rows: int, now: float) -> None:
        """So many messages were sent, each with so many rows."""
        cost = messages * (rows + ROWS_OF_A_MESSAGE)
        self._paid_at = max(self._paid_at, now) + cost / ROWS_PER_S


class RateLimit:
    """How often something may happen, from one span of time to the next."""

    def __init__(self, count_max: int, within_s: float) -> None:
        self.exceeded = 0
        """How often it might not, since it last might."""
        self._count_max, self._within_s = count_max, within_s
        self._since, self._count = -math.inf, 0

    def is_within(self, now: float) -> bool:
        """Count one more; return whether it may happen."""
        if now >= self._since + self._within_s:
            self._since, self._count = now, 0
        self._count += 1
        is_within = self._count <= self._count_max
        self.exceeded = 0 if is_within else self.exceeded + 1
        return is_within
