"""The rule of a chunk: what the pushes to it must be, and what becomes of a closed round.

A rule is composed when the first request asks for the chunk, of what its store was opened with, of the
optimizer, and of what pushes have asked for (:class:`~kvps.core.server.rules.book.RuleBook`). So
``Finite(PublishedOptimize(...))`` reads as the options of the store, and an option that is off is not asked
for. A change of these has the rule composed anew. A rule keeps nothing of its own: values,
states and histories are the chunk's, and what waits is in its spans.

*Movers* change values: without an optimizer the sum of a round becomes the values; an optimizer moves them by
it. Sums are taken block by block, each of which stays in a core's cache while the optimizer's rule is applied
to it. *Gates* stand before a mover, and let
an update wait, or drop it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from kvps.compression.spec import CodecSpec
from kvps.core.gradients import Part
from kvps.core.optim.base import State, Terms, Updater
from kvps.core.row_gradients import RowGradient
from kvps.core.server.chunks.rounds import PendingUpdate, Round, Span, Verdict
from kvps.core.server.chunks.slab import Chunk, NamedTables
from kvps.core.server.context import StoreQuorum
from kvps.core.server.meter import Meter
from kvps.core.server.rules import rows
from kvps.core.server.sessions import PendingRead, Session
from kvps.core.server.store import ServerStore
from kvps.dtypes import BY_ID, BY_NAME
from kvps.errors import ConfigError, Mismatch, ProtocolError
from kvps.protocol.envelope import Message, maker
from kvps.protocol.values import Ask, Push, StepPart
from kvps.tensors import TORCH

Form = tuple[object, ...]
"""The start, size and element type of a push of one run, its rank, its weight, how many numbers of
earlier pushes it names, its codecs, the versions that its sender holds, and its step."""
FORMS_MAX = 4096
"""Forms of pushes that are known of a chunk."""
BLOCK_COUNT = 256 << 10
"""Elements that one thread sums and updates at once, so that they stay in its core's cache."""


Take = Callable[["Counted", "PushedRange", Span, StoreQuorum], None]
Holds = Callable[[PendingRead, "Rule"], bool]
Reply = Callable[[Session, int, "Rule", tuple[Ask, ...]], None]


@dataclass(slots=True)
class Workshop:
    """Tools that all rules of a server share.

    Args:
        workers: how many ranks may push.
        block_count: elements that are summed and updated at once.
        meter: the server's counters.
        wake: called with the reads that waited for values that have just moved, before they move again.
        say: sends a message to another server, by its rank.
        rule: returns the rule of a chunk, by its number.
        named: returns embedding tables by the numbers of their chunks.
    """

    workers: int
    block_count: int
    meter: Meter
    wake: Callable[[list[PendingRead]], None]
    say: Callable[[int, Message], None]
    rule: Callable[[int], Rule]
    named: Callable[[tuple[int, ...]], NamedTables]
    tables: dict[int, tuple[Rule, PendingUpdate]] = field(default_factory=dict)
    """Chunk of a table -> its rule, and the update that waits for those of other tables in one message."""
    _blocks: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def block(self, dtype: torch.dtype, count: int = 0) -> torch.Tensor:
        """Return memory for one block of sums, or for ``count`` elements if they are more."""
        known = self._blocks.get(dtype)
        if known is None or known.numel() < count:
            known = self._blocks[dtype] = torch.empty(max(count, self.block_count), dtype=dtype)
        return known


