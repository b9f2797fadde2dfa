"""Operations: each call as a generator of requests, and the steps that several of them share.

An operation yields lists of requests and is resumed with their answers, in order; if one of them was
refused, the refusal is raised where it waits. So a call that takes three steps reads as three steps, and needs
no thread and no state machine of its own. An operation never waits for anything but answers.

``rows`` are the caller's values, one contiguous tensor per key. They are read as late as possible; when
the caller stops waiting before that, the worker puts copies into the list.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from kvps.core.worker.connection import Request
from kvps.core.worker.consistent_read import (
    AwaitAcks,
    Step,
    Steps,
    stand,
)
from kvps.core.worker.plan import (
    ChunkSlice,
    Given,
    Key,
    Numbers,
    TransferPlan,
    alike,
)
from kvps.core.worker.store import WorkerStore
from kvps.errors import ConfigError
from kvps.protocol.envelope import WINDOW, Packet
from kvps.protocol.values import Load, Push

Conversation = Generator[Step, list[Packet], object]


Values = list[torch.Tensor]


def bulk(
    store: WorkerStore,
    share: ChunkSlice,
    message: Load | Push,
    rows: Given,
    priority: Numbers = 0,
) -> Request:
    return Request(
        share.server,
        message,
        fill=lambda route: share.gather(rows, store.memory, route),
        payload_bytes=share.payload_bytes,
        lane=share.chunk,
        priority=share.highest(priority),
    )


def demand_presence(store: WorkerStore) -> None:
    """Refuse a push of a rank that has joined: rounds close without it.

    Raises:
        ConfigError: if this rank has.
    """
    if store.is_away:
        raise ConfigError(
            f"push() of store {store.name!r}: worker {store.rank} has joined, and rounds close "
            "without it until every worker has. Nothing was pushed. Call join() again to wait on"
        )


def numbered(
    store: WorkerStore, names: tuple[str, ...]
) -> Generator[Step, list[Packet], TransferPlan]:
    """Return the plan of ``names``, whose push numbers can be relied on.

    The number of a push that was refused is free again, so it has to be asked which are owed.
    """
    plan = store.plan(names)
    if any(key.is_refused for key in plan.keys):
        tally = yield from stand(store, plan, 0, 0)
        for key, found in zip(plan.keys, tally.by_key(), strict=True):
            if key.is_refused:  # and no other call has asked meanwhile
                key.is_refused = False
                key.number = min((owed for _, owed in found.values()), default=0)
    return plan


def make_room(store: WorkerStore, full: list[Key]) -> Steps:
    """Wait until fewer than :data:`WINDOW` pushes of each of these keys are under way."""
    if store.ordered:
        plan = store.plan(tuple(key.name for key in full))
        yield from stand(store, plan, 0, alike([key.number - WINDOW for key in full]))
        return
    numbers = [key.number - 1 for key in full]
    yield AwaitAcks()
    for key, number in zip(full, numbers, strict=True):
        key.applied = max(key.applied, number)


def settle(store: WorkerStore, names: tuple[str, ...]) -> Steps:
    """Wait until this rank's own pushes of ``names`` are applied."""
    if not store.ordered:
        yield AwaitAcks()
        return
    pushed = tuple(name for name in names if store.keys[name].number > store.keys[name].applied)
    if pushed:
        plan = yield from numbered(store, pushed)
        yield from stand(store, plan, alike([key.number for key in plan.keys]), 0)
