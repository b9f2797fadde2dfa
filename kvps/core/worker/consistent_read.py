"""Consistent reads: every key at one version, though its parts are answered one by one.

A rank that has just pushed in a synchronous store reads exactly the version after its push,
everywhere: no round can close without it. One that reads while others push may find one part of a
key a version ahead of another. The lagging parts, and only these, are then asked for at the
version of the leading one; a server answers such a request at the moment when its part gets there,
so that one more round trip is enough unless the part was overtaken meanwhile.

One case cannot be evened out by waiting: a rank that takes another's place, whose predecessor ended when
some parts had its push and others had not. The others wait for this very rank, so it is given the parts
as they are, and pushes what it owes.

Where each push is applied by itself, a worker that is lost in the middle of a push leaves the parts
at different versions until its replacement completes it. Nobody waits for that: while a worker is
lost, such a key is taken as it is; and if one was replaced, after a while, as the replacement may itself
wait for one who waits so (where staleness is bounded).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kvps.core.worker.connection import Request
from kvps.core.worker.error_feedback import CompressionGroup, ErrorFeedback
from kvps.core.worker.plan import (
    ChunkSlice,
    Key,
    Numbers,
    PieceLocation,
    TransferPlan,
    make,
    of_key,
)
from kvps.core.worker.store import WorkerStore
from kvps.errors import ProtocolError
from kvps.protocol.envelope import Packet
from kvps.protocol.values import Dropped, Pull, Pulled, Stand
from kvps.tensors import Memory, from_frame


@dataclass(frozen=True, slots=True)
class AwaitAcks:
    """Instead of requests: resume when every push of the store so far is acknowledged."""


class LaggingReads(list[Request]):
    """Requests for parts that lag behind; resume without answers, with what there is, if a worker is lost,
    or was."""


Step = list[Request] | AwaitAcks
"""What a conversation waits for next."""
Steps = Generator[Step, list[Packet], None]

Parts = dict[PieceLocation, tuple[int, int]]
"""The (version, owed) of each part of one key."""


class Sink(Protocol):
    """Where the values of the keys of a plan go."""

    def write(self, share: ChunkSlice, values: torch.Tensor) -> None:
        """Take the elements of ``share``."""

    def only(self, indices: Iterable[int]) -> Sink:
        """Return the sink of some of the keys."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Values are copied into one tensor for each key."""

    rows: Sequence[torch.Tensor]

    def write(self, share: ChunkSlice, values: torch.Tensor) -> None:
        """Take the elements of ``share``."""
        share.scatter(values, self.rows)

    def only(self, indices: Iterable[int]) -> Rows:
        """Return the sink of some of the keys."""
        return Rows([self.rows[index] for index in indices])


@dataclass(frozen=True, slots=True)
class Pieces:
    """Values stay where they are."""

    indices: Sequence[int]
    """Of each key here, which key of the whole call it is."""
    written: list[tuple[Sequence[int], ChunkSlice, torch.Tensor]] = field(default_factory=list)
    """What came; what came later counts."""

    def write(self, share: ChunkSlice, values: torch.Tensor) -> None:
        """Take the elements of ``share``."""
        self.written.append((self.indices, share, values))

    def only(self, indices: Iterable[int]) -> Pieces:
        """Return the sink of some of the keys."""
        return Pieces([self.indices[index] for index in indices], self.written)

    def views(self, keys: Sequence[Key], memory: Memory) -> list[torch.Tensor]:
        """Return one tensor for each key: where it lies, or a copy if that is no one place.

        Nothing is returned if some values were not written: then nobody waits for them any more.
        """
        views: dict[int, torch.Tensor] = {}
        cut: dict[int, dict[int, torch.Tensor]] = {}
        for indices, share, values in self.written:
            for segment, part in share.split(values):
                index = indices[segment.key]
                shape = keys[index].spec.shape
                if segment.size < keys[index].spec.count:
                    cut.setdefault(index, {})[segment.offset] = part
                else:
                    views[index] = part if len(shape) == 1 else part.view(shape)
        for index, found in cut.items():
            parts = [found[offset] for offset in sorted(found)]
            if sum([len(part) for part in parts]) < keys[index].spec.count:
                return []
            mapped = memory.side_by_side(parts)
            whole = torch.cat(parts) if mapped is None else mapped
            views[index] = whole.view(keys[index].spec.shape)
        for index in range(len(keys)):
            if index not in views:
                if keys[index].spec.count:
                    return []
                views[index] = memory.empty(0, keys[index].spec.dtype).view(keys[index].spec.shape)
        return [views[index] for index in range(len(keys))]


