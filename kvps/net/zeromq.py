"""Packets over ZeroMQ: a ROUTER for incoming connections, a DEALER for each outgoing connection.

What libzmq does not promise is not relied on here: a send that succeeded says nothing (only an
answer does), a routing id is an address (identity is in the envelope), and a queue is bounded by
the windows of the protocol, not by a water mark. Packets that go by TCP have a checksum, or are sealed
(:mod:`kvps.net.zap`).

:class:`~kvps.net.incoming.IncomingConnections` and :class:`~kvps.net.outgoing.OutgoingConnections` hold the
connections, :class:`~kvps.net.sockets.Sockets` what both need, and :class:`~kvps.net.zeromq.SocketReader`
takes messages apart. Between processes of one user on one host packets go along near links
(:mod:`kvps.net.links.links`), and not by ZeroMQ.

Frames of messages are taken from a socket, counted, and dropped where a message has too many for a packet.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter

import zmq

from kvps.core.effects import Connect, Hold, Route
from kvps.core.key_roles import RoleKey
from kvps.core.limits import Limits
from kvps.errors import ConfigError, ProtocolError
from kvps.net import descriptors
from kvps.net.doorman import Doorman, descriptor_of, whence
from kvps.net.incoming import IncomingConnections
from kvps.net.inflow import CONTROL, Inflow, data_limits
from kvps.net.links.links import Links
from kvps.net.links.stream import Stream
from kvps.net.memory import give_back
from kvps.net.outgoing import OutgoingConnections
from kvps.net.sockets import Sockets, has_come
from kvps.net.tcp_watch import COPIED_MIN_BYTES, Outflow
from kvps.net.transport import Disconnected, Encoding, Guard, Refusals
from kvps.net.zap import Keys
from kvps.protocol import wire
from kvps.protocol.envelope import Packet, Role

log = logging.getLogger("kvps")
BATCH = 64
"""Packets taken from one socket before the others, and the timers, get their turn."""
QUEUE_MAX = {True: 1000, False: 16384}
"""Messages that wait to leave along one connection that was opened to a scheduler, and to another process. A
peer that does not read its answers gets no more; it asks again for the answers that it missed."""
CONTROL_BYTES_MAX = 1 << 20
"""Bytes of the longest frame that a scheduler takes: no packet to it has a payload."""
LOOK_EVERY_S = 1.0
"""How often it is looked whether anything moves."""
SURPLUS_BATCH = 4096
"""Frames of a message that has too many for a packet which are dropped before the other sockets get their
turn."""
SURPLUS_MAX = 1 << 16
"""The most frames of such a message whose memory is left in the heap: libzmq has 64 bytes for each."""
_send: Callable[..., zmq.MessageTracker | None] = zmq.backend.Socket.send
"""Sends a frame without the wrappers in Python of :meth:`zmq.Socket.send_multipart`."""
_MORE = zmq.NOBLOCK | zmq.SNDMORE
_nbytes: Callable[[memoryview], int] = attrgetter("nbytes")
SEAL_OCTETS = 33
"""Bytes that CURVE adds to each frame."""


class ZmqTransport:
    """The packets of one process over ZeroMQ."""

    def __init__(
        self,
        bind: str | None = None,
        watch: bool = False,
        *,
        checksums: bool = True,
        role: Role = Role.WORKER,
        keys: Keys | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Open no connection yet, but a place to listen if one is given.

        Args:
            bind: as :meth:`listen` has it.
            watch: as :meth:`listen` has it.
            checksums: whether packets that leave by TCP carry one. Received ones are always checked.
            role: of this process; decides which messages others may send to it, and how large they may be.
            keys: by which it speaks and accepts connections; None to accept any, in clear text.
            limits: the named limits; None for the defaults.

        Raises:
            ConfigError: if that cannot be, or there are too few file descriptors, where libzmq would
                abort the process.
        """
        descriptors.demand("a kvps process", descriptors.LEAST)
        self.encoding = Encoding()
        """When the last packet had become frames."""
        self._checksums = checksums and keys is None  # a packet that is sealed is not damaged
        is_control = role is Role.SCHEDULER
        limits = limits or Limits()
        self._doorman = Doorman(role, limits=limits)
        self._inflow = Inflow(CONTROL if is_control else data_limits(), idle_max=limits.idle)
        self._reader = SocketReader(self._inflow, is_sealed=keys is not None)
        self._outflow = Outflow(limits.unread)
        frame_bytes_max = CONTROL_BYTES_MAX if is_control else wire.FRAME_BYTES_MAX
        self._sockets = Sockets(frame_bytes_max)
        self.wake = self._sockets.wake
        self._links = Links(self._sockets, limits.unread, self._ended)
        self._outgoing = OutgoingConnections(self._sockets, keys, self._links)
        self._incoming = IncomingConnections(
            self._sockets, self._links, role, keys, self._doorman, self._inflow, QUEUE_MAX[is_control]
        )
        self._look_at = time.monotonic()
        if bind is not None:
            self.listen(bind, watch)

    def guard(self, admit: Guard) -> None:
        """Have ``admit`` judge every packet by its envelope from now on, before it is decoded."""
        self._doorman.admit = admit

    @property
    def endpoint(self) -> str:
        """Where this process can be reached; "" if it does not listen."""
        return self._incoming.endpoint

    @property
    def refused(self) -> Refusals:
        """The packets and connections that were refused."""
        porter = self._sockets.porter
        asked = porter.refused if porter is not None else Counter()
        counted = asked + self._incoming.failures + self._links.refused
        return Refusals(self._doorman.counts, counted, self._inflow.closings)

    @property
    def reconnects(self) -> int:
        """Number of connections opened here that broke, or that others have replaced."""
        return self._outgoing.reconnects

    def trust(self, keys: dict[str, str]) -> None:
        """Take connections by these session keys."""
        if (porter := self._sockets.porter) is not None:
            porter.trust(keys)
            self._sockets.used.add(porter.socket)

    def open_by(self, roles: Mapping[str, RoleKey]) -> None:
        """Take connections by these keys of roles from now on; those that were made stay."""
        if self._sockets.porter is not None:
            self._sockets.porter.ring.roles = roles

    def listen(self, endpoint: str, watch: bool = False) -> None:
        """Take connections at ``endpoint``; ``watch`` those that break. Once for each transport.

        Raises:
            ConfigError: if that cannot be.
        """
        try:
            self._incoming.listen(endpoint, watch)
        except ConfigError:
            self.close(0.0)
            raise

    def connect(self, to: Connect) -> None:
        """Open a connection; it replaces an older one of its name.

        Raises:
            ConfigError: if its endpoint is none, or there are too few file descriptors.
        """
        self._outgoing.connect(to)

    def send(self, route: Route, packet: Packet, hold: Hold | None) -> None:
        """Send, or drop if there is no peer, or if the peer does not read."""
        size_bytes = sum(map(_nbytes, packet.payload)) if packet.payload else 0
        copied_bytes = size_bytes if hold is None and isinstance(route, bytes) else 0
        link = self._links.by_route.get(route)
        if link is not None:
            if not link.send(self.encoding.encode(packet, checked=False), hold, copied_bytes):
                self._doorman.counts["unread"] += 1
            return
        if copied_bytes and self._outflow.is_full(route, copied_bytes):
            self._doorman.counts["unread"] += 1
            return
        is_copied = size_bytes < COPIED_MIN_BYTES
        is_tracked = not is_copied and (hold is not None or copied_bytes > 0)
        target = self._incoming.router if isinstance(route, bytes) else self._outgoing.dealers.get(route)
        frames = self.encoding.encode(packet, checked=self._checksums)
        if isinstance(route, bytes):
            frames.insert(0, route)
        tracker = None
        if target is not None:
            self._sockets.used.add(target)
            try:
                for frame in frames[:-1]:
                    _send(target, frame, _MORE, is_copied, is_tracked)
                tracker = _send(target, frames[-1], zmq.NOBLOCK, is_copied, is_tracked)
            except zmq.Again:
                if isinstance(route, bytes):
                    self._doorman.counts["unread"] += 1
                else:  # a peer that does not read its answers asks again; a connection of ours is opened anew
                    self._outgoing.reopen(route)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
        if tracker is not None and not tracker.done:
            self._outflow.sent(route, tracker, hold, copied_bytes)
        elif hold is not None:
            hold.release()

    def poll(self, timeout_s: float | None) -> Iterator[tuple[Route, Packet | Disconnected]]:
        """Wait up to ``timeout_s`` and yield the packets that came."""
        incoming, outgoing, inflow, behind = self._incoming, self._outgoing, self._inflow, self._links.behind
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            self._look(now)
        if now >= inflow.due:
            inflow.look(now)
        if now >= self._links.due:
            self._links.look_for(now)
        due = min(inflow.due, self._links.due)
        if outgoing.refusals or behind:
            timeout_s = 0.0
        elif due < math.inf:
            left_s = max(0.0, due - now)
            timeout_s = left_s if timeout_s is None else min(timeout_s, left_s)
        ready, events = self._sockets.wait(timeout_s)
        if self._outflow.leaving:
            self._outflow.look()
        if events:
            self._links.receive(events)
        for link in list(behind):
            for _ in range(BATCH):
                if link not in behind:  # no other has come, or the link has ended
                    break
                come = link.come.popleft()
                if not link.come:
                    del behind[link]
                heard = self._doorman.decode(link.route, come, link)
                del come
                if heard is not None:
                    yield link.route, heard
                del heard
        names, router = outgoing.names, incoming.router
        for source in ready:
            if source is incoming.monitor:
                yield from incoming.events()
            elif source is not router and source not in names:
                outgoing.hear(source)
        while outgoing.refusals:
            yield outgoing.refusals.popleft()
        for source in ready:
            name = names.get(source)
            if name is None and source is not router:
                continue
            for _ in range(BATCH):
                try:
                    frames = self._reader.take(source, name)
                except ProtocolError:
                    self._doorman.counts["bytes"] += 1
                    raise
                except zmq.Again:
                    break  # a dropped message was the last
                if frames is None:
                    break  # so that the timers get their turn
                if name is None:
                    route, packet = self._enter(frames)
                else:
                    route, packet = name, self._decode(name, frames, frames[0])
                if packet is not None:
                    yield route, packet
                # What came before may have led to another connection in its place.
                if names.get(source) != name or not has_come(source):
                    break

    def _enter(self, frames: list[zmq.Frame]) -> tuple[Route, Packet | None]:
        """Return the route and the packet of a message along a connection that was opened to us."""
        route, origin = frames[0].bytes, frames[-1]
        if not (self._inflow.connections or self._incoming.tells_drops):
            return route, self._decode(route, frames[1:], origin)
        fd = descriptor_of(frames)
        if fd is not None:
            self._incoming.routes[fd] = route
            self._inflow.took(fd, self._reader.octets(frames))
        packet = self._decode(route, frames[1:], origin)
        if fd is not None and packet is not None:
            self._inflow.know(fd)
        return route, packet

    def _decode(self, route: Route, frames: list[zmq.Frame], origin: zmq.Frame) -> Packet | None:
        return self._doorman.decode(route, [frame.buffer for frame in frames], origin)

    def _look(self, now: float) -> None:
        """Close, and open again, what does not move."""
        self._outgoing.look(now)
        self._incoming.look(now)
        self._links.look()

    def _ended(self, link: Stream, why: str) -> None:
        """A link or stream ended: what is said along its route goes along another connection."""
        log.info("the %s of %s ended: %s", "near link" if link.is_near else "stream", link.name, why)
        if link.is_near and isinstance(link.route, str):
            self._outgoing.reconnect(link.route, link.has_heard)

    def close(self, linger_s: float) -> None:
        """Close all sockets, giving what is queued ``linger_s`` to leave."""
        self._links.close(linger_s)
        self._incoming.close()
        self._outgoing.close()
        self._sockets.close(linger_s)


