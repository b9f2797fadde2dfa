"""What a server does with gradients: sum them, close rounds, update weights.

The engine is asked with elements of a chunk, never with keys: the worker's plan has turned keys
into runs. A push of a whole chunk is one addition; a closed round of it one fused update.

In a synchronous store the pushes of one number form a round, and the weights move when the round
closes. In an asynchronous one each push moves them. What moves weights is written as a generator:
after each version it yields the readings that waited there, to be looked at again before the next
version comes. So who waits for a version gets exactly this one.

A rule that needs norms of whole tensors (LARS, LAMB) makes a detour: a summed gradient becomes
*due*, each server measures its part of the tensor, and the update happens when the sums of squares
of all parts are known (:mod:`kvps.core.norms`). Spans are then never wider than a piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch

from kvps.core.hyper import Hyper
from kvps.core.namespace import Namespace, Shard
from kvps.core.norms import Norm, NormId
from kvps.core.quorum import Quorum
from kvps.core.rounds import WINDOW, Due, Span, Verdict
from kvps.core.sessions import Reading
from kvps.core.slab import Chunk, Chunks
from kvps.core.strip import Strip, Sum
from kvps.core.updaters import Updater
from kvps.errors import ConfigError, KeyNotFound, Mismatch, ProtocolError
from kvps.messages import Push
from kvps.specs import BY_ID, BY_NAME, summed_in
from kvps.tensors import PRIVATE, TORCH, Memory

BLOCK_COUNT = 256 << 10
"""Elements that one thread adds up and updates at once: between, they stay in its core's cache."""

