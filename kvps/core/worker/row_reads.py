"""Reads of rows that lie on several servers, at one version.

What is asked for differs (rows that the caller names, or those that changed); how the answers are brought
to one version does not. It is done as for whole keys (:mod:`kvps.core.worker.consistent_read`), server by server.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from kvps.core.placement import lies_by_rows
from kvps.core.worker.connection import Request
from kvps.core.worker.failure_policy import complain
from kvps.core.worker.plan import Key
from kvps.core.worker.store import WorkerStore
from kvps.protocol.envelope import Packet
from kvps.protocol.values import Changed, Dropped, PulledRows


class Range(NamedTuple):
    """The rows of a key on one server."""

    server: int
    first: int
    stop: int
    lane: int
    """The chunk in which the first of them lies."""


def ranges(key: Key) -> list[Range]:
    """Return which rows of ``key`` lie where, in their order; nothing if they are not whole there."""
    if not lies_by_rows(key.spec, [(one.offset, one.size) for one in key.pieces]):
        return []
    width = key.spec.width
    found: list[Range] = []
    for one in key.pieces:
        stop = (one.offset + one.size) // width
        if found and found[-1].server == one.server:
            found[-1] = found[-1]._replace(stop=stop)
        else:
            found.append(Range(one.server, one.offset // width, stop, one.chunk))
    return found


Answer = TypeVar("Answer", PulledRows, Changed)


@dataclass(slots=True)
class ServerPart(abc.ABC, Generic[Answer]):
    """What one server has of the rows that are wanted of one key; it takes its answer in."""

    key: Key
    place: Range
    answer: Answer | None = field(default=None, init=False)

    @abc.abstractmethod
    def ask(self, store: str, after: int, least: int, priority: int) -> Request:
        """Return the request for them."""

    @abc.abstractmethod
    def __call__(self, packet: Packet, wanted: bool) -> None:
        """Note how the key stands, and take the rows if they are ``wanted``.

        Raises:
            ProtocolError: if it is no answer to what was asked.
        """

    @property
    def told(self) -> Answer:
        """The answer, which is there."""
        assert self.answer is not None
        return self.answer


PortionT = TypeVar("PortionT", bound="ServerPart[PulledRows] | ServerPart[Changed]")


@dataclass(slots=True)
class RowRead(Generic[PortionT]):
    """The rows that are wanted of one key, and who has them."""

    key: Key
    after: int
    priority: int
    portions: list[PortionT] = field(default_factory=list)

    def asked(self, store: WorkerStore) -> list[Request]:
        """Return the requests for all of them."""
        return [one.ask(store.name, self.after, 0, self.priority) for one in self.portions]

    def settle(self, ordered: bool) -> None:
        """Note in the key what is applied."""
        key, told = self.key, [one.told for one in self.portions]
        if len(told) == len(ranges(key)):  # of those that were not asked nothing is known
            applied = min([one.lowest if ordered else one.owed for one in told])
            key.applied = max(key.applied, applied)
        if not ordered:
            key.version = max([key.version, *(one.highest for one in told)])

    def lagging(self, store: WorkerStore) -> list[Request]:
        """Return requests for the parts that lag behind the newest version; as whole keys are read."""
        told = [part.told for part in self.portions]
        if len({answer.owed for answer in told}) > 1:
            return []  # torn by a push that this rank owes to some parts only
        newest = max([answer.highest for answer in told])
        return [
            part.ask(store.name, self.after, newest, self.priority)
            for part in self.portions
            if part.told.lowest < newest
        ]


def complain_of_drops(store: WorkerStore, wanted: Iterable[RowRead[PortionT]]) -> None:
    """Raise, or remember, what the answers say of updates that were not made.

    Raises:
        NonFinite: as :func:`~kvps.core.server.nonfinite_log.complain`.
    """
    dropped: dict[str, Dropped] = {}
    for one in wanted:
        for portion in one.portions:
            for drop in portion.told.dropped:
                dropped[one.key.name] = drop
    if dropped:
        complain(store.name, store.ordered, store.keys, dropped)
