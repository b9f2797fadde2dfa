"""Pulls on a server: when one can be answered (rounds, staleness of dist_ssp), and its payload.

A pull that cannot be answered yet is *pending* in its session as a
:class:`~kvps.core.server.sessions.PendingRead`. It waits at the first element that lacks something, and is
looked at again when that has moved. An element that once had what the pull
needs is not looked at again: so however many keys one pull names, and however often it is woken,
each is looked at once.

A read of rows waits until all pieces of their key that are here meet its conditions, whichever of them
its rows lie in: so the rows of one answer are of one version, unless the key was pushed otherwise
than by rows. The rows are copied at that moment, as a message of their own; nothing is held. An
embedding table has one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from kvps import protocol as p
from kvps.core.embedding.id_hash import Ids
from kvps.core.server.chunks.rounds import FreeSpan, Span
from kvps.core.server.chunks.slab import Chunk, Chunks
from kvps.core.server.context import RequestContext, StoreQuorum
from kvps.core.server.rules.rows import KeyRows
from kvps.core.server.rules.rule import Holds, Reply, Rule
from kvps.core.server.rules.table import TableRows
from kvps.core.server.sessions import PendingRead, Session
from kvps.core.server.store import ServerStore
from kvps.dtypes import BY_NAME
from kvps.errors import KvpsError, ProtocolError
from kvps.phrases import ranks_in_words
from kvps.protocol.envelope import maker
from kvps.tensors import to_frame

_stand = maker(p.Stand)
Asks = tuple[p.Ask, ...]
PLAIN = True, None, ()
"""Fields of a pull that wants whole values: values, call and held."""


class Answers:
    """Answers pulls, now or when what holds them up has moved.

    Args:
        context: the job's stores and sessions.
    """

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._chunks = context.chunks
        self._meter = context.meter
        self.rule: Callable[[int], Rule]
        """Returns the rule of a chunk, by its number."""

    def pull(self, session: Session, seq: int, message: p.Pull) -> None:
        """Answer with runs of a chunk, as soon as they have the asked version."""
        runs, values, call = message.runs, message.values, message.call
        chunk, read = self.rule(message.chunk).chunk, runs
        holds: Holds = self.holds
        reply: Reply = plain
        if (values, call, message.held) != PLAIN:
            check_held(message.held, runs)
            holds, read = (self.holds if call is None else _is_loaded), (runs if values else ())
            reply = self.reply_to(message.held) if values else self._tell
        chunk.validate(runs, are_whole=call is None, are_filled=call is None)
        self._meter.on_values(chunk.number, read, chunk.type.itemsize)
        again = partial(self.read, holds, reply)
        reading = PendingRead(session, seq, chunk.store, chunk.number, runs, again, values, call=call)
        again(reading, is_woken=False)

    def pull_rows(
        self,
        session: Session,
        seq: int,
        message: p.PullRows | p.PullChanged | p.PullTables,
        payload: Sequence[memoryview],
    ) -> None:
        """Answer with the rows of a key or table that are named, or that changed since a version."""
        target: KeyRows | TableRows
        ids: torch.Tensor | Ids | None = None
        if isinstance(message, p.PullTables):
            target = TableRows.of(self._chunks, message.parts)
            store = self._context.store_of(target.parts[0].chunk)
            ids = target.asked(payload)
            asks = tuple([p.Ask(0, 1, part.number, 0) for part in message.parts])
        else:
            store = self._context.store(message.store)
            target = KeyRows.of(store, message.key)
            if isinstance(message, p.PullRows):
                ids = target.ids(payload)
            asks = tuple(
                [p.Ask(piece.start, piece.size, message.after, message.least) for piece in target.pieces]
            )
        reading = session.pending[seq] = PendingRowRead(
            session, seq, store.name, target.pieces[0].chunk, asks, self._read_rows, target=target, ids=ids
        )
        if isinstance(message, p.PullChanged):
            reading.since = message.since
        elif isinstance(message, p.PullTables):
            reading.packed = message.packed
        self._read_rows(reading)

    def wake(self, woken: Iterable[PendingRead]) -> None:
        """Try reads again that waited for a span which has moved."""
        for reading in woken:
            if not self._context.is_pending(reading):
                continue
            try:
                reading.again(reading)
            except KvpsError as error:
                self._context.refuse(reading.session, reading.seq, error)

    def read(self, holds: Holds, reply: Reply, reading: PendingRead, *, is_woken: bool = True) -> bool:
        """Answer ``reading`` if its conditions hold; else let it wait at the first span that fails one.

        Args:
            holds: returns whether they hold.
            reply: answers.
            reading: the request.
            is_woken: it has waited, so that keys may have been replaced meanwhile.

        Returns:
            Whether it is answered.

        Raises:
            ProtocolError: if a key was replaced while it waited.
        """
        rule = self.rule(reading.chunk)
        session, chunk = reading.session, rule.chunk
        if not holds(reading, rule):
            session.pending[reading.seq] = reading
            chunk.wait(reading)
            return False
        if is_woken:
            chunk.validate(reading.asks, are_whole=reading.call is None)
        session.pending.pop(reading.seq, None)
        reply(session, reading.seq, rule, reading.asks)
        return True

    def holds(self, reading: PendingRead, rule: Rule) -> bool:
        """Return whether ``reading`` can be answered; if not, ``reading.at`` says where it must wait."""
        store = rule.store
        for index in range(reading.index, len(reading.asks)):
            ask = reading.asks[index]
            reading.index, reading.at = index, max(reading.at, ask.start)
            for span in rule.chunk.spans_in(reading.at, ask.start + ask.size):
                if store.ordered and span.version >= max(ask.after, ask.least):
                    continue
                reading.at = max(reading.at, span.start)
                if why_unreadable(store, span, ask, reading, self._context.quorum(store)):
                    return False
        return True

    # --- answers --------------------------------------------------------------------------------

    def reply_to(self, held: tuple[int, ...]) -> Reply:
        """Return what answers a read whose sender holds these versions of the asked values, or none."""
        return partial(self._lead, held) if held else plain

    def whole(self, session: Session, seq: int, rule: Rule, asks: Asks, *beside: Any) -> None:
        """Answer with the values, and with ``beside`` as the last fields of the answer."""
        chunk, hold = rule.chunk, None
        itemsize = chunk.type.itemsize
        if len(asks) == 1 or all(ask.start + ask.size == other.start for ask, other in pairwise(asks)):
            hold, last = chunk.buffer, asks[-1]
            hold.holds += 1
            frame = hold.octets[asks[0].start * itemsize : (last.start + last.size) * itemsize]
        else:
            weight = chunk.buffer.tensor
            frame = to_frame(torch.cat([weight[ask.start : ask.start + ask.size] for ask in asks]))
        stands = _stands(session, chunk, asks)
        answer = p.Pulled(seq, chunk.number, chunk.type.id, True, stands, *beside)
        self._context.send(session, answer, (frame,), hold)

    def watched(self, session: Session, seq: int, rule: Rule, asks: Asks) -> None:
        """Answer with the values where something depends on who has read what, or is told with them."""
        dropped, due = self._watch(session, rule, asks), self.due(session, rule, asks)
        self.whole(session, seq, rule, asks, dropped, (), False, due)

    def _lead(self, held: tuple[int, ...], session: Session, seq: int, rule: Rule, asks: Asks) -> None:
        """Answer by steps from the versions that the worker holds, where there are some."""
        chunk, store = rule.chunk, rule.store
        dropped = self._watch(session, rule, asks) if store.watches_reads else ()
        stands, adds, due = _stands(session, chunk, asks), False, self.due(session, rule, asks)
        is_apart = any(ask.start + ask.size != other.start for ask, other in pairwise(asks))
        # One who reads values where they lie saves nothing by steps.
        if is_apart or not self._chunks.memory.lends(session.route, (chunk.buffer.tensor,)):
            adds = store.updater is not None
            steps, octets = _steps(chunk, asks, held, stands)
            if steps:
                size = sum([ask.size for ask in asks]) * chunk.type.itemsize
                self._meter.compressed("out", octets.nbytes, size)
                answer = p.Pulled(seq, chunk.number, chunk.type.id, True, stands, dropped, steps, adds, due)
                self._context.send(session, answer, (to_frame(octets),))
                return
        self.whole(session, seq, rule, asks, dropped, (), adds, due)

    def due(self, session: Session, rule: Rule, asks: Asks | Sequence[p.Run]) -> int:
        """Return the version at which no open round has a push of this rank; 0 if pushes' numbers say it."""
        if not rule.store.counts_late or not self._context.member.seat.replicas:
            return 0
        spans = [span for start, size, *_ in asks for span in rule.chunk.spans_in(start, start + size)]
        return max([span.due_of(session.rank) for span in spans])

    def _tell(self, session: Session, seq: int, rule: Rule, asks: Asks) -> None:
        """Answer with versions alone."""
        chunk = rule.chunk
        answer = p.Pulled(seq, chunk.number, chunk.type.id, False, _stands(session, chunk, asks))
        self._context.send(session, answer)

    def _watch(self, session: Session, rule: Rule, asks: Asks) -> tuple[p.Dropped, ...]:
        """Note what is read, for rules that depend on it; return the updates of the asked elements that were
        dropped, for workers that raise them."""
        rank, store, chunk, updater = session.rank, rule.store, rule.chunk, rule.store.updater
        if updater is not None and updater.tracks_pulls and chunk.type.kind != "int":
            state = store.state_of(chunk)
            for ask in asks:
                updater.pulled(chunk.buffer.tensor, state, ask.start, ask.start + ask.size, rank)
        for stand in () if store.ordered else _stands(session, chunk, asks):
            self._meter.read(rank, chunk.number, stand.start, stand.version)
        if store.drops is None:
            return ()
        return store.drops.among(chunk.number, None if store.ordered else rank, asks)

    def _read_rows(self, reading: PendingRowRead) -> None:
        """Answer a request for rows, or let it wait at the first piece that lacks something."""
        store, session = self._context.stores[reading.store], reading.session
        quorum = self._context.quorum(store)
        spans, pieces = reading.target.spans(self._chunks), reading.target.pieces
        while reading.index < len(reading.asks):
            ask, span = reading.asks[reading.index], spans[reading.index]
            if not store.ordered or span.version < ask.after or span.version < ask.least:
                reading.chunk, reading.at = pieces[reading.index].chunk, pieces[reading.index].start
                if why_unreadable(store, span, ask, reading, quorum):
                    self._chunks.by_number[reading.chunk].wait(reading)
                    return
            reading.index += 1
        del session.pending[reading.seq]
        answer, frames = read_rows(store, self._chunks, reading)
        self._meter.on_rows(pieces[0], frames)
        for span, piece in () if store.ordered else zip(spans, pieces, strict=True):
            self._meter.read(session.rank, piece.chunk, span.start, span.version)
        self._context.send(session, answer, tuple([to_frame(frame) for frame in frames]))


