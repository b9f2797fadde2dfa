"""The tracer of one process: spans of the work of its loop and its script, while a trace is recorded.

The effects of a packet pass through :meth:`Tracer.watch`, which reads the clock before and after each is
performed. So no core knows of this.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvps import protocol as p
from kvps.core.counts import Counts
from kvps.core.effects import Effect, Route, Send
from kvps.net.driver import Perform
from kvps.net.transport import Encoding
from kvps.protocol.envelope import Message, Packet, Role
from kvps.tools.trace.member import NOBODY, SpanKind, TimeSpan, TracedMember

GRADIENTS = (p.Push, p.PushRows, p.PushTables, p.Load)
VALUES = (p.Pulled, p.PulledRows, p.PulledTables, p.Changed)
BEFORE_SEND_NS = 20_000
"""A pause before an effect that is worth a span of its own."""
ROUTES_MAX = 4096
"""Connections whose peers are remembered."""
_ROLES = {str(role): role.value for role in Role}
Peer = tuple[int, int]
"""Role and rank."""


class Tracer:
    """Spans of one process.

    Args:
        member: keeps them until they leave.
        role: the role of this process.
        encoding: tells when a packet had become frames.
        clock: nanoseconds, the same for all threads.
    """

    def __init__(
        self,
        member: TracedMember,
        role: Role,
        encoding: Encoding,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.member = member
        self.clock = clock
        self._is_worker = role is Role.WORKER
        self._encoding = encoding
        self._counts: Counts | None = None
        self._peers: dict[Route, Peer] = {}
        self._lap_at = 0
        self._update_ns = 0
        self._script = threading.local()
        self._came: tuple[Route, Packet] | None = None
        """The packet that is served, until an effect of it is performed."""
        self._began = self._before = 0
        """When the core was called, and when it had its last effect performed."""

    # --- on and off -----------------------------------------------------------------------------

    def open(self, counts: Counts | None) -> None:
        """Measure what costs time only while it is measured: frames, and steps of the optimizer in
        ``counts``."""
        self._counts = counts
        self._encoding.measure(self.clock)
        if counts is not None:
            counts.lap = self._lap

    def close(self) -> None:
        """Measure no more."""
        self._encoding.rest()
        if self._counts is not None:
            self._counts.lap = None
        self._script = threading.local()

    def _lap(self) -> None:
        """An optimizer begins a step, or ends it."""
        now = self.clock()
        if self._lap_at:
            self._update_ns += now - self._lap_at
            self._lap_at = 0
        else:
            self._lap_at = now

    # --- the script -----------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Whether a trace is recorded."""
        return self.member.number != 0

    def waited(self, begin: int, end: int) -> None:
        """The calling thread has waited; before that it computed."""
        before = getattr(self._script, "ended_at", None)
        self._script.ended_at = end
        add = self.member.spans.append
        if before is not None:
            add(TimeSpan(SpanKind.COMPUTE, NOBODY, 0, before, begin - before))
        add(TimeSpan(SpanKind.WAIT, NOBODY, 0, begin, end - begin))

    # --- the loop -------------------------------------------------------------------------------

    def begin(self, came: tuple[Route, Packet] | None) -> None:
        """Note that the core is called, because of the packet that ``came`` along a route, or of none."""
        self._came, self._began = came, self.clock()
        self._before = self._began

    def watch(self, effect: Effect, perform: Perform) -> None:
        """Have an effect performed, and note how long it took."""
        made = self.clock()
        if self._came is not None:
            (route, packet), self._came = self._came, None
            has_payload = isinstance(effect, Send) and bool(effect.packet.payload)
            copies = self._is_worker and has_payload and not isinstance(packet.message, VALUES)
            self._before = self._began if copies else made
            self._handled(route, packet, self._began, self._before)
        perform(effect)
        done = self.clock()
        if isinstance(effect, Send):
            self._sent(effect, self._before, made, done)
        elif done - self._before >= BEFORE_SEND_NS:
            self._add(SpanKind.SERVE, (NOBODY, 0), self._before, done)
        self._before = done

    def finish(self) -> None:
        """Note that the core has returned from a call."""
        if self._came is not None:
            (route, packet), self._came = self._came, None
            self._handled(route, packet, self._began, self.clock())
        self.member.bound()

    def _handled(self, route: Route, packet: Packet, began: int, made: int) -> None:
        """Note that a packet was handled."""
        envelope, message = packet.envelope, packet.message
        peer = envelope.role.value, envelope.rank
        if len(self._peers) < ROUTES_MAX:
            self._peers[route] = peer
        seq, number, chunk = ids_of(packet, is_ours=not isinstance(route, bytes))
        octets = sum([frame.nbytes for frame in packet.payload])
        rest = seq, number, chunk, octets
        if isinstance(message, VALUES):
            self._add(SpanKind.SCATTER, peer, began, made, *rest)
        elif isinstance(message, GRADIENTS) and not self._is_worker:
            took, self._update_ns = min(self._update_ns, made - began), 0
            self._add(SpanKind.REDUCE, peer, began, made - took, *rest)
            if took:
                self._add(SpanKind.UPDATE, peer, made - took, made, *rest)
        else:
            self._add(SpanKind.SERVE, peer, began, made, *rest)

    def _sent(self, effect: Send, before: int, made: int, done: int) -> None:
        """Note that a packet was made and sent."""
        packet, route = effect.packet, effect.to
        peer = self._peer_of(route)
        is_ours = isinstance(route, bytes)
        seq, number, chunk = ids_of(packet, is_ours=is_ours)
        rest = seq, number, chunk, sum([frame.nbytes for frame in packet.payload])
        if is_ours or not self._is_worker:
            self._add(SpanKind.REPLY, peer, before, done, *rest)
            return
        if packet.payload or made - before >= BEFORE_SEND_NS:
            self._add(SpanKind.COPY, peer, before, made, *rest)
        at = made
        if made <= self._encoding.ended_at <= done:
            at = self._encoding.ended_at
            self._add(SpanKind.ENCODE, peer, made, at, *rest)
        self._add(SpanKind.SEND, peer, at, done, *rest)

    def _peer_of(self, route: Route) -> Peer:
        if isinstance(route, bytes):
            return self._peers.get(route, (NOBODY, 0))
        role, _, rank = route.partition(" ")
        return _ROLES.get(role, NOBODY), int(rank or 0)

    def _add(self, kind: SpanKind, peer: Peer, begin: int, end: int, *request: int) -> None:
        """Add a span; ``request``: its seq, number, chunk and bytes."""
        self.member.spans.append(TimeSpan(kind, *peer, begin, end - begin, *request))


def ids_of(packet: Packet, *, is_ours: bool) -> tuple[int, int, int]:
    """Return (seq, number, chunk) of the request that a packet makes or answers.

    Args:
        packet: the packet.
        is_ours: it answers a request of the process that receives it; else its envelope may have the number.
    """
    message = packet.message
    seq = _answered(message) if is_ours else packet.envelope.seq
    chunk = getattr(message, "chunk", 0)
    match message:
        case p.Push():
            return seq, message.runs[0].number if message.runs else 0, chunk
        case p.Pulled():
            return seq, max(0, message.runs[0].version - 1) if message.runs else 0, chunk
        case p.Pull():
            return seq, message.runs[0].after if message.runs else 0, chunk
        case p.PushRows() | p.Barrier():
            return seq, message.number, chunk
        case p.PushTables():
            return seq, message.parts[0].number if message.parts else 0, chunk
        case _:
            return seq, 0, chunk


def _answered(message: Message) -> int:
    """Return the number of the request that a message answers; 0 for none."""
    if isinstance(message, p.Ack):
        return message.receipts[0].seq if message.receipts else 0
    seq = getattr(message, "seq", 0)
    return seq if isinstance(seq, int) else 0
