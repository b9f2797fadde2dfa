"""Resharding: a cut laid out for another number of servers, or by another rule of placement.

The snapshots of all servers are taken apart and put together again as
:func:`~kvps.core.placement.parts` says for the new number. What the old layout was need not be known:
a snapshot says where each of its portions lies. Portions are cut where a boundary runs
through them, and never joined: each piece is a view of the old tensor and keeps its history.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

import torch

from kvps.core.embedding.published import tensors_of
from kvps.core.embedding.spec import WEIGHT
from kvps.core.embedding.stored import loaded
from kvps.core.placement import EMBEDDING, RULE, Part, parts
from kvps.core.server.options import AGREED
from kvps.core.server.snapshot.model import (
    JoinsSnapshot,
    KeySnapshot,
    Snapshot,
    SnapshotPart,
    SpanHistory,
    StoreSnapshot,
    TableSnapshot,
)
from kvps.errors import StorageError
from kvps.tensors import TORCH

_COUNTED = (
    *("hyper", "sent_hyper", "sent_lr"),
    *("optimize_calls", "rate_calls", "optimize_after", "rate_after"),
)
"""The fields of a store that are alike on every server."""


def regroup(snapshots: Sequence[Snapshot], server: int, servers: int, rule: int = RULE) -> Snapshot:
    """Return what server ``server`` of ``servers`` holds of the values in ``snapshots``.

    Args:
        snapshots: of all servers of one cut, in any order.
        server, servers: whose snapshot is wanted.
        rule: the rule of placement by which they were laid out.

    Raises:
        StorageError: if a snapshot is missing, they disagree about a store, or the elements of a key
            are not all there or are there twice.

    Example::

        regroup([image_0_of_2, image_1_of_2], server=0, servers=1)  # all of it
    """
    stores = gathered(snapshots)
    if servers == len(snapshots) and rule == RULE:
        return next(snapshot for snapshot in snapshots if snapshot.server == server)
    return Snapshot(server, servers, tuple(_share(store, server, servers) for store in stores))


def merged(snapshots: Sequence[Snapshot], store: str) -> dict[str, torch.Tensor]:
    """Return the weights of one store, whole and in their shapes, and the rows of its tables.

    A key that lies in one piece is not copied.

    Raises:
        StorageError: as :func:`regroup`, or if there is no such store.
    """
    stores = gathered(snapshots)
    for saved in stores:
        if saved.name == store:
            weights = {key.name: _whole(key) for key in saved.keys}
            for table in saved.tables:
                weights |= tensors_of(table.key.removeprefix(EMBEDDING), _rows(table), table.recipe)
            return weights
    names = ", ".join(repr(saved.name) for saved in stores) or "none"
    raise StorageError(f"there is no store {store!r} in this checkpoint; there is {names}")


def _rows(table: TableSnapshot) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for part in table.parts:
        has_row = part.stamps > 0
        rows = torch.cat([*map(loaded, part.columns[WEIGHT])]) if len(has_row) else torch.empty(0)
        yield part.ids[has_row], rows[has_row]


def gathered(snapshots: Sequence[Snapshot]) -> tuple[StoreSnapshot, ...]:
    """Return the stores of a cut, each with all elements of all its keys.

    Raises:
        StorageError: as :func:`regroup`.
    """
    in_order = sorted(snapshots, key=attrgetter("server"))
    expected = [(server, len(snapshots)) for server in range(len(snapshots))]
    if not snapshots or [(snapshot.server, snapshot.servers) for snapshot in in_order] != expected:
        found = ", ".join(f"{snapshot.server} of {snapshot.servers}" for snapshot in in_order) or "none"
        raise StorageError(f"one snapshot of each server is needed; these are of servers {found}")
    by_name: dict[str, list[tuple[int, StoreSnapshot]]] = {}
    for snapshot in in_order:
        for store in snapshot.stores:
            by_name.setdefault(store.name, []).append((snapshot.server, store))
    return tuple(_gathered_store(some) for some in by_name.values())


def demand_own(snapshot: Snapshot) -> None:
    """Check that ``snapshot`` holds of each of its keys what belongs on its server, no more, no less.

    Raises:
        StorageError: naming the key and its elements.
    """
    for store in snapshot.stores:
        for key in store.keys:
            own = _parts(store, key, snapshot.server, snapshot.servers)
            if not own:
                raise StorageError(
                    f"key {key.name!r} of store {store.name!r} does not belong on server "
                    f"{snapshot.server} of {snapshot.servers}"
                )
            _demand_all(store, key, [(part.start, part.start + part.size) for part in own])


def _gathered_store(some: Sequence[tuple[int, StoreSnapshot]]) -> StoreSnapshot:
    (first_server, first), *others = some
    keys: dict[str, KeySnapshot] = {key.name: key for key in first.keys}
    for server, store in others:
        pairs = [(name, first.opened, store.opened) for name in AGREED]
        for name, left, right in (*pairs, *((name, first, store) for name in _COUNTED)):
            here, there = getattr(left, name), getattr(right, name)
            if here != there:
                raise StorageError(
                    f"store {first.name!r}: {name} is {here} on server {first_server} and {there} "
                    f"on server {server}; these snapshots are not of one cut"
                )
        for key in store.keys:
            known = keys.get(key.name)
            keys[key.name] = key if known is None else _both(first, known, key)
    for key in keys.values():
        _demand_all(first, key, [(0, key.spec.count)])
    return replace(
        first,
        keys=tuple(keys.values()),
        joins=_joined([store.joins for _, store in some]),
        tables=_gathered_tables([store for _, store in some]),
    )


def _gathered_tables(some: Sequence[StoreSnapshot]) -> tuple[TableSnapshot, ...]:
    """Return each table with the rows of all servers; a server takes those that are its own.

    Rows move between servers with one history for all. At a cut they agree, unless a worker was lost in
    the middle of a push; then the push counts as made: its rows are not updated twice.
    """
    tables: dict[str, TableSnapshot] = {}
    for store in some:
        for table in store.tables:
            known = tables.get(table.key)
            if known is None:
                tables[table.key] = table
                continue
            if difference := known.recipe.difference(table.recipe):
                raise StorageError(
                    f"table {table.key!r} of store {store.name!r} has another {difference} on another "
                    "server; these snapshots are not of one cut"
                )
            history = _later(known.history, table.history)
            tables[table.key] = replace(known, history=history, parts=known.parts + table.parts)
    return tuple(tables.values())


def _later(mine: SpanHistory, other: SpanHistory) -> SpanHistory:
    def highest(left: dict[int, int], right: dict[int, int]) -> dict[int, int]:
        return {rank: max(left.get(rank, 0), right.get(rank, 0)) for rank in left | right}

    return SpanHistory(
        max(mine.version, other.version),
        max(mine.step, other.step),
        highest(mine.pushed, other.pushed),
        highest(mine.head_start, other.head_start),
        highest(mine.clock_from, other.clock_from),
    )


def _joined(some: Sequence[JoinsSnapshot]) -> JoinsSnapshot:
    """Return the joins as the server has them that has heard most of them."""
    newest = max(some, key=attrgetter("over"))
    made = {
        rank: max(tracker.made.get(rank, 0) for tracker in some) for tracker in some for rank in tracker.made
    }
    return newest._replace(made=made)


def _both(store: StoreSnapshot, left: KeySnapshot, other: KeySnapshot) -> KeySnapshot:
    if (left.spec, left.call) != (other.spec, other.call):
        raise StorageError(
            f"key {left.name!r} of store {store.name!r} is {left.spec} after call {left.call} on one "
            f"server, {other.spec} after call {other.call} on another; these are not of one cut"
        )
    portions = sorted((*left.portions, *other.portions), key=attrgetter("start"))
    return replace(left, portions=tuple(portions))


def _demand_all(store: StoreSnapshot, key: KeySnapshot, runs: Sequence[tuple[int, int]]) -> None:
    """Check that the portions of ``key`` are the elements of ``runs``, (start, stop), each once."""
    left, at = list(reversed(key.portions)), 0
    for start, stop in runs:
        at = start
        while left and left[-1].start == at and (at < stop or stop == runs[-1][1]):
            at += left.pop().weight.numel()
        if at != stop:
            break
    if at == stop and not left:
        return
    portion = left[-1] if left else None
    what = f"key {key.name!r} of store {store.name!r}: "
    if portion is not None and portion.start < at:
        raise StorageError(f"{what}element {portion.start} is there twice or where it must not be")
    end = stop if portion is None else min(portion.start, max(stop, at))
    if end < at:
        raise StorageError(f"{what}elements {end} to {at - 1} are where they must not be")
    raise StorageError(f"{what}elements {at} to {end - 1} are missing")


def _share(store: StoreSnapshot, server: int, servers: int) -> StoreSnapshot:
    """Return the part of a whole store that belongs on one server."""
    keys = []
    for key in store.keys:
        own = _parts(store, key, server, servers)
        if own:
            portions = [portion for part in own for portion in _within(key.portions, part)]
            keys.append(replace(key, portions=tuple(portions)))
    return replace(store, keys=tuple(keys))


def _parts(store: StoreSnapshot, key: KeySnapshot, server: int, servers: int) -> list[Part]:
    bound = store.opened.bigarray_bound
    placed = parts(key.name, key.spec.count, servers, bound, key.spec.width)
    return [part for part in placed if part.server == server]


def _within(portions: Iterable[SnapshotPart], part: Part) -> Iterator[SnapshotPart]:
    """Yield what of ``portions`` lies in ``part``, cut where its boundaries run through them."""
    for portion in portions:
        count = portion.weight.numel()
        start = max(portion.start, part.start)
        stop = min(portion.start + count, part.start + part.size)
        if start == portion.start and stop == portion.start + count:
            yield portion
        elif start < stop:
            inside = slice(start - portion.start, stop - portion.start)
            state = {name: tensor[inside] for name, tensor in portion.state.items()}
            yield SnapshotPart(start, portion.history, portion.weight[inside], state)


def _whole(key: KeySnapshot) -> torch.Tensor:
    weights = [portion.weight for portion in key.portions]
    if len(weights) == 1:
        return weights[0].view(key.spec.shape)
    nothing = torch.empty(0, dtype=TORCH[key.spec.dtype])
    return torch.cat([nothing, *weights]).view(key.spec.shape)
