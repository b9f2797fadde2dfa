"""One rank of a group "kvps": runs every case below, and says of each how it went.

    kvps-launch -n 3 -s 2 -- python tests/integration/group_worker.py [CASE ...]

All ranks run the same cases in one order. A result is compared with what follows from the inputs of all
ranks, which each can make for itself.
"""

from __future__ import annotations

import re
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import reduce

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

import kvps
import kvps.torch

warnings.filterwarnings("ignore", category=FutureWarning)  # torch 2.13 renames some calls

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
SHAPES = ((), (1,), (7, 3), (100_001,))
"""The last is cut over the servers."""
CASES: list[Callable[[], None]] = []


def case(work: Callable[[], None]) -> Callable[[], None]:
    CASES.append(work)
    return work


def given(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return what ``rank`` has: small whole numbers, so that sums are exact in every type."""
    generator = torch.Generator().manual_seed(1000 + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    numbers = torch.randint(0 if dtype == torch.uint8 else -4, 5, shape, generator=generator)
    return numbers.to(dtype)


def all_given(dtype: torch.dtype, *shape: int) -> list[torch.Tensor]:
    return [given(rank, dtype, *shape) for rank in range(SIZE)]


def equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def refused(error: type[BaseException], text: str) -> AbstractContextManager[object]:
    return pytest.raises(error, match=re.escape(text))


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def reduced(op: object, rows: list[torch.Tensor]) -> torch.Tensor:
    dtype = rows[0].dtype
    wide = [row.double() if dtype in FLOATS else row for row in rows]
    by = {
        ReduceOp.SUM: torch.add,
        ReduceOp.AVG: torch.add,
        ReduceOp.PRODUCT: torch.mul,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.BAND: torch.bitwise_and,
        ReduceOp.BOR: torch.bitwise_or,
        ReduceOp.BXOR: torch.bitwise_xor,
    }
    total = reduce(by[op], wide)
    if op == ReduceOp.AVG:
        total = torch.div(total, len(rows), rounding_mode=None if dtype in FLOATS else "trunc")
    return total.to(dtype)


EVERYWHERE = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MAX, ReduceOp.MIN)


@case
def all_reduce_of_every_type() -> None:
    for dtype in (*FLOATS, *WHOLE):
        more = () if dtype in FLOATS else (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
        for op in (*EVERYWHERE, ReduceOp.AVG, *more):
            tensor = given(RANK, dtype, 7, 3)
            dist.all_reduce(tensor, op)
            wanted = reduced(op, all_given(dtype, 7, 3))
            if op == ReduceOp.AVG and dtype in (torch.float32, torch.float64):
                torch.testing.assert_close(tensor, wanted)
            else:
                equal(tensor, wanted)


@case
def all_reduce_of_every_shape() -> None:
    for shape in SHAPES:
        for op in (ReduceOp.SUM, ReduceOp.MAX):
            tensor = given(RANK, torch.float32, *shape)
            dist.all_reduce(tensor, op)
            equal(tensor, reduced(op, all_given(torch.float32, *shape)))
    nothing = torch.zeros(0)
    dist.all_reduce(nothing)
    strided = given(RANK, torch.float32, 6, 4).t()[1:]
    dist.all_reduce(strided)
    equal(strided, reduced(ReduceOp.SUM, all_given(torch.float32, 6, 4)).t()[1:])


@case
def all_reduce_of_bool_and_complex() -> None:
    for op, by in ((ReduceOp.SUM, torch.logical_or), (ReduceOp.MIN, torch.logical_and)):
        flags = given(RANK, torch.bool, 20)
        dist.all_reduce(flags, op)
        equal(flags, reduce(by, all_given(torch.bool, 20)))
    number = given(RANK, torch.complex64, 5) * 1j
    dist.all_reduce(number)
    equal(number, torch.stack(all_given(torch.complex64, 5)).sum(0) * 1j)


@case
def all_reduce_of_parameters_and_in_inference_mode() -> None:
    parameter = torch.nn.Parameter(given(RANK, torch.float32, 4))
    dist.all_reduce(parameter)
    wanted = reduced(ReduceOp.SUM, all_given(torch.float32, 4))
    equal(parameter.detach(), wanted)
    with torch.inference_mode():
        for op in (ReduceOp.SUM, ReduceOp.MAX):
            inferred = given(RANK, torch.float32, 4)
            dist.all_reduce(inferred, op)
            equal(inferred, reduced(op, all_given(torch.float32, 4)))


@case
def reduce_to_each() -> None:
    for op in (ReduceOp.SUM, ReduceOp.MAX):
        for dst in range(SIZE):
            tensor = given(RANK, torch.float32, 9)
            dist.reduce(tensor, dst, op)
            if dst == RANK:
                equal(tensor, reduced(op, all_given(torch.float32, 9)))


@case
def who_reduces_to_another_waits_for_all() -> None:
    """So a rank that has ended and left was in every round before."""
    tensor = torch.ones(6)
    dist.all_reduce(tensor.clone())  # makes the key, for which rank 0 is needed
    if RANK == 0:
        dist.recv(torch.zeros(1), 1)
        dist.reduce(tensor, 0)
        equal(tensor, torch.full((6,), float(SIZE)))
        return
    work = dist.reduce(tensor, 0, async_op=True)
    for _ in range(3):  # its push is long acknowledged after that
        for src, dst in ((1, 2), (2, 1)):
            if src == RANK:
                dist.send(torch.zeros(1), dst)
            else:
                dist.recv(torch.zeros(1), src)
    assert not work.is_completed()
    if RANK == 1:
        dist.recv(torch.zeros(1), 2)  # rank 2 has looked, too
        dist.send(torch.zeros(1), 0)
    else:
        dist.send(torch.zeros(1), 1)
    work.wait()


@case
def reduce_scatter() -> None:
    for op, dtype in (
        (ReduceOp.SUM, torch.float32),
        (ReduceOp.AVG, torch.bfloat16),
        (ReduceOp.MAX, torch.int64),
    ):
        whole = given(RANK, dtype, SIZE * 5)
        wanted = reduced(op, all_given(dtype, SIZE * 5)).chunk(SIZE)[RANK]
        found = torch.zeros(5, dtype=dtype)
        dist.reduce_scatter(found, list(whole.chunk(SIZE)), op)
        equal(found, wanted)
        found = torch.zeros(5, dtype=dtype)
        getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(found, whole, op)
        equal(found, wanted)


@case
def broadcast_from_each_bit_for_bit() -> None:
    for dtype in (*FLOATS, *WHOLE, torch.bool, torch.complex64):
        for src in range(SIZE):
            tensor = given(RANK, dtype, 3, 2)
            dist.broadcast(tensor, src)
            equal(tensor, given(src, dtype, 3, 2))
    odd = torch.tensor([float("nan"), -0.0, float("inf")]) if RANK == 1 else torch.zeros(3)
    dist.broadcast(odd, 1)
    assert odd.view(torch.int32).tolist() == [0x7FC00000, -0x80000000, 0x7F800000]
    for shape in SHAPES:
        tensor = given(RANK, torch.float32, *shape)
        dist.broadcast(tensor, 2)
        equal(tensor, given(2, torch.float32, *shape))


@case
def all_gather() -> None:
    for dtype in (*FLOATS, *WHOLE, torch.bool, torch.complex64):
        found = [torch.zeros(2, 3, dtype=dtype) for _ in range(SIZE)]
        dist.all_gather(found, given(RANK, dtype, 2, 3))
        for item, wanted in zip(found, all_given(dtype, 2, 3), strict=True):
            equal(item, wanted)
    whole = torch.zeros(SIZE * 4)
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(whole, given(RANK, torch.float32, 4))
    equal(whole, torch.cat(all_given(torch.float32, 4)))
    strided = torch.zeros(2, SIZE).t()
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(strided, given(RANK, torch.float32, 1, 2))
    equal(strided, torch.cat(all_given(torch.float32, 1, 2)))


@case
def gather_and_scatter() -> None:
    for root in range(SIZE):
        found = [torch.zeros(3) for _ in range(SIZE)] if root == RANK else None
        dist.gather(given(RANK, torch.float32, 3), found, dst=root)
        if found is not None:
            for item, wanted in zip(found, all_given(torch.float32, 3), strict=True):
                equal(item, wanted)
        parts = list(given(root, torch.int64, SIZE * 2).chunk(SIZE)) if root == RANK else None
        part = torch.zeros(2, dtype=torch.int64)
        dist.scatter(part, parts, src=root)
        equal(part, given(root, torch.int64, SIZE * 2).chunk(SIZE)[RANK])


@case
def all_to_all() -> None:
    inputs = [torch.full((other + 1,), 10.0 * RANK + other) for other in range(SIZE)]
    outputs = [torch.zeros(RANK + 1) for _ in range(SIZE)]
    dist.all_to_all(outputs, inputs)
    for other, output in enumerate(outputs):
        equal(output, torch.full((RANK + 1,), 10.0 * other + RANK))
    even = torch.zeros(SIZE * 2, 2)
    dist.all_to_all_single(even, given(RANK, torch.float32, SIZE * 2, 2))
    wanted = [item.chunk(SIZE)[RANK] for item in all_given(torch.float32, SIZE * 2, 2)]
    equal(even, torch.cat(wanted))
    # rank r sends s rows to rank s, nothing to rank 0
    rows = torch.full((sum(range(SIZE)),), RANK)
    into = torch.zeros(RANK * SIZE, dtype=torch.int64)
    dist.all_to_all_single(into, rows, [RANK] * SIZE, list(range(SIZE)))
    equal(into, torch.arange(SIZE).repeat_interleave(RANK))


@case
def send_and_recv_with_tags() -> None:
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    sent = [dist.isend(torch.full((3,), 10.0 * RANK + tag), after, tag=tag) for tag in (0, 1, 2)]
    for tag in (2, 0, 1):
        tensor = torch.zeros(3)
        assert dist.recv(tensor, before, tag=tag) == before
        equal(tensor, torch.full((3,), 10.0 * before + tag))
    for work in sent:
        work.wait()
    for number in range(5):  # of one tag they come in order, some before they are asked for
        if RANK == 1:
            dist.send(torch.tensor([number]), 2)
        if RANK == 2:
            got = torch.tensor([-1])
            dist.recv(got, 1)
            assert got.item() == number
    ring = torch.zeros(2)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.full((2,), float(RANK)), after), dist.P2POp(dist.irecv, ring, before)]
    )
    for work in works:
        work.wait()
    equal(ring, torch.full((2,), float(before)))


@case
def objects() -> None:
    for size in (1, 1000, 30_000):
        found: list[object] = [None] * SIZE
        dist.all_gather_object(found, {"rank": RANK, "text": "x" * size * (RANK + 1)})
        assert [len(item["text"]) for item in found] == [size * (n + 1) for n in range(SIZE)]  # type: ignore[index]
    said = ["hello", RANK] if RANK == 0 else [None, None]
    dist.broadcast_object_list(said, 0)
    assert said == ["hello", 0]
    told: list[object] | None = [None] * SIZE if RANK == 1 else None
    dist.gather_object(RANK, told, dst=1)
    assert told in (None, list(range(SIZE)))


@case
def coalesced() -> None:
    tensors = [given(RANK, torch.float32, count) for count in (3, 3, 8)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for tensor in tensors:
        equal(tensor, reduced(ReduceOp.SUM, all_given(torch.float32, len(tensor))))
    outputs = [torch.zeros(SIZE * 2), torch.zeros(SIZE * 2)]
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    with dist._coalescing_manager():
        for number, output in enumerate(outputs):
            gather(output, torch.full((2,), 10.0 * number + RANK))
    for number, output in enumerate(outputs):
        equal(output, 10.0 * number + torch.arange(SIZE).repeat_interleave(2))


@case
def many_in_flight_waited_for_in_reverse() -> None:
    works, checks = [], []
    for number in range(12):
        tensor = torch.full((5 + number % 3,), float(RANK + number))
        works.append(dist.all_reduce(tensor, async_op=True))
        checks.append((tensor, float(sum(range(SIZE)) + SIZE * number)))
        told = torch.full((4,), float(number if number % SIZE == RANK else -1))
        works.append(dist.broadcast(told, number % SIZE, async_op=True))
        checks.append((told, float(number)))
        most = torch.tensor([float(RANK * number)])
        works.append(dist.all_reduce(most, ReduceOp.MAX, async_op=True))
        checks.append((most, float((SIZE - 1) * number)))
    works.append(dist.barrier(async_op=True))
    for work in reversed(works):
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
    for tensor, wanted in checks:
        equal(tensor, torch.full_like(tensor, wanted))


@case
def a_call_returns_before_the_others_have_made_theirs() -> None:
    dist.barrier()
    tensor = torch.ones(11)  # a new size: its key is made on the way, too
    if RANK == 0:
        work = dist.all_reduce(tensor, async_op=True)
        assert not work.is_completed()
        dist.send(torch.zeros(1), 1, tag=9)
        dist.send(torch.zeros(1), 2, tag=9)
    else:
        dist.recv(torch.zeros(1), 0, tag=9)
        work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    equal(tensor, torch.full((11,), float(SIZE)))


@case
def futures() -> None:
    def then(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        again = future.value()[0].clone()
        dist.all_reduce(again)  # a callback may wait for others
        return again

    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    chained = work.get_future().then(then)
    equal(chained.wait(), torch.full((3,), float(SIZE * SIZE)))
    equal(work.get_future().wait()[0], torch.full((3,), float(SIZE)))


@case
def subgroups() -> None:
    for members in ([0, 2], [1, 2], [0, 1, 2], [1]):
        group = dist.new_group(members)
        if RANK not in members:
            continue
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for op in (ReduceOp.SUM, ReduceOp.MAX):
                tensor = given(RANK, dtype, 6)
                dist.all_reduce(tensor, op, group=group)
                equal(tensor, reduced(op, [given(rank, dtype, 6) for rank in members]))
        for src in members:
            tensor = given(RANK, torch.float32, 5)
            dist.broadcast(tensor, src, group=group)
            equal(tensor, given(src, torch.float32, 5))
        found = [torch.zeros(2) for _ in members]
        dist.all_gather(found, given(RANK, torch.float32, 2), group=group)
        equal(torch.stack(found), torch.stack([given(rank, torch.float32, 2) for rank in members]))
        part = torch.zeros(2)
        dist.reduce_scatter(part, [torch.full((2,), float(RANK))] * len(members), group=group)
        equal(part, torch.full((2,), float(sum(members))))
        tensor = torch.ones(3)
        dist.reduce(tensor, members[-1], group=group)
        assert members[-1] != RANK or tensor.tolist() == [len(members)] * 3
        dist.barrier(group=group)
        dist.destroy_process_group(group)


@case
def what_cannot_be_is_refused_by_name() -> None:
    with refused(kvps.ConfigError, "recv() without src is not supported"):
        dist.recv(torch.zeros(1))
    with refused(kvps.ConfigError, "needs dense tensors, got layout torch.sparse_coo"):
        dist.broadcast(torch.zeros(2).to_sparse(), 0)
    with refused(kvps.ConfigError, "ReduceOp.AVG needs numbers, got torch.bool"):
        dist.all_reduce(torch.zeros(2, dtype=torch.bool), ReduceOp.AVG)
    with refused(kvps.ConfigError, "ReduceOp.BAND needs whole numbers or bool"):
        dist.all_reduce(torch.zeros(2), ReduceOp.BAND)
    with refused(kvps.Mismatch, "all_to_all_single: 4 rows are not divisible by 3 ranks"):
        dist.all_to_all_single(torch.zeros(4), torch.zeros(4))
    with refused(kvps.Mismatch, "all_gather: 1 tensors were given, and the group has 3 ranks"):
        dist.all_gather([torch.zeros(2)], torch.zeros(2))
    with refused(kvps.ConfigError, "process group '0' keeps its members; from torch 2.14 on"):
        dist.group.WORLD.get_reconfigure_handle()


@case
def it_says_who_it_is() -> None:
    assert dist.get_backend() == "kvps"
    assert (dist.get_rank(), dist.get_world_size()) == (RANK, SIZE)
    kv = kvps.create("dist_sync")
    assert (kv.rank, kv.num_workers) == (RANK, SIZE)
    kv.init("w", torch.zeros(2))
    equal(kv.pushpull("w", torch.ones(2)), torch.full((2,), float(SIZE)))


def model() -> torch.nn.Module:
    torch.manual_seed(RANK)  # those of rank 0 count
    return torch.nn.Sequential(
        torch.nn.Linear(8, 30),
        torch.nn.BatchNorm1d(30),
        torch.nn.ReLU(),
        torch.nn.Linear(30, 30),
        torch.nn.Linear(30, 2),
    )


class Forked(torch.nn.Module):
    """A model of which each rank uses one branch, so that the other has no gradient there."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) if RANK else self.other(x)


def same_everywhere(module: torch.nn.Module) -> None:
    """Check that all ranks have the same weights, bit for bit."""
    row = torch.cat([param.detach().reshape(-1) for param in module.parameters()])
    found = [torch.zeros_like(row) for _ in range(SIZE)]
    dist.all_gather(found, row)
    for item in found:
        equal(item, found[0])
    assert bool(row.isfinite().all())


@case
def ddp_of_every_kind() -> None:
    kinds: list[tuple[Callable[[], torch.nn.Module], int, dict[str, object]]] = [
        (model, 8, {}),
        (Forked, 4, {"find_unused_parameters": True}),
        (model, 8, {"static_graph": True}),
        (model, 8, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}),
    ]
    for make, features, options in kinds:
        ddp = DistributedDataParallel(make(), **options)
        optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
        for step in range(4):
            data = given(RANK + 10 * step, torch.float32, 6, features)
            if step == 1 and not options.get("static_graph"):
                with ddp.no_sync():
                    ddp(data).square().mean().backward()
            ddp(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        same_everywhere(ddp)


@case
def ddp_with_uneven_inputs() -> None:
    ddp = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with ddp.join():
        for step in range(2 + 3 * RANK):
            ddp(given(RANK + 10 * step, torch.float32, 4, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    same_everywhere(ddp)


def main() -> int:
    global RANK, SIZE
    dist.init_process_group("kvps", timeout=timedelta(seconds=60))
    RANK, SIZE = dist.get_rank(), dist.get_world_size()
    for item in CASES:
        if sys.argv[1:] and item.__name__ not in sys.argv[1:]:
            continue
        began = time.monotonic()
        try:
            item()
        except Exception:
            traceback.print_exc()
            say(f"{item.__name__} FAILED")
            return 1
        say(f"{item.__name__} passed in {time.monotonic() - began:.2f} s")
    dist.destroy_process_group()
    kvps.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvps")]
    say("all is over")
    return 0


if __name__ == "__main__":
    sys.exit(main())
