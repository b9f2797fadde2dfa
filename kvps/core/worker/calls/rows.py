"""The calls on rows of keys: one request to each server that holds some of them.

A request names a key, and not a chunk, so that there is one for each server, however many chunks
the key lies in there. Every server is told of every push, even if it has none of the rows: a round
closes when every rank has pushed, and a version counts the rounds of the whole key. A pull asks
only the servers that have some of the rows.

A key whose rows are not whole on some server (:func:`~kvps.core.placement.lies_by_rows`) is pushed
and pulled as a whole, as if the caller had made it dense.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kvps import protocol as p
from kvps.core.row_gradients import add_rows
from kvps.core.worker.calls.base import (
    Operation,
    PushCall,
    ReadCall,
    Values,
    demand_numbered_rounds,
    frozen,
    number_push,
    numbered,
)
from kvps.core.worker.calls.refresh import read_whole
from kvps.core.worker.connection import Request
from kvps.core.worker.consistent_read import settle_reads
from kvps.core.worker.plan import Key, PieceLocation, Priority, make, of_key
from kvps.core.worker.row_reads import Range, RowRead, ServerPart, ranges
from kvps.core.worker.store import WorkerStore
from kvps.dtypes import BY_NAME
from kvps.errors import ConfigError, KvpsError, ProtocolError
from kvps.tensors import TORCH, Memory, from_frame


@frozen
class PushKeyRows(PushCall):
    """Push some rows of keys of two or more dimensions."""

    title = "push()"

    rows: tuple[torch.Tensor, ...]
    """Three tensors for each key: the numbers of rows, int64 [k], ascending, each once and in the
    key; the index of each of these rows in the third; and rows, [at least k, width]."""
    priority: Priority
    eager: bool
    """As in PushValues."""

    def values(self) -> tuple[torch.Tensor, ...]:
        """Return three tensors for each key."""
        return self.rows

    def returns_early(self, store: WorkerStore) -> bool:
        """Whether the caller goes on as soon as its values are copied; as for PushValues."""
        return self.eager and store.takes_pushes

    def run(self, store: WorkerStore, values: Values) -> Operation:
        demand_numbered_rounds(store)
        for index, name in enumerate(self.keys):
            key = store.key(name)
            for _, ids, _ in _split(ranges(key), values[3 * index]):
                _demand_room(key, len(ids))
        plan, numbers, _ = yield from number_push(store, self.keys, push_no_rows)
        requests: list[Request] = []
        try:
            for index, (key, number) in enumerate(zip(plan.keys, numbers, strict=True)):
                rows = values[3 * index : 3 * index + 3]
                pushed = _pushes(store, key, number, *rows) or _whole_pushes(store, key, number, *rows)
                for request in pushed:
                    request.priority = of_key(self.priority, index)
                    if self.eager:
                        request.freeze()
                requests += pushed
            yield requests
        except KvpsError:
            plan.refuse()
            raise
        store.was_pushed_to = True
        return None


def push_no_rows(store: WorkerStore, key: Key, piece: PieceLocation, number: int) -> Request:
    """Return a push of no rows to the part of a key that lies on the server of a piece."""
    dtype = BY_NAME[key.spec.dtype]
    message = p.PushRows(store.name, key.name, dtype.id, (store.rank,), number, key.spec.width, 0)
    return Request(piece.server, message, lane=piece.chunk)


def _pushes(
    store: WorkerStore, key: Key, number: int, ids: torch.Tensor, places: torch.Tensor, rows: torch.Tensor
) -> list[Request]:
    """Return the requests that push rows to each server of ``key``; none if some row is cut over servers."""
    dtype, width = BY_NAME[key.spec.dtype], key.spec.width
    requests = []
    for rows_of, own, some in _split(ranges(key), ids):
        count = len(own)
        message = p.PushRows(store.name, key.name, dtype.id, (store.rank,), number, width, count)
        requests.append(
            Request(
                rows_of.server,
                message,
                fill=partial(_gather, store.memory, own, places[some], rows, dtype.name),
                payload_bytes=max(1, count * (8 + width * dtype.itemsize)),
                lane=rows_of.lane,
            )
        )
    return requests


def _split(
    places: Sequence[Range], ids: torch.Tensor
) -> Iterator[tuple[Range, torch.Tensor, slice | torch.Tensor]]:
    """Yield each server's rows, those of the sorted ``ids`` that are among them, and where these are."""
    edges = torch.tensor([run for place in places for run in place.rows.runs]).view(-1, 2)
    cuts = iter(torch.searchsorted(ids, edges).tolist())
    for place in places:
        slices = [slice(*next(cuts)) for _ in place.rows.runs]
        if len(slices) == 1:
            yield place, ids[slices[0]], slices[0]
        else:
            some = torch.cat([torch.arange(run.start, run.stop) for run in slices])
            yield place, ids[some], some


