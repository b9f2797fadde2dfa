"""Workers that come to a job while it runs, and leave it, as the scheduler knows them."""

import pytest

from kvps.core.scheduler.saved_state import load
from kvps.core.scheduler.seat import REPLACE_MAX_S, Settings
from kvps.errors import ConfigError
from kvps.protocol.membership import Barrier, Beat, Error, Released, Resume, Resumed, Stop, View, Welcome
from tests.support.scheduler_harness import Stage, exits, notes, sent


def running(most: int = 4, **more: object) -> Stage:
    """Return a job of two workers, to which others may be added."""
    stage = Stage(2, 1, most_workers=most, persist=True, **more)
    for route in ("s0", "w0", "w1"):
        stage.hello(route)
    stage.beat("w0")
    assert stage.phase == "running"
    return stage


def shown(stage: Stage) -> list[str]:
    """Return the states of the seats of workers as a view shows them."""
    return [seat.state for seat in stage.scheduler.job.view(stage.now).members if seat.role == 2]


@pytest.mark.spec("R571")
def test_job_runs_once_the_first_are_here_and_others_are_added() -> None:
    stage = running()
    assert shown(stage) == ["held", "held", "vacant", "vacant"]
    said = stage.hello("w2")
    (welcome,) = sent(said, Welcome)
    assert (welcome.rank, welcome.workers, welcome.most, welcome.seats, welcome.replaces) == (
        2,
        3,
        4,
        4,
        False,
    )
    assert notes(said) == ["info: worker 2 joined: host-w2:7"]
    assert shown(stage) == ["held", "held", "added", "vacant"]
    stage.hello("w3")
    stage.hello("w4")
    for route in ("w0", "w1", "w2", "w3"):
        stage.alive(route)
    (refused,) = sent(stage.hello("w4"), Error)
    assert "the job already has 4 workers (--workers 2:4)" in refused.text


@pytest.mark.spec("R571")
def test_worker_that_comes_before_the_job_runs_belongs_to_it_from_the_beginning() -> None:
    stage = Stage(2, 1, most_workers=3)
    for route in ("w0", "w1", "w2", "s0"):
        stage.hello(route)
    assert stage.phase == "running"
    assert shown(stage) == ["held", "held", "held"]


@pytest.mark.spec("R571")
@pytest.mark.parametrize("how", ["lost", "gone", "silent"])
def test_job_begins_without_a_worker_beyond_the_first_that_was_lost_before(how: str) -> None:
    stage = Stage(2, 1, most_workers=3)
    for route in ("w0", "w1", "w2"):
        stage.hello(route)
    if how == "silent":
        stage.drop("w2")
        stage.wait(5, beating=("w0", "w1"))
    else:
        stage.leave("w2", done=False, code=1, replaceable=how == "lost")
    stage.hello("s0")
    assert (stage.phase, shown(stage)) == ("running", ["held", "held", "vacant"])
    if how == "silent":
        stage.beat("w2")
        assert shown(stage) == ["held", "held", "added"]


@pytest.mark.spec("R571")
def test_newcomer_takes_a_lost_seat_first_then_the_lowest_that_is_free() -> None:
    stage = running()
    stage.hello("w2")
    stage.leave("w0")
    stage.leave("w2", done=False, code=1)
    stage.leave("w1", done=False, code=1)
    assert shown(stage) == ["left", "lost", "vacant", "vacant"]
    for route, rank in (("a", 1), ("b", 2), ("c", 0), ("d", 3)):
        (welcome,) = sent(stage.hello(route, "worker"), Welcome)
        assert welcome.rank == rank, route
    assert shown(stage) == ["added"] * 4


@pytest.mark.parametrize("goes_on", [True, False])
def test_job_ends_well_without_an_added_worker_that_the_others_do_not_wait_for(goes_on: bool) -> None:
    stage = running()
    stage.hello("w2")
    stage.say("w2", Resume("kv", 5))
    stage.say("w2", Beat(0, goes_on=goes_on))
    stage.leave("w2", done=False, code=1)
    stage.leave("w0")
    assert stage.phase == "running"
    said = stage.leave("w1")
    assert {stop.exit_code for stop in sent(said, Stop)} == ({0} if goes_on else set())
    if not goes_on:
        said = stage.wait(REPLACE_MAX_S + 1)
        assert {(stop.exit_code, "worker 2 is lost" in stop.reason) for stop in sent(said, Stop)} == {
            (1, True)
        }


