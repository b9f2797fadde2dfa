"""The base class of all calls, and the steps that several of their operations share.

A call is one frozen object. The store makes it from the user's arguments, already checked for shape and
type; the core answers it with one :class:`~kvps.core.effects.Finish`. Its class says all there is to know of
a kind of call: what the user calls it, what a Timeout does to it, whether it changes values, which messages
answer it, and its *operation*.

An operation is a generator. It yields lists of requests and is resumed with their answers, in order; if a
request was refused, the refusal is raised where the operation waits. So a call that takes three steps reads
as three steps, and needs no thread and no state machine of its own. An operation never waits for anything but
answers.
"""

from __future__ import annotations

import abc
import enum
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import ClassVar, TypeVar, dataclass_transform

import torch

from kvps.core.effects import Note
from kvps.core.placement import EMBEDDING
from kvps.core.worker.connection import Request
from kvps.core.worker.consistent_read import AwaitAcks, Parts, Step, Steps, read_versions
from kvps.core.worker.plan import ANY, ChunkSlice, Key, PieceLocation, Priority, Rows, TransferPlan, alike
from kvps.core.worker.store import WorkerStore
from kvps.dtypes import BY_NAME
from kvps.errors import ConfigError, KvpsError
from kvps.phrases import names_in_words
from kvps.protocol.envelope import WINDOW, Packet
from kvps.protocol.values import Load, Push, PushTables, Run, TableGroup, TablePart
from kvps.tensors import TORCH

Operation = Generator[Step, list[Packet], object]
T = TypeVar("T")
_is_refused = attrgetter("is_refused")
Values = list[torch.Tensor]
"""A call's tensors, read as late as possible. When the caller stops waiting before that, the
worker puts copies into the list."""


EmptyPush = Callable[[WorkerStore, Key, PieceLocation, int], Request]
"""Returns the push of nothing, of some number, to a piece of a key. It has no ``payload_bytes``: its caller's
values are not sent yet."""
LIGHT = sys.float_info.min
"""The weight of a push of nothing in a mean: it changes no sum of weights."""


class OnTimeout(enum.Enum):
    """The state of a call whose caller has stopped waiting; the value is what the caller is told."""

    CONTINUE = "Nothing was cancelled: it is still under way, and is done at most once. Wait on"
    """It changes something: it goes on, and takes effect once."""
    RETRY = "Nothing was changed. Call it again"
    """It changes nothing, or nothing more when it is made again: it is given up."""
    RESUME = "It still stands. Call it again to wait on"
    """All ranks make it together: the k-th of one rank meets the k-th of another. It goes on, and the same
    call made again is this one."""


@dataclass_transform(frozen_default=True)
def frozen(cls: type[T]) -> type[T]:
    """Make a dataclass of a class of calls; it is frozen for type checkers, and not when it runs.

    A frozen dataclass sets each field by a call of ``object.__setattr__``.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


@frozen
class Call(abc.ABC):
    """A call of the script, of one store."""

    title: ClassVar[str]
    """The name that its user knows."""
    on_timeout: ClassVar[OnTimeout] = OnTimeout.CONTINUE
    creates: ClassVar[bool] = False
    """One rank changes values by it, other than by a push."""

    store: str
    """Name of the store."""

    @abc.abstractmethod
    def run(self, store: WorkerStore, values: Values) -> Operation:
        """Return the operation, whose result is the call's.

        Args:
            store: the store that the call is of.
            values: those of :meth:`values`.
        """

    def values(self) -> tuple[torch.Tensor, ...]:
        """Return the caller's tensors, which the operation reads."""
        return ()

    def is_creating(self, rank: int) -> bool:
        """Whether ``rank`` changes values by this call, other than by a push."""
        return self.creates and rank == 0

    def is_redundant(self, store: WorkerStore) -> bool:
        """Whether all that it creates is there already, so that it changes nothing."""
        return False

    def returns_early(self, store: WorkerStore) -> bool:
        """Whether the caller goes on as soon as its values are copied, and hears of errors later."""
        return False


@frozen
class PushCall(Call):
    """A call that pushes to ``keys``."""

    keys: tuple[str, ...]


