"""Standbys: for each server another one that copies its values, and takes its seat when the server is lost.

Theory of operation
-------------------
With ``--replicas 1`` each server has a second seat, its *standby's*::

               a spare gets it          it says that it is level       the server is lost
    empty ──────────────────────► held ─────────────────────────► level ──────────────────► the server's seat
      ▲                            │                                │
      └──────── it is lost, the server dismisses it, or an epoch begins ────────┘

A *spare* is a process, or a part of one, that has asked for such a seat (or for a server's, when none was
free) and waits for it. Each server's process keeps one. A spare never gets the standby's seat of a server
in its own process. It gets one of a server on another host, where there is one.

A standby that is level has all that its server has answered: from then on the server answers nothing that the
standby has not confirmed, until a view shows that the standby is gone, or the standby says that it no longer
is. So a standby that is lost is left out of the view at once, and its process is fenced: it may not come
back, as its server goes on without it.

What is decided here is saved before any member is told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvps.core.effects import Route
from kvps.core.scheduler.membership import Membership
from kvps.core.scheduler.moves import Moves
from kvps.core.scheduler.seat import SEATS_MAX, Seat, State, shortened
from kvps.errors import ConfigError
from kvps.protocol.envelope import Node, Role
from kvps.protocol.membership import Hello, Standing

GATHER_MAX_S = 1.0
"""How long a seat waits for a better spare: one on another host, or of a process with fewer seats."""
AGAIN_S = 10.0
"""How long a server goes without a standby after it has dismissed one."""
PROMOTIONS_MAX = 20
"""The number of promotions that are remembered."""
SPARES_MAX = SEATS_MAX


class Promoted(NamedTuple):
    """A standby that has taken its server's seat."""

    at: float
    rank: int
    incarnation: int
    who: str
    """HOST:PID of its process."""


@dataclass(slots=True)
class Spare:
    """A process that waits for a standby's seat."""

    hello: Hello
    since: float

    @property
    def process(self) -> tuple[str, int]:
        """Its host and process id, which the parts of one process share."""
        return self.hello.host, self.hello.pid


