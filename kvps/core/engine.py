"""What a server does with gradients: sum them, close rounds, update weights.

The engine is asked with elements of a chunk, never with keys: the worker's plan has turned keys
into runs. A push of a whole chunk is one addition; a closed round of it one fused update.

In a synchronous store the pushes of one number form a round, and the weights move when the round
closes. In an asynchronous one each push moves them. What moves weights is written as a generator:
after each version it yields the readings that waited there, to be looked at again before the next
version comes. So who waits for a version gets exactly this one.

Some updates make a detour: a summed gradient becomes *due*, each server measures its part of the
tensor, and the update happens when the sums of all parts are known (:mod:`kvps.core.norms`). So do
those of a rule that needs norms of whole tensors (LARS, LAMB). And where a store drops what is not
finite (:mod:`kvps.core.drops`), those of every key that is more than one piece: such an update must
not begin anywhere before all of it is known to be finite. Their spans are never wider than a piece.

A push of rows (:mod:`kvps.core.tables`) is judged span by span like any other, each of one piece of its
key. Where a sum has nothing but rows and the rule can do without the others, these alone are updated.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator
from itertools import groupby, pairwise

import torch

from kvps.core import by_ids, tables
from kvps.core.by_ids import ByIds
from kvps.core.drops import Flaw, count_nonfinite
from kvps.core.hyper import Hyper
from kvps.core.lazy import may_be_lazy
from kvps.core.namespace import Namespace, Shard
from kvps.core.norms import Norm, NormId, Told
from kvps.core.quorum import Quorum
from kvps.core.rounds import WINDOW, Due, Span, Verdict
from kvps.core.sessions import Reading
from kvps.core.slab import Chunk, Chunks
from kvps.core.sparse import Sparse
from kvps.core.steps import Back, code_of
from kvps.core.strip import Part, Strip, Sum
from kvps.core.tables import Table
from kvps.core.updaters import Updater
from kvps.errors import ConfigError, KeyNotFound, Mismatch, ProtocolError
from kvps.messages import Piece, Push, PushIds, PushRows
from kvps.specs import BY_ID, BY_NAME, summed_in
from kvps.tensors import PRIVATE, TORCH, Memory

BLOCK_COUNT = 256 << 10
"""Elements that one thread adds up and updates at once: between, they stay in its core's cache."""

Work = list[tuple[Chunk, Span, int, Part]]
"""What a push wants: spans, where they are, the push's number for them, its gradient."""