def plain(session: Session, seq: int, rule: Rule, asks: Asks) -> None:
    """Answer a read of whole values, as the rule of the chunk has it by then."""
    rule.reply(session, seq, rule, asks)


def _is_loaded(reading: PendingRead, rule: Rule) -> bool:
    """Return whether the value of ``reading.call`` is loaded in all that ``reading`` asks for.

    All is looked at each time: the value may have been begun anew, by another life of its creator.
    """
    store, chunk, call = rule.store, rule.chunk, reading.call
    assert call is not None
    chunk.validate(reading.asks, are_whole=False)
    for index, ask in enumerate(reading.asks):
        at = store.lacks(chunk, ask.start, ask.start + ask.size, call)
        if at is not None:
            reading.index, reading.at = index, at
            return False
    return True


def _stands(session: Session, chunk: Chunk, asks: Asks) -> tuple[p.Stand, ...]:
    """Return the versions of what is asked for, span by span, and the pushes that the asker owes."""
    found: list[p.Stand] = []
    for start, size, _, _ in asks:
        stop = start + size
        for span in chunk.spans if len(chunk.spans) == 1 else chunk.spans_in(start, stop):
            begin, end = max(span.start, start), min(span.stop, stop)
            found.append(_stand((begin, end - begin, span.version, span.owed(session.rank))))
    return tuple(found)


