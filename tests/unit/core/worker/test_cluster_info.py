"""Threads other than the loop's read a snapshot that never changes."""

import ast
from dataclasses import FrozenInstanceError

import pytest

from kvps.protocol.envelope import Node, Role
from kvps.protocol.membership import Welcome
from tests.support.sources import trees
from tests.support.worker_harness import Bench, member


def test_info_is_that_of_the_newest_view() -> None:
    bench = Bench(workers=3, servers=2, rank=1, join=False)
    before = bench.core.info
    assert (before.rank, before.workers, before.servers, before.members) == (0, 0, 0, ())
    bench.scheduler(Welcome(1, 12, 3, 2))
    assert (bench.core.info.rank, bench.core.info.workers, bench.core.info.servers) == (1, 3, 2)
    bench.view(member(Node(Role.WORKER, 2), "lost"))
    assert bench.core.info.workers_in("held") == [0, 1]
    assert bench.core.info.workers_in("lost") == [2]
    bench.view()
    assert bench.core.info.workers_in("held") == [0, 1, 2]
    assert before.members == (), "what a thread has read stays as it was"


def test_the_incarnation_is_that_of_the_newest_view() -> None:
    bench = Bench(workers=2)
    known = {seat.rank: seat.incarnation for seat in bench.core.info.members if seat.role == Role.WORKER}
    assert {rank: bench.core.info.incarnation(rank) for rank in (0, 1)} == known
    assert bench.core.info.incarnation(7) == 0


def test_info_cannot_be_changed() -> None:
    bench = Bench()
    with pytest.raises(FrozenInstanceError):
        bench.core.info.rank = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        bench.core.info.joins["kv"] = 1  # type: ignore[index]


def test_nothing_above_the_runtime_reaches_into_a_core() -> None:
    """A user's thread would read there what the loop is changing."""
    reached = [
        f"{name}:{node.lineno}"
        for name, tree in trees([".core", "._core"], folders=["", "store", "torch"])
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("core", "_core")
    ]
    assert not reached
