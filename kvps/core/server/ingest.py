"""Pushes and loads on a server: they are decoded, judged and counted, and rounds close.

A push names elements of a chunk, never keys: the worker's plan has turned keys into runs. A push of a
whole chunk is one addition; a closed round of it one fused update.

A push is first *judged*, which changes nothing (:meth:`Ingest.judge`), and then applied by an
explicit call (:meth:`Ingest.apply`). In a synchronous store the pushes of one number form a round,
and the weights move when the round closes. In an asynchronous one each push moves them. After each
version, before the next one, the reads that waited there are answered. So a read that
waits for a version gets exactly this one.

What pushes must be, and what becomes of a closed round, is the rule of the chunk
(:mod:`kvps.core.server.rules.rule`). A push of rows is judged span by span like any other, each of one
piece of its key.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import repeat

import torch

from kvps import protocol as p
from kvps.compression import spec
from kvps.compression.codecs import decode
from kvps.core.gradients import DenseGradient, GradientSum
from kvps.core.server.answer import Answers, check_held, plain
from kvps.core.server.chunks.rounds import COUNTED, EARLY, PendingUpdate, Span, Verdict
from kvps.core.server.context import RequestContext, StoreQuorum
from kvps.core.server.rules.book import RuleBook
from kvps.core.server.rules.rows import KeyRows
from kvps.core.server.rules.rule import FORMS_MAX, Counted, JudgedPush, PushedRange, Reply, Rule
from kvps.core.server.rules.table import TableRows
from kvps.core.server.sessions import PendingRead, Session
from kvps.dtypes import BY_ID, BY_NAME
from kvps.errors import ConfigError, Mismatch, ProtocolError
from kvps.protocol.envelope import Packet, maker


class Ingest:
    """Takes in all that changes the values of one server.

    Args:
        context: the job's stores and sessions.
        answers: answers the reads that wait.
        book: the rules of the chunks.
    """

    def __init__(self, context: RequestContext, answers: Answers, book: RuleBook) -> None:
        self._context = context
        self._chunks = context.chunks
        self._meter = context.meter
        self._answers = answers
        self._book = book
        self._rule = answers.rule = book.rule
        book.takes = self._move, self._count
        book.replies = answers.whole, answers.watched
        self._closing: dict[int, float] = {}
        """Chunk -> when the first of its rounds closes whose quorum is in."""

    # --- whole keys -------------------------------------------------------------------------

    def push(self, session: Session, seq: int, message: p.Push, packet: Packet) -> None:
        """Take in gradients for runs of a chunk."""
        rule, runs, ranks, form = self._rule(message.chunk), message.runs, message.ranks, None
        if len(runs) == len(ranks) == 1:  # forms of many ranks would take much memory
            odd = len(message.since), message.code, message.back, message.held, message.step
            form = (*runs[0][:2], message.dtype, ranks, message.weight, *odd)
        chunk, payload, pushed = rule.chunk, packet.payload, None
        reply: Reply = plain
        if form in rule.known:
            gradient = DenseGradient.of(payload, message.dtype, is_lent=bool(packet.loans))
            pushed = self._next(rule, message, gradient)
        else:
            gradient, reply = self._checked(rule, message, packet), self._answers.reply_to(message.held)
            is_plain = not (message.code or message.back or message.held or message.step)
            if form is not None and is_plain and len(rule.known) < FORMS_MAX:
                rule.known.add(form)
        if pushed is not None:
            self._take(message, (pushed,), payload)
        elif not self.apply(self.judge(rule, message, gradient), payload):
            return  # not taken in: the worker will probe, and send it again
        is_read = message.pull
        self._meter.on_values(chunk.number, runs, chunk.type.itemsize << is_read)
        if is_read:
            asks, is_there = [], rule.store.ordered
            for start, size, number in runs:
                asks.append(_ask((start, size, number + 1, 0)))
                for span in chunk.spans if len(chunk.spans) == 1 else chunk.spans_in(start, start + size):
                    is_there = is_there and span.version > number
            if is_there:
                session.pending.pop(seq, None)
                reply(session, seq, rule, tuple(asks))
                return
            again = partial(self._answers.read, self._answers.holds, reply)
            reading = PendingRead(session, seq, chunk.store, chunk.number, tuple(asks), again)
            if again(reading, is_woken=False) or gradient.is_lent:
                return  # no window waits for the receipt of what is lent; its values will do
        version = min(
            [span.version for start, size, _ in runs for span in chunk.spans_in(start, start + size)]
        )
        self._acknowledge(session, seq, version, self._answers.due(session, rule, runs))

    def _next(self, rule: Rule, push: p.Push, gradient: DenseGradient) -> PushedRange | None:
        """Return what a push of a known form has for one span, if it counts there in the next round: what
        :meth:`judge` would find, for less."""
        ((start, size, number),), spans, since = push.runs, rule.chunk.spans, (*push.since, None)[0]
        if len(spans) > 1:
            spans = [*rule.chunk.spans_in(start, start + size)]
        is_next = len(spans) == 1 and number <= spans[0].version and not rule.is_new
        if not is_next or spans[0].judge(push.ranks, number, since) is not COUNTED:
            return None
        return _range((rule, start, start + size, number, gradient, since))

    def _checked(self, rule: Rule, message: p.Push, packet: Packet) -> DenseGradient:
        """Check what a push is, whatever was pushed before; return its values.

        Raises:
            KvpsError: if it is refused.
        """
        check_held(message.held, message.runs)
        if message.code is None:
            gradient = DenseGradient.of(packet.payload, message.dtype, is_lent=bool(packet.loans))
        else:
            gradient = self._decoded(rule, message, packet)
        rule.check(message)
        if message.back is not None and rule.chunk.back is None:
            rule.is_new = True  # it is prepared for updates that are published
        return gradient

    def _decoded(self, rule: Rule, message: p.Push, packet: Packet) -> DenseGradient:
        """Return the values of a compressed push.

        Raises:
            Mismatch: if the chunk holds what cannot be compressed.
            ProtocolError: if the bytes cannot mean it.
        """
        chunk = rule.chunk
        chunk.validate(message.runs)  # a few octets may say very many elements
        if chunk.dtype != "float32":
            raise Mismatch(f"chunk {chunk.number} holds {chunk.dtype}, and only float32 is compressed")
        octets = DenseGradient.of(packet.payload, BY_NAME["uint8"].id).joined()
        gradient = torch.empty(sum([run.size for run in message.runs]), dtype=torch.float32)
        assert message.code is not None
        begin = at = 0
        for run in message.runs:
            end = begin + spec.size(message.code, run.size)
            decode(message.code, octets[begin:end], gradient[at : at + run.size])
            begin, at = end, at + run.size
        self._meter.compressed("in", octets.nbytes, 4 * len(gradient))
        return DenseGradient([gradient])

    def load(self, session: Session, seq: int, message: p.Load, packet: Packet) -> None:
        """Take in values of keys that were declared."""
        chunk = self._chunks.at(message.chunk)
        store = self._context.stores[chunk.store]
        if BY_ID[message.dtype].name != chunk.dtype:
            raise Mismatch(
                f"chunk {chunk.number} holds {chunk.dtype}, and the value has type "
                f"{BY_ID[message.dtype].name}"
            )
        values = DenseGradient.of(packet.payload, message.dtype).joined()
        became_ready = store.load(chunk, message, values, session.rank)
        if became_ready is None:
            return  # as a PUSH that is early
        self._acknowledge(session, seq, 0)
        for run in message.runs:
            self._answers.wake(chunk.woken(run.start, run.start + run.size))
        if became_ready:
            self._context.retry()

    def _acknowledge(self, session: Session, seq: int, version: int, due: int = 0) -> None:
        self._context.send(session, p.Ack((p.Receipt(seq, version),), due))

    # --- rows -------------------------------------------------------------------------------

    def push_rows(
        self, session: Session, seq: int, message: p.PushRows | p.PushTables, packet: Packet
    ) -> None:
        """Take in gradients for rows of a key or of tables."""
        target: KeyRows | TableRows
        if isinstance(message, p.PushTables):
            target = TableRows.of(self._chunks, message.parts)
            store = self._context.store_of(message.chunk)
            cut = target.gradients(message, packet.payload)
            numbers: Iterable[int] = [part.number for part in message.parts]
        else:
            store = self._context.store(message.store)
            target = KeyRows.of(store, message.key)
            cut, numbers = target.cut(target.gradient(message, packet.payload)), repeat(message.number)
        if store.counts_late:
            raise ConfigError(
                f"store {store.name!r} counts late pushes, which pushes of rows cannot be; use late='drop'"
            )
        ranges: list[PushedRange] = []
        for (piece, part), number in zip(cut, numbers, strict=False):
            rule, stop = self._book.rule(piece.chunk), piece.start + piece.size
            rule.check_rows(message.ranks)
            ranges.append(_range((rule, piece.start, stop, number, part, None)))
        judged = JudgedPush(store, message.ranks, len(message.ranks))
        self._judge(judged, ranges, None)
        if isinstance(target, TableRows) and judged.ranges:
            store.budget.demand_growth(judged.ranges[0].rule.chunk.keys[0])
        if self.apply(judged, packet.payload):
            self._book.move_tables()
            self._meter.on_rows(target.pieces[0], packet.payload)
            self._acknowledge(session, seq, min([span.version for span in target.spans(self._chunks)]))

    # --- judging ----------------------------------------------------------------------------

    def judge(self, rule: Rule, message: p.Push, gradient: DenseGradient) -> JudgedPush:
        """Decide about a push that was checked; nothing is changed.

        Args:
            rule: that of its chunk.
            message: the push.
            gradient: as many elements as the runs of ``message`` have, side by side.

        Raises:
            ProtocolError, Mismatch, ConfigError, KeyNotFound: if it is refused.
        """
        ranges, begin = [], 0
        for (start, size, number), since in zip(message.runs, message.since or repeat(None), strict=False):
            part = gradient if len(message.runs) == 1 else gradient.part(begin, begin + size)
            ranges.append(_range((rule, start, start + size, number, part, since)))
            begin += size
        judged = JudgedPush(rule.store, message.ranks, message.weight, message.back)
        self._judge(judged, ranges, message.step)
        return judged

    def _judge(self, judged: JudgedPush, pushed: list[PushedRange], step: p.StepPart | None) -> None:
        """Note which of these ranges count."""
        store, ranks, ahead = judged.store, judged.ranks, 0
        counted: list[PushedRange] = []
        others: list[Verdict] = []
        for item in pushed:
            rule, start, stop, number, _, since = item
            taken: list[Span] = []
            is_whole, spans = True, rule.chunk.spans
            for span in spans if len(spans) == 1 else rule.chunk.spans_in(start, stop):
                verdict = span.judge(ranks, number, since)
                if verdict is COUNTED:
                    taken.append(span)
                    if number - span.version > ahead:
                        ahead = number - span.version
                else:
                    is_whole = False
                    others.append(verdict)
            if is_whole:
                counted.append(item)  # in one piece, so that its spans may be joined
            else:
                counted += map(item.part, taken)
        if Verdict.CONFLICT in others:
            raise ProtocolError(f"a push for ranks {list(ranks)}: some were counted, some were not")
        if EARLY in others or (ahead and store.ordered and not store.budget.has_room_for(ahead)):
            return
        judged.verdict, judged.ranges = COUNTED if counted else Verdict.DUPLICATE, counted
        for item in counted:
            if item.rule.is_new:
                item.rule.check_counted(judged, step)
                if judged.back is not None:
                    store.budget.demand_residuals(store.name)

    # --- applying ---------------------------------------------------------------------------

    def apply(self, judged: JudgedPush, payload: Sequence[memoryview]) -> bool:
        """Take in the parts that were judged COUNTED, close rounds that they complete, and wake reads.

        Nothing here refuses a push: whatever is raised was not foreseen, and leaves values torn.

        Returns:
            Whether the push is taken in, now or before.
        """
        if judged.verdict is not COUNTED:
            self._meter.on_push(judged.verdict.value, judged.ranks, payload)
            return judged.verdict is Verdict.DUPLICATE
        if any(item.rule.is_new for item in judged.ranges):
            self._prepare(judged)
        self._take(judged, judged.ranges, payload)
        return True

    def _take(self, push: Counted, ranges: Sequence[PushedRange], payload: Sequence[memoryview]) -> None:
        """Take in the parts of a push that count."""
        quorum = self._context.quorum(ranges[0].rule.store)
        self._book.is_torn = True
        for item in ranges:
            rule = item.rule
            self._chunks.pushed.add(rule.chunk.number)
            spans = rule.cut(item.start, item.stop)
            for span in spans:
                rule.take(push, item if len(spans) == 1 else item.part(span), span, quorum)
        self._book.is_torn = False
        self._meter.on_push("counted", push.ranks, payload)

    def _prepare(self, judged: JudgedPush) -> None:
        """Make what the rules of a push need; those of a chunk keep a compressed history from the first push
        on that wants its update so."""
        ranges = []
        for item in judged.ranges:
            chunk = item.rule.chunk
            if judged.back is not None and chunk.back is None:
                chunk.publish()
                self._book.recompose()
            rule = self._rule(chunk.number)
            rule.prepare()
            ranges.append(item._replace(rule=rule))
        judged.ranges = ranges

    def _move(self, push: Counted, pushed: PushedRange, span: Span, quorum: StoreQuorum) -> None:
        """Apply a push by itself."""
        rule, ranks = pushed.rule, push.ranks
        span.note(ranks, pushed.number)  # or a read that is woken would take it for applied before its turn
        age = self._meter.stale(ranks, rule.chunk.number, span.start, span.version)
        total = GradientSum((pushed.gradient,))
        span.moved_at = self._meter.now
        rule.apply(span, PendingUpdate(pushed.number, ranks, total, (ranks,), (push.back,), age=age))
        self._meter.moved(rule.store.name, span.version)

    def _count(self, push: Counted, pushed: PushedRange, span: Span, quorum: StoreQuorum) -> None:
        """Count a push in its round, and close the round if it is complete."""
        rule, ranks, now = pushed.rule, push.ranks, self._meter.now
        round_ = span.take(ranks, pushed.number, now)
        self._meter.on_count(rule.store.name, ranks, round_.opened_at)
        round_.step = push.step
        round_.add(ranks, pushed.gradient, keep=rule.keeps_all, weight=push.weight)
        if push.back not in round_.backs:
            round_.backs += (push.back,)
        if quorum.enough <= round_.ranks:
            self.close(rule, span, quorum, now)

    # --- closing ----------------------------------------------------------------------------

    def close(self, rule: Rule, span: Span, quorum: StoreQuorum, now: float) -> None:
        """Close the rounds of ``span`` that are complete, or whose grace is over."""
        opened, required = rule.store.opened, quorum.required
        while required and span.rounds:
            oldest = span.rounds[0]
            if not required <= oldest.ranks:
                closes_at = span.closes_at(opened.quorum, opened.grace_s, now)
                if closes_at is None:
                    return
                if closes_at > now:
                    number = rule.chunk.number
                    self._closing[number] = min(self._closing.get(number, closes_at), closes_at)
                    return
            span.moved_at = now
            for part in self._close_first(rule, span, is_short=not quorum.lost <= oldest.ranks):
                self.close(rule, part, quorum, now)

    def close_all(self, rule: Rule, span: Span) -> None:
        """Close every open round of ``span`` with the contributions that it has."""
        while span.rounds:
            for part in self._close_first(rule, span):
                self.close_all(rule, part)

    def _close_first(self, rule: Rule, span: Span, *, is_short: bool = False) -> Sequence[Span]:
        """Close the oldest round of ``span``; return the spans that were split off from it."""
        closed, stop = span.rounds.popleft(), span.stop
        self._meter.on_close(rule.store.name, closed.number, closed.opened_at, is_short=is_short)
        rule.apply(span, rule.sum_up(closed))
        return list(rule.chunk.spans_in(span.stop, stop)) if span.stop < stop else ()

    def drop(self, chunks: Collection[int]) -> None:
        """Forget the chunks of a store that has ended."""
        self._closing = {number: at for number, at in self._closing.items() if number not in chunks}

    def deadline(self) -> float:
        """When :meth:`close_overdue` may have something to close; infinite for never."""
        return min(self._closing.values(), default=math.inf)

    def close_overdue(self, now: float) -> None:
        """Close the rounds whose quorum is in and whose grace is over."""
        for number in [number for number, at in self._closing.items() if at <= now]:
            del self._closing[number]
            if number not in self._chunks.by_number:
                continue  # its keys were replaced by others meanwhile
            rule = self._book.rule(number)
            quorum = self._context.quorum(rule.store)
            for span in list(rule.chunk.spans):
                self.close(rule, span, quorum, now)
        self._book.move_tables()


_ask, _range = maker(p.Ask), maker(PushedRange)