@frozen
class ReadCall(Call):
    """A call that reads ``keys`` after this rank's own pushes, and changes nothing."""

    on_timeout = OnTimeout.RETRY

    keys: tuple[str, ...]


def bulk(
    store: WorkerStore, share: ChunkSlice, message: Load | Push, rows: Rows, priority: Priority = 0
) -> Request:
    """Return the request that carries the elements of ``share``, as they are."""
    fill = partial(share.gather, rows, store.memory)
    return Request(share.server, message, fill, share.payload_bytes, share.chunk, share.highest(priority))


def number_push(
    store: WorkerStore, names: tuple[str, ...], empty: EmptyPush | None = None
) -> Generator[Step, list[Packet], tuple[TransferPlan, list[int], list[int]]]:
    """Number a push of ``names``, and wait until the window has room for it.

    ``empty`` as in :func:`numbered`.

    Returns:
        The plan of the keys, and for each the number of this push and that after the one before it. If its
        requests are refused, the plan is to be told (:meth:`TransferPlan.refuse`).

    Raises:
        ConfigError: if this rank has joined: rounds close without it.
    """
    if store.is_away:
        _demand_presence(store)
    if store.beginning.asks and not store.placed.issuperset(names):
        return (yield from _number_first_push(store, names, empty))
    plan = store.plans.get(names) or store.plan(names)
    apart = plan.apart()
    if any(map(_is_refused, apart)):
        yield from numbered(store, names, empty)
        apart = plan.apart()
    if len(apart) == 1:
        numbers, sinces = [apart[0].number] * len(plan.keys), [apart[0].since] * len(plan.keys)
    else:
        numbers, sinces = [key.number for key in plan.keys], [key.since for key in plan.keys]
    full: list[Key] = []
    for progress in apart:
        if progress.number - progress.applied >= WINDOW:
            full += [key for key in plan.keys if key.progress is progress]
        progress.number = progress.since = progress.number + 1
    if full:
        try:
            yield from _make_room(store, full)
            _demand_presence(store)
        except KvpsError:
            plan.refuse()
            raise
    return plan, numbers, sinces


def demand_numbered_rounds(store: WorkerStore) -> None:
    """Refuse a push of rows in a store in which late pushes count later.

    Raises:
        ConfigError: if this is one.
    """
    if store.opened.late == "next":
        raise ConfigError(
            f"store {store.name!r} counts late pushes in the next round (late='next'), which only pushes of "
            "whole keys can do; create it with late='drop' to push rows"
        )


def _demand_presence(store: WorkerStore) -> None:
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
    store: WorkerStore, names: tuple[str, ...], empty: EmptyPush | None = None
) -> Generator[Step, list[Packet], TransferPlan]:
    """Return the plan of ``names``, whose push numbers can be relied on.

    The number of a push that was refused is free again, so it has to be asked which are owed. ``empty`` makes
    pushes of nothing, by which an added rank begins with one round everywhere; None for those of whole keys.
    """
    plan = store.plans.get(names) or store.plan(names)
    joint = plan.joint()
    if any(map(_is_refused, plan.keys)) if joint is None else joint.is_refused:
        read = yield from read_versions(store, plan, ANY, ANY)
        found = read.by_key()
        begun: dict[str, int] = {}
        if store.begins_alike:
            begun = yield from begin_alike(store, plan, found, empty or push_nothing)
        for key, parts in zip(plan.keys, found, strict=True):
            if key.is_refused:  # and no other call has asked meanwhile
                # Of a rank that takes no part yet, rounds close until it does.
                key.is_refused, key.since = not store.has_entered, 0
                owed = min((owed for _, owed in parts.values()), default=0)
                key.number = begun.get(key.name, owed)
    return plan


def push_nothing(store: WorkerStore, key: Key, piece: PieceLocation, number: int) -> Request:
    """Return a push of zeros; of no rows to an embedding table."""
    dtype = BY_NAME[key.spec.dtype]
    if key.name.startswith(EMBEDDING):
        groups = (TableGroup(dtype.id, key.spec.width, 1),)
        table = PushTables((store.rank,), groups, (TablePart(piece.chunk, number, 0),))
        return Request(piece.server, table, lane=piece.chunk)
    runs = (Run(piece.start, piece.size, number),)
    message = Push(piece.chunk, dtype.id, (store.rank,), LIGHT, False, runs)
    zeros = torch.zeros(piece.size, dtype=TORCH[dtype.name])
    return Request(piece.server, message, lambda _: (zeros,), lane=piece.chunk)


