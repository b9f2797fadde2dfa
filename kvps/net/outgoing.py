"""The connections that this process opens: opened again where nothing moves, and replaced where
another is wanted.

A network may do worse than to break. A connection that looks open and carries nothing is closed
and opened again by the end that opened it: libzmq's heartbeats have something to carry, and
whether bytes move is asked of the kernel (:mod:`kvps.net.tcp_watch`), since libzmq sees no frame
before its last byte, and no heartbeat behind one. Its peer does not judge, since a process that
stands still is not lost for that. What libzmq gives up for good is opened again, too.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

import zmq

from kvps.core.effects import Connect, Route
from kvps.core.key_roles import near_endpoint
from kvps.errors import ConfigError, Unauthorized
from kvps.net import descriptors
from kvps.net.links.links import NEAR, Links
from kvps.net.sockets import Sockets
from kvps.net.tcp_watch import CAN_COUNT, Pulse, Watch, events_of, moved
from kvps.net.zap import EVENTS, Handshakes, Keys
from kvps.protocol.envelope import Envelope, Packet, Role
from kvps.protocol.membership import Error

CONTROL_HEARTBEAT_S = 2.0, 4.0
DATA_HEARTBEAT_S = 5.0, 15.0
"""How often the opener of a TCP connection asks whether it carries anything, and how long nothing may
move then. To the scheduler both together leave room before the silence for which it gives a member up."""
FADE_S = 3.0
"""How long the connection by which a member joined stays, in seconds: the scheduler answers along
it until it has heard the other one, and what it says last, STOP, it says once."""
RELAY_QUEUE_MAX, RELAY_FRAME_BYTES_MAX = 16, 1 << 20
"""Messages of a relay, which is only a peer, that may be unread, and the bytes of a frame."""
NEVER_MS = 24 * 3_600_000
"""The interval of libzmq's own heartbeats: so long that libzmq never judges a connection."""


