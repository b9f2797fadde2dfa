"""One worker's requests to one server or peer: queued, in flight, answered, resent.

A request is *queued* until the window has room, then *sent*, perhaps *received* (a push that also
asks for values is acknowledged first and answered later), and at last *answered*. ZeroMQ may lose
messages when a connection breaks, so a PROBE asks after a request that stays unanswered; the
server names the requests that it does not have, and these are sent again, with the same bytes.

Queued requests go by priority, the highest first. Requests for one chunk form a *lane* and keep
their order: a request of higher priority lifts those before it in its lane.

All connections of a worker share the host's *uplink*. Little is under way on it at once, so that
chunks leave one after the other: a server that has one whole chunk can add it up while the next is
on its way to another server, and a request of higher priority does not wait behind megabytes.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch

from kvps.core.worker.plan import HERE
from kvps.protocol.envelope import Message, Packet
from kvps.protocol.membership import Member
from kvps.tensors import PRIVATE, Memory

UPLINK_BYTES = 3 << 20
UPLINK_LEAST, SHARED_LEAST = 3, 2
WINDOW_BYTES = 16 << 20
"""Limits of the payload that was sent and not acknowledged.

UPLINK_BYTES: from all workers of one machine to all servers. UPLINK_LEAST requests are allowed in any case,
and SHARED_LEAST of each worker if there are several. WINDOW_BYTES: to one server. The last request may go
beyond a limit. Payload that a server reads where it lies does not count.
"""
FIRST = 1 << 62
"""The priority of what is sent before anything else, also along a connection that is not ready."""
PROBE_AFTER_S = 2.0
PROBE_SEQS_MAX = 4096


@dataclass(slots=True)
class Traffic:
    """Counters since the store was opened; a rollback does not reset them.

    A peer is a server, or the worker of this host that pushes to the servers for this one.
    """

    pushed_bytes: int = 0
    """Bytes of the dense gradients that were pushed, as the script gave them."""
    encoded_bytes: int = 0
    """Bytes of the payload that was made of them."""
    sent_bytes: int = 0
    """Bytes of payload that were sent or lent to peers."""
    received_bytes: int = 0
    """Bytes of payload that peers have sent or lent."""
    resent: int = 0
    """Number of requests that a peer did not have, and that were sent again."""

    @property
    def compression_ratio(self) -> float:
        """The bytes of dense gradients for each byte of their payload; 1 before the first push."""
        return self.pushed_bytes / self.encoded_bytes if self.encoded_bytes else 1.0


@dataclass(slots=True, eq=False)
class Request:
    """One message to one server that must be answered."""

    server: int | None
    """None addresses the scheduler."""
    message: Message
    fill: Callable[[str], tuple[torch.Tensor, ...]] | None = None
    """Makes the payload for the peer along a route, when it is sent at the latest."""
    payload_bytes: int = 0
    """Bytes of the payload; if over 0, the request changes the server's values and is never dropped."""
    lane: int = 0
    """The chunk whose requests keep their order; 0 for a request without an order."""
    priority: int = 0
    on_reply: Callable[[Packet, bool], None] | None = None
    """Called with the answer as soon as it is there, and whether the caller still waits."""

    payload: tuple[torch.Tensor, ...] = ()
    seq: int = 0
    """Its number on its connection, from 1 on; 0 until it is sent."""
    sent_at: float = 0.0
    dropped: bool = False
    """Nobody wants the answer any more."""
    waits_for: str = ""
    """The reason that the server last gave for not having answered."""
    confirmed_at: float = -math.inf
    """When the server, or the scheduler, last said that it has the request, and waits for calls of
    workers."""
    owner: object = None
    """A pending call, or a merged request of several workers."""
    traffic: Traffic | None = None
    """The counters of its store; None while it is not known here."""
    link: Connection | None = None
    """The connection that it goes along; None while it waits to be merged with others."""

    def freeze(self) -> None:
        """Make the payload now, unless it is made; its source may change from here on."""
        if self.fill is not None:
            assert self.server is not None
            route = route_of(self.server) if self.link is None else self.link.route
            self.payload, self.fill = self.fill(route), None

    def peek(self) -> tuple[torch.Tensor, ...]:
        """Return the payload to be read in this process, now; it need not be made for that."""
        return self.payload if self.fill is None else self.fill(HERE)

    def drop(self) -> None:
        """Drop a request that changes nothing and whose answer is no longer wanted."""
        assert not self.payload_bytes, "what changes values must arrive"
        self.dropped = True
        if self.link is not None:
            self.link.outstanding.pop(self.seq, None)

    def forget(self) -> None:
        """Let go of the payload."""
        self.payload, self.fill = (), None


def route_of(server: int) -> str:
    """Return the name of the connection to a server."""
    return f"server {server}"


