"""``kvps.horovod`` on three ranks: all element types, process sets, late and lost ranks, real processes."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from itertools import product

import pytest
import torch

import kvps.horovod as hvd
from kvps.horovod.engine import context
from kvps.horovod.engine.engine import Limits
from tests.integration.processes import ROOT, Processes
from tests.support.drop_in import Run, check_collectives, ranks

pytestmark = pytest.mark.thorough
TYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
LIMIT_S = 120.0
ELASTIC = ROOT / "tests" / "integration" / "elastic_worker.py"


@pytest.fixture(scope="module")
def three() -> Iterator[Run]:
    yield from ranks(3)


@pytest.mark.parametrize("shape", [(), (3,), (17, 17), (5, 0), (70_000, 3)], ids=str)
def test_each_collective_in_each_type(three: Run, shape: tuple[int, ...]) -> None:
    def work(rank: int) -> None:
        for dtype in TYPES:
            check_collectives(rank, dtype, *shape)

    three(work)


def test_process_sets(three: Run) -> None:
    def work(rank: int) -> None:
        assert hvd.global_process_set.ranks == [0, 1, 2]
        pair, last = hvd.add_process_set([2, 0]), hvd.add_process_set(hvd.ProcessSet([1]))
        assert str(pair) == "ProcessSet(process_set_id=1, ranks=[0, 2], mpi_comm=None)"
        assert hvd.mpi_ops.ids_and_ranks() == {0: [0, 1, 2], 1: [0, 2], 2: [1]}
        mine = last if rank == 1 else pair
        assert mine.included()
        assert (mine.size(), mine.rank()) == ((2, 0), (1, 0), (2, 1))[rank]
        for dtype, op in product(TYPES, (hvd.Sum, hvd.Max)):
            tensor = torch.tensor([rank + 1, 1], dtype=dtype)
            wanted = [2, 1] if rank == 1 else [4, 2] if op == hvd.Sum else [3, 1]
            assert hvd.allreduce(tensor, op=op, process_set=mine).tolist() == wanted
        gathered = hvd.allgather(torch.tensor([rank]), process_set=mine)
        assert gathered.tolist() == ([1] if rank == 1 else [0, 2])
        root = 1 if rank == 1 else 2
        assert hvd.broadcast(torch.tensor([rank]), root, process_set=mine).tolist() == [root]
        swapped, _ = hvd.alltoall(
            torch.tensor([rank, rank]), [1, 1] if rank != 1 else [2], "x", mine
        )
        assert swapped.tolist() == ([1, 1] if rank == 1 else [0, 2])
        part = hvd.reducescatter(torch.arange(4.0), op=hvd.Sum, process_set=mine)
        assert part.tolist() == ([0, 2], [0, 1, 2, 3], [4, 6])[rank]
        hvd.barrier(mine)
        other = pair if rank == 1 else last
        with pytest.raises(ValueError, match=f"rank {rank} is not in"):
            hvd.allreduce(torch.ones(1), process_set=other)
        assert hvd.broadcast_object({"r": rank}, root, process_set=mine) == {"r": root}
        assert hvd.remove_process_set(pair)
        assert pair.process_set_id is None
        assert not hvd.remove_process_set(pair)
        assert not hvd.remove_process_set(hvd.global_process_set)
        assert hvd.add_process_set([0, 2]).process_set_id == 3

    three(work)


def test_ranks_that_are_late_are_named_in_the_log_and_then_fail(
    three: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = Limits(stall_warn_s=0.1, stall_fail_s=1.5)
    monkeypatch.setattr(context, "_limits", lambda: limits)

    def work(rank: int) -> None:
        if rank == 0:
            with pytest.raises(
                hvd.HorovodInternalError, match=r"'slow' has waited \d s for ranks 1, 2"
            ):
                hvd.allreduce(torch.ones(1), name="slow")
        else:
            other = hvd.allreduce_async(torch.ones(1), name="other")
            until = time.monotonic() + 60
            while not hvd.poll(other):
                assert time.monotonic() < until
            with pytest.raises(hvd.HorovodInternalError, match="rank 0 has left: allreduce 'slow'"):
                hvd.synchronize(other)
            assert "'slow' has waited" in caplog.text

    three(work)


# --- real processes -----------------------------------------------------------------------------


def results(text: str) -> dict[str, tuple[str, str]]:
    """Return rank -> its weights, and the batches to which it has returned."""
    found = re.findall(r"rank (\d) batches 12 weights \[(.*)\] resets \[(.*)\]", text)
    return {rank: (weights, resets) for rank, weights, resets in found}


def test_an_elastic_job_ends_as_if_no_rank_had_been_lost(processes: Processes) -> None:
    ended = {}
    for dying in (9, 1, 0):
        folder = processes.folder / str(dying)
        folder.mkdir()
        flags = ("-n", 3, "-s", 1, "--max-restarts", 1)
        launched = processes.kvps("launch", *flags, "--", sys.executable, ELASTIC, folder, dying)
        assert launched.wait(LIMIT_S) == 0, launched
        ended[dying] = results(launched.out)
        assert len(ended[dying]) == 3, launched
    whole = {weights for weights, _ in ended[9].values()}
    assert len(whole) == 1
    for dying in (1, 0):
        assert {weights for weights, _ in ended[dying].values()} == whole
        resets = {rank: resets for rank, (_, resets) in ended[dying].items()}
        assert resets == {str(one): "" if one == dying else "3" for one in range(3)}


def test_a_lost_rank_is_named_on_the_others(processes: Processes) -> None:
    script = processes.folder / "lost.py"
    script.write_text(
        "import os, signal, torch\n"
        "import kvps.horovod as hvd\n"
        "hvd.init()\n"
        "hvd.barrier()\n"
        "if hvd.rank() == 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "try:\n"
        "    hvd.allreduce(torch.ones(3))\n"
        "except hvd.HorovodInternalError as error:\n"
        "    print('told:', error, flush=True)\n"
    )
    launched = processes.kvps("launch", "-n", 3, "-s", 1, "--", sys.executable, script)
    launched.wait(LIMIT_S)
    assert len(re.findall(r"told: worker 1 .*is lost", launched.out)) == 2, launched


def test_a_rank_that_ends_early_does_not_leave_the_others_waiting(processes: Processes) -> None:
    script = processes.folder / "early.py"
    script.write_text(
        "import torch\n"
        "import kvps.horovod as hvd\n"
        "hvd.init()\n"
        "assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3\n"
        "if hvd.rank() > 0:\n"
        "    try:\n"
        "        hvd.allreduce(torch.ones(3))\n"
        "    except hvd.HorovodInternalError as error:\n"
        "        print('told:', error, flush=True)\n"
    )
    launched = processes.kvps("launch", "-n", 3, "-s", 1, "--", sys.executable, script)
    assert launched.wait(LIMIT_S) == 0, launched
    assert launched.out.count("told: rank 0 has left: it has called hvd.shutdown()") == 2, launched
