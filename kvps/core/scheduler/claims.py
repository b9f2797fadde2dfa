"""Claims on taken seats: newcomers that wait until the holder is lost, or has proved to be alive.

Theory of operation
-------------------
A supervisor restarts a process as soon as it has ended, and often before any member knows of that end. So a
newcomer that finds its seat taken has perhaps made no mistake::

    HELLO ──► claim ──► CHALLENGE to the holder ──┬── the holder is lost: the newcomer takes the seat
                ▲                                 ├── ALIVE: the newcomer is refused
                └── HELLO again, each second ─────┴── neither: the newcomer is told to wait

A beat proves nothing here: it may have been under way when its sender ended. What proves that a holder
outlived the newcomer's coming is ALIVE with the number of a CHALLENGE that was sent after it.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvps.core.effects import Route
from kvps.core.scheduler.seat import SEATS_MAX, SeatLink
from kvps.protocol.membership import Challenge

CHALLENGE_EVERY_S = 0.5
"""Seconds after a challenge during which a connection is not challenged again, by any newcomer."""


class Claims:
    """The processes that claim a seat that is taken, and the challenges to its holders."""

    def __init__(self) -> None:
        self.outgoing: list[tuple[Route, Challenge]] = []
        """To be sent."""
        self._newest = 0
        """The number of the newest challenge."""
        self._since: dict[Route, int] = {}
        """By the newcomer's route: the newest challenge when it came. Only later ones prove anything."""

    def __contains__(self, route: Route) -> bool:
        return route in self._since

    def open(self, route: Route) -> int:
        """Return what number a challenge must exceed to prove something to this newcomer."""
        if route not in self._since:
            if len(self._since) >= SEATS_MAX:
                del self._since[
                    next(iter(self._since))
                ]  # the next HELLO of the oldest is a new claim
            self._since[route] = self._newest
        return self._since[route]

    def close(self, route: Route) -> None:
        """A newcomer has a seat, was refused, or is gone."""
        self._since.pop(route, None)

    def challenge(self, links: Mapping[Route, SeatLink], since: int, now: float) -> None:
        """Ask along connections that have proved nothing after ``since`` whether they are alive."""
        for route, link in links.items():
            if link.proved > since or now < link.challenged_at + CHALLENGE_EVERY_S:
                continue
            if link.challenge <= since:  # else it was asked, and has not answered yet
                # By the time: no answer to what a former scheduler asked has this number.
                self._newest = max(self._newest + 1, int(now * 1e6))
                link.challenge = self._newest
            link.challenged_at = now
            self.outgoing.append((route, Challenge(link.challenge)))
