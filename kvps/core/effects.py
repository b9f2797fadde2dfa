"""Effects: what a core may ask of the world, and the methods through which the world calls a core.

A core never does anything itself: it appends effects to its outbox, and the world performs them in order.
The outbox of a process performs an effect as it is appended. So a worker's chunk is on the wire while the
next is being copied. The scheduler and the server append the effects of a method when its work is done:
their state never depends on the world. A test's outbox collects, and the test compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvps.errors import KvpsError
from kvps.protocol.envelope import Envelope, Message, Packet

Route = str | bytes
"""A way to a peer: the name of a connection that we opened (``"scheduler"``, ``"server 1"``), or
the routing id of one that was opened to us. An address, never an identity."""


class Hold(Protocol):
    """Memory that must not change until the world has read it."""

    def release(self) -> None:
        """The world has read it."""


class Send(NamedTuple):
    """Send ``packet`` along ``to``; release ``hold`` once its payload has been read."""

    to: Route
    packet: Packet
    hold: Hold | None = None


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a connection to ``endpoint`` and call it ``to``; a second time, replace it."""

    to: str
    endpoint: str
    is_near: bool | None = None
    """Whether the peer is on this machine, and may read our memory; None if no payload goes there."""
    key: str = ""
    """The peer's public key; empty without keys, and of the scheduler, whose key everybody knows."""
    is_member: bool = False
    """Whether to connect by this process's session key, and not by its role's."""


@dataclass(frozen=True, slots=True)
class Trust:
    """From now on, these and no others are the session keys of members.

    Args:
        keys: by public key, the name of its connections, as in :mod:`kvps.core.key_roles`.
    """

    keys: dict[str, str]


@dataclass(frozen=True, slots=True)
class Listen:
    """Take connections at ``endpoint``, too."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class Note:
    """A fact worth a line of log. ``level`` is ``debug``, ``info``, ``warning`` or ``error``."""

    level: str
    text: str
    fields: Mapping[str, object] = field(default_factory=dict, compare=False, repr=False)
    """The facts of the text by name, for programs that read the log."""


class Finish(NamedTuple):
    """The user's call ``ticket`` ends, with a value or with an error."""

    ticket: int
    value: object = None
    error: KvpsError | None = None


@dataclass(frozen=True, slots=True)
class Copied:
    """The values that the user's call ``ticket`` gave are copied; the caller may reuse them."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Save:
    """Write this state where a restart finds it, before any later effect is performed."""

    state: bytes


class Order:
    """Something to do with files; :mod:`kvps.core.server.snapshot.storage` lists what there is."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Disk:
    """Do something with files; orders are carried out one after another, beside everything else."""

    order: Order


@dataclass(frozen=True, slots=True)
class Exit:
    """End this process's part in the job, with this exit code."""

    code: int
    reason: str


Effect = Send | Connect | Trust | Listen | Note | Finish | Copied | Save | Disk | Exit


class Outbox(Protocol):
    """The place for the effects of a part of a core, in their order; a list will do."""

    def append(self, effect: Effect, /) -> None:
        """Have ``effect`` performed, now or later."""


class CoreOutbox:
    """The outbox of a core: it performs effects at once if it is connected, and else collects them."""

    def __init__(self) -> None:
        self._collected: list[Effect] = []

    def append(self, effect: Effect, /) -> None:
        """Have ``effect`` performed, or collect it."""
        self._collected.append(effect)

    def connect(self, perform: Callable[[Effect], None]) -> None:
        """Have each effect performed by ``perform`` from now on."""
        self.append = perform  # type: ignore[method-assign]  # a call less for each effect

    def take(self) -> list[Effect]:
        """Return the effects that were collected since the last call."""
        taken = self._collected.copy()
        self._collected.clear()
        return taken


class Core(Protocol):
    """The doors of a core. ``now`` is in seconds on a monotonic clock.

    A core that inherits these defaults admits every packet, and ignores failures and broken connections.
    """

    outbox: CoreOutbox
    """The effects of all doors."""

    def admit(self, route: Route, envelope: Envelope, kind: type[Message]) -> bool:
        """Judge a packet by its envelope, before it is decoded.

        Args:
            route: the way along which it came.
            envelope: the identity of its sender.
            kind: the class of its message, which the sender's role may send.

        Returns:
            Whether to hear it; if not, its sender is told nothing.

        Raises:
            KvpsError: what the sender is to be told.
        """
        return True

    def on_packet(self, route: Route, packet: Packet, now: float) -> None:
        """A peer said something that :meth:`admit` has just let in: it is not judged again."""

    def on_failure(self, route: Route, envelope: Envelope, error: Exception, now: float) -> None:
        """A packet was refused by its envelope (a KvpsError), or caused an unexpected error.

        Raises:
            Exception: ``error``, if this process cannot go on.
        """
        return

    def on_drop(self, route: Route, now: float) -> None:
        """The connection along ``route`` broke: a hint that the peer may have ended."""
        return

    def on_timer(self, now: float) -> None:
        """The deadline is reached."""

    def deadline(self) -> float | None:
        """When :meth:`on_timer` must be called next; None while nothing is due."""
