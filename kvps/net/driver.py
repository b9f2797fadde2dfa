"""The one loop that every process runs: packets, calls and the time in, effects out.

One thread runs the loop and owns the core and the sockets. Any other thread that needs the core puts a
function into the :class:`Inbox`, which wakes the loop; there are no locks around the rules, because no other
thread ever enters them. All that a core is given comes through a :class:`Lens`, which may look on.

What a peer sends ends no process. An unexpected error, raised while its packet is served or while
something is done because of it, is logged with its traceback, told to the core, and left behind. An error
of this process's own doing, such as an address of its own that it cannot listen on, still ends the loop.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Generic, TypeVar

from kvps.core.effects import (
    Connect,
    Copied,
    Core,
    Disk,
    Effect,
    Effects,
    Exit,
    Finish,
    Listen,
    Note,
    Route,
    Save,
    Send,
    Trust,
)
from kvps.errors import ConfigError, KvpsError, ProtocolError
from kvps.net.transport import Demanded, Disconnected, Refused, Transport, Unserved
from kvps.protocol.envelope import Envelope, Packet

log = logging.getLogger("kvps")
C = TypeVar("C", bound=Core)
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
LOOK_EVERY_S = 1.0
"""The longest wait. A signal that arrives just before the system call does not interrupt it:
Python runs the handler, and the loop the requests that the handler has put into the inbox, when
the wait ends."""
BAD_BYTES_EVERY_S = 10.0
"""How often bytes that are no packet are worth a line of log; and an error that was logged before."""
KINDS_MAX = 100
"""Number of kinds of errors that are distinguished; further kinds are logged as one."""


class Listener:
    """The receiver of finished calls, and of the state that a core wants kept.

    This class suits a core that has no calls and keeps nothing; subclasses override what concerns them.
    """

    def finish(self, effect: Finish) -> None:
        """A call ended."""

    def copied(self, effect: Copied) -> None:
        """A call's values are copied."""

    def save(self, state: bytes) -> None:
        """This state must survive a restart."""

    def order(self, effect: Disk) -> None:
        """Something is to be done with files."""


Item = Callable[[C, float], Effects]
"""A request of another thread to a core: called with the core and the time."""


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """A request that says what it is, so that a record can repeat it: the core's method ``name``
    with ``args``."""

    name: str
    """The method of a part of the core has dots: ``member.leave``."""
    args: tuple[object, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)
    is_timed: bool = True
    """Whether the method is told the time."""
    then: tuple[Effect, ...] = ()
    """Effects after those of the method."""

    def __call__(self, core: object, now: float) -> Effects:
        """Call the method."""
        door: Callable[..., Effects] = attrgetter(self.name)(core)
        times = {"now": now} if self.is_timed else {}
        return chain(door(*self.args, **self.options, **times), self.then)


class Lens:
    """The object between the loop and the core: it calls the core in the loop's place, and may look on.

    All that a core is given comes through here, and all effects leave through here. This lens does not look.
    """

    due: float | None = None
    """When :meth:`tick` is to be called next; None for never."""
    tags: Collection[int] = ()
    """The messages that end at this lens, whichever is the current one."""

    def __init__(self) -> None:
        self.current: Lens = self
        """The lens to look through now: this one, or the next below it while this one has nothing to see."""

    def packet(self, core: Core, route: Route, packet: Packet, now: float) -> Effects:
        """A packet came."""
        return core.on_packet(route, packet, now)

    def failure(self, core: Core, route: Route, envelope: Envelope, error: Exception, now: float) -> Effects:
        """A packet was refused, or caused an unexpected error."""
        return core.on_failure(route, envelope, error, now)

    def drop(self, core: Core, route: Route, now: float) -> Effects:
        """A connection broke."""
        return core.on_drop(route, now)

    def timer(self, core: Core, now: float) -> Effects:
        """The deadline is reached."""
        return core.on_timer(now)

    def item(self, core: C, item: Item[C], now: float) -> Effects:
        """Another thread asks for something."""
        return item(core, now)

    def tick(self, now: float) -> Effects:
        """It is time for what the lens itself does; this one does nothing."""
        yield from ()


class Inbox(Generic[C]):
    """The requests of other threads to a core, in their order."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._items: deque[Item[C]] = deque()

    def put(self, item: Item[C]) -> None:
        """Have ``item(core, now)`` run by the loop's thread; any thread may call this."""
        self._items.append(item)
        self._transport.wake()

    def take(self) -> Iterator[Item[C]]:
        """Yield what is there now."""
        while self._items:
            yield self._items.popleft()


class Net:
    """A safety net for unexpected errors that peers cause: each kind is logged completely once,
    and then counted."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.count = 0
        self._clock = clock
        self._unsaid: dict[tuple[object, ...], int] = {}
        """By kind, how many came since the last line about it."""
        self._quiet_until: dict[tuple[object, ...], float] = {}

    def caught(self, error: Exception, what: str) -> None:
        """Log an error; ``what`` says what was done when it was raised."""
        self.count += 1
        kind = _kind_of(error)
        is_new = kind not in self._unsaid
        if is_new and len(self._unsaid) >= KINDS_MAX:
            kind, is_new = ("others",), ("others",) not in self._unsaid
        now = self._clock()
        if now < self._quiet_until.get(kind, -math.inf):
            self._unsaid[kind] += 1
            return
        unsaid, self._unsaid[kind] = self._unsaid.get(kind, 0), 0
        self._quiet_until[kind] = now + BAD_BYTES_EVERY_S
        if isinstance(error, KvpsError):  # its text says all
            log.warning("%s: %s", what, error)
        elif is_new:
            log.error(
                "%s failed, and this process continues without it; please report this as a bug",
                what,
                exc_info=error,
            )
        else:
            log.error(
                "%s failed again (%r), %d times in all, and %d times like this since the last "
                "line of this kind",
                what,
                error,
                self.count,
                unsaid + 1,
            )


def _kind_of(error: Exception) -> tuple[object, ...]:
    """Return what errors of one origin have in common: their class, and where they were raised."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None:
        return (type(error),)
    return type(error), place.tb_frame.f_code.co_filename, place.tb_lineno


