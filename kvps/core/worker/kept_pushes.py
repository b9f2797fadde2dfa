"""The pushes whose bytes a worker keeps, in a job whose servers have standbys.

A push that asks for values is kept until they are there, as ever. Another push is acknowledged when it is
taken in, and may be lost with the server until its round is closed. So its bytes are copied then, and kept
until an answer shows the version that the round made: no server shows a version that its standby lacks. A
standby that takes the server's place is sent them again. It counts each once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

from kvps import protocol as p
from kvps.core.worker.calls.base import Call
from kvps.core.worker.connection import Request
from kvps.core.worker.store import WorkerStore

Elements = tuple[tuple[int, int], ...]
"""Where runs begin, and how many elements they have; none of rows."""


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
        self._kept: dict[tuple[int, int | str], dict[Request, tuple[Elements, int]]] = {}
        """(server, chunk or key of rows) -> push -> its elements, and the version that its round makes."""

    def acknowledged(self, request: Request, version: int) -> None:
        """A server has taken in a request; of a push, the elements are at ``version`` at least."""
        message, owner = request.message, request.owner
        if not isinstance(message, p.Push | p.PushRows | p.PushTables):
            return
        assert request.server is not None
        elements: Elements = ()
        place: int | str
        if isinstance(message, p.Push):
            elements = tuple([(start, size) for start, size, _ in message.runs])
            place, number = message.chunk, max([number for _, _, number in message.runs])
        elif isinstance(message, p.PushRows):
            place, number = message.key, message.number
        else:
            place, number = message.chunk, max([part.number for part in message.parts])
        kept = self._kept.setdefault((request.server, place), {})
        for other in [other for other, (where, due) in kept.items() if where == elements and due <= version]:
            del kept[other]
        is_closed = number < version
        if isinstance(owner, HasCall):
            is_closed = is_closed or not self._stores[owner.call.store].ordered
        if not is_closed:
            again = Request(request.server, message, None, request.payload_bytes, request.lane)
            again.payload = tuple([frame.clone() for frame in request.payload])
            kept[again] = elements, number + 1

    def told(self, server: int, pulled: p.Pulled) -> None:
        """A server has answered with values."""
        kept = self._kept.get((server, pulled.chunk), {})
        for request, (elements, due) in list(kept.items()):
            if all(_shows(pulled, start, size, due) for start, size in elements):
                del kept[request]

    def take(self, server: int) -> Iterator[Request]:
        """Yield the pushes that a server is to be sent again, which keeps none of them here."""
        for place in [place for place in self._kept if place[0] == server]:
            kept = self._kept.pop(place)
            yield from sorted(kept, key=lambda request: kept[request][1])

    def clear(self) -> None:
        """Keep nothing: the servers have returned to a cut."""
        self._kept.clear()


def _shows(pulled: p.Pulled, start: int, size: int, version: int) -> bool:
    """Whether an answer shows elements of which all have the version."""
    at = start
    for stand in pulled.runs:
        if stand.start <= at < stand.start + stand.size and stand.version >= version:
            at = stand.start + stand.size
    return at >= start + size
