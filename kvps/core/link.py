"""One worker's talk with one server: what is queued, what is on its way, what must go again.

A request is *queued* until the window has room, then *sent*, perhaps *received* (a push that
also asks for values is acknowledged first and answered later), and at last *answered*. ZeroMQ may
lose what was on a connection that broke, so a request that stays unanswered is asked after with a
PROBE; the server names those that it does not have, and these are sent again, with the same bytes.

Priority orders what is queued: the higher first. Requests for one chunk keep their order among
themselves, whatever their priorities; a request of a higher priority lifts those before it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvps.messages import Message, Packet

if TYPE_CHECKING:
    from kvps.core.worker import Talk

WINDOW_BYTES = 16 << 20
"""Payload that may be on its way to one server without having been acknowledged."""
PROBE_AFTER_S = 2.0
PROBE_SEQS_MAX = 4096


@dataclass(slots=True, eq=False)
class Request:
    """One message to one server that must be answered."""

    server: int | None
    """None addresses the scheduler."""
    message: Message
    fill: Callable[[], tuple[torch.Tensor, ...]] | None = None
    """Makes the payload, at the latest when it is sent."""
    payload_bytes: int = 0
    lane: int = 0
    """The chunk whose requests must keep their order; 0 for those that travel by themselves."""
    priority: int = 0
    store: str = ""
    on_reply: Callable[[Packet], None] | None = None
    """Called with the answer, as soon as it is there."""
    on_refused: Callable[[], None] | None = None
    """Called if the server refuses it: nothing was changed there by it."""
    on_filled: Callable[[], None] | None = None

    payload: tuple[torch.Tensor, ...] = ()
    seq: int = 0
    sent_at: float | None = None
    received: bool = False
    answered: bool = False
    waits_for: str = ""
    """What the server last said it waits for."""
    talk: Talk | None = None
    """The call it belongs to."""

    def freeze(self) -> None:
        """Make the payload now, if it is not made yet; its source may change from here on."""
        if self.fill is not None:
            self.payload, self.fill = self.fill(), None
            if self.on_filled is not None:
                self.on_filled()


class Link:
    """The requests of one worker to one server."""

    def __init__(self, server: int) -> None:
        self.server = server
        self.ready = False
        self.heard_at: float | None = None
        self.outstanding: dict[int, Request] = {}
        """Sent and not answered, by seq, oldest first."""
        self._seq = 0
        self._order = 0
        self._lanes: dict[int, deque[Request]] = {}
        self._heap: list[tuple[int, int, int]] = []
        self._bytes_away = 0
        self._probed_at = 0.0

    def queue(self, request: Request) -> None:
        """Put ``request`` in line."""
        self._order += 1
        lane = request.lane or -self._order
        self._lanes.setdefault(lane, deque()).append(request)
        heapq.heappush(self._heap, (-request.priority, self._order, lane))

    @property
    def queued(self) -> Iterator[Request]:
        """The requests in line, in no order."""
        return (one for lane in self._lanes.values() for one in lane)

    def due(self, now: float) -> Iterator[Request]:
        """Yield the requests that may be sent now, numbered and counted as sent."""
        while self.ready and self._heap and self._has_room():
            _, _, lane = heapq.heappop(self._heap)
            line = self._lanes[lane]
            request = line.popleft()
            if not line:
                del self._lanes[lane]
            request.freeze()
            self._seq += 1
            request.seq, request.sent_at = self._seq, now
            self.outstanding[request.seq] = request
            self._bytes_away += request.payload_bytes
            yield request

    def _has_room(self) -> bool:
        return self._bytes_away < WINDOW_BYTES

    def receive(self, seq: int) -> Request | None:
        """The server has request ``seq`` and will answer it later."""
        request = self.outstanding.get(seq)
        if request is not None and not request.received:
            request.received = True
            self._bytes_away -= request.payload_bytes
        return request

    def answer(self, seq: int) -> Request | None:
        """The server answered request ``seq``; None if that is known already."""
        request = self.receive(seq)
        if request is not None:
            del self.outstanding[seq]
            request.answered = True
            request.payload = ()
        return request

    def overdue(self, now: float) -> tuple[int, ...]:
        """Return the requests to probe for, if it is time to."""
        if self.probe_at() is None or now < (self.probe_at() or 0.0):
            return ()
        self._probed_at = now
        return self.to_probe()

    def to_probe(self) -> tuple[int, ...]:
        """Return the oldest requests without an answer."""
        return tuple(self.outstanding)[:PROBE_SEQS_MAX]

    def probe_at(self) -> float | None:
        """When the next PROBE is due; None while nothing is outstanding."""
        if not self.ready or not self.outstanding:
            return None
        oldest = next(iter(self.outstanding.values())).sent_at
        assert oldest is not None
        return max(oldest, self._probed_at) + PROBE_AFTER_S
