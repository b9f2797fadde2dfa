"""The options quorum, grace and late of a store, and what a worker makes of rounds that closed without it."""

import threading
from typing import Any

import pytest
import torch

import kvps


@pytest.mark.parametrize(
    ("store", "options", "match"),
    [
        ("dist_sync", {"quorum": 0}, "quorum=0: use a number of workers, 1 or more"),
        ("dist_sync", {"quorum": 1.5}, "quorum=1.5"),
        ("dist_sync", {"quorum": True}, "quorum=True"),
        ("dist_sync", {"quorum": 3}, "quorum 3 is more than the 2 workers of this job"),
        ("dist_sync", {"quorum": 1, "grace": -1}, "grace=-1: use a number of seconds, 0 or more, or"),
        ("dist_sync", {"quorum": 1, "grace": "long"}, "grace='long'"),
        ("dist_sync", {"quorum": 1, "late": "never"}, "late='never': use one of drop, next"),
        ("dist_sync", {"grace": 1.0}, "grace= and late= are about rounds that close at a quorum"),
        ("dist_sync", {"late": "next"}, "give quorum=, too"),
        ("dist_async", {"quorum": 1}, "quorum= is an option of dist_sync, not of dist_async"),
        ("dist_ssp", {"quorum": 1}, "quorum= is an option of dist_sync, not of dist_ssp"),
        ("local", {"quorum": 1}, "quorum= is an option of dist_sync, not of local"),
        ("allreduce", {"quorum": 1}, "quorum=1 needs servers"),
    ],
)
def test_options_that_cannot_be_meant(store: str, options: dict[str, Any], match: str) -> None:
    def work(rank: int) -> None:
        with pytest.raises(kvps.ConfigError, match=match):
            kvps.create(store, **options)

    with kvps.LocalCluster(2, 1) as cluster:
        cluster.run(work)


@pytest.mark.parametrize("late", ["drop", "next"])
def test_a_slow_worker_is_not_waited_for_and_goes_on_where_the_others_are(late: str) -> None:
    """Rank 0 makes three rounds alone; rank 1 comes then, late by all of them."""
    has_pushed = threading.Event()

    def work(rank: int) -> list[float]:
        kv = kvps.create("dist_sync", average=True, quorum=1, grace=0.0, late=late)
        kv.init("w", torch.zeros(1))
        kv.set_optimizer("sgd", lr=1.0)
        if rank == 1:
            assert has_pushed.wait(30)
            found = [float(kv.pushpull("w", torch.tensor([-100.0])))]
            assert kv.version("w") == (3 if late == "drop" else 4)
            found.append(float(kv.pushpull("w", torch.tensor([-1000.0]), weight=2.0)))
            kv.barrier()
            return found
        for _ in range(3):
            kv.pushpull("w", torch.tensor([-1.0]))
        has_pushed.set()
        kv.barrier()
        return [float(kv.pull("w"))]

    with kvps.LocalCluster(2, 2) as cluster:
        zero, item = cluster.run(work)
    first, total = (3.0, 1003.0) if late == "drop" else (103.0, 1103.0)
    assert item == [first, total]
    assert zero == [total]


def test_rows_need_a_store_that_drops_late_pushes() -> None:
    with kvps.LocalCluster(1, 1) as cluster:

        def work(rank: int) -> None:
            kv = kvps.create("dist_sync", quorum=1, late="next")
            kv.init("t", torch.zeros(4, 2))
            table = kv.embedding("e", 2, optimizer="sgd", lr=1.0)
            match = "create it with late='drop' to push rows"
            with pytest.raises(kvps.ConfigError, match=match):
                kv.pushpull("t", (torch.tensor([1]), torch.ones(1, 2)))
            with pytest.raises(kvps.ConfigError, match=match):
                table.push([1], torch.ones(1, 2))

        cluster.run(work)


@pytest.mark.parametrize("weight", [0, -1.0, float("inf"), float("nan"), True, "heavy"])
def test_weights_that_cannot_be(weight: Any) -> None:
    with kvps.create("local") as kv:
        kv.init("w", torch.zeros(1))
        for call in (kv.push, kv.pushpull):
            with pytest.raises(kvps.ConfigError, match=r"weight=.*: use a finite number above 0"):
                call("w", torch.ones(1), weight=weight)


def test_weights_need_means_and_whole_keys() -> None:
    with kvps.create("local") as kv:
        kv.init("w", torch.zeros(1))
        with pytest.raises(kvps.ConfigError, match="weight=2 needs a mean, and store 'local'"):
            kv.push("w", torch.ones(1), weight=2)
        kv.push("w", torch.ones(1), weight=1)
    with kvps.LocalCluster(2, 1) as cluster:

        def work(rank: int) -> float:
            kv = kvps.create("dist_sync", average=True)
            kv.init("t", torch.zeros(4, 2))
            with pytest.raises(kvps.ConfigError, match="only pushes of whole keys have a weight"):
                kv.push("t", (torch.tensor([1]), torch.ones(1, 2)), weight=2.0)
            kv.push("t", torch.full((4, 2), 3.0 * rank), weight=1.0 + rank)
            return float(kv.pull("t").mean())

        assert cluster.run(work) == [2.0, 2.0]


def test_keys_that_were_pushed_unequally_often_are_read_together() -> None:
    def work(rank: int) -> list[float]:
        kv = kvps.create("dist_sync", quorum=1, grace=0.0, late="next")
        kv.init(["a", "b"], [torch.zeros(1), torch.zeros(1)])
        kv.set_optimizer("sgd", lr=1.0)
        for _ in range(3):
            kv.push("a", torch.tensor([-1.0]))
        kv.pull(["a", "b"])
        return [float(item) for item in kv.pushpull(["a", "b"], [torch.tensor([-10.0])] * 2)]

    with kvps.LocalCluster(1, 1) as cluster:
        assert cluster.run(work) == [[13.0, 10.0]]
