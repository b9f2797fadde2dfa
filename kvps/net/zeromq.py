"""Packets over ZeroMQ: a ROUTER for incoming connections, a DEALER for each outgoing connection.

What libzmq does not promise is not relied on here: a send that succeeded says nothing (only an
answer does), a routing id is an address (identity is in the envelope), and a queue is bounded by
the windows of the protocol, not by a water mark. What it does know first is that a connection
broke: with ``watch`` the events of the ROUTER's monitor are turned into drops, told apart by the
file descriptor that libzmq names on every message.

A network may do worse than to break. Packets that go by TCP have a checksum, or are sealed
(:mod:`kvps.net.zap`). A connection that looks open and carries nothing is closed and opened again by the end
that opened it: libzmq's heartbeats have something to carry, and whether bytes move is asked of the kernel
(:mod:`kvps.net.tcp_watch`), since libzmq sees no frame before its last byte, and no heartbeat behind one. Its
peer does not judge, since a process that stands still is not lost for that. What libzmq gives up for good is
opened again, too.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping

import zmq
import zmq.utils.garbage  # its exit handler refuses sends without a copy: it must be known before ours

from kvps.core.effects import Connect, Hold, Route
from kvps.core.keys import Keyring, RoleKey, near_door
from kvps.core.limits import Limits
from kvps.errors import ConfigError, ProtocolError, Unauthorized
from kvps.net import descriptors
from kvps.net.doorman import Doorman, descriptor_of, whence
from kvps.net.inflow import CONTROL, Inflow, data_limits
from kvps.net.locality import is_kin
from kvps.net.memory import give_back
from kvps.net.tcp_watch import CAN_COUNT, COPIED_MIN_BYTES, Outflow, Pulse, Watch, events_of, moved
from kvps.net.transport import DROPPED, Disconnected, Encoding, Guard, Refusals
from kvps.net.zap import DOMAIN, EVENTS, Handshakes, Keys, Porter
from kvps.protocol import wire
from kvps.protocol.envelope import Envelope, Packet, Role
from kvps.protocol.membership import Error

BATCH = 64
"""Packets taken from one socket before the others, and the timers, get their turn."""
SURPLUS_BATCH = 4096
"""And so many frames of a message that has too many for a packet: they are dropped one by one."""
SURPLUS_MAX = 1 << 16
"""The most frames of such a message whose memory is left in the heap: libzmq has 64 bytes for each."""
QUEUE_MAX = {True: 1000, False: 16384}
"""Messages that wait to leave along one connection that was opened to a scheduler, and to another process. A
peer that does not read its answers gets no more; it asks again for the answers that it missed."""
SEAL_OCTETS = 33
"""Bytes that CURVE adds to each frame."""
CONTROL_BYTES_MAX = 1 << 20
"""Bytes of the longest frame that a scheduler takes: no packet to it has a payload."""
_OPTIONS: tuple[tuple[int, int], ...] = (
    (zmq.LINGER, 0),
    (zmq.SNDHWM, 0),  # the protocol's windows bound what is under way; of answers, QUEUE_MAX
    (zmq.RCVHWM, 0),
    (zmq.HANDSHAKE_IVL, 5_000),
    (zmq.CONNECT_TIMEOUT, 5_000),
    (zmq.RECONNECT_IVL, 100),
    (zmq.RECONNECT_IVL_MAX, 2_000),
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 30),
    (zmq.BACKLOG, 1024),
)
CONTROL_HEARTBEAT_S = 2.0, 4.0
DATA_HEARTBEAT_S = 5.0, 15.0
"""How often the opener of a TCP connection asks whether it carries anything, and how long nothing may
move then. To the scheduler both together leave room before the silence for which it gives a member up."""
FADE_S = 3.0
"""How long the connection by which a member joined stays, in seconds: the scheduler answers along it until it has
heard the other one, and what it says last, STOP, it says once."""
LOOK_EVERY_S = 1.0
"""How often it is looked whether anything moves."""
NEVER_MS = 24 * 3_600_000
"""libzmq's own judgement is put off by so much."""


