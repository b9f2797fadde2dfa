"""The operations on values of whole keys: push, pull, versions, resume."""

from __future__ import annotations

import torch

from kvps.core.worker import calls
from kvps.core.worker import plan as plans
from kvps.core.worker.connection import Request
from kvps.core.worker.consistent_read import (
    AwaitAcks,
    Pieces,
    ReadTracker,
    Sink,
    Steps,
    even_out,
    own_sink,
    read,
    sink_for,
    stand,
)
from kvps.core.worker.error_feedback import CompressionGroup
from kvps.core.worker.failure_policy import complain
from kvps.core.worker.operations.base import (
    Conversation,
    Values,
    bulk,
    demand_presence,
    make_room,
    numbered,
)
from kvps.core.worker.operations.collective import BROADCAST
from kvps.core.worker.operations.keys import lookup
from kvps.core.worker.plan import (
    Given,
    Key,
    Numbers,
    TransferPlan,
    alike,
)
from kvps.core.worker.store import Made, WorkerStore
from kvps.dtypes import BY_NAME
from kvps.errors import KvpsError
from kvps.protocol.envelope import WINDOW
from kvps.protocol.membership import (
    History,
    HistoryIs,
    Join,
    Resume,
    Resumed,
    Return,
)
from kvps.protocol.stores import (
    Rate,
)
from kvps.protocol.values import Push


def push(book: WorkerStore, call: calls.PushValues, rows: Values) -> Conversation:
    """Push one gradient for each key; with a sink, pull what comes of it."""
    demand_presence(book)
    plan = yield from numbered(book, call.keys)
    each = [key.number for key in plan.keys]
    full: list[Key] = []
    if max(each, default=0) - min([key.applied for key in plan.keys], default=0) >= WINDOW:
        full = [key for key in plan.keys if key.number - key.applied >= WINDOW]
    for key in plan.keys:
        key.number += 1
    sink = sink_for(call.sinks, plan)
    groups = book.groups(plan)
    tallies = [ReadTracker(group.plan) for group in groups]
    requests: list[Request] = []
    try:
        if full:
            yield from make_room(book, full)
        demand_presence(book)
        for group, tally in zip(groups, tallies, strict=True):
            numbers = alike(group.numbers(each))
            requests += _pushed(book, call, group, group.rows(rows), numbers, tally, sink)
        yield requests
        book.was_pushed_to = True
    except KvpsError:
        for key in plan.keys:
            key.is_refused = True
        raise
    if sink is not None:
        for group, tally in zip(groups, tallies, strict=True):
            after = alike([number + 1 for number in group.numbers(each)])
            urgent = group.numbers(call.priority)
            yield from even_out(book, tally, own_sink(group, sink), after, urgent)
        _complain(book, tallies)
    return _views(book, plan, sink)


def _pushed(
    book: WorkerStore,
    call: calls.PushValues,
    group: CompressionGroup,
    rows: Given,
    numbers: Numbers,
    tally: ReadTracker,
    sink: Sink | None,
) -> list[Request]:
    """Return the requests that push the keys of ``group``."""
    own = None if sink is None else own_sink(group, sink)
    priority = group.numbers(call.priority)
    setting = group.setting
    requests = []
    for share in group.plan.shares:
        dtype = BY_NAME[share.dtype].id
        message = Push(share.chunk, dtype, (book.rank,), 1.0, sink is not None, share.runs(numbers))
        if setting is None:
            request = bulk(book, share, message, rows, priority)
        else:
            request = book.coding.push(group, share, message, rows, book.memory, numbers)
            request.priority = share.highest(priority)
        if call.eager:
            request.freeze()
        if own is not None:
            is_by_steps = setting is not None and setting.back is not None
            request.on_reply = tally.reader(share, own, book.coding if is_by_steps else None)
        requests.append(request)
    return requests


def _views(book: WorkerStore, plan: TransferPlan, sink: Sink | None) -> list[torch.Tensor] | None:
    return sink.views(plan.keys, book.memory) if isinstance(sink, Pieces) else None


def _complain(book: WorkerStore, tallies: list[ReadTracker]) -> None:
    """Raise NonFinite for updates that were dropped, if the caller is there to hear it."""
    dropped = {key: one for tally in tallies for key, one in tally.dropped.items()}
    if dropped and not any(tally.is_unwanted for tally in tallies):
        complain(book.opened.store, book.ordered, book.keys, dropped)


