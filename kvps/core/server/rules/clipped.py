"""Norms over all keys of a step, by which its gradients are clipped.

Theory of operation
-------------------
A *step* is the keys that one call pushes. Each PUSH of the call names the step, the servers that
hold parts of it, and the number of its elements on the receiving server. So a server knows when it
has measured its part of a step, and does not have to know which keys are trained::

    a round of the step closes   it waits in its span, and its squares are measured     each holder
    all elements are measured    the sum of squares goes to the first holder            the others
    all sums are there           the factor is computed, once, and goes to the others   the first
    the factor is there          the rounds are applied, in the order of their spans    each holder
                                 the factor is confirmed                                the others

A sum is told every second until the factor comes, and a factor until it is confirmed. A server
that is told the factor of a step that it does not have has applied it before, because the first
holder had its sum: it confirms. So what is kept of a step ends with the step, however many
messages were lost. Sums that come before the first push of their step are kept within a limit, for
they come again.

Each key is measured by itself, from its first element here on, and sums are added in ascending
order: all servers get the same factor, whatever the order of pushes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from kvps.core.gradients import GradientSum
from kvps.core.server.chunks.rounds import PendingUpdate, Span
from kvps.core.server.chunks.slab import Chunks
from kvps.core.server.rules.rule import Gate, JudgedPush, Rule, Workshop
from kvps.core.server.store import ServerStore
from kvps.errors import ConfigError, Mismatch, ProtocolError
from kvps.protocol.stores import StepNorm
from kvps.protocol.values import StepPart

StepId = tuple[str, int, int]
"""(store, digest, number)."""
EARLY_MAX = 1024
"""Steps of which sums of other servers are kept before a push of the step is here."""
NAN, INFINITY = -1.0, -2.0
"""Stand for a sum of squares, or a factor, that is no finite number."""


@dataclass(slots=True)
class OpenStep:
    """A step whose factor is not known here."""

    part: StepPart
    left: int
    """The number of elements here that are not measured yet."""
    squares: list[float] = field(default_factory=list)
    ranges: list[tuple[int, int, int]] = field(default_factory=list)
    """(chunk, start, stop) of the elements that are measured."""
    heard: dict[int, float] = field(default_factory=dict)
    """On the first holder: the sums of the others."""

    @property
    def sum(self) -> float:
        """The sum of squares of the elements here."""
        return sum(sorted(self.squares))


@dataclass(slots=True)
class DecidedStep:
    """A factor that not all holders of its step have confirmed."""

    factor: float
    unconfirmed: set[int]


class StepNorms:
    """The steps of one server that wait for their norm."""

    def __init__(self, chunks: Chunks, shop: Workshop) -> None:
        self._chunks = chunks
        self._shop = shop
        self.open: dict[StepId, OpenStep] = {}
        self.decided: dict[StepId, DecidedStep] = {}
        self._early: dict[StepId, dict[int, float]] = {}

    def check(self, store: str, part: StepPart) -> None:
        """Check the part of a step that a push names.

        Raises:
            ProtocolError: if there can be no such part.
        """
        here, servers = self._chunks.server, self._chunks.servers
        is_known = here in part.holders and part.holders[-1] < servers
        known = self.open.get((store, part.digest, part.number))
        if (
            not is_known
            or not part.size
            or list(part.holders) != sorted(set(part.holders))
            or (known is not None and known.part != part)
        ):
            raise ProtocolError(f"a push of {part}; server {here} of {servers} has no such part")

    # --- this server's part -------------------------------------------------------------------

    def begin(self, rule: Rule, span: Span, due: PendingUpdate) -> None:
        """Measure a closed round, and let it wait for the factor of its step."""
        assert due.step is not None
        store, chunk = rule.store, rule.chunk
        number: StepId = (store.name, due.step.digest, due.step.number)
        step = self.open.get(number)
        if step is None:
            heard = self._early.pop(number, {})
            step = self.open[number] = OpenStep(due.step, due.step.size, heard=heard)
        span.due.append(due)
        step.squares += _squares_by_key(rule, span, due)
        step.ranges.append((chunk.number, span.start, span.stop))
        step.left -= span.stop - span.start
        if step.left:
            return
        if step.part.holders[0] == self._chunks.server:
            self._decide(store, number, step)
        else:
            self._tell(step.part.holders[0], number, squares=step.sum)

    def _decide(self, store: ServerStore, number: StepId, step: OpenStep) -> None:
        """Compute the factor of a step, if all sums are there."""
        others = step.part.holders[1:]
        if step.left or not step.heard.keys() >= set(others):
            return
        assert store.updater is not None
        total = sum(sorted([step.sum, *[step.heard[server] for server in others]]))
        factor = store.updater.clip_factor(total)
        if others:
            self.decided[number] = DecidedStep(factor, set(others))
        for server in others:
            self._tell(server, number, factor=factor)
        self._apply(number, step, factor)

    def _apply(self, number: StepId, step: OpenStep, factor: float) -> None:
        """Apply the rounds of a step, and those behind them that waited for their turn."""
        del self.open[number]
        for place, start, stop in step.ranges:
            rule = self._shop.rule(place)
            for span in list(rule.chunk.spans_in(start, stop)):
                for due in span.due:
                    if due.step == step.part:
                        due.factor = factor
                while span.due and span.due[0].factor is not None:
                    due = span.due.popleft()
                    assert due.factor is not None
                    if due.factor != 1.0:
                        due.sum = scaled(due.sum, due.factor)
                    rule.move(span, due)

    # --- the others ---------------------------------------------------------------------------

    def hear(self, store: ServerStore, message: StepNorm, server: int) -> None:
        """Take in the sum, the factor or the confirmation of another server.

        Raises:
            ProtocolError: if that cannot be; nothing is changed.
        """
        number: StepId = (store.name, message.digest, message.number)
        step, decided = self.open.get(number), self.decided.get(number)
        if message.squares is not None:
            self._hear_sum(store, number, server, _read(message.squares))
        elif message.factor is not None:
            factor = _read(message.factor)
            if step is not None:
                if step.left or step.part.holders[0] != server or factor > 1.0:
                    raise ProtocolError(f"server {server} told the factor {factor:g} of {step}")
                self._apply(number, step, factor)
            self._tell(server, number)
        elif decided is not None:
            decided.unconfirmed.discard(server)
            if not decided.unconfirmed:
                del self.decided[number]

    def _hear_sum(self, store: ServerStore, number: StepId, server: int, squares: float) -> None:
        step, decided = self.open.get(number), self.decided.get(number)
        if decided is not None:
            self._tell(server, number, factor=decided.factor)
        elif step is None:
            self._early.setdefault(number, {})[server] = squares
            if len(self._early) > EARLY_MAX:
                del self._early[next(iter(self._early))]
        else:
            if step.part.holders[0] != self._chunks.server or server not in step.part.holders:
                raise ProtocolError(f"server {server} told a sum of squares of {step.part}")
            step.heard[server] = squares
            self._decide(store, number, step)

    def repeat(self) -> None:
        """Tell again whatever was not answered."""
        for number, step in self.open.items():
            first = step.part.holders[0]
            if not step.left and first != self._chunks.server:
                self._tell(first, number, squares=step.sum)
        for number, decided in self.decided.items():
            for server in sorted(decided.unconfirmed):
                self._tell(server, number, factor=decided.factor)

    def _tell(
        self, server: int, number: StepId, squares: float | None = None, factor: float | None = None
    ) -> None:
        self._shop.say(server, StepNorm(*number, _written(squares), _written(factor)))

    def forget(self, store: str) -> None:
        """Forget the steps of a store."""
        for steps in (self.open, self.decided, self._early):
            for number in [number for number in steps if number[0] == store]:
                del steps[number]


class Clipped(Gate):
    """A round waits for the norm of its step, by which the optimizer clips gradients."""

    def __init__(self, inner: Rule, steps: StepNorms) -> None:
        super().__init__(inner)
        self._steps = steps

    def check_rows(self, ranks: tuple[int, ...]) -> None:
        """Refuse a push of rows."""
        raise ConfigError(
            f"store {self.store.name!r} clips gradients by their global norm, which rows have no part in; "
            "push dense gradients, or set the optimizer without clip_global_norm"
        )

    def check_counted(self, judged: JudgedPush, step: StepPart | None) -> None:
        """Check that all ranks push a round in the same step.

        Raises:
            ConfigError, Mismatch, ProtocolError: if another rank pushed the same round in another
                step, or in none.
        """
        super().check_counted(judged, step)
        judged.step, store = step, self.store
        if step is not None:
            self._steps.check(store.name, step)
        for item in judged.ranges:
            for span in item.rule.chunk.spans_in(item.start, item.stop):
                at = item.number - span.version - len(span.due)
                is_open = at < len(span.rounds)
                if not is_open and step is None:
                    raise ConfigError(
                        f"store {store.name!r} clips gradients by their global norm, but rank "
                        f"{judged.ranks[0]} does not say which keys are a step; call set_optimizer() on "
                        "every rank before the first push"
                    )
                if is_open and span.rounds[at].step != step:
                    key, _, _ = next(item.rule.chunk.pieces(span.start, span.stop))
                    raise Mismatch(
                        f"rank {judged.ranks[0]} pushed key {key!r} with other keys than ranks "
                        f"{sorted(span.rounds[at].ranks)} did; where the optimizer clips gradients by their "
                        "global norm, every rank must push the same keys of a step, in one call"
                    )

    def prepare(self) -> None:
        """See :meth:`Rule.prepare`; each push is checked."""
        self.inner.prepare()

    def apply(self, span: Span, due: PendingUpdate, norms: torch.Tensor | None = None) -> None:
        """Let a round wait, unless it was pushed before the optimizer was set, which clips."""
        if due.step is not None:
            self._steps.begin(self, span, due)
        else:
            self.move(span, due)


def _squares_by_key(rule: Rule, span: Span, due: PendingUpdate) -> list[float]:
    """Return sums of squares of a gradient: of each key by itself, from its first element in
    the chunk on."""
    block, count, found = rule.shop.block(rule.chunk.summed_in), rule.shop.block_count, []
    for _, first, last in rule.chunk.pieces(span.start, span.stop):
        for start in range(first, last, count):
            stop = min(start + count, last)
            part = due.sum.block(block, start - span.start, stop - span.start)
            norm = float(torch.linalg.vector_norm(part, dtype=torch.float64))
            found.append(norm * norm)  # infinity where ** 2 would raise
    return found


def scaled(total: GradientSum, factor: float) -> GradientSum:
    """Return a sum multiplied by ``factor``, which may be 0 or NaN."""
    return GradientSum(total.parts, total.divisor / factor if factor else math.inf)


def _written(number: float | None) -> float | None:
    """Return a number as it travels."""
    if number is None or math.isfinite(number):
        return number
    return NAN if math.isnan(number) else INFINITY


def _read(number: float) -> float:
    """Return a number that has travelled.

    Raises:
        ProtocolError: if it is negative, and stands for nothing.
    """
    if number >= 0:
        return number
    if number not in (NAN, INFINITY):
        raise ProtocolError(f"{number:g} is neither a sum of squares nor a factor")
    return math.nan if number == NAN else math.inf