class ZmqTransport:
    """The sockets of one process. ``endpoint`` is where it can be reached, if it listens."""

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
        """Open none yet, but a place to listen if one is given.

        Args:
            bind: as :meth:`listen` has it.
            watch: as :meth:`listen` has it.
            checksums: whether what leaves by TCP has one. What comes with one is checked anyway.
            role: what this process is; it decides what others may send to it, and how much.
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
        self._role = role
        self._keys = keys
        self._porter: Porter | None = None
        limits = limits or Limits()
        self._doorman = Doorman(role, limits=limits)
        self._frame_bytes_max = CONTROL_BYTES_MAX if is_control else wire.FRAME_BYTES_MAX
        self._queue_max = QUEUE_MAX[is_control]
        self._inflow = Inflow(CONTROL if is_control else data_limits(), idle_max=limits.idle)
        self._surplus: Counter[zmq.Socket[bytes]] = Counter()
        """Those in the middle of a message that has too many frames for a packet, and how many were taken out."""
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._names: dict[zmq.Socket[bytes], str] = {}
        self._fading: list[
            tuple[float, zmq.Socket[bytes]]
        ] = []  # replaced, and closed at that time
        self._openings: dict[str, Connect] = {}
        """How each connection was opened, by its name."""
        self._watches: dict[str, Watch] = {}
        self._events_of: dict[zmq.Socket[bytes], str] = {}
        self._refusals: deque[tuple[Route, Packet]] = deque()
        """Packets that stand in for an answer where no connection is made."""
        self._handshakes = Handshakes(keys)
        self._look_at = time.monotonic()
        self._shortage = descriptors.Shortage()
        self._router: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._failures: Counter[str] = Counter()
        """How many handshakes of others failed, by why."""
        self._tells_drops = False
        self._routes: dict[int, Route] = {}
        self._outflow = Outflow(limits.unread)
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._poller.register(self._woken, zmq.POLLIN)
        self._reconnects = 0
        self.endpoint = ""
        if bind is not None:
            self.listen(bind, watch)

    def guard(self, admit: Guard) -> None:
        """Have ``admit`` judge every packet by its envelope from now on, before it is decoded."""
        self._doorman.admit = admit

    @property
    def refused(self) -> Refusals:
        """The packets and connections that were refused."""
        asked = self._porter.refused if self._porter is not None else Counter()
        return Refusals(self._doorman.counts, asked + self._failures, self._inflow.closings)

    @property
    def reconnects(self) -> int:
        """Number of connections opened here that broke, or that others have replaced."""
        return self._reconnects

    def trust(self, keys: dict[str, str]) -> None:
        """Take connections by these session keys."""
        if self._porter is not None:
            self._porter.trust(keys)

    def open_by(self, roles: Mapping[str, RoleKey]) -> None:
        """Take connections by these keys of roles from now on; those that were made stay."""
        if self._porter is not None:
            self._porter.ring.roles = roles

    def listen(self, endpoint: str, watch: bool = False) -> None:
        """Take connections at ``endpoint``; ``watch`` those that break. Once for each transport.

        Raises:
            ConfigError: if that cannot be.
        """
        assert self._router is None, "one place to listen is enough"
        router = self._socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.SNDHWM, self._queue_max)
        router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        keys = self._keys
        if keys is not None or not _is_wire(endpoint):
            self._doorman.porter = self._asked_by(router)
        if keys is not None and _is_wire(endpoint):
            if self._role is Role.SERVER:
                with contextlib.suppress(zmq.ZMQError):  # then its neighbours come by TCP, too
                    router.bind(near_door(keys.session.public))
            router.setsockopt(zmq.CURVE_SERVER, 1)  # of places that are bound from here on
            router.setsockopt(zmq.CURVE_SECRETKEY, keys.listening(self._role).secret.encode())
        self._tells_drops = watch
        self._monitor = router.get_monitor_socket(_EVENTS)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            router.bind(endpoint)
        except zmq.ZMQError as error:
            router.disable_monitor()
            self.close(0.0)
            raise ConfigError(
                f"cannot listen on {endpoint}: {os.strerror(error.errno or 0)}. Is another kvps process running "
                "there? Choose another port with --bind, or port 0 for a free one"
            ) from error
        self.endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        if _is_wire(self.endpoint):
            self._inflow.port = int(self.endpoint.rpartition(":")[2])
        self._router = router
        self._poller.register(router, zmq.POLLIN)

    def _asked_by(self, socket: zmq.Socket[bytes]) -> Porter:
        """Have libzmq ask for each connection of a socket whether it is allowed; return the object that answers."""
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        if self._porter is None:
            opens, learns = self._keys.opens if self._keys else {}, self._role is Role.SERVER
            self._porter = Porter(self._context, Keyring(os.geteuid(), opens, learns))
            self._poller.register(self._porter.socket, zmq.POLLIN)
        return self._porter

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        for option, value in _OPTIONS:
            socket.setsockopt(option, value)
        # Per frame, checked by libzmq before it allocates.
        socket.setsockopt(zmq.MAXMSGSIZE, self._frame_bytes_max)
        return socket

    def connect(self, to: Connect) -> None:
        """Open a connection; it replaces an older one of its name.

        One to a peer on this host that has a key goes through its near door, where it is open and its process of
        our own user: nothing is sealed there.

        Raises:
            ConfigError: if its endpoint is none, or there are too few file descriptors.
        """
        name, endpoint = to.to, to.endpoint
        descriptors.demand(f"the connection to {name}", descriptors.CONNECTION)
        if to.is_near and to.key and is_kin(near_door(to.key)):
            endpoint = near_door(to.key)
        old = self._dealers.pop(name, None)
        if old is not None:
            self._forget(name, old)
            is_handed_over = to.is_member and not self._openings[name].is_member
            self._reconnects += not is_handed_over
            if not is_handed_over:
                self._deafen(old)
            self._fading.append((time.monotonic() + FADE_S * is_handed_over, old))
        dealer = self._socket(zmq.DEALER)
        if _is_wire(endpoint):
            every_s, silence_s = CONTROL_HEARTBEAT_S if to.is_near is None else DATA_HEARTBEAT_S
            dealer.setsockopt(zmq.HEARTBEAT_IVL, int(every_s * 1000))
            limit_ms = NEVER_MS if CAN_COUNT else int(silence_s * 1000)
            dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, limit_ms)
            if CAN_COUNT:
                events = dealer.get_monitor_socket(EVENTS)
                self._watches[name] = Watch(events, every_s + silence_s)
                if name == "scheduler":  # to be told at once that it is not served
                    self._events_of[events] = name
                    self._poller.register(events, zmq.POLLIN)
            if self._keys is not None:
                self._handshakes.seal(dealer, to.key, to.is_member)
        else:
            self._asked_by(dealer)
        try:
            dealer.connect(endpoint)
        except zmq.ZMQError as error:
            self._forget(name, dealer)
            dealer.close(0)
            raise ConfigError(
                f"{endpoint!r} is not an address of {name}: {error.strerror}. Write it as tcp://HOST:PORT"
            ) from error
        self._openings[name] = to
        self._dealers[name] = dealer
        self._names[dealer] = name
        self._fade(time.monotonic())
        self._poller.register(dealer, zmq.POLLIN)

    def send(self, route: Route, packet: Packet, hold: Hold | None) -> None:
        """Send, or drop if there is no peer, or if the peer does not read."""
        copied_bytes = 0
        if hold is None and packet.payload and isinstance(route, bytes):
            copied_bytes = sum([frame.nbytes for frame in packet.payload])
            if self._outflow.is_full(route, copied_bytes):
                self._doorman.counts["unread"] += 1
                return
        is_tracked = hold is not None or copied_bytes >= COPIED_MIN_BYTES
        if isinstance(route, bytes):
            target, endpoint = self._router, self.endpoint
        else:
            target, endpoint = self._dealers.get(route), self._openings.get(route, NOWHERE).endpoint
        frames = wire.encode(packet, checked=self._checksums and _is_wire(endpoint))
        if self.encoding.clock is not None:
            self.encoding.ended_at = self.encoding.clock()
        if isinstance(route, bytes):
            frames.insert(0, route)
        tracker = None
        if target is not None:
            try:
                tracker = target.send_multipart(
                    frames, zmq.NOBLOCK, copy=not packet.payload, track=is_tracked
                )
            except zmq.Again:
                if isinstance(route, bytes):
                    self._doorman.counts["unread"] += 1
                # Whoever does not read its answers asks again. Of our own connections no queue is ever
                # full: there is none, as libzmq has given up.
                if isinstance(route, str):
                    if route in self._watches:
                        self._heed(route)  # why
                    self.connect(self._openings[route])
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
        if tracker is not None and not tracker.done:
            self._outflow.sent(route, tracker, hold, copied_bytes)
        elif hold is not None:
            hold.release()

    def poll(self, timeout_s: float | None) -> Iterator[tuple[Route, Packet | Disconnected]]:
        """Wait up to ``timeout_s`` and yield what came."""
        self._open_again()
        wait_s = self._inflow.wait_s(timeout_s)
        if self._porter is not None and self._porter.waiting:
            left_s = max(0.0, self._porter.waiting[0].until - time.monotonic())
            wait_s = left_s if wait_s is None else min(wait_s, left_s)
        if self._refusals:
            wait_s = 0.0
        ready = dict(self._poller.poll(None if wait_s is None else math.ceil(wait_s * 1000)))
        if self._outflow.leaving:
            self._outflow.look()
        if ready.pop(self._woken.fileno(), None):
            with contextlib.suppress(BlockingIOError):
                while self._woken.recv(4096):
                    pass
        if self._porter is not None:
            if self._porter.socket in ready:
                self._porter.answer()
            if self._porter.waiting:
                self._porter.look()
        for events in [source for source in ready if source in self._events_of]:
            self._heed(self._events_of[events])
        while self._refusals:
            yield self._refusals.popleft()
        if self._monitor is not None and self._monitor in ready:
            yield from self._events()
        self._inflow.look()
        if self._router is not None and self._router in ready:
            yield from self._receive(self._router, None)
        for arrived_at in ready:
            name = self._names.get(arrived_at) if isinstance(arrived_at, zmq.Socket) else None
            if name is not None:
                yield from self._receive(arrived_at, name)

    def _receive(
        self, socket: zmq.Socket[bytes], name: str | None
    ) -> Iterator[tuple[Route, Packet]]:
        for _ in range(BATCH):
            if (
                socket.closed or self._names.get(socket) != name
            ):  # what came before led to another in its place
                return
            try:
                frames = self._frames(socket, 1 if name is None else 0)
            except zmq.Again:
                return
            if frames is None:
                return  # so that the timers get their turn
            if name is not None:
                if (packet := self._doorman.decode(name, frames)) is not None:
                    yield name, packet
                continue
            route, fd = frames[0].bytes, descriptor_of(frames)
            if fd is not None:
                self._routes[fd] = route
                self._inflow.took(fd, self._octets(frames))
            packet = self._doorman.decode(route, frames[1:])
            if packet is None:
                continue
            if fd is not None:
                self._inflow.know(fd)
            yield route, packet

    def _frames(self, socket: zmq.Socket[bytes], before: int) -> list[zmq.Frame] | None:
        """Return the frames of the next message; None while a message with too many is dropped.

        Args:
            one: where from.
            before: how many frames stand before those of the packet.

        Raises:
            zmq.Again: if there is no message.
            ProtocolError: at the start of a message that has too many frames.
        """
        if socket in self._surplus:
            if not self._drop_surplus(socket):
                return None
            if self._surplus.pop(socket) > SURPLUS_MAX:
                give_back()
        frames = [socket.recv(zmq.NOBLOCK, copy=False)]
        while frames[-1].more:
            if len(frames) > before + wire.PAYLOAD_FRAMES_MAX:
                self._surplus[socket] = len(frames)
                self._doorman.counts["bytes"] += 1
                if (fd := descriptor_of(frames)) is not None and before:
                    self._inflow.took(fd, self._octets(frames))
                route = frames[0].bytes if before else self._names[socket]
                raise ProtocolError(
                    f"a message of more than {1 + wire.PAYLOAD_FRAMES_MAX} frames "
                    f"(from {whence(route, frames[before:])})"
                )
            frames.append(socket.recv(zmq.NOBLOCK, copy=False))  # the rest of a message is there
        return frames

    def _drop_surplus(self, socket: zmq.Socket[bytes]) -> bool:
        """Take out some of a message that has too many frames; return whether that was the end of it."""
        fd, octets, is_over = None, 0, False
        self._surplus[socket] += SURPLUS_BATCH
        for _ in range(SURPLUS_BATCH):
            frame = socket.recv(zmq.NOBLOCK, copy=False)
            fd = descriptor_of([frame, frame]) if fd is None else fd
            octets += self._octets([frame, frame])
            if not frame.more:
                is_over = True
                break
        if fd is not None:
            self._inflow.took(fd, octets)
        return is_over

    def _octets(self, frames: list[zmq.Frame]) -> int:
        """Return how many bytes a message took on its way, its route not counted."""
        seal = 0 if self._keys is None else SEAL_OCTETS
        sizes = [len(frame) + seal for frame in frames[1:]]
        return sum(sizes) + sum([2 if size < 256 else 9 for size in sizes])

    def _events(self) -> Iterator[tuple[Route, Disconnected]]:
        """Take in which connections were made and which broke; yield these, if they are watched."""
        assert self._monitor is not None
        for event, fd in events_of(self._monitor):
            if event == zmq.EVENT_ACCEPTED:
                self._inflow.opened(fd)
                continue
            if event != zmq.EVENT_DISCONNECTED:  # the value is no descriptor, but a reason
                self._failures[_FAILURES.get(fd, "no_handshake")] += 1
                continue
            self._inflow.closed(fd)
            route = self._routes.pop(fd, None)
            if route is not None and self._tells_drops:
                yield route, DROPPED

    def _forget(self, name: str, dealer: zmq.Socket[bytes]) -> None:
        """Watch a connection no longer."""
        if name in self._watches:
            dealer.disable_monitor()
            events = self._watches.pop(name).events
            if self._events_of.pop(events, None) is not None:
                self._poller.unregister(events)
            events.close(0)

    def _heed(self, name: str) -> None:
        """Take in what libzmq tells of a connection that was opened here."""
        now = time.monotonic()
        watch = self._watches[name]
        for kind, value in events_of(watch.events):
            if kind in (zmq.EVENT_CONNECTED, zmq.EVENT_DISCONNECTED):
                is_up = kind == zmq.EVENT_CONNECTED
                self._reconnects += not is_up
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
        is_turned, why = self._handshakes.failed(self._openings[name].endpoint, kind, value, made_s)
        if is_turned:
            self.connect(self._openings[name])
        elif why:
            self._refuse(why)

    def _refuse(self, text: str) -> None:
        """Let the core hear that there is no way to the scheduler, as if that had said so."""
        envelope = Envelope(bytes(16), 0, Role.SCHEDULER, 0, 0, 0)
        self._refusals.append(("scheduler", Packet(envelope, Error(0, Unauthorized.code, text))))

    def _open_again(self) -> None:
        """Replace the connections along which nothing has moved for too long."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        self._fade(now)
        if self._router is not None and self._shortage.look(now):
            self._failures["no_descriptor"] += 1
        for name, watch in list(self._watches.items()):
            self._heed(name)
            if watch.up is None or self._watches.get(name) is not watch:
                continue  # libzmq is at it, or it was opened again just now
            if watch.pulse is None:
                watch.pulse = Pulse(watch.silence_s, now)
            counted = moved(watch.up)
            if counted is not None and watch.pulse.is_dead(now, counted):
                self.connect(self._openings[name])

    def _fade(self, now: float) -> None:
        """Close the connections that have others in their place for long enough."""
        for _, dealer in [entry for entry in self._fading if now >= entry[0]]:
            self._deafen(dealer)
            dealer.close(0)
        self._fading = [entry for entry in self._fading if now < entry[0]]

    def _deafen(self, dealer: zmq.Socket[bytes]) -> None:
        """Read nothing more from a connection."""
        if self._names.pop(dealer, None) is not None:
            self._poller.unregister(dealer)

    def wake(self) -> None:
        """Make a waiting :meth:`poll` return; any thread may call this."""
        with contextlib.suppress(BlockingIOError, OSError):
            self._waker.send(b"\0")

    def close(self, linger_s: float) -> None:
        """Close all sockets, giving what is queued ``linger_s`` to leave."""
        if self._monitor is not None and self._router is not None:
            self._router.disable_monitor()
            self._monitor = None
        for name, dealer in self._dealers.items():
            self._forget(name, dealer)
        self._context.destroy(linger=int(linger_s * 1000))
        self._waker.close()
        self._woken.close()


NOWHERE = Connect("", "")
_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""The watched events of connections that others open. A key that is refused is counted where it is judged."""
_FAILURES: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "no_key",
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "wrong_server_key",
}
"""Why a handshake failed, by libzmq's number."""


def _is_wire(endpoint: str) -> bool:
    """Whether what goes there leaves this process's memory for good, and may come out changed."""
    return endpoint.startswith("tcp:")
