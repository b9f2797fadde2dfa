"""The calls on embedding tables: one request to each server, for all tables of the call.

A table is a key with one piece on every server, so its pushes are numbered, waited for and counted
anew as those of any key. The caller has sorted ids already and split them by server
(:mod:`kvps.core.embedding.id_split`): a push is one message to each, even if it has no ids for it. Large
ones are several, each of some of the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvps import protocol as p
from kvps.core.embedding.id_hash import Ids
from kvps.core.embedding.id_split import Share
from kvps.core.embedding.packed import SCALE_BYTES, unpacked
from kvps.core.embedding.spec import EmbeddingSpec, message_of, spec_of
from kvps.core.embedding.table import ExportBatch
from kvps.core.worker.calls.base import (
    Call,
    OnTimeout,
    Operation,
    PushCall,
    ReadCall,
    Values,
    demand_numbered_rounds,
    frozen,
    number_push,
    numbered,
    settle,
)
from kvps.core.worker.connection import Request
from kvps.core.worker.plan import Key, PieceLocation, Progress
from kvps.core.worker.store import WorkerStore
from kvps.dtypes import BY_ID, BY_NAME
from kvps.errors import KvpsError, Mismatch, ProtocolError
from kvps.protocol.envelope import Packet, maker
from kvps.tensors import TORCH, Memory, by_row, from_frame

PULL_BYTES = 4 << 20
"""About how many bytes one answer to a pull has; larger pulls have several answers."""
PUSH_BYTES_MAX = 64 << 20
"""Most bytes of one push of a table to one server: it has one number, so it is in one message."""
TABLES_MAX = 1024
GROUPS_MAX = 60
"""Most tables of one message, and most groups of them: each has a frame."""

_part = maker(p.TablePart)
_version, _owed = attrgetter("version"), attrgetter("owed")
Places = slice | npt.NDArray[np.int64]


class Group(NamedTuple):
    """Neighbouring tables of a call whose rows have one type and width."""

    dtype: str
    dim: int
    first: int
    """Index of its first table."""
    stop: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.dim * BY_NAME[self.dtype].itemsize


class Block(NamedTuple):
    """The part of a share that one message has: neighbouring ids, of neighbouring tables."""

    first: int
    """Index of its first table."""
    stop: int
    begin: int
    """Index of its first id."""
    end: int


def blocks(share: Share, groups: tuple[Group, ...], limit: int, *, is_whole: bool) -> Iterator[Block]:
    """Yield the parts of a share whose rows have about ``limit`` bytes; each table is in one at least.

    Args:
        share: the ids.
        groups: the groups of their tables.
        limit: bytes of rows.
        is_whole: whether all ids of a table must be in one.
    """
    edges, tables = share.edges, len(share.edges) - 1
    size = sum([group.row_bytes * (edges[group.stop] - edges[group.first]) for group in groups])
    if size <= limit and tables <= TABLES_MAX and len(groups) <= GROUPS_MAX:
        yield Block(0, tables, 0, edges[-1])
        return
    first = stop = start = size = first_group = 0
    for index, group in enumerate(groups):
        for table in range(group.first, group.stop):
            low, high = edges[table : table + 2]
            step = max(1, high - low if is_whole else limit // group.row_bytes)
            for begin in range(low, max(high, low + 1), step):
                cost = group.row_bytes * (min(begin + step, high) - begin)
                is_full = table - first == TABLES_MAX or index - first_group == GROUPS_MAX
                if first < stop and (is_full or size + cost > limit):
                    yield Block(first, stop, start, begin)
                    first, start, size, first_group = table, begin, 0, index
                stop, size = table + 1, size + cost
    yield Block(first, stop, start, edges[-1])


class Draft(NamedTuple):
    """The contents of one message to a server about some tables."""

    server: int
    block: Block
    ids: Ids
    """The ids of all parts."""
    parts: tuple[p.TablePart, ...]
    named: tuple[p.TableGroup, ...]
    """The groups of the parts."""
    ranges: list[tuple[int, Places, int]]
    """For each of these, its index, the indices of its rows here among all of its rows, and their number."""


def _drafts(
    shares: Sequence[Share],
    groups: tuple[Group, ...],
    keys: Sequence[Key],
    numbers: Sequence[int],
    limit: int,
    *,
    is_whole: bool,
) -> Iterator[Draft]:
    """Yield the contents of the messages; see :func:`blocks`."""
    for server, share in enumerate(shares):
        chunks = [key.pieces[server].chunk for key in keys]
        for block in blocks(share, groups, limit, is_whole=is_whole):
            first, stop, begin, end = block
            cuts = [begin, *share.edges[first + 1 : stop], end]
            sizes = [high - low for low, high in pairwise(cuts)]
            parts = tuple(map(_part, zip(chunks[first:stop], numbers[first:stop], sizes, strict=True)))
            named, ranges = [], []
            for index, group in enumerate(groups):
                low, high = max(group.first, first), min(group.stop, stop)
                if low < high:
                    named.append(p.TableGroup(BY_NAME[group.dtype].id, group.dim, high - low))
                    lowest = share.edges[group.first]
                    places = share.places[index][cuts[low - first] - lowest : cuts[high - first] - lowest]
                    some = slice(places.start, places.stop) if isinstance(places, range) else places
                    ranges.append((index, some, len(places)))
            yield Draft(server, block, share.ids[begin:end], parts, tuple(named), ranges)


@frozen
class MakeTable(Call):
    """Have every server make the table of ``key``, unless it has."""

    title = "embedding()"
    creates = True

    key: str
    recipe: EmbeddingSpec
    creator: int
    """The rank that calls; the first call of any rank makes it."""

    def is_creating(self, rank: int) -> bool:
        """Whether ``rank`` changes values by this call."""
        return rank == self.creator

    def is_redundant(self, store: WorkerStore) -> bool:
        """Whether the table is there already."""
        return self.key in store.keys

    def run(self, store: WorkerStore, values: Values) -> Operation:
        answers = yield store.everywhere(message_of(store.name, self.key, self.recipe))
        pieces = []
        for server, answer in enumerate(answers):
            assert isinstance(answer.message, p.Declared)
            (place,) = answer.message.places
            (piece,) = place.pieces
            pieces.append(PieceLocation(server, piece.chunk, piece.start, piece.size, server))
        store.place([(self.key, spec_of(store.servers), pieces)])
        return None


@frozen
class PushTableRows(PushCall):
    """Push rows of the tables ``keys``: to each server its own, also where there are none."""

    title = "push() of rows"

    eager: bool
    """The caller goes on as soon as the push is under way."""
    groups: tuple[Group, ...]
    """The groups of the tables."""
    shares: tuple[Share, ...]
    """The ids of each server."""
    rows: tuple[torch.Tensor, ...]
    """The rows [n, dim] of each group; unchanged until the call ends."""

    def returns_early(self, store: WorkerStore) -> bool:
        """Whether the caller goes on at once; a table has an optimizer of its own."""
        return self.eager

    def run(self, store: WorkerStore, values: Values) -> Operation:
        demand_numbered_rounds(store)
        plan, numbers, _ = yield from number_push(store, self.keys)
        drafts = _drafts(self.shares, self.groups, plan.keys, numbers, PUSH_BYTES_MAX, is_whole=True)
        try:
            yield [self._push(store, draft) for draft in drafts]
        except KvpsError:
            plan.refuse()
            raise
        return None

    def _push(self, store: WorkerStore, draft: Draft) -> Request:
        pieces = [(self.rows[index], places, count) for index, places, count in draft.ranges if count]
        message = p.PushTables((store.rank,), draft.named, draft.parts)
        # An empty push counts, too: over 0, it is never dropped.
        size = max(1, sum(message.payload_sizes()))
        fill = partial(_fill, store.memory, draft.ids, pieces)
        return Request(draft.server, message, fill=fill, payload_bytes=size, lane=message.chunk)


def _fill(
    memory: Memory, ids: Ids, pieces: Sequence[tuple[torch.Tensor, Places, int]], route: str
) -> tuple[torch.Tensor, ...]:
    """Return the payload of a push, in one block that the server can read."""
    if not len(ids):
        return ()
    sizes = [count * rows.shape[1] * rows.element_size() for rows, _, count in pieces]
    ends = accumulate([-(-size // 8) * 8 for size in (ids.nbytes, *sizes)])  # whole numbers of 64 bits
    begins = [0, *ends]
    block = memory.empty(begins[-1], "uint8")
    payload = [block[: ids.nbytes].view(torch.int64)]
    payload[0].numpy()[:] = ids
    for (rows, places, count), begin, size in zip(pieces, begins[1:], sizes, strict=False):
        values = block[begin : begin + size]
        payload.append(values.view(rows.dtype))
        by_row(values.view(count, -1))[:] = by_row(rows)[places]
    return tuple(payload)


def check_size(names: Sequence[str], groups: tuple[Group, ...], share: Share, server: int) -> None:
    """Check that a server's share of a push of each table fits in a message.

    Raises:
        Mismatch: if one does not.
    """
    for group in groups:
        row_bytes = group.row_bytes
        for at, (begin, end) in enumerate(pairwise(share.edges[group.first : group.stop + 1]), group.first):
            if (size := (end - begin) * row_bytes) > PUSH_BYTES_MAX:
                raise Mismatch(
                    f"table {names[at]!r}: {size} bytes of a push are for server {server}, "
                    f"and one push has {PUSH_BYTES_MAX} at most for each; push half as many rows at once"
                )


@frozen
class PullTableRows(ReadCall):
    """Pull rows of the tables ``keys``, after this rank's own pushes.

    Finishes with the rows of each group, [n, dim].
    """

    title = "pull() of rows"

    groups: tuple[Group, ...]
    """The groups of the tables."""
    shares: tuple[Share, ...]
    """The ids of each server."""
    packed: bool = False
    """Rows travel as a scale and an int8 for each element."""

    def run(self, store: WorkerStore, values: Values) -> Operation:
        plan = yield from numbered(store, self.keys)
        numbers = [key.number for key in plan.keys]
        rows = []
        for index, group in enumerate(self.groups):
            size = sum([len(share.places[index]) for share in self.shares])
            rows.append(torch.empty((size, group.dim), dtype=TORCH[group.dtype]))
        sinks = [by_row(some) for some in rows]
        stands: list[list[p.TableStand]] = [[] for _ in numbers]
        drafts = _drafts(self.shares, self.groups, plan.keys, numbers, PULL_BYTES, is_whole=False)
        yield [self._pull(draft, sinks, stands) for draft in drafts]
        counted = _version if store.ordered else _owed
        found = [(min(map(counted, some)), max(map(_version, some))) for some in stands]
        joint = plan.joint() if len(set(found)) == 1 else None
        moved: Sequence[Key | Progress] = plan.keys if joint is None else (joint,)
        for key, (applied, version) in zip(moved, found, strict=False):
            key.applied = max(key.applied, applied)
            key.version = max(key.version, version)
        return rows

    def _pull(
        self, draft: Draft, sinks: list[npt.NDArray[np.void]], stands: list[list[p.TableStand]]
    ) -> Request:
        server, block, ids, parts, named, ranges = draft
        counts = tuple([count for _, _, count in ranges])
        if self.packed:
            kind = BY_NAME["uint8"].id
            named = tuple([p.TableGroup(kind, SCALE_BYTES + dim, count) for _, dim, count in named])

        def take(packet: Packet, wanted: bool) -> None:
            answer = packet.message
            assert isinstance(answer, p.PulledTables)
            if (answer.groups, answer.counts, len(answer.stands)) != (named, counts, len(parts)):
                raise ProtocolError(
                    f"server {server} answered {answer.counts!s:.60} rows of {answer.groups!s:.200}; asked "
                    f"for were {counts!s:.60} of {named!s:.200}"
                )
            for known, stand in zip(stands[block.first : block.stop], answer.stands, strict=True):
                known.append(stand)
            frames = iter(packet.payload)
            for index, places, count in ranges if wanted else ():
                if not count:
                    continue
                frame = next(frames)
                if self.packed:
                    octets = from_frame(frame, "uint8").view(count, -1)
                    values = by_row(unpacked(octets, TORCH[self.groups[index].dtype]))
                else:
                    values = np.frombuffer(frame, sinks[index].dtype)
                sinks[index][places] = values

        payload = (torch.from_numpy(ids),) if len(ids) else ()
        return Request(
            server, p.PullTables(parts, self.packed), lane=parts[0].chunk, on_reply=take, payload=payload
        )


@frozen
class SetTableRate(Call):
    """Set the learning rate of a table (rank 0), when this rank's pushes so far are applied.

    In a synchronous store no later round has closed by then, and none does before this rank's next push.
    """

    title = "set_learning_rate() of a table"
    creates = True

    key: str
    lr: float

    def run(self, store: WorkerStore, values: Values) -> Operation:
        key = store.key(self.key)
        yield from settle(store, (key.name,))
        yield [Request(held.server, p.TableRate(held.chunk, self.lr)) for held in key.pieces]
        return None


@frozen
class ExportBlock(Call):
    """Read some rows of a table that one server has; finishes with an ExportBatch."""

    title = "export()"
    on_timeout = OnTimeout.RETRY

    key: str
    server: int
    dim: int
    start: int
    count: int
    since: int
    with_state: bool

    def run(self, store: WorkerStore, values: Values) -> Operation:
        held = store.key(self.key).pieces[self.server]
        message = p.Export(held.chunk, self.start, self.count, self.since, self.with_state)
        (answer,) = yield [Request(held.server, message, lane=held.chunk)]
        exported = answer.message
        assert isinstance(exported, p.Exported)
        frames = iter(answer.payload)
        ids, stamps = [_numbers(frames) for _ in range(2)]
        columns = {}
        for column in exported.fields:
            dtype = BY_ID[column.dtype].name
            flat = from_frame(next(frames) if exported.count else memoryview(b""), dtype)
            width = column.size // exported.count if exported.count else self.dim  # some states have one
            columns[column.name] = flat.view(exported.count, width)
        return ExportBatch(ids, stamps, columns, exported.next)


def _numbers(frames: Iterator[memoryview]) -> Ids:
    frame = next(frames, None)
    return np.empty(0, np.int64) if frame is None else from_frame(frame, "int64").numpy()
