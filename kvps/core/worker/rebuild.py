"""Rebuilds on a worker: the reads whose values it keeps, and its statements to a server in another's place.

It keeps the payload of the last answer to each of its shares, and gives it up when the next answer is there.
Where values lie in memory that the server lends, that is a lease and no copy. A request without an answer is
sent again as it is, behind all that is told here. Answers of the lost server are ignored from then on: they
have numbers of requests that are no more. See :mod:`kvps.core.server.rebuild`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from kvps import protocol as p
from kvps.core.placement import EMBEDDING, home
from kvps.core.worker.call_table import PendingCall
from kvps.core.worker.calls.base import Call, Operation, Values, frozen
from kvps.core.worker.calls.collective import JoinStore
from kvps.core.worker.calls.dense import PushValues
from kvps.core.worker.calls.keys import Init
from kvps.core.worker.connection import FIRST, Connection, Request
from kvps.core.worker.consistent_read import ReadTracker
from kvps.core.worker.failure_policy import LostServer, named, server_lost
from kvps.core.worker.kept_values import Held, KeptValues
from kvps.core.worker.plan import ChunkSlice
from kvps.core.worker.store import WorkerStore
from kvps.dtypes import BY_NAME
from kvps.protocol.envelope import Packet
from kvps.protocol.membership import Member
from kvps.tensors import from_frame

KEYS_MAX = 256
"""Keys in one TELL."""


@dataclass(slots=True)
class KeptReads(ReadTracker):
    """A read whose values are kept."""

    store: WorkerStore | None = None

    def take(self, share: ChunkSlice, packet: Packet, wanted: bool) -> None:
        """Take in an answer, and keep its values."""
        ReadTracker.take(self, share, packet, wanted)
        answer, store = packet.message, self.store
        assert store is not None
        assert store.kept is not None
        assert isinstance(answer, p.Pulled)
        for frame in packet.payload:  # one; none of a share without elements
            runs = tuple([p.Run(start, size, version) for start, size, version, _ in answer.runs])
            store.kept.keep(Held(share, store.broadcasts, runs, frame))


def keep_values(store: WorkerStore) -> None:
    """Have a store keep the values that it is told."""
    store.kept, store.tracker = KeptValues(), partial(KeptReads, store=store)


class ServerReturns:
    """The servers that have taken another's place, and are told of the stores that rebuild.

    Args:
        stores: all stores, by name.
    """

    def __init__(self, stores: Mapping[str, WorkerStore]) -> None:
        self._stores = stores
        self._telling: dict[int, set[str]] = {}
        """Server -> the stores of which it has not answered yet."""
        self._unsent: dict[int, list[Request]] = {}
        """Server -> requests that it is sent afterwards."""

    def leave(self, link: Connection, new: Member, line: int) -> None:
        """Address another server by ``link`` from now on, once it has welcomed this worker."""
        self._unsent.setdefault(new.rank, []).extend(link.abandon())
        self._telling.pop(new.rank, None)
        link.ready, link.refusal, link.is_returning = False, "", True
        link.has_moved = link.is_of_line(line)
        link.follow(new, line)

    def forsake(self, new: Member, pending: Iterable[PendingCall]) -> list[PendingCall]:
        """The server whose place ``new`` has taken is lost, with all that it held.

        Returns:
            The calls that are over: those that told the lost server, and those that make keys, whose places
            they may know from the lost server. The latter are to be made again.
        """
        why = f"{named(new)} has replaced the server that this worker used, and is empty"
        for store in self._stores.values():
            if store.kept is None and store.lost is None:
                store.lost = server_lost(LostServer(why, 0.0, 0, may_return=False))
        over = [entry for entry in pending if self._is_void(entry, new.rank)]
        unsent = self._unsent[new.rank]
        unsent[:] = [request for request in unsent if request.owner not in over]
        return over

    def is_told(self, server: int) -> bool:
        """Whether a server that took another's place is being told already."""
        return server in self._telling

    def go_on(self, server: int, link: Connection, kept: Iterable[Request]) -> None:
        """A standby has taken the place of its server: send it what was kept, and what is not answered."""
        link.ready, link.is_returning = True, False
        for request in (*kept, *self._unsent.pop(server)):
            if not request.dropped:
                link.queue(request)

    def _is_void(self, pending: PendingCall, server: int) -> bool:
        call = pending.call
        if isinstance(call, TellStore):
            return call.server == server
        return isinstance(call, Init) and not pending.finished and self._stores[call.store].kept is not None

    def begin(self, server: int, pending: Iterable[PendingCall]) -> list[TellStore]:
        """Return the calls that tell a server, which has welcomed this worker; none if they were made."""
        if server in self._telling:
            return []
        rebuilt = [store for store in self._stores.values() if store.kept is not None and store.lost is None]
        self._telling[server] = {store.name for store in rebuilt}
        under_way = [entry.call for entry in pending]
        pushed = {call.store for call in under_way if isinstance(call, PushValues)}
        return [
            TellStore(store.name, server, why_not(store, server, under_way), store.name in pushed)
            for store in rebuilt
        ]

    def end(self, server: int, store: str) -> None:
        """A server has answered."""
        self._telling[server].discard(store)

    def resume(self, server: int, link: Connection) -> None:
        """Send what has waited, once a server has answered all that it was told."""
        if self._telling.get(server) != set():
            return
        del self._telling[server]
        link.ready, link.is_returning = True, False
        for request in self._unsent.pop(server):
            owner = request.owner
            is_lost = isinstance(owner, PendingCall) and self._stores[owner.call.store].lost is not None
            if not request.dropped and not is_lost:
                link.queue(request)


