"""Consistent reads: every key at one version, though its parts are answered one by one.

A rank that has just pushed in a synchronous store reads exactly the version after its push, everywhere: no
round can close without it. A rank that reads while others push may find one part of a key a version ahead
of another: a *torn read*. It then asks for the lagging parts, and only these, at the version of the leading
one. A server answers such a request when its part gets there, so one more round trip is enough unless the
part was overtaken meanwhile.

Waiting does not repair a read by a rank that took another's place, if its predecessor ended when
some parts had its push and others had not. The other parts wait for this very rank, so it is given
the parts as they are, and pushes what it owes.

Where each push is applied by itself, a worker that is lost in the middle of a push leaves the
parts at different versions until its replacement completes it. Nobody waits for that. While a
worker is lost, such a key is taken as it is; if a worker was replaced, after a while, since the
replacement may wait for a rank that waits so (where staleness is bounded).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch

from kvps.core.worker.connection import Request
from kvps.core.worker.error_feedback import ErrorFeedback
from kvps.core.worker.failure_policy import complain
from kvps.core.worker.plan import (
    ANY,
    ChunkSlice,
    Key,
    Numbers,
    PieceLocation,
    Priority,
    Rows,
    TransferPlan,
    make,
)
from kvps.core.worker.row_reads import RowRead
from kvps.core.worker.store import WorkerStore
from kvps.errors import ProtocolError
from kvps.protocol.envelope import Packet
from kvps.protocol.values import Dropped, Pull, Pulled, Stand
from kvps.tensors import Memory, from_frame


@dataclass(frozen=True, slots=True)
class AwaitAcks:
    """A step without requests: resume when every push of the store so far is acknowledged."""


class LaggingReads(list[Request]):
    """Requests for parts that lag behind; resumed without answers if a worker is lost, or was."""


Step = list[Request] | AwaitAcks
"""A step of an operation: the answers that it waits for next."""
Steps = Generator[Step, list[Packet], None]

_RUNS, _STAND = itemgetter(1), attrgetter("version", "owed")
Parts = dict[PieceLocation, tuple[int, int]]
"""Part of a key -> (version, next push number that this rank owes)."""


@dataclass(frozen=True, slots=True)
class HeldValues:
    """Values that stay where they came, until they are written into tensors.

    Example:
        >>> held = handle.wait()  # doctest: +SKIP
        >>> held.copy_to([weight, bias])  # doctest: +SKIP
    """

    written: list[tuple[ChunkSlice, torch.Tensor]] = field(default_factory=list)
    """(share, values) in the order in which they came; the later ones count."""

    def write(self, share: ChunkSlice, values: torch.Tensor) -> None:
        """Hold the elements of ``share``."""
        self.written.append((share, values))

    def views(self, keys: Sequence[Key], memory: Memory) -> list[torch.Tensor]:
        """Return one tensor for each key: a view of where it lies, or a copy if it lies in several places.

        The list is empty if some values were not written: then no call waits for them any more.
        """
        views: dict[int, torch.Tensor] = {}
        cut: dict[int, dict[int, torch.Tensor]] = {}
        for share, values in self.written:
            for segment, part in share.split(values):
                index = segment.key
                shape = keys[index].spec.shape
                if segment.size < keys[index].spec.count:
                    cut.setdefault(index, {})[segment.offset] = part
                else:
                    views[index] = part if len(shape) == 1 else part.view(shape)
        for index, by_offset in cut.items():
            parts = [by_offset[offset] for offset in sorted(by_offset)]
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

    def copy_to(self, rows: Rows) -> None:
        """Write the values into contiguous tensors, one for each key of the call, and hold them no more.

        Any thread may call this, once the call is over.
        """
        for share, values in self.written:
            share.scatter(values, rows)
        self.written.clear()


Sink = Rows | HeldValues
"""The destination of the values of the keys of a plan: one tensor for each, or where they are held."""


@dataclass(slots=True)
class ReadTracker:
    """The read of the keys of one plan: where their values go, and at which versions their parts were."""

    plan: TransferPlan
    sink: Sink | None = None
    """None if no values are wanted."""
    after: Numbers = ANY
    """Least number of pushes of this rank that the values of each key include."""
    priority: Priority = 0
    answers: list[tuple[ChunkSlice, tuple[Stand, ...]]] = field(default_factory=list)
    """In the order in which they came; for each part the last answer counts."""
    dropped: dict[str, Dropped] = field(default_factory=dict)
    """key -> the last update that was not made, if the servers tell."""
    is_unwanted: bool = False
    """The caller stopped waiting, and will not hear of dropped updates."""
    skips: bool = False
    """Rounds may have closed without this rank: its next push goes to the first that has not."""
    feedback: ErrorFeedback | None = None
    """Decodes answers that are encoded changes."""
    _torn: list[int] = field(default_factory=list)
    """Indices of the keys that were read at several versions, and may still be."""

    def ask(self, store: WorkerStore, shares: Iterable[ChunkSlice], least: Numbers) -> list[Request]:
        """Return the requests for ``shares`` of the plan; each key has the version ``least`` at least."""
        requests = []
        for share in shares:
            has_values, asks = self.sink is not None, share.asks(self.after, least)
            held = store.feedback.held(share, self.plan.keys) if share.is_by_deltas and has_values else ()
            message = Pull(share.chunk, has_values, asks, store.broadcasts, held=held)
            requests.append(
                Request(
                    share.server,
                    message,
                    priority=share.highest(self.priority),
                    lane=share.chunk,
                    on_reply=partial(self.take, share),
                )
            )
        return requests

    def take(self, share: ChunkSlice, packet: Packet, wanted: bool) -> None:
        """Note at which versions the values of ``share`` are; write them to the sink if ``wanted``."""
        answer, sink = packet.message, self.sink
        assert isinstance(answer, Pulled)
        self.answers.append((share, answer.runs))
        self.is_unwanted = self.is_unwanted or not wanted
        if answer.dropped:
            self.note(share, answer.dropped)
        if sink is None or not wanted:
            return
        if self.feedback is None or not share.is_by_deltas:
            frame = packet.payload[0]
            is_exact = frame.nbytes == share.payload_bytes  # memory is written by its address
            if share.octets is not None and is_exact and not isinstance(sink, HeldValues):
                share.paste(frame, sink)
                return
            values = from_frame(frame, share.dtype)
        else:
            values = self.feedback.values_of(packet, share, self.plan.keys)
        if values.numel() != share.size:  # memory is read by its address from here on
            raise ProtocolError(
                f"server {share.server} answered {len(values)} elements of chunk "
                f"{share.chunk}, and {share.size} were requested"
            )
        if isinstance(sink, HeldValues):
            sink.write(share, values)
        else:
            share.scatter(values, sink)

    def note(self, share: ChunkSlice, dropped: tuple[Dropped, ...]) -> None:
        """Note which updates were not made, as one share's answer says."""
        index_at = {segment.start: segment.key for segment in share.segments}
        for update in dropped:
            name = self.plan.keys[index_at[update.start]].name
            known = self.dropped.get(name)
            if known is None or known.number < update.number:
                self.dropped[name] = update

    def by_key(self) -> list[Parts]:
        """Return for each key at which versions its parts were."""
        by_key: list[Parts] = [{} for _ in self.plan.keys]
        for share, runs in self.answers:
            stands = iter(runs)
            stand = next(stands)
            for start, size, index, offset in share.segments:
                while not stand.start <= start < stand.start + stand.size:
                    stand = next(stands)
                piece = PieceLocation(share.server, share.chunk, start, size, offset)
                by_key[index][piece] = (stand.version, stand.owed)
        return by_key

    def settle(self, ordered: bool) -> bool:
        """Note applied pushes in the keys, and here which keys were read torn; return whether any were."""
        stands = set(map(_STAND, chain.from_iterable(map(_RUNS, self.answers))))
        if len(stands) == 1:  # the usual case, and cheap
            version, owed = stands.pop()
            applied = version if ordered else owed
            joint = self.plan.joint()
            for key in self.plan.keys if joint is None else (joint,):
                if key.applied < applied:
                    key.applied = applied
                if self.skips:
                    key.number = max(key.number, owed)
                if not ordered:
                    key.version = max(key.version, version)
                    if self.sink is not None:
                        key.read(version - owed)
            return False
        for index, (key, parts) in enumerate(zip(self.plan.keys, self.by_key(), strict=True)):
            if parts:
                applied = min(stand[0 if ordered else 1] for stand in parts.values())
                key.applied = max(key.applied, applied)
                if self.skips:
                    key.number = max(key.number, min(owed for _, owed in parts.values()))
                key.version = max([key.version, *(version for version, _ in parts.values())])
                if not ordered and self.sink is not None:
                    key.read(max(version - owed for version, owed in parts.values()))
            if len({version for version, _ in parts.values()}) > 1:
                self._torn.append(index)
        return bool(self._torn)

    def lagging(self, store: WorkerStore) -> list[Request]:
        """Return requests for the parts that lag behind others of their key; none if no key is torn."""
        by_key = self.by_key()
        behind: dict[int, tuple[PieceLocation, ...]] = {}
        least = [0] * len(by_key)
        for index in self._torn:
            parts = by_key[index]
            if len({owed for _, owed in parts.values()}) > 1:
                continue  # torn by a push that this rank owes to some parts only
            least[index] = max(version for version, _ in parts.values())
            behind[index] = tuple(piece for piece, (version, _) in parts.items() if version < least[index])
        self._torn = [index for index, pieces in behind.items() if pieces]
        if not self._torn:
            return []
        # A plan of the same keys, so that what is noted of a key is noted at the same index.
        keys = [Key(key.name, key.spec, behind.get(index, ())) for index, key in enumerate(self.plan.keys)]
        return self.ask(store, make(keys).shares, least)


