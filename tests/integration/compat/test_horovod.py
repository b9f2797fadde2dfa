"""``import kvps.compat.horovod as hvd``."""

import re
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch

import kvps.compat.horovod as hvd
from kvps.compat.horovod.engine.engine import Engine
from tests.support.drop_in import Run, check_collectives, equal

TOLD_S = 2.0
"""Seconds in which a mismatch reaches every rank, as promised."""
BUSY_S = 20.0
"""The same for a single mismatch, on a machine that does other work."""


# --- collectives --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_each_collective(two: Run, dtype: torch.dtype) -> None:
    two(lambda rank: check_collectives(rank, dtype, 5, 3))


def test_groups_run_as_one_operation(two: Run) -> None:
    def work(rank: int) -> None:
        tensors = [torch.full((n,), float(rank + n)) for n in (0, 1, 3)]
        tensors.append(torch.full((2,), rank + 1))
        sums = hvd.grouped_allreduce(tensors, op=hvd.Sum)
        assert [total.tolist() for total in sums] == [[], [3.0], [7.0] * 3, [3, 3]]
        hvd.grouped_allreduce_(tensors, op=hvd.Sum)
        assert [tensor.tolist() for tensor in tensors] == [[], [3.0], [7.0] * 3, [3, 3]]
        gathered = hvd.grouped_allgather([torch.tensor([rank]), torch.tensor([[rank], [9]])])
        assert [item.tolist() for item in gathered] == [[0, 1], [[0], [9], [1], [9]]]
        parts = hvd.grouped_reducescatter([torch.arange(3.0), torch.arange(2.0)], op=hvd.Sum)
        assert [part.tolist() for part in parts] == ([[0.0, 2.0], [0.0]], [[4.0], [2.0]])[rank]

    two(work)


def test_many_asynchronous_operations_in_another_order_on_each_rank(two: Run) -> None:
    def work(rank: int) -> None:
        count = 30
        order = list(range(count)) if rank == 0 else list(reversed(range(count)))
        handles = {
            item: hvd.allreduce_async(torch.full((item + 1,), rank), name=f"a{item}", op=hvd.Sum)
            for item in order
        }
        for item in range(count):
            assert hvd.synchronize(handles[item]).tolist() == [1] * (item + 1)
            assert hvd.synchronize(handles[item]) is None, "taken before, as Horovod has it"
            with pytest.raises(ValueError, match="was not created or has been cleared"):
                hvd.poll(handles[item])
        if rank == 1:
            hvd.barrier()  # until then, the operation of rank 0 cannot be over
        handle = hvd.allgather_async(torch.tensor([rank]), name="polled")
        if rank == 0:
            assert not hvd.poll(handle)
            hvd.barrier()
        until = time.monotonic() + 60
        while not hvd.poll(handle):
            assert time.monotonic() < until
        assert hvd.synchronize(handle).tolist() == [0, 1]

    two(work)


def test_compression_travels_in_half_precision(two: Run) -> None:
    def work(rank: int) -> torch.Tensor:
        tensor = torch.tensor([1.0, 2049.0], dtype=torch.float64)  # 2049 has no float16
        found = hvd.allreduce(tensor, compression=hvd.Compression.fp16)
        assert found.dtype == torch.float64
        whole = hvd.Compression.fp16.compress(torch.tensor([3]))
        equal(hvd.Compression.fp16.decompress(*whole), torch.tensor([3]))
        return found

    for found in two(work):
        assert found.tolist() == [1.0, 2048.0]


def test_sparse_tensors(two: Run) -> None:
    def work(rank: int) -> None:
        indices, values = [[rank, 2]], [1.0, 2.0]
        tensor = torch.sparse_coo_tensor(indices, values, (4,), check_invariants=True)
        handle = hvd.sparse_allreduce_async(tensor, name="sum", op=hvd.Sum)
        assert hvd.synchronize(handle).to_dense().tolist() == [1.0, 1.0, 4.0, 0.0]
        assert hvd.poll(handle)
        mean = hvd.sparse_allreduce_async(tensor, name="mean", op=hvd.Average)
        assert mean().to_dense().tolist() == [0.5, 0.5, 2.0, 0.0]

    two(work)