Work = list[tuple[Span, int, Strip]]
"""What is left of a push once it is judged: spans, the push's number for them, its gradient."""


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
        self.chunks = Chunks(memory, server, servers)
        self.norms: dict[NormId, Norm] = {}
        """Of the updates that are not made yet."""
        self._told: dict[NormId, tuple[float, ...]] = {}
        """This server's sums for updates that are made, for one who has missed them: the last
        WINDOW of each (store, key, rank)."""
        self._untold: list[Norm] = []
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
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
        self._admit(space, chunk, message)
        work: Work = []
        taken = 0
        verdicts: set[Verdict] = set()
        for run in message.runs:
            for span in self._cut(space, chunk, run.start, run.start + run.size):
                verdict = span.judge(message.ranks, run.number, space.ordered)
                verdicts.add(verdict)
                if verdict is Verdict.COUNTED:
                    begin = taken + span.start - run.start
                    part = gradient.part(begin, begin + span.stop - span.start)
                    work.append((span, run.number, part))
            taken += run.size
        if Verdict.CONFLICT in verdicts:
            raise ProtocolError(
                f"a push for ranks {list(message.ranks)}: some were counted, some were not"
            )
        if Verdict.EARLY in verdicts:
            return Verdict.EARLY, iter(())
        if not work:
            return Verdict.DUPLICATE, iter(())
        if space.updater is not None:
            space.state_of(chunk)  # if it cannot be made, nothing was taken in
        return Verdict.COUNTED, self._take(space, chunk, message.ranks, work, quorum, now, lent)

    def _admit(self, space: Namespace, chunk: Chunk, message: Push) -> None:
        if BY_ID[message.dtype].name not in (chunk.dtype, summed_in(chunk.dtype)):
            raise Mismatch(
                f"chunk {chunk.number} holds {chunk.dtype}, pushed was {BY_ID[message.dtype].name}"
            )
        if not message.ranks or max(message.ranks) >= self.workers:
            raise ProtocolError(
                f"a push speaks for ranks {list(message.ranks)!s:.60}; there are {self.workers}"
            )
        chunk.validate(message.runs)
        chunk.check_filled(message.runs)
        if space.updater is None and not space.ordered:
            raise ConfigError(
                f"store {space.name!r} is {space.opened.mode} and has no optimizer: each push "
                "is applied by one; call set_optimizer(...) before the first push"
            )

    def _cut(self, space: Namespace, chunk: Chunk, start: int, stop: int) -> list[Span]:
        """Return the spans that tile a run; one for each piece where norms are needed."""
        if space.updater is not None and space.updater.needs_norms:
            return chunk.cut_by_piece(start, stop)
        return chunk.cut(start, stop)

    def _take(
        self,
        space: Namespace,
        chunk: Chunk,
        ranks: tuple[int, ...],
        work: Work,
        quorum: Quorum,
        now: float,
        lent: bool,
    ) -> Iterator[Reading]:
        """Take in what was judged COUNTED."""
        for span, number, _ in work:
            span.take(ranks, number)
        for span, number, part in work:
            if space.ordered:
                keep = space.opened.deterministic
                span.round(number, now).add(ranks, part, lent=lent, keep=keep)
                yield from self.close(space, chunk, span, quorum)
            else:
                yield from self._due(space, chunk, span, Due(number, ranks, Sum((part,))))

    def close(
        self, space: Namespace, chunk: Chunk, span: Span, quorum: Quorum
    ) -> Iterator[Reading]:
        """Close the rounds of ``span`` that are complete; yield those who are woken."""
        required = quorum.required(space.opened.on_worker_lost)
        while required and span.closable(required):
            closed = span.rounds.popleft()
            total = closed.sum()
            yield from self._due(space, chunk, span, Due(closed.number, (), total))

    def close_all(self, space: Namespace, chunk: Chunk, span: Span) -> Iterator[Reading]:
        """Close every open round of ``span`` with what is in it; yield those who are woken."""
        while span.rounds:
            closed = span.rounds.popleft()
            yield from self._due(space, chunk, span, Due(closed.number, (), closed.sum()))

    # --- updates ----------------------------------------------------------------------------

    def optimize(self, space: Namespace, hyper: Hyper) -> Iterator[Reading]:
        """Install an optimizer; yield those who are woken.

        What waits for norms of the old rule is applied without, if the new one needs none.

        Raises:
            ConfigError: if it cannot update what is there; nothing is changed.
        """
        space.optimize(hyper)
        assert space.updater is not None
        for chunk in self.chunks.of_store(space.name):
            for span in list(chunk.spans):
                if space.updater.needs_norms:
                    chunk.cut_by_piece(span.start, span.stop)
                while span.due and not space.updater.needs_norms:
                    yield from self._update(space, chunk, span, span.due.popleft())
        if not space.updater.needs_norms:
            self._drop_norms(space.name)

    def replace(self, space: Namespace, shard: Shard) -> list[Reading]:
        """Give back the place of a key that has another one now; return who waited there."""
        self._drop_norms(space.name, shard.key)
        return self.chunks.retire(shard.pieces)

    def _due(self, space: Namespace, chunk: Chunk, span: Span, due: Due) -> Iterator[Reading]:
        updater = space.updater
        if updater is None or not updater.needs_norms:
            yield from self._update(space, chunk, span, due)
            return
        due.sum = Sum((Strip([due.sum.whole()]),))  # it may be lent, and is used twice
        span.due.append(due)
        if due.rank is None and len(span.due) > 1:
            return  # a round is measured against the weights that the round before it leaves
        yield from self._measure(space, chunk, span, due, updater)

    def _update(
        self,
        space: Namespace,
        chunk: Chunk,
        span: Span,
        due: Due,
        norms: torch.Tensor | None = None,
    ) -> Iterator[Reading]:
        """Move the weights of ``span`` by one round or one push; yield those who are woken."""
        if space.updater is None:
            self._assign(chunk, span, due.sum)
        else:
            span.step += 1
            self._apply(space, space.updater, chunk, span, due, norms)
        span.version += 1
        yield from chunk.woken(span.start, span.stop)

    def _assign(self, chunk: Chunk, span: Span, total: Sum) -> None:
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
        weight, state = chunk.writable(), space.state_of(chunk)
        is_half = BY_NAME[chunk.dtype].kind == "half"
        scratch = self._scratch_for(torch.float32 if is_half else TORCH[chunk.dtype])
        for first, last, lr, weight_decay in self._segments(space, chunk, span):
            for start in range(first, last, self._block_count):
                stop = min(start + self._block_count, last)
                gradient = scratch[: stop - start]
                due.sum.into(gradient, start - span.start, stop - span.start)
                updater.apply(
                    weight[start:stop],
                    gradient,
                    {name: tensor[start:stop] for name, tensor in state.items()},
                    step=span.step,
                    lr=lr,
                    weight_decay=weight_decay,
                    norms=norms,
                    rank=due.rank,
                )

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

    # --- norms of whole tensors ---------------------------------------------------------------

    def _measure(
        self, space: Namespace, chunk: Chunk, span: Span, due: Due, updater: Updater
    ) -> Iterator[Reading]:
        """Add this piece's sums of squares to those of its tensor."""
        ((key, start, stop),) = chunk.pieces(span.start, span.stop)
        shard = space.shards[key]
        ((_, _, lr, weight_decay),) = self._segments(space, chunk, span)
        state = space.state_of(chunk)
        sums = updater.partial_norms(
            chunk.buffer.tensor[start:stop],
            due.sum.parts[0].joined(),
            {name: tensor[start:stop] for name, tensor in state.items()},
            step=span.step + 1,
            lr=lr,
            weight_decay=weight_decay,
        )
        number = (space.name, key, due.rank, due.number)
        norm = self.norms.setdefault(number, Norm(number))
        norm.measure(sums, len(shard.pieces), self._holders(shard))
        if norm.mine and norm.holders:
            self._untold.append(norm)
        yield from self._settle(space, norm)

    def _holders(self, shard: Shard) -> frozenset[int]:
        """The other servers that hold pieces of a key: all if it is cut, none if it is not."""
        if shard.count == shard.spec.count:
            return frozenset()
        return frozenset(range(self.servers)) - {self.server}

    def untold(self) -> list[Norm]:
        """Return the norms whose local sums were completed since the last call."""
        untold, self._untold = self._untold, []
        return untold

    def hear(
        self, space: Namespace, number: NormId, server: int, sums: tuple[float, ...]
    ) -> Iterator[Reading]:
        """Another server told its part of a tensor's sums; yield those who are woken.

        Raises:
            KeyNotFound, Mismatch, ProtocolError: if that cannot be; nothing is changed.
        """
        ahead = number[3] - self._applied(space, number)
        if number in self._told or not 0 <= ahead < WINDOW or not sums:
            return  # the update is made; or so far off that it will have to be told again
        norm = self.norms.setdefault(number, Norm(number))
        norm.hear(server, sums)
        yield from self._settle(space, norm)

    def sums(self, space: Namespace, number: NormId, width: int) -> tuple[float, ...]:
        """Return this server's sums for an update; empty while they are unknown.

        For an update that was made without, or so long ago that its sums are forgotten, they are
        ``width`` zeros: whoever still waits must not wait for ever.
        """
        if number in self._told:
            return self._told[number]
        if number in self.norms:
            return self.norms[number].mine
        return (0.0,) * width if number[3] < self._applied(space, number) else ()

    def _applied(self, space: Namespace, number: NormId) -> int:
        """The lowest update (of this rank) of a tensor that is not made yet."""
        _, key, rank, _ = number
        shard = space.shards.get(key)
        if shard is None or not shard.pieces:
            raise KeyNotFound(f"server {self.server} holds no part of {key!r}")
        if space.ordered is not (rank is None):
            raise ProtocolError(f"store {space.name!r} is {space.opened.mode}, update {number}")
        piece = shard.pieces[0]
        span = next(self.chunk(piece.chunk).spans_in(piece.start, piece.start + 1))
        return span.version if rank is None else span.applied(rank)

    def _settle(self, space: Namespace, norm: Norm) -> Iterator[Reading]:
        """Update a tensor's pieces here if all its norms are known; yield those who are woken."""
        if not norm.complete:
            return
        updater = space.updater
        assert updater is not None
        store, key, rank, number = norm.id
        del self.norms[norm.id]
        if norm.holders:
            self._told[norm.id] = norm.mine
            self._told.pop((store, key, rank, number - WINDOW), None)
        sums = norm.total(self.server)
        for piece in space.shards[key].pieces:
            chunk = self.chunk(piece.chunk)
            (span,) = chunk.cut(piece.start, piece.start + piece.size)
            due = next(one for one in span.due if (one.rank, one.number) == (rank, number))
            span.due.remove(due)
            yield from self._update(space, chunk, span, due, sums)
            if rank is None and span.due:
                yield from self._measure(space, chunk, span, span.due[0], updater)

    def _drop_norms(self, store: str, key: str | None = None) -> None:
        """Forget the norms of one store, or of one key of it."""
        for norms in (self.norms, self._told):
            for one in [one for one in norms if one[0] == store and key in (None, one[1])]:
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
