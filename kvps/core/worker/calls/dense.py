"""The calls on values of whole keys: push, pull, versions, resume."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import ClassVar

import numpy as np
import torch

from kvps import protocol as p
from kvps.core.worker import plan as plans
from kvps.core.worker.calls.base import (
    Call,
    OnTimeout,
    Operation,
    PushCall,
    ReadCall,
    Values,
    bulk,
    frozen,
    number_push,
    numbered,
)
from kvps.core.worker.connection import Request, route_of
from kvps.core.worker.consistent_read import (
    HeldValues,
    Sink,
    read,
    read_versions,
    settle_reads,
    tracked,
)
from kvps.core.worker.plan import (
    ANY,
    ChunkSlice,
    Numbers,
    Placed,
    Priority,
    Rows,
    Sizes,
    TransferPlan,
    alike,
)
from kvps.core.worker.store import WorkerStore
from kvps.dtypes import BY_NAME
from kvps.errors import KvpsError

_payload_bytes = attrgetter("payload_bytes")


class Views(enum.Enum):
    """Asks for values where they lie."""

    VIEWS = "views"
    """One tensor for each key."""
    HELD = "held"
    """All of them, to be written somewhere later."""


Sinks = tuple[torch.Tensor, ...] | Views | None
"""Destination of pulled values: contiguous tensors, one per key; VIEWS, if the call finishes with
views of them; HELD, if it finishes with :class:`~kvps.core.worker.consistent_read.HeldValues`; or
None if none are wanted."""


def unshare(values: Values, sinks: tuple[torch.Tensor, ...], sizes: Sizes) -> None:
    """Replace by copies those values that lie, wholly or in part, where others of their call will be written.

    The answer to one request may be written before another request is made. A key may be written
    where it is read.

    Args:
        values: one contiguous tensor for each key.
        sinks: one for each key, of the same size.
        sizes: bytes of each key.
    """
    own_starts, starts = plans.addresses(values), plans.addresses(sinks)
    starts[sizes == 0] = 0  # an empty value lies nowhere
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


@frozen
class PushValues(PushCall):
    """Push ``rows``, contiguous and one per key, and pull the results if asked."""

    title = "push()"
    is_step: ClassVar[bool] = False
    """Its keys are a step, which its requests name."""

    rows: tuple[torch.Tensor, ...]
    sinks: Sinks
    priority: Priority
    eager: bool
    """Copy all values before anything else, so that the caller may reuse them soonest."""
    weight: float = 1.0
    """The weight in a mean, by which ``rows`` are multiplied already."""

    def values(self) -> tuple[torch.Tensor, ...]:
        """Return the gradients."""
        return self.rows

    def forget_places(self) -> None:
        """The caller waits no more."""
        for rows in (self.rows, self.sinks):
            if isinstance(rows, Placed):
                rows.starts = None

    def returns_early(self, store: WorkerStore) -> bool:
        """Whether the caller goes on as soon as its values are copied, and hears of errors later.

        Not where the servers may refuse the push for want of an optimizer: the call that pushed is to fail
        by that, and not the next.
        """
        return self.eager and (store.was_pushed_to or store.takes_pushes)

    def run(self, store: WorkerStore, values: Values) -> Operation:
        plan, numbers, sinces = yield from number_push(store, self.keys)
        shares = store.pushed_shares(plan) if plan.is_encoded else plan.shares
        is_frozen = self.eager
        rows: Rows = self.rows
        if type(rows) is not Placed or not values or values[0] is not rows[0]:
            rows = values  # or its caller waits no more
        if isinstance(self.sinks, tuple) and len(shares) > 1:
            if _are_copied(store, shares, rows):
                is_frozen = True  # all are copied before any is written
            else:
                rows = values
                unshare(values, self.sinks, plan.sizes)
        joint = alike(numbers) if len(numbers) > 1 else numbers
        sink = HeldValues() if isinstance(self.sinks, Views) else self.sinks
        after = list(map((1).__add__, joint))
        tracker = None if sink is None else tracked(store, plan, sink, after, self.priority)
        requests = []
        try:
            for share in shares:
                message = self._message(store, share, joint, sinces)
                if share.setting is None:
                    request = bulk(store, share, message, rows, self.priority)
                else:
                    request = store.feedback.push(plan.keys, share, message, rows, store.memory)
                    request.priority = share.highest(self.priority)
                if tracker is not None:
                    request.on_reply = partial(tracker.take, share)
                requests.append(request)
            for request in requests if is_frozen else ():
                request.freeze()
            if self.is_step:
                _tag(store, plan, numbers, requests)
            store.traffic.pushed_bytes += plan.payload_bytes
            store.traffic.encoded_bytes += sum(map(_payload_bytes, requests))
            yield requests
        except KvpsError:
            plan.refuse()
            raise
        store.was_pushed_to = True
        if tracker is not None:
            yield from settle_reads(store, [tracker])
        return _result(store, plan, self.sinks, sink)

    def _message(self, store: WorkerStore, share: ChunkSlice, numbers: Numbers, sinces: Numbers) -> p.Push:
        """Return the push of a share, as it is without compression."""
        dtype, runs = BY_NAME[share.dtype].id, share.runs(numbers)
        message = p.Push(share.chunk, dtype, (store.rank,), self.weight, self.sinks is not None, runs)
        if store.opened.late == "next":  # a run for each key, in the order of the elements
            runs, since = share.runs_by_key(numbers), share.numbers_by_key(sinces)
            message = replace(message, runs=runs, since=since)
        return message


def _are_copied(store: WorkerStore, shares: Sequence[ChunkSlice], values: Rows) -> bool:
    """Whether all values are small, and are copied on their way."""
    return all(
        share.units is not None
        and not store.memory.lends(route_of(share.server), [values[share.segments[0].key]])
        for share in shares
    )


@frozen
class PushStep(PushValues):
    """A push whose keys are one step, whose gradients the servers clip by their global norm."""

    is_step = True


def _tag(store: WorkerStore, plan: TransferPlan, numbers: Sequence[int], requests: list[Request]) -> None:
    """Name the step in the requests of a push."""
    step = plan.step(store.label, numbers)
    for request in requests:
        assert isinstance(request.message, p.Push)
        assert request.server is not None
        request.message = replace(request.message, step=step[request.server])


def _result(
    store: WorkerStore, plan: TransferPlan, wish: Sinks, sink: Sink | None
) -> list[torch.Tensor] | HeldValues | None:
    """Return what a call finishes with: values that were not written into tensors of the caller's."""
    if not isinstance(sink, HeldValues):
        return None
    return sink if wish is Views.HELD else sink.views(plan.keys, store.memory)


