"""A worker core on a bench: the test is the scheduler, the servers, the user and the clock.

Nothing answers by itself. The effects of the worker are kept in ``effects``; a step returns the effects of
that step.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, TypeVar

import torch

from kvps.core.effects import Copied, Effect, Exit, Finish, Note, Route, Send
from kvps.core.membership_client import Identity
from kvps.core.worker import calls
from kvps.core.worker.worker import Worker
from kvps.dtypes import Spec
from kvps.errors import KvpsError
from kvps.protocol.envelope import Envelope, Message, Node, Packet, Role
from kvps.protocol.membership import Done, Member, View, Welcome
from kvps.protocol.stores import Declare, Declared, Open, Piece, Place
from kvps.protocol.values import Ack, Receipt
from kvps.tensors import PRIVATE, TORCH, Memory, from_frame, spec_of, to_frame

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

JOB = bytes(range(16))
M = TypeVar("M", bound=Message)


def member(node: Node, state: str = "held", **more: object) -> Member:
    """A seat as a view shows it."""
    fields = {
        "incarnation": 1 + 10 * node.role + node.rank,
        "endpoint": f"tcp://s{node.rank}:1" if node.role is Role.SERVER else "",
        "host": f"host-{node.role}-{node.rank}",
        "lost_for_s": 0.0,
        "reason": "exit code 9" if state != "held" else "",
    }
    return Member(int(node.role), node.rank, state=state, **(fields | more))  # type: ignore[arg-type]


class Readable:
    """Memory that the peers along some routes read where it lies."""

    def __init__(self, *routes: str, shares: bool = False) -> None:
        self.routes = routes
        self.blocks: list[torch.Tensor] = []
        """All blocks that were taken; never given back."""
        self.shares = shares
        """Whether values that were lent can be seen side by side."""

    def empty(self, count: int, dtype: str) -> torch.Tensor:
        self.blocks.append(torch.empty(count, dtype=TORCH[dtype]))
        return self.blocks[-1]

    def lends(self, route: str, pieces: Sequence[torch.Tensor]) -> bool:
        return route in self.routes and all(
            any(
                block.data_ptr() <= piece.data_ptr()
                and piece.data_ptr() + piece.nbytes <= block.data_ptr() + block.nbytes
                for block in self.blocks
            )
            for piece in pieces
        )

    def side_by_side(self, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        return torch.cat(list(parts)) if self.shares else None


class Bench:
    """One worker, joined unless told otherwise."""

    def __init__(
        self,
        workers: int = 2,
        servers: int = 2,
        rank: int = 0,
        join: bool = True,
        ready: bool = True,
        memory: Memory = PRIVATE,
        machines: Sequence[int] = (),
        keys: tuple[str, ...] = (),
        most: int = 0,
        replicas: int = 0,
        replaces: bool = False,
    ) -> None:
        """Put a worker on the bench; ``machines`` are those of all workers, unknown by default.

        With ``most``, workers come and go, and this one was added. The servers are on machine 1, and have
        standbys with ``replicas``.
        """
        self.machines = dict(enumerate(machines))
        self.keys, self.most = keys, most
        self.workers, self.servers, self.rank = workers, servers, rank
        self.now = 100.0
        self.core = Worker(
            Identity(
                Role.WORKER, "tcp://sched:1", "here", 7, "kvps", rank, machine=self.machines.get(rank, 0)
            ),
            self.now,
            memory,
        )
        self.effects: list[Effect] = []
        self.number = 1
        """Of the newest view; peers have seen it, too."""
        self.views = itertools.count(1)
        self._tickets = itertools.count(1)
        self._chunks = itertools.count(1)
        self.take(self.core.start(self.now))
        if join:
            life = 1 + 10 * Role.WORKER + rank
            seat = Welcome(rank, life, workers, servers, most=most, replicas=replicas, replaces=replaces)
            self.scheduler(seat)
            self.view()
            for server in range(servers if ready else 0):
                self.server(server, Welcome(rank, 1, workers, servers))

    # --- steps ------------------------------------------------------------------------------

    def take(self, door: None = None) -> list[Effect]:
        taken = self.core.outbox.take()
        self.effects += taken
        self.core.check()
        return taken

    def scheduler(self, message: Message, job: bytes = JOB) -> list[Effect]:
        envelope = Envelope(job, 0, Role.SCHEDULER, 0, 0, 0)
        return self.take(self.core.on_packet("scheduler", Packet(envelope, message), self.now))

    def view(
        self,
        *changed: Member,
        phase: str = "running",
        reason: str = "",
        epoch: int = 0,
        since: int = 0,
        cut: int = 0,
    ) -> list[Effect]:
        """Show a view in which all seats are held, but for those ``changed``."""
        nodes = [Node(Role.SERVER, rank) for rank in range(self.servers)]
        nodes += [Node(Role.WORKER, rank) for rank in range(self.workers)]
        other = {Node(Role(seat.role), seat.rank): seat for seat in changed}
        if self.most:
            own = Node(Role.WORKER, self.rank)
            other = {own: self.seat(own, "added"), **other}
        members = tuple(other.get(node) or self.seat(node) for node in nodes)
        self.number = next(self.views)
        view = View(self.number, phase, reason, members, epoch, since, cut, self.keys)
        return self.scheduler(view)

    def seat(self, node: Node, state: str = "held", **more: object) -> Member:
        """A seat, on its machine."""
        machine = 1 if node.role is Role.SERVER else self.machines.get(node.rank, 0)
        return member(node, state, **({"machine": machine} | more))

    def neighbour(
        self, rank: int, message: Message, *payload: torch.Tensor, seq: int = 0, **more: object
    ) -> list[Effect]:
        """Let a worker of this machine ask something, along a connection that it opened."""
        return self._from_worker(b"from %d" % rank, rank, message, payload, seq=seq, **more)

    def leader(self, rank: int, message: Message, *payload: torch.Tensor, **more: object) -> list[Effect]:
        """Let a worker of this machine answer, along a connection that we opened."""
        return self._from_worker(f"worker {rank}", rank, message, payload, **more)

    def _from_worker(
        self, route: Route, rank: int, message: Message, payload: Sequence[torch.Tensor], **more: object
    ) -> list[Effect]:
        incarnation = 1 + 10 * Role.WORKER + rank
        fields = {"job": JOB, "view": self.number, "role": Role.WORKER, "rank": rank, "seq": 0}
        envelope = Envelope(**(fields | {"incarnation": incarnation} | more))  # type: ignore[arg-type]
        packet = Packet(envelope, message, tuple(to_frame(values.clone()) for values in payload))
        return self.take(self.core.on_packet(route, packet, self.now))

    def server(
        self,
        rank: int,
        message: Message,
        *payload: torch.Tensor,
        seq: int = 0,
        view: int | None = None,
        life: int = 1,
    ) -> list[Effect]:
        packet = self.packet_of_server(rank, message, *payload, seq=seq, view=view)
        packet = packet._replace(envelope=packet.envelope._replace(incarnation=life))
        return self.take(self.core.on_packet(f"server {rank}", packet, self.now))

    def packet_of_server(
        self, rank: int, message: Message, *payload: torch.Tensor, seq: int = 0, view: int | None = None
    ) -> Packet:
        envelope = Envelope(JOB, view or self.number, Role.SERVER, rank, 1, seq)
        return Packet(envelope, message, tuple(to_frame(values.clone()) for values in payload))

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass, and ring at each deadline."""
        effects, end = [], self.now + seconds
        while (due := self.core.deadline()) is not None and due <= end:
            assert due > self.now or due == self.now
            self.now = max(due, self.now)
            effects += self.take(self.core.on_timer(self.now))
            after = self.core.deadline()
            assert after is None or after > self.now, "a deadline that is never met"
        self.now = end
        return effects

    def call(self, call: calls.Call, timeout_s: float = 300.0) -> int:
        """Make a call; return its ticket."""
        ticket = next(self._tickets)
        self.take(self.core.on_call(ticket, call, self.now + timeout_s, self.now))
        return ticket

    def join(self, timeout_s: float = 300.0) -> int:
        ticket = next(self._tickets)
        self.take(self.core.on_join(ticket, self.now + timeout_s, self.now))
        return ticket

    # --- looking ----------------------------------------------------------------------------

    def sent(self, cls: type[M], server: int | None = None) -> list[M]:
        """All messages of one class so far (to one server)."""
        return [send.packet.message for send in self.sends(cls, server)]  # type: ignore[misc]

    def sends(self, cls: type[Message], server: int | None = None) -> list[Send]:
        return sends(self.effects, cls, server)

    def seqs(self, cls: type[Message], server: int | None = None) -> list[int]:
        return [send.packet.envelope.seq for send in self.sends(cls, server)]

    def finish(self, ticket: int) -> Finish | None:
        """How a call ended, if it did."""
        finishes = [effect for effect in self.effects if isinstance(effect, Finish)]
        ends = [finish for finish in finishes if finish.ticket == ticket]
        assert len(ends) <= 1, "a call ended twice"
        return ends[0] if ends else None

    def error(self, ticket: int) -> KvpsError:
        """The error that a call ended with."""
        end = self.finish(ticket)
        assert end is not None, "the call has not ended"
        assert end.error is not None, f"the call ended well: {end.value}"
        return end.error

    def is_done(self, ticket: int) -> bool:
        """Whether a call ended well."""
        end = self.finish(ticket)
        assert end is None or end.error is None, end
        return end is not None

    def is_copied(self, ticket: int) -> bool:
        return Copied(ticket) in self.effects

    def notes(self) -> list[str]:
        notes = [effect for effect in self.effects if isinstance(effect, Note)]
        return [f"{note.level}: {note.text}" for note in notes]

    def exits(self) -> list[Exit]:
        return [effect for effect in self.effects if isinstance(effect, Exit)]

    # --- what servers usually say -------------------------------------------------------------

    def open(self, store: str = "kv", **options: object) -> None:
        """Open a store on all servers."""
        grace = options.pop("worker_grace_s", 240.0)
        limit = options.pop("timeout_s", 300.0)
        ticket = self.call(calls.OpenStore(store, opened(store, **options), grace, limit))  # type: ignore[arg-type]
        for server in range(self.servers):
            self.server(server, Done(self.seqs(Open, server)[-1]))
        assert self.is_done(ticket)

    def init(self, values: dict[str, torch.Tensor], store: str = "kv") -> None:
        """Initialise keys; each part gets one chunk of its own, which no server loads."""
        keys = tuple((name, spec_of(value)) for name, value in values.items())
        before = len(self.sends(Declare))
        ticket = self.call(calls.Init(store, keys, tuple(values.values())))
        for send in self.sends(Declare)[before:]:
            declare = send.packet.message
            assert isinstance(declare, Declare)
            places = tuple(
                Place(False, (Piece(next(self._chunks), 0, entry.size),) if entry.size else ())
                for entry in declare.entries
            )
            self.server(server_of(send), Declared(send.packet.envelope.seq, places))
        assert self.is_done(ticket)

    def ack(self, server: int, *seqs: int) -> list[Effect]:
        return self.server(server, Ack(tuple(Receipt(seq, 0) for seq in seqs)))


