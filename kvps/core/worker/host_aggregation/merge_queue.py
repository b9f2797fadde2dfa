"""Pushes and pulls of several workers of one host, merged into one request.

Theory of operation
-------------------
The workers of a host are *neighbours*. One of them is the *leader* of a chunk: the others send it
their pushes and pulls of that chunk, and it asks the server once for all of them. So a model
crosses the host's network link once in each direction, however many workers train there::

    worker 4 ──┐ gradients lie in their senders' memory
    worker 5 ──┼──► leader ── one PUSH for ranks 4, 5, 6 ──► server
    worker 6 ──┘    adds up when there is room on the uplink

A *merged request* speaks for several workers. A merged request of pushes waits until every
neighbour has pushed the same elements with the same number: their round cannot close without any
of them, so waiting loses nothing. But a flush or a time limit may wait for one push, and a worker
that replaces a lost leader does not know what was pushed before. So a merged request goes after a
while with the pushes that it has, and soon if one of its participants asks after it. A merged
request of pulls goes at once, and takes in equal pulls until the answer is there; the answer is
kept for ranks that are likely to pull it, until the next push.

Only the server says what it has taken in. So a push is acknowledged here after the server has
acknowledged it, and can be sent to the server directly if the leader is lost: the server counts
each rank once. It may also refuse a merged request because of one of its ranks; then each of them
is asked for by itself.

Neighbours that cut their pushes of one chunk differently would wait for each other in vain: the
pushes of such a chunk are not merged any more.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch

from kvps.core.gradients import DenseGradient, GradientSum
from kvps.core.worker.connection import Request, Traffic
from kvps.dtypes import BY_ID, BY_NAME, summed_in
from kvps.protocol.envelope import Message
from kvps.protocol.values import Ask, Pull, Pulled, Push, Run, Stand
from kvps.tensors import Memory

WAIT_MAX_S, HURRY_S = 2.0, 0.05
"""Seconds that a merged request waits for missing ranks, and seconds after a participant has asked
after it."""
SHAPES_MAX = 256
"""Most ways to cut a chunk for which the pushes of each rank are remembered."""

Shape = tuple[tuple[int, int], ...]
Runs = tuple[Run, ...]
Moment = tuple[int, int | None, int]
"""(broadcasts, call, stamp) of a pull: they tell values apart that have the same version."""
Place = tuple[tuple[Ask, ...], Moment]


@dataclass(slots=True, eq=False)
class Participant:
    """A push or pull of one of the workers on this machine."""

    rank: int
    message: Push | Pull
    who: object
    """The one to answer: a Request of this worker, or a request of a neighbour."""
    gradient: Callable[[], DenseGradient] | None = None
    """The gradient of a push, until the server has it."""
    priority: int = 0
    merged: MergedRequest | None = None
    """The merged request that it is in."""


@dataclass(slots=True, eq=False)
class MergedRequest:
    """One request to a server, for several workers."""

    message: Push | Pull
    """The message of the first participant."""
    participants: dict[int, Participant] = field(default_factory=dict)
    """Rank -> participant."""
    request: Request | None = None
    """The request, once the server is asked."""
    is_taken_in: bool = False
    """The server has the push."""
    is_asked_after: bool = False
    """A participant has waited for long."""

    def add(self, participant: Participant) -> None:
        """Take ``participant`` in; it replaces an earlier incarnation of its rank."""
        self.participants[participant.rank] = participant
        participant.merged = self

    def waits_for(self, expected: frozenset[int]) -> list[int]:
        """Return which of ``expected`` are missing."""
        return sorted(expected - self.participants.keys())


NEVER: Moment = (-1, None, 0)


@dataclass(slots=True)
class Reply:
    """The last answer of a server, kept for neighbours that have not pulled it yet."""

    shape: Shape
    moment: Moment
    versions: tuple[int, ...]
    """The lowest version in each run of ``shape``."""
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
    """The requests for one chunk, at its leader."""

    def __init__(self) -> None:
        self._waiting: dict[Shape, dict[Runs, MergedRequest]] = {}
        """Pushes that wait for those of other workers."""
        self.pulling: dict[Place, MergedRequest] = {}
        """Pulls that wait for the server, by exactly what they ask for: a pull that asks for more
        may wait for a push that comes after this one."""
        self.answer: Reply | None = None
        self.pullers: set[int] = set()
        """Ranks that have ever pulled by a PULL."""
        self.is_mixed = False
        """Different workers cut the chunk differently."""
        self._edges: list[tuple[int, int, int]] = []
        """(number, start, stop) of all waiting runs, sorted."""
        self._pushed: dict[Shape, dict[int, tuple[int, ...]]] = {}
        """Shape -> rank -> the last number pushed of each run."""

    def merged(self, message: Push) -> MergedRequest:
        """Return the merged request that waits for such a push; make it if there is none."""
        alike = self._waiting.setdefault(_shape(message.runs), {})
        merged = alike.get(message.runs)
        if merged is None:
            self.is_mixed = self.is_mixed or any(map(self._meets_another, message.runs))
            alike[message.runs] = merged = MergedRequest(message)
            for run in message.runs:
                insort(self._edges, _edge(run))
        return merged

    def waiting(self) -> list[MergedRequest]:
        """Return all waiting pushes."""
        return [merged for alike in self._waiting.values() for merged in alike.values()]

    def ready(self, runs: Runs, expected: frozenset[int]) -> list[MergedRequest]:
        """Return the pushes that need not wait now that a worker has pushed ``runs``."""
        if self.is_mixed:
            return self.waiting()
        alike = self._waiting[_shape(runs)].values()
        return [merged for merged in alike if self.is_complete(merged, expected)]

    def _meets_another(self, run: Run) -> bool:
        number, start, stop = _edge(run)
        index = bisect_left(self._edges, (number, start))
        before, after = self._edges[index - 1 : index], self._edges[index : index + 1]
        return any(edge[0] == number and edge[1] < stop and start < edge[2] for edge in (*before, *after))

    def leaves(self, merged: MergedRequest) -> None:
        """Remove a push that waits no more."""
        assert isinstance(merged.message, Push)
        shape = _shape(merged.message.runs)
        del self._waiting[shape][merged.message.runs]
        if not self._waiting[shape]:
            del self._waiting[shape]
        for run in merged.message.runs:
            del self._edges[bisect_left(self._edges, _edge(run))]

    def note(self, rank: int, runs: Runs) -> None:
        """Remember that ``rank`` has pushed ``runs``."""
        shape = _shape(runs)
        if shape not in self._pushed and len(self._pushed) >= SHAPES_MAX:
            self._pushed.clear()
        numbers = tuple([run.number for run in runs])
        before = self._pushed.setdefault(shape, {}).setdefault(rank, numbers)
        self._pushed[shape][rank] = tuple(map(max, before, numbers))

    def is_complete(self, merged: MergedRequest, expected: frozenset[int]) -> bool:
        """Whether all expected ranks are in it, or have pushed these runs before."""
        push = merged.message
        assert isinstance(push, Push)
        numbers = [run.number for run in push.runs]
        pushed = self._pushed.get(_shape(push.runs), {})
        return all(
            rank in pushed and all(last >= number for last, number in zip(pushed[rank], numbers, strict=True))
            for rank in merged.waits_for(expected)
        )

    def check(self) -> None:
        """Assert the invariants."""
        waiting = self.waiting()
        all_runs = [runs for alike in self._waiting.values() for runs in alike]
        assert self._edges == sorted(_edge(run) for runs in all_runs for run in runs)
        for merged in waiting:
            assert merged.participants
            assert merged.request is None
        assert all(self._waiting.values())
        assert not (self.is_mixed and waiting)
        for merged in self.pulling.values():
            assert merged.request is not None


class MergedRequests:
    """The requests that this worker merges, for the chunks that it leads."""

    def __init__(self, rank: int, servers: int, memory: Memory) -> None:
        self.rank = rank
        self._servers = servers
        self._memory = memory
        self._expected: frozenset[int] = frozenset()
        """The live workers of this machine."""
        self._queues: defaultdict[int, ChunkQueue] = defaultdict(ChunkQueue)
        self._due: list[tuple[float, int, MergedRequest]] = []
        """A heap of the times at which pushes go, complete or not. Some have gone before."""
        self._order = itertools.count()

    # --- what comes from workers --------------------------------------------------------------

    def push(self, participant: Participant, now: float) -> list[Request]:
        """Take a push in; return the requests to be made now."""
        message = participant.message
        assert isinstance(message, Push)
        queue = self._queues[message.chunk]
        merged = queue.merged(message)
        if not merged.participants:
            self._go_at(now + WAIT_MAX_S, merged)
        merged.add(participant)
        queue.note(participant.rank, message.runs)
        return [self._go(merged) for merged in queue.ready(message.runs, self._expected)]

    def pull(self, participant: Participant) -> Request | Reply | None:
        """Take a pull in; return the request to be made, or the answer if it is there; None to wait."""
        message = participant.message
        assert isinstance(message, Pull)
        queue = self._queues[message.chunk]
        queue.pullers.add(participant.rank)
        answer = queue.answer
        if answer is not None and participant.rank not in answer.served and answer.meets(message):
            answer.served.add(participant.rank)
            self._keep(queue, answer)
            return answer
        place = message.runs, _moment(message)
        merged = queue.pulling.get(place)
        if merged is not None and participant.rank not in merged.participants:
            merged.add(participant)
            return None
        merged = MergedRequest(message)
        merged.add(participant)
        merged.request = Request(
            message.chunk % self._servers,
            message,
            lane=message.chunk,
            priority=participant.priority,
            owner=merged,
            traffic=_traffic_of([participant]),
        )
        queue.pulling[place] = merged
        return merged.request

    def expect(self, ranks: frozenset[int]) -> list[Request]:
        """Note which ranks live on this machine now; return the pushes that are complete by that."""
        self._expected = ranks
        return [self._go(merged) for merged in self._waiting() if self._is_complete(merged)]

    def replaced(self, rank: int) -> None:
        """Note that another process has this rank: nothing that was kept is for it."""
        for queue in self._queues.values():
            queue.pullers.discard(rank)
            if queue.answer is not None:
                queue.answer.served.add(rank)

    def ask_after(self, merged: MergedRequest, now: float) -> None:
        """Note that a participant has waited for long; a push goes soon, complete or not."""
        merged.is_asked_after = True
        if merged.request is None:
            self._go_at(now + HURRY_S, merged)

    def overdue(self, now: float) -> list[Request]:
        """Return the pushes that go now although a rank is missing."""
        late = []
        while (at := self.deadline()) is not None and at <= now:
            late.append(self._go(self._due[0][2]))
        return late

    def deadline(self) -> float | None:
        """When :meth:`overdue` has something to return."""
        while self._due and self._due[0][2].request is not None:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def _go_at(self, time: float, merged: MergedRequest) -> None:
        heapq.heappush(self._due, (time, next(self._order), merged))

    # --- what comes from servers --------------------------------------------------------------

    def taken_in(self, merged: MergedRequest) -> list[Participant]:
        """Note that the server has the pushes of ``bundle``; return the participants to be told, once."""
        if merged.is_taken_in or not isinstance(merged.message, Push):
            return []
        merged.is_taken_in = True
        self._queues[merged.message.chunk].answer = None  # there will be another
        for participant in merged.participants.values():
            participant.gradient = None
        return list(merged.participants.values())

    def answered(self, merged: MergedRequest, message: Pulled, values: torch.Tensor) -> Reply:
        """Return the server's answer for all that want values, in memory that can be lent."""
        queue = self._queues[merged.message.chunk]
        self._forget_pull(queue, merged)
        moment = _moment(merged.message) if isinstance(merged.message, Pull) else None
        served = {
            participant.rank
            for participant in merged.participants.values()
            if wants_values(participant.message)
        }
        shape = _shape(merged.message.runs)
        answer = Reply(shape, NEVER, _versions(shape, message.runs), message, values, served)
        others = (queue.pullers & self._expected) - served
        if others or served - {self.rank}:
            answer.values = self._memory.empty(len(values), BY_ID[message.dtype].name)
            answer.values.copy_(values)
        if moment is not None:
            answer.moment = moment
            self._keep(queue, answer)
        return answer

    def refused(self, merged: MergedRequest) -> list[Request]:
        """Return the requests to be made in place of a refused one; none if the refusal is final."""
        queue = self._queues[merged.message.chunk]
        self._forget_pull(queue, merged)
        queue.answer = None  # the key may have been replaced
        if merged.is_taken_in or len(merged.participants) == 1 or isinstance(merged.message, Pull):
            return []
        requests = []
        for participant in merged.participants.values():
            single = MergedRequest(participant.message, is_asked_after=merged.is_asked_after)
            single.add(participant)
            requests.append(self._asked(single))
        return requests

    # --- how it is done -----------------------------------------------------------------------

    def _go(self, merged: MergedRequest) -> Request:
        self._queues[merged.message.chunk].leaves(merged)
        return self._asked(merged)

    def _asked(self, merged: MergedRequest) -> Request:
        """Make the request for merged pushes."""
        participants = [merged.participants[rank] for rank in sorted(merged.participants)]
        messages = [participant.message for participant in participants]
        pushes = [message for message in messages if isinstance(message, Push)]
        first = pushes[0]
        dtype = first.dtype
        if len(pushes) > 1:
            dtype = BY_NAME[summed_in(BY_ID[dtype].name)].id
        message = replace(
            first,
            dtype=dtype,
            ranks=tuple([participant.rank for participant in participants]),
            weight=sum([push.weight for push in pushes]),
            pull=any(push.pull for push in pushes),
        )
        merged.request = Request(
            first.chunk % self._servers,
            message,
            fill=lambda route: _sum(participants),
            payload_bytes=message.payload_sizes()[0],
            lane=first.chunk,
            priority=max([participant.priority for participant in participants]),
            owner=merged,
            traffic=_traffic_of(participants),
        )
        return merged.request

    def _keep(self, queue: ChunkQueue, answer: Reply) -> None:
        """Keep an answer until all ranks that pull have had it."""
        is_wanted = (queue.pullers & self._expected) - answer.served
        queue.answer = answer if is_wanted else None

    def _forget_pull(self, queue: ChunkQueue, merged: MergedRequest) -> None:
        if isinstance(merged.message, Pull):
            place = merged.message.runs, _moment(merged.message)
            if queue.pulling.get(place) is merged:
                del queue.pulling[place]

    def _is_complete(self, merged: MergedRequest) -> bool:
        return self._queues[merged.message.chunk].is_complete(merged, self._expected)

    def _waiting(self) -> list[MergedRequest]:
        return [merged for queue in self._queues.values() for merged in queue.waiting()]

    def check(self) -> None:
        """Assert the invariants."""
        for queue in self._queues.values():
            queue.check()
        assert not any(self._is_complete(merged) for merged in self._waiting())


def wants_values(message: Message) -> bool:
    """Whether a message is answered with values."""
    return message.pull if isinstance(message, Push) else isinstance(message, Pull)


def _sum(participants: list[Participant]) -> tuple[torch.Tensor, ...]:
    gradients = [participant.gradient() for participant in participants if participant.gradient is not None]
    assert len(gradients) == len(participants), "a gradient is kept until the server has it"
    if len(gradients) > 1:
        return (GradientSum(tuple(gradients)).whole(),)
    alone = gradients[0].joined()
    # This worker's own may lie where the user has them, who may write there after a Timeout.
    return (alone.clone() if isinstance(participants[0].who, Request) else alone,)


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


def _traffic_of(participants: Iterable[Participant]) -> Traffic | None:
    """Return the counters of the store that a merged request is of; None if this worker has no part in it."""
    own = [participant.who.traffic for participant in participants if isinstance(participant.who, Request)]
    return own[0] if own else None
