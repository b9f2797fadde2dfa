"""The steps of a front end: made, or passed over by a replacement of a lost worker until it has reached the others."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvps.core.worker.calls import Place
from kvps.errors import ConfigError
from kvps.store.catch_up import CatchUp
from kvps.store.server_store import DistStore
from kvps.torch.sync.steps import Steps, hook_once, plain_step


class FakeStore(DistStore):
    """A store of whose steps a lost worker has made ``owed``."""

    rank = 0  # type: ignore[assignment]

    def __init__(self, owed: int, *, is_replaced: bool = True, rate: float | None = None) -> None:
        self.place = Place(owed, owed, is_replacement=is_replaced, rate=rate)
        self.catch_up = None
        self.units: list[str] = []

    def take_place(self, keys: Sequence[str], unit: str = "steps") -> Place:
        self.units.append(unit)
        if self.place.is_replacement:
            self.catch_up = CatchUp(self.place, 0, unit)
        return self.place

    def pass_over(self) -> None:
        assert self.catch_up is not None
        self.catch_up.step()

    def end_replay(self) -> None:
        self.catch_up = None

    def take_owed(self, names: Sequence[str], timeout: float | None = None, *, tells: bool = False) -> int:
        self.catch_up = None
        return self.place.owed


class FakeFront:
    """A front end that notes what its steps did."""

    def __init__(self, *stores: Any, rate: float | None = 0.1) -> None:
        self.said: list[str] = []
        self.steps = Steps(stores, lambda: [("w",)] * len(stores))
        self.steps.begin("merges")
        self.steps.choose(
            lambda front, step: front.said.append(f"make {step}"),
            lambda front, step: front.said.append(f"drop {step}") or rate,
            lambda front: front.said.append("arrive"),
        )

    def run(self, count: int) -> list[str]:
        for step in range(count):
            self.steps.run(self, step)
        return self.said


def test_a_worker_that_replaces_nobody_makes_each_step() -> None:
    front = FakeFront(FakeStore(0, is_replaced=False))
    assert front.run(2) == ["make 0", "make 1"]
    assert front.steps.made == 2


def test_a_worker_that_begins_late_counts_the_steps_of_its_rank() -> None:
    front = FakeFront(FakeStore(5, is_replaced=False))
    front.run(2)
    assert front.steps.made == 7


def test_a_replacement_passes_over_the_steps_of_its_predecessor(caplog: pytest.LogCaptureFixture) -> None:
    front = FakeFront(FakeStore(2))
    assert front.steps.is_behind
    with caplog.at_level(logging.WARNING, "kvps"):
        assert front.run(4) == ["drop 0", "drop 1", "arrive", "make 2", "make 3"]
    assert (front.steps.made, front.steps.is_behind) == (4, False)
    assert [record.getMessage().split(":")[-1] for record in caplog.records][-1:] == [
        "this worker has reached the others after 2 merges"
    ]


def test_stores_take_turns_until_the_last_has_reached_the_others() -> None:
    first, second = FakeStore(2), FakeStore(1)
    front = FakeFront(first, second)
    assert front.run(4) == ["drop 0", "drop 1", "drop 2", "arrive", "make 3"]
    assert first.units + second.units == ["merges", ""]


@pytest.mark.parametrize("passed", [0, 1])
def test_a_script_that_resumes_makes_its_next_step(passed: int) -> None:
    front = FakeFront(FakeStore(3))
    front.run(passed)
    assert front.steps.resume() == 3
    front.run(1)
    assert front.said[passed:] == ["make 0"]
    assert front.steps.made == 4


@pytest.mark.parametrize("rate", [0.1, None])
def test_another_learning_rate_than_that_of_the_servers_is_refused(rate: float | None) -> None:
    front = FakeFront(FakeStore(1, rate=0.3), rate=rate)
    if rate is None:
        front.run(1)
        return
    with pytest.raises(ConfigError, match="come to the learning rate"):
        front.run(1)


def test_a_plug_in_has_no_place_to_take() -> None:
    front = FakeFront(object())
    assert (front.steps.resume(), front.steps.is_behind) == (0, False)
    assert front.run(1) == ["make 0"]


# --- hooks of a torch optimizer whose class torch has wrapped twice, as threads that make its first optimizer do


def wrapped_twice() -> torch.optim.Optimizer:
    kind = type("Fresh", (torch.optim.SGD,), {"step": torch.optim.SGD.__dict__["step"].__wrapped__})
    optimizer: torch.optim.Optimizer = kind([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    kind.step = torch.optim.Optimizer.profile_hook_step(kind.step)
    return optimizer


def count_hooks(optimizer: torch.optim.Optimizer) -> list[str]:
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    return calls


def test_the_plain_step_calls_no_hook() -> None:
    optimizer = wrapped_twice()
    calls = count_hooks(optimizer)
    plain_step(optimizer)(optimizer)
    assert calls == []
    optimizer.step()
    assert calls == ["before", "before", "after", "after"]  # what torch does


def test_a_step_of_the_class_calls_each_hook_once() -> None:
    optimizer = wrapped_twice()
    hook_once(optimizer)
    calls = count_hooks(optimizer)
    optimizer.step()
    type(optimizer)([torch.nn.Parameter(torch.zeros(1))], lr=1.0).step()  # torch does not wrap it again
    assert calls == ["before", "after"]
