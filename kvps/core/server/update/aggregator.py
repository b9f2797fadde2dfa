"""The aggregator: takes pushes in, closes rounds, and has their sums applied.

The engine is asked with elements of a chunk, never with keys: the worker's plan has turned keys
into runs. A push of a whole chunk is one addition; a closed round of it one fused update.

In a synchronous store the pushes of one number form a round, and the weights move when the round
closes. In an asynchronous one each push moves them. What moves weights is written as a generator:
after each version it yields the readings that waited there, to be looked at again before the next
version comes. So who waits for a version gets exactly this one.

Some updates make a detour: a summed gradient becomes *due*, each server measures its part of the
tensor, and the update happens when the sums of all parts are known (:mod:`kvps.core.server.update.global_norms`). So do
those of a rule that needs norms of whole tensors (LARS, LAMB). And where a store drops what is not
finite (:mod:`kvps.core.server.nonfinite_log`), those of every key that is more than one piece: such an update must
not begin anywhere before all of it is known to be finite. Their spans are never wider than a piece.

A push of rows (:mod:`kvps.core.server.update.key_rows`) is judged span by span like any other, each of one piece of its
key. Where a sum has nothing but rows and the rule can do without the others, these alone are updated.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator
from itertools import pairwise

import torch

from kvps.core.gradients import DenseGradient, GradientSum, Part
from kvps.core.nonfinite import Flaw
from kvps.core.optim.hyperparams import HyperParams
from kvps.core.quorum import Quorum
from kvps.core.row_gradients import RowGradient
from kvps.core.server.chunks.rounds import PendingUpdate, Span, Verdict
from kvps.core.server.chunks.slab import Chunk, Chunks
from kvps.core.server.sessions import PendingRead
from kvps.core.server.store import ServerStore, Shard
from kvps.core.server.update.apply import Updates
from kvps.core.server.update.embedding_rows import TableGradient
from kvps.core.server.update.global_norms import NO_NUMBER, NormId, PartialNorms, PartialSums
from kvps.core.server.update.key_rows import KeyRows
from kvps.core.server.update.sums import Sums, may_drop
from kvps.dtypes import BY_ID, BY_NAME, summed_in
from kvps.errors import ConfigError, KeyNotFound, Mismatch, ProtocolError
from kvps.protocol.envelope import WINDOW
from kvps.protocol.stores import Piece
from kvps.protocol.values import Push, PushIds, PushRows
from kvps.tensors import PRIVATE, Memory

BLOCK_COUNT = 256 << 10
"""Elements that one thread adds up and updates at once: between, they stay in its core's cache."""

Work = list[tuple[Chunk, Span, int, Part]]
"""What a push wants: spans, where they are, the push's number for them, its gradient."""