@frozen
class PullValues(ReadCall):
    """Pull values after this rank's own pushes; finishes with views if there are no ``sinks``."""

    title = "pull()"

    sinks: Sinks
    priority: Priority
    min_version: int

    def run(self, store: WorkerStore, values: Values) -> Operation:
        plan = yield from numbered(store, self.keys)
        after = plan.numbers()
        sink = HeldValues() if isinstance(self.sinks, Views) else self.sinks
        assert sink is not None
        yield from read(store, plan, sink, after, (self.min_version,), self.priority)
        return _result(store, plan, self.sinks, sink)


@frozen
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


@frozen
class Locate(Call):
    """Finishes with the chunks of each key, as (server, chunk)."""

    title = "placement()"
    on_timeout = OnTimeout.RETRY

    keys: tuple[str, ...]

    def run(self, store: WorkerStore, values: Values) -> Operation:
        yield []
        return [{(piece.server, piece.chunk) for piece in key.pieces} for key in store.plan(self.keys).keys]


@frozen
class Versions(ReadCall):
    """Finishes with the version of each key: the lowest of its parts."""

    title = "version()"

    def run(self, store: WorkerStore, values: Values) -> Operation:
        plan = yield from numbered(store, self.keys)
        read = yield from read_versions(store, plan, plan.numbers(), ANY)
        return [min((version for version, _ in parts.values()), default=0) for parts in read.by_key()]
