"""The aggregator: judges pushes, takes them in, closes rounds, and has their sums applied.

A push names elements of a chunk, never keys: the worker's plan has turned keys into runs. A push of a
whole chunk is one addition; a closed round of it one fused update.

A push is first *judged*, which changes nothing (:meth:`Aggregator.judge`), and then applied by an
explicit call (:meth:`Aggregator.apply`). In a synchronous store the pushes of one number form a round,
and the weights move when the round closes. In an asynchronous one each push moves them. After each
version, before the next one, the reads that waited there are handed to :data:`Wake`. So a read that
waits for a version gets exactly this one.

Some updates make a detour over norms of their whole tensor (:mod:`kvps.core.server.rules.whole_tensor`):
those of a rule that needs norms (LARS, LAMB), and, where a store drops what is not finite
(:mod:`kvps.core.server.figures.nonfinite_log`), those of every key that is more than one piece.
Such an update must not begin anywhere before all of it is known to be finite. Their spans are
never wider than a piece.

A push of rows (:mod:`kvps.core.server.rules.rows`) is judged span by span like any other, each of one
piece of its key. Where a sum has nothing but rows and the rule can do without the others, only these rows
are updated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kvps.compression.spec import CodecSpec
from kvps.core.counts import Counts
from kvps.core.gradients import DenseGradient, GradientSum, Part
from kvps.core.membership_client import Quorum
from kvps.core.optim.hyperparams import HyperParams
from kvps.core.row_gradients import RowGradient
from kvps.core.server.chunks.rounds import PendingUpdate, Span, Verdict
from kvps.core.server.chunks.slab import Chunk, Chunks
from kvps.core.server.meter import Tally
from kvps.core.server.rules.clipped import StepNorms
from kvps.core.server.rules.optimize import Updates, Wake
from kvps.core.server.rules.rows import KeyRows
from kvps.core.server.rules.table import TableRows
from kvps.core.server.rules.whole_tensor import GlobalNorms, NormId, PartialSums
from kvps.core.server.sessions import PendingRead
from kvps.core.server.store import ServerStore, Shard
from kvps.dtypes import BY_ID, BY_NAME
from kvps.errors import ConfigError, Mismatch, ProtocolError
from kvps.protocol.stores import StepNorm
from kvps.protocol.values import Push, PushIds, PushRows, StepPart
from kvps.tensors import TORCH

BLOCK_COUNT = 256 << 10
"""Elements that one thread sums and updates at once, so that they stay in its core's cache."""


@dataclass(frozen=True, slots=True)
class PushedRange:
    """Neighbouring elements of a chunk, and what one push has for them."""

    chunk: Chunk
    start: int
    stop: int
    number: int
    """Number of the push, for these elements."""
    gradient: Part
    since: int | None = None
    """Where late pushes count, the number after the sender's push before this one."""

    def part(self, span: Span) -> PushedRange:
        """Return the part of this range that lies in ``span``."""
        start, stop = max(span.start, self.start), min(span.stop, self.stop)
        if (start, stop) == (self.start, self.stop):
            return self
        gradient = self.gradient.part(start - self.start, stop - self.start)
        return replace(self, start=start, stop=stop, gradient=gradient)


@dataclass(frozen=True, slots=True)
class JudgedPush:
    """The decision about a push that is not refused; valid until another push is applied."""

    store: ServerStore
    verdict: Verdict
    """COUNTED, DUPLICATE or EARLY."""
    ranks: tuple[int, ...]
    """The ranks that the push speaks for."""
    back: CodecSpec | None
    """The codec in which they want the update; None for none."""
    is_lent: bool
    """The gradient is its sender's memory, and must not be written to."""
    ranges: tuple[PushedRange, ...]
    """The elements that were not counted before; empty unless the verdict is COUNTED."""
    weight: float
    """The weight of the push in a mean."""
    step: StepPart | None = None
    """The step that the push is part of, where gradients are clipped by their global norm."""


