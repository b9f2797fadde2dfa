"""The standstill of a job: every worker waits in a call, and none can go on.

A worker reports a standstill while its whole script waits in calls, all of its pushes have arrived, and each
of its requests waits at a peer for calls of workers, as the peer has said within the last seconds
(:mod:`kvps.core.worker.timeout_report`). So no worker can go on where every worker stood still at one moment,
and each has found since then that its requests still wait.

A false alarm ends a good job, and silence costs a Timeout. So nobody is told where a member is lost, or was
silent for a while: it may have been stopped, and its packets with it. A replacement counts as any other
worker: while it runs its predecessor's calls again, it computes, or waits for peers that answer at once.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from kvps.core.scheduler.seat import Seat, State
from kvps.phrases import and_more
from kvps.protocol.envelope import Role

STILL_S = 5.0
"""Seconds for which all workers stand still before they are told. It is longer than the word of a server
counts on a worker (:data:`kvps.core.worker.timeout_report.CONFIRMED_S`), and a delay of a beat that is no
gap."""
GAP_S = 2.5
"""Seconds without a beat after which a member may have been stopped."""
LOOK_EVERY_S = 0.5
SHOWN_MAX = 4
"""Calls, and ranks of each, that are shown."""


class Standstills:
    """The beats of members at a standstill, and who was told."""

    def __init__(self, now: float) -> None:
        self._disturbed_at = now
        """When a member beat again after a silence."""
        self._looked_at = -math.inf
        self._told: dict[tuple[int, int], tuple[int, int]] = {}
        """By rank and incarnation, the number of the standstill that is told, and the number of calls by
        then."""
        self.text = ""
        """The text that workers at the last standstill are told."""

    def hear(self, seat: Seat, now: float) -> None:
        """The process of a member beats."""
        heard_at = seat.progress.heard_at
        if heard_at is None or now - heard_at > GAP_S:
            self._disturbed_at = now

    def told(self, seat: Seat) -> int:
        """Return the number of the standstill that a worker was told of; 0 if of none, or if it has gone
        on."""
        number, calls = self._told.get((seat.node.rank, seat.incarnation), (0, 0))
        is_at_it = calls == seat.progress.calls and seat.progress.standstill in (0, number)
        return number if is_at_it else 0

    def look(self, seats: Collection[Seat], now: float) -> bool:
        """Return whether every worker is found to be at a standstill that cannot end."""
        if now < self._looked_at + LOOK_EVERY_S:
            return False
        self._looked_at = now
        present = [candidate for candidate in seats if candidate.state is not State.LEFT]
        workers = [seat for seat in present if seat.node.role is Role.WORKER]
        if not self._is_certain(present, workers, now):
            return False
        self._told = {
            (worker.node.rank, worker.incarnation): (worker.progress.standstill, worker.progress.calls)
            for worker in workers
        }
        self.text = _in_words(workers, now)
        return True

    def _is_certain(self, present: list[Seat], workers: list[Seat], now: float) -> bool:
        if len(workers) < 2 or not all(worker.progress.standstill for worker in workers):
            return False
        for seat in present:
            heard_at = seat.progress.heard_at
            if seat.state is not State.HELD or heard_at is None:
                return False
            if now - heard_at > GAP_S:
                return False
        since = max(self._disturbed_at, *(worker.progress.still_since for worker in workers))
        return all((worker.progress.heard_at or 0.0) >= since + STILL_S for worker in workers)


def _in_words(workers: list[Seat], now: float) -> str:
    by_call: dict[str, list[Seat]] = {}
    for worker in workers:
        by_call.setdefault(worker.progress.waits_in, []).append(worker)
    told = []
    for call, seats in list(by_call.items())[:SHOWN_MAX]:
        ranks = ", ".join(str(seat.node.rank) for seat in seats[:SHOWN_MAX])
        who = f"worker{'s' * (len(seats) > 1)} {ranks}{and_more(len(seats) - SHOWN_MAX)}"
        waited_s = now - max(seat.progress.moved_at for seat in seats)
        told.append(f"{who} {'have' if len(seats) > 1 else 'has'} waited in {call} for {waited_s:.0f} s")
    return (
        f"every worker waits, and none can go on: {'; '.join(told)}{and_more(len(by_call) - SHOWN_MAX)}. "
        "Every worker must make the same calls in the same order: look at these calls in the script, and "
        "start the job again"
    )