def opened(store: str = "kv", **options: object) -> Open:
    fields: dict[str, object] = {
        "mode": "sync",
        "staleness": 0,
        "deterministic": False,
        "on_worker_lost": "wait",
        "bigarray_bound": 32,
    }
    return Open(store, **(fields | options))  # type: ignore[arg-type]


def sends(effects: Iterable[Effect], cls: type[Message], server: int | None = None) -> list[Send]:
    """Those effects that send a message of one class (to one server)."""
    return [
        effect
        for effect in effects
        if isinstance(effect, Send)
        and isinstance(effect.packet.message, cls)
        and (server is None or server == server_of(effect))
    ]


def server_of(send: Send) -> int | None:
    """The rank of the server that it goes to; -1 for the scheduler, None for a worker."""
    to = str(send.to)
    return -1 if to == "scheduler" else int(to[7:]) if to.startswith("server ") else None


def values_of(send: Send, dtype: str = "float32") -> list[float]:
    """The numbers in the one payload frame of a packet."""
    (frame,) = send.packet.payload
    values: list[float] = from_frame(frame, dtype).tolist()
    return values


def push(values: dict[str, torch.Tensor], **more: object) -> calls.PushValues:
    fields: dict[str, object] = {"sinks": None, "priority": 0, "eager": True}
    return calls.PushValues("kv", tuple(values), tuple(values.values()), **(fields | more))  # type: ignore[arg-type]


def pull(
    sinks: dict[str, torch.Tensor], priority: int = 0, least: int = 0, views: bool = False
) -> calls.PullValues:
    wanted = calls.Views.VIEWS if views else tuple(sinks.values())
    return calls.PullValues("kv", tuple(sinks), wanted, priority, least)


def spec(count: int, dtype: str = "float32") -> Spec:
    return Spec(dtype, (count,))
