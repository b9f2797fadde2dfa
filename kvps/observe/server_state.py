"""The state of a server, as its metrics and its status show it."""

from __future__ import annotations

from kvps.core.server.measured import gauges
from kvps.core.server.server import Server
from kvps.observe.sampler import Sample


def state_of(core: Server, now: float) -> Sample:
    """Return the state of a server."""
    member, budget = core.member, core.control.budget
    reserved, epoch = budget.reserved(), core.checkpointer.epoch
    values = gauges(core.context, core.control, epoch, core.oldest_round_s)
    status: dict[str, object] = {
        "epoch": core.checkpointer.epoch,
        "view": member.number,
        "stores": len(core.context.stores),
        "memory_bytes": reserved._asdict(),
        "memory_limit_bytes": budget.limit_bytes,
        "memory_used_share": budget.pressure.used_share,
        "oldest_round_s": core.oldest_round_s,
    }
    why = "is a member of the job"
    if member.welcome is None:
        why = "waits for the scheduler"
    elif core.checkpointer.is_returning:
        why = "returns to a checkpoint"
    else:
        status["rank"] = member.rank
        status["job"] = member.job.hex()[:8]
        if budget.pressure.is_high:
            why = f"is short of memory: {budget.pressure}"
    is_member = member.welcome is not None and not core.checkpointer.is_returning
    is_ready = is_member and not budget.pressure.is_high
    status = {**status, "ready": is_ready, "reason": why}
    return Sample(values, is_ready=is_ready, why=why, status=status)
