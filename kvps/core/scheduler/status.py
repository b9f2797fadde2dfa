"""The reply to a status query: every seat, and the oldest open round of each store.

The scheduler is not on the data path, so servers tell it of rounds that stay open. A report is valid for a
few seconds; after that, a silent server counts as having none.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvps.core.scheduler.seat import Seat, State
from kvps.protocol.envelope import Node, Role
from kvps.protocol.membership import OldRound, Sight

TOLD_MAX_S = 12.0
"""How long what a server told is shown; it tells again every few seconds."""


class StatusReport:
    """The rounds that the servers of a job have reported."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[float, tuple[OldRound, ...]]] = {}
        """By server: when, and what."""

    def tell(self, server: int, rounds: tuple[OldRound, ...], now: float) -> None:
        """A server says which rounds are open on it."""
        self._told[server] = now, rounds

    def rounds(self, seats: dict[Node, Seat], now: float) -> tuple[OldRound, ...]:
        """Return the oldest open round of each store, the oldest first."""
        oldest: dict[str, OldRound] = {}
        for server, (at, rounds) in self._told.items():
            if now - at > TOLD_MAX_S or seats[Node(Role.SERVER, server)].state is not State.HELD:
                continue
            for told in rounds:
                one = told._replace(server=server, age_s=told.age_s + now - at)
                if one.store not in oldest or one.age_s > oldest[one.store].age_s:
                    oldest[one.store] = one
        return tuple(sorted(oldest.values(), key=lambda one: -one.age_s))


def sights(seats: Iterable[Seat], now: float) -> tuple[Sight, ...]:
    """Return every seat as it is shown, the workers first.

    Where servers listen is told to members only.
    """
    return tuple(
        [
            Sight(
                int(seat.node.role),
                seat.node.rank,
                seat.incarnation,
                seat.state.value,
                seat.host,
                seat.pid,
                "",
                now - seat.heard_at if seat.state is not State.EMPTY else 0.0,
                seat.presence(now),
            )
            for seat in sorted(seats, key=lambda one: (-one.node.role, one.node.rank))
        ]
    )