class OutgoingConnections:
    """The connections that this process opens, by their names.

    Args:
        sockets: of this process.
        keys: by which it speaks; None for clear text.
        links: of this process.
    """

    def __init__(self, sockets: Sockets, keys: Keys | None, links: Links) -> None:
        self._sockets, self._keys, self._links = sockets, keys, links
        self.dealers: dict[str, zmq.Socket[bytes]] = {}
        self.names: dict[zmq.Socket[bytes], str] = {}
        """The name of each connection that is read."""
        self.refusals: deque[tuple[Route, Packet]] = deque()
        """Packets that stand in for an answer where no connection is made."""
        self.reconnects = 0
        """Number of connections that broke, or that others have replaced."""
        self.openings: dict[str, Connect] = {}
        """How each connection was opened, by its name."""
        self._watches: dict[str, Watch] = {}
        self._fading: list[tuple[float, zmq.Socket[bytes]]] = []
        """The connections that have others in their place, and when they are closed."""
        self._handshakes = Handshakes(keys)

    def connect(self, to: Connect, at_once: bool = True) -> None:
        """Open a connection; it replaces an older one of its name.

        One to a peer on this host is a near link, where it takes those. Without ``at_once``, a peer that has
        no other way is tried a little later.

        Raises:
            ConfigError: if its endpoint is none, or there are too few file descriptors.
        """
        name, endpoint = to.to, to.endpoint
        descriptors.demand(f"the connection to {name}", descriptors.CONNECTION)
        self._replace(to)
        self.openings[name] = to
        if endpoint.startswith(NEAR):
            self._links.connect(name, endpoint, True, at_once)
            return
        if to.is_near and to.key and self._links.connect(name, near_endpoint(to.key)):
            return
        dealer = self._sockets.new(zmq.DEALER)
        if name.startswith(f"{Role.READER} "):
            dealer.setsockopt(zmq.RCVHWM, RELAY_QUEUE_MAX)
            dealer.setsockopt(zmq.MAXMSGSIZE, RELAY_FRAME_BYTES_MAX)
        self._watch(name, dealer, CONTROL_HEARTBEAT_S if to.is_near is None else DATA_HEARTBEAT_S)
        if self._keys is not None:
            self._handshakes.seal(dealer, to.key, to.is_member)
        try:
            dealer.connect(endpoint)
        except zmq.ZMQError as error:
            self._forget(name, dealer)
            dealer.close(0)
            raise ConfigError(
                f"{endpoint!r} is not an address of {name}: {error.strerror}. Write it as tcp://HOST:PORT"
            ) from error
        self.dealers[name] = dealer
        self.names[dealer] = name
        self._fade(time.monotonic())
        self._sockets.watch(dealer)

    def reconnect(self, name: str, has_heard: bool) -> None:
        """Open a connection again whose link ended; by ZeroMQ if nothing had come along that."""
        self.reconnects += 1
        to = self.openings[name]
        self.connect(to if has_heard else replace(to, is_near=False), has_heard)

    def reopen(self, name: str) -> None:
        """Open a connection again whose queue is full: it has none, as libzmq has given up."""
        if name in self._watches:
            self._on_socket_events(name)  # why
        self.connect(self.openings[name])

    def hear(self, events: object) -> None:
        """Take in what libzmq tells of the connection to the scheduler, if ``events`` are of that."""
        watch = self._watches.get("scheduler")
        if watch is not None and watch.events is events:
            self._on_socket_events("scheduler")

    def look(self, now: float) -> None:
        """Replace the connections along which nothing has moved for too long."""
        self._fade(now)
        for name, watch in list(self._watches.items()):
            self._on_socket_events(name)
            if watch.up is None or self._watches.get(name) is not watch:
                continue  # libzmq is at it, or it was opened again just now
            if watch.pulse is None:
                watch.pulse = Pulse(watch.silence_s, now)
            counted = moved(watch.up)
            if counted is not None and watch.pulse.is_dead(now, counted):
                self.connect(self.openings[name])

    def close(self) -> None:
        """Watch no longer."""
        for name, dealer in self.dealers.items():
            self._forget(name, dealer)

    # --- libzmq's monitors --------------------------------------------------------------------------

    def _watch(self, name: str, dealer: zmq.Socket[bytes], heartbeat_s: tuple[float, float]) -> None:
        """Have a connection asked for signs of life, and watch whether bytes move along it."""
        every_s, silence_s = heartbeat_s
        dealer.setsockopt(zmq.HEARTBEAT_IVL, int(every_s * 1000))
        limit_ms = NEVER_MS if CAN_COUNT else int(silence_s * 1000)
        dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, limit_ms)
        if CAN_COUNT:
            events = dealer.get_monitor_socket(EVENTS)
            self._watches[name] = Watch(events, every_s + silence_s)
            if name == "scheduler":  # to be told at once that it is not served
                self._sockets.watch(events)

    def _forget(self, name: str, dealer: zmq.Socket[bytes]) -> None:
        """Watch a connection no longer."""
        if name in self._watches:
            dealer.disable_monitor()
            events = self._watches.pop(name).events
            if name == "scheduler":
                self._sockets.unwatch(events)
            events.close(0)

    def _on_socket_events(self, name: str) -> None:
        """Take in what libzmq tells of a connection."""
        now = time.monotonic()
        watch = self._watches[name]
        for kind, value in events_of(watch.events):
            if kind in (zmq.EVENT_CONNECTED, zmq.EVENT_DISCONNECTED):
                is_up = kind == zmq.EVENT_CONNECTED
                self.reconnects += not is_up
                watch.up, watch.pulse = value if is_up else None, None
                watch.connected_at = now if is_up else watch.connected_at
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._handshakes.succeeded(name)
            elif name == "scheduler":
                self._fail(name, kind, value, now - watch.connected_at)
                if self._watches.get(name) is not watch:
                    return  # it was opened again, by another key

    def _fail(self, name: str, kind: int, value: int, made_s: float) -> None:
        """A connection to the scheduler was made, and then not served."""
        is_turned, why = self._handshakes.failed(self.openings[name].endpoint, kind, value, made_s)
        if is_turned:
            self.connect(self.openings[name])
        elif why:  # the core hears that there is no way to the scheduler, as if that had said so
            envelope = Envelope(bytes(16), 0, Role.SCHEDULER, 0, 0, 0)
            self.refusals.append(("scheduler", Packet(envelope, Error(0, Unauthorized.code, why))))

    # --- replaced connections -----------------------------------------------------------------------

    def _replace(self, to: Connect) -> None:
        """Let the older connection of this name fade, if there is one."""
        self._links.disconnect(to.to)
        old = self.dealers.pop(to.to, None)
        if old is None:
            return
        self._forget(to.to, old)
        is_handed_over = to.is_member and not self.openings[to.to].is_member
        self.reconnects += not is_handed_over
        if not is_handed_over:
            self._deafen(old)
        self._fading.append((time.monotonic() + FADE_S * is_handed_over, old))

    def _fade(self, now: float) -> None:
        """Close the connections that have others in their place for long enough."""
        for _, dealer in [entry for entry in self._fading if now >= entry[0]]:
            self._deafen(dealer)
            dealer.close(0)
        self._fading = [entry for entry in self._fading if now < entry[0]]

    def _deafen(self, dealer: zmq.Socket[bytes]) -> None:
        """Read nothing more from a connection."""
        if self.names.pop(dealer, None) is not None:
            self._sockets.unwatch(dealer)
