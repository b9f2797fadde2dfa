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
from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import call
from typing import Generic, TypeVar, TypeVarTuple

from kvps.core.effects import (
    Connect,
    Copied,
    Core,
    Disk,
    Effect,
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
Ts = TypeVarTuple("Ts")
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
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


Door = Callable[[C, *Ts, float], None]
"""A method of a core, or a function, which is called with the core, arguments and the time."""
Request = tuple[Callable[..., None], tuple[object, ...]]
"""A door with the arguments of the call, of which :meth:`Inbox.put` has checked that they fit."""
Perform = Callable[[Effect], None]


@dataclass(slots=True)
class Doors:
    """The functions by which the loop hands events to a core; a lens puts its own before them."""

    packet: Callable[[Route, Packet, float], None]
    """A packet came."""
    failure: Callable[[Route, Envelope, Exception, float], None]
    """A packet was refused, or caused an unexpected error."""
    drop: Callable[[Route, float], None]
    """A connection broke."""
    timer: Callable[[float], None]
    """The deadline is reached."""
    request: Callable[..., None]
    """Another thread asks for something: given a door, the core, the arguments of a request, and the time."""


class Lens:
    """Observes the events and the effects of a core, through doors of its own. This lens observes none."""

    due: float | None = None
    """When :meth:`tick` is to be called next; None for never."""
    tags: Collection[int] = ()
    """The messages that end at :attr:`own`."""
    doors: Doors
    """The doors to use now: the core's, while nothing is observed."""
    own: Doors

    def connect(self, core: Core, perform: Perform) -> None:
        """The loop begins: have the effects of ``core`` performed."""
        core.outbox.connect(perform)
        self.doors = self.own = Doors(core.on_packet, core.on_failure, core.on_drop, core.on_timer, call)

    def tick(self, now: float) -> None:
        """Do the lens's own work, which is due; this lens has none."""


class Inbox(Generic[C]):
    """The requests of other threads to a core, in their order."""

    def __init__(self, transport: Transport) -> None:
        self._wake = transport.wake
        self.requests: deque[Request] = deque()

    def put(self, door: Door[C, *Ts], *arguments: *Ts) -> None:
        """Have ``door(core, *arguments, now)`` called by the loop's thread; any thread may call this.

        Example::

            inbox.put(Worker.on_close, "store-0")
        """
        self.requests.append((door, arguments))
        self._wake()


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
        """Log an error; ``what`` names the action that raised it."""
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
            more = f", and {unsaid} more since the last line of this kind" if unsaid else ""
            log.warning("%s%s: %s", what, more, error)
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


class Performer:
    """Performs the effects of a core. No error of the world reaches the core.

    Args:
        transport: the network.
        listener: hears of finished calls and of state to keep.
        net: catches the errors that peers cause.
    """

    def __init__(self, transport: Transport, listener: Listener, net: Net) -> None:
        self._transport, self._listener, self._net = transport, listener, net
        self.whose: Envelope | None = None
        """The sender of the packet that is served; None while another thread or the time is."""
        self.ends: list[Exit | Exception] = []
        """Reasons for the end of the loop, the last one counts; an error is of this process's own doing."""
        self.over: deque[Finish] = deque()
        """The calls of which the listener is still to be told that they are over."""

    def perform(self, effect: Effect) -> None:
        """Do what the core asks for; nothing after an error."""
        if self.ends and isinstance(self.ends[-1], Exception):
            return
        try:
            match effect:
                case Send(to, packet, hold):
                    self._transport.send(to, packet, hold)
                case Finish():
                    self.over.append(effect)
                case Note():
                    log.log(LEVELS[effect.level], "%s", effect.text, extra={"fields": effect.fields})
                case Connect():
                    self._transport.connect(effect)
                case Trust():
                    self._transport.trust(effect.keys)
                case Listen():
                    self._transport.listen(effect.endpoint)
                case Copied():
                    self._listener.copied(effect)
                case Save():
                    self._listener.save(effect.state)
                case Disk():
                    self._listener.order(effect)
                case Exit():
                    self.ends.append(effect)
        except Demanded as error:
            self.ends.append(ConfigError(str(error)))
        except Exception as error:  # what led to it may be of a peer
            # Where we listen and what we save is our own doing, whatever it was that led to it.
            if self.whose is None or isinstance(effect, Listen | Save):
                self.ends.append(error)
            else:
                self._net.caught(error, f"{type(effect).__name__} because of a packet of {self.whose.node}")

    def tell(self) -> None:
        """Tell the listener of the calls that are over.

        The thread that waits for a call then needs the interpreter, which the loop lets go when it waits. So
        the loop does everything else before: two threads that want the interpreter at once cost each call two
        system calls and a switch of threads.
        """
        while self.over:
            try:
                self._listener.finish(self.over.popleft())
            except Exception as error:
                self._net.caught(error, "the end of a call")


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
    net = Net(clock)
    view = lens or Lens()
    world = Performer(transport, listener or Listener(), net)

    def fail(route: Route, envelope: Envelope, error: Exception) -> None:
        world.whose = envelope
        net.caught(error, f"a packet of {envelope.node}")
        view.doors.failure(route, envelope, error, clock())

    def refuse(error: Unserved | Refused) -> None:
        """Tell a sender why it is not served, or not heard."""
        cause, world.whose = error.__cause__, error.envelope
        assert isinstance(cause, Exception)
        if isinstance(error, Unserved):
            fail(error.route, error.envelope, cause)
        else:
            log.debug("refused a packet of %s: %s", error.envelope.node, cause)
            view.doors.failure(error.route, error.envelope, cause, clock())

    transport.guard(core.admit)
    view.connect(core, world.perform)
    ends, requests = world.ends, inbox.requests
    while not ends:
        world.tell()
        due = core.deadline()
        left_s = LOOK_EVERY_S if due is None else due - clock()
        arrivals = transport.poll(LOOK_EVERY_S if left_s > LOOK_EVERY_S else max(0.0, left_s))
        while not ends:
            try:
                arrival = next(arrivals, None)
            except ProtocolError as error:
                net.caught(error, "dropped a message that is not a packet")
                break
            except (Unserved, Refused) as error:
                refuse(error)
                break
            except Demanded as error:
                raise ConfigError(str(error)) from None
            if arrival is None:
                break
            if world.over:
                world.tell()
            route, packet = arrival
            if isinstance(packet, Disconnected):
                view.doors.drop(route, clock())
                continue
            world.whose = packet.envelope
            try:
                doors = view.own if packet.message.TAG in view.tags else view.doors
                doors.packet(route, packet, clock())
            except Exception as error:  # R200: no packet ends the process
                fail(route, packet.envelope, error)
            world.whose = None
            del arrival, packet  # it may be what keeps a loan from being given back
        world.whose = None
        while requests and not ends:
            world.tell()
            door, arguments = requests.popleft()
            view.doors.request(door, core, *arguments, clock())
            del arguments  # they have the values of a call, which may be needed no more
        if due is not None and not ends and (now := clock()) >= due:
            view.doors.timer(now)
        if view.due is not None and not ends and (now := clock()) >= view.due:
            view.tick(now)
    world.tell()
    end = ends[-1]
    if isinstance(end, Exception):
        raise end
    return end
