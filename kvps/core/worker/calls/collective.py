"""The calls that all ranks make together: flush, barrier, join; and the status of a store."""

from __future__ import annotations

from collections.abc import Generator

from kvps import protocol as p
from kvps.core.placement import JOIN_SERVER
from kvps.core.worker.calls.base import Call, OnTimeout, Operation, Values, frozen, numbered
from kvps.core.worker.connection import Request
from kvps.core.worker.consistent_read import AwaitAcks, Step
from kvps.core.worker.store import WorkerStore
from kvps.errors import REFUSED, KvpsError
from kvps.protocol.envelope import Packet

TEXT_MAX = 1000
"""Most characters of the reason for a failed call that the other ranks are told."""
BROADCAST = "kvps.broadcast"
"""The barrier at which broadcasts meet."""
SAME = "kvps.same"
"""The barrier at which front ends are compared."""


@frozen
class Flush(Call):
    """Finish when every push so far is acknowledged."""

    title = "the flush of earlier pushes"
    on_timeout = OnTimeout.RETRY

    def run(self, store: WorkerStore, values: Values) -> Operation:
        yield AwaitAcks()
        return None


def barrier(
    store: WorkerStore,
    name: str | None,
    what: str = "",
    failure: KvpsError | None = None,
    traits: tuple[p.Trait, ...] = (),
) -> Generator[Step, list[Packet], bool]:
    """Flush, then wait for the others; return whether only a predecessor of this process stood there.

    Args:
        store: the keys and counters.
        name: of the barrier.
        what: the call that begins here; all fail where it is not the same on every worker.
        failure: why this worker does not pass; the others fail by it, too, and this worker by the answer.
        traits: what all workers have in common, or fail.
    """
    yield AwaitAcks()
    title = "" if name is None else name
    if store.is_replaying and title != BROADCAST:
        if not store.ordered:
            store.barriers[title] = store.barriers.get(title, 0) + 1
        return True
    waits, after = store.waits_for_lost, store.pushed
    code, text = (0, "") if failure is None else (failure.code, str(failure)[:TEXT_MAX])
    own = (SAME,) if store.is_added else (BROADCAST, SAME)
    is_lost = store.is_resumed and store.ordered and title not in own
    if is_lost and title not in store.barriers:
        (answer,) = yield [
            Request(None, p.Barrier(store.label, title, 0, waits, after, True, what, code, text))
        ]
        released = answer.message
        assert isinstance(released, p.Released)
        if released.number is not None:
            store.barriers[title] = released.number + 1
        return released.number is None
    number = store.barriers.get(title, 0)
    store.barriers[title] = number + 1
    kind = p.Barrier, title
    refused = store.attempts.count(kind, number)
    try:
        message = p.Barrier(
            store.label, title, number, waits, after, False, what, code, text, refused, traits
        )
        yield [Request(None, message)]
    except BaseException as error:  # a barrier that was not passed is not counted
        store.barriers[title] -= 1
        if isinstance(error, REFUSED):
            store.attempts.refuse(kind, number)
        raise
    return False


@frozen
class StandAtBarrier(Call):
    """Flush, then wait at a barrier; or, with a ``failure``, let no rank pass it."""

    title = "barrier()"
    on_timeout = OnTimeout.RESUME

    name: str | None
    failure: KvpsError | None = None

    def run(self, store: WorkerStore, values: Values) -> Operation:
        yield from barrier(store, self.name, failure=self.failure)
        return None


@frozen
class Compare(Call):
    """Wait for the others, and fail on all ranks if they are not about to make the same front end."""

    title = "the comparison of models"
    on_timeout = OnTimeout.RESUME

    what: str
    """The front end that is made."""
    traits: tuple[p.Trait, ...]

    def run(self, store: WorkerStore, values: Values) -> Operation:
        yield from barrier(store, SAME, self.what, traits=self.traits)
        return None


@frozen
class JoinStore(Call):
    """Flush, and wait until every rank has run out of batches; finishes with the rank that joined last.

    The others go on without this rank until all have joined. That all have is said by one server, and then by
    this rank to all of them: once they have answered, none closes a round without it. Which numbers it owes
    after the rounds of the others is asked.
    """

    title = "join()"
    on_timeout = OnTimeout.RESUME

    def run(self, store: WorkerStore, values: Values) -> Operation:
        was_away, store.is_away = store.is_away, True
        try:
            yield AwaitAcks()
        except BaseException:
            store.is_away = was_away  # no server was told
            raise
        call = store.joins + 1
        answers = yield [
            Request(server, p.Join(store.name, call, server == JOIN_SERVER))
            for server in range(store.servers)
        ]
        yield store.everywhere(p.Return(store.name, call))
        store.joins, store.is_away = call, False
        if store.ordered:
            for key in store.keys.values():
                key.is_refused = True
            yield from numbered(store, tuple(store.keys))
        judged = answers[JOIN_SERVER].message
        assert isinstance(judged, p.Joined)
        return judged.last


@frozen
class AskStatus(Call):
    """Finishes with every server's STATUS answer."""

    title = "status"
    on_timeout = OnTimeout.RETRY

    def run(self, store: WorkerStore, values: Values) -> Operation:
        answers = yield store.everywhere(p.Status(store.name))
        return [answer.message for answer in answers]
