"""Embedding tables on a server: declaration, pushes and pulls by id.

A table has one key, of which every server holds one element in a chunk of its own: how many rows of the table
are there. So the table has a span, and with it the history of any key: versions, numbers of pushes, rounds,
quorums, staleness, waiting requests. A gradient is one of rows, numbered by their ids; it moves the rows
(:class:`~kvps.core.embedding.table.EmbeddingRows`), and the element only counts them.

An id belongs to one server. Each server has its share of every push, also an empty one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, groupby, pairwise, repeat
from operator import attrgetter, itemgetter, mul
from typing import Any, NamedTuple

import numpy as np
import torch

from kvps.core.embedding.alike import AlikeTables, PushedRows
from kvps.core.embedding.id_hash import Ids, servers_of
from kvps.core.embedding.packed import SCALE_BYTES, packed
from kvps.core.embedding.spec import EmbeddingSpec, spec_of
from kvps.core.embedding.table import EmbeddingRows
from kvps.core.gradients import Part
from kvps.core.placement import EMBEDDING
from kvps.core.row_gradients import RowGradient
from kvps.core.server.chunks.rounds import PendingUpdate, Span
from kvps.core.server.chunks.slab import Chunk, Chunks, NamedTables
from kvps.core.server.rules.rule import Rule, Workshop
from kvps.core.server.store import ServerStore, Shard
from kvps.dtypes import BY_ID, BY_NAME, summed_in
from kvps.errors import ConfigError, Mismatch, ProtocolError
from kvps.protocol.envelope import maker
from kvps.protocol.stores import Field, Piece
from kvps.protocol.values import (
    Embed,
    Export,
    Exported,
    PulledTables,
    Push,
    PushTables,
    TableGroup,
    TablePart,
    TableStand,
)
from kvps.tensors import PRIVATE, accumulator, dtype_of, from_frame, to_frame

EXPORT_BYTES = 32 << 20
"""Maximum bytes of one frame in an answer to EXPORT."""
_terms_of = attrgetter(*[field.name for field in fields(Embed)[4:]])
"""Returns the fields of EMBED that follow the shape of a row."""


def recipe_of(message: Embed) -> EmbeddingSpec:
    """Return the specification that a peer sent, checked.

    Raises:
        ConfigError: naming what cannot be.
    """
    return EmbeddingSpec.of(message.dim, BY_ID[message.dtype].name, *_terms_of(message))


def embed(store: ServerStore, key: str, recipe: EmbeddingSpec, server: int, servers: int) -> Piece:
    """Create a table on this server, or find the existing table; return its place.

    Raises:
        Mismatch: if there is one by another recipe. ConfigError: if the store can have none.
        ProtocolError: if the key is none of a table's. In all these cases nothing is changed.
    """
    if not key.startswith(EMBEDDING):
        raise ProtocolError(f"key {key!r:.60}: the key of a table begins with {EMBEDDING!r}")
    if store.drops is not None:
        raise ConfigError(
            f"store {store.name!r} checks whether gradients are finite, which tables do not support; create "
            "a store with on_nonfinite='apply' for tables"
        )
    shard = store.shards.get(key)
    if shard is None:
        return _make(store, key, recipe, server, servers)
    (piece,) = shard.pieces
    there = store.chunk_at(piece).table.recipe
    if difference := there.difference(recipe):
        raise Mismatch(
            f"table {name_of(key)!r} of store {store.name!r} has {difference} "
            f"{there.arguments[difference]}, but {recipe.arguments.get(difference)} "
            f"was requested; give the same arguments on every worker"
        )
    return piece


def _make(store: ServerStore, key: str, recipe: EmbeddingSpec, server: int, servers: int) -> Piece:
    rows = EmbeddingRows(recipe, servers, store.tier)  # if it cannot be made, nothing was
    store.check_room({key: ("int64", 1)})
    (piece,) = store.slab("int64").place(key, 1, (1,))
    chunk = store.chunk_at(piece)
    chunk.embedding = rows
    chunk.writable().zero_()
    chunk.fill(piece.start)
    store.shards[key] = Shard(key, spec_of(servers), server, 1, (piece,), (server,), call=0)
    return piece


def name_of(key: str) -> str:
    """Return the user's name of the table of ``key``."""
    return key.removeprefix(EMBEDDING)