def test_gradients_flow_through_each_collective(two: Run) -> None:
    def work(rank: int) -> None:
        def grad(work: Callable[[torch.Tensor], torch.Tensor], rows: int) -> list[float]:
            x = torch.arange(float(rows)).requires_grad_()
            y = work(x)
            (y * (torch.arange(float(len(y))) + 1) * (rank + 1)).sum().backward()
            assert x.grad is not None
            return x.grad.tolist()

        assert grad(lambda x: hvd.allreduce(x, op=hvd.Sum), 2) == [3.0, 6.0]
        assert grad(hvd.allreduce, 2) == [1.5, 3.0]
        assert grad(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0), 1) == [6.0]
        assert grad(hvd.allgather, rank + 1) == ([1.5], [3.0, 4.5])[rank]
        assert grad(lambda x: hvd.broadcast(x, 1), 1) == ([0.0], [1.5])[rank]
        assert grad(lambda x: hvd.alltoall(x, [1, 2])[0], 3) == ([1.0, 2.0, 4.0], [2.0, 6.0, 8.0])[rank]
        assert grad(lambda x: hvd.alltoall(x, [1, 0])[0], 3)[1:] == [0.0, 0.0]
        assert grad(hvd.alltoall, 2) == ([1.0, 2.0], [2.0, 4.0])[rank]
        assert grad(hvd.reducescatter, 2) == [1.0, 2.0]
        assert grad(lambda x: hvd.reducescatter(x, op=hvd.Sum, postscale_factor=0.5), 2) == [1.0, 2.0]
        x = torch.ones(2, requires_grad=True)
        y = torch.ones(1, requires_grad=True)
        first, other = hvd.grouped_allreduce([x, y], op=hvd.Sum)
        (first.sum() + 2 * other.sum()).backward()
        assert (x.grad.tolist(), y.grad.tolist()) == ([2.0, 2.0], [4.0])  # type: ignore[union-attr]

    two(work)


# --- what ranks do not agree on -----------------------------------------------------------------


def mismatches() -> dict[str, tuple[Callable[[int], Any], str]]:
    """Return calls that differ between ranks, and the words of their error."""
    ones = torch.ones
    return {
        "shape": (lambda rank: hvd.allreduce(ones(2 + rank)), r"float32\[2\], rank 1 has float32\[3"),
        "rank": (lambda rank: hvd.allreduce(ones([2] * (rank + 1))), "shapes differ"),
        "type": (lambda rank: hvd.allreduce(ones(2).to((torch.int, torch.half)[rank])), "types d"),
        "op": (lambda rank: hvd.allreduce(ones(2), op=(hvd.Sum, hvd.Max)[rank]), "reductions d"),
        "factor": (lambda rank: hvd.allreduce(ones(2), prescale_factor=1.0 + rank), "prescale fac"),
        "factor after": (lambda rank: hvd.allreduce(ones(2), postscale_factor=1.0 + rank), "postscale fac"),
        "root": (lambda rank: hvd.broadcast(ones(2), rank), "root ranks differ"),
        "gather": (lambda rank: hvd.allgather(ones(2, 2 + rank)), "shapes differ"),
        "gather type": (lambda rank: hvd.allgather(ones(2).to((torch.int, torch.half)[rank])), "typ"),
        "group": (lambda rank: hvd.grouped_allreduce([ones(2)] * (rank + 1)), "numbers of tensors"),
        "scatter": (lambda rank: hvd.reducescatter(ones(2 + rank)), "shapes differ"),
        "alltoall": (lambda rank: hvd.alltoall(ones(2, 1 + rank)), "shapes differ"),
        "scalar": (lambda rank: hvd.allgather(torch.tensor(1.0)), "got a scalar"),
        "splits": (lambda rank: hvd.alltoall(ones(3), [2, 2 + rank]), "need more rows than the 3"),
        "rows": (lambda rank: hvd.alltoall(ones(3)), "3 rows are not divisible by 2 ranks"),
        "no maximum": (lambda rank: hvd.reducescatter(ones(2), op=hvd.Max), "use hvd.Sum or hvd.Av"),
        "no root": (lambda rank: hvd.broadcast(ones(2), 9), "root_rank=9 is not in the process set"),
        "set": (lambda rank: hvd.add_process_set([rank]), "ranks of the process set differ"),
        "operation": (
            lambda rank: (hvd.allreduce, hvd.allgather)[rank](ones(2), name="one"),
            "operations differ: rank 0 has allreduce, rank 1 has allgather",
        ),
        "order": (
            lambda rank: hvd.allreduce(ones(2), name=("a", "b")[rank]),
            "no rank can go on: rank 0 waits for allreduce 'a'; rank 1 waits for allreduce 'b'",
        ),
    }


