"""The interface of a transport: the methods by which packets travel, and the errors by which it
reports others' faults.

:mod:`kvps.net.zeromq` and :mod:`kvps.net.shm.transport` implement it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from kvps.core.effects import Connect, Hold, Route
from kvps.errors import ConfigError
from kvps.protocol import wire
from kvps.protocol.envelope import Envelope, Message, Packet


class Encoding:
    """How a transport turns packets into frames; a tracer has it say when the last one was."""

    def __init__(self) -> None:
        self.encode = wire.encode
        self.ended_at = 0
        """When a packet had become frames, by the clock of :meth:`measure`."""

    def measure(self, clock: Callable[[], int]) -> None:
        """Note when packets have become frames from now on."""

        def encode(packet: Packet, *, checked: bool = False) -> list[bytes | memoryview]:
            frames = wire.encode(packet, checked=checked)
            self.ended_at = clock()
            return frames

        self.encode = encode

    def rest(self) -> None:
        """Note nothing from now on."""
        self.encode = wire.encode


class Disconnected:
    """A broken connection, which a transport reports in place of a packet."""


DROPPED = Disconnected()


class Demanded(ConfigError):
    """The operator of this process demands something impossible, which ends the process, whichever
    peer revealed it.

    From :func:`drive` it comes as the ConfigError that it is.
    """


class _Fault(Exception):
    """A packet led to an error; see the cause."""

    def __init__(self, route: Route, envelope: Envelope) -> None:
        super().__init__(f"a packet of {envelope.node}")
        self.route = route
        self.envelope = envelope


class Unserved(_Fault):
    """A transport failed at a packet that could be decoded; see the cause."""


class Refused(_Fault):
    """A packet was refused by its envelope; see the cause."""


Guard = Callable[[Route, Envelope, type[Message]], bool]
"""As :meth:`~kvps.core.effects.Core.admit`."""


class Refusals(NamedTuple):
    """Counts of what a transport has refused, by reason."""

    packets: Counter[str]
    """As :attr:`kvps.net.doorman.Doorman.counts`."""
    connections: Counter[str]
    """That were not made: ``no_key``, ``unknown_key``, ``wrong_server_key``, ``other_user``,
    ``no_handshake``, ``no_pass`` or ``no_descriptor`` (a count of seconds)."""
    closed: Counter[str]
    """As :attr:`kvps.net.inflow.Inflow.closings`."""


class Transport(Protocol):
    """How packets travel. All methods but :meth:`wake` are for the loop's thread alone."""

    @property
    def refused(self) -> Refusals:
        """The packets and connections that were refused."""

    @property
    def reconnects(self) -> int:
        """Number of connections opened here that broke, or that others have replaced."""

    def guard(self, admit: Guard) -> None:
        """Have ``admit`` judge every packet by its envelope from now on, before it is decoded."""

    def connect(self, to: Connect) -> None:
        """Open a connection; it replaces an older one of its name."""

    def trust(self, keys: dict[str, str]) -> None:
        """Take connections by these session keys, as :class:`~kvps.core.effects.Trust` has them."""

    def listen(self, endpoint: str) -> None:
        """Take connections at ``endpoint``, besides those that are taken already."""

    def send(self, route: Route, packet: Packet, hold: Hold | None) -> None:
        """Send, or drop if there is no peer: only an answer says that something arrived."""

    def poll(self, timeout_s: float | None) -> Iterator[tuple[Route, Packet | Disconnected]]:
        """Wait up to ``timeout_s`` (None: for ever) and yield the packets that came.

        Raises:
            ProtocolError: in place of a packet that cannot be decoded; polling again goes on.
            Unserved: in place of a packet that caused an unexpected error; as above.
            Refused: in place of a packet whose sender gets the reason of the refusal; as above.
        """

    def wake(self) -> None:
        """Make a waiting :meth:`poll` return; any thread may call this."""

    def close(self, linger_s: float) -> None:
        """Close all connections, giving what is queued ``linger_s`` to leave."""