class Rule(abc.ABC):
    """The rule of one chunk.

    Args:
        store: the store of the chunk.
        chunk: its values.
        shop: what all rules share.
    """

    keeps_all = False
    """Gradients are not added up before the round closes."""
    is_new = True
    """The next push that counts is checked by :meth:`check_counted`, and prepared."""
    take: Take
    """Takes in a push that counts: in its round, or by itself. Set where the rule is composed."""
    reply: Reply
    """Answers a read of whole values; the same."""

    def __init__(self, store: ServerStore, chunk: Chunk, shop: Workshop) -> None:
        self.store = store
        self.chunk = chunk
        self.shop = shop
        self.keeps_all = self.keeps_all or store.opened.deterministic
        self.sum_up = Round.mean if store.opened.average else Round.total
        """Returns the update that closes a round."""
        self.cut: Callable[[int, int], list[Span]] = chunk.cut
        """Returns spans that tile a range of the chunk."""
        self.known: set[Form | None] = set()
        """The forms of uncompressed pushes of one run and one rank that :meth:`check` has let pass: they pass
        again."""

    # --- judging: nothing is changed ----------------------------------------------------------

    def check(self, message: Push) -> None:
        """Check what a push is, whatever was pushed before.

        Raises:
            KvpsError: if it is refused.
        """
        chunk = self.chunk
        if message.weight <= 0:
            raise ProtocolError(f"a push of weight {message.weight}; use a number above 0")
        dtype = BY_ID[message.dtype].name
        if TORCH[dtype] not in (TORCH[chunk.dtype], chunk.summed_in):
            raise Mismatch(f"chunk {chunk.number} holds {chunk.dtype}, and the push has type {dtype}")
        self.check_ranks(message.ranks)
        chunk.validate(message.runs, are_filled=True)
        if self.store.counts_late and len(message.since) != len(message.runs):
            raise ProtocolError(
                f"a push of {len(message.runs)} runs with {len(message.since)} numbers before them; store "
                f"{self.store.name!r} counts late pushes and needs one for each"
            )

    def check_ranks(self, ranks: tuple[int, ...]) -> None:
        """Check whom a push speaks for.

        Raises:
            ProtocolError: if there is no such rank.
        """
        if not ranks or max(ranks) >= self.shop.workers:
            raise ProtocolError(f"a push speaks for ranks {list(ranks)!s:.60}; there are {self.shop.workers}")

    def check_rows(self, ranks: tuple[int, ...]) -> None:
        """Check a push of rows, whatever was pushed before.

        Raises:
            KvpsError: if it is refused.
        """
        self.check_ranks(ranks)

    def check_counted(  # noqa: B027 (most rules take what counts)
        self, judged: JudgedPush, step: StepPart | None
    ) -> None:
        """Check a push that counts, and that names ``step``.

        Raises:
            KvpsError: if it is refused.
        """

    # --- applying -----------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make what pushes need, before the first; if there is no memory for it, none was taken in."""
        self.is_new = False

    def move(self, span: Span, due: PendingUpdate, norms: torch.Tensor | None = None) -> None:
        """Move the values of ``span`` by one update, and wake the reads that waited there.

        Args:
            span: which values.
            due: the sum.
            norms: those of the whole tensor, for an optimizer that needs them.
        """
        self.write(span, due, norms)
        span.version += 1
        if self.chunk.waiting:
            self.shop.wake(self.chunk.woken(span.start, span.stop))

    apply = move
    """Takes a closed round, or one push: moves the values now, or lets it wait."""

    def skip(self, span: Span, due: PendingUpdate) -> None:
        """Drop an update: a round is closed without it, a push is just taken in."""
        if due.rank is None:
            span.version += 1
        self.shop.wake(self.chunk.woken(span.start, span.stop))

    @abc.abstractmethod
    def write(self, span: Span, due: PendingUpdate, norms: torch.Tensor | None) -> None:
        """Write the values of ``span`` after an update."""


# --- movers --------------------------------------------------------------------------------


class Assign(Rule):
    """The sum becomes the values; of a sum of rows, all other rows become 0."""

    def write(self, span: Span, due: PendingUpdate, norms: Tensor | None) -> None:
        """Write the sum, block by block."""
        total, first, last = due.sum, span.start, span.stop
        if isinstance(total.parts[0], RowGradient):
            rows.assign(self.chunk, span, total.gathered())
            return
        target = self.chunk.overwritable(first, last)
        width = BY_NAME[self.chunk.dtype].itemsize
        if total.into_frame(target.octets[first * width : last * width], self.chunk.dtype):
            return
        is_half = BY_NAME[self.chunk.dtype].kind == "half"
        for start in range(first, last, self.shop.block_count):
            stop = min(start + self.shop.block_count, last)
            block = target.part(start, stop)
            if is_half:
                block.copy_(total.block(self.shop.block(torch.float32), start - first, stop - first))
            else:
                total.into(block, start - first, stop - first)


class Optimize(Rule):
    """The sum is passed to the optimizer, which moves the values."""

    def __init__(self, store: ServerStore, chunk: Chunk, shop: Workshop, updater: Updater) -> None:
        super().__init__(store, chunk, shop)
        self.install(updater)

    def install(self, updater: Updater) -> None:
        """Update by this optimizer from now on."""
        self.updater = updater
        self._apply = updater.applier(TORCH[self.chunk.dtype], self.chunk.summed_in)
        self._total = _BLOCK if updater.spends_gradients else _READ
        self._segments = segments if updater.hyper.lr_mult or updater.hyper.wd_mult else _whole

    def check_counted(self, judged: JudgedPush, step: StepPart | None) -> None:
        """Check that the optimizer can update values of this type."""
        if self.chunk.state is None:
            self.updater.demand(TORCH[self.chunk.dtype])

    def prepare(self) -> None:
        """Make the optimizer's state."""
        self.store.state_of(self.chunk)
        super().prepare()

    def write(self, span: Span, due: PendingUpdate, norms: Tensor | None) -> None:
        """Update by blocks, or the rows that the sum has alone."""
        span.step += 1
        if isinstance(due.sum.parts[0], RowGradient):
            rows.update(self.store, self.chunk, span, due.sum.gathered(), due)
            return
        chunk, count, lap = self.chunk, self.shop.block_count, self.shop.meter.lap
        weight = chunk.writable()
        state = self.store.state_of(chunk) if chunk.state is None else chunk.own_state()
        assert state is not None
        scratch = self.shop.block(chunk.summed_in)
        total = self._total(due.sum)
        for first, last, rates in self._segments(self.updater, chunk, span):
            terms = _terms((span.step, *rates, norms, due.rank, due.age))
            for start in range(first, last, count):
                stop = min(start + count, last)
                gradient = total(scratch, start - span.start, stop - span.start)
                if lap is not None:
                    lap()
                self.step(weight, slice(start, stop), gradient, state, terms)
                if lap is not None:
                    lap()

    def step(self, weight: Tensor, at: slice, gradient: Tensor, state: State, terms: Terms) -> None:
        """Update one block of the chunk's values, ``weight``."""
        ours = state and {name: tensor[at] for name, tensor in state.items()}
        self._apply(self.chunk.buffer.part(at.start, at.stop), gradient, ours, terms)


