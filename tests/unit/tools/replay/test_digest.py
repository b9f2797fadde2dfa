"""Digests of state: equal for what is equal, and different for the smallest difference."""

from __future__ import annotations

import copy
import itertools
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import torch

from kvps.tools.replay.digest import digest
from tests.support.server_harness import ServerStage


@dataclass
class Thing:
    number: int = 1
    real: float = 0.0
    text: str = "a"
    flag: bool = False
    row: torch.Tensor = field(default_factory=lambda: torch.zeros(3))
    half: torch.Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.bfloat16))
    array: np.ndarray = field(default_factory=lambda: np.zeros(2))  # type: ignore[type-arg]
    parts: list[object] = field(default_factory=lambda: [1, (2, "b"), {3: 4}])
    several: set[int] = field(default_factory=lambda: {5, 6})
    counts: Counter[str] = field(default_factory=lambda: Counter("aab"))
    line: deque[int] = field(default_factory=lambda: deque([7]))
    octets: bytes = b"x"
    numbers: object = field(default_factory=lambda: itertools.count(3))
    other: Thing | None = None


CHANGES = {
    "number": 2,
    "real": -0.0,
    "text": "b",
    "flag": True,
    "row": torch.tensor([0.0, 0.0, -0.0]),
    "half": torch.tensor([0.0, 0.0, 1.0], dtype=torch.bfloat16),
    "array": np.ones(2),
    "parts": [1, (2, "c"), {3: 4}],
    "several": {5},
    "counts": Counter("ab"),
    "line": deque([8]),
    "octets": b"y",
    "numbers": itertools.count(4),
    "other": Thing(),
}


def test_equal_things_have_equal_digests() -> None:
    assert digest(Thing()) == digest(Thing())
    assert digest(copy.deepcopy(Thing(other=Thing()))) == digest(Thing(other=Thing()))


def test_every_difference_shows() -> None:
    seen = {digest(Thing())}
    for name, value in CHANGES.items():
        seen.add(digest(Thing(**{name: value})))
    assert len(seen) == 1 + len(CHANGES)


def test_values_may_be_left_out() -> None:
    thing, other = Thing(), Thing(row=torch.ones(3))
    assert digest(thing, values=False) == digest(other, values=False)
    assert digest(thing, values=False) != digest(Thing(row=torch.ones(4)), values=False)


def test_a_thing_that_refers_to_itself_ends() -> None:
    thing = Thing()
    thing.other = thing
    assert digest(thing) != digest(Thing())
    chain = None
    for _ in range(5000):
        chain = Thing(other=chain)
    assert digest(chain)


def test_functions_and_generators_count_by_name_and_place() -> None:
    def numbers():  # type: ignore[no-untyped-def]
        yield 1
        yield 2

    first, second = numbers(), numbers()
    assert digest([first]) == digest([second])
    next(second)
    assert digest([first]) != digest([second])
    assert digest(len) != digest(max)


def test_servers_with_one_history_are_equal_and_a_bit_more_is_not() -> None:
    def played(last: float, pushes: int = 2) -> ServerStage:
        stage = ServerStage(2)
        stage.open()
        stage.init("w", [1.0, 2.0])
        stage.optimizer("adam", lr=0.5)
        for rank in range(pushes):
            stage.push(rank, "w", [1.0, last], 0)
        return stage

    assert digest(played(1.0).server) == digest(played(1.0).server)
    assert digest(played(1.0).server) != digest(played(1.0 + 2**-22).server)
    assert digest(played(1.0).server) != digest(played(1.0, pushes=1).server)
    short = [digest(played(item).server, values=False) for item in (1.0, 3.0)]
    assert short[0] == short[1]
