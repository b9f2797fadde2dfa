"""The gauges of each role are those of the table, and say how the core stands."""

from __future__ import annotations

import json

from kvps.observe import scheduler_state, server_state
from kvps.observe.metrics import SCHEDULER, SERVER, of_role
from kvps.protocol.stores import Declare, Entry
from tests.support.scheduler_harness import Stage
from tests.support.server_harness import ServerStage

MADE_BY_THE_SAMPLER = {
    *("kvps_up_info", "kvps_ready", "kvps_loop_lag_seconds", "kvps_loop_lag_max_seconds")
}


def gauges(role: str) -> set[str]:
    """Return the gauges that the state of a role has to have."""
    return {one.name for one in of_role(role) if one.kind == "gauge"} - MADE_BY_THE_SAMPLER


def test_a_server() -> None:
    stage = ServerStage(2, memory_limit=1 << 20)
    stage.open()
    stage.init("a", [0.0] * 10)
    stage.push(0, "a", [1.0] * 10, 0)
    state = server_state.state_of(stage.server, stage.now)
    assert {name for name, _ in state.gauges} == gauges(SERVER)
    assert state.is_ready
    assert state.gauges["kvps_memory_bytes", "weights"] == 40
    assert state.gauges["kvps_memory_limit_bytes", ""] == 1 << 20
    assert state.gauges["kvps_stores", ""] == 1
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
    state = server_state.state_of(stage.server, stage.now)
    assert (state.is_ready, state.why) == (False, "returns to a checkpoint")


def test_refusals_of_a_server() -> None:
    stage = ServerStage(1, memory_limit=100)
    stage.open()
    large = Entry("large", 1, (1000,), 0, 1000)
    stage.say(0, Declare("kv", True, 0, (large,)))
    assert refusals(stage) == {("kvps_overloads_total", "memory"): 1}


def refusals(stage: ServerStage) -> dict[tuple[str, str], int]:
    names = ("kvps_refusals_total", "kvps_overloads_total")
    return {at: one for at, one in stage.server.counts.values().items() if at[0] in names}


def test_a_scheduler() -> None:
    stage = Stage(1, 1)
    state = scheduler_state.state_of(stage.scheduler, stage.now)
    assert {name for name, _ in state.gauges} == gauges(SCHEDULER)
    assert state.gauges["kvps_members", "worker,empty"] == 1
    assert state.is_ready
    assert json.loads(json.dumps(state.status))["phase"] == "forming"