def segments(updater: Updater, chunk: Chunk, span: Span) -> Iterable[tuple[int, int, tuple[float, float]]]:
    """Return (start, stop, (lr, weight decay)) of the parts of ``span`` that have them equal."""
    pieces = chunk.pieces(span.start, span.stop)
    for rates, group in groupby(pieces, lambda piece: updater.hyper.for_key(piece[0])):
        alike = list(group)
        yield alike[0][1], alike[-1][2], rates


def _whole(updater: Updater, chunk: Chunk, span: Span) -> Iterable[tuple[int, int, tuple[float, float]]]:
    """Return the same where no key has a rate of its own."""
    return [(span.start, span.stop, updater.rates)]


_terms = maker(Terms)
_BLOCK, _READ = attrgetter("block"), attrgetter("read")


# --- gates ---------------------------------------------------------------------------------


class Gate(Rule):
    """A rule that stands before another, ``inner``."""

    def __init__(self, inner: Rule) -> None:
        super().__init__(inner.store, inner.chunk, inner.shop)
        self.inner = inner
        self.keeps_all = inner.keeps_all

    def check_counted(self, judged: JudgedPush, step: StepPart | None) -> None:
        """See :meth:`Rule.check_counted`."""
        self.inner.check_counted(judged, step)

    def prepare(self) -> None:
        """See :meth:`Rule.prepare`."""
        self.inner.prepare()
        super().prepare()

    def skip(self, span: Span, due: PendingUpdate) -> None:
        """See :meth:`Rule.skip`."""
        self.inner.skip(span, due)

    def write(self, span: Span, due: PendingUpdate, norms: torch.Tensor | None) -> None:
        """See :meth:`Rule.write`."""
        self.inner.write(span, due, norms)


class Watched(Gate):
    """Tells ``watch`` which elements a mover is about to move; the innermost rule before the mover."""

    def __init__(self, inner: Rule, watch: Callable[[Chunk, int, int], None]) -> None:
        super().__init__(inner)
        self._watch = watch

    def check(self, message: Push) -> None:
        """See :meth:`Rule.check`; a table refuses it."""
        self.inner.check(message)

    def apply(self, span: Span, due: PendingUpdate, norms: torch.Tensor | None = None) -> None:
        """Apply an update to the mover; a table lets it wait."""
        self._watch(self.chunk, span.start, span.stop)
        self.inner.apply(span, due)

    def skip(self, span: Span, due: PendingUpdate) -> None:
        """See :meth:`Rule.skip`."""
        self._watch(self.chunk, span.start, span.stop)
        self.inner.skip(span, due)

    def write(self, span: Span, due: PendingUpdate, norms: torch.Tensor | None) -> None:
        """See :meth:`Rule.write`."""
        self._watch(self.chunk, span.start, span.stop)
        self.inner.write(span, due, norms)


class Refused(Gate):
    """All pushes are refused, and ``text`` says why."""

    def __init__(self, inner: Rule, text: str) -> None:
        super().__init__(inner)
        self._text = text

    def check(self, message: Push) -> None:
        """Refuse a push of whole keys."""
        raise ConfigError(self._text)

    def check_rows(self, ranks: tuple[int, ...]) -> None:
        """Refuse a push of rows."""
        raise ConfigError(self._text)


class PushedRange(NamedTuple):
    """Neighbouring elements of a chunk, and what one push has for them."""

    rule: Rule
    start: int
    stop: int
    number: int
    """Number of the push, for these elements."""
    gradient: Part
    since: int | None = None
    """Where late pushes count, the number after the sender's push before this one."""

    def part(self, span: Span) -> PushedRange:
        """Return the part of this range that lies in ``span``, which is not all of it."""
        start, stop = max(span.start, self.start), min(span.stop, self.stop)
        gradient = self.gradient.part(start - self.start, stop - self.start)
        return self._replace(start=start, stop=stop, gradient=gradient)


@dataclass(slots=True)
class JudgedPush:
    """The decision about a push that is not refused; valid until another push is applied."""

    store: ServerStore
    ranks: tuple[int, ...]
    """The ranks that the push speaks for."""
    weight: float
    """The weight of the push in a mean."""
    back: CodecSpec | None = None
    """The codec in which they want the update; None for none."""
    step: StepPart | None = None
    """The step that the push is part of, where gradients are clipped by their global norm."""
    verdict: Verdict = Verdict.EARLY
    """COUNTED, DUPLICATE or EARLY."""
    ranges: Sequence[PushedRange] = ()
    """The elements that were not counted before; empty unless the verdict is COUNTED."""


Counted = JudgedPush | Push
"""A push that counts, as a rule takes it in."""