def begin_alike(
    store: WorkerStore, plan: TransferPlan, found: Sequence[Parts], empty: EmptyPush
) -> Generator[Step, list[Packet], dict[str, int]]:
    """Return by key the number with which this rank begins; none of keys with which it has begun before.

    The servers hear one after the other that an added worker takes part, and rounds close meanwhile. So some
    parts are rounds ahead of others when all wait for it. The worker begins with the round of the foremost,
    and pushes nothing in the rounds before. From there on its pushes count on all parts of all keys.

    Args:
        store: one in which this rank takes part.
        plan: of keys that it pushes together.
        found: the version of each part of each key, and the number that the rank owes there.
        empty: makes a push of nothing.
    """
    new = [
        (key, parts)
        for key, parts in zip(plan.keys, found, strict=True)
        if key.is_refused and key.name not in store.begun
    ]
    ahead = {key.name: max((owed for _, owed in parts.values()), default=0) for key, parts in new}
    first = max(ahead.values(), default=0)
    # A key that is far behind is not pushed in each step.
    begun = {name: first if first - owed < WINDOW else owed for name, owed in ahead.items()}
    yield [
        empty(store, key, piece, number)
        for key, parts in new
        for piece, (_, owed) in parts.items()
        for number in range(owed, begun[key.name])
    ]
    store.begun |= begun.keys()
    return begun


def _number_first_push(
    store: WorkerStore, names: tuple[str, ...], empty: EmptyPush | None
) -> Generator[Step, list[Packet], tuple[TransferPlan, list[int], list[int]]]:
    """As :func:`number_push`, in a replacement that did not ask which push of ``names`` it owes.

    A table goes on at the step at which the script was told to begin. Other pushes are numbered in the order
    of the calls: the script may make those of its predecessor again. If it does not, the log says what to do.
    """
    beginning = store.beginning
    new = tuple(name for name in names if name not in store.placed)
    if beginning.step and names[0].startswith(EMBEDDING):
        owed = yield from _owed(store, new)
        for key in store.plan(new).keys:
            late = owed[key.name] - key.number
            if late > 0 and key.name not in store.placed:  # and no other call has asked meanwhile
                key.number, key.since = key.number + beginning.number(late), 0
        store.placed.update(names)
        return (yield from number_push(store, names, empty))
    store.placed.update(names)
    plan, numbers, sinces = yield from number_push(store, names, empty)
    try:
        owed = yield from _owed(store, new)
    except KvpsError:
        plan.refuse()
        raise
    before = dict(zip(names, numbers, strict=True))
    dropped = {name: owed[name] - before[name] for name in new if owed[name] > before[name]}
    if dropped and not beginning.is_told:
        beginning.is_told, beginning.asks = True, beginning.step > 0
        keys, most = [name.removeprefix(EMBEDDING) for name in dropped], max(dropped.values())
        text = (
            f"this worker replaces a lost worker. Servers drop up to {most} of its next pushes of "
            f"{names_in_words(keys)} of store {store.name!r}, since the lost worker has made as many. "
            "Unless the script makes the same again, have it call resume() of that store with these keys"
        )
        beginning.outbox.append(Note("warning", text))
    return plan, numbers, sinces


def _owed(store: WorkerStore, names: tuple[str, ...]) -> Generator[Step, list[Packet], dict[str, int]]:
    """Return for each key the lowest number of a push that this rank owes on any part."""
    read = yield from read_versions(store, store.plan(names), ANY, ANY)
    found = zip(names, read.by_key(), strict=True)
    return {name: min((owed for _, owed in parts.values()), default=0) for name, parts in found}


def _make_room(store: WorkerStore, full: list[Key]) -> Steps:
    """Wait until fewer than :data:`WINDOW` pushes of each of these keys are under way."""
    if store.ordered:
        plan = store.plan(tuple(key.name for key in full))
        yield from read_versions(store, plan, ANY, alike([key.number - WINDOW for key in full]))
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
        yield from read_versions(store, plan, plan.numbers(), ANY)
