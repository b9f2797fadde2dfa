"""The operations that make keys: opening a store, init(), broadcast(), lookup."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from typing import NamedTuple

from kvps.core.placement import home
from kvps.core.worker import calls
from kvps.core.worker import plan as plans
from kvps.core.worker.connection import Request
from kvps.core.worker.consistent_read import (
    Rows,
    Step,
    loaded,
    read,
)
from kvps.core.worker.operations.base import Conversation, Values, bulk, settle
from kvps.core.worker.operations.collective import BROADCAST, barrier
from kvps.core.worker.plan import (
    Key,
    PieceLocation,
    alike,
    make,
)
from kvps.core.worker.store import WorkerStore
from kvps.dtypes import BY_ID, BY_NAME, Spec
from kvps.errors import REFUSED, Mismatch
from kvps.phrases import some_of
from kvps.protocol.envelope import ENTRIES_MAX, Packet
from kvps.protocol.stores import (
    Declare,
    Declared,
    Entry,
    Find,
    FoundAll,
)
from kvps.protocol.values import Load

RELAYED_LEAST_BYTES = 256 << 10
"""From here on the values of a broadcast are read while they are loaded."""


PARTS, PART_LEAST_BYTES = 32, 64 << 10
"""Into about how many parts they are cut, and the least that one has. A part goes on its way to the others
when a server has all of it, so a broadcast takes one part longer than the way there alone: little of the
whole, however slow the links are, and a few messages where they are fast."""


class Declaration(NamedTuple):
    """What the servers answered to DECLARE."""

    fresh: list[list[PieceLocation]]
    """Of each key the pieces that must be loaded."""
    placed: list[list[PieceLocation]]
    """Of each key all pieces."""
    stamps: dict[int, int]
    """Of each server; others, once a value was begun anew."""


def open_store(book: WorkerStore, call: calls.OpenStore) -> Conversation:
    """Tell every server of the store; they compare its options."""
    yield [Request(server, call.opened) for server in range(book.servers)]
    book.opened, book.worker_grace_s = call.opened, call.worker_grace_s
    return None


def init(book: WorkerStore, call: calls.Init, rows: Values) -> Conversation:
    """Declare the keys that are new here, and load their values if this rank creates them."""
    new: list[int] = []
    for index, (name, spec) in enumerate(call.keys):
        known = book.keys.get(name)
        if known is None:
            new.append(index)
        elif known.spec != spec:
            raise Mismatch(
                f"key {name!r} of store {book.opened.store!r} is {known.spec} and cannot be "
                f"initialised as {spec}; broadcast() replaces a key"
            )
    rows[:] = [rows[index] for index in new]
    keys = [call.keys[index] for index in new]
    yield from _create(book, keys, rows, [0] * len(new), call.creator)
    return None


def broadcast(book: WorkerStore, call: calls.Broadcast, rows: Values) -> Conversation:
    """Replace the keys by rank 0's values and hand these to all.

    All meet before it, so that rank 0 replaces no value that another rank has still to read; and
    after it where a push of one rank may move the values before another has read them.

    Where there is much, the others read while rank 0 loads, and rank 0 reads nothing that it has loaded.
    Its place may be taken meanwhile by a process that loads other values: whoever finds at the end that
    it was so reads again.
    """
    names = tuple(name for name, _ in call.keys)
    meetings, made = book.barriers.get(BROADCAST, 0), book.broadcasts
    met = 0
    try:
        known = {name: book.keys[name] for name in names if name in book.keys}
        yield from settle(book, tuple(known))
        yield from barrier(book, BROADCAST, _shown(call.keys))
        met = 1
        numbers = [known[name].broadcasts + 1 if name in known else 1 for name in names]
        book.broadcasts += 1
        is_read = yield from _relay(book, call, rows, numbers)
        if not is_read:
            yield from read(book, book.plan(names), Rows(call.sinks), 0, 0, 0)
        if not book.ordered:
            yield from barrier(book, BROADCAST)
    except BaseException as error:
        # What was refused was so to all, and they meet for the next. Else, made again, it is the same one.
        book.barriers[BROADCAST] = meetings + (met if isinstance(error, REFUSED) else 0)
        book.broadcasts = made
        raise
    for name, number in zip(names, numbers, strict=True):
        book.keys[name].broadcasts = number
    return None


def _shown(keys: Sequence[tuple[str, Spec]]) -> str:
    """Return what a broadcast is of, in words; other words for other keys."""
    words = [f"{name!r} {spec}" for name, spec in keys]
    digest = hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]
    return f"broadcast() of {some_of([shown[:80] for shown in words], 3)} [{digest}]"


def _relay(
    book: WorkerStore, call: calls.Broadcast, rows: Values, numbers: Sequence[int]
) -> Generator[Step, list[Packet], bool]:
    """Give the keys the values of rank 0; return whether these are where the caller wants them."""
    total = sum(spec.count * BY_NAME[spec.dtype].itemsize for _, spec in call.keys)
    if total < RELAYED_LEAST_BYTES or not book.coding.rules.are_off:  # by steps, or soon done
        yield from _create(book, call.keys, rows, numbers)
        return False
    most = max(PART_LEAST_BYTES, total // PARTS)
    if book.rank == 0:
        made = yield from _create(book, call.keys, rows, numbers, most_bytes=most)
        if made.fresh != made.placed:
            return False  # some are those of a predecessor
        for sink, row in zip(call.sinks, rows, strict=True):
            sink.copy_(row)
        return True
    begun = yield from _declare(book, call.keys, numbers, create=False, early=True)
    stubs = [Key(*key, tuple(held)) for key, held in zip(call.keys, begun.placed, strict=True)]
    requests: list[Request] = []
    for number in sorted(set(numbers)):
        indices = [index for index, one in enumerate(numbers) if one == number]
        plan = plans.cut(make([stubs[index] for index in indices], book.rank), most)
        into = Rows([call.sinks[index] for index in indices])
        requests += loaded(book, plan, number, begun.stamps, into)
    made = yield from _create(book, call.keys, rows, numbers, beside=requests)
    return made.stamps == begun.stamps


def _create(
    book: WorkerStore,
    keys: Sequence[tuple[str, Spec]],
    rows: Values,
    numbers: Sequence[int],
    creator: int = 0,
    *,
    most_bytes: int | None = None,
    beside: Sequence[Request] = (),
) -> Generator[Step, list[Packet], Declaration]:
    """Declare ``keys``, each for its call number, and make the requests ``beside`` that; their creator
    loads those that are fresh, in requests of at most so many bytes."""
    create = book.rank == creator
    if not create:
        rows.clear()
    made = yield from _declare(book, keys, numbers, create, creator, beside=beside)
    if create:
        stubs = [Key(*key, tuple(held)) for key, held in zip(keys, made.fresh, strict=True)]
        plan = make(stubs)
        if most_bytes is not None:
            plan = plans.cut(plan, most_bytes)
        yield [
            bulk(
                book,
                share,
                Load(share.chunk, BY_NAME[share.dtype].id, share.runs(alike(numbers))),
                rows,
            )
            for share in plan.shares
        ]
    book.place((name, spec, held) for (name, spec), held in zip(keys, made.placed, strict=True))
    return made


def _declare(
    book: WorkerStore,
    keys: Sequence[tuple[str, Spec]],
    numbers: Sequence[int],
    create: bool,
    creator: int = 0,
    *,
    early: bool = False,
    beside: Sequence[Request] = (),
) -> Generator[Step, list[Packet], Declaration]:
    """Return where keys lie, once they have their values; ``early`` as soon as they have a place."""
    batches: dict[tuple[int, int], list[tuple[int, Entry]]] = {}
    for index, (name, spec) in enumerate(keys):
        dtype = BY_NAME[spec.dtype].id
        for part in book.parts(name, spec):
            entry = Entry(name, dtype, spec.shape, part.start, part.size)
            batches.setdefault((part.server, numbers[index]), []).append((index, entry))
    requests: list[Request] = []
    asked: list[tuple[int, list[tuple[int, Entry]]]] = []
    for (server, number), batch in sorted(batches.items()):
        for begin in range(0, len(batch), ENTRIES_MAX):
            slice_ = batch[begin : begin + ENTRIES_MAX]
            entries = tuple(entry for _, entry in slice_)
            refused = max(book.attempts.count(entry.key, number) for entry in entries)
            message = Declare(book.opened.store, create, number, entries, creator, refused, early)
            requests.append(Request(server, message))
            asked.append((server, slice_))
    try:
        answers = yield [*requests, *beside]
    except REFUSED:
        for (name, _), number in zip(keys, numbers, strict=True):
            book.attempts.refuse(name, number)
        raise
    fresh: list[list[PieceLocation]] = [[] for _ in keys]
    placed: list[list[PieceLocation]] = [[] for _ in keys]
    stamps: dict[int, int] = {}
    for (server, batch), answer in zip(asked, answers[: len(asked)], strict=True):
        assert isinstance(answer.message, Declared)
        stamps[server] = max(stamps.get(server, 0), answer.message.stamp)
        for (index, entry), place in zip(batch, answer.message.places, strict=True):
            offset = entry.start
            for piece in place.pieces:
                held = PieceLocation(server, piece.chunk, piece.start, piece.size, offset)
                placed[index].append(held)
                if place.fresh:
                    fresh[index].append(held)
                offset += piece.size
    return Declaration(fresh, placed, stamps)


def lookup(
    book: WorkerStore, names: tuple[str, ...]
) -> Generator[Step, list[Packet], dict[str, Spec | None]]:
    """Learn the specs and places of ``names`` from the servers that answer for them."""
    by_home: dict[int, list[str]] = {}
    for name in names:
        if name not in book.keys:
            by_home.setdefault(home(name, book.servers), []).append(name)
    batches = [
        (server, tuple(batch[begin : begin + ENTRIES_MAX]))
        for server, batch in sorted(by_home.items())
        for begin in range(0, len(batch), ENTRIES_MAX)
    ]
    answers = yield [Request(server, Find(book.opened.store, batch)) for server, batch in batches]
    found: list[tuple[str, Spec]] = []
    made: dict[str, int] = {}
    for (_, batch), answer in zip(batches, answers, strict=True):
        assert isinstance(answer.message, FoundAll)
        for name, one in zip(batch, answer.message.found, strict=True):
            if one.dtype:
                found.append((name, Spec(BY_ID[one.dtype].name, one.shape)))
                made[name] = one.call
    declared = yield from _declare(book, found, [0] * len(found), create=False)
    book.place(
        (name, spec, held) for (name, spec), held in zip(found, declared.placed, strict=True)
    )
    for name, call in made.items():
        book.keys[name].broadcasts = call
    return {name: book.keys[name].spec if name in book.keys else None for name in names}
