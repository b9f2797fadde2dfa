"""A server on a stage: a cluster that is only told to it, workers that speak, a clock.

Every packet goes through the wire format, both ways, so that nothing is tested that could not be
said. After each step the server's invariants are checked. No effect is performed: a step returns
what the server said, as :class:`Said`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch

from kvps.core.effects import Disk, Effect, Send
from kvps.core.embedding.tiered import Tier
from kvps.core.limits import Limits
from kvps.core.membership_client import Identity
from kvps.core.optim.hyperparams import resolve
from kvps.core.server.server import Server
from kvps.core.server.snapshot.capture_tables import FilledTables, filled
from kvps.dtypes import BY_ID, BY_NAME
from kvps.errors import KvpsError
from kvps.protocol import wire
from kvps.protocol.envelope import PROTOCOL, Envelope, Loan, Message, Packet, Role
from kvps.protocol.membership import Error, Hello, Member, View, Welcome
from kvps.protocol.stores import Declare, Declared, Entry, Open, Optimize, Piece
from kvps.protocol.values import Ack, Ask, Load, Pull, Pulled, Push, Run
from kvps.tensors import TORCH, dtype_of, from_frame, to_frame

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvps.core.server.chunks.rounds import Span
    from kvps.core.server.chunks.slab import Buffer, Chunk, Chunks
    from kvps.core.server.snapshot.model import Snapshot
    from kvps.core.server.snapshot.storage import Answer, Order

JOB = bytes(range(16))
M = TypeVar("M", bound=Message)


def weight_bytes(chunks: Chunks) -> int:
    """Return the bytes of all keys, and of the rows of tables."""
    keys = sum(
        count * BY_NAME[dtype].itemsize
        for counts in chunks.counts.values()
        for dtype, count in counts.items()
    )
    return keys + sum(chunks.table_bytes.values())


class Said(NamedTuple):
    """One message of the server, and what came with it."""

    to: str | bytes
    message: Message
    payload: tuple[memoryview, ...]
    hold: Buffer | None

    def values(self) -> list[float]:
        """The numbers in the first payload frame of a PULLED."""
        assert isinstance(self.message, Pulled)
        return from_frame(self.payload[0], BY_ID[self.message.dtype].name).tolist()


@dataclass
class Seat:
    """What the view says of one worker."""

    state: str = "held"
    incarnation: int = 0


def filled_tables(snapshot: Snapshot, chunks: Chunks) -> FilledTables:
    """The rows of all tables of ``snapshot``, block after block."""
    blocks = filled(snapshot.stores, chunks)
    while True:
        try:
            next(blocks)
        except StopIteration as over:
            return cast("FilledTables", over.value)


@dataclass
class ServerStage:
    """One server of a job, all of whose members are there, and the route of each worker."""

    workers: int = 2
    servers: int = 1
    rank: int = 0
    memory_limit: int | None = None
    greeted: bool = True
    """Whether the workers have said HELLO."""
    now: float = 100.0
    job: bytes = JOB
    view: int = 0
    seats: list[Seat] = field(default_factory=list)
    every_s: float | None = None
    """How often it wants cuts; None if it has no place for them."""
    limits: Limits | None = None
    most: int = 0
    """Workers may be added until there are so many."""
    tier: Callable[[], Tier] | None = None
    """Makes the place of rows that memory does not hold."""
    counts_late: bool = False
    """The store that was opened last counts late pushes."""
    welcome: dict[str, Any] = field(default_factory=dict)
    """Further fields of its WELCOME."""
    life: int = 0
    """Its incarnation; 0 for that of the only server of its rank."""
    standby: int = 0
    """The incarnation of the standby of its rank, as views show it; 0 for none."""
    notes: list[Effect] = field(default_factory=list)
    """All effects that are no Send, in order."""

    def __post_init__(self) -> None:
        identity = Identity(Role.SERVER, "tcp://scheduler:1", "host", 7, "kvps 0.1")
        self.server = Server(
            identity,
            self.now,
            self.memory_limit,
            checkpoint_every_s=self.every_s,
            limits=self.limits,
            tier=self.tier,
        )
        self.seqs = [0] * self.workers
        self.pieces: dict[str, tuple[Piece, ...]] = {}
        self.seats = [Seat("held", 10 + rank) for rank in range(self.workers)]
        self.take(self.server.start(self.now))
        life = self.life or 1 + self.rank
        self.scheduler(Welcome(self.rank, life, self.workers, self.servers, most=self.most, **self.welcome))
        self.show()
        for rank in range(self.workers) if self.greeted else ():
            self.hello(rank)

    # --- the scheduler ----------------------------------------------------------------------

    def scheduler(self, message: Message) -> list[Said]:
        """The scheduler says something."""
        envelope = Envelope(self.job, self.view, Role.SCHEDULER, 0, 0, 0)
        return self.take(self.server.on_packet("scheduler", over(envelope, message), self.now))

    def show(
        self,
        *,
        servers: Sequence[Seat] | None = None,
        phase: str = "running",
        epoch: int = 0,
        since: int = 0,
        **states: str,
    ) -> list[Said]:
        """Show a new view, after these changes: ``w1="lost"``."""
        for name, state in states.items():
            self.seats[int(name[1:])].state = state
        self.view += 1
        listed = [
            Member(Role.WORKER, rank, seat.incarnation, seat.state, "", "host", 0.0, "", 7)
            for rank, seat in enumerate(self.seats)
        ]
        for rank, seat in enumerate(servers or [Seat("held", 1 + r) for r in range(self.servers)]):
            endpoint = f"tcp://s{rank}:{seat.incarnation}"
            listed.append(Member(Role.SERVER, rank, seat.incarnation, seat.state, endpoint, "host", 0.0, ""))
        if self.standby:
            standby = "held", f"tcp://q:{self.standby}", "other", 0.0, ""
            listed.append(Member(Role.STANDBY, self.rank, self.standby, *standby))
        return self.scheduler(View(self.view, phase, "", tuple(listed), epoch, since))

    def replace(self, rank: int) -> list[Said]:
        """A new process takes worker ``rank``'s seat, and all learn it."""
        self.seats[rank] = Seat("held", self.seats[rank].incarnation + 100)
        said = self.show()
        return said + self.hello(rank)

    # --- the disk ---------------------------------------------------------------------------

    def orders(self) -> list[Order]:
        """What the disk is asked for, since the last time."""
        orders = [effect.order for effect in self.notes if isinstance(effect, Disk)]
        self.notes = [effect for effect in self.notes if not isinstance(effect, Disk)]
        return orders

    def disk(self, answer: Answer) -> list[Said]:
        """The disk has done something."""
        return self.take(self.server.on_disk(answer, self.now))

    def restore(self, snapshot: Snapshot) -> None:
        """The server, which has no store, takes over the stores of ``snapshot``."""
        self.server.control.restore(snapshot, filled_tables(snapshot, self.server.context.chunks))

    def revive(self, snapshot: Snapshot, store: str = "kv") -> list[Said]:
        """A store takes the values that it has in ``snapshot``."""
        self.server.control.revive(store, snapshot, filled_tables(snapshot, self.server.context.chunks))
        return self.take(self.server._flush())

    # --- workers ----------------------------------------------------------------------------

    def hello(self, rank: int, incarnation: int | None = None, **fields: object) -> list[Said]:
        """Worker ``rank`` says HELLO."""
        return self.say(rank, greeting(**fields), seq=0, incarnation=incarnation)

    def say(
        self,
        rank: int,
        message: Message,
        *payload: torch.Tensor,
        seq: int | None = None,
        incarnation: int | None = None,
        route: bytes | None = None,
        role: Role = Role.WORKER,
        job: bytes | None = None,
        lent: bool = False,
        view: int | None = None,
    ) -> list[Said]:
        """Worker ``rank`` says something; its newest incarnation along its usual route.

        What is ``lent`` is read where it lies, in as many pieces as there are.
        """
        if incarnation is None:
            incarnation = self.seats[rank].incarnation
        if seq is None:
            self.seqs[rank] += 1
            seq = self.seqs[rank]
        seen = self.view if view is None else view
        envelope = Envelope(job or self.job, seen, role, rank, incarnation, seq)
        packet = (lending if lent else over)(envelope, message, *payload)
        return self.hear(route or b"w%d" % rank, packet)

    def other(self, rank: int, message: Message, incarnation: int | None = None) -> list[Said]:
        """Server ``rank`` says something."""
        life = 1 + rank if incarnation is None else incarnation
        envelope = Envelope(self.job, self.view, Role.SERVER, rank, life, 0)
        return self.hear(b"s%d" % rank, over(envelope, message))

    def hear(self, route: bytes, packet: Packet) -> list[Said]:
        """Let the server judge a packet by its envelope, and then hear it or refuse it, as the loop does."""
        try:
            is_heard = self.server.admit(route, packet.envelope, type(packet.message))
        except KvpsError as error:
            return self.refuse(route, packet.envelope, error)
        return self.take(self.server.on_packet(route, packet, self.now)) if is_heard else []

    def refuse(self, route: bytes, envelope: Envelope, error: KvpsError) -> list[Said]:
        """Let the server refuse a packet by its envelope: it answers with the error."""
        said = self.take(self.server.on_failure(route, envelope, error, self.now))
        (answer,) = [sent.message for sent in said]
        assert isinstance(answer, Error)
        assert (answer.code, answer.text) == (error.code, str(error))
        return said

    def take(self, door: None = None) -> list[Said]:
        """Collect what is said, and check the server. Who was handed memory must release it."""
        said: list[Said] = []
        for effect in self.server.outbox.take():
            if not isinstance(effect, Send):
                self.notes.append(effect)
                continue
            packet = wire.decode([bytes(frame) for frame in wire.encode(effect.packet)])
            assert packet.message == effect.packet.message
            hold: Buffer | None = effect.hold  # type: ignore[assignment]
            said.append(Said(effect.to, packet.message, packet.payload, hold))
            if hold is not None:
                hold.release()
        self.server.check()
        return said

    # --- what workers usually say -----------------------------------------------------------

    def open(self, mode: str = "sync", store: str = "kv", **options: object) -> None:
        """Open a store, from rank 0."""
        self.counts_late = options.get("late") == "next"
        assert heard(self.say(0, opening(mode, store, **options)), Message)

    def optimizer(self, name: str, call: int = 1, store: str = "kv", **numbers: object) -> None:
        """Set the optimizer, from rank 0."""
        said = self.say(0, optimizing(name, call, True, store, **numbers))
        assert not heard(said, Error), said

    def init(self, key: str, values: Sequence[float] | torch.Tensor, **more: object) -> None:
        """Create ``key`` with these values, from rank 0: DECLARE and LOAD."""
        tensor = as_row(values)
        self.declare(key, tensor, **more)  # type: ignore[arg-type]
        self.load(key, tensor, **more)  # type: ignore[arg-type]

    def declare(
        self,
        key: str,
        row: torch.Tensor,
        call: int = 0,
        store: str = "kv",
        start: int = 0,
        shape: tuple[int, ...] | None = None,
    ) -> list[Said]:
        """Declare ``key`` from rank 0 and remember where it lies."""
        entry = Entry(key, dtype_of(row).id, shape or (len(row),), start, len(row))
        said = self.say(0, Declare(store, True, call, (entry,)))
        (answer,) = heard(said, Declared, b"w0")
        self.pieces[key] = answer.places[0].pieces
        return said

    def load(
        self, key: str, row: torch.Tensor, call: int = 0, pieces: Iterable[Piece] | None = None, **_: object
    ) -> list[Said]:
        """Load the value of ``key`` from rank 0, piece by piece."""
        said, taken = [], 0
        for piece in self.pieces[key] if pieces is None else pieces:
            part = row[taken : taken + piece.size]
            taken += piece.size
            run = Run(piece.start, piece.size, call)
            said += self.say(0, Load(piece.chunk, dtype_of(row).id, (run,)), part)
        return said

    def push(
        self,
        rank: int,
        keys: str | Sequence[str],
        values: Sequence[float] | torch.Tensor,
        number: int,
        *,
        pull: bool = False,
        ranks: tuple[int, ...] | None = None,
        weight: float | None = None,
        since: int | None = None,
        seq: int | None = None,
        incarnation: int | None = None,
    ) -> list[Said]:
        """Push to keys that lie in one chunk, one run for each; ``values`` side by side."""
        row, places = as_row(values), self.places(keys)
        runs = tuple(Run(piece.start, piece.size, number) for piece in places)
        speaks_for = ranks or (rank,)
        share = float(len(speaks_for)) if weight is None else weight
        message = Push(places[0].chunk, dtype_of(row).id, speaks_for, share, pull, runs)
        if self.counts_late:
            message = replace(message, since=(number if since is None else since,) * len(runs))
        return self.say(rank, message, row, seq=seq, incarnation=incarnation)

    def pull(
        self,
        rank: int,
        keys: str | Sequence[str],
        after: int = 0,
        least: int = 0,
        *,
        values: bool = True,
        seq: int | None = None,
    ) -> list[Said]:
        """Pull keys that lie in one chunk, one run for each."""
        places = self.places(keys)
        asks = tuple(Ask(piece.start, piece.size, after, least) for piece in places)
        return self.say(rank, Pull(places[0].chunk, values, asks), seq=seq)

    def places(self, keys: str | Sequence[str]) -> list[Piece]:
        """Where keys of one piece each lie, in the order of the chunk."""
        names = [keys] if isinstance(keys, str) else keys
        return sorted(self.pieces[name][0] for name in names)

    # --- looking ----------------------------------------------------------------------------

    def chunk(self, number: int | None = None) -> Chunk:
        """Return a chunk; the first one made, unless another is meant."""
        first = self.servers + self.rank
        return self.server.context.chunks.at(first if number is None else number)

    def span(self, key: str) -> Span:
        piece = self.pieces[key][0]
        return next(self.chunk(piece.chunk).spans_in(piece.start, piece.start + 1))

    def values(self, key: str) -> list[float]:
        """What the server holds of ``key``."""
        rows = [
            self.chunk(piece.chunk).buffer.tensor[piece.start : piece.start + piece.size]
            for piece in self.pieces[key]
        ]
        return torch.cat(rows).tolist()

    def snapshot(self) -> object:
        """All that a request could change, apart from which session it came along.

        Values are told as text: memory that nobody has loaded yet may hold NaN, which equals nothing.
        """
        context = self.server.context
        chunks = [
            (
                chunk.number,
                chunk.keys,
                chunk.bounds,
                str(chunk.buffer.tensor[: chunk.used].tolist()),
                {n: str(t[: chunk.used].tolist()) for n, t in (chunk.state or {}).items()},
                None if chunk.back is None else str(chunk.back.residual[: chunk.used].tolist()),
                sorted(chunk._blank),
                chunk._retired,
                # How spans are cut means nothing; what they say of each key does.
                [
                    (
                        span.version,
                        span.step,
                        span.pushed,
                        span.head_start,
                        span.clock_from,
                        [(r.number, r.ranks) for r in span.rounds],
                        [(d.number, d.ranks) for d in span.due],
                    )
                    for begin in chunk.bounds[:-1]
                    for span in chunk.spans_in(begin, begin + 1)
                ],
            )
            for chunk in context.chunks.by_number.values()
        ]
        stores = {
            name: (
                store.opened,
                {k: repr(v) for k, v in store.shards.items()},
                store.hyper,
                repr(store.sent_optimizer),
                repr(store.sent_rate),
            )
            for name, store in context.stores.items()
        }
        pending = {rank: sorted(session.pending) for rank, session in context.sessions.items()}
        norms = sorted(self.server.rules.norms.open, key=repr)
        return copy.deepcopy((chunks, stores, pending, weight_bytes(context.chunks), norms))


