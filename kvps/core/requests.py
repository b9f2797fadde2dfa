"""What each request of a worker does on a server, and when it is answered.

One method per message. A request that can be answered at once is; one that cannot is *pending*
in its session, as a :class:`~kvps.core.engine.Reading` (it wants values) or as a
:class:`Waiting` (it wants something to exist), until something moves that it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvps.core.effects import Effects, Route, Send
from kvps.core.engine import Engine, Reading
from kvps.core.hyper import Hyper
from kvps.core.member import Membership
from kvps.core.namespace import Namespace
from kvps.core.norms import Norm
from kvps.core.rounds import Span, Verdict
from kvps.errors import ConfigError, KeyNotFound, KvpsError, Mismatch, ProtocolError
from kvps.messages import (
    Ack,
    Ask,
    Clock,
    Declare,
    Declared,
    Done,
    Error,
    Field,
    Find,
    Found,
    FoundAll,
    GetState,
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
    Push,
    Rate,
    Receipt,
    SetState,
    StateIs,
    Status,
    StatusIs,
)
from kvps.specs import BY_ID, BY_NAME
from kvps.tensors import dtype_of, from_frame, to_frame

STATUS_MAX = 1024
"""How many rounds and keys one STATUS answer names."""


@dataclass(slots=True)
class Waiting:
    """A request for something that does not exist yet."""

    retry: Callable[[], Message | None]
    """Returns the answer, or None while it still waits."""
    why: Callable[[], str]


@dataclass(slots=True)
class Session:
    """One worker rank as this server knows it, in one of its lives."""

    rank: int
    route: Route
    incarnation: int
    live: bool = True
    """False once a newer incarnation has spoken."""
    pending: dict[int, Waiting | Reading] = field(default_factory=dict)


class Requests:
    """Answers the requests of one job's workers."""

    def __init__(self, member: Membership, engine: Engine, memory_limit: int | None) -> None:
        self.member = member
        self.engine = engine
        self.spaces: dict[str, Namespace] = {}
        self._memory_limit = memory_limit
        self._readers: dict[int, Session] = {}

    def answer(self, session: Session, packet: Packet, now: float) -> Effects:
        """Do what ``packet`` asks.

        Raises:
            KvpsError: if it cannot be done; nothing was changed.
        """
        message, seq = packet.message, packet.envelope.seq
        self._readers[session.rank] = session
        match message:
            case Push():
                yield from self._push(session, seq, message, packet.payload[0], now)
            case Pull():
                yield from self._pull(session, seq, message)
            case Load():
                yield from self._load(session, seq, message, packet.payload[0])
            case Declare():
                yield from self._declare(session, seq, message)
            case Optimize():
                yield from self._optimize(session, seq, message)
            case Rate():
                yield from self._rate(session, seq, message)
            case Probe():
                yield self._send(session, self._probe(session, message))
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
            case _:
                raise ProtocolError(f"a worker may not send {type(message).__name__} to a server")

    def look_again(self, sessions: Iterable[Session]) -> Effects:
        """The view changed: close what can be closed now, and try all that is pending."""
        quorum = self.member.quorum()
        for chunk in self.engine.new_chunk.chunks.values():
            space = self.spaces[chunk.store]
            for span in list(chunk.spans):
                yield from self._wake(self.engine.close(space, chunk, span, quorum))
        yield from self._tell_norms()
        for session in sessions:
            for one in list(session.pending.values()):
                if isinstance(one, Reading):
                    yield from self._read(session, one)
        yield from self._retry()

    # --- values ---------------------------------------------------------------------------------

    def _push(
        self, session: Session, seq: int, message: Push, frame: memoryview, now: float
    ) -> Effects:
        space = self._space_of(message.chunk)
        gradient = from_frame(frame, BY_ID[message.dtype].name)
        verdict, moved = self.engine.push(space, message, gradient, self.member.quorum(), now)
        if verdict is Verdict.EARLY:
            return  # not taken in: the worker will probe, and send it again
        reading = None
        if message.pull:
            reading = Reading(
                session.rank,
                seq,
                space.name,
                message.chunk,
                values=True,
                asks=tuple(Ask(run.start, run.size, run.number + 1, 0) for run in message.runs),
            )
            session.pending[seq] = reading
        yield from self._wake(moved)
        yield from self._tell_norms()
        if reading is not None:
            yield from self._read(session, reading)
            if reading.done:
                return
        chunk = self.engine.chunk(message.chunk)
        version = min(
            span.version
            for run in message.runs
            for span in chunk.covering(run.start, run.start + run.size)
        )
        yield self._send(session, Ack((Receipt(seq, version),)))

    def _pull(self, session: Session, seq: int, message: Pull) -> Effects:
        space = self._space_of(message.chunk)
        chunk = self.engine.chunk(message.chunk)
        for ask in message.runs:
            chunk.covering(ask.start, ask.start + ask.size)
        reading = Reading(
            session.rank, seq, space.name, message.chunk, message.values, message.runs
        )
        session.pending[seq] = reading
        yield from self._read(session, reading)

    def _read(self, session: Session, reading: Reading) -> Effects:
        """Answer ``reading`` if its conditions hold; else let it wait at what holds it up."""
        if reading.done or not session.live:
            return
        space = self.spaces[reading.store]
        span = self.engine.holdup(space, reading, self.member.quorum())
        if span is not None:
            if reading not in span.waiters:
                span.waiters.append(reading)
            return
        reading.done = True
        session.pending.pop(reading.seq, None)
        stands, values, hold = self.engine.read(space, reading)
        chunk = self.engine.chunk(reading.chunk)
        answer = Pulled(
            reading.seq, chunk.number, BY_NAME[chunk.dtype].id, values is not None, stands
        )
        payload = () if values is None else (to_frame(values),)
        packet = Packet(self.member.envelope(), answer, payload)
        yield Send(session.route, packet, hold)

    def _wake(self, moved: Iterable[Span]) -> Effects:
        for span in moved:
            waiters, span.waiters = span.waiters, []
            for reading in waiters:
                yield from self._read(self._readers[reading.rank], reading)

    def _load(self, session: Session, seq: int, message: Load, frame: memoryview) -> Effects:
        space = self._space_of(message.chunk)
        chunk = self.engine.chunk(message.chunk)
        if BY_ID[message.dtype].name != chunk.dtype:
            raise Mismatch(f"chunk {chunk.number} holds {chunk.dtype}")
        became_ready = space.load(chunk, message, from_frame(frame, chunk.dtype))
        yield self._send(session, Ack((Receipt(seq, 0),)))
        if became_ready:
            yield from self._retry()

    # --- what waits for something to exist --------------------------------------------------------

    def _declare(self, session: Session, seq: int, message: Declare) -> Effects:
        space = self._space(message.store)
        if message.create and session.rank != 0:
            raise ProtocolError(f"rank {session.rank} may not create keys; rank 0 does")
        places: list[Place | None] = [None] * len(message.entries)

        def retry() -> Message | None:
            for index, entry in enumerate(message.entries):
                if places[index] is None:
                    places[index] = space.declare(entry, message.create, message.call)
            known = [one for one in places if one is not None]
            return Declared(seq, tuple(known)) if len(known) == len(places) else None

        def why() -> str:
            keys = [
                entry.key
                for entry, place in zip(message.entries, places, strict=True)
                if place is None
            ]
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            return f"key {keys[0]!r}{more}: rank 0 has not given a value"

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
                space.optimize_calls = message.call
                space.sent_hyper = hyper
                space.optimize(hyper)
            yield self._send(session, Done(seq))
            yield from self._retry()
            return

        def retry() -> Message | None:
            if space.optimize_calls < message.call:
                return None
            if space.optimize_calls == message.call and space.sent_hyper != hyper:
                raise Mismatch(
                    f"rank {session.rank} set optimizer {hyper}, rank 0 set {space.sent_hyper}; "
                    "rank 0's counts, so give the same on every rank"
                )
            return Done(seq)

        yield from self._attempt(
            session, seq, Waiting(retry, lambda: "rank 0 has not set the optimizer")
        )

    def _rate(self, session: Session, seq: int, message: Rate) -> Effects:
        space = self._space(message.store)
        if space.hyper is None:
            raise ConfigError(f"store {space.name!r} has no optimizer; call set_optimizer() first")
        if message.create:
            self._only_rank_0(session, "set the learning rate")
            if message.call > space.rate_calls:
                space.optimize(space.hyper.with_lr(message.lr))
                space.rate_calls = message.call
            yield self._send(session, Done(seq))
            yield from self._retry()
            return

        def retry() -> Message | None:
            if space.rate_calls < message.call:
                return None
            assert space.hyper is not None
            now = space.hyper.values["lr"]
            if space.rate_calls == message.call and now != message.lr:
                raise Mismatch(
                    f"rank {session.rank} set learning rate {message.lr}, rank 0 set {now}; "
                    "rank 0's counts, so give the same on every rank"
                )
            return Done(seq)

        yield from self._attempt(
            session, seq, Waiting(retry, lambda: "rank 0 has not set the learning rate")
        )

    def _attempt(self, session: Session, seq: int, waiting: Waiting) -> Effects:
        try:
            answer = waiting.retry()
        except KvpsError as error:  # the fault of the one who waits, whoever made it move
            answer = Error(seq, error.code, str(error))
        if answer is None:
            session.pending[seq] = waiting
        else:
            session.pending.pop(seq, None)
            yield self._send(session, answer)

    def _retry(self) -> Effects:
        for session in self._readers.values():
            for seq, one in list(session.pending.items()):
                if isinstance(one, Waiting):
                    yield from self._attempt(session, seq, one)

    def _only_rank_0(self, session: Session, what: str) -> None:
        if session.rank != 0:
            raise ProtocolError(f"rank {session.rank} may not {what}; rank 0 does")

    # --- answered at once ---------------------------------------------------------------------------

    def _open(self, seq: int, message: Open) -> Message:
        space = self.spaces.get(message.store)
        if space is None:
            self.spaces[message.store] = Namespace(
                message, self.engine.new_chunk, self._memory_limit
            )
        else:
            space.agree(message)
        return Done(seq)

    def _find(self, seq: int, message: Find) -> Message:
        shards = self._space(message.store).shards
        found = []
        for key in message.keys:
            shard = shards.get(key)
            if shard is None or not shard.ready:
                found.append(Found(0, ()))
            else:
                found.append(Found(BY_NAME[shard.spec.dtype].id, shard.spec.shape))
        return FoundAll(seq, tuple(found))

    def _probe(self, session: Session, message: Probe) -> Message:
        missing, pending = [], []
        for seq in message.seqs:
            one = session.pending.get(seq)
            if one is None:
                missing.append(seq)
            elif isinstance(one, Reading):
                why = self.engine.why(self.spaces[one.store], one, self.member.quorum())
                pending.append(Pending(seq, why))
            else:
                pending.append(Pending(seq, one.why()))
        return Probed(tuple(missing), tuple(pending))

    def _status(self, seq: int, message: Status, now: float) -> Message:
        space = self._space(message.store)
        required = self.member.quorum().required(space.opened.on_worker_lost)
        rounds: list[OpenRound] = []
        clocks: list[Clock] = []
        for key, shard in space.shards.items():
            for piece in shard.pieces[:1]:
                chunk = self.engine.chunk(piece.chunk)
                span = chunk.covering(piece.start, piece.start + piece.size)[0]
                clocks.append(Clock(key, {str(rank): n for rank, n in span.pushed.items()}))
                if span.rounds:
                    oldest = span.rounds[0]
                    missing = span.missing(required)
                    age_s = max(0.0, now - oldest.opened_at)
                    rounds.append(OpenRound(key, oldest.number, missing, age_s))
        return StatusIs(seq, tuple(rounds[:STATUS_MAX]), tuple(clocks[:STATUS_MAX]))

    # --- the optimizer's state ------------------------------------------------------------------------

    def _get_state(self, session: Session, seq: int, message: GetState) -> Send:
        chunk = self.engine.chunk(message.chunk)
        stop = message.start + message.size
        span = chunk.covering(message.start, stop)[0]
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
        stop = message.start + message.size
        spans = chunk.cut(message.start, stop)
        if space.updater is None:
            raise ConfigError(f"store {space.name!r} has no optimizer; call set_optimizer() first")
        if chunk.state is None:
            chunk.state = space.updater.new_state(chunk.buffer.tensor)
        for one, frame in zip(message.fields, payload, strict=True):
            target = chunk.state.get(one.name)
            if target is None or dtype_of(target).id != one.dtype or one.size != message.size:
                raise Mismatch(
                    f"optimizer {space.updater.hyper.name!r} has no state {one.name!r} of "
                    f"{BY_ID[one.dtype].name}[{one.size}]; the states are those of another "
                    "optimizer"
                )
            target[message.start : stop].copy_(from_frame(frame, BY_ID[one.dtype].name))
        for span in spans:
            span.step = message.step
        return Done(seq)

    # --- norms of whole tensors -----------------------------------------------------------------------

    def norms(self, message: Norms, server: int) -> Effects:
        """Another server told its sums of squares, or asked for ours."""
        space = self._space(message.store)
        if message.key not in space.shards:
            raise KeyNotFound(f"server {self.engine.server} holds no part of {message.key!r}")
        number = (message.store, message.key, message.rank, message.number)
        norm = self.engine.heard(number, server, message.sums)
        if message.reply and norm.mine:
            yield from self._tell(norm, {server}, reply=False)
        yield from self._wake(self.engine.settle(space, norm))
        yield from self._tell_norms()

    def _tell_norms(self) -> Effects:
        """Tell the sums that were just completed here."""
        for norm in self.engine.untold():
            yield from self._tell(norm, norm.holders, reply=False)

    def tell_again(self) -> Effects:
        """Tell the sums again to those who may have missed them, and ask for theirs."""
        for norm in self.engine.norms.values():
            if norm.mine and norm.unheard:
                yield from self._tell(norm, norm.unheard, reply=True)

    def _tell(self, norm: Norm, servers: Iterable[int], reply: bool) -> Effects:
        store, key, rank, number = norm.id
        for server in sorted(servers):
            yield Send(
                f"server {server}",
                self.member.packet(Norms(store, key, rank, number, norm.mine, reply)),
            )

    # --- small things ---------------------------------------------------------------------------------

    def _space(self, name: str) -> Namespace:
        space = self.spaces.get(name)
        if space is None:
            raise ProtocolError(f"server {self.engine.server}: store {name!r} was not opened")
        return space

    def _space_of(self, chunk: int) -> Namespace:
        return self.spaces[self.engine.chunk(chunk).store]

    def _send(self, session: Session, message: Message) -> Send:
        return Send(session.route, self.member.packet(message))