def why(
    store: ServerStore,
    chunk: Chunk,
    reading: PendingRead,
    quorum: StoreQuorum,
    describe: Callable[[int], str] = lambda rank: "",
) -> str:
    """Return a text that says for which ranks ``reading`` waits; ``describe`` describes a rank."""
    span = next(chunk.spans_in(reading.at, reading.at + 1))
    key, _, _ = next(chunk.pieces(reading.at, reading.at + 1))
    if reading.call is not None:
        creator = store.shards[key].loading[1][0]
        return f"key {key[:64]!r}: {ranks_in_words([creator], describe)} has not loaded all of its value"
    ask = reading.asks[reading.index]
    missing = why_unreadable(store, span, ask, reading, quorum, describe)
    return f"key {key[:64]!r}: {missing}"


def why_unreadable(
    store: ServerStore,
    span: Span,
    ask: p.Ask,
    reading: PendingRead,
    quorum: StoreQuorum,
    describe: Callable[[int], str] = lambda rank: "",
) -> str:
    """Return why ``span`` cannot be read yet: a round, a push, or the staleness bound; empty if it can.

    A span of an ordered store is known to be behind: the caller has compared versions.
    """
    rank = reading.session.rank
    if not isinstance(span, FreeSpan):
        if span.due:
            if span.due[0].step is not None:
                return (
                    f"round {span.version} waits for the norm of its step: for pushes of the step's other "
                    "keys, or for a sum of another server"
                )
            what = "the norms" if store.drops is None else "word, if it is finite,"
            return f"round {span.version} waits for {what} of other servers"
        missing = span.missing(quorum.required)
        ranks = ranks_in_words(missing, describe) if missing else "rank none that is left"
        return f"round {span.version} waits for a push of {ranks}"
    if span.version < ask.least:
        return f"it is at version {span.version}, and version {ask.least} was requested"
    if span.applied(rank) < ask.after:
        return f"{span.applied(rank)} of {ask.after} pushes of rank {rank} are applied"
    # Only values are stale. Who asks which pushes it owes may be the one for whose push others wait.
    is_bounded = store.opened.mode == "ssp" and reading.values
    ahead = span.ahead(rank, quorum.live) if is_bounded else 0
    if ahead > store.opened.staleness:
        slowest = ranks_in_words([span.slowest(quorum.live)], describe)
        return (
            f"rank {rank} is {ahead} pushes ahead of {slowest}, and staleness allows {store.opened.staleness}"
        )
    return ""


