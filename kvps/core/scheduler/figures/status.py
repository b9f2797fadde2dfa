"""The reply to a status query: every seat, the oldest open round of each store, publications and hot rows.

The scheduler is not on the data path, so servers tell it of publications, hot rows and rounds that stay open.
A report is valid for a few seconds; after that, a silent server counts as having none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from operator import itemgetter

from kvps import protocol as p
from kvps.core.membership_client import BeatFigures
from kvps.core.scheduler.barriers import Barriers
from kvps.core.scheduler.seat import Seat, State
from kvps.core.scheduler.standbys import Standbys
from kvps.protocol.envelope import Node, Role

TOLD_MAX_S = 12.0
"""How long what a server told is shown; it tells again every few seconds."""
SET_BY_RANK_0 = ("init()", "set_optimizer()", "set_learning_rate()")
"""Calls in which the other ranks wait until rank 0 has made them."""
WAITS_MAX, RANKS_MAX, PUBLICATIONS_MAX, TABLES_MAX = 1024, 64, 64, 64
"""Waits, ranks of each, publications, and tables with hot rows in one answer."""


class StatusReport:
    """The figures that the servers of a job have told unasked."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[float, p.Measured]] = {}
        """By server: when it told its figures unasked, and the figures."""

    def tell(self, server: int, measured: p.Measured, now: float) -> None:
        """Take in what a server told."""
        self._told[server] = now, measured

    def late_s(self, rank: int, seats: Mapping[Node, Seat], now: float) -> float:
        """Return the lateness of a worker, at the server where it is largest."""
        late_s = [told.late.get(str(rank), 0.0) for _, _, told in self._valid(seats, now)]
        return max(late_s, default=0.0)

    def rounds(self, seats: Mapping[Node, Seat], now: float) -> tuple[p.OldRound, ...]:
        """Return the oldest open round of each store, the oldest first."""
        oldest: dict[str, p.OldRound] = {}
        for server, at, measured in self._valid(seats, now):
            for told in measured.rounds:
                round_ = told._replace(server=server, age_s=told.age_s + now - at)
                if round_.store not in oldest or round_.age_s > oldest[round_.store].age_s:
                    oldest[round_.store] = round_
        return tuple(sorted(oldest.values(), key=lambda round_: -round_.age_s))

    def publications(self, seats: Mapping[Node, Seat], now: float) -> tuple[p.PublicationFigures, ...]:
        """Return the publications by name; a reader uses a version on all servers, and is counted once."""
        found: dict[str, p.PublicationFigures] = {}
        for _, at, measured in self._valid(seats, now):
            for told in measured.publications:
                here = told._replace(age_s=told.age_s + now - at)
                other = found.get(here.name, here._replace(size=0))
                newer = max(here, other, key=lambda each: (each.version, -each.age_s))
                readers = {**(Counter(here.readers) | Counter(other.readers))}
                found[here.name] = newer._replace(size=here.size + other.size, readers=readers)
        return tuple([found[name] for name in sorted(found)[:PUBLICATIONS_MAX]])

    def hot_rows(self, seats: Mapping[Node, Seat], now: float) -> tuple[p.HotRows, ...]:
        """Return the most used rows of each table; a row is on one server."""
        found: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(dict)
        for _, _, measured in self._valid(seats, now):
            for told in measured.hot_rows:
                found[told.store, told.table].update(told.uses)
        return tuple(
            [
                p.HotRows(*name, dict(nlargest(p.HOT_ROWS_MAX, found[name].items(), key=itemgetter(1))))
                for name in sorted(found)[:TABLES_MAX]
            ]
        )

    def _valid(self, seats: Mapping[Node, Seat], now: float) -> Iterator[tuple[int, float, p.Measured]]:
        """Yield each server that is held and has told its figures of late, when, and the figures."""
        for server, (at, measured) in self._told.items():
            if now - at <= TOLD_MAX_S and seats[Node(Role.SERVER, server)].state is State.HELD:
                yield server, at, measured


def figures(seats: Mapping[Node, Seat], report: StatusReport, now: float) -> tuple[p.Figures, ...]:
    """Return the figures of every seat, in the order of :func:`sights`; zeros for those that no
    process holds."""
    shown = []
    for seat in in_order(seats.values()):
        node, is_held = seat.node, seat.state is State.HELD
        is_worker = is_held and node.role is Role.WORKER
        late_s = report.late_s(node.rank, seats, now) if is_worker else 0.0
        numbers = seat.figures if is_held else BeatFigures()
        shown.append(
            p.Figures(
                seat.software,
                numbers.rounds,
                numbers.in_bytes,
                numbers.out_bytes,
                numbers.memory_bytes,
                numbers.limit_bytes,
                late_s,
            )
        )
    return tuple(shown)


def waits(
    seats: Mapping[Node, Seat], barriers: Barriers, rounds: Sequence[p.OldRound], now: float
) -> tuple[p.Wait, ...]:
    """Return the calls in which workers wait, and the ranks that each waits for, as far as the
    scheduler knows.

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
        found.append(p.Wait(rank, call, waited_s, ranks[:RANKS_MAX]))
    return tuple(found[:WAITS_MAX])


def copies(standbys: Standbys) -> tuple[p.Copy, ...]:
    """Return how the copy of each server stands; nothing in a job without copies."""
    own = standbys.all() if standbys.seats.settings.replicas else ()
    return tuple(
        [
            p.Copy(
                seat.node.rank,
                seat.shown_state,
                f"{seat.host}:{seat.pid}" if seat.state is State.HELD else "",
                100 if seat.is_level else seat.standing.copied,
                standbys.server_of(seat).standing.behind_bytes if seat.is_level else 0,
                standbys.why_not_level(seat),
            )
            for seat in own
        ]
    )


def promotions(standbys: Standbys, now: float) -> tuple[p.Promotion, ...]:
    """Return the newest promotions."""
    return tuple(
        [p.Promotion(rank, incarnation, who, now - at) for at, rank, incarnation, who in standbys.promotions]
    )


def moves(standbys: Standbys, now: float) -> tuple[p.Move, ...]:
    """Return the newest moves of seats, and those under way."""
    ours, copies = standbys.moves, {seat.node.rank: seat for seat in standbys.all() if seat.pid}
    over = [p.Move(rank, who, now - at, took_s, True) for at, rank, who, took_s in ours.moved]
    return *over, *[
        p.Move(
            rank, f"{copies[rank].host}:{copies[rank].pid}" if rank in copies else "", now - since, 0.0, False
        )
        for rank, since in ours.begun.items()
    ]


_ORDER = {Role.WORKER: 0, Role.SERVER: 1, Role.STANDBY: 2}


def in_order(seats: Iterable[Seat]) -> list[Seat]:
    """Return seats as they are shown, the workers first."""
    return sorted(seats, key=lambda seat: (_ORDER[seat.node.role], seat.node.rank))


def sights(seats: Iterable[Seat], now: float) -> tuple[p.Sight, ...]:
    """Return every seat as it is shown, the workers first.

    Where servers listen is told to members only.
    """
    return tuple(
        [
            p.Sight(
                int(seat.node.role),
                seat.node.rank,
                seat.incarnation,
                seat.shown_state,
                seat.host,
                seat.pid,
                "",
                now - seat.heard_at if seat.state is not State.EMPTY else 0.0,
                seat.presence(now),
            )
            for seat in in_order(seats)
        ]
    )