@pytest.mark.spec("R575")
@pytest.mark.parametrize(("replaceable", "state"), [(True, "lost"), (False, "gone")])
def test_added_worker_is_missed_once_it_takes_part(replaceable: bool, state: str) -> None:
    stage = running()
    stage.hello("w2")
    stage.hello("w3")
    assert sent(stage.say("w3", Resume("kv", 5)), Resumed) == [Resumed(0, True, {})]
    for route in ("w2", "w3"):
        stage.leave(route, done=False, code=1, replaceable=replaceable)
    assert shown(stage) == ["held", "held", "vacant", state]
    assert stage.phase == "running"


@pytest.mark.spec("R575")
def test_barriers_wait_for_an_added_worker_once_it_has_entered_their_store() -> None:
    stage = running()
    for route in ("w0", "w1"):
        said = stage.barrier(route)
    stage.hello("w2")
    assert sent(stage.barrier("w2"), Released), "it is behind it"
    stage.barrier("w0", 1)
    assert len(sent(stage.barrier("w1", 1), Released)) == 2, "it takes no part yet"
    stage.say("w2", Resume("kv", 3))
    said = [
        *stage.say("w0", Barrier("kv", "b", 2, after=3)),
        *stage.say("w1", Barrier("kv", "b", 2, after=3)),
    ]
    assert len(sent(said, Released)) == 2, "it begins behind it"
    for route in ("w0", "w1"):
        said = stage.say(route, Barrier("kv", "b", 3, after=4))
        assert not sent(said, Released)
    assert len(sent(stage.say("w2", Barrier("kv", "b", 0, after=4, resumed=True)), Released)) == 3
    other = [*stage.barrier("w0", store="other"), *stage.barrier("w1", store="other")]
    assert len(sent(other, Released)) == 2


@pytest.mark.spec("R575")
def test_without_rounds_it_is_told_the_numbers_of_the_barriers() -> None:
    stage = running()
    for route in ("w0", "w1"):
        stage.barrier(route)
    stage.hello("w2")
    (resumed,) = sent(stage.say("w2", Resume("kv", None)), Resumed)
    assert resumed.barriers == {"b": 1}
    for route in ("w0", "w1"):
        assert not sent(stage.barrier(route, 1), Released)
    assert len(sent(stage.barrier("w2", 1), Released)) == 3


@pytest.mark.spec("R575")
def test_successor_has_to_resume_anew() -> None:
    stage = running()
    stage.hello("w2")
    stage.say("w2", Resume("kv", 0))
    stage.leave("w2")
    stage.hello("w3")
    for route in ("w0", "w1"):
        said = stage.say(route, Barrier("kv", "b", 0, after=2))
    assert len(sent(said, Released)) == 2


def test_job_is_over_when_all_have_left_and_nobody_is_missed() -> None:
    stage = running()
    stage.hello("w2")
    stage.leave("w2", done=False, code=1)
    stage.leave("w0")
    assert [end.code for end in exits(stage.leave("w1"))] == [0]
    assert stage.reason == "every worker left (2 of 2)"


def test_restarted_scheduler_knows_who_was_added() -> None:
    stage = running()
    stage.hello("w2")
    stage.say("w2", Resume("kv", 0))
    before = shown(stage)
    stage.restart()
    assert shown(stage) == before == ["held", "held", "added", "vacant"]
    stage.beat("w2")
    for route in ("w0", "w1"):
        said = stage.say(route, Barrier("kv", "b", 0, after=2))
    assert not sent(said, Released), "worker 2 is needed"
    with pytest.raises(
        ConfigError, match="of a job with 2:4 workers and 1 servers, and now there are to be 2 "
    ):
        load(stage.scheduler.snapshot(), Settings(2, 1), 0.0)


def test_next_job_begins_with_the_first() -> None:
    stage = running(keep_alive=True)
    stage.hello("w2")
    for route in ("w2", "w1", "w0"):
        stage.leave(route)
    assert shown(stage) == ["empty", "empty", "vacant", "vacant"]
    assert sent(stage.hello("x0", "worker"), View) == []


def test_range_that_ends_below_its_beginning_is_refused() -> None:
    with pytest.raises(ConfigError, match="--workers 3:2: the second number is the most workers"):
        Settings(3, 1, most_workers=2)
