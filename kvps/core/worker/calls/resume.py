"""The calls of a process that may have taken another's place: where it begins, and how it gets there.

A replacement knows from the servers which push of each key its rank owes next. Its script gets
there in one of two ways, by :class:`TakePlace`. It may ask for the number and begin there. Or it
runs again from its beginning, as its predecessor did, and *replays*: a front end passes over the
steps before that number, and the calls that all ranks make together pass at once, because the
others made theirs with the predecessor (:attr:`WorkerStore.is_replaying`). :class:`PassOver`
counts these steps, and :class:`EndReplay` ends this.

A rank that owes its first push has made no step: its calls are numbered from its own beginning,
and the k-th of them meets the k-th of the others without further ado.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

from kvps import protocol as p
from kvps.core.worker.calls.base import Call, OnTimeout, Operation, Values, frozen, numbered
from kvps.core.worker.calls.collective import BROADCAST
from kvps.core.worker.calls.keys import find, lookup
from kvps.core.worker.connection import Request
from kvps.core.worker.consistent_read import AwaitAcks, Step, Steps, read_versions
from kvps.core.worker.plan import ANY
from kvps.core.worker.store import Made, WorkerStore
from kvps.protocol.envelope import Packet


class Place(NamedTuple):
    """Where a process begins."""

    owed: int
    """The lowest number of a push that this rank owes on any part of any of the keys."""
    most_owed: int
    """The highest."""
    is_replacement: bool = False
    """A predecessor had this rank."""
    joins: int = 0
    """Number of joins that are over."""
    restored: int = 0
    """The checkpoint from which the store was restored last; 0 for none."""
    rate: float | None = None
    """The learning rate of the round before ``owed``; None if it is not known."""


@frozen
class TakePlace(Call):
    """Number the next pushes of ``keys`` from the lowest number that this rank owes on any part; finishes
    with the :class:`Place`."""

    title = "resume()"
    on_timeout = OnTimeout.RETRY

    keys: tuple[str, ...]
    replays: bool = True
    """The script runs again from its beginning."""
    tells: bool = False
    """The script is told the number, and begins there with whatever else it pushes."""

    def run(self, store: WorkerStore, values: Values) -> Operation:
        place = yield from _take_place(store, self.keys, self.replays)
        store.placed.update(self.keys)
        beginning = store.beginning
        if self.tells and place.is_replacement:
            beginning.step = place.owed or beginning.step
        # A script that runs again makes each push of its predecessor again.
        beginning.asks = beginning.step > 0 or (beginning.asks and not self.replays)
        return place


@frozen
class EnterStore(Call):
    """Take part in a store from now on: rounds that are open wait for this rank, and so do barriers.

    The core makes it itself, before the first call of an added worker for which that matters.
    """

    title = "the entry into a store"

    def run(self, store: WorkerStore, values: Values) -> Operation:
        yield store.everywhere(p.Return(store.name, 0))
        store.has_entered, store.is_away = True, False
        store.barriers.pop(BROADCAST, None)
        found = yield from find(store, tuple(store.keys))
        for name, (_, call) in found.items():
            store.keys[name].broadcasts = call
        yield from _history(store, Place(0, 0), replays=False)
        return None


@frozen
class PassOver(Call):
    """The script has passed over a step; the workers that wait for this one may hear of it."""

    title = "a step of a replay"
    on_timeout = OnTimeout.RETRY

    def run(self, store: WorkerStore, values: Values) -> Operation:
        yield []
        store.replayed += 1
        return None


@frozen
class EndReplay(Call):
    """The script has reached the place of its predecessor: from now on its calls are made."""

    title = "the end of a replay"
    on_timeout = OnTimeout.RETRY

    def run(self, store: WorkerStore, values: Values) -> Operation:
        yield []
        store.is_replaying = False
        return None


def _take_place(
    store: WorkerStore, names: tuple[str, ...], replays: bool
) -> Generator[Step, list[Packet], Place]:
    yield AwaitAcks()
    specs = yield from lookup(store, names)
    known = tuple(name for name in names if specs[name] is not None)
    if store.is_added:
        yield from numbered(store, known)
        starts = [store.keys[name].number if specs[name] is not None else 0 for name in names]
        begun = Place(min(starts, default=0), max(starts, default=0))
        return (yield from _history(store, begun, replays))
    plan = store.plan(known)
    # Who knows what it owes has to hold the values before: a lost server may be made again from them.
    read = yield from read_versions(store, plan, ANY, ANY, keeps=True)
    numbers = [owed for parts in read.by_key() for _, owed in parts.values()]
    if len(plan.keys) < len(names):
        numbers.append(0)  # of a key that is not there yet, all pushes are owed
    owed = min(numbers, default=0)
    for key in plan.keys:
        key.number, key.since, key.is_refused = owed, 0, False
        key.heard = max(key.heard, owed)  # what was dropped before, a predecessor was told of
    return (yield from _history(store, Place(owed, max(numbers, default=0)), replays))


def _history(store: WorkerStore, place: Place, replays: bool) -> Generator[Step, list[Packet], Place]:
    """Go on with the calls of all ranks where this rank's predecessor stopped, if it had one."""
    pushed = store.pushed if store.ordered and store.pushed > 0 else None
    (answer,) = yield [Request(None, p.Resume(store.label, pushed))]
    resumed = answer.message
    assert isinstance(resumed, p.Resumed)
    store.is_replaying = False
    if not resumed.replaced:
        return place
    own = store.optimized, store.rated
    yield from inherit(store)
    place = place._replace(is_replacement=True, joins=store.joins, restored=store.restored)
    is_first = store.pushes == 0 and store.joins == 0 and not store.is_away
    if is_first and not store.is_added:
        store.optimized, store.rated = own
        return place
    store.is_resumed, store.is_replaying = True, replays and not store.is_added
    if store.rated.number > 0 and max(store.rated.after, store.optimized.after) < store.pushed:
        place = place._replace(rate=store.rate)
    if replays and not store.ordered:
        return place  # its barriers are those of its predecessor, from the first on
    met = {name: store.barriers[name] for name in (BROADCAST,) if name in store.barriers}
    if store.is_added:
        place = place._replace(is_replacement=False)
    # A name mostly stands for one moment: a rank that is not sure whether its predecessor stood there stands
    # there again, and passes if it did. Barriers without a name are counted.
    back = not store.is_added
    again = {name: number - (back and bool(name)) for name, number in resumed.barriers.items()}
    store.barriers = again | met
    return place


