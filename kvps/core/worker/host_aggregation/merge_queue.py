"""Pushes and pulls of several workers of one host, merged into one request.

Theory of operation
-------------------
The workers of a machine are *neighbours*. One of them is the *leader* of a chunk: the others send it
their pushes and pulls of that chunk, and it asks the server once for all of them. So a model crosses
the machine's link once in each direction, however many workers train there::

    worker 4 ──┐ gradients lie in their senders' memory
    worker 5 ──┼──► leader ── one PUSH for ranks 4, 5, 6 ──► server
    worker 6 ──┘    adds up when there is room on the uplink

A *bundle* is what is asked once. One of pushes waits until every neighbour has pushed the same
elements with the same number: their round cannot close without any of them, so nothing is lost by
waiting. But a flush or a time limit may wait for one push, and who replaces a lost leader does not know
what was pushed before: so a bundle goes after a while with those who are in it, and soon if one of
them asks after it. One of pulls goes at once, and takes in neighbours that ask for the same before the answer is
there; the answer is kept for those who are likely to come, until the next push.

What was taken in is only known from the server, so a push is acknowledged here when it was there, and
can be asked of the server directly if the leader is lost: the server counts each rank once. It may
also refuse a bundle for the sake of one of its ranks; then it is asked for each of them by itself.

Neighbours whose pushes of one chunk are cut differently would wait for each other in vain: such a
chunk is not bundled any more.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from kvps.core.gradients import DenseGradient, GradientSum
from kvps.core.worker.connection import Request
from kvps.dtypes import BY_ID, BY_NAME, summed_in
from kvps.protocol.envelope import Message
from kvps.protocol.values import Ask, Pull, Pulled, Push, Run, Stand
from kvps.tensors import Memory

WAIT_MAX_S, HURRY_S = 2.0, 0.05
"""How long a bundle waits for those who are missing, and how long once somebody asked after it."""
SHAPES_MAX = 256
"""Of how many ways to cut a chunk it is remembered who has pushed what."""

Shape = tuple[tuple[int, int], ...]
Runs = tuple[Run, ...]
Moment = tuple[int, int | None, int]
"""What tells the values that a pull wants from older and newer ones which no version tells apart: broadcasts,
call and stamp."""
Place = tuple[tuple[Ask, ...], Moment]


@dataclass(slots=True, eq=False)
class Participant:
    """A push or pull of one of the workers on this machine."""

    rank: int
    message: Push | Pull
    who: object
    """Whom to answer."""
    gradient: Callable[[], DenseGradient] | None = None
    """Of a push, until the server has it."""
    priority: int = 0
    bundle: MergedRequest | None = None
    """In which it is."""


@dataclass(slots=True, eq=False)
class MergedRequest:
    """What the server is asked once, for these."""

    message: Push | Pull
    """The first that came."""
    askers: dict[int, Participant] = field(default_factory=dict)
    """By rank."""
    request: Request | None = None
    """Once the server is asked."""
    is_taken_in: bool = False
    """The server has the push."""
    is_asked_after: bool = False

    def add(self, asker: Participant) -> None:
        """Take ``asker`` in, in place of an older life of its rank."""
        self.askers[asker.rank] = asker
        asker.bundle = self

    def waits_for(self, expected: frozenset[int]) -> list[int]:
        """Return which of ``expected`` are missing."""
        return sorted(expected - self.askers.keys())


NEVER: Moment = (-1, None, 0)


@dataclass(slots=True)
class Reply:
    """What the server answered last, for those who have not come for it yet."""

    shape: Shape
    moment: Moment
    versions: tuple[int, ...]
    """The lowest of each run of ``shape``."""
    message: Pulled
    values: torch.Tensor
    served: set[int]

    def meets(self, pull: Pull) -> bool:
        """Whether it is an answer to ``pull``."""
        if _moment(pull) != self.moment or _shape(pull.runs) != self.shape:
            return False
        return all(
            version >= max(ask.after, ask.least)
            for version, ask in zip(self.versions, pull.runs, strict=True)
        )


class ChunkQueue:
    """What a leader knows of one chunk."""

    def __init__(self) -> None:
        self._waiting: dict[Shape, dict[Runs, MergedRequest]] = {}
        """Pushes that wait for those of others."""
        self.pulling: dict[Place, MergedRequest] = {}
        """Pulls that wait for the server, by what they ask for. (Not: for more than that. What another
        waits for may be a push that this one comes before.)"""
        self.answer: Reply | None = None
        self.pullers: set[int] = set()
        """Who has ever pulled by itself."""
        self.is_mixed = False
        """It is cut differently by different workers."""
        self._edges: list[tuple[int, int, int]] = []
        """(number, start, stop) of all runs that wait, in order."""
        self._pushed: dict[Shape, dict[int, tuple[int, ...]]] = {}
        """By rank, the numbers last pushed of runs of these shapes."""

    def bundle(self, message: Push) -> MergedRequest:
        """Return the bundle that waits for such a push, making it if there is none."""
        alike = self._waiting.setdefault(_shape(message.runs), {})
        bundle = alike.get(message.runs)
        if bundle is None:
            self.is_mixed = self.is_mixed or any(map(self._meets_another, message.runs))
            alike[message.runs] = bundle = MergedRequest(message)
            for run in message.runs:
                insort(self._edges, _edge(run))
        return bundle

    def waiting(self) -> list[MergedRequest]:
        """Return all that wait."""
        return [one for alike in self._waiting.values() for one in alike.values()]

    def ready(self, runs: Runs, expected: frozenset[int]) -> list[MergedRequest]:
        """Return those that need not wait now that somebody has pushed ``runs``."""
        if self.is_mixed:
            return self.waiting()
        alike = self._waiting[_shape(runs)].values()
        return [one for one in alike if self.is_complete(one, expected)]

    def _meets_another(self, run: Run) -> bool:
        number, start, stop = _edge(run)
        index = bisect_left(self._edges, (number, start))
        before, after = self._edges[index - 1 : index], self._edges[index : index + 1]
        return any(
            one[0] == number and one[1] < stop and start < one[2] for one in (*before, *after)
        )

    def leaves(self, bundle: MergedRequest) -> None:
        """The bundle waits no more."""
        assert isinstance(bundle.message, Push)
        shape = _shape(bundle.message.runs)
        del self._waiting[shape][bundle.message.runs]
        if not self._waiting[shape]:
            del self._waiting[shape]
        for run in bundle.message.runs:
            del self._edges[bisect_left(self._edges, _edge(run))]

    def note(self, rank: int, runs: Runs) -> None:
        """Remember that ``rank`` has pushed ``runs``."""
        shape = _shape(runs)
        if shape not in self._pushed and len(self._pushed) >= SHAPES_MAX:
            self._pushed.clear()
        numbers = tuple([run.number for run in runs])
        before = self._pushed.setdefault(shape, {}).setdefault(rank, numbers)
        self._pushed[shape][rank] = tuple(map(max, before, numbers))

    def is_complete(self, bundle: MergedRequest, expected: frozenset[int]) -> bool:
        """Whether nobody is missing who has not pushed this before."""
        push = bundle.message
        assert isinstance(push, Push)
        numbers = [run.number for run in push.runs]
        pushed = self._pushed.get(_shape(push.runs), {})
        return all(
            rank in pushed
            and all(last >= number for last, number in zip(pushed[rank], numbers, strict=True))
            for rank in bundle.waits_for(expected)
        )

    def check(self) -> None:
        """Assert the invariants."""
        waiting = self.waiting()
        all_runs = [runs for alike in self._waiting.values() for runs in alike]
        assert self._edges == sorted(_edge(run) for runs in all_runs for run in runs)
        for bundle in waiting:
            assert bundle.askers
            assert bundle.request is None
        assert all(self._waiting.values())
        assert not (self.is_mixed and waiting)
        for bundle in self.pulling.values():
            assert bundle.request is not None


class Bundles:
    """All that this worker collects, for the chunks that it leads."""

    def __init__(self, rank: int, servers: int, memory: Memory) -> None:
        self.rank = rank
        self._servers = servers
        self._memory = memory
        self._expected: frozenset[int] = frozenset()
        """The live workers of this machine."""
        self._desks: defaultdict[int, ChunkQueue] = defaultdict(ChunkQueue)
        self._due: list[tuple[float, int, MergedRequest]] = []
        """A heap of when bundles go, whoever is missing. Some have gone before."""
        self._order = itertools.count()

    # --- what comes from workers --------------------------------------------------------------

    def push(self, asker: Participant, now: float) -> list[Request]:
        """Take a push in; return what the server is to be asked now."""
        message = asker.message
        assert isinstance(message, Push)
        desk = self._desks[message.chunk]
        bundle = desk.bundle(message)
        if not bundle.askers:
            self._go_at(now + WAIT_MAX_S, bundle)
        bundle.add(asker)
        desk.note(asker.rank, message.runs)
        return [self._go(one) for one in desk.ready(message.runs, self._expected)]

    def pull(self, asker: Participant) -> Request | Reply | None:
        """Take a pull in; return what the server is to be asked, or the answer if it is there."""
        message = asker.message
        assert isinstance(message, Pull)
        desk = self._desks[message.chunk]
        desk.pullers.add(asker.rank)
        answer = desk.answer
        if answer is not None and asker.rank not in answer.served and answer.meets(message):
            answer.served.add(asker.rank)
            self._keep(desk, answer)
            return answer
        place = message.runs, _moment(message)
        bundle = desk.pulling.get(place)
        if bundle is not None and asker.rank not in bundle.askers:
            bundle.add(asker)
            return None
        bundle = MergedRequest(message)
        bundle.add(asker)
        bundle.request = Request(
            message.chunk % self._servers,
            message,
            lane=message.chunk,
            priority=asker.priority,
            owner=bundle,
        )
        desk.pulling[place] = bundle
        return bundle.request

    def expect(self, ranks: frozenset[int]) -> list[Request]:
        """These live on this machine now; return what the server is to be asked for that."""
        self._expected = ranks
        return [self._go(one) for one in self._waiting() if self._is_complete(one)]

    def replaced(self, rank: int) -> None:
        """Another process has this rank: nothing that was kept is for it."""
        for desk in self._desks.values():
            desk.pullers.discard(rank)
            if desk.answer is not None:
                desk.answer.served.add(rank)

    def ask_after(self, bundle: MergedRequest, now: float) -> None:
        """Somebody has waited long for his part of a bundle."""
        bundle.is_asked_after = True
        if bundle.request is None:
            self._go_at(now + HURRY_S, bundle)

    def overdue(self, now: float) -> list[Request]:
        """Return what the server is to be asked now although somebody is missing."""
        late = []
        while (at := self.deadline()) is not None and at <= now:
            late.append(self._go(self._due[0][2]))
        return late

    def deadline(self) -> float | None:
        """When :meth:`overdue` has something to say."""
        while self._due and self._due[0][2].request is not None:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def _go_at(self, time: float, bundle: MergedRequest) -> None:
        heapq.heappush(self._due, (time, next(self._order), bundle))

    # --- what comes from servers --------------------------------------------------------------

    def taken_in(self, bundle: MergedRequest) -> list[Participant]:
        """The server has the pushes of ``bundle``; return those to be told, who are then known."""
        if bundle.is_taken_in or not isinstance(bundle.message, Push):
            return []
        bundle.is_taken_in = True
        self._desks[bundle.message.chunk].answer = None  # there will be another
        for one in bundle.askers.values():
            one.gradient = None
        return list(bundle.askers.values())

    def answered(self, bundle: MergedRequest, message: Pulled, values: torch.Tensor) -> Reply:
        """The server answered; return the answer for all who want values, in memory to be lent."""
        desk = self._desks[bundle.message.chunk]
        self._forget_pull(desk, bundle)
        moment = _moment(bundle.message) if isinstance(bundle.message, Pull) else None
        served = {one.rank for one in bundle.askers.values() if wants_values(one.message)}
        shape = _shape(bundle.message.runs)
        answer = Reply(shape, NEVER, _versions(shape, message.runs), message, values, served)
        others = (desk.pullers & self._expected) - served
        if others or served - {self.rank}:
            answer.values = self._memory.empty(len(values), BY_ID[message.dtype].name)
            answer.values.copy_(values)
        if moment is not None:
            answer.moment = moment
            self._keep(desk, answer)
        return answer

    def refused(self, bundle: MergedRequest) -> list[Request]:
        """The server refused; return what it is to be asked instead, nothing if that is final."""
        desk = self._desks[bundle.message.chunk]
        self._forget_pull(desk, bundle)
        desk.answer = None  # the key may have been replaced
        if bundle.is_taken_in or len(bundle.askers) == 1 or isinstance(bundle.message, Pull):
            return []
        requests = []
        for one in bundle.askers.values():
            single = MergedRequest(one.message, is_asked_after=bundle.is_asked_after)
            single.add(one)
            requests.append(self._asked(single))
        return requests

    # --- how it is done -----------------------------------------------------------------------

    def _go(self, bundle: MergedRequest) -> Request:
        self._desks[bundle.message.chunk].leaves(bundle)
        return self._asked(bundle)

    def _asked(self, bundle: MergedRequest) -> Request:
        """Make the request for a bundle of pushes."""
        askers = [bundle.askers[rank] for rank in sorted(bundle.askers)]
        pushes = [one.message for one in askers if isinstance(one.message, Push)]
        first = pushes[0]
        dtype = first.dtype
        if len(pushes) > 1:
            dtype = BY_NAME[summed_in(BY_ID[dtype].name)].id
        message = replace(
            first,
            dtype=dtype,
            ranks=tuple([one.rank for one in askers]),
            weight=sum([one.weight for one in pushes]),
            pull=any(one.pull for one in pushes),
        )
        bundle.request = Request(
            first.chunk % self._servers,
            message,
            fill=lambda route: _sum(askers),
            payload_bytes=message.payload_sizes()[0],
            lane=first.chunk,
            priority=max([one.priority for one in askers]),
            owner=bundle,
        )
        return bundle.request

    def _keep(self, desk: ChunkQueue, answer: Reply) -> None:
        """Keep an answer for those who pull, until all of them have come for it."""
        is_wanted = (desk.pullers & self._expected) - answer.served
        desk.answer = answer if is_wanted else None

    def _forget_pull(self, desk: ChunkQueue, bundle: MergedRequest) -> None:
        if isinstance(bundle.message, Pull):
            place = bundle.message.runs, _moment(bundle.message)
            if desk.pulling.get(place) is bundle:
                del desk.pulling[place]

    def _is_complete(self, bundle: MergedRequest) -> bool:
        return self._desks[bundle.message.chunk].is_complete(bundle, self._expected)

    def _waiting(self) -> list[MergedRequest]:
        return [one for desk in self._desks.values() for one in desk.waiting()]

    def check(self) -> None:
        """Assert the invariants."""
        for desk in self._desks.values():
            desk.check()
        assert not any(self._is_complete(one) for one in self._waiting())


def wants_values(message: Message) -> bool:
    """Whether this is to be answered by values."""
    return message.pull if isinstance(message, Push) else isinstance(message, Pull)


def _sum(askers: list[Participant]) -> tuple[torch.Tensor, ...]:
    strips = [one.gradient() for one in askers if one.gradient is not None]
    assert len(strips) == len(askers), "a gradient is kept until the server has it"
    if len(strips) > 1:
        return (GradientSum(tuple(strips)).whole(),)
    alone = strips[0].joined()
    # This worker's own may lie where the user has them, who may write there after a Timeout.
    return (alone.clone() if isinstance(askers[0].who, Request) else alone,)


def _shape(runs: tuple[Run, ...] | tuple[object, ...]) -> Shape:
    return tuple([(run.start, run.size) for run in runs])  # type: ignore[attr-defined]


def _moment(pull: Pull) -> Moment:
    return pull.broadcasts, pull.call, pull.stamp


def _edge(run: Run) -> tuple[int, int, int]:
    return run.number, run.start, run.start + run.size


def _versions(shape: Shape, stands: tuple[Stand, ...]) -> tuple[int, ...]:
    """Return the lowest version in each run of ``shape``, which ``stands`` tile."""
    versions = []
    index = 0
    for start, size in shape:
        lowest = stands[index].version
        while index < len(stands) and stands[index].start < start + size:
            lowest = min(lowest, stands[index].version)
            index += 1
        versions.append(lowest)
    return tuple(versions)
