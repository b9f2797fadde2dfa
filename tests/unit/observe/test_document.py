"""The gauges of each role are those of the table, and say how the core stands."""

import json
from typing import Any

from kvps.observe import document
from kvps.observe.metrics import SCHEDULER, SERVER, of_role
from kvps.protocol.membership import Beat
from kvps.protocol.stores import Declare, Entry
from kvps.runtime import server_process
from tests.support.scheduler_harness import Stage
from tests.support.server_harness import ServerStage

MADE_BY_THE_SAMPLER = {*("kvps_up_info", "kvps_ready", "kvps_loop_lag_seconds", "kvps_loop_lag_max_seconds")}


def gauges(role: str) -> set[str]:
    """Return the gauges that the state of a role has to have; those of publications are there with them."""
    gauges = [item for item in of_role(role) if item.kind == "gauge" and "publication" not in item.label]
    return {gauge.name for gauge in gauges} - MADE_BY_THE_SAMPLER


def test_a_server() -> None:
    stage = ServerStage(2, memory_limit=1 << 20)
    stage.open()
    stage.init("a", [0.0] * 10)
    stage.push(0, "a", [1.0] * 10, 0)
    state = server_process.state_of(stage.server, stage.now)
    assert {name for name, _ in state.values} == gauges(SERVER)
    assert state.is_ready
    assert state.values["kvps_memory_bytes", "weights"] == 40
    assert state.values["kvps_memory_limit_bytes", ""] == 1 << 20
    assert state.values["kvps_stores", ""] == 1
    assert json.loads(json.dumps(state.status))["rank"] == 0
    counted = stage.server.counts.values()
    assert counted["kvps_pushes_total", "counted"] == 1
    stage.push(0, "a", [1.0] * 10, 0)
    assert stage.server.counts.values()["kvps_pushes_total", "duplicate"] == 1
    assert not stage.server.counts.durations()
    stage.push(1, "a", [1.0] * 10, 0)
    assert sum(stage.server.counts.durations()["kvps_round_duration_seconds"].buckets) == 1


def test_a_server_is_not_ready_while_it_returns() -> None:
    stage = ServerStage(1)
    stage.server.checkpointer.is_returning = True
    state = server_process.state_of(stage.server, stage.now)
    assert (state.is_ready, state.why) == (False, "returns to a checkpoint")


def test_refusals_of_a_server() -> None:
    stage = ServerStage(1, memory_limit=100)
    stage.open()
    large = Entry("large", 1, (1000,), 0, 1000)
    stage.say(0, Declare("kv", True, 0, (large,)))
    assert refusals(stage) == {("kvps_overloads_total", "memory"): 1}


def refusals(stage: ServerStage) -> dict[tuple[str, str], int]:
    names = ("kvps_refusals_total", "kvps_overloads_total")
    return {at: item for at, item in stage.server.counts.values().items() if at[0] in names}


def test_a_scheduler() -> None:
    stage = Stage(1, 1)
    state = document.state_of(stage.scheduler, stage.now)
    assert {name for name, _ in state.values} == gauges(SCHEDULER)
    assert state.values["kvps_members", "worker,empty"] == 1
    assert state.is_ready
    assert json.loads(json.dumps(state.status))["phase"] == "forming"
    assert json.loads(json.dumps(state.status))["checkpoints"]["every_s"] is None


def test_a_scheduler_shows_since_when_seats_are_held_and_what_happened() -> None:
    stage = Stage(1, 1)
    stage.form()
    stage.shelf("s0", keeps=True, every_s=30.0)
    stage.wait(5.0, ["s0", "w0"])
    stage.drop("w0")
    stage.wait(2.0, ["s0"])
    status = document.state_of(stage.scheduler, stage.now).status
    found = json.loads(json.dumps(status))
    worker, server = found["members"]
    assert (server["held_s"], worker["held_s"]) == (7.0, None)
    assert server["software"]
    assert found["checkpoints"]["every_s"] == 30.0
    assert found["checkpoints"]["stage"] == ""
    (fault,) = found["faults"]
    assert (fault["member"], fault["is_over"], fault["steps"]) == ("worker 0", False, [])
    assert any(item["text"].startswith("worker 0 (host-w0:7) lost") for item in found["events"])


def test_a_checkpoint_that_is_being_taken() -> None:
    stage = Stage(1, 1)
    stage.form()
    stage.shelf("s0", keeps=True)
    stage.say("w0", Beat(1, rounds=1))
    stage.conclude()
    found: Any = document.state_of(stage.scheduler, stage.now).status["checkpoints"]
    assert (found["stage"], found["begun"], found["kept"]) == ("halting", 1, 0)


def test_a_fault_that_is_over_shows_its_steps() -> None:
    stage = Stage(2, 1)
    stage.form()
    stage.drop("w1")
    stage.wait(2.0, ["s0", "w0"])
    stage.hello("w2", rank=1)
    stage.wait(3.0, ["s0", "w0", "w2"])
    found: Any = document.state_of(stage.scheduler, stage.now).status["faults"]
    (fault,) = found
    assert fault["is_over"]
    assert fault["lasted_s"] == fault["steps"][0]["after_s"] < fault["age_s"]


def test_members_of_a_restarted_scheduler_have_no_known_age() -> None:
    stage = Stage(1, 1, persist=True)
    stage.form()
    stage.restart()
    found: Any = document.state_of(stage.scheduler, stage.now).status["members"]
    assert [item["held_s"] for item in found] == [None, None]
