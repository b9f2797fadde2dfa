"""Execution: from a decision of the negotiation to transfers, and from what arrives to results.

A rank that has joined takes part in sums with zeros, whose types and shapes the requests of the
others tell. Other reductions are made without it.

The arithmetic of reductions: factors, means, and Adasum.

Operations: this rank's side of one collective, from the call to its result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from kvps.compat.horovod.common.exceptions import HorovodInternalError
from kvps.compat.horovod.engine.transfers import Plan, Transfers
from kvps.compat.horovod.negotiation.coordinator import Execute
from kvps.compat.horovod.negotiation.request import SUMMING, CollectiveRequest, Key, Part
from kvps.torch.distributed.host_tensor import HALF, Staged, blank, divide, fold, octets


class Operation:
    """One collective of this rank.

    Args:
        request: its part in the negotiation.
        tensors: the tensors that travel, on any device. A reduction and a broadcast leave their result there.
        is_list: whether the result is a list, one for each tensor.
        results: returned in place of ``tensors``, whose memory they share.
    """

    def __init__(
        self,
        request: CollectiveRequest,
        tensors: Sequence[torch.Tensor] = (),
        is_list: bool = False,
        results: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.request = request
        self.tensors = list(tensors)
        self.staged = [Staged(tensor) for tensor in tensors]
        self.is_list = is_list
        self.is_decided = False
        """Whether all ranks have requested it; until then it can wait for a rank for ever."""
        self.since = 0.0
        """When it was requested, on the engine's clock."""
        outcome = list(tensors if results is None else results)
        self._outcome: Any = outcome if is_list else outcome[0] if outcome else None
        self._over = threading.Event()
        self._error: HorovodInternalError | None = None

    def deliver(self, outcome: Sequence[Any]) -> None:
        """Set the results, one for each tensor."""
        self._outcome = list(outcome) if self.is_list else outcome[0]

    def end(self, error: BaseException | None = None) -> None:
        """The operation is over, or has failed for a reason."""
        if error is not None:
            self._error = HorovodInternalError(str(error) or repr(error))
            self._error.__cause__ = error
        self.staged = []
        self._over.set()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, well or not."""
        return self._over.is_set()

    def wait_for(self, limit_s: float | None) -> bool:
        """Wait for the end; return whether it came in time."""
        return self._over.wait(limit_s)

    def result(self) -> Any:
        """Return the result of an operation that is over.

        Raises:
            HorovodInternalError: if it failed.
        """
        if self._error is not None:
            raise self._error
        return self._outcome


def parts_of(tensors: Sequence[torch.Tensor]) -> tuple[Part, ...]:
    """Return the types and shapes of tensors."""
    return tuple([Part(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in tensors])


@dataclass(slots=True)
class Execution:
    """Transfers, and what to do when all of them are over.

    Attributes:
        plans: the transfers; transfers of one track follow each other.
        deliver: makes the results of the arrived values.
    """

    plans: list[Plan] = field(default_factory=list)
    deliver: list[Callable[[], object]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Row:
    """One tensor of a reduction: its elements here, and where the result goes."""

    row: torch.Tensor
    request: CollectiveRequest
    staged: Staged | None
    """None on a rank that has joined."""


class Executor:
    """Plans executions.

    Args:
        transfers: of this process.
        rank: of this process.
        size: the number of ranks.
    """

    def __init__(self, transfers: Transfers, rank: int, size: int) -> None:
        self._transfers, self._rank, self._size = transfers, rank, size

    def plan(self, bucket: Sequence[Execute], mine: Mapping[Key, Operation]) -> Execution:
        """Return what this rank does for a bucket; nothing if it takes no part.

        Args:
            bucket: operations of one kind and process set, which travel together.
            mine: this rank's operations; those that it has not requested are absent.
        """
        run, execution = bucket[0], Execution()
        if self._rank not in run.ranks:
            return execution
        operation = mine.get(run.first.key)
        match run.first.kind:
            case "allreduce":
                self._reduce(execution, bucket, mine)
            case "broadcast":
                self._broadcast(execution, bucket, mine)
            case "allgather" if operation is not None:
                self._allgather(execution, run, operation)
            case "alltoall" if operation is not None:
                self._alltoall(execution, run, operation)
            case "reducescatter" if operation is not None:
                self._reducescatter(execution, run, operation)
        return execution

    # --- reductions -----------------------------------------------------------------------------

    def _reduce(self, execution: Execution, bucket: Sequence[Execute], mine: Mapping[Key, Operation]) -> None:
        """Reduce the tensors of one element type as one row."""
        by_type: dict[torch.dtype, list[_Row]] = {}
        for run in bucket:
            request, operation = run.first, mine.get(run.first.key)
            for index, part in enumerate(request.parts):
                staged = None if operation is None else operation.staged[index]
                row = _zeros(part) if staged is None else staged.row
                if len(row):
                    by_type.setdefault(row.dtype, []).append(_Row(row, request, staged))
        run = bucket[0]
        for rows in by_type.values():
            flat = rows[0].row if len(rows) == 1 else torch.cat([member_row.row for member_row in rows])
            if run.first.op in SUMMING and self._is_round(run, flat.dtype):
                execution.plans.append(self._transfers.total(flat))
                execution.deliver.append(partial(_give_sums, flat, rows, len(run.ranks)))
            elif self._rank not in run.joined:
                active = [rank for rank in run.ranks if rank not in run.joined]
                room = [blank(len(flat), flat.dtype) for _ in active]
                execution.plans.append(self._transfers.gather(active, flat, room))
                execution.deliver.append(partial(_give_folds, room, rows, len(run.ranks)))

    def _is_round(self, run: Execute, dtype: torch.dtype) -> bool:
        """Whether the servers add up: a round is of all ranks of the job."""
        return len(run.ranks) == self._size and self._transfers.is_summable(dtype)

    def _reducescatter(self, execution: Execution, run: Execute, operation: Operation) -> None:
        place, count = run.ranks.index(self._rank), len(run.ranks)
        outcome: list[torch.Tensor] = [torch.empty(0, device="cpu")] * len(operation.staged)
        for index, (staged, part) in enumerate(zip(operation.staged, run.first.parts, strict=True)):
            rows = even_rows(part.shape[0], count)
            given = _cut(staged.row, part, rows)
            room = [blank(len(given[place]), staged.row.dtype) for _ in run.ranks]
            execution.plans.append(self._transfers.swap(run.ranks, given, room))

            def give(
                index: int = index, part: Part = part, rows: list[int] = rows, room: list[torch.Tensor] = room
            ) -> None:
                row = fold("SUM", room)
                request = run.first
                finish(row, request.op, count, request.postscale)
                shape = (rows[place], *part.shape[1:])
                outcome[index] = row.view(shape).to(operation.tensors[index].device)

            execution.deliver.append(give)
        execution.deliver.append(lambda: operation.deliver(outcome))

    # --- moves ----------------------------------------------------------------------------------

    def _broadcast(
        self, execution: Execution, bucket: Sequence[Execute], mine: Mapping[Key, Operation]
    ) -> None:
        """Send all tensors of a bucket as one row of bytes."""
        run = bucket[0]
        all_staged = [staged for operation in bucket for staged in mine[operation.first.key].staged]
        filled = [staged for staged in all_staged if len(staged.row)]
        if not filled or len(run.ranks) == 1:
            return
        parts = [octets(staged.row) for staged in filled]
        row = parts[0] if len(parts) == 1 else torch.cat(parts)
        execution.plans.append(self._transfers.spread(run.ranks, row, run.first.root))
        if self._rank == run.first.root:
            return

        def give() -> None:
            if len(parts) > 1:
                for part, piece in zip(
                    parts, torch.split(row, [len(values) for values in parts]), strict=True
                ):
                    part.copy_(piece)
            for staged in filled:
                staged.deliver()

        execution.deliver.append(give)

    def _allgather(self, execution: Execution, run: Execute, operation: Operation) -> None:
        outcome: list[torch.Tensor] = [torch.empty(0, device="cpu")] * len(operation.staged)
        for index, staged in enumerate(operation.staged):
            shapes = [run.requests[rank].parts[index].shape for rank in run.ranks]
            whole = blank(sum(map(_count, shapes)), staged.row.dtype)
            room = torch.split(whole, [_count(shape) for shape in shapes])
            execution.plans.append(self._transfers.gather(run.ranks, staged.row, room))
            shape = (sum(dims[0] for dims in shapes), *shapes[0][1:])
            execution.deliver.append(partial(_put, outcome, index, whole, shape, operation))
        execution.deliver.append(lambda: operation.deliver(outcome))

    def _alltoall(self, execution: Execution, run: Execute, operation: Operation) -> None:
        """Exchange rows; the result has the numbers of rows that came from each rank, too."""
        place = run.ranks.index(self._rank)
        outcome: list[torch.Tensor] = [torch.empty(0, device="cpu")] * len(operation.staged)
        received = []
        for index, staged in enumerate(operation.staged):
            part = run.requests[self._rank].parts[index]
            rows = [run.requests[rank].splits[index][place] for rank in run.ranks]
            width = _count(part.shape[1:])
            given = _cut(staged.row, part, operation.request.splits[index])
            whole = blank(sum(rows) * width, staged.row.dtype)
            room = torch.split(whole, [count * width for count in rows])
            execution.plans.append(self._transfers.swap(run.ranks, given, room))
            shape = (sum(rows), *part.shape[1:])
            execution.deliver.append(partial(_put, outcome, index, whole, shape, operation))
            received.append(torch.tensor(rows, dtype=torch.int32, device="cpu"))
        execution.deliver.append(lambda: operation.deliver(list(zip(outcome, received, strict=True))))


def even_rows(rows: int, ranks: int) -> list[int]:
    """Return how many of the rows of a tensor each rank gets: the first ranks get one more.

    Example:
        >>> even_rows(5, 3)
        [2, 2, 1]
    """
    least, more = divmod(rows, ranks)
    return [least + (place < more) for place in range(ranks)]


def _give_sums(flat: torch.Tensor, rows: Sequence[_Row], ranks: int) -> None:
    for member_row, row in zip(rows, torch.split(flat, [len(entry.row) for entry in rows]), strict=True):
        if member_row.staged is not None:
            finish(row, member_row.request.op, ranks, member_row.request.postscale)
            if row.data_ptr() != member_row.row.data_ptr():
                member_row.row.copy_(row)
            member_row.staged.deliver()


def _give_folds(room: Sequence[torch.Tensor], rows: Sequence[_Row], ranks: int) -> None:
    pieces = [torch.split(row, [len(entry.row) for entry in rows]) for row in room]
    for member_row, of_ranks in zip(rows, zip(*pieces, strict=True), strict=True):
        op, postscale = member_row.request.op, member_row.request.postscale
        name = "SUM" if op in SUMMING else op.upper()
        row = adasum(of_ranks) if op == "adasum" else fold(name, of_ranks)
        finish(row, op, ranks, postscale)
        member_row.row.copy_(row)
        if member_row.staged is not None:
            member_row.staged.deliver()


def _put(
    outcome: list[torch.Tensor], index: int, row: torch.Tensor, shape: tuple[int, ...], operation: Operation
) -> None:
    outcome[index] = row.view(shape).to(operation.tensors[index].device)


def _cut(row: torch.Tensor, part: Part, rows: Sequence[int]) -> list[torch.Tensor]:
    """Return a tensor's elements cut along its first dimension, without the rows that no split needs."""
    width = _count(part.shape[1:])
    row = row[: sum(rows) * width]
    return list(torch.split(row, [count * width for count in rows]))


