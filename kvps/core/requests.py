"""What each request of a worker does on a server, and when it is answered.

One method per message. A request that can be answered at once is; one that cannot is *pending*
in its session, as a :class:`~kvps.core.engine.Reading` (it wants values) or as a
:class:`Waiting` (it wants something to exist), until something moves that it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import torch

from kvps import codes
from kvps.codecs import decode
from kvps.core import by_ids, imaging, pulls, rowreads
from kvps.core.effects import Effects, Send
from kvps.core.engine import Engine
from kvps.core.hyper import Hyper
from kvps.core.image import Image
from kvps.core.joins import JUDGE, Joins
from kvps.core.member import Membership
from kvps.core.namespace import Namespace
from kvps.core.norms import Norm, NormId, Told
from kvps.core.presence import quiet_in_words, ranks_in_words
from kvps.core.quorum import Quorum
from kvps.core.rounds import Span, Verdict
from kvps.core.rowreads import RowReading
from kvps.core.sessions import Describe, IdReading, Reading, Session, Waiting
from kvps.core.slab import Chunk
from kvps.core.stalls import Stall
from kvps.core.strip import Strip
from kvps.core.tables import Table
from kvps.errors import (
    ConfigError,
    KeyNotFound,
    KvpsError,
    Mismatch,
    ProtocolError,
    StorageError,
)
from kvps.messages import (
    Ack,
    Ask,
    Clock,
    Declare,
    Declared,
    Done,
    Embed,
    Error,
    Export,
    Field,
    Find,
    Found,
    FoundAll,
    GetState,
    History,
    HistoryIs,
    Join,
    Joined,
    Load,
    Message,
    Norms,
    Open,
    OpenRound,
    Optimize,
    Packet,
    Pending,
    Place,
    Probe,
    Probed,
    Pull,
    Pulled,
    PulledIds,
    PullIds,
    PullRows,
    Push,
    PushIds,
    PushRows,
    Rate,
    Receipt,
    Return,
    Run,
    SetState,
    StateIs,
    Status,
    StatusIs,
    Steps,
    TableRate,
    rows_in_frame,
)
from kvps.specs import BY_ID, BY_NAME
from kvps.tensors import dtype_of, from_frame, to_frame

STATUS_MAX = 1024
COUNTS_MAX = 16 * 1024
"""How many keys, and how many counts of ranks, one STATUS answer names."""


class Requests:
    """Answers the requests of one job's workers."""

    def __init__(
        self,
        member: Membership,
        engine: Engine,
        memory_limit: int | None,
        lives: dict[int, int] | None = None,
    ) -> None:
        self.member = member
        self.engine = engine
        self.spaces: dict[str, Namespace] = {}
        self.sessions: dict[int, Session] = {}
        """By rank: the newest incarnation that has spoken."""
        self.lives: dict[int, int] = dict(lives or {})
        """By rank: the newest incarnation that was heard of."""
        self._memory_limit = memory_limit

    def life(self, rank: int) -> int:
        """The newest incarnation of ``rank`` that was heard of; 0 before the first."""
        return self.lives.get(rank, 0)

    def begin(self, rank: int, incarnation: int) -> None:
        """``rank`` has this incarnation: if it is newer, drop what an older one had pending."""
        before = self.life(rank)
        if incarnation <= before:
            return
        self.lives[rank] = incarnation
        old = self.sessions.pop(rank, None)
        if old is not None:
            old.pending.clear()
        if before:
            for space in self.spaces.values():
                self.engine.replaced(space, rank, self._quorum(space))

    def answer(self, session: Session, packet: Packet, now: float) -> Effects:
        """Do what ``packet`` asks.

        Raises:
            KvpsError: if it cannot be done; nothing was changed.
        """
        message, seq = packet.message, packet.envelope.seq
        if not isinstance(message, Probe):
            session.asked_at = now
        match message:
            case Push():
                yield from self._push(session, seq, message, packet, now)
            case Pull():
                yield from self._pull(session, seq, message)
            case PushIds():
                yield from self._push_ids(session, seq, message, packet, now)
            case PullIds():
                yield from self._pull_ids(session, seq, message, packet)
            case Embed():
                yield self._send(session, self._embed(seq, message))
                yield from self._retry()
            case TableRate():
                self._only_rank_0(session, "set the learning rate of a table")
                by_ids.embedding_of(self.engine.chunk(message.chunk)).set_rate(message.lr)
                yield self._send(session, Done(seq))
            case Export():
                yield self._export(session, seq, message)
            case PushRows():
                yield from self._push_rows(session, seq, message, packet, now)
            case PullRows():
                yield from self._pull_rows(session, seq, message, packet)
            case Load():
                yield from self._load(session, seq, message, packet)
            case Declare():
                yield from self._declare(session, seq, message)
            case Optimize():
                yield from self._optimize(session, seq, message)
            case Rate():
                yield from self._rate(session, seq, message)
            case Probe():
                yield self._send(session, self._probe(session, message, now))
            case Open():
                yield self._send(session, self._open(seq, message))
            case Find():
                yield self._send(session, self._find(seq, message))
            case Status():
                yield self._send(session, self._status(seq, message, now))
            case GetState():
                yield self._get_state(session, seq, message)
            case SetState():
                yield self._send(session, self._set_state(seq, message, packet.payload))
            case History():
                yield self._send(session, self._history(session, seq, message))
            case Join():
                yield from self._join(session, seq, message)
            case Return():
                yield from self._end_join(self._space(message.store), message.call)
                yield self._send(session, Done(seq))
            case _:
                raise ProtocolError(f"a worker may not send {type(message).__name__} to a server")

    def oldest(self, now: float) -> Iterator[Stall]:
        """Yield the oldest open round of each store that has one."""
        found: dict[str, tuple[float, Chunk, Span]] = {}
        for chunk in self.engine.chunks.by_number.values():
            for span in chunk.spans:
                if span.rounds:
                    at = span.rounds[0].opened_at
                    if chunk.store not in found or at < found[chunk.store][0]:
                        found[chunk.store] = at, chunk, span
        for store, (at, chunk, span) in found.items():
            required = self._required(self.spaces[store])
            key, _, _ = next(chunk.pieces(span.start, span.stop))
            missing = span.missing(required)
            who = ranks_in_words(missing, self._description(now))
            yield Stall(store, key, span.rounds[0].number, now - at, missing, who)

    # --- images ---------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether no gradient waits here to be applied."""
        return not any(
            span.is_open for chunk in self.engine.chunks.by_number.values() for span in chunk.spans
        )

    def image(self) -> tuple[Image, Callable[[], None]]:
        """Return what all stores hold, and what is to be called when nobody needs it any more."""
        chunks = self.engine.chunks
        releases = [chunk.keep() for chunk in chunks.by_number.values()]
        stores = tuple([imaging.image_of(space, chunks) for space in self.spaces.values()])

        def release() -> None:
            for one in releases:
                one()

        return Image(self.engine.server, self.engine.servers, stores), release

    def restore(self, image: Image) -> None:
        """Hold what ``image`` says. Nothing is held yet.

        Raises:
            KvpsError: if that cannot be.
        """
        for store in image.stores:
            self._open_store(store.opened)
            space = self.spaces[store.name]
            imaging.revive(
                space, self.engine.chunks, store, self.engine.server, self.engine.servers
            )
            over, last, made = store.joins
            space.joins = Joins(over, dict(last), dict(made))

    def revive(self, store: str, whole: Image) -> Effects:
        """Give one store, which is open, the values that it has in an image.

        Raises:
            KvpsError: if that cannot be; nothing is changed.
        """
        image = next((one for one in whole.stores if one.name == store), None)
        if image is None:
            names = ", ".join(repr(one.name) for one in whole.stores) or "none"
            raise StorageError(
                f"the checkpoint has no store {store!r}; it has {names}. Create the store with that "
                "name="
            )
        space = self._space(image.name)
        pieces = imaging.revive(
            space, self.engine.chunks, image, self.engine.server, self.engine.servers
        )
        self.engine.forget(space, [space.shards[key.name] for key in image.keys])
        for piece in pieces:
            chunk = self.engine.chunk(piece.chunk)
            yield from self._wake(chunk.woken(piece.start, piece.start + piece.size))
        yield from self._retry()

    # --- members --------------------------------------------------------------------------------

    def look_again(self) -> Effects:
        """The view changed: close what can be closed now, and try all that is pending."""
        for space in list(self.spaces.values()):
            yield from self._look_at(space)
            yield from self._judge(space)

    def _look_at(self, space: Namespace, is_all: bool = False) -> Effects:
        """Close what can be closed now in a store, or all that is open, and try what is pending."""
        quorum = self._quorum(space)
        for chunk in self.engine.chunks.of_store(space.name):
            for span in list(chunk.spans):
                if is_all:
                    yield from self._wake(self.engine.close_all(space, chunk, span))
                else:
                    yield from self._wake(self.engine.close(space, chunk, span, quorum))
        yield from self._tell_norms()
        for chunk in self.engine.chunks.of_store(space.name):
            yield from self._wake(chunk.woken(0, chunk.used))

    # --- values ---------------------------------------------------------------------------------

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
            reading = Reading(session, seq, space.name, chunk.number, True, asks, message.held)
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
        chunk.validate(message.runs)
        chunk.check_filled(message.runs)
        pulls.check_held(message.held, message.runs)
        reading = Reading(
            session, seq, space.name, chunk.number, message.values, message.runs, message.held
        )
        session.pending[seq] = reading
        yield from self._read(reading)

    def _push_ids(
        self, session: Session, seq: int, message: PushIds, packet: Packet, now: float
    ) -> Effects:
        space = self._space_of(message.chunk)
        chunk = self.engine.chunk(message.chunk)
        server, servers = self.engine.server, self.engine.servers
        gradient = by_ids.gradient_of(chunk, message, packet.payload, server, servers)
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
        ids = by_ids.asked_ids(chunk, message, packet.payload, server, servers)
        asks = (Ask(0, 1, message.after, message.least),)
        reading = IdReading(session, seq, space.name, chunk.number, True, asks, ids=ids)
        session.pending[seq] = reading
        yield from self._read(reading)

    def _push_rows(
        self, session: Session, seq: int, message: PushRows, packet: Packet, now: float
    ) -> Effects:
        space = self._space(message.store)
        table = Table.of(space, message.key)
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
        table = Table.of(space, message.key)
        ids = table.ids(packet.payload[0] if packet.payload else None)
        reading = RowReading.of(session, seq, message, table, ids)
        session.pending[seq] = reading
        yield from self._read(reading)

    def _read_rows(self, reading: RowReading) -> Effects:
        """Answer a request for rows, or let it wait at the first piece that lacks something."""
        space, session, chunks = self.spaces[reading.store], reading.session, self.engine.chunks
        if not rowreads.holds(space, chunks, reading, self._quorum(space)):
            chunks.by_number[reading.chunk].wait(reading)
            return
        del session.pending[reading.seq]
        answer, rows = rowreads.read(space, chunks, reading)
        each = rows_in_frame(answer.dtype, answer.width) * answer.width
        payload = tuple([to_frame(one) for one in torch.split(rows, each)]) if len(rows) else ()
        yield Send(session.route, Packet(self.member.envelope(), answer, payload))

    def _read(self, reading: Reading) -> Effects:
        """Answer ``reading`` if its conditions hold; else let it wait at what holds it up."""
        if not reading.is_pending:
            return
        if isinstance(reading, RowReading):
            yield from self._read_rows(reading)
            return
        space, session = self.spaces[reading.store], reading.session
        try:
            chunk = self.engine.chunk(reading.chunk)
            if not pulls.holds(space, chunk, reading, self._quorum(space)):
                chunk.wait(reading)
                return
        except KvpsError as error:
            yield self._refuse(session, reading.seq, error)
            return
        del session.pending[reading.seq]
        if isinstance(reading, IdReading):
            yield self._rows(space, chunk, reading)
            return
        stands, values, hold = pulls.read(space, chunk, reading)
        steps: tuple[Steps, ...] = ()
        adds = False
        if values is not None and reading.held and not self._is_lent_to(session, values):
            adds = space.updater is not None
            steps, octets = pulls.lead(chunk, reading, stands)
            if steps:
                values, hold = octets, None
        answer = Pulled(
            reading.seq,
            chunk.number,
            BY_NAME[chunk.dtype].id,
            values is not None,
            stands,
            pulls.dropped(space, chunk, reading),
            steps,
            adds,
        )
        payload = () if values is None else (to_frame(values),)
        packet = Packet(self.member.envelope(), answer, payload)
        yield Send(session.route, packet, hold)

    def _is_lent_to(self, session: Session, values: torch.Tensor) -> bool:
        """Whether who asks reads ``values`` where they lie: then nothing is saved by steps."""
        return self.engine.memory.lends(session.route, (values,))

    def _rows(self, space: Namespace, chunk: Chunk, reading: IdReading) -> Send:
        """Answer a request for rows."""
        rows, (span,) = by_ids.embedding_of(chunk), chunk.spans
        recipe, count = rows.recipe, len(reading.ids)
        owed = span.owed(reading.session.rank, space.ordered)
        answer = PulledIds(
            reading.seq, BY_NAME[recipe.dtype].id, recipe.dim, count, span.version, owed
        )
        payload = (to_frame(rows.pull(reading.ids).view(-1)),) if count else ()
        return Send(reading.session.route, Packet(self.member.envelope(), answer, payload))

    def _embed(self, seq: int, message: Embed) -> Message:
        space = self._space(message.store)
        recipe = by_ids.recipe_of(message)
        piece = by_ids.embed(space, message.key, recipe, self.engine.server, self.engine.servers)
        return Declared(seq, (Place(False, (piece,)),))

    def _export(self, session: Session, seq: int, message: Export) -> Send:
        answer, payload = by_ids.exported(seq, self.engine.chunk(message.chunk), message)
        return Send(session.route, Packet(self.member.envelope(), answer, payload))

    def _wake(self, woken: Iterable[Reading]) -> Effects:
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
        values = Strip.of(packet.payload, message.dtype).joined()
        became_ready = space.load(chunk, message, values, session.rank)
        yield self._send(session, Ack((Receipt(seq, 0),)))
        if became_ready:
            yield from self._retry()

    # --- what waits for something to exist --------------------------------------------------------

    def _declare(self, session: Session, seq: int, message: Declare) -> Effects:
        space = self._space(message.store)
        if message.create:
            if session.rank != message.creator:
                raise ProtocolError(
                    f"rank {session.rank} may not create keys of rank {message.creator}; that rank does"
                )
            life = (session.rank, session.incarnation)
            places, replaced = space.create(message.entries, message.call, life)
            for shard in replaced:
                for reading in self.engine.replace(space, shard):
                    if reading.is_pending:
                        gone = KeyNotFound(
                            f"key {shard.key!r} was replaced by another shape; read it anew"
                        )
                        yield self._refuse(reading.session, reading.seq, gone)
            yield self._send(session, Declared(seq, places))
            yield from self._retry()  # a key without elements needs no LOAD
            return
        found: list[Place] = []

        def retry() -> Message | None:
            while len(found) < len(message.entries):
                place = space.find(message.entries[len(found)], message.call)
                if place is None:
                    return None
                found.append(place)
            return Declared(seq, tuple(found))

        def why(describe: Describe) -> str:
            key, left = message.entries[len(found)].key, len(message.entries) - len(found) - 1
            more = f" and {left} more" if left else ""
            return (
                f"key {key[:64]!r}{more}: {_of(message.creator, 'has not given a value')(describe)}"
            )

        yield from self._attempt(session, seq, Waiting(retry, why))

    def _optimize(self, session: Session, seq: int, message: Optimize) -> Effects:
        space = self._space(message.store)
        hyper = Hyper.from_wire(
            message.name,
            {**message.numbers, "lr_mult": message.lr_mult, "wd_mult": message.wd_mult},
        )
        if message.create:
            self._only_rank_0(session, "set the optimizer")
            if message.call > space.optimize_calls:
                yield from self._wake(self.engine.optimize(space, hyper))
                space.optimize_calls, space.sent_hyper = message.call, hyper
                space.optimize_after = message.after
            yield self._send(session, Done(seq))
            yield from self._retry()
            return

        def retry() -> Message | None:
            if message.resumed:
                is_past = message.after <= space.optimize_after or space.sent_hyper == hyper
                return Done(seq) if is_past and space.optimize_calls else None
            if space.optimize_calls < message.call:
                return None
            is_same = (space.optimize_calls, space.optimize_after) == (message.call, message.after)
            if is_same and space.sent_hyper != hyper:
                raise Mismatch(
                    f"rank {session.rank} set optimizer {hyper}, rank 0 set {space.sent_hyper}; "
                    "rank 0's counts, so give the same on every rank"
                )
            return Done(seq)

        yield from self._attempt(session, seq, Waiting(retry, _of(0, "has not set the optimizer")))

    def _rate(self, session: Session, seq: int, message: Rate) -> Effects:
        space = self._space(message.store)
        if space.hyper is None:
            raise ConfigError(f"store {space.name!r} has no optimizer; call set_optimizer() first")
        if message.create:
            self._only_rank_0(session, "set the learning rate")
            if message.call > space.rate_calls:
                space.set_rate(message.lr)
                space.rate_calls, space.sent_lr = message.call, message.lr
                space.rate_after = message.after
            yield self._send(session, Done(seq))
            yield from self._retry()
            return

        def retry() -> Message | None:
            if message.resumed:
                is_past = message.after <= space.rate_after or space.sent_lr == message.lr
                return Done(seq) if is_past and space.rate_calls else None
            if space.rate_calls < message.call:
                return None
            is_same = (space.rate_calls, space.rate_after) == (message.call, message.after)
            if is_same and space.sent_lr != message.lr:
                raise Mismatch(
                    f"rank {session.rank} set learning rate {message.lr}, rank 0 set "
                    f"{space.sent_lr}; rank 0's counts, so give the same on every rank"
                )
            return Done(seq)

        yield from self._attempt(
            session, seq, Waiting(retry, _of(0, "has not set the learning rate"))
        )

    def _attempt(self, session: Session, seq: int, waiting: Waiting) -> Effects:
        """Answer ``waiting``, or let it wait on."""
        try:
            answer = waiting.retry()
        except KvpsError as error:
            yield self._refuse(session, seq, error)
            return
        if answer is None:
            session.pending[seq] = waiting
        else:
            session.pending.pop(seq, None)
            yield self._send(session, answer)

    def _retry(self) -> Effects:
        """Something exists now: try all that waits for that."""
        for session in self.sessions.values():
            for seq, one in list(session.pending.items()):
                if isinstance(one, Waiting):
                    yield from self._attempt(session, seq, one)

    def _only_rank_0(self, session: Session, what: str) -> None:
        if session.rank != 0:
            raise ProtocolError(f"rank {session.rank} may not {what}; rank 0 does")

    # --- those who have run out of batches ----------------------------------------------------------

    def _join(self, session: Session, seq: int, message: Join) -> Effects:
        space = self._space(message.store)
        space.joins.join(session.rank, message.call)
        yield from self._look_at(space)
        yield from self._judge(space)

        def retry() -> Message | None:
            if message.waits and space.joins.over < message.call:
                return None
            return Joined(seq, space.joins.last.get(message.call, 0))

        def why(describe: Describe) -> str:
            missing = space.joins.missing(self._members(space))
            return f"{ranks_in_words(missing, describe)} has not joined"

        yield from self._attempt(session, seq, Waiting(retry, why))

    def _judge(self, space: Namespace) -> Effects:
        """Say that a join is over, if that is up to this server."""
        if self.engine.server == JUDGE:
            yield from self._end_join(space, space.joins.judge(self._members(space)))

    def _end_join(self, space: Namespace, call: int) -> Effects:
        """A join is over: what is open can get no more pushes, and what comes waits for all."""
        if not space.joins.end(call):
            return
        yield from self._look_at(space, is_all=True)
        yield from self._retry()

    # --- answered at once ---------------------------------------------------------------------------

    def _open(self, seq: int, message: Open) -> Message:
        self._open_store(message)
        return Done(seq)

    def _open_store(self, opened: Open) -> None:
        space = self.spaces.get(opened.store)
        if space is None:
            self.spaces[opened.store] = Namespace(opened, self.engine.chunks, self._memory_limit)
        else:
            space.agree(opened)

    def _history(self, session: Session, seq: int, message: History) -> Message:
        space = self._space(message.store)
        return HistoryIs(
            seq,
            space.optimize_calls,
            space.optimize_after,
            space.rate_calls,
            space.rate_after,
            space.sent_lr,
            space.joins.over,
            session.rank in space.joins.away,
            space.restored,
        )

    def _find(self, seq: int, message: Find) -> Message:
        shards = self._space(message.store).shards
        found = []
        for key in message.keys:
            shard = shards.get(key)
            if shard is None or not shard.ready:
                found.append(Found(0, ()))
            else:
                found.append(Found(BY_NAME[shard.spec.dtype].id, shard.spec.shape, shard.call))
        return FoundAll(seq, tuple(found))

    def _probe(self, session: Session, message: Probe, now: float) -> Message:
        missing, pending = [], []
        for seq in message.seqs:
            one = session.pending.get(seq)
            if one is None:
                missing.append(seq)
            elif isinstance(one, Reading):
                space, chunk = self.spaces[one.store], self.engine.chunk(one.chunk)
                describe = self._description(now)
                why = pulls.why(space, chunk, one, self._quorum(space), describe)
                pending.append(Pending(seq, why))
            else:
                pending.append(Pending(seq, one.why(self._description(now))))
        return Probed(tuple(missing), tuple(pending))

    def _status(self, seq: int, message: Status, now: float) -> Message:
        space = self._space(message.store)
        required = self._required(space)
        rounds: list[OpenRound] = []
        clocks: list[Clock] = []
        counts = 0
        for key, shard in space.shards.items():
            for piece in shard.pieces[:1]:
                chunk = self.engine.chunk(piece.chunk)
                span = next(chunk.spans_in(piece.start, piece.start + piece.size))
                counts += len(span.pushed)
                if len(clocks) < STATUS_MAX and counts <= COUNTS_MAX:
                    clocks.append(Clock(key, {str(rank): n for rank, n in span.pushed.items()}))
                if span.rounds and len(rounds) < STATUS_MAX:
                    oldest = span.rounds[0]
                    missing = span.missing(required)
                    age_s = max(0.0, now - oldest.opened_at)
                    rounds.append(OpenRound(key, oldest.number, missing, age_s))
        dropped = {} if space.drops is None else space.drops.counts
        return StatusIs(
            seq, tuple(rounds), tuple(clocks), dict(islice(dropped.items(), STATUS_MAX))
        )

    # --- the optimizer's state ------------------------------------------------------------------------

    def _get_state(self, session: Session, seq: int, message: GetState) -> Send:
        chunk = self.engine.chunk(message.chunk)
        chunk.validate([Run(message.start, message.size, 0)])
        stop = message.start + message.size
        span = next(chunk.spans_in(message.start, stop))
        state = chunk.state or {}
        rows = {name: tensor[message.start : stop].clone() for name, tensor in state.items()}
        answer = StateIs(
            seq,
            span.step,
            tuple(Field(name, dtype_of(row).id, len(row)) for name, row in rows.items()),
        )
        payload = tuple(to_frame(row) for row in rows.values())
        return Send(session.route, Packet(self.member.envelope(), answer, payload))

    def _set_state(self, seq: int, message: SetState, payload: Sequence[memoryview]) -> Message:
        space = self._space_of(message.chunk)
        chunk = self.engine.chunk(message.chunk)
        chunk.validate([Run(message.start, message.size, 0)])
        rows = {
            one.name: from_frame(frame, BY_ID[one.dtype].name)
            for one, frame in zip(message.fields, payload, strict=True)
        }
        space.restore(chunk, message.start, message.start + message.size, message.step, rows)
        return Done(seq)

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
        woken = self.engine.hear(space, number, server, Told(message.sums, message.culprits))
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

    def _tell(self, norm: Norm, servers: Iterable[int]) -> Effects:
        for server in sorted(servers):
            yield from self._norms(norm.id, norm.told, server, reply=server in norm.unheard)

    def _norms(self, number: NormId, told: Told, server: int, reply: bool) -> Effects:
        """Tell one server; not before a view has named it, as there is no way to it."""
        if self.member.view is None:
            return
        store, key, _, _ = number
        born = self.spaces[store].shards[key].born
        message = Norms(*number, told.sums, reply, told.culprits, born)
        yield Send(f"server {server}", self.member.packet(message))

    # --- small things ---------------------------------------------------------------------------------

    def _gradient(self, chunk: Chunk, message: Push, packet: Packet) -> Strip:
        """Return what was pushed, decompressed if need be.

        Raises:
            Mismatch: if it was compressed, and the chunk holds what cannot be.
            ProtocolError: if its octets cannot mean it.
        """
        pulls.check_held(message.held, message.runs)
        if message.code is None:
            return Strip.of(packet.payload, message.dtype)
        chunk.validate(message.runs)  # a few octets may say very many elements
        if chunk.dtype != "float32":
            raise Mismatch(
                f"chunk {chunk.number} holds {chunk.dtype}, and only float32 is compressed"
            )
        octets = Strip.of(packet.payload, BY_NAME["uint8"].id).joined()
        gradient = torch.empty(sum([run.size for run in message.runs]))
        begin = at = 0
        for run in message.runs:
            end = begin + codes.size(message.code, run.size)
            decode(message.code, octets[begin:end], gradient[at : at + run.size])
            begin, at = end, at + run.size
        return Strip([gradient])

    def _description(self, now: float) -> Describe:
        """Return what says how a rank stands, as this server has heard."""

        def describe(rank: int) -> str:
            session = self.sessions.get(rank)
            if rank in self.member.quorum().lost:
                return "lost"
            if session is None or session.asked_at is None:
                return "has asked nothing here yet"
            return quiet_in_words(now - session.asked_at, "request")

        return describe

    def _quorum(self, space: Namespace) -> Quorum:
        """Return who counts in a store."""
        return self.member.quorum().without(space.joins.away)

    def _required(self, space: Namespace) -> frozenset[int]:
        """Return which ranks a round of a store waits for."""
        return self._quorum(space).required(space.opened.on_worker_lost)

    def _members(self, space: Namespace) -> frozenset[int]:
        """Return which ranks a join of a store waits for."""
        return self.member.quorum().members(
            space.opened.on_worker_lost if space.ordered else "shrink"
        )

    def _space(self, name: str) -> Namespace:
        space = self.spaces.get(name)
        if space is None:
            raise ProtocolError(f"server {self.engine.server}: store {name!r} was not opened")
        return space

    def _space_of(self, chunk: int) -> Namespace:
        return self.spaces[self.engine.chunk(chunk).store]

    def _refuse(self, session: Session, seq: int, error: KvpsError) -> Send:
        """Answer a request that was pending by an error."""
        session.pending.pop(seq, None)
        return self._send(session, Error(seq, error.code, str(error)))

    def _send(self, session: Session, message: Message) -> Send:
        return Send(session.route, self.member.packet(message))


def _is_lent(packet: Packet) -> bool:
    """Whether a gradient is its sender's memory: what was decompressed is not."""
    message = packet.message
    return bool(packet.loans) and isinstance(message, Push) and message.code is None


def _of(rank: int, what: str) -> Callable[[Describe], str]:
    """Return what says that a rank has not done something, and how it stands."""
    return lambda describe: f"{ranks_in_words([rank], describe)} {what}"
