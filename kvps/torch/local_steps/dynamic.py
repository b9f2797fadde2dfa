"""Local steps by speed: a slower worker makes fewer steps in a turn, so that all turns take about as long.

A worker that makes v steps per second, where the fastest makes v_max, has ``floor(sync_every * v / v_max)`` steps in
a turn, at least one (DyLU in Liu et al., arXiv 2401.09135). No worker waits to learn the speeds of others: each writes
its own into a table when it pushes, and reads the table as it is. The table has no clock, so each reader remembers when it
first saw what a row holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

SILENT_TURNS = 4
"""Turns without a report after which a worker does not count: it is lost, has left, or is stopped."""
TOLERANCE = 0.05
"""The share by which equal workers may seem to differ. Without it, the slower of two equal workers would always have
a step less, which is half of them where ``sync_every`` is 2."""


class Report(NamedTuple):
    """The report of a worker on its last turn; all zeros before its first."""

    turns: float
    """Turns that the worker has reported."""
    step_s: float
    """Seconds of a step, without waits for merges."""
    turn_s: float
    """Seconds from push to push."""


class DynamicSteps:
    """The length of one worker's turns.

    Args:
        sync_every: steps of the fastest worker.
        least: the fewest steps of a turn.
        rank: this worker's.

    Example:
        >>> steps = DynamicSteps(sync_every=30, least=1, rank=1)
        >>> steps.of([Report(1, 0.1, 3.0), Report(1, 0.3, 9.0)], now=9.0)
        10
    """

    def __init__(self, sync_every: int, least: int, rank: int) -> None:
        self._sync_every = sync_every
        self._least = least
        self._rank = rank
        self._seen: dict[int, tuple[Report, float]] = {}
        """Rank -> its newest report, and when this worker first saw it."""

    def of(self, reports: Sequence[Report], now: float) -> int:
        """Return the steps of this worker's next turn.

        Args:
            reports: the newest of each rank.
            now: seconds on a monotonic clock.
        """
        own = reports[self._rank]
        if not _is_known(own):
            return self._sync_every
        fastest_s = own.step_s
        for rank, report in enumerate(reports):
            seen = self._seen.get(rank)
            if seen is None or seen[0] != report:
                seen = self._seen[rank] = (report, now)
            if _is_known(report) and now - seen[1] <= SILENT_TURNS * self._longest_turn_s(report):
                fastest_s = min(fastest_s, report.step_s)
        steps = math.floor(self._sync_every * (1 + TOLERANCE) * fastest_s / own.step_s)
        return min(max(steps, self._least), self._sync_every)

    def _longest_turn_s(self, report: Report) -> float:
        """Return how long the turn after a report may take: as long as the last one, or as one of all steps."""
        return max(report.turn_s, self._sync_every * report.step_s)


def _is_known(report: Report) -> bool:
    return 0 < report.step_s < math.inf