def pull(book: WorkerStore, call: calls.PullValues) -> Conversation:
    """Pull the values after this rank's own pushes."""
    plan = yield from numbered(book, call.keys)
    after = alike([key.number for key in plan.keys])
    sink = sink_for(call.sinks, plan)
    assert sink is not None
    tallies = yield from read(book, plan, sink, after, call.min_version, call.priority)
    _complain(book, tallies)
    return _views(book, plan, sink)


def allocate(book: WorkerStore, names: tuple[str, ...]) -> Conversation:
    """Return a tensor for each key, in memory that the servers can read if there is some."""
    yield []
    return plans.allocate(book.plan(names), book.memory)


def versions(book: WorkerStore, names: tuple[str, ...]) -> Conversation:
    """Return the version of each key: that of the part that is furthest behind."""
    plan = yield from numbered(book, names)
    tally = yield from stand(book, plan, alike([key.number for key in plan.keys]), 0)
    return [min((one for one, _ in found.values()), default=0) for found in tally.by_key()]


def resume(book: WorkerStore, names: tuple[str, ...]) -> Conversation:
    """Return the lowest push number that this rank owes on any part, and number from there."""
    yield AwaitAcks()
    specs = yield from lookup(book, names)
    plan = book.plan(tuple(name for name in names if specs[name] is not None))
    tally = yield from stand(book, plan, 0, 0)
    owed = min((owed for found in tally.by_key() for _, owed in found.values()), default=0)
    if len(plan.keys) < len(names):
        owed = 0  # of a key that is not there yet, all pushes are owed
    for key in plan.keys:
        key.number, key.is_refused = owed, False
        key.heard = max(key.heard, owed)  # what was dropped before, a predecessor was told of
    yield from _history(book)
    return owed


def _history(book: WorkerStore) -> Steps:
    """Go on with the calls of all ranks where this rank's predecessor stopped, if it had one."""
    store = book.opened.store
    pushed = book.pushed if book.ordered else None
    (answer,) = yield [Request(None, Resume(store, pushed))]
    resumed = answer.message
    assert isinstance(resumed, Resumed)
    if not resumed.replaced:
        return
    yield from inherit(book)
    book.is_resumed = True
    met = {name: book.barriers[name] for name in (BROADCAST,) if name in book.barriers}
    # A name mostly stands for one moment: who is not sure whether its predecessor stood there stands there
    # again, and passes if that was so. Those without a name are counted.
    again = {name: number - bool(name) for name, number in resumed.barriers.items()}
    book.barriers = again | met


def inherit(book: WorkerStore) -> Steps:
    """Count the calls of all ranks from what the servers know of them."""
    store = book.opened.store
    answers = yield [Request(server, History(store)) for server in range(book.servers)]
    known = [one.message for one in answers if isinstance(one.message, HistoryIs)]
    newest = max(known, key=lambda one: one.rate_calls)
    # Rank 0 goes on from what some server knows (R125). To the others the optimizer is set when every
    # server has it: rank 0 may be ahead of them in a new epoch, and be setting it again.
    furthest = max if book.rank == 0 else min
    optimized = furthest(known, key=lambda one: one.optimize_calls)
    joins = max(one.joins for one in known)
    missed = [server for server, one in enumerate(known) if one.joins < joins]
    # A predecessor may have ended before its join was heard by all: nobody returns from what it has not made.
    yield [Request(server, Join(store, joins, False)) for server in missed]
    yield [Request(server, Return(store, joins)) for server in missed]
    if book.rank == 0:  # a call that was heard by some is made with all
        behind = [at for at, one in enumerate(known) if one.rate_calls < newest.rate_calls]
        rate = Rate(store, newest.rate_calls, True, newest.lr, newest.rate_after)
        yield [Request(server, rate) for server in behind]
    book.joins = joins
    book.restored = max(one.restored for one in known)
    book.is_away = any(one.joined and one.joins == joins for one in known)
    book.rated = Made(newest.rate_calls, newest.rate_after, is_inherited=True)
    book.optimized = Made(optimized.optimize_calls, optimized.optimize_after, is_inherited=True)
