"""What a server does with values: sum pushes, close rounds, update weights, answer pulls.

The engine is asked with elements of a chunk, never with keys: the worker's plan has turned keys
into runs. A push of a whole chunk is one addition; a closed round of it one fused update.

In a synchronous store the pushes of one number form a round, and the weights move when the round
closes. In an asynchronous one each push moves them. A reading (a pull, or a push that asks for the
values) whose condition does not hold yet waits at the first span that holds it up and is looked
at again when that span moves.

A rule that needs norms of whole tensors (LARS, LAMB) makes a detour: a summed gradient becomes
*due*, each server measures its part of the tensor, and the update happens when the sums of squares
of all parts are known (:mod:`kvps.core.norms`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvps.core.namespace import Namespace, Shard
from kvps.core.norms import Norm, NormId
from kvps.core.quorum import Quorum
from kvps.core.rounds import Due, Span, Verdict
from kvps.core.slab import Buffer, Chunk, NewChunk
from kvps.core.updaters import Updater
from kvps.errors import ConfigError, Mismatch, ProtocolError
from kvps.messages import Ask, Push, Stand
from kvps.specs import BY_ID, BY_NAME


@dataclass(slots=True, eq=False)
class Reading:
    """A request for values, by one rank, that is answered when its conditions hold."""

    rank: int
    seq: int
    store: str
    chunk: int
    values: bool
    asks: tuple[Ask, ...]
    done: bool = False


class Engine:
    """The chunks of one server and everything that happens to their values."""

    def __init__(self, server: int, servers: int) -> None:
        self.server = server
        self.servers = servers
        self.new_chunk = NewChunk()
        self.norms: dict[NormId, Norm] = {}
        self._untold: list[Norm] = []

    def chunk(self, number: int) -> Chunk:
        """Return a chunk by its number.

        Raises:
            ProtocolError: if there is none.
        """
        chunk = self.new_chunk.chunks.get(number)
        if chunk is None:
            raise ProtocolError(f"server {self.server} has no chunk {number}")
        return chunk

    # --- pushes -----------------------------------------------------------------------------

    def push(
        self, space: Namespace, message: Push, gradient: torch.Tensor, quorum: Quorum, now: float
    ) -> tuple[Verdict, list[Span]]:
        """Take a push in; return what became of it and the spans whose values moved.

        A push that is EARLY anywhere is not taken in at all.

        Raises:
            ProtocolError, Mismatch, ConfigError: if it can never be; nothing is changed.
        """
        chunk = self.chunk(message.chunk)
        self._admit(space, chunk, message)
        work: list[tuple[Span, int, torch.Tensor]] = []
        taken = 0
        verdicts: set[Verdict] = set()
        for run in message.runs:
            part = gradient[taken : taken + run.size]
            taken += run.size
            for span in self._cut(space, chunk, run.start, run.start + run.size):
                verdict = span.judge(message.ranks, run.number, space.ordered)
                verdicts.add(verdict)
                if verdict is Verdict.COUNTED:
                    begin = span.start - run.start
                    work.append((span, run.number, part[begin : begin + span.stop - span.start]))
        if Verdict.CONFLICT in verdicts:
            raise ProtocolError(
                f"a push for ranks {list(message.ranks)}: some were counted, some were not"
            )
        if Verdict.EARLY in verdicts:
            return Verdict.EARLY, []
        moved = []
        for span, number, part in work:
            span.take(message.ranks, number)
            if space.ordered:
                keep = space.opened.deterministic
                span.round(number, now).add(message.ranks, message.weight, part, keep)
                moved.extend(self.close(space, chunk, span, quorum))
            else:
                moved.extend(self._due(space, chunk, span, Due(number, message.ranks[0], part)))
        return (Verdict.COUNTED if work else Verdict.DUPLICATE), moved

    def close(self, space: Namespace, chunk: Chunk, span: Span, quorum: Quorum) -> list[Span]:
        """Close the rounds of ``span`` that are complete; return the spans that moved."""
        moved: list[Span] = []
        required = quorum.required(space.opened.on_worker_lost)
        while required and span.closable(required):
            closed = span.rounds.popleft()
            moved.extend(self._due(space, chunk, span, Due(closed.number, None, closed.sum())))
        return moved

    def _admit(self, space: Namespace, chunk: Chunk, message: Push) -> None:
        if BY_ID[message.dtype].name != chunk.dtype:
            raise Mismatch(
                f"chunk {chunk.number} holds {chunk.dtype}, pushed was {BY_ID[message.dtype].name}"
            )
        if not message.ranks:
            raise ProtocolError("a push speaks for no rank")
        if space.updater is None:
            if not space.ordered:
                raise ConfigError(
                    f"store {space.name!r} is {space.opened.mode} and has no optimizer: each push "
                    "is applied by one; call set_optimizer(...) before the first push"
                )
        elif BY_NAME[chunk.dtype].kind == "int" and not space.updater.takes_integers:
            raise ConfigError(
                f"optimizer {space.updater.hyper.name!r} cannot update {chunk.dtype} weights; "
                "keep them in a store without an optimizer"
            )

    def _cut(self, space: Namespace, chunk: Chunk, start: int, stop: int) -> Iterator[Span]:
        """Yield the spans that tile a run; one for each piece where norms are needed."""
        if space.updater is None or not space.updater.needs_norms:
            yield from chunk.cut(start, stop)
            return
        chunk.covering(start, stop)
        for _, begin, end in list(chunk.pieces(start, stop)):
            yield from chunk.cut(begin, end)

    # --- updates ----------------------------------------------------------------------------

    def _due(self, space: Namespace, chunk: Chunk, span: Span, due: Due) -> list[Span]:
        updater = space.updater
        if updater is None or not updater.needs_norms:
            self._update(space, chunk, span, due)
            return [span]
        span.due.append(due)
        if due.rank is None and len(span.due) > 1:
            return []  # a round is measured against the weights that the round before it leaves
        return self._measure(space, chunk, span, due, updater)

    def _update(
        self,
        space: Namespace,
        chunk: Chunk,
        span: Span,
        due: Due,
        norms: torch.Tensor | None = None,
    ) -> None:
        """Move the weights of ``span`` by one round or one push."""
        weight = chunk.writable()
        span.version += 1
        updater, hyper = space.updater, space.hyper
        if updater is None or hyper is None:
            weight[span.start : span.stop].copy_(due.gradient)
            return
        span.step += 1
        if chunk.state is None:
            chunk.state = updater.new_state(weight)
        for start, stop, lr, weight_decay in self._segments(space, chunk, span):
            updater.apply(
                weight[start:stop],
                due.gradient[start - span.start : stop - span.start],
                {name: tensor[start:stop] for name, tensor in chunk.state.items()},
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
        for key, start, stop in chunk.pieces(span.start, span.stop):
            yield start, stop, *hyper.for_key(key)

    # --- norms of whole tensors ---------------------------------------------------------------

    def _measure(
        self, space: Namespace, chunk: Chunk, span: Span, due: Due, updater: Updater
    ) -> list[Span]:
        """Add this piece's sums of squares to those of its tensor."""
        key = next(chunk.pieces(span.start, span.stop))[0]
        shard = space.shards[key]
        norm = self._norm((space.name, key, due.rank, due.number))
        norm.expect(len(shard.pieces), self._holders(space, shard))
        if chunk.state is None:
            chunk.state = updater.new_state(chunk.buffer.tensor)
        ((start, stop, lr, weight_decay),) = self._segments(space, chunk, span)
        norm.measure(
            updater.partial_norms(
                chunk.buffer.tensor[start:stop],
                due.gradient,
                {name: tensor[start:stop] for name, tensor in chunk.state.items()},
                step=span.step + 1,
                lr=lr,
                weight_decay=weight_decay,
            )
        )
        if norm.mine:
            self._untold.append(norm)
        return self.settle(space, norm)

    def untold(self) -> list[Norm]:
        """Return the norms whose local sums were completed since the last call."""
        untold, self._untold = self._untold, []
        return untold

    def settle(self, space: Namespace, norm: Norm) -> list[Span]:
        """Update a tensor's pieces here if all its norms are known; return spans that moved."""
        moved: list[Span] = []
        if not norm.complete or norm.settled:
            return moved
        norm.settled = True
        sums = norm.total(self.server)
        updater = space.updater
        assert updater is not None
        _, key, rank, number = norm.id
        for piece in space.shards[key].pieces:
            chunk = self.chunk(piece.chunk)
            (span,) = chunk.cut(piece.start, piece.start + piece.size)
            due = next(one for one in span.due if (one.rank, one.number) == (rank, number))
            span.due.remove(due)
            self._update(space, chunk, span, due, sums)
            moved.append(span)
            if rank is None and span.due:
                moved.extend(self._measure(space, chunk, span, span.due[0], updater))
        return moved

    def _norm(self, number: NormId) -> Norm:
        if number not in self.norms:
            self.norms[number] = Norm(number)
            while len(self.norms) > Norm.KEPT_MAX:
                oldest = next(iter(self.norms))
                if not self.norms[oldest].settled:
                    break
                del self.norms[oldest]
        return self.norms[number]

    def heard(self, number: NormId, server: int, sums: tuple[float, ...]) -> Norm:
        """Another server told its part of a tensor's sums."""
        norm = self._norm(number)
        if sums:
            norm.hear(server, sums)
        return norm

    def _holders(self, space: Namespace, shard: Shard) -> frozenset[int]:
        if shard.count == shard.spec.count:
            return frozenset()
        return frozenset(range(self.servers)) - {self.server}

    # --- pulls ------------------------------------------------------------------------------

    def holdup(self, space: Namespace, reading: Reading, quorum: Quorum) -> Span | None:
        """Return the first span that keeps ``reading`` waiting, or None if it can be answered."""
        chunk = self.chunk(reading.chunk)
        for ask in reading.asks:
            for span in chunk.covering(ask.start, ask.start + ask.size):
                if not self._holds(space, span, ask, reading.rank, quorum):
                    return span
        return None

    def _holds(self, space: Namespace, span: Span, ask: Ask, rank: int, quorum: Quorum) -> bool:
        if span.version < ask.least:
            return False
        if space.ordered:
            return span.version >= ask.after
        if span.applied(rank) < ask.after:
            return False
        return space.opened.mode != "ssp" or (
            span.ahead(rank, quorum.held) <= space.opened.staleness
        )

    def why(self, space: Namespace, reading: Reading, quorum: Quorum) -> str:
        """Say what ``reading`` waits for, for the one who waits."""
        span = self.holdup(space, reading, quorum)
        if span is None:
            return "ready"
        key = next(self.chunk(reading.chunk).pieces(span.start, span.stop))[0]
        if space.ordered:
            missing = span.missing(quorum.required(space.opened.on_worker_lost)) or tuple(
                quorum.required(space.opened.on_worker_lost)
            )
            ranks = ", ".join(map(str, missing))
            return f"key {key!r}: round {span.version} waits for a push of rank {ranks}"
        if span.ahead(reading.rank, quorum.held) > space.opened.staleness:
            clocks = {rank: count for rank, count in span.pushed.items() if rank in quorum.held}
            slowest = min(clocks, key=lambda rank: clocks[rank])
            return (
                f"key {key!r}: rank {reading.rank} is "
                f"{span.ahead(reading.rank, quorum.held)} pushes ahead of rank {slowest}, "
                f"staleness allows {space.opened.staleness}"
            )
        return f"key {key!r} stands at version {span.version}"

    def read(
        self, space: Namespace, reading: Reading
    ) -> tuple[tuple[Stand, ...], torch.Tensor | None, Buffer | None]:
        """Return where the asked elements stand, their values, and the buffer to be held.

        The buffer is None where the values are a copy.
        """
        chunk = self.chunk(reading.chunk)
        stands: list[Stand] = []
        for ask in reading.asks:
            stop = ask.start + ask.size
            for span in chunk.covering(ask.start, stop):
                begin = max(span.start, ask.start)
                stands.append(
                    Stand(
                        begin,
                        min(span.stop, stop) - begin,
                        span.version,
                        span.owed(reading.rank, space.ordered),
                    )
                )
        if not reading.values:
            return tuple(stands), None, None
        weight = chunk.buffer.tensor
        if space.updater is not None and space.updater.tracks_pulls and chunk.state is not None:
            for ask in reading.asks:
                space.updater.pulled(
                    weight, chunk.state, ask.start, ask.start + ask.size, reading.rank
                )
        if len(reading.asks) == 1:
            (ask,) = reading.asks
            return tuple(stands), weight[ask.start : ask.start + ask.size], chunk.buffer.hold()
        parts = [weight[ask.start : ask.start + ask.size] for ask in reading.asks]
        return tuple(stands), torch.cat(parts), None

    def check(self) -> None:
        """Assert the invariants of every chunk."""
        for chunk in self.new_chunk.chunks.values():
            chunk.check()