def _demand_room(key: Key, count: int) -> None:
    """Check that so many rows fit into one packet.

    Raises:
        ConfigError: if they do not.
    """
    most = p.rows_in_message(BY_NAME[key.spec.dtype].id, key.spec.width)
    if count > most:
        raise ConfigError(
            f"key {key.name!r}: {count} rows for one server, and a message holds {most}. Push or "
            "pull fewer at once, or a dense value; nothing was changed"
        )


def _gather(
    memory: Memory, ids: torch.Tensor, places: torch.Tensor, rows: torch.Tensor, dtype: str, route: str
) -> tuple[torch.Tensor, ...]:
    """Return the payload of a push: numbers and rows, in one block that the server can read."""
    if not len(ids):
        return ()
    head, width = 8 * len(ids), rows.shape[1]
    block = memory.empty(head + len(ids) * width * BY_NAME[dtype].itemsize, "uint8")
    numbers, flat = block[:head].view(torch.int64), block[head:].view(TORCH[dtype])
    numbers.copy_(ids)
    torch.index_select(rows, 0, places, out=flat.view(-1, width))
    each = p.rows_in_frame(BY_NAME[dtype].id, width) * width
    return (numbers, *torch.split(flat, each))


def _whole_pushes(
    store: WorkerStore, key: Key, number: int, ids: torch.Tensor, places: torch.Tensor, rows: torch.Tensor
) -> list[Request]:
    """Return the requests that push rows as a gradient of all elements of ``key``."""
    dense = torch.zeros(key.spec.shape[0], key.spec.width, dtype=TORCH[key.spec.dtype])
    add_rows(dense, ids, rows.index_select(0, places))
    return [
        Request(
            share.server,
            p.Push(share.chunk, BY_NAME[share.dtype].id, (store.rank,), 1.0, False, share.runs((number,))),
            fill=partial(share.gather, [dense.view(key.spec.shape)], store.memory),
            payload_bytes=share.payload_bytes,
            lane=share.chunk,
        )
        for share in make([key], store.rank).shares
    ]


# --- pulling --------------------------------------------------------------------------------------


@dataclass(slots=True)
class NamedRows(ServerPart):
    """Rows that the caller named."""

    ids: torch.Tensor
    out: torch.Tensor
    """The result, [rows of all servers, width]."""
    places: torch.Tensor
    """Index of each row there."""

    @property
    def payload(self) -> tuple[torch.Tensor, ...]:
        """Their numbers."""
        return (self.ids,)

    def message(self, store: str, after: int, least: int) -> p.PullRows:
        """Return the message that asks for these rows."""
        _demand_room(self.key, len(self.ids))
        return p.PullRows(store, self.key.name, after, least, len(self.ids))

    def take(self, answer: p.PulledRows | p.Changed, payload: Sequence[memoryview]) -> None:
        """Copy the rows to the result."""
        if answer.count != len(self.ids):
            raise ProtocolError(
                f"server {self.range.server} answered {answer.count} rows of key {self.key.name!r}; "
                f"{len(self.ids)} were requested"
            )
        spec, at = self.key.spec, 0
        for frame in payload:
            values = from_frame(frame, spec.dtype).view(-1, spec.width)
            self.out.index_copy_(0, self.places[at : at + len(values)], values)
            at += len(values)


@frozen
class PullKeyRows(ReadCall):
    """Pull some rows of each key after this rank's own pushes; finishes with a tensor [k, width] for each."""

    title = "row_sparse_pull()"

    ids: tuple[torch.Tensor, ...]
    """Row numbers of each key, int64 [k], ascending, each once and in the key."""
    places: tuple[torch.Tensor, ...]
    """Index in the result of each of these rows, int64 [k] for each key, each once."""
    priority: Priority

    def run(self, store: WorkerStore, values: Values) -> Operation:
        plan = yield from numbered(store, self.keys)
        results: list[torch.Tensor] = []
        reads: list[RowRead[NamedRows]] = []
        for index, (key, ids) in enumerate(zip(plan.keys, self.ids, strict=True)):
            out = torch.empty(len(ids), key.spec.width, dtype=TORCH[key.spec.dtype])
            results.append(out)
            read: RowRead[NamedRows] = RowRead(key, key.number, of_key(self.priority, index))
            for rows, own, some in _split(ranges(key), ids):
                if len(own):
                    read.parts.append(NamedRows(key, rows, own, out, self.places[index][some]))
            if read.parts:
                reads.append(read)
            elif len(ids):
                (dense,), _ = yield from read_whole(store, [read], [None])
                whole = dense.view(-1, key.spec.width)
                out.index_copy_(0, self.places[index], whole.index_select(0, ids))
        yield [request for read in reads for request in read.asked(store)]
        yield from settle_reads(store, reads)
        return results