# --- pushes and pulls -------------------------------------------------------------------------------

ANSWER_BYTES = 64 << 20
"""Maximum bytes of the rows in one answer."""
_stand = maker(TableStand)
Pushed = tuple[Piece, RowGradient]


class PushedGroup(NamedTuple):
    """The part of one push for tables whose rows are one frame."""

    ids: Ids
    rows: torch.Tensor
    edges: tuple[int, ...]
    """Where the ids of each table begin, and how many there are."""

    def part(self, first: int, stop: int) -> PushedRows:
        """Return what it has for some neighbouring tables."""
        begin, end = self.edges[first], self.edges[stop]
        sizes = tuple([high - low for low, high in pairwise(self.edges[first : stop + 1])])
        return PushedRows(self.ids[begin:end], sizes, accumulator(self.rows[begin:end]))


class TableGradient(RowGradient):
    """A gradient of some rows of a table; in its chunk it stands for the table's one element.

    Its rows are a part of a group's, and most are never looked at by themselves.
    """

    __slots__ = ("at", "group")

    def __init__(self, group: PushedGroup, at: int) -> None:
        self.group = group
        self.at = at
        """Index of its table in the group."""

    def __len__(self) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        """Set the fields of a row gradient when one is asked for first."""
        if name not in RowGradient.__slots__:
            raise AttributeError(name)
        some = slice(*self.group.edges[self.at : self.at + 2])
        super().__init__(torch.from_numpy(self.group.ids[some]), self.group.rows[some], 1)
        return getattr(self, name)


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows of some embedding tables on a server, numbered by their ids, as a request names them."""

    tables: NamedTables
    pieces: tuple[Piece, ...]
    """The element of each table, which counts for all of its rows here."""
    parts: tuple[TablePart, ...]
    sizes: tuple[int, ...]
    """The number of ids of each part."""
    edges: tuple[int, ...]
    """For each part, the index of its first id in the request, and its number of ids."""
    server: int
    servers: int

    @classmethod
    def of(cls, chunks: Chunks, parts: tuple[TablePart, ...]) -> TableRows:
        """Return the tables that a request names.

        Raises:
            ProtocolError: if there is no such chunk, it holds keys, or the tables are of several stores.
        """
        numbers, _, sizes = zip(*parts, strict=True) if parts else ((), (), ())
        tables, edges = chunks.tables(numbers), tuple(accumulate(sizes, initial=0))
        return cls(tables, tables.pieces, parts, sizes, edges, chunks.server, chunks.servers)

    def spans(self, chunks: Chunks) -> list[Span]:
        """Return the span of each table."""
        return [chunk.spans[0] for chunk in self.tables.chunks]

    def ids(self, payload: Sequence[memoryview]) -> Ids:
        """Return the ids of a request.

        They are copied: their sender must not change them after the check.

        Raises:
            ProtocolError: if the rows of some are not on this server.
        """
        ids = np.array(np.frombuffer(payload[0] if payload else b"", np.int64))
        foreign = servers_of(ids, self.servers) != self.server
        if count := np.count_nonzero(foreign):
            raise ProtocolError(
                f"{count} of {len(ids)} ids belong on other servers than {self.server}, the first is "
                f"{ids[foreign][0]}"
            )
        return ids

    def gradients(self, message: PushTables, payload: Sequence[memoryview]) -> Iterator[Pushed]:
        """Return the piece of each table, and the gradient that was pushed for it, checked.

        Raises:
            Mismatch: for another element type or length of rows than a table's.
            ProtocolError: for ids that are not in order, or of another server; or for groups that are none.
        """
        self._check_groups(message)
        ids = self.ids(payload)
        self._check_order(ids)
        edges = self.edges
        frames = iter(payload[1:])
        gradients: list[RowGradient] = []
        for dtype, dim, parts in message.groups:
            first, stop = len(gradients), len(gradients) + parts
            begin, end = edges[first], edges[stop]
            frame = next(frames) if begin < end else memoryview(b"")
            rows = from_frame(frame, BY_ID[dtype].name).view(end - begin, dim)
            inside = tuple([edge - begin for edge in edges[first : stop + 1]])
            group = PushedGroup(ids[begin:end], rows, inside)
            gradients += map(TableGradient, repeat(group), range(parts))
        return zip(self.pieces, gradients, strict=True)

    def _check_groups(self, message: PushTables) -> None:
        """Check that the rows of each group are those of its tables, each of which is named once.

        Raises:
            Mismatch, ProtocolError: if they are not.
        """
        recipes, at = self.tables.recipes, 0
        for dtype, dim, parts in message.groups:
            name = BY_ID[dtype].name
            for recipe, part in zip(recipes[at : at + parts], self.parts[at:], strict=False):
                if (name != recipe.dtype and name != summed_in(recipe.dtype)) or dim != recipe.dim:
                    raise Mismatch(
                        f"chunk {part.chunk} is a table of {recipe.dtype}[{recipe.dim}], and the push has "
                        f"rows of {name}[{dim}]"
                    )
            at += parts
        if at != len(recipes) or len({part.chunk for part in self.parts}) != len(recipes):
            raise ProtocolError(
                f"a push has groups of {at} parts, and names {len(recipes)} tables, each of which is to be "
                "named once"
            )

    def _check_order(self, ids: Ids) -> None:
        """Check that the ids of each part ascend.

        Raises:
            ProtocolError: if they do not.
        """
        falls = ids[1:] <= ids[:-1]
        if len(self.parts) > 1:
            falls[[edge - 1 for edge in self.edges if 0 < edge < len(ids)]] = False
        if np.count_nonzero(falls):
            at = bisect_right(self.edges, int(falls.argmax())) - 1
            part = self.parts[at]
            raise ProtocolError(
                f"chunk {part.chunk}: the {part.size} ids of a push are not in ascending order, each once"
            )

    def asked(self, payload: Sequence[memoryview]) -> Ids:
        """Return the ids of a pull, checked as :meth:`ids` does.

        Raises:
            ProtocolError: also if their rows are more than an answer may have.
        """
        size = sum(map(mul, self.sizes, self.tables.row_bytes))
        if size > ANSWER_BYTES:
            raise ProtocolError(
                f"chunk {self.parts[0].chunk}: {self.edges[-1]} rows are {size} bytes, and the limit of "
                f"an answer is {ANSWER_BYTES}; ask for fewer rows at once"
            )
        return self.ids(payload)

    def read(
        self, chunks: Chunks, seq: int, rank: int, ids: Ids, *, packs: bool
    ) -> tuple[PulledTables, tuple[torch.Tensor, ...]]:
        """Return the answer to a pull of ``ids`` by ``rank``, and its frames, in memory that others read.

        With ``packs``, rows are packed.
        """
        edges, groups, counts, frames = self.edges, [], [], []
        for (dtype, dim), runs in self.tables.groups:
            first, last = runs[0][1], runs[-1][2]
            begin, end = edges[first], edges[last]
            kind = ("uint8", SCALE_BYTES + dim) if packs else (dtype, dim)
            groups.append(TableGroup(BY_NAME[kind[0]].id, kind[1], last - first))
            counts.append(end - begin)
            if begin < end:
                values = (PRIVATE if packs else chunks.memory).empty((end - begin) * dim, dtype)
                rows = values.view(end - begin, dim)
                for alike, start, stop in runs:
                    low, high = edges[start], edges[stop]
                    alike.pull(ids[low:high], self.sizes[start:stop], rows[low - begin : high - begin])
                if packs:
                    values = chunks.memory.empty((end - begin) * kind[1], "uint8")
                    values.view(end - begin, -1).copy_(packed(rows))
                frames.append(values)
        stands = [_stand((span.version, span.owed(rank))) for span in self.spans(chunks)]
        return PulledTables(seq, tuple(groups), tuple(counts), tuple(stands)), tuple(frames)


class Table(Rule):
    """The sum moves rows of an embedding table, together with the tables that move by the same message.

    An update waits in the workshop until all parts of the message are taken in: see :func:`move_tables`.
    """

    keeps_all = True

    def check(self, message: Push) -> None:
        """Refuse a push of whole keys."""
        raise ProtocolError(f"chunk {self.chunk.number} is an embedding table: push rows by PUSH-TABLES")

    def write(self, span: Span, due: PendingUpdate, norms: torch.Tensor | None = None) -> None:
        """Let an update wait for those of other tables, but not for a later one of this table."""
        if self.chunk.number in self.shop.tables:
            move_tables(self.shop)
        self.shop.tables[self.chunk.number] = self, due

    apply = write


def move_tables(shop: Workshop) -> None:
    """Move the tables whose updates wait, alike ones in one pass; then wake the reads that waited there."""
    waiting = list(shop.tables.values())
    shop.tables.clear()
    # Tables are updated in one pass if they agree in these numbers, too.
    terms = [(rule.chunk.spans[0].step, rule.chunk.table.lr, due.sum.divisor) for rule, due in waiting]
    for _, pairs in groupby(zip(terms, waiting, strict=True), itemgetter(0)):
        updates = [update for _, update in pairs]
        for alike, start, stop in shop.named(tuple([rule.chunk.number for rule, _ in updates])).runs:
            _move_alike(alike, updates[start:stop])
    for rule, _ in waiting:
        if rule.chunk.waiting:
            shop.wake(rule.chunk.woken(0, 1))


def _move_alike(alike: AlikeTables, run: list[tuple[Rule, PendingUpdate]]) -> None:
    """Update the rows of alike tables; the element of each becomes the number of its rows."""
    sums = [due.sum.parts for _, due in run]
    pushed = [
        _pushed([parts[at] if at < len(parts) else None for parts in sums])
        for at in range(max(map(len, sums)))
    ]
    spans, befores = [rule.chunk.spans[0] for rule, _ in run], [table.index.count for table in alike.tables]
    meter = run[0][0].shop.meter
    versions = [span.version + 1 for span in spans]
    alike.push(pushed, versions, spans[0].step + 1, run[0][1].sum.divisor, meter.now)
    grown = 0
    for (rule, _), span, table, before in zip(run, spans, alike.tables, befores, strict=True):
        span.step += 1
        span.version += 1
        if (count := table.index.count) != before:
            rule.chunk.writable()[span.start] = count
            grown += count - before
    run[0][0].store.grow(grown * alike.tables[0].arenas.counted_row_bytes)
    meter.moved(run[0][0].store.name, max(versions))


def _pushed(parts: Sequence[Part | None]) -> PushedRows:
    """Return a gradient of each table as one; None is one without rows."""
    first = parts[0]
    if isinstance(first, TableGradient):
        group, begin = first.group, first.at
        for at, part in enumerate(parts, begin):
            if not isinstance(part, TableGradient) or part.group is not group or part.at != at:
                break
        else:
            return group.part(begin, begin + len(parts))
    found = [part for part in parts if isinstance(part, RowGradient)]
    sizes = tuple([len(part.ids) if isinstance(part, RowGradient) else 0 for part in parts])
    ids, rows = torch.cat([part.ids for part in found]), torch.cat([part.rows for part in found])
    return PushedRows(ids.numpy(), sizes, accumulator(rows))


# --- exports ----------------------------------------------------------------------------------------


def exported(seq: int, chunk: Chunk, message: Export) -> tuple[Exported, tuple[memoryview, ...]]:
    """Return the answer to EXPORT, and its payload.

    Raises:
        ProtocolError: for no rows. ConfigError: if it is not known which rows were dropped since.
    """
    rows = chunk.table
    if not message.count:
        raise ProtocolError(f"chunk {chunk.number}: an export of no rows")
    limit = min(message.count, max(1, EXPORT_BYTES // (8 * rows.recipe.dim)))  # no element is longer
    known = rows.evicted.known_from(chunk.spans[0].version)
    if rows.recipe.evicts and 0 < message.since < known:
        raise ConfigError(
            f"table {name_of(chunk.keys[0])!r}: the ids that were evicted are known from version {known} on, "
            f"and {message.since} was given; make the copy anew by export()"
        )
    block = rows.block(message.start, limit, message.since, with_state=message.state)
    count = len(block.ids)
    columns = {name: column.reshape(-1) for name, column in block.columns.items()}
    fields = tuple([Field(name, dtype_of(column).id, column.numel()) for name, column in columns.items()])
    answer = Exported(seq, block.next, count, fields)
    if not count:
        return answer, ()
    heads = (torch.from_numpy(block.ids), torch.from_numpy(block.stamps))
    return answer, tuple([to_frame(tensor) for tensor in (*heads, *columns.values())])
