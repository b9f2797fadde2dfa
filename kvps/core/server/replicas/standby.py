"""The standby's end of a copy: it takes in what the primary sends, and acknowledges it.

A standby is a server whose parts are filled by the primary and not by workers. It serves nobody before a
view gives it the seat: then it is a primary as any other. What comes from the former primary is not
acknowledged any more.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvps import protocol as p
from kvps.core.effects import Connect, Note, Outbox
from kvps.core.membership_client import MembershipClient
from kvps.core.optim.hyperparams import HyperParams
from kvps.core.refusals import Attempt, RefusedCall
from kvps.core.server.chunks.slab import Chunk
from kvps.core.server.context import RequestContext
from kvps.core.server.control import Control
from kvps.core.server.participation import JoinTracker
from kvps.core.server.publications import Publications
from kvps.core.server.replicas import tables
from kvps.core.server.replicas.state import by_rank, heard
from kvps.core.server.rules.book import RuleBook
from kvps.core.server.snapshot.elements import put, put_history
from kvps.core.server.store import Setting, Shard
from kvps.dtypes import BY_ID, Spec
from kvps.errors import KvpsError
from kvps.protocol.envelope import Message, Node, Packet, Role
from kvps.protocol.membership import Member
from kvps.protocol.stores import Piece
from kvps.tensors import from_frame

FOLLOW_AGAIN_S = 1.0


class Follower:
    """Takes in the copy of a seat.

    Args:
        member: this standby's place in the job.
        outbox: of the server's doors.
    """

    def __init__(self, member: MembershipClient, outbox: Outbox) -> None:
        self._member = member
        self._outbox = outbox
        self.incarnation = 0
        """That of the primary; 0 before a view names it."""
        self.is_level = False
        """All that the primary has shown to anybody is here."""
        self.reason = ""
        """Why what was sent cannot be taken in; empty if it can."""
        self.number = 0
        """The number of the last packet that was taken in."""
        self.copied_bytes = 0
        self.has_begun = False
        self.again_at = 0.0
        self._epoch = 0

    def attach(
        self, context: RequestContext, control: Control, rules: RuleBook, publications: Publications
    ) -> None:
        """Fill these parts from now on, which are empty."""
        self._publications = publications
        self._context, self._control, self._rules = context, control, rules
        self._chunks = context.chunks
        self.met: dict[int, int] = {}
        """The incarnations of workers that the primary has heard of."""
        self._rows: list[tuple[p.CopyRows, Sequence[memoryview]]] = []
        """Rows of a table that are taken in with others, which are still to come."""

    def learn(self, primary: Member, epoch: int, now: float) -> bool:
        """A view names the primary; return whether its copy is to begin anew."""
        life = primary.incarnation if primary.state == "held" else 0
        if not life or (life, epoch) == (self.incarnation, self._epoch):
            return False
        if life != self.incarnation:
            self.number = 0
            key = self._member.key_of(Node(Role.SERVER, primary.rank))
            is_near = 0 != primary.machine == self._member.identity.machine
            self._outbox.append(Connect(self._to, primary.endpoint, is_near or None, key, bool(key)))
        self.incarnation, self._epoch = life, epoch
        self.is_level, self.has_begun, self.reason, self.copied_bytes = False, False, "", 0
        self._ask(now)
        self._member.stand()
        return True

    @property
    def _to(self) -> str:
        """The name of the connection to the primary."""
        return f"server {self._member.rank}"

    def _ask(self, now: float) -> None:
        self.again_at = now + FOLLOW_AGAIN_S
        self._member.greet(self._to)

    def on_welcome(self) -> None:
        """The primary has heard HELLO: by now both know whether they share memory. Ask for the copy."""
        self._member.send(self._to, p.Follow())

    def on_timer(self, now: float) -> None:
        """Ask again for a copy that has not begun."""
        if self.incarnation and not self.has_begun and now >= self.again_at:
            self._ask(now)

    def is_next(self, packet: Packet) -> bool:
        """Return whether a packet of the primary follows those that were taken in."""
        seq = packet.envelope.seq
        if packet.envelope.incarnation != self.incarnation:
            return False
        if isinstance(packet.message, p.CopyBegin):
            return seq > self.number
        return self.has_begun and seq == self.number + 1

    def is_again(self, packet: Packet) -> bool:
        """Return whether the primary has not heard that a packet was taken in."""
        envelope = packet.envelope
        return self.has_begun and envelope.incarnation == self.incarnation and envelope.seq <= self.number

    def standing(self) -> p.Standing:
        """Return what the scheduler is told."""
        copied = 100 if self.is_level else 0
        return p.Standing(self.is_level, copied, 0, 0, self.reason)

    def take(self, seq: int, message: Message, payload: Sequence[memoryview]) -> None:
        """Take in the next packet, and acknowledge it."""
        if not self.reason:
            try:
                self._take(message, payload)
            except KvpsError as error:
                self.reason, self.is_level = f"the copy cannot be held: {error}", False
                self._outbox.append(Note("warning", f"{self._context.me} follows no more: {error}"))
                self._member.stand()
                return
        self.has_begun, self.number = True, seq
        self.acknowledge()

    def acknowledge(self) -> None:
        """Tell the primary what is here."""
        self._member.send(self._to, p.Followed(self.number))

    def _take(self, message: Message, payload: Sequence[memoryview]) -> None:
        match message:
            case p.CopyBlock() | p.CopyVersion() | p.CopyPublication():
                self._publications.take_copy(message, payload)
            case p.CopyBegin():
                self._publications.clear()
                if self.is_level:
                    self.is_level = False
                    self._member.stand()
            case p.CopyStores():
                self._keep(message)
            case p.Open():
                self._control.make_store(message)
            case p.CopyStore():
                self._set(message)
            case p.CopyChunk():
                self._lay(message)
            case p.CopyKeys():
                self._name(message)
            case p.CopyValues():
                self._fill(message, payload)
            case p.Embed():
                self._embed(message)
            case p.CopyRows():
                self._take_rows(message, payload)
            case _:
                assert isinstance(message, p.CopyLevel), message
                self.is_level = True
                self._member.stand()

    def _keep(self, message: p.CopyStores) -> None:
        """Drop all other stores."""
        before, self.met = self.met, by_rank(message.workers)
        for rank, met in self.met.items():
            for store in self._context.stores.values() if before.get(rank, met) < met else ():
                self._context.start_clock(store, rank)
        stores = self._context.stores
        for name in stores.keys() - {*message.names}:
            self._control.drop(stores[name])
        for life in message.lives:
            self._control.ended.begin(life.store, life.life)

    def _set(self, message: p.CopyStore) -> None:
        store = self._context.store(message.store)
        store.restored, store.stamps = message.restored, message.stamps
        for rank, incarnation in by_rank(message.entered).items():
            self._context.admit(store, rank, incarnation)
        self._context.leave_outside(store, frozenset(message.outside))
        life = self._control.ended.of(store.name)
        assert life is not None, "it began with the store"
        life.closed = by_rank(message.closed)
        if message.joins_over > store.joins.over:
            self._context.start_clocks(store)
        last, made = by_rank(message.joins_last), by_rank(message.joins_made)
        store.joins = JoinTracker(message.joins_over, last, made)
        for what, is_key, call, refused, code, text in message.refusals:
            store.refusals.put(what if is_key else (what,), RefusedCall(Attempt(call, refused), code, text))
        if message.name:
            numbers = {**message.numbers, "lr_mult": message.lr_mult, "wd_mult": message.wd_mult}
            hyper = HyperParams.from_wire(message.name, numbers)
            if store.sent_optimizer.calls != message.calls or store.hyper is None:
                self._rules.optimize(store, hyper)
            store.sent_optimizer = Setting(hyper, message.calls, message.after)
            self._rules.set_rate(store, message.lr)
        store.sent_rate = Setting(message.rate, message.rate_calls, message.rate_after)

    def _lay(self, message: p.CopyChunk) -> None:
        """Give a chunk the layout that it has at the primary."""
        chunks = self._chunks
        if not message.names:
            freed = chunks.at(message.chunk)
            chunks.counts[freed.store][freed.dtype] -= sum([span.stop - span.start for span in freed.spans])
            chunks.free(freed)
            return
        chunk = chunks.by_number.get(message.chunk)
        dtype = BY_ID[message.dtype].name
        sizes = [stop - start for start, stop in zip(message.bounds, message.bounds[1:], strict=False)]
        new = list(zip(message.names, sizes, strict=True))[len(chunk.keys) if chunk is not None else 0 :]
        more = {dtype: sum([size for _, size in new])}
        self._control.budget.demand_keys(message.store, [name for name, _ in new], more)
        if chunk is None:
            chunk = Chunk(message.chunk, message.store, dtype, message.capacity, chunks.memory)
            chunks.adopt(chunk)
        retired, _ = chunk.unused()
        for name, size in new:
            chunk.append(name, size)
            chunks.counts[message.store][dtype] += size
        by_start = dict(zip(message.bounds, sizes, strict=False))
        for start in {*message.retired} - {*retired}:
            chunk.retire(Piece(chunk.number, start, by_start[start]))
            chunks.counts[message.store][dtype] -= by_start[start]
        for start in by_start.keys() - {*message.blank}:
            chunk.fill(start)
        self._rules.recompose()

    def _name(self, message: p.CopyKeys) -> None:
        shards = self._context.store(message.store).shards
        for name in message.gone:
            shards.pop(name, None)
        for key in message.copied:
            loading = key.loading - 1, (key.rank, key.incarnation)
            empty = {piece: count - 1 for piece, count in zip(key.pieces, key.loaded, strict=True) if count}
            spec = Spec(BY_ID[key.dtype].name, key.shape)
            shard = Shard(key.key, spec, key.start, key.size, key.pieces, key.offsets, key.calls - 1)
            shard.loading, shard.empty, shard.stamp, shard.born = loading, empty, key.stamp, key.born
            shards[key.key] = shard

    def _fill(self, message: p.CopyValues, payload: Sequence[memoryview]) -> None:
        chunk, start, stop = self._chunks.at(message.chunk), message.start, message.start + message.size
        chunk.validate([p.Run(start, message.size, 0)])
        store = self._context.stores[chunk.store]
        weights, *rows = payload
        states = {
            field.name: from_frame(row, BY_ID[field.dtype].name)
            for field, row in zip(message.fields, rows, strict=True)
        }
        put(store, chunk, start, stop, from_frame(weights, chunk.dtype), states, heard(message))
        if store.drops is not None:
            store.drops.put(chunk.number, start, stop, message.dropped)
        self.copied_bytes += sum([frame.nbytes for frame in payload])

    def _embed(self, message: p.Embed) -> None:
        """Let the chunk of a table stand for it, without rows yet."""
        store = self._context.store(message.store)
        (chunk,) = [chunk for chunk in self._chunks.of_store(store.name) if chunk.keys == [message.key]]
        tables.make(chunk, store, message, self._chunks.servers)
        self._rules.recompose()

    def _take_rows(self, message: p.CopyRows, payload: Sequence[memoryview]) -> None:
        """Take rows in when all are here that belong together."""
        self._rows.append((message, payload))
        if message.more:
            return
        chunk = self._chunks.at(message.chunk)
        for part, frames in self._rows:
            tables.take_in(chunk, self._context.stores[chunk.store], part, frames)
            self.copied_bytes += sum([frame.nbytes for frame in frames])
        self._rows.clear()
        put_history(chunk.spans[0], heard(message))
