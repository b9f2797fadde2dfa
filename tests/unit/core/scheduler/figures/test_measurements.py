"""Servers are asked for figures, not too often, and their answers change nothing."""

import pytest

from kvps.core.scheduler.figures.measurements import AGAIN_S
from kvps.errors import ProtocolError
from kvps.protocol.membership import (
    Count,
    Error,
    Measure,
    Measured,
)
from tests.support.scheduler_harness import Stage, sent


def answer(number: int, *counts: Count) -> Measured:
    return Measured(number, counts, (), (), (), ())


def asked(stage: Stage, *routes: str) -> list[int]:
    """Have the servers asked; return the numbers of the questions to these."""
    effects = stage.take(stage.scheduler.on_measure(stage.now))
    return [item.number for route in routes for item in sent(effects, Measure, route)]


def formed(servers: int = 1) -> Stage:
    stage = Stage(1, servers)
    stage.form()
    return stage


@pytest.mark.spec("R270", "R271")
def test_a_server_is_asked_again_when_it_has_answered_or_time_has_passed() -> None:
    stage = formed()
    figures = stage.scheduler.job.measurements.figures
    assert asked(stage, "s0") == [1]
    assert figures(stage.now) == []
    stage.now += 1
    assert asked(stage, "s0") == []
    stage.say("s0", answer(1))
    assert [(figure.rank, figure.answer_s, figure.age_s) for figure in figures(stage.now)] == [(0, 1.0, 0.0)]
    assert asked(stage, "s0") == [2]
    stage.wait(AGAIN_S, ["s0", "w0"])
    assert [(figure.answer_s, figure.age_s) for figure in figures(stage.now)] == [(5.0, 5.0)]
    assert asked(stage, "s0") == [3]
    stage.say("s0", answer(2))  # to the older question
    assert figures(stage.now)[0].measured.number == 1
    stage.say("s0", answer(3))
    stage.say("s0", answer(3))
    (found,) = figures(stage.now)
    assert (found.measured.number, found.answer_s) == (3, 5.0)


@pytest.mark.spec("R271")
def test_figures_without_a_question_are_refused() -> None:
    stage = formed()
    for route in ("s0", "w0"):
        (error,) = sent(stage.say(route, answer(1)), Error)
        assert error.code == ProtocolError("").code
    asked(stage)
    (error,) = sent(stage.say("s0", answer(2)), Error)
    assert "not asked for" in error.text


def test_a_server_that_was_replaced_is_asked_anew() -> None:
    stage = formed()
    asked(stage)
    stage.say("s0", answer(1))
    stage.drop("s0")
    stage.wait(2.0, ["w0"])
    assert asked(stage, "s0") == []
    assert stage.scheduler.job.measurements.figures(stage.now) == []
    stage.hello("s1", rank=0, endpoint="tcp://s1:1")
    assert asked(stage, "s1") == [2]
    measured = stage.scheduler.job.measurements
    seat = stage.scheduler.job.seats.routes["s1"]
    with pytest.raises(ProtocolError):
        measured.hear(0, seat.incarnation - 1, answer(1), stage.now)


def test_nothing_is_asked_when_the_job_is_over() -> None:
    stage = formed()
    stage.stop()
    assert asked(stage, "s0") == []
