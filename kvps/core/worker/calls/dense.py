"""The calls on values of whole keys: push, pull, versions, resume."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvps import protocol as p
from kvps.core.worker import plan as plans
from kvps.core.worker.calls.base import (
    Call,
    OnTimeout,
    Operation,
    PushCall,
    RefusalMarker,
    Values,
    bulk,
    number_push,
    numbered,
)
from kvps.core.worker.connection import Request, route_of
from kvps.core.worker.consistent_read import (
    HeldValues,
    PieceSink,
    ReadTracker,
    ReplySink,
    RowSink,
    Sink,
    own_sink,
    read,
    read_versions,
    settle_reads,
)
from kvps.core.worker.plan import (
    CompressionGroup,
    Numbers,
    Sizes,
    Tensors,
    TransferPlan,
    alike,
)
from kvps.core.worker.store import WorkerStore
from kvps.dtypes import BY_NAME


class Views(enum.Enum):
    """The wish for values where they lie."""

    VIEWS = "views"
    """One tensor for each key."""
    HELD = "held"
    """All of them, to be written somewhere later."""


Sinks = tuple[torch.Tensor, ...] | Views | None
"""Destination of pulled values: contiguous tensors, one per key; VIEWS, if the call finishes with
views of them; HELD, if it finishes with :class:`~kvps.core.worker.consistent_read.HeldValues`; or
None if none are wanted."""


def sink_for(sinks: Sinks, plan: TransferPlan) -> Sink | None:
    """Return the sink that a call asks for."""
    if sinks is None:
        return None
    if sinks is Views.VIEWS:
        return PieceSink(range(len(plan.keys)))
    return HeldValues(range(len(plan.keys))) if sinks is Views.HELD else RowSink(sinks)


def unshare(values: Values, sinks: Sequence[torch.Tensor], sizes: Sizes) -> None:
    """Replace by copies those values that lie, wholly or in part, where others of their call will be written.

    The answer to one request may be written before another request is made. A key may be written
    where it is read.

    Args:
        values: one contiguous tensor for each key.
        sinks: one for each key, of the same size.
        sizes: bytes of each key.
    """
    if len(sizes) == 1:  # usual, and all these small arrays would take longer than its message
        if 0 < abs(values[0].data_ptr() - sinks[0].data_ptr()) < sizes[0]:
            values[0] = values[0].clone()
        return
    own_starts = np.fromiter(map(torch.Tensor.data_ptr, values), np.int64, len(sizes))
    starts = np.fromiter(map(torch.Tensor.data_ptr, sinks), np.int64, len(sizes))
    starts[sizes == 0] = 0  # what is empty lies nowhere
    order = np.argsort(starts)
    in_order = starts[order]
    # The highest address of each sink in the order of memory, and those before it.
    reaches = np.maximum.accumulate(in_order + sizes[order])
    # How many sinks begin before the end of each value.
    before = np.searchsorted(in_order, own_starts + sizes)
    is_shared = (before > 0) & (reaches[before - 1] > own_starts) & (sizes > 0)
    if (in_order[1:] >= reaches[:-1]).all():  # else another key is written to the same place
        is_shared &= own_starts != starts
    for index in np.flatnonzero(is_shared).tolist():
        values[index] = values[index].clone()


@dataclass(frozen=True, slots=True)
class PushValues(PushCall):
    """Push ``rows``, contiguous and one per key, and perhaps pull what comes of it."""

    title = "push()"

    rows: tuple[torch.Tensor, ...]
    sinks: Sinks
    priority: Numbers
    eager: bool
    """Copy all values before anything else, so that the caller may reuse them soonest."""
    weight: float = 1.0
    """The weight in a mean, by which ``rows`` are multiplied already."""

    def values(self) -> tuple[torch.Tensor, ...]:
        """Return the gradients."""
        return self.rows

    def returns_early(self, store: WorkerStore) -> bool:
        """Whether the caller goes on as soon as its values are copied, and hears of errors later.

        Not where the servers may refuse the push for want of an optimizer: the call that pushed is to fail
        by that, and not the next.
        """
        return self.eager and store.takes_pushes

    def run(self, store: WorkerStore, values: Values) -> Operation:
        plan, numbers, sinces = yield from number_push(store, self.keys)
        groups = store.push_groups(plan)
        if (
            isinstance(self.sinks, tuple)
            and sum([len(member_group.plan.shares) for member_group in groups]) > 1
        ):
            unshare(values, self.sinks, plan.sizes)
        sink = sink_for(self.sinks, plan)
        reads: list[ReadTracker] = []
        requests: list[Request] = []
        with RefusalMarker(plan):
            for group in groups:
                own = group.numbers(numbers)
                since = alike(group.numbers(sinces)) if store.opened.late == "next" else None
                tracker = ReadTracker(
                    group.plan,
                    priority=group.numbers(self.priority),
                    skips=store.skips_rounds,
                )
                if sink is not None:
                    tracker.sink = own_sink(group, sink)
                    tracker.after = alike([number + 1 for number in own])
                requests += self._pushed(store, group, group.rows(values), alike(own), since, tracker)
                reads.append(tracker)
            self._tagged(store, plan, numbers, requests)
            store.traffic.encoded(plan.payload_bytes, [request.payload_bytes for request in requests])
            yield requests
        store.was_pushed_to = True
        if sink is not None:
            yield from settle_reads(store, reads)
        return _views(store, plan, sink)

    def _tagged(
        self,
        store: WorkerStore,
        plan: TransferPlan,
        numbers: Sequence[int],
        requests: list[Request],
    ) -> None:
        """Name the step in the requests of a push, for stores that need it."""

    def _pushed(
        self,
        store: WorkerStore,
        group: CompressionGroup,
        gradients: Tensors,
        numbers: Numbers,
        since: Numbers | None,
        tracker: ReadTracker,
    ) -> list[Request]:
        """Return the requests that push the keys of ``group``, whose answers go to ``tracker``.

        ``since`` has the numbers after the pushes before these, where servers have to know them.
        """
        is_pull = tracker.sink is not None
        requests = []
        for share in group.plan.shares:
            dtype = BY_NAME[share.dtype].id
            runs = share.runs(numbers)
            message = p.Push(share.chunk, dtype, (store.rank,), self.weight, is_pull, runs)
            if since is not None:  # a run for each key, in the order of the elements
                message = replace(message, runs=share.runs_by_key(numbers), since=share.numbers_by_key(since))
            if group.setting is None:
                request = bulk(store, share, message, gradients, tracker.priority)
            else:
                request = store.feedback.push(group, share, message, gradients, store.memory, numbers)
                request.priority = share.highest(tracker.priority)
            if self.eager:
                request.freeze()
            if is_pull:
                feedback = store.feedback if group.is_by_deltas else None
                request.on_reply = ReplySink(tracker, share, feedback)
            requests.append(request)
        return requests


@dataclass(frozen=True, slots=True)
class PushStep(PushValues):
    """A push whose keys are one step, whose gradients the servers clip by their global norm."""

    def _tagged(
        self,
        store: WorkerStore,
        plan: TransferPlan,
        numbers: Sequence[int],
        requests: list[Request],
    ) -> None:
        step = plan.step(store.label, numbers)
        for request in requests:
            assert isinstance(request.message, p.Push)
            assert request.server is not None
            request.message = replace(request.message, step=step[request.server])


def _views(
    store: WorkerStore, plan: TransferPlan, sink: Sink | None
) -> list[torch.Tensor] | HeldValues | None:
    if isinstance(sink, PieceSink):
        return sink.views(plan.keys, store.memory)
    return sink if isinstance(sink, HeldValues) else None


@dataclass(frozen=True, slots=True)
class PullValues(Call):
    """Pull values after this rank's own pushes; finishes with views if there are no ``sinks``."""

    title = "pull()"
    on_timeout = OnTimeout.RETRY

    keys: tuple[str, ...]
    sinks: Sinks
    priority: Numbers
    min_version: int

    def run(self, store: WorkerStore, values: Values) -> Operation:
        plan = yield from numbered(store, self.keys)
        after = alike([key.number for key in plan.keys])
        sink = sink_for(self.sinks, plan)
        assert sink is not None
        yield from read(store, plan, sink, after, self.min_version, self.priority)
        return _views(store, plan, sink)