def own_sink(group: CompressionGroup, sink: Sink) -> Sink:
    """Return the sink of those keys of a call that are in ``group``."""
    return sink if group.indices is None else sink.only(group.indices)


@dataclass(slots=True)
class ReadTracker:
    """How the parts of the keys of a plan stood when they were read."""

    plan: TransferPlan
    answers: list[tuple[ChunkSlice, tuple[Stand, ...]]] = field(default_factory=list)
    dropped: dict[str, Dropped] = field(default_factory=dict)
    """By key, the last update that was not made, if the servers tell."""
    is_unwanted: bool = False
    """The caller stopped waiting, and will not learn of them."""

    def reader(
        self, share: ChunkSlice, sink: Sink | None, coding: ErrorFeedback | None = None
    ) -> ReplySink:
        """Return what takes the answer for one share in and its values out; with ``coding``, one
        that may come by steps."""
        return ReplySink(self, share, sink, coding)

    def note(self, share: ChunkSlice, dropped: tuple[Dropped, ...]) -> None:
        """Take in which updates were not made, as one share's answer says."""
        index_at = {segment.start: segment.key for segment in share.segments}
        for one in dropped:
            name = self.plan.keys[index_at[one.start]].name
            known = self.dropped.get(name)
            if known is None or known.number < one.number:
                self.dropped[name] = one

    def by_key(self) -> list[Parts]:
        """Return how the parts of each key stood."""
        found: list[Parts] = [{} for _ in self.plan.keys]
        for share, runs in self.answers:
            stands = iter(runs)
            stand = next(stands)
            for start, size, index, offset in share.segments:
                while not stand.start <= start < stand.start + stand.size:
                    stand = next(stands)
                held = PieceLocation(share.server, share.chunk, start, size, offset)
                found[index][held] = (stand.version, stand.owed)
        return found

    def settle(self, ordered: bool) -> dict[int, Parts]:
        """Note in the keys what is applied; return those that were read torn, by their index."""
        stands = {(one.version, one.owed) for _, runs in self.answers for one in runs}
        if len(stands) == 1:  # the usual case, and cheap
            version, owed = stands.pop()
            applied = version if ordered else owed
            for key in self.plan.keys:
                if key.applied < applied:
                    key.applied = applied
                if not ordered:
                    key.version = max(key.version, version)
            return {}
        torn: dict[int, Parts] = {}
        for index, (key, found) in enumerate(zip(self.plan.keys, self.by_key(), strict=True)):
            if found:
                applied = min(one[0 if ordered else 1] for one in found.values())
                key.applied = max(key.applied, applied)
                key.version = max([key.version, *(version for version, _ in found.values())])
            if is_torn(found):
                torn[index] = found
        return torn


@dataclass(slots=True)
class ReplySink:
    """Takes in the answer to one request for values."""

    tally: ReadTracker
    share: ChunkSlice
    sink: Sink | None
    coding: ErrorFeedback | None = None

    def __call__(self, packet: Packet, wanted: bool) -> None:
        """Note how the values stand, and write them to the sink if they are ``wanted``."""
        answer = packet.message
        assert isinstance(answer, Pulled)
        self.tally.answers.append((self.share, answer.runs))
        self.tally.is_unwanted = self.tally.is_unwanted or not wanted
        if answer.dropped:
            self.tally.note(self.share, answer.dropped)
        if self.sink is not None and wanted:
            if self.coding is None:
                values = from_frame(packet.payload[0], self.share.dtype)
            else:
                values = self.coding.values_of(packet, self.share, self.tally.plan.keys)
            if len(values) != self.share.size:  # memory is read by its address from here on
                raise ProtocolError(
                    f"server {self.share.server} answered {len(values)} elements of chunk "
                    f"{self.share.chunk}; asked for were {self.share.size}"
                )
            self.sink.write(self.share, values)


def is_torn(parts: Parts) -> bool:
    """Whether a key was read at several versions."""
    return len({version for version, _ in parts.values()}) > 1