class SendScheduler:
    """The uplink of a worker: which requests of all its connections may be sent."""

    def __init__(self, *, is_limited: bool = True) -> None:
        self.is_limited = is_limited
        """Whether the payload under way is limited."""
        self.links: list[Connection] = []
        self.sharers = 1
        """Number of workers that share the uplink."""
        self.queued: dict[Connection, None] = {}
        """The connections that have queued requests, and perhaps some others."""
        self.order = count(1)
        """The places in line of requests."""
        self.bytes_away = self.requests_away = 0
        """The bytes and requests in flight, of all connections."""

    def flow(self, now: float, send: Callable[[Connection, Request], None]) -> None:
        """Have the requests sent that may be sent now, over all links in order."""
        heads: list[tuple[tuple[int, int], Connection]] = []
        for link in list(self.queued):
            if (head := link.head()) is not None:
                heapq.heappush(heads, (head, link))  # no two heads have the same place
        most, least = UPLINK_BYTES // self.sharers, UPLINK_LEAST if self.sharers == 1 else SHARED_LEAST
        while heads:
            is_full = self.bytes_away >= most and self.requests_away >= least
            if is_full and self.is_limited and not self._has_room(most, least, now):
                return
            link = heads[0][1]
            send(link, link.send(now))
            if not link.line:
                self.queued.pop(link, None)
                heapq.heappop(heads)
            elif (head := link.head()) is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (head, link))

    def _has_room(self, most: int, least: int, now: float) -> bool:
        """Whether more may be sent, as payload to a silent server does not count."""
        heard = [link for link in self.links if not link.is_late(now)]
        return (
            sum([link.bytes_away for link in heard]) < most or sum([len(link.away) for link in heard]) < least
        )


