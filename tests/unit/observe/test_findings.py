"""Why a job does not go on: tables of waits and rounds, and the four places that show what was found."""

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from kvps.cli.status import screen
from kvps.observe.document import document_of
from kvps.observe.findings import CIRCLE_S, STUCK_S, Finding, Level, judge
from kvps.protocol.membership import Barrier, Beat, Look, Measured, OldRound, Seen, Wait
from kvps.tools.dashboard.model import JobModel
from kvps.tools.doctor.command import report
from kvps.tools.doctor.diagnosis import Measurements, diagnose
from kvps.tools.top import rendered
from tests.support.scheduler_harness import Stage, sent

JOB = bytes(16)
OLD, NEW = STUCK_S, STUCK_S - 0.5


def wait(rank: int, *ranks: int, call: str = "push()", age_s: float = OLD) -> Wait:
    return Wait(rank, call, age_s, ranks)


def opened(*missing: int, age_s: float = OLD) -> OldRound:
    return OldRound(0, "kv", "w", 7, missing, age_s)


ROUND = "round 7 of key 'w' of store 'kv' has been open for 10 s, and waits for rank 1"


@pytest.mark.parametrize(
    ("waits", "rounds", "texts"),
    [
        ([], [], []),
        ([wait(0, 1, age_s=NEW)], [opened(1, age_s=NEW)], []),
        ([], [opened(1)], [ROUND]),
        ([wait(0, 1)], [opened(1)], [ROUND]),
        ([wait(0)], [opened(1)], [ROUND]),
        ([], [opened()], []),  # it waits for other servers
        ([wait(0, 1)], [], ["worker 0 has waited in push() for 10 s, for rank 1"]),
        ([wait(2, call="pull()")], [], ["worker 2 has waited in pull() for 10 s"]),
        (
            [wait(0, 2, age_s=12), wait(1, 3, age_s=15), wait(4, 5), wait(6, 7)],
            [],
            [
                "worker 1 has waited in push() for 15 s, for rank 3",
                "worker 0 has waited in push() for 12 s, for rank 2",
                "worker 4 has waited in push() for 10 s, for rank 5",
            ],
        ),
        ([wait(0, 2)], [opened(1)], [ROUND, "worker 0 has waited in push() for 10 s, for rank 2"]),
    ],
)
def test_waits_and_open_rounds_are_named_from_ten_seconds_on(
    waits: Sequence[Wait], rounds: Sequence[OldRound], texts: Sequence[str]
) -> None:
    found = judge(waits, rounds)
    assert [item.text for item in found] == texts
    assert all(item.level is Level.WARN for item in found)


@pytest.mark.parametrize(
    ("waits", "ranks"),
    [
        ([wait(0, 1), wait(1, 0)], (0, 1)),
        ([wait(0, 1, age_s=CIRCLE_S), wait(1, 0, age_s=CIRCLE_S)], (0, 1)),
        ([wait(0, 1), wait(1, 2), wait(2, 1)], (1, 2)),
        ([wait(0, 3, 1), wait(3, 4), wait(1, 2), wait(2, 0)], (0, 1, 2)),
        ([wait(0, 1), wait(1, 0, age_s=CIRCLE_S - 1)], ()),
        ([wait(0, 1), wait(1, 2), wait(3, 1)], ()),
    ],
)
def test_a_circle_is_found_however_long_it_is(waits: Sequence[Wait], ranks: tuple[int, ...]) -> None:
    (first, *others) = judge(waits, [opened(1)])
    assert first.level is (Level.FAIL if ranks else Level.WARN)
    if ranks:
        assert first.members == tuple([f"worker {rank}" for rank in ranks])
        assert not others
        assert "they wait for each other" in first.advice


def test_a_long_circle_is_cut_short() -> None:
    (found,) = judge([wait(rank, (rank + 1) % 9) for rank in range(9)], [])
    assert found.text.count("has waited in") == 3
    assert found.text.endswith(" and 6 more")


def progress_of(seen: Seen) -> list[Finding]:
    """Return the findings of doctor's check of progress."""
    found = diagnose(Measurements("tcp://h:1", seen=seen, connect_s=0.1))
    return [item for item in found if item.topic == "progress"]


def shown(seen: Seen) -> list[str]:
    """Return what status, top, doctor and the dashboard show of a job."""
    out = io.StringIO()
    job = JobModel().take(document_of(JOB, seen), 0.0)
    Console(file=out, width=400).print(rendered(job, "", 400, None))
    dashboard = " ".join(f"{item['text']} {item['advice']}" for item in job["findings"])
    return [screen(job), out.getvalue(), report(progress_of(seen), False), dashboard]


def look(stage: Stage) -> Seen:
    (seen,) = sent(stage.say("w0", Look(), seq=9), Seen)
    return seen


def running(stage: Stage, seconds: float, **waits_in: str) -> None:
    """Let time pass, while workers beat."""
    for _ in range(round(seconds)):
        stage.wait(1, ["s0"])
        for route, call in waits_in.items():
            stage.say(route, Beat(4, call))


@pytest.mark.spec("R405")
def test_workers_that_wait_for_each_other_are_named_in_all_places() -> None:
    stage = Stage(2, 1)
    stage.form()
    stage.say("s0", Measured(0, (), (), (), (), (opened(1, age_s=3.0),)))
    stage.barrier("w1", name="epoch")
    running(stage, 8, w0="push()", w1="barrier()")
    seen = look(stage)
    assert [(wait.rank, wait.call, wait.ranks) for wait in seen.waits] == [
        (0, "push()", (1,)),
        (1, "barrier()", (0,)),
    ]
    for place in shown(seen):
        text = place.lower()
        assert "worker 0 has waited in push() for worker 1 for 7 s" in text
        assert "worker 1 has waited in barrier() for worker 0 for 7 s" in text
        assert "every worker must make the same calls" in text
        assert "all is well" not in text
        assert "no round has been open" not in text
    (progress,) = progress_of(seen)
    assert progress.level is Level.FAIL


@pytest.mark.spec("R405")
def test_another_rank_that_sets_a_rate_waits_for_rank_0() -> None:
    stage = Stage(2, 1)
    stage.form()
    running(stage, 5, w0="", w1="set_learning_rate()")
    assert [(wait.rank, wait.ranks) for wait in look(stage).waits] == [(1, (0,))]


@pytest.mark.spec("R405")
def test_a_job_that_closes_rounds_waits_for_nobody() -> None:
    stage = Stage(2, 1)
    stage.form()
    for beat in range(8):
        stage.wait(1, ["s0"])
        for route in ("w0", "w1"):
            stage.say(route, Beat(50 * (beat + 1), "push()"))
    stage.wait(1, ["s0"])
    seen = look(stage)
    assert not seen.waits
    assert not any("has waited" in place for place in shown(seen))


def test_at_no_barrier_and_in_no_round_it_is_not_known_for_whom_a_worker_waits() -> None:
    stage = Stage(3, 1)
    stage.form()
    stage.say("w2", Barrier("kv", "a", 0))
    running(stage, 12, w0="pull()")
    assert [(wait.rank, wait.ranks) for wait in look(stage).waits] == [(0, ())]
    assert all("orker 0 has waited in pull() for 11 s" in place for place in shown(look(stage)))