class Aggregator:
    """The chunks of one server and everything that happens to their values."""

    def __init__(
        self,
        server: int,
        servers: int,
        workers: int,
        memory: Memory = PRIVATE,
        threads: int = 1,
    ) -> None:
        self.server = server
        self.servers = servers
        self.workers = workers
        self.memory = memory
        self.chunks = Chunks(memory, server, servers)
        self.norms: dict[NormId, PartialNorms] = {}
        """Of the updates that are not made yet."""
        self._told: dict[NormId, PartialSums] = {}
        """This server's sums for updates that are made, for one who has missed them: the last
        WINDOW of each (store, key, rank)."""
        self._untold: list[PartialNorms] = []
        self.is_torn = False
        """Something failed while values were changed: by half, perhaps."""
        self._apart: dict[int, tuple[int, list[tuple[int, int]]]] = {}
        """Of each chunk, for how many keys that is, where pieces lie that are not all of their key."""
        self._sums = Sums(BLOCK_COUNT * threads)
        self._updates = Updates(BLOCK_COUNT * threads)

    def chunk(self, number: int) -> Chunk:
        """Return a chunk by its number.

        Raises:
            ProtocolError: if there is none.
        """
        chunk = self.chunks.by_number.get(number)
        if chunk is None:
            raise ProtocolError(f"server {self.server} has no chunk {number}")
        return chunk

    def span_at(self, piece: Piece) -> Span:
        """Return the span that a piece of a key lies in."""
        return next(self.chunk(piece.chunk).spans_in(piece.start, piece.start + 1))

    # --- pushes -----------------------------------------------------------------------------

    def push(
        self,
        space: ServerStore,
        message: Push,
        gradient: DenseGradient,
        quorum: Quorum,
        now: float,
        *,
        lent: bool = False,
    ) -> tuple[Verdict, Iterator[PendingRead]]:
        """Judge a push; return what becomes of it, and those whom it wakes.

        It is taken in while these are iterated over. A push that is EARLY anywhere is not
        taken in at all. A gradient that is ``lent`` is not written to.

        Raises:
            ProtocolError, Mismatch, ConfigError: if it can never be; nothing is changed.
        """
        chunk = self.chunk(message.chunk)
        if chunk.embedding is not None:
            raise ProtocolError(
                f"chunk {chunk.number} is an embedding table: push rows by PUSH-IDS"
            )
        if BY_ID[message.dtype].name not in (chunk.dtype, summed_in(chunk.dtype)):
            raise Mismatch(
                f"chunk {chunk.number} holds {chunk.dtype}, pushed was {BY_ID[message.dtype].name}"
            )
        self._admit(space, chunk.dtype, message.ranks)
        chunk.validate(message.runs)
        chunk.check_filled(message.runs)
        work: Work = []
        taken = 0
        for run in message.runs:
            for span in self._cut(space, chunk, run.start, run.start + run.size):
                begin = taken + span.start - run.start
                part = gradient.part(begin, begin + span.stop - span.start)
                work.append((chunk, span, run.number, part))
            taken += run.size
        return self._judge(space, message, work, quorum, now, lent)

    def push_rows(
        self,
        space: ServerStore,
        table: KeyRows,
        message: PushRows,
        gradient: RowGradient,
        quorum: Quorum,
        now: float,
        *,
        lent: bool = False,
    ) -> tuple[Verdict, Iterator[PendingRead]]:
        """Judge a push of rows; see :meth:`push`."""
        self._admit(space, table.shard.spec.dtype, message.ranks)
        work: Work = []
        for piece, part in table.cut(gradient):
            chunk = self.chunk(piece.chunk)
            (span,) = chunk.cut(piece.start, piece.start + piece.size)
            work.append((chunk, span, message.number, part))
        return self._judge(space, message, work, quorum, now, lent)

    def push_ids(
        self,
        space: ServerStore,
        message: PushIds,
        gradient: TableGradient,
        quorum: Quorum,
        now: float,
    ) -> tuple[Verdict, Iterator[PendingRead]]:
        """Judge a push of rows of an embedding table; see :meth:`push`."""
        self._demand_ranks(message.ranks)
        chunk = self.chunk(message.chunk)
        (span,) = chunk.spans
        work: Work = [(chunk, span, message.number, gradient)]
        return self._judge(space, message, work, quorum, now, lent=False)

    def _judge(
        self,
        space: ServerStore,
        message: Push | PushRows | PushIds,
        work: Work,
        quorum: Quorum,
        now: float,
        lent: bool,
    ) -> tuple[Verdict, Iterator[PendingRead]]:
        ranks = message.ranks
        verdicts = [span.judge(ranks, number, space.ordered) for _, span, number, _ in work]
        if Verdict.CONFLICT in verdicts:
            raise ProtocolError(f"a push for ranks {list(ranks)}: some were counted, some were not")
        if Verdict.EARLY in verdicts:
            return Verdict.EARLY, iter(())
        counted = [
            one for one, verdict in zip(work, verdicts, strict=True) if verdict is Verdict.COUNTED
        ]
        if not counted:
            return Verdict.DUPLICATE, iter(())
        if space.updater is not None:
            for chunk in {one.number: one for one, _, _, _ in counted}.values():
                if chunk.embedding is None:
                    space.state_of(chunk)  # if it cannot be made, nothing was taken in
        taken = self._take(space, message, counted, quorum, now, lent)
        return Verdict.COUNTED, self._whole(taken)

    def _whole(self, changes: Iterator[PendingRead]) -> Iterator[PendingRead]:
        """Yield those who are woken by changes of values, which are made to their end or leave them torn.

        What is raised here nobody foresaw: what can be refused is refused before.
        """
        is_over = False
        try:
            yield from changes
            is_over = True
        finally:
            self.is_torn |= not is_over

    def _admit(self, space: ServerStore, dtype: str, ranks: tuple[int, ...]) -> None:
        if space.opened.average and BY_NAME[dtype].kind == "int":
            raise ConfigError(
                f"store {space.name!r} takes means, and integers have none; push floating point, or "
                "to a store without average"
            )
        self._demand_ranks(ranks)
        if space.updater is None and not space.ordered:
            raise ConfigError(
                f"store {space.name!r} of type dist_{space.opened.mode} has no optimizer: each push is "
                "applied by one, and this one was not; call set_optimizer(...) before push"
            )

    def _demand_ranks(self, ranks: tuple[int, ...]) -> None:
        if not ranks or max(ranks) >= self.workers:
            raise ProtocolError(
                f"a push speaks for ranks {list(ranks)!s:.60}; there are {self.workers}"
            )

    def _cut(self, space: ServerStore, chunk: Chunk, start: int, stop: int) -> list[Span]:
        """Return the spans that tile a run; each that makes the detour is one piece."""
        if space.updater is not None and space.updater.needs_norms:
            return chunk.cut_by_piece(start, stop)
        if not may_drop(space, chunk.dtype):
            return chunk.cut(start, stop)
        edges = [start]
        for begin, end in self._pieces_apart(space, chunk):
            edges += [edge for edge in (begin, end) if edges[-1] < edge < stop]
        edges.append(stop)
        return [span for begin, end in pairwise(edges) for span in chunk.cut(begin, end)]

    def _pieces_apart(self, space: ServerStore, chunk: Chunk) -> list[tuple[int, int]]:
        """Return where pieces lie in ``chunk`` that are not all of their key, in order."""
        known, apart = self._apart.get(chunk.number, (0, []))
        if known < len(chunk.keys):
            apart = apart + [
                (start, stop)
                for key, start, stop in chunk.pieces(chunk.bounds[known], chunk.used)
                if self._is_apart(space.shards[key])
            ]
            self._apart[chunk.number] = len(chunk.keys), apart
        return apart

    def _is_apart(self, shard: Shard) -> bool:
        """Whether a key is more than one piece, here or over all servers."""
        return len(shard.pieces) > 1 or bool(self._holders(shard))

    def _take(
        self,
        space: ServerStore,
        message: Push | PushRows | PushIds,
        work: Work,
        quorum: Quorum,
        now: float,
        lent: bool,
    ) -> Iterator[PendingRead]:
        """Take in what was judged COUNTED."""
        ranks, back = message.ranks, message.back if isinstance(message, Push) else None
        for chunk, span, number, part in work:
            span.take(ranks, number)  # not before its turn: who is woken would think it applied
            if space.ordered:
                keep = space.opened.deterministic or chunk.embedding is not None
                round_ = span.round(number, now)
                round_.add(ranks, part, lent=lent, keep=keep)
                round_.backs.add(back)
                yield from self.close(space, chunk, span, quorum)
            else:
                due = PendingUpdate(number, ranks, GradientSum((part,)), (ranks,), back=back)
                yield from self._due(space, chunk, span, due)

    def close(
        self, space: ServerStore, chunk: Chunk, span: Span, quorum: Quorum
    ) -> Iterator[PendingRead]:
        """Close the rounds of ``span`` that are complete; yield those who are woken."""
        required = quorum.required(space.opened.on_worker_lost)
        while required and span.closable(required):
            for part in (yield from self._close_first(space, chunk, span)):
                yield from self.close(space, chunk, part, quorum)

    def close_all(self, space: ServerStore, chunk: Chunk, span: Span) -> Iterator[PendingRead]:
        """Close every open round of ``span`` with what is in it; yield those who are woken."""
        while span.rounds:
            for part in (yield from self._close_first(space, chunk, span)):
                yield from self.close_all(space, chunk, part)

    def _close_first(
        self, space: ServerStore, chunk: Chunk, span: Span
    ) -> Generator[PendingRead, None, list[Span]]:
        """Close the oldest round of ``span``; return what was cut off from it on the way."""
        closed, stop = span.rounds.popleft(), span.stop
        total = closed.mean() if space.opened.average else closed.sum()
        due = PendingUpdate(closed.number, (), total, closed.whose(), back=closed.back)
        yield from self._due(space, chunk, span, due)
        return list(chunk.spans_in(span.stop, stop)) if span.stop < stop else []

    # --- updates ----------------------------------------------------------------------------

    def optimize(self, space: ServerStore, hyper: HyperParams) -> Iterator[PendingRead]:
        """Install an optimizer; yield those who are woken.

        What waits for norms of the old rule is applied without, if the new one needs none; what has
        to be known to be finite waits on.

        Raises:
            ConfigError: if it cannot update what is there; nothing is changed.
        """
        space.optimize(hyper)
        assert space.updater is not None
        for chunk in self.chunks.of_store(space.name):
            for span in list(chunk.spans) if chunk.embedding is None else ():
                if space.updater.needs_norms:
                    chunk.cut_by_piece(span.start, span.stop)
                while (
                    span.due and not space.updater.needs_norms and not may_drop(space, chunk.dtype)
                ):
                    yield from self._update(space, chunk, span, span.due.popleft())
        if not space.updater.needs_norms and space.drops is None:
            self._drop_norms(space.name)

    def replace(self, space: ServerStore, shard: Shard) -> list[PendingRead]:
        """Give back the place of a key that has another one now; return who waited there."""
        self.forget(space, [shard])
        return self.chunks.retire(shard.pieces)

    def forget(self, space: ServerStore, shards: Collection[Shard]) -> None:
        """Forget what was told of updates of these keys: their numbers will be those of others."""
        self._drop_norms(space.name, {shard.key for shard in shards})
        if space.drops is not None:
            space.drops.forget([piece for shard in shards for piece in shard.pieces])

    def _due(
        self, space: ServerStore, chunk: Chunk, span: Span, due: PendingUpdate
    ) -> Iterator[PendingRead]:
        needs_norms = space.updater is not None and space.updater.needs_norms
        if chunk.embedding is not None:
            yield from self._update(space, chunk, span, due)
            return
        if not needs_norms:
            if not may_drop(space, chunk.dtype):
                yield from self._update(space, chunk, span, due)
                return
            key, _, _ = next(chunk.pieces(span.start, span.stop))
            if not self._is_apart(space.shards[key]):
                yield from self._sift(space, chunk, span, due)
                return
        self._sums.add_up(space, chunk, due, by_rows=not needs_norms)
        span.due.append(due)
        if due.rank is None and len(span.due) > 1:
            return  # a round is measured against the weights that the round before it leaves
        yield from self._measure(space, chunk, span, due)

    def _sift(
        self, space: ServerStore, chunk: Chunk, span: Span, due: PendingUpdate
    ) -> Iterator[PendingRead]:
        """Update keys that lie here as a whole, but for those whose gradient is not finite."""
        assert space.drops is not None
        if self._sums.sift(space, chunk, due) is None:
            yield from self._update(space, chunk, span, due)
            return
        span.due.append(due)  # so that it is cut where the span is
        for part in chunk.cut_by_piece(span.start, span.stop):
            one = part.due.popleft()
            flaw = self._sums.sift(space, chunk, one)
            if flaw is None:
                yield from self._update(space, chunk, part, one)
                continue
            ((key, _, _),) = chunk.pieces(part.start, part.stop)
            space.drops.add(key, space.shards[key].pieces, one.rank, one.number, flaw)
            yield from self._skip(chunk, part, one)

    def _skip(self, chunk: Chunk, span: Span, due: PendingUpdate) -> Iterator[PendingRead]:
        """Leave ``span`` as it is: a round is closed by that, a push just taken in."""
        if due.rank is None:
            span.version += 1
        yield from chunk.woken(span.start, span.stop)

    def _update(
        self,
        space: ServerStore,
        chunk: Chunk,
        span: Span,
        due: PendingUpdate,
        norms: torch.Tensor | None = None,
    ) -> Iterator[PendingRead]:
        """Move the weights of ``span`` by one round or one push; yield those who are woken."""
        self._updates.make(space, chunk, span, due, norms)
        span.version += 1
        yield from chunk.woken(span.start, span.stop)

    # --- what must be known of whole tensors ------------------------------------------------------

    def _measure(
        self, space: ServerStore, chunk: Chunk, span: Span, due: PendingUpdate
    ) -> Iterator[PendingRead]:
        """Add this piece's sums to those of its tensor."""
        ((key, _, _),) = chunk.pieces(span.start, span.stop)
        shard = space.shards[key]
        flaw = due.flaw
        norm = self._norm(space, (space.name, key, due.rank, due.number))
        counts = [0.0 if flaw is None else float(flaw.values)] if norm.counts else []
        sums = torch.tensor(counts, dtype=torch.float64)
        if flaw is None and space.updater is not None and space.updater.needs_norms:
            sums = torch.cat((sums, self._updates.squares(space, space.updater, chunk, span, due)))
        culprits = () if flaw is None else flaw.ranks
        norm.measure(sums, len(shard.pieces), self._holders(shard), culprits)
        if norm.mine and norm.holders:
            self._untold.append(norm)
        yield from self._settle(space, norm)

    def _norm(self, space: ServerStore, number: NormId) -> PartialNorms:
        """Return what is known for an update, from nothing on."""
        norm = self.norms.get(number)
        if norm is None:
            norm = PartialNorms(number, may_drop(space, space.shards[number[1]].spec.dtype))
            self.norms[number] = norm
        return norm

    def _holders(self, shard: Shard) -> frozenset[int]:
        """The other servers that hold pieces of a key: all if it is cut, none if it is not."""
        if shard.count == shard.spec.count:
            return frozenset()
        return frozenset(range(self.servers)) - {self.server}

    def untold(self) -> list[PartialNorms]:
        """Return the norms whose local sums were completed since the last call."""
        untold, self._untold = self._untold, []
        return untold

    def hear(
        self, space: ServerStore, number: NormId, server: int, told: PartialSums
    ) -> Iterator[PendingRead]:
        """Another server told its part of a tensor's sums; yield those who are woken.

        Raises:
            KeyNotFound, Mismatch, ProtocolError: if that cannot be; nothing is changed.
        """
        ahead = number[3] - self._applied(space, number)
        if number in self._told or not 0 <= ahead < WINDOW or not told.sums:
            return  # the update is made; or so far off that it will have to be told again
        counts = may_drop(space, space.shards[number[1]].spec.dtype)
        self._check_told(space, number, told, counts)
        norm = self._norm(space, number)
        norm.hear(server, *told)
        yield from self._whole(self._settle(space, norm))

    def _check_told(
        self, space: ServerStore, number: NormId, told: PartialSums, counts: bool
    ) -> None:
        """Check that a server can have measured what it told.

        Raises:
            ProtocolError: if it cannot.
        """
        squares = told.sums
        if counts:
            first, squares = told.sums[0], told.sums[1:]
            if not (first.is_integer() and 0 <= first <= space.shards[number[1]].spec.count):
                raise ProtocolError(f"key {number[1]!r}: {first:g} values cannot be not finite")
        if any(one < 0 and one != NO_NUMBER for one in squares):
            raise ProtocolError(f"key {number[1]!r}: {min(squares):g} is no sum of squares")
        if any(rank >= self.workers for rank in told.culprits):
            raise ProtocolError(f"key {number[1]!r}: there is no rank {max(told.culprits)}")

    def told(self, space: ServerStore, number: NormId, width: int) -> PartialSums:
        """Return this server's sums for an update; none while they are unknown.

        For an update that was made without, or so long ago that its sums are forgotten, they are
        ``width`` zeros: whoever still waits must not wait for ever.
        """
        if number in self._told:
            return self._told[number]
        if number in self.norms:
            return self.norms[number].told
        return PartialSums((0.0,) * width if number[3] < self._applied(space, number) else ())

    def _applied(self, space: ServerStore, number: NormId) -> int:
        """The lowest update (of this rank) of a tensor that is not made yet."""
        _, key, rank, _ = number
        shard = space.shards.get(key)
        if shard is None or not shard.pieces:
            raise KeyNotFound(f"server {self.server} holds no part of {key!r}")
        if space.ordered is not (rank is None):
            raise ProtocolError(f"store {space.name!r} is {space.opened.mode}, update {number}")
        piece = shard.pieces[0]
        span = self.span_at(piece)
        return span.version if rank is None else span.applied(rank)

    def _settle(self, space: ServerStore, norm: PartialNorms) -> Iterator[PendingRead]:
        """Update a tensor's pieces here if all its norms are known; yield those who are woken."""
        if not norm.complete:
            return
        store, key, rank, number = norm.id
        shard = space.shards[key]
        del self.norms[norm.id]
        if norm.holders:
            self._told[norm.id] = norm.told
            self._told.pop((store, key, rank, number - WINDOW), None)
        sums = norm.total(self.server)
        flaw = None
        if norm.counts:
            count, sums = int(sums[0]), sums[1:]
            if len(sums) < len(norm.mine) - 1:
                sums = sums[:0]  # some server measured by another rule
            flaw = Flaw(count, norm.culprits) if count else None
        if flaw is not None and space.drops is not None:
            space.drops.add(key, shard.pieces, rank, number, flaw)
        for piece in shard.pieces:
            chunk = self.chunk(piece.chunk)
            (span,) = chunk.cut(piece.start, piece.start + piece.size)
            due = next(one for one in span.due if (one.rank, one.number) == (rank, number))
            span.due.remove(due)
            if flaw is None:
                norms = self._fitting(space, chunk, span, due, sums)
                yield from self._update(space, chunk, span, due, norms)
            else:
                yield from self._skip(chunk, span, due)
            if rank is None and span.due:
                yield from self._measure(space, chunk, span, span.due[0])

    def _fitting(
        self, space: ServerStore, chunk: Chunk, span: Span, due: PendingUpdate, sums: torch.Tensor
    ) -> torch.Tensor:
        """Return ``sums``; or if the rule has come later than they were measured, the piece's own."""
        updater = space.updater
        if updater is None or not updater.needs_norms or len(sums):
            return sums
        return self._updates.squares(space, updater, chunk, span, due)

    def _drop_norms(self, store: str, keys: Collection[str] | None = None) -> None:
        """Forget the norms of one store, or of some keys of it."""
        for norms in (self.norms, self._told):
            ours = [one for one in norms if one[0] == store]
            for one in [one for one in ours if keys is None or one[1] in keys]:
                del norms[one]

    # --- members ----------------------------------------------------------------------------

    def replaced(self, space: ServerStore, rank: int, quorum: Quorum) -> None:
        """A new process holds ``rank``: it need not make up for what it missed."""
        for chunk in self.chunks.of_store(space.name):
            for span in chunk.spans:
                span.replace(rank, quorum.live)

    def check(self) -> None:
        """Assert the invariants of every chunk."""
        for chunk in self.chunks.by_number.values():
            assert chunk.spans
            chunk.check()
        assert not self._untold