class Engine:
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
        self.norms: dict[NormId, Norm] = {}
        """Of the updates that are not made yet."""
        self._told: dict[NormId, Told] = {}
        """This server's sums for updates that are made, for one who has missed them: the last
        WINDOW of each (store, key, rank)."""
        self._untold: list[Norm] = []
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._sums: dict[torch.dtype, torch.Tensor] = {}
        """Memory for the sums of a span that is looked at before it is applied."""
        self._apart: dict[int, tuple[int, list[tuple[int, int]]]] = {}
        """Of each chunk, for how many keys that is, where pieces lie that are not all of their key."""
        self._block_count = BLOCK_COUNT * threads

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
        space: Namespace,
        message: Push,
        gradient: Strip,
        quorum: Quorum,
        now: float,
        *,
        lent: bool = False,
    ) -> tuple[Verdict, Iterator[Reading]]:
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
        space: Namespace,
        table: Table,
        message: PushRows,
        gradient: Sparse,
        quorum: Quorum,
        now: float,
        *,
        lent: bool = False,
    ) -> tuple[Verdict, Iterator[Reading]]:
        """Judge a push of rows; see :meth:`push`."""
        self._admit(space, table.shard.spec.dtype, message.ranks)
        work: Work = []
        for piece, part in table.cut(gradient):
            chunk = self.chunk(piece.chunk)
            (span,) = chunk.cut(piece.start, piece.start + piece.size)
            work.append((chunk, span, message.number, part))
        return self._judge(space, message, work, quorum, now, lent)

    def push_ids(
        self, space: Namespace, message: PushIds, gradient: ByIds, quorum: Quorum, now: float
    ) -> tuple[Verdict, Iterator[Reading]]:
        """Judge a push of rows of an embedding table; see :meth:`push`."""
        self._demand_ranks(message.ranks)
        chunk = self.chunk(message.chunk)
        (span,) = chunk.spans
        work: Work = [(chunk, span, message.number, gradient)]
        return self._judge(space, message, work, quorum, now, lent=False)

    def _judge(
        self,
        space: Namespace,
        message: Push | PushRows | PushIds,
        work: Work,
        quorum: Quorum,
        now: float,
        lent: bool,
    ) -> tuple[Verdict, Iterator[Reading]]:
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
        return Verdict.COUNTED, self._take(space, message, counted, quorum, now, lent)

    def _admit(self, space: Namespace, dtype: str, ranks: tuple[int, ...]) -> None:
        if space.opened.average and BY_NAME[dtype].kind == "int":
            raise ConfigError(
                f"store {space.name!r} takes means, and integers have none; push floating point, or "
                "to a store without average"
            )
        self._demand_ranks(ranks)
        if space.updater is None and not space.ordered:
            raise ConfigError(
                f"store {space.name!r} is {space.opened.mode} and has no optimizer: each push "
                "is applied by one; call set_optimizer(...) before the first push"
            )

    def _demand_ranks(self, ranks: tuple[int, ...]) -> None:
        if not ranks or max(ranks) >= self.workers:
            raise ProtocolError(
                f"a push speaks for ranks {list(ranks)!s:.60}; there are {self.workers}"
            )

    def _cut(self, space: Namespace, chunk: Chunk, start: int, stop: int) -> list[Span]:
        """Return the spans that tile a run; each that makes the detour is one piece."""
        if space.updater is not None and space.updater.needs_norms:
            return chunk.cut_by_piece(start, stop)
        if not _drops(space, chunk.dtype):
            return chunk.cut(start, stop)
        edges = [start]
        for begin, end in self._pieces_apart(space, chunk):
            edges += [edge for edge in (begin, end) if edges[-1] < edge < stop]
        edges.append(stop)
        return [span for begin, end in pairwise(edges) for span in chunk.cut(begin, end)]

    def _pieces_apart(self, space: Namespace, chunk: Chunk) -> list[tuple[int, int]]:
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
        space: Namespace,
        message: Push | PushRows | PushIds,
        work: Work,
        quorum: Quorum,
        now: float,
        lent: bool,
    ) -> Iterator[Reading]:
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
                due = Due(number, ranks, Sum((part,)), (ranks,), back=back)
                yield from self._due(space, chunk, span, due)

    def close(
        self, space: Namespace, chunk: Chunk, span: Span, quorum: Quorum
    ) -> Iterator[Reading]:
        """Close the rounds of ``span`` that are complete; yield those who are woken."""
        required = quorum.required(space.opened.on_worker_lost)
        while required and span.closable(required):
            for part in (yield from self._close_first(space, chunk, span)):
                yield from self.close(space, chunk, part, quorum)

    def close_all(self, space: Namespace, chunk: Chunk, span: Span) -> Iterator[Reading]:
        """Close every open round of ``span`` with what is in it; yield those who are woken."""
        while span.rounds:
            for part in (yield from self._close_first(space, chunk, span)):
                yield from self.close_all(space, chunk, part)

    def _close_first(
        self, space: Namespace, chunk: Chunk, span: Span
    ) -> Generator[Reading, None, list[Span]]:
        """Close the oldest round of ``span``; return what was cut off from it on the way."""
        closed, stop = span.rounds.popleft(), span.stop
        total = closed.mean() if space.opened.average else closed.sum()
        due = Due(closed.number, (), total, closed.whose(), back=closed.back)
        yield from self._due(space, chunk, span, due)
        return list(chunk.spans_in(span.stop, stop)) if span.stop < stop else []

    # --- updates ----------------------------------------------------------------------------

    def optimize(self, space: Namespace, hyper: Hyper) -> Iterator[Reading]:
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
                while span.due and not space.updater.needs_norms and not _drops(space, chunk.dtype):
                    yield from self._update(space, chunk, span, span.due.popleft())
        if not space.updater.needs_norms and space.drops is None:
            self._drop_norms(space.name)

    def replace(self, space: Namespace, shard: Shard) -> list[Reading]:
        """Give back the place of a key that has another one now; return who waited there."""
        self.forget(space, [shard])
        return self.chunks.retire(shard.pieces)

    def forget(self, space: Namespace, shards: Collection[Shard]) -> None:
        """Forget what was told of updates of these keys: their numbers will be those of others."""
        self._drop_norms(space.name, {shard.key for shard in shards})
        if space.drops is not None:
            space.drops.forget([piece for shard in shards for piece in shard.pieces])

    def _due(self, space: Namespace, chunk: Chunk, span: Span, due: Due) -> Iterator[Reading]:
        needs_norms = space.updater is not None and space.updater.needs_norms
        if chunk.embedding is not None:
            yield from self._update(space, chunk, span, due)
            return
        if not needs_norms:
            if not _drops(space, chunk.dtype):
                yield from self._update(space, chunk, span, due)
                return
            key, _, _ = next(chunk.pieces(span.start, span.stop))
            if not self._is_apart(space.shards[key]):
                yield from self._sift(space, chunk, span, due)
                return
        if due.sum.is_sparse and not needs_norms:
            due.flaw, rows = self._look_at_rows(space, chunk, due)
            due.sum, due.is_own = Sum((rows,)), True
        else:
            whole = self._new_sum(chunk, len(due.sum))  # it may be lent, and is used twice
            if _drops(space, chunk.dtype):
                due.flaw = self._look(space, chunk, due, whole)
            else:
                due.sum.into(whole, 0, len(whole))
            due.sum, due.is_own = Sum((Strip([whole]),)), True
        span.due.append(due)
        if due.rank is None and len(span.due) > 1:
            return  # a round is measured against the weights that the round before it leaves
        yield from self._measure(space, chunk, span, due)

    def _sift(self, space: Namespace, chunk: Chunk, span: Span, due: Due) -> Iterator[Reading]:
        """Update keys that lie here as a whole, but for those whose gradient is not finite."""
        assert space.drops is not None
        if self._passes(space, chunk, due) is None:
            yield from self._update(space, chunk, span, due)
            return
        span.due.append(due)  # so that it is cut where the span is
        for part in chunk.cut_by_piece(span.start, span.stop):
            one = part.due.popleft()
            flaw = self._passes(space, chunk, one)
            if flaw is None:
                yield from self._update(space, chunk, part, one)
                continue
            ((key, _, _),) = chunk.pieces(part.start, part.stop)
            space.drops.add(key, space.shards[key].pieces, one.rank, one.number, flaw)
            yield from self._skip(chunk, part, one)

    def _passes(self, space: Namespace, chunk: Chunk, due: Due) -> Flaw | None:
        """Return what is not finite in a gradient. If all is, it is added up by that."""
        if due.sum.is_sparse:
            flaw, rows = self._look_at_rows(space, chunk, due)
            if flaw is None:
                due.sum, due.is_own = Sum((rows,)), True
            return flaw
        dtype = _summed_in(chunk)
        parts = due.sum.parts
        if len(parts) == 1 and parts[0].dtype == dtype:
            return self._look(space, chunk, due, parts[0].joined(), is_sum=True)
        if dtype not in self._sums or len(self._sums[dtype]) < len(due.sum):
            self._sums[dtype] = self._new_sum(chunk, len(due.sum))
        whole = self._sums[dtype][: len(due.sum)]
        flaw = self._look(space, chunk, due, whole)
        if flaw is None:
            due.sum, due.is_own = Sum((Strip([whole]),)), True
        return flaw

    def _look(
        self,
        space: Namespace,
        chunk: Chunk,
        due: Due,
        whole: torch.Tensor,
        *,
        is_sum: bool = False,
    ) -> Flaw | None:
        """Add a gradient up in ``whole``, unless it is the sum; return what is not finite in it."""
        kept_as = self._kept_as(space, chunk)
        count = 0
        for begin in range(0, len(whole), self._block_count):
            block = whole[begin : begin + self._block_count]
            if not is_sum:
                due.sum.into(block, begin, begin + len(block))
            count += count_nonfinite(block.to(kept_as))
        return self._flaw(due, count)

    def _look_at_rows(self, space: Namespace, chunk: Chunk, due: Due) -> tuple[Flaw | None, Sparse]:
        """Add a gradient up of which only rows are there; return what is not finite, and the sum."""
        rows = due.sum.gathered()
        return self._flaw(due, count_nonfinite(rows.joined().to(self._kept_as(space, chunk)))), rows

    def _kept_as(self, space: Namespace, chunk: Chunk) -> torch.dtype:
        """Return the type in which a sum has to be finite."""
        # Without an optimizer the sum is what the key becomes, and there it may overflow.
        is_half = BY_NAME[chunk.dtype].kind == "half"
        return TORCH[chunk.dtype] if is_half and space.updater is None else _summed_in(chunk)

    def _flaw(self, due: Due, count: int) -> Flaw | None:
        """Return the flaw of a gradient of which so many values are not finite."""
        if not count:
            return None
        culprits: set[int] = set()
        for ranks, part in zip(due.whose, due.sum.parts, strict=True):
            if count_nonfinite(part.joined()):
                culprits.update(ranks)
        return Flaw(count, tuple(sorted(culprits)))

    def _new_sum(self, chunk: Chunk, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=_summed_in(chunk))

    def _skip(self, chunk: Chunk, span: Span, due: Due) -> Iterator[Reading]:
        """Leave ``span`` as it is: a round is closed by that, a push just taken in."""
        if due.rank is None:
            span.version += 1
        yield from chunk.woken(span.start, span.stop)

    def _update(
        self,
        space: Namespace,
        chunk: Chunk,
        span: Span,
        due: Due,
        norms: torch.Tensor | None = None,
    ) -> Iterator[Reading]:
        """Move the weights of ``span`` by one round or one push; yield those who are woken."""
        if chunk.embedding is not None:
            space.grow(by_ids.update(chunk, span, due) * chunk.embedding.row_bytes)
        elif space.updater is None:
            self._assign(chunk, span, due)
        else:
            span.step += 1
            self._apply(space, space.updater, chunk, span, due, norms)
        span.version += 1
        yield from chunk.woken(span.start, span.stop)

    def _assign(self, chunk: Chunk, span: Span, due: Due) -> None:
        total = due.sum
        back = chunk.back_of(span, is_wanted=due.back is not None)
        if back is not None:
            rest = back.own_rest()[span.start : span.stop]
            block = self._scratch_for(torch.float32)
            for begin in range(0, len(rest), len(block)):
                part = block[: min(len(block), len(rest) - begin)]
                total.into(part, begin, begin + len(part))
                rest[begin : begin + len(part)].add_(part)
            self._publish(chunk, back, span, due, None)
            return
        if total.is_sparse:
            tables.assign(chunk, span, total.gathered())
            return
        target = chunk.overwritable(span.start, span.stop)[span.start : span.stop]
        for begin in range(0, len(target), self._block_count):
            block = target[begin : begin + self._block_count]
            if BY_NAME[chunk.dtype].kind == "half":
                wide = self._scratch_for(torch.float32)[: len(block)]
                total.into(wide, begin, begin + len(block))
                block.copy_(wide)
            else:
                total.into(block, begin, begin + len(block))

    def _scratch_for(self, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for one block of sums."""
        if dtype not in self._scratch:
            self._scratch[dtype] = torch.empty(self._block_count, dtype=dtype)
        return self._scratch[dtype]

    def _apply(
        self,
        space: Namespace,
        updater: Updater,
        chunk: Chunk,
        span: Span,
        due: Due,
        norms: torch.Tensor | None,
    ) -> None:
        back = chunk.back_of(span, is_wanted=due.back is not None)
        if due.sum.is_sparse and may_be_lazy(updater):
            if back is not None:  # a step is of all of a piece
                back.settle(chunk.writable(), span.start, span.stop)
            tables.update(space, chunk, span, due.sum.gathered(), due.rank)
            if back is not None:
                chunk.forget_changes(span)
            return
        _spread(due)
        weight, state = chunk.writable(), space.state_of(chunk)
        scratch = self._scratch_for(_summed_in(chunk))
        rest = None if back is None else back.own_rest()
        for first, last, lr, weight_decay in self._segments(space, chunk, span):
            for start in range(first, last, self._block_count):
                stop = min(start + self._block_count, last)
                if due.is_own:
                    whole = due.sum.parts[0].joined()
                    gradient = whole[start - span.start : stop - span.start]
                else:
                    gradient = scratch[: stop - start]
                    due.sum.into(gradient, start - span.start, stop - span.start)
                target = weight[start:stop]
                if rest is not None:
                    target = target + rest[start:stop]
                updater.apply(
                    target,
                    gradient,
                    {name: tensor[start:stop] for name, tensor in state.items()},
                    step=span.step,
                    lr=lr,
                    weight_decay=weight_decay,
                    norms=norms,
                    rank=due.rank,
                )
                if rest is not None:
                    torch.sub(target, weight[start:stop], out=rest[start:stop])
        if back is not None:
            self._publish(chunk, back, span, due, space.hyper)

    def _publish(self, chunk: Chunk, back: Back, span: Span, due: Due, hyper: Hyper | None) -> None:
        """Move the values of ``span`` by what can be written of their rests."""
        values, version = chunk.writable(), span.version + 1
        for key, start, stop in chunk.pieces(span.start, span.stop):
            lr = None if hyper is None else hyper.for_key(key)[0]
            code = code_of(due.back, version, lr)
            back.publish(values, start, stop, version, code, adds=hyper is not None)

    def _segments(
        self, space: Namespace, chunk: Chunk, span: Span
    ) -> Iterator[tuple[int, int, float, float]]:
        """Yield (start, stop, lr, weight decay) of the parts of ``span`` that have them equal."""
        hyper = space.hyper
        assert hyper is not None
        if not hyper.lr_mult and not hyper.wd_mult:
            yield span.start, span.stop, *hyper.for_key("")
            return
        pieces = chunk.pieces(span.start, span.stop)
        for (lr, weight_decay), group in groupby(pieces, lambda one: hyper.for_key(one[0])):
            alike = list(group)
            yield alike[0][1], alike[-1][2], lr, weight_decay

    # --- what must be known of whole tensors ------------------------------------------------------

    def _measure(self, space: Namespace, chunk: Chunk, span: Span, due: Due) -> Iterator[Reading]:
        """Add this piece's sums to those of its tensor."""
        ((key, _, _),) = chunk.pieces(span.start, span.stop)
        shard = space.shards[key]
        flaw = due.flaw
        norm = self._norm(space, (space.name, key, due.rank, due.number))
        counts = [0.0 if flaw is None else float(flaw.values)] if norm.counts else []
        sums = torch.tensor(counts, dtype=torch.float64)
        if flaw is None and space.updater is not None and space.updater.needs_norms:
            sums = torch.cat((sums, self._squares(space, space.updater, chunk, span, due)))
        culprits = () if flaw is None else flaw.ranks
        norm.measure(sums, len(shard.pieces), self._holders(shard), culprits)
        if norm.mine and norm.holders:
            self._untold.append(norm)
        yield from self._settle(space, norm)

    def _squares(
        self, space: Namespace, updater: Updater, chunk: Chunk, span: Span, due: Due
    ) -> torch.Tensor:
        """Return the sums of squares of a piece that the store's rule needs."""
        _spread(due)
        ((_, _, lr, weight_decay),) = self._segments(space, chunk, span)
        state = space.state_of(chunk)
        weight = chunk.buffer.tensor[span.start : span.stop]
        if chunk.back is not None and chunk.back.owes(span.start, span.stop):
            weight = weight + chunk.back.rest[span.start : span.stop]
        return updater.partial_norms(
            weight,
            due.sum.parts[0].joined(),
            {name: tensor[span.start : span.stop] for name, tensor in state.items()},
            step=span.step + 1,
            lr=lr,
            weight_decay=weight_decay,
        )

    def _norm(self, space: Namespace, number: NormId) -> Norm:
        """Return what is known for an update, from nothing on."""
        norm = self.norms.get(number)
        if norm is None:
            norm = Norm(number, _drops(space, space.shards[number[1]].spec.dtype))
            self.norms[number] = norm
        return norm

    def _holders(self, shard: Shard) -> frozenset[int]:
        """The other servers that hold pieces of a key: all if it is cut, none if it is not."""
        if shard.count == shard.spec.count:
            return frozenset()
        return frozenset(range(self.servers)) - {self.server}

    def untold(self) -> list[Norm]:
        """Return the norms whose local sums were completed since the last call."""
        untold, self._untold = self._untold, []
        return untold

    def hear(self, space: Namespace, number: NormId, server: int, told: Told) -> Iterator[Reading]:
        """Another server told its part of a tensor's sums; yield those who are woken.

        Raises:
            KeyNotFound, Mismatch, ProtocolError: if that cannot be; nothing is changed.
        """
        ahead = number[3] - self._applied(space, number)
        if number in self._told or not 0 <= ahead < WINDOW or not told.sums:
            return  # the update is made; or so far off that it will have to be told again
        norm = self._norm(space, number)
        norm.hear(server, *told)
        yield from self._settle(space, norm)

    def told(self, space: Namespace, number: NormId, width: int) -> Told:
        """Return this server's sums for an update; none while they are unknown.

        For an update that was made without, or so long ago that its sums are forgotten, they are
        ``width`` zeros: whoever still waits must not wait for ever.
        """
        if number in self._told:
            return self._told[number]
        if number in self.norms:
            return self.norms[number].told
        return Told((0.0,) * width if number[3] < self._applied(space, number) else ())

    def _applied(self, space: Namespace, number: NormId) -> int:
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

    def _settle(self, space: Namespace, norm: Norm) -> Iterator[Reading]:
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
        self, space: Namespace, chunk: Chunk, span: Span, due: Due, sums: torch.Tensor
    ) -> torch.Tensor:
        """Return ``sums``; or if the rule has come later than they were measured, the piece's own."""
        updater = space.updater
        if updater is None or not updater.needs_norms or len(sums):
            return sums
        return self._squares(space, updater, chunk, span, due)

    def _drop_norms(self, store: str, keys: Collection[str] | None = None) -> None:
        """Forget the norms of one store, or of some keys of it."""
        for norms in (self.norms, self._told):
            ours = [one for one in norms if one[0] == store]
            for one in [one for one in ours if keys is None or one[1] in keys]:
                del norms[one]

    # --- members ----------------------------------------------------------------------------

    def replaced(self, space: Namespace, rank: int, quorum: Quorum) -> None:
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


def _drops(space: Namespace, dtype: str) -> bool:
    """Whether updates of such elements are dropped that are not finite."""
    return space.drops is not None and BY_NAME[dtype].kind != "int"


def _spread(due: Due) -> None:
    """Make of a sum that is all rows one of all elements, for a rule that wants these."""
    if due.sum.is_sparse:
        due.sum, due.is_own = Sum((Strip([due.sum.whole()]),)), True


def _summed_in(chunk: Chunk) -> torch.dtype:
    return TORCH[summed_in(chunk.dtype)]
