"""torch.distributed's process group "kvps": from torch's calls to collectives, and no more.

Each method takes what torch gives (lists of lists, options), checks that the shapes fit together, and
begins one collective. It returns at once; the result is in the
:class:`~kvps.torch.distributed.work.Work`. Each call is noted, so that calls that differ between
ranks are told to all of them; and so is a call that is refused here, for which other ranks would wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec

import torch
import torch.distributed as dist
from torch._C import DisableTorchFunction
from torch._C._distributed_c10d import ErrorType

from kvps.errors import ConfigError, Mismatch, Timeout
from kvps.phrases import ranks_in_words
from kvps.runtime.device import kind
from kvps.torch.distributed.call_checker import CallChecker, CheckedCalls
from kvps.torch.distributed.call_log import described, type_name
from kvps.torch.distributed.collectives import Collectives, Plan
from kvps.torch.distributed.host_tensor import (
    Staged,
    demand_rank,
    demand_same,
    is_same,
    op_of,
    reduction_of,
    root_of,
    shape_of,
    single,
)
from kvps.torch.distributed.ordered_executor import OrderedExecutor
from kvps.torch.distributed.work import Work, all_of, uncompiled

NAME = "kvps"
Change = Callable[["ProcessGroup", Any], Plan]
P = ParamSpec("P")


def noted(
    method: Callable[Concatenate[ProcessGroup, P], Work],
) -> Callable[Concatenate[ProcessGroup, P], Work]:
    """Note what a method refuses in the log of its group, which other ranks read."""

    @functools.wraps(method)
    def wrapped(self: ProcessGroup, /, *args: P.args, **kwargs: P.kwargs) -> Work:
        self._demand_members()
        try:
            with DisableTorchFunction():  # the script's default device is not the device of our tensors
                return method(self, *args, **kwargs)
        except Exception as error:
            self._calls.add_refused(error)
            raise

    return uncompiled(wrapped)


class ProcessGroup(dist.ProcessGroup):
    """A group of ranks that talk through the servers; ``init_process_group("kvps")`` makes it.

    Args:
        name: the group's, as torch has it.
        rank, size: as torch has them.
        on_shutdown: called when the group is destroyed or aborted.
        handle: this process, to the members of a group that can be reconfigured.
        change: has a group enter what torch's ``ReconfigureOptions`` name, and returns the barrier of the
            members; None for a group that keeps its members.
    """

    _has_members = False
    _collectives: Collectives
    _tracks: OrderedExecutor
    _calls: CheckedCalls

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        on_shutdown: Callable[[], None],
        handle: str = "",
        change: Change | None = None,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # as Python's groups do
        self._group, self._rank, self._size = name, rank, size
        self._on_shutdown = on_shutdown
        self._handle, self._change = handle, change
        self._coalesced: list[Work] | None = None
        """The calls since :meth:`_start_coalescing`; None outside of it."""

    def enter(self, collectives: Collectives, tracks: OrderedExecutor, checker: CallChecker) -> None:
        """Talk to the members of ``collectives`` from now on."""
        self._collectives, self._tracks, self._checker = collectives, tracks, checker
        self._ranks, self._label, self._has_members = collectives.ranks, collectives.name, True
        self._rank, self._size = collectives.rank, len(self._ranks)
        self._calls = checker.calls(self._label, self._ranks, self._ranks[self._rank])

    def _demand_members(self) -> None:
        """Refuse calls of a group that has no members yet, or none any more.

        Raises:
            ConfigError: saying how it gets some.
        """
        if not self._has_members:
            raise ConfigError(
                f"process group {self._group!r} has no members: it began with enable_reconfigure=True, or "
                "was aborted. Call torch.distributed._reconfigure(uuid, handles) on each member first"
            )

    def getRank(self) -> int:  # noqa: N802 (torch's name)
        """Return this process's rank in the group."""
        return self._rank

    def getSize(self) -> int:  # noqa: N802 (torch's name)
        """Return the number of ranks in the group."""
        return self._size

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Return ``"kvps"``."""
        return NAME

    @property
    def group_name(self) -> str:
        """The name by which torch knows the group."""
        return self._group

    @property
    def group_desc(self) -> str:
        """The description of the group in torch's log."""
        return f"{NAME}:{self._group}"

    # --- what torch asks a backend; the group is its own -------------------------------------------

    supports_splitting = supports_coalescing = supports_shrinking = supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: tensors need no memory of the backend's own."""
        return False

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices of tensors that the group takes; FSDP and checkpoints look for one that they
        can use."""
        name = kind() if torch.accelerator.is_available() else None
        return [torch.device("cpu"), *([torch.device(name)] if name else [])]

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._calls.log.count

    def _set_sequence_number_for_group(self) -> None:
        pass  # it begins at 0 on every rank

    def shutdown(self) -> None:
        """End the group; torch calls this in ``destroy_process_group``."""
        self._on_shutdown()

    def abort(self) -> None:
        """End the calls in flight on this rank, and refuse later ones.

        The stores of the process stay as they are. A group that can be reconfigured may get members again;
        any other is over.
        """
        if self._change is None:
            self._tracks.abort(self._label)  # before its stores end them by errors of their own
            self._on_shutdown()
        elif self._has_members:
            self._tracks.close()
            self._has_members = False

    def get_error(self) -> ErrorType:
        """Return that the group itself is well: each work raises the error of its call."""
        return ErrorType.SUCCESS

    # --- other members ----------------------------------------------------------------------------

    @property
    def supports_reconfigure(self) -> bool:
        """Whether the group was begun with ``enable_reconfigure=True``."""
        return self._change is not None

    def get_reconfigure_handle(self) -> str:
        """Return what the other members have to know of this process; refused as in :meth:`reconfigure`."""
        self._demand_change()
        return self._handle

    def reconfigure(self, opts: Any) -> Work:
        """Take other members; ``torch.distributed._reconfigure`` calls this on each of them.

        Calls in flight end, as at :meth:`abort`.

        Args:
            opts: torch's ``ReconfigureOptions``.

        Returns:
            a work that is done when all members have called this, and fails after ``opts.timeout``.

        Raises:
            ConfigError: for a group that keeps its members, handles that are not those of this job, or hints.
            RuntimeError: for a uuid that this process has used, as torch's other backends do.
        """
        return self._begin("reconfigure", "reconfigure", self._demand_change()(self, opts), [])

    def _demand_change(self) -> Change:
        if self._change is None:
            raise ConfigError(
                f"process group {self._group!r} keeps its members; from torch 2.14 on, those of "
                "init_process_group('kvps', enable_reconfigure=True) may change"
            )
        return self._change

    def _begin(self, what: str, call: str, plan: Plan, result: Sequence[torch.Tensor]) -> Work:
        """Begin a collective; ``call`` is the same text on all ranks that make the same call."""
        self._calls.add(call)
        return self._carry_out(what, plan, result)

    def _carry_out(self, what: str, plan: Plan, result: Sequence[torch.Tensor]) -> Work:
        return self._carried_out(Work(what, result), plan)

    def _carried_out(self, work: Work, plan: Plan) -> Work:
        self._tracks.begin(*plan, work, self._label)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin what torch calls coalescing: :meth:`_end_coalescing` returns one work for all
        calls until then."""
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return all_of("coalesced calls", works)

    def _each(
        self,
        call: Callable[[Any, Any, Any], Work],
        pairs: Iterable[tuple[Any, Any]],
        opts: Any,
        result: Sequence[torch.Tensor],
    ) -> Work:
        """Make calls of one track, which end in their order and fail together; return one work for all."""
        works = [call(output, given, opts) for output, given in pairs]
        if not works:
            return all_of("coalesced calls", [])
        works[-1].stand_for(result)
        return works[-1]

    def _letter(self, what: str, tensors: list[torch.Tensor], other: int, tag: int) -> Work:
        """Begin this end of a message: to the rank ``other`` for ``"send"``, else from it."""
        (tensor,) = single(what, tensors)
        demand_rank(what, other, self._size)
        if what == "send":
            source, ends = None, (self._rank, other)
            plan = self._collectives.send(Staged(tensor), other, tag)
        else:
            source, ends = other, (other, self._rank)
            plan = self._collectives.recv(Staged(tensor, is_read=False), other, tag)
        pair = tuple(self._ranks[end] for end in ends)
        calls = self._checker.letters(plan[0], self._label, pair, self._ranks[self._rank])
        kind, _, _ = described([tensor]).partition("[")
        calls.add(f"a message of {tensor.numel()} {kind} values")
        return self._carried_out(Work(what, [tensor], source), plan)

    # --- reductions -----------------------------------------------------------------------------

    @noted
    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        """Reduce one tensor over all ranks, in place."""
        (tensor,) = single("all_reduce", tensors)
        if tensor.layout is torch.sparse_coo:
            plan = self._collectives.reduce_sparse(tensor, op_of(opts))
            call = f"all_reduce({op_of(opts)}) of sparse {described(tensors)}"
            return self._begin("all_reduce", call, plan, tensors)
        return self._reduce("all_reduce", tensors, opts, None)

    @noted
    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        """Reduce several tensors of one type over all ranks, in place, as one."""
        if len(tensors) == 1:
            return self.allreduce(tensors, opts)
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise Mismatch("all_reduce_coalesced: the tensors have different types; make one call per type")
        parts = [Staged(tensor) for tensor in tensors]
        joined = torch.cat([part.row for part in parts])
        whole = Staged(joined)
        op = reduction_of(opts, [whole])
        track, steps = self._collectives.reduce("all_reduce", whole, op, None)

        def apart() -> Any:
            yield from steps
            for part, row in zip(parts, joined.split([len(part.row) for part in parts]), strict=True):
                part.deliver(row)

        call = f"all_reduce_coalesced({op_of(opts)}) of {described(tensors)}"
        return self._begin("all_reduce_coalesced", call, (track, apart()), tensors)

    @noted
    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        """Reduce one tensor over all ranks; the root gets the result."""
        return self._reduce("reduce", tensors, opts, root_of("reduce", opts, self._size))

    def _reduce(self, what: str, tensors: list[torch.Tensor], opts: Any, dst: int | None) -> Work:
        (tensor,) = single(what, tensors)
        staged = Staged(tensor)
        plan = self._collectives.reduce(what, staged, reduction_of(opts, [staged]), dst)
        root = "" if dst is None else f", dst={self._ranks[dst]}"
        return self._begin(what, f"{what}({op_of(opts)}{root}) of {described(tensors)}", plan, tensors)

    @noted
    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> Work:
        """Reduce a list of tensors over all ranks; rank r gets the r-th."""
        (output,), (given,) = single("reduce_scatter", outputs), single("reduce_scatter", inputs)
        self._demand_all("reduce_scatter", given)
        demand_same("reduce_scatter", output, given[self._rank])
        staged = [Staged(tensor) for tensor in given]
        op = reduction_of(opts, staged)
        plan = self._collectives.reduce_scatter(Staged(output, is_read=False), staged, op)
        call = f"reduce_scatter({op_of(opts)}) of {described(given)}"
        return self._begin("reduce_scatter", call, plan, outputs)

    @noted
    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        """Reduce one tensor over all ranks; rank r gets the r-th part of it."""
        parts = self._parts("reduce_scatter_single", output, given)
        return self.reduce_scatter([output], [parts], opts)

    _reduce_scatter_base = reduce_scatter_single

    @noted
    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Do :meth:`reduce_scatter_single` for several tensors."""
        return self._each(self.reduce_scatter_single, zip(outputs, inputs, strict=True), opts, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @noted
    def barrier(self, opts: Any = None) -> Work:
        """Wait until all ranks have called."""
        return self._begin("barrier", "barrier", self._collectives.barrier(), [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have called; name those that have not.

        torch.distributed.monitored_barrier refuses every backend but gloo, so this is called as a
        method of the group: ``dist.group.WORLD.monitored_barrier(timedelta(seconds=30))``.

        Args:
            timeout: how long; None for the group's timeout.
            wait_all_ranks: accepted as torch has it; all missing ranks are named in any case.

        Raises:
            Timeout: naming the ranks that have not called.
        """
        work = self.barrier()
        try:
            work.wait(timeout or timedelta(0))
        except Timeout as error:
            missing = self._checker.missing(self._calls)
            raise Timeout(
                f"monitored_barrier of group {self._group!r}: {ranks_in_words(missing)} did not call it "
                f"within {timeout}. The barrier stands: a rank that comes later passes it"
            ) from error

    # --- everybody to everybody -------------------------------------------------------------------

    @noted
    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Give every rank the tensors of all, whose sizes may differ."""
        (output,), (given,) = single("all_gather", outputs), single("all_gather", inputs)
        self._demand_all("all_gather", output)
        demand_same("all_gather", output[self._rank], given)
        is_even = all(is_same(tensors, given) for tensors in output)
        staged = [Staged(tensor, is_read=False) for tensor in output]
        plan = self._collectives.all_gather(staged, Staged(given))
        call = f"all_gather of {described([given] if is_even else output)}"
        return self._begin("all_gather", call, plan, output)

    @noted
    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        """Give every rank the tensors of all, side by side in one."""
        parts = self._parts("all_gather_single", given, output)
        staged = Staged(given)
        if output.is_contiguous():
            return self.allgather([parts], [staged.row], opts)
        whole = Staged(output, is_read=False)
        outputs = [Staged(row) for row in whole.row.split([given.numel()] * self._size)]
        track, steps = self._collectives.all_gather(outputs, staged)

        def together() -> Any:
            yield from steps
            whole.deliver()

        call = f"all_gather of {described([staged.row])}"
        return self._begin("all_gather_single", call, (track, together()), [output])

    _allgather_base = all_gather_single

    @noted
    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Do :meth:`allgather` for several tensors; ``outputs[r]`` are the tensors of rank r."""
        by_tensor = [[list(tensors)] for tensors in zip(*outputs, strict=True)]
        pairs = zip(by_tensor, [[given] for given in inputs], strict=True)
        return self._each(self.allgather, pairs, opts, [tensor for output in outputs for tensor in output])

    @noted
    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Do :meth:`all_gather_single` for several tensors."""
        return self._each(self.all_gather_single, zip(outputs, inputs, strict=True), opts, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @noted
    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        """Give rank r the r-th input, and take the r-th output from it."""
        self._demand_all("all_to_all", outputs)
        self._demand_all("all_to_all", inputs)
        mine = self._rank
        demand_same("all_to_all", outputs[mine], inputs[mine])
        staged = [Staged(output, is_read=False) for output in outputs]
        plan = self._collectives.all_to_all(staged, [Staged(tensor) for tensor in inputs])
        sizes = [staged.numel() for staged in inputs], [staged.numel() for staged in outputs]
        self._calls.add_exchange(f"all_to_all of {type_name(inputs[0].dtype)}", *sizes)
        return self._carry_out("all_to_all", plan, outputs)

    @noted
    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        opts: Any = None,
    ) -> Work:
        """Cut the input along its first dimension, and do :meth:`alltoall` with the parts."""
        room = self._split("all_to_all_single", output, output_split_sizes)
        return self.alltoall(room, self._split("all_to_all_single", given, input_split_sizes), opts)

    alltoall_base = all_to_all_single

    # --- one to others ----------------------------------------------------------------------------

    @noted
    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        """Give all ranks the tensor of the root."""
        (tensor,) = single("broadcast", tensors)
        root = root_of("broadcast", opts, self._size)
        staged = Staged(tensor, is_read=root == self._rank)
        call = f"broadcast(src={self._ranks[root]}) of {described(tensors)}"
        return self._begin("broadcast", call, self._collectives.broadcast(staged, root), tensors)

    @noted
    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        """Give the root the tensors of all."""
        (given,), root = single("gather", inputs), root_of("gather", opts, self._size)
        staged = self._of_root("gather", root, outputs, given, is_read=False)
        plan = self._collectives.gather(staged, Staged(given), root)
        call = f"gather(dst={self._ranks[root]}) of {described(inputs)}"
        return self._begin("gather", call, plan, [tensor for output in outputs for tensor in output])

    @noted
    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> Work:
        """Give rank r the r-th tensor of the root."""
        (output,), root = single("scatter", outputs), root_of("scatter", opts, self._size)
        staged = self._of_root("scatter", root, inputs, output, is_read=True)
        plan = self._collectives.scatter(Staged(output, is_read=False), staged, root)
        call = f"scatter(src={self._ranks[root]}) of {described(outputs)}"
        return self._begin("scatter", call, plan, outputs)

    @noted
    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Work:
        """Send one tensor to a rank of the group."""
        return self._letter("send", tensors, dst, tag)

    @noted
    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Work:
        """Take one tensor from a rank of the group that sends it with this tag."""
        return self._letter("recv", tensors, src, tag)

    @noted
    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Work:
        """Refused: a key has one writer.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "recv() without src is not supported by the backend kvps; name the rank, or have the "
            "senders gather()"
        )

    # --- shapes -----------------------------------------------------------------------------------

    def _of_root(
        self, what: str, root: int, given: list[list[torch.Tensor]], like: torch.Tensor, *, is_read: bool
    ) -> list[Staged]:
        """Return the tensors of the root, one for each rank and each ``like`` its own; of others none."""
        if root != self._rank:
            return []
        (tensors,) = single(what, given)
        self._demand_all(what, tensors)
        for tensor in tensors:
            demand_same(what, tensor, like)
        return [Staged(tensor, is_read=is_read) for tensor in tensors]

    def _demand_all(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != self._size:
            raise Mismatch(
                f"{what}: {len(tensors)} tensors were given, and the group has {self._size} ranks; "
                "give a tensor for each"
            )

    def _parts(self, what: str, part: torch.Tensor, whole: torch.Tensor) -> list[torch.Tensor]:
        """Return ``whole`` cut into flat parts like ``part``, one per rank."""
        if whole.numel() != part.numel() * self._size or whole.dtype != part.dtype:
            raise Mismatch(
                f"{what}: {shape_of(whole)} is not {self._size} times {shape_of(part)}; the group has "
                f"{self._size} ranks"
            )
        flat = whole.detach().reshape(-1)
        return list(flat.split([part.numel()] * self._size))

    def _split(self, what: str, tensor: torch.Tensor, sizes: list[int] | None) -> list[torch.Tensor]:
        """Return ``tensor`` cut along its first dimension, one part per rank."""
        if not sizes:
            if len(tensor) % self._size:
                raise Mismatch(
                    f"{what}: {len(tensor)} rows are not divisible by {self._size} ranks; give split sizes"
                )
            sizes = [len(tensor) // self._size] * self._size
        if len(sizes) != self._size or sum(sizes) != len(tensor):
            raise Mismatch(
                f"{what}: split sizes {sizes} do not fit {len(tensor)} rows and {self._size} ranks"
            )
        return list(tensor.detach().split(sizes))
