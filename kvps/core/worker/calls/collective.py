"""The operations that all ranks make together: flush, barrier, join; and the status of a store."""

from __future__ import annotations

from kvps.core.placement import JUDGE
from kvps.core.worker.calls.base import Conversation, numbered
from kvps.core.worker.connection import Request
from kvps.core.worker.consistent_read import (
    AwaitAcks,
)
from kvps.core.worker.store import WorkerStore
from kvps.errors import REFUSED, KvpsError
from kvps.protocol.membership import (
    Barrier,
    Join,
    Joined,
    Released,
    Return,
)
from kvps.protocol.stores import (
    Status,
)

TEXT_MAX = 1000
"""Characters of why a call fails that the others are told."""


BROADCAST = "kvps.broadcast"
"""The barrier at which broadcasts meet."""


def flush() -> Conversation:
    """Wait until every push so far is acknowledged."""
    yield AwaitAcks()
    return None


def barrier(
    book: WorkerStore, name: str | None, what: str = "", failure: KvpsError | None = None
) -> Conversation:
    """Flush, then wait for the others.

    Args:
        book: the store.
        name: of the barrier.
        what: the call that begins here; all fail where it is not the same on every worker.
        failure: why this worker does not pass: the others fail by it, too, and this one by the answer.
    """
    yield AwaitAcks()
    title = "" if name is None else name
    store, waits, after = book.opened.store, book.waits_for_lost, book.pushed
    code, text = (0, "") if failure is None else (failure.code, str(failure)[:TEXT_MAX])
    is_lost = book.is_resumed and book.ordered and title != BROADCAST
    if is_lost and title not in book.barriers:
        (answer,) = yield [
            Request(None, Barrier(store, title, 0, waits, after, True, what, code, text))
        ]
        released = answer.message
        assert isinstance(released, Released)
        if released.number is not None:
            book.barriers[title] = released.number + 1
        return None
    number = book.barriers.get(title, 0)
    book.barriers[title] = number + 1
    kind = Barrier, title
    refused = book.attempts.count(kind, number)
    try:
        message = Barrier(store, title, number, waits, after, False, what, code, text, refused)
        yield [Request(None, message)]
    except BaseException as error:  # a barrier that was not passed is not counted
        book.barriers[title] -= 1
        if isinstance(error, REFUSED):
            book.attempts.refuse(kind, number)
        raise
    return None


def join(book: WorkerStore) -> Conversation:
    """Let the others go on without this rank until all have joined; return who was the last.

    That is said by one server, and then by this rank to all of them: once they have answered, none
    closes a round without it. Which numbers it owes after the rounds of the others is asked.
    """
    was_away, book.is_away = book.is_away, True
    try:
        yield AwaitAcks()
    except BaseException:
        book.is_away = was_away  # no server was told
        raise
    store, call = book.opened.store, book.joins + 1
    servers = range(book.servers)
    answers = yield [Request(one, Join(store, call, one == JUDGE)) for one in servers]
    yield [Request(one, Return(store, call)) for one in servers]
    book.joins, book.is_away = call, False
    if book.ordered:
        for key in book.keys.values():
            key.is_refused = True
        yield from numbered(book, tuple(book.keys))
    judged = answers[JUDGE].message
    assert isinstance(judged, Joined)
    return judged.last


def status(book: WorkerStore) -> Conversation:
    """Return every server's STATUS answer."""
    answers = yield [Request(server, Status(book.opened.store)) for server in range(book.servers)]
    return [answer.message for answer in answers]