def why_not(store: WorkerStore, server: int, calls: Iterable[Call]) -> str:
    """Return why the part of a store on a server cannot be made again by its workers; empty if it can.

    Args:
        store: the store.
        server: the lost server.
        calls: the calls that are under way, of any store.
    """
    if store.optimized.number:
        return "its servers have an optimizer"
    if store.feedback.is_on:
        return "its values travel compressed"
    if any(name.startswith(EMBEDDING) for name in store.keys):
        return "it has embedding tables"
    waiting: Counter[str] = Counter()
    for call in calls:
        if call.store != store.name:
            continue
        if call.creates and not isinstance(call, Init):
            return f"worker {store.rank} was in {call.title}"
        if isinstance(call, JoinStore):
            return f"worker {store.rank} had joined"
        if isinstance(call, PushValues) and call.sinks is not None:
            waiting.update(call.keys)
    assert store.kept is not None
    versions = store.kept.versions(server)
    for key in store.keys.values():
        least = key.number - waiting[key.name]
        here = [piece for piece in key.pieces if piece.server == server]
        if any(versions.get((piece.chunk, piece.start), 0) < least for piece in here):
            return f"worker {store.rank} has pushed key {key.name!r}, and does not hold what came of it"
    return f"worker {store.rank} had joined" if store.is_away else ""


@frozen
class TellStore(Call):
    """Tell a server that has taken another's place what this rank knows and holds of a store.

    The core makes it itself.
    """

    title = "the return of a server"

    server: int
    reason: str
    waits: bool
    """A push waits for its answer."""

    def run(self, store: WorkerStore, values: Values) -> Operation:
        told = list(_keys(store, self.server))
        parts = [tuple(told[at : at + KEYS_MAX]) for at in range(0, max(1, len(told)), KEYS_MAX)]
        requests = [
            Request(
                self.server, p.Tell(store.name, store.joins, self.reason, self.waits, part), priority=FIRST
            )
            for part in parts
        ]
        assert store.kept is not None
        for share, broadcasts, runs, frame in store.kept.of(self.server):
            values_of = frame if isinstance(frame, torch.Tensor) else from_frame(frame, share.dtype)
            message = p.Give(store.name, share.chunk, BY_NAME[share.dtype].id, broadcasts, runs)
            requests.append(
                Request(
                    self.server, message, payload_bytes=values_of.nbytes, priority=FIRST, payload=(values_of,)
                )
            )
        yield requests
        yield [Request(self.server, replace(store.opened), priority=FIRST)]
        return None


def _keys(store: WorkerStore, server: int) -> Iterator[p.ToldKey]:
    """Yield the keys of which elements lie on a server, and those without elements that it answers for."""
    for name, key in store.keys.items():
        here = [piece for piece in key.pieces if piece.server == server]
        if here or home(name, store.servers) == server:
            pieces = tuple([p.Piece(piece.chunk, piece.start, piece.size) for piece in here])
            offsets = tuple([piece.offset for piece in here])
            spec = key.spec
            yield p.ToldKey(name, BY_NAME[spec.dtype].id, spec.shape, key.broadcasts, pieces, offsets)
