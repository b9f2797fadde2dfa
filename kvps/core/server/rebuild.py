"""Stores of a server that has taken another's place, made again from what the workers hold.

Theory of operation
-------------------
In a store that ``rebuilds``, servers only add up, and each worker keeps the values that it was told last
until the next come. When a server takes another's place, each worker *tells* it where the keys lay (TELL),
*gives* the values that it keeps (GIVE), and sends OPEN. A worker that has just opened the store sends OPEN
alone: it holds nothing.

OPEN is answered when all workers that are not replaced have sent it. Of each piece the newest values count:
nobody alive has seen newer ones, and what was pushed since is pushed again by the ranks that wait for an
answer. So the server needs no counts of pushes. Keys lie in the same chunks as before; a push that is sent
again is the same bytes.

Where a piece has no values, or a worker says why the store cannot be made again, all are answered by
ServerLost. What was told and given is held until then, within the memory limit, and by no server that has the
store, or that took nobody's place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kvps import protocol as p
from kvps.core.server.chunks.slab import Chunk
from kvps.core.server.context import RequestContext
from kvps.core.server.options import CHUNK_BYTES_MAX
from kvps.core.server.participation import JoinTracker
from kvps.core.server.sessions import Describe, PendingRequest, Session
from kvps.core.server.store import ServerStore, Shard
from kvps.dtypes import BY_ID, Spec
from kvps.errors import KvpsError, ProtocolError, ServerLost
from kvps.phrases import ranks_in_words
from kvps.protocol.envelope import Message, Role
from kvps.tensors import from_frame

KEY_BYTES = 1024
"""Bytes of Python objects that a key takes which was told, roughly."""


class Given(NamedTuple):
    """Values that a worker has given."""

    version: int
    broadcasts: int
    start: int
    values: torch.Tensor


@dataclass(slots=True)
class Statements:
    """The statements of the workers about one store."""

    ended: dict[int, int] = field(default_factory=dict)
    """Rank -> the incarnation that has sent OPEN."""
    reason: str = ""
    waits: bool = False
    """Some worker waits for what comes of a push."""
    joins: int = -1
    """The joins that are over; below 0 before a worker has told."""
    keys: dict[str, p.ToldKey] = field(default_factory=dict)
    given: dict[int, dict[tuple[int, int], Given]] = field(default_factory=lambda: defaultdict(dict))
    """Chunk -> (start, size) -> the newest values that were given of just these elements."""
    held_bytes: int = 0
    """Bytes of the keys and of the values."""

    def give_up(self, reason: str) -> None:
        """Hold nothing; an empty ``reason`` says that the store is made."""
        self.reason = self.reason or reason
        self.keys.clear()
        self.given.clear()
        self.held_bytes = 0


class Rebuilds:
    """The stores that workers tell of.

    Args:
        context: of the server's requests.
        make_store: makes a store that has no keys.
        limit_bytes: the most that is held of what workers tell and give; None for any number.
        is_on: whether the server has taken another's place.
    """

    def __init__(
        self,
        context: RequestContext,
        make_store: Callable[[p.Open], None],
        limit_bytes: int | None,
        *,
        is_on: bool = False,
    ) -> None:
        self._context = context
        self._make_store = make_store
        self._limit_bytes = limit_bytes
        self.is_on = is_on
        self._told: dict[str, Statements] = defaultdict(Statements)

    @property
    def held_bytes(self) -> int:
        """Bytes of what workers have told and given."""
        return sum([told.held_bytes for told in self._told.values()])

    def tell(self, message: p.Tell) -> None:
        """A worker says where keys of a store lay."""
        told = self._hears(message.store)
        if told is None:
            return
        told.reason, told.waits = told.reason or message.reason, told.waits or message.waits
        if told.joins not in (-1, message.joins):
            told.reason = told.reason or "some workers have ended a join that others have not"
        told.joins = message.joins
        before = len(told.keys)
        told.keys.update({key.key: key for key in message.keys})
        self._hold(told, (len(told.keys) - before) * KEY_BYTES)

    def give(self, message: p.Give, frame: memoryview) -> None:
        """A worker gives values that it was told last."""
        told = self._hears(message.store)
        if told is None:
            return
        given, at = told.given[message.chunk], 0
        values = from_frame(frame, BY_ID[message.dtype].name)
        for start, size, version in message.runs:
            known = given.get((start, size))
            if known is None or known[:2] < (version, message.broadcasts):
                own = values[at : at + size].clone()  # a frame may be its sender's memory
                given[start, size] = Given(version, message.broadcasts, start, own)
                told.held_bytes += own.nbytes if known is None else 0
            at += size
        self._hold(told, 0)

    def _hears(self, store: str) -> Statements | None:
        """Return the statements about a store; None where no more are heard."""
        if not self.is_on or store in self._context.stores:
            return None
        told = self._told[store]
        return None if told.reason else told

    def _hold(self, told: Statements, more_bytes: int) -> None:
        """Count bytes that are held, and hold none where they are too many."""
        told.held_bytes += more_bytes
        if self._limit_bytes is not None and self.held_bytes > self._limit_bytes:
            told.give_up(f"it takes more than the {self._limit_bytes} bytes of the server's memory limit")

    def open(self, session: Session, seq: int, message: p.Open) -> bool:
        """Let OPEN wait for those of the other workers; return whether it concerns a store that is made
        again."""
        name, context = message.store, self._context
        if not (self.is_on and message.rebuilds) or name in context.stores:
            return False
        told = self._told[name]
        told.ended[session.rank] = session.incarnation

        def retry() -> Message | None:
            if told.reason:
                raise ServerLost(
                    f"server {context.member.rank} was lost, and store {name!r} cannot be made again from "
                    f"what its workers hold: {told.reason}. Start the job again from saved weights"
                )
            if name not in context.stores and not self._missing(told):
                told.give_up(self._left(told) or self._build(message, told))
                return retry()
            return p.Done(seq) if name in context.stores else None

        def why(describe: Describe) -> str:
            missing = ranks_in_words(sorted(self._missing(told)), describe)
            return f"store {name!r} is made again from what the workers hold, and {missing} has not told yet"

        context.has_news = True
        context.attempt(session, seq, PendingRequest(retry, why))
        context.retry()
        return True

    def _missing(self, told: Statements) -> list[int]:
        """Return the ranks that have not told all that they hold."""
        ranks = self._context.member.quorum().members("wait")
        return [rank for rank in sorted(ranks) if told.ended.get(rank, 0) < self._context.life(rank)]

    def _left(self, told: Statements) -> str:
        """Return which rank has left, if its last pushes are missed; empty if none has."""
        view = self._context.member.view
        members = view.members if view is not None else ()
        left = [member.rank for member in members if member.role == Role.WORKER and member.state == "left"]
        return (
            f"worker {left[0]} has left, and its last pushes with it"
            if left and (told.waits or not told.keys)
            else ""
        )

    def _build(self, opened: p.Open, told: Statements) -> str:
        """Make the store; return why that cannot be."""
        context = self._context
        try:
            self._make_store(opened)
            store = context.stores[opened.store]
            for key in told.keys.values():
                _check(key)
            names = {
                name: (BY_ID[key.dtype].name, sum(piece.size for piece in key.pieces))
                for name, key in told.keys.items()
            }
            store.check_room(names)
            self._place(store, told)
            for key in told.keys.values():
                for piece in key.pieces:
                    self._fill(store, key.key, piece, told)
        except KvpsError as error:
            context.chunks.drop(opened.store)
            context.stores.pop(opened.store, None)
            return str(error)
        store.joins = JoinTracker(max(told.joins, 0), {}, dict.fromkeys(context.lives, max(told.joins, 0)))
        return ""

    def _place(self, store: ServerStore, told: Statements) -> None:
        """Make the chunks as they were, and the keys in them."""
        chunks, there = self._context.chunks, defaultdict[int, list[tuple[int, int, str]]](list)
        dtypes: dict[int, str] = {}
        for name, dtype, shape, call, pieces, offsets in told.keys.values():
            spec = Spec(BY_ID[dtype].name, shape)
            count = sum([piece.size for piece in pieces])
            store.shards[name] = Shard(name, spec, offsets[0] if offsets else 0, count, pieces, offsets, call)
            for number, start, size in pieces:
                there[number].append((start, size, name))
                dtypes[number] = spec.dtype
            chunks.counts[store.name][spec.dtype] += count
        for number, placed in there.items():
            if number in chunks.by_number or number % chunks.servers != chunks.server:
                raise ProtocolError(f"chunk {number} of store {store.name!r} cannot be here")
            stop = max([start + size for start, size, _ in placed])
            chunk = Chunk(number, store.name, dtypes[number], stop, chunks.memory)
            holes = []
            for start, size, name in sorted(placed):
                if start < chunk.used:
                    raise ProtocolError(f"two keys lie at element {start} of chunk {number}; one is {name!r}")
                if start > chunk.used:  # keys were replaced here, or their owner has ended
                    holes.append(chunk.append("", start - chunk.used))
                chunk.append(name, size)
                chunk.fill(start)
            for hole in holes:
                chunk.retire(hole)
            chunks.adopt(chunk)

    def _fill(self, store: ServerStore, name: str, piece: p.Piece, told: Statements) -> None:
        """Write the newest values of a piece.

        Raises:
            ServerLost: if nobody has all of them.
        """
        chunk, stop = self._context.chunks.by_number[piece.chunk], piece.start + piece.size
        found = list(_within(told.given[piece.chunk], piece.start, stop))
        newest = max([given[:2] for given in found], default=(0, 0))
        reached = piece.start
        for given in sorted([given for given in found if given[:2] == newest], key=lambda given: given.start):
            low, high = max(given.start, reached), min(given.start + len(given.values), stop)
            if given.start > reached:
                break
            chunk.buffer.tensor[low:high] = given.values[low - given.start : high - given.start]
            reached = max(reached, high)
        if reached < stop:
            raise ServerLost(f"no worker holds the newest values of key {name!r}")
        for span in chunk.cut(piece.start, stop):
            span.version = newest[0]


def _check(key: p.ToldKey) -> None:
    """Refuse a key that no server can have had.

    Raises:
        ProtocolError: for a piece that is empty, or reaches beyond a chunk.
    """
    for _, start, size in key.pieces:
        if not size or (start + size) * BY_ID[key.dtype].itemsize > CHUNK_BYTES_MAX:
            raise ProtocolError(f"key {key.key!r} has {size} elements from {start} of a chunk")


def _within(given: dict[tuple[int, int], Given], start: int, stop: int) -> Iterator[Given]:
    """Yield the values of which some lie from ``start`` to ``stop``."""
    for (begin, size), values in given.items():
        if begin < stop and start < begin + size:
            yield values
