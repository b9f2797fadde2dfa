"""Pushes, loads and pulls on a server, and the moment when each is answered.

Pushes and pulls come for chunks, or for rows of a key or of an embedding table; what happens to
them is one and the same (:mod:`kvps.core.server.ingest`;
:mod:`kvps.core.server.chunks.rounds` recognises duplicates). A pull that cannot be answered yet is
*pending* in its session as a :class:`~kvps.core.server.sessions.PendingRead`, and looked at again
when what holds it up has moved.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvps import protocol as p
from kvps.compression import spec
from kvps.compression.codecs import decode
from kvps.core.effects import Send
from kvps.core.gradients import DenseGradient
from kvps.core.membership_client import Quorum
from kvps.core.row_gradients import RowGradient
from kvps.core.server import answer as reads
from kvps.core.server.answer import PendingRowRead
from kvps.core.server.chunks.rounds import Verdict
from kvps.core.server.chunks.slab import Chunk
from kvps.core.server.context import RequestContext
from kvps.core.server.ingest import Aggregator, JudgedPush
from kvps.core.server.rules import table as embedding_rows
from kvps.core.server.rules.rows import KeyRows
from kvps.core.server.rules.table import TableRows
from kvps.core.server.rules.whole_tensor import NormId, PartialNorms, PartialSums
from kvps.core.server.sessions import PendingRead, Session
from kvps.core.server.store import ServerStore
from kvps.dtypes import BY_ID, BY_NAME
from kvps.errors import KvpsError, Mismatch
from kvps.protocol.envelope import Message, Packet
from kvps.tensors import to_frame


class PushPull:
    """Accepts gradients, and answers requests for values.

    Args:
        context: the job's stores and sessions.
        workers: how many ranks may push.
        threads: how many compute.
    """

    def __init__(self, context: RequestContext, workers: int, threads: int = 1) -> None:
        self._context = context
        self._chunks = context.chunks
        self.aggregator = Aggregator(context.chunks, workers, self.wake, threads, context.tally)

    def _apply(self, judged: JudgedPush, now: float) -> None:
        """Apply a push, and answer the requests that waited for it."""
        self.aggregator.apply(judged, self._context.quorum(judged.store), now)
        self.tell_norms()

    def close_overdue(self, now: float) -> None:
        """Close the rounds whose quorum is in and whose grace is over."""
        context = self._context

        def quorum_of(name: str) -> tuple[ServerStore, Quorum]:
            store = context.stores[name]
            return store, context.quorum(store)

        self.aggregator.close_overdue(quorum_of, now)
        self.tell_norms()

    def _count(self, judged: JudgedPush, packet: Packet) -> None:
        """Count a push by its verdict and by the ranks that it speaks for."""
        tally = self._context.tally
        tally.counts.add("kvps_pushes_total", judged.verdict.value)
        if judged.verdict is Verdict.COUNTED:
            tally.pushed(judged.ranks, sum([frame.nbytes for frame in packet.payload]))

    def _acknowledge(self, session: Session, seq: int, version: int) -> None:
        self._context.send(session, p.Ack((p.Receipt(seq, version),)))

    # --- whole keys -------------------------------------------------------------------------

    def push(self, session: Session, seq: int, message: p.Push, packet: Packet, now: float) -> None:
        """Take in gradients for runs of a chunk."""
        chunk, store = self._chunks.at(message.chunk), self._context.store_of(message.chunk)
        gradient = self._gradient(chunk, message, packet)
        is_lent = bool(packet.loans) and message.code is None  # what was decompressed is ours
        judged = self.aggregator.judge(store, message, gradient, is_lent=is_lent)
        self._count(judged, packet)
        if judged.verdict is Verdict.EARLY:
            return  # not taken in: the worker will probe, and send it again
        itemsize = BY_NAME[chunk.dtype].itemsize
        self._context.tally.traffic(chunk.number, message.runs, itemsize)
        if message.code is not None:
            size = sum([frame.nbytes for frame in packet.payload])
            self._context.tally.compressed("in", size, len(gradient) * itemsize)
        reading = None
        if message.pull:
            asks = tuple(p.Ask(run.start, run.size, run.number + 1, 0) for run in message.runs)
            reading = PendingRead(session, seq, store.name, chunk.number, True, asks, message.held)
            session.pending[seq] = reading
        self._apply(judged, now)
        if reading is not None:
            self._read(reading)
            if not self._context.is_pending(reading) or is_lent:
                return  # no window waits for the receipt of what is lent; its values will do
        version = min(
            span.version for run in message.runs for span in chunk.spans_in(run.start, run.start + run.size)
        )
        self._acknowledge(session, seq, version)

    def _gradient(self, chunk: Chunk, message: p.Push, packet: Packet) -> DenseGradient:
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
            raise Mismatch(f"chunk {chunk.number} holds {chunk.dtype}, and only float32 is compressed")
        octets = DenseGradient.of(packet.payload, BY_NAME["uint8"].id).joined()
        gradient = torch.empty(sum([run.size for run in message.runs]), dtype=torch.float32)
        begin = at = 0
        for run in message.runs:
            end = begin + spec.size(message.code, run.size)
            decode(message.code, octets[begin:end], gradient[at : at + run.size])
            begin, at = end, at + run.size
        return DenseGradient([gradient])

    def pull(self, session: Session, seq: int, message: p.Pull) -> None:
        """Answer with runs of a chunk, as soon as they are what is asked for."""
        chunk, store = self._chunks.at(message.chunk), self._context.store_of(message.chunk)
        chunk.validate(message.runs, are_whole=message.call is None)
        if message.call is None:
            chunk.check_filled(message.runs)
        reads.check_held(message.held, message.runs)
        reading = PendingRead(
            session, seq, store.name, chunk.number, message.values, message.runs, message.held
        )
        reading.call = message.call
        self._wait(reading)

    def load(self, session: Session, seq: int, message: p.Load, packet: Packet) -> None:
        """Take in values of keys that were declared."""
        chunk, store = self._chunks.at(message.chunk), self._context.store_of(message.chunk)
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
            self.wake(chunk.woken(run.start, run.start + run.size))
        if became_ready:
            self._context.retry()

    # --- rows -------------------------------------------------------------------------------

    def push_rows(
        self,
        session: Session,
        seq: int,
        message: p.PushRows | p.PushIds,
        packet: Packet,
        now: float,
    ) -> None:
        """Take in gradients for rows of a key or of a table."""
        target: KeyRows | TableRows
        if isinstance(message, p.PushIds):
            target, store = self._table(message.chunk)
            gradient: RowGradient = target.gradient(message, packet.payload)
        else:
            target, store = self._rows(message)
            gradient = target.gradient(message, packet.payload)
        is_lent = bool(packet.loans)
        judged = self.aggregator.judge_rows(store, target, message, gradient, is_lent=is_lent)
        self._count(judged, packet)
        if judged.verdict is Verdict.EARLY:
            return  # as a PUSH that is early
        piece, size = target.pieces[0], sum([frame.nbytes for frame in packet.payload])
        self._context.tally.moved_bytes(piece.chunk, piece.start, piece.size, size)
        if isinstance(target, TableRows) and judged.verdict is Verdict.COUNTED:
            store.budget.demand_growth(target.chunk.keys[0])
        self._apply(judged, now)
        spans = [self._chunks.span_at(piece) for piece in target.pieces]
        self._acknowledge(session, seq, min([span.version for span in spans]))

    def pull_rows(
        self,
        session: Session,
        seq: int,
        message: p.PullRows | p.PullChanged | p.PullIds,
        packet: Packet,
    ) -> None:
        """Answer with the rows of a key or table that are named, or that changed since a version."""
        target: KeyRows | TableRows
        ids = None
        if isinstance(message, p.PullIds):
            target, store = self._table(message.chunk)
            ids = target.asked(message, packet.payload)
        else:
            target, store = self._rows(message)
            if isinstance(message, p.PullRows):
                ids = target.ids(packet.payload)
        self._wait(PendingRowRead.of(session, seq, store, message, target, ids))

    def _rows(self, message: p.PushRows | p.PullRows | p.PullChanged) -> tuple[KeyRows, ServerStore]:
        store = self._context.store(message.store)
        return KeyRows.of(store, message.key), store

    def _table(self, chunk: int) -> tuple[TableRows, ServerStore]:
        return TableRows.of(self._chunks, chunk), self._context.store_of(chunk)

    # --- embedding tables -------------------------------------------------------------------

    def embed(self, seq: int, message: p.Embed) -> Message:
        """Make a table, or find it."""
        store, chunks = self._context.store(message.store), self._chunks
        recipe = embedding_rows.recipe_of(message)
        piece = embedding_rows.embed(store, message.key, recipe, chunks.server, chunks.servers)
        return p.Declared(seq, (p.Place(False, (piece,)),))

    def set_table_rate(self, message: p.TableRate) -> None:
        """Set the learning rate of a table."""
        embedding_rows.embedding_of(self._chunks.at(message.chunk)).set_rate(message.lr)

    def export(self, session: Session, seq: int, message: p.Export) -> None:
        """Answer with a block of a table."""
        answer, payload = embedding_rows.exported(seq, self._chunks.at(message.chunk), message)
        self._context.send(session, answer, payload)

    # --- reads ------------------------------------------------------------------------------

    def wake(self, woken: Iterable[PendingRead]) -> None:
        """Try reads again that waited for what has moved."""
        for reading in woken:
            if self._context.is_pending(reading):
                self._read(reading)

    def _wait(self, reading: PendingRead) -> None:
        """Answer ``reading`` now or later."""
        reading.session.pending[reading.seq] = reading
        self._read(reading)

    def _read(self, reading: PendingRead) -> None:
        """Answer ``reading`` if its conditions hold; else let it wait at what holds it up."""
        if isinstance(reading, PendingRowRead):
            self._read_rows(reading)
            return
        store, session = self._context.stores[reading.store], reading.session
        try:
            chunk = self._chunks.at(reading.chunk)
            if not reads.holds(store, chunk, reading, self._context.quorum(store)):
                chunk.wait(reading)
                return
        except KvpsError as error:
            self._context.refuse(session, reading.seq, error)
            return
        del session.pending[reading.seq]
        stands, values, hold = reads.read(store, chunk, reading)
        steps: tuple[p.Steps, ...] = ()
        adds = False
        tally, rank = self._context.tally, session.rank
        if values is not None:
            tally.traffic(chunk.number, reading.asks, BY_NAME[chunk.dtype].itemsize)
            for stand in () if store.ordered else stands:
                tally.read(rank, chunk.number, stand.start, stand.version)
        # One who reads values where they lie saves nothing by steps.
        memory = self._chunks.memory
        if values is not None and reading.held and not memory.lends(session.route, (values,)):
            adds = store.updater is not None
            steps, octets = reads.lead(chunk, reading, stands)
            if steps:
                tally.compressed("out", octets.nbytes, values.nbytes)
                values, hold = octets, None
        answer = p.Pulled(
            reading.seq,
            chunk.number,
            BY_NAME[chunk.dtype].id,
            values is not None,
            stands,
            reads.dropped(store, chunk, reading),
            steps,
            adds,
        )
        self._context.send(session, answer, () if values is None else (to_frame(values),), hold)

    def _read_rows(self, reading: PendingRowRead) -> None:
        """Answer a request for rows, or let it wait at the first piece that lacks something."""
        store, session = self._context.stores[reading.store], reading.session
        if not reads.holds_rows(store, self._chunks, reading, self._context.quorum(store)):
            self._chunks.by_number[reading.chunk].wait(reading)
            return
        del session.pending[reading.seq]
        answer, frames = reads.read_rows(store, self._chunks, reading)
        tally, piece = self._context.tally, reading.target.pieces[0]
        size = sum([frame.nbytes for frame in frames])
        tally.moved_bytes(piece.chunk, piece.start, piece.size, size)
        for piece in () if store.ordered else reading.target.pieces:
            span = self._chunks.span_at(piece)
            tally.read(session.rank, piece.chunk, span.start, span.version)
        self._context.send(session, answer, tuple([to_frame(frame) for frame in frames]))

    # --- norms of whole tensors -------------------------------------------------------------

    def hear_norms(self, message: p.Norms, server: int) -> None:
        """Take in another server's sums of squares, and tell ours if it asks for them.

        Raises:
            KvpsError: if there is no such update; nothing was changed.
        """
        store = self._context.store(message.store)
        shard = store.shards.get(message.key)
        if shard is not None and shard.born != message.call:
            return  # another key of this name; who holds the newer one tells again
        number = (message.store, message.key, message.rank, message.number)
        ours = self.aggregator.norms.told(store, number, len(message.sums))
        told = PartialSums(message.sums, message.culprits)
        self.aggregator.hear(store, number, server, told)
        if message.reply and ours.sums:
            self._send_norms(number, ours, server, reply=False)
        self.tell_norms()

    def tell_norms(self) -> None:
        """Send the sums that were just completed here, and log updates that were dropped."""
        norms = self.aggregator.norms
        for norm in norms.untold:
            self._tell(norm, norm.holders)
        norms.untold.clear()
        self._tell_steps()
        for store in self._context.stores.values():
            if store.drops is not None:
                self._context.outbox.extend(store.drops.report())

    def report_drops(self) -> None:
        """Log the updates that were dropped since the last line about that; called periodically."""
        for store in self._context.stores.values():
            if store.drops is not None:
                self._context.outbox.extend(store.drops.look())

    def tell_again(self) -> None:
        """Send the sums again to servers that may have missed them, and ask for theirs."""
        for norm in self.aggregator.norms.open.values():
            self._tell(norm, norm.unheard)
        self.aggregator.steps.repeat()
        self._tell_steps()

    def hear_step(self, message: p.StepNorm, server: int) -> None:
        """Take in what another server tells of a step that waits for its norm.

        Raises:
            KvpsError: if there is no such store or step; nothing was changed.
        """
        self.aggregator.hear_step(self._context.store(message.store), message, server)
        self.tell_norms()

    def _tell_steps(self) -> None:
        """Send what other servers are to know of steps; before the first view, which names them,
        it is told later."""
        messages, member = self.aggregator.steps.outbox, self._context.member
        if messages and member.view is not None:
            self._context.outbox.extend(
                [Send(f"server {server}", member.packet(message)) for server, message in messages]
            )
        messages.clear()

    def _tell(self, norm: PartialNorms, servers: Iterable[int]) -> None:
        for server in sorted(servers):
            self._send_norms(norm.id, norm.told, server, reply=server in norm.unheard)

    def _send_norms(self, number: NormId, told: PartialSums, server: int, *, reply: bool) -> None:
        """Send sums to one server; nothing before the first view, which names the servers."""
        member = self._context.member
        if member.view is None:
            return
        name, key, _, _ = number
        born = self._context.stores[name].shards[key].born
        message = p.Norms(*number, told.sums, reply, told.culprits, born)
        self._context.outbox.append(Send(f"server {server}", member.packet(message)))
