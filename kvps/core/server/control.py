"""Control requests of a worker: declare keys, set optimizers, join, probe, status, state.

One method per message; those that carry values, or ask for them, are in :mod:`kvps.core.server.push_pull`. A request that can be answered at once is; one that cannot is *pending*
in its session, as a :class:`~kvps.core.server.update.aggregator.Reading` (it wants values) or as a
:class:`PendingRequest` (it wants something to exist), until something moves that it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from kvps.core.effects import Effects, Send
from kvps.core.liveness import ranks_in_words
from kvps.core.optim.hyperparams import HyperParams
from kvps.core.placement import JUDGE
from kvps.core.refusals import Attempt
from kvps.core.server import authority, reads
from kvps.core.server.chunks.rounds import Span
from kvps.core.server.chunks.slab import Chunk
from kvps.core.server.join import JoinTracker
from kvps.core.server.push_pull import PushPull
from kvps.core.server.sessions import Describe, PendingRead, PendingRequest, Session
from kvps.core.server.snapshot import capture
from kvps.core.server.snapshot.model import Snapshot
from kvps.core.server.store import ServerStore
from kvps.core.server.stragglers import Stall
from kvps.core.server.update import embedding_rows
from kvps.dtypes import BY_ID, BY_NAME
from kvps.errors import (
    ConfigError,
    KeyNotFound,
    KvpsError,
    Mismatch,
    Overload,
    ProtocolError,
    StorageError,
)
from kvps.protocol.envelope import Message, Packet
from kvps.protocol.membership import (
    Done,
    History,
    HistoryIs,
    Join,
    Joined,
    Pending,
    Probe,
    Probed,
    Return,
)
from kvps.protocol.stores import (
    Clock,
    Declare,
    Declared,
    Field,
    Find,
    Found,
    FoundAll,
    GetState,
    Open,
    OpenRound,
    Optimize,
    Place,
    Rate,
    SetState,
    StateIs,
    Status,
    StatusIs,
)
from kvps.protocol.values import (
    Embed,
    Export,
    Load,
    Pull,
    PullChanged,
    PullIds,
    PullRows,
    Push,
    PushIds,
    PushRows,
    Run,
    TableRate,
)
from kvps.tensors import dtype_of, from_frame, to_frame

STORES_MAX = 4096
"""How many stores a job may have."""
STATUS_MAX = 1024
COUNTS_MAX = 16 * 1024
"""How many keys, and how many counts of ranks, one STATUS answer names."""


class Control(PushPull):
    """Answers the requests of one job's workers."""

    def answer(self, session: Session, packet: Packet, now: float) -> Effects:
        """Do what ``packet`` asks.

        Raises:
            KvpsError: if it cannot be done; nothing was changed.
        """
        message, seq = packet.message, packet.envelope.seq
        if not isinstance(message, Probe):
            authority.check(message, session, self.member.view, self._store_of)
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
                embedding_rows.embedding_of(self.engine.chunk(message.chunk)).set_rate(message.lr)
                yield self._send(session, Done(seq))
            case Export():
                yield self._export(session, seq, message)
            case PushRows():
                yield from self._push_rows(session, seq, message, packet, now)
            case PullRows():
                yield from self._pull_rows(session, seq, message, packet)
            case PullChanged():
                yield from self._pull_changed(session, seq, message)
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

    def image(self) -> tuple[Snapshot, Callable[[], None]]:
        """Return what all stores hold, and what is to be called when nobody needs it any more."""
        chunks = self.engine.chunks
        releases = [chunk.keep() for chunk in chunks.by_number.values()]
        stores = tuple([capture.image_of(space, chunks) for space in self.spaces.values()])

        def release() -> None:
            for one in releases:
                one()

        return Snapshot(self.engine.server, self.engine.servers, stores), release

    def restore(self, image: Snapshot) -> None:
        """Hold what ``image`` says. Nothing is held yet.

        Raises:
            KvpsError: if that cannot be.
        """
        for store in image.stores:
            self._open_store(store.opened)
            space = self.spaces[store.name]
            capture.revive(
                space, self.engine.chunks, store, self.engine.server, self.engine.servers
            )
            over, last, made = store.joins
            space.joins = JoinTracker(over, dict(last), dict(made))

    def revive(self, store: str, whole: Snapshot) -> Effects:
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
        pieces = capture.revive(
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

    def _look_at(self, space: ServerStore, is_all: bool = False) -> Effects:
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

    # --- what waits for something to exist --------------------------------------------------------

    def _declare(self, session: Session, seq: int, message: Declare) -> Effects:
        space, attempt = self._space(message.store), Attempt(message.call, message.refused)
        if message.create:
            if session.rank != message.creator:
                raise ProtocolError(
                    f"rank {session.rank} may not create keys of rank {message.creator}; that rank does"
                )
            life = (session.rank, session.incarnation)
            try:
                places, replaced = space.create(message.entries, message.call, life)
            except KvpsError as error:
                for key in space.wanting(message.entries, message.call):
                    space.refusals.keep(key, attempt, error)
                yield from self._retry()
                raise
            for entry in message.entries:
                space.refusals.forget(entry.key)
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
            for entry in message.entries:
                space.refusals.check(entry.key, attempt)
            while len(found) < len(message.entries):
                entry = message.entries[len(found)]
                place = space.find(entry, message.call, early=message.early)
                if place is None:
                    return None
                found.append(place)
            return Declared(seq, tuple(found), space.stamp(message.entries))

        def why(describe: Describe) -> str:
            key, left = message.entries[len(found)].key, len(message.entries) - len(found) - 1
            more = f" and {left} more" if left else ""
            return (
                f"key {key[:64]!r}{more}: {_of(message.creator, 'has not given a value')(describe)}"
            )

        yield from self._attempt(session, seq, PendingRequest(retry, why))

    def _optimize(self, session: Session, seq: int, message: Optimize) -> Effects:
        space, attempt = self._space(message.store), Attempt(message.call, message.refused)
        numbers = {**message.numbers, "lr_mult": message.lr_mult, "wd_mult": message.wd_mult}
        if message.create:
            self._only_rank_0(session, "set the optimizer")
            try:
                hyper = HyperParams.from_wire(message.name, numbers)
                if message.call > space.optimize_calls:
                    yield from self._wake(self.engine.optimize(space, hyper))
                    space.optimize_calls, space.sent_hyper = message.call, hyper
                    space.optimize_after = message.after
            except KvpsError as error:
                space.refusals.keep(Optimize, attempt, error)
                yield from self._retry()
                raise
            yield self._send(session, Done(seq))
            yield from self._retry()
            return
        hyper = HyperParams.from_wire(message.name, numbers)

        def retry() -> Message | None:
            if not message.resumed:
                space.refusals.check(Optimize, attempt)
            if message.resumed:
                is_past = message.after <= space.optimize_after or space.sent_hyper == hyper
                return Done(seq) if is_past and space.optimize_calls else None
            if space.optimize_calls < message.call:
                return None
            is_same = (space.optimize_calls, space.optimize_after) == (message.call, message.after)
            if is_same and space.sent_hyper != hyper:
                error = Mismatch(
                    f"rank {session.rank} set optimizer {hyper}, rank 0 set {space.sent_hyper}; "
                    "rank 0's counts, so give the same on every rank"
                )
                space.refusals.keep(Optimize, attempt, error)
                raise error
            return Done(seq)

        yield from self._attempt(
            session, seq, PendingRequest(retry, _of(0, "has not set the optimizer"))
        )

    def _rate(self, session: Session, seq: int, message: Rate) -> Effects:
        space, attempt = self._space(message.store), Attempt(message.call, message.refused)
        if space.hyper is None:
            raise ConfigError(f"store {space.name!r} has no optimizer; call set_optimizer() first")
        if message.create:
            self._only_rank_0(session, "set the learning rate")
            if message.call > space.rate_calls:
                try:
                    space.set_rate(message.lr)
                except KvpsError as error:
                    space.refusals.keep(Rate, attempt, error)
                    yield from self._retry()
                    raise
                space.rate_calls, space.sent_lr = message.call, message.lr
                space.rate_after = message.after
            yield self._send(session, Done(seq))
            yield from self._retry()
            return

        def retry() -> Message | None:
            if not message.resumed:
                space.refusals.check(Rate, attempt)
            if message.resumed:
                is_past = message.after <= space.rate_after or space.sent_lr == message.lr
                return Done(seq) if is_past and space.rate_calls else None
            if space.rate_calls < message.call:
                return None
            is_same = (space.rate_calls, space.rate_after) == (message.call, message.after)
            if is_same and space.sent_lr != message.lr:
                error = Mismatch(
                    f"rank {session.rank} set learning rate {message.lr}, rank 0 set "
                    f"{space.sent_lr}; rank 0's counts, so give the same on every rank"
                )
                space.refusals.keep(Rate, attempt, error)
                raise error
            return Done(seq)

        yield from self._attempt(
            session, seq, PendingRequest(retry, _of(0, "has not set the learning rate"))
        )

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

        yield from self._attempt(session, seq, PendingRequest(retry, why))

    def _judge(self, space: ServerStore) -> Effects:
        """Say that a join is over, if that is up to this server."""
        if self.engine.server == JUDGE:
            yield from self._end_join(space, space.joins.judge(self._members(space)))

    def _end_join(self, space: ServerStore, call: int) -> Effects:
        """A join is over: what is open can get no more pushes, and what comes waits for all."""
        if not space.joins.end(call):
            return
        yield from self._look_at(space, is_all=True)
        yield from self._retry()

    # --- answered at once ---------------------------------------------------------------------------

    def _open(self, seq: int, message: Open) -> Message:
        self._open_store(message)
        return Done(seq)

    def _store_of(self, message: Push | PushRows | PushIds | Return) -> ServerStore:
        if isinstance(message, Push | PushIds):
            return self._space_of(message.chunk)
        return self._space(message.store)

    def _open_store(self, opened: Open) -> None:
        space = self.spaces.get(opened.store)
        if space is None:
            if len(self.spaces) >= STORES_MAX:
                raise Overload(
                    f"store {opened.store!r} is one too many: a job may have {STORES_MAX} stores"
                )
            self.spaces[opened.store] = ServerStore(opened, self.engine.chunks, self._memory_limit)
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
            elif isinstance(one, PendingRead):
                space, chunk = self.spaces[one.store], self.engine.chunk(one.chunk)
                describe = self._description(now)
                why = reads.why(space, chunk, one, self._quorum(space), describe)
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


def _of(rank: int, what: str) -> Callable[[Describe], str]:
    """Return what says that a rank has not done something, and how it stands."""
    return lambda describe: f"{ranks_in_words([rank], describe)} {what}"
