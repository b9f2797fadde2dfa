"""The calls that make keys: opening a store, init(), broadcast(), lookup."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

import torch

from kvps import protocol as p
from kvps.core.membership_client import EXIT_CONFIG
from kvps.core.placement import Part, home
from kvps.core.worker import plan as plans
from kvps.core.worker.calls.base import Call, OnTimeout, Operation, Values, bulk, frozen, settle
from kvps.core.worker.calls.collective import BROADCAST, barrier
from kvps.core.worker.connection import Request
from kvps.core.worker.consistent_read import Step, loaded, read
from kvps.core.worker.plan import ANY, Key, PieceLocation, alike, make
from kvps.core.worker.store import WorkerStore
from kvps.dtypes import BY_ID, BY_NAME, Spec
from kvps.errors import REFUSED, ConfigError, Mismatch
from kvps.phrases import some_of
from kvps.protocol.envelope import ENTRIES_MAX, Packet

RELAYED_LEAST_BYTES = 256 << 10
"""Least bytes of a broadcast whose values are read while they are loaded."""
PARTS, PART_LEAST_BYTES = 32, 64 << 10
"""About how many parts such values are cut into, and the least bytes of a part. A server passes a
part on when it has all of it, so a broadcast takes one part longer than the way to the servers
alone: a small share of the whole, however slow the links are, and a few messages where they are fast."""


class Declaration(NamedTuple):
    """The answers of the servers to DECLARE."""

    fresh: list[list[PieceLocation]]
    """Pieces of each key that must be loaded."""
    placed: list[list[PieceLocation]]
    """All pieces of each key."""
    stamps: dict[int, int]
    """Server -> its stamp, which changes when a value is begun anew."""


class _Asked(NamedTuple):
    """A key of a DECLARE to one server."""

    at: int
    """Index of the key in the call."""
    entry: p.Entry
    runs: Sequence[Part]
    """The parts of it that belong on the server, in order."""


@frozen
class OpenStore(Call):
    """Make the store known to every server; they compare its options.

    Finishes with the number of lives of the store that the others have behind them, and this
    process has not seen.
    """

    title = "create()"

    opened: p.Open
    worker_grace_s: float
    timeout_s: float = math.inf

    def run(self, store: WorkerStore, values: Values) -> Operation:
        opened = replace(self.opened, life=store.opened.life)
        try:
            answers = yield store.everywhere(opened)
        except ConfigError as error:
            error.exit_code = EXIT_CONFIG  # a process that is started again would be refused, too
            raise
        lives = [answer.message.life for answer in answers if isinstance(answer.message, p.Opened)]
        store.opened = replace(opened, life=max([opened.life, *lives]))
        store.worker_grace_s, store.timeout_s = self.worker_grace_s, self.timeout_s
        return store.opened.life - opened.life


@frozen
class Init(Call):
    """Create keys (the creator), or wait until they are there (other ranks). ``rows`` are
    contiguous values."""

    title = "init()"
    creates = True

    keys: tuple[tuple[str, Spec], ...]
    rows: tuple[torch.Tensor, ...]
    creator: int = 0
    """The rank whose values count."""

    def values(self) -> tuple[torch.Tensor, ...]:
        """Return the values of the keys."""
        return self.rows

    def is_creating(self, rank: int) -> bool:
        """Whether ``rank`` changes values by this call."""
        return rank == self.creator

    def is_redundant(self, store: WorkerStore) -> bool:
        """Whether all keys are there already."""
        return all(name in store.keys for name, _ in self.keys)

    def run(self, store: WorkerStore, values: Values) -> Operation:
        """Return the operation: declare the keys that are new here, and load them if this rank
        creates them."""
        new: list[int] = []
        for index, (name, spec) in enumerate(self.keys):
            known = store.keys.get(name)
            if known is None:
                new.append(index)
            elif known.spec != spec:
                raise Mismatch(
                    f"key {name!r} of store {store.name!r} is {known.spec} and cannot be "
                    f"initialised as {spec}; broadcast() replaces a key"
                )
        values[:] = [values[index] for index in new]
        keys = [self.keys[index] for index in new]
        yield from _create(store, keys, values, [0] * len(new), self.creator)
        return None


@frozen
class Broadcast(Call):
    """Replace the keys by rank 0's values, and write these into the ``sinks`` of every rank.

    All ranks meet before it, so that rank 0 replaces no value that another rank has still to read; and
    after it where a push of one rank may move the values before another has read them.

    Where there is much, the others read while rank 0 loads, and rank 0 reads nothing that it has loaded.
    Its place may be taken meanwhile by a process that loads other values: a rank that finds at the end that
    it was so reads again.
    """

    title = "broadcast()"
    on_timeout = OnTimeout.RETRY
    creates = True

    keys: tuple[tuple[str, Spec], ...]
    rows: tuple[torch.Tensor, ...]
    sinks: tuple[torch.Tensor, ...]

    def values(self) -> tuple[torch.Tensor, ...]:
        """Return this rank's values of the keys."""
        return self.rows

    def run(self, store: WorkerStore, values: Values) -> Operation:
        names = tuple(name for name, _ in self.keys)
        meetings, made = store.barriers.get(BROADCAST, 0), store.broadcasts
        met = 0
        try:
            known = {name: store.keys[name] for name in names if name in store.keys}
            yield from settle(store, tuple(known))
            yield from barrier(store, BROADCAST, _shown(self.keys))
            met = 1
            numbers = [known[name].broadcasts + 1 if name in known else 1 for name in names]
            store.broadcasts += 1
            is_read = yield from _relay(store, self, values, numbers)
            if not is_read:
                # An update that was dropped before this broadcast is none of its values.
                yield from read(store, store.plan(names), self.sinks, ANY, ANY, 0, tells=False)
            if not store.ordered:
                yield from barrier(store, BROADCAST)
        except BaseException as error:
            # What was refused was so to all, and they meet for the next. Else, made again, it is
            # the same one.
            store.barriers[BROADCAST] = meetings + (met if isinstance(error, REFUSED) else 0)
            store.broadcasts = made
            raise
        for name, number in zip(names, numbers, strict=True):
            store.keys[name].broadcasts = number
        return None