def read(
    store: WorkerStore,
    plan: TransferPlan,
    sink: Sink,
    after: Numbers,
    least: Numbers,
    priority: Numbers,
) -> Generator[Step, list[Packet], list[ReadTracker]]:
    """Read the keys of ``plan`` into ``sink``, each at one version that meets its conditions."""
    groups = store.coding.groups(plan, store.rank)
    tallies = [ReadTracker(group.plan) for group in groups]
    requests: list[Request] = []
    for group, tally in zip(groups, tallies, strict=True):
        urgent, own = group.numbers(priority), own_sink(group, sink)
        conditions, oldest = group.numbers(after), group.numbers(least)
        requests += _asked(store, group.plan, tally, own, conditions, oldest, urgent, group)
    yield requests
    for group, tally in zip(groups, tallies, strict=True):
        own = own_sink(group, sink)
        yield from even_out(store, tally, own, group.numbers(after), group.numbers(priority))
    return tallies


def even_out(
    store: WorkerStore,
    tally: ReadTracker,
    sink: Sink,
    after: Numbers,
    priority: Numbers,
) -> Steps:
    """Read the lagging parts of those keys that were read torn, until none is."""
    keys = tally.plan.keys
    torn = _without_own(tally.settle(store.ordered))
    while torn and (store.ordered or not store.is_short):
        lagging: list[Key] = []
        least: list[int] = []
        for index, parts in torn.items():
            newest = max(version for version, _ in parts.values())
            behind = tuple(held for held, (version, _) in parts.items() if version < newest)
            lagging.append(Key(keys[index].name, keys[index].spec, behind))
            least.append(newest)
        again = ReadTracker(make(lagging), dropped=tally.dropped)
        conditions = [of_key(after, index) for index in torn]
        urgent = [of_key(priority, index) for index in torn]
        requests = _asked(store, again.plan, again, sink.only(torn), conditions, least, urgent)
        answers = yield LaggingReads(requests)
        for parts, found in zip(torn.values(), again.by_key(), strict=True):
            parts.update(found)
        tally.is_unwanted = tally.is_unwanted or again.is_unwanted
        if not answers:
            return  # nobody waits any more for what may never come
        torn = _without_own({index: parts for index, parts in torn.items() if is_torn(parts)})


def _without_own(torn: dict[int, Parts]) -> dict[int, Parts]:
    """Return those that are not torn by a push that this rank owes to some parts only."""
    return {
        index: parts
        for index, parts in torn.items()
        if len({owed for _, owed in parts.values()}) == 1
    }


def loaded(
    store: WorkerStore, plan: TransferPlan, call: int, stamps: Mapping[int, int], sink: Sink
) -> list[Request]:
    """Return the requests that read what the DECLARE of number ``call`` gives the keys of ``plan``, each
    part as soon as it is there; ``stamps`` are what each server said of that."""
    tally = ReadTracker(plan)
    return [
        Request(
            share.server,
            Pull(
                share.chunk,
                True,
                share.asks(0, 0),
                store.broadcasts,
                call=call,
                stamp=stamps[share.server],
            ),
            lane=share.chunk,
            on_reply=tally.reader(share, sink),
        )
        for share in plan.shares
    ]


def stand(
    store: WorkerStore, plan: TransferPlan, after: Numbers, least: Numbers
) -> Generator[Step, list[Packet], ReadTracker]:
    """Wait until the conditions hold, and return how the keys stand then, without values."""
    tally = ReadTracker(plan)
    yield _asked(store, plan, tally, None, after, least, 0)
    tally.settle(store.ordered)
    return tally


def _asked(
    store: WorkerStore,
    plan: TransferPlan,
    tally: ReadTracker,
    sink: Sink | None,
    after: Numbers,
    least: Numbers,
    priority: Numbers,
    group: CompressionGroup | None = None,
) -> list[Request]:
    is_by_steps = group is not None and group.setting is not None and group.setting.back is not None
    coding = store.coding if is_by_steps else None
    requests = []
    for share in plan.shares:
        message = Pull(share.chunk, sink is not None, share.asks(after, least), store.broadcasts)
        if group is not None and coding is not None:
            message = coding.pull(group, share, message)
        requests.append(
            Request(
                share.server,
                message,
                priority=share.highest(priority),
                lane=share.chunk,
                on_reply=tally.reader(share, sink, coding),
            )
        )
    return requests
