"""A whole job in the calling thread: the cores of a scheduler, a server and a worker, and no other
copy of their rules.

There is no thread and no socket. A call goes to the worker's core, and the cores are passed each
other's packets until the call has ended. Where no packet is left and the call still waits, nothing
else could end it: its time passes at once, up to its timeout. Between calls no more than a second
passes, so that a pause does not count as silence.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch._C import DisableTorchFunction

from kvps.core.effects import Copied, Core, Disk, Effect, Finish, Hold, Note, Route, Send
from kvps.core.limits import ALONE
from kvps.core.membership_client import Identity
from kvps.core.scheduler.scheduler import Scheduler
from kvps.core.scheduler.seat import Settings
from kvps.core.server.server import Server
from kvps.core.server.snapshot.storage import AnyOrder
from kvps.core.worker.calls import Call, PullValues, PushValues, Views
from kvps.core.worker.cluster_info import ClusterInfo
from kvps.core.worker.timeout_report import ASK_SCRIPT
from kvps.core.worker.worker import Worker
from kvps.net.driver import LEVELS
from kvps.protocol.envelope import Loan, Packet, Role
from kvps.runtime.device import Staging
from kvps.runtime.storage_thread import carry_out
from kvps.runtime.ticket import Ticket

log = logging.getLogger("kvps")
SCHEDULER, SERVER, WORKER = "scheduler", "server 0", "worker 0"
JOIN_MAX_S = 60.0
PAUSE_MAX_S = 1.0
"""Seconds that pass between two calls at most."""
LOOK_EVERY_S = 0.05
"""Seconds after which a call looks for due timers again; a timer may be that late."""
_LENT = Loan(0, 0, 0, 0)
"""In place of each payload that lies in its sender's memory: a receiver does not write to it."""


