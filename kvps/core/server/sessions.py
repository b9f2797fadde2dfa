"""Sessions of a server: the workers that ask it, their unanswered requests, and the links to them.

A link tells for how long values are under way, in both directions.

Theory of operation
-------------------
A worker knows when its values have arrived, because the server acknowledges them. It adds up the time in
which some are under way, and tells the sum in PONG. Nothing acknowledges the values that a server sends, so
the server sends PING behind them: the PONG says that they have arrived, too. One PING at a time is under way
to a worker, and values that are sent meanwhile get another. So the two sums are of the same kind: the time in
which values had been sent, and were not known to have arrived.

A link is *watched* only while the scheduler asks for figures. One that is fast is measured ten times per
second at most, so that small rounds cost no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvps.core.counts import LINK_BUSY, LINK_WATCHED
from kvps.core.effects import Route
from kvps.protocol.envelope import Message
from kvps.protocol.values import Ask

WATCH_S = 5.0
"""Seconds for which a link is watched after the scheduler asked for figures."""
WATCHED_MAX = 32
"""Links that are watched at a time; a server with more workers takes turns."""
AGAIN_S = 5.0
"""Seconds without an answer after which a PING is sent again: it may be lost."""
SHORT_S, PAUSE_S = 0.01, 0.1
"""If values took less than the first, no PING is sent for the second."""


class LinkUse(NamedTuple):
    """The time since the last PONG, and for how much of it values were under way."""

    watched_s: float
    in_s: float
    """Seconds in which values from the worker were under way."""
    out_s: float
    """Seconds in which values to the worker were under way."""

    def counts(self, rank: int) -> Mapping[tuple[str, str], float]:
        """Return it by metric and label."""
        return {
            (LINK_WATCHED, f"{rank}"): self.watched_s,
            (LINK_BUSY, f"{rank},in"): self.in_s,
            (LINK_BUSY, f"{rank},out"): self.out_s,
        }


@dataclass(slots=True, eq=False)
class Link:
    """The link to one worker. A method that returns True asks for a PING with :attr:`number`."""

    number: int = 0
    """The number of the newest PING."""
    _until: float = -math.inf
    """When the watch ends."""
    _asked_at: float | None = None
    """When the PING without an answer was sent last; None if there is none."""
    _away_since: float | None = None
    """Since when values are under way; None if none are that a PING has followed, or will."""
    _has_more: bool = False
    """Values were sent behind the newest PING."""
    _pause_until: float = -math.inf
    _heard: tuple[float, float] | None = None
    """When the last PONG of this watch came, and what the worker had added up; None before the first."""

    def watch(self, now: float) -> bool:
        """Watch the link for a while from now on."""
        if now > self._until:
            self._heard = None
        self._until = now + WATCH_S
        if self._asked_at is None:
            return self._ask(now)
        is_lost = now >= self._asked_at + AGAIN_S
        if is_lost:
            self._asked_at = now
        return is_lost

    def sent_values(self, now: float) -> bool:
        """Note that values were just sent to the worker."""
        if now > self._until or (self._asked_at is None and now < self._pause_until):
            return False
        if self._away_since is None:
            self._away_since = now
        if self._asked_at is not None:
            self._has_more = True
            return False
        return self._ask(now)

    def answered(self, number: int, sending_s: float, now: float) -> LinkUse | None:
        """Take in a PONG; return None if it answers none but an older PING.

        Args:
            number: of its PING.
            sending_s: the sum of the worker.
            now: the time.
        """
        if self._asked_at is None or number != self.number:
            return None
        self._asked_at = None
        out_s = 0.0 if self._away_since is None else now - self._away_since
        if out_s < SHORT_S:
            self._pause_until = now + PAUSE_S
        self._away_since = now if self._has_more else None
        heard, self._heard = self._heard or (now, sending_s), (now, sending_s)
        watched_s = now - heard[0]
        # In this order, a sum that is not a number counts as none.
        in_s = min(watched_s, max(0.0, sending_s - heard[1]))
        return LinkUse(watched_s, in_s, min(watched_s, out_s))

    def follows(self, now: float) -> bool:
        """Return whether another PING follows the answered PING, because of values that were sent behind
        it."""
        has_more, self._has_more = self._has_more, False
        return has_more and self._ask(now)

    def _ask(self, now: float) -> bool:
        self.number += 1
        self._asked_at = now
        return True


Describe = Callable[[int], str]
"""Describes the state of a rank in words."""


@dataclass(slots=True, eq=False)
class Session:
    """One worker rank as a server knows it, in one of its lives."""

    rank: int
    route: Route
    """Where its answers go: the route of its last packet."""
    incarnation: int
    asked_at: float | None = None
    """Time of its last request; PROBE does not count."""
    pending: dict[int, PendingRequest | PendingRead] = field(default_factory=dict)
    """seq -> request that is still to be answered; others are never answered again."""
    waiting_keys: int = 0
    """The keys that pending DECLAREs name, all together."""
    link: Link | None = None
    """The way to it and back; None before it is watched for the first time."""

    def wait(self, seq: int, request: PendingRequest) -> None:
        """Keep a request until it can be answered."""
        if self.pending.get(seq) is not request:
            self.forget(seq)
            self.pending[seq] = request
            self.waiting_keys += request.keys

    def forget(self, seq: int) -> None:
        """Keep a request no longer: it is answered."""
        request = self.pending.pop(seq, None)
        if isinstance(request, PendingRequest):
            self.waiting_keys -= request.keys


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request for something that does not exist yet."""

    retry: Callable[[], Message | None]
    """Returns the answer, or None while it still waits."""
    why: Callable[[Describe], str]
    keys: int = 0
    """The number of keys that it names, of a DECLARE."""
    store: str = ""
    """The store that it is of, if it ends with the store."""


@dataclass(slots=True, eq=False)
class PendingRead:
    """A request for values (a pull, or a push that wants them) and how far it has come."""

    session: Session
    seq: int
    store: str
    chunk: int
    asks: tuple[Ask, ...]
    again: Callable[..., object]
    """Answers it if its conditions hold by now."""
    values: bool = True
    """Whether it wants values, and not only versions."""
    index: int = 0
    """Index of the first ask whose condition does not hold."""
    at: int = 0
    """The element of the chunk at which it waits; the conditions before it hold."""
    call: int | None = None
    """The DECLARE whose value it reads, even while that is being loaded."""