def _shown(keys: Sequence[tuple[str, Spec]]) -> str:
    """Return the keys of a broadcast in words; other words for other keys."""
    words = [f"{name!r} {spec}" for name, spec in keys]
    digest = hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]
    return f"broadcast() of {some_of([word[:80] for word in words], 3)} [{digest}]"


def _relay(
    store: WorkerStore, call: Broadcast, rows: Values, numbers: Sequence[int]
) -> Generator[Step, list[Packet], bool]:
    """Give the keys the values of rank 0; return whether the sinks have these values."""
    total = sum(spec.count * BY_NAME[spec.dtype].itemsize for _, spec in call.keys)
    if total < RELAYED_LEAST_BYTES or store.feedback.is_on:  # by steps, or soon done
        yield from _create(store, call.keys, rows, numbers)
        return False
    most = max(PART_LEAST_BYTES, total // PARTS)
    if store.rank == 0:
        made = yield from _create(store, call.keys, rows, numbers, most_bytes=most)
        if made.fresh != made.placed:
            return False  # some are those of a predecessor
        for sink, row in zip(call.sinks, rows, strict=True):
            sink.copy_(row)
        return True
    begun = yield from _declare(store, call.keys, numbers, create=False, early=True)
    stubs = [Key(*key, tuple(held)) for key, held in zip(call.keys, begun.placed, strict=True)]
    requests: list[Request] = []
    for number in sorted(set(numbers)):
        indices = [index for index, own in enumerate(numbers) if own == number]
        plan = plans.cut(make([stubs[index] for index in indices], store.rank), most)
        into = [call.sinks[index] for index in indices]
        requests += loaded(store, plan, number, begun.stamps, into)
    made = yield from _create(store, call.keys, rows, numbers, beside=requests)
    return made.stamps == begun.stamps


def _create(
    store: WorkerStore,
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
    create = store.rank == creator
    if not create:
        rows.clear()
    made = yield from _declare(store, keys, numbers, create, creator, beside=beside)
    if create:
        stubs = [Key(*key, tuple(held)) for key, held in zip(keys, made.fresh, strict=True)]
        plan = make(stubs)
        if most_bytes is not None:
            plan = plans.cut(plan, most_bytes)
        if store.kept is not None:
            known = [(store.keys.get(name), spec) for name, spec in keys]
            versions = [key.number if key is not None and key.spec == spec else 0 for key, spec in known]
            store.kept.keep_loaded(plan, rows, versions, store.broadcasts)
        yield [
            bulk(store, share, p.Load(share.chunk, BY_NAME[share.dtype].id, share.runs(alike(numbers))), rows)
            for share in plan.shares
        ]
    store.place((name, spec, held) for (name, spec), held in zip(keys, made.placed, strict=True))
    return made


def _declare(
    store: WorkerStore,
    keys: Sequence[tuple[str, Spec]],
    numbers: Sequence[int],
    create: bool,
    creator: int = 0,
    *,
    early: bool = False,
    beside: Sequence[Request] = (),
) -> Generator[Step, list[Packet], Declaration]:
    """Return where keys lie, once they have their values; ``early`` as soon as they have a place."""
    batches: dict[tuple[int, int], list[_Asked]] = {}
    for index, (name, spec) in enumerate(keys):
        dtype = BY_NAME[spec.dtype].id
        for server, runs in _by_server(store.parts(name, spec)).items():
            size = sum([part.size for part in runs])
            entry = p.Entry(name, dtype, spec.shape, runs[0].start, size)
            batches.setdefault((server, numbers[index]), []).append(_Asked(index, entry, runs))
        for server in _left_by(store, name, spec) if create else ():
            entry = p.Entry(name, dtype, spec.shape, 0, 0)
            batches.setdefault((server, numbers[index]), []).append(_Asked(index, entry, ()))
    requests: list[Request] = []
    asked: list[tuple[int, list[_Asked]]] = []
    for (server, number), batch in sorted(batches.items()):
        for begin in range(0, len(batch), ENTRIES_MAX):
            slice_ = batch[begin : begin + ENTRIES_MAX]
            entries = tuple(wanted.entry for wanted in slice_)
            refused = max(store.attempts.count(entry.key, number) for entry in entries)
            message = p.Declare(store.name, create, number, entries, creator, refused, early)
            requests.append(Request(server, message))
            asked.append((server, slice_))
    try:
        answers = yield [*requests, *beside]
    except REFUSED:
        for (name, _), number in zip(keys, numbers, strict=True):
            store.attempts.refuse(name, number)
        raise
    fresh: list[list[PieceLocation]] = [[] for _ in keys]
    placed: list[list[PieceLocation]] = [[] for _ in keys]
    stamps: dict[int, int] = {}
    for (server, batch), answer in zip(asked, answers[: len(asked)], strict=True):
        assert isinstance(answer.message, p.Declared)
        stamps[server] = max(stamps.get(server, 0), answer.message.stamp)
        for wanted, place in zip(batch, answer.message.places, strict=True):
            held = _located(server, place.pieces, wanted.runs) if place.pieces else []
            placed[wanted.at] += held
            if place.fresh:
                fresh[wanted.at] += held
    for pieces in (*placed, *fresh):
        pieces.sort(key=attrgetter("offset"))
    return Declaration(fresh, placed, stamps)


def _by_server(parts: Iterable[Part]) -> dict[int, list[Part]]:
    """Return the parts of a key on each server, in order."""
    found: dict[int, list[Part]] = {}
    for part in parts:
        found.setdefault(part.server, []).append(part)
    return found


def _located(server: int, pieces: Iterable[p.Piece], parts: Sequence[Part]) -> list[PieceLocation]:
    """Return where the elements of ``parts`` lie, which ``pieces`` cover in order."""
    *later, part = reversed(parts)
    offset, located = part.start, []
    for piece in pieces:
        if later and offset == part.start + part.size:
            part = later.pop()
            offset = part.start
        located.append(PieceLocation(server, piece.chunk, piece.start, piece.size, offset))
        offset += piece.size
    return located


def _left_by(store: WorkerStore, name: str, spec: Spec) -> list[int]:
    """Return the servers that hold a part of a key's old value, and none of a new one that is ``spec``."""
    known = store.keys.get(name)
    if known is None or known.spec == spec:
        return []
    kept = {part.server for part in store.parts(name, spec)}
    return sorted({piece.server for piece in known.pieces} - kept)


def lookup(
    store: WorkerStore, names: tuple[str, ...]
) -> Generator[Step, list[Packet], dict[str, Spec | None]]:
    """Learn the specs and places of ``names`` from the servers that answer for them."""
    found = yield from find(store, [name for name in names if name not in store.keys])
    specs = [(name, spec) for name, (spec, _) in found.items()]
    declared = yield from _declare(store, specs, [0] * len(specs), create=False)
    store.place((name, spec, held) for (name, spec), held in zip(specs, declared.placed, strict=True))
    for name, (_, call) in found.items():
        store.keys[name].broadcasts = call
    return {name: store.keys[name].spec if name in store.keys else None for name in names}


def find(
    store: WorkerStore, names: Iterable[str]
) -> Generator[Step, list[Packet], dict[str, tuple[Spec, int]]]:
    """Return the specs of ``names``, and how often each was broadcast, as far as the servers have them."""
    by_home: dict[int, list[str]] = {}
    for name in names:
        by_home.setdefault(home(name, store.servers), []).append(name)
    batches = [
        (server, tuple(batch[begin : begin + ENTRIES_MAX]))
        for server, batch in sorted(by_home.items())
        for begin in range(0, len(batch), ENTRIES_MAX)
    ]
    answers = yield [Request(server, p.Find(store.name, batch)) for server, batch in batches]
    known: dict[str, tuple[Spec, int]] = {}
    for (_, batch), answer in zip(batches, answers, strict=True):
        assert isinstance(answer.message, p.FoundAll)
        for name, found in zip(batch, answer.message.found, strict=True):
            if found.dtype:
                known[name] = Spec(BY_ID[found.dtype].name, found.shape), found.call
    return known


@frozen
class Lookup(Call):
    """Learn what these keys are; finishes with their specs, None for an unknown one."""

    title = "the look-up of keys"
    on_timeout = OnTimeout.RETRY

    keys: tuple[str, ...]

    def run(self, store: WorkerStore, values: Values) -> Operation:
        return (yield from lookup(store, self.keys))
