"""The text of a Timeout, and of the end of a standstill: what a call still waits for.

It names the call as the user knows it, says which peer has not answered and why, and what the user may do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvps.core.membership_client import MembershipClient
from kvps.core.worker.calls.base import Call
from kvps.core.worker.connection import Connection, Request
from kvps.errors import KvpsError, Mismatch, SchedulerLost, Timeout
from kvps.phrases import and_more
from kvps.protocol.checkpoint import Checkpoint
from kvps.protocol.membership import Barrier

REASONS_MAX = 3
"""Most reasons that one text gives."""


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
        f"{who} is not done: {'; '.join(why[:REASONS_MAX])}{more}. {call.on_timeout.value}, or give a longer timeout="
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
