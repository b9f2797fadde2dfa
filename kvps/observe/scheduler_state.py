"""The state of a scheduler, as its metrics and its status show it."""

from __future__ import annotations

from collections import Counter

from kvps.core.scheduler.phase import Phase
from kvps.core.scheduler.scheduler import Scheduler
from kvps.observe.sampler import State
from kvps.protocol.envelope import Role
from kvps.protocol.membership import Seen


def state_of(core: Scheduler, now: float) -> State:
    """Return the state of a scheduler."""
    job = core.job
    seats = Counter([f"{one.node.role},{one.state.value}" for one in job.seats.by_node.values()])
    gauges: dict[tuple[str, str], float] = {
        ("kvps_epoch", ""): job.checkpoints.epoch,
        ("kvps_view", ""): job.number,
        ("kvps_checkpoint_begun", ""): job.checkpoints.begun,
        ("kvps_checkpoint_kept", ""): job.checkpoints.kept,
    }
    gauges.update({("kvps_members", label): count for label, count in seats.items()})
    is_ready = job.stop is None and job.phase is not Phase.ENDING
    return State(gauges, is_ready, f"{job.phase.value}: {job.reason}", shown(core, now))


def shown(core: Scheduler, now: float) -> dict[str, object]:
    """Return what /statusz shows."""
    return as_json(core.job.name, core.seen(0, now))


def as_json(job: bytes, seen: Seen) -> dict[str, object]:
    """Return the answer to a status query as a program is shown it."""
    members: list[dict[str, object]] = [
        {**one._asdict(), "role": str(Role(one.role))} for one in seen.members
    ]
    for member, figures in zip(members, seen.figures, strict=False):  # an old scheduler has none
        member.update(figures._asdict())
    return {
        "job": job.hex()[:8],
        "phase": seen.phase,
        "reason": seen.reason,
        "software": seen.software,
        "epoch": seen.epoch,
        "checkpoint": seen.checkpoint,
        "members": members,
        "rounds": [one._asdict() for one in seen.rounds],
    }