def check_held(held: Sequence[int], runs: Sequence[p.Ask] | Sequence[p.Run]) -> None:
    """Check that a request says of all of its runs, or of none, which version its sender has.

    Raises:
        ProtocolError: if it does not.
    """
    if held and len(held) != len(runs):
        raise ProtocolError(f"{len(runs)} runs, and versions held of {len(held)} of them")


def _steps(
    chunk: Chunk, asks: Asks, has: tuple[int, ...], stands: tuple[p.Stand, ...]
) -> tuple[tuple[p.Steps, ...], torch.Tensor]:
    """Return the steps from the versions that the worker holds to the asked values, and their bytes.

    As they are, where there are no steps from those, or a span ends within what was asked for.
    Nothing is returned if that is so of all.
    """
    steps: list[p.Steps] = []
    octets: list[torch.Tensor] = []
    held = dict(zip([(ask.start, ask.size) for ask in asks], has, strict=True))
    for stand in stands:
        missing = None
        if chunk.back is not None and (stand.start, stand.size) in held:
            version = held[stand.start, stand.size]
            missing = chunk.back.lead(stand.start, stand.size, stand.version, version)
        if missing is None:
            weight = chunk.buffer.tensor[stand.start : stand.start + stand.size]
            steps.append(p.Steps(True, ()))
            octets.append(weight.view(torch.uint8))
        else:
            steps.append(p.Steps(False, tuple([code for code, _ in missing])))
            octets += [encoded for _, encoded in missing]
    if all(step.whole for step in steps):
        return (), torch.empty(0)
    return tuple(steps), torch.cat([*octets, torch.empty(0, dtype=torch.uint8)])


