"""Pushes, loads and pulls on a server, and the moment when each is answered.

Pushes and pulls come for chunks, for rows of a key, or for ids of an embedding table; what happens to
them is one and the same (:mod:`kvps.core.server.update.aggregator`). A pull that cannot be answered yet is *pending* in its
session as a :class:`~kvps.core.server.sessions.PendingRead`, and looked at again when what holds it up has moved.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvps.compression import spec
from kvps.compression.codecs import decode
from kvps.core.effects import Effects, Send
from kvps.core.gradients import DenseGradient
from kvps.core.server import reads, row_reads
from kvps.core.server.chunks.rounds import Verdict
from kvps.core.server.chunks.slab import Chunk
from kvps.core.server.context import RequestContext
from kvps.core.server.row_reads import PendingRowRead
from kvps.core.server.sessions import PendingRead, PendingTableRead, Session
from kvps.core.server.store import ServerStore
from kvps.core.server.update import embedding_rows
from kvps.core.server.update.global_norms import NormId, PartialNorms, PartialSums
from kvps.core.server.update.key_rows import KeyRows
from kvps.dtypes import BY_ID, BY_NAME
from kvps.errors import (
    KvpsError,
    Mismatch,
)
from kvps.protocol.envelope import Message, Packet
from kvps.protocol.stores import Declared, Norms, Place
from kvps.protocol.values import (
    Ack,
    Ask,
    Embed,
    Export,
    Load,
    Pull,
    PullChanged,
    Pulled,
    PulledIds,
    PullIds,
    PullRows,
    Push,
    PushIds,
    PushRows,
    Receipt,
    Steps,
    rows_in_frame,
)
from kvps.tensors import to_frame


class PushPull(RequestContext):
    """Takes in gradients, and answers those who want values."""

    def _push(
        self, session: Session, seq: int, message: Push, packet: Packet, now: float
    ) -> Effects:
        space = self._space_of(message.chunk)
        chunk = self.engine.chunk(message.chunk)
        gradient = self._gradient(chunk, message, packet)
        verdict, woken = self.engine.push(
            space, message, gradient, self._quorum(space), now, lent=_is_lent(packet)
        )
        if verdict is Verdict.EARLY:
            return  # not taken in: the worker will probe, and send it again
        reading = None
        if message.pull:
            asks = tuple(Ask(run.start, run.size, run.number + 1, 0) for run in message.runs)
            reading = PendingRead(session, seq, space.name, chunk.number, True, asks, message.held)
            session.pending[seq] = reading
        yield from self._wake(woken)
        yield from self._tell_norms()
        if reading is not None:
            yield from self._read(reading)
            if not reading.is_pending or _is_lent(packet):
                return  # no window waits for the receipt of what is lent; its values will do
        version = min(
            span.version
            for run in message.runs
            for span in chunk.spans_in(run.start, run.start + run.size)
        )
        yield self._send(session, Ack((Receipt(seq, version),)))

    def _pull(self, session: Session, seq: int, message: Pull) -> Effects:
        space = self._space_of(message.chunk)
        chunk = self.engine.chunk(message.chunk)
        chunk.validate(message.runs, are_whole=message.call is None)
        if message.call is None:
            chunk.check_filled(message.runs)
        reads.check_held(message.held, message.runs)
        reading = PendingRead(
            session, seq, space.name, chunk.number, message.values, message.runs, message.held
        )
        reading.call = message.call
        session.pending[seq] = reading
        yield from self._read(reading)

    def _push_ids(
        self, session: Session, seq: int, message: PushIds, packet: Packet, now: float
    ) -> Effects:
        space = self._space_of(message.chunk)
        chunk = self.engine.chunk(message.chunk)
        server, servers = self.engine.server, self.engine.servers
        gradient = embedding_rows.gradient_of(chunk, message, packet.payload, server, servers)
        verdict, woken = self.engine.push_ids(space, message, gradient, self._quorum(space), now)
        if verdict is Verdict.EARLY:
            return  # as with any push
        if verdict is Verdict.COUNTED:
            space.check_growth(chunk.keys[0])
        yield from self._wake(woken)
        (span,) = chunk.spans
        yield self._send(session, Ack((Receipt(seq, span.version),)))

    def _pull_ids(self, session: Session, seq: int, message: PullIds, packet: Packet) -> Effects:
        space = self._space_of(message.chunk)
        chunk = self.engine.chunk(message.chunk)
        server, servers = self.engine.server, self.engine.servers
        ids = embedding_rows.asked_ids(chunk, message, packet.payload, server, servers)
        asks = (Ask(0, 1, message.after, message.least),)
        reading = PendingTableRead(session, seq, space.name, chunk.number, True, asks, ids=ids)
        session.pending[seq] = reading
        yield from self._read(reading)

    def _push_rows(
        self, session: Session, seq: int, message: PushRows, packet: Packet, now: float
    ) -> Effects:
        space = self._space(message.store)
        table = KeyRows.of(space, message.key)
        gradient = table.gradient(message, packet.payload)
        verdict, woken = self.engine.push_rows(
            space, table, message, gradient, self._quorum(space), now, lent=bool(packet.loans)
        )
        if verdict is Verdict.EARLY:
            return  # as a PUSH
        yield from self._wake(woken)
        yield from self._tell_norms()
        spans = [self.engine.span_at(piece) for piece in table.shard.pieces]
        version = min([span.version for span in spans])
        yield self._send(session, Ack((Receipt(seq, version),)))

    def _pull_rows(self, session: Session, seq: int, message: PullRows, packet: Packet) -> Effects:
        space = self._space(message.store)
        table = KeyRows.of(space, message.key)
        ids = table.ids(packet.payload[0] if packet.payload else None)
        reading = PendingRowRead.of(session, seq, message, table, ids)
        session.pending[seq] = reading
        yield from self._read(reading)

    def _pull_changed(self, session: Session, seq: int, message: PullChanged) -> Effects:
        space = self._space(message.store)
        reading = PendingRowRead.of(session, seq, message, KeyRows.of(space, message.key))
        session.pending[seq] = reading
        yield from self._read(reading)

    def _read_rows(self, reading: PendingRowRead) -> Effects:
        """Answer a request for rows, or let it wait at the first piece that lacks something."""
        space, session, chunks = self.spaces[reading.store], reading.session, self.engine.chunks
        if not row_reads.holds(space, chunks, reading, self._quorum(space)):
            chunks.by_number[reading.chunk].wait(reading)
            return
        del session.pending[reading.seq]
        answer, found = row_reads.read(space, chunks, reading)
        each = rows_in_frame(answer.dtype, answer.width) * answer.width
        frames = (*found[:-1], *(torch.split(found[-1], each) if found else ()))
        payload = tuple([to_frame(one) for one in frames])
        yield Send(session.route, Packet(self.member.envelope(), answer, payload))

    def _read(self, reading: PendingRead) -> Effects:
        """Answer ``reading`` if its conditions hold; else let it wait at what holds it up."""
        if not reading.is_pending:
            return
        if isinstance(reading, PendingRowRead):
            yield from self._read_rows(reading)
            return
        space, session = self.spaces[reading.store], reading.session
        try:
            chunk = self.engine.chunk(reading.chunk)
            if not reads.holds(space, chunk, reading, self._quorum(space)):
                chunk.wait(reading)
                return
        except KvpsError as error:
            yield self._refuse(session, reading.seq, error)
            return
        del session.pending[reading.seq]
        if isinstance(reading, PendingTableRead):
            yield self._rows(space, chunk, reading)
            return
        stands, values, hold = reads.read(space, chunk, reading)
        steps: tuple[Steps, ...] = ()
        adds = False
        if values is not None and reading.held and not self._is_lent_to(session, values):
            adds = space.updater is not None
            steps, octets = reads.lead(chunk, reading, stands)
            if steps:
                values, hold = octets, None
        answer = Pulled(
            reading.seq,
            chunk.number,
            BY_NAME[chunk.dtype].id,
            values is not None,
            stands,
            reads.dropped(space, chunk, reading),
            steps,
            adds,
        )
        payload = () if values is None else (to_frame(values),)
        packet = Packet(self.member.envelope(), answer, payload)
        yield Send(session.route, packet, hold)

    def _is_lent_to(self, session: Session, values: torch.Tensor) -> bool:
        """Return whether the peer reads ``values`` in place; compressed deltas then save nothing."""
        return self.engine.memory.lends(session.route, (values,))

    def _rows(self, space: ServerStore, chunk: Chunk, reading: PendingTableRead) -> Send:
        """Answer a request for rows."""
        rows, (span,) = embedding_rows.embedding_of(chunk), chunk.spans
        recipe, count = rows.recipe, len(reading.ids)
        owed = span.owed(reading.session.rank, space.ordered)
        answer = PulledIds(
            reading.seq, BY_NAME[recipe.dtype].id, recipe.dim, count, span.version, owed
        )
        payload = (to_frame(rows.pull(reading.ids).view(-1)),) if count else ()
        return Send(reading.session.route, Packet(self.member.envelope(), answer, payload))

    def _embed(self, seq: int, message: Embed) -> Message:
        space = self._space(message.store)
        recipe = embedding_rows.recipe_of(message)
        piece = embedding_rows.embed(
            space, message.key, recipe, self.engine.server, self.engine.servers
        )
        return Declared(seq, (Place(False, (piece,)),))

    def _export(self, session: Session, seq: int, message: Export) -> Send:
        answer, payload = embedding_rows.exported(seq, self.engine.chunk(message.chunk), message)
        return Send(session.route, Packet(self.member.envelope(), answer, payload))

    def _wake(self, woken: Iterable[PendingRead]) -> Effects:
        """Look again at those who waited for what has moved."""
        for reading in woken:
            yield from self._read(reading)

    def _load(self, session: Session, seq: int, message: Load, packet: Packet) -> Effects:
        space = self._space_of(message.chunk)
        chunk = self.engine.chunk(message.chunk)
        if BY_ID[message.dtype].name != chunk.dtype:
            raise Mismatch(
                f"chunk {chunk.number} holds {chunk.dtype}, loaded was {BY_ID[message.dtype].name}"
            )
        values = DenseGradient.of(packet.payload, message.dtype).joined()
        became_ready = space.load(chunk, message, values, session.rank)
        if became_ready is None:
            return  # as a PUSH that is early
        yield self._send(session, Ack((Receipt(seq, 0),)))
        for run in message.runs:
            yield from self._wake(chunk.woken(run.start, run.start + run.size))
        if became_ready:
            yield from self._retry()

    def _gradient(self, chunk: Chunk, message: Push, packet: Packet) -> DenseGradient:
        """Return what was pushed, decompressed if need be.

        Raises:
            Mismatch: if it was compressed, and the chunk holds what cannot be.
            ProtocolError: if its bytes cannot mean it.
        """
        reads.check_held(message.held, message.runs)
        if message.code is None:
            return DenseGradient.of(packet.payload, message.dtype)
        chunk.validate(message.runs)  # a few octets may say very many elements
        if chunk.dtype != "float32":
            raise Mismatch(
                f"chunk {chunk.number} holds {chunk.dtype}, and only float32 is compressed"
            )
        octets = DenseGradient.of(packet.payload, BY_NAME["uint8"].id).joined()
        gradient = torch.empty(sum([run.size for run in message.runs]))
        begin = at = 0
        for run in message.runs:
            end = begin + spec.size(message.code, run.size)
            decode(message.code, octets[begin:end], gradient[at : at + run.size])
            begin, at = end, at + run.size
        return DenseGradient([gradient])

    # --- norms of whole tensors -----------------------------------------------------------------------

    def norms(self, message: Norms, server: int) -> Effects:
        """Another server told its sums of squares, or asked for ours.

        Raises:
            KvpsError: if there is no such update; nothing was changed.
        """
        space = self._space(message.store)
        shard = space.shards.get(message.key)
        if shard is not None and shard.born != message.call:
            return  # another key of this name; who holds the newer one tells again
        number = (message.store, message.key, message.rank, message.number)
        ours = self.engine.told(space, number, len(message.sums))
        woken = self.engine.hear(space, number, server, PartialSums(message.sums, message.culprits))
        yield from self._wake(woken)
        if message.reply and ours.sums:
            yield from self._norms(number, ours, server, reply=False)
        yield from self._tell_norms()

    def _tell_norms(self) -> Effects:
        """Tell the sums that were just completed here, and the log of updates that were dropped."""
        for norm in self.engine.untold():
            yield from self._tell(norm, norm.holders)
        for space in self.spaces.values():
            if space.drops is not None:
                yield from space.drops.report()

    def look_at_drops(self) -> Effects:
        """Say which updates were dropped since the last line about that; called now and then."""
        for space in self.spaces.values():
            if space.drops is not None:
                yield from space.drops.look()

    def tell_again(self) -> Effects:
        """Tell the sums again to those who may have missed them, and ask for theirs."""
        for norm in self.engine.norms.values():
            yield from self._tell(norm, norm.unheard)

    def _tell(self, norm: PartialNorms, servers: Iterable[int]) -> Effects:
        for server in sorted(servers):
            yield from self._norms(norm.id, norm.told, server, reply=server in norm.unheard)

    def _norms(self, number: NormId, told: PartialSums, server: int, reply: bool) -> Effects:
        """Tell one server; not before a view has named it, as there is no way to it."""
        if self.member.view is None:
            return
        store, key, _, _ = number
        born = self.spaces[store].shards[key].born
        message = Norms(*number, told.sums, reply, told.culprits, born)
        yield Send(f"server {server}", self.member.packet(message))


def _is_lent(packet: Packet) -> bool:
    """Whether a gradient is its sender's memory: what was decompressed is not."""
    message = packet.message
    return bool(packet.loans) and isinstance(message, Push) and message.code is None
