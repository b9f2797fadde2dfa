"""The text of a Timeout: what a call still waited for.

It names the call as the user knows it, says who has not answered and why, and what the user may do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvps.core.membership_client import MembershipClient
from kvps.core.worker import calls
from kvps.core.worker.connection import Connection, Request
from kvps.errors import KvpsError, SchedulerLost, Timeout
from kvps.phrases import and_more
from kvps.protocol.checkpoint import Checkpoint
from kvps.protocol.membership import Barrier

REASONS_MAX = 3
"""How many reasons one text gives."""


def lateness(
    member: MembershipClient,
    call: calls.Call,
    waiting: Iterable[Request],
    link_of: Callable[[Request], Connection | None],
    now: float,
) -> KvpsError:
    """Return what ``call`` ends with, which waits for these requests.

    Args:
        member: who has made it.
        call: the call.
        waiting: its requests that have no answer.
        link_of: along which link a request was asked; None while it was not.
        now: seconds.
    """
    requests = list(waiting)
    who = f"worker {member.rank}: {name_of(call)} of store {call.store!r}"
    silent = member.silent_for(now)
    asked = [one for one in requests if one.server is None]
    if asked and silent > member.identity.silence_max_s:
        return SchedulerLost(
            f"{who}: no word from the scheduler at {member.identity.scheduler} for {silent:.0f} s. "
            "Pushes and pulls go on without it; barriers, checkpoints and joins wait. Start it again at "
            "the same address with the same --state"
        )
    view = member.view
    if view is not None and view.phase == "returning":
        why = [view.reason]
    elif asked:
        why = [_of_scheduler(one, member) for one in asked]
    else:
        why = sorted({one.waits_for or _silence(link_of(one), now) for one in requests})
    if isinstance(call, calls.REPEATED):
        then = "Nothing was changed. Call it again"
    elif isinstance(call, calls.TOGETHER):
        then = "It still stands. Call it again to wait on"
    else:
        then = "Nothing was cancelled: it is still under way, and is done at most once. Wait on"
    more = and_more(len(why) - REASONS_MAX)
    return Timeout(
        f"{who} is not done: {'; '.join(why[:REASONS_MAX])}{more}. {then}, or give a longer timeout="
    )


def _of_scheduler(request: Request, member: MembershipClient) -> str:
    message = request.message
    if isinstance(message, Checkpoint):
        return "not every server has written its image"
    if not isinstance(message, Barrier):
        return f"the scheduler has not answered ({member.reason})"
    which = f"number {message.number} of {message.name!r}"
    if message.resumed:
        which = f"{message.name!r} after round {message.after}"
    if request.waits_for:
        return f"{which} {request.waits_for}"
    return f"not every worker stands at {which} ({member.reason})"


def _silence(link: Connection | None, now: float) -> str:
    if link is None:
        return "other workers of this machine have not pushed the same"
    name = f"{link.route} ({link.endpoint})"
    if not link.ready:
        return f"{name} has not answered HELLO{': ' * bool(link.refusal)}{link.refusal}"
    assert link.heard_at is not None
    return f"{name} has not answered, and was last heard {now - link.heard_at:.1f} s ago"


def name_of(call: calls.Call) -> str:
    """Return what the user calls it."""
    return _NAMES[type(call)]


_NAMES: dict[type[calls.Call], str] = {
    calls.OpenStore: "create()",
    calls.Init: "init()",
    calls.MakeTable: "embedding()",
    calls.PushTableRows: "push() of rows",
    calls.PullTableRows: "pull() of rows",
    calls.ExportBlock: "export()",
    calls.SetTableRate: "set_learning_rate() of a table",
    calls.Broadcast: "broadcast()",
    calls.Lookup: "the look-up of keys",
    calls.PushValues: "push()",
    calls.PullValues: "pull()",
    calls.PushKeyRows: "push()",
    calls.PullKeyRows: "row_sparse_pull()",
    calls.Refresh: "refresh()",
    calls.Allocate: "empty_like()",
    calls.Versions: "version()",
    calls.ResumeKeys: "resume()",
    calls.SetOptimizer: "set_optimizer()",
    calls.SetRate: "set_learning_rate()",
    calls.StandAtBarrier: "barrier()",
    calls.JoinStore: "join()",
    calls.Flush: "the flush of earlier pushes",
    calls.AskStatus: "status",
    calls.SaveState: "save_optimizer_states()",
    calls.LoadState: "load_optimizer_states()",
    calls.Compress: "set_gradient_compression()",
    calls.SaveRests: "compression_state()",
    calls.LoadRests: "load_compression_state()",
    calls.TakeCheckpoint: "checkpoint()",
    calls.RestoreCheckpoint: "restore()",
    calls.RejoinStore: "the return to a checkpoint",
}