# --- rows -------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, kw_only=True)
class PendingRowRead(PendingRead):
    """A request for some rows of a key or of an embedding table.

    It has one ask for each piece of the rows, and ``chunk`` is where the piece lies at which it waits.
    """

    target: KeyRows | TableRows
    ids: torch.Tensor | Ids | None
    """Numbers of rows as ``target`` has them; None for those that changed."""
    since: int = 0
    """The version since which changed rows are asked for."""
    packed: bool = False
    """Rows of a table are answered as a scale and an int8 for each element."""


def read_rows(
    store: ServerStore, chunks: Chunks, reading: PendingRowRead
) -> tuple[p.PulledRows | p.Changed | p.PulledTables, tuple[torch.Tensor, ...]]:
    """Return the answer and, if there are any, the frames of the rows that go with it, flat.

    Before the rows come their numbers in the key, where the asker has not named them.
    """
    rank, target, ids = reading.session.rank, reading.target, reading.ids
    if isinstance(target, TableRows):
        assert isinstance(ids, np.ndarray)
        return target.read(chunks, reading.seq, rank, ids, packs=reading.packed)
    spans = target.spans(chunks)
    versions = [span.version for span in spans]
    owed = min([span.owed(rank) for span in spans])
    seq, dtype, width = reading.seq, BY_NAME[target.shard.spec.dtype].id, target.width
    dropped: list[p.Dropped] = []
    if store.drops is not None:
        whose = None if store.ordered else rank
        for piece, ask in zip(target.pieces, reading.asks, strict=True):
            dropped += store.drops.among(piece.chunk, whose, (ask,))
    stand = (
        *(min(versions), max(versions), owed),
        tuple(dropped[:1]),  # updates of a key are dropped on all of its pieces, or on none
    )
    if isinstance(ids, torch.Tensor):
        answer = p.PulledRows(seq, dtype, width, len(ids), *stand)
        return answer, _rows(store, chunks, target, ids, rank)
    ids = target.changed(chunks, reading.since)
    if ids is None or len(ids) > p.rows_in_message(dtype, width):
        return p.Changed(seq, False, dtype, width, 0, *stand), ()
    rows = _rows(store, chunks, target, ids, rank)
    changed = p.Changed(seq, True, dtype, width, len(ids), *stand)
    return changed, (target.ranges.numbers(ids), *rows) if rows else ()


def _rows(
    store: ServerStore, chunks: Chunks, target: KeyRows, ids: torch.Tensor, rank: int
) -> tuple[torch.Tensor, ...]:
    """Return the rows ``ids`` as the frames of an answer, and note that they are read."""
    _note(store, chunks, target, ids, rank)
    each = p.rows_in_frame(BY_NAME[target.shard.spec.dtype].id, target.width) * target.width
    return torch.split(target.read(chunks, ids), each) if len(ids) else ()


def _note(store: ServerStore, chunks: Chunks, target: KeyRows, ids: torch.Tensor, rank: int) -> None:
    """Report the rows that are read to a rule that tracks pulls."""
    updater, width = store.updater, target.width
    if updater is None or not updater.tracks_pulls or BY_NAME[target.shard.spec.dtype].kind == "int":
        return
    for piece, first, some in target.places(ids):
        chunk = chunks.by_number[piece.chunk]
        state = store.state_of(chunk)
        for row in (ids[some] - first).tolist():
            start = piece.start + row * width
            updater.pulled(chunk.buffer.tensor, state, start, start + width, rank)