def tracked(
    store: WorkerStore, plan: TransferPlan, sink: Sink, after: Numbers = ANY, priority: Priority = 0
) -> ReadTracker:
    """Return the read of the keys of ``plan`` into ``sink``; its values are kept, if the store keeps some."""
    kind: Callable[..., ReadTracker] = store.tracker or ReadTracker
    return kind(plan, sink, after, priority, skips=store.skips_rounds, feedback=store.feedback)


def read(
    store: WorkerStore,
    plan: TransferPlan,
    sink: Sink,
    after: Numbers,
    least: Numbers,
    priority: Priority,
    tells: bool = True,
) -> Generator[Step, list[Packet], ReadTracker]:
    """Read the keys of ``plan`` into ``sink``, each at one version that meets its conditions.

    Raises:
        NonFinite: if it ``tells``, as :func:`settle_reads`.
    """
    tracker = tracked(store, plan, sink, after, priority)
    yield tracker.ask(store, plan.shares, least)
    yield from settle_reads(store, [tracker], tells)
    return tracker


def settle_reads(
    store: WorkerStore, reads: Sequence[ReadTracker | RowRead[Any]], tells: bool = True
) -> Steps:
    """Note what is applied, and read lagging parts again until every key is at one version.

    Then tell the caller of dropped updates, unless it stopped waiting: then its next read does.

    Raises:
        NonFinite: if it ``tells``, and there are any of which the caller was not told before.
    """
    is_torn = False
    dropped: dict[str, Dropped] = {}
    for read in reads:
        is_torn |= read.settle(store.ordered)
    while is_torn and (store.ordered or not store.is_short):
        requests = LaggingReads([request for torn in reads for request in torn.lagging(store)])
        if not requests or not (yield requests):
            break  # all is well, or nobody waits any more for what may never come
    for read in reads:
        dropped.update(read.dropped)
    if dropped and tells and not any(read.is_unwanted for read in reads):
        complain(store.name, store.ordered, store.keys, dropped)


def loaded(
    store: WorkerStore, plan: TransferPlan, call: int, stamps: Mapping[int, int], sink: Sink
) -> list[Request]:
    """Return the requests that read the values which the DECLARE of number ``call`` gives the keys
    of ``plan``.

    Each part is answered as soon as it is loaded. ``stamps`` are those of each server's answer to DECLARE.
    """
    requests = tracked(store, plan, sink).ask(store, plan.shares, ANY)
    for request in requests:
        assert isinstance(request.message, Pull)
        assert request.server is not None
        request.message = replace(request.message, call=call, stamp=stamps[request.server])
    return requests


def read_versions(
    store: WorkerStore, plan: TransferPlan, after: Numbers, least: Numbers, *, keeps: bool = False
) -> Generator[Step, list[Packet], ReadTracker]:
    """Wait until the conditions hold; return the read of the keys' versions.

    It is without values, unless these are to be kept and the store keeps some.
    """
    tracker: ReadTracker = ReadTracker(plan, None, after)
    if keeps and store.tracker is not None:
        tracker = tracked(store, plan, HeldValues(), after)
    yield tracker.ask(store, plan.shares, least)
    tracker.settle(store.ordered)
    return tracker
