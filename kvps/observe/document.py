"""The document of a job: the answer to LOOK as all commands, the endpoints and the dashboard show it."""

from __future__ import annotations

from typing import Any

from kvps.observe.findings import problems_of
from kvps.phrases import ranks_in_words
from kvps.protocol.envelope import Role
from kvps.protocol.membership import Figures, Seen

UNKNOWN = Figures("", 0, 0, 0, 0, 0, 0.0)
"""The figures of members that an old scheduler knows nothing of."""


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
        "waits": [wait._asdict() for wait in seen.waits],
        "problems": [problem._asdict() for problem in problems_of(seen)],
    }
