"""Barriers at which workers compare their models."""

import pytest

from kvps.core.effects import Effect
from kvps.errors import Mismatch
from kvps.protocol.membership import Barrier, Error, Released, Trait
from tests.support.scheduler_harness import Stage, sent, told

SMALL = (Trait("parameter 'w'", "float32[2]"),)
LARGE = (*SMALL, Trait("parameter 'x'", "float32[3]"))


@pytest.fixture
def stage() -> Stage:
    stage = Stage(3, 1)
    stage.form()
    return stage


def compare(
    stage: Stage, route: str, traits: tuple[Trait, ...] = SMALL, number: int = 0, refused: int = 0
) -> list[Effect]:
    at = Barrier("kv", "kvps.same", number, what="Trainer()", traits=traits, refused=refused)
    return stage.say(route, at, seq=7)


def replace(stage: Stage, rank: int, by: str) -> None:
    stage.leave(f"w{rank}", done=False, reason="killed")
    stage.hello(by)
    assert stage.states()[f"worker {rank}"] == "held"


@pytest.mark.spec("R403")
def test_different_models_are_told_to_all_and_to_a_rank_that_comes_late(stage: Stage) -> None:
    assert not told(compare(stage, "w0"), Error)
    effects = compare(stage, "w1", LARGE)
    assert sorted(told(effects, Error)) == ["w0", "w1"]
    (error, _) = sent(effects, Error)
    assert error.code == Mismatch.code
    assert error.text == (
        "Trainer() of store 'kv' is not the same on every worker: worker 1 has parameter 'x' (float32[3]), and worker 0 "
        "does not. Nothing was sent. Give every worker the same model and options"
    )
    assert sent(compare(stage, "w2"), Error)[0].text == error.text
    for route in ("w0", "w1"):
        assert not told(compare(stage, route, refused=1), Error)
    assert sorted(told(compare(stage, "w2", refused=1), Released)) == ["w0", "w1", "w2"]


@pytest.mark.spec("R404")
def test_a_replacement_passes_at_once_where_the_others_have_compared(stage: Stage) -> None:
    for route in ("w0", "w1", "w2"):
        compare(stage, route)
    replace(stage, 2, "w5")
    assert told(compare(stage, "w5"), Released) == ["w5"]


@pytest.mark.spec("R404")
@pytest.mark.parametrize("rank", [0, 2])
def test_a_replacement_with_another_model_is_refused_alone(stage: Stage, rank: int) -> None:
    for route in ("w0", "w1", "w2"):
        compare(stage, route)
    replace(stage, rank, "w5")
    assert told(compare(stage, "w5", LARGE), Error) == ["w5"]


@pytest.mark.spec("R404")
def test_a_replacement_that_comes_first_is_not_waited_for(stage: Stage) -> None:
    compare(stage, "w2", LARGE)  # of a model that nobody has met
    replace(stage, 2, "w5")
    assert told(compare(stage, "w5"), Released) == ["w5"]
    replace(stage, 1, "w6")
    assert told(compare(stage, "w6"), Released) == ["w6"]
    assert told(compare(stage, "w0", LARGE), Error) == ["w0"]


@pytest.mark.spec("R404")
def test_a_replacement_that_is_first_of_all_is_met_later(stage: Stage) -> None:
    replace(stage, 2, "w5")
    assert told(compare(stage, "w5"), Released) == ["w5"]
    compare(stage, "w0")
    assert sorted(told(compare(stage, "w1"), Released)) == ["w0", "w1"]


@pytest.mark.spec("R404")
def test_a_replacement_of_a_store_that_waits_for_nobody_lost_makes_its_barrier_hasty(stage: Stage) -> None:
    """Another worker that is lost then is not waited for."""
    compare(stage, "w0")
    replace(stage, 2, "w5")
    at = Barrier("kv", "kvps.same", 0, waits=False, what="Trainer()", traits=SMALL)
    assert told(stage.say("w5", at, seq=7), Released) == ["w5"]
    effects = stage.leave("w1", done=False, reason="killed")
    assert told(effects, Released) == ["w0"]