def test_mismatches_are_told_on_every_rank_at_once(two: Run) -> None:
    def work(rank: int) -> dict[str, tuple[str, float]]:
        told = {}
        for name, (call, _) in mismatches().items():
            hvd.barrier()
            began = time.monotonic()
            with pytest.raises(hvd.HorovodInternalError) as caught:
                call(rank)
            told[name] = str(caught.value), time.monotonic() - began
        assert hvd.allreduce(torch.ones(1), name="after", op=hvd.Sum).tolist() == [2.0]
        return told

    for told in two(work):
        for name, (_, words) in mismatches().items():
            text, took = told[name]
            assert re.search(words, text), (name, text)
            assert took < BUSY_S, (name, took)
        assert median(took for _, took in told.values()) < TOLD_S


def begins() -> list[Callable[[torch.Tensor], int]]:
    """Return a call of each kind, all of one name."""
    name = "twice"
    return [
        lambda item: hvd.allreduce_async(item, name=name),
        lambda item: hvd.grouped_allreduce_async([item], name=name),
        lambda item: hvd.allgather_async(item, name=name),
        lambda item: hvd.broadcast_async(item, 0, name=name),
        lambda item: hvd.alltoall_async(item, name=name),
        lambda item: hvd.reducescatter_async(item, name=name),
    ]


def test_a_name_whose_operation_is_not_over_is_refused_and_the_first_goes_on(two: Run) -> None:
    def work(rank: int) -> None:
        for begin in begins():
            if rank == 1:
                hvd.barrier()  # until then, the operation of rank 0 cannot be over
            handle = begin(torch.ones(2))
            if rank == 0:
                for _ in range(3):
                    with pytest.raises(ValueError, match="'twice': an operation of this name is no"):
                        begin(torch.ones(2))
                hvd.barrier()
            assert hvd.synchronize(handle) is not None

    two(work)


