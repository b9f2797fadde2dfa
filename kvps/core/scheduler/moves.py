"""Moves: the seats of servers that other processes are to hold, as ``kvps drain`` and ``kvps scale`` ask.

Theory of operation
-------------------
What moves is a *seat*, so neither the number of servers nor the place of any key changes. The process that is
to hold it becomes the standby of the server, copies its values, and gets the seat once it is level::

    order ──► row of a standby, empty ──► held ──► level ──► the server's seat; the former holder stops
                   ▲                       │
                   └── the target is lost ─┘

In a job with copies the standbys are there already. In one without, the row is there for one seat at a time,
and only as long as that moves; a server that sees it does its part in
:mod:`kvps.core.server.replicas.handover`.

An order lives in memory only. After a restart of the scheduler its sender asks again; until then a copy that
was being made is dropped, and its server goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from kvps.core.scheduler.barriers import Waiter
from kvps.core.scheduler.membership import Membership
from kvps.core.scheduler.seat import Seat, State
from kvps.errors import ConfigError
from kvps.protocol.envelope import Node, Role

Process = tuple[str, int]
"""Host and process id, which the parts of one process share."""
MOVES_MAX, PARTED_MAX = 20, 64
"""The number of moves, and of processes that have handed over all, that are remembered."""


class Moved(NamedTuple):
    """A seat that another process holds now."""

    at: float
    rank: int
    who: str
    """HOST:PID of that process."""
    took_s: float
    """Since both were known: that it is to be moved, and where to."""


@dataclass(slots=True)
class Order:
    """A request to move seats."""

    what: str
    within_s: float
    until: float
    leaving: frozenset[Process] = frozenset()
    """The processes that are to hold no seat."""
    ranks: set[int] = field(default_factory=set)
    """The seats of theirs that are still to be moved."""
    servers: int = 0
    """So many processes are to hold the seats; 0 if only those that leave count."""
    waiters: dict[Waiter, None] = field(default_factory=dict)


class Moves:
    """The orders to move seats; it decides, and sends nothing."""

    def __init__(self, seats: Membership) -> None:
        self.seats = seats
        self.orders: list[Order] = []
        self.moved: deque[Moved] = deque(maxlen=MOVES_MAX)
        self.parted: deque[Process] = deque(maxlen=PARTED_MAX)
        """The processes that have handed over all: they end, and get no seat again."""
        self.begun: dict[int, float] = {}
        """By rank of a server that is being moved: since when."""

    def holders(self) -> dict[Process, list[Seat]]:
        """Return the seats of servers that are held, by process."""
        found: dict[Process, list[Seat]] = {}
        for seat in self.seats.by_node.values():
            if seat.node.role is Role.SERVER and seat.state is State.HELD:
                found.setdefault(seat.process, []).append(seat)
        return found

    @property
    def leaving(self) -> set[Process]:
        """The processes that hand over what they hold."""
        return {process for order in self.orders for process in order.leaving}

    # --- orders -----------------------------------------------------------------------------

    def drain(
        self, seat: Seat, waiter: Waiter, within_s: float, now: float, others: Collection[Process] | None
    ) -> bool:
        """A process is to hold no seat; return whether that is a new order.

        Args:
            seat: one that it holds.
            waiter: who is told when it does not.
            within_s: how long it may take.
            now: the time.
            others: where the process itself asks: the other processes that might take its seats.

        Raises:
            ConfigError: if that cannot be.
        """
        process = seat.process
        for order in self.orders:
            if process in order.leaving:
                order.waiters[waiter] = None
                return False
        if others is not None and not {*others} - self.leaving - {process}:
            raise ConfigError(
                f"no other process can take the seat of {seat.node}: the values that it holds end with it"
            )
        leaving = frozenset([process])
        self._add(Order(f"drain {seat.node}", within_s, now + within_s, leaving, waiters={waiter: None}))
        return True

    def scale(self, servers: int, waiter: Waiter, within_s: float, now: float) -> bool:
        """So many processes are to hold the seats of servers; return whether that is a new order.

        Raises:
            ConfigError: if they cannot.
        """
        what, count = f"scale to {servers}", self.seats.settings.servers
        for order in self.orders:
            if order.what == what:
                order.waiters[waiter] = None
                return False
        if other := [order.what for order in self.orders if order.servers]:
            raise ConfigError(f"{other[0]} is under way: {what} when that is done")
        if not 1 <= servers <= count:
            raise ConfigError(
                f"cannot {what}: this job has {count} seats of servers, which 1 to {count} processes can "
                f"hold. {self.seats.settings.advice}"
            )
        holders, leaving = self.holders(), self.leaving
        stay = [process for process in holders if process not in leaving]
        order_of = sorted(stay, key=lambda host: (len(holders[host]), -holders[host][0].node.rank))
        too_many = frozenset(order_of[: max(0, len(stay) - servers)])
        self._add(Order(what, within_s, now + within_s, too_many, servers=servers, waiters={waiter: None}))
        return True

    def _add(self, order: Order) -> None:
        holders = self.holders()
        order.ranks = {seat.node.rank for process in order.leaving for seat in holders.get(process, ())}
        self.orders.append(order)

    # --- what is to move --------------------------------------------------------------------

    def seats_to_move(self) -> list[Seat]:
        """Return the seats that are to be moved now, the first first."""
        holders, leaving = self.holders(), self.leaving
        found = [seat for process, seats in holders.items() if process in leaving for seat in seats]
        if not found and any(order.servers for order in self.orders) and not self._is_spread(holders):
            found = max(holders.values(), key=len)[-1:]
        return found

    def _is_spread(self, holders: dict[Process, list[Seat]]) -> bool:
        """Whether enough processes hold seats, none of them leaves, and none could give a seat to another."""
        if not holders.keys().isdisjoint(self.leaving):
            return False
        wanted = max(order.servers for order in self.orders)
        counts = [len(seats) for seats in holders.values()]
        return not counts or (len(counts) >= wanted and max(counts) - min(counts) < 2)

    def may_take(self, process: Process, server: Seat) -> bool:
        """Whether a process may become the holder of this seat, or of its copy."""
        leaving = self.leaving
        if process in leaving or process in self.parted:
            return False
        if not self.orders or server.process in leaving:
            return True
        holders = self.holders()  # to spread seats
        return len(holders.get(process, ())) + 2 <= len(holders[server.process])

    def settle(self, server: Seat, now: float, *, moves: bool) -> None:
        """A seat has another holder, as it ``moves`` or as the former one was lost."""
        rank = server.node.rank
        for order in self.orders:
            order.ranks.discard(rank)
        if not moves:
            return
        took_s = now - max(self.begun.pop(rank, now), server.taken_at or 0.0)
        self.moved.append(Moved(now, rank, f"{server.host}:{server.pid}", took_s))

    def forget(self) -> None:
        """Forget since when seats are moved that are not any more."""
        moving = {seat.node.rank for seat in self.seats_to_move()}
        self.begun = {rank: since for rank, since in self.begun.items() if rank in moving}

    # --- how orders end ---------------------------------------------------------------------

    def finished(self) -> list[tuple[Order, str]]:
        """Take out the orders that are carried out, or cannot be any more; return them and why not."""
        ended: list[tuple[Order, str]] = []
        holders = self.holders()
        held = {
            seat.process
            for seat in self.seats.by_node.values()
            if seat.node.role is not Role.WORKER and seat.state is State.HELD
        }
        for order in list(self.orders):
            lost = [rank for rank in order.ranks if self._is_lost(rank, order)]
            why = f"server {lost[0]} was lost before another process had all of its values" if lost else ""
            is_done = not held & order.leaving and (not order.servers or self._is_spread(holders))
            if lost or is_done:
                self.orders.remove(order)
                self.parted.extend(order.leaving)
                ended.append((order, why))
        return ended

    def _is_lost(self, rank: int, order: Order) -> bool:
        seat = self.seats.by_node[Node(Role.SERVER, rank)]
        return seat.state is not State.HELD or seat.process not in order.leaving

    def overdue(self, now: float) -> list[tuple[Order, str]]:
        """Take out the orders whose time is over; return them and why they were not carried out."""
        late = [order for order in self.orders if now >= order.until]
        told = [(order, f"it has taken more than {order.within_s:g} s: {self._why(order)}") for order in late]
        self.orders = [order for order in self.orders if order not in late]
        return told

    def _why(self, order: Order) -> str:
        moving = [seat for seat in self.seats_to_move() if seat.node.rank in order.ranks or not order.ranks]
        rank = moving[0].node.rank
        copy = self.seats.by_node.get(Node(Role.STANDBY, rank))
        if copy is None or copy.state is not State.HELD:
            return f"no process is there that may take the seat of server {rank}: start kvps-server"
        return (
            f"{copy.host}:{copy.pid} has not taken the seat of server {rank}, as it lacks values, or as "
            "rounds stay open ('kvps status' shows the ranks that they wait for)"
        )

    def give_up(self, rank: int) -> list[Order]:
        """Take out the orders that this server's seat is to be moved for."""
        moving = {seat.node.rank for seat in self.seats_to_move()}
        given_up = [order for order in self.orders if rank in (order.ranks or moving)]
        self.orders = [order for order in self.orders if order not in given_up]
        return given_up

    @property
    def due(self) -> float | None:
        """When the next order is overdue."""
        return min([order.until for order in self.orders], default=None)