@dataclass(frozen=True, slots=True)
class Allocate(Call):
    """Finishes with a tensor for each key, in memory that the servers can read if there is some."""

    title = "empty_like()"
    on_timeout = OnTimeout.RETRY

    keys: tuple[str, ...]
    is_lent: bool = False
    """Finish with None in place of a tensor that not all servers of its key would read where it lies."""

    def run(self, store: WorkerStore, values: Values) -> Operation:
        yield []
        plan = store.plan(self.keys)
        tensors = plans.allocate(plan, store.memory)
        if not self.is_lent:
            return tensors
        # Where rounds close without ranks that are late, a push may be read after its call has ended.
        copied = set(range(len(tensors))) if store.skips_rounds else set[int]()
        for share in plan.shares:
            route = route_of(share.server)
            for index in {segment.key for segment in share.segments} - copied:
                if not store.memory.lends(route, tensors[index : index + 1]):
                    copied.add(index)
        return [None if index in copied else tensor for index, tensor in enumerate(tensors)]


@dataclass(frozen=True, slots=True)
class Locate(Call):
    """Finishes with the chunks of each key, as (server, chunk)."""

    title = "placement()"
    on_timeout = OnTimeout.RETRY

    keys: tuple[str, ...]

    def run(self, store: WorkerStore, values: Values) -> Operation:
        yield []
        return [{(piece.server, piece.chunk) for piece in key.pieces} for key in store.plan(self.keys).keys]


@dataclass(frozen=True, slots=True)
class Versions(Call):
    """Finishes with the version of each key: the lowest of its parts."""

    title = "version()"
    on_timeout = OnTimeout.RETRY

    keys: tuple[str, ...]

    def run(self, store: WorkerStore, values: Values) -> Operation:
        plan = yield from numbered(store, self.keys)
        read = yield from read_versions(store, plan, alike([key.number for key in plan.keys]), 0)
        return [min((version for version, _ in parts.values()), default=0) for parts in read.by_key()]
