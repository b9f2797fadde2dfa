"""How a job stands, and why, as a table."""

import pytest

from kvps.core.scheduler.phase import Phase, assess
from kvps.core.scheduler.seat import Seat, Settings, State
from kvps.protocol.envelope import Node, Role

STATES = {"e": State.EMPTY, "h": State.HELD, "f": State.LEFT, "l": State.LOST, "g": State.GONE}


def stands(workers: str, servers: str, formed: bool, now: float = 0.0) -> tuple[str, str]:
    """Assess seats in these states: empty, held, leFt, lost, gone."""
    settings = Settings(len(workers), len(servers))
    seats = {}
    for role, states in ((Role.SERVER, servers), (Role.WORKER, workers)):
        for rank, state in enumerate(states):
            seats[Node(role, rank)] = Seat(Node(role, rank), STATES[state], 1, reason="why")
    phase, reason = assess(seats, settings, formed, now)
    assert phase in Phase
    return phase.value, reason


@pytest.mark.parametrize(
    ("workers", "servers", "phase", "reason"),
    [
        ("eh", "hh", "forming", "waiting for 1 of 2 workers (rank 0) and 0 of 2 servers"),
        ("hl", "e", "forming", "waiting for 1 of 2 workers (rank 1) and 1 of 1 servers (rank 0)"),
        (
            "e" * 9,
            "",
            "forming",
            "waiting for 9 of 9 workers (ranks 0, 1, 2, 3, 4, 5, 6, 7, …) and 0 of 0 servers",
        ),
        ("hf", "h", "running", "all 3 seats are taken"),
        ("ff", "e", "ending", "every worker left (2 of 2)"),
        ("hg", "e", "ending", "worker 1 is gone (why), and the job had not begun"),
        ("hh", "g", "ending", "server 0 is gone (why), and the job had not begun"),
    ],
)
def test_before_the_job_has_formed(workers: str, servers: str, phase: str, reason: str) -> None:
    assert stands(workers, servers, formed=False) == (phase, reason)


@pytest.mark.parametrize(
    ("workers", "servers", "phase", "reason"),
    [
        ("hf", "h", "running", "every member is here"),
        ("hl", "g", "running", "server 0 is gone (why), worker 1 is lost (why)"),
        (
            "h" + "g" * 10,
            "",
            "running",
            "" + ", ".join(f"worker {k} is gone (why)" for k in range(1, 9)) + " and 2 more",
        ),
        (
            "fl",
            "l",
            "running",
            "no worker is present; worker 1 is lost (why); a replacement may join within 30 s of a loss",
        ),
        ("ff", "l", "ending", "every worker left (2 of 2)"),
        ("fg", "l", "ending", "no worker is present; worker 1 is gone (why)"),
    ],
)
def test_once_it_has_formed(workers: str, servers: str, phase: str, reason: str) -> None:
    assert stands(workers, servers, formed=True) == (phase, reason)
