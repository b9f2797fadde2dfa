"""The reply to a status query: every seat, and the oldest open round of each store.

The scheduler is not on the data path, so servers tell it of rounds that stay open. A report is valid for a
few seconds; after that, a silent server counts as having none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from kvps.core.membership_client import BeatFigures
from kvps.core.scheduler.barriers import Barriers
from kvps.core.scheduler.seat import Seat, State
from kvps.protocol.envelope import Node, Role
from kvps.protocol.membership import Figures, OldRound, Sight, Wait

TOLD_MAX_S = 12.0
"""How long what a server told is shown; it tells again every few seconds."""
SET_BY_RANK_0 = ("init()", "set_optimizer()", "set_learning_rate()")
"""Calls in which the other ranks wait until rank 0 has made them."""
WAITS_MAX, RANKS_MAX = 1024, 64
"""Waits, and ranks of each, in one answer."""
NOBODY_LATE: Mapping[str, float] = MappingProxyType({})


class StatusReport:
    """The rounds that the servers of a job have reported."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[float, tuple[OldRound, ...]]] = {}
        """By server: when, and what."""
        self._late: dict[int, Mapping[str, float]] = {}
        """By server: the lateness of each rank, when it told it last."""

    def tell(
        self,
        server: int,
        rounds: tuple[OldRound, ...],
        now: float,
        late: Mapping[str, float] = NOBODY_LATE,
    ) -> None:
        """A server says which rounds are open on it, and how late each rank is."""
        self._told[server], self._late[server] = (now, rounds), late

    def late_s(self, rank: int, seats: Mapping[Node, Seat], now: float) -> float:
        """Return the lateness of a worker, at the server where it is largest."""
        told = self._told.items()
        newest = [server for server, (at, _) in told if self._is_valid(server, at, seats, now)]
        return max([self._late[server].get(str(rank), 0.0) for server in newest], default=0.0)

    def _is_valid(self, server: int, at: float, seats: Mapping[Node, Seat], now: float) -> bool:
        return now - at <= TOLD_MAX_S and seats[Node(Role.SERVER, server)].state is State.HELD

    def rounds(self, seats: Mapping[Node, Seat], now: float) -> tuple[OldRound, ...]:
        """Return the oldest open round of each store, the oldest first."""
        oldest: dict[str, OldRound] = {}
        for server, (at, rounds) in self._told.items():
            if not self._is_valid(server, at, seats, now):
                continue
            for told in rounds:
                stalled = told._replace(server=server, age_s=told.age_s + now - at)
                if stalled.store not in oldest or stalled.age_s > oldest[stalled.store].age_s:
                    oldest[stalled.store] = stalled
        return tuple(sorted(oldest.values(), key=lambda stalled: -stalled.age_s))


def figures(seats: Mapping[Node, Seat], report: StatusReport, now: float) -> tuple[Figures, ...]:
    """Return the figures of every seat, in the order of :func:`sights`; zeros for those that no process holds."""
    shown = []
    for seat in in_order(seats.values()):
        node, is_held = seat.node, seat.state is State.HELD
        is_worker = is_held and node.role is Role.WORKER
        late_s = report.late_s(node.rank, seats, now) if is_worker else 0.0
        numbers = seat.figures if is_held else BeatFigures()
        shown.append(Figures(seat.software, *numbers[:-1], late_s))  # the last is for a launcher
    return tuple(shown)


def waits(
    seats: Mapping[Node, Seat], barriers: Barriers, rounds: Sequence[OldRound], now: float
) -> tuple[Wait, ...]:
    """Return the calls in which workers wait, and the ranks that each waits for, as far as the scheduler knows.

    A worker that stands at no barrier waits for rank 0, if that sets what the others expect, or for those
    whose push an open round lacks.
    """
    found = []
    for seat in in_order(seats.values()):
        waited_s = seat.progress.waited_s(now)
        if seat.state is not State.HELD or waited_s is None:
            continue
        rank, call = seat.node.rank, seat.progress.waits_in
        ranks = barriers.lacking(rank)
        if not ranks and call in SET_BY_RANK_0 and rank:
            ranks = (0,)
        if not ranks:
            ranks = tuple(sorted({missing for each in rounds for missing in each.missing} - {rank}))
        found.append(Wait(rank, call, waited_s, ranks[:RANKS_MAX]))
    return tuple(found[:WAITS_MAX])


def in_order(seats: Iterable[Seat]) -> list[Seat]:
    """Return seats as they are shown, the workers first."""
    return sorted(seats, key=lambda seat: (-seat.node.role, seat.node.rank))


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
            for seat in in_order(seats)
        ]
    )