def wrong_calls() -> list[tuple[Callable[[], Any], str]]:
    """Return calls with arguments that cannot be, and the words of their error."""
    item = torch.ones(2)
    sparse = torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True)
    return [
        (lambda: hvd.allreduce(item, average=True, op=hvd.Sum), "op parameter supersedes average"),
        (lambda: hvd.allreduce(item, op="sum"), "op='sum': use hvd.Average"),  # type: ignore[arg-type]
        (lambda: hvd.allreduce_async(sparse, name="s1"), "Tensor is required to be dense"),
        (lambda: hvd.allreduce_async([1.0], name="s2"), "needs a torch.Tensor, got list"),  # type: ignore[arg-type]
        (lambda: hvd.grouped_allreduce([]), "give one tensor or more"),
        (lambda: hvd.allreduce(torch.ones(1).int(), op=hvd.Adasum), "floating-point"),
        (lambda: hvd.reducescatter(item, op=hvd.Max), "use hvd.Sum or hvd.Average"),
        (lambda: hvd.alltoall(item, torch.ones(2)), "splits must be whole numbers"),
        (lambda: hvd.alltoall(item, [1]), "1 splits were given for 2 ranks"),
        (lambda: hvd.alltoall(torch.ones(3)), "not divisible by 2 ranks"),
        (lambda: hvd.broadcast(item, "0"), "root_rank='0'"),  # type: ignore[arg-type]
        (lambda: hvd.broadcast(item, 2), "root_rank=2 is not in the process set"),
        (lambda: hvd.allgather(torch.tensor(1.0)), "got a scalar"),
        (lambda: hvd.sparse_allreduce_async(item, "s3", hvd.Sum), "needs a sparse COO tensor"),
        (lambda: hvd.sparse_allreduce_async(sparse, "s4", hvd.Max), "is not supported"),
        (lambda: hvd.allreduce(item, process_set=hvd.ProcessSet([0])), "is not registered"),
        (lambda: hvd.ProcessSet([0, 0]), "give different ranks"),
        (lambda: hvd.ProcessSet(3), "give different ranks"),  # type: ignore[arg-type]
        (lambda: hvd.add_process_set([0, 7]), "give ranks from 0 to 1"),
        (lambda: hvd.add_process_set([0, 1]), "Attempted to add a duplicate process set"),
        (lambda: hvd.init(process_sets="static"), "or 'dynamic'"),
        (lambda: hvd.init(comm=[0]), "use process sets for a part of the ranks"),
        (lambda: hvd.broadcast_parameters(item, 0), "invalid params of type"),
        (lambda: hvd.broadcast_parameters({"a": 1}, 0), "'a' is a int, not a tensor"),  # type: ignore[dict-item]
        (lambda: hvd.allreduce(None), "needs a torch.Tensor, got NoneType"),  # type: ignore[arg-type]
        (lambda: hvd.allreduce(item.to("meta")), "on the device meta has no values"),
        (lambda: hvd.allreduce(item, process_set="all"), "give a hvd.ProcessSet, got str"),  # type: ignore[arg-type]
        (lambda: hvd.barrier("all"), "give a hvd.ProcessSet, got str"),  # type: ignore[arg-type]
        (lambda: hvd.remove_process_set("all"), "give a hvd.ProcessSet, got str"),  # type: ignore[arg-type]
        (lambda: hvd.allreduce(item, compression=None), "give hvd.Compression.none or fp16"),  # type: ignore[arg-type]
        (lambda: hvd.alltoall(item, "ab"), "splits must be whole numbers"),  # type: ignore[arg-type]
        (lambda: hvd.broadcast_optimizer_state("x", 0), "got str"),  # type: ignore[arg-type]
        (lambda: hvd.broadcast_object(1, 9), "root_rank=9 is not in the process set"),
        (lambda: hvd.broadcast_object(object()), "but only data can be sent"),
        (lambda: hvd.allgather_object([object()]), "rank 0 cannot send its object"),
    ]


def test_wrong_arguments_raise_as_in_horovod(two: Run) -> None:
    def work(rank: int) -> None:
        for call, words in wrong_calls():
            with pytest.raises(ValueError, match=words):
                call()
        assert hvd.allreduce(torch.ones(1), name="after", op=hvd.Sum).tolist() == [2.0]

    two(work)


def test_a_rank_that_refuses_its_own_call_does_not_leave_the_others_waiting(two: Run) -> None:
    def work(rank: int) -> str:
        kind = ValueError if rank == 0 else hvd.HorovodInternalError
        with pytest.raises(kind) as caught:
            hvd.allreduce([1.0] if rank == 0 else torch.ones(1), name="refused")  # type: ignore[arg-type]
        hvd.barrier()
        return str(caught.value)

    first, second = two(work)
    assert first == "allreduce needs a torch.Tensor, got list"
    assert second == f"allreduce 'refused': rank 0: {first}"