class SocketReader:
    """Takes the frames of messages from sockets.

    Args:
        inflow: counts the bytes that were taken out of each connection.
        is_sealed: whether frames travel encrypted.
    """

    def __init__(self, inflow: Inflow, is_sealed: bool) -> None:
        self._inflow = inflow
        self._seal_octets = SEAL_OCTETS if is_sealed else 0
        self._surplus: Counter[zmq.Socket[bytes]] = Counter()
        """Sockets in the middle of a message that has too many frames, and how many were taken out."""

    def take(self, socket: zmq.Socket[bytes], route: Route | None) -> list[zmq.Frame] | None:
        """Return the frames of the next message; None while a message with too many is dropped.

        Args:
            socket: where from.
            route: along which the message comes; None where its first frame is the route.

        Raises:
            zmq.Again: if there is no message.
            ProtocolError: at the start of a message that has too many frames.
        """
        if socket in self._surplus:
            if self._drop_surplus(socket) and self._surplus.pop(socket) > SURPLUS_MAX:
                give_back()
            return None
        frames = [socket.recv(zmq.NOBLOCK, copy=False)]
        before = 1 if route is None else 0
        while frames[-1].more:
            if len(frames) > before + wire.PAYLOAD_FRAMES_MAX:
                self._surplus[socket] = len(frames)
                if (fd := descriptor_of(frames)) is not None and before:
                    self._inflow.took(fd, self.octets(frames))
                raise ProtocolError(
                    f"a message of more than {1 + wire.PAYLOAD_FRAMES_MAX} frames "
                    f"(from {whence(route or frames[0].bytes, frames[-1])})"
                )
            frames.append(socket.recv(zmq.NOBLOCK, copy=False))  # the rest of a message is there
        return frames

    def octets(self, frames: list[zmq.Frame]) -> int:
        """Return how many bytes a message took on its way, its route not counted."""
        sizes = [len(frame) + self._seal_octets for frame in frames[1:]]
        return sum(sizes) + sum([2 if size < 256 else 9 for size in sizes])

    def _drop_surplus(self, socket: zmq.Socket[bytes]) -> bool:
        """Take out some of a message that has too many frames; return whether that was the end of it."""
        fd, octets, is_over = None, 0, False
        self._surplus[socket] += SURPLUS_BATCH
        for _ in range(SURPLUS_BATCH):
            frame = socket.recv(zmq.NOBLOCK, copy=False)
            fd = descriptor_of([frame, frame]) if fd is None else fd
            octets += self.octets([frame, frame])
            if not frame.more:
                is_over = True
                break
        if fd is not None:
            self._inflow.took(fd, octets)
        return is_over
