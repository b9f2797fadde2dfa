"""``kvps.compat.horovod`` on three ranks: all element types, process sets, late and lost ranks, real processes."""

import random
import re
import sys
import time
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

import kvps.compat.horovod as hvd
from kvps.compat.horovod.engine import context
from kvps.compat.horovod.engine.engine import Limits
from tests.integration.processes import ROOT, Processes
from tests.support.drop_in import Run, check_collectives, ranks

pytestmark = pytest.mark.thorough
TYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
LIMIT_S = 120.0
ELASTIC = ROOT / "tests" / "integration" / "compat" / "elastic_worker.py"


@pytest.fixture(scope="module")
def three() -> Iterator[Run]:
    yield from ranks(3)


@pytest.mark.parametrize("shape", [(), (3,), (17, 17), (5, 0), (350_000, 3)], ids=str)
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
        assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: [0, 1, 2], 1: [0, 2], 2: [1]}
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
        swapped, _ = hvd.alltoall(torch.tensor([rank, rank]), [1, 1] if rank != 1 else [2], "x", mine)
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
        late = hvd.allreduce_async(torch.ones(1), name="slow" if rank == 0 else "other")
        until = time.monotonic() + 60
        while not hvd.poll(late):
            assert time.monotonic() < until
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.synchronize(late)
        told = r"rank \d has left: allreduce '(slow|other)' has waited \d s for ranks? [012, ]+, which"
        assert re.search(told, str(caught.value))
        assert "has waited" in caplog.text

    three(work)


# --- many operations at once --------------------------------------------------------------------

KINDS = ("sum", "mean", "max", "large", "gather", "broadcast", "alltoall", "scatter", "pair", "wrong")


def begun(rank: int, name: str, kind: str, size: int, root: int, pair: hvd.ProcessSet) -> Any:
    """Begin an operation; return its handle, and the result that all three ranks expect; None for an error."""
    mine = torch.full((size,), rank + 1.0)

    def whole(value: float, count: int = size) -> torch.Tensor:
        return torch.full((count,), value)

    match kind:
        case "sum":
            return hvd.allreduce_async(mine, name=name, op=hvd.Sum), whole(6)
        case "mean":
            return hvd.allreduce_async_(mine, name=name), whole(2)
        case "max":
            return hvd.allreduce_async(mine, name=name, op=hvd.Max), whole(3)
        case "large":
            row = whole(rank + 1.0, 500 * size)
            return hvd.allreduce_async(row, name=name, op=hvd.Sum), whole(6, 500 * size)
        case "gather":
            every = torch.cat([whole(item + 1.0, item + 1) for item in range(3)])
            return hvd.allgather_async(whole(rank + 1.0, rank + 1), name=name), every
        case "broadcast":
            return hvd.broadcast_async(mine, root, name=name), whole(root + 1.0)
        case "alltoall":
            every = torch.cat([whole(item, 2) for item in range(3)])
            return hvd.alltoall_async(whole(rank, 6), name=name), every
        case "scatter":
            row = whole(rank + 1.0, 3 * size)
            return hvd.reducescatter_async(row, name=name, op=hvd.Sum), whole(6)
        case "pair" if rank != 1:
            handle = hvd.allreduce_async(mine, name=name, op=hvd.Sum, process_set=pair)
            return handle, whole(4)
        case "wrong":
            return hvd.allreduce_async(whole(1, size + (rank == root)), name=name), None
    return None


@pytest.mark.parametrize("seed", range(3))
def test_any_operations_in_any_order_with_mismatches_and_joins(three: Run, seed: int) -> None:
    def work(rank: int) -> None:
        same, own = random.Random(seed), random.Random(100 * seed + rank)
        pair = hvd.add_process_set([0, 2])
        for turn in range(4):
            operations = [
                (f"{turn}.{item}", same.choice(KINDS), same.randrange(1, 3000), same.randrange(3))
                for item in range(40)
            ]
            own.shuffle(operations)
            started = [begun(rank, *operation, pair) for operation in operations]
            for handle, wanted in own.sample(
                [process for process in started if process], k=len(started) - started.count(None)
            ):
                if wanted is None:
                    with pytest.raises(hvd.HorovodInternalError, match="shapes differ"):
                        hvd.synchronize(handle)
                else:
                    found = hvd.synchronize(handle)
                    assert torch.equal(found[0] if isinstance(found, tuple) else found, wanted)
            for item in range(same.randrange(4) + rank):
                hvd.allreduce(torch.ones(3), name=f"joined.{turn}.{item}")
            hvd.join()

    three(work)


# --- real processes -----------------------------------------------------------------------------

TOLD = """
import pathlib, time
# A rank that has ended is lost, too, or has left, and might be named to the other one.
pathlib.Path(f"told-{hvd.rank()}").touch()
deadline = time.monotonic() + 60
while len(list(pathlib.Path().glob("told-*"))) < 2 and time.monotonic() < deadline:
    time.sleep(0.01)
"""
"""The end of a rank that was told of another one: it waits until both were."""


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
        assert resets == {str(item): "" if item == dying else "3" for item in range(3)}


def test_a_lost_rank_is_named_on_the_others(processes: Processes) -> None:
    script = processes.folder / "lost.py"
    script.write_text(
        "import os, signal, torch\n"
        "import kvps.compat.horovod as hvd\n"
        "hvd.init()\n"
        "hvd.barrier()\n"
        "if hvd.rank() == 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "try:\n"
        "    hvd.allreduce(torch.ones(3))\n"
        "except hvd.HorovodInternalError as error:\n"
        f"    print('told:', error, flush=True)\n{TOLD}"
    )
    launched = processes.kvps("launch", "-n", 3, "-s", 1, "--", sys.executable, script)
    launched.wait(LIMIT_S)
    assert len(re.findall(r"told: worker 1 .*is lost", launched.out)) == 2, launched
