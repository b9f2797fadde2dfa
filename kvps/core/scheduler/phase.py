"""The phase of a job and its reason: the scheduler's policy as one function.

A job *forms* until every seat has been taken, then *runs* as long as a worker is here or may come
back, then *ends*. What the scheduler does about it is in :mod:`kvps.core.scheduler.job`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from kvps.core.scheduler.seat import Seat, Settings, State
from kvps.phrases import some_of
from kvps.protocol.envelope import Node, Role

_NAMED_MAX = 8
"""How many ranks or seats one sentence names."""


class Phase(enum.Enum):
    """How the job stands."""

    FORMING = "forming"
    RUNNING = "running"
    RETURNING = "returning"
    """It runs, and its servers return to a cut."""
    ENDING = "ending"
    """It cannot go on, or is over; it ends as soon as no worker is here."""


def assess(seats: Mapping[Node, Seat], settings: Settings, formed: bool, now: float) -> tuple[Phase, str]:
    """Decide how the job stands, and say why. ``formed``: all seats have been taken once."""
    workers = [seat for seat in seats.values() if seat.node.role is Role.WORKER]
    seats = {node: seat for node, seat in seats.items() if node.role is not Role.STANDBY}
    absent = [
        seat for seat in seats.values() if seat.state in (State.LOST, State.GONE) and not seat.is_vacant
    ]
    if all(seat.is_done for seat in workers):
        left = sum([seat.state is State.LEFT for seat in workers])
        return Phase.ENDING, f"every worker left ({left} of {left})"
    if not formed:
        gone = [seat for seat in absent if seat.state is State.GONE]
        if gone:
            return Phase.ENDING, f"{told(gone)}, and the job had not begun"
        missing = [seat.node for seat in seats.values() if not (seat.is_taken or seat.is_vacant)]
        if missing:
            return Phase.FORMING, _waiting(missing, settings)
        taken = sum([seat.is_taken for seat in seats.values()])
        return Phase.RUNNING, f"all {taken} seats are taken"
    if any(seat.state is State.HELD for seat in workers):
        return Phase.RUNNING, told(absent) if absent else "every member is here"
    absent = [seat for seat in absent if seat.node.role is Role.WORKER]
    if any(seat.may_be_replaced(settings, now) for seat in absent):
        return Phase.RUNNING, (
            f"no worker is present; {told(absent)}; a replacement may join within "
            f"{settings.replace_max_s:g} s of a loss"
        )
    return Phase.ENDING, f"no worker is present; {told(absent)}"


def told(seats: list[Seat]) -> str:
    """Say what became of these seats, and why."""
    return some_of([f"{seat.node} is {seat.state.value} ({seat.reason})" for seat in seats], _NAMED_MAX)


def _waiting(missing: list[Node], settings: Settings) -> str:
    parts = []
    for role, count in ((Role.WORKER, settings.workers), (Role.SERVER, settings.servers)):
        ranks = [node.rank for node in missing if node.role is role]
        named = ", ".join(map(str, ranks[:_NAMED_MAX])) + (", …" * (len(ranks) > _NAMED_MAX))
        which = f" (rank{'s' * (len(ranks) > 1)} {named})" if ranks else ""
        parts.append(f"{len(ranks)} of {count} {role}s{which}")
    return f"waiting for {' and '.join(parts)}"
