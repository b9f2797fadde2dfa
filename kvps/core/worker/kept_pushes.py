"""The pushes whose bytes a worker keeps, in a job whose servers have standbys.

A push that asks for values is kept until they are there, as ever. Another push is acknowledged when it is
taken in, and may be lost with the server until its round is closed. So its bytes are copied then, and kept
until an answer shows the version that the round made: no server shows a version that its standby lacks. A
standby that takes the server's place is sent them again. It counts each once.

Where late pushes count in the next round, the number of a push does not say which round that is: the server
does. There a push that asks for values is kept as well, as these may come before its round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Protocol, runtime_checkable

from kvps import protocol as p
from kvps.core.worker.calls.base import Call
from kvps.core.worker.connection import Request
from kvps.core.worker.store import WorkerStore

Elements = tuple[tuple[int, int], ...]
"""Where runs begin, and how many elements they have; none of rows."""
Place = int | tuple[str, str]
"""A chunk, or the store and the key of rows."""


@runtime_checkable
class HasCall(Protocol):
    """The owner of a request, if that is a call of this worker."""

    call: Call


class KeptPushes:
    """The pushes that are taken in, and of which no answer has shown yet what came of them.

    Args:
        stores: all stores, by name.
    """

    def __init__(self, stores: Mapping[str, WorkerStore]) -> None:
        self._stores = stores
        self._kept: dict[tuple[int, Place], dict[Request, tuple[Elements, int]]] = {}
        """(server, place) -> push -> its elements, and the version that its round makes."""
        self._of_tables: dict[int, dict[Request, dict[int, int]]] = {}
        """Server -> push -> the chunks of its tables whose rounds are open, and the versions they make."""

    def acknowledged(self, request: Request, version: int, due: int = 0) -> None:
        """A server has taken in a request.

        Args:
            request: the request.
            version: of a push, the version of its elements at least.
            due: the version that its round makes; 0 if its number says it.
        """
        message, owner = request.message, request.owner
        if not isinstance(message, p.Push | p.PushRows | p.PushTables):
            return
        assert request.server is not None
        is_ordered = not isinstance(owner, HasCall) or self._stores[owner.call.store].ordered
        if isinstance(message, p.PushTables):
            self._show_tables(request.server, [(part.chunk, version) for part in message.parts])
            tables = {part.chunk: part.number + 1 for part in message.parts if part.number >= version}
            if tables and is_ordered:
                self._of_tables.setdefault(request.server, {})[_again(request)] = tables
            return
        elements: Elements = ()
        place: Place
        if isinstance(message, p.Push):
            elements = tuple([(start, size) for start, size, _ in message.runs])
            place, number = message.chunk, max([number for _, _, number in message.runs])
        else:
            place, number = (message.store, message.key), message.number
        kept = self._kept.setdefault((request.server, place), {})
        for other in [
            other for other, (where, till) in kept.items() if where == elements and till <= version
        ]:
            del kept[other]
        due = due or number + 1
        if due > version and is_ordered:
            kept[_again(request)] = elements, due

    def told(self, request: Request, pulled: p.Answer) -> None:
        """A server has answered, perhaps with values."""
        asked, server = request.message, request.server
        assert server is not None
        if isinstance(pulled, p.PulledTables) and isinstance(asked, p.PullTables):
            stands = zip(asked.parts, pulled.stands, strict=False)
            self._show_tables(server, [(part.chunk, stand.version) for part, stand in stands])
        if not isinstance(pulled, p.Pulled):
            return
        kept = self._kept.get((server, pulled.chunk), {})
        for push, (elements, due) in list(kept.items()):
            if all(_shows(pulled, start, size, due) for start, size in elements):
                del kept[push]
        if pulled.due:
            self.acknowledged(request, min([stand.version for stand in pulled.runs]), pulled.due)

    def _show_tables(self, server: int, shown: list[tuple[int, int]]) -> None:
        """The tables of these chunks have these versions."""
        kept = self._of_tables.get(server, {})
        for push, due in list(kept.items()):
            for chunk, version in shown:
                if due.get(chunk, version + 1) <= version:
                    del due[chunk]
            if not due:
                del kept[push]

    def take(self, server: int) -> Iterator[Request]:
        """Yield the pushes that a server is to be sent again, which keeps none of them here."""
        for place in [place for place in self._kept if place[0] == server]:
            kept = self._kept.pop(place)
            yield from sorted(kept, key=lambda request: kept[request][1])
        yield from self._of_tables.pop(server, {})

    def void(self, store: WorkerStore) -> None:
        """Forget the pushes to a store whose keys were given other values by ``restore()``."""
        places: set[Place] = {piece.chunk for key in store.keys.values() for piece in key.pieces}
        places |= {(store.name, key) for key in store.keys}
        for server, place in [known for known in self._kept if known[1] in places]:
            del self._kept[server, place]
        for kept in self._of_tables.values():
            for push in [push for push, due in kept.items() if not places.isdisjoint(due)]:
                del kept[push]

    def clear(self) -> None:
        """Keep nothing: the servers have returned to a cut."""
        self._kept.clear()
        self._of_tables.clear()


def _again(request: Request) -> Request:
    """Return a push that can be sent again, with a copy of its bytes."""
    message = request.message
    if isinstance(message, p.Push):
        message = replace(message, pull=False)
    again = Request(request.server, message, None, request.payload_bytes, request.lane)
    again.payload = tuple([frame.clone() for frame in request.payload])
    return again


def _shows(pulled: p.Pulled, start: int, size: int, version: int) -> bool:
    """Whether an answer shows elements of which all have the version."""
    at = start
    for stand in pulled.runs:
        if stand.start <= at < stand.start + stand.size and stand.version >= version:
            at = stand.start + stand.size
    return at >= start + size