# --- words ------------------------------------------------------------------------------------------


def over(envelope: Envelope, message: Message, *payload: torch.Tensor) -> Packet:
    """Return the packet as its receiver gets it."""
    frames = wire.encode(Packet(envelope, message, tuple(to_frame(tensor) for tensor in payload)))
    return wire.decode([memoryview(bytearray(frame)) for frame in frames])


def lending(envelope: Envelope, message: Message, *payload: torch.Tensor) -> Packet:
    """Return the packet as its receiver gets it if ``payload`` is lent to it."""
    frames = tuple(to_frame(tensor) for tensor in payload)
    loans = tuple(Loan(1, 1, 0, frame.nbytes) for frame in frames)
    head = wire.encode(Packet(envelope, message, (), loans))
    return wire.decode([bytes(frame) for frame in head])._replace(payload=frames)


def greeting(**fields: object) -> Hello:
    default = {
        "major": PROTOCOL[0],
        "minor": PROTOCOL[1],
        "software": "0.1",
        "features": 0,
        "role": int(Role.WORKER),
        "rank": None,
        "host": "host",
        "pid": 7,
    }
    return Hello(**(default | fields))  # type: ignore[arg-type]


def opening(mode: str = "sync", store: str = "kv", **options: object) -> Open:
    default = {
        "staleness": 0,
        "deterministic": False,
        "on_worker_lost": "wait",
        "bigarray_bound": 100_000,
        "bundles": True,  # so that one may push for several ranks
    }
    return Open(store, mode, **(default | options))  # type: ignore[arg-type]


