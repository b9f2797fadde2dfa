"""The source's end of a move: the seat is copied once, and the standby takes it when it has all.

In a job without copies workers keep no push whose round is open, and nobody sends such a push again. So the
copy becomes level at a moment at which no round is open; from then on no request of a worker is carried out
here, until a view shows that the standby is gone. The next holder of the seat is sent them again: they were
not answered.

Between two steps there is such a moment. Where some rank is always ahead of another, none comes by itself: a
while after the first pass, pushes that would open a round are left unanswered until the open ones are closed.
"""

from __future__ import annotations

import math

from kvps import protocol as p
from kvps.core.effects import Hold
from kvps.core.server.replicas.primary import Replicator
from kvps.protocol.envelope import Message

PATIENCE_S, GATE_S, PAUSE_S = 2.0, 5.0, 10.0
"""How long a moment without open rounds is waited for, before none is opened any more; for how long that is
kept up, as a rank may wait for an answer; and when it is tried again."""
STILL_BYTES = 1 << 20
"""The copy becomes level once fewer are under way: calls wait until these have arrived."""


class Handover(Replicator):
    """Copies what a server holds to the next holder of its seat."""

    copies_late = True  # no round is open when the copy is level
    _gate_at = math.inf
    """From when on no round is opened."""
    _first_bytes = _said_bytes = 0
    """The bytes of the first pass, and those that were sent since."""

    def leaves(self, message: Message, now: float) -> bool:
        """Whether a worker's request is left unanswered."""
        if self.is_level and self._standby:
            return True
        if now < self._gate_at:
            return False
        if now >= self._gate_at + GATE_S:
            self._gate_at = now + PAUSE_S
            return False
        return self._opens_a_round(message)

    def replaced(self, rank: int) -> None:
        """Another process has a rank; no push that its predecessor made is missing in the copy."""

    def _begin(self) -> None:
        self._gate_at, self._said_bytes = math.inf, 0
        chunks = self._chunks.by_number.values()
        self._first_bytes = sum([chunk.used * (1 + len(chunk.state or ())) for chunk in chunks])
        super()._begin()

    def _is_calm(self) -> bool:
        return self.behind_bytes < STILL_BYTES and self._chunks.is_settled

    def _pump(self) -> None:
        is_through = self._said_bytes >= self._first_bytes
        if not is_through or self._chunks.is_settled:  # else it changes before it arrives
            super()._pump()
        is_through = not self._is_dirty or self._said_bytes >= self._first_bytes
        if is_through and self._gate_at == math.inf:
            self._gate_at = self._context.meter.now + PATIENCE_S

    def _say(self, message: Message, payload: tuple[memoryview, ...] = (), hold: Hold | None = None) -> None:
        if isinstance(message, p.CopyValues):
            self._said_bytes += message.size * (1 + len(message.fields))
        super()._say(message, payload, hold)

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
