"""Collectives as pushes and pulls; nothing here waits.

Every method returns the track on which a collective goes and its steps. Three patterns are all:

*A round.* A sum over all ranks of the job is one round of a synchronous key: each rank pushes its values
once and pulls the sum, however many ranks there are.

*A swap.* Every member writes posts for the others, and reads theirs.

*A letter.* One member writes a post, and others read it (:mod:`kvps.torch.distributed.mailbox` has both).

The name of a key says what it is for: the operation, its reduction or root, the element type and,
for the first shapes, the shape. Ranks whose calls differ use different keys, and wait until they are told so
(:mod:`kvps.torch.distributed.call_checker`).

Groups of fewer ranks than the job make their reductions of swaps: rounds are of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvps.dtypes import Spec
from kvps.errors import ConfigError, WorkerLost
from kvps.tensors import NAMES
from kvps.torch.distributed import mailbox
from kvps.torch.distributed.call_log import type_name
from kvps.torch.distributed.host_tensor import HALF, Staged, blank, check, check_sparse, divide, fold, padded
from kvps.torch.distributed.mailbox import Board, KeySizes
from kvps.torch.distributed.ordered_executor import Steps

POSTS_EXACT_MAX, LETTERS_EXACT_MAX = 16, 8
"""The number of shapes that have keys of their own: in each kind of swap and letter, and between
two ranks."""
LETTERS_MAX = 4096
"""The most keys of a mailbox that a process may use: ranks, tags and sizes multiply."""

Plan = tuple[str, Steps]
"""A track, and the steps to be made there."""


class Collectives:
    """The collectives of one group.

    Args:
        board: of this process.
        name: of the group, the same on its members.
        ranks: of its members in the job, in the group's order.
        timeout_s: how long each step may take.
    """

    def __init__(self, board: Board, name: str, ranks: Sequence[int], timeout_s: float) -> None:
        self._board = board
        self.name = name
        self.ranks = tuple(ranks)
        self._timeout_s = timeout_s
        self._sizes = KeySizes()
        self._post_sizes = KeySizes(POSTS_EXACT_MAX)
        self._pair_sizes = KeySizes(LETTERS_EXACT_MAX)
        self._is_whole = sorted(ranks) == list(range(board.workers))

    @property
    def _others(self) -> list[int]:
        """The members but this one, by their rank in the job."""
        return [rank for rank in self.ranks if rank != self._board.rank]

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.ranks.index(self._board.rank)

    # --- reductions -----------------------------------------------------------------------------

    def reduce(self, what: str, staged: Staged, op: str, dst: int | None) -> Plan:
        """Reduce a tensor over all members; all get the result, or the one of rank ``dst``.

        Args:
            what: the operation.
            staged: the tensor; the result is delivered there.
            op: one of :data:`kvps.torch.distributed.host_tensor.FOLDS`.
            dst: a rank of the group; None for all.
        """
        check(op, staged.row.dtype)
        is_wanted = dst is None or dst == self.rank
        kind = f"{what}.{op}" if dst is None else f"{what}.{op}>{dst}"
        if self._is_sum(op, staged.row.dtype):
            self._demand_all(what)
            name, spec = self._sum_key(kind, op, staged)
            return name, self._round(name, spec, staged, op, is_wanted)
        if dst is not None:
            return self._reduce_there(kind, staged, op, dst)
        self._demand_all(what)
        return self._track("all"), self._reduce_here(kind, staged, op)

    def _is_sum(self, op: str, dtype: torch.dtype) -> bool:
        """Whether a reduction is a round."""
        return self._is_whole and op in ("SUM", "AVG") and dtype in NAMES

    def _sum_key(self, kind: str, op: str, staged: Staged) -> tuple[str, Spec]:
        """Return the key of a round of this kind, and its specification."""
        dtype = staged.row.dtype
        name, size = self._sizes.of(self._kind(kind, dtype), staged.shape, len(staged.row))
        # Nothing but float32 can hold a sum of halves before it is divided.
        kept_as = torch.float32 if op == "AVG" and dtype in HALF else dtype
        return name, Spec(NAMES[kept_as], (size,))

    def _round(self, name: str, spec: Spec, staged: Staged, op: str, is_wanted: bool) -> Steps:
        yield self._board.make_sums([(name, spec)], self._timeout_s)
        row = padded(staged.row.to(getattr(torch, spec.dtype)), spec.count)
        if is_wanted:
            yield [self._board.add([name], [row], [row], self._timeout_s)]
            self._deliver(row[: len(staged.row)], staged, op)
        else:
            # Who does not want the sum waits for it all the same. So a rank that has left the job has
            # missed no round, and one that misses it has reason to complain.
            added = self._board.add([name], [row], None, self._timeout_s)
            yield [added, self._board.closed([name], self._timeout_s)]

    def _deliver(self, total: torch.Tensor, staged: Staged, op: str) -> None:
        """Deliver the results of a round."""
        if op == "AVG":
            divide(total, len(self.ranks))
        if total.data_ptr() == staged.row.data_ptr():
            staged.deliver()
        else:
            staged.deliver(total)

    def _reduce_here(self, kind: str, staged: Staged, op: str) -> Steps:
        rows = [blank(len(staged.row), staged.row.dtype) for _ in self.ranks]
        yield from self._gathered(kind, staged, rows)
        staged.deliver(fold(op, rows))

    def _reduce_there(self, kind: str, staged: Staged, op: str, dst: int) -> Plan:
        if dst != self.rank:
            return self.gather([], staged, dst, kind)
        rows = [blank(len(staged.row), staged.row.dtype) for _ in self.ranks]
        track, steps = self.gather([Staged(row) for row in rows], staged, dst, kind)

        def there() -> Steps:
            yield from steps
            staged.deliver(fold(op, rows))

        return track, there()

    def reduce_sparse(self, given: torch.Tensor, op: str) -> Plan:
        """Add up sparse tensors of all members: each sends its indices and values, and all get the
        coalesced sum.

        Args:
            given: of layout ``torch.sparse_coo``; the sum is delivered there.
            op: SUM or AVG.

        Raises:
            ConfigError: for another reduction.
        """
        if op not in ("SUM", "AVG"):
            raise ConfigError(f"ReduceOp.{op} of sparse tensors is not supported; use SUM or AVG")
        check(op, given.dtype)
        check_sparse(given.dtype)
        self._demand_all("all_reduce")
        return self._track("all"), self._reduce_sparse(given, op)

    def _reduce_sparse(self, given: torch.Tensor, op: str) -> Steps:
        mine = given.detach().cpu().coalesce()
        kind, count = f"all_reduce_sparse.{op}", mine._nnz()
        counts = torch.tensor([count], dtype=torch.int64, device="cpu")
        every = [blank(1, torch.int64) for _ in self.ranks]
        yield from self._gathered(f"{kind}.counts", Staged(counts), every)
        most = max(int(count) for count in every)
        indices = [blank(mine.sparse_dim() * most, torch.int64) for _ in self.ranks]
        width = mine.values()[:1].numel() if count else mine.shape[mine.sparse_dim() :].numel()
        values = [blank(width * most, mine.dtype) for _ in self.ranks]
        sent = padded(mine.indices().t().reshape(-1), len(indices[0]))
        yield from self._gathered(f"{kind}.indices", Staged(sent), indices)
        sent = padded(mine.values().reshape(-1), len(values[0]))
        yield from self._gathered(f"{kind}.values", Staged(sent), values)
        parts = []
        for number, where, what in zip([int(count) for count in every], indices, values, strict=True):
            at = where.view(most, mine.sparse_dim())[:number].t()
            rows = what.view(most, *mine.shape[mine.sparse_dim() :])[:number]
            parts.append((at, rows.float() if mine.dtype in HALF else rows))
        total = torch.sparse_coo_tensor(
            torch.cat([at for at, _ in parts], dim=1),
            torch.cat([rows for _, rows in parts]),
            given.shape,
            device="cpu",
        ).coalesce()
        if op == "AVG":
            divide(total.values(), len(self.ranks))
        given.copy_(total.to(mine.dtype))

    def reduce_scatter(self, output: Staged, inputs: Sequence[Staged], op: str) -> Plan:
        """Reduce ``inputs[r]`` over all members, for the member of rank r."""
        self._demand_all("reduce_scatter")
        dtype = output.row.dtype
        check(op, dtype)
        track = self._track("reduce_scatter")
        if not self._is_sum(op, dtype):
            return track, self._scatter_here(f"reduce_scatter.{op}", output, inputs, op)
        keys = [
            self._sum_key(f"reduce_scatter.{op}.{rank}", op, staged)
            for rank, staged in zip(self.ranks, inputs, strict=True)
        ]
        return track, self._rounds(keys, output, inputs, op)

    def _rounds(
        self, keys: list[tuple[str, Spec]], output: Staged, inputs: Sequence[Staged], op: str
    ) -> Steps:
        yield self._board.make_sums(keys, self._timeout_s)
        rows = [
            padded(staged.row.to(getattr(torch, spec.dtype)), spec.count)
            for staged, (_, spec) in zip(inputs, keys, strict=True)
        ]
        mine, (name, spec) = self.rank, keys[self.rank]
        sink = blank(spec.count, rows[mine].dtype)
        others = [index for index in range(len(keys)) if index != mine]
        tickets = [self._board.add([name], [rows[mine]], [sink], self._timeout_s)]
        if others:
            names = [keys[index][0] for index in others]
            tickets.append(self._board.add(names, [rows[index] for index in others], None, self._timeout_s))
        yield tickets
        self._deliver(sink[: len(output.row)], output, op)

    def _scatter_here(self, kind: str, output: Staged, inputs: Sequence[Staged], op: str) -> Steps:
        rows = [blank(len(output.row), output.row.dtype) for _ in self.ranks]
        yield from self._swapped(kind, [staged.row for staged in inputs], rows)
        output.deliver(fold(op, rows))

    # --- everybody to everybody -----------------------------------------------------------------

    def barrier(self) -> Plan:
        """Wait until all members have called."""
        nothing = Staged(torch.zeros(1, dtype=torch.uint8, device="cpu"))
        return self.reduce("barrier", nothing, "SUM", None)

    def all_gather(self, outputs: Sequence[Staged], given: Staged) -> Plan:
        """Give every member the tensors of all, whose sizes may differ."""
        self._demand_all("all_gather")
        return self._track("all"), self._all_gather(outputs, given)

    def _all_gather(self, outputs: Sequence[Staged], given: Staged) -> Steps:
        rows = [staged.row for staged in outputs]
        if len({len(row) for row in rows}) == 1:
            yield from self._gathered("all_gather", given, rows)
        else:
            named = zip(self.ranks, rows, strict=True)
            names = [self._pair(f"all_gather/{rank}", row) for rank, row in named]
            yield from self._exchanged(names, given.row, rows)
        for output in outputs:
            output.deliver()

    def _gathered(self, kind: str, given: Staged, rows: Sequence[torch.Tensor]) -> Steps:
        """Fill ``rows`` with the rows of all members; ``given`` is this one's."""
        post = self._post(kind, given)
        names = [f"{post}/{rank}" for rank in self.ranks]
        yield from self._exchanged(names, given.row, rows)

    def _exchanged(self, names: Sequence[str], row: torch.Tensor, rows: Sequence[torch.Tensor]) -> Steps:
        """Write ``row`` to this member's post, and fill ``rows`` from the posts of all."""
        mine = self.rank
        theirs = [(names[index], rank, rows[index]) for index, rank in enumerate(self.ranks) if index != mine]
        yield from mailbox.swap(self._board, self._timeout_s, [(names[mine], row)], theirs)
        rows[mine].copy_(row)

    def all_to_all(self, outputs: Sequence[Staged], inputs: Sequence[Staged]) -> Plan:
        """Give the member of rank r ``inputs[r]``, and take ``outputs[r]`` from it."""
        self._demand_all("all_to_all")
        return self._track("pair"), self._all_to_all(outputs, inputs)

    def _all_to_all(self, outputs: Sequence[Staged], inputs: Sequence[Staged]) -> Steps:
        rows = [blank(len(staged.row), staged.row.dtype) for staged in outputs]  # both may be one tensor
        yield from self._swapped("all_to_all", [staged.row for staged in inputs], rows)
        for output, row in zip(outputs, rows, strict=True):
            output.deliver(row)

    def _swapped(self, kind: str, given: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> Steps:
        """Fill ``rows[r]`` with what member r has ``given`` this one."""
        me, mine, theirs = self._board.rank, [], []
        for rank, sent, row in zip(self.ranks, given, rows, strict=True):
            if rank == me:
                row.copy_(sent)
                continue
            mine.append((self._pair(f"{kind}/{me}>{rank}", sent), sent))
            theirs.append((self._pair(f"{kind}/{rank}>{me}", row), rank, row))
        yield from mailbox.swap(self._board, self._timeout_s, mine, theirs)

    # --- one to others --------------------------------------------------------------------------

    def broadcast(self, staged: Staged, src: int) -> Plan:
        """Give all members the tensor of rank ``src``."""
        track = self._track(f"broadcast/{src}")
        name = self._post(f"broadcast/{src}", staged)
        if src == self.rank:
            return track, self._tell([(name, staged.row)], len(self._others))
        return track, self._hear([(name, self.ranks[src], staged)])

    def gather(self, outputs: Sequence[Staged], given: Staged, dst: int, kind: str = "gather") -> Plan:
        """Give the member of rank ``dst`` the tensors of all."""
        track, post = self._track(f"gather/{dst}"), self._post(f"{kind}/{dst}", given)
        if dst != self.rank:
            return track, self._tell([(f"{post}/{self._board.rank}", given.row)], 1)
        heard = [
            (f"{post}/{rank}", rank, output)
            for rank, output in zip(self.ranks, outputs, strict=True)
            if rank != self._board.rank
        ]
        outputs[dst].deliver(given.row)
        return track, self._hear(heard)

    def scatter(self, output: Staged, inputs: Sequence[Staged], src: int) -> Plan:
        """Give the member of rank r what rank ``src`` has as ``inputs[r]``."""
        track, post = self._track(f"scatter/{src}"), self._post(f"scatter/{src}", output)
        if src != self.rank:
            name = f"{post}/{self._board.rank}"
            return track, self._hear([(name, self.ranks[src], output)])
        output.deliver(inputs[src].row)
        told = [
            (f"{post}/{rank}", staged.row)
            for rank, staged in zip(self.ranks, inputs, strict=True)
            if rank != self._board.rank
        ]
        return track, self._tell(told, 1)

    def send(self, staged: Staged, dst: int, tag: int) -> Plan:
        """Send a tensor to the member of rank ``dst``."""
        track, name = self._letterbox(self.rank, dst, tag, staged)
        return track, mailbox.tell(self._board, self._timeout_s, [(name, staged.row)], 1)

    def recv(self, staged: Staged, src: int, tag: int) -> Plan:
        """Take a tensor that the member of rank ``src`` sends with the same tag."""
        track, name = self._letterbox(src, self.rank, tag, staged)
        return track, self._hear([(name, self.ranks[src], staged)])

    def _letterbox(self, src: int, dst: int, tag: int, staged: Staged) -> tuple[str, str]:
        if self._board.posts > LETTERS_MAX:
            raise ConfigError(
                f"send and recv have used {self._board.posts} combinations of ranks, tags and sizes, "
                "and each is a key on the servers; reuse a tag when its message has been received"
            )
        track = f"letters/{src}>{dst}/{tag}"
        return self._track(track), self._pair(track, staged.row)

    # --- small things ---------------------------------------------------------------------------

    def _kind(self, kind: str, dtype: torch.dtype) -> str:
        return self._track(f"{kind}/{type_name(dtype)}")

    def _post(self, kind: str, staged: Staged) -> str:
        """Return the name of the post for a tensor of this shape."""
        kind = self._kind(kind, staged.row.dtype)
        return self._post_sizes.of(kind, staged.shape, staged.row.nbytes)[0]

    def _pair(self, kind: str, row: torch.Tensor) -> str:
        """Return the name of the post from one member to another."""
        return self._pair_sizes.of(self._kind(kind, row.dtype), (len(row),), row.nbytes)[0]

    def _tell(self, told: Sequence[tuple[str, torch.Tensor]], readers: int) -> Steps:
        return mailbox.tell(self._board, self._timeout_s, told, readers, confirms=True)

    def _hear(self, heard: Sequence[tuple[str, int, Staged]]) -> Steps:
        return mailbox.hear(self._board, self._timeout_s, heard)

    def _track(self, what: str) -> str:
        return f"{self.name}/{what}"

    def _demand_all(self, what: str) -> None:
        """Refuse what needs every member, if one has left.

        Raises:
            WorkerLost: naming it.
        """
        gone = sorted(set(self._board.left()) & set(self.ranks))
        if gone:
            raise WorkerLost(
                f"{what}: worker {gone[0]} has left the job, and the group {self.name!r} needs it. "
                "Make the same number of collective calls on every rank, or use torch's Join for uneven data"
            )