def _count(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _zeros(part: Part) -> torch.Tensor:
    dtype = getattr(torch, part.dtype)
    return torch.zeros(_count(part.shape), dtype=dtype, device="cpu")


@torch.no_grad()
def scale(tensor: torch.Tensor, factor: float) -> None:
    """Multiply a tensor in place: whole numbers in float64 and cut off at the point, half types in float32.

    Example:
        >>> scale(whole := torch.tensor([-3, 3]), 0.5)
        >>> whole
        tensor([-1,  1])
    """
    if factor == 1.0:
        return
    if tensor.dtype in HALF:
        tensor.copy_(tensor.float() * factor)
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double() * factor)


def finish(row: torch.Tensor, op: str, ranks: int, postscale: float) -> None:
    """Turn the sum of a reduction into its result, in place.

    Args:
        row: the sum over the ranks.
        op: ``average`` divides it by the number of ranks.
        ranks: of the process set.
        postscale: a factor of the result.
    """
    if op == "average":
        if row.dtype in HALF:
            scale(row, 1.0 / ranks)
        else:
            divide(row, ranks)
    scale(row, postscale)


def adasum(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the adaptive sum of gradients: a sum where they are orthogonal, a mean where they agree.

    Neighbours are combined in a binary tree, as in "Scaling Distributed Training with Adaptive Summation"
    (Maleki et al., https://arxiv.org/abs/2006.02924)::

        adasum(a, b) = (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b

    Example:
        >>> adasum([torch.tensor([2.0, 0.0]), torch.tensor([0.0, 3.0])])
        tensor([2., 3.])
        >>> adasum([torch.tensor([2.0, 2.0]), torch.tensor([2.0, 2.0])])
        tensor([2., 2.])
    """
    dtype = rows[0].dtype
    level = [row.double() for row in rows]
    while len(level) > 1:
        pairs = [level[index : index + 2] for index in range(0, len(level), 2)]
        level = [_pair(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0].to(dtype)


def _pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    dot, aa, bb = torch.dot(a, b), torch.dot(a, a), torch.dot(b, b)
    of_a = 1.0 - dot / (2 * aa) if aa else 1.0
    of_b = 1.0 - dot / (2 * bb) if bb else 1.0
    return of_a * a + of_b * b
