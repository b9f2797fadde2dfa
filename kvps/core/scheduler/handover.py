"""Seats of servers that change hands: by a loss, as a standby goes on, or by an order, as they move.

:mod:`kvps.core.scheduler.standbys` and :mod:`kvps.core.scheduler.moves` decide who is to hold which seat.
This file carries it out in the job: it gives seats, tells members, and lets spares go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvps.core.counts import Counts
from kvps.core.effects import Route
from kvps.core.liveness import SUSPECTED_AFTER_S
from kvps.core.scheduler.barriers import Waiter
from kvps.core.scheduler.figures.fault_log import FaultLog
from kvps.core.scheduler.membership import Membership
from kvps.core.scheduler.moves import Order
from kvps.core.scheduler.phase import Phase
from kvps.core.scheduler.seat import Seat, Settings, State
from kvps.core.scheduler.standbys import Standbys
from kvps.errors import ConfigError, KvpsError, ServerLost
from kvps.protocol.envelope import Message, Node, Role
from kvps.protocol.membership import Beat, Done, Error, Hello, Standing, Stop

SERVERS = 7
"""The ticket that tells how many processes of servers are to run: those that hold seats in the end, and those
that are being drained."""
SUSPECT = 5
"""The ticket that asks whether somebody listens at the endpoint of a :class:`Suspect`; the answer, if nobody
does, is :meth:`~kvps.core.scheduler.scheduler.Scheduler.on_ended`. Asked only in a job with copies."""
STOPPED = 0
"""The exit code of a process that is told to stop since it is needed no more."""


class Suspect(NamedTuple):
    """A server, or a standby, whose connection broke or which is silent, and where it listens."""

    rank: int
    incarnation: int
    endpoint: str
    is_silent: bool = False
    """Its connection is whole: its host may be gone, or the process has stopped for a moment."""


class Job(Protocol):
    """The part of a :class:`~kvps.core.scheduler.job.Job` that is needed here."""

    settings: Settings
    seats: Membership
    standbys: Standbys
    formed: bool
    phase: Phase
    reason: str
    counts: Counts
    fault_log: FaultLog

    def send(self, route: Route, message: Message) -> None:
        """Send a message along one route."""

    def note(self, level: str, text: str, **fields: object) -> None:
        """Report a fact."""

    def report(self, ticket: int, value: object) -> None:
        """Tell the process of the scheduler what it waits for."""

    def meet(self, now: float) -> None:
        """Tell the checkpoints which members are present."""

    def tell_lost(self, seat: Seat, now: float) -> None:
        """Report a loss."""

    def apply_changes(self, now: float) -> None:
        """Draw the consequences of a change of seats."""

    def schedule(self) -> None:
        """Look when something is due."""


class Handover:
    """The changes of the holders of servers' seats, and of the seats of their standbys.

    Args:
        job: what the seats are of.
    """

    def __init__(self, job: Job) -> None:
        self.job = job

    @property
    def standbys(self) -> Standbys:
        """The seats of standbys, and the spares."""
        return self.job.standbys

    def promote(self, now: float) -> None:
        """Give the seats of lost servers to standbys that are level; leave out standbys that are lost."""
        ours = self.standbys
        for seat in ours.clear_lost():
            self.job.note(
                "warning", f"the standby of server {seat.node.rank} is lost ({seat.reason}): it has no copy"
            )
        for server in ours.fallen() if self.job.formed else ():
            self.job.meet(now)  # a cut that is being made ends here: the standby has no image of it
            if (standby := ours.promote(server, now)) is None:
                if why := ours.miss(server):
                    self.job.note("warning", f"nobody takes the place of {server.node}: {why}")
                continue
            who = f"{standby.host}:{standby.pid}"
            text = f"{server.node} is lost ({server.reason}): its standby {who} goes on in its place"
            self.job.note("warning", text, member=str(server.node), state="promoted")
            self.job.fault_log.promoted(server.node, who, now)
            self.job.counts.add("kvps_promotions_total")

    # --- seats that move --------------------------------------------------------------------

    def drain(self, seat: Seat, waiter: Waiter, within_s: float, now: float, *, by_itself: bool) -> None:
        """The process that holds a seat is to hand all of its seats to others.

        Raises:
            ConfigError: if that cannot be.
        """
        self._demand_movable()
        spares = [spare.process for spare in self.standbys.spares.values()]
        others = {*self.standbys.moves.holders(), *spares} if by_itself else None
        if self.standbys.moves.drain(seat, waiter, within_s, now, others):
            self.job.note("info", f"{seat.host}:{seat.pid} is drained: others take the seats that it holds")
            for route in [at for at, spare in self.standbys.spares.items() if spare.process == seat.process]:
                self._part(route, "its process is drained")
            self._begin_to_move(now)

    def scale(self, servers: int, waiter: Waiter, within_s: float, now: float) -> None:
        """So many processes are to hold the seats of servers.

        Raises:
            ConfigError: if they cannot.
        """
        self._demand_movable()
        leaving = self.standbys.moves.leaving
        if self.standbys.moves.scale(servers, waiter, within_s, now):
            self.job.note("info", f"the seats of servers are spread over {servers} processes")
            self.job.report(SERVERS, servers + len(leaving))
            self._begin_to_move(now)

    def _demand_movable(self) -> None:
        if self.job.phase is not Phase.RUNNING:
            raise ConfigError(f"the job does not run ({self.job.reason}), so no seat can be handed over")
        working = {seat.process for seat in self.job.seats.by_node.values() if seat.node.role is Role.WORKER}
        for process, seats in self.standbys.moves.holders().items():
            if process in working:
                raise ConfigError(
                    f"{seats[0].node} is a thread of a worker's process, as in a LocalCluster: its seat is "
                    "not moved. Start a job whose servers come and go with kvps-launch"
                )

    def _begin_to_move(self, now: float) -> None:
        for seat in self.standbys.moves.seats_to_move():
            copy = self.standbys.of(seat)
            if copy is not None and (why := self.standbys.why_not_level(copy)):
                self._give_up(seat, why)
        self.job.apply_changes(now)

    def _part(self, route: Route, why: str) -> None:
        """Let a spare go."""
        self.job.send(route, Stop(STOPPED, why))
        self.standbys.withdraw(route)

    def move(self, now: float) -> None:
        """Hand over the seats whose next holder is level, and see what else is to move."""
        ours, seats = self.standbys.moves, self.job.seats
        while ready := self.standbys.ready_to_move():
            self._hand_over(ready, now)
        moving = ours.seats_to_move()
        for seat in moving if self.job.settings.replicas else moving[:1]:
            ours.begun.setdefault(seat.node.rank, now)
            if self.standbys.of(seat) is None:
                seats.want_standby(seat.node.rank)
                seat.standing = Standing()
        if misplaced := self.standbys.misplaced(moving):
            self.dismiss(misplaced, "another process is to hold the seat")
        for order, why in ours.finished():
            self.tell_of(order, ServerLost(why) if why else None)
        ours.forget()
        if not self.job.settings.replicas:
            kept = {seat.node.rank for seat in ours.seats_to_move()[:1]}
            for node in [each.node for each in self.standbys.all() if each.node.rank not in kept]:
                self.dismiss([node], "no seat is moved any more")
                del seats.by_node[node]
            for route in list(self.standbys.spares) if not ours.orders else ():
                self._part(route, "no seat is moved any more")

    def _hand_over(self, server: Seat, now: float) -> None:
        """Give a seat to its standby, which has all, and tell its holder to stop."""
        server.lose("another process has its seat", now)
        self.job.meet(now)  # a cut that is being made ends here: the standby has no image of it
        routes = list(server.links)
        standby = self.standbys.promote(server, now, moves=True)
        assert standby is not None
        who = f"{standby.host}:{standby.pid}"
        for route in routes:
            self.job.send(route, Stop(STOPPED, f"{server.node} is at {who} from now on"))
        took_s = self.standbys.moves.moved[-1].took_s
        text = f"{server.node} has moved from {server.host}:{server.pid} to {who} in {took_s:.1f} s"
        self.job.note("info", text, member=str(server.node), state="moved")
        self.job.counts.add("kvps_moves_total")

    def tell_of(self, order: Order, error: KvpsError | None) -> None:
        """Answer the members and operators that have asked for seats to be moved."""
        if error is not None:
            self.job.note("warning", f"{order.what}: {error}")
        for route, seq, *_ in order.waiters:
            self.job.send(route, Done(seq) if error is None else Error(seq, error.code, str(error)))

    def assign(self, now: float) -> bool:
        """Give spares the empty seats of standbys, while the job runs; return whether one was given."""
        given = self.standbys.assign(now) if self.job.phase is Phase.RUNNING else []
        for seat in given:
            self.job.note("info", f"{seat.host}:{seat.pid} becomes the standby of server {seat.node.rank}")
        return bool(given)

    def may_be_spare(self, hello: Hello) -> bool:
        """Whether a server that joins a job with copies finds no seat, as all are held."""
        wanted = self.job.seats.wanted(hello)
        is_server = bool(self.standbys.is_on and self.job.formed and hello.role == Role.SERVER and wanted)
        return is_server and all(seat.links and not seat.is_free_for(hello) for seat in wanted)

    def offer(self, route: Route, hello: Hello, now: float) -> None:
        """A process wants the seat of a standby; it is told to wait if it does not get one at once.

        Raises:
            ConfigError: if it cannot be one in this job.
        """
        if (hello.host, hello.pid) in (*self.standbys.moves.leaving, *self.standbys.moves.parted):
            self.job.send(route, Stop(STOPPED, "its process is drained"))
            return
        if not self.standbys.is_on:
            raise ConfigError(
                "the servers of this job have no standbys: start kvps-scheduler with --replicas 1"
            )
        self.standbys.offer(route, hello, now)
        if self.assign(now):
            self.job.apply_changes(now)
        else:
            self.job.send(route, Beat(0, "a spare: it waits until a server has no standby"))
            self.job.schedule()

    def drop(self, route: Route, now: float) -> None:
        """A connection broke; if it was the last one of a server or standby, ask whether that has ended."""
        seat = self.job.seats.routes.get(route)
        self.job.seats.drop(route, now)
        if self.standbys.is_on:
            self.standbys.withdraw(route)
            if seat is not None and seat.dropped_at == now and seat.node.role is not Role.WORKER:
                self.look_into(seat, is_silent=False)

    def end_of(self, rank: int, incarnation: int, now: float) -> None:
        """Nobody listens where a server or standby did whose connection broke, or which is silent."""
        for node in (Node(Role.SERVER, rank), Node(Role.STANDBY, rank)):
            seat = self.job.seats.by_node.get(node)
            if seat is None or seat.incarnation != incarnation:
                continue
            if seat.dropped_at is not None:
                seat.lose("its process has ended", now)
            elif seat.state is State.HELD and now >= seat.heard_at + SUSPECTED_AFTER_S:
                seat.lose(f"silent for {now - seat.heard_at:.1f} s, and its host does not answer", now)
            else:
                continue
            self.job.tell_lost(seat, now)
            self.job.apply_changes(now)

    def look_into(self, seat: Seat, is_silent: bool) -> None:
        suspect = Suspect(seat.node.rank, seat.incarnation, seat.endpoint, is_silent)
        self.job.report(SUSPECT, suspect)

    def hear_of_copy(self, seat: Seat, standing: Standing, now: float) -> None:
        """A standby says how its copy stands, or a server that it cannot go on with its standby."""
        before, rank = seat.standing.reason, seat.node.rank
        has_changed = self.standbys.hear(seat, standing)
        is_new = standing.reason not in ("", before) and not standing.dismiss
        if is_new and self.job.settings.replicas:
            self.job.note(
                "warning",
                f"no standby can take the place of server {rank}: {standing.reason}; a loss of server {rank} "
                "ends as without --replicas",
            )
        if has_changed and seat.node.role is Role.STANDBY:
            how = "is level: 2 of 2 copies" if seat.is_level else "is not level any more: 1 of 2 copies"
            self.job.note("info", f"the standby of server {rank} ({seat.host}:{seat.pid}) {how}")
            # Whether their hosts answer is known only if they did.
            for known in (seat, self.standbys.server_of(seat)) if self.job.settings.replicas else ():
                self.look_into(known, is_silent=True)
        elif has_changed:
            self.standbys.defer(rank, now)
            self.dismiss([Node(Role.STANDBY, rank)], standing.reason)
        if (is_new and self._give_up(seat, standing.reason)) or has_changed:
            self.job.apply_changes(now)

    def _give_up(self, seat: Seat, reason: str) -> bool:
        """A server cannot be copied, or this process cannot hold it; return whether its seat was to move."""
        rank = seat.node.rank
        given_up = self.standbys.moves.give_up(rank)
        for order in given_up:
            text = f"the seat of server {rank} cannot be handed over: {reason}. The job goes on as before"
            self.tell_of(order, ConfigError(text))
        return bool(given_up)

    def dismiss(self, nodes: Sequence[Node], reason: str) -> None:
        """Let standbys go: their processes are told to stop, and others may get their seats."""
        for node in nodes:
            seat = self.job.seats.by_node[node]
            if seat.state is State.EMPTY:
                continue
            text = f"the standby of server {node.rank} is dismissed: {reason}"
            for route in seat.links:
                self.job.send(route, Stop(STOPPED, text))
            self.standbys.clear(seat)
            self.job.note("warning", text)
