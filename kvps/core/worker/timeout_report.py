"""The standstill of a worker, and the text of its end or of a Timeout: what a call still waits for.

The text names the call as the user knows it, says which peer has not answered and why, and what the user may
do.

In a standstill the whole script waits in calls, and all that these wait for is known to others. A standstill
has a number. The number changes whenever a call begins or ends, so that the scheduler knows whether a worker
has moved between two beats. BEAT carries it only while each of the worker's requests waits at a server or at
the scheduler. But the scheduler's word that nobody can go on holds also where their own word is late. What
the script waits in is known to the process alone: the core asks once per second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvps.core.membership_client import MembershipClient
from kvps.core.worker.calls.base import Call
from kvps.core.worker.connection import PROBE_AFTER_S, Connection, Request
from kvps.errors import KvpsError, Mismatch, SchedulerLost, Timeout
from kvps.phrases import and_more
from kvps.protocol.checkpoint import Checkpoint
from kvps.protocol.membership import Barrier

REASONS_MAX = 3
"""Most reasons that one text gives."""
ASK_SCRIPT = 0
"""The ticket of a Finish that asks in which calls the script waits; no call has this ticket."""
CONFIRMED_S = PROBE_AFTER_S + 1.0
"""Seconds for which the word of a peer counts that a request waits there."""
FAR_S = 30.0
"""A call whose deadline is nearer than this ends by itself soon; its script may count on that."""
State = tuple[int, ...]
"""The number of calls that the script has made, and the tickets of those that have not ended."""


def timeout_error(
    member: MembershipClient,
    call: Call,
    waiting: Iterable[Request],
    link_of: Callable[[Request], Connection | None],
    now: float,
) -> KvpsError:
    """Return the error of a call whose deadline has passed.

    Args:
        member: the worker that has made it.
        call: the call.
        waiting: its requests that have no answer.
        link_of: returns the connection along which a request was sent; None while it was not.
        now: seconds.
    """
    requests = list(waiting)
    who = f"worker {member.rank}: {call.title} of store {call.store!r}"
    silent = member.silent_for(now)
    asked = [request for request in requests if request.server is None]
    if asked and silent > member.identity.silence_max_s:
        return SchedulerLost(
            f"{who}: the scheduler at {member.identity.scheduler} has been silent for {silent:.0f} s. "
            "Pushes and pulls continue without it; barriers, checkpoints and joins wait. Start it again at "
            "the same address with the same --state"
        )
    view = member.view
    if view is not None and view.phase == "returning":
        why = [view.reason]
    elif asked:
        why = [_of_scheduler(request, member) for request in asked]
    else:
        why = sorted({request.waits_for or _silence(link_of(request), now) for request in requests})
    more = and_more(len(why) - REASONS_MAX)
    return Timeout(
        f"{who} is not done: {'; '.join(why[:REASONS_MAX])}{more}. {call.on_timeout.value}, or "
        "give a longer timeout="
    )


def standstill_error(
    member: MembershipClient, call: Call, waiting: Iterable[Request], reason: str
) -> KvpsError:
    """Return the error of a call that cannot end, since no worker can go on, as the scheduler has found."""
    why = sorted({request.waits_for for request in waiting})
    return Mismatch(
        f"worker {member.rank}: {call.title} of store {call.store!r} cannot end "
        f"({'; '.join(why[:REASONS_MAX])}{and_more(len(why) - REASONS_MAX)}): {reason}"
    )


def _of_scheduler(request: Request, member: MembershipClient) -> str:
    message = request.message
    if isinstance(message, Checkpoint):
        return "not every server has written its snapshot"
    if not isinstance(message, Barrier):
        return f"the scheduler has not answered ({member.reason})"
    which = f"number {message.number} of {message.name!r}"
    if message.resumed:
        which = f"{message.name!r} after round {message.after}"
    if request.waits_for:
        return f"{which} {request.waits_for}"
    return f"not every worker has reached {which} ({member.reason})"


def _silence(link: Connection | None, now: float) -> str:
    if link is None:
        return "other workers of this machine have not made the same push"
    name = f"{link.route} ({link.endpoint})"
    if not link.ready:
        return f"{name} has not answered HELLO{': ' * bool(link.refusal)}{link.refusal}"
    assert link.heard_at is not None
    return f"{name} has not answered, and was last heard from {now - link.heard_at:.1f} s ago"


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
