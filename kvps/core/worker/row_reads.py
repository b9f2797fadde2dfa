"""Reads of rows that lie on several servers, at one version.

The rows differ (those that the caller names, or those that changed); how their answers are brought
to one version does not. It is done as for whole keys (:mod:`kvps.core.worker.consistent_read`),
server by server.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import torch

from kvps.core.placement import lies_by_rows
from kvps.core.row_ranges import RowRanges
from kvps.core.worker.connection import Request
from kvps.core.worker.plan import Key, PieceLocation
from kvps.core.worker.store import WorkerStore
from kvps.dtypes import BY_NAME
from kvps.errors import ProtocolError
from kvps.protocol.envelope import Packet
from kvps.protocol.values import Changed, Dropped, PullChanged, PulledRows, PullRows


class Range(NamedTuple):
    """The rows of a key on one server."""

    server: int
    rows: RowRanges
    lane: int
    """The chunk in which the first of them lies."""


def ranges(key: Key) -> list[Range]:
    """Return the rows of ``key`` on each server; nothing if some row is cut over servers."""
    if not lies_by_rows(key.spec, [(piece.offset, piece.size) for piece in key.pieces]):
        return []
    width = key.spec.width
    by_server: dict[int, list[PieceLocation]] = {}
    for piece in key.pieces:
        by_server.setdefault(piece.server, []).append(piece)
    return [
        Range(
            server,
            RowRanges([(piece.offset // width, (piece.offset + piece.size) // width) for piece in pieces]),
            pieces[0].chunk,
        )
        for server, pieces in by_server.items()
    ]


@dataclass(slots=True)
class ServerPart(abc.ABC):
    """The part of a read of rows that one server answers; it takes the answer in."""

    key: Key
    range: Range
    answer: PulledRows | Changed | None = field(default=None, init=False)
    is_unwanted: bool = field(default=False, init=False)
    """The caller stopped waiting, and the rows are not taken in."""

    @property
    def payload(self) -> tuple[torch.Tensor, ...]:
        """The numbers of the rows, if a request says them."""
        return ()

    @abc.abstractmethod
    def message(self, store: str, after: int, least: int) -> PullRows | PullChanged:
        """Return the message that asks for these rows."""

    def ask(self, store: str, after: int, least: int, priority: int) -> Request:
        """Return the request for these rows."""
        message = self.message(store, after, least)
        server, _, lane = self.range
        return Request(server, message, payload=self.payload, priority=priority, lane=lane, on_reply=self)

    @abc.abstractmethod
    def take(self, answer: PulledRows | Changed, payload: Sequence[memoryview]) -> None:
        """Take the rows of an answer in; their type and width are checked.

        Raises:
            ProtocolError: if they do not fit the request.
        """

    def __call__(self, packet: Packet, wanted: bool) -> None:
        """Note how the key stands, and take the rows in if they are ``wanted``.

        Raises:
            ProtocolError: if the answer does not fit the request.
        """
        answer, spec = packet.message, self.key.spec
        assert isinstance(answer, PulledRows | Changed)
        if answer.width != spec.width or answer.dtype != BY_NAME[spec.dtype].id:
            raise ProtocolError(
                f"server {self.range.server} answered rows of {answer.width} elements of key "
                f"{self.key.name!r}, which is {spec}"
            )
        self.answer, self.is_unwanted = answer, self.is_unwanted or not wanted
        if wanted:
            self.take(answer, packet.payload)

    @property
    def told(self) -> PulledRows | Changed:
        """The answer, which is there."""
        assert self.answer is not None
        return self.answer


PartT = TypeVar("PartT", bound=ServerPart)


@dataclass(slots=True)
class RowRead(Generic[PartT]):
    """The read of some rows of one key."""

    key: Key
    after: int
    priority: int
    parts: list[PartT] = field(default_factory=list)

    @property
    def dropped(self) -> dict[str, Dropped]:
        """Key -> the last update that was not made, if the servers tell."""
        updates = [update for part in self.parts for update in part.told.dropped]
        return {self.key.name: max(updates, key=lambda update: update.number)} if updates else {}

    @property
    def is_unwanted(self) -> bool:
        """Whether the caller stopped waiting."""
        return any(part.is_unwanted for part in self.parts)

    def asked(self, store: WorkerStore) -> list[Request]:
        """Return the requests for all rows."""
        return [part.ask(store.name, self.after, 0, self.priority) for part in self.parts]

    def settle(self, ordered: bool) -> bool:
        """Note in the key the pushes that are applied; return whether some parts may lag behind."""
        key, told = self.key, [part.told for part in self.parts]
        if len(told) == len(ranges(key)):  # nothing is known of servers that were not asked
            applied = min([answer.lowest if ordered else answer.owed for answer in told])
            key.applied = max(key.applied, applied)
        if not ordered:
            key.version = max([key.version, *(answer.highest for answer in told)])
        return True

    def lagging(self, store: WorkerStore) -> list[Request]:
        """Return requests for the parts that lag behind the newest version; as whole keys are read."""
        told = [part.told for part in self.parts]
        if len({answer.owed for answer in told}) > 1:
            return []  # torn by a push that this rank owes to some parts only
        newest = max([answer.highest for answer in told])
        return [
            part.ask(store.name, self.after, newest, self.priority)
            for part in self.parts
            if part.told.lowest < newest
        ]
