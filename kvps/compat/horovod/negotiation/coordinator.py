"""The coordinator: which operation runs next, decided by name, alike on every rank.

Ranks make their requests in any order. An operation runs when every rank of its process set has
requested its name, save those that have joined. Every rank has a coordinator and gives it the same
turns in the same order, so all coordinators decide the same and none has to ask a leader.

Requests that do not fit together are refused as soon as two of them are known: each rank that has
made its request hears of it at once, and the others when they make theirs. The k-th request of a
rank for a name belongs to the k-th operation of that name, so the operation after a refused one
starts clean on every rank.

If each rank that can still make requests waits for an operation that is not decided, none will ever be: the
operations that are waited for are refused.

Every rank also decides the same about fusion, that is which operations of one cycle travel as one buffer,
because every rank has the same decisions in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvps.compat.horovod.negotiation.request import (
    ADD_SET,
    ALLREDUCE,
    BARRIER,
    BROADCAST,
    REMOVE_SET,
    SUMMING,
    CollectiveRequest,
    Key,
    Turn,
    difference,
    own_fault,
)
from kvps.phrases import ranks_in_words

WORLD = 0
"""The process set of all ranks."""
JOINABLE = (ALLREDUCE, BARRIER)
"""Operations that run without the ranks that have joined."""


@dataclass(frozen=True, slots=True)
class Execute:
    """An operation that all its ranks carry out now.

    Attributes:
        requests: rank -> its request; ranks that have joined have none.
        ranks: the ranks of the process set.
        joined: the ranks that have joined.
        process_set: of ``add_process_set``: the number of the new set.
    """

    requests: Mapping[int, CollectiveRequest]
    ranks: tuple[int, ...]
    joined: tuple[int, ...] = ()
    process_set: int = WORLD

    @property
    def first(self) -> CollectiveRequest:
        """The request of the lowest rank that made a request."""
        return self.requests[min(self.requests)]


@dataclass(frozen=True, slots=True)
class Refuse:
    """An operation that does not run, told to the ranks that have requested it."""

    key: Key
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class AllJoined:
    """Every rank has joined; joins begin anew."""

    last: int


@dataclass(frozen=True, slots=True)
class Over:
    """A rank has left the negotiation, for a reason: no operation is decided any more."""

    rank: int
    reason: str


Decision = Execute | Refuse | AllJoined | Over


@dataclass(slots=True)
class _Entry:
    """One operation that is not decided, or that not every rank has heard of."""

    requests: dict[int, CollectiveRequest] = field(default_factory=dict)
    refusal: str = ""

    @property
    def first(self) -> int:
        """The rank whose request came first."""
        return next(iter(self.requests))


class Coordinator:
    """The requests of all ranks, and the decisions about them.

    Args:
        size: the number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._sets: dict[int, tuple[int, ...]] = {WORLD: tuple(range(size))}
        self._sets_made = 1
        self._entries: dict[Key, deque[_Entry]] = {}
        """Key -> its operations, the oldest first. A rank is in an operation only if it is in
        those before it."""
        self._joined: dict[int, None] = {}
        """Ranks that have joined, in the order of joining."""
        self._waits: dict[int, Key] = {}
        """rank -> the operation that it waits for, since its last request."""
        self._is_over = False

    @property
    def sets(self) -> Mapping[int, tuple[int, ...]]:
        """Number of each process set -> its ranks."""
        return self._sets

    def missing(self) -> list[tuple[CollectiveRequest, tuple[int, ...]]]:
        """Return a request of each operation that is not decided, and the ranks that have not
        requested it."""
        found = []
        for entries in self._entries.values():
            entry = entries[0]
            if not entry.refusal:
                absent = [rank for rank in self._active(entry) if rank not in entry.requests]
                found.append((entry.requests[entry.first], tuple(absent)))
        return found

    def take(self, turns: Iterable[tuple[int, Turn]]) -> list[Decision]:
        """Take the turns of one cycle, in the order of ranks; return what follows from them.

        Args:
            turns: each rank, and its turn.
        """
        if self._is_over:
            return []
        decisions: list[Decision] = []
        touched: dict[Key, None] = {}
        over: Over | None = None
        for rank, turn in turns:
            for request in turn.requests:
                self._waits.pop(rank, None)
                touched[request.key] = None
                decisions += self._request(rank, request)
            if turn.waits_for is not None:
                self._waits[rank] = turn.waits_for
            if turn.has_joined:
                self._joined[rank] = None
                touched.update(dict.fromkeys(self._entries))
            if turn.over and over is None:
                over = Over(rank, turn.over)
        for key in touched:
            decisions += self._decide(key)
        if len(self._joined) == self._size:
            decisions.append(AllJoined(list(self._joined)[-1]))
            self._joined.clear()
        if over is not None:
            self._is_over = True
            return [*decisions, over]
        return decisions + self._stuck()

    def _request(self, rank: int, request: CollectiveRequest) -> list[Decision]:
        """Put a request into its operation; refuse the operation if it does not fit."""
        entries = self._entries.setdefault(request.key, deque())
        entry = next((candidate for candidate in entries if rank not in candidate.requests), None)
        if entry is None:
            entries.append(entry := _Entry())
        entry.requests[rank] = request
        if entry.refusal:
            return [Refuse(request.key, (rank,), entry.refusal)]
        reason = self._fault(rank, request)
        if not reason and entry.first != rank:
            low, high = sorted((entry.first, rank))
            reason = difference(low, entry.requests[low], high, entry.requests[high])
        return [self._refuse(entry, reason)] if reason else []

    def _fault(self, rank: int, request: CollectiveRequest) -> str:
        ranks = self._sets.get(request.process_set)
        if ranks is None:
            return f"rank {rank}: there is no process set {request.process_set}"
        if rank not in ranks:
            return f"rank {rank} is not in the process set {list(ranks)}"
        reason = own_fault(request, ranks)
        return reason and f"rank {rank}: {reason}"

    def _refuse(self, entry: _Entry, reason: str) -> Refuse:
        request = entry.requests[entry.first]
        entry.refusal = f"{request.kind} {request.name!r}: {reason}"
        return Refuse(request.key, tuple(entry.requests), entry.refusal)

    def _decide(self, key: Key) -> list[Decision]:
        """Decide the operations of one name, until ranks are missing."""
        decisions: list[Decision] = []
        entries = self._entries.get(key)
        while entries and all(rank in entries[0].requests for rank in self._active(entries[0])):
            entry = entries.popleft()
            if not entry.refusal:
                decisions.append(self._run(entry))
        if not entries:
            self._entries.pop(key, None)
        return decisions

    def _run(self, entry: _Entry) -> Decision:
        request = entry.requests[entry.first]
        ranks = self._sets[request.process_set]
        joined = tuple([rank for rank in ranks if rank not in entry.requests])
        if joined and request.kind not in JOINABLE:
            return self._refuse(
                entry,
                f"{ranks_in_words(joined)} called join(), and {request.kind} needs every rank; only "
                f"{' and '.join(JOINABLE)} run without ranks that have joined",
            )
        number = WORLD
        if request.kind == ADD_SET:
            number, self._sets_made = self._sets_made, self._sets_made + 1
            self._sets[number] = request.ranks
        elif request.kind == REMOVE_SET:
            busy = [name for root, name in self._entries if root == request.root]
            if busy:
                return self._refuse(entry, f"{busy[0]!r} is not done in process set {request.root}")
            self._sets.pop(request.root, None)
        return Execute(dict(sorted(entry.requests.items())), ranks, joined, number)

    def _active(self, entry: _Entry) -> list[int]:
        """Return the ranks that have to request the operation before it is over."""
        request = entry.requests[entry.first]
        ranks = self._sets.get(request.process_set, self._sets[WORLD])
        return [rank for rank in ranks if rank not in self._joined]

    def _stuck(self) -> list[Decision]:
        """Refuse what the ranks wait for, if each that could make a request waits for an undecided
        operation."""
        waits = {rank: self._awaited(rank) for rank in range(self._size) if rank not in self._joined}
        if not waits or None in waits.values():
            return []
        entries = {id(waiting): waiting for waiting in waits.values() if waiting is not None}
        told = "; ".join(
            [
                f"rank {rank} waits for {waiting.requests[rank].kind} {waiting.requests[rank].name!r}"
                for rank, waiting in waits.items()
                if waiting is not None
            ]
        )
        reason = f"no rank can go on: {told}. Make the same operations, with the same names, on every rank"
        decisions: list[Decision] = [self._refuse(waiting, reason) for waiting in entries.values()]
        self._waits.clear()
        return decisions

    def _awaited(self, rank: int) -> _Entry | None:
        """Return the undecided operation that a rank waits for."""
        entries = self._entries.get(self._waits.get(rank, (WORLD, "")), ())
        found = [candidate for candidate in entries if rank in candidate.requests]
        return found[-1] if found and not found[-1].refusal else None

    def check(self) -> None:
        """Check that nothing contradicts itself."""
        assert self._sets[WORLD] == tuple(range(self._size))
        assert all(rank in self._sets[WORLD] for rank in self._joined)
        assert len(self._joined) < self._size
        for key, entries in self._entries.items():
            assert entries, "a name without an operation is forgotten"
            for entry in entries:
                assert entry.requests, "an operation begins with a request"
                assert all(request.key == key for request in entry.requests.values())
                fitting = [difference(0, request, 1, self._of(entry)) for request in entry.requests.values()]
                assert entry.refusal or not any(fitting)
            for older, newer in pairwise(entries):
                assert newer.requests.keys() <= older.requests.keys()
                assert older.refusal, "a rank waits for an operation before it requests the name again"
            assert not all(rank in entries[0].requests for rank in self._active(entries[0]))

    def _of(self, entry: _Entry) -> CollectiveRequest:
        return entry.requests[entry.first]


def fused(runs: Sequence[tuple[Execute, int]], limit: int) -> list[list[Execute]]:
    """Return the operations of a cycle as buckets, in their order.

    The sums of one process set and element type share buckets, and so do the broadcasts of one root. The
    place of a bucket is the place of its first operation.

    Args:
        runs: operations, each with the bytes of its tensors.
        limit: bytes of a bucket, unless its only operation is larger; 0 fuses nothing.
    """
    buckets: list[list[Execute]] = []
    latest: dict[Hashable, tuple[list[Execute], int]] = {}
    for run, size in runs:
        kind = _kind(run)
        bucket, filled = latest.get(kind, ([], 0))
        if kind is None or not bucket or filled + size > limit:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(run)
        if kind is not None:
            latest[kind] = bucket, filled + size
    return buckets


def _kind(run: Execute) -> Hashable:
    """Return what operations of one bucket have in common; None if this one travels alone."""
    request = run.first
    if request.kind == BROADCAST:
        return request.process_set, request.kind, request.root
    dtypes = {part.dtype for part in request.parts}
    if request.kind == ALLREDUCE and request.op in SUMMING and len(dtypes) == 1:
        return request.process_set, request.kind, dtypes.pop(), run.joined
    return None
