"""The lens between a loop and its core: all that a core is given comes through it, and it may look on.

Without a timeline and without a record it passes everything on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Protocol, TypeVar

from kvps.core.effects import Core, Effect, Effects, Route
from kvps.protocol.envelope import Envelope, Packet

C = TypeVar("C", bound=Core)


@dataclass(slots=True)
class Encoding:
    """When a transport had turned its last packet into frames, for a tracer."""

    clock: Callable[[], int] | None = None
    """Nanoseconds; None while nobody measures."""
    ended_at: int = 0


Item = Callable[[C, float], Effects]
"""A request of another thread to a core: called with the core and the time."""


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """A request that says what it is, so that a record can repeat it: the core's method ``name`` with ``args``."""

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


class Lens(Protocol):
    """The object between the loop and the core: it calls the core in the loop's place, and may look on.

    All that a core is given comes through here, and all effects leave through here.
    """

    due: float | None
    """When :meth:`tick` is to be called next; None for never."""

    def packet(self, core: Core, route: Route, packet: Packet, now: float) -> Effects:
        """A packet came."""

    def failure(
        self, core: Core, route: Route, envelope: Envelope, error: Exception, now: float
    ) -> Effects:
        """A packet was refused, or caused an unexpected error."""

    def drop(self, core: Core, route: Route, now: float) -> Effects:
        """A connection broke."""

    def timer(self, core: Core, now: float) -> Effects:
        """The deadline is reached."""

    def item(self, core: C, item: Item[C], now: float) -> Effects:
        """Another thread asks for something."""

    def tick(self, now: float) -> Effects:
        """It is time for what the lens itself does."""


class PlainLens:
    """A lens that does not look."""

    due: float | None = None

    def packet(self, core: Core, route: Route, packet: Packet, now: float) -> Effects:
        """A packet came."""
        return core.on_packet(route, packet, now)

    def failure(
        self, core: Core, route: Route, envelope: Envelope, error: Exception, now: float
    ) -> Effects:
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
        """It does nothing."""
        yield from ()
