"""Bytes that leave a process: held until they are sent, and no more than the peer reads.

libzmq queues what a peer does not read, and its water marks count messages. Values that lie in the server's own
buffers cost nothing there but their hold, and are released as soon as they have left, whatever other peers do.
What was copied for one answer, as rows are, takes memory until it has left: of a peer that has so much of it unread,
further answers are dropped. It probes for them when it reads again.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import zmq

from kvps.core.effects import Hold, Route
from kvps.core.limits import TABLE

COPIED_MIN_BYTES = 64 << 10
"""Smaller answers are not counted: their number is bounded."""


class _Leaving(NamedTuple):
    tracker: zmq.MessageTracker
    hold: Hold | None
    copied_bytes: int


class Outflow:
    """The sent messages that have not left yet, by connection.

    Args:
        unread_max_bytes: how much that was copied for it may wait to be read by one peer.
    """

    def __init__(self, unread_max_bytes: int = TABLE["unread"].default) -> None:
        self._unread_max_bytes = unread_max_bytes
        self.leaving: dict[Route, deque[_Leaving]] = {}
        self._unread: dict[Route, int] = {}

    def is_full(self, route: Route, copied_bytes: int) -> bool:
        """Whether a peer is not to get so much more, as it reads nothing of what it got."""
        unread = self._unread.get(route, 0)
        return unread > 0 and unread + copied_bytes > self._unread_max_bytes

    def sent(
        self, route: Route, tracker: zmq.MessageTracker, hold: Hold | None, copied_bytes: int
    ) -> None:
        """Note what libzmq has taken; ``hold`` is released when it has left."""
        self.leaving.setdefault(route, deque()).append(_Leaving(tracker, hold, copied_bytes))
        self._unread[route] = self._unread.get(route, 0) + copied_bytes

    def look(self) -> None:
        """Release what has left."""
        for route in [gone for gone, queue in self.leaving.items() if queue[0].tracker.done]:
            queue = self.leaving[route]
            while queue and queue[0].tracker.done:
                _, hold, copied_bytes = queue.popleft()
                self._unread[route] -= copied_bytes
                if hold is not None:
                    hold.release()
            if not queue:
                del self.leaving[route], self._unread[route]