def optimizing(
    name: str, call: int = 1, create: bool = True, store: str = "kv", **numbers: object
) -> Optimize:
    hyper = resolve(name, numbers)
    return Optimize(store, call, create, name, dict(hyper.values), dict(hyper.lr_mult), dict(hyper.wd_mult))


def as_row(values: Sequence[float] | torch.Tensor) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values
    return torch.tensor(values, dtype=torch.float32)


def zeros(count: int, dtype: str = "float32") -> torch.Tensor:
    return torch.zeros(count, dtype=TORCH[BY_NAME[dtype].name])


def heard(said: Iterable[Said], cls: type[M], to: str | bytes | None = None) -> list[M]:
    """The messages of one class (to one route)."""
    return [item.message for item in said if isinstance(item.message, cls) and to in (None, item.to)]


def pulled(said: Iterable[Said]) -> dict[int, list[float]]:
    """The values that were answered, by the number of the request."""
    return {item.message.seq: item.values() for item in said if isinstance(item.message, Pulled)}


def refusal(said: Sequence[Said]) -> str:
    """The one answer, which must be an ERROR, as ``Class: text``."""
    (answer,) = said
    assert isinstance(answer.message, Error), answer
    from kvps.errors import BY_CODE

    return f"{BY_CODE[answer.message.code].__name__}: {answer.message.text}"


def acked(said: Iterable[Said]) -> list[int]:
    """The requests that were acknowledged."""
    return [receipt.seq for ack in heard(said, Ack) for receipt in ack.receipts]
