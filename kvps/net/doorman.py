"""The path of frames into a process: checked by their envelope, decoded, and counted if they are refused.

Nothing of a body is decoded before it is known that its sender may say such a message there
(:mod:`kvps.protocol.permissions`), and that the core would hear it (:meth:`~kvps.core.effects.Core.admit`).

A packet that is refused costs its receiver little, and its sender less. So a connection that carries a
hundred of them in ten seconds is ignored for the next ten seconds: its packets are dropped unread, and an
honest peer sends them again.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import zmq

from kvps.core.effects import Route
from kvps.core.limits import TABLE, Limits
from kvps.errors import KvpsError, ProtocolError
from kvps.net.transport import Guard, Refused
from kvps.protocol import permissions, wire
from kvps.protocol.envelope import Packet, Role
from kvps.protocol.permissions import Place

WITHIN_S = 10.0
IGNORED_S = 10.0
"""The time in which a connection may have some packets refused, and for how long it is ignored for more."""
KEPT_MAX = 4096
"""How many connections are remembered along which something was refused."""


@dataclass(slots=True)
class _Record:
    since: float
    count: int = 0
    ignored_until: float = 0.0


class Misbehaviour:
    """The refused packets of each connection.

    Args:
        refused_max: how many are refused before a connection is ignored.
    """

    def __init__(self, refused_max: int = TABLE["refused"].default) -> None:
        self.refused_max = refused_max
        self.records: dict[Route, _Record] = {}
        """The connection along which something was refused last is the last."""

    def is_ignored(self, route: Route, now: float) -> bool:
        """Whether nothing is heard along ``route`` at the moment."""
        record = self.records.get(route)
        return record is not None and now < record.ignored_until

    def refused(self, route: Route, now: float) -> bool:
        """A packet was refused; return whether ``route`` is ignored because of that."""
        record = self.records.pop(route, None)
        if record is None or now >= record.since + WITHIN_S:
            record = _Record(now)
        self.records[route] = record
        if len(self.records) > KEPT_MAX:
            del self.records[next(iter(self.records))]
        record.count += 1
        if record.count < self.refused_max:
            return False
        record.count, record.since, record.ignored_until = 0, now, now + IGNORED_S
        return True


class Origin(Protocol):
    """A frame of libzmq, or a link, which says whose connection it is."""

    def get(self, option: Any) -> Any:
        """Return a property of the connection."""


log = logging.getLogger("kvps")
_OPENED = {str(role): Place[f"TO_{role.name}"] for role in permissions.LISTENING}
"""The first word of a connection's name -> the messages that may come along it."""


class Doorman:
    """Decides which packets a process accepts.

    Args:
        role: what the process is.
        clock: seconds.
        limits: the named limits.
    """

    def __init__(
        self, role: Role, clock: Callable[[], float] = time.monotonic, limits: Limits | None = None
    ) -> None:
        self.counts: Counter[str] = Counter()
        """How many packets were not let in, by why: ``bytes``, ``refused``, ``untold`` (an answer that is
        refused; its sender is not told), ``unheard`` or ``ignored``; how many connections became
        ignored; and how many were not sent to a peer that does not read: ``unread``."""
        self.admit: Guard = lambda route, envelope, kind: True
        self.checks_names = False
        """Whether the connections that others opened to us have names, as keys are checked."""
        self._place = permissions.LISTENING[role]
        self._misbehaviour = Misbehaviour((limits or Limits()).refused)
        self._clock = clock

    def decode(self, route: Route, frames: Sequence[memoryview], origin: Origin) -> Packet | None:
        """Return the packet that came along ``route``; None if it is not heard.

        Args:
            route: along which it came.
            frames: its head and its payload.
            origin: says whose connection that is.

        Raises:
            ProtocolError: if it is none, or comes along a connection of ours and has no business there.
            Refused: if its sender is to be told why it is not heard.
        """
        if self._misbehaviour.records and self._misbehaviour.is_ignored(route, self._clock()):
            self.counts["ignored"] += 1
            return None
        try:
            unread = wire.read_envelope(frames)
            envelope, kind, head, _, _ = unread
        except ProtocolError as error:
            raise self._malformed(route, origin, error) from None
        is_opened = isinstance(route, str)
        place = _OPENED[route.partition(" ")[0]] if isinstance(route, str) else self._place
        try:
            if self.checks_names and not is_opened:
                permissions.check_name(_said(origin, "User-Id", "nobody"), place, envelope, kind)
            permissions.check(place, envelope, kind, len(head))
            is_heard = self.admit(route, envelope, kind)
        except KvpsError as error:
            self._refused(route, "untold" if is_opened else "refused", origin)
            if is_opened:
                raise ProtocolError(f"{error} (from {route!s})") from None
            raise Refused(route, envelope) from error
        if not is_heard:
            self.counts["unheard"] += 1
            return None
        try:
            return wire.read_body(unread)
        except ProtocolError as error:
            raise self._malformed(route, origin, error) from None

    def _malformed(self, route: Route, origin: Origin, error: ProtocolError) -> ProtocolError:
        """Count a packet that is none, and return the error with the place where it came from."""
        self._refused(route, "bytes", origin)
        return type(error)(f"{error} (from {whence(route, origin)})")

    def _refused(self, route: Route, why: str, origin: Origin) -> None:
        self.counts[why] += 1
        if isinstance(route, bytes) and self._misbehaviour.refused(route, self._clock()):
            self.counts["ignored connections"] += 1
            log.warning(
                "%d packets of one connection (from %s) were refused within %.0f s; it is ignored for %.0f s",
                self._misbehaviour.refused_max,
                whence(route, origin),
                WITHIN_S,
                IGNORED_S,
            )


def _said(origin: Origin, what: str, otherwise: str) -> str:
    """Return a property of the connection along which a message came; libzmq says it on every frame."""
    try:
        return str(origin.get(what))
    except zmq.ZMQError:
        return otherwise


def whence(route: Route, origin: Origin) -> str:
    """Return where a message came from: a connection of ours, or its host's address if libzmq tells."""
    return route if isinstance(route, str) else _said(origin, "Peer-Address", "an unknown host")


def descriptor_of(frames: Sequence[zmq.Frame]) -> int | None:
    """Return by which file descriptor a message came; None where libzmq does not say.

    It says so on every frame but the first, which is the route.
    """
    try:
        found = frames[1].get(zmq.SRCFD)
    except (IndexError, zmq.ZMQError):
        return None
    return found if found >= 0 else None
