"""The figures that servers send for the dashboard: when each is asked, and its newest answer.

A server is asked again when it has answered, or after :data:`AGAIN_S` without an answer, and no more than
:data:`ASKED_MAX` servers at a time. How long an answer takes is a figure, too: a server that is overloaded or
stopped answers late. Nothing here has an influence on the job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from kvps.core.scheduler.seat import Seat, State
from kvps.core.texts import shown
from kvps.errors import ProtocolError
from kvps.protocol.envelope import Role
from kvps.protocol.membership import Measure, Measured

ASKED_MAX = 50
"""Servers that are asked at a time; the others are asked the next times."""
AGAIN_S = 5.0
"""Seconds without an answer after which a server is asked again: the question may be lost."""
TEXT_MAX = 128
"""Characters of a name that are kept."""


class ServerFigures(NamedTuple):
    """The figures of one server, and how it answers."""

    rank: int
    incarnation: int
    answer_s: float
    """How long the last answer took; for a question without an answer, how long it has taken so far."""
    age_s: float
    """Seconds since the last answer."""
    measured: Measured


@dataclass(slots=True)
class _Server:
    """One incarnation of a server."""

    incarnation: int
    number: int = 0
    """The number of the newest question; 0 before the first."""
    asked_at: float = 0.0
    """When the oldest question without an answer was asked, or the last question."""
    sent_at: float = 0.0
    is_asked: bool = False
    """A question has no answer yet."""
    answer_s: float = 0.0
    answered_at: float = 0.0
    measured: Measured | None = None


class ServerMeasurements:
    """The figures of the servers of a job."""

    def __init__(self) -> None:
        self._servers: dict[int, _Server] = {}
        self._next = 0
        """The rank from which on servers are asked next."""
        self._number = 0

    def ask(self, seats: Iterable[Seat], now: float) -> Iterator[tuple[Seat, Measure]]:
        """Yield the servers that are asked now, and the questions."""
        held = {
            seat.node.rank: seat
            for seat in seats
            if seat.node.role is Role.SERVER and seat.state is State.HELD and seat.is_welcomed
        }
        for rank in self._servers.keys() - held.keys():
            del self._servers[rank]
        ranks = sorted(held, key=lambda rank: (rank < self._next, rank))
        for rank in ranks[:ASKED_MAX]:
            seat = held[rank]
            server = self._servers.get(rank)
            if server is None or server.incarnation != seat.incarnation:
                server = self._servers[rank] = _Server(seat.incarnation)
            if server.is_asked and now < server.sent_at + AGAIN_S:
                continue
            self._number += 1
            if not server.is_asked:
                server.asked_at, server.is_asked = now, True
            server.number, server.sent_at = self._number, now
            yield seat, Measure(self._number)
        self._next = 0 if len(ranks) <= ASKED_MAX else ranks[ASKED_MAX]

    def hear(self, rank: int, incarnation: int, measured: Measured, now: float) -> None:
        """Take in an answer; one to an older question is passed over.

        Raises:
            ProtocolError: if the server was asked no such question.
        """
        server = self._servers.get(rank)
        if server is None or server.incarnation != incarnation or measured.number > server.number:
            raise ProtocolError(f"server {rank} sent figures that the scheduler has not asked for")
        if measured.number < server.number or not server.is_asked:
            return
        server.is_asked = False
        server.answer_s, server.answered_at = now - server.asked_at, now
        server.measured = measured

    def figures(self, now: float) -> list[ServerFigures]:
        """Return what is known of each server that has answered, by rank."""
        return [
            ServerFigures(
                rank,
                server.incarnation,
                max(now - server.asked_at, server.answer_s) if server.is_asked else server.answer_s,
                now - server.answered_at,
                server.measured,
            )
            for rank, server in sorted(self._servers.items())
            if server.measured is not None
        ]


def printable(measured: Measured) -> Measured:
    """Return figures whose names can be shown."""
    values = [_printable(getattr(measured, field.name)) for field in fields(measured)]
    return Measured(*values)


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return shown(value)[:TEXT_MAX]
    if isinstance(value, tuple):
        parts = map(_printable, value)
        return value._make(parts) if hasattr(value, "_make") else tuple(parts)
    if isinstance(value, dict):
        return {_printable(key): number for key, number in value.items()}
    return value
