"""The source's end of a move: the seat is copied once, and the standby takes it when it has all.

In a job without copies workers keep no push whose round is open, and nobody sends such a push again. So the
copy becomes level at a moment at which no round is open; from then on no request of a worker is carried out
here, until a view shows that the standby is gone.

What each step changes would be old before it arrives. So what lies still is copied first, while workers
train. What moves is copied *last*, and once: when a round has closed and none is open. From then on pushes
that would open a round are left unanswered until the next holder of the seat has all.

Where some rank is always ahead of another, no such moment comes by itself: a while after the first pass,
pushes that would open a round are left unanswered until the open ones are closed.
"""

from __future__ import annotations

import math

from kvps import protocol as p
from kvps.core.embedding.table import EmbeddingRows
from kvps.core.server.chunks.rounds import Span
from kvps.core.server.chunks.slab import Chunk
from kvps.core.server.replicas.primary import Replicator
from kvps.protocol.envelope import Message

RECENT_S = 10.0
"""Values that have changed less long ago are expected to change again before they arrive."""
PATIENCE_S, GATE_S, PAUSE_S = 2.0, 5.0, 10.0
"""How long a moment without open rounds is waited for, before none is opened any more; for how long that is
kept up while nothing is copied, as a rank may wait for an answer; and when it is tried again."""
STILL_BYTES = 1 << 20
"""The copy becomes level once fewer are under way: calls wait until these have arrived."""


class Handover(Replicator):
    """Copies what a server holds to the next holder of its seat."""

    _gate_at = math.inf
    """From when on no round is opened; infinite before all that lies still was sent."""

    def leaves(self, message: Message, now: float) -> bool:
        """See :meth:`Replicator.leaves`; all are, once the next holder has what this server has."""
        if self.is_level and self._standby:
            return True
        if now < self._gate_at:
            return False
        heard_at = self._heard_at if self._chunks.is_settled else 0.0  # else nothing that waits is copied
        if now >= max(self._gate_at, heard_at) + GATE_S:
            self._gate_at = now + PAUSE_S
            return False
        return self._opens_a_round(message)

    def replaced(self, rank: int) -> None:
        """Another process has a rank; no push that its predecessor made is missing in the copy."""

    def _forget_copy(self) -> None:
        super()._forget_copy()
        self._gate_at = math.inf
        self._moving: dict[int, dict[tuple[int, int], bool]] = {}
        """As ``_ranges``: what has changed, and is copied last."""

    @property
    def _is_dirty(self) -> bool:
        return super()._is_dirty or bool(self._moving)

    def _is_calm(self) -> bool:
        return self.behind_bytes < STILL_BYTES and self._chunks.is_settled

    def _pump(self) -> None:
        now = self._context.meter.now
        has_changed = bool(self._ranges) and self._gate_at < math.inf
        if (has_changed or now >= self._gate_at) and self._chunks.is_settled:
            self._gate_at = min(self._gate_at, now)
            for number, ranges in self._moving.items():
                self._ranges.setdefault(number, {}).update(ranges)
            self._moving.clear()
        super()._pump()
        if not self._ranges and self._gate_at == math.inf:
            self._gate_at = now + PATIENCE_S

    def _moves(self, span: Span) -> bool:
        """Whether a span is likely to change before what is sent of it arrives."""
        now = self._context.meter.now
        if now >= self._gate_at and self._chunks.is_settled:
            return False
        return span.moved_at is not None and now - span.moved_at < RECENT_S

    def _copy_values(self, chunk: Chunk, start: int, stop: int) -> None:
        for span in list(chunk.spans_in(start, stop)):
            if self._moves(span):
                self._moving.setdefault(chunk.number, {})[span.start, span.stop] = True
            else:
                super()._copy_values(chunk, max(span.start, start), min(span.stop, stop))

    def _copy_table(self, chunk: Chunk, table: EmbeddingRows) -> None:
        changes = self._tables.get(chunk.number)
        if changes is None or changes.rest or not self._moves(chunk.spans[0]):
            super()._copy_table(chunk, table)
        else:
            self._moving[chunk.number] = {(0, 1): True}

    def _copy_published(self) -> None:
        if not self._moving:  # a block may be what its chunk has
            super()._copy_published()

    def _opens_a_round(self, message: Message) -> bool:
        """Whether a push belongs to no open round, or is of a store without rounds."""
        by_number = self._chunks.by_number
        pushed: list[tuple[int, int, int, int]] = []
        match message:
            case p.Push():
                pushed = [(message.chunk, start, size, number) for start, size, number in message.runs]
            case p.PushTables():
                pushed = [(part.chunk, 0, 1, part.number) for part in message.parts]  # a table is one span
            case p.PushRows():
                shard = self._context.store(message.store).shards.get(message.key)
                pieces = () if shard is None else shard.pieces
                pushed = [(*piece, message.number) for piece in pieces]
            case _:
                return False
        return any(
            not self._context.store_of(chunk).ordered
            or any(
                number >= span.version + len(span.due) + len(span.rounds)
                for span in by_number[chunk].spans_in(start, start + size)
            )
            for chunk, start, size, number in pushed
            if chunk in by_number
        )