def test_without_init_there_is_an_error() -> None:
    for call in (hvd.rank, hvd.size, hvd.local_rank, hvd.barrier, hvd.join, hvd.is_homogeneous):
        with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd\.init"):
            call()
    assert not hvd.is_initialized()
    hvd.shutdown()


# --- joins, process sets, the end ---------------------------------------------------------------


def test_a_rank_that_has_joined_adds_zeros(two: Run) -> None:
    def work(rank: int) -> None:
        for first in (0, 1):
            hvd.barrier()
            if rank == first:
                assert hvd.join() == 1 - first
                continue
            handles = [
                hvd.allreduce_async(torch.full((n,), 4.0), name=f"j{n}", op=op)
                for n, op in ((2, hvd.Sum), (3, hvd.Average), (1, hvd.Max))
            ]
            assert [hvd.synchronize(handle).tolist() for handle in handles] == [[4, 4], [2, 2, 2], [4]]
            with pytest.raises(hvd.HorovodInternalError, match="called join"):
                hvd.allgather(torch.ones(1))
            with pytest.raises(hvd.HorovodInternalError, match="called join"):
                hvd.broadcast(torch.ones(1), rank)
            assert hvd.join(hvd.local_rank()) == rank

    two(work)


def test_late_end_of_a_sum_with_zeros_leaves_the_next_operation_of_its_name_alone(
    two: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested, deliver = threading.Event(), Engine._deliver

    def late(self: Engine, *of_bucket: Any) -> None:
        if self.rank == 0:  # it has joined: the sum is that of rank 1 and its zeros
            assert requested.wait(60)
        deliver(self, *of_bucket)

    def work(rank: int) -> list[float]:
        if rank == 1:
            assert hvd.allreduce(torch.full((3,), 4.0), name="same").tolist() == [2.0] * 3
        hvd.join()
        handle = hvd.allreduce_async(torch.full((3,), 8.0 - rank), name="same")
        if rank == 0:
            requested.set()
        found: list[float] = hvd.synchronize(handle).tolist()
        return found

    monkeypatch.setattr(Engine, "_deliver", late)
    assert two(work) == [[7.5] * 3] * 2


def test_static_process_sets(two: Run) -> None:
    def work(rank: int) -> None:
        hvd.shutdown()
        assert not hvd.is_initialized()
        sets = [hvd.ProcessSet([0]), hvd.ProcessSet([1]), hvd.ProcessSet([0, 1])]
        hvd.init(process_sets=sets)
        assert [item.process_set_id for item in sets] == [1, 2, None]
        with pytest.raises(ValueError, match="process sets are static"):
            hvd.add_process_set([1, 0])
        with pytest.raises(ValueError, match="process sets are static"):
            hvd.remove_process_set(sets[0])
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=sets[rank]).tolist() == [1.0]

    two(work)


def test_pending_operation_fails_when_a_rank_shuts_down(two: Run) -> None:
    def work(rank: int) -> None:
        if rank == 0:
            hvd.shutdown()
            return
        with pytest.raises(
            hvd.HorovodInternalError, match=r"rank 0 has left: it has called hvd.shutdown\(\)"
        ):
            hvd.allreduce(torch.ones(1))
        with pytest.raises(hvd.HorovodInternalError, match="rank 0 has left"):
            hvd.join()

    two(work)


def test_ranks_and_machines(two: Run) -> None:
    def work(rank: int) -> None:
        assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (rank, 2, rank, 2)
        assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
        assert hvd.is_initialized()
        assert hvd.mpi_threads_supported()
        assert hvd.gloo_enabled()
        assert hvd.gloo_built()
        built = (hvd.mpi_built, hvd.mpi_enabled, hvd.nccl_built, hvd.ddl_built, hvd.ccl_built)
        assert not any(item() for item in (*built, hvd.cuda_built, hvd.rocm_built))
        for call in (lambda: hvd.start_timeline("f"), hvd.stop_timeline):
            with pytest.raises(NotImplementedError, match="kvps trace"):
                call()

    two(work)
