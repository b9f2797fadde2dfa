"""The one loop that every process runs: packets, calls and the time in, effects out.

One thread runs the loop and owns the core and the sockets. Whoever else wants something of the
core puts a function into the :class:`Inbox`, which wakes the loop; there are no locks around the
rules, because nobody else ever enters them.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from kvps.core.effects import (
    Connect,
    Copied,
    Core,
    Disk,
    Effects,
    Exit,
    Finish,
    Hold,
    Listen,
    Note,
    Route,
    Save,
    Send,
)
from kvps.errors import ProtocolError
from kvps.messages import Packet

log = logging.getLogger("kvps")
C = TypeVar("C", bound=Core)
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
LOOK_EVERY_S = 1.0
"""The longest wait. A signal that comes between Python's last look and the system call ends no wait: its
handler runs when that returns, and so does what the handler has put into the inbox."""
BAD_BYTES_EVERY_S = 10.0
"""How often bytes that are no packet are worth a line of log."""


class Dropped:
    """What a transport reports in place of a packet when a connection broke."""


DROPPED = Dropped()


class Transport(Protocol):
    """How packets travel. All methods but :meth:`wake` are for the loop's thread alone."""

    def connect(self, name: str, endpoint: str, is_near: bool | None = None) -> None:
        """Open a connection that is called ``name`` from now on.

        Args:
            name: replaces an older connection of this name.
            endpoint: where to.
            is_near: as :class:`~kvps.core.effects.Connect` has it.
        """

    def listen(self, endpoint: str) -> None:
        """Take connections at ``endpoint``, besides those that are taken already."""

    def send(self, route: Route, packet: Packet, hold: Hold | None) -> None:
        """Send, or drop if there is nobody: only an answer says that something arrived."""

    def poll(self, timeout_s: float | None) -> Iterator[tuple[Route, Packet | Dropped]]:
        """Wait up to ``timeout_s`` (None: for ever) and yield what came.

        Raises:
            ProtocolError: in place of a packet that cannot be decoded; polling again goes on.
        """

    def wake(self) -> None:
        """Make a waiting :meth:`poll` return; any thread may call this."""

    def close(self, linger_s: float) -> None:
        """Close all connections, giving what is queued ``linger_s`` to leave."""


class Listener(Protocol):
    """Who hears of the user's calls, and who keeps the state of a core."""

    def finish(self, effect: Finish) -> None:
        """A call ended."""

    def copied(self, effect: Copied) -> None:
        """A call's values are copied."""

    def save(self, state: bytes) -> None:
        """This state must survive a restart."""

    def order(self, effect: Disk) -> None:
        """Something is to be done with files."""


class Silent:
    """A listener of a core that has no calls and keeps nothing; others hear what concerns them."""

    def finish(self, effect: Finish) -> None:
        """Nobody waits."""

    def copied(self, effect: Copied) -> None:
        """Nobody waits."""

    def save(self, state: bytes) -> None:
        """Nothing is kept."""

    def order(self, effect: Disk) -> None:
        """There are no files."""


class Inbox(Generic[C]):
    """What other threads want of a core, in the order in which they asked."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._items: deque[Callable[[C, float], Effects]] = deque()

    def put(self, item: Callable[[C, float], Effects]) -> None:
        """Have ``item(core, now)`` run by the loop's thread; any thread may call this."""
        self._items.append(item)
        self._transport.wake()

    def take(self) -> Iterator[Callable[[C, float], Effects]]:
        """Yield what is there now."""
        while self._items:
            yield self._items.popleft()


def drive(
    core: C,
    transport: Transport,
    inbox: Inbox[C],
    listener: Listener | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Exit:
    """Run ``core`` until it asks to exit; return that wish."""
    heard = listener or Silent()
    quiet_until, unsaid = -math.inf, 0

    def receive(
        arrivals: Iterator[tuple[Route, Packet | Dropped]],
    ) -> tuple[Route, Packet | Dropped] | None:
        """Return what comes next; None at the end, and where there was no packet."""
        nonlocal quiet_until, unsaid
        try:
            return next(arrivals, None)
        except ProtocolError as error:
            if clock() >= quiet_until:
                more = f", and {unsaid} more since the last such line" if unsaid else ""
                quiet_until, unsaid = clock() + BAD_BYTES_EVERY_S, 0
                log.warning("dropped what is no packet%s: %s", more, error)
            else:
                unsaid += 1
            return None

    def perform(effects: Effects) -> Exit | None:
        wish = None
        for effect in effects:
            match effect:
                case Send():
                    transport.send(effect.to, effect.packet, effect.hold)
                case Note():
                    log.log(LEVELS[effect.level], "%s", effect.text)
                case Connect():
                    transport.connect(effect.to, effect.endpoint, effect.is_near)
                case Listen():
                    transport.listen(effect.endpoint)
                case Finish():
                    heard.finish(effect)
                case Copied():
                    heard.copied(effect)
                case Save():
                    heard.save(effect.state)
                case Disk():
                    heard.order(effect)
                case Exit():
                    wish = effect
        return wish

    while True:
        due = core.deadline()
        timeout_s = LOOK_EVERY_S if due is None else min(max(0.0, due - clock()), LOOK_EVERY_S)
        arrivals = transport.poll(timeout_s)
        while (arrival := receive(arrivals)) is not None:
            route, packet = arrival
            if isinstance(packet, Dropped):
                wish = perform(core.on_drop(route, clock()))
            else:
                wish = perform(core.on_packet(route, packet, clock()))
            if wish is not None:
                return wish
            del arrival, packet  # it may be what keeps a loan from being given back
        for item in inbox.take():
            wish = perform(item(core, clock()))
            if wish is not None:
                return wish
            del item  # it has the values of a call, which may be needed no more
        if due is not None and clock() >= due:
            wish = perform(core.on_timer(clock()))
            if wish is not None:
                return wish
