"""The steps that a replacement passes over, and the scripts whose steps cannot be counted."""

import logging

import pytest

from kvps.core.worker.calls import Place
from kvps.errors import ConfigError
from kvps.store.catch_up import CatchUp, refuse

PLACE = Place(3, 4, is_replacement=True)


def test_steps_are_passed_over_up_to_the_place_of_the_others(caplog: pytest.LogCaptureFixture) -> None:
    catch_up = CatchUp(PLACE, epoch=0)
    with caplog.at_level(logging.WARNING, "kvps"):
        for _ in range(3):
            assert not catch_up.is_over
            catch_up.step()
    assert catch_up.is_over
    assert [record.getMessage().count("its first 3 steps") for record in caplog.records] == [1]


def test_of_several_stores_of_a_front_end_one_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    CatchUp(PLACE, 0, unit="").step()
    assert not caplog.records


@pytest.mark.parametrize(
    ("place", "epoch", "why"),
    [
        (PLACE._replace(joins=1), 0, "join() was called before"),
        (PLACE._replace(restored=2), 0, "continues from a checkpoint"),
        (PLACE, 1, "the servers have returned to a checkpoint"),
        (PLACE._replace(most_owed=5), 0, "pushed 3 times and others 5 times"),
    ],
)
def test_steps_that_cannot_be_counted_are_refused(place: Place, epoch: int, why: str) -> None:
    with pytest.raises(ConfigError, match="this worker replaces a lost worker") as caught:
        CatchUp(place, epoch).step()
    assert why in str(caught.value)
    assert "call resume()" in str(caught.value)
    assert caught.value.exit_code == 78


def test_a_schedule_that_follows_the_loss_is_refused() -> None:
    catch_up = CatchUp(PLACE._replace(rate=0.1), epoch=0)
    catch_up.check_rate(0.1)
    CatchUp(PLACE, epoch=0).check_rate(0.3)  # the servers' rate is of another step, or unknown
    with pytest.raises(ConfigError, match=r"come to the learning rate 0\.3, and the job is at 0\.1"):
        catch_up.check_rate(0.3)


def test_a_refusal_names_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"it is full\. Restart the job, or wait$"):
        refuse("it is full", "wait")
