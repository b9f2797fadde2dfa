"""The standstill of a worker: its whole script waits in calls, and all that these wait for is known to others.

A standstill has a number. The number changes whenever a call begins or ends, so that the scheduler knows whether a worker
has moved between two beats. BEAT carries it only while each of the worker's requests waits at a server or at the scheduler.
But the scheduler's word that nobody can go on holds also where their own word is late. What the script waits in is known to
the process alone: the core asks once per second.
"""

from __future__ import annotations

from kvps.core.worker.connection import PROBE_AFTER_S

ASK_SCRIPT = 0
"""The ticket of a Finish that asks in which calls the script waits; no call has this ticket."""
CONFIRMED_S = PROBE_AFTER_S + 1.0
"""Seconds for which the word of a peer counts that a request waits there."""
FAR_S = 30.0
"""A call whose deadline is nearer than this ends by itself soon; its script may count on that."""
State = tuple[int, ...]
"""The number of calls that the script has made, and the tickets of those that have not ended."""


class Standstill:
    """The number of a worker's standstill, and the calls that its script waits in."""

    def __init__(self) -> None:
        self.number = 0
        """0 while the worker goes on, or may."""
        self.tickets: State = ()
        """The calls in which the script waits, by ticket."""
        self._count = 0
        self._state: State = ()

    def look(self, state: State) -> None:
        """Take in the calls of this moment: others than before end the standstill."""
        if state != self._state:
            self.end()
        self._state = state

    def hear(self, tickets: State, state: State) -> None:
        """The whole script waits in these calls; in none, if some part of it does not wait."""
        if not tickets or state != self._state:
            self.end()
        elif tickets != self.tickets:
            self._count += 1
            self.number, self.tickets = self._count, tickets

    def is_at(self, number: int, state: State) -> bool:
        """Whether the worker is still at the standstill of this number."""
        return number == self.number and state == self._state

    def end(self) -> None:
        """Note that the script goes on, or may."""
        self.number, self.tickets = 0, ()
