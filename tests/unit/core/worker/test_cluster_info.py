"""Threads other than the loop's read a snapshot that never changes."""

import ast
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

import kvps
from kvps.core.worker import calls
from kvps.protocol.envelope import Node, Role
from kvps.protocol.membership import Done, Join, Joined, Return, Welcome
from tests.support.worker_harness import Bench, member

ROOT = Path(kvps.__file__).parent


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


def test_a_join_is_known_before_its_call_ends() -> None:
    bench = Bench()
    bench.open()
    before = bench.core.info
    bench.call(calls.JoinStore("kv"))
    for server in range(2):
        bench.server(server, Joined(bench.seqs(Join, server)[0], 0))
    bench.server(0, Done(bench.seqs(Return, 0)[0]))
    assert bench.core.info is before
    done = Done(bench.seqs(Return, 1)[0])
    known: list[Mapping[str, int]] = []
    bench.core.outbox.connect(lambda effect: known.append(bench.core.info.joins))
    bench.core.on_packet("server 1", bench.packet_of_server(1, done), bench.now)
    assert known == [{"kv": 1}], "as soon as anybody hears of the end"
    assert before.joins == {}


def test_nothing_above_the_runtime_reaches_into_a_core() -> None:
    """A user's thread would read there what the loop is changing."""
    paths = [*ROOT.glob("*.py"), *(ROOT / "store").rglob("*.py"), *(ROOT / "torch").rglob("*.py")]
    assert len(paths) > 60
    reached = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("core", "_core")
    ]
    assert not reached