class Aggregator:
    """All that happens to the values of one server."""

    def __init__(
        self,
        chunks: Chunks,
        workers: int,
        wake: Wake,
        threads: int = 1,
        tally: Tally | None = None,
    ) -> None:
        self.chunks = chunks
        self._tally = tally or Tally(Counts())
        self.workers = workers
        self.is_torn = False
        """An update failed half-way: some values are of no version."""
        self._apart: dict[int, tuple[int, list[tuple[int, int]]]] = {}
        """Chunk -> (keys looked at so far, [(start, stop)] of pieces that hold only part of a key)."""
        self._closing: dict[int, float] = {}
        """Chunk -> when the first of its rounds closes whose quorum is in."""
        self._updates = Updates(BLOCK_COUNT * threads, wake, self._tally.counts)
        self.norms = GlobalNorms(chunks, self._updates, workers)
        self.steps = StepNorms(chunks, self._updates)

    def drop(self, store: str, chunks: Collection[int]) -> None:
        """Forget a store that has ended, and its chunks."""
        self.norms.forget(store)
        self.steps.forget(store)
        for number in chunks:
            self._apart.pop(number, None)
            self._closing.pop(number, None)

    # --- judging ----------------------------------------------------------------------------

    def judge(
        self, store: ServerStore, message: Push, gradient: DenseGradient, *, is_lent: bool = False
    ) -> JudgedPush:
        """Decide about a push; nothing is changed.

        Args:
            store: whose push it is.
            message: the push.
            gradient: as many elements as the runs of ``message`` have, side by side.
            is_lent: ``gradient`` is its sender's memory, and must not be written to.

        Raises:
            ProtocolError, Mismatch, ConfigError, KeyNotFound: if it is refused.
        """
        chunk = self.chunks.at(message.chunk)
        if message.weight <= 0:
            raise ProtocolError(f"a push of weight {message.weight}; use a number above 0")
        if store.counts_late and len(message.since) != len(message.runs):
            raise ProtocolError(
                f"a push of {len(message.runs)} runs with {len(message.since)} numbers before them; store "
                f"{store.name!r} counts late pushes and needs one for each"
            )
        if chunk.embedding is not None:
            raise ProtocolError(f"chunk {chunk.number} is an embedding table: push rows by PUSH-IDS")
        dtype = BY_ID[message.dtype].name
        if TORCH[dtype] not in (TORCH[chunk.dtype], chunk.summed_in):
            raise Mismatch(f"chunk {chunk.number} holds {chunk.dtype}, and the push has type {dtype}")
        self._admit(store, chunk.dtype, message.ranks)
        chunk.validate(message.runs)
        chunk.check_filled(message.runs)
        ranges: list[PushedRange] = []
        begin = 0
        for index, run in enumerate(message.runs):
            part, stop = gradient.part(begin, begin + run.size), run.start + run.size
            since = message.since[index] if store.counts_late else None
            ranges.append(PushedRange(chunk, run.start, stop, run.number, part, since))
            begin += run.size
        judged = self._judge(store, message.ranks, ranges, message.back, is_lent, message.weight)
        if store.updater is not None and store.updater.max_norm is not None:
            return self._of_step(store, message.step, judged)
        return judged

    def _of_step(self, store: ServerStore, step: StepPart | None, judged: JudgedPush) -> JudgedPush:
        """Return a push as part of its step.

        Raises:
            ConfigError, Mismatch, ProtocolError: if another rank pushed the same round in another
                step, or in none.
        """
        if step is not None:
            self.steps.check(store.name, step)
        for item in judged.ranges:
            for span in item.chunk.spans_in(item.start, item.stop):
                at = item.number - span.version - len(span.due)
                is_open = at < len(span.rounds)
                if not is_open and step is None:
                    raise ConfigError(
                        f"store {store.name!r} clips gradients by their global norm, but rank "
                        f"{judged.ranks[0]} does not say which keys are a step; call set_optimizer() on "
                        "every rank before the first push"
                    )
                if is_open and span.rounds[at].step != step:
                    key, _, _ = next(item.chunk.pieces(span.start, span.stop))
                    raise Mismatch(
                        f"rank {judged.ranks[0]} pushed key {key!r} with other keys than ranks "
                        f"{sorted(span.rounds[at].ranks)} did; where the optimizer clips gradients by their "
                        "global norm, every rank must push the same keys of a step, in one call"
                    )
        return replace(judged, step=step)

    def judge_rows(
        self,
        store: ServerStore,
        target: KeyRows | TableRows,
        message: PushRows | PushIds,
        gradient: RowGradient,
        *,
        is_lent: bool = False,
    ) -> JudgedPush:
        """Decide about a push of rows of ``target``; see :meth:`judge`."""
        if store.counts_late:
            raise ConfigError(
                f"store {store.name!r} counts late pushes, which pushes of rows cannot be; use late='drop'"
            )
        if isinstance(target, TableRows):  # it has an optimizer of its own
            self._demand_ranks(message.ranks)
        else:
            self._admit(store, target.dtype, message.ranks)
            if store.updater is not None and store.updater.max_norm is not None:
                raise ConfigError(
                    f"store {store.name!r} clips gradients by their global norm, which rows have no part in; "
                    "push dense gradients, or set the optimizer without clip_global_norm"
                )
        ranges: list[PushedRange] = []
        for piece, part in target.cut(gradient):
            chunk, stop = self.chunks.at(piece.chunk), piece.start + piece.size
            ranges.append(PushedRange(chunk, piece.start, stop, message.number, part))
        return self._judge(store, message.ranks, ranges, None, is_lent, len(message.ranks))

    def _judge(
        self,
        store: ServerStore,
        ranks: tuple[int, ...],
        pushed: list[PushedRange],
        back: CodecSpec | None,
        is_lent: bool,
        weight: float,
    ) -> JudgedPush:
        verdicts: list[Verdict] = []
        counted: list[PushedRange] = []
        for item in pushed:
            spans = list(item.chunk.spans_in(item.start, item.stop))
            judged = [span.judge(ranks, item.number, store.ordered, item.since) for span in spans]
            verdicts += judged
            if judged.count(Verdict.COUNTED) == len(judged):
                counted.append(item)  # in one piece, so that its spans may be joined
                continue
            for span, verdict in zip(spans, judged, strict=True):
                if verdict is Verdict.COUNTED:
                    counted.append(item.part(span))
        if Verdict.CONFLICT in verdicts:
            raise ProtocolError(f"a push for ranks {list(ranks)}: some were counted, some were not")
        if Verdict.EARLY in verdicts or not self._has_room(store, counted):
            return JudgedPush(store, Verdict.EARLY, ranks, back, is_lent, (), weight)
        if store.updater is not None:
            for item in counted:
                if item.chunk.state is None and item.chunk.embedding is None:
                    store.updater.demand(TORCH[item.chunk.dtype])
        if back is not None:
            store.budget.demand_residuals(store.name)
        verdict = Verdict.COUNTED if counted else Verdict.DUPLICATE
        return JudgedPush(store, verdict, ranks, back, is_lent, tuple(counted), weight)

    def _has_room(self, store: ServerStore, counted: Sequence[PushedRange]) -> bool:
        """Return whether the rounds that a push would open beyond the oldest ones may be open."""
        if not store.ordered:
            return True
        ahead = max(
            [
                item.number - span.version
                for item in counted
                for span in item.chunk.spans_in(item.start, item.stop)
            ],
            default=0,
        )
        return not ahead or store.budget.has_room_for(ahead)

    def _admit(self, store: ServerStore, dtype: str, ranks: tuple[int, ...]) -> None:
        if store.opened.average and BY_NAME[dtype].kind == "int":
            raise ConfigError(
                f"store {store.name!r} computes means, which integers do not have; push floating point, or "
                "use a store without average"
            )
        self._demand_ranks(ranks)
        if store.updater is None and not store.ordered:
            raise ConfigError(
                f"store {store.name!r} of type dist_{store.opened.mode} has no optimizer, and needs one "
                "to apply a push; this push was not applied: call set_optimizer(...) before push"
            )

    def _demand_ranks(self, ranks: tuple[int, ...]) -> None:
        if not ranks or max(ranks) >= self.workers:
            raise ProtocolError(f"a push speaks for ranks {list(ranks)!s:.60}; there are {self.workers}")

    # --- applying ---------------------------------------------------------------------------

    def apply(self, judged: JudgedPush, quorum: Quorum, now: float) -> None:
        """Take in what was judged COUNTED, close rounds that are complete by it, and wake reads.

        Nothing here refuses a push: whatever is raised was not foreseen, and leaves values torn.
        """
        store = judged.store
        if store.updater is not None:
            for chunk in {item.chunk.number: item.chunk for item in judged.ranges}.values():
                if chunk.embedding is None:
                    store.state_of(chunk)  # if there is no memory for it, nothing was taken in
        self.is_torn = True
        for item in judged.ranges:
            self.chunks.pushed(item.chunk)
            for span in self._cut(store, item.chunk, item.start, item.stop):
                self._take(judged, item.part(span), span, quorum, now)
        self.is_torn = False

    def _cut(self, store: ServerStore, chunk: Chunk, start: int, stop: int) -> list[Span]:
        """Return the spans that tile a range; each that makes the detour is one piece."""
        if store.updater is not None and store.updater.needs_norms:
            return chunk.cut_by_piece(start, stop)
        if not store.may_drop(chunk.dtype):
            return chunk.cut(start, stop)
        edges = [start]
        for begin, end in self._pieces_apart(store, chunk):
            edges += [edge for edge in (begin, end) if edges[-1] < edge < stop]
        edges.append(stop)
        return [span for begin, end in pairwise(edges) for span in chunk.cut(begin, end)]

    def _pieces_apart(self, store: ServerStore, chunk: Chunk) -> list[tuple[int, int]]:
        """Return (start, stop) of the pieces in ``chunk`` that are only part of their key, in order."""
        known, apart = self._apart.get(chunk.number, (0, []))
        if known < len(chunk.keys):
            apart = apart + [
                (start, stop)
                for key, start, stop in chunk.pieces(chunk.bounds[known], chunk.used)
                if self.norms.is_apart(store.shards[key])
            ]
            self._apart[chunk.number] = len(chunk.keys), apart
        return apart

    def _take(self, judged: JudgedPush, pushed: PushedRange, span: Span, quorum: Quorum, now: float) -> None:
        """Take in what is pushed to one span."""
        store, chunk, number = judged.store, pushed.chunk, pushed.number
        span.take(judged.ranks, number)  # not before its turn: who is woken would think it applied
        if store.ordered:
            keep = store.opened.deterministic or chunk.embedding is not None
            at = number if pushed.since is None else span.place(judged.ranks, number)
            round_ = span.round(at, now)
            round_.step = judged.step
            if at != number:
                round_.moved.update(judged.ranks)
            self._tally.late(store.name, judged.ranks, now - round_.opened_at)
            round_.add(
                judged.ranks,
                pushed.gradient,
                lent=judged.is_lent,
                keep=keep,
                weight=judged.weight,
            )
            round_.backs.add(judged.back)
            self.close(store, chunk, span, quorum, now)
        else:
            total, ranks = GradientSum((pushed.gradient,)), judged.ranks
            age = self._tally.stale(ranks, chunk.number, span.start, span.version)
            due = PendingUpdate(number, ranks, total, (ranks,), back=judged.back, age=age)
            self._due(store, chunk, span, due)
            self._tally.moved(store.name, span.version)

    def hear(self, store: ServerStore, number: NormId, server: int, told: PartialSums) -> None:
        """Take in another server's part of a tensor's sums, and update what is complete by it.

        Raises:
            KeyNotFound, Mismatch, ProtocolError: if that cannot be; nothing is changed.
        """
        norm = self.norms.hear(store, number, server, told)
        if norm is not None:
            self.is_torn = True
            self.norms.settle(store, norm)
            self.is_torn = False

    def hear_step(self, store: ServerStore, message: StepNorm, server: int) -> None:
        """Take in what another server tells of a step, and apply the step if it is complete by it.

        Raises:
            ProtocolError: if that cannot be; nothing is changed.
        """
        try:
            self.is_torn = True
            self.steps.hear(store, message, server)
            self.is_torn = False
        except ProtocolError:
            self.is_torn = False
            raise

    def close(self, store: ServerStore, chunk: Chunk, span: Span, quorum: Quorum, now: float) -> None:
        """Close the rounds of ``span`` that are complete, or whose grace is over."""
        required = quorum.required(store.opened.on_worker_lost)
        while required and span.rounds:
            if not span.closable(required):
                closes_at = span.closes_at(store.opened.quorum, store.opened.grace_s, now)
                if closes_at is None:
                    return
                if closes_at > now:
                    known = self._closing.get(chunk.number, closes_at)
                    self._closing[chunk.number] = min(known, closes_at)
                    return
            if not quorum.lost <= span.rounds[0].ranks:
                self._tally.counts.add("kvps_short_rounds_total")
            span.closed_at = now
            for part in self._close_first(store, chunk, span):
                self.close(store, chunk, part, quorum, now)

    def deadline(self) -> float:
        """When :meth:`close_overdue` may have something to close; infinite for never."""
        return min(self._closing.values(), default=math.inf)

    def close_overdue(self, quorum_of: Callable[[str], tuple[ServerStore, Quorum]], now: float) -> None:
        """Close the rounds whose quorum is in and whose grace is over.

        Args:
            quorum_of: returns a store, and the ranks that count in it, by the store's name.
            now: the time.
        """
        for number in [number for number, at in self._closing.items() if at <= now]:
            del self._closing[number]
            chunk = self.chunks.by_number[number]
            store, quorum = quorum_of(chunk.store)
            for span in list(chunk.spans):
                self.close(store, chunk, span, quorum, now)

    def close_all(self, store: ServerStore, chunk: Chunk, span: Span) -> None:
        """Close every open round of ``span`` with what is in it."""
        while span.rounds:
            for part in self._close_first(store, chunk, span):
                self.close_all(store, chunk, part)

    def _close_first(self, store: ServerStore, chunk: Chunk, span: Span) -> list[Span]:
        """Close the oldest round of ``span``; return the spans that were split off from it."""
        closed, stop = span.rounds.popleft(), span.stop
        self._tally.closed(store.name, closed.number, closed.opened_at)
        self._due(store, chunk, span, closed.update(average=store.opened.average))
        return list(chunk.spans_in(span.stop, stop)) if span.stop < stop else []

    def _due(self, store: ServerStore, chunk: Chunk, span: Span, due: PendingUpdate) -> None:
        """Update ``span``, or begin the detour."""
        waits = store.updater is not None and store.updater.waits
        if chunk.embedding is not None:
            self._updates.update(store, chunk, span, due)
        elif waits:
            self._wait(store, chunk, span, due)
        elif not store.may_drop(chunk.dtype):
            self._updates.update(store, chunk, span, due)
        else:
            key, _, _ = next(chunk.pieces(span.start, span.stop))
            if self.norms.is_apart(store.shards[key]):
                self.norms.begin(store, chunk, span, due)
            else:
                self._updates.sift(store, chunk, span, due)

    def _wait(self, store: ServerStore, chunk: Chunk, span: Span, due: PendingUpdate) -> None:
        """Let an update wait for norms of its key, or of its step."""
        assert store.updater is not None
        if store.updater.needs_norms:
            self.norms.begin(store, chunk, span, due)
        elif due.step is not None:
            self.steps.begin(store, chunk, span, due)
        else:  # it was pushed before the optimizer was set, which clips
            self._updates.update(store, chunk, span, due)

    # --- stores and keys --------------------------------------------------------------------

    def optimize(self, store: ServerStore, hyper: HyperParams) -> None:
        """Install an optimizer.

        What waits for norms of the old rule is applied without, if the new one needs none; what has
        to be known to be finite waits on.

        Raises:
            ConfigError: if it cannot update what is there, or does not clip and rounds wait to be
                clipped; nothing is changed.
        """
        clips = hyper.optional("clip_global_norm") is not None
        if not clips and any(number[0] == store.name for number in self.steps.open):
            raise ConfigError(
                f"store {store.name!r} has rounds that wait for the norm of their step; set an optimizer "
                "without clip_global_norm when they are applied"
            )
        store.optimize(hyper)
        assert store.updater is not None
        needs_norms = store.updater.needs_norms
        for chunk in self.chunks.of_store(store.name):
            for span in list(chunk.spans) if chunk.embedding is None else ():
                if needs_norms:
                    chunk.cut_by_piece(span.start, span.stop)
                while (
                    span.due
                    and span.due[0].step is None
                    and not needs_norms
                    and not store.may_drop(chunk.dtype)
                ):
                    self._updates.update(store, chunk, span, span.due.popleft())
        if not needs_norms and store.drops is None:
            self.norms.forget(store.name)

    def replace(self, store: ServerStore, shard: Shard) -> list[PendingRead]:
        """Free the old place of a key that was placed anew; return the reads that waited there."""
        self.forget(store, [shard])
        return self.chunks.retire(shard.pieces)

    def forget(self, store: ServerStore, shards: Collection[Shard]) -> None:
        """Forget what was told of updates of these keys: their numbers will be those of others."""
        self.norms.forget(store.name, {shard.key for shard in shards})
        self.steps.forget(store.name)
        if store.drops is not None:
            store.drops.forget([piece for shard in shards for piece in shard.pieces])

    def check(self) -> None:
        """Assert the invariants of every chunk."""
        self.chunks.check()
        self.norms.check()