def inherit(store: WorkerStore) -> Steps:
    """Count the calls of all ranks from the counts that the servers have."""
    answers = yield store.everywhere(p.History(store.name))
    known = [answer.message for answer in answers if isinstance(answer.message, p.HistoryIs)]
    newest = max(known, key=lambda history: history.rate_calls)
    # Rank 0 goes on from what some server knows (R125). To the others the optimizer is set when every
    # server has it: rank 0 may be ahead of them in a new epoch, and be setting it again.
    furthest = max if store.rank == 0 else min
    optimized = furthest(known, key=lambda history: history.optimize_calls)
    joins = max(history.joins for history in known)
    missed = [server for server, history in enumerate(known) if history.joins < joins]
    # A predecessor may have ended before its join was heard by all: nobody returns from a join not made.
    yield [Request(server, p.Join(store.name, joins, False)) for server in missed]
    yield [Request(server, p.Return(store.name, joins)) for server in missed]
    if store.rank == 0:  # a call that was heard by some is made with all
        calls = [history.rate_calls for history in known]
        behind = [server for server, made in enumerate(calls) if made < newest.rate_calls]
        rate = p.Rate(store.name, newest.rate_calls, True, newest.lr, newest.rate_after)
        yield [Request(server, rate) for server in behind]
    store.joins = joins
    store.restored = max(history.restored for history in known)
    store.rate = newest.lr
    store.is_away = any(history.joined and history.joins == joins for history in known)
    store.rated = Made(newest.rate_calls, newest.rate_after, is_inherited=True)
    store.optimized = Made(optimized.optimize_calls, optimized.optimize_after, is_inherited=True)
