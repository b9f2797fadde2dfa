"""Every call of a user finds its conversation."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

from kvps.compression.policy import OFF
from kvps.core.embedding.spec import recipe_of
from kvps.core.optim.hyperparams import resolve
from kvps.core.worker import calls
from kvps.core.worker.calls import dispatch
from kvps.core.worker.store import WorkerStore
from kvps.core.worker.timeout_report import name_of
from tests.support.worker_harness import opened

ROW = torch.zeros(4)
RECIPE = recipe_of("t", 1, "zeros", "sgd", 1, None, "float32", None)
CALLS = {
    "open_store": calls.OpenStore("kv", opened(), 240.0),
    "init": calls.Init("kv", (), ()),
    "broadcast": calls.Broadcast("kv", (), (), ()),
    "lookup": calls.Lookup("kv", ()),
    "push": calls.PushValues("kv", (), (), None, 0, True),
    "pull": calls.PullValues("kv", (), (), 0, 0),
    "push_rows": calls.PushKeyRows("kv", (), (), 0, True),
    "pull_rows": calls.PullKeyRows("kv", (), (), (), 0),
    "refresh": calls.Refresh("kv", (), (), (), 0),
    "allocate": calls.Allocate("kv", ()),
    "versions": calls.Versions("kv", ()),
    "resume": calls.ResumeKeys("kv", ()),
    "set_optimizer": calls.SetOptimizer("kv", resolve("sgd", {"lr": 0.1})),
    "set_rate": calls.SetRate("kv", 0.1),
    "barrier": calls.StandAtBarrier("kv", None),
    "join": calls.JoinStore("kv"),
    "flush": calls.Flush("kv"),
    "status": calls.AskStatus("kv"),
    "save_state": calls.SaveState("kv"),
    "load_state": calls.LoadState("kv", {}),
    "compress": calls.Compress("kv", OFF),
    "save_rests": calls.SaveRests("kv"),
    "load_rests": calls.LoadRests("kv", {}),
    "checkpoint": calls.TakeCheckpoint("kv", ""),
    "restore": calls.RestoreCheckpoint("kv", ""),
    "embed": calls.MakeTable("kv", "t", RECIPE, 0),
    "set_table_rate": calls.SetTableRate("kv", "t", 0.5),
    "push_ids": calls.PushTableRows("kv", ("t",), (), None, 0, True, 1, ()),
    "pull_ids": calls.PullTableRows("kv", ("t",), RECIPE, np.empty(0, np.int64)),
    "export": calls.ExportBlock("kv", "t", 0, 2, 0, 1, 0, False),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_call_has_its_conversation(name: str) -> None:
    conversation = dispatch.start(WorkerStore(opened(), 0, 1, 240.0), CALLS[name], [])
    assert conversation.gi_code.co_name == name
    conversation.close()


def test_no_call_is_left_out() -> None:
    every = {
        cls
        for _, cls in inspect.getmembers(calls, inspect.isclass)
        if issubclass(cls, calls.Call) and cls not in (calls.Call, calls.RejoinStore)
    }
    assert {type(one) for one in CALLS.values()} == every


@pytest.mark.parametrize("name", CALLS)
def test_each_call_has_a_name_for_its_user(name: str) -> None:
    assert name_of(CALLS[name])


def test_what_the_core_makes_for_itself_has_none() -> None:
    with pytest.raises(TypeError, match="no conversation for Rejoin"):
        dispatch.start(WorkerStore(opened(), 0, 1, 240.0), calls.RejoinStore("kv"), [])
