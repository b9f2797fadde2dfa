"""The document of a job: the answer to LOOK as all commands, the endpoints and the dashboard show it.

The state of a scheduler, as its metrics, its status and its dashboard show it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvps.core.scheduler.figures.fault_log import Fault
from kvps.core.scheduler.phase import Phase
from kvps.core.scheduler.scheduler import Scheduler
from kvps.core.scheduler.seat import State
from kvps.observe.findings import problems_of
from kvps.observe.sampler import Sample
from kvps.phrases import ranks_in_words
from kvps.protocol.envelope import Node, Role
from kvps.protocol.membership import Figures, Seen

UNKNOWN = Figures("", 0, 0, 0, 0, 0, 0.0)
"""The figures of members that an old scheduler knows nothing of."""
LISTED = ("waits", "copies", "promotions", "moves", "publications", "hot_rows")
"""Fields of SEEN that the document has as they are."""


def document_of(job: bytes, seen: Seen) -> dict[str, Any]:
    """Return the answer to LOOK as JSON has it.

    Args:
        job: its name, or the part of it that is shown.
        seen: the answer.

    Example:
        >>> document_of(b"job!", Seen(1, "running", "all are here", (), ()))["phase"]
        'running'
    """
    presence = {member.rank: member.presence for member in seen.members if member.role == Role.WORKER}
    figures = seen.figures or (UNKNOWN,) * len(seen.members)
    return {
        "job": job.hex()[:8],
        "phase": seen.phase,
        "reason": seen.reason,
        "software": seen.software,
        "epoch": seen.epoch,
        "checkpoint": seen.checkpoint,
        "members": [
            {**member._asdict(), "role": str(Role(member.role)), **figure._asdict()}
            for member, figure in zip(seen.members, figures, strict=False)
        ],
        "rounds": [
            {
                **round_._asdict(),
                "waits_for": ranks_in_words(round_.missing, lambda rank: presence.get(rank, ""))
                if round_.missing
                else "other servers",
            }
            for round_ in seen.rounds
        ],
        **{name: [each._asdict() for each in getattr(seen, name)] for name in LISTED},
        "problems": [problem._asdict() for problem in problems_of(seen)],
    }


def state_of(core: Scheduler, now: float) -> Sample:
    """Return the state of a scheduler."""
    job = core.job
    seats = Counter([f"{seat.node.role},{seat.state.value}" for seat in job.seats.by_node.values()])
    gauges: dict[tuple[str, str], float] = {
        ("kvps_epoch", ""): job.checkpoints.epoch,
        ("kvps_view", ""): job.number,
        ("kvps_checkpoint_begun", ""): job.checkpoints.begun,
        ("kvps_checkpoint_kept", ""): job.checkpoints.kept,
    }
    gauges.update({("kvps_members", label): count for label, count in seats.items()})
    is_ready = job.stop is None and job.phase is not Phase.ENDING
    return Sample(
        gauges,
        is_ready=is_ready,
        why=f"{job.phase.value}: {job.reason}",
        status=_status(core, now),
        figures=tuple(job.measurements.figures(now)),
    )


def _status(core: Scheduler, now: float) -> dict[str, object]:
    """Return the answer to LOOK, with the age of each member, the checkpoints and the last faults
    and events."""
    job, ours = core.job, core.job.checkpoints
    status = document_of(job.name, core.seen(0, now))
    for member in status["members"]:
        seat = job.seats.by_node[Node(Role[member["role"].upper()], member["rank"])]
        is_held = seat.state is State.HELD and seat.taken_at is not None
        member["held_s"] = now - (seat.taken_at or 0.0) if is_held else None
    return {
        **status,
        "checkpoints": {
            "begun": ours.begun,
            "kept": ours.kept,
            "kept_age_s": None if ours.kept_at is None else now - ours.kept_at,
            "took_s": ours.took_s,
            "every_s": ours.every_s,
            "stage": ours.stage,
            "failure": ours.failure,
        },
        "faults": [_fault(fault, now) for fault in reversed(job.fault_log.faults)],
        "events": [
            {"age_s": now - event.at, "level": event.level, "text": event.text}
            for event in reversed(job.fault_log.events)
        ],
    }


def _fault(fault: Fault, now: float) -> dict[str, object]:
    return {
        "member": str(fault.node),
        "age_s": now - fault.at,
        "reason": fault.reason,
        "steps": [{"after_s": at - fault.at, "text": text} for at, text in fault.steps],
        "is_over": fault.over_at is not None,
        "lasted_s": (now if fault.over_at is None else fault.over_at) - fault.at,
    }
