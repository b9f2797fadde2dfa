"""One rank of a group "kvps" that runs features of torch.distributed: says of each case how it went.

kvps-launch -n 2 -s 1 -- python tests/integration/torch_worker.py CASE...
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

import kvps
import kvps.torch
from tests.support import torch_cases
from tests.support.torch_cases import LIMIT

warnings.filterwarnings("ignore")  # torch 2.13 renames some calls, and warns of compiled code

CASES: dict[str, Callable[[], None]] = {}
SLOW: dict[str, Callable[[], None]] = {}
"""Those that take seconds."""


def case(work: Callable[[], None]) -> Callable[[], None]:
    CASES[work.__name__] = work
    return work


def slow(work: Callable[[], None]) -> Callable[[], None]:
    SLOW[work.__name__] = work
    return work


def total() -> float:
    """Return the sum of rank + 1 over all ranks."""
    return float(sum(rank + 1 for rank in range(SIZE)))


def equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@case
def sparse_sums() -> None:
    for dtype in (torch.float32, torch.float16, torch.int64):
        for op in (ReduceOp.SUM, ReduceOp.AVG) if dtype != torch.int64 else (ReduceOp.SUM,):
            dense = torch.zeros(5, 3, dtype=dtype)
            dense[RANK] = RANK + 1
            dense[4] = 2
            tensor = dense.to_sparse(1)
            dist.all_reduce(tensor, op)
            every = torch.zeros(5, 3, dtype=dtype)
            for rank in range(SIZE):
                every[rank] = rank + 1
            every[4] = 2 * SIZE
            equal(tensor.to_dense(), every / SIZE if op == ReduceOp.AVG else every)
    nothing = torch.zeros(4, 2).to_sparse() if RANK else torch.eye(4, 2).to_sparse()
    dist.all_reduce(nothing)
    equal(nothing.to_dense(), torch.eye(4, 2))
    with pytest.raises(kvps.ConfigError, match=r"ReduceOp.MAX of sparse tensors"):
        dist.all_reduce(nothing, ReduceOp.MAX)
    with pytest.raises(kvps.ConfigError, match="needs dense tensors"):
        dist.broadcast(nothing, 0)


@case
def an_embedding_with_sparse_gradients_trains() -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
    model(torch.tensor([RANK, 9])).sum().backward()
    gradient = model.module.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    wanted = torch.zeros(10, 4)
    wanted[:SIZE] = 1 / SIZE
    wanted[9] = 1
    torch.testing.assert_close(gradient.to_dense(), wanted)


@case
def coalesced_calls_that_name_their_device() -> None:
    before, after = (RANK - 1) % SIZE, (RANK + 1) % SIZE
    total_, ring = torch.ones(2), torch.zeros(3)
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.isend(torch.full((3,), float(RANK)), after)
        dist.irecv(ring, before)
    manager.wait()
    with dist._coalescing_manager(device=torch.device("cpu")):
        dist.all_reduce(total_)
    equal(torch.cat([total_, ring]), torch.tensor([SIZE] * 2 + [before] * 3).float())


@case
def gathers_of_uneven_tensors() -> None:
    for times in range(3):
        every = [torch.zeros(rank * 2, 3) for rank in range(SIZE)]
        dist.all_gather(every, torch.full((RANK * 2, 3), float(RANK + times)))
        for rank, item in enumerate(every):
            equal(item, torch.full((rank * 2, 3), float(rank + times)))
    with pytest.raises(kvps.Mismatch, match="must have the same size and type"):
        dist.all_gather([torch.zeros(2)] * SIZE, torch.zeros(3))


@case
def numbers_without_a_sign() -> None:
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        mine = torch.tensor([RANK + 1, 5], dtype=dtype)
        for op, wanted in ((ReduceOp.SUM, [total(), 5 * SIZE]), (ReduceOp.MAX, [SIZE, 5])):
            found = mine.clone()
            dist.all_reduce(found, op)
            assert found.tolist() == wanted
            found = mine.clone()
            dist.reduce(found, 0, op)
            assert RANK or found.tolist() == wanted
        part = torch.zeros(1, dtype=dtype)
        dist.reduce_scatter_single(part, torch.arange(SIZE).to(dtype))
        assert part.tolist() == [RANK * SIZE]
        with pytest.raises(kvps.ConfigError, match=r"sparse tensors of torch.uint.*to_dense"):
            dist.all_reduce(torch.sparse_coo_tensor([[0]], mine[:1], (2,), check_invariants=False))


@case
def sums_of_products() -> None:
    for factor in (0.5, torch.tensor([0.5])):
        op = dist._make_nccl_premul_sum(factor)
        tensor = torch.full((3,), RANK + 1.0)
        dist.all_reduce(tensor, op)
        equal(tensor, torch.full((3,), total() / 2))
        part, given = torch.zeros(1), torch.arange(float(SIZE))
        dist.reduce_scatter_single(part, given, op)
        equal(part, torch.tensor([RANK * SIZE / 2]))
        equal(given, torch.arange(float(SIZE)))
        dist.reduce(given, 0, op)
        equal(given, torch.arange(float(SIZE)) * (1 if RANK else SIZE / 2))


@case
def ranks_that_the_group_does_not_have() -> None:
    for call in (dist.broadcast, dist.reduce, dist.send, dist.recv):
        with pytest.raises(kvps.ConfigError, match=rf"the group has no rank {SIZE}, only 0 to"):
            call(torch.ones(1), SIZE)


@case
def a_monitored_barrier() -> None:
    with pytest.raises(ValueError, match="only implemented for GLOO"):
        dist.monitored_barrier()
    group = dist.group.WORLD
    assert group is not None
    group.monitored_barrier(LIMIT)  # type: ignore[attr-defined]
    store = dist.distributed_c10d._get_default_store()
    if RANK == 0:
        with pytest.raises(kvps.Timeout, match=r"monitored_barrier of group .*: rank 1"):
            group.monitored_barrier(timedelta(seconds=0.1))  # type: ignore[attr-defined]
        store.set("rank 0 has waited", "")
    else:
        store.wait(["rank 0 has waited"], LIMIT)
        dist.barrier()
    dist.barrier()


@case
def eight_bit_floats_move() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        mine = torch.full((3,), float(RANK + 1)).to(dtype)
        every = [torch.empty_like(mine) for _ in range(SIZE)]
        dist.all_gather(every, mine)
        assert [float(item[0].float()) for item in every] == [rank + 1.0 for rank in range(SIZE)]
        dist.broadcast(mine, SIZE - 1)
        equal(mine.float(), torch.full((3,), float(SIZE)))
        with pytest.raises(kvps.ConfigError, match=r"reductions of torch.float8.* bfloat16"):
            dist.all_reduce(mine)


@case
def a_default_device_and_type_of_the_script() -> None:
    with defaults("meta", torch.float64):
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
            for dtype in (torch.float32, torch.float16, torch.int64):
                tensor = torch.ones(4, dtype=dtype, device="cpu")
                dist.all_reduce(tensor, op)
                wanted = torch.full((4,), SIZE if op == ReduceOp.SUM else 1, device="cpu")
                equal(tensor, wanted.to(dtype))
        found: list[object] = [None] * SIZE
        dist.all_gather_object(found, RANK)
        assert found == list(range(SIZE))
        tensor = torch.full((4,), float(RANK), dtype=torch.float32, device="cpu")
        dist.broadcast(tensor, SIZE - 1)
        parts = [torch.ones(2, device="cpu")] * SIZE
        dist.reduce_scatter(torch.ones(2, device="cpu"), parts)
        dist.barrier()
        group = dist.new_group(list(range(SIZE)))
        dist.all_reduce(tensor, group=group)
    equal(tensor, torch.full((4,), float(SIZE * (SIZE - 1))))


@contextmanager
def defaults(device: str, dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@case
def subgroups() -> None:
    group, _ = dist.new_subgroups(SIZE)
    tensor = torch.full((2,), RANK + 1.0)
    dist.all_reduce(tensor, group=group)
    equal(tensor, torch.full((2,), total()))
    mine, _ = dist.new_subgroups_by_enumeration([[rank] for rank in range(SIZE)])
    dist.all_reduce(tensor, group=mine)
    equal(tensor, torch.full((2,), total()))
    with pytest.raises(RuntimeError, match="not safe to split"):  # as with gloo: it needs a device
        dist.split_group(None, [list(range(SIZE))])


@slow
def a_mesh_whose_backend_is_overridden() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    for backend in ("gloo", "kvps"):
        names = {"mesh_dim_names": ("one",), "backend_override": {"one": backend}}
        mesh = init_device_mesh("cpu", (SIZE,), **names)  # type: ignore[arg-type]
        group = mesh.get_group("one")
        assert dist.get_backend(group) == backend
        tensor = torch.full((2,), RANK + 1.0)
        dist.all_reduce(tensor, group=group)
        equal(tensor, torch.full((2,), total()))


@slow
def distributed_tensors_change_their_placement() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (SIZE,))
    whole = torch.arange(float(12 * SIZE)).view(2 * SIZE, 6)
    by_rows = distribute_tensor(whole, mesh, [Shard(0)])
    by_columns = by_rows.redistribute(mesh, [Shard(1)])
    equal(by_columns.to_local(), whole.chunk(SIZE, dim=1)[RANK])
    equal(by_columns.redistribute(mesh, [Replicate()]).to_local(), whole)
    uneven = distribute_tensor(torch.arange(7.0), mesh, [Shard(0)])
    equal(uneven.full_tensor(), torch.arange(7.0))


@slow
def functional_collectives() -> None:
    check_functional(lambda function: function)


@case
def batch_norm_of_torch_names_none_and_ours_works() -> None:
    with pytest.raises(ValueError, match="expected input tensor to be on GPU"):  # as with gloo
        nn.SyncBatchNorm(3)(torch.ones(2, 3))
    norm = kvps.torch.SyncBatchNorm(3)
    assert norm(torch.randn(4, 3)).shape == (4, 3)


# --- the compiler -------------------------------------------------------------------------------


def check_functional(compile_: Callable[[Callable[..., torch.Tensor]], Callable[..., object]]) -> None:
    import torch.distributed._functional_collectives as functional

    world = dist.group.WORLD
    assert world is not None
    mine = torch.full((2 * SIZE,), RANK + 1.0)

    def run(work: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        result = compile_(lambda given: work(given * 2) + 1)(mine)
        assert isinstance(result, torch.Tensor)
        return result

    equal(run(lambda x: functional.all_reduce(x, "sum", world)), torch.full_like(mine, 2 * total() + 1))
    every = torch.cat([torch.full_like(mine, 2 * (rank + 1.0)) for rank in range(SIZE)])
    equal(run(lambda x: functional.all_gather_tensor(x, 0, world)), every + 1)
    part = torch.full((2,), 2 * total() + 1)
    equal(run(lambda x: functional.reduce_scatter_tensor(x, "sum", 0, world)), part)
    swapped = torch.arange(float(SIZE)).add(1).mul(2).repeat_interleave(2)
    equal(run(lambda x: functional.all_to_all_single(x, None, None, world)), swapped + 1)
    equal(run(lambda x: functional.broadcast(x, 0, world)), torch.full_like(mine, 3.0))


@slow
def compiled_functional_collectives() -> None:
    check_functional(
        lambda function: torch.compile(function, backend="aot_eager", fullgraph=True)  # type: ignore[arg-type]
    )


@slow
def compiled_collectives_of_the_usual_names() -> None:
    @torch.compile(backend="aot_eager")
    def doubled(given: torch.Tensor) -> torch.Tensor:
        twice = given * 2
        dist.all_reduce(twice)
        return twice + 1

    equal(doubled(torch.full((4,), RANK + 1.0)), torch.full((4,), 2 * total() + 1))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def gradients(of: nn.Module, run: nn.Module) -> list[torch.Tensor]:
    for step in range(2):
        of.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + RANK)
        run(torch.randn(6, 4, generator=generator)).square().sum().backward()
    found = [param.grad for param in of.parameters()]
    assert all(grad is not None for grad in found)
    return [grad for grad in found if grad is not None]


@slow
def a_compiled_model_has_the_gradients_of_one_that_is_not() -> None:
    plain, fast = (DistributedDataParallel(model()) for _ in range(2))
    runs = torch.compile(fast, backend="aot_eager")
    for mine, other in zip(gradients(fast, runs), gradients(plain, plain), strict=True):
        torch.testing.assert_close(mine, other)


@slow
def compiled_autograd() -> None:
    from torch._dynamo import compiled_autograd

    plain = DistributedDataParallel(model())
    wanted = gradients(plain, plain)
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        fast = DistributedDataParallel(model())
        runs = torch.compile(fast, backend="aot_eager")
        with compiled_autograd._enable(torch.compile(backend="aot_eager")):
            found = gradients(fast, runs)
    finally:
        torch._dynamo.config.optimize_ddp = True
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other)


@case
def a_destroyed_group_is_refused() -> None:
    """A default argument may have kept it: torch.distributed.nn.functional has group=dist.group.WORLD."""
    old = dist.group.WORLD
    assert old is not None
    dist.destroy_process_group()
    dist.init_process_group("kvps", timeout=LIMIT)
    with pytest.raises(kvps.ConfigError, match=r"process group '0' was destroyed.*use the new group"):
        old.allreduce([torch.ones(1)])
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    equal(tensor, torch.full((1,), float(SIZE)))


if __name__ == "__main__":
    RANK, SIZE = torch_cases.start()
    sys.exit(torch_cases.run(sys.argv[1:], lambda name: {**CASES, **SLOW}[name]()))
