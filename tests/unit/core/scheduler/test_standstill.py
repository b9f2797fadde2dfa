"""When the scheduler says that no worker can go on: never where one might."""

from collections.abc import Callable

import pytest

from kvps.core.scheduler.standstill import STILL_S
from kvps.protocol.membership import Beat
from tests.support.scheduler_harness import Stage, notes, sent

CALLS = {"w0": "push()", "w1": "barrier()", "w2": "push()", "w9": "push()"}


class Still:
    """A job whose workers stand still, unless told otherwise."""

    def __init__(self, workers: int = 2) -> None:
        self.stage = Stage(workers, 1)
        self.stage.form()
        self.numbers = {f"w{rank}": 1 for rank in range(workers)}
        self.calls = dict.fromkeys(CALLS, 7)
        self.notes: list[str] = []

    def beat(self, *silent: str) -> dict[str, Beat]:
        """Let a second pass, and all but the silent beat; return the answers."""
        self.stage.wait(1.0)
        answers = {}
        for route in ("s0", *self.numbers):
            if route in silent:
                continue
            beat = (
                Beat(self.calls[route], CALLS[route], standstill=self.numbers[route])
                if route != "s0"
                else Beat(0)
            )
            effects = self.stage.say(route, beat)
            self.notes += notes(effects)
            (answers[route],) = sent(effects, Beat, route)
        return answers

    def told_after(self, beats: int = 12) -> dict[str, int]:
        """Return after how many seconds each worker is told."""
        told: dict[str, int] = {}
        for at in range(beats):
            for route, answer in self.beat().items():
                if answer.standstill:
                    assert answer.standstill == self.numbers[route]
                    told.setdefault(route, at)
        return told


@pytest.mark.spec("R436")
def test_all_are_told_who_waits_in_which_call() -> None:
    job = Still(3)
    told = job.told_after()
    assert set(told) == {"w0", "w1", "w2"}
    assert all(STILL_S <= at <= STILL_S + 2 for at in told.values())
    (said,) = [note for note in job.notes if "none can go on" in note]
    assert said.startswith(
        "warning: every worker waits, and none can go on: workers 0, 2 have waited in push() for "
    )
    assert "worker 1 has waited in barrier() for " in said


@pytest.mark.spec("R436")
def test_a_worker_that_missed_the_answer_is_told_again_though_another_is_lost_by_now() -> None:
    job = Still(3)
    while not job.beat()["w0"].standstill:
        pass
    job.stage.leave("w0", done=False, code=1)
    del job.numbers["w0"]
    job.numbers["w1"] = 0
    answers = job.beat()
    assert answers["w1"].standstill == answers["w2"].standstill == 1
    assert sum("none can go on" in note for note in job.notes) == 1


def goes_on(job: Still) -> None:
    job.numbers["w1"] = 0


def moves(job: Still) -> None:
    job.numbers["w1"] += 1


def alone(job: Still) -> None:
    job.stage.leave("w1")
    del job.numbers["w1"]


def was_stopped(job: Still) -> None:
    job.beat("w1")
    job.beat("w1")


def server_was_stopped(job: Still) -> None:
    job.beat("s0")
    job.beat("s0")


@pytest.mark.spec("R436")
@pytest.mark.parametrize("change", [goes_on, moves, was_stopped, server_was_stopped])
def test_nobody_is_told_for_a_while_after_one_has_moved_or_may_have_been_stopped(
    change: Callable[[Still], None],
) -> None:
    job = Still()
    for _ in range(4):
        assert not job.beat()["w0"].standstill
    change(job)
    for _ in range(4):
        assert not any(answer.standstill for answer in job.beat().values())


@pytest.mark.spec("R436")
def test_nobody_is_told_while_a_member_is_silent() -> None:
    for silent in ("w1", "s0"):
        job = Still()
        for _ in range(3):
            job.beat()
        for _ in range(6):
            answers = job.beat(silent)
            assert not answers["w0"].standstill


@pytest.mark.spec("R436")
def test_nobody_is_told_while_one_is_lost_and_all_once_it_is_replaced() -> None:
    job = Still()
    job.stage.leave("w1", done=False, code=1)
    del job.numbers["w1"]
    assert not job.told_after()
    job.stage.hello("w9", rank=1)
    job.numbers["w9"] = 0
    assert not job.told_after(), "it may go on"
    job.numbers["w9"] = 1
    told = job.told_after()
    assert set(told) == {"w0", "w9"}
    assert all(STILL_S <= at <= STILL_S + 2 for at in told.values())


@pytest.mark.spec("R436")
def test_nobody_is_told_while_a_server_is_lost() -> None:
    job = Still()
    job.beat()
    job.stage.leave("s0", done=False, code=1)
    for _ in range(12):
        assert not any(answer.standstill for answer in job.beat("s0").values())