class Connection:
    """The requests of one worker to one peer.

    "Away" is said of requests whose payload was sent and not acknowledged.
    """

    def __init__(
        self,
        route: str,
        endpoint: str = "",
        incarnation: int = 0,
        memory: Memory = PRIVATE,
        uplink: SendScheduler | None = None,
    ) -> None:
        self.route = route
        """The name of the connection, and of its peer."""
        self._memory = memory
        self._uplink = uplink or SendScheduler()
        self._uplink.links.append(self)
        self.endpoint = endpoint
        self.incarnation = incarnation
        self.lineage = 0
        """The line of its peer, as a view has it: the next of this line holds all that this one held."""
        self.has_moved = False
        """Such an incarnation has the seat now, and has not answered HELLO yet."""
        self.ready = False
        """The peer has answered HELLO."""
        self.refusal = ""
        """The text of the error that it answered instead."""
        self.is_returning = False
        """The peer has taken another's place, and is told first what this worker holds."""
        self.heard_at: float | None = None
        self.outstanding: dict[int, Request] = {}
        """Sent and not answered, by seq, oldest first."""
        self._seq = 0
        self._lanes: dict[int, deque[Request]] = {}
        self.line: list[tuple[int, int, Request]] = []
        """A heap of the queued requests; perhaps none of them is still to be sent."""
        self.bytes_away = 0
        self.away: dict[int, Request] = {}
        """Number -> request whose payload was sent and not acknowledged."""
        self._probed_at = 0.0
        self._sending_s = 0.0
        """Seconds for which some payload was away, without the time since the next."""
        self.sending_since: float | None = None
        """Since when some payload is away; None if none is."""

    def is_of_line(self, line: int) -> bool:
        """Whether a server of this line holds all that the one held that this connection is to."""
        return line == (self.lineage or self.incarnation)

    def follow(self, server: Member, line: int) -> None:
        """Be a connection to this server."""
        self.incarnation, self.endpoint, self.lineage = server.incarnation, server.endpoint, line

    def queue(self, request: Request) -> None:
        """Put ``request`` in line."""
        request.link = self
        if request.lane:
            self._lanes.setdefault(request.lane, deque()).append(request)
        self._uplink.queued[self] = None
        heapq.heappush(self.line, (-request.priority, next(self._uplink.order), request))

    def head(self) -> tuple[int, int] | None:
        """Return (negative priority, place in line) of the request that may be sent next; None if
        none may."""
        is_full = self._uplink.is_limited and self.bytes_away >= WINDOW_BYTES
        if is_full or not (self.ready or (self.line and self.line[0][2].priority == FIRST)):
            return None
        while self.line:
            first = self.line[0][2]
            if first.lane:
                lane = self._lanes[first.lane]
                while lane and lane[0].dropped:
                    lane.popleft()
            if not first.seq and not first.dropped:
                return self.line[0][:2]
            heapq.heappop(self.line)  # or lifted by another, it went before its turn
        self._uplink.queued.pop(self, None)
        return None

    def send(self, now: float) -> Request:
        """Return the request that may be sent next, as :meth:`number` does."""
        first = self.line[0][2]
        request = self._lanes[first.lane].popleft() if first.lane else first
        if request is first:
            heapq.heappop(self.line)
        return self.number(request, now)

    def is_free(self) -> bool:
        """Whether a request may be sent at once: nothing of this worker is queued or away."""
        return self.ready and not self._uplink.queued and not self._uplink.requests_away

    def number(self, request: Request, now: float) -> Request:
        """Return a request with its payload and its number, counted as sent."""
        request.link = self
        if request.fill is not None:  # as freeze(), which would be a call more for each chunk
            request.payload, request.fill = request.fill(self.route), None
        self._seq += 1
        request.seq, request.sent_at = self._seq, now
        self.outstanding[request.seq] = request
        if request.traffic is not None:
            request.traffic.sent_bytes += request.payload_bytes
        if not self._memory.lends(self.route, request.payload):
            self.away[request.seq] = request
            self.bytes_away += request.payload_bytes
            self._uplink.bytes_away += request.payload_bytes
            self._uplink.requests_away += 1
            if self.sending_since is None and self.bytes_away:
                self.sending_since = now
        return request

    def has_sent(self, seq: int) -> bool:
        """Whether a request had this number, perhaps long ago."""
        return 0 < seq <= self._seq

    def look(self, now: float) -> None:
        """Note whether some payload is still away."""
        if self.sending_since is not None and not self.bytes_away:
            self._sending_s += now - self.sending_since
            self.sending_since = None

    def sending_s(self, now: float) -> float:
        """Return the seconds for which some payload was away, since the worker began."""
        return self._sending_s + (0.0 if self.sending_since is None else now - self.sending_since)

    def is_late(self, now: float) -> bool:
        """Whether the server has not acknowledged some payload for :data:`PROBE_AFTER_S`."""
        if not self.away:
            return False
        return now >= next(iter(self.away.values())).sent_at + PROBE_AFTER_S

    @property
    def is_busy(self) -> bool:
        """Whether some request is queued, or has no answer."""
        return bool(self.outstanding) or any(self._lanes.values())

    def receive(self, seq: int) -> Request | None:
        """Note that the server has request ``seq`` and will answer it later; return the request."""
        request = self.outstanding.get(seq)
        if request is not None and seq in self.away:
            self._arrives(request)
        return request

    def miss(self, seq: int) -> Request | None:
        """The peer does not have request ``seq``: return it, to go again.

        It leaves the window. The peer may refuse to take it in before one that waits for room.
        """
        request = self.receive(seq)
        if request is not None and request.traffic is not None:
            request.traffic.resent += 1
        return request

    def _arrives(self, request: Request) -> None:
        """The payload of a request that was away is there."""
        del self.away[request.seq]
        self.bytes_away -= request.payload_bytes
        self._uplink.bytes_away -= request.payload_bytes
        self._uplink.requests_away -= 1

    def answer(self, seq: int, packet: Packet | None = None) -> Request | None:
        """Note that the server answered request ``seq``, by ``packet``; return it, None if that was known."""
        request = self.outstanding.pop(seq, None)
        if request is not None:
            if seq in self.away:
                self._arrives(request)
            if request.traffic is not None and packet is not None:
                for frame in packet.payload:
                    request.traffic.received_bytes += frame.nbytes
            request.payload = ()
        return request

    def abandon(self) -> list[Request]:
        """Forget all requests without an answer; return them as if they were not sent, in the
        order of each lane."""
        queued = [request for lane in self._lanes.values() for request in lane if not request.dropped]
        loose = [request for _, _, request in sorted(self.line) if not (request.lane or request.seq)]
        left = [*self.outstanding.values(), *queued, *[request for request in loose if not request.dropped]]
        for request in left:
            request.seq, request.link = 0, None
        self.outstanding.clear()
        self._lanes.clear()
        self.line.clear()
        self._uplink.queued.pop(self, None)
        self._uplink.bytes_away -= self.bytes_away
        self._uplink.requests_away -= len(self.away)
        self.away.clear()
        self.bytes_away = 0
        self.sending_since = None
        return left

    def is_overdue(self, now: float) -> bool:
        """Whether it is time to probe; if so, it is taken to be done."""
        is_overdue = now >= self.probe_at()
        if is_overdue:
            self._probed_at = now
        return is_overdue

    def unanswered(self) -> list[tuple[int, ...]]:
        """Return the numbers of all requests without an answer, one tuple for each PROBE."""
        seqs = tuple(self.outstanding)
        return [seqs[at : at + PROBE_SEQS_MAX] for at in range(0, len(seqs), PROBE_SEQS_MAX)]

    def probe_at(self) -> float:
        """When the next PROBE is due; infinite while nothing is outstanding."""
        if not self.outstanding:
            return math.inf
        oldest = next(iter(self.outstanding.values())).sent_at
        return max(oldest, self._probed_at) + PROBE_AFTER_S

    def due_at(self, hello_at: float) -> float:
        """Return when something is due: a PROBE, or at ``hello_at`` HELLO while it is not answered."""
        return self.probe_at() if self.ready else min(self.probe_at(), hello_at)