class Standbys:
    """The seats of standbys in a job, and the spares; it decides, and sends nothing."""

    def __init__(self, seats: Membership) -> None:
        self.seats = seats
        self.moves = Moves(seats)
        self.spares: dict[Route, Spare] = {}
        """By route, in the order in which they came."""
        self.promotions: deque[Promoted] = deque(maxlen=PROMOTIONS_MAX)
        self.gather_until: float | None = None
        """Until when empty seats wait for better spares; None where none is empty."""
        self.due: float | None = None
        """When :meth:`assign` may give a seat for which it waits."""
        self._missed: set[int] = set()
        """The incarnations of lost servers whose standby could not take their seat, as was said."""
        self._not_before: dict[int, float] = {}
        """By rank of a server whose standby it has dismissed: when it gets another."""

    @property
    def is_on(self) -> bool:
        """Whether servers have standbys: in a job with copies, or while a seat is moved."""
        return bool(self.seats.settings.replicas or self.moves.orders or any(self.all()))

    # --- spares -----------------------------------------------------------------------------

    def offer(self, route: Route, hello: Hello, now: float) -> None:
        """A process wants to be a standby.

        Raises:
            ConfigError: if the servers of the job are of another version.
        """
        versions = sorted({seat.software for seat in self._servers() if seat.software})
        if versions and hello.software not in versions:
            raise ConfigError(
                f"the servers of the job are kvps {', '.join(versions)}, and {hello.host}:{hello.pid} is "
                f"kvps {hello.software}: a standby must be of the version of its server"
            )
        known = self.spares.get(route)
        if known is None and len(self.spares) >= SPARES_MAX:
            del self.spares[next(iter(self.spares))]  # the next HELLO of the oldest is a new offer
        self.spares[route] = Spare(hello, now if known is None else known.since)

    def withdraw(self, route: Route) -> None:
        """A spare's connection broke."""
        self.spares.pop(route, None)

    # --- losses -----------------------------------------------------------------------------

    def promote(self, seat: Seat, now: float, *, moves: bool = False) -> Seat | None:
        """Give the seat of a lost server, or of one that ``moves``, to its standby; None where that is not
        level, or absent."""
        standby = self.of(seat)
        if standby is None or standby.state is not State.HELD or not standby.is_level:
            return None
        self.seats.give(standby, seat.node)
        self.moves.settle(standby, now, moves=moves)
        if not moves:
            who = f"{standby.host}:{standby.pid}"
            self.promotions.append(Promoted(now, seat.node.rank, standby.incarnation, who))
        return standby

    def fallen(self) -> list[Seat]:
        """Return the servers that are lost."""
        lost = [seat for seat in self._servers() if seat.state in (State.LOST, State.GONE)]
        return [seat for seat in lost if Node(Role.STANDBY, seat.node.rank) in self.seats.by_node]

    def clear_lost(self) -> list[Seat]:
        """Empty the seats of standbys that are lost; return what they were."""
        return [self.clear(seat) for seat in self.all() if seat.state not in (State.EMPTY, State.HELD)]

    def clear(self, seat: Seat) -> Seat:
        """Empty the seat of a standby, whose process is fenced from then on; return what it was."""
        self.seats.vacate(seat.node)
        return seat

    # --- seats that move --------------------------------------------------------------------

    def of(self, server: Seat) -> Seat | None:
        """Return the seat of a server's standby; None if it has none."""
        return self.seats.by_node.get(Node(Role.STANDBY, server.node.rank))

    def ready_to_move(self) -> Seat | None:
        """Return a server that is to be moved, and whose standby is level in a process that may hold it."""
        for server in self.moves.seats_to_move():
            copy = self.of(server)
            if copy is not None and copy.is_level and self.moves.may_take(copy.process, server):
                return server
        return None

    def misplaced(self, moving: list[Seat]) -> list[Node]:
        """Return the standbys that are in a way: they lie in a process that is drained, or that is to hold no
        more seats while another waits for one."""
        leaving, found = self.moves.leaving, []
        for copy in self.all():
            server, is_held = self.server_of(copy), copy.state is State.HELD
            is_barred = server in moving and not self.moves.may_take(copy.process, server)
            waits = any(self._may_follow(spare, server) for spare in self.spares.values())
            if is_held and (copy.process in leaving or (is_barred and waits)):
                found.append(copy.node)
        return found

    # --- seats for spares -------------------------------------------------------------------

    def defer(self, rank: int, now: float) -> None:
        """The server of this rank could not go on with its standby: it gets another after a while."""
        self._not_before[rank] = now + AGAIN_S

    def assign(self, now: float) -> list[Seat]:
        """Give spares the empty seats of standbys; return these seats."""
        given: list[Seat] = []
        needy = [seat for seat in self._servers() if self._needs(seat)]
        self.due = None
        if not needy:
            self.gather_until = None
            return given
        if self.gather_until is None:
            self.gather_until = now + GATHER_MAX_S
        for server in needy:
            candidates = [route for route, spare in self.spares.items() if self._may_follow(spare, server)]
            if not candidates:
                continue
            if (at := self._not_before.get(server.node.rank, now)) > now:
                self._wait_until(at)
                continue
            cost, best = min((self._cost(self.spares[route].process, server), route) for route in candidates)
            if now < self.gather_until and self._may_come(server, cost):
                self._wait_until(self.gather_until)
                continue
            hello = self.spares.pop(best).hello
            seat = self.seats.seat_standby(best, hello, Node(Role.STANDBY, server.node.rank), now)
            given.append(seat)
        return given

    def _wait_until(self, at: float) -> None:
        self.due = at if self.due is None else min(self.due, at)

    def _needs(self, server: Seat) -> bool:
        """Whether a server is here, and its standby is not."""
        standby = self.of(server)
        return standby is not None and server.state is State.HELD and standby.state is State.EMPTY

    def _may_follow(self, spare: Spare, server: Seat) -> bool:
        is_other = spare.process != server.process and self.moves.may_take(spare.process, server)
        return is_other and server.software in ("", spare.hello.software)

    def _cost(self, process: tuple[str, int], server: Seat) -> tuple[bool, int, int]:
        """Sort key of processes for a server: on another host, with few seats, then the next by rank."""
        held = [
            seat
            for seat in (*self._servers(), *self.all())
            if seat.state is State.HELD and seat.process == process
        ]
        count = self.seats.settings.servers
        ranks = [(seat.node.rank - server.node.rank - 1) % count for seat in held]
        return process[0] == server.host, len(held), min(ranks, default=0)

    def _may_come(self, server: Seat, cost: tuple[bool, int, int]) -> bool:
        """Whether a spare of a process that has none yet would be better by host or by number of seats."""
        waiting = {spare.process for spare in self.spares.values()}
        others = {*self.moves.holders()} - waiting - {server.process}
        others = {process for process in others if self.moves.may_take(process, server)}
        return any(self._cost(process, server) < cost for process in others)

    # --- what is told -----------------------------------------------------------------------

    def hear(self, seat: Seat, standing: Standing) -> bool:
        """Take in the word of a standby, or of a server about it; return whether that changes the view."""
        standby = self.of(seat)
        if seat.node.role is Role.SERVER:
            seat.standing = standing
            return standby is not None and 0 != standing.dismiss == standby.incarnation
        was_level, seat.is_level = seat.is_level, standing.level
        seat.standing = standing
        return seat.is_level != was_level

    def miss(self, server: Seat) -> str:
        """Add to a lost server's reason why its standby cannot take its seat; return it the first time."""
        if server.incarnation in self._missed:
            return ""
        self._missed.add(server.incarnation)
        standby = self.seats.by_node[Node(Role.STANDBY, server.node.rank)]
        why = "it had no standby"
        if standby.state is State.HELD:
            why = f"its standby had copied {standby.standing.copied} %"
        if reason := self.why_not_level(standby):
            why += f" ({reason})"
        server.reason = shortened(f"{server.reason}; {why}")
        return why

    def why_not_level(self, standby: Seat) -> str:
        """Return why a copy cannot become level, as the standby or else its server says; empty if it can."""
        return "" if standby.is_level else standby.standing.reason or self.server_of(standby).standing.reason

    def server_of(self, standby: Seat) -> Seat:
        """Return the server that a standby follows."""
        return self.seats.by_node[standby.speaker]

    def all(self) -> Iterator[Seat]:
        """Yield the seats of standbys, by rank."""
        return (seat for seat in self.seats.by_node.values() if seat.node.role is Role.STANDBY)

    def _servers(self) -> Iterator[Seat]:
        return (seat for seat in self.seats.by_node.values() if seat.node.role is Role.SERVER)