def drive(
    core: C,
    transport: Transport,
    inbox: Inbox[C],
    listener: Listener | None = None,
    clock: Callable[[], float] = time.monotonic,
    lens: Lens | None = None,
) -> Exit:
    """Run ``core`` until it asks to exit; return that effect.

    Args:
        core: the rules.
        transport: the network.
        inbox: the requests of other threads.
        listener: hears of finished calls and of state to keep; None where there are none.
        clock: seconds.
        lens: sees all that goes in and comes out; None for nobody.

    Raises:
        Exception: what ``core`` or ``transport`` raised by itself; what a peer's packet has led to is
            logged and counted, and told to the core, which may raise it again.
    """
    heard = listener or Listener()
    net = Net(clock)
    view = lens or Lens()
    quiet_until, unsaid = -math.inf, 0
    own: Exception | None = None

    def receive(
        arrivals: Iterator[tuple[Route, Packet | Disconnected]],
    ) -> tuple[Route, Packet | Disconnected | Unserved | Refused] | None:
        """Return what comes next; None at the end, and where there was no packet."""
        nonlocal quiet_until, unsaid
        try:
            return next(arrivals, None)
        except ProtocolError as error:
            if clock() >= quiet_until:
                more = f", and {unsaid} more since the last line of this kind" if unsaid else ""
                quiet_until, unsaid = clock() + BAD_BYTES_EVERY_S, 0
                log.warning("dropped a message that is not a packet%s: %s", more, error)
            else:
                unsaid += 1
            return None
        except (Unserved, Refused) as error:
            return error.route, error
        except Demanded as error:
            raise ConfigError(str(error)) from None

    def do(effect: Effect) -> None:
        match effect:
            case Send():
                transport.send(effect.to, effect.packet, effect.hold)
            case Note():
                log.log(LEVELS[effect.level], "%s", effect.text, extra={"fields": effect.fields})
            case Connect():
                transport.connect(effect)
            case Trust():
                transport.trust(effect.keys)
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
                raise AssertionError("perform() returns an Exit to the loop")

    def perform(effects: Effects, whose: Envelope | None = None) -> Exit | None:
        """Do what a core asks for, because of ``whose`` packet; None if it was nobody's."""
        nonlocal own
        ending = None
        for effect in effects:
            if isinstance(effect, Exit):
                ending = effect
                continue
            try:
                do(effect)
            except Demanded as error:
                own = ConfigError(str(error))
                raise own from None
            except Exception as error:  # what led to it may be of a peer: judged below
                # Where we listen and what we save is our own doing, whatever it was that led to it.
                if whose is None or isinstance(effect, Listen | Save):
                    own = error
                    raise
                net.caught(error, f"{type(effect).__name__} because of a packet of {whose.node}")
        return ending

    def serve(route: Route, packet: Packet) -> Exit | None:
        """Let the core hear a packet; what it does not foresee is logged, and answered."""
        try:
            seen = view if packet.message.TAG in view.tags else view.current
            return perform(seen.packet(core, route, packet, clock()), packet.envelope)
        except Exception as error:  # R200: no packet ends the process
            if error is own:
                raise
            return fail(route, packet.envelope, error)

    def fail(route: Route, envelope: Envelope, error: Exception) -> Exit | None:
        net.caught(error, f"a packet of {envelope.node}")
        return perform(view.current.failure(core, route, envelope, error, clock()), envelope)

    def refuse(refused: Refused) -> Exit | None:
        """Tell a sender why it is not heard."""
        cause, whose = refused.__cause__, refused.envelope
        assert isinstance(cause, Exception)
        log.debug("refused a packet of %s: %s", whose.node, cause)
        return perform(view.current.failure(core, refused.route, whose, cause, clock()), whose)

    transport.guard(core.admit)
    while True:
        due = core.deadline()
        timeout_s = LOOK_EVERY_S if due is None else min(max(0.0, due - clock()), LOOK_EVERY_S)
        arrivals = transport.poll(timeout_s)
        while (arrival := receive(arrivals)) is not None:
            route, packet = arrival
            match packet:
                case Disconnected():
                    ending = perform(view.current.drop(core, route, clock()))
                case Unserved():
                    assert isinstance(packet.__cause__, Exception)
                    ending = fail(route, packet.envelope, packet.__cause__)
                case Refused():
                    ending = refuse(packet)
                case _:
                    ending = serve(route, packet)
            if ending is not None:
                return ending
            del arrival, packet  # it may be what keeps a loan from being given back
        for item in inbox.take():
            ending = perform(view.current.item(core, item, clock()))
            if ending is not None:
                return ending
            del item  # it has the values of a call, which may be needed no more
        if due is not None and clock() >= due:
            ending = perform(view.current.timer(core, clock()))
            if ending is not None:
                return ending
        if view.due is not None and clock() >= view.due:
            perform(view.tick(clock()))