class InProcessSession:
    """A worker whose whole cluster is this object; as a :class:`~kvps.runtime.worker_session.WorkerSession`.

    Args:
        folder: where checkpoints are written and read; None for a job without.
        clock: seconds.

    Example:
        >>> session = InProcessSession(None)
        >>> session.info.workers, session.info.servers
        (1, 1)
    """

    def __init__(self, folder: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.names: dict[str, str] = {}
        """Name of each open store -> its type."""
        self.handles: Counter[str] = Counter()
        """Name of each open store -> how many objects use it."""
        self.staging = Staging((0, 0))
        self.published: dict[str, int] | None = None
        """No other process can read."""
        self.is_over = False
        self._folder = folder
        self._lock = threading.RLock()
        self._clock = clock
        self._called_at = clock()
        self._now = self._looked_at = 0.0
        self._numbers = itertools.count(1)
        self._tickets: dict[int, Ticket] = {}
        self._arrivals: deque[tuple[str, Route, Packet, Hold | None]] = deque()
        """Packets under way: their receiver, the route along which they come, and what to release then."""
        self._keeps = False
        """The caller gets values where the worker was given them, and not in tensors of its own."""
        self._orders: deque[Disk] = deque()
        every_s = None if folder is None else 0.0  # cuts are taken when the user asks for one
        self._server = Server(_identity(Role.SERVER), self._now, checkpoint_every_s=every_s)
        self._worker = Worker(_identity(Role.WORKER), self._now)
        self._cores: dict[str, Core] = {
            SCHEDULER: Scheduler(Settings(1, 1, limits=ALONE), os.urandom(16), self._now),
            SERVER: self._server,
            WORKER: self._worker,
        }
        for name, core in self._cores.items():
            core.outbox.connect(partial(self._perform, name))
        self._server.start(self._now)
        self._worker.start(self._now)
        _sessions.add(self)
        number, ticket = self._ticket()
        self._worker.on_join(number, JOIN_MAX_S, self._now)
        self._pump(ticket)
        ticket.wait()

    @property
    def rank(self) -> int:
        """Always 0."""
        return self.info.rank

    def on_resize(self, callback: Callable[[Any], object]) -> None:
        """Never call back: there is one worker."""

    @property
    def info(self) -> ClusterInfo:
        """The cluster: this worker and one server."""
        return self._worker.info

    def figures(self, store: str) -> dict[str, float]:
        """Return the numbers of a store."""
        with self._lock:
            return self._worker.figures(store)

    def close_store(self, name: str) -> None:
        """No object uses a store any more."""
        with self._lock:
            self._worker.on_close(name, self._now)
            self._hear()

    def call(self, call: Call, timeout_s: float) -> Ticket:
        """Carry a call out; its ticket has ended."""
        has_grad = torch.is_grad_enabled()
        # A default device of the script's is not that of the values that the cores make.
        with self._lock, DisableTorchFunction():
            torch._C._set_grad_enabled(False)  # torch.no_grad() makes nine calls of it
            try:
                self._let_time_pass()
                number, ticket = self._ticket()
                self._keeps = isinstance(call, PushValues | PullValues) and isinstance(call.sinks, Views)
                self._worker.on_call(number, call, self._now + timeout_s, self._now)
                self._pump(ticket)
            finally:
                torch._C._set_grad_enabled(has_grad)
        return ticket

    def _ticket(self) -> tuple[int, Ticket]:
        number, ticket = next(self._numbers), Ticket()
        self._tickets[number] = ticket
        return number, ticket

    def _let_time_pass(self) -> None:
        """Run the timers of the cores that have become due since the last call."""
        now = self._clock()
        self._now += min(now - self._called_at, PAUSE_MAX_S)
        self._called_at = now
        if self._now < self._looked_at + LOOK_EVERY_S:
            return
        self._looked_at = self._now
        while (due := self._due())[0] <= self._now:
            self._ring(due[1])

    def _due(self) -> tuple[float, str]:
        """Return the next deadline of a core, and whose it is."""
        dues = [(core.deadline(), name) for name, core in self._cores.items()]
        return min([(due, name) for due, name in dues if due is not None])

    def _ring(self, name: str) -> None:
        self._cores[name].on_timer(self._now)
        self._hear()

    def _hear(self) -> None:
        while self._arrivals or self._orders:
            if self._orders:
                self._carry_out(self._orders.popleft())
            else:
                self._serve(*self._arrivals.popleft())

    def _pump(self, ticket: Ticket) -> None:
        """Pass packets on until ``ticket`` has ended, and time where there are none."""
        self._hear()
        while not ticket.is_over:
            due, name = self._due()
            self._now = max(self._now, due)
            self._ring(name)

    def _serve(self, name: str, route: Route, packet: Packet, hold: Hold | None) -> None:
        core = self._cores[name]
        try:
            core.on_packet(route, packet, self._now)
        except Exception as error:  # as the driver does with what a peer's packet leads to
            log.debug("a packet to %s", name, exc_info=error)
            core.on_failure(route, packet.envelope, error, self._now)
        if hold is not None:
            hold.release()

    def _perform(self, name: str, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(name, effect)
            case Finish() if effect.ticket != ASK_SCRIPT:  # the script is in this call, and waits for nobody
                self._tickets.pop(effect.ticket).end(effect.value, effect.error)
            case Copied():
                self._tickets[effect.ticket].copied()
            case Disk():
                self._orders.append(effect)
            case Note(level, text) if level != "info":  # who joined is no news here
                log.log(LEVELS[level], "%s", text)

    def _carry_out(self, effect: Disk) -> None:
        assert self._folder is not None
        order = cast("AnyOrder", effect.order)
        answer = carry_out(self._folder, order, rest_s=0.0, tagged_max=ALONE.tagged_checkpoints)
        if answer is not None:
            self._server.on_disk(answer, self._now)

    def _send(self, source: str, effect: Send) -> None:
        """Bring a packet to its receiver; a route is the name of the other end, as bytes where
        that one connected."""
        to, packet, hold = effect
        target, route = (to, source.encode()) if isinstance(to, str) else (to.decode(), source)
        if packet.payload and source == WORKER:
            packet = Packet(*packet[:3], (_LENT,) * len(packet.payload))
        elif hold is not None and self._keeps:  # the server changes its values once this is released
            packet = packet._replace(payload=tuple(map(memoryview, map(bytearray, packet.payload))))
        self._arrivals.append((target, route, packet, hold))


def _identity(role: Role) -> Identity:
    endpoint = "tcp://127.0.0.1:1" if role is Role.SERVER else ""  # to which nobody connects
    return Identity(role, SCHEDULER, "localhost", os.getpid(), "kvps", 0, endpoint=endpoint)


_sessions: weakref.WeakSet[InProcessSession] = weakref.WeakSet()
_held: list[InProcessSession] = []


def _before_fork() -> None:
    """Let no thread be within a call: its half-done call and its lock would stay in the child forever."""
    for session in list(_sessions):
        session._lock.acquire()
        _held.append(session)


def _after_fork() -> None:
    while _held:
        _held.pop()._lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
