"""When a worker says that it stands still, and what it does when it is told that no worker can go on."""

import pytest
import torch

from kvps.core.effects import Finish
from kvps.core.worker import calls
from kvps.core.worker.timeout_report import ASK_SCRIPT
from kvps.errors import Mismatch
from kvps.protocol.envelope import Node, Role
from kvps.protocol.membership import Barrier, Beat, Pending, Probed, Released
from kvps.protocol.values import Pull, Pulled, Stand
from tests.support.worker_harness import Bench, member, pull
from tests.support.worker_with_key import FLOAT
from tests.unit.core.worker.host_aggregation.test_host_group import bench, seq_of

WHY = "waits for rank 1"


def standing(timeout_s: float = 300.0, **options: object) -> tuple[Bench, int]:
    """A worker that waits at a barrier."""
    worker = Bench(servers=1)
    worker.open(**options)
    return worker, worker.call(calls.StandAtBarrier("kv", "epoch"), timeout_s)


def confirm(worker: Bench) -> None:
    """Let the scheduler say that it has the BARRIER."""
    seq = worker.seqs(Barrier)[-1]
    worker.scheduler(Probed((), (Pending(seq, WHY),), (seq, 99)))


def beats(worker: Bench, *tickets: int) -> int:
    """Let a worker beat once; return its standstill. The script waits in these calls, if it is asked."""
    before = len(worker.effects)
    worker.wait(1.0)
    if Finish(ASK_SCRIPT) in worker.effects[before:]:
        worker.take(worker.core.on_script(tickets, worker.now))
    return worker.sent(Beat)[-1].standstill


def still(worker: Bench, *tickets: int) -> int:
    """Let a worker stand still; return the number of its standstill."""
    confirm(worker)
    assert beats(worker, *tickets) == 0, "the script is asked first"
    confirm(worker)
    return beats(worker, *tickets)


@pytest.mark.spec("R435")
@pytest.mark.parametrize("tickets", [(), (0,)])
def test_a_script_that_does_not_wait_everywhere_may_go_on(tickets: tuple[int, ...]) -> None:
    worker, ticket = standing()
    assert still(worker, ticket) == 1
    confirm(worker)
    assert beats(worker, *tickets) == 1, "of before it was asked"
    confirm(worker)
    assert beats(worker, *tickets) == 0
    assert still(worker, ticket) == 2


@pytest.mark.spec("R435")
def test_a_replaced_worker_changes_nothing_but_for_reads_that_go_on_after_a_while() -> None:
    """A read of a store without rounds waits for pushes of a lost worker for so long only."""
    replacement = member(Node(Role.WORKER, 1), incarnation=99)
    worker, ticket = standing()
    worker.view(replacement)
    assert still(worker, ticket) == 1
    worker = Bench()
    worker.open(mode="async")
    worker.init({"w": torch.zeros(40)})
    ticket = worker.call(pull({"w": torch.zeros(40)}), 300.0)
    pieces = worker.core.stores["kv"].key("w").pieces
    for server, version in ((0, 5), (1, 4)):
        size = (16, 24)[server]
        runs = (Stand(0, size, version, 0),)
        answer = Pulled(worker.seqs(Pull, server)[-1], pieces[server].chunk, FLOAT, True, runs)
        worker.server(server, answer, torch.full((size,), float(version)))
    again = worker.seqs(Pull, 1)[-1]
    waits = Probed((), (Pending(again, WHY),), (again,))

    def stands() -> int:
        for _ in range(2):
            worker.server(1, waits)
            number = beats(worker, ticket)
        return number

    assert stands() == 1
    worker.view(replacement)
    assert stands() == 0


@pytest.mark.spec("R435", "R460")
@pytest.mark.parametrize("is_for_workers", [False, True])
def test_the_leader_of_a_merged_request_stands_still_too(is_for_workers: bool) -> None:
    """Worker 0 leads key c for workers 1 and 2 of its machine, and pulls it itself."""
    worker = bench()
    ticket = worker.call(pull({"c": torch.zeros(4)}), 300.0)
    worker.wait(2.0)
    seq = seq_of(worker, Pull)
    waits = Probed((), (Pending(seq, "round 0 waits for rank 1"),), (seq,) * is_for_workers)
    worker.server(0, waits)
    assert beats(worker, ticket) == 0, "the script is asked first"
    worker.server(0, waits)
    assert beats(worker, ticket) == int(is_for_workers)


@pytest.mark.spec("R437")
def test_standstill_ends_with_mismatch() -> None:
    worker, ticket = standing()
    number = still(worker, ticket)
    worker.scheduler(Beat(2, "of another standstill", standstill=number + 1))
    assert worker.finish(ticket) is None
    worker.scheduler(Beat(2, "every worker waits", standstill=number))
    assert isinstance(worker.error(ticket), Mismatch)
    assert str(worker.error(ticket)) == (
        f"worker 0: barrier() of store 'kv' cannot end ({WHY}): every worker waits"
    )
    worker.scheduler(Beat(2, "every worker waits", standstill=number))


@pytest.mark.spec("R435")
def test_a_call_that_ends_ends_it() -> None:
    worker, ticket = standing()
    assert still(worker, ticket) == 1
    worker.scheduler(Released(worker.seqs(Barrier)[-1]))
    assert worker.is_done(ticket)
    assert beats(worker, ticket) == 0
    assert worker.core.member.waits_in == ""
