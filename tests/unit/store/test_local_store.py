"""A local store beside the plainest statement of its rules."""

import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvps

LR, MOMENTUM = 0.5, 0.9
ROUNDING = 1e-5
"""What float32 sums of some numbers up to 10 may differ by, where they cancel to less."""
VALUES = st.lists(st.integers(-8, 8), min_size=3, max_size=3).map(lambda row: torch.tensor(row) / 4)


class Reference:
    """The whole contract of pushes and pulls: a push is assigned, or goes through SGD."""

    def __init__(self, rows: list[torch.Tensor], has_optimizer: bool) -> None:
        self.rows = [row.clone() for row in rows]
        self.velocities: list[torch.Tensor | None] = [None] * len(rows)
        self.has_optimizer = has_optimizer

    def push(self, key: int, values: list[torch.Tensor]) -> None:
        total = torch.stack(values).sum(0)
        if not self.has_optimizer:
            self.rows[key] = total
            return
        before = self.velocities[key]
        velocity = total.clone() if before is None else MOMENTUM * before + total
        self.velocities[key] = velocity
        self.rows[key] = self.rows[key] - LR * velocity


@pytest.mark.parametrize("kind", ["local", "device"])
@pytest.mark.parametrize("has_optimizer", [False, True])
@settings(deadline=None, max_examples=25)
@given(
    first=st.lists(VALUES, min_size=2, max_size=2),
    pushes=st.lists(st.tuples(st.integers(0, 1), st.lists(VALUES, min_size=1, max_size=3))),
)
def test_any_pushes_are_those_of_the_reference(
    kind: str, has_optimizer: bool, first: list[torch.Tensor], pushes: list[tuple[int, list[torch.Tensor]]]
) -> None:
    reference = Reference(first, has_optimizer)
    with kvps.create(kind) as kv:
        if has_optimizer:
            kv.set_optimizer("sgd", lr=LR, momentum=MOMENTUM)
        kv.init([0, 1], first)
        for number, (key, values) in enumerate(pushes):
            given_before = [value.clone() for value in values]
            if number % 2:
                kv.push(key, values)
            else:
                pulled = kv.pushpull(key, values)
                pushed = _pushed(reference, key, values)
                assert torch.allclose(pulled, pushed, atol=ROUNDING)
            if number % 2:
                reference.push(key, values)
            for value, before in zip(values, given_before, strict=True):
                assert torch.equal(value, before), "a gradient is only read"
        for key in (0, 1):
            assert torch.allclose(kv.pull(key), reference.rows[key], atol=ROUNDING)
            assert kv.version(key) == sum(item == key for item, _ in pushes)


def _pushed(reference: Reference, key: int, values: list[torch.Tensor]) -> torch.Tensor:
    reference.push(key, values)
    return reference.rows[key]


def test_a_call_that_nobody_else_could_end_ends_at_once() -> None:
    with kvps.create("local", timeout=250) as kv:
        kv.init("w", torch.zeros(3))
        with pytest.raises(kvps.Timeout, match="waits for a push of rank 0"):
            kv.pull("w", min_version=7)
        kv.push("w", torch.ones(3))
        assert kv.pull("w", min_version=1).tolist() == [1.0] * 3


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_has_its_own_store() -> None:
    with kvps.create("local") as kv:
        kv.init("w", torch.zeros(3))
        child = os.fork()
        if child == 0:
            kv.push("w", torch.ones(3))
            os._exit(0 if kv.pull("w").tolist() == [1.0] * 3 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert kv.pull("w").tolist() == [0.0] * 3


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_does_not_inherit_the_call_of_another_thread() -> None:
    with kvps.create("local") as kv:
        kv.init("w", torch.zeros(3))
        is_over = threading.Event()

        def push() -> None:
            while not is_over.is_set():
                kv.push("w", torch.ones(3))

        thread = threading.Thread(target=push)
        thread.start()
        try:
            for _ in range(5):
                child = os.fork()
                if child == 0:
                    kv.push("w", torch.ones(3))
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
        finally:
            is_over.set()
            thread.join()
