"""Calls of a store that Ctrl-C cuts off: made again they wait on, and what was pushed counts once."""

import threading
from typing import Any

import pytest
import torch

import kvps
from tests.support.interrupts import HURRY, make_interruptible

CALLS = {
    "barrier": lambda kv: kv.barrier(),
    "set_optimizer": lambda kv: kv.set_optimizer("sgd", lr=0.5),
    "set_learning_rate": lambda kv: kv.set_learning_rate(0.25),
    "broadcast": lambda kv: kv.broadcast("w", torch.full((4,), 3.0), out=torch.zeros(4)),
    "join": lambda kv: kv.join(),
    "init": lambda kv: kv.init("new", torch.zeros(1)),
}


@pytest.fixture(autouse=True)
def _interruptible(monkeypatch: pytest.MonkeyPatch) -> None:
    make_interruptible(monkeypatch)


@pytest.mark.parametrize("name", CALLS)
def test_call_of_all_ranks_is_the_same_when_made_again(name: str) -> None:
    """If it were another, the ranks would be one call apart from then on."""
    interrupted = threading.Event()

    def work(rank: int) -> list[float]:
        kv = kvps.create("dist_sync", timeout=30)
        kv.init("w", torch.zeros(4))
        kv.set_optimizer("sgd", lr=1.0)
        kv.barrier()
        if rank == 1:
            HURRY.begin(KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt):
                CALLS[name](kv)
            HURRY.end()
            interrupted.set()
        assert interrupted.wait(30)
        CALLS[name](kv)
        kv.barrier("after")
        kv.set_learning_rate(0.125)
        kv.pushpull("w", torch.ones(4), out=torch.zeros(4))
        found: Any = kv.pull("w")
        return found.tolist()

    with kvps.LocalCluster(workers=2, servers=1) as cluster:
        first, second = cluster.run(work)
    assert first == second == [(3.0 if name == "broadcast" else 0.0) - 2 * 0.125] * 4


@pytest.mark.parametrize("is_pushpull", [True, False])
def test_push_counts_once_with_its_values(is_pushpull: bool) -> None:
    """The script may write to the gradient as soon as it has the interrupt."""
    interrupted = threading.Event()

    def work(rank: int) -> list[float]:
        kv = kvps.create("dist_sync", timeout=30)
        kv.init("w", torch.zeros(4))
        gradient, out = torch.ones(4), torch.zeros(4)
        if rank == 1:
            HURRY.begin(KeyboardInterrupt)
            if not is_pushpull:
                kv.push("w", gradient)
            with pytest.raises(KeyboardInterrupt):
                kv.pushpull("w", gradient, out=out) if is_pushpull else kv.pull("w", out=out)
            gradient.fill_(9)
            HURRY.end()
            interrupted.set()
        else:
            assert interrupted.wait(30)
            kv.push("w", gradient)
        found: Any = kv.pull("w")
        kv.push("w", torch.ones(4))
        assert kv.pull("w").tolist() == [2.0] * 4
        return found.tolist()

    with kvps.LocalCluster(workers=2, servers=1) as cluster:
        assert cluster.run(work) == [[2.0] * 4] * 2
